/* SPDX-License-Identifier: Apache-2.0 */
/* main.c - finds the command; --help, --version */
#include "tool.h"

#include <locale.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "tnd_config.h"

static const struct {
	const char *name;
	const char *title; /* argv[0] of the command's own parser */
	int (*run)(int argc, char **argv);
	const char *summary;
} commands[] = {
	{"inspect", "tundish inspect", cmd_inspect, "files and tensors of a checkpoint"},
	{"verify", "tundish verify", cmd_verify, "check a checkpoint, go on after a problem"},
	{"plan", "tundish plan", cmd_plan, "what each rank reads and keeps, and whether it fits"},
	{"load", "tundish load", cmd_load, "load as the ranks would, inside a memory budget"},
	{"doctor", "tundish doctor", cmd_doctor, "what this machine allows, and what to change"},
	{"stat", "tundish stat", cmd_stat, "channels, pools and loads: who is late, how far"},
	{"bench", "tundish bench", cmd_bench, "send objects through a channel, and measure"},
#if TND_HAVE_BRIDGE
	{"bridge", "tundish bridge", cmd_bridge, "a channel's objects on another machine"},
#endif
};
#define COMMAND_COUNT (sizeof(commands) / sizeof(commands[0]))

static void print_help(bool all)
{
	puts("Usage: tundish COMMAND [PATH] [OPTION...]\n"
	     "Feeds the ranks of an inference engine: weights from disk, inside a memory\n"
	     "budget that is never exceeded, and messages through shared memory.\n");
	for (size_t i = 0; i < COMMAND_COUNT; i++)
		printf("  %-10s %s\n", commands[i].name, commands[i].summary);
	puts("\n"
	     "      --help       this text; 'tundish COMMAND --help' for a command's options\n"
	     "      --help-all   the same with exit statuses\n"
	     "      --version    version of the tool");
	if (!all)
		return;
	puts("\n"
	     "Exit status:\n"
	     "  0    done\n"
	     "  1    the check found something (verify, doctor)\n"
	     "  2    usage\n"
	     "  3    the checkpoint or input is refused\n"
	     "  4    it cannot fit (budget, memory)\n"
	     "  5    an I/O or system error (a closed standard output too)\n"
	     "  6    a peer died\n"
	     "  7    a deadline passed\n"
	     "  130  interrupted");
}

static int usage(const char *what, const char *word)
{
	fprintf(stderr, "tundish: %s%s%s%s\nTry 'tundish --help' for the commands.\n", what,
		word ? " '" : "", word ? word : "", word ? "'" : "");
	return TOOL_USAGE;
}

static int dispatch(int argc, char **argv)
{
	if (argc < 2)
		return usage("expected a command", NULL);
	if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "--help-all")) {
		print_help(!strcmp(argv[1], "--help-all"));
		return TOOL_OK;
	}
	if (!strcmp(argv[1], "--version")) {
		puts("tundish " TND_VERSION);
		return TOOL_OK;
	}
	for (size_t i = 0; i < COMMAND_COUNT; i++) {
		if (strcmp(argv[1], commands[i].name) != 0)
			continue;
		/* getopt and argp only read argv[0]. */
		argv[1] = (char *)(uintptr_t)commands[i].title;
		return commands[i].run(argc - 1, argv + 1);
	}
	/* Not among the commands of a tool that was built without ZeroMQ. */
	if (!strcmp(argv[1], "bridge"))
		return usage("built without ZeroMQ, which is needed for", argv[1]);
	if (argv[1][0] == '-')
		return usage("unrecognized option", argv[1]);
	return usage("unknown command", argv[1]);
}

int main(int argc, char **argv)
{
	argp_err_exit_status = TOOL_USAGE;
	tool_output_init();
	/* A reader that goes away is an error of write(), with a sentence and status 5. */
	signal(SIGPIPE, SIG_IGN);
	/* So is a file that grows to the process's limit. */
	signal(SIGXFSZ, SIG_IGN);
	/* Names are UTF-8 whatever the user's locale is; numbers keep their point. */
	setlocale(LC_CTYPE, "C.UTF-8");
	return tool_output_finish(dispatch(argc, argv));
}
