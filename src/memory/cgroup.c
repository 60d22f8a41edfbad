/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cgroup.c - what the cgroups above us leave
 *
 *   /proc/self/cgroup      "4:memory:/a/b" (v1), "0::/a/b" (v2)      which cgroup we are in
 *   /proc/self/mountinfo   root "/a", mount point /sys/fs/cgroup/..  where the hierarchy can be
 *                                                                    seen, and from where on
 *
 *   directory of ours = mount point + (path without root), then each parent up to the mount point
 *
 * In a container the path can name what the mount does not show, or the mount can show only our own
 * part as its root. A directory that is not there is skipped, so the walk then begins at the
 * nearest parent that is, at the latest the mount point.
 *
 * A level leaves limit - usage + file cache that can be reclaimed. In v1 a group may be bound by a
 * parent that the mount does not show: hierarchical_memory_limit knows. Both hierarchies are looked
 * at; the memory controller is in one of them, the other has no files.
 */
#include <stdio.h>
#include <string.h>

#include "host_internal.h"

#define PATH_BYTES 4096

struct hierarchy {
	bool v1, mounted;
	char path[PATH_BYTES];  /* of our cgroup, as /proc/self/cgroup says */
	char root[PATH_BYTES];  /* of the mount within the hierarchy */
	char mount[PATH_BYTES]; /* where it is mounted */
};

static uint64_t read_number(const char *root, const char *directory, const char *name)
{
	char path[PATH_BYTES * 2 + 64], text[64], *end;
	unsigned long long number;

	snprintf(path, sizeof(path), "%s%s/%s", root, directory, name);
	if (tnd__read_small(path, text, sizeof(text)) <= 0 || text[0] < '0' || text[0] > '9')
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

/* One level of the hierarchy; `first`: our own. */
static void apply_level(const char *root, const struct hierarchy *hierarchy, const char *directory,
			bool *first, struct tnd_host_memory *memory)
{
	char path[PATH_BYTES * 2 + 64], stat[16384];
	bool v1 = hierarchy->v1;
	uint64_t usage, limit, cache, left, inherited;

	usage = read_number(root, directory, v1 ? "memory.usage_in_bytes" : "memory.current");
	if (usage == TND_HOST_UNKNOWN)
		return;
	limit = read_number(root, directory, v1 ? "memory.limit_in_bytes" : "memory.max");
	if (!v1) {
		uint64_t high = read_number(root, directory, "memory.high");

		limit = TND__MIN(limit, high);
	}
	snprintf(path, sizeof(path), "%s%s/memory.stat", root, directory);
	if (tnd__read_small(path, stat, sizeof(stat)) < 0)
		stat[0] = '\0';
	if (v1 && *first) {
		inherited = tnd__line_number(stat, "hierarchical_memory_limit");
		limit = TND__MIN(limit, inherited);
	}
	*first = false;
	if (limit >= INT64_MAX - 65536)
		return;
	cache = line_or_zero(stat, v1 ? "total_inactive_file" : "inactive_file") +
		line_or_zero(stat, v1 ? "total_active_file" : "active_file");
	left = limit + cache > usage ? TND__MIN(limit, limit + cache - usage) : 0;
	memory->cgroup_limit = TND__MIN(memory->cgroup_limit, limit);
	/* Of two that leave the same the outer one is to blame. */
	if (left <= memory->available) {
		memory->available = left;
		tnd__printable(directory, strlen(directory), memory->limited_by,
			       sizeof(memory->limited_by));
	}
}

/* `path` below `root`, or "" if it is not. */
static const char *below(const char *path, const char *root)
{
	size_t root_bytes = strlen(root);

	if (strcmp(root, "/") == 0)
		return strcmp(path, "/") == 0 ? "" : path;
	if (strncmp(path, root, root_bytes) != 0)
		return "";
	return path[root_bytes] == '/' ? path + root_bytes : "";
}

static void apply_hierarchy(const char *root, const struct hierarchy *hierarchy,
			    struct tnd_host_memory *memory)
{
	char directory[PATH_BYTES * 2];
	const char *rest = below(hierarchy->path, hierarchy->root);
	size_t mount_bytes = strlen(hierarchy->mount);
	bool first = true;

	/* A cgroup namespace shows what is above its root as "/..": not below any mount. */
	if (strstr(rest, "/.."))
		rest = "";
	snprintf(directory, sizeof(directory), "%s%s", hierarchy->mount, rest);
	while (strlen(directory) > mount_bytes) {
		apply_level(root, hierarchy, directory, &first, memory);
		*strrchr(directory, '/') = '\0';
	}
	apply_level(root, hierarchy, hierarchy->mount, &first, memory);
}

/* mountinfo writes space, tab, newline and backslash as \ooo. */
static void unescape(const char *from, char *to, size_t to_bytes)
{
	size_t used = 0;

	while (*from && used + 1 < to_bytes) {
		if (from[0] == '\\' && from[1] >= '0' && from[1] <= '3' && from[2] >= '0' &&
		    from[2] <= '7' && from[3] >= '0' && from[3] <= '7') {
			to[used++] = (char)((from[1] - '0') << 6 | (from[2] - '0') << 3 |
					    (from[3] - '0'));
			from += 4;
		} else {
			to[used++] = *from++;
		}
	}
	to[used] = '\0';
}

/* Whether `word` is an element of a list with commas. */
static bool listed(const char *list, const char *word)
{
	size_t word_bytes = strlen(word);

	for (const char *at = strstr(list, word); at; at = strstr(at + 1, word))
		if ((at == list || at[-1] == ',') &&
		    (at[word_bytes] == '\0' || at[word_bytes] == ','))
			return true;
	return false;
}

/*
 * "id parent dev root mount options [tags] - type source options": takes it if it is the hierarchy,
 * and shows more of our path.
 */
static void try_mount(char *line, struct hierarchy *hierarchy)
{
	char *fields[6], *after = strstr(line, " - "), *type, *rest = line;
	char root[PATH_BYTES];

	if (!after)
		return;
	*after = '\0';
	after += 3;
	type = strsep(&after, " ");
	if (strcmp(type, hierarchy->v1 ? "cgroup" : "cgroup2") != 0 || !after)
		return;
	strsep(&after, " ");
	if (hierarchy->v1 && (!after || !listed(after, "memory")))
		return;
	for (size_t i = 0; i < 6; i++) {
		fields[i] = strsep(&rest, " ");
		if (!fields[i])
			return;
	}
	unescape(fields[3], root, sizeof(root));
	/* Of several mounts of it: one that shows our own cgroup, as much above it as can be. */
	if (hierarchy->mounted &&
	    (!*below(hierarchy->path, root) || strlen(root) >= strlen(hierarchy->root)))
		return;
	hierarchy->mounted = true;
	strcpy(hierarchy->root, root);
	unescape(fields[4], hierarchy->mount, sizeof(hierarchy->mount));
}

/* "number:controllers:path" */
static void try_membership(char *line, struct hierarchy *hierarchy)
{
	char *rest = line, *number = strsep(&rest, ":"), *controllers = strsep(&rest, ":");

	if (!controllers || !rest || *rest != '/')
		return;
	if (hierarchy->v1 ? !listed(controllers, "memory")
			  : strcmp(number, "0") != 0 || *controllers)
		return;
	snprintf(hierarchy->path, sizeof(hierarchy->path), "%s", rest);
}

static void each_line(const char *root, const char *name, struct hierarchy *hierarchy,
		      void (*fn)(char *line, struct hierarchy *hierarchy))
{
	char path[PATH_BYTES + 64], *line = NULL;
	size_t line_bytes = 0;
	ssize_t got;
	FILE *file;

	snprintf(path, sizeof(path), "%s%s", root, name);
	file = fopen(path, "re");
	while (file && (got = getline(&line, &line_bytes, file)) > 0) {
		if (line[got - 1] == '\n')
			line[got - 1] = '\0';
		fn(line, hierarchy);
	}
	free(line);
	if (file)
		fclose(file);
}

void tnd__cgroups_apply(const char *root, struct tnd_host_memory *memory)
{
	struct hierarchy hierarchy;

	for (int v1 = 0; v1 < 2; v1++) {
		memset(&hierarchy, 0, sizeof(hierarchy));
		hierarchy.v1 = v1;
		strcpy(hierarchy.path, "/");
		each_line(root, "/proc/self/cgroup", &hierarchy, try_membership);
		each_line(root, "/proc/self/mountinfo", &hierarchy, try_mount);
		if (hierarchy.mounted)
			apply_hierarchy(root, &hierarchy, memory);
	}
}
