/* SPDX-License-Identifier: Apache-2.0 */
/*
 * jsontext.h - a cursor over the JSON text of a safetensors header, an index or config.json
 *
 * Strict JSON (RFC 8259): UTF-8 is validated, escapes are decoded in place over their own source (a
 * decoded string is never longer), numbers are exact unsigned 64-bit integers, nothing recurses.
 * Every refusal names the byte in the file.
 */
#ifndef TND_JSONTEXT_H
#define TND_JSONTEXT_H

#include "base/base.h"

/* Deepest nesting of a value that is skipped. */
#define TND__JSON_DEPTH_MAX 128

struct tnd__json {
	unsigned char *start, *at, *end;
	uint64_t start_offset; /* of `start` in the file */
	const char *file;
	const char *whole; /* what the text is, for messages: "the header" */
	int code;          /* of refusals: TND_E_FORMAT, TND_E_INDEX */
	bool lenient;      /* skips NaN, Infinity and -Infinity as Python writes them */
	const char *name;  /* tensor that is being read, or NULL */
	size_t name_bytes;
	struct tnd_error *error; /* nullable */
};

struct tnd__span {
	const char *text;
	size_t bytes;
};

/*
 * Refuses the text because of what stands at `at`; the sentence gets the byte position at its end.
 * Return: `code`.
 */
int tnd__json_fail(struct tnd__json *json, int code, const unsigned char *at, const char *format,
		   ...) __attribute__((format(printf, 4, 5)));

/* The cursor's code: "expected `what`, found ..." with what stands at the cursor. */
int tnd__json_expected(struct tnd__json *json, const char *what);

void tnd__json_space(struct tnd__json *json);

/* Steps over `c` and the white space before it. `what`: the word for it in a refusal. */
int tnd__json_take(struct tnd__json *json, unsigned char c, const char *what);

/*
 * Moves to the next item of an array or object that `close` ends; `first` is true before the first
 * call. Return: 1 and the cursor at the item, 0 and the cursor behind `close`, or a refusal.
 */
int tnd__json_next(struct tnd__json *json, unsigned char close, bool *first);

/* A string; the span lies in the text, unescaped, without a NUL, until the caller overwrites it. */
int tnd__json_string(struct tnd__json *json, struct tnd__span *ret_span);

/* A member's name and the colon behind it. */
int tnd__json_key(struct tnd__json *json, struct tnd__span *ret_span);

/* An integer without sign, fraction and exponent, below 2^64. */
int tnd__json_u64(struct tnd__json *json, const char *what, uint64_t *ret_value);

/* Takes `word` if it stands at the cursor. */
bool tnd__json_word(struct tnd__json *json, const char *word);

/* Any value, checked and dropped; nesting up to TND__JSON_DEPTH_MAX. */
int tnd__json_skip(struct tnd__json *json);

static inline bool tnd__span_is(const struct tnd__span *span, const char *text, size_t text_bytes)
{
	return span->bytes == text_bytes && __builtin_memcmp(span->text, text, text_bytes) == 0;
}

#endif
