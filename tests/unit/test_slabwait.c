/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_slabwait.c - what could break where threads meet at a pool: a slab that comes back is not given to who waits for it (lost
 * wake-up), or past somebody who came earlier; a deadline or a cancel leaves a waiter behind; memory under a holder is reused; a
 * mapping outlives the pool. Threads are known to wait when the budget says so; every wait has a deadline.
 */
#include "slabs.h"

struct taker {
	struct tnd_slab_pool *pool;
	struct tnd_budget *budget; /* for charge_main() */
	struct tnd_charge_opts opts;
	uint64_t bytes;
	struct tnd_slab *slab;
	int rc, order;
	int *counter;
	pthread_t thread;
};

static void *taker_main(void *arg)
{
	struct taker *taker = arg;

	taker->rc = tnd_slab_acquire(taker->pool, taker->bytes, "f", &taker->opts, &taker->slab);
	if (taker->counter)
		taker->order = __atomic_add_fetch(taker->counter, 1, __ATOMIC_SEQ_CST);
	return NULL;
}

static void start(struct taker *taker, struct tnd_slab_pool *pool, uint64_t bytes)
{
	taker->pool = pool;
	taker->bytes = bytes;
	taker->opts.struct_bytes = sizeof(taker->opts);
	if (!taker->opts.deadline_ns)
		taker->opts.deadline_ns = tnd__now_ns() + PATIENCE_NS;
	assert_int_equal(pthread_create(&taker->thread, NULL, taker_main, taker), 0);
}

static int finish(struct taker *taker)
{
	assert_int_equal(pthread_join(taker->thread, NULL), 0);
	return taker->rc;
}

/* Whoever waits takes what comes back, in order, without a new mapping. */
static void test_handed_over(void **state)
{
	struct tnd_budget *budget = budget_of(2 * MIB);
	struct tnd_slab_pool *pool = pool_of(budget, MIB, 0);
	struct tnd_slab *a = acquire(pool, 1), *b = acquire(pool, 1);
	struct tnd_lease *held = lease(a, "w");
	struct taker first = {0}, second = {0};
	void *a_data = tnd_slab_data(a), *b_data = tnd_slab_data(b);

	(void)state;
	start(&first, pool, MIB);
	await_waiters(budget, 1);
	start(&second, pool, 2);
	await_waiters(budget, 2);
	tnd_slab_release(a); /* a lease holds it still */
	assert_int_equal(budget_stats(budget).waiters, 2);
	tnd_lease_release(held);
	assert_int_equal(finish(&first), 0);
	assert_ptr_equal(tnd_slab_data(first.slab), a_data);
	assert_int_equal(tnd_slab_bytes(first.slab), MIB);
	assert_int_equal(budget_stats(budget).waiters, 1);
	tnd_slab_release(b);
	assert_int_equal(finish(&second), 0);
	assert_ptr_equal(tnd_slab_data(second.slab), b_data);
	assert_int_equal(stats_of(pool).allocations, 2);
	assert_int_equal(budget_stats(budget).charged_bytes, 2 * MIB);
	assert_int_equal(budget_stats(budget).peak_bytes, 2 * MIB);
	tnd_slab_release(first.slab);
	tnd_slab_release(second.slab);
	tnd_slab_pool_close(pool);
	tnd_budget_close(budget);
}

/* A slab that does not suit the first in line is unmapped for it, though a later one would like to have it. */
static void test_large_not_overtaken(void **state)
{
	struct tnd_budget *budget = budget_of(3 * MIB);
	struct tnd_slab_pool *pool = pool_of(budget, MIB, 0);
	struct tnd_slab *slabs[3];
	struct taker large = {0}, small = {0};
	int counter = 0;

	(void)state;
	for (int i = 0; i < 3; i++)
		slabs[i] = acquire(pool, 1);
	large.counter = small.counter = &counter;
	start(&large, pool, 2 * MIB);
	await_waiters(budget, 1);
	start(&small, pool, 1);
	await_waiters(budget, 2);
	tnd_slab_release(slabs[0]);
	assert_int_equal(budget_stats(budget).waiters, 2);
	tnd_slab_release(slabs[1]);
	assert_int_equal(finish(&large), 0);
	assert_int_equal(budget_stats(budget).waiters, 1);
	tnd_slab_release(slabs[2]);
	assert_int_equal(finish(&small), 0);
	assert_int_equal(large.order, 1);
	assert_int_equal(budget_stats(budget).peak_bytes, 3 * MIB);
	tnd_slab_release(large.slab);
	tnd_slab_release(small.slab);
	tnd_slab_pool_close(pool);
	tnd_budget_close(budget);
}

static void *charge_main(void *arg)
{
	struct taker *taker = arg;

	taker->rc = tnd_budget_charge(taker->budget, taker->bytes, &taker->opts);
	return NULL;
}

/* Another user of the budget who came first is served first: the slab that comes back goes for him. */
static void test_others_not_overtaken(void **state)
{
	struct tnd_budget *budget = budget_of(2 * MIB);
	struct tnd_slab_pool *pool = pool_of(budget, MIB, 0);
	struct tnd_slab *a = acquire(pool, 1), *b = acquire(pool, 1);
	struct taker user = {.budget = budget, .bytes = MIB / 2, .opts = patient(0)}, taker = {0};

	(void)state;
	assert_int_equal(pthread_create(&user.thread, NULL, charge_main, &user), 0);
	await_waiters(budget, 1);
	start(&taker, pool, 1);
	await_waiters(budget, 2);
	tnd_slab_release(a);
	assert_int_equal(finish(&user), 0);
	assert_int_equal(budget_stats(budget).waiters, 1);
	tnd_budget_refund(budget, MIB / 2);
	assert_int_equal(finish(&taker), 0);
	assert_int_equal(budget_stats(budget).charged_bytes, 2 * MIB);
	tnd_slab_release(b);
	tnd_slab_release(taker.slab);
	tnd_slab_pool_close(pool);
	tnd_budget_close(budget);
}

/* A refund from elsewhere ends the wait as well, with a fresh mapping. */
static void test_refund_serves_acquire(void **state)
{
	struct tnd_budget *budget = budget_of(2 * MIB);
	struct tnd_slab_pool *pool = pool_of(budget, MIB, 0);
	struct tnd_slab *slab = acquire(pool, 1);
	struct taker taker = {0};

	(void)state;
	assert_int_equal(tnd_budget_charge(budget, MIB / 2, NULL), 0);
	start(&taker, pool, MIB);
	await_waiters(budget, 1);
	tnd_budget_refund(budget, MIB / 2);
	assert_int_equal(finish(&taker), 0);
	assert_int_equal(stats_of(pool).allocations, 2);
	tnd_slab_release(slab);
	tnd_slab_release(taker.slab);
	tnd_slab_pool_close(pool);
	tnd_budget_close(budget);
}

static int always(void *arg)
{
	(void)arg;
	return 1;
}

static void test_acquire_gives_up(void **state)
{
	struct tnd_budget *budget = budget_of(MIB);
	struct tnd_slab_pool *pool = pool_of(budget, MIB, 0);
	struct tnd_slab *slab = acquire(pool, 1), *none;
	struct tnd_charge_opts opts = {.struct_bytes = sizeof(opts)};

	(void)state;
	opts.deadline_ns = tnd__now_ns() + 10000000;
	assert_int_equal(tnd_slab_acquire(pool, 1, "f", &opts, &none), TND_E_DEADLINE);
	opts.deadline_ns = 0;
	opts.cancelled = always;
	assert_int_equal(tnd_slab_acquire(pool, 1, "f", &opts, &none), TND_E_CANCELLED);
	opts.flags = TND_CHARGE_F_TRY;
	assert_int_equal(tnd_slab_acquire(pool, 1, "f", &opts, &none), -EAGAIN);
	assert_int_equal(budget_stats(budget).waiters, 0);
	tnd_slab_release(slab);
	assert_int_equal(tnd_slab_acquire(pool, 1, "f", &opts, &none), 0);
	assert_int_equal(stats_of(pool).allocations, 1);
	tnd_slab_release(none);
	tnd_slab_pool_close(pool);
	tnd_budget_close(budget);
}

/* Threads that take slabs of three kinds, write their mark, hold them by leases and find the mark unchanged; others charge the budget. */
struct crowd {
	struct tnd_budget *budget;
	struct tnd_slab_pool *pool;
	unsigned seed;
	int bad;
	pthread_t thread;
};

static void use_slab(struct crowd *crowd, struct tnd_slab *slab, unsigned mark)
{
	unsigned *data = tnd_slab_data(slab);
	struct tnd_lease *held;

	data[0] = mark;
	if (tnd_lease_acquire(slab, "w", 1, &held) < 0) {
		crowd->bad++;
		tnd_slab_release(slab);
		return;
	}
	tnd_slab_release(slab);
	sched_yield();
	crowd->bad += data[0] != mark;
	tnd_lease_release(held);
}

static void *crowd_main(void *arg)
{
	static const uint64_t sizes[] = {1000, 20000, 40000};
	struct crowd *crowd = arg;

	for (int i = 0; i < 400; i++) {
		struct tnd_charge_opts opts = {.struct_bytes = sizeof(opts)};
		struct tnd_slab *slab;
		int rc;

		opts.deadline_ns = tnd__now_ns() + (i % 9 ? PATIENCE_NS : 50000);
		if (i % 5 == 4) {
			rc = tnd_budget_charge(crowd->budget, 10000, &opts);
			if (rc == 0)
				tnd_budget_refund(crowd->budget, 10000);
		} else {
			rc = tnd_slab_acquire(crowd->pool, sizes[rand_r(&crowd->seed) % 3], "f",
					      &opts, &slab);
			if (rc == 0)
				use_slab(crowd, slab, crowd->seed);
		}
		crowd->bad += rc != 0 && !(rc == TND_E_DEADLINE && i % 9 == 0);
	}
	return NULL;
}

static void test_crowd(void **state)
{
	struct tnd_budget *budget = budget_of(60000);
	struct tnd_slab_pool *pool = pool_of(budget, 16384, 0);
	struct crowd crowd[4];

	(void)state;
	for (unsigned i = 0; i < 4; i++) {
		crowd[i] = (struct crowd){.budget = budget, .pool = pool, .seed = i + 1};
		assert_int_equal(pthread_create(&crowd[i].thread, NULL, crowd_main, &crowd[i]), 0);
	}
	for (int i = 0; i < 4; i++) {
		assert_int_equal(pthread_join(crowd[i].thread, NULL), 0);
		assert_int_equal(crowd[i].bad, 0);
	}
	assert_int_equal(stats_of(pool).live, 0);
	assert_int_equal(stats_of(pool).mapped_bytes, budget_stats(budget).charged_bytes);
	assert_true(budget_stats(budget).peak_bytes <= 60000);
	tnd_slab_pool_close(pool);
	assert_int_equal(budget_stats(budget).charged_bytes, 0);
	tnd_budget_close(budget);
}

static void *drop_main(void *arg)
{
	tnd_lease_release(arg);
	return NULL;
}

/* The last lease ends while the pool closes: the mapping does not outlive both. */
static void test_dropped_while_closing(void **state)
{
	(void)state;
	for (int round = 0; round < 200; round++) {
		struct tnd_slab_pool *pool = pool_of(NULL, 4096, 0);
		struct tnd_slab *slab = acquire(pool, 1);
		struct tnd_lease *held = lease(slab, "w");
		void *data = tnd_slab_data(slab);
		pthread_t thread;

		tnd_slab_release(slab);
		assert_int_equal(pthread_create(&thread, NULL, drop_main, held), 0);
		tnd_slab_pool_close(pool);
		assert_int_equal(pthread_join(thread, NULL), 0);
		assert_false(mapped(data));
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_handed_over),
		cmocka_unit_test(test_large_not_overtaken),
		cmocka_unit_test(test_others_not_overtaken),
		cmocka_unit_test(test_refund_serves_acquire),
		cmocka_unit_test(test_acquire_gives_up),
		cmocka_unit_test(test_crowd),
		cmocka_unit_test(test_dropped_while_closing),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
