/* SPDX-License-Identifier: Apache-2.0 */
/* board.c - the shared memory of a group: made within the limits, sealed, mapped, checked */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "board.h"
#include "memory/memory.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define BYTES sizeof(struct tnd__board)
/* Beyond a cgroup's limit the kernel kills, and others take memory meanwhile. */
#define MARGIN_BYTES TND__MIB(1)

static int memory_there(struct tnd_error *reterr)
{
	struct tnd_host_memory memory = {.struct_bytes = sizeof(memory)};
	struct rlimit limit;

	if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < BYTES)
		return tnd__fail_plain(reterr, TND_E_HEADROOM,
				       "a group takes %zu bytes of shared memory, but the limit on "
				       "the size of files (ulimit -f) is %llu bytes; raise it",
				       BYTES, (unsigned long long)limit.rlim_cur);
	if (tnd_host_memory(&memory) == 0 && memory.available < BYTES + MARGIN_BYTES)
		return tnd__fail_plain(
			reterr, TND_E_HEADROOM,
			"a group takes %zu bytes of shared memory, but %s leaves %llu bytes, of "
			"which %llu are kept free; raise the limit, or end what takes memory",
			BYTES, memory.limited_by, (unsigned long long)memory.available,
			(unsigned long long)MARGIN_BYTES);
	return 0;
}

static int open_memory(const char *name)
{
	char shown[TND__BOARD_NAME + 32];
	int fd;

	if (tnd__failpoint("group.memfd") < 0)
		return -ENFILE;
	snprintf(shown, sizeof(shown), "tundish.group:%s", name);
	fd = memfd_create(shown, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
	if (fd < 0 && errno == EINVAL) /* before Linux 6.3 */
		fd = memfd_create(shown, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	return fd < 0 ? -errno : fd;
}

static struct tnd__board *map(int fd)
{
	void *data = tnd__failpoint("group.map") < 0
			     ? MAP_FAILED
			     : mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	return data == MAP_FAILED ? NULL : data;
}

/* Takes the memory now: a page that is not there at its first touch would be a SIGBUS. */
static int fill(int fd)
{
	int rc = tnd__failpoint("group.fallocate");

	while (rc == 0 && fallocate(fd, 0, 0, BYTES) < 0)
		if (errno != EINTR)
			rc = -errno;
	if (rc == 0 && fcntl(fd, F_ADD_SEALS, SEALS) < 0)
		rc = -errno;
	return rc;
}

int tnd__board_create(uint32_t rank_count, const char *name, struct tnd__board **ret_board,
		      int *ret_fd, struct tnd_error *reterr)
{
	struct tnd__board *board;
	int fd, rc = memory_there(reterr);

	if (rc < 0)
		return rc;
	fd = open_memory(name);
	if (fd < 0)
		return tnd__fail_plain(reterr, fd, "shared memory for the group: %s",
				       tnd_strerror(fd));
	rc = fill(fd);
	board = rc < 0 ? NULL : map(fd);
	if (!board) {
		close(fd);
		rc = rc < 0 ? rc : -ENOMEM;
		return tnd__fail_plain(reterr, rc, "%zu bytes of shared memory for the group: %s",
				       BYTES, tnd_strerror(rc));
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
		return tnd__fail_plain(reterr, -ENOMEM, "mapping %zu bytes of the group: %s", BYTES,
				       tnd_strerror(-ENOMEM));
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
