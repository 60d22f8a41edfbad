/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.c - making a plan, and looking at it
 *
 *   options -> names -> expert counts -> items -> slabs, pieces, costs
 *
 * One item for each tensor that this rank keeps, or for a union some member, in delivery order.
 *
 * Delivery order: packing name: the checkpoint's (files, then names, in byte order); packing file:
 * tensors of a file by offset, zero-size ones first.
 *
 * References: U1, the drop of one, pairs with itself: what other users read is read before the last
 * one frees it.
 *
 * A plan does not change once it is made. It holds a reference to its checkpoint, and loads hold
 * references to it.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint/parts.h"
#include "plan_internal.h"

void *tnd__plan_alloc(size_t count, size_t bytes)
{
	if (tnd__failpoint("plan.alloc") < 0)
		return NULL;
	return calloc(count ? count : 1, bytes);
}

int tnd__plan_reserve(void *array_pointer, size_t *capacity, size_t need, size_t element_bytes)
{
	if (need <= *capacity)
		return 0;
	if (tnd__failpoint("plan.alloc") < 0)
		return -ENOMEM;
	return tnd__reserve(array_pointer, capacity, need, element_bytes);
}

/* -- order -- */

static int compare_offsets(const void *a, const void *b, void *arg)
{
	const struct tnd_tensor *tensors = arg;
	uint32_t i = *(const uint32_t *)a, k = *(const uint32_t *)b;
	const struct tnd_tensor *left = &tensors[i], *right = &tensors[k];

	if (!left->bytes != !right->bytes)
		return left->bytes ? 1 : -1;
	if (left->bytes && left->offset != right->offset)
		return left->offset < right->offset ? -1 : 1;
	return i < k ? -1 : i > k;
}

void tnd__plan_sort(const struct tnd_plan *plan, const struct tnd__slicer *slicer, uint32_t *order,
		    size_t count)
{
	if (plan->choice.packing != TND_PACKING_FILE)
		return;
	for (size_t begin = 0, end; begin < count; begin = end) {
		uint32_t file = slicer->tensors[order[begin]].file;
		bool sorted = true;

		for (end = begin + 1; end < count && slicer->tensors[order[end]].file == file;
		     end++)
			sorted = sorted && compare_offsets(&order[end - 1], &order[end],
							   (void *)slicer->tensors) < 0;
		if (!sorted)
			qsort_r(order + begin, end - begin, sizeof(*order), compare_offsets,
				(void *)slicer->tensors);
	}
}

/* -- items -- */

static int make_items(struct tnd_plan *plan, struct tnd__slicer *slicer)
{
	uint32_t *order = tnd__plan_alloc(slicer->count, sizeof(*order));
	size_t count = 0;

	if (!order)
		return -ENOMEM;
	for (uint32_t i = 0; i < slicer->count; i++)
		if (tnd__experts_keeps(slicer, i))
			order[count++] = i;
	tnd__plan_sort(plan, slicer, order, count);
	plan->items = tnd__plan_alloc(count, sizeof(*plan->items));
	if (!plan->items) {
		free(order);
		return -ENOMEM;
	}
	plan->item_count = plan->item_capacity = count;
	for (size_t i = 0; i < count; i++)
		tnd__shape_item(slicer, order[i], &plan->items[i]);
	free(order);
	return 0;
}

static void count_items(struct tnd_plan *plan, const struct tnd__slicer *slicer)
{
	struct tnd_plan_totals *totals = &plan->totals;
	uint32_t file = UINT32_MAX;
	size_t file_count;

	tnd_checkpoint_files(plan->checkpoint, &file_count);
	totals->tensors = plan->item_count;
	totals->skipped = plan->tensor_count - plan->item_count;
	for (size_t i = 0; i < plan->item_count; i++) {
		const struct tnd_plan_item *item = &plan->items[i];

		totals->sliced += item->dim >= 0;
		totals->read_bytes += item->read_bytes;
		totals->kept_bytes += item->kept_bytes;
		totals->shards_opened += item->tensor->file != file;
		file = item->tensor->file;
	}
	totals->shards_skipped = file_count - totals->shards_opened;
	if (plan->choice.of_union) {
		plan->node_read_bytes = totals->read_bytes;
		return;
	}
	/*
	 * Every rule's ranges cover the dimension and every expert has an owner, so the ranks
	 * together read each planned tensor whole.
	 */
	for (uint32_t i = 0; i < slicer->count; i++)
		if (tnd__experts_planned(slicer, i))
			plan->node_read_bytes += slicer->tensors[i].bytes;
}

static void index_items(struct tnd_plan *plan, const struct tnd__slicer *slicer)
{
	for (size_t i = 0; i < plan->tensor_count; i++)
		plan->first_item[i] = TND__NO_INDEX;
	for (size_t i = plan->item_count; i-- > 0;)
		plan->first_item[plan->items[i].tensor - slicer->tensors] = (uint32_t)i;
}

/* What the caller gave. */
struct request {
	const struct tnd_layout *layout;
	const struct tnd_plan_opts *opts;
	const uint32_t *members;
	size_t member_count;
	bool of_union;
};

static int fill(struct tnd_plan *plan, struct tnd__slicer *slicer, const struct request *request,
		struct tnd_error *reterr)
{
	const struct tnd_plan_opts *opts = request->opts;
	int rc = tnd__plan_options(request->layout, opts, plan, slicer, reterr);

	if (rc == 0 && request->of_union)
		rc = tnd__members_take(plan, request->members, request->member_count, reterr);
	if (rc == 0)
		rc = tnd__user_rules_parse(opts->rules, opts->rules_name, &slicer->rules, reterr);
	if (rc == 0)
		rc = tnd__names_classify(slicer, plan->checkpoint, opts, &plan->warnings);
	if (rc == 0)
		rc = tnd__experts_check(slicer, plan->checkpoint, opts->expert_count != 0,
					&plan->warnings, reterr);
	if (rc == 0)
		rc = request->of_union ? tnd__union_items(plan, slicer) : make_items(plan, slicer);
	if (rc == 0)
		rc = tnd__members_kin(plan, slicer, opts->flags);
	if (rc < 0)
		return rc;
	plan->first_item = tnd__plan_alloc(plan->tensor_count, sizeof(*plan->first_item));
	if (!plan->first_item)
		return -ENOMEM;
	count_items(plan, slicer);
	tnd__members_set_aside(plan);
	rc = tnd__shape_warnings(slicer, &plan->warnings);
	if (rc == 0)
		rc = request->of_union ? tnd__union_fit(plan, slicer, reterr)
				       : tnd__plan_fit(plan, reterr);
	if (rc == 0)
		index_items(plan, slicer);
	return rc;
}

static int create(struct tnd_checkpoint *checkpoint, struct request request,
		  struct tnd_plan **ret_plan, struct tnd_error *reterr)
{
	static const struct tnd_plan_opts defaults = {.struct_bytes = sizeof(defaults)};
	struct tnd__slicer slicer = {0};
	struct tnd_plan *plan;
	int rc;

	if (!request.opts)
		request.opts = &defaults;
	if (!checkpoint || !ret_plan ||
	    !tnd__struct_ok(request.opts->struct_bytes, sizeof(defaults), sizeof(defaults)))
		return tnd__fail_plain(reterr, TND_E_INVALID,
				       "%s: expected a checkpoint, a place for the plan, and "
				       "options of %zu bytes; set struct_bytes to their size",
				       request.of_union ? "tnd_plan_create_union"
							: "tnd_plan_create",
				       sizeof(defaults));
	plan = tnd__plan_alloc(1, sizeof(*plan));
	if (!plan)
		return tnd__fail_plain(reterr, -ENOMEM, "no memory for the plan");
	atomic_init(&plan->references, 1);
	plan->checkpoint = tnd__checkpoint_ref(checkpoint);
	slicer.tensors = tnd_checkpoint_tensors(checkpoint, &slicer.count);
	plan->tensor_count = slicer.count;
	plan->choice.of_union = request.of_union;
	rc = fill(plan, &slicer, &request, reterr);
	free(slicer.names);
	tnd__user_rules_free(&slicer.rules);
	if (rc < 0) {
		tnd_plan_close(plan);
		return rc == -ENOMEM ? tnd__fail_plain(reterr, rc, "no memory for the plan") : rc;
	}
	*ret_plan = plan;
	return 0;
}

int tnd_plan_create(struct tnd_checkpoint *checkpoint, const struct tnd_layout *layout,
		    const struct tnd_plan_opts *opts, struct tnd_plan **ret_plan,
		    struct tnd_error *reterr)
{
	return create(checkpoint, (struct request){.layout = layout, .opts = opts}, ret_plan,
		      reterr);
}

int tnd_plan_create_union(struct tnd_checkpoint *checkpoint, const struct tnd_layout *layout,
			  const uint32_t *members, size_t member_count,
			  const struct tnd_plan_opts *opts, struct tnd_plan **ret_plan,
			  struct tnd_error *reterr)
{
	return create(checkpoint,
		      (struct request){.layout = layout,
				       .opts = opts,
				       .members = members,
				       .member_count = member_count,
				       .of_union = true},
		      ret_plan, reterr);
}

void tnd__plan_ref(struct tnd_plan *plan)
{
	/* Relaxed, no partner: who takes a reference has one already. */
	atomic_fetch_add_explicit(&plan->references, 1, memory_order_relaxed);
}

void tnd_plan_close(struct tnd_plan *plan)
{
	/* U1: pairs with itself. */
	if (!plan || atomic_fetch_sub_explicit(&plan->references, 1, memory_order_acq_rel) != 1)
		return;
	tnd_checkpoint_close(plan->checkpoint);
	free(plan->items);
	free(plan->slabs);
	free(plan->images);
	free(plan->image_first);
	free(plan->first_item);
	free(plan->members);
	tnd__sentences_free(&plan->warnings);
	free(plan);
}

/* -- looking -- */

int tnd_plan_totals(const struct tnd_plan *plan, struct tnd_plan_totals *ret_totals)
{
	if (!tnd__struct_ok(ret_totals->struct_bytes, sizeof(*ret_totals), sizeof(*ret_totals)))
		return TND_E_INVALID;
	*ret_totals = plan->totals;
	ret_totals->struct_bytes = sizeof(*ret_totals);
	return 0;
}

const struct tnd_layout *tnd_plan_layout(const struct tnd_plan *plan)
{
	return &plan->layout;
}

struct tnd_checkpoint *tnd_plan_checkpoint(const struct tnd_plan *plan)
{
	return plan->checkpoint;
}

uint32_t tnd_plan_phase(const struct tnd_plan *plan)
{
	return plan->phase;
}

const struct tnd_plan_item *tnd_plan_items(const struct tnd_plan *plan, size_t *ret_count)
{
	*ret_count = plan->item_count;
	return plan->items;
}

const struct tnd_plan_slab *tnd_plan_slabs(const struct tnd_plan *plan, size_t *ret_count)
{
	*ret_count = plan->slab_count;
	return plan->slabs;
}

size_t tnd_plan_images(const struct tnd_plan *plan, size_t slab,
		       const struct tnd_plan_image **ret_images)
{
	*ret_images = NULL;
	if (slab >= plan->slab_count || plan->choice.packing != TND_PACKING_FILE)
		return 0;
	*ret_images = plan->images + plan->image_first[slab];
	return plan->image_first[slab + 1] - plan->image_first[slab];
}

size_t tnd_plan_warnings(const struct tnd_plan *plan, const char *const **ret_warnings)
{
	*ret_warnings = (const char *const *)plan->warnings.items;
	return plan->warnings.count;
}

int tnd_plan_node_read_bytes(const struct tnd_plan *plan, uint64_t *ret_bytes)
{
	*ret_bytes = plan->node_read_bytes;
	return 0;
}
