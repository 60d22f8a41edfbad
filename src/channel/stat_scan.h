/* SPDX-License-Identifier: Apache-2.0 */
/* stat_scan.h - what stat_scan.c finds: the memfds of this user's processes, and who has them */
#ifndef TND_STAT_SCAN_H
#define TND_STAT_SCAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define TND__PID_LEVELS 8 /* of pid namespaces that are looked at; the kernel allows 32 */

struct tnd__process {
	int32_t pid;                      /* in our /proc */
	int32_t ns_pids[TND__PID_LEVELS]; /* in its namespaces, outermost first */
	uint32_t ns_count;
	char state; /* as in /proc/PID/status: R, S, T, Z, ... */
	char name[16];
};

/* What the process takes its own pid to be. */
static inline int32_t tnd__innermost_pid(const struct tnd__process *process)
{
	return process->ns_count ? process->ns_pids[process->ns_count - 1] : process->pid;
}

enum tnd__memfd_kind { TND__MEMFD_DATA, TND__MEMFD_CONTROL, TND__MEMFD_SLAB, TND__MEMFD_LOAD };

/* One descriptor of a process. */
struct tnd__sighting {
	enum tnd__memfd_kind kind;
	dev_t device;
	ino_t inode;
	uint64_t bytes;
	uint32_t process; /* index */
	int fd;           /* its number in that process */
	bool writable;    /* data only: opened for writing */
};

/*
 * Sightings are sorted: those of one memfd stand together, our own process's first, the others in
 * the order of their pids.
 */
struct tnd__scan {
	struct tnd__process *processes;
	size_t process_count, process_capacity;
	struct tnd__sighting *sightings;
	size_t sighting_count, sighting_capacity;
	size_t denied;
	bool own_first; /* processes[0] is this process */
};

/* Return: 0; -ENOMEM; -errno (no /proc). On failure nothing is left. */
int tnd__scan_read(struct tnd__scan *ret_scan);
void tnd__scan_free(struct tnd__scan *scan);

/* Number of sightings of the memfd of sightings[first]. */
size_t tnd__scan_run(const struct tnd__scan *scan, size_t first);

/* A memfd opened for reading. */
struct tnd__window {
	int fd;
	bool owned; /* opened by us: to be closed */
};

/*
 * Of the memfd at sightings[first]; nothing of it was looked at yet. Return: false if it is gone.
 */
bool tnd__window_open(const struct tnd__scan *scan, size_t first, struct tnd__window *ret_window);
/* Return: whether all of it was there. */
bool tnd__window_read(const struct tnd__window *window, void *out, size_t bytes, uint64_t offset);
void tnd__window_close(struct tnd__window *window);

#endif
