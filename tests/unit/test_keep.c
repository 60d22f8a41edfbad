/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_keep.c - what could break: bytes that change, or are gone, under one who was to keep them; pages and mappings that stay behind; a write
 * that another reader sees, or the next contents of the slab show; a slab that is used again under a reader that was given up. Shown by
 * patterns read again and again while the writer fills the same slabs anew, by counting mappings and resident pages, by failpoints, and
 * with a reader whose cursor is nonsense.
 */
#include "bulkscene.h"

/* -- keeping -- */

struct kept {
	const unsigned char *data;
	uint64_t seed;
	const struct tnd__bulk_range *ranges;
	size_t count;
	_Atomic bool stop;
	bool broken;
};

static bool is_kept(const struct kept *kept)
{
	for (size_t i = 0; i < kept->count; i++)
		if (!is_filled(kept->data, kept->ranges[i].begin, kept->ranges[i].end, kept->seed))
			return false;
	return true;
}

/* Reads what is kept, from before it is until told to stop. */
static void *read_on(void *arg)
{
	struct kept *kept = arg;

	do
		kept->broken |= !is_kept(kept);
	while (!kept->stop);
	return NULL;
}

static uint64_t resident(const void *base, uint64_t bytes)
{
	unsigned char seen[64 * SLAB / PAGE];
	uint64_t count = 0;

	assert_int_equal(mincore((void *)(uintptr_t)base, bytes, seen), 0);
	for (uint64_t i = 0; i < bytes / PAGE; i++)
		count += seen[i] & 1;
	return count;
}

/* Out of order, overlapping, empty, within one page, up to the end. */
static const struct tnd__bulk_range ranges[] = {
	{40 * PAGE + 5, 40 * PAGE + 6},
	{3 * PAGE + 100, 5 * PAGE + 1},
	{4 * PAGE, 4 * PAGE + 9},
	{50 * PAGE, 50 * PAGE},
	{SLAB - 10, SLAB},
};
#define RANGE_COUNT (sizeof(ranges) / sizeof(*ranges))

static void keep_while_reused(uint32_t flags)
{
	struct kept kept = {.seed = 1, .ranges = ranges, .count = RANGE_COUNT};
	struct tnd_channel *reader;
	struct tnd_object object;
	struct scene scene;
	pthread_t thread;
	void *base;
	uint64_t bytes;

	open_scene(&scene, SLAB, SLAB);
	reader = attach_with(&scene, 0, flags);
	send_slab(scene.writer, SLAB, 1);
	object = borrow(reader, SLAB, 1);
	kept.data = object.data;
	assert_int_equal(pthread_create(&thread, NULL, read_on, &kept), 0);
	assert_int_equal(tnd__bulk_keep(reader, &object, ranges, RANGE_COUNT, &base, &bytes), 0);
	assert_ptr_equal(base, kept.data + 3 * PAGE);
	assert_int_equal(bytes, SLAB - 3 * PAGE);
	assert_int_equal(resident(base, bytes), 5);
	/* The lease is over, once. */
	assert_int_equal(tnd_channel_release(reader, &object), TND_E_INVALID);
	assert_int_equal(tnd__bulk_keep(reader, &object, ranges, RANGE_COUNT, &base, &bytes),
			 TND_E_INVALID);
	for (uint64_t i = 0; i < 10; i++) {
		send_slab(scene.writer, SLAB, i + 2);
		take(reader, SLAB, i + 2);
	}
	assert_int_equal(slabs_made(&scene), 1);
	kept.stop = true;
	pthread_join(thread, NULL);
	assert_false(kept.broken);
	tnd_channel_close(reader);
	close_scene(&scene);
	/* Beyond the channel, too. */
	assert_true(is_kept(&kept));
	assert_int_equal(munmap(base, bytes), 0);
}

static void test_keep(void **state)
{
	(void)state;
	keep_while_reused(0);
	keep_while_reused(TND_CHANNEL_ATTACH_F_PRIVATE);
}

/* Again and again: nothing piles up, nothing of the memfd stays. */
static void test_keep_leaves_nothing(void **state)
{
	struct tnd__bulk_range range;
	struct tnd_channel *reader;
	struct tnd_object object;
	unsigned int maps = 0;
	struct scene scene;
	uint64_t bytes;
	void *base;

	(void)state;
	open_scene(&scene, SLAB, SLAB);
	reader = attach(&scene, 0);
	for (uint64_t i = 0; i < 60; i++) {
		send_slab(scene.writer, SLAB, i);
		object = borrow(reader, SLAB, i);
		range.begin = i % 7 * 3 * PAGE;
		range.end = range.begin + i % 5 * PAGE;
		assert_int_equal(tnd__bulk_keep(reader, &object, &range, i % 3 != 0, &base, &bytes),
				 0);
		assert_int_equal(bytes, i % 3 ? range.end - range.begin : 0);
		assert_true((base == NULL) == (bytes == 0));
		/* The writer's own mapping. */
		assert_int_equal(map_count("memfd:tundish.slab"), 1);
		if (bytes) {
			assert_int_equal(mprotect(base, bytes, PROT_READ), 0);
			assert_int_equal(munmap(base, bytes), 0);
		}
		if (i == 20)
			maps = map_count("");
	}
	assert_in_range(map_count(""), maps - 2, maps + 2);
	tnd_channel_close(reader);
	close_scene(&scene);
}

static void test_keep_refused(void **state)
{
	static const struct tnd__bulk_range bad[] = {
		{5, 4}, {0, SLAB - 99}, {SLAB, SLAB + 1}, {UINT64_MAX, UINT64_MAX}};
	struct tnd_channel *reader;
	struct tnd_object object, other;
	struct scene scene;
	uint64_t bytes = 7;
	void *base = &scene;

	(void)state;
	open_scene(&scene, 2 * SLAB, SLAB);
	reader = attach(&scene, 0);
	send_slab(scene.writer, SLAB - 100, 1);
	object = borrow(reader, SLAB - 100, 1);
	for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++)
		assert_int_equal(tnd__bulk_keep(reader, &object, &bad[i], 1, &base, &bytes),
				 TND_E_INVALID);
	assert_int_equal(tnd__bulk_keep(scene.writer, &object, bad, 0, &base, &bytes),
			 TND_E_INVALID);
	/* One that lies about its length. */
	other = object;
	other.bytes = UINT64_MAX;
	assert_int_equal(tnd__bulk_keep(reader, &other, &(struct tnd__bulk_range){0, 2 * SLAB}, 1,
					&base, &bytes),
			 TND_E_INVALID);
	/* One of the ring. */
	assert_int_equal(tnd_channel_send(scene.writer, "small", 5, 0, NULL), 0);
	assert_int_equal(tnd_channel_borrow(reader, tnd_deadline_in(PATIENCE), &other, NULL), 0);
	assert_int_equal(tnd__bulk_keep(reader, &other, bad, 0, &base, &bytes), TND_E_INVALID);
	assert_int_equal(tnd_channel_release(reader, &other), 0);
	assert_ptr_equal(base, &scene);
	assert_int_equal(bytes, 7);
	assert_true(is_filled(object.data, 0, SLAB - 100, 1));
	assert_int_equal(tnd_channel_release(reader, &object), 0);
	tnd_channel_close(reader);
	close_scene(&scene);
}

#ifdef TND_FAILPOINTS
static void test_keep_faults(void **state)
{
	static const char *const points[] = {"channel.alloc=ENOMEM", "channel.keep=ENOMEM",
					     "channel.keep-move=ENOMEM"};
	struct tnd_channel *reader;
	struct tnd_object object;
	struct scene scene;
	uint64_t bytes;
	void *base;

	(void)state;
	open_scene(&scene, SLAB, SLAB);
	reader = attach(&scene, 0);
	send_slab(scene.writer, SLAB, 1);
	object = borrow(reader, SLAB, 1);
	for (size_t i = 0; i < sizeof(points) / sizeof(*points); i++) {
		unsigned int maps = map_count("");

		assert_int_equal(tnd__failpoints_set(points[i]), 0);
		assert_int_equal(
			tnd__bulk_keep(reader, &object, ranges, RANGE_COUNT, &base, &bytes),
			-ENOMEM);
		tnd__failpoints_set(NULL);
		assert_in_range(map_count(""), maps - 1, maps + 1);
		assert_true(is_filled(object.data, 0, SLAB, 1));
	}
	/* It is borrowed still, and can be kept still. */
	assert_int_equal(try_send(scene.writer, SLAB, 2, false, 0), -ETIMEDOUT);
	assert_int_equal(tnd__bulk_keep(reader, &object, ranges, RANGE_COUNT, &base, &bytes), 0);
	send_slab(scene.writer, SLAB, 2);
	take(reader, SLAB, 2);
	assert_int_equal(munmap(base, bytes), 0);
	tnd_channel_close(reader);
	close_scene(&scene);
}
#endif

/* After the writer's end, and after this reader was given up. */
static void test_keep_at_the_end(void **state)
{
	struct tnd_channel *reader;
	struct tnd_object object;
	struct scene scene;
	uint64_t bytes;
	void *base;

	(void)state;
	for (int i = 0; i < 4; i++) {
		struct kept kept = {.seed = 1, .ranges = ranges, .count = RANGE_COUNT};

		open_scene(&scene, 2 * SLAB, SLAB);
		reader = attach(&scene, 0);
		send_slab(scene.writer, SLAB, 1);
		object = borrow(reader, SLAB, 1);
		kept.data = object.data;
		if (i & 1)
			assert_int_equal(tnd_channel_evict(scene.writer, 0), 0);
		for (uint64_t k = 0; k < 10 && i & 1; k++)
			send_slab(scene.writer, SLAB, k + 2);
		if (i & 2) {
			tnd_channel_close(scene.writer);
			scene.writer = NULL;
		}
		assert_int_equal(
			tnd__bulk_keep(reader, &object, ranges, RANGE_COUNT, &base, &bytes), 0);
		tnd_channel_close(reader);
		assert_true(is_kept(&kept));
		assert_int_equal(munmap(base, bytes), 0);
		close_scene(&scene);
	}
}

/* -- private views -- */

static void private_views(const char *points)
{
	struct tnd_channel *mine, *other;
	struct tnd_object object, seen;
	unsigned char *data;
	struct scene scene;

	open_scene(&scene, SLAB, SLAB);
	mine = attach_with(&scene, 0, TND_CHANNEL_ATTACH_F_PRIVATE);
	other = attach(&scene, 1);
#ifdef TND_FAILPOINTS
	assert_int_equal(tnd__failpoints_set(points), 0);
#else
	(void)points;
#endif
	for (uint64_t i = 0; i < 8; i++) {
		/* The last one is shorter: what lies behind it is not its. */
		uint64_t bytes = i == 7 ? SLAB / 2 : SLAB;

		send_slab(scene.writer, bytes, i);
		object = borrow(mine, bytes, i);
		data = (unsigned char *)(uintptr_t)object.data;
		if (i % 3 == 0) {
			data[0] ^= 255;
			data[bytes - 1] ^= 255;
			memset(data + 7 * PAGE, 0, PAGE);
			assert_int_equal(data[7 * PAGE], 0);
		} else if (i % 3 == 1) {
			memset(data, 0, bytes);
		}
		seen = borrow(other, bytes, i);
		assert_int_equal(tnd_channel_release(mine, &object), 0);
		assert_int_equal(tnd_channel_release(other, &seen), 0);
	}
	assert_int_equal(slabs_made(&scene), 1);
#ifdef TND_FAILPOINTS
	tnd__failpoints_set(NULL);
#endif
	tnd_channel_close(mine);
	tnd_channel_close(other);
	close_scene(&scene);
}

static void test_private(void **state)
{
	(void)state;
	private_views(NULL);
#ifdef TND_FAILPOINTS
	private_views("channel.pagemap=EPERM");
	private_views("channel.drop=EINVAL");
	private_views("channel.pagemap=EPERM,channel.drop=EINVAL");
#endif
}

/* Where nothing was written the page tables stay; only what was written is dropped with them. */
static void test_private_keeps_tables(void **state)
{
	struct tnd_channel *reader;
	struct tnd__view *view;
	struct tnd_object object;
	struct scene scene;
	bool clean;

	(void)state;
	open_scene(&scene, SLAB, SLAB);
	reader = attach_with(&scene, 0, TND_CHANNEL_ATTACH_F_PRIVATE);
	if (reader->slabs->pagemap_fd < 0) {
		tnd_channel_close(reader);
		close_scene(&scene);
		skip();
	}
	for (int written = 0; written < 2; written++) {
		uint64_t entry = 0;
		off_t at;

		send_slab(scene.writer, SLAB, 1);
		object = borrow(reader, SLAB, 1);
		if (written)
			*(unsigned char *)(uintptr_t)object.data ^= 1;
		assert_int_equal(tnd_channel_release(reader, &object), 0);
		view = reader->slabs->views;
		assert_non_null(view->data);
		at = (off_t)((uintptr_t)(view->data + 9 * PAGE) / PAGE * sizeof(entry));
		assert_int_equal(pread(reader->slabs->pagemap_fd, &entry, sizeof(entry), at),
				 sizeof(entry));
		clean = entry >> 63;
		assert_int_equal(clean, !written);
	}
	tnd_channel_close(reader);
	close_scene(&scene);
}

static void test_private_keep(void **state)
{
	static const struct tnd__bulk_range range = {0, 2 * PAGE};
	struct tnd_channel *reader;
	struct tnd_object object;
	struct scene scene;
	unsigned char *data;
	uint64_t bytes;
	void *base;

	(void)state;
	open_scene(&scene, SLAB, SLAB);
	reader = attach_with(&scene, 0, TND_CHANNEL_ATTACH_F_PRIVATE);
	send_slab(scene.writer, SLAB, 1);
	object = borrow(reader, SLAB, 1);
	data = (unsigned char *)(uintptr_t)object.data;
	data[5] = 99;
	assert_int_equal(tnd__bulk_keep(reader, &object, &range, 1, &base, &bytes), 0);
	assert_int_equal(bytes, 2 * PAGE);
	assert_int_equal(data[5], 99);
	data[6] = 98; /* as before, it may be written to */
	assert_true(is_filled(data, 7, 2 * PAGE, 1));
	send_slab(scene.writer, SLAB, 2);
	take(reader, SLAB, 2);
	assert_int_equal(data[5], 99);
	assert_int_equal(munmap(base, bytes), 0);
	tnd_channel_close(reader);
	close_scene(&scene);
}

static void test_flags(void **state)
{
	static const uint32_t unknown[] = {2, 3, UINT32_C(1) << 31};
	struct tnd_channel_attach_opts opts = {.struct_bytes = sizeof(opts)};
	struct tnd_channel *reader;
	struct tnd_error error = {0};
	struct scene scene;

	(void)state;
	open_scene(&scene, SLAB, SLAB);
	for (size_t i = 0; i < sizeof(unknown) / sizeof(*unknown); i++) {
		opts.flags = unknown[i];
		assert_int_equal(tnd_channel_attach(tnd_channel_address(scene.writer), 0, &opts,
						    &reader, &error),
				 TND_E_INVALID);
	}
	close_scene(&scene);
}

/* -- given up -- */

/* What an evicted reader holds stays as it is, is not counted on, and is charged no longer. */
static void test_evicted(void **state)
{
	struct tnd_object held[2], late;
	struct tnd_channel *reader, *other;
	struct tnd__bulk_figures figures;
	struct scene scene;

	(void)state;
	for (int corrupt = 0; corrupt < 2; corrupt++) {
		open_scene(&scene, 3 * SLAB, SLAB);
		reader = attach(&scene, 0);
		other = attach(&scene, 1);
		for (uint64_t i = 0; i < 3; i++) {
			send_slab(scene.writer, SLAB, i);
			take(other, SLAB, i);
		}
		held[0] = borrow(reader, SLAB, 0);
		held[1] = borrow(reader, SLAB, 1);
		assert_int_equal(try_send(scene.writer, SLAB, 9, false, 0), -ETIMEDOUT);
		if (corrupt)
			atomic_store(&reader->shared.control->places[reader->reader.place].cursor,
				     UINT64_C(1) << 60);
		else
			assert_int_equal(tnd_channel_evict(scene.writer, 0), 0);
		for (uint64_t i = 0; i < 20; i++) {
			send_slab(scene.writer, SLAB, i + 3);
			take(other, SLAB, i + 3);
			assert_true(charged(&scene) <= 3 * SLAB);
			assert_true(is_filled(held[0].data, 0, SLAB, 0));
			assert_true(is_filled(held[1].data, 0, SLAB, 1));
		}
		tnd__bulk_figures(scene.writer, &figures);
		assert_int_equal(figures.free, figures.slabs);
		assert_int_equal(figures.late_count, 0);
		assert_int_equal(charged(&scene), figures.slabs * SLAB);
		assert_int_equal(tnd_channel_borrow(reader, 0, &late, NULL), TND_E_EVICTED);
		assert_int_equal(tnd_channel_release(reader, &held[0]), TND_E_EVICTED);
		assert_int_equal(tnd_channel_release(reader, &held[1]), TND_E_EVICTED);
		tnd_channel_close(reader);
		tnd_channel_close(other);
		close_scene(&scene);
	}
}

/* A slab that nobody else holds is retired for a writer that waits: it has room again at once. */
static void *evict_later(void *arg)
{
	struct tnd_channel *writer = arg;
	struct tnd_channel_info info = {.struct_bytes = sizeof(info)};
	int64_t deadline = tnd_deadline_in(PATIENCE);

	do
		tnd_channel_info(writer, &info);
	while (!info.waits && tnd_deadline_in(0) < deadline);
	tnd_channel_evict(writer, 0);
	return NULL;
}

static void test_evicted_while_waited_for(void **state)
{
	struct tnd_channel *reader;
	struct tnd_object held;
	struct scene scene;
	pthread_t thread;

	(void)state;
	open_scene(&scene, SLAB, SLAB);
	reader = attach(&scene, 0);
	send_slab(scene.writer, SLAB, 1);
	held = borrow(reader, SLAB, 1);
	assert_int_equal(pthread_create(&thread, NULL, evict_later, scene.writer), 0);
	send_slab(scene.writer, SLAB, 2);
	pthread_join(thread, NULL);
	assert_true(is_filled(held.data, 0, SLAB, 1));
	assert_int_equal(slabs_made(&scene), 2);
	tnd_channel_close(reader);
	close_scene(&scene);
}

/* One that leaves costs nothing: its slabs are used again. */
static void test_left(void **state)
{
	struct tnd_channel *reader;
	struct scene scene;

	(void)state;
	open_scene(&scene, SLAB, SLAB);
	for (uint64_t i = 0; i < 5; i++) {
		reader = attach(&scene, 0);
		send_slab(scene.writer, SLAB, i);
		(void)borrow(reader, SLAB, i);
		if (i & 1)
			tnd_channel_abandon(reader);
		else
			tnd_channel_close(reader);
	}
	send_slab(scene.writer, SLAB, 9);
	assert_int_equal(slabs_made(&scene), 1);
	close_scene(&scene);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_keep),
		cmocka_unit_test(test_keep_leaves_nothing),
		cmocka_unit_test(test_keep_refused),
#ifdef TND_FAILPOINTS
		cmocka_unit_test(test_keep_faults),
#endif
		cmocka_unit_test(test_keep_at_the_end),
		cmocka_unit_test(test_private),
		cmocka_unit_test(test_private_keeps_tables),
		cmocka_unit_test(test_private_keep),
		cmocka_unit_test(test_flags),
		cmocka_unit_test(test_evicted),
		cmocka_unit_test(test_evicted_while_waited_for),
		cmocka_unit_test(test_left),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
