# SPDX-License-Identifier: Apache-2.0
# What could break: bytes that are not the file's (checksums are compared with hashes over what was written, through
# ranks, pieces and --keep), JSON keys that move, reports that are half written or lost in silence, a refused load that starts
# processes.

import json
import os

import stfile
from command import Command

KEYS = ["schema", "ok", "error", "seconds", "kept_bytes_per_second", "budget_bytes", "ranks", "node", "share", "memlog"]
RANK_KEYS = {"rank", "pid", "ok", "seconds", "tensors", "read_bytes", "kept_bytes", "storage_bytes", "metadata_bytes",
             "realigned_bytes", "buffers", "slabs", "allocations", "huge_bytes", "peak_charged_bytes",
             "resident_growth_bytes", "page_cache_growth_bytes", "escaped", "files", "waits", "stage_seconds", "overruns",
             "overrun_bytes", "copied", "io_threads", "cpus", "numa", "registration"}


class LoadResults(Command):
    def check_document(self, found, ranks):
        self.assertEqual(list(found), KEYS)
        self.assertEqual(found["schema"], "tundish.load/1")
        self.assertEqual([rank["rank"] for rank in found["ranks"]], ranks)
        for rank in found["ranks"]:
            self.assertLessEqual(RANK_KEYS, set(rank))
            self.assertEqual(set(rank["waits"]), {"storage", "budget", "consumer", "held_up_by"})
            self.assertEqual(set(rank["stage_seconds"]), {"read", "gather", "deliver"})

    def test_json(self):
        found = self.run_json("load", self.moe, "--tp", "2", "--no-shared")
        self.check_document(found, [0, 1])
        self.assertTrue(found["ok"])
        self.assertIsNone(found["error"])
        plan = self.run_json("plan", self.moe, "--tp", "2")
        for done, planned in zip(found["ranks"], plan["ranks"]):
            for key in ("tensors", "read_bytes", "kept_bytes"):
                self.assertEqual(done[key], planned[key])
            self.assertGreaterEqual(done["storage_bytes"], done["read_bytes"])
            self.assertLessEqual(done["peak_charged_bytes"], plan["budget_bytes"])
            self.assertEqual(set(done["files"][0]), {"name", "engine", "direct", "cache", "fallback"})
        self.assertEqual(found["node"]["storage_bytes"], sum(rank["storage_bytes"] for rank in found["ranks"]))
        self.assertEqual(found["node"]["peak_charged_bytes"],
                         sum(rank["peak_charged_bytes"] for rank in found["ranks"]))
        self.assertEqual(len(found["memlog"]), 2)
        self.assertEqual(found["memlog"][0]["phase"], "all")

    def test_one_rank(self):
        found = self.run_json("load", self.moe, "--tp", "4", "--rank", "2", "--budget", "256MiB")
        self.check_document(found, [2])
        self.assertEqual(found["budget_bytes"], 64 << 20)

    def test_text(self):
        out, err = self.run_tundish("load", self.moe, "--tp", "2")
        self.assertEqual(err, "")
        self.assert_narrow(out)
        self.assertRegex(out, r"\ARANK  TENSORS .*\n +0 +57 .* ok\n +1 +57 .* ok\n\nloaded ")
        self.assertRegex(out, r"(?m)^memory   .* charged at most, of a budget of ")
        self.assertRegex(out, r"(?m)^files +\d+ x ")

    def sums(self, *options):
        self.run_tundish("load", *options, "--checksum", self.path("sums"))
        with open(self.path("sums")) as file:
            return file.read()

    def test_checksums_do_not_depend_on_the_way(self):
        first = self.sums(self.moe, "--tp", "2")
        lines = [line.split("\t") for line in first.splitlines()]
        self.assertEqual(len(lines), 114)
        self.assertEqual(lines, sorted(lines, key=lambda line: (int(line[0]), line[1])))
        empty = [line for line in lines if line[1] == "layers.0.ffn.empty"]
        # XXH3-64 of nothing, from the specification
        self.assertEqual(empty[0][2:], ["0", "2d06800538d394c2"])
        for options in (["--keep"], ["--packing", "name"], ["--slab", "0"], ["--engine", "threads"], ["--direct", "off"],
                        ["--packing", "name", "--slab", "1M", "--budget", "16M"], ["--direct", "on", "--keep-cache"]):
            self.assertEqual(self.sums(self.moe, "--tp", "2", *options), first, options)

    def test_pieces_have_the_tensors_checksum(self):
        folder = self.path("large")
        os.makedirs(folder, exist_ok=True)
        stfile.write_file(folder + "/model.safetensors", [("a", "U8", [100]), ("w", "U8", [(24 << 20) + 123])])
        whole = self.sums(folder)
        self.assertEqual(self.sums(folder, "--budget", "8M"), whole)
        self.assertEqual(self.sums(folder, "--budget", "8M", "--packing", "name", "--keep"), whole)
        self.run_tundish("load", folder, "--budget", "8M", "--oversize", "refuse", status=4)

    def test_contents_change_the_checksum(self):
        path = self.path("plain.safetensors")
        stfile.write_file(path, [("w", "U8", [4], b"abcd")])
        before = self.sums(path)
        stfile.write_file(path, [("w", "U8", [4], b"abcx")])
        self.assertNotEqual(self.sums(path), before)

    def test_report_and_trace(self):
        self.run_tundish("load", self.moe, "--tp", "2", "--report", self.path("report"), "--trace", self.path("trace"))
        with open(self.path("report")) as file:
            self.check_document(json.load(file), [0, 1])
        with open(self.path("trace")) as file:
            events = json.load(file)["traceEvents"]
        complete = [event for event in events if event["ph"] == "X"]
        self.assertEqual({event["pid"] for event in complete}, {0, 1})
        self.assertEqual({event["cat"] for event in complete}, {"wait", "consume"})
        self.assertEqual(len({event["name"] for event in complete}), 57)
        for event in complete:
            self.assertGreaterEqual(event["ts"], 0)
            self.assertGreaterEqual(event["dur"], 0)
        self.assertEqual([name for name in os.listdir(self.folder) if name.startswith(("report.", "trace."))], [])

    def test_report_cannot_be_written(self):
        out, err = self.run_tundish("load", self.moe, "--report", "/dev/full", status=5)
        self.assertIn("/dev/full: No space left on device", err)
        self.assertIn("loaded ", out)
        self.run_tundish("load", self.moe, "--checksum", "/dev/full", status=5)
        self.run_tundish("load", self.moe, "--trace", "/dev/full", status=5)
        out, err = self.run_tundish("load", self.moe, "--report", self.path("no/where"), status=5)
        self.assertEqual(out, "")
        self.assertIn("no/where", err)

    def test_progress_fd(self):
        lines, end = os.pipe()
        self.run_tundish("load", self.moe, "--tp", "2", "--progress-fd", str(end), pass_fds=[end])
        os.close(end)
        with os.fdopen(lines) as file:
            steps = [json.loads(line) for line in file]
        self.assertEqual({step["rank"] for step in steps}, {0, 1})
        for step in steps:
            self.assertEqual(list(step), ["rank", "done_bytes", "total_bytes", "charged_bytes", "seconds"])
        for rank in (0, 1):
            last = [step for step in steps if step["rank"] == rank][-1]
            self.assertEqual(last["done_bytes"], last["total_bytes"])

    def test_progress_reader_goes_away(self):
        lines, end = os.pipe()
        os.close(lines)
        _, err = self.run_tundish("load", self.moe, "--progress-fd", str(end), pass_fds=[end])
        os.close(end)
        self.assertIn("warning: --progress-fd: Broken pipe", err)

    def test_progress_bar(self):
        _, err = self.run_tundish("load", self.moe, "--progress", "never")
        self.assertEqual(err, "")
        _, err = self.run_tundish("load", self.moe)
        self.assertEqual(err, "")

    def test_refused_before_any_process(self):
        for kind, path in self.bad.items():
            found = self.run_json("load", path, status=3)
            self.assertEqual((found["ok"], found["ranks"]), (False, []))
            self.assertRegex(found["error"]["code"], r"\ATND_E_")
            self.assertIn(kind, found["error"]["message"])
        found = self.run_json("load", self.moe, "--tp", "2", "--budget", "100K", status=4)
        self.assertEqual((found["error"]["code"], found["ranks"]), ("TND_E_BUDGET", []))
        found = self.run_json("load", "missing", status=5)
        self.assertEqual(found["error"]["code"], "ENOENT")
        self.assertEqual(list(found["error"]), ["code", "rank", "file", "tensor", "message"])
        self.assertEqual(list(found), KEYS)

    def test_nothing_to_load(self):
        found = self.run_json("load", self.moe, "--names", "nothing", "--keep")
        self.assertEqual((found["ok"], found["ranks"][0]["tensors"]), (True, 0))

    SHARE_KEYS = {"host_rank", "pid", "ok", "seconds", "members", "lost", "union_bytes", "storage_bytes", "metadata_bytes", "slabs",
                  "slab_bytes", "allocations", "huge_bytes", "budget_bytes", "set_aside_bytes", "peak_charged_bytes",
                  "resident_growth_bytes", "page_cache_growth_bytes", "io_threads", "guests_let_go", "files", "waits",
                  "stage_seconds", "cpus", "numa"}

    def test_shared_json(self):
        found = self.run_json("load", self.moe, "--tp", "2", "--shared", "--budget", "64M")
        self.check_document(found, [0, 1])
        share, ranks = found["share"], found["ranks"]
        self.assertLessEqual(self.SHARE_KEYS, set(share))
        self.assertEqual((share["host_rank"], share["members"], share["lost"]), (0, [0, 1], []))
        self.assertEqual(share["pid"], ranks[0]["pid"])
        self.assertEqual(found["budget_bytes"], 64 << 20)
        self.assertEqual(found["node"]["union_bytes"], share["union_bytes"])
        self.assertEqual(found["node"]["storage_bytes"], share["storage_bytes"])
        self.assertEqual([rank["storage_bytes"] for rank in ranks], [share["storage_bytes"], 0])
        self.assertEqual(found["node"]["peak_charged_bytes"],
                         share["peak_charged_bytes"] + sum(rank["peak_charged_bytes"] for rank in ranks))
        alone = self.run_json("load", self.moe, "--tp", "2", "--no-shared", "--budget", "64M")
        self.assertEqual((alone["share"], alone["node"]["union_bytes"]), (None, None))
        for one, other in zip(ranks, alone["ranks"]):
            self.assertEqual((one["tensors"], one["kept_bytes"]), (other["tensors"], other["kept_bytes"]))

    def test_shared_text(self):
        out, err = self.run_tundish("load", self.moe, "--tp", "2", "--shared")
        self.assertEqual(err, "")
        self.assert_narrow(out)
        self.assertRegex(out, r"\ARANK  TENSORS .* WAITED .*\n +0 +57 .* ok\n +1 +57 .* ok\n\nloaded ")
        self.assertRegex(out, r"(?m)^storage  rank 0 read .* for all; together they need ")
        self.assertRegex(out, r"(?m)^pace     (no rank|rank \d) held the others up")

    def test_shared_refused_before_any_process(self):
        found = self.run_json("load", self.moe, "--tp", "2", "--shared", "--budget", "100K", status=4)
        self.assertEqual((found["error"]["code"], found["ranks"], found["share"]), ("TND_E_BUDGET", [], None))
        found = self.run_json("load", self.moe, "--tp", "64", "--slice", "none", "--shared", "--budget", "4G", status=2)
        self.assertEqual((found["error"]["code"], found["ranks"]), ("TND_E_LAYOUT", []))
        found = self.run_json("load", self.moe, "--rank", "0", "--group", "melt", status=3)
        self.assertEqual(found["error"]["code"], "TND_E_ADDRESS")

    def test_shared_progress_and_trace(self):
        lines, end = os.pipe()
        self.run_tundish("load", self.moe, "--tp", "2", "--shared", "--trace", self.path("trace"), "--progress-fd", str(end),
                         pass_fds=[end])
        os.close(end)
        with os.fdopen(lines) as file:
            steps = [json.loads(line) for line in file]
        for rank in (0, 1):
            last = [step for step in steps if step["rank"] == rank][-1]
            self.assertEqual(last["done_bytes"], last["total_bytes"])
        with open(self.path("trace")) as file:
            events = json.load(file)["traceEvents"]
        for rank in (0, 1):
            names = {event["name"] for event in events if event["ph"] == "X" and event["pid"] == rank}
            self.assertEqual(len(names), 57)
