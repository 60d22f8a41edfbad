/* SPDX-License-Identifier: Apache-2.0 */
/*
 * deny.c - runs a program in which chosen system calls fail, as in a container's seccomp profile
 *
 *   tnd_deny CALL[=ERRNO][:CONDITION...] ... -- PROGRAM [ARGS]
 *
 *   CALL       io_uring_setup, io_uring_enter, io_uring_register, cachestat, openat, preadv2, pread64, madvise, statx, memfd_create,
 *              pidfd_open, pidfd_getfd, fadvise64, fallocate, ftruncate, mbind, sched_setaffinity, sched_getaffinity, mmap,
 *              copy_file_range, eventfd2, clone3, or a number
 *   ERRNO      name or number; EPERM if absent
 *   CONDITION  aN&MASK  all bits of MASK set in argument N (0 to 5)
 *              aN=VALUE argument N is VALUE (low 32 bits)
 *              direct, dontcache, nowait, collapse, populate, huge: the flags of openat, preadv2 and madvise by name
 *
 *   tnd_deny io_uring_setup=EPERM openat=EINVAL:direct preadv2=EOPNOTSUPP:dontcache -- tundish load /models/x
 *
 * All conditions of one rule must hold. Raw BPF, one filter; a call of another architecture is
 * allowed. Exit: 125 for bad arguments or no seccomp, 127 if the program cannot be run.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FILTER_MAX 512

static const struct {
	const char *name;
	int number;
} calls[] = {
	{"io_uring_setup", 425},
	{"io_uring_enter", 426},
	{"io_uring_register", 427},
	{"pidfd_open", 434},
	{"clone3", 435},
	{"pidfd_getfd", 438},
	{"cachestat", 451},
	{"openat", SYS_openat},
	{"pread64", SYS_pread64},
	{"preadv2", SYS_preadv2},
	{"madvise", SYS_madvise},
	{"mmap", SYS_mmap},
	{"statx", SYS_statx},
	{"memfd_create", SYS_memfd_create},
	{"fadvise64", SYS_fadvise64},
	{"fallocate", SYS_fallocate},
	{"ftruncate", SYS_ftruncate},
	{"mbind", SYS_mbind},
	{"sched_setaffinity", SYS_sched_setaffinity},
	{"sched_getaffinity", SYS_sched_getaffinity},
	{"copy_file_range", SYS_copy_file_range},
	{"eventfd2", SYS_eventfd2},
};

static const struct {
	const char *name;
	int argument;
	char how;
	uint32_t value;
} conditions[] = {
	{"direct", 2, '&', O_DIRECT}, {"dontcache", 5, '&', 0x80}, {"nowait", 5, '&', 0x08},
	{"collapse", 2, '=', 25},     {"populate", 2, '=', 23},    {"huge", 2, '=', 14},
};

static struct sock_filter filter[FILTER_MAX];
static unsigned short used;

static _Noreturn void bad(const char *what, const char *text)
{
	fprintf(stderr,
		"tnd_deny: %s '%s'; usage: tnd_deny CALL[=ERRNO][:CONDITION...] ... -- "
		"PROGRAM [ARGS]\n",
		what, text);
	exit(125);
}

static void emit(uint16_t code, uint32_t k, uint8_t jump_true, uint8_t jump_false)
{
	if (used == FILTER_MAX)
		bad("too many rules at", "");
	filter[used++] = (struct sock_filter){code, jump_true, jump_false, k};
}

static int call_number(const char *name)
{
	char *end;
	long number = strtol(name, &end, 10);

	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++)
		if (strcmp(calls[i].name, name) == 0)
			return calls[i].number;
	if (*end || end == name)
		bad("unknown call", name);
	return (int)number;
}

static uint32_t error_number(const char *name)
{
	int number = atoi(name);

	for (int i = 1; i < 256 && number == 0; i++)
		if (strerrorname_np(i) && strcmp(strerrorname_np(i), name) == 0)
			number = i;
	if (number <= 0)
		bad("unknown error", name);
	return (uint32_t)number;
}

/* Loads the low half of an argument. */
static void load_argument(int argument)
{
	uint32_t offset = (uint32_t)offsetof(struct seccomp_data, args) + 8u * (uint32_t)argument;

#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
	offset += 4;
#endif
	emit(BPF_LD | BPF_W | BPF_ABS, offset, 0, 0);
}

/* Falls through if the condition holds; else jumps, over a distance that rule() fills in. */
static void condition(const char *text)
{
	int argument = -1;
	uint32_t value = 0;
	char how = 0;

	for (size_t i = 0; i < sizeof(conditions) / sizeof(conditions[0]); i++) {
		if (strcmp(conditions[i].name, text) != 0)
			continue;
		argument = conditions[i].argument;
		how = conditions[i].how;
		value = conditions[i].value;
	}
	if (argument < 0 && text[0] == 'a' && text[1] >= '0' && text[1] <= '5' &&
	    (text[2] == '&' || text[2] == '=')) {
		argument = text[1] - '0';
		how = text[2];
		value = (uint32_t)strtoul(text + 3, NULL, 0);
	}
	if (argument < 0)
		bad("unknown condition", text);
	load_argument(argument);
	if (how == '&')
		emit(BPF_ALU | BPF_AND | BPF_K, value, 0, 0);
	emit(BPF_JMP | BPF_JEQ | BPF_K, value, 0, 0xff);
}

static void rule(char *text)
{
	char *rest = text, *head = strsep(&rest, ":"), *error = head, *one;
	unsigned short start;

	head = strsep(&error, "=");
	emit(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr), 0, 0);
	start = used;
	emit(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)call_number(head), 0, 0xff);
	while ((one = strsep(&rest, ":")))
		condition(one);
	emit(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (error ? error_number(error) : EPERM), 0, 0);
	for (unsigned short i = start; i < used; i++)
		if (filter[i].jf == 0xff)
			filter[i].jf = (uint8_t)(used - i - 1);
}

int main(int argc, char **argv)
{
	struct sock_fprog program = {0, filter};
	int at = 1;

	for (; at < argc && strcmp(argv[at], "--") != 0; at++)
		rule(argv[at]);
	if (at == 1 || at + 1 >= argc)
		bad("expected rules, then -- and a program; found", at < argc ? argv[at] : "");
	emit(BPF_RET | BPF_K, SECCOMP_RET_ALLOW, 0, 0);
	program.len = used;
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ||
	    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0) {
		perror("tnd_deny: seccomp");
		return 125;
	}
	execvp(argv[at + 1], argv + at + 1);
	perror(argv[at + 1]);
	return 127;
}
