/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tundish/stat.h - the channels, pools and loads of this user, seen from outside
 *
 * Finds shared memory named "tundish.*" in /proc/PID/fd of all processes that may be looked at, and
 * reads the counters in it. The owners do not take part: they may be busy, stopped or stuck.
 * Nothing of what is read is trusted.
 *
 *   read -> (look) -> free
 *
 * Threads: MT-safe. Blocking: bounded (reads /proc).
 */
#ifndef TUNDISH_STAT_H
#define TUNDISH_STAT_H

#include <tundish/channel.h>

#ifdef __cplusplus
extern "C" {
#endif

/* state of a reader */
#define TND_READER_MISSING 0u /* a reserved place whose reader has not come yet */
#define TND_READER_ALIVE 1u
#define TND_READER_STOPPED 2u /* its process is stopped (seen in our /proc) */
#define TND_READER_DEAD 3u
#define TND_READER_LEFT 4u
#define TND_READER_EVICTED 5u

struct tnd_stat_reader {
	uint32_t rank;
	uint32_t state; /* TND_READER_* */
	int32_t pid;    /* in its own pid namespace */
	uint32_t sleeping;
	uint64_t lag_objects, lag_bytes; /* published, not yet released */
	uint64_t waits, wakes;
	uint64_t blocked_ns; /* the wait that runs now included */
};

struct tnd_stat_channel {
	char name[TND_CHANNEL_NAME_MAX];
	int32_t pid; /* the writer's, in its own pid namespace */
	uint32_t closed;
	uint64_t max_bytes, max_objects;
	uint64_t used_bytes, used_objects;
	/* High-water marks, sampled at least each eighth of a limit. */
	uint64_t high_bytes, high_objects;
	uint64_t sent_objects, sent_bytes;
	uint64_t memory_bytes;
	uint32_t writer_state; /* TND_READER_ALIVE, _STOPPED or _DEAD */
	uint32_t reader_count;
	uint64_t writer_waits, writer_wakes, writer_blocked_ns;
	const struct tnd_stat_reader *readers; /* places that are or were in use, in rank order */
};

struct tnd_stat_lease {
	uint32_t rank;
	uint32_t count; /* objects by slab that it holds */
};

/* Slabs of a channel, or those of a shared pool. */
struct tnd_stat_pool {
	char name[TND_CHANNEL_NAME_MAX];
	int32_t pid;
	uint32_t lease_count;
	uint64_t slab_bytes; /* of all */
	uint64_t slabs, live;
	const struct tnd_stat_lease *leases;
};

/* role of a load */
#define TND_STAT_LOAD_ALONE 0u  /* reads for itself */
#define TND_STAT_LOAD_MEMBER 1u /* takes its slices from a node's reader (share.h) */
#define TND_STAT_LOAD_READER 2u /* the node's reader */

#define TND_STAT_NO_RANK 0xffffffffu
#define TND_STAT_FILE_MAX 256

/* A load between open and end. */
struct tnd_stat_load {
	int32_t pid;                      /* in its own pid namespace */
	uint32_t rank;                    /* TND_STAT_NO_RANK: a node's reader */
	uint32_t role;                    /* TND_STAT_LOAD_* */
	uint32_t state;                   /* of its process: TND_READER_ALIVE, _STOPPED or _DEAD */
	uint64_t done_bytes, total_bytes; /* handed out, of what is kept; a reader's: announced */
	uint64_t charged_bytes, budget_bytes;
	uint64_t storage_bytes;       /* asked of storage so far */
	char file[TND_STAT_FILE_MAX]; /* that is read or taken now; "": none yet, or not known */
};

struct tnd_stat {
	size_t channel_count, pool_count;
	const struct tnd_stat_channel *channels; /* sorted by name, pid */
	const struct tnd_stat_pool *pools;
	size_t denied; /* processes that we may not look at */
	size_t load_count;
	const struct tnd_stat_load *loads; /* sorted by rank, pid; readers last */
};

/* *ret_stat: transferred, tnd_stat_free. Return: 0; -ENOMEM; -errno (no /proc). */
TND_API int tnd_stat_read(struct tnd_stat **ret_stat);

/* NULL is allowed. */
TND_API void tnd_stat_free(struct tnd_stat *stat);

#ifdef __cplusplus
}
#endif
#endif
