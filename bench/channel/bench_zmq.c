/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_zmq.c - peer: ZeroMQ, publisher and subscribers over ipc
 *
 * A publisher drops what a slow subscriber has no room for. ZMQ_XPUB_NODROP makes the send wait
 * instead, at the high-water mark of both sides, so that nothing is lost as with the others; the
 * mark is the number of objects that the channel is given. XPUB hands the subscriptions to the
 * writer, which so knows that every reader is there (ZMQ_XPUB_VERBOSE: equal ones too). The address
 * is an abstract socket: no file stays behind.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#include "bench_link.h"

#define LINGER_MS 20000

struct link {
	struct link_setup setup;
	char address[64];
	void *context, *socket;
};

static struct link *make(const struct link_setup *setup)
{
	struct link *link = bench_alloc(sizeof(*link));

	link->setup = *setup;
	snprintf(link->address, sizeof(link->address), "ipc://@tundish.bench.%d.%u", (int)getpid(),
		 (unsigned)setup->index);
	return link;
}

static void set(struct link *link, int option, int value)
{
	if (zmq_setsockopt(link->socket, option, &value, sizeof(value)) != 0)
		bench_die("zmq_setsockopt", errno);
}

static void open_socket(struct link *link, int type)
{
	int mark = (int)link->setup.max_objects;

	link->context = zmq_ctx_new();
	link->socket = link->context ? zmq_socket(link->context, type) : NULL;
	if (!link->socket)
		bench_die("zmq_socket", errno);
	set(link, ZMQ_SNDHWM, mark);
	set(link, ZMQ_RCVHWM, mark);
	set(link, ZMQ_LINGER, LINGER_MS);
}

static void begin_writer(struct link *link)
{
	open_socket(link, ZMQ_XPUB);
	set(link, ZMQ_XPUB_NODROP, 1);
	set(link, ZMQ_XPUB_VERBOSE, 1);
	if (zmq_bind(link->socket, link->address) != 0)
		bench_die("zmq_bind", errno);
	for (uint32_t i = 0; i < link->setup.reader_count; i++) {
		char subscription[8];

		if (zmq_recv(link->socket, subscription, sizeof(subscription), 0) < 1)
			bench_die("zmq_recv of a subscription", errno);
	}
}

static void begin_reader(struct link *link, uint32_t rank)
{
	(void)rank;
	open_socket(link, ZMQ_SUB);
	set(link, ZMQ_RECONNECT_IVL, 5);
	if (zmq_setsockopt(link->socket, ZMQ_SUBSCRIBE, "", 0) != 0 ||
	    zmq_connect(link->socket, link->address) != 0)
		bench_die("zmq_connect", errno);
}

static void send_zmq(struct link *link, const void *data, size_t bytes)
{
	while (zmq_send(link->socket, data, bytes, 0) < 0)
		if (errno != EINTR)
			bench_die("zmq_send", errno);
}

static const void *recv_zmq(struct link *link, void *buffer, size_t capacity, size_t *ret_bytes)
{
	int count;

	do
		count = zmq_recv(link->socket, buffer, capacity, 0);
	while (count < 0 && errno == EINTR);
	if (count < 0)
		bench_die("zmq_recv", errno);
	*ret_bytes = (size_t)count;
	return buffer;
}

static void end_writer(struct link *link)
{
	zmq_close(link->socket);
	zmq_ctx_term(link->context);
}

const struct link_kind bench_zmq = {
	.name = "zmq",
	.make = make,
	.begin_writer = begin_writer,
	.begin_reader = begin_reader,
	.send = send_zmq,
	.recv = recv_zmq,
	.end_writer = end_writer,
};
