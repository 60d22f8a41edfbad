/* SPDX-License-Identifier: Apache-2.0 */
/*
 * driver.c - runs a fuzz target over files and folders of them, for compilers without libFuzzer
 *
 *   driver CORPUS...      each file once, in byte order; each of its prefixes too, if it is below 512 bytes
 *
 * Exit status: 0 after all of them; 1 if there was none, one could not be read, or the target found something, with the input's name on
 * standard error.
 */
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz.h"

#define PREFIX_BYTES 512

static size_t run_count;
static const char *volatile running;

/* A target that finds something aborts: its input is named before the process ends. */
static void name_input(int number)
{
	(void)number;
	if (running && write(STDERR_FILENO, running, strlen(running)) < 0)
		_exit(2);
	_exit(1);
}

static int run_file(const char *path)
{
	FILE *file = fopen(path, "re");
	struct stat stat_ = {0}; /* MemorySanitizer does not see fstat() write it */
	uint8_t *data = NULL, *copy;
	int rc = -1;

	if (!file || fstat(fileno(file), &stat_) < 0)
		goto out;
	data = malloc((size_t)stat_.st_size + 1);
	if (!data || fread(data, 1, (size_t)stat_.st_size, file) != (size_t)stat_.st_size)
		goto out;
	running = path;
	LLVMFuzzerTestOneInput(data, (size_t)stat_.st_size);
	for (size_t cut = 0; stat_.st_size < PREFIX_BYTES && cut < (size_t)stat_.st_size; cut++) {
		/* An allocation of its own size, so that a sanitizer sees a read past it. */
		copy = malloc(cut ? cut : 1);
		if (!copy)
			goto out;
		memcpy(copy, data, cut);
		LLVMFuzzerTestOneInput(copy, cut);
		free(copy);
	}
	running = NULL;
	run_count++;
	rc = 0;
out:
	if (rc < 0)
		fprintf(stderr, "%s: %s\n", path, strerror(errno));
	free(data);
	if (file)
		fclose(file);
	return rc;
}

static int visible(const struct dirent *entry)
{
	return entry->d_name[0] != '.';
}

static int run_path(const char *path)
{
	struct dirent **entries;
	char inner[4096];
	int count = scandir(path, &entries, visible, alphasort), rc = 0;

	if (count < 0)
		return run_file(path);
	for (int i = 0; i < count; i++) {
		snprintf(inner, sizeof(inner), "%s/%s", path, entries[i]->d_name);
		if (rc == 0)
			rc = run_file(inner);
		free(entries[i]);
	}
	free(entries);
	return rc;
}

int main(int argc, char **argv)
{
	int rc = 0;

	signal(SIGABRT, name_input);
	for (int i = 1; i < argc && rc == 0; i++)
		rc = run_path(argv[i]);
	printf("%zu inputs\n", run_count);
	return rc < 0 || !run_count;
}
