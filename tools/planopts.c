/* SPDX-License-Identifier: Apache-2.0 */
/*
 * planopts.c - the layout and plan options that plan and load share, as a child parser of theirs
 *
 * Texts point into argv; the two lists (--names, --skip) grow as options come. What needs the whole
 * command line (the layout adds up, the budget of one rank) is settled at the end: --budget is the
 * node's and is divided by the ranks,
 * --rank-budget is one rank's and wins.
 */
#include "tool.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
	KEY_TP = TOOL_KEY_SHARED + 0x100,
	KEY_DP,
	KEY_EP,
	KEY_RANK,
	KEY_PHASE,
	KEY_SLICE,
	KEY_SLAB,
	KEY_PACKING,
	KEY_BUDGET,
	KEY_RANK_BUDGET,
	KEY_OVERSIZE,
	KEY_EXPERTS,
	KEY_PLACEMENT,
	KEY_SCALES,
	KEY_NO_EP_FILTER,
	KEY_NAMES,
	KEY_ALIGN,
	KEY_RUN_MIN,
	KEY_DRAFT_PREFIX,
	KEY_SKIP,
	KEY_RULES,
};

static const struct argp_option plan_options[] = {
	{NULL, 0, NULL, 0, "Layout:", 1},
	{"tp", KEY_TP, "N", 0, "Tensor parallel size (default 1)", 1},
	{"dp", KEY_DP, "N", 0, "Data parallel size (default 1)", 1},
	{"ep", KEY_EP, "N", 0, "Expert parallel size (default 1)", 1},
	{"rank", KEY_RANK, "R", 0, "This rank alone (default: all of them)", 1},
	{"phase", KEY_PHASE, "PHASE", 0, "all, target or draft (default all)", 1},
	{"slice", KEY_SLICE, "POLICY", 0, "auto, none, experts or all (default auto)", 1},
	{"experts", KEY_EXPERTS, "N", OPTION_HIDDEN, "Number of experts, if config.json is wrong",
	 1},
	{"ep-placement", KEY_PLACEMENT, "HOW", OPTION_HIDDEN,
	 "linear or round_robin (default linear)", 1},
	{"ep-scales", KEY_SCALES, "WHICH", OPTION_HIDDEN, "owned or all (default owned)", 1},
	{"no-ep-filter", KEY_NO_EP_FILTER, NULL, OPTION_HIDDEN, "Every rank reads every expert", 1},
	{"names", KEY_NAMES, "GLOB", 0, "Only tensors of these names; repeatable", 1},
	{"draft-prefix", KEY_DRAFT_PREFIX, "P", OPTION_HIDDEN,
	 "What draft names begin with (default mtp.)", 1},
	{"skip", KEY_SKIP, "GLOB", OPTION_HIDDEN,
	 "Leave these names out; repeatable; 'none' clears what is skipped so far", 1},
	{"rules", KEY_RULES, "FILE", OPTION_HIDDEN, "Slicing rules: a glob and a dimension a line",
	 1},
	{NULL, 0, NULL, 0, "Memory:", 2},
	{"budget", KEY_BUDGET, "SIZE", 0, "Of all ranks together (default: up to 6 GiB)", 2},
	{"rank-budget", KEY_RANK_BUDGET, "SIZE", OPTION_HIDDEN, "Of one rank, instead", 2},
	{"slab", KEY_SLAB, "SIZE", 0, "Largest slab; 0: a buffer for each tensor", 2},
	{"packing", KEY_PACKING, "HOW", OPTION_HIDDEN, "name or file (default file)", 2},
	{"oversize", KEY_OVERSIZE, "HOW", OPTION_HIDDEN,
	 "A tensor above the budget: refuse, pieces or overrun (default pieces)", 2},
	{"align", KEY_ALIGN, "N", OPTION_HIDDEN, "Views begin at a multiple of N", 2},
	{"run-min", KEY_RUN_MIN, "SIZE", OPTION_HIDDEN,
	 "Runs and gaps from here up are read alone (default 64K)", 2},
	{0},
};

static const struct tool_choice phases[] = {
	{"all", TND_PHASE_ALL}, {"target", TND_PHASE_TARGET}, {"draft", TND_PHASE_DRAFT}};
static const struct tool_choice slices[] = {{"auto", TND_SLICE_AUTO},
					    {"none", TND_SLICE_NONE},
					    {"experts", TND_SLICE_EXPERTS},
					    {"all", TND_SLICE_ALL}};
static const struct tool_choice packings[] = {{"name", TND_PACKING_NAME},
					      {"file", TND_PACKING_FILE}};
static const struct tool_choice oversizes[] = {{"refuse", TND_OVERSIZE_REFUSE},
					       {"pieces", TND_OVERSIZE_PIECES},
					       {"overrun", TND_OVERSIZE_OVERRUN}};
static const struct tool_choice placements[] = {{"linear", TND_PLACEMENT_LINEAR},
						{"round_robin", TND_PLACEMENT_ROUND_ROBIN}};
static const struct tool_choice scales[] = {{"owned", 0}, {"all", TND_PLAN_F_EP_SCALES_ALL}};

/* Appends to a list that is grown by one; options are few. */
static void grow(struct argp_state *state, const char ***list, size_t *count, const char *text)
{
	const char **larger = realloc((void *)*list, (*count + 1) * sizeof(*larger));

	if (!larger) {
		argp_failure(state, TOOL_NO_FIT, ENOMEM, "options");
		return;
	}
	larger[(*count)++] = text;
	*list = larger;
}

static void parse_skip(struct argp_state *state, struct tool_plan_options *options, const char *arg)
{
	if (strcmp(arg, "none") == 0) {
		options->plan.skip_count = 0;
		options->plan.flags |= TND_PLAN_F_NO_DEFAULT_SKIP;
		return;
	}
	grow(state, &options->skip, &options->plan.skip_count, arg);
}

static uint32_t parse_align(struct argp_state *state, const char *arg)
{
	uint64_t align = tool_number(state, "--align", arg, 0, 4096);

	if (align & (align - 1))
		argp_error(state, "--align: expected a power of two up to 4096, found '%s'", arg);
	return (uint32_t)align;
}

static int64_t parse_slab(struct argp_state *state, const char *arg)
{
	uint64_t bytes = tool_size(state, "--slab", arg);

	return bytes ? (int64_t)bytes : TND_SLAB_NONE;
}

/* Options that say who needs what. */
static bool parse_layout(int key, char *arg, struct argp_state *state,
			 struct tool_plan_options *options)
{
	struct tnd_layout *layout = &options->layout;
	struct tnd_plan_opts *plan = &options->plan;

	switch (key) {
	case KEY_TP:
		layout->tp_size = (uint32_t)tool_number(state, "--tp", arg, 1, TOOL_RANKS_MAX);
		return true;
	case KEY_DP:
		layout->dp_size = (uint32_t)tool_number(state, "--dp", arg, 1, TOOL_RANKS_MAX);
		return true;
	case KEY_EP:
		layout->ep_size = (uint32_t)tool_number(state, "--ep", arg, 1, TOOL_RANKS_MAX);
		return true;
	case KEY_RANK:
		layout->rank = (uint32_t)tool_number(state, "--rank", arg, 0, TOOL_RANKS_MAX - 1);
		options->rank_given = true;
		return true;
	case KEY_PHASE:
		plan->phase = TOOL_CHOOSE(state, "--phase", arg, phases);
		return true;
	case KEY_SLICE:
		plan->slice = TOOL_CHOOSE(state, "--slice", arg, slices);
		return true;
	case KEY_EXPERTS:
		plan->expert_count = tool_number(state, "--experts", arg, 1, UINT32_MAX);
		return true;
	case KEY_PLACEMENT:
		plan->placement = TOOL_CHOOSE(state, "--ep-placement", arg, placements);
		return true;
	case KEY_SCALES:
		plan->flags &= ~TND_PLAN_F_EP_SCALES_ALL;
		plan->flags |= TOOL_CHOOSE(state, "--ep-scales", arg, scales);
		return true;
	case KEY_NO_EP_FILTER:
		plan->flags |= TND_PLAN_F_NO_EP_FILTER;
		return true;
	case KEY_NAMES:
		plan->flags |= TND_PLAN_F_NAMES;
		grow(state, &options->names, &plan->name_count, arg);
		return true;
	case KEY_DRAFT_PREFIX:
		plan->draft_prefix = arg;
		return true;
	case KEY_SKIP:
		parse_skip(state, options, arg);
		return true;
	case KEY_RULES:
		options->rules_path = arg;
		return true;
	default:
		return false;
	}
}

/* Options that say in how much memory. */
static bool parse_memory(int key, char *arg, struct argp_state *state,
			 struct tool_plan_options *options)
{
	struct tnd_plan_opts *plan = &options->plan;

	switch (key) {
	case KEY_BUDGET:
		options->node_budget_bytes = tool_positive_size(state, "--budget", arg);
		return true;
	case KEY_RANK_BUDGET:
		options->rank_budget_bytes = tool_positive_size(state, "--rank-budget", arg);
		return true;
	case KEY_SLAB:
		plan->slab_bytes = parse_slab(state, arg);
		return true;
	case KEY_PACKING:
		plan->packing = TOOL_CHOOSE(state, "--packing", arg, packings);
		return true;
	case KEY_OVERSIZE:
		plan->oversize = TOOL_CHOOSE(state, "--oversize", arg, oversizes);
		return true;
	case KEY_ALIGN:
		plan->align = parse_align(state, arg);
		return true;
	case KEY_RUN_MIN:
		plan->run_min_bytes = tool_positive_size(state, "--run-min", arg);
		return true;
	default:
		return false;
	}
}

static void check_layout(struct argp_state *state, struct tool_plan_options *options)
{
	uint64_t ranks = (uint64_t)options->layout.tp_size * options->layout.dp_size;

	if (ranks > TOOL_RANKS_MAX)
		argp_error(state, "expected at most %d ranks, found --tp x --dp = %llu",
			   TOOL_RANKS_MAX, (unsigned long long)ranks);
	if (options->layout.rank >= ranks)
		argp_error(state, "--rank: expected a rank below --tp x --dp = %llu, found '%u'",
			   (unsigned long long)ranks, options->layout.rank);
	if (ranks % options->layout.ep_size)
		argp_error(state, "--ep: expected a divisor of --tp x --dp = %llu, found '%u'",
			   (unsigned long long)ranks, options->layout.ep_size);
}

static error_t parse_plan(int key, char *arg, struct argp_state *state)
{
	struct tool_plan_options *options = state->input;

	if (key == ARGP_KEY_END) {
		check_layout(state, options);
		return 0;
	}
	if (parse_layout(key, arg, state, options) || parse_memory(key, arg, state, options))
		return 0;
	return ARGP_ERR_UNKNOWN;
}

const struct argp tool_plan_argp = {.options = plan_options, .parser = parse_plan};

void tool_plan_options_init(struct tool_plan_options *options)
{
	*options = (struct tool_plan_options){
		.checkpoint.struct_bytes = sizeof(options->checkpoint),
		.layout = {.struct_bytes = sizeof(options->layout),
			   .tp_size = 1,
			   .dp_size = 1,
			   .ep_size = 1},
		.plan = {.struct_bytes = sizeof(options->plan), .oversize = TND_OVERSIZE_PIECES},
	};
}

void tool_plan_options_free(struct tool_plan_options *options)
{
	free((void *)options->skip);
	free((void *)options->names);
	free(options->rules_text);
}

uint32_t tool_rank_count(const struct tool_plan_options *options)
{
	return options->layout.tp_size * options->layout.dp_size;
}

#define RULES_BYTES_MAX (1 << 20)

static int read_rules(struct tool_plan_options *options)
{
	struct tnd_error error = {.rank = -1};
	/* A FIFO without a writer must not hold us. */
	int fd = open(options->rules_path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	FILE *stream = fd < 0 ? NULL : fdopen(fd, "r");
	size_t bytes;
	int code = 0;

	if (!stream) {
		code = tool_fail_what(-errno, options->rules_path);
		if (fd >= 0)
			close(fd);
		return code;
	}
	options->rules_text = malloc(RULES_BYTES_MAX + 1);
	if (!options->rules_text) {
		fclose(stream);
		return tool_fail(-ENOMEM, NULL);
	}
	bytes = fread(options->rules_text, 1, RULES_BYTES_MAX + 1, stream);
	if (ferror(stream)) {
		code = tool_fail_what(-errno, options->rules_path);
	} else if (bytes > RULES_BYTES_MAX || memchr(options->rules_text, '\0', bytes)) {
		snprintf(error.message, sizeof(error.message),
			 "%s: expected a text of at most 1 MiB with a glob and a dimension a line",
			 options->rules_path);
		code = tool_fail(TND_E_RULES, &error);
	} else {
		options->rules_text[bytes] = '\0';
	}
	fclose(stream);
	return code;
}

int tool_plan_options_settle(struct tool_plan_options *options)
{
	uint32_t ranks = tool_rank_count(options);
	uint64_t bytes = options->rank_budget_bytes;
	int code;

	if (options->rules_path) {
		int status = read_rules(options);

		if (status != TOOL_OK)
			return status;
		options->plan.rules = options->rules_text;
		options->plan.rules_name = options->rules_path;
	}
	if (!bytes && options->node_budget_bytes) {
		bytes = options->node_budget_bytes / ranks;
		/* 0 would ask for the default. */
		bytes = bytes ? bytes : 1;
	}
	if (!bytes) {
		code = tnd_budget_default(ranks, &bytes);
		if (code != 0)
			return tool_fail_what(code, "default budget");
	}
	options->plan.budget_bytes = bytes;
	options->plan.skip = options->skip;
	options->plan.names = options->names;
	return TOOL_OK;
}
