/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cmd_load.c - `tundish load`: every rank as a process, or one of them
 *
 * What is refused is refused before any process is started (load_check.c), with status 3 or 4. Then
 * load_node.c runs the ranks, and the results are written: the report even when a file could not
 * be, whose failure is status 5 unless the load itself has failed.
 */
#include "load_parts.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
	KEY_SHARED = TOOL_KEY,
	KEY_NO_SHARED,
	KEY_GROUP,
	KEY_MEMBERS,
	KEY_GUEST,
	KEY_EVICT,
	KEY_ON_FULL,
	KEY_ON_DEAD,
	KEY_THREADS,
	KEY_CPUS,
	KEY_NUMA,
	KEY_KEEP,
	KEY_KEEP_TOUCHED,
	KEY_ENGINE,
	KEY_DIRECT,
	KEY_KEEP_CACHE,
	KEY_DEADLINE,
	KEY_CHECKSUM,
	KEY_REPORT,
	KEY_TRACE,
	KEY_PROGRESS,
	KEY_PROGRESS_FD,
	KEY_JSON,
};

static const struct argp_option options[] = {
	{NULL, 0, NULL, 0, "Load:", 4},
	{"keep", KEY_KEEP, NULL, 0, "Copy each tensor into memory of its own", 4},
	{"keep-touched", KEY_KEEP_TOUCHED, NULL, OPTION_HIDDEN,
	 "As --keep, with the memory touched before the clock starts", 4},
	{"checksum", KEY_CHECKSUM, "FILE", 0, "XXH3-64 of each tensor", 4},
	{"report", KEY_REPORT, "FILE", 0, "Write the JSON document to FILE", 4},
	{"trace", KEY_TRACE, "FILE", OPTION_HIDDEN, "Write a timeline for Perfetto", 4},
	{"json", KEY_JSON, NULL, 0, "One JSON document", 4},
	{"progress", KEY_PROGRESS, "WHEN", 0, "auto, always or never (default auto)", 4},
	{"progress-fd", KEY_PROGRESS_FD, "N", OPTION_HIDDEN,
	 "Write a JSON line a step to descriptor N", 4},
	{"deadline", KEY_DEADLINE, "S", 0, "Fail after S seconds", 4},
	{"engine", KEY_ENGINE, "WHICH", OPTION_HIDDEN, "auto, uring or threads (default auto)", 4},
	{"direct", KEY_DIRECT, "WHEN", OPTION_HIDDEN, "auto, on or off (default auto)", 4},
	{"keep-cache", KEY_KEEP_CACHE, NULL, OPTION_HIDDEN, "Leave in the page cache what came in",
	 4},
	{"threads", KEY_THREADS, "N", OPTION_HIDDEN, "I/O threads of a rank", 4},
	{"cpus", KEY_CPUS, "LIST", OPTION_HIDDEN, "Processors of I/O threads (0-3,8)", 4},
	{"numa", KEY_NUMA, "WHERE", OPTION_HIDDEN, "auto, interleave or a node", 4},
	{"on-full", KEY_ON_FULL, "WHAT", OPTION_HIDDEN,
	 "When views use the budget up: wait, fail, overrun or copy (default wait)", 4},
	{"on-dead", KEY_ON_DEAD, "WHAT", OPTION_HIDDEN,
	 "When a rank dies: fail or continue (default fail)", 4},
	{"shared", KEY_SHARED, NULL, OPTION_HIDDEN,
	 "One process reads for all, each byte once (default with several ranks)", 4},
	{"no-shared", KEY_NO_SHARED, NULL, 0, "Each rank reads for itself", 4},
	{"group", KEY_GROUP, "ADDRESS", OPTION_HIDDEN,
	 "With --rank: of the ranks that are started apart (unix:@NAME)", 4},
	{"members", KEY_MEMBERS, "LIST", OPTION_HIDDEN,
	 "Ranks that take part (0,2-3; default all of them)", 4},
	{"guest", KEY_GUEST, NULL, OPTION_HIDDEN,
	 "With --group: take what passes, and make nobody wait", 4},
	{"evict", KEY_EVICT, "S", OPTION_HIDDEN,
	 "Let a rank go that holds the others up for S seconds", 4},
	{0},
};

static const struct tool_choice on_fulls[] = {{"wait", TND_ON_FULL_WAIT},
					      {"fail", TND_ON_FULL_FAIL},
					      {"overrun", TND_ON_FULL_OVERRUN},
					      {"copy", TND_ON_FULL_COPY}};
static const struct tool_choice on_deads[] = {{"fail", TND_SHARE_DEAD_FAIL},
					      {"continue", TND_SHARE_DEAD_CONTINUE}};
static const struct tool_choice engines[] = {
	{"auto", TND_ENGINE_AUTO}, {"uring", TND_ENGINE_URING}, {"threads", TND_ENGINE_THREADS}};
static const struct tool_choice directs[] = {
	{"auto", TND_DIRECT_AUTO}, {"on", TND_DIRECT_ON}, {"off", TND_DIRECT_OFF}};
static const struct tool_choice progresses[] = {
	{"auto", PROGRESS_AUTO}, {"always", PROGRESS_ALWAYS}, {"never", PROGRESS_NEVER}};

static void parse_numa(struct argp_state *state, struct tnd_load_opts *load, const char *arg)
{
	load->numa_given = 1;
	if (strcmp(arg, "auto") == 0)
		load->numa = TND_NUMA_AUTO;
	else if (strcmp(arg, "interleave") == 0)
		load->numa = TND_NUMA_INTERLEAVE;
	else
		load->numa = (int32_t)tool_number(state, "--numa", arg, 0, 1023);
}

static int parse_fd(struct argp_state *state, const char *arg)
{
	int fd = (int)tool_number(state, "--progress-fd", arg, 0, 1 << 20);
	int flags = fcntl(fd, F_GETFL);

	if (flags < 0 || (flags & O_ACCMODE) == O_RDONLY)
		argp_error(state,
			   "--progress-fd: expected a descriptor open for writing, found '%s'",
			   arg);
	return fd;
}

/* Options that end up in the library's. */
static bool parse_load(int key, char *arg, struct argp_state *state, struct load_command *command)
{
	struct tnd_load_opts *load = &command->load;

	switch (key) {
	case KEY_ON_FULL:
		load->on_full = TOOL_CHOOSE(state, "--on-full", arg, on_fulls);
		return true;
	case KEY_THREADS:
		load->thread_count = (uint32_t)tool_number(state, "--threads", arg, 1, 1024);
		return true;
	case KEY_CPUS:
		load->cpus = arg;
		return true;
	case KEY_NUMA:
		parse_numa(state, load, arg);
		return true;
	case KEY_ENGINE:
		load->engine = TOOL_CHOOSE(state, "--engine", arg, engines);
		return true;
	case KEY_DIRECT:
		load->direct = TOOL_CHOOSE(state, "--direct", arg, directs);
		return true;
	case KEY_KEEP_CACHE:
		load->flags |= TND_LOAD_F_KEEP_CACHE;
		return true;
	default:
		return false;
	}
}

/* "0,2-3": ranks of the layout, each once. */
static void settle_members(struct argp_state *state, struct load_command *command)
{
	const char *at = command->members_text;
	uint32_t ranks = tool_rank_count(&command->options), next = 0, used = 0;

	command->members = calloc(ranks, sizeof(*command->members));
	if (!command->members)
		argp_failure(state, TOOL_NO_FIT, ENOMEM, "--members");
	while (command->members && at) {
		unsigned first = 0, last = 0;
		int bytes = 0;

		if (sscanf(at, "%4u%n-%4u%n", &first, &bytes, &last, &bytes) < 2)
			last = first;
		if (!bytes || (at[bytes] && at[bytes] != ',') || first < next || last < first ||
		    last >= ranks)
			argp_error(state,
				   "--members: expected ranks below %u in order, such as 0,2-3, "
				   "found '%s'",
				   ranks, command->members_text);
		for (next = first; next <= last && next < ranks; next++)
			command->members[used++] = next;
		at = at[bytes] == ',' ? at + bytes + 1 : NULL;
	}
	command->member_count = used;
}

static bool is_member(const struct load_command *command)
{
	for (size_t i = 0; i < command->member_count; i++)
		if (command->members[i] == command->options.layout.rank)
			return true;
	return !command->members;
}

/* What --shared and its kin mean together. */
static void settle_shared(struct argp_state *state, struct load_command *command)
{
	bool one = command->options.rank_given;
	size_t ranks = tool_rank_count(&command->options);

	if (command->members_text)
		settle_members(state, command);
	if (command->group && command->sharing == SHARING_NO)
		argp_error(state, "--group: expected without --no-shared");
	if (command->group && !one)
		argp_error(state,
			   "--group: expected with --rank; without it all ranks are started here");
	if (command->sharing == SHARING_YES && one && !command->group)
		argp_error(state, "--shared: expected --group with --rank, so that the ranks that "
				  "are started apart find each other");
	command->shared = command->group || command->sharing == SHARING_YES ||
			  (command->sharing == SHARING_DEFAULT && !one && ranks > 1 &&
			   ranks <= TND_SHARE_MEMBERS_MAX);
	if (command->guest && !command->group)
		argp_error(state, "--guest: expected with --group");
	if (command->members && !command->shared)
		argp_error(state, "--members: expected with --shared");
	if (command->evict > 0 && !command->shared)
		argp_error(state, "--evict: expected with --shared");
	if (one && command->shared && !command->guest && !is_member(command))
		argp_error(state,
			   "--rank: expected one of --members %s, found '%u'; others take part as "
			   "--guest",
			   command->members_text, command->options.layout.rank);
}

/* Options that say who reads for whom. */
static bool parse_shared(int key, char *arg, struct argp_state *state, struct load_command *command)
{
	switch (key) {
	case KEY_SHARED:
		command->sharing = SHARING_YES;
		return true;
	case KEY_NO_SHARED:
		command->sharing = SHARING_NO;
		return true;
	case KEY_GROUP:
		command->group = arg;
		return true;
	case KEY_MEMBERS:
		command->members_text = arg;
		return true;
	case KEY_GUEST:
		command->guest = true;
		return true;
	case KEY_EVICT:
		command->evict = tool_seconds(state, "--evict", arg);
		return true;
	case KEY_ON_DEAD:
		command->on_dead = TOOL_CHOOSE(state, "--on-dead", arg, on_deads);
		return true;
	default:
		return false;
	}
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
	struct load_command *command = state->input;

	switch (key) {
	case KEY_KEEP:
		command->keep = true;
		return 0;
	case KEY_KEEP_TOUCHED:
		command->keep = command->keep_touched = true;
		return 0;
	case KEY_DEADLINE:
		command->deadline = tool_seconds(state, "--deadline", arg);
		return 0;
	case KEY_CHECKSUM:
		command->checksum_path = arg;
		return 0;
	case KEY_REPORT:
		command->report_path = arg;
		return 0;
	case KEY_TRACE:
		command->trace_path = arg;
		return 0;
	case KEY_PROGRESS:
		command->progress = TOOL_CHOOSE(state, "--progress", arg, progresses);
		return 0;
	case KEY_PROGRESS_FD:
		command->progress_fd = parse_fd(state, arg);
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
		settle_shared(state, command);
		return 0;
	default:
		if (parse_load(key, arg, state, command) || parse_shared(key, arg, state, command))
			return 0;
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
	.doc = "Loads a checkpoint as the ranks of an engine would, each a process, inside the "
	       "budget, and reports.",
	.children = children};

/* -- before -- */

/* Finding out after an hour that the report has no place to go would be late. */
static int probe_files(const struct load_command *command)
{
	const char *const paths[] = {command->report_path, command->checksum_path,
				     command->trace_path};

	for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
		int code = paths[i] ? tool_file_probe(paths[i]) : 0;

		if (code != 0)
			return tool_fail_what(code, paths[i]);
	}
	return TOOL_OK;
}

/* -- after -- */

static int write_report(const struct load_node *node)
{
	const char *path = node->command->report_path;
	json_t *document = load_document(node);
	struct tool_file file;
	int code = document ? tool_file_open(&file, path) : -ENOMEM;

	if (code == 0) {
		int failed = json_dumpf(document, file.stream, JSON_INDENT(2));

		putc('\n', file.stream);
		if (failed && !ferror(file.stream)) {
			tool_file_abort(&file);
			code = -ENOMEM;
		} else {
			code = tool_file_commit(&file);
		}
	}
	json_decref(document);
	return code == 0 ? TOOL_OK : tool_fail_what(code, path);
}

static int status_of(const struct load_node *node)
{
	/* At open this refuses the file; here the file was whole when its plan was made. */
	if (node->code == TND_E_TRUNCATED && node->seconds > 0)
		return TOOL_IO;
	return tool_status(node->code);
}

static int keep_worst(int status, int next)
{
	return status != TOOL_OK ? status : next;
}

static int write_results(const struct load_node *node)
{
	const struct load_command *command = node->command;
	int status = TOOL_OK;

	if (node->code != 0)
		tool_fail(node->code, &node->error);
	if (command->json)
		status = keep_worst(status, tool_json_print(load_document(node), false));
	else if (node->seconds > 0)
		status = keep_worst(status, load_print(node));
	if (command->report_path)
		status = keep_worst(status, write_report(node));
	if (node->code != 0)
		return status_of(node);
	if (command->checksum_path)
		status = keep_worst(status, load_checksum_file(node));
	if (command->trace_path)
		status = keep_worst(status, load_trace_file(node));
	return status;
}

static int run(struct load_command *command)
{
	struct load_node node = {.command = command, .progress_fd = command->progress_fd};
	int status;

	node.bar = command->progress == PROGRESS_ALWAYS ||
		   (command->progress == PROGRESS_AUTO && isatty(STDERR_FILENO));
	if (load_check(&node) == 0)
		load_node_run(&node);
	status = write_results(&node);
	tnd_checkpoint_close(node.checkpoint);
	load_node_free(&node);
	return status;
}

/* Plans of a share have the node's budget, of which the library gives each its part. */
static int settle_budget(struct load_command *command)
{
	struct tool_plan_options *opts = &command->options;
	uint64_t bytes = opts->node_budget_bytes, ranks = tool_rank_count(opts);
	int code = 0;

	if (!command->shared || command->guest)
		return TOOL_OK;
	if (opts->rank_budget_bytes > UINT64_MAX / ranks)
		bytes = UINT64_MAX;
	else if (opts->rank_budget_bytes)
		bytes = opts->rank_budget_bytes * ranks;
	else if (!bytes)
		code = tnd_budget_default(1, &bytes);
	opts->plan.budget_bytes = bytes;
	return code == 0 ? TOOL_OK : tool_fail_what(code, "default budget");
}

int cmd_load(int argc, char **argv)
{
	struct load_command command = {.load.struct_bytes = sizeof(command.load),
				       .progress_fd = -1};
	int status;

	tool_plan_options_init(&command.options);
	tool_parse(&argp, argc, argv, &command);
	status = tool_plan_options_settle(&command.options);
	if (status == TOOL_OK)
		status = settle_budget(&command);
	if (status == TOOL_OK)
		status = probe_files(&command);
	if (status == TOOL_OK)
		status = run(&command);
	tool_plan_options_free(&command.options);
	free(command.members);
	return status;
}
