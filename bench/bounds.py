# SPDX-License-Identifier: Apache-2.0
"""What the machine can do with the same files: sequential direct reads (cold) and page-cache copies (warm).

Several settings, each once a round; results.py takes the one with the best median. All buffers are on huge pages where the machine
has them and were touched before the clock; `huge_kib` tells.
"""

import json
import os
import shutil
import subprocess
import sys

import common

DIRECT = (("threads", 2, 16 << 20), ("uring", 4, 8 << 20), ("uring", 8, 2 << 20))
CACHE = (("cache", 1, 1 << 20), ("cache", 2, 1 << 20), ("cache", 2, 16 << 20), ("cache", 4, 1 << 20))
FIO = (("io_uring", "16M", 2), ("io_uring", "2M", 8))


def ours(build, files, kind, width, chunk):
    """bound.c with one setting."""
    done = subprocess.run([os.path.join(build, "bench-bound"), kind, str(width), str(chunk), *files],
                          capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def fio(files, engine, chunk, depth):
    """fio with one setting; its buffers come from malloc, which the tunable puts on huge pages."""
    names = ":".join(path.replace(":", r"\:") for path in files)
    done = subprocess.run(
        ["fio", "--name=bound", "--readonly", "--rw=read", "--direct=1", f"--ioengine={engine}", f"--bs={chunk}",
         f"--iodepth={depth}", "--iomem_align=2M", f"--filename={names}", "--file_service_type=sequential",
         "--invalidate=0", "--output-format=json"],
        capture_output=True, text=True, check=True, env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})
    read = json.loads(done.stdout[done.stdout.index("{"):])["jobs"][0]["read"]
    return {"seconds": read["runtime"] / 1e3, "bytes": read["io_bytes"]}


def measure(build, files, cache):
    """Records of every setting."""
    for kind, width, chunk in DIRECT if cache == "cold" else CACHE:
        common.drop_caches() if cache == "cold" else common.warm(files)
        record = ours(build, files, kind, width, chunk)
        name = f"{kind} {width} x {chunk >> 20} MiB"
        yield {"bound": name, **record, "gbps": record["bytes"] / record["seconds"] / 1e9}
    if cache != "cold":
        return
    if not shutil.which("fio"):
        print("load.py: fio is not installed: the bound is our own reader's alone", file=sys.stderr)
        return
    for engine, chunk, depth in FIO:
        common.drop_caches()
        record = fio(files, engine, chunk, depth)
        yield {"bound": f"fio {engine} {depth} x {chunk}iB", **record,
               "gbps": record["bytes"] / record["seconds"] / 1e9}
