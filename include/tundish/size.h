/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tundish/size.h - sizes as people write them
 *
 * A bare number is bytes; K, M, G, T, KiB, MiB, GiB, TiB are binary, KB, MB, GB, TB decimal;
 * fractions are allowed ("1.5GiB"); one space before the unit is allowed. Threads: MT-safe.
 * Blocking: never.
 */
#ifndef TUNDISH_SIZE_H
#define TUNDISH_SIZE_H

#include <tundish/error.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Bytes of a size. `text`: borrowed for the call.
 * Return: 0; TND_E_INVALID (not a size, negative, 2^63 or more).
 */
TND_API int tnd_size_parse(const char *text, uint64_t *ret_bytes);

#define TND_SIZE_TEXT_MAX 32
/* "1.50 GiB", "512 B". `ret_text`: room for TND_SIZE_TEXT_MAX bytes. Return: ret_text. */
TND_API const char *tnd_size_format(uint64_t bytes, char *ret_text);

/*
 * Slab size from a text in MiB (`TUNDISH_SLAB_MB`): fractions allowed; 0 or below gives 0 (no
 * slabs), anything else is rounded down to a power of two and is at least 1 MiB: "300" -> 256 MiB,
 * "0.1" -> 1 MiB.
 * Return: 0, or TND_E_INVALID.
 */
TND_API int tnd_slab_mb_parse(const char *text, uint64_t *ret_slab_bytes);

#ifdef __cplusplus
}
#endif
#endif
