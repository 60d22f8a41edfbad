/* SPDX-License-Identifier: Apache-2.0 */
/*
 * patience.c - whom a node's reader waits for, and for how long
 *
 * Whatever the feeder waits for on the channel it waits for in slices of TND__SLICE_NS, and looks
 * around after each: cancelled? deadline? who keeps the oldest slab?
 *
 *   reads in flight          nobody is to blame: they cost nothing yet
 *   only guests are late     let go at once; also where only the ring is full, or the end unread
 *   members are late         the slice is put down to each of them
 *     one of them alone      let go after evict_ns
 *     all slabs, stall_ns    the load fails
 *   one has not come         given up after meet_ns
 *
 * As on_dead says, the load ends for all with a member that dies, is let go or given up, or goes on
 * without it. All of this is the feeder's; what other threads look at is under the flow's lock.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

#include "channel/bulk.h"
#include "outlet.h"

/* -- what is known of the members -- */

static struct tnd__held *held_of(struct tnd__outlet *outlet, uint32_t rank)
{
	for (size_t i = 0; i < outlet->member_count; i++)
		if (outlet->held[i].rank == rank)
			return &outlet->held[i];
	return NULL;
}

/* A member is gone, or let go. Return: 0: goes on without it; < 0: the load has failed. */
static int lose(struct tnd__outlet *outlet, const struct tnd_error *error)
{
	struct tnd__held *member = held_of(outlet, (uint32_t)error->rank);

	if (member && outlet->on_dead == TND_SHARE_DEAD_FAIL) {
		tnd__load_fail_detail(outlet->load, error);
		return error->code;
	}
	tnd_channel_evict(outlet->channel, (uint32_t)error->rank);
	if (member && !member->lost) {
		member->lost = true;
		tnd__log(TND_LOG_WARNING, "the load goes on without rank %u: %s", member->rank,
			 error->message);
	}
	return 0;
}

/* A member's death, as somebody who runs a load wants to read it. Return: as lose(). */
static int lose_dead(struct tnd__outlet *outlet, int32_t rank)
{
	struct tnd_error error;

	tnd__fail_rank(&error, TND_E_PEER_DEAD, rank,
		       "expected rank %" PRId32
		       " to take all that it needs, found that its process "
		       "died or its load failed; see what it said, or let the others go on without "
		       "it (TND_SHARE_DEAD_CONTINUE)",
		       rank);
	return lose(outlet, &error);
}

/* -- patience -- */

struct waiting {
	int64_t since, told; /* told: when the log was last written */
	int64_t slice;       /* when this slice began */
	int64_t alone_since; /* since when `alone` is the only one that is late */
	uint32_t alone;
};

static bool reading(struct tnd_load *load)
{
	bool any;

	pthread_mutex_lock(&load->flow->lock);
	any = load->flow->in_flight != 0;
	pthread_mutex_unlock(&load->flow->lock);
	return any;
}

/* "2, 5": as many as fit. */
static const char *list_ranks(const uint32_t *ranks, size_t count, char *out, size_t out_bytes)
{
	size_t used = 0;

	out[0] = '\0';
	for (size_t i = 0; i < count && used + 16 < out_bytes; i++)
		used += (size_t)snprintf(out + used, out_bytes - used, "%s%u", i ? ", " : "",
					 ranks[i]);
	return out;
}

static int give_up_missing(struct tnd__outlet *outlet, const struct tnd__bulk_figures *figures)
{
	struct tnd_error error;
	int rc = 0;

	for (uint32_t i = 0; rc == 0 && i < figures->missing_count; i++) {
		tnd__fail_rank(&error, TND_E_DEADLINE, (int32_t)figures->missing[i],
			       "rank %u was expected to join the load within %.0f s, found that it "
			       "has not come; start it, or leave it out of the members",
			       figures->missing[i], (double)outlet->meet_ns / 1e9);
		rc = lose(outlet, &error);
	}
	return rc;
}

/* Guests go at once where nobody else is waited for. */
static void let_guests_go(struct tnd__outlet *outlet, const struct tnd__bulk_figures *figures)
{
	/* All slabs are free: it is the ring that is full, or the end that was not read. */
	bool slabs = figures->late_count != 0;
	const uint32_t *ranks = slabs ? figures->late : figures->behind;
	uint32_t count = slabs ? figures->late_count : figures->behind_count;

	for (uint32_t i = 0; i < count; i++)
		if (held_of(outlet, ranks[i]))
			return;
	for (uint32_t i = 0; i < count && !figures->missing_count; i++) {
		tnd_channel_evict(outlet->channel, ranks[i]);
		outlet->guests_let_go++;
	}
}

/* A member that alone keeps the others waiting is let go after evict_ns. */
static int let_go(struct tnd__outlet *outlet, const struct tnd__bulk_figures *figures,
		  struct waiting *waiting, int64_t now)
{
	struct tnd_error error;
	uint32_t rank;

	let_guests_go(outlet, figures);
	rank = figures->late_count == 1 ? figures->late[0] : TND_RANK_NONE;
	if (rank != waiting->alone) {
		waiting->alone = rank;
		waiting->alone_since = now;
	}
	if (rank == TND_RANK_NONE || !outlet->evict_ns || !held_of(outlet, rank) ||
	    now - waiting->alone_since < outlet->evict_ns)
		return 0;
	tnd__fail_rank(&error, TND_E_EVICTED, (int32_t)rank,
		       "rank %u was expected to take what was read, found that it alone has kept "
		       "the others waiting for %.1f s",
		       rank, (double)(now - waiting->alone_since) / 1e9);
	return lose(outlet, &error);
}

/* Nobody of ours has what is waited for: the account has no room for it. */
static int check_budget(struct tnd__outlet *outlet, int64_t waited_ns)
{
	struct tnd_budget_stats budget = {.struct_bytes = sizeof(budget)};

	if (outlet->stall_ns < 0 || waited_ns < outlet->stall_ns)
		return 0;
	tnd_budget_stats(outlet->load->budget, &budget);
	tnd__load_fail(outlet->load, TND_E_BUDGET, NULL,
		       "no progress for %.1f s: expected room for another slab in the budget of "
		       "%" PRIu64 " bytes, found %" PRIu64 " charged; give a larger budget, or see "
		       "who else uses this one",
		       (double)waited_ns / 1e9, budget.bound_bytes, budget.charged_bytes);
	return TND_E_BUDGET;
}

/* Nobody may keep every slab for ever. Also tells the log now and then. */
static int check_stall(struct tnd__outlet *outlet, const struct tnd__bulk_figures *figures,
		       struct waiting *waiting, int64_t now)
{
	int64_t waited = now - waiting->since;
	char ranks[256];

	if (!figures->late_count && !figures->missing_count)
		return figures->behind_count ? 0 : check_budget(outlet, waited);
	if (figures->late_count)
		list_ranks(figures->late, figures->late_count, ranks, sizeof(ranks));
	else
		list_ranks(figures->missing, figures->missing_count, ranks, sizeof(ranks));
	if (now - waiting->told > TND__STALL_LOG_NS) {
		waiting->told = now;
		tnd__log(TND_LOG_WARNING, "the reading has waited %.0f s for rank %s%s",
			 (double)waited / 1e9, ranks,
			 figures->late_count ? "" : ", which has not come");
	}
	if (!figures->late_count || outlet->stall_ns < 0 || waited < outlet->stall_ns)
		return 0;
	tnd__load_fail_rank(outlet->load, TND_E_DEADLINE, (int32_t)figures->late[0],
			    "no progress for %.1f s: rank %s keeps every slab that there is room "
			    "for; see what holds it up (stopped, or views that it keeps)",
			    (double)waited / 1e9, ranks);
	return TND_E_DEADLINE;
}

/* At the deadline with nothing left to read: who is not through. Return: as tnd__outlet_check(). */
static int check_deadline(struct tnd__outlet *outlet, const struct tnd__bulk_figures *figures)
{
	struct tnd_load *load = outlet->load;
	bool late = figures->late_count != 0;
	const uint32_t *who = late ? figures->late : figures->missing;
	size_t count = late ? figures->late_count : figures->missing_count;
	char ranks[256];

	if (count && load->opts.deadline_ns && tnd__now_ns() > load->opts.deadline_ns &&
	    !reading(load))
		tnd__load_fail_rank(load, TND_E_DEADLINE, (int32_t)who[0],
				    "the deadline passed while rank %s %s; see what holds it up, "
				    "or allow more time",
				    list_ranks(who, count, ranks, sizeof(ranks)),
				    late ? "kept what was read for it" : "had not come");
	return tnd__outlet_check(outlet);
}

static void blame(struct tnd__outlet *outlet, const struct tnd__bulk_figures *figures, int64_t ns)
{
	struct tnd_load *load = outlet->load;

	pthread_mutex_lock(&load->flow->lock);
	for (uint32_t i = 0; i < figures->late_count; i++) {
		struct tnd__held *member = held_of(outlet, figures->late[i]);

		if (member)
			member->ns += (uint64_t)ns;
	}
	for (uint32_t i = 0; !figures->late_count && i < figures->missing_count; i++) {
		struct tnd__held *member = held_of(outlet, figures->missing[i]);

		if (member)
			member->ns += (uint64_t)ns;
	}
	load->stats.budget_wait_ns += (uint64_t)ns;
	load->stats.consumer_wait_ns += (uint64_t)ns;
	pthread_mutex_unlock(&load->flow->lock);
}

/* After a slice in which nothing came. Return: 0: go on; < 0: the load has failed or was ended. */
static int look_around(struct tnd__outlet *outlet, struct waiting *waiting)
{
	struct tnd_load *load = outlet->load;
	struct tnd__bulk_figures figures;
	int64_t now = tnd__now_ns(), slice = now - waiting->slice;
	int rc;

	waiting->slice = now;
	tnd__bulk_figures(outlet->channel, &figures);
	rc = check_deadline(outlet, &figures);
	if (rc < 0)
		return rc;
	if (figures.missing_count && outlet->meet_ns >= 0 &&
	    now - load->opened_ns > outlet->meet_ns)
		rc = give_up_missing(outlet, &figures);
	if (rc == 0 && !reading(load)) {
		blame(outlet, &figures, slice);
		rc = let_go(outlet, &figures, waiting, now);
		if (rc == 0)
			rc = check_stall(outlet, &figures, waiting, now);
	} else {
		waiting->since = waiting->told = now;
	}
	return rc;
}

int tnd__outlet_check(struct tnd__outlet *outlet)
{
	struct tnd_load *load = outlet->load;
	int rc;

	if (atomic_load_explicit(&load->cancelled, memory_order_relaxed))
		tnd__load_fail(load, TND_E_CANCELLED, NULL, "the reading was cancelled");
	else if (load->opts.deadline_ns && tnd__now_ns() > load->opts.deadline_ns)
		tnd__load_fail(load, TND_E_DEADLINE, NULL,
			       "the deadline passed before everything was read and taken; allow "
			       "more time");
	rc = tnd__load_error(load, NULL);
	if (rc == 0 && atomic_load_explicit(&load->stopping, memory_order_relaxed))
		rc = TND_E_CANCELLED;
	return rc;
}

int tnd__outlet_patiently(struct tnd__outlet *outlet, tnd__attempt_fn attempt, void *arg)
{
	struct waiting waiting = {.alone = TND_RANK_NONE};
	struct tnd_error error = {.rank = -1};
	int rc = tnd__outlet_check(outlet);

	waiting.since = waiting.told = waiting.slice = tnd__now_ns();
	while (rc == 0) {
		rc = attempt(outlet, arg, tnd__now_ns() + TND__SLICE_NS, &error);
		if (rc == 0)
			return 0;
		if (rc == -ETIMEDOUT) {
			rc = look_around(outlet, &waiting);
		} else if (rc == TND_E_PEER_DEAD && error.rank >= 0) {
			rc = lose_dead(outlet, error.rank);
		} else {
			tnd__load_fail_detail(outlet->load, &error);
		}
	}
	return rc;
}
