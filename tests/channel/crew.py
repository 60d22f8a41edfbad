# SPDX-License-Identifier: Apache-2.0
"""Drivers (driver.c) as the writer and the readers of a channel, each a process, watched from outside.

    with Crew(test) as crew:
        writer = crew.start()
        address = writer.create(reserved=2)          each command: sent, and its answer waited for
        writer.tell("send", count=5)                 sent only ...
        writer.answer()                              ... and its answer

An answer that does not come by its deadline, or a driver that is alive at the end's, is a failure with a dump: every driver's state, its own
counters and those that lie in shared memory. What is left is killed.
"""
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import unittest

for folder in ("proc", "support"):
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", folder))

import channelmemory as memory  # noqa: E402
import harness  # noqa: E402

DRIVER = os.environ.get("TND_DRIVER", "driver")
# Sanitizers and other work on the machine make everything slower.
SLOWER = int(os.environ.get("TND_SLOWER", "1"))
DEADLINE = 20.0 * SLOWER
DEATH_NS = 200_000_000 * SLOWER
FAILPOINTS = os.environ.get("TND_FAILPOINTS", "0") == "1"


class Answer(dict):
    """{"name": "OK" | "TND_E_..." | "ETIMEDOUT" ..., "rc", "ns", "error", "rank", ...}, members as attributes."""

    __getattr__ = dict.__getitem__


class Driver:
    def __init__(self, crew, wrap=(), env=None, before=None, program=None):
        self.crew, self.rest, self.asked = crew, b"", None
        self.err = tempfile.TemporaryFile()
        self.process = subprocess.Popen([*wrap, program or DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.err, env={**os.environ, **(env or {})}, start_new_session=True,
                                        preexec_fn=before)
        self.pid, self.pidfd, self.code = self.process.pid, os.pidfd_open(self.process.pid), None
        self.stopped = False

    # -- commands --

    def tell(self, what, **members):
        self.asked = {"do": what, **members}
        self.process.stdin.write(json.dumps(self.asked).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, seconds=DEADLINE):
        """The answer to what was told; None if the process ended without one."""
        deadline = time.monotonic() + seconds
        out = self.process.stdout.fileno()
        while b"\n" not in self.rest:
            if not select.select([out], [], [], max(0, deadline - time.monotonic()))[0]:
                self.crew.fail(f"no answer after {seconds} s to {self.asked} of pid {self.pid}")
            data = os.read(out, 65536)
            if not data:
                return None
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\n")
        answer = Answer(json.loads(line))
        if answer.get("bad"):
            self.crew.fail(f"{self.asked}: objects that are not what was sent: {answer}")
        return answer

    def waits(self):
        """Whether it has not answered yet."""
        return b"\n" not in self.rest and not select.select([self.process.stdout], [], [], 0)[0]

    def ask(self, what, seconds=DEADLINE, want="OK", **members):
        self.tell(what, **members)
        answer = self.answer(seconds)
        if answer is None:
            self.crew.fail(f"pid {self.pid} ended instead of answering {self.asked}: {self.end()}\n{self.errors()}")
        if want is not None and answer.name != want:
            self.crew.fail(f"{self.asked}: expected {want}, found {answer}")
        return answer

    def create(self, **options):
        self.address = self.ask("create", **options).address
        return self.address

    def attach(self, address, rank=0, **options):
        return self.ask("attach", address=address, rank=rank, **options)

    def __getattr__(self, what):
        if what.startswith("_"):
            raise AttributeError(what)
        return lambda **members: self.ask(what, **members)

    # -- its life --

    def kill(self):
        """SIGKILL. Returns when it had ended, in ns."""
        os.kill(self.pid, signal.SIGKILL)
        return self.ended()

    def ended(self, seconds=DEADLINE):
        """Waits for its end. Returns the time, in ns: at the latest then."""
        if not select.select([self.pidfd], [], [], seconds)[0]:
            self.crew.fail(f"pid {self.pid} has not ended, last asked {self.asked}")
        return time.monotonic_ns()

    def stop(self):
        os.kill(self.pid, signal.SIGSTOP)
        self.halted()

    def halted(self, seconds=DEADLINE):
        """Waits until it is stopped, by whomever."""
        deadline = time.monotonic() + seconds
        while os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT | os.WEXITED | os.WNOHANG) is None:
            if time.monotonic() > deadline:
                self.crew.fail(f"pid {self.pid} has not stopped, last asked {self.asked}")
            time.sleep(0.001)
        self.stopped = True

    def resume(self):
        self.stopped = False
        os.kill(self.pid, signal.SIGCONT)

    def end(self, seconds=DEADLINE):
        """Ends its input, and waits for its end. Returns the exit code."""
        if self.code is None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            if self.stopped:
                self.resume()
            self.ended(seconds)
            self.code = self.process.wait()
        return self.code

    def errors(self):
        self.err.seek(0)
        return self.err.read().decode(errors="replace")[-4000:]

    def discard(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.err.close()
        os.close(self.pidfd)

    # -- seen from outside --

    def state(self):
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/stat", encoding="latin-1") as file:
            return file.read().rpartition(")")[2].split()[0]
        return "gone"

    def cpu_ns(self):
        """What all its threads have run."""
        total = 0
        for task in os.listdir(f"/proc/{self.pid}/task"):
            with open(f"/proc/{self.pid}/task/{task}/schedstat", encoding="ascii") as file:
                total += int(file.read().split()[0])
        return total

    def segments(self):
        """{"data" | "control": its first bytes}, of its first channel."""
        found = {}
        with contextlib.suppress(OSError):
            for fd in sorted(os.listdir(f"/proc/{self.pid}/fd"), key=int):
                path = f"/proc/{self.pid}/fd/{fd}"
                if "memfd:tundish" not in os.readlink(path):
                    continue
                with open(path, "rb") as file:
                    head = file.read(memory.CONTROL_BYTES)
                kind = {memory.DATA_MAGIC: "data", memory.CONTROL_MAGIC: "control"}.get(head[:8])
                if kind:
                    found.setdefault(kind, head)
        return found

    def header(self):
        header = memory.header(self.segments()["data"])
        header["sent"] = (header["published"] - header["first_number"]) % (1 << 64)
        return header

    def words(self):
        """space_word, writer_waiting, sleepers, ... of the control segment."""
        return memory.WORDS.unpack_from(self.segments()["control"], memory.WORDS_AT)

    def shared_counters(self):
        segments = self.segments()
        lines = []
        if "data" in segments:
            lines.append(" ".join(f"{name} {value}" for name, value in self.header().items() if name not in ("magic", "id", "name")))
        if "control" in segments:
            lines.append("space_word %d writer_waiting %d sleepers %#x head %d high %d/%d sent %d waits %d wakes %d blocked %d"
                         % self.words()[:10])
        for place in range(memory.PLACES if len(segments) == 2 else 0):
            seat = memory.SEAT.unpack_from(segments["data"], memory.seat_at(place))
            if seat[0]:
                cursor = memory.CURSOR.unpack_from(segments["control"], memory.cursor_at(place))
                lines.append(f"place {place}: state, rank, generation, pid, admitted {seat};"
                             f" cursor, left, waits, wakes, blocked, since {cursor}")
        return "\n    ".join(lines)

    def counters(self):
        """Its own, by SIGUSR1, if it can still run."""
        if self.state() not in ("T", "Z", "gone"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)
            select.select([self.pidfd], [], [], 0.2)
        return self.errors()


def until(driver, condition, seconds=DEADLINE):
    """Looks until the condition holds: for what can only be seen from outside."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            driver.crew.fail("what was waited for did not come")
        time.sleep(0.001)


class Crew:
    """The drivers of one test."""

    def __init__(self, test, folder=None):
        self.test, self.folder, self.drivers = test, folder, []
        self.stack = contextlib.ExitStack()

    def __enter__(self):
        self.stack.enter_context(harness.nothing_left(self.test, *([self.folder] if self.folder else [])))
        return self

    def start(self, **how):
        self.drivers.append(Driver(self, **how))
        return self.drivers[-1]

    def pair(self, readers=1, spin=True, **options):
        """A writer and `readers` readers with reserved places, all attached."""
        writer = self.start()
        options.setdefault("reserved", readers)
        address = writer.create(spin=spin, **options)
        crew = [self.start() for _ in range(readers)]
        for rank, reader in enumerate(crew):
            reader.attach(address, rank, spin=spin)
        writer.ask("ready", deadline_ms=int(DEADLINE * 1000))
        return writer, crew

    def drop(self, driver):
        """One that has ended, and of which nothing more is to be known."""
        self.drivers.remove(driver)
        driver.discard()

    def dump(self):
        lines = []
        for driver in self.drivers:
            lines.append(f"pid {driver.pid} {driver.state()}, asked {driver.asked}\n    {driver.shared_counters()}")
            lines.append(driver.counters())
        return "\n".join(lines)

    def fail(self, why):
        self.test.fail(f"{why}\n{self.dump()}")

    def __exit__(self, kind, error, trace):
        try:
            if kind is None:
                self.finish()
        finally:
            for driver in self.drivers:
                driver.discard()
        if kind is None:
            self.stack.close()

    def finish(self):
        """Nobody may be alive at the deadline, and nobody may have ended badly."""
        for driver in self.drivers:
            code = driver.end()
            if code not in (0, -signal.SIGKILL):
                self.fail(f"pid {driver.pid} ended with {code}, last asked {driver.asked}:\n{driver.errors()}")
        for driver in self.drivers:
            left = harness.processes_of_session(driver.pid)
            if left:
                self.fail(f"left processes {left} of driver {driver.pid}")


class ChannelTest(unittest.TestCase):
    def told(self, answer, died_ns, name="TND_E_PEER_DEAD"):
        """The answer is the error of a death, and came in time."""
        self.assertEqual(answer.name, name, answer)
        self.assertLess(answer.ns - died_ns, DEATH_NS, f"told {(answer.ns - died_ns) / 1e6:.1f} ms after the death: {answer}")


def needs_failpoints(test):
    return unittest.skipUnless(FAILPOINTS, "built without failpoints")(test)


def main():
    """All tests of the program, or those that are named on the command line."""
    unittest.main()
