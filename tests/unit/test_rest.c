/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_rest.c - a plan without the items that came from elsewhere
 *
 * What could break: an item that is lost, twice, or at another place than the images and the other items of its slab assume; a slab of the rest that
 * is none of the whole's; a rest that needs more than the budget that held the whole. Many sets of items are taken out of plans of both packings,
 * with pieces and without, and every number of the rest is held against the whole.
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

static int set_up(void **state)
{
	(void)state;
	unsetenv("TUNDISH_TP_SLICE");
	unsetenv("TUNDISH_SLAB_MB");
	folder = shapes_folder();
	for (int file = 0; file < 3; file++) {
		char name[64];

		snprintf(name, sizeof(name), "model-%d.safetensors", file);
		shapes_begin(folder, name);
		shapes_add(folder, "F32", "0,7", "s%d.empty", file);
		for (int i = 0; i < 30; i++) {
			char shape[32];

			snprintf(shape, sizeof(shape), "512,%d", 300 + i % 7 * 100);
			shapes_add(folder, "BF16", shape, "s%d.t%02d.q_proj.weight", file, i);
			shapes_add(folder, "U8", "333", "s%d.t%02d.odd", file, i);
		}
		shapes_add(folder, "BF16", "1024,2500", "s%d.t05.big.o_proj.weight", file);
		shapes_pad(folder, 1234);
		shapes_end(folder);
	}
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

static bool is_set(const unsigned char *bits, size_t i)
{
	return bits[i / 8] >> i % 8 & 1;
}

/* The slab that an item is in, and where, is as in the whole; in packing file the images, too. */
static void check_place(const struct tnd_plan *whole, const struct tnd_plan *rest,
			const struct tnd_plan_item *before, const struct tnd_plan_item *after)
{
	uint64_t begin, end;

	if (before->slab == TND_PLAN_NO_SLAB) {
		assert_int_equal(after->slab, TND_PLAN_NO_SLAB);
		return;
	}
	assert_int_equal(rest->slabs[after->slab].bytes, whole->slabs[before->slab].bytes);
	assert_int_equal(rest->slabs[after->slab].file, whole->slabs[before->slab].file);
	assert_int_equal(rest->slabs[after->slab].flags, whole->slabs[before->slab].flags);
	if (whole->choice.packing != TND_PACKING_FILE)
		return;
	for (uint64_t k = 0; k < tnd__plan_item_range_count(before); k++) {
		tnd__plan_item_range(before, k, &begin, &end);
		assert_int_equal(tnd__plan_image_place(rest, after->slab, begin),
				 tnd__plan_image_place(whole, before->slab, begin));
		assert_int_equal(tnd__plan_image_place(rest, after->slab, end - 1),
				 tnd__plan_image_place(whole, before->slab, end - 1));
	}
}

static void check_slabs(const struct tnd_plan *rest)
{
	size_t counted = 0, with_bytes = 0;

	for (size_t s = 0; s < rest->slab_count; s++) {
		const struct tnd_plan_slab *slab = &rest->slabs[s];
		uint64_t count = 0;

		assert_int_equal(rest->items[slab->first_item].slab, s);
		assert_int_equal(rest->items[slab->last_item].slab, s);
		for (size_t i = slab->first_item; i <= slab->last_item; i++)
			count += rest->items[i].slab == s;
		assert_int_equal(count, slab->item_count);
		counted += count;
	}
	for (size_t i = 0; i < rest->item_count; i++)
		with_bytes += rest->items[i].slab != TND_PLAN_NO_SLAB;
	assert_int_equal(counted, with_bytes);
}

static uint64_t own_bytes(const struct tnd_plan *rest)
{
	uint64_t bytes = sizeof(*rest) + rest->item_count * (sizeof(*rest->items) + sizeof(size_t));

	bytes += rest->slab_count * sizeof(*rest->slabs) + rest->tensor_count * sizeof(uint32_t);
	return bytes + rest->image_count * sizeof(*rest->images);
}

static void check_rest(const struct tnd_plan *whole, const unsigned char *taken)
{
	struct tnd__plan_need before = tnd__plan_need(whole, UINT64_MAX), after;
	struct tnd_plan *rest = NULL;
	uint64_t kept = 0;
	size_t *map, n = 0, found;

	assert_int_equal(tnd__plan_rest(whole, taken, &rest, &map), 0);
	for (size_t i = 0; i < whole->item_count; i++) {
		struct tnd_plan_item item;

		if (is_set(taken, i))
			continue;
		assert_true(n < rest->item_count);
		assert_int_equal(map[n], i);
		item = rest->items[n];
		check_place(whole, rest, &whole->items[i], &item);
		item.slab = whole->items[i].slab;
		assert_memory_equal(&item, &whole->items[i], sizeof(item));
		kept += item.kept_bytes;
		assert_int_equal(
			tnd_plan_find(rest, item.tensor->name, item.tensor->name_bytes, &found), 0);
		assert_ptr_equal(rest->items[found].tensor, item.tensor);
		n++;
	}
	assert_int_equal(n, rest->item_count);
	assert_int_equal(kept, planning_totals(rest).kept_bytes);
	check_slabs(rest);
	after = tnd__plan_need(rest, UINT64_MAX);
	assert_true(after.alive <= before.alive && after.metadata <= before.metadata);
	assert_true(own_bytes(rest) <= tnd__plan_rest_bytes(whole));
	free(map);
	tnd_plan_close(rest);
}

/* Nothing, everything, one, all but one, halves, and by chance. */
static void check_sets(const struct tnd_plan *whole)
{
	size_t count = whole->item_count, bytes = count / 8 + 1;
	unsigned char *taken = calloc(bytes, 1);
	uint64_t random = 88172645463325252u;

	for (int way = 0; way < 40; way++) {
		memset(taken, 0, bytes);
		for (size_t i = 0; i < count; i++) {
			bool set = way == 1 || (way == 2 && i == count / 2) ||
				   (way == 3 && i != count / 3) || (way == 4 && i < count / 2) ||
				   (way == 5 && i >= count / 2);

			random ^= random << 13;
			random ^= random >> 7;
			random ^= random << 17;
			set |= way > 5 && random % 8 < (uint64_t)(way % 8);
			taken[i / 8] |= (unsigned char)(set << i % 8);
		}
		check_rest(whole, taken);
	}
	free(taken);
}

static void test_rests(void **state)
{
	static const int64_t slabs[] = {0, 1 << 20, TND_SLAB_NONE};
	struct tnd_layout layout = planning_layout(2, 1, 1, 1);

	(void)state;
	for (uint32_t packing = TND_PACKING_NAME; packing <= TND_PACKING_FILE; packing++)
		for (int i = 0; i < 12; i++) {
			struct tnd_plan_opts opts = planning_opts(
				TND_PHASE_ALL, i % 2 ? TND_SLICE_ALL : TND_SLICE_NONE, packing);
			struct tnd_plan *plan;

			opts.slab_bytes = slabs[i % 3];
			opts.align = i % 4 ? 0 : 64;
			opts.oversize = i < 6 ? TND_OVERSIZE_PIECES : TND_OVERSIZE_REFUSE;
			opts.budget_bytes = i < 6 ? 6u << 20 : 64u << 20;
			plan = planning_make(checkpoint, &layout, &opts);
			check_sets(plan);
			tnd_plan_close(plan);
		}
}

#ifdef TND_FAILPOINTS
/* Every allocation fails in turn. */
static void test_no_memory(void **state)
{
	struct tnd_layout layout = planning_layout(1, 1, 1, 0);
	struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, TND_SLICE_NONE, TND_PACKING_FILE);
	struct tnd_plan *whole = planning_make(checkpoint, &layout, &opts), *rest;
	unsigned char *taken = calloc(whole->item_count / 8 + 1, 1);
	size_t *map;
	int rc = -ENOMEM;

	(void)state;
	for (int n = 1; rc < 0; n++) {
		char text[32];

		snprintf(text, sizeof(text), "plan.alloc=ENOMEM@%dx1", n);
		assert_int_equal(tnd__failpoints_set(text), 0);
		rc = tnd__plan_rest(whole, taken, &rest, &map);
		tnd__failpoints_set(NULL);
		assert_true(rc == 0 ? n == 9 : rc == -ENOMEM);
	}
	free(map);
	tnd_plan_close(rest);
	free(taken);
	tnd_plan_close(whole);
}
#endif

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_rests),
#ifdef TND_FAILPOINTS
		cmocka_unit_test(test_no_memory),
#endif
	};

	return cmocka_run_group_tests(tests, set_up, tear_down);
}
