#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A header, a soname link or a pkg-config line that is missing from the installation is found by the first user.

Installs into a folder of its own, compiles a program with what tundish.pc says against the installed headers, and runs it on the
installed library; the installed command must start too.
usage: install.py BUILD_DIR CC
"""
import glob
import os
import subprocess
import sys
import tempfile
import unittest

BUILD, CC = sys.argv[1:3]
PROGRAM = """
#include <stdio.h>
#include <string.h>
#include <tundish/tundish.h>
int main(void)
{
	uint64_t bytes = 0;
	return tnd_size_parse("1.5GiB", &bytes) || bytes != UINT64_C(1610612736) || strcmp(tnd_dtype_name(TND_DTYPE_BF16), "BF16");
}
"""
BRIDGE_PROGRAM = """
#include <tundish/bridge.h>
int main(void)
{
	struct tnd_bridge_connect_opts opts = {.struct_bytes = sizeof(opts), .endpoint = "tcp://127.0.0.1"};
	struct tnd_bridge *bridge;
	struct tnd_error error;
	return tnd_bridge_connect(&opts, &bridge, &error) != TND_E_ADDRESS;
}
"""


def output(*command, **how):
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, **how).stdout


class Install(unittest.TestCase):
    def test_installed_files_are_enough(self):
        with tempfile.TemporaryDirectory() as root:
            output("meson", "install", "-C", BUILD, "--no-rebuild", "--quiet", "--destdir", root)
            found = glob.glob(root + "/**/tundish.pc", recursive=True)
            self.assertEqual(len(found), 1)
            flags = output("pkg-config", "--define-variable=prefix=" + root + "/usr/local", "--cflags", "--libs", found[0],
                           env={**os.environ, "PKG_CONFIG_SYSROOT_DIR": ""}).split()
            libraries = glob.glob(root + "/**/libtundish.so.0", recursive=True)
            self.assertEqual(len(libraries), 1, "the soname's link")
            program = os.path.join(root, "program")
            output(CC, "-x", "c", "-std=c11", "-o", program, "-", "-x", "none", *flags, input=PROGRAM)
            where = {**os.environ, "LD_LIBRARY_PATH": os.path.dirname(libraries[0])}
            output(program, env=where)
            self.check_bridge(root, where)
            tool = glob.glob(root + "/**/bin/tundish", recursive=True)
            self.assertEqual(len(tool), 1)
            # As it is: whatever the prefix, it finds its libraries.
            self.assertRegex(output(tool[0], "--version"), r"^tundish \d+\.\d+\.\d+$")

    def check_bridge(self, root, where):
        """With ZeroMQ: its own line of pkg-config is enough for its own library."""
        found = glob.glob(root + "/**/tundish-bridge.pc", recursive=True)
        libraries = glob.glob(root + "/**/libtundish-bridge.so.0", recursive=True)
        self.assertEqual(len(found), len(libraries))
        if not found:
            return
        flags = output("pkg-config", "--define-variable=prefix=" + root + "/usr/local", "--cflags", "--libs", "tundish-bridge",
                       env={**os.environ, "PKG_CONFIG_SYSROOT_DIR": "", "PKG_CONFIG_PATH": os.path.dirname(found[0])}).split()
        program = os.path.join(root, "bridge")
        output(CC, "-x", "c", "-std=c11", "-o", program, "-", "-x", "none", *flags, input=BRIDGE_PROGRAM)
        output(program, env=where)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
