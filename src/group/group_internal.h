/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group_internal.h - between the files of a group
 *
 *   group.c        options, create, attach, close
 *   board.c        the shared memory
 *   members.c      who is there and who is gone: what the service thread is told
 *   meet.c         posting, ending and waiting: every collective goes through here
 *   collective.c   the collectives
 *   handover.c     descriptors from one rank to all
 *
 * `lock` guards what the service thread and the caller both use. Nothing waits under it, and no
 * peer, watch or listener is closed under it.
 */
#ifndef TND_GROUP_INTERNAL_H
#define TND_GROUP_INTERNAL_H

#include "base/base.h"
#include "base/futex.h"
#include "board.h"
#include "service.h"

enum {
	TND__MEET_NONE,
	TND__MEET_READY,
	TND__MEET_BARRIER,
	TND__MEET_BROADCAST,
	TND__MEET_MIN,
	TND__MEET_AND,
	TND__MEET_AGREE,
	TND__MEET_FDS,
	TND__MEET_FDS_END,
	TND__MEET_KINDS
};

/* One collective as its caller gave it. */
struct tnd__meet {
	uint32_t kind; /* TND__MEET_* */
	uint32_t root;
	uint64_t bytes;
	uint64_t value;
};

/* Descriptors that came for hand-over `number`. */
struct tnd__inbox {
	uint64_t number; /* 0: none */
	uint32_t count;
	int fds[TND_GROUP_FDS_MAX];
};

struct tnd_group {
	struct tnd__board *board;
	int board_fd;
	uint32_t rank, rank_count;
	uint64_t forkmark;
	char name[TND__BOARD_NAME];
	char address[TND__ADDRESS_BYTES];

	_Atomic uint32_t busy; /* a thread is in a collective */
	_Atomic uint32_t cancelled;
	/* Bits of ranks, as this process knows them; the service thread sets them. */
	_Atomic uint64_t dead, left;
	_Atomic uint32_t watching; /* every other rank's death will be seen here */
	_Atomic int watch_error;   /* or why not */

	pthread_mutex_t lock;
	struct tnd__listener *listener; /* rank 0 */
	/* rank 0: of each rank; else only peers[0] */
	struct tnd__peer *peers[TND_GROUP_RANKS_MAX];
	/* rank 0: who has not come yet; else of all others but rank 0 */
	struct tnd__watch *watches[TND_GROUP_RANKS_MAX];
	uint64_t here; /* rank 0: bits of ranks that can be sent packets */
	struct tnd__inbox inbox;

	/* The calling thread's own. */
	struct tnd__spin spin;
	struct tnd__meet open; /* the caller's call that has not ended */
	bool posted;           /* ours for `number` is on the board */
	bool ready;
	uint32_t phase; /* of a hand-over, and what this rank will say of it */
	int code;
	uint64_t number; /* of the next collective, or the one that is open */
	int broken;      /* what every later call gives, and whose fault it is */
	uint32_t broken_rank;
	uint64_t values[TND_GROUP_RANKS_MAX]; /* what the ranks gave to the last collective */
};

static inline uint64_t tnd__rank_bit(uint32_t rank)
{
	return UINT64_C(1) << rank;
}

static inline uint64_t tnd__ranks_all(const struct tnd_group *group)
{
	return ~UINT64_C(0) >> (64 - group->rank_count);
}

static inline bool tnd__group_forked(const struct tnd_group *group)
{
	return group->forkmark != tnd__forkmark();
}

/* "rank 3", "ranks 1, 2 and 5". Return: out. */
const char *tnd__ranks_text(uint64_t ranks, char *out, size_t out_bytes);

/* -- members.c -- */

extern const struct tnd__peer_ops tnd__group_ops;

#define TND__GROUP_PROTOCOL 1u

enum {
	TND__GROUP_HELLO = 16,
	TND__GROUP_WELCOME,
	TND__GROUP_HERE,
	TND__GROUP_PIDFDS,
	TND__GROUP_GONE,
	TND__GROUP_FDS,
};

/* What packets carry; the same on all ranks, which are on one machine. */
struct tnd__hello_data {
	uint32_t protocol, board_version;
	uint32_t rank;
};
struct tnd__welcome_data {
	uint32_t rank_count;
};
struct tnd__pidfds_data {
	uint64_t ranks; /* whose descriptors these are, in their order */
	uint32_t last;
};
struct tnd__gone_data {
	uint64_t dead, left;
};
struct tnd__fds_data {
	uint64_t number;
	uint32_t count;
};

/* The callback of a watch: the process of rank `tag` has ended. */
void tnd__group_on_end(void *owner, uint64_t tag);
/* G5 and G7: everybody looks again. */
void tnd__group_wake(struct tnd_group *group);

/* -- meet.c -- */

/*
 * Takes the handle for a call of this thread, which must go on with one that is open.
 * Return: 0; TND_E_FORKED; -EBUSY; -ECANCELED; TND_E_INVALID; what broke the group.
 */
int tnd__meet_enter(struct tnd_group *group, const struct tnd__meet *meet,
		    struct tnd_error *reterr);
/* Gives it back. Return: rc. */
int tnd__meet_leave(struct tnd_group *group, int rc);

/*
 * Posts `meet` if this was not done, and waits for its end. Afterwards values[] holds what the
 * ranks gave.
 */
int tnd__meet_run(struct tnd_group *group, const struct tnd__meet *meet, int64_t deadline_ns,
		  struct tnd_error *reterr);

/*
 * Waits until `look` gives not 0: 1, or an error with its sentence.
 * Return: what look gave; -ETIMEDOUT, without a sentence.
 */
int tnd__meet_wait(struct tnd_group *group,
		   int (*look)(struct tnd_group *group, struct tnd_error *reterr),
		   int64_t deadline_ns, struct tnd_error *reterr);
/* Whether the collective that is open has ended. For tnd__meet_wait. */
int tnd__meet_look(struct tnd_group *group, struct tnd_error *reterr);

/* Makes `code` what every later call gives. Return: it, with its sentence. */
int tnd__meet_break(struct tnd_group *group, int code, uint32_t rank, struct tnd_error *reterr);
int tnd__meet_cancelled(struct tnd_group *group, struct tnd_error *reterr);

/* The first rank that gave something else than 0, as agree gives it. Return: its code; 0. */
int tnd__meet_first_code(struct tnd_group *group, struct tnd_error *reterr);

/* -- handover.c -- */

/* Service thread: descriptors came. Takes them out of `packet`. */
void tnd__handover_packet(struct tnd_group *group, uint32_t from, struct tnd__packet *packet);
void tnd__inbox_clear(struct tnd__inbox *inbox);

#endif
