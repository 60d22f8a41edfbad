/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rules.c - which values along which dimension a rank keeps
 *
 * The table of docs/design/plan.md. A weight on disk is out x in: "column" modules are cut along
 * out (dimension 0), "row" modules along in (dimension 1); behind the expert dimension of fused
 * tensors both move up by one, and transposed formats (GPTQ, AWQ) swap them. A scale is cut as its
 * weight is, in units of the weight's values that one scale value covers.
 *
 * Invariants: the ranges of all ranks together are the whole dimension; whatever does not divide is
 * whole, with a reason.
 */
#include "plan_internal.h"

#define VOCAB_PAD UINT64_C(64)
#define MX_BLOCK UINT64_C(32)
#define FP8_BLOCK UINT64_C(128)

struct part {
	uint32_t rank, size;
};

static enum tnd__reason whole(struct tnd__ranges *out, enum tnd__reason why)
{
	out->dim = -1;
	out->count = 0;
	return why;
}

static enum tnd__reason one(struct tnd__ranges *out, uint32_t dim, uint64_t start, uint64_t length)
{
	out->dim = (int32_t)dim;
	out->count = 1;
	out->start[0] = start;
	out->length[0] = length;
	return TND__REASON_NONE;
}

static void add(struct tnd__ranges *out, uint64_t start, uint64_t length)
{
	uint32_t last = out->count - 1;

	if (out->count && start <= out->start[last] + out->length[last]) {
		out->length[last] = TND__MAX(out->start[last] + out->length[last], start + length) -
				    out->start[last];
		return;
	}
	out->start[out->count] = start;
	out->length[out->count++] = length;
}

static enum tnd__reason divide(struct tnd__ranges *out, uint32_t dim, uint64_t values,
			       struct part part)
{
	uint64_t each = values / part.size;

	if (values % part.size)
		return whole(out, TND__REASON_UNEVEN);
	return one(out, dim, part.rank * each, each);
}

static uint64_t gcd(uint64_t a, uint64_t b)
{
	while (b) {
		uint64_t rest = a % b;

		a = b;
		b = rest;
	}
	return a;
}

/* The table is padded so that it divides, and the padding is in no file. */
static enum tnd__reason vocab(struct tnd__ranges *out, uint64_t values, struct part part)
{
	uint64_t unit = VOCAB_PAD / gcd(VOCAB_PAD, part.size) * part.size;
	uint64_t padded, each, start;

	if (values > UINT64_MAX - unit)
		return whole(out, TND__REASON_SHAPE);
	padded = (values + unit - 1) / unit * unit;
	each = padded / part.size;
	start = TND__MIN(part.rank * each, values);
	return one(out, 0, start, TND__MIN(each, values - start));
}

/* Query heads, or columns by query heads. */
static enum tnd__reason heads(const struct tnd__slicer *slicer, struct tnd__ranges *out,
			      uint32_t dim, uint64_t values, struct part part)
{
	uint64_t count = slicer->facts.head_count;

	if (count && (values % count || count % part.size))
		return whole(out, TND__REASON_HEADS);
	return divide(out, dim, values, part);
}

/*
 * Which of `count` heads: a block of them, or one that several ranks share. Return: false if they
 * do not divide.
 */
static bool kv_block(uint64_t count, struct part part, uint64_t *ret_first, uint64_t *ret_count)
{
	if (count >= part.size) {
		*ret_count = count / part.size;
		*ret_first = part.rank * *ret_count;
		return count % part.size == 0;
	}
	*ret_count = 1;
	*ret_first = part.rank / (part.size / count);
	return part.size % count == 0;
}

static uint64_t kv_count(const struct tnd__slicer *slicer)
{
	return slicer->facts.kv_head_count ? slicer->facts.kv_head_count : slicer->facts.head_count;
}

static enum tnd__reason kv_heads(const struct tnd__slicer *slicer, struct tnd__ranges *out,
				 uint32_t dim, uint64_t values, struct part part)
{
	uint64_t count = kv_count(slicer), first, kept;
	enum tnd__reason why;

	if (!count) {
		why = divide(out, dim, values, part);
		return why == TND__REASON_NONE ? TND__REASON_GUESS : why;
	}
	if (values % count || !kv_block(count, part, &first, &kept))
		return whole(out, TND__REASON_HEADS);
	return one(out, dim, first * (values / count), kept * (values / count));
}

static enum tnd__reason qkv(const struct tnd__slicer *slicer, struct tnd__ranges *out, uint32_t dim,
			    uint64_t values, struct part part)
{
	uint64_t q = slicer->facts.head_count, kv = kv_count(slicer), each, first, kept;

	if (!q || q > values || kv > (values - q) / 2 || values % (q + 2 * kv) || q % part.size ||
	    !kv_block(kv, part, &first, &kept))
		return whole(out, TND__REASON_HEADS);
	each = values / (q + 2 * kv);
	out->dim = (int32_t)dim;
	out->count = 0;
	add(out, part.rank * (q / part.size) * each, q / part.size * each);
	add(out, (q + first) * each, kept * each);
	add(out, (q + kv + first) * each, kept * each);
	return TND__REASON_NONE;
}

static enum tnd__reason halves(struct tnd__ranges *out, uint32_t dim, uint64_t values,
			       struct part part)
{
	uint64_t half = values / 2, each = half / part.size;

	if (values % 2 || half % part.size)
		return whole(out, TND__REASON_UNEVEN);
	out->dim = (int32_t)dim;
	out->count = 0;
	add(out, part.rank * each, each);
	add(out, half + part.rank * each, each);
	return TND__REASON_NONE;
}

/*
 * gpt-oss: `inner` values in units that are never cut, as many for each rank as the first needs;
 * `scale` is 2 where gate and up alternate, `per` the values of `inner` that one value of the
 * dimension stands for.
 */
struct units {
	uint64_t inner, unit, scale, per;
};

static enum tnd__reason in_units(struct tnd__ranges *out, uint32_t dim, const struct units *cut,
				 struct part part)
{
	uint64_t units = cut->inner / cut->unit;
	uint64_t each = (units + part.size - 1) / part.size * cut->unit;
	uint64_t start = TND__MIN(part.rank * each, cut->inner);
	uint64_t end = TND__MIN(start + each, cut->inner);

	if (cut->inner % cut->unit)
		return whole(out, TND__REASON_BLOCKS);
	return one(out, dim, cut->scale * start / cut->per, cut->scale * (end - start) / cut->per);
}

static enum tnd__reason gpt_oss(struct tnd__ranges *out, const struct tnd_tensor *tensor,
				const struct tnd__name *name, uint32_t out_dim, uint32_t in_dim,
				struct part part)
{
	bool blocks = name->leaf == TND__LEAF_MXFP4;
	uint64_t unit = blocks || (name->leaf == TND__LEAF_BIAS && name->partner != TND__NO_INDEX)
				? MX_BLOCK
				: 1;

	if (name->role == TND__ROLE_ROW) {
		uint64_t per = blocks ? MX_BLOCK : 1;

		if (name->leaf == TND__LEAF_BIAS)
			return whole(out, TND__REASON_NONE);
		if (tensor->dim_count <= in_dim || tensor->shape[in_dim] > UINT64_MAX / per / 4)
			return whole(out, TND__REASON_SHAPE);
		return in_units(out, in_dim,
				&(struct units){tensor->shape[in_dim] * per, unit, 1, per}, part);
	}
	if (tensor->dim_count <= out_dim)
		return whole(out, TND__REASON_SHAPE);
	if (tensor->shape[out_dim] % 2)
		return whole(out, TND__REASON_UNEVEN);
	return in_units(out, out_dim, &(struct units){tensor->shape[out_dim] / 2, unit, 2, 1},
			part);
}

/* Fused weights are [E, out, in] or, in older checkpoints, [E, in, out]; the hidden size tells. */
static bool fused_transposed(const struct tnd__slicer *slicer, const struct tnd_tensor *tensor,
			     const struct tnd__name *name)
{
	uint64_t hidden = slicer->facts.hidden_size;
	uint32_t in = name->role == TND__ROLE_ROW ? 1 : 2;

	if (!hidden || tensor->dim_count < 3 || name->leaf != TND__LEAF_WEIGHT)
		return false;
	return tensor->shape[in] != hidden && tensor->shape[3 - in] == hidden;
}

static enum tnd__reason by_role(const struct tnd__slicer *slicer, const struct tnd_tensor *tensor,
				const struct tnd__name *name, struct part part,
				struct tnd__ranges *out)
{
	bool fused = (name->flags & TND__NAME_F_FUSED) != 0;
	bool row = name->role == TND__ROLE_ROW || name->role == TND__ROLE_O;
	bool swap = name->leaf == TND__LEAF_TRANSPOSED ||
		    (fused && fused_transposed(slicer, tensor, name));
	uint32_t first = fused ? 1 : 0, dim = first + (row != swap);
	uint64_t values;

	if (fused && (name->role == TND__ROLE_GATE_UP || name->role == TND__ROLE_ROW) &&
	    (name->leaf == TND__LEAF_MXFP4 || name->leaf == TND__LEAF_BIAS ||
	     (name->leaf == TND__LEAF_WEIGHT && name->partner != TND__NO_INDEX)))
		return gpt_oss(out, tensor, name, first + swap, first + !swap, part);
	if (name->leaf == TND__LEAF_BIAS && row)
		return whole(out, TND__REASON_NONE);
	if (dim >= tensor->dim_count)
		return whole(out,
			     name->leaf == TND__LEAF_FOLLOW ? TND__REASON_NONE : TND__REASON_SHAPE);
	values = tensor->shape[dim];
	switch (name->role) {
	case TND__ROLE_VOCAB:
		return dim == 0 ? vocab(out, values, part) : divide(out, dim, values, part);
	case TND__ROLE_Q:
	case TND__ROLE_O:
		return heads(slicer, out, dim, values, part);
	case TND__ROLE_KV:
		return kv_heads(slicer, out, dim, values, part);
	case TND__ROLE_QKV:
		return qkv(slicer, out, dim, values, part);
	case TND__ROLE_GATE_UP:
		return halves(out, dim, values, part);
	default:
		return divide(out, dim, values, part);
	}
}

static enum tnd__reason by_user(const struct tnd__slicer *slicer, const struct tnd_tensor *tensor,
				const struct tnd__name *name, struct part part,
				struct tnd__ranges *out)
{
	const struct tnd__rule *rule = &slicer->rules.items[name->rule - 1];
	int64_t dim = rule->dim < 0 ? (int64_t)tensor->dim_count + rule->dim : rule->dim;

	if (rule->whole)
		return whole(out, TND__REASON_NONE);
	if (dim < 0 || dim >= (int64_t)tensor->dim_count)
		return whole(out, TND__REASON_SHAPE);
	return divide(out, (uint32_t)dim, tensor->shape[dim], part);
}

/* Values of the weight that one scale value covers; 0 if the two sizes fit no block. */
static uint64_t block_size(uint64_t weight, uint64_t scale, bool inverse)
{
	if (inverse && (weight + FP8_BLOCK - 1) / FP8_BLOCK == scale)
		return FP8_BLOCK;
	if (weight % scale == 0)
		return weight / scale;
	for (uint64_t block = FP8_BLOCK; block >= 16; block /= 2)
		if ((weight + block - 1) / block == scale)
			return block;
	return 0;
}

static enum tnd__reason follow(const struct tnd_tensor *weight, const struct tnd__ranges *kept,
			       const struct tnd_tensor *scale, bool inverse,
			       struct tnd__ranges *out)
{
	uint64_t values, blocks, block, factor = 1;

	/* One scale for the whole of the sliced dimension: every rank needs it. */
	if (kept->dim < 0 || kept->dim >= (int32_t)scale->dim_count ||
	    scale->shape[kept->dim] <= 1 || weight->shape[kept->dim] == 0)
		return whole(out, TND__REASON_NONE);
	values = weight->shape[kept->dim];
	blocks = scale->shape[kept->dim];
	if (blocks > values) {
		if (blocks % values)
			return whole(out, TND__REASON_BLOCKS);
		factor = blocks / values;
		block = 1;
	} else {
		block = block_size(values, blocks, inverse);
	}
	if (!block)
		return whole(out, TND__REASON_BLOCKS);
	out->dim = kept->dim;
	out->count = 0;
	for (uint32_t i = 0; i < kept->count; i++) {
		uint64_t begin = kept->start[i] / block * factor;
		uint64_t end = (kept->start[i] + kept->length[i] + block - 1) / block * factor;

		add(out, begin, TND__MIN(end, blocks) - begin);
	}
	return TND__REASON_NONE;
}

static bool sliced_by_policy(const struct tnd__slicer *slicer, const struct tnd__name *name)
{
	bool routed = name->expert != TND__NO_INDEX || (name->flags & TND__NAME_F_FUSED);

	if (name->rule)
		return true;
	if (!name->role || !name->leaf || (name->flags & TND__NAME_F_ONE_SCALE))
		return false;
	if (slicer->policy == TND_SLICE_ALL)
		return true;
	return routed && name->leaf != TND__LEAF_BIAS &&
	       (name->role == TND__ROLE_COLUMN || name->role == TND__ROLE_ROW ||
		name->role == TND__ROLE_GATE_UP);
}

enum tnd__reason tnd__rules_ranges(const struct tnd__slicer *slicer, uint32_t index,
				   struct tnd__ranges *ret_ranges)
{
	const struct tnd_tensor *tensor = &slicer->tensors[index];
	const struct tnd__name *name = &slicer->names[index];
	bool routed = name->expert != TND__NO_INDEX || (name->flags & TND__NAME_F_FUSED);
	struct part part = routed ? (struct part){slicer->moe_rank, slicer->moe_size}
				  : (struct part){slicer->tp_rank, slicer->tp_size};
	bool follows = name->leaf == TND__LEAF_FOLLOW && name->partner != TND__NO_INDEX;
	enum tnd__reason why;

	whole(ret_ranges, TND__REASON_NONE);
	if (slicer->policy == TND_SLICE_NONE || part.size == 1 || tensor->bytes == 0)
		return TND__REASON_NONE;
	if (!name->rule && follows) {
		struct tnd__ranges kept;

		/* A weight that had to stay whole says so itself. */
		tnd__rules_ranges(slicer, name->partner, &kept);
		return follow(&slicer->tensors[name->partner], &kept, tensor,
			      name->flags & TND__NAME_F_INVERSE, ret_ranges);
	}
	if (!sliced_by_policy(slicer, name))
		return TND__REASON_NONE;
	why = name->rule ? by_user(slicer, tensor, name, part, ret_ranges)
			 : by_role(slicer, tensor, name, part, ret_ranges);
	if (ret_ranges->dim >= 0 && ret_ranges->count == 1 &&
	    ret_ranges->length[0] == tensor->shape[ret_ranges->dim])
		ret_ranges->dim = -1;
	return why;
}
