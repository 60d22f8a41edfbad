/* SPDX-License-Identifier: Apache-2.0 */
/*
 * union.c - what several ranks keep of a tensor -> one item, read once for all of them
 *
 *   member 0   [aa......][aa......]    rows, and a part of each
 *   member 2   [....cc..][....cc..]
 *   union      [aa..cc..][aa..cc..]    rows and parts; or, where runs or gaps are short,
 *              [aaaaaaaa][aaaaaaaa]    all of the rows as one run
 *
 * Each member's item is a rectangle: some rows, some parts of each. Options and names are looked at
 * once; only the shape is worked out for each member and tensor.
 *
 *   whole for some member, or all of it together    the tensor, one run
 *   the same rows, or the same parts of adjoining   merged; too many parts: across the smallest
 *   rows                                            gaps
 *   other rows with other parts (EP x TP)           all of each member's rows, as runs along
 *                                                   dimension 0
 *
 * Invariants: every byte that a member keeps is in the item; kept and read bytes are the same;
 * nothing is between a member's bytes that adjoin in the file. An item of several rows is one of
 * which every run is read alone.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "plan_internal.h"

/* Bytes [begin, end) of each of `rows` rows of `row_bytes`. */
struct block {
	uint64_t row_bytes;
	uint64_t first_row, rows;
	uint64_t begin, end;
};

/* What members keep of one tensor. */
struct gathering {
	const struct tnd__slicer *slicer;
	const struct tnd_tensor *tensor;
	struct block *blocks; /* TND_PLAN_PART_MAX a member */
	size_t count;
	int32_t dim; /* of the blocks */
	bool kept;   /* by some member, if only as nothing */
	bool whole;  /* by some member */
};

/* -- blocks: sorted by rows, then by begin -- */

static bool same_rows(const struct block *a, const struct block *b)
{
	return a->first_row == b->first_row && a->rows == b->rows && a->row_bytes == b->row_bytes;
}

static bool before(const struct block *a, const struct block *b)
{
	if (a->first_row != b->first_row)
		return a->first_row < b->first_row;
	if (a->rows != b->rows)
		return a->rows < b->rows;
	return a->begin < b->begin;
}

static void insert(struct gathering *all, struct block block)
{
	size_t at = all->count++;

	for (; at > 0 && before(&block, &all->blocks[at - 1]); at--)
		all->blocks[at] = all->blocks[at - 1];
	all->blocks[at] = block;
}

/* Blocks of the same rows that touch become one. */
static void join(struct gathering *all)
{
	size_t last = 0;

	for (size_t i = 1; i < all->count; i++) {
		struct block *into = &all->blocks[last], *block = &all->blocks[i];

		if (same_rows(into, block) && block->begin <= into->end)
			into->end = TND__MAX(into->end, block->end);
		else
			all->blocks[++last] = *block;
	}
	if (all->count)
		all->count = last + 1;
}

static void add(struct gathering *all, const struct tnd_plan_item *item)
{
	struct block block = {.row_bytes = item->row_bytes, .rows = item->row_count};

	all->kept = true;
	all->whole = all->whole || item->kept_bytes == all->tensor->bytes;
	if (all->whole || !item->kept_bytes)
		return;
	all->dim = item->dim;
	block.first_row = (item->file_offset - all->tensor->offset) / item->row_bytes;
	for (uint32_t i = 0; i < item->part_count; i++) {
		block.begin = item->part_begin[i];
		block.end = block.begin + item->part_bytes[i];
		if (item->part_bytes[i])
			insert(all, block);
	}
}

/* Number of the first blocks, those of the same rows. */
static size_t first_parts(const struct gathering *all)
{
	size_t count = 1;

	while (count < all->count && same_rows(&all->blocks[0], &all->blocks[count]))
		count++;
	return count;
}

/* One rectangle of those with the same parts and adjoining rows. Return: false if it is none. */
static bool stack_rows(struct gathering *all)
{
	size_t parts = first_parts(all);
	uint64_t rows = all->blocks[0].rows;

	if (all->count % parts)
		return false;
	for (size_t i = parts; i < all->count; i++) {
		const struct block *block = &all->blocks[i], *above = &all->blocks[i - parts];

		if (block->row_bytes != above->row_bytes ||
		    block->first_row != above->first_row + above->rows ||
		    block->begin != above->begin || block->end != above->end)
			return false;
		rows += i % parts == 0 ? block->rows : 0;
	}
	all->count = parts;
	for (size_t i = 0; i < parts; i++)
		all->blocks[i].rows = rows;
	return true;
}

/* Blocks as runs of the whole tensor; where there are several rows, with all between. */
static void flatten(struct gathering *all)
{
	size_t count = all->count;

	all->count = 0;
	all->dim = 0;
	for (size_t i = 0; i < count; i++) {
		struct block block = all->blocks[i];
		uint64_t first = block.first_row * block.row_bytes;

		if (block.rows > 1) {
			block.begin = 0;
			block.end = block.rows * block.row_bytes;
		}
		insert(all, (struct block){.row_bytes = all->tensor->bytes,
					   .rows = 1,
					   .begin = first + block.begin,
					   .end = first + block.end});
	}
	join(all);
}

/* Reads across the smallest gaps until there are no more parts than an item has. */
static void limit_parts(struct gathering *all)
{
	while (all->count > TND_PLAN_PART_MAX) {
		struct block *blocks = all->blocks;
		size_t least = 1;

		for (size_t i = 2; i < all->count; i++)
			if (blocks[i].begin - blocks[i - 1].end <
			    blocks[least].begin - blocks[least - 1].end)
				least = i;
		blocks[least - 1].end = blocks[least].end;
		all->count--;
		memmove(&blocks[least], &blocks[least + 1], (all->count - least) * sizeof(*blocks));
	}
}

/* -- the item -- */

static void fill_item(const struct gathering *all, struct tnd_plan_item *item)
{
	const struct block *blocks = all->blocks;
	uint64_t bits = tnd__shape_span_bits(all->tensor, (uint32_t)all->dim + 1);

	item->dim = all->dim;
	item->row_bytes = blocks[0].row_bytes;
	item->row_count = blocks[0].rows;
	item->file_offset = all->tensor->offset + blocks[0].first_row * item->row_bytes;
	item->part_count = (uint32_t)all->count;
	item->start = blocks[0].begin * 8 / bits;
	item->length = 0;
	memset(item->part_begin, 0, sizeof(item->part_begin));
	memset(item->part_bytes, 0, sizeof(item->part_bytes));
	for (uint32_t i = 0; i < item->part_count; i++) {
		item->part_begin[i] = blocks[i].begin;
		item->part_bytes[i] = blocks[i].end - blocks[i].begin;
		item->length += item->part_bytes[i] * 8 / bits;
	}
	tnd__shape_sum(item);
}

/* Several rows stay only where their runs are read alone, and are not one run. */
static void merge(struct gathering *all, struct tnd_plan_item *item)
{
	join(all);
	if (!stack_rows(all))
		flatten(all);
	limit_parts(all);
	fill_item(all, item);
	if (item->row_count == 1)
		return;
	if (item->kept_bytes < item->row_count * item->row_bytes &&
	    tnd__shape_runs_alone(item, all->slicer->run_min_bytes))
		return;
	flatten(all);
	fill_item(all, item);
}

static void make_item(struct gathering *all, struct tnd_plan_item *item)
{
	const struct tnd_plan_item empty = {.tensor = all->tensor, .slab = TND_PLAN_NO_SLAB};

	*item = empty;
	if (!all->whole && all->count) {
		merge(all, item);
		all->whole = item->kept_bytes == all->tensor->bytes;
	}
	if (all->whole || !all->count) {
		*item = empty;
		tnd__shape_whole(all->tensor, item);
		if (!all->whole)
			item->part_bytes[0] = 0;
		tnd__shape_sum(item);
	}
	item->slice_bytes = item->kept_bytes;
}

/* All members' slices of one tensor. Misses are counted at the first that has it. */
static void gather(struct tnd_plan *plan, struct tnd__slicer *slicer, uint32_t index,
		   struct gathering *all)
{
	struct tnd_plan_item item;

	all->tensor = &slicer->tensors[index];
	all->count = 0;
	all->kept = all->whole = false;
	for (size_t i = 0; i < plan->member_count; i++) {
		struct tnd_plan_member *member = &plan->members[i];

		tnd__slicer_rank(slicer, member->rank);
		if (!tnd__experts_keeps(slicer, index))
			continue;
		slicer->quiet = all->kept;
		tnd__shape_item(slicer, index, &item);
		tnd__members_count(plan, &item, member);
		add(all, &item);
	}
}

static bool some_member_keeps(const struct tnd_plan *plan, struct tnd__slicer *slicer,
			      uint32_t index)
{
	for (size_t i = 0; i < plan->member_count; i++) {
		tnd__slicer_rank(slicer, plan->members[i].rank);
		if (tnd__experts_keeps(slicer, index))
			return true;
	}
	return false;
}

int tnd__union_items(struct tnd_plan *plan, struct tnd__slicer *slicer)
{
	struct gathering all = {.slicer = slicer};
	uint32_t *order = tnd__plan_alloc(slicer->count, sizeof(*order));
	size_t count = 0;
	int rc = -ENOMEM;

	all.blocks = tnd__plan_alloc(plan->member_count * TND_PLAN_PART_MAX, sizeof(*all.blocks));
	if (!order || !all.blocks)
		goto out;
	for (uint32_t i = 0; i < slicer->count; i++)
		if (some_member_keeps(plan, slicer, i))
			order[count++] = i;
	tnd__plan_sort(plan, slicer, order, count);
	plan->items = tnd__plan_alloc(count, sizeof(*plan->items));
	if (!plan->items)
		goto out;
	plan->item_count = plan->item_capacity = count;
	for (size_t i = 0; i < count; i++) {
		gather(plan, slicer, order[i], &all);
		make_item(&all, &plan->items[i]);
	}
	rc = 0;
out:
	free(all.blocks);
	free(order);
	return rc;
}
