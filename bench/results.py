# SPDX-License-Identifier: Apache-2.0
"""From runs to results: medians, ratios paired within a round, JSON lines and a Markdown table.

A ratio is taken between two runs of the same round, so that a slow minute of the machine weighs on both; its interval is the
95 % bootstrap interval of the median over the rounds.
"""

import json
import statistics

import common


def series(runs, **wanted):
    """{round: GB/s} of the runs that match."""
    return {run["round"]: run["gbps"] for run in runs
            if "gbps" in run and all(run.get(key) == value for key, value in wanted.items())}


def best(candidates):
    """(name, series) with the best median, or None."""
    filled = [(name, values) for name, values in candidates if values]
    return max(filled, key=lambda one: statistics.median(one[1].values()), default=None)


def ratio(ours, theirs):
    """Summary of ours / theirs over the rounds that both have."""
    values = [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys())]
    return common.summary(values) if values else None


def bound(runs, cache):
    """The setting that was fastest."""
    names = dict.fromkeys(run["bound"] for run in runs if "bound" in run and run["cache"] == cache)
    return best([(name, series(runs, bound=name, cache=cache)) for name in names])


def group(runs, key, limit):
    """One result: all rounds of a contender in a mode."""
    checkpoint, part, cache, mode, contender = key
    mine = [run for run in runs if "contender" in run
            and (run["part"], run["cache"], run["mode"], run["contender"]) == key[1:]]
    good = [run for run in mine if "seconds" in run]
    result = {"bench": "load", "checkpoint": checkpoint, "part": part, "cache": cache, "mode": mode,
              "contender": contender, "rounds": len(good)}
    failures = [run["failed"] for run in mine if "failed" in run]
    if failures:
        result.update(failed=failures[0], failures=len(failures))
    if not good:
        return result
    result["payload_bytes"] = good[0]["payload_bytes"]
    result["seconds"] = common.summary([run["seconds"] for run in good])
    result["gbps"] = result["payload_bytes"] / result["seconds"]["median"] / 1e9
    for name in ("over_bytes", "host_bytes", "cache_growth_bytes", "disk_bytes", "process_bytes"):
        values = [run[name] for run in good if run[name] is not None]
        result[name] = max(values) if values else None
    if limit:
        result["bound"] = limit[0]
        result["bound_gbps"] = statistics.median(limit[1].values())
        result["of_bound"] = ratio(series(mine), limit[1])
    return result


def against_peers(runs, result):
    """The fastest peer at the same work, and how many times faster we are."""
    part, cache, mode = result["part"], result["cache"], result["mode"]
    same = {"part": part, "cache": cache, "mode": mode}
    names = dict.fromkeys(run["contender"] for run in runs if run.get("peer"))
    fastest = best([(name, series(runs, contender=name, **same)) for name in names])
    if fastest and "seconds" in result:
        result["fastest_peer"] = fastest[0]
        result["times_faster"] = ratio(series(runs, contender=result["contender"], **same), fastest[1])


def size(count):
    """As people read it."""
    if count is None:
        return "?"
    return f"{count / 1e9:.2f} GB" if abs(count) >= 1e9 else f"{count / 1e6:.0f} MB"


def cells(result):
    """A table's line."""
    if "seconds" not in result:
        return [result["contender"], result["mode"], f"failed: {result['failed']}"] + [""] * 6
    seconds, limit, times = result["seconds"], result.get("of_bound"), result.get("times_faster")
    return [
        result["contender"], result["mode"],
        f"{seconds['median']:.2f} ({seconds['min']:.2f} to {seconds['p99']:.2f})", f"{result['gbps']:.2f}",
        f"{limit['median']:.2f} ({limit['low95']:.2f} to {limit['high95']:.2f})" if limit else "",
        f"{times['median']:.2f} ({times['low95']:.2f} to {times['high95']:.2f})" if times else "",
        size(result["over_bytes"]), size(result["cache_growth_bytes"]), size(result["disk_bytes"])]


def table(title, results):
    """Markdown."""
    head = ["loader", "mode", "seconds, median (min to p99)", "GB/s", "of the bound (95 %)", "x the fastest peer (95 %)",
            "memory over payload", "page cache grown", "read from disk"]
    print(f"\n{title}\n")
    for line in [head, ["---"] * len(head)] + [cells(result) for result in results]:
        print("| " + " | ".join(line) + " |")


def report(kind, runs, machine, options):
    """Prints everything about a checkpoint. Returns whether anything failed."""
    keys = list(dict.fromkeys((kind, run["part"], run["cache"], run["mode"], run["contender"])
                              for run in runs if "contender" in run))
    limits = {cache: bound(runs, cache) for cache in options.cache}
    found = []
    for key in keys:
        result = group(runs, key, limits[key[2]])
        if not next(run for run in runs if run.get("contender") == key[4])["peer"]:
            against_peers(runs, result)
        found.append(result)
        print(json.dumps(result))
    order = {"upload": 0, "copy": 1, "keep": 2, "touched": 3}
    print(f"\n{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, Linux "
          f"{machine['kernel']}, {machine['disk']} ({machine['file_system']}); {options.rounds} rounds"
          f"{'; scaled-down checkpoints, nothing to quote' if options.quick else ''}")
    for cache in options.cache:
        if limits[cache]:
            name, values = limits[cache]
            spread = common.summary(list(values.values()))
            print(f"\nBound, {cache}: {spread['median']:.2f} GB/s ({spread['min']:.2f} to {max(values.values()):.2f}), {name}")
        for part in options.part:
            chosen = [one for one in found if one["cache"] == cache and one["part"] == part]
            chosen.sort(key=lambda one: (order[one["mode"]], one["seconds"]["median"] if "seconds" in one else 1e9))
            if chosen:
                title = f"{kind}, {'one process' if part == 'one' else f'{options.ranks} ranks'}, {cache}, budget {options.budget}"
                table(title, chosen)
    return any("failed" in one for one in found)
