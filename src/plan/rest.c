/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rest.c - what is left of a plan when some of its items have come from somewhere else
 *
 * The items keep their places in their slabs, and slabs that nothing is left of are dropped. Packed
 * anew they could fill fewer slabs, but fuller ones, which a budget that just held the whole plan
 * need not hold: as it is, the rest never needs more than the whole.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint/parts.h"
#include "plan_internal.h"

static bool is_taken(const unsigned char *taken, size_t item)
{
	return taken[item / 8] >> item % 8 & 1;
}

uint64_t tnd__plan_rest_bytes(const struct tnd_plan *plan)
{
	uint64_t bytes = sizeof(*plan) + plan->tensor_count * sizeof(*plan->first_item);

	bytes += plan->item_count * (sizeof(*plan->items) + sizeof(size_t)) + plan->item_count / 8 +
		 1;
	bytes += plan->slab_count * (sizeof(*plan->slabs) + sizeof(*plan->image_first));
	return bytes + plan->image_count * sizeof(*plan->images);
}

/* Items that are left, with the slabs' old numbers. */
static void copy_items(struct tnd_plan *rest, const struct tnd_plan *plan,
		       const unsigned char *taken, size_t *map)
{
	struct tnd_plan_totals *totals = &rest->totals;

	totals->tensors = totals->sliced = totals->read_bytes = totals->kept_bytes = 0;
	for (size_t i = 0; i < plan->item_count; i++) {
		const struct tnd_plan_item *item = &plan->items[i];
		bool last = !(item->flags & TND_ITEM_F_PIECE) || (item->flags & TND_ITEM_F_LAST);

		if (is_taken(taken, i))
			continue;
		map[rest->item_count] = i;
		rest->items[rest->item_count++] = *item;
		totals->tensors += last;
		totals->sliced += last && item->dim >= 0;
		totals->read_bytes += item->read_bytes;
		totals->kept_bytes += item->kept_bytes;
	}
	totals->items = rest->item_count;
}

/* `places`: of each old slab, its new number, or none; counted by item. */
static void count_slabs(struct tnd_plan *rest, uint32_t *places, size_t count)
{
	for (size_t s = 0; s < count; s++)
		places[s] = TND_PLAN_NO_SLAB;
	for (size_t i = 0; i < rest->item_count; i++)
		if (rest->items[i].slab != TND_PLAN_NO_SLAB)
			places[rest->items[i].slab] = 0;
	for (size_t s = 0; s < count; s++)
		if (places[s] != TND_PLAN_NO_SLAB)
			places[s] = (uint32_t)rest->slab_count++;
	rest->totals.buffers = rest->slab_count;
	rest->totals.slabs = rest->totals.slab_bytes ? rest->slab_count : 0;
}

static void copy_slabs(struct tnd_plan *rest, const struct tnd_plan *plan, const uint32_t *places)
{
	for (size_t s = 0; s < plan->slab_count; s++) {
		if (places[s] == TND_PLAN_NO_SLAB)
			continue;
		rest->slabs[places[s]] = plan->slabs[s];
		rest->slabs[places[s]].item_count = 0;
		if (!rest->image_first)
			continue;
		rest->image_first[places[s]] = rest->image_count;
		for (size_t k = plan->image_first[s]; k < plan->image_first[s + 1]; k++)
			rest->images[rest->image_count++] = plan->images[k];
		rest->image_first[places[s] + 1] = rest->image_count;
	}
	for (size_t i = 0; i < rest->item_count; i++) {
		struct tnd_plan_item *item = &rest->items[i];
		struct tnd_plan_slab *slab;

		if (item->slab == TND_PLAN_NO_SLAB)
			continue;
		item->slab = places[item->slab];
		slab = &rest->slabs[item->slab];
		if (!slab->item_count++)
			slab->first_item = i;
		slab->last_item = i;
	}
}

static void index_items(struct tnd_plan *rest)
{
	const struct tnd_tensor *tensors;
	size_t count;

	tensors = tnd_checkpoint_tensors(rest->checkpoint, &count);
	for (size_t i = 0; i < rest->tensor_count; i++)
		rest->first_item[i] = TND__NO_INDEX;
	for (size_t i = rest->item_count; i-- > 0;)
		rest->first_item[rest->items[i].tensor - tensors] = (uint32_t)i;
}

static int fill(struct tnd_plan *rest, const struct tnd_plan *plan, const unsigned char *taken,
		size_t **ret_map)
{
	bool images = plan->choice.packing == TND_PACKING_FILE;
	uint32_t *places = tnd__plan_alloc(plan->slab_count, sizeof(*places));
	size_t left = 0, *map;

	for (size_t i = 0; i < plan->item_count; i++)
		left += !is_taken(taken, i);
	map = tnd__plan_alloc(left, sizeof(*map));
	rest->items = tnd__plan_alloc(left, sizeof(*rest->items));
	rest->first_item = tnd__plan_alloc(plan->tensor_count, sizeof(*rest->first_item));
	if (map && places && rest->items) {
		copy_items(rest, plan, taken, map);
		count_slabs(rest, places, plan->slab_count);
		rest->slabs = tnd__plan_alloc(rest->slab_count, sizeof(*rest->slabs));
	}
	if (images) {
		rest->images = tnd__plan_alloc(plan->image_count, sizeof(*rest->images));
		rest->image_first =
			tnd__plan_alloc(rest->slab_count + 1, sizeof(*rest->image_first));
	}
	if (!rest->slabs || !rest->first_item ||
	    (images && (!rest->images || !rest->image_first))) {
		free(places);
		free(map);
		return -ENOMEM;
	}
	copy_slabs(rest, plan, places);
	index_items(rest);
	free(places);
	*ret_map = map;
	return 0;
}

int tnd__plan_rest(const struct tnd_plan *plan, const unsigned char *taken,
		   struct tnd_plan **ret_rest, size_t **ret_map)
{
	struct tnd_plan *rest = tnd__plan_alloc(1, sizeof(*rest));
	int rc;

	if (!rest)
		return -ENOMEM;
	atomic_init(&rest->references, 1);
	rest->checkpoint = tnd__checkpoint_ref(plan->checkpoint);
	rest->layout = plan->layout;
	rest->phase = plan->phase;
	rest->choice = plan->choice;
	rest->totals = plan->totals;
	rest->tensor_count = plan->tensor_count;
	rest->node_read_bytes = plan->node_read_bytes;
	rest->node_budget_bytes = plan->node_budget_bytes;
	rest->kin = plan->kin;
	rc = fill(rest, plan, taken, ret_map);
	if (rc < 0) {
		tnd_plan_close(rest);
		return rc;
	}
	*ret_rest = rest;
	return 0;
}
