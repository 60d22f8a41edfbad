/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flow.c - what a load shares with the views that outlive it: a lock, who holds what, and the
 * release of a view
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "load_internal.h"

struct tnd__flow *tnd__flow_create(void)
{
	struct tnd__flow *flow = calloc(1, sizeof(*flow));
	pthread_condattr_t attr;

	if (!flow)
		return NULL;
	pthread_mutex_init(&flow->lock, NULL);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&flow->consumer, &attr);
	pthread_cond_init(&flow->feeder, &attr);
	pthread_condattr_destroy(&attr);
	atomic_init(&flow->refs, 1);
	flow->progress_ns = tnd__now_ns();
	return flow;
}

void tnd__flow_ref(struct tnd__flow *flow)
{
	/* Relaxed, no partner: who takes a reference has one already. */
	atomic_fetch_add_explicit(&flow->refs, 1, memory_order_relaxed);
}

void tnd__flow_unref(struct tnd__flow *flow)
{
	/* F1: pairs with itself. */
	if (!flow || atomic_fetch_sub_explicit(&flow->refs, 1, memory_order_acq_rel) != 1)
		return;
	pthread_cond_destroy(&flow->feeder);
	pthread_cond_destroy(&flow->consumer);
	pthread_mutex_destroy(&flow->lock);
	free(flow);
}

void tnd__flow_wait(struct tnd__flow *flow, pthread_cond_t *cond, int64_t ns)
{
	struct timespec until;

	tnd__ns_to_timespec(tnd__now_ns() + ns, &until);
	pthread_cond_timedwait(cond, &flow->lock, &until);
}

void tnd__buffer_free(struct tnd__buffer *buffer)
{
	struct tnd__flow *flow = buffer->flow;

	free(buffer);
	tnd__flow_unref(flow);
}

void tnd__buffer_finish(struct tnd__buffer *buffer)
{
	struct tnd__flow *flow = buffer->flow;
	bool last;

	tnd_slab_release(buffer->slab);
	pthread_mutex_lock(&flow->lock);
	buffer->slab = NULL;
	last = buffer->views == 0;
	flow->progress_ns = tnd__now_ns();
	pthread_cond_signal(&flow->feeder);
	pthread_mutex_unlock(&flow->lock);
	if (last)
		tnd__buffer_free(buffer);
}

/* One view of the buffer less. Return: whether it was the last user. Lock held. */
static bool buffer_drop_view(struct tnd__buffer *buffer)
{
	struct tnd__flow *flow = buffer->flow;

	if (--buffer->views)
		return false;
	flow->held_bytes -= buffer->charge_bytes;
	return buffer->slab == NULL;
}

void tnd_view_release(struct tnd_view *view)
{
	struct tnd__hold *hold = view ? view->hold : NULL;
	struct tnd__flow *flow;
	bool last = false;

	if (!hold) {
		if (view)
			memset(view, 0, sizeof(*view));
		return;
	}
	flow = hold->flow;
	if (hold->link) {
		pthread_mutex_lock(&flow->lock);
		*hold->link = hold->next;
		if (hold->next)
			hold->next->link = hold->link;
		pthread_mutex_unlock(&flow->lock);
	}
	tnd_lease_release(hold->lease);
	if (hold->own) {
		tnd_own_free(hold->own, hold->own_map_bytes);
		atomic_fetch_sub_explicit(&flow->consumer_bytes, (int64_t)hold->own_bytes,
					  memory_order_relaxed);
	}
	if (hold->buffer || hold->staged_bytes) {
		pthread_mutex_lock(&flow->lock);
		last = hold->buffer && buffer_drop_view(hold->buffer);
		flow->held_bytes -= hold->staged_bytes;
		flow->held_views--;
		pthread_cond_signal(&flow->feeder);
		flow->progress_ns = tnd__now_ns();
		pthread_mutex_unlock(&flow->lock);
	}
	if (last)
		tnd__buffer_free(hold->buffer);
	free(hold);
	tnd__flow_unref(flow);
	memset(view, 0, sizeof(*view));
}

int tnd_view_take(struct tnd_view *view, void **ret_memory, uint64_t *ret_map_bytes)
{
	struct tnd__hold *hold = view ? view->hold : NULL;

	if (!hold || !hold->own)
		return TND_E_INVALID;
	*ret_memory = hold->own;
	*ret_map_bytes = hold->own_map_bytes;
	hold->own = NULL;
	return 0;
}
