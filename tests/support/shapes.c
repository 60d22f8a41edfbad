/* SPDX-License-Identifier: Apache-2.0 */
#include "shapes.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct shapes {
	char path[512];
	char file[1024];
	FILE *text;
	char *header;
	size_t header_bytes;
	uint64_t data_bytes;
	unsigned pad, count;
};

static void require(int ok, const char *what)
{
	if (ok)
		return;
	perror(what);
	exit(99);
}

struct shapes *shapes_folder(void)
{
	struct shapes *shapes = calloc(1, sizeof(*shapes));
	const char *base = getenv("TMPDIR");

	require(shapes != NULL, "calloc");
	snprintf(shapes->path, sizeof(shapes->path), "%s/tnd-shapes-XXXXXX", base ? base : "/tmp");
	require(mkdtemp(shapes->path) != NULL, shapes->path);
	return shapes;
}

const char *shapes_path(const struct shapes *shapes)
{
	return shapes->path;
}

void shapes_remove(struct shapes *shapes)
{
	DIR *folder = opendir(shapes->path);
	struct dirent *entry;
	char path[1024];

	require(folder != NULL, shapes->path);
	while ((entry = readdir(folder))) {
		snprintf(path, sizeof(path), "%s/%s", shapes->path, entry->d_name);
		if (entry->d_name[0] != '.')
			require(unlink(path) == 0, path);
	}
	closedir(folder);
	require(rmdir(shapes->path) == 0, shapes->path);
	free(shapes);
}

void shapes_config(struct shapes *shapes, const char *json)
{
	FILE *file;

	snprintf(shapes->file, sizeof(shapes->file), "%s/config.json", shapes->path);
	file = fopen(shapes->file, "w");
	require(file != NULL, shapes->file);
	require(fputs(json, file) >= 0 && fclose(file) == 0, shapes->file);
}

void shapes_begin(struct shapes *shapes, const char *file_name)
{
	snprintf(shapes->file, sizeof(shapes->file), "%s/%s", shapes->path, file_name);
	shapes->text = open_memstream(&shapes->header, &shapes->header_bytes);
	require(shapes->text != NULL, "open_memstream");
	shapes->data_bytes = 0;
	shapes->count = shapes->pad = 0;
	fputc('{', shapes->text);
}

static unsigned dtype_bits(const char *dtype)
{
	const char *digits = dtype + strcspn(dtype, "0123456789");

	return strcmp(dtype, "BOOL") == 0 ? 8 : (unsigned)atoi(digits);
}

void shapes_add(struct shapes *shapes, const char *dtype, const char *shape, const char *format,
		...)
{
	uint64_t bits = dtype_bits(dtype);
	const char *at = shape;
	va_list args;
	char *end;

	while (*at) {
		bits *= strtoull(at, &end, 10);
		at = *end ? end + 1 : end;
	}
	fprintf(shapes->text, "%s\"", shapes->count++ ? "," : "");
	va_start(args, format);
	vfprintf(shapes->text, format, args);
	va_end(args);
	fprintf(shapes->text, "\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%llu,%llu]}",
		dtype, shape, (unsigned long long)shapes->data_bytes,
		(unsigned long long)(shapes->data_bytes + bits / 8));
	shapes->data_bytes += bits / 8;
}

void shapes_pad(struct shapes *shapes, unsigned bytes)
{
	shapes->pad = bytes;
}

void shapes_end(struct shapes *shapes)
{
	uint64_t length;
	int fd;

	fputc('}', shapes->text);
	for (unsigned i = 0; i < shapes->pad; i++)
		fputc(' ', shapes->text);
	require(fclose(shapes->text) == 0, "header");
	length = shapes->header_bytes;
	fd = open(shapes->file, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
	require(fd >= 0, shapes->file);
	require(write(fd, &length, 8) == 8 && write(fd, shapes->header, length) == (ssize_t)length,
		shapes->file);
	require(ftruncate(fd, (off_t)(8 + length + shapes->data_bytes)) == 0, shapes->file);
	close(fd);
	free(shapes->header);
}

static void add_expert(struct shapes *shapes, const char *prefix, int layer, int expert)
{
	static const char *const rows[] = {"w1", "w3"};

	for (int i = 0; i < 2; i++) {
		shapes_add(shapes, "I8", "2304,2560", "%slayers.%d.ffn.experts.%d.%s.weight",
			   prefix, layer, expert, rows[i]);
		shapes_add(shapes, "F8_E8M0", "2304,160", "%slayers.%d.ffn.experts.%d.%s.scale",
			   prefix, layer, expert, rows[i]);
	}
	shapes_add(shapes, "I8", "5120,1152", "%slayers.%d.ffn.experts.%d.w2.weight", prefix, layer,
		   expert);
	shapes_add(shapes, "F8_E8M0", "5120,72", "%slayers.%d.ffn.experts.%d.w2.scale", prefix,
		   layer, expert);
}

/* `large` tensors of 13,496,320 bytes and `small` ones of 10,240: made up so that the totals are those of the reference. */
static void add_others(struct shapes *shapes, const char *prefix, int layer, int large, int small)
{
	for (int i = 0; i < large; i++)
		shapes_add(shapes, "F8_E4M3", "5120,2636", "%slayers.%d.attn.wide_%d.weight",
			   prefix, layer, i);
	for (int i = 0; i < small; i++)
		shapes_add(shapes, "BF16", "5120", "%slayers.%d.norm_%d.weight", prefix, layer, i);
}

void shapes_experts(struct shapes *shapes)
{
	char name[64];

	shapes_config(shapes, "{\"n_routed_experts\":384}");
	for (int file = 0; file < SHAPES_EXPERT_FILES; file++) {
		snprintf(name, sizeof(name), "model-%05d-of-%05d.safetensors", file + 1,
			 SHAPES_EXPERT_FILES);
		shapes_begin(shapes, name);
		/* 15,360 experts over 47 files, whatever their layer; the last file is the draft's. */
		for (int all = file; file < 47 && all < 40 * 384; all += 47)
			add_expert(shapes, "", all / 384, all % 384);
		/* 38 others a layer: 20 of 13 MB. */
		if (file < 40)
			add_others(shapes, "", file, 20, 18);
		if (file == 47) {
			for (int expert = 0; expert < 384; expert++)
				add_expert(shapes, "mtp.", 0, expert);
			add_others(shapes, "mtp.", 0, 85, 12);
		}
		shapes_end(shapes);
	}
}
