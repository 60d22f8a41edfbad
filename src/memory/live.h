/* SPDX-License-Identifier: Apache-2.0 */
/*
 * live.h - counters of a load that are looked at from outside, as those of a channel are
 *
 * A memfd named "tundish.load" of one page with this layout (docs/format/load.md), written by its
 * owner with relaxed stores (figures of the same moment are not promised), read through
 * /proc/PID/fd. It goes with its owner, however that ends. A child that was forked off has the
 * descriptor too: the page is about the process whose pid it says.
 *
 * Atomics; the other side (channel/stat_load.c) reads the file by system calls, in the order that
 * pairs with these:
 *   M1 tnd__live_open()   the page is filled in: the reader looks at `magic` before the rest
 *   G1 tnd__live_file()   an odd generation before the name changes: the reader looks at it last
 *   G2 tnd__live_file()   an even one after that: the reader looks at it first
 */
#ifndef TND_LIVE_H
#define TND_LIVE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "base/base.h"

#define TND__LIVE_MAGIC UINT64_C(0x0044414f4c444e54) /* "TNDLOAD", little-endian */
#define TND__LIVE_VERSION 1u
#define TND__LIVE_BYTES 4096 /* of the file, sealed */
#define TND__LIVE_NAME_BYTES 256

enum { TND__LIVE_ALONE, TND__LIVE_MEMBER, TND__LIVE_READER };

struct tnd__live_page {
	_Atomic uint64_t magic; /* last */
	uint32_t version;
	uint32_t role; /* TND__LIVE_* */
	int32_t pid;   /* in the owner's pid namespace */
	uint32_t rank; /* UINT32_MAX: a node's reader */
	_Atomic uint64_t done_bytes, total_bytes;
	_Atomic uint64_t charged_bytes, budget_bytes;
	_Atomic uint64_t storage_bytes;
	/* Of the last tnd__live_file(): index in the checkpoint; UINT64_MAX: none yet. */
	_Atomic uint64_t file;
	_Atomic uint32_t generation; /* odd while `file` and `name` are being changed */
	uint32_t reserved;
	_Atomic unsigned char name[TND__LIVE_NAME_BYTES]; /* of the file, cut, NUL at the end */
};

_Static_assert(sizeof(struct tnd__live_page) == 336, "format");
_Static_assert(offsetof(struct tnd__live_page, done_bytes) == 24, "format");
_Static_assert(offsetof(struct tnd__live_page, file) == 64, "format");
_Static_assert(offsetof(struct tnd__live_page, generation) == 72, "format");
_Static_assert(offsetof(struct tnd__live_page, name) == 80, "format");

struct tnd__live;

/* Return: 0; TND_E_HEADROOM; -errno (a load goes on without). */
int tnd__live_open(uint32_t role, uint32_t rank, struct tnd__live **ret_live);
/* NULL is allowed in all of these. */
struct tnd__live_page *tnd__live_page(struct tnd__live *live);
/* By one thread at a time. A name that is too long is cut between characters. */
void tnd__live_file(struct tnd__live *live, uint64_t index, const char *name);
void tnd__live_close(struct tnd__live *live);

#endif
