#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A plan that is slow, or off by one expert, is noticed on the cluster and not before.

A large checkpoint as a sparse copy: 48 shards, 93,680 target tensors, 384 experts x 40 layers of MXFP4 shapes, a draft stack of 2,401
tensors, about 300 GB nominal. `tundish plan` must give the figures for four ranks that follow from these shapes, in under a second.
"""
import json
import os

import harness
import stfile

EXPERTS, LAYERS = 384, 40
SHAPES = {"inner": 2304, "hidden": 5120}


def checkpoint(folder):
    """Returns the bytes of the target's tensors that are not routed experts, and of the draft's."""
    parts = []
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        # 37 tensors and 0.185 GB beside the experts: a shard keeps 1.99 GB of the 3.80 that it reads.
        shard = [(f"{at}attn.part{n:02d}.weight", "BF16", [500, 5120]) for n in range(36)]
        shard.append((at + "attn_norm.weight", "F32", [5120]))
        for number in range(EXPERTS):
            shard += stfile.expert_tensors(at + "ffn.", number, **SHAPES)
        parts.append(shard)
    parts.append([("embed.weight", "BF16", [129280, 5120])])
    parts.append([("head.weight", "BF16", [129280, 5120]), ("norm.weight", "BF16", [5120])])
    for number in range(4):
        shard = [(f"hc.{number}.part{n}.weight", "F32", [1000, 5120]) for n in range(9)]
        shard += [(f"layers.{number}.engram.embed.{n}", "BF16", [100000, 512]) for n in range(2)]
        parts.append(shard + ([("hc.last", "F32", [7])] if number == 0 else []))
    draft = [(f"mtp.0.attn.part{n:02d}.weight", "BF16", [1000, 5120]) for n in range(97)]
    for number in range(EXPERTS):
        draft += stfile.expert_tensors("mtp.0.ffn.", number, **SHAPES)
    parts += [draft[:1200], draft[1200:]]
    stfile.write_checkpoint(folder, parts, {"n_routed_experts": EXPERTS, "dspark_n_routed_experts": EXPERTS}, sparse=True)
    sizes = [(name, stfile.size_of(dtype, shape)) for part in parts for name, dtype, shape in part]
    dense = sum(size for name, size in sizes if ".experts." not in name and not name.startswith("mtp.")
                and ".engram." not in name)
    return dense, sum(size for name, size in sizes if name.startswith("mtp.") and ".experts." not in name), \
        sum(size for _, size in sizes)


class PlanFigures(harness.ProcTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.dense, cls.draft_dense, cls.total = checkpoint(cls.scratch)

    def plan(self, *args):
        done = harness.run(["plan", self.scratch, "--tp", 4, "--packing", "name", "--slab", "256MiB", "--budget", "24GiB",
                            "--json", *args])
        self.assertEqual(done.code, 0, done.err)
        # Processor time: what others do on this machine does not count.
        return json.loads(done.out), done.usage.ru_utime + done.usage.ru_stime

    def test_the_checkpoint_is_large_and_sparse(self):
        self.assertEqual(len(harness.shards(self.scratch)), 48)
        self.assertGreaterEqual(self.total, 289 * 10**9)
        used = sum(os.stat(path).st_blocks * 512 for path in harness.shards(self.scratch))
        self.assertLess(used, 64 << 20)

    def test_ep1_target(self):
        plan, seconds = self.plan("--ep", 1, "--phase", "target")
        self.assertEqual([rank["rank"] for rank in plan["ranks"]], [0, 1, 2, 3])
        for rank in plan["ranks"]:
            self.assertEqual(rank["tensors"], 93680)
            self.assertEqual(rank["sliced"], EXPERTS * LAYERS * 6)
            self.assertEqual(rank["read_bytes"], EXPERTS * LAYERS * 9400320 + self.dense)
            self.assertEqual(rank["kept_bytes"], EXPERTS * LAYERS * 4700160 + self.dense)
            self.assertAlmostEqual(rank["slabs"], 330, delta=6)
        self.assertAlmostEqual((plan["ranks"][0]["read_bytes"] - self.dense) / 1e9, 144.4, places=1)
        self.assertAlmostEqual((plan["ranks"][0]["kept_bytes"] - self.dense) / 1e9, 72.2, places=1)
        self.assertAlmostEqual(plan["ranks"][0]["read_bytes"] / 1e9, 155.2, delta=0.3)
        self.assertAlmostEqual(plan["ranks"][0]["kept_bytes"] / 1e9, 83.0, delta=0.3)
        # Together the four ranks read every expert byte once.
        self.assertEqual(plan["node"]["read_bytes"], EXPERTS * LAYERS * 18800640 + self.dense)
        self.assertLess(seconds, 1.0)

    def test_ep2_target(self):
        plan, seconds = self.plan("--ep", 2, "--phase", "target")
        for rank in plan["ranks"]:
            self.assertEqual(rank["tensors"], 47600)
            self.assertEqual(rank["sliced"], 0)
            self.assertEqual(rank["read_bytes"], EXPERTS // 2 * LAYERS * 18800640 + self.dense)
            self.assertEqual(rank["kept_bytes"], rank["read_bytes"])
            self.assertAlmostEqual(rank["slabs"], 610, delta=6)
        self.assertLess(seconds, 1.0)

    def test_draft(self):
        for ep, slabs, whole in ((1, 11, 4700160), (2, 32, 18800640)):
            plan, seconds = self.plan("--ep", ep, "--phase", "draft")
            for rank in plan["ranks"]:
                self.assertEqual(rank["tensors"], 2401)
                self.assertEqual(rank["kept_bytes"], EXPERTS * whole + self.draft_dense)
                self.assertAlmostEqual(rank["slabs"], slabs, delta=3)
                self.assertEqual((rank["shards_opened"], rank["shards_skipped"]), (2, 46))
            self.assertLess(seconds, 1.0)

    def test_largest_shard(self):
        plan, _ = self.plan("--ep", 1, "--phase", "target", "--rank", 2, "--tensors")
        read, kept = {}, {}
        for item in plan["ranks"][0]["layout"]:
            read[item["file"]] = read.get(item["file"], 0) + item["read_bytes"]
            kept[item["file"]] = kept.get(item["file"], 0) + item["kept_bytes"]
        self.assertAlmostEqual(max(read.values()) / 1e9, 3.80, delta=0.02)
        self.assertAlmostEqual(max(kept.values()) / 1e9, 1.99, delta=0.02)


if __name__ == "__main__":
    harness.main()
