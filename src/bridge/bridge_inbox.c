/* SPDX-License-Identifier: Apache-2.0 */
/* bridge_inbox.c - connecting side: objects on their way into the channel */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#include "bridge_internal.h"

int tnd__inbox_init(struct tnd__inbox *inbox, struct tnd_channel *channel, int event_fd,
		    uint64_t objects)
{
	inbox->channel = channel;
	inbox->event_fd = event_fd;
	inbox->capacity = 1;
	while (inbox->capacity < objects)
		inbox->capacity *= 2;
	inbox->messages = calloc(inbox->capacity, sizeof(*inbox->messages));
	if (!inbox->messages)
		return -ENOMEM;
	pthread_mutex_init(&inbox->lock, NULL);
	pthread_cond_init(&inbox->news, NULL);
	return 0;
}

/* Under lock. One word to the loop until it has looked. */
static void tell(struct tnd__inbox *inbox)
{
	if (!inbox->told)
		(void)eventfd_write(inbox->event_fd, 1);
	inbox->told = true;
}

/* Under lock. */
static void fail(struct tnd__inbox *inbox, int code, const struct tnd_error *why)
{
	inbox->failed = code;
	inbox->why = *why;
	tell(inbox);
}

/* Return: whether there is an object. */
static bool wait_for_object(struct tnd__inbox *inbox, zmq_msg_t **ret_message)
{
	bool any;

	pthread_mutex_lock(&inbox->lock);
	while (!inbox->stop && !inbox->ending && inbox->written == inbox->top)
		pthread_cond_wait(&inbox->news, &inbox->lock);
	any = !inbox->stop && inbox->written != inbox->top;
	*ret_message = &inbox->messages[inbox->written & (inbox->capacity - 1)];
	pthread_mutex_unlock(&inbox->lock);
	return any;
}

static int write_object(struct tnd__inbox *inbox, zmq_msg_t *message)
{
	size_t bytes;
	const unsigned char *body = tnd__bridge_body(message, &bytes);
	struct tnd_error why = {0};
	int rc = tnd_channel_send(inbox->channel, body, bytes, TND_NO_DEADLINE, &why);

	if (rc == 0) {
		zmq_msg_close(message);
		zmq_msg_init(message);
	}
	pthread_mutex_lock(&inbox->lock);
	if (rc == 0) {
		inbox->written++;
		inbox->written_bytes += bytes;
		tell(inbox);
	} else {
		fail(inbox, rc, &why);
	}
	pthread_mutex_unlock(&inbox->lock);
	return rc;
}

/* The readers have what they are due before the channel closes, late reserved ones included. */
static void drain(struct tnd__inbox *inbox)
{
	struct tnd_error why = {0};
	int rc = tnd_channel_drain(inbox->channel, TND_NO_DEADLINE, &why);

	pthread_mutex_lock(&inbox->lock);
	inbox->drained = rc == 0;
	if (rc < 0)
		fail(inbox, rc, &why);
	tell(inbox);
	pthread_mutex_unlock(&inbox->lock);
}

static void *write_objects(void *arg)
{
	struct tnd__inbox *inbox = arg;
	zmq_msg_t *message;
	bool ending;

	while (wait_for_object(inbox, &message))
		if (write_object(inbox, message) < 0)
			return NULL;
	pthread_mutex_lock(&inbox->lock);
	ending = inbox->ending && !inbox->stop;
	pthread_mutex_unlock(&inbox->lock);
	if (ending)
		drain(inbox);
	return NULL;
}

int tnd__inbox_start(struct tnd__inbox *inbox, uint64_t first)
{
	int rc;

	inbox->first = inbox->top = inbox->written = first;
	for (uint64_t i = 0; i < inbox->capacity; i++)
		zmq_msg_init(&inbox->messages[i]);
	rc = tnd__bridge_thread(write_objects, inbox, &inbox->thread);
	inbox->started = rc == 0;
	return rc;
}

void tnd__inbox_fini(struct tnd__inbox *inbox)
{
	if (!inbox->messages)
		return;
	if (inbox->started) {
		pthread_mutex_lock(&inbox->lock);
		inbox->stop = true;
		pthread_cond_signal(&inbox->news);
		pthread_mutex_unlock(&inbox->lock);
		tnd_channel_cancel(inbox->channel);
		pthread_join(inbox->thread, NULL);
		for (uint64_t i = 0; i < inbox->capacity; i++)
			zmq_msg_close(&inbox->messages[i]);
	}
	pthread_cond_destroy(&inbox->news);
	pthread_mutex_destroy(&inbox->lock);
	free(inbox->messages);
}

void tnd__inbox_put(struct tnd__inbox *inbox, zmq_msg_t *message)
{
	size_t bytes;

	(void)tnd__bridge_body(message, &bytes);
	pthread_mutex_lock(&inbox->lock);
	inbox->top_bytes += bytes;
	zmq_msg_move(&inbox->messages[inbox->top & (inbox->capacity - 1)], message);
	inbox->top++;
	pthread_cond_signal(&inbox->news);
	pthread_mutex_unlock(&inbox->lock);
}

void tnd__inbox_end(struct tnd__inbox *inbox)
{
	pthread_mutex_lock(&inbox->lock);
	inbox->ending = true;
	pthread_cond_signal(&inbox->news);
	pthread_mutex_unlock(&inbox->lock);
}

void tnd__inbox_state(struct tnd__inbox *inbox, struct tnd__inbox_state *ret_state)
{
	pthread_mutex_lock(&inbox->lock);
	inbox->told = false;
	*ret_state = (struct tnd__inbox_state){
		.written = inbox->written,
		.written_bytes = inbox->written_bytes,
		.waiting_bytes = inbox->top_bytes - inbox->written_bytes,
		.drained = inbox->drained,
		.failed = inbox->failed,
	};
	pthread_mutex_unlock(&inbox->lock);
}
