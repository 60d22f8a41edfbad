/* SPDX-License-Identifier: Apache-2.0 */
/*
 * limits.c - what the memory cgroups above us leave
 *
 * A level leaves limit - usage + file cache that can be reclaimed. In v1 a group may be bound by a
 * parent that the mount does not show: hierarchical_memory_limit knows. A level without files of
 * the memory controller does not limit.
 */
#include <string.h>

#include "base/cgroup.h"
#include "host_internal.h"

struct limits {
	struct tnd_host_memory *memory;
	bool v1_seen; /* our own level of v1, or the nearest to it that is there */
};

static uint64_t read_number(const struct tnd__cgroup *cgroup, const char *name)
{
	char text[64], *end;
	unsigned long long number;

	if (tnd__cgroup_read(cgroup, name, text, sizeof(text)) <= 0 || text[0] < '0' ||
	    text[0] > '9')
		return TND_HOST_UNKNOWN; /* absent, or "max" */
	number = strtoull(text, &end, 10);
	/* v1 writes "no limit" as the largest number of whole pages. */
	return number >= INT64_MAX - 65536 ? TND_HOST_UNKNOWN : number;
}

/* Adds what is known. */
static uint64_t line_or_zero(const char *text, const char *key)
{
	uint64_t number = tnd__line_number(text, key);

	return number == TND_HOST_UNKNOWN ? 0 : number;
}

static void apply_level(const struct tnd__cgroup *cgroup, void *arg)
{
	struct limits *limits = arg;
	struct tnd_host_memory *memory = limits->memory;
	char stat[16384];
	bool v1 = cgroup->v1;
	uint64_t usage, limit, cache, left, inherited;

	usage = read_number(cgroup, v1 ? "memory.usage_in_bytes" : "memory.current");
	if (usage == TND_HOST_UNKNOWN)
		return;
	limit = read_number(cgroup, v1 ? "memory.limit_in_bytes" : "memory.max");
	if (!v1) {
		uint64_t high = read_number(cgroup, "memory.high");

		limit = TND__MIN(limit, high);
	}
	if (tnd__cgroup_read(cgroup, "memory.stat", stat, sizeof(stat)) < 0)
		stat[0] = '\0';
	if (v1 && !limits->v1_seen) {
		limits->v1_seen = true;
		inherited = tnd__line_number(stat, "hierarchical_memory_limit");
		limit = TND__MIN(limit, inherited);
	}
	if (limit >= INT64_MAX - 65536)
		return;
	cache = line_or_zero(stat, v1 ? "total_inactive_file" : "inactive_file") +
		line_or_zero(stat, v1 ? "total_active_file" : "active_file");
	left = limit + cache > usage ? TND__MIN(limit, limit + cache - usage) : 0;
	memory->cgroup_limit = TND__MIN(memory->cgroup_limit, limit);
	/* Of two that leave the same the outer one is to blame. */
	if (left <= memory->available) {
		memory->available = left;
		tnd__printable(cgroup->directory, strlen(cgroup->directory), memory->limited_by,
			       sizeof(memory->limited_by));
	}
}

void tnd__cgroups_apply(const char *root, struct tnd_host_memory *memory)
{
	struct limits limits = {.memory = memory};

	tnd__cgroups_walk(root, "memory", apply_level, &limits);
}
