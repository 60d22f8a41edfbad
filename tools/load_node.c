/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load_node.c - the parent of the ranks: starts them, listens, and sees to it that nothing is left
 * behind
 *
 *      start all --> poll { messages of each rank, signals, timers } --> all ended and reaped
 *
 * The first error is the one reported; it cancels the other ranks (SIGTERM, then SIGKILL after
 * PATIENCE_NS). SIGINT, SIGTERM and SIGHUP cancel likewise; a second one kills at once. A rank that
 * ends by a signal, or without its "end" message, has died. Ranks die with this process by
 * themselves (load_rank.c). They keep --deadline themselves too; those that have not answered
 * GRACE_NS after it hang, are named as the error and killed.
 *
 * With --shared others may tell of a death before this process sees it, and say less: what they say
 * stands only until it does.
 *
 * The page cache of the files is looked at before the first rank and brought back after the last,
 * whatever the outcome: a rank alone takes for warm what another has just brought in, and one that
 * was killed leaves what it was reading.
 *
 * Signals arrive through a signalfd and are blocked meanwhile; what arrives after the last rank is
 * gone takes its usual course when the mask is restored.
 */
#include "load_parts.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#define PATIENCE_NS INT64_C(1000000000)
#define GRACE_NS INT64_C(250000000)
#define BAR_MS 100
#define READ_BYTES ((size_t)65536)

static void signal_all(struct load_node *node, int number)
{
	for (size_t i = 0; i < node->count; i++)
		if (node->ranks[i].pid > 0 && !node->ranks[i].reaped)
			kill(node->ranks[i].pid, number);
}

static void cancel(struct load_node *node)
{
	if (node->cancelled)
		return;
	node->cancelled = true;
	node->kill_ns = tool_now_ns() + PATIENCE_NS;
	load_gates_close(node);
	signal_all(node, SIGTERM);
}

void load_kill_all(struct load_node *node)
{
	node->cancelled = node->killed = true;
	load_gates_close(node);
	signal_all(node, SIGKILL);
}

void load_fail(struct load_node *node, int code, int rank, const char *message)
{
	struct tnd_error *error = &node->error;

	if (node->code != 0 && !node->weak)
		return;
	node->code = code;
	node->weak = false;
	*error = (struct tnd_error){.code = code, .rank = rank, .byte_offset = TND_ERROR_NO_OFFSET};
	snprintf(error->message, sizeof(error->message), "%s",
		 message ? message : tnd_strerror(code));
}

/* INT64_MAX without --deadline. */
static int64_t deadline_ns(const struct load_node *node)
{
	double seconds = node->command->deadline;

	return seconds > 0 ? node->start_ns + (int64_t)(seconds * 1e9) : INT64_MAX;
}

/* -- messages -- */

/* Who cannot say which peer has died has lost the one that reads. */
static bool lost_host(const struct load_rank *rank, int to_blame)
{
	return rank->code == TND_E_PEER_DEAD && to_blame == (int)rank->rank;
}

/* What a rank says at its end: who is to blame may be another. */
static void on_error(struct load_node *node, const struct load_rank *rank, json_t *message)
{
	struct tnd_error *error = &node->error;
	const char *file = json_string_value(json_object_get(message, "file"));
	const char *tensor = json_string_value(json_object_get(message, "tensor"));
	const char *text = json_string_value(json_object_get(message, "message"));
	json_t *named = json_object_get(message, "rank");
	bool hearsay = rank->code == TND_E_PEER_DEAD || rank->code == TND_E_CANCELLED;
	int to_blame = json_is_integer(named) ? (int)json_integer_value(named) : (int)rank->rank;

	if (node->code != 0 && (hearsay || !node->weak))
		return;
	load_fail(node, rank->code, lost_host(rank, to_blame) ? (int)node->host_rank : to_blame,
		  text);
	if (lost_host(rank, to_blame))
		snprintf(error->message, sizeof(error->message), "rank %u: %.980s", node->host_rank,
			 text ? text : tnd_strerror(rank->code));
	snprintf(error->file, sizeof(error->file), "%s", file ? file : "");
	snprintf(error->name, sizeof(error->name), "%s", tensor ? tensor : "");
	node->weak = hearsay;
}

/* Does the error of one rank end the others? */
static bool ends_all(const struct load_node *node, int code)
{
	/* They are about to say the same; on_deadline() sees to those that do not. */
	if (code == TND_E_DEADLINE && tool_now_ns() >= deadline_ns(node))
		return false;
	return code != TND_E_EVICTED || node->command->on_dead != TND_SHARE_DEAD_CONTINUE;
}

static void on_end(struct load_node *node, struct load_rank *rank, json_t *message)
{
	json_t *report = json_object_get(message, "report");
	json_t *memlog = json_object_get(message, "memlog");
	json_t *share = json_object_get(message, "share");
	json_t *seconds = json_object_get(message, "seconds");

	rank->ended = true;
	rank->code = (int)json_integer_value(json_object_get(message, "code"));
	if (seconds)
		rank->seconds = json_number_value(seconds);
	if (json_is_object(report))
		rank->report = json_incref(report);
	if (json_is_object(memlog))
		rank->memlog = json_incref(memlog);
	if (json_is_object(share) && !node->share)
		node->share = json_incref(share);
	load_progress_step(node, rank, true);
	if (rank->code == 0)
		return;
	on_error(node, rank, message);
	if (ends_all(node, rank->code))
		cancel(node);
}

/* The clock starts when the last rank is ready. */
static void on_ready(struct load_node *node, struct load_rank *rank)
{
	rank->ready = true;
	for (size_t i = 0; i < node->count; i++)
		if (!node->ranks[i].ready)
			return;
	node->start_ns = tool_now_ns();
	for (size_t i = 0; i < node->count; i++)
		load_gate_open(node, &node->ranks[i]);
}

static void on_open(const struct load_node *node, const struct load_rank *host)
{
	for (size_t i = 0; i < node->count; i++)
		if (&node->ranks[i] != host)
			load_gate_open(node, &node->ranks[i]);
}

static void on_progress(struct load_node *node, struct load_rank *rank, json_t *message)
{
	rank->done_bytes = (uint64_t)json_integer_value(json_object_get(message, "done_bytes"));
	rank->total_bytes = (uint64_t)json_integer_value(json_object_get(message, "total_bytes"));
	rank->charged_bytes =
		(uint64_t)json_integer_value(json_object_get(message, "charged_bytes"));
	rank->seconds = json_number_value(json_object_get(message, "seconds"));
	load_progress_step(node, rank, false);
}

static void on_line(struct load_node *node, struct load_rank *rank, const char *line, size_t bytes)
{
	json_t *message = json_loadb(line, bytes, JSON_ALLOW_NUL, NULL);
	const char *kind = json_string_value(json_object_get(message, "t"));

	/* What is not understood may have been what another rank waits for. */
	if (!message) {
		load_fail(node, -ENOMEM, (int)rank->rank, NULL);
		cancel(node);
	}
	if (kind && strcmp(kind, "progress") == 0) {
		on_progress(node, rank, message);
	} else if (kind && strcmp(kind, "end") == 0) {
		on_end(node, rank, message);
	} else if (kind && strcmp(kind, "ready") == 0) {
		on_ready(node, rank);
	} else if (kind && strcmp(kind, "open") == 0) {
		on_open(node, rank);
	} else if (kind && strcmp(kind, "log") == 0) {
		const char *text = json_string_value(json_object_get(message, "message"));

		load_progress_clear(node);
		fprintf(stderr, "tundish: rank %u: %s\n", rank->rank, text ? text : "");
	}
	json_decref(message);
}

static void close_messages(struct load_rank *rank)
{
	close(rank->fd);
	rank->fd = -1;
	free(rank->line);
	rank->line = NULL;
	rank->line_used = rank->line_capacity = 0;
}

/* Reads what is there; whole lines are understood. Return: false when there was nothing. */
static bool receive(struct load_node *node, struct load_rank *rank)
{
	size_t begin = 0, searched = rank->line_used;
	ssize_t got;
	char *newline;

	if (rank->line_capacity - rank->line_used < READ_BYTES) {
		size_t capacity = rank->line_capacity * 2 + READ_BYTES;
		char *larger = realloc(rank->line, capacity);

		if (!larger) {
			load_fail(node, -ENOMEM, (int)rank->rank, NULL);
			load_kill_all(node);
			close_messages(rank);
			return false;
		}
		rank->line = larger;
		rank->line_capacity = capacity;
	}
	got = read(rank->fd, rank->line + rank->line_used, READ_BYTES);
	if (got < 0 && (errno == EINTR || errno == EAGAIN))
		return false;
	if (got <= 0) {
		close_messages(rank);
		return false;
	}
	rank->line_used += (size_t)got;
	while ((newline = memchr(rank->line + searched, '\n', rank->line_used - searched))) {
		size_t end = (size_t)(newline - rank->line);

		on_line(node, rank, rank->line + begin, end - begin);
		begin = searched = end + 1;
	}
	memmove(rank->line, rank->line + begin, rank->line_used - begin);
	rank->line_used -= begin;
	return true;
}

/* -- ends -- */

static void on_death(struct load_node *node, struct load_rank *rank, int wait_status)
{
	char message[TND_ERROR_MESSAGE_MAX];

	rank->code = rank->late ? TND_E_DEADLINE : node->killed ? TND_E_CANCELLED : TND_E_PEER_DEAD;
	/* Ranks that we killed ourselves are not to blame. */
	if (node->killed)
		return;
	if (WIFSIGNALED(wait_status))
		snprintf(message, sizeof(message),
			 "rank %u (process %d) was expected to load to its end, but was killed by "
			 "signal %d (%s); look into the kernel's log for a lack of memory",
			 rank->rank, (int)rank->pid, WTERMSIG(wait_status),
			 strsignal(WTERMSIG(wait_status)));
	else
		snprintf(message, sizeof(message),
			 "rank %u (process %d) was expected to load to its end, but left with "
			 "status "
			 "%d and without a report",
			 rank->rank, (int)rank->pid, WEXITSTATUS(wait_status));
	load_fail(node, TND_E_PEER_DEAD, (int)rank->rank, message);
	if (node->command->on_dead != TND_SHARE_DEAD_CONTINUE)
		cancel(node);
}

static void reap(struct load_node *node)
{
	for (size_t i = 0; i < node->count; i++) {
		struct load_rank *rank = &node->ranks[i];
		int wait_status;

		if (rank->pid <= 0 || rank->reaped ||
		    waitpid(rank->pid, &wait_status, WNOHANG) != rank->pid)
			continue;
		rank->reaped = true;
		/* Its last words may still be in the pipe. */
		while (rank->fd >= 0 && receive(node, rank))
			;
		if (!rank->ended)
			on_death(node, rank, wait_status);
	}
}

static void on_signals(struct load_node *node, int signals)
{
	struct signalfd_siginfo info;

	while (read(signals, &info, sizeof(info)) == sizeof(info)) {
		if (info.ssi_signo == SIGCHLD)
			continue;
		if (node->cancelled) {
			load_kill_all(node);
			continue;
		}
		load_fail(node, TND_E_CANCELLED, -1, "interrupted; the ranks were cancelled");
		cancel(node);
	}
}

/* Marks those that have not answered. Return: the first of them, NULL if there is none. */
static const struct load_rank *mark_late(struct load_node *node, char *list, size_t list_bytes)
{
	const struct load_rank *first = NULL;
	size_t used = 0;

	list[0] = '\0';
	for (size_t i = 0; i < node->count; i++) {
		struct load_rank *rank = &node->ranks[i];

		if (rank->pid <= 0 || rank->reaped || rank->ended)
			continue;
		rank->late = true;
		if (used < list_bytes)
			used += (size_t)snprintf(list + used, list_bytes - used,
						 "%s%u (process %d)", first ? ", " : "", rank->rank,
						 (int)rank->pid);
		first = first ? first : rank;
	}
	return first;
}

static void on_deadline(struct load_node *node)
{
	char list[512], message[TND_ERROR_MESSAGE_MAX];
	const struct load_rank *first = mark_late(node, list, sizeof(list));

	if (!first) { /* only the ends of processes are missing */
		if (node->code != 0)
			cancel(node);
		return;
	}
	snprintf(message, sizeof(message),
		 "expected every rank to have ended at the deadline of %g s, found no answer of "
		 "rank %s%s; see what holds the process up (stopped, or waiting for a disk), or "
		 "give a longer --deadline",
		 node->command->deadline, list, strlen(list) + 1 == sizeof(list) ? "..." : "");
	/* A rank that kept the deadline is not the one to name. */
	if (node->code == TND_E_DEADLINE)
		node->code = 0;
	load_fail(node, TND_E_DEADLINE, (int)first->rank, message);
	load_kill_all(node);
}

static void on_time(struct load_node *node)
{
	int64_t now = tool_now_ns(), deadline = deadline_ns(node);

	if (!node->killed && now >= deadline && now - deadline >= GRACE_NS)
		on_deadline(node);
	if (node->cancelled && !node->killed && now >= node->kill_ns)
		load_kill_all(node);
}

static bool all_gone(const struct load_node *node)
{
	for (size_t i = 0; i < node->count; i++)
		if (node->ranks[i].pid > 0 && !node->ranks[i].reaped)
			return false;
	return true;
}

static void listen_to_all(struct load_node *node, int signals, struct pollfd *polled)
{
	while (!all_gone(node)) {
		for (size_t i = 0; i < node->count; i++)
			polled[i] = (struct pollfd){.fd = node->ranks[i].fd, .events = POLLIN};
		polled[node->count] = (struct pollfd){.fd = signals, .events = POLLIN};
		if (poll(polled, node->count + 1, BAR_MS) > 0) {
			for (size_t i = 0; i < node->count; i++)
				if (polled[i].revents && node->ranks[i].fd >= 0)
					receive(node, &node->ranks[i]);
			if (polled[node->count].revents)
				on_signals(node, signals);
		}
		reap(node);
		on_time(node);
		load_progress_bar(node);
	}
}

/* -- all of it -- */

/* NULL: not wanted, or memory is short; each rank still sees to what it has read itself. */
static struct tnd_cache_snapshot *snapshot(const struct load_node *node)
{
	struct tnd_cache_snapshot *taken = NULL;
	const struct tnd_file *files;
	size_t count;
	int *fds;

	/* The host is the one that reads, and sees to it. */
	if (node->command->load.flags & TND_LOAD_F_KEEP_CACHE ||
	    (node->address && !node->hosting && !node->command->guest))
		return NULL;
	files = tnd_checkpoint_files(node->checkpoint, &count);
	fds = calloc(count + 1, sizeof(*fds));
	if (!fds)
		return NULL;
	for (size_t i = 0; i < count; i++)
		fds[i] = files[i].fd;
	if (tnd_cache_snapshot_create(fds, count, &taken) < 0)
		taken = NULL;
	free(fds);
	return taken;
}

int load_node_run(struct load_node *node)
{
	struct pollfd *polled = calloc(node->count + 1, sizeof(*polled));
	struct tnd_cache_snapshot *cache;
	sigset_t ours, before;
	int signals, code = -ENOMEM;

	if (!polled) {
		load_fail(node, code, -1, NULL);
		return code;
	}
	sigemptyset(&ours);
	sigaddset(&ours, SIGINT);
	sigaddset(&ours, SIGTERM);
	sigaddset(&ours, SIGHUP);
	sigaddset(&ours, SIGCHLD);
	sigprocmask(SIG_BLOCK, &ours, &before);
	signals = signalfd(-1, &ours, SFD_CLOEXEC | SFD_NONBLOCK);
	code = signals < 0 ? -errno : 0;
	if (code != 0)
		load_fail(node, code, -1, NULL);
	cache = snapshot(node);
	node->start_ns = tool_now_ns();
	if (code == 0)
		code = load_start_all(node, signals);
	listen_to_all(node, signals, polled);
	node->seconds = (double)(tool_now_ns() - node->start_ns) / 1e9;
	if (cache)
		tnd_cache_snapshot_restore(cache);
	tnd_cache_snapshot_close(cache);
	load_progress_rest(node);
	load_progress_clear(node);
	if (signals >= 0)
		close(signals);
	sigprocmask(SIG_SETMASK, &before, NULL);
	free(polled);
	return code;
}

void load_node_free(struct load_node *node)
{
	for (size_t i = 0; i < node->count; i++) {
		struct load_rank *rank = &node->ranks[i];

		if (rank->fd >= 0)
			close_messages(rank);
		if (rank->checksum_fd >= 0)
			close(rank->checksum_fd);
		if (rank->trace_fd >= 0)
			close(rank->trace_fd);
		json_decref(rank->report);
		json_decref(rank->memlog);
	}
	load_gates_close(node);
	json_decref(node->share);
	free(node->ranks);
	*node = (struct load_node){0};
}
