# SPDX-License-Identifier: Apache-2.0
"""What bench/channel.py asks: each case has its question, the bound on paper, and what the design promises."""

import dataclasses
import os

CORES = len(os.sched_getaffinity(0))
PEERS = ("pipe", "seqpacket", "stream", "zmq", "flags")


@dataclasses.dataclass(frozen=True)
class Target:
    """`link`'s figure against a number, or against that of another link in the same round."""
    link: str
    figure: str
    at_most: bool
    number: float
    of: str = ""  # the link that `number` is a factor of
    plus: float = 0.0

    def met_by(self, value, other):
        """For medians, and for both ends of an interval."""
        limit = self.number * (other if self.of else 1.0) + self.plus
        return value <= limit if self.at_most else value >= limit

    def __str__(self):
        plus = f" + {self.plus:g}" if self.plus else ""
        limit = f"{self.number:g} x {self.of}" if self.of else f"{self.number:g}"
        return f"{self.figure} {'<=' if self.at_most else '>='} {limit}{plus}"


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of runs. Figures are names in the driver's JSON, those of `ns` by themselves."""
    name: str
    scene: str
    links: tuple
    figures: tuple
    args: dict
    targets: tuple = ()
    counts: dict = dataclasses.field(default_factory=dict)  # by link, where it differs
    long: bool = False  # fewer rounds: seconds each


QUESTIONS = {
    "latency": """One way from send to receive, one object at a time into an empty queue. Bound: where the reader sleeps, a
wake (see wake); where it spins, the line that says so and the lines of the object, each from one core's cache to the
other's (the link `line`), and two copies. With more processes than cores a sleeping reader must also be given one. Readers
of `flags` and of `-spin` always spin.""",
    "pingpong": """The same by two links, half of there and back, so without comparing clocks. Bound: `line`, one slot and
one counter.""",
    "small": """Objects a second as fast as the writer can, 64 bytes. Bound: 10 M/s are 100 ns for each, one line of
descriptor and one of bytes from core to core, some 100 ns each if they came one by one: so they must come several at a
time.""",
    "bytes": """Bytes a second of larger objects. Bound: memcpy, once on each side at the same time.""",
    "stress": """10,000 objects of 8 to 79,992 bytes, 401 MB, each read once from where it lies, through 1 MiB, copied in
and out. Yardstick: one thread that copies the same 401 MB to as much memory (`memcpy`). Bound: the same into 1 MiB used in
turn (`memcpy-area`), which is the writer's part alone; a reader's part is the same beside it, out of another core's cache,
as long as there are cores.""",
    "wake": """A reader that sleeps; one object of 64 bytes each half millisecond. Bound: a bare futex (`futex`), by the
same program with the same processors.""",
    "idle": """CPU of processes that wait 2 s for nothing, a share of one core. Bound: 0.""",
    "tick": """CPU where one object comes each 10 ms. Bound: two system calls and two switches on each side, some 20 us in
10 ms.""",
    "slow": """One of three readers takes 1 ms for each object. Nothing may be lost, so all go at its pace: about 900
objects/s, less what the ring takes ahead. Asked is what the others and the writer use meanwhile, and whether memory
grows.""",
}


def peers(quick, size):
    """Those that can take objects of `size`."""
    if quick:
        return ["flags"]
    return [name for name in PEERS if name != "seqpacket" or size <= 131072]


def latency(quick):
    """Grows with what a reader may need to be given a core."""
    for readers in (1, 8) if quick else (1, 2, 4, 8):
        for size in (64, 65536) if quick else (64, 1024, 16384, 131072, 1048576):
            links = peers(quick, size) + ["tundish"]
            if readers == 1:
                links += ["tundish-spin"] + (["line"] if size <= 16384 else [])
            period = 100_000 + 50_000 * readers + 2 * size * readers
            args = {"readers": readers, "bytes": size, "period_ns": period, "busy": int(readers < CORES),
                    "count": 300 if quick else 2000, "max_bytes": max(4 << 20, 4 * size)}
            targets = (Target("tundish-spin", "p50", True, 300), Target("tundish-spin", "p99", True, 1000))
            yield Case(f"latency {size} B, {readers} readers", "paced", tuple(links), ("p50", "p99", "max"), args,
                       targets if size == 64 and readers == 1 else ())


def pingpong(quick):
    """64 bytes."""
    spinning = ("flags", "line", "tundish", "tundish-spin", "tundish-spinplace")
    many = 30_000 if quick else 300_000
    yield Case("pingpong 64 B", "pingpong", (*peers(quick, 64), *spinning), ("p50", "p99", "max"), {"count": 1000 if quick else 5000},
               (Target("tundish-spin", "p50", True, 300), Target("tundish-spin", "p99", True, 1000)),
               {name: many for name in spinning})


def stream(quick):
    """Counts by what a link can do, so that each takes some tenths of a second."""
    many = {"tundish": 4_000_000, "tundish-spin": 4_000_000, "tundish-place": 2_000_000, "zmq": 400_000,
            "flags": 400_000}
    if quick:
        many = {name: count // 8 for name, count in many.items()}
    for readers in (1,) if quick else (1, 2, 4):
        yield Case(f"small: 64 B, {readers} readers", "stream", (*peers(quick, 64), "tundish", "tundish-spin", "tundish-place"),
                   ("objects_s",),
                   {"readers": readers, "count": 50_000 if quick else 100_000},
                   (Target("tundish", "objects_s", False, 10e6),) if readers == 1 else (), many)
    for size in (65536,) if quick else (4096, 65536, 1048576):
        for readers in (1,) if quick else (1, 4):
            links = (*peers(quick, size), "tundish", "tundish-place")
            count = max(200, (200 << 20) // size)
            yield Case(f"bytes: {size} B, {readers} readers", "stream", links, ("bytes_s",),
                       {"readers": readers, "bytes": size, "count": min(count, 50_000),
                        "max_bytes": max(4 << 20, 4 * size)})


def stress(quick):
    """10,000 arrays of 8 to 79,992 bytes: short and long ones mixed, each read once."""
    for readers in (1, 3) if quick else (1, 2, 3):
        target = (Target("tundish", "bytes_s", False, 0.8, "memcpy"),) if readers < CORES else ()
        yield Case(f"stress: 401 MB, {readers} readers", "stream", (*peers(quick, 65536), "tundish", "tundish-place", "memcpy", "memcpy-area"),
                   ("bytes_s",),
                   {"readers": readers, "bytes": 0, "count": 10_000, "max_bytes": 1 << 20}, target)


def sleeping(quick):
    """Wakes and idling."""
    for pin in (0, 1):
        yield Case(f"wake: {'pinned' if pin else 'not pinned'}", "paced", ("futex", *(() if quick else ("pipe",)), "tundish-sleep", "tundish"), ("p50", "p99"),
                   {"count": 400 if quick else 1000, "period_ns": 500_000, "pin": pin},
                   (Target("tundish-sleep", "p50", True, 1.25, "futex", 1000.0),))
    links = ("flags", "tundish") if quick else ("pipe", "zmq", "flags", "tundish")
    yield Case("idle: 2 s, 2 readers", "paced", links, ("writer_cpu", "most_reader_cpu"),
               {"readers": 2, "count": 2, "period_ns": 1_000_000_000},
               (Target("tundish", "writer_cpu", True, 0.005), Target("tundish", "most_reader_cpu", True, 0.005)), long=True)
    yield Case("tick: 10 ms, 2 readers", "paced", links, ("writer_cpu", "most_reader_cpu", "p50"),
               {"readers": 2, "count": 100 if quick else 300, "period_ns": 10_000_000},
               (Target("tundish", "writer_cpu", True, 0.03), Target("tundish", "most_reader_cpu", True, 0.03)), long=True)
    yield Case("slow: 1 of 3 readers", "stream", links, ("objects_s", "writer_cpu", "other_reader_cpu", "grown_bytes"),
               {"readers": 3, "bytes": 4096, "count": 500 if quick else 2000, "slow_ns": 1_000_000, "max_objects": 64}, long=True)


def cases(quick):
    """All of them."""
    for part in (pingpong, stream, stress, sleeping, latency):
        yield from part(quick)
