# SPDX-License-Identifier: Apache-2.0
"""The memfd of a load (src/memory/live.h), made by hand, so that every figure that stat shows of it is known."""
import os
import struct

MAGIC, VERSION, BYTES = b"TNDLOAD\0", 1, 4096
ALONE, MEMBER, READER = range(3)
NO_RANK = 0xffffffff
# magic, version, role, pid, rank; done, total, charged, budget, storage bytes; index of the file, generation, its name
PAGE = struct.Struct("<8sIIiI5QQI4x256s")


class FakeLoad:
    def __init__(self, rank, name, figures, role=ALONE, pid=None):
        self.page = os.memfd_create("tundish.load", os.MFD_CLOEXEC)
        os.truncate(self.page, BYTES)
        os.pwrite(self.page, PAGE.pack(MAGIC, VERSION, role, pid or os.getpid(), rank, *figures, 0, 2, name.encode()), 0)

    def close(self):
        os.close(self.page)
