/* SPDX-License-Identifier: Apache-2.0 */
/* experts.c - expert counts against names, and which rank reads which expert */
#include <errno.h>
#include <inttypes.h>

#include "plan_internal.h"

void tnd__experts_block(uint64_t count, uint32_t parts, uint32_t index, uint64_t *ret_first,
			uint64_t *ret_count)
{
	uint64_t each = count / parts, rest = count % parts;

	*ret_first = index * each + TND__MIN(index, rest);
	*ret_count = each + (index < rest);
}

static bool owns(const struct tnd__slicer *slicer, uint64_t count, uint64_t expert)
{
	uint64_t first, kept;

	if (slicer->placement == TND_PLACEMENT_ROUND_ROBIN)
		return expert % slicer->ep_size == slicer->ep_rank;
	tnd__experts_block(count, slicer->ep_size, slicer->ep_rank, &first, &kept);
	return expert >= first && expert - first < kept;
}

bool tnd__experts_planned(const struct tnd__slicer *slicer, uint32_t index)
{
	uint8_t flags = slicer->names[index].flags;
	bool draft = (flags & TND__NAME_F_DRAFT) != 0;

	if (flags & TND__NAME_F_LEFT_OUT)
		return false;
	return slicer->phase == TND_PHASE_ALL || draft == (slicer->phase == TND_PHASE_DRAFT);
}

bool tnd__experts_keeps(const struct tnd__slicer *slicer, uint32_t index)
{
	const struct tnd__name *name = &slicer->names[index];

	if (!tnd__experts_planned(slicer, index))
		return false;
	if (slicer->ep_size == 1 || name->expert == TND__NO_INDEX ||
	    (name->flags & TND__NAME_F_ONE_SCALE) ||
	    (slicer->all_scales && (name->flags & TND__NAME_F_SCALE)))
		return true;
	return owns(slicer, slicer->experts[(name->flags & TND__NAME_F_DRAFT) != 0], name->expert);
}

/* What the names of one stack say, and where its count comes from. */
struct stack {
	uint64_t routed; /* highest number + 1 */
	uint64_t fused;  /* dimension 0 */
	uint32_t last;   /* tensor with the highest number */
	uint64_t tensors;
	const char *name, *source;
	uint64_t count; /* or TND_EXPERTS_UNKNOWN */
	bool own_count; /* not lent by the other stack */
};

static void look(const struct tnd__slicer *slicer, struct stack stacks[2])
{
	for (uint32_t i = 0; i < slicer->count; i++) {
		const struct tnd__name *name = &slicer->names[i];
		struct stack *stack = &stacks[(name->flags & TND__NAME_F_DRAFT) != 0];

		stack->tensors++;
		if (name->flags & TND__NAME_F_FUSED)
			stack->fused = TND__MAX(stack->fused, slicer->tensors[i].shape[0]);
		if (name->expert == TND__NO_INDEX || name->expert < stack->routed)
			continue;
		stack->routed = (uint64_t)name->expert + 1;
		stack->last = i;
	}
}

static int check_stack(const struct tnd__slicer *slicer, const struct tnd_checkpoint *checkpoint,
		       const struct stack *stack, struct tnd__sentences *warnings,
		       struct tnd_error *reterr)
{
	uint64_t count = stack->count;
	uint64_t seen = stack->routed ? stack->routed : stack->fused;

	if (count == TND_EXPERTS_UNKNOWN) {
		if (slicer->ep_size == 1 || !stack->routed)
			return 0;
		return tnd__fail_plain(reterr, TND_E_EXPERTS,
				       "expected an expert count for ep_size %u, found none in "
				       "config.json and %" PRIu64 " experts in the names of the %s "
				       "stack; give it with --experts",
				       slicer->ep_size, seen, stack->name);
	}
	/*
	 * A count that is only lent by the other stack decides nothing unless ownership hangs on
	 * it.
	 */
	if (stack->routed > count && (stack->own_count || slicer->ep_size > 1)) {
		const struct tnd_tensor *tensor = &slicer->tensors[stack->last];
		const struct tnd_file *files = tnd_checkpoint_files(checkpoint, &(size_t){0});
		struct tnd__where where = {.file = files[tensor->file].name,
					   .name = tensor->name,
					   .name_bytes = tensor->name_bytes};

		return tnd__fail(reterr, TND_E_EXPERTS, &where,
				 "expected expert numbers below %" PRIu64 " (%s), found %" PRIu64
				 "; correct the count with --experts",
				 count, stack->source, stack->routed - 1);
	}
	if (seen == count || !stack->tensors || (!seen && !stack->own_count))
		return 0;
	if (tnd__failpoint("plan.alloc") < 0)
		return -ENOMEM;
	return tnd__sentences_add(warnings,
				  "the %s stack has %" PRIu64 " experts by %s and %" PRIu64
				  " by its tensor names",
				  stack->name, count, stack->source, seen);
}

int tnd__experts_check(const struct tnd__slicer *slicer, const struct tnd_checkpoint *checkpoint,
		       bool given, struct tnd__sentences *warnings, struct tnd_error *reterr)
{
	struct stack stacks[2] = {{0}};
	uint64_t draft_count;

	tnd_checkpoint_experts(checkpoint, &draft_count);
	look(slicer, stacks);
	for (int draft = 0; draft < 2; draft++) {
		struct stack *stack = &stacks[draft];
		bool override = given && (!draft || slicer->phase == TND_PHASE_DRAFT ||
					  draft_count == TND_EXPERTS_UNKNOWN);
		int rc;

		if (slicer->phase != TND_PHASE_ALL && draft != (slicer->phase == TND_PHASE_DRAFT))
			continue;
		stack->name = draft ? "draft" : "target";
		stack->source = override ? "--experts" : "config.json";
		stack->count = slicer->experts[draft];
		stack->own_count = !draft || draft_count != TND_EXPERTS_UNKNOWN ||
				   (given && slicer->phase == TND_PHASE_DRAFT);
		rc = check_stack(slicer, checkpoint, stack, warnings, reterr);
		if (rc < 0)
			return rc;
	}
	return 0;
}
