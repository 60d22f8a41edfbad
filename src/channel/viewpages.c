/* SPDX-License-Identifier: Apache-2.0 */
/*
 * viewpages.c - objects by slab: the memory of a reader's views
 *
 *   shared    read-only, of the memfd                          mapped when the descriptor comes
 *   private   copy-on-write, of the memfd: what this process   mapped at the first borrow
 *             writes are pages of its own; dropped at release
 *   kept      anonymous, in place of the view: only the pages that were asked for are copied
 *
 *             slab     |     aaaa     bb          |
 *             kept           |aaaa     bb|               one mapping, from the first page kept to
 *                                                        the last; between them nothing is taken
 *
 * Dropping pages takes the page tables of the others as well, and the next reads 17 ms for 256 MiB
 * to bring back, after 5 ms for the drop. Mostly nothing was written, and to see that in
 * /proc/self/pagemap takes 2 ms.
 *
 * Keeping. The copy is made beside the view and put over it by one mremap(), which is atomic to who
 * reads there meanwhile. A private mapping of the memfd would need no copy beside, but would keep
 * all of the slab's memory.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bigobject.h"

/* Bits of an entry of pagemap. */
#define ENTRY_PRESENT (UINT64_C(1) << 63)
#define ENTRY_SWAPPED (UINT64_C(1) << 62)
#define ENTRY_FILE (UINT64_C(1) << 61) /* the file's own page, not a copy */
#define ENTRIES 512

void tnd__views_open_pagemap(struct tnd__slabs *slabs)
{
	slabs->pagemap_fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
}

/* `at`: NULL, or where it was. Return: MAP_FAILED, with errno. */
static void *map_at(const struct tnd__slabs *slabs, const struct tnd__view *view, void *at)
{
	int fixed = at ? MAP_FIXED : 0;

	if (slabs->private_views)
		return mmap(at, view->bytes, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_NORESERVE | fixed, view->fd, 0);
	return mmap(at, view->bytes, PROT_READ, MAP_SHARED | fixed, view->fd, 0);
}

int tnd__view_map(const struct tnd__slabs *slabs, struct tnd__view *view)
{
	void *data;

	if (view->data)
		return 0;
	data = map_at(slabs, view, NULL);
	if (data == MAP_FAILED)
		return errno == ENOMEM ? -ENOMEM : TND_E_CORRUPT;
	view->data = data;
	return 0;
}

void tnd__view_unmap(struct tnd__view *view)
{
	if (view->data)
		munmap(view->data, view->bytes);
	view->data = NULL;
	view->stale = false;
}

bool tnd__view_has_pages(struct tnd__view *view, uint64_t bytes)
{
	struct stat stat;

	if (bytes <= view->seen_taken)
		return true;
	if (fstat(view->fd, &stat) < 0 || (uint64_t)stat.st_blocks < (bytes + 511) / 512)
		return false;
	view->seen_taken = bytes;
	return true;
}

/* -- private views -- */

/* Whether none of the pages is a copy of our own. False where that cannot be seen. */
static bool untouched(const struct tnd__slabs *slabs, const unsigned char *data, uint64_t bytes)
{
	uint64_t entries[ENTRIES];
	uint64_t page = (uintptr_t)data / TND__PAGE, end = page + bytes / TND__PAGE;

	if (slabs->pagemap_fd < 0 || tnd__failpoint("channel.pagemap") < 0)
		return false;
	while (page < end) {
		uint64_t count = TND__MIN(end - page, ENTRIES);
		ssize_t got = pread(slabs->pagemap_fd, entries, count * sizeof(*entries),
				    (off_t)(page * sizeof(*entries)));

		if (got < (ssize_t)sizeof(*entries))
			return false;
		count = (uint64_t)got / sizeof(*entries);
		for (uint64_t i = 0; i < count; i++)
			if (entries[i] & (ENTRY_PRESENT | ENTRY_SWAPPED) &&
			    !(entries[i] & ENTRY_FILE))
				return false;
		page += count;
	}
	return true;
}

bool tnd__view_clean(const struct tnd__slabs *slabs, const struct tnd__view *view, uint64_t bytes)
{
	bytes = tnd__round_up(bytes, TND__PAGE);
	if (!bytes || untouched(slabs, view->data, bytes))
		return true;
	/* Refused for locked memory (mlockall). */
	return tnd__failpoint("channel.drop") == 0 &&
	       madvise(view->data, bytes, MADV_DONTNEED) == 0;
}

/* -- keeping -- */

static void copy_pages(unsigned char *to, const unsigned char *from,
		       const struct tnd__bulk_range *pages, size_t count)
{
	for (size_t i = 0; i < count; i++)
		memcpy(to + pages[i].begin, from + pages[i].begin, pages[i].end - pages[i].begin);
}

/* `from` goes in place of what is mapped at `to`. Return: 0; -ENOMEM: all is as it was. */
static int put_over(const struct tnd__slabs *slabs, struct tnd__view *view, void *from, void *to,
		    uint64_t bytes)
{
	unsigned char seen;

	if (tnd__failpoint("channel.keep-move") == 0 &&
	    mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED)
		return 0;
	munmap(from, bytes);
	/* The kernel unmaps first, and has its own memory to find only then. */
	if (mincore(to, TND__PAGE, &seen) < 0 && map_at(slabs, view, view->data) != MAP_FAILED)
		view->stale = true;
	return -ENOMEM;
}

int tnd__view_keep(const struct tnd__slabs *slabs, struct tnd__view *view,
		   const struct tnd__bulk_range *pages, size_t count)
{
	uint64_t begin = count ? pages[0].begin : 0, end = count ? pages[count - 1].end : 0;
	unsigned char *copy = MAP_FAILED, *at = view->data + begin;
	int rc;

	if (count) {
		if (tnd__failpoint("channel.keep") == 0)
			copy = mmap(NULL, end - begin, PROT_READ | PROT_WRITE,
				    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (copy == MAP_FAILED)
			return -ENOMEM;
		/* Else a page takes 2 MiB. Not known to a kernel without huge pages. */
		(void)madvise(copy, end - begin, MADV_NOHUGEPAGE);
		copy_pages(copy - begin, view->data, pages, count);
		if (!slabs->private_views)
			mprotect(copy, end - begin, PROT_READ);
		rc = put_over(slabs, view, copy, at, end - begin);
		if (rc < 0)
			return rc;
	}
	if (begin)
		munmap(view->data, begin);
	if (end < view->bytes)
		munmap(view->data + end, view->bytes - end);
	view->data = NULL;
	view->stale = false;
	return 0;
}
