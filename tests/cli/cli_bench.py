# SPDX-License-Identifier: Apache-2.0
# What could break: objects lost, mixed up or cut at some length without anybody noticing; a process that dies, stops or is
# interrupted and leaves the others behind. Every run here checks its contents itself; ends are caused by signals, and no process
# of the run may be alive afterwards.

import contextlib
import os
import signal
import subprocess

from command import DEADLINE, TUNDISH, Command, alive, children, environment, wait_until

LONG = ["--rate", "1000", "--objects", "10000000"]


class Run:
    """A bench that goes on for hours if nobody ends it; its processes are the writer, then the readers."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen([TUNDISH, "bench", "channel", *arguments], stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True, env=environment())
        self.ranks = []

    def wait_for(self, count):
        assert wait_until(lambda: len(children(self.process.pid)) == count), "not all were started"
        self.ranks = children(self.process.pid)
        # Running once shared memory is there, and the readers have it.
        assert wait_until(lambda: all(self.attached(pid) for pid in self.ranks)), "not all are in the channel"
        return self.ranks

    @staticmethod
    def attached(pid):
        links = []
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        return any("tundish.channel.data" in link for link in links)

    def finish(self):
        out, err = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, out, err

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        for pid in self.ranks:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


class Bench(Command):
    def test_json(self):
        report = self.run_json("bench", "channel", "--readers=3", "--objects=2000", "--bytes=1KiB")
        self.assertEqual(set(report), {"schema", "readers", "objects", "bytes", "seconds", "objects_per_second", "latency_us",
                                       "cpu_seconds", "lost", "corrupt"})
        self.assertEqual(report["schema"], "tundish.bench.channel/1")
        self.assertEqual((report["readers"], report["objects"], report["bytes"]), (3, 2000, 1024))
        self.assertEqual((report["lost"], report["corrupt"]), (0, 0))
        self.assertEqual(set(report["latency_us"]), {"p50", "p99", "max"})
        self.assertLessEqual(report["latency_us"]["p50"], report["latency_us"]["p99"])
        self.assertLessEqual(report["latency_us"]["p99"], report["latency_us"]["max"])
        self.assertGreater(report["latency_us"]["p50"], 0)
        self.assertEqual(set(report["cpu_seconds"]), {"writer", "readers"})
        self.assertEqual(len(report["cpu_seconds"]["readers"]), 3)
        self.assertAlmostEqual(report["objects_per_second"] * report["seconds"], 2000, delta=1)

    def test_text(self):
        out, err = self.run_tundish("bench", "channel", "--objects=100")
        self.assert_narrow(out)
        self.assertEqual(err, "")
        self.assertRegex(out, r"\A100 objects of 4\.00 KiB to 1 reader in [0-9.]+ s\n")
        self.assertIn("0 lost, 0 corrupt", out)

    def test_lengths(self):
        for count in (16, 17, 23, 24, 63, 64, 65, 4095, 4097, 65536):
            report = self.run_json("bench", "channel", f"--bytes={count}", "--objects=300", "--max-bytes=64KiB", "--max-objects=7")
            self.assertEqual((report["lost"], report["corrupt"]), (0, 0), count)
        report = self.run_json("bench", "channel", "--bytes=3MiB", "--objects=10")
        self.assertEqual((report["lost"], report["corrupt"]), (0, 0))

    def test_rate(self):
        report = self.run_json("bench", "channel", "--rate=500", "--objects=100")
        self.assertGreaterEqual(report["seconds"], 0.19)

    def test_too_large_for_the_channel(self):
        _, err = self.run_tundish("bench", "channel", "--bytes=8KiB", "--max-bytes=4KiB", status=5)
        self.assertIn("8192", err)

    def test_reader_dies(self):
        with Run("--readers=2", *LONG) as run:
            os.kill(run.wait_for(3)[2], signal.SIGKILL)
            status, out, err = run.finish()
            self.assertEqual((status, out), (6, ""))
            self.assertIn("reader 1", err)
            self.assertFalse(any(map(alive, run.ranks)))

    def test_writer_dies(self):
        with Run("--readers=2", *LONG) as run:
            os.kill(run.wait_for(3)[0], signal.SIGKILL)
            status, out, _ = run.finish()
            self.assertEqual((status, out), (6, ""))
            self.assertFalse(any(map(alive, run.ranks)))

    def test_stopped_reader_and_deadline(self):
        with Run("--readers=2", "--objects=100000000", "--deadline=1") as run:
            os.kill(run.wait_for(3)[1], signal.SIGSTOP)
            status, out, _ = run.finish()
            self.assertEqual((status, out), (7, ""))
            self.assertFalse(any(map(alive, run.ranks)))

    def test_stopped_writer_and_deadline(self):
        with Run("--deadline=1", *LONG) as run:
            os.kill(run.wait_for(2)[0], signal.SIGSTOP)
            status, _, _ = run.finish()
            self.assertEqual(status, 7)
            self.assertFalse(any(map(alive, run.ranks)))

    def test_interrupted(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with Run("--readers=2", *LONG) as run:
                run.wait_for(3)
                run.process.send_signal(number)
                status, out, err = run.finish()
                self.assertEqual((status, out), (130, ""))
                self.assertIn("interrupted", err)
                self.assertFalse(any(map(alive, run.ranks)))

    def test_killed(self):
        with Run("--readers=2", *LONG) as run:
            run.wait_for(3)
            run.process.kill()
            self.assertTrue(wait_until(lambda: not any(map(alive, run.ranks))))

    def refused(self, *arguments, says):
        _, err = self.run_tundish("bench", *arguments, status=2)
        self.assertIn(says, err)

    def test_usage(self):
        self.refused(says="tundish bench channel")
        self.refused("melt", says="found 'melt'")
        self.refused("channel", "channel", says="found 'channel'")
        self.refused("channel", "--readers=0", says="--readers")
        self.refused("channel", "--readers=65", says="from 1 to 64")
        self.refused("channel", "--bytes=15", says="from 16")
        self.refused("channel", "--objects=0", says="--objects")
        self.refused("channel", "--max-objects=1048577", says="--max-objects")
        self.refused("channel", "--deadline=0", says="--deadline")
