/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_bigobject.c - what could break: an object by slab that comes damaged, late, twice or not at all; a slab that is used again while
 * somebody reads it, or never; a wait that nobody ends; memory, budget, mappings or descriptors left behind. Shown by patterns in
 * the objects, by the pool's and the budget's figures, by /proc/self, and by readers and writers that are killed while they hold something.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "channel/bigobject.h"
#include "support/fds.h"

#define KIB UINT64_C(1024)
#define MIB (UINT64_C(1) << 20)
#define SECOND INT64_C(1000000000)
#define RING (16 * KIB)

/* -- figures -- */

static uint64_t charged(struct tnd_budget *budget)
{
	struct tnd_budget_stats stats = {.struct_bytes = sizeof(stats)};

	assert_int_equal(tnd_budget_stats(budget, &stats), 0);
	return stats.charged_bytes;
}

static uint64_t slabs_made(struct tnd_slab_pool *pool)
{
	struct tnd_slab_stats stats = {.struct_bytes = sizeof(stats)};

	assert_int_equal(tnd_slab_pool_stats(pool, &stats), 0);
	return stats.allocations;
}

/* -- a channel with what belongs to it -- */

struct scene {
	struct tnd_budget *budget;
	struct tnd_slab_pool *pool;
	struct tnd_channel *writer;
	unsigned int fds;
};

static void open_scene(struct scene *scene, uint64_t budget_bytes, uint32_t on_dead)
{
	struct tnd_slab_pool_opts pool = {.struct_bytes = sizeof(pool),
					  .flags = TND_SLAB_POOL_F_SHARED};
	struct tnd_channel_opts opts = {.struct_bytes = sizeof(opts),
					.max_bytes = RING,
					.max_objects = 8,
					.reserved_readers = 1,
					.open_readers = 3,
					.on_dead = on_dead,
					.name = "big",
					.max_object_bytes = 128 * MIB};
	struct tnd_error error = {0};

	scene->fds = fd_count();
	assert_int_equal(tnd_budget_create(budget_bytes, &scene->budget), 0);
	pool.budget = scene->budget;
	assert_int_equal(tnd_slab_pool_create(&pool, &scene->pool), 0);
	opts.pool = scene->pool;
	if (tnd_channel_create(&opts, &scene->writer, &error) < 0)
		fail_msg("%s", error.message);
}

static struct tnd_channel *attach(const struct scene *scene, uint32_t rank)
{
	struct tnd_channel *reader;
	struct tnd_error error = {0};

	if (tnd_channel_attach(tnd_channel_address(scene->writer), rank, NULL, &reader, &error) < 0)
		fail_msg("%s", error.message);
	return reader;
}

/* Nothing is left. */
static void close_scene(struct scene *scene)
{
	tnd_channel_close(scene->writer);
	assert_int_equal(charged(scene->budget), 0);
	tnd_slab_pool_close(scene->pool);
	tnd_budget_close(scene->budget);
	assert_int_equal(fd_count(), scene->fds);
	assert_int_equal(map_count("memfd:tundish"), 0);
}

/* -- objects -- */

static unsigned char scratch[101 * 1048576];

/* Another pattern for each seed; every page, and the last byte, tells. */
static void fill(unsigned char *data, uint64_t bytes, uint64_t seed)
{
	for (uint64_t i = 0; i < bytes; i += 509)
		data[i] = (unsigned char)(i / 509 + seed * 7);
	if (bytes)
		data[bytes - 1] = (unsigned char)(seed + 1);
}

static bool check(const unsigned char *data, uint64_t bytes, uint64_t seed)
{
	for (uint64_t i = 0; i + 1 < bytes; i += 509)
		if (data[i] != (unsigned char)(i / 509 + seed * 7))
			return false;
	return !bytes || data[bytes - 1] == (unsigned char)(seed + 1);
}

static int send_within(struct tnd_channel *writer, uint64_t bytes, uint64_t seed, int64_t ns)
{
	struct tnd_error error = {0};
	int rc;

	fill(scratch, bytes, seed);
	rc = tnd_channel_send(writer, scratch, bytes, ns ? tnd_deadline_in(ns) : 0, &error);
	if (rc < 0) {
		assert_int_equal(error.code, rc);
		assert_true(strlen(error.message) > 0);
	}
	return rc;
}

static void send_one(struct tnd_channel *writer, uint64_t bytes, uint64_t seed)
{
	assert_int_equal(send_within(writer, bytes, seed, 20 * SECOND), 0);
}

static struct tnd_object borrow(struct tnd_channel *reader, uint64_t bytes, uint64_t seed)
{
	struct tnd_object object = {0};
	struct tnd_error error = {0};

	if (tnd_channel_borrow(reader, tnd_deadline_in(20 * SECOND), &object, &error) < 0)
		fail_msg("%s", error.message);
	assert_int_equal(object.bytes, bytes);
	assert_true(check(object.data, bytes, seed));
	return object;
}

static void take_one(struct tnd_channel *reader, uint64_t bytes, uint64_t seed)
{
	struct tnd_object object = borrow(reader, bytes, seed);

	assert_int_equal(tnd_channel_release(reader, &object), 0);
}

/* -- sizes -- */

static void test_sizes(void **state)
{
	static const uint64_t sizes[] = {RING + 1,     RING + 64,     5 * 4096 - 1, 5 * 4096,
					 5 * 4096 + 1, 2 * MIB - 1,   2 * MIB,      3 * MIB + 17,
					 10 * MIB,     100 * MIB - 1, 100 * MIB};
	struct tnd_channel *reader;
	struct scene scene;
	uint64_t got = 0;

	(void)state;
	open_scene(&scene, 1024 * MIB, TND_CHANNEL_DEAD_ERROR);
	reader = attach(&scene, 0);
	for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
		/* Among small ones, in order, borrowed and copied. */
		send_one(scene.writer, 100 + i, i);
		send_one(scene.writer, sizes[i], i + 1);
		send_one(scene.writer, RING / 2, i + 2);
		take_one(reader, 100 + i, i);
		take_one(reader, sizes[i], i + 1);
		take_one(reader, RING / 2, i + 2);
		send_one(scene.writer, sizes[i], i + 3);
		memset(scratch, 0, sizes[i]);
		assert_int_equal(tnd_channel_recv(reader, scratch, sizes[i] - 1,
						  tnd_deadline_in(20 * SECOND), &got, NULL),
				 -EMSGSIZE);
		assert_int_equal(got, sizes[i]);
		assert_int_equal(tnd_channel_recv(reader, scratch, sizeof(scratch),
						  tnd_deadline_in(20 * SECOND), &got, NULL),
				 0);
		assert_int_equal(got, sizes[i]);
		assert_true(check(scratch, got, i + 3));
	}
	tnd_channel_close(reader);
	close_scene(&scene);
}

static void test_limits(void **state)
{
	struct tnd_slab_pool_opts anonymous = {.struct_bytes = sizeof(anonymous)};
	struct tnd_channel_opts opts = {.struct_bytes = sizeof(opts), .open_readers = 1};
	struct iovec piece = {scratch, 128 * MIB + 1};
	struct tnd_channel *channel;
	struct tnd_error error = {0};
	struct scene scene;

	(void)state;
	open_scene(&scene, 1024 * MIB, TND_CHANNEL_DEAD_ERROR);
	assert_int_equal(tnd_channel_sendv(scene.writer, &piece, 1, 0, &error), -EMSGSIZE);
	assert_non_null(strstr(error.message, "134217729"));
	assert_non_null(strstr(error.message, "134217728"));
	assert_int_equal(slabs_made(scene.pool), 0);
	close_scene(&scene);
	assert_int_equal(tnd_slab_pool_create(&anonymous, &opts.pool), 0);
	assert_int_equal(tnd_channel_create(&opts, &channel, &error), TND_E_INVALID);
	assert_non_null(strstr(error.message, "TND_SLAB_POOL_F_SHARED"));
	tnd_slab_pool_close(opts.pool);
}

/* -- reuse -- */

static void test_reuse(void **state)
{
	struct tnd_channel *reader;
	struct tnd_object held, other;
	struct scene scene;

	(void)state;
	open_scene(&scene, 1024 * MIB, TND_CHANNEL_DEAD_ERROR);
	reader = attach(&scene, 0);
	for (uint64_t i = 0; i < 50; i++) {
		/* Up to half as much again goes into the same slab. */
		send_one(scene.writer, MIB + i * 8 * KIB, i);
		take_one(reader, MIB + i * 8 * KIB, i);
	}
	assert_int_equal(slabs_made(scene.pool), 1);
	/* A view that is kept: the ring goes on, and so do others by slab, without it. */
	send_one(scene.writer, MIB, 60);
	held = borrow(reader, MIB, 60);
	for (uint64_t i = 0; i < 50; i++) {
		send_one(scene.writer, MIB, i);
		send_one(scene.writer, RING, i);
		take_one(reader, MIB, i);
		take_one(reader, RING, i);
	}
	assert_int_equal(slabs_made(scene.pool), 2);
	assert_true(check(held.data, MIB, 60));
	/* Released in any order, each once. */
	send_one(scene.writer, MIB, 61);
	other = borrow(reader, MIB, 61);
	assert_int_equal(tnd_channel_release(reader, &held), 0);
	assert_int_equal(tnd_channel_release(reader, &held), TND_E_INVALID);
	assert_int_equal(tnd_channel_release(reader, &other), 0);
	assert_int_equal(tnd_channel_release(reader, &other), TND_E_INVALID);
	/* An object that nobody has read yet keeps its slab. */
	send_one(scene.writer, MIB, 62);
	send_one(scene.writer, MIB, 63);
	send_one(scene.writer, MIB, 64);
	assert_int_equal(slabs_made(scene.pool), 3);
	take_one(reader, MIB, 62);
	take_one(reader, MIB, 63);
	take_one(reader, MIB, 64);
	tnd_channel_close(reader);
	close_scene(&scene);
}

/* The writer's mapping is not in a child; the reader's is read-only for good. */
static void test_mappings(void **state)
{
	struct tnd_channel *reader;
	struct tnd_object object;
	struct scene scene;
	unsigned char seen;
	pid_t pid;
	int status;

	(void)state;
	open_scene(&scene, 64 * MIB, TND_CHANNEL_DEAD_ERROR);
	reader = attach(&scene, 0);
	send_one(scene.writer, MIB, 1);
	object = borrow(reader, MIB, 1);
	assert_int_equal(mprotect((void *)(uintptr_t)object.data, 4096, PROT_READ | PROT_WRITE),
			 -1);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		bool gone = mincore(tnd__slabs_data(scene.writer, 0), 4096, &seen) < 0 &&
			    errno == ENOMEM;

		tnd_channel_close(scene.writer);
		tnd_channel_close(reader);
		_exit(gone ? 0 : 1);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	assert_true(check(object.data, MIB, 1));
	assert_int_equal(tnd_channel_release(reader, &object), 0);
	tnd_channel_close(reader);
	close_scene(&scene);
}

/* -- waiting -- */

struct sender {
	struct tnd_channel *writer;
	uint64_t bytes, seed;
	int rc;
};

static void *run_sender(void *arg)
{
	struct sender *sender = arg;
	unsigned char *data = malloc(sender->bytes);

	fill(data, sender->bytes, sender->seed);
	sender->rc = tnd_channel_send(sender->writer, data, sender->bytes,
				      tnd_deadline_in(20 * SECOND), NULL);
	free(data);
	return NULL;
}

static void until_waiting(struct tnd_channel *writer)
{
	struct tnd_channel_info info = {.struct_bytes = sizeof(info)};
	int64_t deadline = tnd_deadline_in(20 * SECOND);
	uint64_t before;

	assert_int_equal(tnd_channel_info(writer, &info), 0);
	before = info.waits;
	while (info.waits == before && tnd_deadline_in(0) < deadline)
		assert_int_equal(tnd_channel_info(writer, &info), 0);
	assert_int_not_equal(info.waits, before);
}

/* Budget for one slab: who waits for it gets it when the reader lets go, or an error. */
static void test_waits(void **state)
{
	struct sender sender = {.bytes = MIB, .seed = 8};
	struct tnd_channel *reader;
	struct tnd_object object;
	struct scene scene;
	pthread_t thread;

	(void)state;
	open_scene(&scene, MIB + MIB / 2, TND_CHANNEL_DEAD_ERROR);
	reader = attach(&scene, 0);
	sender.writer = scene.writer;
	send_one(scene.writer, MIB, 1);
	assert_int_equal(send_within(scene.writer, MIB, 2, 0), -ETIMEDOUT);
	assert_int_equal(send_within(scene.writer, MIB, 2, SECOND / 20), -ETIMEDOUT);
	object = borrow(reader, MIB, 1);
	assert_int_equal(send_within(scene.writer, MIB, 2, SECOND / 20), -ETIMEDOUT);
	/* Small ones still go. */
	assert_int_equal(send_within(scene.writer, 100, 3, 0), 0);
	take_one(reader, 100, 3);
	assert_int_equal(pthread_create(&thread, NULL, run_sender, &sender), 0);
	until_waiting(scene.writer);
	assert_int_equal(tnd_channel_release(reader, &object), 0);
	pthread_join(thread, NULL);
	assert_int_equal(sender.rc, 0);
	object = borrow(reader, MIB, 8);
	/* Cancelled while it waits. */
	assert_int_equal(pthread_create(&thread, NULL, run_sender, &sender), 0);
	until_waiting(scene.writer);
	tnd_channel_cancel(scene.writer);
	pthread_join(thread, NULL);
	assert_int_equal(sender.rc, -ECANCELED);
	tnd_channel_rearm(scene.writer);
	assert_int_equal(tnd_channel_release(reader, &object), 0);
	/* More than the whole budget never fits. */
	assert_int_equal(send_within(scene.writer, 2 * MIB, 4, SECOND), TND_E_BUDGET);
	send_one(scene.writer, MIB, 5);
	take_one(reader, MIB, 5);
	tnd_channel_close(reader);
	close_scene(&scene);
}

/* Budget that somebody else holds is waited for too. */
static void *refund_later(void *arg)
{
	struct scene *scene = arg;

	until_waiting(scene->writer);
	tnd_budget_refund(scene->budget, 8 * MIB);
	return NULL;
}

static void test_budget_of_others(void **state)
{
	struct tnd_channel *reader;
	struct scene scene;
	pthread_t thread;

	(void)state;
	open_scene(&scene, 8 * MIB, TND_CHANNEL_DEAD_ERROR);
	reader = attach(&scene, 0);
	assert_int_equal(tnd_budget_charge(scene.budget, 8 * MIB, NULL), 0);
	assert_int_equal(pthread_create(&thread, NULL, refund_later, &scene), 0);
	send_one(scene.writer, MIB, 1);
	pthread_join(thread, NULL);
	take_one(reader, MIB, 1);
	tnd_channel_close(reader);
	close_scene(&scene);
}

/* A larger object takes the budget of slabs that are free, and readers let go of those. */
static void test_retire(void **state)
{
	struct tnd_channel *reader;
	struct tnd_object held;
	struct scene scene;
	int64_t deadline;

	(void)state;
	open_scene(&scene, 16 * MIB, TND_CHANNEL_DEAD_ERROR);
	reader = attach(&scene, 0);
	for (uint64_t i = 0; i < 4; i++)
		send_one(scene.writer, 2 * MIB, i);
	for (uint64_t i = 0; i < 3; i++)
		take_one(reader, 2 * MIB, i);
	held = borrow(reader, 2 * MIB, 3);
	send_one(scene.writer, 12 * MIB, 5);
	take_one(reader, 12 * MIB, 5);
	assert_true(check(held.data, 2 * MIB, 3));
	assert_true(charged(scene.budget) <= 16 * MIB);
	/* The one that is held, and the large one: each mapped here by the writer and the reader. */
	deadline = tnd_deadline_in(20 * SECOND);
	while (map_count("memfd:tundish.slab") != 4 && tnd_deadline_in(0) < deadline)
		usleep(1000);
	assert_int_equal(map_count("memfd:tundish.slab"), 4);
	assert_int_equal(tnd_channel_release(reader, &held), 0);
	tnd_channel_close(reader);
	close_scene(&scene);
}

/* -- reservations -- */

static void test_reservations(void **state)
{
	struct tnd_reservation one, two;
	struct tnd_channel *reader;
	struct scene scene;

	(void)state;
	open_scene(&scene, 64 * MIB, TND_CHANNEL_DEAD_ERROR);
	reader = attach(&scene, 0);
	assert_int_equal(tnd_channel_reserve(scene.writer, 3 * MIB, 0, &one, NULL), 0);
	assert_int_equal(tnd_channel_reserve(scene.writer, 2 * MIB, 0, &two, NULL), 0);
	assert_ptr_not_equal(one.data, two.data);
	fill(one.data, MIB + 5, 1);
	fill(two.data, 2 * MIB, 2);
	assert_int_equal(tnd_channel_commit(scene.writer, &two, 2 * MIB), 0);
	assert_int_equal(tnd_channel_commit(scene.writer, &one, 3 * MIB + 1), TND_E_INVALID);
	assert_int_equal(tnd_channel_commit(scene.writer, &one, MIB + 5), 0);
	take_one(reader, MIB + 5, 1);
	take_one(reader, 2 * MIB, 2);
	/* Aborted, behind one that is open: the slab is free again. */
	assert_int_equal(tnd_channel_reserve(scene.writer, 100, 0, &one, NULL), 0);
	for (uint64_t i = 0; i < 5; i++) {
		assert_int_equal(tnd_channel_reserve(scene.writer, 2 * MIB, 0, &two, NULL), 0);
		assert_int_equal(tnd_channel_abort(scene.writer, &two), 0);
	}
	send_one(scene.writer, 2 * MIB, 4);
	assert_int_equal(tnd_channel_abort(scene.writer, &one), 0);
	take_one(reader, 2 * MIB, 4);
	assert_true(slabs_made(scene.pool) <= 3);
	tnd_channel_close(reader);
	close_scene(&scene);
}

/* -- who comes and goes -- */

static void test_late(void **state)
{
	struct tnd_channel *first, *late;
	struct tnd_error error;
	struct scene scene;
	uint64_t bytes;

	(void)state;
	open_scene(&scene, 64 * MIB, TND_CHANNEL_DEAD_ERROR);
	/* Held for the rank that has not come. */
	send_one(scene.writer, MIB, 1);
	send_one(scene.writer, 2 * MIB, 2);
	first = attach(&scene, 0);
	take_one(first, MIB, 1);
	/* Sees what is sent after it came, in slabs that were there before. */
	late = attach(&scene, 7);
	send_one(scene.writer, MIB, 3);
	take_one(first, 2 * MIB, 2);
	take_one(first, MIB, 3);
	take_one(late, MIB, 3);
	/* One that leaves with a view open holds nothing up. */
	send_one(scene.writer, MIB, 4);
	(void)borrow(late, MIB, 4);
	tnd_channel_close(late);
	take_one(first, MIB, 4);
	/* The writer closes; what it has sent is still read. */
	send_one(scene.writer, 3 * MIB, 5);
	late = attach(&scene, 7);
	tnd_channel_close(scene.writer);
	take_one(first, 3 * MIB, 5);
	assert_int_equal(tnd_channel_recv(first, scratch, sizeof(scratch),
					  tnd_deadline_in(20 * SECOND), &bytes, &error),
			 TND_E_CLOSED);
	assert_int_equal(tnd_channel_recv(late, scratch, sizeof(scratch),
					  tnd_deadline_in(20 * SECOND), &bytes, &error),
			 TND_E_CLOSED);
	tnd_channel_close(first);
	tnd_channel_close(late);
	scene.writer = NULL;
	close_scene(&scene);
}

/* A process that reads `address` from a pipe, runs `fn`, says so, and lives until it is killed. */
static pid_t start_child(int (*fn)(int from, int to), int *ret_to, int *ret_from)
{
	int to[2], from[2];
	pid_t pid;

	assert_int_equal(pipe2(to, O_CLOEXEC), 0);
	assert_int_equal(pipe2(from, O_CLOEXEC), 0);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		alarm(60);
		close(to[1]);
		close(from[0]);
		if (fn(to[0], from[1]) == 0)
			pause();
		_exit(1);
	}
	close(to[0]);
	close(from[1]);
	*ret_to = to[1];
	*ret_from = from[0];
	return pid;
}

static void kill_child(pid_t pid)
{
	int status;

	assert_int_equal(kill(pid, SIGKILL), 0);
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFSIGNALED(status));
}

/* Borrows one object and keeps it. */
static int keep_one(int from, int to)
{
	char address[TND__ADDRESS_BYTES] = "";
	struct tnd_channel *reader;
	struct tnd_object object;

	if (read(from, address, sizeof(address) - 1) <= 0 ||
	    tnd_channel_attach(address, 0, NULL, &reader, NULL) < 0 ||
	    tnd_channel_borrow(reader, tnd_deadline_in(20 * SECOND), &object, NULL) < 0)
		return 1;
	return write(to, "b", 1) == 1 ? 0 : 1;
}

static void with_killed_reader(uint32_t on_dead)
{
	struct tnd_channel *reader;
	const char *address;
	struct scene scene;
	unsigned int fds = fd_count();
	int to, from;
	char byte;
	pid_t pid = start_child(keep_one, &to, &from);

	open_scene(&scene, MIB + MIB / 2, on_dead);
	address = tnd_channel_address(scene.writer);
	reader = attach(&scene, 5);
	assert_int_equal(write(to, address, strlen(address)), strlen(address));
	send_one(scene.writer, MIB, 1);
	take_one(reader, MIB, 1);
	assert_int_equal(read(from, &byte, 1), 1);
	assert_int_equal(send_within(scene.writer, MIB, 2, SECOND / 20), -ETIMEDOUT);
	kill_child(pid);
	if (on_dead == TND_CHANNEL_DEAD_ERROR) {
		assert_int_equal(send_within(scene.writer, MIB, 2, 20 * SECOND), TND_E_PEER_DEAD);
		assert_int_equal(tnd_channel_evict(scene.writer, 0), 0);
	}
	send_one(scene.writer, MIB, 2);
	take_one(reader, MIB, 2);
	assert_int_equal(slabs_made(scene.pool), 1);
	tnd_channel_close(reader);
	close(to);
	close(from);
	scene.fds = fds;
	close_scene(&scene);
}

static void test_killed_reader(void **state)
{
	(void)state;
	with_killed_reader(TND_CHANNEL_DEAD_ERROR);
	with_killed_reader(TND_CHANNEL_DEAD_EVICT);
}

/* Sends two objects once its reader has come. */
static int send_two(int from, int to)
{
	struct scene scene;
	const char *address;
	char byte;

	open_scene(&scene, 64 * MIB, TND_CHANNEL_DEAD_ERROR);
	address = tnd_channel_address(scene.writer);
	send_one(scene.writer, MIB, 1);
	if (write(to, address, strlen(address)) < 0 || read(from, &byte, 1) != 1)
		return 1;
	send_one(scene.writer, 5 * MIB, 2);
	return write(to, "s", 1) == 1 ? 0 : 1;
}

static void test_killed_writer(void **state)
{
	char address[TND__ADDRESS_BYTES] = "", byte;
	struct tnd_channel *reader;
	struct tnd_error error;
	uint64_t bytes;
	int to, from;
	pid_t pid = start_child(send_two, &to, &from);

	(void)state;
	assert_true(read(from, address, sizeof(address) - 1) > 0);
	assert_int_equal(tnd_channel_attach(address, 0, NULL, &reader, &error), 0);
	assert_int_equal(write(to, "a", 1), 1);
	assert_int_equal(read(from, &byte, 1), 1);
	kill_child(pid);
	take_one(reader, MIB, 1);
	take_one(reader, 5 * MIB, 2);
	assert_int_equal(tnd_channel_recv(reader, scratch, sizeof(scratch),
					  tnd_deadline_in(20 * SECOND), &bytes, &error),
			 TND_E_PEER_DEAD);
	tnd_channel_close(reader);
	close(to);
	close(from);
	assert_int_equal(map_count("memfd:tundish"), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_sizes),         cmocka_unit_test(test_limits),
		cmocka_unit_test(test_reuse),         cmocka_unit_test(test_mappings),
		cmocka_unit_test(test_waits),         cmocka_unit_test(test_budget_of_others),
		cmocka_unit_test(test_retire),        cmocka_unit_test(test_reservations),
		cmocka_unit_test(test_late),          cmocka_unit_test(test_killed_reader),
		cmocka_unit_test(test_killed_writer),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
