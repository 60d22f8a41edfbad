/* SPDX-License-Identifier: Apache-2.0 */
/*
 * map.c - mappings: alignment, huge pages, memfds, NUMA nodes
 *
 * From 2 MiB up a mapping begins at a 2 MiB boundary: address space is taken 2 MiB too large, and
 * what sticks out is given back at once. Anonymous memory then gets huge pages at first touch
 * (MADV_HUGEPAGE). The pages of a memfd are huge only where the system says so for shared memory,
 * which it mostly does not; MADV_COLLAPSE asks for them once, and allocates them (it refuses 2 MiB
 * of which no page is there yet, so one of each is touched). Below 2 MiB huge pages would only make
 * small buffers resident beyond their size.
 *
 * All of it but the mapping itself is advice: a refusal changes speed, not results.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "pool.h"

/*
 * Memory that leaves with a tensor: a mapping of its own from here up. A model of 100,000 small
 * tensors would run into the kernel's limit of mappings (vm.max_map_count, 65,530), and pay a
 * system call and a page for each.
 */
#define OWN_MAP_LEAST TND__KIB(64)
#define OWN_ALIGN 64

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

/* From linux/mempolicy.h; libnuma would bring nothing else. */
#define MPOL_BIND_ 2
#define MPOL_INTERLEAVE_ 3

/* Address space of `bytes` with the right alignment. */
static void *map_aligned(uint64_t bytes, int protection)
{
	uint64_t extra = bytes >= TND__HUGE ? TND__HUGE - TND__PAGE : 0;
	uintptr_t start, aligned, end;
	void *data;

	if (bytes > SIZE_MAX / 4 || tnd__failpoint("mem.map") < 0)
		return NULL;
	data = mmap(NULL, bytes + extra, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
		    -1, 0);
	if (data == MAP_FAILED)
		return NULL;
	if (!extra)
		return data;
	start = (uintptr_t)data;
	aligned = tnd__round_up(start, TND__HUGE);
	end = start + bytes + extra;
	if (aligned > start)
		munmap(data, aligned - start);
	if (end > aligned + bytes)
		munmap((char *)data + (aligned - start) + bytes, end - aligned - bytes);
	return (char *)data + (aligned - start);
}

#define NODES_TEXT_BYTES 1024

/* Nodes that have memory, as a list and a mask. A kernel without NUMA has node 0. */
static bool nodes_with_memory(char *text, unsigned char *bits)
{
	ssize_t bytes =
		tnd__read_small("/sys/devices/system/node/has_memory", text, NODES_TEXT_BYTES);

	if (bytes == -ENOENT)
		bytes = snprintf(text, NODES_TEXT_BYTES, "0");
	if (bytes <= 0)
		return false;
	text[strcspn(text, "\n")] = '\0';
	return tnd__list_parse(text, bits, TND__NODES_MAX) == 0;
}

int tnd__numa_check(int32_t numa, struct tnd_error *reterr)
{
	unsigned char bits[TND__NODES_MAX / 8] = {0};
	char text[NODES_TEXT_BYTES] = "unknown";

	if (numa == TND_NUMA_AUTO || numa == TND_NUMA_INTERLEAVE)
		return 0;
	if (!nodes_with_memory(text, bits)) /* nobody can say: the kernel then decides */
		memset(bits, 0xff, sizeof(bits));
	if (numa >= 0 && numa < TND__NODES_MAX && bits[numa / 8] >> (numa % 8) & 1)
		return 0;
	return tnd__fail_plain(reterr, TND_E_INVALID,
			       "expected a NUMA node that has memory (%s), found node %d; give one "
			       "of those, \"auto\" or \"interleave\"",
			       text, numa);
}

static void place(void *data, uint64_t bytes, int numa)
{
	unsigned char bits[TND__NODES_MAX / 8] = {0};
	unsigned long mask[TND__NODES_MAX / (8 * sizeof(unsigned long))] = {0};
	char text[NODES_TEXT_BYTES];
	int mode = MPOL_INTERLEAVE_;

	if (numa == TND_NUMA_INTERLEAVE) {
		if (!nodes_with_memory(text, bits))
			return;
	} else if (numa >= 0 && numa < TND__NODES_MAX) {
		mode = MPOL_BIND_;
		bits[numa / 8] = (unsigned char)(1u << (numa % 8));
	} else {
		return;
	}
	for (size_t i = 0; i < TND__NODES_MAX; i++)
		if (bits[i / 8] >> (i % 8) & 1)
			mask[i / (8 * sizeof(*mask))] |= 1ul << (i % (8 * sizeof(*mask)));
	/* One more than the number of bits: the kernel counts that way. */
	syscall(SYS_mbind, data, bytes, mode, mask, (unsigned long)TND__NODES_MAX + 1, 0u);
}

static int memfd_sized(uint64_t bytes)
{
	struct rlimit limit;
	int fd, rc;

	/* Beyond this limit ftruncate() does not fail, it kills (SIGXFSZ). */
	if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
	    bytes > limit.rlim_cur)
		return -EFBIG;
	rc = tnd__failpoint("mem.memfd");
	if (rc < 0)
		return rc;
	fd = tnd__memfd("tundish.slab");
	if (fd < 0)
		return fd == -EMFILE || fd == -ENFILE ? -EMFILE : -ENOMEM;
	if (ftruncate(fd, (off_t)bytes) < 0) {
		rc = errno == EFBIG ? -EFBIG : -ENOMEM;
		close(fd);
		return rc;
	}
	/* Nobody whom it is handed to can cut it under a reader (SIGBUS). */
	fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
	return fd;
}

static void collapse(void *data, uint64_t bytes)
{
	for (uint64_t at = 0; at < bytes; at += TND__HUGE)
		((volatile char *)data)[at] = 0;
	madvise(data, bytes, MADV_COLLAPSE);
}

int tnd__map(uint64_t bytes, const struct tnd__map_how *how, void **ret_data, int *ret_fd)
{
	bool huge = bytes >= TND__HUGE && !how->no_huge;
	int fd = -1;
	void *data;

	if (how->shared) {
		fd = memfd_sized(bytes);
		if (fd < 0)
			return fd;
	}
	data = map_aligned(bytes, how->shared ? PROT_NONE : PROT_READ | PROT_WRITE);
	if (!data)
		goto close_fd;
	if (how->shared &&
	    mmap(data, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
		goto unmap;
	place(data, bytes, how->numa);
	madvise(data, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
	if (huge && how->shared)
		collapse(data, tnd__round_down(bytes, TND__HUGE));
	*ret_data = data;
	*ret_fd = fd;
	return 0;

unmap:
	munmap(data, bytes);
close_fd:
	if (fd >= 0)
		close(fd);
	return -ENOMEM;
}

int tnd__own_make(uint64_t bytes, void **ret_data, uint64_t *ret_map_bytes)
{
	uint64_t map_bytes;
	void *data;

	if (!bytes)
		return TND_E_INVALID;
	if (bytes > UINT64_MAX / 4)
		return -ENOMEM;
	if (bytes < OWN_MAP_LEAST) {
		map_bytes = 0;
		data = tnd__failpoint("mem.alloc") < 0
			       ? NULL
			       : aligned_alloc(OWN_ALIGN, tnd__round_up(bytes, OWN_ALIGN));
	} else {
		/*
		 * Without advice on huge pages. Each page here is touched once, and where the host
		 * gives memory at first touch, small ones come faster: a cold load of 4.57 GB into
		 * memory of its own took 8.3 to 8.8 s on huge pages and 4.0 to 6.3 s on small ones.
		 */
		map_bytes = tnd__round_up(bytes, TND__PAGE);
		data = tnd__failpoint("mem.map") < 0
			       ? MAP_FAILED
			       : mmap(NULL, map_bytes, PROT_READ | PROT_WRITE,
				      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (data == MAP_FAILED)
			data = NULL;
	}
	if (!data)
		return -ENOMEM;
	*ret_data = data;
	*ret_map_bytes = map_bytes;
	return 0;
}

void tnd_own_free(void *memory, uint64_t map_bytes)
{
	if (memory && map_bytes)
		munmap(memory, map_bytes);
	else
		free(memory);
}
