#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What could break: a call that a container or a file system refuses, or that falls short, makes a load fail, hang or
# deliver wrong bytes. Here each such refusal is made for real, by a seccomp filter or by a preloaded library, and a program that
# compares every byte is run under it. Then each allocation, mapping and thread start fails in turn: an error is allowed, a
# crash, a hang or wrong bytes are not.
#
#   test_storage_faults.sh STORAGE_FAULTS LIBTND_SHIM TND_DENY
set -u
program=$1 shim=$2 deny=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
file=$scratch/file
head -c 7340055 /dev/urandom >"$file"
sync "$file"
failures=0
LIMIT="timeout 60"

# expect STATUS TEXT COMMAND...: the exit status, and TEXT somewhere in what it prints
expect() {
	want=$1 text=$2
	shift 2
	"$@" >"$scratch/out" 2>&1
	got=$?
	if [ "$got" != "$want" ] || { [ -n "$text" ] && ! grep -qF -- "$text" "$scratch/out"; }; then
		echo "FAILED ($got, expected $want and '$text'): $*"
		cat "$scratch/out"
		failures=$((failures + 1))
	fi
}

with_shim() {
	spec=$1
	shift
	$LIMIT env TND_SHIM_FILES="$scratch/*" TND_SHIM="$spec" LD_PRELOAD="$shim" "$@"
}

# seccomp refuses
expect 0 "io_uring refused: Operation not permitted" $LIMIT "$deny" io_uring_setup -- "$program" "$file" auto auto
expect 0 "io_uring refused" $LIMIT "$deny" io_uring_setup=ENOSYS -- "$program" "$file" uring on
expect 0 "io_uring refused" $LIMIT "$deny" io_uring_enter=EPERM -- "$program" "$file" auto auto
expect 0 "O_DIRECT refused: Invalid argument" $LIMIT "$deny" openat=EINVAL:direct -- "$program" "$file" auto auto
expect 0 "direct=0" $LIMIT "$deny" openat=EINVAL:direct preadv2=EOPNOTSUPP:dontcache -- "$program" "$file" auto auto
expect 0 "cache=0" $LIMIT "$deny" cachestat=EPERM preadv2=EOPNOTSUPP:nowait -- "$program" "$file" auto auto
expect 0 "cache=" $LIMIT "$deny" cachestat=ENOSYS -- "$program" "$file" threads auto
expect 0 "engine=" $LIMIT "$deny" statx=ENOSYS -- "$program" "$file" auto on
expect 0 "engine=" $LIMIT "$deny" madvise=EINVAL:huge sched_setaffinity fadvise64=EINVAL -- "$program" "$file" auto on
expect 0 "direct=0" $LIMIT "$deny" io_uring_setup openat=EINVAL:direct cachestat=EPERM preadv2=ENOSYS -- "$program" "$file" auto auto

# calls fall short
for engine in uring threads; do
	for direct in auto on off; do
		expect 0 "engine=" with_shim "reads:short" "$program" "$file" $engine $direct
		expect 0 "engine=" with_shim "reads:eintr" "$program" "$file" $engine $direct
	done
	expect 0 "O_DIRECT read refused: Invalid argument" with_shim "reads:direct=EINVAL" "$program" "$file" threads on
	expect 0 "engine=" with_shim "uring_submit:EAGAIN@3x4" "$program" "$file" $engine on
	expect 0 "engine=" with_shim "uring_submit:EPERM@3" "$program" "$file" $engine on
done
expect 0 "O_DIRECT read failed: Input/output error" with_shim "reads:eio=3000000" "$program" "$file" threads on
expect 3 "Input/output error" with_shim "reads:EIO@3" "$program" "$file" threads on
expect 3 "ends before" with_shim "reads:eof=5000000" "$program" "$file" threads off
head -c 5001 "$file" >"$scratch/tiny"
expect 0 "engine=" with_shim "reads:byte" "$program" "$scratch/tiny" threads off
expect 0 "engine=" with_shim "reads:byte" "$program" "$scratch/tiny" threads on

# Each of them fails in turn, alone and with all that follow.
each() {
	for n in 1 2 3 4 5 6 7 8; do
		for engine in uring threads; do
			for times in "@${n}x1" "@$n"; do
				expect 0 "" $LIMIT env TND_SHIM="$1:$2$times" LD_PRELOAD="$shim" \
					"$program" "$file" $engine auto may-fail
			done
		done
	done
}
for call in malloc calloc strdup mmap madvise; do
	each $call ENOMEM
done
for call in open open.direct fcntl eventfd; do
	each $call EMFILE
done
each pthread_create EAGAIN
each posix_fadvise EINVAL
[ $failures = 0 ] && echo "all right"
exit $((failures != 0))
