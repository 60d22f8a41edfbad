# SPDX-License-Identifier: Apache-2.0
# What could break: a rank that outlives its parent, a death that hangs the others or is not named, Ctrl-C that does not end
# everything within a second or two. Each test ends a load that would take minutes, after it has handed out its first bytes,
# and looks at the exit status and at every process that there was.

import array
import fcntl
import json
import os
import signal
import subprocess
import termios
import time

import stfile
from command import DEADLINE, TUNDISH, Command, Load, alive, children, environment, wait_until

RANKS = 3
F_SETPIPE_SZ = 1031


class Processes(Command):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # 1 TiB of holes: no rank reaches the end.
        cls.sparse = cls.path("sparse")
        os.makedirs(cls.sparse)
        stfile.header_only(cls.sparse + "/model.safetensors", [(f"w{n:05d}", "U8", [16 << 20]) for n in range(65536)])

    def start(self, *arguments, **options):
        return Load(self.sparse, "--tp", str(RANKS), "--budget", "768M", "--no-shared", *arguments, **options)

    def running(self, load):
        """Its ranks, once it is in full run."""
        load.wait_for_bytes()
        ranks = children(load.process.pid)
        load.ranks = ranks
        self.assertEqual(len(ranks), RANKS)
        return list(ranks)

    def assert_gone(self, ranks):
        self.assertTrue(wait_until(lambda: not any(alive(pid) for pid in ranks)), ranks)

    def interrupt(self, number):
        with self.start("--json", "--report", self.path("report")) as load:
            ranks = self.running(load)
            begin = time.monotonic()
            load.process.send_signal(number)
            status, out, err = load.finish()
            self.assertLess(time.monotonic() - begin, 5)
        self.assertEqual(status, 130, err)
        self.assert_gone(ranks)
        found = json.loads(out)
        self.assertEqual((found["ok"], found["error"]["code"]), (False, "TND_E_CANCELLED"))
        self.assertEqual(len(found["ranks"]), RANKS)
        self.assertIn("interrupted", err)
        # Cancelled ranks report what they did; killed ones could not.
        self.assertTrue(any(rank["io_threads"] for rank in found["ranks"]))
        with open(self.path("report")) as file:
            self.assertEqual(json.load(file), found)

    def test_interrupt(self):
        self.interrupt(signal.SIGINT)

    def test_terminate(self):
        self.interrupt(signal.SIGTERM)

    def test_interrupt_of_the_whole_group(self):
        # As a terminal does: the ranks get the signal too.
        with self.start(start_new_session=True) as load:
            ranks = self.running(load)
            os.killpg(load.process.pid, signal.SIGINT)
            status, _, err = load.finish()
        self.assertEqual(status, 130, err)
        self.assert_gone(ranks)

    def test_ranks_that_do_not_listen_are_killed(self):
        with self.start() as load:
            ranks = self.running(load)
            for pid in ranks:
                os.kill(pid, signal.SIGSTOP)
            load.process.send_signal(signal.SIGINT)
            status, _, err = load.finish()
        self.assertEqual(status, 130, err)
        self.assert_gone(ranks)

    def test_second_interrupt_kills_at_once(self):
        with self.start() as load:
            ranks = self.running(load)
            for pid in ranks:
                os.kill(pid, signal.SIGSTOP)
            # Two different signals: one that is pending already would be merged with the second.
            begin = time.monotonic()
            load.process.send_signal(signal.SIGINT)
            load.process.send_signal(signal.SIGTERM)
            status, _, err = load.finish()
            self.assertLess(time.monotonic() - begin, 0.9)
        self.assertEqual(status, 130, err)
        self.assert_gone(ranks)

    def test_rank_killed(self):
        with self.start("--json") as load:
            ranks = self.running(load)
            os.kill(ranks[1], signal.SIGKILL)
            status, out, err = load.finish()
        self.assertEqual(status, 6, err)
        self.assert_gone(ranks)
        found = json.loads(out)
        self.assertEqual((found["error"]["code"], found["error"]["rank"]), ("TND_E_PEER_DEAD", 1))
        self.assertIn(f"rank 1 (process {ranks[1]})", found["error"]["message"])
        self.assertIn("signal 9", err)
        self.assertEqual([rank["ok"] for rank in found["ranks"]], [False] * RANKS)
        self.assertEqual([rank["pid"] for rank in found["ranks"]], ranks)

    def test_others_go_on_if_asked(self):
        # The death has been noticed once the dead rank is reaped; the others must be there still, and its death is the error.
        with self.start("--on-dead", "continue") as load:
            ranks = self.running(load)
            os.kill(ranks[0], signal.SIGKILL)
            self.assertTrue(wait_until(lambda: not alive(ranks[0])))
            self.assertTrue(wait_until(lambda: ranks[0] not in children(load.process.pid)))
            self.assertTrue(all(alive(pid) for pid in ranks[1:]))
            load.process.send_signal(signal.SIGINT)
            status, _, err = load.finish()
        self.assertEqual(status, 6, err)
        self.assert_gone(ranks)

    def test_others_end_well_if_asked(self):
        # One rank is stopped until the others have left, and then killed: they have reported, it is the error.
        folder = self.path("holes")
        os.makedirs(folder)
        stfile.header_only(folder + "/model.safetensors", [(f"w{n:03d}", "U8", [16 << 20]) for n in range(128)])
        with Load(folder, "--tp", str(RANKS), "--budget", "192M", "--no-shared", "--on-dead", "continue", "--json") as load:
            self.assertTrue(wait_until(lambda: len(children(load.process.pid)) == RANKS))
            load.ranks = ranks = children(load.process.pid)
            os.kill(ranks[1], signal.SIGSTOP)
            self.assertTrue(wait_until(lambda: children(load.process.pid) == [ranks[1]], DEADLINE))
            os.kill(ranks[1], signal.SIGKILL)
            status, out, err = load.finish()
        self.assertEqual(status, 6, err)
        self.assert_gone(ranks)
        found = json.loads(out)
        self.assertEqual((found["error"]["code"], found["error"]["rank"]), ("TND_E_PEER_DEAD", 1))
        self.assertEqual([rank["ok"] for rank in found["ranks"]], [True, False, True])

    def test_parent_killed(self):
        with self.start() as load:
            ranks = self.running(load)
            load.process.kill()
            load.process.wait()
            self.assert_gone(ranks)

    def test_deadline(self):
        with self.start("--deadline", "1.5") as load:
            ranks = self.running(load)
            status, _, err = load.finish()
        self.assertEqual(status, 7, err)
        self.assert_gone(ranks)

    def hang(self, *which):
        # The others answer at the deadline. It ends soon after it, and names those that did not answer and no other.
        with self.start("--deadline", "1.5", "--json") as load:
            ranks = self.running(load)
            for rank in which:
                os.kill(ranks[rank], signal.SIGSTOP)
            status, out, err = load.finish()
        self.assertEqual(status, 7, err)
        self.assert_gone(ranks)
        found = json.loads(out)
        self.assertLess(found["seconds"], 2)  # of the ranks: reading 65,536 names before them takes time too
        error = found["error"]
        self.assertEqual((error["code"], error["rank"]), ("TND_E_DEADLINE", which[0]))
        self.assertIn("deadline of 1.5 s", error["message"])
        self.assertEqual([rank for rank in range(RANKS) if f"{rank} (process {ranks[rank]})" in error["message"]],
                         list(which))
        self.assertIn(error["message"], err)

    def test_deadline_of_a_rank_that_hangs(self):
        self.hang(1)

    def test_deadline_of_ranks_that_hang(self):
        self.hang(0, 2)

    def test_deadline_of_all_ranks_that_hang(self):
        self.hang(0, 1, 2)

    def test_progress_reader_that_sleeps(self):
        # Nobody reads the steps. A pipe of one page has no room for a second one: the load goes on, and Ctrl-C works.
        with self.start() as load:
            fcntl.fcntl(load.lines, F_SETPIPE_SZ, 4096)
            ranks = self.running(load)
            self.assertTrue(wait_until(lambda: self.waiting(load.lines) > 0))
            load.process.send_signal(signal.SIGINT)
            status, _, err = load.finish()
        self.assertEqual(status, 130, err)
        self.assert_gone(ranks)

    def test_progress_reader_that_never_reads(self):
        # Full from the start, and it stays so: the load ends well, and waits for room once and not once a rank.
        ends = os.pipe()
        os.set_blocking(ends[1], False)
        with self.assertRaises(BlockingIOError):
            while True:
                os.write(ends[1], b"\n" * 4096)
        os.set_blocking(ends[1], True)
        begin = time.monotonic()
        self.run_tundish("load", self.dense, "--tp", "8", "--budget", "64M", "--progress-fd", str(ends[1]),
                         pass_fds=[ends[1]])
        self.assertLess(time.monotonic() - begin, 4)
        for end in ends:
            os.close(end)

    @staticmethod
    def waiting(pipe):
        """Bytes in a pipe that nobody has read."""
        found = array.array("i", [0])
        fcntl.ioctl(pipe, termios.FIONREAD, found)
        return found[0]

    def test_verify_interrupted(self):
        process = subprocess.Popen([TUNDISH, "verify", "--deep", self.sparse], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, env=environment())
        # The handler is set before the first read.
        def reading():
            with open(f"/proc/{process.pid}/io") as file:
                return int(file.readline().split()[1]) > 64 << 20
        self.assertTrue(wait_until(reading, 30))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
        self.assertEqual(process.returncode, 130, err)
        self.assertEqual(out, "")
