/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_header.c - the scanner of one safetensors header
 *
 * What could break: a header that the format allows is refused, one that it forbids is let pass, or a refusal does not say what
 * is wrong. Each row is one rule of docs/design/checkpoint.md: text of the header, bytes of data behind it, the code that must come,
 * and words that the sentence must hold. The text is an allocation of its own size, so that AddressSanitizer sees any read past it.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "checkpoint/header.h"

struct row {
	const char *text;
	uint64_t data_bytes;
	int code;
	const char *words[3];
	size_t text_bytes; /* 0: strlen(text) */
	uint32_t flags;
};

#define ENTRY(dtype, shape, offsets) \
	"{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
#define ONE(dtype, shape, offsets) "{\"w\":" ENTRY(dtype, shape, offsets) "}"
#define BYTE ENTRY("U8", "[1]", "[0,1]")
#define NAMED(name) "{\"" name "\":" BYTE "}"
#define EXTRA(value) \
	"{\"w\":{\"dtype\":\"U8\",\"x\":" value ",\"shape\":[1],\"data_offsets\":[0,1]}}"
#define TWO(x, y) "{\"a\":" x ",\"b\":" y "}"

/* clang-format off */
static const struct row rows[] = {
	/* the table of cases of the format */
	{"{\"a\":" ENTRY("F32", "[1]", "[0,4]") ",\"z\":" ENTRY("F32", "[0]", "[0,0]") "}", 4, 0, {0}, 0, 0},
	{"{\"__metadata__\":{}}", 0, 0, {0}, 0, 0},
	{"{\"__metadata__\":null}", 0, 0, {0}, 0, 0},
	{"{}", 0, 0, {0}, 0, 0},
	{ONE("F32", "[1]", "[4,8]"), 8, TND_E_OFFSETS, {"'w'", "to begin at 0, found 4"}, 0, 0},
	{ONE("F32", "[1]", "[0,4]"), 12, TND_E_TRAILING, {"8 trailing", "expected 4", "found 12"}, 0, 0},
	{ONE("F32", "[1]", "[0,4]"), 12, 0, {0}, 0, TND_CHECKPOINT_F_ALLOW_TRAILING},
	{ONE("F32", "[1]", "[0,4]"), 1, TND_E_TRUNCATED, {"expected 4", "found 1", "3 are missing"}, 0, 0},
	{ONE("F32", "[1]", "[0,4]"), 1, TND_E_TRUNCATED, {0}, 0, TND_CHECKPOINT_F_ALLOW_TRAILING},
	{ONE("F4", "[2,4]", "[0,4]"), 4, 0, {0}, 0, 0},
	{ONE("F4", "[3]", "[0,1]"), 1, TND_E_SHAPE, {"F4", "12 bits", "'w'"}, 0, 0},
	{ONE("F6_E2M3", "[4]", "[0,3]"), 3, 0, {0}, 0, 0},
	{ONE("C64", "[1]", "[0,8]"), 8, 0, {0}, 0, 0},
	{ONE("F8_E4M3FNUZ", "[1]", "[0,1]"), 1, 0, {0}, 0, 0},
	{ONE("F32", "[-2,-2]", "[0,16]"), 16, TND_E_FORMAT, {"unsigned", "`-2`", "byte"}, 0, 0},
	{ONE("F32", "[1]", "[0,4.0]"), 4, TND_E_FORMAT, {"data_offsets", "`4.0`"}, 0, 0},
	{ONE("F32", "[1]", "[0,4,9]"), 4, TND_E_FORMAT, {"two values", "`9`"}, 0, 0},
	{"{\"__metadata__\":{\"a\":1}}", 0, TND_E_FORMAT, {"__metadata__", "`1`"}, 0, 0},
	{TWO(BYTE, BYTE), 1, TND_E_OFFSETS, {"'a'", "'b'", "same range"}, 0, 0},

	/* numbers */
	{ONE("F32", "[1]", "[0]"), 4, TND_E_FORMAT, {"two values", "found 1"}, 0, 0},
	{ONE("F32", "[1]", "[]"), 4, TND_E_FORMAT, {"two values", "found 0"}, 0, 0},
	{ONE("F32", "[1]", "[0,4e0]"), 4, TND_E_FORMAT, {"`4e0`"}, 0, 0},
	{ONE("F32", "[-0]", "[0,0]"), 0, TND_E_FORMAT, {"`-0`"}, 0, 0},
	{ONE("F32", "[\"1\"]", "[0,4]"), 4, TND_E_FORMAT, {"unsigned"}, 0, 0},
	{ONE("F32", "[01]", "[0,4]"), 4, TND_E_FORMAT, {"`01`"}, 0, 0},
	{ONE("F32", "[1.]", "[0,4]"), 4, TND_E_FORMAT, {"`1.`"}, 0, 0},
	{ONE("F32", "[null]", "[0,4]"), 4, TND_E_FORMAT, {"`null`"}, 0, 0},
	{ONE("F32", "null", "[0,4]"), 4, TND_E_FORMAT, {"shape"}, 0, 0},
	{ONE("F32", "[1]", "null"), 4, TND_E_FORMAT, {"data_offsets"}, 0, 0},
	{ONE("F32", "[1]", "[0,18446744073709551616]"), 4, TND_E_FORMAT, {"18446744073709551616"}, 0, 0},
	{ONE("F32", "[1]", "[0,100000000000000000000]"), 4, TND_E_FORMAT, {"unsigned"}, 0, 0},
	{ONE("U8", "[2305843009213693951]", "[0,2305843009213693951]"), 4, TND_E_TRUNCATED, {"2305843009213693951"}, 0, 0},
	{ONE("U8", "[18446744073709551615]", "[0,18446744073709551615]"), 4, TND_E_SHAPE, {"2^64"}, 0, 0},
	{ONE("F32", "[1]", "[4,0]"), 4, TND_E_OFFSETS, {"end at 0", "begin at 4"}, 0, 0},

	/* shapes */
	{ONE("F32", "[]", "[0,4]"), 4, 0, {0}, 0, 0},
	{ONE("F32", "[0]", "[0,0]"), 0, 0, {0}, 0, 0},
	{ONE("F32", "[2,0]", "[0,0]"), 0, 0, {0}, 0, 0},
	{ONE("U8", "[0,9223372036854775808,2]", "[0,0]"), 0, 0, {0}, 0, 0},
	{ONE("U8", "[9223372036854775808,2,0]", "[0,0]"), 0, TND_E_SHAPE, {"'w'", "2^64"}, 0, 0},
	{ONE("F32", "[1000,1000]", "[0,4]"), 4, TND_E_SHAPE, {"4000000", "give it 4"}, 0, 0},
	{ONE("F32", "[1]", "[0,5]"), 5, TND_E_SHAPE, {"ask for 4", "give it 5"}, 0, 0},
	{ONE("F32", "[2305843009213693952]", "[0,0]"), 0, TND_E_SHAPE, {"2^64"}, 0, 0},

	/* dtypes */
	{ONE("F33", "[1]", "[0,4]"), 4, TND_E_DTYPE, {"'F33'", "'w'", "byte"}, 0, 0},
	{ONE("f32", "[1]", "[0,4]"), 4, TND_E_DTYPE, {"'f32'"}, 0, 0},
	{ONE("", "[1]", "[0,4]"), 4, TND_E_DTYPE, {"''"}, 0, 0},
	{ONE("F\\u00332", "[1]", "[0,4]"), 4, 0, {0}, 0, 0},
	{"{\"w\":{\"dtype\":1,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, TND_E_FORMAT, {"a string"}, 0, 0},

	/* fields */
	{"{\"w\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, TND_E_FORMAT, {"no dtype", "'w'"}, 0, 0},
	{"{\"w\":{\"dtype\":\"U8\",\"data_offsets\":[0,4]}}", 4, TND_E_FORMAT, {"no shape"}, 0, 0},
	{"{\"w\":{\"dtype\":\"U8\",\"shape\":[1]}}", 4, TND_E_FORMAT, {"no data_offsets"}, 0, 0},
	{"{\"w\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, TND_E_FORMAT, {"dtype stands twice"}, 0, 0},
	{"{\"w\":{\"shape\":[1],\"sh\\u0061pe\":[1],\"data_offsets\":[0,1]}}", 1, TND_E_FORMAT, {"shape stands twice"}, 0, 0},
	{"{\"w\":1}", 0, TND_E_FORMAT, {"an object", "'w'"}, 0, 0},
	{"{\"w\":null}", 0, TND_E_FORMAT, {"an object"}, 0, 0},
	{EXTRA("null"), 1, 0, {0}, 0, 0},
	{EXTRA("{\"a\":[1,-2.5e+3,0,\"\\n\",{},true,false],\"b\":[]}"), 1, 0, {0}, 0, 0},
	{EXTRA("[1,2"), 1, TND_E_FORMAT, {"`,` or `]`"}, 0, 0},
	{EXTRA("[1,]"), 1, TND_E_FORMAT, {"a value"}, 0, 0},
	{EXTRA("{\"a\" 1}"), 1, TND_E_FORMAT, {"`:`"}, 0, 0},
	{EXTRA("-"), 1, TND_E_FORMAT, {"a value"}, 0, 0},
	{EXTRA("1e"), 1, TND_E_FORMAT, {"a digit"}, 0, 0},
	{EXTRA("01"), 1, TND_E_FORMAT, {"`,` or `}`"}, 0, 0},
	{EXTRA("nul"), 1, TND_E_FORMAT, {"`nul`"}, 0, 0},
	{EXTRA("\"\\x\""), 1, TND_E_FORMAT, {"escape"}, 0, 0},

	/* metadata */
	{"{\"__metadata__\":{\"a\":\"b\"},\"__metadata__\":null}", 0, TND_E_FORMAT, {"second"}, 0, 0},
	{"{\"__metadata__\":[]}", 0, TND_E_FORMAT, {"__metadata__"}, 0, 0},
	{"{\"__met\\u0061data__\":{\"a\":\"b\"}}", 0, 0, {0}, 0, 0},
	{NAMED("__metadata__"), 1, TND_E_FORMAT, {"__metadata__", "tensor cannot have"}, 0, 0},

	/* names */
	{NAMED(""), 1, 0, {0}, 0, 0},
	{NAMED("a\\u0000b"), 1, 0, {0}, 0, 0},
	{NAMED("\\ud83d\\ude00"), 1, 0, {0}, 0, 0},
	{NAMED("\\ud83d"), 1, TND_E_FORMAT, {"surrogate"}, 0, 0},
	{NAMED("\\ude00\\ud83d"), 1, TND_E_FORMAT, {"surrogate"}, 0, 0},
	{NAMED("\\ude00\\ude00"), 1, TND_E_FORMAT, {"surrogate"}, 0, 0},
	{NAMED("\\ud83d\\u0041"), 1, TND_E_FORMAT, {"surrogate"}, 0, 0},
	{NAMED("\\u12"), 1, TND_E_FORMAT, {"escape"}, 0, 0},
	{NAMED("\xc3\xa9\xe4\xb8\xad\xf0\x9f\x98\x80"), 1, 0, {0}, 0, 0},
	{NAMED("\xc0\x80"), 1, TND_E_FORMAT, {"UTF-8", "0xc0"}, 0, 0},
	{NAMED("\xed\xa0\x80"), 1, TND_E_FORMAT, {"UTF-8"}, 0, 0},
	{NAMED("\xe0\x9f\xbf"), 1, TND_E_FORMAT, {"UTF-8"}, 0, 0},
	{NAMED("\xf4\x90\x80\x80"), 1, TND_E_FORMAT, {"UTF-8"}, 0, 0},
	{NAMED("\xff"), 1, TND_E_FORMAT, {"UTF-8", "0xff"}, 0, 0},
	{NAMED("12345678\n"), 1, TND_E_FORMAT, {"control character 0x0a"}, 0, 0},
	{"{\"a\":" BYTE ",\"a\":" BYTE "}", 1, TND_E_DUPLICATE, {"duplicate tensor name", "'a'", "byte"}, 0, 0},
	{"{\"a\":" BYTE ",\"\\u0061\":" ENTRY("U8", "[1]", "[1,2]") "}", 2, TND_E_DUPLICATE, {"duplicate tensor name", "'a'"}, 0, 0},

	/* order of the data */
	{TWO(ENTRY("U8", "[2]", "[1,3]"), BYTE), 3, 0, {0}, 0, 0},
	{TWO(BYTE, ENTRY("U8", "[1]", "[2,3]")), 3, TND_E_OFFSETS, {"hole of 1", "'a'", "'b'"}, 0, 0},
	{TWO(ENTRY("U8", "[2]", "[0,2]"), ENTRY("U8", "[2]", "[1,3]")), 3, TND_E_OFFSETS, {"overlap", "'a'", "'b'"}, 0, 0},
	{TWO(ENTRY("U8", "[2]", "[0,2]"), ENTRY("U8", "[0]", "[1,1]")), 2, TND_E_OFFSETS, {"'b'", "overlap"}, 0, 0},
	{TWO(ENTRY("U8", "[0]", "[0,0]"), ENTRY("U8", "[0]", "[0,0]")), 0, 0, {0}, 0, 0},
	{"{\"x\":" ENTRY("U8", "[0]", "[1,1]") ",\"y\":" ENTRY("U8", "[0]", "[1,1]") ",\"a\":" BYTE "}", 1, 0, {0}, 0, 0},

	/* the text around */
	{" \t\r\n{\"a\":" BYTE "} \n", 1, 0, {0}, 0, 0},
	{"{ \"a\" : { \"dtype\" : \"U8\" , \"shape\" : [ 1 ] , \"data_offsets\" : [ 0 , 1 ] } }", 1, 0, {0}, 0, 0},
	{"{}\0\0", 0, TND_E_FORMAT, {"white space"}, 4, 0},
	{"\xef\xbb\xbf{}", 0, TND_E_FORMAT, {"JSON object"}, 0, 0},
	{"", 0, TND_E_FORMAT, {"end of the header"}, 0, 0},
	{"[]", 0, TND_E_FORMAT, {"JSON object", "`[`"}, 0, 0},
	{"{}{}", 0, TND_E_FORMAT, {"white space"}, 0, 0},
	{"{\"a", 0, TND_E_FORMAT, {"string to end"}, 0, 0},
	{"{\"a\":", 0, TND_E_FORMAT, {"end of the header"}, 0, 0},
	{"{\"a\\", 0, TND_E_FORMAT, {"escape"}, 0, 0},
	{"{,}", 0, TND_E_FORMAT, {"a string"}, 0, 0},
	{"{\"a\":" BYTE ",}", 1, TND_E_FORMAT, {"a string", "`}`"}, 0, 0},
	{"{'a':1}", 0, TND_E_FORMAT, {"a string"}, 0, 0},
};
/* clang-format on */

static int scan(const char *text, size_t bytes, uint64_t data_bytes, uint32_t flags,
		struct tnd__header *header, struct tnd_error *error)
{
	unsigned char *copy = malloc(bytes ? bytes : 1);
	struct tnd__header_text input = {copy, bytes, data_bytes, flags, "t.safetensors"};
	int rc;

	assert_non_null(copy);
	memcpy(copy, text, bytes);
	memset(error, 0, sizeof(*error));
	rc = tnd__header_scan(&input, header, error);
	if (rc == 0)
		assert_int_equal(tnd__header_detach(header), 0);
	free(copy);
	return rc;
}

static void each_rule(void **state)
{
	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		const struct row *row = &rows[i];
		size_t bytes = row->text_bytes ? row->text_bytes : strlen(row->text);
		struct tnd__header header;
		struct tnd_error error;
		int rc = scan(row->text, bytes, row->data_bytes, row->flags, &header, &error);

		if (rc != row->code)
			fail_msg("row %zu, %s: expected %s, got %s: %s", i, row->text,
				 tnd_error_name(row->code), tnd_error_name(rc), error.message);
		for (size_t w = 0; w < 3 && row->words[w]; w++)
			if (!strstr(error.message, row->words[w]))
				fail_msg("row %zu, %s: no \"%s\" in: %s", i, row->text,
					 row->words[w], error.message);
		if (rc == 0) {
			tnd__header_free(&header);
			continue;
		}
		assert_int_equal(error.code, rc);
		assert_string_equal(error.file, "t.safetensors");
		assert_memory_equal(error.message, "t.safetensors: ", 15);
	}
}

static const char sample[] = "{\"b\":" ENTRY(
	"F32", "[2,1]", "[3,11]") ",\"__metadata__\":{\"k\":\"\\u00e9\",\"\":\"\"},"
				  "\"a\\u0000\":" ENTRY("U8", "[3]",
							"[0,3]") ",\"a\":"
								 "{\"dtype\":\"F4\",\"x\":[{"
								 "\"y\":1e3}],\"shape\":[2],"
								 "\"data_offsets\":[11,12]}}";

/* Every prefix is refused, every changed byte gives some code; neither reads past the text (sanitizers). */
static void every_prefix_and_byte(void **state)
{
	char copy[sizeof(sample)];
	struct tnd__header header;
	struct tnd_error error;

	(void)state;
	for (size_t cut = 0; cut < sizeof(sample) - 1; cut++)
		assert_int_equal(scan(sample, cut, 12, 0, &header, &error), TND_E_FORMAT);
	for (size_t at = 0; at < sizeof(sample) - 1; at++)
		for (int change = 1; change < 256; change++) {
			memcpy(copy, sample, sizeof(sample));
			copy[at] = (char)(copy[at] ^ change);
			if (scan(copy, sizeof(sample) - 1, 12, 0, &header, &error) == 0)
				tnd__header_free(&header);
		}
}

/* The table itself: names with their lengths, order, shapes, places, metadata. */
static void table(void **state)
{
	uint64_t data = 8 + sizeof(sample) - 1;
	struct tnd__header header;
	struct tnd_error error;

	(void)state;
	assert_int_equal(scan(sample, sizeof(sample) - 1, 12, 0, &header, &error), 0);
	assert_int_equal(header.tensor_count, 3);
	assert_memory_equal(header.tensors[0].name, "a", 2);
	assert_int_equal(header.tensors[0].name_bytes, 1);
	assert_int_equal(header.tensors[0].dtype, TND_DTYPE_F4);
	assert_int_equal(header.tensors[0].offset, data + 11);
	assert_int_equal(header.tensors[0].bytes, 1);
	assert_int_equal(header.tensors[1].name_bytes, 2);
	assert_memory_equal(header.tensors[1].name, "a\0\0", 3);
	assert_int_equal(header.tensors[1].offset, data);
	assert_memory_equal(header.tensors[2].name, "b", 2);
	assert_int_equal(header.tensors[2].dim_count, 2);
	assert_int_equal(header.tensors[2].shape[0], 2);
	assert_int_equal(header.tensors[2].shape[1], 1);
	assert_int_equal(header.metadata_count, 2);
	assert_string_equal(header.metadata[0].key, "k");
	assert_string_equal(header.metadata[0].value, "\xc3\xa9");
	assert_int_equal(header.metadata[0].value_bytes, 2);
	assert_int_equal(header.metadata[1].key_bytes, 0);
	tnd__header_free(&header);
}

static void nesting(void **state)
{
	(void)state;
	for (int depth = 126; depth <= 130; depth++) {
		struct tnd__text text = {0};
		struct tnd__header header;
		struct tnd_error error;
		int rc;

		tnd__text_add(&text, "{\"w\":{\"x\":");
		for (int i = 0; i < depth; i++)
			tnd__text_add(&text, i % 2 ? "{\"k\":" : "[");
		tnd__text_add(&text, "0");
		for (int i = depth - 1; i >= 0; i--)
			tnd__text_add(&text, i % 2 ? "}" : "]");
		tnd__text_add(&text, ",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}");
		rc = scan(text.data, text.bytes, 1, 0, &header, &error);
		assert_int_equal(rc, depth <= 128 ? 0 : TND_E_FORMAT);
		if (rc == 0)
			tnd__header_free(&header);
		else
			assert_non_null(strstr(error.message, "deeper than 128"));
		tnd__text_free(&text);
	}
}

static void all_dtypes(void **state)
{
	(void)state;
	for (uint32_t code = 0; code < TND_DTYPE_COUNT; code++) {
		uint32_t bits = tnd_dtype_bits(code);
		struct tnd__header header;
		struct tnd_error error;
		char text[160];

		/* 8 values are as many bytes as one has bits. */
		snprintf(text, sizeof(text),
			 "{\"w\":{\"dtype\":\"%s\",\"shape\":[2,4],\"data_offsets\":[0,%u]}}",
			 tnd_dtype_name(code), bits);
		assert_int_equal(scan(text, strlen(text), bits, 0, &header, &error), 0);
		assert_int_equal(header.tensors[0].dtype, code);
		assert_int_equal(header.tensors[0].bytes, bits);
		tnd__header_free(&header);
	}
	assert_null(tnd_dtype_name(TND_DTYPE_COUNT));
	assert_int_equal(tnd_dtype_bits(TND_DTYPE_COUNT), 0);
}

static int by_bytes(const void *a, const void *b)
{
	const struct tnd_tensor *x = a, *y = b;

	return tnd__compare(x->name, x->name_bytes, y->name, y->name_bytes);
}

/* Names of few letters, NULs and long common beginnings, in random order, must come out as qsort() puts them. */
static void order_of_names(void **state)
{
	enum { COUNT = 600, LONGEST = 200 };
	static char names[COUNT][LONGEST];
	static struct tnd_tensor tensors[COUNT], sorted[COUNT];
	static struct tnd__sort_key keys[COUNT], spare[COUNT];
	const char *seed_text = getenv("TND_SEED");
	unsigned seed = seed_text ? (unsigned)strtoul(seed_text, NULL, 10) : 7;

	(void)state;
	print_message("TND_SEED=%u\n", seed);
	for (int round = 0; round < 60; round++) {
		for (size_t i = 0; i < COUNT; i++) {
			size_t same = round % 3 ? (size_t)rand_r(&seed) % 150 : 0;

			memset(names[i], 'm', same);
			tensors[i].name = names[i];
			tensors[i].name_bytes = (uint32_t)(same + (size_t)rand_r(&seed) % 40);
			for (size_t at = same; at < tensors[i].name_bytes; at++)
				names[i][at] = (char)(rand_r(&seed) % 3 * 'b');
			keys[i].index = i;
		}
		memcpy(sorted, tensors, sizeof(sorted));
		qsort(sorted, COUNT, sizeof(sorted[0]), by_bytes);
		tnd__sort_names(tensors, keys, spare, COUNT);
		for (size_t i = 0; i < COUNT; i++)
			assert_int_equal(by_bytes(&sorted[i], &tensors[keys[i].index]), 0);
	}
}

/* Each allocation fails in turn: -ENOMEM each time, nothing kept (LeakSanitizer), and in the end it works. */
static void each_allocation_fails(void **state)
{
#ifdef TND_FAILPOINTS
	unsigned char copy[sizeof(sample)];
	struct tnd__header_text input = {copy, sizeof(sample) - 1, 12, 0, "t"};
	struct tnd__header header;
	int failures = 0, rc;
	char point[64];

	(void)state;
	for (;; failures++) {
		memcpy(copy, sample, sizeof(sample));
		snprintf(point, sizeof(point), "checkpoint.alloc=ENOMEM@%dx1", failures + 1);
		assert_int_equal(tnd__failpoints_set(point), 0);
		rc = tnd__header_scan(&input, &header, NULL);
		if (rc == 0 && (rc = tnd__header_detach(&header)) < 0)
			tnd__header_free(&header);
		if (rc == 0)
			break;
		assert_int_equal(rc, -ENOMEM);
	}
	tnd__failpoints_set(NULL);
	tnd__header_free(&header);
	assert_int_equal(failures, 7);
#else
	(void)state;
	skip();
#endif
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(each_rule),
		cmocka_unit_test(every_prefix_and_byte),
		cmocka_unit_test(table),
		cmocka_unit_test(nesting),
		cmocka_unit_test(all_dtypes),
		cmocka_unit_test(order_of_names),
		cmocka_unit_test(each_allocation_fails),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
