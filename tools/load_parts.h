/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load_parts.h - the parts of `tundish load`
 *
 *      cmd_load.c      options; checks checkpoint and every rank's plan before any process is
 *          |           started; writes the results
 *          |
 *      load_node.c     the parent: starts a process for each rank, listens, cancels, reaps
 *          |   ^
 *     fork |   | pipe: one JSON line a message
 *          v   |
 *      load_rank.c     the child: one rank's load, the consumer, checksums and trace events
 *
 *      load_json.c     `tundish.load/1`         load_text.c    the report for people
 *      load_files.c    checksum and trace files progress.c     the bar, and --progress-fd
 *
 * Messages of a rank (`t` says which):
 *      {"t":"progress","done_bytes":..,"total_bytes":..,"charged_bytes":..,"seconds":..}
 *      {"t":"log","message":".."}
 *      {"t":"end","code":..,"file":..,"tensor":..,"message":..,"seconds":..,
 *       "report":{..}|null,"memlog":{..}|null}
 * A rank that ends without "end" has died.
 */
#ifndef TND_TOOL_LOAD_PARTS_H
#define TND_TOOL_LOAD_PARTS_H

#include "tool.h"

#include <sys/types.h>

enum { PROGRESS_AUTO, PROGRESS_ALWAYS, PROGRESS_NEVER };

struct load_command {
	const char *path;
	struct tool_plan_options options;
	struct tnd_load_opts load; /* what does not depend on the rank */
	bool keep, json, on_dead_continue;
	uint32_t progress; /* PROGRESS_* */
	int progress_fd;   /* or -1 */
	double deadline;   /* seconds, or 0 */
	const char *checksum_path, *report_path, *trace_path;
};

/* One rank as its parent sees it. */
struct load_rank {
	uint32_t rank;
	pid_t pid;
	int fd;          /* messages; -1 after their end */
	int checksum_fd; /* memfd that the child fills, or -1 */
	int trace_fd;
	char *line; /* messages read and not yet understood */
	size_t line_used, line_capacity;
	uint64_t done_bytes, total_bytes, charged_bytes;
	double seconds;
	json_t *report, *memlog; /* NULL until it has ended */
	bool ended, reaped;
	bool late;      /* did not answer at the deadline */
	bool owes_step; /* its last progress line found no room */
	int code;       /* 0, or why it failed */
};

struct load_node {
	const struct load_command *command;
	struct tnd_checkpoint *checkpoint;
	struct load_rank *ranks;
	size_t count;
	int64_t start_ns;
	double seconds;
	int code; /* the first error, 0 while there is none */
	struct tnd_error error;
	bool cancelled, killed;
	int64_t kill_ns;  /* when cancelled: the end of patience */
	int64_t bar_ns;   /* last time that the bar was drawn */
	bool bar, bar_on; /* wanted; drawn now */
	int progress_fd;  /* or -1 */
};

/* -- load_node.c -- */

/*
 * Runs all ranks to their end; errors are in the node. Return: 0, or -errno when they could not be
 * started.
 */
int load_node_run(struct load_node *node);
void load_node_free(struct load_node *node);

/* -- load_rank.c -- */

/* The child's whole life. */
_Noreturn void load_rank_main(const struct load_node *node, const struct load_rank *rank,
			      pid_t parent);

/* -- load_files.c: written by a child into a memfd, gathered by the parent -- */

struct load_sum {
	const struct tnd_tensor *tensor;
	uint64_t bytes, hash;
};
/* Sorts by name and writes one line each. Return: 0, -errno. */
int load_sums_write(struct load_sum *sums, size_t count, uint32_t rank, int fd);
/* One complete event. */
void load_trace_event(FILE *stream, const char *stage, const struct tnd_view *view, uint32_t rank,
		      int64_t begin_us, int64_t end_us);
/* Return: status, said already. */
int load_checksum_file(const struct load_node *node);
int load_trace_file(const struct load_node *node);

/* -- load_json.c -- */

/* Gives `object` (a rank's, or an empty one) every key of the schema. */
void load_rank_complete(json_t *object, const struct load_rank *rank, bool *failed);
/* The whole document; NULL when memory ran out. `node` may have no ranks. */
json_t *load_document(const struct load_node *node);
uint64_t load_budget_bytes(const struct load_node *node);
uint64_t load_rank_u64(const struct load_rank *rank, const char *key);

/* -- load_text.c -- */

int load_print(const struct load_node *node);

/* -- progress.c -- */

void load_progress_step(struct load_node *node, struct load_rank *rank, bool last);
/* After the last rank: gives a slow reader a second to take the last line of each. */
void load_progress_rest(struct load_node *node);
void load_progress_bar(struct load_node *node);
void load_progress_clear(struct load_node *node);

#endif
