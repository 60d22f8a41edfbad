/* SPDX-License-Identifier: Apache-2.0 */
/*
 * snapshot.c - which blocks of a file were entirely cold, asked coarse to fine
 *
 *   whole file:  0 pages -> COLD    all -> WARM    refused -> UNKNOWN    some -> MIXED, then
 *   each 2 MiB:  0 -> 32 bits set   all -> none    some -> each 64 KiB block: 0 -> its bit set
 *
 * A file that is all cold or all warm, which most are, costs one call and no memory. An answer that
 * is refused half way leaves the rest of the file warm: restore drops only what was seen to be
 * cold.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <tundish/pagecache.h>

#include "storage/storage.h"

#define BLOCK ((uint64_t)TND_CACHE_BLOCK_BYTES)
#define GROUP (UINT64_C(32) * BLOCK) /* one word of the map */

enum { UNKNOWN, COLD, WARM, MIXED };

struct file {
	int fd;
	int state;
	uint64_t bytes;
	uint32_t *cold; /* MIXED: a bit for each block */
};

struct tnd_cache_snapshot {
	size_t count;
	struct file files[];
};

static int state_of(int64_t cached, uint64_t bytes)
{
	return cached < 0                                            ? UNKNOWN
	       : cached == 0                                         ? COLD
	       : (uint64_t)cached >= tnd__round_up(bytes, TND__PAGE) ? WARM
								     : MIXED;
}

static uint32_t ask_blocks(int fd, uint64_t start, uint64_t end)
{
	uint32_t cold = 0, bit = 0;

	for (uint64_t at = start; at < end; at += BLOCK, bit++)
		if (tnd__pagecache_bytes(fd, at, TND__MIN(BLOCK, end - at)) == 0)
			cold |= UINT32_C(1) << bit;
	return cold;
}

static void ask_groups(struct file *file)
{
	for (uint64_t start = 0, end; start < file->bytes; start = end) {
		int state;

		end = TND__MIN(start + GROUP, file->bytes);
		state = state_of(tnd__pagecache_bytes(file->fd, start, end - start), end - start);
		if (state == COLD)
			file->cold[start / GROUP] = UINT32_MAX;
		else if (state == MIXED)
			file->cold[start / GROUP] = ask_blocks(file->fd, start, end);
	}
}

/* Return: 0, -ENOMEM, -EBADF. */
static int ask(struct file *file, int fd)
{
	struct stat found;

	if (fstat(fd, &found) < 0)
		return -errno;
	file->fd = fd;
	if (!S_ISREG(found.st_mode))
		return 0;
	file->bytes = (uint64_t)found.st_size;
	file->state = state_of(tnd__pagecache_bytes(fd, 0, file->bytes), file->bytes);
	if (file->state != MIXED)
		return 0;
	if (tnd__failpoint("storage.alloc") == 0)
		file->cold = calloc((size_t)(file->bytes / GROUP + 1), sizeof(*file->cold));
	if (!file->cold)
		return -ENOMEM;
	ask_groups(file);
	return 0;
}

int tnd_cache_snapshot_create(const int *fds, size_t fd_count,
			      struct tnd_cache_snapshot **ret_snapshot)
{
	struct tnd_cache_snapshot *snapshot = NULL;

	if (fd_count < (SIZE_MAX - sizeof(*snapshot)) / sizeof(struct file) &&
	    tnd__failpoint("storage.alloc") == 0)
		snapshot = calloc(1, sizeof(*snapshot) + fd_count * sizeof(struct file));
	if (!snapshot)
		return -ENOMEM;
	snapshot->count = fd_count;
	for (size_t i = 0; i < fd_count; i++) {
		int rc = ask(&snapshot->files[i], fds[i]);

		if (rc < 0) {
			tnd_cache_snapshot_close(snapshot);
			return rc;
		}
	}
	*ret_snapshot = snapshot;
	return 0;
}

/* Return: bytes that were cached in [start, end). */
static uint64_t drop(int fd, uint64_t start, uint64_t end)
{
	int64_t cached = tnd__pagecache_bytes(fd, start, end - start);

	if (cached <= 0)
		return 0;
	tnd__pagecache_drop(fd, start, end - start);
	return (uint64_t)cached;
}

static bool block_cold(const struct file *file, uint64_t offset)
{
	return file->cold[offset / GROUP] >> (offset % GROUP / BLOCK) & 1;
}

/* Neighbouring cold blocks go in one call: a large folio is dropped only as a whole. */
static uint64_t restore_mixed(const struct file *file, uint64_t start, uint64_t end)
{
	uint64_t dropped = 0;

	for (uint64_t at = start, next; at < end; at = next) {
		bool cold = block_cold(file, at);

		next = tnd__round_down(at, BLOCK) + BLOCK;
		while (next < end && block_cold(file, next) == cold)
			next += BLOCK;
		next = TND__MIN(next, end);
		if (cold)
			dropped += drop(file->fd, at, next);
	}
	return dropped;
}

static uint64_t restore(const struct file *file, uint64_t start, uint64_t end)
{
	if (start >= end)
		return 0;
	if (file->state == COLD)
		return drop(file->fd, start, end);
	return file->state == MIXED ? restore_mixed(file, start, end) : 0;
}

uint64_t tnd_cache_snapshot_restore(const struct tnd_cache_snapshot *snapshot)
{
	uint64_t dropped = 0;

	for (size_t i = 0; i < snapshot->count; i++)
		dropped += restore(&snapshot->files[i], 0, snapshot->files[i].bytes);
	return dropped;
}

uint64_t tnd_cache_snapshot_restore_range(const struct tnd_cache_snapshot *snapshot, size_t index,
					  uint64_t offset, uint64_t bytes)
{
	const struct file *file = snapshot->files + (index < snapshot->count ? index : 0);

	if (index >= snapshot->count || offset >= file->bytes)
		return 0;
	return restore(file, offset, offset + TND__MIN(bytes, file->bytes - offset));
}

void tnd_cache_snapshot_close(struct tnd_cache_snapshot *snapshot)
{
	if (!snapshot)
		return;
	for (size_t i = 0; i < snapshot->count; i++)
		free(snapshot->files[i].cold);
	free(snapshot);
}
