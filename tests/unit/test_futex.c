/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_futex.c - what could break: a wait that sleeps past its deadline, or through a wake of either
 * word (also where the kernel has no futex_waitv); a word in a read-only mapping; a spin where one
 * processor is all there is, or one that never learns; a forked child that takes itself for its
 * parent. Sleepers are known to wait by what they return; every wait has a deadline.
 */
#include <errno.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include <tundish/group.h>

#include "base/base.h"
#include "base/futex.h"

#define MS INT64_C(1000000)
#define PATIENCE_NS INT64_C(20000000000)

static _Atomic uint32_t word, local;

static void test_deadline(void **state)
{
	(void)state;
	assert_true(tnd_deadline_in(INT64_MAX) == TND_NO_DEADLINE);
	assert_true(tnd_deadline_in(1000) > tnd__now_ns() - 1000000000);
	assert_true(tnd_deadline_in(INT64_MIN) < 0);
}

static int wait_one(int64_t deadline_ns)
{
	return tnd__futex_wait(&word, 0, deadline_ns);
}

static int wait_two(int64_t deadline_ns)
{
	return tnd__futex_wait_either(&word, 0, &local, 0, deadline_ns);
}

static void check_timeouts(int (*wait)(int64_t deadline_ns))
{
	int64_t begin_ns = tnd__now_ns();

	word = local = 0;
	assert_int_equal(wait(begin_ns + 70 * MS), -ETIMEDOUT);
	assert_true(tnd__now_ns() - begin_ns >= 70 * MS);
	assert_int_equal(wait(0), -ETIMEDOUT);
	assert_int_equal(wait(-5), -ETIMEDOUT);
	word = 1;
	assert_int_equal(wait(TND_NO_DEADLINE), 0);
	word = 0;
}

struct waker {
	pthread_t thread;
	_Atomic uint32_t *word;
	void (*wake)(const _Atomic uint32_t *word, int count);
	_Atomic bool done;
};

/* Wakes again and again: the sleeper may not have been asleep yet. The value never changes. */
static void *wake_until_done(void *arg)
{
	struct waker *waker = arg;

	while (!waker->done) {
		waker->wake(waker->word, 1);
		sched_yield();
	}
	return NULL;
}

static void check_woken(int (*wait)(int64_t deadline_ns), _Atomic uint32_t *which,
			void (*wake)(const _Atomic uint32_t *word, int count))
{
	struct waker waker = {.word = which, .wake = wake};

	word = local = 0;
	assert_int_equal(pthread_create(&waker.thread, NULL, wake_until_done, &waker), 0);
	assert_int_equal(wait(tnd__now_ns() + PATIENCE_NS), 0);
	waker.done = true;
	pthread_join(waker.thread, NULL);
}

static void test_wait(void **state)
{
	(void)state;
	check_timeouts(wait_one);
	check_woken(wait_one, &word, tnd__futex_wake);
}

static void test_wait_either(void **state)
{
	(void)state;
	check_timeouts(wait_two);
	check_woken(wait_two, &word, tnd__futex_wake);
	check_woken(wait_two, &local, tnd__futex_wake_local);
	word = 0;
	local = 1;
	assert_int_equal(wait_two(TND_NO_DEADLINE), 0);
}

static void *change_local(void *arg)
{
	(void)arg;
	/* After the look that the wait begins with, mostly: then the next slice finds it. */
	sched_yield();
	local = 1;
	return NULL;
}

/* The answer is remembered: nothing that needs futex_waitv comes after it. */
static void test_wait_in_slices(void **state)
{
#ifdef TND_FAILPOINTS
	pthread_t thread;
	int64_t begin_ns;

	(void)state;
	assert_int_equal(tnd__failpoints_set("base.waitv=ENOSYS"), 0);
	check_timeouts(wait_two);
	assert_int_equal(tnd__failpoints_set(NULL), 0);
	check_woken(wait_two, &word, tnd__futex_wake);
	word = local = 0;
	begin_ns = tnd__now_ns();
	assert_int_equal(pthread_create(&thread, NULL, change_local, NULL), 0);
	assert_int_equal(wait_two(begin_ns + PATIENCE_NS), 0);
	assert_int_equal(local, 1);
	assert_true(tnd__now_ns() - begin_ns < PATIENCE_NS / 2);
	pthread_join(thread, NULL);
#else
	(void)state;
	(void)change_local;
	skip();
#endif
}

static void test_read_only_mapping(void **state)
{
	int fd = memfd_create("tundish.test", MFD_CLOEXEC);
	struct waker waker = {.wake = tnd__futex_wake};
	_Atomic uint32_t *writable, *readable;

	(void)state;
	assert_int_equal(ftruncate(fd, 4096), 0);
	writable = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	readable = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
	assert_true(writable != MAP_FAILED && readable != MAP_FAILED);
	waker.word = writable;
	assert_int_equal(pthread_create(&waker.thread, NULL, wake_until_done, &waker), 0);
	assert_int_equal(tnd__futex_wait(readable, 0, tnd__now_ns() + PATIENCE_NS), 0);
	waker.done = true;
	pthread_join(waker.thread, NULL);
	assert_int_equal(tnd__futex_wait(readable, 0, tnd__now_ns() + 5 * MS), -ETIMEDOUT);
	munmap(writable, 4096);
	munmap(readable, 4096);
	close(fd);
}

static void test_spin(void **state)
{
	struct tnd__spin spin;
	cpu_set_t before, one;
	_Atomic uint64_t polled = 3;

	(void)state;
	assert_int_equal(sched_getaffinity(0, sizeof(before), &before), 0);
	tnd__spin_init(&spin, UINT64_MAX);
	assert_int_equal(tnd__spin_budget(&spin), 0);
	tnd__spin_learn(&spin, 1000);
	assert_int_equal(tnd__spin_budget(&spin), 0);
	tnd__spin_init(&spin, UINT64_MAX - 1);
	assert_true(tnd__spin_budget(&spin) > 0 || CPU_COUNT(&before) < 2);
	tnd__spin_learn(&spin, INT64_MAX);
	tnd__spin_learn(&spin, -1);
	assert_true(spin.period_ns >= 0);
	if (CPU_COUNT(&before) >= 2) {
		tnd__spin_init(&spin, 0);
		assert_int_equal(spin.limit_ns, 50000);
		assert_int_equal(tnd__spin_budget(&spin), 15000);
		for (int i = 0; i < 100; i++)
			tnd__spin_learn(&spin, 10000);
		assert_in_range(tnd__spin_budget(&spin), 33000, 35000);
		for (int i = 0; i < 100; i++)
			tnd__spin_learn(&spin, 40000);
		assert_int_equal(tnd__spin_budget(&spin), 50000);
		/* What comes once a second is not worth it; a few quick ones and it is again. */
		for (int i = 0; i < 100; i++)
			tnd__spin_learn(&spin, 1000000000);
		assert_int_equal(tnd__spin_budget(&spin), 15000);
		for (int i = 0; i < 16; i++)
			tnd__spin_learn(&spin, 10000);
		assert_true(tnd__spin_budget(&spin) > 20000);
	}
	for (int i = 0; i < 100; i++) {
		tnd__spin_pause(&polled, 3);
		tnd__spin_pause(&polled, 4);
		tnd__spin_pause(NULL, 0);
	}
	CPU_ZERO(&one);
	for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; cpu++)
		if (CPU_ISSET(cpu, &before))
			CPU_SET(cpu, &one);
	assert_int_equal(sched_setaffinity(0, sizeof(one), &one), 0);
	tnd__spin_init(&spin, 0);
	assert_int_equal(spin.limit_ns, 0);
	assert_int_equal(sched_setaffinity(0, sizeof(before), &before), 0);
}

static int status_of(pid_t pid)
{
	int status;

	assert_int_equal(waitpid(pid, &status, 0), pid);
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* Before any page was made. */
static void test_no_page(void **state)
{
	(void)state;
	assert_int_equal(tnd__forkmark(), 0);
#ifdef TND_FAILPOINTS
	assert_int_equal(tnd__failpoints_set("base.forkmark=ENOMEM"), 0);
	assert_int_equal(tnd__forkmark_init(), -ENOMEM);
	assert_int_equal(tnd__failpoints_set(NULL), 0);
	assert_int_equal(tnd__forkmark(), 0);
#endif
}

static void test_forkmark(void **state)
{
	uint64_t ours, childs, again;
	pid_t pid;

	(void)state;
	assert_int_equal(tnd__forkmark_init(), 0);
	assert_int_equal(tnd__forkmark_init(), 0);
	ours = tnd__forkmark();
	assert_int_not_equal(ours, 0);
	pid = fork();
	if (pid == 0) {
		childs = tnd__forkmark();
		again = tnd__forkmark();
		if (childs == ours || childs != again || childs == 0)
			_exit(1);
		pid = fork();
		if (pid == 0)
			_exit(tnd__forkmark() == ours || tnd__forkmark() == childs);
		_exit(status_of(pid) || tnd__forkmark() != childs);
	}
	assert_int_equal(status_of(pid), 0);
	/* Not by fork() of libc: no handler of it runs. */
	pid = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	if (pid == 0)
		syscall(SYS_exit_group, tnd__forkmark() == ours);
	assert_int_equal(status_of(pid), 0);
	assert_int_equal(tnd__forkmark(), ours);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_no_page),     cmocka_unit_test(test_forkmark),
		cmocka_unit_test(test_deadline),    cmocka_unit_test(test_wait),
		cmocka_unit_test(test_wait_either), cmocka_unit_test(test_read_only_mapping),
		cmocka_unit_test(test_spin),        cmocka_unit_test(test_wait_in_slices),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
