/* SPDX-License-Identifier: Apache-2.0 */
/* bulkscene.h - for tests of flows of slabs: a channel with its pool and budget, objects that tell */
#ifndef TND_TEST_BULKSCENE_H
#define TND_TEST_BULKSCENE_H

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "channel/bigobject.h"
#include "support/fds.h"

#define KIB UINT64_C(1024)
#define SECOND INT64_C(1000000000)
#define PATIENCE (20 * SECOND)
#define SLAB (256 * KIB)
#define PAGE UINT64_C(4096)

struct scene {
	struct tnd_budget *budget;
	struct tnd_slab_pool *pool;
	struct tnd_channel *writer;
	unsigned int fds;
};

static inline uint64_t charged(const struct scene *scene)
{
	struct tnd_budget_stats stats = {.struct_bytes = sizeof(stats)};

	assert_int_equal(tnd_budget_stats(scene->budget, &stats), 0);
	return stats.charged_bytes;
}

static inline uint64_t slabs_made(const struct scene *scene)
{
	struct tnd_slab_stats stats = {.struct_bytes = sizeof(stats)};

	assert_int_equal(tnd_slab_pool_stats(scene->pool, &stats), 0);
	return stats.allocations;
}

static inline void open_scene(struct scene *scene, uint64_t budget_bytes, uint64_t slab_bytes)
{
	struct tnd_slab_pool_opts pool = {.struct_bytes = sizeof(pool),
					  .flags = TND_SLAB_POOL_F_SHARED,
					  .slab_bytes = slab_bytes};
	struct tnd_channel_opts opts = {.struct_bytes = sizeof(opts),
					.max_bytes = 16 * KIB,
					.max_objects = 8,
					.reserved_readers = 1,
					.open_readers = 3,
					.on_dead = TND_CHANNEL_DEAD_EVICT,
					.name = "bulk",
					.max_object_bytes = 64 * SLAB};
	struct tnd_error error = {0};

	scene->fds = fd_count();
	assert_int_equal(tnd_budget_create(budget_bytes, &scene->budget), 0);
	pool.budget = scene->budget;
	assert_int_equal(tnd_slab_pool_create(&pool, &scene->pool), 0);
	opts.pool = scene->pool;
	if (tnd_channel_create(&opts, &scene->writer, &error) < 0)
		fail_msg("%s", error.message);
}

/* Nothing is left. */
static inline void close_scene(struct scene *scene)
{
	tnd_channel_close(scene->writer);
	assert_int_equal(charged(scene), 0);
	tnd_slab_pool_close(scene->pool);
	tnd_budget_close(scene->budget);
	assert_int_equal(fd_count(), scene->fds);
	assert_int_equal(map_count("memfd:tundish"), 0);
}

static inline struct tnd_channel *attach_with(const struct scene *scene, uint32_t rank,
					      uint32_t flags)
{
	struct tnd_channel_attach_opts opts = {.struct_bytes = sizeof(opts), .flags = flags};
	struct tnd_channel *reader;
	struct tnd_error error = {0};

	if (tnd_channel_attach(tnd_channel_address(scene->writer), rank, &opts, &reader, &error) <
	    0)
		fail_msg("%s", error.message);
	return reader;
}

static inline struct tnd_channel *attach(const struct scene *scene, uint32_t rank)
{
	return attach_with(scene, rank, 0);
}

/* Another pattern for each seed: every page, and the last byte, tells. */
static inline unsigned char pattern(uint64_t at, uint64_t seed)
{
	return (unsigned char)(at / 509 * 3 + seed * 7 + 1);
}

static inline void fill(unsigned char *data, uint64_t bytes, uint64_t seed)
{
	for (uint64_t i = 0; i < bytes; i++)
		data[i] = pattern(i, seed);
}

static inline bool is_filled(const unsigned char *data, uint64_t begin, uint64_t end, uint64_t seed)
{
	while (begin < end && data[begin] == pattern(begin, seed))
		begin++;
	return begin >= end;
}

static inline int try_send(struct tnd_channel *writer, uint64_t bytes, uint64_t seed, bool reuse,
			   int64_t deadline_ns)
{
	struct tnd_reservation place;
	struct tnd_error error = {0};
	int rc = tnd__bulk_reserve(writer, bytes, reuse ? TND__BULK_REUSE : TND__BULK_ANY,
				   deadline_ns, &place, &error);

	if (rc < 0) {
		assert_int_equal(error.code, rc);
		assert_true(strlen(error.message) > 0);
		return rc;
	}
	assert_int_equal(place.bytes, bytes);
	fill(place.data, bytes, seed);
	return tnd_channel_commit(writer, &place, bytes);
}

static inline void send_slab(struct tnd_channel *writer, uint64_t bytes, uint64_t seed)
{
	assert_int_equal(try_send(writer, bytes, seed, false, tnd_deadline_in(PATIENCE)), 0);
}

static inline struct tnd_object borrow(struct tnd_channel *reader, uint64_t bytes, uint64_t seed)
{
	struct tnd_object object = {0};
	struct tnd_error error = {0};

	if (tnd_channel_borrow(reader, tnd_deadline_in(PATIENCE), &object, &error) < 0)
		fail_msg("%s", error.message);
	assert_int_equal(object.bytes, bytes);
	assert_true(is_filled(object.data, 0, bytes, seed));
	return object;
}

static inline void take(struct tnd_channel *reader, uint64_t bytes, uint64_t seed)
{
	struct tnd_object object = borrow(reader, bytes, seed);

	assert_int_equal(tnd_channel_release(reader, &object), 0);
}

#endif
