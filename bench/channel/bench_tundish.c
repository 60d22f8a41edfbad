/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_tundish.c - the channel, through its public interface
 *
 * Variants: spin (never sleeps within a second), sleep (never spins), place (written and read where
 * it lies, without the copy out), spinplace (both).
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <tundish/channel.h>

#include "bench_link.h"

#define SPIN_NS UINT64_C(1000000000)
#define JOIN_NS INT64_C(10000000000)

struct link {
	struct link_setup setup;
	struct tnd_channel *channel;
	struct tnd_object object;
	bool in_place;
	char address[64];
};

static _Noreturn void failed(const char *call, const struct tnd_error *error)
{
	fprintf(stderr, "bench-channel: %s: %s\n", call, error->message);
	_exit(2);
}

static struct link *make(const struct link_setup *setup)
{
	struct link *link = bench_alloc(sizeof(*link));

	link->setup = *setup;
	link->in_place = strstr(setup->variant, "place") != NULL;
	snprintf(link->address, sizeof(link->address), "unix:@tundish.bench.%d.%u", (int)getpid(),
		 (unsigned)setup->index);
	return link;
}

static uint64_t spin_ns(const struct link *link)
{
	if (strncmp(link->setup.variant, "spin", 4) == 0)
		return SPIN_NS;
	return strcmp(link->setup.variant, "sleep") == 0 ? TND_CHANNEL_NO_SPIN : 0;
}

static void begin_writer(struct link *link)
{
	struct tnd_channel_opts opts = {
		.struct_bytes = sizeof(opts),
		.max_bytes = link->setup.max_bytes,
		.max_objects = link->setup.max_objects,
		.reserved_readers = link->setup.reader_count,
		.address = link->address,
		.name = "bench",
		.spin_ns = spin_ns(link),
	};
	struct tnd_error error;

	if (tnd_channel_create(&opts, &link->channel, &error) < 0)
		failed("create", &error);
	if (tnd_channel_ready(link->channel, tnd_deadline_in(JOIN_NS), &error) < 0)
		failed("ready", &error);
}

static void begin_reader(struct link *link, uint32_t rank)
{
	struct tnd_channel_attach_opts opts = {
		.struct_bytes = sizeof(opts),
		.deadline_ns = tnd_deadline_in(JOIN_NS),
		.spin_ns = spin_ns(link),
	};
	struct tnd_error error;

	if (tnd_channel_attach(link->address, rank, &opts, &link->channel, &error) < 0)
		failed("attach", &error);
}

static void send_tundish(struct link *link, const void *data, size_t bytes)
{
	struct tnd_reservation space;
	struct tnd_error error;

	if (!link->in_place) {
		if (tnd_channel_send(link->channel, data, bytes, TND_NO_DEADLINE, &error) < 0)
			failed("send", &error);
		return;
	}
	if (tnd_channel_reserve(link->channel, bytes, TND_NO_DEADLINE, &space, &error) < 0)
		failed("reserve", &error);
	memcpy(space.data, data, bytes);
	if (tnd_channel_commit(link->channel, &space, bytes) < 0)
		bench_die("commit", EINVAL);
}

static const void *recv_tundish(struct link *link, void *buffer, size_t capacity, size_t *ret_bytes)
{
	struct tnd_error error;
	uint64_t bytes;

	if (!link->in_place) {
		if (tnd_channel_recv(link->channel, buffer, capacity, TND_NO_DEADLINE, &bytes,
				     &error) < 0)
			failed("recv", &error);
		*ret_bytes = bytes;
		return buffer;
	}
	if (tnd_channel_borrow(link->channel, TND_NO_DEADLINE, &link->object, &error) < 0)
		failed("borrow", &error);
	*ret_bytes = link->object.bytes;
	return link->object.data;
}

static void done(struct link *link)
{
	if (link->in_place && tnd_channel_release(link->channel, &link->object) < 0)
		bench_die("release", EINVAL);
}

static void end_writer(struct link *link)
{
	tnd_channel_close(link->channel);
}

const struct link_kind bench_tundish = {
	.name = "tundish",
	.variants = "spin sleep place spinplace",
	.make = make,
	.begin_writer = begin_writer,
	.begin_reader = begin_reader,
	.send = send_tundish,
	.recv = recv_tundish,
	.done = done,
	.end_writer = end_writer,
};
