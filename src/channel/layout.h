/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layout.h - the two segments of a channel, byte by byte; docs/format/channel.md has the tables
 *
 *   data, sealed: the writer writes, everybody reads      control: everybody writes
 *   +--------+-------------+-------------------+          +--------+-------+----------+--------+
 *   | header | descriptors | arena             |          | header | words | places   | leases |
 *   | 4 KiB  | 32 B each   | mapped twice      |          | 128 B  | 384 B | 256 B ea.| 256 B  |
 *   +--------+-------------+---------+---------+          +--------+-------+----------+--------+
 *                          '---- once in memory
 *
 * Object numbers and byte positions are free-running 64-bit counters, compared by difference. A
 * number's descriptor is at number & (slot_count - 1), a power of two, which holds across 2^64. A
 * byte position says nothing of a place in the arena: descriptors carry offsets.
 */
#ifndef TND_LAYOUT_H
#define TND_LAYOUT_H

#include <assert.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define TND__DATA_MAGIC UINT64_C(0x31544144444e54ff)    /* "\xffTNDDAT1" */
#define TND__CONTROL_MAGIC UINT64_C(0x314c5443444e54ff) /* "\xffTNDCTL1" */
#define TND__LAYOUT_VERSION 1u

#define TND__PLACES_MAX 64
#define TND__SLABS_MAX 64
#define TND__HEADER_BYTES 4096
#define TND__ALIGN 64 /* of objects */

/* closed */
#define TND__OPEN 0u
#define TND__CLOSED 1u

/* state of a place as the writer tells it */
#define TND__PLACE_FREE 0u     /* nobody yet */
#define TND__PLACE_RESERVED 1u /* held for a rank that has not come */
#define TND__PLACE_LIVE 2u
#define TND__PLACE_LEFT 3u
#define TND__PLACE_DEAD 4u
#define TND__PLACE_EVICTED 5u

/* One per place, in the sealed segment. */
struct tnd__seat {
	_Atomic uint32_t state; /* TND__PLACE_* */
	_Atomic uint32_t rank;
	_Atomic uint32_t generation; /* of occupants; a reader that is not of it is evicted */
	_Atomic uint32_t pid;        /* of the occupant, in the writer's pid namespace, or 0 */
	_Atomic uint64_t admitted;   /* number of its first object */
	uint64_t unused;
};
static_assert(sizeof(struct tnd__seat) == 32, "format");

/* One per slab index. */
struct tnd__slab_entry {
	_Atomic uint64_t bytes;  /* of the memfd; 0: no slab */
	_Atomic uint64_t serial; /* never used twice in a channel; 0: no slab */
};
static_assert(sizeof(struct tnd__slab_entry) == 16, "format");

#define TND__OBJECT_SLAB 1u /* in the low bits of tnd__descriptor.place: `place` is a slab index */

/* The atomic ones are also looked at for figures, beside the sending thread: relaxed. */
struct tnd__descriptor {
	_Atomic uint64_t
		number; /* of the object: a reader checks that it is the one that it wants */
	_Atomic uint64_t
		position; /* of its begin, in bytes; that of the next one - this = bytes held */
	uint64_t bytes;   /* exact length */
	uint64_t place; /* offset in the arena | 0; or slab serial << 12 | slab index << 6 | SLAB */
};
static_assert(sizeof(struct tnd__descriptor) == 32, "format");

struct tnd__data_header {
	uint64_t magic;
	uint32_t version;
	uint32_t place_count;
	unsigned char id[16]; /* the same in both segments */
	uint64_t max_bytes;
	uint64_t max_objects;
	uint64_t slot_count; /* power of two >= max_objects */
	uint64_t descriptor_offset;
	uint64_t arena_offset;
	uint64_t arena_bytes; /* whole pages, >= max_bytes */
	uint64_t segment_bytes;
	uint64_t max_object_bytes; /* by slab; 0: none */
	uint64_t first_number;     /* of the first object */
	uint32_t writer_pid;       /* in its own pid namespace */
	uint32_t on_dead;
	int64_t created_ns; /* CLOCK_REALTIME */
	char name[64];      /* NUL-terminated */
	unsigned char unused[256 - 184];
	/* 256: what readers poll */
	_Atomic uint64_t published; /* number after the last published object */
	_Atomic uint32_t closed;
	_Atomic uint32_t ready; /* every reserved place has had its reader */
	unsigned char unused2[128 - 16];
	/* 384: what readers sleep on */
	_Atomic uint32_t data_word;
	unsigned char unused3[128 - 4];
	/* 512 */
	struct tnd__seat seats[TND__PLACES_MAX];
	/* 2560 */
	struct tnd__slab_entry slabs[TND__SLABS_MAX];
	/* 3584 */
	unsigned char unused4[512];
};
static_assert(sizeof(struct tnd__data_header) == TND__HEADER_BYTES, "format");
static_assert(offsetof(struct tnd__data_header, published) == 256, "format");
static_assert(offsetof(struct tnd__data_header, data_word) == 384, "format");
static_assert(offsetof(struct tnd__data_header, seats) == 512, "format");
static_assert(offsetof(struct tnd__data_header, slabs) == 2560, "format");

/* One per place, in the control segment: two lines of 128 bytes. */
struct tnd__cursor {
	_Atomic uint64_t
		cursor;        /* number of the oldest object not released; its reader writes it */
	_Atomic uint32_t left; /* generation of the occupant that left */
	unsigned char unused[128 - 12];
	/* statistics of the reader */
	_Atomic uint64_t waits, wakes, blocked_ns;
	_Atomic int64_t blocked_since_ns; /* CLOCK_MONOTONIC; 0: not waiting */
	unsigned char unused2[128 - 32];
};
static_assert(sizeof(struct tnd__cursor) == 256, "format");

struct tnd__control {
	uint64_t magic;
	uint32_t version;
	uint32_t place_count;
	unsigned char id[16];
	uint64_t segment_bytes;
	unsigned char unused[128 - 40];
	/* 128: what the writer sleeps on */
	_Atomic uint32_t space_word;
	_Atomic uint32_t writer_waiting;
	unsigned char unused2[128 - 8];
	/* 256: bit i: the reader in place i sleeps, or is about to */
	_Atomic uint64_t sleepers;
	unsigned char unused3[128 - 8];
	/* 384: statistics of the writer */
	_Atomic uint64_t head_position; /* byte position after the last published object */
	_Atomic uint64_t high_bytes, high_objects, sent_bytes;
	_Atomic uint64_t waits, wakes, blocked_ns;
	_Atomic int64_t blocked_since_ns;
	unsigned char unused4[128 - 64];
	/* 512 */
	struct tnd__cursor places[TND__PLACES_MAX];
	/* 16896: objects of slab s that the reader in place p borrows */
	_Atomic uint32_t leases[TND__PLACES_MAX][TND__SLABS_MAX];
};
static_assert(offsetof(struct tnd__control, space_word) == 128, "format");
static_assert(offsetof(struct tnd__control, sleepers) == 256, "format");
static_assert(offsetof(struct tnd__control, head_position) == 384, "format");
static_assert(offsetof(struct tnd__control, places) == 512, "format");
static_assert(offsetof(struct tnd__control, leases) == 16896, "format");
static_assert(sizeof(struct tnd__control) == 33280, "format");

/* Bytes of the control segment on which the writer and the reader in a place hold life locks. */
#define TND__LIFE_WRITER (UINT64_C(1) << 40)
#define TND__LIFE_PLACE(place) ((UINT64_C(1) << 40) + 1 + (place))

#endif
