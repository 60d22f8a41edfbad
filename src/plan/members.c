/* SPDX-License-Identifier: Apache-2.0 */
/*
 * members.c - what the reader of a union and each of its members work out by themselves, alike
 *
 *   node's budget = reader's budget (what the union plan is made for) + the ring of its channel
 *                 + for each member: its tables, and staging for slices that it has to gather
 *
 * A member's share follows from the number of its tensors and its largest gathered slice: both
 * sides know these without asking.
 *
 * Invariants: the reader's budget and all shares together are at most the node's; with a larger
 * node's budget the reader's is never smaller, so that no budget is refused where a smaller one is
 * accepted. Shares grow in steps of a page where the node's budget grows by STEP for each member;
 * the reader's stands still for the last page of each of these.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include <tundish/share.h>

#include "plan_internal.h"

/* A member's state of a load: index, view, place in the slab; for each tensor. */
#define STATE_BYTES 64
#define STAGING_MIN TND__MIB(16)
/* All staging together: one part in so many of the node's budget. */
#define STAGING_PART 8
#define STEP (STAGING_PART * TND__PAGE)
#define PIECE_MIN TND__MIB(1)

/* -- who -- */

static int compare_ranks(const void *a, const void *b)
{
	const struct tnd_plan_member *left = a, *right = b;

	return left->rank < right->rank ? -1 : left->rank > right->rank;
}

int tnd__members_take(struct tnd_plan *plan, const uint32_t *members, size_t member_count,
		      struct tnd_error *reterr)
{
	uint32_t ranks = plan->layout.tp_size * plan->layout.dp_size;
	size_t count = members ? member_count : ranks;

	if (!count || count > TND_SHARE_MEMBERS_MAX)
		return tnd__fail_plain(reterr, TND_E_LAYOUT,
				       "expected 1 to %d members for one reader, found %zu; plan "
				       "for the ranks of one node",
				       TND_SHARE_MEMBERS_MAX, count);
	plan->members = tnd__plan_alloc(count, sizeof(*plan->members));
	if (!plan->members)
		return -ENOMEM;
	plan->member_count = count;
	for (size_t i = 0; i < count; i++) {
		plan->members[i].rank = members ? members[i] : (uint32_t)i;
		if (plan->members[i].rank >= ranks)
			return tnd__fail_plain(reterr, TND_E_LAYOUT,
					       "expected members below tp %u x dp %u, found %u",
					       plan->layout.tp_size, plan->layout.dp_size,
					       plan->members[i].rank);
	}
	qsort(plan->members, count, sizeof(*plan->members), compare_ranks);
	for (size_t i = 1; i < count; i++)
		if (plan->members[i].rank == plan->members[i - 1].rank)
			return tnd__fail_plain(reterr, TND_E_LAYOUT,
					       "expected each member once, found %u twice",
					       plan->members[i].rank);
	return 0;
}

size_t tnd_plan_members(const struct tnd_plan *plan, const struct tnd_plan_member **ret_members)
{
	*ret_members = plan->members;
	return plan->member_count;
}

/* -- which slices are gathered -- */

bool tnd__plan_one_run(const struct tnd_plan_item *item, uint64_t *ret_begin, uint64_t *ret_end)
{
	uint32_t last = item->part_count - 1;
	uint64_t begin = item->part_begin[0], end = item->part_begin[last] + item->part_bytes[last];

	for (uint32_t i = 0; i < last; i++)
		if (item->part_begin[i] + item->part_bytes[i] != item->part_begin[i + 1])
			return false;
	if (item->row_count > 1 && end - begin != item->row_bytes)
		return false;
	*ret_begin = item->file_offset + begin;
	*ret_end = item->file_offset + (item->row_count - 1) * item->row_bytes + end;
	return true;
}

/* Whether a run from `begin` on can be used where the reader put it. */
static bool lies_well(const struct tnd_plan *plan, const struct tnd_tensor *tensor, uint64_t begin)
{
	uint32_t bits = tnd_dtype_bits(tensor->dtype);
	uint64_t unit = bits % 8 ? 1 : bits / 8;

	if (plan->choice.packing == TND_PACKING_FILE)
		return begin % TND__MAX(unit, plan->choice.align) == 0;
	/*
	 * At 4 KiB stands the first byte that any member needs: whole elements before ours, but how
	 * many is the union's affair. If ours is the tensor's first byte it is that one.
	 */
	return begin == tensor->offset || plan->choice.align <= unit;
}

bool tnd__plan_gathers(const struct tnd_plan *plan, const struct tnd_plan_item *item)
{
	uint64_t begin, end;

	return item->kept_bytes &&
	       (!tnd__plan_one_run(item, &begin, &end) || !lies_well(plan, item->tensor, begin));
}

static void count_slice(struct tnd_plan_member *member, uint64_t bytes, bool gathered)
{
	member->tensors++;
	member->kept_bytes += bytes;
	if (!gathered)
		return;
	member->gathered_bytes += bytes;
	member->gather_bytes = TND__MAX(member->gather_bytes, bytes);
}

void tnd__members_count(const struct tnd_plan *plan, const struct tnd_plan_item *item,
			struct tnd_plan_member *member)
{
	count_slice(member, item->slice_bytes, tnd__plan_gathers(plan, item));
}

/* The pieces of one tensor, which were one run before if each is and they adjoin. */
static bool pieces_gather(const struct tnd_plan *plan, const struct tnd_plan_item *first,
			  const struct tnd_plan_item *end)
{
	uint64_t begin, at, last;

	if (!tnd__plan_one_run(first, &begin, &last))
		return true;
	for (const struct tnd_plan_item *item = first + 1; item < end; item++)
		if (!tnd__plan_one_run(item, &at, &last) || at != begin + item->piece_offset)
			return true;
	return !lies_well(plan, first->tensor, begin);
}

void tnd__plan_as_member(const struct tnd_plan *plan, uint32_t member_count, uint64_t node_bytes,
			 struct tnd_plan_member *ret_member)
{
	const struct tnd_plan_item *end = plan->items + plan->item_count, *next;

	*ret_member = (struct tnd_plan_member){.rank = plan->layout.rank};
	for (const struct tnd_plan_item *item = plan->items; item < end; item = next) {
		for (next = item + 1; next < end && next->tensor == item->tensor;)
			next++;
		count_slice(ret_member, item->slice_bytes,
			    item->slice_bytes && pieces_gather(plan, item, next));
	}
	tnd__plan_set_aside(plan, member_count, node_bytes, ret_member);
}

/* -- the budget -- */

void tnd__plan_set_aside(const struct tnd_plan *plan, uint32_t member_count, uint64_t node_bytes,
			 struct tnd_plan_member *member)
{
	uint64_t gather = member->gather_bytes, least = gather, want, part;

	member->metadata_bytes = tnd_checkpoint_memory_bytes(plan->checkpoint) + sizeof(*plan) +
				 plan->tensor_count * sizeof(*plan->first_item) +
				 member->tensors * (sizeof(*plan->items) + STATE_BYTES);
	member->staging_bytes = 0;
	if (!gather)
		return;
	/* Larger ones are cut, or gathered over the budget and counted. */
	if (plan->choice.oversize != TND_OVERSIZE_REFUSE)
		least = TND__MIN(gather, PIECE_MIN);
	want = tnd__round_up(TND__MAX(2 * gather, STAGING_MIN), TND__HUGE);
	part = tnd__round_down(node_bytes / STAGING_PART / member_count, TND__PAGE);
	member->staging_bytes = TND__MIN(want, TND__MAX(part, tnd__round_up(least, TND__PAGE)));
}

/* What a node's budget leaves to the reader. */
static uint64_t reader_bytes(const struct tnd_plan *plan, uint64_t node_bytes)
{
	uint32_t count = (uint32_t)plan->member_count;
	uint64_t above = node_bytes % (count * STEP);
	uint64_t left = node_bytes - above + TND__MIN(above, count * (STEP - TND__PAGE));

	if (left <= TND__RING_BYTES)
		return 0;
	left -= TND__RING_BYTES;
	for (size_t i = 0; i < count; i++) {
		struct tnd_plan_member member = plan->members[i];
		uint64_t aside;

		tnd__plan_set_aside(plan, count, node_bytes, &member);
		aside = member.metadata_bytes + member.staging_bytes;
		if (aside >= left)
			return 0;
		left -= aside;
	}
	return left;
}

void tnd__members_set_aside(struct tnd_plan *plan)
{
	if (!plan->choice.of_union)
		return;
	for (size_t i = 0; i < plan->member_count; i++)
		tnd__plan_set_aside(plan, (uint32_t)plan->member_count, plan->node_budget_bytes,
				    &plan->members[i]);
	plan->choice.budget_bytes = reader_bytes(plan, plan->node_budget_bytes);
}

uint64_t tnd__members_least(const struct tnd_plan *plan, uint64_t bytes)
{
	uint64_t low = bytes, high = INT64_MAX;

	if (!plan->choice.of_union)
		return bytes;
	while (low < high) {
		uint64_t middle = low + (high - low) / 2;

		if (reader_bytes(plan, middle) >= bytes)
			high = middle;
		else
			low = middle + 1;
	}
	return low;
}

uint64_t tnd__plan_node_budget(const struct tnd_plan *plan)
{
	return plan->node_budget_bytes;
}

/* -- kin -- */

static void hash_tensors(XXH64_state_t *state, const struct tnd__slicer *slicer)
{
	for (size_t i = 0; i < slicer->count; i++) {
		const struct tnd_tensor *tensor = &slicer->tensors[i];
		const uint64_t place[] = {tensor->offset, tensor->bytes,
					  (uint64_t)tensor->file << 32 | tensor->dtype,
					  (uint64_t)tensor->name_bytes << 32 | tensor->dim_count};

		XXH64_update(state, place, sizeof(place));
		XXH64_update(state, tensor->shape, tensor->dim_count * sizeof(*tensor->shape));
		XXH64_update(state, tensor->name, tensor->name_bytes);
	}
}

int tnd__members_kin(struct tnd_plan *plan, const struct tnd__slicer *slicer, uint32_t flags)
{
	const struct tnd_model_facts *facts = &slicer->facts;
	const uint64_t inputs[] = {
		plan->layout.tp_size,
		plan->layout.dp_size,
		plan->layout.ep_size,
		slicer->ep_size,
		slicer->phase,
		slicer->policy,
		slicer->placement,
		slicer->all_scales,
		slicer->experts[0],
		slicer->experts[1],
		slicer->run_min_bytes,
		flags,
		plan->choice.packing,
		plan->choice.align,
		plan->choice.oversize,
		slicer->count,
		slicer->rules.count,
		facts->head_count,
		facts->kv_head_count,
		facts->head_dim,
		facts->hidden_size,
		facts->vocab_size,
		facts->intermediate_size,
		facts->moe_intermediate_size,
	};
	XXH64_state_t *state = tnd__failpoint("plan.alloc") == 0 ? XXH64_createState() : NULL;

	if (!state)
		return -ENOMEM;
	XXH64_reset(state, 0);
	XXH64_update(state, inputs, sizeof(inputs));
	XXH64_update(state, slicer->names, slicer->count * sizeof(*slicer->names));
	for (size_t i = 0; i < slicer->rules.count; i++) {
		const struct tnd__rule *rule = &slicer->rules.items[i];
		const int64_t what[] = {rule->dim, rule->whole};

		/* Which names it is for, the names say. */
		XXH64_update(state, what, sizeof(what));
	}
	hash_tensors(state, slicer);
	plan->kin = XXH64_digest(state);
	XXH64_freeState(state);
	return 0;
}

uint64_t tnd__plan_kin(const struct tnd_plan *plan)
{
	return plan->kin;
}
