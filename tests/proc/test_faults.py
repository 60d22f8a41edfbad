#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An error path that was never walked crashes, hangs, leaks a process, or delivers wrong bytes and says ok.

`tundish load` of a tiny checkpoint on two ranks, each reading for itself or one for both in turn, with the N-th call of each kind
failing, for one call alone and for it and all later ones; N goes up by a stride until nothing is hit any more. Each run must end in
time with a status of the table, with the right checksums if it says ok, and leave no process and no file behind. TND_FAULT_STRIDE=1
walks them all.
"""
import contextlib
import os
import unittest

import harness
import stfile
from harness import MIB

SHIM = os.environ.get("TND_SHIM_LIB")
STRIDE = int(os.environ.get("TND_FAULT_STRIDE", "0"))

# Call, error, calls of it in a run (about), and how many runs to spend on it.
CALLS = [
    ("malloc", "ENOMEM", 1600, 40), ("calloc", "ENOMEM", 60, 20), ("realloc", "ENOMEM", 60, 20), ("strdup", "ENOMEM", 4, 4),
    ("aligned_alloc", "ENOMEM", 4, 4), ("posix_memalign", "ENOMEM", 4, 4), ("mmap", "ENOMEM", 30, 15),
    ("madvise", "EINVAL", 10, 3), ("pthread_create", "EAGAIN", 8, 8), ("open", "EMFILE", 40, 15), ("openat", "EMFILE", 20, 8),
    ("read", "EIO", 60, 15), ("pread", "EIO", 20, 12), ("preadv2", "EIO", 20, 12), ("posix_fadvise", "EINVAL", 4, 2),
    ("cachestat", "EPERM", 8, 3), ("memfd_create", "EMFILE", 4, 4), ("ftruncate", "ENOSPC", 4, 4), ("eventfd", "EMFILE", 4, 3),
    ("fcntl", "EINVAL", 8, 5), ("statx", "ENOSYS", 4, 2), ("opendir", "EMFILE", 3, 3), ("uring_init", "ENOMEM", 2, 2),
    ("uring_submit", "EAGAIN", 4, 2),
]
STATUSES = (0, 2, 3, 4, 5, 6, 7)


@unittest.skipUnless(SHIM, "the preloaded library was not built")
class Faults(harness.ProcTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = stfile.moe_checkpoint(os.path.join(cls.scratch, "m"), experts=4, inner=64, hidden=64, vocab=64)
        cls.temp = os.path.join(cls.scratch, "tmp")
        os.mkdir(cls.temp)
        cls.plain = cls.load(cls, "", 0)[1]

    def load(self, spec, number):
        path = os.path.join(self.scratch, "sums")
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
        engine = ("auto", "threads")[number % 2]
        packing = ("file", "name")[number // 2 % 2]
        # Ranks that cannot find each other would wait for two minutes.
        shared = (["--no-shared"], ["--shared", "--deadline", 10])[number // 4 % 2]
        result = harness.run(["load", self.folder, "--tp", 2, "--budget", 16 * MIB, "--checksum", path, "--engine", engine,
                              "--packing", packing, *shared], seconds=20,
                             env={"LD_PRELOAD": SHIM if spec else "", "TND_SHIM": spec, "TMPDIR": self.temp})
        text = ""
        with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
            text = file.read()
        return result, text

    def test_each_call_fails_in_turn(self):
        self.assertTrue(self.plain)
        hit = 0
        for call, error, calls, runs in CALLS:
            stride = STRIDE or max(1, calls // runs)
            for number, first in enumerate(range(1, calls + 1, stride)):
                spec = f"{call}:{error}@{first}" + ("x1" if number % 3 else "")
                with self.subTest(spec=spec), harness.nothing_left(self, self.temp):
                    result, sums = self.load(spec, number)
                    self.assertIn(result.code, STATUSES, result.err[-1500:])
                    if result.code == 0:
                        self.assertEqual(sums, self.plain, "it says ok, and the bytes differ")
                    else:
                        hit += 1
                        self.assertTrue(result.err.strip(), "an error that says nothing")
        # The control: faults that never reach the program would pass everything above.
        self.assertGreater(hit, 40)


if __name__ == "__main__":
    harness.main()
