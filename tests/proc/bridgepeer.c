/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bridgepeer.c - a writer or a reader of a channel whose contents follow from a seed, for the tests
 * of the bridge
 *
 *   bridgepeer write ADDRESS SEED OBJECTS MAX_LENGTH MAX_BYTES MAX_OBJECTS HOW
 *   bridgepeer read ADDRESS SEED OBJECTS MAX_LENGTH RANK PAUSE_US
 *
 * Object n has a length from 0 to MAX_LENGTH and words that all depend on SEED and n. HOW: "close",
 * "die" (by SIGKILL, after everything is sent) or "stay" (closes once standard input ends). The
 * reader waits PAUSE_US after each. Both say "ready", the writer "sent" at its last object, the
 * reader "first" after its first one, and print one line at the end: objects, and the name of what
 * they ended with. Exit status 0 unless an object was wrong (3).
 */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <tundish/channel.h>

#define SECONDS_NS INT64_C(1000000000)

static uint64_t mix(uint64_t value)
{
	value += UINT64_C(0x9e3779b97f4a7c15);
	value = (value ^ (value >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	value = (value ^ (value >> 27)) * UINT64_C(0x94d049bb133111eb);
	return value ^ (value >> 31);
}

static uint64_t length_of(uint64_t seed, uint64_t number, uint64_t most)
{
	uint64_t draw = mix(seed ^ mix(number));

	/* Short and long ones alike, and the ends. */
	if (draw % 16 == 0)
		return draw / 16 % 2 ? most : 0;
	return draw % 16 < 8 ? draw / 16 % (most / 50 + 1) : draw / 16 % (most + 1);
}

static void fill(unsigned char *at, uint64_t bytes, uint64_t seed, uint64_t number)
{
	uint64_t first = mix(seed + number);

	for (uint64_t i = 0; i < bytes; i += 8) {
		uint64_t word = first + i * UINT64_C(0x9e3779b97f4a7c15);

		memcpy(at + i, &word, bytes - i < 8 ? bytes - i : 8);
	}
}

static int finish(uint64_t objects, int rc, const struct tnd_error *error)
{
	printf("%" PRIu64 " %s\n", objects, rc < 0 ? tnd_error_name(rc) : "OK");
	fflush(stdout);
	if (rc < 0)
		fprintf(stderr, "%s\n", error->message);
	return 0;
}

static int write_objects(char **words)
{
	uint64_t seed = strtoull(words[1], NULL, 10), count = strtoull(words[2], NULL, 10);
	uint64_t most = strtoull(words[3], NULL, 10);
	struct tnd_slab_pool_opts pool_opts = {.struct_bytes = sizeof(pool_opts),
					       .flags = TND_SLAB_POOL_F_SHARED};
	struct tnd_channel_opts opts = {.struct_bytes = sizeof(opts),
					.address = words[0],
					.max_bytes = strtoull(words[4], NULL, 10),
					.max_objects = strtoull(words[5], NULL, 10),
					.reserved_readers = 1,
					.on_dead = TND_CHANNEL_DEAD_EVICT};
	unsigned char *object = malloc(most + 8);
	uint32_t rank = 1000000;
	struct tnd_channel *channel;
	struct tnd_error error = {0};
	uint64_t number = 0;
	int rc;

	opts.reserved_ranks = &rank;
	rc = object ? tnd_slab_pool_create(&pool_opts, &opts.pool) : -1;
	if (rc == 0)
		rc = tnd_channel_create(&opts, &channel, &error);
	if (rc < 0)
		return finish(0, rc, &error);
	puts("ready");
	fflush(stdout);
	for (; number < count && rc == 0; number++) {
		uint64_t bytes = length_of(seed, number, most);

		fill(object, bytes, seed, number);
		rc = tnd_channel_send(channel, object, bytes, tnd_deadline_in(120 * SECONDS_NS),
				      &error);
	}
	if (rc == 0 && strcmp(words[6], "die") == 0)
		raise(SIGKILL);
	puts("sent");
	fflush(stdout);
	if (rc == 0 && strcmp(words[6], "stay") == 0)
		while (getchar() != EOF)
			;
	tnd_channel_close(channel);
	tnd_slab_pool_close(opts.pool);
	free(object);
	return finish(number, rc, &error);
}

static int read_objects(char **words)
{
	uint64_t seed = strtoull(words[1], NULL, 10), count = strtoull(words[2], NULL, 10);
	uint64_t most = strtoull(words[3], NULL, 10), number = 0;
	uint32_t rank = (uint32_t)strtoul(words[4], NULL, 10);
	useconds_t pause_us = (useconds_t)strtoul(words[5], NULL, 10);
	struct tnd_channel_attach_opts opts = {.struct_bytes = sizeof(opts),
					       .deadline_ns = tnd_deadline_in(20 * SECONDS_NS)};
	unsigned char *expected = malloc(most + 8);
	struct tnd_channel *channel;
	struct tnd_error error = {0};
	int rc = expected ? tnd_channel_attach(words[0], rank, &opts, &channel, &error) : -1;

	if (rc < 0)
		return finish(0, rc, &error);
	puts("ready");
	fflush(stdout);
	for (;; number++) {
		struct tnd_object object;
		uint64_t bytes = length_of(seed, number, most);

		rc = tnd_channel_borrow(channel, tnd_deadline_in(120 * SECONDS_NS), &object,
					&error);
		if (rc < 0)
			break;
		fill(expected, bytes, seed, number);
		if (number >= count || object.bytes != bytes ||
		    memcmp(object.data, expected, bytes) != 0) {
			printf("object %" PRIu64 " is wrong\n", number);
			return 3;
		}
		(void)tnd_channel_release(channel, &object);
		if (number == 0) {
			puts("first");
			fflush(stdout);
		}
		if (pause_us)
			usleep(pause_us);
	}
	tnd_channel_close(channel);
	free(expected);
	return finish(number, rc, &error);
}

int main(int argc, char **argv)
{
	if (argc == 9 && strcmp(argv[1], "write") == 0)
		return write_objects(argv + 2);
	if (argc == 8 && strcmp(argv[1], "read") == 0)
		return read_objects(argv + 2);
	fputs("usage: bridgepeer write|read ADDRESS ...\n", stderr);
	return 2;
}
