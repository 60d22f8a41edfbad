# SPDX-License-Identifier: Apache-2.0
"""Reads the machine from outside: page cache, disk, memory, processes. Statistics of paired runs.

Figures come from the kernel, not from the contenders: cachestat over the files, /proc/diskstats of the disk that they lie on,
/proc/PID/io and /proc/PID/status of each process, /proc/meminfo sampled while a run lasts.
"""

import ctypes
import os
import platform
import random
import statistics
import subprocess
import threading

CACHESTAT = 451
PAGE = os.sysconf("SC_PAGE_SIZE")
libc = ctypes.CDLL(None, use_errno=True)


def cached_bytes(paths):
    """Bytes of the files in the page cache, or None where the kernel does not say (cachestat came with 6.5)."""
    total = 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            span, answer = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
            if libc.syscall(CACHESTAT, fd, span, answer, 0) != 0:
                return None
            total += answer[0] * PAGE
        finally:
            os.close(fd)
    return total


def drop_caches():
    """Empties the page cache. Needs root."""
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("3\n")


def warm(paths):
    """Reads the files once, so that all of them lie in the page cache."""
    buffer = bytearray(4 << 20)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def disk_of(path):
    """Name of the block device in /proc/diskstats that `path` lies on, or None (overlay, network)."""
    number = os.stat(path).st_dev
    wanted = (os.major(number), os.minor(number))
    for line in open("/proc/diskstats"):
        words = line.split()
        if (int(words[0]), int(words[1])) == wanted:
            return words[2]
    return None


def disk_read_bytes(disk):
    """Bytes that the device has read since boot; sectors there are 512 bytes whatever the device's are."""
    for line in open("/proc/diskstats") if disk else ():
        words = line.split()
        if words[2] == disk:
            return int(words[5]) * 512
    return 0


def fields(path):
    """`name: number [kB]` lines as bytes."""
    result = {}
    with open(path) as file:
        for line in file:
            name, _, rest = line.partition(":")
            words = rest.split()
            if words and words[0].isdigit():
                result[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return result


def reset_peak(pid):
    """VmHWM begins anew; returns the resident bytes of now."""
    with open(f"/proc/{pid}/clear_refs", "w") as file:
        file.write("5\n")
    return fields(f"/proc/{pid}/status")["VmRSS"]


class Sampler:
    """Most memory in use on the whole machine while it runs, above that at its start."""

    def __init__(self, every=0.02):
        self.every, self.ended = every, threading.Event()
        self.free = self.least = fields("/proc/meminfo")["MemFree"]
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()

    def sample(self):
        """The thread."""
        while not self.ended.wait(self.every):
            self.least = min(self.least, fields("/proc/meminfo")["MemFree"])

    def end(self):
        """Bytes."""
        self.ended.set()
        self.thread.join()
        self.least = min(self.least, fields("/proc/meminfo")["MemFree"])
        return self.free - self.least


def machine(path):
    """What a figure is worth nothing without."""
    info = open("/proc/cpuinfo").read()
    model = next((line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")),
                 platform.machine())
    mount = subprocess.run(["findmnt", "-no", "FSTYPE", "-T", path], capture_output=True, text=True, check=False)
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "memory_bytes": fields("/proc/meminfo")["MemTotal"],
            "kernel": platform.release(), "disk": disk_of(path), "file_system": mount.stdout.strip(),
            "hugepages": open("/sys/kernel/mm/transparent_hugepage/enabled").read().strip()}


def quantile(values, share):
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def interval(values, draws=10000, seed=1):
    """95 % bootstrap interval of the median."""
    generator = random.Random(seed)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(draws * 0.025)], medians[int(draws * 0.975)]


def summary(values):
    """Median, least and 99th percentile, and how sure the median is."""
    low, high = interval(values)
    return {"median": statistics.median(values), "min": min(values), "p99": quantile(values, 0.99),
            "low95": low, "high95": high}
