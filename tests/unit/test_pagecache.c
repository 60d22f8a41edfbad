/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pagecache.c - page cache questions, processor quotas from recorded trees, and the doctor
 *
 * What could break: cachestat's answer misread, a drop that leaves the last page, a quota read from
 * the wrong level or hierarchy, a check that leaves a descriptor or a cached page behind or says
 * "ok" for what was refused. Recorded /proc and /sys/fs/cgroup trees are written to a scratch
 * folder; refusals are injected.
 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include <tundish/doctor.h>

#include "storage/engine.h"
#include "support/fds.h"

static char scratch[] = "/tmp/tnd-test-pagecache.XXXXXX";

static int scratch_make(void **state)
{
	(void)state;
	return mkdtemp(scratch) ? 0 : -1;
}

static int scratch_remove(void **state)
{
	char command[128];

	(void)state;
	snprintf(command, sizeof(command), "rm -rf %s", scratch);
	return system(command);
}

static void put(const char *path, const char *text)
{
	char full[512];
	FILE *file;

	snprintf(full, sizeof(full), "%s/%s", scratch, path);
	for (char *at = full + strlen(scratch) + 1; (at = strchr(at, '/')); at++) {
		*at = '\0';
		mkdir(full, 0755);
		*at = '/';
	}
	file = fopen(full, "w");
	assert_non_null(file);
	fputs(text, file);
	fclose(file);
}

static uint32_t quota(const char *tree)
{
	char full[512];

	snprintf(full, sizeof(full), "%s/%s", scratch, tree);
	return tnd__cpu_quota(full);
}

static void test_quota_v2(void **state)
{
	(void)state;
	put("v2/proc/self/cgroup", "0::/pod/app\n");
	put("v2/proc/self/mountinfo",
	    "22 1 8:1 / / rw - ext4 /dev/vda rw\n"
	    "30 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
	assert_int_equal(quota("v2"), 0);
	put("v2/sys/fs/cgroup/pod/app/cpu.max", "max 100000\n");
	assert_int_equal(quota("v2"), 0);
	put("v2/sys/fs/cgroup/pod/cpu.max", "350000 100000\n");
	assert_int_equal(quota("v2"), 4);
	put("v2/sys/fs/cgroup/pod/app/cpu.max", "20000 100000\n");
	assert_int_equal(quota("v2"), 1);
	put("v2/sys/fs/cgroup/pod/app/cpu.max", "nonsense\n");
	assert_int_equal(quota("v2"), 4);
}

static void test_quota_v1(void **state)
{
	(void)state;
	put("v1/proc/self/cgroup",
	    "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n3:cpuset:/\n0::/\n");
	put("v1/proc/self/mountinfo",
	    "31 25 0:27 /docker/x /cg/cpuset ro - cgroup cgroup rw,cpuset\n"
	    "32 25 0:28 /docker/x /cg/cpu,cpuacct ro,nosuid - cgroup cgroup rw,cpu,cpuacct\n"
	    "broken line\n33 - cgroup\n");
	put("v1/cg/cpuset/cpu.cfs_quota_us", "100000\n");
	put("v1/cg/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
	put("v1/cg/cpu,cpuacct/cpu.cfs_period_us", "50000\n");
	assert_int_equal(quota("v1"), 0);
	put("v1/cg/cpu,cpuacct/cpu.cfs_quota_us", "125000\n");
	assert_int_equal(quota("v1"), 3);
}

/* The root of a namespace, no /proc at all, and tables that are not tables. */
static void test_quota_odd(void **state)
{
	(void)state;
	assert_int_equal(quota("nothing"), 0);
	put("ns/proc/self/cgroup", "0::/../..\nx\n::\n:::\n");
	put("ns/proc/self/mountinfo",
	    "30 22 0:26 /sub /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n - \n1 2 3 - a b\n");
	put("ns/sys/fs/cgroup/cpu.max", "200000 100000\n");
	assert_int_equal(quota("ns"), 2);
}

/* Of several mounts the one that shows most of our path, escaped; levels that are not there. */
static void test_quota_mounts(void **state)
{
	(void)state;
	put("many/proc/self/cgroup", "0::/pod/..app/gone\n");
	put("many/proc/self/mountinfo",
	    "30 22 0:26 /other /mnt/a rw - cgroup2 cgroup2 rw\n"
	    "31 22 0:26 /po /mnt/b rw - cgroup2 cgroup2 rw\n"
	    "32 22 0:26 / /mnt/with\\040space rw - cgroup2 cgroup2 rw\n");
	put("many/mnt/a/cpu.max", "100000 100000\n");
	put("many/mnt/b/cpu.max", "100000 100000\n");
	put("many/mnt/with space/cpu.max", "900000 100000\n");
	assert_int_equal(quota("many"), 9);
	put("many/mnt/with space/pod/..app/cpu.max", "500000 100000\n");
	assert_int_equal(quota("many"), 5);
}

static void test_cachestat_and_drop(void **state)
{
	unsigned char bytes[10000] = {1};
	char path[64];
	int64_t cached;
	int fd;

	(void)state;
	snprintf(path, sizeof(path), "%s/file", scratch);
	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	assert_true(fd >= 0);
	assert_int_equal(write(fd, bytes, sizeof(bytes)), sizeof(bytes));
	fsync(fd);
	cached = tnd__pagecache_bytes(fd, 0, sizeof(bytes));
	if (cached < 0)
		skip();
	assert_int_equal(cached, 3 * 4096);
	assert_int_equal(tnd__pagecache_bytes(fd, 0, 0), 0);
	tnd__pagecache_drop(fd, 9000, 1000);
	assert_int_equal(tnd__pagecache_bytes(fd, 0, sizeof(bytes)), 2 * 4096);
	tnd__pagecache_drop(fd, 0, sizeof(bytes));
	assert_int_equal(tnd__pagecache_bytes(fd, 0, sizeof(bytes)), 0);
	assert_int_equal(tnd__pagecache_bytes(-1, 0, 10), -EBADF);
	close(fd);
}

/* -- doctor -- */

struct findings {
	int count, bad;
	char names[32][32];
	int ok[32];
};

static void on_check(void *arg, const struct tnd_check *check)
{
	struct findings *findings = arg;

	assert_true(findings->count < 32);
	assert_true(check->value[0] != '\0');
	assert_int_equal(check->ok != 0, check->advice[0] == '\0');
	snprintf(findings->names[findings->count], 32, "%s", check->name);
	findings->ok[findings->count++] = check->ok;
	findings->bad += !check->ok;
}

static int finding(const struct findings *findings, const char *name)
{
	for (int i = 0; i < findings->count; i++)
		if (strcmp(findings->names[i], name) == 0)
			return findings->ok[i];
	fail_msg("no check called %s", name);
	return -1;
}

static void test_doctor(void **state)
{
	static const char *const names[] = {
		"io_uring",      "memlock",   "huge_pages",  "shmem_huge_pages", "memory_available",
		"cgroup_memory", "dev_shm",   "processors",  "open_files",       "cachestat",
		"madv_collapse", "memfd",     "populate",    "kernel",           "direct_io",
		"nowait",        "dontcache", "file_system", "cachestat_file"};
	struct findings findings = {0};
	struct tnd_error error = {0};
	unsigned int before = fd_count();
	int fd;
	char path[64];

	(void)state;
	assert_int_equal(tnd_doctor(scratch, on_check, &findings, &error), -ENOENT);
	assert_non_null(strstr(error.message, "*.safetensors"));
	put("model.safetensors", "some bytes");
	snprintf(path, sizeof(path), "%s/model.safetensors", scratch);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	fsync(fd);
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	memset(&findings, 0, sizeof(findings));
	assert_int_equal(tnd_doctor(scratch, on_check, &findings, &error), findings.bad);
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		finding(&findings, names[i]);
	assert_int_equal(findings.count, sizeof(names) / sizeof(names[0]));
	if (finding(&findings, "cachestat"))
		assert_int_equal(tnd__pagecache_bytes(fd, 0, 4096), 0);
	close(fd);
	memset(&findings, 0, sizeof(findings));
	assert_int_equal(tnd_doctor("/dev/null", on_check, &findings, &error), -EINVAL);
	assert_int_equal(tnd_doctor("/no/such/path", on_check, &findings, &error), -ENOENT);
	assert_int_equal(fd_count(), before);
}

static void test_doctor_sees_refusals(void **state)
{
#ifdef TND_FAILPOINTS
	struct findings findings = {0};
	char path[64];

	(void)state;
	put("other.safetensors", "some bytes");
	snprintf(path, sizeof(path), "%s/other.safetensors", scratch);
	assert_int_equal(
		tnd__failpoints_set("storage.uring.setup=EPERM,storage.cachestat=EPERM,"
				    "storage.nowait=EOPNOTSUPP,storage.open.direct=EINVAL"),
		0);
	assert_true(tnd_doctor(path, on_check, &findings, NULL) >= 5);
	tnd__failpoints_set(NULL);
	assert_int_equal(finding(&findings, "io_uring"), 0);
	assert_int_equal(finding(&findings, "cachestat"), 0);
	assert_int_equal(finding(&findings, "cachestat_file"), 0);
	assert_int_equal(finding(&findings, "nowait"), 0);
	assert_int_equal(finding(&findings, "direct_io"), 0);
#else
	(void)state;
	skip();
#endif
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_quota_v2),
		cmocka_unit_test(test_quota_v1),
		cmocka_unit_test(test_quota_odd),
		cmocka_unit_test(test_quota_mounts),
		cmocka_unit_test(test_cachestat_and_drop),
		cmocka_unit_test(test_doctor),
		cmocka_unit_test(test_doctor_sees_refusals),
	};

	return cmocka_run_group_tests(tests, scratch_make, scratch_remove);
}
