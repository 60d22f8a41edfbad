/* SPDX-License-Identifier: Apache-2.0 */
/*
 * jsontext.c - a cursor over the JSON text of a header or an index
 *
 *   start           at                      end
 *     |  consumed    |  not yet looked at    |
 *
 * What lies before `at` is dead text: strings that hold escapes are decoded into it, and the owner
 * of the cursor moves names there. So nothing here looks back behind `at`.
 *
 * Strings: eight bytes at a time while none of them is a quote, a backslash, a control character or
 * above 0x7f; only those four are looked at singly. Failure: its code with the byte, cursor left
 * where the refused thing begins.
 */
#include <endian.h>
#include <stdio.h>
#include <string.h>

#include "jsontext.h"

#define ONES UINT64_C(0x0101010101010101)
#define TOPS UINT64_C(0x8080808080808080)

int tnd__json_fail(struct tnd__json *json, int code, const unsigned char *at, const char *format,
		   ...)
{
	uint64_t offset = json->start_offset + (uint64_t)(at - json->start);
	struct tnd__where where = {
		.file = json->file,
		.name = json->name,
		.name_bytes = json->name_bytes,
		.byte_offset = offset,
		.has_offset = true,
	};
	char sentence[TND_ERROR_MESSAGE_MAX / 2];
	va_list args;

	if (!json->error)
		return code;
	va_start(args, format);
	vsnprintf(sentence, sizeof(sentence), format, args);
	va_end(args);
	return tnd__fail(json->error, code, &where, "%s (at byte %llu)", sentence,
			 (unsigned long long)offset);
}

int tnd__json_expected(struct tnd__json *json, const char *what)
{
	const unsigned char *at = json->at;
	size_t bytes = 1;
	char found[64];

	if (at == json->end)
		return tnd__json_fail(json, json->code, at, "expected %s, found the end of %s",
				      what, json->whole);
	while (bytes < 24 && at + bytes < json->end && !strchr(",:]} \t\r\n", at[bytes]))
		bytes++;
	tnd__printable((const char *)at, bytes, found, sizeof(found));
	return tnd__json_fail(json, json->code, at, "expected %s, found `%s`", what, found);
}

void tnd__json_space(struct tnd__json *json)
{
	while (json->at < json->end &&
	       (*json->at == ' ' || *json->at == '\n' || *json->at == '\t' || *json->at == '\r'))
		json->at++;
}

int tnd__json_take(struct tnd__json *json, unsigned char c, const char *what)
{
	tnd__json_space(json);
	if (json->at == json->end || *json->at != c)
		return tnd__json_expected(json, what);
	json->at++;
	return 0;
}

int tnd__json_next(struct tnd__json *json, unsigned char close, bool *first)
{
	tnd__json_space(json);
	if (json->at < json->end && *json->at == close) {
		json->at++;
		return 0;
	}
	if (!*first) {
		if (json->at == json->end || *json->at != ',')
			return tnd__json_expected(json, close == '}' ? "`,` or `}`" : "`,` or `]`");
		json->at++;
		tnd__json_space(json);
	}
	*first = false;
	return 1;
}

/*
 * The top bit of each byte of `word` that is a quote, a backslash, below 0x20 or above 0x7f; bits
 * above the lowest may be false.
 */
static inline uint64_t special_bits(uint64_t word)
{
	uint64_t quote = word ^ ONES * '"', slash = word ^ ONES * '\\';

	return (((quote - ONES) & ~quote) | ((slash - ONES) & ~slash) |
		((word - ONES * 0x20) & ~word) | word) &
	       TOPS;
}

/* First byte from `at` that needs a look of its own. */
static inline unsigned char *plain_end(unsigned char *at, const unsigned char *end)
{
	while ((size_t)(end - at) >= 8) {
		uint64_t word, special;

		memcpy(&word, at, 8);
		special = special_bits(le64toh(word));
		if (special)
			return at + __builtin_ctzll(special) / 8;
		at += 8;
	}
	while (at < end && *at >= 0x20 && *at < 0x80 && *at != '"' && *at != '\\')
		at++;
	return at;
}

/* Value of four hexadecimal digits, -1 if they are not. */
static int32_t hex4(const unsigned char *at, const unsigned char *end)
{
	int32_t value = 0;

	if (end - at < 4)
		return -1;
	for (int i = 0; i < 4; i++) {
		unsigned char c = at[i], lower = c | 0x20;

		if (c >= '0' && c <= '9')
			value = value << 4 | (c - '0');
		else if (lower >= 'a' && lower <= 'f')
			value = value << 4 | (lower - 'a' + 10);
		else
			return -1;
	}
	return value;
}

static size_t utf8_write(uint32_t point, unsigned char *out)
{
	if (point < 0x80) {
		out[0] = (unsigned char)point;
		return 1;
	}
	if (point < 0x800) {
		out[0] = (unsigned char)(0xc0 | point >> 6);
		out[1] = (unsigned char)(0x80 | (point & 0x3f));
		return 2;
	}
	if (point < 0x10000) {
		out[0] = (unsigned char)(0xe0 | point >> 12);
		out[1] = (unsigned char)(0x80 | (point >> 6 & 0x3f));
		out[2] = (unsigned char)(0x80 | (point & 0x3f));
		return 3;
	}
	out[0] = (unsigned char)(0xf0 | point >> 18);
	out[1] = (unsigned char)(0x80 | (point >> 12 & 0x3f));
	out[2] = (unsigned char)(0x80 | (point >> 6 & 0x3f));
	out[3] = (unsigned char)(0x80 | (point & 0x3f));
	return 4;
}

/*
 * Decodes the escape at `in` to `*out`, which is not above `in`. Return: behind the escape, or NULL
 * (refused).
 */
static unsigned char *unescape(struct tnd__json *json, unsigned char *in, unsigned char **out)
{
	static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
	const char *simple;
	int32_t point, low;
	size_t used = 6;

	if (json->end - in < 2)
		goto refused;
	if (in[1] != 'u') {
		simple = memchr(from, in[1], sizeof(from) - 1);
		if (!simple)
			goto refused;
		*(*out)++ = (unsigned char)to[simple - from];
		return in + 2;
	}
	point = hex4(in + 2, json->end);
	if (point < 0)
		goto refused;
	if (point >= 0xd800 && point < 0xe000) {
		low = json->end - in >= 12 && in[6] == '\\' && in[7] == 'u'
			      ? hex4(in + 8, json->end)
			      : -1;
		if (point >= 0xdc00 || low < 0xdc00 || low > 0xdfff) {
			tnd__json_fail(json, json->code, in,
				       "expected a pair of surrogates, found a lone one, \\u%04x",
				       (unsigned)point);
			return NULL;
		}
		point = 0x10000 + ((point - 0xd800) << 10) + (low - 0xdc00);
		used = 12;
	}
	*out += utf8_write((uint32_t)point, *out);
	return in + used;
refused:
	tnd__json_fail(json, json->code, in, "expected an escape of JSON after the backslash");
	return NULL;
}

int tnd__json_string(struct tnd__json *json, struct tnd__span *ret_span)
{
	unsigned char *in, *out, *end = json->end;

	if (json->at == end || *json->at != '"')
		return tnd__json_expected(json, "a string");
	in = out = json->at + 1;
	for (;;) {
		unsigned char *from = in;
		size_t bytes;

		in = plain_end(in, end);
		if (in < end && *in >= 0x80) {
			bytes = tnd__utf8_bytes(in, (size_t)(end - in));
			if (!bytes)
				return tnd__json_fail(json, json->code, in,
						      "expected UTF-8, found byte 0x%02x", *in);
			in += bytes;
		}
		if (out != from)
			memmove(out, from, (size_t)(in - from));
		out += in - from;
		if (in == end)
			return tnd__json_fail(json, json->code, json->at,
					      "expected a string to end, found the end of %s",
					      json->whole);
		if (*in == '"')
			break;
		if (*in == '\\') {
			in = unescape(json, in, &out);
			if (!in)
				return json->code;
		} else if (*in < 0x20) {
			return tnd__json_fail(
				json, json->code, in,
				"control character 0x%02x in a string: it must be escaped", *in);
		}
	}
	ret_span->text = (const char *)json->at + 1;
	ret_span->bytes = (size_t)(out - (json->at + 1));
	json->at = in + 1;
	return 0;
}

int tnd__json_key(struct tnd__json *json, struct tnd__span *ret_span)
{
	int rc = tnd__json_string(json, ret_span);

	if (rc == 0)
		rc = tnd__json_take(json, ':', "`:`");
	tnd__json_space(json);
	return rc;
}

int tnd__json_u64(struct tnd__json *json, const char *what, uint64_t *ret_value)
{
	unsigned char *at = json->at;
	uint64_t value = 0;

	for (; at < json->end && (unsigned char)(*at - '0') < 10; at++) {
		/* 19 digits always fit. */
		if (at - json->at < 19)
			value = value * 10 + (*at - '0');
		else if (__builtin_mul_overflow(value, 10, &value) ||
			 __builtin_add_overflow(value, *at - '0', &value))
			return tnd__json_expected(json, what);
	}
	if (at == json->at || (*json->at == '0' && at - json->at > 1) ||
	    (at < json->end && (*at == '.' || *at == 'e' || *at == 'E')))
		return tnd__json_expected(json, what);
	json->at = at;
	*ret_value = value;
	return 0;
}

bool tnd__json_word(struct tnd__json *json, const char *word)
{
	size_t bytes = strlen(word);

	if ((size_t)(json->end - json->at) < bytes || memcmp(json->at, word, bytes) != 0)
		return false;
	json->at += bytes;
	return true;
}

static void skip_digits(struct tnd__json *json)
{
	while (json->at < json->end && *json->at >= '0' && *json->at <= '9')
		json->at++;
}

/* A number by the grammar alone: its value does not matter. */
static int skip_number(struct tnd__json *json)
{
	unsigned char *before;

	if (json->at < json->end && *json->at == '-')
		json->at++;
	before = json->at;
	if (json->at < json->end && *json->at == '0')
		json->at++;
	else
		skip_digits(json);
	if (json->at == before)
		return tnd__json_expected(json, "a value");
	if (json->at < json->end && *json->at == '.') {
		before = ++json->at;
		skip_digits(json);
		if (json->at == before)
			return tnd__json_expected(json, "a digit");
	}
	if (json->at < json->end && (*json->at | 0x20) == 'e') {
		json->at++;
		if (json->at < json->end && (*json->at == '+' || *json->at == '-'))
			json->at++;
		before = json->at;
		skip_digits(json);
		if (json->at == before)
			return tnd__json_expected(json, "a digit");
	}
	return 0;
}

static int skip_scalar(struct tnd__json *json)
{
	struct tnd__span span;

	if (json->at < json->end && *json->at == '"')
		return tnd__json_string(json, &span);
	if (tnd__json_word(json, "null") || tnd__json_word(json, "true") ||
	    tnd__json_word(json, "false"))
		return 0;
	if (json->lenient && (tnd__json_word(json, "NaN") || tnd__json_word(json, "Infinity") ||
			      tnd__json_word(json, "-Infinity")))
		return 0;
	return skip_number(json);
}

int tnd__json_skip(struct tnd__json *json)
{
	unsigned char close[TND__JSON_DEPTH_MAX];
	struct tnd__span span;
	unsigned depth = 0;
	bool first = true;
	int rc;

	do {
		if (depth && close[depth - 1] == '}') {
			rc = tnd__json_key(json, &span);
			if (rc < 0)
				return rc;
		}
		if (json->at < json->end && (*json->at == '{' || *json->at == '[')) {
			if (depth == TND__JSON_DEPTH_MAX)
				return tnd__json_fail(json, json->code, json->at,
						      "nesting deeper than %d in an ignored field",
						      TND__JSON_DEPTH_MAX);
			close[depth++] = *json->at++ == '{' ? '}' : ']';
			first = true;
		} else {
			rc = skip_scalar(json);
			if (rc < 0)
				return rc;
			first = false;
		}
		/*
		 * Ends as many containers as end here, then stands at the next item or behind the
		 * whole value.
		 */
		while (depth && (rc = tnd__json_next(json, close[depth - 1], &first)) == 0) {
			depth--;
			first = false;
		}
		if (depth && rc < 0)
			return rc;
	} while (depth);
	return 0;
}
