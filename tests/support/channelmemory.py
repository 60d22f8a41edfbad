# SPDX-License-Identifier: Apache-2.0
"""Where everything is in the two memfds of a channel (docs/format/channel.md), for tests that read them and tests that make them."""
import struct

DATA_MAGIC, CONTROL_MAGIC, VERSION = b"\xffTNDDAT1", b"\xffTNDCTL1", 1
RESERVED, LIVE, LEFT, DEAD, EVICTED = 1, 2, 3, 4, 5
PLACES = 64

# The data segment begins with its header, behind which come seats, and descriptors.
HEADER = struct.Struct("<8sII16sQQQQQQQQQIIq64s72xQII112xI")
HEADER_NAMES = ("magic version place_count id max_bytes max_objects slot_count descriptor_offset arena_offset arena_bytes segment_bytes"
                " max_object_bytes first_number writer_pid on_dead created_ns name published closed ready data_word").split()
HEADER_BYTES = 4096
SEAT = struct.Struct("<IIIIQ8x")  # state, rank, generation, pid, admitted
DESCRIPTOR = struct.Struct("<4Q")  # number, position, bytes, place

CONTROL_BYTES = 33280
CONTROL = struct.Struct("<8sII16sQ")  # magic, version, place_count, id, segment_bytes
# space_word, writer_waiting; sleepers; head_position, high_bytes, high_objects, sent_bytes, waits, wakes, blocked_ns, blocked_since_ns
WORDS = struct.Struct("<II120xQ120xQQQQQQQq")
WORDS_AT = 128
CURSOR = struct.Struct("<QI116xQQQq")  # cursor, left; waits, wakes, blocked_ns, blocked_since_ns


def header(data):
    """{field: value} of a data segment."""
    return dict(zip(HEADER_NAMES, HEADER.unpack_from(data)))


def seat_at(place):
    """Offset of a seat in the data segment."""
    return 512 + SEAT.size * place


def cursor_at(place):
    """Offset of a reader's words in the control segment."""
    return 512 + 256 * place
