#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the model of the channel with spin, and that each mutant of it fails.

    python3 models/run.py                    everything, smallest first
    python3 models/run.py two_readers V2V1   these
    python3 models/run.py --mutants          all mutants (--configurations: all configurations)
    python3 models/run.py --trail V2V1       the steps that lead to a mutant's failure

A configuration passes if spin has looked at every reachable state and found no error. A search that was cut short (depth,
memory, time) is a failure. A mutant passes if spin finds the kind of error that it stands for.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
MODEL = os.path.join(HERE, "channel.pml")
MEMORY_MIB = 1900
SECONDS = 300

TWO = "READERS=2"
CONFIGURATIONS = {
    "one_reader": [],
    "bytes": ["BYTES", "OBJECTS=6"],
    "close": ["CLOSE_AT_ONCE"],
    "leave": ["LEAVES"],
    "needless_wakes": ["NEEDLESS_WAKES"],
    "join_alone": ["JOIN"],
    "reserved": ["RESERVED"],
    "reserved_death": ["RESERVED", "READER_DIES"],
    "join_death": ["JOIN", "READER_DIES"],
    "evict": ["EVICTS"],
    "reader_death": ["READER_DIES"],
    "reader_death_error": ["READER_DIES", "DEAD_ERROR"],
    "writer_death": ["WRITER_DIES"],
    "join_writer_death": ["JOIN", "WRITER_DIES"],
    "reattach": [TWO, "REATTACH", "JOIN", "EVICTS", "OBJECTS=3"],
    "two_readers": [TWO, "OBJECTS=3"],
    "two_readers_bytes": [TWO, "OBJECTS=3", "BYTES"],
    "two_readers_join": [TWO, "JOIN", "OBJECTS=3"],
    "two_readers_death": [TWO, "READER_DIES", "OBJECTS=2", "BYTES"],
    "two_readers_evict": [TWO, "EVICTS", "OBJECTS=2", "BYTES"],
}

OVERWRITE = r"assertion violated .*held"
BAD_CURSOR = r"assertion violated .*seen"
WRONG_OBJECT = r"assertion violated .*slot"
MISSING = r"assertion violated .*published"
LOST_WAKE = r"invalid end state"
MUTANTS = {
    "W3": (LOST_WAKE, ["M_W3"]),
    "R3": (LOST_WAKE, ["M_R3"]),
    "S2": (LOST_WAKE, ["M_S2"]),
    "V2": (LOST_WAKE, ["M_V2"]),
    "S2S1": (LOST_WAKE, ["M_S21"]),
    "V2V1": (LOST_WAKE, ["M_V21", "BYTES"]),
    "V2V1_two": (LOST_WAKE, ["M_V21", TWO, "OBJECTS=3"]),
    "S1S3": (LOST_WAKE, ["M_S13"]),
    "V1V3": (LOST_WAKE, ["M_V13"]),
    "W7W3": (LOST_WAKE, ["M_W73"]),
    "R6R3": (LOST_WAKE, ["M_R63"]),
    "R7": (LOST_WAKE, ["M_R7"]),
    "R3R2": (OVERWRITE, ["M_R32"]),
    "S3": (MISSING, ["M_S3", "CLOSE_AT_ONCE"]),
    "A1A2": (OVERWRITE, ["M_A12", "JOIN"]),
    "E1E3": (OVERWRITE + "|" + WRONG_OBJECT, ["M_E1", "EVICTS"]),
    "E5": (LOST_WAKE, ["M_E5", "EVICTS"]),
    "E5_death": (LOST_WAKE, ["M_E5", "READER_DIES"]),
    "reuse": (LOST_WAKE + "|" + BAD_CURSOR, ["M_REUSE", TWO, "REATTACH", "JOIN", "EVICTS", "OBJECTS=3"]),
}


class Result:
    """What spin said of one set of defines."""

    def __init__(self, text, seconds):
        self.text, self.seconds = text, seconds
        found = re.search(r"errors: (\d+)", text)
        self.errors = int(found.group(1)) if found else None
        found = re.search(r"^ *([\d.e+]+) states, stored", text, re.M)
        self.states = int(float(found.group(1))) if found else 0
        found = re.search(r"^ *([\d.]+)\s+total actual memory usage", text, re.M)
        self.memory_mib = float(found.group(1)) if found else 0.0
        found = re.search(r"^pan:1: (.*)", text, re.M)
        self.error = found.group(1) if found else None

    @property
    def cut_short(self):
        signs = ("Search not completed", "max search depth too small", "reached -DMEMLIM", "out of memory")
        return self.errors is None or any(sign in self.text for sign in signs)


def command(arguments, folder, seconds=SECONDS):
    done = subprocess.run(arguments, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=seconds, check=False)
    return done.returncode, done.stdout.decode(errors="replace")


def check(defines, optimize="-O2", trail=False):
    with tempfile.TemporaryDirectory(prefix="tundish-model-") as folder:
        flags = ["-D" + name for name in defines]
        code, text = command(["spin", *flags, "-a", MODEL], folder)
        if code or not os.path.exists(os.path.join(folder, "pan.c")):
            raise AssertionError("spin does not accept the model:\n" + text)
        code, text = command(["gcc", optimize, "-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MIB}", "-o", "pan", "pan.c"], folder)
        if code:
            raise AssertionError("the checker does not compile:\n" + text)
        started = time.monotonic()
        _, text = command(["./pan", "-m100000"], folder)
        result = Result(text, time.monotonic() - started)
        if trail:
            # The shortest that is found: easier to read than the first.
            command(["./pan", "-m100000", "-i"], folder)
            print(command(["spin", *flags, "-k", "channel.pml.trail", "-p", "-g", MODEL], folder)[1])
        return result


class Model(unittest.TestCase):
    def __init__(self, name):
        super().__init__("runTest")
        self.name = name

    def __str__(self):
        return self.name

    def runTest(self):
        mutant = self.name in MUTANTS
        expected, defines = MUTANTS[self.name] if mutant else (None, CONFIGURATIONS[self.name])
        result = check(defines, "-O0" if mutant else "-O2" if TWO in defines else "-O1")
        verdict = result.error or ("cut short" if result.cut_short else "no error")
        print(f"{self.name}: {result.states:,} states, {result.seconds:.1f} s, {result.memory_mib:.0f} MiB: {verdict}", flush=True)
        if mutant:
            self.assertIsNotNone(result.error, "the mutant was not found out\n" + result.text)
            self.assertRegex(result.error, expected)
        else:
            self.assertEqual(result.errors, 0, result.text)
            self.assertFalse(result.cut_short, result.text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", action="store_true")
    parser.add_argument("--mutants", action="store_true")
    parser.add_argument("--trail", metavar="NAME")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    known = {**CONFIGURATIONS, **{name: entry[1] for name, entry in MUTANTS.items()}}
    unknown = [name for name in [*arguments.names, arguments.trail] if name and name not in known]
    if unknown:
        parser.error(f"no such configuration or mutant: {', '.join(unknown)}; there are {', '.join(known)}")
    for tool in ("spin", "gcc"):
        if not shutil.which(tool):
            print(f"skipped: {tool} is not installed")
            return 77
    if arguments.trail:
        check(known[arguments.trail], trail=True)
        return 0
    names = list(arguments.names)
    everything = not (names or arguments.configurations or arguments.mutants)
    if everything or arguments.configurations:
        names += CONFIGURATIONS
    if everything or arguments.mutants:
        names += MUTANTS
    done = unittest.TextTestRunner(stream=sys.stdout).run(unittest.TestSuite(Model(name) for name in names))
    return 0 if done.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
