/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quota.c - processors that the cgroups above us grant
 *
 *   /proc/self/cgroup      "0::/a/b" (v2), "4:cpu,cpuacct:/a/b" (v1): our group in each hierarchy
 *   /proc/self/mountinfo   where the hierarchy is mounted, and which group is its root there
 *   MOUNT/a/b, MOUNT/a, MOUNT: cpu.max "200000 100000", or cpu.cfs_quota_us and cpu.cfs_period_us
 *
 * The least of all levels counts, rounded up: half a processor still runs one thread.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "storage/engine.h"

#define PATH_BYTES 4096
#define TABLE_BYTES 65536

struct hierarchy {
	bool v2;
	char group[PATH_BYTES]; /* as /proc/self/cgroup has it */
	char mount[PATH_BYTES], mount_root[PATH_BYTES];
	bool mounted;
};

static bool has_word(const char *list, size_t bytes, const char *word)
{
	size_t length = strlen(word);

	for (size_t at = 0; at + length <= bytes; at++)
		if (strncmp(list + at, word, length) == 0 && (at == 0 || list[at - 1] == ',') &&
		    (at + length == bytes || list[at + length] == ','))
			return true;
	return false;
}

/* "4:cpu,cpuacct:/a/b" */
static void parse_group(char *line, struct hierarchy *v1, struct hierarchy *v2)
{
	char *controllers = strchr(line, ':'), *path = NULL;
	struct hierarchy *which = NULL;

	if (controllers)
		path = strchr(controllers + 1, ':');
	if (!path || strlen(path + 1) >= PATH_BYTES)
		return;
	if (path == controllers + 1)
		which = v2;
	else if (has_word(controllers + 1, (size_t)(path - controllers - 1), "cpu"))
		which = v1;
	if (which)
		strcpy(which->group, path + 1);
}

/* "36 25 0:31 /root /mount rw,... shared:1 - cgroup cgroup rw,cpu,cpuacct" */
static void parse_mount(char *line, struct hierarchy *v1, struct hierarchy *v2)
{
	char *root, *mount, *options, *tail = strstr(line, " - "), *save = NULL, *type;
	struct hierarchy *which = NULL;

	if (!tail)
		return;
	*tail = '\0';
	type = tail + 3;
	options = strrchr(type, ' ');
	if (!options || !strtok_r(line, " ", &save) || !strtok_r(NULL, " ", &save) ||
	    !strtok_r(NULL, " ", &save))
		return;
	root = strtok_r(NULL, " ", &save);
	mount = strtok_r(NULL, " ", &save);
	if (!root || !mount || strlen(root) >= PATH_BYTES || strlen(mount) >= PATH_BYTES)
		return;
	if (strncmp(type, "cgroup2 ", 8) == 0)
		which = v2;
	else if (strncmp(type, "cgroup ", 7) == 0 &&
		 has_word(options + 1, strlen(options + 1), "cpu"))
		which = v1;
	if (!which || which->mounted)
		return;
	which->mounted = true;
	strcpy(which->mount, mount);
	strcpy(which->mount_root, root);
}

static void each_line(const char *root, const char *file, struct hierarchy *both,
		      void (*parse)(char *, struct hierarchy *, struct hierarchy *))
{
	char path[PATH_BYTES], *text = malloc(TABLE_BYTES), *rest = text, *line;

	snprintf(path, sizeof(path), "%s%s", root, file);
	if (text && tnd__read_small(path, text, TABLE_BYTES) > 0)
		while ((line = strsep(&rest, "\n")))
			parse(line, &both[0], &both[1]);
	free(text);
}

static uint32_t ceil_ratio(long long quota, long long period)
{
	if (quota <= 0 || period <= 0)
		return 0;
	return (uint32_t)TND__MIN((quota + period - 1) / period, UINT32_MAX);
}

/* Quota of one directory; 0: none. */
static uint32_t quota_at(const char *directory, bool v2)
{
	char path[3 * PATH_BYTES], text[64];
	long long quota = 0, period = 100000;

	snprintf(path, sizeof(path), "%s/%s", directory, v2 ? "cpu.max" : "cpu.cfs_quota_us");
	if (tnd__read_small(path, text, sizeof(text)) <= 0)
		return 0;
	if (v2)
		return sscanf(text, "%lld %lld", &quota, &period) >= 1 ? ceil_ratio(quota, period)
								       : 0;
	quota = atoll(text);
	snprintf(path, sizeof(path), "%s/cpu.cfs_period_us", directory);
	if (tnd__read_small(path, text, sizeof(text)) > 0)
		period = atoll(text);
	return ceil_ratio(quota, period);
}

/*
 * From our group up to the mount's root. A group outside the mounted part (a namespace) is taken as
 * its root.
 */
static uint32_t quota_of(const char *root, const struct hierarchy *one)
{
	char path[2 * PATH_BYTES + 256];
	const char *group = one->group;
	size_t base, skip = strlen(one->mount_root);
	uint32_t least = 0, quota;

	if (!one->mounted)
		return 0;
	if (strcmp(one->mount_root, "/") != 0) {
		group = strncmp(group, one->mount_root, skip) == 0 ? group + skip : "";
	}
	base = (size_t)snprintf(path, sizeof(path), "%s%s", root, one->mount);
	if (base + strlen(group) >= sizeof(path))
		return 0;
	strcpy(path + base, strcmp(group, "/") == 0 ? "" : group);
	for (;;) {
		char *slash;

		quota = quota_at(path, one->v2);
		if (quota && (!least || quota < least))
			least = quota;
		slash = strrchr(path + base, '/');
		if (!slash)
			return least;
		*slash = '\0';
	}
}

uint32_t tnd__cpu_quota(const char *root)
{
	struct hierarchy *both = calloc(2, sizeof(*both));
	uint32_t v1, v2;

	if (!both)
		return 0;
	both[1].v2 = true;
	each_line(root, "/proc/self/cgroup", both, parse_group);
	each_line(root, "/proc/self/mountinfo", both, parse_mount);
	v1 = quota_of(root, &both[0]);
	v2 = quota_of(root, &both[1]);
	free(both);
	return v1 && v2 ? TND__MIN(v1, v2) : v1 ? v1 : v2;
}
