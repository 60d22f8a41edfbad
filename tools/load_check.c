/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load_check.c - what can be known before any process is started: the checkpoint, every rank's
 * plan, and with --shared the plan of the one that reads for all
 *
 * Plans are made and dropped: a child makes its own, so that each process holds one.
 */
#include "load_parts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* An error that is known before any rank was started. */
static int refuse(struct load_node *node, int code, const struct tnd_error *error)
{
	node->code = code;
	node->count = 0;
	node->error = *error;
	node->error.code = code;
	if (!node->error.message[0]) {
		node->error.rank = -1;
		snprintf(node->error.message, sizeof(node->error.message), "%s",
			 tnd_strerror(code));
	}
	return code;
}

static int add_ranks(struct load_node *node)
{
	const struct load_command *command = node->command;
	const struct tool_plan_options *opts = &command->options;
	size_t members = command->members ? command->member_count : tool_rank_count(opts);
	size_t count = opts->rank_given ? 1 : members;

	node->ranks = calloc(count, sizeof(*node->ranks));
	if (!node->ranks)
		return -ENOMEM;
	node->count = count;
	node->host_rank = command->members ? command->members[0] : 0;
	for (size_t i = 0; i < count; i++) {
		uint32_t rank = command->members ? command->members[i] : (uint32_t)i;

		node->ranks[i] =
			(struct load_rank){.rank = opts->rank_given ? opts->layout.rank : rank,
					   .fd = -1,
					   .checksum_fd = -1,
					   .trace_fd = -1,
					   .gate_fd = -1};
	}
	node->hosting =
		command->shared && !command->guest && node->ranks[0].rank == node->host_rank;
	return 0;
}

static void warn(const struct tnd_plan *plan, bool checkpoint)
{
	const char *const *texts;
	size_t count = checkpoint ? tnd_checkpoint_warnings(tnd_plan_checkpoint(plan), &texts)
				  : tnd_plan_warnings(plan, &texts);

	for (size_t i = 0; i < count; i++)
		tool_warn(texts[i]);
}

static int check_rank(struct load_node *node, struct load_rank *rank, struct tnd_error *error)
{
	const struct tool_plan_options *opts = &node->command->options;
	struct tnd_plan_totals totals = {.struct_bytes = sizeof(totals)};
	struct tnd_layout layout = opts->layout;
	struct tnd_plan *plan;
	int code;

	layout.rank = rank->rank;
	code = tnd_plan_create(node->checkpoint, &layout, &opts->plan, &plan, error);
	if (code != 0)
		return code;
	/* Known before a rank speaks: the bar's end does not move. */
	tnd_plan_totals(plan, &totals);
	rank->total_bytes = totals.kept_bytes;
	/* The ranks' warnings are alike; the first rank's stand for them. */
	if (rank == node->ranks) {
		warn(plan, true);
		warn(plan, false);
	}
	tnd_plan_close(plan);
	return 0;
}

static int check_union(struct load_node *node, struct tnd_error *error)
{
	const struct load_command *command = node->command;
	struct tnd_plan_totals totals = {.struct_bytes = sizeof(totals)};
	struct tnd_plan *plan;
	int code =
		tnd_plan_create_union(node->checkpoint, &command->options.layout, command->members,
				      command->member_count, &command->options.plan, &plan, error);

	if (code != 0)
		return code;
	tnd_plan_totals(plan, &totals);
	node->union_bytes = totals.read_bytes;
	tnd_plan_close(plan);
	return 0;
}

/* Where the host is found: as given, or a name that nobody else has. */
static int name_share(struct load_node *node)
{
	unsigned long long number = 0;

	if (!node->command->shared)
		return 0;
	node->address = node->command->group;
	if (node->address)
		return 0;
	if (getrandom(&number, sizeof(number), 0) != (ssize_t)sizeof(number))
		return -errno;
	snprintf(node->made_address, sizeof(node->made_address), "unix:@tundish-load-%d-%016llx",
		 (int)getpid(), number);
	node->address = node->made_address;
	return 0;
}

int load_check(struct load_node *node)
{
	const struct load_command *command = node->command;
	struct tnd_error error = {.rank = -1};
	int code = tnd_checkpoint_open(command->path, &command->options.checkpoint,
				       &node->checkpoint, &error);

	if (code == 0)
		code = add_ranks(node);
	/* First: it needs more than each rank does, and says how much. */
	if (code == 0 && node->hosting)
		code = check_union(node, &error);
	for (size_t i = 0; code == 0 && i < node->count; i++)
		code = check_rank(node, &node->ranks[i], &error);
	if (code == 0)
		code = name_share(node);
	return code == 0 ? 0 : refuse(node, code, &error);
}
