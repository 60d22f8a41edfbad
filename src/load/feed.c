/* SPDX-License-Identifier: Apache-2.0 */
/*
 * feed.c - the feeder thread: a slab for each buffer of the plan, in order, and its reads
 *
 *   for each buffer:  open its file -> acquire a slab (waits for the budget)
 *                                   -> submit its reads (waits for the queue)
 *
 * A slab that does not fit is waited for. Only the consumer can end that wait, by releasing views;
 * what happens when it waits for us meanwhile is its side's business (deliver.c): it may tell us to
 * go over the bound (`overrun_now`).
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "outlet.h"

/* A file's reads are over: its report is taken, its size looked at once more. */
static void close_source(struct tnd_load *load, size_t index)
{
	struct tnd__load_file *file = &load->load_files[index];
	const struct tnd_file *known = &load->files[index];
	struct stat now;

	tnd__source_report(file->source, &file->report);
	file->report.name = known->name;
	file->reported = true;
	tnd__source_close(file->source);
	file->source = NULL;
	if (fstat(known->fd, &now) == 0 && (uint64_t)now.st_size != known->bytes)
		tnd__load_fail(load, TND_E_CHANGED, &(struct tnd__where){.file = known->name},
			       "expected %llu bytes, found %llu after reading: the file changed "
			       "meanwhile; load it again once it rests",
			       (unsigned long long)known->bytes, (unsigned long long)now.st_size);
}

void tnd__feed_close_sources(struct tnd_load *load, bool all)
{
	for (size_t i = 0; i < load->file_count; i++) {
		struct tnd__load_file *file = &load->load_files[i];

		/* R2: pairs with R1 in read_done(). */
		if (file->source &&
		    (all || !atomic_load_explicit(&file->reads, memory_order_acquire)))
			close_source(load, i);
	}
}

/*
 * The first tensor of the plan that file `index` does not hold any more with `bytes` bytes, or
 * NULL.
 */
static const struct tnd_tensor *first_lost(const struct tnd_load *load, size_t index,
					   uint64_t bytes)
{
	for (size_t i = 0; i < load->item_count; i++) {
		const struct tnd_tensor *tensor = load->items[i].tensor;

		if (tensor->bytes && tensor->file == index &&
		    tensor->offset + tensor->bytes > bytes)
			return tensor;
	}
	return NULL;
}

/* Opens the file of slab `slab` unless it is open. */
static int open_source(struct tnd_load *load, size_t slab)
{
	size_t index = load->slabs[slab].file;
	struct tnd__load_file *file = &load->load_files[index];
	const struct tnd_file *known = &load->files[index];
	struct tnd_error error;
	struct stat now;
	int rc;

	if (file->source)
		return 0;
	tnd__feed_close_sources(load, false);
	if (fstat(known->fd, &now) == 0 && (uint64_t)now.st_size != known->bytes) {
		const struct tnd_tensor *tensor = first_lost(load, index, (uint64_t)now.st_size);
		struct tnd__where where = {.file = known->name,
					   .name = tensor ? tensor->name : NULL,
					   .name_bytes = tensor ? tensor->name_bytes : 0};

		tnd__load_fail(load, TND_E_CHANGED, &where,
			       "expected a file of %llu bytes, found %llu: it changed since its "
			       "header was read; load it again once it rests",
			       (unsigned long long)known->bytes, (unsigned long long)now.st_size);
		return TND_E_CHANGED;
	}
	rc = tnd__source_open(load->storage, known->fd, known->name, known->bytes, &file->source,
			      &error);
	if (rc < 0) {
		error.rank = tnd__load_own_rank(load);
		tnd__load_fail_detail(load, &error);
		return rc;
	}
	tnd__publish_file(load, index);
	return 0;
}

static bool stopped(struct tnd_load *load)
{
	return atomic_load_explicit(&load->stopping, memory_order_relaxed) ||
	       atomic_load_explicit(&load->cancelled, memory_order_relaxed);
}

static int interrupted(void *arg)
{
	struct tnd_load *load = arg;
	bool overrun;

	if (stopped(load))
		return 1;
	pthread_mutex_lock(&load->flow->lock);
	overrun = load->flow->overrun_now;
	pthread_mutex_unlock(&load->flow->lock);
	return overrun;
}

static void feeder_waits(struct tnd_load *load, bool waits)
{
	struct tnd__flow *flow = load->flow;

	pthread_mutex_lock(&flow->lock);
	flow->feeder_waits = waits;
	if (waits)
		pthread_cond_signal(&flow->consumer);
	else
		flow->overrun_now = false;
	pthread_mutex_unlock(&flow->lock);
}

/*
 * Until the consumer has taken all that comes before buffer `index` and let it go: then as little
 * as can be is charged beside it (in packing name a slab whose range the tensor stands in stays).
 * Views that will not come back are not waited for with on_full copy.
 */
static void wait_alone(struct tnd_load *load, size_t index)
{
	struct tnd__flow *flow = load->flow;
	bool copies = load->opts.on_full == TND_ON_FULL_COPY;

	pthread_mutex_lock(&flow->lock);
	while (!stopped(load) && !flow->overrun_now &&
	       (load->next_item < load->slabs[index].first_item || (flow->held_views && !copies)))
		tnd__flow_wait(flow, &flow->feeder, TND__POLL_NS);
	pthread_mutex_unlock(&flow->lock);
	tnd_slab_pool_trim(load->pool);
}

/*
 * Waits for the budget, or goes over it: with a buffer above the whole bound, or if the consumer
 * cannot let others go.
 */
static int acquire_waiting(struct tnd_load *load, size_t index, const char *file,
			   struct tnd_slab **ret_slab)
{
	struct tnd_charge_opts charge = {
		.struct_bytes = sizeof(charge), .cancelled = interrupted, .cancelled_arg = load};
	struct tnd__flow *flow = load->flow;
	uint64_t bytes = load->slabs[index].bytes;
	int64_t start = tnd__now_ns(), end;
	int rc = TND_E_CANCELLED;

	feeder_waits(load, true);
	if (load->fixed_bytes + tnd__round_up(bytes, TND__PAGE) > load->bound_bytes)
		wait_alone(load, index);
	else
		rc = tnd_slab_acquire(load->pool, bytes, file, &charge, ret_slab);
	if (rc == TND_E_CANCELLED && !stopped(load)) {
		charge.flags = TND_CHARGE_F_OVERRUN;
		charge.cancelled = NULL;
		rc = tnd_slab_acquire(load->pool, bytes, file, &charge, ret_slab);
	}
	feeder_waits(load, false);
	pthread_mutex_lock(&flow->lock);
	end = tnd__now_ns();
	load->stats.budget_wait_ns += (uint64_t)(end - start);
	/* With nothing left to read, only the consumer kept us. */
	if (!flow->in_flight)
		load->stats.consumer_wait_ns += (uint64_t)(end - TND__MAX(start, flow->drained_ns));
	pthread_mutex_unlock(&flow->lock);
	return rc;
}

/* One being delivered, one being read, one in the queue. */
#define LIVE_ENOUGH 3

/*
 * A fresh mapping costs its first touch, which can be slower than the disk. While the consumer
 * keeps up and enough reads are in flight to keep the disk busy, the next slab to come back is the
 * better one; a consumer that lags lets the reads run dry, and then we read ahead into fresh
 * memory.
 */
static void prefer_reuse(struct tnd_load *load)
{
	struct tnd_slab_stats pool = {.struct_bytes = sizeof(pool)};
	struct tnd__flow *flow = load->flow;

	pthread_mutex_lock(&flow->lock);
	while (flow->in_flight > TND__READS_LOW && !stopped(load)) {
		tnd_slab_pool_stats(load->pool, &pool);
		if (pool.live < LIVE_ENOUGH || pool.mapped_bytes > pool.live_bytes)
			break;
		tnd__flow_wait(flow, &flow->feeder, TND__POLL_NS);
	}
	pthread_mutex_unlock(&flow->lock);
}

static int acquire(struct tnd_load *load, size_t index, struct tnd_slab **ret_slab)
{
	struct tnd_charge_opts try = {.struct_bytes = sizeof(try), .flags = TND_CHARGE_F_TRY};
	const struct tnd_plan_slab *slab = &load->slabs[index];
	const char *file = load->files[slab->file].name;
	int rc;

	prefer_reuse(load);
	rc = tnd_slab_acquire(load->pool, slab->bytes, file, &try, ret_slab);
	if (rc == -EAGAIN || rc == TND_E_BUDGET)
		rc = acquire_waiting(load, index, file, ret_slab);
	if (rc < 0 && rc != TND_E_CANCELLED)
		tnd__load_fail(load, rc, &(struct tnd__where){.file = file},
			       "a buffer of %llu bytes could not be had (%s); give more memory or "
			       "a smaller slab",
			       (unsigned long long)slab->bytes, tnd_strerror(rc));
	return rc;
}

static struct tnd__buffer *buffer_create(struct tnd_load *load, size_t index, struct tnd_slab *slab)
{
	struct tnd__buffer *buffer = calloc(1, sizeof(*buffer));
	uint64_t bytes = load->slabs[index].bytes;

	if (!buffer || tnd__failpoint("load.alloc")) {
		free(buffer);
		return NULL;
	}
	buffer->flow = load->flow;
	buffer->slab = slab;
	buffer->data = tnd_slab_data(slab);
	buffer->charge_bytes =
		TND__MAX(tnd__round_up(bytes, TND__PAGE), load->totals.slab_capacity_bytes);
	buffer->undelivered = load->slabs[index].item_count;
	tnd__flow_ref(load->flow);
	pthread_mutex_lock(&load->flow->lock);
	load->buffers[index] = buffer;
	pthread_mutex_unlock(&load->flow->lock);
	return buffer;
}

int tnd__own_ahead(struct tnd_load *load, size_t index)
{
	struct tnd__own *own = &load->owns[index];
	uint64_t bytes = load->items[index].slice_bytes;
	int rc = tnd__own_make(bytes, &own->memory, &own->map_bytes);

	if (rc < 0)
		return rc;
	tnd_load_consumer_bytes(load, (int64_t)bytes);
	tnd__toucher_add(load->toucher, own->memory, bytes);
	return 0;
}

/*
 * Own delivery into memory that we make: already while the slab is read, so that it is touched by
 * the time it is copied into. What this reads ahead is the consumer's memory, as much of it as
 * slabs are in use.
 */
static int make_owns(struct tnd_load *load, size_t slab)
{
	const struct tnd_plan_slab *place = &load->slabs[slab];

	for (size_t i = place->first_item; load->owns && i <= place->last_item; i++) {
		const struct tnd_plan_item *item = &load->items[i];
		int rc;

		if (item->slab != slab || item->piece_offset)
			continue;
		rc = tnd__own_ahead(load, i);
		if (rc < 0)
			return rc;
	}
	return 0;
}

/* Whether the slab that was acquired last is a new mapping. */
static bool fresh(struct tnd_load *load)
{
	struct tnd_slab_stats pool = {.struct_bytes = sizeof(pool)};
	uint64_t seen = load->seen_allocations;

	tnd_slab_pool_stats(load->pool, &pool);
	load->seen_allocations = pool.allocations;
	return pool.allocations > seen;
}

/* The same for a node's reader, whose slabs are the channel's. */
static int feed_outlet(struct tnd_load *load, size_t index)
{
	struct tnd__buffer *buffer;
	struct tnd__batch *batch;
	int rc = open_source(load, index);

	if (rc < 0)
		return rc;
	buffer = tnd__outlet_feed(load->outlet, index);
	if (!buffer)
		return TND_E_CANCELLED;
	rc = tnd__batch_create(load, index, buffer, &batch);
	if (rc < 0) {
		tnd__load_fail(load, rc, NULL, "out of memory for a list of reads");
		return rc;
	}
	tnd__batch_submit(batch);
	return 0;
}

/* One buffer of the plan on its way. Return: 0; < 0 once the load has failed or was cancelled. */
static int feed_slab(struct tnd_load *load, size_t index)
{
	struct tnd__buffer *buffer;
	struct tnd__batch *batch;
	struct tnd_slab *slab;
	int rc;

	rc = open_source(load, index);
	if (rc < 0)
		return rc;
	rc = acquire(load, index, &slab);
	if (rc < 0)
		return rc;
	buffer = buffer_create(load, index, slab);
	if (buffer && fresh(load)) {
		buffer->fresh = true;
		tnd__toucher_add(load->toucher, buffer->data, load->slabs[index].bytes);
	}
	if (!buffer) {
		tnd_slab_release(slab);
		rc = -ENOMEM;
	} else {
		rc = make_owns(load, index);
		if (rc == 0)
			rc = tnd__batch_create(load, index, buffer, &batch);
	}
	if (rc < 0) {
		tnd__load_fail(
			load, rc,
			&(struct tnd__where){.file = load->files[load->slabs[index].file].name},
			"out of memory for a tensor or its list of reads");
		return rc;
	}
	tnd__batch_submit(batch);
	return 0;
}

void *tnd__feed(void *arg)
{
	struct tnd_load *load = arg;

	tnd__thread_settle(load->storage, "tnd-feed");
	for (size_t i = 0; i < load->slab_count && !interrupted(load); i++)
		if ((load->outlet ? feed_outlet(load, i) : feed_slab(load, i)) < 0)
			break;
	if (load->outlet)
		tnd__outlet_finish(load->outlet);
	return NULL;
}
