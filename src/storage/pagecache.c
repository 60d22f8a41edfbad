/* SPDX-License-Identifier: Apache-2.0 */
/* pagecache.c - how much of a file is in the page cache, and dropping it from there */
#include <errno.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "storage/storage.h"

/* The same number on every architecture; newer than the C library's headers. */
#define CACHESTAT_CALL 451

struct cachestat_range {
	uint64_t off, len;
};

struct cachestat_counts {
	uint64_t nr_cache, nr_dirty, nr_writeback, nr_evicted, nr_recently_evicted;
};

int64_t tnd__pagecache_bytes(int fd, uint64_t offset, uint64_t bytes)
{
	struct cachestat_range range = {offset, bytes};
	struct cachestat_counts counts = {0};
	int rc = tnd__failpoint("storage.cachestat");

	if (rc < 0)
		return rc;
	if (bytes == 0)
		return 0; /* the kernel takes a length of 0 as "to the end" */
	if (syscall(CACHESTAT_CALL, fd, &range, &counts, 0) < 0)
		return -errno;
	return (int64_t)(counts.nr_cache * (uint64_t)sysconf(_SC_PAGESIZE));
}

void tnd__pagecache_drop(int fd, uint64_t offset, uint64_t bytes)
{
	uint64_t low = tnd__round_down(offset, TND__PAGE);

	/* The kernel keeps a last page that is covered in part, so the range is rounded out. */
	posix_fadvise(fd, (off_t)low, (off_t)(tnd__round_up(offset + bytes, TND__PAGE) - low),
		      POSIX_FADV_DONTNEED);
}
