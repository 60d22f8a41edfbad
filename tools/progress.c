/* SPDX-License-Identifier: Apache-2.0 */
/* progress.c - how far the ranks are: a bar for people, a JSON line a step for programs */
#include "load_parts.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#define BAR_NS INT64_C(100000000)
#define BAR_COLUMNS 24

/*
 * A slow reader must not hold up the load: a step that does not fit into its pipe is left out, and
 * only the last of a rank is waited for. A reader that went away is not written to again.
 */
void load_progress_step(struct load_node *node, const struct load_rank *rank, bool last)
{
	struct pollfd polled = {.fd = node->progress_fd, .events = POLLOUT};
	char line[256];
	int bytes;

	if (node->progress_fd < 0 || poll(&polled, 1, last && !node->cancelled ? 1000 : 0) <= 0)
		return;
	bytes = snprintf(line, sizeof(line),
			 "{\"rank\":%u,\"done_bytes\":%llu,\"total_bytes\":%llu,"
			 "\"charged_bytes\":%llu,\"seconds\":%.6f}\n",
			 rank->rank, (unsigned long long)rank->done_bytes,
			 (unsigned long long)rank->total_bytes,
			 (unsigned long long)rank->charged_bytes, rank->seconds);
	if (write(node->progress_fd, line, (size_t)bytes) < 0 && errno != EAGAIN &&
	    errno != EINTR) {
		fprintf(stderr, "tundish: warning: --progress-fd: %s\n", strerror(errno));
		node->progress_fd = -1;
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
