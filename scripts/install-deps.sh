#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the Debian packages that building (`build`), the demo (`demo`), the benchmarks (`bench`) or the whole suite (`check`, the default) need.
# Does nothing when all are there; uses sudo when not root.
set -eu
cd "$(dirname "$0")/.."

build="make gcc libc6-dev meson ninja-build pkg-config libjansson-dev libxxhash-dev liburing-dev libssl-dev"
demo="$build python3 python3-venv ca-certificates"
bench="$demo fio libzmq3-dev"
check="$demo g++ clang libclang-rt-14-dev libcmocka-dev binutils git mandoc util-linux spin libzmq3-dev iproute2"

case "${1:-check}" in
build) wanted=$build ;;
demo) wanted=$demo ;;
bench) wanted=$bench ;;
check) wanted=$check ;;
*)
	echo "usage: install-deps.sh [build|demo|bench|check]" >&2
	exit 2
	;;
esac

missing=
for package in $wanted; do
	status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) || status=
	[ "$status" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

root=
if [ "$(id -u)" != 0 ]; then
	if ! command -v sudo >/dev/null; then
		echo "these packages are missing, and neither root nor sudo is here to install them:$missing" >&2
		exit 1
	fi
	root=sudo
fi
echo "== installing$missing" >&2
# A package source that cannot be reached does not matter if the packages can be had all the same.
$root env DEBIAN_FRONTEND=noninteractive apt-get -qq update >&2 || true
# shellcheck disable=SC2086 # a list of words
$root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $missing >/dev/null
