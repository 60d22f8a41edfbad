/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bigobject.c - objects by slab: the writer's side
 *
 *                  make                 take                  sent
 *      (nothing) --------> FREE --------------------> TAKEN ---------> SENT
 *          ^                 ^                          |               |
 *          | retire          |'------- put back --------'               |
 *          '-----------------+------------------------------------------'
 *                              every reader is past its object, and none has leases on it
 *
 * A slab is one memfd from the caller's pool, half as large again as what it is made for. It is
 * sealed before anybody gets its descriptor, as the ring is, and its pages are taken before they
 * are written. Readers get the descriptor on the socket when it is made or when they attach, so
 * that they have it even if this process closes or dies right after the object was published. Where
 * that message was lost (no memory for it), they ask.
 *
 * Free again: the cursor of a reader says that it has borrowed or copied the object; a borrow holds
 * a lease in the control segment, added before the cursor passes the object. So cursors are looked
 * at first and leases second. Those of readers that are not in the set (dead, left, given up) do
 * not count.
 *
 *   slabview.c   lease += 1 (seq_cst) ... R3     cursor (W1) ... lease (seq_cst load)
 *   slabview.c   reads, lease -= 1 (seq_cst)     lease (seq_cst load) ... the next write
 *
 * A slab that is too small is retired (readers unmap it) when a larger one is needed and budget,
 * memory or the table do not have it. Slabs never go back to the pool for other use: they are
 * sealed, and others may still map them.
 *
 * Waiting. Readers that come free wake the writer as they do for space in the ring. For budget that
 * somebody else holds it looks every BUDGET_LOOK_NS: that can only be waited for in the budget's
 * queue, where neither readers nor cancel would be seen.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "bigobject.h"
#include "memory/headroom.h"
#include "segment.h"

#define BUDGET_LOOK_NS INT64_C(10000000)

enum { FREE, TAKEN, SENT };

static struct tnd__host_slab *slab_at(struct tnd_channel *channel, uint32_t index)
{
	return &channel->slabs->host[index];
}

int tnd__slabs_host(struct tnd_channel *channel, struct tnd_slab_pool *pool,
		    struct tnd_error *reterr)
{
	struct tnd__slabs *slabs;

	if (!tnd__slab_pool_shared(pool))
		return tnd__fail_plain(reterr, TND_E_INVALID,
				       "expected a pool of shared slabs for the objects by slab of "
				       "channel '%s', found one of anonymous memory; make it with "
				       "TND_SLAB_POOL_F_SHARED",
				       channel->shared.name);
	slabs = tnd__failpoint("channel.alloc") < 0
			? NULL
			: calloc(1, sizeof(*slabs) + TND__SLABS_MAX * sizeof(*slabs->host));
	if (!slabs)
		return tnd__fail_plain(reterr, -ENOMEM,
				       "expected memory for the slabs of channel '%s', found none",
				       channel->shared.name);
	slabs->pool = pool;
	channel->slabs = slabs;
	return 0;
}

void tnd__slabs_close(struct tnd_channel *channel, bool forked)
{
	struct tnd__slabs *slabs = channel->slabs;

	if (!slabs)
		return;
	/* A child has neither the mappings nor, for sure, the pool's lock. */
	for (uint32_t i = 0; slabs->pool && i < TND__SLABS_MAX && !forked; i++)
		if (slabs->host[i].slab)
			tnd__slab_discard(slabs->host[i].slab);
	tnd__views_close(slabs);
	free(slabs);
	channel->slabs = NULL;
}

void tnd__slab_packet(const struct tnd__slab_note *note, int fd, struct tnd__packet *packet)
{
	packet->kind = TND__PACKET_SLAB;
	packet->bytes = sizeof(*note);
	packet->fd_count = fd >= 0;
	packet->fds[0] = fd;
	memcpy(packet->data, note, sizeof(*note));
}

/* -- telling readers -- */

static struct tnd__slab_note note_of(struct tnd_channel *channel, uint32_t index, uint32_t what)
{
	const struct tnd__host_slab *slab = slab_at(channel, index);

	return (struct tnd__slab_note){slab->serial, slab->bytes, index, what};
}

/*
 * To every reader that has not been told (TND__NOTE_HERE), or that has (TND__NOTE_RETIRE). Who
 * cannot be reached asks, or is gone. Under lock.
 */
static void tell(struct tnd_channel *channel, uint32_t index, uint32_t what)
{
	struct tnd__host_slab *slab = slab_at(channel, index);
	struct tnd__slab_note note = note_of(channel, index, what);
	struct tnd__packet packet;

	tnd__slab_packet(&note, what == TND__NOTE_HERE ? tnd_slab_fd(slab->slab) : -1, &packet);
	for (uint32_t i = 0; i < channel->shared.place_count; i++) {
		const struct tnd__place *place = &channel->writer.places[i];
		bool told = slab->told[i] == place->generation;

		if (!place->peer || place->state != TND__PLACE_LIVE ||
		    told != (what == TND__NOTE_RETIRE))
			continue;
		if (tnd__peer_send(place->peer, &packet) == 0)
			slab->told[i] = place->generation;
	}
}

void tnd__slabs_greet(struct tnd_channel *channel)
{
	pthread_mutex_lock(&channel->lock);
	for (uint32_t i = 0; channel->slabs && i < TND__SLABS_MAX; i++)
		if (slab_at(channel, i)->slab)
			tell(channel, i, TND__NOTE_HERE);
	pthread_mutex_unlock(&channel->lock);
}

void tnd__slabs_serve(struct tnd_channel *channel, struct tnd__peer *peer,
		      const struct tnd__packet *packet)
{
	struct tnd__slab_note note;
	struct tnd__packet answer;
	uint32_t place = (uint32_t)tnd__peer_tag(peer);
	int fd = -1;

	if (packet->bytes != sizeof(note))
		return;
	memcpy(&note, packet->data, sizeof(note));
	if (note.what != TND__NOTE_ASK || note.index >= TND__SLABS_MAX)
		return;
	pthread_mutex_lock(&channel->lock);
	if (slab_at(channel, note.index)->slab &&
	    slab_at(channel, note.index)->serial == note.serial) {
		note = note_of(channel, note.index, TND__NOTE_HERE);
		fd = tnd_slab_fd(slab_at(channel, note.index)->slab);
		if (place < TND__PLACES_MAX)
			slab_at(channel, note.index)->told[place] =
				channel->writer.places[place].generation;
	} else {
		note.what = TND__NOTE_GONE;
	}
	tnd__slab_packet(&note, fd, &answer);
	/* Under lock, as long as the descriptor is ours. */
	(void)tnd__peer_send(peer, &answer);
	pthread_mutex_unlock(&channel->lock);
}

/* -- which are free -- */

/* Whether no reader is at or before its object, and none holds it. */
static bool is_free(const struct tnd_channel *channel, uint32_t index)
{
	const struct tnd__host_slab *slab = &channel->slabs->host[index];
	/* Pairs with tnd__slabs_sent() and tnd__slabs_put_back(). */
	uint32_t state = atomic_load_explicit(&slab->state, memory_order_acquire);

	if (!slab->slab || state == TAKEN)
		return false;
	if (state == FREE)
		return true;
	if (channel->writer.freed - slab->number - 1 > UINT64_MAX / 2)
		return false;
	for (uint64_t left = channel->writer.now_live; left; left &= left - 1) {
		const _Atomic uint32_t *lease =
			&channel->shared.control->leases[__builtin_ctzll(left)][index];

		/* After the cursor, which passed the object after the lease was added. */
		if (atomic_load_explicit(lease, memory_order_seq_cst) != 0)
			return false;
	}
	return true;
}

/* Return: how many are free; *ret_index: the smallest of `bytes` or more, else TND__SLABS_MAX. */
static uint32_t find_free(const struct tnd_channel *channel, uint64_t bytes, uint32_t *ret_index)
{
	const struct tnd__host_slab *host = channel->slabs->host;
	uint32_t count = 0, best = TND__SLABS_MAX;

	for (uint32_t i = 0; i < TND__SLABS_MAX; i++) {
		if (!is_free(channel, i))
			continue;
		count++;
		if (host[i].bytes >= bytes &&
		    (best == TND__SLABS_MAX || host[i].bytes < host[best].bytes))
			best = i;
	}
	*ret_index = best;
	return count;
}

/* Sets and cursors as of now. Return: 0; TND_E_PEER_DEAD. */
static int look_at_readers(struct tnd_channel *channel, struct tnd_error *reterr)
{
	uint64_t corrupt, left;
	int rc;

	do {
		rc = tnd__writer_look(channel, reterr);
		if (rc < 0)
			return rc;
		pthread_mutex_lock(&channel->lock);
		corrupt = tnd__writer_refresh(channel, &left);
		pthread_mutex_unlock(&channel->lock);
		tnd__places_drop(channel, corrupt, TND__PLACE_EVICTED);
		tnd__places_drop(channel, left, TND__PLACE_LEFT);
	} while (corrupt | left);
	return 0;
}

static int look_for_free(struct tnd__wait *wait, struct tnd_error *reterr)
{
	uint32_t index;
	int rc = look_at_readers(wait->channel, reterr);

	return rc < 0 ? rc : find_free(wait->channel, 0, &index) > 0;
}

/* -- making and retiring -- */

static void retire(struct tnd_channel *channel, uint32_t index)
{
	struct tnd__host_slab *slab = slab_at(channel, index);
	struct tnd__slab_entry *entry = &channel->shared.header->slabs[index];
	struct tnd_slab *memory = slab->slab;

	/* relaxed: for stat only. */
	atomic_store_explicit(&entry->bytes, 0, memory_order_relaxed);
	atomic_store_explicit(&entry->serial, 0, memory_order_relaxed);
	pthread_mutex_lock(&channel->lock);
	tell(channel, index, TND__NOTE_RETIRE);
	slab->slab = NULL;
	pthread_mutex_unlock(&channel->lock);
	tnd__slab_discard(memory);
}

/* Retires one free slab, the smallest. Return: whether there was one. */
static bool retire_one(struct tnd_channel *channel)
{
	uint32_t index;

	if (!find_free(channel, 0, &index))
		return false;
	retire(channel, index);
	return true;
}

/* Pages for the first `bytes`. `headroom`: of which they are a part. */
static int take_pages(struct tnd__host_slab *slab, uint64_t bytes, struct tnd__headroom *headroom,
		      struct tnd_error *reterr)
{
	uint64_t to = TND__MIN(tnd__round_up(bytes, TND__PAGE), slab->bytes);
	int rc;

	if (to <= slab->taken)
		return 0;
	rc = tnd__headroom_take(headroom, tnd_slab_fd(slab->slab), slab->taken, to, reterr);
	if (rc == 0)
		slab->taken = to;
	return rc;
}

static int say_no_slab(const struct tnd_channel *channel, int code, uint64_t bytes,
		       struct tnd_error *reterr)
{
	return tnd__fail_plain(reterr, code,
			       "expected a slab of %" PRIu64
			       " bytes for an object of channel '%s', found %s: %s; raise that "
			       "limit, or send it in parts",
			       bytes, channel->shared.name, tnd_error_name(code),
			       tnd_strerror(code));
}

/* Memory of `capacity` for `slab`, with pages for `bytes`, sealed. Return: 0; -EAGAIN (budget). */
static int make_memory(struct tnd_channel *channel, struct tnd__host_slab *slab, uint64_t bytes,
		       uint64_t capacity, struct tnd_error *reterr)
{
	struct tnd_charge_opts how = {.struct_bytes = sizeof(how), .flags = TND_CHARGE_F_TRY};
	struct tnd__headroom headroom;
	struct stat stat;
	char what[128];
	int rc;

	snprintf(what, sizeof(what), "a slab of channel '%s'", channel->shared.name);
	rc = tnd__headroom_file(capacity, what, reterr);
	if (rc < 0)
		return rc;
	tnd__headroom_open(&headroom, capacity, what);
	/* All of it: on huge pages the pool takes it at once. */
	rc = tnd__headroom_check(&headroom, reterr);
	if (rc < 0)
		goto close_headroom;
	rc = tnd_slab_acquire(channel->slabs->pool, capacity, what, &how, &slab->slab);
	if (rc < 0) {
		say_no_slab(channel, rc, capacity, reterr);
		goto close_headroom;
	}
	slab->taken = 0;
	slab->bytes = capacity;
	if (fstat(tnd_slab_fd(slab->slab), &stat) == 0)
		slab->bytes = (uint64_t)stat.st_size;
	rc = take_pages(slab, bytes, &headroom, reterr);
	if (rc == 0)
		rc = tnd__failpoint("channel.slab-seal");
	if (rc == 0 && (madvise(tnd_slab_data(slab->slab), slab->bytes, MADV_DONTFORK) < 0 ||
			fcntl(tnd_slab_fd(slab->slab), F_ADD_SEALS, TND__SLAB_SEALS) < 0))
		rc = -errno;
	if (rc < 0) {
		say_no_slab(channel, rc, capacity, rc == TND_E_HEADROOM ? NULL : reterr);
		tnd__slab_discard(slab->slab);
	}

close_headroom:
	tnd__headroom_close(&headroom);
	return rc;
}

/*
 * A new slab at `index`, larger than needed if that can be had. Return: 0; -EAGAIN (the budget has
 * nothing now); TND_E_BUDGET; TND_E_HEADROOM; -errno.
 */
static int make(struct tnd_channel *channel, uint32_t index, uint64_t bytes,
		struct tnd_error *reterr)
{
	struct tnd__host_slab *slab = slab_at(channel, index);
	struct tnd__slab_entry *entry = &channel->shared.header->slabs[index];
	uint64_t most = TND__MAX(bytes, channel->shared.max_object_bytes);
	struct tnd__host_slab made = {0};
	int rc;

	rc = make_memory(channel, &made, bytes,
			 tnd__round_up(TND__MIN(bytes + bytes / 2, most), TND__PAGE), NULL);
	if (rc < 0)
		rc = make_memory(channel, &made, bytes, tnd__round_up(bytes, TND__PAGE), reterr);
	if (rc < 0)
		return rc;
	pthread_mutex_lock(&channel->lock);
	slab->serial = ++channel->slabs->serials;
	slab->bytes = made.bytes;
	slab->taken = made.taken;
	memset(slab->told, 0, sizeof(slab->told));
	atomic_store_explicit(&slab->state, FREE, memory_order_relaxed);
	slab->slab = made.slab;
	pthread_mutex_unlock(&channel->lock);
	/* relaxed: for stat only. */
	atomic_store_explicit(&entry->bytes, slab->bytes, memory_order_relaxed);
	atomic_store_explicit(&entry->serial, slab->serial, memory_order_relaxed);
	return 0;
}

/* -- taking -- */

static int top_up(struct tnd_channel *channel, struct tnd__host_slab *slab, uint64_t bytes,
		  struct tnd_error *reterr)
{
	struct tnd__headroom headroom;
	char what[128];
	int rc;

	if (bytes <= slab->taken)
		return 0;
	snprintf(what, sizeof(what), "a slab of channel '%s'", channel->shared.name);
	tnd__headroom_open(&headroom, bytes - slab->taken, what);
	rc = take_pages(slab, bytes, &headroom, reterr);
	tnd__headroom_close(&headroom);
	return rc;
}

static uint32_t find_vacant(const struct tnd_channel *channel)
{
	uint32_t index = 0;

	while (index < TND__SLABS_MAX && channel->slabs->host[index].slab)
		index++;
	return index;
}

/*
 * One try. Return: 0; -EAGAIN: nothing is free, and `*ret_short`: the budget, rather than the
 * table, has no room.
 */
static int try_take(struct tnd_channel *channel, uint64_t bytes, uint32_t *ret_index,
		    bool *ret_short, struct tnd_error *reterr)
{
	uint32_t index;
	int rc = look_at_readers(channel, reterr);

	if (rc < 0)
		return rc;
	find_free(channel, bytes, &index);
	*ret_short = false;
	while (index == TND__SLABS_MAX) {
		uint32_t vacant = find_vacant(channel);

		rc = -EAGAIN;
		if (vacant < TND__SLABS_MAX)
			rc = make(channel, vacant, bytes, reterr);
		if (rc == 0) {
			index = vacant;
		} else if (rc == TND_E_BUDGET || !retire_one(channel)) {
			*ret_short = vacant < TND__SLABS_MAX;
			return rc;
		}
	}
	rc = top_up(channel, slab_at(channel, index), bytes, reterr);
	if (rc < 0)
		return rc;
	pthread_mutex_lock(&channel->lock);
	tell(channel, index, TND__NOTE_HERE);
	pthread_mutex_unlock(&channel->lock);
	atomic_store_explicit(&slab_at(channel, index)->state, TAKEN, memory_order_relaxed);
	*ret_index = index;
	return 0;
}

int tnd__slabs_take(struct tnd_channel *channel, uint64_t bytes, int64_t deadline_ns,
		    uint32_t *ret_index, struct tnd_error *reterr)
{
	struct tnd__wait wait = {.channel = channel,
				 .look = look_for_free,
				 .what = "a slab for a large object",
				 .need = bytes};
	bool budget_short = false;

	for (;;) {
		int64_t until = deadline_ns, slice;
		int rc = try_take(channel, bytes, ret_index, &budget_short, reterr);

		if (rc != -EAGAIN)
			return rc;
		if (budget_short && deadline_ns > 0) {
			slice = tnd__now_ns() + BUDGET_LOOK_NS;
			until = TND__MIN(slice, deadline_ns);
		}
		rc = tnd__channel_wait(&wait, until, reterr);
		if (rc < 0 && (rc != -ETIMEDOUT || until == deadline_ns))
			return rc;
	}
}

void *tnd__slabs_data(struct tnd_channel *channel, uint32_t index)
{
	return tnd_slab_data(slab_at(channel, index)->slab);
}

uint64_t tnd__slabs_place(struct tnd_channel *channel, uint32_t index)
{
	return tnd__slab_place(slab_at(channel, index)->serial, index);
}

void tnd__slabs_sent(struct tnd_channel *channel, uint32_t index, uint64_t number)
{
	struct tnd__host_slab *slab = slab_at(channel, index);

	slab->number = number;
	/* Pairs with is_free(): commit may be another thread's. */
	atomic_store_explicit(&slab->state, SENT, memory_order_release);
}

void tnd__slabs_put_back(struct tnd_channel *channel, uint32_t index)
{
	/* Pairs with is_free(): abort may be another thread's. */
	atomic_store_explicit(&slab_at(channel, index)->state, FREE, memory_order_release);
}
