#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""However a load ends, nothing may stay behind and the reason must be said: a rank that is killed, Ctrl-C, a closed standard output, a
file that shrinks, a deadline.

Loads of a large sparse checkpoint are hit while their progress lines say that they are under way; then the exit status is the table's, the
report names the reason, and no process, descriptor, shared memory or temporary file is left.
"""
import os
import signal
import subprocess

import harness
import stfile
from harness import GIB, MIB


class Endings(harness.ProcTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        parts = [[(f"w.{shard:02d}.{n:02d}", "U8", [64 * MIB]) for n in range(64)] for shard in range(12)]
        cls.folder = stfile.write_checkpoint(os.path.join(cls.scratch, "huge"), parts, sparse=True)
        parts = [[(f"w.{shard:02d}.{n:02d}", "U8", [64 * MIB]) for n in range(32)] for shard in range(4)]
        cls.shrinking = stfile.write_checkpoint(os.path.join(cls.scratch, "shrinking"), parts, sparse=True)
        cls.small = stfile.dense_checkpoint(os.path.join(cls.scratch, "small"))
        cls.temp = os.path.join(cls.scratch, "tmp")
        os.mkdir(cls.temp)

    def under_way(self, *args, folder=None, **how):
        """A load of 48 GiB (or of `folder`), given back once every rank moved some bytes."""
        ranks = 4 if "--tp" in args else 1
        running = harness.start(["load", folder or self.folder, "--budget", 128 * MIB, *args],
                                env={"TMPDIR": self.temp, **how.pop("env", {})}, **how)
        seen = set()
        while len(seen) < ranks:
            line = running.progress()
            if line is None:
                result = running.finish()
                self.fail(f"ended before it was hit: {result.code} {result.err[-1000:]}")
            if line["done_bytes"]:
                self.assertLess(line["done_bytes"], line["total_bytes"])
                seen.add(line["rank"])
        return running

    def ended(self, running, code, name=None, seconds=15):
        result = running.finish(seconds)
        self.assertEqual(result.code, code, result.err[-1000:])
        if name:
            self.assertIn(result.report["error"]["code"], name if isinstance(name, tuple) else (name,))
            self.assertFalse(result.report["ok"])
        return result

    def ranks_of(self, running):
        return sorted(pid for pid in running.processes() if pid != running.pid)

    def test_interrupt(self):
        for args in ([], ["--tp", "4"]):
            with self.subTest(args=args), harness.nothing_left(self, self.temp):
                running = self.under_way(*args)
                running.signal_group(signal.SIGINT)
                self.ended(running, 130)

    def test_terminate_the_parent_alone(self):
        with harness.nothing_left(self, self.temp):
            running = self.under_way("--tp", "4")
            os.kill(running.pid, signal.SIGTERM)
            result = running.finish(15)
            self.assertIn(result.code, (130, 143, -signal.SIGTERM))

    def test_a_rank_is_killed(self):
        with harness.nothing_left(self, self.temp):
            running = self.under_way("--tp", "4")
            victim = self.ranks_of(running)[2]
            os.kill(victim, signal.SIGKILL)
            result = self.ended(running, 6, "TND_E_PEER_DEAD")
            dead = result.report["error"]["rank"]
            self.assertIn(dead, range(4))
            self.assertIn(f"rank {dead}", result.err)

    def test_everything_is_killed(self):
        with harness.nothing_left(self, self.temp):
            running = self.under_way("--tp", "4")
            pids = running.processes()
            os.kill(running.pid, signal.SIGKILL)
            self.assertEqual(running.finish(15).code, -signal.SIGKILL)
            self.assertEqual(harness.wait_gone(pids, 5), [])

    def test_stdout(self):
        """Full, closed, and a pipe that nobody reads: status 5, never silence."""
        args = ["load", self.small, "--tp", 2, "--json"]
        with open("/dev/full", "wb") as full:
            self.assertEqual(harness.run(args, stdout=full).code, 5)
        read_end, write_end = os.pipe()
        os.close(read_end)
        try:
            self.assertEqual(harness.run(args, stdout=write_end).code, 5)
        finally:
            os.close(write_end)
        done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", harness.TOOL, *map(str, args)], capture_output=True,
                              text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 5, done.stderr)

    def test_the_file_shrinks(self):
        """The last shard loses its data while the first is read: an error that names file and tensor, no SIGBUS."""
        last = harness.shards(self.shrinking)[-1]
        size = os.path.getsize(last)
        for args in ([], ["--direct", "off"]):
            with self.subTest(args=args), harness.nothing_left(self, self.temp):
                running = self.under_way(*args, folder=self.shrinking)
                try:
                    os.truncate(last, GIB)
                    result = running.finish(60)
                finally:
                    os.truncate(last, size)
                self.assertIn(result.code, (3, 5), result.err[-1000:])
                error = result.report["error"]
                self.assertIn(error["code"], ("TND_E_TRUNCATED", "TND_E_CHANGED"))
                self.assertEqual(error["file"], os.path.basename(last))
                self.assertTrue(error["tensor"].startswith("w.03."), error)
                self.assertIn(error["tensor"], result.err)

    def test_deadline(self):
        with harness.nothing_left(self, self.temp):
            running = harness.start(["load", self.folder, "--budget", 64 * MIB, "--deadline", "0.3"])
            self.ended(running, 7, "TND_E_DEADLINE")

    def test_it_cannot_fit(self):
        result = harness.run(["load", self.folder, "--budget", "64KiB"])
        self.assertEqual(result.code, 4, result.err)
        result = harness.run(["load", self.folder, "--budget", "32MiB", "--oversize", "refuse"])
        self.assertEqual(result.code, 4, result.err)
        self.assertIn("w.00.00", result.err)


if __name__ == "__main__":
    harness.main()
