/* SPDX-License-Identifier: Apache-2.0 */
/*
 * take.c - items of a member's plan out of the slabs that came
 *
 *   kept bytes of an item  [0 ......................... kept_bytes)
 *   in the arrival         [position ..... end)                        one piece
 *                            one run there, well aligned: a view of it
 *                            else: gathered, row by row
 *
 * An item that is one run is in one slab, unless the reader had to cut it for its budget; one that is
 * gathered may come in several, one after the other, which are put together here. What is too large
 * for that is handed out in pieces.
 */
#include <errno.h>
#include <string.h>

#include "base/copy.h"
#include "member.h"

#define AHEAD_BYTES TND__MIB(64)

/* Of an arrival, the entry that file byte `offset` lies in; NULL: none. */
static const struct tnd__stream_entry *entry_at(const struct tnd__arrival *arrival, uint64_t offset)
{
	size_t low = 0, high = arrival->count;

	while (low < high) {
		size_t middle = low + (high - low) / 2;
		const struct tnd__stream_entry *entry = &arrival->entries[middle];

		if (entry->begin > offset)
			high = middle;
		else if (entry->begin + entry->bytes <= offset)
			low = middle + 1;
		else
			return entry;
	}
	return NULL;
}

static const unsigned char *byte_at(const struct tnd__arrival *arrival,
				    const struct tnd__stream_entry *entry, uint64_t offset)
{
	return (const unsigned char *)arrival->object.data + entry->place + (offset - entry->begin);
}

/* The arrival that has kept byte `kept` of the item; NULL: none yet. */
static struct tnd__arrival *find(struct tnd__member *member, const struct tnd_plan_item *item,
				 uint64_t kept)
{
	struct tnd__arrival *arrival;
	uint64_t run, offset = tnd__slice_file_at(item, kept, &run);

	pthread_mutex_lock(&member->lock);
	for (arrival = member->arrivals; arrival; arrival = arrival->next)
		if (arrival->ours && arrival->file == item->tensor->file &&
		    entry_at(arrival, offset))
			break;
	pthread_mutex_unlock(&member->lock);
	return arrival;
}

uint64_t tnd__member_end_in(const struct tnd__arrival *arrival, const struct tnd_plan_item *item,
			    uint64_t kept)
{
	while (kept < item->kept_bytes) {
		uint64_t run, offset = tnd__slice_file_at(item, kept, &run);
		const struct tnd__stream_entry *entry = entry_at(arrival, offset);

		if (!entry)
			break;
		kept = tnd__slice_kept_before(item, entry->begin + entry->bytes);
	}
	return kept;
}

/* Whether the view may be of the slab itself: what the plan would copy for alignment it may not. */
static bool well_placed(const struct tnd_load *load, const struct tnd_plan_item *item,
			const unsigned char *data)
{
	uint32_t bits = tnd_dtype_bits(item->tensor->dtype);
	uint64_t align = load->plan->choice.align;

	return (bits % 8 || (uintptr_t)data % (bits / 8) == 0) &&
	       (!align || (uintptr_t)data % align == 0);
}

void tnd__member_fill(const struct tnd_load *load, const struct tnd_plan_item *item,
		      struct tnd__arrival *arrival, struct tnd__piece *piece)
{
	const struct tnd__member *member = load->member;
	uint64_t run, offset = tnd__slice_file_at(item, piece->begin, &run);
	const struct tnd__stream_entry *entry = entry_at(arrival, offset);
	const unsigned char *data = byte_at(arrival, entry, offset);
	bool part = piece->begin || piece->end < item->kept_bytes;

	piece->buffer = arrival->buffer;
	/* A part of what is put together is no view, also where it is a run. */
	if (!(part && tnd__member_whole(load, item)) && run >= piece->end - piece->begin &&
	    entry->begin + entry->bytes - offset >= piece->end - piece->begin &&
	    well_placed(load, item, data))
		piece->data = data;
	else if (!(load->opts.flags & TND_LOAD_F_OWN) && item->kept_bytes > member->staging_piece &&
		 load->plan->choice.oversize == TND_OVERSIZE_PIECES)
		piece->end = TND__MIN(piece->end, piece->begin + member->staging_piece);
}

/*
 * Own delivery: memory for the next items is made, and touched by threads of its own, while their
 * bytes are still being read.
 */
static int make_ahead(struct tnd_load *load, size_t index)
{
	struct tnd__member *member = load->member;
	int rc = 0;

	/* The one before was delivered; pieces share the first's memory. */
	if (member->item != index && !load->items[member->item].piece_offset)
		member->ahead_bytes -= load->items[member->item].slice_bytes;
	while (rc == 0 && member->ahead < load->item_count && member->ahead_bytes < AHEAD_BYTES) {
		const struct tnd_plan_item *item = &load->items[member->ahead];

		if (item->slice_bytes && !item->piece_offset) {
			rc = tnd__own_ahead(load, member->ahead);
			member->ahead_bytes += item->slice_bytes;
		}
		member->ahead++;
	}
	return rc;
}

int tnd__member_piece(struct tnd_load *load, size_t index, struct tnd__piece *ret_piece,
		      struct tnd_error *reterr)
{
	struct tnd__member *member = load->member;
	const struct tnd_plan_item *item = &load->items[index];
	int64_t start = tnd__now_ns();
	struct tnd__arrival *arrival;
	int rc;

	if (load->owns && make_ahead(load, index) < 0) {
		tnd__load_fail(load, -ENOMEM, NULL, "out of memory for a tensor");
		return tnd__load_error(load, reterr);
	}
	if (member->item != index) {
		member->item = index;
		member->position = 0;
	}
	*ret_piece = (struct tnd__piece){.begin = member->position, .end = item->kept_bytes};
	tnd__check_limits(load);
	rc = tnd__load_error(load, reterr);
	if (rc < 0 || !item->kept_bytes)
		return rc;
	while (!(arrival = find(member, item, member->position))) {
		rc = tnd__member_pull(load, reterr);
		if (rc < 0)
			return rc;
	}
	ret_piece->end = tnd__member_end_in(arrival, item, member->position);
	tnd__member_fill(load, item, arrival, ret_piece);
	member->position = ret_piece->end;
	pthread_mutex_lock(&load->flow->lock);
	load->stats.storage_wait_ns += (uint64_t)(tnd__now_ns() - start);
	pthread_mutex_unlock(&load->flow->lock);
	return 0;
}

void tnd__member_delivered(struct tnd__arrival *arrival)
{
	pthread_mutex_lock(&arrival->member->lock);
	arrival->ours = false;
	pthread_mutex_unlock(&arrival->member->lock);
}

/* -- gathering -- */

/* Whole rows of one part that one entry holds: one call. Return: whether it was. */
static bool gather_rows(const struct tnd__arrival *arrival, const struct tnd_plan_item *item,
			const struct tnd__piece *piece, void *to, bool past)
{
	uint64_t row = item->part_bytes[0], run;
	uint64_t first = tnd__slice_file_at(item, piece->begin, &run);
	uint64_t last = tnd__slice_file_at(item, piece->end - 1, &run);
	const struct tnd__stream_entry *entry = entry_at(arrival, first);
	struct tnd__strides strides;

	if (item->part_count != 1 || piece->begin % row || piece->end % row ||
	    last - entry->begin >= entry->bytes)
		return false;
	strides = (struct tnd__strides){(piece->end - piece->begin) / row, row, item->row_bytes};
	tnd__copy_strides(to, byte_at(arrival, entry, first), &strides, past);
	return true;
}

static void gather_runs(const struct tnd__arrival *arrival, const struct tnd_plan_item *item,
			const struct tnd__piece *piece, unsigned char *to, bool past)
{
	for (uint64_t kept = piece->begin; kept < piece->end;) {
		uint64_t run, offset = tnd__slice_file_at(item, kept, &run);
		const struct tnd__stream_entry *entry = entry_at(arrival, offset);

		run = TND__MIN(run, piece->end - kept);
		run = TND__MIN(run, entry->begin + entry->bytes - offset);
		tnd__copy(to, byte_at(arrival, entry, offset), run, past);
		to += run;
		kept += run;
	}
}

void tnd__member_gather(struct tnd_load *load, const struct tnd_plan_item *item,
			const struct tnd__piece *piece, void *to, bool past)
{
	const struct tnd__arrival *arrival = piece->buffer->arrival;
	int64_t start = tnd__now_ns();

	if (!gather_rows(arrival, item, piece, to, past))
		gather_runs(arrival, item, piece, to, past);
	atomic_fetch_add_explicit(&load->gather_ns, (uint64_t)(tnd__now_ns() - start),
				  memory_order_relaxed);
}

/* -- where the consumer keeps views -- */

bool tnd__member_must_copy(struct tnd_load *load, const struct tnd__piece *piece)
{
	struct tnd__flow *flow = load->flow;
	uint32_t on_full = load->opts.on_full;
	bool full;

	if (on_full != TND_ON_FULL_COPY && on_full != TND_ON_FULL_OVERRUN)
		return false;
	pthread_mutex_lock(&flow->lock);
	full = !piece->buffer->views &&
	       flow->held_bytes + piece->buffer->charge_bytes > load->member->each_bytes;
	if (full && on_full == TND_ON_FULL_OVERRUN) {
		load->overruns++;
		load->overrun_bytes += piece->end - piece->begin;
	}
	pthread_mutex_unlock(&flow->lock);
	return full;
}

static int interrupted(void *arg)
{
	struct tnd_load *load = arg;

	tnd__check_limits(load);
	return tnd__load_error(load, NULL) < 0;
}

/*
 * A buffer of the pool. Only views that the consumer releases make room. Return: 0; -EAGAIN: none,
 * and the views are to be copies; < 0, and the load has failed.
 */
static int acquire(struct tnd_load *load, uint64_t bytes, const char *file,
		   struct tnd_slab **ret_slab)
{
	struct tnd_charge_opts charge = {.struct_bytes = sizeof(charge),
					 .flags = TND_CHARGE_F_TRY,
					 .cancelled = interrupted,
					 .cancelled_arg = load};
	int64_t start = tnd__now_ns();
	int64_t limit = load->opts.stall_ns ? load->opts.stall_ns : TND__STALL_NS;
	int rc = tnd_slab_acquire(load->pool, bytes, file, &charge, ret_slab);

	if (rc != -EAGAIN && rc != TND_E_BUDGET)
		return rc;
	if (load->opts.on_full == TND_ON_FULL_COPY || load->opts.on_full == TND_ON_FULL_OVERRUN)
		return -EAGAIN;
	if (load->plan->choice.oversize == TND_OVERSIZE_OVERRUN &&
	    tnd__round_up(bytes, TND__PAGE) > load->staging_bytes) {
		charge.flags = TND_CHARGE_F_OVERRUN;
		return tnd_slab_acquire(load->pool, bytes, file, &charge, ret_slab);
	}
	if (load->opts.on_full == TND_ON_FULL_FAIL) {
		tnd__fail_full(load, TND_E_FULL, 0);
		return TND_E_FULL;
	}
	charge.flags = 0;
	do {
		charge.deadline_ns = tnd__now_ns() + TND__POLL_NS;
		rc = tnd_slab_acquire(load->pool, bytes, file, &charge, ret_slab);
	} while (rc == TND_E_DEADLINE && !interrupted(load) &&
		 (limit < 0 || tnd__now_ns() - start < limit));
	if (rc == TND_E_DEADLINE)
		tnd__fail_full(load, rc, tnd__now_ns() - start);
	return rc;
}

bool tnd__member_whole(const struct tnd_load *load, const struct tnd_plan_item *item)
{
	return item->kept_bytes <= load->member->staging_piece ||
	       load->plan->choice.oversize != TND_OVERSIZE_PIECES;
}

/*
 * What a guest's views hold is one account, gathered or not: later its own feeder may wait for it.
 * (A member's staging is apart from the slabs that it may keep.)
 */
static void hold_staged(struct tnd_load *load, struct tnd__hold *hold, uint64_t bytes)
{
	struct tnd__flow *flow = load->flow;

	hold->staged_bytes = tnd__round_up(bytes, TND__PAGE);
	pthread_mutex_lock(&flow->lock);
	flow->held_bytes += hold->staged_bytes;
	flow->held_views++;
	pthread_mutex_unlock(&flow->lock);
}

int tnd__member_stage(struct tnd_load *load, const struct tnd_plan_item *item,
		      const struct tnd__piece *piece, struct tnd_view *view)
{
	struct tnd__member *member = load->member;
	struct tnd__hold *hold = view->hold;
	bool whole = tnd__member_whole(load, item);
	uint64_t bytes = whole ? item->kept_bytes : view->bytes;
	uint64_t at = whole ? piece->begin : 0;
	unsigned char *data;
	int rc = 0;

	if (!member->stage)
		rc = acquire(load, bytes, load->files[item->tensor->file].name, &member->stage);
	if (rc < 0)
		return rc;
	data = tnd_slab_data(member->stage);
	tnd__member_gather(load, item, piece, data + at, false);
	if (whole && piece->end < item->kept_bytes)
		return 0;
	rc = tnd__lease_acquire_sized(member->stage, item->tensor->name, item->tensor->name_bytes,
				      bytes, &hold->lease);
	if (rc < 0)
		return rc;
	view->data = data;
	if (load->guest)
		hold_staged(load, hold, bytes);
	if (whole)
		tnd__view_whole(view, item);
	tnd_slab_release(member->stage);
	member->stage = NULL;
	return 1;
}
