/* SPDX-License-Identifier: Apache-2.0 */
/*
 * forkmark.c - a number that a forked child does not share with its parent
 *
 * It is in a page that the kernel wipes on fork, so that children of clone() and of languages with
 * a fork of their own are known as well. A child that finds 0 counts on from its ancestors'
 * numbers: the counter is in memory that it did inherit.
 */
#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>

#include "base.h"
#include "futex.h"

static _Atomic(_Atomic uint64_t *) page;
static _Atomic uint64_t last;

static uint64_t take_number(_Atomic uint64_t *mark)
{
	/* relaxed: the number publishes nothing. Threads of a new child agree on the first. */
	uint64_t none = 0, fresh = atomic_fetch_add_explicit(&last, 1, memory_order_relaxed) + 1;

	if (atomic_compare_exchange_strong_explicit(mark, &none, fresh, memory_order_relaxed,
						    memory_order_relaxed))
		return fresh;
	return none;
}

uint64_t tnd__forkmark(void)
{
	/* acquire: pairs with the release in tnd__forkmark_init(), after the page was advised. */
	_Atomic uint64_t *mark = atomic_load_explicit(&page, memory_order_acquire);
	uint64_t number;

	if (!mark)
		return 0;
	number = atomic_load_explicit(mark, memory_order_relaxed);
	return number ? number : take_number(mark);
}

static void wipe(void)
{
	/* relaxed: a forked child has one thread. */
	_Atomic uint64_t *mark = atomic_load_explicit(&page, memory_order_relaxed);

	if (mark)
		atomic_store_explicit(mark, 0, memory_order_relaxed);
}

int tnd__forkmark_init(void)
{
	_Atomic uint64_t *none = NULL, *fresh;
	void *memory;

	/* acquire: as tnd__forkmark(). */
	if (atomic_load_explicit(&page, memory_order_acquire))
		return 0;
	memory = tnd__failpoint("base.forkmark") < 0 ? MAP_FAILED
						     : mmap(NULL, TND__PAGE, PROT_READ | PROT_WRITE,
							    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		return -ENOMEM;
	/* Kernels that do not know the advice (gVisor) at least have fork() of libc. */
	if (madvise(memory, TND__PAGE, MADV_WIPEONFORK) != 0 && pthread_atfork(NULL, NULL, wipe)) {
		munmap(memory, TND__PAGE);
		return -ENOMEM;
	}
	fresh = memory;
	/* release: pairs with the acquire of tnd__forkmark(). */
	if (!atomic_compare_exchange_strong_explicit(&page, &none, fresh, memory_order_release,
						     memory_order_relaxed))
		munmap(memory, TND__PAGE);
	return 0;
}
