/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shape.c - from ranges of values to rows and parts in bytes, and what to say where that cannot be
 *
 *   tensor [outer..., dim, inner...]   ->   rows of dim x inner, parts of length x inner in each
 *
 * A fused expert tensor that EP cuts along dimension 0 has fewer rows (or, without another cut, is
 * one row with one part).
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "plan_internal.h"

/*
 * Bits of the dimensions [from, to). The whole tensor's were checked against overflow when the file
 * was opened.
 */
uint64_t tnd__shape_span_bits(const struct tnd_tensor *tensor, uint32_t from)
{
	uint64_t bits = tnd_dtype_bits(tensor->dtype);

	for (uint32_t i = from; i < tensor->dim_count; i++)
		bits *= tensor->shape[i];
	return bits;
}

static uint64_t outer_count(const struct tnd_tensor *tensor, uint32_t from, uint32_t to)
{
	uint64_t count = 1;

	for (uint32_t i = from; i < to; i++)
		count *= tensor->shape[i];
	return count;
}

/* Experts of a fused tensor that this rank has. */
struct owned {
	bool cut;
	uint64_t first, count;
};

static struct owned owned_of(const struct tnd__slicer *slicer, uint32_t index,
			     enum tnd__reason *ret_why)
{
	const struct tnd_tensor *tensor = &slicer->tensors[index];
	const struct tnd__name *name = &slicer->names[index];
	struct owned owned = {0};

	*ret_why = TND__REASON_NONE;
	if (!(name->flags & TND__NAME_F_FUSED) || slicer->ep_size == 1 || !tensor->bytes ||
	    ((name->flags & TND__NAME_F_SCALE) && slicer->all_scales))
		return owned;
	if (slicer->placement == TND_PLACEMENT_ROUND_ROBIN) {
		*ret_why = TND__REASON_ROUND_ROBIN;
		return owned;
	}
	if (tnd__shape_span_bits(tensor, 1) % 8) {
		*ret_why = TND__REASON_BYTES;
		return owned;
	}
	tnd__experts_block(tensor->shape[0], slicer->ep_size, slicer->ep_rank, &owned.first,
			   &owned.count);
	owned.cut = true;
	return owned;
}

static bool on_bytes(const struct tnd_tensor *tensor, const struct tnd__ranges *ranges)
{
	uint64_t inner = tnd__shape_span_bits(tensor, (uint32_t)ranges->dim + 1);

	if (tnd__shape_span_bits(tensor, (uint32_t)ranges->dim) % 8)
		return false;
	for (uint32_t i = 0; i < ranges->count; i++)
		if (ranges->start[i] * inner % 8 || ranges->length[i] * inner % 8)
			return false;
	return true;
}

void tnd__shape_whole(const struct tnd_tensor *tensor, struct tnd_plan_item *item)
{
	item->dim = -1;
	item->file_offset = tensor->offset;
	item->row_bytes = tensor->bytes;
	item->row_count = 1;
	item->part_count = 1;
	item->part_bytes[0] = tensor->bytes;
}

static void shape_experts(const struct tnd_tensor *tensor, const struct owned *owned,
			  struct tnd_plan_item *item)
{
	uint64_t each = tnd__shape_span_bits(tensor, 1) / 8;

	item->dim = 0;
	item->start = owned->first;
	item->length = owned->count;
	item->part_begin[0] = owned->first * each;
	item->part_bytes[0] = owned->count * each;
}

static void shape_ranges(const struct tnd_tensor *tensor, const struct tnd__ranges *ranges,
			 const struct owned *owned, struct tnd_plan_item *item)
{
	uint32_t dim = (uint32_t)ranges->dim;
	uint64_t inner = tnd__shape_span_bits(tensor, dim + 1);
	uint64_t rows = outer_count(tensor, 0, dim);

	item->dim = ranges->dim;
	item->start = ranges->start[0];
	item->row_bytes = tensor->shape[dim] * inner / 8;
	item->row_count = rows;
	item->part_count = ranges->count;
	for (uint32_t i = 0; i < ranges->count; i++) {
		item->length += ranges->length[i];
		item->part_begin[i] = ranges->start[i] * inner / 8;
		item->part_bytes[i] = ranges->length[i] * inner / 8;
	}
	if (!owned->cut)
		return;
	rows = outer_count(tensor, 1, dim);
	item->file_offset += owned->first * rows * item->row_bytes;
	item->row_count = owned->count * rows;
}

static void miss(struct tnd__slicer *slicer, uint32_t index, enum tnd__reason why)
{
	const struct tnd__name *name = &slicer->names[index];
	struct tnd__miss *miss = &slicer->misses[name->rule ? TND__ROLE_USER : name->role][why];

	if (why != TND__REASON_NONE && !slicer->quiet && miss->count++ == 0)
		miss->first = index;
}

bool tnd__shape_runs_alone(const struct tnd_plan_item *item, uint64_t run_min_bytes)
{
	for (uint32_t i = 0; i < item->part_count; i++) {
		uint64_t end = item->part_begin[i] + item->part_bytes[i];
		uint64_t next = i + 1 < item->part_count ? item->part_begin[i + 1]
							 : item->row_bytes + item->part_begin[0];

		if (item->part_bytes[i] < run_min_bytes)
			return false;
		/* The last run of a row may go on in the next. */
		if (next != end && next - end < run_min_bytes)
			return false;
	}
	return true;
}

void tnd__shape_sum(struct tnd_plan_item *item)
{
	uint64_t row_kept = 0;

	for (uint32_t i = 0; i < item->part_count; i++)
		row_kept += item->part_bytes[i];
	item->kept_bytes = row_kept * item->row_count;
	item->read_bytes = item->flags & TND_ITEM_F_ROWS ? item->row_count * item->row_bytes
							 : item->kept_bytes;
}

void tnd__shape_item(struct tnd__slicer *slicer, uint32_t index, struct tnd_plan_item *ret_item)
{
	const struct tnd_tensor *tensor = &slicer->tensors[index];
	enum tnd__reason why, unowned;
	struct owned owned = owned_of(slicer, index, &unowned);
	struct tnd__ranges ranges;

	memset(ret_item, 0, sizeof(*ret_item));
	ret_item->tensor = tensor;
	ret_item->slab = TND_PLAN_NO_SLAB;
	why = tnd__rules_ranges(slicer, index, &ranges);
	if (ranges.dim >= 0 && !on_bytes(tensor, &ranges)) {
		ranges.dim = -1;
		why = TND__REASON_BYTES;
	}
	miss(slicer, index, why);
	miss(slicer, index, unowned);
	tnd__shape_whole(tensor, ret_item);
	/* A user's rule along the expert dimension cuts by moe_tp what EP cuts too: EP wins. */
	if (ranges.dim > 0 || (ranges.dim == 0 && !owned.cut))
		shape_ranges(tensor, &ranges, &owned, ret_item);
	else if (owned.cut)
		shape_experts(tensor, &owned, ret_item);
	if (owned.cut) {
		ret_item->expert_start = owned.first;
		ret_item->expert_length = owned.count;
	}
	tnd__shape_sum(ret_item);
	if (ret_item->row_count > 1 && ret_item->kept_bytes &&
	    !tnd__shape_runs_alone(ret_item, slicer->run_min_bytes)) {
		ret_item->flags |= TND_ITEM_F_ROWS;
		tnd__shape_sum(ret_item);
	}
	ret_item->slice_bytes = ret_item->kept_bytes;
}

static const char *const role_texts[TND__ROLE_COUNT] = {
	[TND__ROLE_WHOLE] = "of no rule",
	[TND__ROLE_VOCAB] = "of the vocabulary",
	[TND__ROLE_Q] = "of query heads",
	[TND__ROLE_KV] = "of key and value heads",
	[TND__ROLE_QKV] = "of fused query, key and value heads",
	[TND__ROLE_O] = "of output projections",
	[TND__ROLE_COLUMN] = "of gate and up projections",
	[TND__ROLE_GATE_UP] = "of fused gate and up projections",
	[TND__ROLE_ROW] = "of down projections",
	[TND__ROLE_USER] = "of the given rules",
};

static const char *const reason_texts[TND__REASON_COUNT] = {
	[TND__REASON_UNEVEN] = "read whole: the dimension does not divide by the ranks",
	[TND__REASON_HEADS] = "read whole: the heads do not divide by the ranks, or config.json "
			      "does not give their number",
	[TND__REASON_SHAPE] = "read whole: the shape has no such dimension",
	[TND__REASON_BLOCKS] = "read whole: scale blocks do not fit the shape",
	[TND__REASON_BYTES] = "read whole: a slice would begin or end inside a byte",
	[TND__REASON_ROUND_ROBIN] =
		"read whole: round_robin ownership is not contiguous in a fused tensor",
	[TND__REASON_GUESS] = "divided evenly: config.json gives no num_key_value_heads (write a "
			      "rule if heads are shared)",
};

int tnd__shape_warnings(const struct tnd__slicer *slicer, struct tnd__sentences *warnings)
{
	char shown[160];

	for (int role = 0; role < TND__ROLE_COUNT; role++) {
		for (int why = 1; why < TND__REASON_COUNT; why++) {
			const struct tnd__miss *miss = &slicer->misses[role][why];
			const struct tnd_tensor *first = &slicer->tensors[miss->first];
			int rc;

			if (!miss->count)
				continue;
			if (tnd__failpoint("plan.alloc") < 0)
				return -ENOMEM;
			tnd__printable(first->name, first->name_bytes, shown, sizeof(shown));
			rc = tnd__sentences_add(
				warnings, "%" PRIu64 " tensors %s %s; the first is '%s'",
				miss->count, role_texts[role], reason_texts[why], shown);
			if (rc < 0)
				return rc;
		}
	}
	return 0;
}
