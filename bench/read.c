/* SPDX-License-Identifier: Apache-2.0 */
/*
 * read.c - does the storage layer reach the disk's direct-read bound?
 *
 *   read FILE [ROUNDS]      FILE of some GiB on the disk to measure; as root, caches are dropped before each run
 *
 * The bound: a sequential direct read of the whole file into huge-page buffers touched before the
 * clock starts, by plain loops around pread() (threads x chunk) and io_uring (depth x chunk); the
 * best configuration by median counts. Against it the storage layer reads the same file into
 * buffers of the same kind, in 2 MiB reads, padded in place. On paper the ratio is 1: both issue
 * the same requests, and a 2 MiB request is about 1 ms of this disk's time, against tens of
 * microseconds for handing a read over.
 *
 * Contenders take turns in each round. After the clock has stopped, what the storage layer left in
 * the buffers is compared with the file. Last line: JSON.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <tnd_config.h>
#if TND_HAVE_URING
#include <liburing.h>
#endif

#include <tundish/load.h>

#include "storage/storage.h"

#define ROUNDS_MAX 64
#define BUFFERS TND__MIB(256)
#define TABLE_MAX 24

enum kind { KIND_THREADS, KIND_URING, KIND_STORAGE };

struct contender {
	enum kind kind;
	uint32_t width; /* threads, or depth */
	uint64_t chunk;
	uint32_t engine, direct;
	const char *note;
	double rates[ROUNDS_MAX]; /* GB/s */
};

static const char *path;
static uint64_t file_bytes;
static unsigned char *buffers;

static _Noreturn void die(const char *what)
{
	fprintf(stderr, "read: %s: %s\n", what, strerror(errno));
	exit(2);
}

static void drop_caches(void)
{
	int fd = open("/proc/sys/vm/drop_caches", O_WRONLY | O_CLOEXEC);

	sync();
	if (fd < 0 || write(fd, "3", 1) != 1)
		die("/proc/sys/vm/drop_caches (root is needed)");
	close(fd);
}

static void *buffers_make(void)
{
	unsigned char *map = mmap(NULL, BUFFERS + TND__HUGE, PROT_READ | PROT_WRITE,
				  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (map == MAP_FAILED)
		die("mmap");
	map += tnd__round_up((uintptr_t)map, TND__HUGE) - (uintptr_t)map;
	madvise(map, BUFFERS, MADV_HUGEPAGE);
	memset(map, 1, BUFFERS);
	return map;
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

/* -- the bound: threads -- */

struct slice {
	pthread_t thread;
	const struct contender *contender;
	uint32_t index;
	int fd;
};

static void *slice_read(void *arg)
{
	struct slice *slice = arg;
	uint64_t chunk = slice->contender->chunk, step = chunk * slice->contender->width;
	unsigned char *buffer = buffers + slice->index * chunk;

	for (uint64_t at = slice->index * chunk; at < file_bytes; at += step)
		if (pread(slice->fd, buffer, chunk, (off_t)at) < 0)
			die("pread");
	return NULL;
}

static void run_threads(const struct contender *contender)
{
	struct slice slices[64];
	int fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);

	if (fd < 0)
		die(path);
	for (uint32_t i = 0; i < contender->width; i++) {
		slices[i] = (struct slice){.contender = contender, .index = i, .fd = fd};
		if (pthread_create(&slices[i].thread, NULL, slice_read, &slices[i]))
			die("pthread_create");
	}
	for (uint32_t i = 0; i < contender->width; i++)
		pthread_join(slices[i].thread, NULL);
	close(fd);
}

/* -- the bound: io_uring -- */

#if TND_HAVE_URING
static void run_uring(const struct contender *contender)
{
	uint64_t chunk = contender->chunk, at = 0;
	struct io_uring_cqe *cqe;
	struct io_uring ring;
	uint32_t flying = 0;
	int fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);

	if (fd < 0 || io_uring_queue_init(contender->width, &ring, 0) < 0)
		die(path);
	for (uint64_t i = 0; at < file_bytes || flying;) {
		struct io_uring_sqe *sqe;

		if (i < contender->width && at < file_bytes) {
			sqe = io_uring_get_sqe(&ring);
			io_uring_prep_read(sqe, fd, buffers + i * chunk, (unsigned)chunk, at);
			sqe->user_data = i++;
			at += chunk;
			flying++;
			continue;
		}
		if (io_uring_submit_and_wait(&ring, 1) < 0 || io_uring_wait_cqe(&ring, &cqe) < 0)
			die("io_uring");
		while (io_uring_peek_cqe(&ring, &cqe) == 0) {
			uint64_t slot = cqe->user_data;

			if (cqe->res < 0)
				die("io_uring read");
			io_uring_cqe_seen(&ring, cqe);
			flying--;
			if (at >= file_bytes)
				continue;
			sqe = io_uring_get_sqe(&ring);
			io_uring_prep_read(sqe, fd, buffers + slot * chunk, (unsigned)chunk, at);
			sqe->user_data = slot;
			at += chunk;
			flying++;
		}
	}
	io_uring_queue_exit(&ring);
	close(fd);
}
#else
static void run_uring(const struct contender *contender)
{
	(void)contender;
}
#endif

/* -- the storage layer -- */

struct slots {
	pthread_mutex_t lock;
	pthread_cond_t freed;
	struct tnd__read *idle;
	uint32_t idle_count;
};
static struct slots slots = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0};

static void on_done(struct tnd__read *read, int status, uint64_t fail_offset)
{
	(void)fail_offset;
	if (status != 0) {
		fprintf(stderr, "read: %s\n", tnd_strerror(status));
		exit(2);
	}
	pthread_mutex_lock(&slots.lock);
	read->next = slots.idle;
	slots.idle = read;
	slots.idle_count++;
	pthread_cond_signal(&slots.freed);
	pthread_mutex_unlock(&slots.lock);
}

static struct tnd__read *slot_take(uint32_t least)
{
	struct tnd__read *read;

	pthread_mutex_lock(&slots.lock);
	while (slots.idle_count < least)
		pthread_cond_wait(&slots.freed, &slots.lock);
	read = slots.idle;
	slots.idle = read->next;
	slots.idle_count--;
	pthread_mutex_unlock(&slots.lock);
	return read;
}

/* Each slot still holds the last range that was read into it. */
static void verify(int fd, const struct tnd__read *reads, uint32_t count, unsigned char *scratch)
{
	for (uint32_t i = 0; i < count; i++) {
		if (!reads[i].bytes)
			continue;
		if (pread(fd, scratch, reads[i].bytes, (off_t)reads[i].offset) !=
			    (ssize_t)reads[i].bytes ||
		    memcmp(scratch, reads[i].dst, reads[i].bytes) != 0) {
			fprintf(stderr, "read: wrong bytes at %" PRIu64 "\n", reads[i].offset);
			exit(2);
		}
	}
}

/* Return: when it was done. */
static int64_t run_storage(const struct contender *contender)
{
	uint64_t chunk = contender->chunk;
	uint32_t count = (uint32_t)(BUFFERS / chunk);
	struct tnd__read *reads = calloc(count, sizeof(*reads)), *read;
	unsigned char *scratch = malloc(chunk);
	int64_t end;
	struct tnd__storage_opts opts = {.engine = contender->engine,
					 .direct = contender->direct,
					 .queue_depth = contender->width,
					 .chunk_bytes = chunk,
					 .bounce_count = 1,
					 .numa = TND_NUMA_AUTO};
	struct tnd__storage *storage;
	struct tnd__source *source;
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (!reads || !scratch || fd < 0 || tnd__storage_create(&opts, &storage, NULL) < 0 ||
	    tnd__source_open(storage, fd, path, file_bytes, &source, NULL) < 0)
		die(path);
	slots.idle = NULL;
	slots.idle_count = 0;
	for (uint32_t i = 0; i < count; i++) {
		reads[i].dst = buffers + i * chunk;
		on_done(&reads[i], 0, 0);
	}
	for (uint64_t at = 0; at < file_bytes; at += chunk) {
		read = slot_take(1);
		read->source = source;
		read->offset = at;
		read->bytes = TND__MIN(chunk, file_bytes - at);
		read->padded = true;
		read->done = on_done;
		tnd__storage_submit(storage, read);
	}
	slot_take(count);
	tnd__storage_close(storage);
	tnd__source_close(source);
	end = tnd__now_ns();
	verify(fd, reads, count, scratch);
	close(fd);
	free(scratch);
	free(reads);
	return end;
}

/* -- rounds and medians -- */

static double run(const struct contender *contender)
{
	int64_t start, end = 0;

	drop_caches();
	start = tnd__now_ns();
	if (contender->kind == KIND_THREADS)
		run_threads(contender);
	else if (contender->kind == KIND_URING)
		run_uring(contender);
	else
		end = run_storage(contender);
	if (!end)
		end = tnd__now_ns();
	return (double)file_bytes / (double)(end - start);
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static double median(const double *values, int count)
{
	double sorted[ROUNDS_MAX];

	memcpy(sorted, values, (size_t)count * sizeof(*values));
	qsort(sorted, (size_t)count, sizeof(*sorted), by_value);
	return count % 2 ? sorted[count / 2] : (sorted[count / 2 - 1] + sorted[count / 2]) / 2;
}

static const char *const kinds[] = {"threads", "uring", "storage"};

static const char *describe(const struct contender *contender, char *out, size_t out_bytes)
{
	snprintf(out, out_bytes, "%s %ux%" PRIu64 "K%s%s", kinds[contender->kind], contender->width,
		 contender->chunk >> 10, contender->note ? " " : "",
		 contender->note ? contender->note : "");
	return out;
}

static struct contender table[TABLE_MAX] = {
	{KIND_THREADS, 2, TND__MIB(16), 0, 0, NULL, {0}},
	{KIND_THREADS, 8, TND__MIB(2), 0, 0, NULL, {0}},
	{KIND_THREADS, 8, TND__MIB(4), 0, 0, NULL, {0}},
	{KIND_URING, 8, TND__MIB(2), 0, 0, NULL, {0}},
	{KIND_URING, 16, TND__MIB(2), 0, 0, NULL, {0}},
	{KIND_URING, 32, TND__MIB(2), 0, 0, NULL, {0}},
	{KIND_URING, 8, TND__MIB(8), 0, 0, NULL, {0}},
	{KIND_STORAGE, 8, TND__MIB(2), TND_ENGINE_URING, 0, "uring", {0}},
	{KIND_STORAGE, 16, TND__MIB(2), TND_ENGINE_URING, 0, "uring", {0}},
	{KIND_STORAGE, 32, TND__MIB(2), TND_ENGINE_URING, 0, "uring", {0}},
	{KIND_STORAGE, 32, TND__MIB(2), TND_ENGINE_THREADS, 0, "threads", {0}},
};

static void report(int rounds, int count)
{
	const struct contender *bound = NULL, *ours = NULL, *plain = NULL;
	struct utsname machine;
	char name[64], other[64];

	uname(&machine);
	printf("%s %s, %ld processors, %.2f GB, %d rounds, buffers on huge pages: %ld KiB\n",
	       machine.sysname, machine.release, sysconf(_SC_NPROCESSORS_ONLN),
	       (double)file_bytes / 1e9, rounds, huge_kib());
	for (int i = 0; i < count; i++) {
		struct contender *one = &table[i];
		double middle = median(one->rates, rounds);

		printf("%-28s median %.3f GB/s\n", describe(one, name, sizeof(name)), middle);
		if (one->kind != KIND_STORAGE && (!bound || middle > median(bound->rates, rounds)))
			bound = one;
		if (one->kind == KIND_STORAGE && one->engine == TND_ENGINE_URING &&
		    one->width == 32 && one->chunk == TND__MIB(2))
			ours = one;
		if (one->kind == KIND_STORAGE && one->engine == TND_ENGINE_THREADS)
			plain = one;
	}
	printf("{\"bench\":\"read\",\"bound\":\"%s\",\"bound_gbps\":%.3f,\"storage\":\"%s\","
	       "\"storage_gbps\":%.3f,"
	       "\"ratio\":%.3f,\"threads_gbps\":%.3f,\"threads_ratio\":%.3f,\"rounds\":%d}\n",
	       describe(bound, name, sizeof(name)), median(bound->rates, rounds),
	       describe(ours, other, sizeof(other)), median(ours->rates, rounds),
	       median(ours->rates, rounds) / median(bound->rates, rounds),
	       median(plain->rates, rounds),
	       median(plain->rates, rounds) / median(bound->rates, rounds), rounds);
}

int main(int argc, char **argv)
{
	int rounds = argc > 2 ? atoi(argv[2]) : 9, count = 0;
	struct stat status;

	if (argc < 2 || rounds < 1 || rounds > ROUNDS_MAX) {
		fprintf(stderr, "usage: read FILE [ROUNDS, 1 to %d]\n", ROUNDS_MAX);
		return 2;
	}
	path = argv[1];
	if (stat(path, &status) < 0 || status.st_size < (off_t)TND__MIB(16))
		die(path);
	file_bytes = tnd__round_down((uint64_t)status.st_size, TND__MIB(2));
	buffers = buffers_make();
	while (count < TABLE_MAX && table[count].width)
		count++;
	for (int i = 0; i < rounds; i++)
		for (int j = 0; j < count; j++) {
			/* Who goes first changes: what ran before leaves its mark. */
			struct contender *one = &table[(i + j) % count];

			one->rates[i] = run(one);
		}
	report(rounds, count);
	return 0;
}
