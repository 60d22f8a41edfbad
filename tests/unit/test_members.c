/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_members.c - who a node's reader is for, what they set aside, whether they ask for the same
 *
 * What could break: more is set aside and read into than the budget allows; a budget is refused
 * where a smaller one is accepted, or the one that a refusal names is not enough, or not the least;
 * a rank with other inputs has the same kin, or one with the same another; a member that does not
 * exist is taken. Figures that follow from the interface's rules are written out here.
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

#define COUNT(array) (sizeof(array) / sizeof(*(array)))

static struct shapes *folder;
static struct tnd_checkpoint *checkpoint;

/* One shard whose data begins at a whole element. */
static int set_up(void **state)
{
	(void)state;
	unsetenv("TUNDISH_TP_SLICE");
	unsetenv("TUNDISH_SLAB_MB");
	folder = shapes_folder();
	shapes_config(folder, "{\"num_experts\":6,\"num_attention_heads\":16,"
			      "\"num_key_value_heads\":4,\"hidden_size\":128}");
	shapes_begin(folder, "a.safetensors");
	shapes_add(folder, "BF16", "128,128", "m.o_proj.weight");
	shapes_add(folder, "I8", "8,196608", "m.down_proj.weight");
	shapes_add(folder, "F32", "384,1024", "m.up_proj.weight");
	shapes_add(folder, "BF16", "128", "m.norm.weight");
	for (int expert = 0; expert < 6; expert++) {
		shapes_add(folder, "I8", "64,256", "l.0.experts.%d.w1.weight", expert);
		shapes_add(folder, "F8_E8M0", "64,16", "l.0.experts.%d.w1.scale", expert);
		shapes_add(folder, "I8", "256,64", "l.0.experts.%d.w2.weight", expert);
	}
	shapes_add(folder, "U8", "3", "n.three");
	shapes_add(folder, "BF16", "128", "mtp.norm.weight");
	shapes_end(folder);
	checkpoint = planning_open(shapes_path(folder));
	assert_int_equal(tnd_checkpoint_files(checkpoint, &(size_t){0})->header_bytes % 4, 0);
	return 0;
}

static int tear_down(void **state)
{
	(void)state;
	tnd_checkpoint_close(checkpoint);
	shapes_remove(folder);
	return 0;
}

static struct tnd_plan *make_union(const struct tnd_layout *layout, const uint32_t *members,
				   size_t count, const struct tnd_plan_opts *opts)
{
	struct tnd_plan *plan = NULL;
	struct tnd_error error = {0};

	if (tnd_plan_create_union(checkpoint, layout, members, count, opts, &plan, &error) < 0)
		fail_msg("%s", error.message);
	return plan;
}

static int refused(const struct tnd_layout *layout, const uint32_t *members, size_t count,
		   const struct tnd_plan_opts *opts, const char *words)
{
	struct tnd_plan *plan = NULL;
	struct tnd_error error = {0};
	int rc = tnd_plan_create_union(checkpoint, layout, members, count, opts, &plan, &error);

	assert_true(rc < 0);
	assert_null(plan);
	assert_int_equal(rc, error.code);
	if (!strstr(error.message, words))
		fail_msg("'%s' is not in: %s", words, error.message);
	return rc;
}

static void check_sum(const struct tnd_plan *plan)
{
	struct tnd_plan_totals totals = planning_totals(plan);
	const struct tnd_plan_member *members;
	size_t count = tnd_plan_members(plan, &members);
	uint64_t aside = 0;

	for (size_t i = 0; i < count; i++)
		aside += members[i].metadata_bytes + members[i].staging_bytes;
	assert_true(totals.budget_bytes + aside <= tnd__plan_node_budget(plan));
	assert_true(totals.needed_budget_bytes <= totals.budget_bytes);
}

/* -- the budget -- */

/* The least budget that a refusal names. */
static uint64_t least_budget(const struct tnd_layout *layout, struct tnd_plan_opts opts)
{
	static const char words[] = "a budget of at least ";
	struct tnd_plan *plan = NULL;
	struct tnd_error error = {0};
	const char *at;

	opts.budget_bytes = 1;
	assert_int_equal(tnd_plan_create_union(checkpoint, layout, NULL, 0, &opts, &plan, &error),
			 TND_E_BUDGET);
	assert_non_null(strstr(error.message, " for what 4 members set aside)"));
	at = strstr(error.message, words);
	assert_non_null(at);
	return strtoull(at + sizeof(words) - 1, NULL, 10);
}

static int try_budget(const struct tnd_layout *layout, struct tnd_plan_opts opts, uint64_t bytes)
{
	struct tnd_plan *plan = NULL;
	int rc;

	opts.budget_bytes = bytes;
	rc = tnd_plan_create_union(checkpoint, layout, NULL, 0, &opts, &plan, NULL);
	if (rc == 0)
		check_sum(plan);
	tnd_plan_close(plan);
	return rc;
}

/* The least budget named is enough, one byte less is not, and every larger one is. */
static void least(void **state)
{
	struct tnd_layout layout = planning_layout(4, 1, 1, 0);
	struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, TND_SLICE_ALL, TND_PACKING_FILE);

	(void)state;
	for (opts.oversize = 0; opts.oversize <= TND_OVERSIZE_OVERRUN; opts.oversize++) {
		uint64_t bytes = least_budget(&layout, opts);

		assert_int_equal(try_budget(&layout, opts, bytes), 0);
		assert_true(try_budget(&layout, opts, bytes - 1) < 0);
		for (uint64_t more = 0; more < 300000; more += 1021)
			assert_int_equal(try_budget(&layout, opts, bytes + more), 0);
		for (uint64_t more = 131072 - 8; more < 131072 + 8; more++)
			assert_int_equal(try_budget(&layout, opts, bytes / 131072 * 131072 + more),
					 0);
	}
}

/* Where the members' parts grow by a page each, the reader's does not shrink. */
static void budget_grows(void **state)
{
	static const char *const names[] = {"m.o_proj.*"};
	struct tnd_layout layout = planning_layout(4, 1, 1, 0);
	struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, TND_SLICE_ALL, TND_PACKING_FILE);
	uint64_t last = 0;

	(void)state;
	opts.flags = TND_PLAN_F_NAMES;
	opts.names = names;
	opts.name_count = 1;
	for (uint64_t bytes = (4 << 20) - 20000; bytes < (4 << 20) + 20000; bytes++) {
		const struct tnd_plan_member *members;
		struct tnd_plan *plan;
		uint64_t all;

		opts.budget_bytes = bytes;
		plan = make_union(&layout, NULL, 0, &opts);
		all = planning_totals(plan).budget_bytes + TND__RING_BYTES;
		assert_true(all >= last);
		last = all;
		tnd_plan_members(plan, &members);
		assert_int_equal(members[0].staging_bytes, bytes < 4 << 20 ? 126976 : 131072);
		for (int i = 0; i < 4; i++)
			all += members[i].metadata_bytes + members[i].staging_bytes;
		/* At most a page for each member is nobody's. */
		assert_true(all <= bytes && bytes - all <= 4 * 4096);
		tnd_plan_close(plan);
	}
}

static uint64_t staging(const struct tnd_plan *plan, uint64_t gather_bytes, uint64_t node_bytes)
{
	struct tnd_plan_member member = {.tensors = 1, .gather_bytes = gather_bytes};

	tnd__plan_set_aside(plan, 4, node_bytes, &member);
	return member.staging_bytes;
}

static void staging_by_rule(void **state)
{
	struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, TND_SLICE_NONE, TND_PACKING_FILE);
	struct tnd_plan *plan = planning_make(checkpoint, NULL, &opts), *cut, *over;

	(void)state;
	opts.oversize = TND_OVERSIZE_PIECES;
	cut = planning_make(checkpoint, NULL, &opts);
	opts.oversize = TND_OVERSIZE_OVERRUN;
	over = planning_make(checkpoint, NULL, &opts);
	assert_int_equal(staging(plan, 0, 1 << 30), 0);
	assert_int_equal(staging(plan, 1, 1 << 30), 16 << 20);
	assert_int_equal(staging(plan, 9000001, 1 << 30), 18 << 20);
	/*
	 * An eighth of 8 MiB by four; but one slice must have room, unless it is cut or goes over
	 * the budget.
	 */
	assert_int_equal(staging(plan, 1, 8 << 20), 256 << 10);
	assert_int_equal(staging(plan, 5000000, 8 << 20), 5001216);
	assert_int_equal(staging(cut, 5000000, 8 << 20), 1 << 20);
	assert_int_equal(staging(cut, 500000, 8 << 20), 503808);
	assert_int_equal(staging(over, 5000000, 8 << 20), 1 << 20);
	assert_int_equal(staging(over, 500000, 8 << 20), 503808);
	tnd_plan_close(plan);
	tnd_plan_close(cut);
	tnd_plan_close(over);
}

/* With overrun, an item larger than the budget is alone in its buffer, as in a rank's plan. */
static void check_alone(struct tnd_plan *plan)
{
	const struct tnd_plan_item *item = planning_item(plan, "m.up_proj.weight");
	struct tnd_plan_totals totals = planning_totals(plan);
	size_t count;

	assert_non_null(item);
	assert_int_equal(item->flags, TND_ITEM_F_OVERSIZED);
	assert_int_equal(item->kept_bytes, 384 * 1024 * 4);
	assert_true(tnd_plan_slabs(plan, &count)[item->slab].bytes > totals.budget_bytes);
	assert_true(totals.needed_budget_bytes <= totals.budget_bytes);
	assert_true(totals.peak_bytes > totals.budget_bytes);
	tnd_plan_close(plan);
}

static void overrun(void **state)
{
	static const char *const names[] = {"m.up_proj.*", "m.norm.*"};
	struct tnd_layout layout = planning_layout(4, 1, 1, 0);
	struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, TND_SLICE_NONE, 0);

	(void)state;
	opts.flags = TND_PLAN_F_NAMES;
	opts.names = names;
	opts.name_count = 2;
	for (opts.packing = TND_PACKING_NAME; opts.packing <= TND_PACKING_FILE; opts.packing++) {
		opts.oversize = TND_OVERSIZE_OVERRUN;
		opts.budget_bytes = least_budget(&layout, opts);
		/* The tables of five, the ring, and reads in flight. */
		assert_true(opts.budget_bytes < 1000000);
		check_alone(make_union(&layout, NULL, 0, &opts));
		check_alone(planning_make(checkpoint, &layout, &opts));
		opts.oversize = TND_OVERSIZE_REFUSE;
		refused(&layout, NULL, 0, &opts, "a budget");
	}
}

/* Small tensors, four members, 8 MiB: staging takes its part and no more. */
static void small_budget(void **state)
{
	static const char *const names[] = {"m.o_proj.*", "*.experts.*.weight"};
	struct tnd_layout layout = planning_layout(4, 1, 1, 0);
	struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, TND_SLICE_ALL, TND_PACKING_FILE);
	const struct tnd_plan_member *members;
	struct tnd_plan *plan;

	(void)state;
	opts.budget_bytes = 8 << 20;
	opts.flags = TND_PLAN_F_NAMES;
	opts.names = names;
	opts.name_count = 2;
	plan = make_union(&layout, NULL, 0, &opts);
	check_sum(plan);
	assert_int_equal(tnd_plan_members(plan, &members), 4);
	for (int i = 0; i < 4; i++) {
		assert_int_equal(members[i].gather_bytes, 8192);
		assert_int_equal(members[i].staging_bytes, 262144);
	}
	assert_true(planning_totals(plan).budget_bytes > 6 << 20);
	tnd_plan_close(plan);
	/* Enough of it: twice the largest slice, at least 16 MiB. */
	opts.budget_bytes = UINT64_C(6) << 30;
	plan = make_union(&layout, NULL, 0, &opts);
	tnd_plan_members(plan, &members);
	assert_int_equal(members[0].staging_bytes, 16 << 20);
	tnd_plan_close(plan);
	/* Nothing to gather. */
	opts.slice = TND_SLICE_NONE;
	opts.name_count = 1;
	plan = make_union(&layout, NULL, 0, &opts);
	tnd_plan_members(plan, &members);
	assert_int_equal(members[0].staging_bytes, 0);
	assert_int_equal(members[0].gather_bytes, 0);
	tnd_plan_close(plan);
}

static void refusals(void **state)
{
	static const char *const name = "m.*";
	static const uint32_t twice[] = {1, 2, 1}, beyond[] = {0, 99};
	struct tnd_layout layout = planning_layout(4, 1, 1, 99);
	struct tnd_layout many = planning_layout(64, 1, 1, 0);
	struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, TND_SLICE_NONE, TND_PACKING_FILE);
	struct tnd_plan *plan;
	uint64_t offset;
	char *text;

	(void)state;
	assert_int_equal(refused(&layout, twice, 3, &opts, "1 twice"), TND_E_LAYOUT);
	assert_int_equal(refused(&layout, beyond, 2, &opts, "found 99"), TND_E_LAYOUT);
	assert_int_equal(refused(&layout, twice, 0, &opts, "found 0"), TND_E_LAYOUT);
	assert_int_equal(refused(&many, NULL, 0, &opts, "found 64"), TND_E_LAYOUT);
	layout.ep_size = 3;
	assert_int_equal(refused(&layout, NULL, 0, &opts, "ep_size"), TND_E_LAYOUT);
	layout.ep_size = 1;
	opts.budget_bytes = 1800 << 10;
	opts.flags = TND_PLAN_F_NAMES;
	opts.names = &name;
	opts.name_count = 1;
	assert_int_equal(refused(&layout, NULL, 0, &opts, "less what the members set aside"),
			 TND_E_OVERSIZE);
	opts.slab_bytes = 2 << 20;
	assert_int_equal(refused(&layout, NULL, 0, &opts, "less what the members set aside"),
			 TND_E_BUDGET);
	opts.slab_bytes = 0;
	opts.budget_bytes = 0;
	plan = make_union(&layout, (const uint32_t[]){1}, 1, &opts);
	assert_int_equal(tnd_plan_narrow(plan, "n.three", 7, 0, 0, 1, &offset, NULL),
			 TND_E_INVALID);
	assert_int_equal(tnd_plan_json((const struct tnd_plan *const *)&plan, 1, 0, &text),
			 TND_E_INVALID);
	tnd_plan_close(plan);
	opts.phase = 9;
	assert_int_equal(refused(&layout, NULL, 0, &opts, "phase"), TND_E_INVALID);
	opts.struct_bytes = 8;
	assert_int_equal(refused(&layout, NULL, 0, &opts, "tnd_plan_create_union: expected"),
			 TND_E_INVALID);
	plan = planning_make(checkpoint, NULL, NULL);
	assert_int_equal(tnd_plan_members(plan, &(const struct tnd_plan_member *){NULL}), 0);
	tnd_plan_close(plan);
}

/* -- kin -- */

static uint64_t kin_of(const struct tnd_layout *layout, const struct tnd_plan_opts *opts)
{
	struct tnd_plan *plan = planning_make(checkpoint, layout, opts);
	struct tnd_plan *all = make_union(layout, NULL, 0, opts);
	uint64_t kin = tnd__plan_kin(plan);

	assert_int_equal(kin, tnd__plan_kin(all));
	tnd_plan_close(plan);
	tnd_plan_close(all);
	return kin;
}

static void kin_is_kept(void **state)
{
	struct tnd_layout layout = planning_layout(4, 1, 1, 3);
	struct tnd_plan_opts opts = planning_opts(0, 0, 0);
	uint64_t kin = kin_of(&layout, &opts);

	(void)state;
	layout.rank = 1;
	assert_int_equal(kin, kin_of(&layout, &opts));
	opts.budget_bytes *= 2;
	opts.slab_bytes = 4 << 20;
	assert_int_equal(kin, kin_of(&layout, &opts));
	/* What the defaults became. */
	layout.dp_size = layout.ep_size = 0;
	opts.slice = TND_SLICE_EXPERTS;
	opts.packing = TND_PACKING_FILE;
	opts.run_min_bytes = 64 << 10;
	opts.expert_count = 6;
	assert_int_equal(kin, kin_of(&layout, &opts));
}

static void kin_differs(void **state)
{
	static const char *const names[] = {"m.*"}, *const skip[] = {"n.three"};
	uint64_t kins[22];
	size_t count = 0;

	(void)state;
	for (int k = 0; k < (int)COUNT(kins); k++) {
		struct tnd_layout layout = planning_layout(4, 1, 1, 0);
		struct tnd_plan_opts opts = planning_opts(0, TND_SLICE_ALL, 0);

		switch (k) {
		case 1:
			layout.tp_size = 2;
			break;
		case 2:
			layout.tp_size = layout.dp_size = 2;
			break;
		case 3:
			layout.ep_size = 2;
			break;
		case 4:
			layout.ep_size = 4;
			break;
		case 5:
			opts.phase = TND_PHASE_TARGET;
			break;
		case 6:
			opts.phase = TND_PHASE_DRAFT;
			break;
		case 7:
			opts.slice = TND_SLICE_NONE;
			break;
		case 8:
			opts.slice = TND_SLICE_EXPERTS;
			break;
		case 9:
			opts.packing = TND_PACKING_NAME;
			break;
		case 10:
			opts.align = 64;
			break;
		case 11:
			opts.oversize = TND_OVERSIZE_PIECES;
			break;
		case 12:
			opts.placement = TND_PLACEMENT_ROUND_ROBIN;
			break;
		case 13:
			opts.flags = TND_PLAN_F_EP_SCALES_ALL;
			break;
		case 14:
			opts.run_min_bytes = 4096;
			break;
		case 15:
			opts.expert_count = 7;
			break;
		case 16:
			opts.skip = skip;
			opts.skip_count = 1;
			break;
		case 17:
			opts.flags = TND_PLAN_F_NAMES;
			opts.names = names;
			opts.name_count = 1;
			break;
		case 18:
			opts.rules = "m.norm.weight 0";
			break;
		case 19:
			opts.draft_prefix = "n.";
			break;
		case 20:
			opts.rules = "m.o_proj.weight 0";
			break;
		case 21:
			opts.rules = "m.o_proj.weight 1";
			break;
		}
		kins[count++] = kin_of(&layout, &opts);
		for (size_t i = 0; i + 1 < count; i++)
			if (kins[i] == kins[count - 1])
				fail_msg("%d has the kin of %zu", k, i);
	}
}

#ifdef TND_FAILPOINTS
static void every_allocation_fails(void **state)
{
	struct tnd_layout layout = planning_layout(4, 1, 2, 1);
	struct tnd_plan_opts opts = planning_opts(0, TND_SLICE_ALL, 0);
	int rc = -1;

	(void)state;
	opts.oversize = TND_OVERSIZE_PIECES;
	opts.budget_bytes = 8 << 20;
	opts.rules = "a 0\nb 1";
	for (uint32_t packing = TND_PACKING_NAME; packing <= TND_PACKING_FILE; packing++)
		for (unsigned at = 1; at == 1 || rc != 0; at++) {
			struct tnd_plan *plan = NULL;
			struct tnd_error error = {0};
			char text[64];

			opts.packing = packing;
			snprintf(text, sizeof(text), "plan.alloc=ENOMEM@%ux1", at);
			assert_int_equal(tnd__failpoints_set(text), 0);
			rc = tnd_plan_create_union(checkpoint, &layout, NULL, 0, &opts, &plan,
						   &error);
			tnd__failpoints_set(NULL);
			if (rc)
				assert_int_equal(rc, -ENOMEM);
			else
				assert_true(at > 10);
			tnd_plan_close(plan);
		}
}
#endif

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(least),
		cmocka_unit_test(small_budget),
		cmocka_unit_test(budget_grows),
		cmocka_unit_test(staging_by_rule),
		cmocka_unit_test(overrun),
		cmocka_unit_test(refusals),
		cmocka_unit_test(kin_is_kept),
		cmocka_unit_test(kin_differs),
#ifdef TND_FAILPOINTS
		cmocka_unit_test(every_allocation_fails),
#endif
	};

	return cmocka_run_group_tests(tests, set_up, tear_down);
}
