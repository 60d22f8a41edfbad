/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_live.c - what could break: a figure of a load that is not what its owner wrote; a name that
 * is half of one file and half of the next; a load that is shown although its owner is gone, or
 * twice; a page that makes no sense, or says so much that something overflows; one that others can
 * write to or cut; a descriptor left, or somebody else's closed. Shown by looks from outside at
 * pages of this process, of children that are stopped and killed, and at pages made by hand.
 */
#include <errno.h>
#include <fcntl.h>
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

#include "memory/live.h"
#include "support/fds.h"
#include "tundish/stat.h"

/* Other programs of this user may load too: ours are known by this. */
#define RANK 424242u

static void set(_Atomic uint64_t *counter, uint64_t value)
{
	atomic_store_explicit(counter, value, memory_order_relaxed);
}

static struct tnd__live *open_live(uint32_t role)
{
	struct tnd__live *live;

	assert_int_equal(tnd__live_open(role, RANK, &live), 0);
	return live;
}

/* Return: how many loads of this rank there are, the first into *ret_load. */
static size_t look(uint32_t rank, struct tnd_stat_load *ret_load)
{
	struct tnd_stat *stat;
	size_t count = 0;

	assert_int_equal(tnd_stat_read(&stat), 0);
	for (size_t i = 0; i < stat->load_count; i++) {
		assert_true(stat->loads[i].done_bytes <= stat->loads[i].total_bytes);
		assert_true(memchr(stat->loads[i].file, '\0', TND_STAT_FILE_MAX) != NULL);
		if (stat->loads[i].rank == rank && !count++)
			*ret_load = stat->loads[i];
	}
	tnd_stat_free(stat);
	return count;
}

/* Descriptor of the page; there is one. */
static int page_fd(void)
{
	char path[64], link[64];

	for (int fd = 0; fd < 1024; fd++) {
		ssize_t got;

		snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
		got = readlink(path, link, sizeof(link) - 1);
		if (got < 0)
			continue;
		link[got] = '\0';
		if (strcmp(link, "/memfd:tundish.load (deleted)") == 0)
			return fd;
	}
	fail_msg("no page is open");
	return -1;
}

/* -- figures -- */

static void test_figures(void **state)
{
	unsigned int before = fd_count(), maps = map_count("tundish.load");
	struct tnd__live *live = open_live(TND__LIVE_MEMBER);
	struct tnd__live_page *page = tnd__live_page(live);
	struct tnd_stat_load load;

	(void)state;
	assert_int_equal(look(RANK, &load), 1);
	assert_int_equal(load.pid, getpid());
	assert_int_equal(load.role, TND_STAT_LOAD_MEMBER);
	assert_int_equal(load.state, TND_READER_ALIVE);
	assert_int_equal(load.done_bytes, 0);
	assert_int_equal(load.total_bytes, 0);
	assert_string_equal(load.file, "");
	set(&page->done_bytes, 11);
	set(&page->total_bytes, UINT64_MAX);
	set(&page->charged_bytes, 33);
	set(&page->budget_bytes, 22); /* less: overruns are told as they are */
	set(&page->storage_bytes, 55);
	tnd__live_file(live, 3, "model-00004.safetensors");
	assert_int_equal(look(RANK, &load), 1);
	assert_int_equal(load.done_bytes, 11);
	assert_true(load.total_bytes == UINT64_MAX);
	assert_int_equal(load.charged_bytes, 33);
	assert_int_equal(load.budget_bytes, 22);
	assert_int_equal(load.storage_bytes, 55);
	assert_string_equal(load.file, "model-00004.safetensors");
	assert_int_equal(atomic_load_explicit(&page->file, memory_order_relaxed), 3);
	tnd__live_file(live, 4, "b");
	assert_int_equal(look(RANK, &load), 1);
	assert_string_equal(load.file, "b");
	tnd__live_close(live);
	assert_int_equal(look(RANK, &load), 0);
	assert_int_equal(fd_count(), before);
	assert_int_equal(map_count("tundish.load"), maps);
}

/* A reader has no rank, and stands last. */
static void test_reader(void **state)
{
	struct tnd__live *reader, *live = open_live(TND__LIVE_ALONE);
	struct tnd_stat *stat;
	size_t seen = 0;

	(void)state;
	assert_int_equal(tnd__live_open(TND__LIVE_READER, UINT32_MAX, &reader), 0);
	assert_int_equal(tnd_stat_read(&stat), 0);
	for (size_t i = 0; i < stat->load_count; i++) {
		const struct tnd_stat_load *load = &stat->loads[i];

		assert_true(i == 0 || stat->loads[i - 1].rank <= load->rank);
		if (load->pid != getpid())
			continue;
		if (!seen++) {
			assert_int_equal(load->rank, RANK);
			assert_int_equal(load->role, TND_STAT_LOAD_ALONE);
			continue;
		}
		assert_int_equal(load->role, TND_STAT_LOAD_READER);
		assert_int_equal(load->rank, TND_STAT_NO_RANK);
	}
	assert_int_equal(seen, 2);
	tnd_stat_free(stat);
	tnd__live_close(reader);
	tnd__live_close(live);
}

/* Names are cut between characters, and what steers a terminal is escaped. */
static void test_names(void **state)
{
	struct tnd__live *live = open_live(TND__LIVE_ALONE);
	struct tnd_stat_load load;
	char name[400];

	(void)state;
	memset(name, 'a', sizeof(name));
	name[TND__LIVE_NAME_BYTES - 1] = '\0';
	tnd__live_file(live, 0, name);
	assert_int_equal(look(RANK, &load), 1);
	assert_string_equal(load.file, name);
	/* A character of two bytes of which one has room. */
	memset(name, 'a', sizeof(name));
	memcpy(name + TND__LIVE_NAME_BYTES - 2, "\xc3\xa9", 3);
	tnd__live_file(live, 0, name);
	name[TND__LIVE_NAME_BYTES - 2] = '\0';
	assert_int_equal(look(RANK, &load), 1);
	assert_string_equal(load.file, name);
	/* Nothing but what would follow a character. */
	memset(name, 0x80, sizeof(name) - 1);
	name[sizeof(name) - 1] = '\0';
	tnd__live_file(live, 0, name);
	assert_int_equal(look(RANK, &load), 1);
	assert_string_equal(load.file, "");
	tnd__live_file(live, 0, "\033[2J\n\xff");
	assert_int_equal(look(RANK, &load), 1);
	assert_null(strchr(load.file, '\033'));
	assert_null(strchr(load.file, '\n'));
	assert_non_null(strstr(load.file, "[2J"));
	tnd__live_close(live);
}

static _Atomic bool renaming;

static void *rename_on(void *arg)
{
	char a[200], b[250];

	memset(a, 'a', sizeof(a));
	memset(b, 'b', sizeof(b));
	a[sizeof(a) - 1] = b[sizeof(b) - 1] = '\0';
	while (atomic_load_explicit(&renaming, memory_order_relaxed)) {
		tnd__live_file(arg, 0, a);
		tnd__live_file(arg, 1, b);
	}
	return NULL;
}

/* Whatever is seen is one of the names, or none. */
static void test_name_that_changes(void **state)
{
	struct tnd__live *live = open_live(TND__LIVE_ALONE);
	struct tnd_stat_load load;
	pthread_t thread;

	(void)state;
	atomic_store_explicit(&renaming, true, memory_order_relaxed);
	assert_int_equal(pthread_create(&thread, NULL, rename_on, live), 0);
	for (int i = 0; i < 100; i++) {
		size_t bytes;

		assert_int_equal(look(RANK, &load), 1);
		bytes = strlen(load.file);
		assert_true(bytes == 0 || bytes == 199 || bytes == 249);
		assert_int_equal(strspn(load.file, bytes == 199 ? "a" : "b"), bytes);
	}
	atomic_store_explicit(&renaming, false, memory_order_relaxed);
	pthread_join(thread, NULL);
	assert_int_equal(look(RANK, &load), 1);
	assert_int_equal(strlen(load.file), 249);
	tnd__live_close(live);
}

/* -- processes -- */

/* A child that has opened a page, or inherited one, and lives until it is killed. */
static pid_t start(bool opens)
{
	struct tnd__live *live;
	int said[2];
	char byte;
	pid_t pid;

	assert_int_equal(pipe2(said, O_CLOEXEC), 0);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (opens && tnd__live_open(TND__LIVE_ALONE, RANK, &live) < 0)
			_exit(1);
		if (write(said[1], "r", 1) != 1)
			_exit(1);
		for (;;)
			pause();
	}
	close(said[1]);
	assert_int_equal(read(said[0], &byte, 1), 1);
	close(said[0]);
	return pid;
}

static void end(pid_t pid)
{
	int status;

	kill(pid, SIGKILL);
	assert_int_equal(waitpid(pid, &status, 0), pid);
}

/* Shown while it is stopped, and gone with it. */
static void test_owner(void **state)
{
	unsigned int before = fd_count();
	struct tnd_stat_load load;
	pid_t pid = start(true);
	int status;

	(void)state;
	assert_int_equal(look(RANK, &load), 1);
	assert_int_equal(load.pid, pid);
	assert_int_equal(load.state, TND_READER_ALIVE);
	kill(pid, SIGSTOP);
	assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
	assert_int_equal(look(RANK, &load), 1);
	assert_int_equal(load.state, TND_READER_STOPPED);
	assert_int_equal(fd_count(), before);
	end(pid);
	assert_int_equal(look(RANK, &load), 0);
}

/* A forked child has the page too: it is counted once, and does not outlive its owner. */
static void test_forked_child(void **state)
{
	struct tnd__live *live = open_live(TND__LIVE_ALONE);
	struct tnd_stat_load load;
	pid_t pid = start(false);

	(void)state;
	assert_int_equal(look(RANK, &load), 1);
	assert_int_equal(load.pid, getpid());
	tnd__live_close(live);
	assert_int_equal(look(RANK, &load), 0);
	end(pid);
}

/* -- hostile -- */

/* Nobody who finds it can write to it or cut it. */
static void test_sealed(void **state)
{
	struct tnd__live *live = open_live(TND__LIVE_ALONE);
	char path[64];
	int fd;

	(void)state;
	snprintf(path, sizeof(path), "/proc/self/fd/%d", page_fd());
	fd = open(path, O_RDWR | O_CLOEXEC);
	assert_true(fd >= 0);
	assert_int_equal(ftruncate(fd, 0), -1);
	assert_int_equal(ftruncate(fd, 8192), -1);
	assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
	assert_int_equal(pwrite(fd, "x", 1, 0), -1);
	assert_ptr_equal(mmap(NULL, TND__LIVE_BYTES, PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
	close(fd);
	tnd__live_close(live);
}

/* A page of this process that is shown. */
static void make_good(struct tnd__live_page *page)
{
	memset(page, 0, sizeof(*page));
	set(&page->magic, TND__LIVE_MAGIC);
	page->version = TND__LIVE_VERSION;
	page->pid = (int32_t)getpid();
	page->rank = RANK;
	set(&page->done_bytes, 5);
	set(&page->total_bytes, 9);
	memset(page->name, 'x', 1);
}

/* Return: how many loads of this rank are seen with this page. */
static size_t look_at(const struct tnd__live_page *page, off_t bytes, struct tnd_stat_load *ret)
{
	int fd = memfd_create("tundish.load", MFD_CLOEXEC);
	size_t count;

	assert_true(fd >= 0);
	assert_int_equal(pwrite(fd, page, sizeof(*page), 0), sizeof(*page));
	assert_int_equal(ftruncate(fd, bytes), 0);
	count = look(RANK, ret);
	close(fd);
	return count;
}

/* Each is one figure that no working owner leaves. */
static void test_refused(void **state)
{
	struct tnd_stat_load load;
	struct tnd__live_page page;

	(void)state;
	make_good(&page);
	assert_int_equal(look_at(&page, TND__LIVE_BYTES, &load), 1);
	assert_string_equal(load.file, "x");
	assert_int_equal(look_at(&page, TND__LIVE_BYTES - 1, &load), 0);
	assert_int_equal(look_at(&page, TND__LIVE_BYTES + 1, &load), 0);
	assert_int_equal(look_at(&page, 0, &load), 0);
#define REFUSED(change)                                                      \
	do {                                                                 \
		page.change;                                                 \
		assert_int_equal(look_at(&page, TND__LIVE_BYTES, &load), 0); \
		make_good(&page);                                            \
	} while (0)
	REFUSED(magic ^= 1);
	REFUSED(version = 2);
	REFUSED(role = 3);
	REFUSED(role = UINT32_MAX);
	REFUSED(pid = 0);
	REFUSED(pid = -1);
	REFUSED(pid = 1); /* has it not */
}

static void test_cut_to_limits(void **state)
{
	struct tnd_stat_load load;
	struct tnd__live_page page;

	(void)state;
	make_good(&page);
	set(&page.done_bytes, UINT64_MAX);
	assert_int_equal(look_at(&page, TND__LIVE_BYTES, &load), 1);
	assert_int_equal(load.done_bytes, 9);
	/* Its owner died, or will for ever be, in the middle of a name. */
	page.generation = 7;
	assert_int_equal(look_at(&page, TND__LIVE_BYTES, &load), 1);
	assert_string_equal(load.file, "");
	/* No NUL, and escapes that need more room than there is. */
	page.generation = 8;
	memset(page.name, '\033', sizeof(page.name));
	assert_int_equal(look_at(&page, TND__LIVE_BYTES, &load), 1);
	assert_null(strchr(load.file, '\033'));
}

/* Random bytes behind what was checked above; look() sees that limits hold. */
static void test_random(void **state)
{
	const char *given = getenv("TND_SEED");
	unsigned seed = given ? (unsigned)atoi(given) : (unsigned)tnd__now_ns();
	struct tnd_stat_load load;

	(void)state;
	print_message("TND_SEED=%u\n", seed);
	srand(seed);
	for (int round = 0; round < 100; round++) {
		struct tnd__live_page page;
		unsigned char *bytes = (unsigned char *)&page;

		make_good(&page);
		for (size_t i = offsetof(struct tnd__live_page, done_bytes); i < sizeof(page); i++)
			bytes[i] = (unsigned char)rand();
		assert_int_equal(look_at(&page, TND__LIVE_BYTES, &load), 1);
	}
}

/* -- lack -- */

static void test_lack(void **state)
{
	unsigned int before = fd_count();
	struct rlimit limit, low;
	struct tnd__live *live = NULL;

	(void)state;
	assert_null(tnd__live_page(NULL));
	tnd__live_file(NULL, 0, "x");
	tnd__live_close(NULL);
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
	low = limit;
	low.rlim_cur = 3;
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
	assert_int_equal(tnd__live_open(TND__LIVE_ALONE, RANK, &live), -EMFILE);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
	/* The kernel would send a signal that kills. */
	assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
	low = limit;
	low.rlim_cur = TND__LIVE_BYTES - 1;
	assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
	assert_int_equal(tnd__live_open(TND__LIVE_ALONE, RANK, &live), TND_E_HEADROOM);
	assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
#ifdef TND_FAILPOINTS
	assert_int_equal(tnd__failpoints_set("mem.alloc=ENOMEM"), 0);
	assert_int_equal(tnd__live_open(TND__LIVE_ALONE, RANK, &live), -ENOMEM);
	assert_int_equal(tnd__failpoints_set("live.memfd=EPERM"), 0);
	assert_int_equal(tnd__live_open(TND__LIVE_ALONE, RANK, &live), -EPERM);
	assert_int_equal(tnd__failpoints_set(NULL), 0);
#endif
	assert_null(live);
	assert_int_equal(fd_count(), before);
}

/* A program that closes all that it does not know, and opens something in its place. */
static void test_number_that_was_taken(void **state)
{
	struct tnd__live *live = open_live(TND__LIVE_ALONE);
	int fd = page_fd(), other = open("/dev/null", O_RDONLY | O_CLOEXEC);
	struct tnd_stat_load load;

	(void)state;
	assert_int_equal(dup3(other, fd, O_CLOEXEC), fd);
	assert_int_equal(look(RANK, &load), 0);
	tnd__live_file(live, 0, "x");
	tnd__live_close(live);
	assert_true(fcntl(fd, F_GETFD) >= 0);
	close(fd);
	close(other);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_figures),       cmocka_unit_test(test_reader),
		cmocka_unit_test(test_names),         cmocka_unit_test(test_name_that_changes),
		cmocka_unit_test(test_owner),         cmocka_unit_test(test_forked_child),
		cmocka_unit_test(test_sealed),        cmocka_unit_test(test_refused),
		cmocka_unit_test(test_cut_to_limits), cmocka_unit_test(test_random),
		cmocka_unit_test(test_lack),          cmocka_unit_test(test_number_that_was_taken),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
