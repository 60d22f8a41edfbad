/* SPDX-License-Identifier: Apache-2.0 */
/* futex.c - sleeping on one word, or on a shared and a private one at once */
#include <errno.h>
#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base.h"
#include "futex.h"

/* Headers before Linux 5.16 have neither. */
#define SYSCALL_WAITV 449
#define WAITV_32BIT 2u

struct waitv {
	uint64_t value;
	uint64_t address;
	uint32_t flags;
	uint32_t reserved;
};

/* Answers of the kernel that will not change: remembered. */
static _Atomic bool no_waitv;

/* NULL for none. The kernel refuses times before 0; they have passed anyhow. */
static const struct timespec *timeout_of(int64_t deadline_ns, struct timespec *time)
{
	if (deadline_ns == INT64_MAX)
		return NULL;
	tnd__ns_to_timespec(TND__MAX(deadline_ns, 0), time);
	return time;
}

int tnd__futex_wait(const _Atomic uint32_t *word, uint32_t expected, int64_t deadline_ns)
{
	struct timespec time;

	/* The bitset form takes an absolute time, on CLOCK_MONOTONIC. */
	if (syscall(SYS_futex, word, FUTEX_WAIT_BITSET, expected, timeout_of(deadline_ns, &time),
		    NULL, FUTEX_BITSET_MATCH_ANY) < 0 &&
	    errno == ETIMEDOUT)
		return -ETIMEDOUT;
	return 0;
}

/* Return: 0, -ETIMEDOUT, -ENOSYS (it cannot be had here). */
static int wait_both(const struct waitv waits[2], int64_t deadline_ns)
{
	struct timespec time;

	/* relaxed: a hint, and nothing is published through it. */
	if (atomic_load_explicit(&no_waitv, memory_order_relaxed))
		return -ENOSYS;
	if (tnd__failpoint("base.waitv") < 0)
		errno = ENOSYS;
	else if (syscall(SYSCALL_WAITV, waits, 2, 0, timeout_of(deadline_ns, &time),
			 CLOCK_MONOTONIC) >= 0)
		return 0;
	if (errno == ETIMEDOUT)
		return -ETIMEDOUT;
	if (errno != ENOSYS && errno != EPERM && errno != EINVAL)
		return 0;
	atomic_store_explicit(&no_waitv, true, memory_order_relaxed);
	return -ENOSYS;
}

int tnd__futex_wait_either(const _Atomic uint32_t *word, uint32_t expected,
			   const _Atomic uint32_t *local, uint32_t local_expected,
			   int64_t deadline_ns)
{
	const struct waitv waits[2] = {
		{.value = expected, .address = (uintptr_t)word, .flags = WAITV_32BIT},
		{.value = local_expected,
		 .address = (uintptr_t)local,
		 .flags = WAITV_32BIT | FUTEX_PRIVATE_FLAG},
	};
	int64_t until_ns;
	int rc = wait_both(waits, deadline_ns);

	if (rc != -ENOSYS)
		return rc;
	do {
		/* acquire: as strong as the look that the caller takes after a wake. */
		if (atomic_load_explicit(local, memory_order_acquire) != local_expected)
			return 0;
		until_ns = TND__MIN(deadline_ns, tnd__now_ns() + TND__FUTEX_SLICE_NS);
		if (tnd__futex_wait(word, expected, until_ns) == 0)
			return 0;
	} while (until_ns < deadline_ns);
	return -ETIMEDOUT;
}

/* Async-signal-safe: errno is left as it was. */
static void wake(const _Atomic uint32_t *word, int operation, int count)
{
	int saved = errno;

	syscall(SYS_futex, word, operation, count, NULL, NULL, 0);
	errno = saved;
}

void tnd__futex_wake(const _Atomic uint32_t *word, int count)
{
	wake(word, FUTEX_WAKE, count);
}

void tnd__futex_wake_local(const _Atomic uint32_t *word, int count)
{
	wake(word, FUTEX_WAKE_PRIVATE, count);
}
