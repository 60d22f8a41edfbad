/* SPDX-License-Identifier: Apache-2.0 */
/*
 * uring.c - the ring and the one thread that owns it
 *
 *   queue() --lock--> pending --.                      .--> direct_result() -> done, or a worker
 *      `--- eventfd, if the      `--> sqe -> kernel -> cqe
 *           thread may sleep            ring thread
 *
 * Only this thread submits. Kernel helper threads of a ring belong to the thread that submitted,
 * inherit its processors and live as long as it does: submitted from here they are free of the
 * caller's pinning and gone when we have joined this thread. It also needs no lock around the ring.
 *
 * Asleep it waits in the kernel for a completion, of which a read of the eventfd is one.
 *
 * A ring that refuses to submit is broken: what it has not taken goes to the workers, what it has
 * is waited for in the completion queue's memory, and no read comes here any more.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <tnd_config.h>

#include "storage/engine.h"

#if TND_HAVE_URING
#include <liburing.h>

#define SUBMIT_TRIES 100
#define SUBMIT_PAUSE_NS 1000000
#define BROKEN_POLL_NS 200000
#define LENGTH_MAX TND__MIB(1024)

/* user_data of the eventfd's read; reads are pointers. */
#define WAKE_DATA 1

struct tnd__uring {
	struct tnd__storage *storage;
	struct io_uring ring;
	pthread_t thread;
	int wake_fd;
	uint64_t wake_value;
	int rc; /* of setup, then `ready` */
	uint32_t depth, flying, unsent_count;
	struct io_uring_sqe **unsent; /* prepared, not yet taken by the kernel */
	/* under the storage's lock */
	struct tnd__queue pending;
	bool ready, stop, woken;
	bool broken; /* written by the ring's thread only, which reads it without the lock */
};

/* Room for depth + 1 entries was made at setup, so there is always one. */
static struct io_uring_sqe *entry(struct tnd__uring *uring)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&uring->ring);

	uring->unsent[uring->unsent_count++] = sqe;
	return sqe;
}

static void arm_wake(struct tnd__uring *uring)
{
	struct io_uring_sqe *sqe = entry(uring);

	io_uring_prep_read(sqe, uring->wake_fd, &uring->wake_value, sizeof(uring->wake_value), 0);
	sqe->user_data = WAKE_DATA;
}

static void prepare(struct tnd__uring *uring, struct tnd__read *read)
{
	struct tnd__span span = tnd__transfer_span(read);
	uint64_t length = TND__MIN(span.high - span.low - read->progress, LENGTH_MAX);
	struct io_uring_sqe *sqe = entry(uring);

	io_uring_prep_read(sqe, read->source->direct_fd, span.base + read->progress,
			   (unsigned)length, span.low + read->progress);
	sqe->user_data = (uintptr_t)read;
	uring->flying++;
}

static void hand_to_worker(struct tnd__uring *uring, struct tnd__read *read, int error)
{
	read->state |= TND__READ_REFUSED;
	read->ring_error = error;
	tnd__worker_queue(uring->storage, read, true);
}

static void start_one(struct tnd__uring *uring, struct tnd__read *read)
{
	if (tnd__transfer_cancelled(read))
		tnd__transfer_finish(read, TND_E_CANCELLED, read->offset);
	else if (uring->broken || uring->flying == uring->depth)
		hand_to_worker(uring, read, -EBUSY);
	else
		prepare(uring, read);
}

/*
 * New reads into the ring, until there are none: one that ends here gives back what it held, and a
 * read that waited for that is queued by this very thread, which nobody would wake for it. Return:
 * false: asked to stop.
 */
static bool take_pending(struct tnd__uring *uring)
{
	struct tnd__storage *storage = uring->storage;
	struct tnd__queue taken;
	struct tnd__read *read;
	bool stop;

	do {
		pthread_mutex_lock(&storage->lock);
		taken = uring->pending;
		uring->pending = (struct tnd__queue){0};
		stop = uring->stop;
		pthread_mutex_unlock(&storage->lock);
		read = taken.head;
		for (struct tnd__read *one; (one = tnd__queue_pop(&taken));)
			start_one(uring, one);
	} while (read);
	return !stop;
}

/* The kernel takes entries in order. */
static void sent(struct tnd__uring *uring, uint32_t count)
{
	count = TND__MIN(count, uring->unsent_count);
	uring->unsent_count -= count;
	memmove(uring->unsent, uring->unsent + count,
		uring->unsent_count * sizeof(uring->unsent[0]));
}

static void break_ring(struct tnd__uring *uring, int error)
{
	struct tnd__storage *storage = uring->storage;

	atomic_store_explicit(&storage->uring_ok, false, memory_order_relaxed);
	pthread_mutex_lock(&storage->lock);
	uring->broken = true;
	snprintf(storage->uring_reason, sizeof(storage->uring_reason), "io_uring stopped: %s",
		 tnd_strerror(error));
	pthread_mutex_unlock(&storage->lock);
	for (uint32_t i = 0; i < uring->unsent_count; i++) {
		struct io_uring_sqe *sqe = uring->unsent[i];
		uint64_t data = sqe->user_data;

		/* Should the kernel come back for it after all, it must not write anywhere. */
		io_uring_prep_nop(sqe);
		sqe->user_data = 0;
		if (data == WAKE_DATA)
			continue;
		uring->flying--;
		hand_to_worker(uring, (struct tnd__read *)(uintptr_t)data, error);
	}
	uring->unsent_count = 0;
}

static void submit_and_wait(struct tnd__uring *uring)
{
	struct timespec pause = {0, SUBMIT_PAUSE_NS};
	int rc = 0;

	for (int i = 0; i < SUBMIT_TRIES; i++) {
		rc = tnd__failpoint("storage.uring.submit");
		if (rc == 0)
			rc = io_uring_submit_and_wait(&uring->ring, 1);
		if (rc >= 0) {
			sent(uring, (uint32_t)rc);
			return;
		}
		if (rc == -EINTR || io_uring_cq_ready(&uring->ring))
			return;
		if (rc != -EAGAIN && rc != -EBUSY)
			break;
		nanosleep(&pause, NULL);
	}
	break_ring(uring, rc);
}

static void complete(struct tnd__uring *uring, uint64_t data, int result)
{
	struct tnd__read *read;
	int rc;

	if (data == 0)
		return;
	if (data == WAKE_DATA) {
		pthread_mutex_lock(&uring->storage->lock);
		uring->woken = false;
		pthread_mutex_unlock(&uring->storage->lock);
		if (result < 0 && result != -EINTR && result != -EAGAIN)
			break_ring(uring, result);
		if (!uring->broken)
			arm_wake(uring);
		return;
	}
	rc = tnd__failpoint("storage.uring.cqe");
	if (rc < 0)
		result = rc;
	read = (struct tnd__read *)(uintptr_t)data;
	uring->flying--;
	if (tnd__transfer_direct_result(read, result, true)) {
		if (uring->broken)
			hand_to_worker(uring, read, -EBUSY);
		else
			prepare(uring, read);
	}
}

static void reap(struct tnd__uring *uring)
{
	struct io_uring_cqe *cqe;

	while (io_uring_peek_cqe(&uring->ring, &cqe) == 0 && cqe) {
		uint64_t data = cqe->user_data;
		int result = cqe->res;

		io_uring_cqe_seen(&uring->ring, cqe);
		complete(uring, data, result);
	}
}

/*
 * Without its kernel side: what it has taken is waited for. Nothing new comes: queue() sees
 * `broken` under the lock.
 */
static void run_broken(struct tnd__uring *uring)
{
	struct timespec pause = {0, BROKEN_POLL_NS};

	take_pending(uring);
	while (uring->flying) {
		reap(uring);
		nanosleep(&pause, NULL);
	}
}

static int setup(struct tnd__uring *uring)
{
	struct io_uring_probe *probe;
	struct io_uring_cqe *cqe;
	bool can_read;
	int rc = tnd__failpoint("storage.uring.setup");

	if (rc < 0)
		return rc;
	rc = io_uring_queue_init(uring->depth + 2, &uring->ring, 0);
	if (rc < 0)
		return rc;
	probe = io_uring_get_probe_ring(&uring->ring);
	can_read = probe && io_uring_opcode_supported(probe, IORING_OP_READ);
	io_uring_free_probe(probe);
	rc = can_read ? 0 : -EOPNOTSUPP;
	/* Setup may be allowed and use refused: one empty round trip shows it. */
	if (rc == 0 && (uring->ring.features & IORING_FEAT_NODROP)) {
		io_uring_prep_nop(io_uring_get_sqe(&uring->ring));
		rc = io_uring_submit_and_wait(&uring->ring, 1);
		if (rc >= 0)
			rc = io_uring_wait_cqe(&uring->ring, &cqe);
		if (rc == 0)
			io_uring_cqe_seen(&uring->ring, cqe);
	} else if (rc == 0) {
		rc = -EOPNOTSUPP;
	}
	if (rc < 0)
		io_uring_queue_exit(&uring->ring);
	return rc;
}

static void *ring_thread(void *arg)
{
	struct tnd__uring *uring = arg;
	struct tnd__storage *storage = uring->storage;
	int rc;

	tnd__thread_settle(storage, "tnd-io-ring");
	rc = setup(uring);
	pthread_mutex_lock(&storage->lock);
	uring->rc = rc;
	uring->ready = true;
	pthread_cond_broadcast(&storage->room);
	pthread_mutex_unlock(&storage->lock);
	if (rc < 0)
		return NULL;
	arm_wake(uring);
	while (!uring->broken && take_pending(uring)) {
		submit_and_wait(uring);
		reap(uring);
	}
	if (uring->broken)
		run_broken(uring);
	io_uring_queue_exit(&uring->ring);
	return NULL;
}

static void uring_free(struct tnd__uring *uring)
{
	if (uring->wake_fd >= 0)
		close(uring->wake_fd);
	free(uring->unsent);
	free(uring);
}

static struct tnd__uring *uring_alloc(struct tnd__storage *storage)
{
	struct tnd__uring *uring = NULL;

	if (tnd__failpoint("storage.alloc") == 0)
		uring = calloc(1, sizeof(*uring));
	if (!uring)
		return NULL;
	uring->storage = storage;
	uring->depth = storage->opts.queue_depth;
	uring->unsent = calloc(uring->depth + 2, sizeof(struct io_uring_sqe *));
	uring->wake_fd = eventfd(0, EFD_CLOEXEC);
	if (!uring->unsent || uring->wake_fd < 0) {
		uring_free(uring);
		return NULL;
	}
	return uring;
}

int tnd__uring_open(struct tnd__storage *storage)
{
	struct tnd__uring *uring = uring_alloc(storage);
	int rc = uring ? 0 : -ENOMEM;

	if (rc == 0)
		rc = tnd__thread_start(ring_thread, uring, &uring->thread);
	if (rc == 0) {
		pthread_mutex_lock(&storage->lock);
		while (!uring->ready)
			pthread_cond_wait(&storage->room, &storage->lock);
		rc = uring->rc;
		pthread_mutex_unlock(&storage->lock);
		if (rc < 0)
			pthread_join(uring->thread, NULL);
	}
	if (rc < 0) {
		snprintf(storage->uring_reason, sizeof(storage->uring_reason),
			 "io_uring refused: %s", tnd_strerror(rc));
		if (uring)
			uring_free(uring);
		return rc;
	}
	storage->uring = uring;
	return 0;
}

static void wake(struct tnd__uring *uring)
{
	uint64_t one = 1;

	/* Cannot fail: the counter is far from full. */
	while (write(uring->wake_fd, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

void tnd__uring_queue(struct tnd__storage *storage, struct tnd__read *read)
{
	struct tnd__uring *uring = storage->uring;
	bool must_wake;

	pthread_mutex_lock(&storage->lock);
	if (uring->broken) {
		pthread_mutex_unlock(&storage->lock);
		tnd__worker_queue(storage, read, false);
		return;
	}
	tnd__queue_push(&uring->pending, read);
	must_wake = !uring->woken && !pthread_equal(pthread_self(), uring->thread);
	uring->woken |= must_wake;
	pthread_mutex_unlock(&storage->lock);
	if (must_wake)
		wake(uring);
}

void tnd__uring_close(struct tnd__storage *storage)
{
	struct tnd__uring *uring = storage->uring;

	if (!uring)
		return;
	pthread_mutex_lock(&storage->lock);
	uring->stop = true;
	pthread_mutex_unlock(&storage->lock);
	wake(uring);
	pthread_join(uring->thread, NULL);
	uring_free(uring);
	storage->uring = NULL;
}
#else
int tnd__uring_open(struct tnd__storage *storage)
{
	snprintf(storage->uring_reason, sizeof(storage->uring_reason),
		 "io_uring is not part of this build");
	return -ENOSYS;
}

/* Never reached: storage->uring_ok stays false. */
void tnd__uring_queue(struct tnd__storage *storage, struct tnd__read *read)
{
	tnd__worker_queue(storage, read, false);
}

void tnd__uring_close(struct tnd__storage *storage)
{
	(void)storage;
}
#endif
