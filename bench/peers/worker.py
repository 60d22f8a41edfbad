# SPDX-License-Identifier: Apache-2.0
"""What the peers' processes share: the conversation with the driver, and the consumer.

    peer.py --mode upload|copy|keep|touched [--tp N --rank R] [--sums FILE] FILE...

A peer prepares (imports, destination memory), prints "ready", waits for a line, loads against the clock, prints one JSON line, and
stays until its input closes, so that the driver can look at it. Start and end are CLOCK_MONOTONIC, the same for all processes.

Modes, the same for every contender:
    upload    each tensor is made ready in host memory and dropped, as after a device copy by DMA
    copy      each tensor is copied once into one reused buffer of 16 MiB, as a device copy through pinned memory does
    keep      each tensor is copied into fresh memory of its own, which is kept
    touched   the same into memory that was touched before the clock starts, 2 MiB pages asked for

A contender that maps files has nothing in memory before somebody reads it: in `upload` it does what `copy` does.
"""

import argparse
import json
import mmap
import struct
import sys
import time

import torch

STAGE_BYTES = 16 << 20
TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def headers(paths):
    """[(name, dtype, shape)] of all the files."""
    tensors = []
    for path in paths:
        with open(path, "rb") as file:
            document = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        document.pop("__metadata__", None)
        tensors += [(name, TYPES[entry["dtype"]], entry["shape"]) for name, entry in document.items()]
    return tensors


def share(rows, options):
    """This rank's rows: a quarter of each matrix among four, all of a vector."""
    if len(rows) < 2 or options.tp == 1:
        return 0, rows[0]
    return rows[0] * options.rank // options.tp, rows[0] * (options.rank + 1) // options.tp


class Consumer:
    """Takes tensors as the mode says, and counts them."""

    def __init__(self, options):
        self.options, self.kept, self.tensors, self.bytes = options, {}, 0, 0
        self.sums = open(options.sums, "w") if options.sums else None
        self.stage = torch.zeros(STAGE_BYTES, dtype=torch.uint8)
        self.places = self.touch() if options.mode == "touched" else {}
        if self.sums:
            import xxhash  # pylint: disable=import-outside-toplevel
            self.digest = xxhash.xxh3_64_hexdigest

    def touch(self):
        """Destinations in one piece of memory in huge pages, each page written to once."""
        wanted, total = [], 0
        for name, dtype, shape in headers(self.options.files):
            begin, end = share(shape, self.options)
            shape = [end - begin] + shape[1:]
            count = torch.Size(shape).numel() * dtype.itemsize
            wanted.append((name, dtype, shape, total, count))
            total += -(-count // 64) * 64
        self.arena = mmap.mmap(-1, total + 1)
        self.arena.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(self.arena, dtype=torch.uint8)
        memory.fill_(1)
        return {name: memory[begin:begin + count].view(dtype).view(shape)
                for name, dtype, shape, begin, count in wanted}

    def narrow(self, tensor):
        """The rank's part of a whole tensor."""
        begin, end = share(tensor.shape, self.options)
        return tensor[begin:end]

    def copy(self, tensor):
        """Through the staging buffer, piece by piece."""
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        for begin in range(0, flat.numel(), STAGE_BYTES):
            piece = flat[begin:begin + STAGE_BYTES]
            self.stage[:piece.numel()].copy_(piece)

    def take(self, name, tensor, mapped=False, own=False):
        """One tensor, already this rank's part. `mapped`: it lies in a file mapping, perhaps not read yet; `own`: in memory that
        is its alone."""
        mode = self.options.mode
        self.tensors += 1
        self.bytes += tensor.numel() * tensor.element_size()
        if self.sums:
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            self.sums.write(f"{name}\t{self.digest(raw)}\n")
        elif mode == "keep":
            self.kept[name] = tensor if own else tensor.clone()
        elif mode == "touched":
            self.places[name].copy_(tensor)
        elif mode == "copy" or mapped:
            self.copy(tensor)


def parse(arguments):
    """Options that every peer has."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("upload", "copy", "keep", "touched"), default="upload")
    parser.add_argument("--variant", default="")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--sums")
    parser.add_argument("--warm-up", help="a small file, loaded before the clock starts")
    parser.add_argument("files", nargs="+")
    return parser.parse_args(arguments)


def serve(load):
    """Runs `load(options, consumer)` once, as described above."""
    options = parse(sys.argv[1:])
    if options.warm_up:
        first = parse(["--mode", "copy", "--variant", options.variant, options.warm_up])
        load(first, Consumer(first))
    consumer = Consumer(options)
    print("ready", flush=True)
    if not sys.stdin.readline():
        return
    start = time.monotonic()
    load(options, consumer)
    end = time.monotonic()
    if consumer.sums:
        consumer.sums.close()
    print(json.dumps({"start": start, "end": end, "tensors": consumer.tensors, "bytes": consumer.bytes}), flush=True)
    sys.stdin.readline()
