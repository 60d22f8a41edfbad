/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load.c - a load from open to close
 *
 *   open: charge metadata and I/O window, make pool and storage, start the feeder
 *   end:  stop feeder and storage (no thread or descriptor is left), drop what was not delivered,
 *         take the figures, ask the pool who still holds views, give back all that is not held
 *   close: end, and free
 *
 * Failure anywhere in open leaves nothing behind; end works from any state that open can leave.
 */
#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "load_internal.h"

/* storage/ is below this layer, so it has the numbers under names of its own. */
_Static_assert(TND_ENGINE_AUTO == TND__ENGINE_AUTO && TND_ENGINE_URING == TND__ENGINE_URING &&
		       TND_ENGINE_THREADS == TND__ENGINE_THREADS,
	       "one set of numbers");
_Static_assert(TND_DIRECT_AUTO == TND__DIRECT_AUTO && TND_DIRECT_ON == TND__DIRECT_ON &&
		       TND_DIRECT_OFF == TND__DIRECT_OFF,
	       "one set of numbers");

static int check_opts(const struct tnd_load_opts *opts, struct tnd_error *reterr)
{
	const uint32_t known = TND_LOAD_F_KEEP_CACHE | TND_LOAD_F_OWN | TND_LOAD_F_SHARED_SLABS;

	if (!tnd__struct_ok(opts->struct_bytes, sizeof(*opts), sizeof(*opts)))
		return tnd__fail_plain(reterr, TND_E_INVALID,
				       "tnd_load_opts: expected struct_bytes %zu, found %u",
				       sizeof(*opts), opts->struct_bytes);
	if (opts->flags & ~known || opts->reserved || opts->engine > TND_ENGINE_THREADS ||
	    opts->direct > TND_DIRECT_OFF || opts->on_full > TND_ON_FULL_COPY)
		return tnd__fail_plain(reterr, TND_E_INVALID,
				       "tnd_load_opts: expected values of <tundish/load.h>, found "
				       "flags 0x%x, engine %u, direct %u, on_full %u, "
				       "reserved %u",
				       opts->flags, opts->engine, opts->direct, opts->on_full,
				       opts->reserved);
	return opts->numa_given ? tnd__numa_check(opts->numa, reterr) : 0;
}

static void take_plan(struct tnd_load *load, struct tnd_plan *plan)
{
	load->plan = plan;
	load->checkpoint = tnd_plan_checkpoint(plan);
	tnd__plan_ref(plan);
	load->items = tnd_plan_items(plan, &load->item_count);
	load->slabs = tnd_plan_slabs(plan, &load->slab_count);
	load->files = tnd_checkpoint_files(load->checkpoint, &load->file_count);
	load->totals.struct_bytes = sizeof(load->totals);
	tnd_plan_totals(plan, &load->totals);
	load->rank = tnd_plan_layout(plan)->rank;
	load->phase = tnd_plan_phase(plan);
}

static int make_tables(struct tnd_load *load)
{
	load->flow = tnd__flow_create();
	load->states = calloc(load->item_count + 1, sizeof(*load->states));
	load->buffers = calloc(load->slab_count + 1, sizeof(struct tnd__buffer *));
	load->load_files = calloc(load->file_count + 1, sizeof(*load->load_files));
	if (load->opts.cpus)
		load->cpus = strdup(load->opts.cpus);
	if (!load->flow || !load->states || !load->buffers || !load->load_files ||
	    (load->opts.cpus && !load->cpus) || tnd__failpoint("load.alloc"))
		return -ENOMEM;
	if ((load->opts.flags & TND_LOAD_F_OWN) && !load->opts.place) {
		load->owns = calloc(load->item_count + 1, sizeof(*load->owns));
		if (!load->owns)
			return -ENOMEM;
	}
	for (size_t i = 0; i < load->item_count; i++)
		atomic_init(&load->states[i], load->items[i].slab == TND_PLAN_NO_SLAB
						      ? TND__ITEM_READY
						      : TND__ITEM_NOT_FED);
	for (size_t i = 0; i < load->file_count; i++)
		load->load_files[i].cached_before = -ENODATA;
	return 0;
}

/* The account, and what is charged to it from open to end. */
static int take_budget(struct tnd_load *load, struct tnd_error *reterr)
{
	struct tnd_budget_stats stats = {.struct_bytes = sizeof(stats)};
	struct tnd_charge_opts charge = {.struct_bytes = sizeof(charge),
					 .deadline_ns = load->opts.deadline_ns};
	int rc;

	if (load->opts.budget) {
		load->budget = load->opts.budget;
		tnd__budget_ref(load->budget);
	} else {
		rc = tnd_budget_create(load->totals.budget_bytes, &load->budget);
		if (rc < 0)
			return tnd__fail_plain(reterr, rc, "the budget could not be made: %s",
					       tnd_strerror(rc));
	}
	tnd_budget_stats(load->budget, &stats);
	load->bound_bytes = stats.bound_bytes;
	if (stats.bound_bytes < load->totals.needed_budget_bytes &&
	    load->totals.needed_budget_bytes <= load->totals.budget_bytes)
		return tnd__fail_plain(reterr, TND_E_BUDGET,
				       "expected a budget of at least %llu bytes, found %llu; give "
				       "more, or plan with a smaller slab",
				       (unsigned long long)load->totals.needed_budget_bytes,
				       (unsigned long long)stats.bound_bytes);
	rc = tnd_budget_charge(load->budget, load->totals.fixed_bytes, &charge);
	if (rc < 0)
		return tnd__fail_plain(reterr, rc,
				       "%llu bytes for metadata and reads in flight do not fit "
				       "into the budget of %llu: %s",
				       (unsigned long long)load->totals.fixed_bytes,
				       (unsigned long long)stats.bound_bytes, tnd_strerror(rc));
	load->fixed_bytes = load->totals.fixed_bytes;
	return 0;
}

static int make_pool(struct tnd_load *load, struct tnd_error *reterr)
{
	struct tnd_slab_pool_opts opts = {
		.struct_bytes = sizeof(opts),
		.flags = load->opts.flags & TND_LOAD_F_SHARED_SLABS ? TND_SLAB_POOL_F_SHARED : 0,
		.numa = load->opts.numa,
		.numa_given = load->opts.numa_given,
		.budget = load->budget,
		.slab_bytes = load->totals.slab_capacity_bytes};
	int rc = tnd_slab_pool_create(&opts, &load->pool);

	if (rc < 0)
		return tnd__fail_plain(reterr, rc, "the slab pool could not be made: %s",
				       tnd_strerror(rc));
#ifdef TND_FAILPOINTS
	tnd__slab_pool_charge_leases(load->pool, tnd__failpoint("load.charge_leases") < 0);
#endif
	return 0;
}

static int make_storage(struct tnd_load *load, struct tnd_error *reterr)
{
	struct tnd__storage_opts opts = {
		.engine = load->opts.engine,
		.direct = load->opts.direct,
		.keep_cache = load->opts.flags & TND_LOAD_F_KEEP_CACHE,
		.thread_count = load->opts.thread_count,
		.queue_depth = load->opts.queue_depth,
		.chunk_bytes = load->totals.chunk_bytes,
		.bounce_count = (uint32_t)(load->totals.bounce_bytes /
					   (load->totals.chunk_bytes + 2 * TND__PAGE)),
		.window_count = (uint32_t)(load->totals.window_bytes / load->totals.chunk_bytes),
		.cpus = load->cpus,
		.numa = load->opts.numa_given ? load->opts.numa : TND_NUMA_AUTO};

	return tnd__storage_create(&opts, &load->storage, reterr);
}

static int start(struct tnd_load *load, struct tnd_error *reterr)
{
	int rc;

	load->memory_before.struct_bytes = sizeof(load->memory_before);
	tnd_host_memory(&load->memory_before);
	load->opened_ns = tnd__now_ns();
	rc = make_tables(load);
	if (rc < 0)
		return tnd__fail_plain(reterr, rc,
				       "out of memory for the tables of a load of %zu tensors",
				       load->item_count);
	tnd__sample_start(load);
	if ((rc = take_budget(load, reterr)) < 0 || (rc = make_pool(load, reterr)) < 0 ||
	    (rc = make_storage(load, reterr)) < 0)
		return rc;
	load->toucher = tnd__toucher_create(load->storage);
	if (!load->toucher)
		return tnd__fail_plain(reterr, -ENOMEM, "out of memory for a load");
	tnd__publish_open(load);
	rc = tnd__failpoint("load.thread");
	rc = rc < 0 ? rc : tnd__thread_create(tnd__feed, load, &load->feeder);
	if (rc < 0)
		return tnd__fail_plain(reterr, rc, "the feeder thread could not be started: %s",
				       tnd_strerror(rc));
	load->feeder_started = true;
	return 0;
}

static void refund_fixed(struct tnd_load *load)
{
	if (!load->fixed_bytes)
		return;
	tnd_budget_refund(load->budget, load->fixed_bytes);
	load->fixed_bytes = 0;
}

/* Threads are gone, or were never there: everything else of the load that open made. */
static void free_load(struct tnd_load *load)
{
	tnd__publish_close(load);
	tnd__toucher_close(load->toucher);
	free(load->owns);
	free(load->load_files);
	free(load->buffers);
	free(load->states);
	free(load->cpus);
	free(load->memlog);
	tnd__sentences_free(&load->copied);
	tnd_escape_report_free(load->escaped);
	tnd__storage_close(load->storage);
	tnd_slab_pool_close(load->pool);
	refund_fixed(load);
	tnd_budget_close(load->budget);
	tnd__flow_unref(load->flow);
	tnd_plan_close(load->plan);
	free(load);
}

int tnd_load_open(struct tnd_plan *plan, const struct tnd_load_opts *opts,
		  struct tnd_load **ret_load, struct tnd_error *reterr)
{
	struct tnd_load *load;
	int rc = opts ? check_opts(opts, reterr) : 0;

	if (rc < 0)
		return rc;
	load = calloc(1, sizeof(*load));
	if (!load || tnd__failpoint("load.alloc")) {
		free(load);
		return tnd__fail_plain(reterr, -ENOMEM, "out of memory for a load");
	}
	if (opts)
		load->opts = *opts;
	take_plan(load, plan);
	rc = start(load, reterr);
	if (rc < 0) {
		free_load(load);
		return rc;
	}
	*ret_load = load;
	return 0;
}

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
	for (size_t i = 0; i < load->slab_count; i++) {
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
	if (load->gather && !load->gather_placed)
		tnd_own_free(load->gather, load->gather_map_bytes);
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

	if (!code && load->next_item < load->item_count &&
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
	tnd_slab_pool_trim(load->pool);
	refund_fixed(load);
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
	free_load(load);
}
