/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tundish/host.h - memory that this machine has and allows
 *
 * Threads: MT-safe. Blocking: bounded (reads /proc and /sys).
 */
#ifndef TUNDISH_HOST_H
#define TUNDISH_HOST_H

#include <tundish/error.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TND_HOST_UNKNOWN UINT64_MAX

/* Bytes; TND_HOST_UNKNOWN where the kernel does not say. Names are the kernel's. */
struct tnd_host_memory {
	uint32_t struct_bytes; /* set by the caller */
	uint32_t reserved;
	/* /proc/meminfo */
	uint64_t mem_total, mem_free, mem_available, buffers, cached, anon_pages, shmem, mapped;
	uint64_t slab, kernel_stack, page_tables, sec_page_tables, percpu;
	/* The least of MemAvailable and, for each cgroup above us, limit - usage + file cache. */
	uint64_t available;
	uint64_t cgroup_limit;      /* the least limit of those cgroups */
	uint64_t rss_bytes;         /* of this process: RssAnon + RssFile + RssShmem */
	uint64_t rss_private_bytes; /* RssAnon + RssShmem */
	char limited_by[256];       /* "MemAvailable", or the cgroup's path */
};

/* Reads all of it. Return: 0; -errno (no /proc); TND_E_INVALID (struct_bytes). */
TND_API int tnd_host_memory(struct tnd_host_memory *ret_memory);

/*
 * The default budget of a node: min(6 GiB, available / 4); `rank_count` > 0 gives one rank's share.
 * At least 1 MiB. Return: 0; -errno (no /proc); -ENODATA (it does not say what is available).
 */
TND_API int tnd_budget_default(uint32_t rank_count, uint64_t *ret_bytes);

#ifdef __cplusplus
}
#endif
#endif
