/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tundish/budget.h - one account in bytes, with a hard bound
 *
 * Everything that a load keeps in host memory is charged here before it is taken: slabs, bounce and
 * staging buffers, I/O rings, headers and plans, and page cache that is brought in. charged <=
 * bound always; the only exceptions are charges that say so (TND_CHARGE_F_OVERRUN,
 * TND_CHARGE_F_ALONE), and each is counted.
 *
 *   create -> charge / refund ... -> close
 *
 * A charge that does not fit waits, first come first served (a small charge does not overtake a
 * large one that waits); one that can never fit fails at once. A keyed charge counts its bytes once
 * however many times the key is charged, until it was refunded as many times: a slab from which
 * many copies run is one charge.
 *
 * Threads: MT-safe. Processes: one process; after fork the child must not use it.
 */
#ifndef TUNDISH_BUDGET_H
#define TUNDISH_BUDGET_H

#include <tundish/error.h>

#ifdef __cplusplus
extern "C" {
#endif

struct tnd_budget;

#define TND_CHARGE_F_OVERRUN 1u /* never waits: goes over the bound if it must, counted */
#define TND_CHARGE_F_ALONE 2u   /* above the whole bound: waits until nothing is charged, counted */
#define TND_CHARGE_F_TRY 4u     /* never waits: -EAGAIN where it would */

struct tnd_charge_opts {
	uint32_t struct_bytes;
	uint32_t flags;              /* TND_CHARGE_F_* */
	int64_t deadline_ns;         /* absolute, CLOCK_MONOTONIC; 0: none */
	int (*cancelled)(void *arg); /* nullable; looked at before waiting and at each wake-up */
	void *cancelled_arg;         /* borrowed for the call */
};

struct tnd_budget_stats {
	uint32_t struct_bytes; /* set by the caller */
	uint32_t waiters;      /* charges waiting now */
	uint64_t bound_bytes;
	uint64_t charged_bytes; /* now */
	uint64_t peak_bytes;    /* high-water mark of charged_bytes */
	uint64_t overruns;      /* charges that went over the bound */
	uint64_t overrun_bytes; /* sum over those of the bytes above the bound after each */
	uint64_t waits;         /* charges that had to wait */
	uint64_t wait_ns;       /* summed */
};

/*
 * Makes an account. `bound_bytes`: > 0.
 * Blocking: never. Return: 0; TND_E_INVALID (a bound of 0); -ENOMEM.
 */
TND_API int tnd_budget_create(uint64_t bound_bytes, struct tnd_budget **ret_budget);

/*
 * Drops the caller's reference; the account lives on until what is charged to it by pools has been
 * refunded. NULL is allowed. Blocking: never.
 */
TND_API void tnd_budget_close(struct tnd_budget *budget);

/*
 * Charges `bytes` (0 is allowed). `opts`: nullable, borrowed for the call.
 * Blocking: may sleep until it fits.
 * Return: 0; TND_E_BUDGET (more than the bound, without F_OVERRUN or F_ALONE); TND_E_DEADLINE;
 * TND_E_CANCELLED; -EAGAIN (F_TRY); TND_E_INVALID (struct_bytes, unknown flags).
 */
TND_API int tnd_budget_charge(struct tnd_budget *budget, uint64_t bytes,
			      const struct tnd_charge_opts *opts);

/*
 * Gives `bytes` back and wakes waiters. More than is charged is a bug of the caller: asserted,
 * clamped in release. Blocking: never.
 */
TND_API void tnd_budget_refund(struct tnd_budget *budget, uint64_t bytes);

/*
 * The same under a key (an address, say). The first charge of a key charges `bytes`; later ones
 * only count. A second caller of a key whose first charge still waits waits with it.
 * Blocking: may sleep until it fits. Return: as tnd_budget_charge, and -ENOMEM.
 */
TND_API int tnd_budget_charge_key(struct tnd_budget *budget, uint64_t key, uint64_t bytes,
				  const struct tnd_charge_opts *opts);

/*
 * Gives one charge of `key` back; the last refunds the bytes.
 * Blocking: never. Return: 0; -ENOENT (key not charged).
 */
TND_API int tnd_budget_refund_key(struct tnd_budget *budget, uint64_t key);

/* Wakes all waiters so that they look at their `cancelled` again. Blocking: never. */
TND_API void tnd_budget_wake(struct tnd_budget *budget);

/* Figures of this moment. Blocking: never. Return: 0; TND_E_INVALID (struct_bytes). */
TND_API int tnd_budget_stats(struct tnd_budget *budget, struct tnd_budget_stats *ret_stats);

/* Peak becomes what is charged now; counters become zero. Blocking: never. */
TND_API void tnd_budget_reset(struct tnd_budget *budget);

#ifdef __cplusplus
}
#endif
#endif
