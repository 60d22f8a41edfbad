/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_stat.c - what could break: a figure that is not what the segments say; a position taken modulo a size, so that it is wrong
 * near 2^64; hostile figures that are used as sizes, as indexes or printed beyond the limits; a channel counted once for each process
 * that has it; a writer taken for alive because its child lives; a descriptor left open, or our own closed, with the record locks on
 * it; memory lost where there is none. Shown on channels made by hand, whose every word is known, by random bytes over them, and by /proc/self/fd.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "../support/fakechannel.h"
#include "base/base.h"
#include "memory/live.h"
#include "support/fds.h"
#include "tundish/stat.h"

#define STORE(word, value) atomic_store_explicit(&(word), (value), memory_order_relaxed)

static struct tnd_stat *read_stat(void)
{
	struct tnd_stat *stat;

	assert_int_equal(tnd_stat_read(&stat), 0);
	return stat;
}

/* Other programs of this user may have channels too: ours are known by name. */
static const struct tnd_stat_channel *find(const struct tnd_stat *stat, const char *name)
{
	const struct tnd_stat_channel *found = NULL;

	for (size_t i = 0; i < stat->channel_count; i++) {
		if (strcmp(stat->channels[i].name, name) != 0)
			continue;
		assert_null(found);
		found = &stat->channels[i];
	}
	return found;
}

static const struct tnd_stat_pool *find_pool(const struct tnd_stat *stat, const char *name,
					     int32_t pid)
{
	for (size_t i = 0; i < stat->pool_count; i++)
		if (strcmp(stat->pools[i].name, name) == 0 && stat->pools[i].pid == pid)
			return &stat->pools[i];
	return NULL;
}

/* -- children: they report by a pipe, and end with it -- */

struct child {
	pid_t pid;
	int said, hold; /* it said something; it lives while this is open */
};

static struct child start(void (*run)(void *arg, int said), void *arg)
{
	struct child child;
	int said[2], hold[2];
	char byte;

	assert_int_equal(pipe2(said, O_CLOEXEC), 0);
	assert_int_equal(pipe2(hold, O_CLOEXEC), 0);
	child.pid = fork();
	assert_true(child.pid >= 0);
	if (child.pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(hold[1]);
		close(said[0]);
		run(arg, said[1]);
		if (read(hold[0], &byte, 1) < 0)
			_exit(1);
		_exit(0);
	}
	close(said[1]);
	close(hold[0]);
	child.said = said[0];
	child.hold = hold[1];
	return child;
}

static void wait_said(const struct child *child, void *out, size_t bytes)
{
	struct pollfd event = {.fd = child->said, .events = POLLIN};

	assert_int_equal(poll(&event, 1, 20000), 1);
	assert_int_equal(read(child->said, out, bytes), bytes);
}

static void finish(struct child *child, int signal_number)
{
	int status;

	if (signal_number)
		kill(child->pid, signal_number);
	close(child->hold);
	close(child->said);
	assert_int_equal(waitpid(child->pid, &status, 0), child->pid);
}

static void only_live(void *arg, int said)
{
	(void)arg;
	if (write(said, "r", 1) != 1)
		_exit(1);
}

static void make_and_live(void *arg, int said)
{
	static struct fake fake;

	fake_make(&fake, arg, 0);
	fake_seat(&fake, 0, 0, TND__PLACE_LIVE, 0);
	fake_send(&fake, 64);
	if (write(said, "r", 1) != 1)
		_exit(1);
}

/* -- figures -- */

static void check_figures(uint64_t first_number, uint64_t first_position)
{
	const struct tnd_stat_channel *channel;
	struct tnd_stat *stat;
	struct fake fake;

	fake_make(&fake, "stat-figures", first_number);
	STORE(fake.control->head_position, first_position);
	fake_seat(&fake, 2, 0, TND__PLACE_LIVE, (uint32_t)getpid());
	fake_seat(&fake, 0, 7, TND__PLACE_LIVE, 0);
	fake_seat(&fake, 1, 3, TND__PLACE_RESERVED, 0);
	for (int i = 0; i < 5; i++)
		fake_send(&fake, (uint64_t)(i + 1) * 64);
	STORE(fake.control->places[2].cursor, first_number + 5);
	STORE(fake.control->places[0].cursor, first_number + 3);
	STORE(fake.control->places[1].cursor, first_number + 1);
	STORE(fake.control->places[0].waits, 11);
	STORE(fake.control->places[0].wakes, 12);
	STORE(fake.control->places[0].blocked_ns, 13);
	STORE(fake.control->places[2].blocked_since_ns, tnd__now_ns() - 1000000000);
	STORE(fake.control->sleepers, 4);
	STORE(fake.control->high_bytes, 2048);
	STORE(fake.control->high_objects, 2); /* less than there are now */
	STORE(fake.control->waits, 21);
	STORE(fake.control->wakes, 22);
	STORE(fake.control->blocked_ns, 23);
	stat = read_stat();
	channel = find(stat, "stat-figures");
	assert_non_null(channel);
	assert_int_equal(channel->pid, getpid());
	assert_int_equal(channel->closed, 0);
	assert_int_equal(channel->max_bytes, 65536);
	assert_int_equal(channel->max_objects, 8);
	assert_int_equal(channel->used_objects, 4);
	assert_int_equal(channel->used_bytes, 64 * (2 + 3 + 4 + 5));
	assert_int_equal(channel->high_bytes, 2048);
	assert_int_equal(channel->high_objects, 4);
	assert_int_equal(channel->sent_objects, 5);
	assert_int_equal(channel->sent_bytes, 64 * 15);
	assert_int_equal(channel->memory_bytes, fake.data_bytes + sizeof(*fake.control));
	assert_int_equal(channel->writer_state, TND_READER_ALIVE);
	assert_int_equal(channel->writer_waits, 21);
	assert_int_equal(channel->writer_wakes, 22);
	assert_int_equal(channel->writer_blocked_ns, 23);
	assert_int_equal(channel->reader_count, 3);
	assert_int_equal(channel->readers[0].rank, 0);
	assert_int_equal(channel->readers[0].pid, getpid());
	assert_int_equal(channel->readers[0].state, TND_READER_ALIVE);
	assert_int_equal(channel->readers[0].lag_objects, 0);
	assert_int_equal(channel->readers[0].lag_bytes, 0);
	assert_int_equal(channel->readers[0].sleeping, 1);
	assert_true(channel->readers[0].blocked_ns >= 1000000000);
	assert_int_equal(channel->readers[1].rank, 3);
	assert_int_equal(channel->readers[1].state, TND_READER_MISSING);
	assert_int_equal(channel->readers[1].lag_objects, 4);
	assert_int_equal(channel->readers[2].rank, 7);
	assert_int_equal(channel->readers[2].state, TND_READER_ALIVE);
	assert_int_equal(channel->readers[2].sleeping, 0);
	assert_int_equal(channel->readers[2].lag_objects, 2);
	assert_int_equal(channel->readers[2].lag_bytes, 64 * (4 + 5));
	assert_int_equal(channel->readers[2].waits, 11);
	assert_int_equal(channel->readers[2].wakes, 12);
	assert_int_equal(channel->readers[2].blocked_ns, 13);
	tnd_stat_free(stat);
	fake_close(&fake);
}

static void test_figures(void **state)
{
	(void)state;
	check_figures(0, 0);
	check_figures(UINT32_MAX - 1u, UINT32_MAX - 63u);
	check_figures(UINT64_MAX - 2, UINT64_MAX - 127);
}

static void test_places(void **state)
{
	static const struct {
		uint32_t place, seen;
	} cases[] = {{TND__PLACE_LEFT, TND_READER_LEFT},
		     {TND__PLACE_DEAD, TND_READER_DEAD},
		     {TND__PLACE_EVICTED, TND_READER_EVICTED}};
	const struct tnd_stat_channel *channel;
	struct tnd_stat *stat;
	struct fake fake;

	(void)state;
	fake_make(&fake, "stat-places", 0);
	fake_send(&fake, 64);
	for (size_t i = 0; i < 3; i++) {
		fake_seat(&fake, 0, 1, cases[i].place, 0);
		stat = read_stat();
		channel = find(stat, "stat-places");
		assert_int_equal(channel->reader_count, 1);
		assert_int_equal(channel->readers[0].state, cases[i].seen);
		assert_int_equal(channel->readers[0].lag_objects, 0); /* nothing is held for it */
		assert_int_equal(channel->used_objects, 0);
		tnd_stat_free(stat);
	}
	/* The writer has not noticed yet. */
	fake_seat(&fake, 0, 1, TND__PLACE_LIVE, 0);
	STORE(fake.control->places[0].left, 1);
	STORE(fake.header->closed, TND__CLOSED);
	stat = read_stat();
	channel = find(stat, "stat-places");
	assert_int_equal(channel->readers[0].state, TND_READER_LEFT);
	assert_int_equal(channel->closed, 1);
	tnd_stat_free(stat);
	fake_close(&fake);
}

/* -- processes -- */

static uint32_t reader_state(void)
{
	struct tnd_stat *stat = read_stat();
	const struct tnd_stat_channel *channel = find(stat, "stat-peers");
	uint32_t seen;

	assert_non_null(channel);
	assert_int_equal(channel->writer_state, TND_READER_ALIVE);
	seen = channel->readers[0].state;
	tnd_stat_free(stat);
	return seen;
}

/* A reader, by its process: alive, stopped, a zombie, gone. */
static void test_reader_process(void **state)
{
	struct child child;
	struct fake fake;
	int status;
	char byte;

	(void)state;
	fake_make(&fake, "stat-peers", 0);
	child = start(only_live, NULL);
	wait_said(&child, &byte, 1);
	fake_seat(&fake, 0, 0, TND__PLACE_LIVE, (uint32_t)child.pid);
	assert_int_equal(reader_state(), TND_READER_ALIVE);
	kill(child.pid, SIGSTOP);
	assert_int_equal(waitpid(child.pid, &status, WUNTRACED), child.pid);
	assert_int_equal(reader_state(), TND_READER_STOPPED);
	kill(child.pid, SIGKILL);
	siginfo_t info;
	assert_int_equal(waitid(P_PID, (id_t)child.pid, &info, WEXITED | WNOWAIT), 0);
	assert_int_equal(reader_state(), TND_READER_DEAD);
	finish(&child, 0);
	assert_int_equal(reader_state(), TND_READER_DEAD);
	fake_close(&fake);
}

static uint32_t writer_state(const char *name)
{
	struct tnd_stat *stat = read_stat();
	const struct tnd_stat_channel *channel = find(stat, name);
	uint32_t seen = channel ? channel->writer_state : UINT32_MAX;

	tnd_stat_free(stat);
	return seen;
}

/* A writer in another process: its segments are opened and closed; gone with it. */
static void test_writer_process(void **state)
{
	struct child child = start(make_and_live, (void *)(uintptr_t) "stat-writer");
	unsigned int before = fd_count();
	int status;
	char byte;

	(void)state;
	wait_said(&child, &byte, 1);
	assert_int_equal(writer_state("stat-writer"), TND_READER_ALIVE);
	kill(child.pid, SIGSTOP);
	assert_int_equal(waitpid(child.pid, &status, WUNTRACED), child.pid);
	assert_int_equal(writer_state("stat-writer"), TND_READER_STOPPED);
	assert_int_equal(fd_count(), before);
	finish(&child, SIGKILL);
	assert_int_equal(writer_state("stat-writer"), UINT32_MAX);
}

/* The segments live on in a forked child of the writer, which is not the writer. */
static void test_forked_child_is_not_the_writer(void **state)
{
	struct fake fake;
	struct child child;
	char byte;

	(void)state;
	fake_make(&fake, "stat-forked", 0);
	child = start(only_live, NULL);
	wait_said(&child, &byte, 1);
	fake.header->writer_pid = (uint32_t)child.pid;
	assert_int_equal(writer_state("stat-forked"), TND_READER_ALIVE);
	fake.header->writer_pid = 1; /* has it not */
	assert_int_equal(writer_state("stat-forked"), TND_READER_DEAD);
	finish(&child, 0);
	fake_close(&fake);
}

/* A record lock on our own segment is still held after a look. */
static void test_own_locks_are_kept(void **state)
{
	struct flock lock = {.l_type = F_WRLCK, .l_start = 5, .l_len = 1};
	struct fake fake;
	pid_t pid;
	int status;

	(void)state;
	fake_make(&fake, "stat-locks", 0);
	assert_int_equal(fcntl(fake.control_fd, F_SETLK, &lock), 0);
	lock.l_type = F_WRLCK;
	assert_int_equal(fcntl(fake.data_fd, F_SETLK, &lock), 0);
	assert_int_equal(writer_state("stat-locks"), TND_READER_ALIVE);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		bool held = fcntl(fake.control_fd, F_GETLK, &lock) == 0 && lock.l_type == F_WRLCK;

		lock.l_type = F_WRLCK;
		held = held && fcntl(fake.data_fd, F_GETLK, &lock) == 0 && lock.l_type == F_WRLCK;
		_exit(held ? 0 : 1);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	fake_close(&fake);
}

/* -- pools -- */

static void test_pools(void **state)
{
	const struct tnd_stat_pool *pool;
	char name[16] = "";
	struct tnd_stat *stat;
	struct fake fake;
	int first = memfd_create("tundish.slab", MFD_CLOEXEC);
	int second = memfd_create("tundish.slab", MFD_CLOEXEC);
	int again = dup(second);

	(void)state;
	assert_true(first >= 0 && second >= 0 && again >= 0);
	assert_int_equal(ftruncate(first, 4096), 0);
	assert_int_equal(ftruncate(second, 8192), 0);
	fake_make(&fake, "stat-pools", 0);
	fake_seat(&fake, 0, 5, TND__PLACE_LIVE, 0);
	fake_seat(&fake, 1, 6, TND__PLACE_LIVE, 0);
	STORE(fake.header->slabs[3].bytes, 1000);
	STORE(fake.header->slabs[9].bytes, 500);
	STORE(fake.control->leases[0][3], 2);
	STORE(fake.control->leases[0][4], 9); /* no such slab */
	STORE(fake.control->leases[1][3], 1);
	stat = read_stat();
	pool = find_pool(stat, "stat-pools", getpid());
	assert_non_null(pool);
	assert_int_equal(pool->slab_bytes, 1500);
	assert_int_equal(pool->slabs, 2);
	assert_int_equal(pool->live, 1);
	assert_int_equal(pool->lease_count, 2);
	assert_int_equal(pool->leases[0].rank, 5);
	assert_int_equal(pool->leases[0].count, 2);
	assert_int_equal(pool->leases[1].rank, 6);
	assert_int_equal(pool->leases[1].count, 1);
	prctl(PR_GET_NAME, name);
	pool = find_pool(stat, name, getpid());
	assert_non_null(pool);
	assert_int_equal(pool->slabs, 2);
	assert_int_equal(pool->slab_bytes, 4096 + 8192);
	tnd_stat_free(stat);
	fake_close(&fake);
	close(first);
	close(second);
	close(again);
}

/* -- hostile -- */

/* Each is one figure that no working writer leaves; the channel is left out, or cut to limits. */
static void test_refused(void **state)
{
	struct fake fake;
	struct tnd__data_header good;

	(void)state;
	fake_make(&fake, "stat-refused", 0);
	memcpy(&good, fake.header, sizeof(good));
#define REFUSED(change)                                                           \
	do {                                                                      \
		fake.header->change;                                              \
		assert_int_equal(writer_state("stat-refused"), UINT32_MAX);       \
		memcpy(fake.header, &good, sizeof(good));                         \
		assert_int_equal(writer_state("stat-refused"), TND_READER_ALIVE); \
	} while (0)
	REFUSED(magic ^= 1);
	REFUSED(version = 2);
	REFUSED(place_count = 0);
	REFUSED(place_count = 65);
	REFUSED(id[0] ^= 1);
	REFUSED(max_bytes = 0);
	REFUSED(max_bytes = UINT64_MAX);
	REFUSED(arena_bytes = UINT64_MAX);
	REFUSED(max_objects = 0);
	REFUSED(max_objects = 9);
	REFUSED(slot_count = 0);
	REFUSED(slot_count = 12);
	REFUSED(slot_count = UINT64_C(1) << 21);
	REFUSED(slot_count = UINT64_C(1) << 20); /* beyond the file */
	REFUSED(descriptor_offset = 0);
	REFUSED(descriptor_offset = UINT64_MAX - 31);
	fake.control->magic ^= 1;
	assert_int_equal(writer_state("stat-refused"), UINT32_MAX);
	fake.control->magic ^= 1;
	assert_int_equal(ftruncate(fake.control_fd, 4096), 0);
	assert_int_equal(writer_state("stat-refused"), UINT32_MAX);
	fake_close(&fake);
}

static void test_cut_to_limits(void **state)
{
	const struct tnd_stat_channel *channel;
	struct tnd_stat *stat;
	struct fake fake;

	(void)state;
	fake_make(&fake, "stat-cut", 100);
	fake_seat(&fake, 0, 0, TND__PLACE_LIVE, UINT32_MAX);
	fake_seat(&fake, 1, 1, TND__PLACE_LIVE, 0);
	fake_seat(&fake, 2, 2, 77, 0);
	fake_send(&fake, 64);
	STORE(fake.control->places[0].cursor, 5);     /* released more than there is to hold */
	STORE(fake.control->places[1].cursor, 99999); /* what was never sent */
	STORE(fake.control->high_bytes, UINT64_MAX);
	STORE(fake.control->high_objects, UINT64_MAX);
	STORE(fake.control->blocked_ns, UINT64_MAX);
	STORE(fake.control->blocked_since_ns, 1);
	STORE(fake.control->places[0].blocked_since_ns, INT64_MAX);
	memcpy(fake.header->name, "stat-cut\0\033[2J", 12);
	stat = read_stat();
	channel = find(stat, "stat-cut");
	assert_non_null(channel);
	assert_int_equal(channel->reader_count, 2);
	assert_int_equal(channel->used_objects, 8);
	assert_int_equal(channel->readers[0].lag_objects, 8);
	assert_int_equal(channel->readers[1].lag_objects, 0);
	assert_int_equal(channel->readers[0].blocked_ns, 0);
	assert_int_equal(channel->high_bytes, 65536);
	assert_int_equal(channel->high_objects, 8);
	assert_true(channel->writer_blocked_ns == UINT64_MAX);
	tnd_stat_free(stat);
	/* No NUL, and characters that steer a terminal. */
	memset(fake.header->name, '\033', sizeof(fake.header->name));
	stat = read_stat();
	for (size_t i = 0; i < stat->channel_count; i++)
		assert_null(strchr(stat->channels[i].name, '\033'));
	tnd_stat_free(stat);
	fake_close(&fake);
}

/* Two data segments with one id: the copy is not counted. */
static void test_copies(void **state)
{
	struct fake fake, copy;
	struct tnd_stat *stat;
	size_t own = 0;

	(void)state;
	fake_make(&fake, "stat-copy", 0);
	fake_make(&copy, "stat-copy", 0);
	memcpy(copy.header->id, fake.header->id, sizeof(fake.header->id));
	memset(copy.control->id, 0, sizeof(copy.control->id));
	stat = read_stat();
	for (size_t i = 0; i < stat->channel_count; i++)
		own += strcmp(stat->channels[i].name, "stat-copy") == 0 &&
		       stat->channels[i].pid == getpid();
	assert_int_equal(own, 1);
	tnd_stat_free(stat);
	fake_close(&fake);
	fake_close(&copy);
}

/* Random words over a good channel: whatever comes, it stays inside the limits. */
static void test_random(void **state)
{
	const char *given = getenv("TND_SEED");
	unsigned seed = given ? (unsigned)atoi(given) : (unsigned)tnd__now_ns();
	struct fake fake;

	(void)state;
	print_message("TND_SEED=%u\n", seed);
	srand(seed);
	for (int round = 0; round < 60; round++) {
		struct tnd_stat *stat;
		int changes = 1 + rand() % 200;

		fake_make(&fake, "stat-random", (uint64_t)rand());
		for (int i = 0; i < 4; i++)
			fake_seat(&fake, (uint32_t)i, (uint32_t)i, TND__PLACE_LIVE, 0);
		for (int i = 0; i < 6; i++)
			fake_send(&fake, 64);
		while (changes--) {
			bool data = rand() % 2;
			size_t bytes = data ? 2 * TND__HEADER_BYTES : sizeof(*fake.control);
			unsigned char *at =
				data ? (unsigned char *)fake.header : (unsigned char *)fake.control;
			/* The checks at the beginning are tested above. */
			size_t from = data ? 120 : 64;

			at[from + (size_t)rand() % (bytes - from)] = (unsigned char)rand();
		}
		stat = read_stat();
		for (size_t i = 0; i < stat->channel_count; i++) {
			const struct tnd_stat_channel *channel = &stat->channels[i];

			assert_true(channel->used_bytes <= channel->max_bytes);
			assert_true(channel->used_objects <= channel->max_objects);
			assert_true(channel->high_bytes <= channel->max_bytes);
			assert_true(channel->reader_count <= TND_CHANNEL_READERS_MAX);
			assert_true(strlen(channel->name) < TND_CHANNEL_NAME_MAX);
		}
		tnd_stat_free(stat);
		fake_close(&fake);
	}
}

/* -- lack -- */

static void test_no_descriptors(void **state)
{
	unsigned int before = fd_count();
	struct rlimit limit, low;
	struct tnd_stat *stat;

	(void)state;
	tnd_stat_free(NULL);
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
	low = limit;
	low.rlim_cur = 3;
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
	assert_int_equal(tnd_stat_read(&stat), -EMFILE);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
	assert_int_equal(fd_count(), before);
}

/* Linked with --wrap: allocation number `fail_at` from now on fails, once. */
static long fail_at = -1;

void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__real_reallocarray(void *old, size_t count, size_t bytes);
void *__wrap_reallocarray(void *old, size_t count, size_t bytes);

static bool fails(void)
{
	return fail_at >= 0 && fail_at-- == 0;
}

void *__wrap_calloc(size_t count, size_t bytes)
{
	return fails() ? NULL : __real_calloc(count, bytes);
}

void *__wrap_reallocarray(void *old, size_t count, size_t bytes)
{
	return fails() ? NULL : __real_reallocarray(old, count, bytes);
}

static void test_no_memory(void **state)
{
	int slab = memfd_create("tundish.slab", MFD_CLOEXEC), failures = 0, rc;
	unsigned int before;
	struct tnd__live *live;
	struct tnd_stat *stat;
	struct fake fake;

	(void)state;
	assert_int_equal(tnd__live_open(TND__LIVE_ALONE, 0, &live), 0);
	fake_make(&fake, "stat-memory", 0);
	fake_seat(&fake, 0, 0, TND__PLACE_LIVE, 0);
	STORE(fake.header->slabs[0].bytes, 4096);
	before = fd_count();
	for (;; failures++) {
		fail_at = failures;
		rc = tnd_stat_read(&stat);
		if (fail_at >= 0) /* there were not so many */
			break;
		assert_int_equal(rc, -ENOMEM);
		assert_int_equal(fd_count(), before);
	}
	fail_at = -1;
	assert_int_equal(rc, 0);
	assert_non_null(find(stat, "stat-memory"));
	assert_true(stat->load_count > 0);
	tnd_stat_free(stat);
	assert_true(failures >= 9);
	fake_close(&fake);
	tnd__live_close(live);
	close(slab);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_figures),
		cmocka_unit_test(test_places),
		cmocka_unit_test(test_reader_process),
		cmocka_unit_test(test_writer_process),
		cmocka_unit_test(test_forked_child_is_not_the_writer),
		cmocka_unit_test(test_own_locks_are_kept),
		cmocka_unit_test(test_pools),
		cmocka_unit_test(test_refused),
		cmocka_unit_test(test_cut_to_limits),
		cmocka_unit_test(test_copies),
		cmocka_unit_test(test_random),
		cmocka_unit_test(test_no_descriptors),
		cmocka_unit_test(test_no_memory),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
