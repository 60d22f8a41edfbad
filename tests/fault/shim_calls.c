/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shim_calls.c - the calls that the shim stands before, each under all names that glibc gives it
 *
 * Allocation goes to glibc's own entry points: looking symbols up allocates.
 */
#undef _FILE_OFFSET_BITS /* `open` is open here, and open64 another */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "shim.h"

#define EXPORT __attribute__((visibility("default")))
#define CACHESTAT_NUMBER 451

/* Gets the next definition once. A race finds the same twice. */
#define REAL(type, name)               \
	static __typeof__(type) *real; \
	if (!real)                     \
	real = (__typeof__(type) *)tnd_shim_find(name)

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *memory, size_t bytes);
extern void *__libc_memalign(size_t align, size_t bytes);

/* -- memory -- */

EXPORT void *malloc(size_t bytes)
{
	return tnd_shim_refused(CALL_MALLOC) ? NULL : __libc_malloc(bytes);
}

EXPORT void *calloc(size_t count, size_t bytes)
{
	return tnd_shim_refused(CALL_CALLOC) ? NULL : __libc_calloc(count, bytes);
}

EXPORT void *realloc(void *memory, size_t bytes)
{
	return tnd_shim_refused(CALL_REALLOC) ? NULL : __libc_realloc(memory, bytes);
}

EXPORT void *aligned_alloc(size_t align, size_t bytes)
{
	return tnd_shim_refused(CALL_ALIGNED_ALLOC) ? NULL : __libc_memalign(align, bytes);
}

EXPORT int posix_memalign(void **ret_memory, size_t align, size_t bytes)
{
	int error = tnd_shim_refused(CALL_POSIX_MEMALIGN);
	void *memory = error ? NULL : __libc_memalign(align, bytes);

	if (!memory)
		return error ? error : ENOMEM;
	*ret_memory = memory;
	return 0;
}

EXPORT char *strdup(const char *text)
{
	size_t bytes = strlen(text) + 1;
	char *copy = tnd_shim_refused(CALL_STRDUP) ? NULL : __libc_malloc(bytes);

	return copy ? memcpy(copy, text, bytes) : NULL;
}

static void *map(void *at, size_t bytes, int protection, int flags, int fd, off_t offset)
{
	REAL(mmap, "mmap");
	if (tnd_shim_judge(CALL_MMAP, fd, 0, 0).error)
		return MAP_FAILED;
	return real(at, bytes, protection, flags, fd, offset);
}

EXPORT void *mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset)
{
	return map(at, bytes, protection, flags, fd, offset);
}

EXPORT void *mmap64(void *at, size_t bytes, int protection, int flags, int fd, off64_t offset)
{
	return map(at, bytes, protection, flags, fd, offset);
}

EXPORT int madvise(void *at, size_t bytes, int advice)
{
	REAL(madvise, "madvise");
	return tnd_shim_refused(CALL_MADVISE) ? -1 : real(at, bytes, advice);
}

EXPORT int memfd_create(const char *name, unsigned flags)
{
	REAL(memfd_create, "memfd_create");
	return tnd_shim_refused(CALL_MEMFD_CREATE) ? -1 : real(name, flags);
}

/* -- opening -- */

static int open_path(enum call call, int at, const char *path, int flags, mode_t mode)
{
	REAL(openat, "openat");
	if (tnd_shim_path_refused(call, path) ||
	    (flags & O_DIRECT && tnd_shim_path_refused(CALL_OPEN_DIRECT, path)))
		return -1;
	return real(at, path, flags, mode);
}

static mode_t mode_of(int flags, va_list args)
{
	return flags & (O_CREAT | __O_TMPFILE) ? va_arg(args, mode_t) : 0;
}

#define OPEN(name)                                                        \
	EXPORT int name(const char *path, int flags, ...)                 \
	{                                                                 \
		va_list args;                                             \
		mode_t mode;                                              \
                                                                          \
		va_start(args, flags);                                    \
		mode = mode_of(flags, args);                              \
		va_end(args);                                             \
		return open_path(CALL_OPEN, AT_FDCWD, path, flags, mode); \
	}
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                  \
	EXPORT int name(int at, const char *path, int flags, ...)     \
	{                                                             \
		va_list args;                                         \
		mode_t mode;                                          \
                                                                      \
		va_start(args, flags);                                \
		mode = mode_of(flags, args);                          \
		va_end(args);                                         \
		return open_path(CALL_OPENAT, at, path, flags, mode); \
	}
OPENAT(openat)
OPENAT(openat64)

EXPORT DIR *opendir(const char *path)
{
	REAL(opendir, "opendir");
	return tnd_shim_path_refused(CALL_OPENDIR, path) ? NULL : real(path);
}

EXPORT int statx(int at, const char *restrict path, int flags, unsigned mask,
		 struct statx *restrict ret_status)
{
	REAL(statx, "statx");
	return tnd_shim_path_refused(CALL_STATX, path) ? -1
						       : real(at, path, flags, mask, ret_status);
}

EXPORT int statvfs(const char *restrict path, struct statvfs *restrict ret_status)
{
	REAL(statvfs, "statvfs");
	return tnd_shim_path_refused(CALL_STATVFS, path) ? -1 : real(path, ret_status);
}

#define FCNTL(name)                                             \
	EXPORT int name(int fd, int command, ...)               \
	{                                                       \
		va_list args;                                   \
		void *argument;                                 \
                                                                \
		REAL(fcntl, "fcntl");                           \
		va_start(args, command);                        \
		argument = va_arg(args, void *);                \
		va_end(args);                                   \
		if (tnd_shim_judge(CALL_FCNTL, fd, 0, 0).error) \
			return -1;                              \
		return real(fd, command, argument);             \
	}
FCNTL(fcntl)
FCNTL(fcntl64)

static int truncate_fd(int fd, off_t bytes)
{
	REAL(ftruncate, "ftruncate");
	return tnd_shim_judge(CALL_FTRUNCATE, fd, 0, 0).error ? -1 : real(fd, bytes);
}

EXPORT int ftruncate(int fd, off_t bytes)
{
	return truncate_fd(fd, bytes);
}

EXPORT int ftruncate64(int fd, off64_t bytes)
{
	return truncate_fd(fd, bytes);
}

/* -- reading -- */

static uint64_t position(int fd)
{
	off_t at = lseek(fd, 0, SEEK_CUR);

	return at < 0 ? 0 : (uint64_t)at;
}

EXPORT ssize_t read(int fd, void *out, size_t bytes)
{
	struct verdict verdict;

	REAL(read, "read");
	verdict = tnd_shim_judge(CALL_READ, fd, position(fd), bytes);
	if (verdict.error)
		return -1;
	return real(fd, out, bytes < verdict.most ? bytes : verdict.most);
}

static ssize_t read_at(int fd, void *out, size_t bytes, off_t offset)
{
	struct verdict verdict;

	REAL(pread, "pread");
	verdict = tnd_shim_judge(CALL_PREAD, fd, (uint64_t)offset, bytes);
	if (verdict.error)
		return -1;
	if (verdict.most < bytes && bytes % 512 == 0 && verdict.most > 512)
		verdict.most &= ~UINT64_C(511); /* O_DIRECT goes on from a block's border */
	return real(fd, out, bytes < verdict.most ? bytes : verdict.most, offset);
}

EXPORT ssize_t pread(int fd, void *out, size_t bytes, off_t offset)
{
	return read_at(fd, out, bytes, offset);
}

EXPORT ssize_t pread64(int fd, void *out, size_t bytes, off64_t offset)
{
	return read_at(fd, out, bytes, offset);
}

static ssize_t read_vector(int fd, const struct iovec *vec, int count, off_t offset, int flags)
{
	struct verdict verdict;
	struct iovec first;

	REAL(preadv2, "preadv2");
	verdict = tnd_shim_judge(CALL_PREADV2, fd, (uint64_t)offset, count ? vec[0].iov_len : 0);
	if (verdict.error)
		return -1;
	if (count == 0 || verdict.most >= vec[0].iov_len)
		return real(fd, vec, count, offset, flags);
	first = (struct iovec){vec[0].iov_base, verdict.most};
	return real(fd, &first, 1, offset, flags);
}

EXPORT ssize_t preadv2(int fd, const struct iovec *vec, int count, off_t offset, int flags)
{
	return read_vector(fd, vec, count, offset, flags);
}

EXPORT ssize_t preadv64v2(int fd, const struct iovec *vec, int count, off64_t offset, int flags)
{
	return read_vector(fd, vec, count, offset, flags);
}

static int advise(int fd, off_t offset, off_t bytes, int advice)
{
	struct verdict verdict;

	REAL(posix_fadvise, "posix_fadvise");
	verdict = tnd_shim_judge(CALL_POSIX_FADVISE, fd, (uint64_t)offset, (uint64_t)bytes);
	return verdict.error ? verdict.error : real(fd, offset, bytes, advice);
}

EXPORT int posix_fadvise(int fd, off_t offset, off_t bytes, int advice)
{
	return advise(fd, offset, bytes, advice);
}

EXPORT int posix_fadvise64(int fd, off64_t offset, off64_t bytes, int advice)
{
	return advise(fd, offset, bytes, advice);
}

/* -- the rest -- */

EXPORT long syscall(long number, ...)
{
	long arguments[6];
	va_list args;

	REAL(syscall, "syscall");
	va_start(args, number);
	for (int i = 0; i < 6; i++)
		arguments[i] = va_arg(args, long);
	va_end(args);
	if (number == CACHESTAT_NUMBER &&
	    tnd_shim_judge(CALL_CACHESTAT, (int)arguments[0], 0, 0).error)
		return -1;
	return real(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
		    arguments[5]);
}

EXPORT int pthread_create(pthread_t *restrict ret_thread, const pthread_attr_t *restrict attr,
			  void *(*run)(void *), void *restrict arg)
{
	int error;

	REAL(pthread_create, "pthread_create");
	error = tnd_shim_refused(CALL_PTHREAD_CREATE);
	return error ? error : real(ret_thread, attr, run, arg);
}

EXPORT int eventfd(unsigned value, int flags)
{
	REAL(eventfd, "eventfd");
	return tnd_shim_refused(CALL_EVENTFD) ? -1 : real(value, flags);
}

struct io_uring;
struct io_uring_params;
EXPORT int io_uring_queue_init(unsigned entries, struct io_uring *ring, unsigned flags);
EXPORT int io_uring_queue_init_params(unsigned entries, struct io_uring *ring,
				      struct io_uring_params *params);
EXPORT int io_uring_submit(struct io_uring *ring);
EXPORT int io_uring_submit_and_wait(struct io_uring *ring, unsigned count);

EXPORT int io_uring_queue_init(unsigned entries, struct io_uring *ring, unsigned flags)
{
	int error;

	REAL(io_uring_queue_init, "io_uring_queue_init");
	error = tnd_shim_refused(CALL_URING_INIT);
	return error ? -error : real(entries, ring, flags);
}

EXPORT int io_uring_queue_init_params(unsigned entries, struct io_uring *ring,
				      struct io_uring_params *params)
{
	int error;

	REAL(io_uring_queue_init_params, "io_uring_queue_init_params");
	error = tnd_shim_refused(CALL_URING_INIT);
	return error ? -error : real(entries, ring, params);
}

EXPORT int io_uring_submit(struct io_uring *ring)
{
	int error;

	REAL(io_uring_submit, "io_uring_submit");
	error = tnd_shim_refused(CALL_URING_SUBMIT);
	return error ? -error : real(ring);
}

EXPORT int io_uring_submit_and_wait(struct io_uring *ring, unsigned count)
{
	int error;

	REAL(io_uring_submit_and_wait, "io_uring_submit_and_wait");
	error = tnd_shim_refused(CALL_URING_SUBMIT);
	return error ? -error : real(ring, count);
}
