/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bulk.h - what a flow of slabs needs of a channel beyond the public header
 *
 *   writer   tnd__bulk_reserve ... commit      memory for one slab, whatever its size
 *            tnd__bulk_figures                 how many there are, whom it waits for
 *            tnd__bulk_tell                    ends every reader's waits, at once
 *   reader   tnd__bulk_told
 *            tnd__bulk_is_slab
 *            tnd__bulk_keep                    a borrowed slab's contents stay, without the channel
 */
#ifndef TND_BULK_H
#define TND_BULK_H

#include <tundish/channel.h>

#include "base/base.h"

/*
 * tnd_channel_reserve() by slab also where `bytes` would fit the ring.
 *   REUSE     only memory that is there already: -ETIMEDOUT where none came free until the deadline,
 *             or there is none at all
 *   OVERRUN   memory that the budget has no room for is had all the same, and counted there
 * A pool with slab_bytes gives slabs of exactly its size to what fits them (and of exactly `bytes`
 * to what does not), instead of half as large again.
 * Blocking: may sleep. Return: as tnd_channel_reserve.
 */
enum tnd__bulk_how { TND__BULK_ANY, TND__BULK_REUSE, TND__BULK_OVERRUN };
int tnd__bulk_reserve(struct tnd_channel *channel, uint64_t bytes, enum tnd__bulk_how how,
		      int64_t deadline_ns, struct tnd_reservation *ret_reservation,
		      struct tnd_error *reterr);

struct tnd__bulk_figures {
	uint32_t slabs; /* made, and not retired */
	uint32_t free;  /* of these nobody needs */
	uint32_t late_count;
	uint32_t missing_count;
	uint32_t behind_count;
	/*
	 * Who keeps the oldest slab that is not free: readers that are not past it or hold it, in the
	 * order of their places; and reserved ranks that have not come.
	 * Behind: readers that have not read everything that was sent.
	 */
	uint32_t late[TND_CHANNEL_READERS_MAX];
	uint32_t missing[TND_CHANNEL_READERS_MAX];
	uint32_t behind[TND_CHANNEL_READERS_MAX];
};
/* By the writing thread. Blocking: never. */
void tnd__bulk_figures(struct tnd_channel *channel, struct tnd__bulk_figures *ret_figures);

/*
 * Writer: each reader that is attached now, or attaches later, is told `error` out of order, ahead
 * of what it has not read: code, rank, place and sentence. Its waits end with it (TND_E_* or -errno as
 * given), and so do later ones. The first one stays. MT-safe. Blocking: never.
 */
void tnd__bulk_tell(struct tnd_channel *channel, const struct tnd_error *error);
/* Reader: what it was told. MT-safe. Return: its code; 0: nothing. */
int tnd__bulk_told(struct tnd_channel *channel, struct tnd_error *reterr);

/* Reader: whether the object, which is borrowed, came by slab. MT-safe. Blocking: never. */
bool tnd__bulk_is_slab(const struct tnd_channel *channel, const struct tnd_object *object);

/*
 * Reader: the object, by slab, is released, but the bytes in `keep` stay readable where they are, as
 * a private copy of this process (page by page, in place of the shared mapping; others may read them
 * meanwhile). What else was mapped of the slab is unmapped. *ret_base, *ret_bytes: the caller's to
 * munmap, from the first page kept to the last; NULL and 0 where nothing is kept.
 * Return: 0; TND_E_EVICTED (kept, but the writer took this process for dead, and may have written
 * there); TND_E_INVALID (not borrowed, not by slab, outside of it); TND_E_CORRUPT (the writer has
 * put two objects there); TND_E_FORKED; -ENOMEM. The last ones have changed nothing.
 */
struct tnd__bulk_range {
	uint64_t begin, end; /* within the object */
};
int tnd__bulk_keep(struct tnd_channel *channel, const struct tnd_object *object,
		   const struct tnd__bulk_range *keep, size_t keep_count, void **ret_base,
		   uint64_t *ret_bytes);

#endif
