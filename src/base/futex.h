/* SPDX-License-Identifier: Apache-2.0 */
/* futex.h - sleeping on words of memory, spinning before it, and knowing that one was forked */
#ifndef TND_FUTEX_H
#define TND_FUTEX_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* -- sleeping (futex.c) -- */

/*
 * Sleeps while *word == expected, until woken or `deadline_ns` (CLOCK_MONOTONIC, INT64_MAX: none).
 * Words may be in read-only mappings; they are shared between processes.
 * Return: 0 (woken, or the value differs, or a signal: look again), -ETIMEDOUT.
 */
int tnd__futex_wait(const _Atomic uint32_t *word, uint32_t expected, int64_t deadline_ns);

/*
 * The same on two words at once: wakes when either changes. `local`: private to the process. Where
 * the kernel has no futex_waitv (before 5.16, or refused), sleeps on `word` in slices of
 * TND__FUTEX_SLICE_NS between looks at `local`.
 */
#define TND__FUTEX_SLICE_NS INT64_C(20000000)
int tnd__futex_wait_either(const _Atomic uint32_t *word, uint32_t expected,
			   const _Atomic uint32_t *local, uint32_t local_expected,
			   int64_t deadline_ns);

/* Wakes up to `count` sleepers; async-signal-safe. `_local`: those on a `local` word. */
void tnd__futex_wake(const _Atomic uint32_t *word, int count);
void tnd__futex_wake_local(const _Atomic uint32_t *word, int count);

/* -- spinning (spin.c) -- */

/*
 * Spins only as long as it pays: remembers how long the last waits took, and does not spin beyond
 * `limit_ns`, nor where only one processor may be used. One per waiting side of a handle.
 */
struct tnd__spin {
	int64_t limit_ns;  /* 0: never spins */
	bool fixed;        /* always that long: the caller knows better */
	int64_t period_ns; /* moving average of what a wait takes */
	bool streams;      /* objects come one after the other: see channel/wait.c */
	uint32_t waits;
};

/* `limit_ns`: 0 for the default, UINT64_MAX for none at all; else always that long. */
void tnd__spin_init(struct tnd__spin *spin, uint64_t limit_ns);
/*
 * Spinning beyond this the processor is offered to others at each look at the clock: a call that
 * costs little where nobody wants it, and with more processes than processors lets the one run that
 * is waited for.
 */
#define TND__SPIN_ALONE_NS INT64_C(1000)
/* How long a wait that begins now should spin. */
int64_t tnd__spin_budget(const struct tnd__spin *spin);
/* What the wait took in all. */
void tnd__spin_learn(struct tnd__spin *spin, int64_t waited_ns);
/*
 * One short pause while *word == expected: umwait where the processor has it, else pause/yield.
 * `word` is what the waiter polls; NULL where it polls several.
 */
void tnd__spin_pause(const _Atomic uint64_t *word, uint64_t expected);

/* -- fork (forkmark.c) -- */

/*
 * A number that no process shares with its parent: differs in a forked child, at the cost of one
 * load (a page that the kernel wipes on fork). 0 where no page could be had.
 */
uint64_t tnd__forkmark(void);
/* Before handles are made; idempotent, MT-safe. Return: 0, -ENOMEM. */
int tnd__forkmark_init(void);

#endif
