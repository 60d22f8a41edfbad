/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bound.c - how fast can this machine bring these files into memory, with nothing else to do?
 *
 *   bound threads|uring|cache WIDTH CHUNK_BYTES FILE...
 *
 *   threads   direct preads of CHUNK_BYTES from WIDTH threads
 *   uring     direct reads of CHUNK_BYTES through io_uring, WIDTH in flight
 *   cache     buffered preads of CHUNK_BYTES from WIDTH threads: the page-cache copy rate where the files are cached
 *
 * One pass over all files in order. Memory is one area of 256 MiB that is used in turn, 2 MiB aligned, huge pages asked for, touched
 * before the clock starts: physical contiguity decides what a disk gives, and first touch would be measured instead of the disk.
 * Uses nothing of the library, so that it is a bound for it. Prints one JSON line with the backing that the area really had.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <tnd_config.h>
#if TND_HAVE_URING
#include <liburing.h>
#endif

#define AREA_BYTES ((size_t)256 << 20)
#define HUGE_BYTES ((size_t)2 << 20)
#define WIDTH_MAX 128

struct piece {
	int fd;
	off_t offset;
};

static struct piece *pieces;
static size_t piece_count;
static atomic_size_t next_piece;
static unsigned char *area;
static size_t chunk_bytes, width;
static uint64_t file_bytes;

static _Noreturn void die(const char *what, int error)
{
	fprintf(stderr, "bound: %s: %s\n", what, strerror(error));
	exit(2);
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void area_make(void)
{
	size_t bytes = AREA_BYTES + HUGE_BYTES;

	area = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (area == MAP_FAILED)
		die("mmap", errno);
	area += -(uintptr_t)area % HUGE_BYTES;
	madvise(area, AREA_BYTES, MADV_HUGEPAGE);
	memset(area, 1, AREA_BYTES);
}

static long huge_kib(void)
{
	FILE *file = fopen("/proc/self/smaps_rollup", "re");
	char line[256];
	long kib = -1;

	while (file && fgets(line, sizeof(line), file))
		if (sscanf(line, "AnonHugePages: %ld", &kib) == 1)
			break;
	if (file)
		fclose(file);
	return kib;
}

static void add_file(const char *path, int flags)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC | flags);
	struct stat status;
	size_t count;

	if (fd < 0 || fstat(fd, &status) < 0)
		die(path, errno);
	count = ((size_t)status.st_size + chunk_bytes - 1) / chunk_bytes;
	pieces = realloc(pieces, (piece_count + count + 1) * sizeof(*pieces));
	if (!pieces)
		die(path, ENOMEM);
	for (size_t i = 0; i < count; i++)
		pieces[piece_count++] = (struct piece){fd, (off_t)(i * chunk_bytes)};
	file_bytes += (uint64_t)status.st_size;
}

/* Where piece `index` goes: places are used in turn, so that two reads in flight never share one. */
static unsigned char *place(size_t index)
{
	return area + index % (AREA_BYTES / chunk_bytes) * chunk_bytes;
}

static void *read_pieces(void *arg)
{
	size_t index;

	while ((index = atomic_fetch_add_explicit(&next_piece, 1, memory_order_relaxed)) <
	       piece_count)
		if (pread(pieces[index].fd, place(index), chunk_bytes, pieces[index].offset) <= 0)
			die("pread", errno);
	return arg;
}

static void run_threads(void)
{
	pthread_t threads[WIDTH_MAX];
	int error;

	for (size_t i = 0; i < width; i++) {
		error = pthread_create(&threads[i], NULL, read_pieces, NULL);
		if (error)
			die("pthread_create", error);
	}
	for (size_t i = 0; i < width; i++)
		pthread_join(threads[i], NULL);
}

#if TND_HAVE_URING
static void push(struct io_uring *ring, size_t index)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(ring);

	io_uring_prep_read(sqe, pieces[index].fd, place(index), (unsigned)chunk_bytes,
			   (uint64_t)pieces[index].offset);
}

static void run_uring(void)
{
	struct io_uring_cqe *cqe;
	struct io_uring ring;
	size_t index = 0, flying = 0;
	int rc = io_uring_queue_init((unsigned)width, &ring, 0);

	if (rc < 0)
		die("io_uring", -rc);
	while (index < piece_count || flying) {
		for (; index < piece_count && flying < width; flying++)
			push(&ring, index++);
		rc = io_uring_submit_and_wait(&ring, 1);
		if (rc < 0)
			die("io_uring", -rc);
		for (; io_uring_peek_cqe(&ring, &cqe) == 0; flying--) {
			if (cqe->res <= 0)
				die("io_uring read", -cqe->res);
			io_uring_cqe_seen(&ring, cqe);
		}
	}
	io_uring_queue_exit(&ring);
}
#else
static void run_uring(void)
{
	die("io_uring", ENOSYS);
}
#endif

int main(int argc, char **argv)
{
	double start, seconds;

	if (argc < 5) {
		fprintf(stderr, "usage: bound threads|uring|cache WIDTH CHUNK_BYTES FILE...\n");
		return 2;
	}
	width = strtoul(argv[2], NULL, 10);
	chunk_bytes = strtoul(argv[3], NULL, 10);
	if (width < 1 || width > WIDTH_MAX || chunk_bytes % 4096 || chunk_bytes == 0 ||
	    width * chunk_bytes > AREA_BYTES)
		die("width or chunk", EINVAL);
	for (int i = 4; i < argc; i++)
		add_file(argv[i], strcmp(argv[1], "cache") == 0 ? 0 : O_DIRECT);
	area_make();
	start = now();
	if (strcmp(argv[1], "uring") == 0)
		run_uring();
	else
		run_threads();
	seconds = now() - start;
	printf("{\"seconds\": %.6f, \"bytes\": %" PRIu64 ", \"huge_kib\": %ld}\n", seconds,
	       file_bytes, huge_kib());
	return 0;
}
