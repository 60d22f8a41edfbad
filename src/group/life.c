/* SPDX-License-Identifier: Apache-2.0 */
/*
 * life.c - life locks: a byte of a shared file that a process has locked for as long as it lives
 *
 * A record lock, which a forked child does not inherit. It ends early when its process closes any
 * descriptor of the file.
 */
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "service_internal.h"

/* Return: the type of the lock that is in the way, or F_UNLCK; -errno. */
static int call(int fd, int command, uint64_t offset)
{
	struct flock lock = {
		.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)offset, .l_len = 1};

	return fcntl(fd, command, &lock) < 0 ? -errno : lock.l_type;
}

int tnd__life_lock(int fd, uint64_t offset)
{
	return TND__MIN(call(fd, F_SETLK, offset), 0);
}

int tnd__life_held(int fd, uint64_t offset, bool also_own)
{
	int rc = call(fd, also_own ? F_OFD_GETLK : F_GETLK, offset);

	return rc < 0 ? rc : rc != F_UNLCK;
}
