/* SPDX-License-Identifier: Apache-2.0 */
/*
 * two_processes.c - a scheduler and its workers: one writer, two readers, nothing lost
 *
 *   cc two_processes.c -o two_processes $(pkg-config --cflags --libs tundish)
 *   ./two_processes
 *
 * The writer makes a channel, starts the readers with the channel's address on their command line,
 * waits until both are there, sends, and closes. A reader attaches, takes what comes in place, and
 * ends when the channel does. Started by hand, in two terminals, it works the same:
 *
 *   ./two_processes reader ADDRESS RANK
 */
#include <inttypes.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include <tundish/tundish.h>

#define READERS 2
#define STEPS 1000

#define SECOND INT64_C(1000000000)

extern char **environ;

static int fail(const char *who, const struct tnd_error *error)
{
	fprintf(stderr, "%s: %s\n", who, error->message);
	return 1;
}

static int run_reader(const char *address, uint32_t rank)
{
	struct tnd_channel_attach_opts opts = {.struct_bytes = sizeof(opts),
					       .deadline_ns = tnd_deadline_in(10 * SECOND)};
	struct tnd_error error;
	struct tnd_channel *channel;
	struct tnd_object object;
	uint64_t objects = 0, bytes = 0;
	int rc;

	if (tnd_channel_attach(address, rank, &opts, &channel, &error) < 0)
		return fail("attach", &error);
	/* Waits for ever, and yet is told at once when the writer dies. */
	while ((rc = tnd_channel_borrow(channel, TND_NO_DEADLINE, &object, &error)) == 0) {
		objects++;
		bytes += object.bytes; /* use object.data here, it is contiguous */
		tnd_channel_release(channel, &object);
	}
	tnd_channel_close(channel);
	if (rc != TND_E_CLOSED)
		return fail("borrow", &error);
	printf("reader %" PRIu32 ": %" PRIu64 " objects, %" PRIu64 " bytes\n", rank, objects,
	       bytes);
	return 0;
}

static int start_readers(const char *self, struct tnd_channel *channel, pid_t *pids)
{
	const char *address = tnd_channel_address(channel);
	struct tnd_error error;

	for (uint32_t rank = 0; rank < READERS; rank++) {
		char number[16];
		char *args[] = {(char *)self, (char *)"reader", (char *)address, number, NULL};

		snprintf(number, sizeof(number), "%" PRIu32, rank);
		if (posix_spawn(&pids[rank], self, NULL, NULL, args, environ) != 0) {
			perror(self);
			return 1;
		}
		/* A reader that dies before it has attached is noticed too. */
		if (tnd_channel_expect(channel, rank, pids[rank], &error) < 0)
			return fail("expect", &error);
	}
	return tnd_channel_ready(channel, tnd_deadline_in(10 * SECOND), &error) < 0
		       ? fail("ready", &error)
		       : 0;
}

/* One object by copy, one written in place, by turns. */
static int send_steps(struct tnd_channel *channel)
{
	struct tnd_error error;
	struct tnd_reservation space;
	char text[64];

	for (int step = 0; step < STEPS; step += 2) {
		int64_t deadline = tnd_deadline_in(10 * SECOND);

		snprintf(text, sizeof(text), "step %d", step);
		if (tnd_channel_send(channel, text, strlen(text) + 1, deadline, &error) < 0 ||
		    tnd_channel_reserve(channel, 4096, deadline, &space, &error) < 0)
			return fail("send", &error); /* says who is late, or dead */
		memset(space.data, step, 4096);
		tnd_channel_commit(channel, &space, 4096);
	}
	return 0;
}

int main(int argc, char **argv)
{
	struct tnd_channel_opts opts = {.struct_bytes = sizeof(opts),
					.max_bytes = 1 << 20,
					.max_objects = 256,
					.reserved_readers = READERS,
					.name = "example"};
	struct tnd_channel *channel;
	struct tnd_error error;
	pid_t pids[READERS] = {0};
	int status, failed;

	if (argc == 4 && strcmp(argv[1], "reader") == 0)
		return run_reader(argv[2], (uint32_t)strtoul(argv[3], NULL, 10));
	if (tnd_channel_create(&opts, &channel, &error) < 0)
		return fail("create", &error);
	printf("address %s\n", tnd_channel_address(channel));
	fflush(stdout);
	failed = start_readers(argv[0], channel, pids);
	if (!failed)
		failed = send_steps(channel);
	/* A reader that dies with the last objects unread is seen here. */
	if (!failed && tnd_channel_drain(channel, tnd_deadline_in(10 * SECOND), &error) < 0)
		failed = fail("drain", &error);
	/* The readers still get everything that was sent, then TND_E_CLOSED. */
	tnd_channel_close(channel);
	for (int i = 0; i < READERS; i++)
		if (pids[i] > 0 && (waitpid(pids[i], &status, 0) != pids[i] || status != 0))
			failed = 1;
	return failed;
}
