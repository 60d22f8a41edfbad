/* SPDX-License-Identifier: Apache-2.0 */
/*
 * opener.c - from a path to a checked checkpoint
 *
 *   path is a folder --> an index? --yes--> its files all there? -> headers -> names all there? -.
 *      |                     '-----no-----> every *.safetensors -> headers ----------------------+
 *      |--- an index file: its folder with that index                                            |
 *      '--- any other file, or a list of files ------------------> headers ----------------------+
 *                                                                                                v
 *                                                           one table; names unique?; config.json
 *
 * Opening stops at the first problem; checking hands each to the caller and goes on with what is
 * left. Both are this code: tnd__opener_settle() decides. Memory that runs out ends both.
 *
 * Serial: a warm header costs its scan, 48 of them with 100,000 tensors a few tens of milliseconds,
 * less than threads would save.
 */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "opener.h"

int tnd__opener_no_memory(struct tnd__opener *opener)
{
	return tnd__fail_plain(&opener->error, -ENOMEM, "no memory to open the checkpoint");
}

int tnd__opener_settle(struct tnd__opener *opener, int rc)
{
	if (rc >= 0)
		return 0;
	if (!opener->fn || rc == -ENOMEM)
		return rc;
	opener->fn(opener->arg, &opener->error);
	opener->problem_count++;
	return 0;
}

static int add_file(struct tnd__opener *opener, const char *path, const char *name)
{
	int rc;

	if (tnd__checkpoint_reserve(&opener->parts, &opener->part_capacity, opener->part_count + 1,
				    sizeof(*opener->parts)) < 0)
		return tnd__opener_no_memory(opener);
	rc = tnd__part_open(path, name, &opener->opts, &opener->scratch,
			    &opener->parts[opener->part_count], &opener->error);
	if (rc == 0)
		opener->part_count++;
	return tnd__opener_settle(opener, rc);
}

int tnd__opener_add(struct tnd__opener *opener, const char *name)
{
	char *path = tnd__path_join(opener->folder, name);
	int rc;

	if (!path)
		return tnd__opener_no_memory(opener);
	rc = add_file(opener, path, name);
	free(path);
	return rc;
}

int tnd__opener_compare(const void *a, const void *b)
{
	return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int list_folder(struct tnd__opener *opener)
{
	DIR *folder = opendir(opener->folder);
	struct tnd__where where = {.file = opener->folder};
	struct dirent *entry;
	int rc = folder ? 0 : -errno;

	while (folder && rc == 0) {
		errno = 0;
		entry = readdir(folder);
		if (!entry) {
			rc = -errno;
			break;
		}
		if (entry->d_name[0] != '.')
			rc = tnd__sentences_add(&opener->entries, "%s", entry->d_name);
	}
	if (folder)
		closedir(folder);
	if (rc < 0)
		return tnd__fail(&opener->error, rc, &where, "cannot list the folder: %s",
				 tnd_strerror(rc));
	if (opener->entries.count)
		qsort(opener->entries.items, opener->entries.count, sizeof(char *),
		      tnd__opener_compare);
	return 0;
}

bool tnd__has_suffix(const char *text, const char *suffix)
{
	size_t bytes = strlen(text), suffix_bytes = strlen(suffix);

	return bytes > suffix_bytes && strcmp(text + bytes - suffix_bytes, suffix) == 0;
}

/* -- without an index -- */

static int fail_no_files(struct tnd__opener *opener)
{
	const char *other = NULL;

	for (size_t i = 0; i < opener->entries.count && !other; i++)
		if (tnd__has_suffix(opener->entries.items[i], ".bin") ||
		    tnd__has_suffix(opener->entries.items[i], ".pt") ||
		    tnd__has_suffix(opener->entries.items[i], ".pth") ||
		    tnd__has_suffix(opener->entries.items[i], ".gguf"))
			other = opener->entries.items[i];
	return tnd__fail(&opener->error, TND_E_NOT_SAFETENSORS,
			 &(struct tnd__where){.file = opener->folder},
			 "expected *.safetensors files in the folder, found none%s%s%s",
			 other ? " (it has " : "", other ? other : "",
			 other ? ": convert it, or get the safetensors version)" : "");
}

/*
 * Whether an entry of the folder is to be opened: anything but what is there and is no regular
 * file.
 */
static bool is_candidate(struct tnd__opener *opener, const char *name, int *ret_rc)
{
	char *path = tnd__path_join(opener->folder, name);
	struct stat stat_;
	bool regular;

	if (!path) {
		*ret_rc = tnd__opener_no_memory(opener);
		return false;
	}
	/* What cannot be looked at, a dangling link among it, must fail when it is opened. */
	regular = stat(path, &stat_) < 0 || S_ISREG(stat_.st_mode);
	free(path);
	if (!regular &&
	    tnd__sentences_add(&opener->warnings, "%s: no regular file: left out", name) < 0)
		*ret_rc = tnd__opener_no_memory(opener);
	return regular;
}

static int open_entries(struct tnd__opener *opener)
{
	size_t candidate_count = 0;
	int rc = 0;

	for (size_t i = 0; i < opener->entries.count && rc == 0; i++) {
		const char *name = opener->entries.items[i];

		if (!tnd__has_suffix(name, ".safetensors") || !is_candidate(opener, name, &rc))
			continue;
		candidate_count++;
		rc = tnd__opener_add(opener, name);
	}
	if (rc == 0 && !candidate_count)
		rc = tnd__opener_settle(opener, fail_no_files(opener));
	return rc;
}

/* -- the whole -- */

/* `folder` of a path, as a text of its own: what stands before the last slash, or ".". */
static char *folder_of(const char *path)
{
	const char *slash = strrchr(path, '/');
	size_t bytes = slash ? (size_t)(slash - path) : 0;
	char *folder = tnd__checkpoint_alloc(bytes + 2);

	if (!folder)
		return NULL;
	memcpy(folder, path, bytes);
	if (!bytes)
		folder[bytes++] = slash ? '/' : '.';
	folder[bytes] = '\0';
	return folder;
}

static int open_folder(struct tnd__opener *opener, const char *index_name)
{
	int rc = list_folder(opener);

	if (rc < 0)
		return tnd__opener_settle(opener, rc);
	if (!index_name && !(opener->opts.flags & TND_CHECKPOINT_F_IGNORE_INDEX)) {
		rc = tnd__index_choose(opener->entries.items, opener->entries.count, opener->folder,
				       &index_name, &opener->error);
		if (rc < 0)
			return tnd__opener_settle(opener, rc);
	}
	if (!index_name)
		return open_entries(opener);
	opener->index_name = tnd__path_join("", index_name);
	if (!opener->index_name)
		return tnd__opener_no_memory(opener);
	return tnd__open_indexed(opener);
}

/* Names that stand in two files, each with both. */
static int check_unique(struct tnd__opener *opener, const struct tnd_checkpoint *checkpoint)
{
	int rc = 0;

	for (size_t i = 1; i < checkpoint->tensor_count && rc == 0; i++) {
		const struct tnd_tensor *a = &checkpoint->tensors[checkpoint->by_name[i - 1]],
					*b = &checkpoint->tensors[checkpoint->by_name[i]];
		struct tnd__where where = {.file = checkpoint->files[b->file].name,
					   .name = b->name,
					   .name_bytes = b->name_bytes};
		char other[TND_ERROR_FILE_MAX];

		if (tnd__compare(a->name, a->name_bytes, b->name, b->name_bytes) != 0)
			continue;
		tnd__printable(checkpoint->files[a->file].name,
			       strlen(checkpoint->files[a->file].name), other, sizeof(other));
		rc = tnd__opener_settle(
			opener,
			tnd__fail(&opener->error, TND_E_DUPLICATE, &where,
				  "duplicate tensor name: it is in '%s' too; remove one of the "
				  "files, or add an index that says which counts",
				  other));
	}
	return rc;
}

/* Makes the table of what is open. */
static int finish(struct tnd__opener *opener, struct tnd_checkpoint **ret_checkpoint)
{
	struct tnd_checkpoint *checkpoint;
	int rc;

	rc = tnd__config_load(opener->folder, &opener->config, &opener->warnings);
	if (rc == 0)
		rc = tnd__checkpoint_build(opener->parts, opener->part_count, &checkpoint);
	if (rc < 0)
		return tnd__opener_no_memory(opener);
	opener->parts = NULL;
	opener->part_count = 0;
	checkpoint->config = opener->config;
	checkpoint->warnings = opener->warnings;
	memset(&opener->warnings, 0, sizeof(opener->warnings));
	rc = check_unique(opener, checkpoint);
	if (rc == 0 && !opener->problem_count && ret_checkpoint)
		*ret_checkpoint = checkpoint;
	else
		tnd_checkpoint_close(checkpoint);
	return rc;
}

static int opener_init(struct tnd__opener *opener, const struct tnd_checkpoint_opts *opts)
{
	memset(opener, 0, sizeof(*opener));
	if (opts) {
		if (!tnd__struct_ok(opts->struct_bytes, sizeof(*opts), sizeof(*opts)))
			return tnd__fail_plain(&opener->error, TND_E_INVALID,
					       "struct_bytes of the options is not valid: expected "
					       "%zu, found %u",
					       sizeof(*opts), opts->struct_bytes);
		opener->opts = *opts;
	}
	if (opener->opts.flags & ~(TND_CHECKPOINT_F_IGNORE_INDEX | TND_CHECKPOINT_F_ALLOW_TRAILING))
		return tnd__fail_plain(&opener->error, TND_E_INVALID, "unknown flags: 0x%x",
				       opener->opts.flags);
	if (opener->opts.max_header_bytes > UINT32_MAX)
		return tnd__fail_plain(&opener->error, TND_E_INVALID,
				       "max_header_bytes: expected at most %u, found %llu",
				       UINT32_MAX,
				       (unsigned long long)opener->opts.max_header_bytes);
	if (!opener->opts.max_header_bytes)
		opener->opts.max_header_bytes = TND_CHECKPOINT_MAX_HEADER_BYTES;
	return 0;
}

/* Hands the failure over and lets everything go. Return: rc. */
static int opener_fini(struct tnd__opener *opener, int rc, struct tnd_error *reterr)
{
	for (size_t i = 0; i < opener->part_count; i++)
		tnd__part_free(&opener->parts[i]);
	free(opener->parts);
	tnd__scratch_free(&opener->scratch);
	tnd__index_free(&opener->index);
	tnd__sentences_free(&opener->entries);
	tnd__sentences_free(&opener->warnings);
	free(opener->index_name);
	free(opener->folder);
	if (rc < 0 && reterr)
		*reterr = opener->error;
	return rc;
}

static int open_path(struct tnd__opener *opener, const char *path)
{
	const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
	struct stat stat_;

	if (stat(path, &stat_) < 0)
		return tnd__fail(&opener->error, -errno, &(struct tnd__where){.file = path},
				 "cannot open: %s", tnd_strerror(-errno));
	if (S_ISDIR(stat_.st_mode)) {
		opener->folder = tnd__path_join(path, "");
		return opener->folder ? open_folder(opener, NULL) : tnd__opener_no_memory(opener);
	}
	opener->folder = folder_of(path);
	if (!opener->folder)
		return tnd__opener_no_memory(opener);
	if (tnd__has_suffix(base, ".safetensors.index.json"))
		return open_folder(opener, base);
	return add_file(opener, path, path);
}

int tnd_checkpoint_open(const char *path, const struct tnd_checkpoint_opts *opts,
			struct tnd_checkpoint **ret_checkpoint, struct tnd_error *reterr)
{
	struct tnd__opener opener;
	int rc = opener_init(&opener, opts);

	if (rc == 0)
		rc = open_path(&opener, path);
	if (rc == 0)
		rc = finish(&opener, ret_checkpoint);
	return opener_fini(&opener, rc, reterr);
}

int tnd_checkpoint_open_files(const char *const *paths, size_t path_count,
			      const struct tnd_checkpoint_opts *opts,
			      struct tnd_checkpoint **ret_checkpoint, struct tnd_error *reterr)
{
	struct tnd__opener opener;
	const char **sorted = NULL;
	int rc = opener_init(&opener, opts);

	if (rc == 0 && !path_count)
		rc = tnd__fail_plain(&opener.error, TND_E_INVALID, "expected files, found none");
	if (rc < 0)
		goto out;
	sorted = tnd__checkpoint_alloc(path_count * sizeof(*sorted));
	opener.folder = folder_of(paths[0]);
	if (!sorted || !opener.folder) {
		rc = tnd__opener_no_memory(&opener);
		goto out;
	}
	memcpy(sorted, paths, path_count * sizeof(*sorted));
	qsort(sorted, path_count, sizeof(*sorted), tnd__opener_compare);
	for (size_t i = 0; i < path_count && rc == 0; i++)
		rc = add_file(&opener, sorted[i], sorted[i]);
	if (rc == 0)
		rc = finish(&opener, ret_checkpoint);
out:
	free(sorted);
	return opener_fini(&opener, rc, reterr);
}

static void ignore(void *arg, const struct tnd_error *problem)
{
	(void)arg;
	(void)problem;
}

int tnd_checkpoint_check(const char *path, const struct tnd_checkpoint_opts *opts,
			 tnd_problem_fn fn, void *arg, struct tnd_error *reterr)
{
	struct tnd__opener opener;
	int rc = opener_init(&opener, opts), problem_count;

	opener.fn = fn ? fn : ignore;
	opener.arg = arg;
	if (rc == 0)
		rc = open_path(&opener, path);
	if (rc == 0)
		rc = finish(&opener, NULL);
	problem_count = opener.problem_count;
	rc = opener_fini(&opener, rc, reterr);
	return rc < 0 ? rc : problem_count;
}
