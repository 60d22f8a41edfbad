/* SPDX-License-Identifier: Apache-2.0 */
/* load_text.c - the report of a load for people, from the same figures as `tundish.load/1` */
#include "load_parts.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/*
 * What a process may grow by beyond its budget: stacks, the allocator, the page tables of what it
 * touches.
 */
#define RANK_SLACK (UINT64_C(32) << 20)

static int print_ranks(const struct load_node *node)
{
	static const char *const heads[] = {"RANK",    "TENSORS", "KEPT",    "READ",
					    "STORAGE", "PEAK",    "SECONDS", "RESULT"};
	static const int aligns[] = {TOOL_RIGHT, TOOL_RIGHT, TOOL_RIGHT, TOOL_RIGHT,
				     TOOL_RIGHT, TOOL_RIGHT, TOOL_RIGHT, TOOL_FLEX};
	struct tool_table table;

	tool_table_init(&table, 8, heads, aligns);
	for (size_t i = 0; i < node->count; i++) {
		const struct load_rank *rank = &node->ranks[i];
		json_t *seconds = json_object_get(rank->report, "seconds");

		tool_table_add(&table, "%u", rank->rank);
		tool_table_add(&table, "%" PRIu64, load_rank_u64(rank, "tensors"));
		tool_table_add_size(&table, load_rank_u64(rank, "kept_bytes"));
		tool_table_add_size(&table, load_rank_u64(rank, "read_bytes"));
		tool_table_add_size(&table, load_rank_u64(rank, "storage_bytes"));
		tool_table_add_size(&table, load_rank_u64(rank, "peak_charged_bytes"));
		tool_table_add(&table, "%.2f",
			       seconds ? json_number_value(seconds) : rank->seconds);
		tool_table_add(&table, "%s", rank->code ? tnd_error_name(rank->code) : "ok");
	}
	return tool_table_print(&table, stdout);
}

static const char *text_of(json_t *file, const char *key)
{
	json_t *value = json_object_get(file, key);
	const char *text = json_string_value(value);

	if (json_is_boolean(value))
		return json_is_true(value) ? "direct" : "buffered";
	return text && text[0] ? text : NULL;
}

/* "io_uring, direct, cold; why it fell back" */
static char *way_of(json_t *file)
{
	const char *engine = text_of(file, "engine"), *direct = text_of(file, "direct");
	const char *cache = text_of(file, "cache"), *fallback = text_of(file, "fallback");
	char *text;

	if (asprintf(&text, "%s, %s, %s%s%s", engine ? engine : "not read",
		     direct ? direct : "buffered", cache ? cache : "unknown", fallback ? "; " : "",
		     fallback ? fallback : "") < 0)
		return NULL;
	return text;
}

#define WAYS_MAX 8

/* How the files were read, each way once with the number of files that it was used for. */
static void print_ways(const struct load_node *node)
{
	char *ways[WAYS_MAX] = {NULL};
	size_t counts[WAYS_MAX] = {0}, used = 0, index;
	json_t *file;

	for (size_t i = 0; i < node->count; i++) {
		json_array_foreach(json_object_get(node->ranks[i].report, "files"), index, file)
		{
			char *way = way_of(file);
			size_t at = 0;

			while (way && at < used && strcmp(ways[at], way) != 0)
				at++;
			if (way && at == used && used < WAYS_MAX) {
				ways[used++] = way;
				way = NULL;
			}
			if (at < used)
				counts[at]++;
			free(way);
		}
	}
	for (size_t i = 0; i < used; i++) {
		char *shown = tool_printable(ways[i], strlen(ways[i]));

		printf("%s  %zu x ", i ? "         " : "files    ", counts[i]);
		tool_put_wrapped(stdout, shown ? shown : "", 15, 15);
		free(shown);
		free(ways[i]);
	}
}

static void print_memory(const struct load_node *node)
{
	uint64_t charged = 0, resident = 0, cache = 0;
	char a[TND_SIZE_TEXT_MAX], b[TND_SIZE_TEXT_MAX];
	bool cache_known = true;

	for (size_t i = 0; i < node->count; i++) {
		json_t *growth = json_object_get(node->ranks[i].report, "page_cache_growth_bytes");

		charged += load_rank_u64(&node->ranks[i], "peak_charged_bytes");
		resident += load_rank_u64(&node->ranks[i], "resident_growth_bytes");
		cache_known =
			cache_known && json_is_integer(growth) && json_integer_value(growth) >= 0;
		cache += (uint64_t)json_integer_value(growth);
	}
	printf("memory   %s charged at most, of a budget of %s\n", tnd_size_format(charged, a),
	       tnd_size_format(load_budget_bytes(node), b));
	printf("         %s resident and ", tnd_size_format(resident, a));
	if (cache_known)
		printf("%s of page cache more than before\n", tnd_size_format(cache, a));
	else
		printf("page cache that the kernel does not tell\n");
	printf("         (bound: the budget and 32 MiB a rank, %s)\n",
	       tnd_size_format(load_budget_bytes(node) + node->count * RANK_SLACK, b));
}

int load_print(const struct load_node *node)
{
	uint64_t kept = 0;
	char a[TND_SIZE_TEXT_MAX];
	int status = print_ranks(node);

	for (size_t i = 0; i < node->count; i++)
		kept += load_rank_u64(&node->ranks[i], "kept_bytes");
	printf("\n%-8s %s in %.2f s, %.2f GB/s\n", node->code ? "stopped" : "loaded",
	       tnd_size_format(kept, a), node->seconds,
	       node->seconds > 0 ? (double)kept / 1e9 / node->seconds : 0);
	print_memory(node);
	print_ways(node);
	return status;
}
