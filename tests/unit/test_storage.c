/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_storage.c - reads give the file's bytes, whatever way they take
 *
 * What could break: rounding of direct reads, bounce buffers, retries by another way, the end of
 * the file, resources that are not given back, the page cache left other than it was. Each test
 * reads random ranges of a file of known bytes through one combination of engine, direct mode,
 * cache state and injected refusal, compares each byte, and looks at what is left in the page
 * cache, in /proc/self/fd and in /proc/self/task. TND_TEST_SEED repeats a run.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include <tundish/load.h>

#include "storage/engine.h"
#include "support/fds.h"

#define FILE_BYTES (TND__MIB(9) + 1234)
#define READS 48
#define GUARD 0xa5

static uint64_t seed;
static char file_path[] = "/tmp/tnd-test-storage.XXXXXX";
static int file_fd = -1;
static unsigned char *content;

static uint64_t random_next(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

/*
 * Others drop caches and reclaim pages on the same machine, now and then; a fault of ours comes
 * each time.
 */
#define CACHE_TRIES 5

static void *idle(void *arg)
{
	return arg;
}

static int file_make(void **state)
{
	pthread_t first; /* a sanitizer starts a thread of its own beside the first */

	const char *given = getenv("TND_TEST_SEED");
	uint64_t random;

	(void)state;
	seed = given ? strtoull(given, NULL, 0) : (uint64_t)tnd__now_ns() | 1;
	printf("seed %llu\n", (unsigned long long)seed);
	random = seed;
	content = malloc(FILE_BYTES);
	file_fd = mkstemp(file_path);
	if (!content || file_fd < 0)
		return -1;
	for (uint64_t i = 0; i < FILE_BYTES; i++)
		content[i] = (unsigned char)(random_next(&random) >> 11);
	if (pwrite(file_fd, content, FILE_BYTES, 0) != (ssize_t)FILE_BYTES)
		return -1;
	if (pthread_create(&first, NULL, idle, NULL) != 0 || pthread_join(first, NULL) != 0)
		return -1;
	return fsync(file_fd);
}

static int file_remove(void **state)
{
	(void)state;
	free(content);
	close(file_fd);
	return unlink(file_path);
}

static void make_cold(int fd)
{
	fsync(fd);
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
}

static int make_warm(int fd)
{
	unsigned char *sink = malloc(FILE_BYTES);
	ssize_t got = pread(fd, sink, FILE_BYTES, 0);

	free(sink);
	return got == (ssize_t)FILE_BYTES ? 0 : -1;
}

/* Thread entries go a moment after the join: waits for the count, up to 5 s. */
static void assert_left(unsigned int (*count_of)(void), unsigned int count)
{
	int64_t deadline = tnd__now_ns() + INT64_C(5000000000);

	while (count_of() != count && tnd__now_ns() < deadline)
		sched_yield();
	assert_int_equal(count_of(), count);
}

/* -- a batch of reads -- */

struct job {
	struct tnd__read read;
	struct batch *batch;
	unsigned char *memory; /* guarded */
	unsigned char *out;
	uint64_t memory_bytes;
	uint64_t fail_offset;
	int status, done, scattered;
};

struct batch {
	pthread_mutex_t lock;
	pthread_cond_t all;
	int left;
	struct job jobs[READS];
};

static void on_done(struct tnd__read *read, int status, uint64_t fail_offset)
{
	struct job *job = (struct job *)(void *)read;
	struct batch *batch = job->batch;

	pthread_mutex_lock(&batch->lock);
	job->done++;
	job->status = status;
	job->fail_offset = fail_offset;
	if (--batch->left == 0)
		pthread_cond_signal(&batch->all);
	pthread_mutex_unlock(&batch->lock);
}

static void on_scatter(struct tnd__read *read, const unsigned char *data)
{
	struct job *job = (struct job *)(void *)read;

	job->scattered++;
	memcpy(job->out, data, read->bytes);
}

static void job_make(struct job *job, struct tnd__source *source, uint64_t *random, int kind,
		     uint64_t chunk_bytes)
{
	uint64_t at = random_next(random) % FILE_BYTES;
	uint64_t most = TND__MIN(chunk_bytes, FILE_BYTES - at);

	if (random_next(random) % 4 == 0)
		at = tnd__round_down(at, 4096);
	if (chunk_bytes <= TND__EXTENT)
		most = TND__MIN(most, TND__EXTENT - at % TND__EXTENT);
	most = TND__MIN(most, FILE_BYTES - at);
	job->read.offset = at;
	job->read.bytes = random_next(random) % 3 ? most : 1 + random_next(random) % most;
	if (random_next(random) % 5 == 0)
		job->read.bytes = TND__MIN(job->read.bytes, 100);
	job->read.source = source;
	job->read.done = on_done;
	job->memory_bytes = tnd__round_up(job->read.bytes, 4096) + 3 * 4096;
	job->memory = aligned_alloc(4096, job->memory_bytes);
	assert_non_null(job->memory);
	memset(job->memory, GUARD, job->memory_bytes);
	if (kind == 0) { /* padded */
		job->out = job->memory + 4096 + at % 4096;
		job->read.padded = true;
		job->read.dst = job->out;
	} else if (kind == 1) { /* anywhere, exact */
		job->out = job->memory + 4096 + random_next(random) % 4096;
		job->read.dst = job->out;
	} else {
		job->out = job->memory + 4096 + 17;
		job->read.scatter = on_scatter;
	}
}

static void job_check(const struct job *job)
{
	const unsigned char *low = job->out, *high = job->out + job->read.bytes;

	assert_int_equal(job->done, 1);
	if (job->status != 0)
		fail_msg("read %llu+%llu: %s", (unsigned long long)job->read.offset,
			 (unsigned long long)job->read.bytes, tnd_strerror(job->status));
	assert_memory_equal(job->out, content + job->read.offset, job->read.bytes);
	assert_int_equal(job->scattered, job->read.dst ? 0 : 1);
	if (job->read.padded) {
		low = job->memory + tnd__round_down((uint64_t)(low - job->memory), 4096);
		high = job->memory + tnd__round_up((uint64_t)(high - job->memory), 4096);
	}
	for (const unsigned char *at = job->memory; at < low; at++)
		assert_int_equal(*at, GUARD);
	for (const unsigned char *at = high; at < job->memory + job->memory_bytes; at++)
		assert_int_equal(*at, GUARD);
}

static struct batch *batch_make(struct tnd__source *source, uint64_t *random, uint64_t chunk_bytes)
{
	struct batch *batch = calloc(1, sizeof(*batch));

	assert_non_null(batch);
	pthread_mutex_init(&batch->lock, NULL);
	pthread_cond_init(&batch->all, NULL);
	batch->left = READS;
	for (int i = 0; i < READS; i++) {
		batch->jobs[i].batch = batch;
		job_make(&batch->jobs[i], source, random, i % 3, chunk_bytes);
	}
	return batch;
}

static void batch_wait(struct batch *batch)
{
	pthread_mutex_lock(&batch->lock);
	while (batch->left)
		pthread_cond_wait(&batch->all, &batch->lock);
	pthread_mutex_unlock(&batch->lock);
}

static void batch_free(struct batch *batch)
{
	for (int i = 0; i < READS; i++)
		free(batch->jobs[i].memory);
	pthread_cond_destroy(&batch->all);
	pthread_mutex_destroy(&batch->lock);
	free(batch);
}

static struct tnd__storage_opts opts_make(uint32_t engine, uint32_t direct)
{
	return (struct tnd__storage_opts){.engine = engine,
					  .direct = direct,
					  .chunk_bytes = TND__MIB(2),
					  .bounce_count = 2,
					  .numa = TND_NUMA_AUTO};
}

/* One batch through `opts`; the source's report at its end. */
static void read_all(int fd, const struct tnd__storage_opts *opts,
		     struct tnd__source_report *report, struct tnd__storage_stats *stats)
{
	unsigned int threads = thread_count(), fds = fd_count();
	struct tnd__storage *storage;
	struct tnd__source *source;
	struct tnd_error error;
	uint64_t random = seed ^ 0x9e3779b97f4a7c15u;
	struct batch *batch;

	assert_int_equal(tnd__storage_create(opts, &storage, &error), 0);
	assert_int_equal(tnd__source_open(storage, fd, "model", FILE_BYTES, &source, &error), 0);
	batch = batch_make(source, &random, opts->chunk_bytes);
	for (int i = 0; i < READS; i++)
		tnd__storage_submit(storage, &batch->jobs[i].read);
	batch_wait(batch);
	for (int i = 0; i < READS; i++)
		job_check(&batch->jobs[i]);
	tnd__source_report(source, report);
	report->name = "";
	if (stats)
		tnd__storage_stats(storage, stats);
	tnd__source_close(source);
	tnd__storage_close(storage);
	batch_free(batch);
	assert_left(thread_count, threads);
	assert_left(fd_count, fds);
}

static uint64_t cached(int fd)
{
	int64_t bytes = tnd__pagecache_bytes(fd, 0, FILE_BYTES);

	if (bytes < 0)
		skip(); /* this kernel does not say */
	return (uint64_t)bytes;
}

static void set_points(const char *text)
{
#ifdef TND_FAILPOINTS
	assert_int_equal(tnd__failpoints_set(text), 0);
#else
	if (text)
		skip();
#endif
}

static const uint32_t engines[] = {TND_ENGINE_URING, TND_ENGINE_THREADS};
static const uint32_t directs[] = {TND_DIRECT_AUTO, TND_DIRECT_ON, TND_DIRECT_OFF};

static void test_cold_stays_cold(void **state)
{
	struct tnd__source_report report;

	(void)state;
	for (int i = 0; i < 6; i++) {
		struct tnd__storage_opts opts = opts_make(engines[i % 2], directs[i / 2]);

		make_cold(file_fd);
		assert_int_equal(cached(file_fd), 0);
		read_all(file_fd, &opts, &report, NULL);
		assert_int_equal(report.cache, TND__CACHE_COLD);
		assert_int_equal(cached(file_fd), 0);
		assert_string_equal(report.fallback, "");
		if (opts.direct == TND_DIRECT_OFF) {
			assert_false(report.direct);
			assert_true(report.dropped_bytes > 0);
		} else {
			assert_true(report.direct);
			assert_int_equal(report.dropped_bytes, 0);
			assert_string_equal(report.engine, i % 2 ? "threads" : "uring");
		}
	}
}

static bool warm_round(int i)
{
	struct tnd__storage_opts opts = opts_make(engines[i % 2], directs[i / 2]);
	struct tnd__source_report report;

	assert_int_equal(make_warm(file_fd), 0);
	read_all(file_fd, &opts, &report, NULL);
	return cached(file_fd) == tnd__round_up(FILE_BYTES, 4096) &&
	       report.cache == TND__CACHE_WARM && report.dropped_bytes == 0;
}

static void test_warm_stays_warm(void **state)
{
	(void)state;
	for (int i = 0; i < 6; i++)
		for (int tries = 1; !warm_round(i); tries++)
			assert_true(tries < CACHE_TRIES);
}

/* Every second 64 KiB warm: each page must end as it was. */
static bool mixed_round(int i)
{
	struct tnd__storage_opts opts = opts_make(engines[i % 2], directs[i / 2]);
	static unsigned char sink[TND__KIB(64)];
	struct tnd__source_report report;
	uint64_t wrong = 0;

	make_cold(file_fd);
	posix_fadvise(file_fd, 0, 0, POSIX_FADV_RANDOM);
	for (uint64_t at = 0; at < FILE_BYTES; at += TND__KIB(128))
		assert_true(pread(file_fd, sink, TND__KIB(64), (off_t)at) > 0);
	posix_fadvise(file_fd, 0, 0, POSIX_FADV_NORMAL);
	read_all(file_fd, &opts, &report, NULL);
	for (uint64_t at = 0; at < FILE_BYTES; at += TND__KIB(64)) {
		int64_t now =
			tnd__pagecache_bytes(file_fd, at, TND__MIN(TND__KIB(64), FILE_BYTES - at));

		if ((now == 0) != (at / TND__KIB(64) % 2 == 1))
			wrong++;
	}
	return wrong == 0 && report.cache == TND__CACHE_MIXED;
}

static void test_mixed_ends_as_it_was(void **state)
{
	(void)state;
	for (int i = 0; i < 6; i++)
		for (int tries = 1; !mixed_round(i); tries++)
			assert_true(tries < CACHE_TRIES);
}

static bool keep_round(void)
{
	struct tnd__storage_opts opts = opts_make(TND_ENGINE_AUTO, TND_DIRECT_OFF);
	struct tnd__source_report report;

	opts.keep_cache = true;
	make_cold(file_fd);
	read_all(file_fd, &opts, &report, NULL);
	return cached(file_fd) > FILE_BYTES / 2 && report.dropped_bytes == 0;
}

static void test_keep_cache(void **state)
{
	(void)state;
	for (int tries = 1; !keep_round(); tries++)
		assert_true(tries < CACHE_TRIES);
}

static void test_large_chunks(void **state)
{
	struct tnd__source_report report;

	(void)state;
	for (int i = 0; i < 6; i++) {
		struct tnd__storage_opts opts = opts_make(engines[i % 2], directs[i / 2]);

		opts.chunk_bytes = TND__MIB(5);
		opts.queue_depth = 3;
		make_cold(file_fd);
		read_all(file_fd, &opts, &report, NULL);
		assert_int_equal(cached(file_fd), 0);
	}
}

static void test_tmpfs(void **state)
{
	struct tnd__source_report report;
	int fd = memfd_create("tnd-test", MFD_CLOEXEC);

	(void)state;
	assert_true(fd >= 0);
	assert_int_equal(pwrite(fd, content, FILE_BYTES, 0), FILE_BYTES);
	for (int i = 0; i < 6; i++) {
		struct tnd__storage_opts opts = opts_make(engines[i % 2], directs[i / 2]);

		read_all(fd, &opts, &report, NULL);
	}
	close(fd);
}

struct refusal {
	const char *points;
	const char *reason;
	bool direct; /* still, at the end */
	int cache;
};

/* Each refusal in turn: the same bytes, nothing left, and the reason in the report. */
static void test_refusals(void **state)
{
	static const struct refusal refusals[] = {
		{"storage.uring.setup=EPERM", "io_uring refused: Operation not permitted", true,
		 TND__CACHE_COLD},
		{"storage.uring.setup=ENOSYS", "io_uring refused", true, TND__CACHE_COLD},
		{"storage.uring.cqe=EOPNOTSUPP", "io_uring read refused", true, TND__CACHE_COLD},
		{"storage.uring.cqe=EINVAL@7", "io_uring read refused: Invalid argument", true,
		 TND__CACHE_COLD},
		{"storage.uring.submit=EPERM", "io_uring", true, TND__CACHE_COLD},
		{"storage.uring.submit=EPERM@6", "io_uring", true, TND__CACHE_COLD},
		{"storage.uring.submit=EAGAIN@3x5", "", true, TND__CACHE_COLD},
		{"storage.uring.cqe=EAGAIN@3x5", "", true, TND__CACHE_COLD},
		{"storage.open.direct=EINVAL", "O_DIRECT refused: Invalid argument", false,
		 TND__CACHE_COLD},
		{"storage.uring.cqe=EINVAL,storage.read.direct=EINVAL",
		 "O_DIRECT read refused: Invalid argument", false, TND__CACHE_COLD},
		{"storage.uring.cqe=EIO@2x2,storage.read.direct=EIO@1x2",
		 "O_DIRECT read failed: Input/output error", true, TND__CACHE_COLD},
		{"storage.cachestat=EPERM", "", true, TND__CACHE_COLD},
		{"storage.cachestat=ENOSYS,storage.nowait=EOPNOTSUPP", "", true,
		 TND__CACHE_UNKNOWN},
		{"storage.open.direct=EINVAL,storage.dontcache=EOPNOTSUPP", "O_DIRECT refused",
		 false, TND__CACHE_COLD},
		{"storage.open.direct=EINVAL,storage.cachestat=EPERM", "O_DIRECT refused", false,
		 TND__CACHE_COLD},
		{"storage.read.buffered=EINTR@2x9,storage.open.direct=EOPNOTSUPP",
		 "O_DIRECT refused", false, TND__CACHE_COLD},
	};
	struct tnd__source_report report;

	(void)state;
	for (size_t i = 0; i < sizeof(refusals) / sizeof(refusals[0]); i++) {
		struct tnd__storage_opts opts = opts_make(TND_ENGINE_AUTO, TND_DIRECT_AUTO);

		make_cold(file_fd);
		set_points(refusals[i].points);
		read_all(file_fd, &opts, &report, NULL);
		set_points(NULL);
		if (!strstr(report.fallback, refusals[i].reason) ||
		    (!refusals[i].reason[0] && report.fallback[0]) ||
		    report.direct != refusals[i].direct || report.cache != refusals[i].cache ||
		    cached(file_fd) != 0)
			fail_msg("%s: fallback '%s', direct %d, cache %d, %llu bytes left",
				 refusals[i].points, report.fallback, report.direct, report.cache,
				 (unsigned long long)cached(file_fd));
	}
}

/* Neither way works: the first cause is told, and nothing hangs. */
static void test_errors(void **state)
{
	static const struct {
		const char *points;
		int status;
	} cases[] = {
		{"storage.uring.cqe=EIO,storage.read.direct=EIO,storage.read.buffered=ENXIO", -EIO},
		{"storage.open.direct=EINVAL,storage.read.buffered=EIO", -EIO},
		{"storage.alloc=ENOMEM@4", -ENOMEM},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct tnd__storage_opts opts = opts_make(TND_ENGINE_AUTO, TND_DIRECT_AUTO);
		struct tnd__storage *storage;
		struct tnd__source *source;
		uint64_t random = seed;
		struct batch *batch;
		int failed = 0;

		make_cold(file_fd);
		set_points(cases[i].points);
		assert_int_equal(tnd__storage_create(&opts, &storage, NULL), 0);
		assert_int_equal(
			tnd__source_open(storage, file_fd, "model", FILE_BYTES, &source, NULL), 0);
		batch = batch_make(source, &random, TND__MIB(2));
		for (int j = 0; j < READS; j++)
			tnd__storage_submit(storage, &batch->jobs[j].read);
		batch_wait(batch);
		for (int j = 0; j < READS; j++) {
			struct job *job = &batch->jobs[j];

			if (job->status == 0) {
				job_check(job);
				continue;
			}
			failed++;
			assert_int_equal(job->done, 1);
			assert_int_equal(job->status, cases[i].status);
			assert_int_equal(job->fail_offset, job->read.offset);
		}
		assert_true(failed > 0);
		tnd__source_close(source);
		tnd__storage_close(storage);
		batch_free(batch);
		set_points(NULL);
	}
}

static void test_create_fails_cleanly(void **state)
{
	struct tnd__storage_opts opts = opts_make(TND_ENGINE_AUTO, TND_DIRECT_AUTO);
	unsigned int threads = thread_count(), fds = fd_count();
	struct tnd__storage *storage;
	struct tnd__source_report report;
	struct tnd_error error;
	char points[64];

	(void)state;
	set_points("storage.thread=EAGAIN");
	assert_int_equal(tnd__storage_create(&opts, &storage, &error), -EAGAIN);
	/*
	 * The first and third ask for the cpuset, the second is the ring, the fourth the first
	 * worker: one is enough.
	 */
	set_points("storage.thread=EAGAIN@4");
	assert_int_equal(tnd__storage_create(&opts, &storage, &error), -EAGAIN);
	for (int i = 4; i < 8; i++) {
		snprintf(points, sizeof(points), "storage.thread=EAGAIN@%d", i + 1);
		set_points(points);
		read_all(file_fd, &opts, &report, NULL);
	}
	set_points("storage.thread=EAGAIN@2x1");
	read_all(file_fd, &opts, &report, NULL);
	assert_non_null(strstr(report.fallback, "io_uring refused"));
	set_points("storage.alloc=ENOMEM");
	assert_int_equal(tnd__storage_create(&opts, &storage, &error), -ENOMEM);
	set_points(NULL);
	opts.cpus = "99999";
	assert_int_equal(tnd__storage_create(&opts, &storage, &error), TND_E_INVALID);
	opts.cpus = "0,x";
	assert_int_equal(tnd__storage_create(&opts, &storage, &error), TND_E_INVALID);
	assert_non_null(strstr(error.message, "0,x"));
	opts.cpus = NULL;
	opts.numa = 999;
	assert_int_equal(tnd__storage_create(&opts, &storage, &error), TND_E_INVALID);
	assert_non_null(strstr(error.message, "found node 999; give"));
	assert_left(thread_count, threads);
	assert_left(fd_count, fds);
}

/* The file ends 3 MB earlier than we were told. */
static void test_truncated(void **state)
{
	char path[] = "/tmp/tnd-test-short.XXXXXX";
	int fd = mkstemp(path);
	uint64_t end = FILE_BYTES - 3000001;

	(void)state;
	assert_true(fd >= 0);
	assert_int_equal(pwrite(fd, content, end, 0), end);
	for (int i = 0; i < 6; i++) {
		struct tnd__storage_opts opts = opts_make(engines[i % 2], directs[i / 2]);
		struct tnd__storage *storage;
		struct tnd__source *source;
		uint64_t random = seed;
		struct batch *batch;
		int late = 0;

		make_cold(fd);
		assert_int_equal(tnd__storage_create(&opts, &storage, NULL), 0);
		assert_int_equal(tnd__source_open(storage, fd, "model", FILE_BYTES, &source, NULL),
				 0);
		batch = batch_make(source, &random, TND__MIB(2));
		for (int j = 0; j < READS; j++)
			tnd__storage_submit(storage, &batch->jobs[j].read);
		batch_wait(batch);
		for (int j = 0; j < READS; j++) {
			struct job *job = &batch->jobs[j];

			if (job->read.offset + job->read.bytes <= end) {
				job_check(job);
				continue;
			}
			late++;
			assert_int_equal(job->status, TND_E_TRUNCATED);
			assert_int_equal(job->fail_offset, TND__MAX(end, job->read.offset));
		}
		assert_true(late > 0);
		tnd__source_close(source);
		tnd__storage_close(storage);
		batch_free(batch);
	}
	close(fd);
	unlink(path);
}

/* Cancelled from another thread while submit() waits for room; a slow disk keeps it waiting. */
static void *cancel_soon(void *arg)
{
	struct batch *batch = *(struct batch **)arg;
	struct tnd__storage *storage = batch->jobs[0].read.source->storage;

	pthread_mutex_lock(&batch->lock);
	while (batch->left > READS - 2)
		pthread_cond_wait(&batch->all, &batch->lock);
	pthread_mutex_unlock(&batch->lock);
	tnd__storage_cancel(storage);
	return NULL;
}

static void on_done_tell(struct tnd__read *read, int status, uint64_t fail_offset)
{
	struct job *job = (struct job *)(void *)read;
	struct batch *batch = job->batch;

	on_done(read, status, fail_offset);
	pthread_mutex_lock(&batch->lock);
	pthread_cond_broadcast(&batch->all);
	pthread_mutex_unlock(&batch->lock);
}

static void test_cancel(void **state)
{
	(void)state;
	for (int i = 0; i < 6; i++) {
		struct tnd__storage_opts opts = opts_make(engines[i % 2], directs[i / 2]);
		unsigned int threads = thread_count(), fds = fd_count();
		int cancelled = 0;
		struct tnd__storage *storage;
		struct tnd__source *source;
		uint64_t random = seed;
		struct batch *batch;
		pthread_t thread;

		make_cold(file_fd);
		set_points("storage.read.direct=delay:3,storage.read.buffered=delay:3,"
			   "storage.uring.cqe=delay:3");
		opts.queue_depth = 2;
		assert_int_equal(tnd__storage_create(&opts, &storage, NULL), 0);
		assert_int_equal(
			tnd__source_open(storage, file_fd, "model", FILE_BYTES, &source, NULL), 0);
		batch = batch_make(source, &random, TND__MIB(2));
		for (int j = 0; j < READS; j++)
			batch->jobs[j].read.done = on_done_tell;
		assert_int_equal(pthread_create(&thread, NULL, cancel_soon, &batch), 0);
		for (int j = 0; j < READS; j++)
			tnd__storage_submit(storage, &batch->jobs[j].read);
		batch_wait(batch);
		pthread_join(thread, NULL);
		for (int j = 0; j < READS; j++) {
			assert_int_equal(batch->jobs[j].done, 1);
			if (batch->jobs[j].status == 0) {
				job_check(&batch->jobs[j]);
				continue;
			}
			assert_int_equal(batch->jobs[j].status, TND_E_CANCELLED);
			cancelled++;
		}
		assert_true(cancelled > 0);
		tnd__storage_close(storage);
		tnd__source_close(source);
		batch_free(batch);
		set_points(NULL);
		assert_left(thread_count, threads);
		assert_left(fd_count, fds);
	}
}

static void test_tiny_files(void **state)
{
	static const uint64_t sizes[] = {1, 511, 512, 4095, 4096, 4097};
	char path[] = "/tmp/tnd-test-tiny.XXXXXX";
	int fd = mkstemp(path);

	(void)state;
	assert_true(fd >= 0);
	for (size_t i = 0; i < 6 * sizeof(sizes) / sizeof(sizes[0]); i++) {
		struct tnd__storage_opts opts = opts_make(engines[i % 2], directs[i / 2 % 3]);
		uint64_t bytes = sizes[i / 6];
		struct tnd__storage *storage;
		struct tnd__source *source;
		struct batch batch = {.lock = PTHREAD_MUTEX_INITIALIZER,
				      .all = PTHREAD_COND_INITIALIZER,
				      .left = 1};
		unsigned char out[8192];

		assert_int_equal(ftruncate(fd, 0), 0);
		assert_int_equal(pwrite(fd, content, bytes, 0), bytes);
		make_cold(fd);
		assert_int_equal(tnd__storage_create(&opts, &storage, NULL), 0);
		assert_int_equal(tnd__source_open(storage, fd, "tiny", bytes, &source, NULL), 0);
		batch.jobs[0] = (struct job){
			.read = {.source = source, .bytes = bytes, .dst = out + 1, .done = on_done},
			.batch = &batch};
		tnd__storage_submit(storage, &batch.jobs[0].read);
		batch_wait(&batch);
		assert_int_equal(batch.jobs[0].status, 0);
		assert_memory_equal(out + 1, content, bytes);
		tnd__source_close(source);
		tnd__storage_close(storage);
	}
	close(fd);
	unlink(path);
}

/* A caller pinned to one core: our threads are not. */
static void *pinned(void *arg)
{
	cpu_set_t one;
	char mine[64];

	CPU_ZERO(&one);
	CPU_SET(sched_getcpu(), &one);
	sched_setaffinity(0, sizeof(one), &one);
	*(int *)arg = tnd__io_cpus(NULL, mine, sizeof(mine));
	return NULL;
}

static void test_processors(void **state)
{
	char all[64];
	int whole = tnd__io_cpus(NULL, all, sizeof(all)), seen = 0;
	pthread_t thread;

	(void)state;
	assert_true(whole >= 1);
	assert_int_equal(pthread_create(&thread, NULL, pinned, &seen), 0);
	pthread_join(thread, NULL);
	assert_int_equal(seen, whole);
	assert_int_equal(tnd__io_cpus("0", all, sizeof(all)), 1);
	assert_string_equal(all, "0");
	assert_int_equal(tnd__io_cpus("5000", all, sizeof(all)), TND_E_INVALID);
	assert_int_equal(tnd__io_cpus("", all, sizeof(all)), TND_E_INVALID);
	assert_true(tnd__io_thread_default() >= 2 && tnd__io_thread_default() <= 8);
}

/* The bound of bounce buffers holds, whatever waits for them. */
static void test_bounces_bounded(void **state)
{
	(void)state;
	for (int i = 0; i < 6; i++) {
		struct tnd__storage_opts opts = opts_make(engines[i % 2], directs[i / 2]);
		struct tnd__source_report report;
		struct tnd__storage_stats stats;

		opts.bounce_count = 1;
		opts.window_count = 1;
		opts.queue_depth = 16;
		opts.thread_count = 6;
		make_cold(file_fd);
		read_all(file_fd, &opts, &report, &stats);
		assert_true(stats.bounce_allocated_bytes > 0);
		assert_true(stats.bounce_allocated_bytes <= TND__MIB(2) + 8192);
		assert_int_equal(stats.thread_count, 6);
		assert_string_equal(stats.numa, "auto");
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_cold_stays_cold),
		cmocka_unit_test(test_warm_stays_warm),
		cmocka_unit_test(test_mixed_ends_as_it_was),
		cmocka_unit_test(test_keep_cache),
		cmocka_unit_test(test_large_chunks),
		cmocka_unit_test(test_tmpfs),
		cmocka_unit_test(test_refusals),
		cmocka_unit_test(test_errors),
		cmocka_unit_test(test_create_fails_cleanly),
		cmocka_unit_test(test_truncated),
		cmocka_unit_test(test_cancel),
		cmocka_unit_test(test_tiny_files),
		cmocka_unit_test(test_processors),
		cmocka_unit_test(test_bounces_bounded),
	};

	return cmocka_run_group_tests(tests, file_make, file_remove);
}
