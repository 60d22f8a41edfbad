/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A larger budget could be refused where a smaller one is accepted: because it suggests larger
 * slabs or a larger window of reads, or because a tensor that has just enough room alone is not cut
 * although other memory is alive beside it. And the least budget that a plan names could be more or
 * less than what is accepted: of a union, less what its members set aside, or with smaller parts of
 * large tensors than that budget suggests. Checkpoints of tensors of many sizes are planned with
 * budgets from too small to ample, in every packing, slab size and treatment of large tensors, for
 * one rank and for several; the number is taken out of refusals, and tried.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"
#include "support/planning.h"
#include "support/shapes.h"

struct sweep {
	struct tnd_checkpoint *checkpoint;
	struct tnd_layout layout;
	struct tnd_plan_opts opts;
	bool of_union;
	unsigned parts; /* a budget is larger than the one before by one part of so many */
	uint64_t named; /* least budget, by the last refusal */
};

/* Three files: forty tensors of 1 to 2.3 MB in each, one of 8 MiB by rows, many small ones. */
static struct tnd_checkpoint *mixed(struct shapes *own)
{
	for (int file = 0; file < 3; file++) {
		char name[64];

		snprintf(name, sizeof(name), "model-%d.safetensors", file);
		shapes_begin(own, name);
		for (int i = 0; i < 40; i++) {
			char shape[32];

			snprintf(shape, sizeof(shape), "1024,%d", 512 + i % 7 * 100);
			shapes_add(own, "BF16", shape, "s%d.t%02d.q_proj.weight", file, i);
		}
		shapes_add(own, "BF16", "1024,4096", "s%d.a_big.o_proj.weight", file);
		for (int i = 0; i < 50; i++)
			shapes_add(own, "F32", "333", "s%d.n%02d", file, i);
		shapes_end(own);
	}
	return planning_open(shapes_path(own));
}

/* Few tensors, far apart in size, one with rows above any slab of a small budget. */
static struct tnd_checkpoint *apart(struct shapes *own)
{
	shapes_begin(own, "m.safetensors");
	shapes_add(own, "U8", "1000", "a");
	shapes_add(own, "U8", "3,1100000", "b");
	shapes_add(own, "U8", "1048577", "c");
	shapes_add(own, "U8", "4,5000000", "d.down_proj.weight");
	shapes_add(own, "F32", "2500000", "e");
	shapes_add(own, "U8", "500000", "f");
	shapes_end(own);
	return planning_open(shapes_path(own));
}

/*
 * Tables of so many bytes that least budgets suggest parts of 2 MiB of the large tensors, and have
 * no room for these. Two members gather them.
 */
static struct tnd_checkpoint *crowded(struct shapes *own)
{
	shapes_begin(own, "m.safetensors");
	for (int i = 0; i < 3; i++)
		shapes_add(own, "BF16", "2048,4096", "l%d.o_proj.weight", i);
	for (int i = 0; i < 33000; i++)
		shapes_add(own, "U8", "3", "n%05d", i);
	shapes_end(own);
	return planning_open(shapes_path(own));
}

/* The number that comes last of those that follow one of these words. */
static uint64_t named_in(const char *sentence)
{
	static const char *const words[] = {"expected a budget of at least ",
					    "raise the budget to at least "};
	uint64_t named = 0;

	for (size_t i = 0; i < sizeof(words) / sizeof(*words); i++) {
		const char *at = strstr(sentence, words[i]);

		if (at)
			named = strtoull(at + strlen(words[i]), NULL, 10);
	}
	if (!named)
		fail_msg("names no budget: %s", sentence);
	return named;
}

static int make(struct sweep *sweep, struct tnd_plan **ret_plan, struct tnd_error *reterr)
{
	if (sweep->of_union)
		return tnd_plan_create_union(sweep->checkpoint, &sweep->layout, NULL, 0,
					     &sweep->opts, ret_plan, reterr);
	return tnd_plan_create(sweep->checkpoint, &sweep->layout, &sweep->opts, ret_plan, reterr);
}

static bool accepted(struct sweep *sweep, uint64_t budget, struct tnd_plan_totals *ret_totals)
{
	struct tnd_plan *plan = NULL;
	struct tnd_error error = {0};
	int rc;

	sweep->opts.budget_bytes = budget;
	rc = make(sweep, &plan, &error);
	if (rc < 0) {
		assert_true(rc == TND_E_BUDGET ||
			    (rc == TND_E_OVERSIZE && sweep->opts.oversize == TND_OVERSIZE_REFUSE));
		sweep->named = named_in(error.message);
		return false;
	}
	*ret_totals = planning_totals(plan);
	tnd_plan_close(plan);
	return true;
}

/* What the refusal of `budget` said is more than that, and enough. */
static void check_named(struct sweep *sweep, uint64_t budget)
{
	struct tnd_plan_totals totals;
	uint64_t named = sweep->named;

	assert_true(named > budget);
	if (!accepted(sweep, named, &totals))
		fail_msg("packing %u, oversize %u, slab %lld: %llu names %llu, which names %llu",
			 sweep->opts.packing, sweep->opts.oversize,
			 (long long)sweep->opts.slab_bytes, (unsigned long long)budget,
			 (unsigned long long)named, (unsigned long long)sweep->named);
}

/* The least budget of a plan with a given slab size is enough, and one byte less is not. */
static void check_exact(struct sweep *sweep, uint64_t least)
{
	struct tnd_plan_totals totals;

	if (!accepted(sweep, least, &totals))
		fail_msg("refused: %llu, its own least budget", (unsigned long long)least);
	assert_int_equal(totals.least_budget_bytes, least);
	if (accepted(sweep, least - 1, &totals))
		fail_msg("accepted: %llu, one below the least", (unsigned long long)least - 1);
}

static void sweep_budgets(struct sweep *sweep, uint64_t most)
{
	struct tnd_plan_totals totals;
	uint64_t smallest = 0;
	unsigned plans = 0, refusals = 0;

	for (uint64_t budget = 300000; budget <= most; budget += budget / sweep->parts + 1) {
		if (!accepted(sweep, budget, &totals)) {
			if (smallest)
				fail_msg("packing %u, oversize %u, slab %lld: %llu is refused, "
					 "%llu is not",
					 sweep->opts.packing, sweep->opts.oversize,
					 (long long)sweep->opts.slab_bytes,
					 (unsigned long long)budget, (unsigned long long)smallest);
			if (refusals++ % 3 == 0)
				check_named(sweep, budget);
			continue;
		}
		smallest = smallest ? smallest : budget;
		assert_true(totals.needed_budget_bytes <= budget);
		assert_true(totals.least_budget_bytes <= budget);
		if (sweep->opts.slab_bytes && plans++ % 40 == 0)
			check_exact(sweep, totals.least_budget_bytes);
	}
	assert_true(smallest > 0);
}

static void sweep_all(struct tnd_checkpoint *checkpoint, uint32_t tp, bool of_union, unsigned parts)
{
	static const int64_t slabs[] = {0, TND_SLAB_NONE, 1 << 20, 4 << 20};
	struct sweep sweep = {.checkpoint = checkpoint,
			      .layout = planning_layout(tp, 1, 1, 0),
			      .of_union = of_union,
			      .parts = parts};

	for (uint32_t packing = TND_PACKING_NAME; packing <= TND_PACKING_FILE; packing++)
		for (uint32_t oversize = 0; oversize <= TND_OVERSIZE_OVERRUN; oversize++)
			for (size_t s = 0; s < sizeof(slabs) / sizeof(*slabs); s++) {
				sweep.opts = planning_opts(TND_PHASE_ALL, TND_SLICE_ALL, packing);
				sweep.opts.oversize = oversize;
				sweep.opts.slab_bytes = slabs[s];
				sweep_budgets(&sweep, UINT64_C(160) << 20);
			}
}

static void mixed_sizes(void **state)
{
	struct shapes *own = shapes_folder();
	struct tnd_checkpoint *checkpoint = mixed(own);

	(void)state;
	sweep_all(checkpoint, 1, false, 61);
	sweep_all(checkpoint, 4, true, 23);
	tnd_checkpoint_close(checkpoint);
	shapes_remove(own);
}

static void sizes_far_apart(void **state)
{
	struct shapes *own = shapes_folder();
	struct tnd_checkpoint *checkpoint = apart(own);

	(void)state;
	sweep_all(checkpoint, 1, false, 61);
	sweep_all(checkpoint, 2, false, 61);
	sweep_all(checkpoint, 1, true, 61);
	sweep_all(checkpoint, 2, true, 61);
	tnd_checkpoint_close(checkpoint);
	shapes_remove(own);
}

static void large_among_many(void **state)
{
	struct shapes *own = shapes_folder();
	struct tnd_checkpoint *checkpoint = crowded(own);
	struct sweep sweep = {.checkpoint = checkpoint,
			      .layout = planning_layout(2, 1, 1, 0),
			      .of_union = true,
			      .parts = 5};

	(void)state;
	for (uint32_t packing = TND_PACKING_NAME; packing <= TND_PACKING_FILE; packing++) {
		sweep.opts = planning_opts(TND_PHASE_ALL, TND_SLICE_ALL, packing);
		sweep_budgets(&sweep, UINT64_C(160) << 20);
	}
	tnd_checkpoint_close(checkpoint);
	shapes_remove(own);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(mixed_sizes),
		cmocka_unit_test(sizes_far_apart),
		cmocka_unit_test(large_among_many),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
