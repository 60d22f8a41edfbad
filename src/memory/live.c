/* SPDX-License-Identifier: Apache-2.0 */
/* live.c - the page that a load's counters are in, the owner's side */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "headroom.h"
#include "live.h"
#include "memory.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

struct tnd__live {
	struct tnd__live_page *page;
	int fd;
	dev_t device;
	ino_t inode;
};

/* Return: descriptor, -errno. */
static int make_file(struct stat *ret_stat)
{
	int rc = tnd__failpoint("live.memfd"), fd;

	if (rc == 0)
		rc = tnd__headroom_file(TND__LIVE_BYTES, "the page of a load", NULL);
	if (rc < 0)
		return rc;
	fd = tnd__memfd("tundish.load");
	if (fd < 0)
		return fd;
	if (ftruncate(fd, TND__LIVE_BYTES) < 0 || fstat(fd, ret_stat) < 0) {
		rc = -errno;
		close(fd);
		return rc;
	}
	return fd;
}

/* Nobody can cut it, or write to it but through the mapping that we have. */
static int seal(int fd)
{
	const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

	if (fcntl(fd, F_ADD_SEALS, seals | F_SEAL_FUTURE_WRITE) == 0 || /* from Linux 5.1 on */
	    fcntl(fd, F_ADD_SEALS, seals) == 0)
		return 0;
	return -errno;
}

static void fill(struct tnd__live_page *page, uint32_t role, uint32_t rank)
{
	page->version = TND__LIVE_VERSION;
	page->role = role;
	page->pid = (int32_t)getpid();
	page->rank = rank;
	atomic_store_explicit(&page->file, UINT64_MAX, memory_order_relaxed);
	/* M1: what is above is there for whoever sees the magic first (stat_load.c). */
	atomic_store_explicit(&page->magic, TND__LIVE_MAGIC, memory_order_release);
}

int tnd__live_open(uint32_t role, uint32_t rank, struct tnd__live **ret_live)
{
	struct tnd__live *live = tnd__mem_alloc(sizeof(*live));
	struct stat stat;
	void *page;
	int rc;

	if (!live)
		return -ENOMEM;
	live->fd = rc = make_file(&stat);
	if (rc < 0)
		goto free_live;
	page = mmap(NULL, TND__LIVE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, live->fd, 0);
	if (page == MAP_FAILED) {
		rc = -errno;
		goto close_fd;
	}
	rc = seal(live->fd);
	if (rc < 0)
		goto unmap;
	live->page = page;
	live->device = stat.st_dev;
	live->inode = stat.st_ino;
	fill(live->page, role, rank);
	*ret_live = live;
	return 0;

unmap:
	munmap(page, TND__LIVE_BYTES);
close_fd:
	close(live->fd);
free_live:
	free(live);
	return rc;
}

struct tnd__live_page *tnd__live_page(struct tnd__live *live)
{
	return live ? live->page : NULL;
}

void tnd__live_file(struct tnd__live *live, uint64_t index, const char *name)
{
	struct tnd__live_page *page = tnd__live_page(live);
	size_t bytes = strlen(name);
	uint32_t generation;

	if (!page)
		return;
	if (bytes >= TND__LIVE_NAME_BYTES) {
		bytes = TND__LIVE_NAME_BYTES - 1;
		while (bytes && ((unsigned char)name[bytes] & 0xc0) == 0x80)
			bytes--;
	}
	generation = atomic_load_explicit(&page->generation, memory_order_relaxed);
	atomic_store_explicit(&page->generation, generation + 1, memory_order_relaxed);
	/* G1: whoever sees a new byte of the name sees the odd generation after it. */
	atomic_thread_fence(memory_order_release);
	for (size_t i = 0; i < TND__LIVE_NAME_BYTES; i++)
		atomic_store_explicit(&page->name[i], i < bytes ? (unsigned char)name[i] : 0,
				      memory_order_relaxed);
	atomic_store_explicit(&page->file, index, memory_order_relaxed);
	/* G2: whoever sees the even generation first sees the whole name. */
	atomic_store_explicit(&page->generation, generation + 2, memory_order_release);
}

void tnd__live_close(struct tnd__live *live)
{
	struct stat stat;

	if (!live)
		return;
	munmap(live->page, TND__LIVE_BYTES);
	/* A program that closes what it does not know may have given the number to another. */
	if (fstat(live->fd, &stat) == 0 && stat.st_dev == live->device &&
	    stat.st_ino == live->inode)
		close(live->fd);
	free(live);
}
