/* SPDX-License-Identifier: Apache-2.0 */
/*
 * collective.c - the collectives of a group, each one meeting of all ranks
 *
 *   caller's arguments --> enter: takes the handle, or goes on with the call that is open
 *                          run:   posts (kind, root, bytes, value), waits for the end (meet.c)
 *                          result out of values[], or of the board's data
 *                          leave: gives the handle back
 *
 * Bytes of a broadcast go through the board's two buffers, used in turns: root writes its one before
 * its post, the others read it after the end, and it is not written again before all have posted
 * the collective after that, which they do only when they have read it.
 *
 * The first one, ready, waits before its post until this process will see every other rank die: so
 * none of the later ones can wait for a rank whose death nobody tells.
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "group_internal.h"

static int invalid_root(const struct tnd_group *group, uint32_t root, struct tnd_error *reterr)
{
	return tnd__fail_plain(reterr, TND_E_INVALID,
			       "group '%s': expected a root from 0 to %u, found %u", group->name,
			       group->rank_count - 1, root);
}

/* -- ready -- */

/*
 * Whether rank 0 has told that all are here, or somebody is gone: that ends the first collective,
 * which nobody can have completed, so that all return the same.
 */
static int look_watching(struct tnd_group *group, struct tnd_error *reterr)
{
	/* Pair with the stores in members.c. */
	int rc = atomic_load_explicit(&group->watch_error, memory_order_seq_cst);

	if (rc < 0)
		return tnd__fail_plain(reterr, rc, "group '%s': watching the other ranks: %s",
				       group->name, tnd_strerror(rc));
	if (atomic_load_explicit(&group->watching, memory_order_seq_cst))
		return 1;
	return tnd__meet_look(group, reterr);
}

static int say_missing(struct tnd_group *group, struct tnd_error *reterr)
{
	uint64_t missing = 0;
	char ranks[400];

	for (uint32_t rank = 0; rank < group->rank_count; rank++)
		/* Pairs with set_present(). */
		if (!atomic_load_explicit(&group->board->rows[rank].present, memory_order_acquire))
			missing |= tnd__rank_bit(rank);
	if (!missing)
		return tnd__fail_plain(reterr, -ETIMEDOUT,
				       "group '%s': all %u ranks have attached, but rank 0 did not "
				       "say so before the deadline; is its process stopped?",
				       group->name, group->rank_count);
	return tnd__fail_plain(reterr, -ETIMEDOUT,
			       "group '%s': of %u ranks, %s did not attach before the deadline; "
			       "were they started with the address %s?",
			       group->name, group->rank_count,
			       tnd__ranks_text(missing, ranks, sizeof(ranks)), group->address);
}

int tnd_group_ready(struct tnd_group *group, int64_t deadline_ns, struct tnd_error *reterr)
{
	struct tnd__meet ready = {.kind = TND__MEET_READY};
	int rc = tnd__meet_enter(group, &ready, reterr);

	if (rc < 0)
		return rc;
	if (group->ready)
		return tnd__meet_leave(group, 0);
	if (!group->posted) {
		rc = tnd__meet_wait(group, look_watching, deadline_ns, reterr);
		if (rc == -ETIMEDOUT)
			rc = say_missing(group, reterr);
	}
	if (rc >= 0)
		rc = tnd__meet_run(group, &ready, deadline_ns, reterr);
	if (rc == 0)
		group->ready = true;
	return tnd__meet_leave(group, rc);
}

/* -- the others -- */

int tnd_group_barrier(struct tnd_group *group, int64_t deadline_ns, struct tnd_error *reterr)
{
	struct tnd__meet barrier = {.kind = TND__MEET_BARRIER};
	int rc = tnd__meet_enter(group, &barrier, reterr);

	if (rc < 0)
		return rc;
	return tnd__meet_leave(group, tnd__meet_run(group, &barrier, deadline_ns, reterr));
}

int tnd_group_broadcast(struct tnd_group *group, uint32_t root, void *data, uint64_t bytes,
			int64_t deadline_ns, struct tnd_error *reterr)
{
	struct tnd__meet broadcast = {.kind = TND__MEET_BROADCAST, .root = root, .bytes = bytes};
	unsigned char *shared;
	int rc;

	if (root >= group->rank_count)
		return invalid_root(group, root, reterr);
	if (bytes > TND_GROUP_BYTES_MAX || (bytes && !data))
		return tnd__fail_plain(reterr, TND_E_INVALID,
				       "group '%s': expected 0 to %d bytes, and where they are, "
				       "found %" PRIu64 " bytes at %p",
				       group->name, TND_GROUP_BYTES_MAX, bytes, data);
	rc = tnd__meet_enter(group, &broadcast, reterr);
	if (rc < 0)
		return rc;
	shared = group->board->data[group->number & 1];
	/* Plain bytes: published by G2, read after K1. */
	if (group->rank == root && !group->posted && bytes)
		memcpy(shared, data, bytes);
	rc = tnd__meet_run(group, &broadcast, deadline_ns, reterr);
	if (rc == 0 && group->rank != root && bytes)
		memcpy(data, shared, bytes);
	return tnd__meet_leave(group, rc);
}

int tnd_group_min(struct tnd_group *group, uint64_t value, int64_t deadline_ns, uint64_t *ret_value,
		  uint32_t *ret_rank, struct tnd_error *reterr)
{
	struct tnd__meet min = {.kind = TND__MEET_MIN, .value = value};
	uint32_t least = 0;
	int rc = tnd__meet_enter(group, &min, reterr);

	if (rc < 0)
		return rc;
	rc = tnd__meet_run(group, &min, deadline_ns, reterr);
	if (rc == 0) {
		for (uint32_t rank = 1; rank < group->rank_count; rank++)
			if (group->values[rank] < group->values[least])
				least = rank;
		*ret_value = group->values[least];
		if (ret_rank)
			*ret_rank = least;
	}
	return tnd__meet_leave(group, rc);
}

int tnd_group_and(struct tnd_group *group, uint64_t value, int64_t deadline_ns, uint64_t *ret_value,
		  struct tnd_error *reterr)
{
	struct tnd__meet and = {.kind = TND__MEET_AND, .value = value};
	int rc = tnd__meet_enter(group, &and, reterr);

	if (rc < 0)
		return rc;
	rc = tnd__meet_run(group, &and, deadline_ns, reterr);
	if (rc == 0) {
		*ret_value = UINT64_MAX;
		for (uint32_t rank = 0; rank < group->rank_count; rank++)
			*ret_value &= group->values[rank];
	}
	return tnd__meet_leave(group, rc);
}

int tnd_group_agree(struct tnd_group *group, int code, int64_t deadline_ns,
		    struct tnd_error *reterr)
{
	struct tnd__meet agree = {.kind = TND__MEET_AGREE, .value = (uint64_t)(int64_t)code};
	int rc = tnd__meet_enter(group, &agree, reterr);

	if (rc < 0)
		return rc;
	rc = tnd__meet_run(group, &agree, deadline_ns, reterr);
	if (rc == 0)
		rc = tnd__meet_first_code(group, reterr);
	return tnd__meet_leave(group, rc);
}
