/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_litmus.c - what could break: memory orders that the channel relies on are weaker where it
 * runs than on paper, or are compiled to too little. Two threads repeat its shapes on the same
 * orders: a ring of two plain numbers (publication W3/R1, reclamation R3/W1: a number that is not
 * the expected one shows it, and ThreadSanitizer a race), and publishing against falling asleep
 * (W3, W4 against S2, S3: if each misses the other, a wake is lost). The latter with relaxed orders
 * is a control: how often both miss is printed, to tell whether this machine could show it at all.
 */
#include <inttypes.h>
#include <sched.h>
#include <setjmp.h>
#include <stdalign.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>

#include <cmocka.h>

#include "base/base.h"

#define SHAPE_NS INT64_C(400000000)
#define SPINS 4000 /* before the processor is given to the other thread */
#define SLOTS 2
#define LAST UINT64_MAX

static void pause_at(unsigned int *spins)
{
	if (++*spins % SPINS == 0)
		sched_yield();
}

/* -- the ring -- */

static struct {
	alignas(128) _Atomic uint64_t published;
	alignas(128) _Atomic uint64_t cursor;
	alignas(128) uint64_t slots[SLOTS]; /* plain, as descriptors and bytes are */
} ring;

static void *receive(void *arg)
{
	uint64_t *ret_wrong = arg, number = 0;
	unsigned int spins = 0;

	for (uint64_t n = 0; number != LAST; n++) {
		/* R1: pairs with W3 in test_ring(). */
		while (atomic_load_explicit(&ring.published, memory_order_acquire) == n)
			pause_at(&spins);
		number = ring.slots[n % SLOTS];
		*ret_wrong += number != n && number != LAST;
		/* R3: pairs with W1 in test_ring(). */
		atomic_store_explicit(&ring.cursor, n + 1, memory_order_seq_cst);
	}
	return NULL;
}

static void test_ring(void **state)
{
	int64_t end = tnd__now_ns() + SHAPE_NS;
	uint64_t wrong = 0, n = 0;
	unsigned int spins = 0;
	bool more = true;
	pthread_t reader;

	(void)state;
	assert_int_equal(pthread_create(&reader, NULL, receive, &wrong), 0);
	for (; more; n++) {
		more = n % 1024 || tnd__now_ns() < end;
		/* W1: pairs with R3 in receive(). */
		while (n - atomic_load_explicit(&ring.cursor, memory_order_acquire) >= SLOTS)
			pause_at(&spins);
		ring.slots[n % SLOTS] = more ? n : LAST;
		/* W3: pairs with R1 in receive(). */
		atomic_store_explicit(&ring.published, n + 1, memory_order_seq_cst);
	}
	assert_int_equal(pthread_join(reader, NULL), 0);
	print_message("ring: %" PRIu64 " objects, %" PRIu64 " wrong\n", n, wrong);
	assert_int_equal(wrong, 0);
}

/* -- publishing against falling asleep -- */

#define CELLS 1024

static struct cell {
	alignas(64) _Atomic uint64_t published;
	bool saw_sleeper; /* the writer's */
	alignas(64) _Atomic uint64_t sleepers;
	bool saw_object; /* the reader's */
} cells[CELLS];

/* Both sides begin a lap through the cells when `lap` says so, and say when they are through. */
static _Atomic uint64_t lap, laps_done;
static _Atomic bool over;

static void publish_all(bool relaxed)
{
	for (struct cell *cell = cells; cell < cells + CELLS; cell++) {
		if (relaxed) {
			/* W3, W4 without what pairs them with S2, S3. */
			atomic_store_explicit(&cell->published, 1, memory_order_relaxed);
			cell->saw_sleeper =
				atomic_load_explicit(&cell->sleepers, memory_order_relaxed);
		} else {
			/* W3, W4: pair with S2, S3 in sleep_all(). */
			atomic_store_explicit(&cell->published, 1, memory_order_seq_cst);
			cell->saw_sleeper =
				atomic_load_explicit(&cell->sleepers, memory_order_seq_cst);
		}
	}
}

static void sleep_all(bool relaxed)
{
	for (struct cell *cell = cells; cell < cells + CELLS; cell++) {
		if (relaxed) {
			/* S2, S3 without what pairs them with W3, W4. */
			atomic_fetch_or_explicit(&cell->sleepers, 1, memory_order_relaxed);
			cell->saw_object =
				atomic_load_explicit(&cell->published, memory_order_relaxed);
		} else {
			/* S2, S3: pair with W3, W4 in publish_all(). */
			atomic_fetch_or_explicit(&cell->sleepers, 1, memory_order_seq_cst);
			cell->saw_object =
				atomic_load_explicit(&cell->published, memory_order_seq_cst);
		}
	}
}

static void *sleep_laps(void *arg)
{
	const bool *relaxed = arg;
	unsigned int spins = 0;

	for (uint64_t n = 1;; n++) {
		while (atomic_load(&lap) < n)
			pause_at(&spins);
		if (atomic_load(&over))
			return NULL;
		sleep_all(*relaxed);
		atomic_store(&laps_done, n);
	}
}

/* Cells where each side missed the other; leaves them clean. */
static uint64_t count_missed(void)
{
	uint64_t missed = 0;

	for (struct cell *cell = cells; cell < cells + CELLS; cell++) {
		missed += !cell->saw_sleeper && !cell->saw_object;
		atomic_store_explicit(&cell->published, 0, memory_order_relaxed);
		atomic_store_explicit(&cell->sleepers, 0, memory_order_relaxed);
	}
	return missed;
}

static uint64_t run_laps(bool relaxed)
{
	int64_t end = tnd__now_ns() + SHAPE_NS;
	uint64_t missed = 0, n = 0;
	unsigned int spins = 0;
	pthread_t reader;

	atomic_store(&lap, 0);
	atomic_store(&laps_done, 0);
	atomic_store(&over, false);
	assert_int_equal(pthread_create(&reader, NULL, sleep_laps, &relaxed), 0);
	do {
		atomic_store(&lap, ++n);
		publish_all(relaxed);
		while (atomic_load(&laps_done) < n)
			pause_at(&spins);
		missed += count_missed();
	} while (tnd__now_ns() < end);
	atomic_store(&over, true);
	atomic_store(&lap, n + 1);
	assert_int_equal(pthread_join(reader, NULL), 0);
	print_message("sleepers, %s: %" PRIu64 " rounds, both missed in %" PRIu64 "\n",
		      relaxed ? "relaxed" : "seq_cst", n * CELLS, missed);
	return missed;
}

static void test_sleepers(void **state)
{
	(void)state;
	assert_int_equal(run_laps(false), 0);
}

static void test_sleepers_control(void **state)
{
	(void)state;
	(void)run_laps(true);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_ring),
		cmocka_unit_test(test_sleepers),
		cmocka_unit_test(test_sleepers_control),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
