/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bulk.c - what a flow of slabs needs: memory by slab, who keeps it; a reader's contents that stay
 *
 * Keeping and eviction. What a reader holds when it is given up is not written to any more
 * (tnd__slabs_given_up), so its contents are still those of the object. Not so where the writer took
 * it for dead.
 */
#include <errno.h>
#include <string.h>

#include "bigobject.h"

int tnd__bulk_reserve(struct tnd_channel *channel, uint64_t bytes, enum tnd__bulk_how how,
		      int64_t deadline_ns, struct tnd_reservation *ret_reservation,
		      struct tnd_error *reterr)
{
	const struct tnd__ask ask = {.bytes = bytes,
				     .by_slab = true,
				     .reuse = how == TND__BULK_REUSE,
				     .overrun = how == TND__BULK_OVERRUN};

	return tnd__writer_reserve(channel, &ask, deadline_ns, ret_reservation, reterr);
}

/* Counts; *ret_oldest: of what was sent and is not free, else TND__SLABS_MAX. */
static void count_slabs(struct tnd_channel *channel, struct tnd__bulk_figures *figures,
			uint32_t *ret_oldest)
{
	uint64_t most = 0, published = atomic_load_explicit(&channel->shared.header->published,
							    memory_order_acquire);

	*ret_oldest = TND__SLABS_MAX;
	for (uint32_t i = 0; i < TND__SLABS_MAX; i++) {
		const struct tnd__host_slab *slab = tnd__host_slab(channel, i);
		uint64_t age;

		if (!slab->slab)
			continue;
		figures->slabs++;
		if (tnd__slab_is_free(channel, i)) {
			figures->free++;
			continue;
		}
		/* acquire: pairs with tnd__slabs_sent(). */
		if (atomic_load_explicit(&slab->state, memory_order_acquire) != TND__SLAB_SENT)
			continue;
		age = published - atomic_load_explicit(&slab->number, memory_order_relaxed);
		/* One that another thread commits just now comes after all others. */
		if (age > most && age <= UINT64_MAX / 2) {
			most = age;
			*ret_oldest = i;
		}
	}
}

static void name_late(struct tnd_channel *channel, uint32_t index,
		      struct tnd__bulk_figures *figures)
{
	const struct tnd__writer *writer = &channel->writer;
	uint64_t number =
		atomic_load_explicit(&tnd__host_slab(channel, index)->number, memory_order_relaxed);

	for (uint64_t left = writer->now_live; left; left &= left - 1) {
		unsigned int i = (unsigned int)__builtin_ctzll(left);
		const _Atomic uint32_t *lease = &channel->shared.control->leases[i][index];
		bool past = writer->places[i].seen - number - 1 <= UINT64_MAX / 2;

		/* After the cursor, as in tnd__slab_is_free(). */
		if (!past || atomic_load_explicit(lease, memory_order_seq_cst) != 0)
			figures->late[figures->late_count++] = writer->places[i].rank;
	}
}

/* They may keep the ring, or the end of a drain. */
static void name_behind(struct tnd_channel *channel, struct tnd__bulk_figures *figures)
{
	const struct tnd__writer *writer = &channel->writer;
	uint64_t published =
		atomic_load_explicit(&channel->shared.header->published, memory_order_acquire);

	for (uint64_t left = writer->now_live; left; left &= left - 1) {
		unsigned int i = (unsigned int)__builtin_ctzll(left);

		if (writer->places[i].seen != published)
			figures->behind[figures->behind_count++] = writer->places[i].rank;
	}
}

void tnd__bulk_figures(struct tnd_channel *channel, struct tnd__bulk_figures *ret_figures)
{
	struct tnd__bulk_figures figures = {0};
	uint32_t oldest = TND__SLABS_MAX;

	if (!tnd__channel_forked(channel) && channel->is_writer && channel->slabs) {
		/* A dead reader is no matter here: the next reserve says it. */
		(void)tnd__slabs_look(channel, NULL, NULL);
		count_slabs(channel, &figures, &oldest);
		pthread_mutex_lock(&channel->lock);
		if (oldest < TND__SLABS_MAX)
			name_late(channel, oldest, &figures);
		name_behind(channel, &figures);
		for (uint64_t left = channel->writer.now_reserved; left; left &= left - 1)
			figures.missing[figures.missing_count++] =
				channel->writer.places[__builtin_ctzll(left)].rank;
		pthread_mutex_unlock(&channel->lock);
	}
	*ret_figures = figures;
}

/* -- keeping -- */

bool tnd__bulk_is_slab(const struct tnd_channel *channel, const struct tnd_object *object)
{
	return tnd__slabs_is(channel, object);
}

static int by_begin(const void *a, const void *b)
{
	const struct tnd__bulk_range *x = a, *y = b;

	return x->begin < y->begin ? -1 : x->begin > y->begin;
}

/* The pages that cover `keep`, in order, each once. Return: how many runs; TND_E_INVALID. */
static ssize_t to_pages(const struct tnd__bulk_range *keep, size_t keep_count, uint64_t bytes,
			struct tnd__bulk_range *pages)
{
	size_t count = 0, used = 0;

	for (size_t i = 0; i < keep_count; i++) {
		if (keep[i].begin > keep[i].end || keep[i].end > bytes)
			return TND_E_INVALID;
		if (keep[i].begin == keep[i].end)
			continue;
		pages[count].begin = tnd__round_down(keep[i].begin, TND__PAGE);
		pages[count++].end = tnd__round_up(keep[i].end, TND__PAGE);
	}
	qsort(pages, count, sizeof(*pages), by_begin);
	for (size_t i = 0; i < count; i++) {
		if (used && pages[i].begin <= pages[used - 1].end)
			pages[used - 1].end = TND__MAX(pages[used - 1].end, pages[i].end);
		else
			pages[used++] = pages[i];
	}
	return (ssize_t)used;
}

/* Whether the writer may have used the slab for something else while this reader had it. */
static bool taken_for_dead(const struct tnd_channel *channel)
{
	const struct tnd__seat *seat = &channel->shared.header->seats[channel->reader.place];
	uint32_t state;

	/* After the lease's end, so after the copy; pairs with E1. */
	state = atomic_load_explicit(&seat->state, memory_order_seq_cst);
	return (state != TND__PLACE_LIVE && state != TND__PLACE_EVICTED) ||
	       atomic_load_explicit(&seat->generation, memory_order_relaxed) !=
		       channel->reader.generation;
}

int tnd__bulk_keep(struct tnd_channel *channel, const struct tnd_object *object,
		   const struct tnd__bulk_range *keep, size_t keep_count, void **ret_base,
		   uint64_t *ret_bytes)
{
	struct tnd__bulk_range *pages;
	void *base = NULL;
	ssize_t count;
	int rc;

	if (tnd__channel_forked(channel))
		return TND_E_FORKED;
	if (channel->is_writer || !channel->slabs || !tnd__slabs_is(channel, object))
		return TND_E_INVALID;
	pages = tnd__failpoint("channel.alloc") < 0 ? NULL : calloc(keep_count + 1, sizeof(*pages));
	if (!pages)
		return -ENOMEM;
	count = to_pages(keep, keep_count, object->bytes, pages);
	rc = count < 0 ? (int)count
		       : tnd__slabs_keep(channel, object->ticket, pages, (size_t)count, &base);
	if (rc == 0) {
		*ret_base = count ? base : NULL;
		*ret_bytes = count ? pages[count - 1].end - pages[0].begin : 0;
		if (taken_for_dead(channel))
			rc = TND_E_EVICTED;
	}
	free(pages);
	return rc;
}
