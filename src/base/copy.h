/* SPDX-License-Identifier: Apache-2.0 */
/* copy.h - the copies that bulk bytes are moved with */
#ifndef TND_COPY_H
#define TND_COPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Runs of equal length at equal distances; from where they are to one run. */
struct tnd__strides {
	uint64_t count;
	uint64_t bytes;  /* of each run */
	uint64_t stride; /* from the beginning of one to the next, in the source */
};

/*
 * Copies the runs that begin at `from` to `to`, one after the other. The memory does not overlap.
 * `past`: the destination is not read soon by this processor (memory of its own, a buffer for a
 * device): it may be written around the caches where that pays.
 */
void tnd__copy_strides(void *to, const void *from, const struct tnd__strides *strides, bool past);

/* The same for one run. */
void tnd__copy(void *to, const void *from, uint64_t bytes, bool past);

/* The ways that it is chosen from, for bench/gather.c and the tests. */
enum { TND__COPY_PLAIN, TND__COPY_STREAM16, TND__COPY_STREAM32, TND__COPY_WAYS };

/* Return: whether this processor has that way; nothing is copied otherwise. */
bool tnd__copy_by(int way, void *to, const void *from, const struct tnd__strides *strides);

#endif
