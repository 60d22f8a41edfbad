/* SPDX-License-Identifier: Apache-2.0 */
/*
 * touch.c - memory that leaves with a tensor is touched while its bytes are still being read
 *
 *   feeder: memory of a tensor --> queue --> touchers: 2 MiB at a time --> consumer copies into it
 *
 * A page that is touched for the first time is zeroed, and on a virtual machine the host first has
 * to give it: one thread does 0.4 to 1 GB/s, less than a disk. Several do more, and the consumer,
 * who would be next to do it, is the one thread that the load waits for. Touching is a hint: what
 * it has not reached the copy touches, and contents are not changed. Before memory can go, its
 * owner has it forgotten here: an address may be somebody else's mapping the moment after.
 */
#include <stdlib.h>
#include <sys/mman.h>

#include "load_internal.h"

#define TOUCH_LEAST TND__MIB(1)
#define THREADS_MAX 4

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; refused before, and nothing is lost */
#endif

struct block {
	unsigned char *at;
	uint64_t bytes;
};

struct tnd__toucher {
	const struct tnd__storage *storage; /* whose processors are ours */
	pthread_mutex_t lock;
	pthread_cond_t more;
	struct block
		*blocks; /* a stack would touch the newest first; the consumer wants the oldest */
	size_t first, count, capacity;
	pthread_cond_t done;
	struct block busy[THREADS_MAX]; /* what each thread touches now */
	bool stop;
	uint32_t thread_count, named;
	pthread_t threads[THREADS_MAX];
};

static void drop_finished(struct tnd__toucher *toucher)
{
	while (toucher->first < toucher->count && !toucher->blocks[toucher->first].bytes)
		toucher->first++;
	if (toucher->first == toucher->count)
		toucher->first = toucher->count = 0;
}

/* The next 2 MiB, for the thread that `busy` belongs to. Return: false: told to stop. */
static bool take(struct tnd__toucher *toucher, struct block *busy)
{
	struct block *block;
	bool stop;

	pthread_mutex_lock(&toucher->lock);
	busy->bytes = 0;
	pthread_cond_broadcast(&toucher->done);
	while (toucher->first == toucher->count && !toucher->stop)
		pthread_cond_wait(&toucher->more, &toucher->lock);
	stop = toucher->stop;
	if (!stop) {
		block = &toucher->blocks[toucher->first];
		*busy = (struct block){block->at, TND__MIN(block->bytes, TND__HUGE)};
		block->at += busy->bytes;
		block->bytes -= busy->bytes;
		drop_finished(toucher);
	}
	pthread_mutex_unlock(&toucher->lock);
	return !stop;
}

static void *touch(void *arg)
{
	struct tnd__toucher *toucher = arg;
	struct block *busy;

	tnd__thread_settle(toucher->storage, "tnd-touch");
	pthread_mutex_lock(&toucher->lock);
	busy = &toucher->busy[toucher->named++];
	pthread_mutex_unlock(&toucher->lock);
	while (take(toucher, busy))
		madvise(busy->at, busy->bytes, MADV_POPULATE_WRITE);
	return NULL;
}

struct tnd__toucher *tnd__toucher_create(const struct tnd__storage *storage)
{
	struct tnd__toucher *toucher = calloc(1, sizeof(*toucher));
	uint32_t want = TND__MIN(tnd__io_thread_default(), THREADS_MAX);

	if (!toucher)
		return NULL;
	toucher->storage = storage;
	pthread_mutex_init(&toucher->lock, NULL);
	pthread_cond_init(&toucher->more, NULL);
	pthread_cond_init(&toucher->done, NULL);
	while (toucher->thread_count < want &&
	       tnd__thread_create(touch, toucher, &toucher->threads[toucher->thread_count]) == 0)
		toucher->thread_count++;
	return toucher;
}

void tnd__toucher_add(struct tnd__toucher *toucher, void *memory, uint64_t bytes)
{
	if (bytes < TOUCH_LEAST || !toucher->thread_count)
		return;
	pthread_mutex_lock(&toucher->lock);
	if (tnd__reserve(&toucher->blocks, &toucher->capacity, toucher->count + 1,
			 sizeof(*toucher->blocks)) == 0) {
		toucher->blocks[toucher->count++] =
			(struct block){memory, tnd__round_up(bytes, TND__PAGE)};
		pthread_cond_broadcast(&toucher->more);
	}
	pthread_mutex_unlock(&toucher->lock);
}

static bool within(const struct block *block, const unsigned char *begin, const unsigned char *end)
{
	return block->bytes && block->at >= begin && block->at < end;
}

void tnd__toucher_forget(struct tnd__toucher *toucher, const void *memory, uint64_t bytes)
{
	const unsigned char *begin = memory, *end = begin + bytes;

	if (!toucher || bytes < TOUCH_LEAST)
		return;
	pthread_mutex_lock(&toucher->lock);
	for (size_t i = toucher->first; i < toucher->count; i++)
		if (within(&toucher->blocks[i], begin, end))
			toucher->blocks[i].bytes = 0;
	drop_finished(toucher);
	for (uint32_t i = 0; i < toucher->thread_count; i++)
		while (within(&toucher->busy[i], begin, end))
			pthread_cond_wait(&toucher->done, &toucher->lock);
	pthread_mutex_unlock(&toucher->lock);
}

void tnd__toucher_close(struct tnd__toucher *toucher)
{
	if (!toucher)
		return;
	pthread_mutex_lock(&toucher->lock);
	toucher->stop = true;
	pthread_cond_broadcast(&toucher->more);
	pthread_mutex_unlock(&toucher->lock);
	for (uint32_t i = 0; i < toucher->thread_count; i++)
		pthread_join(toucher->threads[i], NULL);
	pthread_cond_destroy(&toucher->done);
	pthread_cond_destroy(&toucher->more);
	pthread_mutex_destroy(&toucher->lock);
	free(toucher->blocks);
	free(toucher);
}
