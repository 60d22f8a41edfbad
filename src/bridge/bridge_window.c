/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bridge_window.c - listening side: the objects that are borrowed from the channel
 *
 *      base               top
 *   released |  borrowed  | not yet read
 *            `--- sent, some acknowledged: the loop
 *
 * A thread borrows as far as the channel lets it: what it has not borrowed is held in the channel
 * all the same. The loop releases from the oldest on, once every receiver has acknowledged and no
 * message of ZeroMQ points into the object any more: a connection that broke may keep one for a
 * while after its receiver came back on another.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#include "bridge_internal.h"

#define CAPACITY_MAX 16384
#define IN_PLACE_BYTES 8192 /* below, a copy costs less than a message that points */

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
	for (uint64_t i = 0; i < window->capacity; i++)
		window->held[i].window = window;
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
			window->held[window->top & (window->capacity - 1)].object = object;
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

struct tnd__held *tnd__window_at(struct tnd__window *window, uint64_t number)
{
	return &window->held[number & (window->capacity - 1)];
}

/*
 * B1: says that the loop waits before it looks again; pairs with B2 in message_gone(): either the
 * loop sees the message gone, or the thread of ZeroMQ sees that the loop waits.
 */
static bool is_free(struct tnd__window *window, struct tnd__held *held)
{
	if (atomic_load_explicit(&held->messages, memory_order_acquire) == 0)
		return true;
	atomic_store_explicit(&window->blocked, 1, memory_order_seq_cst);
	return atomic_load_explicit(&held->messages, memory_order_seq_cst) == 0;
}

int tnd__window_release(struct tnd__window *window, uint64_t number)
{
	uint64_t base = window->base; /* nobody else writes it */
	int rc = 0;

	atomic_store_explicit(&window->blocked, 0, memory_order_relaxed);
	while (base != number && is_free(window, tnd__window_at(window, base))) {
		int freed =
			tnd_channel_release(window->channel, &tnd__window_at(window, base)->object);

		rc = rc < 0 ? rc : freed;
		base++;
	}
	if (base == window->base)
		return rc;
	pthread_mutex_lock(&window->lock);
	window->base = base;
	pthread_cond_signal(&window->space);
	pthread_mutex_unlock(&window->lock);
	return rc;
}

/* On a thread of ZeroMQ. */
static void message_gone(void *data, void *hint)
{
	struct tnd__held *held = hint;
	struct tnd__window *window = held->window;

	(void)data;
	/* B2: the bytes are read before this; pairs with B1. */
	if (atomic_fetch_sub_explicit(&held->messages, 1, memory_order_seq_cst) == 1 &&
	    atomic_load_explicit(&window->blocked, memory_order_seq_cst))
		(void)eventfd_write(window->event_fd, 1);
}

int tnd__window_send(struct tnd__window *window, uint64_t number, void *socket)
{
	struct tnd__held *held = tnd__window_at(window, number);
	/* ZeroMQ does not write to a message that it sends. */
	void *data = (void *)(uintptr_t)held->object.data;
	zmq_msg_t message;

	if (held->object.bytes < IN_PLACE_BYTES)
		return tnd__bridge_send_frame(socket, data, held->object.bytes, false);
	atomic_fetch_add_explicit(&held->messages, 1, memory_order_relaxed);
	if (zmq_msg_init_data(&message, data, held->object.bytes, message_gone, held) < 0) {
		atomic_fetch_sub_explicit(&held->messages, 1, memory_order_relaxed);
		return -ENOMEM;
	}
	if (zmq_msg_send(&message, socket, ZMQ_DONTWAIT) < 0) {
		int rc = tnd__bridge_errno();

		zmq_msg_close(&message);
		return rc;
	}
	return 0;
}
