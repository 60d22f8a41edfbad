/* SPDX-License-Identifier: Apache-2.0 */
/*
 * touch.c - memory that leaves with a tensor is touched while its bytes are still being read
 *
 *   feeder: memory of a tensor --> queue --> touchers: 2 MiB at a time --> consumer copies into it
 *
 * A page that is touched for the first time is zeroed, and on a virtual machine the host first has
 * to give it: one thread does 0.4 to 1 GB/s, less than a disk. Several do more, and the consumer,
 * who would be next to do it, is the one thread that the load waits for. Touching is a hint: what
 * it has not reached the copy touches, contents are not changed, and memory that was given back
 * meanwhile is skipped by the kernel.
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
	pthread_mutex_t lock;
	pthread_cond_t more;
	struct block
		*blocks; /* a stack would touch the newest first; the consumer wants the oldest */
	size_t first, count, capacity;
	bool stop;
	uint32_t thread_count;
	pthread_t threads[THREADS_MAX];
};

/* The next 2 MiB. Return: false: told to stop. */
static bool take(struct tnd__toucher *toucher, struct block *ret_block)
{
	struct block *block;

	pthread_mutex_lock(&toucher->lock);
	while (toucher->first == toucher->count && !toucher->stop)
		pthread_cond_wait(&toucher->more, &toucher->lock);
	if (toucher->stop) {
		pthread_mutex_unlock(&toucher->lock);
		return false;
	}
	block = &toucher->blocks[toucher->first];
	*ret_block = (struct block){block->at, TND__MIN(block->bytes, TND__HUGE)};
	block->at += ret_block->bytes;
	block->bytes -= ret_block->bytes;
	if (!block->bytes && ++toucher->first == toucher->count)
		toucher->first = toucher->count = 0;
	pthread_mutex_unlock(&toucher->lock);
	return true;
}

static void *touch(void *arg)
{
	struct tnd__toucher *toucher = arg;
	struct block block;

	pthread_setname_np(pthread_self(), "tnd-touch");
	while (take(toucher, &block))
		madvise(block.at, block.bytes, MADV_POPULATE_WRITE);
	return NULL;
}

struct tnd__toucher *tnd__toucher_create(void)
{
	struct tnd__toucher *toucher = calloc(1, sizeof(*toucher));
	uint32_t want = TND__MIN(tnd__io_thread_default(), THREADS_MAX);

	if (!toucher)
		return NULL;
	pthread_mutex_init(&toucher->lock, NULL);
	pthread_cond_init(&toucher->more, NULL);
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
	pthread_cond_destroy(&toucher->more);
	pthread_mutex_destroy(&toucher->lock);
	free(toucher->blocks);
	free(toucher);
}
