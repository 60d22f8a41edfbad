#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Containers and file systems refuse calls one by one; a fallback that was never taken gives an error, or other bytes, on the user's machine.

Each kernel feature is denied in turn by a real seccomp filter, or refused, cut short or interrupted by a preloaded library: the checksums are
those of a plain run, and the report names the way that was taken.
"""
import contextlib
import os
import unittest

import harness
import stfile
from harness import GIB, MIB

DENY = os.environ.get("TND_DENY")
SHIM = os.environ.get("TND_SHIM_LIB")

# What seccomp denies, options, and what some file of the report must show.
DENIED = [
    ("io_uring_setup=EPERM", [], {"engine": "threads", "fallback": "io_uring refused: Operation not permitted"}),
    ("io_uring_setup=ENOSYS", [], {"engine": "threads", "fallback": "io_uring refused: Function not implemented"}),
    ("io_uring_setup", ["--engine", "uring"], {"engine": "threads", "fallback": "io_uring refused"}),
    ("io_uring_enter=EPERM", [], {"engine": "threads", "fallback": "io_uring refused"}),
    ("openat=EINVAL:direct", [], {"direct": False, "fallback": "O_DIRECT refused: Invalid argument"}),
    ("openat=EINVAL:direct preadv2=EOPNOTSUPP:dontcache", [], {"direct": False, "fallback": "O_DIRECT refused"}),
    ("cachestat=ENOSYS", [], {}),
    ("cachestat=EPERM preadv2=EOPNOTSUPP:nowait", [], {"cache": "unknown"}),
    ("cachestat=ENOSYS preadv2=ENOSYS io_uring_setup openat=EINVAL:direct", [], {"engine": "threads", "direct": False}),
    ("madvise=EINVAL", ["--no-shared"], {}),
    ("sched_setaffinity sched_getaffinity mbind", ["--engine", "threads"], {}),
    ("statx=ENOSYS", [], {}),
    ("pidfd_open=ENOSYS", [], {}),
    ("fadvise64=EINVAL", ["--direct", "off"], {}),
    ("eventfd2=EMFILE", ["--no-shared"], {}),
    ("clone3=ENOSYS", [], {}),
]

# What the preloaded library does to reads of the files.
REFUSED = [
    ("reads:direct=EINVAL", ["--engine", "threads", "--direct", "on"],
     {"direct": False, "fallback": "O_DIRECT read refused: Invalid argument"}),
    ("reads:eintr", ["--engine", "threads"], {}),
    ("reads:eintr", ["--engine", "threads", "--direct", "off"], {}),
    ("reads:short", ["--engine", "threads"], {}),
    ("reads:short", ["--engine", "threads", "--direct", "off", "--packing", "name"], {}),
    ("open.direct:EINVAL", ["--engine", "threads"], {}),
    ("cachestat:ENOSYS,reads:short", ["--engine", "threads"], {}),
    ("uring_init:ENOMEM", [], {}),
    ("uring_submit:EBUSY@2", [], {}),
]


class Fallbacks(harness.ProcTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = stfile.moe_checkpoint(os.path.join(cls.scratch, "m"), experts=4, inner=512, hidden=1024)
        cls.tiny = stfile.dense_checkpoint(os.path.join(cls.scratch, "tiny"), hidden=16, heads=2, kv_heads=1, inner=32, vocab=64)
        cls.plain = {folder: cls.sums(cls, folder)[1] for folder in (cls.folder, cls.tiny)}

    def sums(self, folder, *args, **how):
        """(result, checksum lines) of two ranks on cold files."""
        path = os.path.join(self.scratch, "sums")
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
        for file in harness.shards(folder):
            harness.drop_cache(file)
        result = harness.run(["load", folder, "--tp", 2, "--budget", 64 * MIB, "--checksum", path, *args], **how)
        lines = []
        with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
        return result, lines

    def same(self, result, lines, folder, shown):
        report = self.good(result)
        self.assertTrue(self.plain[folder])
        self.assertEqual(lines, self.plain[folder])
        files = [file for rank in report["ranks"] for file in rank["files"]]
        for key, value in shown.items():
            if isinstance(value, str):
                self.assertTrue(any(value in file[key] for file in files), (key, value, files))
            else:
                self.assertTrue(any(file[key] == value for file in files), (key, value, files))

    def shim(self, spec, files="*.safetensors"):
        return {"LD_PRELOAD": SHIM, "TND_SHIM": spec, "TND_SHIM_FILES": files}

    @unittest.skipUnless(DENY, "the seccomp runner was not built")
    def test_denied(self):
        for rules, args, shown in DENIED:
            with self.subTest(denied=rules, args=args):
                self.same(*self.sums(self.folder, *args, wrap=[DENY, *rules.split(), "--"]), self.folder, shown)

    @unittest.skipUnless(SHIM, "the preloaded library was not built")
    def test_refused(self):
        for spec, args, shown in REFUSED:
            with self.subTest(spec=spec, args=args):
                self.same(*self.sums(self.folder, *args, env=self.shim(spec)), self.folder, shown)

    @unittest.skipUnless(SHIM, "the preloaded library was not built")
    def test_one_byte_at_a_time(self):
        for args in (["--engine", "threads"], ["--engine", "threads", "--direct", "off"]):
            with self.subTest(args=args):
                self.same(*self.sums(self.tiny, *args, env=self.shim("reads:byte")), self.tiny, {})

    @unittest.skipUnless(SHIM, "the preloaded library was not built")
    def test_eio_names_the_tensor(self):
        for args in ([], ["--direct", "off"], ["--packing", "name"]):
            with self.subTest(args=args), harness.nothing_left(self):
                result, lines = self.sums(self.folder, "--engine", "threads", *args,
                                          env=self.shim("reads:EIO@3", "*-00002-*"))
                self.assertEqual((result.code, lines), (5, []), result.err)
                error = result.report["error"]
                self.assertEqual((error["code"], error["file"]), ("EIO", "model-00002-of-00003.safetensors"))
                self.assertIn(error["rank"], (0, 1))
                self.assertRegex(error["tensor"], r"^(layers|mtp)\.0\.")
                self.assertIn(error["tensor"], result.err)

    @unittest.skipUnless(SHIM, "the preloaded library was not built")
    def test_the_file_ends_early(self):
        result, _ = self.sums(self.folder, "--engine", "threads", env=self.shim("reads:eof=300000", "*-00002-*"))
        self.assertIn(result.code, (3, 5), result.err)
        self.assertIn(result.report["error"]["code"], ("TND_E_CHANGED", "TND_E_TRUNCATED"))
        self.assertTrue(result.report["error"]["tensor"])

    def test_above_two_gib(self):
        """One tensor of 2.5 GiB, marked around the limits of 31 and 32 bits, in pieces and in one buffer."""
        folder = os.path.join(self.scratch, "l29")
        os.mkdir(folder)
        path = os.path.join(folder, "model.safetensors")
        stfile.header_only(path, [("w", "U8", [5 << 29]), ("tail", "U8", [5])])
        with open(path, "r+b") as file:
            for at in (0x7FFFFFFE, 0x80001000, 0x9FFFFFFF):
                file.seek(at)
                file.write(b"mark")
        seen = set()
        for args in (["--budget", 128 * MIB], ["--budget", 128 * MIB, "--direct", "off", "--packing", "name"],
                     ["--budget", 4 * GIB, "--slab", "0", "--engine", "threads", "--direct", "on"]):
            sums = os.path.join(self.scratch, "sums")
            self.good(harness.run(["load", folder, "--checksum", sums, *args]))
            with open(sums, encoding="utf-8") as file:
                seen.add(file.read())
        self.assertEqual(len(seen), 1, seen)
        try:
            import xxhash
        except ImportError:
            return
        whole = xxhash.xxh3_64()
        with open(path, "rb") as file:
            file.seek(os.path.getsize(path) - (5 << 29) - 5)
            for _ in range(5 << 5):
                whole.update(file.read(1 << 24))
        self.assertIn(f"0\tw\t{5 << 29}\t{whole.hexdigest()}", seen.pop().splitlines())


if __name__ == "__main__":
    harness.main()
