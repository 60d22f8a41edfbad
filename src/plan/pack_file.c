/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pack_file.c - slabs as images of file ranges
 *
 *   file   |....:..aaaa:bb..:....:..cc:cccc|        a, b, c: ranges of items; ':' 4 KiB boundaries
 *   slab   |..aaaa:bb..|..cc:cccc|                  b begins in the block where a ended: one image
 *
 * Every range that is needed lies in one image, at a slab offset congruent to its file offset
 * modulo 4096, so that a direct read of whole blocks puts each byte in its place. An image that is
 * rounded outward to blocks overlaps no other image and does not leave the slab.
 *
 * Items that must be copied for alignment get a place in an area behind the last image. What that
 * area holds is only known when the slab is closed; until then their slab_offset counts from its
 * beginning.
 *
 * A slab never holds two files. An item that fits no slab closes the open one, so slabs are alive
 * one after the other. Larger items than FULL_BYTES, up to the slab size, have a slab to
 * themselves.
 */
#include <string.h>

#include "plan_internal.h"

/*
 * Where a slab is full unless the caller gave a size. Slabs of 256 MiB bring nothing here, as
 * images need few reads whatever the slab, and cost: two or three are touched for the first time,
 * which on a virtual machine is several times slower than the disk.
 */
#define FULL_BYTES TND__MIB(32)

/* The slab being filled. */
struct cursor {
	size_t slab;       /* SIZE_MAX: none open */
	uint64_t pos;      /* where the last image ends */
	uint64_t area;     /* bytes of the copies' area */
	uint64_t file_end; /* of the last image */
	uint64_t images;
};

static uint64_t used(const struct cursor *cursor)
{
	return tnd__round_up(cursor->pos, TND__PAGE) + tnd__round_up(cursor->area, TND__PAGE);
}

/* Moves the cursor over [begin, end). Return: true if a new image begins there. */
static bool advance(struct cursor *cursor, uint64_t begin, uint64_t end, uint64_t *ret_place)
{
	bool joins = cursor->images && (begin == cursor->file_end ||
					begin < tnd__round_up(cursor->file_end, TND__PAGE));

	*ret_place = joins ? cursor->pos + (begin - cursor->file_end)
			   : tnd__round_up(cursor->pos, TND__PAGE) + begin % TND__PAGE;
	cursor->pos = *ret_place + (end - begin);
	cursor->file_end = end;
	cursor->images += !joins;
	return !joins;
}

static bool must_realign(const struct tnd_plan *plan, const struct tnd_plan_item *item,
			 uint64_t place)
{
	uint32_t bits = tnd_dtype_bits(item->tensor->dtype);

	/* Members that need it elsewhere copy it themselves. */
	if (plan->choice.of_union)
		return false;
	if (plan->choice.align && place % plan->choice.align)
		return true;
	/*
	 * From one element boundary of the file to the next is a whole number of elements, so the
	 * tensor's own offset decides.
	 */
	return bits % 8 == 0 && item->tensor->offset % (bits / 8);
}

/* Moves the cursor over all of an item. Return: its slab offset. */
static uint64_t pass(const struct tnd_plan *plan, struct cursor *cursor, struct tnd_plan_item *item)
{
	uint64_t count = tnd__plan_item_range_count(item), first = 0, place, begin, end;

	for (uint64_t k = 0; k < count; k++) {
		tnd__plan_item_range(item, k, &begin, &end);
		advance(cursor, begin, end, &place);
		if (k == 0)
			first = place;
	}
	item->flags &= ~TND_ITEM_F_REALIGN;
	if (!must_realign(plan, item, first))
		return first;
	item->flags |= TND_ITEM_F_REALIGN;
	cursor->area = tnd__round_up(cursor->area, TND__MAX(plan->choice.align, 64));
	first = cursor->area;
	cursor->area += item->kept_bytes;
	return first;
}

struct tnd__pieces_sum tnd__pack_alone(const struct tnd_plan *plan,
				       const struct tnd_plan_item *item)
{
	struct tnd__pieces_sum sum = {.pieces = 1, .largest = item->kept_bytes};
	struct tnd_plan_item copy = *item;
	struct cursor cursor = {0};

	if (plan->choice.packing == TND_PACKING_NAME)
		return sum;
	pass(plan, &cursor, &copy);
	sum.largest = used(&cursor);
	sum.images = cursor.images;
	return sum;
}

static int add_images(struct tnd_plan *plan, struct cursor cursor, const struct tnd_plan_item *item)
{
	uint64_t count = tnd__plan_item_range_count(item);

	for (uint64_t k = 0; k < count; k++) {
		uint64_t begin, end, place;
		int rc;

		tnd__plan_item_range(item, k, &begin, &end);
		if (!advance(&cursor, begin, end, &place)) {
			plan->images[plan->image_count - 1].file_end = end;
			continue;
		}
		rc = tnd__plan_reserve(&plan->images, &plan->image_capacity, plan->image_count + 1,
				       sizeof(*plan->images));
		if (rc < 0)
			return rc;
		plan->images[plan->image_count++] = (struct tnd_plan_image){
			.file_begin = begin, .file_end = end, .slab_offset = place};
	}
	return 0;
}

static void close_slab(struct tnd_plan *plan, struct cursor *cursor)
{
	struct tnd_plan_slab *slab;
	uint64_t area = tnd__round_up(cursor->pos, TND__PAGE);

	if (cursor->slab == SIZE_MAX)
		return;
	slab = &plan->slabs[cursor->slab];
	slab->bytes = used(cursor);
	if (cursor->area)
		for (uint64_t i = slab->first_item; i <= slab->last_item; i++)
			if (plan->items[i].flags & TND_ITEM_F_REALIGN)
				plan->items[i].slab_offset += area;
	plan->image_first[plan->slab_count] = plan->image_count;
	cursor->slab = SIZE_MAX;
}

static int open_slab(struct tnd_plan *plan, struct cursor *cursor, size_t item, uint32_t flags)
{
	struct tnd_plan_slab *slab;
	int rc = tnd__plan_reserve(&plan->slabs, &plan->slab_capacity, plan->slab_count + 1,
				   sizeof(*plan->slabs));

	if (rc == 0)
		rc = tnd__plan_reserve(&plan->image_first, &plan->image_first_capacity,
				       plan->slab_count + 2, sizeof(*plan->image_first));
	if (rc < 0)
		return rc;
	slab = &plan->slabs[plan->slab_count];
	memset(slab, 0, sizeof(*slab));
	slab->first_item = item;
	slab->file = plan->items[item].tensor->file;
	slab->flags = flags;
	plan->image_first[plan->slab_count] = plan->image_count;
	memset(cursor, 0, sizeof(*cursor));
	cursor->slab = plan->slab_count++;
	return 0;
}

int tnd__pack_file(struct tnd_plan *plan)
{
	uint64_t limit = plan->choice.slab_bytes;
	uint64_t full = plan->choice.slab_given ? limit : TND__MIN(limit, FULL_BYTES);
	struct cursor cursor = {.slab = SIZE_MAX};
	uint32_t file = 0;

	for (size_t i = 0; i < plan->item_count; i++) {
		struct tnd_plan_item *item = &plan->items[i];
		struct cursor before = cursor;
		bool alone;
		int rc = 0;

		if (!item->kept_bytes)
			continue;
		alone = (item->flags & TND_ITEM_F_PIECE) ||
			tnd__pack_alone(plan, item).largest > limit;
		if (cursor.slab != SIZE_MAX)
			item->slab_offset = pass(plan, &cursor, item);
		if (before.slab == SIZE_MAX || alone || item->tensor->file != file ||
		    used(&cursor) > full) {
			close_slab(plan, &before);
			rc = open_slab(plan, &before, i, alone ? TND_ITEM_F_OVERSIZED : 0);
			if (rc < 0)
				return rc;
			cursor = before;
			item->slab_offset = pass(plan, &cursor, item);
		}
		file = item->tensor->file;
		rc = add_images(plan, before, item);
		if (rc < 0)
			return rc;
		item->slab = (uint32_t)cursor.slab;
		plan->slabs[cursor.slab].last_item = i;
		plan->slabs[cursor.slab].item_count++;
		if (alone) {
			item->flags |= TND_ITEM_F_OVERSIZED;
			close_slab(plan, &cursor);
		}
	}
	close_slab(plan, &cursor);
	return 0;
}

uint64_t tnd__plan_item_range_count(const struct tnd_plan_item *item)
{
	if (!item->kept_bytes)
		return 0;
	return item->flags & TND_ITEM_F_ROWS ? 1 : item->row_count * item->part_count;
}

void tnd__plan_item_range(const struct tnd_plan_item *item, uint64_t k, uint64_t *ret_begin,
			  uint64_t *ret_end)
{
	if (item->flags & TND_ITEM_F_ROWS) {
		*ret_begin = item->file_offset;
		*ret_end = item->file_offset + item->row_count * item->row_bytes;
		return;
	}
	*ret_begin = item->file_offset + k / item->part_count * item->row_bytes +
		     item->part_begin[k % item->part_count];
	*ret_end = *ret_begin + item->part_bytes[k % item->part_count];
}

uint64_t tnd__plan_image_place(const struct tnd_plan *plan, size_t slab, uint64_t file_offset)
{
	const struct tnd_plan_image *images;
	size_t low = 0, high = tnd_plan_images(plan, slab, &images);

	while (low < high) {
		size_t middle = low + (high - low) / 2;

		if (images[middle].file_end <= file_offset)
			low = middle + 1;
		else if (images[middle].file_begin > file_offset)
			high = middle;
		else
			return images[middle].slab_offset +
			       (file_offset - images[middle].file_begin);
	}
	return UINT64_MAX;
}
