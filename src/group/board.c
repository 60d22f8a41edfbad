/* SPDX-License-Identifier: Apache-2.0 */
/* board.c - the shared memory of a group: made within the limits, sealed, mapped, checked */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "board.h"
#include "memory/headroom.h"

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define BYTES sizeof(struct tnd__board)

static int fail_call(struct tnd_error *reterr, int code, const char *call)
{
	return tnd__fail_plain(reterr, code,
			       "a group takes %zu bytes of shared memory, but the kernel refused "
			       "(%s: %s); end what takes memory or descriptors, or raise the limit",
			       BYTES, call, tnd_strerror(code));
}

static int open_memory(const char *name, struct tnd_error *reterr)
{
	char shown[TND__BOARD_NAME + 32];
	int fd = tnd__failpoint("group.memfd");

	snprintf(shown, sizeof(shown), "tundish.group:%s", name);
	if (fd == 0)
		fd = tnd__memfd(shown);
	return fd < 0 ? fail_call(reterr, fd, "memfd_create") : fd;
}

static struct tnd__board *map(int fd)
{
	void *data = tnd__failpoint("group.map") < 0
			     ? MAP_FAILED
			     : mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	return data == MAP_FAILED ? NULL : data;
}

/* Takes the memory now: a page that is not there at its first touch would be a SIGBUS. */
static int fill(int fd, struct tnd_error *reterr)
{
	struct tnd__headroom headroom;
	int rc = tnd__failpoint("group.fallocate");

	if (rc == 0 && ftruncate(fd, BYTES) < 0)
		rc = -errno;
	if (rc < 0)
		return fail_call(reterr, rc, "ftruncate");
	tnd__headroom_open(&headroom, BYTES, "a group");
	rc = tnd__headroom_take(&headroom, fd, 0, BYTES, reterr);
	tnd__headroom_close(&headroom);
	if (rc == 0 && fcntl(fd, F_ADD_SEALS, SEALS) < 0)
		rc = fail_call(reterr, -errno, "F_ADD_SEALS");
	return rc;
}

int tnd__board_create(uint32_t rank_count, const char *name, struct tnd__board **ret_board,
		      int *ret_fd, struct tnd_error *reterr)
{
	struct tnd__board *board;
	int fd, rc = tnd__headroom_file(BYTES, "a group", reterr);

	if (rc < 0)
		return rc;
	fd = open_memory(name, reterr);
	if (fd < 0)
		return fd;
	rc = fill(fd, reterr);
	board = rc < 0 ? NULL : map(fd);
	if (!board) {
		close(fd);
		return rc < 0 ? rc : fail_call(reterr, -ENOMEM, "mmap");
	}
	board->magic = TND__BOARD_MAGIC;
	board->version = TND__BOARD_VERSION;
	board->rank_count = rank_count;
	board->segment_bytes = BYTES;
	snprintf(board->name, sizeof(board->name), "%s", name);
	*ret_board = board;
	*ret_fd = fd;
	return 0;
}

int tnd__board_attach(int fd, struct tnd__board **ret_board, struct tnd_error *reterr)
{
	struct tnd__board *board;
	struct stat stat = {0};
	int seals = fcntl(fd, F_GET_SEALS);

	/* Without the seals somebody could cut it under us. */
	if (fstat(fd, &stat) < 0 || seals < 0 || (seals & SEALS) != SEALS || stat.st_size != BYTES)
		return tnd__fail_plain(reterr, TND_E_CORRUPT,
				       "the memory that rank 0 handed over is not a group's: "
				       "expected %zu sealed bytes, found %lld with seals %#x; run "
				       "the same release of the library on all ranks",
				       BYTES, (long long)stat.st_size, (unsigned)seals);
	board = map(fd);
	if (!board)
		return fail_call(reterr, -ENOMEM, "mmap");
	if (board->magic != TND__BOARD_MAGIC || board->segment_bytes != BYTES) {
		tnd__board_unmap(board);
		return tnd__fail_plain(reterr, TND_E_CORRUPT,
				       "the memory that rank 0 handed over does not begin as a "
				       "group's; the process that made the group is faulty");
	}
	*ret_board = board;
	return 0;
}

void tnd__board_unmap(struct tnd__board *board)
{
	if (board)
		munmap(board, BYTES);
}
