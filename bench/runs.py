# SPDX-License-Identifier: Apache-2.0
"""One run: processes that are ready, the machine made cold or warm, the word to go, and what the kernel counted.

      driver                         process (one a rank)
        |------------ start ----------->|  imports, prepares
        |<----------- "ready" ----------|
        |  caches, counters             |
        |------------ "go" ------------>|  loads
        |<----------- JSON -------------|
        |  counters                     |  stays, so that it can be looked at
        |------------ end of input ---->|
"""

import json
import subprocess
import tempfile
import threading

import common


class Failed(Exception):
    """A process that did not do its work; the text is the end of what it said."""


class Process:
    """One contender's process."""

    def __init__(self, line):
        self.errors = tempfile.TemporaryFile("w+")
        self.popen = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True)

    def read(self, prefix):
        """The next line that begins with `prefix`; some loaders print on standard output."""
        for line in self.popen.stdout:
            if line.startswith(prefix):
                return line
        self.popen.wait()
        self.errors.seek(0)
        said = self.errors.read().strip().splitlines()
        raise Failed(f"exit {self.popen.returncode}: {said[-1] if said else 'nothing said'}")

    def go(self):
        """Starts its clock."""
        self.popen.stdin.write("go\n")
        self.popen.stdin.flush()

    def read_bytes(self):
        """Bytes that it had fetched from storage so far."""
        return common.fields(f"/proc/{self.popen.pid}/io")["read_bytes"]

    def end(self):
        """Lets it go, or ends it where it does not."""
        try:
            self.popen.stdin.close()
            self.popen.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self.popen.kill()
            self.popen.wait()
        self.popen.stdout.close()
        self.errors.close()


def watched(processes, checkpoint):
    """Says go, waits for all, and returns what was counted meanwhile."""
    pids = [process.popen.pid for process in processes]
    resident = [common.reset_peak(pid) for pid in pids]
    fetched = [process.read_bytes() for process in processes]
    cached, disk = common.cached_bytes(checkpoint.files), common.disk_read_bytes(checkpoint.disk)
    sampler = common.Sampler()
    try:
        for process in processes:
            process.go()
        answers = [json.loads(process.read("{")) for process in processes]
    finally:
        host = sampler.end()
    status = [common.fields(f"/proc/{pid}/status") for pid in pids]
    now = common.cached_bytes(checkpoint.files)
    return {
        "seconds": max(answer["end"] for answer in answers) - min(answer["start"] for answer in answers),
        "kept_bytes": sum(answer["bytes"] for answer in answers),
        "tensors": sum(answer["tensors"] for answer in answers),
        "grown_bytes": sum(one["VmHWM"] - before for one, before in zip(status, resident)),
        "host_bytes": host,
        "cache_growth_bytes": None if now is None or cached is None else now - cached,
        "disk_bytes": common.disk_read_bytes(checkpoint.disk) - disk,
        "process_bytes": sum(process.read_bytes() - before for process, before in zip(processes, fetched)),
        "answers": answers,
    }


def run(lines, checkpoint, warm):
    """One process for each command line."""
    processes = []
    timer = threading.Timer(checkpoint.options.timeout, lambda: [one.popen.kill() for one in processes])
    timer.start()
    try:
        for line in lines:
            processes.append(Process(line))
        for process in processes:
            process.read("ready")
        if warm:
            common.warm(checkpoint.files)
        else:
            common.drop_caches()
        return watched(processes, checkpoint)
    finally:
        timer.cancel()
        for process in processes:
            process.end()
