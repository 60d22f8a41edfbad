/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slab.c - the pool: where slabs come from and where they go back to
 *
 *                        acquire
 *     (nothing) --charge, map--> live --last hold ends--> idle --acquire--> live
 *         ^                       |                        |
 *         |                       | pool closed, or others | trim, close, the budget needs it
 *         `--unmap, refund--------'  wait for the budget ---'
 *
 * Sizes. A request of at most slab_bytes gets a mapping of exactly that (rounded up to pages) and
 * shares those: the plan's least budget counts on it. A larger one gets its own size, or an idle
 * one of the same kind that is at most a quarter too large.
 *
 * Waiting. An acquire that the budget has no room for stands in the budget's queue with everybody
 * else and in the pool's own list, in the same order. A slab that comes back goes straight to the
 * first of that list if he is also first in the budget's queue: his ticket is taken out, his thread
 * wakes, no charge changes hands. Otherwise, if anybody waits, it is unmapped, so that its bytes
 * serve whoever is first. So nothing overtakes, and nobody starves on memory that lies idle.
 *
 * Invariant: a mapping is charged before mmap and refunded after munmap. Maps and unmaps run
 * without the lock.
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "pool.h"

/* An acquire that waits for the budget. */
struct waiter {
	struct tnd__link link; /* in pool->waiters */
	struct tnd__ticket ticket;
	struct tnd_slab *slab; /* handed over */
	uint64_t bytes;
};

static void unref_locked(struct tnd_slab_pool *pool)
{
	uint64_t left = --pool->refs;

	pthread_mutex_unlock(&pool->lock);
	if (left)
		return;
	tnd__budget_unref(pool->budget);
	pthread_mutex_destroy(&pool->lock);
	free(pool);
}

/* A mapping that nobody can reach any more goes. Return: bytes refunded. */
static uint64_t destroy(struct tnd_slab *slab)
{
	struct tnd_slab_pool *pool = slab->pool;
	uint64_t charge = slab->charge;

	if (slab->gone) {
		slab->gone(slab->gone_arg);
	} else {
		munmap(slab->data, slab->map_bytes);
		if (slab->fd >= 0)
			close(slab->fd);
		pthread_mutex_lock(&pool->lock);
		pool->stats.mapped_bytes -= slab->map_bytes;
		pthread_mutex_unlock(&pool->lock);
	}
	if (pool->budget && charge)
		tnd_budget_refund(pool->budget, charge);
	free(slab->file);
	free(slab);
	pthread_mutex_lock(&pool->lock);
	unref_locked(pool);
	return charge;
}

/*
 * Moves idle slabs to `victims`: the fewest that make up `lack`, so the largest; all if they do
 * not. Under the lock.
 */
static void pick_victims(struct tnd_slab_pool *pool, uint64_t lack, struct tnd__link *victims)
{
	while (lack && !tnd__link_alone(&pool->idle)) {
		struct tnd_slab *largest = TND__OF(pool->idle.prev, struct tnd_slab, link);

		/* From the oldest on: among equals the warmest stay. */
		for (struct tnd__link *at = largest->link.prev; at != &pool->idle; at = at->prev)
			if (TND__OF(at, struct tnd_slab, link)->map_bytes > largest->map_bytes)
				largest = TND__OF(at, struct tnd_slab, link);
		tnd__link_remove(&largest->link);
		tnd__link_before(victims, &largest->link);
		lack -= TND__MIN(lack, largest->map_bytes);
	}
}

static uint64_t give_up(void *arg, uint64_t lack)
{
	struct tnd_slab_pool *pool = arg;
	struct tnd__link victims;
	uint64_t refunded = 0;

	tnd__link_init(&victims);
	pthread_mutex_lock(&pool->lock);
	pick_victims(pool, lack, &victims);
	pthread_mutex_unlock(&pool->lock);
	while (!tnd__link_alone(&victims)) {
		struct tnd_slab *slab = TND__OF(victims.next, struct tnd_slab, link);

		tnd__link_remove(&slab->link);
		refunded += destroy(slab);
	}
	return refunded;
}

void tnd_slab_pool_trim(struct tnd_slab_pool *pool)
{
	give_up(pool, UINT64_MAX);
}

int tnd_slab_pool_create(const struct tnd_slab_pool_opts *opts, struct tnd_slab_pool **ret_pool)
{
	struct tnd_slab_pool *pool;
	int numa = TND_NUMA_AUTO;

	if (!opts || !ret_pool || !tnd__struct_ok(opts->struct_bytes, sizeof(*opts), sizeof(*opts)))
		return TND_E_INVALID;
	if (opts->flags & ~(TND_SLAB_POOL_F_SHARED | TND_SLAB_POOL_F_NO_HUGE))
		return TND_E_INVALID;
	if (opts->numa_given)
		numa = opts->numa;
	if (tnd__numa_check(numa, NULL) < 0 || opts->slab_bytes > UINT64_MAX / 4)
		return TND_E_INVALID;
	pool = tnd__mem_alloc(sizeof(*pool));
	if (!pool)
		return -ENOMEM;
	pthread_mutex_init(&pool->lock, NULL);
	tnd__link_init(&pool->live);
	tnd__link_init(&pool->idle);
	tnd__link_init(&pool->waiters);
	pool->budget = tnd__budget_ref(opts->budget);
	pool->how.shared = opts->flags & TND_SLAB_POOL_F_SHARED;
	pool->how.no_huge = opts->flags & TND_SLAB_POOL_F_NO_HUGE;
	pool->how.numa = numa;
	pool->slab_bytes = opts->slab_bytes;
	pool->standard_bytes = tnd__round_up(opts->slab_bytes, TND__PAGE);
	pool->refs = 1;
	pool->reclaimer.give_up = give_up;
	pool->reclaimer.arg = pool;
	if (pool->budget)
		tnd__reclaimer_add(pool->budget, &pool->reclaimer);
	*ret_pool = pool;
	return 0;
}

void tnd_slab_pool_close(struct tnd_slab_pool *pool)
{
	if (!pool)
		return;
	if (pool->budget)
		tnd__reclaimer_remove(pool->budget, &pool->reclaimer);
	pthread_mutex_lock(&pool->lock);
	pool->closed = true;
	pthread_mutex_unlock(&pool->lock);
	give_up(pool, UINT64_MAX);
	pthread_mutex_lock(&pool->lock);
	unref_locked(pool);
}

static bool is_standard(const struct tnd_slab_pool *pool, uint64_t bytes)
{
	return bytes <= pool->slab_bytes;
}

static uint64_t capacity_for(const struct tnd_slab_pool *pool, uint64_t bytes)
{
	if (is_standard(pool, bytes))
		return pool->standard_bytes;
	/* Beyond all memory the number only has to stay too large. */
	return bytes > UINT64_MAX / 4 ? bytes : tnd__round_up(bytes, TND__PAGE);
}

static bool suits(const struct tnd_slab *slab, uint64_t bytes)
{
	uint64_t least = capacity_for(slab->pool, bytes);

	if (is_standard(slab->pool, bytes))
		return slab->standard;
	return !slab->standard && slab->map_bytes >= least &&
	       slab->map_bytes <= TND__MAX(least, bytes + bytes / 4);
}

/*
 * Whether `a` serves a request of `bytes` with less first touch than `b`, or else leaves the more
 * used one to larger requests.
 */
static bool better(const struct tnd_slab *a, const struct tnd_slab *b, uint64_t bytes)
{
	bool a_covers = a->touched >= bytes, b_covers = b->touched >= bytes;

	if (a_covers != b_covers)
		return a_covers;
	return a_covers ? a->touched < b->touched : a->touched > b->touched;
}

/*
 * First touch is the dearest part of a mapping; among equals the newest, whose pages are the
 * warmest.
 */
static struct tnd_slab *take_idle(struct tnd_slab_pool *pool, uint64_t bytes)
{
	struct tnd_slab *best = NULL;

	for (struct tnd__link *at = pool->idle.next; at != &pool->idle; at = at->next) {
		struct tnd_slab *slab = TND__OF(at, struct tnd_slab, link);

		if (suits(slab, bytes) && (!best || better(slab, best, bytes)))
			best = slab;
	}
	if (best)
		tnd__link_remove(&best->link);
	return best;
}

/*
 * Idle memory for `lack` bytes of budget, the pool's own first: others may still find theirs
 * useful. Without the lock.
 */
static void make_room(struct tnd_slab_pool *pool, uint64_t lack)
{
	uint64_t refunded = give_up(pool, lack);

	if (refunded < lack)
		tnd__budget_reclaim(pool->budget, lack - refunded);
}

/*
 * Charges for a fresh mapping, under the lock, which is dropped while waiting. *ret_slab: one that
 * came back meanwhile, taken instead of a charge. Return: as tnd_budget_charge().
 */
static int charge_for(struct tnd_slab_pool *pool, uint64_t bytes,
		      const struct tnd_charge_opts *opts, struct tnd_slab **ret_slab)
{
	struct waiter waiter = {.bytes = bytes};
	uint64_t charge = capacity_for(pool, bytes);
	int rc;

	if (!pool->budget)
		return 0;
	/* Under the pool's lock, so that both lists have the same order. */
	rc = tnd__budget_enter(pool->budget, &waiter.ticket, charge, opts, false);
	if (rc == -EAGAIN) {
		pthread_mutex_unlock(&pool->lock);
		make_room(pool, waiter.ticket.lack);
		pthread_mutex_lock(&pool->lock);
		*ret_slab = take_idle(pool, bytes);
		return *ret_slab ? 0
				 : tnd__budget_enter(pool->budget, &waiter.ticket, charge, opts,
						     true);
	}
	if (rc != TND__QUEUED)
		return rc;
	tnd__link_before(&pool->waiters, &waiter.link);
	pthread_mutex_unlock(&pool->lock);
	make_room(pool, waiter.ticket.lack);
	rc = tnd__budget_wait(pool->budget, &waiter.ticket, opts);
	pthread_mutex_lock(&pool->lock);
	tnd__link_remove(&waiter.link);
	*ret_slab = waiter.slab;
	return rc == TND__TAKEN ? 0 : rc;
}

/* A mapping for a charge that was made; refunds it on failure. Without the lock. */
static int map_fresh(struct tnd_slab_pool *pool, uint64_t bytes, struct tnd_slab **ret_slab)
{
	uint64_t charge = capacity_for(pool, bytes);
	struct tnd_slab *slab = tnd__mem_alloc(sizeof(*slab));
	int rc = slab ? tnd__map(charge, &pool->how, &slab->data, &slab->fd) : -ENOMEM;

	if (rc < 0) {
		free(slab);
		if (pool->budget)
			tnd_budget_refund(pool->budget, charge);
		return rc;
	}
	tnd__link_init(&slab->link);
	tnd__link_init(&slab->leases);
	slab->pool = pool;
	slab->map_bytes = slab->charge = charge;
	slab->standard = is_standard(pool, bytes);
	*ret_slab = slab;
	return 0;
}

static void count_fresh(struct tnd_slab_pool *pool, const struct tnd_slab *slab)
{
	pool->refs++;
	pool->stats.allocations++;
	pool->stats.mapped_bytes += slab->map_bytes;
}

static void hand_out(struct tnd_slab_pool *pool, struct tnd_slab *slab, uint64_t bytes, char *file)
{
	struct tnd_slab_stats *stats = &pool->stats;

	slab->bytes = bytes;
	slab->touched = TND__MAX(slab->touched, bytes);
	slab->file = file;
	slab->holds = 1;
	tnd__link_before(&pool->live, &slab->link);
	stats->buffers++;
	stats->buffer_bytes += bytes;
	stats->live++;
	stats->live_bytes += slab->map_bytes;
	stats->peak_live = TND__MAX(stats->peak_live, stats->live);
	stats->peak_bytes = TND__MAX(stats->peak_bytes, stats->live_bytes);
}

/* NULL stays NULL. Return: 0, -ENOMEM. */
static int copy_name(const char *file, char **ret_copy)
{
	*ret_copy = NULL;
	if (!file)
		return 0;
	*ret_copy = tnd__mem_alloc(strlen(file) + 1);
	if (!*ret_copy)
		return -ENOMEM;
	strcpy(*ret_copy, file);
	return 0;
}

int tnd__slab_adopt(struct tnd_slab_pool *pool, const struct tnd__foreign *foreign,
		    const char *file, struct tnd_slab **ret_slab)
{
	struct tnd_slab *slab = tnd__mem_alloc(sizeof(*slab));
	char *copy;

	if (!slab || copy_name(file, &copy) < 0) {
		free(slab);
		return -ENOMEM;
	}
	tnd__link_init(&slab->link);
	tnd__link_init(&slab->leases);
	slab->pool = pool;
	slab->data = foreign->data;
	slab->map_bytes = foreign->bytes;
	slab->fd = -1;
	slab->doomed = true;
	slab->gone = foreign->gone;
	slab->gone_arg = foreign->arg;
	slab->charge = foreign->charged;
	pthread_mutex_lock(&pool->lock);
	pool->refs++;
	hand_out(pool, slab, foreign->bytes, copy);
	pthread_mutex_unlock(&pool->lock);
	*ret_slab = slab;
	return 0;
}

int tnd_slab_acquire(struct tnd_slab_pool *pool, uint64_t bytes, const char *file,
		     const struct tnd_charge_opts *opts, struct tnd_slab **ret_slab)
{
	struct tnd_slab *slab;
	char *copy;
	int rc = tnd__charge_opts_check(opts);

	if (rc < 0 || !bytes)
		return TND_E_INVALID;
	rc = copy_name(file, &copy);
	if (rc < 0)
		return rc;
	pthread_mutex_lock(&pool->lock);
	slab = take_idle(pool, bytes);
	if (!slab)
		rc = charge_for(pool, bytes, opts, &slab);
	if (rc == 0 && !slab) {
		pthread_mutex_unlock(&pool->lock);
		rc = map_fresh(pool, bytes, &slab);
		pthread_mutex_lock(&pool->lock);
		if (rc == 0)
			count_fresh(pool, slab);
	}
	if (rc == 0)
		hand_out(pool, slab, bytes, copy);
	pthread_mutex_unlock(&pool->lock);
	if (rc == 0)
		*ret_slab = slab;
	else
		free(copy);
	return rc;
}

/*
 * The last hold ended. Under the lock. Return: whether the mapping must be destroyed, by the
 * caller, without the lock.
 */
static bool put_back(struct tnd_slab_pool *pool, struct tnd_slab *slab)
{
	struct waiter *first = NULL;

	tnd__link_remove(&slab->link);
	pool->stats.live--;
	pool->stats.live_bytes -= slab->map_bytes;
	free(slab->file);
	slab->file = NULL;
	if (pool->closed || pool->charge_leases || slab->doomed)
		return true;
	if (!tnd__link_alone(&pool->waiters))
		first = TND__OF(pool->waiters.next, struct waiter, link);
	if (first && suits(slab, first->bytes) &&
	    tnd__budget_take_over(pool->budget, &first->ticket)) {
		tnd__link_remove(&first->link);
		first->slab = slab;
		return false;
	}
	if (pool->budget && tnd__budget_contended(pool->budget))
		return true;
	tnd__link_before(pool->idle.next, &slab->link);
	return false;
}

/*
 * Under naive accounting (a test's control) a lease's own bytes are refunded at its end. Under the
 * lock, which keeps the pool.
 */
static void naive_refund(struct tnd_slab_pool *pool, struct tnd_slab *slab, uint64_t bytes)
{
	if (!pool->charge_leases || !pool->budget)
		return;
	bytes = TND__MIN(bytes, slab->charge);
	slab->charge -= bytes;
	tnd_budget_refund(pool->budget, bytes);
}

void tnd__slab_drop(struct tnd_slab *slab, struct tnd_lease *lease)
{
	struct tnd_slab_pool *pool = slab->pool;
	bool gone = false;

	pthread_mutex_lock(&pool->lock);
	if (lease) {
		tnd__link_remove(&lease->link);
		pool->stats.leases--;
		naive_refund(pool, slab, lease->bytes);
	}
	if (--slab->holds == 0)
		gone = put_back(pool, slab);
	pthread_mutex_unlock(&pool->lock);

	/* Only a slab that is gone still holds the pool for us. */
	if (gone)
		destroy(slab);
	free(lease);
}

void tnd_slab_release(struct tnd_slab *slab)
{
	if (slab)
		tnd__slab_drop(slab, NULL);
}

bool tnd__slab_pool_shared(const struct tnd_slab_pool *pool)
{
	return pool->how.shared;
}

uint64_t tnd__slab_pool_standard(const struct tnd_slab_pool *pool)
{
	return pool->standard_bytes;
}

void tnd__slab_pool_set_standard(struct tnd_slab_pool *pool, uint64_t slab_bytes)
{
	pthread_mutex_lock(&pool->lock);
	pool->slab_bytes = slab_bytes;
	pool->standard_bytes = tnd__round_up(slab_bytes, TND__PAGE);
	pthread_mutex_unlock(&pool->lock);
}

void tnd__slab_discard(struct tnd_slab *slab)
{
	pthread_mutex_lock(&slab->pool->lock);
	slab->doomed = true;
	pthread_mutex_unlock(&slab->pool->lock);
	tnd__slab_drop(slab, NULL);
}

void *tnd_slab_data(const struct tnd_slab *slab)
{
	return slab->data;
}

uint64_t tnd_slab_bytes(const struct tnd_slab *slab)
{
	return slab->bytes;
}

int tnd_slab_fd(const struct tnd_slab *slab)
{
	return slab->fd;
}

int tnd_slab_pool_stats(struct tnd_slab_pool *pool, struct tnd_slab_stats *ret_stats)
{
	uint32_t given = ret_stats->struct_bytes;

	if (!tnd__struct_ok(given, sizeof(*ret_stats), sizeof(*ret_stats)))
		return TND_E_INVALID;
	pthread_mutex_lock(&pool->lock);
	*ret_stats = pool->stats;
	pthread_mutex_unlock(&pool->lock);
	ret_stats->struct_bytes = given;
	return 0;
}

void tnd_slab_pool_reset_peaks(struct tnd_slab_pool *pool)
{
	pthread_mutex_lock(&pool->lock);
	pool->stats.peak_live = pool->stats.live;
	pool->stats.peak_bytes = pool->stats.live_bytes;
	pthread_mutex_unlock(&pool->lock);
}

#ifdef TND_FAILPOINTS
void tnd__slab_pool_charge_leases(struct tnd_slab_pool *pool, bool on)
{
	pthread_mutex_lock(&pool->lock);
	pool->charge_leases = on;
	pthread_mutex_unlock(&pool->lock);
}
#endif
