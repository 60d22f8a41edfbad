# SPDX-License-Identifier: Apache-2.0
# A small front to meson: `make help` says what there is.
PREFIX ?= /usr/local
DESTDIR ?=
BUILD ?= build

.PHONY: all help deps demo check bench bench-channel install clean

all: $(BUILD)/build.ninja
	@ninja -C $(BUILD)

$(BUILD)/build.ninja:
	@meson setup $(BUILD) --buildtype=release -Dtests=false --prefix=$(PREFIX) >/dev/null

help:
	@echo "make          build the library and the command in $(BUILD)/ (release)"
	@echo "make deps     install what building and testing need (Debian packages; root or sudo)"
	@echo "make demo     from nothing to four ranks that load a real checkpoint"
	@echo "make check    the whole suite, sanitizer builds too; last line: N passed, N failed"
	@echo "make bench    the benchmarks; make bench-channel: of messages only"
	@echo "make install  PREFIX=$(PREFIX) DESTDIR=$(DESTDIR)"
	@echo "make clean    remove every build folder, test venv and the demo's files"

deps:
	@scripts/install-deps.sh check

demo:
	@scripts/demo.sh

check:
	@scripts/check.sh

bench:
	@scripts/install-deps.sh bench
	@[ -f build-bench/build.ninja ] || meson setup build-bench --buildtype=release -Dtests=false -Dbench=true >/dev/null
	@ninja -C build-bench
	@meson test -C build-bench --benchmark --no-rebuild --verbose

bench-channel:
	@[ -f build-bench/build.ninja ] || meson setup build-bench --buildtype=release -Dtests=false -Dbench=true >/dev/null
	@ninja -C build-bench bench/channel/bench-channel
	@python3 bench/channel.py --build build-bench/bench

install: all
	@meson configure $(BUILD) -Dprefix=$(PREFIX) >/dev/null
	@DESTDIR=$(DESTDIR) meson install -C $(BUILD) --quiet

clean:
	@rm -rf build build-check build-asan build-tsan build-msan build-bench .venv-test _demo
