/* SPDX-License-Identifier: Apache-2.0 */
/* dtype.c - names and widths of the 22 dtypes */
#include <string.h>

#include "header.h"

static const struct {
	const char *name;
	uint32_t name_bytes, bits;
} dtypes[] = {
#define DTYPE_ROW(constant, code, name, bits) [code] = {name, sizeof(name) - 1, bits},
	TND_DTYPE_TABLE(DTYPE_ROW)
#undef DTYPE_ROW
};

_Static_assert(sizeof(dtypes) / sizeof(dtypes[0]) == TND_DTYPE_COUNT, "one row for each dtype");

const char *tnd_dtype_name(uint32_t dtype)
{
	return dtype < TND_DTYPE_COUNT ? dtypes[dtype].name : NULL;
}

uint32_t tnd_dtype_bits(uint32_t dtype)
{
	return dtype < TND_DTYPE_COUNT ? dtypes[dtype].bits : 0;
}

uint32_t tnd__dtype_parse(const char *name, size_t name_bytes)
{
	uint32_t code = 0;

	while (code < TND_DTYPE_COUNT && (dtypes[code].name_bytes != name_bytes ||
					  memcmp(dtypes[code].name, name, name_bytes) != 0))
		code++;
	return code;
}
