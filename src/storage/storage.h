/* SPDX-License-Identifier: Apache-2.0 */
/*
 * storage.h - reading extents of files into memory
 *
 *   create -> source open ... -> submit reads -> done callbacks ... -> source close -> close
 *
 *                         submit()
 *                            |  where are these bytes?  (cachestat / RWF_NOWAIT probe)
 *              cold          |           warm
 *        .-------------------+------------------.
 *        v                                      v
 *   io_uring ring, or a worker's           a worker's buffered
 *   direct preadv2 (O_DIRECT)              preadv2 (a copy)
 *        |  refused: buffered, dropped behind   |
 *        v                                      v
 *   in place, or bounce buffer + scatter()  -> done()
 *
 * Knows nothing of tensors and ranks: a read is a range of a file and where its bytes go.
 */
#ifndef TND_STORAGE_H
#define TND_STORAGE_H

#include "base/base.h"

struct tnd__storage;
struct tnd__source;

/* The numbers of TND_ENGINE_* and TND_DIRECT_* in <tundish/load.h>, which is above this layer. */
#define TND__ENGINE_AUTO 0u
#define TND__ENGINE_URING 1u
#define TND__ENGINE_THREADS 2u
#define TND__DIRECT_AUTO 0u
#define TND__DIRECT_ON 1u
#define TND__DIRECT_OFF 2u

struct tnd__storage_opts {
	uint32_t engine;       /* TND__ENGINE_* */
	uint32_t direct;       /* TND__DIRECT_* */
	bool keep_cache;       /* do not drop what a buffered read of a cold extent brought in */
	uint32_t thread_count; /* workers; 0: default from processors and quota */
	uint32_t queue_depth;  /* reads in flight; 0: default */
	uint64_t chunk_bytes;  /* no read is longer; a bounce buffer has 2 x 4 KiB more; 0: 2 MiB */
	uint32_t bounce_count; /* most bounce buffers, allocated on first need; 0: 4 */
	uint32_t window_count; /* most buffered reads of cold extents in flight; 0: 4 */
	const char *cpus; /* list, borrowed for the call; NULL: every processor of the cpuset */
	int32_t numa;     /* of bounce buffers and workers: a node, or TND_NUMA_* */
};

#define TND__CACHE_UNKNOWN 0
#define TND__CACHE_COLD 1
#define TND__CACHE_WARM 2
#define TND__CACHE_MIXED 3

struct tnd__source_report {
	const char *name;       /* borrowed until the source is closed */
	const char *engine;     /* "uring", "threads", "none": what most bytes came through */
	bool direct;            /* whether direct reads were used to the end */
	int cache;              /* TND__CACHE_* over all extents */
	char fallback[192];     /* "" or the reasons, "; " between */
	uint64_t storage_bytes; /* asked of storage or page cache, rounding and retries included */
	uint64_t dropped_bytes; /* page cache dropped behind buffered reads */
};

struct tnd__storage_stats {
	uint64_t storage_bytes;
	uint64_t read_ns; /* summed over reads, submission to completion */
	uint64_t scatter_ns;
	uint64_t bounce_allocated_bytes;
	uint32_t thread_count;
	const char *engine; /* that new sources start with */
	char cpus[64];      /* where the workers run, as a list */
	char numa[32];      /* "auto", "interleave", "node 1" */
};

/*
 * One read, in the caller's memory until done() is called. Either `dst` is where the bytes go, all
 * in one place, or `scatter` takes them from a bounce buffer.
 */
struct tnd__read {
	struct tnd__source *source;
	uint64_t offset; /* exact, any alignment */
	/* > 0, at most chunk_bytes; within one 2 MiB of the file unless a chunk is larger. */
	uint64_t bytes;
	void *dst; /* nullable */
	/*
	 * dst is congruent to offset modulo 4096 and the 4 KiB blocks around its range may be
	 * written.
	 */
	bool padded;
	/*
	 * With dst NULL: gives all the bytes at once; called once, from a worker or the ring's
	 * thread.
	 */
	void (*scatter)(struct tnd__read *read, const unsigned char *data);
	/*
	 * Called exactly once, from a thread of the storage, without a lock held; it may free the
	 * read and submit nothing. status: 0; -errno; TND_E_TRUNCATED (end of file inside the
	 * range); TND_E_CANCELLED. `fail_offset`: first file byte not read.
	 */
	void (*done)(struct tnd__read *read, int status, uint64_t fail_offset);
	/* storage's own */
	struct tnd__read *next;
	uint64_t progress;
	int64_t start_ns;
	void *bounce;
	int32_t status, ring_error;
	uint32_t state;
	uint32_t tries;
};

int tnd__storage_create(const struct tnd__storage_opts *opts, struct tnd__storage **ret_storage,
			struct tnd_error *reterr);

/*
 * Queued reads end with TND_E_CANCELLED, those in flight finish. MT-safe; only sets flags and
 * wakes.
 */
void tnd__storage_cancel(struct tnd__storage *storage);

/*
 * All reads must be submitted; waits for those in flight, joins every thread, closes the ring,
 * frees bounce buffers.
 */
void tnd__storage_close(struct tnd__storage *storage);

void tnd__storage_stats(struct tnd__storage *storage, struct tnd__storage_stats *ret_stats);

/*
 * A file to read from. `fd`: open for reading, borrowed until source close (direct and buffered
 * descriptors of the same inode are opened from it). `name`: copied. Probes whether direct reads
 * and cache questions work here, and their alignment.
 * Return: 0, -errno.
 */
int tnd__source_open(struct tnd__storage *storage, int fd, const char *name, uint64_t file_bytes,
		     struct tnd__source **ret_source, struct tnd_error *reterr);
void tnd__source_report(struct tnd__source *source, struct tnd__source_report *ret_report);
/* After the last done(). Closes its descriptors. */
void tnd__source_close(struct tnd__source *source);

/*
 * Hands a read over. One submitting thread at a time. Blocking: while queue_depth reads are in
 * flight. Always leads to exactly one done(), also on cancel.
 */
void tnd__storage_submit(struct tnd__storage *storage, struct tnd__read *read);

/*
 * Called by a thread that works beside the storage: takes `name` (at most 15 bytes) and the
 * processors of the storage's threads (NULL: all of the cpuset), whatever its creator is pinned to.
 */
void tnd__thread_settle(const struct tnd__storage *storage, const char *name);

/* -- page cache (pagecache.c) -- */

/*
 * Bytes of [offset, offset + bytes) that are in the page cache (cachestat). Return: bytes, -errno
 * (-ENOSYS, -EPERM, ...).
 */
int64_t tnd__pagecache_bytes(int fd, uint64_t offset, uint64_t bytes);

/* Drops clean pages of the range. */
void tnd__pagecache_drop(int fd, uint64_t offset, uint64_t bytes);

/*
 * Processors that an I/O thread may use: the list, else the whole cpuset. Return: count,
 * TND_E_INVALID. Text form into out.
 */
int tnd__io_cpus(const char *list, char *out, size_t out_bytes);

/*
 * Worker threads that pay here: processors of the cpuset, bounded by the cgroup's quota (cpu.max,
 * cpu.cfs_quota_us).
 */
uint32_t tnd__io_thread_default(void);

#endif
