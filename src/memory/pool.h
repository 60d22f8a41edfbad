/* SPDX-License-Identifier: Apache-2.0 */
/* pool.h - inside a slab pool: shared by slab.c, lease.c, escape.c, map.c and huge.c */
#ifndef TND_POOL_H
#define TND_POOL_H

#include "account.h"
#include "memory.h"

#define TND__NODES_MAX 1024

/* Where the pages of a mapping go and how large they are. */
struct tnd__map_how {
	bool shared, no_huge;
	int numa; /* a node, TND_NUMA_AUTO or TND_NUMA_INTERLEAVE */
};

/*
 * Maps `bytes` (a multiple of 4096). *ret_fd: -1 unless shared. Return: 0, -ENOMEM, -EMFILE, -EFBIG
 * (RLIMIT_FSIZE).
 */
int tnd__map(uint64_t bytes, const struct tnd__map_how *how, void **ret_data, int *ret_fd);

/*
 * One mapping; live (handed out) or idle. Guarded by the pool's lock but for what is fixed while it
 * is live.
 */
struct tnd_slab {
	struct tnd_slab_pool *pool;
	struct tnd__link link; /* in pool->live or pool->idle */
	struct tnd__link leases;
	void *data;
	uint64_t map_bytes;
	uint64_t charge;  /* what of it the budget still counts: all, but under naive accounting */
	uint64_t bytes;   /* as requested */
	uint64_t touched; /* most that was ever requested of it */
	char *file;       /* nullable */
	uint64_t holds;   /* the filler's and the leases' */
	int fd;
	bool standard; /* of the pool's slab_bytes */
	bool doomed;   /* not to be used again */
	/* Adopted memory: told instead of unmapping it; it is not counted as mapped. */
	void (*gone)(void *arg);
	void *gone_arg;
};

struct tnd_lease {
	struct tnd__link link;
	struct tnd_slab *slab;
	uint64_t bytes;
	size_t name_bytes;
	bool forgotten; /* an escape report has named it */
	char name[];
};

/* Lives until the handle is closed and the last mapping is gone. */
struct tnd_slab_pool {
	pthread_mutex_t lock;
	struct tnd_budget *budget; /* nullable */
	struct tnd__reclaimer reclaimer;
	struct tnd__map_how how;
	uint64_t slab_bytes, standard_bytes; /* as asked, rounded up */
	uint64_t refs;
	bool closed;
	bool charge_leases;
	struct tnd__link live;
	struct tnd__link idle; /* newest first: its pages are the warmest */
	struct tnd__link waiters;
	struct tnd_slab_stats stats;
};

/* Ends one hold; `lease` (nullable) is unlinked and freed. */
void tnd__slab_drop(struct tnd_slab *slab, struct tnd_lease *lease);

/* Bytes of the range on huge pages (PMD mapped), summed over the ranges. */
struct tnd__range {
	uint64_t start, end;
};
uint64_t tnd__huge_bytes(const struct tnd__range *ranges, size_t count);

#endif
