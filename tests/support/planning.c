/* SPDX-License-Identifier: Apache-2.0 */
#include "planning.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

struct tnd_checkpoint *planning_open(const char *path)
{
	struct tnd_checkpoint *checkpoint = NULL;
	struct tnd_error error = {0};

	if (tnd_checkpoint_open(path, NULL, &checkpoint, &error) < 0)
		fail_msg("%s", error.message);
	return checkpoint;
}

struct tnd_layout planning_layout(uint32_t tp, uint32_t dp, uint32_t ep, uint32_t rank)
{
	return (struct tnd_layout){.struct_bytes = sizeof(struct tnd_layout),
				   .tp_size = tp,
				   .dp_size = dp,
				   .ep_size = ep,
				   .rank = rank};
}

struct tnd_plan_opts planning_opts(uint32_t phase, uint32_t slice, uint32_t packing)
{
	return (struct tnd_plan_opts){.struct_bytes = sizeof(struct tnd_plan_opts),
				      .phase = phase,
				      .slice = slice,
				      .packing = packing,
				      .budget_bytes = UINT64_C(6) << 30};
}

struct tnd_plan *planning_make(struct tnd_checkpoint *checkpoint, const struct tnd_layout *layout,
			       const struct tnd_plan_opts *opts)
{
	struct tnd_plan *plan = NULL;
	struct tnd_error error = {0};

	if (tnd_plan_create(checkpoint, layout, opts, &plan, &error) < 0)
		fail_msg("%s", error.message);
	return plan;
}

int planning_refused(struct tnd_checkpoint *checkpoint, const struct tnd_layout *layout,
		     const struct tnd_plan_opts *opts, const char *words)
{
	struct tnd_plan *plan = NULL;
	struct tnd_error error = {0};
	int rc = tnd_plan_create(checkpoint, layout, opts, &plan, &error);

	assert_true(rc < 0);
	assert_null(plan);
	assert_int_equal(rc, error.code);
	if (!strstr(error.message, words))
		fail_msg("'%s' is not in: %s", words, error.message);
	return rc;
}

struct tnd_plan_totals planning_totals(const struct tnd_plan *plan)
{
	struct tnd_plan_totals totals = {.struct_bytes = sizeof(totals)};

	assert_int_equal(tnd_plan_totals(plan, &totals), 0);
	return totals;
}

const struct tnd_plan_item *planning_item(const struct tnd_plan *plan, const char *name)
{
	size_t item, count;

	if (tnd_plan_find(plan, name, strlen(name), &item) < 0)
		return NULL;
	return &tnd_plan_items(plan, &count)[item];
}

int planning_warned(const struct tnd_plan *plan, const char *words)
{
	const char *const *warnings;
	size_t count = tnd_plan_warnings(plan, &warnings);

	for (size_t i = 0; i < count; i++)
		if (strstr(warnings[i], words))
			return 1;
	return 0;
}
