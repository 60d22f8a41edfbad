/* SPDX-License-Identifier: Apache-2.0 */
/*
 * oracle.c - the rules of a header, written down a second time, over a parsed document
 *
 * Nothing here is fast or careful about memory; it is meant to be obviously right. Verdict: accepted, refused, or no opinion.
 *
 * No opinion, where jansson cannot represent what the format allows or forbids by its spelling:
 *   - a NUL in a member's name (jansson refuses it, the format allows it),
 *   - an integer from 2^63 up (jansson refuses it, the format goes to 2^64),
 *   - a real number that overflows in an ignored field,
 *   - nesting near either limit (128 here, 2048 there),
 *   - a member that stands twice, outside the two levels that count: jansson refuses it anywhere. Where it refuses and the
 *     scanner does not, the names must still be as many as those of the document parsed without that refusal,
 *   - "-0", which jansson reads as the integer 0: the text is searched for it.
 */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

enum verdict { REFUSED, ACCEPTED, NO_OPINION };

struct range {
	uint64_t begin, end;
};

static bool u64_of(const json_t *value, uint64_t *ret_value)
{
	if (!json_is_integer(value) || json_integer_value(value) < 0)
		return false;
	*ret_value = (uint64_t)json_integer_value(value);
	return true;
}

static bool metadata_ok(json_t *value)
{
	const char *key;
	json_t *text;

	if (json_is_null(value))
		return true;
	if (!json_is_object(value))
		return false;
	json_object_foreach(value, key, text) if (!json_is_string(text)) return false;
	return true;
}

/* One entry by the rules: 22 dtypes, unsigned shape and offsets, product in shape order, whole bytes that fit. */
static bool entry_ok(json_t *entry, struct range *ret_range, uint32_t *ret_dtype)
{
	json_t *dtype = json_object_get(entry, "dtype"), *shape = json_object_get(entry, "shape"),
	       *offsets = json_object_get(entry, "data_offsets"), *value;
	__extension__ unsigned __int128 product = 1;
	uint64_t number;
	size_t i;

	if (!json_is_object(entry) || !json_is_string(dtype) || !json_is_array(shape) ||
	    !json_is_array(offsets) || json_array_size(offsets) != 2)
		return false;
	*ret_dtype = 0;
	while (*ret_dtype < TND_DTYPE_COUNT &&
	       (strlen(tnd_dtype_name(*ret_dtype)) != json_string_length(dtype) ||
		strcmp(tnd_dtype_name(*ret_dtype), json_string_value(dtype)) != 0))
		++*ret_dtype;
	if (*ret_dtype == TND_DTYPE_COUNT)
		return false;
	json_array_foreach(shape, i, value)
	{
		if (!u64_of(value, &number))
			return false;
		product *= number;
		if (product > UINT64_MAX)
			return false;
	}
	product *= tnd_dtype_bits(*ret_dtype);
	return u64_of(json_array_get(offsets, 0), &ret_range->begin) &&
	       u64_of(json_array_get(offsets, 1), &ret_range->end) &&
	       ret_range->begin <= ret_range->end && product <= UINT64_MAX && product % 8 == 0 &&
	       product / 8 == ret_range->end - ret_range->begin;
}

static int by_begin_end(const void *a, const void *b)
{
	const struct range *x = a, *y = b;

	if (x->begin != y->begin)
		return x->begin < y->begin ? -1 : 1;
	return x->end < y->end ? -1 : x->end > y->end;
}

static enum verdict judge(json_t *document, uint64_t data_bytes)
{
	struct range *ranges = calloc(json_object_size(document) + 1, sizeof(*ranges));
	enum verdict verdict = ranges ? ACCEPTED : NO_OPINION;
	uint64_t end = 0;
	size_t count = 0;
	const char *name;
	json_t *entry;
	uint32_t dtype;

	json_object_foreach(document, name, entry)
	{
		if (verdict != ACCEPTED)
			break;
		if (strcmp(name, "__metadata__") == 0 ? !metadata_ok(entry)
						      : !entry_ok(entry, &ranges[count++], &dtype))
			verdict = REFUSED;
	}
	if (verdict == ACCEPTED) {
		qsort(ranges, count, sizeof(*ranges), by_begin_end);
		for (size_t i = 0; i < count; i++) {
			if (ranges[i].begin != end)
				verdict = REFUSED;
			end = ranges[i].end;
		}
		if (end != data_bytes)
			verdict = REFUSED;
	}
	free(ranges);
	return verdict;
}

static bool has_text(const unsigned char *text, size_t bytes, const char *what)
{
	return memmem(text, bytes, what, strlen(what)) != NULL;
}

/* Depth by brackets alone, those in strings included: too much only costs an opinion. */
static size_t depth_bound(const unsigned char *text, size_t bytes)
{
	size_t depth = 0;

	for (size_t i = 0; i < bytes; i++)
		depth += text[i] == '{' || text[i] == '[';
	return depth;
}

static void compare_tables(json_t *document, const struct tnd__header *header, size_t bytes)
{
	size_t entries = json_object_size(document);

	if (json_object_get(document, "__metadata__"))
		entries--;
	if (entries != header->tensor_count)
		fuzz_fail("%zu tensors, the oracle has %zu", header->tensor_count, entries);
	for (size_t i = 0; i < header->tensor_count; i++) {
		const struct tnd_tensor *tensor = &header->tensors[i];
		json_t *entry = json_object_get(document, tensor->name),
		       *shape = json_object_get(entry, "shape");
		struct range range;
		uint32_t dtype;

		if (!entry || !entry_ok(entry, &range, &dtype))
			fuzz_fail("tensor %zu: not in the oracle's table", i);
		if (dtype != tensor->dtype || range.begin + 8 + bytes != tensor->offset ||
		    range.end - range.begin != tensor->bytes ||
		    json_array_size(shape) != tensor->dim_count)
			fuzz_fail("tensor %zu: differs from the oracle's", i);
		for (uint32_t d = 0; d < tensor->dim_count; d++)
			if ((uint64_t)json_integer_value(json_array_get(shape, d)) !=
			    tensor->shape[d])
				fuzz_fail("tensor %zu: dimension %u differs", i, d);
	}
}

void oracle_compare(const unsigned char *text, size_t bytes, uint64_t data_bytes, int rc,
		    const struct tnd__header *header)
{
	json_error_t error = {0};
	enum json_error_code code;
	enum verdict verdict;
	json_t *document;

	/* jansson loses a raw NUL that it has to put back; JSON has none anywhere. */
	if (memchr(text, 0, bytes) && rc == 0)
		fuzz_fail("accepted a raw NUL");
	if (memchr(text, 0, bytes) || has_text(text, bytes, "\\u0000") ||
	    has_text(text, bytes, "-0") || depth_bound(text, bytes) > 100)
		return;
	document = json_loadb((const char *)text, bytes, JSON_REJECT_DUPLICATES, &error);
	code = document ? json_error_unknown : json_error_code(&error);
	if (!document && code == json_error_numeric_overflow)
		return;
	if (!document && code == json_error_duplicate_key && rc == 0) {
		document = json_loadb((const char *)text, bytes, 0, &error);
		if (!document)
			fuzz_fail("accepted, the oracle: %s", error.text);
		compare_tables(document, header, bytes);
		json_decref(document);
		return;
	}
	verdict = json_is_object(document) ? judge(document, data_bytes) : REFUSED;
	if (verdict == ACCEPTED && rc < 0)
		fuzz_fail("refused with %d, the oracle accepts", rc);
	if (verdict == REFUSED && rc == 0)
		fuzz_fail("accepted, the oracle refuses (%s)", document ? "rules" : error.text);
	if (verdict == ACCEPTED)
		compare_tables(document, header, bytes);
	json_decref(document);
}
