/* SPDX-License-Identifier: Apache-2.0 */
/*
 * options.c - option parsing on top of argp: help, and strict values
 *
 * Each command has an argp of its own with tool_common_argp (help) and, for plan and load,
 * tool_plan_argp as children.
 * --help leaves out the options that are marked OPTION_HIDDEN, --help-all prints a copy of the
 * tables without the mark, so that both, and the check of completions against them, come from one
 * table.
 *
 * Values are strict: "4x", "", "-1" and " 4" are errors that name the option, what it takes, and
 * what was found.
 */
#include "tool.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* -- help -- */

enum { KEY_HELP = TOOL_KEY_SHARED, KEY_HELP_ALL, KEY_USAGE };

static size_t option_count(const struct argp_option *options)
{
	size_t count = 0;

	while (options[count].name || options[count].key || options[count].doc ||
	       options[count].group)
		count++;
	return count + 1;
}

/* The options of `argp` with nothing hidden. Return: to be freed, or NULL. */
static struct argp_option *shown_options(const struct argp *argp)
{
	size_t count = option_count(argp->options);
	struct argp_option *copy = calloc(count, sizeof(*copy));

	if (!copy)
		return NULL;
	memcpy(copy, argp->options, count * sizeof(*copy));
	for (size_t i = 0; i < count; i++)
		copy[i].flags &= ~OPTION_HIDDEN;
	return copy;
}

#define CHILDREN_MAX 4

static void help(const struct argp *argp, char *name, unsigned flags, bool all)
{
	struct argp copies[CHILDREN_MAX], root = *argp;
	struct argp_child children[CHILDREN_MAX + 1] = {{0}};
	struct argp_option *options[CHILDREN_MAX + 1] = {NULL};
	size_t count = 0;

	if (all) {
		while (argp->children && count < CHILDREN_MAX && argp->children[count].argp) {
			children[count] = argp->children[count];
			copies[count] = *children[count].argp;
			options[count] = shown_options(&copies[count]);
			if (options[count])
				copies[count].options = options[count];
			children[count].argp = &copies[count];
			count++;
		}
		options[CHILDREN_MAX] = shown_options(argp);
		if (options[CHILDREN_MAX])
			root.options = options[CHILDREN_MAX];
		root.children = children;
	}
	argp_help(&root, stdout, flags, name);
	for (size_t i = 0; i <= CHILDREN_MAX; i++)
		free(options[i]);
	exit(tool_output_finish(TOOL_OK));
}

static error_t parse_common(int key, char *arg, struct argp_state *state)
{
	unsigned flags = ARGP_HELP_SHORT_USAGE | ARGP_HELP_LONG | ARGP_HELP_DOC;

	(void)arg;
	switch (key) {
	case KEY_HELP:
	case KEY_HELP_ALL:
		help(state->root_argp, state->name, flags, key == KEY_HELP_ALL);
		return 0;
	case KEY_USAGE:
		help(state->root_argp, state->name, ARGP_HELP_USAGE, true);
		return 0;
	default:
		return ARGP_ERR_UNKNOWN;
	}
}

static const struct argp_option common_options[] = {
	{"help", KEY_HELP, NULL, 0, "The options that people use", -1},
	{"help-all", KEY_HELP_ALL, NULL, 0, "All options", -1},
	{"usage", KEY_USAGE, NULL, OPTION_HIDDEN, "A short usage message", -1},
	{0},
};
const struct argp tool_common_argp = {.options = common_options, .parser = parse_common};

/* -- options that every reader of a checkpoint has -- */

enum { KEY_IGNORE_INDEX = TOOL_KEY_SHARED + 0x10, KEY_ALLOW_TRAILING, KEY_MAX_HEADER };

static const struct argp_option checkpoint_options[] = {
	{NULL, 0, NULL, OPTION_HIDDEN, "Checkpoint:", 5},
	{"ignore-index", KEY_IGNORE_INDEX, NULL, OPTION_HIDDEN, "Read every file of the folder", 5},
	{"allow-trailing", KEY_ALLOW_TRAILING, NULL, OPTION_HIDDEN, "Let bytes after the data pass",
	 5},
	{"max-header", KEY_MAX_HEADER, "SIZE", OPTION_HIDDEN, "Largest header (default 100 MB)", 5},
	{0},
};

static error_t parse_checkpoint(int key, char *arg, struct argp_state *state)
{
	struct tnd_checkpoint_opts *opts = state->input;

	switch (key) {
	case KEY_IGNORE_INDEX:
		opts->flags |= TND_CHECKPOINT_F_IGNORE_INDEX;
		return 0;
	case KEY_ALLOW_TRAILING:
		opts->flags |= TND_CHECKPOINT_F_ALLOW_TRAILING;
		return 0;
	case KEY_MAX_HEADER:
		opts->max_header_bytes = tool_positive_size(state, "--max-header", arg);
		return 0;
	default:
		return ARGP_ERR_UNKNOWN;
	}
}
const struct argp tool_checkpoint_argp = {.options = checkpoint_options,
					  .parser = parse_checkpoint};

void tool_parse(const struct argp *argp, int argc, char **argv, void *input)
{
	error_t rc;

	/*
	 * The width of help does not depend on the user's argp settings: it is documented to fit 80
	 * columns.
	 */
	unsetenv("ARGP_HELP_FMT");
	rc = argp_parse(argp, argc, argv, ARGP_NO_HELP, NULL, input);
	/* Bad words have ended the program: this is the want of memory for reading them. */
	if (rc)
		exit(tool_fail_what(-rc, "reading the command line"));
}

/* -- values -- */

uint64_t tool_number(struct argp_state *state, const char *option, const char *arg, uint64_t least,
		     uint64_t most)
{
	unsigned long long value;
	char *end;

	errno = 0;
	value = strtoull(arg, &end, 10);
	if (arg[0] < '0' || arg[0] > '9' || *end || errno || value < least || value > most)
		argp_error(state, "%s: expected a number from %llu to %llu, found '%s'", option,
			   (unsigned long long)least, (unsigned long long)most, arg);
	return value;
}

uint64_t tool_size(struct argp_state *state, const char *option, const char *arg)
{
	uint64_t bytes = 0;

	if (tnd_size_parse(arg, &bytes) != 0)
		argp_error(state,
			   "%s: expected a size (bytes, or a number with K, M, G, KiB, MB, ...), "
			   "found '%s'",
			   option, arg);
	return bytes;
}

uint64_t tool_positive_size(struct argp_state *state, const char *option, const char *arg)
{
	uint64_t bytes = tool_size(state, option, arg);

	if (bytes == 0)
		argp_error(state, "%s: expected a size above 0, found '%s'", option, arg);
	return bytes;
}

double tool_seconds(struct argp_state *state, const char *option, const char *arg)
{
	char *end;
	double value = strtod(arg, &end);

	if (arg[0] < '.' || arg[0] > '9' || *end || !isfinite(value) || value <= 0 || value > 1e9)
		argp_error(state, "%s: expected a number of seconds above 0, found '%s'", option,
			   arg);
	return value;
}

uint32_t tool_choose(struct argp_state *state, const char *option, const char *arg,
		     const struct tool_choice *choices, size_t count)
{
	char words[128] = "";

	for (size_t i = 0; i < count; i++) {
		if (strcmp(arg, choices[i].text) == 0)
			return choices[i].value;
		if (strlen(words) + strlen(choices[i].text) + 3 < sizeof(words)) {
			strcat(words, i ? ", " : "");
			strcat(words, choices[i].text);
		}
	}
	argp_error(state, "%s: expected one of %s, found '%s'", option, words, arg);
	return 0;
}

void tool_take_path(struct argp_state *state, const char **path, const char *arg)
{
	if (*path)
		argp_error(state, "expected one PATH, found '%s' and '%s'", *path, arg);
	*path = arg;
}

void tool_need_path(struct argp_state *state, const char *path)
{
	if (!path)
		argp_error(state, "expected the PATH of a file or folder");
}
