/* SPDX-License-Identifier: Apache-2.0 */
/*
 * parts.h - what a checkpoint is put together from: one file, the index, config.json
 *
 * Each is usable alone. Texts that come from disk are parsed from a buffer, so that fuzzers reach
 * the parsers directly.
 */
#ifndef TND_PARTS_H
#define TND_PARTS_H

#include "header.h"

/* -- one file (file.c) -- */

/*
 * Room for one header at a time; mapped, so that it goes back to the system at the end.
 * Zero-initialised.
 */
struct tnd__scratch {
	unsigned char *data;
	size_t bytes;
};
void tnd__scratch_free(struct tnd__scratch *scratch);

struct tnd__part {
	char *name, *path; /* owned; name is the shown one */
	int fd;
	uint64_t bytes, header_bytes;
	uint64_t skipped_count; /* tensors that the index took out of the header's table */
	struct tnd__header header;
};

/*
 * Opens and scans one file. `opts`: struct_bytes set, max_header_bytes not 0. Return: 0; see
 * tnd_checkpoint_open(). Nothing to free on failure.
 */
int tnd__part_open(const char *path, const char *name, const struct tnd_checkpoint_opts *opts,
		   struct tnd__scratch *scratch, struct tnd__part *ret_part,
		   struct tnd_error *reterr);
void tnd__part_free(struct tnd__part *part);

/*
 * A whole regular file of at most `most` bytes; `*ret_text` is freed by the caller. Return: 0,
 * -errno, -EFBIG, TND_E_NOT_SAFETENSORS.
 */
int tnd__slurp(const char *path, const char *name, uint64_t most, char **ret_text,
	       size_t *ret_bytes, struct tnd_error *reterr);

/* "folder/name". Return: to be freed, or NULL. */
char *tnd__path_join(const char *folder, const char *name);

/* -- index (index.c) -- */

struct tnd__index {
	char *text; /* what names and files point into */
	struct tnd_tensor
		*entries; /* in the index's order; name, name_bytes and file alone are set */
	size_t entry_count;
	const char **files; /* each once, in byte order; entries[].file is a place in it */
	size_t file_count;
};

/* `text`: from malloc(), transferred, on failure too. Return: 0, TND_E_INDEX, -ENOMEM. */
int tnd__index_parse(char *text, size_t bytes, const char *name, struct tnd__index *ret_index,
		     struct tnd_error *reterr);
void tnd__index_free(struct tnd__index *index);

/*
 * The index that governs a folder, out of the names of its files. Return: 1 and its name in
 * `*ret_name` (borrowed from `names`), 0 if there is none, TND_E_INDEX if it is not clear which.
 */
int tnd__index_choose(char *const *names, size_t name_count, const char *folder,
		      const char **ret_name, struct tnd_error *reterr);

/* -- config.json (config.c) -- */

struct tnd__config {
	uint64_t expert_count, draft_expert_count; /* TND_EXPERTS_UNKNOWN */
	struct tnd_model_facts facts;
};
void tnd__config_init(struct tnd__config *config);

/*
 * Adds what it cannot use to `warnings`. `text`: borrowed for the call, its strings are overwritten
 * with what their escapes mean. Return: 0, -ENOMEM.
 */
int tnd__config_parse(char *text, size_t bytes, const char *name, struct tnd__config *ret_config,
		      struct tnd__sentences *warnings);

/*
 * The same from `folder`/config.json; a file that is not there is no warning, one that cannot be
 * read is.
 */
int tnd__config_load(const char *folder, struct tnd__config *ret_config,
		     struct tnd__sentences *warnings);

/* -- the table (checkpoint.c) -- */

struct tnd_checkpoint {
	_Atomic uint32_t ref_count;
	struct tnd__part *parts; /* descriptors, names, shapes; one for each file */
	struct tnd_file *files;
	size_t file_count;
	struct tnd_tensor *tensors;
	size_t tensor_count;
	size_t *by_name; /* indices of the tensors in byte order of the names */
	struct tnd__sentences warnings;
	struct tnd__config config;
	uint64_t memory_bytes;
};

/*
 * Makes the table of `parts`, which are in order. Names that stand twice are left for the caller to
 * find in by_name. On success the parts (also the array), and what they own, are the checkpoint's.
 * Return: 0, -ENOMEM.
 */
int tnd__checkpoint_build(struct tnd__part *parts, size_t part_count,
			  struct tnd_checkpoint **ret_checkpoint);

/* One more user. Return: checkpoint. */
struct tnd_checkpoint *tnd__checkpoint_ref(struct tnd_checkpoint *checkpoint);

#endif
