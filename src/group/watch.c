/* SPDX-License-Identifier: Apache-2.0 */
/*
 * watch.c - the end of a process that we have no connection with
 *
 *   pidfd               epoll tells; of tnd__pidfd_open(), or handed to us by who has one
 *   no pidfd, a pid     a look at /proc/PID/stat every 50 ms: a zombie has ended, and another start
 *                       time is another process with the same number; kill(pid, 0) where /proc does
 *                       not show it
 *   no pidfd, no pid    a look at its life lock every 50 ms; by F_OFD_GETLK, which shows the locks
 *                       of our own process, too, where a rank is a thread of it
 *
 * on_end comes at most once; not after the close has returned.
 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "service_internal.h"

#define LOOK_NS 50000000

struct tnd__watch {
	struct tnd__served served;
	int pid_fd;     /* owned, or -1, and then: */
	int32_t pid;    /* or 0, and then its life lock */
	uint64_t began; /* start time; 0: /proc does not show it */
	int lock_fd;    /* borrowed */
	uint64_t lock_offset;
	void (*on_end)(void *owner, uint64_t tag);
	void *owner;
	uint64_t tag;
};

static struct tnd__watch *of(struct tnd__served *served)
{
	return (struct tnd__watch *)(void *)served;
}

/* Whether `state`, as tnd__process_state() gives it, is that of a process that has ended. */
static bool is_end(int state)
{
	return state == -ESRCH || state == 'Z' || state == 'X';
}

static bool has_ended(const struct tnd__watch *watch)
{
	uint64_t began;
	int state;

	if (!watch->pid)
		return tnd__life_held(watch->lock_fd, watch->lock_offset, true) == 0;
	if (!watch->began)
		return kill(watch->pid, 0) < 0 && errno == ESRCH;
	state = tnd__process_state(watch->pid, &began);
	/* One that cannot be looked at (no free descriptor, say) has not ended for that. */
	return is_end(state) || (state >= 0 && began != watch->began);
}

static void ended(struct tnd__watch *watch)
{
	bool tell;

	tnd__served_lock(&watch->served);
	tell = !watch->served.removed;
	if (watch->pid_fd >= 0)
		tnd__served_unwatch(&watch->served, watch->pid_fd);
	tnd__served_unlock(&watch->served);
	if (tell)
		watch->on_end(watch->owner, watch->tag);
}

static void watch_ready(struct tnd__served *served, unsigned int which, uint32_t events)
{
	(void)which;
	(void)events;
	ended(of(served));
}

static void watch_due(struct tnd__served *served, int64_t now_ns)
{
	struct tnd__watch *watch = of(served);

	/* No lock for the look: the close waits for us, so that the descriptor stays open. */
	if (has_ended(watch)) {
		ended(watch);
		return;
	}
	tnd__served_lock(served);
	tnd__served_set_due(served, now_ns + LOOK_NS);
	tnd__served_unlock(served);
}

static void watch_free(struct tnd__served *served)
{
	struct tnd__watch *watch = of(served);

	if (watch->pid_fd >= 0)
		close(watch->pid_fd);
	free(watch);
}

static const struct tnd__served_ops served_ops = {watch_ready, watch_due, watch_free};

static struct tnd__watch *make(void (*on_end)(void *owner, uint64_t tag), void *owner, uint64_t tag)
{
	struct tnd__watch *watch =
		tnd__failpoint("group.alloc") < 0 ? NULL : calloc(1, sizeof(*watch));

	if (!watch)
		return NULL;
	watch->pid_fd = -1;
	watch->on_end = on_end;
	watch->owner = owner;
	watch->tag = tag;
	return watch;
}

/* Return: 0; -errno, and then the watch is freed. */
static int start(struct tnd__watch *watch, struct tnd__watch **ret_watch)
{
	struct tnd__service *service;
	int rc = tnd__service_hold(&service);

	if (rc < 0) {
		watch_free(&watch->served);
		return rc;
	}
	tnd__served_add(&watch->served, service, &served_ops);
	if (watch->pid_fd >= 0) {
		rc = tnd__served_watch(&watch->served, watch->pid_fd, 0, EPOLLIN);
	} else {
		tnd__served_lock(&watch->served);
		tnd__served_set_due(&watch->served, 0);
		tnd__served_unlock(&watch->served);
	}
	if (rc < 0)
		tnd__watch_close(watch);
	else
		*ret_watch = watch;
	return rc;
}

/* Return: 0, -ESRCH, -errno. */
static int find_process(struct tnd__watch *watch, int32_t pid)
{
	int rc = tnd__pidfd_open(pid), state;
	uint64_t began;

	watch->pid = pid;
	if (rc >= 0)
		watch->pid_fd = rc;
	if (rc >= 0 || rc == -ESRCH || rc == -EMFILE || rc == -ENFILE || rc == -ENOMEM)
		return TND__MIN(rc, 0);
	if (kill(pid, 0) < 0 && errno == ESRCH)
		return -ESRCH;
	state = tnd__process_state(pid, &began);
	if (state == 'Z' || state == 'X')
		return -ESRCH;
	watch->began = state < 0 ? 0 : began; /* 0: our /proc does not show it */
	return 0;
}

int tnd__watch_open(int32_t pid, void (*on_end)(void *owner, uint64_t tag), void *owner,
		    uint64_t tag, struct tnd__watch **ret_watch)
{
	struct tnd__watch *watch = make(on_end, owner, tag);
	int rc;

	if (!watch)
		return -ENOMEM;
	rc = pid > 0 ? find_process(watch, pid) : -ESRCH;
	if (rc < 0) {
		watch_free(&watch->served);
		return rc;
	}
	return start(watch, ret_watch);
}

int tnd__watch_open_life(const struct tnd__life *life, void (*on_end)(void *owner, uint64_t tag),
			 void *owner, uint64_t tag, struct tnd__watch **ret_watch)
{
	struct tnd__watch *watch = make(on_end, owner, tag);

	if (!watch) {
		if (life->pid_fd >= 0)
			close(life->pid_fd);
		return -ENOMEM;
	}
	watch->pid_fd = life->pid_fd;
	watch->lock_fd = life->lock_fd;
	watch->lock_offset = life->lock_offset;
	return start(watch, ret_watch);
}

void tnd__watch_close(struct tnd__watch *watch)
{
	if (!watch)
		return;
	if (tnd__served_forked(&watch->served)) {
		watch_free(&watch->served);
		tnd__service_forked();
		return;
	}
	tnd__served_lock(&watch->served);
	tnd__served_remove(&watch->served);
	if (watch->pid_fd >= 0)
		tnd__served_unwatch(&watch->served, watch->pid_fd);
	tnd__served_unlock(&watch->served);
	tnd__served_discard(&watch->served);
}
