/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_budget.c - what a plan costs
 *
 *   fixed   = metadata (checkpoint's tables, this plan) + bounce buffers + page cache in flight
 *   slab    : charged the plan's slab capacity, whatever it uses, so that buffers can be reused
 *   needed  = fixed + the most that is alive at once, each view released before the next is taken
 *
 * The reads in flight are a window of a size that the budget suggests; a plan is valid with any
 * smaller one. So what is least needed counts the smallest window, which does not depend on the
 * budget: where a budget is enough, every larger one is.
 *
 * Metadata is counted by what is used of the arrays, not by what was allocated while slab sizes
 * were tried: tnd__plan_fit() gives the rest back.
 */
#include "plan_internal.h"

#define CHUNK_MIN TND__KIB(64)
#define CHUNK_MAX TND__MIB(2)

static uint64_t metadata_bytes(const struct tnd_plan *plan, const struct tnd__plan_need *need)
{
	uint64_t bytes = tnd_checkpoint_memory_bytes(plan->checkpoint) + sizeof(*plan) +
			 plan->member_count * sizeof(*plan->members);

	bytes += need->items * sizeof(*plan->items);
	bytes += need->slabs * sizeof(*plan->slabs);
	bytes += plan->tensor_count * sizeof(*plan->first_item);
	if (plan->choice.packing == TND_PACKING_FILE) {
		bytes += need->images * sizeof(*plan->images);
		bytes += (need->slabs + 1) * sizeof(*plan->image_first);
	}
	return bytes;
}

/*
 * The window that a budget suggests: reads of chunk_bytes, with a block at each end; fewer of
 * everything in a small budget.
 */
static uint64_t set_window(const struct tnd_plan *plan, uint64_t budget,
			   struct tnd_plan_totals *totals)
{
	uint64_t chunk = tnd__power_below(budget / 64), buffers;

	chunk = TND__MAX(TND__MIN(chunk, CHUNK_MAX), CHUNK_MIN);
	buffers = plan->choice.packing == TND_PACKING_FILE ? 2 : budget >= TND__MIB(64) ? 8 : 4;
	totals->chunk_bytes = chunk;
	totals->bounce_bytes = buffers * (chunk + 2 * TND__PAGE);
	totals->window_bytes = (budget < TND__MIB(16) ? 2 : 4) * chunk;
	return totals->bounce_bytes + totals->window_bytes;
}

void tnd__plan_fixed(struct tnd_plan *plan, const struct tnd__plan_need *need, bool whole_window)
{
	struct tnd_plan_totals *totals = &plan->totals;
	uint64_t budget = plan->choice.budget_bytes, suggests = budget, window;

	window = set_window(plan, suggests, totals);
	while (!whole_window && totals->chunk_bytes > CHUNK_MIN &&
	       need->metadata + window + need->alive > budget) {
		suggests /= 2;
		window = set_window(plan, suggests, totals);
	}
	totals->metadata_bytes = need->metadata;
	totals->fixed_bytes = need->metadata + window;
	totals->needed_budget_bytes = totals->fixed_bytes + need->alive;
	totals->budget_bytes = budget;
}

/* The pool's rule: all that fits into the capacity gets a buffer of it. */
static uint64_t charge_bytes(const struct tnd_plan *plan, uint64_t bytes)
{
	return TND__MAX(tnd__round_up(bytes, TND__PAGE), plan->totals.slab_capacity_bytes);
}

uint64_t tnd__plan_charge(const struct tnd_plan *plan, const struct tnd_plan_slab *slab)
{
	return charge_bytes(plan, slab->bytes);
}

/* Metadata and the smallest window of the plan uncut. */
static uint64_t least_fixed(const struct tnd_plan *plan)
{
	struct tnd_plan_totals window;
	const struct tnd__plan_need need = {
		.items = plan->item_count, .slabs = plan->slab_count, .images = plan->image_count};

	return metadata_bytes(plan, &need) + set_window(plan, 0, &window);
}

bool tnd__plan_beyond(const struct tnd_plan *plan, const struct tnd_plan_item *item)
{
	uint64_t beside =
		plan->choice.packing == TND_PACKING_NAME ? plan->totals.slab_capacity_bytes : 0;

	if ((item->flags & (TND_ITEM_F_OVERSIZED | TND_ITEM_F_PIECE)) != TND_ITEM_F_OVERSIZED)
		return false;
	return least_fixed(plan) + beside +
		       tnd__round_up(plan->slabs[item->slab].bytes, TND__PAGE) >
	       plan->choice.budget_bytes;
}

/* Counts what an oversized item comes to, and says what its largest buffer is charged. */
static uint64_t count_oversized(const struct tnd_plan *plan, const struct tnd_plan_item *item,
				uint64_t cut_above, struct tnd__plan_need *need)
{
	const struct tnd_plan_slab *slab = &plan->slabs[item->slab];
	struct tnd__pieces_sum whole, sum = {0};

	if ((item->flags & TND_ITEM_F_PIECE) || slab->bytes <= cut_above)
		return plan->choice.oversize == TND_OVERSIZE_OVERRUN && tnd__plan_beyond(plan, item)
			       ? 0
			       : tnd__plan_charge(plan, slab);
	whole = tnd__pack_alone(plan, item);
	tnd__pieces_count(plan, item, cut_above, &sum);
	need->items += sum.pieces - 1;
	need->slabs += sum.pieces - 1;
	need->images += sum.images - whole.images;
	return charge_bytes(plan, sum.largest);
}

struct tnd__plan_need tnd__plan_need(const struct tnd_plan *plan, uint64_t cut_above)
{
	struct tnd__plan_need need = {
		.items = plan->item_count, .slabs = plan->slab_count, .images = plan->image_count};
	struct tnd_plan_totals window;
	size_t open = SIZE_MAX;

	for (size_t i = 0; i < plan->item_count; i++) {
		const struct tnd_plan_item *item = &plan->items[i];
		uint64_t slab_bytes, item_bytes = 0;

		if (item->slab == TND_PLAN_NO_SLAB)
			continue;
		if (open != SIZE_MAX && plan->slabs[open].last_item < i)
			open = SIZE_MAX;
		if (item->flags & TND_ITEM_F_OVERSIZED)
			item_bytes = count_oversized(plan, item, cut_above, &need);
		else
			open = item->slab;
		slab_bytes = open == SIZE_MAX ? 0 : plan->totals.slab_capacity_bytes;
		if (slab_bytes + item_bytes > need.alive) {
			need.alive = slab_bytes + item_bytes;
			need.alive_slab = slab_bytes;
			need.alive_item = item_bytes;
			need.item = i;
		}
	}
	need.metadata = metadata_bytes(plan, &need);
	need.least_fixed = need.metadata + set_window(plan, 0, &window);
	return need;
}
