/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stream.h - what a node's reader sends: the objects of its channel
 *
 *   HELLO   TABLE TABLE SLAB   TABLE SLAB   ...   END
 *              |     |    '-- an object by slab: the bytes
 *              '-----'------- which bytes of which tensor lie where in it; the last has more = 0
 *
 * All fields little-endian as the processor writes them; both sides are on one machine. A reader
 * takes nothing for granted: what it is sent is checked before it is used.
 */
#ifndef TND_STREAM_H
#define TND_STREAM_H

#include <stddef.h>
#include <stdint.h>

#define TND__STREAM_MAGIC UINT32_C(0x534c4454) /* "TDLS" */
#define TND__STREAM_VERSION 1u

enum { TND__STREAM_HELLO = 1, TND__STREAM_TABLE, TND__STREAM_END };

/* Begins every object but the slabs. */
struct tnd__stream_head {
	uint32_t magic, version;
	uint32_t kind;  /* TND__STREAM_* */
	uint32_t count; /* of what follows the struct */
	uint64_t files; /* fingerprint of the checkpoint's files */
};

struct tnd__stream_hello {
	struct tnd__stream_head head;
	uint64_t kin;         /* of the plan's inputs */
	uint64_t node_bytes;  /* the budget */
	uint64_t total_bytes; /* that will be read */
	uint64_t slab_count;
	uint64_t slab_memory;  /* bytes that there are for slabs */
	uint64_t slab_reserve; /* of these the largest slab and the next one take */
	uint32_t member_count;
	int32_t pid; /* of the reader, in its pid namespace */
};

struct tnd__stream_table {
	struct tnd__stream_head head; /* count: entries */
	uint64_t slab;                /* index in the reader's plan */
	uint64_t slab_bytes;
	uint32_t file;  /* index in the checkpoint */
	uint32_t first; /* 1: begins the slab's list */
	uint32_t more;  /* another TABLE of this slab follows */
	uint32_t reserved;
};

struct tnd__stream_entry {
	uint64_t begin; /* in the file */
	uint64_t bytes;
	uint64_t place;  /* in the slab */
	uint32_t tensor; /* index in the checkpoint */
	uint32_t reserved;
};

/* Follows END: how long the reading stood still because a rank kept what was needed. */
struct tnd__stream_held {
	uint32_t rank;
	uint32_t reserved;
	uint64_t ns;
};

/* docs/format/share.md */
_Static_assert(sizeof(struct tnd__stream_head) == 24, "format");
_Static_assert(offsetof(struct tnd__stream_head, files) == 16, "format");
_Static_assert(sizeof(struct tnd__stream_hello) == 80, "format");
_Static_assert(offsetof(struct tnd__stream_hello, kin) == 24, "format");
_Static_assert(offsetof(struct tnd__stream_hello, slab_reserve) == 64, "format");
_Static_assert(offsetof(struct tnd__stream_hello, member_count) == 72, "format");
_Static_assert(sizeof(struct tnd__stream_table) == 56, "format");
_Static_assert(offsetof(struct tnd__stream_table, slab) == 24, "format");
_Static_assert(offsetof(struct tnd__stream_table, file) == 40, "format");
_Static_assert(offsetof(struct tnd__stream_table, more) == 48, "format");
_Static_assert(sizeof(struct tnd__stream_entry) == 32, "format");
_Static_assert(offsetof(struct tnd__stream_entry, place) == 16, "format");
_Static_assert(offsetof(struct tnd__stream_entry, tensor) == 24, "format");
_Static_assert(sizeof(struct tnd__stream_held) == 16, "format");
_Static_assert(offsetof(struct tnd__stream_held, ns) == 8, "format");

#define TND__STREAM_OBJECT_MAX 65536u
#define TND__STREAM_ENTRIES                                            \
	((TND__STREAM_OBJECT_MAX - sizeof(struct tnd__stream_table)) / \
	 sizeof(struct tnd__stream_entry))
#define TND__STREAM_RING_BYTES 262144u
#define TND__STREAM_OBJECTS 256u

#endif
