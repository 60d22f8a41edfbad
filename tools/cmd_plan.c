/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cmd_plan.c - `tundish plan`: what each rank would read and keep, and whether it fits
 *
 * No data is read. All ranks' plans are made first, so that one that is refused prints nothing but
 * its error; then a summary with a line for each rank, with --tensors each tensor's place, or one
 * document (tundish.plan/1) that the library writes.
 */
#include "tool.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { KEY_TENSORS = TOOL_KEY, KEY_JSON };

struct plan_command {
	const char *path;
	bool tensors, json;
	struct tool_plan_options options;
};

static const struct argp_option options[] = {
	{"tensors", KEY_TENSORS, NULL, 0, "Each tensor's place", 0},
	{"json", KEY_JSON, NULL, 0, "One JSON document", 0},
	{0},
};

static error_t parse(int key, char *arg, struct argp_state *state)
{
	struct plan_command *command = state->input;

	switch (key) {
	case KEY_TENSORS:
		command->tensors = true;
		return 0;
	case KEY_JSON:
		command->json = true;
		return 0;
	case ARGP_KEY_INIT:
		state->child_inputs[1] = &command->options;
		state->child_inputs[2] = &command->options.checkpoint;
		return 0;
	case ARGP_KEY_ARG:
		tool_take_path(state, &command->path, arg);
		return 0;
	case ARGP_KEY_END:
		tool_need_path(state, command->path);
		return 0;
	default:
		return ARGP_ERR_UNKNOWN;
	}
}

static const struct argp_child children[] = {{&tool_common_argp, 0, NULL, 0},
					     {&tool_plan_argp, 0, NULL, 0},
					     {&tool_checkpoint_argp, 0, NULL, 0},
					     {0}};
static const struct argp argp = {
	.options = options,
	.parser = parse,
	.args_doc = "PATH",
	.doc = "Shows what each rank would read, keep and need, without reading data.",
	.children = children};

static int print_ranks(struct tnd_plan *const *plans, size_t count)
{
	static const char *const heads[] = {"RANK", "TENSORS", "SLICED", "READ",
					    "KEPT", "SLABS",   "PEAK",   "LEAST"};
	static const int aligns[] = {TOOL_RIGHT, TOOL_RIGHT, TOOL_RIGHT, TOOL_RIGHT,
				     TOOL_RIGHT, TOOL_RIGHT, TOOL_RIGHT, TOOL_RIGHT};
	struct tool_table table;

	tool_table_init(&table, 8, heads, aligns);
	for (size_t i = 0; i < count; i++) {
		struct tnd_plan_totals totals = {.struct_bytes = sizeof(totals)};

		tnd_plan_totals(plans[i], &totals);
		tool_table_add(&table, "%u", tnd_plan_layout(plans[i])->rank);
		tool_table_add(&table, "%" PRIu64, totals.tensors);
		tool_table_add(&table, "%" PRIu64, totals.sliced);
		tool_table_add_size(&table, totals.read_bytes);
		tool_table_add_size(&table, totals.kept_bytes);
		tool_table_add(&table, "%" PRIu64, totals.slabs);
		tool_table_add_size(&table, totals.peak_bytes);
		tool_table_add_size(&table, totals.least_budget_bytes);
	}
	return tool_table_print(&table, stdout);
}

static int print_places(const struct tnd_plan *plan)
{
	static const char *const heads[] = {"TENSOR", "DIM",  "START", "LENGTH",
					    "KEPT",   "SLAB", "OFFSET"};
	static const int aligns[] = {TOOL_FLEX,  TOOL_RIGHT, TOOL_RIGHT, TOOL_RIGHT,
				     TOOL_RIGHT, TOOL_RIGHT, TOOL_RIGHT};
	size_t count;
	const struct tnd_plan_item *items = tnd_plan_items(plan, &count);
	struct tool_table table;

	printf("\nrank %u\n", tnd_plan_layout(plan)->rank);
	tool_table_init(&table, 7, heads, aligns);
	for (size_t i = 0; i < count; i++) {
		const struct tnd_plan_item *item = &items[i];

		tool_table_add_name(&table, item->tensor->name, item->tensor->name_bytes);
		if (item->dim < 0) {
			tool_table_add(&table, "-");
			tool_table_add(&table, "-");
			tool_table_add(&table, "-");
		} else {
			tool_table_add(&table, "%d", item->dim);
			tool_table_add(&table, "%" PRIu64, item->start);
			tool_table_add(&table, "%" PRIu64, item->length);
		}
		tool_table_add(&table, "%" PRIu64, item->kept_bytes);
		if (item->slab == TND_PLAN_NO_SLAB)
			tool_table_add(&table, "-");
		else
			tool_table_add(&table, "%u", item->slab);
		tool_table_add(&table, "%" PRIu64, item->slab_offset);
	}
	return tool_table_print(&table, stdout);
}

static void print_summary(const struct plan_command *command, struct tnd_plan *const *plans,
			  size_t count)
{
	static const char *const slices[] = {"auto", "none", "experts", "all"};
	static const char *const packings[] = {"file", "name", "file"};
	static const char *const phases[] = {"all", "target", "draft"};
	struct tnd_plan_totals totals = {.struct_bytes = sizeof(totals)};
	const struct tnd_layout *layout = &command->options.layout;
	uint64_t node_bytes = 0;
	char a[TND_SIZE_TEXT_MAX], b[TND_SIZE_TEXT_MAX];

	tnd_plan_totals(plans[0], &totals);
	printf("tp %u, dp %u, ep %u, phase %s, slice %s, packing %s\n", layout->tp_size,
	       layout->dp_size, layout->ep_size, phases[tnd_plan_phase(plans[0]) % 3],
	       slices[totals.slice % 4], packings[totals.packing % 3]);
	printf("budget of a rank %s, ", tnd_size_format(totals.budget_bytes, a));
	if (totals.slab_bytes)
		printf("slabs up to %s", tnd_size_format(totals.slab_bytes, a));
	else
		printf("a buffer for each tensor");
	printf(", %" PRIu64 " of %" PRIu64 " files opened\n\n", totals.shards_opened,
	       totals.shards_opened + totals.shards_skipped);
	print_ranks(plans, count);
	if (tnd_plan_node_read_bytes(plans[0], &node_bytes) == 0)
		printf("\nAll ranks together read %s from storage, each byte once.\n",
		       tnd_size_format(node_bytes, b));
}

/* Whether one of the first `count` plans has the warning. */
static bool warned(struct tnd_plan *const *plans, size_t count, const char *warning)
{
	const char *const *texts;

	for (size_t p = 0; p < count; p++) {
		size_t text_count = tnd_plan_warnings(plans[p], &texts);

		for (size_t i = 0; i < text_count; i++)
			if (strcmp(texts[i], warning) == 0)
				return true;
	}
	return false;
}

/* Warnings of the checkpoint and of all plans, each once. */
static void warn_once(struct tnd_plan *const *plans, size_t count)
{
	const char *const *texts;
	size_t text_count = tnd_checkpoint_warnings(tnd_plan_checkpoint(plans[0]), &texts);

	for (size_t i = 0; i < text_count; i++)
		tool_warn(texts[i]);
	for (size_t p = 0; p < count; p++) {
		text_count = tnd_plan_warnings(plans[p], &texts);
		for (size_t i = 0; i < text_count; i++)
			if (!warned(plans, p, texts[i]))
				tool_warn(texts[i]);
	}
}

static int print_plans(const struct plan_command *command, struct tnd_plan *const *plans,
		       size_t count)
{
	int status = TOOL_OK, code;
	char *text = NULL;

	if (!command->json) {
		warn_once(plans, count);
		print_summary(command, plans, count);
		for (size_t i = 0; command->tensors && status == TOOL_OK && i < count; i++)
			status = print_places(plans[i]);
		return status;
	}
	code = tnd_plan_json((const struct tnd_plan *const *)plans, count,
			     command->tensors ? TND_PLAN_JSON_F_TENSORS : 0, &text);
	if (code != 0)
		return tool_fail(code, NULL);
	puts(text);
	free(text);
	return TOOL_OK;
}

static int make_plans(struct plan_command *command, struct tnd_checkpoint *checkpoint)
{
	struct tool_plan_options *opts = &command->options;
	size_t count = opts->rank_given ? 1 : tool_rank_count(opts), made = 0;
	struct tnd_plan **plans = calloc(count, sizeof(struct tnd_plan *));
	struct tnd_error error = {0};
	int code = 0, status;

	if (!plans)
		return tool_fail(-ENOMEM, NULL);
	while (made < count) {
		struct tnd_layout layout = opts->layout;

		layout.rank = opts->rank_given ? layout.rank : (uint32_t)made;
		code = tnd_plan_create(checkpoint, &layout, &opts->plan, &plans[made], &error);
		if (code != 0)
			break;
		made++;
	}
	status = code != 0 ? tool_fail(code, &error) : print_plans(command, plans, count);
	for (size_t i = 0; i < made; i++)
		tnd_plan_close(plans[i]);
	free(plans);
	return status;
}

int cmd_plan(int argc, char **argv)
{
	struct plan_command command = {0};
	struct tnd_checkpoint *checkpoint = NULL;
	struct tnd_error error;
	int code, status;

	tool_plan_options_init(&command.options);
	tool_parse(&argp, argc, argv, &command);
	status = tool_plan_options_settle(&command.options);
	if (status == TOOL_OK) {
		code = tnd_checkpoint_open(command.path, &command.options.checkpoint, &checkpoint,
					   &error);
		status = code != 0 ? tool_fail(code, &error) : make_plans(&command, checkpoint);
	}
	tnd_checkpoint_close(checkpoint);
	tool_plan_options_free(&command.options);
	return status;
}
