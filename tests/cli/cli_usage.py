# SPDX-License-Identifier: Apache-2.0
# What could break: an option that is taken although it means nothing, a status that scripts do not expect, help that does not
# fit a terminal. Each test runs one command line and looks at status, stream and text.

import re
import unittest

from command import Command, commands

COMMANDS = commands()


class Usage(Command):
    def refused(self, *arguments, says):
        out, err = self.run_tundish(*arguments, status=2)
        self.assertEqual(out, "")
        self.assertIn(says, err)
        self.assertIn("--help", err)

    def test_version(self):
        out, err = self.run_tundish("--version")
        self.assertRegex(out, r"\Atundish \d+\.\d+\.\d+\n\Z")
        self.assertEqual(err, "")

    def test_help_names_every_command(self):
        out, _ = self.run_tundish("--help")
        for command in COMMANDS:
            self.assertRegex(out, rf"(?m)^  {command} ")
        self.assert_narrow(out)
        out, _ = self.run_tundish("--help-all")
        self.assertIn("130  interrupted", out)

    def test_help_of_commands(self):
        for command in COMMANDS:
            short, err = self.run_tundish(command, "--help")
            long, _ = self.run_tundish(command, "--help-all")
            usage, _ = self.run_tundish(command, "--usage")
            self.assertEqual(err, "")
            for text in (short, long, usage):
                self.assertIn(f"tundish {command}", text)
                self.assert_narrow(text)
            self.assertLessEqual(len(short.splitlines()), 40)
            self.assertLess(set(re.findall(r"--[a-z-]+", short)), set(re.findall(r"--[a-z-]+", long)))

    def test_help_is_the_same_whatever_the_terminal_is(self):
        wide, _ = self.run_tundish("load", "--help", env={"COLUMNS": "200", "ARGP_HELP_FMT": "rmargin=200"})
        self.assertEqual(wide, self.run_tundish("load", "--help")[0])

    def test_no_command(self):
        self.refused(says="expected a command")
        self.refused("melt", says="unknown command 'melt'")
        self.refused("--melt", says="unrecognized option '--melt'")

    def test_unknown_options(self):
        for command in COMMANDS:
            self.refused(command, "--melt", says="--melt")
        for later in ("--vllm=x", "--measure"):
            self.refused("load", self.moe, later, says=later.partition("=")[0])

    @unittest.skipIf("bridge" in COMMANDS, "built with ZeroMQ")
    def test_without_zeromq(self):
        self.refused("bridge", says="built without ZeroMQ")

    def test_path_is_one(self):
        for command in COMMANDS[:4]:
            self.refused(command, says="PATH")
        self.refused("plan", "a", "b", says="'a' and 'b'")

    def test_double_dash_ends_options(self):
        out, err = self.run_tundish("inspect", "--", "--json", status=5)
        self.assertIn("--json: ", err)

    def test_options_after_the_path(self):
        self.assertEqual(self.run_tundish("plan", self.moe, "--tp", "2"), self.run_tundish("plan", "--tp=2", self.moe))

    def test_numbers_are_strict(self):
        for value in ("0", "-1", "2x", "", " 2", "1e1", "99999999999999999999", "+2"):
            self.refused("plan", self.moe, f"--tp={value}", says="--tp: expected a number from 1 to 1024")
        self.refused("load", self.moe, "--threads=0", says="--threads")
        self.refused("load", self.moe, "--deadline=-1", says="--deadline")
        self.refused("load", self.moe, "--deadline=nan", says="--deadline")
        self.refused("plan", self.moe, "--align=3", says="power of two")

    def test_sizes(self):
        for text, count in (("64MiB", 64 << 20), ("64M", 64 << 20), ("67MB", 67000000), ("0.5GiB", 1 << 29),
                            ("33554432", 32 << 20)):
            self.assertEqual(self.run_json("plan", self.moe, "--budget", text)["budget_bytes"], count)
        for text in ("64MX", "", "-1", "MiB", "1e9", "0x10", "nan"):
            self.refused("plan", self.moe, f"--budget={text}", says="--budget: expected a size")
        self.refused("plan", self.moe, "--budget=0", says="above 0")

    def test_words(self):
        for option in ("phase", "slice", "packing", "oversize", "ep-placement", "ep-scales"):
            self.refused("plan", self.moe, f"--{option}=melt", says=f"--{option}: expected one of ")
        for option in ("engine", "direct", "on-full", "on-dead", "progress"):
            self.refused("load", self.moe, f"--{option}=melt", says=f"--{option}: expected one of ")
        self.refused("inspect", self.moe, "--sort=melt", says="--sort: expected one of name, size, offset")

    def test_layout_adds_up(self):
        self.refused("plan", self.moe, "--tp=4", "--rank=4", says="below --tp x --dp = 4, found '4'")
        self.refused("plan", self.moe, "--tp=4", "--ep=3", says="--ep: expected a divisor")
        self.refused("load", self.moe, "--tp=1024", "--dp=2", says="at most 1024 ranks")

    def test_shared(self):
        for words, says in ((["--group=unix:@x"], "--group: expected with --rank"),
                            (["--tp=2", "--rank=0", "--shared"], "--shared: expected --group"),
                            (["--tp=2", "--rank=0", "--group=unix:@x", "--no-shared"], "--group: expected without"),
                            (["--guest"], "--guest: expected with --group"),
                            (["--members=0"], "--members: expected with --shared"),
                            (["--evict=1"], "--evict: expected with --shared"),
                            (["--evict=-1", "--shared"], "--evict"),
                            (["--tp=4", "--rank=1", "--group=unix:@x", "--members=0,2-3"], "--rank: expected one of")):
            self.refused("load", self.moe, *words, says=says)
        for text in ("", ",", "0,", "0-", "-1", "1,0", "0,0", "2-1", "4", "0-4", "0x1", "0 1", "99999"):
            self.refused("load", self.moe, "--tp=4", "--shared", f"--members={text}", says="--members: expected ranks below 4")

    def test_progress_fd(self):
        self.refused("load", self.moe, "--progress-fd=77", says="open for writing")
        with open("/dev/null") as reading:
            _, err = self.run_tundish("load", self.moe, f"--progress-fd={reading.fileno()}", status=2,
                                      pass_fds=[reading.fileno()])
        self.assertIn("open for writing", err)

    def test_library_refuses_an_option(self):
        _, err = self.run_tundish("load", self.moe, "--cpus", "melt", status=2)
        self.assertIn("melt", err)

    def test_numa_node_that_is_not_there(self):
        for node in ("999", "1023"):
            _, err = self.run_tundish("load", self.moe, "--budget", "64M", "--numa", node, status=2)
            self.assertIn(f"found node {node}; give", err)
        self.run_tundish("load", self.moe, "--budget", "64M", "--numa", "interleave")
