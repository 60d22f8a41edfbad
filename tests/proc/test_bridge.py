# SPDX-License-Identifier: Apache-2.0
"""What could break: an object lost, repeated or torn on its way to another machine, above all when a connection breaks; memory that
grows with what a slow reader has not read; a writer that is stuck for ever behind a bridge that is gone; an end that looks like another;
a port that falls over what strangers send.

Two "machines" are two network namespaces joined by a veth pair, or this one's loopback where that is not permitted (the tests that need
a link of their own are skipped then). Writer and readers make and check contents from a seed (bridgepeer.c).
"""
import itertools
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import harness

PEER = os.environ.get("TND_BRIDGEPEER", "")
PATIENCE = 240
SEED = os.environ.get("TND_SEED", "20261130")
serial = itertools.count()

# ZMTP 3.0 by hand, as a DEALER, for what no library would send.
SETTLE_S = 0.5
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL".ljust(23, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


def shake_hands(stranger):
    """Each side waits for the other's greeting, then its READY."""
    stranger.sendall(GREETING)
    seen = receive(stranger, lambda seen: len(seen) >= 64)
    stranger.sendall(frame(READY, command=True))
    if b"READY" not in seen:
        receive(stranger, lambda seen: b"READY" in seen)


def receive(stranger, enough):
    seen = b""
    while not enough(seen):
        more = stranger.recv(65536)
        if not more:
            raise ConnectionResetError(seen[:200])
        seen += more
    return seen


def frame(data, more=False, command=False):
    return bytes([more | command << 2, len(data)]) + data


def state(session, number, written):
    """STATE of receiver 7, which takes whatever there is."""
    head = b"TNDB" + struct.pack("<HHQQQQ", 1, 1, session, 7, number, written)
    return head + struct.pack("<QQq", 1 << 40, 1 << 40, 1 << 40)


class Machines:
    """Where the two sides run, and at which address the far one finds the near one."""

    def __init__(self):
        self.names = [f"tnd{os.getpid()}{side}" for side in "ab"]
        self.address, self.linked, self.why = "127.0.0.1", False, "ip (iproute2) is not installed"
        if not shutil.which("ip"):
            return
        try:
            self.join()
            self.address, self.linked = "10.213.7.1", True
        except subprocess.CalledProcessError as error:
            self.why = "network namespaces: " + error.stderr.decode().strip()
            self.remove()

    def ip(self, *words):
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)

    def join(self):
        for name in self.names:
            self.ip("netns", "add", name)
        self.ip("link", "add", "veth0", "netns", self.names[0], "type", "veth", "peer", "name", "veth0", "netns", self.names[1])
        for index, name in enumerate(self.names):
            self.ip("-n", name, "addr", "add", f"10.213.7.{index + 1}/24", "dev", "veth0")
            self.ip("-n", name, "link", "set", "lo", "up")
            self.ip("-n", name, "link", "set", "veth0", "up")

    def link(self, state):
        self.ip("-n", self.names[1], "link", "set", "veth0", state)

    def enter(self, side):
        return ["ip", "netns", "exec", self.names[side]] if self.linked else []

    def remove(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)


class Process:
    """A program whose lines are waited for; ended at the test's end, and a failure of it when it was still there."""

    def __init__(self, test, words):
        self.test, self.words, self.text = test, words, ""
        self.errors = tempfile.TemporaryFile()
        self.popen = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)
        self.pid = self.popen.pid
        test.addCleanup(self.end)

    def end(self):
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        self.popen.stdin.close()
        self.popen.stdout.close()
        self.errors.close()

    def read(self, until_match):
        """Reads on until the text matches, or ends."""
        deadline = time.monotonic() + PATIENCE
        while not (found := re.search(until_match, self.text)):
            ready, _, _ = select.select([self.popen.stdout], [], [], max(0, deadline - time.monotonic()))
            self.test.assertTrue(ready, f"{self.words}: no '{until_match}' within {PATIENCE} s: {self.text}")
            more = os.read(self.popen.stdout.fileno(), 65536).decode()
            self.test.assertTrue(more, f"{self.words}: ended without '{until_match}': {self.text}{self.error()}")
            self.text += more
        return found

    def error(self):
        self.errors.seek(0)
        return self.errors.read().decode()

    def finish(self, status=0):
        try:
            out, _ = self.popen.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.test.fail(f"{self.words}: alive at the deadline: {self.text}{self.error()}")
        self.text += out.decode()
        self.test.assertEqual(self.popen.returncode, status, f"{self.words}: {self.text}{self.error()}")
        return self.text

    def anonymous(self):
        with open(f"/proc/{self.pid}/status", encoding="ascii") as file:
            return int(re.search(r"RssAnon:\s+(\d+) kB", file.read()).group(1)) << 10


class Proxy:
    """Carries connections to `target` and can cut them: a network that breaks when it is told to."""

    def __init__(self, test, target):
        self.target, self.pairs, self.closed = target, [], False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()
        test.addCleanup(self.close)

    def accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
                far = socket.create_connection(self.target)
            except OSError:
                if self.closed:
                    return
                continue
            self.pairs.append((near, far))
            for source, sink in ((near, far), (far, near)):
                self.threads.append(threading.Thread(target=self.carry, args=(source, sink)))
                self.threads[-1].start()

    @staticmethod
    def carry(source, sink):
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        for one in (source, sink):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def cut(self):
        for pair in self.pairs:
            for one in pair:
                try:
                    one.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def close(self):
        self.closed = True
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()
        for thread in self.threads:
            thread.join()
        for pair in self.pairs:
            for one in pair:
                one.close()


@unittest.skipUnless(PEER, "built without ZeroMQ")
class Bridge(harness.ProcTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.machines = Machines()
        cls.addClassCleanup(cls.machines.remove)

    def setUp(self):
        number = next(serial)
        self.near, self.far = (f"unix:@tundish-test-{os.getpid()}-{number}-{side}" for side in "ab")
        self.objects, self.longest = 2000, 20000

    def writer(self, how="close", max_bytes=1 << 20, max_objects=256):
        words = [self.near, SEED, self.objects, self.longest, max_bytes, max_objects, how]
        process = Process(self, [*self.machines.enter(0), PEER, "write", *map(str, words)])
        process.read("ready")
        return process

    def reader(self, rank=0, pause_us=0):
        words = [self.far, SEED, self.objects, self.longest, rank, pause_us]
        return Process(self, [*self.machines.enter(1), PEER, "read", *map(str, words)])

    def listen(self, *options, address=None):
        process = Process(self, [*self.machines.enter(0), harness.TOOL, "bridge", "--from", self.near, "--listen",
                                 f"tcp://{address or self.machines.address}:*", *options])
        process.endpoint = process.read(r"listening on (tcp://\S+:(\d+))\n").group(1)
        process.port = int(process.endpoint.rpartition(":")[2])
        return process

    def connect(self, endpoint, *options):
        process = Process(self, [*self.machines.enter(1), harness.TOOL, "bridge", "--connect", endpoint, "--to", self.far,
                                 "--max-bytes=1M", "--max-objects=256", *options])
        process.read("channel at")
        return process

    def all_read(self, reader, end="TND_E_CLOSED"):
        self.assertIn(f"\n{self.objects} {end}\n", reader.finish())

    def test_everything_arrives(self):
        """100,000 objects of 0 to 200,000 bytes, two readers, both equal and in order."""
        self.objects, self.longest = 100000, 200000
        writer, listening = self.writer(max_bytes=4 << 20), self.listen()
        connected = self.connect(listening.endpoint, "--readers=2")
        readers = [self.reader(rank) for rank in (0, 1)]
        for reader in readers:
            self.all_read(reader)
        self.assertIn("100000 OK", writer.finish())
        self.assertIn("sent 100000 objects", listening.finish())
        self.assertIn("received 100000 objects", connected.finish())

    def test_objects_longer_than_the_channels(self):
        """By slab on both machines: above the limits of both channels, and of what may be under way."""
        self.objects, self.longest = 300, 600000
        self.writer(max_bytes=65536)
        listening = self.listen()
        connected = self.connect(listening.endpoint, "--max-bytes=64K")
        self.all_read(self.reader())
        listening.finish()
        connected.finish()

    def test_two_receivers(self):
        writer, listening = self.writer(), self.listen("--receivers=2")
        first_far, ends, readers = self.far, [], []
        for side in "xy":
            self.far = first_far + side
            ends.append(self.connect(listening.endpoint))
            readers.append(self.reader())
        for reader in readers:
            self.all_read(reader)
        for process in (writer, listening, *ends):
            process.finish()

    def test_a_slow_reader_bounds_memory(self):
        """54 MB are sent; with 1 MiB under way no process of the bridge may hold more than a part of it."""
        self.objects, self.longest = 1000, 200000
        self.writer()
        listening = self.listen()
        connected = self.connect(listening.endpoint)
        reader = self.reader(pause_us=2000)
        reader.read("first")
        before = [process.anonymous() for process in (listening, connected)]
        peaks, pidfd = list(before), os.pidfd_open(reader.pid)
        self.addCleanup(os.close, pidfd)
        samples = 0
        while not select.select([pidfd], [], [], 0.02)[0]:
            for index, process in enumerate((listening, connected)):
                if process.popen.poll() is None:
                    try:
                        peaks[index] = max(peaks[index], process.anonymous())
                    except (FileNotFoundError, ProcessLookupError, AttributeError):
                        continue
            samples += 1
        self.all_read(reader)
        self.assertGreater(samples, 20)
        for peak, start in zip(peaks, before):
            self.assertLess(peak - start, 16 * harness.MIB)

    def test_connections_that_break(self):
        """Cut again and again on the way: nothing is lost, nothing comes twice, and it did break."""
        self.objects, self.longest = 3000, 200000
        self.machines_are_one()
        self.writer()
        listening = self.listen("--grace=20", address="127.0.0.1")
        proxy = Proxy(self, ("127.0.0.1", listening.port))
        connected = self.connect(f"tcp://127.0.0.1:{proxy.port}", "--grace=20")
        reader = self.reader(pause_us=300)
        reader.read("first")
        pidfd = os.pidfd_open(reader.pid)
        self.addCleanup(os.close, pidfd)
        while not select.select([pidfd], [], [], 0.25)[0]:
            proxy.cut()
        self.all_read(reader)
        listening.finish()
        self.assertRegex(connected.finish(), r"[1-9]\d* reconnects")

    def machines_are_one(self):
        """For what needs sockets of this process: both sides here."""
        linked = self.machines.linked
        self.machines.linked = False
        self.addCleanup(setattr, self.machines, "linked", linked)

    def test_a_link_that_goes_down_and_comes_back(self):
        if not self.machines.linked:
            self.skipTest(self.machines.why)
        self.objects, self.longest = 1500, 200000
        self.writer()
        listening = self.listen("--grace=30")
        connected = self.connect(listening.endpoint, "--grace=30")
        reader = self.reader(pause_us=1000)
        reader.read("first")
        pidfd = os.pidfd_open(reader.pid)
        self.addCleanup(os.close, pidfd)
        self.assertFalse(select.select([pidfd], [], [], 0.3)[0], "read all before the link went down")
        self.machines.link("down")
        try:
            self.assertFalse(select.select([pidfd], [], [], 2)[0], "objects came through a link that is down")
        finally:
            self.machines.link("up")
        self.all_read(reader)
        listening.finish()
        connected.finish()

    def test_a_link_that_stays_down(self):
        """Each side says so after its grace; the readers do not take what came for all of it."""
        if not self.machines.linked:
            self.skipTest(self.machines.why)
        self.objects = 10**6
        writer, listening = self.writer(), self.listen("--grace=1")
        connected = self.connect(listening.endpoint, "--grace=1")
        reader = self.reader(pause_us=100)
        reader.read("first")
        self.machines.link("down")
        try:
            listening.finish(6)
            connected.finish(6)
        finally:
            self.machines.link("up")
        self.assertIn("silent for 1.0 s", listening.error())
        self.assertIn("silent for 1.0 s", connected.error())
        self.assertIn("TND_E_PEER_DEAD", reader.finish())
        self.assertIn("1000000 OK", writer.finish())

    def killed_receiver(self, *options, status):
        self.objects = 300000
        writer, listening = self.writer(), self.listen("--grace=1", *options)
        connected = self.connect(listening.endpoint)
        reader = self.reader(pause_us=100)
        reader.read("first")
        connected.popen.kill()
        self.assertIn("TND_E_PEER_DEAD", reader.finish())
        text = listening.finish(status)
        # The first writer is not held up for longer than the grace.
        self.assertIn(f"{self.objects} OK", writer.finish())
        return text + listening.error()

    def test_receiver_killed(self):
        self.assertIn("silent for 1.0 s", self.killed_receiver(status=6))

    def test_receiver_killed_and_given_up(self):
        self.assertIn("1 receivers lost", self.killed_receiver("--on-lost=continue", status=0))

    def test_listening_side_killed(self):
        writer, listening = self.writer("stay"), self.listen()
        connected = self.connect(listening.endpoint, "--grace=1")
        reader = self.reader()
        reader.read("first")
        listening.popen.kill()
        connected.finish(6)
        self.assertIn("TND_E_PEER_DEAD", reader.finish())
        writer.popen.stdin.close()
        writer.popen.wait()

    def test_first_writer_killed(self):
        """Everything that it sent, then an error and not an end."""
        writer, listening = self.writer("die"), self.listen()
        connected = self.connect(listening.endpoint)
        self.all_read(self.reader(), "TND_E_PEER_DEAD")
        writer.finish(-signal.SIGKILL)
        listening.finish(6)
        connected.finish(6)

    def test_interrupted(self):
        writer, listening = self.writer("stay"), self.listen()
        connected = self.connect(listening.endpoint)
        reader = self.reader()
        reader.read("first")
        listening.popen.send_signal(signal.SIGINT)
        listening.finish(130)
        connected.finish(6)
        self.assertIn("ended before its writer closed", connected.error())
        self.assertIn("TND_E_PEER_DEAD", reader.finish())
        self.assertIn("OK", writer.finish())

    def test_receiver_interrupted(self):
        """It has left, as a reader leaves: the listening side goes on."""
        writer, listening = self.writer("stay"), self.listen()
        connected = self.connect(listening.endpoint)
        reader = self.reader()
        reader.read("first")
        connected.popen.send_signal(signal.SIGINT)
        connected.finish(130)
        self.assertIn("TND_E_PEER_DEAD", reader.finish())
        self.assertIn("OK", writer.finish())
        listening.finish()

    def test_nobody_there(self):
        connected = self.connect("tcp://127.0.0.1:1", "--deadline=0.5")
        connected.finish(7)
        self.assertIn("deadline passed", connected.error())
        self.writer("stay")
        listening = self.listen("--deadline=0.5")
        listening.finish(7)

    def test_started_anew(self):
        """Another session is refused, not taken for the rest."""
        self.machines_are_one()
        writer = self.writer("stay")
        listening = self.listen(address="127.0.0.1")
        connected = self.connect(listening.endpoint)
        reader = self.reader()
        reader.read("first")
        writer.read("sent")
        listening.popen.kill()
        listening.popen.wait()
        again = Process(self, [harness.TOOL, "bridge", "--from", self.near, "--listen", listening.endpoint])
        again.read("listening on")
        connected.finish(3)
        self.assertIn("another session", connected.error())
        self.assertIn("TND_E_PEER_DEAD", reader.finish())

    def test_secret(self):
        paths = []
        for name in ("one", "other"):
            paths.append(os.path.join(self.scratch, name))
            with open(paths[-1], "w", encoding="ascii") as file:
                file.write(os.urandom(32).hex() + "\n")
        self.writer()
        listening = self.listen("--secret", paths[0])
        for options in ((), ("--secret", paths[1])):
            stranger = self.connect(listening.endpoint, "--deadline=1", *options)
            self.assertIn("received 0 objects", stranger.finish(7))
        connected = self.connect(listening.endpoint, "--secret", paths[0])
        self.all_read(self.reader())
        listening.finish()
        connected.finish()

    def test_garbage(self):
        """Bytes of all kinds, and messages that are ZeroMQ's but no bridge's, while objects go by."""
        self.machines_are_one()
        self.writer("stay")
        listening = self.listen(address="127.0.0.1")
        raw = [os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\xff", GREETING[:20], GREETING + b"\x02" + b"\xff" * 8]
        messages = [frame(body) for body in (b"", b"TNDB", b"TNDB\x02\x00\x01\x00" + bytes(56), bytes(64), state(0, 9, 9)[:-1],
                                             state(9, 0, 0), state(0, 0, 0)[:6] + b"\x63\x00" + bytes(56))]
        messages += [frame(state(0, 0, 0), more=True) + frame(b"more"), frame(b"x", more=True) * 500 + frame(b"y"),
                     b"\x02" + struct.pack(">Q", 1 << 40)]
        opened = []
        for data in (*raw, *messages) * 3:
            opened.append(socket.create_connection(("127.0.0.1", listening.port)))
            self.addCleanup(opened[-1].close)
            opened[-1].settimeout(5)
            if data in messages:
                shake_hands(opened[-1])
            opened[-1].sendall(data)
        connected = self.connect(listening.endpoint)
        reader = self.reader()
        reader.read("first")
        # Nothing outside shows that the listener has looked at all of them; objects alone can be over before.
        time.sleep(SETTLE_S)
        connected.popen.send_signal(signal.SIGINT)
        connected.finish(130)
        reader.finish()
        listening.popen.send_signal(signal.SIGINT)
        self.assertRegex(listening.finish(130), r"[1-9]\d* messages refused")

    def test_liars(self):
        """A receiver that acknowledges what it was not sent ends the bridge with an error, not in a fault."""
        self.machines_are_one()
        self.writer("stay")
        listening = self.listen(address="127.0.0.1")
        with socket.create_connection(("127.0.0.1", listening.port)) as liar:
            liar.settimeout(20)
            shake_hands(liar)
            liar.sendall(frame(state(0, 0, 0)))
            welcome = b"TNDB" + struct.pack("<HH", 1, 16)
            seen = receive(liar, lambda seen: len(seen.partition(welcome)[2]) >= 8)
            session, = struct.unpack("<Q", seen.partition(welcome)[2][:8])
            liar.sendall(frame(state(session, 1 << 60, 1 << 60)))
            listening.finish(3)
        self.assertIn("acknowledges", listening.error())

    def test_too_long_for_the_receiver(self):
        self.objects, self.longest = 100, 200000
        self.writer("stay")
        listening = self.listen()
        connected = self.connect(listening.endpoint, "--max-bytes=4K", "--max-object-bytes=10000")
        listening.finish(5)
        self.assertRegex(listening.error(), r"has \d+ bytes, a receiver takes 10000")
        reader = self.reader()
        self.assertIn("TND_E_PEER_DEAD", reader.finish())
        connected.finish(6)

    def test_usage(self):
        for words, says in (([], "expected --from and --listen, or --connect and --to"),
                            (["--from=x", "--to=y"], "give one side's"),
                            (["--from=x", "--listen=y"], "'y' is no endpoint"),
                            (["--connect=tcp://127.0.0.1", "--to=x"], "is no endpoint"),
                            (["--connect=ipc://x:1", "--to=x"], "is no endpoint"),
                            (["--connect=tcp://a:1", "--to=x", "--readers=9", "--places=8"], "--readers"),
                            (["--connect=tcp://a:1", "--to=x", "--grace=0.01"], "--grace")):
            done = subprocess.run([harness.TOOL, "bridge", *words], capture_output=True, text=True, timeout=20, check=False)
            self.assertIn(says, done.stderr)
            self.assertIn(done.returncode, (2, 3))
            self.assertEqual(done.stdout, "")

if __name__ == "__main__":
    sys.dont_write_bytecode = True
    harness.main()
