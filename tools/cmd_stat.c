/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cmd_stat.c - `tundish stat`: the channels, pools and loads of this user, once or again and
 * again
 *
 * With --watch a terminal is redrawn; elsewhere tables follow each other with an empty line
 * between, and --json prints one document a line. SIGINT, SIGTERM and SIGHUP end it with status
 * 130: after the output that is under way, or a second later where nobody reads it.
 */
#include "stat_output.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { KEY_WATCH = TOOL_KEY, KEY_INTERVAL, KEY_JSON, KEY_PROMETHEUS };

struct stat_command {
	bool watch, json, prometheus;
	double interval; /* seconds; 0: not given */
};

static const struct argp_option options[] = {
	{"watch", KEY_WATCH, NULL, 0, "Again and again, until interrupted", 0},
	{"interval", KEY_INTERVAL, "S", 0, "With --watch: every S seconds (default 1)", 0},
	{"json", KEY_JSON, NULL, 0, "One JSON document; with --watch, one a line", 0},
	{"prometheus", KEY_PROMETHEUS, NULL, 0, "Metrics in the text format of Prometheus", 0},
	{0},
};

static void check(struct argp_state *state, const struct stat_command *command)
{
	if (command->prometheus && (command->json || command->watch))
		argp_error(state, "expected --prometheus alone, found it with %s; give one of them",
			   command->json ? "--json" : "--watch");
	if (command->interval > 0 && !command->watch)
		argp_error(state, "expected --interval with --watch; add --watch");
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
	struct stat_command *command = state->input;

	switch (key) {
	case KEY_WATCH:
		command->watch = true;
		return 0;
	case KEY_INTERVAL:
		command->interval = tool_seconds(state, "--interval", arg);
		return 0;
	case KEY_JSON:
		command->json = true;
		return 0;
	case KEY_PROMETHEUS:
		command->prometheus = true;
		return 0;
	case ARGP_KEY_ARG:
		argp_error(state, "expected options only, found '%s'", arg);
		return 0;
	case ARGP_KEY_END:
		check(state, command);
		return 0;
	default:
		return ARGP_ERR_UNKNOWN;
	}
}

static const struct argp_child children[] = {{&tool_common_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {
	.options = options,
	.parser = parse,
	.doc = "Shows the channels and pools of shared memory of this user's processes: what is in "
	       "them, who is late, stopped or dead; and how far their loads are. Their owners take "
	       "no part.",
	.children = children};

/* Return: status. */
static int show(const struct stat_command *command)
{
	struct tnd_stat *stat;
	int rc = tnd_stat_read(&stat), status;

	if (rc < 0)
		return tool_fail_what(rc, "reading /proc");
	if (command->json)
		status = stat_print_json(stat, command->watch);
	else if (command->prometheus)
		status = stat_print_prometheus(stat);
	else
		status = stat_print_text(stat);
	tnd_stat_free(stat);
	return status;
}

/* -- again and again -- */

static volatile sig_atomic_t interrupted;

static void on_signal(int number)
{
	(void)number;
	interrupted = 1;
	alarm(1);
}

/* Still writing: to a pipe that is full, perhaps for ever. */
static void on_alarm(int number)
{
	(void)number;
	_exit(TOOL_INTERRUPTED);
}

static const int endings[] = {SIGINT, SIGTERM, SIGHUP};

/* Return: the set of them. */
static sigset_t catch_signals(void)
{
	/* A second one has its default effect. */
	struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART | SA_RESETHAND};
	struct sigaction late = {.sa_handler = on_alarm};
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGALRM);
	sigaction(SIGALRM, &late, NULL);
	sigprocmask(SIG_UNBLOCK, &set, NULL);
	sigemptyset(&set);
	for (size_t i = 0; i < sizeof(endings) / sizeof(endings[0]); i++) {
		struct sigaction before;

		/* What was started under nohup stays so. */
		if (sigaction(endings[i], NULL, &before) == 0 && before.sa_handler == SIG_IGN)
			continue;
		sigaction(endings[i], &action, NULL);
		sigaddset(&set, endings[i]);
	}
	return set;
}

/* Return: whether to go on. */
static bool pause_for(double seconds, const sigset_t *signals)
{
	int64_t end = tool_now_ns() + (int64_t)(seconds * 1e9), left;
	sigset_t before;

	/* One that comes between the look at `interrupted` and the sleep ends the sleep. */
	sigprocmask(SIG_BLOCK, signals, &before);
	while (!interrupted && (left = end - tool_now_ns()) > 0) {
		struct timespec time = {.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};

		ppoll(NULL, 0, &time, &before);
	}
	sigprocmask(SIG_SETMASK, &before, NULL);
	return !interrupted;
}

static int watch(const struct stat_command *command)
{
	bool redraw = !command->json && isatty(STDOUT_FILENO);
	double interval = command->interval > 0 ? command->interval : 1;
	sigset_t signals = catch_signals();
	bool first = true;
	int status;

	do {
		if (redraw)
			fputs("\033[H\033[J", stdout);
		else if (!command->json && !first)
			putchar('\n');
		first = false;
		status = show(command);
		/* What was lost is said by tool_output_finish. */
		if (status != TOOL_OK || fflush(stdout) != 0 || ferror(stdout))
			return status;
	} while (pause_for(interval, &signals));
	return TOOL_INTERRUPTED;
}

int cmd_stat(int argc, char **argv)
{
	struct stat_command command = {0};

	tool_parse(&argp, argc, argv, &command);
	return command.watch ? watch(&command) : show(&command);
}
