/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bridge_window.c - listening side: the objects that are borrowed from the channel
 *
 *      base               top
 *   released |  borrowed  | not yet read
 *            `--- sent, some acknowledged: the loop
 *
 * A thread borrows as far as the channel lets it: what it has not borrowed is held in the channel
 * all the same. The loop releases from the oldest on, once every receiver has acknowledged.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#include "bridge_internal.h"

#define CAPACITY_MAX 16384

int tnd__window_init(struct tnd__window *window, struct tnd_channel *channel, int event_fd)
{
	struct tnd_channel_info info = {.struct_bytes = sizeof(info)};
	int rc = tnd_channel_info(channel, &info);

	if (rc < 0)
		return rc;
	window->channel = channel;
	window->event_fd = event_fd;
	window->capacity = 1;
	while (window->capacity < info.max_objects && window->capacity < CAPACITY_MAX)
		window->capacity *= 2;
	window->held = calloc(window->capacity, sizeof(*window->held));
	if (!window->held)
		return -ENOMEM;
	pthread_mutex_init(&window->lock, NULL);
	pthread_cond_init(&window->space, NULL);
	return 0;
}

/* Under lock. One word to the loop until it has looked. */
static void tell(struct tnd__window *window)
{
	if (!window->told)
		(void)eventfd_write(window->event_fd, 1);
	window->told = true;
}

/* Until the window has room. Return: whether to go on. */
static bool wait_for_room(struct tnd__window *window)
{
	bool stop;

	pthread_mutex_lock(&window->lock);
	while (!window->stop && window->top - window->base == window->capacity)
		pthread_cond_wait(&window->space, &window->lock);
	stop = window->stop;
	pthread_mutex_unlock(&window->lock);
	return !stop;
}

static void *borrow_objects(void *arg)
{
	struct tnd__window *window = arg;
	struct tnd_error why = {0};
	int rc = 0;

	while (wait_for_room(window)) {
		struct tnd_object object;

		/* Where all that the ring has is borrowed, it waits for our releases. */
		rc = tnd_channel_borrow(window->channel, TND_NO_DEADLINE, &object, &why);
		pthread_mutex_lock(&window->lock);
		if (rc == 0) {
			window->held[window->top & (window->capacity - 1)] = object;
			window->top++;
		} else {
			window->end = rc;
			window->why = why;
		}
		tell(window);
		pthread_mutex_unlock(&window->lock);
		if (rc < 0)
			break;
	}
	return NULL;
}

int tnd__window_start(struct tnd__window *window)
{
	int rc = tnd__bridge_thread(borrow_objects, window, &window->thread);

	window->started = rc == 0;
	return rc;
}

void tnd__window_fini(struct tnd__window *window)
{
	if (!window->held)
		return;
	if (window->started) {
		pthread_mutex_lock(&window->lock);
		window->stop = true;
		pthread_cond_signal(&window->space);
		pthread_mutex_unlock(&window->lock);
		tnd_channel_cancel(window->channel);
		pthread_join(window->thread, NULL);
	}
	pthread_cond_destroy(&window->space);
	pthread_mutex_destroy(&window->lock);
	free(window->held);
}

int tnd__window_news(struct tnd__window *window, uint64_t *ret_top)
{
	int end;

	pthread_mutex_lock(&window->lock);
	window->told = false;
	*ret_top = window->top;
	end = window->end;
	pthread_mutex_unlock(&window->lock);
	return end;
}

const struct tnd_object *tnd__window_at(struct tnd__window *window, uint64_t number)
{
	return &window->held[number & (window->capacity - 1)];
}

int tnd__window_release(struct tnd__window *window, uint64_t number)
{
	uint64_t base = window->base; /* nobody else writes it */
	int rc = 0;

	for (; base != number; base++) {
		int freed = tnd_channel_release(window->channel, tnd__window_at(window, base));

		rc = rc < 0 ? rc : freed;
	}
	if (base == window->base)
		return rc;
	pthread_mutex_lock(&window->lock);
	window->base = base;
	pthread_cond_signal(&window->space);
	pthread_mutex_unlock(&window->lock);
	return rc;
}
