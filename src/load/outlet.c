/* SPDX-License-Identifier: Apache-2.0 */
/*
 * outlet.c - the reading side of a shared load: slabs come from the channel and go out on it
 *
 *   feeder:   TABLE sent -> slab reserved -> its reads submitted -> ... -> END sent -> drained
 *   storage:                                 last read of a slab is done: slab committed
 *
 * Slabs become visible in the order of their reservations, whichever is read first.
 */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "channel/bulk.h"
#include "outlet.h"

/* One being taken, one being read, one in the queue. */
#define SLABS_ENOUGH 3
#define REUSE_NS INT64_C(60000000)

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

	return tnd__outlet_patiently(outlet, attempt_send, &message);
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

/*
 * With oversize overrun a slab that the budget has no room for goes alone: once nothing is read and
 * no slab is needed any more. Return: -ETIMEDOUT: not yet; as tnd__bulk_reserve().
 */
static int go_over(struct tnd__outlet *outlet, struct claim *claim, int64_t deadline_ns,
		   struct tnd_error *reterr)
{
	const struct timespec moment = {.tv_nsec = TND__SLICE_NS / 4};
	struct tnd__flow *flow = outlet->load->flow;
	struct tnd__bulk_figures figures;
	bool reading;

	pthread_mutex_lock(&flow->lock);
	reading = flow->in_flight != 0;
	pthread_mutex_unlock(&flow->lock);
	tnd__bulk_figures(outlet->channel, &figures);
	if (!reading && figures.free == figures.slabs && !figures.missing_count)
		return tnd__bulk_reserve(outlet->channel, claim->bytes, TND__BULK_OVERRUN,
					 deadline_ns, &claim->reservation, reterr);
	nanosleep(&moment, NULL);
	return -ETIMEDOUT;
}

static int attempt_reserve(struct tnd__outlet *outlet, void *arg, int64_t deadline_ns,
			   struct tnd_error *reterr)
{
	struct claim *claim = arg;
	int rc = -ETIMEDOUT;

	while (rc == -ETIMEDOUT && prefer_reuse(outlet) && tnd__now_ns() < deadline_ns)
		rc = tnd__bulk_reserve(outlet->channel, claim->bytes, TND__BULK_REUSE,
				       tnd__now_ns() + TND__SLICE_NS / 20, &claim->reservation,
				       reterr);
	if (rc == -ETIMEDOUT)
		rc = tnd__bulk_reserve(outlet->channel, claim->bytes, TND__BULK_ANY, deadline_ns,
				       &claim->reservation, reterr);
	if ((rc == -ETIMEDOUT || rc == TND_E_BUDGET) &&
	    outlet->load->plan->choice.oversize == TND_OVERSIZE_OVERRUN)
		rc = go_over(outlet, claim, deadline_ns, reterr);
	return rc;
}

struct tnd__buffer *tnd__outlet_feed(struct tnd__outlet *outlet, size_t slab)
{
	struct tnd_load *load = outlet->load;
	struct claim claim = {.bytes = load->slabs[slab].bytes};
	struct tnd__buffer *buffer;

	if (slab == 0)
		outlet->premake = tnd__premake_start(
			load, (uint32_t)TND__MIN(load->slab_count, SLABS_ENOUGH) - 1);
	else
		tnd__premake_await(outlet->premake);
	if (send_table(outlet, slab) < 0 ||
	    tnd__outlet_patiently(outlet, attempt_reserve, &claim) < 0)
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
		tnd__outlet_patiently(outlet, attempt_drain, NULL);
	pthread_mutex_lock(&outlet->load->flow->lock);
	outlet->through = true;
	pthread_cond_broadcast(&outlet->load->flow->consumer);
	pthread_mutex_unlock(&outlet->load->flow->lock);
}

void tnd__outlet_close(struct tnd__outlet *outlet)
{
	struct tnd_load *load = outlet->load;

	tnd__premake_end(outlet->premake);
	outlet->premake = NULL;
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
