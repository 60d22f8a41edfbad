/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cgroup.c - finds the cgroups above us
 *
 *   /proc/self/cgroup      "4:memory:/a/b" (v1), "0::/a/b" (v2)      which cgroup we are in
 *   /proc/self/mountinfo   root "/a", mount point /sys/fs/cgroup/..  where the hierarchy can be
 *                                                                    seen, and from where on
 *
 *   directory of ours = mount point + (path without root), then each parent up to the mount point
 *
 * In a container the path can name what the mount does not show, or the mount can show only our own
 * part as its root. The directories are then not there and what reads them passes over them, so
 * that the walk in effect begins at the nearest parent that is there, at the latest the mount
 * point.
 *
 * Both hierarchies are walked; the controller is in one of them, the other has no files of it.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"
#include "cgroup.h"

#define PATH_BYTES 4096

struct hierarchy {
	const char *controller;
	bool v1, mounted;
	char path[PATH_BYTES];  /* of our cgroup, as /proc/self/cgroup says */
	char root[PATH_BYTES];  /* of the mount within the hierarchy */
	char mount[PATH_BYTES]; /* where it is mounted */
};

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

/* Whether `path` has a component "..". */
static bool climbs(const char *path)
{
	for (const char *at = strstr(path, "/.."); at; at = strstr(at + 3, "/.."))
		if (at[3] == '/' || at[3] == '\0')
			return true;
	return false;
}

static void walk_hierarchy(const char *root, const struct hierarchy *hierarchy,
			   void (*fn)(const struct tnd__cgroup *cgroup, void *arg), void *arg)
{
	char directory[PATH_BYTES * 2];
	const char *rest = below(hierarchy->path, hierarchy->root);
	size_t mount_bytes = strlen(hierarchy->mount);
	struct tnd__cgroup cgroup = {root, directory, hierarchy->v1};

	/* A cgroup namespace shows what is above its root as "/..": not below any mount. */
	if (climbs(rest))
		rest = "";
	snprintf(directory, sizeof(directory), "%s%s", hierarchy->mount, rest);
	while (strlen(directory) > mount_bytes) {
		fn(&cgroup, arg);
		*strrchr(directory, '/') = '\0';
	}
	cgroup.directory = hierarchy->mount;
	fn(&cgroup, arg);
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
	if (hierarchy->v1 && (!after || !listed(after, hierarchy->controller)))
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
	if (hierarchy->v1 ? !listed(controllers, hierarchy->controller)
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

void tnd__cgroups_walk(const char *root, const char *controller,
		       void (*fn)(const struct tnd__cgroup *cgroup, void *arg), void *arg)
{
	struct hierarchy hierarchy;

	for (int v1 = 0; v1 < 2; v1++) {
		memset(&hierarchy, 0, sizeof(hierarchy));
		hierarchy.controller = controller;
		hierarchy.v1 = v1;
		strcpy(hierarchy.path, "/");
		each_line(root, "/proc/self/cgroup", &hierarchy, try_membership);
		each_line(root, "/proc/self/mountinfo", &hierarchy, try_mount);
		if (hierarchy.mounted)
			walk_hierarchy(root, &hierarchy, fn, arg);
	}
}

ssize_t tnd__cgroup_read(const struct tnd__cgroup *cgroup, const char *name, char *out,
			 size_t out_bytes)
{
	char path[PATH_BYTES * 2 + 64];
	int bytes = snprintf(path, sizeof(path), "%s%s/%s", cgroup->root, cgroup->directory, name);

	if (bytes < 0 || (size_t)bytes >= sizeof(path))
		return -ENAMETOOLONG;
	return tnd__read_small(path, out, out_bytes);
}
