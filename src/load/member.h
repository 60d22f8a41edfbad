/* SPDX-License-Identifier: Apache-2.0 */
/*
 * member.h - a member of a shared load: member.c, from attaching to leaving; arrive.c, what comes on
 * the channel; take.c, items out of it
 *
 *   next():  item in a slab that is here? -- no --> next object: TABLE.. SLAB --> an arrival
 *                 | yes                              (nothing of ours in it: released at once)
 *                 v
 *            a view in the slab, or gathered: into staging, or memory of the consumer's own
 *
 *   arrival: wanted bytes all handed out, and its last view released --> its object is released
 *
 * An arrival's slab is adopted by the load's pool, so leases, names, counts and the escape report
 * are those of any slab. Its buffer (flow.c) counts the views; it outlives none of them.
 *
 * Locks: `lock` guards the list of arrivals, and what is done on the channel beside the consumer's
 * thread. flow.lock may be taken under it. Views may be released at any time, also after close:
 * the member lives until its last arrival is gone.
 */
#ifndef TND_MEMBER_H
#define TND_MEMBER_H

#include "load_internal.h"
#include "stream.h"

struct tnd__arrival {
	struct tnd__arrival *next; /* lock */
	struct tnd__member *member;
	struct tnd_object object;
	struct tnd__buffer *buffer; /* as long as the arrival lives */
	uint32_t file;
	bool ours; /* lock: the load itself still has a hold on the slab */
	uint64_t count;
	struct tnd__stream_entry *entries; /* in the order of the file */
	void *kept_base;                   /* lock: private copy that took the slab's place */
	uint64_t kept_bytes;
};

struct tnd__member {
	pthread_mutex_t lock;
	_Atomic uint32_t refs;       /* the load's and each arrival's */
	struct tnd_channel *channel; /* lock; NULL once left */
	bool failed;                 /* the load has: it does not leave, it abandons */
	struct tnd__arrival *arrivals;
	/* The consumer's own: */
	struct tnd__stream_hello hello;
	struct tnd__stream_table table; /* the list that is coming in */
	struct tnd__stream_entry *entries;
	size_t count, capacity;
	bool table_open, table_whole, over;
	size_t item;            /* the next one, */
	uint64_t position;      /* and how many of its kept bytes were handed out */
	uint64_t staging_piece; /* most bytes gathered at once */
	size_t ahead;           /* own delivery: memory is made for all items before it */
	uint64_t ahead_bytes;   /* of these, of those that are not delivered */
	struct tnd_slab *stage; /* what of the item has come so far, if it is gathered */
	uint64_t each_bytes;    /* of slabs, that a member may keep without holding all others up */
	int64_t idle_since;     /* since when nothing has come */
	struct tnd__stream_held held[64]; /* from END */
	size_t held_count;
};

/*
 * Attaches, and takes HELLO; not for guests. Return: 0; as tnd_channel_attach; TND_E_CHANGED (other
 * files); TND_E_INVALID (another plan).
 */
int tnd__member_open(struct tnd_load *load, struct tnd_error *reterr);
/*
 * The next piece of item `index`, waited for. Return: 0; the load's error, which is set then.
 */
int tnd__member_piece(struct tnd_load *load, size_t index, struct tnd__piece *ret_piece,
		      struct tnd_error *reterr);
/* Drops what was not delivered; what views still show becomes this process's own; leaves. */
void tnd__member_leave(struct tnd_load *load);
/* NULL is allowed. */
void tnd__member_unref(struct tnd__member *member);

/* -- member.c, for take.c and guestload.c -- */

/* Attaches as `rank`. Return: 0; as tnd_channel_attach(). */
int tnd__member_attach(struct tnd_load *load, uint32_t rank, int64_t deadline_ns,
		       struct tnd_error *reterr);
/* The stream is not that of a working reader: the load fails, or a guest leaves it. Return: < 0. */
int tnd__member_corrupt(struct tnd_load *load, const char *what);
/* The next slab, if any of it is ours, becomes an arrival. Return: 0; the load's error. */
int tnd__member_pull(struct tnd_load *load, struct tnd_error *reterr);

/* -- arrive.c -- */

/*
 * Copies the struct that the object begins with, and checks its head: whether `count` records of
 * `record_bytes` follow it, and nothing else.
 */
bool tnd__stream_read(const struct tnd_object *object, void *ret_struct, size_t struct_bytes,
		      size_t record_bytes);
/*
 * An object that came, which is released here or by its arrival. Return: 0; the load's error, but
 * for a guest what is wrong with the stream, in guest->why.
 */
int tnd__member_take(struct tnd_load *load, const struct tnd_object *object);

/* -- take.c -- */

/* Every piece of the arrival was handed out. */
void tnd__member_delivered(struct tnd__arrival *arrival);
/* End of the kept bytes of the item that the arrival has, from `kept` on without a gap. */
uint64_t tnd__member_end_in(const struct tnd__arrival *arrival, const struct tnd_plan_item *item,
			    uint64_t kept);
/* How the piece, which the arrival has, is handed out: sets `data`, and may make it shorter. */
void tnd__member_fill(const struct tnd_load *load, const struct tnd_plan_item *item,
		      struct tnd__arrival *arrival, struct tnd__piece *piece);
/* Counts it where it is an overrun. */
bool tnd__member_must_copy(struct tnd_load *load, const struct tnd__piece *piece);
/* The piece, out of its arrival. */
void tnd__member_gather(struct tnd_load *load, const struct tnd_plan_item *item,
			const struct tnd__piece *piece, void *to, bool past);
/* Whether the item, if it is gathered, is put together before it is handed out. */
bool tnd__member_whole(const struct tnd_load *load, const struct tnd_plan_item *item);
/*
 * The piece, gathered into a buffer of the pool that the view holds. Return: 1; 0: more of the item
 * has to come before there is a view; -EAGAIN: no buffer, and the piece is to be a copy; < 0.
 */
int tnd__member_stage(struct tnd_load *load, const struct tnd_plan_item *item,
		      const struct tnd__piece *piece, struct tnd_view *view);

#endif
