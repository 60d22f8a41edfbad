#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A field that is inserted, moved or retyped in a public struct breaks every caller that was compiled before.

Size of each public struct and offset of each field, as the compiler lays them out (x86-64), must be what structs.txt records, so that a
change is deliberate: `structs.py INCLUDE_DIR CC structs.txt --update` writes it anew, and its diff is reviewed.
"""
import os
import platform
import re
import subprocess
import sys
import tempfile
import unittest

INCLUDE, CC, RECORD = sys.argv[1:4]
STRUCT = re.compile(r"^struct (tnd_\w+) \{(.*?)^\};", re.M | re.S)


def fields(body):
    names = []
    for declaration in body.split(";"):
        pointer = re.search(r"\(\*(\w+)\)", declaration)
        if pointer:
            names.append(pointer.group(1))
            continue
        for one in declaration.split(","):
            name = re.search(r"(\w+)\s*(?:\[[^]]*\])?\s*$", one)
            if name:
                names.append(name.group(1))
    return names


def public_structs():
    found = []
    folder = os.path.join(INCLUDE, "tundish")
    for header in sorted(os.listdir(folder)):
        with open(os.path.join(folder, header), encoding="utf-8") as file:
            text = re.sub(r"/\*.*?\*/", " ", file.read(), flags=re.S)
        found += [(name, fields(body)) for name, body in STRUCT.findall(text)]
    return sorted(found)


def layout():
    lines = ["#include <stddef.h>", "#include <stdio.h>", "#include <tundish/tundish.h>", "#include <tundish/bridge.h>",
             "int main(void) {"]
    for name, members in public_structs():
        lines.append(f'printf("struct {name} %zu\\n", sizeof(struct {name}));')
        for member in members:
            lines.append(f'printf("\\t%zu {member} %zu\\n", offsetof(struct {name}, {member}), '
                         f"sizeof(((struct {name} *)0)->{member}));")
    lines += ["return 0;", "}"]
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "layout")
        subprocess.run([CC, "-x", "c", "-std=c11", "-I", INCLUDE, "-o", program, "-"], input="\n".join(lines),
                       text=True, timeout=60, check=True)
        return subprocess.run([program], capture_output=True, text=True, timeout=60, check=True).stdout


class Structs(unittest.TestCase):
    maxDiff = None

    def test_the_parser_sees_fields(self):
        body = " uint64_t a, b;\n int (*call)(void *arg);\n char text[256];\n const char *const *list; "
        self.assertEqual(fields(body), ["a", "b", "call", "text", "list"])

    @unittest.skipUnless(platform.machine() == "x86_64", "recorded for x86-64")
    def test_layout_is_as_recorded(self):
        with open(RECORD, encoding="utf-8") as file:
            self.assertMultiLineEqual(file.read(), layout())


if __name__ == "__main__":
    if "--update" in sys.argv:
        with open(RECORD, "w", encoding="utf-8") as record:
            record.write(layout())
    else:
        unittest.main(argv=sys.argv[:1])
