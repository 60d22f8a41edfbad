/* SPDX-License-Identifier: Apache-2.0 */
/*
 * budget.c - the account: what is charged, who waits, who may go on
 *
 *      charge            refund, a waiter that leaves
 *        | fits              |
 *        |                   v
 *        |             grant(): while the head of the queue fits, charge it, wake it
 *        v                   ^
 *   [ queue of tickets ] ----'          one condition variable a ticket: no crowd wakes for nothing
 *
 * Whoever gives bytes back charges them to the head of the queue at once, under the lock. So a
 * newcomer cannot slip in between refund and wake-up, and order of arrival is order of service.
 *
 * Invariants: charged <= bound unless an overrun was counted; a queued head does not fit;
 * queued_bytes is the sum over the queue.
 *
 * Memory that pools keep idle is charged too. Before a charge sleeps it is queued, and then the
 * pools are asked for what they can do without (reclaimers): in this order, so that a slab that
 * becomes idle meanwhile finds the queue not empty and is given up by its pool.
 *
 * A key's charge (keyed.c) is a ticket like any other; tickets of callers that come while it waits
 * hang on the key, outside the queue.
 */
#include <assert.h>
#include <errno.h>
#include <string.h>
#include <time.h>

#include "account.h"

#define FLAGS_KNOWN (TND_CHARGE_F_OVERRUN | TND_CHARGE_F_ALONE | TND_CHARGE_F_TRY)
/* No machine has as much; sums of a few such numbers do not overflow. */
#define BYTES_MAX (UINT64_MAX / 4)

static bool fits(const struct tnd_budget *budget, uint64_t bytes)
{
	const struct tnd_budget_stats *now = &budget->stats;

	if (bytes > now->bound_bytes)
		return !now->charged_bytes;
	return now->charged_bytes <= now->bound_bytes &&
	       bytes <= now->bound_bytes - now->charged_bytes;
}

static void take(struct tnd_budget *budget, uint64_t bytes)
{
	struct tnd_budget_stats *now = &budget->stats;

	now->charged_bytes += bytes;
	now->peak_bytes = TND__MAX(now->peak_bytes, now->charged_bytes);
	if (bytes && now->charged_bytes > now->bound_bytes) {
		now->overruns++;
		now->overrun_bytes += now->charged_bytes - now->bound_bytes;
	}
}

void tnd__budget_settle(struct tnd__ticket *ticket, int state)
{
	ticket->state = state;
	/* Under the lock: the ticket is gone as soon as its owner can have the lock. */
	pthread_cond_signal(&ticket->cond);
}

static void leave_queue(struct tnd_budget *budget, struct tnd__ticket *ticket)
{
	tnd__link_remove(&ticket->link);
	budget->queued_bytes -= ticket->bytes;
	budget->stats.waiters--;
}

void tnd__budget_grant_one(struct tnd_budget *budget, struct tnd__ticket *ticket)
{
	leave_queue(budget, ticket);
	take(budget, ticket->bytes);
	if (ticket->key)
		tnd__key_granted(budget, ticket);
	tnd__budget_settle(ticket, TND__TICKET_GRANTED);
}

static void grant(struct tnd_budget *budget)
{
	while (!tnd__link_alone(&budget->queue)) {
		struct tnd__ticket *head = TND__OF(budget->queue.next, struct tnd__ticket, link);

		if (!fits(budget, head->bytes))
			return;
		tnd__budget_grant_one(budget, head);
	}
}

int tnd_budget_create(uint64_t bound_bytes, struct tnd_budget **ret_budget)
{
	struct tnd_budget *budget;

	if (!bound_bytes || !ret_budget)
		return TND_E_INVALID;
	budget = tnd__mem_alloc(sizeof(*budget));
	if (!budget)
		return -ENOMEM;
	pthread_mutex_init(&budget->lock, NULL);
	pthread_mutex_init(&budget->reclaim_lock, NULL);
	tnd__link_init(&budget->queue);
	tnd__link_init(&budget->reclaimers);
	budget->refs = 1;
	budget->stats.bound_bytes = bound_bytes;
	*ret_budget = budget;
	return 0;
}

struct tnd_budget *tnd__budget_ref(struct tnd_budget *budget)
{
	if (!budget)
		return NULL;
	pthread_mutex_lock(&budget->lock);
	budget->refs++;
	pthread_mutex_unlock(&budget->lock);
	return budget;
}

void tnd__budget_unref(struct tnd_budget *budget)
{
	uint64_t left;

	if (!budget)
		return;
	pthread_mutex_lock(&budget->lock);
	left = --budget->refs;
	pthread_mutex_unlock(&budget->lock);
	if (left)
		return;
	tnd__keys_free(budget);
	pthread_mutex_destroy(&budget->reclaim_lock);
	pthread_mutex_destroy(&budget->lock);
	free(budget);
}

void tnd_budget_close(struct tnd_budget *budget)
{
	tnd__budget_unref(budget);
}

int tnd__charge_opts_check(const struct tnd_charge_opts *opts)
{
	if (!opts)
		return 0;
	if (!tnd__struct_ok(opts->struct_bytes, sizeof(*opts), sizeof(*opts)))
		return TND_E_INVALID;
	return opts->flags & ~FLAGS_KNOWN ? TND_E_INVALID : 0;
}

/* What must be refunded before a charge that comes now can go on. */
static uint64_t lack_of(const struct tnd_budget *budget, uint64_t bytes)
{
	const struct tnd_budget_stats *now = &budget->stats;

	if (bytes > now->bound_bytes)
		return UINT64_MAX;
	if (now->charged_bytes + budget->queued_bytes + bytes <= now->bound_bytes)
		return 0;
	return now->charged_bytes + budget->queued_bytes + bytes - now->bound_bytes;
}

void tnd__budget_sleep(struct tnd_budget *budget, struct tnd__ticket *ticket, uint64_t bytes,
		       uint32_t flags, struct tnd__link *before)
{
	pthread_condattr_t attributes;

	ticket->bytes = bytes;
	ticket->flags = flags;
	ticket->state = TND__TICKET_QUEUED;
	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(&ticket->cond, &attributes);
	pthread_condattr_destroy(&attributes);
	tnd__link_before(before, &ticket->link);
	budget->stats.waiters++;
}

int tnd__budget_enter_locked(struct tnd_budget *budget, struct tnd__ticket *ticket, uint64_t bytes,
			     const struct tnd_charge_opts *opts, bool last)
{
	uint32_t flags = opts ? opts->flags : 0;

	ticket->state = TND__TICKET_NONE;
	ticket->key = NULL;
	ticket->lack = 0;
	if (bytes > budget->stats.bound_bytes &&
	    !(flags & (TND_CHARGE_F_OVERRUN | TND_CHARGE_F_ALONE)))
		return TND_E_BUDGET;
	if (bytes > BYTES_MAX || budget->stats.charged_bytes > BYTES_MAX)
		return TND_E_BUDGET;
	if (!bytes)
		return 0;
	if (fits(budget, bytes) &&
	    (tnd__link_alone(&budget->queue) || (flags & TND_CHARGE_F_OVERRUN))) {
		take(budget, bytes);
		return 0;
	}
	ticket->lack = lack_of(budget, bytes);
	if (flags & TND_CHARGE_F_OVERRUN) {
		if (!last)
			return -EAGAIN;
		take(budget, bytes);
		return 0;
	}
	if (flags & TND_CHARGE_F_TRY)
		return -EAGAIN;
	tnd__budget_sleep(budget, ticket, bytes, flags, &budget->queue);
	budget->queued_bytes += bytes;
	return TND__QUEUED;
}

int tnd__budget_enter(struct tnd_budget *budget, struct tnd__ticket *ticket, uint64_t bytes,
		      const struct tnd_charge_opts *opts, bool last)
{
	int rc;

	pthread_mutex_lock(&budget->lock);
	rc = tnd__budget_enter_locked(budget, ticket, bytes, opts, last);
	pthread_mutex_unlock(&budget->lock);
	return rc;
}

/* Sleeps until the ticket is settled. Return: 0, TND_E_DEADLINE, TND_E_CANCELLED. */
static int sleep_until_settled(struct tnd_budget *budget, struct tnd__ticket *ticket,
			       const struct tnd_charge_opts *opts)
{
	int64_t deadline_ns = opts ? opts->deadline_ns : 0;
	struct timespec deadline;

	tnd__ns_to_timespec(deadline_ns, &deadline);
	while (ticket->state == TND__TICKET_QUEUED) {
		uint64_t seen = budget->wake_count;

		if (opts && opts->cancelled) {
			int cancelled;

			pthread_mutex_unlock(&budget->lock);
			cancelled = opts->cancelled(opts->cancelled_arg);
			pthread_mutex_lock(&budget->lock);
			if (ticket->state != TND__TICKET_QUEUED)
				return 0;
			if (cancelled)
				return TND_E_CANCELLED;
			if (seen != budget->wake_count)
				continue;
		}
		if (!deadline_ns)
			pthread_cond_wait(&ticket->cond, &budget->lock);
		else if (tnd__now_ns() >= deadline_ns)
			return TND_E_DEADLINE;
		else
			pthread_cond_timedwait(&ticket->cond, &budget->lock, &deadline);
	}
	return 0;
}

int tnd__budget_wait(struct tnd_budget *budget, struct tnd__ticket *ticket,
		     const struct tnd_charge_opts *opts)
{
	int rc = 0;

	pthread_mutex_lock(&budget->lock);
	if (ticket->state == TND__TICKET_QUEUED) {
		int64_t start_ns = tnd__now_ns();

		budget->stats.waits++;
		rc = sleep_until_settled(budget, ticket, opts);
		budget->stats.wait_ns += (uint64_t)(tnd__now_ns() - start_ns);
	}
	if (ticket->state == TND__TICKET_QUEUED) {
		if (ticket->key)
			tnd__key_left(budget, ticket);
		else
			leave_queue(budget, ticket);
		grant(budget);
	} else {
		rc = ticket->state == TND__TICKET_GRANTED ? 0 : TND__TAKEN;
	}
	pthread_mutex_unlock(&budget->lock);
	pthread_cond_destroy(&ticket->cond);
	return rc;
}

int tnd_budget_charge(struct tnd_budget *budget, uint64_t bytes, const struct tnd_charge_opts *opts)
{
	struct tnd__ticket ticket;
	int rc = tnd__charge_opts_check(opts);

	if (rc < 0)
		return rc;
	rc = tnd__budget_enter(budget, &ticket, bytes, opts, false);
	if (rc == -EAGAIN) {
		tnd__budget_reclaim(budget, ticket.lack);
		return tnd__budget_enter(budget, &ticket, bytes, opts, true);
	}
	if (rc == TND__QUEUED) {
		tnd__budget_reclaim(budget, ticket.lack);
		return tnd__budget_wait(budget, &ticket, opts);
	}
	return rc;
}

bool tnd__budget_take_over(struct tnd_budget *budget, struct tnd__ticket *ticket)
{
	bool taken;

	pthread_mutex_lock(&budget->lock);
	taken = ticket->state == TND__TICKET_QUEUED && budget->queue.next == &ticket->link;
	if (taken) {
		leave_queue(budget, ticket);
		tnd__budget_settle(ticket, TND__TICKET_TAKEN);
		grant(budget);
	}
	pthread_mutex_unlock(&budget->lock);
	return taken;
}

bool tnd__budget_contended(struct tnd_budget *budget)
{
	bool contended;

	pthread_mutex_lock(&budget->lock);
	contended = !tnd__link_alone(&budget->queue);
	pthread_mutex_unlock(&budget->lock);
	return contended;
}

void tnd__budget_refund_locked(struct tnd_budget *budget, uint64_t bytes)
{
	assert(bytes <= budget->stats.charged_bytes);
	budget->stats.charged_bytes -= TND__MIN(bytes, budget->stats.charged_bytes);
	grant(budget);
}

void tnd_budget_refund(struct tnd_budget *budget, uint64_t bytes)
{
	pthread_mutex_lock(&budget->lock);
	tnd__budget_refund_locked(budget, bytes);
	pthread_mutex_unlock(&budget->lock);
}

void tnd_budget_wake(struct tnd_budget *budget)
{
	pthread_mutex_lock(&budget->lock);
	budget->wake_count++;
	for (struct tnd__link *at = budget->queue.next; at != &budget->queue; at = at->next) {
		struct tnd__ticket *ticket = TND__OF(at, struct tnd__ticket, link);

		pthread_cond_signal(&ticket->cond);
		if (ticket->key)
			tnd__key_wake(ticket);
	}
	pthread_mutex_unlock(&budget->lock);
}

int tnd_budget_stats(struct tnd_budget *budget, struct tnd_budget_stats *ret_stats)
{
	uint32_t given = ret_stats->struct_bytes;

	if (!tnd__struct_ok(given, sizeof(*ret_stats), sizeof(*ret_stats)))
		return TND_E_INVALID;
	pthread_mutex_lock(&budget->lock);
	*ret_stats = budget->stats;
	pthread_mutex_unlock(&budget->lock);
	ret_stats->struct_bytes = given;
	return 0;
}

void tnd_budget_reset(struct tnd_budget *budget)
{
	struct tnd_budget_stats *stats = &budget->stats;

	pthread_mutex_lock(&budget->lock);
	stats->peak_bytes = stats->charged_bytes;
	stats->overruns = stats->overrun_bytes = stats->waits = stats->wait_ns = 0;
	pthread_mutex_unlock(&budget->lock);
}

void tnd__budget_reclaim(struct tnd_budget *budget, uint64_t lack)
{
	pthread_mutex_lock(&budget->reclaim_lock);
	for (struct tnd__link *at = budget->reclaimers.next; lack && at != &budget->reclaimers;
	     at = at->next) {
		struct tnd__reclaimer *reclaimer = TND__OF(at, struct tnd__reclaimer, link);
		uint64_t refunded = reclaimer->give_up(reclaimer->arg, lack);

		lack -= TND__MIN(lack, refunded);
	}
	pthread_mutex_unlock(&budget->reclaim_lock);
}

void tnd__reclaimer_add(struct tnd_budget *budget, struct tnd__reclaimer *reclaimer)
{
	pthread_mutex_lock(&budget->reclaim_lock);
	tnd__link_before(&budget->reclaimers, &reclaimer->link);
	pthread_mutex_unlock(&budget->reclaim_lock);
}

void tnd__reclaimer_remove(struct tnd_budget *budget, struct tnd__reclaimer *reclaimer)
{
	pthread_mutex_lock(&budget->reclaim_lock);
	tnd__link_remove(&reclaimer->link);
	pthread_mutex_unlock(&budget->reclaim_lock);
}
