/* SPDX-License-Identifier: Apache-2.0 */
/*
 * watch.c - a process that has not connected yet
 *
 * By a pidfd; where the kernel refuses that, by looks at /proc/PID/stat every 50 ms: a zombie has
 * ended, and another start time is another process with the same number.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "service_internal.h"

#define LOOK_NS 50000000

struct tnd__watch {
	struct tnd__served served;
	int32_t pid;
	int pid_fd;               /* or -1 */
	unsigned long long began; /* start time, without a pidfd; 0: /proc does not show it */
	void (*on_end)(void *owner, uint64_t tag);
	void *owner;
	uint64_t tag;
};

static struct tnd__watch *of(struct tnd__served *served)
{
	return (struct tnd__watch *)(void *)served;
}

/* Return: start time; 0: ended, or not shown. */
static unsigned long long start_time(int32_t pid)
{
	char path[32], text[1024], state;
	unsigned long long began;
	const char *rest;

	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	if (tnd__read_small(path, text, sizeof(text)) <= 0)
		return 0;
	/* The command's name may hold spaces and parentheses: behind the last one come the rest. */
	rest = strrchr(text, ')');
	if (!rest || sscanf(rest,
			    ") %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s "
			    "%*s %*s %llu",
			    &state, &began) != 2)
		return 0;
	return state == 'Z' || state == 'X' ? 0 : began;
}

static bool has_ended(const struct tnd__watch *watch)
{
	if (watch->began)
		return start_time(watch->pid) != watch->began;
	return kill(watch->pid, 0) < 0 && errno == ESRCH;
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

/* Return: 0, -ESRCH, -errno. */
static int find_process(struct tnd__watch *watch)
{
	int rc = tnd__pidfd_open(watch->pid);

	if (rc >= 0)
		watch->pid_fd = rc;
	if (rc >= 0 || rc == -ESRCH || rc == -EMFILE || rc == -ENFILE || rc == -ENOMEM)
		return TND__MIN(rc, 0);
	if (kill(watch->pid, 0) < 0 && errno == ESRCH)
		return -ESRCH;
	watch->began = start_time(watch->pid);
	return 0;
}

static int start(struct tnd__watch *watch, struct tnd__service *service)
{
	int rc = 0;

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
	return rc;
}

int tnd__watch_open(int32_t pid, void (*on_end)(void *owner, uint64_t tag), void *owner,
		    uint64_t tag, struct tnd__watch **ret_watch)
{
	struct tnd__watch *watch =
		tnd__failpoint("group.alloc") < 0 ? NULL : calloc(1, sizeof(*watch));
	struct tnd__service *service;
	int rc;

	if (!watch)
		return -ENOMEM;
	watch->pid = pid;
	watch->pid_fd = -1;
	watch->on_end = on_end;
	watch->owner = owner;
	watch->tag = tag;
	rc = pid > 0 ? find_process(watch) : -ESRCH;
	if (rc == 0)
		rc = tnd__service_hold(&service);
	if (rc < 0) {
		watch_free(&watch->served);
		return rc;
	}
	rc = start(watch, service);
	if (rc == 0)
		*ret_watch = watch;
	return rc;
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
