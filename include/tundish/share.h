/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tundish/share.h - a node's reader: each byte that its members need is read once, into slabs that
 * all of them see
 *
 *   one process      union plan --> tnd_share_open (an address) --> end --> close
 *                                       |  as a string
 *   each member      its plan ----> tnd_load_open (opts.share) --> next, release ... --> end
 *
 *     storage --> slab 7 [#####.....]   being read
 *                 slab 6 [##########]   announced: rank 0 and 2 take their slices
 *                 slab 5 [##########]   rank 1 is still here: the slowest sets the pace
 *                 slab 4                free once nobody holds it, read into next
 *
 * Members are the ranks that the union plan was made for; the reading process may be one of them,
 * with a load of its own. Reading begins at once and waits for members that come late, as far as
 * the budget goes. A member that leaves early (tnd_load_close, tnd_load_cancel) frees its share at
 * once. The death of a member, or that its load has failed, is told to all others within a second,
 * by rank.
 *
 * Guests (TND_LOAD_F_GUEST) are other processes that load the same files: they take what passes
 * from when they attached on, and never make anybody wait: one that lags is let go and reads the
 * rest itself.
 *
 * The budget is the node's: slabs, reads in flight, the ring, and what each member sets aside for
 * its tables and for slices that it has to gather.
 *
 * Threads: end from one thread; the others are MT-safe. Processes: belongs to the one that opened
 * it.
 */
#ifndef TUNDISH_SHARE_H
#define TUNDISH_SHARE_H

#include <tundish/load.h>

#ifdef __cplusplus
extern "C" {
#endif

struct tnd_share;

/* on_dead: when a member dies, is let go by evict_ns, or does not come within meet_ns */
#define TND_SHARE_DEAD_FAIL 0u     /* all loads end with an error that names it */
#define TND_SHARE_DEAD_CONTINUE 1u /* the others go on without it */

#define TND_SHARE_MEMBERS_MAX 56
#define TND_SHARE_GUESTS_MAX 8

struct tnd_share_opts {
	uint32_t struct_bytes; /* set by the caller */
	uint32_t on_dead;      /* TND_SHARE_DEAD_* */
	const char *address; /* "unix:@NAME" or "unix:/PATH" (group.h); NULL: a fresh one; copied */
	/*
	 * How to read; nullable, copied. Used: flags (TND_LOAD_F_KEEP_CACHE), engine, direct,
	 * thread_count, queue_depth, numa, cpus, budget, deadline_ns.
	 */
	const struct tnd_load_opts *load;
	int64_t meet_ns;  /* longest that a member may not have come; 0: 120 s; < 0: no limit */
	int64_t stall_ns; /* longest that members keep every slab; 0: 120 s; < 0: no limit */
	int64_t evict_ns; /* a member that holds the others up for longer is let go; 0: never */
};

/*
 * Starts reading `plan`, which tnd_plan_create_union() made: referenced until close. `opts`:
 * nullable, borrowed for the call.
 * Blocking: bounded. Return: 0; TND_E_INVALID (not a union plan, options); TND_E_BUDGET;
 * TND_E_HEADROOM; TND_E_ADDRESS; -EADDRINUSE; -ENOMEM; -errno.
 */
TND_API int tnd_share_open(struct tnd_plan *plan, const struct tnd_share_opts *opts,
			   struct tnd_share **ret_share, struct tnd_error *reterr);

/* What members give as opts.share; borrowed until close. */
TND_API const char *tnd_share_address(const struct tnd_share *share);

/* Ends it soon, for every member: TND_E_CANCELLED. Async-signal-safe. Blocking: never. */
TND_API void tnd_share_cancel(struct tnd_share *share);

/*
 * Waits until everything is read and every member has taken or left it, then stops every thread.
 * Idempotent. Not before this process's own load of it is through, which would wait for ever.
 * Blocking: may sleep. Return: 0; the first error, as members get it: TND_E_PEER_DEAD
 * (reterr->rank), TND_E_EVICTED (who was let go), TND_E_DEADLINE (who did not come, or keeps
 * slabs), TND_E_CANCELLED, TND_E_CHANGED, -EIO ...
 */
TND_API int tnd_share_end(struct tnd_share *share, struct tnd_error *reterr);

/*
 * Frees. Before end: cancels; members get TND_E_CANCELLED. NULL is allowed. Blocking: bounded.
 */
TND_API void tnd_share_close(struct tnd_share *share);

/*
 * Figures of this moment, after end of the whole: those of a load that delivers to nobody.
 * Return: 0; TND_E_INVALID (struct_bytes).
 */
TND_API int tnd_share_stats(struct tnd_share *share, struct tnd_load_stats *ret_stats);

/*
 * What the reader did (docs/format/json.md, `share` in tundish.load/1). *ret_text: transferred,
 * free(). Return: 0; TND_E_INVALID (before end); -ENOMEM.
 */
TND_API int tnd_share_report_json(struct tnd_share *share, char **ret_text);

#ifdef __cplusplus
}
#endif
#endif
