/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_fit.c - the slab size and the cuts with which a plan fits into its budget
 *
 *   for each slab size, largest first (a given one alone):
 *       pack uncut
 *       what does it need uncut, and (pieces) with all above 2^k bytes cut, largest k first?
 *   taken: the first that fits beside the whole window of reads; else the first that fits beside
 *   the smallest window
 *
 * What each of these needs does not depend on the budget, and a larger budget only adds slab sizes:
 * so no budget is refused where a smaller one is accepted. Nothing is packed to find out what cuts
 * would need: pieces have buffers of their own and leave the other slabs as they are.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan_internal.h"

#define DEFAULT_SLAB_MAX TND__MIB(256)
#define DEFAULT_SHARED_MAX TND__MIB(32) /* see unify_capacity() */
#define SLAB_MIN TND__MIB(1)

struct candidate {
	bool found;
	uint64_t slab_bytes;
	uint64_t cut_above;    /* UINT64_MAX: nothing is cut */
	uint64_t least_budget; /* with this slab size, whatever is cut */
};

struct search {
	struct candidate best, small_window;
	/* What needs least of all that was tried. */
	struct tnd__plan_need least;
	uint64_t least_budget;
};

static int pack(struct tnd_plan *plan)
{
	uint64_t largest = 0;
	int rc;

	plan->slab_count = 0;
	plan->image_count = 0;
	for (size_t i = 0; i < plan->item_count; i++) {
		plan->items[i].slab = TND_PLAN_NO_SLAB;
		plan->items[i].slab_offset = 0;
		plan->items[i].flags &= ~(TND_ITEM_F_OVERSIZED | TND_ITEM_F_REALIGN);
	}
	rc = plan->choice.packing == TND_PACKING_NAME ? tnd__pack_name(plan) : tnd__pack_file(plan);
	for (size_t i = 0; i < plan->slab_count; i++)
		if (!(plan->slabs[i].flags & TND_ITEM_F_OVERSIZED))
			largest = TND__MAX(largest, plan->slabs[i].bytes);
	plan->totals.slab_capacity_bytes = tnd__round_up(largest, TND__PAGE);
	return rc;
}

/* -- the search -- */

/* The first size above which cutting changes anything, or 0. */
static uint64_t first_cut(const struct tnd_plan *plan, uint64_t floor)
{
	uint64_t largest = 0;

	if (plan->choice.oversize != TND_OVERSIZE_PIECES)
		return 0;
	for (size_t i = 0; i < plan->slab_count; i++)
		if (plan->slabs[i].flags & TND_ITEM_F_OVERSIZED)
			largest = TND__MAX(largest, plan->slabs[i].bytes);
	return largest > floor ? tnd__power_below(largest - 1) : 0;
}

/* Least budget of what is left when overrun takes all that does not fit. */
static uint64_t least_of(const struct tnd_plan *plan, const struct tnd__plan_need *need)
{
	uint64_t alive = plan->choice.oversize == TND_OVERSIZE_OVERRUN
				 ? plan->totals.slab_capacity_bytes
				 : need->alive;

	if (plan->choice.slab_given)
		return TND__MAX(need->least_fixed + alive, plan->choice.slab_bytes);
	return need->least_fixed + alive;
}

static void take(struct candidate *candidate, const struct tnd_plan *plan, uint64_t cut_above)
{
	if (candidate->found)
		return;
	candidate->found = true;
	candidate->slab_bytes = plan->choice.slab_bytes;
	candidate->cut_above = cut_above;
}

/* Tries all cuts with the slab size that is packed. */
static void look(struct tnd_plan *plan, struct search *search)
{
	uint64_t budget = plan->choice.budget_bytes, least = UINT64_MAX;
	uint64_t floor = TND__MAX(plan->choice.slab_bytes, SLAB_MIN), cut_above = UINT64_MAX;
	uint64_t next = first_cut(plan, floor);
	bool known = search->small_window.found;

	for (;;) {
		struct tnd__plan_need need = tnd__plan_need(plan, cut_above);
		uint64_t own = least_of(plan, &need);

		least = TND__MIN(least, own);
		if (own < search->least_budget) {
			search->least_budget = own;
			search->least = need;
		}
		tnd__plan_fixed(plan, &need, true);
		if (plan->totals.needed_budget_bytes <= budget)
			take(&search->best, plan, cut_above);
		if (need.least_fixed + need.alive <= budget)
			take(&search->small_window, plan, cut_above);
		/* More pieces take more tables: nothing below can need less than was found. */
		if (next < floor || need.least_fixed >= least)
			break;
		cut_above = next;
		next /= 2;
	}
	if (search->best.found)
		search->best.least_budget = least;
	if (!known && search->small_window.found)
		search->small_window.least_budget = least;
}

/* -- refusals -- */

static struct tnd__where where_of(const struct tnd_plan *plan, size_t item)
{
	const struct tnd_tensor *tensor = plan->items[item].tensor;
	const struct tnd_file *files = tnd_checkpoint_files(plan->checkpoint, &(size_t){0});

	return (struct tnd__where){.file = files[tensor->file].name,
				   .name = tensor->name,
				   .name_bytes = tensor->name_bytes};
}

static const char *less(const struct tnd_plan *plan)
{
	return plan->choice.of_union ? " (less what the members set aside)" : "";
}

static int too_small(const struct tnd_plan *plan, const struct search *search,
		     struct tnd_error *reterr)
{
	const struct tnd__plan_need *need = &search->least;
	uint64_t least = tnd__members_least(plan, search->least_budget);
	struct tnd__where where = {0};
	char aside[96] = "";

	if (plan->choice.of_union)
		snprintf(aside, sizeof(aside), ", %" PRIu64 " for what %zu members set aside",
			 least - search->least_budget, plan->member_count);
	if (need->alive_item)
		where = where_of(plan, need->item);
	return tnd__fail(reterr, TND_E_BUDGET, &where,
			 "expected a budget of at least %" PRIu64 " bytes (%" PRIu64
			 " for tables and reads in flight, %" PRIu64 " for a slab, %" PRIu64
			 " for a tensor larger than a slab%s), found %" PRIu64
			 "; raise the budget%s",
			 least, need->least_fixed, need->alive_slab, need->alive_item, aside,
			 plan->node_budget_bytes,
			 need->alive_item && plan->choice.oversize != TND_OVERSIZE_PIECES
				 ? " or cut large tensors into pieces"
			 : need->alive_slab && plan->choice.slab_given ? " or lower the slab size"
								       : "");
}

/* A slab size that nothing but a slab has room for, whatever the tensors need. */
static int refuse_slab(const struct tnd_plan *plan, const struct search *search,
		       struct tnd_error *reterr)
{
	return tnd__fail_plain(reterr, TND_E_BUDGET,
			       "expected a slab size of at most the budget%s, %" PRIu64
			       " bytes, found %" PRIu64
			       "; lower the slab size, or raise the budget to at least %" PRIu64,
			       less(plan), plan->choice.budget_bytes, plan->choice.slab_bytes,
			       tnd__members_least(plan, search->least_budget));
}

/* A tensor for which no slab size helps. */
static int refuse_oversized(const struct tnd_plan *plan, const struct search *search,
			    struct tnd_error *reterr)
{
	uint64_t budget = plan->choice.budget_bytes, fixed = search->least.least_fixed;

	for (size_t i = 0; i < plan->item_count; i++) {
		const struct tnd_plan_item *item = &plan->items[i];
		struct tnd__where where;

		if (!(item->flags & TND_ITEM_F_OVERSIZED) || fixed >= budget ||
		    tnd__plan_charge(plan, &plan->slabs[item->slab]) <= budget - fixed)
			continue;
		where = where_of(plan, i);
		return tnd__fail(reterr, TND_E_OVERSIZE, &where,
				 "expected at most %" PRIu64 " bytes beside the %" PRIu64
				 " for tables and reads in flight, found %" PRIu64
				 " in a budget of %" PRIu64
				 "%s; raise the budget to at least %" PRIu64
				 ", or choose oversize pieces or overrun",
				 budget - fixed, fixed, item->kept_bytes, budget, less(plan),
				 tnd__members_least(plan, search->least_budget));
	}
	return 0;
}

/* -- what was found -- */

/*
 * One size of buffer for all, oversized ones included, where two of it fit: then each is reused for
 * any other, and the load does not pay for fresh memory again and again. Not with a buffer per
 * tensor, whose sizes are far apart.
 */
static void unify_capacity(struct tnd_plan *plan)
{
	uint64_t common = plan->totals.slab_capacity_bytes;

	/* Slabs of a union are shared ones, which are touched as a whole when they are made. */
	if (!plan->choice.slab_bytes || plan->choice.of_union)
		return;
	for (size_t i = 0; i < plan->slab_count; i++)
		common = TND__MAX(common, tnd__round_up(plan->slabs[i].bytes, TND__PAGE));
	if (common <= (plan->choice.budget_bytes - plan->totals.fixed_bytes) / 2)
		plan->totals.slab_capacity_bytes = common;
}

static void sum_up(struct tnd_plan *plan)
{
	struct tnd_plan_totals *totals = &plan->totals;
	uint64_t charges = totals->fixed_bytes;

	totals->items = plan->item_count;
	totals->buffers = plan->slab_count;
	totals->slab_bytes = plan->choice.slab_bytes;
	totals->slabs = totals->slab_bytes ? plan->slab_count : 0;
	totals->slab_bytes_max = 0;
	for (size_t i = 0; i < plan->slab_count; i++) {
		charges += tnd__plan_charge(plan, &plan->slabs[i]);
		totals->slab_bytes_max = TND__MAX(totals->slab_bytes_max, plan->slabs[i].bytes);
	}
	totals->peak_bytes = TND__MIN(charges, totals->budget_bytes);
	for (size_t i = 0; i < plan->item_count; i++)
		if (tnd__plan_beyond(plan, &plan->items[i]))
			totals->peak_bytes = TND__MAX(
				totals->peak_bytes,
				totals->fixed_bytes +
					tnd__plan_charge(plan, &plan->slabs[plan->items[i].slab]));
	totals->peak_bytes = TND__MAX(totals->peak_bytes, totals->needed_budget_bytes);
}

/* What growing took in advance; if it cannot be had back, it stays. */
static void trim(void *array_pointer, size_t *capacity, size_t count, size_t element_bytes)
{
	void *old, *trimmed;

	if (!count || *capacity == count)
		return;
	memcpy(&old, array_pointer, sizeof(old));
	trimmed = reallocarray(old, count, element_bytes);
	if (!trimmed)
		return;
	memcpy(array_pointer, &trimmed, sizeof(trimmed));
	*capacity = count;
}

static int settle(struct tnd_plan *plan, const struct candidate *found, bool whole_window)
{
	bool packed = plan->choice.slab_bytes == found->slab_bytes;
	struct tnd__plan_need need;
	int rc = 0;

	plan->choice.slab_bytes = found->slab_bytes;
	if (!packed)
		rc = pack(plan);
	if (rc == 0 && found->cut_above != UINT64_MAX) {
		rc = tnd__pieces_cut(plan, found->cut_above);
		if (rc == 0)
			rc = pack(plan);
	}
	if (rc < 0)
		return rc;
	trim(&plan->items, &plan->item_capacity, plan->item_count, sizeof(*plan->items));
	trim(&plan->slabs, &plan->slab_capacity, plan->slab_count, sizeof(*plan->slabs));
	trim(&plan->images, &plan->image_capacity, plan->image_count, sizeof(*plan->images));
	if (plan->image_first)
		trim(&plan->image_first, &plan->image_first_capacity, plan->slab_count + 1,
		     sizeof(*plan->image_first));
	need = tnd__plan_need(plan, UINT64_MAX);
	tnd__plan_fixed(plan, &need, whole_window);
	unify_capacity(plan);
	need = tnd__plan_need(plan, UINT64_MAX);
	plan->totals.needed_budget_bytes = plan->totals.fixed_bytes + need.alive;
	plan->totals.least_budget_bytes = tnd__members_least(plan, found->least_budget);
	sum_up(plan);
	return 0;
}

int tnd__plan_fit(struct tnd_plan *plan, struct tnd_error *reterr)
{
	struct tnd__plan_choice *choice = &plan->choice;
	struct search search = {.least_budget = UINT64_MAX};
	int rc;

	if (!choice->slab_given) {
		uint64_t most = choice->of_union ? DEFAULT_SHARED_MAX : DEFAULT_SLAB_MAX;

		choice->slab_bytes = TND__MAX(
			tnd__power_below(TND__MIN(most, choice->budget_bytes / 4)), SLAB_MIN);
	}
	for (;;) {
		rc = pack(plan);
		if (rc < 0)
			return rc;
		look(plan, &search);
		if (search.best.found || choice->slab_given || choice->slab_bytes <= SLAB_MIN)
			break;
		choice->slab_bytes /= 2;
	}
	if (choice->slab_given && choice->slab_bytes > choice->budget_bytes)
		return refuse_slab(plan, &search, reterr);
	if (search.best.found)
		return settle(plan, &search.best, true);
	if (search.small_window.found)
		return settle(plan, &search.small_window, false);
	if (choice->oversize == TND_OVERSIZE_REFUSE)
		rc = refuse_oversized(plan, &search, reterr);
	return rc < 0 ? rc : too_small(plan, &search, reterr);
}
