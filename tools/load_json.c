/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load_json.c - `tundish.load/1` from what the ranks reported
 *
 * A rank that died or was refused has no report of the library; its object has every key all the
 * same, with nothing in it, so that readers need no special case.
 */
#include "load_parts.h"

#include <string.h>

static void default_key(json_t *object, const char *key, json_t *value, bool *failed)
{
	if (json_object_get(object, key))
		json_decref(value);
	else
		tool_json_set(object, key, value, failed);
}

static void default_object(json_t *object, const char *key, const char *const *names, bool *failed)
{
	json_t *inner;

	default_key(object, key, json_object(), failed);
	inner = json_object_get(object, key);
	for (; *names; names++)
		default_key(inner, *names, json_real(0), failed);
}

static void complete(json_t *object, const char *const *counts, size_t count, bool *failed)
{
	for (size_t i = 0; i < count; i++)
		default_key(object, counts[i], json_integer(0), failed);
}

static void complete_lists(json_t *object, const char *const *lists, size_t count, bool *failed)
{
	for (size_t i = 0; i < count; i++)
		default_key(object, lists[i], json_array(), failed);
}

static void complete_times(json_t *object, bool *failed)
{
	static const char *const waits[] = {"storage", "budget", "consumer", NULL};
	static const char *const stages[] = {"read", "gather", "deliver", NULL};

	default_object(object, "waits", waits, failed);
	default_key(json_object_get(object, "waits"), "held_up_by", json_array(), failed);
	default_object(object, "stage_seconds", stages, failed);
}

void load_rank_complete(json_t *object, const struct load_rank *rank, bool *failed)
{
	static const char *const counts[] = {"tensors",
					     "read_bytes",
					     "kept_bytes",
					     "storage_bytes",
					     "metadata_bytes",
					     "realigned_bytes",
					     "buffers",
					     "slabs",
					     "allocations",
					     "huge_bytes",
					     "peak_charged_bytes",
					     "resident_growth_bytes",
					     "page_cache_growth_bytes",
					     "overruns",
					     "overrun_bytes",
					     "io_threads"};
	static const char *const lists[] = {"escaped", "files", "copied"};

	tool_json_set(object, "rank", json_integer(rank->rank), failed);
	tool_json_set(object, "pid", json_integer(rank->pid), failed);
	tool_json_set(object, "ok", json_boolean(rank->ended && rank->code == 0), failed);
	default_key(object, "seconds", json_real(rank->seconds), failed);
	complete(object, counts, sizeof(counts) / sizeof(counts[0]), failed);
	complete_lists(object, lists, sizeof(lists) / sizeof(lists[0]), failed);
	complete_times(object, failed);
	default_key(object, "cpus", json_string(""), failed);
	default_key(object, "numa", json_string("auto"), failed);
	default_key(object, "registration", json_string("none"), failed);
}

uint64_t load_rank_u64(const struct load_rank *rank, const char *key)
{
	return (uint64_t)json_integer_value(json_object_get(rank->report, key));
}

uint64_t load_budget_bytes(const struct load_node *node)
{
	const struct tool_plan_options *options = &node->command->options;

	/* Plans of a share have the node's. */
	if (node->command->shared && !node->command->guest)
		return options->plan.budget_bytes;
	return options->plan.budget_bytes * (options->rank_given ? 1 : tool_rank_count(options));
}

static json_t *error_json(const struct load_node *node, bool *failed)
{
	json_t *object;

	if (node->code == 0)
		return json_null();
	object = json_object();
	tool_json_set(object, "code", json_string(tnd_error_name(node->code)), failed);
	tool_json_set(object, "rank",
		      node->error.rank < 0 ? json_null() : json_integer(node->error.rank), failed);
	tool_json_set(object, "file", json_string(node->error.file), failed);
	tool_json_set(object, "tensor", json_string(node->error.name), failed);
	tool_json_set(object, "message", json_string(node->error.message), failed);
	return object;
}

uint64_t load_sum(const struct load_node *node, const char *key)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < node->count; i++)
		sum += load_rank_u64(&node->ranks[i], key);
	return sum;
}

uint64_t load_share_u64(const struct load_node *node, const char *key)
{
	return (uint64_t)json_integer_value(json_object_get(node->share, key));
}

uint64_t load_storage_bytes(const struct load_node *node)
{
	return load_sum(node, "storage_bytes") + load_share_u64(node, "storage_bytes");
}

uint64_t load_peak_bytes(const struct load_node *node)
{
	return load_sum(node, "peak_charged_bytes") + load_share_u64(node, "peak_charged_bytes");
}

/*
 * A rank has its last tensor before the share knows who was late at its end: what the share says of
 * the others is told as the rank's.
 */
static void add_held_up_by(const struct load_node *node, const struct load_rank *rank,
			   json_t *object, bool *failed)
{
	json_t *waits = json_copy(json_object_get(object, "waits")), *list = json_array(), *one;
	size_t index;

	json_array_foreach(json_object_get(json_object_get(node->share, "waits"), "held_up_by"),
			   index,
			   one) if (json_integer_value(json_object_get(one, "rank")) != rank->rank)
		tool_json_append(list, json_incref(one), failed);
	tool_json_set(waits, "held_up_by", list, failed);
	tool_json_set(object, "waits", waits, failed);
}

/* What the share has read, and how, is told as the host's. */
static void add_shared(const struct load_node *node, const struct load_rank *rank, json_t *object,
		       bool *failed)
{
	json_t *files = json_object_get(node->share, "files");

	if (rank->rank == node->host_rank) {
		tool_json_set(object, "storage_bytes",
			      tool_json_u64(load_rank_u64(rank, "storage_bytes") +
					    load_share_u64(node, "storage_bytes")),
			      failed);
		tool_json_set(object, "io_threads",
			      tool_json_u64(load_share_u64(node, "io_threads")), failed);
		if (json_is_array(files))
			tool_json_set(object, "files", json_incref(files), failed);
	}
	add_held_up_by(node, rank, object, failed);
}

static void add_ranks(const struct load_node *node, json_t *document, bool *failed)
{
	json_t *ranks = json_array();

	for (size_t i = 0; i < node->count; i++) {
		struct load_rank *rank = &node->ranks[i];
		json_t *object = rank->report ? json_copy(rank->report) : json_object();

		load_rank_complete(object, rank, failed);
		if (node->share)
			add_shared(node, rank, object, failed);
		tool_json_append(ranks, object, failed);
	}
	tool_json_set(document, "ranks", ranks, failed);
}

static void add_node(const struct load_node *node, json_t *document, bool *failed)
{
	json_t *totals = json_object();

	tool_json_set(totals, "storage_bytes", tool_json_u64(load_storage_bytes(node)), failed);
	tool_json_set(totals, "peak_charged_bytes", tool_json_u64(load_peak_bytes(node)), failed);
	tool_json_set(totals, "union_bytes",
		      node->hosting ? tool_json_u64(node->union_bytes) : json_null(), failed);
	tool_json_set(document, "node", totals, failed);
}

static void complete_share(json_t *object, bool *failed)
{
	static const char *const counts[] = {"pid",
					     "storage_bytes",
					     "metadata_bytes",
					     "slabs",
					     "slab_bytes",
					     "allocations",
					     "huge_bytes",
					     "budget_bytes",
					     "set_aside_bytes",
					     "peak_charged_bytes",
					     "resident_growth_bytes",
					     "page_cache_growth_bytes",
					     "io_threads",
					     "guests_let_go"};
	static const char *const lists[] = {"members", "lost", "files"};

	default_key(object, "ok", json_false(), failed);
	default_key(object, "seconds", json_real(0), failed);
	complete(object, counts, sizeof(counts) / sizeof(counts[0]), failed);
	complete_lists(object, lists, sizeof(lists) / sizeof(lists[0]), failed);
	complete_times(object, failed);
	default_key(object, "cpus", json_string(""), failed);
	default_key(object, "numa", json_string("auto"), failed);
}

/* The library's object of the share; without one, when the host has died, what is known. */
static void add_share(const struct load_node *node, json_t *document, bool *failed)
{
	json_t *object;

	if (!node->hosting || !node->count) {
		tool_json_set(document, "share", json_null(), failed);
		return;
	}
	object = node->share ? json_copy(node->share) : json_object();
	tool_json_set(object, "host_rank", json_integer(node->host_rank), failed);
	tool_json_set(object, "union_bytes", tool_json_u64(node->union_bytes), failed);
	complete_share(object, failed);
	tool_json_set(document, "share", object, failed);
}

static void add_memlog(const struct load_node *node, json_t *document, bool *failed)
{
	json_t *memlog = json_array();

	for (size_t i = 0; i < node->count; i++) {
		json_t *record = node->ranks[i].memlog;

		if (!record)
			continue;
		default_key(record, "rank", json_integer(node->ranks[i].rank), failed);
		tool_json_append(memlog, json_incref(record), failed);
	}
	tool_json_set(document, "memlog", memlog, failed);
}

json_t *load_document(const struct load_node *node)
{
	json_t *document = tool_json_document("tundish.load/1");
	uint64_t kept = load_sum(node, "kept_bytes");
	bool failed = !document;

	tool_json_set(document, "ok", json_boolean(node->code == 0), &failed);
	tool_json_set(document, "error", error_json(node, &failed), &failed);
	tool_json_set(document, "seconds", json_real(node->seconds), &failed);
	tool_json_set(document, "kept_bytes_per_second",
		      json_real(node->seconds > 0 ? (double)kept / node->seconds : 0), &failed);
	tool_json_set(document, "budget_bytes", tool_json_u64(load_budget_bytes(node)), &failed);
	add_ranks(node, document, &failed);
	add_node(node, document, &failed);
	add_share(node, document, &failed);
	add_memlog(node, document, &failed);
	if (!failed)
		return document;
	json_decref(document);
	return NULL;
}
