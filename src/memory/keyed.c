/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keyed.c - charges that count once however often their key is charged
 *
 *              charge                      granted                     refund (last)
 *   (no key) -----------> waiting: leader ---------> charged: count n -------------> (no key)
 *                         + followers      with all its followers
 *
 * The leader's ticket stands in the budget's queue; followers hang on the key. A leader that gives
 * up hands its place in the queue to the first follower. A key is waiting exactly while it has a
 * leader. All under the budget's lock.
 */
#include <errno.h>

#include "account.h"

struct tnd__key {
	struct tnd__key *next; /* in its bucket */
	uint64_t key;
	uint64_t bytes;             /* charged */
	uint64_t count;             /* charges not yet refunded; 0 while waiting */
	struct tnd__ticket *leader; /* NULL once charged */
	struct tnd__link followers;
};

static size_t bucket_of(uint64_t key, size_t bucket_count)
{
	/*
	 * Keys are often addresses: the low bits say nothing, a multiplication brings the others
	 * up.
	 */
	return (size_t)(key * UINT64_C(0x9e3779b97f4a7c15) >> 32) & (bucket_count - 1);
}

static struct tnd__key *find(const struct tnd_budget *budget, uint64_t key)
{
	struct tnd__key *at;

	if (!budget->bucket_count)
		return NULL;
	at = budget->buckets[bucket_of(key, budget->bucket_count)];
	while (at && at->key != key)
		at = at->next;
	return at;
}

/*
 * Keeps chains short. Only the first table is needed; without memory for a larger one chains grow.
 */
static int grow(struct tnd_budget *budget)
{
	size_t count = budget->bucket_count ? budget->bucket_count * 2 : 64;
	struct tnd__key **buckets;

	if (budget->key_count < budget->bucket_count)
		return 0;
	buckets = tnd__mem_alloc(count * sizeof(*buckets));
	if (!buckets)
		return budget->bucket_count ? 0 : -ENOMEM;
	for (size_t i = 0; i < budget->bucket_count; i++) {
		for (struct tnd__key *key = budget->buckets[i], *next; key; key = next) {
			size_t bucket = bucket_of(key->key, count);

			next = key->next;
			key->next = buckets[bucket];
			buckets[bucket] = key;
		}
	}
	free(budget->buckets);
	budget->buckets = buckets;
	budget->bucket_count = count;
	return 0;
}

static void insert(struct tnd_budget *budget, struct tnd__key *key)
{
	size_t bucket = bucket_of(key->key, budget->bucket_count);

	key->next = budget->buckets[bucket];
	budget->buckets[bucket] = key;
	budget->key_count++;
}

static void erase(struct tnd_budget *budget, struct tnd__key *key)
{
	struct tnd__key **at = &budget->buckets[bucket_of(key->key, budget->bucket_count)];

	while (*at != key)
		at = &(*at)->next;
	*at = key->next;
	budget->key_count--;
	free(key);
}

void tnd__keys_free(struct tnd_budget *budget)
{
	for (size_t i = 0; i < budget->bucket_count; i++) {
		for (struct tnd__key *key = budget->buckets[i], *next; key; key = next) {
			next = key->next;
			free(key);
		}
	}
	free(budget->buckets);
}

static struct tnd__ticket *first_follower(const struct tnd__key *key)
{
	return tnd__link_alone(&key->followers)
		       ? NULL
		       : TND__OF(key->followers.next, struct tnd__ticket, link);
}

void tnd__key_granted(struct tnd_budget *budget, struct tnd__ticket *ticket)
{
	struct tnd__key *key = ticket->key;
	struct tnd__ticket *follower;

	key->bytes = ticket->bytes;
	key->count = 1;
	key->leader = NULL;
	while ((follower = first_follower(key))) {
		tnd__link_remove(&follower->link);
		budget->stats.waiters--;
		key->count++;
		tnd__budget_settle(follower, TND__TICKET_GRANTED);
	}
}

void tnd__key_left(struct tnd_budget *budget, struct tnd__ticket *ticket)
{
	struct tnd__key *key = ticket->key;
	struct tnd__ticket *heir;

	budget->stats.waiters--;
	if (key->leader != ticket) {
		tnd__link_remove(&ticket->link);
		return;
	}
	budget->queued_bytes -= ticket->bytes;
	heir = first_follower(key);
	if (heir) {
		tnd__link_remove(&heir->link);
		tnd__link_before(&ticket->link, &heir->link);
		budget->queued_bytes += heir->bytes;
	}
	key->leader = heir;
	tnd__link_remove(&ticket->link);
	if (!heir)
		erase(budget, key);
}

void tnd__key_wake(struct tnd__ticket *leader)
{
	struct tnd__key *key = leader->key;

	for (struct tnd__link *at = key->followers.next; at != &key->followers; at = at->next)
		pthread_cond_signal(&TND__OF(at, struct tnd__ticket, link)->cond);
}

/* A charge of a key that is known. Return: as tnd__budget_enter(). */
static int join(struct tnd_budget *budget, struct tnd__key *key, struct tnd__ticket *ticket,
		uint64_t bytes, const struct tnd_charge_opts *opts)
{
	uint32_t flags = opts ? opts->flags : 0;

	ticket->lack = 0;
	if (key->leader && (flags & TND_CHARGE_F_OVERRUN))
		tnd__budget_grant_one(budget, key->leader);
	if (!key->leader) {
		key->count++;
		return 0;
	}
	if (flags & TND_CHARGE_F_TRY)
		return -EAGAIN;
	/* It may become the leader, and then its own bytes must be able to fit. */
	if (bytes > budget->stats.bound_bytes && !(flags & TND_CHARGE_F_ALONE))
		return TND_E_BUDGET;
	ticket->key = key;
	tnd__budget_sleep(budget, ticket, bytes, flags, &key->followers);
	return TND__QUEUED;
}

/*
 * A charge of a key that is not: `*fresh` becomes it and is taken over unless that fails. Return:
 * as tnd__budget_enter(), -ENOMEM.
 */
static int begin(struct tnd_budget *budget, struct tnd__key **fresh, struct tnd__ticket *ticket,
		 uint64_t bytes, const struct tnd_charge_opts *opts, bool last)
{
	struct tnd__key *key = *fresh;
	int rc = grow(budget);

	if (rc == 0)
		rc = tnd__budget_enter_locked(budget, ticket, bytes, opts, last);
	if (rc < 0)
		return rc;
	if (rc == TND__QUEUED) {
		key->leader = ticket;
		ticket->key = key;
	} else {
		key->bytes = bytes;
		key->count = 1;
	}
	insert(budget, key);
	*fresh = NULL;
	return rc;
}

int tnd_budget_charge_key(struct tnd_budget *budget, uint64_t key, uint64_t bytes,
			  const struct tnd_charge_opts *opts)
{
	struct tnd__ticket ticket = {.lack = 0};
	struct tnd__key *fresh, *known;
	bool last = false;
	int rc = tnd__charge_opts_check(opts);

	if (rc < 0)
		return rc;
	fresh = tnd__mem_alloc(sizeof(*fresh));
	if (!fresh)
		return -ENOMEM;
	fresh->key = key;
	tnd__link_init(&fresh->followers);
again:
	pthread_mutex_lock(&budget->lock);
	known = find(budget, key);
	rc = known ? join(budget, known, &ticket, bytes, opts)
		   : begin(budget, &fresh, &ticket, bytes, opts, last);
	pthread_mutex_unlock(&budget->lock);
	if (ticket.lack)
		tnd__budget_reclaim(budget, ticket.lack);
	if (rc == -EAGAIN && ticket.lack && !last) {
		last = true;
		goto again;
	}
	if (rc == TND__QUEUED)
		rc = tnd__budget_wait(budget, &ticket, opts);
	free(fresh);
	return rc;
}

int tnd_budget_refund_key(struct tnd_budget *budget, uint64_t key)
{
	struct tnd__key *known;
	int rc = 0;

	pthread_mutex_lock(&budget->lock);
	known = find(budget, key);
	if (!known || known->leader) {
		rc = -ENOENT;
	} else if (--known->count == 0) {
		uint64_t bytes = known->bytes;

		erase(budget, known);
		tnd__budget_refund_locked(budget, bytes);
	}
	pthread_mutex_unlock(&budget->lock);
	return rc;
}
