/* SPDX-License-Identifier: Apache-2.0 */
/*
 * places.c - who reads: the writer's side
 *
 *                     attach                 goodbye
 *    RESERVED -----------------> LIVE ----------------------> LEFT ---.
 *       |                         |                                   | attach again,
 *       | its process ended       | its process ended                 | as a late joiner
 *       |                         v                                   |
 *       '----------------------> DEAD --- evict ---> EVICTED ---------+
 *       '------------- evict -------------------------^      FREE ----'
 *
 * States change under `lock`, by the service thread (packets, ends of processes) and by evict. Each
 * change of the sets ends with `generation`, by which the sending thread learns of it. The sealed
 * seat says the same to readers and to stat.
 *
 * A place is not given to another process while its last occupant may still write there: only after
 * its goodbye (`left`) or its end.
 */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "channel_internal.h"

static uint64_t bit(unsigned int place)
{
	return UINT64_C(1) << place;
}

static struct tnd__seat *seat_of(struct tnd_channel *channel, unsigned int i)
{
	return &channel->shared.header->seats[i];
}

static void set_state(struct tnd_channel *channel, unsigned int i, uint32_t state)
{
	channel->writer.places[i].state = state;
	/* E1, A4: pairs with evicted() of the reader. */
	atomic_store_explicit(&seat_of(channel, i)->state, state, memory_order_seq_cst);
}

/* E3, A1: pairs with W1. */
static void change_sets(struct tnd_channel *channel)
{
	atomic_fetch_add_explicit(&channel->writer.generation, 1, memory_order_seq_cst);
}

/* Everybody who sleeps looks again: E5. */
static void wake_all(struct tnd_channel *channel)
{
	(void)tnd__failpoint("channel.E5");
	tnd__poke_writer(channel);
	tnd__wake_readers(channel, true);
}

/* Takes place `i` out of the sets: E1 to E4. Under lock. */
static void take_out(struct tnd_channel *channel, unsigned int i, uint32_t state)
{
	struct tnd__writer *writer = &channel->writer;
	bool lives = writer->places[i].state == TND__PLACE_LIVE;

	set_state(channel, i, state);
	if (lives && state == TND__PLACE_EVICTED)
		tnd__slabs_given_up(channel, i);
	(void)tnd__failpoint("channel.E2");
	writer->reserved &= ~bit(i);
	writer->live &= ~bit(i);
	writer->dead &= ~bit(i);
	if (state == TND__PLACE_DEAD && channel->shared.on_dead == TND_CHANNEL_DEAD_ERROR)
		writer->dead |= bit(i);
	(void)tnd__failpoint("channel.E3");
	change_sets(channel);
	(void)tnd__failpoint("channel.E4");
	/* E4: pairs with S2. Its occupant may set it once more: one needless wake. */
	atomic_fetch_and_explicit(&channel->shared.control->sleepers, ~bit(i),
				  memory_order_seq_cst);
}

/* Whether every reserved place has had its reader; pairs with look_ready(). Under lock. */
static void tell_ready(struct tnd_channel *channel)
{
	if (!channel->writer.reserved)
		atomic_store_explicit(&channel->shared.header->ready, 1, memory_order_seq_cst);
}

/* Its occupant said that it will not write there any more; pairs with L1. */
static bool has_left(struct tnd_channel *channel, unsigned int i)
{
	return atomic_load_explicit(&channel->shared.control->places[i].left,
				    memory_order_acquire) == channel->writer.places[i].generation;
}

static int check_ranks(const struct tnd_channel_opts *opts, struct tnd_error *reterr)
{
	for (uint32_t i = 0; opts->reserved_ranks && i < opts->reserved_readers; i++) {
		if (opts->reserved_ranks[i] >= INT32_MAX)
			return tnd__fail_plain(reterr, TND_E_INVALID,
					       "reserved rank %" PRIu32
					       ": expected a number below %d",
					       opts->reserved_ranks[i], INT32_MAX);
		for (uint32_t k = 0; k < i; k++)
			if (opts->reserved_ranks[k] == opts->reserved_ranks[i])
				return tnd__fail_plain(reterr, TND_E_INVALID,
						       "rank %" PRIu32
						       " has two reserved places: name each once",
						       opts->reserved_ranks[i]);
	}
	return 0;
}

int tnd__places_init(struct tnd_channel *channel, const struct tnd_channel_opts *opts,
		     struct tnd_error *reterr)
{
	struct tnd__writer *writer = &channel->writer;
	int rc = check_ranks(opts, reterr);

	if (rc < 0)
		return rc;
	for (uint32_t i = 0; i < opts->reserved_readers; i++) {
		struct tnd__place *place = &writer->places[i];

		place->rank = opts->reserved_ranks ? opts->reserved_ranks[i] : i;
		place->owned = true;
		place->admitted = channel->shared.first_number;
		writer->reserved |= bit(i);
		atomic_store_explicit(&seat_of(channel, i)->rank, place->rank,
				      memory_order_relaxed);
		set_state(channel, i, TND__PLACE_RESERVED);
	}
	change_sets(channel);
	tell_ready(channel);
	return 0;
}

void tnd__places_close(struct tnd_channel *channel, bool goodbye)
{
	bool forked = tnd__channel_forked(channel);

	for (unsigned int i = 0; i < channel->shared.place_count; i++) {
		struct tnd__place *place = &channel->writer.places[i];
		struct tnd__peer *peer;

		/* Of a peer that goes just now, one closes: on_gone(), or we. */
		if (!forked)
			pthread_mutex_lock(&channel->lock);
		peer = place->peer;
		place->peer = NULL;
		if (!forked)
			pthread_mutex_unlock(&channel->lock);
		tnd__watch_close(place->watch);
		tnd__peer_close(peer, goodbye);
	}
}

/* -- admission -- */

/* Where `rank` may sit. Under lock. Return: the place; TND_E_PLACE, said. */
static int find_place(struct tnd_channel *channel, uint32_t rank, struct tnd_error *reterr)
{
	struct tnd__writer *writer = &channel->writer;
	int free_place = -1;

	for (unsigned int i = 0; i < channel->shared.place_count; i++) {
		struct tnd__place *place = &writer->places[i];
		bool vacant =
			has_left(channel, i) || (!place->peer && place->state != TND__PLACE_LIVE);

		if (place->state != TND__PLACE_FREE && place->rank == rank &&
		    (place->state == TND__PLACE_DEAD ? (writer->dead & bit(i)) != 0 : !vacant))
			return tnd__fail_plain(
				reterr, TND_E_PLACE, "channel '%s': rank %" PRIu32 " %s",
				channel->shared.name, rank,
				place->state == TND__PLACE_DEAD
					? "died: the writer must give it up before it comes again"
				: place->state == TND__PLACE_LIVE
					? "is attached already: use another rank, or close that one"
					: "was given up, and its process has not closed its "
					  "handle");
		if (place->owned && place->rank == rank)
			return (int)i;
		if (!place->owned && vacant && !(writer->dead & bit(i)) && free_place < 0)
			free_place = (int)i;
	}
	if (free_place >= 0)
		return free_place;
	return tnd__fail_plain(reterr, TND_E_PLACE,
			       "channel '%s': no place for rank %" PRIu32 ": of %" PRIu32
			       " places none is reserved for it or open and vacant",
			       channel->shared.name, rank, channel->shared.place_count);
}

/* A1 to A4. Under lock. */
static void seat_reader(struct tnd_channel *channel, unsigned int i, uint32_t rank)
{
	struct tnd__writer *writer = &channel->writer;
	struct tnd__place *place = &writer->places[i];
	struct tnd__control *control = channel->shared.control;
	struct tnd__seat *seat = seat_of(channel, i);

	(void)tnd__failpoint("channel.A1");
	change_sets(channel);
	(void)tnd__failpoint("channel.A2");
	/*
	 * A2: pairs with W3. A send that has not seen A1 writes no object below this one; later
	 * ones wait for `lock`. A reserved place has been counted from the first object on.
	 */
	if (place->state != TND__PLACE_RESERVED)
		place->admitted = atomic_load_explicit(&channel->shared.header->published,
						       memory_order_seq_cst);
	place->generation++;
	place->rank = rank;
	(void)tnd__failpoint("channel.A3");
	/* A3: A4 publishes it to who looks at the seat, `lock` to the writer, A5 to the reader. */
	for (unsigned int slab = 0; slab < TND__SLABS_MAX; slab++)
		atomic_store_explicit(&control->leases[i][slab], 0, memory_order_relaxed);
	atomic_store_explicit(&control->places[i].left, 0, memory_order_relaxed);
	atomic_store_explicit(&control->places[i].cursor, place->admitted, memory_order_seq_cst);
	atomic_store_explicit(&seat->rank, rank, memory_order_relaxed);
	atomic_store_explicit(&seat->generation, place->generation, memory_order_relaxed);
	atomic_store_explicit(&seat->admitted, place->admitted, memory_order_relaxed);
	(void)tnd__failpoint("channel.A4");
	set_state(channel, i, TND__PLACE_LIVE);
	writer->reserved &= ~bit(i);
	writer->live |= bit(i);
}

int tnd__place_admit(struct tnd_channel *channel, uint32_t rank, struct tnd__peer *peer,
		     struct tnd__welcome *ret_welcome, struct tnd_error *reterr)
{
	struct tnd__peer *old_peer = NULL;
	struct tnd__watch *old_watch = NULL;
	int i;

	pthread_mutex_lock(&channel->lock);
	i = find_place(channel, rank, reterr);
	if (i >= 0) {
		struct tnd__place *place = &channel->writer.places[i];

		old_peer = place->peer;
		old_watch = place->watch;
		place->watch = NULL;
		place->peer = peer;
		place->pid = peer ? tnd__peer_pid(peer) : 0;
		atomic_store_explicit(&seat_of(channel, (unsigned int)i)->pid, (uint32_t)place->pid,
				      memory_order_relaxed);
		seat_reader(channel, (unsigned int)i, rank);
		tell_ready(channel);
		ret_welcome->place = (uint32_t)i;
		ret_welcome->generation = place->generation;
		if (peer)
			tnd__peer_set_tag(peer, (uint64_t)place->generation << 32 | (uint32_t)i);
	}
	pthread_mutex_unlock(&channel->lock);
	tnd__peer_close(old_peer, false);
	tnd__watch_close(old_watch);
	if (i < 0)
		return i;
	wake_all(channel);
	return 0;
}

static int on_hello(void *owner, struct tnd__peer *peer, struct tnd__packet *packet,
		    struct tnd__packet *reply, struct tnd_error *error)
{
	struct tnd_channel *channel = owner;
	struct tnd__hello hello;
	struct tnd__welcome welcome;
	int rc;

	if (packet->kind != TND__PACKET_CHANNEL || !tnd__packet_read(packet, &hello, sizeof(hello)))
		return tnd__fail_plain(error, TND_E_ADDRESS,
				       "channel '%s' listens there, expected by the caller is "
				       "something else: check the address",
				       channel->shared.name);
	if (hello.version != TND__LAYOUT_VERSION)
		return tnd__fail_plain(error, TND_E_VERSION,
				       "channel '%s': the writer has layout version %u, the reader "
				       "%" PRIu32 ": use the same tundish in both",
				       channel->shared.name, TND__LAYOUT_VERSION, hello.version);
	rc = tnd__place_admit(channel, hello.rank, peer, &welcome, error);
	if (rc < 0)
		return rc;
	tnd__peer_watch_lock(peer, channel->shared.control_fd, TND__LIFE_PLACE(welcome.place));
	tnd__packet_make(reply, TND__PACKET_WELCOME, &welcome, sizeof(welcome));
	reply->fd_count = 2;
	reply->fds[0] = channel->shared.data_fd;
	reply->fds[1] = channel->shared.control_fd;
	(void)tnd__failpoint("channel.A5");
	tnd__notice_greet(channel, peer);
	tnd__slabs_greet(channel);
	return 0;
}

static void on_packet(void *owner, struct tnd__peer *peer, struct tnd__packet *packet)
{
	struct tnd_channel *channel = owner;

	if (packet->kind == TND__PACKET_LOCKED)
		tnd__peer_lock_held(peer);
	if (packet->kind == TND__PACKET_SLAB && channel->slabs)
		tnd__slabs_serve(channel, peer, packet);
}

static void on_gone(void *owner, struct tnd__peer *peer, int how)
{
	struct tnd_channel *channel = owner;
	uint64_t tag = tnd__peer_tag(peer);
	unsigned int i = (uint32_t)tag;
	struct tnd__place *place = &channel->writer.places[i];
	bool ours;

	pthread_mutex_lock(&channel->lock);
	ours = place->peer == peer && place->generation == tag >> 32;
	if (ours) {
		if (place->state == TND__PLACE_LIVE)
			take_out(channel, i,
				 how == TND__GONE_LEFT ? TND__PLACE_LEFT : TND__PLACE_DEAD);
		tell_ready(channel);
	}
	pthread_mutex_unlock(&channel->lock);
	if (!ours)
		return;
	wake_all(channel);
	/* Once the place has no peer, close does not wait for us: only the peer is touched then. */
	pthread_mutex_lock(&channel->lock);
	ours = place->peer == peer;
	if (ours)
		place->peer = NULL;
	pthread_mutex_unlock(&channel->lock);
	if (ours)
		tnd__peer_close(peer, false);
}

const struct tnd__peer_ops tnd__host_ops = {on_hello, on_packet, on_gone};

/* -- giving up -- */

/* The log's callback is the caller's: not under lock. */
static void say_nonsense(struct tnd_channel *channel, uint64_t places)
{
	for (uint64_t left = places; left; left &= left - 1) {
		unsigned int i = (unsigned int)__builtin_ctzll(left);

		tnd__log(TND_LOG_WARNING,
			 "channel '%s': the cursor of rank %" PRIu32
			 " is none that its reader can have (%s): it is given up",
			 channel->shared.name,
			 atomic_load_explicit(&seat_of(channel, i)->rank, memory_order_relaxed),
			 tnd_error_name(TND_E_CORRUPT));
	}
}

void tnd__places_drop(struct tnd_channel *channel, uint64_t places, uint32_t state)
{
	uint64_t dropped = 0;

	if (!places)
		return;
	pthread_mutex_lock(&channel->lock);
	for (uint64_t left = places; left; left &= left - 1) {
		unsigned int i = (unsigned int)__builtin_ctzll(left);
		struct tnd__place *place = &channel->writer.places[i];

		/* Another occupant, meanwhile. */
		if (place->state != TND__PLACE_LIVE || place->generation != place->seen_generation)
			continue;
		take_out(channel, i, state);
		dropped |= bit(i);
	}
	pthread_mutex_unlock(&channel->lock);
	wake_all(channel);
	if (dropped && state == TND__PLACE_EVICTED)
		say_nonsense(channel, dropped);
}

int tnd_channel_evict(struct tnd_channel *channel, uint32_t rank)
{
	struct tnd__watch *watch = NULL;
	int rc = TND_E_PLACE;

	if (tnd__channel_forked(channel))
		return TND_E_FORKED;
	if (!channel->is_writer)
		return TND_E_INVALID;
	pthread_mutex_lock(&channel->lock);
	for (unsigned int i = 0; i < channel->shared.place_count && rc < 0; i++) {
		struct tnd__place *place = &channel->writer.places[i];
		uint64_t sets =
			channel->writer.reserved | channel->writer.live | channel->writer.dead;

		if (place->rank != rank || !(sets & bit(i)))
			continue;
		(void)tnd__failpoint("channel.E1");
		take_out(channel, i, TND__PLACE_EVICTED);
		tell_ready(channel);
		watch = place->watch;
		place->watch = NULL;
		rc = 0;
	}
	pthread_mutex_unlock(&channel->lock);
	tnd__watch_close(watch);
	if (rc == 0)
		wake_all(channel);
	return rc;
}

/* -- processes that have not come yet -- */

static void on_end(void *owner, uint64_t tag)
{
	struct tnd_channel *channel = owner;
	unsigned int i = (unsigned int)tag;
	bool died = false;

	pthread_mutex_lock(&channel->lock);
	if (channel->writer.places[i].state == TND__PLACE_RESERVED) {
		take_out(channel, i, TND__PLACE_DEAD);
		tell_ready(channel);
		died = true;
	}
	pthread_mutex_unlock(&channel->lock);
	if (died)
		wake_all(channel);
}

int tnd_channel_expect(struct tnd_channel *channel, uint32_t rank, int32_t pid,
		       struct tnd_error *reterr)
{
	struct tnd__watch *watch = NULL;
	int rc, place = -1;

	if (tnd__channel_forked(channel))
		return TND_E_FORKED;
	if (!channel->is_writer)
		return TND_E_INVALID;
	pthread_mutex_lock(&channel->lock);
	for (unsigned int i = 0; i < channel->shared.place_count; i++)
		if (channel->writer.places[i].owned && channel->writer.places[i].rank == rank)
			place = (int)i;
	pthread_mutex_unlock(&channel->lock);
	if (place < 0)
		return tnd__fail_plain(reterr, TND_E_PLACE,
				       "channel '%s': rank %" PRIu32
				       " has no reserved place: name it at creation",
				       channel->shared.name, rank);
	rc = tnd__watch_open(pid, on_end, channel, (uint64_t)place, &watch);
	if (rc < 0)
		return tnd__fail_plain(reterr, rc,
				       "channel '%s': process %" PRId32 " of rank %" PRIu32
				       " cannot be watched: %s",
				       channel->shared.name, pid, rank, tnd_strerror(rc));
	pthread_mutex_lock(&channel->lock);
	if (channel->writer.places[place].state == TND__PLACE_RESERVED &&
	    !channel->writer.places[place].watch) {
		channel->writer.places[place].watch = watch;
		watch = NULL;
	} else if (channel->writer.places[place].state != TND__PLACE_DEAD) {
		rc = tnd__fail_plain(reterr, TND_E_PLACE,
				     "channel '%s': rank %" PRIu32
				     " has attached or is expected already",
				     channel->shared.name, rank);
	}
	pthread_mutex_unlock(&channel->lock);
	tnd__watch_close(watch);
	return rc;
}

/* -- who is late -- */

/* How many objects are held for place `i`. Under lock. */
static uint64_t lag_of(struct tnd_channel *channel, unsigned int i)
{
	uint64_t published =
		atomic_load_explicit(&channel->shared.header->published, memory_order_relaxed);
	uint64_t cursor = atomic_load_explicit(&channel->shared.control->places[i].cursor,
					       memory_order_relaxed);

	if (channel->writer.reserved & bit(i))
		cursor = channel->writer.places[i].admitted;
	return published - cursor;
}

void tnd__places_late(struct tnd_channel *channel, char *out, size_t out_bytes)
{
	struct tnd__writer *writer = &channel->writer;
	uint64_t most = 0, published, first, bytes;
	unsigned int late = 0;
	char size[TND_SIZE_TEXT_MAX];
	int state;

	pthread_mutex_lock(&channel->lock);
	for (uint64_t left = writer->live | writer->reserved; left; left &= left - 1) {
		unsigned int i = (unsigned int)__builtin_ctzll(left);
		uint64_t lag = lag_of(channel, i);

		/* More than there can be: nonsense, of which the sending thread makes an end. */
		if (lag >= most && lag <= channel->shared.max_objects) {
			most = lag;
			late = i;
		}
	}
	published = writer->published;
	first = published - most;
	if (most == 0) {
		snprintf(out, out_bytes, "no reader is late%s",
			 writer->pending_first != writer->pending_end
				 ? ", open reservations hold the space"
				 : "");
	} else {
		bytes = writer->head_position -
			atomic_load_explicit(
				&channel->shared.descriptors[tnd__slot(channel, first)].position,
				memory_order_relaxed);
		state = tnd__process_state(writer->places[late].pid, NULL);
		tnd_size_format(bytes, size);
		snprintf(out, out_bytes,
			 "the reader of rank %" PRIu32 " (pid %" PRId32 ") is %" PRIu64
			 " objects (%s) behind, %s",
			 writer->places[late].rank, writer->places[late].pid, most, size,
			 writer->reserved & bit(late) ? "it has not attached"
			 : state == 'T'               ? "its process is stopped"
						      : "its process is alive");
	}
	pthread_mutex_unlock(&channel->lock);
}

size_t tnd__places_missing(struct tnd_channel *channel, char *out, size_t out_bytes)
{
	size_t count = 0, used = 0;

	out[0] = '\0';
	pthread_mutex_lock(&channel->lock);
	for (uint64_t left = channel->writer.reserved; left; left &= left - 1) {
		unsigned int i = (unsigned int)__builtin_ctzll(left);

		if (used < out_bytes)
			used += (size_t)snprintf(out + used, out_bytes - used, "%s%" PRIu32,
						 count ? ", " : "", channel->writer.places[i].rank);
		count++;
	}
	pthread_mutex_unlock(&channel->lock);
	return count;
}
