#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reading what nobody asked for is the common waste: experts of other ranks, tensors that the model skips, a core that is shared.

Experts under EP with scales and a draft stack of another size, names given before the plan, a caller pinned to one core.
"""
import json
import os

import harness
import stfile
from harness import MIB


class Selection(harness.ProcTest):
    def plan(self, folder, *args):
        done = harness.run(["plan", folder, "--json", *args])
        return done, json.loads(done.out) if done.code == 0 else None

    def test_experts_under_ep(self):
        """8 experts over EP 2, a draft stack of 4: bytes read are the plan's, and the plan's are what ownership says."""
        folder = stfile.moe_checkpoint(os.path.join(self.scratch, "l31"), experts=8, draft_experts=4)
        expert = sum(stfile.size_of(dtype, shape) for _, dtype, shape in stfile.expert_tensors("x.", 0, 128, 256))
        for phase, owned, count in (("target", 4, 8), ("draft", 4, 4)):
            done, plan = self.plan(folder, "--tp", 2, "--ep", 2, "--phase", phase)
            self.assertEqual(done.code, 0, done.err)
            report = self.good(harness.run(["load", folder, "--tp", 2, "--ep", 2, "--phase", phase, "--budget", 64 * MIB]))
            for planned, rank in zip(plan["ranks"], report["ranks"]):
                self.assertEqual((planned["read_bytes"], planned["kept_bytes"], planned["tensors"]),
                                 (rank["read_bytes"], rank["kept_bytes"], rank["tensors"]))
            # The per-tensor scales (4 bytes) are kept of every expert.
            done, listed = self.plan(folder, "--tp", 2, "--ep", 2, "--phase", phase, "--tensors")
            for rank in listed["ranks"]:
                experts = [item for item in rank["layout"] if ".experts." in item["name"]]
                self.assertEqual(sum(item["kept_bytes"] for item in experts), owned * expert + 4 * count)
                self.assertEqual(sum(item["name"].endswith("input_scale") for item in experts), count)

    def test_expert_numbers(self):
        """Expert 8 in a stack of 8 is an error; a count that disagrees otherwise is a warning with both numbers."""
        folder = stfile.moe_checkpoint(os.path.join(self.scratch, "nine"), experts=9, draft_experts=2)
        self.config(folder, n_routed_experts=8)
        done, _ = self.plan(folder, "--tp", 2, "--ep", 2, "--phase", "target")
        self.assertEqual(done.code, 3, done.err)
        self.assertIn("8", done.err)
        self.config(folder, n_routed_experts=12)
        done, plan = self.plan(folder, "--tp", 2, "--ep", 2, "--phase", "target")
        self.assertEqual(done.code, 0, done.err)
        self.assertTrue(any("12" in text and "9" in text for text in plan["warnings"]), plan["warnings"])

    @staticmethod
    def config(folder, **facts):
        path = os.path.join(folder, "config.json")
        with open(path, encoding="utf-8") as file:
            known = json.load(file)
        with open(path, "w", encoding="utf-8") as file:
            json.dump({**known, **facts}, file)

    def test_names_given_before(self):
        """Two of 36 tensors wanted: the others are neither read nor brought into the page cache, their shards not touched."""
        parts = [[(f"layer.{shard}.{n:02d}", "U8", [MIB]) for n in range(12)] for shard in range(3)]
        folder = stfile.write_checkpoint(os.path.join(self.scratch, "l33"), parts)
        for path in harness.shards(folder):
            harness.drop_cache(path)
        report = self.good(harness.run(["load", folder, "--names", "layer.1.0[34]", "--budget", 64 * MIB, "--keep-cache",
                                        "--direct", "off"]))
        rank = report["ranks"][0]
        self.assertEqual((rank["tensors"], rank["read_bytes"]), (2, 2 * MIB))
        self.assertLessEqual(rank["storage_bytes"], 2 * MIB + 16384)
        for number, path in enumerate(harness.shards(folder)):
            self.assertLessEqual(harness.cached_bytes(path), 65536 + (2 * MIB + 16384 if number == 1 else 0))

    def test_pinned_caller(self):
        """Pinned to one core by an engine, the I/O threads take the cpuset's, and `--cpus` is obeyed."""
        cpus = sorted(os.sched_getaffinity(0))
        if len(cpus) < 2:
            self.skipTest("one processor")
        folder = stfile.dense_checkpoint(os.path.join(self.scratch, "l35"))
        report = self.good(harness.run(["load", folder, "--engine", "threads", "--budget", 64 * MIB], cpus={cpus[0]}))
        self.assertNotEqual(report["ranks"][0]["cpus"], str(cpus[0]))
        report = self.good(harness.run(["load", folder, "--engine", "threads", "--cpus", cpus[1], "--budget", 64 * MIB],
                                       cpus={cpus[0]}))
        self.assertEqual(report["ranks"][0]["cpus"], str(cpus[1]))


if __name__ == "__main__":
    harness.main()
