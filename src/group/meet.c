/* SPDX-License-Identifier: Apache-2.0 */
/*
 * meet.c - posting, ending and waiting: every collective of a group goes through here
 *
 *   G1 write the post                    H1 sleepers |= bit      (seq_cst)
 *   G2 post.number = n      (seq_cst)    H2 sample word
 *   G3 look at all posts    (seq_cst)    H3 look again: end, posts, death, closed, cancel
 *   G4 ends[n & 1] = n, how (CAS)        H4 futex_wait(word, sample)
 *   G5 word += 1            (seq_cst)    H5 sleepers &= ~bit
 *   G6 load sleepers        (seq_cst)
 *   G7 futex_wake(word)                  death, close, cancel: a flag, then G5, G7 in any case
 *
 * Pairs:
 *   G2 / G3   each stores its post, then loads all of them: in the one order of seq_cst the last
 *             poster sees every post, so somebody ends the collective.
 *   G2 / K1   release and acquire: what was posted, and the bytes of a broadcast.
 *   G4 / K2   the same for the end: who sees it sees all posts.
 *   G4, G6 / H1, H3   store buffering: either the sleeper sees the end, or the waker its bit.
 *   G5 / H2   sampled before the second look, bumped before the wake.
 *
 * The end is a compare-and-swap, so it is one for all: where a rank dies while some have seen all
 * posts and some its death, all return what was written first. For the same reason death and
 * closing are written as ends, too, by whoever sees them.
 *
 * What fails: a rank stopped between G2 and G4, or G4 and G7, keeps the others waiting like any
 * other stopped rank; a deadline, or a death, makes them look themselves.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

#include "group_internal.h"

static const char *const meet_names[TND__MEET_KINDS] = {
	[TND__MEET_NONE] = "nothing",      [TND__MEET_READY] = "ready",
	[TND__MEET_BARRIER] = "barrier",   [TND__MEET_BROADCAST] = "broadcast",
	[TND__MEET_MIN] = "min",           [TND__MEET_AND] = "and",
	[TND__MEET_AGREE] = "agree",       [TND__MEET_FDS] = "share_fds",
	[TND__MEET_FDS_END] = "share_fds",
};

const char *tnd__ranks_text(uint64_t ranks, char *out, size_t out_bytes)
{
	int used = snprintf(out, out_bytes, ranks & (ranks - 1) ? "ranks" : "rank");
	const char *before = " ";

	for (uint32_t rank = 0; rank < TND_GROUP_RANKS_MAX && (size_t)used < out_bytes; rank++) {
		if (!(ranks & tnd__rank_bit(rank)))
			continue;
		used += snprintf(out + used, out_bytes - (size_t)used, "%s%u", before, rank);
		ranks &= ~tnd__rank_bit(rank);
		before = ranks & (ranks - 1) ? ", " : " and ";
	}
	return out;
}

/* -- what ends a call for good -- */

static int say_broken(struct tnd_group *group, struct tnd_error *reterr)
{
	uint32_t rank = group->broken_rank;

	if (group->broken == TND_E_PEER_DEAD)
		return tnd__fail_rank(reterr, group->broken, (int32_t)rank,
				      "group '%s': the process of rank %u died; end the other "
				      "ranks, or make a new group",
				      group->name, rank);
	if (group->broken == TND_E_CLOSED)
		return tnd__fail_rank(reterr, group->broken, (int32_t)rank,
				      "group '%s': rank %u has closed its handle; collectives need "
				      "all %u ranks",
				      group->name, rank, group->rank_count);
	return tnd__fail_rank(reterr, group->broken, (int32_t)rank,
			      "group '%s': the shared memory holds what rank %u cannot have "
			      "written; a process of the group is faulty",
			      group->name, rank);
}

int tnd__meet_break(struct tnd_group *group, int code, uint32_t rank, struct tnd_error *reterr)
{
	group->broken = code;
	group->broken_rank = rank;
	return say_broken(group, reterr);
}

int tnd__meet_cancelled(struct tnd_group *group, struct tnd_error *reterr)
{
	return tnd__fail_plain(reterr, -ECANCELED,
			       "group '%s': cancelled; tnd_group_rearm lets calls wait again",
			       group->name);
}

/* -- posts and ends -- */

static uint64_t previous(uint64_t number)
{
	return number <= 2 ? 0 : number - 2;
}

static const struct tnd__post *post_of(const struct tnd_group *group, uint32_t rank)
{
	return &group->board->rows[rank].posts[group->number & 1];
}

static void post(struct tnd_group *group, const struct tnd__meet *meet)
{
	struct tnd__post *mine = &group->board->rows[group->rank].posts[group->number & 1];

	tnd__failpoint("group.G1");
	/* G1: relaxed; G2 publishes them. */
	atomic_store_explicit(&mine->what, (uint64_t)meet->kind << 32 | meet->root,
			      memory_order_relaxed);
	atomic_store_explicit(&mine->bytes, meet->bytes, memory_order_relaxed);
	atomic_store_explicit(&mine->value, meet->value, memory_order_relaxed);
	tnd__failpoint("group.G2");
	/* G2: pairs with K1 in gather(), and with G3. */
	atomic_store_explicit(&mine->number, group->number, memory_order_seq_cst);
	group->posted = true;
	/* Who waits for descriptors has not posted, but looks whether they will not come. */
	if (meet->kind == TND__MEET_FDS_END && meet->value)
		tnd__group_wake(group);
}

void tnd__group_wake(struct tnd_group *group)
{
	/* G5: pairs with H2. */
	atomic_fetch_add_explicit(&group->board->word, 1, memory_order_seq_cst);
	tnd__futex_wake(&group->board->word, INT32_MAX);
}

/* The end of the open collective: ours, or what was there before. */
static uint64_t end(struct tnd_group *group, uint32_t how, uint32_t rank)
{
	_Atomic uint64_t *word = &group->board->ends[group->number & 1];
	uint64_t mine = tnd__end_make(group->number, rank, how);
	uint64_t seen = atomic_load_explicit(word, memory_order_seq_cst);

	tnd__failpoint("group.G4");
	/* G4: pairs with K2 and H3. */
	if (tnd__end_number(seen) != previous(group->number) ||
	    !atomic_compare_exchange_strong_explicit(word, &seen, mine, memory_order_seq_cst,
						     memory_order_seq_cst))
		return seen;
	tnd__failpoint("group.G5");
	/* G5: pairs with H2. */
	atomic_fetch_add_explicit(&group->board->word, 1, memory_order_seq_cst);
	tnd__failpoint("group.G6");
	/* G6: pairs with H1. */
	if (atomic_load_explicit(&group->board->sleepers, memory_order_seq_cst)) {
		tnd__failpoint("group.G7");
		tnd__futex_wake(&group->board->word, INT32_MAX);
	}
	return mine;
}

/* G3. Return: 0, TND_E_CORRUPT with the rank in *ret_late's lowest bit. */
static int missing(const struct tnd_group *group, uint64_t *ret_late)
{
	uint64_t late = 0, number;

	for (uint32_t rank = 0; rank < group->rank_count; rank++) {
		number = atomic_load_explicit(&post_of(group, rank)->number, memory_order_seq_cst);
		if (number == group->number)
			continue;
		if (number != previous(group->number)) {
			*ret_late = tnd__rank_bit(rank);
			return TND_E_CORRUPT;
		}
		late |= tnd__rank_bit(rank);
	}
	*ret_late = late;
	return 0;
}

/* Pairs with L1 in tnd_group_close(), and with mark_gone(). */
static uint64_t left_of(const struct tnd_group *group, uint64_t ranks)
{
	uint64_t left = atomic_load_explicit(&group->left, memory_order_seq_cst);

	for (uint32_t rank = 0; rank < group->rank_count; rank++)
		if (atomic_load_explicit(&group->board->rows[rank].left, memory_order_seq_cst))
			left |= tnd__rank_bit(rank);
	return left & ranks;
}

static uint32_t lowest(uint64_t ranks)
{
	return (uint32_t)__builtin_ctzll(ranks);
}

int tnd__meet_look(struct tnd_group *group, struct tnd_error *reterr)
{
	uint64_t dead, late, left;
	/* K2: pairs with G4 in end(). */
	uint64_t seen =
		atomic_load_explicit(&group->board->ends[group->number & 1], memory_order_seq_cst);

	if (tnd__end_number(seen) == group->number)
		return 1;
	if (tnd__end_number(seen) != previous(group->number))
		return tnd__meet_break(group, TND_E_CORRUPT, 0, reterr);
	/* Pairs with mark_gone(). */
	dead = atomic_load_explicit(&group->dead, memory_order_seq_cst);
	if (dead) {
		end(group, TND__END_DEAD, lowest(dead));
		return 1;
	}
	tnd__failpoint("group.G3");
	if (missing(group, &late) < 0)
		return tnd__meet_break(group, TND_E_CORRUPT, lowest(late), reterr);
	left = left_of(group, late);
	if (!late || left) {
		end(group, left ? TND__END_LEFT : TND__END_DONE, left ? lowest(left) : 0);
		return 1;
	}
	/* Pairs with tnd_group_cancel(). */
	if (atomic_load_explicit(&group->cancelled, memory_order_seq_cst))
		return tnd__meet_cancelled(group, reterr);
	return 0;
}

/* -- waiting -- */

static int spin(struct tnd_group *group,
		int (*look)(struct tnd_group *group, struct tnd_error *reterr), int64_t until_ns,
		struct tnd_error *reterr)
{
	const _Atomic uint64_t *word = &group->board->ends[group->number & 1];
	/* relaxed, both: whether to look; `look` loads again, as K2. */
	uint64_t seen = atomic_load_explicit(word, memory_order_relaxed);

	while (atomic_load_explicit(word, memory_order_relaxed) == seen) {
		for (int i = 0; i < 8; i++)
			tnd__spin_pause(word, seen);
		if (tnd__now_ns() >= until_ns)
			break;
	}
	return look(group, reterr);
}

static int sleep_once(struct tnd_group *group,
		      int (*look)(struct tnd_group *group, struct tnd_error *reterr),
		      int64_t deadline_ns, struct tnd_error *reterr)
{
	struct tnd__board *board = group->board;
	uint64_t bit = tnd__rank_bit(group->rank);
	uint32_t sample;
	int rc;

	tnd__failpoint("group.H1");
	/* H1: pairs with G6 in end(). */
	atomic_fetch_or_explicit(&board->sleepers, bit, memory_order_seq_cst);
	tnd__failpoint("group.H2");
	/* H2: pairs with G5. */
	sample = atomic_load_explicit(&board->word, memory_order_seq_cst);
	tnd__failpoint("group.H3");
	rc = look(group, reterr);
	if (rc == 0) {
		tnd__failpoint("group.H4");
		tnd__futex_wait(&board->word, sample, deadline_ns);
	}
	tnd__failpoint("group.H5");
	/* H5: a bit that stays costs one needless wake. */
	atomic_fetch_and_explicit(&board->sleepers, ~bit, memory_order_seq_cst);
	return rc;
}

int tnd__meet_wait(struct tnd_group *group,
		   int (*look)(struct tnd_group *group, struct tnd_error *reterr),
		   int64_t deadline_ns, struct tnd_error *reterr)
{
	int rc = look(group, reterr);
	int64_t started_ns, until_ns;

	if (rc != 0)
		return rc;
	if (deadline_ns <= 0)
		return -ETIMEDOUT;
	started_ns = tnd__now_ns();
	until_ns = started_ns + tnd__spin_budget(&group->spin);
	rc = spin(group, look, TND__MIN(until_ns, deadline_ns), reterr);
	while (rc == 0 && tnd__now_ns() < deadline_ns)
		rc = sleep_once(group, look, deadline_ns, reterr);
	tnd__spin_learn(&group->spin, tnd__now_ns() - started_ns);
	/* Once more: what came with the deadline counts, and so does whom nobody woke. */
	if (rc == 0)
		rc = look(group, reterr);
	return rc == 0 ? -ETIMEDOUT : rc;
}

/* -- a whole collective -- */

static int say_late(struct tnd_group *group, const struct tnd__meet *meet, struct tnd_error *reterr)
{
	const char *name = meet_names[meet->kind];
	uint64_t late;
	char ranks[400];
	int rc = missing(group, &late);

	if (rc < 0)
		return tnd__meet_break(group, rc, lowest(late), reterr);
	if (!late)
		return tnd__fail_plain(reterr, -ETIMEDOUT,
				       "group '%s': %s, collective %" PRIu64 ": the last of %u "
				       "ranks came as the deadline passed; calling again gives the "
				       "result",
				       group->name, name, group->number, group->rank_count);
	return tnd__fail_plain(reterr, -ETIMEDOUT,
			       "group '%s': %s, collective %" PRIu64 ": of %u ranks, %s did not "
			       "come before the deadline; calling again goes on waiting",
			       group->name, name, group->number, group->rank_count,
			       tnd__ranks_text(late, ranks, sizeof(ranks)));
}

static void what_text(uint64_t what, uint64_t bytes, char *out, size_t out_bytes)
{
	uint32_t kind = (uint32_t)(what >> 32), root = (uint32_t)what;

	if (kind == TND__MEET_BROADCAST)
		snprintf(out, out_bytes, "broadcast of %" PRIu64 " bytes from rank %u", bytes,
			 root);
	else if (kind == TND__MEET_FDS || kind == TND__MEET_FDS_END)
		snprintf(out, out_bytes, "share_fds of %" PRIu64 " descriptors from rank %u", bytes,
			 root);
	else
		snprintf(out, out_bytes, "%s", kind < TND__MEET_KINDS ? meet_names[kind] : "?");
}

/* All have posted: takes what they gave, if it is the same collective for all. */
static int gather(struct tnd_group *group, struct tnd_error *reterr)
{
	uint64_t first_what = 0, first_bytes = 0;

	for (uint32_t rank = 0; rank < group->rank_count; rank++) {
		const struct tnd__post *post = post_of(group, rank);
		uint64_t what, bytes;
		char ours[80], theirs[80];

		/* K1: pairs with G2 in post(). */
		if (atomic_load_explicit(&post->number, memory_order_acquire) != group->number)
			return tnd__meet_break(group, TND_E_CORRUPT, rank, reterr);
		what = atomic_load_explicit(&post->what, memory_order_relaxed);
		bytes = atomic_load_explicit(&post->bytes, memory_order_relaxed);
		group->values[rank] = atomic_load_explicit(&post->value, memory_order_relaxed);
		if (rank == 0) {
			first_what = what;
			first_bytes = bytes;
		}
		if (what == first_what && bytes == first_bytes)
			continue;
		what_text(first_what, first_bytes, ours, sizeof(ours));
		what_text(what, bytes, theirs, sizeof(theirs));
		return tnd__fail_rank(reterr, TND_E_ORDER, (int32_t)rank,
				      "group '%s', collective %" PRIu64 ": rank 0 called %s, rank "
				      "%u called %s; all ranks have to call the same ones in the "
				      "same order",
				      group->name, group->number, ours, rank, theirs);
	}
	return 0;
}

static int conclude(struct tnd_group *group, struct tnd_error *reterr)
{
	/* K2: pairs with G4 in end(). */
	uint64_t seen =
		atomic_load_explicit(&group->board->ends[group->number & 1], memory_order_seq_cst);
	uint32_t rank = tnd__end_rank(seen), how = tnd__end_how(seen);
	int rc;

	if (tnd__end_number(seen) != group->number || rank >= group->rank_count)
		return tnd__meet_break(group, TND_E_CORRUPT, 0, reterr);
	if (how == TND__END_DEAD || how == TND__END_LEFT)
		return tnd__meet_break(group, how == TND__END_DEAD ? TND_E_PEER_DEAD : TND_E_CLOSED,
				       rank, reterr);
	if (how != TND__END_DONE)
		return tnd__meet_break(group, TND_E_CORRUPT, 0, reterr);
	rc = gather(group, reterr);
	if (rc == TND_E_CORRUPT)
		return rc;
	group->number++;
	return rc;
}

int tnd__meet_run(struct tnd_group *group, const struct tnd__meet *meet, int64_t deadline_ns,
		  struct tnd_error *reterr)
{
	int rc;

	if (!group->posted)
		post(group, meet);
	rc = tnd__meet_wait(group, tnd__meet_look, deadline_ns, reterr);
	if (rc == -ETIMEDOUT)
		return say_late(group, meet, reterr);
	if (rc < 0)
		return rc;
	rc = conclude(group, reterr);
	group->posted = false;
	return rc;
}

int tnd__meet_first_code(struct tnd_group *group, struct tnd_error *reterr)
{
	for (uint32_t rank = 0; rank < group->rank_count; rank++) {
		int64_t value = (int64_t)group->values[rank];

		if (value == 0)
			continue;
		if (value != (int32_t)value)
			return tnd__meet_break(group, TND_E_CORRUPT, rank, reterr);
		return tnd__fail_rank(reterr, (int)value, (int32_t)rank,
				      "group '%s': rank %u cannot: %s", group->name, rank,
				      tnd_strerror((int)value));
	}
	return 0;
}

/* -- entering and leaving -- */

static bool same(const struct tnd__meet *a, const struct tnd__meet *b)
{
	return a->kind == b->kind && a->root == b->root && a->bytes == b->bytes &&
	       a->value == b->value;
}

static int may_go(struct tnd_group *group, const struct tnd__meet *meet, struct tnd_error *reterr)
{
	if (group->broken)
		return say_broken(group, reterr);
	if (atomic_load_explicit(&group->cancelled, memory_order_seq_cst))
		return tnd__meet_cancelled(group, reterr);
	if (group->open.kind != TND__MEET_NONE && !same(&group->open, meet))
		return tnd__fail_plain(reterr, TND_E_INVALID,
				       "group '%s': %s was called while a %s has not ended; call "
				       "that again, with the same arguments, until it has",
				       group->name, meet_names[meet->kind],
				       meet_names[group->open.kind]);
	if (!group->ready && meet->kind != TND__MEET_READY)
		return tnd__fail_plain(reterr, TND_E_INVALID,
				       "group '%s': %s was called before tnd_group_ready returned "
				       "0; call that first",
				       group->name, meet_names[meet->kind]);
	return 0;
}

int tnd__meet_enter(struct tnd_group *group, const struct tnd__meet *meet, struct tnd_error *reterr)
{
	int rc;

	if (tnd__group_forked(group))
		return tnd__fail_plain(reterr, TND_E_FORKED,
				       "group '%s': the handle was made before a fork and belongs "
				       "to the parent; attach in the child as a rank of its own",
				       group->name);
	/* Pairs with the store in tnd__meet_leave(). */
	if (atomic_exchange_explicit(&group->busy, 1, memory_order_acquire))
		return tnd__fail_plain(reterr, -EBUSY,
				       "group '%s': another thread is in a collective of this "
				       "handle; one may be at a time",
				       group->name);
	rc = may_go(group, meet, reterr);
	if (rc < 0) {
		atomic_store_explicit(&group->busy, 0, memory_order_release);
		return rc;
	}
	group->open = *meet;
	return 0;
}

int tnd__meet_leave(struct tnd_group *group, int rc)
{
	/* What timed out or was cancelled has its post out, or its phase. */
	if (!group->posted && !group->phase)
		group->open.kind = TND__MEET_NONE;
	/* Pairs with the exchange in tnd__meet_enter(). */
	atomic_store_explicit(&group->busy, 0, memory_order_release);
	return rc;
}
