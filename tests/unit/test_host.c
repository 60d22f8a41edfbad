/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_host.c - what could break: a limit that binds is missed (the load is killed) or one that does not is believed; reclaimable page
 * cache is taken for used memory; a container's view of the hierarchy leads to the wrong directory; an absent or broken file
 * crashes or limits; a key of the memlog record is missing or out of place. Shown on trees of /proc and cgroup files that each
 * case writes into a temporary directory, and on a real cgroup where one may be made.
 */
#include <errno.h>
#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "memory/memory.h"

static char root[64];

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *where)
{
	(void)info, (void)kind, (void)where;
	return remove(path);
}

static int set_up(void **state)
{
	(void)state;
	strcpy(root, "/tmp/tundish-host-XXXXXX");
	return mkdtemp(root) ? 0 : -1;
}

static int tear_down(void **state)
{
	(void)state;
	return nftw(root, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* Writes a file of the tree, and the directories above it. */
static void put(const char *path, const char *text)
{
	char full[512];
	FILE *file;

	snprintf(full, sizeof(full), "%s%s", root, path);
	for (char *at = full + strlen(root) + 1; (at = strchr(at, '/')); at++) {
		*at = '\0';
		mkdir(full, 0700);
		*at = '/';
	}
	file = fopen(full, "we");
	assert_non_null(file);
	assert_true(fputs(text, file) >= 0);
	assert_int_equal(fclose(file), 0);
}

static void put_in(const char *directory, const char *name, const char *text)
{
	char path[256];

	snprintf(path, sizeof(path), "%s/%s", directory, name);
	put(path, text);
}

#define MEMINFO                                                                                   \
	"MemTotal:       24684096 kB\nMemFree:        20000000 kB\nMemAvailable:   16000000 kB\n" \
	"Buffers:            2264 kB\nCached:           312048 kB\nSwapCached:            7 kB\n" \
	"AnonPages:         22372 kB\nMapped:            10804 kB\nShmem:              8788 kB\n" \
	"Slab:              93104 kB\nKernelStack:        1436 kB\nPageTables:         1640 kB\n" \
	"Percpu:              712 kB\n"
#define AVAILABLE (UINT64_C(16000000) * 1024)

static void put_basics(const char *cgroup, const char *mountinfo)
{
	put("/proc/meminfo", MEMINFO);
	put("/proc/self/status", "Name:\tx\nRssAnon:\t     100 kB\nRssFile:\t      20 kB\n"
				 "RssShmem:\t       3 kB\n");
	put("/proc/self/cgroup", cgroup);
	put("/proc/self/mountinfo", mountinfo);
}

static void put_v2(const char *directory, const char *max, const char *high, const char *current,
		   const char *stat)
{
	put_in(directory, "memory.max", max);
	if (high)
		put_in(directory, "memory.high", high);
	put_in(directory, "memory.current", current);
	put_in(directory, "memory.stat", stat);
}

static void put_v1(const char *directory, const char *limit, const char *usage, const char *stat)
{
	put_in(directory, "memory.limit_in_bytes", limit);
	put_in(directory, "memory.usage_in_bytes", usage);
	put_in(directory, "memory.stat", stat);
}

static struct tnd_host_memory look(void)
{
	struct tnd_host_memory memory = {.struct_bytes = sizeof(memory)};

	assert_int_equal(tnd__host_memory_at(root, &memory), 0);
	return memory;
}

static void expect(uint64_t available, uint64_t limit, const char *limited_by)
{
	struct tnd_host_memory memory = look();

	assert_int_equal(memory.available, available);
	assert_int_equal(memory.cgroup_limit, limit);
	assert_string_equal(memory.limited_by, limited_by);
}

#define V2_MOUNT "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
#define V1_MOUNT                                                                               \
	"31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755\n"                           \
	"32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n" \
	"35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:10 - cgroup cgroup rw,memory\n"
#define V1_NONE "9223372036854771712\n"

static void test_meminfo(void **state)
{
	struct tnd_host_memory memory;

	(void)state;
	put_basics("", "");
	memory = look();
	assert_int_equal(memory.mem_total, UINT64_C(24684096) * 1024);
	assert_int_equal(memory.cached, UINT64_C(312048) * 1024); /* not SwapCached */
	assert_int_equal(memory.percpu, UINT64_C(712) * 1024);
	assert_int_equal(memory.sec_page_tables, TND_HOST_UNKNOWN);
	assert_int_equal(memory.rss_bytes, 123 * 1024);
	assert_int_equal(memory.rss_private_bytes, 103 * 1024);
	expect(AVAILABLE, TND_HOST_UNKNOWN, "MemAvailable");
}

static void test_missing(void **state)
{
	struct tnd_host_memory memory = {.struct_bytes = sizeof(memory)};

	(void)state;
	assert_int_equal(tnd__host_memory_at(root, &memory), -ENOENT);
	put("/proc/meminfo", "MemTotal: lots\nMemFree: 99999999999999999999999 kB\nMemAvailable:");
	assert_int_equal(tnd__host_memory_at(root, &memory), 0);
	assert_int_equal(memory.mem_total, TND_HOST_UNKNOWN);
	assert_int_equal(memory.mem_free, TND_HOST_UNKNOWN);
	assert_int_equal(memory.available, TND_HOST_UNKNOWN);
	assert_int_equal(memory.rss_bytes, TND_HOST_UNKNOWN);
	memory.struct_bytes = 8;
	assert_int_equal(tnd__host_memory_at(root, &memory), TND_E_INVALID);
}

static void test_v2_nested(void **state)
{
	(void)state;
	put_basics("0::/pod/box\n", V2_MOUNT);
	put_v2("/sys/fs/cgroup/pod/box", "max\n", "max\n", "1000000\n", "anon 5\n");
	/* The parent binds: 4 GB, of which 3 GB are used, 2 GB of that by page cache that can go. */
	put_v2("/sys/fs/cgroup/pod", "4000000000\n", "max\n", "3000000000\n",
	       "anon 900000000\ninactive_file 1500000000\nactive_file 500000000\n"
	       "inactive_anon 77777\n");
	expect(3000000000, 4000000000, "/sys/fs/cgroup/pod");
	/* The same limit again below: the outer one is to blame. */
	put_v2("/sys/fs/cgroup/pod/box", "3000000000\n", NULL, "0\n", "");
	expect(3000000000, 3000000000, "/sys/fs/cgroup/pod");
	/* Closer to us there is less. */
	put_v2("/sys/fs/cgroup/pod/box", "2000000000\n", NULL, "1500000000\n",
	       "inactive_file 100\n");
	expect(500000100, 2000000000, "/sys/fs/cgroup/pod/box");
	/* high throttles long before max kills. */
	put_in("/sys/fs/cgroup/pod/box", "memory.high", "1600000000\n");
	expect(100000100, 1600000000, "/sys/fs/cgroup/pod/box");
	/* Used up, and more: nothing, not a wrap. */
	put_in("/sys/fs/cgroup/pod/box", "memory.current", "1700000000\n");
	expect(0, 1600000000, "/sys/fs/cgroup/pod/box");
}

/* More page cache than usage (the kernel's figures are not of one moment): never more than the limit. */
static void test_cache_above_usage(void **state)
{
	(void)state;
	put_basics("0::/a\n", V2_MOUNT);
	put_v2("/sys/fs/cgroup/a", "1000\n", NULL, "10\n", "active_file 500\n");
	expect(1000, 1000, "/sys/fs/cgroup/a");
}

static void test_limit_above_machine(void **state)
{
	(void)state;
	put_basics("0::/a\n", V2_MOUNT);
	put_v2("/sys/fs/cgroup/a", "90000000000\n", "max\n", "10\n", "");
	expect(AVAILABLE, 90000000000, "MemAvailable");
}

static void test_v1(void **state)
{
	(void)state;
	put_basics("11:cpu,cpuacct:/other\n4:memory:/a/b\n0::/\n", V1_MOUNT);
	put_v1("/sys/fs/cgroup/memory", V1_NONE, "1\n", "total_cache 1\n");
	put_v1("/sys/fs/cgroup/memory/a", "5000000000\n", "4000000000\n",
	       "inactive_file 7\ntotal_inactive_file 200000000\ntotal_active_file 300000000\n");
	put_v1("/sys/fs/cgroup/memory/a/b", V1_NONE, "1000\n", "total_inactive_file 0\n");
	expect(1500000000, 5000000000, "/sys/fs/cgroup/memory/a");
}

/* A container that sees only its own group, bound by one above it. */
static void test_v1_hidden_parent(void **state)
{
	(void)state;
	put_basics("4:memory:/docker/77\n",
		   "35 31 0:32 /docker/77 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
	put_v1("/sys/fs/cgroup/memory", V1_NONE, "100\n",
	       "hierarchical_memory_limit 3000\ntotal_inactive_file 50\n");
	expect(2950, 3000, "/sys/fs/cgroup/memory");
}

/* /proc names a group below the mount's root. */
static void test_container_root(void **state)
{
	(void)state;
	put_basics("0::/docker/77/app\n",
		   "30 23 0:26 /docker/77 /sys/fs/cgroup rw - cgroup2 cgroup rw\n");
	put_v2("/sys/fs/cgroup/app", "2000\n", NULL, "500\n", "");
	put_v2("/sys/fs/cgroup", "3000\n", NULL, "2500\n", "");
	expect(500, 2000, "/sys/fs/cgroup");
}

/* What /proc names is not there: the nearest parent that is, at the latest the mount's root. */
static void test_path_not_there(void **state)
{
	static const char *const paths[] = {"0::/process/123\n", "0::/../../x\n", "0::/\n", "",
					    "0::relative\n"};

	(void)state;
	for (size_t i = 0; i < sizeof(paths) / sizeof(*paths); i++) {
		put_basics(paths[i], V2_MOUNT);
		put_v2("/sys/fs/cgroup", "3000\n", NULL, "2500\n", "");
		expect(500, 3000, "/sys/fs/cgroup");
	}
	put_basics("0::/docker/9/app\n", "30 23 0:26 /docker/8 /cg rw - cgroup2 cgroup rw\n");
	put_v2("/cg", "7000\n", NULL, "100\n", "");
	expect(6900, 7000, "/cg");
}

/* Both hierarchies mounted, the controller in either. */
static void test_hybrid(void **state)
{
	(void)state;
	put_basics("4:memory:/a\n0::/b\n",
		   V1_MOUNT "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
	put("/sys/fs/cgroup/unified/b/cgroup.procs", "1\n");
	put_v1("/sys/fs/cgroup/memory/a", "6000\n", "1000\n", "");
	expect(5000, 6000, "/sys/fs/cgroup/memory/a");
	put_v2("/sys/fs/cgroup/unified/b", "4000\n", NULL, "1000\n", "");
	expect(3000, 4000, "/sys/fs/cgroup/unified/b");
}

/* Several mounts of one hierarchy: the one that shows us and the most above us. */
static void test_several_mounts(void **state)
{
	(void)state;
	put_basics("0::/pod/box\n", "30 23 0:26 /other /mnt/a rw - cgroup2 cgroup rw\n"
				    "31 23 0:26 /pod/box /mnt/b rw - cgroup2 cgroup rw\n"
				    "32 23 0:26 / /mnt/with\\040space rw - cgroup2 cgroup rw\n");
	put_v2("/mnt/with space/pod/box", "9000\n", NULL, "0\n", "");
	put_v2("/mnt/with space/pod", "8000\n", NULL, "1000\n", "");
	put_v2("/mnt/a", "1\n", NULL, "1\n", "");
	expect(7000, 8000, "/mnt/with space/pod");
}

static void test_broken(void **state)
{
	char longest[9000];

	(void)state;
	memset(longest, 'x', sizeof(longest) - 1);
	longest[0] = '/';
	longest[sizeof(longest) - 1] = '\0';
	put_basics(":::\n\n0\n4:memory\nmemory:memory:memory\n0::/a\n",
		   "\n - \n30 - cgroup2\n1 2 3 - cgroup2 x y\n30 23 0:26 / /cg rw - cgroup2 c "
		   "rw\n - cgroup cgroup rw,memory\n");
	put_v2("/cg/a", "12monkeys\n", "", "-5\n", "inactive_file\n");
	expect(AVAILABLE, TND_HOST_UNKNOWN, "MemAvailable");
	put_v2("/cg/a", "1000\n", "", "200\n", "inactive_file\nactive_file x\n");
	expect(800, 1000, "/cg/a");
	put("/proc/self/cgroup", longest);
	expect(AVAILABLE, TND_HOST_UNKNOWN, "MemAvailable");
}

/* -- the real machine -- */

static void test_here(void **state)
{
	struct tnd_host_memory memory = {.struct_bytes = sizeof(memory)};
	uint64_t whole, share;

	(void)state;
	assert_int_equal(tnd_host_memory(&memory), 0);
	assert_true(memory.mem_total > TND__MIB(64) && memory.mem_total != TND_HOST_UNKNOWN);
	assert_true(memory.available <= memory.mem_total);
	assert_true(memory.rss_bytes >= memory.rss_private_bytes);
	assert_int_equal(tnd_budget_default(0, &whole), 0);
	assert_true(whole >= TND__MIB(1) && whole <= TND__MIB(6144));
	assert_int_equal(tnd_budget_default(1000000, &share), 0);
	assert_int_equal(share, TND__MIB(1));
}

#define REAL "/sys/fs/cgroup/memory/tundish-test"

static bool write_text(const char *path, const char *text)
{
	FILE *file = fopen(path, "we");
	bool ok = file && fputs(text, file) >= 0;

	return file ? fclose(file) == 0 && ok : false;
}

/* In the child: moves itself in and looks. Exit status: 0, or the number of what is wrong. */
static int look_inside(void)
{
	struct tnd_host_memory memory = {.struct_bytes = sizeof(memory)};
	uint64_t bytes;

	if (!write_text(REAL "/cgroup.procs", "0"))
		return 2;
	if (tnd_host_memory(&memory) < 0)
		return 3;
	if (strcmp(memory.limited_by, REAL) != 0)
		return 4;
	if (memory.cgroup_limit != TND__MIB(256))
		return 5;
	if (memory.available > TND__MIB(256) || memory.available < TND__MIB(200))
		return 6;
	if (tnd_budget_default(0, &bytes) < 0 || bytes > TND__MIB(64) || bytes < TND__MIB(50))
		return 7;
	return 0;
}

static void test_real_cgroup(void **state)
{
	int status;
	pid_t child;

	(void)state;
	if (mkdir(REAL, 0700) < 0 && errno != EEXIST) {
		print_message("no memory cgroup (v1) can be made here: %s\n", strerror(errno));
		skip();
	}
	if (!write_text(REAL "/memory.limit_in_bytes", "268435456")) {
		rmdir(REAL);
		print_message("the memory cgroup cannot be limited here\n");
		skip();
	}
	fflush(NULL);
	child = fork();
	assert_true(child >= 0);
	if (child == 0)
		_exit(look_inside());
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(rmdir(REAL), 0);
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), 0);
}

/* -- memlog -- */

static void test_memlog(void **state)
{
	static const char *const keys[] = {
		"phase",
		"read_bytes",
		"kept_bytes",
		"storage_bytes",
		"shards_opened",
		"shards_skipped",
		"tensors",
		"sliced",
		"buffers",
		"buffer_bytes",
		"slabs",
		"slab_mb",
		"slab_peak_live",
		"slab_peak_bytes",
		"slabs_alive_after_release",
		"live_maps",
		"live_map_bytes",
		"rss_bytes",
		"MemTotal",
		"MemFree",
		"MemAvailable",
		"Buffers",
		"Cached",
		"AnonPages",
		"Shmem",
		"Mapped",
		"Slab",
		"KernelStack",
		"PageTables",
		"SecPageTables",
		"Percpu",
		"device_total_bytes",
		"device_free_bytes",
		"device_reserved_bytes",
		"device_procs",
		"torch_host_alloc",
		"unaccounted_bytes",
		"lost_since_start_bytes",
	};
	struct tnd__memlog log = {.phase = "target",
				  .read_bytes = 11,
				  .slab_bytes = TND__MIB(256),
				  .live_map_bytes = 17,
				  .start_available = AVAILABLE + 5};
	char *text, *at, expected[128];

	(void)state;
	put_basics("", "");
	log.host = look();
	assert_int_equal(tnd__memlog_json(&log, &text), 0);
	assert_null(strchr(text, '\n'));
	at = text;
	for (size_t i = 0; i < sizeof(keys) / sizeof(*keys); i++) {
		snprintf(expected, sizeof(expected), "%s\"%s\": ", i ? ", " : "{", keys[i]);
		/* The next key follows after one plain value. */
		if (i)
			at += strcspn(at, ",}");
		assert_memory_equal(at, expected, strlen(expected));
		at += strlen(expected);
	}
	assert_string_equal(at, "5}");
	assert_non_null(strstr(text, "\"phase\": \"target\", \"read_bytes\": 11,"));
	assert_non_null(strstr(text, "\"slab_mb\": 256,"));
	assert_non_null(strstr(text, "\"SecPageTables\": null,"));
	snprintf(expected, sizeof(expected), "\"unaccounted_bytes\": %lld,",
		 1024LL *
			 (24684096 - 20000000 - 2264 - 312048 - 22372 - 93104 - 1436 - 1640 - 712));
	assert_non_null(strstr(text, expected));
	free(text);

	log.start_available = AVAILABLE - 5; /* less is lost than nothing: more is free */
	assert_int_equal(tnd__memlog_json(&log, &text), 0);
	assert_non_null(strstr(text, "\"lost_since_start_bytes\": -5}"));
	free(text);
	log.start_available = TND_HOST_UNKNOWN;
	assert_int_equal(tnd__memlog_json(&log, &text), 0);
	assert_non_null(strstr(text, "\"lost_since_start_bytes\": null}"));
	free(text);
#ifdef TND_FAILPOINTS
	tnd__failpoints_set("mem.alloc=ENOMEM");
	assert_int_equal(tnd__memlog_json(&log, &text), -ENOMEM);
	tnd__failpoints_set(NULL);
#endif
}

#define IN_TREE(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

int main(void)
{
	const struct CMUnitTest tests[] = {
		IN_TREE(test_meminfo),
		IN_TREE(test_missing),
		IN_TREE(test_v2_nested),
		IN_TREE(test_cache_above_usage),
		IN_TREE(test_limit_above_machine),
		IN_TREE(test_v1),
		IN_TREE(test_v1_hidden_parent),
		IN_TREE(test_container_root),
		IN_TREE(test_path_not_there),
		IN_TREE(test_hybrid),
		IN_TREE(test_several_mounts),
		IN_TREE(test_broken),
		cmocka_unit_test(test_here),
		cmocka_unit_test(test_real_cgroup),
		IN_TREE(test_memlog),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
