/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lifewatch.c - the process of another rank that we have no connection with
 *
 * By the pidfd that rank 0 handed out, else by looks at the rank's life lock every 50 ms. The look
 * is by F_OFD_GETLK: that shows the locks of our own process, too, where a rank is a thread of it.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "group_internal.h"
#include "service_internal.h"

#define LOOK_NS 50000000

struct tnd__lifewatch {
	struct tnd__served served;
	int pid_fd;  /* owned, or -1 */
	int lock_fd; /* borrowed */
	uint64_t lock_offset;
	void (*on_end)(void *owner, uint64_t tag);
	void *owner;
	uint64_t tag;
};

static struct tnd__lifewatch *of(struct tnd__served *served)
{
	return (struct tnd__lifewatch *)(void *)served;
}

static void ended(struct tnd__lifewatch *watch)
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

static void life_ready(struct tnd__served *served, unsigned int which, uint32_t events)
{
	(void)which;
	(void)events;
	ended(of(served));
}

static void life_due(struct tnd__served *served, int64_t now_ns)
{
	struct tnd__lifewatch *watch = of(served);
	bool free = false;

	tnd__served_lock(served);
	if (!served->removed) {
		struct flock lock = {.l_type = F_WRLCK,
				     .l_whence = SEEK_SET,
				     .l_start = (off_t)watch->lock_offset,
				     .l_len = 1};

		free = fcntl(watch->lock_fd, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
		if (!free)
			tnd__served_set_due(served, now_ns + LOOK_NS);
	}
	tnd__served_unlock(served);
	if (free)
		ended(watch);
}

static void life_free(struct tnd__served *served)
{
	struct tnd__lifewatch *watch = of(served);

	if (watch->pid_fd >= 0)
		close(watch->pid_fd);
	free(watch);
}

static const struct tnd__served_ops source_ops = {life_ready, life_due, life_free};

static int start(struct tnd__lifewatch *watch, struct tnd__service *service)
{
	int rc = 0;

	tnd__served_add(&watch->served, service, &source_ops);
	if (watch->pid_fd >= 0) {
		rc = tnd__served_watch(&watch->served, watch->pid_fd, 0, EPOLLIN);
	} else {
		tnd__served_lock(&watch->served);
		tnd__served_set_due(&watch->served, 0);
		tnd__served_unlock(&watch->served);
	}
	return rc;
}

int tnd__lifewatch_open(struct tnd_group *group, uint32_t rank, int pid_fd,
			struct tnd__lifewatch **ret_watch)
{
	struct tnd__lifewatch *watch =
		tnd__failpoint("group.alloc") < 0 ? NULL : calloc(1, sizeof(*watch));
	struct tnd__service *service;
	int rc;

	if (!watch)
		return -ENOMEM;
	rc = tnd__service_hold(&service);
	if (rc < 0) {
		free(watch);
		return rc;
	}
	watch->pid_fd = pid_fd;
	watch->lock_fd = group->board_fd;
	watch->lock_offset = TND__LIFE_RANK(rank);
	watch->on_end = tnd__group_on_end;
	watch->owner = group;
	watch->tag = rank;
	rc = start(watch, service);
	if (rc == 0) {
		*ret_watch = watch;
		return 0;
	}
	watch->pid_fd = -1; /* stays the caller's */
	tnd__lifewatch_close(watch);
	return rc;
}

void tnd__lifewatch_close(struct tnd__lifewatch *watch)
{
	if (!watch)
		return;
	if (tnd__served_forked(&watch->served)) {
		life_free(&watch->served);
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
