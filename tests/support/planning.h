/* SPDX-License-Identifier: Apache-2.0 */
/* planning.h - plans made in one line, for tests. Failures end the test (cmocka). */
#ifndef TND_TEST_PLANNING_H
#define TND_TEST_PLANNING_H

#include <tundish/tundish.h>

struct tnd_checkpoint *planning_open(const char *path);

/* Layout and options with struct_bytes set and a budget of 6 GiB. */
struct tnd_layout planning_layout(uint32_t tp, uint32_t dp, uint32_t ep, uint32_t rank);
struct tnd_plan_opts planning_opts(uint32_t phase, uint32_t slice, uint32_t packing);

struct tnd_plan *planning_make(struct tnd_checkpoint *checkpoint, const struct tnd_layout *layout,
			       const struct tnd_plan_opts *opts);
/* The error code; the sentence must contain `words`. */
int planning_refused(struct tnd_checkpoint *checkpoint, const struct tnd_layout *layout,
		     const struct tnd_plan_opts *opts, const char *words);

struct tnd_plan_totals planning_totals(const struct tnd_plan *plan);
const struct tnd_plan_item *planning_item(const struct tnd_plan *plan, const char *name);
/* True if some warning of the plan contains `words`. */
int planning_warned(const struct tnd_plan *plan, const char *words);

#endif
