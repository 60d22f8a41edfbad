#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds up what meson's test logs of the named build folders say and prints "N passed, N failed[, N skipped]".

A test program that reports its own cases (cmocka, unittest) counts by them, any other as one. A program that failed without
a failed case (a crash, a leak, a timeout) is one failure more. --broken N adds N failures for folders that did not build.
"""
import argparse
import json
import os
import re
import sys

CMOCKA = re.compile(r"\[  (PASSED|FAILED|SKIPPED)  ?\] (\d+) test\(s\)")
UNITTEST = re.compile(r"^Ran (\d+) tests? in ", re.M)
UNITTEST_END = re.compile(r"^(?:OK|FAILED)(?: \((.*)\))?$", re.M)


def own_cases(text):
    """(passed, failed, skipped) as the program itself says, or None."""
    found = CMOCKA.findall(text)
    if found:
        count = {"PASSED": 0, "FAILED": 0, "SKIPPED": 0}
        for word, number in found:
            count[word] += int(number)
        return count["PASSED"], count["FAILED"], count["SKIPPED"]
    ran = UNITTEST.search(text)
    end = UNITTEST_END.search(text)
    if not ran or not end:
        return None
    words = dict(part.split("=") for part in (end.group(1) or "").split(", ") if "=" in part)
    failed = sum(int(words.get(key, 0)) for key in ("failures", "errors", "unexpected successes"))
    skipped = int(words.get("skipped", 0))
    return max(int(ran.group(1)) - failed - skipped, 0), failed, skipped


def count_test(test):
    text = (test.get("stdout") or "") + "\n" + (test.get("stderr") or "")
    cases = own_cases(text)
    if test["result"] == "SKIP":
        return 0, 0, cases[2] if cases and cases[2] else 1
    good = test["result"] in ("OK", "EXPECTEDFAIL")
    if cases is None:
        return (1, 0, 0) if good else (0, 1, 0)
    passed, failed, skipped = cases
    return passed, failed if good else max(failed, 1), skipped


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--broken", type=int, default=0)
    parser.add_argument("folders", nargs="*")
    args = parser.parse_args()
    total = [0, args.broken, 0]
    for folder in args.folders:
        log = os.path.join(folder, "meson-logs", "testlog.json")
        if not os.path.exists(log):
            continue
        with open(log, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                test = json.loads(line)
                counts = count_test(test)
                total = [a + b for a, b in zip(total, counts)]
                if counts[1]:
                    print(f"failed: {folder}: {test['name']} ({test['result']})")
                if counts[2]:
                    print(f"skipped: {folder}: {test['name']}: {counts[2]}")
    text = f"{total[0]} passed, {total[1]} failed" + (f", {total[2]} skipped" if total[2] else "")
    print(text)
    if os.environ.get("CHECK_SUMMARY"):
        with open(os.environ["CHECK_SUMMARY"], "w", encoding="utf-8") as summary:
            print(text, file=summary)
    return 1 if total[1] or not total[0] else 0


if __name__ == "__main__":
    sys.exit(main())
