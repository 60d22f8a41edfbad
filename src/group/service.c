/* SPDX-License-Identifier: Apache-2.0 */
/*
 * service.c - the service thread: one epoll loop, and who waits for it
 *
 *   caller's threads                      service thread
 *   ----------------                      --------------------------------------------
 *   hold, served_add, watch  ---------->  epoll_wait, until the least due_ns
 *   served_remove: unlink                 find what has the id; none: it is gone
 *                  wait while  <--------  running = served
 *                  it is running            ready() or due(): callbacks, no lock
 *   served_discard: free                  running = NULL, broadcast; free if discarded
 *
 * An event carries an id, never a pointer: one that was freed since epoll_wait
 * returned is not found. Ids are not used twice.
 *
 * The thread ends when neither callers nor what it serves hold it; the last one joins it, unless
 * that is the thread itself. A new hold meanwhile starts another thread.
 *
 * The gate is the lock of `current` and of the counts. It says whose it is: a child that was forked
 * while a thread of its parent held it takes it.
 */
#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "service_internal.h"

#define EVENT_COUNT 16
#define KICK_ID 0 /* nothing served has it */
#define WHICH_BITS 1
/* epoll_wait cannot fail, unless the program closed our descriptor. */
#define BROKEN_NS 50000000
/* So that the thread ends although the program closed what it would be woken by. */
#define LOOK_MS 1000
#define HOLDS_LOOK_NS 50000
#define HOLDS_NS INT64_C(1000000000)

static _Atomic uint64_t gate;        /* forkmark of whose thread is inside, or 0 */
static struct tnd__service *current; /* gate */

/* In the service thread: which one, of which process. */
static _Thread_local const struct tnd__service *own;
static _Thread_local uint64_t own_forkmark;

static bool is_here(const struct tnd__service *service)
{
	return own == service && own_forkmark == tnd__forkmark();
}

static void gate_enter(uint64_t mark)
{
	for (;;) {
		uint64_t seen = 0;

		/* acquire: pairs with the release in gate_leave(). */
		if (atomic_compare_exchange_strong_explicit(
			    &gate, &seen, mark, memory_order_acquire, memory_order_relaxed))
			return;
		if (seen != mark && atomic_compare_exchange_strong_explicit(&gate, &seen, mark,
									    memory_order_acquire,
									    memory_order_relaxed))
			return;
		sched_yield();
	}
}

static void gate_leave(void)
{
	/* release: pairs with the acquire in gate_enter(). */
	atomic_store_explicit(&gate, 0, memory_order_release);
}

/* -- what is served -- */

bool tnd__served_forked(const struct tnd__served *served)
{
	return served->forkmark != tnd__forkmark();
}

void tnd__served_lock(struct tnd__served *served)
{
	pthread_mutex_lock(&served->service->lock);
}

void tnd__served_unlock(struct tnd__served *served)
{
	pthread_mutex_unlock(&served->service->lock);
}

void tnd__served_link(struct tnd__served *served)
{
	struct tnd__service *service = served->service;

	served->removed = false;
	served->next = service->first;
	served->link = &service->first;
	if (served->next)
		served->next->link = &served->next;
	service->first = served;
}

void tnd__served_unlink(struct tnd__served *served)
{
	served->removed = true;
	if (!served->link)
		return;
	*served->link = served->next;
	if (served->next)
		served->next->link = served->link;
	served->link = NULL;
}

void tnd__served_add(struct tnd__served *served, struct tnd__service *service,
		     const struct tnd__served_ops *ops)
{
	served->ops = ops;
	served->service = service;
	served->forkmark = service->forkmark;
	served->on_behalf = NULL;
	served->due_ns = INT64_MAX;
	served->discard = false;
	pthread_mutex_lock(&service->lock);
	served->id = ++service->last_id;
	tnd__served_link(served);
	pthread_mutex_unlock(&service->lock);
}

static int control(struct tnd__served *served, int operation, int fd, unsigned int which,
		   uint32_t events)
{
	struct epoll_event event = {.events = events, .data.u64 = served->id << WHICH_BITS | which};
	int rc = tnd__failpoint("group.epoll");

	if (rc == 0 && epoll_ctl(served->service->epoll_fd, operation, fd, &event) < 0)
		rc = -errno;
	return rc;
}

int tnd__served_watch(struct tnd__served *served, int fd, unsigned int which, uint32_t events)
{
	return control(served, EPOLL_CTL_ADD, fd, which, events);
}

int tnd__served_rewatch(struct tnd__served *served, int fd, unsigned int which, uint32_t events)
{
	return control(served, EPOLL_CTL_MOD, fd, which, events);
}

void tnd__served_unwatch(struct tnd__served *served, int fd)
{
	epoll_ctl(served->service->epoll_fd, EPOLL_CTL_DEL, fd, NULL);
}

static void kick(struct tnd__service *service)
{
	uint64_t one = 1;
	ssize_t bytes = write(service->kick_fd, &one, sizeof(one));

	/* Full only while it is readable already. */
	(void)bytes;
}

void tnd__served_set_due(struct tnd__served *served, int64_t due_ns)
{
	bool earlier = due_ns < served->due_ns;

	served->due_ns = due_ns;
	if (earlier && !is_here(served->service))
		kick(served->service);
}

static bool is_busy(const struct tnd__served *served)
{
	const struct tnd__service *service = served->service;

	return service->running == served || service->running_for == served;
}

void tnd__served_remove(struct tnd__served *served)
{
	struct tnd__service *service = served->service;

	tnd__served_unlink(served);
	if (is_here(service))
		return;
	while (is_busy(served))
		pthread_cond_wait(&service->returned, &service->lock);
}

static void free_served(struct tnd__served *served)
{
	struct tnd__service *service = served->service;

	served->ops->free(served);
	tnd__service_put(service);
}

void tnd__served_discard(struct tnd__served *served)
{
	struct tnd__service *service = served->service;
	bool later;

	pthread_mutex_lock(&service->lock);
	later = service->running == served;
	served->discard = later;
	pthread_mutex_unlock(&service->lock);
	if (!later)
		free_served(served);
}

/* -- the thread -- */

/* Begins and ends with the lock held. `events`: 0 for due(). */
static void call(struct tnd__service *service, struct tnd__served *served, unsigned int which,
		 uint32_t events)
{
	service->running = served;
	service->running_for = served->on_behalf;
	pthread_mutex_unlock(&service->lock);
	if (events)
		served->ops->ready(served, which, events);
	else
		served->ops->due(served, tnd__now_ns());
	pthread_mutex_lock(&service->lock);
	/* Who waits gives its hold back after us: the thread does not end itself for that. */
	if (served->discard) {
		pthread_mutex_unlock(&service->lock);
		free_served(served);
		pthread_mutex_lock(&service->lock);
	}
	service->running = service->running_for = NULL;
	pthread_cond_broadcast(&service->returned);
}

static void dispatch(struct tnd__service *service, const struct epoll_event *event)
{
	uint64_t id = event->data.u64 >> WHICH_BITS, count;
	unsigned int which = event->data.u64 & ((1u << WHICH_BITS) - 1);

	if (id == KICK_ID) {
		ssize_t bytes = read(service->kick_fd, &count, sizeof(count));

		(void)bytes;
		return;
	}
	pthread_mutex_lock(&service->lock);
	for (struct tnd__served *served = service->first; served; served = served->next)
		if (served->id == id) {
			call(service, served, which, event->events);
			break;
		}
	pthread_mutex_unlock(&service->lock);
}

static void run_due(struct tnd__service *service)
{
	int64_t now_ns = tnd__now_ns();
	struct tnd__served *served;

	pthread_mutex_lock(&service->lock);
	for (;;) {
		/* From the beginning: the list may have changed under a callback. */
		for (served = service->first; served && served->due_ns > now_ns;)
			served = served->next;
		if (!served)
			break;
		served->due_ns = INT64_MAX;
		call(service, served, 0, 0);
	}
	pthread_mutex_unlock(&service->lock);
}

/* For epoll_wait: ms. */
static int next_timeout(struct tnd__service *service, bool *ret_stopping)
{
	int64_t due_ns = INT64_MAX, left_ns;

	pthread_mutex_lock(&service->lock);
	for (struct tnd__served *served = service->first; served; served = served->next)
		due_ns = TND__MIN(due_ns, served->due_ns);
	*ret_stopping = service->stopping;
	pthread_mutex_unlock(&service->lock);
	if (due_ns == INT64_MAX)
		return LOOK_MS;
	left_ns = due_ns - tnd__now_ns();
	if (left_ns <= 0)
		return 0;
	return (int)TND__MIN(left_ns / 1000000 + 1, (int64_t)LOOK_MS);
}

static void destroy(struct tnd__service *service)
{
	close(service->epoll_fd);
	close(service->kick_fd);
	pthread_cond_destroy(&service->returned);
	pthread_mutex_destroy(&service->lock);
	free(service);
}

static void *serve(void *arg)
{
	struct tnd__service *service = arg;
	struct epoll_event events[EVENT_COUNT];

	own = service;
	own_forkmark = service->forkmark;
	for (;;) {
		bool stopping;
		int timeout_ms = next_timeout(service, &stopping);
		int count;

		if (stopping)
			break;
		count = epoll_wait(service->epoll_fd, events, EVENT_COUNT, timeout_ms);
		if (count < 0 && errno != EINTR)
			nanosleep(&(struct timespec){.tv_nsec = BROKEN_NS}, NULL);
		for (int i = 0; i < count; i++)
			dispatch(service, &events[i]);
		run_due(service);
	}
	if (service->detached)
		destroy(service);
	return NULL;
}

/* -- its life -- */

static int open_fds(struct tnd__service *service)
{
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = KICK_ID};
	int rc = tnd__failpoint("group.epoll");

	if (rc < 0)
		return rc;
	service->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (service->epoll_fd < 0)
		return -errno;
	service->kick_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (service->kick_fd < 0) {
		rc = -errno;
		close(service->epoll_fd);
		return rc;
	}
	if (epoll_ctl(service->epoll_fd, EPOLL_CTL_ADD, service->kick_fd, &event) == 0)
		return 0;
	rc = -errno;
	close(service->kick_fd);
	close(service->epoll_fd);
	return rc;
}

static int start(uint64_t mark, struct tnd__service **ret_service)
{
	struct tnd__service *service =
		tnd__failpoint("group.alloc") < 0 ? NULL : calloc(1, sizeof(*service));
	int rc;

	if (!service)
		return -ENOMEM;
	service->forkmark = mark;
	rc = open_fds(service);
	if (rc < 0) {
		free(service);
		return rc;
	}
	pthread_mutex_init(&service->lock, NULL);
	pthread_cond_init(&service->returned, NULL);
	rc = tnd__failpoint("group.thread");
	if (rc == 0)
		rc = tnd__thread_create(serve, service, &service->thread);
	if (rc < 0)
		destroy(service);
	else
		*ret_service = service;
	return rc;
}

/* gate. What a forked child got of its parent's service: descriptors and memory, no thread. */
static void drop_inherited(uint64_t mark)
{
	if (!current || current->forkmark == mark)
		return;
	/* Its lock may be held, by a thread that is not here: it is not destroyed. */
	close(current->epoll_fd);
	close(current->kick_fd);
	free(current);
	current = NULL;
}

void tnd__service_forked(void)
{
	uint64_t mark = tnd__forkmark();

	gate_enter(mark);
	drop_inherited(mark);
	gate_leave();
}

static int enter(uint32_t users, uint32_t holds, struct tnd__service **ret_service)
{
	int rc = tnd__forkmark_init();
	uint64_t mark = tnd__forkmark();

	if (rc < 0)
		return rc;
	gate_enter(mark);
	drop_inherited(mark);
	if (!current)
		rc = start(mark, &current);
	if (rc == 0) {
		current->users += users;
		current->holds += holds;
		*ret_service = current;
	}
	gate_leave();
	return rc;
}

int tnd__service_ref(void)
{
	struct tnd__service *service;

	return enter(1, 0, &service);
}

int tnd__service_hold(struct tnd__service **ret_service)
{
	return enter(0, 1, ret_service);
}

void tnd__service_hold_again(struct tnd__service *service)
{
	gate_enter(service->forkmark);
	service->holds++;
	gate_leave();
}

/* gate. Whether it was the last, and the service no longer `current`. */
static bool is_last(struct tnd__service *service)
{
	if (service->users || service->holds)
		return false;
	if (current == service)
		current = NULL;
	return true;
}

/* Nobody can find it any more. */
static void end(struct tnd__service *service)
{
	bool here = is_here(service);
	pthread_t thread = service->thread;

	pthread_mutex_lock(&service->lock);
	service->stopping = true;
	service->detached = here;
	pthread_mutex_unlock(&service->lock);
	if (here) {
		pthread_detach(thread);
		return;
	}
	kick(service);
	pthread_join(thread, NULL);
	destroy(service);
}

void tnd__service_put(struct tnd__service *service)
{
	bool last;

	gate_enter(service->forkmark);
	service->holds--;
	last = is_last(service);
	gate_leave();
	if (last)
		end(service);
}

/* Whether the caller's is the last hold. */
static bool only_ours(struct tnd__service *service)
{
	bool only;

	gate_enter(service->forkmark);
	only = service->holds == 1;
	gate_leave();
	return only;
}

/*
 * The service thread may still be about to drop what was closed meanwhile. It would then be it that
 * ends the service, a moment after this call: no thread is to be left behind, so it is waited for.
 */
static void await_holds(struct tnd__service *service)
{
	const struct timespec moment = {.tv_nsec = HOLDS_LOOK_NS};
	int64_t until = tnd__now_ns() + HOLDS_NS;

	while (!is_here(service) && !only_ours(service) && tnd__now_ns() < until)
		nanosleep(&moment, NULL);
}

void tnd__service_unref(void)
{
	struct tnd__service *service = NULL;
	uint64_t mark = tnd__forkmark();

	if (!mark)
		return;
	gate_enter(mark);
	drop_inherited(mark);
	if (current && current->users && --current->users == 0) {
		service = current;
		service->holds++;
	}
	gate_leave();
	if (!service)
		return;
	/* The process may exit after this: what was sent, and goodbyes, go out first. */
	pthread_mutex_lock(&service->lock);
	while (service->lingering && !is_here(service))
		pthread_cond_wait(&service->returned, &service->lock);
	pthread_mutex_unlock(&service->lock);
	await_holds(service);
	tnd__service_put(service);
}
