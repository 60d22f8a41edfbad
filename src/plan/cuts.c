/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuts.c - large items of a union, cut where no member minds
 *
 *   tensor   |-------- rank 0 -------|-------- rank 1 -------|---- ...     kept by each as one run
 *   items    [----------------------][----------------------][---- ...
 *
 * A slab that holds a whole tensor for eight ranks is large, and large slabs are dear: their memory
 * is touched for the first time while nothing is read. What a member keeps as one run must stay
 * together, so that it can be used where it is, unless it is larger than a slab and its consumer
 * takes pieces; what is gathered anyway may come in any number of parts. Cuts are made at 4 KiB of
 * the file where there is a choice: no block is read twice.
 *
 * A larger budget suggests larger parts. Where it has no room for these, smaller ones are tried, so
 * that no budget is refused where a smaller one is accepted.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "plan_internal.h"

#define CUT_BYTES TND__MIB(32)
#define CUT_MIN TND__MIB(1)

/* Bytes of the file that one member keeps as one run. */
struct solid {
	uint64_t begin, end;
};

struct cuts {
	struct tnd_plan *plan;
	struct tnd__slicer *slicer;
	uint64_t limit;
	struct solid *solids; /* one a member at most */
	size_t solid_count;
	struct tnd_plan_item *items;
	size_t count, capacity;
};

static void find_solids(struct cuts *cuts, const struct tnd_plan_item *item)
{
	const struct tnd_plan *plan = cuts->plan;
	uint32_t index = (uint32_t)(item->tensor - cuts->slicer->tensors);
	struct tnd_plan_item slice;

	cuts->solid_count = 0;
	cuts->slicer->quiet = true;
	for (size_t i = 0; i < plan->member_count; i++) {
		struct solid *solid = &cuts->solids[cuts->solid_count];

		tnd__slicer_rank(cuts->slicer, plan->members[i].rank);
		if (!tnd__experts_keeps(cuts->slicer, index))
			continue;
		tnd__shape_item(cuts->slicer, index, &slice);
		if (!slice.kept_bytes || tnd__plan_gathers(plan, &slice) ||
		    !tnd__plan_one_run(&slice, &solid->begin, &solid->end))
			continue;
		/* Who takes pieces takes them of this, too. */
		if (solid->end - solid->begin <= cuts->limit ||
		    plan->choice.oversize != TND_OVERSIZE_PIECES)
			cuts->solid_count++;
	}
}

/* The last place up to `at` and above `from` that is in no solid, else the first one behind. */
static uint64_t place_for(const struct cuts *cuts, uint64_t from, uint64_t at)
{
	uint64_t place = tnd__round_down(at, TND__PAGE);
	bool down = true;

	if (place <= from)
		place = at;
	for (size_t i = 0; i < cuts->solid_count; i++) {
		const struct solid *solid = &cuts->solids[i];

		if (solid->begin >= place || solid->end <= place)
			continue;
		if (down && solid->begin > from) {
			place = solid->begin;
		} else {
			down = false;
			place = solid->end;
		}
		i = SIZE_MAX; /* from the start: another one may be in the way there */
	}
	return place;
}

static int emit(struct cuts *cuts, const struct tnd_plan_item *item)
{
	int rc = tnd__plan_reserve(&cuts->items, &cuts->capacity, cuts->count + 1,
				   sizeof(*cuts->items));

	if (rc == 0)
		cuts->items[cuts->count++] = *item;
	return rc;
}

/* An item of one run, in as many as it takes. */
static int cut(struct cuts *cuts, const struct tnd_plan_item *item)
{
	uint64_t begin = item->file_offset + item->part_begin[0];
	uint64_t end = begin + item->part_bytes[0], at = begin;
	int rc = 0;

	find_solids(cuts, item);
	while (rc == 0 && at < end) {
		struct tnd_plan_item part = *item;
		uint64_t to = end;

		if (end - at > cuts->limit)
			to = TND__MIN(place_for(cuts, at, at + cuts->limit), end);
		part.part_begin[0] = at - item->file_offset;
		part.part_bytes[0] = to - at;
		part.piece_offset = at - begin;
		tnd__shape_sum(&part);
		rc = emit(cuts, &part);
		at = to;
	}
	return rc;
}

static uint64_t limit_of(const struct tnd_plan *plan)
{
	uint64_t slab = plan->choice.slab_given ? plan->choice.slab_bytes
						: tnd__power_below(plan->choice.budget_bytes / 4);

	return TND__MIN(CUT_BYTES, TND__MAX(slab, CUT_MIN));
}

static bool is_large(const struct tnd_plan_item *item, uint64_t limit)
{
	return item->kept_bytes > limit && item->row_count == 1 && item->part_count == 1;
}

/* Gives the plan the items `whole`, the large ones cut. */
static int cut_all(struct cuts *cuts, const struct tnd_plan_item *whole, size_t count)
{
	struct tnd_plan *plan = cuts->plan;
	int rc = 0;

	cuts->items = NULL;
	cuts->count = cuts->capacity = 0;
	for (size_t i = 0; rc == 0 && i < count; i++)
		rc = is_large(&whole[i], cuts->limit) ? cut(cuts, &whole[i])
						      : emit(cuts, &whole[i]);
	if (rc < 0) {
		free(cuts->items);
		return rc;
	}
	free(plan->items);
	plan->items = cuts->items;
	plan->item_count = cuts->count;
	plan->item_capacity = cuts->capacity;
	return 0;
}

/* Fits the plan, with the largest parts with which it can be. */
static int fit_cut(struct cuts *cuts, struct tnd_error *reterr)
{
	struct tnd_plan *plan = cuts->plan;
	struct tnd_plan_item *whole = plan->items;
	size_t count = plan->item_count;
	int rc;

	plan->items = NULL;
	for (;; cuts->limit /= 2) {
		bool last = plan->choice.slab_given || cuts->limit <= CUT_MIN;

		rc = cut_all(cuts, whole, count);
		if (rc == 0)
			rc = tnd__plan_fit(plan, last ? reterr : NULL);
		if (last || (rc != TND_E_BUDGET && rc != TND_E_OVERSIZE))
			break;
	}
	free(whole);
	return rc;
}

int tnd__union_fit(struct tnd_plan *plan, struct tnd__slicer *slicer, struct tnd_error *reterr)
{
	struct cuts cuts = {.plan = plan, .slicer = slicer, .limit = limit_of(plan)};
	bool any = false;
	int rc;

	for (size_t i = 0; !any && i < plan->item_count; i++)
		any = is_large(&plan->items[i], CUT_MIN);
	/* With no slab size a buffer for each tensor was asked for. */
	if (!any || (plan->choice.slab_given && !plan->choice.slab_bytes))
		return tnd__plan_fit(plan, reterr);
	cuts.solids = tnd__plan_alloc(plan->member_count, sizeof(*cuts.solids));
	if (!cuts.solids)
		return -ENOMEM;
	rc = fit_cut(&cuts, reterr);
	free(cuts.solids);
	return rc;
}
