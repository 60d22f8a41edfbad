/* SPDX-License-Identifier: Apache-2.0 */
/* stat_look.h - between stat.c and stat_look.c: one channel, looked at */
#ifndef TND_STAT_LOOK_H
#define TND_STAT_LOOK_H

#include <tundish/stat.h>

#include "base/base.h"
#include "layout.h"
#include "stat_scan.h"

/* Of words in private copies. */
#define TND__LOAD(word) atomic_load_explicit(&(word), memory_order_relaxed)

/* One channel being looked at. */
struct tnd__look {
	const struct tnd__scan *scan;
	size_t data, control; /* first sightings */
	struct tnd__window data_window, control_window;
	const struct tnd__process *writer; /* nullable */
	int64_t now_ns;
	bool torn; /* an object was overwritten while it was looked at */
	struct tnd__data_header header;
	struct tnd__control shared;
};

/*
 * The figures of the channel whose windows are open, and its readers, into
 * ret_readers[TND__PLACES_MAX]; ret_channel->readers is left alone. Return: false where a segment
 * is gone or makes no sense.
 */
bool tnd__look(struct tnd__look *look, struct tnd_stat_channel *ret_channel,
	       struct tnd_stat_reader *ret_readers);

/* TND_READER_ALIVE, _STOPPED or _DEAD. */
uint32_t tnd__state_of(const struct tnd__process *process);

/*
 * The figures of the load whose page stands at sightings[first] (stat_load.c). Return: false where
 * it is gone, makes no sense or is about a process that has it not.
 */
bool tnd__look_load(const struct tnd__scan *scan, size_t first, struct tnd_stat_load *ret_load);

static inline uint64_t tnd__add_capped(uint64_t a, uint64_t b)
{
	return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

#endif
