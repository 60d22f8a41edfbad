/* SPDX-License-Identifier: Apache-2.0 */
/*
 * header.h - one safetensors header as a table of tensors
 *
 * The text of the header is the arena of its names: they are unescaped and moved to its front while
 * it is read, each with a NUL after it, so a tensor costs no allocation. Where the text goes, names
 * and metadata must have gone with it (tnd__header_detach).
 */
#ifndef TND_HEADER_H
#define TND_HEADER_H

#include <tundish/checkpoint.h>

#include "base/base.h"

/* Allocation with the failpoint "checkpoint.alloc"; free() frees. */
void *tnd__checkpoint_alloc(size_t bytes);
int tnd__checkpoint_reserve(void *array_pointer, size_t *capacity, size_t need,
			    size_t element_bytes);

struct tnd__header_text {
	unsigned char *text; /* overwritten */
	size_t bytes;        /* <= UINT32_MAX */
	uint64_t data_bytes; /* of the file, behind the header */
	uint32_t flags;      /* TND_CHECKPOINT_F_ALLOW_TRAILING */
	const char *file;    /* for messages */
};

struct tnd__header {
	struct tnd_tensor *tensors; /* in byte order of the names; file 0 */
	size_t tensor_count;
	uint64_t *shapes;
	size_t shape_count;
	struct tnd_metadata *metadata; /* in the header's order */
	size_t metadata_count;
	char *names; /* what names and metadata point into: the caller's text, until detached */
	size_t name_bytes;
	bool detached;
};

/*
 * Reads and checks a whole header. Return: 0; TND_E_FORMAT, _DTYPE, _DUPLICATE, _OFFSETS, _SHAPE,
 * _TRUNCATED, _TRAILING; -ENOMEM. On failure there is nothing to free.
 */
int tnd__header_scan(const struct tnd__header_text *text, struct tnd__header *ret_header,
		     struct tnd_error *reterr);

/*
 * Copies names and metadata out of the caller's text, which may then go. Return: 0, -ENOMEM
 * (unchanged).
 */
int tnd__header_detach(struct tnd__header *header);

void tnd__header_free(struct tnd__header *header);

/* -- order and overlap (headercheck.c) -- */

/* A key of the sorts: an index, and 16 bytes that decide first. */
struct tnd__sort_key {
	uint64_t high, low;
	size_t index;
};

/*
 * Puts keys [0, count) into byte order of the names of tensors[key.index]. `spare`: room for as
 * many keys. Stable; keys that are in order already cost one pass.
 */
void tnd__sort_names(const struct tnd_tensor *tensors, struct tnd__sort_key *keys,
		     struct tnd__sort_key *spare, size_t count);

/*
 * Second half of the scan. Tensors in the header's order, `offset` relative to the data;
 * `positions`: of their names in the file. Refuses duplicate names, holes, overlaps, missing and
 * trailing data; then sorts by name and makes offsets absolute.
 */
int tnd__header_check(const struct tnd__header_text *text, struct tnd__header *header,
		      const uint64_t *positions, struct tnd_error *reterr);

/* Code of a dtype's name, or TND_DTYPE_COUNT. */
uint32_t tnd__dtype_parse(const char *name, size_t name_bytes);

#endif
