/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_snapshot.c - how files stood in the page cache, and back to that
 *
 * What could break: a warm page dropped, a cold one left, a block at the end of a word or of the
 * file missed, something dropped where the kernel did not say, a failed create that leaks.
 * A file is arranged block by block, read whole, restored, and counted again with cachestat.
 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include <tundish/pagecache.h>

#include "storage/storage.h"

#define BLOCK ((uint64_t)TND_CACHE_BLOCK_BYTES)
#define BLOCKS 100
#define BYTES (BLOCKS * BLOCK - 30000) /* the last block is short, its last page too */

static char path[] = "/tmp/tnd-test-snapshot.XXXXXX";
static int fd = -1;

static int make_file(void **state)
{
	static unsigned char data[BLOCKS * BLOCK];

	(void)state;
	fd = mkstemp(path);
	if (fd < 0 || write(fd, data, BYTES) != (ssize_t)BYTES || fsync(fd) != 0)
		return -1;
	return posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
}

static int remove_file(void **state)
{
	(void)state;
	close(fd);
	return unlink(path);
}

static void read_range(uint64_t offset, uint64_t bytes)
{
	static unsigned char data[BLOCKS * BLOCK];

	assert_true(pread(fd, data, bytes, (off_t)offset) > 0);
}

/* Drops the file and brings in the blocks whose letter is not '.'. */
static void arrange(const char *blocks)
{
	tnd__pagecache_drop(fd, 0, BYTES);
	if (tnd__pagecache_bytes(fd, 0, BYTES) != 0)
		skip(); /* no cachestat, or a file system that does not drop */
	for (size_t i = 0; i < BLOCKS; i++)
		if (blocks[i] != '.')
			read_range(i * BLOCK, BLOCK);
}

static void look(char *ret_blocks)
{
	for (size_t i = 0; i < BLOCKS; i++) {
		uint64_t bytes = TND__MIN(BLOCK, BYTES - i * BLOCK);
		int64_t cached = tnd__pagecache_bytes(fd, i * BLOCK, bytes);

		ret_blocks[i] = cached == 0                                          ? '.'
				: cached == (int64_t)tnd__round_up(bytes, TND__PAGE) ? '#'
										     : '?';
	}
}

/* One snapshot and restore. Return: whether the file then stands as `before`; *ret_after: how. */
static bool round_as(const char *before, char *ret_after)
{
	struct tnd_cache_snapshot *snapshot;
	bool same;

	arrange(before);
	assert_int_equal(tnd_cache_snapshot_create(&fd, 1, &snapshot), 0);
	look(ret_after);
	same = strcmp(ret_after, before) == 0;
	read_range(0, BYTES);
	tnd_cache_snapshot_restore(snapshot);
	look(ret_after);
	same = same && strcmp(ret_after, before) == 0;
	assert_int_equal(tnd_cache_snapshot_restore(snapshot), 0);
	tnd_cache_snapshot_close(snapshot);
	return same;
}

/* The kernel takes warm pages when it likes: a round that differs is repeated, twice at most. */
static void check_round(const char *before)
{
	char after[BLOCKS + 1] = {0};

	for (int i = 0; i < 2; i++)
		if (round_as(before, after))
			return;
	assert_true(round_as(before, after));
}

static void test_as_before(void **state)
{
	char blocks[BLOCKS + 1] = {0};
	unsigned seed = 7;

	(void)state;
	for (int density = 0; density <= 4; density++) {
		for (int i = 0; i < BLOCKS; i++)
			blocks[i] = rand_r(&seed) % 4 < density ? '#' : '.';
		check_round(blocks);
	}
	/* The last block of a word, the first of the next, the short one at the end. */
	for (int at = 0; at < BLOCKS; at = at == 0 ? 31 : at == 31 ? 32 : at == 32 ? 99 : BLOCKS) {
		memset(blocks, '.', BLOCKS);
		blocks[at] = '#';
		check_round(blocks);
		memset(blocks, '#', BLOCKS);
		blocks[at] = '.';
		check_round(blocks);
	}
}

/* One warm page keeps its block. */
static void test_block_with_one_page(void **state)
{
	struct tnd_cache_snapshot *snapshot;
	char blocks[BLOCKS + 1] = {0};

	(void)state;
	memset(blocks, '.', BLOCKS);
	arrange(blocks);
	read_range(5 * BLOCK + 8192, 4096);
	assert_int_equal(tnd_cache_snapshot_create(&fd, 1, &snapshot), 0);
	read_range(0, BYTES);
	assert_int_equal(tnd_cache_snapshot_restore(snapshot),
			 tnd__round_up(BYTES, TND__PAGE) - BLOCK);
	assert_int_equal(tnd__pagecache_bytes(fd, 0, BYTES), BLOCK);
	tnd_cache_snapshot_close(snapshot);
}

static void test_range(void **state)
{
	struct tnd_cache_snapshot *snapshot;
	char blocks[BLOCKS + 1] = {0};
	int fds[2] = {fd, fd};

	(void)state;
	memset(blocks, '.', BLOCKS);
	blocks[3] = '#';
	arrange(blocks);
	assert_int_equal(tnd_cache_snapshot_create(fds, 2, &snapshot), 0);
	read_range(0, BYTES);
	assert_int_equal(tnd_cache_snapshot_restore_range(snapshot, 2, 0, BYTES), 0);
	assert_int_equal(tnd_cache_snapshot_restore_range(snapshot, 1, BYTES, 1), 0);
	assert_int_equal(tnd_cache_snapshot_restore_range(snapshot, 1, UINT64_MAX, 1), 0);
	assert_int_equal(tnd__pagecache_bytes(fd, 0, BYTES), tnd__round_up(BYTES, TND__PAGE));
	assert_int_equal(tnd_cache_snapshot_restore_range(snapshot, 1, 2 * BLOCK, 3 * BLOCK),
			 2 * BLOCK);
	assert_int_equal(tnd__pagecache_bytes(fd, 3 * BLOCK, BLOCK), BLOCK);
	tnd_cache_snapshot_restore_range(snapshot, 1, 5 * BLOCK, UINT64_MAX);
	assert_int_equal(tnd__pagecache_bytes(fd, 0, BYTES), 3 * BLOCK);
	tnd_cache_snapshot_close(snapshot);
}

static void test_refusals(void **state)
{
	struct tnd_cache_snapshot *snapshot = NULL;
	int bad[2] = {fd, -1}, ends[2];
	int64_t before;

	(void)state;
	assert_int_equal(tnd_cache_snapshot_create(bad, 2, &snapshot), -EBADF);
	assert_int_equal(tnd_cache_snapshot_create(&fd, SIZE_MAX, &snapshot), -ENOMEM);
	assert_null(snapshot);
	assert_int_equal(tnd_cache_snapshot_create(NULL, 0, &snapshot), 0);
	assert_int_equal(tnd_cache_snapshot_restore(snapshot), 0);
	tnd_cache_snapshot_close(snapshot);
	tnd_cache_snapshot_close(NULL);
	assert_int_equal(pipe(ends), 0);
	assert_int_equal(tnd_cache_snapshot_create(ends, 2, &snapshot), 0);
	assert_int_equal(tnd_cache_snapshot_restore(snapshot), 0);
	tnd_cache_snapshot_close(snapshot);
	close(ends[0]);
	close(ends[1]);
#ifdef TND_FAILPOINTS
	tnd__failpoints_set("storage.alloc=ENOMEM");
	assert_int_equal(tnd_cache_snapshot_create(&fd, 1, &snapshot), -ENOMEM);
	tnd__failpoints_set("storage.cachestat=ENOSYS");
	assert_int_equal(tnd_cache_snapshot_create(&fd, 1, &snapshot), 0);
	tnd__failpoints_set(NULL);
	before = tnd__pagecache_bytes(fd, 0, BYTES);
	read_range(0, BYTES);
	assert_int_equal(tnd_cache_snapshot_restore(snapshot), 0);
	assert_true(tnd__pagecache_bytes(fd, 0, BYTES) >= before);
	tnd_cache_snapshot_close(snapshot);
#else
	(void)before;
#endif
}

#ifdef TND_FAILPOINTS
/* What could not be asked stays; the map that cannot be allocated is a failure and no leak. */
static void test_refused_half_way(void **state)
{
	struct tnd_cache_snapshot *snapshot = NULL;
	char blocks[BLOCKS + 1] = {0};

	(void)state;
	memset(blocks, '.', BLOCKS);
	blocks[40] = '#';
	arrange(blocks);
	tnd__failpoints_set("storage.alloc=ENOMEM@2");
	assert_int_equal(tnd_cache_snapshot_create(&fd, 1, &snapshot), -ENOMEM);
	tnd__failpoints_set("storage.cachestat=EPERM@3");
	assert_int_equal(tnd_cache_snapshot_create(&fd, 1, &snapshot), 0);
	tnd__failpoints_set(NULL);
	read_range(0, BYTES);
	assert_int_equal(tnd_cache_snapshot_restore(snapshot), 32 * BLOCK);
	tnd_cache_snapshot_close(snapshot);
}
#endif

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_as_before),
		cmocka_unit_test(test_block_with_one_page),
		cmocka_unit_test(test_range),
		cmocka_unit_test(test_refusals),
#ifdef TND_FAILPOINTS
		cmocka_unit_test(test_refused_half_way),
#endif
	};

	return cmocka_run_group_tests(tests, make_file, remove_file);
}
