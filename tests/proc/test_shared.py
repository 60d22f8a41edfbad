#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One process reads for all: a slab that is reused too early gives a rank wrong weights, a rank that lags lets memory grow, one that dies
hangs the rest, and bytes that are read twice are what sharing was for.

Every rank's bytes are compared with what it reads alone; what storage gave and what memory there is are looked at from outside; ranks are
stopped, killed, late, missing and started apart. TUNDISH_LONG=1 starts and stops 1,000 times.
"""
import contextlib
import itertools
import os
import random
import signal
import subprocess
import threading
import time

import harness
import stfile
from harness import MIB

SHARELOOP = os.environ.get("TND_SHARELOOP")
LOOPS = 1000 if os.environ.get("TUNDISH_LONG") else 100


def rank_pids(running, count):
    """Pids by rank, once all of them run: ranks are started in order."""
    deadline = time.monotonic() + harness.DEADLINE
    while time.monotonic() < deadline:
        pids = sorted(pid for pid in running.processes() if pid != running.pid)
        if len(pids) == count:
            return pids
    raise AssertionError("the ranks did not start")


def read_bytes(pid):
    """What a process had storage read for it; 0 once it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/io", encoding="ascii") as file:
        for line in file:
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    return 0


def anonymous(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="latin-1") as file:
        for line in file:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def memfds(pid, found):
    """Adds {inode: bytes} of the memory files that a process has open."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith("/memfd:"):
                    entry = os.stat(path)
                    found[entry.st_dev, entry.st_ino] = entry.st_blocks * 512


class NodeSampler:
    """Of a running load: anonymous memory of all its processes, memory files once, page cache; and what each rank had read."""

    def __init__(self, running, pids, files):
        self.running, self.pids, self.files = running, pids, files
        self.cache_before = sum(map(harness.cached_bytes, files))
        self.count = self.peak = self.files_peak = 0
        self.read = dict.fromkeys(pids, 0)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self):
        while not self.stop.wait(0.003):
            shared = {}
            private = anonymous(self.running.pid)
            for pid in self.pids:
                private += anonymous(pid)
                memfds(pid, shared)
                self.read[pid] = max(self.read[pid], read_bytes(pid))
            cache = max(0, sum(map(harness.cached_bytes, self.files)) - self.cache_before)
            self.files_peak = max(self.files_peak, sum(shared.values()))
            self.peak = max(self.peak, private + sum(shared.values()) + cache)
            self.count += 1

    def end(self):
        self.stop.set()
        self.thread.join()
        return self


class Shared(harness.ProcTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        path = cls.path
        cls.moe = stfile.moe_checkpoint(path("moe"), experts=8, draft_experts=4, inner=256, hidden=512, vocab=1000, shards=3)
        cls.dense = stfile.dense_checkpoint(path("dense"), shards=3, layers=3, hidden=512, heads=16, kv_heads=8, inner=1536)
        parts = [[(f"w.{shard}.{n}", "U8", [3 * MIB + 123]) for n in range(8)] for shard in range(4)]
        cls.plain = stfile.write_checkpoint(path("plain"), parts)
        parts = [[(f"w.{shard:02d}.{n:02d}", "U8", [16 * MIB]) for n in range(64)] for shard in range(4)]
        cls.large = stfile.write_checkpoint(path("large"), parts, sparse=True)
        parts = [[(f"w.{shard:02d}.{n:03d}", "U8", [16 * MIB]) for n in range(256)] for shard in range(64)]
        cls.endless = stfile.write_checkpoint(path("endless"), parts, sparse=True)
        cls.temp = path("tmp")
        os.mkdir(cls.temp)

    @classmethod
    def path(cls, name):
        return os.path.join(cls.scratch, name)

    def sums(self, folder, *args):
        path = self.path("sums")
        self.good(harness.run(["load", folder, "--checksum", path, *args]))
        with open(path, encoding="utf-8") as file:
            text = file.read()
        os.remove(path)
        self.assertTrue(text)
        return text

    def start(self, folder, *args, **how):
        return harness.start(["load", folder, "--shared", *args], env={"TMPDIR": self.temp}, **how)

    def under_way(self, *args, ranks=4, folder=None):
        """A load that nobody waits for the end of, once every rank moved some bytes; and the pids by rank."""
        running = self.start(folder or self.endless, "--tp", ranks, "--budget", 256 * MIB, *args)
        pids, seen = rank_pids(running, ranks), set()
        while len(seen) < ranks:
            line = running.progress()
            self.assertIsNotNone(line, "ended before it was hit")
            if line["done_bytes"]:
                seen.add(line["rank"])
        return running, pids

    def named(self, result, status, code, rank):
        self.assertEqual(result.code, status, result.err[-2000:])
        error = result.report["error"]
        self.assertEqual((error["code"], error["rank"]), (code, rank), error["message"])
        self.assertIn(f"rank {rank}", result.err)

    # -- bytes --

    def same(self, folder, *args):
        """Own files, views, memory of one's own: as each rank reads alone."""
        alone = self.sums(folder, "--no-shared", *args)
        for more in ([], ["--keep"]):
            self.assertEqual(self.sums(folder, "--shared", *args, *more), alone, more)

    def test_bytes_dense(self):
        for ranks in (1, 2, 4, 8):
            for packing in ("name", "file"):
                with self.subTest(ranks=ranks, packing=packing):
                    self.same(self.dense, "--tp", ranks, "--slice", "all", "--budget", 256 * MIB, "--packing", packing)

    def test_bytes_experts(self):
        """EP 1 and 2, every phase, both packings, slabs of 4 MiB, one for each tensor, and by default."""
        for ep, phase, (packing, slab) in itertools.product(
                (1, 2), ("target", "draft", "all"), (("name", ["--slab", "4MiB"]), ("file", ["--slab", "0"]), ("file", []))):
            with self.subTest(ep=ep, phase=phase, packing=packing, slab=slab):
                self.same(self.moe, "--tp", 4, "--ep", ep, "--phase", phase, "--budget", 128 * MIB, "--packing", packing, *slab)

    def test_bytes_of_pieces(self):
        """Tensors above the budget, whole and sliced both ways: they come in pieces, and are put together for --keep."""
        folder = self.path("pieces")
        shape = [3072, 8192]
        tensors = [("a", "U8", [100]), ("model.layers.0.mlp.up_proj.weight", "U8", shape),
                   ("model.layers.0.mlp.down_proj.weight", "U8", shape), ("z", "U8", [24 * MIB + 123])]
        stfile.write_checkpoint(folder, [tensors], {})
        self.same(folder, "--tp", 2, "--slice", "all", "--budget", 16 * MIB)

    def test_ways_to_read(self):
        alone = self.sums(self.moe, "--no-shared", "--tp", 2)
        for args in (["--engine", "threads"], ["--direct", "off"], ["--direct", "on", "--keep-cache"], ["--align", 64],
                     ["--rank-budget", 32 * MIB], ["--keep-touched"], ["--on-full", "copy"]):
            self.assertEqual(self.sums(self.moe, "--shared", "--tp", 2, *args), alone, args)

    def test_some_members(self):
        """Ranks 0, 2 and 3 of four: what rank 1 would have got is missing, and the rest is as ever."""
        alone = self.sums(self.moe, "--tp", 4).splitlines()
        some = self.sums(self.moe, "--tp", 4, "--shared", "--members", "0,2-3").splitlines()
        self.assertEqual(some, [line for line in alone if not line.startswith("1\t")])

    def test_a_rank_that_needs_nothing(self):
        report = self.good(harness.run(["load", self.moe, "--shared", "--tp", 2, "--ep", 2, "--names",
                                        "layers.0.ffn.experts.0.w1.weight"]))
        self.assertEqual([rank["tensors"] for rank in report["ranks"]], [1, 0])

    # -- storage and memory, from outside --

    def test_each_byte_is_read_once(self):
        """Four ranks that each need all: the kernel counts one reading of the files, in the host's process."""
        total = sum(map(os.path.getsize, harness.shards(self.plain)))
        read = {}
        for how in ("--no-shared", "--shared"):
            for path in harness.shards(self.plain):
                harness.drop_cache(path)
            running = harness.start(["load", self.plain, how, "--tp", 4, "--budget", 64 * MIB, "--direct", "on"])
            sampler = NodeSampler(running, rank_pids(running, 4), harness.shards(self.plain))
            result = running.finish()
            sampler.end()
            report = self.good(result)
            read[how] = result.usage.ru_inblock * 512
            if not read[how]:
                self.skipTest("this file system does not count what is read")
        self.assertGreaterEqual(read["--no-shared"], 4 * total)  # the control: it is counted
        self.assertAlmostEqual(read["--shared"], total, delta=MIB)
        self.assertLess(max(sampler.read[pid] for pid in sampler.pids[1:]), 256 * 1024)
        self.assertEqual(report["node"]["storage_bytes"], report["share"]["storage_bytes"])
        self.assertAlmostEqual(report["share"]["storage_bytes"], report["node"]["union_bytes"], delta=64 * 1024)
        self.assertEqual([bool(rank["storage_bytes"]) for rank in report["ranks"]], [True, False, False, False])

    def test_memory_of_the_node(self):
        """At every sample: budget + 32 MiB a process. The control: slabs are among what was sampled."""
        budget = 160 * MIB
        for args in ([], ["--direct", "off"], ["--packing", "name", "--slab", "8MiB"]):
            with self.subTest(args=args):
                running = self.start(self.large, "--tp", 4, "--budget", budget, *args)
                sampler = NodeSampler(running, rank_pids(running, 4), harness.shards(self.large))
                result = running.finish()
                sampler.end()
                report = self.good(result)
                self.assertGreater(sampler.count, 10)
                self.assertGreater(sampler.files_peak, 16 * MIB)
                self.assertLessEqual(sampler.peak, budget + 5 * 32 * MIB)
                self.assertLessEqual(report["node"]["peak_charged_bytes"], budget)
                self.assertEqual(report["budget_bytes"], budget)

    # -- pace --

    def stall(self, running):
        """Reads progress lines until no rank has moved for half a second."""
        with contextlib.suppress(AssertionError):
            while True:
                self.assertIsNotNone(running.progress(0.5), "it went on to its end without a rank")

    def test_a_slow_rank(self):
        """A stopped rank holds all of them up, none goes on without it, and it is the one that is named."""
        with harness.nothing_left(self, self.temp):
            running, pids = self.under_way(folder=self.large)
            os.kill(pids[2], signal.SIGSTOP)
            self.stall(running)
            os.kill(pids[2], signal.SIGCONT)
            report = self.good(running.finish())
        held = {one["rank"]: one["seconds"] for one in report["share"]["waits"]["held_up_by"]}
        self.assertEqual(max(held, key=held.get), 2, held)
        self.assertGreater(held[2], 0.3)
        for rank in report["ranks"]:
            named = [one["rank"] for one in rank["waits"]["held_up_by"]]
            self.assertNotIn(rank["rank"], named)
            self.assertEqual(2 in named, rank["rank"] != 2)

    def test_a_stopped_rank_at_the_deadline(self):
        for rank in (0, 2):
            with self.subTest(rank=rank), harness.nothing_left(self, self.temp):
                running, pids = self.under_way("--deadline", "3")
                os.kill(pids[rank], signal.SIGSTOP)
                self.named(running.finish(15), 7, "TND_E_DEADLINE", rank)

    def test_a_rank_is_let_go(self):
        """--evict: the rank that keeps the others waiting is what the load ends with."""
        with harness.nothing_left(self, self.temp):
            running, pids = self.under_way("--evict", "0.5")
            os.kill(pids[1], signal.SIGSTOP)
            self.named(running.finish(15), 6, "TND_E_EVICTED", 1)

    # -- ends --

    def test_kills(self):
        """Each rank in turn, the host among them, at a random time: named, and all over within a second or so."""
        seed = int(os.environ.get("TND_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
        print(f"TND_SEED={seed}")
        dice = random.Random(seed)
        for turn in range(20):
            with self.subTest(turn=turn, seed=seed), harness.nothing_left(self, self.temp):
                running = self.start(self.endless, "--tp", 4, "--budget", 256 * MIB)
                pids = rank_pids(running, 4)
                for _ in range(dice.randrange(12)):
                    self.assertIsNotNone(running.progress())
                began = time.monotonic()
                os.kill(pids[turn % 4], signal.SIGKILL)
                result = running.finish(15)
                self.assertLess(time.monotonic() - began, 3)
                self.named(result, 6, "TND_E_PEER_DEAD", turn % 4)

    def test_others_go_on_if_asked(self):
        with harness.nothing_left(self, self.temp):
            running, pids = self.under_way("--on-dead", "continue", folder=self.large)
            os.kill(pids[2], signal.SIGKILL)
            result = running.finish()
        self.named(result, 6, "TND_E_PEER_DEAD", 2)
        self.assertEqual([rank["ok"] for rank in result.report["ranks"]], [True, True, False, True])
        self.assertEqual(result.report["share"]["lost"], [2])
        # Without the one that reads, nobody goes on.
        with harness.nothing_left(self, self.temp):
            running, pids = self.under_way("--on-dead", "continue")
            os.kill(pids[0], signal.SIGKILL)
            self.named(running.finish(15), 6, "TND_E_PEER_DEAD", 0)

    def test_interrupt(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(number=number), harness.nothing_left(self, self.temp):
                running, _ = self.under_way()
                running.signal_group(number) if number == signal.SIGINT else os.kill(running.pid, number)
                began = time.monotonic()
                result = running.finish(15)
                self.assertEqual(result.code, 130, result.err)
                self.assertLess(time.monotonic() - began, 3)
                # Cancelled ranks report what they did; killed ones could not.
                self.assertTrue(all(rank["kept_bytes"] for rank in result.report["ranks"]))

    def test_everything_is_killed(self):
        with harness.nothing_left(self, self.temp):
            running, pids = self.under_way()
            os.kill(running.pid, signal.SIGKILL)
            self.assertEqual(running.finish(15).code, -signal.SIGKILL)
            self.assertEqual(harness.wait_gone(pids, 5), [])

    def test_it_cannot_fit(self):
        """Refused before any process: the budget is the node's."""
        result = harness.run(["load", self.plain, "--shared", "--tp", 4, "--budget", "64KiB"])
        self.assertEqual((result.code, result.report["ranks"]), (4, []))

    # -- started apart --

    def apart(self, rank, name, *args, folder=None, ranks=3):
        return harness.start(["load", folder or self.plain, "--tp", ranks, "--rank", rank, "--group",
                              f"unix:@tundish-test-{os.getpid()}-{name}", "--budget", 64 * MIB, *args],
                             env={"TMPDIR": self.temp})

    def test_apart_in_any_order(self):
        for order in itertools.permutations(range(3)):
            with self.subTest(order=order), harness.nothing_left(self, self.temp):
                started = {rank: self.apart(rank, "order", "--deadline", 60) for rank in order}
                for rank in range(3):
                    report = self.good(started[rank].finish())
                    self.assertEqual([one["rank"] for one in report["ranks"]], [rank])
                    self.assertEqual(report["share"] is None, rank != 0)

    def test_apart_the_same_bytes(self):
        alone = self.sums(self.moe, "--tp", 3, "--slice", "none").splitlines(keepends=True)
        paths = [self.path(f"sums{rank}") for rank in range(3)]
        started = [self.apart(rank, "bytes", "--slice", "none", "--checksum", paths[rank], folder=self.moe)
                   for rank in range(3)]
        found = []
        for rank in range(3):
            self.good(started[rank].finish())
            with open(paths[rank], encoding="utf-8") as file:
                found += file.readlines()
        self.assertEqual(found, alone)

    def test_apart_late(self):
        """The host reads as far as the budget goes, and waits for the one that comes when the others stand still."""
        with harness.nothing_left(self, self.temp):
            first = [self.apart(rank, "late", folder=self.large) for rank in (0, 1)]
            self.stall(first[0])
            last = self.apart(2, "late", folder=self.large)
            reports = [self.good(one.finish()) for one in (*first, last)]
        held = {one["rank"]: one["seconds"] for one in reports[0]["share"]["waits"]["held_up_by"]}
        self.assertEqual(max(held, key=held.get), 2)

    def test_apart_one_never_comes(self):
        with harness.nothing_left(self, self.temp):
            started = [self.apart(rank, "never", "--deadline", "1") for rank in (0, 1)]
            for one in started:
                self.named(one.finish(15), 7, "TND_E_DEADLINE", 2)
            result = self.apart(1, "nobody", "--deadline", "0.5").finish(15)
            self.assertEqual((result.code, result.report["error"]["rank"]), (7, 0), result.err)
            self.assertIn("rank 0", result.err)

    def test_apart_deaths(self):
        """One of the ranks, and then the host: the others say so, within a second or so, with its rank."""
        for dead in (1, 0):
            with self.subTest(dead=dead), harness.nothing_left(self, self.temp):
                started = [self.apart(rank, "death", folder=self.endless) for rank in range(3)]
                for one in started:
                    line = one.progress()
                    while line and not line["done_bytes"]:
                        line = one.progress()
                    self.assertIsNotNone(line)
                began = time.monotonic()
                for pid in started[dead].processes():
                    os.kill(pid, signal.SIGKILL)
                for rank, one in enumerate(started):
                    result = one.finish(15)
                    if rank != dead:
                        self.named(result, 6, "TND_E_PEER_DEAD", dead)
                self.assertLess(time.monotonic() - began, 5)
                # The address is free again.
                started = [self.apart(rank, "death") for rank in range(3)]
                for one in started:
                    self.good(one.finish())

    def test_apart_two_hosts(self):
        with harness.nothing_left(self, self.temp):
            first = self.apart(0, "hosts", folder=self.endless)
            line = first.progress()
            self.assertIsNotNone(line)
            second = self.apart(0, "hosts").finish(15)
            self.assertEqual(second.code, 5, second.err)
            self.assertIn(f"tundish-test-{os.getpid()}-hosts", second.err)
            first.signal_group(signal.SIGINT)
            self.assertEqual(first.finish(15).code, 130)

    def test_apart_interrupt(self):
        """A rank that waits for a host ends at once."""
        with harness.nothing_left(self, self.temp):
            one = self.apart(1, "interrupt")
            pid = rank_pids(one, 1)[0]
            # It tries the address in its own time: that it has begun is all that can be seen.
            self.assertTrue(os.path.exists(f"/proc/{pid}"))
            one.signal_group(signal.SIGINT)
            self.assertEqual(one.finish(15).code, 130)

    def test_apart_others_options(self):
        """A rank with another layout is refused, and the load goes on without an answer of it."""
        with harness.nothing_left(self, self.temp):
            host = self.apart(0, "layout", "--deadline", "2")
            other = self.apart(1, "layout", "--slice", "all", "--deadline", "2").finish(15)
            self.assertEqual(other.code, 2, other.err)
            self.assertIn("same to all ranks", other.err)
            self.assertNotEqual(host.finish(15).code, 0)

    # -- again and again --

    def test_again_and_again(self):
        with harness.nothing_left(self, self.temp):
            for _ in range(LOOPS):
                result = subprocess.run([harness.TOOL, "load", self.dense, "--shared", "--tp", "2", "--budget", "64MiB"],
                                        capture_output=True, text=True, timeout=60, check=False)
                self.assertEqual(result.returncode, 0, result.stderr)

    def test_again_in_one_process(self):
        """1,000 shares with two loads each in one process: descriptors, threads, mappings and memory are flat."""
        done = subprocess.run([SHARELOOP, self.dense, str(64 * MIB), "1000"], capture_output=True, text=True, timeout=250,
                              check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        rounds = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
        self.assertEqual(len(rounds), 1000)
        warm = rounds[50]
        for fds, threads, maps, rss in rounds[50:]:
            self.assertEqual((fds, threads), (warm[0], warm[1]))
            # The C library caches stacks and arenas of threads by timing; one left by each would be 950 more.
            self.assertLessEqual(maps - warm[2], 24)
            self.assertLessEqual(rss - warm[3], 8 * MIB)


if __name__ == "__main__":
    harness.main()
