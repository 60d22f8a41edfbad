/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load_start.c - starts the processes of the ranks, and lets them through their gates
 *
 * A rank waits at its gate for the clock (--keep-touched) and for the host of a share, so that it
 * never tries an address that nobody listens at. When the load is cancelled the gates close, and
 * whoever waits ends.
 */
#include "load_parts.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

/* In a child: descriptors of the other ranks are not its own. */
static void close_others(const struct load_node *node, const struct load_rank *own, int signals)
{
	close(signals);
	if (node->progress_fd > STDERR_FILENO)
		close(node->progress_fd);
	for (const struct load_rank *rank = node->ranks; rank < node->ranks + node->count; rank++) {
		if (rank->gate_fd >= 0)
			close(rank->gate_fd);
		if (rank == own)
			continue;
		if (rank->fd >= 0)
			close(rank->fd);
		if (rank->checksum_fd >= 0)
			close(rank->checksum_fd);
		if (rank->trace_fd >= 0)
			close(rank->trace_fd);
	}
}

/* Does a rank have anything to wait for? */
static bool wants_gate(const struct load_node *node)
{
	return node->command->keep_touched || (node->address && !node->command->group);
}

/*
 * Everything that a rank's process needs, made before it: its end of the gate is *ret_gate, or -1.
 */
static int make_pipes(struct load_node *node, struct load_rank *rank, int messages[2],
		      int *ret_gate)
{
	const struct load_command *command = node->command;
	int gate[2] = {-1, -1}, code;

	if (command->checksum_path)
		rank->checksum_fd = memfd_create("tundish-checksum", MFD_CLOEXEC);
	if (command->trace_path)
		rank->trace_fd = memfd_create("tundish-trace", MFD_CLOEXEC);
	if ((command->checksum_path && rank->checksum_fd < 0) ||
	    (command->trace_path && rank->trace_fd < 0) ||
	    (wants_gate(node) && pipe2(gate, O_CLOEXEC) != 0))
		return -errno;
	rank->gate_fd = gate[1];
	*ret_gate = gate[0];
	if (pipe2(messages, O_CLOEXEC) == 0)
		return 0;
	code = -errno;
	if (gate[0] >= 0)
		close(gate[0]);
	return code;
}

static int start_rank(struct load_node *node, struct load_rank *rank, int signals)
{
	pid_t parent = getpid();
	int ends[2], gate = -1, code = make_pipes(node, rank, ends, &gate);

	if (code != 0)
		return code;
	rank->pid = fork();
	if (rank->pid == 0) {
		close_others(node, rank, signals);
		close(ends[0]);
		rank->fd = ends[1];
		rank->gate_fd = gate;
		load_rank_main(node, rank, parent);
	}
	code = rank->pid < 0 ? -errno : 0;
	close(ends[1]);
	if (gate >= 0)
		close(gate);
	rank->fd = ends[0];
	/*
	 * The last words of a rank are read until the pipe is empty, which must not wait for one
	 * that hangs.
	 */
	if (code == 0 && fcntl(rank->fd, F_SETFL, O_NONBLOCK) != 0)
		code = -errno;
	return code;
}

int load_start_all(struct load_node *node, int signals)
{
	fflush(stdout);
	fflush(stderr);
	for (size_t i = 0; i < node->count; i++) {
		int code = start_rank(node, &node->ranks[i], signals);

		if (code != 0) {
			load_fail(node, code, (int)node->ranks[i].rank, NULL);
			load_kill_all(node);
			return code;
		}
	}
	return 0;
}

/* -- gates -- */

void load_gate_open(const struct load_node *node, const struct load_rank *rank)
{
	/* One that is gone is noticed by its end; the pipe has room for more than is ever said. */
	while (rank->gate_fd >= 0 &&
	       write(rank->gate_fd, &node->start_ns, sizeof(node->start_ns)) < 0 && errno == EINTR)
		;
}

void load_gates_close(struct load_node *node)
{
	for (size_t i = 0; i < node->count; i++) {
		if (node->ranks[i].gate_fd >= 0)
			close(node->ranks[i].gate_fd);
		node->ranks[i].gate_fd = -1;
	}
}
