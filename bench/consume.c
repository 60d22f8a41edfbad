/* SPDX-License-Identifier: Apache-2.0 */
/*
 * consume.c - one rank that loads a checkpoint through the public interface, for bench/load.py
 *
 *   consume --mode=upload|copy|keep|touched [options] PATH        (--help lists them)
 *
 * The conversation is that of bench/peers/worker.py: prepare, print "ready", wait for a line, load against the clock, print one JSON
 * line, stay until input ends. The clock covers everything from opening the checkpoint to the end of the load.
 *
 *   upload    each view is dropped as it comes, as after a device copy by DMA
 *   copy      each view is copied once into one reused buffer of 16 MiB, as a device copy through pinned memory does
 *   keep      each view is copied into fresh memory of its own, which is kept
 *   touched   the same into memory that was touched before the clock starts, 2 MiB pages asked for
 *
 * With --share, the ranks are members of one shared load, which the first rank's process reads for all; the budget is the node's.
 * With --own, keep and touched need no copy: the library reads to where the tensor stays.
 * Everything that is kept stays until the process ends: it is looked at from outside.
 */
#include <argp.h>
#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <tundish/tundish.h>
#include <xxhash.h>

#define STAGE_BYTES ((size_t)16 << 20)
#define HUGE_BYTES ((size_t)2 << 20)
#define PAGE_BYTES ((size_t)4096)

enum mode { MODE_UPLOAD, MODE_COPY, MODE_KEEP, MODE_TOUCHED };

struct options {
	enum mode mode;
	bool own, model;
	const char *path, *sums, *report, *share;
	struct tnd_layout layout;
	struct tnd_plan_opts plan;
	struct tnd_load_opts load;
};

/* Rows of every matrix, vectors whole: what the peers' ranks take, so that all do the same work. The last rule that matches counts. */
static const char row_rules[] = "* 0\n*norm* none\n";

struct keeper {
	const struct options *options;
	unsigned char *stage;
	unsigned char **places; /* of each item: where its tensor begins */
	unsigned char *arena;
	unsigned char *current; /* where the tensor whose pieces come now begins */
	const struct tnd_plan_item *items;
	XXH3_state_t *hash;
	FILE *sums;
	uint64_t tensors, bytes;
	double start, end;
};

static _Noreturn void die(const char *what, const struct tnd_error *error)
{
	fprintf(stderr, "consume: %s: %s\n", what, error ? error->message : strerror(errno));
	exit(1);
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static unsigned char *touched(size_t bytes)
{
	unsigned char *map;

	bytes = (bytes + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
	map = mmap(NULL, bytes + HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
		   -1, 0);
	if (map == MAP_FAILED)
		die("mmap", NULL);
	map += -(uintptr_t)map % HUGE_BYTES;
	madvise(map, bytes, MADV_HUGEPAGE);
	memset(map, 1, bytes);
	return map;
}

/* -- options -- */

enum {
	KEY_OWN = 256,
	KEY_SLAB,
	KEY_PACKING,
	KEY_ENGINE,
	KEY_DIRECT,
	KEY_DEPTH,
	KEY_SUMS,
	KEY_REPORT,
	KEY_SHARE,
	KEY_MODEL,
	KEY_KEEP_CACHE
};

static const struct argp_option option_table[] = {
	{"mode", 'm', "MODE", 0, "upload, copy, keep or touched", 0},
	{"own", KEY_OWN, NULL, 0, "the library reads to where tensors stay", 0},
	{"budget", 'b', "SIZE", 0, "of this rank", 0},
	{"slab", KEY_SLAB, "SIZE", 0, "0: a buffer per tensor", 0},
	{"packing", KEY_PACKING, "WHICH", 0, "name or file", 0},
	{"engine", KEY_ENGINE, "WHICH", 0, "auto, uring or threads", 0},
	{"direct", KEY_DIRECT, "WHICH", 0, "auto, on or off", 0},
	{"threads", 't', "COUNT", 0, "I/O threads", 0},
	{"depth", KEY_DEPTH, "COUNT", 0, "reads in flight", 0},
	{"keep-cache", KEY_KEEP_CACHE, NULL, 0, "leave the page cache filled", 0},
	{"tp", 'n', "COUNT", 0, "ranks; each takes rows of every matrix", 0},
	{"rank", 'r', "RANK", 0, "this one", 0},
	{"sums", KEY_SUMS, "FILE", 0, "XXH3 of each tensor", 0},
	{"share", KEY_SHARE, "ADDRESS", 0, "a shared load, whose ranks meet there", 0},
	{"model", KEY_MODEL, NULL, 0, "slices as the model's layers want them: columns, too", 0},
	{"report", KEY_REPORT, "FILE", 0, "the load's JSON report", 0},
	{0},
};

/* Index of `text` in the NULL-terminated list. */
static uint32_t choose(struct argp_state *state, const char *text, const char *const *list)
{
	for (uint32_t i = 0; list[i]; i++)
		if (strcmp(text, list[i]) == 0)
			return i;
	argp_error(state, "unknown word '%s'", text);
	return 0;
}

static uint64_t size(struct argp_state *state, const char *text)
{
	uint64_t bytes = 0;

	if (tnd_size_parse(text, &bytes) < 0)
		argp_error(state, "expected a size, found '%s'", text);
	return bytes;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
	static const char *const modes[] = {"upload", "copy", "keep", "touched", NULL};
	static const char *const packings[] = {"default", "name", "file", NULL};
	static const char *const engines[] = {"auto", "uring", "threads", NULL};
	static const char *const directs[] = {"auto", "on", "off", NULL};
	struct options *options = state->input;
	uint64_t bytes;

	switch (key) {
	case 'm':
		options->mode = (enum mode)choose(state, arg, modes);
		break;
	case KEY_OWN:
		options->own = true;
		break;
	case 'b':
		options->plan.budget_bytes = size(state, arg);
		break;
	case KEY_SLAB:
		bytes = size(state, arg);
		options->plan.slab_bytes = bytes ? (int64_t)bytes : TND_SLAB_NONE;
		break;
	case KEY_PACKING:
		options->plan.packing = choose(state, arg, packings);
		break;
	case KEY_ENGINE:
		options->load.engine = choose(state, arg, engines);
		break;
	case KEY_DIRECT:
		options->load.direct = choose(state, arg, directs);
		break;
	case 't':
		options->load.thread_count = (uint32_t)strtoul(arg, NULL, 10);
		break;
	case KEY_DEPTH:
		options->load.queue_depth = (uint32_t)strtoul(arg, NULL, 10);
		break;
	case KEY_KEEP_CACHE:
		options->load.flags |= TND_LOAD_F_KEEP_CACHE;
		break;
	case 'n':
		options->layout.tp_size = (uint32_t)strtoul(arg, NULL, 10);
		break;
	case 'r':
		options->layout.rank = (uint32_t)strtoul(arg, NULL, 10);
		break;
	case KEY_SUMS:
		options->sums = arg;
		break;
	case KEY_REPORT:
		options->report = arg;
		break;
	case KEY_SHARE:
		options->share = options->load.share = arg;
		break;
	case KEY_MODEL:
		options->model = true;
		break;
	case ARGP_KEY_ARG:
		if (options->path)
			argp_error(state, "expected one path");
		options->path = arg;
		break;
	case ARGP_KEY_NO_ARGS:
		argp_error(state, "expected a path");
		break;
	default:
		return ARGP_ERR_UNKNOWN;
	}
	return 0;
}

static void finish_options(struct options *options)
{
	options->plan.oversize = TND_OVERSIZE_PIECES;
	if (options->layout.tp_size > 1) {
		options->plan.slice = TND_SLICE_ALL;
		options->plan.rules = options->model ? NULL : row_rules;
	}
	if (options->own) {
		options->load.flags |= TND_LOAD_F_OWN;
		options->plan.oversize = TND_OVERSIZE_OVERRUN;
	}
}

/* -- the consumer -- */

static struct tnd_checkpoint *open_checkpoint(const struct options *options)
{
	struct tnd_checkpoint *checkpoint;
	struct tnd_error error;

	if (tnd_checkpoint_open(options->path, NULL, &checkpoint, &error) < 0)
		die("open", &error);
	return checkpoint;
}

static void open_plan(const struct options *options, struct tnd_plan **ret_plan)
{
	struct tnd_checkpoint *checkpoint = open_checkpoint(options);
	struct tnd_error error;

	if (tnd_plan_create(checkpoint, &options->layout, &options->plan, ret_plan, &error) < 0)
		die("plan", &error);
	tnd_checkpoint_close(checkpoint);
}

/* The first rank reads for all. Return: NULL for the others. */
static struct tnd_share *open_share(const struct options *options)
{
	struct tnd_share_opts opts = {.struct_bytes = sizeof(opts), .address = options->share};
	struct tnd_load_opts load = options->load;
	struct tnd_checkpoint *checkpoint;
	struct tnd_share *share;
	struct tnd_error error;
	struct tnd_plan *plan;

	if (!options->share || options->layout.rank)
		return NULL;
	load.share = NULL;
	opts.load = &load;
	checkpoint = open_checkpoint(options);
	if (tnd_plan_create_union(checkpoint, &options->layout, NULL, 0, &options->plan, &plan,
				  &error) < 0 ||
	    tnd_share_open(plan, &opts, &share, &error) < 0)
		die("share", &error);
	tnd_plan_close(plan);
	tnd_checkpoint_close(checkpoint);
	return share;
}

static void close_share(struct tnd_share *share, struct tnd_load_stats *stats)
{
	struct tnd_load_stats figures = {.struct_bytes = sizeof(figures)};
	struct tnd_error error;

	if (!share)
		return;
	if (tnd_share_end(share, &error) < 0)
		die("share", &error);
	tnd_share_stats(share, &figures);
	stats->storage_bytes = figures.storage_bytes;
	stats->huge_bytes = figures.huge_bytes;
	stats->slabs = figures.slabs;
	stats->allocations = figures.allocations;
	stats->budget_wait_ns = figures.budget_wait_ns;
	stats->consumer_wait_ns = figures.consumer_wait_ns;
	stats->peak_charged_bytes += figures.peak_charged_bytes;
	tnd_share_close(share);
}

/*
 * The memory of every tensor, touched. A tensor begins where its bytes do in the file's 4 KiB block, so that a direct read needs no
 * copy: a caller who chooses the address can choose it so.
 */
static void prepare_touched(struct keeper *keeper)
{
	const struct tnd_plan_item *items;
	struct tnd_plan *plan;
	size_t count, at = 0;

	open_plan(keeper->options, &plan);
	items = tnd_plan_items(plan, &count);
	for (size_t i = 0; i < count; i++)
		at += items[i].kept_bytes + 2 * PAGE_BYTES;
	keeper->arena = touched(at + HUGE_BYTES);
	at = 0;
	for (size_t i = 0; i < count; i++) {
		if (items[i].piece_offset == 0)
			at = (at + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES +
			     (items[i].file_offset + items[i].part_begin[0]) % PAGE_BYTES;
		keeper->places[i] = keeper->arena + at;
		at += items[i].kept_bytes;
	}
	tnd_plan_close(plan);
}

static void prepare(struct keeper *keeper)
{
	struct tnd_plan *plan;
	size_t count;

	open_plan(keeper->options, &plan);
	tnd_plan_items(plan, &count);
	tnd_plan_close(plan);
	keeper->places = calloc(count + 1, sizeof(*keeper->places));
	keeper->stage = touched(STAGE_BYTES);
	if (!keeper->places)
		die("memory", NULL);
	if (keeper->options->mode == MODE_TOUCHED)
		prepare_touched(keeper);
	if (keeper->options->sums) {
		keeper->sums = fopen(keeper->options->sums, "w");
		if (!keeper->sums)
			die(keeper->options->sums, NULL);
	}
}

static void *place(void *arg, const struct tnd_plan_item *item)
{
	const struct keeper *keeper = arg;

	return keeper->arena ? keeper->places[item - keeper->items] : NULL;
}

/* Pieces of a tensor follow each other; the first brings the memory for all. */
static void keep(struct keeper *keeper, const struct tnd_view *view)
{
	void *memory;

	if (view->piece_offset == 0) {
		keeper->current = keeper->places[view->item];
		if (!keeper->current) {
			if (posix_memalign(&memory, 64, view->tensor_bytes + 1))
				die("memory", NULL);
			keeper->current = memory;
		}
	}
	memcpy(keeper->current + view->piece_offset, view->data, view->bytes);
}

static void stage(struct keeper *keeper, const struct tnd_view *view)
{
	const unsigned char *data = view->data;

	for (uint64_t at = 0; at < view->bytes; at += STAGE_BYTES)
		memcpy(keeper->stage, data + at,
		       view->bytes - at < STAGE_BYTES ? view->bytes - at : STAGE_BYTES);
}

static void sum(struct keeper *keeper, const struct tnd_view *view)
{
	if (view->piece_offset == 0)
		XXH3_64bits_reset(keeper->hash);
	XXH3_64bits_update(keeper->hash, view->data, view->bytes);
	if (view->flags & TND_VIEW_F_LAST)
		fprintf(keeper->sums, "%s\t%016" PRIx64 "\n", view->name,
			(uint64_t)XXH3_64bits_digest(keeper->hash));
}

static void take(struct keeper *keeper, struct tnd_view *view)
{
	const struct options *options = keeper->options;
	uint64_t map_bytes;
	void *memory;

	keeper->tensors += (view->flags & TND_VIEW_F_LAST) != 0;
	keeper->bytes += view->bytes;
	if (keeper->sums)
		sum(keeper, view);
	else if (view->bytes == 0)
		;
	else if (view->flags & TND_VIEW_F_OWN)
		tnd_view_take(view, &memory,
			      &map_bytes); /* refused where the memory is ours already */
	else if (options->mode == MODE_COPY)
		stage(keeper, view);
	else if (options->mode != MODE_UPLOAD)
		keep(keeper, view);
	tnd_view_release(view);
}

static void write_report(const struct options *options, struct tnd_load *load)
{
	FILE *file = fopen(options->report, "w");
	char *text = NULL;

	if (!file || tnd_load_report_json(load, &text) < 0)
		die(options->report, NULL);
	fputs(text, file);
	fclose(file);
	free(text);
}

static void run(struct keeper *keeper, struct tnd_load_stats *stats)
{
	struct tnd_load_opts opts = keeper->options->load;
	struct tnd_error error;
	struct tnd_plan *plan;
	struct tnd_load *load;
	struct tnd_share *share;
	struct tnd_view view;
	size_t count;
	int rc;

	share = open_share(keeper->options);
	open_plan(keeper->options, &plan);
	keeper->items = tnd_plan_items(plan, &count);
	opts.place = keeper->arena ? place : NULL;
	opts.place_arg = keeper;
	if (tnd_load_open(plan, &opts, &load, &error) < 0)
		die("load", &error);
	while ((rc = tnd_load_next(load, &view, &error)) == 1)
		take(keeper, &view);
	if (rc < 0 || tnd_load_end(load, &error) < 0)
		die("load", &error);
	keeper->end = now();
	tnd_load_stats(load, stats);
	if (keeper->options->report)
		write_report(keeper->options, load);
	close_share(share, stats);
	tnd_load_close(load);
	tnd_plan_close(plan);
}

static void print_result(const struct keeper *keeper, const struct tnd_load_stats *stats)
{
	printf("{\"start\": %.9f, \"end\": %.9f, \"tensors\": %" PRIu64 ", \"bytes\": %" PRIu64
	       ", \"peak_charged_bytes\": %" PRIu64 ", \"budget_bytes\": %" PRIu64
	       ", \"storage_bytes\": %" PRIu64 ", \"huge_bytes\": %" PRIu64 ", \"slabs\": %" PRIu64
	       ", \"allocations\": %" PRIu64 ", \"storage_wait_ns\": %" PRIu64
	       ", \"budget_wait_ns\": %" PRIu64 ", \"consumer_wait_ns\": %" PRIu64
	       ", \"gather_ns\": %" PRIu64 ", \"deliver_ns\": %" PRIu64 "}\n",
	       keeper->start, keeper->end, keeper->tensors, keeper->bytes,
	       stats->peak_charged_bytes, stats->budget_bytes, stats->storage_bytes,
	       stats->huge_bytes, stats->slabs, stats->allocations, stats->storage_wait_ns,
	       stats->budget_wait_ns, stats->consumer_wait_ns, stats->gather_ns, stats->deliver_ns);
	fflush(stdout);
}

int main(int argc, char **argv)
{
	static const struct argp argp = {
		option_table, parse,
		"PATH",       "Loads a checkpoint against the clock, for bench/load.py.",
		NULL,         NULL,
		NULL};
	struct options options = {.layout = {.struct_bytes = sizeof(options.layout)},
				  .plan = {.struct_bytes = sizeof(options.plan)},
				  .load = {.struct_bytes = sizeof(options.load)}};
	struct keeper keeper = {.options = &options, .hash = XXH3_createState()};
	struct tnd_load_stats stats = {.struct_bytes = sizeof(stats)};

	argp_parse(&argp, argc, argv, 0, NULL, &options);
	finish_options(&options);
	if (!keeper.hash)
		die("memory", NULL);
	prepare(&keeper);
	puts("ready");
	fflush(stdout);
	if (getchar() == EOF)
		return 0;
	keeper.start = now();
	run(&keeper, &stats);
	if (keeper.sums)
		fclose(keeper.sums);
	print_result(&keeper, &stats);
	while (getchar() != EOF)
		;
	return 0;
}
