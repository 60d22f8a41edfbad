/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shim.h - between the specification (shim.c) and the wrapped calls (shim_calls.c)
 */
#ifndef TND_TEST_SHIM_H
#define TND_TEST_SHIM_H

#include <stdint.h>

enum call {
	CALL_OPEN,
	CALL_OPENAT,
	CALL_OPEN_DIRECT,
	CALL_READ,
	CALL_PREAD,
	CALL_PREADV2,
	CALL_MMAP,
	CALL_MADVISE,
	CALL_MALLOC,
	CALL_CALLOC,
	CALL_REALLOC,
	CALL_ALIGNED_ALLOC,
	CALL_POSIX_MEMALIGN,
	CALL_STRDUP,
	CALL_PTHREAD_CREATE,
	CALL_POSIX_FADVISE,
	CALL_CACHESTAT,
	CALL_MEMFD_CREATE,
	CALL_FTRUNCATE,
	CALL_EVENTFD,
	CALL_FCNTL,
	CALL_STATX,
	CALL_STATVFS,
	CALL_OPENDIR,
	CALL_URING_INIT,
	CALL_URING_SUBMIT,
	CALL_COUNT
};

/* What a call is to do. */
struct verdict {
	int error;     /* also in errno; 0: goes through */
	uint64_t most; /* bytes */
};

/* `fd`: -1 where there is none. Keeps errno where the call goes through. */
struct verdict tnd_shim_judge(enum call call, int fd, uint64_t offset, uint64_t bytes);
/* The same for a path. */
int tnd_shim_path_refused(enum call call, const char *path);
int tnd_shim_refused(enum call call);
/* The next definition of `name`, as a function to be cast. */
void (*tnd_shim_find(const char *name))(void);

#endif
