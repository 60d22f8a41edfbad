#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An object that is lost, doubled, torn, out of order, or overwritten while it is read; a wake that is lost; processor time that nobody has use for.

Long streams whose every word says to which object it belongs, through rings that are full or empty most of the time, with sleeps and without, on
many processors and on one. No handle warns: a warning makes the one that waits look again, which would hide a lost wake.
"""
import os
import time

import crew
from crew import Crew

ARRAYS = {"unit": 8, "low": 1, "high": 9999}  # int64 arrays: 8 to 79,992 bytes
ARRAY_COUNT = 10_000
LEAST_BYTES = 400_000_000
SMALL = {"low": 8, "high": 48}
MANY = 10_000_000
SEED = int(os.environ.get("TND_SEED", "1"))


class Stress(crew.ChannelTest):
    def through(self, count, stream, readers, options, sleep_us=0, before=None, failpoints=None):
        """All of the stream goes from a writer to its readers. Returns the seconds."""
        with Crew(self) as these:
            writer = these.start(before=before, env=failpoints)
            address = writer.create(reserved=readers, **options)
            crew_ = [these.start(before=before, env=failpoints) for _ in range(readers)]
            for rank, reader in enumerate(crew_):
                reader.attach(address, rank)
                reader.tell("recv", count=count + 1, sleep_us=sleep_us, how="borrow" if rank % 2 else "recv", **stream)
            began = time.monotonic()
            sent = writer.ask("send", seconds=60 * crew.SLOWER, count=count, sleep_us=sleep_us, **stream)
            writer.close()
            for reader in crew_:
                got = reader.answer()
                self.assertEqual((got.name, got.done, got.bytes), ("TND_E_CLOSED", count, sent.bytes))
            return time.monotonic() - began

    def arrays(self, options, sleep_us):
        with Crew(self) as these:
            driver = these.start()
            seed = SEED
            while driver.ask("total", seed=seed, count=ARRAY_COUNT, **ARRAYS).bytes <= LEAST_BYTES:
                seed += 1
            total = driver.ask("total", seed=seed, count=ARRAY_COUNT, **ARRAYS).bytes
        self.assertGreater(total, LEAST_BYTES)
        seconds = self.through(ARRAY_COUNT, {"seed": seed, **ARRAYS}, 3, options, sleep_us)
        print(f"seed {seed}: {total} bytes in {ARRAY_COUNT} objects, {options}, sleeps <= {sleep_us} us: {seconds:.1f} s")

    def test_arrays_two_objects(self):
        self.arrays({"bytes": 80 << 10, "objects": 2}, 0)

    def test_arrays_two_objects_with_sleeps(self):
        self.arrays({"bytes": 80 << 10, "objects": 2}, 1000)

    def test_arrays_1_mib(self):
        self.arrays({"bytes": 1 << 20}, 0)

    def test_arrays_1_mib_with_sleeps(self):
        self.arrays({"bytes": 1 << 20}, 1000)

    def test_slow_reader(self):
        """The queue is full all the time."""
        self.through(1000, {"low": 100, "high": 2000}, 1, {"bytes": 4096, "objects": 3}, sleep_us=300)

    def test_ten_million(self):
        """10 million small objects; fewer under sanitizers."""
        count = MANY // crew.SLOWER
        for readers in (2, 8):
            with self.subTest(readers=readers):
                seconds = self.through(count, SMALL, readers, {"bytes": 4 << 20, "objects": 1 << 16})
                print(f"{count} objects, {readers} readers: {seconds:.1f} s")

    def test_one_processor(self):
        """Whoever spins keeps the one from running for which it waits."""
        alone = {min(os.sched_getaffinity(0))}
        self.through(2000, {"low": 64, "high": 512}, 8, {"bytes": 8192, "objects": 4}, before=lambda: os.sched_setaffinity(0, alone))

    def test_one_processor_later(self):
        """The same with handles that were opened when there were more: they spin, and end it."""
        alone = {min(os.sched_getaffinity(0))}
        with Crew(self) as these:
            writer, readers = these.pair(8, bytes=8192, objects=4)
            for driver in (writer, *readers):
                for task in os.listdir(f"/proc/{driver.pid}/task"):
                    os.sched_setaffinity(int(task), alone)
            for reader in readers:
                reader.tell("recv", count=2001, low=64, high=512)
            writer.send(count=2000, low=64, high=512)
            writer.close()
            for reader in readers:
                self.assertEqual(reader.answer().done, 2000)

    @crew.needs_failpoints
    def test_wake_between_check_and_sleep(self):
        """Each side is held up for a while, in turn, between its look and its sleep, and between what it does and its wake."""
        for step in ("S2", "S3", "S4", "V2", "V3", "V4", "W4", "W5", "W6", "W7", "R4", "R5", "R6", "R7", "S5", "V5"):
            with self.subTest(step=step):
                for options in ({"bytes": 4096, "objects": 1}, {"bytes": 4096, "objects": 2, "spin": False}):
                    self.through(60, {"low": 8}, 2, options, failpoints={"TUNDISH_FAILPOINTS": f"channel.{step}=delay:2"})

    def flow(self, count, failpoints, sleeps_us, writer_sleep_us, **options):
        """A stream past three processes that are held up at different steps. Each has a share of sleeps of its own."""
        with Crew(self) as these:
            writer, readers = these.pair(len(sleeps_us), spin=False, **options)
            for driver, points in zip((writer, *readers), failpoints):
                driver.failpoints(set=points)
            for reader, sleep_us in zip(readers, sleeps_us):
                reader.tell("recv", count=count + 1, sleep_us=sleep_us)
            writer.send(count=count, sleep_us=writer_sleep_us)
            writer.close()
            for reader in readers:
                self.assertEqual(reader.answer().done, count)

    @crew.needs_failpoints
    def test_flag_taken_by_who_does_not_suffice(self):
        """The fast reader takes the writer's flag away while it goes to sleep; the slow one must wake it all the same."""
        self.flow(150, ("channel.V2=delay:2", "channel.R7=delay:3", None), (0, 6000), 0, bytes=4096, objects=1)

    @crew.needs_failpoints
    def test_bit_taken_by_the_object_before(self):
        """A reader that goes to sleep while the one before it is woken for an object that it has already."""
        slow = "channel.S2=delay:4"
        self.flow(150, ("channel.W5=delay:2", slow, slow), (0, 6000), 8000, bytes=4096, objects=64)


class Idle(crew.ChannelTest):
    """Time on a processor, of all threads, by the kernel's account."""

    def used(self, drivers, seconds):
        before = [driver.cpu_ns() for driver in drivers]
        began = time.monotonic_ns()
        time.sleep(seconds)
        span = time.monotonic_ns() - began
        return [(driver.cpu_ns() - ns) / span for driver, ns in zip(drivers, before)]

    def test_idle(self):
        with Crew(self) as these:
            writer, readers = these.pair(2, bytes=4096, objects=2)
            for reader in readers:
                reader.tell("recv", count=1)
            idle = these.start()
            idle.create(open=1)
            for share in self.used([writer, *readers, idle], 2):
                self.assertLess(share, 0.005, "of a processor, waiting for nothing")
            # Now the writer waits, for readers that do not come.
            writer.tell("send", count=12)
            for reader in readers:
                reader.answer()
            for share in self.used([writer, *readers], 1):
                self.assertLess(share, 0.005 * crew.SLOWER, "of a processor, while the ring is full")
            for reader in readers:
                reader.tell("recv", count=11)
            for driver in (writer, *readers):
                driver.answer()

    def test_now_and_then(self):
        """An object each 10 ms (by chance up to 20): the processor is used for the work, not for waiting."""
        with Crew(self) as these:
            writer, readers = these.pair(2)
            for reader in readers:
                reader.tell("recv", count=100_000, low=1000)
            writer.tell("send", count=200, sleep_us=20_000, low=1000)
            for share in self.used([writer, *readers], 1.5):
                self.assertLess(share, 0.03 * crew.SLOWER)
            writer.answer()
            for share in self.used(readers, 1):
                self.assertLess(share, 0.005 * crew.SLOWER)


if __name__ == "__main__":
    crew.main()
