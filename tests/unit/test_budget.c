/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_budget.c - what could break: the bound is passed without being counted; a wake-up is lost (a waiter stays although its bytes are
 * free); a small charge overtakes a large one; a waiter that gives up leaves its bytes or blocks those behind it; a key counts twice or is
 * refunded too early. Each case drives the account into the state and compares all its figures; threads are known to wait
 * when `waiters` says so, and every wait has a deadline, so that a lost wake-up fails instead of hanging.
 */
#include <errno.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "memory/memory.h"

#define PATIENCE_NS (INT64_C(20) * 1000000000)

static struct tnd_budget_stats stats_of(struct tnd_budget *budget)
{
	struct tnd_budget_stats stats = {.struct_bytes = sizeof(stats)};

	assert_int_equal(tnd_budget_stats(budget, &stats), 0);
	return stats;
}

static void await_waiters(struct tnd_budget *budget, uint32_t count)
{
	int64_t end_ns = tnd__now_ns() + PATIENCE_NS;

	while (stats_of(budget).waiters != count) {
		assert_true(tnd__now_ns() < end_ns);
		sched_yield();
	}
}

static struct tnd_budget *budget_of(uint64_t bound)
{
	struct tnd_budget *budget;

	assert_int_equal(tnd_budget_create(bound, &budget), 0);
	return budget;
}

static int charge(struct tnd_budget *budget, uint64_t bytes, uint32_t flags)
{
	struct tnd_charge_opts opts = {
		.struct_bytes = sizeof(opts),
		.flags = flags,
		.deadline_ns = tnd__now_ns() + PATIENCE_NS,
	};

	return tnd_budget_charge(budget, bytes, &opts);
}

/* -- a charge in a thread of its own -- */

struct charger {
	struct tnd_budget *budget;
	struct tnd_charge_opts opts;
	uint64_t bytes, key;
	bool keyed;
	int rc;
	int order; /* when it went on, from 1 */
	int *counter;
	pthread_t thread;
};

static void *charger_main(void *arg)
{
	struct charger *charger = arg;

	charger->rc = charger->keyed
			      ? tnd_budget_charge_key(charger->budget, charger->key, charger->bytes,
						      &charger->opts)
			      : tnd_budget_charge(charger->budget, charger->bytes, &charger->opts);
	if (charger->counter)
		charger->order = __atomic_add_fetch(charger->counter, 1, __ATOMIC_SEQ_CST);
	return NULL;
}

static void start(struct charger *charger, struct tnd_budget *budget, uint64_t bytes,
		  uint32_t flags)
{
	charger->budget = budget;
	charger->bytes = bytes;
	charger->opts.struct_bytes = sizeof(charger->opts);
	charger->opts.flags = flags;
	if (!charger->opts.deadline_ns)
		charger->opts.deadline_ns = tnd__now_ns() + PATIENCE_NS;
	assert_int_equal(pthread_create(&charger->thread, NULL, charger_main, charger), 0);
}

static int finish(struct charger *charger)
{
	assert_int_equal(pthread_join(charger->thread, NULL), 0);
	return charger->rc;
}

/* -- cases -- */

static void test_arguments(void **state)
{
	struct tnd_charge_opts opts = {.struct_bytes = sizeof(opts)};
	struct tnd_budget_stats stats = {.struct_bytes = 3};
	struct tnd_budget *budget = NULL;

	(void)state;
	assert_int_equal(tnd_budget_create(0, &budget), TND_E_INVALID);
	budget = budget_of(100);
	opts.flags = 8;
	assert_int_equal(tnd_budget_charge(budget, 1, &opts), TND_E_INVALID);
	opts.flags = 0;
	opts.struct_bytes = sizeof(opts) + 8;
	assert_int_equal(tnd_budget_charge(budget, 1, &opts), TND_E_INVALID);
	assert_int_equal(tnd_budget_charge_key(budget, 1, 1, &opts), TND_E_INVALID);
	assert_int_equal(tnd_budget_stats(budget, &stats), TND_E_INVALID);
	assert_int_equal(tnd_budget_refund_key(budget, 1), -ENOENT);
	assert_int_equal(tnd_budget_charge(budget, 0, NULL), 0);
	assert_int_equal(stats_of(budget).charged_bytes, 0);
	tnd_budget_close(budget);
	tnd_budget_close(NULL);
}

static void test_counts(void **state)
{
	struct tnd_budget *budget = budget_of(100);
	struct tnd_budget_stats stats;

	(void)state;
	assert_int_equal(charge(budget, 101, 0), TND_E_BUDGET);
	assert_int_equal(charge(budget, 101, TND_CHARGE_F_TRY), TND_E_BUDGET);
	assert_int_equal(charge(budget, UINT64_MAX, TND_CHARGE_F_OVERRUN), TND_E_BUDGET);
	assert_int_equal(charge(budget, 60, 0), 0);
	assert_int_equal(charge(budget, 40, 0), 0);
	assert_int_equal(charge(budget, 1, TND_CHARGE_F_TRY), -EAGAIN);
	tnd_budget_refund(budget, 40);
	stats = stats_of(budget);
	assert_int_equal(stats.bound_bytes, 100);
	assert_int_equal(stats.charged_bytes, 60);
	assert_int_equal(stats.peak_bytes, 100);
	assert_int_equal(stats.waits, 0);
	assert_int_equal(stats.overruns, 0);
	tnd_budget_reset(budget);
	assert_int_equal(stats_of(budget).peak_bytes, 60);
	tnd_budget_refund(budget, 60);
	tnd_budget_close(budget);
}

static void test_overrun(void **state)
{
	struct tnd_budget *budget = budget_of(100);
	struct tnd_budget_stats stats;

	(void)state;
	assert_int_equal(charge(budget, 90, TND_CHARGE_F_OVERRUN), 0);
	assert_int_equal(stats_of(budget).overruns, 0);
	assert_int_equal(charge(budget, 30, TND_CHARGE_F_OVERRUN), 0);
	assert_int_equal(charge(budget, 200, TND_CHARGE_F_OVERRUN), 0);
	stats = stats_of(budget);
	assert_int_equal(stats.charged_bytes, 320);
	assert_int_equal(stats.overruns, 2);
	assert_int_equal(stats.overrun_bytes, 20 + 220);
	assert_int_equal(charge(budget, 1, TND_CHARGE_F_TRY), -EAGAIN);
	tnd_budget_reset(budget);
	stats = stats_of(budget);
	assert_int_equal(stats.overruns + stats.overrun_bytes + stats.wait_ns, 0);
	tnd_budget_refund(budget, 320);
	tnd_budget_close(budget);
}

static void test_alone(void **state)
{
	struct tnd_budget *budget = budget_of(100);
	struct charger alone = {0}, small = {0};
	struct tnd_budget_stats stats;

	(void)state;
	assert_int_equal(charge(budget, 10, 0), 0);
	assert_int_equal(charge(budget, 20, 0), 0);
	start(&alone, budget, 150, TND_CHARGE_F_ALONE);
	await_waiters(budget, 1);
	start(&small, budget, 5, 0); /* would fit, but came later */
	await_waiters(budget, 2);
	tnd_budget_refund(budget, 10);
	assert_int_equal(stats_of(budget).waiters, 2);
	tnd_budget_refund(budget, 20);
	assert_int_equal(finish(&alone), 0);
	stats = stats_of(budget);
	assert_int_equal(stats.charged_bytes, 150);
	assert_int_equal(stats.overruns, 1);
	assert_int_equal(stats.overrun_bytes, 50);
	assert_int_equal(stats.waiters, 1);
	tnd_budget_refund(budget, 150);
	assert_int_equal(finish(&small), 0);
	assert_int_equal(stats_of(budget).charged_bytes, 5);
	/* Within the bound the flag changes nothing. */
	assert_int_equal(charge(budget, 95, TND_CHARGE_F_ALONE), 0);
	assert_int_equal(stats_of(budget).overruns, 1);
	tnd_budget_refund(budget, 100);
	tnd_budget_close(budget);
}

static void test_order(void **state)
{
	struct tnd_budget *budget = budget_of(100);
	struct charger chargers[4];
	/* The second of these would fit long before the first. */
	static const uint64_t bytes[4] = {90, 10, 60, 40};
	int counter = 0;

	(void)state;
	memset(chargers, 0, sizeof(chargers));
	assert_int_equal(charge(budget, 100, 0), 0);
	for (uint32_t i = 0; i < 4; i++) {
		chargers[i].counter = &counter;
		start(&chargers[i], budget, bytes[i], 0);
		await_waiters(budget, i + 1);
	}
	assert_int_equal(charge(budget, 1, TND_CHARGE_F_TRY), -EAGAIN);
	tnd_budget_refund(budget, 80);
	assert_int_equal(stats_of(budget).waiters, 4);
	assert_int_equal(charge(budget, 1, TND_CHARGE_F_TRY), -EAGAIN);
	tnd_budget_refund(budget, 10);
	assert_int_equal(finish(&chargers[0]), 0);
	assert_int_equal(stats_of(budget).waiters, 3);
	tnd_budget_refund(budget, 10);
	assert_int_equal(finish(&chargers[1]), 0);
	tnd_budget_refund(budget, 100);
	assert_int_equal(finish(&chargers[2]), 0);
	assert_int_equal(finish(&chargers[3]), 0);
	assert_int_equal(chargers[0].order, 1);
	assert_int_equal(chargers[1].order, 2);
	assert_int_equal(stats_of(budget).peak_bytes, 100);
	assert_int_equal(stats_of(budget).waits, 4);
	assert_true(stats_of(budget).wait_ns > 0);
	tnd_budget_refund(budget, 100);
	tnd_budget_close(budget);
}

static void test_deadline(void **state)
{
	struct tnd_budget *budget = budget_of(100);
	struct charger late = {0}, behind = {0};
	struct tnd_charge_opts past = {.struct_bytes = sizeof(past), .deadline_ns = -5};
	int64_t begin_ns = tnd__now_ns();

	(void)state;
	assert_int_equal(charge(budget, 50, 0), 0);
	assert_int_equal(tnd_budget_charge(budget, 60, &past), TND_E_DEADLINE);
	assert_int_equal(tnd_budget_charge(budget, 50, &past), 0); /* fits: no wait, no deadline */
	tnd_budget_refund(budget, 50);
	late.opts.deadline_ns = begin_ns + 30000000;
	tnd_budget_reset(budget);
	start(&late, budget, 60, 0);
	while (stats_of(budget).waits == 0) /* not `waiters`: it may be over by now */
		sched_yield();
	start(&behind, budget, 40, 0);
	/* The one at the head gives up; who waited behind it goes on without any refund. */
	assert_int_equal(finish(&late), TND_E_DEADLINE);
	assert_true(tnd__now_ns() >= begin_ns + 30000000);
	assert_int_equal(finish(&behind), 0);
	assert_int_equal(stats_of(budget).charged_bytes, 90);
	assert_int_equal(stats_of(budget).waiters, 0);
	tnd_budget_refund(budget, 90);
	tnd_budget_close(budget);
}

static int flag_set(void *arg)
{
	return __atomic_load_n((int *)arg, __ATOMIC_SEQ_CST);
}

static void test_cancel(void **state)
{
	struct tnd_budget *budget = budget_of(100);
	struct charger waiting = {0};
	int cancelled = 0;

	(void)state;
	assert_int_equal(charge(budget, 100, 0), 0);
	waiting.opts.cancelled = flag_set;
	waiting.opts.cancelled_arg = &cancelled;
	start(&waiting, budget, 10, 0);
	await_waiters(budget, 1);
	tnd_budget_wake(budget); /* looks, is not cancelled, waits on */
	assert_int_equal(stats_of(budget).waiters, 1);
	__atomic_store_n(&cancelled, 1, __ATOMIC_SEQ_CST);
	tnd_budget_wake(budget);
	assert_int_equal(finish(&waiting), TND_E_CANCELLED);
	/* Before it waits at all. */
	start(&waiting, budget, 10, 0);
	assert_int_equal(finish(&waiting), TND_E_CANCELLED);
	assert_int_equal(stats_of(budget).charged_bytes, 100);
	tnd_budget_refund(budget, 100);
	tnd_budget_close(budget);
}

/* A cancel that comes between the look at `cancelled` and the sleep must not be lost. */
static int wakes_itself(void *arg)
{
	struct charger *charger = arg;
	static int calls;

	if (calls++ == 0) {
		tnd_budget_wake(charger->budget);
		return 0;
	}
	return 1;
}

static void test_cancel_gap(void **state)
{
	struct tnd_budget *budget = budget_of(100);
	struct charger waiting = {0};

	(void)state;
	assert_int_equal(charge(budget, 100, 0), 0);
	waiting.opts.cancelled = wakes_itself;
	waiting.opts.cancelled_arg = &waiting;
	start(&waiting, budget, 10, 0);
	assert_int_equal(finish(&waiting), TND_E_CANCELLED);
	/* At once, and not only when the deadline makes it look again. */
	assert_true(stats_of(budget).wait_ns < PATIENCE_NS / 2);
	tnd_budget_refund(budget, 100);
	tnd_budget_close(budget);
}

static int charge_key(struct tnd_budget *budget, uint64_t key, uint64_t bytes, uint32_t flags)
{
	struct tnd_charge_opts opts = {
		.struct_bytes = sizeof(opts),
		.flags = flags,
		.deadline_ns = tnd__now_ns() + PATIENCE_NS,
	};

	return tnd_budget_charge_key(budget, key, bytes, &opts);
}

static void test_keys(void **state)
{
	struct tnd_budget *budget = budget_of(100000);

	(void)state;
	assert_int_equal(charge_key(budget, 7, 60, 0), 0);
	assert_int_equal(charge_key(budget, 7, 60, 0), 0);
	/* What is charged already counts, whatever a later caller says. */
	assert_int_equal(charge_key(budget, 7, 1 << 30, 0), 0);
	assert_int_equal(charge_key(budget, 8, 100001, 0), TND_E_BUDGET);
	assert_int_equal(stats_of(budget).charged_bytes, 60);
	for (int i = 0; i < 3; i++) {
		assert_int_equal(stats_of(budget).charged_bytes, 60);
		assert_int_equal(tnd_budget_refund_key(budget, 7), 0);
	}
	assert_int_equal(stats_of(budget).charged_bytes, 0);
	assert_int_equal(tnd_budget_refund_key(budget, 7), -ENOENT);
	/* Many, so that the table grows, in a pattern like addresses. */
	for (uint64_t i = 0; i < 2000; i++)
		assert_int_equal(charge_key(budget, i << 28, 10, 0), 0);
	assert_int_equal(stats_of(budget).charged_bytes, 20000);
	for (uint64_t i = 0; i < 2000; i += 2)
		assert_int_equal(tnd_budget_refund_key(budget, i << 28), 0);
	assert_int_equal(tnd_budget_refund_key(budget, 0), -ENOENT);
	assert_int_equal(stats_of(budget).charged_bytes, 10000);
	tnd_budget_close(budget); /* the rest of the table goes with it */
}

static void test_key_waits(void **state)
{
	struct tnd_budget *budget = budget_of(100);
	struct charger chargers[3];

	(void)state;
	memset(chargers, 0, sizeof(chargers));
	assert_int_equal(charge(budget, 50, 0), 0);
	for (uint32_t i = 0; i < 3; i++) {
		chargers[i].keyed = true;
		chargers[i].key = 5;
		start(&chargers[i], budget, 80, 0);
		await_waiters(budget, i + 1);
	}
	assert_int_equal(charge_key(budget, 5, 80, TND_CHARGE_F_TRY), -EAGAIN);
	assert_int_equal(tnd_budget_refund_key(budget, 5), -ENOENT);
	tnd_budget_refund(budget, 50);
	for (int i = 0; i < 3; i++)
		assert_int_equal(finish(&chargers[i]), 0);
	assert_int_equal(stats_of(budget).charged_bytes, 80);
	for (int i = 0; i < 3; i++)
		assert_int_equal(tnd_budget_refund_key(budget, 5), 0);
	assert_int_equal(stats_of(budget).charged_bytes, 0);
	tnd_budget_close(budget);
}

/* The first caller of a key gives up: the next takes its place, before others. */
static void test_key_heir(void **state)
{
	struct tnd_budget *budget = budget_of(100);
	struct charger first = {.keyed = true, .key = 5}, second = {.keyed = true, .key = 5};
	struct charger third = {.keyed = true, .key = 5}, plain = {0};
	int cancelled = 0, cancelled_third = 0;

	(void)state;
	first.opts.cancelled = flag_set;
	first.opts.cancelled_arg = &cancelled;
	third.opts.cancelled = flag_set;
	third.opts.cancelled_arg = &cancelled_third;
	assert_int_equal(charge(budget, 50, 0), 0);
	start(&first, budget, 80, 0);
	await_waiters(budget, 1);
	start(&plain, budget, 50, 0);
	await_waiters(budget, 2);
	start(&second, budget, 80, 0);
	await_waiters(budget, 3);
	start(&third, budget, 80, 0);
	await_waiters(budget, 4);
	__atomic_store_n(&cancelled, 1, __ATOMIC_SEQ_CST);
	__atomic_store_n(&cancelled_third, 1, __ATOMIC_SEQ_CST);
	tnd_budget_wake(budget);
	assert_int_equal(finish(&first), TND_E_CANCELLED);
	assert_int_equal(finish(&third), TND_E_CANCELLED);
	assert_int_equal(stats_of(budget).waiters, 2);
	assert_int_equal(stats_of(budget).charged_bytes, 50);
	tnd_budget_refund(budget, 50);
	assert_int_equal(finish(&second), 0);
	assert_int_equal(stats_of(budget).charged_bytes, 80);
	assert_int_equal(tnd_budget_refund_key(budget, 5), 0);
	assert_int_equal(finish(&plain), 0);
	tnd_budget_refund(budget, 50);
	tnd_budget_close(budget);
}

static void test_key_overrun(void **state)
{
	struct tnd_budget *budget = budget_of(100);
	struct charger waiting = {.keyed = true, .key = 5};

	(void)state;
	assert_int_equal(charge(budget, 50, 0), 0);
	start(&waiting, budget, 80, 0);
	await_waiters(budget, 1);
	assert_int_equal(charge_key(budget, 5, 80, TND_CHARGE_F_OVERRUN), 0);
	assert_int_equal(finish(&waiting), 0);
	assert_int_equal(stats_of(budget).charged_bytes, 130);
	assert_int_equal(stats_of(budget).overrun_bytes, 30);
	assert_int_equal(tnd_budget_refund_key(budget, 5), 0);
	assert_int_equal(stats_of(budget).charged_bytes, 130);
	assert_int_equal(tnd_budget_refund_key(budget, 5), 0);
	tnd_budget_refund(budget, 50);
	tnd_budget_close(budget);
}

/* Many threads, plain and keyed charges, some with deadlines that pass: never above the bound, all of it back at the end. */
struct crowd {
	struct tnd_budget *budget;
	unsigned seed;
	pthread_t thread;
};

static void *crowd_main(void *arg)
{
	struct crowd *crowd = arg;

	for (int i = 0; i < 2000; i++) {
		uint64_t bytes = 1 + (uint64_t)rand_r(&crowd->seed) % 90;
		uint64_t key = bytes % 5;
		struct tnd_charge_opts opts = {.struct_bytes = sizeof(opts)};

		opts.deadline_ns = tnd__now_ns() + (i % 7 ? PATIENCE_NS : 20000);
		if (i % 3 == 0) {
			if (tnd_budget_charge_key(crowd->budget, key, 10 + key, &opts) == 0)
				tnd_budget_refund_key(crowd->budget, key);
		} else if (tnd_budget_charge(crowd->budget, bytes, &opts) == 0) {
			tnd_budget_refund(crowd->budget, bytes);
		}
	}
	return NULL;
}

static void test_crowd(void **state)
{
	struct tnd_budget *budget = budget_of(100);
	struct crowd crowd[6];

	(void)state;
	for (unsigned i = 0; i < 6; i++) {
		crowd[i].budget = budget;
		crowd[i].seed = i + 1;
		assert_int_equal(pthread_create(&crowd[i].thread, NULL, crowd_main, &crowd[i]), 0);
	}
	for (int i = 0; i < 6; i++)
		assert_int_equal(pthread_join(crowd[i].thread, NULL), 0);
	assert_int_equal(stats_of(budget).charged_bytes, 0);
	assert_int_equal(stats_of(budget).waiters, 0);
	assert_true(stats_of(budget).peak_bytes <= 100);
	assert_int_equal(stats_of(budget).overruns, 0);
	tnd_budget_close(budget);
}

/* More given back than was taken: asserted, or clamped where assertions are off; never a wrap to 2^64. */
static void test_refund_too_much(void **state)
{
	int status;
	pid_t child;

	(void)state;
	fflush(NULL);
	child = fork();
	assert_true(child >= 0);
	if (child == 0) {
		struct tnd_budget *budget;
		struct tnd_budget_stats stats = {.struct_bytes = sizeof(stats)};

		signal(SIGABRT, SIG_DFL);
		fclose(stderr);
		if (tnd_budget_create(100, &budget) < 0)
			_exit(2);
		tnd_budget_refund(budget, 1);
		tnd_budget_stats(budget, &stats);
		_exit(stats.charged_bytes != 0);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true((WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT) ||
		    (WIFEXITED(status) && WEXITSTATUS(status) == 0));
}

static void test_no_memory(void **state)
{
#ifdef TND_FAILPOINTS
	struct tnd_budget *budget = NULL;

	(void)state;
	tnd__failpoints_set("mem.alloc=ENOMEM");
	assert_int_equal(tnd_budget_create(1, &budget), -ENOMEM);
	tnd__failpoints_set(NULL);
	budget = budget_of(1000);
	for (int at = 1; at <= 2; at++) { /* the key, the table */
		char text[64];

		snprintf(text, sizeof(text), "mem.alloc=ENOMEM@%d", at);
		tnd__failpoints_set(text);
		assert_int_equal(charge_key(budget, 1, 10, 0), -ENOMEM);
		assert_int_equal(stats_of(budget).charged_bytes, 0);
	}
	tnd__failpoints_set(NULL);
	assert_int_equal(charge_key(budget, 1, 10, 0), 0);
	assert_int_equal(tnd_budget_refund_key(budget, 1), 0);
	tnd_budget_close(budget);
#else
	(void)state;
	skip();
#endif
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_arguments), cmocka_unit_test(test_counts),
		cmocka_unit_test(test_overrun),   cmocka_unit_test(test_alone),
		cmocka_unit_test(test_order),     cmocka_unit_test(test_deadline),
		cmocka_unit_test(test_cancel),    cmocka_unit_test(test_cancel_gap),
		cmocka_unit_test(test_keys),      cmocka_unit_test(test_key_waits),
		cmocka_unit_test(test_key_heir),  cmocka_unit_test(test_key_overrun),
		cmocka_unit_test(test_crowd),     cmocka_unit_test(test_refund_too_much),
		cmocka_unit_test(test_no_memory),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
