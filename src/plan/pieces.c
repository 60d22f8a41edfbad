/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pieces.c - items that cannot fit into the budget, cut into pieces that can
 *
 * A piece is an item of its own in a buffer of its own. Items of several rows are cut between rows;
 * items of one row are cut within a part, in packing file at 4 KiB boundaries of the file. Whole
 * elements stay together.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "plan_internal.h"

struct cutter {
	struct tnd_plan *plan;
	uint64_t limit; /* largest buffer of a piece */
	struct tnd_plan_item *items;
	size_t count, capacity;
};

static int emit(struct cutter *cutter, const struct tnd_plan_item *item)
{
	int rc = tnd__plan_reserve(&cutter->items, &cutter->capacity, cutter->count + 1,
				   sizeof(*cutter->items));

	if (rc == 0)
		cutter->items[cutter->count++] = *item;
	return rc;
}

static bool fits(const struct cutter *cutter, const struct tnd_plan_item *piece)
{
	return tnd__pack_alone_bytes(cutter->plan, piece) <= cutter->limit;
}

/*
 * Largest number of rows from the piece's first on, up to `left`, that fit; 0 if not even one does.
 */
static uint64_t rows_that_fit(const struct cutter *cutter, struct tnd_plan_item *piece,
			      uint64_t row_kept, uint64_t left)
{
	uint64_t low = 0, high = TND__MIN(left, cutter->limit / row_kept);

	while (low < high) {
		uint64_t middle = high - (high - low) / 2;

		piece->row_count = middle;
		tnd__shape_sum(piece);
		if (fits(cutter, piece))
			low = middle;
		else
			high = middle - 1;
	}
	piece->row_count = low;
	tnd__shape_sum(piece);
	return low;
}

static int refuse(const struct cutter *cutter, const struct tnd_plan_item *item,
		  struct tnd_error *reterr)
{
	const struct tnd_file *files = tnd_checkpoint_files(cutter->plan->checkpoint, &(size_t){0});
	struct tnd__where where = {.file = files[item->tensor->file].name,
				   .name = item->tensor->name,
				   .name_bytes = item->tensor->name_bytes};

	return tnd__fail(reterr, TND_E_OVERSIZE, &where,
			 "expected rows of at most %" PRIu64 " bytes to cut it into pieces, found "
			 "rows of %" PRIu64 "; raise the budget (%" PRIu64 " bytes)",
			 cutter->limit, item->row_bytes, cutter->plan->choice.budget_bytes);
}

static int cut_rows(struct cutter *cutter, const struct tnd_plan_item *item,
		    struct tnd_error *reterr)
{
	uint64_t row_kept = item->kept_bytes / item->row_count, done = 0;

	while (done < item->row_count) {
		struct tnd_plan_item piece = *item;
		uint64_t rows;
		int rc;

		piece.flags |= TND_ITEM_F_PIECE;
		piece.file_offset += done * item->row_bytes;
		piece.piece_offset = done * row_kept;
		rows = rows_that_fit(cutter, &piece, row_kept, item->row_count - done);
		if (!rows)
			return refuse(cutter, item, reterr);
		done += rows;
		if (done == item->row_count)
			piece.flags |= TND_ITEM_F_LAST;
		rc = emit(cutter, &piece);
		if (rc < 0)
			return rc;
	}
	return 0;
}

/* Bytes of the next piece that begins at `begin` of its row, of at most `left`. */
static uint64_t run_that_fits(const struct cutter *cutter, struct tnd_plan_item *piece,
			      uint64_t begin, uint64_t left)
{
	uint64_t bytes = cutter->limit;

	if (cutter->plan->choice.packing == TND_PACKING_FILE)
		bytes -= (piece->file_offset + begin) % TND__PAGE;
	piece->part_count = 1;
	piece->part_begin[0] = begin;
	piece->part_bytes[0] = TND__MIN(bytes, left);
	tnd__shape_sum(piece);
	/* Copied for alignment: the image and the copy share the buffer. */
	if (!fits(cutter, piece)) {
		piece->part_bytes[0] = TND__MIN(cutter->limit / 2 - 2 * TND__PAGE, left);
		tnd__shape_sum(piece);
	}
	return piece->part_bytes[0];
}

static int cut_run(struct cutter *cutter, const struct tnd_plan_item *item)
{
	uint64_t done = 0;

	for (uint32_t part = 0; part < item->part_count; part++) {
		uint64_t within = 0;

		while (within < item->part_bytes[part]) {
			struct tnd_plan_item piece = *item;
			uint64_t bytes;
			int rc;

			piece.flags |= TND_ITEM_F_PIECE;
			piece.piece_offset = done;
			bytes = run_that_fits(cutter, &piece, item->part_begin[part] + within,
					      item->part_bytes[part] - within);
			within += bytes;
			done += bytes;
			if (done == item->kept_bytes)
				piece.flags |= TND_ITEM_F_LAST;
			rc = emit(cutter, &piece);
			if (rc < 0)
				return rc;
		}
	}
	return 0;
}

int tnd__pieces_cut(struct tnd_plan *plan, struct tnd_plan_item **ret_whole, size_t *ret_count,
		    struct tnd_error *reterr)
{
	struct cutter cutter = {.plan = plan, .limit = plan->choice.slab_bytes};
	bool any = false;
	int rc = 0;

	if (!cutter.limit)
		cutter.limit = TND__MAX(tnd__round_down(plan->choice.budget_bytes / 4, TND__MIB(1)),
					TND__MIB(1));
	for (size_t i = 0; i < plan->item_count && !any; i++)
		any = tnd__plan_beyond(plan, &plan->items[i]);
	if (!any)
		return 0;
	for (size_t i = 0; i < plan->item_count && rc == 0; i++) {
		const struct tnd_plan_item *item = &plan->items[i];

		if (!tnd__plan_beyond(plan, item))
			rc = emit(&cutter, item);
		else if (item->row_count > 1)
			rc = cut_rows(&cutter, item, reterr);
		else
			rc = cut_run(&cutter, item);
	}
	if (rc < 0) {
		free(cutter.items);
		return rc;
	}
	*ret_whole = plan->items;
	*ret_count = plan->item_count;
	plan->items = cutter.items;
	plan->item_count = cutter.count;
	plan->item_capacity = cutter.capacity;
	return 1;
}
