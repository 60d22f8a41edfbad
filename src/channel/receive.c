/* SPDX-License-Identifier: Apache-2.0 */
/*
 * receive.c - the readers' data path
 *
 *         cursor             next          published
 *           v                 v                v
 *   --------+-----------------+----------------+------
 *    given  |  borrowed, or   |  to come       |
 *    back   |  released early |                |
 *
 * The cursor moves over what is released from the oldest on; the writer frees what is below it. An
 * object by slab is done with for the ring as soon as it is borrowed: it is held by its slab's
 * lease.
 *
 * While nothing is borrowed, nobody but the receiving thread touches any of this and there is no
 * lock. Else release may run in other threads: all of it is under `lock`.
 *
 * Nothing in the data segment is trusted: a descriptor is loaded once, then checked. The pairs of
 * memory orders are listed in wait.c.
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "bulk.h"
#include "channel_internal.h"

/* Whether the writer has given this reader up. */
static bool evicted(const struct tnd_channel *channel)
{
	const struct tnd__seat *seat = &channel->shared.header->seats[channel->reader.place];

	/* After the reads of the object; pairs with E1. */
	atomic_thread_fence(memory_order_acquire);
	return atomic_load_explicit(&seat->state, memory_order_seq_cst) != TND__PLACE_LIVE ||
	       atomic_load_explicit(&seat->generation, memory_order_relaxed) !=
		       channel->reader.generation;
}

static int say_evicted(struct tnd_channel *channel, struct tnd_error *reterr)
{
	return tnd__fail_plain(reterr, TND_E_EVICTED,
			       "channel '%s': the writer has given the reader of rank %" PRIu32
			       " up: close, and attach again",
			       channel->shared.name, channel->reader.rank);
}

static int say_over(struct tnd_channel *channel, int code, struct tnd_error *reterr)
{
	return tnd__fail_plain(
		reterr, code,
		"channel '%s': the writer (pid %" PRIu32 ") %s, and all that it sent is read",
		channel->shared.name, channel->shared.writer_pid,
		code == TND_E_CLOSED ? "has closed" : "died, or gave the channel up");
}

/* R1: whether there is an object. */
static bool there(struct tnd_channel *channel)
{
	struct tnd__reader *reader = &channel->reader;

	if (reader->known != reader->next)
		return true;
	/* R1: pairs with W3. As S3 it comes after S2 in the order of all seq_cst operations. */
	reader->known =
		atomic_load_explicit(&channel->shared.header->published, memory_order_seq_cst);
	return reader->known != reader->next;
}

/* What comes last is looked at first: what was sent before it must be read. */
static int look_for_object(struct tnd__wait *wait, struct tnd_error *reterr)
{
	struct tnd_channel *channel = wait->channel;
	struct tnd__reader *reader = &channel->reader;
	/* C1: pairs with the writer's close. P1: with its end, seen by the service thread. */
	bool closed = atomic_load_explicit(&channel->shared.header->closed, memory_order_seq_cst) !=
			      TND__OPEN ||
		      atomic_load_explicit(&reader->writer_left, memory_order_seq_cst);
	bool dead = atomic_load_explicit(&reader->writer_dead, memory_order_seq_cst);

	if (there(channel))
		return 1;
	if (closed)
		return say_over(channel, TND_E_CLOSED, reterr);
	if (evicted(channel))
		return say_evicted(channel, reterr);
	if (dead)
		return say_over(channel, TND_E_PEER_DEAD, reterr);
	return 0;
}

static int say_corrupt(struct tnd_channel *channel, const char *what, uint64_t found, uint64_t most,
		       struct tnd_error *reterr)
{
	return tnd__fail_plain(reterr, TND_E_CORRUPT,
			       "channel '%s': object %" PRIu64 ": %s is %" PRIu64
			       ", expected %s%" PRIu64 ": the writer is broken, close",
			       channel->shared.name, channel->reader.next, what, found,
			       what[0] == 'n' ? "" : "at most ", most);
}

/* R2: the descriptor of object `next`. */
static int read_descriptor(struct tnd_channel *channel, struct tnd__descriptor *ret_descriptor,
			   struct tnd_error *reterr)
{
	const struct tnd__segments *shared = &channel->shared;
	uint64_t next = channel->reader.next;
	/* Volatile: loaded once, whatever happens to it meanwhile. */
	volatile struct tnd__descriptor *source = &shared->descriptors[tnd__slot(channel, next)];
	/* Relaxed: R1 comes before. */
	uint64_t number = atomic_load_explicit(&source->number, memory_order_relaxed);
	struct tnd__descriptor found = {.bytes = source->bytes, .place = source->place};

	if (number != next)
		return evicted(channel) ? say_evicted(channel, reterr)
					: say_corrupt(channel, "number", number, next, reterr);
	*ret_descriptor = found;
	if (found.place & TND__OBJECT_SLAB)
		return found.bytes <= shared->max_object_bytes
			       ? 0
			       : say_corrupt(channel, "length by slab", found.bytes,
					     shared->max_object_bytes, reterr);
	if (found.bytes > shared->max_bytes)
		return say_corrupt(channel, "length", found.bytes, shared->max_bytes, reterr);
	if (found.place >= shared->arena_bytes || found.place % TND__ALIGN)
		return say_corrupt(channel, "place", found.place, shared->arena_bytes, reterr);
	return 0;
}

static int wait_for_object(struct tnd_channel *channel, int64_t deadline_ns,
			   struct tnd__descriptor *ret_descriptor, struct tnd_error *reterr)
{
	struct tnd__wait wait = {.channel = channel, .look = look_for_object, .what = "an object"};
	int rc;

	(void)tnd__failpoint("channel.R1");
	if (tnd__is_told(channel))
		return tnd__bulk_told(channel, reterr);
	if (!there(channel)) {
		rc = tnd__channel_wait(&wait, deadline_ns, reterr);
		if (rc < 0)
			return rc;
	}
	(void)tnd__failpoint("channel.R2");
	return read_descriptor(channel, ret_descriptor, reterr);
}

/* R3 and on: the writer may have everything below `cursor`. */
static void give_back(struct tnd_channel *channel, uint64_t cursor)
{
	struct tnd__reader *reader = &channel->reader;

	/* relaxed: for our own threads, who look under `lock` or only say it. */
	atomic_store_explicit(&reader->cursor, cursor, memory_order_relaxed);
	(void)tnd__failpoint("channel.R3");
	/*
	 * R3: the reads of R2 are done; pairs with W1. seq_cst, so that R4 comes after it; pairs
	 * with V3.
	 */
	atomic_store_explicit(&channel->shared.control->places[reader->place].cursor, cursor,
			      memory_order_seq_cst);
	tnd__wake_writer(channel);
}

/* Marks object `number` as done and moves the cursor over what is done. Under lock. */
static void finish(struct tnd_channel *channel, uint64_t number)
{
	struct tnd__reader *reader = &channel->reader;
	uint64_t first = atomic_load_explicit(&reader->cursor, memory_order_relaxed),
		 cursor = first;

	reader->borrowed[tnd__slot(channel, number)] = TND__BORROW_DONE;
	while (cursor != reader->next &&
	       reader->borrowed[tnd__slot(channel, cursor)] == TND__BORROW_DONE)
		reader->borrowed[tnd__slot(channel, cursor++)] = TND__BORROW_NONE;
	if (cursor != first)
		give_back(channel, cursor);
}

static int make_borrowed(struct tnd_channel *channel, struct tnd_error *reterr)
{
	struct tnd__reader *reader = &channel->reader;

	if (reader->borrowed)
		return 0;
	if (tnd__failpoint("channel.alloc") == 0)
		reader->borrowed = calloc(channel->shared.slot_count, 1);
	return reader->borrowed
		       ? 0
		       : tnd__fail_plain(reterr, -ENOMEM, "channel '%s': no memory for borrows",
					 channel->shared.name);
}

/* Object `next` was borrowed; `held`: of the ring. */
static void step(struct tnd_channel *channel, bool held)
{
	struct tnd__reader *reader = &channel->reader;
	uint64_t number = reader->next;

	pthread_mutex_lock(&channel->lock);
	reader->next++;
	if (held) {
		reader->borrowed[tnd__slot(channel, number)] = TND__BORROW_OPEN;
		atomic_fetch_add_explicit(&reader->borrows, 1, memory_order_relaxed);
	} else {
		finish(channel, number);
	}
	pthread_mutex_unlock(&channel->lock);
}

static int borrow(struct tnd_channel *channel, int64_t deadline_ns, struct tnd_object *object,
		  struct tnd_error *reterr)
{
	struct tnd__descriptor descriptor;
	int rc = make_borrowed(channel, reterr);

	if (rc == 0)
		rc = wait_for_object(channel, deadline_ns, &descriptor, reterr);
	if (rc < 0)
		return rc;
	object->number = channel->reader.next - channel->shared.first_number;
	object->bytes = descriptor.bytes;
	if (descriptor.place & TND__OBJECT_SLAB) {
		rc = tnd__slabs_borrow(channel, descriptor.place, descriptor.bytes, deadline_ns,
				       object, reterr);
		if (rc < 0)
			return rc;
		step(channel, false);
	} else {
		object->data = channel->shared.arena + descriptor.place;
		object->ticket = channel->reader.next;
		step(channel, true);
	}
	/* It may have been overwritten before the look at the descriptor. */
	if (evicted(channel)) {
		tnd_channel_release(channel, object);
		return say_evicted(channel, reterr);
	}
	return 0;
}

int tnd_channel_borrow(struct tnd_channel *channel, int64_t deadline_ns,
		       struct tnd_object *ret_object, struct tnd_error *reterr)
{
	struct tnd_object object = {0};
	int rc = tnd__channel_enter(channel, false, reterr);

	if (rc < 0)
		return rc;
	rc = borrow(channel, deadline_ns, &object, reterr);
	tnd__channel_leave(channel);
	if (rc == 0)
		*ret_object = object;
	return rc;
}

int tnd_channel_release(struct tnd_channel *channel, const struct tnd_object *object)
{
	struct tnd__reader *reader = &channel->reader;
	int rc = TND_E_INVALID;

	if (tnd__channel_forked(channel))
		return TND_E_FORKED;
	if (channel->is_writer || !object)
		return TND_E_INVALID;
	if (tnd__slabs_is(channel, object)) {
		rc = tnd__slabs_release(channel, object);
	} else if (atomic_load_explicit(&reader->borrows, memory_order_acquire)) {
		pthread_mutex_lock(&channel->lock);
		uint64_t cursor = atomic_load_explicit(&reader->cursor, memory_order_relaxed);

		if (object->ticket - cursor < reader->next - cursor &&
		    reader->borrowed[tnd__slot(channel, object->ticket)] == TND__BORROW_OPEN) {
			finish(channel, object->ticket);
			/* Who finds none left sees all of the above. */
			atomic_fetch_sub_explicit(&reader->borrows, 1, memory_order_release);
			rc = 0;
		}
		pthread_mutex_unlock(&channel->lock);
	}
	return rc == 0 && evicted(channel) ? TND_E_EVICTED : rc;
}

static int say_too_long(struct tnd_channel *channel, uint64_t bytes, uint64_t capacity,
			struct tnd_error *reterr)
{
	return tnd__fail_plain(reterr, -EMSGSIZE,
			       "channel '%s': the next object has %" PRIu64
			       " bytes, the buffer %" PRIu64 ": give a larger one, or borrow it",
			       channel->shared.name, bytes, capacity);
}

/* An object by slab, copied out. */
static int copy_slab(struct tnd_channel *channel, const struct tnd__descriptor *descriptor,
		     void *buffer, int64_t deadline_ns, struct tnd_error *reterr)
{
	struct tnd_object object = {.bytes = descriptor->bytes};
	int rc = tnd__slabs_borrow(channel, descriptor->place, descriptor->bytes, deadline_ns,
				   &object, reterr);

	if (rc < 0)
		return rc;
	memcpy(buffer, object.data, descriptor->bytes);
	tnd__slabs_release(channel, &object);
	return 0;
}

/* Object `next` was copied. */
static int step_over(struct tnd_channel *channel, struct tnd_error *reterr)
{
	struct tnd__reader *reader = &channel->reader;
	bool gone = evicted(channel);

	if (atomic_load_explicit(&reader->borrows, memory_order_acquire)) {
		step(channel, false);
	} else {
		reader->next++;
		give_back(channel, reader->next);
	}
	return gone ? say_evicted(channel, reterr) : 0;
}

int tnd_channel_recv(struct tnd_channel *channel, void *buffer, uint64_t capacity,
		     int64_t deadline_ns, uint64_t *ret_bytes, struct tnd_error *reterr)
{
	struct tnd__descriptor descriptor;
	int rc = tnd__channel_enter(channel, false, reterr);

	if (rc < 0)
		return rc;
	rc = wait_for_object(channel, deadline_ns, &descriptor, reterr);
	if (rc == 0 && descriptor.bytes > capacity) {
		rc = say_too_long(channel, descriptor.bytes, capacity, reterr);
		*ret_bytes = descriptor.bytes;
	} else if (rc == 0) {
		if (descriptor.place & TND__OBJECT_SLAB)
			rc = copy_slab(channel, &descriptor, buffer, deadline_ns, reterr);
		else if (descriptor.bytes)
			memcpy(buffer, channel->shared.arena + descriptor.place, descriptor.bytes);
		if (rc == 0)
			rc = step_over(channel, reterr);
		if (rc == 0)
			*ret_bytes = descriptor.bytes;
	}
	tnd__channel_leave(channel);
	return rc;
}
