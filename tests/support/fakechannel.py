# SPDX-License-Identifier: Apache-2.0
"""The two memfds of a channel, made by hand (docs/format/channel.md), so that every figure that stat shows of it is known.

    python3 fakechannel.py COMMAND ...   holds two channels and a slab while COMMAND runs, whose status it returns
"""
import os
import struct
import subprocess
import sys

DATA_MAGIC, CONTROL_MAGIC, VERSION = 0x31544144444e54ff, 0x314c5443444e54ff, 1
HEADER, DESCRIPTOR, SEATS, CURSORS = 4096, 32, 512, 512
RESERVED, LIVE, LEFT, DEAD, EVICTED = 1, 2, 3, 4, 5


class FakeChannel:
    """64 KiB, 8 objects, 4 places; sends `sizes`; readers are (rank, state, pid, objects read)."""

    def __init__(self, name, sizes=(), readers=(), closed=0, waits=0, blocked_ns=0):
        fds = [os.memfd_create(f"tundish.channel.{kind}:{name}", os.MFD_CLOEXEC) for kind in ("data", "control")]
        self.data, self.control = fds
        os.truncate(self.data, 2 * HEADER + 65536)
        os.truncate(self.control, 33280)
        identity = os.urandom(16)
        self.put(self.data, 0, "QII16s", DATA_MAGIC, VERSION, 4, identity)
        self.put(self.data, 32, "10Q", 65536, 8, 8, HEADER, 2 * HEADER, 65536, 2 * HEADER + 65536, 0, 0, os.getpid())
        self.put(self.data, 120, "64s", name.encode()[:63])
        self.put(self.data, 256, "QI", len(sizes), closed)
        self.put(self.control, 0, "QII16sQ", CONTROL_MAGIC, VERSION, 4, identity, 33280)
        position = 0
        for number, size in enumerate(sizes):
            self.put(self.data, HEADER + number % 8 * DESCRIPTOR, "4Q", number, position, size, 0)
            position += size
        self.put(self.control, 384, "7Q", position, position, len(sizes), position, waits, 0, blocked_ns)
        for place, (rank, state, pid, read) in enumerate(readers):
            self.put(self.data, SEATS + 32 * place, "4I", state, rank, 1, pid)
            self.put(self.control, CURSORS + 256 * place, "Q", read)
            self.put(self.control, CURSORS + 256 * place + 128, "3Q", 3, 2, 1500000000)

    @staticmethod
    def put(fd, offset, form, *values):
        os.pwrite(fd, struct.pack("<" + form, *values), offset)

    def close(self):
        os.close(self.data)
        os.close(self.control)


def main():
    own = os.getpid()
    scene = [FakeChannel("tokens", [64] * 8, [(0, LIVE, own, 8), (1, LIVE, own, 0), (2, RESERVED, 0, 7), (9, EVICTED, 0, 0)],
                         waits=5, blocked_ns=2500000000),
             FakeChannel("a name that is a good deal too long for its column, and is cut", [1024], closed=1)]
    slab = os.memfd_create("tundish.slab", os.MFD_CLOEXEC)
    os.truncate(slab, 2 << 20)
    status = subprocess.run(sys.argv[1:], check=False).returncode
    for channel in scene:
        channel.close()
    os.close(slab)
    return status


if __name__ == "__main__":
    sys.exit(main())
