#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A loader that goes over its budget is killed in a container, or takes its memory from the KV pool; nobody sees it on a large machine.

Each case is loaded inside a budget, a cgroup or a small address space, with resident memory and page cache sampled from outside every
5 ms: growth stays within budget + 32 MiB for each process. Files are sparse, so that sizes cost no disk.
"""
import json
import os
import resource
import subprocess

import harness
import stfile
from harness import GIB, MIB

CONSUME = os.environ.get("TND_CONSUME")

def plain(folder, shards, tensors, bytes_each, name="w"):
    """`shards` files of `tensors` U8 tensors each."""
    parts = [[(f"{name}.{shard:02d}.{tensor:03d}", "U8", [bytes_each]) for tensor in range(tensors)]
             for shard in range(shards)]
    return stfile.write_checkpoint(folder, parts, sparse=True)


class Memory(harness.ProcTest):
    def folder(self, name):
        return os.path.join(self.scratch, name)

    def bounded(self, folder, budget, *args, **how):
        """One rank unless `args` say more; the budget is the node's."""
        for path in harness.shards(folder):
            harness.drop_cache(path)
        running = harness.start(["load", folder, "--budget", budget, *args], **how)
        sampler = harness.Sampler(running, harness.shards(folder))
        result = running.finish()
        sampler.end()
        report = self.good(result)
        self.within(sampler, budget)
        for rank in report["ranks"]:
            self.assertLessEqual(rank["peak_charged_bytes"], budget)
            self.assertEqual(rank["overruns"], 0)
        self.assertLessEqual(report["node"]["peak_charged_bytes"], budget)
        return result

    def test_40_gib_under_a_small_address_space(self):
        """Nothing maps a file's size: 40 GiB open, one tensor read, under `ulimit -v 2000000`."""
        folder = self.folder("l20")
        os.mkdir(folder)
        stfile.header_only(os.path.join(folder, "model.safetensors"),
                           [("big", "U8", [40 * GIB]), ("small", "F32", [1024])])
        limits = [(resource.RLIMIT_AS, 2000000 * 1024)]
        done = harness.run(["inspect", folder, "--json"], limits=limits)
        self.assertEqual(done.code, 0, done.err)
        report = self.good(harness.run(["load", folder, "--names", "small", "--budget", 64 * MIB], limits=limits))
        self.assertEqual((report["ranks"][0]["tensors"], report["ranks"][0]["kept_bytes"]), (1, 4096))

    def test_slow_consumer(self):
        """32 shards of 16 MiB, 64 MiB budget, a consumer that takes 2 ms for each tensor while reading runs ahead."""
        folder = plain(self.folder("l21"), 32, 16, MIB)
        self.bounded(folder, 64 * MIB)
        done = subprocess.run([CONSUME, folder, str(64 * MIB), "1", "2000"], capture_output=True, text=True, timeout=60,
                              check=True)
        one = json.loads(done.stdout)
        self.assertEqual(one["kept_bytes"], 512 * MIB)
        self.assertLessEqual(one["peak_charged_bytes"], 64 * MIB)
        self.assertLessEqual(one["peak_rss_bytes"], 96 * MIB)

    def test_fifty_loads(self):
        """50 loads in one process: memory, mappings, descriptors and threads are flat once the first few have warmed up."""
        folder = plain(self.folder("l26"), 4, 8, MIB)
        for engine in ("uring", "threads"):
            done = subprocess.run([CONSUME, folder, str(16 * MIB), "50", "0", engine], capture_output=True, text=True,
                                  timeout=120, check=True)
            rounds = [json.loads(line) for line in done.stdout.splitlines()]
            self.assertEqual(len(rounds), 50)
            for what in ("fds", "threads"):
                self.assertEqual({one[what] for one in rounds[5:]}, {rounds[5][what]}, (engine, what))
            # The C library caches stacks and arenas of threads by timing; a mapping left by each load would be 44 more.
            self.assertLessEqual(max(one["maps"] for one in rounds[5:]) - rounds[5]["maps"], 12, engine)
            self.assertLessEqual(max(one["rss_bytes"] for one in rounds[5:]) - rounds[5]["rss_bytes"], 2 * MIB, engine)

    def test_one_large_shard(self):
        """One shard of 512 MiB, 32 MiB budget, largest tensor 16 MiB; direct, buffered, both engines and packings."""
        folder = plain(self.folder("l24"), 1, 32, 16 * MIB)
        for args in ([], ["--direct", "off"], ["--engine", "threads", "--packing", "name"], ["--slab", "0"],
                     ["--direct", "off", "--packing", "name"]):
            with self.subTest(args=args):
                self.bounded(folder, 32 * MIB, *args)

    def test_four_ranks_share_the_budget(self):
        folder = stfile.moe_checkpoint(self.folder("ranks"), experts=8, inner=1152, hidden=2560, shards=3, sparse=True)
        self.bounded(folder, 128 * MIB, "--tp", 4)

    def test_tensors_above_the_budget_in_a_cgroup(self):
        """4 GB with tensors of 100 MB, `--budget 64MiB`, inside a 256 MiB cgroup that counts page cache too."""
        folder = plain(self.folder("large"), 5, 8, 100 * 10**6)
        limit = harness.MemoryLimit(256 * MIB)
        try:
            for args in ([], ["--direct", "off"]):
                with self.subTest(args=args):
                    self.bounded(folder, 64 * MIB, *args, enter=limit.enter)
        finally:
            limit.remove()

    def test_small_address_space(self):
        """The same files under `ulimit -v` of a quarter of their size."""
        folder = plain(self.folder("address"), 5, 8, 100 * 10**6)
        self.bounded(folder, 64 * MIB, limits=[(resource.RLIMIT_AS, 10**9)])

    def test_budget_comes_from_the_cgroup(self):
        """No `--budget`, a limit of 256 MiB, 1 GiB of files: completes, and sizes itself from the limit."""
        folder = plain(self.folder("l22"), 4, 16, 16 * MIB)
        limit = harness.MemoryLimit(256 * MIB)
        try:
            report = self.good(harness.run(["load", folder], enter=limit.enter))
            self.assertLessEqual(report["budget_bytes"], 64 * MIB)
            self.assertGreater(report["budget_bytes"], 16 * MIB)
        finally:
            limit.remove()

    def test_major_faults(self):
        """A cold load faults nothing in: the few that a process's own start may take, not one per 128 KiB."""
        folder = plain(self.folder("l30"), 4, 16, 4 * MIB)
        harness.run(["load", folder])
        for path in harness.shards(folder):
            harness.drop_cache(path)
        result = harness.run(["load", folder])
        self.good(result)
        self.assertLess(result.usage.ru_majflt, 50)

    def test_sampler_sees_growth(self):
        """The control: `--keep` of 512 MiB must show, and exceed what the bound allows."""
        folder = plain(self.folder("control"), 1, 32, 16 * MIB)
        running = harness.start(["load", folder, "--budget", 32 * MIB, "--keep"])
        sampler = harness.Sampler(running, harness.shards(folder))
        self.good(running.finish())
        sampler.end()
        with self.assertRaises(AssertionError):
            self.within(sampler, 32 * MIB)


if __name__ == "__main__":
    harness.main()
