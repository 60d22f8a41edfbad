/* SPDX-License-Identifier: Apache-2.0 */
/* meminfo.c - /proc/meminfo */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "host_internal.h"

uint64_t tnd__line_number(const char *text, const char *key)
{
	size_t key_bytes = strlen(key);

	for (const char *line = text; line; line = strchr(line, '\n')) {
		char *end;
		unsigned long long number;

		line += *line == '\n';
		if (strncmp(line, key, key_bytes) != 0)
			continue;
		if (line[key_bytes] != ' ' && line[key_bytes] != '\t')
			continue;
		errno = 0;
		number = strtoull(line + key_bytes, &end, 10);
		return end == line + key_bytes || errno ? TND_HOST_UNKNOWN : number;
	}
	return TND_HOST_UNKNOWN;
}

static uint64_t kib_line(const char *text, const char *key)
{
	uint64_t kib = tnd__line_number(text, key);

	return kib > UINT64_MAX >> 11 ? TND_HOST_UNKNOWN : TND__KIB(kib);
}

int tnd__meminfo_read(const char *root, struct tnd_host_memory *memory)
{
	const struct {
		const char *key;
		uint64_t *bytes;
	} fields[] = {
		{"MemTotal:", &memory->mem_total},
		{"MemFree:", &memory->mem_free},
		{"MemAvailable:", &memory->mem_available},
		{"Buffers:", &memory->buffers},
		{"Cached:", &memory->cached},
		{"AnonPages:", &memory->anon_pages},
		{"Shmem:", &memory->shmem},
		{"Mapped:", &memory->mapped},
		{"Slab:", &memory->slab},
		{"KernelStack:", &memory->kernel_stack},
		{"PageTables:", &memory->page_tables},
		{"SecPageTables:", &memory->sec_page_tables},
		{"Percpu:", &memory->percpu},
	};
	char path[4096], text[8192];
	ssize_t got;

	snprintf(path, sizeof(path), "%s/proc/meminfo", root);
	got = tnd__read_small(path, text, sizeof(text));
	if (got < 0)
		return (int)got;
	for (size_t i = 0; i < sizeof(fields) / sizeof(*fields); i++)
		*fields[i].bytes = kib_line(text, fields[i].key);
	return 0;
}
