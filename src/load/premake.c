/* SPDX-License-Identifier: Apache-2.0 */
/*
 * premake.c - the first slabs of a node's reader are made beside each other
 *
 * A shared slab is touched as a whole when it is made, since huge pages of a memfd have to be asked
 * for. Where the host gives memory at first touch that takes longer than reading into it: 0.14 s for
 * 32 MiB here, for each slab, before its first read. So threads make those that will be needed while
 * the feeder makes the first one; they lie idle in the pool until the channel takes them.
 */
#include <stdlib.h>
#include <time.h>

#include "outlet.h"

#define LOOK_NS 500000

struct tnd__premake {
	struct tnd_load *load;
	_Atomic uint32_t left; /* relaxed: only said to be over */
	uint32_t count;
	pthread_t threads[TND__PREMAKE_MAX];
};

static void *make(void *arg)
{
	struct tnd__premake *premake = arg;
	struct tnd_load *load = premake->load;
	struct tnd_charge_opts try = {.struct_bytes = sizeof(try), .flags = TND_CHARGE_F_TRY};
	struct tnd_slab *slab;

	tnd__thread_settle(load->storage, "tnd-make");
	/* One that cannot be had now is made, or waited for, when it is needed. */
	if (tnd_slab_acquire(load->pool, load->totals.slab_capacity_bytes, NULL, &try, &slab) == 0)
		tnd_slab_release(slab);
	atomic_fetch_sub_explicit(&premake->left, 1, memory_order_relaxed);
	return NULL;
}

struct tnd__premake *tnd__premake_start(struct tnd_load *load, uint32_t count)
{
	struct tnd__premake *premake;

	count = TND__MIN(count, TND__PREMAKE_MAX);
	if (!count || !load->totals.slab_capacity_bytes)
		return NULL;
	premake = calloc(1, sizeof(*premake));
	if (!premake)
		return NULL;
	premake->load = load;
	atomic_init(&premake->left, count);
	while (premake->count < count &&
	       tnd__thread_create(make, premake, &premake->threads[premake->count]) == 0)
		premake->count++;
	atomic_fetch_sub_explicit(&premake->left, count - premake->count, memory_order_relaxed);
	return premake;
}

void tnd__premake_await(struct tnd__premake *premake)
{
	const struct timespec moment = {.tv_nsec = LOOK_NS};
	struct tnd_slab_stats pool = {.struct_bytes = sizeof(pool)};

	while (premake && atomic_load_explicit(&premake->left, memory_order_relaxed) &&
	       !atomic_load_explicit(&premake->load->stopping, memory_order_relaxed)) {
		tnd_slab_pool_stats(premake->load->pool, &pool);
		if (pool.mapped_bytes > pool.live_bytes)
			return;
		nanosleep(&moment, NULL);
	}
}

void tnd__premake_end(struct tnd__premake *premake)
{
	if (!premake)
		return;
	for (uint32_t i = 0; i < premake->count; i++)
		pthread_join(premake->threads[i], NULL);
	free(premake);
}
