/* SPDX-License-Identifier: Apache-2.0 */
/*
 * channel_internal.h - between the files of channel/
 *
 *   channel.c      options, create, attach, close, info
 *   segment.c      the two memfds: taken within the limits, sealed, mapped, checked
 *   places.c       who reads: admission, leaving, eviction, death (service thread and writer)
 *   guest.c        the reader's side of attaching, and what its service thread is told
 *   send.c         the writer's data path; reserve.c: reservations
 *   receive.c      the readers' data path
 *   wait.c         spin, sleep, wake, warn: both sides
 *   bigobject.c    objects by slab
 *   stat.c         all of it seen from outside
 *
 * Locks: `lock` of a handle guards its places, slabs and reservations; nothing waits under it.
 * The data path takes none while no reservation or borrow is open.
 */
#ifndef TND_CHANNEL_INTERNAL_H
#define TND_CHANNEL_INTERNAL_H

#include <tundish/channel.h>

#include "base/base.h"
#include "base/futex.h"
#include "group/service.h"
#include "layout.h"
#include "memory/memory.h"

/* -- segments (segment.c) -- */

/* One process's mappings of a channel. Pointers into shared memory; figures are private copies. */
struct tnd__segments {
	struct tnd__data_header *header;     /* writer: writable; reader: read-only */
	struct tnd__descriptor *descriptors; /* slot_count of them */
	unsigned char *arena;                /* arena_bytes, and once more behind it */
	struct tnd__control *control;
	int data_fd, control_fd; /* owned; the reader's data_fd is read-only */
	uint64_t data_map_bytes; /* header, descriptors, arena twice */
	uint64_t memory_bytes;   /* what both memfds take */
	/* Checked copies of the header. */
	uint64_t max_bytes, max_objects, slot_count, arena_bytes, max_object_bytes, first_number;
	uint32_t place_count, on_dead, writer_pid;
	char name[TND_CHANNEL_NAME_MAX];
};

struct tnd__segment_opts {
	uint64_t max_bytes; /* a multiple of 64 */
	uint64_t max_objects;
	uint64_t max_object_bytes;
	uint64_t first_number;
	uint32_t place_count, on_dead;
	const char *name; /* NUL-terminated, at most 63 bytes are taken */
};

/* Bytes that both segments will take, for the budget. */
uint64_t tnd__segments_bytes(const struct tnd__segment_opts *opts);

/*
 * Makes both, takes their memory, fills the headers (published and every cursor = first_number),
 * maps, seals (F_SEAL_FUTURE_WRITE, SHRINK, GROW, SEAL), and keeps the writer's data out of forked
 * children.
 * Return: 0; TND_E_HEADROOM (which limit, both numbers); -ENOSPC; -ENOMEM; -EMFILE; -errno.
 */
int tnd__segments_create(const struct tnd__segment_opts *opts, struct tnd__segments *ret_segments,
			 struct tnd_error *reterr);

/*
 * Maps what another process made: data read-only. Takes the descriptors over (closed on failure).
 * Checks seals, sizes, magic, version, ids and every figure of the headers; nothing in them is
 * trusted.
 * Return: 0; TND_E_CORRUPT; TND_E_VERSION; -ENOMEM; -errno.
 */
int tnd__segments_attach(int data_fd, int control_fd, struct tnd__segments *ret_segments,
			 struct tnd_error *reterr);

/* `forked`: in a forked child, where the writer's data is not mapped: only descriptors are closed,
 * and the mappings that are there. */
void tnd__segments_close(struct tnd__segments *segments, bool is_writer, bool forked);

/* -- handles -- */

/* One place, in the writer's process. lock, but for the last two. */
struct tnd__place {
	uint32_t rank;
	uint32_t generation; /* of its occupants */
	uint32_t state;      /* TND__PLACE_*, as in the sealed seat */
	bool owned;          /* reserved for `rank` at creation */
	uint64_t admitted;   /* number of the first object that is held for it */
	struct tnd__peer *peer;
	struct tnd__watch *watch;
	/* The writing thread's own. */
	uint64_t seen; /* last cursor accepted */
};

/* A reservation, by its ticket & (slot_count - 1). lock. */
struct tnd__pending {
	uint64_t ticket;
	uint64_t offset;   /* in the arena */
	uint64_t position; /* byte position */
	uint64_t bytes;    /* asked for, then committed */
	uint64_t held;     /* rounded up, as long as it is open */
	uint32_t state;    /* TND__PENDING_* */
	uint32_t slab;     /* index + 1, or 0 */
};
enum { TND__PENDING_NONE, TND__PENDING_OPEN, TND__PENDING_COMMITTED, TND__PENDING_ABORTED };

struct tnd__writer {
	struct tnd__listener *listener;
	struct tnd__place places[TND__PLACES_MAX];
	uint64_t reserved, live,
		dead;                /* lock; bits of places: held for a rank that has not come; has
					  a cursor; died, and every send has to say so */
	_Atomic uint32_t generation; /* of these sets */
	_Atomic uint32_t reservations; /* open or not yet published */
	/* The writing thread's own; `now_`: copies of the sets as of seen_generation. */
	uint32_t seen_generation;
	uint64_t now_reserved, now_live, now_dead;
	uint64_t published;     /* number: as in shared memory */
	uint64_t head_position; /* byte position after the last object or reservation */
	uint64_t head_offset;   /* in the arena */
	uint64_t freed;         /* number: everything below is free (cached) */
	uint64_t freed_position;
	struct tnd__pending *pending;        /* slot_count; made at the first reservation */
	uint64_t pending_first, pending_end; /* tickets not yet published */
};

struct tnd__reader {
	struct tnd__peer *peer;
	uint32_t place, generation, rank;
	_Atomic uint32_t writer_dead, writer_closed_early;
	_Atomic uint32_t borrows;        /* open */
	uint64_t next;                   /* receiving thread: number of the next object */
	uint64_t cursor;                 /* as in shared memory */
	uint64_t known;                  /* last value of published */
	_Atomic unsigned char *released; /* slot_count; made at the first borrow */
};

struct tnd_channel {
	struct tnd__segments shared;
	bool is_writer;
	uint64_t forkmark;
	_Atomic uint32_t busy; /* a thread is in send or receive */
	_Atomic uint32_t cancelled;
	_Atomic uint32_t local_word; /* changes with cancel and a peer's death */
	pthread_mutex_t lock;
	struct tnd__spin spin;
	int64_t warn_ns;
	_Atomic uint64_t waits, blocked_ns;
	struct tnd_budget *budget;
	uint64_t charged_bytes;
	struct tnd__slabs *slabs; /* bigobject.c; nullable */
	union {
		struct tnd__writer writer;
		struct tnd__reader reader;
	} u;
	char address[TND__ADDRESS_BYTES];
};

#endif
