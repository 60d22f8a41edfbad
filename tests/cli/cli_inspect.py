# SPDX-License-Identifier: Apache-2.0
# What could break: figures that differ from the file's, names that reach the terminal as they are, JSON keys that move, a problem
# that hides the next one. Expectations come from how the files were written.

import os
import resource
import shutil

import stfile
from command import Command

TENSORS = [("b", "BF16", [2, 3]), ("a", "F32", []), ("empty", "I64", [0, 5]), ("c", "U8", [7])]


class Inspect(Command):
    def setUp(self):
        self.file = self.path("one.safetensors")
        stfile.write_file(self.file, TENSORS, {"format": "pt", "who": "é"})

    def test_json(self):
        found = self.run_json("inspect", "one.safetensors")
        self.assertEqual(list(found), ["schema", "files", "tensors"])
        self.assertEqual(found["schema"], "tundish.inspect/1")
        size = os.path.getsize(self.file)
        head = size - 12 - 4 - 7
        self.assertEqual(found["files"], [{"name": "one.safetensors", "bytes": size, "header_bytes": head, "tensors": 4,
                                           "metadata": {"format": "pt", "who": "é"}}])
        self.assertEqual(found["tensors"][0], {"name": "a", "file": "one.safetensors", "dtype": "F32", "shape": [],
                                               "bytes": 4, "offset": head + 12})
        self.assertEqual([t["name"] for t in found["tensors"]], ["a", "b", "c", "empty"])

    def test_text(self):
        out, err = self.run_tundish("inspect", "one.safetensors", "--filter", "[ab]")
        size = os.path.getsize(self.file)
        self.assertEqual(err, "")
        self.assertEqual(out, f"FILE              SIZE  HEADER  TENSORS\n"
                              f"one.safetensors  {size} B   {size - 23} B        4\n\n"
                              f"TENSOR  DTYPE  SHAPE  SIZE  OFFSET\n"
                              f"a       F32    []      4 B     {size - 11}\n"
                              f"b       BF16   [2,3]  12 B     {size - 23}\n\n"
                              f"2 tensors, 16 B, in 1 file\n")

    def test_filter_and_sort(self):
        def names(*options):
            return [t["name"] for t in self.run_json("inspect", "one.safetensors", *options)["tensors"]]
        self.assertEqual(names("--sort", "size"), ["b", "c", "a", "empty"])
        self.assertEqual(names("--sort", "offset"), ["b", "a", "empty", "c"])
        self.assertEqual(names("--sort", "name", "--filter", "?"), ["a", "b", "c"])
        self.assertEqual(names("--filter", "nothing"), [])

    def test_folder(self):
        found = self.run_json("inspect", self.moe)
        self.assertEqual([f["name"] for f in found["files"]],
                         [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)])
        self.assertEqual(len(found["tensors"]), 57)

    def test_hostile_names(self):
        path = self.path("hostile.safetensors")
        names = ["\x1b[31mred", "line\nbreak", "\u202ereversed", "nul\0inside", "\x9bcsi", "x" * 5000, "漢字" * 60]
        stfile.write_file(path, [(name, "U8", [1]) for name in names], {"\x1b]0;title\7": "v"})
        out, _ = self.run_tundish("inspect", path)
        for harmful in "\x1b\u202e\0\x9b\7\r":
            self.assertNotIn(harmful, out)
        for shown in (r"\u001b[31mred", r"line\u000abreak", r"\u202ereversed", r"nul\u0000inside", r"\u009bcsi"):
            self.assertIn(shown, out)
        self.assert_narrow(out.replace("漢", "xx").replace("字", "xx"))
        found = self.run_json("inspect", path)
        self.assertEqual({t["name"] for t in found["tensors"]}, set(names))

    def test_long_name(self):
        # Looking at the rest of the name for each of its characters took 8 s for a name of 1 MB, and more than a minute for 4.
        path = self.path("long.safetensors")
        stfile.write_file(path, [("n" * (4 << 20), "F32", [2])])
        for command in (["inspect"], ["plan", "--tensors"], ["load"]):
            out, _ = self.run_tundish(*command, path, timeout=30)
            self.assert_narrow(out)

    def test_file_name_not_utf8(self):
        folder = os.fsencode(self.path("bytes"))
        os.mkdir(folder)
        stfile.write_file(folder + b"/\xff.safetensors", [("w", "F32", [2])])
        found = self.run_json("inspect", os.fsdecode(folder))
        self.assertEqual(found["files"][0]["name"], "\\xff.safetensors")
        self.assertEqual(found["tensors"][0]["file"], "\\xff.safetensors")
        self.assertEqual(self.run_json("plan", os.fsdecode(folder), "--tensors")["ranks"][0]["layout"][0]["file"],
                         "\\xff.safetensors")
        self.assertTrue(self.run_json("verify", os.fsdecode(folder))["ok"])
        self.assertTrue(self.run_json("load", os.fsdecode(folder))["ok"])

    def test_too_few_descriptors(self):
        path = self.path("files")
        stfile.write_checkpoint(path, [[(f"t{i}", "F32", [1])] for i in range(30)])
        limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
        for command in ("inspect", "plan", "load"):
            _, err = self.run_tundish(command, path, status=5, preexec_fn=limit)
            self.assertRegex(err, r"model-000\d\d-of-00030.safetensors: cannot open: Too many open files; .*ulimit -n")

    def test_huge_dimensions(self):
        path = self.path("dims.safetensors")
        stfile.write_file(path, [("w", "F32", [0, 1 << 63, 2]), ("v", "U8", [1] * 100)])
        self.assert_narrow(self.run_tundish("inspect", path)[0])
        shapes = {t["name"]: t["shape"] for t in self.run_json("inspect", path)["tensors"]}
        self.assertEqual(shapes, {"w": [0, 1 << 63, 2], "v": [1] * 100})

    def test_refused(self):
        for kind, path in self.bad.items():
            out, err = self.run_tundish("inspect", path, status=3)
            self.assertEqual(out, "")
            self.assertIn(f"{kind}.safetensors", err)
        self.run_tundish("inspect", "missing", status=5)
        self.run_tundish("inspect", self.bad["trailing"], "--allow-trailing")


class Verify(Command):
    def test_fine(self):
        self.assertEqual(self.run_tundish("verify", self.moe), ("ok\n", ""))
        self.assertEqual(self.run_json("verify", self.moe), {"schema": "tundish.verify/1", "ok": True, "problems": []})

    def test_every_problem(self):
        found = self.run_json("verify", self.path("bad"), status=1)
        self.assertFalse(found["ok"])
        self.assertEqual({p["file"] for p in found["problems"]}, {kind + ".safetensors" for kind in self.bad})
        for problem in found["problems"]:
            self.assertEqual(list(problem), ["code", "file", "tensor", "message"])
            self.assertRegex(problem["code"], r"\ATND_E_[A-Z_]+\Z")
        out, _ = self.run_tundish("verify", self.path("bad"), status=1)
        self.assertEqual(out.splitlines()[-1], f"{len(self.bad)} problems")
        self.assert_narrow(out)

    def test_nothing_there(self):
        out, err = self.run_tundish("verify", "missing", status=5)
        self.assertEqual(out, "")
        self.assertIn("missing", err)

    def snapshot(self, name):
        """A folder of links to blobs that are named by their contents."""
        import hashlib
        os.makedirs(self.path(name + "/blobs"))
        os.makedirs(self.path(name + "/snapshots/x"))
        stfile.write_file(self.path("blob"), [("w", "F32", [1000])])
        with open(self.path("blob"), "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
        shutil.move(self.path("blob"), self.path(f"{name}/blobs/{digest}"))
        os.symlink(f"../../blobs/{digest}", self.path(f"{name}/snapshots/x/model.safetensors"))
        return self.path(name + "/snapshots/x"), self.path(f"{name}/blobs/{digest}")

    def test_deep(self):
        snapshot, blob = self.snapshot("hub")
        out, _ = self.run_tundish("verify", "--deep", snapshot)
        self.assertRegex(out, r"\Aok: .* read, 1 file checked by SHA-256\n\Z")
        with open(blob, "r+b") as file:
            file.seek(-1, 2)
            file.write(b"\xff")
        self.run_tundish("verify", snapshot)
        found = self.run_json("verify", "--deep", snapshot, status=1)
        self.assertEqual([(p["code"], p["file"]) for p in found["problems"]], [("TND_E_CHECKSUM", "model.safetensors")])
        self.assertIn("download it again", found["problems"][0]["message"])
