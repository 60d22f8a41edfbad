/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_options.c - layout and options checked and completed, the environment read
 *
 *   option given > TUNDISH_TP_SLICE, TUNDISH_SLAB_MB > by layout and budget
 *
 * A wrong option is refused with the field's name. A variable that cannot be understood is only a
 * warning: it may be meant for another program, and every rank of an engine inherits it.
 *
 * Ranks: rank = dp index x tp + tp rank; dense tensors are cut by tp, routed experts by
 * moe_tp = tp x dp / ep, and rank / moe_tp is the part of the experts that a rank owns. A draft
 * phase has no expert filter.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "plan_internal.h"

#define KNOWN_FLAGS                                                                        \
	(TND_PLAN_F_NO_EP_FILTER | TND_PLAN_F_EP_SCALES_ALL | TND_PLAN_F_NO_DEFAULT_SKIP | \
	 TND_PLAN_F_NAMES)
#define RUN_MIN_DEFAULT TND__KIB(64)

static int warn(struct tnd_plan *plan, const char *variable, const char *text, const char *expected)
{
	char shown[64];

	if (tnd__failpoint("plan.alloc") < 0)
		return -ENOMEM;
	return tnd__sentences_add(
		&plan->warnings, "%s: expected %s, found '%s'; the default is used", variable,
		expected, tnd__printable(text, strlen(text), shown, sizeof(shown)));
}

static int take_layout(const struct tnd_layout *layout, struct tnd_plan *plan,
		       struct tnd_error *reterr)
{
	struct tnd_layout *own = &plan->layout;
	uint64_t ranks;

	own->struct_bytes = sizeof(*own);
	if (layout) {
		if (!tnd__struct_ok(layout->struct_bytes, sizeof(*layout), sizeof(*layout)) ||
		    layout->reserved)
			return tnd__fail_plain(reterr, TND_E_INVALID,
					       "struct tnd_layout: expected struct_bytes %zu and "
					       "reserved 0, found %u and %u",
					       sizeof(*layout), layout->struct_bytes,
					       layout->reserved);
		*own = *layout;
		if (plan->choice.of_union)
			own->rank = 0;
	}
	own->tp_size = TND__MAX(own->tp_size, 1);
	own->dp_size = TND__MAX(own->dp_size, 1);
	own->ep_size = TND__MAX(own->ep_size, 1);
	ranks = (uint64_t)own->tp_size * own->dp_size;
	if (ranks > INT32_MAX)
		return tnd__fail_plain(reterr, TND_E_LAYOUT,
				       "expected at most %d ranks, found tp %u x dp %u", INT32_MAX,
				       own->tp_size, own->dp_size);
	if (ranks % own->ep_size)
		return tnd__fail_plain(reterr, TND_E_LAYOUT,
				       "expected an ep_size that divides tp %u x dp %u, found %u; "
				       "choose a divisor",
				       own->tp_size, own->dp_size, own->ep_size);
	if (own->rank >= ranks)
		return tnd__fail_plain(reterr, TND_E_LAYOUT,
				       "expected a rank below tp %u x dp %u, found %u",
				       own->tp_size, own->dp_size, own->rank);
	return 0;
}

static int refuse(struct tnd_error *reterr, const char *field, uint64_t value)
{
	return tnd__fail_plain(reterr, TND_E_INVALID,
			       "struct tnd_plan_opts: '%s' has no value %llu; see <tundish/plan.h>",
			       field, (unsigned long long)value);
}

static int check(const struct tnd_plan_opts *opts, struct tnd_error *reterr)
{
	if (opts->flags & ~KNOWN_FLAGS)
		return refuse(reterr, "flags", opts->flags);
	if (opts->phase > TND_PHASE_DRAFT)
		return refuse(reterr, "phase", opts->phase);
	if (opts->slice > TND_SLICE_ALL)
		return refuse(reterr, "slice", opts->slice);
	if (opts->packing > TND_PACKING_FILE)
		return refuse(reterr, "packing", opts->packing);
	if (opts->oversize > TND_OVERSIZE_OVERRUN)
		return refuse(reterr, "oversize", opts->oversize);
	if (opts->placement > TND_PLACEMENT_ROUND_ROBIN)
		return refuse(reterr, "placement", opts->placement);
	if (opts->align > TND__PAGE || (opts->align & (opts->align - 1)))
		return refuse(reterr, "align", opts->align);
	if (opts->slab_bytes < TND_SLAB_NONE)
		return refuse(reterr, "slab_bytes", (uint64_t)opts->slab_bytes);
	if ((opts->skip_count && !opts->skip) || (opts->name_count && !opts->names))
		return tnd__fail_plain(reterr, TND_E_INVALID,
				       "struct tnd_plan_opts: a count of names or skip patterns "
				       "without the list");
	if ((opts->name_count || opts->want) && !(opts->flags & TND_PLAN_F_NAMES))
		return tnd__fail_plain(reterr, TND_E_INVALID,
				       "struct tnd_plan_opts: names or want without "
				       "TND_PLAN_F_NAMES; set the flag");
	return 0;
}

/* Policy: the option, else the environment, else by the layout. */
static int take_policy(const struct tnd_plan_opts *opts, struct tnd_plan *plan,
		       struct tnd__slicer *slicer)
{
	const char *text = opts->slice == TND_SLICE_AUTO ? getenv("TUNDISH_TP_SLICE") : NULL;
	int rc = 0;

	slicer->policy = opts->slice;
	if (text && *text) {
		if (strcmp(text, "1") == 0 || strcasecmp(text, "on") == 0)
			slicer->policy = TND_SLICE_EXPERTS;
		else if (strcmp(text, "0") == 0 || strcasecmp(text, "off") == 0)
			slicer->policy = TND_SLICE_NONE;
		else if (strcasecmp(text, "auto") != 0)
			rc = warn(plan, "TUNDISH_TP_SLICE", text, "auto, 1, on, 0 or off");
	}
	if (slicer->policy == TND_SLICE_AUTO)
		slicer->policy = plan->layout.ep_size == 1 && slicer->moe_size > 1
					 ? TND_SLICE_EXPERTS
					 : TND_SLICE_NONE;
	return rc;
}

static int take_slab(const struct tnd_plan_opts *opts, struct tnd_plan *plan)
{
	struct tnd__plan_choice *choice = &plan->choice;
	const char *text = getenv("TUNDISH_SLAB_MB");
	uint64_t bytes;

	if (opts->slab_bytes == TND_SLAB_NONE) {
		choice->slab_given = true;
		return 0;
	}
	if (opts->slab_bytes > 0) {
		choice->slab_given = true;
		choice->slab_bytes = TND__MIB(1);
		while (choice->slab_bytes <= (uint64_t)opts->slab_bytes / 2)
			choice->slab_bytes *= 2;
		return 0;
	}
	if (!text || !*text)
		return 0;
	if (tnd_slab_mb_parse(text, &bytes) < 0)
		return warn(plan, "TUNDISH_SLAB_MB", text, "a number of MiB");
	choice->slab_given = true;
	choice->slab_bytes = bytes;
	return 0;
}

static int take_budget(const struct tnd_plan_opts *opts, struct tnd_plan *plan,
		       struct tnd_error *reterr)
{
	int rc = 0;

	plan->choice.budget_bytes = opts->budget_bytes;
	if (!opts->budget_bytes)
		rc = tnd_budget_default(
			plan->choice.of_union ? 1 : plan->layout.tp_size * plan->layout.dp_size,
			&plan->choice.budget_bytes);
	if (rc < 0)
		return tnd__fail_plain(reterr, rc,
				       "the machine's memory cannot be read (%s); give a budget",
				       tnd_strerror(rc));
	if (plan->choice.budget_bytes > INT64_MAX)
		return refuse(reterr, "budget_bytes", opts->budget_bytes);
	plan->node_budget_bytes = plan->choice.budget_bytes;
	return 0;
}

void tnd__slicer_rank(struct tnd__slicer *slicer, uint32_t rank)
{
	slicer->tp_rank = rank % slicer->tp_size;
	slicer->moe_rank = rank % slicer->moe_size;
	slicer->ep_rank = slicer->ep_size > 1 ? rank / slicer->moe_size : 0;
}

static void take_slicer(const struct tnd_plan_opts *opts, struct tnd_plan *plan,
			struct tnd__slicer *slicer)
{
	const struct tnd_layout *layout = &plan->layout;
	bool filter = layout->ep_size > 1 && opts->phase != TND_PHASE_DRAFT &&
		      !(opts->flags & TND_PLAN_F_NO_EP_FILTER);
	uint64_t draft;

	slicer->phase = opts->phase;
	slicer->placement = opts->placement;
	slicer->all_scales = (opts->flags & TND_PLAN_F_EP_SCALES_ALL) != 0;
	slicer->tp_size = layout->tp_size;
	slicer->moe_size = layout->tp_size * layout->dp_size / layout->ep_size;
	slicer->ep_size = filter ? layout->ep_size : 1;
	tnd__slicer_rank(slicer, layout->rank);
	slicer->experts[0] = tnd_checkpoint_experts(plan->checkpoint, &draft);
	if (opts->expert_count)
		slicer->experts[0] = opts->expert_count;
	slicer->experts[1] = draft == TND_EXPERTS_UNKNOWN ||
					     (opts->expert_count && opts->phase == TND_PHASE_DRAFT)
				     ? slicer->experts[0]
				     : draft;
	slicer->run_min_bytes = opts->run_min_bytes ? opts->run_min_bytes : RUN_MIN_DEFAULT;
	/* Below a page nothing is saved: whole blocks are read anyway. */
	slicer->run_min_bytes = TND__MAX(slicer->run_min_bytes, TND__PAGE);
	plan->totals.run_min_bytes = slicer->run_min_bytes;
}

int tnd__plan_options(const struct tnd_layout *layout, const struct tnd_plan_opts *opts,
		      struct tnd_plan *plan, struct tnd__slicer *slicer, struct tnd_error *reterr)
{
	int rc = check(opts, reterr);

	if (rc == 0)
		rc = take_layout(layout, plan, reterr);
	if (rc < 0)
		return rc;
	plan->phase = opts->phase;
	plan->choice.packing = opts->packing ? opts->packing : TND_PACKING_FILE;
	plan->choice.oversize = opts->oversize;
	plan->choice.align = opts->align;
	take_slicer(opts, plan, slicer);
	slicer->facts.struct_bytes = sizeof(slicer->facts);
	rc = tnd_checkpoint_facts(plan->checkpoint, &slicer->facts);
	if (rc == 0)
		rc = take_policy(opts, plan, slicer);
	if (rc == 0)
		rc = take_slab(opts, plan);
	if (rc == 0)
		rc = take_budget(opts, plan, reterr);
	plan->totals.slice = slicer->policy;
	plan->totals.packing = plan->choice.packing;
	return rc;
}
