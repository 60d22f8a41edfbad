/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tundish/group.h - the ranks of a node as processes: meeting, liveness, small collectives
 *
 *   first rank:   create (an address) ... ready ... collectives ... close
 *                    | the address as a string: argv, environment, a file
 *   other ranks:  attach             ... ready ... collectives ... close
 *
 * An address is "unix:@NAME" (abstract socket: one network namespace) or "unix:/PATH" (across
 * containers that share the folder). It works for processes that were spawned, forked or started
 * apart, also in other pid namespaces, as long as they run as the same user; both sides check that.
 *
 * Collectives are called by every rank in the same order; a rank that calls another one than the
 * rest gets TND_E_ORDER, as all do. The death of any rank ends every wait with TND_E_PEER_DEAD and
 * its rank within 200 ms, and every later call at once. A stopped process (SIGSTOP) is not a dead
 * one.
 *
 * Deadlines are CLOCK_MONOTONIC ns; 0 does not wait; TND_NO_DEADLINE waits for ever. A collective
 * that ends with -ETIMEDOUT or -ECANCELED may be called again with the same arguments: it goes on
 * where it was.
 *
 * Threads: one thread in collectives of a handle at a time (-EBUSY for the others);
 * tnd_group_cancel from any thread or a signal handler. A process that has opened a group or a
 * channel has one service thread, with all signals blocked.
 * Processes: a handle used after fork gives TND_E_FORKED; close of one frees what is local.
 */
#ifndef TUNDISH_GROUP_H
#define TUNDISH_GROUP_H

#include <tundish/error.h>
#include <tundish/time.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TND_GROUP_RANKS_MAX 64
#define TND_GROUP_BYTES_MAX 65536 /* most bytes of one broadcast */
#define TND_GROUP_FDS_MAX 16      /* most descriptors of one hand-over */

struct tnd_group;

struct tnd_group_opts {
	uint32_t struct_bytes;
	uint32_t rank_count; /* 1 to TND_GROUP_RANKS_MAX */
	const char *address; /* nullable: a fresh "unix:@..."; copied */
	const char *name;    /* shown in messages; nullable; copied */
};

/*
 * Opens a group as rank 0. `opts`: borrowed for the call.
 * Blocking: never. Return: 0; TND_E_INVALID; TND_E_ADDRESS; -EADDRINUSE (a live process listens
 * there); TND_E_HEADROOM; -errno.
 */
TND_API int tnd_group_create(const struct tnd_group_opts *opts, struct tnd_group **ret_group,
			     struct tnd_error *reterr);

/*
 * Joins as `rank` (1 to rank_count - 1). Waits until `deadline_ns` for somebody to listen.
 * Blocking: may sleep. Return: 0; -ETIMEDOUT (nobody listens there: the sentence says so);
 * TND_E_ADDRESS; TND_E_VERSION; TND_E_DENIED; TND_E_PLACE (rank out of range or taken);
 * TND_E_CLOSED; TND_E_PEER_DEAD; -errno.
 */
TND_API int tnd_group_attach(const char *address, uint32_t rank, int64_t deadline_ns,
			     struct tnd_group **ret_group, struct tnd_error *reterr);

/* Leaves. The others' later collectives give TND_E_CLOSED. NULL is allowed. */
TND_API void tnd_group_close(struct tnd_group *group);

/* Borrowed until close. */
TND_API const char *tnd_group_address(const struct tnd_group *group);
TND_API uint32_t tnd_group_rank(const struct tnd_group *group);
TND_API uint32_t tnd_group_rank_count(const struct tnd_group *group);

/*
 * Rank 0 only: `pid` (in our pid namespace) is the process that will attach as `rank`. Its death
 * before it has attached then ends waits like a death after that.
 * Blocking: never. Return: 0; TND_E_INVALID (rank); -ESRCH (no such process); -errno.
 */
TND_API int tnd_group_expect(struct tnd_group *group, uint32_t rank, int32_t pid,
			     struct tnd_error *reterr);

/*
 * Until every rank has attached and knows that all have.
 * Blocking: may sleep. Return: 0; -ETIMEDOUT (the sentence names the ranks that are missing);
 * TND_E_PEER_DEAD; TND_E_CLOSED; TND_E_CORRUPT (the shared memory); -ECANCELED; -EBUSY;
 * TND_E_FORKED; -errno (the other ranks cannot be watched).
 */
TND_API int tnd_group_ready(struct tnd_group *group, int64_t deadline_ns, struct tnd_error *reterr);

/*
 * Collectives. All may sleep.
 * Return: 0; -ETIMEDOUT (the sentence names the ranks that are late); TND_E_PEER_DEAD
 * (reterr->rank); TND_E_CLOSED; TND_E_ORDER; TND_E_CORRUPT (the shared memory); -ECANCELED; -EBUSY;
 * TND_E_FORKED; TND_E_INVALID.
 */
TND_API int tnd_group_barrier(struct tnd_group *group, int64_t deadline_ns,
			      struct tnd_error *reterr);
/*
 * `bytes` bytes at `data` go from rank `root` to all; the same `bytes`, 0 to TND_GROUP_BYTES_MAX,
 * on every rank.
 */
TND_API int tnd_group_broadcast(struct tnd_group *group, uint32_t root, void *data, uint64_t bytes,
				int64_t deadline_ns, struct tnd_error *reterr);
/* The least of the ranks' `value`; *ret_rank (nullable): the lowest rank that has it. */
TND_API int tnd_group_min(struct tnd_group *group, uint64_t value, int64_t deadline_ns,
			  uint64_t *ret_value, uint32_t *ret_rank, struct tnd_error *reterr);
/* The bits that all ranks have set. */
TND_API int tnd_group_and(struct tnd_group *group, uint64_t value, int64_t deadline_ns,
			  uint64_t *ret_value, struct tnd_error *reterr);
/*
 * All or nothing: `code` is 0 for "I can", else the reason why not. Every rank returns the same: 0
 * if all gave 0, else the code of the lowest rank that did not, with that rank in reterr->rank.
 */
TND_API int tnd_group_agree(struct tnd_group *group, int code, int64_t deadline_ns,
			    struct tnd_error *reterr);
/*
 * Hands `fd_count` (<= TND_GROUP_FDS_MAX, the same on every rank) descriptors of rank `root` to all
 * others: fds[] is read on root, and filled elsewhere with descriptors that are close-on-exec and
 * the caller's to close. Return: also, on all ranks and with the rank in reterr->rank, why one
 * could not: -EBADF; -EMFILE; -ENOMEM; -errno.
 */
TND_API int tnd_group_share_fds(struct tnd_group *group, uint32_t root, int *fds, uint32_t fd_count,
				int64_t deadline_ns, struct tnd_error *reterr);

/*
 * Ends a wait of this handle, now or the next one, with -ECANCELED; sticky until tnd_group_rearm.
 * NULL is allowed; in a forked child both do nothing. Async-signal-safe, MT-safe.
 */
TND_API void tnd_group_cancel(struct tnd_group *group);
TND_API void tnd_group_rearm(struct tnd_group *group);

#ifdef __cplusplus
}
#endif
#endif
