/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_plan.c - what is planned: the reference figures, phases, names, experts, budgets, refusals, and running out of memory
 *
 * What could break: a rank reads more or less than the figures of the reference checkpoint, an expert that nobody owns or two do, a plan
 * that is accepted and cannot fit, an option that is silently ignored, a leak when an allocation fails. Figures are compared with numbers worked out by hand
 * from the shapes; each allocation of a plan is made to fail in turn (under a leak checker in the sanitizer builds).
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>
#include <jansson.h>

#include "plan/plan_internal.h"
#include "support/planning.h"
#include "support/shapes.h"

static struct shapes *folder;
static struct tnd_checkpoint *large;

static int set_up(void **state)
{
	(void)state;
	unsetenv("TUNDISH_TP_SLICE");
	unsetenv("TUNDISH_SLAB_MB");
	folder = shapes_folder();
	shapes_experts(folder);
	large = planning_open(shapes_path(folder));
	return 0;
}

static int tear_down(void **state)
{
	(void)state;
	tnd_checkpoint_close(large);
	shapes_remove(folder);
	return 0;
}

static struct tnd_checkpoint *open_one(struct shapes *shapes)
{
	shapes_end(shapes);
	return planning_open(shapes_path(shapes));
}

/* -- figures -- */

static uint64_t sum_experts(const struct tnd_plan *plan, bool kept)
{
	size_t count;
	const struct tnd_plan_item *items = tnd_plan_items(plan, &count);
	uint64_t sum = 0;

	for (size_t i = 0; i < count; i++)
		if (strstr(items[i].tensor->name, ".experts."))
			sum += kept ? items[i].kept_bytes : items[i].read_bytes;
	return sum;
}

static uint64_t one_expert(const struct tnd_plan *plan, const char *name, bool kept)
{
	static const char *const parts[] = {"w1", "w2", "w3"};
	uint64_t sum = 0;
	char text[96];

	for (int i = 0; i < 6; i++) {
		const struct tnd_plan_item *item;

		snprintf(text, sizeof(text), "%s.%s.%s", name, parts[i / 2],
			 i % 2 ? "scale" : "weight");
		item = planning_item(plan, text);
		assert_non_null(item);
		sum += kept ? item->kept_bytes : item->read_bytes;
	}
	return sum;
}

static double seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static struct tnd_plan *plan_large(uint32_t ep, uint32_t rank, uint32_t phase)
{
	struct tnd_layout layout = planning_layout(4, 1, ep, rank);
	struct tnd_plan_opts opts = planning_opts(phase, TND_SLICE_AUTO, TND_PACKING_NAME);

	opts.slab_bytes = 256 << 20;
	return planning_make(large, &layout, &opts);
}

static void near(uint64_t found, uint64_t wanted, uint64_t margin)
{
	if (found + margin < wanted || found > wanted + margin)
		fail_msg("expected %llu +- %llu, found %llu", (unsigned long long)wanted,
			 (unsigned long long)margin, (unsigned long long)found);
}

/*
 * The shapes of what is no expert are made up (their sum is the reference's 10.8 GB), and so is which expert is in which shard: slab
 * counts are near the reference's, bytes of experts are exact.
 */
static void reference_figures(void **state)
{
	const uint64_t expert = 18800640, layers = 40, experts = 384;
	const uint64_t all = expert * layers * experts;
	double begin = seconds();
	struct tnd_plan *plan;

	(void)state;
	for (uint32_t rank = 0; rank < 4; rank++) {
		plan = plan_large(1, rank, TND_PHASE_TARGET);
		assert_int_equal(planning_totals(plan).tensors, SHAPES_TARGET_TENSORS);
		assert_int_equal(planning_totals(plan).sliced, 92160);
		assert_int_equal(planning_totals(plan).skipped, SHAPES_DRAFT_TENSORS);
		assert_int_equal(one_expert(plan, "layers.7.ffn.experts.300", false), 9400320);
		assert_int_equal(one_expert(plan, "layers.7.ffn.experts.300", true), 4700160);
		assert_int_equal(sum_experts(plan, false), all / 2); /* 144.4 GB */
		assert_int_equal(sum_experts(plan, true), all / 4);  /* 72.2 GB */
		near(planning_totals(plan).read_bytes, UINT64_C(155200000000), 100000000);
		near(planning_totals(plan).kept_bytes, UINT64_C(83000000000), 100000000);
		near(planning_totals(plan).slabs, 330, 15);
		assert_int_equal(planning_totals(plan).shards_opened, 47);
		tnd_plan_close(plan);
	}
	print_message("planning 96,081 tensors for --tp 4: %.3f s\n", seconds() - begin);
	plan = plan_large(1, 0, TND_PHASE_DRAFT);
	assert_int_equal(planning_totals(plan).tensors, SHAPES_DRAFT_TENSORS);
	near(planning_totals(plan).slabs, 11, 2);
	assert_int_equal(planning_totals(plan).shards_opened, 1);
	assert_int_equal(planning_totals(plan).shards_skipped, 47);
	tnd_plan_close(plan);
	plan = plan_large(2, 3, TND_PHASE_TARGET);
	assert_int_equal(planning_totals(plan).tensors, 47600);
	assert_int_equal(planning_totals(plan).sliced, 0);
	assert_int_equal(one_expert(plan, "layers.7.ffn.experts.300", false), expert);
	assert_int_equal(sum_experts(plan, false), all / 2);
	near(planning_totals(plan).slabs, 610, 15);
	tnd_plan_close(plan);
	plan = plan_large(2, 3, TND_PHASE_DRAFT);
	assert_int_equal(planning_totals(plan).tensors, SHAPES_DRAFT_TENSORS);
	near(planning_totals(plan).slabs, 32, 2);
	tnd_plan_close(plan);
}

/* -- experts -- */

/* Per rank: which of `count` experts it has. Each exactly as often as moe_tp says. */
static void ownership(void **state)
{
	static const struct {
		uint32_t tp, dp, ep;
	} layouts[] = {{4, 1, 2}, {4, 1, 4}, {1, 8, 8}, {2, 3, 3}, {8, 1, 8}, {6, 1, 2}};

	(void)state;
	for (uint32_t placement = 0; placement <= TND_PLACEMENT_ROUND_ROBIN; placement++)
		for (size_t l = 0; l < sizeof(layouts) / sizeof(*layouts); l++) {
			struct shapes *own = shapes_folder();
			struct tnd_checkpoint *opened;
			uint32_t ranks = layouts[l].tp * layouts[l].dp;
			unsigned seen[10] = {0};

			shapes_config(own, "{\"text_config\":{\"num_experts\":10}}");
			shapes_begin(own, "m.safetensors");
			for (int e = 0; e < 10; e++)
				shapes_add(own, "I8", "16,16", "l.experts.%d.w1.weight", e);
			opened = open_one(own);
			for (uint32_t r = 0; r < ranks; r++) {
				struct tnd_layout layout = planning_layout(
					layouts[l].tp, layouts[l].dp, layouts[l].ep, r);
				struct tnd_plan_opts opts = planning_opts(0, 0, 0);
				struct tnd_plan *plan;

				opts.placement = placement;
				plan = planning_make(opened, &layout, &opts);
				for (int e = 0; e < 10; e++) {
					char name[64];
					uint64_t ep_rank = r / (ranks / layouts[l].ep);

					snprintf(name, sizeof(name), "l.experts.%d.w1.weight", e);
					if (!planning_item(plan, name))
						continue;
					seen[e]++;
					if (placement == TND_PLACEMENT_ROUND_ROBIN)
						assert_int_equal(e % layouts[l].ep, ep_rank);
				}
				tnd_plan_close(plan);
			}
			for (int e = 0; e < 10; e++)
				assert_int_equal(seen[e], ranks / layouts[l].ep);
			tnd_checkpoint_close(opened);
			shapes_remove(own);
		}
}

static void linear_remainder(void **state)
{
	/* 10 experts, 4 parts: 3, 3, 2, 2. */
	static const uint64_t first[] = {0, 3, 6, 8}, count[] = {3, 3, 2, 2};

	(void)state;
	for (uint32_t i = 0; i < 4; i++) {
		uint64_t a, b;

		tnd__experts_block(10, 4, i, &a, &b);
		assert_int_equal(a, first[i]);
		assert_int_equal(b, count[i]);
	}
}

/* 8 experts and a draft stack of 4, EP 2, scales of both kinds. */
static void expert_stack(struct shapes *own, const char *prefix, int count)
{
	for (int e = 0; e < count; e++) {
		shapes_add(own, "F8_E4M3", "256,256", "%sl.0.experts.%d.w1.weight", prefix, e);
		shapes_add(own, "F32", "2,2", "%sl.0.experts.%d.w1.weight_scale_inv", prefix, e);
		shapes_add(own, "F32", "1", "%sl.0.experts.%d.w1.input_scale", prefix, e);
	}
}

static void scales_and_draft(void **state)
{
	struct shapes *own = shapes_folder();
	struct tnd_layout layout = planning_layout(2, 1, 2, 1);
	struct tnd_plan_opts opts = planning_opts(TND_PHASE_TARGET, 0, 0);
	struct tnd_checkpoint *opened;
	struct tnd_plan *plan;

	(void)state;
	shapes_config(own, "{\"n_routed_experts\":8}");
	shapes_begin(own, "m.safetensors");
	expert_stack(own, "", 8);
	expert_stack(own, "mtp.", 4);
	opened = open_one(own);
	plan = planning_make(opened, &layout, &opts);
	assert_int_equal(planning_totals(plan).tensors, 4 + 4 + 8);
	assert_int_equal(planning_totals(plan).read_bytes, 4 * (65536 + 16) + 8 * 4);
	assert_int_equal(tnd_plan_warnings(plan, &(const char *const *){NULL}), 0);
	tnd_plan_close(plan);
	opts.flags = TND_PLAN_F_EP_SCALES_ALL;
	plan = planning_make(opened, &layout, &opts);
	assert_int_equal(planning_totals(plan).tensors, 4 + 8 + 8);
	tnd_plan_close(plan);
	opts.flags = TND_PLAN_F_NO_EP_FILTER;
	plan = planning_make(opened, &layout, &opts);
	assert_int_equal(planning_totals(plan).tensors, 24);
	tnd_plan_close(plan);
	opts.flags = 0;
	opts.phase = TND_PHASE_DRAFT;
	plan = planning_make(opened, &layout, &opts);
	assert_int_equal(planning_totals(plan).tensors, 12);
	assert_int_equal(planning_totals(plan).read_bytes, 4 * (65536 + 16 + 4));
	assert_true(planning_warned(plan, "the draft stack has 8 experts by config.json and 4"));
	tnd_plan_close(plan);
	tnd_checkpoint_close(opened);
	shapes_remove(own);
}

static void expert_counts(void **state)
{
	static const struct {
		const char *config;
		uint64_t given;
		uint32_t ep;
		int rc;
		const char *words;
	} cases[] = {
		{"{\"n_routed_experts\":8}", 0, 2, 0, NULL},
		{"{\"n_routed_experts\":7}", 0, 2, TND_E_EXPERTS, "below 7 (config.json), found 7"},
		{"{\"n_routed_experts\":7}", 0, 1, TND_E_EXPERTS, "--experts"},
		{"{\"n_routed_experts\":7}", 8, 2, 0, NULL},
		{"{\"n_routed_experts\":16}", 0, 2, 0, "16 experts by config.json and 8 by its"},
		{"{}", 0, 2, TND_E_EXPERTS, "give it with --experts"},
		{"{}", 0, 1, 0, NULL},
		{"{}", 8, 2, 0, NULL},
		{"{}", 5, 2, TND_E_EXPERTS, "below 5 (--experts), found 7"},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		struct shapes *own = shapes_folder();
		struct tnd_layout layout = planning_layout(2, 1, cases[i].ep, 0);
		struct tnd_plan_opts opts = planning_opts(TND_PHASE_TARGET, 0, 0);
		struct tnd_checkpoint *opened;

		shapes_config(own, cases[i].config);
		shapes_begin(own, "m.safetensors");
		expert_stack(own, "", 8);
		opened = open_one(own);
		opts.expert_count = cases[i].given;
		if (cases[i].rc) {
			assert_int_equal(planning_refused(opened, &layout, &opts, cases[i].words),
					 cases[i].rc);
		} else {
			struct tnd_plan *plan = planning_make(opened, &layout, &opts);

			assert_int_equal(tnd_plan_warnings(plan, &(const char *const *){NULL}),
					 cases[i].words != NULL);
			if (cases[i].words)
				assert_true(planning_warned(plan, cases[i].words));
			tnd_plan_close(plan);
		}
		tnd_checkpoint_close(opened);
		shapes_remove(own);
	}
}

/* -- names -- */

static int asked;

static int want_layer_3(void *arg, const char *name, size_t name_bytes)
{
	(void)arg;
	assert_int_equal(strlen(name), name_bytes);
	asked++;
	return strncmp(name, "layers.3.", 9) == 0;
}

/* A misspelt pattern would leave a plan empty, or whole, without a word. */
static void patterns_without_a_match(void **state)
{
	static const char *const names[] = {"a",    "a", "no.such",  "no.such",
					    "[ab]", "*", "nothing.*"};
	static const char *const skip[] = {"b", "x?", "\xff*"};
	struct shapes *own = shapes_folder();
	struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, 0, 0);
	const char *const *warnings;
	struct tnd_checkpoint *opened;
	struct tnd_plan *plan;

	(void)state;
	shapes_begin(own, "m.safetensors");
	shapes_add(own, "U8", "1", "a");
	shapes_add(own, "U8", "1", "b");
	opened = open_one(own);
	opts.flags = TND_PLAN_F_NAMES;
	opts.names = names;
	opts.name_count = sizeof(names) / sizeof(*names);
	opts.skip = skip;
	opts.skip_count = sizeof(skip) / sizeof(*skip);
	plan = planning_make(opened, NULL, &opts);
	assert_int_equal(tnd_plan_warnings(plan, &warnings), 4);
	assert_string_equal(warnings[0], "skip: no tensor's name matches 'x?'");
	assert_string_equal(warnings[1], "skip: no tensor's name matches '\\xff*'");
	assert_string_equal(warnings[2], "names: no tensor's name matches 'nothing.*'");
	assert_string_equal(warnings[3], "names: no tensor's name matches 'no.such'");
	assert_int_equal(planning_totals(plan).tensors, 1);
	tnd_plan_close(plan);
	tnd_checkpoint_close(opened);
	shapes_remove(own);
}

static uint64_t tensors_with(const struct tnd_plan_opts *opts)
{
	struct tnd_plan *plan = planning_make(large, NULL, opts);
	struct tnd_plan_totals totals = planning_totals(plan);

	tnd_plan_close(plan);
	assert_int_equal(totals.tensors + totals.skipped,
			 SHAPES_TARGET_TENSORS + SHAPES_DRAFT_TENSORS);
	return totals.tensors;
}

static void names_before_the_plan(void **state)
{
	const char *const names[] = {"layers.1.ffn.experts.5.w1.weight", "layers.2.norm_?.weight",
				     "no.such.name"};
	const char *const skip[] = {"layers.*", "mtp.layers.0.norm_1.weight"};
	struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, 0, 0);

	(void)state;
	opts.flags = TND_PLAN_F_NAMES;
	assert_int_equal(tensors_with(&opts), 0);
	opts.names = names;
	opts.name_count = 3;
	assert_int_equal(tensors_with(&opts), 1 + 10);
	opts.want = want_layer_3;
	asked = 0;
	assert_int_equal(tensors_with(&opts), 1 + 10 + 384 * 6 + 38);
	/* Once a name, and not for those that the patterns settle. */
	assert_int_equal(asked, SHAPES_TARGET_TENSORS + SHAPES_DRAFT_TENSORS - 11);
	opts = planning_opts(TND_PHASE_ALL, 0, 0);
	opts.skip = skip;
	opts.skip_count = 2;
	assert_int_equal(tensors_with(&opts), SHAPES_DRAFT_TENSORS - 1);
	opts.phase = TND_PHASE_TARGET;
	assert_int_equal(tensors_with(&opts), 0);
}

static void phases(void **state)
{
	struct shapes *own = shapes_folder();
	struct tnd_checkpoint *opened;
	static const struct {
		uint32_t phase, flags;
		const char *prefix;
		uint64_t tensors;
	} cases[] = {
		{TND_PHASE_ALL, 0, NULL, 4},
		{TND_PHASE_TARGET, 0, NULL, 2},
		{TND_PHASE_TARGET, TND_PLAN_F_NO_DEFAULT_SKIP, NULL, 3},
		{TND_PHASE_DRAFT, 0, NULL, 1},
		{TND_PHASE_DRAFT, 0, "a.", 3},
		{TND_PHASE_TARGET, 0, "b", 3}, /* no draft: all but the default skip */
	};

	(void)state;
	shapes_begin(own, "m.safetensors");
	shapes_add(own, "U8", "4", "a.engram.embed.0");
	shapes_add(own, "U8", "4", "a.weight");
	shapes_add(own, "U8", "4", "a.bias");
	shapes_add(own, "U8", "4", "mtp.weight");
	opened = open_one(own);
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		struct tnd_plan_opts opts = planning_opts(cases[i].phase, 0, 0);
		struct tnd_plan *plan;

		opts.flags = cases[i].flags;
		opts.draft_prefix = cases[i].prefix;
		plan = planning_make(opened, NULL, &opts);
		assert_int_equal(planning_totals(plan).tensors, cases[i].tensors);
		assert_int_equal(tnd_plan_phase(plan), cases[i].phase);
		tnd_plan_close(plan);
	}
	tnd_checkpoint_close(opened);
	shapes_remove(own);
}

/* -- refusals -- */

static void layouts_and_options(void **state)
{
	static const struct tnd_layout layouts[] = {
		{sizeof(struct tnd_layout), 4, 1, 3, 0, 0},
		{sizeof(struct tnd_layout), 4, 2, 1, 8, 0},
		{sizeof(struct tnd_layout), 0, 0, 2, 0, 0},
		{sizeof(struct tnd_layout), 65536, 65536, 1, 0, 0},
	};
	struct tnd_layout short_layout = {4, 1, 1, 1, 0, 0};
	struct tnd_plan_opts opts;
	struct tnd_plan_totals totals = {.struct_bytes = 8};
	struct tnd_plan *plan;

	(void)state;
	for (size_t i = 0; i < sizeof(layouts) / sizeof(*layouts); i++)
		assert_int_equal(planning_refused(large, &layouts[i], NULL, "expected"),
				 TND_E_LAYOUT);
	assert_int_equal(planning_refused(large, &short_layout, NULL, "tnd_layout"), TND_E_INVALID);
#define REFUSED(field, value, words)                                                          \
	do {                                                                                  \
		opts = planning_opts(0, 0, 0);                                                \
		opts.field = value;                                                           \
		assert_int_equal(planning_refused(large, NULL, &opts, words), TND_E_INVALID); \
	} while (0)
	REFUSED(struct_bytes, 8, "options of");
	REFUSED(struct_bytes, sizeof(opts) + 8, "options of");
	REFUSED(flags, 16, "'flags'");
	REFUSED(phase, 3, "'phase'");
	REFUSED(slice, 4, "'slice'");
	REFUSED(packing, 3, "'packing'");
	REFUSED(oversize, 3, "'oversize'");
	REFUSED(placement, 2, "'placement'");
	REFUSED(align, 48, "'align'");
	REFUSED(align, 8192, "'align'");
	REFUSED(slab_bytes, -2, "'slab_bytes'");
	REFUSED(budget_bytes, UINT64_MAX, "'budget_bytes'");
	REFUSED(skip_count, 1, "without the list");
	REFUSED(want, want_layer_3, "TND_PLAN_F_NAMES");
#undef REFUSED
	plan = planning_make(large, NULL, NULL);
	assert_int_equal(tnd_plan_totals(plan, &totals), TND_E_INVALID);
	tnd_plan_close(plan);
	tnd_plan_close(NULL);
}

/* -- budgets -- */

static struct tnd_checkpoint *small_tensors(struct shapes *own)
{
	char name[64];

	for (int file = 0; file < 8; file++) {
		snprintf(name, sizeof(name), "s%d.safetensors", file);
		shapes_begin(own, name);
		for (int i = 0; i < 64; i++)
			shapes_add(own, "U8", "65536", "f%d.t%02d", file, i);
		shapes_end(own);
	}
	return planning_open(shapes_path(own));
}

static void slab_sizes(void **state)
{
	static const struct {
		int64_t option;
		const char *text;
		uint64_t budget, slab;
		bool warned;
	} cases[] = {
		{0, NULL, UINT64_C(6) << 30, 256 << 20, false},
		{0, NULL, UINT64_C(300) << 20, 64 << 20, false},
		{0, NULL, UINT64_C(3) << 20, 1 << 20, false},
		{300 << 20, NULL, UINT64_C(6) << 30, 256 << 20, false},
		{5, NULL, UINT64_C(6) << 30, 1 << 20, false},
		{TND_SLAB_NONE, NULL, UINT64_C(6) << 30, 0, false},
		{0, "300", UINT64_C(6) << 30, 256 << 20, false},
		{0, "0.1", UINT64_C(6) << 30, 1 << 20, false},
		{0, "4096", UINT64_C(60) << 30, UINT64_C(4096) << 20, false},
		{0, "0", UINT64_C(6) << 30, 0, false},
		{0, "-1", UINT64_C(6) << 30, 0, false},
		{0, "many", UINT64_C(6) << 30, 256 << 20, true},
		{8 << 20, "many", UINT64_C(6) << 30, 8 << 20, false},
	};
	struct shapes *own = shapes_folder();
	struct tnd_checkpoint *opened = small_tensors(own);
	struct tnd_plan_opts opts = planning_opts(0, 0, TND_PACKING_NAME);

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		struct tnd_plan *plan;

		if (cases[i].text)
			setenv("TUNDISH_SLAB_MB", cases[i].text, 1);
		opts.slab_bytes = cases[i].option;
		opts.budget_bytes = cases[i].budget;
		plan = planning_make(opened, NULL, &opts);
		assert_int_equal(planning_totals(plan).slab_bytes, cases[i].slab);
		assert_int_equal(planning_warned(plan, "TUNDISH_SLAB_MB"), cases[i].warned);
		tnd_plan_close(plan);
		unsetenv("TUNDISH_SLAB_MB");
	}
	opts.slab_bytes = 4 << 20;
	opts.budget_bytes = 3 << 20;
	assert_int_equal(planning_refused(opened, NULL, &opts, "slab size of at most the budget"),
			 TND_E_BUDGET);
	tnd_checkpoint_close(opened);
	shapes_remove(own);
}

/* 8 shards of 64 tensors of 64 KiB in 1 MiB slabs: 32 slabs, and what they cost. */
static void costs(void **state)
{
	struct shapes *own = shapes_folder();
	struct tnd_checkpoint *opened = small_tensors(own);
	struct tnd_plan_opts opts = planning_opts(0, 0, TND_PACKING_NAME);
	struct tnd_plan_totals totals;
	struct tnd_plan *plan;

	(void)state;
	opts.slab_bytes = 1 << 20;
	opts.budget_bytes = 3 << 20;
	plan = planning_make(opened, NULL, &opts);
	totals = planning_totals(plan);
	assert_int_equal(totals.slabs, 32);
	assert_int_equal(totals.slab_capacity_bytes, 1 << 20);
	assert_int_equal(totals.chunk_bytes, 65536);
	assert_int_equal(totals.bounce_bytes, 4 * (65536 + 8192));
	assert_int_equal(totals.window_bytes, 2 * 65536);
	assert_int_equal(totals.fixed_bytes,
			 totals.metadata_bytes + totals.bounce_bytes + totals.window_bytes);
	assert_int_equal(totals.least_budget_bytes, totals.fixed_bytes + (1 << 20));
	assert_int_equal(totals.peak_bytes, 3 << 20);
	tnd_plan_close(plan);
	/* The least budget is enough, and one byte less is not. */
	opts.budget_bytes = totals.least_budget_bytes;
	plan = planning_make(opened, NULL, &opts);
	assert_int_equal(planning_totals(plan).least_budget_bytes, opts.budget_bytes);
	tnd_plan_close(plan);
	opts.budget_bytes--;
	assert_int_equal(
		planning_refused(opened, NULL, &opts, "raise the budget or lower the slab"),
		TND_E_BUDGET);
	opts.slab_bytes = 0;
	opts.budget_bytes = 100 << 10;
	assert_int_equal(planning_refused(opened, NULL, &opts, "expected a budget of at least"),
			 TND_E_BUDGET);
	opts.budget_bytes = 1 << 30;
	opts.packing = TND_PACKING_FILE;
	plan = planning_make(opened, NULL, &opts);
	totals = planning_totals(plan);
	assert_int_equal(totals.chunk_bytes, 2 << 20);
	assert_int_equal(totals.bounce_bytes, 2 * ((2 << 20) + 8192));
	assert_int_equal(totals.window_bytes, 4 * (2 << 20));
	tnd_plan_close(plan);
	tnd_checkpoint_close(opened);
	shapes_remove(own);
}

/* Fixed costs with the smallest window of reads in packing name. */
static uint64_t least_fixed(const struct tnd_plan_totals *totals)
{
	return totals->metadata_bytes + 4 * (65536 + 8192) + 2 * 65536;
}

/* A tensor of 40 MiB between small ones. */
static void oversized(void **state)
{
	struct shapes *own = shapes_folder();
	struct tnd_plan_opts opts = planning_opts(0, 0, TND_PACKING_NAME);
	struct tnd_checkpoint *opened;
	struct tnd_plan_totals totals;
	struct tnd_plan *plan;
	size_t count;

	(void)state;
	shapes_begin(own, "m.safetensors");
	shapes_add(own, "U8", "1048576", "a.small");
	shapes_add(own, "U8", "40,1048576", "b.large");
	shapes_add(own, "U8", "1048576", "c.small");
	opened = open_one(own);
	opts.slab_bytes = 4 << 20;
	opts.budget_bytes = 60 << 20;
	/* b.large does not close the slab of a and c: both are alive beside it. */
	plan = planning_make(opened, NULL, &opts);
	totals = planning_totals(plan);
	assert_int_equal(totals.slabs, 2);
	assert_int_equal(totals.least_budget_bytes, least_fixed(&totals) + (42 << 20));
	assert_true(totals.needed_budget_bytes > totals.fixed_bytes + (42 << 20) - 1);
	assert_int_equal(planning_item(plan, "c.small")->slab, 0);
	assert_int_equal(planning_item(plan, "b.large")->slab, 1);
	tnd_plan_close(plan);
	/* Where the budget has room for it beside fewer reads in flight, it gets them. */
	opts.budget_bytes = 43 << 20;
	plan = planning_make(opened, NULL, &opts);
	assert_true(planning_totals(plan).chunk_bytes < 512 << 10);
	tnd_plan_close(plan);
	opts.budget_bytes = 40 << 20;
	assert_int_equal(planning_refused(opened, NULL, &opts, "b.large"), TND_E_OVERSIZE);
	opts.oversize = TND_OVERSIZE_OVERRUN;
	plan = planning_make(opened, NULL, &opts);
	totals = planning_totals(plan);
	assert_int_equal(totals.least_budget_bytes,
			 TND__MAX(least_fixed(&totals) + (2 << 20), 4u << 20));
	assert_int_equal(totals.peak_bytes, totals.fixed_bytes + (40 << 20));
	assert_int_equal(totals.slabs, 2);
	tnd_plan_close(plan);
	opts.oversize = TND_OVERSIZE_PIECES;
	plan = planning_make(opened, NULL, &opts);
	totals = planning_totals(plan);
	assert_int_equal(totals.items, 12); /* ten pieces of a slab each */
	assert_int_equal(totals.tensors, 3);
	assert_int_equal(totals.least_budget_bytes, least_fixed(&totals) + (6 << 20));
	tnd_plan_close(plan);
	/* In packing file an oversized tensor closes the slab: no two at once. */
	opts.oversize = TND_OVERSIZE_REFUSE;
	opts.packing = TND_PACKING_FILE;
	opts.budget_bytes = 60 << 20;
	plan = planning_make(opened, NULL, &opts);
	assert_int_equal(planning_totals(plan).slabs, 3);
	assert_true(planning_totals(plan).least_budget_bytes <=
		    planning_totals(plan).fixed_bytes + (40 << 20) + 8192);
	assert_non_null(tnd_plan_slabs(plan, &count));
	tnd_plan_close(plan);
	/* A default slab is made smaller before anything is refused. */
	opts.packing = TND_PACKING_NAME;
	opts.slab_bytes = 0;
	opts.budget_bytes = 54 << 20;
	plan = planning_make(opened, NULL, &opts);
	assert_true(planning_totals(plan).slab_bytes <= 8 << 20);
	tnd_plan_close(plan);
	tnd_checkpoint_close(opened);
	shapes_remove(own);
}

/* A row that no buffer has room for is cut as well, and only what is kept of it is read. */
static void rows_too_long(void **state)
{
	struct shapes *own = shapes_folder();
	struct tnd_layout layout = planning_layout(2, 1, 1, 0);
	struct tnd_plan_opts opts = planning_opts(0, TND_SLICE_ALL, TND_PACKING_NAME);
	struct tnd_checkpoint *opened;

	(void)state;
	shapes_begin(own, "m.safetensors");
	shapes_add(own, "U8", "3,40000000", "m.down_proj.weight");
	opened = open_one(own);
	opts.budget_bytes = 16 << 20;
	opts.oversize = TND_OVERSIZE_PIECES;
	for (; opts.packing <= TND_PACKING_FILE; opts.packing++) {
		struct tnd_plan *plan = planning_make(opened, &layout, &opts);
		uint64_t offset = 0, read = 0;
		size_t count;
		const struct tnd_plan_item *items = tnd_plan_items(plan, &count);

		for (size_t i = 0; i < count; i++) {
			uint64_t row = offset / 20000000;

			assert_int_equal(items[i].piece_offset, offset);
			assert_int_equal(items[i].file_offset + items[i].part_begin[0],
					 items[0].file_offset + row * 40000000 + offset % 20000000);
			assert_int_equal(!!(items[i].flags & TND_ITEM_F_LAST), i == count - 1);
			offset += items[i].kept_bytes;
			read += items[i].read_bytes;
		}
		assert_int_equal(offset, 60000000);
		assert_int_equal(read, 60000000);
		tnd_plan_close(plan);
	}
	tnd_checkpoint_close(opened);
	shapes_remove(own);
}

/* -- JSON -- */

static void json_document(void **state)
{
	const struct tnd_plan *plans[4];
	struct tnd_plan *other;
	json_t *root, *ranks, *rank;
	char *text;
	size_t i;

	(void)state;
	for (uint32_t r = 0; r < 4; r++)
		plans[r] = plan_large(1, r, TND_PHASE_DRAFT);
	assert_int_equal(tnd_plan_json(plans, 4, TND_PLAN_JSON_F_TENSORS, &text), 0);
	root = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
	free(text);
	assert_non_null(root);
	assert_string_equal(json_string_value(json_object_get(root, "schema")), "tundish.plan/1");
	assert_int_equal(json_integer_value(json_object_get(root, "tp_size")), 4);
	assert_string_equal(json_string_value(json_object_get(root, "phase")), "draft");
	assert_true(json_is_null(json_object_get(root, "predicted_seconds")));
	assert_true(json_is_array(json_object_get(root, "warnings")));
	assert_int_equal(
		json_integer_value(json_object_get(json_object_get(root, "node"), "read_bytes")),
		UINT64_C(384) * 18800640 + 85 * 13496320 + 12 * 10240);
	ranks = json_object_get(root, "ranks");
	assert_int_equal(json_array_size(ranks), 4);
	json_array_foreach(ranks, i, rank)
	{
		json_t *layout = json_object_get(rank, "layout"), *first;

		assert_int_equal(json_integer_value(json_object_get(rank, "rank")), i);
		assert_int_equal(json_array_size(layout), SHAPES_DRAFT_TENSORS);
		assert_int_equal(json_array_size(json_object_get(rank, "slab_list")),
				 json_integer_value(json_object_get(rank, "slabs")));
		first = json_array_get(layout, 0);
		assert_int_equal(json_object_size(first), 9);
		assert_string_equal(json_string_value(json_object_get(first, "name")),
				    "mtp.layers.0.attn.wide_0.weight");
		assert_true(json_is_null(json_object_get(first, "dim")));
	}
	json_decref(root);
	assert_int_equal(tnd_plan_json(plans, 0, 0, &text), TND_E_INVALID);
	assert_int_equal(tnd_plan_json(plans, 4, 8, &text), TND_E_INVALID);
	other = plan_large(1, 0, TND_PHASE_TARGET);
	assert_int_equal(tnd_plan_json((const struct tnd_plan *[]){plans[0], other}, 2, 0, &text),
			 TND_E_INVALID);
	tnd_plan_close(other);
	for (i = 0; i < 4; i++)
		tnd_plan_close((struct tnd_plan *)plans[i]);
}

/* -- lifetime and memory -- */

static void plan_outlives_checkpoint(void **state)
{
	struct shapes *own = shapes_folder();
	struct tnd_checkpoint *opened = small_tensors(own);
	struct tnd_plan_opts opts = planning_opts(0, 0, 0);
	struct tnd_plan *plan = planning_make(opened, NULL, &opts);

	(void)state;
	tnd_checkpoint_close(opened);
	tnd__plan_ref(plan);
	tnd_plan_close(plan);
	assert_non_null(planning_item(plan, "f0.t00"));
	assert_null(planning_item(plan, "f0.t99"));
	tnd_plan_close(plan);
	shapes_remove(own);
}

#ifdef TND_FAILPOINTS
static int try_failing(struct tnd_checkpoint *opened, const struct tnd_layout *layout,
		       const struct tnd_plan_opts *opts, unsigned at)
{
	struct tnd_plan *plan = NULL;
	struct tnd_error error = {0};
	char text[64], *json = NULL;
	int rc;

	snprintf(text, sizeof(text), "plan.alloc=ENOMEM@%ux1", at);
	assert_int_equal(tnd__failpoints_set(text), 0);
	rc = tnd_plan_create(opened, layout, opts, &plan, &error);
	if (rc == 0)
		rc = tnd_plan_json((const struct tnd_plan *const *)&plan, 1, 0, &json);
	tnd__failpoints_set(NULL);
	free(json);
	tnd_plan_close(plan);
	return rc;
}

static void every_allocation_fails(void **state)
{
	struct shapes *own = shapes_folder();
	struct tnd_layout layout = planning_layout(4, 1, 2, 1);
	struct tnd_plan_opts opts = planning_opts(0, TND_SLICE_ALL, 0);
	const char *const skip[] = {"none", "n?ne"};
	struct tnd_checkpoint *opened;
	unsigned at = 1;
	int rc;

	(void)state;
	shapes_config(own, "{\"n_routed_experts\":16}");
	shapes_begin(own, "m.safetensors");
	expert_stack(own, "", 8);
	shapes_add(own, "U8", "9,9", "odd.up_proj.weight");
	shapes_add(own, "U8", "9437184", "large");
	opened = open_one(own);
	opts.rules = "a 0\nb 1";
	opts.skip = skip;
	opts.skip_count = 2;
	opts.oversize = TND_OVERSIZE_PIECES;
	opts.budget_bytes = 8 << 20;
	setenv("TUNDISH_SLAB_MB", "many", 1);
	for (uint32_t packing = TND_PACKING_NAME; packing <= TND_PACKING_FILE; packing++) {
		opts.packing = packing;
		for (at = 1; (rc = try_failing(opened, &layout, &opts, at)) != 0; at++)
			assert_int_equal(rc, -ENOMEM);
		assert_true(at > 12);
	}
	unsetenv("TUNDISH_SLAB_MB");
	tnd_checkpoint_close(opened);
	shapes_remove(own);
}
#endif

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(reference_figures),
		cmocka_unit_test(ownership),
		cmocka_unit_test(linear_remainder),
		cmocka_unit_test(scales_and_draft),
		cmocka_unit_test(expert_counts),
		cmocka_unit_test(patterns_without_a_match),
		cmocka_unit_test(names_before_the_plan),
		cmocka_unit_test(phases),
		cmocka_unit_test(layouts_and_options),
		cmocka_unit_test(slab_sizes),
		cmocka_unit_test(costs),
		cmocka_unit_test(oversized),
		cmocka_unit_test(rows_too_long),
		cmocka_unit_test(json_document),
		cmocka_unit_test(plan_outlives_checkpoint),
#ifdef TND_FAILPOINTS
		cmocka_unit_test(every_allocation_fails),
#endif
	};

	return cmocka_run_group_tests(tests, set_up, tear_down);
}
