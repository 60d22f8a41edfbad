/* SPDX-License-Identifier: Apache-2.0 */
/* size.c - sizes as people write them */
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base.h"

struct unit {
	const char *name;
	uint64_t bytes;
};

static const struct unit units[] = {
	{"", 1},
	{"B", 1},
	{"K", UINT64_C(1) << 10},
	{"M", UINT64_C(1) << 20},
	{"G", UINT64_C(1) << 30},
	{"T", UINT64_C(1) << 40},
	{"KiB", UINT64_C(1) << 10},
	{"MiB", UINT64_C(1) << 20},
	{"GiB", UINT64_C(1) << 30},
	{"TiB", UINT64_C(1) << 40},
	{"KB", UINT64_C(1000)},
	{"MB", UINT64_C(1000000)},
	{"GB", UINT64_C(1000000000)},
	{"TB", UINT64_C(1000000000000)},
};

/* Digits with at most one point, locale-free. Return: bytes used, 0 if it is not a number. */
static size_t decimal(const char *text, long double *ret_value, bool *ret_whole,
		      uint64_t *ret_integer)
{
	long double value = 0, scale = 1;
	uint64_t integer = 0;
	size_t at = 0, digits = 0;
	bool point = false, overflow = false;

	for (; isdigit((unsigned char)text[at]) || (text[at] == '.' && !point); at++) {
		if (text[at] == '.') {
			point = true;
			continue;
		}
		digits++;
		if (point)
			scale /= 10;
		else
			overflow |= __builtin_mul_overflow(integer, 10u, &integer) ||
				    __builtin_add_overflow(integer, (uint64_t)(text[at] - '0'),
							   &integer);
		value = point ? value + scale * (text[at] - '0') : value * 10 + (text[at] - '0');
	}
	*ret_value = value;
	*ret_whole = !point && !overflow;
	*ret_integer = integer;
	return digits ? at : 0;
}

int tnd_size_parse(const char *text, uint64_t *ret_bytes)
{
	long double value;
	uint64_t integer, bytes;
	bool whole;
	size_t used = decimal(text, &value, &whole, &integer);

	if (!used)
		return TND_E_INVALID;
	if (text[used] == ' ' && text[used + 1])
		used++;
	for (size_t i = 0; i < sizeof(units) / sizeof(*units); i++) {
		if (strcasecmp(text + used, units[i].name) != 0)
			continue;
		if (whole) {
			if (__builtin_mul_overflow(integer, units[i].bytes, &bytes))
				return TND_E_INVALID;
		} else {
			value *= units[i].bytes;
			if (value >= 9223372036854775808.0L)
				return TND_E_INVALID;
			bytes = (uint64_t)(value + 0.5L);
		}
		if (bytes > INT64_MAX)
			return TND_E_INVALID;
		*ret_bytes = bytes;
		return 0;
	}
	return TND_E_INVALID;
}

const char *tnd_size_format(uint64_t bytes, char *ret_text)
{
	static const char *const names[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
	double value = (double)bytes;
	int unit = -1;

	/* 1023.995 and up would print as 1024.00 of the unit below. */
	while (value >= (unit < 0 ? 1024 : 1023.995) && unit < 5) {
		value /= 1024;
		unit++;
	}
	if (unit < 0)
		snprintf(ret_text, TND_SIZE_TEXT_MAX, "%u B", (unsigned)bytes);
	else
		snprintf(ret_text, TND_SIZE_TEXT_MAX, "%.2f %s", value, names[unit]);
	return ret_text;
}

int tnd_slab_mb_parse(const char *text, uint64_t *ret_slab_bytes)
{
	bool negative = *text == '-', whole;
	long double value;
	uint64_t integer, slab = UINT64_C(1) << 20;
	size_t used = decimal(text + negative, &value, &whole, &integer);

	if (!used || text[negative + used])
		return TND_E_INVALID;
	if (negative || value <= 0) {
		*ret_slab_bytes = 0;
		return 0;
	}
	if (value >= 8796093022208.0L) /* 2^63 bytes */
		return TND_E_INVALID;
	while ((long double)slab * 2 <= value * 1048576)
		slab *= 2;
	*ret_slab_bytes = slab;
	return 0;
}
