/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_data.c - objects whose every word says where it belongs
 *
 * Word i of the source is i times an odd constant. Objects of one size are ranges of a source of a
 * few KiB that stays in the cache, so that what is measured is the link; a reader needs only the
 * object's number to check its first and last word without reading the source. Objects of mixed
 * size lie one after the other in 401 MB, as messages of a program do: each is read once.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench_run.h"

#define STEPS 64u
#define MIXED_WORDS_MAX 9999u
#define MIXED_BYTES_LEAST 400000000u

static uint64_t word_at(uint64_t index)
{
	return (index + 1) * UINT64_C(0x9e3779b97f4a7c15);
}

static uint64_t draw(uint64_t *state)
{
	uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);

	x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
	return x ^ x >> 31;
}

/* Each begins on a line of its own. Return: words in all. */
static uint64_t mix(struct data *data, uint64_t seed)
{
	uint64_t at = 0;

	data->lengths = bench_alloc(data->count * sizeof(*data->lengths));
	data->starts = bench_alloc(data->count * sizeof(*data->starts));
	for (uint64_t i = 0; i < data->count; i++) {
		data->lengths[i] = (uint32_t)(1 + draw(&seed) % MIXED_WORDS_MAX);
		data->starts[i] = at;
		data->total_bytes += data->lengths[i] * UINT64_C(8);
		at += (data->lengths[i] + 7u) & ~7u;
	}
	data->longest = MIXED_WORDS_MAX * UINT64_C(8);
	if (data->count >= 10000 && data->total_bytes <= MIXED_BYTES_LEAST) {
		fprintf(stderr,
			"bench-channel: expected a seed whose objects exceed %u bytes, found "
			"%llu: choose another\n",
			MIXED_BYTES_LEAST, (unsigned long long)data->total_bytes);
		exit(2);
	}
	return at;
}

void bench_data_make(struct data *data, const struct run_opts *opts)
{
	uint64_t words;

	data->count = opts->count;
	data->bytes_each = opts->bytes;
	if (opts->bytes) {
		data->longest = opts->bytes;
		data->total_bytes = opts->bytes * opts->count;
		words = STEPS * 8 + (opts->bytes + 7) / 8;
	} else {
		words = mix(data, opts->seed);
	}
	data->words = bench_alloc(words * 8);
	for (uint64_t i = 0; i < words; i++)
		data->words[i] = word_at(i);
}

uint64_t bench_data_bytes(const struct data *data, uint64_t number)
{
	return data->lengths ? data->lengths[number] * UINT64_C(8) : data->bytes_each;
}

static uint64_t start_of(const struct data *data, uint64_t number)
{
	return data->lengths ? data->starts[number] : number % STEPS * 8;
}

uint64_t *bench_data_at(const struct data *data, uint64_t number)
{
	return data->words + start_of(data, number);
}

static uint64_t load(const unsigned char *at)
{
	uint64_t word;

	memcpy(&word, at, sizeof(word));
	return word;
}

void bench_data_check(const struct data *data, uint64_t number, const void *object, uint64_t bytes,
		      bool stamped, bool whole)
{
	const unsigned char *at = object;
	uint64_t expected = bench_data_bytes(data, number), start = start_of(data, number);
	uint64_t skip = stamped ? 8 : 0;
	const char *wrong = NULL;

	if (bytes != expected)
		wrong = "its length";
	else if (!stamped && load(at) != word_at(start))
		wrong = "its first word";
	else if (bytes > 8 && load(at + bytes - 8) != word_at(start + bytes / 8 - 1))
		wrong = "its last word";
	else if (whole && memcmp(at + skip, (const unsigned char *)(data->words + start) + skip,
				 bytes - skip) != 0)
		wrong = "what is between";
	if (!wrong)
		return;
	fprintf(stderr,
		"bench-channel: object %llu of %llu bytes: expected what was sent, found %llu "
		"bytes that differ in %s\n",
		(unsigned long long)number, (unsigned long long)expected, (unsigned long long)bytes,
		wrong);
	_exit(3);
}
