/* SPDX-License-Identifier: Apache-2.0 */
/* account.h - inside a budget: shared by budget.c, keyed.c and the pool that waits in its queue */
#ifndef TND_ACCOUNT_H
#define TND_ACCOUNT_H

#include "memory.h"

#define TND__TICKET_NONE 0
#define TND__TICKET_QUEUED 1
#define TND__TICKET_GRANTED 2 /* charged */
#define TND__TICKET_TAKEN 3   /* left the queue without a charge: tnd__budget_take_over() */

#define TND__QUEUED 1 /* tnd__budget_enter(): call tnd__budget_wait() */
#define TND__TAKEN 1  /* tnd__budget_wait() */

struct tnd__key;

/*
 * One charge that waits, on its caller's stack. Guarded by the budget's lock from enter to the end
 * of wait.
 */
struct tnd__ticket {
	struct tnd__link link; /* in the queue, or among a key's followers */
	struct tnd__key *key;  /* nullable */
	pthread_cond_t cond;
	uint64_t bytes;
	uint64_t lack; /* bytes that had to be refunded first when it came */
	uint32_t flags;
	int state;
};

/* Somebody who keeps charged memory that he can do without. */
struct tnd__reclaimer {
	struct tnd__link link;
	/*
	 * Gives up `lack` bytes, or all that it can. Return: bytes refunded. Called under the
	 * list's lock only.
	 */
	uint64_t (*give_up)(void *arg, uint64_t lack);
	void *arg;
};

struct tnd_budget {
	pthread_mutex_t lock;
	pthread_mutex_t reclaim_lock;
	struct tnd__link reclaimers;
	struct tnd__link queue;
	uint64_t refs;
	uint64_t queued_bytes;
	uint64_t wake_count; /* of tnd_budget_wake(): none is lost between `cancelled` and sleep */
	struct tnd_budget_stats stats;
	struct tnd__key **buckets; /* chains; NULL until the first key */
	size_t bucket_count, key_count;
};

/* Return: 0, TND_E_INVALID. */
int tnd__charge_opts_check(const struct tnd_charge_opts *opts);

/*
 * The first half of a charge. `last`: false the first time; TRY and OVERRUN charges that do not fit
 * then get -EAGAIN, the caller has memory reclaimed and asks again with true. Never sleeps, calls
 * nobody.
 * Return: 0 (charged), TND__QUEUED, -EAGAIN, TND_E_BUDGET.
 */
int tnd__budget_enter(struct tnd_budget *budget, struct tnd__ticket *ticket, uint64_t bytes,
		      const struct tnd_charge_opts *opts, bool last);
int tnd__budget_enter_locked(struct tnd_budget *budget, struct tnd__ticket *ticket, uint64_t bytes,
			     const struct tnd_charge_opts *opts, bool last);

/* The second half, for a queued ticket. Return: 0, TND__TAKEN, TND_E_DEADLINE, TND_E_CANCELLED. */
int tnd__budget_wait(struct tnd_budget *budget, struct tnd__ticket *ticket,
		     const struct tnd_charge_opts *opts);

/*
 * Ends the wait of the queue's head because its caller got what it needs elsewhere. Return: whether
 * `ticket` was the waiting head.
 */
bool tnd__budget_take_over(struct tnd_budget *budget, struct tnd__ticket *ticket);

/* Whether anybody waits. */
bool tnd__budget_contended(struct tnd_budget *budget);

/* Asks the reclaimers for `lack` bytes. Without locks. */
void tnd__budget_reclaim(struct tnd_budget *budget, uint64_t lack);
void tnd__reclaimer_add(struct tnd_budget *budget, struct tnd__reclaimer *reclaimer);
void tnd__reclaimer_remove(struct tnd_budget *budget, struct tnd__reclaimer *reclaimer);

/* For keyed.c, under the budget's lock. */
void tnd__budget_sleep(struct tnd_budget *budget, struct tnd__ticket *ticket, uint64_t bytes,
		       uint32_t flags, struct tnd__link *before);
void tnd__budget_grant_one(struct tnd_budget *budget, struct tnd__ticket *ticket);
void tnd__budget_settle(struct tnd__ticket *ticket, int state);
void tnd__budget_refund_locked(struct tnd_budget *budget, uint64_t bytes);

/* For budget.c, under its lock: a ticket with a key was charged, or gives up. */
void tnd__key_granted(struct tnd_budget *budget, struct tnd__ticket *ticket);
void tnd__key_left(struct tnd_budget *budget, struct tnd__ticket *ticket);
void tnd__key_wake(struct tnd__ticket *leader);
void tnd__keys_free(struct tnd_budget *budget);

#endif
