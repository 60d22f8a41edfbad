#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes .venv-bench, the Python environment of the benchmarks, with the peers in the versions of bench/requirements.txt.
# Does nothing when it is there and up to date. About 5 GB, most of it torch.
set -eu
cd "$(dirname "$0")/.."
. scripts/lib.sh

make_venv .venv-bench bench/requirements.txt
