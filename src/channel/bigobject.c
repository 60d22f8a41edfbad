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
 * are written (slabmake.c). Readers get the descriptor on the socket when it is made or when they
 * attach, so that they have it even if this process closes or dies right after the object was
 * published. Where that message was lost (no memory for it), they ask.
 *
 * Free again: the cursor of a reader says that it has borrowed or copied the object; a borrow holds
 * a lease in the control segment, added before the cursor passes the object. So cursors are looked
 * at first and leases second. Those of readers that are not in the set (dead, left, given up) do
 * not count. But one that lives and was given up may go on to look at what it has borrowed: what
 * it had not let go of is spoilt, and is retired when it comes free for the others.
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
#include <inttypes.h>

#include "bigobject.h"

#define BUDGET_LOOK_NS INT64_C(10000000)

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
	slabs->pagemap_fd = -1;
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
	tnd__packet_make(packet, TND__PACKET_SLAB, note, sizeof(*note));
	packet->fd_count = fd >= 0;
	packet->fds[0] = fd;
}

/* -- telling readers -- */

static struct tnd__slab_note note_of(struct tnd_channel *channel, uint32_t index, uint32_t what)
{
	const struct tnd__host_slab *slab = tnd__host_slab(channel, index);

	return (struct tnd__slab_note){slab->serial, slab->bytes, index, what};
}

void tnd__slab_tell(struct tnd_channel *channel, uint32_t index, uint32_t what)
{
	struct tnd__host_slab *slab = tnd__host_slab(channel, index);
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
		if (tnd__host_slab(channel, i)->slab)
			tnd__slab_tell(channel, i, TND__NOTE_HERE);
	pthread_mutex_unlock(&channel->lock);
}

void tnd__slabs_serve(struct tnd_channel *channel, struct tnd__peer *peer,
		      const struct tnd__packet *packet)
{
	struct tnd__slab_note note;
	struct tnd__packet answer;
	uint32_t place = (uint32_t)tnd__peer_tag(peer);
	int fd = -1;

	if (!tnd__packet_read(packet, &note, sizeof(note)))
		return;
	if (note.what != TND__NOTE_ASK || note.index >= TND__SLABS_MAX)
		return;
	pthread_mutex_lock(&channel->lock);
	if (tnd__host_slab(channel, note.index)->slab &&
	    tnd__host_slab(channel, note.index)->serial == note.serial) {
		note = note_of(channel, note.index, TND__NOTE_HERE);
		fd = tnd_slab_fd(tnd__host_slab(channel, note.index)->slab);
		if (place < TND__PLACES_MAX)
			tnd__host_slab(channel, note.index)->told[place] =
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

bool tnd__slab_is_free(const struct tnd_channel *channel, uint32_t index)
{
	const struct tnd__host_slab *slab = &channel->slabs->host[index];
	/* Pairs with tnd__slabs_sent() and tnd__slabs_put_back(). */
	uint32_t state = atomic_load_explicit(&slab->state, memory_order_acquire);

	if (!slab->slab || state == TND__SLAB_TAKEN)
		return false;
	if (state == TND__SLAB_FREE)
		return true;
	if (channel->writer.freed - atomic_load_explicit(&slab->number, memory_order_relaxed) - 1 >
	    UINT64_MAX / 2)
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

/*
 * Whether a slab of `slab_bytes` is for an object of `bytes` (0: any). Where there is a standard
 * size, what fits it does not take a larger one: a reader that keeps it would keep far more than it
 * has.
 */
static bool suits(const struct tnd_channel *channel, uint64_t slab_bytes, uint64_t bytes)
{
	uint64_t standard = tnd__slab_pool_standard(channel->slabs->pool);

	if (bytes && bytes <= standard && slab_bytes > standard)
		return false;
	return slab_bytes >= bytes;
}

/* Return: how many are free; *ret_index: the smallest that suits `bytes`, else TND__SLABS_MAX. */
static uint32_t find_free(const struct tnd_channel *channel, uint64_t bytes, uint32_t *ret_index)
{
	const struct tnd__host_slab *host = channel->slabs->host;
	uint32_t count = 0, best = TND__SLABS_MAX;

	for (uint32_t i = 0; i < TND__SLABS_MAX; i++) {
		if (!tnd__slab_is_free(channel, i))
			continue;
		count++;
		if (suits(channel, host[i].bytes, bytes) &&
		    (best == TND__SLABS_MAX || host[i].bytes < host[best].bytes))
			best = i;
	}
	*ret_index = best;
	return count;
}

static bool retire_spoilt(struct tnd_channel *channel)
{
	/* acquire: pairs with tnd__slabs_given_up(). */
	uint64_t spoilt = atomic_load_explicit(&channel->slabs->spoilt, memory_order_acquire);
	bool any = false;

	for (; spoilt; spoilt &= spoilt - 1) {
		uint32_t index = (uint32_t)__builtin_ctzll(spoilt);

		if (!tnd__slab_is_free(channel, index))
			continue;
		tnd__slab_retire(channel, index);
		any = true;
	}
	return any;
}

int tnd__slabs_look(struct tnd_channel *channel, bool *ret_retired, struct tnd_error *reterr)
{
	uint64_t corrupt, left;
	bool retired;
	int rc;

	do {
		rc = tnd__writer_look(channel, reterr);
		pthread_mutex_lock(&channel->lock);
		corrupt = tnd__writer_refresh(channel, &left);
		pthread_mutex_unlock(&channel->lock);
		tnd__places_drop(channel, corrupt, TND__PLACE_EVICTED);
		tnd__places_drop(channel, left, TND__PLACE_LEFT);
	} while (corrupt | left);
	retired = retire_spoilt(channel);
	if (ret_retired)
		*ret_retired = retired;
	return rc;
}

static int look_for_free(struct tnd__wait *wait, struct tnd_error *reterr)
{
	uint32_t index;
	bool retired; /* which makes room in the budget */
	int rc = tnd__slabs_look(wait->channel, &retired, reterr);

	return rc < 0 ? rc : retired || find_free(wait->channel, 0, &index) > 0;
}

/* Of those that are there, free or not. */
static bool any_suits(const struct tnd_channel *channel, uint64_t bytes)
{
	const struct tnd__host_slab *host = channel->slabs->host;
	uint32_t index = 0;

	while (index < TND__SLABS_MAX &&
	       !(host[index].slab && suits(channel, host[index].bytes, bytes)))
		index++;
	return index < TND__SLABS_MAX;
}

static int look_for_used(struct tnd__wait *wait, struct tnd_error *reterr)
{
	struct tnd_channel *channel = wait->channel;
	uint32_t index;
	int rc = tnd__slabs_look(channel, NULL, reterr);

	if (rc < 0)
		return rc;
	find_free(channel, wait->need, &index);
	if (index < TND__SLABS_MAX)
		return 1;
	if (any_suits(channel, wait->need))
		return 0;
	return tnd__fail_plain(reterr, -ETIMEDOUT,
			       "channel '%s': expected a slab of %" PRIu64
			       " bytes to use again, found none that large: make one",
			       channel->shared.name, wait->need);
}

void tnd__slabs_given_up(struct tnd_channel *channel, uint32_t place)
{
	struct tnd__control *control = channel->shared.control;
	uint64_t published, cursor, spoilt = 0;

	if (!channel->slabs)
		return;
	/*
	 * After E1, and before all that follows: a reader that has seen itself in its seat after it
	 * borrowed had taken its lease, of an object that was published, before E1.
	 */
	published = atomic_load_explicit(&channel->shared.header->published, memory_order_seq_cst);
	cursor = atomic_load_explicit(&control->places[place].cursor, memory_order_seq_cst);
	for (uint32_t i = 0; i < TND__SLABS_MAX; i++) {
		const struct tnd__host_slab *slab = tnd__host_slab(channel, i);
		uint64_t number;

		/* acquire: pairs with tnd__slabs_sent(). */
		if (!slab->slab ||
		    atomic_load_explicit(&slab->state, memory_order_acquire) != TND__SLAB_SENT)
			continue;
		number = atomic_load_explicit(&slab->number, memory_order_relaxed);
		/* With a cursor that is nonsense (beyond `published`): all of them. */
		if (number - cursor < published - cursor ||
		    atomic_load_explicit(&control->leases[place][i], memory_order_seq_cst))
			spoilt |= UINT64_C(1) << i;
	}
	/* release: pairs with retire_spoilt(), whose thread sees the new sets after E3. */
	atomic_fetch_or_explicit(&channel->slabs->spoilt, spoilt, memory_order_release);
}

/* -- taking -- */

/* Retires one free slab, the smallest. Return: whether there was one. */
static bool retire_one(struct tnd_channel *channel)
{
	uint32_t index;

	if (!find_free(channel, 0, &index))
		return false;
	tnd__slab_retire(channel, index);
	return true;
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
static int try_take(struct tnd_channel *channel, const struct tnd__ask *ask, uint32_t *ret_index,
		    bool *ret_short, struct tnd_error *reterr)
{
	uint64_t bytes = TND__MAX(ask->bytes, 1);
	uint32_t index;
	int rc = tnd__slabs_look(channel, NULL, reterr);

	if (rc < 0)
		return rc;
	find_free(channel, bytes, &index);
	*ret_short = false;
	if (ask->reuse && index == TND__SLABS_MAX)
		return -EAGAIN;
	channel->slabs->overrun = ask->overrun;
	while (index == TND__SLABS_MAX) {
		uint32_t vacant = find_vacant(channel);

		rc = -EAGAIN;
		if (vacant < TND__SLABS_MAX)
			rc = tnd__slab_make(channel, vacant, bytes, reterr);
		if (rc == 0) {
			index = vacant;
		} else if (rc == TND_E_BUDGET || !retire_one(channel)) {
			*ret_short = vacant < TND__SLABS_MAX;
			return rc;
		}
	}
	rc = tnd__slab_top_up(channel, index, bytes, reterr);
	if (rc < 0)
		return rc;
	pthread_mutex_lock(&channel->lock);
	tnd__slab_tell(channel, index, TND__NOTE_HERE);
	pthread_mutex_unlock(&channel->lock);
	atomic_store_explicit(&tnd__host_slab(channel, index)->state, TND__SLAB_TAKEN,
			      memory_order_relaxed);
	*ret_index = index;
	return 0;
}

int tnd__slabs_take(struct tnd_channel *channel, const struct tnd__ask *ask, int64_t deadline_ns,
		    uint32_t *ret_index, struct tnd_error *reterr)
{
	struct tnd__wait wait = {.channel = channel,
				 .look = ask->reuse ? look_for_used : look_for_free,
				 .what = "a slab for a large object",
				 .need = ask->bytes};
	bool budget_short = false;

	for (;;) {
		int64_t until = deadline_ns, slice;
		int rc = try_take(channel, ask, ret_index, &budget_short, reterr);

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
	return tnd_slab_data(tnd__host_slab(channel, index)->slab);
}

uint64_t tnd__slabs_place(struct tnd_channel *channel, uint32_t index)
{
	return tnd__slab_place(tnd__host_slab(channel, index)->serial, index);
}

void tnd__slabs_sent(struct tnd_channel *channel, uint32_t index, uint64_t number)
{
	struct tnd__host_slab *slab = tnd__host_slab(channel, index);

	atomic_store_explicit(&slab->number, number, memory_order_relaxed);
	/* Pairs with tnd__slab_is_free(): commit may be another thread's. */
	atomic_store_explicit(&slab->state, TND__SLAB_SENT, memory_order_release);
}

void tnd__slabs_put_back(struct tnd_channel *channel, uint32_t index)
{
	/* Pairs with tnd__slab_is_free(): abort may be another thread's. */
	atomic_store_explicit(&tnd__host_slab(channel, index)->state, TND__SLAB_FREE,
			      memory_order_release);
}
