/* SPDX-License-Identifier: Apache-2.0 */
/* cgroup.h - a walk over the cgroups above us */
#ifndef TND_CGROUP_H
#define TND_CGROUP_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct tnd__cgroup {
	const char *root;      /* before every path: "", or a test's tree */
	const char *directory; /* "/sys/fs/cgroup/a" */
	bool v1;
};

/*
 * Calls `fn` for our cgroup and each one above it up to the mount point, in the unified hierarchy
 * and then in the v1 hierarchy that has `controller`. Which of the two has it, the files say: the
 * directories of the other, or of any level, may lack them. What cannot be read is not walked.
 */
void tnd__cgroups_walk(const char *root, const char *controller,
		       void (*fn)(const struct tnd__cgroup *cgroup, void *arg), void *arg);

/* A whole file of a cgroup, NUL-terminated. Return: bytes, -errno, -EFBIG. */
ssize_t tnd__cgroup_read(const struct tnd__cgroup *cgroup, const char *name, char *out,
			 size_t out_bytes);

#endif
