/* SPDX-License-Identifier: Apache-2.0 */
/*
 * huge.c - how much of a pool is on huge pages
 *
 * Asked of the kernel with PAGEMAP_SCAN (Linux 6.7), which looks only at our ranges; else read from
 * smaps, which walks the page tables of the whole process and adds neighbouring mappings up. Either
 * way a sample, for the report.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "pool.h"

/* From linux/fs.h of 6.7. */
struct page_region_ {
	uint64_t start, end, categories;
};
struct pm_scan_arg_ {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
	uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
#define PAGEMAP_SCAN_ _IOWR('f', 16, struct pm_scan_arg_)
#define PAGE_IS_HUGE_ (UINT64_C(1) << 6)
#define REGIONS 64

/* Return: whether the kernel could tell. */
static bool scan_range(int fd, const struct tnd__range *range, uint64_t *sum)
{
	struct page_region_ regions[REGIONS];
	struct pm_scan_arg_ arg = {
		.size = sizeof(arg),
		.start = range->start,
		.end = range->end,
		.vec = (uintptr_t)regions,
		.vec_len = REGIONS,
		.category_mask = PAGE_IS_HUGE_,
		.return_mask = PAGE_IS_HUGE_,
	};

	while (arg.start < arg.end) {
		int count = ioctl(fd, PAGEMAP_SCAN_, &arg);

		if (count < 0)
			return false;
		for (int i = 0; i < count; i++)
			*sum += regions[i].end - regions[i].start;
		if (arg.walk_end <= arg.start)
			break;
		arg.start = arg.walk_end;
	}
	return true;
}

static bool scan_all(const struct tnd__range *ranges, size_t count, uint64_t *sum)
{
	int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	bool ok = fd >= 0;

	for (size_t i = 0; ok && i < count; i++)
		ok = scan_range(fd, &ranges[i], sum);
	if (fd >= 0)
		close(fd);
	return ok;
}

/* Bytes of [start, end) that are in our ranges. */
static uint64_t overlap(const struct tnd__range *ranges, size_t count, uint64_t start, uint64_t end)
{
	uint64_t bytes = 0;

	for (size_t i = 0; i < count; i++) {
		uint64_t first = TND__MAX(start, ranges[i].start);
		uint64_t last = TND__MIN(end, ranges[i].end);

		if (first < last)
			bytes += last - first;
	}
	return bytes;
}

static uint64_t from_smaps(const struct tnd__range *ranges, size_t count)
{
	FILE *file = fopen("/proc/self/smaps", "re");
	unsigned long long start, end, kib;
	uint64_t ours = 0, huge = 0, sum = 0;
	char line[512];

	while (file && fgets(line, sizeof(line), file)) {
		if (sscanf(line, "%llx-%llx ", &start, &end) == 2) {
			sum += TND__MIN(ours, huge);
			ours = overlap(ranges, count, start, end);
			huge = 0;
		} else if (sscanf(line, "AnonHugePages: %llu kB", &kib) == 1 ||
			   sscanf(line, "ShmemPmdMapped: %llu kB", &kib) == 1) {
			huge += TND__KIB(kib);
		}
	}
	if (file)
		fclose(file);
	return sum + TND__MIN(ours, huge);
}

uint64_t tnd__huge_bytes(const struct tnd__range *ranges, size_t count)
{
	uint64_t sum = 0;

	if (tnd__failpoint("mem.scan") == 0 && scan_all(ranges, count, &sum))
		return sum;
	return from_smaps(ranges, count);
}

static void collect(const struct tnd__link *list, struct tnd__range *ranges, size_t *count)
{
	for (const struct tnd__link *at = list->next; at != list; at = at->next) {
		const struct tnd_slab *slab = TND__OF(at, struct tnd_slab, link);

		ranges[*count].start = (uintptr_t)slab->data;
		ranges[(*count)++].end = (uintptr_t)slab->data + slab->map_bytes;
	}
}

static size_t length(const struct tnd__link *list)
{
	size_t count = 0;

	for (const struct tnd__link *at = list->next; at != list; at = at->next)
		count++;
	return count;
}

void tnd__slab_pool_sample_huge(struct tnd_slab_pool *pool)
{
	struct tnd__range *ranges;
	size_t count = 0;
	uint64_t bytes;

	pthread_mutex_lock(&pool->lock);
	ranges = tnd__mem_alloc((length(&pool->live) + length(&pool->idle) + 1) * sizeof(*ranges));
	if (ranges) {
		collect(&pool->live, ranges, &count);
		collect(&pool->idle, ranges, &count);
	}
	pthread_mutex_unlock(&pool->lock);
	if (!ranges)
		return;
	/* A mapping that goes away meanwhile only makes the sample smaller. */
	bytes = tnd__huge_bytes(ranges, count);
	free(ranges);
	pthread_mutex_lock(&pool->lock);
	pool->stats.huge_bytes = TND__MAX(pool->stats.huge_bytes, bytes);
	pthread_mutex_unlock(&pool->lock);
}
