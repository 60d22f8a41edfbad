/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_guest.c - a reader and what a writer's service says to it; a program that does not behave
 *
 * What could break: an answer that no working writer gives is believed, and the reader writes where
 * it has no place. Shown by a listener of our own that gives such answers: attach must refuse with
 * a code, and write nowhere; then by one that answers as it should. And: close waits for ever for a
 * service thread whose descriptors the program has closed (daemons do that). Shown by a child that
 * does so and has to end.
 */
#include <errno.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "channel/channel_internal.h"

struct answer {
	uint32_t kind, place, fd_count, bytes;
	int code;
};

static const struct answer answers[] = {
	{TND__PACKET_WELCOME, 1, 2, sizeof(struct tnd__welcome), TND_E_CORRUPT},
	{TND__PACKET_WELCOME, 63, 2, sizeof(struct tnd__welcome), TND_E_CORRUPT},
	{TND__PACKET_WELCOME, 0x7fffffff, 2, sizeof(struct tnd__welcome), TND_E_CORRUPT},
	{TND__PACKET_WELCOME, UINT32_MAX, 2, sizeof(struct tnd__welcome), TND_E_CORRUPT},
	{TND__PACKET_WELCOME, 0, 2, 4, TND_E_CORRUPT},
	{TND__PACKET_SLAB, 0, 2, sizeof(struct tnd__welcome), TND_E_CORRUPT},
	{TND__PACKET_WELCOME, 0, 1, sizeof(struct tnd__welcome), -EMFILE},
	{TND__PACKET_WELCOME, 0, 0, sizeof(struct tnd__welcome), -EMFILE},
	{TND__PACKET_WELCOME, 0, 2, sizeof(struct tnd__welcome), 0},
};

struct liar {
	struct tnd__segments segments;
	const struct answer *answer;
	struct tnd__peer *peer;
};

static int on_hello(void *owner, struct tnd__peer *peer, struct tnd__packet *hello,
		    struct tnd__packet *reply, struct tnd_error *error)
{
	struct liar *liar = owner;
	struct tnd__welcome welcome = {liar->answer->place, 1};

	(void)hello;
	(void)error;
	liar->peer = peer;
	reply->kind = liar->answer->kind;
	reply->bytes = liar->answer->bytes;
	memcpy(reply->data, &welcome, sizeof(welcome));
	reply->fd_count = liar->answer->fd_count;
	reply->fds[0] = liar->segments.data_fd;
	reply->fds[1] = liar->segments.control_fd;
	return 0;
}

static void on_packet(void *owner, struct tnd__peer *peer, struct tnd__packet *packet)
{
	(void)owner;
	(void)peer;
	(void)packet;
}

static void on_gone(void *owner, struct tnd__peer *peer, int how)
{
	(void)owner;
	(void)peer;
	(void)how;
}

static const struct tnd__peer_ops ops = {on_hello, on_packet, on_gone};

static void test_answers(void **state)
{
	struct tnd__segment_opts how = {
		.max_bytes = 4096, .max_objects = 4, .place_count = 1, .name = "liar"};
	struct liar liar = {0};
	struct tnd_error error;

	(void)state;
	assert_int_equal(tnd__service_ref(), 0);
	assert_int_equal(tnd__segments_create(&how, &liar.segments, &error), 0);
	for (size_t i = 0; i < sizeof(answers) / sizeof(answers[0]); i++) {
		struct tnd_channel *channel = NULL;
		struct tnd__listener *listener;

		liar.answer = &answers[i];
		liar.peer = NULL;
		assert_int_equal(tnd__listener_open(NULL, &ops, &liar, &listener, &error), 0);
		assert_int_equal(tnd_channel_attach(tnd__listener_address(listener), 0, NULL,
						    &channel, &error),
				 answers[i].code);
		if (answers[i].code == 0)
			tnd_channel_close(channel);
		/* Wrote to the place that it was given, if that is one, and nowhere else. */
		assert_int_equal(atomic_load(&liar.segments.control->places[0].left),
				 answers[i].code == 0);
		tnd__listener_close(listener);
		tnd__peer_close(liar.peer, true);
	}
	tnd__segments_close(&liar.segments, true, false);
	tnd__service_unref();
}

/* A reader that gives up is a death to the writer; one that closes is none. */
static void test_reader_gives_up(void **state)
{
	struct tnd_channel_opts opts = {.struct_bytes = sizeof(opts), .reserved_readers = 2};
	struct tnd_channel *writer, *first, *second;
	struct tnd_error error;

	(void)state;
	assert_int_equal(tnd_channel_create(&opts, &writer, &error), 0);
	assert_int_equal(tnd_channel_attach(tnd_channel_address(writer), 0, NULL, &first, &error),
			 0);
	assert_int_equal(tnd_channel_attach(tnd_channel_address(writer), 1, NULL, &second, &error),
			 0);
	assert_int_equal(tnd_channel_send(writer, "a", 1, 0, &error), 0);
	tnd_channel_close(first);
	tnd_channel_abandon(second);
	/* Of what was sent nobody reads anything any more; only the second is missed. */
	assert_int_equal(tnd_channel_drain(writer, tnd_deadline_in(10000000000), &error),
			 TND_E_PEER_DEAD);
	assert_int_equal(error.rank, 1);
	assert_int_equal(tnd_channel_evict(writer, 1), 0);
	assert_int_equal(tnd_channel_send(writer, "b", 1, 0, &error), 0);
	tnd_channel_close(writer);
}

/* Ends with 0 once everything is closed. */
static int run_careless(void)
{
	struct tnd_channel_opts opts = {.struct_bytes = sizeof(opts), .open_readers = 1};
	struct tnd_channel *channel, *reader;

	if (tnd_channel_create(&opts, &channel, NULL) < 0 ||
	    tnd_channel_attach(tnd_channel_address(channel), 0, NULL, &reader, NULL) < 0)
		return 1;
	for (int fd = 3; fd < 1000; fd++)
		close(fd);
	tnd_channel_close(reader);
	tnd_channel_close(channel);
	return 0;
}

static void test_program_closes_descriptors(void **state)
{
	int64_t until = tnd__now_ns() + 20000000000;
	int status = -1;
	pid_t child = fork(), ended = 0;

	(void)state;
	assert_true(child >= 0);
	if (child == 0)
		_exit(run_careless());
	while (ended == 0 && tnd__now_ns() < until) {
		ended = waitpid(child, &status, WNOHANG);
		sched_yield();
	}
	if (ended == 0) {
		kill(child, SIGKILL);
		waitpid(child, &status, 0);
	}
	assert_int_equal(ended, child);
	assert_int_equal(status, 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_answers),
		cmocka_unit_test(test_reader_gives_up),
		cmocka_unit_test(test_program_closes_descriptors),
	};

	return cmocka_run_group_tests_name("guest", tests, NULL, NULL);
}
