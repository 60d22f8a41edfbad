/* SPDX-License-Identifier: Apache-2.0 */
/*
 * storage_faults.c - reads a file through the storage layer and compares it, to be run under the
 * shim and under tnd_deny
 *
 *   storage_faults FILE auto|uring|threads auto|on|off [MAY_FAIL]
 *
 * What could break: a refused call that ends in wrong bytes, a crash or a hang. Each 2 MiB of FILE is
 * read at odd bounds, once in place and once by scatter, and compared with a mapping of it. Prints
 * the report. Exit: 0 all bytes right; 3 some read failed with an error, none with wrong bytes
 * (0 with MAY_FAIL); 1 wrong bytes, or a read that did not end once.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <tundish/load.h>

#include "storage/storage.h"

#define READ_MAX 64

struct item {
	struct tnd__read read;
	unsigned char *out;
	int status, done;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ended = PTHREAD_COND_INITIALIZER;
static int left;
static struct item items[READ_MAX];

static void on_done(struct tnd__read *read, int status, uint64_t fail_offset)
{
	struct item *item = (struct item *)(void *)read;

	(void)fail_offset;
	pthread_mutex_lock(&lock);
	item->status = status;
	item->done++;
	if (--left == 0)
		pthread_cond_signal(&ended);
	pthread_mutex_unlock(&lock);
}

static void on_scatter(struct tnd__read *read, const unsigned char *data)
{
	memcpy(((struct item *)(void *)read)->out, data, read->bytes);
}

static int items_make(struct tnd__source *source, unsigned char *memory, uint64_t bytes)
{
	int count = 0;

	for (uint64_t at = 0; at < bytes && count + 2 <= READ_MAX; at += TND__HUGE)
		for (int i = 0; i < 2; i++, count++) {
			struct item *item = &items[count];
			uint64_t end = TND__MIN(at + TND__HUGE, bytes);

			memset(item, 0, sizeof(*item));
			item->read.source = source;
			item->read.offset = TND__MIN(at + (uint64_t)i * 777, end - 1);
			item->read.bytes = end - item->read.offset;
			item->read.done = on_done;
			item->out = memory + (uint64_t)count * (TND__HUGE + 2 * TND__PAGE) +
				    TND__PAGE + item->read.offset % TND__PAGE;
			item->read.padded = true;
			if (i == 0)
				item->read.dst = item->out;
			else
				item->read.scatter = on_scatter;
		}
	return count;
}

static int items_check(const unsigned char *content, int count)
{
	int failed = 0;

	for (int i = 0; i < count; i++) {
		const struct item *item = &items[i];

		if (item->done != 1) {
			fprintf(stderr, "read %d ended %d times\n", i, item->done);
			return 1;
		}
		if (item->status < 0)
			failed = item->status;
		else if (memcmp(item->out, content + item->read.offset, item->read.bytes) != 0) {
			fprintf(stderr, "wrong bytes at %llu\n",
				(unsigned long long)item->read.offset);
			return 1;
		}
	}
	if (failed)
		fprintf(stderr, "failed: %s\n", tnd_strerror(failed));
	return failed ? 3 : 0;
}

static uint32_t choice(const char *word, const char *one, const char *two)
{
	return strcmp(word, one) == 0 ? 1 : strcmp(word, two) == 0 ? 2 : 0;
}

static int run(int fd, const unsigned char *content, unsigned char *memory, uint64_t bytes,
	       const struct tnd__storage_opts *opts)
{
	struct tnd__source_report report;
	struct tnd__storage *storage;
	struct tnd__source *source;
	struct tnd_error error;
	int count, rc;

	if (tnd__storage_create(opts, &storage, &error) < 0) {
		fprintf(stderr, "%s\n", error.message);
		return 3;
	}
	if (tnd__source_open(storage, fd, "file", bytes, &source, &error) < 0) {
		fprintf(stderr, "%s\n", error.message);
		tnd__storage_close(storage);
		return 3;
	}
	left = count = items_make(source, memory, bytes);
	for (int i = 0; i < count; i++)
		tnd__storage_submit(storage, &items[i].read);
	pthread_mutex_lock(&lock);
	while (left)
		pthread_cond_wait(&ended, &lock);
	pthread_mutex_unlock(&lock);
	rc = items_check(content, count);
	tnd__source_report(source, &report);
	printf("engine=%s direct=%d cache=%d fallback=%s\n", report.engine, report.direct,
	       report.cache, report.fallback);
	tnd__storage_close(storage);
	tnd__source_close(source);
	return rc;
}

int main(int argc, char **argv)
{
	struct tnd__storage_opts opts = {
		.chunk_bytes = TND__HUGE, .bounce_count = 2, .numa = TND_NUMA_AUTO};
	unsigned char *content, *memory;
	struct stat status;
	int fd, rc;

	if (argc < 4)
		return 2;
	opts.engine = choice(argv[2], "uring", "threads");
	opts.direct = choice(argv[3], "on", "off");
	fd = open(argv[1], O_RDONLY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &status) < 0)
		return argc > 4 ? 0 : 3;
	content = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
	memory = mmap(NULL, READ_MAX * (TND__HUGE + 2 * TND__PAGE), PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (content == MAP_FAILED || memory == MAP_FAILED)
		return argc > 4 ? 0 : 3;
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	rc = run(fd, content, memory, (uint64_t)status.st_size, &opts);
	return rc == 3 && argc > 4 ? 0 : rc;
}
