/* SPDX-License-Identifier: Apache-2.0 */
/* host.c - memory of this machine, of this process, and the default budget */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "host_internal.h"

#define DEFAULT_MAX TND__MIB(6144)
/* The smallest slab: with less nothing can be read at all. */
#define DEFAULT_MIN TND__MIB(1)

static uint64_t sum(uint64_t a, uint64_t b)
{
	return a == TND_HOST_UNKNOWN || b == TND_HOST_UNKNOWN ? TND_HOST_UNKNOWN : a + b;
}

static uint64_t status_bytes(const char *text, const char *key)
{
	uint64_t kib = tnd__line_number(text, key);

	return kib > UINT64_MAX >> 12 ? TND_HOST_UNKNOWN : TND__KIB(kib);
}

static void rss_read(const char *root, struct tnd_host_memory *memory)
{
	char path[4096], text[8192];

	memory->rss_bytes = memory->rss_private_bytes = TND_HOST_UNKNOWN;
	snprintf(path, sizeof(path), "%s/proc/self/status", root);
	if (tnd__read_small(path, text, sizeof(text)) < 0)
		return;
	memory->rss_private_bytes =
		sum(status_bytes(text, "RssAnon:"), status_bytes(text, "RssShmem:"));
	memory->rss_bytes = sum(memory->rss_private_bytes, status_bytes(text, "RssFile:"));
}

int tnd__host_memory_at(const char *root, struct tnd_host_memory *ret_memory)
{
	struct tnd_host_memory memory = {.struct_bytes = ret_memory->struct_bytes};
	int rc;

	if (!tnd__struct_ok(ret_memory->struct_bytes, sizeof(memory), sizeof(memory)))
		return TND_E_INVALID;
	rc = tnd__meminfo_read(root, &memory);
	if (rc < 0)
		return rc;
	rss_read(root, &memory);
	memory.available = memory.mem_available;
	memory.cgroup_limit = TND_HOST_UNKNOWN;
	strcpy(memory.limited_by, "MemAvailable");
	tnd__cgroups_apply(root, &memory);
	*ret_memory = memory;
	return 0;
}

int tnd_host_memory(struct tnd_host_memory *ret_memory)
{
	return tnd__host_memory_at("", ret_memory);
}

uint64_t tnd__private_bytes(void)
{
	struct tnd_host_memory memory;

	rss_read("", &memory);
	return memory.rss_private_bytes == TND_HOST_UNKNOWN ? 0 : memory.rss_private_bytes;
}

uint64_t tnd__anon_bytes(void)
{
	char text[8192];
	uint64_t bytes = TND_HOST_UNKNOWN;

	if (tnd__read_small("/proc/self/status", text, sizeof(text)) >= 0)
		bytes = status_bytes(text, "RssAnon:");
	return bytes == TND_HOST_UNKNOWN ? 0 : bytes;
}

int tnd_budget_default(uint32_t rank_count, uint64_t *ret_bytes)
{
	struct tnd_host_memory memory = {.struct_bytes = sizeof(memory)};
	uint64_t bytes;
	int rc = tnd_host_memory(&memory);

	if (rc < 0)
		return rc;
	if (memory.available == TND_HOST_UNKNOWN)
		return -ENODATA;
	bytes = TND__MIN(DEFAULT_MAX, memory.available / 4);
	if (rank_count)
		bytes /= rank_count;
	*ret_bytes = TND__MAX(bytes, DEFAULT_MIN);
	return 0;
}
