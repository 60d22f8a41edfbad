/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fds.h - what this process has open: descriptors, threads, mappings, for tests of what is left
 *
 * Without cmocka's asserts, which would jump into the parent's test from a forked child: a count
 * that cannot be had ends the process.
 */
#ifndef TND_TEST_FDS_H
#define TND_TEST_FDS_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Entries of a folder of this process, "." and ".." not counted. */
static inline unsigned int entry_count(const char *folder)
{
	DIR *dir = opendir(folder);
	struct dirent *entry;
	unsigned int count = 0;

	if (!dir) {
		perror(folder);
		abort();
	}
	while ((entry = readdir(dir)))
		count += entry->d_name[0] != '.';
	closedir(dir);
	return count;
}

/* Without the one that reads the folder. */
static inline unsigned int fd_count(void)
{
	return entry_count("/proc/self/fd") - 1;
}

static inline unsigned int thread_count(void)
{
	return entry_count("/proc/self/task");
}

/* Mappings in whose line `word` stands; "": all. */
static inline unsigned int map_count(const char *word)
{
	FILE *file = fopen("/proc/self/maps", "re");
	char line[1024];
	unsigned int count = 0;

	if (!file) {
		perror("/proc/self/maps");
		abort();
	}
	while (fgets(line, sizeof(line), file))
		count += strchr(line, '\n') && strstr(line, word);
	fclose(file);
	return count;
}

#endif
