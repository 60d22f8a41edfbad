/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reserve.c - objects written in place: reserve, commit, abort
 *
 *      pending_first                         pending_end        turns
 *           v                                    v
 *   --------+------+-----------+---------+-------+
 *           | OPEN | COMMITTED | ABORTED | OPEN  |
 *   --------+------+-----------+---------+-------+
 *           ^ holds up what is behind it        ^ an aborted one here is taken back at once
 *
 * The first is published (or, aborted, skipped) as soon as it is not open. The space of an aborted
 * one goes back when it is the last, else with the objects before it. Only the thread that is in a
 * send call may move the head: abort and commit of another thread leave that to it.
 *
 * All of it is under `lock`; nothing waits or copies under it.
 */
#include <errno.h>
#include <string.h>

#include "channel_internal.h"

/* Low bits of a ticket: which slot. */
#define SLOT_BITS 20
_Static_assert(TND_CHANNEL_OBJECTS_MAX <= 1u << SLOT_BITS, "a slot fits");

static struct tnd__pending *pending_at(struct tnd_channel *channel, uint64_t turn)
{
	return &channel->writer.pending[tnd__slot(channel, turn)];
}

/* Moves the head back to `held` bytes behind where `pending` begins. */
static void move_head_back(struct tnd_channel *channel, const struct tnd__pending *pending,
			   uint64_t held)
{
	struct tnd__writer *writer = &channel->writer;

	writer->head_position = pending->position + held;
	writer->head_offset = pending->offset + held;
	if (writer->head_offset >= channel->shared.arena_bytes)
		writer->head_offset -= channel->shared.arena_bytes;
}

void tnd__pending_take_back(struct tnd_channel *channel)
{
	struct tnd__writer *writer = &channel->writer;

	while (writer->pending_first != writer->pending_end) {
		struct tnd__pending *last = pending_at(channel, writer->pending_end - 1);

		if (last->state != TND__PENDING_ABORTED)
			break;
		last->state = TND__PENDING_GONE;
		move_head_back(channel, last, 0);
		writer->pending_end--;
		/* As in tnd__pending_drain(). */
		atomic_fetch_sub_explicit(&writer->reservations, 1, memory_order_release);
	}
}

void tnd__pending_add(struct tnd_channel *channel, const struct tnd__pending *pending)
{
	struct tnd__writer *writer = &channel->writer;
	struct tnd__pending *slot = pending_at(channel, writer->pending_end);

	*slot = *pending;
	slot->ticket =
		++writer->pending_serial << SLOT_BITS | tnd__slot(channel, writer->pending_end);
	writer->pending_end++;
	slot->state = TND__PENDING_COMMITTED;
	atomic_fetch_add_explicit(&writer->reservations, 1, memory_order_relaxed);
}

/*
 * Whether what comes at `turn`, aborted ones left out, is complete. If not, aborted ones before
 * it may still become the last, and be taken back.
 */
static bool complete_at(struct tnd_channel *channel, uint64_t turn)
{
	for (; turn != channel->writer.pending_end; turn++)
		if (pending_at(channel, turn)->state != TND__PENDING_ABORTED)
			return pending_at(channel, turn)->state == TND__PENDING_COMMITTED;
	return false;
}

static void publish_pending(struct tnd_channel *channel, const struct tnd__pending *pending)
{
	uint64_t place = pending->offset;

	if (pending->slab) {
		tnd__slabs_sent(channel, pending->slab - 1, channel->writer.published);
		place = tnd__slabs_place(channel, pending->slab - 1);
	}
	tnd__writer_publish(channel, pending->position, pending->bytes, place);
}

bool tnd__pending_drain(struct tnd_channel *channel)
{
	struct tnd__writer *writer = &channel->writer;
	bool any = false;

	while (writer->pending_first != writer->pending_end) {
		struct tnd__pending *first = pending_at(channel, writer->pending_first);

		if (!complete_at(channel, writer->pending_first))
			break;
		if (first->state == TND__PENDING_COMMITTED) {
			publish_pending(channel, first);
			any = true;
		}
		first->state = TND__PENDING_GONE;
		writer->pending_first++;
		/* All of the above is seen by who finds none left; pairs with room_now(), put(). */
		atomic_fetch_sub_explicit(&writer->reservations, 1, memory_order_release);
	}
	return any;
}

static int make_pending(struct tnd_channel *channel, struct tnd_error *reterr)
{
	if (channel->writer.pending)
		return 0;
	if (tnd__failpoint("channel.alloc") == 0)
		channel->writer.pending =
			calloc(channel->shared.slot_count, sizeof(struct tnd__pending));
	return channel->writer.pending ? 0
				       : tnd__fail_plain(reterr, -ENOMEM,
							 "channel '%s': no memory for reservations",
							 channel->shared.name);
}

static int say_no_slabs(const struct tnd_channel *channel, struct tnd_error *reterr)
{
	return tnd__fail_plain(
		reterr, TND_E_INVALID,
		"channel '%s': expected a pool of slabs for an object by slab, found "
		"none: give one at creation",
		channel->shared.name);
}

/* Room, and for a large object a slab. */
static int find_room(struct tnd_channel *channel, const struct tnd__ask *ask,
		     struct tnd__pending *pending, int64_t deadline_ns, struct tnd_error *reterr)
{
	uint32_t index;
	int rc;

	if (ask->by_slab && !channel->slabs)
		return say_no_slabs(channel, reterr);
	if (!ask->by_slab && pending->bytes <= channel->shared.max_bytes) {
		pending->held = tnd__round_up(pending->bytes, TND__ALIGN);
		return tnd__writer_room(channel, pending->held, deadline_ns, reterr);
	}
	if (!channel->slabs || pending->bytes > channel->shared.max_object_bytes)
		return tnd__writer_too_long(channel, pending->bytes, reterr);
	rc = tnd__slabs_take(channel, ask, deadline_ns, &index, reterr);
	if (rc < 0)
		return rc;
	rc = tnd__writer_room(channel, 0, deadline_ns, reterr);
	if (rc < 0)
		tnd__slabs_put_back(channel, index);
	else
		pending->slab = index + 1;
	return rc;
}

int tnd__writer_reserve(struct tnd_channel *channel, const struct tnd__ask *ask,
			int64_t deadline_ns, struct tnd_reservation *ret_reservation,
			struct tnd_error *reterr)
{
	struct tnd__pending pending = {.bytes = ask->bytes};
	struct tnd__pending *slot;
	int rc = tnd__channel_enter(channel, true, reterr);

	if (rc < 0)
		return rc;
	rc = make_pending(channel, reterr);
	if (rc == 0)
		rc = find_room(channel, ask, &pending, deadline_ns, reterr);
	if (rc == 0) {
		tnd__writer_take(channel, &pending);
		pthread_mutex_lock(&channel->lock);
		tnd__pending_add(channel, &pending);
		slot = pending_at(channel, channel->writer.pending_end - 1);
		slot->state = TND__PENDING_OPEN;
		ret_reservation->ticket = slot->ticket;
		pthread_mutex_unlock(&channel->lock);
		ret_reservation->bytes = ask->bytes;
		ret_reservation->data = pending.slab ? tnd__slabs_data(channel, pending.slab - 1)
						     : channel->shared.arena + pending.offset;
	}
	tnd__channel_leave(channel);
	return rc;
}

int tnd_channel_reserve(struct tnd_channel *channel, uint64_t bytes, int64_t deadline_ns,
			struct tnd_reservation *ret_reservation, struct tnd_error *reterr)
{
	const struct tnd__ask ask = {.bytes = bytes};

	return tnd__writer_reserve(channel, &ask, deadline_ns, ret_reservation, reterr);
}

/* The open reservation, or NULL. Under lock. */
static struct tnd__pending *find_open(struct tnd_channel *channel,
				      const struct tnd_reservation *reservation)
{
	struct tnd__pending *slot;

	if (!channel->writer.pending)
		return NULL;
	/* The caller's memory: any number. */
	slot = pending_at(channel, reservation->ticket & ((UINT64_C(1) << SLOT_BITS) - 1));
	return slot->state == TND__PENDING_OPEN && slot->ticket == reservation->ticket ? slot
										       : NULL;
}

/*
 * Ends an open reservation: `actual` bytes of it are the object, or it is aborted. The head is ours
 * to move only when no thread is in a send call.
 */
static int end_reservation(struct tnd_channel *channel, const struct tnd_reservation *reservation,
			   uint64_t actual, bool abort)
{
	struct tnd__writer *writer = &channel->writer;
	struct tnd__pending *slot;
	uint32_t found = TND__BUSY_FREE;
	bool any = false, ours;
	int rc = TND_E_INVALID;

	if (tnd__channel_forked(channel))
		return TND_E_FORKED;
	if (!channel->is_writer || !reservation)
		return TND_E_INVALID;
	ours = atomic_compare_exchange_strong_explicit(&channel->busy, &found, TND__BUSY_MOMENT,
						       memory_order_acquire, memory_order_relaxed);
	pthread_mutex_lock(&channel->lock);
	slot = find_open(channel, reservation);
	if (slot && (abort || actual <= slot->bytes)) {
		rc = 0;
		slot->state = abort ? TND__PENDING_ABORTED : TND__PENDING_COMMITTED;
		if (abort && slot->slab)
			tnd__slabs_put_back(channel, slot->slab - 1);
		if (!abort)
			slot->bytes = actual;
		if (!abort && ours && !slot->slab &&
		    slot == pending_at(channel, writer->pending_end - 1)) {
			slot->held = tnd__round_up(actual, TND__ALIGN);
			move_head_back(channel, slot, slot->held);
		}
		if (ours)
			tnd__pending_take_back(channel);
		any = tnd__pending_drain(channel);
	}
	pthread_mutex_unlock(&channel->lock);
	if (ours)
		tnd__channel_leave(channel);
	if (any)
		tnd__wake_readers(channel, false);
	/* A thread that waits in send may have room now. */
	if (rc == 0 && !ours)
		tnd__wake_writer(channel);
	return rc;
}

int tnd_channel_commit(struct tnd_channel *channel, const struct tnd_reservation *reservation,
		       uint64_t actual)
{
	return end_reservation(channel, reservation, actual, false);
}

int tnd_channel_abort(struct tnd_channel *channel, const struct tnd_reservation *reservation)
{
	return end_reservation(channel, reservation, 0, true);
}
