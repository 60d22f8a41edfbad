/* SPDX-License-Identifier: Apache-2.0 */
/*
 * storage.c - a storage's life: workers, their queue, submission, cancel, close
 *
 * States: running -> (cancelled) -> stopping -> gone. Cancelled only sets a flag: everything queued
 * comes to a thread in turn, which sees the flag and ends it. Stopping begins once nothing is in
 * flight, so threads leave with their queues empty.
 */
#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tundish/slab.h>

#include "memory/memory.h"
#include "storage/engine.h"

/*
 * Reads of 2 MiB. With idle processors 16 are enough; with busy ones the ring's thread runs late,
 * and only what is queued beyond that keeps the disk going (bench/read).
 */
#define DEFAULT_DEPTH 32
#define DEFAULT_WINDOW 4
#define DEFAULT_CHUNK TND__MIB(2)
#define DEFAULT_BOUNCES 4

/*
 * A blocking direct read keeps a thread but no processor: as many as reads that keep the disk busy.
 */
#define DIRECT_THREADS 16

void tnd__queue_push(struct tnd__queue *queue, struct tnd__read *read)
{
	read->next = NULL;
	if (queue->tail)
		queue->tail->next = read;
	else
		queue->head = read;
	queue->tail = read;
}

struct tnd__read *tnd__queue_pop(struct tnd__queue *queue)
{
	struct tnd__read *read = queue->head;

	if (read) {
		queue->head = read->next;
		if (!queue->head)
			queue->tail = NULL;
	}
	return read;
}

void tnd__worker_queue(struct tnd__storage *storage, struct tnd__read *read, bool first)
{
	pthread_mutex_lock(&storage->lock);
	if (first && storage->tasks.head) {
		read->next = storage->tasks.head;
		storage->tasks.head = read;
	} else {
		tnd__queue_push(&storage->tasks, read);
	}
	pthread_cond_signal(&storage->work);
	pthread_mutex_unlock(&storage->lock);
}

void tnd__thread_settle(const struct tnd__storage *storage, const char *name)
{
	cpu_set_t all;

	pthread_setname_np(pthread_self(), name);
	/* The caller may be pinned to one core; refused: we stay where we are. */
	if (storage) {
		sched_setaffinity(0, sizeof(storage->cpu_bits),
				  (const cpu_set_t *)(const void *)storage->cpu_bits);
	} else {
		/* The kernel leaves those of the cpuset. */
		memset(&all, 0xff, sizeof(all));
		sched_setaffinity(0, sizeof(all), &all);
	}
}

int tnd__thread_start(void *(*run)(void *), void *arg, pthread_t *ret_thread)
{
	int rc = tnd__failpoint("storage.thread");

	return rc < 0 ? rc : tnd__thread_create(run, arg, ret_thread);
}

static void *worker(void *arg)
{
	struct tnd__storage *storage = arg;
	struct tnd__read *read;
	char name[24] = "tnd-io";

	pthread_mutex_lock(&storage->lock);
	for (uint32_t i = 0; i < storage->thread_count; i++)
		if (pthread_equal(storage->threads[i], pthread_self()))
			snprintf(name, sizeof(name), "tnd-io-%u", i);
	pthread_mutex_unlock(&storage->lock);
	tnd__thread_settle(storage, name);
	for (;;) {
		pthread_mutex_lock(&storage->lock);
		while (!storage->tasks.head && !storage->stop)
			pthread_cond_wait(&storage->work, &storage->lock);
		read = tnd__queue_pop(&storage->tasks);
		pthread_mutex_unlock(&storage->lock);
		if (!read)
			return NULL;
		tnd__transfer_run(read);
	}
}

static int workers_start(struct tnd__storage *storage)
{
	uint32_t want = storage->opts.thread_count;
	int rc = 0;

	pthread_mutex_lock(&storage->lock); /* workers look themselves up in the table */
	while (storage->thread_count < want) {
		rc = tnd__thread_start(worker, storage, &storage->threads[storage->thread_count]);
		if (rc < 0)
			break;
		storage->thread_count++;
	}
	pthread_mutex_unlock(&storage->lock);
	return storage->thread_count ? 0 : rc;
}

static void workers_stop(struct tnd__storage *storage)
{
	pthread_mutex_lock(&storage->lock);
	storage->stop = true;
	pthread_cond_broadcast(&storage->work);
	pthread_mutex_unlock(&storage->lock);
	for (uint32_t i = 0; i < storage->thread_count; i++)
		pthread_join(storage->threads[i], NULL);
}

/* After the ring was tried: without it the workers do the direct reads. */
static void fill_threads(struct tnd__storage *storage)
{
	uint32_t count = storage->opts.thread_count;

	if (!count) {
		count = tnd__io_thread_default();
		if (!storage->uring)
			count = TND__MAX(count, DIRECT_THREADS);
	}
	storage->opts.thread_count = TND__MIN(count, TND__THREAD_MAX);
}

static void fill_defaults(struct tnd__storage_opts *opts)
{
	if (!opts->queue_depth)
		opts->queue_depth = DEFAULT_DEPTH;
	if (!opts->window_count)
		opts->window_count = DEFAULT_WINDOW;
	if (!opts->chunk_bytes)
		opts->chunk_bytes = DEFAULT_CHUNK;
	if (!opts->bounce_count)
		opts->bounce_count = DEFAULT_BOUNCES;
}

static void numa_text(int32_t numa, char *out, size_t out_bytes)
{
	if (numa == TND_NUMA_INTERLEAVE)
		snprintf(out, out_bytes, "interleave");
	else if (numa < 0)
		snprintf(out, out_bytes, "auto");
	else
		snprintf(out, out_bytes, "node %d", numa);
}

static int placement(struct tnd__storage *storage, struct tnd_error *reterr)
{
	int rc = tnd__numa_check(storage->opts.numa, reterr);

	if (rc < 0)
		return rc;
	rc = tnd__cpus_choose(storage->opts.cpus, storage->opts.numa, storage->cpu_bits);
	if (rc < 0)
		return tnd__fail_plain(reterr, rc,
				       "processors '%s': expected a list such as \"0-3,8\" with at "
				       "least one that this process may use",
				       storage->opts.cpus);
	storage->opts.cpus = NULL; /* borrowed for the call */
	tnd__cpus_text(storage->cpu_bits, storage->cpus, sizeof(storage->cpus));
	numa_text(storage->opts.numa, storage->numa, sizeof(storage->numa));
	return 0;
}

static struct tnd__storage *storage_alloc(const struct tnd__storage_opts *opts)
{
	struct tnd__storage *storage;

	if (tnd__failpoint("storage.alloc") < 0)
		return NULL;
	storage = calloc(1, sizeof(*storage));
	if (!storage)
		return NULL;
	storage->opts = *opts;
	fill_defaults(&storage->opts);
	storage->bounce_bytes = tnd__round_up(storage->opts.chunk_bytes, TND__PAGE) + 2 * TND__PAGE;
	storage->bounces = calloc(storage->opts.bounce_count, sizeof(*storage->bounces));
	if (!storage->bounces) {
		free(storage);
		return NULL;
	}
	pthread_mutex_init(&storage->lock, NULL);
	pthread_cond_init(&storage->work, NULL);
	pthread_cond_init(&storage->room, NULL);
	return storage;
}

static void storage_free(struct tnd__storage *storage)
{
	tnd__bounces_free(storage);
	pthread_cond_destroy(&storage->room);
	pthread_cond_destroy(&storage->work);
	pthread_mutex_destroy(&storage->lock);
	free(storage);
}

int tnd__storage_create(const struct tnd__storage_opts *opts, struct tnd__storage **ret_storage,
			struct tnd_error *reterr)
{
	struct tnd__storage *storage = storage_alloc(opts);
	int rc;

	if (!storage)
		return tnd__fail_plain(reterr, -ENOMEM, "out of memory for the reading threads");
	rc = placement(storage, reterr);
	if (rc < 0)
		goto free_storage;
	if (opts->engine != TND__ENGINE_THREADS && tnd__uring_open(storage) == 0)
		atomic_store_explicit(&storage->uring_ok, true, memory_order_relaxed);
	fill_threads(storage);
	rc = workers_start(storage);
	if (rc < 0) {
		tnd__fail_plain(reterr, rc,
				"cannot start a reading thread: %s; raise the limit of processes",
				tnd_strerror(rc));
		goto close_ring;
	}
	*ret_storage = storage;
	return 0;

close_ring:
	tnd__uring_close(storage);
free_storage:
	storage_free(storage);
	return rc;
}

void tnd__storage_cancel(struct tnd__storage *storage)
{
	atomic_store_explicit(&storage->cancelled, true, memory_order_relaxed);
	pthread_mutex_lock(&storage->lock);
	pthread_cond_broadcast(&storage->room);
	pthread_mutex_unlock(&storage->lock);
}

void tnd__storage_close(struct tnd__storage *storage)
{
	if (!storage)
		return;
	pthread_mutex_lock(&storage->lock);
	while (storage->inflight)
		pthread_cond_wait(&storage->room, &storage->lock);
	pthread_mutex_unlock(&storage->lock);
	tnd__uring_close(storage);
	workers_stop(storage);
	storage_free(storage);
}

void tnd__storage_stats(struct tnd__storage *storage, struct tnd__storage_stats *ret_stats)
{
	memset(ret_stats, 0, sizeof(*ret_stats));
	pthread_mutex_lock(&storage->lock);
	ret_stats->storage_bytes = storage->storage_bytes;
	ret_stats->read_ns = storage->read_ns;
	ret_stats->scatter_ns = storage->scatter_ns;
	ret_stats->bounce_allocated_bytes = storage->bounce_allocated;
	pthread_mutex_unlock(&storage->lock);
	ret_stats->thread_count = storage->thread_count;
	ret_stats->engine = atomic_load_explicit(&storage->uring_ok, memory_order_relaxed)
				    ? "uring"
				    : "threads";
	memcpy(ret_stats->cpus, storage->cpus, sizeof(ret_stats->cpus));
	memcpy(ret_stats->numa, storage->numa, sizeof(ret_stats->numa));
}

void tnd__storage_submit(struct tnd__storage *storage, struct tnd__read *read)
{
	read->next = NULL;
	read->progress = 0;
	read->bounce = NULL;
	read->state = read->tries = 0;
	read->status = read->ring_error = 0;
	pthread_mutex_lock(&storage->lock);
	while (storage->inflight >= storage->opts.queue_depth && !tnd__transfer_cancelled(read))
		pthread_cond_wait(&storage->room, &storage->lock);
	storage->inflight++;
	pthread_mutex_unlock(&storage->lock);
	read->start_ns = tnd__now_ns();
	if (tnd__transfer_cancelled(read)) {
		read->status = TND_E_CANCELLED;
		tnd__step_set(read, TND__STEP_FINISH);
		tnd__worker_queue(storage, read, false);
		return;
	}
	tnd__extent_classify(read);
	tnd__transfer_route(read);
}
