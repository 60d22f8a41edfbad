#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Readers that come in every way that processes come: spawned, forked, started apart, late, in other namespaces, of another user, of another version.

They must find each other, see each other's death where there are pidfds and where there are none, and be told by a sentence when they may not or
cannot meet.
"""
import os
import shutil
import socket
import struct
import tempfile
import time
import unittest

import crew
from crew import Crew

WIRE = struct.Struct("<IIIIII")  # magic, version, step, kind, bytes, descriptors
MAGIC, WIRE_VERSION, LAYOUT_VERSION = 0x53444E54, 1, 1
HELLO, REFUSED = 1, 3
CHANNEL = 16
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


def needs_root(test):
    return unittest.skipUnless(os.geteuid() == 0, "only root can do this")(test)


def place_of(address):
    """What a socket binds or connects to."""
    name = address.removeprefix("unix:")
    return "\0" + name[1:] if name.startswith("@") else name


class Ways(crew.ChannelTest):
    def reads(self, address, h=0):
        """Commands of a reader that wants 20 objects and the end."""
        return [{"do": "attach", "h": h, "address": address, "deadline_ms": 5000},
                {"do": "recv", "h": h, "count": 20, "low": 3000, "how": "borrow"},
                {"do": "recv", "h": h, "low": 3000, "want": "TND_E_CLOSED"},
                {"do": "close", "h": h}]

    def test_spawned_and_forked(self):
        for way in ("spawn", "fork"):
            for form in ("unix:@", "unix:/"):
                with self.subTest(way=way, form=form), tempfile.TemporaryDirectory(prefix="tundish-channel-") as folder, Crew(self) as these:
                    writer = these.start()
                    address = writer.create(reserved=1, address=None if form == "unix:@" else f"unix:{folder}/s")
                    self.assertTrue(address.startswith(form))
                    child = writer.ask(way, commands=self.reads(address, h=1)).pid
                    writer.ready()
                    writer.send(count=20, low=3000)
                    writer.close()
                    self.assertEqual(writer.wait(pid=child).status, 0, writer.errors())

    def test_started_before_the_writer(self):
        with tempfile.TemporaryDirectory(prefix="tundish-channel-") as folder, Crew(self) as these:
            writer, reader = these.start(), these.start()
            address = f"unix:{folder}/s"
            answer = reader.ask("attach", address=address, want="ECONNREFUSED")
            self.assertIn(f"{address} does not listen", answer.error)
            answer = reader.ask("attach", address=address, deadline_ms=50, want="ETIMEDOUT")
            self.assertIn("the deadline has passed", answer.error)
            reader.tell("attach", address=address, deadline_ms=10_000)
            writer.create(reserved=1, address=address)
            self.assertEqual(reader.answer().name, "OK")

    def test_handles_of_a_forked_child(self):
        """They are refused, and their close takes nothing from the parent."""
        with Crew(self) as these:
            writer, (reader,) = these.pair(1, pool=True)
            calls = {writer: ("send", "drain", "ready", "info", "evict"), reader: ("recv", "ready", "info")}
            for driver, names in calls.items():
                commands = [{"do": name, "want": "TND_E_FORKED"} for name in names] + [{"do": "close"}]
                child = driver.fork(commands=commands).pid
                self.assertEqual(driver.wait(pid=child).status, 0, driver.errors())
            writer.send(low=5000)
            reader.recv(low=5000)

    def test_nothing_is_inherited(self):
        """Descriptors are closed on exec: a program that either side starts has none."""
        with Crew(self) as these:
            writer, (reader,) = these.pair(1, pool=True, bytes=4096)
            writer.send(low=10_000)
            reader.recv(count=1, hold=1, low=10_000)
            for driver in (writer, reader):
                child = driver.spawn(commands=[{"do": "pause"}]).pid
                deadline = time.monotonic() + crew.DEADLINE
                while os.readlink(f"/proc/{child}/exe") != os.path.realpath(crew.DRIVER) or b"pause" not in read(f"/proc/{child}/cmdline"):
                    self.assertLess(time.monotonic(), deadline)
                held = [os.readlink(f"/proc/{child}/fd/{fd}") for fd in os.listdir(f"/proc/{child}/fd")]
                os.kill(child, 9)
                driver.wait(pid=child)
                self.assertFalse([name for name in held if "tundish" in name or name.startswith(("socket:", "anon_inode:"))], held)

    def test_late(self):
        """An open place sees what comes after its admission; and so does who takes it next."""
        with Crew(self) as these:
            writer, eight, nine = these.start(), these.start(), these.start()
            address = writer.create(open=1)
            writer.send(count=10)
            eight.attach(address, 8)
            writer.send(count=5)
            eight.recv(count=5, first=10, how="borrow")
            answer = nine.ask("attach", address=address, rank=9, want="TND_E_PLACE")
            self.assertIn("no place for rank 9: of 1 places none", answer.error)
            answer = nine.ask("attach", address=address, rank=8, want="TND_E_PLACE")
            self.assertIn("rank 8 is attached already", answer.error)
            eight.close()
            nine.attach(address, 9)
            writer.send(count=5)
            nine.recv(count=5, first=15, how="borrow")

    @crew.needs_failpoints
    def test_killed_or_stopped_while_it_attaches(self):
        """From before the socket to the maps: it is dead, and said so by its rank; or late, and gets all."""
        for point in ("group.socket", "group.who", "channel.stat", "channel.map-control", "channel.map-data"):
            for action in ("kill", "stop"):
                with self.subTest(point=point, action=action), Crew(self) as these:
                    writer, other = these.start(), these.start()
                    victim = these.start(env={"TUNDISH_FAILPOINTS": f"{point}={action}x1"})
                    address = writer.create(reserved=2, objects=4)
                    writer.expect(rank=1, pid=victim.pid)
                    other.attach(address, 0)
                    other.tell("recv", count=9)
                    victim.tell("attach", address=address, rank=1)
                    writer.tell("send", count=8)
                    if action == "kill":
                        died = victim.ended()
                        answer = writer.answer()
                        self.told(answer, died)
                        self.assertEqual(answer.rank, 1)
                        self.assertLessEqual(answer.done, 4)
                        writer.evict(rank=1)
                        writer.send(count=8 - answer.done)
                    else:
                        victim.halted()
                        self.assertTrue(writer.waits())
                        victim.resume()
                        self.assertEqual(victim.answer().name, "OK")
                        victim.recv(count=8)
                        self.assertEqual(writer.answer().name, "OK")
                    writer.close()
                    self.assertEqual(other.answer().done, 8)

    def test_given_up_while_it_waits(self):
        """The writer gives a reader up that lives: it is told at once, and may come again."""
        with Crew(self) as these:
            writer, (reader, other) = these.pair(2)
            reader.tell("recv")
            began = time.monotonic_ns()
            writer.evict(rank=0)
            self.told(reader.answer(), began, "TND_E_EVICTED")
            answer = writer.ask("evict", rank=0, want=None)
            self.assertEqual(answer.name, "TND_E_PLACE")
            reader.close()
            writer.send(count=3)
            reader.attach(writer.address, 0)
            writer.send(count=2)
            reader.recv(count=2, first=3, how="borrow")
            other.recv(count=5)

    def test_writer_that_is_stopped(self):
        """Who gives up attaching to it takes no place: the next one gets all that was held."""
        with Crew(self) as these:
            writer, reader = these.start(), these.start()
            address = writer.create(reserved=1)
            writer.send(count=3)
            writer.stop()
            answer = reader.ask("attach", address=address, deadline_ms=200, want="ETIMEDOUT")
            self.assertIn("did not answer in time", answer.error)
            writer.resume()
            reader.attach(address, deadline_ms=5000)
            reader.recv(count=3)

    def test_writer_that_is_gone(self):
        with Crew(self) as these:
            writer, reader = these.start(), these.start()
            address = writer.create(reserved=1)
            writer.kill()
            answer = reader.ask("attach", address=address, want="ECONNREFUSED")
            self.assertIn("does not listen; start it first, or check the address", answer.error)


def read(path):
    with open(path, "rb") as file:
        return file.read()


class Versions(crew.ChannelTest):
    def hello(self, address, wire_version, layout_version):
        """What a listener answers to one of another version: code, sentence."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.settimeout(crew.DEADLINE)
            peer.connect(place_of(address))
            peer.send(WIRE.pack(MAGIC, wire_version, HELLO, CHANNEL, 8, 0) + struct.pack("<II", layout_version, 0))
            answer = peer.recv(65536)
        self.assertEqual(WIRE.unpack_from(answer)[2], REFUSED)
        code, _ = struct.unpack_from("<ii", answer, WIRE.size)
        return code, answer[WIRE.size + 8:].split(b"\0")[0].decode()

    def test_reader_of_another_layout(self):
        with Crew(self) as these:
            writer, reader = these.start(), these.start()
            address = writer.create(reserved=1)
            code, text = self.hello(address, WIRE_VERSION, 99)
            self.assertEqual(code, -10031)
            self.assertIn(f"the writer has layout version {LAYOUT_VERSION}, the reader 99", text)
            code, text = self.hello(address, 77, LAYOUT_VERSION)
            self.assertEqual(code, -10031)
            self.assertRegex(text, f"version {WIRE_VERSION} .*version 77")
            reader.attach(address)

    def test_writer_of_another_version(self):
        with Crew(self) as these, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            name = f"tundish-test-{os.getpid()}-{time.monotonic_ns()}"
            listener.bind("\0" + name)
            listener.listen()
            listener.settimeout(crew.DEADLINE)
            reader = these.start()
            reader.tell("attach", address=f"unix:@{name}", deadline_ms=5000)
            peer, _ = listener.accept()
            with peer:
                peer.recv(65536)
                peer.send(WIRE.pack(MAGIC, 55, REFUSED, 0, 0, 0))
                answer = reader.answer()
            self.assertEqual(answer.name, "TND_E_VERSION")
            self.assertRegex(answer.error, f"version 55 .*version {WIRE_VERSION}")


@needs_root
class Apart(crew.ChannelTest):
    def deaths(self, writer_how, reader_how, address=None):
        """They meet, pass objects, and see each other die, where they are."""
        for dies in ("writer", "reader"):
            with self.subTest(dies=dies), Crew(self) as these:
                writer, reader = these.start(**writer_how), these.start(**reader_how)
                reader.attach(writer.create(reserved=1, objects=2, address=address))
                writer.send(count=2, low=1000)
                reader.recv(count=2, low=1000)
                if dies == "writer":
                    reader.tell("recv")
                    died = writer.kill()
                    self.told(reader.answer(), died)
                else:
                    writer.tell("send", count=3)
                    died = reader.kill()
                    self.told(writer.answer(), died)

    def test_pid_namespace(self):
        apart = {"wrap": ("unshare", "--pid", "--fork", "--kill-child")}
        points = [None] + ["group.pidfd=ENOSYS"] * crew.FAILPOINTS
        for point in points:
            env = {"env": {"TUNDISH_FAILPOINTS": point}} if point else {}
            for writer_how, reader_how in (({}, apart), (apart, {}), (apart, apart)):
                with self.subTest(point=point, writer=writer_how, reader=reader_how):
                    self.deaths({**writer_how, **env}, {**reader_how, **env})

    def test_network_namespace(self):
        """By a path; a name is of one network namespace, which its refusal must not hide."""
        apart = {"wrap": ("unshare", "--net")}
        with tempfile.TemporaryDirectory(prefix="tundish-channel-") as folder:
            self.deaths({}, apart, f"unix:{folder}/s")
        with Crew(self) as these:
            writer, reader = these.start(), these.start(**apart)
            reader.ask("attach", address=writer.create(open=1), want="ECONNREFUSED")

    def test_another_user(self):
        """Refused from both sides, with both users named."""
        with tempfile.TemporaryDirectory(prefix="tundish-channel-") as folder, Crew(self) as these:
            os.chmod(folder, 0o777)
            program = shutil.copy(crew.DRIVER, f"{folder}/driver")
            os.chmod(program, 0o755)
            root, nobody = these.start(), these.start(wrap=NOBODY, program=program)
            for writer, reader in ((root, nobody), (nobody, root)):
                answer = reader.ask("attach", address=writer.create(open=1), want="TND_E_DENIED")
                self.assertRegex(answer.error, "user 0.*user 65534|user 65534.*user 0")
            nobody.close()
            root.close()
            path = root.create(open=1, address=f"unix:{folder}/s")
            self.assertEqual(os.stat(f"{folder}/s").st_mode & 0o777, 0o600)
            self.assertIn(nobody.ask("attach", address=path, want=None).name, ("EACCES", "TND_E_DENIED"))
            root.close()
            os.unlink(program)
            self.assertEqual(os.listdir(folder), [])


if __name__ == "__main__":
    crew.main()
