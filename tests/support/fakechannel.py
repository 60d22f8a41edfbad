# SPDX-License-Identifier: Apache-2.0
"""The two memfds of a channel, made by hand (docs/format/channel.md), so that every figure that stat shows of it is known.

    python3 fakechannel.py COMMAND ...   holds two channels, a slab and two loads while COMMAND runs, whose status it returns
"""
import os
import subprocess
import sys

import channelmemory as memory
import fakeload
from channelmemory import EVICTED, LIVE, RESERVED

ARENA_BYTES, SLOTS, PLACES = 65536, 8, 4
ARENA_OFFSET = 2 * memory.HEADER_BYTES


class FakeChannel:
    """64 KiB, 8 objects, 4 places; sends `sizes`; readers are (rank, state, pid, objects read)."""

    def __init__(self, name, sizes=(), readers=(), closed=0, waits=0, blocked_ns=0):
        fds = [os.memfd_create(f"tundish.channel.{kind}:{name}", os.MFD_CLOEXEC) for kind in ("data", "control")]
        self.data, self.control = fds
        os.truncate(self.data, ARENA_OFFSET + ARENA_BYTES)
        os.truncate(self.control, memory.CONTROL_BYTES)
        identity = os.urandom(16)
        self.put(self.data, 0, memory.HEADER, memory.DATA_MAGIC, memory.VERSION, PLACES, identity, ARENA_BYTES, SLOTS, SLOTS,
                 memory.HEADER_BYTES, ARENA_OFFSET, ARENA_BYTES, ARENA_OFFSET + ARENA_BYTES, 0, 0, os.getpid(), 0, 0,
                 name.encode()[:63], len(sizes), closed, 0, 0)
        self.put(self.control, 0, memory.CONTROL, memory.CONTROL_MAGIC, memory.VERSION, PLACES, identity, memory.CONTROL_BYTES)
        position = 0
        for number, size in enumerate(sizes):
            self.put(self.data, memory.HEADER_BYTES + number % SLOTS * memory.DESCRIPTOR.size, memory.DESCRIPTOR,
                     number, position, size, 0)
            position += size
        self.put(self.control, memory.WORDS_AT, memory.WORDS,
                 0, 0, 0, position, position, len(sizes), position, waits, 0, blocked_ns, 0)
        for place, (rank, state, pid, read) in enumerate(readers):
            self.put(self.data, memory.seat_at(place), memory.SEAT, state, rank, 1, pid, 0)
            self.put(self.control, memory.cursor_at(place), memory.CURSOR, read, 0, 3, 2, 1500000000, 0)

    @staticmethod
    def put(fd, offset, form, *values):
        os.pwrite(fd, form.pack(*values), offset)

    def change(self, **fields):
        """Fields of the header, by name."""
        changed = memory.header(os.pread(self.data, memory.HEADER.size, 0)) | fields
        self.put(self.data, 0, memory.HEADER, *changed.values())

    def close(self):
        os.close(self.data)
        os.close(self.control)


def main():
    own = os.getpid()
    scene = [FakeChannel("tokens", [64] * 8, [(0, LIVE, own, 8), (1, LIVE, own, 0), (2, RESERVED, 0, 7), (9, EVICTED, 0, 0)],
                         waits=5, blocked_ns=2500000000),
             FakeChannel("a name that is a good deal too long for its column, and is cut", [1024], closed=1),
             fakeload.FakeLoad(fakeload.NO_RANK, "model-00003-of-00048.safetensors", [5 << 30, 144 << 30, 6 << 30, 6 << 30, 7 << 30],
                               role=fakeload.READER),
             fakeload.FakeLoad(3, "model-00002-of-00048.safetensors", [2 << 30, 76 << 30, 1023, 67 << 20, 0], role=fakeload.MEMBER)]
    slab = os.memfd_create("tundish.slab", os.MFD_CLOEXEC)
    os.truncate(slab, 2 << 20)
    status = subprocess.run(sys.argv[1:], check=False).returncode
    for one in scene:
        one.close()
    os.close(slab)
    return status


if __name__ == "__main__":
    sys.exit(main())
