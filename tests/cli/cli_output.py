# SPDX-License-Identifier: Apache-2.0
# What could break: results that a full disk or a closed pipe swallows while the status says 0, a file that lands on a closed
# standard descriptor and is printed into, colour where nobody asked. Descriptors are closed, full, or a pseudo-terminal.

import os
import pty
import resource
import subprocess

from command import TUNDISH, Command, environment

COMMANDS = [["--help"], ["--version"], ["inspect"], ["inspect", "--json"], ["verify"], ["verify", "--json"], ["plan"],
            ["plan", "--json"], ["load"], ["load", "--json"], ["load", "--help"]]


class Output(Command):
    def arguments(self, command):
        return command if command[-1].startswith("--") and len(command) == 1 else [*command, self.moe]

    def test_full_disk(self):
        for command in COMMANDS:
            with open("/dev/full", "w") as full:
                _, err = self.run_tundish(*self.arguments(command), status=5, stdout=full)
            self.assertIn("standard output: No space left on device", err)

    def test_file_size_limit(self):
        # A file that grows to the limit of the process ended it by a signal, without a word.
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        for option in ("--checksum", "--report", "--trace"):
            path = self.path("limited")
            _, err = self.run_tundish("load", self.moe, option, path, status=5, preexec_fn=limit)
            self.assertIn(f"{path}: ", err)
            self.assertIn("File too large", err)
            self.assertEqual([name for name in os.listdir(self.folder) if name.startswith("limited")], [])

    def test_closed(self):
        for command in COMMANDS:
            done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", TUNDISH, *self.arguments(command)],
                                  stderr=subprocess.PIPE, text=True, env=environment(), timeout=60, check=False)
            self.assertEqual(done.returncode, 5, (command, done.stderr))
            self.assertIn("cannot write to standard output", done.stderr)

    def test_reader_went_away(self):
        for command in COMMANDS:
            reading, writing = os.pipe()
            os.close(reading)
            _, err = self.run_tundish(*self.arguments(command), status=5, stdout=writing)
            os.close(writing)
            self.assertIn("standard output: Broken pipe", err)

    def test_nothing_lands_on_closed_descriptors(self):
        # With 0, 1 and 2 closed the first file opened would be descriptor 0, and the report could be printed into.
        report = self.path("report")
        done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", TUNDISH, "load", self.moe, "--report", report,
                               "--tp", "2"], env=environment(), timeout=60, check=False)
        self.assertEqual(done.returncode, 5)
        with open(report) as file:
            self.assertTrue(file.read().startswith("{\n  \"schema\": \"tundish.load/1\""))

    def on_terminal(self, *arguments, **env):
        """What a terminal gets from standard output and standard error."""
        control, terminal = pty.openpty()
        process = subprocess.Popen([TUNDISH, *arguments], stdout=terminal, stderr=terminal, stdin=subprocess.DEVNULL,
                                   env=environment(TERM="xterm", **env))
        os.close(terminal)
        text = b""
        while True:
            try:
                piece = os.read(control, 65536)
            except OSError:  # EIO: the other side is closed
                break
            if not piece:
                break
            text += piece
        os.close(control)
        self.assertEqual(process.wait(timeout=60), 0)
        return text.decode()

    def test_colour(self):
        for arguments in (["plan", self.moe], ["inspect", self.moe], ["load", self.moe, "--progress", "never"]):
            self.assertIn("\x1b[1m", self.on_terminal(*arguments))
            self.assertNotIn("\x1b", self.on_terminal(*arguments, NO_COLOR="1"))
            self.assertIn("\x1b[1m", self.on_terminal(*arguments, NO_COLOR=""))
            self.assertNotIn("\x1b", self.run_tundish(*arguments)[0])

    def test_bar(self):
        self.assertRegex(self.on_terminal("load", self.moe), r"\r\x1b\[K\[[#.]{24}\] .* of .* GB/s")
        self.assertNotIn("GB/s  ", self.on_terminal("load", self.moe, "--progress", "never"))
        _, err = self.run_tundish("load", self.moe, "--progress", "always")
        self.assertIn("GB/s", err)

    def test_json_has_no_colour(self):
        self.assertNotIn("\x1b", self.on_terminal("plan", self.moe, "--json"))

    def test_file_mode_follows_umask(self):
        report = self.path("mode")
        subprocess.run(["sh", "-c", 'umask 027; exec "$@"', "sh", TUNDISH, "load", self.moe, "--report", report],
                       stdout=subprocess.DEVNULL, env=environment(), timeout=60, check=True)
        self.assertEqual(os.stat(report).st_mode & 0o777, 0o640)
