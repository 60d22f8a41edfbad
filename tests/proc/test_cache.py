#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A load that leaves gigabytes of page cache, or throws out what others had warm, slows its neighbours down.

L23: after a load the page cache of each file is as it was before: cold stays cold, warm stays warm, to the page, for direct and buffered
reads and one or four ranks; `--keep-cache` keeps. Seen with cachestat from outside.
"""
import os

import harness
import stfile
from harness import MIB

EXTENT = 2 * MIB


class Cache(harness.ProcTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        parts = [[(f"w.{shard}.{n:02d}", "U8", [MIB + 4097]) for n in range(12)] for shard in range(3)]
        cls.folder = stfile.write_checkpoint(os.path.join(cls.scratch, "c"), parts)
        cls.files = harness.shards(cls.folder)
        for path in cls.files:
            harness.drop_cache(path)
            if harness.cached_bytes(path):
                raise harness.unittest.SkipTest("this file system does not drop its page cache")

    def state(self):
        """Cached bytes of each extent of each file, the header's aside (opening reads it)."""
        return {os.path.basename(path): [harness.cached_bytes(path, start, EXTENT)
                                         for start in range(EXTENT, os.path.getsize(path), EXTENT)]
                for path in self.files}

    def arrange(self, kind):
        for number, path in enumerate(self.files):
            harness.drop_cache(path)
            if kind == "warm" or (kind == "mixed" and number == 1):
                harness.warm(path, 0, os.path.getsize(path))
            if kind == "mixed" and number == 2:
                harness.warm(path, 2 * EXTENT, 2 * EXTENT)

    def unchanged(self, kind, *args):
        self.arrange(kind)
        before = self.state()
        report = self.good(harness.run(["load", self.folder, "--budget", 64 * MIB, *args]))
        self.assertEqual(self.state(), before)
        return report

    def test_as_before(self):
        for kind in ("cold", "warm", "mixed"):
            for args in ([], ["--direct", "off"], ["--engine", "threads"], ["--engine", "threads", "--direct", "off"],
                         ["--tp", "4", "--direct", "off"]):
                with self.subTest(kind=kind, args=args):
                    report = self.unchanged(kind, *args)
                    states = {file["cache"] for file in report["ranks"][0]["files"]}
                    self.assertLessEqual(states, {"cold", "warm", "mixed"})
                    # One rank may see what another has just brought in.
                    if kind != "mixed" and "--tp" not in args:
                        self.assertEqual(states, {kind})

    def test_keep_cache(self):
        self.arrange("cold")
        self.good(harness.run(["load", self.folder, "--budget", 64 * MIB, "--direct", "off", "--keep-cache"]))
        self.assertGreater(sum(map(harness.cached_bytes, self.files)), 30 * MIB)


if __name__ == "__main__":
    harness.main()
