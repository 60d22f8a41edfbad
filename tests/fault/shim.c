/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shim.c - a preloaded library that makes C library calls fail, fall short or be interrupted
 *
 *   LD_PRELOAD=libtnd_shim.so TND_SHIM="SPEC[,SPEC...]" PROGRAM
 *
 *   CALL:ERRNO[@N][xM]  the N-th call (default 1) to the N+M-1-th (default: all later ones) fails with ERRNO (name or number)
 *   CALL:short          returns at most half of what was asked, at least one byte
 *   CALL:byte           one byte at a time
 *   CALL:eintr          every second call fails with EINTR
 *   CALL:eio=OFFSET     EIO once, for the first read that reaches beyond OFFSET
 *   CALL:eof=OFFSET     the file ends at OFFSET
 *   CALL:direct=ERRNO   fails with ERRNO where the descriptor was opened with O_DIRECT
 *
 *   CALL: open openat read pread preadv2 mmap madvise malloc calloc realloc aligned_alloc posix_memalign strdup pthread_create
 *         posix_fadvise cachestat memfd_create ftruncate eventfd fcntl statx statvfs opendir uring_init uring_submit
 *         Of read, pread and preadv2, `reads` means all three.
 *
 * open with O_DIRECT is counted as `open.direct` too. With TND_SHIM_FILES=GLOB the calls that read
 * and open look only at descriptors and paths whose path matches. TND_SHIM_COUNT=FILE: at exit the
 * number of calls by name is written there, so that a test can let each call fail in turn. The
 * program must be linked dynamically; what the kernel does for io_uring cannot be seen here. errno
 * is kept where a call goes through.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include "shim.h"

#define SPEC_MAX 32

static const char *const call_names[CALL_COUNT] = {
	"open",          "openat",        "open.direct",    "read",      "pread",
	"preadv2",       "mmap",          "madvise",        "malloc",    "calloc",
	"realloc",       "aligned_alloc", "posix_memalign", "strdup",    "pthread_create",
	"posix_fadvise", "cachestat",     "memfd_create",   "ftruncate", "eventfd",
	"fcntl",         "statx",         "statvfs",        "opendir",   "uring_init",
	"uring_submit"};

enum kind { KIND_ERROR, KIND_SHORT, KIND_BYTE, KIND_EINTR, KIND_EIO, KIND_EOF, KIND_DIRECT };

struct spec {
	bool on[CALL_COUNT];
	enum kind kind;
	int error;
	uint64_t first, count, offset;
	atomic_uint_fast64_t seen;
	atomic_bool fired;
};

static struct spec specs[SPEC_MAX];
static int spec_count;
static const char *files;
static const char *count_path;
static atomic_uint_fast64_t counts[CALL_COUNT];
/* Before the constructor, and while the shim itself allocates, all calls go through. */
static atomic_bool active;

static _Noreturn void bad(const char *text)
{
	fprintf(stderr, "tnd_shim: cannot read TND_SHIM at '%s'\n", text);
	_exit(125);
}

static int error_number(const char *text)
{
	char name[32];
	size_t length = strcspn(text, "@x,");

	snprintf(name, sizeof(name), "%.*s", (int)length, text);
	for (int i = 1; i < 256; i++)
		if (strerrorname_np(i) && strcmp(strerrorname_np(i), name) == 0)
			return i;
	if (atoi(name) <= 0)
		bad(text);
	return atoi(name);
}

static void parse_call(struct spec *spec, const char *text, size_t length)
{
	bool found = false;

	for (int i = 0; i < CALL_COUNT; i++) {
		if (strlen(call_names[i]) == length && strncmp(call_names[i], text, length) == 0)
			spec->on[i] = found = true;
	}
	if (length == 5 && strncmp(text, "reads", 5) == 0)
		spec->on[CALL_READ] = spec->on[CALL_PREAD] = spec->on[CALL_PREADV2] = found = true;
	if (!found)
		bad(text);
}

static void parse_how(struct spec *spec, const char *how)
{
	const char *mark;

	if (strncmp(how, "short", 5) == 0) {
		spec->kind = KIND_SHORT;
	} else if (strncmp(how, "byte", 4) == 0) {
		spec->kind = KIND_BYTE;
	} else if (strncmp(how, "eintr", 5) == 0) {
		spec->kind = KIND_EINTR;
	} else if (strncmp(how, "eio=", 4) == 0 || strncmp(how, "eof=", 4) == 0) {
		spec->kind = how[1] == 'i' ? KIND_EIO : KIND_EOF;
		spec->offset = strtoull(how + 4, NULL, 0);
	} else if (strncmp(how, "direct=", 7) == 0) {
		spec->kind = KIND_DIRECT;
		spec->error = error_number(how + 7);
	} else {
		spec->error = error_number(how);
		mark = how + strcspn(how, "@x,");
		if (*mark == '@')
			spec->first = strtoull(mark + 1, (char **)&mark, 10);
		if (*mark == 'x')
			spec->count = strtoull(mark + 1, NULL, 10);
	}
}

static void counts_write(void)
{
	FILE *file;

	atomic_store(&active, false);
	file = fopen(count_path, "w");
	if (!file)
		return;
	for (int i = 0; i < CALL_COUNT; i++)
		fprintf(file, "%s %llu\n", call_names[i], (unsigned long long)counts[i]);
	fclose(file);
}

__attribute__((constructor)) static void begin(void)
{
	const char *at = getenv("TND_SHIM");

	files = getenv("TND_SHIM_FILES");
	count_path = getenv("TND_SHIM_COUNT");
	while (at && *at) {
		struct spec *spec = &specs[spec_count];
		size_t colon = strcspn(at, ":");

		if (spec_count == SPEC_MAX || at[colon] != ':')
			bad(at);
		spec->first = 1;
		parse_call(spec, at, colon);
		parse_how(spec, at + colon + 1);
		spec_count++;
		at += strcspn(at, ",");
		at += *at == ',';
	}
	if (count_path)
		atexit(counts_write);
	atomic_store(&active, true);
}

static bool path_matches(const char *path)
{
	return !files || fnmatch(files, path, 0) == 0;
}

static bool fd_matches(int fd)
{
	char link[32], path[4096];
	ssize_t length;

	if (!files || fd < 0)
		return true;
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	length = readlink(link, path, sizeof(path) - 1);
	if (length < 0)
		return false;
	path[length] = '\0';
	return path_matches(path);
}

/* ISO C has no cast from void * to a function. */
void (*tnd_shim_find(const char *name))(void)
{
	void *symbol = dlsym(RTLD_NEXT, name);
	void (*function)(void);

	memcpy(&function, &symbol, sizeof(function));
	return function;
}

static bool is_direct(int fd)
{
	static int (*real_fcntl)(int, int, ...);
	int saved = errno, flags;

	if (!real_fcntl)
		real_fcntl = (int (*)(int, int, ...))tnd_shim_find("fcntl");
	flags = real_fcntl(fd, F_GETFL);
	errno = saved;
	return flags >= 0 && flags & O_DIRECT;
}

static void weigh(struct spec *spec, int fd, uint64_t offset, uint64_t bytes,
		  struct verdict *verdict)
{
	uint64_t seen = atomic_fetch_add(&spec->seen, 1) + 1;

	switch (spec->kind) {
	case KIND_ERROR:
		if (seen >= spec->first && (!spec->count || seen < spec->first + spec->count))
			verdict->error = spec->error;
		break;
	case KIND_EINTR:
		if (seen % 2)
			verdict->error = EINTR;
		break;
	case KIND_SHORT:
		verdict->most = bytes > 1 ? bytes / 2 : bytes;
		break;
	case KIND_BYTE:
		verdict->most = 1;
		break;
	case KIND_EIO:
		if (offset + bytes > spec->offset && !atomic_exchange(&spec->fired, true))
			verdict->error = EIO;
		break;
	case KIND_EOF:
		verdict->most = offset >= spec->offset          ? 0
				: offset + bytes > spec->offset ? spec->offset - offset
								: bytes;
		break;
	case KIND_DIRECT:
		if (is_direct(fd))
			verdict->error = spec->error;
		break;
	}
}

struct verdict tnd_shim_judge(enum call call, int fd, uint64_t offset, uint64_t bytes)
{
	struct verdict verdict = {0, UINT64_MAX};
	int saved = errno;

	if (!atomic_load_explicit(&active, memory_order_relaxed))
		return verdict;
	atomic_fetch_add_explicit(&counts[call], 1, memory_order_relaxed);
	for (int i = 0; i < spec_count; i++)
		if (specs[i].on[call] && fd_matches(fd))
			weigh(&specs[i], fd, offset, bytes, &verdict);
	errno = verdict.error ? verdict.error : saved;
	return verdict;
}

int tnd_shim_refused(enum call call)
{
	return tnd_shim_judge(call, -1, 0, 0).error;
}

int tnd_shim_path_refused(enum call call, const char *path)
{
	return path_matches(path) ? tnd_shim_refused(call) : 0;
}
