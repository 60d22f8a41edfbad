/* SPDX-License-Identifier: Apache-2.0 */
/* pack_name.c - items in name order, each at the next 4 KiB boundary of its shard's open slab */
#include <string.h>

#include "plan_internal.h"

static int add_slab(struct tnd_plan *plan, size_t item, uint32_t flags)
{
	struct tnd_plan_slab *slab;
	int rc = tnd__plan_reserve(&plan->slabs, &plan->slab_capacity, plan->slab_count + 1,
				   sizeof(*plan->slabs));

	if (rc < 0)
		return rc;
	slab = &plan->slabs[plan->slab_count++];
	memset(slab, 0, sizeof(*slab));
	slab->first_item = item;
	slab->file = plan->items[item].tensor->file;
	slab->flags = flags;
	return 0;
}

static void place(struct tnd_plan *plan, size_t slab_index, size_t item_index, uint64_t offset)
{
	struct tnd_plan_slab *slab = &plan->slabs[slab_index];
	struct tnd_plan_item *item = &plan->items[item_index];

	item->slab = (uint32_t)slab_index;
	item->slab_offset = offset;
	slab->bytes = offset + item->kept_bytes;
	slab->last_item = item_index;
	slab->item_count++;
}

int tnd__pack_name(struct tnd_plan *plan)
{
	uint64_t limit = plan->choice.slab_bytes;
	size_t open = SIZE_MAX;
	uint32_t file = 0;

	for (size_t i = 0; i < plan->item_count; i++) {
		struct tnd_plan_item *item = &plan->items[i];
		bool alone = item->kept_bytes > limit || (item->flags & TND_ITEM_F_PIECE);
		uint64_t offset = 0;
		int rc = 0;

		if (!item->kept_bytes)
			continue;
		if (item->tensor->file != file)
			open = SIZE_MAX;
		file = item->tensor->file;
		if (alone) {
			item->flags |= TND_ITEM_F_OVERSIZED;
			rc = add_slab(plan, i, TND_ITEM_F_OVERSIZED);
			if (rc < 0)
				return rc;
			place(plan, plan->slab_count - 1, i, 0);
			continue;
		}
		if (open != SIZE_MAX)
			offset = tnd__round_up(plan->slabs[open].bytes, TND__PAGE);
		if (open == SIZE_MAX || offset + item->kept_bytes > limit) {
			rc = add_slab(plan, i, 0);
			if (rc < 0)
				return rc;
			open = plan->slab_count - 1;
			offset = 0;
		}
		place(plan, open, i, offset);
	}
	return 0;
}
