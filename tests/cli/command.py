# SPDX-License-Identifier: Apache-2.0
"""What the tests of the command share: a scratch folder, running the binary, looking at its processes."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

import stfile

TUNDISH = os.environ["TUNDISH_UNDER_TEST"]
DEADLINE = 60  # seconds after which a test gives up on a process; far above what any needs


def environment(**changes):
    """The tests' own, without what would change the output."""
    names = {k: v for k, v in os.environ.items() if not k.startswith("TUNDISH_") and k not in ("NO_COLOR", "COLUMNS")}
    names.update(changes)
    return names


def commands():
    """What this binary has: without ZeroMQ, no bridge."""
    every = ["inspect", "verify", "plan", "load", "doctor", "stat", "bench"]
    out = subprocess.run([TUNDISH, "--help"], capture_output=True, text=True, check=True, timeout=DEADLINE).stdout
    return every + ["bridge"] * ("  bridge " in out)


class Command(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="tundish-cli-")
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.moe = stfile.moe_checkpoint(cls.path("moe"))
        cls.dense = stfile.dense_checkpoint(cls.path("dense"))
        cls.bad = stfile.hostile_files(cls.path("bad"))

    @classmethod
    def path(cls, name):
        return os.path.join(cls.folder, name)

    def run_tundish(self, *arguments, status=0, env=None, **options):
        """Runs to the end; the exit status is checked. Returns (stdout, stderr)."""
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("timeout", DEADLINE)
        done = subprocess.run([TUNDISH, *arguments], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
                              env=environment(**(env or {})), cwd=self.folder, **options)
        self.assertEqual(done.returncode, status, f"{arguments}\n{done.stdout}\n{done.stderr}")
        return done.stdout, done.stderr

    def run_json(self, *arguments, status=0):
        out, _ = self.run_tundish(*arguments, "--json", status=status)
        return json.loads(out)

    def assert_narrow(self, text, columns=80):
        for line in text.splitlines():
            self.assertLessEqual(len(line), columns, line)


def children(pid):
    """Processes that `pid` has started and not yet reaped."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except FileNotFoundError:
        return []


def alive(pid):
    """Running, or a zombie that nobody will reap."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, seconds=10):
    """Looks at `condition` until it is true or the deadline passes; the value it had last."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


class Load:
    """A load of a sparse checkpoint that takes minutes if nobody ends it; `with` sees that somebody does."""

    def __init__(self, path, *arguments, **options):
        self.ranks = []  # known to have been started
        self.lines, end = os.pipe()
        os.set_inheritable(end, True)
        self.process = subprocess.Popen([TUNDISH, "load", path, "--progress-fd", str(end), *arguments],
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
                                        pass_fds=[end], **options)
        os.close(end)

    def wait_for_bytes(self):
        """Until some rank has handed out data: everything is then in full run."""
        with os.fdopen(os.dup(self.lines)) as file:
            for line in file:
                if json.loads(line)["done_bytes"] > 0:
                    return
        raise AssertionError("the load ended early: " + self.process.communicate()[1])

    def finish(self):
        out, err = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, out, err

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.lines)
        # A test that failed may have found ranks that do not end by themselves; they would hold standard error open.
        if self.process.poll() is None:
            self.ranks += children(self.process.pid)
            self.process.kill()
        for pid in self.ranks:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()
