/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ringlayout.c - a ring of bytes whose objects are contiguous: map it twice, or pad at its end?
 *
 *   ringlayout [ROUNDS]
 *
 *   twice   B bytes of memory, mapped twice in a row: an object that crosses the end goes on in the
 *           second mapping
 *   padded  2 x B bytes, mapped once: an object that would cross the end begins at 0 again. Twice
 *           the memory, so that B bytes of objects always fit, whatever was left unused at the end
 *   tight   B bytes, padded: what padding costs by itself; holds less than B, and objects up to B/2
 *
 * Questions: what does making one cost, in time, committed memory and page tables; and what passes
 * through it, copied in and copied out, from one thread to another and in one alone? On paper: all
 * copy every byte twice, so they differ only by what the caches hold. A ring is walked from end to
 * end however little is in it: `padded` touches 2 x B, `twice` B, and as many pages more by a
 * second address as the longest object has. So `padded` loses where B fits into a cache and 2 x B
 * does not; from core to core it may gain, as the writer comes back to a line later, when the
 * reader's cache has let go of it. Page tables: 8 bytes for each 4 KiB mapped, so `twice` =
 * `padded` = 2 x `tight`.
 *
 * Uses nothing of the library. Contents are checked. One JSON line for each result; medians.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 1024u
#define ROUNDS_MAX 101
#define SPINS 2000u
#define SOURCE_BYTES ((size_t)128 << 10)
#define PASS_BYTES ((uint64_t)256 << 20)
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

enum { TWICE, PADDED, TIGHT, LAYOUTS };
static const char *const layout_names[] = {"twice", "padded", "tight"};

struct ring {
	int layout, fd;
	uint64_t limit, arena_bytes, mapped_bytes;
	unsigned char *arena;
	/* Of objects: where each lies. */
	struct {
		uint64_t offset, bytes, held;
	} slots[SLOTS];
	_Alignas(128) _Atomic uint64_t published;
	_Alignas(128) _Atomic uint64_t released;
};

/* What a run sends: lengths in turn. */
struct mix {
	const char *name;
	uint32_t lengths[4096];
};

struct pass {
	struct ring *ring;
	const struct mix *mix;
	uint64_t count;
	int64_t begin_ns, end_ns;
};

#if defined(__x86_64__) || defined(__i386__)
#define pause_cpu() __builtin_ia32_pause()
#else
#define pause_cpu() ((void)0)
#endif

static unsigned char source[SOURCE_BYTES], target[SOURCE_BYTES];

static _Noreturn void die(const char *what, int error)
{
	fprintf(stderr, "ringlayout: %s: %s\n", what, strerror(error));
	exit(2);
}

static int64_t now_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

/* Maps the ring's memory as its layout says. */
static unsigned char *map_ring(const struct ring *ring, int protection)
{
	unsigned char *at = mmap(NULL, ring->mapped_bytes, PROT_NONE,
				 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (at == MAP_FAILED)
		die("mmap", errno);
	for (uint64_t done = 0; done < ring->mapped_bytes; done += ring->arena_bytes)
		if (mmap(at + done, ring->arena_bytes, protection, MAP_SHARED | MAP_FIXED, ring->fd,
			 0) == MAP_FAILED)
			die("mmap", errno);
	return at;
}

static void ring_make(struct ring *ring, int layout, uint64_t limit)
{
	memset(ring, 0, sizeof(*ring));
	ring->layout = layout;
	ring->limit = limit;
	ring->arena_bytes = layout == PADDED ? 2 * limit : limit;
	ring->mapped_bytes = layout == TWICE ? 2 * limit : ring->arena_bytes;
	ring->fd = memfd_create("ringlayout", MFD_CLOEXEC);
	if (ring->fd < 0 || ftruncate(ring->fd, (off_t)ring->arena_bytes) != 0 ||
	    fallocate(ring->fd, 0, 0, (off_t)ring->arena_bytes) != 0)
		die("memfd", errno);
	ring->arena = map_ring(ring, PROT_READ | PROT_WRITE);
	if (madvise(ring->arena, ring->mapped_bytes, MADV_POPULATE_WRITE) != 0)
		die("madvise", errno);
}

static void ring_free(struct ring *ring)
{
	munmap(ring->arena, ring->mapped_bytes);
	close(ring->fd);
}

/*
 * Where the next object begins; `*end`: the position after it and what it leaves unused. Positions
 * go on for ever; an offset is a position modulo the arena.
 */
static uint64_t place(const struct ring *ring, uint64_t position, uint64_t bytes, uint64_t *end)
{
	uint64_t offset = position % ring->arena_bytes;

	if (ring->layout != TWICE && offset + bytes > ring->arena_bytes) {
		position += ring->arena_bytes - offset;
		offset = 0;
	}
	*end = position + bytes;
	return offset;
}

/* Spins at first: a yield costs as much as a copy. */
static void wait_turn(unsigned *turns)
{
	if (++*turns > SPINS)
		sched_yield();
	else
		pause_cpu();
}

static void *writer(void *arg)
{
	struct pass *pass = arg;
	struct ring *ring = pass->ring;
	uint64_t position = 0, freed = 0, used = 0;
	unsigned turns;

	for (uint64_t i = 0; i < pass->count; i++) {
		uint64_t bytes = pass->mix->lengths[i % 4096], end;
		uint64_t held = (bytes + 63) & ~UINT64_C(63);
		uint64_t offset = place(ring, position, held, &end);

		/* `tight` counts what it leaves unused: that is why it holds less. */
		if (ring->layout == TIGHT)
			held = end - position;
		turns = 0;
		while (used + held > ring->limit || i - freed == SLOTS) {
			uint64_t released =
				atomic_load_explicit(&ring->released, memory_order_acquire);

			if (freed == released)
				wait_turn(&turns);
			for (; freed < released; freed++)
				used -= ring->slots[freed % SLOTS].held;
		}
		memcpy(ring->arena + offset, source, bytes);
		ring->slots[i % SLOTS].offset = offset;
		ring->slots[i % SLOTS].bytes = bytes;
		ring->slots[i % SLOTS].held = held;
		atomic_store_explicit(&ring->published, i + 1, memory_order_release);
		used += held;
		position = end;
	}
	return NULL;
}

static void *reader(void *arg)
{
	struct pass *pass = arg;
	struct ring *ring = pass->ring;

	for (uint64_t i = 0; i < pass->count; i++) {
		uint64_t bytes;
		unsigned turns = 0;

		while (atomic_load_explicit(&ring->published, memory_order_acquire) == i)
			wait_turn(&turns);
		bytes = ring->slots[i % SLOTS].bytes;
		memcpy(target, ring->arena + ring->slots[i % SLOTS].offset, bytes);
		if (memcmp(target, source, 8) != 0 ||
		    memcmp(target + bytes - 8, source + bytes - 8, 8) != 0)
			die("an object is not what was sent", EBADMSG);
		atomic_store_explicit(&ring->released, i + 1, memory_order_release);
	}
	pass->end_ns = now_ns();
	return NULL;
}

/* A processor for each thread. Return: bytes a second. */
static double run_pass(struct ring *ring, const struct mix *mix)
{
	struct pass pass = {.ring = ring, .mix = mix};
	void *(*const run[])(void *) = {writer, reader};
	pthread_t threads[2];
	uint64_t bytes = 0;

	while (bytes < PASS_BYTES)
		bytes += mix->lengths[pass.count++ % 4096];
	atomic_store(&ring->published, 0);
	atomic_store(&ring->released, 0);
	pass.begin_ns = now_ns();
	for (int i = 0; i < 2; i++) {
		cpu_set_t set;

		CPU_ZERO(&set);
		CPU_SET(i % sysconf(_SC_NPROCESSORS_ONLN), &set);
		if (pthread_create(&threads[i], NULL, run[i], &pass) != 0)
			die("pthread_create", EAGAIN);
		pthread_setaffinity_np(threads[i], sizeof(set), &set);
	}
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	return (double)bytes / ((double)(pass.end_ns - pass.begin_ns) / 1e9);
}

/* The same in one thread, an object in, an object out: only what the caches hold counts. */
static double run_alone(const struct ring *ring, const struct mix *mix)
{
	uint64_t position = 0, bytes = 0;
	int64_t begin = now_ns();

	for (uint64_t i = 0; bytes < PASS_BYTES; i++) {
		uint64_t length = mix->lengths[i % 4096], offset;

		offset = place(ring, position, (length + 63) & ~UINT64_C(63), &position);
		memcpy(ring->arena + offset, source, length);
		__asm__ volatile("" ::: "memory");
		memcpy(target, ring->arena + offset, length);
		bytes += length;
	}
	return (double)bytes / ((double)(now_ns() - begin) / 1e9);
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

static double median(double *values, int count)
{
	qsort(values, (size_t)count, sizeof(*values), by_value);
	return values[count / 2];
}

static long page_table_kib(void)
{
	FILE *file = fopen("/proc/self/status", "re");
	char line[256];
	long kib = 0;

	while (file && fgets(line, sizeof(line), file))
		if (sscanf(line, "VmPTE: %ld", &kib) == 1)
			break;
	if (file)
		fclose(file);
	return kib;
}

/* Making one, and what a reader's mapping of it costs. */
static void measure_making(uint64_t limit, int rounds)
{
	static double writer_ms[LAYOUTS][ROUNDS_MAX], reader_ms[LAYOUTS][ROUNDS_MAX];
	static struct ring ring;
	long tables_kib[LAYOUTS] = {0};
	uint64_t committed[LAYOUTS] = {0};

	for (int round = 0; round < rounds; round++) {
		for (int i = 0; i < LAYOUTS; i++) {
			int layout = (i + round) % LAYOUTS;
			long before = page_table_kib();
			int64_t begin = now_ns(), made;
			unsigned char *again;
			struct stat status;

			ring_make(&ring, layout, limit);
			made = now_ns();
			tables_kib[layout] = page_table_kib() - before;
			again = map_ring(&ring, PROT_READ);
			if (madvise(again, ring.mapped_bytes, MADV_POPULATE_READ) != 0)
				die("madvise", errno);
			reader_ms[layout][round] = (double)(now_ns() - made) / 1e6;
			writer_ms[layout][round] = (double)(made - begin) / 1e6;
			fstat(ring.fd, &status);
			committed[layout] = (uint64_t)status.st_blocks * 512;
			munmap(again, ring.mapped_bytes);
			ring_free(&ring);
		}
	}
	for (int i = 0; i < LAYOUTS; i++)
		printf("{\"bench\": \"ringlayout\", \"what\": \"making\", \"limit\": %" PRIu64
		       ", \"layout\": \"%s\", \"rounds\": %d, \"committed_bytes\": %" PRIu64
		       ", \"page_tables_kib\": %ld, \"writer_ms\": %.2f, \"reader_ms\": %.2f}\n",
		       limit, layout_names[i], rounds, committed[i], tables_kib[i],
		       median(writer_ms[i], rounds), median(reader_ms[i], rounds));
}

static double run(struct ring *ring, const struct mix *mix, bool alone)
{
	return alone ? run_alone(ring, mix) : run_pass(ring, mix);
}

static void measure_passing(uint64_t limit, const struct mix *mix, int rounds, bool alone)
{
	static double rate[LAYOUTS][ROUNDS_MAX], of_twice[LAYOUTS][ROUNDS_MAX];
	static struct ring rings[LAYOUTS];
	struct rusage before, after;

	for (int i = 0; i < LAYOUTS; i++) {
		ring_make(&rings[i], i, limit);
		run(&rings[i], mix, alone);
	}
	getrusage(RUSAGE_SELF, &before);
	for (int round = 0; round < rounds; round++) {
		for (int i = 0; i < LAYOUTS; i++) {
			int layout = (i + round) % LAYOUTS;

			rate[layout][round] = run(&rings[layout], mix, alone);
		}
		for (int i = 0; i < LAYOUTS; i++)
			of_twice[i][round] = rate[i][round] / rate[TWICE][round];
	}
	getrusage(RUSAGE_SELF, &after);
	for (int i = 0; i < LAYOUTS; i++) {
		ring_free(&rings[i]);
		printf("{\"bench\": \"ringlayout\", \"what\": \"%s\", \"limit\": %" PRIu64
		       ", \"mix\": \"%s\", \"layout\": \"%s\", \"rounds\": %d, \"gbps\": %.2f"
		       ", \"of_twice\": %.3f, \"faults_all_layouts\": %ld}\n",
		       alone ? "alone" : "passing", limit, mix->name, layout_names[i], rounds,
		       median(rate[i], rounds) / 1e9, median(of_twice[i], rounds),
		       after.ru_minflt - before.ru_minflt);
	}
	fflush(stdout);
}

/* Lengths in whole words, drawn evenly. */
static void mix_make(struct mix *mix, const char *name, uint32_t least, uint32_t most)
{
	uint64_t state = 1;

	mix->name = name;
	for (int i = 0; i < 4096; i++) {
		state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
		mix->lengths[i] = (least + (uint32_t)(state >> 33) % (most - least + 1)) / 8 * 8;
	}
}

int main(int argc, char **argv)
{
	static const uint64_t made[] = {4, 100, 1024}, passed[] = {256, 1024, 4096, 65536};
	static struct mix small, mixed;
	int rounds = argc > 1 ? atoi(argv[1]) : 9;

	if (rounds < 1 || rounds > ROUNDS_MAX)
		die("expected 1 to 101 rounds", EINVAL);
	for (size_t i = 0; i < SOURCE_BYTES; i++)
		source[i] = (unsigned char)(i * 7 + i / 256);
	mix_make(&small, "64 to 4,096", 64, 4096);
	mix_make(&mixed, "8 to 79,992", 8, 79992);
	for (size_t i = 0; i < 3; i++)
		measure_making(made[i] << 20, made[i] > 512 && rounds > 3 ? 3 : rounds);
	for (size_t i = 0; i < 4; i++) {
		measure_passing(passed[i] << 10, &small, rounds, true);
		measure_passing(passed[i] << 10, &mixed, rounds, true);
		measure_passing(passed[i] << 10, &small, rounds, false);
		measure_passing(passed[i] << 10, &mixed, rounds, false);
	}
	return 0;
}
