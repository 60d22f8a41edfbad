/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tundish/doctor.h - what this machine allows, found by trying, and what to change
 *
 * Threads: MT-safe. Blocking: bounded (reads a few pages of the file that it is given).
 */
#ifndef TUNDISH_DOCTOR_H
#define TUNDISH_DOCTOR_H

#include <tundish/error.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One finding of tnd_doctor. Texts are borrowed for the callback. */
struct tnd_check {
	const char *name;   /* "io_uring", "direct_io", ... stable */
	int ok;             /* 0: something to change */
	const char *value;  /* what was found */
	const char *advice; /* what to change, or "" */
};
typedef void (*tnd_check_fn)(void *arg, const struct tnd_check *check);

/*
 * Probes the machine by trying: io_uring, direct I/O, cachestat, RWF_NOWAIT and RWF_DONTCACHE on
 * `path` (nullable; a regular file, or a folder whose *.safetensors are taken), memlock, huge
 * pages, cgroup limits, /dev/shm, processors, open files.
 * `fn`: called for each check; `arg`, `path`: borrowed for the call.
 * Return: number of checks that are not ok; -errno (path).
 */
TND_API int tnd_doctor(const char *path, tnd_check_fn fn, void *arg, struct tnd_error *reterr);

#ifdef __cplusplus
}
#endif
#endif
