/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bounce.c - what a read may have to wait for: a bounce buffer, a place in the window
 *
 * The window bounds how much page cache buffered reads of cold extents bring in at a time. Both are
 * taken together or not at all. Giving something back moves every waiter that can now go on to its
 * engine.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <tundish/slab.h>

#include "storage/engine.h"

#define MBIND_BIND 2
#define MBIND_INTERLEAVE 3
#define NODE_MAX 64

/* A refused policy costs locality only. */
static void place(const struct tnd__storage *storage, void *memory, uint64_t bytes)
{
	unsigned char bits[NODE_MAX / 8] = {0};
	unsigned long nodes = 0;
	char text[256];
	int mode = MBIND_BIND;

	if (storage->opts.numa == TND_NUMA_INTERLEAVE) {
		mode = MBIND_INTERLEAVE;
		if (tnd__read_small("/sys/devices/system/node/has_memory", text, sizeof(text)) <
			    0 ||
		    tnd__list_parse(text, bits, NODE_MAX) < 0)
			return;
		for (unsigned i = 0; i < NODE_MAX; i++)
			if (bits[i / 8] >> (i % 8) & 1)
				nodes |= 1ul << i;
	} else if (storage->opts.numa >= 0 && storage->opts.numa < NODE_MAX) {
		nodes = 1ul << storage->opts.numa;
	}
	if (nodes)
		syscall(SYS_mbind, memory, bytes, mode, &nodes, NODE_MAX + 1, 0);
}

/* 2 MiB aligned from 2 MiB up: contiguous memory is what makes a direct read fast. */
static void *bounce_map(const struct tnd__storage *storage)
{
	uint64_t bytes = storage->bounce_bytes;
	uint64_t align = storage->opts.chunk_bytes >= TND__HUGE ? TND__HUGE : TND__PAGE;
	unsigned char *map, *start;

	if (tnd__failpoint("storage.alloc") < 0)
		return NULL;
	map = mmap(NULL, bytes + align, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (map == MAP_FAILED)
		return NULL;
	start = map + (tnd__round_up((uintptr_t)map, align) - (uintptr_t)map);
	if (start > map)
		munmap(map, (size_t)(start - map));
	munmap(start + bytes, (size_t)(map + align - start));
	if (align == TND__HUGE)
		madvise(start, bytes, MADV_HUGEPAGE);
	place(storage, start, bytes);
	return start;
}

static void *bounce_take(struct tnd__storage *storage)
{
	void *bounce;

	if (storage->bounce_idle)
		return storage->bounces[--storage->bounce_idle];
	if (storage->bounce_made == storage->opts.bounce_count)
		return NULL;
	bounce = bounce_map(storage);
	if (bounce) {
		storage->bounce_made++;
		storage->bounce_allocated += storage->bounce_bytes;
	}
	return bounce;
}

static bool take(struct tnd__storage *storage, struct tnd__read *read)
{
	bool window = read->state & TND__READ_WINDOW;

	if (window && storage->window_used == storage->opts.window_count)
		return false;
	if (read->state & TND__READ_BOUNCE) {
		read->bounce = bounce_take(storage);
		if (!read->bounce)
			return false;
	}
	storage->window_used += window;
	read->state |= TND__READ_HOLDS;
	return true;
}

int tnd__resources_take(struct tnd__read *read)
{
	struct tnd__storage *storage = read->source->storage;
	int rc = 1;

	if (!(read->state & (TND__READ_BOUNCE | TND__READ_WINDOW)))
		return 1;
	pthread_mutex_lock(&storage->lock);
	if (!take(storage, read)) {
		/* With no buffer anywhere nobody would ever give one back. */
		if (read->state & TND__READ_BOUNCE && storage->bounce_made == 0 &&
		    storage->window_used < storage->opts.window_count) {
			rc = -ENOMEM;
		} else {
			tnd__queue_push(&storage->waits, read);
			rc = 0;
		}
	}
	pthread_mutex_unlock(&storage->lock);
	return rc;
}

/* Waiters that can go on now, in order. */
static struct tnd__queue ready_waiters(struct tnd__storage *storage)
{
	struct tnd__queue ready = {0}, still = {0};
	struct tnd__read *read;

	while ((read = tnd__queue_pop(&storage->waits))) {
		bool window_free = !(read->state & TND__READ_WINDOW) ||
				   storage->window_used < storage->opts.window_count;

		if (take(storage, read)) {
			tnd__queue_push(&ready, read);
		} else if (storage->bounce_made == 0 && window_free) {
			tnd__step_set(read, TND__STEP_NOMEM);
			tnd__queue_push(&ready, read);
		} else {
			tnd__queue_push(&still, read);
		}
	}
	storage->waits = still;
	return ready;
}

void tnd__resources_give(struct tnd__read *read)
{
	struct tnd__storage *storage = read->source->storage;
	struct tnd__queue ready;

	if (!(read->state & TND__READ_HOLDS))
		return;
	pthread_mutex_lock(&storage->lock);
	if (read->bounce)
		storage->bounces[storage->bounce_idle++] = read->bounce;
	if (read->state & TND__READ_WINDOW)
		storage->window_used--;
	read->bounce = NULL;
	read->state &= ~(TND__READ_HOLDS | TND__READ_BOUNCE | TND__READ_WINDOW);
	ready = ready_waiters(storage);
	pthread_mutex_unlock(&storage->lock);
	while ((read = tnd__queue_pop(&ready)))
		tnd__transfer_dispatch(read);
}

void tnd__bounces_free(struct tnd__storage *storage)
{
	while (storage->bounce_idle)
		munmap(storage->bounces[--storage->bounce_idle], storage->bounce_bytes);
	free(storage->bounces);
}
