/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_segment.c - what could break: a limit of memory that the process runs into (a kill, SIGXFSZ, SIGBUS in place of an error), a
 * page that is not there, a way for a reader to change the sealed bytes, the writer's memory in a forked child, a close there that
 * unmaps somebody else's memory, something left behind after a failure. Shown on the real kernel: under RLIMIT_FSIZE, in a real memory
 * cgroup (v1 or v2, where one may be made; else skipped), by the system calls that a reader has, and by counting descriptors and mappings.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "channel/segment.h"
#include "support/fds.h"

#define MIB (UINT64_C(1) << 20)
#define CHILD_SECONDS 60

static struct tnd__segment_opts opts_of(uint64_t max_bytes, uint64_t max_objects)
{
	return (struct tnd__segment_opts){
		.max_bytes = max_bytes,
		.max_objects = max_objects,
		.place_count = 3,
		.name = "test",
		.first_number = UINT64_C(0xfffffff0),
	};
}

static int create(uint64_t max_bytes, uint64_t max_objects, struct tnd__segments *segments,
		  struct tnd_error *error)
{
	struct tnd__segment_opts opts = opts_of(max_bytes, max_objects);

	memset(error, 0, sizeof(*error));
	return tnd__segments_create(&opts, segments, error);
}

/* -- sizes -- */

static void check_whole(int fd, uint64_t bytes)
{
	struct stat stat;

	assert_int_equal(fstat(fd, &stat), 0);
	assert_int_equal(stat.st_size, bytes);
	assert_int_equal(stat.st_blocks * 512, bytes);
	assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
}

static void check_ring(uint64_t max_bytes, uint64_t max_objects)
{
	struct tnd__segment_opts opts = opts_of(max_bytes, max_objects);
	struct tnd__segments writer, reader;
	struct tnd_error error;
	uint64_t last;
	int rc = create(max_bytes, max_objects, &writer, &error);

	if (rc < 0)
		print_error("%s\n", error.message);
	assert_int_equal(rc, 0);
	assert_int_equal(writer.memory_bytes, tnd__segments_bytes(&opts));
	assert_true(writer.arena_bytes >= max_bytes && writer.arena_bytes % 4096 == 0);
	assert_true(writer.slot_count >= max_objects && writer.slot_count < 2 * max_objects);
	check_whole(writer.data_fd, writer.memory_bytes - TND__CONTROL_BYTES);
	check_whole(writer.control_fd, TND__CONTROL_BYTES);
	assert_int_equal(
		tnd__segments_attach(dup(writer.data_fd), dup(writer.control_fd), &reader, &error),
		0);
	assert_int_equal(reader.max_bytes, max_bytes);
	assert_int_equal(reader.max_objects, max_objects);
	assert_int_equal(reader.slot_count, writer.slot_count);
	assert_int_equal(reader.arena_bytes, writer.arena_bytes);
	assert_int_equal(reader.memory_bytes, writer.memory_bytes);
	assert_int_equal(reader.place_count, 3);
	assert_int_equal(reader.first_number, opts.first_number);
	assert_int_equal(reader.writer_pid, getpid());
	assert_string_equal(reader.name, "test");
	assert_int_equal(atomic_load(&reader.header->published), opts.first_number);
	for (size_t i = 0; i < TND__PLACES_MAX; i++)
		assert_int_equal(atomic_load(&reader.control->places[i].cursor), opts.first_number);
	/* Both ends of the descriptors and of the arena, which goes on where it began. */
	last = writer.arena_bytes - 1;
	writer.descriptors[0].number = 3;
	writer.descriptors[writer.slot_count - 1].place = 4;
	writer.arena[last] = 5;
	writer.arena[last + 1] = 6;
	writer.arena[2 * last + 1] = 7;
	assert_int_equal(reader.descriptors[writer.slot_count - 1].place, 4);
	assert_int_equal(reader.arena[last], 7);
	assert_int_equal(reader.arena[0], 6);
	assert_int_equal(reader.arena[last + 1], 6);
	assert_int_equal(reader.arena[2 * last + 1], 7);
	atomic_store(&reader.control->leases[63][63], 9);
	assert_int_equal(atomic_load(&writer.control->leases[63][63]), 9);
	tnd__segments_close(&reader, false, false);
	tnd__segments_close(&writer, true, false);
}

static void test_sizes(void **state)
{
	struct tnd_host_memory memory = {.struct_bytes = sizeof(memory)};
	unsigned int fds = fd_count();

	(void)state;
	check_ring(4096, 1);
	check_ring(4096 + 64, 2);
	check_ring(4096, TND_CHANNEL_OBJECTS_MAX);
	check_ring(10 * MIB, 1023);
	check_ring(100 * MIB, TND_CHANNEL_OBJECTS_MAX - 1);
	assert_int_equal(tnd_host_memory(&memory), 0);
	if (memory.available > 8192 * MIB)
		check_ring(4096 * MIB, 1024);
	else
		print_message("4 GiB: left out, less than 8 GiB available\n");
	assert_int_equal(fd_count(), fds);
	assert_int_equal(map_count("tundish.channel"), 0);
}

static void check_refused(struct tnd__segment_opts opts, const char *word)
{
	struct tnd__segments segments;
	struct tnd_error error = {0};

	assert_int_equal(tnd__segments_create(&opts, &segments, &error), TND_E_INVALID);
	assert_non_null(strstr(error.message, word));
	assert_int_equal(tnd__segments_bytes(&opts), UINT64_MAX);
}

static void test_options(void **state)
{
	struct tnd__segment_opts opts;

	(void)state;
	check_refused(opts_of(0, 1), "max_bytes");
	check_refused(opts_of(4032, 1), "4032");
	check_refused(opts_of(4097, 1), "4097");
	check_refused(opts_of(UINT64_MAX - 63, 1), "max_bytes");
	check_refused(opts_of(4096, 0), "max_objects");
	check_refused(opts_of(4096, TND_CHANNEL_OBJECTS_MAX + 1), "1048577");
	opts = opts_of(4096, 1);
	opts.place_count = 65;
	check_refused(opts, "65");
	opts.place_count = 0;
	check_refused(opts, "places");
	opts = opts_of(4096, 1);
	opts.max_object_bytes = UINT64_MAX;
	check_refused(opts, "max_object_bytes");
}

static void test_names(void **state)
{
	struct tnd__segment_opts opts = opts_of(4096, 1);
	struct tnd__segments segments;
	char long_name[200], path[64], link[256];
	ssize_t got;

	(void)state;
	memset(long_name, 'x', sizeof(long_name) - 1);
	long_name[sizeof(long_name) - 1] = '\0';
	opts.name = long_name;
	assert_int_equal(tnd__segments_create(&opts, &segments, NULL), 0);
	assert_int_equal(strlen(segments.name), TND_CHANNEL_NAME_MAX - 1);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", segments.data_fd);
	got = readlink(path, link, sizeof(link) - 1);
	assert_true(got > 0);
	link[got] = '\0';
	assert_non_null(strstr(link, "/memfd:tundish.channel.data:xxx"));
	tnd__segments_close(&segments, true, false);
}

/* -- sealed -- */

/* All that a reader could try on what it was given. */
static void check_sealed(const struct tnd__segments *segments, int fd)
{
	unsigned char byte = 0xff, before = segments->arena[0];
	size_t bytes = segments->data_map_bytes;
	int memory;
	void *map;

	assert_int_equal(mprotect(segments->header, bytes, PROT_READ | PROT_WRITE), -1);
	assert_int_equal(errno, EACCES);
	assert_int_equal(madvise(segments->header, 4096, MADV_REMOVE), -1);
	assert_int_equal(pwrite(fd, &byte, 1, 4096), -1);
	assert_int_equal(ftruncate(fd, 4096), -1);
	assert_int_equal(ftruncate(fd, 1 << 30), -1);
	assert_int_equal(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
	assert_int_equal(fallocate(fd, FALLOC_FL_ZERO_RANGE, 0, 4096), -1);
	assert_int_equal(fallocate(fd, 0, 0, 1 << 30), -1);
	map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	assert_ptr_equal(map, MAP_FAILED);
	map = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
	assert_ptr_not_equal(map, MAP_FAILED);
	assert_int_equal(mprotect(map, 4096, PROT_READ | PROT_WRITE), -1);
	munmap(map, 4096);
	assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
	/* As a debugger would: the kernel writes through mappings that are not writable. */
	memory = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
	if (memory >= 0)
		assert_int_equal(pwrite(memory, &byte, 1, (off_t)(uintptr_t)segments->arena), -1);
	close(memory);
	assert_int_equal(segments->arena[0], before);
}

static void test_sealed(void **state)
{
	struct tnd__segments writer, reader;
	struct tnd_error error;
	char path[64];
	int fd;

	(void)state;
	assert_int_equal(create(64 * 1024, 16, &writer, &error), 0);
	assert_int_equal(
		tnd__segments_attach(dup(writer.data_fd), dup(writer.control_fd), &reader, &error),
		0);
	writer.arena[0] = 0x5a;
	check_sealed(&reader, reader.data_fd);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", reader.data_fd);
	fd = open(path, O_RDWR | O_CLOEXEC);
	assert_true(fd >= 0);
	check_sealed(&reader, fd);
	assert_int_equal(open(path, O_RDWR | O_TRUNC | O_CLOEXEC), -1);
	close(fd);
	assert_int_equal(ftruncate(reader.control_fd, 0), -1);
	assert_int_equal(ftruncate(reader.control_fd, 1 << 20), -1);
	assert_int_equal(fcntl(reader.control_fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
	/* The writer itself still writes. */
	writer.arena[0] = 1;
	assert_int_equal(reader.arena[0], 1);
	tnd__segments_close(&reader, false, false);
	tnd__segments_close(&writer, true, false);
}

/* -- children -- */

/* Runs `fn` in a child. Return: its exit status, 256 + a signal. */
static int in_child(int (*fn)(void *arg), void *arg)
{
	int status;
	pid_t pid = fork();

	assert_true(pid >= 0);
	if (pid == 0) {
		alarm(CHILD_SECONDS);
		_exit(fn(arg));
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
}

/* 0: the child has nothing of the data, and a close takes nothing else away. */
static int look_forked(void *arg)
{
	struct tnd__segments *segments = arg;
	unsigned char *at = (unsigned char *)segments->header, seen[1];
	size_t bytes = segments->data_map_bytes;
	unsigned int fds = fd_count();
	void *map;

	for (size_t offset = 0; offset < bytes; offset += 4096)
		if (mincore(at + offset, 4096, seen) == 0 || errno != ENOMEM)
			return 1;
	map = mmap(at, 4096, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	if (map != at)
		return 2;
	at[0] = 42;
	tnd__segments_close(segments, true, true);
	if (at[0] != 42)
		return 3;
	if (map_count("tundish.channel") != 0)
		return 4;
	return fd_count() + 2 == fds ? 0 : 5;
}

static void test_fork(void **state)
{
	struct tnd__segments writer;
	struct tnd_error error;

	(void)state;
	assert_int_equal(create(64 * 1024, 16, &writer, &error), 0);
	assert_int_equal(in_child(look_forked, &writer), 0);
	writer.arena[0] = 1;
	tnd__segments_close(&writer, true, false);
}

static int file_limit(void *arg)
{
	struct rlimit limit = {MIB, MIB};
	struct tnd__segments segments;
	struct tnd_error error;

	(void)arg;
	if (setrlimit(RLIMIT_FSIZE, &limit) < 0)
		return 1;
	if (create(64 * 1024, 16, &segments, &error) != 0)
		return 2;
	tnd__segments_close(&segments, true, false);
	if (create(MIB, 16, &segments, &error) != TND_E_HEADROOM)
		return 3;
	if (!strstr(error.message, "RLIMIT_FSIZE") || !strstr(error.message, " 1048576") ||
	    !strstr(error.message, "1056768"))
		return 4;
	return map_count("tundish.channel") == 0 ? 0 : 5;
}

static void test_file_limit(void **state)
{
	(void)state;
	assert_int_equal(in_child(file_limit, NULL), 0);
}

/* With every number of descriptors that is left: an error, or all of it. */
static int few_descriptors(void *arg)
{
	struct rlimit limit;
	struct tnd__segments segments;
	struct tnd_error error;
	unsigned int used = fd_count();
	int rc = 1;

	(void)arg;
	for (rlim_t left = 0; left < 40; left++) {
		limit.rlim_cur = used + left;
		limit.rlim_max = 4096;
		if (setrlimit(RLIMIT_NOFILE, &limit) < 0)
			return 1;
		rc = create(64 * 1024, 16, &segments, &error);
		if (rc != 0 && (rc != -EMFILE || !strstr(error.message, "EMFILE")))
			if (rc != -EMFILE || !strstr(error.message, "open files"))
				return 2;
		if (rc == 0)
			tnd__segments_close(&segments, true, false);
		else if (left >= 3)
			return 3;
		limit.rlim_cur = 4096;
		if (setrlimit(RLIMIT_NOFILE, &limit) < 0 || fd_count() != used)
			return 4;
	}
	return rc == 0 ? 0 : 5;
}

static void test_few_descriptors(void **state)
{
	(void)state;
	assert_int_equal(in_child(few_descriptors, NULL), 0);
}

/* -- cgroups -- */

static char cgroup[128]; /* "" where none may be made */
static bool cgroup_v1;

static int write_file(const char *name, const char *text)
{
	char path[256];
	int fd, rc;

	snprintf(path, sizeof(path), "%s/%s", cgroup, name);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	rc = write(fd, text, strlen(text)) < 0 ? -errno : 0;
	close(fd);
	return rc;
}

static int set_limit(uint64_t bytes)
{
	char text[32];

	snprintf(text, sizeof(text), "%" PRIu64, bytes);
	return write_file(cgroup_v1 ? "memory.limit_in_bytes" : "memory.max", text);
}

static uint64_t usage(void)
{
	char path[256], text[64] = "";

	snprintf(path, sizeof(path), "%s/%s", cgroup,
		 cgroup_v1 ? "memory.usage_in_bytes" : "memory.current");
	return tnd__read_small(path, text, sizeof(text)) > 0 ? strtoull(text, NULL, 10) : 0;
}

static int make_cgroup(void **state)
{
	(void)state;
	for (int v1 = 1; v1 >= 0; v1--) {
		cgroup_v1 = v1;
		snprintf(cgroup, sizeof(cgroup), "/sys/fs/cgroup%s/tundish-segment-%d",
			 v1 ? "/memory" : "", (int)getpid());
		if (mkdir(cgroup, 0700) == 0 && set_limit(256 * MIB) == 0)
			return 0;
		rmdir(cgroup);
	}
	cgroup[0] = '\0';
	return 0;
}

static int drop_cgroup(void **state)
{
	(void)state;
	if (cgroup[0])
		assert_int_equal(rmdir(cgroup), 0);
	return 0;
}

static void run_in_cgroup(int (*fn)(void *arg), void *arg)
{
	if (!cgroup[0]) {
		print_message("no memory cgroup can be made here\n");
		skip();
	}
	assert_int_equal(in_child(fn, arg), 0);
}

/* 16 MiB go, more than the limit does not, and is said with the cgroup's name. */
static int under_limit(void *arg)
{
	struct tnd__segments segments;
	struct tnd_error error;

	(void)arg;
	if (set_limit(64 * MIB) < 0 || write_file("cgroup.procs", "0") < 0)
		return 1;
	for (int i = 0; i < 3; i++) {
		if (create(16 * MIB, 16, &segments, &error) != 0)
			return 2;
		tnd__segments_close(&segments, true, false);
		if (create(60 * MIB, 16, &segments, &error) != TND_E_HEADROOM)
			return 3;
		if (!strstr(error.message, strrchr(cgroup, '/')) ||
		    !strstr(error.message, "64.00 MiB") || !strstr(error.message, "60.0"))
			return 4;
	}
	return 0;
}

static void test_cgroup(void **state)
{
	(void)state;
	run_in_cgroup(under_limit, NULL);
}

static int under_small_limit(void *arg)
{
	struct tnd__segments segments;
	struct tnd_error error;

	(void)arg;
	if (set_limit(MIB) < 0 || write_file("cgroup.procs", "0") < 0)
		return 1;
	return create(4096, 1, &segments, &error) == TND_E_HEADROOM ? 0 : 2;
}

static void test_small_cgroup(void **state)
{
	(void)state;
	run_in_cgroup(under_small_limit, NULL);
}

/* File cache that fills the cgroup is no reason to refuse. */
static int under_file_cache(void *arg)
{
	static char block[1 << 20];
	struct tnd__segments segments;
	struct tnd_error error;
	FILE *file;
	int rc;

	(void)arg;
	if (set_limit(64 * MIB) < 0 || write_file("cgroup.procs", "0") < 0)
		return 1;
	file = tmpfile();
	for (int i = 0; i < 60; i++)
		if (!file || fwrite(block, sizeof(block), 1, file) != 1)
			return 2;
	if (fflush(file) != 0 || fsync(fileno(file)) < 0)
		return 3;
	if (usage() < 48 * MIB)
		return 4; /* a file system without page cache: this test shows nothing */
	rc = create(32 * MIB, 16, &segments, &error);
	if (rc < 0)
		fprintf(stderr, "%s\n", error.message);
	else
		tnd__segments_close(&segments, true, false);
	fclose(file);
	return rc == 0 ? 0 : 5;
}

static void test_file_cache(void **state)
{
	(void)state;
	run_in_cgroup(under_file_cache, NULL);
}

#ifdef TND_FAILPOINTS
static void *lower_limit(void *arg)
{
	uint64_t begin = usage();

	(void)arg;
	while (usage() < begin + 16 * MIB)
		sched_yield();
	/* Above what is used, below what is still to come. */
	while (set_limit(usage() + 20 * MIB) < 0)
		sched_yield();
	return NULL;
}

/* The limit goes down (as if somebody else took memory) while pages are being taken. */
static int while_limit_falls(void *arg)
{
	struct tnd__segments segments;
	struct tnd_error error;
	pthread_t thread;
	uint64_t before;
	int rc;

	(void)arg;
	if (set_limit(256 * MIB) < 0 || write_file("cgroup.procs", "0") < 0)
		return 1;
	before = usage();
	if (tnd__failpoints_set("mem.fallocate=delay:2") < 0 ||
	    pthread_create(&thread, NULL, lower_limit, NULL) != 0)
		return 2;
	rc = create(128 * MIB, 16, &segments, &error);
	pthread_join(thread, NULL);
	if (rc != TND_E_HEADROOM)
		return 3;
	return usage() < before + 8 * MIB ? 0 : 4;
}

static void test_limit_falls(void **state)
{
	(void)state;
	run_in_cgroup(while_limit_falls, NULL);
}

/* -- faults -- */

static void test_faults(void **state)
{
	static const struct {
		const char *points;
		int code;
	} rows[] = {
		{"channel.memfd=EMFILE@1x1", -EMFILE},    {"channel.memfd=ENFILE@2x1", -ENFILE},
		{"channel.truncate=ENOMEM@1x1", -ENOMEM}, {"channel.truncate=ENOMEM@2x1", -ENOMEM},
		{"mem.fallocate=ENOSPC@1x1", -ENOSPC},    {"mem.fallocate=ENOSPC@3x1", -ENOSPC},
		{"mem.fallocate=ENOMEM@4x1", -ENOMEM},    {"channel.map=ENOMEM", -ENOMEM},
		{"channel.map-data=ENOMEM", -ENOMEM},     {"channel.map-control=ENOMEM", -ENOMEM},
		{"channel.random=ENOSYS", -ENOSYS},       {"channel.seal=EPERM", -EPERM},
	};
	struct tnd__segments segments;
	struct tnd_error error;
	unsigned int fds = fd_count();

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
		assert_int_equal(tnd__failpoints_set(rows[i].points), 0);
		assert_int_equal(create(5 * MIB, 16, &segments, &error), rows[i].code);
		assert_int_equal(error.code, rows[i].code);
		assert_non_null(strstr(error.message, "channel 'test'"));
		assert_int_equal(fd_count(), fds);
		assert_int_equal(map_count("tundish.channel"), 0);
	}
	/* Signals in the middle: all pages come all the same. */
	assert_int_equal(tnd__failpoints_set("mem.fallocate=EINTR@2x15"), 0);
	assert_int_equal(create(5 * MIB, 16, &segments, &error), 0);
	check_whole(segments.data_fd, segments.memory_bytes - TND__CONTROL_BYTES);
	tnd__segments_close(&segments, true, false);
	tnd__failpoints_set(NULL);
}

static void test_attach_faults(void **state)
{
	static const char *const points[] = {"channel.stat=EIO@1x1", "channel.stat=EIO@2x1",
					     "channel.map=ENOMEM", "channel.map-data=ENOMEM",
					     "channel.map-control=ENOMEM"};
	struct tnd__segments writer, reader;
	struct tnd_error error;
	unsigned int fds, maps;

	(void)state;
	assert_int_equal(create(64 * 1024, 16, &writer, &error), 0);
	fds = fd_count();
	maps = map_count("tundish.channel");
	for (size_t i = 0; i < sizeof(points) / sizeof(*points); i++) {
		int code = strstr(points[i], "EIO") ? -EIO : -ENOMEM;

		assert_int_equal(tnd__failpoints_set(points[i]), 0);
		assert_int_equal(tnd__segments_attach(dup(writer.data_fd), dup(writer.control_fd),
						      &reader, &error),
				 code);
		assert_int_equal(error.code, code);
		assert_int_equal(fd_count(), fds);
		assert_int_equal(map_count("tundish.channel"), maps);
	}
	tnd__failpoints_set(NULL);
	tnd__segments_close(&writer, true, false);
}
#endif

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_sizes),
		cmocka_unit_test(test_options),
		cmocka_unit_test(test_names),
		cmocka_unit_test(test_sealed),
		cmocka_unit_test(test_fork),
		cmocka_unit_test(test_file_limit),
		cmocka_unit_test(test_few_descriptors),
		cmocka_unit_test(test_cgroup),
		cmocka_unit_test(test_small_cgroup),
		cmocka_unit_test(test_file_cache),
#ifdef TND_FAILPOINTS
		cmocka_unit_test(test_limit_falls),
		cmocka_unit_test(test_faults),
		cmocka_unit_test(test_attach_faults),
#endif
	};

	return cmocka_run_group_tests(tests, make_cgroup, drop_cgroup);
}
