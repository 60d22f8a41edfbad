/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load_rank.c - one rank's process: it plans, loads, consumes, and tells its parent
 *
 * It owns nothing that outlives it: it dies with its parent (PR_SET_PDEATHSIG, and a check that the
 * parent did not die before that was set), SIGTERM cancels the load, SIGINT is left to the parent,
 * which gets it too. It never prints and leaves with _exit, so that what the parent had buffered is
 * not written twice.
 *
 * The consumer drops each view at once, as an upload to a device would; with --keep it copies each
 * into one mapping of its own, in steps that it tells to the load, so that its memory is not taken
 * for the loader's.
 */
#include "load_parts.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <xxhash.h>

#define COPY_STEP ((size_t)1 << 20)

struct child {
	const struct load_command *command;
	const struct load_rank *rank;
	struct tnd_plan *plan;
	struct tnd_load *load;
	int64_t start_ns;
	char *kept; /* one mapping for all kept bytes */
	size_t kept_used, kept_bytes;
	struct load_sum *sums;
	size_t sum_count;
	XXH3_state_t *hash;
	FILE *trace;
};

static volatile sig_atomic_t cancelled;
static struct tnd_load *volatile cancel_load; /* what SIGTERM cancels */

static void on_term(int number)
{
	struct tnd_load *load = cancel_load;

	(void)number;
	cancelled = 1;
	if (load)
		tnd_load_cancel(load);
}

/* -- messages -- */

static pthread_mutex_t send_lock = PTHREAD_MUTEX_INITIALIZER;
static int send_fd = -1;

/* A parent that is gone has killed us already; nothing is to be done about a failing write. */
static void send_text(const char *at, size_t left)
{
	pthread_mutex_lock(&send_lock);
	while (left) {
		ssize_t written = write(send_fd, at, left);

		if (written < 0 && errno == EINTR)
			continue;
		if (written <= 0)
			break;
		at += written;
		left -= (size_t)written;
	}
	pthread_mutex_unlock(&send_lock);
}

/* Sends and frees; nothing when `failed`. Return: false when memory ran out. */
static bool send_json(json_t *message, bool failed)
{
	char *text = message && !failed ? json_dumps(message, JSON_COMPACT) : NULL;
	size_t bytes;

	json_decref(message);
	if (!text)
		return false;
	bytes = strlen(text);
	text[bytes] = '\n'; /* in place of the NUL */
	send_text(text, bytes + 1);
	free(text);
	return true;
}

static void on_log(void *arg, int level, const char *message)
{
	json_t *object = json_object();
	bool failed = false;

	(void)arg;
	(void)level;
	tool_json_set(object, "t", json_string("log"), &failed);
	tool_json_set(object, "message", json_string(message), &failed);
	send_json(object, failed);
}

static int on_progress(void *arg, const struct tnd_progress *progress)
{
	json_t *object = json_object();
	bool failed = false;

	(void)arg;
	tool_json_set(object, "t", json_string("progress"), &failed);
	tool_json_set(object, "done_bytes", tool_json_u64(progress->done_bytes), &failed);
	tool_json_set(object, "total_bytes", tool_json_u64(progress->total_bytes), &failed);
	tool_json_set(object, "charged_bytes", tool_json_u64(progress->charged_bytes), &failed);
	tool_json_set(object, "seconds", json_real((double)progress->elapsed_ns / 1e9), &failed);
	send_json(object, failed);
	return cancelled;
}

/* What `get` tells of the load, parsed; null where there is nothing. */
static json_t *tell(struct tnd_load *load, int (*get)(struct tnd_load *load, char **ret_text))
{
	json_t *value = NULL;
	char *text;

	if (load && get(load, &text) == 0) {
		value = json_loads(text, JSON_ALLOW_NUL, NULL);
		free(text);
	}
	return value ? value : json_null();
}

static void send_end(struct child *child, int code, const struct tnd_error *error)
{
	json_t *object = json_object();
	bool failed = false;

	tool_json_set(object, "t", json_string("end"), &failed);
	tool_json_set(object, "code", json_integer(code), &failed);
	tool_json_set(object, "seconds", json_real((double)(tool_now_ns() - child->start_ns) / 1e9),
		      &failed);
	if (code != 0) {
		const char *message = error->message[0] ? error->message : tnd_strerror(code);

		tool_json_set(object, "file", json_string(error->file), &failed);
		tool_json_set(object, "tensor", json_string(error->name), &failed);
		tool_json_set(object, "message", json_string(message), &failed);
	}
	tool_json_set(object, "report", tell(child->load, tnd_load_report_json), &failed);
	tool_json_set(object, "memlog", tell(child->load, tnd_load_memlog_json), &failed);
	if (!send_json(object, failed)) {
		static const char short_of_memory[] = "{\"t\":\"end\",\"code\":-12}\n";

		send_text(short_of_memory, sizeof(short_of_memory) - 1);
	}
}

/* -- the consumer -- */

static void keep(struct child *child, const struct tnd_view *view)
{
	const char *from = view->data;

	for (size_t left = view->bytes; left;) {
		size_t step = left < COPY_STEP ? left : COPY_STEP;

		memcpy(child->kept + child->kept_used, from, step);
		child->kept_used += step;
		from += step;
		left -= step;
		tnd_load_consumer_bytes(child->load, (int64_t)step);
	}
}

static void sum(struct child *child, const struct tnd_view *view)
{
	const void *data = view->data ? view->data : "";
	struct load_sum *entry;
	uint64_t hash;

	if (!(view->flags & TND_VIEW_F_PIECE)) {
		hash = XXH3_64bits(data, view->bytes);
	} else {
		if (view->piece_offset == 0)
			XXH3_64bits_reset(child->hash);
		XXH3_64bits_update(child->hash, data, view->bytes);
		if (!(view->flags & TND_VIEW_F_LAST))
			return;
		hash = XXH3_64bits_digest(child->hash);
	}
	entry = &child->sums[child->sum_count++];
	entry->tensor = tnd_plan_items(child->plan, &(size_t){0})[view->item].tensor;
	entry->bytes = view->tensor_bytes;
	entry->hash = hash;
}

/* All views of the load. Return: 0, or its error. */
static int consume(struct child *child, struct tnd_error *error)
{
	struct tnd_view view;
	int64_t before = 0, after = 0;
	int code;

	for (;;) {
		before = child->trace ? tool_now_ns() : 0;
		code = tnd_load_next(child->load, &view, error);
		if (code <= 0)
			return code;
		after = child->trace ? tool_now_ns() : 0;
		if (child->kept)
			keep(child, &view);
		if (child->sums)
			sum(child, &view);
		if (child->trace) {
			int64_t base = child->start_ns;

			load_trace_event(child->trace, "wait", &view, child->rank->rank,
					 (before - base) / 1000, (after - base) / 1000);
			load_trace_event(child->trace, "consume", &view, child->rank->rank,
					 (after - base) / 1000, (tool_now_ns() - base) / 1000);
		}
		tnd_view_release(&view);
	}
}

/* -- set-up -- */

/*
 * What --keep, --checksum and --trace need, before the load's own figures begin. Return: 0, -errno.
 */
static int prepare(struct child *child, struct tnd_error *error)
{
	struct tnd_plan_totals totals = {.struct_bytes = sizeof(totals)};

	tnd_plan_totals(child->plan, &totals);
	if (child->command->keep && totals.kept_bytes) {
		child->kept_bytes = totals.kept_bytes;
		child->kept = mmap(NULL, child->kept_bytes, PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (child->kept == MAP_FAILED) {
			child->kept = NULL;
			snprintf(
				error->message, sizeof(error->message),
				"--keep: expected %llu bytes of memory for the tensors of rank %u, "
				"found: %s; raise the limit or load without --keep",
				(unsigned long long)totals.kept_bytes, child->rank->rank,
				strerror(errno));
			return -ENOMEM;
		}
		madvise(child->kept, child->kept_bytes, MADV_HUGEPAGE);
	}
	if (child->rank->checksum_fd >= 0) {
		child->sums = calloc(totals.tensors + 1, sizeof(*child->sums));
		child->hash = XXH3_createState();
		if (!child->sums || !child->hash)
			return -ENOMEM;
	}
	if (child->rank->trace_fd >= 0) {
		child->trace = fdopen(child->rank->trace_fd, "w");
		if (!child->trace)
			return -ENOMEM;
	}
	return 0;
}

static int open_load(struct child *child, const struct load_node *node, struct tnd_error *error)
{
	struct tnd_layout layout = child->command->options.layout;
	struct tnd_load_opts opts = child->command->load;
	struct tnd_load *load;
	int code;

	layout.rank = child->rank->rank;
	code = tnd_plan_create(node->checkpoint, &layout, &child->command->options.plan,
			       &child->plan, error);
	if (code == 0)
		code = prepare(child, error);
	if (code != 0)
		return code;
	if (child->command->deadline > 0)
		opts.deadline_ns = node->start_ns + (int64_t)(child->command->deadline * 1e9);
	opts.progress = on_progress;
	code = tnd_load_open(child->plan, &opts, &load, error);
	if (code != 0)
		return code;
	child->load = load;
	cancel_load = load;
	/* A SIGTERM before this line found no load to cancel. */
	if (cancelled)
		tnd_load_cancel(load);
	return 0;
}

static int fail_share(const struct child *child, int code, const char *path,
		      struct tnd_error *error)
{
	snprintf(error->message, sizeof(error->message),
		 "%s: expected to write the lines of rank %u, found: %s; make room or raise the "
		 "limit on a file's size (ulimit -f)",
		 path, child->rank->rank, tnd_strerror(code));
	return code;
}

static int run(struct child *child, const struct load_node *node, struct tnd_error *error)
{
	struct tnd_error end_error = {0};
	int code = open_load(child, node, error), end_code;

	if (code != 0)
		return code;
	code = consume(child, error);
	end_code = tnd_load_end(child->load, &end_error);
	if (code == 0 && end_code != 0) {
		code = end_code;
		*error = end_error;
	}
	if (code == 0 && child->sums) {
		code = load_sums_write(child->sums, child->sum_count, child->rank->rank,
				       child->rank->checksum_fd);
		if (code != 0)
			fail_share(child, code, child->command->checksum_path, error);
	}
	if (child->trace && fclose(child->trace) != 0 && code == 0)
		code = fail_share(child, -errno, child->command->trace_path, error);
	return code;
}

/* The signals of a child; they were blocked before the fork, so that none is lost in between. */
static void settle_signals(void)
{
	struct sigaction action = {.sa_handler = on_term, .sa_flags = SA_RESTART};
	sigset_t none;

	sigaction(SIGTERM, &action, NULL);
	signal(SIGINT, SIG_IGN);
	signal(SIGHUP, SIG_IGN);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
}

void load_rank_main(const struct load_node *node, const struct load_rank *rank, pid_t parent)
{
	struct child child = {.command = node->command, .rank = rank, .start_ns = node->start_ns};
	struct tnd_error error = {0};
	int code;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(TOOL_PEER);
	settle_signals();
	send_fd = rank->fd;
	tnd_log_set(on_log, NULL, TND_LOG_WARNING);
	code = run(&child, node, &error);
	send_end(&child, code, &error);
	cancel_load = NULL;
	tnd_log_set(NULL, NULL, 0);
	tnd_load_close(child.load);
	tnd_plan_close(child.plan);
	_exit(code == 0 ? TOOL_OK : TOOL_FOUND);
}
