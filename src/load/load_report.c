/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load_report.c - what a load did, as JSON: one rank's object of tundish.load/1, and the memory log
 * of the phase
 */
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "load_internal.h"

static const char *const cache_names[] = {"unknown", "cold", "warm", "mixed"};
static const char *const phase_names[] = {"all", "target", "draft"};

static json_t *integer(uint64_t value)
{
	return value == TND_HOST_UNKNOWN ? json_null() : json_integer((json_int_t)value);
}

static json_t *seconds(uint64_t ns)
{
	return json_real((double)ns / 1e9);
}

static json_t *names(const char *const *list, size_t count)
{
	json_t *array = json_array();

	for (size_t i = 0; array && i < count; i++)
		json_array_append_new(array, json_string(list[i]));
	return array;
}

static json_t *files(const struct tnd_load *load)
{
	json_t *array = json_array();

	for (size_t i = 0; array && i < load->file_count; i++) {
		const struct tnd__load_file *file = &load->load_files[i];
		const struct tnd__source_report *report = &file->report;

		if (!file->reported)
			continue;
		json_array_append_new(array, json_pack("{s:s, s:s, s:b, s:s, s:s}", "name",
						       load->files[i].name, "engine",
						       report->engine, "direct", report->direct,
						       "cache", cache_names[report->cache],
						       "fallback", report->fallback));
	}
	return array;
}

static json_t *waits(const struct tnd_load_stats *stats)
{
	return json_pack("{s:o, s:o, s:o, s:[]}", "storage", seconds(stats->storage_wait_ns),
			 "budget", seconds(stats->budget_wait_ns), "consumer",
			 seconds(stats->consumer_wait_ns), "held_up_by");
}

static json_t *stages(const struct tnd_load_stats *stats)
{
	return json_pack("{s:o, s:o, s:o}", "read", seconds(stats->read_ns), "gather",
			 seconds(stats->gather_ns), "deliver", seconds(stats->deliver_ns));
}

/* Adds `value` (taken over) under `key`. */
static void add(json_t *object, const char *key, json_t *value)
{
	json_object_set_new(object, key, value);
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

	if (!object)
		return NULL;
	add(object, "rank", integer(load->rank));
	add(object, "pid", integer((uint64_t)getpid()));
	add(object, "ok", json_boolean(load->end_code >= 0));
	add(object, "seconds", seconds(stats->elapsed_ns));
	for (size_t i = 0; i < sizeof(counts) / sizeof(*counts); i++)
		add(object, counts[i].key, integer(counts[i].value));
	add(object, "escaped", escaped ? names(escaped->names, escaped->name_count) : json_array());
	add(object, "files", files(load));
	add(object, "waits", waits(stats));
	add(object, "stage_seconds", stages(stats));
	add(object, "copied", names((const char *const *)load->copied.items, load->copied.count));
	add(object, "cpus", json_string(load->storage_stats.cpus));
	add(object, "numa", json_string(load->storage_stats.numa));
	add(object, "registration", json_string("none"));
	return object;
}

int tnd_load_report_json(struct tnd_load *load, char **ret_text)
{
	json_t *object;
	char *text;

	if (!load->ended)
		return TND_E_INVALID;
	object = report(load);
	text = object ? json_dumps(object, JSON_COMPACT) : NULL;
	json_decref(object);
	if (!text)
		return -ENOMEM;
	*ret_text = text;
	return 0;
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
