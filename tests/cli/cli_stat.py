# SPDX-License-Identifier: Apache-2.0
# What could break: figures in the wrong column or under another key, lines wider than a terminal, colour where nobody asked for it,
# samples that Prometheus refuses, a watch that does not end, or ends with half a document. Shown on channels made by hand, in a pid
# namespace of their own where the output is to be exact, and by name among whatever else this user has.

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import unittest

from channelmemory import DEAD, LIVE
from command import DEADLINE, TUNDISH, Command, environment, wait_until
from fakechannel import FakeChannel
from fakeload import MEMBER, NO_RANK, READER, FakeLoad

SCENE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support", "fakechannel.py")
ALONE = ["unshare", "--pid", "--fork", "--mount-proc"] + ([] if os.geteuid() == 0 else ["--user", "--map-root-user"])

TEXT = """\
CHANNEL                 PID  STATE    OBJECTS  BYTES  FULL  SENT  WAITS  BLOCKED
a name th...and is cut    1  closed         0    0 B    0%     1      0      0 s
tokens                    1  open           8  512 B  100%     8      5    2.5 s
  reader 0                1  alive          0    0 B    0%            3    1.5 s
  reader 1                1  late           8  512 B  100%            3    1.5 s
  reader 2                -  missing        1   64 B   13%            3    1.5 s
  reader 9                -  evicted        0    0 B    0%            3    1.5 s

POOL     PID  SLABS  LIVE     BYTES  LEASES
{0:<7}    1      1     1  2.00 MiB       0

LOAD    PID  FILE                      DONE     TOTAL       CHARGED    BUDGET
3         1  model-00002-of-00048  2.00 GiB  76.0 GiB  2%  1.00 KiB  67.0 MiB
reader    1  model-00003-of-00048  5.00 GiB   144 GiB  3%  6.00 GiB  6.00 GiB
"""


def can_be_alone():
    return shutil.which("unshare") and subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0


def waiting_bytes(pipe):
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0]


def read_terminal(parent):
    text = b""
    while True:
        try:
            piece = os.read(parent, 65536)
        except OSError:  # the other end is closed
            return text.decode()
        if not piece:
            return text.decode()
        text += piece


class Stat(Command):
    def alone(self, *arguments, scene=True):
        """stat where nothing else is to be seen."""
        holder = [sys.executable, SCENE] if scene else []
        done = subprocess.run([*ALONE, *holder, TUNDISH, "stat", *arguments], capture_output=True, text=True, check=False,
                              timeout=DEADLINE, env=environment())
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    @unittest.skipUnless(can_be_alone(), "no pid namespaces here")
    def test_text(self):
        name = os.path.basename(os.path.realpath(sys.executable))[:15]
        out = self.alone()
        self.assert_narrow(out)
        self.assertEqual(re.sub(r"\npython\S*", f"\n{'python3':<7}", out), re.sub(name, "python3", TEXT.format("python3")))

    @unittest.skipUnless(can_be_alone(), "no pid namespaces here")
    def test_nothing(self):
        self.assertEqual(self.alone(scene=False), "no channels, pools or loads of this user\n")
        self.assertEqual(json.loads(self.alone("--json", scene=False)),
                         {"schema": "tundish.stat/1", "channels": [], "pools": [], "loads": []})

    def channel(self, name):
        found = [channel for channel in self.run_json("stat")["channels"] if channel["name"] == name]
        self.assertEqual(len(found), 1)
        return found[0]

    def test_json(self):
        fake = FakeChannel("cli-json", [64, 128, 192], [(4, LIVE, 0, 1), (5, DEAD, 77, 0)], waits=9, blocked_ns=250000000)
        self.addCleanup(fake.close)
        self.assertEqual(self.channel("cli-json"), {
            "name": "cli-json", "pid": os.getpid(), "max_bytes": 65536, "max_objects": 8, "used_bytes": 320, "used_objects": 2,
            "high_bytes": 384, "high_objects": 3, "sent_objects": 3, "sent_bytes": 384,
            "writer": {"alive": True, "waits": 9, "blocked_seconds": 0.25},
            "readers": [{"rank": 4, "pid": 0, "state": "alive", "lag_objects": 2, "lag_bytes": 320, "waits": 3, "wakes": 2,
                         "blocked_seconds": 1.5},
                        {"rank": 5, "pid": 77, "state": "dead", "lag_objects": 0, "lag_bytes": 0, "waits": 3, "wakes": 2,
                         "blocked_seconds": 1.5}]})
        document = self.run_json("stat")
        self.assertEqual(set(document), {"schema", "channels", "pools", "loads"})

    def test_json_load(self):
        loads = [FakeLoad(NO_RANK, "b", [1, 2, 3, 4, 5], role=READER),
                 FakeLoad(7, "a \u00e9", [1 << 40, 1 << 41, 3, 4, 5], role=MEMBER),
                 FakeLoad(8, "", [0, 0, 0, 0, 0])]
        for load in loads:
            self.addCleanup(load.close)
        own = {"pid": os.getpid(), "state": "alive"}
        self.assertEqual([load for load in self.run_json("stat")["loads"] if load["pid"] == os.getpid()], [
            own | {"rank": 7, "role": "member", "file": "a \u00e9", "done_bytes": 1 << 40, "total_bytes": 1 << 41,
                   "charged_bytes": 3, "budget_bytes": 4, "storage_bytes": 5},
            own | {"rank": 8, "role": "alone", "file": "", "done_bytes": 0, "total_bytes": 0,
                   "charged_bytes": 0, "budget_bytes": 0, "storage_bytes": 0},
            own | {"rank": None, "role": "reader", "file": "b", "done_bytes": 1, "total_bytes": 2,
                   "charged_bytes": 3, "budget_bytes": 4, "storage_bytes": 5}])

    def test_hostile_load(self):
        """What says it is somebody else's is not shown; the rest stays within its columns."""
        most = (1 << 64) - 1
        loads = [FakeLoad(NO_RANK - 1, "\u202e\U0001f600" * 30, [most] * 5), FakeLoad(3, "not mine", [1] * 5, pid=1),
                 FakeLoad(0, "n" * 300, [1 << 62, most, 1048063, 1023 << 50, 0])]
        for load in loads:
            self.addCleanup(load.close)
        out, _ = self.run_tundish("stat")
        self.assert_narrow(out)
        self.assertNotIn("\u202e", out)
        self.assertNotIn("not mine", out)
        self.assertRegex(out, r"(?m)^-  +\d+ .* 16.0 EiB  16.0 EiB  100%  16.0 EiB  16.0 EiB$")
        self.assertRegex(out, r"(?m)^0  +\d+ .* 4.00 EiB  16.0 EiB +25%  1.00 MiB  1.00 EiB$")

    def test_hostile_widths(self):
        fake = FakeChannel("\u202e\U0001f600" * 9, [64] * 8, [(0xffffffff, LIVE, 0xffffffff, 0)], waits=1 << 63,
                           blocked_ns=(1 << 64) - 1)
        self.addCleanup(fake.close)
        fake.change(writer_pid=0x7fffffff, published=1 << 62)
        out, _ = self.run_tundish("stat")
        self.assert_narrow(out)
        self.assertNotIn("\u202e", out)

    def test_prometheus(self):
        fakes = [FakeChannel('cli "quoted" \\n', [64], [(0, LIVE, 0, 0), (1, LIVE, 0, 1)]) for _ in range(2)]
        loads = [FakeLoad(7, "x", [1, 2, 3, 4, 5]) for _ in range(2)] + [FakeLoad(NO_RANK, "x", [6, 7, 8, 9, 10], role=READER)]
        for fake in fakes + loads:
            self.addCleanup(fake.close)
        out, _ = self.run_tundish("stat", "--prometheus")
        sample = re.compile(r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+)\} [0-9.e+-]+\Z')
        seen, typed = set(), {}
        for line in out.splitlines():
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split()
                self.assertNotIn(name, typed)
                typed[name] = kind
            elif not line.startswith("# HELP "):
                match = sample.match(line)
                self.assertTrue(match, line)
                self.assertIn(match.group(1), typed)
                self.assertNotIn(match.groups(), seen)
                seen.add(match.groups())
        for name, kind in typed.items():
            self.assertRegex(name, r"\Atundish_(channel|pool|load)_")
            self.assertEqual(kind == "counter", name.endswith("_total"), name)
        label = f'name="cli \\"quoted\\" \\\\n",pid="{os.getpid()}"'
        self.assertIn(("tundish_channel_used_bytes", label), seen)
        self.assertIn(("tundish_channel_used_bytes", label + ',n="2"'), seen)
        for name, value, reader in (("done", 1, 6), ("total", 2, 7), ("charged", 3, 8), ("budget", 4, 9), ("storage", 5, 10)):
            label = f'pid="{os.getpid()}",role="alone",rank="7"'
            self.assertIn(f"\ntundish_load_{name}_bytes{{{label}}} {value}\n", out)
            self.assertIn(f'\ntundish_load_{name}_bytes{{{label},n="2"}} {value}\n', out)
            self.assertIn(f'\ntundish_load_{name}_bytes{{pid="{os.getpid()}",role="reader"}} {reader}\n', out)
        label = f'name="cli \\"quoted\\" \\\\n",pid="{os.getpid()}"'
        self.assertIn(("tundish_channel_reader_state", label + ',rank="1",state="alive"'), seen)

    def on_terminal(self, *arguments, **changes):
        fake = FakeChannel("cli-terminal", [64])
        self.addCleanup(fake.close)
        parent, child = pty.openpty()
        process = subprocess.Popen([TUNDISH, "stat", *arguments], stdout=child, stdin=subprocess.DEVNULL,
                                   env=environment(TERM="xterm", **changes))
        os.close(child)
        return process, parent

    def test_colour(self):
        for changes, bold in (({}, True), ({"NO_COLOR": "1"}, False)):
            process, parent = self.on_terminal(**changes)
            text = read_terminal(parent)
            os.close(parent)
            self.assertEqual(process.wait(DEADLINE), 0)
            self.assertEqual("\033[1m" in text, bold)
        self.assertNotIn("\033", self.run_tundish("stat", env={"TERM": "xterm"})[0])

    def test_watch_redraws_a_terminal(self):
        process, parent = self.on_terminal("--watch", "--interval=0.02")
        text = ""
        while text.count("\033[H\033[J") < 3:
            text += os.read(parent, 65536).decode()
        process.send_signal(signal.SIGINT)
        text += read_terminal(parent)
        os.close(parent)
        self.assertEqual(process.wait(DEADLINE), 130)

    def test_watch_json(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with subprocess.Popen([TUNDISH, "stat", "--watch", "--json", "--interval=0.02"], stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True, env=environment()) as process:
                lines = [process.stdout.readline() for _ in range(3)]
                process.send_signal(number)
                rest, err = process.communicate(timeout=DEADLINE)
            self.assertEqual((process.returncode, err), (130, ""))
            for line in lines + rest.splitlines():
                self.assertEqual(json.loads(line)["schema"], "tundish.stat/1")

    def test_watch_ends_with_its_reader(self):
        with subprocess.Popen([TUNDISH, "stat", "--watch", "--json", "--interval=0.01"], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, env=environment()) as process:
            process.stdout.readline()
            process.stdout.close()
            self.assertEqual(process.wait(DEADLINE), 5)
            self.assertIn("standard output", process.stderr.read())

    def test_watch_that_nobody_reads_ends(self):
        """The pipe is full, and the command waits in the middle of a document."""
        fake = FakeChannel("cli-full", [64])
        self.addCleanup(fake.close)
        reading, writing = os.pipe()
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        process = subprocess.Popen([TUNDISH, "stat", "--watch", "--json", "--interval=0.0001"], stdout=writing,
                                   env=environment())
        os.close(writing)
        try:
            # A document is written whole or not at all: the next one has no room, and nothing comes any more. How long
            # it is nobody knows, for other programs come and go.
            self.assertTrue(wait_until(lambda: (waiting := waiting_bytes(reading)) > 0 and not wait_until(
                lambda: waiting_bytes(reading) != waiting, 0.2)))
            process.send_signal(signal.SIGINT)
            self.assertEqual(process.wait(DEADLINE), 130)
        finally:
            process.kill()
            process.wait()
            os.close(reading)

    def refused(self, *arguments, says):
        _, err = self.run_tundish("stat", *arguments, status=2)
        self.assertIn(says, err)

    def test_usage(self):
        self.refused("x", says="found 'x'")
        self.refused("--json", "--prometheus", says="with --json")
        self.refused("--watch", "--prometheus", says="with --watch")
        self.refused("--interval=1", says="add --watch")
        self.refused("--watch", "--interval=0", says="--interval")
