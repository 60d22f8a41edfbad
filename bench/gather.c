/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gather.c - by which copies is a slice taken out of a slab, and from which length of a run on?
 *
 *   gather [ROUNDS]
 *
 * A column slice is one run a row, at the distance of a row: 4096 rows of which 3.5 KiB of 14 KiB
 * are kept (down_proj), 2048 rows of 384 B out of 1.5 KiB (an expert's w2). Here a quarter of each
 * row is kept, for runs of 256 B to 64 KiB, out of 256 MiB, which no cache holds.
 *
 *   staging  1 MiB, used again and again: it stays in a cache
 *   touched  64 MiB, written before
 *   fresh    64 MiB, mapped anew each time: its pages are cleared first
 *
 * Bound on paper: each byte is read from memory and written to it. An ordinary store to a line that
 * is in no cache reads it first, so of three bytes moved `plain` has one too many in `touched`, and
 * streaming may be up to 1.5 times as fast; in `staging` nothing is written to memory by plain
 * stores, and streaming loses. The yardstick is memcpy of one block of 64 MiB, in the same rounds.
 *
 * Ways take turns within a round; contents are compared with the source in the first.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "base/base.h"
#include "base/copy.h"

#define SOURCE TND__MIB(256)
#define KEPT (SOURCE / 4)
#define STAGING TND__MIB(1)
#define ROUNDS_MAX 99
#define CASES 10

enum { INTO_STAGING, INTO_TOUCHED, INTO_FRESH, PLACES };

static const char *const place_names[PLACES] = {"staging", "touched", "fresh"};
static const char *const way_names[TND__COPY_WAYS] = {"plain", "stream16", "stream32"};
static const uint64_t run_bytes[CASES] = {256,  384,  512,   1024,  2048,
					  3584, 8192, 16384, 32768, 65536};

static unsigned char *source, *staging, *touched;
static int rounds = 9;
static int64_t took[CASES][PLACES][TND__COPY_WAYS][ROUNDS_MAX];
static int64_t block[TND__COPY_WAYS][ROUNDS_MAX];

static unsigned char *map(uint64_t bytes)
{
	void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (data == MAP_FAILED) {
		perror("gather");
		exit(1);
	}
	madvise(data, bytes, MADV_HUGEPAGE);
	return data;
}

static void verify(const unsigned char *to, const unsigned char *from,
		   const struct tnd__strides *strides)
{
	for (uint64_t i = 0; i < strides->count; i++)
		if (memcmp(to + i * strides->bytes, from + i * strides->stride, strides->bytes)) {
			fprintf(stderr, "gather: run %llu is wrong\n", (unsigned long long)i);
			exit(1);
		}
}

/* All of the source through 1 MiB, as members of a shared load do. Return: ns, -1: no such way. */
static int64_t through_staging(int way, uint64_t run, bool check)
{
	uint64_t stride = run * 4, step = STAGING / run * stride;
	int64_t start = tnd__now_ns();

	for (uint64_t at = 0; at < SOURCE / stride * stride; at += step) {
		struct tnd__strides part = {TND__MIN(step, SOURCE / stride * stride - at) / stride,
					    run, stride};

		if (!tnd__copy_by(way, staging, source + at, &part))
			return -1;
		if (check)
			verify(staging, source + at, &part);
	}
	return tnd__now_ns() - start;
}

static int64_t at_once(int way, uint64_t run, int place, bool check)
{
	struct tnd__strides all = {SOURCE / (run * 4), run, run * 4};
	unsigned char *to = place == INTO_FRESH ? map(KEPT) : touched;
	int64_t start = tnd__now_ns(), ns;
	bool done = tnd__copy_by(way, to, source, &all);

	ns = done ? tnd__now_ns() - start : -1;
	if (done && check)
		verify(to, source, &all);
	if (place == INTO_FRESH)
		munmap(to, KEPT);
	return ns;
}

static void one_round(int round)
{
	const struct tnd__strides whole = {1, KEPT, KEPT};
	int at = round < 0 ? 0 : round; /* the first warms up, checks, and is overwritten */

	for (int i = 0; i < CASES; i++)
		for (int place = 0; place < PLACES; place++)
			for (int way = 0; way < TND__COPY_WAYS; way++)
				took[i][place][way][at] =
					place == INTO_STAGING
						? through_staging(way, run_bytes[i], round < 0)
						: at_once(way, run_bytes[i], place, round < 0);
	for (int way = 0; way < TND__COPY_WAYS; way++) {
		int64_t start = tnd__now_ns();

		block[way][at] =
			tnd__copy_by(way, touched, source, &whole) ? tnd__now_ns() - start : -1;
	}
}

static int by_value(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return x < y ? -1 : x > y;
}

/* GB/s: of the slowest, the median and the fastest round. */
static void print_way(const char *name, uint64_t bytes, int64_t *ns)
{
	qsort(ns, (size_t)rounds, sizeof(*ns), by_value);
	if (ns[0] < 0) {
		printf("  %s -", name);
		return;
	}
	printf("  %s %5.2f %5.2f %5.2f", name, (double)bytes / (double)ns[rounds - 1],
	       (double)bytes / (double)ns[rounds / 2], (double)bytes / (double)ns[0]);
}

static void print_json(void)
{
	printf("{\"bench\":\"gather\",\"rounds\":%d,\"block_gb_s\":%.2f,\"cases\":[", rounds,
	       (double)KEPT / (double)block[TND__COPY_PLAIN][rounds / 2]);
	for (int i = 0; i < CASES; i++)
		for (int place = 0; place < PLACES; place++) {
			printf("%s{\"run\":%llu,\"into\":\"%s\"", i || place ? "," : "",
			       (unsigned long long)run_bytes[i], place_names[place]);
			for (int way = 0; way < TND__COPY_WAYS; way++)
				if (took[i][place][way][0] >= 0)
					printf(",\"%s_gb_s\":%.2f", way_names[way],
					       (double)(SOURCE / (run_bytes[i] * 4) *
							run_bytes[i]) /
						       (double)took[i][place][way][rounds / 2]);
			putchar('}');
		}
	printf("]}\n");
}

int main(int argc, char **argv)
{
	struct utsname machine;

	if (argc > 1)
		rounds = atoi(argv[1]);
	if (rounds < 1 || rounds > ROUNDS_MAX || uname(&machine) < 0) {
		fprintf(stderr, "gather: expected 1 to %d rounds\n", ROUNDS_MAX);
		return 2;
	}
	source = map(SOURCE);
	staging = map(STAGING);
	touched = map(KEPT);
	for (uint64_t i = 0; i < SOURCE; i += 8)
		memcpy(source + i, &(uint64_t){i * UINT64_C(0x9e3779b97f4a7c15)}, 8);
	memset(staging, 1, STAGING);
	memset(touched, 1, KEPT);
	for (int round = -1; round < rounds; round++)
		one_round(round);
	printf("machine: %s %s, %ld processors; GB/s kept: slowest, median, fastest of %d\n",
	       machine.sysname, machine.release, sysconf(_SC_NPROCESSORS_ONLN), rounds);
	printf("%-16s", "one block");
	for (int way = 0; way < TND__COPY_WAYS; way++)
		print_way(way_names[way], KEPT, block[way]);
	putchar('\n');
	for (int i = 0; i < CASES; i++)
		for (int place = 0; place < PLACES; place++) {
			printf("%6llu %-9s", (unsigned long long)run_bytes[i], place_names[place]);
			for (int way = 0; way < TND__COPY_WAYS; way++)
				print_way(way_names[way],
					  SOURCE / (run_bytes[i] * 4) * run_bytes[i],
					  took[i][place][way]);
			putchar('\n');
		}
	print_json();
	return 0;
}
