/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bigobject.h - objects by slab: between bigobject.c and slabmake.c, the writer, and slabview.c, the
 * readers
 */
#ifndef TND_BIGOBJECT_H
#define TND_BIGOBJECT_H

#include "bulk.h"
#include "channel_internal.h"

/* What a packet of the kind TND__PACKET_SLAB carries. */
struct tnd__slab_note {
	uint64_t serial;
	uint64_t bytes; /* of the memfd */
	uint32_t index;
	uint32_t what; /* TND__NOTE_* */
};
enum {
	TND__NOTE_ASK,   /* reader: its descriptor, please */
	TND__NOTE_HERE,  /* writer: with the descriptor */
	TND__NOTE_GONE,  /* writer, as an answer: there is none */
	TND__NOTE_RETIRE /* writer: unmap it */
};

/* `place` of a descriptor. */
static inline uint64_t tnd__slab_place(uint64_t serial, uint32_t index)
{
	return serial << 12 | (uint64_t)index << 6 | TND__OBJECT_SLAB;
}

enum { TND__SLAB_FREE, TND__SLAB_TAKEN, TND__SLAB_SENT };

/* One slab in the writer's process. */
struct tnd__host_slab {
	struct tnd_slab *slab; /* lock, to change; NULL: the index is vacant */
	uint64_t serial, bytes;
	uint64_t taken; /* bytes that have their pages */
	/* Of the object that it carried last; relaxed: `state` says that it is there. */
	_Atomic uint64_t number;
	/* TND__SLAB_*, whose it is: a taker may hand it on in another thread. */
	_Atomic uint32_t state;
	/* lock; generation of each place's occupant that has been given the descriptor */
	uint32_t told[TND__PLACES_MAX];
};

/* One slab in a reader's process. lock. */
struct tnd__view {
	struct tnd__view *next;
	uint64_t serial, bytes;
	uint64_t seen_taken; /* bytes that were seen to have their pages */
	unsigned char *data; /* NULL: not mapped yet, or what was there is somebody else's now */
	uint32_t index;
	uint32_t holds; /* borrows that are open */
	int fd;
	bool retired;
	bool leaving; /* its last borrow keeps it: nobody else gets it meanwhile */
	bool stale;   /* not as the slab is: to be mapped anew */
};

/* One object by slab that is borrowed. lock. */
struct tnd__hold {
	uint64_t ticket, bytes;
	struct tnd__view *view;
	bool ending; /* a thread is at it */
};

struct tnd__slabs {
	/* writer */
	struct tnd_slab_pool *pool;
	uint64_t serials; /* given so far */
	bool overrun;     /* the slab that is made now may go over the budget */
	/* Bits of indices: a reader that was given up may look at them: retired when free. */
	_Atomic uint64_t spoilt;
	/* reader, under lock */
	struct tnd__view *views;
	struct tnd__hold *holds;
	size_t hold_count, hold_capacity;
	bool private_views;
	int pagemap_fd;         /* with private views; -1: none */
	uint64_t failed_serial; /* could not be had */
	int failed_code;
	/* writer: TND__SLABS_MAX of them */
	struct tnd__host_slab host[];
};

static inline struct tnd__host_slab *tnd__host_slab(struct tnd_channel *channel, uint32_t index)
{
	return &channel->slabs->host[index];
}

/* -- the writer's memory (slabmake.c) -- */

/*
 * A new slab at `index`: of the pool's standard size, or exactly what a larger object needs; from a
 * pool that has none larger than needed if that can be had. Return: 0; -EAGAIN (the budget has
 * nothing now); TND_E_BUDGET; TND_E_HEADROOM; -errno.
 */
int tnd__slab_make(struct tnd_channel *channel, uint32_t index, uint64_t bytes,
		   struct tnd_error *reterr);
/* Pages for `bytes`, where there are less. Return: 0; TND_E_HEADROOM; -errno. */
int tnd__slab_top_up(struct tnd_channel *channel, uint32_t index, uint64_t bytes,
		     struct tnd_error *reterr);
/* A free one: readers unmap it, the index is vacant. Not under lock. */
void tnd__slab_retire(struct tnd_channel *channel, uint32_t index);

/* -- telling readers (bigobject.c) -- */

/*
 * To every reader that has not been told (TND__NOTE_HERE), or that has (TND__NOTE_RETIRE). Who
 * cannot be reached asks, or is gone. Under lock.
 */
void tnd__slab_tell(struct tnd_channel *channel, uint32_t index, uint32_t what);

/* -- which are free (bigobject.c), by the writing thread -- */

/*
 * Sets and cursors as of now; retires what is free and spoilt. *ret_retired: nullable; whether
 * anything was. Return: 0; TND_E_PEER_DEAD.
 */
int tnd__slabs_look(struct tnd_channel *channel, bool *ret_retired, struct tnd_error *reterr);
/* Whether no reader is at or before its object, and none holds it. */
bool tnd__slab_is_free(const struct tnd_channel *channel, uint32_t index);

/* Packet for `note`, with `fd` unless it is -1. */
void tnd__slab_packet(const struct tnd__slab_note *note, int fd, struct tnd__packet *packet);

/* -- the readers (slabview.c) -- */

/* The reader's part of tnd__slabs_close(). */
void tnd__views_close(struct tnd__slabs *slabs);

/* -- their memory (viewpages.c) -- */

/* With private views: what finds out which pages were written. Without it all are dropped. */
void tnd__views_open_pagemap(struct tnd__slabs *slabs);
/* Where it is not mapped. Return: 0; TND_E_CORRUPT; -ENOMEM. */
int tnd__view_map(const struct tnd__slabs *slabs, struct tnd__view *view);
void tnd__view_unmap(struct tnd__view *view);
/* Whether the first `bytes` have their pages: a hole would be filled on our account. */
bool tnd__view_has_pages(struct tnd__view *view, uint64_t bytes);
/*
 * A private view: what was written to its first `bytes` is gone, the slab's contents are there
 * again. Return: whether that worked; else it has to be mapped anew.
 */
bool tnd__view_clean(const struct tnd__slabs *slabs, const struct tnd__view *view, uint64_t bytes);
/* `pages`: ascending, without overlap. The rest as tnd__bulk_keep(). Return: 0; -ENOMEM. */
int tnd__view_keep(const struct tnd__slabs *slabs, struct tnd__view *view,
		   const struct tnd__bulk_range *pages, size_t count);

#endif
