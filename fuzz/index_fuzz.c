/* SPDX-License-Identifier: Apache-2.0 */
/*
 * index_fuzz.c - index.json and config.json against hostile bytes
 *
 * Both parsers get the same bytes. Found here: crashes and leaks (sanitizers), a file name that leads out of the folder, a list of files
 * that is not sorted and unique.
 */
#include <stdlib.h>
#include <string.h>

#include "checkpoint/parts.h"
#include "fuzz.h"

static void check_index(const struct tnd__index *index)
{
	if (!index->file_count || !index->entry_count)
		fuzz_fail("an index without files was accepted");
	for (size_t i = 0; i < index->entry_count; i++)
		if (index->entries[i].file >= index->file_count ||
		    index->entries[i].name[index->entries[i].name_bytes] != '\0')
			fuzz_fail("entry %zu is broken", i);
	for (size_t i = 0; i < index->file_count; i++) {
		const char *file = index->files[i];
		size_t bytes = strlen(file);

		if (i && strcmp(index->files[i - 1], file) >= 0)
			fuzz_fail("files out of order: %s", file);
		if (file[0] == '/' || !bytes || strcmp(file, "..") == 0 ||
		    strncmp(file, "../", 3) == 0 || strstr(file, "/../") ||
		    (bytes >= 3 && strcmp(file + bytes - 3, "/..") == 0))
			fuzz_fail("leads out of the folder: %s", file);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct tnd__sentences warnings = {0};
	struct tnd__config config;
	struct tnd__index index;
	struct tnd_error error;
	char *text;
	int rc;

	text = malloc(bytes ? bytes : 1);
	if (!text)
		return 0;
	memcpy(text, data, bytes);
	rc = tnd__index_parse(text, bytes, "fuzz", &index, &error);
	if (rc == 0) {
		check_index(&index);
		tnd__index_free(&index);
	} else if (error.code != rc || strncmp(error.message, "fuzz: ", 6) != 0) {
		fuzz_fail("a refusal without its sentence: %d", rc);
	}
	text = malloc(bytes ? bytes : 1);
	if (!text)
		return 0;
	memcpy(text, data, bytes);
	rc = tnd__config_parse(text, bytes, "fuzz", &config, &warnings);
	free(text);
	if (rc == 0 && (config.expert_count == 0 || config.draft_expert_count == 0))
		fuzz_fail("a stack of no experts");
	tnd__sentences_free(&warnings);
	return 0;
}
