# SPDX-License-Identifier: Apache-2.0
# What could break: an option that exists but is not in the manual page or the completions, or the other way round. The list in
# --help-all is the tool's own table; everything else is compared with it.

import os
import re
import shutil
import subprocess
import unittest

from command import Command, commands, environment

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
COMMANDS = commands()


def text_of(*parts):
    with open(os.path.join(ROOT, *parts)) as file:
        return file.read()


class Docs(Command):
    def options(self, command):
        """{option: takes a value} of --help-all."""
        out, _ = self.run_tundish(command, "--help-all")
        return {name: bool(value) for name, value in re.findall(r"(?m)^ {6}(--[a-z-]+)(=[A-Z]+)?", out)}

    def test_manual_pages(self):
        for command in COMMANDS:
            page = text_of("man", f"tundish-{command}.1")
            listed = {"-" + name: bool(value) for name, value in
                      re.findall(r"(?m)^\.It Fl (-[a-z-]+)( Ns = Ns Ar [A-Z]+)?$", page)}
            self.assertEqual(listed, self.options(command), command)

    def test_every_error_is_in_the_manual(self):
        names = re.findall(r"X\((TND_E_[A-Z_]+),", text_of("include", "tundish", "error.h"))
        self.assertGreater(len(names), 20)
        self.assertEqual(re.findall(r"(?m)^\.It Dv (TND_E_[A-Z_]+)$", text_of("man", "tundish.3")), names)

    @unittest.skipUnless(shutil.which("mandoc"), "mandoc is not installed")
    def test_manual_pages_are_clean(self):
        pages = sorted(os.listdir(os.path.join(ROOT, "man")))
        pages = [page for page in pages if page[-2:] in (".1", ".3")]
        self.assertEqual(pages, sorted(re.findall(r"'([^']*\.[13])'", text_of("man", "meson.build"))))
        pages = [os.path.join(ROOT, "man", page) for page in pages]
        done = subprocess.run(["mandoc", "-Tlint", "-W", "warning", *pages], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stdout), (0, ""))

    def complete_bash(self, *words):
        script = ('source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); compopt() { :; }; _tundish; '
                  'printf "%s\\n" "${COMPREPLY[@]}"')
        done = subprocess.run(["bash", "-c", script, "bash", os.path.join(ROOT, "completions", "tundish.bash"), *words],
                              capture_output=True, text=True, env=environment(), cwd=self.folder, check=True)
        self.assertEqual(done.stderr, "")
        return set(done.stdout.split())

    def test_bash(self):
        for command in COMMANDS:
            self.assertIn(command, self.complete_bash("tundish", ""))
            expected = {name + "=" * value for name, value in self.options(command).items()}
            self.assertEqual(self.complete_bash("tundish", command, "--"), expected, command)
        self.assertEqual(self.complete_bash("tundish", "plan", "--phase", "=", "d"), {"draft"})
        self.assertEqual(self.complete_bash("tundish", "load", "--engine", "=", ""), {"auto", "uring", "threads"})
        self.assertEqual(self.complete_bash("tundish", "load", "mo"), {"moe"})
        self.assertEqual(self.complete_bash("tundish", "bench", "ch"), {"channel"})

    def test_zsh(self):
        text = text_of("completions", "_tundish")
        entry = re.compile(r"(?m)^\t+'\*?(--[a-z-]+)(=?)\[")
        arrays = {name: dict(entry.findall(body)) for name, body in
                  re.findall(r"(?ms)^(_tundish_[a-z]+)=\(\n(.*?)^\)", text)}
        for command in COMMANDS:
            body = re.search(rf"(?ms)^\t{command}\)\n(.*?)^\t\t;;", text).group(1)
            listed = dict(entry.findall(body))
            for name, entries in arrays.items():
                if f"${name}" in body:
                    listed.update(entries)
            self.assertEqual({name: bool(value) for name, value in listed.items()}, self.options(command), command)

    @unittest.skipUnless(shutil.which("zsh"), "zsh is not installed")
    def test_zsh_parses(self):
        subprocess.run(["zsh", "-n", os.path.join(ROOT, "completions", "_tundish")], check=True)
