/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.h - what the layers above use of memory/ beyond the public headers
 *
 *   budget.c, keyed.c    the account: tickets in a queue, keyed charges
 *   slab.c, lease.c      the pool, its mappings and who holds them
 *   escape.c             the report of leases that are still out
 *   map.c, huge.c        mappings, where their pages go, how many of them are huge
 *   host.c, meminfo.c, limits.c    what the machine has, what it allows
 *   headroom.c           the same, looked at before each 2 MiB of a memfd
 *   memfd.c              memory with a descriptor
 *   live.c               counters of a load that are seen from outside
 *   memlog.c             the record of a phase
 *
 * Locks, in the order in which they may be taken: the budget's list of reclaimers, a pool, a
 * budget. No callback of a caller runs under any of them.
 */
#ifndef TND_MEMORY_H
#define TND_MEMORY_H

#include <pthread.h>
#include <stdlib.h>

#include <tundish/budget.h>
#include <tundish/host.h>
#include <tundish/slab.h>

#include "base/base.h"

/* -- lists -- */

/* A ring of links; an unlinked link and an empty list point at themselves. */
struct tnd__link {
	struct tnd__link *prev, *next;
};

#define TND__OF(link, type, field) ((type *)(void *)((char *)(link)-offsetof(type, field)))

static inline void tnd__link_init(struct tnd__link *link)
{
	link->prev = link->next = link;
}

static inline bool tnd__link_alone(const struct tnd__link *link)
{
	return link->next == link;
}

/* For the end of a list give its head. */
static inline void tnd__link_before(struct tnd__link *at, struct tnd__link *link)
{
	link->prev = at->prev;
	link->next = at;
	at->prev->next = link;
	at->prev = link;
}

static inline void tnd__link_remove(struct tnd__link *link)
{
	link->prev->next = link->next;
	link->next->prev = link->prev;
	tnd__link_init(link);
}

/* Every allocation of this layer: zeroed, and can be made to fail by the failpoint "mem.alloc". */
static inline void *tnd__mem_alloc(size_t bytes)
{
	return tnd__failpoint("mem.alloc") < 0 ? NULL : calloc(1, bytes);
}

/* -- budget (budget.c) -- */

/* The account lives while somebody holds a reference; close drops the creator's. */
struct tnd_budget *tnd__budget_ref(struct tnd_budget *budget);
void tnd__budget_unref(struct tnd_budget *budget);

/* -- slabs (slab.c, lease.c) -- */

/*
 * "a, b, c and 12 more": held names for a log line, at most 8 of them, cut to fit. Return: leases
 * out.
 */
size_t tnd__slab_pool_holders(struct tnd_slab_pool *pool, char *out, size_t out_bytes);

/* Whether its slabs are memfds. */
bool tnd__slab_pool_shared(const struct tnd_slab_pool *pool);
/* The slab_bytes that it was made with. */
uint64_t tnd__slab_pool_standard(const struct tnd_slab_pool *pool);
/* From now on it is this. While nobody acquires. */
void tnd__slab_pool_set_standard(struct tnd_slab_pool *pool, uint64_t slab_bytes);

/* tnd_slab_release() of a slab that others may still map: it is unmapped, and not used again. */
void tnd__slab_discard(struct tnd_slab *slab);

/*
 * A slab of somebody else's memory, so that leases, their names and counts are kept as for the
 * pool's own: live at once, never idle. `charged`: what the caller has charged the pool's budget
 * for it, refunded in the end. `gone`: called once nobody holds it any more, from whoever let go
 * last, without a lock. `file`: as in tnd_slab_acquire(). Return: 0, -ENOMEM.
 */
struct tnd__foreign {
	void *data;
	uint64_t bytes;
	void (*gone)(void *arg);
	void *arg;
	uint64_t charged;
};
int tnd__slab_adopt(struct tnd_slab_pool *pool, const struct tnd__foreign *foreign,
		    const char *file, struct tnd_slab **ret_slab);

/*
 * Looks how much of the pool's mappings is on huge pages now; tnd_slab_pool_stats() gives the most
 * seen. Walks page tables: rarely.
 */
void tnd__slab_pool_sample_huge(struct tnd_slab_pool *pool);

/* `bytes` of the slab that the lease stands for: only the naive accounting below looks at them. */
int tnd__lease_acquire_sized(struct tnd_slab *slab, const char *name, size_t name_bytes,
			     uint64_t bytes, struct tnd_lease **ret_lease);

#ifdef TND_FAILPOINTS
/*
 * The accounting that does not work, as a control for tests: a lease that ends refunds its own
 * bytes although the mapping stays. Before the first acquire.
 */
void tnd__slab_pool_charge_leases(struct tnd_slab_pool *pool, bool on);
#endif

/* -- memory with a descriptor (memfd.c) -- */

/*
 * Empty, close-on-exec, can be sealed; not executable where the kernel knows of that. Return:
 * descriptor, -errno.
 */
int tnd__memfd(const char *name);

/* -- where pages go (map.c) -- */

/*
 * Whether `numa` is TND_NUMA_* or a node that has memory; the sentence names those that there are.
 * Return: 0, TND_E_INVALID.
 */
int tnd__numa_check(int32_t numa, struct tnd_error *reterr);

/* -- memory that leaves with a tensor (map.c) -- */

/*
 * Aligned to 64 bytes, contents undefined, not charged; from 64 KiB up a mapping. Goes back by
 * tnd_own_free(). Return: 0, -ENOMEM, TND_E_INVALID (0 bytes).
 */
int tnd__own_make(uint64_t bytes, void **ret_data, uint64_t *ret_map_bytes);

/* -- host (host.c, memlog.c) -- */

/* tnd_host_memory() with every path below `root` ("" for the real ones). */
int tnd__host_memory_at(const char *root, struct tnd_host_memory *ret_memory);

/* RssAnon + RssShmem of this process; 0 where /proc does not say. */
uint64_t tnd__private_bytes(void);
/* RssAnon alone. */
uint64_t tnd__anon_bytes(void);

/* What a phase of a load leaves behind, one JSON line. */
struct tnd__memlog {
	const char *phase; /* a plain word */
	uint64_t read_bytes, kept_bytes, storage_bytes;
	uint64_t shards_opened, shards_skipped;
	uint64_t tensors, sliced, buffers, buffer_bytes, slabs;
	uint64_t slab_bytes; /* written as slab_mb */
	uint64_t slab_peak_live, slab_peak_bytes, slabs_alive_after_release;
	uint64_t live_maps, live_map_bytes;
	uint64_t start_available; /* MemAvailable before the load, or TND_HOST_UNKNOWN */
	struct tnd_host_memory host;
};

/* *ret_text: transferred, free(). Return: 0, -ENOMEM. */
int tnd__memlog_json(const struct tnd__memlog *log, char **ret_text);

#endif
