# SPDX-License-Identifier: Apache-2.0
"""How do objects get from one process to others, through the channel and through what else there is?

    channel.py [--quick] [--rounds N] [--case TEXT[,TEXT]] [--link NAME[,NAME]] [--build DIR] [--out FILE] [--questions]

Runs channel/bench-channel, one link in one scene at a time, each with a process for the writer and each reader, contents checked.
Links take turns in each round, and who goes first changes. Before the clock every link is run once with every byte compared.
Questions and bounds are in channel_cases.py (--questions prints them). Times are CLOCK_MONOTONIC, whose reading counts once.

Standard output: the machine, one JSON line for each link in each case (medians over the rounds, with 95 % bootstrap intervals),
and a Markdown table a case with the design's targets and whether they were met: by the interval ("yes"), by the median only
("median"), or not ("no"). --out FILE takes every single run. --quick: under a minute, some cases and few rounds, for tuning.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import channel_cases
import common


def parse():
    """Command line."""
    parser = argparse.ArgumentParser(description="Measures the channel against other ways between processes.")
    parser.add_argument("--build", default=os.environ.get("TUNDISH_BENCH_BUILD", "build-bench/bench"),
                        help="where channel/bench-channel is")
    parser.add_argument("--quick", action="store_true", help="some cases, few rounds, under a minute")
    parser.add_argument("--rounds", type=int,
                        help="at least 9 for figures to quote (default 9; a third of that where a run takes seconds)")
    parser.add_argument("--case", default="", help="cases whose name contains one of these")
    parser.add_argument("--link", default="", help="these links only, beside the yardsticks")
    parser.add_argument("--out", help="JSON lines, one for each run")
    parser.add_argument("--questions", action="store_true", help="print what is asked, and end")
    options = parser.parse_args(sys.argv[1:] + os.environ.get("TUNDISH_BENCH_ARGS", "").split())
    options.rounds = options.rounds or (3 if options.quick else 9)
    options.program = os.path.join(options.build, "channel", "bench-channel")
    return options


def run(options, scene, link, args):
    """What the driver printed, flattened; None if it failed."""
    if link.startswith("memcpy"):
        scene = "memcpy"
    command = [options.program, scene, link] + [f"{name}={value}" for name, value in args.items()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{' '.join(command)}: {done.stderr.strip()}", file=sys.stderr)
        return None
    result = json.loads(done.stdout)
    result.update(result.pop("ns", {}))
    result["most_reader_cpu"] = max(result["reader_cpu"])
    result["other_reader_cpu"] = max(result["reader_cpu"][1:], default=0.0)
    return result


def known_links(options):
    """Names that this build of the driver has, variants too."""
    names = {"memcpy", "memcpy-area"}
    for line in subprocess.run([options.program, "--list"], capture_output=True, text=True, check=True).stdout.splitlines():
        kind = json.loads(line)
        names.add(kind["link"])
        names.update(f"{kind['link']}-{variant}" for variant in kind["variants"].split())
    return names


def chosen_links(options, case, known):
    """Those asked for, and what targets compare with."""
    wanted = [name for name in options.link.split(",") if name]
    bases = {target.of for target in case.targets}
    return [name for name in case.links if name in known and (not wanted or name in wanted or name in bases)]


def verify(options, links):
    """Every byte, once: objects of mixed length, two readers. Ends the program if one differs."""
    for link in links:
        if link in ("memcpy", "memcpy-area", "futex", "line"):
            continue
        args = {"readers": 2, "bytes": 0, "count": 500, "check": 1, "max_bytes": 1 << 20, "max_objects": 64}
        if run(options, "stream", link, args) is None:
            sys.exit(f"{link}: expected what was sent, found something else, or none: nothing is measured")


def measure(options, case, links, out):
    """{link: [run or None a round]}."""
    runs = {link: [] for link in links}
    rounds = options.rounds if not case.long else 1 if options.quick else max(3, options.rounds // 3)
    for number in range(rounds):
        turn = number % len(links)
        for link in links[turn:] + links[:turn]:
            count = case.counts.get(link, case.args["count"])
            result = run(options, case.scene, link, {**case.args, "count": count})
            runs[link].append(result)
            if out and result:
                out.write(json.dumps({"case": case.name, "round": number, **result}) + "\n")
    return runs


def paired(target, runs):
    """[(ours, other or None)] of the rounds that have both."""
    pairs = []
    for number, ours in enumerate(runs.get(target.link, [])):
        other = runs.get(target.of, [None] * (number + 1))[number] if target.of else None
        if ours and (other or not target.of):
            pairs.append((ours[target.figure], other[target.figure] if other else 1.0))
    return pairs


def verdict(target, runs):
    """Whether it was met: the interval of the rest after the limit, so that pairs stay pairs."""
    pairs = paired(target, runs)
    if not pairs:
        return None
    rest = [value - target.number * (other if target.of else 1.0) - target.plus for value, other in pairs]
    if not target.at_most:
        rest = [-value for value in rest]
    high = common.interval(rest)[1]
    word = "yes" if high <= 0 else "median" if statistics.median(rest) <= 0 else "no"
    result = {"target": str(target), "link": target.link, "met": word, "median": statistics.median(value for value, _ in pairs)}
    if target.of:
        result["ratio"] = common.summary([value / other for value, other in pairs])
    return result


def human(figure, value):
    """As people read it."""
    if figure.endswith("_cpu"):
        return f"{100 * value:.2f} %"
    if figure == "objects_s":
        return f"{value / 1e6:.3f} M/s" if value >= 1e5 else f"{value:.0f} /s"
    if figure == "bytes_s":
        return f"{value / 1e9:.2f} GB/s"
    if figure == "grown_bytes":
        return f"{value / 1e6:.1f} MB"
    return f"{value / 1e3:.2f} us"


def report(case, runs):
    """JSON lines and a table."""
    rows = []
    for link, results in runs.items():
        good = [result for result in results if result]
        line = {"bench": "channel", "case": case.name, "link": link, "rounds": len(good), "failed": len(results) - len(good)}
        cells = []
        for figure in case.figures:
            values = [result[figure] for result in good if figure in result]
            if values:
                line[figure] = common.summary(values)
            cells.append(human(figure, statistics.median(values)) if values else "-")
        print(json.dumps(line))
        rows.append(f"| {link} | {' | '.join(cells)} |")
    verdicts = [found for found in (verdict(target, runs) for target in case.targets) if found]
    for found in verdicts:
        print(json.dumps({"bench": "channel", "case": case.name, **found}))
    print(f"\n**{case.name}**\n\n| link | {' | '.join(case.figures)} |\n|{' --- |' * (1 + len(case.figures))}")
    print("\n".join(rows))
    for found in verdicts:
        ratio = "; ratio {median:.3f} ({low95:.3f} to {high95:.3f})".format(**found["ratio"]) if "ratio" in found else ""
        print(f"\n{found['link']}: {found['target']}: met: {found['met']}{ratio}")
    print(flush=True)


def main():
    """All cases in turn."""
    options = parse()
    if options.questions:
        for name, text in channel_cases.QUESTIONS.items():
            print(f"{name}: {' '.join(text.split())}\n")
        return
    if not os.path.exists(options.program):
        sys.exit(f"expected the driver at {options.program}, found nothing: build it (make bench-channel), or give --build")
    began, known = time.monotonic(), known_links(options)
    wanted = [text for text in options.case.split(",") if text]
    cases = [case for case in channel_cases.cases(options.quick) if not wanted or any(text in case.name for text in wanted)]
    print(json.dumps({"bench": "channel", "machine": common.machine("/"), "load": os.getloadavg(),
                      "rounds": options.rounds}), flush=True)
    verify(options, sorted({link for case in cases for link in chosen_links(options, case, known)}))
    out = open(options.out, "w", encoding="utf-8") if options.out else None
    for case in cases:
        links = chosen_links(options, case, known)
        if links:
            report(case, measure(options, case, links, out))
    if out:
        out.close()
    print(f"{len(cases)} cases in {time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
