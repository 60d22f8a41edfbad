/* SPDX-License-Identifier: Apache-2.0 */
/*
 * extent.c - how each 2 MiB of a file stood in the page cache when we came
 *
 * Asked once for each extent, at the first read of it, and remembered: several reads that share an
 * extent must agree, or one of them would take a page that another has just brought in for a warm
 * one, and leave it behind.
 *
 *   cachestat: 0 pages -> cold; all -> warm; some -> mixed, with a map of the cold 64 KiB blocks
 *   refused:   one page with RWF_NOWAIT: EAGAIN -> cold (the page is dropped later), bytes -> warm
 *   refused:   unknown: read as if cold, never dropped
 *
 * Only what was found cold is dropped.
 */
#include <errno.h>
#include <string.h>
#include <sys/uio.h>

#include "storage/engine.h"

#define BLOCK TND__KIB(64)
#define ALL_COLD UINT32_MAX

/*
 * Cold blocks of a mixed extent. A block with one cached page counts as warm: at most 15 pages stay
 * behind.
 */
static uint32_t cold_blocks(const struct tnd__source *source, uint64_t start, uint64_t end)
{
	uint32_t cold = 0, bit = 0;

	for (uint64_t at = start; at < end; at += BLOCK, bit++)
		if (tnd__pagecache_bytes(source->buffered_fd, at, TND__MIN(BLOCK, end - at)) == 0)
			cold |= UINT32_C(1) << bit;
	return cold;
}

static int probe_nowait(struct tnd__source *source, uint64_t start, uint64_t end)
{
	unsigned char page[TND__PAGE];
	struct iovec vec = {page, TND__MIN(sizeof(page), end - start)};
	ssize_t got;
	int rc = tnd__failpoint("storage.nowait");

	if (atomic_load_explicit(&source->nowait_no, memory_order_relaxed))
		return TND__CACHE_UNKNOWN;
	do {
		got = rc < 0 ? (errno = -rc, -1)
			     : preadv2(source->buffered_fd, &vec, 1, (off_t)start, RWF_NOWAIT);
	} while (got < 0 && errno == EINTR && rc == 0);
	if (got > 0)
		return TND__CACHE_WARM;
	if (got < 0 && errno == EAGAIN)
		return TND__CACHE_COLD;
	if (got < 0)
		atomic_store_explicit(&source->nowait_no, true, memory_order_relaxed);
	return TND__CACHE_UNKNOWN;
}

/* Return: TND__CACHE_*. */
static int ask(struct tnd__source *source, uint64_t start, uint64_t end, uint32_t *ret_cold,
	       bool *ret_probed)
{
	uint64_t whole = tnd__round_up(end - start, TND__PAGE);
	int64_t cached;
	int state;

	*ret_cold = 0;
	if (!atomic_load_explicit(&source->stat_no, memory_order_relaxed)) {
		cached = tnd__pagecache_bytes(source->buffered_fd, start, end - start);
		if (cached == 0)
			*ret_cold = ALL_COLD;
		if (cached >= 0)
			return cached == 0                 ? TND__CACHE_COLD
			       : (uint64_t)cached >= whole ? TND__CACHE_WARM
							   : TND__CACHE_MIXED;
		if (cached != -EINTR)
			atomic_store_explicit(&source->stat_no, true, memory_order_relaxed);
	}
	state = probe_nowait(source, start, end);
	if (state == TND__CACHE_COLD) {
		*ret_cold = ALL_COLD;
		*ret_probed = true;
	}
	return state;
}

static int extent_state(struct tnd__source *source, uint64_t index, bool *ret_probed)
{
	uint64_t start = index * TND__EXTENT;
	uint64_t end = TND__MIN(start + TND__EXTENT, source->file_bytes);
	uint32_t cold = 0;
	int state;

	if (source->extent_state && index < source->extent_count && source->extent_state[index])
		return source->extent_state[index] - 1;
	if (end <= start)
		return TND__CACHE_UNKNOWN; /* beyond the size that we were told */
	state = ask(source, start, end, &cold, ret_probed);
	if (state == TND__CACHE_MIXED && source->extent_cold)
		cold = cold_blocks(source, start, end);
	if (source->extent_state && index < source->extent_count) {
		source->extent_cold[index] = cold;
		source->extent_state[index] = (unsigned char)(state + 1);
	}
	pthread_mutex_lock(&source->storage->lock);
	source->seen[state]++;
	pthread_mutex_unlock(&source->storage->lock);
	return state;
}

void tnd__extent_classify(struct tnd__read *read)
{
	uint64_t first = read->offset / TND__EXTENT;
	uint64_t last = (read->offset + read->bytes - 1) / TND__EXTENT;
	uint32_t seen[4] = {0};
	bool probed = false;

	for (uint64_t i = first; i <= last; i++)
		seen[extent_state(read->source, i, &probed)]++;
	if (seen[TND__CACHE_WARM] == last - first + 1)
		read->state |= TND__READ_WARM;
	else if (seen[TND__CACHE_COLD] == last - first + 1)
		read->state |= TND__READ_COLD;
	else if (seen[TND__CACHE_COLD] || seen[TND__CACHE_MIXED])
		read->state |= TND__READ_MIXED;
	if (probed)
		read->state |= TND__READ_PROBED;
}

/* Drops [low, high), which lies in one extent, block by block where only some blocks were cold. */
static uint64_t drop_in_extent(struct tnd__source *source, uint64_t low, uint64_t high)
{
	uint64_t index = low / TND__EXTENT, dropped = 0;
	uint32_t cold = index < source->extent_count ? source->extent_cold[index] : 0;

	if (cold == ALL_COLD) {
		tnd__pagecache_drop(source->buffered_fd, low, high - low);
		return high - low;
	}
	for (uint64_t at = low, end; cold && at < high; at = end) {
		end = TND__MIN(tnd__round_down(at, BLOCK) + BLOCK, high);
		if (!(cold >> (at % TND__EXTENT / BLOCK) & 1))
			continue;
		tnd__pagecache_drop(source->buffered_fd, at, end - at);
		dropped += end - at;
	}
	return dropped;
}

uint64_t tnd__extent_drop(struct tnd__read *read)
{
	uint64_t end = read->offset + read->bytes, dropped = 0;

	if (!read->source->extent_state) {
		if (!(read->state & TND__READ_COLD))
			return 0;
		tnd__pagecache_drop(read->source->buffered_fd, read->offset, read->bytes);
		return read->bytes;
	}
	for (uint64_t at = read->offset, next; at < end; at = next) {
		next = TND__MIN(tnd__round_down(at, TND__EXTENT) + TND__EXTENT, end);
		dropped += drop_in_extent(read->source, at, next);
	}
	return dropped;
}

void tnd__extent_drop_probe(struct tnd__read *read)
{
	uint64_t last = (read->offset + read->bytes - 1) / TND__EXTENT;

	for (uint64_t i = read->offset / TND__EXTENT; i <= last; i++)
		tnd__pagecache_drop(read->source->buffered_fd, i * TND__EXTENT, TND__PAGE);
}
