#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A process that is killed, or stopped, at any step of the protocol must not hang, deceive or hold up the others.

The steps are those of docs/design/channel.md, each hit by its failpoint. After a kill: who waits is told the rank, or the writer, within 200 ms,
after everything that was published; nobody else notices, and all goes on after the dead one was given up. A stopped process is not a dead one:
nobody is told anything, and after SIGCONT everything arrives.
"""
import time

import crew
from crew import Crew, until

COUNT = 60
WRITER_STEPS = {
    "send": ["W1", "W2", "W3", "W4"],
    "wake": ["W5", "W6", "W7"],
    "full": ["V1", "V2", "V3", "V4", "V5"],
    "evict": ["E1", "E2", "E3", "E4", "E5"],
    "death": ["E2", "E3", "E4", "E5"],
    "attach": ["A1", "A2", "A3", "A4", "A5"],
    "close": ["C1"],
}
READER_STEPS = {
    "receive": ["R1", "R2", "R3", "R4"],
    "wake": ["R5", "R6", "R7"],
    "empty": ["S1", "S2", "S3", "S4", "S5"],
    "close": ["L1"],
}
# How long nothing may happen to those who wait for a stopped process: longer than a death takes to be told.
QUIET_S = 0.25
# How long a reader waits that borrows all that the ring has.
HELD_MS = 1200


@crew.needs_failpoints
class Steps(crew.ChannelTest):
    def at_each(self, steps, body, *args):
        for when, names in steps.items():
            for step in names:
                with self.subTest(when=when, step=step, args=args), Crew(self) as these:
                    body(these, when, step, *args)

    def deliver(self, writer, dead=()):
        """Sends up to object COUNT, and closes. Ranks of `dead` are given up when they are named."""
        while True:
            answer = writer.ask("send", count=COUNT - writer.info().sent_objects, want=None)
            if answer.name == "OK":
                break
            self.assertEqual(answer.name, "TND_E_PEER_DEAD", answer)
            self.assertIn(answer.rank, dead)
            writer.evict(rank=answer.rank)
        writer.close()

    def all_came(self, reader):
        """Every object came, then the end, to a recv that was told before."""
        self.assertEqual(reader.answer().name, "TND_E_CLOSED")
        self.assertEqual(reader.ask("info").sent_objects, COUNT)

    # -- the writer --

    def writer_at(self, these, when, step, action):
        """A writer that comes to `step`, its readers that wait, and another that attaches or is dead."""
        slow_us = 1000 if when == "full" else 0
        passage = 3 if when in ("send", "wake", "full") else 1
        writer, readers = these.pair(2, bytes=65536, objects=2, open=1, spin=False)
        other = readers.pop() if when in ("evict", "death") else None
        writer.failpoints(set=f"channel.{step}={action}@{passage}x1")
        for reader in readers:
            reader.tell("recv", count=COUNT + 1, sleep_us=slow_us)
        if when == "evict":
            writer.tell("evict", rank=1)
        elif when == "death":
            other.kill()
        elif when == "attach":
            other = these.start()
            other.tell("attach", address=writer.address, rank=7)
        elif when == "close":
            writer.send(count=COUNT)
            writer.tell("close")
        else:
            writer.tell("send", count=COUNT, sleep_us=0 if slow_us else 500)
        return writer, readers, other

    def writer_killed(self, these, when, step):
        writer, readers, other = self.writer_at(these, when, step, "kill")
        died = writer.ended()
        for reader in readers:
            answer = reader.answer()
            self.told(answer, died)
            self.assertIn(f"the writer (pid {writer.pid}) died", answer.error)
            self.assertEqual(answer.done, reader.ask("info").sent_objects, "not drained")
            reader.close()
        if when == "attach":
            self.assertEqual(other.answer().name, "ECONNREFUSED")

    def test_writer_killed(self):
        self.at_each(WRITER_STEPS, self.writer_killed)

    def writer_stopped(self, these, when, step):
        writer, readers, other = self.writer_at(these, when, step, "stop")
        writer.halted()
        time.sleep(QUIET_S)
        for reader in readers:
            self.assertTrue(reader.waits(), "told of something while the writer was stopped")
        writer.resume()
        if writer.asked["do"] in ("send", "evict", "close"):
            self.assertEqual(writer.answer().name, "OK")
        if when == "attach":
            self.assertEqual(other.answer().name, "OK")
            other.tell("recv", count=COUNT + 1)
        if when != "close":
            self.deliver(writer, dead=(1,) if when == "death" else ())
        for reader in [*readers, other] if when == "attach" else readers:
            self.all_came(reader)

    def test_writer_stopped(self):
        self.at_each(WRITER_STEPS, self.writer_stopped)

    # -- a reader --

    def reader_at(self, these, when, step, action, held, **options):
        """A writer that sends COUNT objects in all, a reader that comes to `step`, `held` or not, and another one that waits."""
        writer, (victim, other) = these.pair(2, bytes=65536, objects=4, spin=False, **options)
        passage = 3 if when in ("receive", "wake") and not held else 1
        other.tell("recv", count=COUNT + 1)
        if held:
            writer.send(count=3)
            victim.recv(count=3, hold=3)
        releases = held and (when == "wake" or step in ("R3", "R4"))
        if releases:
            # The ring is full and the writer sleeps. The cursor moves with each release.
            writer.tell("send", count=COUNT - 3)
            until(writer, lambda: writer.words()[1])
        victim.failpoints(set=f"channel.{step}={action}@{passage}x1")
        if releases:
            victim.tell("release", oldest=True)
        elif when == "close":
            victim.tell("close")
        else:
            # Slow where it is to be the one that the writer waits for.
            victim.tell("recv", count=COUNT + 1, how="borrow" if held else "recv", sleep_us=2000 if when == "wake" else 0,
                        deadline_ms=HELD_MS if held and action == "stop" else -1)
        if when == "empty":
            # It is there before anything comes; by S5 it is woken.
            until(writer, (lambda: writer.words()[2] & 1) if step == "S5" else (lambda: victim.state() in "TZ"))
        if not releases:
            writer.tell("send", count=COUNT - 3 * held, sleep_us=0 if when == "wake" else 100)
        return writer, victim, other

    def reader_killed(self, these, when, step, held):
        writer, victim, other = self.reader_at(these, when, step, "kill", held)
        died = victim.ended()
        answer = writer.answer()
        self.told(answer, died)
        self.assertEqual(answer.rank, 0)
        self.assertIn("rank 0", answer.error)
        self.assertTrue(other.waits(), "another reader noticed")
        # Sticky, until it is given up.
        self.assertEqual(writer.ask("send", want="TND_E_PEER_DEAD", deadline_ms=0).rank, 0)
        self.deliver(writer, dead=(0,))
        self.all_came(other)

    def test_reader_killed(self):
        for held in (False, True):
            self.at_each(READER_STEPS, self.reader_killed, held)

    def reader_evicted(self, these, when, step, held):
        writer, victim, other = self.reader_at(these, when, step, "kill", held, evict=True)
        victim.ended()
        self.assertEqual(writer.answer().name, "OK")
        writer.close()
        self.all_came(other)

    def test_reader_killed_and_evicted(self):
        for held in (False, True):
            self.at_each(READER_STEPS, self.reader_evicted, held)

    def reader_stopped(self, these, when, step, held):
        writer, victim, other = self.reader_at(these, when, step, "stop", held)
        victim.halted()
        until(writer, lambda: writer.words()[1] or writer.header()["sent"] == COUNT)
        time.sleep(QUIET_S)
        self.assertTrue(other.waits(), "another reader noticed")
        victim.resume()
        if victim.asked["do"] == "recv" and held:
            # One came beside the three that it borrows: the ring has no more until it releases one.
            answer = victim.answer()
            self.assertEqual(answer.name, "ETIMEDOUT")
            self.assertIn("borrows all 4", answer.error)
            victim.release()
        elif victim.asked["do"] != "recv":
            self.assertEqual(victim.answer().name, "OK")
        if victim.asked["do"] == "release":
            victim.tell("recv", count=COUNT + 1)
        self.assertEqual(writer.answer().name, "OK")
        writer.close()
        if when != "close":
            self.all_came(victim)
        self.all_came(other)

    def test_reader_stopped(self):
        for held in (False, True):
            self.at_each(READER_STEPS, self.reader_stopped, held)


if __name__ == "__main__":
    crew.main()
