# SPDX-License-Identifier: Apache-2.0
"""How fast and in how much memory do checkpoints load, against the machine's own bounds and against other loaders?

    load.py [--quick] [--rounds N] [--checkpoint dense,moe,small] [--part one,ranks] [--cache cold,warm] [--mode ...] [--contender ...]

Bounds on paper. Cold: every byte comes from the disk once, so no loader is faster than a sequential direct read of the same files into
memory that is contiguous and was touched before. Warm: every byte is copied once, from the page cache. Both are measured in
every round beside the contenders (bound.c, and fio where it is installed). Memory: what the consumer keeps, and the budget.

Contenders take turns in each round, and who goes first changes. Each is a process (or four, --ranks, one a rank, each taking its
part of the rows of every matrix and all of each vector) that is started, imports and prepares before the clock: see peers/worker.py for the
modes. Cold: sync and drop_caches before each run (root). Data are verified once for each contender, outside the clock.

Standard output: a Markdown table for each checkpoint, and before it one JSON line a result. --out FILE takes every single run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(os.path.dirname(HERE), ".venv-bench")
if os.path.realpath(sys.prefix) != os.path.realpath(VENV):
    subprocess.run([os.path.join(HERE, "setup-venv.sh")], check=True)
    python = os.path.join(VENV, "bin", "python")
    os.execv(python, [python, os.path.abspath(__file__), *sys.argv[1:]])

# pylint: disable=wrong-import-position
import bounds
import common
import make_checkpoints
import results
import verify
from contenders import CONTENDERS, ONE_MODES, RANK_MODES, command
from runs import Failed, run


def parse():
    """Command line."""
    parser = argparse.ArgumentParser(description="Measures loading against bounds and other loaders.")
    parser.add_argument("--dir", default=os.environ.get("TUNDISH_BENCH_DIR", "build-bench/checkpoints"),
                        help="where checkpoints lie, on the disk to measure (14 GB)")
    parser.add_argument("--build", default=os.environ.get("TUNDISH_BENCH_BUILD", "build-bench/bench"),
                        help="where bench-consume and bench-bound are")
    parser.add_argument("--quick", action="store_true", help="small checkpoints and 2 rounds: shows that all of it works")
    parser.add_argument("--rounds", type=int, help="at least 5 for figures to quote (default 5)")
    parser.add_argument("--budget", default="512MiB", help="of tundish, for all ranks together")
    parser.add_argument("--checkpoint", default="dense,moe,small")
    parser.add_argument("--part", default="one,ranks", help="one process, several ranks")
    parser.add_argument("--ranks", type=int, default=4, help="processes of the part ranks (default 4)")
    parser.add_argument("--cache", default="cold,warm")
    parser.add_argument("--mode", default="", help="upload, copy, keep, touched; default: " + ", ".join(ONE_MODES)
                        + "; several ranks: " + ", ".join(RANK_MODES))
    parser.add_argument("--contender", default="", help="names, commas between; default: all")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=OPTIONS",
                        help="one more tundish contender, with these options of bench-consume")
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one run")
    parser.add_argument("--out", help="JSON lines, one for each run")
    options = parser.parse_args(sys.argv[1:] + os.environ.get("TUNDISH_BENCH_ARGS", "").split())
    options.rounds = options.rounds or (2 if options.quick else 5)
    for name, known in (("checkpoint", make_checkpoints.FULL), ("part", ("one", "ranks")), ("cache", ("cold", "warm")),
                        ("mode", ONE_MODES), ("contender", None)):
        words = [word for word in getattr(options, name).split(",") if word]
        unknown = [word for word in words if known and word not in known]
        if unknown:
            parser.error(f"--{name}: expected {', '.join(known)}, found {unknown[0]!r}")
        setattr(options, name, words)
    return options


def contenders(options, part):
    """Those of this part that were asked for."""
    chosen = [one for one in CONTENDERS if part in one.parts and (not options.contender or one.name in options.contender)]
    for text in options.variant:
        name, _, arguments = text.partition("=")
        base = next(one for one in CONTENDERS if one.name == "tundish")
        chosen.append(base._replace(name="tundish " + name, arguments=tuple(arguments.split())))
    return chosen


class Checkpoint:
    """One folder, and all the runs on it."""

    def __init__(self, options, kind):
        self.options, self.kind = options, kind
        self.folder = make_checkpoints.make(options.dir, kind, options.quick)
        self.files = sorted(os.path.join(self.folder, name) for name in os.listdir(self.folder)
                            if name.endswith(".safetensors"))
        self.payload = verify.payload_bytes(self.files)
        self.disk = common.disk_of(self.folder)
        self.bound_runs, self.runs = [], []
        self.out = open(options.out, "a") if options.out else None

    def commands(self, contender, part, mode, extra=()):
        """One command line a rank."""
        ranks = self.options.ranks if part == "ranks" else 1
        return [command(self.options, contender, self.folder, self.files, mode, ranks, rank, extra)
                for rank in range(ranks)]

    def verify(self, part, contender):
        """The bytes that a contender delivers, against the files."""
        mode = contender.modes[0]
        with tempfile.TemporaryDirectory() as scratch:
            paths = [os.path.join(scratch, str(rank)) for rank in range(self.options.ranks if part == "ranks" else 1)]
            lines = self.commands(contender, part, mode)
            for line, path in zip(lines, paths):
                line[1:1] = [] if contender.peer else ["--sums", path]
                if contender.peer:
                    line[2:2] = ["--sums", path]
            run(lines, self, warm=True)
            for rank, path in enumerate(paths):
                verify.compare(f"{contender.name} rank {rank}", path, self.files, len(paths), rank)

    def note(self, record):
        """Keeps a run."""
        self.runs.append(record)
        if self.out:
            self.out.write(json.dumps(record) + "\n")
            self.out.flush()

    def one(self, contender, part, mode, cache, number):
        """One run of one contender."""
        record = {"bench": "load", "checkpoint": self.kind, "part": part, "contender": contender.name, "mode": mode,
                  "cache": cache, "round": number, "peer": contender.peer, "payload_bytes": self.payload}
        try:
            record.update(run(self.commands(contender, part, mode), self, warm=cache == "warm"))
        except Failed as failure:
            record["failed"] = str(failure)
        if "seconds" in record:
            record["gbps"] = self.payload / record["seconds"] / 1e9
            owned = record["kept_bytes"] if mode == "keep" else 0
            record["over_bytes"] = record["grown_bytes"] - owned
        print(f"  {self.kind} {part} {cache} {mode} round {number} {contender.name}: "
              + (f"{record['seconds']:.3f} s" if "seconds" in record else record["failed"]), file=sys.stderr)
        self.note(record)

    def round(self, number):
        """Bounds and contenders once, each in its turn."""
        for cache in self.options.cache:
            for record in bounds.measure(self.options.build, self.files, cache):
                self.note({"bench": "load", "checkpoint": self.kind, "cache": cache, "round": number, **record})
            for part in self.options.part:
                turns = [(contender, mode) for contender in contenders(self.options, part)
                         for mode in contender.modes
                         if mode in (self.options.mode or (RANK_MODES if part == "ranks" else ONE_MODES))]
                shift = number * 7 % len(turns) if turns else 0
                for contender, mode in turns[shift:] + turns[:shift]:
                    self.one(contender, part, mode, cache, number)

    def measure(self):
        """Everything."""
        if not self.options.no_verify:
            for part in self.options.part:
                for contender in contenders(self.options, part):
                    # Slices by rules are compared with another program's by the tests.
                    if "--model" not in contender.arguments:
                        self.verify(part, contender)
        for number in range(self.options.rounds):
            self.round(number)
        return self.runs


def main():
    """Command line."""
    options = parse()
    if os.geteuid() != 0:
        sys.exit("load.py: expected to run as root, to empty the page cache before cold runs: use sudo")
    os.makedirs(options.dir, exist_ok=True)
    make_checkpoints.make_warm_up(options.dir)
    started = time.time()
    described = common.machine(options.dir)
    print(json.dumps({"bench": "load", "machine": described, "rounds": options.rounds, "budget": options.budget,
                      "quick": options.quick, "versions": verify.versions()}))
    failed = False
    for kind in options.checkpoint:
        runs = Checkpoint(options, kind).measure()
        failed = results.report(kind, runs, described, options) or failed
    print(f"load.py: {time.time() - started:.0f} s", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
