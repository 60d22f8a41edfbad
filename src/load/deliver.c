/* SPDX-License-Identifier: Apache-2.0 */
/*
 * deliver.c - the consumer's side: waiting for the next item, handing it out, and what happens when
 * the consumer keeps everything
 *
 *   next():  item ready? -- no --> wait; meanwhile: error? cancel? deadline? in each other's way?
 *                |                 (feeder waits for the budget, nothing is read, views are out)
 *               yes                    on_full  wait: until one is released, at most stall_ns,
 *                |                                    names in the log
 *                |                              fail: TND_E_FULL
 *                v                              overrun, copy: the feeder goes over
 *            lease and view; or, for own delivery and on_full copy, memory of its own
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/copy.h"
#include "guestload.h"

static struct tnd__hold *hold_create(struct tnd_load *load, const struct tnd_tensor *tensor)
{
	size_t shape_bytes = tensor->dim_count * sizeof(uint64_t);
	struct tnd__hold *hold = calloc(1, sizeof(*hold) + shape_bytes + tensor->name_bytes + 1);

	if (!hold || tnd__failpoint("load.alloc")) {
		free(hold);
		return NULL;
	}
	hold->shape_bytes = shape_bytes;
	if (shape_bytes)
		memcpy(hold->words, tensor->shape, shape_bytes);
	memcpy((char *)hold->words + shape_bytes, tensor->name, tensor->name_bytes);
	hold->flow = load->flow;
	tnd__flow_ref(load->flow);
	return hold;
}

/* Whether it ends what the plan calls its item. */
static bool ends_item(const struct tnd_plan_item *item, const struct tnd__piece *piece)
{
	return piece->end == item->kept_bytes;
}

static void fill_view(struct tnd_view *view, const struct tnd_plan_item *item,
		      const struct tnd__piece *piece, struct tnd__hold *hold)
{
	bool whole = piece->end - piece->begin == item->kept_bytes;
	bool last = ends_item(item, piece) &&
		    (!(item->flags & TND_ITEM_F_PIECE) || (item->flags & TND_ITEM_F_LAST));

	memset(view, 0, sizeof(*view));
	view->name = (const char *)hold->words + hold->shape_bytes;
	view->name_bytes = item->tensor->name_bytes;
	view->shape = hold->words;
	view->dim_count = item->tensor->dim_count;
	view->dtype = item->tensor->dtype;
	view->file = item->tensor->file;
	view->bytes = piece->end - piece->begin;
	view->dim = item->dim;
	view->start = item->start;
	view->length = item->length;
	view->piece_offset = item->piece_offset + piece->begin;
	view->tensor_bytes = item->slice_bytes;
	view->hold = hold;
	view->flags = last ? TND_VIEW_F_LAST : 0;
	if (!whole || (item->flags & TND_ITEM_F_PIECE))
		view->flags |= TND_VIEW_F_PIECE;
}

/* -- waiting -- */

void tnd__fail_full(struct tnd_load *load, int code, int64_t waited_ns)
{
	char holders[512];

	tnd__slab_pool_holders(load->pool, holders, sizeof(holders));
	if (code == TND_E_FULL)
		tnd__load_fail(
			load, code, NULL,
			"the budget of %llu bytes is used up by views that are still held (%s); "
			"release them, give a larger budget, or choose another on_full",
			(unsigned long long)load->bound_bytes, holders);
	else
		tnd__load_fail(
			load, code, NULL,
			"no progress for %.1f s: the budget of %llu bytes is used up by views that "
			"are still held (%s); release them or give a larger budget",
			(double)waited_ns / 1e9, (unsigned long long)load->bound_bytes, holders);
}

/* Nothing moves until a view is released. Lock held; may drop it. */
static void handle_full(struct tnd_load *load, bool *logged)
{
	struct tnd__flow *flow = load->flow;
	int64_t idle_ns = tnd__now_ns() - flow->progress_ns;
	int64_t stall_ns = load->opts.stall_ns ? load->opts.stall_ns : TND__STALL_NS;
	char holders[512];

	switch (load->opts.on_full) {
	case TND_ON_FULL_FAIL:
		pthread_mutex_unlock(&flow->lock);
		tnd__fail_full(load, TND_E_FULL, idle_ns);
		pthread_mutex_lock(&flow->lock);
		return;
	case TND_ON_FULL_OVERRUN:
	case TND_ON_FULL_COPY:
		if (flow->overrun_now)
			return;
		flow->overrun_now = true;
		pthread_cond_signal(&flow->feeder);
		pthread_mutex_unlock(&flow->lock);
		if (!load->overrun_told) {
			load->overrun_told = true;
			tnd__slab_pool_holders(load->pool, holders, sizeof(holders));
			tnd__log(TND_LOG_WARNING,
				 "going over the budget of %llu bytes: views are still held (%s)",
				 (unsigned long long)load->bound_bytes, holders);
		}
		tnd_budget_wake(load->budget);
		pthread_mutex_lock(&flow->lock);
		return;
	default:
		break;
	}
	if (stall_ns > 0 && idle_ns > stall_ns) {
		pthread_mutex_unlock(&flow->lock);
		tnd__fail_full(load, TND_E_DEADLINE, idle_ns);
		pthread_mutex_lock(&flow->lock);
	} else if (idle_ns > TND__STALL_LOG_NS && !*logged) {
		*logged = true;
		pthread_mutex_unlock(&flow->lock);
		tnd__slab_pool_holders(load->pool, holders, sizeof(holders));
		tnd__log(TND_LOG_WARNING, "the load has waited %.0f s for views to be released: %s",
			 (double)idle_ns / 1e9, holders);
		pthread_mutex_lock(&flow->lock);
	}
}

/*
 * The feeder may be about to take what is free. It cannot if the views that are out leave less than
 * item `index` needs; whatever else is charged is free once we wait for that item, for its buffer
 * comes next. Lock held.
 */
static bool only_a_release_helps(const struct tnd_load *load, size_t index)
{
	const struct tnd__flow *flow = load->flow;
	uint64_t need = tnd__round_up(load->slabs[load->items[index].slab].bytes, TND__PAGE);

	need = TND__MAX(need, load->totals.slab_capacity_bytes);
	return flow->held_views && load->fixed_bytes + flow->held_bytes + need > load->bound_bytes;
}

void tnd__check_limits(struct tnd_load *load)
{
	if (atomic_load_explicit(&load->cancelled, memory_order_relaxed))
		tnd__load_fail(load, TND_E_CANCELLED, NULL, "the load was cancelled");
	else if (load->opts.deadline_ns && tnd__now_ns() > load->opts.deadline_ns)
		tnd__load_fail(load, TND_E_DEADLINE, NULL,
			       "the deadline passed after %llu of %llu bytes; allow more time",
			       (unsigned long long)load->stats.kept_bytes,
			       (unsigned long long)load->totals.kept_bytes);
}

static bool ready(struct tnd_load *load, size_t index)
{
	/* S3: pairs with S2 in item_done(). */
	return atomic_load_explicit(&load->states[index], memory_order_acquire) == TND__ITEM_READY;
}

/* Waits for item `index`. Return: 0, or the load's error in *reterr. */
static int wait_ready(struct tnd_load *load, size_t index, struct tnd_error *reterr)
{
	struct tnd__flow *flow = load->flow;
	int64_t start = tnd__now_ns();
	bool logged = false;
	int rc = 0;

	tnd__check_limits(load);
	pthread_mutex_lock(&flow->lock);
	/* A view released long before this wait is no stall of ours. */
	if (!ready(load, index))
		flow->progress_ns = start;
	while (!load->failed && !ready(load, index)) {
		if (flow->feeder_waits && !flow->in_flight && only_a_release_helps(load, index))
			handle_full(load, &logged);
		if (load->failed || ready(load, index))
			break;
		tnd__flow_wait(flow, &flow->consumer, TND__POLL_NS);
		pthread_mutex_unlock(&flow->lock);
		tnd__check_limits(load);
		pthread_mutex_lock(&flow->lock);
	}
	load->stats.storage_wait_ns += (uint64_t)(tnd__now_ns() - start);
	if (load->failed) {
		rc = load->error.code;
		if (reterr)
			*reterr = load->error;
	}
	pthread_mutex_unlock(&flow->lock);
	return rc;
}

/* -- handing out -- */

static bool must_copy(struct tnd_load *load, const struct tnd__piece *piece)
{
	uint64_t slab = TND__MAX(load->totals.slab_capacity_bytes, TND__PAGE), used;

	if (load->member)
		return tnd__member_must_copy(load, piece);
	if (load->opts.on_full != TND_ON_FULL_COPY)
		return false;
	pthread_mutex_lock(&load->flow->lock);
	used = load->fixed_bytes + load->flow->held_bytes;
	pthread_mutex_unlock(&load->flow->lock);
	return used + 2 * slab > load->bound_bytes;
}

/* `past`: as in tnd__copy(). */
static void copy_piece(struct tnd_load *load, const struct tnd_plan_item *item,
		       const struct tnd__piece *piece, void *to, bool past)
{
	if (piece->data)
		tnd__copy(to, piece->data, piece->end - piece->begin, past);
	else
		tnd__member_gather(load, item, piece, to, past);
}

/* The piece in memory of the consumer's own. Return: 1, -ENOMEM. */
static int copy_out(struct tnd_load *load, const struct tnd_plan_item *item,
		    const struct tnd__piece *piece, struct tnd_view *view)
{
	struct tnd__hold *hold = view->hold;
	int rc = tnd__own_make(view->bytes, &hold->own, &hold->own_map_bytes);

	if (rc < 0)
		return rc;
	hold->own_bytes = view->bytes;
	copy_piece(load, item, piece, hold->own, true);
	tnd_load_consumer_bytes(load, (int64_t)view->bytes);
	view->data = hold->own;
	view->flags |= TND_VIEW_F_COPY;
	rc = tnd__sentences_add(&load->copied, "%s", view->name);
	return rc < 0 ? rc : 1;
}

/* The item in the plan that the caller knows. */
static const struct tnd_plan_item *callers_item(const struct tnd_load *load,
						const struct tnd_plan_item *item)
{
	const struct tnd__guest *guest = load->guest;

	return guest && guest->whole ? &guest->whole->items[guest->map[item - load->items]] : item;
}

/* Memory for a tensor, made ahead by the feeder or now, as the gathering place. */
static int take_own(struct tnd_load *load, const struct tnd_plan_item *item)
{
	struct tnd__own *own = load->owns ? &load->owns[item - load->items] : NULL;
	int rc;

	if (own && own->memory) {
		load->gather = own->memory;
		load->gather_map_bytes = own->map_bytes;
		own->memory = NULL;
		tnd__toucher_forget(load->toucher, load->gather, item->slice_bytes);
		return 0;
	}
	rc = tnd__own_make(item->slice_bytes, &load->gather, &load->gather_map_bytes);
	if (rc == 0)
		tnd_load_consumer_bytes(load, (int64_t)item->slice_bytes);
	return rc;
}

/*
 * Own delivery: pieces of one tensor come together in one memory, the caller's or a fresh mapping;
 * the last one makes the view.
 * Return: 1 when the tensor is whole, 0 when more pieces are to come, -ENOMEM.
 */
static int gather_own(struct tnd_load *load, const struct tnd_plan_item *item,
		      const struct tnd__piece *piece, struct tnd_view *view)
{
	struct tnd__hold *hold = view->hold;
	int rc = 0;

	if (!load->gather) {
		load->gather =
			load->opts.flags & TND_LOAD_F_OWN && load->opts.place
				? load->opts.place(load->opts.place_arg, callers_item(load, item))
				: NULL;
		load->gather_placed = load->gather != NULL;
		rc = load->gather ? 0 : take_own(load, item);
		if (rc < 0)
			return rc;
	}
	copy_piece(load, item, piece, (char *)load->gather + view->piece_offset, true);
	if (!(view->flags & TND_VIEW_F_LAST))
		return 0;
	view->data = load->gather;
	view->bytes = item->slice_bytes;
	view->piece_offset = 0;
	view->flags = TND_VIEW_F_LAST;
	view->flags |= load->opts.flags & TND_LOAD_F_OWN ? TND_VIEW_F_OWN : TND_VIEW_F_COPY;
	rc = view->flags & TND_VIEW_F_COPY ? tnd__sentences_add(&load->copied, "%s", view->name)
					   : 0;
	if (!load->gather_placed) {
		hold->own = load->gather;
		hold->own_bytes = item->slice_bytes;
		hold->own_map_bytes = load->gather_map_bytes;
	}
	load->gather = NULL;
	return rc < 0 ? rc : 1;
}

static int lease_out(struct tnd_load *load, const struct tnd_plan_item *item,
		     const struct tnd__piece *piece, struct tnd_view *view)
{
	struct tnd__buffer *buffer = piece->buffer;
	struct tnd__hold *hold = view->hold;
	struct tnd__flow *flow = load->flow;
	int rc;

	rc = tnd__lease_acquire_sized(buffer->slab, item->tensor->name, item->tensor->name_bytes,
				      view->bytes, &hold->lease);
	if (rc < 0)
		return rc;
	hold->buffer = buffer;
	hold->data = view->data = piece->data;
	hold->bytes = view->bytes;
	pthread_mutex_lock(&flow->lock);
	if (!buffer->views++)
		flow->held_bytes += buffer->charge_bytes;
	flow->held_views++;
	if (buffer->arrival) {
		hold->next = buffer->holds;
		hold->link = &buffer->holds;
		if (hold->next)
			hold->next->link = &hold->next;
		buffer->holds = hold;
		view->flags |= TND_VIEW_F_SHARED;
	}
	pthread_mutex_unlock(&flow->lock);
	return 1;
}

/* The item is on its way. Lock held. */
static void count_item(struct tnd_load *load, const struct tnd_plan_item *item)
{
	load->next_item++;
	load->stats.read_bytes += item->read_bytes;
	if (!(item->flags & TND_ITEM_F_PIECE) || (item->flags & TND_ITEM_F_LAST)) {
		load->stats.tensors++;
		load->stats.sliced += item->dim >= 0;
	}
	if (item->flags & TND_ITEM_F_REALIGN)
		load->stats.realigned_bytes += item->kept_bytes;
}

/* The piece is on its way: counts it, and lets its buffer go after its last one. */
static void delivered(struct tnd_load *load, const struct tnd_plan_item *item,
		      const struct tnd__piece *piece, int64_t start_ns)
{
	struct tnd__buffer *buffer = piece->buffer;
	struct tnd__flow *flow = load->flow;
	bool last = false;

	pthread_mutex_lock(&flow->lock);
	pthread_cond_signal(&flow->feeder);
	load->stats.deliver_ns += (uint64_t)(tnd__now_ns() - start_ns);
	load->stats.kept_bytes += piece->end - piece->begin;
	tnd__publish_done(load, item->tensor->file);
	if (ends_item(item, piece))
		count_item(load, item);
	/* A member counts bytes: a slab that came may hold a part of an item only. */
	if (buffer)
		last = (buffer->undelivered -= buffer->arrival ? piece->end - piece->begin : 1) ==
		       0;
	if (last && !buffer->arrival)
		load->buffers[item->slab] = NULL;
	flow->progress_ns = tnd__now_ns();
	pthread_mutex_unlock(&flow->lock);
	if (!last)
		return;
	if (buffer->arrival)
		tnd__member_delivered(buffer->arrival);
	if (buffer->fresh)
		tnd__toucher_forget(load->toucher, buffer->data, buffer->charge_bytes);
	tnd__buffer_finish(buffer);
}

void tnd__view_whole(struct tnd_view *view, const struct tnd_plan_item *item)
{
	view->bytes = item->kept_bytes;
	view->piece_offset = item->piece_offset;
	if (!(item->flags & TND_ITEM_F_PIECE))
		view->flags &= ~TND_VIEW_F_PIECE;
}

/*
 * A member's slice that is no run. Without room for it, it is put together in memory of the
 * consumer's own, as a copy. Return: as gather_own().
 */
static int stage(struct tnd_load *load, const struct tnd_plan_item *item,
		 const struct tnd__piece *piece, struct tnd_view *view)
{
	int rc = tnd__member_stage(load, item, piece, view);

	if (rc != -EAGAIN)
		return rc;
	if (view->flags & TND_VIEW_F_PIECE && !tnd__member_whole(load, item))
		return copy_out(load, item, piece, view);
	return gather_own(load, item, piece, view);
}

int tnd__hand_out(struct tnd_load *load, size_t index, const struct tnd__piece *piece,
		  struct tnd_view *view)
{
	const struct tnd_plan_item *item = &load->items[index];
	struct tnd__hold *hold = hold_create(load, item->tensor);
	int64_t start = tnd__now_ns();
	int rc = 1;

	if (!hold)
		return -ENOMEM;
	fill_view(view, item, piece, hold);
	view->item = tnd__guest_index(load, index);
	if (!piece->buffer)
		view->flags |= load->opts.flags & TND_LOAD_F_OWN ? TND_VIEW_F_OWN : 0;
	else if ((load->opts.flags & TND_LOAD_F_OWN) || load->gather)
		rc = gather_own(load, item, piece, view);
	else if (!piece->data)
		rc = stage(load, item, piece, view);
	else if (must_copy(load, piece))
		rc = copy_out(load, item, piece, view);
	else
		rc = lease_out(load, item, piece, view);
	if (rc <= 0)
		tnd_view_release(view);
	if (rc >= 0)
		delivered(load, item, piece, start);
	return rc;
}

static void report_progress(struct tnd_load *load, bool force)
{
	struct tnd_budget_stats budget = {.struct_bytes = sizeof(budget)};
	int64_t now = tnd__now_ns();
	struct tnd_progress progress;

	if (!load->opts.progress || (!force && now - load->progress_call_ns < TND__POLL_NS))
		return;
	load->progress_call_ns = now;
	tnd_budget_stats(load->budget, &budget);
	progress = (struct tnd_progress){.done_bytes = load->stats.kept_bytes,
					 .total_bytes = load->totals.kept_bytes,
					 .charged_bytes = budget.charged_bytes,
					 .budget_bytes = budget.bound_bytes,
					 .elapsed_ns = (uint64_t)(now - load->opened_ns)};
	if (load->opts.progress(load->opts.progress_arg, &progress))
		tnd_load_cancel(load);
}

/* Waits for item `index`. Return: 0 and the piece that is all of it; the load's error. */
static int ready_piece(struct tnd_load *load, size_t index, struct tnd__piece *ret_piece,
		       struct tnd_error *reterr)
{
	const struct tnd_plan_item *item = &load->items[index];
	int rc = wait_ready(load, index, reterr);

	*ret_piece = (struct tnd__piece){.end = item->kept_bytes};
	if (rc == 0 && item->slab != TND_PLAN_NO_SLAB) {
		ret_piece->buffer = load->buffers[item->slab];
		ret_piece->data = ret_piece->buffer->data + item->slab_offset;
	}
	return rc;
}

/* Return: 1: a piece of item *ret_index; 0: that was all; the load's error. */
static int next_piece(struct tnd_load *load, size_t *ret_index, struct tnd__piece *ret_piece,
		      struct tnd_error *reterr)
{
	int rc;

	if (load->guest && load->member) {
		rc = tnd__guest_piece(load, ret_index, ret_piece, reterr);
		if (rc != 0)
			return rc;
	}
	if (load->next_item == load->item_count)
		return 0;
	*ret_index = load->next_item;
	if (load->member)
		rc = tnd__member_piece(load, load->next_item, ret_piece, reterr);
	else
		rc = ready_piece(load, load->next_item, ret_piece, reterr);
	return rc < 0 ? rc : 1;
}

/* What kept an item from being handed out ends the load, unless it has ended it already. */
static void fail_item(struct tnd_load *load, int code, size_t index)
{
	const struct tnd_tensor *tensor = load->items[index < load->item_count ? index : 0].tensor;

	tnd__load_fail(load, code,
		       &(struct tnd__where){.file = load->files[tensor->file].name,
					    .name = tensor->name,
					    .name_bytes = tensor->name_bytes},
		       "expected memory to hand it out in, found %s (%s); give more memory or a "
		       "larger budget",
		       tnd_error_name(code), tnd_strerror(code));
}

static int next_view(struct tnd_load *load, struct tnd_view *ret_view, struct tnd_error *reterr)
{
	struct tnd__piece piece;
	size_t index;
	int rc;

	do {
		if (load->ended)
			return tnd__fail_plain(reterr, TND_E_INVALID,
					       "tnd_load_next after tnd_load_end");
		report_progress(load, load->next_item == load->item_count);
		rc = next_piece(load, &index, &piece, reterr);
		if (rc <= 0)
			return rc;
		rc = tnd__hand_out(load, index, &piece, ret_view);
	} while (rc == 0);
	if (rc < 0) {
		fail_item(load, rc, load->next_item);
		rc = tnd__load_error(load, reterr);
	}
	tnd__sample(load, false);
	return rc;
}

int tnd_load_next(struct tnd_load *load, struct tnd_view *ret_view, struct tnd_error *reterr)
{
	bool idle = false;
	int rc;

	if (load->pid != getpid())
		return tnd__fail_plain(reterr, TND_E_FORKED,
				       "this process was forked from the one that opened the load; "
				       "take views there, or open a load of its own");
	/* N2: pairs with N1 below, of the thread that was here before. */
	if (!atomic_compare_exchange_strong_explicit(&load->in_next, &idle, true,
						     memory_order_acquire, memory_order_relaxed))
		return tnd__fail_plain(reterr, -EBUSY,
				       "another thread is in tnd_load_next on this load; take "
				       "views from one thread");
	rc = next_view(load, ret_view, reterr);
	/* N1: pairs with N2. */
	atomic_store_explicit(&load->in_next, false, memory_order_release);
	return rc;
}
