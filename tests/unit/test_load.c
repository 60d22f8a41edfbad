/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_load.c - the pipeline: bytes and order, the bound, kept views, lifetime, and every way to end
 *
 * What could break: a view handed out before its last byte, a slab reused under a holder, a budget charged by tensors and not by slabs, a consumer
 * and a feeder that wait for each other, an escape that is not told (or told twice), threads or descriptors left. Each test loads real files whose
 * bytes are known from name and position, and compares them when the view is released, not only when it came.
 */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "load/load_internal.h"
#include "support/ckfile.h"
#include "support/fds.h"

#define SHARDS 8
#define PER_SHARD 64
#define TENSOR_BYTES 65536u

static char *folder;
static char name_store[SHARDS * PER_SHARD][32];

/* 8 shards of 64 tensors of 64 KiB: the case that breaks accounting by tensors. */
static int make_folder(void **state)
{
	struct ck_tensor tensors[PER_SHARD];
	char path[512];

	(void)state;
	folder = ck_folder();
	for (int s = 0; s < SHARDS; s++) {
		for (int t = 0; t < PER_SHARD; t++) {
			char *name = name_store[s * PER_SHARD + t];

			snprintf(name, 32, "layer.%d.w%02d", s, t);
			tensors[t] = (struct ck_tensor){name, "BF16", {128, 256}, 2, TENSOR_BYTES};
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

static struct tnd_plan *plan_of(const char *path, struct tnd_plan_opts opts,
				struct tnd_layout layout)
{
	struct tnd_checkpoint *checkpoint;
	struct tnd_error error;
	struct tnd_plan *plan = NULL;

	opts.struct_bytes = sizeof(opts);
	layout.struct_bytes = sizeof(layout);
	if (tnd_checkpoint_open(path, NULL, &checkpoint, &error) < 0)
		fail_msg("%s", error.message);
	if (tnd_plan_create(checkpoint, &layout, &opts, &plan, &error) < 0)
		fail_msg("%s", error.message);
	tnd_checkpoint_close(checkpoint);
	return plan;
}

static struct tnd_load *open_load(struct tnd_plan *plan, struct tnd_load_opts opts)
{
	struct tnd_error error;
	struct tnd_load *load = NULL;

	opts.struct_bytes = sizeof(opts);
	if (tnd_load_open(plan, &opts, &load, &error) < 0)
		fail_msg("%s", error.message);
	tnd_plan_close(plan);
	return load;
}

static void check_bytes(const struct tnd_view *view)
{
	const unsigned char *data = view->data;

	for (uint64_t i = 0; i < view->bytes; i += i < 64 ? 1 : 61)
		if (data[i] != ck_byte(view->name, view->piece_offset + i))
			fail_msg("%s: byte %llu differs", view->name, (unsigned long long)i);
	if (view->bytes)
		assert_int_equal(data[view->bytes - 1],
				 ck_byte(view->name, view->piece_offset + view->bytes - 1));
}

/* Takes and releases everything. Return: views seen. */
static size_t drain(struct tnd_load *load)
{
	struct tnd_view view;
	struct tnd_error error;
	size_t count = 0;
	int rc;

	while ((rc = tnd_load_next(load, &view, &error)) == 1) {
		check_bytes(&view);
		tnd_view_release(&view);
		count++;
	}
	if (rc < 0)
		fail_msg("%s", error.message);
	return count;
}

/* Both packings, both engines, direct on and off, slab sizes: bytes and order. */
static void test_bytes(void **state)
{
	static const int64_t slabs[] = {1 << 20, 4 << 20, 0, TND_SLAB_NONE};

	(void)state;
	for (unsigned packing = TND_PACKING_NAME; packing <= TND_PACKING_FILE; packing++)
		for (unsigned engine = TND_ENGINE_URING; engine <= TND_ENGINE_THREADS; engine++)
			for (unsigned direct = TND_DIRECT_ON; direct <= TND_DIRECT_OFF; direct++)
				for (size_t s = 0; s < 4; s++) {
					struct tnd_plan_opts opts = {.packing = packing,
								     .slab_bytes = slabs[s],
								     .budget_bytes = 32 << 20};
					struct tnd_load_stats stats = {.struct_bytes =
									       sizeof(stats)};
					struct tnd_load *load = open_load(
						plan_of(folder, opts, (struct tnd_layout){0}),
						(struct tnd_load_opts){.engine = engine,
								       .direct = direct});

					assert_int_equal(drain(load), SHARDS * PER_SHARD);
					assert_int_equal(tnd_load_end(load, NULL), 0);
					assert_int_equal(tnd_load_stats(load, &stats), 0);
					assert_int_equal(stats.kept_bytes,
							 SHARDS * PER_SHARD * TENSOR_BYTES);
					assert_true(stats.peak_charged_bytes <= stats.budget_bytes);
					assert_int_equal(stats.live, 0);
					if (slabs[s] == TND_SLAB_NONE)
						assert_int_equal(stats.buffers, SHARDS * PER_SHARD);
					else
						assert_int_equal(stats.buffers, stats.slabs);
					tnd_load_close(load);
				}
}

/* -- delayed release -- */

struct late {
	pthread_mutex_t lock;
	pthread_cond_t more;
	struct tnd_view views[SHARDS * PER_SHARD];
	int64_t due_ns[SHARDS * PER_SHARD];
	size_t count, released;
	bool over;
};

static void *release_late(void *arg)
{
	struct late *late = arg;

	pthread_mutex_lock(&late->lock);
	while (!late->over || late->released < late->count) {
		struct timespec due;

		if (late->released == late->count) {
			pthread_cond_wait(&late->more, &late->lock);
			continue;
		}
		tnd__ns_to_timespec(late->due_ns[late->released], &due);
		pthread_mutex_unlock(&late->lock);
		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL);
		check_bytes(&late->views[late->released]);
		tnd_view_release(&late->views[late->released]);
		pthread_mutex_lock(&late->lock);
		late->released++;
	}
	pthread_mutex_unlock(&late->lock);
	return NULL;
}

/* The first tensor of each slab is released 150 ms late. Return: most bytes mapped by the pool at once. */
static uint64_t run_delayed(const char *failpoints, uint64_t *ret_charged)
{
	static struct late late;
	struct tnd_plan_opts opts = {
		.packing = TND_PACKING_NAME, .slab_bytes = 1 << 20, .budget_bytes = 3 << 20};
	struct tnd_slab_stats pool = {.struct_bytes = sizeof(pool)};
	struct tnd_load_stats stats = {.struct_bytes = sizeof(stats)};
	struct tnd_load *load;
	struct tnd_view view;
	struct tnd_error error;
	pthread_t thread;
	uint64_t most = 0;
	uint32_t slab = TND_PLAN_NO_SLAB;
	int rc;

	memset(&late, 0, sizeof(late));
	pthread_mutex_init(&late.lock, NULL);
	pthread_cond_init(&late.more, NULL);
	assert_int_equal(tnd__failpoints_set(failpoints), 0);
	load = open_load(plan_of(folder, opts, (struct tnd_layout){0}), (struct tnd_load_opts){0});
	assert_int_equal(pthread_create(&thread, NULL, release_late, &late), 0);
	while ((rc = tnd_load_next(load, &view, &error)) == 1) {
		tnd_slab_pool_stats(load->pool, &pool);
		most = TND__MAX(most, pool.mapped_bytes);
		if (load->items[view.item].slab == slab) {
			tnd_view_release(&view);
			continue;
		}
		slab = load->items[view.item].slab;
		pthread_mutex_lock(&late.lock);
		late.due_ns[late.count] = tnd__now_ns() + 150000000;
		late.views[late.count++] = view;
		pthread_cond_signal(&late.more);
		pthread_mutex_unlock(&late.lock);
	}
	if (rc < 0)
		fail_msg("%s", error.message);
	pthread_mutex_lock(&late.lock);
	late.over = true;
	pthread_cond_signal(&late.more);
	pthread_mutex_unlock(&late.lock);
	pthread_join(thread, NULL);
	assert_int_equal(late.count, SHARDS * PER_SHARD / 16);
	assert_int_equal(tnd_load_end(load, NULL), 0);
	tnd_load_stats(load, &stats);
	*ret_charged = stats.peak_charged_bytes;
	tnd_load_close(load);
	tnd__failpoints_set(NULL);
	return most;
}

static void test_delayed_release(void **state)
{
	uint64_t charged, mapped;

	(void)state;
	mapped = run_delayed(NULL, &charged);
	assert_true(mapped <= 3 << 20);
	assert_true(charged <= 3 << 20);
	/* Control: charging tensors, the same load goes far over. */
	mapped = run_delayed("load.charge_leases=1", &charged);
	assert_true(mapped > 3 << 20);
}

/* -- views that are kept -- */

struct kept {
	struct tnd_view views[SHARDS * PER_SHARD];
	size_t count;
	struct tnd_error error;
	struct tnd_load_stats stats;
	int rc;
};

/* Keeps every view until the load is over. */
static void keep_all(struct kept *kept, uint32_t on_full, int64_t stall_ns, unsigned packing)
{
	struct tnd_plan_opts opts = {
		.packing = packing, .slab_bytes = 1 << 20, .budget_bytes = 6 << 20};
	struct tnd_load *load =
		open_load(plan_of(folder, opts, (struct tnd_layout){0}),
			  (struct tnd_load_opts){.on_full = on_full, .stall_ns = stall_ns});

	memset(kept, 0, sizeof(*kept));
	while ((kept->rc = tnd_load_next(load, &kept->views[kept->count], &kept->error)) == 1)
		kept->count++;
	for (size_t i = 0; i < kept->count; i++)
		check_bytes(&kept->views[i]);
	kept->stats.struct_bytes = sizeof(kept->stats);
	tnd_load_end(load, NULL);
	tnd_load_stats(load, &kept->stats);
	tnd_load_close(load);
	for (size_t i = 0; i < kept->count; i++) {
		check_bytes(&kept->views[i]);
		tnd_view_release(&kept->views[i]);
	}
}

static void test_keep_all(void **state)
{
	static struct kept kept;

	(void)state;
	for (unsigned packing = TND_PACKING_NAME; packing <= TND_PACKING_FILE; packing++) {
		keep_all(&kept, TND_ON_FULL_FAIL, 0, packing);
		assert_int_equal(kept.rc, TND_E_FULL);
		assert_true(kept.count > 16);
		assert_non_null(strstr(kept.error.message, "layer.0.w00"));
		keep_all(&kept, TND_ON_FULL_WAIT, 300000000, packing);
		assert_int_equal(kept.rc, TND_E_DEADLINE);
		assert_non_null(strstr(kept.error.message, "layer.0.w00"));
		keep_all(&kept, TND_ON_FULL_OVERRUN, 0, packing);
		assert_int_equal(kept.rc, 0);
		assert_int_equal(kept.count, SHARDS * PER_SHARD);
		assert_true(kept.stats.overruns > 0 && kept.stats.overrun_bytes > 0);
		keep_all(&kept, TND_ON_FULL_COPY, 0, packing);
		assert_int_equal(kept.rc, 0);
		assert_int_equal(kept.count, SHARDS * PER_SHARD);
		assert_true(kept.stats.copied > 300);
		assert_int_equal(kept.stats.overruns, 0);
		assert_true(kept.stats.peak_charged_bytes <= kept.stats.budget_bytes);
	}
}

/* -- escapes -- */

static size_t warnings;
static char last_warning[TND_ERROR_MESSAGE_MAX];

static void count_warning(void *arg, int level, const char *message)
{
	(void)arg;
	(void)level;
	warnings++;
	snprintf(last_warning, sizeof(last_warning), "%s", message);
}

static int run_escape(uint32_t phase, struct tnd_view *kept, struct tnd_error *error)
{
	struct tnd_plan_opts opts = {.phase = phase,
				     .packing = TND_PACKING_NAME,
				     .slab_bytes = 1 << 20,
				     .budget_bytes = 8 << 20,
				     .draft_prefix = phase == TND_PHASE_DRAFT ? "layer." : NULL};
	struct tnd_load *load =
		open_load(plan_of(folder, opts, (struct tnd_layout){0}), (struct tnd_load_opts){0});
	struct tnd_slab_stats pool = {.struct_bytes = sizeof(pool)};
	struct tnd_load_stats stats = {.struct_bytes = sizeof(stats)};
	struct tnd_view view;
	int rc;

	for (int i = 0; tnd_load_next(load, &view, error) == 1; i++) {
		if (i == 21 || i == 20)
			kept[21 - i] = view;
		else
			tnd_view_release(&view);
	}
	rc = tnd_load_end(load, error);
	assert_int_equal(tnd_load_end(load, NULL), rc);
	/* What is still charged is the slab that escaped, and no more. */
	tnd_load_stats(load, &stats);
	assert_int_equal(stats.live, 1);
	assert_int_equal(stats.charged_bytes, stats.live_bytes);
	tnd_slab_pool_stats(load->pool, &pool);
	assert_int_equal(pool.live, 1);
	assert_int_equal(load->escaped->name_count, 2);
	assert_string_equal(load->escaped->names[0], "layer.0.w20");
	assert_string_equal(load->escaped->names[1], "layer.0.w21");
	tnd_load_close(load);
	check_bytes(&kept[0]);
	check_bytes(&kept[1]);
	tnd_view_release(&kept[0]);
	check_bytes(&kept[1]);
	tnd_view_release(&kept[1]);
	return rc;
}

static void test_escape(void **state)
{
	struct tnd_view kept[2];
	struct tnd_error error;

	(void)state;
	tnd_log_set(count_warning, NULL, TND_LOG_WARNING);
	warnings = 0;
	assert_int_equal(run_escape(TND_PHASE_TARGET, kept, &error), TND_E_ESCAPED);
	assert_non_null(strstr(error.message, "still alive after the target load"));
	assert_non_null(strstr(error.message, "layer.0.w20, layer.0.w21"));
	assert_null(strstr(error.message, "w19"));
	assert_int_equal(warnings, 0);
	assert_int_equal(run_escape(TND_PHASE_DRAFT, kept, &error), 0);
	assert_int_equal(warnings, 1);
	assert_non_null(strstr(last_warning, "layer.0.w20, layer.0.w21"));
	assert_int_equal(run_escape(TND_PHASE_ALL, kept, &error), 0);
	assert_int_equal(warnings, 2);
	tnd_log_set(NULL, NULL, 0);
}

/* -- own delivery and pieces -- */

static char *big_file(uint64_t rows, uint64_t columns)
{
	struct ck_tensor tensors[] = {
		{"a", "U8", {3}, 1, 3},
		{"big.down_proj.weight", "U8", {rows, columns}, 2, rows * columns},
		{"empty", "F32", {0, 4}, 2, 0},
		{"z", "F32", {5}, 1, 20}};
	char *path = NULL;

	assert_true(asprintf(&path, "%s/big.st", folder) > 0);
	ck_write(path, tensors, 4, "x");
	return path;
}

static void *placed;

static void *place(void *arg, const struct tnd_plan_item *item)
{
	(void)arg;
	return item->slice_bytes > 1000 ? placed : NULL;
}

/* A tensor of twice the budget: consecutive pieces; together in one memory, the caller's (1) or ours (2), for own delivery. */
static void test_pieces(void **state)
{
	char *path = big_file(2048, 4096);
	static const int64_t slabs[] = {1 << 20, TND_SLAB_NONE};

	(void)state;
	placed = malloc(8 << 20);
	for (unsigned packing = TND_PACKING_NAME; packing <= TND_PACKING_FILE; packing++)
		for (unsigned own = 0; own < 3; own++)
			for (size_t s = 0; s < 2; s++) {
				struct tnd_plan_opts opts = {.packing = packing,
							     .slab_bytes = slabs[s],
							     .budget_bytes = 4 << 20,
							     .oversize = TND_OVERSIZE_PIECES};
				struct tnd_load_stats stats = {.struct_bytes = sizeof(stats)};
				struct tnd_load *load = open_load(
					plan_of(path, opts, (struct tnd_layout){0}),
					(struct tnd_load_opts){.flags = own ? TND_LOAD_F_OWN : 0,
							       .place = own == 1 ? place : NULL});
				struct tnd_view view;
				uint64_t at = 0;
				size_t tensors = 0;

				while (tnd_load_next(load, &view, NULL) == 1) {
					check_bytes(&view);
					if (strcmp(view.name, "big.down_proj.weight") == 0) {
						assert_int_equal(view.piece_offset, at);
						assert_int_equal(view.tensor_bytes, 8 << 20);
						at += view.bytes;
						if (own == 1)
							assert_ptr_equal(view.data, placed);
					}
					tensors += !!(view.flags & TND_VIEW_F_LAST);
					tnd_view_release(&view);
				}
				assert_int_equal(at, 8 << 20);
				assert_int_equal(tensors, 4);
				assert_int_equal(tnd_load_end(load, NULL), 0);
				tnd_load_stats(load, &stats);
				assert_int_equal(stats.tensors, 4);
				assert_true(stats.peak_charged_bytes <= 4 << 20);
				tnd_load_close(load);
			}
	free(placed);
	unlink(path);
	free(path);
}

/* Above the budget with overrun: alone, counted, whole. */
static void test_oversize_overrun(void **state)
{
	char *path = big_file(2048, 4096);
	struct tnd_plan_opts opts = {
		.slab_bytes = 1 << 20, .budget_bytes = 4 << 20, .oversize = TND_OVERSIZE_OVERRUN};
	struct tnd_load_stats stats = {.struct_bytes = sizeof(stats)};
	struct tnd_load *load;

	(void)state;
	for (opts.packing = TND_PACKING_NAME; opts.packing <= TND_PACKING_FILE; opts.packing++) {
		load = open_load(plan_of(path, opts, (struct tnd_layout){0}),
				 (struct tnd_load_opts){0});
		assert_int_equal(drain(load), 4);
		assert_int_equal(tnd_load_end(load, NULL), 0);
		tnd_load_stats(load, &stats);
		assert_int_equal(stats.overruns, 1);
		tnd_load_close(load);
	}
	unlink(path);
	free(path);
}

/* Own delivery that is left half way: what was made ahead for tensors that nobody took goes too. */
static void test_own_left(void **state)
{
	(void)state;
	for (size_t take = 0; take < 80; take += 20) {
		struct tnd_plan_opts opts = {.budget_bytes = 8 << 20};
		struct tnd_load *load = open_load(plan_of(folder, opts, (struct tnd_layout){0}),
						  (struct tnd_load_opts){.flags = TND_LOAD_F_OWN});
		struct tnd_view view;

		for (size_t i = 0; i < take; i++) {
			assert_int_equal(tnd_load_next(load, &view, NULL), 1);
			check_bytes(&view);
			tnd_view_release(&view);
		}
		assert_int_equal(tnd_load_end(load, NULL), 0);
		assert_int_equal(atomic_load(&load->flow->consumer_bytes), 0);
		tnd_load_close(load);
	}
}

/* A memory taken over from a view is the caller's, and no escape. */
static void test_take(void **state)
{
	struct tnd_plan_opts opts = {.phase = TND_PHASE_TARGET, .budget_bytes = 8 << 20};
	struct tnd_load *load = open_load(plan_of(folder, opts, (struct tnd_layout){0}),
					  (struct tnd_load_opts){.flags = TND_LOAD_F_OWN});
	struct tnd_view view;
	uint64_t map_bytes;
	void *memory;

	(void)state;
	assert_int_equal(tnd_load_next(load, &view, NULL), 1);
	assert_int_equal(tnd_view_take(&view, &memory, &map_bytes), 0);
	assert_int_equal(tnd_view_take(&view, &memory, &map_bytes), TND_E_INVALID);
	tnd_view_release(&view);
	assert_int_equal(tnd_load_end(load, NULL), 0);
	tnd_load_close(load);
	assert_int_equal(((unsigned char *)memory)[5], ck_byte("layer.0.w00", 5));
	tnd_own_free(memory, map_bytes);
}

/* -- ends -- */

static int stop_at_half(void *arg, const struct tnd_progress *progress)
{
	(void)arg;
	return progress->done_bytes > progress->total_bytes / 2;
}

static void test_cancel(void **state)
{
	struct tnd_plan_opts opts = {.budget_bytes = 8 << 20, .slab_bytes = 1 << 20};
	struct tnd_error error;
	struct tnd_view view;
	struct tnd_load *load;
	int rc;

	(void)state;
	/* By flag, before the first view. */
	load = open_load(plan_of(folder, opts, (struct tnd_layout){0}), (struct tnd_load_opts){0});
	tnd_load_cancel(load);
	assert_int_equal(tnd_load_next(load, &view, &error), TND_E_CANCELLED);
	assert_int_equal(tnd_load_end(load, NULL), TND_E_CANCELLED);
	tnd_load_close(load);
	/* By the progress callback, called at most each 50 ms: the load must last. */
	assert_int_equal(tnd__failpoints_set("storage.read.buffered=delay:10"), 0);
	load = open_load(plan_of(folder, opts, (struct tnd_layout){0}),
			 (struct tnd_load_opts){.progress = stop_at_half,
						.direct = TND_DIRECT_OFF,
						.thread_count = 1});
	while ((rc = tnd_load_next(load, &view, &error)) == 1)
		tnd_view_release(&view);
	assert_int_equal(rc, TND_E_CANCELLED);
	tnd_load_close(load);
	/* By the deadline. */
	load = open_load(plan_of(folder, opts, (struct tnd_layout){0}),
			 (struct tnd_load_opts){.deadline_ns = tnd__now_ns() + 30000000,
						.direct = TND_DIRECT_OFF,
						.thread_count = 1});
	while ((rc = tnd_load_next(load, &view, &error)) == 1)
		tnd_view_release(&view);
	assert_int_equal(rc, TND_E_DEADLINE);
	tnd_load_close(load);
	tnd__failpoints_set(NULL);
}

/* Cut between plan and read: an error with a tensor's name, and the process lives. */
static void test_truncated(void **state)
{
	char *path = big_file(1024, 4096);
	struct tnd_error error;
	struct tnd_view view;

	(void)state;
	for (unsigned packing = TND_PACKING_NAME; packing <= TND_PACKING_FILE; packing++) {
		struct tnd_plan_opts opts = {.packing = packing, .budget_bytes = 16 << 20};
		struct tnd_plan *plan = plan_of(path, opts, (struct tnd_layout){0});
		struct tnd_load *load;
		int rc;

		assert_int_equal(truncate(path, 1 << 20), 0);
		load = open_load(plan, (struct tnd_load_opts){0});
		while ((rc = tnd_load_next(load, &view, &error)) == 1)
			tnd_view_release(&view);
		assert_int_equal(rc, TND_E_CHANGED);
		assert_string_equal(error.name, "big.down_proj.weight");
		assert_int_equal(tnd_load_end(load, &error), TND_E_CHANGED);
		tnd_load_close(load);
		free(path);
		path = big_file(1024, 4096);
	}
	unlink(path);
	free(path);
}

static void test_io_error(void **state)
{
	struct tnd_plan_opts opts = {.budget_bytes = 8 << 20, .packing = TND_PACKING_NAME};
	struct tnd_error error;
	struct tnd_view view;
	struct tnd_load *load;
	int rc;

	(void)state;
	assert_int_equal(tnd__failpoints_set("storage.read.buffered=EIO@3,storage.read.direct=EIO@"
					     "3,storage.uring.cqe=EIO@3"),
			 0);
	load = open_load(plan_of(folder, opts, (struct tnd_layout){0}), (struct tnd_load_opts){0});
	while ((rc = tnd_load_next(load, &view, &error)) == 1) {
		check_bytes(&view);
		tnd_view_release(&view);
	}
	assert_int_equal(rc, -EIO);
	assert_non_null(strstr(error.message, "model-0000"));
	assert_non_null(strstr(error.message, "layer."));
	tnd_load_close(load);
	tnd__failpoints_set(NULL);
}

/* Half-consumed, unconsumed, empty: nothing of a load is left, fifty times. */
static void test_flat(void **state)
{
	unsigned int threads = 0, descriptors = 0;

	(void)state;
	for (int i = 0; i < 50; i++) {
		struct tnd_plan_opts opts = {
			.budget_bytes = 8 << 20, .slab_bytes = 1 << 20, .packing = 1 + (i & 1)};
		struct tnd_load *load;
		struct tnd_view view;

		if (i == 49) {
			opts.flags = TND_PLAN_F_NAMES;
		}
		load = open_load(plan_of(folder, opts, (struct tnd_layout){0}),
				 (struct tnd_load_opts){0});
		for (int k = 0; k < i * 8 && i < 49; k++) {
			assert_int_equal(tnd_load_next(load, &view, NULL), 1);
			tnd_view_release(&view);
		}
		if (i == 49)
			assert_int_equal(tnd_load_next(load, &view, NULL), 0);
		assert_int_equal(tnd_load_end(load, NULL), 0);
		if (i == 1) {
			threads = thread_count();
			descriptors = fd_count();
		}
		if (i >= 1) {
			assert_int_equal(thread_count(), threads);
			assert_int_equal(fd_count(), descriptors);
		}
		tnd_load_close(load);
	}
}

struct second {
	struct tnd_load *load;
	int rc;
};

static void *take_one(void *arg)
{
	struct second *second = arg;
	struct tnd_view view;

	second->rc = tnd_load_next(second->load, &view, NULL);
	if (second->rc == 1)
		tnd_view_release(&view);
	return NULL;
}

static int second_taker(void *arg, const struct tnd_progress *progress)
{
	struct second *second = arg;
	pthread_t thread;

	(void)progress;
	if (second->rc != 1)
		return 0;
	/* We are inside next(): a second caller must be turned away. */
	assert_int_equal(pthread_create(&thread, NULL, take_one, second), 0);
	pthread_join(thread, NULL);
	return 0;
}

static void test_busy(void **state)
{
	struct tnd_plan_opts opts = {.budget_bytes = 8 << 20};
	struct second second = {.rc = 1};

	(void)state;
	second.load = open_load(
		plan_of(folder, opts, (struct tnd_layout){0}),
		(struct tnd_load_opts){.progress = second_taker, .progress_arg = &second});
	drain(second.load);
	assert_int_equal(second.rc, -EBUSY);
	tnd_load_close(second.load);
}

/* Each allocation of the load's own fails in turn: an error, and nothing left (the address sanitizer looks). */
static void test_allocations(void **state)
{
	struct tnd_plan_opts opts = {.budget_bytes = 8 << 20, .slab_bytes = 1 << 20};
	struct tnd_load_opts load_opts = {.struct_bytes = sizeof(load_opts)};
	static const char *const points[] = {"load.alloc",    "mem.alloc",      "mem.map",
					     "storage.alloc", "storage.thread", "load.thread"};
	size_t failed = 0;

	(void)state;
	for (size_t p = 0; p < sizeof(points) / sizeof(*points); p++)
		for (int n = 1; n <= 40; n += n < 12 ? 1 : 7) {
			struct tnd_plan *plan = plan_of(folder, opts, (struct tnd_layout){0});
			struct tnd_load *load = NULL;
			struct tnd_view view;
			char text[64];
			int rc;

			snprintf(text, sizeof(text), "%s=ENOMEM@%dx1", points[p], n);
			assert_int_equal(tnd__failpoints_set(text), 0);
			rc = tnd_load_open(plan, &load_opts, &load, NULL);
			while (rc >= 0 && (rc = tnd_load_next(load, &view, NULL)) == 1) {
				check_bytes(&view);
				tnd_view_release(&view);
			}
			failed += rc < 0;
			tnd_load_close(load);
			tnd_plan_close(plan);
			tnd__failpoints_set(NULL);
		}
	assert_true(failed > 12);
}

/* One argument: a pattern of the tests to run. */
int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_bytes),    cmocka_unit_test(test_delayed_release),
		cmocka_unit_test(test_keep_all), cmocka_unit_test(test_escape),
		cmocka_unit_test(test_pieces),   cmocka_unit_test(test_oversize_overrun),
		cmocka_unit_test(test_take),     cmocka_unit_test(test_own_left),
		cmocka_unit_test(test_cancel),   cmocka_unit_test(test_truncated),
		cmocka_unit_test(test_io_error), cmocka_unit_test(test_flat),
		cmocka_unit_test(test_busy),     cmocka_unit_test(test_allocations),
	};

	if (argc > 1)
		cmocka_set_test_filter(argv[1]);
	return cmocka_run_group_tests(tests, make_folder, drop_folder);
}
