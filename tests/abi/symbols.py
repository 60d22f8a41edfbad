#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A function that is declared and not exported fails at the user's link; one that is exported and not declared becomes an
interface by accident.

What libtundish.so exports (nm -D) must be exactly what the public headers declare with TND_API; those of bridge.h belong to
libtundish-bridge.so, which alone needs ZeroMQ.
usage: symbols.py INCLUDE_DIR LIBRARY [BRIDGE_LIBRARY]
"""
import os
import re
import subprocess
import sys
import unittest

INCLUDE, LIBRARY = sys.argv[1:3]
BRIDGE_LIBRARY = sys.argv[3] if len(sys.argv) > 3 else None
BRIDGE_HEADERS = {"bridge.h"}
DECLARATION = re.compile(r"^TND_API\b[^;(]*?\b(tnd_\w+)\s*\(", re.M)


def declared(text):
    return DECLARATION.findall(re.sub(r"/\*.*?\*/", " ", text, flags=re.S))


def all_declared(bridge=False):
    folder = os.path.join(INCLUDE, "tundish")
    names = []
    for header in sorted(os.listdir(folder)):
        if (header in BRIDGE_HEADERS) != bridge:
            continue
        with open(os.path.join(folder, header), encoding="utf-8") as file:
            names += declared(file.read())
    return names


def exported(library=LIBRARY):
    out = subprocess.run(["nm", "-D", "--defined-only", "--format=posix", library],
                         capture_output=True, text=True, timeout=60, check=True).stdout
    return [line.split()[0].split("@")[0] for line in out.splitlines() if line.strip()]


def needed(library):
    out = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, timeout=60, check=True).stdout
    return " ".join(line for line in out.splitlines() if "(NEEDED)" in line)


class Symbols(unittest.TestCase):
    def test_the_parser_sees_declarations(self):
        text = "/* TND_API int tnd_no(void); */\nTND_API const char *\ntnd_yes(int a,\n\tint b);\n"
        self.assertEqual(declared(text), ["tnd_yes"])
        self.assertGreater(len(all_declared()), 20)

    def test_declared_once(self):
        names = all_declared()
        self.assertEqual(sorted(set(names)), sorted(names))

    def test_exported_is_declared(self):
        self.assertEqual(sorted(set(exported()) - set(all_declared())), [], "exported, not declared")

    def test_declared_is_exported(self):
        self.assertEqual(sorted(set(all_declared()) - set(exported())), [], "declared, not exported")

    @unittest.skipUnless(BRIDGE_LIBRARY, "built without ZeroMQ")
    def test_the_bridge(self):
        self.assertGreater(len(all_declared(bridge=True)), 5)
        self.assertEqual(sorted(exported(BRIDGE_LIBRARY)), sorted(all_declared(bridge=True)))

    @unittest.skipUnless(BRIDGE_LIBRARY, "built without ZeroMQ")
    def test_the_bridge_alone_needs_zeromq(self):
        self.assertIn("zmq", needed(BRIDGE_LIBRARY))
        self.assertNotIn("zmq", needed(LIBRARY))

    @unittest.skipUnless(BRIDGE_LIBRARY, "built without ZeroMQ")
    def test_the_bridge_uses_the_public_interface(self):
        out = subprocess.run(["nm", "-D", "--undefined-only", "--format=posix", BRIDGE_LIBRARY],
                             capture_output=True, text=True, timeout=60, check=True).stdout
        used = {line.split()[0].split("@")[0] for line in out.splitlines() if line.startswith("tnd_")}
        self.assertGreater(len(used), 3)
        self.assertEqual(sorted(used - set(all_declared())), [])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
