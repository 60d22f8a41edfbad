/* SPDX-License-Identifier: Apache-2.0 */
#include "ckfile.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static uint64_t seed_of(const char *name)
{
	uint64_t seed = 1469598103934665603u;

	for (; *name; name++)
		seed = (seed ^ (unsigned char)*name) * 1099511628211u;
	return seed;
}

static uint64_t word_at(uint64_t seed, uint64_t index)
{
	seed += index * 0x9e3779b97f4a7c15u;
	seed ^= seed >> 29;
	return seed * 0xbf58476d1ce4e5b9u;
}

unsigned char ck_byte(const char *name, uint64_t at)
{
	return (unsigned char)(word_at(seed_of(name), at / 8) >> (8 * (at % 8)));
}

/* The first `bytes` of tensor `name`, little-endian words; room for 7 more. */
static void fill(const char *name, unsigned char *data, uint64_t bytes)
{
	uint64_t seed = seed_of(name);

	for (uint64_t b = 0; b < bytes; b += 8) {
		uint64_t word = word_at(seed, b / 8);

		memcpy(data + b, &word, sizeof(word));
	}
}

static void require(int ok, const char *what)
{
	if (ok)
		return;
	perror(what);
	exit(99);
}

void ck_write(const char *path, const struct ck_tensor *tensors, size_t count, const char *filler)
{
	char *header = NULL;
	size_t header_bytes = 0;
	FILE *text = open_memstream(&header, &header_bytes), *file;
	uint64_t at = 0, length;

	require(text != NULL, "open_memstream");
	fprintf(text, "{\"__metadata__\":{\"filler\":\"%s\"}", filler);
	for (size_t i = 0; i < count; i++) {
		fprintf(text, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", tensors[i].name,
			tensors[i].dtype);
		for (unsigned d = 0; d < tensors[i].dim_count; d++)
			fprintf(text, "%s%llu", d ? "," : "",
				(unsigned long long)tensors[i].shape[d]);
		fprintf(text, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at,
			(unsigned long long)(at + tensors[i].bytes));
		at += tensors[i].bytes;
	}
	fputs("}", text);
	require(fclose(text) == 0, "header");
	file = fopen(path, "wb");
	require(file != NULL, path);
	length = header_bytes;
	require(fwrite(&length, 8, 1, file) == 1 &&
			fwrite(header, 1, header_bytes, file) == header_bytes,
		path);
	for (size_t i = 0; i < count; i++) {
		unsigned char *data = malloc(tensors[i].bytes + 8);

		require(data != NULL, "malloc");
		fill(tensors[i].name, data, tensors[i].bytes);
		require(fwrite(data, 1, tensors[i].bytes, file) == tensors[i].bytes, path);
		free(data);
	}
	require(fclose(file) == 0, path);
	free(header);
}

char *ck_folder(void)
{
	const char *base = getenv("TMPDIR");
	char *folder = NULL;

	require(asprintf(&folder, "%s/tundish-test-XXXXXX", base ? base : "/tmp") > 0, "asprintf");
	require(mkdtemp(folder) != NULL, folder);
	return folder;
}

void ck_remove(char *folder)
{
	DIR *dir = opendir(folder);
	struct dirent *entry;

	require(dir != NULL, folder);
	while ((entry = readdir(dir)))
		if (entry->d_name[0] != '.')
			unlinkat(dirfd(dir), entry->d_name, 0);
	closedir(dir);
	rmdir(folder);
	free(folder);
}
