# SPDX-License-Identifier: Apache-2.0
# Sourced by the scripts beside it (POSIX sh). Expects to be run from the top of the tree.

say() {
	printf '%s\n' "== $*" >&2
}

# A python3 that can make virtual environments. Debian's own first: another one on PATH may lack ensurepip.
find_python() {
	for candidate in /usr/bin/python3 python3 python3.13 python3.12 python3.11; do
		if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
			2>/dev/null; then
			command -v "$candidate"
			return 0
		fi
	done
	echo "no python3 >= 3.11 with venv and ensurepip: install python3 and python3-venv" >&2
	return 1
}

# make_venv DIR REQUIREMENTS: idempotent; made anew when the list of requirements changed.
make_venv() {
	if [ -f "$1/installed" ] && cmp -s "$2" "$1/installed"; then
		return 0
	fi
	rm -rf "$1"
	venv_python=$(find_python) || return 1
	"$venv_python" -m venv "$1" || return 1
	"$1/bin/pip" install --quiet --disable-pip-version-check --requirement "$2" || return 1
	cp "$2" "$1/installed"
}

# Sanitizers that keep shadow memory at fixed addresses collide with strong address randomisation; containers may refuse
# to turn it off.
without_aslr() {
	if setarch -R true 2>/dev/null; then
		setarch -R "$@"
	else
		"$@"
	fi
}
