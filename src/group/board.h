/* SPDX-License-Identifier: Apache-2.0 */
/*
 * board.h - the memory that the ranks of a group share; docs/format/group.md has the table
 *
 *   +--------+------+-----------------+---------------+----------------+
 *   | header | ends | word, sleepers  | rows, 64 of   | data, 2 of     |
 *   | 128 B  | 128 B| 128 B           | 128 B         | 64 KiB         |
 *   +--------+------+-----------------+---------------+----------------+
 *
 * Collective n uses the first or second of everything that there is two of, by n & 1. Nobody posts
 * n + 2 before all have read n, since n + 2 comes after the end of n + 1, for which all had to
 * post n + 1, which each does after reading n.
 *
 * Every rank can write all of it: what is read is loaded once and checked.
 */
#ifndef TND_BOARD_H
#define TND_BOARD_H

#include <assert.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include <tundish/group.h>

#define TND__BOARD_MAGIC UINT64_C(0x31505247444e54ff) /* "\xffTNDGRP1" */
#define TND__BOARD_VERSION 1u
#define TND__BOARD_NAME 64

/* What one rank brings to one collective. */
struct tnd__post {
	_Atomic uint64_t number; /* of the collective; written last */
	_Atomic uint64_t what;   /* kind << 32 | root */
	_Atomic uint64_t bytes;
	_Atomic uint64_t value;
};

struct tnd__row {
	struct tnd__post posts[2];
	_Atomic uint64_t
		not_relayed;      /* rank 0: number of the hand-over that it could not pass on */
	_Atomic uint32_t present; /* has attached */
	_Atomic uint32_t left;    /* has closed */
	unsigned char unused[128 - 80];
};
static_assert(sizeof(struct tnd__row) == 128, "format");

struct tnd__board {
	uint64_t magic;
	uint32_t version;
	uint32_t rank_count;
	uint64_t segment_bytes;
	char name[TND__BOARD_NAME]; /* NUL-terminated */
	unsigned char unused[128 - 88];
	/* 128: what waiters poll: number << 16 | rank << 8 | TND__END_* */
	_Atomic uint64_t ends[2];
	unsigned char unused2[128 - 16];
	/* 256: what they sleep on */
	_Atomic uint32_t word;
	uint32_t unused3;
	_Atomic uint64_t sleepers; /* bit i: rank i sleeps, or is about to */
	unsigned char unused4[128 - 16];
	/* 384 */
	struct tnd__row rows[TND_GROUP_RANKS_MAX];
	/* 8576 */
	unsigned char unused5[12288 - 8576];
	/* 12288: of a broadcast */
	unsigned char data[2][TND_GROUP_BYTES_MAX];
};
static_assert(offsetof(struct tnd__board, ends) == 128, "format");
static_assert(offsetof(struct tnd__board, word) == 256, "format");
static_assert(offsetof(struct tnd__board, rows) == 384, "format");
static_assert(offsetof(struct tnd__board, data) == 12288, "format");
static_assert(sizeof(struct tnd__board) == 143360, "format");

/* How a collective ended. The first who knows writes it; it holds for all. */
enum {
	TND__END_DONE = 1, /* every rank posted */
	TND__END_DEAD,     /* `rank` died */
	TND__END_LEFT,     /* `rank` closed */
};

static inline uint64_t tnd__end_make(uint64_t number, uint32_t rank, uint32_t how)
{
	return number << 16 | rank << 8 | how;
}

static inline uint64_t tnd__end_number(uint64_t end)
{
	return end >> 16;
}

static inline uint32_t tnd__end_rank(uint64_t end)
{
	return end >> 8 & 0xff;
}

static inline uint32_t tnd__end_how(uint64_t end)
{
	return end & 0xff;
}

/* Byte of the board's file on which the process of `rank` holds its life lock. */
#define TND__LIFE_RANK(rank) ((UINT64_C(1) << 40) + (rank))

/*
 * Makes it, with its memory taken, mapped and sealed against another size. *ret_fd: to be closed.
 * Return: 0; TND_E_HEADROOM; -ENOMEM; -EMFILE; -errno.
 */
int tnd__board_create(uint32_t rank_count, const char *name, struct tnd__board **ret_board,
		      int *ret_fd, struct tnd_error *reterr);
/* Maps what another process made. `fd` stays the caller's. Return: 0; TND_E_CORRUPT; -errno. */
int tnd__board_attach(int fd, struct tnd__board **ret_board, struct tnd_error *reterr);
void tnd__board_unmap(struct tnd__board *board);

#endif
