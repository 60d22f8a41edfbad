/* SPDX-License-Identifier: Apache-2.0 */
/*
 * indexed.c - opens the files that an index names and makes the index come true, or says all that
 * is wrong
 *
 *   files there? -> headers -> each name in its file? -> what is not named is taken out and counted
 *
 * All that is missing is told in one sentence, cut where it gets long: who downloads again wants
 * the list, not the first of it. Names are looked up where the one before was found first: an index
 * mostly lists a file's names together and in order.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "opener.h"

#define INDEX_BYTES_MAX TND__MIB(256)
#define LIST_BYTES_MAX 500 /* of names in a sentence */

/* Names for one sentence, as many as it bears. */
struct name_list {
	struct tnd__text text;
	size_t count, shown;
};

static void list_name(struct name_list *list, const char *name, size_t name_bytes, const char *file)
{
	char shown[160];

	list->count++;
	if (list->text.bytes > LIST_BYTES_MAX)
		return;
	tnd__printable(name, name_bytes, shown, sizeof(shown));
	tnd__text_add(&list->text, "%s'%s'%s%.100s%s", list->shown ? ", " : "", shown,
		      file ? " (not in " : "", file ? file : "", file ? ")" : "");
	list->shown++;
}

/* Fails with all that the list has, if it has anything. */
static int fail_list(struct tnd__opener *opener, struct name_list *list, size_t of,
		     const char *what, const char *advice)
{
	size_t count = list->count, more = list->count - list->shown;
	char tail[48] = "", *text;
	int rc;

	if (!count)
		return 0;
	text = tnd__text_take(&list->text);
	if (!text)
		return tnd__opener_no_memory(opener);
	if (more)
		snprintf(tail, sizeof(tail), " and %zu more", more);
	rc = tnd__fail(&opener->error, TND_E_INDEX,
		       &(struct tnd__where){.file = opener->index_name},
		       "%zu of the %zu %s: %s%s; %s", count, of, what, text, tail, advice);
	free(text);
	return rc;
}

/* Every file that the index names must be there before any is opened. */
static int check_files_exist(struct tnd__opener *opener)
{
	struct name_list missing = {0};
	struct stat stat_;
	int rc;

	for (size_t i = 0; i < opener->index.file_count; i++) {
		const char *name = opener->index.files[i];
		char *path = tnd__path_join(opener->folder, name);

		if (!path) {
			tnd__text_free(&missing.text);
			return tnd__opener_no_memory(opener);
		}
		if (stat(path, &stat_) < 0 && (errno == ENOENT || errno == ENOTDIR))
			list_name(&missing, name, strlen(name), NULL);
		free(path);
	}
	rc = fail_list(opener, &missing, opener->index.file_count,
		       "files that it names are missing",
		       "finish the download, or read the folder as it is (--ignore-index)");
	return tnd__opener_settle(opener, rc);
}

/*
 * The part that was opened for each file of the index, NULL where it could not be. Parts are in the
 * order of the files.
 */
static void match_parts(struct tnd__opener *opener, struct tnd__part **part_of_file)
{
	size_t at = 0;

	for (size_t f = 0; f < opener->index.file_count; f++) {
		bool there = at < opener->part_count &&
			     strcmp(opener->parts[at].name, opener->index.files[f]) == 0;

		part_of_file[f] = there ? &opener->parts[at++] : NULL;
	}
}

/* Place of a name in a part's table, tensor_count if it is not there. `guess`: tried first. */
static size_t find_name(const struct tnd__header *header, const char *name, size_t bytes,
			size_t guess)
{
	size_t low = 0, high = header->tensor_count;

	if (guess < high && header->tensors[guess].name_bytes == bytes &&
	    memcmp(header->tensors[guess].name, name, bytes) == 0)
		return guess;
	while (low < high) {
		size_t middle = low + (high - low) / 2;
		const struct tnd_tensor *tensor = &header->tensors[middle];
		int order = tnd__compare(tensor->name, tensor->name_bytes, name, bytes);

		if (order == 0)
			return middle;
		if (order < 0)
			low = middle + 1;
		else
			high = middle;
	}
	return header->tensor_count;
}

/* Marks what the index gives to its file; lists the names that are not there. */
static void mark_named(struct tnd__opener *opener, struct tnd__part *const *part_of_file,
		       bool *const *marks, struct name_list *missing)
{
	size_t place = 0;

	for (size_t i = 0; i < opener->index.entry_count; i++) {
		const struct tnd_tensor *entry = &opener->index.entries[i];
		struct tnd__part *part = part_of_file[entry->file];

		if (!part)
			continue; /* a problem of its own, told already */
		place = find_name(&part->header, entry->name, entry->name_bytes, place);
		if (place < part->header.tensor_count)
			marks[part - opener->parts][place++] = true;
		else
			list_name(missing, entry->name, entry->name_bytes, part->name);
	}
}

/* Takes out of a part what is not marked. */
static void keep_marked(struct tnd__part *part, const bool *marks)
{
	struct tnd__header *header = &part->header;
	size_t kept = 0;

	for (size_t i = 0; i < header->tensor_count; i++)
		if (marks[i])
			header->tensors[kept++] = header->tensors[i];
	part->skipped_count = header->tensor_count - kept;
	header->tensor_count = kept;
}

static int apply_index(struct tnd__opener *opener)
{
	struct name_list missing = {0};
	struct tnd__part **part_of_file;
	size_t total = 0;
	bool **marks, *all;
	int rc;

	for (size_t i = 0; i < opener->part_count; i++)
		total += opener->parts[i].header.tensor_count;
	marks = tnd__checkpoint_alloc(opener->part_count * sizeof(*marks));
	all = tnd__checkpoint_alloc(total);
	part_of_file = tnd__checkpoint_alloc(opener->index.file_count * sizeof(*part_of_file));
	if (!marks || !all || !part_of_file) {
		rc = tnd__opener_no_memory(opener);
		goto out;
	}
	memset(all, 0, total);
	total = 0;
	for (size_t i = 0; i < opener->part_count; i++) {
		marks[i] = all + total;
		total += opener->parts[i].header.tensor_count;
	}
	match_parts(opener, part_of_file);
	mark_named(opener, part_of_file, marks, &missing);
	for (size_t i = 0; i < opener->part_count; i++)
		keep_marked(&opener->parts[i], marks[i]);
	rc = tnd__opener_settle(
		opener,
		fail_list(opener, &missing, opener->index.entry_count,
			  "names that it lists are not in their files",
			  "the index is of another version: get the matching one, or read the "
			  "folder as it is (--ignore-index)"));
out:
	tnd__text_free(&missing.text);
	free(part_of_file);
	free(all);
	free(marks);
	return rc;
}

/*
 * *.safetensors files that the index does not name are not opened; that they are there is worth a
 * word.
 */
static int warn_left_out(struct tnd__opener *opener)
{
	for (size_t i = 0; i < opener->entries.count; i++) {
		const char *name = opener->entries.items[i];

		if (!tnd__has_suffix(name, ".safetensors") ||
		    bsearch(&name, opener->index.files, opener->index.file_count, sizeof(name),
			    tnd__opener_compare))
			continue;
		if (tnd__sentences_add(&opener->warnings, "%s: not named by %s: left out", name,
				       opener->index_name) < 0)
			return tnd__opener_no_memory(opener);
	}
	return 0;
}

int tnd__open_indexed(struct tnd__opener *opener)
{
	char *path = tnd__path_join(opener->folder, opener->index_name), *text = NULL;
	struct stat stat_;
	size_t bytes;
	int rc;

	if (!path)
		return tnd__opener_no_memory(opener);
	rc = tnd__slurp(path, opener->index_name, INDEX_BYTES_MAX, &text, &bytes, &opener->error);
	free(path);
	if (rc == 0)
		rc = tnd__index_parse(text, bytes, opener->index_name, &opener->index,
				      &opener->error);
	if (rc < 0)
		return tnd__opener_settle(opener, rc);
	rc = check_files_exist(opener);
	for (size_t i = 0; i < opener->index.file_count && rc == 0; i++) {
		/* Only a check comes here with files missing: it has told them all. */
		path = opener->fn ? tnd__path_join(opener->folder, opener->index.files[i]) : NULL;
		if (!path || stat(path, &stat_) == 0 || (errno != ENOENT && errno != ENOTDIR))
			rc = tnd__opener_add(opener, opener->index.files[i]);
		free(path);
	}
	if (rc == 0)
		rc = apply_index(opener);
	if (rc == 0)
		rc = warn_left_out(opener);
	return rc;
}
