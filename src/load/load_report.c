/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load_report.c - what a load did: figures while it runs, and JSON after its end
 *
 *   tnd_load_stats()        pool, budget and storage asked now; after end what end has kept
 *   tnd_load_report_json()  one rank's object of tundish.load/1
 *   tnd_load_memlog_json()  the memory log of the phase, written by end
 *
 * Memory that runs out fails a document as a whole: a report never lacks a key.
 */
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "guestload.h"
#include "outlet.h"

static const char *const cache_names[] = {"unknown", "cold", "warm", "mixed"};
static const char *const phase_names[] = {"all", "target", "draft"};

/* -- figures -- */

/* What is out and charged at this moment: also after the end, when all else rests. */
static void add_live(struct tnd_load *load, struct tnd_load_stats *stats)
{
	struct tnd_slab_stats pool = {.struct_bytes = sizeof(pool)};
	struct tnd_budget_stats budget = {.struct_bytes = sizeof(budget)};

	tnd_slab_pool_stats(load->pool, &pool);
	tnd_budget_stats(load->budget, &budget);
	stats->live = pool.live;
	stats->live_bytes = pool.live_bytes;
	stats->charged_bytes = budget.charged_bytes;
}

static void add_pool(struct tnd_load *load, struct tnd_load_stats *stats)
{
	struct tnd_slab_stats pool = {.struct_bytes = sizeof(pool)};
	struct tnd_budget_stats budget = {.struct_bytes = sizeof(budget)};

	tnd_slab_pool_stats(load->pool, &pool);
	tnd_budget_stats(load->budget, &budget);
	stats->buffers = pool.buffers;
	stats->buffer_bytes = pool.buffer_bytes;
	stats->slabs = load->totals.slab_bytes ? pool.buffers : 0;
	stats->allocations = pool.allocations;
	stats->huge_bytes = pool.huge_bytes;
	stats->peak_live = pool.peak_live;
	stats->peak_live_bytes = pool.peak_bytes;
	stats->peak_charged_bytes = budget.peak_bytes;
	stats->budget_bytes = budget.bound_bytes;
	stats->overruns = budget.overruns + load->overruns;
	stats->overrun_bytes = budget.overrun_bytes + load->overrun_bytes;
}

int tnd_load_stats(struct tnd_load *load, struct tnd_load_stats *ret_stats)
{
	uint32_t struct_bytes = ret_stats->struct_bytes;
	struct tnd__storage_stats storage;
	bool ended;

	if (!tnd__struct_ok(struct_bytes, sizeof(*ret_stats), sizeof(*ret_stats)))
		return TND_E_INVALID;
	pthread_mutex_lock(&load->flow->lock);
	*ret_stats = load->stats;
	ret_stats->resident_growth_bytes = load->resident_peak;
	ret_stats->page_cache_growth_bytes =
		load->cache_known ? load->cache_peak : TND_HOST_UNKNOWN;
	ret_stats->copied = load->copied.count;
	ended = load->ended;
	/* The end takes it away under this lock. */
	if (load->storage)
		tnd__storage_stats(load->storage, &storage);
	else
		storage = load->storage_stats;
	pthread_mutex_unlock(&load->flow->lock);
	ret_stats->struct_bytes = struct_bytes;
	add_live(load, ret_stats);
	if (ended)
		return 0;
	ret_stats->storage_bytes = storage.storage_bytes;
	ret_stats->io_threads = storage.thread_count;
	ret_stats->read_ns = storage.read_ns;
	ret_stats->gather_ns =
		storage.scatter_ns + atomic_load_explicit(&load->gather_ns, memory_order_relaxed);
	ret_stats->total_bytes = load->totals.kept_bytes;
	ret_stats->metadata_bytes = load->totals.metadata_bytes;
	ret_stats->shards_opened = load->totals.shards_opened;
	ret_stats->shards_skipped = load->totals.shards_skipped;
	ret_stats->elapsed_ns =
		(uint64_t)((load->ended_ns ? load->ended_ns : tnd__now_ns()) - load->opened_ns);
	add_pool(load, ret_stats);
	return 0;
}

void tnd_load_reset_peaks(struct tnd_load *load)
{
	tnd_slab_pool_reset_peaks(load->pool);
	tnd_budget_reset(load->budget);
	pthread_mutex_lock(&load->flow->lock);
	load->resident_peak = load->cache_peak = 0;
	pthread_mutex_unlock(&load->flow->lock);
}

/* -- JSON -- */

/* Both take `value` over, and mark *failed where memory ran out. */
static void add(json_t *object, const char *key, json_t *value, bool *failed)
{
	*failed |= json_object_set_new(object, key, value) < 0;
}

static void append(json_t *array, json_t *value, bool *failed)
{
	*failed |= json_array_append_new(array, value) < 0;
}

static json_t *integer(uint64_t value)
{
	return value == TND_HOST_UNKNOWN ? json_null() : json_integer((json_int_t)value);
}

static json_t *seconds(uint64_t ns)
{
	return json_real((double)ns / 1e9);
}

static json_t *names(const char *const *list, size_t count, bool *failed)
{
	json_t *array = json_array();

	for (size_t i = 0; i < count; i++)
		append(array, json_string(list[i]), failed);
	return array;
}

static json_t *files(const struct tnd_load *load, bool *failed)
{
	json_t *array = json_array();

	for (size_t i = 0; i < load->file_count; i++) {
		const struct tnd__load_file *file = &load->load_files[i];
		const struct tnd__source_report *report = &file->report;

		if (!file->reported)
			continue;
		append(array,
		       json_pack("{s:o, s:s, s:b, s:s, s:s}", "name",
				 tnd__plan_json_name(load->files[i].name), "engine", report->engine,
				 "direct", report->direct, "cache", cache_names[report->cache],
				 "fallback", report->fallback),
		       failed);
	}
	return array;
}

static void add_held(json_t *array, uint32_t rank, uint64_t ns, bool *failed)
{
	if (ns)
		append(array,
		       json_pack("{s:o, s:o}", "rank", integer(rank), "seconds", seconds(ns)),
		       failed);
}

/* Who held the reading up: what a reader counted, or told its members at the end. */
static json_t *held_up_by(const struct tnd_load *load, bool *failed)
{
	const struct tnd__outlet *outlet = load->outlet;
	const struct tnd__member *member = load->guest ? load->guest->left : load->member;
	json_t *array = json_array();

	for (size_t i = 0; outlet && i < outlet->member_count; i++)
		add_held(array, outlet->held[i].rank, outlet->held[i].ns, failed);
	for (size_t i = 0; member && i < member->held_count; i++)
		add_held(array, member->held[i].rank, member->held[i].ns, failed);
	return array;
}

static json_t *waits(const struct tnd_load *load, bool *failed)
{
	const struct tnd_load_stats *stats = &load->stats;

	return json_pack("{s:o, s:o, s:o, s:o}", "storage", seconds(stats->storage_wait_ns),
			 "budget", seconds(stats->budget_wait_ns), "consumer",
			 seconds(stats->consumer_wait_ns), "held_up_by", held_up_by(load, failed));
}

static json_t *stages(const struct tnd_load_stats *stats)
{
	return json_pack("{s:o, s:o, s:o}", "read", seconds(stats->read_ns), "gather",
			 seconds(stats->gather_ns), "deliver", seconds(stats->deliver_ns));
}

static json_t *report(const struct tnd_load *load)
{
	const struct tnd_load_stats *stats = &load->stats;
	const struct tnd_escape_report *escaped = load->escaped;
	const struct {
		const char *key;
		uint64_t value;
	} counts[] = {
		{"tensors", stats->tensors},
		{"read_bytes", stats->read_bytes},
		{"kept_bytes", stats->kept_bytes},
		{"storage_bytes", stats->storage_bytes},
		{"metadata_bytes", stats->metadata_bytes},
		{"realigned_bytes", stats->realigned_bytes},
		{"buffers", stats->buffers},
		{"slabs", stats->slabs},
		{"allocations", stats->allocations},
		{"huge_bytes", stats->huge_bytes},
		{"peak_charged_bytes", stats->peak_charged_bytes},
		{"budget_bytes", stats->budget_bytes},
		{"resident_growth_bytes", stats->resident_growth_bytes},
		{"page_cache_growth_bytes", stats->page_cache_growth_bytes},
		{"overruns", stats->overruns},
		{"overrun_bytes", stats->overrun_bytes},
		{"io_threads", stats->io_threads},
	};
	json_t *object = json_object();
	bool failed = !object;

	add(object, "rank", integer(load->rank), &failed);
	add(object, "pid", integer((uint64_t)getpid()), &failed);
	add(object, "ok", json_boolean(load->end_code >= 0), &failed);
	add(object, "seconds", seconds(stats->elapsed_ns), &failed);
	for (size_t i = 0; i < sizeof(counts) / sizeof(*counts); i++)
		add(object, counts[i].key, integer(counts[i].value), &failed);
	add(object, "escaped",
	    escaped ? names(escaped->names, escaped->name_count, &failed) : json_array(), &failed);
	add(object, "files", files(load, &failed), &failed);
	add(object, "waits", waits(load, &failed), &failed);
	add(object, "stage_seconds", stages(stats), &failed);
	add(object, "copied",
	    names((const char *const *)load->copied.items, load->copied.count, &failed), &failed);
	add(object, "cpus", json_string(load->storage_stats.cpus), &failed);
	add(object, "numa", json_string(load->storage_stats.numa), &failed);
	add(object, "registration", json_string("none"), &failed);
	if (!failed)
		return object;
	json_decref(object);
	return NULL;
}

/* -- of a node's reader -- */

static json_t *members(const struct tnd__outlet *outlet, bool lost, bool *failed)
{
	json_t *array = json_array();

	for (size_t i = 0; i < outlet->member_count; i++)
		if (!lost || outlet->held[i].lost)
			append(array, integer(outlet->held[i].rank), failed);
	return array;
}

static json_t *share_report(const struct tnd__outlet *outlet)
{
	const struct tnd_load *load = outlet->load;
	const struct tnd_load_stats *stats = &load->stats;
	const struct {
		const char *key;
		uint64_t value;
	} counts[] = {
		{"union_bytes", load->totals.read_bytes},
		{"storage_bytes", stats->storage_bytes},
		{"metadata_bytes", stats->metadata_bytes},
		{"slabs", load->slab_count},
		{"slab_bytes", load->totals.slab_capacity_bytes},
		{"allocations", stats->allocations},
		{"huge_bytes", stats->huge_bytes},
		{"budget_bytes", stats->budget_bytes},
		{"set_aside_bytes", outlet->set_aside_bytes},
		{"peak_charged_bytes",
		 stats->peak_charged_bytes -
			 TND__MIN(stats->peak_charged_bytes, outlet->set_aside_bytes)},
		{"resident_growth_bytes", stats->resident_growth_bytes},
		{"page_cache_growth_bytes", stats->page_cache_growth_bytes},
		{"io_threads", stats->io_threads},
		{"guests_let_go", outlet->guests_let_go},
	};
	json_t *object = json_object();
	bool failed = !object;

	add(object, "pid", integer((uint64_t)getpid()), &failed);
	add(object, "ok", json_boolean(load->end_code >= 0), &failed);
	add(object, "seconds", seconds(stats->elapsed_ns), &failed);
	add(object, "members", members(outlet, false, &failed), &failed);
	add(object, "lost", members(outlet, true, &failed), &failed);
	for (size_t i = 0; i < sizeof(counts) / sizeof(*counts); i++)
		add(object, counts[i].key, integer(counts[i].value), &failed);
	add(object, "files", files(load, &failed), &failed);
	add(object, "waits", waits(load, &failed), &failed);
	add(object, "stage_seconds", stages(stats), &failed);
	add(object, "cpus", json_string(load->storage_stats.cpus), &failed);
	add(object, "numa", json_string(load->storage_stats.numa), &failed);
	if (!failed)
		return object;
	json_decref(object);
	return NULL;
}

static int print(json_t *object, char **ret_text)
{
	char *text = object ? json_dumps(object, JSON_COMPACT) : NULL;

	json_decref(object);
	if (!text)
		return -ENOMEM;
	*ret_text = text;
	return 0;
}

int tnd_load_report_json(struct tnd_load *load, char **ret_text)
{
	return load->ended ? print(report(load), ret_text) : TND_E_INVALID;
}

int tnd__share_report(const struct tnd__outlet *outlet, char **ret_text)
{
	return print(share_report(outlet), ret_text);
}

int tnd__load_memlog(struct tnd_load *load, const struct tnd_slab_stats *slabs)
{
	const struct tnd_load_stats *stats = &load->stats;
	struct tnd__memlog log = {
		.phase = phase_names[load->phase],
		.read_bytes = stats->read_bytes,
		.kept_bytes = stats->kept_bytes,
		.storage_bytes = stats->storage_bytes,
		.shards_opened = stats->shards_opened,
		.shards_skipped = stats->shards_skipped,
		.tensors = stats->tensors,
		.sliced = stats->sliced,
		.buffers = stats->buffers,
		.buffer_bytes = stats->buffer_bytes,
		.slabs = stats->slabs,
		.slab_bytes = load->totals.slab_bytes,
		.slab_peak_live = stats->peak_live,
		.slab_peak_bytes = stats->peak_live_bytes,
		.slabs_alive_after_release = slabs->live,
		.live_maps = slabs->live,
		.live_map_bytes = slabs->mapped_bytes,
		.start_available = load->memory_before.mem_available,
	};

	log.host.struct_bytes = sizeof(log.host);
	tnd_host_memory(&log.host);
	return tnd__memlog_json(&log, &load->memlog);
}

int tnd_load_memlog_json(struct tnd_load *load, char **ret_text)
{
	char *text;

	if (!load->ended)
		return TND_E_INVALID;
	text = load->memlog ? strdup(load->memlog) : NULL;
	if (!text)
		return -ENOMEM;
	*ret_text = text;
	return 0;
}
