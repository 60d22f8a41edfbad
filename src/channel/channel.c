/* SPDX-License-Identifier: Apache-2.0 */
/*
 * channel.c - handles: create, attach, ready, info, close
 *
 *   create:  options -> budget -> segments -> places -> listener     attach:  connect -> segments
 *
 * What was taken is given back in the reverse order, by close, and by create and attach when they
 * fail on the way.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "segment.h"

#define DEFAULT_BYTES TND__MIB(4)
#define DEFAULT_OBJECTS 1024
#define DEFAULT_OBJECT_BYTES (UINT64_C(1) << 30)
#define DEFAULT_WARN_NS INT64_C(10000000000)

static int say_range(struct tnd_error *reterr, const char *what, uint64_t found, uint64_t least,
		     uint64_t most)
{
	return tnd__fail_plain(reterr, TND_E_INVALID,
			       "%s: expected %" PRIu64 " to %" PRIu64 ", found %" PRIu64
			       ": give a value in that range",
			       what, least, most, found);
}

static int say_struct(struct tnd_error *reterr, uint32_t found, size_t expected)
{
	return tnd__fail_plain(reterr, TND_E_INVALID,
			       "struct_bytes: expected %zu, found %" PRIu32
			       ": set it to the size of the struct",
			       expected, found);
}

static int check_opts(const struct tnd_channel_opts *opts, struct tnd_error *reterr)
{
	uint64_t readers = (uint64_t)opts->reserved_readers + opts->open_readers;

	if (!tnd__struct_ok(opts->struct_bytes, sizeof(*opts), sizeof(*opts)))
		return say_struct(reterr, opts->struct_bytes, sizeof(*opts));
	if (opts->flags)
		return say_range(reterr, "flags", opts->flags, 0, 0);
	if (readers < 1 || readers > TND_CHANNEL_READERS_MAX)
		return say_range(reterr, "reserved_readers + open_readers", readers, 1,
				 TND_CHANNEL_READERS_MAX);
	if (opts->max_bytes &&
	    (opts->max_bytes < TND_CHANNEL_BYTES_MIN || opts->max_bytes > TND__SEGMENT_BYTES_MAX))
		return say_range(reterr, "max_bytes", opts->max_bytes, TND_CHANNEL_BYTES_MIN,
				 TND__SEGMENT_BYTES_MAX);
	if (opts->max_objects > TND_CHANNEL_OBJECTS_MAX)
		return say_range(reterr, "max_objects", opts->max_objects, 1,
				 TND_CHANNEL_OBJECTS_MAX);
	if (opts->on_dead > TND_CHANNEL_DEAD_EVICT)
		return say_range(reterr, "on_dead", opts->on_dead, TND_CHANNEL_DEAD_ERROR,
				 TND_CHANNEL_DEAD_EVICT);
	if (opts->max_object_bytes > TND__SEGMENT_BYTES_MAX)
		return say_range(reterr, "max_object_bytes", opts->max_object_bytes, 0,
				 TND__SEGMENT_BYTES_MAX);
	return 0;
}

/* Where the first object's number starts: 0, or near an end of the range for tests. */
static uint64_t first_number(void)
{
#ifdef TND_FAILPOINTS
	const char *text = getenv("TUNDISH_CHANNEL_FIRST");

	if (text)
		return strtoull(text, NULL, 0);
#endif
	return 0;
}

static struct tnd_channel *make_handle(bool is_writer, uint64_t spin_ns, int64_t warn_ns)
{
	struct tnd_channel *channel =
		tnd__failpoint("channel.alloc") < 0 ? NULL : calloc(1, sizeof(*channel));

	if (!channel)
		return NULL;
	channel->is_writer = is_writer;
	channel->warn_ns = warn_ns ? warn_ns : DEFAULT_WARN_NS;
	channel->shared.data_fd = channel->shared.control_fd = -1;
	channel->forkmark = tnd__forkmark();
	pthread_mutex_init(&channel->lock, NULL);
	tnd__spin_init(&channel->spin, spin_ns);
	return channel;
}

static void free_handle(struct tnd_channel *channel)
{
	if (channel->budget) {
		tnd_budget_refund(channel->budget, channel->charged_bytes);
		tnd__budget_unref(channel->budget);
	}
	pthread_mutex_destroy(&channel->lock);
	free(channel);
}

static int charge(struct tnd_channel *channel, struct tnd_budget *budget, uint64_t bytes,
		  struct tnd_error *reterr)
{
	struct tnd_charge_opts how = {.struct_bytes = sizeof(how), .flags = TND_CHARGE_F_TRY};
	int rc;

	if (!budget)
		return 0;
	rc = tnd_budget_charge(budget, bytes, &how);
	if (rc < 0)
		return tnd__fail_plain(
			reterr, TND_E_BUDGET,
			"the channel takes %" PRIu64
			" bytes, which the budget does not have: lower max_bytes, or "
			"raise the budget",
			bytes);
	channel->budget = tnd__budget_ref(budget);
	channel->charged_bytes = bytes;
	return 0;
}

/* `abandoned`: without a word, as a death would. */
static void close_writer(struct tnd_channel *channel, bool forked, bool abandoned)
{
	struct tnd__writer *writer = &channel->writer;

	/* With a last word, a reader is to see that first: it learns of the close behind it. */
	if (!forked && !abandoned && channel->shared.header && !tnd__notice_last(channel)) {
		(void)tnd__failpoint("channel.C1");
		/* C1: after the last W3; pairs with look_for_object(). */
		atomic_store_explicit(&channel->shared.header->closed, TND__CLOSED,
				      memory_order_seq_cst);
		tnd__wake_readers(channel, true);
	}
	tnd__listener_close(writer->listener);
	tnd__places_close(channel, !forked && !abandoned);
	free(writer->pending);
}

/* Everything that a writer's handle has so far. */
static void undo_writer(struct tnd_channel *channel, bool forked, bool abandoned)
{
	close_writer(channel, forked, abandoned);
	tnd__slabs_close(channel, forked);
	tnd__segments_close(&channel->shared, true, forked);
	free_handle(channel);
}

static void settle_segments(const struct tnd_channel_opts *opts, struct tnd__segment_opts *ret_opts)
{
	uint64_t large = opts->max_object_bytes ? opts->max_object_bytes : DEFAULT_OBJECT_BYTES;

	*ret_opts = (struct tnd__segment_opts){
		.max_bytes = tnd__round_up(opts->max_bytes ? opts->max_bytes : DEFAULT_BYTES,
					   TND__ALIGN),
		.max_objects = opts->max_objects ? opts->max_objects : DEFAULT_OBJECTS,
		.max_object_bytes = opts->pool ? large : 0,
		.first_number = first_number(),
		.place_count = opts->reserved_readers + opts->open_readers,
		.on_dead = opts->on_dead,
		.name = opts->name ? opts->name : "channel",
	};
}

static void start_writer(struct tnd_channel *channel)
{
	struct tnd__writer *writer = &channel->writer;

	writer->published = writer->freed = channel->shared.first_number;
	/* Byte positions start as far from 0 as numbers do, so that both ends are tested. */
	writer->head_position = writer->freed_position =
		tnd__round_down(channel->shared.first_number, TND__ALIGN);
	writer->sampled_position = writer->head_position;
	writer->sampled_objects = writer->published;
	atomic_store_explicit(&channel->shared.control->head_position, writer->head_position,
			      memory_order_relaxed);
}

static int open_writer(struct tnd_channel *channel, const struct tnd_channel_opts *opts,
		       struct tnd_error *reterr)
{
	struct tnd__segment_opts how;
	int rc;

	settle_segments(opts, &how);
	rc = charge(channel, opts->budget, tnd__segments_bytes(&how), reterr);
	if (rc == 0)
		rc = tnd__segments_create(&how, &channel->shared, reterr);
	if (rc < 0)
		return rc;
	start_writer(channel);
	rc = tnd__places_init(channel, opts, reterr);
	if (rc == 0 && opts->pool)
		rc = tnd__slabs_host(channel, opts->pool, reterr);
	if (rc == 0)
		rc = tnd__life_lock(channel->shared.control_fd, TND__LIFE_WRITER);
	if (rc == 0)
		rc = tnd__listener_open(opts->address, &tnd__host_ops, channel,
					&channel->writer.listener, reterr);
	if (rc == 0)
		snprintf(channel->address, sizeof(channel->address), "%s",
			 tnd__listener_address(channel->writer.listener));
	return rc;
}

/* The service, which makes the mark by which a forked child is known as well. */
static int start_process(struct tnd_error *reterr)
{
	int rc = tnd__service_ref();

	return rc == 0 ? 0
		       : tnd__fail_plain(reterr, rc, "the service thread cannot start: %s",
					 tnd_strerror(rc));
}

int tnd_channel_create(const struct tnd_channel_opts *opts, struct tnd_channel **ret_channel,
		       struct tnd_error *reterr)
{
	struct tnd_channel *channel;
	int rc = check_opts(opts, reterr);

	if (rc == 0)
		rc = start_process(reterr);
	if (rc < 0)
		return rc;
	channel = make_handle(true, opts->spin_ns, opts->warn_ns);
	rc = channel ? open_writer(channel, opts, reterr)
		     : tnd__fail_plain(reterr, -ENOMEM,
				       "no memory for a channel's handle: free some");
	if (rc < 0) {
		if (channel)
			undo_writer(channel, false, false);
		tnd__service_unref();
		return rc;
	}
	*ret_channel = channel;
	return 0;
}

static void undo_reader(struct tnd_channel *channel, bool forked, bool abandoned)
{
	tnd__guest_leave(channel, !forked && !abandoned);
	tnd__slabs_close(channel, forked);
	if (!channel->lent)
		tnd__segments_close(&channel->shared, false, forked);
	free_handle(channel);
}

int tnd_channel_attach(const char *address, uint32_t rank,
		       const struct tnd_channel_attach_opts *opts, struct tnd_channel **ret_channel,
		       struct tnd_error *reterr)
{
	struct tnd_channel_attach_opts none = {.struct_bytes = sizeof(none)};
	struct tnd_channel *channel;
	int rc;

	if (!opts)
		opts = &none;
	if (!tnd__struct_ok(opts->struct_bytes, sizeof(*opts), sizeof(*opts)))
		return say_struct(reterr, opts->struct_bytes, sizeof(*opts));
	if (opts->flags & ~TND_CHANNEL_ATTACH_F_PRIVATE)
		return say_range(reterr, "flags", opts->flags, 0, TND_CHANNEL_ATTACH_F_PRIVATE);
	if (!address)
		return tnd__fail_plain(reterr, TND_E_ADDRESS,
				       "no address: give what tnd_channel_address says");
	if (rank >= INT32_MAX)
		return say_range(reterr, "rank", rank, 0, INT32_MAX - 1);
	rc = start_process(reterr);
	if (rc < 0)
		return rc;
	channel = make_handle(false, opts->spin_ns, opts->warn_ns);
	if (channel)
		channel->private_views = opts->flags & TND_CHANNEL_ATTACH_F_PRIVATE;
	rc = channel ? tnd__slabs_guest(channel) : -ENOMEM;
	if (rc < 0)
		rc = tnd__fail_plain(reterr, rc, "no memory for a channel's handle: free some");
	else
		rc = tnd__guest_attach(channel, address, rank, opts->deadline_ns, reterr);
	if (rc < 0) {
		if (channel)
			undo_reader(channel, false, false);
		tnd__service_unref();
		return rc;
	}
	snprintf(channel->address, sizeof(channel->address), "%s", address);
	*ret_channel = channel;
	return 0;
}

#ifdef TND_FAILPOINTS
int tnd__channel_attach_inside(struct tnd_channel *writer, uint32_t rank,
			       struct tnd_channel **ret_channel)
{
	struct tnd_channel *channel = make_handle(false, 0, 0);
	struct tnd__welcome welcome;
	int rc;

	if (!channel)
		return -ENOMEM;
	rc = tnd__place_admit(writer, rank, NULL, &welcome, NULL);
	if (rc < 0) {
		free_handle(channel);
		return rc;
	}
	channel->shared = writer->shared;
	channel->lent = true;
	channel->reader.rank = rank;
	channel->reader.place = welcome.place;
	channel->reader.generation = welcome.generation;
	channel->reader.seated = true;
	tnd__guest_begin(channel);
	*ret_channel = channel;
	return 0;
}
#endif

static void close_handle(struct tnd_channel *channel, bool abandoned)
{
	bool forked, inside;

	if (!channel)
		return;
	forked = tnd__channel_forked(channel);
	inside = channel->lent;
	if (channel->is_writer)
		undo_writer(channel, forked, abandoned);
	else
		undo_reader(channel, forked, abandoned);
	if (!forked && !inside)
		tnd__service_unref();
}

void tnd_channel_close(struct tnd_channel *channel)
{
	close_handle(channel, false);
}

void tnd_channel_abandon(struct tnd_channel *channel)
{
	close_handle(channel, true);
}

const char *tnd_channel_address(const struct tnd_channel *channel)
{
	return channel->address;
}

/* -- ready -- */

static int say_dead(struct tnd_channel *channel, uint32_t rank, struct tnd_error *reterr)
{
	return tnd__fail_rank(reterr, TND_E_PEER_DEAD, (int32_t)rank,
			      "channel '%s': the reader of rank %" PRIu32
			      " died before all were ready: give it up (tnd_channel_evict), or "
			      "start all again",
			      channel->shared.name, rank);
}

/* By the seats, which both sides see. As S3 and V3; pairs with E1, tell_ready(), C1, P1. */
static int look_ready(struct tnd__wait *wait, struct tnd_error *reterr)
{
	struct tnd_channel *channel = wait->channel;
	struct tnd__data_header *header = channel->shared.header;

	for (uint32_t i = 0; i < channel->shared.place_count; i++)
		if (channel->shared.on_dead == TND_CHANNEL_DEAD_ERROR &&
		    atomic_load_explicit(&header->seats[i].state, memory_order_seq_cst) ==
			    TND__PLACE_DEAD)
			return say_dead(
				channel,
				atomic_load_explicit(&header->seats[i].rank, memory_order_relaxed),
				reterr);
	if (atomic_load_explicit(&header->ready, memory_order_seq_cst))
		return 1;
	if (channel->is_writer)
		return 0;
	if (atomic_load_explicit(&header->closed, memory_order_seq_cst) ||
	    atomic_load_explicit(&channel->reader.writer_left, memory_order_seq_cst))
		return tnd__fail_plain(reterr, TND_E_CLOSED,
				       "channel '%s': the writer closed before all were ready",
				       channel->shared.name);
	if (atomic_load_explicit(&channel->reader.writer_dead, memory_order_seq_cst))
		return tnd__fail_plain(reterr, TND_E_PEER_DEAD,
				       "channel '%s': the writer (pid %" PRIu32
				       ") died before all were ready",
				       channel->shared.name, channel->shared.writer_pid);
	return 0;
}

int tnd_channel_ready(struct tnd_channel *channel, int64_t deadline_ns, struct tnd_error *reterr)
{
	struct tnd__wait wait = {
		.channel = channel, .look = look_ready, .what = "all reserved readers to attach"};
	char missing[512];
	int rc = tnd__channel_enter(channel, channel->is_writer, reterr);

	if (rc < 0)
		return rc;
	rc = tnd__channel_wait(&wait, deadline_ns, reterr);
	if (rc == -ETIMEDOUT && channel->is_writer && reterr &&
	    tnd__places_missing(channel, missing, sizeof(missing)))
		rc = tnd__fail_plain(reterr, rc,
				     "channel '%s': the deadline passed, not attached yet: rank %s",
				     channel->shared.name, missing);
	tnd__channel_leave(channel);
	return rc;
}

/* -- info -- */

/*
 * Byte position from object `number` to the head; 0 where the sending thread has written another
 * object there meanwhile.
 */
static uint64_t bytes_from(const struct tnd_channel *channel, uint64_t number, uint64_t head)
{
	struct tnd__descriptor *descriptor =
		&channel->shared.descriptors[tnd__slot(channel, number)];
	uint64_t bytes = head - atomic_load_explicit(&descriptor->position, memory_order_relaxed);

	return atomic_load_explicit(&descriptor->number, memory_order_relaxed) == number &&
			       bytes <= channel->shared.max_bytes
		       ? bytes
		       : 0;
}

static void fill_use(struct tnd_channel *channel, struct tnd_channel_info *info)
{
	struct tnd__writer *writer = &channel->writer;
	/* Pairs with W3. The rest is relaxed: figures. */
	uint64_t published =
		atomic_load_explicit(&channel->shared.header->published, memory_order_acquire);
	uint64_t head =
		atomic_load_explicit(&channel->shared.control->head_position, memory_order_relaxed);
	uint64_t most = 0;

	pthread_mutex_lock(&channel->lock);
	for (uint64_t left = writer->live; left; left &= left - 1) {
		uint64_t cursor = atomic_load_explicit(
			&channel->shared.control->places[__builtin_ctzll(left)].cursor,
			memory_order_relaxed);

		/* It may have moved on since `published` was looked at. */
		if (published - cursor <= channel->shared.max_objects)
			most = TND__MAX(most, published - cursor);
	}
	if (writer->reserved)
		most = published - channel->shared.first_number;
	pthread_mutex_unlock(&channel->lock);
	info->used_objects = most;
	if (most)
		info->used_bytes = bytes_from(channel, published - most, head);
}

int tnd_channel_info(struct tnd_channel *channel, struct tnd_channel_info *ret_info)
{
	const struct tnd__segments *shared = &channel->shared;
	struct tnd_channel_info info = {
		.struct_bytes = ret_info->struct_bytes,
		.is_writer = channel->is_writer,
		.rank = channel->is_writer ? TND_RANK_NONE : channel->reader.rank,
		.place_count = shared->place_count,
		.max_bytes = shared->max_bytes,
		.max_objects = shared->max_objects,
		.max_object_bytes = shared->max_object_bytes,
		.memory_bytes = shared->memory_bytes,
		.waits = atomic_load_explicit(&channel->waits, memory_order_relaxed),
		.blocked_ns = atomic_load_explicit(&channel->blocked_ns, memory_order_relaxed),
	};

	if (tnd__channel_forked(channel))
		return TND_E_FORKED;
	if (!tnd__struct_ok(ret_info->struct_bytes, sizeof(info), sizeof(info)))
		return TND_E_INVALID;
	info.sent_objects = atomic_load_explicit(&shared->header->published, memory_order_acquire) -
			    shared->first_number;
	if (channel->is_writer)
		fill_use(channel, &info);
	*ret_info = info;
	return 0;
}
