/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_group.c - what could break in one process: results of collectives that differ between ranks,
 * calls that cannot go on after a deadline, one handle in two threads, descriptors and memory that
 * stay behind, and figures on the board that a rank believes. Each rank is a thread with a handle
 * of its own; a wrong result, a call past its deadline, or a count of descriptors that grew fails.
 */
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "group/group_internal.h"

#define SECONDS INT64_C(1000000000)
#define LONG tnd_deadline_in(20 * SECONDS)
#define RANKS 16

static int fds_open(void)
{
	int count = 0;

	for (int fd = 0; fd < 1024; fd++)
		count += fcntl(fd, F_GETFD) >= 0;
	return count;
}

/* A service thread that was let go of ends, and closes what it had, on its own. */
static void assert_fds(int before)
{
	for (int i = 0; i < 2000 && fds_open() > before; i++)
		usleep(1000);
	assert_int_equal(fds_open(), before);
}

/* -- ranks as threads -- */

struct world {
	uint32_t ranks;
	int (*body)(struct tnd_group *group, void *arg);
	void *arg;
	char address[TND__ADDRESS_BYTES];
	struct tnd_group *groups[RANKS];
	int results[RANKS];
};
struct seat {
	struct world *world;
	uint32_t rank;
};

static void open_world(struct world *world, uint32_t ranks)
{
	struct tnd_group_opts opts = {
		.struct_bytes = sizeof(opts), .rank_count = ranks, .name = "t"};
	struct tnd_error error = {0};

	memset(world, 0, sizeof(*world));
	world->ranks = ranks;
	assert_int_equal(tnd_group_create(&opts, &world->groups[0], &error), 0);
	strcpy(world->address, tnd_group_address(world->groups[0]));
	for (uint32_t rank = 1; rank < ranks; rank++)
		assert_int_equal(
			tnd_group_attach(world->address, rank, LONG, &world->groups[rank], &error),
			0);
}

static void close_world(struct world *world)
{
	for (uint32_t rank = 0; rank < world->ranks; rank++)
		tnd_group_close(world->groups[rank]);
}

static void *sit(void *arg)
{
	struct seat *seat = arg;
	struct world *world = seat->world;

	world->results[seat->rank] = world->body(world->groups[seat->rank], world->arg);
	return NULL;
}

static void run_world(struct world *world, int (*body)(struct tnd_group *group, void *arg),
		      void *arg)
{
	struct seat seats[RANKS];
	pthread_t threads[RANKS];

	world->body = body;
	world->arg = arg;
	for (uint32_t rank = 0; rank < world->ranks; rank++) {
		seats[rank] = (struct seat){world, rank};
		assert_int_equal(pthread_create(&threads[rank], NULL, sit, &seats[rank]), 0);
	}
	for (uint32_t rank = 0; rank < world->ranks; rank++)
		pthread_join(threads[rank], NULL);
}

static void expect_results(const struct world *world, int wanted)
{
	for (uint32_t rank = 0; rank < world->ranks; rank++)
		assert_int_equal(world->results[rank], wanted);
}

static int ready(struct tnd_group *group, void *arg)
{
	struct tnd_error error = {0};
	int rc = tnd_group_ready(group, LONG, &error);

	(void)arg;
	if (rc < 0)
		print_error("rank %u: %s\n", tnd_group_rank(group), error.message);
	return rc;
}

static void open_ready(struct world *world, uint32_t ranks)
{
	open_world(world, ranks);
	run_world(world, ready, NULL);
	expect_results(world, 0);
}

/* -- collectives -- */

static int one_round(struct tnd_group *group, uint32_t round, unsigned char *data)
{
	static const uint64_t sizes[] = {0, 1, 63, 64, 4097, 65535, 65536};
	uint32_t rank = tnd_group_rank(group), count = tnd_group_rank_count(group);
	uint32_t root = round % count, least;
	uint64_t bytes = sizes[round % 7], value;
	int rc;

	if (tnd_group_barrier(group, LONG, NULL))
		return 1;
	if (tnd_group_min(group, 1000 + (rank + count - root) % count, LONG, &value, &least,
			  NULL) ||
	    value != 1000 || least != root)
		return 2;
	if (tnd_group_and(group, ~(UINT64_C(1) << rank), LONG, &value, NULL) ||
	    value != ~tnd__ranks_all(group))
		return 3;
	rc = tnd_group_agree(group, rank >= root ? -ENOSPC - (int)rank : 0, LONG, NULL);
	if (rc != -ENOSPC - (int)root || tnd_group_agree(group, 0, LONG, NULL))
		return 4;
	memset(data, (int)(rank == root ? round & 127 : 255), TND_GROUP_BYTES_MAX);
	if (tnd_group_broadcast(group, root, data, bytes, LONG, NULL))
		return 5;
	for (uint64_t i = 0; i < bytes; i++)
		if (data[i] != (round & 127))
			return 6;
	return rank == root || bytes == TND_GROUP_BYTES_MAX || data[bytes] == 255 ? 0 : 7;
}

static int rounds(struct tnd_group *group, void *arg)
{
	unsigned char *data = malloc(TND_GROUP_BYTES_MAX);
	int rc = data ? 0 : -ENOMEM;

	for (uint32_t round = 0; rc == 0 && round < *(uint32_t *)arg; round++)
		rc = one_round(group, round, data);
	free(data);
	return rc;
}

static void test_collectives(void **state)
{
	static const uint32_t sizes[] = {1, 2, 4, 16};
	int before = fds_open();

	(void)state;
	for (size_t i = 0; i < 4; i++) {
		uint32_t count = sizes[i] == 16 ? 30 : 120;
		struct world world;

		open_ready(&world, sizes[i]);
		run_world(&world, rounds, &count);
		expect_results(&world, 0);
		close_world(&world);
	}
	assert_fds(before);
}

static int wrong_order(struct tnd_group *group, void *arg)
{
	struct tnd_error error;
	uint64_t value;
	char data[8];
	int rc;

	(void)arg;
	if (tnd_group_rank(group) == 2)
		rc = tnd_group_min(group, 1, LONG, &value, NULL, &error);
	else
		rc = tnd_group_barrier(group, LONG, &error);
	if (rc != TND_E_ORDER || error.rank != 2 ||
	    !strstr(error.message, "rank 0 called barrier, rank 2 called min"))
		return 1;
	rc = tnd_group_broadcast(group, 1, data, tnd_group_rank(group) == 1 ? 7 : 8, LONG, &error);
	if (rc != TND_E_ORDER || error.rank != 1)
		return 2;
	/* All are in step again. */
	return tnd_group_barrier(group, LONG, &error);
}

static void test_order(void **state)
{
	struct world world;

	(void)state;
	open_ready(&world, 3);
	run_world(&world, wrong_order, NULL);
	expect_results(&world, 0);
	close_world(&world);
}

static int barrier(struct tnd_group *group, void *arg)
{
	(void)arg;
	return tnd_group_barrier(group, LONG, NULL);
}

static void test_timeout_and_resume(void **state)
{
	struct world world;
	struct tnd_error error;
	uint64_t value;

	(void)state;
	open_ready(&world, 4);
	for (uint32_t rank = 0; rank < 2; rank++) {
		int64_t started_ns = tnd__now_ns();

		assert_int_equal(tnd_group_barrier(world.groups[rank], 0, &error), -ETIMEDOUT);
		assert_int_equal(
			tnd_group_barrier(world.groups[rank], tnd_deadline_in(20000000), &error),
			-ETIMEDOUT);
		assert_non_null(
			strstr(error.message, rank ? "ranks 2 and 3 " : "ranks 1, 2 and 3 "));
		assert_true(tnd__now_ns() - started_ns >= 20000000);
		assert_true(tnd__now_ns() - started_ns < 2 * SECONDS);
	}
	/* Something else cannot come in between. */
	assert_int_equal(tnd_group_min(world.groups[0], 1, 0, &value, NULL, &error), TND_E_INVALID);
	run_world(&world, barrier, NULL);
	expect_results(&world, 0);
	run_world(&world, barrier, NULL);
	expect_results(&world, 0);
	close_world(&world);
}

static void test_close(void **state)
{
	struct world world;
	struct tnd_error error;

	(void)state;
	open_ready(&world, 3);
	/* The other two have only their look at the result before them when rank 0 leaves. */
	assert_int_equal(tnd_group_barrier(world.groups[1], 0, NULL), -ETIMEDOUT);
	assert_int_equal(tnd_group_barrier(world.groups[2], 0, NULL), -ETIMEDOUT);
	assert_int_equal(tnd_group_barrier(world.groups[0], 0, NULL), 0);
	tnd_group_close(world.groups[0]);
	world.groups[0] = NULL;
	assert_int_equal(tnd_group_barrier(world.groups[1], 0, NULL), 0);
	assert_int_equal(tnd_group_barrier(world.groups[2], 0, NULL), 0);
	for (uint32_t rank = 1; rank < 3; rank++) {
		assert_int_equal(tnd_group_barrier(world.groups[rank], LONG, &error), TND_E_CLOSED);
		assert_int_equal(error.rank, 0);
	}
	assert_int_equal(tnd_group_barrier(world.groups[1], 0, &error), TND_E_CLOSED);
	close_world(&world);
}

/* -- cancel, two threads, fork -- */

static struct tnd_group *signalled;

static void on_signal(int number)
{
	(void)number;
	tnd_group_cancel(signalled);
}

static void test_cancel(void **state)
{
	struct sigaction action = {.sa_handler = on_signal}, old;
	struct world world;
	struct tnd_error error;

	(void)state;
	open_ready(&world, 2);
	signalled = world.groups[0];
	sigaction(SIGALRM, &action, &old);
	alarm(1);
	assert_int_equal(tnd_group_barrier(signalled, LONG, &error), -ECANCELED);
	sigaction(SIGALRM, &old, NULL);
	assert_int_equal(tnd_group_barrier(signalled, LONG, &error), -ECANCELED);
	tnd_group_rearm(signalled);
	run_world(&world, barrier, NULL);
	expect_results(&world, 0);
	tnd_group_cancel(NULL);
	tnd_group_rearm(NULL);
	/* Now the next one. */
	tnd_group_cancel(signalled);
	assert_int_equal(tnd_group_barrier(signalled, LONG, &error), -ECANCELED);
	close_world(&world);
}

static void *barrier_thread(void *arg)
{
	return (void *)(intptr_t)tnd_group_barrier(arg, LONG, NULL);
}

static void test_busy_and_forked(void **state)
{
	struct world world;
	struct tnd_error error;
	pthread_t thread;
	int status;
	pid_t pid;

	(void)state;
	open_ready(&world, 2);
	assert_int_equal(pthread_create(&thread, NULL, barrier_thread, world.groups[0]), 0);
	while (!atomic_load(&world.groups[0]->board->sleepers))
		sched_yield();
	assert_int_equal(tnd_group_barrier(world.groups[0], LONG, &error), -EBUSY);
	pid = fork();
	if (pid == 0) {
		int rc = tnd_group_barrier(world.groups[0], LONG, &error);
		uint32_t word = atomic_load(&world.groups[0]->board->word);

		/* Neither is a wake of the parent's ranks. */
		tnd_group_cancel(world.groups[0]);
		tnd_group_rearm(world.groups[0]);
		if (atomic_load(&world.groups[0]->board->word) != word)
			rc = 0;
		tnd_group_close(world.groups[0]);
		tnd_group_close(world.groups[1]);
		_exit(rc == TND_E_FORKED ? 0 : 1);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	/* The child's close has not closed anything here. */
	assert_int_equal(tnd_group_barrier(world.groups[1], LONG, &error), 0);
	pthread_join(thread, NULL);
	close_world(&world);
}

/* -- admission -- */

static void test_places_and_arguments(void **state)
{
	struct tnd_group_opts opts = {.struct_bytes = sizeof(opts), .rank_count = 3};
	struct tnd_group *first, *second, *other;
	struct tnd_error error;
	char address[TND__ADDRESS_BYTES];
	int before = fds_open();

	(void)state;
	assert_int_equal(tnd_group_attach("unix:@tundish-nobody", 1, 0, &other, &error),
			 -ETIMEDOUT);
	assert_int_equal(error.code, -ETIMEDOUT);
	assert_int_equal(tnd_group_attach("tcp:1", 1, 0, &other, &error), TND_E_ADDRESS);
	assert_int_equal(tnd_group_create(&opts, &first, &error), 0);
	strcpy(address, tnd_group_address(first));
	assert_int_equal(tnd_group_attach(address, 0, LONG, &other, &error), TND_E_PLACE);
	assert_int_equal(tnd_group_attach(address, 3, LONG, &other, &error), TND_E_PLACE);
	assert_int_equal(tnd_group_attach(address, 1, LONG, &second, &error), 0);
	assert_int_equal(tnd_group_attach(address, 1, LONG, &other, &error), TND_E_PLACE);
	assert_int_equal(tnd_group_barrier(first, 0, &error), TND_E_INVALID);
	assert_int_equal(tnd_group_broadcast(first, 3, NULL, 0, 0, &error), TND_E_INVALID);
	assert_int_equal(tnd_group_broadcast(first, 0, address, 65537, 0, &error), TND_E_INVALID);
	assert_int_equal(tnd_group_share_fds(first, 0, NULL, 17, 0, &error), TND_E_INVALID);
	assert_int_equal(tnd_group_expect(first, 0, 1, &error), TND_E_INVALID);
	assert_int_equal(tnd_group_expect(second, 2, 1, &error), TND_E_INVALID);
	assert_int_equal(tnd_group_expect(first, 2, 0x7ffffff, &error), -ESRCH);
	assert_int_equal(tnd_group_ready(first, tnd_deadline_in(10000000), &error), -ETIMEDOUT);
	assert_non_null(strstr(error.message, "rank 2 did not attach"));
	tnd_group_close(second);
	/* A group that a rank has left is of no use to another. */
	assert_int_equal(tnd_group_ready(first, LONG, &error), TND_E_CLOSED);
	assert_int_equal(error.rank, 1);
	assert_int_equal(tnd_group_attach(address, 2, LONG, &other, &error), TND_E_CLOSED);
	tnd_group_close(first);
	tnd_group_close(NULL);
	opts.rank_count = 65;
	assert_int_equal(tnd_group_create(&opts, &first, &error), TND_E_INVALID);
	assert_fds(before);
}

/* -- descriptors -- */

static int share(struct tnd_group *group, void *arg)
{
	uint32_t rank = tnd_group_rank(group), root = *(uint32_t *)arg;
	uint32_t counts[] = {0, 1, 16};
	int fds[TND_GROUP_FDS_MAX];
	struct tnd_error error;

	for (size_t i = 0; i < 3; i++) {
		for (uint32_t k = 0; k < counts[i]; k++) {
			fds[k] = rank == root ? memfd_create("t", MFD_CLOEXEC) : -1;
			if (rank == root && ftruncate(fds[k], 100 + k) < 0)
				return 1;
		}
		if (tnd_group_share_fds(group, root, fds, counts[i], LONG, &error))
			return 2;
		for (uint32_t k = 0; k < counts[i]; k++) {
			bool ok = lseek(fds[k], 0, SEEK_END) == 100 + k &&
				  fcntl(fds[k], F_GETFD) == FD_CLOEXEC;

			close(fds[k]);
			if (!ok)
				return 3;
		}
	}
	/* Not a descriptor: nobody gets any, all know why. */
	fds[0] = -1;
	if (tnd_group_share_fds(group, root, fds, 1, LONG, &error) != -EBADF ||
	    error.rank != (int)root)
		return 4;
	return 0;
}

static int share_refused(struct tnd_group *group, void *arg)
{
	int fd = 0;

	(void)arg;
	return tnd_group_share_fds(group, 1, &fd, 1, LONG, NULL);
}

static void test_share_fds(void **state)
{
	int before = fds_open();
	struct world world;

	(void)state;
	open_ready(&world, 4);
	for (uint32_t root = 0; root < 4; root++) {
		run_world(&world, share, &root);
		expect_results(&world, 0);
	}
#ifdef TND_FAILPOINTS
	/* Root cannot send; rank 0 cannot pass it on: nobody waits for what will not come. */
	tnd__failpoints_set("group.fds=EIO");
	run_world(&world, share_refused, NULL);
	expect_results(&world, -EIO);
	tnd__failpoints_set("group.relay=ENOMEM@1x1");
	run_world(&world, share_refused, NULL);
	expect_results(&world, -ENOMEM);
	tnd__failpoints_set(NULL);
#else
	(void)share_refused;
#endif
	run_world(&world, barrier, NULL);
	expect_results(&world, 0);
	close_world(&world);
	assert_fds(before);
}

/* -- a board that lies -- */

static void test_corrupt_board(void **state)
{
	struct tnd_error error;

	(void)state;
	for (int lie = 0; lie < 5; lie++) {
		struct world world;
		struct tnd__board *board;
		int fd = -1, rc;

		open_ready(&world, 2);
		board = world.groups[1]->board;
		if (lie == 0) /* far ahead */
			atomic_store(&board->rows[1].posts[0].number, UINT64_MAX);
		else if (lie == 1) /* ended without us, who posted, or the other */
			atomic_store(&board->ends[0], tnd__end_make(2, 0, TND__END_DONE));
		else if (lie == 2)
			atomic_store(&board->ends[0], tnd__end_make(2, 200, TND__END_DEAD));
		else if (lie == 3)
			atomic_store(&board->ends[0], tnd__end_make(2, 0, 77));
		else
			atomic_store(&board->ends[0], UINT64_MAX);
		rc = lie < 4 ? tnd_group_barrier(world.groups[0], LONG, &error)
			     : tnd_group_share_fds(world.groups[0], 0, &fd, 0, LONG, &error);
		assert_int_equal(rc, TND_E_CORRUPT);
		assert_int_equal(tnd_group_barrier(world.groups[0], 0, &error), TND_E_CORRUPT);
		close_world(&world);
	}
}

/* -- nothing stays -- */

static void test_rounds_leave_nothing(void **state)
{
	int before = fds_open();
	size_t used = 0;

	(void)state;
	for (int round = 0; round < 200; round++) {
		struct world world;

		open_world(&world, 2);
		if (round % 2) {
			run_world(&world, ready, NULL);
			expect_results(&world, 0);
		}
		close_world(&world);
		if (round == 100)
			used = mallinfo2().uordblks;
	}
	/* Sanitizers have their own allocator, and say 0. */
	assert_true(mallinfo2().uordblks <= used + 16384);
	assert_fds(before);
}

#ifdef TND_FAILPOINTS
/* Rank 0 has seen all posts and is about to say so when somebody else ends it otherwise. */
static void test_first_end_holds(void **state)
{
	struct world world;
	struct tnd__board *board;
	struct tnd_error error;
	int64_t until_ns = LONG;
	pthread_t thread;
	void *rc;

	(void)state;
	open_ready(&world, 2);
	board = world.groups[1]->board;
	assert_int_equal(tnd_group_barrier(world.groups[1], 0, NULL), -ETIMEDOUT);
	tnd__failpoints_set("group.G4=delay:1000@1x1");
	assert_int_equal(pthread_create(&thread, NULL, barrier_thread, world.groups[0]), 0);
	/* It has read the end by then, and is about to replace what it read. */
	while (!tnd__failpoint_seen("group.G4") && tnd__now_ns() < until_ns)
		sched_yield();
	assert_int_equal(tnd__failpoint_seen("group.G4"), 1);
	atomic_store(&board->ends[0], tnd__end_make(2, 1, TND__END_DEAD));
	pthread_join(thread, &rc);
	tnd__failpoints_set(NULL);
	assert_int_equal((intptr_t)rc, TND_E_PEER_DEAD);
	assert_int_equal(tnd_group_barrier(world.groups[1], LONG, &error), TND_E_PEER_DEAD);
	close_world(&world);
}

static void test_faults(void **state)
{
	static const char *const points[] = {
		"group.alloc",  "group.memfd",  "group.fallocate", "group.map",
		"group.socket", "group.accept", "group.send",
	};
	struct tnd_group_opts opts = {.struct_bytes = sizeof(opts), .rank_count = 2};
	int before = fds_open();

	(void)state;
	for (size_t i = 0; i < sizeof(points) / sizeof(points[0]); i++)
		for (int at = 1; at <= 4; at++) {
			struct tnd_group *first = NULL, *second = NULL;
			char text[64];

			snprintf(text, sizeof(text), "%s=ENOMEM@%dx1", points[i], at);
			tnd__failpoints_set(text);
			if (tnd_group_create(&opts, &first, NULL) == 0)
				tnd_group_attach(tnd_group_address(first), 1,
						 tnd_deadline_in(SECONDS), &second, NULL);
			tnd__failpoints_set(NULL);
			/* Both know an end, whichever it is. */
			if (second)
				tnd_group_ready(second, 0, NULL);
			tnd_group_close(second);
			tnd_group_close(first);
		}
	assert_fds(before);
}
#endif

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_collectives),
		cmocka_unit_test(test_order),
		cmocka_unit_test(test_timeout_and_resume),
		cmocka_unit_test(test_close),
		cmocka_unit_test(test_cancel),
		cmocka_unit_test(test_busy_and_forked),
		cmocka_unit_test(test_places_and_arguments),
		cmocka_unit_test(test_share_fds),
		cmocka_unit_test(test_corrupt_board),
		cmocka_unit_test(test_rounds_leave_nothing),
#ifdef TND_FAILPOINTS
		cmocka_unit_test(test_first_end_holds),
		cmocka_unit_test(test_faults),
#endif
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
