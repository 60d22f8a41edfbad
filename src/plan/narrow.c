/* SPDX-License-Identifier: Apache-2.0 */
/*
 * narrow.c - finding a tensor in a plan, and a part of a tensor in what this rank holds of it
 *
 * What is held of a tensor is a dense array of its shape with `dim` (and dimension 0, where EP cuts
 * a fused tensor) shortened. The position of a value in it follows from the number of bytes that
 * one step along the asked dimension takes there.
 */
#include <inttypes.h>
#include <stdio.h>

#include "plan_internal.h"

int tnd_plan_find(const struct tnd_plan *plan, const char *name, size_t name_bytes,
		  size_t *ret_item)
{
	const struct tnd_tensor *tensor;
	size_t count;
	uint32_t item;

	if (tnd_checkpoint_find(plan->checkpoint, name, name_bytes, &tensor) < 0)
		return TND_E_NO_TENSOR;
	item = plan->first_item[tensor - tnd_checkpoint_tensors(plan->checkpoint, &count)];
	if (item == TND__NO_INDEX)
		return TND_E_NO_TENSOR;
	*ret_item = item;
	return 0;
}

/* Values held along one dimension, up to three ranges. */
struct held {
	uint32_t count;
	uint64_t start[TND_PLAN_PART_MAX], length[TND_PLAN_PART_MAX];
};

static void add_held(struct held *held, uint64_t start, uint64_t length)
{
	uint32_t last = held->count - 1;

	if (held->count && held->start[last] + held->length[last] == start) {
		held->length[last] += length;
	} else if (held->count < TND_PLAN_PART_MAX) {
		held->start[held->count] = start;
		held->length[held->count++] = length;
	}
}

/* A row that was cut into pieces has its parts spread over them. */
static struct held held_along(const struct tnd_plan *plan, const struct tnd_plan_item *item,
			      uint32_t dim)
{
	const struct tnd_plan_item *end = plan->items + plan->item_count;
	struct held held = {0};

	if ((int32_t)dim != item->dim) {
		bool experts = dim == 0 && item->expert_length;

		add_held(&held, experts ? item->expert_start : 0,
			 experts ? item->expert_length : item->tensor->shape[dim]);
		return held;
	}
	if (!item->row_bytes || !item->tensor->shape[dim]) {
		add_held(&held, item->start, item->length);
		return held;
	}
	for (const struct tnd_plan_item *at = item; at < end && at->tensor == item->tensor; at++) {
		/* In bits: values may be smaller than a byte. */
		uint64_t bits = item->row_bytes * 8 / item->tensor->shape[dim];

		for (uint32_t i = 0; i < at->part_count; i++)
			add_held(&held, at->part_begin[i] * 8 / bits, at->part_bytes[i] * 8 / bits);
		if (at->row_count > 1 || !(at->flags & TND_ITEM_F_PIECE))
			break;
	}
	return held;
}

/* Bits of one step along `dim` in what is held. */
static uint64_t step_bits(const struct tnd_plan_item *item, uint32_t dim)
{
	uint64_t bits = tnd_dtype_bits(item->tensor->dtype);

	for (uint32_t i = dim + 1; i < item->tensor->dim_count; i++)
		bits *= (int32_t)i == item->dim ? item->length : item->tensor->shape[i];
	return bits;
}

static const char *describe(const struct held *held, char *out, size_t out_bytes)
{
	int used = 0;

	for (uint32_t i = 0; i < held->count; i++)
		used += snprintf(out + used, out_bytes - (size_t)used,
				 "%s[%" PRIu64 ", %" PRIu64 ")", i ? " and " : "", held->start[i],
				 held->start[i] + held->length[i]);
	return out;
}

int tnd_plan_narrow(const struct tnd_plan *plan, const char *name, size_t name_bytes, uint32_t dim,
		    uint64_t start, uint64_t length, uint64_t *ret_kept_offset,
		    struct tnd_error *reterr)
{
	struct tnd__where where = {.name = name, .name_bytes = name_bytes};
	const struct tnd_plan_item *item;
	uint64_t before = 0;
	struct held held;
	char text[160];
	size_t index;

	if (plan->choice.of_union)
		return tnd__fail(reterr, TND_E_INVALID, &where,
				 "expected the plan of one rank, found that of a node's reader, "
				 "which has tensors as they are in the file; ask the rank's own");
	if (tnd_plan_find(plan, name, name_bytes, &index) < 0)
		return tnd__fail(reterr, TND_E_NO_TENSOR, &where,
				 "expected a tensor of this rank's plan, found none of this name");
	item = &plan->items[index];
	where.file = tnd_checkpoint_files(plan->checkpoint, &(size_t){0})[item->tensor->file].name;
	if (dim >= item->tensor->dim_count)
		return tnd__fail(reterr, TND_E_SLICE, &where,
				 "expected a dimension below %u, found %u", item->tensor->dim_count,
				 dim);
	held = held_along(plan, item, dim);
	for (uint32_t i = 0; i < held.count; i++) {
		if (start >= held.start[i] && start - held.start[i] <= held.length[i] &&
		    length <= held.length[i] - (start - held.start[i])) {
			*ret_kept_offset =
				(before + start - held.start[i]) * step_bits(item, dim) / 8;
			return 0;
		}
		before += held.length[i];
	}
	return tnd__fail(
		reterr, TND_E_SLICE, &where,
		"rank %u holds %s of dimension %u, asked for %" PRIu64 " values from %" PRIu64
		" on; ask for what is held, or plan without slices",
		plan->layout.rank, describe(&held, text, sizeof(text)), dim, length, start);
}
