/* SPDX-License-Identifier: Apache-2.0 */
/* who.c - the process at the other end of a socket: user, number, and a descriptor to see it end */
#include <errno.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "service_internal.h"

/* Linux 6.5; headers of distributions are older. */
#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

/* Lack that another way of asking would meet as well, or that would go unnoticed. */
static bool is_lack(int rc)
{
	return rc == -EMFILE || rc == -ENFILE || rc == -ENOMEM;
}

int tnd__pidfd_open(int32_t pid)
{
	long fd;
	int rc = tnd__failpoint("group.pidfd");

	if (rc < 0)
		return rc;
	if (pid <= 0)
		return -ESRCH;
	/* Always close-on-exec. */
	fd = syscall(SYS_pidfd_open, pid, 0);
	return fd < 0 ? -errno : (int)fd;
}

bool tnd__pidfd_ended(int pid_fd)
{
	struct pollfd poll_fd = {.fd = pid_fd, .events = POLLIN};

	return poll(&poll_fd, 1, 0) > 0;
}

static int peer_pidfd(int fd)
{
	socklen_t bytes = sizeof(int);
	int pid_fd, rc = tnd__failpoint("group.pidfd");

	if (rc == 0)
		rc = tnd__failpoint("group.peerpidfd");
	if (rc == 0 && getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &pid_fd, &bytes) < 0)
		rc = -errno;
	return rc < 0 ? rc : pid_fd;
}

int tnd__who_is(int fd, struct tnd__who *ret_who)
{
	struct ucred cred;
	socklen_t bytes = sizeof(cred);
	int rc = tnd__failpoint("group.who");

	if (rc < 0)
		return rc;
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &bytes) < 0)
		return -errno;
	ret_who->uid = cred.uid;
	ret_who->pid = cred.pid > 0 ? cred.pid : 0;
	rc = peer_pidfd(fd);
	if (rc < 0 && rc != -ESRCH && !is_lack(rc) && ret_who->pid)
		rc = tnd__pidfd_open(ret_who->pid);
	if (rc == -ESRCH || is_lack(rc))
		return rc;
	/* Refused both times: its life lock will have to do. */
	ret_who->pid_fd = rc < 0 ? -1 : rc;
	return 0;
}
