/* SPDX-License-Identifier: Apache-2.0 */
/* slabs.h - what the tests of slab pools share: making things, asking for figures, waiting for waiters */
#ifndef TND_TEST_SLABS_H
#define TND_TEST_SLABS_H

#include <errno.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "memory/memory.h"

#define PATIENCE_NS (INT64_C(20) * 1000000000)
#define MIB TND__MIB(1)

static inline struct tnd_budget *budget_of(uint64_t bound)
{
	struct tnd_budget *budget;

	assert_int_equal(tnd_budget_create(bound, &budget), 0);
	return budget;
}

static inline struct tnd_budget_stats budget_stats(struct tnd_budget *budget)
{
	struct tnd_budget_stats stats = {.struct_bytes = sizeof(stats)};

	assert_int_equal(tnd_budget_stats(budget, &stats), 0);
	return stats;
}

static inline void await_waiters(struct tnd_budget *budget, uint32_t count)
{
	int64_t end_ns = tnd__now_ns() + PATIENCE_NS;

	while (budget_stats(budget).waiters != count) {
		assert_true(tnd__now_ns() < end_ns);
		sched_yield();
	}
}

static inline struct tnd_slab_pool *pool_of(struct tnd_budget *budget, uint64_t slab_bytes,
					    uint32_t flags)
{
	struct tnd_slab_pool_opts opts = {
		.struct_bytes = sizeof(opts),
		.flags = flags,
		.budget = budget,
		.slab_bytes = slab_bytes,
	};
	struct tnd_slab_pool *pool;

	assert_int_equal(tnd_slab_pool_create(&opts, &pool), 0);
	return pool;
}

static inline struct tnd_slab_stats stats_of(struct tnd_slab_pool *pool)
{
	struct tnd_slab_stats stats = {.struct_bytes = sizeof(stats)};

	assert_int_equal(tnd_slab_pool_stats(pool, &stats), 0);
	return stats;
}

static inline struct tnd_charge_opts patient(uint32_t flags)
{
	struct tnd_charge_opts opts = {
		.struct_bytes = sizeof(opts),
		.flags = flags,
		.deadline_ns = tnd__now_ns() + PATIENCE_NS,
	};

	return opts;
}

static inline struct tnd_slab *acquire(struct tnd_slab_pool *pool, uint64_t bytes)
{
	struct tnd_charge_opts opts = patient(0);
	struct tnd_slab *slab;

	assert_int_equal(tnd_slab_acquire(pool, bytes, "model.safetensors", &opts, &slab), 0);
	return slab;
}

static inline struct tnd_lease *lease(struct tnd_slab *slab, const char *name)
{
	struct tnd_lease *held;

	assert_int_equal(tnd_lease_acquire(slab, name, strlen(name), &held), 0);
	return held;
}

/* Whether the page at `data` is mapped: msync says ENOMEM where nothing is. */
static inline bool mapped(const void *data)
{
	return msync((void *)((uintptr_t)data & ~(uintptr_t)4095), 4096, MS_ASYNC) == 0;
}

#endif
