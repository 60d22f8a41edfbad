/* SPDX-License-Identifier: Apache-2.0 */
/*
 * member.c - a member of a shared load: attaching, waiting for what comes, leaving
 *
 * One whose load fails, at its beginning or later, abandons the channel: for the others that is a
 * death, and they are told. One that was cancelled, or just ends early, leaves.
 *
 * Atomics: M1 tnd__member_unref(), acq_rel with itself: the last one frees what all have used.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <tundish/time.h>

#include "channel/bulk.h"
#include "guestload.h"
#include "outlet.h"

#define ATTACH_NS INT64_C(120000000000)
/* The reader's own limit comes first, and says who it waits for. */
#define SILENCE_NS INT64_C(150000000000)
#define FULL_NS INT64_C(200000000)

/* -- life -- */

static void leave_channel(struct tnd__member *member)
{
	if (member->failed)
		tnd_channel_abandon(member->channel);
	else
		tnd_channel_close(member->channel);
	member->channel = NULL;
}

void tnd__member_unref(struct tnd__member *member)
{
	/* M1: pairs with itself. */
	if (!member || atomic_fetch_sub_explicit(&member->refs, 1, memory_order_acq_rel) != 1)
		return;
	leave_channel(member);
	pthread_mutex_destroy(&member->lock);
	free(member->entries);
	free(member);
}

/* -- failing -- */

int tnd__member_corrupt(struct tnd_load *load, const char *what)
{
	/* A guest goes on alone. */
	if (load->guest) {
		snprintf(load->guest->why, sizeof(load->guest->why),
			 "expected the stream of a working reader, found %s", what);
		return TND_E_CORRUPT;
	}
	tnd__load_fail(load, TND_E_CORRUPT, NULL,
		       "expected the stream of a working reader (process %d), found %s; restart it",
		       (int)load->member->hello.pid, what);
	return TND_E_CORRUPT;
}

/* The channel ended a wait. What the reader said about it says more. */
static int fail_channel(struct tnd_load *load, const struct tnd_error *error)
{
	struct tnd_error told;

	if (tnd__bulk_told(load->member->channel, &told) < 0)
		tnd__load_fail_detail(load, &told);
	else if (error->code == TND_E_PEER_DEAD || error->code == TND_E_CLOSED)
		tnd__load_fail_rank(load, TND_E_PEER_DEAD, -1,
				    "the process that reads for this node (%d) is gone before "
				    "everything was read; look at what it said, and load again",
				    (int)load->member->hello.pid);
	else
		tnd__load_fail_detail(load, error);
	return tnd__load_error(load, NULL);
}

/* -- waiting for an object -- */

static void say_silence(struct tnd_load *load, int64_t idle_ns, const struct tnd_error *error)
{
	struct tnd__flow *flow = load->flow;
	uint64_t views;

	pthread_mutex_lock(&flow->lock);
	views = flow->held_views;
	pthread_mutex_unlock(&flow->lock);
	if (views)
		tnd__fail_full(load,
			       load->opts.on_full == TND_ON_FULL_FAIL ? TND_E_FULL : TND_E_DEADLINE,
			       idle_ns);
	else
		tnd__load_fail(load, TND_E_DEADLINE, NULL, "nothing has come for %.1f s: %s",
			       (double)idle_ns / 1e9, error->message);
}

/* Nothing came for a moment. The load may fail. */
static void look_around(struct tnd_load *load, const struct tnd_error *error)
{
	struct tnd__member *member = load->member;
	int64_t limit = load->opts.stall_ns ? load->opts.stall_ns : SILENCE_NS;
	int64_t idle_ns = tnd__now_ns() - member->idle_since;
	uint64_t held;

	tnd__check_limits(load);
	pthread_mutex_lock(&load->flow->lock);
	held = load->flow->held_bytes;
	pthread_mutex_unlock(&load->flow->lock);
	if (load->opts.on_full == TND_ON_FULL_FAIL && held > member->each_bytes &&
	    idle_ns > FULL_NS)
		tnd__fail_full(load, TND_E_FULL, idle_ns);
	else if (limit > 0 && idle_ns > limit)
		say_silence(load, idle_ns, error);
}

/* Return: 0; the load's error, which is set then. */
static int next_object(struct tnd_load *load, struct tnd_object *ret_object)
{
	struct tnd__member *member = load->member;
	struct tnd_error error = {.rank = -1};
	int rc;

	member->idle_since = tnd__now_ns();
	for (;;) {
		tnd__check_limits(load);
		rc = tnd__load_error(load, NULL);
		if (rc < 0)
			return rc;
		rc = tnd_channel_borrow(member->channel, tnd__now_ns() + TND__POLL_NS, ret_object,
					&error);
		if (rc == 0)
			return 0;
		if (rc != -ETIMEDOUT)
			return fail_channel(load, &error);
		look_around(load, &error);
	}
}

int tnd__member_pull(struct tnd_load *load, struct tnd_error *reterr)
{
	struct tnd_object object;
	int rc = 0;

	if (load->member->over)
		rc = tnd__member_corrupt(load, "its end before all tensors of this rank had come");
	if (rc == 0)
		rc = next_object(load, &object);
	if (rc == 0)
		rc = tnd__member_take(load, &object);
	return rc < 0 ? tnd__load_error(load, reterr) : 0;
}

/* -- open -- */

static int take_hello(struct tnd_load *load, const struct tnd_object *object,
		      struct tnd_error *reterr)
{
	struct tnd__member *member = load->member;

	/* What came before it attached is not there any more. */
	if (object->number)
		return tnd__fail_plain(reterr, TND_E_PLACE,
				       "%s: expected to join before reading went on without rank "
				       "%u, found that it has; load as a guest, or start all over",
				       load->opts.share, load->rank);
	if (!tnd__stream_read(object, &member->hello, sizeof(member->hello), 0) ||
	    member->hello.head.kind != TND__STREAM_HELLO)
		return tnd__fail_plain(reterr, TND_E_CORRUPT,
				       "%s: expected a node's reader of this version, found "
				       "something else; attach to the address of a shared load",
				       load->opts.share);
	if (member->hello.head.files != tnd__files_fingerprint(load->checkpoint))
		return tnd__fail_plain(reterr, TND_E_CHANGED,
				       "%s: expected a reader of the same files, found one that "
				       "reads others, or other versions of them; load the same "
				       "folder in all ranks",
				       load->opts.share);
	if (member->hello.kin != tnd__plan_kin(load->plan) || !member->hello.member_count)
		return tnd__fail_plain(reterr, TND_E_INVALID,
				       "%s: expected the layout and options that the reader was "
				       "started with, found others; give the same to all ranks",
				       load->opts.share);
	if (member->hello.slab_memory > member->hello.slab_reserve)
		member->each_bytes = (member->hello.slab_memory - member->hello.slab_reserve) /
				     member->hello.member_count;
	return 0;
}

int tnd__member_attach(struct tnd_load *load, uint32_t rank, int64_t deadline_ns,
		       struct tnd_error *reterr)
{
	struct tnd__member *member =
		tnd__failpoint("load.alloc") < 0 ? NULL : calloc(1, sizeof(*member));
	struct tnd_channel_attach_opts opts = {
		.struct_bytes = sizeof(opts), .deadline_ns = deadline_ns, .warn_ns = -1};

	if (!member)
		return tnd__fail_plain(reterr, -ENOMEM, "out of memory for a load");
	pthread_mutex_init(&member->lock, NULL);
	atomic_init(&member->refs, 1);
	load->member = member;
	if (load->opts.flags & TND_LOAD_F_WRITABLE)
		opts.flags |= TND_CHANNEL_ATTACH_F_PRIVATE;
	return tnd_channel_attach(load->opts.share, rank, &opts, &member->channel, reterr);
}

int tnd__member_open(struct tnd_load *load, struct tnd_error *reterr)
{
	int64_t deadline_ns =
		load->opts.deadline_ns ? load->opts.deadline_ns : tnd__now_ns() + ATTACH_NS;
	struct tnd_object object;
	int rc = tnd__member_attach(load, load->rank, deadline_ns, reterr);

	if (rc < 0)
		return rc;
	rc = tnd_channel_borrow(load->member->channel, deadline_ns, &object, reterr);
	if (rc < 0) {
		/* Why it ended before it began. */
		int told = tnd__bulk_told(load->member->channel, reterr);

		return told < 0 ? told : rc;
	}
	rc = take_hello(load, &object, reterr);
	tnd_channel_release(load->member->channel, &object);
	load->member->failed = rc < 0;
	return rc;
}

/* -- leaving -- */

/* The first arrival that the load itself still has a hold on; it ends here. */
static bool drop_one(struct tnd__member *member)
{
	struct tnd__arrival *arrival;
	struct tnd__buffer *buffer = NULL;

	pthread_mutex_lock(&member->lock);
	for (arrival = member->arrivals; arrival && !buffer; arrival = arrival->next)
		if (arrival->ours) {
			arrival->ours = false;
			buffer = arrival->buffer;
		}
	pthread_mutex_unlock(&member->lock);
	if (buffer && buffer->slab)
		tnd__buffer_finish(buffer);
	return buffer != NULL;
}

/* Its views keep their bytes, as this process's own. Under lock. Return: 0; -ENOMEM; as keep. */
static int keep(struct tnd__member *member, struct tnd__arrival *arrival)
{
	struct tnd__flow *flow = arrival->buffer->flow;
	const unsigned char *data = arrival->object.data;
	struct tnd__bulk_range *ranges = NULL;
	size_t count = 0, capacity = 0;
	int rc = 0;

	pthread_mutex_lock(&flow->lock);
	for (struct tnd__hold *hold = arrival->buffer->holds; rc == 0 && hold; hold = hold->next) {
		uint64_t begin = (uint64_t)((const unsigned char *)hold->data - data);

		rc = tnd__reserve(&ranges, &capacity, count + 1, sizeof(*ranges));
		if (rc == 0)
			ranges[count++] = (struct tnd__bulk_range){begin, begin + hold->bytes};
	}
	pthread_mutex_unlock(&flow->lock);
	if (rc == 0)
		rc = tnd__bulk_keep(member->channel, &arrival->object, ranges, count,
				    &arrival->kept_base, &arrival->kept_bytes);
	free(ranges);
	return rc;
}

void tnd__member_leave(struct tnd_load *load)
{
	struct tnd__member *member = load->member;
	bool stays = false, spoilt = false;
	int code = tnd__load_error(load, NULL);

	if (!member->channel)
		return;
	member->failed = code < 0 && code != TND_E_CANCELLED && !load->guest;
	tnd_slab_release(member->stage);
	member->stage = NULL;
	while (drop_one(member))
		;
	pthread_mutex_lock(&member->lock);
	for (struct tnd__arrival *arrival = member->arrivals; arrival; arrival = arrival->next) {
		int rc = arrival->kept_base ? 0 : keep(member, arrival);

		spoilt |= rc == TND_E_EVICTED;
		stays |= rc < 0 && rc != TND_E_EVICTED;
	}
	/*
	 * Where there is no memory for a copy this reader stays until its last view is released:
	 * it holds the others up, and they say so, but nothing is overwritten under a holder.
	 */
	if (!stays)
		leave_channel(member);
	pthread_mutex_unlock(&member->lock);
	if (spoilt)
		tnd__load_fail(
			load, TND_E_EVICTED, NULL,
			"expected a reader that knows that this process lives, found that it "
			"took it for dead: views that were still held may have changed; load "
			"again");
}
