# SPDX-License-Identifier: Apache-2.0
"""What a loader must deliver, worked out from the files alone: header, seek, read, XXH3."""

import importlib.metadata
import json
import struct
import sys

import xxhash


def entries(path):
    """Where the data begins, and the header's entries."""
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        document = json.loads(file.read(length))
    document.pop("__metadata__", None)
    return 8 + length, document


def payload_bytes(files):
    """Bytes of all tensors."""
    return sum(entry["data_offsets"][1] - entry["data_offsets"][0]
               for path in files for entry in entries(path)[1].values())


def expected(files, ranks, rank):
    """{name: XXH3 of the rank's rows}."""
    sums = {}
    for path in files:
        begin, document = entries(path)
        with open(path, "rb") as file:
            for name, entry in document.items():
                first, last = entry["data_offsets"]
                rows = entry["shape"][0]
                row_bytes = (last - first) // rows
                if len(entry["shape"]) > 1:
                    first, last = (first + row_bytes * (rows * number // ranks) for number in (rank, rank + 1))
                file.seek(begin + first)
                sums[name] = xxhash.xxh3_64_hexdigest(file.read(last - first))
    return sums


def compare(who, path, files, ranks, rank):
    """Ends the benchmark where a contender delivered anything else: its time would mean nothing."""
    wanted = expected(files, ranks, rank)
    found = dict(line.rstrip("\n").split("\t") for line in open(path))
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        sys.exit(f"load.py: {who}: expected the bytes of the files, found others in {len(wrong)} of {len(wanted)} "
                 f"tensors, first {wrong[0]}")
    print(f"  verified {who}: {len(wanted)} tensors", file=sys.stderr)


def versions():
    """Of the peers."""
    return {name: importlib.metadata.version(name)
            for name in ("safetensors", "fastsafetensors", "runai-model-streamer", "torch")}
