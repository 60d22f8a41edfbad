# SPDX-License-Identifier: Apache-2.0
"""What stat says of real channels and loads whose processes are stopped, killed or somebody else's, and that looking leaves nothing behind.

A bench at a slow rate is the channel; its processes are stopped and killed, and stat, which they take no part in, is asked until it
says so. Asking again is the event: each question has an answer, and there is a deadline. A load is one that holds its first view, or
one of sparse files that takes far longer than the test.
"""
import json
import os
import signal
import subprocess
import sys
import time
import unittest

import harness
import stfile
from harness import GIB, MIB

CONSUME = os.environ.get("TND_CONSUME")
PATIENCE = 20


def stat(*arguments, **how):
    done = subprocess.run([harness.TOOL, "stat", *arguments], capture_output=True, text=True, check=False, timeout=60, **how)
    return done.returncode, done.stdout, done.stderr


def until(test, look, wanted):
    """Asks `look` until it gives `wanted`, which it has to before the deadline."""
    deadline = time.monotonic() + PATIENCE
    while (seen := look()) != wanted:
        test.assertLess(time.monotonic(), deadline, f"expected {wanted}, still {seen}")


class Stat(harness.ProcTest):
    def setUp(self):
        self.bench = subprocess.Popen([harness.TOOL, "bench", "channel", "--readers=2", "--rate=500", "--objects=100000000",
                                       "--max-objects=16"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(self.end)
        until(self, lambda: self.channel() is not None and [r["state"] for r in self.channel()["readers"]], ["alive", "alive"])
        self.writer = self.channel()["pid"]
        self.readers = [reader["pid"] for reader in self.channel()["readers"]]

    def end(self):
        if self.bench.returncode is not None:
            return
        pids = self.children()
        self.bench.kill()
        self.bench.wait()
        self.assertEqual(harness.wait_gone(pids, 10), [])

    def children(self):
        with open(f"/proc/{self.bench.pid}/task/{self.bench.pid}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]

    def channel(self):
        code, out, err = stat("--json")
        self.assertEqual((code, err), (0, ""))
        found = [one for one in json.loads(out)["channels"] if one["pid"] in self.children()]
        self.assertLessEqual(len(found), 1)
        return found[0] if found else None

    def state(self, rank):
        return self.channel()["readers"][rank]["state"]

    def row(self, pid):
        """What the table says of a process: its state, and the line."""
        lines = [line for line in stat()[1].splitlines() if f" {pid} " in line]
        self.assertEqual(len(lines), 1, lines)
        self.assertLessEqual(len(lines[0]), 80)
        return lines[0].split(f" {pid} ")[1].split()[0]

    def test_running(self):
        first = self.channel()
        self.assertEqual((first["name"], first["max_objects"]), ("bench", 16))
        self.assertEqual(sorted([first["pid"], *self.readers]), sorted(self.children()))
        until(self, lambda: self.channel()["sent_objects"] > first["sent_objects"] + 10, True)
        later = self.channel()
        self.assertEqual(later["sent_bytes"], later["sent_objects"] * 4096)
        self.assertTrue(later["writer"]["alive"])
        for reader in later["readers"]:
            self.assertGreater(reader["waits"], 0)
            self.assertGreater(reader["blocked_seconds"], 0)
            self.assertLessEqual(reader["lag_objects"], 16)

    def test_stopped_reader(self):
        os.kill(self.readers[1], signal.SIGSTOP)
        until(self, lambda: self.state(1), "stopped")
        self.assertEqual(self.state(0), "alive")
        # It holds the channel: full, and the writer blocked more and more.
        until(self, lambda: self.channel()["used_objects"], 16)
        self.assertEqual(self.channel()["readers"][1]["lag_objects"], 16)
        self.assertEqual(self.channel()["readers"][1]["lag_bytes"], 16 * 4096)
        self.assertEqual(self.channel()["high_objects"], 16)
        until(self, lambda: self.channel()["writer"]["blocked_seconds"] > 0.05, True)
        self.assertEqual(self.row(self.readers[1]), "stopped")
        os.kill(self.readers[1], signal.SIGCONT)
        until(self, lambda: self.state(1), "alive")
        until(self, lambda: self.channel()["used_objects"] < 8, True)

    def test_stopped_writer(self):
        os.kill(self.writer, signal.SIGSTOP)
        until(self, lambda: self.row(self.writer), "stopped")
        self.assertTrue(self.channel()["writer"]["alive"])

    def test_everybody_is_stopped(self):
        """Nobody can answer, and the figures come all the same."""
        for pid in [self.bench.pid, self.writer, *self.readers]:
            os.kill(pid, signal.SIGSTOP)
        until(self, lambda: [self.state(0), self.state(1), self.row(self.writer)], ["stopped"] * 3)

    def test_dead_reader(self):
        """The writer is stopped, and cannot say that a reader died: /proc does."""
        for pid in (self.bench.pid, self.writer):
            os.kill(pid, signal.SIGSTOP)
        until(self, lambda: self.row(self.writer), "stopped")
        os.kill(self.readers[0], signal.SIGKILL)
        until(self, lambda: self.state(0), "dead")
        self.assertEqual(self.state(1), "alive")

    def test_dead_writer(self):
        """The readers are stopped, and hold the channel that its writer has left."""
        for pid in (self.bench.pid, *self.readers):
            os.kill(pid, signal.SIGSTOP)
        until(self, lambda: [self.state(0), self.state(1)], ["stopped"] * 2)
        os.kill(self.writer, signal.SIGKILL)
        until(self, lambda: self.channel()["writer"]["alive"], False)

    def test_gone_without_a_trace(self):
        with harness.nothing_left(self):
            pids = self.children()
            self.bench.send_signal(signal.SIGINT)
            self.assertEqual(self.bench.wait(PATIENCE), 130)
            self.assertEqual(harness.wait_gone(pids, 10), [])
            code, out, _ = stat("--json")
            self.assertEqual(code, 0)
            self.assertEqual([one for one in json.loads(out)["channels"] if one["pid"] in pids], [])

    @unittest.skipUnless(os.geteuid() == 0, "takes another user")
    def test_another_user(self):
        """Nothing of it is seen, and it is said how many were not looked at."""
        try:
            code, out, err = stat(user=65534, group=65534, extra_groups=[])
        except PermissionError:
            self.skipTest("the command cannot be read by other users here")
        self.assertEqual((code, err), (0, ""))
        self.assertNotIn("bench", out)
        if "no channels" in out:
            self.assertRegex(out, r"\([1-9][0-9]* processes may not be looked at\)")


def loads(pids):
    """Of these processes, in the order in which they are given."""
    return [load for load in json.loads(stat("--json")[1])["loads"] if load["pid"] in pids]


def large_files(folder):
    """16 GiB that cost no disk."""
    return stfile.write_checkpoint(folder, [[(f"w.{shard}.{i:03d}", "U8", [16 * MIB]) for i in range(256)] for shard in range(4)],
                                   sparse=True)


class Loads(harness.ProcTest):
    def hold(self, budget, env=None):
        """A load of 2 shards of 4 tensors of 1 MiB that holds its first view; its process."""
        folder = os.path.join(self.scratch, f"held-{budget}")
        if not os.path.exists(folder):
            stfile.write_checkpoint(folder, [[(f"w.{s}.{i}", "U8", [MIB]) for i in range(4)] for s in range(2)])
        process = subprocess.Popen([CONSUME, folder, str(budget), "1", str(600 * 1000000)], stdout=subprocess.DEVNULL,
                                   env={**os.environ, **(env or {})})
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def held(self, process, storage_bytes):
        """What is shown once it rests."""
        until(self, lambda: [(load["done_bytes"], load["storage_bytes"]) for load in loads([process.pid])], [(MIB, storage_bytes)])
        return loads([process.pid])[0]

    @unittest.skipUnless(CONSUME, "TND_CONSUME is not set")
    def test_held(self):
        """All of it is read, and one view of 8 handed out."""
        process = self.hold(64 * MIB)
        seen = self.held(process, 8 * MIB)
        self.assertEqual((seen["rank"], seen["role"], seen["state"]), (0, "alone", "alive"))
        self.assertEqual((seen["total_bytes"], seen["budget_bytes"]), (8 * MIB, 64 * MIB))
        self.assertEqual(seen["file"], "model-00002-of-00002.safetensors")
        self.assertGreaterEqual(seen["charged_bytes"], 8 * MIB)
        self.assertLessEqual(seen["charged_bytes"], 64 * MIB)
        self.assertRegex(stat()[1], rf"(?m)^0 +{process.pid}  model-\S+2 +1.00 MiB +8.00 MiB +12% +[0-9.]+ MiB +64.0 MiB$")
        # Nobody who looks needs its help.
        os.kill(process.pid, signal.SIGSTOP)
        until(self, lambda: [load["state"] for load in loads([process.pid])], ["stopped"])
        self.assertEqual(loads([process.pid]), [seen | {"state": "stopped"}])
        self.assertRegex(stat()[1], rf"(?m)^0 +{process.pid}  \(stopped\) +1.00 MiB ")

    @unittest.skipUnless(CONSUME, "TND_CONSUME is not set")
    def test_killed(self):
        with harness.nothing_left(self):
            process = self.hold(64 * MIB)
            self.held(process, 8 * MIB)
            process.kill()
            process.wait()
            self.assertEqual(loads([process.pid]), [])

    @unittest.skipUnless(CONSUME, "TND_CONSUME is not set")
    def test_two_loads_at_once(self):
        processes = [self.hold(64 * MIB) for _ in range(2)]
        for process in processes:
            self.held(process, 8 * MIB)
        self.assertEqual([load["pid"] for load in loads([p.pid for p in processes])], sorted(p.pid for p in processes))

    def test_shared(self):
        """A member is stopped and holds up the others: the figures say who. Killed, all are gone."""
        folder = os.path.join(self.scratch, "large")
        large_files(folder)
        running = harness.start(["load", folder, "--shared", "--tp", 2, "--budget", 256 * MIB])
        try:
            until(self, lambda: sorted((load["role"], load["rank"], load["done_bytes"] > 0)
                                       for load in loads(running.processes())),
                  [("member", 0, True), ("member", 1, True), ("reader", None, True)])
            slow = next(load["pid"] for load in loads(running.processes()) if load["rank"] == 1)
            os.kill(slow, signal.SIGSTOP)
            until(self, lambda: {load["rank"]: load["state"] for load in loads(running.processes()) if load["pid"] == slow}[1],
                  "stopped")
            rest = loads(running.processes())
            until(self, lambda: self.moves(running, rest), False)
            fast, stopped, reader = rest
            self.assertEqual([load["total_bytes"] for load in rest], [16 * GIB] * 3)
            self.assertEqual(reader["budget_bytes"], 256 * MIB)
            self.assertLessEqual(reader["charged_bytes"], 256 * MIB)
            self.assertLess(stopped["done_bytes"], stopped["total_bytes"])
            self.assertLess(fast["done_bytes"] - stopped["done_bytes"], 256 * MIB)
            self.assertEqual((fast["storage_bytes"], stopped["storage_bytes"]), (0, 0))
            self.assertRegex(stat()[1], rf"(?m)^reader +{reader['pid']}  \S+ +[0-9.]+ [MG]iB +16.0 GiB ")
        finally:
            pids = running.processes()
            running.signal_group(signal.SIGKILL)
            running.finish()
        self.assertEqual(loads(pids), [])

    @staticmethod
    def moves(running, rest):
        """Whether anything is not as it was in `rest`, which is then what there is now."""
        before = list(rest)
        time.sleep(0.2)
        rest[:] = loads(running.processes())
        return rest != before


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    harness.main()
