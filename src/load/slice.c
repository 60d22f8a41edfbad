/* SPDX-License-Identifier: Apache-2.0 */
/* slice.c - where an item's kept bytes are in its file, and back */
#include "load_internal.h"

uint64_t tnd__slice_row(const struct tnd_plan_item *item)
{
	uint64_t bytes = 0;

	for (uint32_t p = 0; p < item->part_count; p++)
		bytes += item->part_bytes[p];
	return bytes;
}

uint64_t tnd__slice_kept_before(const struct tnd_plan_item *item, uint64_t offset)
{
	uint64_t row, in, kept;

	if (offset <= item->file_offset || !item->kept_bytes)
		return 0;
	row = (offset - item->file_offset) / item->row_bytes;
	if (row >= item->row_count)
		return item->kept_bytes;
	in = (offset - item->file_offset) % item->row_bytes;
	kept = row * tnd__slice_row(item);
	for (uint32_t p = 0; p < item->part_count; p++)
		if (in > item->part_begin[p])
			kept += TND__MIN(in - item->part_begin[p], item->part_bytes[p]);
	return kept;
}

uint64_t tnd__slice_file_at(const struct tnd_plan_item *item, uint64_t kept, uint64_t *ret_run)
{
	uint64_t row_kept = tnd__slice_row(item);
	uint64_t at = item->file_offset + kept / row_kept * item->row_bytes, in = kept % row_kept;
	uint32_t p = 0;

	while (in >= item->part_bytes[p])
		in -= item->part_bytes[p++];
	*ret_run = item->part_bytes[p] - in;
	/* Whole rows follow on. */
	if (item->part_count == 1 && item->part_bytes[0] == item->row_bytes)
		*ret_run = item->kept_bytes - kept;
	return at + item->part_begin[p] + in;
}
