/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_union.c - one plan for several ranks
 *
 * What could break: a byte that some member keeps is not read, or one that nobody needs is; a
 * member finds its slice elsewhere than it computed, or misaligned; the order is not the members';
 * both sides work out other figures of a member. Every byte of every file is marked here from the
 * members' own plans, by code that knows nothing of merging, and compared with what the union
 * reads; each slice that need not be gathered is looked up in the union's slabs.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "plan/plan_internal.h"
#include "support/planning.h"
#include "support/shapes.h"

#define FILES 2
#define COUNT(array) (sizeof(array) / sizeof(*(array)))

static struct shapes *folder;
static struct tnd_checkpoint *small;

/* What is planned now. */
static struct tnd_checkpoint *checkpoint;
static size_t file_count;
static uint64_t file_bytes[FILES];

static void use(struct tnd_checkpoint *opened)
{
	const struct tnd_file *files = tnd_checkpoint_files(opened, &file_count);

	checkpoint = opened;
	for (size_t i = 0; i < file_count; i++)
		file_bytes[i] = files[i].bytes;
}

static void add_experts(const char *prefix)
{
	for (int expert = 5; expert >= 0; expert--) {
		shapes_add(folder, "I8", "64,256", "%sl.0.experts.%d.w1.weight", prefix, expert);
		shapes_add(folder, "F8_E8M0", "64,16", "%sl.0.experts.%d.w1.scale", prefix, expert);
		shapes_add(folder, "I8", "256,64", "%sl.0.experts.%d.w2.weight", prefix, expert);
		shapes_add(folder, "F8_E8M0", "256,4", "%sl.0.experts.%d.w2.scale", prefix, expert);
		shapes_add(folder, "F32", "", "%sl.0.experts.%d.w2.input_scale", prefix, expert);
	}
}

/*
 * Two shards, of 4 and 3 MB: runs along both dimensions, long and short, halves, heads, fused
 * experts, odd places, nothing at all.
 */
static int set_up(void **state)
{
	(void)state;
	unsetenv("TUNDISH_TP_SLICE");
	unsetenv("TUNDISH_SLAB_MB");
	folder = shapes_folder();
	shapes_config(folder,
		      "{\"num_experts\":6,\"num_attention_heads\":16,\"num_key_value_heads\":2,"
		      "\"hidden_size\":128}");
	shapes_begin(folder, "a.safetensors");
	shapes_add(folder, "F32", "0", "z.empty");
	shapes_add(folder, "BF16", "700,128", "m.embed_tokens.weight");
	shapes_add(folder, "BF16", "160,128", "m.qkv_proj.weight");
	shapes_add(folder, "BF16", "64,128", "m.k_proj.weight");
	shapes_add(folder, "BF16", "128,128", "m.o_proj.weight");
	shapes_add(folder, "I8", "8,196608", "m.down_proj.weight"); /* long runs */
	shapes_add(folder, "BF16", "2048,128", "m.gate_up_proj.weight");
	shapes_add(folder, "F4", "3,64", "m.up_proj.weight"); /* does not divide */
	shapes_add(folder, "BF16", "128", "m.norm.weight");
	shapes_add(folder, "U8", "16,5", "m.q_proj.weight"); /* slices of 5 or 20 bytes */
	shapes_add(folder, "U8", "3", "n.three");
	shapes_add(folder, "F32", "64,8", "n.gate_proj.weight"); /* at an odd place */
	shapes_add(folder, "F32", "384,1024", "n.up_proj.weight");
	shapes_add(folder, "I8", "64,64", "n.down_proj.weight");
	shapes_pad(folder, 1244);
	shapes_end(folder);
	shapes_begin(folder, "b.safetensors");
	add_experts("");
	shapes_add(folder, "BF16", "6,64,128", "l.1.experts.gate_up_proj");
	shapes_add(folder, "I8", "6,2,65536", "l.1.experts.down_proj");
	shapes_add(folder, "BF16", "6,128,32", "l.2.experts.down_proj");
	add_experts("mtp.");
	shapes_pad(folder, 3);
	shapes_end(folder);
	small = planning_open(shapes_path(folder));
	use(small);
	assert_int_equal(tnd_checkpoint_files(small, &(size_t){0})->header_bytes % 8, 0);
	return 0;
}

static int tear_down(void **state)
{
	(void)state;
	tnd_checkpoint_close(small);
	shapes_remove(folder);
	return 0;
}

/* -- plans -- */

#define MEMBERS_MAX 8

/* Some ranks of a layout: of count 0 all. */
struct group {
	uint32_t count, ranks[MEMBERS_MAX];
};

static struct tnd_plan *make_union(const struct tnd_layout *layout, const struct group *group,
				   const struct tnd_plan_opts *opts)
{
	struct tnd_plan *plan = NULL;
	struct tnd_error error = {0};

	if (tnd_plan_create_union(checkpoint, layout, group->count ? group->ranks : NULL,
				  group->count, opts, &plan, &error) < 0)
		fail_msg("%s", error.message);
	return plan;
}

/* -- marks: a byte for each byte of the files -- */

#define KEPT 1u  /* by a member */
#define READ 2u  /* by a member */
#define ROWS 4u  /* in a row of which a member keeps something */
#define UNION 8u /* by the union */

struct marks {
	unsigned char *of[FILES];
};

/* By words: most of this test's time. */
static void mark(struct marks *marks, uint32_t file, uint64_t begin, uint64_t end, unsigned what)
{
	unsigned char *at = marks->of[file] + begin, *last = marks->of[file] + end;
	uint64_t word, pattern = what * UINT64_C(0x0101010101010101);

	assert_true(begin <= end && end <= file_bytes[file]);
	for (; last - at >= (ptrdiff_t)sizeof(word); at += sizeof(word)) {
		memcpy(&word, at, sizeof(word));
		word |= pattern;
		memcpy(at, &word, sizeof(word));
	}
	for (; at < last; at++)
		*at |= (unsigned char)what;
}

static void mark_item(struct marks *marks, const struct tnd_plan_item *item, unsigned kept,
		      unsigned rows)
{
	uint32_t file = item->tensor->file;

	for (uint64_t row = 0; row < item->row_count; row++) {
		uint64_t begin = item->file_offset + row * item->row_bytes;

		if (item->kept_bytes)
			mark(marks, file, begin, begin + item->row_bytes, rows);
		for (uint32_t p = 0; p < item->part_count; p++)
			mark(marks, file, begin + item->part_begin[p],
			     begin + item->part_begin[p] + item->part_bytes[p], kept);
	}
}

static void mark_plan(struct marks *marks, const struct tnd_plan *plan, bool of_union)
{
	size_t count;
	const struct tnd_plan_item *items = tnd_plan_items(plan, &count);

	for (size_t i = 0; i < count; i++)
		if (of_union)
			mark_item(marks, &items[i], UNION, 0);
		else if (items[i].flags & TND_ITEM_F_ROWS)
			mark_item(marks, &items[i], KEPT, ROWS | READ);
		else
			mark_item(marks, &items[i], KEPT | READ, ROWS);
}

static struct marks marks_new(void)
{
	struct marks marks = {{NULL}};

	for (size_t i = 0; i < file_count; i++) {
		marks.of[i] = calloc(1, file_bytes[i]);
		assert_non_null(marks.of[i]);
	}
	return marks;
}

static void marks_free(struct marks *marks)
{
	for (size_t i = 0; i < file_count; i++)
		free(marks->of[i]);
}

/*
 * Of a tensor all is read that members keep. Beyond: nothing, or exactly what the members read, or
 * (`loose`: other rows with other parts, or too many parts) nothing outside their rows.
 */
static void compare_tensor(const struct marks *marks, const struct tnd_tensor *tensor, bool loose)
{
	const unsigned char *at = marks->of[tensor->file] + tensor->offset;
	uint64_t counts[16] = {0};
	bool is_kept = true, is_read = true, in_rows = true;

	for (uint64_t i = 0; i < tensor->bytes; i++)
		counts[at[i] & 15]++;
	for (unsigned what = 0; what < 16; what++) {
		bool read = what & UNION;

		if (!counts[what])
			continue;
		if ((what & KEPT) && !read)
			fail_msg("%s: not all is read", tensor->name);
		is_kept = is_kept && read == !!(what & KEPT);
		is_read = is_read && read == !!(what & READ);
		in_rows = in_rows && (!read || what & ROWS);
	}
	if (!is_kept && !is_read && !(loose && in_rows))
		fail_msg("%s: more is read than is needed", tensor->name);
}

/* -- where a byte of the file is in the union's slabs -- */

struct place {
	uint32_t slab;
	uint64_t offset;
};

static bool find_place(const struct tnd_plan *plan, const struct tnd_plan_item *item, uint64_t at,
		       struct place *ret_place)
{
	uint64_t packed = item->slab_offset;

	for (uint64_t row = 0; row < item->row_count; row++)
		for (uint32_t p = 0; p < item->part_count; p++) {
			uint64_t begin =
				item->file_offset + row * item->row_bytes + item->part_begin[p];

			ret_place->slab = item->slab;
			ret_place->offset = plan->choice.packing == TND_PACKING_FILE
						    ? tnd__plan_image_place(plan, item->slab, at)
						    : packed + at - begin;
			if (at >= begin && at - begin < item->part_bytes[p])
				return true;
			packed += item->part_bytes[p];
		}
	return false;
}

/* A tensor may be in several items. */
static struct place place_of(const struct tnd_plan *plan, const struct tnd_tensor *tensor,
			     uint64_t at)
{
	size_t count, i;
	const struct tnd_plan_item *items = tnd_plan_items(plan, &count);
	struct place place;

	assert_int_equal(tnd_plan_find(plan, tensor->name, tensor->name_bytes, &i), 0);
	for (; i < count && items[i].tensor == tensor; i++)
		if (find_place(plan, &items[i], at, &place))
			return place;
	fail_msg("%s: byte %llu is in no run", tensor->name, (unsigned long long)at);
	return (struct place){0};
}

/* Whether all of the slice is one run in the union's slabs that begins where it may. */
static bool is_ready(const struct tnd_plan *all, const struct tnd_plan *own,
		     const struct tnd_plan_item *item)
{
	struct place first = place_of(all, item->tensor, item->file_offset + item->part_begin[0]);
	uint32_t bits = tnd_dtype_bits(item->tensor->dtype);
	uint64_t seen = 0;

	for (uint64_t row = 0; row < item->row_count; row++)
		for (uint32_t p = 0; p < item->part_count; p++) {
			uint64_t begin =
				item->file_offset + row * item->row_bytes + item->part_begin[p];
			uint64_t last = begin + item->part_bytes[p] - 1;
			struct place a = place_of(all, item->tensor, begin);
			struct place b = place_of(all, item->tensor, last);

			if (a.slab != first.slab || a.offset != first.offset + seen ||
			    b.slab != first.slab || b.offset - a.offset != last - begin)
				return false;
			seen += item->part_bytes[p];
		}
	if (own->choice.align && first.offset % own->choice.align)
		return false;
	return bits % 8 || first.offset % (bits / 8) == 0;
}

/* A slice that is not gathered is ready; in packing file one that is is not. */
static void check_slice(const struct tnd_plan *all, const struct tnd_plan *own,
			const struct tnd_plan_item *item)
{
	if (!item->kept_bytes)
		assert_false(tnd__plan_gathers(own, item));
	else if (!tnd__plan_gathers(own, item))
		assert_true(is_ready(all, own, item));
	else if (own->choice.packing == TND_PACKING_FILE)
		assert_false(is_ready(all, own, item));
}

/* -- a union against its members' own plans -- */

static void check_order(const struct tnd_plan *all, const struct tnd_plan *own)
{
	size_t all_count, count, at = 0;
	const struct tnd_plan_item *all_items = tnd_plan_items(all, &all_count);
	const struct tnd_plan_item *items = tnd_plan_items(own, &count);

	for (size_t i = 0; i < count; i++) {
		while (at < all_count && all_items[at].tensor != items[i].tensor)
			at++;
		assert_true(at++ < all_count);
	}
}

static void check_member(const struct tnd_plan *all, const struct tnd_plan *own)
{
	const struct tnd_plan_member *members, *listed = NULL;
	size_t member_count = tnd_plan_members(all, &members), count;
	const struct tnd_plan_item *items = tnd_plan_items(own, &count);
	struct tnd_plan_totals totals = planning_totals(own);
	struct tnd_plan_member mine;
	uint64_t gathered = 0;

	check_order(all, own);
	for (size_t i = 0; i < count; i++) {
		check_slice(all, own, &items[i]);
		gathered += tnd__plan_gathers(own, &items[i]) ? items[i].kept_bytes : 0;
	}
	for (size_t i = 0; i < member_count; i++)
		if (members[i].rank == own->layout.rank)
			listed = &members[i];
	assert_non_null(listed);
	tnd__plan_as_member(own, (uint32_t)member_count, tnd__plan_node_budget(all), &mine);
	assert_memory_equal(&mine, listed, sizeof(mine));
	assert_int_equal(listed->tensors, totals.tensors);
	assert_int_equal(listed->kept_bytes, totals.kept_bytes);
	assert_int_equal(listed->gathered_bytes, gathered);
	assert_int_equal(!!listed->staging_bytes, !!gathered);
	assert_int_equal(tnd__plan_kin(own), tnd__plan_kin(all));
}

static void check_images(const struct tnd_plan *plan, size_t slab, uint64_t bytes)
{
	const struct tnd_plan_image *images;
	size_t count = tnd_plan_images(plan, slab, &images);
	uint64_t free_from = 0;

	for (size_t i = 0; i < count; i++) {
		uint64_t begin = tnd__round_down(images[i].slab_offset, 4096);
		uint64_t length = images[i].file_end - images[i].file_begin;

		assert_true(images[i].file_begin < images[i].file_end && begin >= free_from);
		assert_int_equal(images[i].slab_offset % 4096, images[i].file_begin % 4096);
		free_from = tnd__round_up(images[i].slab_offset + length, 4096);
		assert_true(free_from <= bytes);
	}
}

/* What holds of any union: as in the file, and no two bytes in one place. */
static void check_union(const struct tnd_plan *plan)
{
	struct tnd_plan_totals totals = planning_totals(plan);
	const struct tnd_plan_member *members;
	size_t item_count, slab_count, member_count = tnd_plan_members(plan, &members);
	const struct tnd_plan_item *items = tnd_plan_items(plan, &item_count);
	const struct tnd_plan_slab *slabs = tnd_plan_slabs(plan, &slab_count);
	uint64_t read = 0, aside = 0, node, *used = calloc(slab_count + 1, sizeof(*used));

	assert_non_null(used);
	for (size_t i = 0; i < item_count; i++) {
		const struct tnd_plan_item *item = &items[i];

		assert_false(item->flags & (TND_ITEM_F_ROWS | TND_ITEM_F_REALIGN));
		assert_int_equal(item->kept_bytes, item->read_bytes);
		assert_int_equal(item->expert_length, 0);
		assert_true(item->part_count >= 1 && item->part_count <= TND_PLAN_PART_MAX);
		for (uint32_t p = 1; p < item->part_count; p++)
			assert_true(item->part_begin[p - 1] + item->part_bytes[p - 1] <
				    item->part_begin[p]);
		read += item->read_bytes;
		if (!item->kept_bytes)
			continue;
		assert_true(item->slab_offset + item->kept_bytes <= slabs[item->slab].bytes);
		if (totals.packing == TND_PACKING_FILE)
			continue;
		assert_int_equal(item->slab_offset % 4096, 0);
		assert_true(item->slab_offset >= used[item->slab]);
		used[item->slab] = item->slab_offset + item->kept_bytes;
	}
	for (size_t s = 0; s < slab_count; s++)
		check_images(plan, s, slabs[s].bytes);
	for (size_t i = 0; i < member_count; i++) {
		assert_true(!i || members[i].rank > members[i - 1].rank);
		aside += members[i].metadata_bytes + members[i].staging_bytes;
	}
	free(used);
	assert_int_equal(tnd_plan_node_read_bytes(plan, &node), 0);
	assert_int_equal(node, read);
	assert_int_equal(totals.read_bytes, read);
	assert_true(totals.budget_bytes + aside <= tnd__plan_node_budget(plan));
	assert_true(totals.needed_budget_bytes <= totals.budget_bytes);
}

static bool is_loose(const struct tnd_tensor *tensor, const struct group *group)
{
	bool fused = strstr(tensor->name, "experts.gate_up_proj") ||
		     strstr(tensor->name, "experts.down_proj");

	return group->count &&
	       (fused || strstr(tensor->name, "gate_up") || strstr(tensor->name, "qkv"));
}

static void check_group(struct tnd_layout layout, const struct group *group,
			const struct tnd_plan_opts *opts)
{
	struct tnd_plan *all = make_union(&layout, group, opts);
	struct marks marks = marks_new();
	const struct tnd_plan_member *members;
	size_t member_count = tnd_plan_members(all, &members), tensor_count;
	const struct tnd_tensor *tensors = tnd_checkpoint_tensors(checkpoint, &tensor_count);
	uint64_t node = 0, read;

	check_union(all);
	mark_plan(&marks, all, true);
	for (size_t i = 0; i < member_count; i++) {
		struct tnd_plan *own;

		layout.rank = members[i].rank;
		own = planning_make(checkpoint, &layout, opts);
		mark_plan(&marks, own, false);
		check_member(all, own);
		tnd_plan_node_read_bytes(own, &node);
		tnd_plan_close(own);
	}
	for (size_t i = 0; i < tensor_count; i++)
		compare_tensor(&marks, &tensors[i], is_loose(&tensors[i], group));
	tnd_plan_node_read_bytes(all, &read);
	if (!group->count)
		assert_int_equal(read, node);
	else
		assert_true(read <= node);
	marks_free(&marks);
	tnd_plan_close(all);
}

static const struct {
	uint32_t tp, dp, ep;
} sizes[] = {{1, 1, 1}, {4, 1, 1}, {4, 1, 2}, {4, 1, 4},
	     {2, 2, 2}, {8, 1, 2}, {8, 1, 4}, {8, 1, 1}};

static const struct group groups[] = {
	{0, {0}}, {1, {1}}, {2, {2, 0}}, {2, {0, 3}}, {3, {1, 3, 2}},
};

static void check_groups(const struct tnd_plan_opts *opts)
{
	for (size_t s = 0; s < COUNT(sizes); s++)
		for (size_t g = 0; g < (sizes[s].tp > 1 ? COUNT(groups) : 1); g++)
			check_group(planning_layout(sizes[s].tp, sizes[s].dp, sizes[s].ep, 77),
				    &groups[g], opts);
}

static void every_byte(void **state)
{
	(void)state;
	for (uint32_t slice = TND_SLICE_NONE; slice <= TND_SLICE_ALL; slice++)
		for (uint32_t p = TND_PACKING_NAME; p <= TND_PACKING_FILE; p++) {
			struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, slice, p);

			opts.slab_bytes = slice == TND_SLICE_ALL ? 1 << 20 : 0;
			check_groups(&opts);
		}
}

static void phases(void **state)
{
	(void)state;
	for (uint32_t phase = TND_PHASE_TARGET; phase <= TND_PHASE_DRAFT; phase++) {
		struct tnd_plan_opts opts = planning_opts(phase, TND_SLICE_ALL, TND_PACKING_FILE);

		check_groups(&opts);
	}
}

static void other_options(void **state)
{
	static const char *const names[] = {"m.*", "*.experts.3.*"};
	struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, TND_SLICE_ALL, TND_PACKING_FILE);

	(void)state;
	opts.run_min_bytes = 4096;
	opts.align = 64;
	check_groups(&opts);
	opts.packing = TND_PACKING_NAME;
	opts.placement = TND_PLACEMENT_ROUND_ROBIN;
	check_groups(&opts);
	opts.flags = TND_PLAN_F_EP_SCALES_ALL;
	opts.slab_bytes = TND_SLAB_NONE;
	check_groups(&opts);
	opts.flags = TND_PLAN_F_NO_EP_FILTER | TND_PLAN_F_NAMES;
	opts.names = names;
	opts.name_count = 2;
	check_groups(&opts);
}

/* -- shapes of single items -- */

static const struct tnd_plan_item *item_of(struct tnd_plan **plan, uint32_t tp, uint32_t ep,
					   struct group group, const char *name)
{
	struct tnd_layout layout = planning_layout(tp, 1, ep, 0);
	struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, TND_SLICE_ALL, TND_PACKING_FILE);
	const struct tnd_plan_item *item;

	opts.run_min_bytes = 4096;
	*plan = make_union(&layout, &group, &opts);
	item = planning_item(*plan, name);
	assert_non_null(item);
	return item;
}

static void shapes_of_items(void **state)
{
	const struct tnd_plan_item *item;
	struct tnd_plan *plan;

	(void)state;
	/* Long runs of two members, each read alone. */
	item = item_of(&plan, 4, 1, (struct group){2, {0, 2}}, "m.down_proj.weight");
	assert_int_equal(item->dim, 1);
	assert_int_equal(item->row_count, 8);
	assert_int_equal(item->part_count, 2);
	assert_int_equal(item->part_begin[1], 98304);
	assert_int_equal(item->kept_bytes, 8 * 98304);
	tnd_plan_close(plan);
	/* Together they are the tensor. */
	item = item_of(&plan, 4, 1, (struct group){0, {0}}, "m.down_proj.weight");
	assert_int_equal(item->dim, -1);
	assert_int_equal(item->row_count, 1);
	assert_int_equal(item->part_count, 1);
	tnd_plan_close(plan);
	/* Short runs: all rows, as they are. */
	item = item_of(&plan, 4, 1, (struct group){1, {2}}, "n.down_proj.weight");
	assert_int_equal(item->row_count, 1);
	assert_int_equal(item->kept_bytes, 4096);
	tnd_plan_close(plan);
	/*
	 * Four runs, of which there may be three: the gap of 32 KiB between ranks 0 and 2 is read,
	 * that of 160 KiB between the halves not.
	 */
	item = item_of(&plan, 8, 1, (struct group){2, {0, 2}}, "m.gate_up_proj.weight");
	assert_int_equal(item->part_count, 3);
	assert_int_equal(item->kept_bytes, 5 * 32768);
	assert_int_equal(item->length, 5 * 128);
	assert_int_equal(item->part_begin[0], 0);
	assert_int_equal(item->part_bytes[0], 3 * 32768);
	assert_int_equal(item->part_begin[1], 8 * 32768);
	tnd_plan_close(plan);
	/* The same columns of the experts of two owners. */
	item = item_of(&plan, 4, 2, (struct group){2, {0, 2}}, "l.1.experts.down_proj");
	assert_int_equal(item->dim, 2);
	assert_int_equal(item->row_count, 12);
	assert_int_equal(item->part_bytes[0], 32768);
	tnd_plan_close(plan);
	/* Other columns of each: whole rows. */
	item = item_of(&plan, 4, 2, (struct group){2, {0, 3}}, "l.1.experts.down_proj");
	assert_int_equal(item->dim, -1);
	tnd_plan_close(plan);
	/* The same columns, but there is another owner's between. */
	item = item_of(&plan, 8, 4, (struct group){2, {0, 4}}, "l.1.experts.down_proj");
	assert_int_equal(item->dim, 0);
	assert_int_equal(item->part_count, 2);
	assert_int_equal(item->part_bytes[0], 2 * 131072);
	assert_int_equal(item->part_begin[1], 4 * 131072);
	assert_int_equal(item->part_bytes[1], 131072);
	tnd_plan_close(plan);
	/* One owner's experts, all columns. */
	item = item_of(&plan, 4, 2, (struct group){2, {2, 3}}, "l.1.experts.down_proj");
	assert_int_equal(item->dim, 0);
	assert_int_equal(item->start, 3);
	assert_int_equal(item->length, 3);
	assert_int_equal(item->row_count, 1);
	tnd_plan_close(plan);
}

/* What had to stay whole is said once for a tensor, not once for each member. */
static void warnings(void **state)
{
	struct tnd_layout layout = planning_layout(8, 1, 1, 0);
	struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, TND_SLICE_ALL, TND_PACKING_FILE);
	struct tnd_plan *all = make_union(&layout, &groups[0], &opts);
	struct tnd_plan *own = planning_make(checkpoint, &layout, &opts);
	const char *const *texts, *const *own_texts;
	size_t count = tnd_plan_warnings(all, &texts);

	(void)state;
	assert_true(count > 0);
	assert_int_equal(count, tnd_plan_warnings(own, &own_texts));
	for (size_t i = 0; i < count; i++)
		assert_string_equal(texts[i], own_texts[i]);
	assert_int_equal(planning_totals(all).skipped, planning_totals(own).skipped);
	tnd_plan_close(all);
	tnd_plan_close(own);
}

/* -- pieces -- */

static struct shapes *large_folder;

/* Tensors above 1 MiB, of which one lies askew. */
static int set_up_large(void **state)
{
	(void)state;
	large_folder = shapes_folder();
	shapes_begin(large_folder, "l.safetensors");
	shapes_add(large_folder, "I8", "8,393216", "m.down_proj.weight");
	shapes_add(large_folder, "BF16", "4096,512", "m.gate_up_proj.weight");
	shapes_add(large_folder, "U8", "1", "n.one");
	shapes_add(large_folder, "F64", "512,768", "n.up_proj.weight");
	shapes_end(large_folder);
	use(planning_open(shapes_path(large_folder)));
	return 0;
}

static int tear_down_large(void **state)
{
	(void)state;
	tnd_checkpoint_close(checkpoint);
	shapes_remove(large_folder);
	use(small);
	return 0;
}

/* Pieces of `cut` are the bytes of `whole`, in whole elements. */
static void compare_pieces(const struct tnd_plan *whole, const struct tnd_plan *cut)
{
	struct marks marks = marks_new();
	const struct tnd_plan_item *items;
	bool any = false;
	size_t count;

	check_union(cut);
	items = tnd_plan_items(cut, &count);
	for (size_t i = 0; i < count; i++) {
		uint32_t bits = tnd_dtype_bits(items[i].tensor->dtype);

		any = any || items[i].flags & TND_ITEM_F_PIECE;
		assert_int_equal(items[i].kept_bytes * 8 % bits, 0);
		mark_item(&marks, &items[i], UNION, 0);
	}
	assert_true(any);
	items = tnd_plan_items(whole, &count);
	for (size_t i = 0; i < count; i++) {
		assert_false(items[i].flags & TND_ITEM_F_PIECE);
		mark_item(&marks, &items[i], KEPT | READ, ROWS);
		compare_tensor(&marks, items[i].tensor, false);
	}
	assert_int_equal(planning_totals(whole).kept_bytes, planning_totals(cut).kept_bytes);
	assert_int_equal(tnd__plan_kin(whole), tnd__plan_kin(cut));
	marks_free(&marks);
}

static void pieces(void **state)
{
	(void)state;
	for (uint32_t p = TND_PACKING_NAME; p <= TND_PACKING_FILE; p++)
		for (uint32_t slice = TND_SLICE_NONE; slice <= TND_SLICE_ALL; slice += 2)
			for (size_t g = 0; g < COUNT(groups); g++) {
				struct tnd_layout layout = planning_layout(4, 1, 1, 0);
				struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, slice, p);
				const struct tnd_plan_member *members;
				struct tnd_plan *whole, *cut;
				size_t count;

				/* Slices of one rank are small. */
				if (slice == TND_SLICE_ALL && groups[g].count == 1)
					continue;
				opts.oversize = TND_OVERSIZE_PIECES;
				opts.slab_bytes = TND_SLAB_NONE;
				whole = make_union(&layout, &groups[g], &opts);
				count = tnd_plan_members(whole, &members);
				opts.budget_bytes = 1900 << 10;
				for (size_t i = 0; i < count; i++) {
					struct tnd_plan_member aside = members[i];

					tnd__plan_set_aside(whole, (uint32_t)count, 0, &aside);
					opts.budget_bytes +=
						aside.metadata_bytes + aside.staging_bytes;
				}
				cut = make_union(&layout, &groups[g], &opts);
				compare_pieces(whole, cut);
				tnd_plan_close(whole);
				tnd_plan_close(cut);
			}
}

/* A member whose own plan is in pieces counts its slices whole, as the union does. */
static void members_in_pieces(void **state)
{
	(void)state;
	for (uint32_t p = TND_PACKING_NAME; p <= TND_PACKING_FILE; p++)
		for (uint32_t slice = TND_SLICE_NONE; slice <= TND_SLICE_ALL; slice += 2)
			for (uint32_t rank = 0; rank < 2; rank++) {
				struct tnd_layout layout = planning_layout(2, 1, 1, rank);
				struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, slice, p);
				const struct tnd_plan_member *members;
				struct tnd_plan_member mine;
				struct tnd_plan *all, *own;

				opts.oversize = TND_OVERSIZE_PIECES;
				all = make_union(&layout, &groups[0], &opts);
				tnd_plan_members(all, &members);
				opts.budget_bytes = 1500 << 10;
				own = planning_make(checkpoint, &layout, &opts);
				assert_true(planning_item(own, "m.down_proj.weight")->flags &
					    TND_ITEM_F_PIECE);
				assert_true(planning_item(own, "m.gate_up_proj.weight")->flags &
					    TND_ITEM_F_PIECE);
				tnd__plan_as_member(own, 2, tnd__plan_node_budget(all), &mine);
				assert_memory_equal(&mine, &members[rank], sizeof(mine));
				tnd_plan_close(all);
				tnd_plan_close(own);
			}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_byte),
		cmocka_unit_test(phases),
		cmocka_unit_test(other_options),
		cmocka_unit_test(shapes_of_items),
		cmocka_unit_test(warnings),
		cmocka_unit_test_setup_teardown(pieces, set_up_large, tear_down_large),
		cmocka_unit_test_setup_teardown(members_in_pieces, set_up_large, tear_down_large),
	};

	return cmocka_run_group_tests(tests, set_up, tear_down);
}
