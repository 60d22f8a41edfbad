/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_pipes.c - peers: what the kernel offers between processes, one for each reader
 *
 *   pipe       F_SETPIPE_SZ to 1 MiB      length and bytes in one writev
 *   stream     Unix stream sockets        the same
 *   seqpacket  Unix datagrams in order    the kernel keeps the bounds; one object, one call
 *
 * Buffers of sockets are what net.core.wmem_max allows a plain user. A reader of pipe or stream
 * takes up to 64 KiB in one call, so that small objects do not cost two calls each; what is longer
 * goes to its place without a copy in between.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "bench_link.h"

#define PIPE_BYTES (1 << 20)
#define AHEAD_BYTES ((size_t)64 << 10)
#define SOCKET_BYTES (4 << 20)

struct link {
	uint32_t reader_count;
	int writer_fds[BENCH_READERS_MAX], reader_fds[BENCH_READERS_MAX];
	int fd; /* the reader's own */
	unsigned char *ahead;
	size_t ahead_at, ahead_end;
};

static struct link *make(const struct link_setup *setup, int type)
{
	struct link *link = bench_alloc(sizeof(*link));
	int size = SOCKET_BYTES;

	link->reader_count = setup->reader_count;
	for (uint32_t i = 0; i < setup->reader_count; i++) {
		int ends[2];

		if (type ? socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, ends)
			 : pipe2(ends, O_CLOEXEC))
			bench_die("pipe or socketpair", errno);
		link->reader_fds[i] = ends[0];
		link->writer_fds[i] = ends[1];
		if (!type)
			fcntl(ends[1], F_SETPIPE_SZ, PIPE_BYTES);
		else
			setsockopt(ends[1], SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
	}
	return link;
}

static struct link *make_pipe(const struct link_setup *setup)
{
	return make(setup, 0);
}

static struct link *make_stream(const struct link_setup *setup)
{
	return make(setup, SOCK_STREAM);
}

static struct link *make_seqpacket(const struct link_setup *setup)
{
	return make(setup, SOCK_SEQPACKET);
}

static void begin_writer(struct link *link)
{
	for (uint32_t i = 0; i < link->reader_count; i++)
		close(link->reader_fds[i]);
}

static void begin_reader(struct link *link, uint32_t rank)
{
	for (uint32_t i = 0; i < link->reader_count; i++) {
		close(link->writer_fds[i]);
		if (i != rank)
			close(link->reader_fds[i]);
	}
	link->fd = link->reader_fds[rank];
	link->ahead = bench_alloc(AHEAD_BYTES);
}

static void end_writer(struct link *link)
{
	for (uint32_t i = 0; i < link->reader_count; i++)
		close(link->writer_fds[i]);
}

static void write_all(int fd, const void *data, size_t bytes)
{
	uint64_t length = bytes;
	struct iovec pieces[2] = {{&length, sizeof(length)}, {(void *)(uintptr_t)data, bytes}};
	struct iovec *next = pieces;

	while (next < pieces + 2) {
		ssize_t count = writev(fd, next, (int)(pieces + 2 - next));

		if (count < 0 && errno != EINTR)
			bench_die("writev", errno);
		for (size_t left = count < 0 ? 0 : (size_t)count; next < pieces + 2; next++) {
			if (left < next->iov_len) {
				next->iov_base = (char *)next->iov_base + left;
				next->iov_len -= left;
				break;
			}
			left -= next->iov_len;
		}
	}
}

static void send_stream(struct link *link, const void *data, size_t bytes)
{
	for (uint32_t i = 0; i < link->reader_count; i++)
		write_all(link->writer_fds[i], data, bytes);
}

static void send_packet(struct link *link, const void *data, size_t bytes)
{
	for (uint32_t i = 0; i < link->reader_count; i++)
		while (send(link->writer_fds[i], data, bytes, MSG_NOSIGNAL) < 0)
			if (errno != EINTR)
				bench_die("send", errno);
}

static size_t read_some(int fd, void *to, size_t bytes)
{
	ssize_t count;

	do
		count = read(fd, to, bytes);
	while (count < 0 && errno == EINTR);
	if (count <= 0)
		bench_die("read: the writer is gone", count ? errno : EPIPE);
	return (size_t)count;
}

static void take(struct link *link, void *to, size_t bytes)
{
	unsigned char *at = to;

	while (bytes) {
		size_t have = link->ahead_end - link->ahead_at;

		if (have) {
			have = have < bytes ? have : bytes;
			memcpy(at, link->ahead + link->ahead_at, have);
			link->ahead_at += have;
		} else if (bytes >= AHEAD_BYTES) {
			have = read_some(link->fd, at, bytes);
		} else {
			link->ahead_at = 0;
			link->ahead_end = read_some(link->fd, link->ahead, AHEAD_BYTES);
			continue;
		}
		at += have;
		bytes -= have;
	}
}

static const void *recv_stream(struct link *link, void *buffer, size_t capacity, size_t *ret_bytes)
{
	uint64_t length;

	take(link, &length, sizeof(length));
	if (length > capacity)
		bench_die("recv: a longer object than any that was sent", EBADMSG);
	take(link, buffer, length);
	*ret_bytes = length;
	return buffer;
}

static const void *recv_packet(struct link *link, void *buffer, size_t capacity, size_t *ret_bytes)
{
	ssize_t count;

	do
		count = recv(link->fd, buffer, capacity, 0);
	while (count < 0 && errno == EINTR);
	if (count <= 0)
		bench_die("recv: the writer is gone", count ? errno : EPIPE);
	*ret_bytes = (size_t)count;
	return buffer;
}

const struct link_kind bench_pipe = {
	.name = "pipe",
	.make = make_pipe,
	.begin_writer = begin_writer,
	.begin_reader = begin_reader,
	.send = send_stream,
	.recv = recv_stream,
	.end_writer = end_writer,
};

const struct link_kind bench_stream = {
	.name = "stream",
	.make = make_stream,
	.begin_writer = begin_writer,
	.begin_reader = begin_reader,
	.send = send_stream,
	.recv = recv_stream,
	.end_writer = end_writer,
};

const struct link_kind bench_seqpacket = {
	.name = "seqpacket",
	.most_bytes = 128 << 10,
	.make = make_seqpacket,
	.begin_writer = begin_writer,
	.begin_reader = begin_reader,
	.send = send_packet,
	.recv = recv_packet,
	.end_writer = end_writer,
};
