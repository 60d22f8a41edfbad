/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tundish/pagecache.h - how files stand in the page cache, and bringing them back to that
 *
 *   create (before reading) --> anything reads the files --> restore --> close
 *
 * A load drops behind itself what it has brought in. Several readers of the same files cannot each
 * do that alone: one takes for warm what another has just brought in, and leaves it. Whoever starts
 * them takes a snapshot first and restores it after the last one has ended; what was cold is cold
 * again, what was warm has not been touched.
 *
 * Blocks are 64 KiB. A block with one cached page counts as warm, so that up to 15 pages beside it
 * may stay. What others bring in meanwhile cannot be told apart and is dropped too, if it was cold
 * before. Pages that are dirty, locked or mapped stay: the kernel does not drop them.
 *
 * Memory: nothing for a file that is all cold or all warm, one bit a block (2 MiB for 128 GiB) for
 * one that is neither. It is charged to no budget.
 *
 * Processes: a snapshot is private to its process; after fork() each has its own.
 */
#ifndef TUNDISH_PAGECACHE_H
#define TUNDISH_PAGECACHE_H

#include <tundish/error.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TND_CACHE_BLOCK_BYTES 65536

struct tnd_cache_snapshot;

/*
 * Asks the kernel (cachestat, Linux 6.5) about each file. Where it does not say, the file is left
 * alone by restore.
 * `fds`: the array is borrowed for the call, its descriptors, of regular files, until close.
 * Blocking: bounded; a walk over the pages that are cached.
 * Return: 0; -ENOMEM; -EBADF (a descriptor that is not open).
 */
TND_API int tnd_cache_snapshot_create(const int *fds, size_t fd_count,
				      struct tnd_cache_snapshot **ret_snapshot);

/*
 * Drops what was cold and is cached now, of all files. May be called again.
 * Threads: MT-safe. Blocking: bounded.
 * Return: bytes that were cached there before the drop.
 */
TND_API uint64_t tnd_cache_snapshot_restore(const struct tnd_cache_snapshot *snapshot);

/*
 * The same for a range of the file fds[index], rounded out to pages: for a reader that drops as it
 * goes. An index or range beyond what create saw does nothing.
 */
TND_API uint64_t tnd_cache_snapshot_restore_range(const struct tnd_cache_snapshot *snapshot,
						  size_t index, uint64_t offset, uint64_t bytes);

/* Frees it and drops nothing. `snapshot`: transferred, nullable. */
TND_API void tnd_cache_snapshot_close(struct tnd_cache_snapshot *snapshot);

#ifdef __cplusplus
}
#endif
#endif
