/* SPDX-License-Identifier: Apache-2.0 */
/*
 * header.c - reads one safetensors header
 *
 *   text  | names, NUL-terminated | dead | not yet read              |
 *         0                     kept    at                         end
 *
 * One pass. `kept` never passes `at`: what is kept of a string is its decoded bytes and a NUL, and
 * the string itself took at least two quotes more. Shapes go into one growing array and find their
 * tensors again at the end, as both are in the header's order.
 *
 * Invariant behind the unchecked casts: a header is at most UINT32_MAX bytes, so every length and
 * count in it fits 32 bits.
 *
 * Failure: the first problem in reading order; then, over the whole table (headercheck.c),
 * duplicate names before offsets before the data's end. Nothing is left allocated.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "header.h"
#include "jsontext.h"

struct scan {
	struct tnd__json json;
	struct tnd__header *out;
	size_t tensor_capacity, shape_capacity, metadata_capacity, position_capacity;
	uint64_t *positions; /* of each tensor's name in the file */
	unsigned char *kept;
	uint32_t last_dtype; /* most tensors have their predecessor's */
	bool metadata_seen;
};

void *tnd__checkpoint_alloc(size_t bytes)
{
	return tnd__failpoint("checkpoint.alloc") < 0 ? NULL : malloc(bytes ? bytes : 1);
}

int tnd__checkpoint_reserve(void *array_pointer, size_t *capacity, size_t need,
			    size_t element_bytes)
{
	if (need > *capacity && tnd__failpoint("checkpoint.alloc") < 0)
		return -ENOMEM;
	return tnd__reserve(array_pointer, capacity, need, element_bytes);
}

static int no_memory(struct scan *scan)
{
	struct tnd__where where = {.file = scan->json.file};

	return tnd__fail(scan->json.error, -ENOMEM, &where, "no memory for its table of tensors");
}

/* Moves a string to the kept ones and puts a NUL after it. */
static const char *keep(struct scan *scan, const struct tnd__span *span)
{
	unsigned char *to = scan->kept;

	memmove(to, span->text, span->bytes);
	to[span->bytes] = '\0';
	scan->kept = to + span->bytes + 1;
	return (const char *)to;
}

static int scan_metadata_entries(struct scan *scan)
{
	struct tnd__header *out = scan->out;
	struct tnd__span span;
	bool first = true;
	int rc;

	while ((rc = tnd__json_next(&scan->json, '}', &first)) > 0) {
		struct tnd_metadata *entry;

		if (tnd__checkpoint_reserve(&out->metadata, &scan->metadata_capacity,
					    out->metadata_count + 1, sizeof(*out->metadata)) < 0)
			return no_memory(scan);
		entry = &out->metadata[out->metadata_count];
		rc = tnd__json_key(&scan->json, &span);
		if (rc < 0)
			return rc;
		entry->key = keep(scan, &span);
		entry->key_bytes = (uint32_t)span.bytes;
		if (scan->json.at < scan->json.end && *scan->json.at != '"')
			return tnd__json_expected(
				&scan->json,
				"a string in __metadata__ (a tensor cannot have that name)");
		rc = tnd__json_string(&scan->json, &span);
		if (rc < 0)
			return rc;
		entry->value = keep(scan, &span);
		entry->value_bytes = (uint32_t)span.bytes;
		out->metadata_count++;
	}
	return rc;
}

static int scan_metadata(struct scan *scan, const unsigned char *key_at)
{
	if (scan->metadata_seen)
		return tnd__json_fail(&scan->json, TND_E_FORMAT, key_at,
				      "a second __metadata__: expected at most one");
	scan->metadata_seen = true;
	if (tnd__json_word(&scan->json, "null"))
		return 0;
	if (scan->json.at == scan->json.end || *scan->json.at != '{')
		return tnd__json_expected(&scan->json,
					  "__metadata__ to be an object of strings or null");
	scan->json.at++;
	return scan_metadata_entries(scan);
}

static int scan_dtype(struct scan *scan, struct tnd_tensor *tensor)
{
	const unsigned char *at = scan->json.at;
	const char *last = tnd_dtype_name(scan->last_dtype);
	struct tnd__span span;
	char shown[64];
	int rc;

	rc = tnd__json_string(&scan->json, &span);
	if (rc < 0)
		return rc;
	if (!tnd__span_is(&span, last, strlen(last)))
		scan->last_dtype = tnd__dtype_parse(span.text, span.bytes);
	if (scan->last_dtype == TND_DTYPE_COUNT)
		return tnd__json_fail(&scan->json, TND_E_DTYPE, at,
				      "unknown dtype '%s': expected one of the %d known ones, "
				      "such as BF16; a newer version may know it",
				      tnd__printable(span.text, span.bytes, shown, sizeof(shown)),
				      TND_DTYPE_COUNT);
	tensor->dtype = scan->last_dtype;
	return 0;
}

static int scan_shape(struct scan *scan, struct tnd_tensor *tensor)
{
	struct tnd__header *out = scan->out;
	bool first = true;
	int rc;

	rc = tnd__json_take(&scan->json, '[', "shape to be an array");
	if (rc < 0)
		return rc;
	while ((rc = tnd__json_next(&scan->json, ']', &first)) > 0) {
		uint64_t value;

		rc = tnd__json_u64(&scan->json, "an unsigned 64-bit integer in shape", &value);
		if (rc < 0)
			return rc;
		if (tnd__checkpoint_reserve(&out->shapes, &scan->shape_capacity,
					    out->shape_count + 1, sizeof(*out->shapes)) < 0)
			return no_memory(scan);
		out->shapes[out->shape_count++] = value;
		tensor->dim_count++;
	}
	return rc;
}

static int scan_offsets(struct scan *scan, struct tnd_tensor *tensor)
{
	const unsigned char *at = scan->json.at;
	uint64_t values[2] = {0, 0};
	unsigned count = 0;
	bool first = true;
	int rc;

	rc = tnd__json_take(&scan->json, '[', "data_offsets to be an array");
	if (rc < 0)
		return rc;
	while ((rc = tnd__json_next(&scan->json, ']', &first)) > 0) {
		if (count == 2)
			return tnd__json_expected(&scan->json,
						  "two values in data_offsets and then `]`");
		rc = tnd__json_u64(&scan->json, "an unsigned 64-bit integer in data_offsets",
				   &values[count++]);
		if (rc < 0)
			return rc;
	}
	if (rc < 0)
		return rc;
	if (count != 2)
		return tnd__json_fail(&scan->json, TND_E_FORMAT, at,
				      "expected two values in data_offsets, found %u", count);
	if (values[1] < values[0])
		return tnd__json_fail(&scan->json, TND_E_OFFSETS, at,
				      "data_offsets end at %llu, before they begin at %llu",
				      (unsigned long long)values[1], (unsigned long long)values[0]);
	tensor->offset = values[0];
	tensor->bytes = values[1] - values[0];
	return 0;
}

/* Bytes that shape and dtype ask for, against those that the offsets give. */
static int check_shape(struct scan *scan, const struct tnd_tensor *tensor, const unsigned char *at)
{
	const struct tnd__header *out = scan->out;
	size_t first = out->shape_count - tensor->dim_count;
	uint64_t bits = tnd_dtype_bits(tensor->dtype), product = 1;
	bool overflow = false;

	for (uint32_t i = 0; i < tensor->dim_count && !overflow; i++)
		overflow = __builtin_mul_overflow(product, out->shapes[first + i], &product);
	if (overflow || __builtin_mul_overflow(product, bits, &bits))
		return tnd__json_fail(&scan->json, TND_E_SHAPE, at,
				      "the values of its shape multiply to 2^64 bits or more");
	if (bits % 8)
		return tnd__json_fail(
			&scan->json, TND_E_SHAPE, at,
			"%llu values of %s are %llu bits: not a whole number of bytes",
			(unsigned long long)product, tnd_dtype_name(tensor->dtype),
			(unsigned long long)bits);
	if (bits / 8 != tensor->bytes)
		return tnd__json_fail(&scan->json, TND_E_SHAPE, at,
				      "shape and dtype %s ask for %llu bytes, "
				      "data_offsets give it %llu",
				      tnd_dtype_name(tensor->dtype), (unsigned long long)(bits / 8),
				      (unsigned long long)tensor->bytes);
	return 0;
}

enum { FIELD_DTYPE = 1, FIELD_SHAPE = 2, FIELD_OFFSETS = 4, FIELD_ALL = 7 };

static unsigned field_of(const struct tnd__span *key)
{
	if (tnd__span_is(key, "dtype", 5))
		return FIELD_DTYPE;
	if (tnd__span_is(key, "shape", 5))
		return FIELD_SHAPE;
	if (tnd__span_is(key, "data_offsets", 12))
		return FIELD_OFFSETS;
	return 0;
}

static const char *field_name(unsigned field)
{
	return field & FIELD_DTYPE ? "dtype" : field & FIELD_SHAPE ? "shape" : "data_offsets";
}

/* The value of an entry, from its `{`. */
static int scan_fields(struct scan *scan, struct tnd_tensor *tensor)
{
	unsigned seen = 0, field;
	struct tnd__span key;
	bool first = true;
	int rc;

	while ((rc = tnd__json_next(&scan->json, '}', &first)) > 0) {
		const unsigned char *at = scan->json.at;

		rc = tnd__json_key(&scan->json, &key);
		if (rc < 0)
			return rc;
		field = field_of(&key);
		if (field & seen)
			return tnd__json_fail(&scan->json, TND_E_FORMAT, at,
					      "field %s stands twice: expected it once",
					      field_name(field));
		seen |= field;
		rc = field == FIELD_DTYPE     ? scan_dtype(scan, tensor)
		     : field == FIELD_SHAPE   ? scan_shape(scan, tensor)
		     : field == FIELD_OFFSETS ? scan_offsets(scan, tensor)
					      : tnd__json_skip(&scan->json);
		if (rc < 0)
			return rc;
	}
	if (rc == 0 && seen != FIELD_ALL)
		return tnd__json_fail(&scan->json, TND_E_FORMAT, scan->json.at - 1,
				      "expected dtype, shape and data_offsets, found no %s",
				      field_name(FIELD_ALL & ~seen));
	return rc;
}

static int scan_tensor(struct scan *scan, const struct tnd__span *name, const unsigned char *key_at)
{
	struct tnd__header *out = scan->out;
	struct tnd_tensor *tensor;
	int rc;

	if (tnd__checkpoint_reserve(&out->tensors, &scan->tensor_capacity, out->tensor_count + 1,
				    sizeof(*out->tensors)) < 0 ||
	    tnd__checkpoint_reserve(&scan->positions, &scan->position_capacity,
				    out->tensor_count + 1, sizeof(*scan->positions)) < 0)
		return no_memory(scan);
	scan->positions[out->tensor_count] =
		scan->json.start_offset + (uint64_t)(key_at - scan->json.start);
	tensor = &out->tensors[out->tensor_count];
	memset(tensor, 0, sizeof(*tensor));
	tensor->name = keep(scan, name);
	tensor->name_bytes = (uint32_t)name->bytes;
	scan->json.name = tensor->name;
	scan->json.name_bytes = name->bytes;
	rc = tnd__json_take(&scan->json, '{', "an object with dtype, shape and data_offsets");
	if (rc == 0)
		rc = scan_fields(scan, tensor);
	if (rc == 0)
		rc = check_shape(scan, tensor, key_at);
	if (rc == 0) {
		out->tensor_count++;
		scan->json.name = NULL;
	}
	return rc;
}

static int scan_object(struct scan *scan)
{
	struct tnd__json *json = &scan->json;
	struct tnd__span key;
	bool first = true;
	int rc;

	rc = tnd__json_take(json, '{', "the header to be a JSON object");
	if (rc < 0)
		return rc;
	while ((rc = tnd__json_next(json, '}', &first)) > 0) {
		const unsigned char *at = json->at;

		rc = tnd__json_key(json, &key);
		if (rc < 0)
			return rc;
		rc = tnd__span_is(&key, "__metadata__", 12) ? scan_metadata(scan, at)
							    : scan_tensor(scan, &key, at);
		if (rc < 0)
			return rc;
	}
	if (rc < 0)
		return rc;
	tnd__json_space(json);
	if (json->at != json->end)
		return tnd__json_expected(json, "only white space after the header's object");
	return 0;
}

/* Gives growing room back; keeping more than is needed is no failure. */
static void trim(void *array_pointer, size_t bytes)
{
	void *old, *fresh;

	memcpy(&old, array_pointer, sizeof(old));
	fresh = old && bytes ? realloc(old, bytes) : NULL;
	if (fresh)
		memcpy(array_pointer, &fresh, sizeof(fresh));
}

int tnd__header_scan(const struct tnd__header_text *text, struct tnd__header *ret_header,
		     struct tnd_error *reterr)
{
	struct tnd__header header = {.names = (char *)text->text};
	struct scan scan = {
		.json = {.start = text->text,
			 .at = text->text,
			 .end = text->text + text->bytes,
			 .start_offset = 8,
			 .file = text->file,
			 .whole = "the header",
			 .code = TND_E_FORMAT,
			 .error = reterr},
		.out = &header,
		.kept = text->text,
	};
	const uint64_t *shape;
	int rc;

	rc = scan_object(&scan);
	if (rc == 0) {
		header.name_bytes = (size_t)(scan.kept - text->text);
		trim(&header.shapes, header.shape_count * sizeof(*header.shapes));
		trim(&header.metadata, header.metadata_count * sizeof(*header.metadata));
		shape = header.shapes;
		for (size_t i = 0; i < header.tensor_count; i++) {
			header.tensors[i].shape = shape;
			if (shape)
				shape += header.tensors[i].dim_count;
		}
		rc = tnd__header_check(text, &header, scan.positions, reterr);
	}
	free(scan.positions);
	if (rc < 0)
		tnd__header_free(&header);
	else
		*ret_header = header;
	return rc;
}

int tnd__header_detach(struct tnd__header *header)
{
	char *names = tnd__checkpoint_alloc(header->name_bytes);

	if (!names)
		return -ENOMEM;
	memcpy(names, header->names, header->name_bytes);
	for (size_t i = 0; i < header->tensor_count; i++)
		header->tensors[i].name = names + (header->tensors[i].name - header->names);
	for (size_t i = 0; i < header->metadata_count; i++) {
		struct tnd_metadata *entry = &header->metadata[i];

		entry->key = names + (entry->key - header->names);
		entry->value = names + (entry->value - header->names);
	}
	header->names = names;
	header->detached = true;
	return 0;
}

void tnd__header_free(struct tnd__header *header)
{
	if (header->detached)
		free(header->names);
	free(header->tensors);
	free(header->shapes);
	free(header->metadata);
	memset(header, 0, sizeof(*header));
}
