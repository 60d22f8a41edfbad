/* SPDX-License-Identifier: Apache-2.0 */
/*
 * output.c - what leaves the program: JSON documents, files, and whether standard output took it
 * all
 *
 * Nothing that was to be written is lost silently: every stream is checked when it is closed, and a
 * failure is status 5. Reports are written beside their place and renamed, so that a reader never
 * sees half of one; where the target is not a regular file (/dev/stdout, a FIFO) it is written in
 * place.
 */
#include "tool.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void tool_json_set(json_t *object, const char *key, json_t *value, bool *failed)
{
	if (!value || json_object_set_new(object, key, value) != 0)
		*failed = true;
}

void tool_json_append(json_t *array, json_t *value, bool *failed)
{
	if (!value || json_array_append_new(array, value) != 0)
		*failed = true;
}

json_t *tool_json_u64(uint64_t value)
{
	return value <= INT64_MAX ? json_integer((json_int_t)value) : json_real((double)value);
}

json_t *tool_json_name(const char *name)
{
	json_t *value = json_string(name);
	char *text;

	if (value)
		return value;
	text = tool_printable(name, strlen(name));
	value = text ? json_string(text) : NULL;
	free(text);
	return value;
}

json_t *tool_json_document(const char *schema)
{
	json_t *document = json_object();

	if (document && json_object_set_new(document, "schema", json_string(schema)) != 0) {
		json_decref(document);
		return NULL;
	}
	return document;
}

int tool_json_print(json_t *document, bool failed)
{
	int status = TOOL_OK;

	/* A failing stream is found by tool_output_finish, which knows the errno's text. */
	if (!document || failed)
		status = tool_fail(-ENOMEM, NULL);
	else if (json_dumpf(document, stdout, JSON_INDENT(2)) != 0 && !ferror(stdout))
		status = tool_fail(-ENOMEM, NULL);
	else
		putchar('\n');
	json_decref(document);
	return status;
}

void tool_json_quote(FILE *stream, const char *text, size_t text_bytes)
{
	putc('"', stream);
	for (size_t i = 0; i < text_bytes; i++) {
		unsigned char c = (unsigned char)text[i];

		if (c < 0x20 || c == 0x7f)
			fprintf(stream, "\\u%04x", c);
		else if (c == '"' || c == '\\')
			fprintf(stream, "\\%c", c);
		else
			putc(c, stream);
	}
	putc('"', stream);
}

static bool in_place(const char *path)
{
	struct stat st;

	return stat(path, &st) == 0 && !S_ISREG(st.st_mode);
}

int tool_file_probe(const char *path)
{
	char *copy;
	int code = 0;

	if (in_place(path))
		return access(path, W_OK) == 0 ? 0 : -errno;
	copy = strdup(path);
	if (!copy)
		return -ENOMEM;
	if (access(dirname(copy), W_OK) != 0)
		code = -errno;
	free(copy);
	return code;
}

static int open_temp(struct tool_file *file)
{
	mode_t mask;
	int fd;

	if (asprintf(&file->temp, "%s.XXXXXX", file->path) < 0) {
		file->temp = NULL;
		return -ENOMEM;
	}
	fd = mkostemp(file->temp, O_CLOEXEC);
	if (fd < 0)
		return -errno;
	/* mkostemp makes files that only their owner may read. */
	mask = umask(0);
	umask(mask);
	if (fchmod(fd, 0666 & ~mask) != 0) {
		int code = -errno;

		close(fd);
		unlink(file->temp);
		return code;
	}
	return fd;
}

int tool_file_open(struct tool_file *file, const char *path)
{
	int fd;

	*file = (struct tool_file){.path = path};
	if (in_place(path)) {
		fd = open(path, O_WRONLY | O_CLOEXEC);
		if (fd < 0)
			return -errno;
	} else {
		fd = open_temp(file);
		if (fd < 0) {
			free(file->temp);
			file->temp = NULL;
			return fd;
		}
	}
	file->stream = fdopen(fd, "w");
	if (!file->stream) {
		close(fd);
		tool_file_abort(file);
		return -ENOMEM;
	}
	return 0;
}

int tool_file_commit(struct tool_file *file)
{
	int code = 0;

	errno = 0;
	if (fflush(file->stream) != 0 || ferror(file->stream))
		code = errno ? -errno : -EIO;
	if (fclose(file->stream) != 0 && code == 0)
		code = -errno;
	file->stream = NULL;
	if (code == 0 && file->temp && rename(file->temp, file->path) != 0)
		code = -errno;
	if (code != 0) {
		tool_file_abort(file);
		return code;
	}
	free(file->temp);
	file->temp = NULL;
	return 0;
}

void tool_file_abort(struct tool_file *file)
{
	if (file->stream)
		fclose(file->stream);
	if (file->temp) {
		unlink(file->temp);
		free(file->temp);
	}
	*file = (struct tool_file){0};
}

void tool_output_init(void)
{
	for (int fd = 0; fd <= 2; fd++) {
		if (fcntl(fd, F_GETFD) >= 0 || errno != EBADF)
			continue;
		/*
		 * Read-only on purpose: a write to a standard output that was closed has to fail.
		 * The lowest free number is `fd`.
		 */
		if (open("/dev/null", fd == 2 ? O_WRONLY : O_RDONLY) < 0)
			_exit(TOOL_IO);
	}
}

int tool_output_finish(int status)
{
	int code = 0;

	if (fflush(stdout) != 0)
		code = errno;
	else if (ferror(stdout))
		/*
		 * Lost earlier, with an errno that nobody kept: what it was shows when one more
		 * byte is tried.
		 */
		code = write(STDOUT_FILENO, "\n", 1) < 0 ? errno : EIO;
	if (fclose(stdout) != 0 && code == 0)
		code = errno;
	if (code == 0)
		return status;
	fprintf(stderr, "tundish: cannot write to standard output: %s\n", strerror(code));
	return TOOL_IO;
}
