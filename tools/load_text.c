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

static double seconds_of(const struct load_rank *rank)
{
	json_t *seconds = json_object_get(rank->report, "seconds");

	return seconds ? json_number_value(seconds) : rank->seconds;
}

static double waited(const struct load_rank *rank, const char *what)
{
	json_t *waits = json_object_get(rank->report, "waits");

	return json_number_value(json_object_get(waits, what));
}

static const char *result_of(const struct load_rank *rank)
{
	return rank->code ? tnd_error_name(rank->code) : "ok";
}

/* Where each rank reads for itself. */
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

		tool_table_add(&table, "%u", rank->rank);
		tool_table_add(&table, "%" PRIu64, load_rank_u64(rank, "tensors"));
		tool_table_add_size(&table, load_rank_u64(rank, "kept_bytes"));
		tool_table_add_size(&table, load_rank_u64(rank, "read_bytes"));
		tool_table_add_size(&table, load_rank_u64(rank, "storage_bytes"));
		tool_table_add_size(&table, load_rank_u64(rank, "peak_charged_bytes"));
		tool_table_add(&table, "%.2f", seconds_of(rank));
		tool_table_add(&table, "%s", result_of(rank));
	}
	return tool_table_print(&table, stdout);
}

/* Where one reads for all: how long each waited for data, instead of what it read. */
static int print_members(const struct load_node *node)
{
	static const char *const heads[] = {"RANK",   "TENSORS", "KEPT",  "PEAK",
					    "WAITED", "SECONDS", "RESULT"};
	static const int aligns[] = {TOOL_RIGHT, TOOL_RIGHT, TOOL_RIGHT, TOOL_RIGHT,
				     TOOL_RIGHT, TOOL_RIGHT, TOOL_FLEX};
	struct tool_table table;

	tool_table_init(&table, 7, heads, aligns);
	for (size_t i = 0; i < node->count; i++) {
		const struct load_rank *rank = &node->ranks[i];

		tool_table_add(&table, "%u", rank->rank);
		tool_table_add(&table, "%" PRIu64, load_rank_u64(rank, "tensors"));
		tool_table_add_size(&table, load_rank_u64(rank, "kept_bytes"));
		tool_table_add_size(&table, load_rank_u64(rank, "peak_charged_bytes"));
		tool_table_add(&table, "%.2f", waited(rank, "storage"));
		tool_table_add(&table, "%.2f", seconds_of(rank));
		tool_table_add(&table, "%s", result_of(rank));
	}
	return tool_table_print(&table, stdout);
}

/* Less than this is how processes are scheduled. */
#define HELD_UP_SECONDS 0.01

static json_t *worst_of(json_t *list)
{
	json_t *one, *worst = NULL;
	size_t index;

	json_array_foreach(list, index,
			   one) if (json_number_value(json_object_get(one, "seconds")) >=
				    (worst ? json_number_value(json_object_get(worst, "seconds"))
					   : HELD_UP_SECONDS)) worst = one;
	return worst;
}

static void print_held_up(const struct load_node *node)
{
	json_t *waits = json_object_get(node->share, "waits");
	json_t *worst = worst_of(json_object_get(waits, "held_up_by"));

	if (worst)
		printf("pace     rank %d held the others up for %.2f s\n",
		       (int)json_integer_value(json_object_get(worst, "rank")),
		       json_number_value(json_object_get(worst, "seconds")));
	else
		printf("pace     no rank held the others up\n");
}

static void print_share(const struct load_node *node)
{
	char a[TND_SIZE_TEXT_MAX], b[TND_SIZE_TEXT_MAX];

	if (!node->hosting) {
		printf("storage  rank %u reads for all, at %s\n", node->host_rank, node->address);
		return;
	}
	printf("storage  rank %u read %s for all; together they need %s\n", node->host_rank,
	       tnd_size_format(load_storage_bytes(node), a), tnd_size_format(node->union_bytes, b));
	print_held_up(node);
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

struct ways {
	char *texts[WAYS_MAX];
	size_t counts[WAYS_MAX], used;
};

static void add_ways(struct ways *ways, json_t *files)
{
	json_t *file;
	size_t index;

	json_array_foreach(files, index, file)
	{
		char *way = way_of(file);
		size_t at = 0;

		while (way && at < ways->used && strcmp(ways->texts[at], way) != 0)
			at++;
		if (way && at == ways->used && at < WAYS_MAX) {
			ways->texts[ways->used++] = way;
			way = NULL;
		}
		if (at < ways->used)
			ways->counts[at]++;
		free(way);
	}
}

/* How the files were read, each way once with the number of files that it was used for. */
static void print_ways(const struct load_node *node)
{
	struct ways ways = {.used = 0};

	add_ways(&ways, json_object_get(node->share, "files"));
	for (size_t i = 0; i < node->count; i++)
		add_ways(&ways, json_object_get(node->ranks[i].report, "files"));
	for (size_t i = 0; i < ways.used; i++) {
		char *shown = tool_printable(ways.texts[i], strlen(ways.texts[i]));

		printf("%s  %zu x ", i ? "         " : "files    ", ways.counts[i]);
		tool_put_wrapped(stdout, shown ? shown : "", 15, 15);
		free(shown);
		free(ways.texts[i]);
	}
}

static bool cache_growth(json_t *report, uint64_t *sum)
{
	json_t *growth = json_object_get(report, "page_cache_growth_bytes");

	*sum += (uint64_t)json_integer_value(growth);
	return json_is_integer(growth) && json_integer_value(growth) >= 0;
}

/* The share's resident memory is its process's, in which the consumer's cannot be told apart. */
static void print_growth(const struct load_node *node)
{
	uint64_t cache = 0, resident = load_sum(node, "resident_growth_bytes") +
				       load_share_u64(node, "resident_growth_bytes");
	char text[TND_SIZE_TEXT_MAX];
	bool known = true;

	if (node->share)
		known = cache_growth(node->share, &cache);
	for (size_t i = 0; i < node->count && !node->address; i++)
		known = cache_growth(node->ranks[i].report, &cache) && known;
	printf("         ");
	if (!node->share || !node->command->keep)
		printf("%s resident and ", tnd_size_format(resident, text));
	if (known)
		printf("%s of page cache more than before\n", tnd_size_format(cache, text));
	else
		printf("page cache that the kernel does not tell\n");
}

static void print_memory(const struct load_node *node)
{
	char a[TND_SIZE_TEXT_MAX], b[TND_SIZE_TEXT_MAX];

	printf("memory   %s charged at most, of a budget of %s\n",
	       tnd_size_format(load_peak_bytes(node), a),
	       tnd_size_format(load_budget_bytes(node), b));
	print_growth(node);
	printf("         (bound: the budget and 32 MiB a rank, %s)\n",
	       tnd_size_format(load_budget_bytes(node) + node->count * RANK_SLACK, b));
}

int load_print(const struct load_node *node)
{
	uint64_t kept = load_sum(node, "kept_bytes");
	char a[TND_SIZE_TEXT_MAX];
	int status = node->address ? print_members(node) : print_ranks(node);
	printf("\n%-8s %s in %.2f s, %.2f GB/s\n", node->code ? "stopped" : "loaded",
	       tnd_size_format(kept, a), node->seconds,
	       node->seconds > 0 ? (double)kept / 1e9 / node->seconds : 0);
	if (node->address)
		print_share(node);
	print_memory(node);
	print_ways(node);
	return status;
}
