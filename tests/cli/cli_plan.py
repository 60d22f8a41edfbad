# SPDX-License-Identifier: Apache-2.0
# What could break: options that do not reach the library, JSON keys that move, text too wide, a plan that cannot fit but is
# not refused. Byte figures are checked against those that follow from how the checkpoint was written.

from command import Command

RANK_KEYS = {"rank", "tensors", "sliced", "skipped", "read_bytes", "kept_bytes", "slabs", "slab_bytes_max", "peak_bytes",
             "least_budget_bytes", "shards_opened", "shards_skipped"}
KEYS = {"schema", "tp_size", "dp_size", "ep_size", "phase", "budget_bytes", "run_min_bytes", "predicted_seconds", "ranks",
        "node", "warnings"}


class Plan(Command):
    def test_json_keys(self):
        found = self.run_json("plan", self.moe, "--tp", "2")
        self.assertLessEqual(KEYS, set(found))
        self.assertEqual(found["schema"], "tundish.plan/1")
        self.assertEqual([rank["rank"] for rank in found["ranks"]], [0, 1])
        for rank in found["ranks"]:
            self.assertLessEqual(RANK_KEYS, set(rank))
        self.assertIn("read_bytes", found["node"])

    def test_tensors(self):
        rank = self.run_json("plan", self.moe, "--tp", "4", "--rank", "3", "--tensors")["ranks"][0]
        places = {place["name"]: place for place in rank["layout"]}
        self.assertEqual(len(places), 57)
        weight = places["layers.0.ffn.experts.0.w1.weight"]
        self.assertLessEqual({"name", "file", "dim", "start", "length", "kept_bytes", "read_bytes", "slab", "offset"},
                             set(weight))
        self.assertEqual((weight["dim"], weight["start"], weight["length"], weight["kept_bytes"]), (0, 96, 32, 32 * 128))
        self.assertLessEqual({"file", "bytes"}, set(rank["slab_list"][0]))

    def test_text(self):
        out, err = self.run_tundish("plan", self.moe, "--tp", "4", "--tensors")
        self.assertEqual(err, "")
        self.assert_narrow(out)
        self.assertIn("tp 4, dp 1, ep 1, phase all, slice experts, packing file", out)
        self.assertEqual(len([line for line in out.splitlines() if line.startswith("rank ")]), 4)

    def test_options_reach_the_plan(self):
        def totals(*options):
            return self.run_json("plan", self.moe, *options)["ranks"][0]
        whole = totals()
        self.assertEqual(whole["tensors"], 57)
        self.assertEqual(totals("--names", "norm.weight")["kept_bytes"], 1024)
        self.assertEqual(totals("--names", "norm.weight", "--names", "embed.*")["tensors"], 2)
        self.assertEqual(totals("--skip", "head.weight")["tensors"], 56)
        self.assertEqual(totals("--skip", "head.weight", "--skip", "none")["tensors"], 57)
        self.assertEqual(totals("--phase", "draft")["tensors"], 20)
        self.assertEqual(totals("--phase", "target")["tensors"], 37)
        self.assertEqual(totals("--phase", "draft", "--draft-prefix", "layers.0.attn")["tensors"], 2)
        self.assertEqual(totals("--slab", "0")["slabs"], 0)
        self.assertEqual(totals("--tp", "2", "--slice", "none")["sliced"], 0)
        self.assertLess(totals("--tp", "2", "--ep", "2")["kept_bytes"],
                        totals("--tp", "2", "--ep", "2", "--no-ep-filter")["kept_bytes"])

    def test_rules(self):
        with open(self.path("rules"), "w") as file:
            file.write("# ours\nhead.weight 0\n")
        places = self.run_json("plan", self.moe, "--tp", "2", "--rules", self.path("rules"), "--tensors")
        head = [place for place in places["ranks"][1]["layout"] if place["name"] == "head.weight"][0]
        self.assertEqual((head["dim"], head["start"], head["length"]), (0, 256, 256))
        with open(self.path("rules"), "w") as file:
            file.write("head.weight\n")
        _, err = self.run_tundish("plan", self.moe, "--rules", self.path("rules"), status=3)
        self.assertIn("rules", err)
        self.run_tundish("plan", self.moe, "--rules", self.path("none"), status=5)
        self.run_tundish("plan", self.moe, "--rules", self.folder, status=5)
        self.run_tundish("plan", self.moe, "--rules", "/dev/zero", status=3)

    def test_budget_is_the_nodes(self):
        self.assertEqual(self.run_json("plan", self.moe, "--tp", "4", "--budget", "256MiB")["budget_bytes"], 64 << 20)
        self.assertEqual(self.run_json("plan", self.moe, "--tp", "4", "--budget", "256MiB", "--rank", "1")["budget_bytes"],
                         64 << 20)
        self.assertEqual(self.run_json("plan", self.moe, "--tp", "4", "--budget", "1G", "--rank-budget", "99M")
                         ["budget_bytes"], 99 << 20)

    def test_cannot_fit(self):
        for budget in ("1", "100K", "3"):
            out, err = self.run_tundish("plan", self.moe, "--tp", "2", "--budget", budget, status=4)
            self.assertEqual(out, "")
            self.assertIn("budget", err)
        self.run_tundish("plan", self.moe, "--budget", "16MiB", "--slab", "64MiB", status=4)

    def test_experts_unknown(self):
        import stfile
        folder = stfile.moe_checkpoint(self.path("noconfig"), config=False)
        _, err = self.run_tundish("plan", folder, "--tp", "2", "--ep", "2", status=3)
        self.assertIn("--experts", err)
        self.run_tundish("plan", folder, "--tp", "2", "--ep", "2", "--experts", "4")

    def test_refused(self):
        for path in self.bad.values():
            self.run_tundish("plan", path, status=3)
        self.run_tundish("plan", "missing", status=5)


class Doctor(Command):
    def test_json_and_text_agree(self):
        # What this machine allows decides the status; both outputs have to come to the same one.
        import json
        import subprocess
        from command import TUNDISH, environment
        done = subprocess.run([TUNDISH, "doctor", self.moe, "--json"], capture_output=True, text=True,
                              env=environment(), check=False)
        found = json.loads(done.stdout)
        self.assertEqual(found["schema"], "tundish.doctor/1")
        for check in found["checks"]:
            self.assertEqual(list(check), ["name", "ok", "value", "advice"])
            self.assertIsInstance(check["ok"], bool)
        self.assertEqual(done.returncode, 0 if all(check["ok"] for check in found["checks"]) else 1)
        out, _ = self.run_tundish("doctor", self.moe, status=done.returncode)
        self.assert_narrow(out)
        for check in found["checks"]:
            self.assertRegex(out, rf"(?m)^{'ok' if check['ok'] else '!!'}  {check['name']} ")

    def test_no_such_path(self):
        _, err = self.run_tundish("doctor", "missing", status=5)
        self.assertIn("missing", err)
