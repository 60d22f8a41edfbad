/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_budget.c - what a plan costs, and the slab size with which it fits
 *
 *   fixed   = metadata (checkpoint's tables, this plan) + bounce buffers + page cache in flight
 *   slab    : charged the plan's slab capacity, whatever it uses, so that buffers can be reused;
 *             the capacity is raised to that of the largest buffer if the budget has room for two
 *   least   = fixed + the most that is alive at once, each view released before the next is taken
 *
 * A default slab size is halved until that fits; a given one is taken as it is.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "plan_internal.h"

#define DEFAULT_SLAB_MAX TND__MIB(256)
#define SLAB_MIN TND__MIB(1)
#define CHUNK_MIN TND__KIB(64)
#define CHUNK_MAX TND__MIB(2)

static uint64_t power_below(uint64_t value)
{
	return value ? UINT64_C(1) << (63 - __builtin_clzll(value)) : 0;
}

static uint64_t own_bytes(const struct tnd_plan *plan)
{
	uint64_t bytes = sizeof(*plan);

	bytes += plan->item_capacity * sizeof(*plan->items);
	bytes += plan->slab_capacity * sizeof(*plan->slabs);
	bytes += plan->image_capacity * sizeof(*plan->images);
	bytes += plan->image_first_capacity * sizeof(*plan->image_first);
	bytes += plan->tensor_count * sizeof(*plan->first_item);
	return bytes;
}

/*
 * The I/O window: reads of chunk_bytes, with a block at each end; fewer of everything in a small
 * budget.
 */
static void fixed_costs(struct tnd_plan *plan)
{
	struct tnd_plan_totals *totals = &plan->totals;
	uint64_t budget = plan->choice.budget_bytes;
	uint64_t chunk = power_below(budget / 64), buffers;

	chunk = TND__MAX(TND__MIN(chunk, CHUNK_MAX), CHUNK_MIN);
	buffers = plan->choice.packing == TND_PACKING_FILE ? 2 : budget >= TND__MIB(64) ? 8 : 4;
	totals->chunk_bytes = chunk;
	totals->bounce_bytes = buffers * (chunk + 2 * TND__PAGE);
	totals->window_bytes = (budget < TND__MIB(16) ? 2 : 4) * chunk;
	totals->metadata_bytes = tnd_checkpoint_memory_bytes(plan->checkpoint) + own_bytes(plan);
	totals->fixed_bytes = totals->metadata_bytes + totals->bounce_bytes + totals->window_bytes;
	totals->budget_bytes = budget;
}

/* The pool's rule: all that fits into the capacity gets a buffer of it. */
static uint64_t charge_of(const struct tnd_plan *plan, const struct tnd_plan_slab *slab)
{
	return TND__MAX(tnd__round_up(slab->bytes, TND__PAGE), plan->totals.slab_capacity_bytes);
}

static uint64_t beside(const struct tnd_plan *plan)
{
	return plan->choice.packing == TND_PACKING_NAME ? plan->totals.slab_capacity_bytes : 0;
}

bool tnd__plan_beyond(const struct tnd_plan *plan, const struct tnd_plan_item *item)
{
	if ((item->flags & (TND_ITEM_F_OVERSIZED | TND_ITEM_F_PIECE)) != TND_ITEM_F_OVERSIZED)
		return false;
	return plan->totals.fixed_bytes + beside(plan) +
		       tnd__round_up(plan->slabs[item->slab].bytes, TND__PAGE) >
	       plan->choice.budget_bytes;
}

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
	fixed_costs(plan);
	return rc;
}

/* The moment when most is alive. */
struct peak {
	uint64_t bytes;
	size_t item;
	uint64_t slab_bytes, item_bytes;
};

static struct peak least(const struct tnd_plan *plan)
{
	struct peak peak = {0};
	size_t open = SIZE_MAX;

	for (size_t i = 0; i < plan->item_count; i++) {
		const struct tnd_plan_item *item = &plan->items[i];
		uint64_t slab_bytes, item_bytes = 0;

		if (item->slab == TND_PLAN_NO_SLAB)
			continue;
		if (open != SIZE_MAX && plan->slabs[open].last_item < i)
			open = SIZE_MAX;
		if (!(item->flags & TND_ITEM_F_OVERSIZED))
			open = item->slab;
		else if (plan->choice.oversize != TND_OVERSIZE_OVERRUN ||
			 !tnd__plan_beyond(plan, item))
			item_bytes = charge_of(plan, &plan->slabs[item->slab]);
		slab_bytes = open == SIZE_MAX ? 0 : plan->totals.slab_capacity_bytes;
		if (slab_bytes + item_bytes > peak.bytes)
			peak = (struct peak){slab_bytes + item_bytes, i, slab_bytes, item_bytes};
	}
	return peak;
}

static struct tnd__where where_of(const struct tnd_plan *plan, size_t item)
{
	const struct tnd_tensor *tensor = plan->items[item].tensor;
	const struct tnd_file *files = tnd_checkpoint_files(plan->checkpoint, &(size_t){0});

	return (struct tnd__where){.file = files[tensor->file].name,
				   .name = tensor->name,
				   .name_bytes = tensor->name_bytes};
}

static int too_small(const struct tnd_plan *plan, const struct peak *peak, struct tnd_error *reterr)
{
	const struct tnd_plan_totals *totals = &plan->totals;
	struct tnd__where where = {0};

	if (peak->item_bytes)
		where = where_of(plan, peak->item);
	return tnd__fail(reterr, TND_E_BUDGET, &where,
			 "expected a budget of at least %" PRIu64 " bytes (%" PRIu64
			 " for tables and reads in flight, %" PRIu64 " for a slab, %" PRIu64
			 " for a tensor larger than a slab), found %" PRIu64 "; raise the budget%s",
			 totals->least_budget_bytes, totals->fixed_bytes, peak->slab_bytes,
			 peak->item_bytes, totals->budget_bytes,
			 peak->item_bytes   ? " or cut large tensors into pieces"
			 : peak->slab_bytes ? " or lower the slab size"
					    : "");
}

/* A tensor for which no slab size helps. */
static int refuse_oversized(const struct tnd_plan *plan, struct tnd_error *reterr)
{
	uint64_t budget = plan->choice.budget_bytes, fixed = plan->totals.fixed_bytes;

	for (size_t i = 0; i < plan->item_count; i++) {
		const struct tnd_plan_item *item = &plan->items[i];
		struct tnd__where where;
		uint64_t bytes;

		if (!(item->flags & TND_ITEM_F_OVERSIZED) || fixed >= budget)
			continue;
		bytes = charge_of(plan, &plan->slabs[item->slab]);
		if (bytes <= budget - fixed)
			continue;
		where = where_of(plan, i);
		return tnd__fail(reterr, TND_E_OVERSIZE, &where,
				 "expected at most %" PRIu64 " bytes beside the %" PRIu64
				 " for tables and reads in flight, found %" PRIu64
				 " in a budget of %" PRIu64
				 "; raise the budget, or choose oversize pieces or overrun",
				 budget - fixed, fixed, item->kept_bytes, budget);
	}
	return 0;
}

/*
 * One size of buffer for all, oversized ones included, where two of it fit: then each is reused for
 * any other, and the load does not pay for fresh memory again and again. Not with a buffer per
 * tensor, whose sizes are far apart.
 */
static void unify_capacity(struct tnd_plan *plan)
{
	uint64_t common = plan->totals.slab_capacity_bytes;

	if (!plan->choice.slab_bytes)
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
		charges += charge_of(plan, &plan->slabs[i]);
		totals->slab_bytes_max = TND__MAX(totals->slab_bytes_max, plan->slabs[i].bytes);
	}
	totals->peak_bytes = TND__MIN(charges, totals->budget_bytes);
	for (size_t i = 0; i < plan->item_count; i++)
		if (tnd__plan_beyond(plan, &plan->items[i]))
			totals->peak_bytes = TND__MAX(
				totals->peak_bytes,
				totals->fixed_bytes +
					charge_of(plan, &plan->slabs[plan->items[i].slab]));
	totals->peak_bytes = TND__MAX(totals->peak_bytes, totals->least_budget_bytes);
}

/* Puts the items back that were cut. */
static void restore(struct tnd_plan *plan, struct tnd_plan_item *whole, size_t count)
{
	if (!whole)
		return;
	free(plan->items);
	plan->items = whole;
	plan->item_count = count;
	plan->item_capacity = count;
}

/*
 * One try with the slab size that is set. Return: 0; TND_E_BUDGET, where a smaller slab may help;
 * other errors. *ret_whole: the items before they were cut, or NULL.
 */
static int try_slab(struct tnd_plan *plan, struct tnd_plan_item **ret_whole, size_t *ret_count,
		    struct tnd_error *reterr)
{
	struct peak peak;
	int rc = pack(plan);

	*ret_whole = NULL;
	if (rc == 0 && plan->choice.oversize == TND_OVERSIZE_REFUSE)
		rc = refuse_oversized(plan, reterr);
	if (rc == 0 && plan->choice.oversize == TND_OVERSIZE_PIECES) {
		rc = tnd__pieces_cut(plan, ret_whole, ret_count, reterr);
		if (rc > 0)
			rc = pack(plan);
	}
	if (rc < 0)
		return rc;
	peak = least(plan);
	plan->totals.least_budget_bytes = plan->totals.fixed_bytes + peak.bytes;
	if (plan->totals.least_budget_bytes > plan->choice.budget_bytes)
		return too_small(plan, &peak, reterr);
	return 0;
}

int tnd__plan_fit(struct tnd_plan *plan, struct tnd_error *reterr)
{
	struct tnd__plan_choice *choice = &plan->choice;
	struct tnd_plan_item *whole = NULL;
	size_t count = 0;
	int rc;

	if (choice->slab_given && choice->slab_bytes > choice->budget_bytes)
		return tnd__fail_plain(reterr, TND_E_BUDGET,
				       "expected a slab size of at most the budget, %" PRIu64
				       " bytes, found %" PRIu64
				       "; lower the slab size or raise the budget",
				       choice->budget_bytes, choice->slab_bytes);
	if (!choice->slab_given)
		choice->slab_bytes =
			TND__MAX(power_below(TND__MIN(DEFAULT_SLAB_MAX, choice->budget_bytes / 4)),
				 SLAB_MIN);
	for (;;) {
		rc = try_slab(plan, &whole, &count, reterr);
		if (rc != TND_E_BUDGET || choice->slab_given || choice->slab_bytes <= SLAB_MIN)
			break;
		restore(plan, whole, count);
		choice->slab_bytes /= 2;
	}
	free(whole);
	if (rc == 0) {
		unify_capacity(plan);
		sum_up(plan);
	}
	return rc;
}
