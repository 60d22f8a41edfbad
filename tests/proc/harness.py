# SPDX-License-Identifier: Apache-2.0
"""Runs the command as users do and watches it from outside: memory and page cache, processes, descriptors, files left behind.

    run(args, ...)             one run to its end: Result(code, out, err, report, rusage)
    start(args, ...)           a running one: Running, with progress lines, signals, and the processes of its session
    Sampler(running, files)    resident memory of all its processes and page cache of `files`, every 5 ms
    cached_bytes, drop_cache   page cache of a file
    MemoryLimit(bytes)         a cgroup (v1 or v2) for children, or SkipTest with the reason
    nothing_left(test)         context: no process, no file in /dev/shm or in TMPDIR that was not there before

Waits are events with a deadline: pidfds, pipes, process ends.
"""
import collections
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "support"))

MIB, GIB = 1 << 20, 1 << 30
TOOL = os.environ.get("TUNDISH", "tundish")
DEADLINE = 120.0

Result = collections.namedtuple("Result", "code out err report usage seconds")
libc = ctypes.CDLL(None, use_errno=True)


# -- page cache --

def cached_bytes(path, offset=0, length=0):
    """Bytes of the file that are in the page cache (cachestat; SkipTest where the kernel has none)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        span = (ctypes.c_uint64 * 2)(offset, length)
        out = (ctypes.c_uint64 * 5)()
        if libc.syscall(451, fd, span, out, 0):
            raise unittest.SkipTest(f"cachestat: {os.strerror(ctypes.get_errno())}")
        return out[0] * resource.getpagesize()
    finally:
        os.close(fd)


def drop_cache(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def warm(path, offset, length):
    """Reads a range through the page cache without read-ahead beyond it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        end = offset + length
        while offset < end:
            got = len(os.pread(fd, min(1 << 20, end - offset), offset))
            if not got:
                return
            offset += got
    finally:
        os.close(fd)


def shards(folder):
    return sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".safetensors"))


# -- runs --

def processes_of_session(session):
    """Pids whose session is `session`, zombies left out."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="latin-1") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(entry))
    return found


def wait_gone(pids, seconds):
    """Waits for the ends of `pids`. Returns those that still run at the deadline."""
    deadline = time.monotonic() + seconds
    poll, open_fds = select.poll(), {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            open_fds[fd] = pid
            poll.register(fd, select.POLLIN)
    try:
        while open_fds and time.monotonic() < deadline:
            for fd, _ in poll.poll(max(0, deadline - time.monotonic()) * 1000):
                poll.unregister(fd)
                os.close(fd)
                del open_fds[fd]
        return sorted(open_fds.values())
    finally:
        for fd in open_fds:
            os.close(fd)


class Running:
    """A started command in a session of its own. `progress()` gives its next progress line, None at the end."""

    def __init__(self, args, wrap=(), env=None, limits=(), enter=None, stdout=None, cpus=None):
        self.report_file = tempfile.NamedTemporaryFile(prefix="tundish-report-", suffix=".json")
        self.out, self.err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        read_end, write_end = os.pipe()
        command = [*wrap, TOOL, *args]
        if args[0] == "load":
            command += ["--report", self.report_file.name, "--progress-fd", str(write_end), "--progress", "never"]
        self.began = time.monotonic()

        def before_exec():
            for kind, value in limits:
                resource.setrlimit(kind, (value, value))
            if enter:
                enter()
            if cpus:
                os.sched_setaffinity(0, cpus)

        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.out if stdout is None else stdout,
                                        stderr=self.err, env={**os.environ, **(env or {})}, pass_fds=[write_end],
                                        start_new_session=True, preexec_fn=before_exec)
        os.close(write_end)
        self.pipe, self.lines, self.rest = read_end, [], b""
        self.pid = self.process.pid

    def progress(self, seconds=DEADLINE):
        deadline = time.monotonic() + seconds
        while not self.lines:
            if not select.select([self.pipe], [], [], max(0, deadline - time.monotonic()))[0]:
                raise AssertionError("no progress line before the deadline")
            data = os.read(self.pipe, 65536)
            if not data:
                return None
            *self.lines, self.rest = (self.rest + data).split(b"\n")
        return json.loads(self.lines.pop(0))

    def _drain(self):
        while os.read(self.pipe, 65536):
            pass

    def processes(self):
        return processes_of_session(self.pid)

    def signal_group(self, number):
        os.killpg(self.pid, number)

    def finish(self, seconds=DEADLINE):
        """Waits for the end; past the deadline everything of the session is killed and code is "hang"."""
        killed = threading.Event()

        def overdue():
            killed.set()
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        timer = threading.Timer(seconds, overdue)
        timer.start()
        try:
            drained = threading.Thread(target=self._drain)
            drained.start()
            _, status, usage = os.wait4(self.pid, 0)
            self.process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            timer.cancel()
        took = time.monotonic() - self.began
        left = wait_gone(self.processes(), 5)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        drained.join()
        os.close(self.pipe)
        texts = []
        for file in (self.out, self.err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
            file.close()
        code = "hang" if killed.is_set() else f"left processes {left}" if left else self.process.returncode
        return Result(code, *texts, self._report(), usage, took)

    def _report(self):
        with open(self.report_file.name, encoding="utf-8") as file:
            text = file.read()
        with contextlib.suppress(OSError):
            self.report_file.close()
        return json.loads(text) if text.strip() else None


def start(args, **how):
    return Running([str(arg) for arg in args], **how)


def run(args, seconds=DEADLINE, **how):
    return start(args, **how).finish(seconds)


# -- watching --

def resident(pid):
    """RssAnon + RssShmem in bytes, 0 for a process that is gone."""
    total = 0
    try:
        with open(f"/proc/{pid}/status", encoding="latin-1") as file:
            for line in file:
                if line.startswith(("RssAnon:", "RssShmem:")):
                    total += int(line.split()[1]) * 1024
    except OSError:
        pass
    return total


class Sampler:
    """Every 5 ms: resident memory of each process of a run, page cache of its files. Peaks are over what there was at the start."""

    def __init__(self, running, files=()):
        self.running, self.files = running, files
        self.cache_before = sum(map(cached_bytes, files))
        self.peaks, self.cache_peak, self.sum_peak, self.count = {}, 0, 0, 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self):
        known, turn = [], 0
        while not self.stop.wait(0.005):
            if turn % 20 == 0:
                known = self.running.processes()
            turn += 1
            sizes = {pid: resident(pid) for pid in known}
            cache = sum(map(cached_bytes, self.files)) - self.cache_before if self.files else 0
            self.cache_peak = max(self.cache_peak, cache)
            self.sum_peak = max(self.sum_peak, sum(sizes.values()) + max(cache, 0))
            for pid, size in sizes.items():
                self.peaks[pid] = max(self.peaks.get(pid, 0), size + max(cache, 0))
            self.count += 1

    def end(self):
        self.stop.set()
        self.thread.join()
        return self


class MemoryLimit:
    """A cgroup with a limit for children. `enter` is to be called in the child."""

    def __init__(self, limit):
        v1, v2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"
        if os.path.exists(v1 + "/memory.limit_in_bytes"):
            self.path, limit_name, self.peak_name = v1, "memory.limit_in_bytes", "memory.max_usage_in_bytes"
        else:
            self.path, limit_name, self.peak_name = v2, "memory.max", "memory.peak"
            try:
                with open(v2 + "/cgroup.subtree_control", encoding="ascii") as file:
                    if "memory" not in file.read().split():
                        raise unittest.SkipTest("no memory controller for child cgroups")
            except OSError as error:
                raise unittest.SkipTest(f"no cgroup hierarchy: {error}") from error
        self.path += f"/tundish-test-{os.getpid()}-{id(self):x}"
        try:
            os.mkdir(self.path)
            self._write(limit_name, str(limit))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.rmdir(self.path)
            raise unittest.SkipTest(f"cgroups cannot be made here: {error}") from error

    def _write(self, name, text):
        with open(f"{self.path}/{name}", "w", encoding="ascii") as file:
            file.write(text)

    def enter(self):
        self._write("cgroup.procs", "0")

    def peak(self):
        try:
            with open(f"{self.path}/{self.peak_name}", encoding="ascii") as file:
                return int(file.read())
        except OSError:
            return None

    def remove(self):
        os.rmdir(self.path)


@contextlib.contextmanager
def nothing_left(test, *folders):
    """Nothing new in /dev/shm, TMPDIR (that is ours) and `folders` afterwards, and no descriptor more in this process."""
    watched = ["/dev/shm", *folders]

    def look():
        files = {path: sorted(os.listdir(path)) for path in watched if os.path.isdir(path)}
        return files, len(os.listdir("/proc/self/fd"))

    before = look()
    yield
    test.assertEqual(look(), before, "left behind")


class ProcTest(unittest.TestCase):
    """A scratch folder for each program, and the assertions that all of them share."""

    @classmethod
    def setUpClass(cls):
        cls.scratch_folder = tempfile.TemporaryDirectory(prefix="tundish-proc-", dir=os.environ.get("TND_SCRATCH"))
        cls.scratch = cls.scratch_folder.name

    @classmethod
    def tearDownClass(cls):
        cls.scratch_folder.cleanup()

    def good(self, result):
        self.assertEqual(result.code, 0, f"{result.err[-2000:]}\n{json.dumps(result.report)[:2000]}")
        self.assertTrue(result.report["ok"])
        return result.report

    def within(self, sampler, budget, slack=32 * MIB):
        """Resident growth + page cache growth of each process within budget + 32 MiB, and the samples saw the run."""
        self.assertGreater(sampler.count, 2)
        for pid, peak in sampler.peaks.items():
            self.assertLessEqual(peak, budget + slack, f"process {pid}, over {sampler.count} samples")


def main():
    unittest.main(argv=sys.argv[:1])
