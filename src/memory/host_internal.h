/* SPDX-License-Identifier: Apache-2.0 */
/* host_internal.h - between host.c, meminfo.c, limits.c and headroom.c */
#ifndef TND_HOST_INTERNAL_H
#define TND_HOST_INTERNAL_H

#include "memory.h"

/*
 * The number of the line "key value [kB]" of a file like /proc/meminfo, in the file's unit. Return:
 * TND_HOST_UNKNOWN if absent.
 */
uint64_t tnd__line_number(const char *text, const char *key);

/* Fills the fields of /proc/meminfo. Return: 0, -errno. */
int tnd__meminfo_read(const char *root, struct tnd_host_memory *memory);

/*
 * Lowers `available`, sets `cgroup_limit` and `limited_by` by the cgroups above us. What cannot be
 * read does not limit.
 */
void tnd__cgroups_apply(const char *root, struct tnd_host_memory *memory);

#endif
