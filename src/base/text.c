/* SPDX-License-Identifier: Apache-2.0 */
/*
 * text.c - printable names, globs, lists, small files, growable text
 *
 * Names come from files that anybody may have written. They are valid UTF-8 by the time that they
 * are tensors' names, but may hold NULs and control characters; names of files may hold any bytes.
 * So every function takes a length, and what is shown goes through tnd__printable().
 */
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base.h"

size_t tnd__utf8_bytes(const unsigned char *at, size_t left)
{
	unsigned char low = 0x80, high = 0xbf;
	size_t bytes;

	if (at[0] < 0x80)
		return 1;
	if (at[0] >= 0xc2 && at[0] <= 0xdf)
		bytes = 2;
	else if (at[0] >= 0xe0 && at[0] <= 0xef)
		bytes = 3;
	else if (at[0] >= 0xf0 && at[0] <= 0xf4)
		bytes = 4;
	else
		return 0;
	if (bytes > left)
		return 0;
	if (at[0] == 0xe0)
		low = 0xa0;
	else if (at[0] == 0xed)
		high = 0x9f;
	else if (at[0] == 0xf0)
		low = 0x90;
	else if (at[0] == 0xf4)
		high = 0x8f;
	if (at[1] < low || at[1] > high)
		return 0;
	for (size_t i = 2; i < bytes; i++)
		if ((at[i] & 0xc0) != 0x80)
			return 0;
	return bytes;
}

/* Printable form of the character at `text`. Return: bytes of the text that it stands for. */
static size_t printable_piece(const char *text, size_t left, char *piece, size_t piece_bytes)
{
	size_t length = tnd__utf8_bytes((const unsigned char *)text, left);
	unsigned char c = (unsigned char)text[0];
	/* C1 control characters (U+0080 to U+009F) steer terminals as C0 ones do. */
	bool c1 = length == 2 && c == 0xc2 && (unsigned char)text[1] < 0xa0;

	if (c < 0x20 || c == 0x7f || c1)
		snprintf(piece, piece_bytes, "\\u%04x", c1 ? (unsigned char)text[1] : c);
	else if (!length)
		snprintf(piece, piece_bytes, "\\x%02x", c);
	else
		snprintf(piece, piece_bytes, "%.*s", (int)length, text);
	return length ? length : 1;
}

/* Pieces into out as long as `reserve` bytes stay free behind them. Return: whether all fitted. */
static bool printable_fill(const char *text, size_t text_bytes, char *out, size_t out_bytes,
			   size_t reserve, size_t *ret_used)
{
	size_t used = 0;
	char piece[8];

	for (size_t i = 0; i < text_bytes;) {
		i += printable_piece(text + i, text_bytes - i, piece, sizeof(piece));
		*ret_used = used;
		if (used + strlen(piece) + reserve > out_bytes)
			return false;
		memcpy(out + used, piece, strlen(piece));
		used += strlen(piece);
	}
	*ret_used = used;
	return true;
}

const char *tnd__printable(const char *text, size_t text_bytes, char *out, size_t out_bytes)
{
	size_t used = 0;

	if (!printable_fill(text, text_bytes, out, out_bytes, 1, &used)) {
		printable_fill(text, text_bytes, out, out_bytes, sizeof("..."), &used);
		if (used + sizeof("...") <= out_bytes) {
			memcpy(out + used, "...", 3);
			used += 3;
		}
	}
	out[used] = '\0';
	return out;
}

bool tnd__glob(const char *pattern, const char *text, size_t text_bytes)
{
	if (strcmp(pattern, "*") == 0)
		return true;
	if (memchr(text, '\0', text_bytes))
		return false;
	return fnmatch(pattern, text, 0) == 0;
}

int tnd__compare(const char *a, size_t a_bytes, const char *b, size_t b_bytes)
{
	int order = memcmp(a, b, TND__MIN(a_bytes, b_bytes));

	if (order)
		return order;
	return a_bytes < b_bytes ? -1 : a_bytes > b_bytes;
}

int tnd__list_parse(const char *text, unsigned char *bits, size_t bit_count)
{
	const char *at = text;

	memset(bits, 0, (bit_count + 7) / 8);
	do {
		char *end;
		unsigned long first, last;

		if (*at < '0' || *at > '9')
			return TND_E_INVALID;
		first = last = strtoul(at, &end, 10);
		if (*end == '-') {
			at = end + 1;
			if (*at < '0' || *at > '9')
				return TND_E_INVALID;
			last = strtoul(at, &end, 10);
		}
		if (first > last || last >= bit_count)
			return TND_E_INVALID;
		for (unsigned long i = first; i <= last; i++)
			bits[i / 8] |= (unsigned char)(1u << (i % 8));
		at = end;
	} while (*at == ',' && *++at);
	return *at == '\0' || *at == '\n' ? 0 : TND_E_INVALID;
}

ssize_t tnd__read_small(const char *path, char *out, size_t out_bytes)
{
	size_t used = 0;
	ssize_t got;
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return -errno;
	do {
		got = read(fd, out + used, out_bytes - used);
		if (got > 0)
			used += (size_t)got;
	} while ((got > 0 && used < out_bytes) || (got < 0 && errno == EINTR));
	if (got < 0)
		got = -errno;
	close(fd);
	if (got < 0)
		return got;
	if (used == out_bytes)
		return -EFBIG;
	out[used] = '\0';
	return (ssize_t)used;
}

void tnd__text_add(struct tnd__text *text, const char *format, ...)
{
	va_list args;
	int need;

	if (text->failed)
		return;
	va_start(args, format);
	need = vsnprintf(NULL, 0, format, args);
	va_end(args);
	if (need < 0 ||
	    tnd__reserve(&text->data, &text->capacity, text->bytes + (size_t)need + 1, 1) < 0) {
		text->failed = true;
		return;
	}
	va_start(args, format);
	vsnprintf(text->data + text->bytes, (size_t)need + 1, format, args);
	va_end(args);
	text->bytes += (size_t)need;
}

char *tnd__text_take(struct tnd__text *text)
{
	char *data = text->data;

	if (text->failed || !data) {
		tnd__text_free(text);
		return NULL;
	}
	memset(text, 0, sizeof(*text));
	return data;
}

void tnd__text_free(struct tnd__text *text)
{
	free(text->data);
	memset(text, 0, sizeof(*text));
}
