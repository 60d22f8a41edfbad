/* SPDX-License-Identifier: Apache-2.0 */
/* pagecache.c - how much of a file is in the page cache, and dropping it from there */
#include <fcntl.h>

#include "storage/storage.h"

int64_t tnd__pagecache_bytes(int fd, uint64_t offset, uint64_t bytes)
{
	int rc = tnd__failpoint("storage.cachestat");

	return rc < 0 ? rc : tnd__cachestat(fd, offset, bytes);
}

void tnd__pagecache_drop(int fd, uint64_t offset, uint64_t bytes)
{
	uint64_t low = tnd__round_down(offset, TND__PAGE);

	/* The kernel keeps a last page that is covered in part, so the range is rounded out. */
	posix_fadvise(fd, (off_t)low, (off_t)(tnd__round_up(offset + bytes, TND__PAGE) - low),
		      POSIX_FADV_DONTNEED);
}
