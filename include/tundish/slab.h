/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tundish/slab.h - slabs, the pool that they come from, and leases on them
 *
 * A slab is a page-aligned host buffer, reused from load step to load step. A view of bytes in a
 * slab is held by a lease with a name. A slab goes back to its pool when the one who filled it has
 * released it and its last lease has ended; nothing is ever overwritten under a holder.
 *
 *   pool create -> acquire -> (fill) -> lease ... -> release -> lease release ... -> pool close
 *                     ^                                               |
 *                     `---------- back to the pool, reused -----------'
 *
 * Memory is anonymous, or one memfd a slab (TND_SLAB_POOL_F_SHARED), 2 MiB aligned and on huge
 * pages where they can be had, never from malloc: a closed slab leaves the process at once. Each
 * mapping is charged to the pool's budget with its whole size from mmap to munmap, idle ones
 * included.
 *
 * Closing a pool with leases out: idle slabs go at once, the others with their last lease.
 *
 * Threads: MT-safe. Processes: anonymous slabs must not be used after fork in the child.
 */
#ifndef TUNDISH_SLAB_H
#define TUNDISH_SLAB_H

#include <tundish/budget.h>

#ifdef __cplusplus
extern "C" {
#endif

struct tnd_slab_pool;
struct tnd_slab;
struct tnd_lease;

#define TND_SLAB_POOL_F_SHARED 1u  /* a memfd for each slab, to be handed to other processes */
#define TND_SLAB_POOL_F_NO_HUGE 2u /* ordinary pages only */

#define TND_NUMA_AUTO (-1)
#define TND_NUMA_INTERLEAVE (-2)

struct tnd_slab_pool_opts {
	uint32_t struct_bytes;
	uint32_t flags;      /* TND_SLAB_POOL_F_* */
	int32_t numa;        /* a node with memory, TND_NUMA_AUTO or TND_NUMA_INTERLEAVE */
	uint32_t numa_given; /* non-zero: `numa` counts; else TND_NUMA_AUTO */
	struct tnd_budget
		*budget;     /* nullable: not charged; referenced until the last slab is gone */
	uint64_t slab_bytes; /* capacity of a fresh slab for requests up to it; 0: as requested */
};

struct tnd_slab_stats {
	uint32_t struct_bytes; /* set by the caller */
	uint32_t reserved;
	uint64_t buffers;      /* handed out, reused ones included */
	uint64_t buffer_bytes; /* summed over those */
	uint64_t allocations;  /* fresh mappings */
	uint64_t live;         /* slabs handed out and not yet back */
	uint64_t live_bytes;
	uint64_t peak_live;
	uint64_t peak_bytes;
	uint64_t mapped_bytes; /* live and idle */
	uint64_t huge_bytes;   /* most bytes seen on huge pages */
	uint64_t leases;       /* out now */
};

/* One slab that has leases out. All pointers live until tnd_escape_report_free. */
struct tnd_escape {
	const char *file; /* as given to tnd_slab_acquire, or "" */
	uint64_t slab_bytes;
	size_t name_count;
	const char *const *names; /* sorted, printable, each once */
};

struct tnd_escape_report {
	size_t slab_count;
	uint64_t bytes; /* of the slabs */
	const struct tnd_escape *slabs;
	size_t name_count;        /* over all slabs, each once */
	const char *const *names; /* sorted */
};

/*
 * Makes an empty pool. `opts`: borrowed for the call.
 * Blocking: never. Return: 0; TND_E_INVALID (struct_bytes, unknown flags, numa); -ENOMEM.
 */
TND_API int tnd_slab_pool_create(const struct tnd_slab_pool_opts *opts,
				 struct tnd_slab_pool **ret_pool);

/*
 * Idle slabs are unmapped; those with holders live until the last of them is released. NULL is
 * allowed.
 */
TND_API void tnd_slab_pool_close(struct tnd_slab_pool *pool);

/*
 * A slab of at least `bytes` (> 0): an idle one if one is large enough, else a fresh mapping, for
 * which idle ones that are too small are given up when the budget needs it. Contents are undefined.
 * `file`: shown in escape reports, copied, nullable. `opts`: how the charge waits, nullable,
 * borrowed for the call. A slab that comes back to the pool while this waits for the budget is
 * taken.
 * Blocking: may sleep. Return: 0; what tnd_budget_charge returns; -ENOMEM; -EMFILE (shared); -EFBIG
 * (shared, RLIMIT_FSIZE).
 */
TND_API int tnd_slab_acquire(struct tnd_slab_pool *pool, uint64_t bytes, const char *file,
			     const struct tnd_charge_opts *opts, struct tnd_slab **ret_slab);

/* Ends the filler's own hold. NULL is allowed. Blocking: never. */
TND_API void tnd_slab_release(struct tnd_slab *slab);

TND_API void *tnd_slab_data(const struct tnd_slab *slab); /* 4 KiB aligned; 2 MiB from 2 MiB up */
TND_API uint64_t tnd_slab_bytes(const struct tnd_slab *slab); /* as requested at acquire */
TND_API int tnd_slab_fd(const struct tnd_slab *slab);         /* memfd, or -1; owned by the slab */

/*
 * A named hold on the slab. `name`: `name_bytes` long, copied.
 * Blocking: never. Return: 0; -ENOMEM.
 */
TND_API int tnd_lease_acquire(struct tnd_slab *slab, const char *name, size_t name_bytes,
			      struct tnd_lease **ret_lease);

/*
 * Ends the hold, from any thread, also after the pool was closed. NULL is allowed. Blocking: never.
 */
TND_API void tnd_lease_release(struct tnd_lease *lease);

/* Unmaps idle slabs and refunds their charge. Blocking: never. */
TND_API void tnd_slab_pool_trim(struct tnd_slab_pool *pool);

/*
 * Who still holds what. With `forget`, what is named is not named again. *ret_report: transferred,
 * tnd_escape_report_free; NULL where nobody holds anything.
 * Blocking: never. Return: number of slabs with leases; -ENOMEM.
 */
TND_API int tnd_slab_pool_escaped(struct tnd_slab_pool *pool, int forget,
				  struct tnd_escape_report **ret_report);

/* NULL is allowed. */
TND_API void tnd_escape_report_free(struct tnd_escape_report *report);

/* Figures of this moment. Blocking: never. Return: 0; TND_E_INVALID (struct_bytes). */
TND_API int tnd_slab_pool_stats(struct tnd_slab_pool *pool, struct tnd_slab_stats *ret_stats);

/* Peaks become what is live; counters stay. Blocking: never. */
TND_API void tnd_slab_pool_reset_peaks(struct tnd_slab_pool *pool);

/*
 * Frees memory that tnd_view_take() handed over; both values as it gave them. NULL is allowed. Here
 * and not with the load because it outlives it. Threads: MT-safe. Blocking: never.
 */
TND_API void tnd_own_free(void *memory, uint64_t map_bytes);

#ifdef __cplusplus
}
#endif
#endif
