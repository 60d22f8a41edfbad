/* SPDX-License-Identifier: Apache-2.0 */
/* headroom.h - what the limits of memory leave, looked at often */
#ifndef TND_HEADROOM_H
#define TND_HEADROOM_H

#include "memory.h"

#define TND__HEADROOM_LEVELS 16

/* Open files of one memory cgroup; -1 where there is none. */
struct tnd__headroom_level {
	int limit_fd, high_fd, usage_fd;
	uint64_t inherited; /* a limit from above that the mount does not show */
};

struct tnd__headroom {
	const char *what; /* "channel 'x'", for sentences; borrowed */
	uint64_t left;    /* still to be taken */
	uint64_t margin;  /* to be left over */
	uint64_t inherited;
	int meminfo_fd;
	bool blind; /* not every file could be opened: only the long way tells */
	bool v1_seen;
	uint32_t level_count;
	struct tnd__headroom_level levels[TND__HEADROOM_LEVELS];
};

/*
 * For `bytes` in all. Cannot fail: what cannot be opened makes the checks slower. `what`: borrowed
 * until close.
 */
void tnd__headroom_open(struct tnd__headroom *headroom, uint64_t bytes, const char *what);
void tnd__headroom_close(struct tnd__headroom *headroom);

/*
 * Whether what is left to be taken and the margin fit under MemAvailable and under each memory
 * cgroup above us. Return: 0; TND_E_HEADROOM; -EMFILE; -ENFILE; -ENOMEM.
 */
int tnd__headroom_check(const struct tnd__headroom *headroom, struct tnd_error *reterr);

/* Whether a file of `bytes` may be made (beyond, SIGXFSZ kills). Return: 0, TND_E_HEADROOM. */
int tnd__headroom_file(uint64_t bytes, const char *what, struct tnd_error *reterr);

/*
 * Pages for [from, to) of a memfd that is that large, with a check before each 2 MiB. Return: 0; as
 * tnd__headroom_check; -ENOSPC; -errno.
 */
int tnd__headroom_take(struct tnd__headroom *headroom, int fd, uint64_t from, uint64_t to,
		       struct tnd_error *reterr);

#endif
