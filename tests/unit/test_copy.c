/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_copy.c - could break: a head or tail of a streamed run that is left out, written twice or
 * beyond the end; a way that a processor does not have; the choice between ways at its limits. Each
 * way copies every length at every alignment of both sides between guard bytes, and is compared
 * with a loop over bytes.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/copy.h"

#define GUARD 0xa5
#define ROOM (1u << 18)

static unsigned char *from, *to, *expected;

static int set_up(void **state)
{
	(void)state;
	from = aligned_alloc(64, ROOM);
	to = aligned_alloc(64, ROOM);
	expected = aligned_alloc(64, ROOM);
	if (!from || !to || !expected)
		return -1;
	for (size_t i = 0; i < ROOM; i++)
		from[i] = (unsigned char)(i * 2654435761u >> 13);
	return 0;
}

static int tear_down(void **state)
{
	(void)state;
	free(from);
	free(to);
	free(expected);
	return 0;
}

/* What must be there in the first `room` bytes of `to`, by bytes. */
static void expect(size_t to_offset, size_t from_offset, const struct tnd__strides *strides,
		   size_t room)
{
	memset(expected, GUARD, room);
	for (size_t i = 0; i < strides->count; i++)
		for (size_t k = 0; k < strides->bytes; k++)
			expected[to_offset + i * strides->bytes + k] =
				from[from_offset + i * strides->stride + k];
}

/* `way`: TND__COPY_*, or beyond them what tnd__copy_strides() chooses without and with `past`. */
static void check(int way, size_t to_offset, size_t from_offset, const struct tnd__strides *strides)
{
	size_t room = to_offset + strides->count * strides->bytes + 128;

	assert_true(room <= ROOM);
	expect(to_offset, from_offset, strides, room);
	memset(to, GUARD, room);
	if (way >= TND__COPY_WAYS)
		tnd__copy_strides(to + to_offset, from + from_offset, strides,
				  way > TND__COPY_WAYS);
	else if (!tnd__copy_by(way, to + to_offset, from + from_offset, strides))
		return;
	assert_memory_equal(to, expected, room);
}

static void test_every_length_and_alignment(void **state)
{
	(void)state;
	for (int way = 0; way < TND__COPY_WAYS; way++)
		for (size_t bytes = 0; bytes <= 300; bytes++)
			for (size_t offset = 0; offset < 64; offset++)
				check(way, 64 + offset, (offset * 7 + bytes) % 64,
				      &(struct tnd__strides){1, bytes, bytes});
}

static void test_runs(void **state)
{
	const size_t lengths[] = {1, 15, 63, 64, 65, 127, 200, 300};

	(void)state;
	for (int way = 0; way < TND__COPY_WAYS + 2; way++)
		for (size_t l = 0; l < sizeof(lengths) / sizeof(lengths[0]); l++)
			for (size_t count = 0; count < 6; count++)
				for (size_t offset = 0; offset < 64; offset += 3)
					check(way, 64 + offset, (64 - offset) % 64,
					      &(struct tnd__strides){count, lengths[l],
								     lengths[l] * 4 + offset});
}

/* Around the lengths where another way is chosen. */
static void test_choice(void **state)
{
	const size_t lengths[] = {2047, 2048, 2049, 3584, 8191, 8192, 8193, 20000};

	(void)state;
	for (int way = 0; way < TND__COPY_WAYS + 2; way++)
		for (size_t l = 0; l < sizeof(lengths) / sizeof(lengths[0]); l++)
			for (size_t offset = 0; offset < 64; offset += 7)
				check(way, 64 + offset, offset / 2,
				      &(struct tnd__strides){3, lengths[l], lengths[l] * 2 + 1});
}

static void test_one_run(void **state)
{
	(void)state;
	for (size_t bytes = 0; bytes < 20000; bytes = bytes * 3 + 1)
		for (int past = 0; past < 2; past++) {
			memset(to, GUARD, bytes + 128);
			expect(65, 3, &(struct tnd__strides){1, bytes, bytes}, bytes + 128);
			tnd__copy(to + 65, from + 3, bytes, past);
			assert_memory_equal(to, expected, bytes + 128);
		}
}

/* A slice without bytes comes without memory. */
static void test_nothing(void **state)
{
	(void)state;
	tnd__copy(NULL, NULL, 0, false);
	tnd__copy(NULL, NULL, 0, true);
	tnd__copy_strides(NULL, NULL, &(struct tnd__strides){0, 64, 64}, true);
	tnd__copy_strides(NULL, NULL, &(struct tnd__strides){5, 0, 64}, true);
	assert_false(tnd__copy_by(TND__COPY_WAYS, to, from, &(struct tnd__strides){1, 1, 1}));
	assert_true(tnd__copy_by(TND__COPY_PLAIN, to, from, &(struct tnd__strides){1, 1, 1}));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_every_length_and_alignment),
		cmocka_unit_test(test_runs),
		cmocka_unit_test(test_choice),
		cmocka_unit_test(test_one_run),
		cmocka_unit_test(test_nothing),
	};

	return cmocka_run_group_tests(tests, set_up, tear_down);
}
