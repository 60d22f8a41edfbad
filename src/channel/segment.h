/* SPDX-License-Identifier: Apache-2.0 */
/* segment.h - between segment.c, which makes the segments, and segment_attach.c */
#ifndef TND_SEGMENT_H
#define TND_SEGMENT_H

#include <fcntl.h>

#include "channel_internal.h"

#define TND__DATA_SEALS (F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define TND__SLAB_SEALS (F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW)
#define TND__CONTROL_SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

/* Whole pages: nothing of a mapping lies behind the end of its file. */
#define TND__CONTROL_BYTES ((sizeof(struct tnd__control) + TND__PAGE - 1) & ~(TND__PAGE - 1))

/* No figure in a header is larger: sums of a few of them cannot overflow. 64 TiB. */
#define TND__SEGMENT_BYTES_MAX (UINT64_C(1) << 46)

static inline uint64_t tnd__segment_arena_offset(uint64_t slot_count)
{
	return tnd__round_up(TND__HEADER_BYTES + slot_count * sizeof(struct tnd__descriptor),
			     TND__PAGE);
}

/*
 * Maps both and sets what follows from that. `data_bytes`: of the file; the arena begins at
 * `arena_offset` and goes to its end; both in whole pages. Return: 0, -errno (nothing is mapped).
 */
int tnd__segments_map(struct tnd__segments *segments, uint64_t data_bytes, uint64_t arena_offset,
		      int protection);
/* Copies the figures of a header that was checked, or that is our own. */
void tnd__segments_keep(struct tnd__segments *segments, const struct tnd__data_header *header);

#endif
