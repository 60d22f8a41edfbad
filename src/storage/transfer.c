/* SPDX-License-Identifier: Apache-2.0 */
/*
 * transfer.c - the way of one read, from its routing to done()
 *
 *   route ----> direct ---- all bytes ------------------> deliver ----> done
 *     ^           | EINVAL, EOPNOTSUPP: direct retired      ^
 *     |           | EIO: this read only                     |
 *     `-----------'      buffered ----- all bytes ----------'
 *                           `--- error: the first one seen is told
 *
 * A read goes direct at most once through the ring and once through a worker, then buffered, so it
 * ends. The bytes are the same on each way. What one way left half done is thrown away and read
 * again: ranges are small.
 *
 * Steps run in a worker; only direct reads through the ring end in the ring's thread, which hands
 * copies and scatter() on to the workers so that it is back in the ring at once.
 */
#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "storage/engine.h"

#ifndef RWF_DONTCACHE
#define RWF_DONTCACHE 0x80
#endif

/* One system call moves at most 2 GiB less a page. */
#define CALL_MAX TND__MIB(1024)

/* EAGAIN for a regular file is a passing shortage; for ever is a broken file system. */
#define AGAIN_MAX 1000

static bool unsupported(int error)
{
	return error == -EINVAL || error == -EOPNOTSUPP || error == -ENOSYS || error == -EPERM;
}

bool tnd__transfer_cancelled(const struct tnd__read *read)
{
	return atomic_load_explicit(&read->source->storage->cancelled, memory_order_relaxed);
}

static bool in_place(const struct tnd__read *read)
{
	const struct tnd__source *source = read->source;
	uint64_t mask = source->align - 1;

	if (!read->dst || ((uintptr_t)read->dst ^ read->offset) & mask)
		return false;
	return read->padded || ((read->offset | (read->offset + read->bytes)) & mask) == 0;
}

struct tnd__span tnd__transfer_span(const struct tnd__read *read)
{
	uint64_t end = read->offset + read->bytes;
	uint64_t align = in_place(read) && !read->padded ? read->source->align : TND__PAGE;
	struct tnd__span span = {tnd__round_down(read->offset, align), tnd__round_up(end, align),
				 NULL};

	span.base = read->bounce ? read->bounce
				 : (unsigned char *)read->dst - (read->offset - span.low);
	return span;
}

static bool goes_direct(const struct tnd__read *read)
{
	const struct tnd__source *source = read->source;

	if (read->state & TND__READ_NODIRECT ||
	    !atomic_load_explicit(&source->direct, memory_order_relaxed))
		return false;
	return source->storage->opts.direct == TND__DIRECT_ON || !(read->state & TND__READ_WARM);
}

void tnd__transfer_route(struct tnd__read *read)
{
	struct tnd__storage *storage = read->source->storage;
	int rc;

	read->progress = 0;
	read->state &= ~(TND__READ_BOUNCE | TND__READ_WINDOW);
	if (goes_direct(read)) {
		tnd__step_set(read, TND__STEP_DIRECT);
		if (!in_place(read))
			read->state |= TND__READ_BOUNCE;
	} else {
		tnd__step_set(read, TND__STEP_BUFFERED);
		if (!read->dst)
			read->state |= TND__READ_BOUNCE;
		if (!(read->state & TND__READ_WARM) && !storage->opts.keep_cache)
			read->state |= TND__READ_WINDOW;
	}
	rc = tnd__resources_take(read);
	if (rc == 0)
		return;
	if (rc < 0)
		tnd__step_set(read, TND__STEP_NOMEM);
	tnd__transfer_dispatch(read);
}

void tnd__transfer_dispatch(struct tnd__read *read)
{
	struct tnd__source *source = read->source;
	struct tnd__storage *storage = source->storage;

	if ((read->state & TND__STEP_MASK) == TND__STEP_DIRECT &&
	    !(read->state & TND__READ_REFUSED) &&
	    atomic_load_explicit(&storage->uring_ok, memory_order_relaxed) &&
	    atomic_load_explicit(&source->uring, memory_order_relaxed))
		tnd__uring_queue(storage, read);
	else
		tnd__worker_queue(storage, read, false);
}

static void count_bytes(struct tnd__read *read, uint64_t bytes, bool ring)
{
	struct tnd__source *source = read->source;
	struct tnd__storage *storage = source->storage;

	pthread_mutex_lock(&storage->lock);
	*(ring ? &source->uring_bytes : &source->thread_bytes) += bytes;
	source->storage_bytes += bytes;
	storage->storage_bytes += bytes;
	pthread_mutex_unlock(&storage->lock);
}

void tnd__transfer_finish(struct tnd__read *read, int status, uint64_t fail_offset)
{
	struct tnd__source *source = read->source;
	struct tnd__storage *storage = source->storage;

	if (read->state & TND__READ_PROBED)
		tnd__extent_drop_probe(read);
	tnd__resources_give(read);
	pthread_mutex_lock(&storage->lock);
	storage->read_ns += (uint64_t)(tnd__now_ns() - read->start_ns);
	/*
	 * Before done(), which may free the read and its source; close() joins the threads after
	 * this.
	 */
	storage->inflight--;
	pthread_cond_broadcast(&storage->room);
	pthread_mutex_unlock(&storage->lock);
	read->done(read, status, fail_offset);
}

static void deliver(struct tnd__read *read)
{
	struct tnd__storage *storage = read->source->storage;
	int64_t start;

	if (read->bounce) {
		struct tnd__span span = tnd__transfer_span(read);
		const unsigned char *data = span.base + (read->offset - span.low);

		start = tnd__now_ns();
		if (read->dst)
			memcpy(read->dst, data, read->bytes);
		else
			read->scatter(read, data);
		start = tnd__now_ns() - start;
		pthread_mutex_lock(&storage->lock);
		storage->scatter_ns += (uint64_t)start;
		pthread_mutex_unlock(&storage->lock);
	}
	tnd__transfer_finish(read, 0, 0);
}

/* The other way: buffered. Resources first given back, so that a waiter never holds one. */
static void reroute(struct tnd__read *read)
{
	read->state |= TND__READ_NODIRECT;
	tnd__resources_give(read);
	tnd__transfer_route(read);
}

static void fail_direct(struct tnd__read *read, int error, bool ring)
{
	struct tnd__source *source = read->source;
	struct tnd__storage *storage = source->storage;

	if (ring) {
		read->state |= TND__READ_REFUSED;
		read->ring_error = error;
		tnd__worker_queue(storage, read, true);
		return;
	}
	if (unsupported(error)) {
		tnd__source_retire_direct(source, "O_DIRECT read refused", error);
	} else {
		read->status = error;
		tnd__source_note(source, "O_DIRECT read failed", error);
	}
	reroute(read);
}

bool tnd__transfer_direct_result(struct tnd__read *read, int64_t result, bool ring)
{
	struct tnd__span span = tnd__transfer_span(read);
	uint64_t need = read->offset + read->bytes - span.low;
	uint64_t reached;

	if (result < 0) {
		if (result == -EINTR || (result == -EAGAIN && read->tries++ < AGAIN_MAX)) {
			sched_yield();
			return true;
		}
		fail_direct(read, (int)result, ring);
		return false;
	}
	count_bytes(read, (uint64_t)result, ring);
	read->progress += (uint64_t)result;
	if (read->progress >= need) {
		/* Refused by the ring, but not by the same call of a worker. */
		if (read->state & TND__READ_REFUSED)
			tnd__source_retire_uring(read->source, "io_uring read refused",
						 read->ring_error);
		tnd__step_set(read, TND__STEP_DELIVER);
		if (ring && read->bounce)
			tnd__worker_queue(read->source->storage, read, true);
		else
			deliver(read);
		return false;
	}
	if (result == 0) {
		reached = span.low + read->progress;
		tnd__transfer_finish(read, TND_E_TRUNCATED, TND__MAX(reached, read->offset));
		return false;
	}
	if (read->progress % read->source->align == 0)
		return true;
	/*
	 * Ended inside a block: O_DIRECT cannot go on from here, and whether this is the file's end
	 * a buffered read tells.
	 */
	reroute(read);
	return false;
}

static void run_direct(struct tnd__read *read)
{
	struct tnd__span span = tnd__transfer_span(read);
	uint64_t length;
	int64_t got;
	int rc;

	read->progress = 0;
	do {
		length = TND__MIN(span.high - span.low - read->progress, CALL_MAX);
		rc = tnd__failpoint("storage.read.direct");
		got = rc < 0 ? rc
			     : pread(read->source->direct_fd, span.base + read->progress, length,
				     (off_t)(span.low + read->progress));
		if (got < 0 && rc == 0)
			got = -errno;
	} while (tnd__transfer_direct_result(read, got, false));
}

/* Return: bytes, -errno. */
static ssize_t read_once(struct tnd__read *read, unsigned char *base)
{
	struct tnd__source *source = read->source;
	struct iovec vec = {base + read->progress,
			    TND__MIN(read->bytes - read->progress, CALL_MAX)};
	off_t at = (off_t)(read->offset + read->progress);
	bool dontcache = read->state & TND__READ_WINDOW &&
			 !atomic_load_explicit(&source->dontcache_no, memory_order_relaxed);
	ssize_t got;
	int rc = tnd__failpoint("storage.read.buffered");

	if (rc < 0)
		return rc;
	if (dontcache) {
		rc = tnd__failpoint("storage.dontcache");
		got = rc < 0 ? (errno = -rc, -1)
			     : preadv2(source->buffered_fd, &vec, 1, at, RWF_DONTCACHE);
		if (got >= 0 || !unsupported(-errno))
			return got < 0 ? -errno : got;
		atomic_store_explicit(&source->dontcache_no, true, memory_order_relaxed);
	}
	got = pread(source->buffered_fd, vec.iov_base, vec.iov_len, at);
	return got < 0 ? -errno : got;
}

/* Return: 0, -errno, TND_E_TRUNCATED. */
static int read_buffered(struct tnd__read *read)
{
	unsigned char *base =
		read->bounce ? (unsigned char *)read->bounce + read->offset % TND__PAGE : read->dst;
	uint32_t again = 0;
	ssize_t got;

	while (read->progress < read->bytes) {
		got = read_once(read, base);
		if (got == 0)
			return TND_E_TRUNCATED;
		if (got > 0) {
			read->progress += (uint64_t)got;
			count_bytes(read, (uint64_t)got, false);
		} else if (got != -EINTR && (got != -EAGAIN || again++ == AGAIN_MAX)) {
			return (int)got;
		} else {
			sched_yield();
		}
	}
	return 0;
}

static void run_buffered(struct tnd__read *read)
{
	struct tnd__source *source = read->source;
	uint64_t dropped;
	int rc = read_buffered(read);

	if (read->state & TND__READ_WINDOW) {
		dropped = tnd__extent_drop(read);
		pthread_mutex_lock(&source->storage->lock);
		source->dropped_bytes += dropped;
		pthread_mutex_unlock(&source->storage->lock);
	}
	if (rc == 0)
		deliver(read);
	else
		tnd__transfer_finish(
			read, rc < 0 && rc != TND_E_TRUNCATED && read->status ? read->status : rc,
			read->offset + read->progress);
}

/* Without a bounce buffer what has a destination can still be read there through the page cache. */
static void run_nomem(struct tnd__read *read)
{
	bool retry = read->dst && !(read->state & TND__READ_NODIRECT);

	if (retry)
		reroute(read);
	else
		tnd__transfer_finish(read, -ENOMEM, read->offset);
}

void tnd__transfer_run(struct tnd__read *read)
{
	uint32_t step = read->state & TND__STEP_MASK;

	if (step != TND__STEP_DELIVER && step != TND__STEP_FINISH && tnd__transfer_cancelled(read))
		tnd__transfer_finish(read, TND_E_CANCELLED, read->offset);
	else if (step == TND__STEP_DIRECT)
		run_direct(read);
	else if (step == TND__STEP_BUFFERED)
		run_buffered(read);
	else if (step == TND__STEP_DELIVER)
		deliver(read);
	else if (step == TND__STEP_NOMEM)
		run_nomem(read);
	else
		tnd__transfer_finish(read, read->status, read->offset);
}
