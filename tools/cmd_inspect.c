/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cmd_inspect.c - `tundish inspect`: files and tensors of a checkpoint, as read from its headers
 *
 * Two tables, or one document (tundish.inspect/1) of the same. The table of files shows all of
 * them, that of tensors what --filter lets through, in the checkpoint's order or that of --sort.
 * Names are made printable in tables and are exact in the document.
 */
#include "tool.h"

#include <errno.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { KEY_FILTER = TOOL_KEY, KEY_SORT, KEY_JSON };
enum { SORT_NONE, SORT_NAME, SORT_SIZE, SORT_OFFSET };

struct inspect {
	const char *path;
	const char *filter;
	uint32_t sort;
	bool json;
	struct tnd_checkpoint_opts opts;
};

static const struct argp_option options[] = {
	{"filter", KEY_FILTER, "GLOB", 0, "Only tensors of these names", 0},
	{"sort", KEY_SORT, "KEY", 0, "name, size (largest first) or offset", 0},
	{"json", KEY_JSON, NULL, 0, "One JSON document", 0},
	{0},
};
static const struct tool_choice sorts[] = {
	{"name", SORT_NAME}, {"size", SORT_SIZE}, {"offset", SORT_OFFSET}};

static error_t parse(int key, char *arg, struct argp_state *state)
{
	struct inspect *in = state->input;

	switch (key) {
	case KEY_FILTER:
		in->filter = arg;
		return 0;
	case KEY_SORT:
		in->sort = tool_choose(state, "--sort", arg, sorts, 3);
		return 0;
	case KEY_JSON:
		in->json = true;
		return 0;
	case ARGP_KEY_INIT:
		state->child_inputs[1] = &in->opts;
		return 0;
	case ARGP_KEY_ARG:
		tool_take_path(state, &in->path, arg);
		return 0;
	case ARGP_KEY_END:
		tool_need_path(state, in->path);
		return 0;
	default:
		return ARGP_ERR_UNKNOWN;
	}
}

static const struct argp_child children[] = {
	{&tool_common_argp, 0, NULL, 0}, {&tool_checkpoint_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {
	.options = options,
	.parser = parse,
	.args_doc = "PATH",
	.doc = "Shows the files and tensors of a checkpoint. PATH is a file or a folder.",
	.children = children};

static bool wanted(const struct inspect *in, const struct tnd_tensor *tensor)
{
	if (!in->filter || strcmp(in->filter, "*") == 0)
		return true;
	return !memchr(tensor->name, '\0', tensor->name_bytes) &&
	       fnmatch(in->filter, tensor->name, 0) == 0;
}

static int by_name(const void *a, const void *b)
{
	return tool_compare_names(*(const struct tnd_tensor *const *)a,
				  *(const struct tnd_tensor *const *)b);
}

static int by_offset(const void *a, const void *b)
{
	const struct tnd_tensor *x = *(const struct tnd_tensor *const *)a;
	const struct tnd_tensor *y = *(const struct tnd_tensor *const *)b;

	if (x->file != y->file)
		return x->file < y->file ? -1 : 1;
	if (x->offset != y->offset)
		return x->offset < y->offset ? -1 : 1;
	return x->bytes != y->bytes ? (x->bytes < y->bytes ? -1 : 1) : by_name(a, b);
}

static int by_size(const void *a, const void *b)
{
	const struct tnd_tensor *x = *(const struct tnd_tensor *const *)a;
	const struct tnd_tensor *y = *(const struct tnd_tensor *const *)b;

	return x->bytes != y->bytes ? (x->bytes < y->bytes ? 1 : -1) : by_name(a, b);
}

/* The tensors to show, in order. Return: to be freed, or NULL. */
static const struct tnd_tensor **choose(const struct inspect *in,
					const struct tnd_checkpoint *checkpoint, size_t *ret_count)
{
	static int (*const orders[])(const void *, const void *) = {NULL, by_name, by_size,
								    by_offset};
	size_t count, kept = 0;
	const struct tnd_tensor *tensors = tnd_checkpoint_tensors(checkpoint, &count);
	const struct tnd_tensor **chosen = malloc((count + 1) * sizeof(*chosen));

	if (!chosen)
		return NULL;
	for (size_t i = 0; i < count; i++)
		if (wanted(in, &tensors[i]))
			chosen[kept++] = &tensors[i];
	if (orders[in->sort])
		qsort((void *)chosen, kept, sizeof(*chosen), orders[in->sort]);
	*ret_count = kept;
	return chosen;
}

static json_t *metadata_json(const struct tnd_file *file, bool *failed)
{
	json_t *object = json_object();

	for (uint64_t i = 0; object && i < file->metadata_count; i++) {
		const struct tnd_metadata *entry = &file->metadata[i];
		json_t *value = json_stringn(entry->value, entry->value_bytes);
		/*
		 * jansson's keys end at a NUL before 2.14's keyn calls; a key with one inside is
		 * shown escaped.
		 */
		char *key = tool_printable(entry->key, entry->key_bytes);
		bool plain = !memchr(entry->key, '\0', entry->key_bytes);

		if (!key)
			*failed = true, json_decref(value);
		else
			tool_json_set(object, plain ? entry->key : key, value, failed);
		free(key);
	}
	return object;
}

static json_t *file_json(const struct tnd_file *file, bool *failed)
{
	json_t *object = json_object();

	tool_json_set(object, "name", tool_json_name(file->name), failed);
	tool_json_set(object, "bytes", tool_json_u64(file->bytes), failed);
	tool_json_set(object, "header_bytes", tool_json_u64(file->header_bytes), failed);
	tool_json_set(object, "tensors", tool_json_u64(file->tensor_count), failed);
	tool_json_set(object, "metadata", metadata_json(file, failed), failed);
	return object;
}

static json_t *tensor_json(const struct tnd_tensor *tensor, const char *file, bool *failed)
{
	json_t *object = json_object(), *shape = json_array();

	for (uint32_t d = 0; d < tensor->dim_count; d++)
		tool_json_append(shape, tool_json_u64(tensor->shape[d]), failed);
	tool_json_set(object, "name", json_stringn(tensor->name, tensor->name_bytes), failed);
	tool_json_set(object, "file", tool_json_name(file), failed);
	tool_json_set(object, "dtype", json_string(tnd_dtype_name(tensor->dtype)), failed);
	tool_json_set(object, "shape", shape, failed);
	tool_json_set(object, "bytes", tool_json_u64(tensor->bytes), failed);
	tool_json_set(object, "offset", tool_json_u64(tensor->offset), failed);
	return object;
}

static int print_json(const struct tnd_checkpoint *checkpoint, const struct tnd_tensor **tensors,
		      size_t tensor_count)
{
	size_t file_count;
	const struct tnd_file *files = tnd_checkpoint_files(checkpoint, &file_count);
	json_t *document = tool_json_document("tundish.inspect/1");
	json_t *file_list = json_array(), *tensor_list = json_array();
	bool failed = false;

	for (size_t i = 0; i < file_count; i++)
		tool_json_append(file_list, file_json(&files[i], &failed), &failed);
	for (size_t i = 0; i < tensor_count; i++)
		tool_json_append(tensor_list,
				 tensor_json(tensors[i], files[tensors[i]->file].name, &failed),
				 &failed);
	tool_json_set(document, "files", file_list, &failed);
	tool_json_set(document, "tensors", tensor_list, &failed);
	return tool_json_print(document, failed);
}

/* Dimensions as "[2304,2560]", cut when a shape has very many. */
static const char *shape_text(const struct tnd_tensor *tensor, char *out, size_t out_bytes)
{
	size_t used = (size_t)snprintf(out, out_bytes, "[");

	for (uint32_t d = 0; d < tensor->dim_count; d++) {
		char dim[24];
		int bytes =
			snprintf(dim, sizeof(dim), "%s%" PRIu64, d ? "," : "", tensor->shape[d]);

		if (used + (size_t)bytes + 5 > out_bytes) {
			used += (size_t)snprintf(out + used, out_bytes - used, "...");
			break;
		}
		memcpy(out + used, dim, (size_t)bytes + 1);
		used += (size_t)bytes;
	}
	snprintf(out + used, out_bytes - used, "]");
	return out;
}

static int print_files(const struct tnd_file *files, size_t count)
{
	static const char *const heads[] = {"FILE", "SIZE", "HEADER", "TENSORS"};
	static const int aligns[] = {TOOL_FLEX, TOOL_RIGHT, TOOL_RIGHT, TOOL_RIGHT};
	struct tool_table table;

	tool_table_init(&table, 4, heads, aligns);
	for (size_t i = 0; i < count; i++) {
		tool_table_add_name(&table, files[i].name, strlen(files[i].name));
		tool_table_add_size(&table, files[i].bytes);
		tool_table_add_size(&table, files[i].header_bytes);
		tool_table_add(&table, "%" PRIu64, files[i].tensor_count);
	}
	return tool_table_print(&table, stdout);
}

static int print_tensors(const struct tnd_tensor **tensors, size_t count)
{
	static const char *const heads[] = {"TENSOR", "DTYPE", "SHAPE", "SIZE", "OFFSET"};
	static const int aligns[] = {TOOL_FLEX, TOOL_LEFT, TOOL_LEFT, TOOL_RIGHT, TOOL_RIGHT};
	struct tool_table table;
	char shape[28];

	tool_table_init(&table, 5, heads, aligns);
	for (size_t i = 0; i < count; i++) {
		tool_table_add_name(&table, tensors[i]->name, tensors[i]->name_bytes);
		tool_table_add(&table, "%s", tnd_dtype_name(tensors[i]->dtype));
		tool_table_add(&table, "%s", shape_text(tensors[i], shape, sizeof(shape)));
		tool_table_add_size(&table, tensors[i]->bytes);
		tool_table_add(&table, "%" PRIu64, tensors[i]->offset);
	}
	return tool_table_print(&table, stdout);
}

static int print_text(const struct tnd_checkpoint *checkpoint, const struct tnd_tensor **tensors,
		      size_t tensor_count)
{
	size_t file_count;
	const struct tnd_file *files = tnd_checkpoint_files(checkpoint, &file_count);
	uint64_t bytes = 0;
	char size[TND_SIZE_TEXT_MAX];
	int status = print_files(files, file_count);

	putchar('\n');
	if (status == TOOL_OK && tensor_count)
		status = print_tensors(tensors, tensor_count);
	for (size_t i = 0; i < tensor_count; i++)
		bytes += tensors[i]->bytes;
	printf("%s%zu tensor%s, %s, in %zu file%s\n", tensor_count ? "\n" : "", tensor_count,
	       tensor_count == 1 ? "" : "s", tnd_size_format(bytes, size), file_count,
	       file_count == 1 ? "" : "s");
	return status;
}

int cmd_inspect(int argc, char **argv)
{
	struct inspect in = {.opts.struct_bytes = sizeof(in.opts)};
	struct tnd_checkpoint *checkpoint = NULL;
	struct tnd_error error;
	const struct tnd_tensor **tensors;
	const char *const *warnings;
	size_t count, warning_count;
	int code, status;

	tool_parse(&argp, argc, argv, &in);
	code = tnd_checkpoint_open(in.path, &in.opts, &checkpoint, &error);
	if (code != 0)
		return tool_fail(code, &error);
	warning_count = tnd_checkpoint_warnings(checkpoint, &warnings);
	for (size_t i = 0; i < warning_count; i++)
		tool_warn(warnings[i]);
	tensors = choose(&in, checkpoint, &count);
	if (!tensors)
		status = tool_fail(-ENOMEM, NULL);
	else
		status = (in.json ? print_json : print_text)(checkpoint, tensors, count);
	free((void *)tensors);
	tnd_checkpoint_close(checkpoint);
	return status;
}
