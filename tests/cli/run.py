# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of the command: python3 tests/cli/run.py --tundish BUILD/tools/tundish [unittest arguments]"""

import argparse
import os
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.dont_write_bytecode = True
sys.path[:0] = [HERE, os.path.join(HERE, "..", "support")]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tundish", required=True, help="the binary to test")
    arguments, rest = parser.parse_known_args()
    os.environ["TUNDISH_UNDER_TEST"] = os.path.abspath(arguments.tundish)
    names = [word for word in rest if not word.startswith("-")]
    flags = [word for word in rest if word.startswith("-")]
    if not names:
        names = sorted(name[:-3] for name in os.listdir(HERE) if name.startswith("cli_") and name.endswith(".py"))
    unittest.main(module=None, argv=["run.py", *flags, *names])


if __name__ == "__main__":
    main()
