/* SPDX-License-Identifier: Apache-2.0 */
/*
 * source.c - a file to read from: its two descriptors, the alignment of direct reads, what was
 * given up and why
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "storage/engine.h"

/* statx by number and offset: the fields are newer than the C library's struct. */
#define STATX_DIOALIGN_BIT 0x2000u
#define STATX_BYTES 256
#define STATX_DIO_MEM 152
#define STATX_DIO_OFFSET 156

static void note_locked(struct tnd__source *source, const char *text)
{
	size_t used = strlen(source->fallback);

	if (strstr(source->fallback, text))
		return;
	snprintf(source->fallback + used, sizeof(source->fallback) - used, "%s%s", used ? "; " : "",
		 text);
}

void tnd__source_note(struct tnd__source *source, const char *what, int error)
{
	char text[160];

	snprintf(text, sizeof(text), "%s: %s", what, tnd_strerror(error));
	pthread_mutex_lock(&source->storage->lock);
	note_locked(source, text);
	pthread_mutex_unlock(&source->storage->lock);
}

void tnd__source_retire_direct(struct tnd__source *source, const char *what, int error)
{
	if (atomic_exchange_explicit(&source->direct, false, memory_order_relaxed))
		tnd__source_note(source, what, error);
}

void tnd__source_retire_uring(struct tnd__source *source, const char *what, int error)
{
	if (atomic_exchange_explicit(&source->uring, false, memory_order_relaxed))
		tnd__source_note(source, what, error);
}

/*
 * A description of its own for the same inode: flags and access pattern of the caller's stay as
 * they are.
 */
static int reopen(int fd, int flags)
{
	char path[32];
	int copy;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	copy = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | flags);
	return copy < 0 ? -errno : copy;
}

/* Return: alignment, 0 (not given), -EINVAL (no direct I/O here). */
static int statx_align(int fd)
{
	unsigned char raw[STATX_BYTES] = {0};
	uint32_t mask, mem, offset;

	if (syscall(SYS_statx, fd, "", 0x1000 /* AT_EMPTY_PATH */, STATX_DIOALIGN_BIT, raw) < 0)
		return 0;
	memcpy(&mask, raw, sizeof(mask));
	if (!(mask & STATX_DIOALIGN_BIT))
		return 0;
	memcpy(&mem, raw + STATX_DIO_MEM, sizeof(mem));
	memcpy(&offset, raw + STATX_DIO_OFFSET, sizeof(offset));
	if (!mem || !offset)
		return -EINVAL;
	return (int)TND__MAX(TND__MAX(mem, offset), 512);
}

/* One block into memory that is aligned to it and no more. Return: 512, 4096, -errno. */
static int try_align(int fd)
{
	static const uint32_t sizes[] = {512, 4096};
	unsigned char raw[3 * TND__PAGE];
	unsigned char *page = raw + (tnd__round_up((uintptr_t)raw, TND__PAGE) - (uintptr_t)raw);
	int error = 0;

	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		ssize_t got;

		do {
			got = pread(fd, page + sizes[i] % TND__PAGE, sizes[i], 0);
		} while (got < 0 && errno == EINTR);
		if (got >= 0)
			return (int)sizes[i];
		error = -errno;
		if (error != -EINVAL)
			break;
	}
	return error;
}

/* Sets source->direct, align and direct_fd, or notes why not. */
static void open_direct(struct tnd__source *source, int fd)
{
	int rc = tnd__failpoint("storage.open.direct");

	if (rc == 0)
		rc = reopen(fd, O_DIRECT);
	if (rc < 0) {
		tnd__source_note(source, "O_DIRECT refused", rc);
		return;
	}
	source->direct_fd = rc;
	rc = statx_align(rc);
	if (rc == 0)
		rc = try_align(source->direct_fd);
	if (rc > (int)TND__PAGE || (rc > 0 && rc & (rc - 1)))
		rc = -EINVAL; /* more than the 4 KiB that callers pad to */
	if (rc == -EINVAL || rc == -EOPNOTSUPP) {
		tnd__source_note(source, "O_DIRECT read refused", rc);
		return;
	}
	source->align = rc > 0 ? (uint32_t)rc : (uint32_t)TND__PAGE;
	atomic_store_explicit(&source->direct, true, memory_order_relaxed);
}

static int open_buffered(struct tnd__source *source, int fd)
{
	int rc = reopen(fd, 0);

	if (rc == -EMFILE || rc == -ENFILE)
		return rc;
	if (rc < 0) /* no /proc, or no permission any more: the caller's own description */
		rc = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (rc < 0)
		return -errno;
	source->buffered_fd = rc;
	/* Read-ahead would bring in what nobody asked for, and what nobody would drop. */
	posix_fadvise(rc, 0, 0, POSIX_FADV_RANDOM);
	return 0;
}

static struct tnd__source *source_alloc(struct tnd__storage *storage, const char *name,
					uint64_t file_bytes)
{
	struct tnd__source *source;

	if (tnd__failpoint("storage.alloc") < 0)
		return NULL;
	source = calloc(1, sizeof(*source));
	if (!source)
		return NULL;
	source->name = strdup(name);
	if (!source->name) {
		free(source);
		return NULL;
	}
	source->storage = storage;
	source->file_bytes = file_bytes;
	source->direct_fd = source->buffered_fd = -1;
	source->align = (uint32_t)TND__PAGE;
	source->extent_count = (size_t)(file_bytes / TND__EXTENT + 1);
	source->extent_state = calloc(source->extent_count, sizeof(*source->extent_state));
	source->extent_cold = calloc(source->extent_count, sizeof(*source->extent_cold));
	if (!source->extent_state || !source->extent_cold) {
		/* A sparse giant under a limit: each read then asks for itself. */
		free(source->extent_state);
		free(source->extent_cold);
		source->extent_state = NULL;
		source->extent_cold = NULL;
	}
	return source;
}

int tnd__source_open(struct tnd__storage *storage, int fd, const char *name, uint64_t file_bytes,
		     struct tnd__source **ret_source, struct tnd_error *reterr)
{
	struct tnd__where where = {.file = name};
	struct tnd__source *source = source_alloc(storage, name, file_bytes);
	int rc;

	if (!source)
		return tnd__fail(reterr, -ENOMEM, &where, "out of memory for reading it");
	rc = open_buffered(source, fd);
	if (rc < 0) {
		tnd__source_close(source);
		return tnd__fail(reterr, rc, &where, "cannot be opened again for reading: %s",
				 tnd_strerror(rc));
	}
	atomic_store_explicit(&source->uring,
			      atomic_load_explicit(&storage->uring_ok, memory_order_relaxed),
			      memory_order_relaxed);
	pthread_mutex_lock(&storage->lock);
	if (storage->uring_reason[0])
		note_locked(source, storage->uring_reason);
	pthread_mutex_unlock(&storage->lock);
	if (storage->opts.direct != TND__DIRECT_OFF)
		open_direct(source, fd);
	*ret_source = source;
	return 0;
}

void tnd__source_report(struct tnd__source *source, struct tnd__source_report *ret_report)
{
	struct tnd__storage *storage = source->storage;
	int cache = TND__CACHE_UNKNOWN, kinds = 0;

	memset(ret_report, 0, sizeof(*ret_report));
	ret_report->name = source->name;
	ret_report->direct = atomic_load_explicit(&source->direct, memory_order_relaxed);
	pthread_mutex_lock(&storage->lock);
	if (storage->uring_reason[0]) /* the ring may have stopped since */
		note_locked(source, storage->uring_reason);
	for (int i = 0; i < 4; i++) {
		if (!source->seen[i])
			continue;
		cache = i;
		kinds++;
	}
	if (kinds > 1)
		cache = source->seen[TND__CACHE_UNKNOWN] ? TND__CACHE_UNKNOWN : TND__CACHE_MIXED;
	ret_report->cache = cache;
	ret_report->engine = source->storage_bytes == 0                   ? "none"
			     : source->uring_bytes > source->thread_bytes ? "uring"
									  : "threads";
	memcpy(ret_report->fallback, source->fallback, sizeof(ret_report->fallback));
	ret_report->storage_bytes = source->storage_bytes;
	ret_report->dropped_bytes = source->dropped_bytes;
	pthread_mutex_unlock(&storage->lock);
}

void tnd__source_close(struct tnd__source *source)
{
	if (!source)
		return;
	if (source->direct_fd >= 0)
		close(source->direct_fd);
	if (source->buffered_fd >= 0)
		close(source->buffered_fd);
	free(source->extent_state);
	free(source->extent_cold);
	free(source->name);
	free(source);
}
