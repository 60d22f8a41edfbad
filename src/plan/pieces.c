/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pieces.c - items that cannot fit into the budget, cut into pieces that can
 *
 * A piece is an item of its own in a buffer of its own. Items of several rows are cut between rows;
 * a row that is alone, or too large for a buffer, is cut within a part, in packing file at 4 KiB
 * boundaries of the file. Whole elements stay together.
 */
#include <stdlib.h>

#include "plan_internal.h"

struct cutter {
	const struct tnd_plan *plan;
	uint64_t limit; /* largest buffer of a piece */
	struct tnd__pieces_sum sum;
	bool counts; /* only fills sum */
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

static int emit_piece(struct cutter *cutter, const struct tnd_plan_item *piece)
{
	struct tnd__pieces_sum alone;

	if (!cutter->counts)
		return emit(cutter, piece);
	alone = tnd__pack_alone(cutter->plan, piece);
	cutter->sum.pieces++;
	cutter->sum.images += alone.images;
	cutter->sum.largest = TND__MAX(cutter->sum.largest, alone.largest);
	return 0;
}

static bool fits(const struct cutter *cutter, const struct tnd_plan_item *piece)
{
	return tnd__pack_alone(cutter->plan, piece).largest <= cutter->limit;
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

/* Bytes of the next piece that begins at `begin` of its row, of at most `left`. */
static uint64_t run_that_fits(const struct cutter *cutter, struct tnd_plan_item *piece,
			      uint64_t begin, uint64_t left)
{
	uint32_t bits = tnd_dtype_bits(piece->tensor->dtype);
	uint64_t bytes = cutter->limit;

	if (cutter->plan->choice.packing == TND_PACKING_FILE)
		bytes -= (piece->file_offset + begin) % TND__PAGE;
	/* Where a tensor lies askew in its file. */
	if (bits % 8 == 0)
		bytes -= bytes % (bits / 8);
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

/* Cuts one row, `done` bytes of the item being in pieces already. */
static int cut_row(struct cutter *cutter, const struct tnd_plan_item *row, uint64_t done,
		   uint64_t item_bytes)
{
	for (uint32_t part = 0; part < row->part_count; part++) {
		uint64_t within = 0;

		while (within < row->part_bytes[part]) {
			struct tnd_plan_item piece = *row;
			uint64_t bytes;
			int rc;

			piece.flags |= TND_ITEM_F_PIECE;
			piece.piece_offset = done;
			bytes = run_that_fits(cutter, &piece, row->part_begin[part] + within,
					      row->part_bytes[part] - within);
			within += bytes;
			done += bytes;
			if (done == item_bytes)
				piece.flags |= TND_ITEM_F_LAST;
			rc = emit_piece(cutter, &piece);
			if (rc < 0)
				return rc;
		}
	}
	return 0;
}

static int cut_item(struct cutter *cutter, const struct tnd_plan_item *item)
{
	uint64_t row_kept = item->kept_bytes / item->row_count, done = 0;
	int rc = 0;

	while (done < item->row_count && rc == 0) {
		struct tnd_plan_item piece = *item;
		uint64_t rows = 0;

		piece.file_offset += done * item->row_bytes;
		piece.piece_offset = done * row_kept;
		if (item->row_count > 1)
			rows = rows_that_fit(cutter, &piece, row_kept, item->row_count - done);
		if (!rows) {
			piece.row_count = 1;
			piece.flags &= ~TND_ITEM_F_ROWS;
			rc = cut_row(cutter, &piece, done * row_kept, item->kept_bytes);
			done++;
			continue;
		}
		done += rows;
		piece.flags |= TND_ITEM_F_PIECE;
		if (done == item->row_count)
			piece.flags |= TND_ITEM_F_LAST;
		rc = emit_piece(cutter, &piece);
	}
	return rc;
}

/*
 * Without slabs there is no other measure: at most a quarter of the budget, as `cut_above` is below
 * twice the room that there is.
 */
static uint64_t piece_limit(const struct tnd_plan *plan, uint64_t cut_above)
{
	return plan->choice.slab_bytes ? plan->choice.slab_bytes
				       : TND__MAX(cut_above / 8, TND__MIB(1));
}

void tnd__pieces_count(const struct tnd_plan *plan, const struct tnd_plan_item *item,
		       uint64_t cut_above, struct tnd__pieces_sum *ret_sum)
{
	struct cutter cutter = {
		.plan = plan, .limit = piece_limit(plan, cut_above), .counts = true};

	/* Counting allocates nothing and cannot fail. */
	(void)cut_item(&cutter, item);
	*ret_sum = cutter.sum;
}

int tnd__pieces_cut(struct tnd_plan *plan, uint64_t cut_above)
{
	struct cutter cutter = {.plan = plan, .limit = piece_limit(plan, cut_above)};
	int rc = 0;

	for (size_t i = 0; i < plan->item_count && rc == 0; i++) {
		const struct tnd_plan_item *item = &plan->items[i];

		if (item->flags & TND_ITEM_F_OVERSIZED && plan->slabs[item->slab].bytes > cut_above)
			rc = cut_item(&cutter, item);
		else
			rc = emit(&cutter, item);
	}
	if (rc < 0) {
		free(cutter.items);
		return rc;
	}
	free(plan->items);
	plan->items = cutter.items;
	plan->item_count = cutter.count;
	plan->item_capacity = cutter.capacity;
	return 0;
}
