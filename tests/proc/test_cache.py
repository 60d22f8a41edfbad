#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A load that leaves gigabytes of page cache, or throws out what others had warm, slows its neighbours down.

After a load the page cache of each file is as it was before: cold stays cold, warm stays warm, to the page, for direct and buffered
reads and one or four ranks; `--keep-cache` keeps. What one rank finds warm because another reader has just brought it in is cold
afterwards, also after Ctrl-C; `verify --deep` leaves everything as it was too. Seen with cachestat from outside.
"""
import os
import signal
import time

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
            if kind == "mixed" and number == 0:
                # Half of what is read at once, and a single block of it.
                harness.warm(path, 4 * EXTENT, EXTENT)
                harness.warm(path, 2 * EXTENT + 65536, 65536)

    def unchanged(self, kind, run):
        """The kernel takes warm pages when it likes (reclaim, drop_caches): a round that differs is repeated, twice at most."""
        for last in (False, False, True):
            self.arrange(kind)
            before = self.state()
            result = run()
            after = self.state()
            if last or after == before:
                self.assertEqual(after, before)
                return result

    def load_unchanged(self, kind, *args):
        return self.unchanged(kind, lambda: self.good(harness.run(["load", self.folder, "--budget", 64 * MIB, *args])))

    def test_as_before(self):
        for kind in ("cold", "warm", "mixed"):
            for args in ([], ["--direct", "off"], ["--engine", "threads"], ["--engine", "threads", "--direct", "off"],
                         ["--tp", "4", "--direct", "off"]):
                with self.subTest(kind=kind, args=args):
                    # One rank may see what another has just brought in; and the kernel may take a warm page before we look.
                    told = kind if kind != "mixed" and "--tp" not in args else None
                    for last in (False, False, True):
                        report = self.load_unchanged(kind, *args)
                        states = {file["cache"] for file in report["ranks"][0]["files"]}
                        self.assertLessEqual(states, {"cold", "warm", "mixed"})
                        if told is None or states == {told}:
                            break
                        if last:
                            self.assertEqual(states, {told})

    def brought_in_by_another(self, code, go_on):
        """One rank is stopped while a neighbour reads everything through the page cache; then `go_on` ends the load."""
        self.arrange("cold")
        before = self.state()
        running = harness.start(["load", self.folder, "--budget", 64 * MIB, "--tp", 2, "--direct", "off"])
        deadline = time.monotonic() + harness.DEADLINE
        while len(ranks := sorted(set(running.processes()) - {running.pid})) < 2 and time.monotonic() < deadline:
            pass
        os.kill(ranks[1], signal.SIGSTOP)
        for path in self.files:
            harness.warm(path, 0, os.path.getsize(path))
        go_on(running, ranks[1])
        self.assertEqual(running.finish().code, code)
        self.assertEqual(self.state(), before)

    def test_brought_in_by_another(self):
        self.brought_in_by_another(0, lambda running, rank: os.kill(rank, signal.SIGCONT))

    def test_brought_in_by_another_and_interrupted(self):
        self.brought_in_by_another(130, lambda running, rank: os.kill(running.pid, signal.SIGINT))

    def test_verify(self):
        for kind in ("cold", "warm", "mixed"):
            with self.subTest(kind=kind):
                done = self.unchanged(kind, lambda: harness.run(["verify", self.folder, "--deep"]))
                self.assertEqual(done.code, 0)

    def test_keep_cache(self):
        self.arrange("cold")
        self.good(harness.run(["load", self.folder, "--budget", 64 * MIB, "--direct", "off", "--keep-cache"]))
        self.assertGreater(sum(map(harness.cached_bytes, self.files)), 30 * MIB)


if __name__ == "__main__":
    harness.main()
