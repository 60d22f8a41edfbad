/* SPDX-License-Identifier: Apache-2.0 */
/*
 * index.c - the index of a checkpoint of many files
 *
 *   {"metadata": {...}, "weight_map": {"name": "model-00001-of-00002.safetensors", ...}}
 *
 * weight_map is the authority; metadata is a hint and not looked at. File names are relative to the
 * index and stay below it: an absolute path or `..` is refused, a symbolic link is followed. Here
 * only the text is checked; that files and names exist is checked by the opener.
 *
 * Read with the header's cursor and not with jansson: 100,000 names took jansson 300 ms and 24 MB
 * that its many small allocations left in the heap; this is one pass over the text, which is also
 * what the names live in.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "jsontext.h"
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

/* While parsing: one name of a file, and how many neighbouring entries begin to have it here. */
struct run {
	const char *file;
	size_t number;
};

struct parse {
	struct tnd__json json;
	struct tnd__index *index;
	struct run *runs;
	size_t run_count, run_capacity, entry_capacity;
};

static int no_memory(const struct parse *parse)
{
	return fail_at(parse->json.file, -ENOMEM, parse->json.error, "%s", "no memory for it");
}

/* A NUL after the string: its closing quote, at the latest, is dead text by now. */
static const char *end_text(const struct tnd__span *span)
{
	char *text = (char *)(uintptr_t)span->text;

	text[span->bytes] = '\0';
	return text;
}

/*
 * The value of an entry: the name of its file. Neighbours mostly have the same: they share a run.
 */
static int parse_file(struct parse *parse, struct tnd_tensor *entry)
{
	struct tnd__json *json = &parse->json;
	const unsigned char *at = json->at;
	struct tnd__span span;
	const char *file;
	int rc;

	if (at < json->end && *at != '"')
		return tnd__json_expected(json, "the name of a file");
	rc = tnd__json_string(json, &span);
	if (rc < 0)
		return rc;
	if (memchr(span.text, '\0', span.bytes))
		return tnd__json_fail(json, TND_E_INDEX, at,
				      "expected the name of a file, found one with a NUL in it");
	file = end_text(&span);
	if (!parse->run_count || strcmp(parse->runs[parse->run_count - 1].file, file) != 0) {
		if (!is_below(file))
			return fail_at(json->file, TND_E_INDEX, json->error,
				       "expected files below the folder of the index, found '%s': "
				       "absolute paths and .. are refused",
				       file);
		if (tnd__checkpoint_reserve(&parse->runs, &parse->run_capacity,
					    parse->run_count + 1, sizeof(*parse->runs)) < 0)
			return no_memory(parse);
		parse->runs[parse->run_count] = (struct run){file, parse->run_count};
		parse->run_count++;
	}
	entry->file = (uint32_t)(parse->run_count - 1);
	return 0;
}

static int parse_weight_map(struct parse *parse)
{
	struct tnd__index *index = parse->index;
	struct tnd__json *json = &parse->json;
	struct tnd__span name;
	bool first = true;
	int rc;

	rc = tnd__json_take(json, '{', "weight_map to be an object, name to file");
	if (rc < 0)
		return rc;
	while ((rc = tnd__json_next(json, '}', &first)) > 0) {
		struct tnd_tensor *entry;

		if (tnd__checkpoint_reserve(&index->entries, &parse->entry_capacity,
					    index->entry_count + 1, sizeof(*index->entries)) < 0)
			return no_memory(parse);
		rc = tnd__json_key(json, &name);
		if (rc < 0)
			return rc;
		entry = &index->entries[index->entry_count++];
		memset(entry, 0, sizeof(*entry));
		entry->name = json->name = end_text(&name);
		entry->name_bytes = (uint32_t)(json->name_bytes = name.bytes);
		rc = parse_file(parse, entry);
		if (rc < 0)
			return rc;
		json->name = NULL;
	}
	return rc;
}

static int parse_document(struct parse *parse)
{
	struct tnd__json *json = &parse->json;
	struct tnd__span key;
	bool first = true, seen = false;
	int rc;

	rc = tnd__json_take(json, '{', "the index to be a JSON object with weight_map");
	if (rc < 0)
		return rc;
	while ((rc = tnd__json_next(json, '}', &first)) > 0) {
		const unsigned char *at = json->at;
		bool is_map;

		rc = tnd__json_key(json, &key);
		if (rc < 0)
			return rc;
		is_map = tnd__span_is(&key, "weight_map", 10);
		if (is_map && seen)
			return tnd__json_fail(json, TND_E_INDEX, at, "a second weight_map");
		seen |= is_map;
		rc = is_map ? parse_weight_map(parse) : tnd__json_skip(json);
		if (rc < 0)
			return rc;
	}
	if (rc < 0)
		return rc;
	tnd__json_space(json);
	if (json->at != json->end)
		return tnd__json_expected(json, "only white space after the index");
	if (!parse->index->entry_count)
		return fail_at(json->file, TND_E_INDEX, json->error, "expected names, %s",
			       seen ? "its weight_map is empty" : "it has no weight_map");
	return 0;
}

static int compare_runs(const void *a, const void *b)
{
	return strcmp(((const struct run *)a)->file, ((const struct run *)b)->file);
}

/* Runs become the list of files; entries, which have a run's number, get the file's. */
static int list_files(struct parse *parse)
{
	struct tnd__index *index = parse->index;
	size_t *file_of_run = tnd__checkpoint_alloc(parse->run_count * sizeof(*file_of_run));

	index->files = tnd__checkpoint_alloc(parse->run_count * sizeof(*index->files));
	if (!index->files || !file_of_run) {
		free(file_of_run);
		return no_memory(parse);
	}
	qsort(parse->runs, parse->run_count, sizeof(*parse->runs), compare_runs);
	for (size_t i = 0; i < parse->run_count; i++) {
		if (!i || strcmp(parse->runs[i].file, parse->runs[i - 1].file) != 0)
			index->files[index->file_count++] = parse->runs[i].file;
		file_of_run[parse->runs[i].number] = index->file_count - 1;
	}
	for (size_t i = 0; i < index->entry_count; i++)
		index->entries[i].file = (uint32_t)file_of_run[index->entries[i].file];
	free(file_of_run);
	return 0;
}

static int check_names(struct parse *parse)
{
	const struct tnd_tensor *entries = parse->index->entries;
	size_t count = parse->index->entry_count;
	struct tnd__sort_key *keys = tnd__checkpoint_alloc(2 * count * sizeof(*keys));
	int rc = 0;

	if (!keys)
		return no_memory(parse);
	for (size_t i = 0; i < count; i++)
		keys[i].index = i;
	tnd__sort_names(entries, keys, keys + count, count);
	for (size_t i = 1; i < count && rc == 0; i++) {
		const struct tnd_tensor *a = &entries[keys[i - 1].index],
					*b = &entries[keys[i].index];
		struct tnd__where where = {
			.file = parse->json.file, .name = b->name, .name_bytes = b->name_bytes};

		if (tnd__compare(a->name, a->name_bytes, b->name, b->name_bytes) == 0)
			rc = tnd__fail(parse->json.error, TND_E_INDEX, &where,
				       "duplicate name: expected it once in weight_map");
	}
	free(keys);
	return rc;
}

int tnd__index_parse(char *text, size_t bytes, const char *name, struct tnd__index *ret_index,
		     struct tnd_error *reterr)
{
	struct tnd__index index = {.text = text};
	struct parse parse = {
		.json = {.start = (unsigned char *)text,
			 .at = (unsigned char *)text,
			 .end = (unsigned char *)text + bytes,
			 .file = name,
			 .whole = "the index",
			 .code = TND_E_INDEX,
			 .error = reterr},
		.index = &index,
	};
	int rc;

	rc = parse_document(&parse);
	if (rc == 0)
		rc = list_files(&parse);
	if (rc == 0)
		rc = check_names(&parse);
	free(parse.runs);
	if (rc < 0)
		tnd__index_free(&index);
	else
		*ret_index = index;
	return rc;
}

void tnd__index_free(struct tnd__index *index)
{
	free(index->files);
	free(index->entries);
	free(index->text);
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
