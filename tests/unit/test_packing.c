/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_packing.c - where items land: both packings, pieces, alignment
 *
 * What could break: two items in one place, an image whose rounded read runs into a neighbour or out of the slab, gathering that overwrites what was
 * not moved yet, a tensor delivered twice or never, a slab above its limit. One function checks the invariants of any plan. Another plays
 * the load: it fills each slab with known bytes as direct reads of whole blocks would, gathers the items in place in delivery order, and then compares
 * every item with what the file has.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "plan/plan_internal.h"
#include "support/planning.h"
#include "support/shapes.h"

static struct shapes *folder;
static struct tnd_checkpoint *checkpoint;

/* Three shards of a few MB with everything that packing has to think of. */
static int set_up(void **state)
{
	(void)state;
	unsetenv("TUNDISH_TP_SLICE");
	unsetenv("TUNDISH_SLAB_MB");
	folder = shapes_folder();
	shapes_config(folder, "{\"num_experts\":4,\"num_attention_heads\":8,"
			      "\"num_key_value_heads\":4,\"hidden_size\":512}");
	shapes_begin(folder, "a.safetensors");
	shapes_add(folder, "F32", "0", "z.first_empty");
	shapes_add(folder, "U8", "3", "z.three");
	shapes_add(folder, "F32", "1000", "z.odd");
	shapes_add(folder, "F64", "5", "a.odd_too");
	shapes_add(folder, "F32", "2,0", "a.second_empty");
	shapes_add(folder, "BF16", "512,512", "m.qkv_proj.weight");
	shapes_add(folder, "I8", "8,400000", "m.down_proj.weight"); /* long runs */
	shapes_add(folder, "I8", "512,64", "n.down_proj.weight");   /* short ones */
	shapes_add(folder, "BF16", "2048,512", "m.gate_up_proj.weight");
	shapes_add(folder, "BF16", "700,512", "m.embed_tokens.weight");
	shapes_pad(folder, 1234);
	shapes_end(folder);
	shapes_begin(folder, "b.safetensors");
	for (int layer = 0; layer < 3; layer++)
		for (int expert = 3; expert >= 0; expert--) {
			shapes_add(folder, "I8", "64,2560", "l.%d.experts.%d.w1.weight", layer,
				   expert);
			shapes_add(folder, "F8_E8M0", "64,160", "l.%d.experts.%d.w1.scale", layer,
				   expert);
			shapes_add(folder, "I8", "5120,32", "l.%d.experts.%d.w2.weight", layer,
				   expert);
			shapes_add(folder, "F32", "", "l.%d.experts.%d.w2.input_scale", layer,
				   expert);
		}
	shapes_add(folder, "BF16", "4,64,512", "l.9.experts.gate_up_proj");
	shapes_add(folder, "BF16", "7", "mtp.norm.weight");
	shapes_pad(folder, 3);
	shapes_end(folder);
	shapes_begin(folder, "c.safetensors");
	shapes_add(folder, "F32", "0,4", "only.empty");
	shapes_end(folder);
	checkpoint = planning_open(shapes_path(folder));
	return 0;
}

static int tear_down(void **state)
{
	(void)state;
	tnd_checkpoint_close(checkpoint);
	shapes_remove(folder);
	return 0;
}

/* -- the load, played -- */

static unsigned char file_byte(uint32_t file, uint64_t at)
{
	uint64_t mix = (at + 1) * UINT64_C(0x9e3779b97f4a7c15) + file;

	return (unsigned char)((mix ^ mix >> 29) * UINT64_C(0xbf58476d1ce4e5b9) >> 56);
}

static void read_images(const struct tnd_plan *plan, size_t slab, unsigned char *memory,
			uint64_t bytes)
{
	uint32_t file = tnd_plan_slabs(plan, &(size_t){0})[slab].file;
	const struct tnd_plan_image *images;
	size_t count = tnd_plan_images(plan, slab, &images);
	uint64_t free_from = 0;

	for (size_t i = 0; i < count; i++) {
		uint64_t begin = tnd__round_down(images[i].file_begin, 4096);
		uint64_t end = tnd__round_up(images[i].file_end, 4096);
		uint64_t place = images[i].slab_offset - (images[i].file_begin - begin);

		assert_true(images[i].file_begin < images[i].file_end);
		assert_int_equal(place % 4096, 0);
		assert_true(place >= free_from);
		assert_true(place + (end - begin) <= bytes);
		free_from = place + (end - begin);
		for (uint64_t at = begin; at < end; at++)
			memory[place + at - begin] = file_byte(file, at);
	}
}

static void gather(const struct tnd_plan *plan, const struct tnd_plan_item *item,
		   unsigned char *memory, uint64_t bytes)
{
	uint64_t begin, end, to = item->slab_offset, source;

	if (item->flags & TND_ITEM_F_ROWS) {
		tnd__plan_item_range(item, 0, &begin, &end);
		source = tnd__plan_image_place(plan, item->slab, begin);
		for (uint64_t row = 0; row < item->row_count; row++)
			for (uint32_t p = 0; p < item->part_count; p++) {
				memmove(memory + to,
					memory + source + row * item->row_bytes +
						item->part_begin[p],
					item->part_bytes[p]);
				to += item->part_bytes[p];
			}
	} else {
		for (uint64_t k = 0; k < tnd__plan_item_range_count(item); k++) {
			tnd__plan_item_range(item, k, &begin, &end);
			source = tnd__plan_image_place(plan, item->slab, begin);
			assert_true(source != UINT64_MAX && source + (end - begin) <= bytes);
			memmove(memory + to, memory + source, end - begin);
			to += end - begin;
		}
	}
	assert_int_equal(to, item->slab_offset + item->kept_bytes);
	assert_true(to <= bytes);
}

static void compare(const struct tnd_plan_item *item, const unsigned char *memory)
{
	uint64_t at = item->slab_offset;

	for (uint64_t row = 0; row < item->row_count; row++)
		for (uint32_t p = 0; p < item->part_count; p++)
			for (uint64_t i = 0; i < item->part_bytes[p]; i++, at++)
				if (memory[at] !=
				    file_byte(item->tensor->file, item->file_offset +
									  row * item->row_bytes +
									  item->part_begin[p] + i))
					fail_msg("%s: byte %llu", item->tensor->name,
						 (unsigned long long)(at - item->slab_offset));
}

static void play(const struct tnd_plan *plan)
{
	size_t slab_count, item_count;
	const struct tnd_plan_slab *slabs = tnd_plan_slabs(plan, &slab_count);
	const struct tnd_plan_item *items = tnd_plan_items(plan, &item_count);

	for (size_t s = 0; s < slab_count; s++) {
		unsigned char *memory = calloc(1, slabs[s].bytes);

		assert_non_null(memory);
		read_images(plan, s, memory, slabs[s].bytes);
		for (uint64_t i = slabs[s].first_item; i <= slabs[s].last_item; i++)
			if (items[i].slab == s)
				gather(plan, &items[i], memory, slabs[s].bytes);
		for (uint64_t i = slabs[s].first_item; i <= slabs[s].last_item; i++)
			if (items[i].slab == s)
				compare(&items[i], memory);
		free(memory);
	}
}

/* -- invariants of any plan -- */

static void check_order(const struct tnd_plan_item *a, const struct tnd_plan_item *b,
			uint32_t packing)
{
	if (a->tensor == b->tensor) {
		assert_true(a->flags & TND_ITEM_F_PIECE && b->flags & TND_ITEM_F_PIECE);
		assert_int_equal(b->piece_offset, a->piece_offset + a->kept_bytes);
		return;
	}
	assert_true(a->tensor->file <= b->tensor->file);
	if (a->tensor->file < b->tensor->file)
		return;
	if (packing == TND_PACKING_NAME)
		assert_true(a->tensor < b->tensor);
	else if (a->tensor->bytes)
		assert_true(b->tensor->bytes && a->tensor->offset < b->tensor->offset);
}

static void check_slabs(const struct tnd_plan *plan, uint64_t limit)
{
	struct tnd_plan_totals totals = planning_totals(plan);
	size_t slab_count, item_count;
	const struct tnd_plan_slab *slabs = tnd_plan_slabs(plan, &slab_count);
	const struct tnd_plan_item *items = tnd_plan_items(plan, &item_count);
	uint64_t largest = 0, first = 0;

	assert_int_equal(totals.buffers, slab_count);
	assert_int_equal(totals.slabs, limit ? slab_count : 0);
	for (size_t s = 0; s < slab_count; s++) {
		uint64_t count = 0;
		bool alone = slabs[s].flags & TND_ITEM_F_OVERSIZED;

		assert_true(slabs[s].first_item >= first); /* order of first delivery */
		first = slabs[s].first_item + 1;
		largest = TND__MAX(largest, slabs[s].bytes);
		if (!alone)
			assert_true(slabs[s].bytes <= limit);
		for (uint64_t i = slabs[s].first_item; i <= slabs[s].last_item; i++) {
			if (items[i].slab != s)
				continue;
			count++;
			assert_int_equal(items[i].tensor->file, slabs[s].file);
			assert_int_equal(!!(items[i].flags & TND_ITEM_F_OVERSIZED), alone);
			assert_true(items[i].slab_offset + items[i].kept_bytes <= slabs[s].bytes);
		}
		assert_int_equal(count, slabs[s].item_count);
		if (alone)
			assert_int_equal(count, 1);
		assert_int_equal(items[slabs[s].first_item].slab, s);
		assert_int_equal(items[slabs[s].last_item].slab, s);
	}
	assert_int_equal(largest, totals.slab_bytes_max);
	assert_true(totals.least_budget_bytes <= totals.budget_bytes);
	assert_true(totals.needed_budget_bytes <= totals.budget_bytes);
	assert_true(totals.peak_bytes >= totals.needed_budget_bytes);
	assert_true(totals.fixed_bytes >=
		    totals.metadata_bytes + totals.bounce_bytes + totals.window_bytes);
}

/* Packing name: 4 KiB places one after the other, and no slab begun before it had to be. */
static void check_name(const struct tnd_plan *plan, uint64_t limit)
{
	size_t item_count, slab_count;
	const struct tnd_plan_item *items = tnd_plan_items(plan, &item_count);
	const struct tnd_plan_slab *slabs = tnd_plan_slabs(plan, &slab_count);
	uint64_t used = 0;
	uint32_t open = TND_PLAN_NO_SLAB;

	for (size_t i = 0; i < item_count; i++) {
		const struct tnd_plan_item *item = &items[i];
		bool same = open != TND_PLAN_NO_SLAB && slabs[open].file == item->tensor->file;

		if (item->slab == TND_PLAN_NO_SLAB)
			continue;
		assert_int_equal(item->slab_offset % 4096, 0);
		if (item->flags & TND_ITEM_F_OVERSIZED) {
			assert_true(item->kept_bytes > limit || item->flags & TND_ITEM_F_PIECE);
			assert_int_equal(slabs[item->slab].bytes, item->kept_bytes);
			continue;
		}
		if (item->slab == open)
			assert_int_equal(item->slab_offset, tnd__round_up(used, 4096));
		else if (same)
			assert_true(tnd__round_up(used, 4096) + item->kept_bytes > limit);
		open = item->slab;
		used = item->slab_offset + item->kept_bytes;
		assert_true(slabs[open].bytes >= used);
	}
}

static void check(const struct tnd_plan *plan, uint64_t limit)
{
	struct tnd_plan_totals totals = planning_totals(plan);
	size_t item_count, tensor_count;
	const struct tnd_plan_item *items = tnd_plan_items(plan, &item_count);
	const struct tnd_tensor *tensors =
		tnd_checkpoint_tensors(tnd_plan_checkpoint(plan), &tensor_count);
	unsigned char *seen = calloc(tensor_count, 1);
	uint64_t tensors_seen = 0, kept = 0, read = 0;

	for (size_t i = 0; i < item_count; i++) {
		const struct tnd_plan_item *item = &items[i];
		bool begins = !i || items[i - 1].tensor != item->tensor;
		bool ends = i + 1 == item_count || items[i + 1].tensor != item->tensor;

		if (i)
			check_order(&items[i - 1], item, totals.packing);
		kept += item->kept_bytes;
		read += item->read_bytes;
		assert_int_equal(item->slab == TND_PLAN_NO_SLAB, item->kept_bytes == 0);
		if (item->flags & TND_ITEM_F_PIECE)
			assert_int_equal(!!(item->flags & TND_ITEM_F_LAST), ends);
		else
			assert_int_equal(item->kept_bytes, item->slice_bytes);
		if (ends)
			assert_int_equal(item->piece_offset + item->kept_bytes, item->slice_bytes);
		if (!begins)
			continue;
		assert_int_equal(item->piece_offset, 0);
		assert_int_equal(seen[item->tensor - tensors]++, 0);
		tensors_seen++;
	}
	free(seen);
	assert_int_equal(tensors_seen, totals.tensors);
	assert_int_equal(tensors_seen + totals.skipped, tensor_count);
	assert_int_equal(kept, totals.kept_bytes);
	assert_int_equal(read, totals.read_bytes);
	check_slabs(plan, limit);
	if (totals.packing == TND_PACKING_NAME)
		check_name(plan, limit);
}

static char *json_of(const struct tnd_plan *plan)
{
	char *text = NULL;

	assert_int_equal(tnd_plan_json(&plan, 1, TND_PLAN_JSON_F_TENSORS, &text), 0);
	return text;
}

static const struct {
	uint32_t tp, ep, slice, phase;
} kinds[] = {
	{1, 1, TND_SLICE_NONE, TND_PHASE_ALL},      {4, 1, TND_SLICE_EXPERTS, TND_PHASE_TARGET},
	{4, 1, TND_SLICE_ALL, TND_PHASE_TARGET},    {2, 1, TND_SLICE_ALL, TND_PHASE_ALL},
	{4, 2, TND_SLICE_NONE, TND_PHASE_TARGET},   {4, 2, TND_SLICE_ALL, TND_PHASE_ALL},
	{4, 2, TND_SLICE_EXPERTS, TND_PHASE_DRAFT},
};
static const int64_t slab_sizes[] = {TND_SLAB_NONE, 1 << 20, 4 << 20, 256 << 20};

static void small_plans(void **state)
{
	(void)state;
	for (size_t k = 0; k < sizeof(kinds) / sizeof(*kinds); k++)
		for (size_t s = 0; s < 4; s++)
			for (uint32_t p = TND_PACKING_NAME; p <= TND_PACKING_FILE; p++)
				for (uint32_t align = 0; align <= 512;
				     align = align ? align * 8 : 64) {
					struct tnd_layout layout =
						planning_layout(kinds[k].tp, 1, kinds[k].ep,
								(uint32_t)(k + s) % kinds[k].tp);
					struct tnd_plan_opts opts =
						planning_opts(kinds[k].phase, kinds[k].slice, p);
					struct tnd_plan *plan, *again;
					char *a, *b;

					opts.slab_bytes = slab_sizes[s];
					opts.align = align;
					plan = planning_make(checkpoint, &layout, &opts);
					check(plan, s ? (uint64_t)slab_sizes[s] : 0);
					if (p == TND_PACKING_FILE)
						play(plan);
					again = planning_make(checkpoint, &layout, &opts);
					a = json_of(plan);
					b = json_of(again);
					assert_string_equal(a, b);
					free(a);
					free(b);
					tnd_plan_close(plan);
					tnd_plan_close(again);
				}
}

/* A tensor at an odd offset, and align=64 for all: copies at 64-byte places. */
static void alignment(void **state)
{
	struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, TND_SLICE_NONE, TND_PACKING_FILE);
	struct tnd_plan *plan = planning_make(checkpoint, NULL, &opts);
	size_t count;
	const struct tnd_plan_item *items;

	(void)state;
	assert_true(planning_item(plan, "z.odd")->flags & TND_ITEM_F_REALIGN);
	assert_int_equal(planning_item(plan, "z.odd")->slab_offset % 64, 0);
	assert_false(planning_item(plan, "z.three")->flags & TND_ITEM_F_REALIGN);
	assert_int_equal(planning_item(plan, "z.three")->slab_offset,
			 planning_item(plan, "z.three")->file_offset % 4096);
	tnd_plan_close(plan);
	opts.align = 64;
	plan = planning_make(checkpoint, NULL, &opts);
	items = tnd_plan_items(plan, &count);
	for (size_t i = 0; i < count; i++)
		assert_int_equal(items[i].slab_offset % 64, 0);
	tnd_plan_close(plan);
}

/* Neighbours in one block share an image; a gap of a block or more begins another. */
static void images_join(void **state)
{
	struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, TND_SLICE_NONE, TND_PACKING_FILE);
	static const char *const names[] = {"z.three", "n.down_proj.weight"};
	struct tnd_plan *plan;
	const struct tnd_plan_image *images;

	(void)state;
	plan = planning_make(checkpoint, NULL, &opts);
	assert_int_equal(tnd_plan_images(plan, 0, &images), 1);
	assert_int_equal(tnd_plan_images(plan, 99, &images), 0);
	tnd_plan_close(plan);
	opts.flags = TND_PLAN_F_NAMES;
	opts.names = names;
	opts.name_count = 2;
	plan = planning_make(checkpoint, NULL, &opts);
	assert_int_equal(planning_totals(plan).slabs, 1);
	assert_int_equal(tnd_plan_images(plan, 0, &images), 2);
	play(plan);
	tnd_plan_close(plan);
}

/* 5,000 bytes that nobody needs are never read, wherever blocks begin; 90 are where they share a block. */
static void gaps(void **state)
{
	static const char *const names[] = {"a", "c", "e"};

	(void)state;
	for (unsigned pad = 0; pad < 4096; pad += 256) {
		struct shapes *own = shapes_folder();
		struct tnd_plan_opts opts = planning_opts(0, 0, TND_PACKING_FILE);
		const struct tnd_plan_image *images;
		struct tnd_checkpoint *opened;
		const struct tnd_plan_item *a, *c;
		struct tnd_plan *plan;
		bool joined;

		shapes_begin(own, "m.safetensors");
		shapes_add(own, "U8", "3000", "a");
		shapes_add(own, "U8", "90", "b");
		shapes_add(own, "U8", "3000", "c");
		shapes_add(own, "U8", "5000", "d");
		shapes_add(own, "U8", "3000", "e");
		shapes_pad(own, pad);
		shapes_end(own);
		opened = planning_open(shapes_path(own));
		opts.flags = TND_PLAN_F_NAMES;
		opts.names = names;
		opts.name_count = 3;
		plan = planning_make(opened, NULL, &opts);
		a = planning_item(plan, "a");
		c = planning_item(plan, "c");
		joined = (a->file_offset + 2999) / 4096 == c->file_offset / 4096 ||
			 a->file_offset + 3000 == c->file_offset;
		assert_int_equal(tnd_plan_images(plan, 0, &images), joined ? 2 : 3);
		play(plan);
		tnd_plan_close(plan);
		tnd_checkpoint_close(opened);
		shapes_remove(own);
	}
}

static void pieces(void **state)
{
	static const uint64_t budgets[] = {2500 << 10, 4 << 20, 6 << 20};
	static const int64_t slabs[] = {0, TND_SLAB_NONE, 1 << 20};
	bool cut = false;

	(void)state;
	for (size_t b = 0; b < 3; b++)
		for (size_t s = 0; s < 3; s++)
			for (uint32_t p = TND_PACKING_NAME; p <= TND_PACKING_FILE; p++)
				for (uint32_t tp = 1; tp <= 2; tp++) {
					struct tnd_layout layout =
						planning_layout(tp, 1, 1, tp - 1);
					struct tnd_plan_opts opts = planning_opts(
						TND_PHASE_ALL,
						tp == 1 ? TND_SLICE_NONE : TND_SLICE_ALL, p);
					struct tnd_plan *plan;
					size_t count;
					const struct tnd_plan_item *items;

					opts.oversize = TND_OVERSIZE_PIECES;
					opts.budget_bytes = budgets[b];
					opts.slab_bytes = slabs[s];
					plan = planning_make(checkpoint, &layout, &opts);
					check(plan, planning_totals(plan).slab_bytes);
					if (p == TND_PACKING_FILE)
						play(plan);
					items = tnd_plan_items(plan, &count);
					for (size_t i = 0; i < count; i++) {
						if (!(items[i].flags & TND_ITEM_F_PIECE))
							continue;
						cut = true;
						assert_true(
							tnd_plan_slabs(plan, &count)[items[i].slab]
								.bytes <=
							TND__MAX(1u << 20, budgets[b] / 4));
						tnd_plan_items(plan, &count);
					}
					tnd_plan_close(plan);
				}
	assert_true(cut);
}

/* The position of a value in a tensor that came in pieces is that of the uncut one. */
static void narrow_in_pieces(void **state)
{
	struct tnd_layout layout = planning_layout(2, 1, 1, 1);
	struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, TND_SLICE_ALL, TND_PACKING_FILE);
	struct tnd_plan *whole = planning_make(checkpoint, &layout, &opts), *cut;
	static const char name[] = "m.gate_up_proj.weight";
	uint64_t a, b;

	(void)state;
	opts.oversize = TND_OVERSIZE_PIECES;
	opts.budget_bytes = 1500 << 10;
	cut = planning_make(checkpoint, &layout, &opts);
	assert_true(planning_item(cut, name)->flags & TND_ITEM_F_PIECE);
	for (uint64_t row = 0; row < 2048; row += 100) {
		bool held = row % 1024 >= 512;

		assert_int_equal(
			tnd_plan_narrow(whole, name, sizeof(name) - 1, 0, row, 1, &a, NULL),
			held ? 0 : TND_E_SLICE);
		assert_int_equal(tnd_plan_narrow(cut, name, sizeof(name) - 1, 0, row, 1, &b, NULL),
				 held ? 0 : TND_E_SLICE);
		if (held)
			assert_int_equal(a, b);
	}
	tnd_plan_close(whole);
	tnd_plan_close(cut);
}

/* -- the large checkpoint -- */

static void large_plans(void **state)
{
	struct shapes *own = shapes_folder();
	struct tnd_checkpoint *opened;

	(void)state;
	shapes_experts(own);
	opened = planning_open(shapes_path(own));
	for (uint32_t ep = 1; ep <= 2; ep++)
		for (uint32_t phase = TND_PHASE_TARGET; phase <= TND_PHASE_DRAFT; phase++)
			for (uint32_t p = TND_PACKING_NAME; p <= TND_PACKING_FILE; p++)
				for (size_t s = 0; s < 4; s++) {
					struct tnd_layout layout = planning_layout(4, 1, ep, 2);
					struct tnd_plan_opts opts = planning_opts(phase, 0, p);
					struct tnd_plan_totals totals;
					struct tnd_plan *plan;

					opts.slab_bytes = slab_sizes[s];
					plan = planning_make(opened, &layout, &opts);
					check(plan, s ? (uint64_t)slab_sizes[s] : 0);
					totals = planning_totals(plan);
					if (s == 0)
						assert_int_equal(totals.buffers, totals.tensors);
					else if (p == TND_PACKING_NAME)
						assert_true(totals.buffers < totals.tensors);
					tnd_plan_close(plan);
				}
	tnd_checkpoint_close(opened);
	shapes_remove(own);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(small_plans), cmocka_unit_test(alignment),
		cmocka_unit_test(images_join), cmocka_unit_test(gaps),
		cmocka_unit_test(pieces),      cmocka_unit_test(narrow_in_pieces),
		cmocka_unit_test(large_plans),
	};

	return cmocka_run_group_tests(tests, set_up, tear_down);
}
