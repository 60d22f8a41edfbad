/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_nodering.c - what could break: the channel of a node's reader takes more than the plan set
 * aside for it, so that slabs and channel together pass the node's budget. Shown by the channel
 * with as many places as it can have, made as the load makes it: what it says it takes, and what
 * the account was charged.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <tundish/channel.h>
#include <tundish/share.h>

#include "load/stream.h"
#include "plan/plan_internal.h"

static void ring_fits(void **state)
{
	struct tnd_channel_info info = {.struct_bytes = sizeof(info)};
	struct tnd_budget_stats stats = {.struct_bytes = sizeof(stats)};
	struct tnd_slab_pool_opts pool = {.struct_bytes = sizeof(pool),
					  .flags = TND_SLAB_POOL_F_SHARED};
	struct tnd_channel_opts opts = {.struct_bytes = sizeof(opts),
					.max_bytes = TND__STREAM_RING_BYTES,
					.max_objects = TND__STREAM_OBJECTS,
					.reserved_readers = TND_SHARE_MEMBERS_MAX,
					.open_readers = TND_SHARE_GUESTS_MAX,
					.max_object_bytes = TND__MIB(32),
					.warn_ns = -1};
	struct tnd_channel *channel;
	struct tnd_error error = {0};

	(void)state;
	assert_int_equal(tnd_budget_create(TND__MIB(64), &opts.budget), 0);
	pool.budget = opts.budget;
	assert_int_equal(tnd_slab_pool_create(&pool, &opts.pool), 0);
	if (tnd_channel_create(&opts, &channel, &error) < 0)
		fail_msg("%s", error.message);
	assert_int_equal(tnd_channel_info(channel, &info), 0);
	assert_int_equal(info.place_count, 64);
	assert_true(info.memory_bytes > TND__STREAM_RING_BYTES);
	assert_true(info.memory_bytes <= TND__RING_BYTES);
	assert_int_equal(tnd_budget_stats(opts.budget, &stats), 0);
	assert_true(stats.charged_bytes >= info.memory_bytes);
	assert_true(stats.charged_bytes <= TND__RING_BYTES);
	tnd_channel_close(channel);
	tnd_slab_pool_close(opts.pool);
	tnd_budget_close(opts.budget);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(ring_fits),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
