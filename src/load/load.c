/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load.c - a load ends
 *
 *   end:  stop feeder and storage (no thread or descriptor is left), drop what was not delivered,
 *         take the figures, ask the pool who still holds views, give back all that is not held
 *   close: end, and free
 *
 * end works from any state that open can leave.
 */
#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#include "member.h"
#include "outlet.h"

void tnd_load_cancel(struct tnd_load *load)
{
	/*
	 * All waits look at this within TND__POLL_NS; nothing here but a store, for signal
	 * handlers.
	 */
	atomic_store_explicit(&load->cancelled, true, memory_order_relaxed);
}

void tnd_load_consumer_bytes(struct tnd_load *load, int64_t delta)
{
	atomic_fetch_add_explicit(&load->flow->consumer_bytes, delta, memory_order_relaxed);
}

/* -- end -- */

static void stop_threads(struct tnd_load *load)
{
	struct tnd__flow *flow = load->flow;

	atomic_store_explicit(&load->stopping, true, memory_order_relaxed);
	if (load->storage)
		tnd__storage_cancel(load->storage);
	tnd_budget_wake(load->budget);
	if (load->feeder_started)
		pthread_join(load->feeder, NULL);
	load->feeder_started = false;
	tnd__toucher_close(load->toucher);
	load->toucher = NULL;
	/* Sources may be closed once every read is done. */
	pthread_mutex_lock(&flow->lock);
	while (flow->in_flight)
		tnd__flow_wait(flow, &flow->consumer, TND__POLL_NS);
	pthread_mutex_unlock(&flow->lock);
}

/* What nobody asked for. Storage has no read in flight any more. */
static void drop_undelivered(struct tnd_load *load)
{
	if (load->member)
		tnd__member_leave(load);
	for (size_t i = 0; !load->outlet && i < load->slab_count; i++) {
		struct tnd__buffer *buffer = load->buffers[i];

		load->buffers[i] = NULL;
		if (buffer)
			tnd__buffer_finish(buffer);
	}
	for (size_t i = 0; load->owns && i < load->item_count; i++) {
		if (!load->owns[i].memory)
			continue;
		tnd_own_free(load->owns[i].memory, load->owns[i].map_bytes);
		tnd_load_consumer_bytes(load, -(int64_t)load->items[i].slice_bytes);
	}
	if (load->gather && !load->gather_placed) {
		tnd_own_free(load->gather, load->gather_map_bytes);
		tnd_load_consumer_bytes(load, -(int64_t)load->items[load->next_item].slice_bytes);
	}
	load->gather = NULL;
}

static int escape_code(struct tnd_load *load, struct tnd_error *error)
{
	struct tnd__text names = {0};
	const struct tnd_escape_report *report = load->escaped;
	bool strict = load->phase == TND_PHASE_TARGET && load->opts.on_full != TND_ON_FULL_COPY;
	static const char *const phases[] = {"load", "target load", "draft load"};
	char *list;

	for (size_t i = 0; i < report->name_count; i++)
		tnd__text_add(&names, "%s%s", i ? ", " : "", report->names[i]);
	list = tnd__text_take(&names);
	tnd__fail(error, strict ? TND_E_ESCAPED : 0,
		  &(struct tnd__where){.file = report->slab_count ? report->slabs[0].file : NULL},
		  "%zu view%s in %zu slab%s (%llu bytes) still alive after the %s: %s; release "
		  "each view when its copy is done",
		  report->name_count, report->name_count == 1 ? "" : "s", report->slab_count,
		  report->slab_count == 1 ? "" : "s", (unsigned long long)report->bytes,
		  phases[load->phase], list ? list : "");
	error->rank = (int32_t)load->rank;
	free(list);
	if (!strict)
		tnd__log(TND_LOG_WARNING, "%s", error->message);
	return error->code;
}

/* Code and detail with which the load ends. */
static int conclude(struct tnd_load *load)
{
	int escaped = tnd_slab_pool_escaped(load->pool, 1, &load->escaped);
	int code = tnd__load_error(load, &load->end_error);

	if (!code && !load->outlet && load->next_item < load->item_count &&
	    atomic_load_explicit(&load->cancelled, memory_order_relaxed)) {
		code = TND_E_CANCELLED;
		tnd__fail_plain(&load->end_error, code, "the load was cancelled");
	}
	if (code || escaped <= 0)
		return code;
	return escape_code(load, &load->end_error);
}

/* Takes the storage away from those who ask for figures meanwhile, and ends it. */
static void close_storage(struct tnd_load *load)
{
	struct tnd__storage *storage = load->storage;

	if (!storage)
		return;
	pthread_mutex_lock(&load->flow->lock);
	tnd__storage_stats(storage, &load->storage_stats);
	load->storage = NULL;
	pthread_mutex_unlock(&load->flow->lock);
	tnd__storage_close(storage);
}

/* The figures stay as they are now. */
static void keep_figures(struct tnd_load *load)
{
	struct tnd_load_stats stats = {.struct_bytes = sizeof(stats)};

	load->ended_ns = tnd__now_ns();
	tnd_load_stats(load, &stats);
	pthread_mutex_lock(&load->flow->lock);
	load->stats = stats;
	load->ended = true;
	pthread_mutex_unlock(&load->flow->lock);
}

static void end_once(struct tnd_load *load)
{
	struct tnd_slab_stats slabs = {.struct_bytes = sizeof(slabs)};

	stop_threads(load);
	tnd__slab_pool_sample_huge(load->pool);
	drop_undelivered(load);
	tnd__feed_close_sources(load, true);
	close_storage(load);
	tnd__sample(load, true);
	tnd__publish_close(load);
	keep_figures(load);
	if (load->outlet)
		tnd__outlet_close(load->outlet);
	tnd_slab_pool_trim(load->pool);
	tnd__load_refund(load);
	tnd_slab_pool_stats(load->pool, &slabs);
	load->end_code = conclude(load);
	malloc_trim(0);
	if (tnd__load_memlog(load, &slabs) < 0 && !load->end_code)
		load->end_code = tnd__fail_plain(&load->end_error, -ENOMEM,
						 "out of memory for the memory log");
}

int tnd_load_end(struct tnd_load *load, struct tnd_error *reterr)
{
	if (!load->ended)
		end_once(load);
	if (load->end_code < 0 && reterr)
		*reterr = load->end_error;
	return load->end_code;
}

void tnd_load_close(struct tnd_load *load)
{
	if (!load)
		return;
	tnd_load_end(load, NULL);
	tnd__load_free(load);
}
