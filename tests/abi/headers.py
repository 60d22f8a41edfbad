#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A header that leans on another's includes, on C11 or on GNU words breaks callers in C99 and C++, and nobody here notices.

Each public header is compiled alone, pedantic and with warnings fatal, as C99, C11 and C++11.
usage: headers.py INCLUDE_DIR CC CXX
"""
import os
import subprocess
import sys
import unittest

STRICT = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"]
INCLUDE, CC, CXX = sys.argv[1:4]


def compile_alone(header, compiler, language, standard):
    done = subprocess.run(
        [compiler, "-x", language, f"-std={standard}", *STRICT, "-I", INCLUDE, "-"],
        input=f"#include <tundish/{header}>\n#include <tundish/{header}>\ntypedef int not_empty;\n",
        capture_output=True, text=True, timeout=60, check=False)
    return done.stderr if done.returncode else ""


class Headers(unittest.TestCase):
    def check(self, compiler, language, standard):
        for header in sorted(os.listdir(os.path.join(INCLUDE, "tundish"))):
            with self.subTest(header=header, standard=standard):
                self.assertEqual(compile_alone(header, compiler, language, standard), "")

    def test_c99(self):
        self.check(CC, "c", "c99")

    def test_c11(self):
        self.check(CC, "c", "c11")

    def test_cxx11(self):
        self.check(CXX, "c++", "c++11")

    def test_a_broken_header_is_seen(self):
        done = subprocess.run([CC, "-x", "c", "-std=c99", *STRICT, "-"], input="size_t n;\n",
                              capture_output=True, text=True, timeout=60, check=False)
        self.assertNotEqual(done.returncode, 0)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
