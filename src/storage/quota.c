/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quota.c - processors that the cgroups above us grant
 *
 *   cpu.max "200000 100000" (v2), or cpu.cfs_quota_us and cpu.cfs_period_us (v1), at each level
 *
 * The least of all levels counts, rounded up: half a processor still runs one thread.
 */
#include <stdio.h>
#include <stdlib.h>

#include "base/cgroup.h"
#include "storage/engine.h"

static uint32_t ceil_ratio(long long quota, long long period)
{
	if (quota <= 0 || period <= 0)
		return 0;
	return (uint32_t)TND__MIN((quota + period - 1) / period, UINT32_MAX);
}

/* Quota of one level; 0: none. */
static uint32_t quota_at(const struct tnd__cgroup *cgroup)
{
	char text[64];
	long long quota = 0, period = 100000;

	if (tnd__cgroup_read(cgroup, cgroup->v1 ? "cpu.cfs_quota_us" : "cpu.max", text,
			     sizeof(text)) <= 0)
		return 0;
	if (!cgroup->v1)
		return sscanf(text, "%lld %lld", &quota, &period) >= 1 ? ceil_ratio(quota, period)
								       : 0;
	quota = atoll(text);
	if (tnd__cgroup_read(cgroup, "cpu.cfs_period_us", text, sizeof(text)) > 0)
		period = atoll(text);
	return ceil_ratio(quota, period);
}

static void apply_level(const struct tnd__cgroup *cgroup, void *arg)
{
	uint32_t *least = arg, quota = quota_at(cgroup);

	if (quota && (!*least || quota < *least))
		*least = quota;
}

uint32_t tnd__cpu_quota(const char *root)
{
	uint32_t least = 0;

	tnd__cgroups_walk(root, "cpu", apply_level, &least);
	return least;
}
