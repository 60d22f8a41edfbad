/* SPDX-License-Identifier: Apache-2.0 */
/* progress.c - how far the ranks are: a bar for people, a JSON line a step for programs */
#include "load_parts.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#define BAR_NS INT64_C(100000000)
#define BAR_COLUMNS 24

/* How long the reader of --progress-fd is waited for at the end, all ranks together. */
#define REST_MS 1000

/* Return: false when there is no room within `timeout_ms`. */
static bool put_step(struct load_node *node, const struct load_rank *rank, int timeout_ms)
{
	struct pollfd polled = {.fd = node->progress_fd, .events = POLLOUT};
	char line[256];
	int bytes;

	if (poll(&polled, 1, timeout_ms) <= 0)
		return false;
	bytes = snprintf(line, sizeof(line),
			 "{\"rank\":%u,\"done_bytes\":%llu,\"total_bytes\":%llu,"
			 "\"charged_bytes\":%llu,\"seconds\":%.6f}\n",
			 rank->rank, (unsigned long long)rank->done_bytes,
			 (unsigned long long)rank->total_bytes,
			 (unsigned long long)rank->charged_bytes, rank->seconds);
	if (write(node->progress_fd, line, (size_t)bytes) >= 0 || errno == EINTR)
		return true;
	if (errno == EAGAIN)
		return false;
	fprintf(stderr, "tundish: warning: --progress-fd: %s\n", strerror(errno));
	node->progress_fd = -1;
	return true;
}

/*
 * A slow reader must not hold up the load: a step that does not fit into its pipe is left out, and
 * the last one of a rank is kept for the end. A reader that went away is not written to again.
 */
void load_progress_step(struct load_node *node, struct load_rank *rank, bool last)
{
	if (node->progress_fd >= 0 && !put_step(node, rank, 0))
		rank->owes_step = last;
}

void load_progress_rest(struct load_node *node)
{
	int64_t end = tool_now_ns() + REST_MS * INT64_C(1000000);

	for (size_t i = 0; i < node->count && !node->cancelled; i++) {
		int64_t left = end - tool_now_ns();

		if (node->progress_fd < 0 || left < 0)
			return;
		if (node->ranks[i].owes_step)
			put_step(node, &node->ranks[i], (int)(left / 1000000));
	}
}

void load_progress_clear(struct load_node *node)
{
	if (!node->bar_on)
		return;
	fputs("\r\033[K", stderr);
	fflush(stderr);
	node->bar_on = false;
}

void load_progress_bar(struct load_node *node)
{
	int64_t now = tool_now_ns();
	uint64_t done = 0, total = 0, charged = 0;
	double seconds = (double)(now - node->start_ns) / 1e9, share;
	char a[TND_SIZE_TEXT_MAX], b[TND_SIZE_TEXT_MAX], c[TND_SIZE_TEXT_MAX];

	if (!node->bar || now - node->bar_ns < BAR_NS)
		return;
	node->bar_ns = now;
	for (size_t i = 0; i < node->count; i++) {
		done += node->ranks[i].done_bytes;
		total += node->ranks[i].total_bytes;
		charged += node->ranks[i].charged_bytes;
	}
	share = total ? (double)done / (double)total : 0;
	share = share > 1 ? 1 : share;
	fputs("\r\033[K[", stderr);
	for (int i = 0; i < BAR_COLUMNS; i++)
		putc(i < (int)(share * BAR_COLUMNS) ? '#' : '.', stderr);
	fprintf(stderr, "] %s of %s  %.2f GB/s  %s held", tnd_size_format(done, a),
		tnd_size_format(total, b), (double)done / 1e9 / (seconds > 0.001 ? seconds : 0.001),
		tnd_size_format(charged, c));
	fflush(stderr);
	node->bar_on = true;
}
