/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load_parts.h - the parts of `tundish load`
 *
 *      cmd_load.c      options; writes the results
 *      load_check.c    checkpoint and every plan, before any process is started
 *          |
 *      load_node.c     the parent: listens, cancels, reaps        load_start.c   starts the ranks
 *          |   ^
 *     fork |   | pipe: one JSON line a message
 *          v   |
 *      load_rank.c     the child: one rank's load                 load_say.c     its messages
 *      load_consume.c  the consumer: memory of its own, checksums, trace events
 *
 *      load_json.c     `tundish.load/1`         load_text.c    the report for people
 *      load_files.c    checksum and trace files progress.c     the bar, and --progress-fd
 *
 * With --shared the process of the lowest rank, the host, reads for all: it opens the share, and
 * the others attach to its address once it has said "open".
 *
 * Messages of a rank (`t` says which):
 *      {"t":"ready"}        with --keep-touched: its memory is there, the clock may start
 *      {"t":"open"}         of the host: others may attach
 *      {"t":"progress","done_bytes":..,"total_bytes":..,"charged_bytes":..,"seconds":..}
 *      {"t":"log","message":".."}
 *      {"t":"end","code":..,"rank":..,"file":..,"tensor":..,"message":..,"seconds":..,
 *       "report":{..}|null,"memlog":{..}|null,"share":{..}|null}
 * A rank that ends without "end" has died. The answer to "ready" and "open" goes through a rank's
 * gate, a pipe: the time at which the clock started, 8 bytes; its end when there is nothing to wait
 * for any more.
 */
#ifndef TND_TOOL_LOAD_PARTS_H
#define TND_TOOL_LOAD_PARTS_H

#include "tool.h"

#include <sys/types.h>

enum { PROGRESS_AUTO, PROGRESS_ALWAYS, PROGRESS_NEVER };
enum { SHARING_DEFAULT, SHARING_YES, SHARING_NO };

struct load_command {
	const char *path;
	struct tool_plan_options options;
	struct tnd_load_opts load; /* what does not depend on the rank */
	bool keep, keep_touched, json;
	uint32_t on_dead;  /* TND_SHARE_DEAD_* */
	uint32_t sharing;  /* SHARING_* */
	bool shared;       /* one process reads for all */
	bool guest;        /* of a share that is another's */
	const char *group; /* address of ranks that are started apart; nullable */
	const char *members_text;
	uint32_t *members; /* ranks that take part, in order; NULL: all of them */
	size_t member_count;
	double evict;      /* seconds, or 0 */
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
	int gate_fd; /* the parent's end, or the child's; -1: none */
	char *line;  /* messages read and not yet understood */
	size_t line_used, line_capacity;
	uint64_t done_bytes, total_bytes, charged_bytes;
	double seconds;
	json_t *report, *memlog; /* NULL until it has ended */
	bool ended, reaped;
	bool ready;     /* its memory is there */
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
	bool weak; /* the first error is what others say of somebody's; a better one replaces it */
	const char *address; /* of the share; NULL without one */
	char made_address[64];
	bool hosting; /* the host is one of `ranks` */
	uint32_t host_rank;
	uint64_t union_bytes; /* where `hosting` */
	json_t *share;        /* what the host's process tells of it; NULL until it has ended */
	bool cancelled, killed;
	int64_t kill_ns;  /* when cancelled: the end of patience */
	int64_t bar_ns;   /* last time that the bar was drawn */
	bool bar, bar_on; /* wanted; drawn now */
	int progress_fd;  /* or -1 */
};

/* One rank as it sees itself. */
struct load_child {
	const struct load_command *command;
	const struct load_node *node;
	const struct load_rank *rank;
	struct tnd_plan *plan, *union_plan; /* the latter in the host */
	struct tnd_load *load;
	struct tnd_share *share; /* in the host */
	int64_t start_ns;
	char *kept; /* one mapping for all kept bytes */
	size_t kept_used, kept_bytes;
	struct load_sum *sums;
	size_t sum_count;
	void *hash; /* XXH3_state_t */
	FILE *trace;
};

/* -- load_check.c -- */

/*
 * Opens the checkpoint, makes every plan and drops it. Return: 0, or what is refused; the error is
 * in the node.
 */
int load_check(struct load_node *node);

/* -- load_node.c -- */

/*
 * Runs all ranks to their end; errors are in the node. Return: 0, or -errno when they could not be
 * started.
 */
int load_node_run(struct load_node *node);
void load_node_free(struct load_node *node);
/* Notes the first error; `rank` -1: nobody's. `message`: nullable. */
void load_fail(struct load_node *node, int code, int rank, const char *message);
void load_kill_all(struct load_node *node);

/* -- load_start.c -- */

/* Starts the processes of all ranks. Return: 0, -errno with the error in the node. */
int load_start_all(struct load_node *node, int signals);
/* Lets a rank go on that waits at its gate. */
void load_gate_open(const struct load_node *node, const struct load_rank *rank);
void load_gates_close(struct load_node *node);

/* -- load_rank.c -- */

/* The child's whole life. */
_Noreturn void load_rank_main(const struct load_node *node, const struct load_rank *rank,
			      pid_t parent);

/* -- load_say.c: messages of a child -- */

/* Where messages go. */
void load_say_to(int fd);
/* A message of this kind and nothing else. */
void load_say(const char *kind);
/* tnd_log_fn */
void load_say_log(void *arg, int level, const char *message);
void load_say_progress(const struct load_child *child, const struct tnd_progress *progress);
void load_say_end(const struct load_child *child, int code, const struct tnd_error *error);
/* The end of a child that was cancelled and has nothing to tell. Async-signal-safe. */
void load_say_cancelled(void);

/* -- load_consume.c -- */

/*
 * What --keep, --checksum and --trace need, before the load's own figures begin. Return: 0, -errno.
 */
int load_consume_prepare(struct load_child *child, struct tnd_error *error);
/* tnd_place_fn: the next place in the memory of --keep. `arg`: the child. */
void *load_consume_place(void *arg, const struct tnd_plan_item *item);
/* All views of the load. Return: 0, or its error. */
int load_consume(struct load_child *child, struct tnd_error *error);
/* After the load: writes what was gathered. Return: 0, -errno. */
int load_consume_finish(struct load_child *child, int code, struct tnd_error *error);

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
/* Figures of the ranks, summed, and of the share; 0 where there is none. */
uint64_t load_sum(const struct load_node *node, const char *key);
uint64_t load_share_u64(const struct load_node *node, const char *key);
/* The same of the whole node: ranks and share. */
uint64_t load_storage_bytes(const struct load_node *node);
uint64_t load_peak_bytes(const struct load_node *node);

/* -- load_text.c -- */

int load_print(const struct load_node *node);

/* -- progress.c -- */

void load_progress_step(struct load_node *node, struct load_rank *rank, bool last);
/* After the last rank: gives a slow reader a second to take the last line of each. */
void load_progress_rest(struct load_node *node);
void load_progress_bar(struct load_node *node);
void load_progress_clear(struct load_node *node);

#endif
