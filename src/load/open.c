/* SPDX-License-Identifier: Apache-2.0 */
/*
 * open.c - a load is made: alone, as a node's reader, as a member or a guest of a shared load
 *
 *              tables  account            pool                 threads
 *   alone        x     the plan's budget  slabs                storage, touchers, feeder
 *   reader       x     the node's budget  shared slabs         storage, feeder; the channel
 *   member       x     what it sets aside staging, adopted     none; attached to the channel
 *   guest        x     the plan's budget  staging, adopted     none; attached to the channel
 *    '- alone    its own plan  as before  slabs                storage, touchers, feeder
 *
 * Failure anywhere in it leaves nothing behind.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "guestload.h"
#include "outlet.h"

/* storage/ is below this layer, so it has the numbers under names of its own. */
_Static_assert(TND_ENGINE_AUTO == TND__ENGINE_AUTO && TND_ENGINE_URING == TND__ENGINE_URING &&
		       TND_ENGINE_THREADS == TND__ENGINE_THREADS,
	       "one set of numbers");
_Static_assert(TND_DIRECT_AUTO == TND__DIRECT_AUTO && TND_DIRECT_ON == TND__DIRECT_ON &&
		       TND_DIRECT_OFF == TND__DIRECT_OFF,
	       "one set of numbers");

static int check_opts(const struct tnd_load_opts *opts, struct tnd_error *reterr)
{
	const uint32_t known = TND_LOAD_F_KEEP_CACHE | TND_LOAD_F_OWN | TND_LOAD_F_SHARED_SLABS |
			       TND_LOAD_F_GUEST | TND_LOAD_F_WRITABLE;

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

/* Whether its own threads read. */
static bool reads(const struct tnd_load *load)
{
	return !load->opts.share;
}

/* Before there are threads that look. */
static void set_states(struct tnd_load *load)
{
	for (size_t i = 0; i < load->item_count; i++)
		atomic_init(&load->states[i], load->items[i].slab == TND_PLAN_NO_SLAB
						      ? TND__ITEM_READY
						      : TND__ITEM_NOT_FED);
}

static int make_tables(struct tnd_load *load)
{
	load->flow = tnd__flow_create();
	load->states = calloc(load->item_count + 1, sizeof(*load->states));
	load->buffers = calloc(load->slab_count + 1, sizeof(struct tnd__buffer *));
	load->load_files = calloc(load->file_count + 1, sizeof(*load->load_files));
	if (load->opts.cpus)
		load->cpus = strdup(load->opts.cpus);
	if (load->opts.share)
		load->share = strdup(load->opts.share);
	if (!load->flow || !load->states || !load->buffers || !load->load_files ||
	    (load->opts.cpus && !load->cpus) || (load->opts.share && !load->share) ||
	    tnd__failpoint("load.alloc"))
		return -ENOMEM;
	load->opts.share = load->share;
	if ((load->opts.flags & TND_LOAD_F_OWN) && !load->opts.place) {
		load->owns = calloc(load->item_count + 1, sizeof(*load->owns));
		if (!load->owns)
			return -ENOMEM;
	}
	set_states(load);
	for (size_t i = 0; i < load->file_count; i++)
		load->load_files[i].cached_before = -ENODATA;
	return 0;
}

/* What of the node's budget this member has, and what it is for. */
static uint64_t member_budget(struct tnd_load *load)
{
	const struct tnd__stream_hello *hello = &load->member->hello;
	struct tnd_plan_member need;

	tnd__plan_as_member(load->plan, hello->member_count, hello->node_bytes, &need);
	load->totals.fixed_bytes = load->totals.metadata_bytes = need.metadata_bytes;
	load->totals.needed_budget_bytes = need.metadata_bytes;
	load->staging_bytes = need.staging_bytes;
	/* Slices that may be cut are gathered in halves of it: one with the consumer, one free. */
	load->member->staging_piece = TND__MIN(need.gather_bytes, need.staging_bytes / 2);
	if (load->plan->choice.oversize == TND_OVERSIZE_REFUSE)
		load->member->staging_piece = need.gather_bytes;
	load->member->staging_piece = tnd__round_up(load->member->staging_piece, TND__PAGE);
	return need.metadata_bytes + need.staging_bytes;
}

static int make_budget(struct tnd_load *load, struct tnd_error *reterr)
{
	uint64_t bytes = load->totals.budget_bytes;
	int rc;

	if (load->member && !load->guest)
		bytes = member_budget(load);
	if (load->outlet)
		bytes = tnd__plan_node_budget(load->plan);
	if (load->opts.budget) {
		load->budget = load->opts.budget;
		tnd__budget_ref(load->budget);
		return 0;
	}
	rc = tnd_budget_create(bytes, &load->budget);
	return rc == 0 ? 0
		       : tnd__fail_plain(reterr, rc, "the budget could not be made: %s",
					 tnd_strerror(rc));
}

/* Of a guest, the tables of its second plan. Where they do not fit it reads alone. */
static uint64_t guest_aside(struct tnd_load *load)
{
	const struct tnd_plan_totals *totals = &load->totals;
	uint64_t bytes = load->guest ? load->guest->tables_bytes : 0;
	/* With oversize overrun a plan may need more than its budget. */
	bool fits = totals->needed_budget_bytes <= totals->budget_bytes;
	uint64_t least = fits ? totals->needed_budget_bytes : totals->fixed_bytes;

	if (load->guest && least + bytes > load->bound_bytes) {
		tnd__guest_drop(load, "its budget has no room for the tables of a second plan");
		return 0;
	}
	load->totals.metadata_bytes += bytes;
	return bytes;
}

/* The account, and what is charged to it from open to end. */
static int take_budget(struct tnd_load *load, struct tnd_error *reterr)
{
	struct tnd_budget_stats stats = {.struct_bytes = sizeof(stats)};
	struct tnd_charge_opts charge = {.struct_bytes = sizeof(charge),
					 .deadline_ns = load->opts.deadline_ns};
	uint64_t aside = load->outlet ? load->outlet->set_aside_bytes : 0, needed, fixed;
	int rc = make_budget(load, reterr);

	if (rc < 0)
		return rc;
	tnd_budget_stats(load->budget, &stats);
	load->bound_bytes = stats.bound_bytes;
	aside += guest_aside(load);
	needed = load->totals.needed_budget_bytes + aside;
	fixed = load->totals.fixed_bytes + aside;
	if (stats.bound_bytes < needed &&
	    load->totals.needed_budget_bytes <= load->totals.budget_bytes)
		return tnd__fail_plain(reterr, TND_E_BUDGET,
				       "expected a budget of at least %llu bytes, found %llu; give "
				       "more, or plan with a smaller slab",
				       (unsigned long long)needed,
				       (unsigned long long)stats.bound_bytes);
	rc = tnd_budget_charge(load->budget, fixed, &charge);
	if (rc < 0)
		return tnd__fail_plain(reterr, rc,
				       "%llu bytes for metadata and reads in flight do not fit "
				       "into the budget of %llu: %s",
				       (unsigned long long)fixed,
				       (unsigned long long)stats.bound_bytes, tnd_strerror(rc));
	load->fixed_bytes = fixed;
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
	int rc;

	if (load->member)
		opts.slab_bytes = load->member->staging_piece;
	/* Each buffer as large as what is gathered in it. */
	if (load->guest)
		opts.slab_bytes = 0;
	if (load->outlet)
		opts.flags = TND_SLAB_POOL_F_SHARED;
	rc = tnd_slab_pool_create(&opts, &load->pool);
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
	struct tnd__storage *storage;
	int rc = tnd__storage_create(&opts, &storage, reterr);

	if (rc < 0)
		return rc;
	/* Others may ask for figures meanwhile. */
	pthread_mutex_lock(&load->flow->lock);
	load->storage = storage;
	pthread_mutex_unlock(&load->flow->lock);
	return 0;
}

static int make_toucher(struct tnd_load *load, struct tnd_error *reterr)
{
	load->toucher = tnd__toucher_create(load->storage);
	return load->toucher ? 0 : tnd__fail_plain(reterr, -ENOMEM, "out of memory for a load");
}

static int start_feeder(struct tnd_load *load, struct tnd_error *reterr)
{
	int rc = tnd__failpoint("load.thread");

	rc = rc < 0 ? rc : tnd__thread_create(tnd__feed, load, &load->feeder);
	if (rc < 0)
		return tnd__fail_plain(reterr, rc, "the feeder thread could not be started: %s",
				       tnd_strerror(rc));
	load->feeder_started = true;
	return 0;
}

/* `address`: of a node's reader. */
static int start(struct tnd_load *load, const char *address, struct tnd_error *reterr)
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
	if (load->opts.share && (load->opts.flags & TND_LOAD_F_GUEST))
		rc = tnd__guest_open(load, reterr);
	else if (load->opts.share)
		rc = tnd__member_open(load, reterr);
	if (rc < 0)
		return rc;
	if ((rc = take_budget(load, reterr)) < 0 || (rc = make_pool(load, reterr)) < 0)
		return rc;
	tnd__publish_open(load);
	if (reads(load) && (rc = make_storage(load, reterr)) < 0)
		return rc;
	if (load->outlet && (rc = tnd__outlet_open(load->outlet, load, address, reterr)) < 0)
		return rc;
	if (!load->outlet && !load->guest && (reads(load) || load->owns) &&
	    (rc = make_toucher(load, reterr)) < 0)
		return rc;
	return reads(load) ? start_feeder(load, reterr) : 0;
}

int tnd__load_start_rest(struct tnd_load *load, struct tnd_plan *rest, struct tnd_error *reterr)
{
	int rc;

	load->plan = rest;
	load->items = tnd_plan_items(rest, &load->item_count);
	load->slabs = tnd_plan_slabs(rest, &load->slab_count);
	load->next_item = 0;
	set_states(load);
	tnd_slab_pool_trim(load->pool);
	tnd__slab_pool_set_standard(load->pool, load->totals.slab_capacity_bytes);
	tnd__sample_start_cache(load);
	if ((rc = make_storage(load, reterr)) < 0 || (rc = make_toucher(load, reterr)) < 0)
		return rc;
	return start_feeder(load, reterr);
}

void tnd__load_refund(struct tnd_load *load)
{
	if (!load->fixed_bytes)
		return;
	tnd_budget_refund(load->budget, load->fixed_bytes);
	load->fixed_bytes = 0;
}

void tnd__load_free(struct tnd_load *load)
{
	tnd__publish_close(load);
	tnd__toucher_close(load->toucher);
	if (load->outlet)
		tnd__outlet_close(load->outlet);
	tnd__member_unref(load->member);
	tnd__guest_free(load->guest);
	free(load->owns);
	free(load->load_files);
	free(load->buffers);
	free(load->states);
	free(load->cpus);
	free(load->share);
	free(load->memlog);
	tnd__sentences_free(&load->copied);
	tnd_escape_report_free(load->escaped);
	tnd__storage_close(load->storage);
	tnd_slab_pool_close(load->pool);
	tnd__load_refund(load);
	tnd_budget_close(load->budget);
	tnd__flow_unref(load->flow);
	tnd_plan_close(load->plan);
	free(load);
}

static int open_load(struct tnd_plan *plan, const struct tnd_load_opts *opts,
		     struct tnd__outlet *outlet, const char *address, struct tnd_load **ret_load,
		     struct tnd_error *reterr)
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
	load->outlet = outlet;
	load->pid = getpid();
	take_plan(load, plan);
	rc = start(load, address, reterr);
	if (rc < 0) {
		tnd__load_free(load);
		return rc;
	}
	*ret_load = load;
	return 0;
}

int tnd_load_open(struct tnd_plan *plan, const struct tnd_load_opts *opts,
		  struct tnd_load **ret_load, struct tnd_error *reterr)
{
	return open_load(plan, opts, NULL, NULL, ret_load, reterr);
}

int tnd__load_open_reader(struct tnd_plan *plan, const struct tnd_load_opts *opts,
			  struct tnd__outlet *outlet, const char *address,
			  struct tnd_load **ret_load, struct tnd_error *reterr)
{
	/* Only what says how to read. */
	struct tnd_load_opts own = {.struct_bytes = sizeof(own)};

	if (opts) {
		own = *opts;
		own.flags &= TND_LOAD_F_KEEP_CACHE;
		own.share = NULL;
		own.progress = NULL;
		own.place = NULL;
		own.on_full = TND_ON_FULL_WAIT;
	}
	return open_load(plan, &own, outlet, address, ret_load, reterr);
}
