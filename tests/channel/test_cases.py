#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What went wrong in systems of this kind in the field, each as a test of its own (README.md says which is where).

A writer and its readers, each a process, are brought into the reported state; then the right behaviour is looked for: who is told what and when,
what comes after it, and that nothing is left behind.
"""
import contextlib
import os
import resource
import signal
import tempfile
import time

import crew
import harness
from crew import Crew, until

MIB = 1 << 20


class Deaths(crew.ChannelTest):
    def test_reader_killed_with_a_borrow(self):
        """The writer sends past the capacity while the dead one held an object; by policy."""
        for evict in (False, True):
            with self.subTest(evict=evict), Crew(self) as these:
                writer, (victim, other) = these.pair(2, bytes=8192, objects=4, evict=evict)
                writer.send(count=2)
                victim.recv(count=1, hold=1)
                other.tell("recv", count=21)
                writer.tell("send", count=18)
                until(writer, lambda: writer.words()[1])
                died = victim.kill()
                answer = writer.answer()
                if not evict:
                    self.told(answer, died)
                    self.assertEqual(answer.rank, 0)
                    writer.evict(rank=0)
                    answer = writer.send(count=18 - answer.done)
                self.assertEqual(answer.name, "OK")
                self.assertLess(answer.ns - died, 10 * crew.DEATH_NS)
                writer.close()
                self.assertEqual(other.answer().done, 20)

    def test_reader_stopped(self):
        """Who, how far behind, and that it is stopped; then it goes on."""
        with Crew(self) as these:
            writer, (reader,) = these.pair(1, bytes=8192, objects=4, warn_ms=100)
            reader.stop()
            writer.send(count=4)
            answer = writer.ask("send", deadline_ms=500, want="ETIMEDOUT")
            for text in (answer.error, answer.log[0]):
                for part in ("rank 0", f"pid {reader.pid}", "4 objects", "stopped"):
                    self.assertIn(part, text)
            reader.resume()
            reader.tell("recv", count=10)
            writer.send()
            writer.close()
            self.assertEqual(reader.answer().done, 5)

    def test_writer_stopped(self):
        with Crew(self) as these:
            writer, (reader,) = these.pair(1)
            writer.stop()
            answer = reader.ask("recv", deadline_ms=300, want="ETIMEDOUT")
            self.assertIn(f"the writer (pid {writer.pid}) has not sent, its process is stopped", answer.error)
            writer.resume()
            writer.send()
            reader.recv()

    def test_writer_killed(self):
        """What was sent is read first, however slowly."""
        with Crew(self) as these:
            writer, readers = these.pair(2)
            writer.send(count=50, low=100, high=1000)
            writer.kill()
            for reader in readers:
                answer = reader.ask("recv", count=100, sleep_us=1000, low=100, high=1000, want="TND_E_PEER_DEAD")
                self.assertEqual(answer.done, 50)
                # And each call after it.
                reader.ask("recv", deadline_ms=0, want="TND_E_PEER_DEAD")

    def test_closed_at_once(self):
        """A reader that attached in time reads late, after the writer's process has ended."""
        with Crew(self) as these:
            writer, (reader,) = these.pair(1)
            writer.send(low=5000)
            writer.close()
            writer.end()
            self.assertEqual(reader.ask("recv", count=2, low=5000, want="TND_E_CLOSED").done, 1)

    def test_before_all_are_ready(self):
        """One dies before or after it attached, while the others wait for all."""
        for attached in (False, True):
            with self.subTest(attached=attached), Crew(self) as these:
                writer, reader, victim = these.start(), these.start(), these.start()
                address = writer.create(reserved=3)
                writer.expect(rank=1, pid=victim.pid)
                reader.attach(address, 0)
                if attached:
                    victim.attach(address, 1)
                answer = writer.ask("ready", deadline_ms=100, want="ETIMEDOUT")
                self.assertIn("rank 2" if attached else "rank 1, 2", answer.error)
                for waiting in (writer, reader):
                    waiting.tell("ready")
                died = victim.kill()
                for waiting in (writer, reader):
                    answer = waiting.answer()
                    self.told(answer, died)
                    self.assertEqual(answer.rank, 1)

    def test_forked_children_live_on(self):
        """They hold all descriptors of the dead one, and live."""
        for points in (None, "group.pidfd=ENOSYS", "group.peerpidfd=ENOPROTOOPT"):
            if points and not crew.FAILPOINTS:
                continue
            env = {"TUNDISH_FAILPOINTS": points} if points else None
            for who in ("writer", "reader"):
                with self.subTest(points=points, who=who), Crew(self) as these:
                    writer, reader = these.start(env=env), these.start(env=env)
                    reader.attach(writer.create(reserved=1, objects=1))
                    victim, other = (writer, reader) if who == "writer" else (reader, writer)
                    children = [victim.fork(commands=[{"do": "pause"}]).pid for _ in range(3)]
                    try:
                        if who == "writer":
                            reader.tell("recv")
                        else:
                            writer.tell("send", count=2)
                        died = victim.kill()
                        self.told(other.answer(), died)
                    finally:
                        for child in children:
                            os.kill(child, signal.SIGKILL)
                        self.assertEqual(harness.wait_gone(children, 5), [])

    def test_everyone_killed(self):
        """In every state; nothing is left, and the address can be used again."""
        def idle(writer, readers):
            del writer, readers

        def waiting(writer, readers):
            for reader in readers:
                reader.tell("recv")
            until(writer, lambda: writer.words()[2] == 3)

        def full(writer, readers):
            del readers
            writer.tell("send", count=10)
            until(writer, lambda: writer.words()[1])

        def borrowed(writer, readers):
            writer.send(count=4)
            for reader in readers:
                reader.recv(count=3, hold=3)

        def streaming(writer, readers):
            for reader in readers:
                reader.tell("recv", count=1 << 40)
            writer.tell("send", count=1 << 40)
            until(writer, lambda: writer.header()["sent"] > 1000)

        def by_slab(writer, readers):
            writer.send(low=MIB)
            for reader in readers:
                reader.recv(count=1, hold=1, low=MIB)

        def closed(writer, readers):
            del readers
            writer.send(count=4)
            writer.close()

        with tempfile.TemporaryDirectory(prefix="tundish-channel-") as folder:
            address = f"unix:{folder}/socket"
            for state in (idle, waiting, full, borrowed, streaming, by_slab, closed):
                with self.subTest(state=state.__name__), Crew(self) as these:
                    writer, readers = these.pair(2, bytes=8192, objects=4, pool=True, address=address)
                    state(writer, readers)
                    for driver in (writer, *readers):
                        os.kill(driver.pid, signal.SIGKILL)
                    for driver in (writer, *readers):
                        driver.ended()
            with Crew(self) as these:
                writer, (reader,) = these.pair(1, address=address)
                writer.send()
                reader.recv()
            self.assertEqual(os.listdir(folder), [])

    def test_again_and_again(self):
        """Readers that are killed and started anew 1,000 times cost their writer nothing; nor a writer its reader."""
        times = 1000 // crew.SLOWER
        with Crew(self) as these:
            writer = these.start()
            address = writer.create(open=2, evict=True, objects=4)
            for turn in range(times):
                if turn == times // 10:
                    before = figures(writer)
                reader = these.start()
                reader.attach(address, turn)
                writer.send()
                if turn % 2:
                    reader.tell("recv", count=2)
                reader.kill()
                these.drop(reader)
            self.flat(writer, before)

    def test_writers_again_and_again(self):
        times = 300 // crew.SLOWER
        with tempfile.TemporaryDirectory(prefix="tundish-channel-") as folder, Crew(self) as these:
            reader = these.start()
            for turn in range(times):
                if turn == times // 10:
                    before = figures(reader)
                writer = these.start()
                reader.attach(writer.create(reserved=1, address=f"unix:{folder}/socket"))
                writer.send()
                writer.kill()
                self.assertEqual(reader.ask("recv", count=2, want="TND_E_PEER_DEAD").done, 1)
                reader.close()
                these.drop(writer)
            self.flat(reader, before)
            self.assertEqual(os.listdir(folder), ["socket"])

    def flat(self, driver, before):
        """No larger than before, in any way: what was of the last one may have been there still. A sanitizer keeps what was freed."""
        slack = (MIB, 0, 0, 0) if crew.SLOWER == 1 else (32 * MIB, 0, 0, 64)

        def settled():
            return all(now <= then + more for now, then, more in zip(figures(driver), before, slack))

        deadline = time.monotonic() + crew.DEADLINE
        while not settled():
            self.assertLess(time.monotonic(), deadline, f"resident bytes, descriptors, threads, mappings: {before}, then {figures(driver)}")
            time.sleep(0.01)


def figures(driver):
    """Resident bytes, descriptors, threads, mappings."""
    with open(f"/proc/{driver.pid}/maps", encoding="ascii") as file:
        maps = len(file.readlines())
    return (harness.resident(driver.pid), len(os.listdir(f"/proc/{driver.pid}/fd")), len(os.listdir(f"/proc/{driver.pid}/task")), maps)


class Calls(crew.ChannelTest):
    def test_deadline(self):
        """The call after one that timed out gets the object."""
        with Crew(self) as these:
            writer, (reader,) = these.pair(1)
            for how in ("recv", "borrow"):
                began = time.monotonic_ns()
                answer = reader.ask("recv", how=how, deadline_ms=100, want="ETIMEDOUT")
                self.assertGreaterEqual(answer.ns - began, 99_000_000)
                writer.send(count=2)
                reader.recv(how=how)
                reader.recv(how=how, deadline_ms=0)

    def test_two_threads(self):
        """The second of two threads in a receive call of one handle is refused, and does not hang."""
        with Crew(self) as these:
            writer, (reader,) = these.pair(1)
            answer = reader.ask("busy", want="EBUSY")
            self.assertIn("another thread is in a receive call", answer.error)
            writer.send()
            reader.recv()

    def test_buffer_overwritten(self):
        """The driver overwrites what it sent as soon as send returns; the reader comes later."""
        with Crew(self) as these:
            writer, (reader,) = these.pair(1)
            for how in ("send", "sendv"):
                writer.send(count=10, low=1000, high=100_000, how=how)
                reader.recv(count=10, low=1000, high=100_000)

    def test_limits(self):
        """/dev/shm does not matter; a limit of a cgroup, or of file sizes, is an error with a sentence, never a signal."""
        script = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"'
        if os.geteuid() == 0:
            with Crew(self) as these:
                writer, reader = these.start(wrap=("unshare", "-m", "sh", "-c", script, "sh")), these.start()
                reader.attach(writer.create(reserved=1, bytes=16 * MIB))
                writer.send(low=16 * MIB)
                reader.recv(low=16 * MIB)
        small = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))  # noqa: E731
        with Crew(self) as these:
            writer = these.start(before=small)
            answer = writer.ask("create", open=1, bytes=4 * MIB, want="TND_E_HEADROOM")
            self.assertRegex(answer.error, "RLIMIT_FSIZE|file size")
            writer.create(open=1, bytes=MIB // 2)
        self.in_a_cgroup()

    def in_a_cgroup(self):
        limit = harness.MemoryLimit(64 * MIB)
        try:
            with Crew(self) as these:
                writer = these.start(before=limit.enter)
                answer = writer.ask("create", open=1, bytes=256 * MIB, want="TND_E_HEADROOM")
                self.assertRegex(answer.error, "[0-9]")
                writer.create(open=1, bytes=8 * MIB)
                writer.send(low=8 * MIB)
        finally:
            limit.remove()

    def test_too_long(self):
        """Both numbers; then a small one."""
        with Crew(self) as these:
            writer, (reader,) = these.pair(1, bytes=8192)
            for how in ("send", "sendv", "reserve"):
                answer = writer.ask("send", low=8193, how=how, want="EMSGSIZE")
                self.assertIn("8193", answer.error)
                self.assertIn("8192", answer.error)
                writer.send(low=8192, how=how)
                reader.recv(low=8192)

    def test_reader_leaves_a_full_ring(self):
        """The writer that sleeps is woken, by a close as by an end without one."""
        for ordered in (True, False):
            with self.subTest(ordered=ordered), Crew(self) as these:
                writer, (reader,) = these.pair(1, objects=2, evict=True)
                writer.send(count=2)
                reader.recv(count=1, hold=1)
                writer.tell("send", count=3)
                until(writer, lambda: writer.words()[1])
                left = time.monotonic_ns()
                if ordered:
                    reader.close()
                else:
                    left = reader.kill()
                answer = writer.answer()
                self.assertEqual((answer.name, answer.done), ("OK", 3))
                self.assertLess(answer.ns - left, crew.DEATH_NS)

    def test_sizes(self):
        """Between processes: nothing up to the capacity waits for ever, at whatever offset."""
        sizes = [0, 1, 63, 64, 65, 4095, 4096, 4097, 6143, 6144, 6145, 12287, 12288]
        with Crew(self) as these:
            writer, (reader,) = these.pair(1, bytes=12288)
            for step in sizes:
                for size in sizes:
                    writer.tell("send", low=step)
                    reader.recv(low=step)
                    writer.answer()
                    writer.tell("send", low=size)
                    reader.recv(low=size)
                    self.assertEqual(writer.answer().name, "OK")

    def test_size_as_given(self):
        """The size of the options is the one that both sides and the segment say."""
        with Crew(self) as these:
            writer, (reader,) = these.pair(1, bytes=100_000, objects=37)
            for info in (writer.ask("info"), reader.ask("info")):
                self.assertEqual((info.max_bytes, info.max_objects), (100_032, 37))
            for driver in (writer, reader):
                header = driver.header()
                self.assertEqual((header["max_bytes"], header["max_objects"]), (100_032, 37))

    def test_attach_while_the_other_waits(self):
        """Whichever call a process is in, on whichever channel, others attach to it."""
        with Crew(self) as these:
            first, (slow,) = these.pair(1, objects=1)
            second = first.ask("create", h=1, reserved=1).address
            first.send()
            first.tell("send", h=0)
            late = these.start()
            late.attach(second)
            # And the other way round: `late` waits as a reader of one channel and is the writer of another.
            third = late.ask("create", h=1, reserved=1).address
            late.tell("recv", h=0)
            slow.ask("attach", h=1, address=third)
            self.assertTrue(first.waits() and late.waits())
            slow.recv(count=2)
            self.assertEqual(first.answer().name, "OK")
            first.send(h=1)
            self.assertEqual(late.answer().name, "OK")
            late.send(h=1)
            slow.recv(h=1)

    def test_by_slab(self):
        """Objects above the capacity; what a dead reader held of them is free again."""
        with Crew(self) as these:
            writer, (victim, other) = these.pair(2, bytes=65536, objects=8, pool=True, evict=True)
            stream = {"low": 10, "high": 3 * MIB}
            other.tell("recv", count=61, how="borrow", **stream)
            victim.tell("recv", count=5, hold=5, **stream)
            writer.send(count=5, **stream)
            victim.answer()
            writer.tell("send", count=55, **stream)
            victim.kill()
            self.assertEqual(writer.answer().name, "OK")
            writer.close()
            self.assertEqual(other.answer().done, 60)


class Network(crew.ChannelTest):
    def test_nothing_listens(self):
        """No socket of these processes is a network's."""
        with Crew(self) as these:
            writer, (reader,) = these.pair(1)
            for driver in (writer, reader):
                sockets = set()
                for fd in os.listdir(f"/proc/{driver.pid}/fd"):
                    with contextlib.suppress(OSError):
                        target = os.readlink(f"/proc/{driver.pid}/fd/{fd}")
                        if target.startswith("socket:"):
                            sockets.add(target[8:-1])
                self.assertTrue(sockets)
                for name in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6", "packet"):
                    with contextlib.suppress(FileNotFoundError), open(f"/proc/{driver.pid}/net/{name}", encoding="ascii") as file:
                        for line in file.readlines()[1:]:
                            self.assertFalse(sockets & set(line.split()), line)


if __name__ == "__main__":
    crew.main()
