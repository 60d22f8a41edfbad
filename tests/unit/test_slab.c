/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_slab.c - what could break: memory under a holder is reused; a mapping is charged less, or longer, than it lives; idle slabs
 * starve another user of the budget; a lease, a name, a mapping or a descriptor is left behind; an escape is reported twice or with names that nobody holds. Shown by the pool's and the budget's
 * figures, by /proc/self/maps and /proc/self/fd, and by patterns in the memory.
 */
#include <sys/resource.h>
#include <unistd.h>

#include "slabs.h"
#include "support/fds.h"

/* -- sizes, reuse, counts -- */

static void test_arguments(void **state)
{
	struct tnd_slab_pool_opts opts = {.struct_bytes = sizeof(opts), .flags = 4};
	struct tnd_charge_opts bad = {.struct_bytes = sizeof(bad), .flags = 64};
	struct tnd_slab_stats stats = {.struct_bytes = 1};
	struct tnd_slab_pool *pool;
	struct tnd_slab *slab;

	(void)state;
	assert_int_equal(tnd_slab_pool_create(NULL, &pool), TND_E_INVALID);
	assert_int_equal(tnd_slab_pool_create(&opts, &pool), TND_E_INVALID);
	opts.flags = 0;
	opts.numa = -3;
	opts.numa_given = 1;
	assert_int_equal(tnd_slab_pool_create(&opts, &pool), TND_E_INVALID);
	opts.numa = TND_NUMA_INTERLEAVE;
	opts.struct_bytes = 8;
	assert_int_equal(tnd_slab_pool_create(&opts, &pool), TND_E_INVALID);
	pool = pool_of(NULL, 0, 0);
	assert_int_equal(tnd_slab_acquire(pool, 0, NULL, NULL, &slab), TND_E_INVALID);
	assert_int_equal(tnd_slab_acquire(pool, 1, NULL, &bad, &slab), TND_E_INVALID);
	assert_int_equal(tnd_slab_acquire(pool, UINT64_MAX, NULL, NULL, &slab), -ENOMEM);
	assert_int_equal(tnd_slab_acquire(pool, UINT64_MAX / 5, NULL, NULL, &slab), -ENOMEM);
	assert_int_equal(tnd_slab_pool_stats(pool, &stats), TND_E_INVALID);
	tnd_slab_pool_close(pool);
	tnd_slab_pool_close(NULL);
	tnd_slab_release(NULL);
	tnd_lease_release(NULL);
}

static void test_reuse(void **state)
{
	struct tnd_budget *budget = budget_of(16 * MIB);
	struct tnd_slab_pool *pool = pool_of(budget, MIB - 100, 0);
	struct tnd_slab *slab, *other;
	void *data;

	(void)state;
	slab = acquire(pool, 5);
	data = tnd_slab_data(slab);
	assert_int_equal((uintptr_t)data % 4096, 0);
	assert_int_equal(tnd_slab_bytes(slab), 5);
	assert_int_equal(tnd_slab_fd(slab), -1);
	assert_int_equal(budget_stats(budget).charged_bytes, MIB);
	tnd_slab_release(slab);
	assert_int_equal(budget_stats(budget).charged_bytes, MIB);
	slab = acquire(pool, MIB - 100);
	assert_ptr_equal(tnd_slab_data(slab), data);
	/* A larger one never takes, and never becomes, a standard slab, though both are 1 MiB here. */
	other = acquire(pool, MIB - 50);
	assert_int_equal(budget_stats(budget).charged_bytes, 2 * MIB);
	tnd_slab_release(other);
	other = acquire(pool, 100);
	assert_int_equal(stats_of(pool).allocations, 3);
	assert_int_equal(stats_of(pool).mapped_bytes, 3 * MIB);
	assert_int_equal(stats_of(pool).buffers, 4);
	assert_int_equal(stats_of(pool).buffer_bytes, 5 + MIB - 100 + MIB - 50 + 100);
	assert_int_equal(stats_of(pool).live, 2);
	assert_int_equal(stats_of(pool).peak_live, 2);
	assert_int_equal(stats_of(pool).peak_bytes, 2 * MIB);
	tnd_slab_release(slab);
	tnd_slab_pool_reset_peaks(pool);
	assert_int_equal(stats_of(pool).peak_live, 1);
	tnd_slab_release(other);
	tnd_slab_pool_trim(pool);
	assert_int_equal(stats_of(pool).mapped_bytes, 0);
	assert_int_equal(budget_stats(budget).charged_bytes, 0);
	assert_false(mapped(data));
	tnd_slab_pool_close(pool);
	tnd_budget_close(budget);
}

/* Without a slab size every request has its own; an idle one serves if it is at most a quarter too large. */
static void test_own_sizes(void **state)
{
	struct tnd_slab_pool *pool = pool_of(NULL, 0, 0);
	struct tnd_slab *slab = acquire(pool, 40960);

	(void)state;
	tnd_slab_release(slab);
	slab = acquire(pool, 40961); /* does not fit */
	assert_int_equal(stats_of(pool).allocations, 2);
	tnd_slab_release(slab);
	slab = acquire(pool, 20000); /* too large by more than a quarter */
	assert_int_equal(stats_of(pool).allocations, 3);
	tnd_slab_release(slab);
	slab = acquire(pool, 33000); /* 40960 <= 33000 * 1.25; the other of 45056 is not */
	assert_int_equal(stats_of(pool).allocations, 3);
	tnd_slab_release(slab);
	slab = acquire(pool, 1); /* one page, exactly */
	assert_int_equal(stats_of(pool).allocations, 4);
	tnd_slab_release(slab);
	slab = acquire(pool, 2);
	assert_int_equal(stats_of(pool).allocations, 4);
	tnd_slab_release(slab);
	tnd_slab_pool_close(pool);
}

/* The one released last comes first: its pages are warm. */
static void test_newest_first(void **state)
{
	struct tnd_slab_pool *pool = pool_of(NULL, MIB, 0);
	struct tnd_slab *a = acquire(pool, 1), *b = acquire(pool, 1);
	void *data = tnd_slab_data(a);

	(void)state;
	tnd_slab_release(b);
	tnd_slab_release(a);
	a = acquire(pool, 1);
	assert_ptr_equal(tnd_slab_data(a), data);
	tnd_slab_release(a);
	tnd_slab_pool_close(pool);
}

/* As many idle slabs go as are needed for a larger one, and not one more. */
static void test_gives_up_idle(void **state)
{
	struct tnd_budget *budget = budget_of(10 * MIB);
	struct tnd_slab_pool *pool = pool_of(budget, MIB, 0);
	struct tnd_slab *slabs[6], *large, *lone;
	struct tnd_charge_opts opts = patient(TND_CHARGE_F_TRY);

	(void)state;
	for (int i = 0; i < 6; i++)
		slabs[i] = acquire(pool, MIB);
	for (int i = 0; i < 6; i++)
		tnd_slab_release(slabs[i]);
	large = acquire(pool, 3 * MIB); /* beside them */
	assert_int_equal(stats_of(pool).mapped_bytes, 9 * MIB);
	lone = acquire(pool, 2 * MIB + 1); /* lacks a bit more than 1 MiB */
	assert_int_equal(budget_stats(budget).charged_bytes, 3 * MIB + 2 * MIB + 4096 + 4 * MIB);
	tnd_slab_release(lone); /* now idle beside 4 small ones: one large one is fewer */
	lone = acquire(pool, 3 * MIB);
	assert_int_equal(stats_of(pool).mapped_bytes, 10 * MIB);
	tnd_slab_release(lone);
	assert_int_equal(tnd_slab_acquire(pool, 8 * MIB, NULL, &opts, &lone), -EAGAIN);
	assert_int_equal(stats_of(pool).mapped_bytes, 3 * MIB); /* all idle ones tried */
	opts.flags = TND_CHARGE_F_OVERRUN;
	assert_int_equal(tnd_slab_acquire(pool, 8 * MIB, NULL, &opts, &lone), 0);
	assert_int_equal(budget_stats(budget).overrun_bytes, MIB);
	tnd_slab_release(lone);
	tnd_slab_release(large);
	assert_int_equal(tnd_slab_acquire(pool, 11 * MIB, NULL, NULL, &lone), TND_E_BUDGET);
	opts.flags = TND_CHARGE_F_ALONE; /* all idle ones must go for it */
	assert_int_equal(tnd_slab_acquire(pool, 11 * MIB, NULL, &opts, &lone), 0);
	assert_int_equal(budget_stats(budget).charged_bytes, 11 * MIB);
	tnd_slab_release(lone);
	tnd_slab_pool_close(pool);
	assert_int_equal(budget_stats(budget).charged_bytes, 0);
	tnd_budget_close(budget);
}

/* Idle memory of a pool serves other users of the budget, and other pools. */
static void test_idle_serves_others(void **state)
{
	struct tnd_budget *budget = budget_of(4 * MIB);
	struct tnd_slab_pool *pool = pool_of(budget, MIB, 0), *other = pool_of(budget, 4 * MIB, 0);
	struct tnd_charge_opts opts = patient(0);
	struct tnd_slab *slabs[4];

	(void)state;
	for (int i = 0; i < 4; i++)
		slabs[i] = acquire(pool, MIB);
	for (int i = 0; i < 4; i++)
		tnd_slab_release(slabs[i]);
	assert_int_equal(tnd_budget_charge(budget, MIB / 2, &opts), 0);
	assert_int_equal(stats_of(pool).mapped_bytes, 3 * MIB);
	opts.flags = TND_CHARGE_F_TRY;
	assert_int_equal(tnd_budget_charge_key(budget, 1, MIB, &opts), 0);
	assert_int_equal(stats_of(pool).mapped_bytes, 2 * MIB);
	tnd_budget_refund(budget, MIB / 2);
	assert_int_equal(tnd_budget_refund_key(budget, 1), 0);
	slabs[0] = acquire(other, 1);
	assert_int_equal(stats_of(pool).mapped_bytes, 0);
	assert_int_equal(budget_stats(budget).waits, 0);
	tnd_slab_release(slabs[0]);
	tnd_slab_pool_close(pool);
	tnd_slab_pool_close(other);
	tnd_budget_close(budget);
}

/* -- mappings -- */

static void check_alignment(uint32_t flags)
{
	static const uint64_t sizes[] = {1,         4096,          100000,     TND__HUGE - 1,
					 TND__HUGE, TND__HUGE + 1, 5 * MIB + 7};
	struct tnd_slab_pool *pool = pool_of(NULL, 0, flags);

	for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
		struct tnd_slab *slab = acquire(pool, sizes[i]);
		uint64_t whole = tnd__round_up(sizes[i], TND__PAGE);
		unsigned char *data = tnd_slab_data(slab);

		assert_int_equal((uintptr_t)data % (whole >= TND__HUGE ? TND__HUGE : TND__PAGE), 0);
		assert_int_equal(stats_of(pool).live_bytes, whole);
		memset(data, 0xa5, whole);
		assert_int_equal(tnd_slab_fd(slab) >= 0, (flags & TND_SLAB_POOL_F_SHARED) != 0);
		tnd_slab_release(slab);
		tnd_slab_pool_trim(pool);
	}
	tnd_slab_pool_close(pool);
}

static void test_alignment(void **state)
{
	(void)state;
	check_alignment(0);
	check_alignment(TND_SLAB_POOL_F_NO_HUGE);
	check_alignment(TND_SLAB_POOL_F_SHARED);
}

static bool huge_pages_here(void)
{
	char text[128];

	return tnd__read_small("/sys/kernel/mm/transparent_hugepage/enabled", text, sizeof(text)) >
		       0 &&
	       !strstr(text, "[never]");
}

static void check_huge(uint32_t flags, const char *failpoint)
{
	struct tnd_slab_pool *pool = pool_of(NULL, 8 * MIB, flags);
	struct tnd_slab *slab = acquire(pool, 8 * MIB);
	uint64_t huge;

#ifdef TND_FAILPOINTS
	tnd__failpoints_set(failpoint);
#endif
	assert_int_equal(stats_of(pool).huge_bytes, 0);
	memset(tnd_slab_data(slab), 1, 8 * MIB);
	tnd__slab_pool_sample_huge(pool);
	huge = stats_of(pool).huge_bytes;
	if (flags & TND_SLAB_POOL_F_NO_HUGE)
		assert_int_equal(huge, 0);
	else if (!(flags & TND_SLAB_POOL_F_SHARED)) /* may run short of contiguous memory */
		assert_true(huge >= TND__HUGE && huge % TND__HUGE == 0 && huge <= 8 * MIB);
	tnd_slab_release(slab);
	tnd_slab_pool_trim(pool);
	tnd__slab_pool_sample_huge(pool);
	assert_int_equal(stats_of(pool).huge_bytes, huge); /* the most seen */
	tnd_slab_pool_close(pool);
#ifdef TND_FAILPOINTS
	tnd__failpoints_set(NULL);
#endif
	(void)failpoint;
}

static void test_huge(void **state)
{
	static const char *const ways[] = {NULL, "mem.scan=ENOTTY"};

	(void)state;
	if (!huge_pages_here()) {
		print_message("transparent huge pages are off on this system\n");
		skip();
	}
	for (size_t i = 0; i < 2; i++) {
		check_huge(0, ways[i]);
		check_huge(TND_SLAB_POOL_F_NO_HUGE, ways[i]);
		check_huge(TND_SLAB_POOL_F_SHARED, ways[i]);
	}
}

/* What one process writes another sees through the descriptor; nobody can cut the memfd. */
static void test_shared(void **state)
{
	struct tnd_slab_pool *pool = pool_of(NULL, 8192, TND_SLAB_POOL_F_SHARED);
	struct tnd_slab *slab = acquire(pool, 8192);
	char *again = mmap(NULL, 8192, PROT_READ, MAP_SHARED, tnd_slab_fd(slab), 0);
	int fd = tnd_slab_fd(slab);

	(void)state;
	assert_true(again != MAP_FAILED);
	strcpy(tnd_slab_data(slab), "seen");
	assert_string_equal(again, "seen");
	assert_int_equal(ftruncate(fd, 0), -1);
	munmap(again, 8192);
	tnd_slab_release(slab);
	tnd_slab_pool_close(pool);
	assert_int_equal(ftruncate(fd, 8192), -1);
	assert_int_equal(errno, EBADF);
}

/* Where ftruncate() would be answered with SIGXFSZ there is an error instead. */
static void test_file_size_limit(void **state)
{
	struct tnd_slab_pool *pool = pool_of(NULL, 0, TND_SLAB_POOL_F_SHARED);
	struct rlimit old, small;
	struct tnd_slab *slab;

	(void)state;
	assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
	small = old;
	small.rlim_cur = 4096;
	assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
	assert_int_equal(tnd_slab_acquire(pool, 8192, NULL, NULL, &slab), -EFBIG);
	assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
	tnd_slab_pool_close(pool);
}

static void test_numa(void **state)
{
	static const int32_t nodes[] = {TND_NUMA_AUTO, TND_NUMA_INTERLEAVE, 0};

	(void)state;
	for (size_t i = 0; i < sizeof(nodes) / sizeof(*nodes); i++) {
		struct tnd_slab_pool_opts opts = {
			.struct_bytes = sizeof(opts), .numa = nodes[i], .numa_given = 1};
		struct tnd_slab_pool *pool;
		struct tnd_slab *slab;

		assert_int_equal(tnd_slab_pool_create(&opts, &pool), 0);
		slab = acquire(pool, 3 * MIB);
		memset(tnd_slab_data(slab), 1, 3 * MIB);
		tnd_slab_release(slab);
		tnd_slab_pool_close(pool);
	}
}

/* Memory that is asked for on a node that is not there would come from anywhere, unnoticed. */
static void test_numa_refused(void **state)
{
	static const int32_t nodes[] = {-3, 900, 1023, 1024, 1 << 20, INT32_MIN, INT32_MAX};
	struct tnd_error error = {0};

	(void)state;
	for (size_t i = 0; i < sizeof(nodes) / sizeof(*nodes); i++) {
		struct tnd_slab_pool_opts opts = {
			.struct_bytes = sizeof(opts), .numa = nodes[i], .numa_given = 1};
		struct tnd_slab_pool *pool = NULL;

		assert_int_equal(tnd_slab_pool_create(&opts, &pool), TND_E_INVALID);
		assert_null(pool);
		assert_int_equal(tnd__numa_check(nodes[i], &error), TND_E_INVALID);
	}
	assert_non_null(strstr(error.message, "found node 2147483647; give"));
}

static void test_own_mapping(void **state)
{
	uint64_t map_bytes;
	void *data;

	(void)state;
	assert_int_equal(tnd__own_make(0, &data, &map_bytes), TND_E_INVALID);
	assert_int_equal(tnd__own_make(UINT64_MAX, &data, &map_bytes), -ENOMEM);
	assert_int_equal(tnd__own_make(3 * MIB + 1, &data, &map_bytes), 0);
	assert_int_equal(map_bytes, 3 * MIB + 4096);
	assert_int_equal((uintptr_t)data % TND__PAGE, 0);
	memset(data, 1, map_bytes);
	tnd_own_free(data, map_bytes);
	assert_false(mapped(data));
	tnd_own_free(NULL, 0);
	/* Small ones are no mapping each: 100,000 of them would be too many for the kernel. */
	assert_int_equal(tnd__own_make(65535, &data, &map_bytes), 0);
	assert_int_equal(map_bytes, 0);
	assert_int_equal((uintptr_t)data % 64, 0);
	memset(data, 1, 65535);
	tnd_own_free(data, map_bytes);
}

/* -- leases and escapes -- */

/* A view that outlives slab hold and pool: its mapping stays, alone, with its bytes, charged; then nothing does. */
static void test_view_outlives_pool(void **state)
{
	struct tnd_budget *budget = budget_of(8 * MIB);
	struct tnd_slab_pool *pool = pool_of(budget, 2 * MIB, 0);
	struct tnd_slab *kept = acquire(pool, MIB), *gone = acquire(pool, MIB);
	struct tnd_lease *one = lease(kept, "a"), *two = lease(kept, "b");
	struct tnd_lease *dropped = lease(gone, "c");
	char *data = tnd_slab_data(kept), *other = tnd_slab_data(gone);

	(void)state;
	memset(data, 'x', MIB);
	tnd_slab_release(kept);
	tnd_slab_release(gone);
	assert_int_equal(stats_of(pool).live, 2);
	assert_int_equal(stats_of(pool).leases, 3);
	tnd_lease_release(dropped);
	tnd_budget_close(budget); /* the pool holds it */
	tnd_slab_pool_close(pool);
	assert_false(mapped(other));
	assert_true(mapped(data));
	tnd_lease_release(one);
	for (uint64_t i = 0; i < MIB; i++)
		assert_int_equal(data[i], 'x');
	tnd_lease_release(two);
	assert_false(mapped(data));
}

/* A slab with a lease out is never handed out again. */
static void test_nothing_overwritten(void **state)
{
	struct tnd_slab_pool *pool = pool_of(NULL, MIB, 0);
	struct tnd_slab *slab = acquire(pool, MIB), *next;
	struct tnd_lease *held = lease(slab, "w");
	char *data = tnd_slab_data(slab);

	(void)state;
	data[7] = 'k';
	tnd_slab_release(slab);
	next = acquire(pool, MIB);
	assert_ptr_not_equal(tnd_slab_data(next), data);
	memset(tnd_slab_data(next), 0, MIB);
	assert_int_equal(data[7], 'k');
	tnd_lease_release(held);
	slab = acquire(pool, MIB);
	assert_ptr_equal(tnd_slab_data(slab), data);
	tnd_slab_release(slab);
	tnd_slab_release(next);
	tnd_slab_pool_close(pool);
}

static void test_escapes(void **state)
{
	struct tnd_slab_pool *pool = pool_of(NULL, MIB, 0);
	struct tnd_escape_report *report = (void *)-1;
	struct tnd_slab *z, *a;
	struct tnd_lease *held[5], *late;

	(void)state;
	assert_int_equal(tnd_slab_pool_escaped(pool, 1, &report), 0);
	assert_null(report);
	assert_int_equal(tnd_slab_acquire(pool, 10, "z.safetensors", NULL, &z), 0);
	assert_int_equal(tnd_slab_acquire(pool, 10, "a.safetensors", NULL, &a), 0);
	held[0] = lease(z, "w2");
	held[1] = lease(z, "w1");
	held[2] = lease(z, "w2"); /* a view derived from the first */
	held[3] = lease(a, "w1");
	assert_int_equal(tnd_lease_acquire(a, "e\nsc\0ape", 8, &held[4]), 0);
	tnd_lease_release(lease(z, "dropped"));
	tnd_slab_release(z);
	tnd_slab_release(a);

	assert_int_equal(tnd_slab_pool_escaped(pool, 0, &report), 2);
	assert_int_equal(report->slab_count, 2);
	assert_int_equal(report->bytes, 2 * MIB);
	assert_string_equal(report->slabs[0].file, "a.safetensors");
	assert_int_equal(report->slabs[0].name_count, 2);
	assert_string_equal(report->slabs[0].names[0], "e\\u000asc\\u0000ape");
	assert_string_equal(report->slabs[0].names[1], "w1");
	assert_string_equal(report->slabs[1].file, "z.safetensors");
	assert_int_equal(report->slabs[1].slab_bytes, MIB);
	assert_int_equal(report->slabs[1].name_count, 2);
	assert_string_equal(report->slabs[1].names[0], "w1");
	assert_string_equal(report->slabs[1].names[1], "w2");
	assert_int_equal(report->name_count, 3);
	assert_string_equal(report->names[2], "w2");
	tnd_escape_report_free(report);

	/* Once told, forgotten; what is held from then on is told. */
	assert_int_equal(tnd_slab_pool_escaped(pool, 1, &report), 2);
	tnd_escape_report_free(report);
	assert_int_equal(tnd_slab_pool_escaped(pool, 1, &report), 0);
	assert_null(report);
	late = lease(z, "late");
	assert_int_equal(tnd_slab_pool_escaped(pool, 1, &report), 1);
	assert_int_equal(report->name_count, 1);
	assert_string_equal(report->names[0], "late");
	tnd_escape_report_free(report);
	tnd_escape_report_free(NULL);

	tnd_lease_release(late);
	for (int i = 0; i < 5; i++)
		tnd_lease_release(held[i]);
	assert_int_equal(stats_of(pool).live, 0);
	tnd_slab_pool_close(pool);
}

static void test_holders(void **state)
{
	struct tnd_slab_pool *pool = pool_of(NULL, MIB, 0);
	struct tnd_slab *slab = acquire(pool, 1);
	struct tnd_lease *held[10];
	char text[128], small[6];

	(void)state;
	assert_int_equal(tnd__slab_pool_holders(pool, text, sizeof(text)), 0);
	assert_string_equal(text, "");
	for (int i = 0; i < 10; i++) {
		char name[8];

		snprintf(name, sizeof(name), "t%d", i);
		held[i] = lease(slab, name);
	}
	assert_int_equal(tnd__slab_pool_holders(pool, text, sizeof(text)), 10);
	assert_string_equal(text, "t0, t1, t2, t3, t4, t5, t6, t7 and 2 more");
	assert_int_equal(tnd__slab_pool_holders(pool, small, sizeof(small)), 10);
	assert_string_equal(small, "t0, t");
	assert_int_equal(tnd__slab_pool_holders(pool, NULL, 0), 10);
	for (int i = 0; i < 10; i++)
		tnd_lease_release(held[i]);
	tnd_slab_release(slab);
	tnd_slab_pool_close(pool);
}

/* -- nothing left behind -- */

static void one_round(uint32_t flags)
{
	struct tnd_budget *budget = budget_of(8 * MIB);
	struct tnd_slab_pool *pool = pool_of(budget, 65536, flags);
	struct tnd_slab *slab = acquire(pool, 1), *other = acquire(pool, 70000);
	struct tnd_lease *held = lease(slab, "w");

	tnd_slab_release(slab);
	tnd_slab_release(other);
	tnd_slab_pool_close(pool);
	tnd_lease_release(held);
	assert_int_equal(budget_stats(budget).charged_bytes, 0);
	tnd_budget_close(budget);
}

static void test_flat(void **state)
{
	unsigned int maps, fds;

	(void)state;
	one_round(0);
	maps = map_count("");
	fds = fd_count();
	for (int i = 0; i < 1000; i++)
		one_round(i % 2 ? TND_SLAB_POOL_F_SHARED : 0);
	assert_int_equal(fd_count(), fds);
	/* The allocator may have taken an arena or two; 1,000 leaked mappings would not be missed. */
	assert_true(map_count("") <= maps + 8);
}

/* -- faults -- */

#ifdef TND_FAILPOINTS
/* The whole life of a pool once. Return: the first error. */
static int life(uint32_t flags, struct tnd_budget *budget)
{
	struct tnd_slab_pool_opts opts = {.struct_bytes = sizeof(opts),
					  .flags = flags,
					  .budget = budget,
					  .slab_bytes = 3 * MIB};
	struct tnd_escape_report *report;
	struct tnd_slab_pool *pool;
	struct tnd_slab *slab;
	struct tnd_lease *held = NULL;
	int rc = tnd_slab_pool_create(&opts, &pool);

	if (rc < 0)
		return rc;
	rc = tnd_slab_acquire(pool, 10, "file", NULL, &slab);
	if (rc == 0) {
		rc = tnd_lease_acquire(slab, "w", 1, &held);
		tnd_slab_release(slab);
	}
	if (rc == 0) {
		rc = tnd_slab_pool_escaped(pool, 1, &report);
		if (rc > 0)
			tnd_escape_report_free(report);
	}
	tnd_slab_pool_close(pool);
	tnd_lease_release(held);
	return rc;
}

static void test_faults(void **state)
{
	static const struct {
		const char *format;
		uint32_t flags;
		int passages; /* how often the point is passed in one life */
		int code;
	} points[] = {
		/* pool, file name, slab, lease, report */
		{"mem.alloc=ENOMEM@%dx1", 0, 5, -ENOMEM},
		{"mem.map=ENOMEM@%dx1", 0, 1, -ENOMEM},
		{"mem.map=ENOMEM@%dx1", TND_SLAB_POOL_F_SHARED, 1, -ENOMEM},
		{"mem.memfd=EMFILE@%dx1", TND_SLAB_POOL_F_SHARED, 1, -EMFILE},
	};
	unsigned int fds = fd_count();

	(void)state;
	for (size_t i = 0; i < sizeof(points) / sizeof(*points); i++) {
		for (int at = 1; at <= points[i].passages + 1; at++) {
			struct tnd_budget *budget = budget_of(8 * MIB);
			char text[64];
			int rc;

			snprintf(text, sizeof(text), points[i].format, at);
			tnd__failpoints_set(text);
			rc = life(points[i].flags, budget);
			tnd__failpoints_set(NULL);
			assert_int_equal(rc, at <= points[i].passages ? points[i].code : 1);
			assert_int_equal(budget_stats(budget).charged_bytes, 0);
			tnd_budget_close(budget);
		}
	}
	assert_int_equal(fd_count(), fds);
}

/*
 * The control: accounting that refunds what each lease stands for, instead of the slab when its last lease ends. The first
 * lease of each slab stays; charged says that all is well, what is mapped says otherwise.
 */
static void test_naive_accounting(void **state)
{
	struct tnd_budget *budget = budget_of(3 * MIB);
	struct tnd_slab_pool *pool = pool_of(budget, MIB, 0);
	struct tnd_lease *first[8], *rest;

	(void)state;
	tnd__slab_pool_charge_leases(pool, true);
	for (int i = 0; i < 8; i++) {
		struct tnd_charge_opts opts = {.struct_bytes = sizeof(opts),
					       .flags = TND_CHARGE_F_TRY};
		struct tnd_slab *slab;

		assert_int_equal(tnd_slab_acquire(pool, MIB, "f", &opts, &slab), 0);
		assert_int_equal(tnd__lease_acquire_sized(slab, "a", 1, MIB / 16, &first[i]), 0);
		assert_int_equal(tnd__lease_acquire_sized(slab, "b", 1, MIB - MIB / 16, &rest), 0);
		tnd_slab_release(slab);
		tnd_lease_release(rest);
	}
	assert_true(budget_stats(budget).peak_bytes <= 3 * MIB);
	assert_int_equal(stats_of(pool).mapped_bytes, 8 * MIB);
	for (int i = 0; i < 8; i++)
		tnd_lease_release(first[i]);
	assert_int_equal(budget_stats(budget).charged_bytes, 0);
	assert_int_equal(stats_of(pool).mapped_bytes, 0);
	tnd_slab_pool_close(pool);
	tnd_budget_close(budget);
}
#endif

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_arguments),
		cmocka_unit_test(test_reuse),
		cmocka_unit_test(test_own_sizes),
		cmocka_unit_test(test_newest_first),
		cmocka_unit_test(test_gives_up_idle),
		cmocka_unit_test(test_idle_serves_others),
		cmocka_unit_test(test_alignment),
		cmocka_unit_test(test_huge),
		cmocka_unit_test(test_shared),
		cmocka_unit_test(test_file_size_limit),
		cmocka_unit_test(test_numa),
		cmocka_unit_test(test_numa_refused),
		cmocka_unit_test(test_own_mapping),
		cmocka_unit_test(test_view_outlives_pool),
		cmocka_unit_test(test_nothing_overwritten),
		cmocka_unit_test(test_escapes),
		cmocka_unit_test(test_holders),
		cmocka_unit_test(test_flat),
#ifdef TND_FAILPOINTS
		cmocka_unit_test(test_faults),
		cmocka_unit_test(test_naive_accounting),
#endif
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
