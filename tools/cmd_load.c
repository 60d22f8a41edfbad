/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cmd_load.c - `tundish load`: every rank as a process, or one of them
 *
 * The checkpoint and every rank's plan are checked here first: what is refused is refused before
 * any process is started, with status 3 or 4. Then load_node.c runs the ranks, and the results are
 * written: the report even when a file could not be, whose failure is status 5 unless the load
 * itself has failed.
 */
#include "load_parts.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
	KEY_NO_SHARED = TOOL_KEY,
	KEY_ON_FULL,
	KEY_ON_DEAD,
	KEY_THREADS,
	KEY_CPUS,
	KEY_NUMA,
	KEY_KEEP,
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
	{"no-shared", KEY_NO_SHARED, NULL, OPTION_HIDDEN, "Each rank reads for itself (it does)",
	 4},
	{0},
};

static const struct tool_choice on_fulls[] = {{"wait", TND_ON_FULL_WAIT},
					      {"fail", TND_ON_FULL_FAIL},
					      {"overrun", TND_ON_FULL_OVERRUN},
					      {"copy", TND_ON_FULL_COPY}};
static const struct tool_choice on_deads[] = {{"fail", 0}, {"continue", 1}};
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
	case KEY_NO_SHARED:
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
	case KEY_ON_DEAD:
		command->on_dead_continue = TOOL_CHOOSE(state, "--on-dead", arg, on_deads);
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
		return 0;
	default:
		return parse_load(key, arg, state, command) ? 0 : ARGP_ERR_UNKNOWN;
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
	const struct tool_plan_options *opts = &node->command->options;
	size_t count = opts->rank_given ? 1 : tool_rank_count(opts);

	node->ranks = calloc(count, sizeof(*node->ranks));
	if (!node->ranks)
		return -ENOMEM;
	node->count = count;
	for (size_t i = 0; i < count; i++)
		node->ranks[i] = (struct load_rank){.rank = opts->rank_given ? opts->layout.rank
									     : (uint32_t)i,
						    .fd = -1,
						    .checksum_fd = -1,
						    .trace_fd = -1};
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

/* Every rank's plan, made and dropped: a child makes its own, so that each holds one. */
static int check(struct load_node *node)
{
	const struct tool_plan_options *opts = &node->command->options;
	struct tnd_error error = {.rank = -1};
	int code = tnd_checkpoint_open(node->command->path, &opts->checkpoint, &node->checkpoint,
				       &error);

	if (code == 0)
		code = add_ranks(node);
	for (size_t i = 0; code == 0 && i < node->count; i++) {
		struct tnd_plan_totals totals = {.struct_bytes = sizeof(totals)};
		struct tnd_layout layout = opts->layout;
		struct tnd_plan *plan;

		layout.rank = node->ranks[i].rank;
		code = tnd_plan_create(node->checkpoint, &layout, &opts->plan, &plan, &error);
		if (code != 0)
			break;
		/* Known before a rank speaks: the bar's end does not move. */
		tnd_plan_totals(plan, &totals);
		node->ranks[i].total_bytes = totals.kept_bytes;
		/* The ranks' warnings are alike; the first rank's stand for them. */
		if (i == 0) {
			warn(plan, true);
			warn(plan, false);
		}
		tnd_plan_close(plan);
	}
	return code == 0 ? 0 : refuse(node, code, &error);
}

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
	if (check(&node) == 0)
		load_node_run(&node);
	status = write_results(&node);
	tnd_checkpoint_close(node.checkpoint);
	load_node_free(&node);
	return status;
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
		status = probe_files(&command);
	if (status == TOOL_OK)
		status = run(&command);
	tool_plan_options_free(&command.options);
	return status;
}
