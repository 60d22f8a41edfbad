/* SPDX-License-Identifier: Apache-2.0 */
/*
 * copy.c - the copies that bulk bytes are moved with
 *
 * A store to memory that is in no cache costs a read of its line first: three bytes move for two.
 * memcpy() writes around the caches only from some MiB in one call on, and a slice is gathered by
 * calls of some hundred bytes to some KiB. Streaming stores do without that read, and are as slow
 * as memory where the destination would have stayed in a cache.
 *
 *   [head|....whole lines of 64 bytes, streamed....|tail]   head and tail go through the caches: a
 *                                                           line that two runs share is written by
 *                                                           neither as a stream
 *
 * Measured by bench/gather.c on two cores of an EPYC of 2021 (Zen 3), GB/s kept, median of 9; one
 * block of 64 MiB: memcpy 8.6, 16-byte streams 14.8, 32-byte streams 15.9:
 *
 *     run   into touched memory    into fresh memory     into 1 MiB, used again
 *           plain    16    32      plain    16    32      plain    16    32
 *     384     7.6   5.0   5.5        4.6   3.2   3.5        8.7   4.6   5.5
 *    1024     6.6   5.1   7.3        4.8   3.8   4.4        8.6   5.3   7.4
 *    2048     6.6   7.2   8.9        5.4   4.3   4.9       11.2   7.0   8.5
 *    3584     8.6   8.3  10.5        5.5   4.9   5.4       10.8   8.2  10.4
 *    8192     8.6  10.6  13.2        5.9   5.8   6.3       13.9  10.5  12.4
 *   65536     8.9  14.2  15.7        6.4   6.7   6.6       16.6  13.9  15.0
 *
 * Hence: never where the bytes are read soon (`past` false); else from 2 KiB on by 32-byte stores,
 * and from 8 KiB on by 16-byte ones. Asking for the next runs ahead (prefetch) changed nothing
 * beyond noise.
 */
#include "copy.h"

#include <string.h>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#define LINE 64

/* Lengths of a run from which on streaming pays (above). */
#define STREAM32_MIN 2048
#define STREAM16_MIN 8192

static void copy_plain(char *to, const char *from, uint64_t bytes)
{
	memcpy(to, from, bytes);
}

#ifdef __x86_64__

/* Up to a whole line of the destination. Return: bytes copied. */
static uint64_t copy_head(char *to, const char *from, uint64_t bytes)
{
	uint64_t head = -(uintptr_t)to & (LINE - 1);

	head = head < bytes ? head : bytes;
	memcpy(to, from, head);
	return head;
}

static void copy_stream16(char *to, const char *from, uint64_t bytes)
{
	uint64_t at = copy_head(to, from, bytes);

	for (; bytes - at >= LINE; at += LINE) {
		const __m128i *source = (const void *)(from + at);
		__m128i *line = (void *)(to + at);
		__m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
		__m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);

		_mm_stream_si128(line, a);
		_mm_stream_si128(line + 1, b);
		_mm_stream_si128(line + 2, c);
		_mm_stream_si128(line + 3, d);
	}
	memcpy(to + at, from + at, bytes - at);
}

__attribute__((target("avx2"))) static void copy_stream32(char *to, const char *from,
							  uint64_t bytes)
{
	uint64_t at = copy_head(to, from, bytes);

	for (; bytes - at >= LINE; at += LINE) {
		const __m256i *source = (const void *)(from + at);
		__m256i *line = (void *)(to + at);
		__m256i a = _mm256_loadu_si256(source), b = _mm256_loadu_si256(source + 1);

		_mm256_stream_si256(line, a);
		_mm256_stream_si256(line + 1, b);
	}
	memcpy(to + at, from + at, bytes - at);
}

#endif

static void copy_runs(void (*copy)(char *, const char *, uint64_t), void *to, const void *from,
		      const struct tnd__strides *strides)
{
	for (uint64_t i = 0; i < strides->count; i++)
		copy((char *)to + i * strides->bytes, (const char *)from + i * strides->stride,
		     strides->bytes);
}

bool tnd__copy_by(int way, void *to, const void *from, const struct tnd__strides *strides)
{
	if (!strides->bytes)
		return true;
	switch (way) {
	case TND__COPY_PLAIN:
		copy_runs(copy_plain, to, from, strides);
		return true;
#ifdef __x86_64__
	case TND__COPY_STREAM16:
		copy_runs(copy_stream16, to, from, strides);
		break;
	case TND__COPY_STREAM32:
		if (!__builtin_cpu_supports("avx2"))
			return false;
		copy_runs(copy_stream32, to, from, strides);
		break;
#endif
	default:
		return false;
	}
#ifdef __x86_64__
	/* Streaming stores are in no order with others: whoever is told of the bytes sees them. */
	_mm_sfence();
#endif
	return true;
}

static int choose(uint64_t bytes, bool past)
{
#ifdef __x86_64__
	if (past && bytes >= STREAM32_MIN && __builtin_cpu_supports("avx2"))
		return TND__COPY_STREAM32;
	if (past && bytes >= STREAM16_MIN)
		return TND__COPY_STREAM16;
#endif
	(void)bytes;
	(void)past;
	return TND__COPY_PLAIN;
}

void tnd__copy_strides(void *to, const void *from, const struct tnd__strides *strides, bool past)
{
	tnd__copy_by(choose(strides->bytes, past), to, from, strides);
}

void tnd__copy(void *to, const void *from, uint64_t bytes, bool past)
{
	tnd__copy_strides(to, from, &(struct tnd__strides){1, bytes, bytes}, past);
}
