/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine.h - what the files of storage/ share
 *
 *   submit -> route -> (resources: a bounce buffer, a place in the window) -> ring or worker queue
 *                ^                      |  none free: wait list               |
 *                |                      v                                     v
 *                `---- refused: retried another way <---- ring thread / workers --> deliver -> done
 *
 * Locks: storage->lock guards queues, resources, counters and the texts of sources. Flags that any
 * thread may look at without it are atomic, and all relaxed, without partners: nothing is published
 * by them, and a stale value costs one refused read, which is then retried. A read that waits for a
 * resource holds none: bounce buffer and window place are taken together or not at all, so two
 * readers cannot wait for each other.
 */
#ifndef TND_STORAGE_ENGINE_H
#define TND_STORAGE_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>

#include "storage/storage.h"

#define TND__CPU_BITS 8192
#define TND__THREAD_MAX 64
#define TND__EXTENT TND__HUGE

/* A read's next step, low byte of read->state. */
#define TND__STEP_MASK 0xffu
#define TND__STEP_DIRECT 1u   /* read it with O_DIRECT */
#define TND__STEP_BUFFERED 2u /* read it through the page cache */
#define TND__STEP_DELIVER 3u  /* bytes are in the bounce buffer: hand them out */
#define TND__STEP_FINISH 4u   /* only done() is left, with read->status */
#define TND__STEP_NOMEM 5u    /* there is no bounce buffer to be had */

#define TND__READ_COLD 0x100u     /* buffered: its pages are dropped behind it */
#define TND__READ_BOUNCE 0x200u   /* needs a bounce buffer */
#define TND__READ_WINDOW 0x400u   /* needs (or holds) a place in the window */
#define TND__READ_HOLDS 0x800u    /* holds what it needs */
#define TND__READ_PROBED 0x1000u  /* a probe brought a page of its first extent in */
#define TND__READ_WARM 0x2000u    /* everything is in the page cache */
#define TND__READ_REFUSED 0x4000u /* the ring refused it: a worker is to read it directly */
#define TND__READ_NODIRECT 0x8000u
#define TND__READ_MIXED 0x10000u

struct tnd__queue {
	struct tnd__read *head, *tail;
};

struct tnd__uring;

struct tnd__source {
	struct tnd__storage *storage;
	char *name;
	uint64_t file_bytes;
	int direct_fd, buffered_fd;
	uint32_t align;       /* of offset, length and memory of a direct read */
	_Atomic bool direct;  /* direct reads are in use */
	_Atomic bool uring;   /* the ring may be used */
	_Atomic bool stat_no; /* cachestat is refused */
	_Atomic bool nowait_no;
	_Atomic bool dontcache_no;
	/* How each 2 MiB was when we came, set at its first read. NULL: not remembered. */
	unsigned char *extent_state;
	uint32_t *extent_cold; /* bit i: the i-th 64 KiB had no page cached */
	size_t extent_count;
	/* under the storage's lock */
	uint64_t seen[4]; /* extents by TND__CACHE_* */
	uint64_t uring_bytes, thread_bytes, storage_bytes, dropped_bytes;
	char fallback[192];
};

struct tnd__storage {
	struct tnd__storage_opts opts; /* defaults filled in */
	_Atomic bool cancelled;
	_Atomic bool uring_ok;
	struct tnd__uring *uring; /* NULL: no ring */
	char uring_reason[96];    /* why there is none, or "" */
	unsigned char cpu_bits[TND__CPU_BITS / 8];
	char cpus[64], numa[32];

	pthread_mutex_t lock;
	pthread_cond_t work;     /* workers: something queued, or stop */
	pthread_cond_t room;     /* submit, close: fewer reads in flight */
	struct tnd__queue tasks; /* for workers */
	struct tnd__queue waits; /* for resources */
	uint32_t inflight, window_used;
	bool stop;
	void **bounces; /* free ones, bounce_idle of them */
	uint32_t bounce_idle, bounce_made;
	uint64_t bounce_bytes, bounce_allocated;
	uint64_t storage_bytes, read_ns, scatter_ns;

	pthread_t threads[TND__THREAD_MAX];
	uint32_t thread_count;
};

/* Where a direct read goes: the rounded range of the file, and the memory for its first byte. */
struct tnd__span {
	uint64_t low, high;
	unsigned char *base;
};

/* -- transfer.c -- */
void tnd__transfer_route(struct tnd__read *read);
/* To the engine, resources in hand. */
void tnd__transfer_dispatch(struct tnd__read *read);
void tnd__transfer_run(struct tnd__read *read); /* a worker's step */
void tnd__transfer_finish(struct tnd__read *read, int status, uint64_t fail_offset);
/*
 * What a direct read's bytes, or its refusal, lead to. `ring`: it came through the ring. Return:
 * true: read on directly.
 */
bool tnd__transfer_direct_result(struct tnd__read *read, int64_t result, bool ring);
struct tnd__span tnd__transfer_span(const struct tnd__read *read);
bool tnd__transfer_cancelled(const struct tnd__read *read);
static inline void tnd__step_set(struct tnd__read *read, uint32_t step)
{
	read->state = (read->state & ~TND__STEP_MASK) | step;
}

/* -- storage.c -- */
void tnd__queue_push(struct tnd__queue *queue, struct tnd__read *read);
struct tnd__read *tnd__queue_pop(struct tnd__queue *queue);
/* Gives the read to the workers; `first`: before the others. */
void tnd__worker_queue(struct tnd__storage *storage, struct tnd__read *read, bool first);
/* tnd__thread_create(), with a failpoint; the thread calls tnd__thread_settle(). Return: 0, -errno. */
int tnd__thread_start(void *(*run)(void *), void *arg, pthread_t *ret_thread);

/* -- bounce.c: bounce buffers and the window -- */
/* Takes what read->state asks for, or puts it on the wait list. Return: 1; 0: waits; -ENOMEM. */
int tnd__resources_take(struct tnd__read *read);
void tnd__resources_give(struct tnd__read *read);
void tnd__bounces_free(struct tnd__storage *storage);

/* -- source.c -- */
void tnd__source_note(struct tnd__source *source, const char *what, int error);
void tnd__source_retire_direct(struct tnd__source *source, const char *what, int error);
void tnd__source_retire_uring(struct tnd__source *source, const char *what, int error);

/* -- extent.c -- */
/* Sets COLD, WARM, MIXED and PROBED in read->state. By the submitting thread. */
void tnd__extent_classify(struct tnd__read *read);
/* Drops what a buffered read brought in of extents found cold. Return: bytes. */
uint64_t tnd__extent_drop(struct tnd__read *read);
void tnd__extent_drop_probe(struct tnd__read *read);

/* -- uring.c -- */
/* Return: 0; -errno, and why in storage->uring_reason. */
int tnd__uring_open(struct tnd__storage *storage);
void tnd__uring_queue(struct tnd__storage *storage, struct tnd__read *read);
void tnd__uring_close(struct tnd__storage *storage);

/* -- cpus.c, quota.c -- */
/* The whole cpuset. `bits`: room for TND__CPU_BITS. Return: count. */
int tnd__cpus_allowed(unsigned char *bits);
void tnd__cpus_text(const unsigned char *bits, char *out, size_t out_bytes);
int tnd__cpus_choose(const char *list, int32_t numa, unsigned char *bits);
/* Processors that the cgroups' quota allows, rounded up; 0: no limit. `root`: "", or a test's. */
uint32_t tnd__cpu_quota(const char *root);

#endif
