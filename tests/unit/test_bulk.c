/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_bulk.c - what could break: slabs of another size than the plan counted on, one made where only a used one was asked for, figures that
 * name the wrong rank; an error that readers learn of late, behind what they have not read, or not at all, or that a broken writer harms them
 * with. Shown by the budget's figures, by readers that sleep, that have objects to read, that come late, and by writers that tell and end
 * at once.
 */
#include <signal.h>

#include "bulkscene.h"

/* ThreadSanitizer cannot follow threads that a forked child starts. */
#if defined(__SANITIZE_THREAD__)
#define CHILDREN_CANNOT_SERVE 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define CHILDREN_CANNOT_SERVE 1
#endif
#endif

/* -- sizes -- */

static void test_exact_sizes(void **state)
{
	static const struct {
		uint64_t slab_bytes, bytes, takes;
	} rows[] = {
		{SLAB, 0, SLAB},
		{SLAB, 1, SLAB}, /* the ring would do */
		{SLAB, SLAB - 1, SLAB},
		{SLAB, SLAB, SLAB},
		{SLAB, SLAB + 1, SLAB + PAGE},
		{SLAB, 5 * SLAB - 1, 5 * SLAB},
		{SLAB, 64 * SLAB, 64 * SLAB},
		{5000, 100, 2 * PAGE},
		{5000, 5000, 2 * PAGE},
		{5000, 5001, 2 * PAGE},
		{0, SLAB, SLAB + SLAB / 2},
	};
	struct tnd_channel *reader;
	struct scene scene;

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
		open_scene(&scene, rows[i].takes, rows[i].slab_bytes);
		reader = attach(&scene, 0);
		for (uint64_t seed = 0; seed < 3; seed++) {
			send_slab(scene.writer, rows[i].bytes, seed);
			assert_int_equal(charged(&scene), rows[i].takes);
			take(reader, rows[i].bytes, seed);
		}
		assert_int_equal(slabs_made(&scene), 1);
		tnd_channel_close(reader);
		close_scene(&scene);
	}
}

/* Free ones that are too small make room; what is in use does not. */
static void test_makes_room(void **state)
{
	struct tnd_channel *reader;
	struct tnd_object held;
	struct scene scene;

	(void)state;
	open_scene(&scene, 4 * SLAB, SLAB);
	reader = attach(&scene, 0);
	for (uint64_t i = 0; i < 4; i++)
		send_slab(scene.writer, SLAB, i);
	assert_int_equal(try_send(scene.writer, SLAB, 9, false, 0), -ETIMEDOUT);
	for (uint64_t i = 0; i < 3; i++)
		take(reader, SLAB, i);
	held = borrow(reader, SLAB, 3);
	send_slab(scene.writer, 3 * SLAB, 5);
	assert_int_equal(charged(&scene), 4 * SLAB);
	take(reader, 3 * SLAB, 5);
	assert_int_equal(tnd_channel_release(reader, &held), 0);
	assert_int_equal(try_send(scene.writer, 64 * SLAB + 1, 1, false, 0), -EMSGSIZE);
	assert_int_equal(try_send(scene.writer, 5 * SLAB, 1, false, 0), TND_E_BUDGET);
	tnd_channel_close(reader);
	close_scene(&scene);
}

static void test_no_pool(void **state)
{
	struct tnd_channel_opts opts = {.struct_bytes = sizeof(opts), .open_readers = 1};
	struct tnd__bulk_figures figures;
	struct tnd_channel *channel;

	(void)state;
	assert_int_equal(tnd_channel_create(&opts, &channel, NULL), 0);
	assert_int_equal(try_send(channel, 1, 1, false, 0), TND_E_INVALID);
	tnd__bulk_figures(channel, &figures);
	assert_int_equal(figures.slabs, 0);
	tnd_channel_close(channel);
}

/* -- only what is there -- */

struct releaser {
	struct tnd_channel *writer, *reader;
	struct tnd_object object;
};

static void *release_later(void *arg)
{
	struct releaser *releaser = arg;
	struct tnd_channel_info info = {.struct_bytes = sizeof(info)};
	int64_t deadline = tnd_deadline_in(PATIENCE);

	do
		tnd_channel_info(releaser->writer, &info);
	while (!info.waits && tnd_deadline_in(0) < deadline);
	tnd_channel_release(releaser->reader, &releaser->object);
	return NULL;
}

static void test_reuse(void **state)
{
	struct releaser releaser;
	struct tnd_channel *reader;
	struct scene scene;
	pthread_t thread;

	(void)state;
	open_scene(&scene, 8 * SLAB, SLAB);
	reader = attach(&scene, 0);
	/* None at all: at once, whatever the deadline. */
	assert_int_equal(try_send(scene.writer, SLAB, 1, true, tnd_deadline_in(PATIENCE)),
			 -ETIMEDOUT);
	send_slab(scene.writer, SLAB, 1);
	assert_int_equal(try_send(scene.writer, SLAB, 2, true, 0), -ETIMEDOUT);
	releaser = (struct releaser){scene.writer, reader, borrow(reader, SLAB, 1)};
	assert_int_equal(try_send(scene.writer, SLAB, 2, true, tnd_deadline_in(SECOND / 50)),
			 -ETIMEDOUT);
	/* None that is large enough, though one is free soon. */
	assert_int_equal(try_send(scene.writer, SLAB + 1, 2, true, tnd_deadline_in(PATIENCE)),
			 -ETIMEDOUT);
	assert_int_equal(tnd_channel_release(reader, &releaser.object), 0);
	assert_int_equal(try_send(scene.writer, SLAB, 2, true, 0), 0);
	/* One that comes free is waited for. */
	releaser = (struct releaser){scene.writer, reader, borrow(reader, SLAB, 2)};
	assert_int_equal(pthread_create(&thread, NULL, release_later, &releaser), 0);
	assert_int_equal(try_send(scene.writer, 10, 3, true, tnd_deadline_in(PATIENCE)), 0);
	pthread_join(thread, NULL);
	take(reader, 10, 3);
	assert_int_equal(slabs_made(&scene), 1);
	tnd_channel_close(reader);
	close_scene(&scene);
}

/* -- figures -- */

static struct tnd__bulk_figures figures_of(const struct scene *scene)
{
	struct tnd__bulk_figures figures;

	tnd__bulk_figures(scene->writer, &figures);
	return figures;
}

static void test_figures(void **state)
{
	struct tnd_channel *zero, *seven;
	struct tnd__bulk_figures figures;
	struct tnd_reservation place;
	struct tnd_object held;
	struct scene scene;

	(void)state;
	open_scene(&scene, 8 * SLAB, SLAB);
	seven = attach(&scene, 7);
	send_slab(scene.writer, SLAB, 1);
	send_slab(scene.writer, SLAB, 2);
	held = borrow(seven, SLAB, 1);
	assert_int_equal(tnd_channel_release(seven, &held), 0);
	figures = figures_of(&scene);
	assert_int_equal(figures.slabs, 2);
	assert_int_equal(figures.free, 0);
	assert_int_equal(figures.late_count, 0); /* it is past the oldest */
	assert_int_equal(figures.missing_count, 1);
	assert_int_equal(figures.missing[0], 0);
	zero = attach(&scene, 0);
	figures = figures_of(&scene);
	assert_int_equal(figures.missing_count, 0);
	assert_int_equal(figures.late_count, 1);
	assert_int_equal(figures.late[0], 0);
	held = borrow(zero, SLAB, 1);
	figures = figures_of(&scene);
	assert_int_equal(figures.late_count, 1); /* past it, and holds it */
	assert_int_equal(figures.late[0], 0);
	assert_int_equal(tnd_channel_release(zero, &held), 0);
	figures = figures_of(&scene);
	assert_int_equal(figures.free, 1);
	assert_int_equal(figures.late_count, 2);
	assert_int_equal(figures.late[0], 0);
	assert_int_equal(figures.late[1], 7);
	take(zero, SLAB, 2);
	take(seven, SLAB, 2);
	figures = figures_of(&scene);
	assert_int_equal(figures.slabs, 2);
	assert_int_equal(figures.free, 2);
	assert_int_equal(figures.late_count, 0);
	/* One that is being filled is nobody's fault. */
	assert_int_equal(tnd__bulk_reserve(scene.writer, 1, TND__BULK_REUSE, 0, &place, NULL), 0);
	figures = figures_of(&scene);
	assert_int_equal(figures.free, 1);
	assert_int_equal(figures.late_count, 0);
	assert_int_equal(tnd_channel_abort(scene.writer, &place), 0);
	tnd_channel_close(zero);
	tnd_channel_close(seven);
	assert_int_equal(figures_of(&scene).free, 2);
	close_scene(&scene);
}

/* -- telling -- */

static struct tnd_error notice_of(int code, int32_t rank, const char *message)
{
	struct tnd_error error = {.code = code, .rank = rank};

	snprintf(error.message, sizeof(error.message), "%s", message);
	return error;
}

static void tell(struct tnd_channel *writer)
{
	struct tnd_error error = notice_of(TND_E_PEER_DEAD, 3, "rank 3 died: start again");

	tnd__bulk_tell(writer, &error);
}

static bool is_told(const struct tnd_error *error)
{
	return error->code == TND_E_PEER_DEAD && error->rank == 3 &&
	       strcmp(error->message, "rank 3 died: start again") == 0;
}

struct sleeper {
	struct tnd_channel *reader;
	bool by_recv;
	int rc;
	int64_t ended_ns;
	struct tnd_error error;
	pthread_t thread;
};

static void *sleep_for_object(void *arg)
{
	struct sleeper *sleeper = arg;
	struct tnd_object object;
	unsigned char byte;
	uint64_t bytes;

	if (sleeper->by_recv)
		sleeper->rc = tnd_channel_recv(sleeper->reader, &byte, 1, TND_NO_DEADLINE, &bytes,
					       &sleeper->error);
	else
		sleeper->rc = tnd_channel_borrow(sleeper->reader, TND_NO_DEADLINE, &object,
						 &sleeper->error);
	sleeper->ended_ns = tnd__now_ns();
	return NULL;
}

static void start_sleeper(struct sleeper *sleeper, struct tnd_channel *reader, bool by_recv)
{
	struct tnd_channel_info info = {.struct_bytes = sizeof(info)};
	int64_t deadline = tnd_deadline_in(PATIENCE);
	uint64_t before;

	*sleeper = (struct sleeper){.reader = reader, .by_recv = by_recv};
	assert_int_equal(tnd_channel_info(reader, &info), 0);
	before = info.waits;
	assert_int_equal(pthread_create(&sleeper->thread, NULL, sleep_for_object, sleeper), 0);
	while (info.waits == before && tnd_deadline_in(0) < deadline)
		assert_int_equal(tnd_channel_info(reader, &info), 0);
	assert_int_not_equal(info.waits, before);
}

static void test_tell_wakes(void **state)
{
	struct sleeper sleepers[3];
	struct tnd_error error = {0};
	struct scene scene;
	int64_t told_ns;

	(void)state;
	open_scene(&scene, 8 * SLAB, SLAB);
	for (uint32_t i = 0; i < 3; i++)
		start_sleeper(&sleepers[i], attach(&scene, i), i == 1);
	assert_int_equal(tnd__bulk_told(sleepers[0].reader, &error), 0);
	told_ns = tnd__now_ns();
	tell(scene.writer);
	for (int i = 0; i < 3; i++) {
		pthread_join(sleepers[i].thread, NULL);
		assert_int_equal(sleepers[i].rc, TND_E_PEER_DEAD);
		assert_true(is_told(&sleepers[i].error));
		assert_true(sleepers[i].ended_ns - told_ns < SECOND / 5);
		assert_int_equal(tnd__bulk_told(sleepers[i].reader, &error), TND_E_PEER_DEAD);
		assert_true(is_told(&error));
		tnd_channel_close(sleepers[i].reader);
	}
	assert_int_equal(tnd__bulk_told(scene.writer, NULL), 0);
	close_scene(&scene);
}

static void until_told(struct tnd_channel *reader, struct tnd_error *error)
{
	int64_t deadline = tnd_deadline_in(PATIENCE);

	while (tnd__bulk_told(reader, error) == 0)
		assert_true(tnd_deadline_in(0) < deadline);
}

/* Ahead of what is unread; what is borrowed stays; one who comes late; the first one stays. */
static void test_tell_precedes(void **state)
{
	struct tnd_error other = notice_of(-EIO, -1, "another"), error = {0};
	struct tnd_channel *reader, *late;
	unsigned char byte;
	struct tnd_object held, object;
	struct scene scene;
	uint64_t bytes;

	(void)state;
	open_scene(&scene, 8 * SLAB, SLAB);
	reader = attach(&scene, 0);
	for (uint64_t i = 0; i < 3; i++)
		send_slab(scene.writer, SLAB, i);
	assert_int_equal(tnd_channel_send(scene.writer, "small", 5, 0, NULL), 0);
	held = borrow(reader, SLAB, 0);
	tell(scene.writer);
	tnd__bulk_tell(scene.writer, &other);
	until_told(reader, &error);
	assert_int_equal(tnd_channel_borrow(reader, 0, &object, &error), TND_E_PEER_DEAD);
	assert_true(is_told(&error));
	assert_int_equal(tnd_channel_recv(reader, &byte, 1, 0, &bytes, &error), TND_E_PEER_DEAD);
	assert_int_equal(tnd_channel_ready(reader, 0, &error), TND_E_PEER_DEAD);
	assert_true(is_told(&error));
	assert_true(is_filled(held.data, 0, SLAB, 0));
	assert_int_equal(tnd_channel_release(reader, &held), 0);
	late = attach(&scene, 5);
	memset(&error, 0, sizeof(error));
	assert_int_equal(tnd_channel_borrow(late, tnd_deadline_in(PATIENCE), &object, &error),
			 TND_E_PEER_DEAD);
	assert_true(is_told(&error));
	/* The writer goes on as it likes. */
	send_slab(scene.writer, SLAB, 9);
	tnd_channel_close(late);
	tnd_channel_close(reader);
	close_scene(&scene);
}

/* A sentence of none, of any length, of any bytes. */
static void test_tell_sentences(void **state)
{
	struct tnd_error error = notice_of(-EIO, -1, ""), told = {0};
	struct tnd_channel *reader;
	struct scene scene;

	(void)state;
	for (int i = 0; i < 3; i++) {
		open_scene(&scene, SLAB, SLAB);
		reader = attach(&scene, 0);
		if (i)
			memset(error.message, i == 1 ? 'x' : '\n', sizeof(error.message));
		tnd__bulk_tell(scene.writer, &error);
		until_told(reader, &told);
		assert_int_equal(told.code, -EIO);
		assert_int_equal(told.rank, -1);
		if (i == 0)
			assert_string_equal(told.message, tnd_strerror(-EIO));
		else
			assert_true(strlen(told.message) > 1000 &&
				    strlen(told.message) < sizeof(told.message));
		assert_null(strchr(told.message, '\n'));
		tnd_channel_close(reader);
		close_scene(&scene);
	}
}

/* The close right behind overtakes nothing. */
static void test_tell_and_close(void **state)
{
	struct sleeper sleeper;
	struct scene scene;

	(void)state;
	for (int i = 0; i < 40; i++) {
		open_scene(&scene, SLAB, SLAB);
		start_sleeper(&sleeper, attach(&scene, 0), false);
		if (i % 4 == 0)
			send_slab(scene.writer, SLAB, 1); /* it may get this one first */
		tell(scene.writer);
		tnd_channel_close(scene.writer);
		scene.writer = NULL;
		pthread_join(sleeper.thread, NULL);
		if (sleeper.rc == 0)
			sleep_for_object(&sleeper);
		assert_int_equal(sleeper.rc, TND_E_PEER_DEAD);
		assert_true(is_told(&sleeper.error));
		tnd_channel_close(sleeper.reader);
		close_scene(&scene);
	}
}

#ifndef CHILDREN_CANNOT_SERVE
/* In a process of its own: tells once its reader is there, then ends. */
static void tell_and_end(int to, int from, bool killed)
{
	const char *address;
	struct scene scene;
	char byte;

	alarm(60);
	open_scene(&scene, 8 * SLAB, SLAB);
	address = tnd_channel_address(scene.writer);
	send_slab(scene.writer, SLAB, 1);
	if (write(to, address, strlen(address)) < 0 || read(from, &byte, 1) != 1)
		_exit(1);
	tell(scene.writer);
	if (killed)
		raise(SIGKILL);
	tnd_channel_close(scene.writer);
	_exit(0);
}

static void test_tell_and_end(void **state)
{
	char address[TND__ADDRESS_BYTES];
	struct tnd_channel *reader;
	struct tnd_error error;
	int to[2], from[2];
	pid_t pid;

	(void)state;
	for (int i = 0; i < 20; i++) {
		memset(&error, 0, sizeof(error));
		memset(address, 0, sizeof(address));
		assert_int_equal(pipe2(to, O_CLOEXEC), 0);
		assert_int_equal(pipe2(from, O_CLOEXEC), 0);
		pid = fork();
		assert_true(pid >= 0);
		if (pid == 0)
			tell_and_end(from[1], to[0], i & 1);
		assert_true(read(from[0], address, sizeof(address) - 1) > 0);
		assert_int_equal(tnd_channel_attach(address, 0, NULL, &reader, &error), 0);
		/* Its descriptor comes behind the answer: from here on nothing waits there. */
		take(reader, SLAB, 1);
		assert_int_equal(write(to[1], "g", 1), 1);
		assert_int_equal(waitpid(pid, NULL, 0), pid);
		until_told(reader, &error);
		assert_true(is_told(&error));
		tnd_channel_close(reader);
		for (int end = 0; end < 2; end++) {
			close(to[end]);
			close(from[end]);
		}
	}
}
#endif

/* What a broken writer may send. */
static void test_tell_hostile(void **state)
{
	static const struct {
		int32_t code, rank;
		int fill;
		uint32_t bytes;
		int expected;
	} rows[] = {
		{-5, 1, 'a', 0, 0},
		{-5, 1, 'a', 7, 0},
		{-5, 1, 'a', sizeof(struct tnd__notice) - 1, 0},
		{-5, 1, 'a', TND__PACKET_BYTES_MAX, 0},
		{-5, INT32_MIN, '\x1b', sizeof(struct tnd__notice), -5},
		{INT32_MIN, 1, 0xff, sizeof(struct tnd__notice), INT32_MIN},
		{0, 1, '%', sizeof(struct tnd__notice), TND_E_CORRUPT},
		{INT32_MAX, INT32_MAX, 0, sizeof(struct tnd__notice), TND_E_CORRUPT},
	};
	struct tnd__packet packet = {.kind = TND__PACKET_TELL};
	struct tnd_channel *reader;
	struct tnd_error error;
	struct scene scene;

	(void)state;
	open_scene(&scene, SLAB, SLAB);
	for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
		struct tnd__notice notice;

		memset(&error, 0, sizeof(error));
		reader = attach(&scene, 0);
		memset(packet.data, rows[i].fill, sizeof(packet.data));
		memset(&notice, rows[i].fill, sizeof(notice));
		notice.code = rows[i].code;
		notice.rank = rows[i].rank;
		memcpy(packet.data, &notice, sizeof(notice));
		packet.bytes = rows[i].bytes;
		tnd__notice_arrived(reader, &packet);
		assert_int_equal(tnd__bulk_told(reader, &error), rows[i].expected);
		assert_int_equal(error.code, rows[i].expected);
		assert_true(memchr(error.message, 0, sizeof(error.message)));
		assert_null(strchr(error.message, '\x1b'));
		assert_true(memchr(error.file, 0, sizeof(error.file)));
		assert_null(strchr(error.file, '\x1b'));
		assert_true(memchr(error.name, 0, sizeof(error.name)));
		assert_true(error.rank >= -1);
		tnd_channel_close(reader);
	}
	close_scene(&scene);
}

#ifdef TND_FAILPOINTS
/* Who could not be told is told with the next word, or the last one. */
static void test_tell_faults(void **state)
{
	struct tnd_channel *reader;
	struct tnd_error error = {0};
	struct scene scene;

	(void)state;
	for (int i = 0; i < 2; i++) {
		open_scene(&scene, SLAB, SLAB);
		reader = attach(&scene, 0);
		assert_int_equal(tnd__failpoints_set("channel.tell=ENOMEM"), 0);
		tell(scene.writer);
		tnd__failpoints_set(NULL);
		if (i) {
			tell(scene.writer);
		} else {
			tnd_channel_close(scene.writer);
			scene.writer = NULL;
		}
		until_told(reader, &error);
		assert_true(is_told(&error));
		tnd_channel_close(reader);
		close_scene(&scene);
	}
}
#endif

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_exact_sizes),    cmocka_unit_test(test_makes_room),
		cmocka_unit_test(test_no_pool),        cmocka_unit_test(test_reuse),
		cmocka_unit_test(test_figures),        cmocka_unit_test(test_tell_wakes),
		cmocka_unit_test(test_tell_precedes),  cmocka_unit_test(test_tell_sentences),
		cmocka_unit_test(test_tell_and_close),
#ifndef CHILDREN_CANNOT_SERVE
		cmocka_unit_test(test_tell_and_end),
#endif
		cmocka_unit_test(test_tell_hostile),
#ifdef TND_FAILPOINTS
		cmocka_unit_test(test_tell_faults),
#endif
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
