/* SPDX-License-Identifier: Apache-2.0 */
/*
 * send.c - the writer's data path
 *
 *          freed          published        pending_end
 *            v                v                v            numbers
 *   ---------+----------------+----------------+------
 *     free   |  some reader   |  reserved, not |  free
 *            |  holds it      |  yet visible   |
 *   ---------+----------------+----------------+------
 *            ^                                 ^            byte positions
 *       freed_position                    head_position
 *
 * An object may be placed if fewer than max_objects numbers lie between freed and pending_end, and
 * head_position - freed_position + its rounded length <= max_bytes. `freed` is a cached minimum of
 * the cursors and is brought up to date only when it does not suffice, or to sample the high-water
 * marks.
 *
 * While no reservation is open, nobody but the sending thread touches any of this and there is no
 * lock. Else commit and abort may run in other threads: all of it is under `lock`.
 *
 * The pairs of memory orders are listed in wait.c.
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "channel_internal.h"

/* For each reader: a copy of this takes about as long as two cache misses. */
#define REUSE_BYTES 4096

/* Reads the sets of places after a change. Under lock. */
static void copy_sets(struct tnd_channel *channel)
{
	struct tnd__writer *writer = &channel->writer;

	writer->seen_generation = atomic_load_explicit(&writer->generation, memory_order_relaxed);
	writer->now_reserved = writer->reserved;
	writer->now_live = writer->live;
	writer->now_dead = writer->dead;
	for (uint64_t left = writer->now_live; left; left &= left - 1) {
		struct tnd__place *place = &writer->places[__builtin_ctzll(left)];

		if (place->seen_generation != place->generation) {
			place->seen_generation = place->generation;
			place->seen = place->admitted;
		}
	}
}

int tnd__writer_look(struct tnd_channel *channel, struct tnd_error *reterr)
{
	struct tnd__writer *writer = &channel->writer;
	uint32_t rank;

	/* W1: pairs with A1 and E3. */
	if (atomic_load_explicit(&writer->generation, memory_order_seq_cst) !=
	    writer->seen_generation) {
		pthread_mutex_lock(&channel->lock);
		copy_sets(channel);
		pthread_mutex_unlock(&channel->lock);
	}
	if (!writer->now_dead)
		return 0;
	rank = writer->places[__builtin_ctzll(writer->now_dead)].rank;
	return tnd__fail_rank(reterr, TND_E_PEER_DEAD, (int32_t)rank,
			      "channel '%s': the reader of rank %" PRIu32
			      " died: give it up (tnd_channel_evict) to go on without it",
			      channel->shared.name, rank);
}

/* Byte position at which object `number` begins, or what comes after all objects. */
static uint64_t position_of(const struct tnd_channel *channel, uint64_t number)
{
	const struct tnd__writer *writer = &channel->writer;

	if (number != writer->published)
		return atomic_load_explicit(
			&channel->shared.descriptors[tnd__slot(channel, number)].position,
			memory_order_relaxed);
	if (writer->pending_first != writer->pending_end)
		return writer->pending[tnd__slot(channel, writer->pending_first)].position;
	return writer->head_position;
}

uint64_t tnd__writer_refresh(struct tnd_channel *channel, uint64_t *ret_left)
{
	struct tnd__writer *writer = &channel->writer;
	uint64_t ahead = writer->published - writer->freed, corrupt = 0, gone = 0;

	for (uint64_t left = writer->now_live; left; left &= left - 1) {
		unsigned int i = (unsigned int)__builtin_ctzll(left);
		struct tnd__cursor *shared = &channel->shared.control->places[i];
		struct tnd__place *place = &writer->places[i];
		/* W1: what the reader did with objects below is done; pairs with R3. */
		uint64_t cursor = atomic_load_explicit(&shared->cursor, memory_order_seq_cst);

		/* Pairs with L1. */
		if (atomic_load_explicit(&shared->left, memory_order_acquire) ==
		    place->seen_generation) {
			gone |= UINT64_C(1) << i;
			continue;
		}
		if (cursor - place->seen > writer->published - place->seen) {
			corrupt |= UINT64_C(1) << i;
			continue;
		}
		place->seen = cursor;
		ahead = TND__MIN(ahead, cursor - writer->freed);
	}
	/* What is held for a rank that has not come is everything. */
	if (writer->now_reserved)
		ahead = 0;
	writer->freed += ahead;
	writer->freed_position = position_of(channel, writer->freed);
	*ret_left = gone;
	return corrupt;
}

/* Whether there is room, with what is known. */
static bool has_room(const struct tnd_channel *channel, uint64_t bytes)
{
	const struct tnd__writer *writer = &channel->writer;
	uint64_t objects =
		writer->published - writer->freed + writer->pending_end - writer->pending_first;

	return objects < channel->shared.max_objects &&
	       writer->head_position - writer->freed_position + bytes <= channel->shared.max_bytes;
}

/* Raises the high-water marks by what is in use now that `freed` is fresh. */
static void sample_marks(struct tnd_channel *channel, bool room, uint64_t bytes)
{
	struct tnd__writer *writer = &channel->writer;
	struct tnd__control *control = channel->shared.control;
	uint64_t used = writer->head_position - writer->freed_position + (room ? bytes : 0);
	uint64_t objects = writer->published - writer->freed + room;

	writer->sampled_position = writer->head_position;
	writer->sampled_objects = writer->published;
	if (used > atomic_load_explicit(&control->high_bytes, memory_order_relaxed))
		atomic_store_explicit(&control->high_bytes, used, memory_order_relaxed);
	if (objects > atomic_load_explicit(&control->high_objects, memory_order_relaxed))
		atomic_store_explicit(&control->high_objects, objects, memory_order_relaxed);
}

static bool sample_due(const struct tnd_channel *channel)
{
	const struct tnd__writer *writer = &channel->writer;

	return writer->head_position - writer->sampled_position > channel->shared.max_bytes >> 3 ||
	       writer->published - writer->sampled_objects > channel->shared.max_objects >> 3;
}

/*
 * Whether an object is so large that to look at the cursors costs little beside its copy, and is
 * worth it: where nobody holds anything, memory that was used just now is used again, instead of
 * going through the whole ring from one cache miss to the next.
 */
static bool reuse_due(const struct tnd_channel *channel, uint64_t bytes)
{
	const struct tnd__writer *writer = &channel->writer;

	return writer->head_offset &&
	       bytes / REUSE_BYTES > (uint64_t)__builtin_popcountll(writer->now_live);
}

/* Room for `bytes`, looked at under lock where there are reservations. Return: 1, 0. */
static int room_now(struct tnd_channel *channel, uint64_t bytes)
{
	struct tnd__writer *writer = &channel->writer;
	/* With none, all that commits and aborts did is seen. */
	bool locked = atomic_load_explicit(&writer->reservations, memory_order_acquire) != 0;
	uint64_t corrupt = 0, left = 0;
	bool room;

	if (locked) {
		pthread_mutex_lock(&channel->lock);
		tnd__pending_take_back(channel);
	}
	room = has_room(channel, bytes);
	if (!room || sample_due(channel) || reuse_due(channel, bytes)) {
		corrupt = tnd__writer_refresh(channel, &left);
		if (!locked && writer->freed == writer->published)
			writer->head_offset = 0;
		room = has_room(channel, bytes);
		sample_marks(channel, room, bytes);
	}
	if (locked)
		pthread_mutex_unlock(&channel->lock);
	if (!(corrupt | left))
		return room;
	tnd__places_drop(channel, corrupt, TND__PLACE_EVICTED);
	tnd__places_drop(channel, left, TND__PLACE_LEFT);
	return 0;
}

static int look_for_room(struct tnd__wait *wait, struct tnd_error *reterr)
{
	struct tnd_channel *channel = wait->channel;
	uint32_t generation;
	int rc;

	/* Dropping a reader changes the sets: once more, then. */
	do {
		rc = tnd__writer_look(channel, reterr);
		if (rc == 0)
			rc = room_now(channel, wait->need);
		generation =
			atomic_load_explicit(&channel->writer.generation, memory_order_relaxed);
	} while (rc == 0 && generation != channel->writer.seen_generation);
	return rc;
}

/* W1 as it mostly is: no set changed, and what is known suffices. */
static bool room_at_once(const struct tnd_channel *channel, uint64_t bytes)
{
	const struct tnd__writer *writer = &channel->writer;

	return atomic_load_explicit(&writer->generation, memory_order_seq_cst) ==
		       writer->seen_generation &&
	       !writer->now_dead &&
	       !atomic_load_explicit(&writer->reservations, memory_order_acquire) &&
	       has_room(channel, bytes) && !sample_due(channel) && !reuse_due(channel, bytes);
}

int tnd__writer_room(struct tnd_channel *channel, uint64_t bytes, int64_t deadline_ns,
		     struct tnd_error *reterr)
{
	struct tnd__wait wait = {
		.channel = channel, .look = look_for_room, .what = "space", .need = bytes};

	(void)tnd__failpoint("channel.W1");
	if (room_at_once(channel, bytes))
		return 0;
	return tnd__channel_wait(&wait, deadline_ns, reterr);
}

void tnd__writer_take(struct tnd_channel *channel, struct tnd__pending *pending)
{
	struct tnd__writer *writer = &channel->writer;
	bool locked = atomic_load_explicit(&writer->reservations, memory_order_acquire) != 0;

	if (locked)
		pthread_mutex_lock(&channel->lock);
	pending->position = writer->head_position;
	pending->offset = writer->head_offset;
	writer->head_position += pending->held;
	writer->head_offset += pending->held;
	if (writer->head_offset >= channel->shared.arena_bytes)
		writer->head_offset -= channel->shared.arena_bytes;
	if (locked)
		pthread_mutex_unlock(&channel->lock);
}

void tnd__writer_publish(struct tnd_channel *channel, uint64_t position, uint64_t bytes,
			 uint64_t place)
{
	struct tnd__writer *writer = &channel->writer;
	struct tnd__control *control = channel->shared.control;
	struct tnd__descriptor *descriptor =
		&channel->shared.descriptors[tnd__slot(channel, writer->published)];

	/* Relaxed: W3 publishes them. */
	atomic_store_explicit(&descriptor->number, writer->published, memory_order_relaxed);
	atomic_store_explicit(&descriptor->position, position, memory_order_relaxed);
	descriptor->bytes = bytes;
	descriptor->place = place;
	writer->published++;
	writer->sent_bytes += bytes;
	atomic_store_explicit(&control->head_position, writer->head_position, memory_order_relaxed);
	atomic_store_explicit(&control->sent_bytes, writer->sent_bytes, memory_order_relaxed);
	(void)tnd__failpoint("channel.W3");
	/*
	 * W3: publishes bytes and descriptor; pairs with R1. seq_cst, so that W4 comes after it;
	 * pairs with S3 and A2.
	 */
	atomic_store_explicit(&channel->shared.header->published, writer->published,
			      memory_order_seq_cst);
}

static void copy_pieces(unsigned char *to, const struct iovec *pieces, uint32_t piece_count)
{
	for (uint32_t i = 0; i < piece_count; i++) {
		if (pieces[i].iov_len)
			memcpy(to, pieces[i].iov_base, pieces[i].iov_len);
		to += pieces[i].iov_len;
	}
}

/*
 * An object that is complete, as the next one: published at once, or queued behind reservations
 * that are open.
 */
static void put(struct tnd_channel *channel, const struct tnd__pending *pending)
{
	struct tnd__writer *writer = &channel->writer;
	bool woken = true;

	if (atomic_load_explicit(&writer->reservations, memory_order_acquire)) {
		pthread_mutex_lock(&channel->lock);
		tnd__pending_add(channel, pending);
		woken = tnd__pending_drain(channel);
		pthread_mutex_unlock(&channel->lock);
	} else if (pending->slab) {
		tnd__slabs_sent(channel, pending->slab - 1, writer->published);
		tnd__writer_publish(channel, pending->position, pending->bytes,
				    tnd__slabs_place(channel, pending->slab - 1));
	} else {
		tnd__writer_publish(channel, pending->position, pending->bytes, pending->offset);
	}
	if (woken)
		tnd__wake_readers(channel, false);
}

static int send_by_slab(struct tnd_channel *channel, const struct iovec *pieces,
			uint32_t piece_count, struct tnd__pending *pending, int64_t deadline_ns,
			struct tnd_error *reterr)
{
	uint32_t index;
	const struct tnd__ask ask = {.bytes = pending->bytes};
	int rc = tnd__slabs_take(channel, &ask, deadline_ns, &index, reterr);

	if (rc < 0)
		return rc;
	rc = tnd__writer_room(channel, 0, deadline_ns, reterr);
	if (rc < 0) {
		tnd__slabs_put_back(channel, index);
		return rc;
	}
	(void)tnd__failpoint("channel.W2");
	copy_pieces(tnd__slabs_data(channel, index), pieces, piece_count);
	pending->slab = index + 1;
	tnd__writer_take(channel, pending);
	put(channel, pending);
	return 0;
}

int tnd__writer_too_long(struct tnd_channel *channel, uint64_t bytes, struct tnd_error *reterr)
{
	uint64_t most =
		channel->slabs ? channel->shared.max_object_bytes : channel->shared.max_bytes;

	return tnd__fail_plain(reterr, -EMSGSIZE,
			       "channel '%s': an object of %" PRIu64 " bytes, at most %" PRIu64
			       " (%s) go through: raise the limit, or send it in parts",
			       channel->shared.name, bytes, most,
			       channel->slabs ? "max_object_bytes" : "max_bytes");
}

static int send_pieces(struct tnd_channel *channel, const struct iovec *pieces,
		       uint32_t piece_count, int64_t deadline_ns, struct tnd_error *reterr)
{
	struct tnd__pending pending = {0};
	int rc;

	for (uint32_t i = 0; i < piece_count; i++) {
		if (pieces[i].iov_len > UINT64_MAX - pending.bytes ||
		    (pieces[i].iov_len && !pieces[i].iov_base))
			return tnd__fail_plain(reterr, TND_E_INVALID,
					       "piece %" PRIu32
					       " has a length but no address, or the lengths "
					       "overflow: check the pieces",
					       i);
		pending.bytes += pieces[i].iov_len;
	}
	rc = tnd__channel_enter(channel, true, reterr);
	if (rc < 0)
		return rc;
	if (pending.bytes > channel->shared.max_bytes) {
		if (!channel->slabs || pending.bytes > channel->shared.max_object_bytes)
			rc = tnd__writer_too_long(channel, pending.bytes, reterr);
		else
			rc = send_by_slab(channel, pieces, piece_count, &pending, deadline_ns,
					  reterr);
		tnd__channel_leave(channel);
		return rc;
	}
	pending.held = tnd__round_up(pending.bytes, TND__ALIGN);
	rc = tnd__writer_room(channel, pending.held, deadline_ns, reterr);
	if (rc == 0) {
		tnd__writer_take(channel, &pending);
		(void)tnd__failpoint("channel.W2");
		copy_pieces(channel->shared.arena + pending.offset, pieces, piece_count);
		put(channel, &pending);
	}
	tnd__channel_leave(channel);
	return rc;
}

int tnd_channel_send(struct tnd_channel *channel, const void *data, uint64_t bytes,
		     int64_t deadline_ns, struct tnd_error *reterr)
{
	struct iovec piece = {(void *)(uintptr_t)data, bytes};

	return send_pieces(channel, &piece, 1, deadline_ns, reterr);
}

int tnd_channel_sendv(struct tnd_channel *channel, const struct iovec *pieces, uint32_t piece_count,
		      int64_t deadline_ns, struct tnd_error *reterr)
{
	if (piece_count && !pieces)
		return tnd__fail_plain(reterr, TND_E_INVALID,
				       "%" PRIu32 " pieces and no list of them: give the list",
				       piece_count);
	return send_pieces(channel, pieces, piece_count, deadline_ns, reterr);
}

static int look_drained(struct tnd__wait *wait, struct tnd_error *reterr)
{
	struct tnd_channel *channel = wait->channel;
	uint64_t corrupt, left;
	int rc = tnd__writer_look(channel, reterr);

	if (rc < 0)
		return rc;
	pthread_mutex_lock(&channel->lock);
	corrupt = tnd__writer_refresh(channel, &left);
	rc = channel->writer.freed == channel->writer.published;
	pthread_mutex_unlock(&channel->lock);
	tnd__places_drop(channel, corrupt, TND__PLACE_EVICTED);
	tnd__places_drop(channel, left, TND__PLACE_LEFT);
	return rc;
}

int tnd_channel_drain(struct tnd_channel *channel, int64_t deadline_ns, struct tnd_error *reterr)
{
	struct tnd__wait wait = {
		.channel = channel, .look = look_drained, .what = "readers to release everything"};
	int rc = tnd__channel_enter(channel, true, reterr);

	if (rc < 0)
		return rc;
	rc = tnd__channel_wait(&wait, deadline_ns, reterr);
	tnd__channel_leave(channel);
	return rc;
}
