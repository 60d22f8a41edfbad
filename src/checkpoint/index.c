/* SPDX-License-Identifier: Apache-2.0 */
/*
 * index.c - the index of a checkpoint of many files
 *
 *   {"metadata": {"total_size": ...}, "weight_map": {"name": "model-00001-of-00002.safetensors", ...}}
 *
 * weight_map is the authority; metadata is a hint and not looked at. File names are relative to the index and stay below it: an
 * absolute path or `..` is refused, a symbolic link is followed. Here only the text is checked; that files and names exist is checked by
 * the opener.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "parts.h"

#define SUFFIX ".safetensors.index.json"

static int fail_at(const char *name, int code, struct tnd_error *error, const char *what,
		   const char *found)
{
	char shown[256];

	return tnd__fail(error, code, &(struct tnd__where){.file = name}, what,
			 tnd__printable(found, strlen(found), shown, sizeof(shown)));
}

/* Whether a file's name stays in the folder of the index. */
static bool is_below(const char *file)
{
	if (*file == '/' || *file == '\0')
		return false;
	for (const char *at = file; at; at = strchr(at, '/')) {
		at += *at == '/';
		if (strncmp(at, "..", 2) == 0 && (at[2] == '/' || at[2] == '\0'))
			return false;
	}
	return true;
}

static int compare_texts(const void *a, const void *b)
{
	return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int list_files(struct tnd__index *index, const char *name, struct tnd_error *error)
{
	const char *tensor, *last = NULL;
	size_t capacity = 0, unique = 0;
	json_t *file;

	json_object_foreach(index->weight_map, tensor, file)
	{
		const char *text = json_string_value(file);

		if (!text)
			return fail_at(name, TND_E_INDEX, error,
				       "expected weight_map['%s'] to be the name of a file, found "
				       "something else",
				       tensor);
		/* Neighbours mostly name the same file: most repetitions go here, the others after sorting. */
		if (last && strcmp(last, text) == 0)
			continue;
		last = text;
		if (!is_below(text))
			return fail_at(name, TND_E_INDEX, error,
				       "expected files below the folder of the index, found '%s': "
				       "absolute paths and .. are refused",
				       text);
		if (tnd__checkpoint_reserve(&index->files, &capacity, index->file_count + 1,
					    sizeof(*index->files)) < 0)
			return fail_at(name, -ENOMEM, error, "%s", "no memory for its files");
		index->files[index->file_count++] = text;
	}
	if (!index->file_count)
		return fail_at(name, TND_E_INDEX, error, "%s", "its weight_map is empty");
	qsort(index->files, index->file_count, sizeof(*index->files), compare_texts);
	for (size_t i = 0; i < index->file_count; i++)
		if (!i || strcmp(index->files[i], index->files[unique - 1]) != 0)
			index->files[unique++] = index->files[i];
	index->file_count = unique;
	return 0;
}

int tnd__index_parse(const char *text, size_t bytes, const char *name, struct tnd__index *ret_index,
		     struct tnd_error *reterr)
{
	struct tnd__index index = {0};
	json_error_t error;
	int rc;

	index.document = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
	if (!index.document && json_error_code(&error) == json_error_out_of_memory)
		return fail_at(name, -ENOMEM, reterr, "%s", "no memory to parse it");
	if (!index.document) {
		struct tnd__where where = {
			.file = name, .byte_offset = (uint64_t)error.position, .has_offset = true};

		char shown[JSON_ERROR_TEXT_LENGTH * 2];

		tnd__printable(error.text, strlen(error.text), shown, sizeof(shown));
		return tnd__fail(reterr, TND_E_INDEX, &where,
				 "not a valid index: %s (line %d, byte %d)", shown, error.line,
				 error.position);
	}
	index.weight_map = json_object_get(index.document, "weight_map");
	if (json_is_object(index.weight_map))
		rc = list_files(&index, name, reterr);
	else
		rc = fail_at(name, TND_E_INDEX, reterr, "%s",
			     "expected an object 'weight_map', name to file, found none");
	if (rc < 0)
		tnd__index_free(&index);
	else
		*ret_index = index;
	return rc;
}

void tnd__index_free(struct tnd__index *index)
{
	free(index->files);
	json_decref(index->document);
	memset(index, 0, sizeof(*index));
}

static bool is_index(const char *name)
{
	size_t bytes = strlen(name), suffix = sizeof(SUFFIX) - 1;

	return bytes > suffix && strcmp(name + bytes - suffix, SUFFIX) == 0 && *name != '.';
}

int tnd__index_choose(char *const *names, size_t name_count, const char *folder,
		      const char **ret_name, struct tnd_error *reterr)
{
	static const char *const known[] = {"model" SUFFIX, "consolidated" SUFFIX,
					    "diffusion_pytorch_model" SUFFIX};
	const char *other = NULL;
	size_t other_count = 0;

	for (size_t k = 0; k < sizeof(known) / sizeof(known[0]); k++)
		for (size_t i = 0; i < name_count; i++)
			if (strcmp(names[i], known[k]) == 0) {
				*ret_name = names[i];
				return 1;
			}
	for (size_t i = 0; i < name_count; i++)
		if (is_index(names[i])) {
			other = names[i];
			other_count++;
		}
	if (other_count > 1)
		return tnd__fail(reterr, TND_E_INDEX, &(struct tnd__where){.file = folder},
				 "expected one index, found %zu (%s among them): open one of them "
				 "by its path, or all files with --ignore-index",
				 other_count, other);
	if (other)
		*ret_name = other;
	return other ? 1 : 0;
}
