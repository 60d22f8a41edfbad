# SPDX-License-Identifier: Apache-2.0
"""Who is measured, and how each is started."""

import collections
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ONE_MODES = ("upload", "copy", "keep", "touched")
RANK_MODES = ("upload", "keep", "touched")

Contender = collections.namedtuple("Contender", "name peer arguments modes parts")


def peer(name, program, *arguments, parts=("one", "ranks")):
    """A Python program in peers/."""
    return Contender(name, True, (program, *arguments), ONE_MODES, parts)


CONTENDERS = (
    Contender("tundish", False, (), ONE_MODES, ("one", "ranks")),
    Contender("tundish own", False, ("--own",), ("keep", "touched"), ("one", "ranks")),
    Contender("tundish shared", False, ("--share",), RANK_MODES, ("ranks",)),
    Contender("tundish shared own", False, ("--share", "--own"), ("keep", "touched"), ("ranks",)),
    Contender("tundish model", False, ("--model",), ("upload",), ("ranks",)),
    Contender("tundish shared model", False, ("--share", "--model"), ("upload",), ("ranks",)),
    peer("safetensors mmap", "safetensors", parts=("one",)),
    peer("safetensors pread", "safetensors", "--variant=pread", parts=("one",)),
    peer("safetensors get_slice", "safetensors", "--variant=slice", parts=("ranks",)),
    peer("safetensors narrow", "safetensors", "--variant=narrow", parts=("ranks",)),
    peer("fastsafetensors", "fastsafetensors"),
    peer("runai-model-streamer", "runai"),
)


def budget_bytes(text, ranks):
    """A rank's share of a budget like 512MiB."""
    units = {"MiB": 1 << 20, "GiB": 1 << 30}
    if text[-3:] not in units:
        sys.exit(f"load.py: --budget: expected a number and MiB or GiB, found {text!r}")
    return int(float(text[:-3]) * units[text[-3:]]) // ranks


def command(options, contender, folder, files, mode, ranks, rank, extra=()):
    """The command line of one process."""
    job = [f"--mode={mode}", f"--tp={ranks}", f"--rank={rank}", *extra]
    if contender.peer:
        program, *arguments = contender.arguments
        warm_up = os.path.join(options.dir, "warm-up", "model.safetensors")
        return [sys.executable, os.path.join(HERE, "peers", program + "_peer.py"), f"--warm-up={warm_up}",
                *arguments, *job, *files]
    shared = "--share" in contender.arguments
    address = f"--share=unix:@tundish-bench-{os.getpid()}"
    return [os.path.join(options.build, "bench-consume"),
            f"--budget={budget_bytes(options.budget, 1 if shared else ranks)}",
            *(address if word == "--share" else word for word in contender.arguments), *job, folder]
