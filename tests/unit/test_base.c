/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_base.c - sizes, names for people, globs, lists, error detail, failpoints, states of processes
 *
 * What could break: a size that wraps or is rounded, a hostile name that reaches a terminal raw or is cut inside a character, an error sentence
 * without its place. Each row below is input and exact output. A process whose name looks like a state, one that cannot be looked at taken for
 * one that has ended.
 */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/base.h"

static void test_size_parse(void **state)
{
	static const struct {
		const char *text;
		int rc;
		uint64_t bytes;
	} rows[] = {
		{"0", 0, 0},
		{"1", 0, 1},
		{"64MiB", 0, 64 << 20},
		{"64M", 0, 64 << 20},
		{"64 MiB", 0, 64 << 20},
		{"64mib", 0, 64 << 20},
		{"1.5GiB", 0, 1610612736},
		{"1KB", 0, 1000},
		{"2GB", 0, 2000000000},
		{"0.5K", 0, 512},
		{"9223372036854775807", 0, INT64_MAX},
		{"9223372036854775808", TND_E_INVALID, 0},
		{"18446744073709551616", TND_E_INVALID, 0},
		{"8388608T", TND_E_INVALID, 0},
		{"9000000000.5G", TND_E_INVALID, 0},
		{"", TND_E_INVALID, 0},
		{" 1", TND_E_INVALID, 0},
		{"-1", TND_E_INVALID, 0},
		{"1 ", TND_E_INVALID, 0},
		{"1e3", TND_E_INVALID, 0},
		{"1.2.3", TND_E_INVALID, 0},
		{"MiB", TND_E_INVALID, 0},
		{".", TND_E_INVALID, 0},
		{"0x10", TND_E_INVALID, 0},
		{"1MiBs", TND_E_INVALID, 0},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
		uint64_t bytes = 77;

		if (tnd_size_parse(rows[i].text, &bytes) != rows[i].rc ||
		    bytes != (rows[i].rc ? 77 : rows[i].bytes))
			fail_msg("\"%s\" gave %llu", rows[i].text, (unsigned long long)bytes);
	}
}

static void test_slab_mb(void **state)
{
	static const struct {
		const char *text;
		int rc;
		uint64_t mib;
	} rows[] = {{"300", 0, 256},
		    {"1", 0, 1},
		    {"0.1", 0, 1},
		    {"4096", 0, 4096},
		    {"0", 0, 0},
		    {"-3", 0, 0},
		    {"1.9", 0, 1},
		    {"2.0", 0, 2},
		    {"x", TND_E_INVALID, 0},
		    {"", TND_E_INVALID, 0},
		    {"-", TND_E_INVALID, 0},
		    {"99999999999999", TND_E_INVALID, 0}};

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
		uint64_t bytes = 0;

		assert_int_equal(tnd_slab_mb_parse(rows[i].text, &bytes), rows[i].rc);
		assert_int_equal(bytes, rows[i].mib << 20);
	}
}

static void test_size_format(void **state)
{
	char text[TND_SIZE_TEXT_MAX];

	(void)state;
	assert_string_equal(tnd_size_format(0, text), "0 B");
	assert_string_equal(tnd_size_format(1023, text), "1023 B");
	assert_string_equal(tnd_size_format(1024, text), "1.00 KiB");
	assert_string_equal(tnd_size_format(1048575, text), "1.00 MiB");
	assert_string_equal(tnd_size_format(UINT64_C(1610612736), text), "1.50 GiB");
	assert_string_equal(tnd_size_format(UINT64_MAX, text), "16.00 EiB");
}

static void test_printable(void **state)
{
	static const struct {
		const char *text;
		size_t bytes, room;
		const char *out;
	} rows[] = {
		{"w", 1, 32, "w"},
		{"a\0b", 3, 32, "a\\u0000b"},
		{"\x1b[31m", 5, 32, "\\u001b[31m"},
		{"\xc2\x9b"
		 "31m",
		 5, 32, "\\u009b31m"},
		{"\xc3\xa4", 2, 32, "\xc3\xa4"},
		{"\xff\xc0\x80", 3, 32, "\\xff\\xc0\\x80"},
		{"\xed\xa0\x80", 3, 32, "\\xed\\xa0\\x80"},
		{"abcdefgh", 8, 9, "abcdefgh"},
		{"abcdefghi", 9, 9, "abcde..."},
		{"abcd\xc3\xa4xyz", 9, 9, "abcd..."},
		{"", 0, 1, ""},
	};
	char out[64];

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++)
		assert_string_equal(tnd__printable(rows[i].text, rows[i].bytes, out, rows[i].room),
				    rows[i].out);
}

static void test_glob(void **state)
{
	(void)state;
	assert_true(tnd__glob("*.engram.embed.*", "model.engram.embed.weight", 25));
	assert_false(tnd__glob("*.engram.embed.*", "engram.embed", 12));
	assert_true(tnd__glob("*", "a\0b", 3));
	assert_false(tnd__glob("a*", "a\0b", 3));
	assert_true(tnd__compare("a", 1, "ab", 2) < 0);
	assert_true(tnd__compare("b", 1, "ab", 2) > 0);
	assert_true(tnd__compare("a\0b", 3, "a\0b", 3) == 0);
	assert_true(tnd__compare("\xff", 1, "a", 1) > 0);
}

static void test_list(void **state)
{
	unsigned char bits[8];

	(void)state;
	assert_int_equal(tnd__list_parse("0-3,8\n", bits, 64), 0);
	assert_int_equal(bits[0], 15);
	assert_int_equal(bits[1], 1);
	assert_int_equal(tnd__list_parse("63", bits, 64), 0);
	assert_int_equal(tnd__list_parse("64", bits, 64), TND_E_INVALID);
	assert_int_equal(tnd__list_parse("3-1", bits, 64), TND_E_INVALID);
	assert_int_equal(tnd__list_parse("", bits, 64), TND_E_INVALID);
	assert_int_equal(tnd__list_parse("1,x", bits, 64), TND_E_INVALID);
	assert_int_equal(tnd__list_parse("-1", bits, 64), TND_E_INVALID);
}

static void test_error(void **state)
{
	struct tnd_error error;
	struct tnd__where where = {.file = "m.st",
				   .name = "a\nb",
				   .name_bytes = 3,
				   .byte_offset = 7,
				   .has_offset = true};

	(void)state;
	assert_int_equal(tnd__fail(NULL, TND_E_SHAPE, &where, "x"), TND_E_SHAPE);
	assert_int_equal(tnd__fail(&error, TND_E_SHAPE, &where, "expected %d", 4), TND_E_SHAPE);
	assert_string_equal(error.message, "m.st: tensor 'a\\u000ab': expected 4");
	assert_int_equal(error.byte_offset, 7);
	assert_int_equal(error.rank, -1);
	assert_string_equal(tnd_error_name(TND_E_BUDGET), "TND_E_BUDGET");
	assert_string_equal(tnd_error_name(-ENOSPC), "ENOSPC");
	assert_string_equal(tnd_error_name(-99999), "UNKNOWN");
	assert_string_equal(tnd_error_name(3), "UNKNOWN");
	assert_string_equal(tnd_strerror(TND_E_DTYPE), "unknown dtype");
	assert_string_equal(tnd_strerror(-ENOENT), strerror(ENOENT));
	assert_non_null(strstr(tnd_strerror(-EMFILE), "ulimit -n"));
	assert_non_null(tnd_strerror(-99999));
	assert_string_equal(tnd_strerror(0), "success");
}

/* A sentence longer than its field is cut, and stays a string. */
static void test_error_long(void **state)
{
	struct tnd_error error;
	char *name = malloc(5000);

	(void)state;
	memset(name, 'n', 5000);
	tnd__fail(&error, TND_E_FORMAT,
		  &(struct tnd__where){.file = "f", .name = name, .name_bytes = 5000}, "%.*s", 3000,
		  name);
	assert_int_equal(strlen(error.message), TND_ERROR_MESSAGE_MAX - 1);
	assert_int_equal(strlen(error.name), TND_ERROR_NAME_MAX - 1);
	free(name);
}

#ifdef TND_FAILPOINTS
static void test_failpoints(void **state)
{
	(void)state;
	assert_int_equal(tnd__failpoints_set("a=EIO@2x2,b=5"), 0);
	assert_int_equal(tnd__failpoint("a"), 0);
	assert_int_equal(tnd__failpoint("a"), -EIO);
	assert_int_equal(tnd__failpoint("a"), -EIO);
	assert_int_equal(tnd__failpoint("a"), 0);
	assert_int_equal(tnd__failpoint("b"), -5);
	assert_int_equal(tnd__failpoint("c"), 0);
	assert_int_equal(tnd__failpoints_set("nonsense"), TND_E_INVALID);
	assert_int_equal(tnd__failpoints_set(NULL), 0);
	assert_int_equal(tnd__failpoint("b"), 0);
}
#endif

static void test_process_state(void **state)
{
	uint64_t began = 0, again = 0;
	siginfo_t info;
	pid_t child = fork();

	(void)state;
	assert_true(child >= 0);
	if (child == 0) {
		prctl(PR_SET_NAME, "a) Z 1 (b) X");
		raise(SIGSTOP);
		_exit(0);
	}
	assert_int_equal(waitid(P_PID, (id_t)child, &info, WSTOPPED | WNOWAIT), 0);
	assert_int_equal(tnd__process_state(child, &began), 'T');
	assert_true(began > 0);
	assert_int_equal(kill(child, SIGCONT), 0);
	assert_int_equal(waitid(P_PID, (id_t)child, &info, WEXITED | WNOWAIT), 0);
	assert_int_equal(tnd__process_state(child, &again), 'Z');
	assert_true(again == began);
	assert_int_equal(waitpid(child, NULL, 0), child);
	again = 77;
	assert_int_equal(tnd__process_state(child, &again), -ESRCH);
	assert_true(again == 77);
	assert_int_equal(tnd__process_state(getpid(), NULL), 'R');
	assert_int_equal(tnd__process_state(0, NULL), -ESRCH);
}

static void test_process_unseen(void **state)
{
	struct rlimit limit, none;
	int rc;

	(void)state;
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
	none = (struct rlimit){0, limit.rlim_max};
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
	rc = tnd__process_state(getpid(), NULL);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
	assert_int_equal(rc, -EMFILE);
}

static void test_text(void **state)
{
	struct tnd__text text = {0};
	char *taken;

	(void)state;
	for (int i = 0; i < 1000; i++)
		tnd__text_add(&text, "%d,", i);
	taken = tnd__text_take(&text);
	assert_non_null(strstr(taken, "998,999,"));
	free(taken);
	assert_null(tnd__text_take(&text));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_size_parse),    cmocka_unit_test(test_slab_mb),
		cmocka_unit_test(test_size_format),   cmocka_unit_test(test_printable),
		cmocka_unit_test(test_glob),          cmocka_unit_test(test_list),
		cmocka_unit_test(test_error),         cmocka_unit_test(test_error_long),
#ifdef TND_FAILPOINTS
		cmocka_unit_test(test_failpoints),
#endif
		cmocka_unit_test(test_process_state), cmocka_unit_test(test_process_unseen),
		cmocka_unit_test(test_text),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
