/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tool.h - what the commands of `tundish` share
 *
 *   main.c      finds the command and checks standard output at the end
 *   options.c   help, numbers, sizes, keywords, how a checkpoint is read
 *   planopts.c  the options that plan and load share
 *   output.c    JSON documents, files that appear whole or not at all, errors of standard output
 *   print.c     tables of 80 columns, names in order and made printable, colour, time
 *   exit.c      error code -> exit status, and how errors are said
 *   cmd_*.c     one command each; load_*.c, stat_*.c, bench_*.c belong to theirs
 *
 * The tool includes <tundish/...> only: what it can do, any program can.
 */
#ifndef TND_TOOL_H
#define TND_TOOL_H

#include <argp.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

#include <tundish/tundish.h>

/* Exit statuses: a promise to scripts. */
enum {
	TOOL_OK = 0,
	TOOL_FOUND = 1,
	TOOL_USAGE = 2,
	TOOL_REFUSED = 3,
	TOOL_NO_FIT = 4,
	TOOL_IO = 5,
	TOOL_PEER = 6,
	TOOL_DEADLINE = 7,
	TOOL_INTERRUPTED = 130,
};

/* -- commands -- */

int cmd_inspect(int argc, char **argv);
int cmd_verify(int argc, char **argv);
int cmd_plan(int argc, char **argv);
int cmd_load(int argc, char **argv);
int cmd_doctor(int argc, char **argv);
int cmd_stat(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_bridge(int argc, char **argv); /* with ZeroMQ */

/* -- exit.c -- */

/* Status for a code of the library. */
int tool_status(int code);
/*
 * "tundish: SENTENCE" on standard error; without a sentence, the code's own. Return:
 * tool_status(code).
 */
int tool_fail(int code, const struct tnd_error *error);
/* "tundish: WHAT: text of the code". Return: tool_status(code). */
int tool_fail_what(int code, const char *what);
void tool_warn(const char *message);

/* -- options.c -- */

/* Keys of options without a short form; those of options.c begin at TOOL_KEY_SHARED. */
#define TOOL_KEY 0x1000
#define TOOL_KEY_SHARED 0x2000

/* Hidden options are those that --help leaves out and --help-all shows. */
extern const struct argp tool_common_argp; /* --help, --help-all, --usage */

/* --ignore-index and the like, a child parser; its input is a struct tnd_checkpoint_opts. */
extern const struct argp tool_checkpoint_argp;

/* A word of a list; texts[i] means values[i]. */
struct tool_choice {
	const char *text;
	uint32_t value;
};

/* These end the program with status 2 when `arg` is not as expected; `option` is shown ("--tp"). */
uint64_t tool_number(struct argp_state *state, const char *option, const char *arg, uint64_t least,
		     uint64_t most);
uint64_t tool_size(struct argp_state *state, const char *option, const char *arg);
double tool_seconds(struct argp_state *state, const char *option, const char *arg);
uint32_t tool_choose(struct argp_state *state, const char *option, const char *arg,
		     const struct tool_choice *choices, size_t count);
uint64_t tool_positive_size(struct argp_state *state, const char *option, const char *arg);
#define TOOL_CHOOSE(state, option, arg, choices) \
	tool_choose(state, option, arg, choices, sizeof(choices) / sizeof((choices)[0]))
/* The one positional argument, and its check at the end. */
void tool_take_path(struct argp_state *state, const char **path, const char *arg);
void tool_need_path(struct argp_state *state, const char *path);

/* Parses with our help and exit status. `input`: handed to the parser. */
void tool_parse(const struct argp *argp, int argc, char **argv, void *input);

#define TOOL_RANKS_MAX 1024

/* -- planopts.c -- */

/* Layout and plan options, shared by plan and load. */
struct tool_plan_options {
	struct tnd_checkpoint_opts checkpoint;
	struct tnd_layout layout;
	struct tnd_plan_opts plan;
	bool rank_given;
	uint64_t node_budget_bytes; /* 0: not given */
	uint64_t rank_budget_bytes; /* 0: not given */
	const char **skip, **names; /* grown as options come; texts are argv's */
	char *rules_text;
	const char *rules_path;
};
extern const struct argp tool_plan_argp; /* child parser; its input is a struct tool_plan_options */

void tool_plan_options_init(struct tool_plan_options *options);
void tool_plan_options_free(struct tool_plan_options *options);
/* After parsing: reads the rules file, settles the budget. Return: status, said already. */
int tool_plan_options_settle(struct tool_plan_options *options);
uint32_t tool_rank_count(const struct tool_plan_options *options);

/* -- output.c -- */

/* Adds `value` (stolen, also on failure) under `key`; marks *failed when memory ran out. */
void tool_json_set(json_t *object, const char *key, json_t *value, bool *failed);
void tool_json_append(json_t *array, json_t *value, bool *failed);
/* jansson holds signed 64-bit integers; larger values become reals. */
json_t *tool_json_u64(uint64_t value);
/* A file's name, which need not be UTF-8: as it is, or made printable. Return: NULL: no memory. */
json_t *tool_json_name(const char *name);
/* Object with the document's schema. */
json_t *tool_json_document(const char *schema);
/*
 * Prints (and frees) a document on standard output; `failed` or NULL: says that memory ran out.
 * Return: status.
 */
int tool_json_print(json_t *document, bool failed);
/* A text as a JSON string, quotes included. `text`: UTF-8. */
void tool_json_quote(FILE *stream, const char *text, size_t text_bytes);

/* A file that appears under its name when it is complete; special files are written in place. */
struct tool_file {
	FILE *stream;
	const char *path;
	char *temp; /* NULL: in place */
};
/* Return: 0, -errno. */
int tool_file_open(struct tool_file *file, const char *path);
int tool_file_commit(struct tool_file *file);
void tool_file_abort(struct tool_file *file);
/* Before long work: can `path` be written? Return: 0, -errno. */
int tool_file_probe(const char *path);

/*
 * Standard descriptors that are closed are filled, so that no file lands on them and is printed
 * into.
 */
void tool_output_init(void);
/* Flushes and closes standard output. Return: `status`, or TOOL_IO when anything was lost. */
int tool_output_finish(int status);

/* -- print.c -- */

#define TOOL_COLUMNS 80

/* Colour on `stream`: a terminal, and NO_COLOR is not set. */
bool tool_colour(FILE *stream);

/* Names of tensors in byte order, for comparison functions of qsort(). */
int tool_compare_names(const struct tnd_tensor *a, const struct tnd_tensor *b);

/* CLOCK_MONOTONIC. */
int64_t tool_now_ns(void);

/*
 * Printable copy: control characters and what reorders text on a terminal escaped. Return: to be
 * freed, or NULL.
 */
char *tool_printable(const char *text, size_t text_bytes);
/* Columns that a printable text takes. */
size_t tool_width(const char *text);
/* `text` cut in its middle to `columns`, written to `stream`. Return: columns written. */
size_t tool_put_cut(FILE *stream, const char *text, size_t columns);
/*
 * A paragraph that begins at `column`, wrapped at TOOL_COLUMNS, continuation lines indented by
 * `indent`.
 */
void tool_put_wrapped(FILE *stream, const char *text, size_t column, size_t indent);

enum { TOOL_LEFT, TOOL_RIGHT, TOOL_FLEX /* left, and cut when the line is too long */ };

struct tool_table {
	size_t column_count;
	const char *const *heads;
	const int *aligns;
	char **cells;
	size_t cell_count, capacity;
	bool failed;
};
void tool_table_init(struct tool_table *table, size_t column_count, const char *const *heads,
		     const int *aligns);
/* Adds one cell; rows fill from left to right. */
void tool_table_add(struct tool_table *table, const char *format, ...)
	__attribute__((format(printf, 2, 3)));
void tool_table_add_size(struct tool_table *table, uint64_t bytes);
void tool_table_add_name(struct tool_table *table, const char *text, size_t text_bytes);
/* Prints and frees. Return: status. */
int tool_table_print(struct tool_table *table, FILE *stream);

#endif
