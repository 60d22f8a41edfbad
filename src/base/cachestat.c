/* SPDX-License-Identifier: Apache-2.0 */
/* cachestat.c - the system call of Linux 6.5, for C libraries that do not know it */
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base.h"

/* The same number on every architecture. */
#define CACHESTAT_CALL 451

struct cachestat_range {
	uint64_t off, len;
};

struct cachestat_counts {
	uint64_t nr_cache, nr_dirty, nr_writeback, nr_evicted, nr_recently_evicted;
};

int64_t tnd__cachestat(int fd, uint64_t offset, uint64_t bytes)
{
	struct cachestat_range range = {offset, bytes};
	struct cachestat_counts counts = {0};

	if (bytes == 0)
		return 0; /* the kernel takes a length of 0 as "to the end" */
	if (syscall(CACHESTAT_CALL, fd, &range, &counts, 0) < 0)
		return -errno;
	return (int64_t)(counts.nr_cache * (uint64_t)sysconf(_SC_PAGESIZE));
}
