/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load_files.c - the checksum and trace files: a share from each rank, put together by their parent
 */
#include "load_parts.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int by_name(const void *a, const void *b)
{
	return tool_compare_names(((const struct load_sum *)a)->tensor,
				  ((const struct load_sum *)b)->tensor);
}

int load_sums_write(struct load_sum *sums, size_t count, uint32_t rank, int fd)
{
	FILE *stream = fdopen(dup(fd), "w");
	int code = 0;

	if (!stream)
		return -errno;
	qsort(sums, count, sizeof(*sums), by_name);
	for (size_t i = 0; i < count && code == 0; i++) {
		char *name = tool_printable(sums[i].tensor->name, sums[i].tensor->name_bytes);

		if (!name)
			code = -ENOMEM;
		else
			fprintf(stream, "%u\t%s\t%" PRIu64 "\t%016" PRIx64 "\n", rank, name,
				sums[i].bytes, sums[i].hash);
		free(name);
	}
	if (fclose(stream) != 0 && code == 0)
		code = -errno;
	return code;
}

void load_trace_event(FILE *stream, const char *stage, const struct tnd_view *view, uint32_t rank,
		      int64_t begin_us, int64_t end_us)
{
	fputs(",\n{\"name\":", stream);
	tool_json_quote(stream, view->name, view->name_bytes);
	fprintf(stream,
		",\"cat\":\"%s\",\"ph\":\"X\",\"ts\":%" PRId64 ",\"dur\":%" PRId64
		",\"pid\":%u,\"tid\":%d,\"args\":{\"bytes\":%" PRIu64 "}}",
		stage, begin_us, end_us - begin_us, rank, stage[0] == 'w' ? 1 : 2, view->bytes);
}

/* Everything that a child wrote into its memfd. Return: 0, -errno. */
static int copy_share(FILE *stream, int fd)
{
	char piece[65536];
	off_t offset = 0;

	for (;;) {
		ssize_t got = pread(fd, piece, sizeof(piece), offset);

		if (got < 0)
			return -errno;
		if (got == 0)
			return 0;
		if (fwrite(piece, 1, (size_t)got, stream) != (size_t)got)
			return errno ? -errno : -EIO;
		offset += got;
	}
}

static int finish(struct tool_file *file, int code, const char *path)
{
	if (code == 0)
		code = tool_file_commit(file);
	else
		tool_file_abort(file);
	return code == 0 ? TOOL_OK : tool_fail_what(code, path);
}

int load_checksum_file(const struct load_node *node)
{
	const char *path = node->command->checksum_path;
	struct tool_file file;
	int code = tool_file_open(&file, path);

	for (size_t i = 0; code == 0 && i < node->count; i++)
		code = copy_share(file.stream, node->ranks[i].checksum_fd);
	return finish(&file, code, path);
}

int load_trace_file(const struct load_node *node)
{
	const char *path = node->command->trace_path;
	struct tool_file file;
	int code = tool_file_open(&file, path);

	if (code == 0)
		fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n"
		      "{\"name\":\"load\",\"ph\":\"M\",\"pid\":0,\"args\":{}}",
		      file.stream);
	for (size_t i = 0; code == 0 && i < node->count; i++) {
		unsigned rank = node->ranks[i].rank;

		fprintf(file.stream,
			",\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%u,\"args\":{\"name\":"
			"\"rank %u\"}}"
			",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%u,\"tid\":1,\"args\":{"
			"\"name\":\"wait\"}}"
			",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%u,\"tid\":2,\"args\":{"
			"\"name\":\"consume\"}}",
			rank, rank, rank, rank);
		code = copy_share(file.stream, node->ranks[i].trace_fd);
	}
	if (code == 0)
		fputs("\n]}\n", file.stream);
	return finish(&file, code, path);
}
