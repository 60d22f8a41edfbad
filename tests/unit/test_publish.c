/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_publish.c - what could break: a load that is held mid-way is shown with figures that it had
 * earlier, or with none of a member's or a reader's; one that has ended is still shown, or leaves a
 * descriptor; a load that gets no page fails for that. Loads of this process, one alone and one of
 * a node's reader, rest between two views, and what is seen from outside is compared with their own
 * figures. Threads may still be reading when a view is there: the look is repeated until a deadline.
 */
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include <tundish/share.h>
#include <tundish/stat.h>

#include "base/base.h"
#include "support/ckfile.h"
#include "support/fds.h"

#define SHARDS 3
#define PER_SHARD 16
#define TENSOR_BYTES 65536u
#define TOTAL (SHARDS * PER_SHARD * (uint64_t)TENSOR_BYTES)
#define BUDGET TND__MIB(4) /* reading goes on only while views are released */
#define PATIENCE_NS INT64_C(20000000000)

static char *folder;

static int make_folder(void **state)
{
	struct ck_tensor tensors[PER_SHARD];
	static char names[PER_SHARD][32];
	char path[512];

	(void)state;
	folder = ck_folder();
	for (int s = 0; s < SHARDS; s++) {
		for (int t = 0; t < PER_SHARD; t++) {
			snprintf(names[t], 32, "layer.%d.w%02d", s, t);
			tensors[t] =
				(struct ck_tensor){names[t], "BF16", {128, 256}, 2, TENSOR_BYTES};
		}
		snprintf(path, sizeof(path), "%s/model-%05d.safetensors", folder, s);
		ck_write(path, tensors, PER_SHARD, "abc");
	}
	return 0;
}

static int drop_folder(void **state)
{
	(void)state;
	ck_remove(folder);
	return 0;
}

/* This process's load in this role. Return: whether there is one; there may not be two. */
static bool look(uint32_t role, struct tnd_stat_load *ret_load)
{
	struct tnd_stat *stat;
	bool found = false;

	assert_int_equal(tnd_stat_read(&stat), 0);
	for (size_t i = 0; i < stat->load_count; i++) {
		if (stat->loads[i].pid != getpid() || stat->loads[i].role != role)
			continue;
		assert_false(found);
		found = true;
		*ret_load = stat->loads[i];
	}
	tnd_stat_free(stat);
	return found;
}

static bool same(const struct tnd_load_stats *own, const struct tnd_stat_load *seen)
{
	return seen->done_bytes == own->kept_bytes && seen->charged_bytes == own->charged_bytes &&
	       seen->storage_bytes == own->storage_bytes && seen->budget_bytes == own->budget_bytes;
}

/* Until what is shown is what the load says of itself. */
static void wait_same(struct tnd_load *load, uint32_t role, struct tnd_stat_load *ret_seen)
{
	struct tnd_load_stats own = {.struct_bytes = sizeof(own)};
	int64_t deadline = tnd__now_ns() + PATIENCE_NS;

	for (;;) {
		assert_int_equal(tnd_load_stats(load, &own), 0);
		assert_true(look(role, ret_seen));
		if (same(&own, ret_seen))
			return;
		if (tnd__now_ns() > deadline)
			fail_msg("seen %llu done, %llu charged, %llu read; own %llu, %llu, %llu",
				 (unsigned long long)ret_seen->done_bytes,
				 (unsigned long long)ret_seen->charged_bytes,
				 (unsigned long long)ret_seen->storage_bytes,
				 (unsigned long long)own.kept_bytes,
				 (unsigned long long)own.charged_bytes,
				 (unsigned long long)own.storage_bytes);
		poll(NULL, 0, 1);
	}
}

static struct tnd_plan *make_plan(bool for_all)
{
	struct tnd_plan_opts opts = {.struct_bytes = sizeof(opts), .slab_bytes = 1 << 20};
	struct tnd_layout layout = {.struct_bytes = sizeof(layout), .tp_size = 1};
	struct tnd_checkpoint *checkpoint;
	struct tnd_plan *plan = NULL;
	struct tnd_error error;
	int rc;

	if (tnd_checkpoint_open(folder, NULL, &checkpoint, &error) < 0)
		fail_msg("%s", error.message);
	opts.budget_bytes = BUDGET;
	rc = for_all ? tnd_plan_create_union(checkpoint, &layout, NULL, 0, &opts, &plan, &error)
		     : tnd_plan_create(checkpoint, &layout, &opts, &plan, &error);
	if (rc < 0)
		fail_msg("%s", error.message);
	tnd_checkpoint_close(checkpoint);
	return plan;
}

static struct tnd_load *open_load(const char *share)
{
	struct tnd_load_opts opts = {.struct_bytes = sizeof(opts), .share = share};
	struct tnd_plan *plan = make_plan(false);
	struct tnd_load *load = NULL;
	struct tnd_error error;

	if (tnd_load_open(plan, &opts, &load, &error) < 0)
		fail_msg("%s", error.message);
	tnd_plan_close(plan);
	return load;
}

static void take(struct tnd_load *load, int count)
{
	struct tnd_error error;
	struct tnd_view view;

	while (count--) {
		if (tnd_load_next(load, &view, &error) != 1)
			fail_msg("%s", error.message);
		tnd_view_release(&view);
	}
}

/* Held at each third view: shown as it stands. */
static void check_load(struct tnd_load *load, uint32_t role)
{
	struct tnd_stat_load seen;
	char file[64];

	for (int taken = 0; taken < SHARDS * PER_SHARD; taken += 3) {
		take(load, 3);
		wait_same(load, role, &seen);
		assert_int_equal(seen.rank, 0);
		assert_int_equal(seen.state, TND_READER_ALIVE);
		assert_int_equal(seen.done_bytes, (taken + 3) * (uint64_t)TENSOR_BYTES);
		assert_int_equal(seen.total_bytes, TOTAL);
		assert_true(seen.charged_bytes > 0);
		snprintf(file, sizeof(file), "model-%05d.safetensors", (taken + 2) / PER_SHARD);
		/* A member is where its consumer is; alone, the feeder may be ahead of it. */
		if (role == TND_STAT_LOAD_MEMBER)
			assert_string_equal(seen.file, file);
		else
			assert_true(strcmp(seen.file, file) >= 0);
	}
	assert_int_equal(tnd_load_end(load, NULL), 0);
	assert_false(look(role, &seen));
}

static void test_alone(void **state)
{
	unsigned int before = fd_count();
	struct tnd_load *load;
	struct tnd_stat_load seen;

	(void)state;
	load = open_load(NULL);
	assert_true(look(TND_STAT_LOAD_ALONE, &seen));
	assert_int_equal(seen.done_bytes, 0);
	assert_int_equal(seen.budget_bytes, BUDGET);
	check_load(load, TND_STAT_LOAD_ALONE);
	tnd_load_close(load);
	assert_int_equal(fd_count(), before);
	/* Closed in the middle. */
	load = open_load(NULL);
	take(load, 5);
	tnd_load_close(load);
	assert_false(look(TND_STAT_LOAD_ALONE, &seen));
	assert_int_equal(fd_count(), before);
}

/* The node's reader, and its only member. */
static void test_shared(void **state)
{
	struct tnd_share_opts opts = {.struct_bytes = sizeof(opts)};
	struct tnd_plan *plan = make_plan(true);
	int64_t deadline = tnd__now_ns() + PATIENCE_NS;
	struct tnd_share *share = NULL;
	struct tnd_stat_load seen;
	struct tnd_error error;
	struct tnd_load *load;

	(void)state;
	if (tnd_share_open(plan, &opts, &share, &error) < 0)
		fail_msg("%s", error.message);
	tnd_plan_close(plan);
	load = open_load(tnd_share_address(share));
	check_load(load, TND_STAT_LOAD_MEMBER);
	/* It does not end by itself: all of it is announced, and stays seen. */
	while (look(TND_STAT_LOAD_READER, &seen) && seen.done_bytes < TOTAL) {
		assert_true(tnd__now_ns() < deadline);
		poll(NULL, 0, 1);
	}
	assert_int_equal(seen.rank, TND_STAT_NO_RANK);
	assert_int_equal(seen.total_bytes, TOTAL);
	assert_int_equal(seen.done_bytes, TOTAL);
	assert_true(seen.storage_bytes >= TOTAL);
	assert_int_equal(seen.budget_bytes, BUDGET);
	assert_string_equal(seen.file, "model-00002.safetensors");
	tnd_load_close(load);
	assert_int_equal(tnd_share_end(share, &error), 0);
	assert_false(look(TND_STAT_LOAD_READER, &seen));
	tnd_share_close(share);
}

/* A load that cannot be seen is a load all the same. */
static void test_without(void **state)
{
	unsigned int before = fd_count();
	struct tnd_stat_load seen;
	struct tnd_load *load;

	(void)state;
	assert_int_equal(tnd__failpoints_set("live.memfd=EPERM"), 0);
	load = open_load(NULL);
	assert_int_equal(tnd__failpoint_seen("live.memfd"), 1);
	assert_false(look(TND_STAT_LOAD_ALONE, &seen));
	take(load, SHARDS * PER_SHARD);
	assert_int_equal(tnd_load_end(load, NULL), 0);
	tnd_load_close(load);
	assert_int_equal(tnd__failpoints_set(NULL), 0);
	assert_int_equal(fd_count(), before);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_alone),
		cmocka_unit_test(test_shared),
		cmocka_unit_test(test_without),
	};

	return cmocka_run_group_tests(tests, make_folder, drop_folder);
}
