/* SPDX-License-Identifier: Apache-2.0 */
/*
 * outlet.c - the reading side of a shared load: slabs come from the channel and go out on it
 *
 *   feeder:   TABLE sent -> slab reserved -> its reads submitted -> ... -> END sent -> drained
 *   storage:                                 last read of a slab is done: slab committed
 *
 * Slabs become visible in the order of their reservations, whichever is read first.
 *
 * Patience. Whatever the feeder waits for on the channel it waits for in slices of SLICE_NS, and
 * looks around after each: cancelled? deadline? who keeps the oldest slab? That time is put down to
 * them as long as no read is in flight; before, they cost nothing. A guest that is late is let go
 * at once, a member after evict_ns; one that never comes is given up after meet_ns. As on_dead says
 * the load then ends for all, or goes on.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "channel/bulk.h"
#include "outlet.h"

#define SLICE_NS INT64_C(20000000)
#define MEET_NS INT64_C(120000000000)
/* One being taken, one being read, one in the queue. */
#define SLABS_ENOUGH 3
#define REUSE_NS INT64_C(60000000)

/* -- what is known of the members -- */

static struct tnd__held *held_of(struct tnd__outlet *outlet, uint32_t rank)
{
	for (size_t i = 0; i < outlet->member_count; i++)
		if (outlet->held[i].rank == rank)
			return &outlet->held[i];
	return NULL;
}

/* A member is gone, or let go. Return: 0: goes on without it; < 0: the load has failed. */
static int lose(struct tnd__outlet *outlet, const struct tnd_error *error)
{
	struct tnd__held *member = held_of(outlet, (uint32_t)error->rank);

	if (member && outlet->on_dead == TND_SHARE_DEAD_FAIL) {
		tnd__load_fail_detail(outlet->load, error);
		return error->code;
	}
	tnd_channel_evict(outlet->channel, (uint32_t)error->rank);
	if (member && !member->lost) {
		member->lost = true;
		tnd__log(TND_LOG_WARNING, "the load goes on without rank %u: %s", member->rank,
			 error->message);
	}
	return 0;
}

/* -- patience -- */

struct waiting {
	int64_t since, told; /* told: when the log was last written */
	int64_t slice;       /* when this slice began */
	int64_t alone_since; /* since when `alone` is the only one that is late */
	uint32_t alone;
};

static bool reading(struct tnd_load *load)
{
	bool any;

	pthread_mutex_lock(&load->flow->lock);
	any = load->flow->in_flight != 0;
	pthread_mutex_unlock(&load->flow->lock);
	return any;
}

/* "2, 5": as many as fit. */
static const char *list_ranks(const uint32_t *ranks, size_t count, char *out, size_t out_bytes)
{
	size_t used = 0;

	out[0] = '\0';
	for (size_t i = 0; i < count && used + 16 < out_bytes; i++)
		used += (size_t)snprintf(out + used, out_bytes - used, "%s%u", i ? ", " : "",
					 ranks[i]);
	return out;
}

static int give_up_missing(struct tnd__outlet *outlet, const struct tnd__bulk_figures *figures)
{
	struct tnd_error error;
	int rc = 0;

	for (uint32_t i = 0; rc == 0 && i < figures->missing_count; i++) {
		tnd__fail_rank(&error, TND_E_DEADLINE, (int32_t)figures->missing[i],
			       "rank %u was expected to join the load within %.0f s, found that it "
			       "has not come; start it, or leave it out of the members",
			       figures->missing[i], (double)outlet->meet_ns / 1e9);
		rc = lose(outlet, &error);
	}
	return rc;
}

/* Guests go at once, a member that alone keeps the others waiting after evict_ns. */
static int let_go(struct tnd__outlet *outlet, const struct tnd__bulk_figures *figures,
		  struct waiting *waiting, int64_t now)
{
	struct tnd_error error;
	uint32_t rank;

	for (uint32_t i = 0; i < figures->late_count; i++)
		if (!held_of(outlet, figures->late[i])) {
			tnd_channel_evict(outlet->channel, figures->late[i]);
			outlet->guests_let_go++;
		}
	rank = figures->late_count == 1 ? figures->late[0] : TND_RANK_NONE;
	if (rank != waiting->alone) {
		waiting->alone = rank;
		waiting->alone_since = now;
	}
	if (rank == TND_RANK_NONE || !outlet->evict_ns || !held_of(outlet, rank) ||
	    now - waiting->alone_since < outlet->evict_ns)
		return 0;
	tnd__fail_rank(&error, TND_E_EVICTED, (int32_t)rank,
		       "rank %u was expected to take what was read, found that it alone has kept "
		       "the others waiting for %.1f s",
		       rank, (double)(now - waiting->alone_since) / 1e9);
	return lose(outlet, &error);
}

/* Nobody may keep every slab for ever. Also tells the log now and then. */
static int check_stall(struct tnd__outlet *outlet, const struct tnd__bulk_figures *figures,
		       struct waiting *waiting, int64_t now)
{
	int64_t waited = now - waiting->since;
	char ranks[256];

	if (!figures->late_count && !figures->missing_count)
		return 0;
	if (figures->late_count)
		list_ranks(figures->late, figures->late_count, ranks, sizeof(ranks));
	else
		list_ranks(figures->missing, figures->missing_count, ranks, sizeof(ranks));
	if (now - waiting->told > TND__STALL_LOG_NS) {
		waiting->told = now;
		tnd__log(TND_LOG_WARNING, "the reading has waited %.0f s for rank %s%s",
			 (double)waited / 1e9, ranks,
			 figures->late_count ? "" : ", which has not come");
	}
	if (!figures->late_count || outlet->stall_ns < 0 || waited < outlet->stall_ns)
		return 0;
	tnd__load_fail_rank(outlet->load, TND_E_DEADLINE, (int32_t)figures->late[0],
			    "no progress for %.1f s: rank %s keeps every slab that there is room "
			    "for; see what holds it up (stopped, or views that it keeps)",
			    (double)waited / 1e9, ranks);
	return TND_E_DEADLINE;
}

/* At the deadline with nothing left to read: who is not through. Return: as tnd__outlet_check(). */
static int check_deadline(struct tnd__outlet *outlet, const struct tnd__bulk_figures *figures)
{
	struct tnd_load *load = outlet->load;
	bool late = figures->late_count != 0;
	const uint32_t *who = late ? figures->late : figures->missing;
	size_t count = late ? figures->late_count : figures->missing_count;
	char ranks[256];

	if (count && load->opts.deadline_ns && tnd__now_ns() > load->opts.deadline_ns &&
	    !reading(load))
		tnd__load_fail_rank(load, TND_E_DEADLINE, (int32_t)who[0],
				    "the deadline passed while rank %s %s; see what holds it up, "
				    "or allow more time",
				    list_ranks(who, count, ranks, sizeof(ranks)),
				    late ? "kept what was read for it" : "had not come");
	return tnd__outlet_check(outlet);
}

static void blame(struct tnd__outlet *outlet, const struct tnd__bulk_figures *figures, int64_t ns)
{
	struct tnd_load *load = outlet->load;

	pthread_mutex_lock(&load->flow->lock);
	for (uint32_t i = 0; i < figures->late_count; i++) {
		struct tnd__held *member = held_of(outlet, figures->late[i]);

		if (member)
			member->ns += (uint64_t)ns;
	}
	for (uint32_t i = 0; !figures->late_count && i < figures->missing_count; i++) {
		struct tnd__held *member = held_of(outlet, figures->missing[i]);

		if (member)
			member->ns += (uint64_t)ns;
	}
	load->stats.budget_wait_ns += (uint64_t)ns;
	load->stats.consumer_wait_ns += (uint64_t)ns;
	pthread_mutex_unlock(&load->flow->lock);
}

/* After a slice in which nothing came. Return: 0: go on; < 0: the load has failed or was ended. */
static int look_around(struct tnd__outlet *outlet, struct waiting *waiting)
{
	struct tnd_load *load = outlet->load;
	struct tnd__bulk_figures figures;
	int64_t now = tnd__now_ns(), slice = now - waiting->slice;
	int rc;

	waiting->slice = now;
	tnd__bulk_figures(outlet->channel, &figures);
	rc = check_deadline(outlet, &figures);
	if (rc < 0)
		return rc;
	if (figures.missing_count && outlet->meet_ns >= 0 &&
	    now - load->opened_ns > outlet->meet_ns)
		rc = give_up_missing(outlet, &figures);
	if (rc == 0 && !reading(load)) {
		blame(outlet, &figures, slice);
		rc = let_go(outlet, &figures, waiting, now);
		if (rc == 0)
			rc = check_stall(outlet, &figures, waiting, now);
	} else {
		waiting->since = waiting->told = now;
	}
	return rc;
}

int tnd__outlet_check(struct tnd__outlet *outlet)
{
	struct tnd_load *load = outlet->load;
	int rc;

	if (atomic_load_explicit(&load->cancelled, memory_order_relaxed))
		tnd__load_fail(load, TND_E_CANCELLED, NULL, "the reading was cancelled");
	else if (load->opts.deadline_ns && tnd__now_ns() > load->opts.deadline_ns)
		tnd__load_fail(load, TND_E_DEADLINE, NULL,
			       "the deadline passed before everything was read and taken; allow "
			       "more time");
	rc = tnd__load_error(load, NULL);
	if (rc == 0 && atomic_load_explicit(&load->stopping, memory_order_relaxed))
		rc = TND_E_CANCELLED;
	return rc;
}

/* One try of something on the channel, until the deadline. */
typedef int (*attempt_fn)(struct tnd__outlet *outlet, void *arg, int64_t deadline_ns,
			  struct tnd_error *reterr);

/* Return: 0; < 0 once the load has failed or was ended. */
static int patiently(struct tnd__outlet *outlet, attempt_fn attempt, void *arg)
{
	struct waiting waiting = {.alone = TND_RANK_NONE};
	struct tnd_error error = {.rank = -1};
	int rc = tnd__outlet_check(outlet);

	waiting.since = waiting.told = waiting.slice = tnd__now_ns();
	while (rc == 0) {
		rc = attempt(outlet, arg, tnd__now_ns() + SLICE_NS, &error);
		if (rc == 0)
			return 0;
		if (rc == -ETIMEDOUT) {
			rc = look_around(outlet, &waiting);
		} else if (rc == TND_E_PEER_DEAD && error.rank >= 0) {
			rc = lose(outlet, &error);
		} else {
			tnd__load_fail_detail(outlet->load, &error);
		}
	}
	return rc;
}

/* -- sending -- */

struct message {
	const void *data;
	uint64_t bytes;
};

static int attempt_send(struct tnd__outlet *outlet, void *arg, int64_t deadline_ns,
			struct tnd_error *reterr)
{
	const struct message *message = arg;

	return tnd_channel_send(outlet->channel, message->data, message->bytes, deadline_ns,
				reterr);
}

static int send_patiently(struct tnd__outlet *outlet, const void *data, uint64_t bytes)
{
	struct message message = {data, bytes};

	return patiently(outlet, attempt_send, &message);
}

static struct tnd__stream_head head_of(const struct tnd__outlet *outlet, uint32_t kind,
				       uint32_t count)
{
	return (struct tnd__stream_head){TND__STREAM_MAGIC, TND__STREAM_VERSION, kind, count,
					 outlet->files};
}

int tnd__outlet_hello(struct tnd__outlet *outlet, struct tnd_error *reterr)
{
	const struct tnd_load *load = outlet->load;
	const struct tnd_plan_totals *totals = &load->totals;
	struct tnd__stream_hello hello = {.head = head_of(outlet, TND__STREAM_HELLO, 0),
					  .kin = tnd__plan_kin(load->plan),
					  .node_bytes = load->bound_bytes,
					  .total_bytes = load->totals.kept_bytes,
					  .slab_count = load->slab_count,
					  .slab_memory = totals->budget_bytes - totals->fixed_bytes,
					  .slab_reserve = totals->slab_capacity_bytes +
							  totals->slab_bytes_max,
					  .member_count = (uint32_t)outlet->member_count,
					  .pid = (int32_t)getpid()};

	/* Held for every member, as the ring is empty: it never waits. */
	return tnd_channel_send(outlet->channel, &hello, sizeof(hello), 0, reterr);
}

/* -- tables -- */

struct table {
	struct tnd__outlet *outlet;
	struct tnd__stream_table *object; /* outlet->table */
	struct tnd__stream_entry *entries;
	uint32_t count;
	bool first;
};

static int flush_table(struct table *table, size_t slab, bool more)
{
	const struct tnd_load *load = table->outlet->load;
	uint64_t bytes = sizeof(*table->object) + table->count * sizeof(*table->entries);

	*table->object = (struct tnd__stream_table){
		.head = head_of(table->outlet, TND__STREAM_TABLE, table->count),
		.slab = slab,
		.slab_bytes = load->slabs[slab].bytes,
		.file = load->slabs[slab].file,
		.first = table->first,
		.more = more};
	table->count = 0;
	table->first = false;
	return send_patiently(table->outlet, table->object, bytes);
}

static uint64_t place_of(const struct tnd_load *load, size_t slab, const struct tnd_plan_item *item,
			 uint64_t begin, uint64_t kept)
{
	if (load->totals.packing == TND_PACKING_FILE)
		return tnd__plan_image_place(load->plan, slab, begin);
	return item->slab_offset + kept;
}

static int add_item(struct table *table, size_t slab, const struct tnd_plan_item *item)
{
	const struct tnd_load *load = table->outlet->load;
	uint64_t count = tnd__plan_item_range_count(item), begin, end, kept = 0;

	for (uint64_t k = 0; k < count; k++) {
		struct tnd__stream_entry *entry;
		int rc = 0;

		if (table->count == TND__STREAM_ENTRIES)
			rc = flush_table(table, slab, true);
		if (rc < 0)
			return rc;
		tnd__plan_item_range(item, k, &begin, &end);
		entry = &table->entries[table->count++];
		*entry = (struct tnd__stream_entry){
			.begin = begin,
			.bytes = end - begin,
			.place = place_of(load, slab, item, begin, kept),
			.tensor = (uint32_t)(item->tensor - table->outlet->tensors)};
		kept += end - begin;
	}
	return 0;
}

static int send_table(struct tnd__outlet *outlet, size_t slab)
{
	const struct tnd_plan_slab *place = &outlet->load->slabs[slab];
	struct table table = {.outlet = outlet, .object = outlet->table, .first = true};
	int rc = 0;

	table.entries = (struct tnd__stream_entry *)(table.object + 1);
	for (size_t i = place->first_item; rc == 0 && i <= place->last_item; i++)
		if (outlet->load->items[i].slab == slab)
			rc = add_item(&table, slab, &outlet->load->items[i]);
	return rc < 0 ? rc : flush_table(&table, slab, false);
}

/* -- slabs -- */

struct claim {
	uint64_t bytes;
	struct tnd_reservation reservation;
};

/*
 * Once enough slabs are there the next one to come back is better than a new one, which costs its
 * first touch: as long as reads are in flight, and a while beyond, which the new one would
 * cost too.
 */
static bool prefer_reuse(struct tnd__outlet *outlet)
{
	struct tnd_load *load = outlet->load;
	struct tnd__bulk_figures figures;
	bool busy;

	pthread_mutex_lock(&load->flow->lock);
	busy = load->flow->in_flight || tnd__now_ns() - load->flow->drained_ns < REUSE_NS;
	pthread_mutex_unlock(&load->flow->lock);
	if (!busy)
		return false;
	tnd__bulk_figures(outlet->channel, &figures);
	return figures.slabs >= SLABS_ENOUGH;
}

static int attempt_reserve(struct tnd__outlet *outlet, void *arg, int64_t deadline_ns,
			   struct tnd_error *reterr)
{
	struct claim *claim = arg;
	int rc = -ETIMEDOUT;

	while (rc == -ETIMEDOUT && prefer_reuse(outlet) && tnd__now_ns() < deadline_ns)
		rc = tnd__bulk_reserve(outlet->channel, claim->bytes, true,
				       tnd__now_ns() + SLICE_NS / 20, &claim->reservation, reterr);
	if (rc == -ETIMEDOUT)
		rc = tnd__bulk_reserve(outlet->channel, claim->bytes, false, deadline_ns,
				       &claim->reservation, reterr);
	return rc;
}

struct tnd__buffer *tnd__outlet_feed(struct tnd__outlet *outlet, size_t slab)
{
	struct tnd_load *load = outlet->load;
	struct claim claim = {.bytes = load->slabs[slab].bytes};
	struct tnd__buffer *buffer;

	if (send_table(outlet, slab) < 0 || patiently(outlet, attempt_reserve, &claim) < 0)
		return NULL;
	buffer = tnd__failpoint("load.alloc") < 0 ? NULL : calloc(1, sizeof(*buffer));
	if (!buffer) {
		tnd_channel_abort(outlet->channel, &claim.reservation);
		tnd__load_fail(load, -ENOMEM, NULL, "out of memory for a slab's record");
		return NULL;
	}
	buffer->flow = load->flow;
	buffer->data = claim.reservation.data;
	buffer->reservation = claim.reservation;
	buffer->charge_bytes = load->totals.slab_capacity_bytes;
	tnd__flow_ref(load->flow);
	pthread_mutex_lock(&load->flow->lock);
	load->buffers[slab] = buffer;
	pthread_mutex_unlock(&load->flow->lock);
	return buffer;
}

void tnd__outlet_publish(struct tnd__outlet *outlet, size_t slab, struct tnd__buffer *buffer)
{
	struct tnd_load *load = outlet->load;

	if (tnd__load_error(load, NULL) < 0)
		return; /* not all of it is there */
	(void)tnd__failpoint("load.commit");
	tnd_channel_commit(outlet->channel, &buffer->reservation, load->slabs[slab].bytes);
	pthread_mutex_lock(&load->flow->lock);
	load->buffers[slab] = NULL;
	load->stats.kept_bytes += load->slabs[slab].bytes;
	tnd__publish_done(load, load->slabs[slab].file);
	pthread_cond_signal(&load->flow->feeder);
	pthread_mutex_unlock(&load->flow->lock);
	tnd__buffer_free(buffer);
}

/* -- the end -- */

static int attempt_drain(struct tnd__outlet *outlet, void *arg, int64_t deadline_ns,
			 struct tnd_error *reterr)
{
	(void)arg;
	return tnd_channel_drain(outlet->channel, deadline_ns, reterr);
}

static bool all_published(struct tnd_load *load)
{
	for (size_t i = 0; i < load->slab_count; i++)
		if (load->buffers[i])
			return false;
	return true;
}

/* Until every slab is committed. Return: 0; < 0 once the load has failed or was ended. */
static int wait_published(struct tnd__outlet *outlet)
{
	struct tnd_load *load = outlet->load;
	int rc = 0;

	pthread_mutex_lock(&load->flow->lock);
	while (rc == 0 && !all_published(load)) {
		tnd__flow_wait(load->flow, &load->flow->feeder, TND__POLL_NS);
		pthread_mutex_unlock(&load->flow->lock);
		rc = tnd__outlet_check(outlet);
		pthread_mutex_lock(&load->flow->lock);
	}
	pthread_mutex_unlock(&load->flow->lock);
	return rc;
}

static int send_end(struct tnd__outlet *outlet)
{
	struct {
		struct tnd__stream_head head;
		struct tnd__stream_held held[TND_SHARE_MEMBERS_MAX];
	} end = {.head = head_of(outlet, TND__STREAM_END, (uint32_t)outlet->member_count)};

	for (size_t i = 0; i < outlet->member_count; i++)
		end.held[i] = (struct tnd__stream_held){.rank = outlet->held[i].rank,
							.ns = outlet->held[i].ns};
	return send_patiently(outlet, &end,
			      sizeof(end.head) + outlet->member_count * sizeof(*end.held));
}

void tnd__outlet_finish(struct tnd__outlet *outlet)
{
	if (tnd__outlet_check(outlet) == 0 && wait_published(outlet) == 0 && send_end(outlet) == 0)
		patiently(outlet, attempt_drain, NULL);
	pthread_mutex_lock(&outlet->load->flow->lock);
	outlet->through = true;
	pthread_cond_broadcast(&outlet->load->flow->consumer);
	pthread_mutex_unlock(&outlet->load->flow->lock);
}

void tnd__outlet_close(struct tnd__outlet *outlet)
{
	struct tnd_load *load = outlet->load;

	if (!outlet->channel)
		return;
	for (size_t i = 0; load->buffers && i < load->slab_count; i++) {
		if (!load->buffers[i])
			continue;
		tnd_channel_abort(outlet->channel, &load->buffers[i]->reservation);
		tnd__buffer_free(load->buffers[i]);
		load->buffers[i] = NULL;
	}
	if (tnd__load_error(load, NULL) < 0)
		tnd_channel_abandon(outlet->channel);
	else
		tnd_channel_close(outlet->channel);
	outlet->channel = NULL;
}
