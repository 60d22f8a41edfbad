/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_share.c - the shared load: one reader, members as threads of this process, each with a load of its own
 *
 * What could break: a slice taken from the wrong place, a slab read into while a member still looks at it, more memory than the budget, a member
 * that is slow, late, leaves or never comes and strands the others, views that lose their bytes when their load ends. Bytes are known from name and
 * position and compared when a view is released. Deaths of processes are shown in tests/proc.
 */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include <tundish/share.h>
#include <tundish/time.h>

#include "load/load_internal.h"
#include "support/ckfile.h"
#include "support/fds.h"

#define MEMBERS_MAX 8

static char *folder;

/* Matrices that are cut by rows and by columns, vectors, an odd offset, nothing, and one larger than a slab. */
static const struct ck_tensor first_file[] = {
	{"model.layers.0.input_layernorm.weight", "U8", {3}, 1, 3},
	{"model.layers.0.mlp.gate_proj.weight", "F32", {512, 256}, 2, 524288},
	{"model.layers.0.mlp.down_proj.weight", "F32", {256, 512}, 2, 524288},
	{"model.layers.0.empty", "F32", {0, 4}, 2, 0},
	{"model.layers.0.mlp.up_proj.weight", "BF16", {512, 256}, 2, 262144},
};
static const struct ck_tensor second_file[] = {
	{"model.layers.1.mlp.down_proj.weight", "BF16", {1024, 2048}, 2, 4194304},
	{"model.layers.1.mlp.gate_proj.weight", "BF16", {2048, 1024}, 2, 4194304},
	{"model.layers.1.norm.weight", "F32", {1024}, 1, 4096},
	{"model.layers.1.mlp.up_proj.weight", "BF16", {2048, 1024}, 2, 4194304},
	{"model.layers.1.self_attn.rotary", "U8", {100001}, 1, 100001},
	/* Rows that cuts at 4 KiB go through: the last slab holds less than one of them. */
	{"model.layers.2.mlp.down_proj.weight", "BF16", {700, 3000}, 2, 4200000},
};

static int make_folder(void **state)
{
	char path[512];

	(void)state;
	folder = ck_folder();
	snprintf(path, sizeof(path), "%s/a.safetensors", folder);
	ck_write(path, first_file, sizeof(first_file) / sizeof(*first_file), "abc");
	snprintf(path, sizeof(path), "%s/b.safetensors", folder);
	ck_write(path, second_file, sizeof(second_file) / sizeof(*second_file), "abcdef");
	return 0;
}

static int drop_folder(void **state)
{
	(void)state;
	ck_remove(folder);
	return 0;
}

/* -- what a test loads, and how -- */

struct setup {
	struct tnd_plan_opts plan;
	struct tnd_share_opts share;
	uint32_t ranks;
	uint32_t members[MEMBERS_MAX];
	size_t member_count; /* 0: all */
};

struct node {
	const struct setup *setup;
	struct tnd_checkpoint *checkpoint;
	struct tnd_share *share;
};

struct member {
	struct node *node;
	uint32_t rank;
	struct tnd_load_opts load;
	int64_t each_ns; /* that it takes over a view */
	size_t most;     /* views taken before it leaves; 0: all */
	bool writes;     /* zeros into what it is given */
	struct tnd_load_stats stats;
	int code;
	struct tnd_error error;
};

static const struct setup plain = {.plan = {.slice = TND_SLICE_ALL, .budget_bytes = 256u << 20},
				   .ranks = 4};

static struct tnd_plan *member_plan(struct node *node, uint32_t rank)
{
	struct tnd_plan_opts opts = node->setup->plan;
	struct tnd_layout layout = {
		.struct_bytes = sizeof(layout), .tp_size = node->setup->ranks, .rank = rank};
	struct tnd_error error;
	struct tnd_plan *plan = NULL;

	opts.struct_bytes = sizeof(opts);
	if (tnd_plan_create(node->checkpoint, &layout, &opts, &plan, &error) < 0)
		fail_msg("%s", error.message);
	return plan;
}

static void open_node(struct node *node, const struct setup *setup)
{
	struct tnd_plan_opts opts = setup->plan;
	struct tnd_share_opts share = setup->share;
	struct tnd_layout layout = {.struct_bytes = sizeof(layout), .tp_size = setup->ranks};
	struct tnd_error error;
	struct tnd_plan *plan = NULL;

	opts.struct_bytes = sizeof(opts);
	share.struct_bytes = sizeof(share);
	node->setup = setup;
	if (tnd_checkpoint_open(folder, NULL, &node->checkpoint, &error) < 0)
		fail_msg("%s", error.message);
	if (tnd_plan_create_union(node->checkpoint, &layout,
				  setup->member_count ? setup->members : NULL, setup->member_count,
				  &opts, &plan, &error) < 0)
		fail_msg("%s", error.message);
	if (tnd_share_open(plan, &share, &node->share, &error) < 0)
		fail_msg("%s", error.message);
	tnd_plan_close(plan);
}

static void close_node(struct node *node)
{
	tnd_share_close(node->share);
	tnd_checkpoint_close(node->checkpoint);
}

static void check_view(const struct tnd_plan *plan, const struct tnd_view *view)
{
	const struct tnd_plan_item *item = &tnd_plan_items(plan, &(size_t){0})[view->item];
	const unsigned char *data = view->data;
	uint64_t offset = view->piece_offset - item->piece_offset, run;

	for (uint64_t i = 0; i < view->bytes; i += i < 64 || i + 64 > view->bytes ? 1 : 61) {
		uint64_t at = tnd__slice_file_at(item, offset + i, &run) - item->tensor->offset;

		if (data[i] != ck_byte(view->name, at))
			fail_msg("%s: byte %llu differs", view->name, (unsigned long long)i);
	}
}

static void pause_ns(int64_t ns)
{
	struct timespec time = {ns / 1000000000, ns % 1000000000};

	nanosleep(&time, NULL);
}

static int consume(struct member *member, struct tnd_load *load, const struct tnd_plan *plan)
{
	struct tnd_view view;
	size_t count = 0;
	int rc;

	while ((rc = tnd_load_next(load, &view, &member->error)) == 1) {
		check_view(plan, &view);
		if (member->writes && view.bytes)
			memset((void *)(uintptr_t)view.data, 0, view.bytes);
		if (member->each_ns)
			pause_ns(member->each_ns);
		tnd_view_release(&view);
		if (++count == member->most)
			break;
	}
	return rc < 0 ? rc : 0;
}

static void *run_member(void *arg)
{
	struct member *member = arg;
	struct tnd_plan *plan = member_plan(member->node, member->rank);
	struct tnd_load *load;
	int rc;

	member->load.struct_bytes = sizeof(member->load);
	member->load.share = tnd_share_address(member->node->share);
	member->code = tnd_load_open(plan, &member->load, &load, &member->error);
	if (member->code == 0) {
		member->code = consume(member, load, plan);
		rc = tnd_load_end(load, &member->error);
		if (member->code == 0 && !member->most)
			member->code = rc;
		member->stats.struct_bytes = sizeof(member->stats);
		tnd_load_stats(load, &member->stats);
		tnd_load_close(load);
	}
	tnd_plan_close(plan);
	return NULL;
}

/* All members to their end, then the reader's. Return: what the reader's end gives. */
static int run_all(struct node *node, struct member *members, size_t count, struct tnd_error *error)
{
	pthread_t threads[MEMBERS_MAX];

	for (size_t i = 0; i < count; i++) {
		members[i].node = node;
		assert_int_equal(pthread_create(&threads[i], NULL, run_member, &members[i]), 0);
	}
	for (size_t i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
	return tnd_share_end(node->share, error);
}

static void expect_all_well(const struct member *members, size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (members[i].code < 0)
			fail_msg("rank %u: %s", members[i].rank, members[i].error.message);
}

/* A whole load in which nothing may go wrong. */
static void load_well(const struct setup *setup, struct tnd_load_opts load, int64_t each_ns)
{
	struct member members[MEMBERS_MAX] = {0};
	size_t count = setup->member_count ? setup->member_count : setup->ranks;
	struct tnd_load_stats stats = {.struct_bytes = sizeof(stats)};
	struct tnd_error error;
	uint64_t peak;
	struct node node;

	open_node(&node, setup);
	for (size_t i = 0; i < count; i++)
		members[i] = (struct member){.rank = setup->member_count ? setup->members[i]
									 : (uint32_t)i,
					     .load = load,
					     .each_ns = each_ns};
	if (run_all(&node, members, count, &error) < 0)
		fail_msg("reader: %s", error.message);
	expect_all_well(members, count);
	assert_int_equal(tnd_share_stats(node.share, &stats), 0);
	peak = stats.peak_charged_bytes;
	for (size_t i = 0; i < count; i++)
		peak += members[i].stats.peak_charged_bytes;
	if (peak > setup->plan.budget_bytes)
		fail_msg("charged %llu of %llu bytes", (unsigned long long)peak,
			 (unsigned long long)setup->plan.budget_bytes);
	close_node(&node);
}

/* -- bytes -- */

/* Every rank gets its bytes: packings, slab sizes, alignment, pieces, numbers of ranks. */
static void test_bytes(void **state)
{
	static const int64_t slabs[] = {0, 1 << 20, TND_SLAB_NONE};
	static const uint32_t ranks[] = {1, 2, 4, 8};
	unsigned int before = fd_count();

	(void)state;
	for (size_t r = 0; r < 4; r++)
		for (size_t s = 0; s < 3; s++)
			for (uint32_t packing = TND_PACKING_NAME; packing <= TND_PACKING_FILE;
			     packing++) {
				struct setup setup = plain;

				setup.ranks = ranks[r];
				setup.plan.slab_bytes = slabs[s];
				setup.plan.packing = packing;
				setup.plan.align = s == 1 ? 64 : 0;
				load_well(&setup, (struct tnd_load_opts){0}, 0);
			}
	assert_int_equal(fd_count(), before);
}

/* A budget so small that tensors are cut: pieces come in order and together are the slice. */
static void test_pieces(void **state)
{
	static const uint32_t flags[] = {0, TND_LOAD_F_OWN};
	struct setup setup = plain;

	(void)state;
	setup.plan.oversize = TND_OVERSIZE_PIECES;
	setup.plan.slab_bytes = 1 << 20;
	for (uint64_t budget = 8; budget <= 20; budget += 2)
		for (size_t i = 0; i < 4; i++) {
			setup.ranks = i % 2 ? 4 : 2;
			setup.plan.packing = i < 2 ? TND_PACKING_NAME : TND_PACKING_FILE;
			setup.plan.budget_bytes = (budget << 20) + 4096 * budget;
			load_well(&setup, (struct tnd_load_opts){.flags = flags[budget / 2 % 2]},
				  0);
			load_well(&setup,
				  (struct tnd_load_opts){.flags = flags[budget / 2 % 2 ? 0 : 1]},
				  0);
		}
}

static void test_own(void **state)
{
	(void)state;
	load_well(&plain, (struct tnd_load_opts){.flags = TND_LOAD_F_OWN}, 0);
}

/* Some ranks of the layout only: what nobody needs is not read. */
static void test_some_members(void **state)
{
	struct setup setup = plain;

	(void)state;
	setup.member_count = 2;
	setup.members[0] = 1;
	setup.members[1] = 3;
	load_well(&setup, (struct tnd_load_opts){0}, 0);
	setup.member_count = 1;
	setup.plan.run_min_bytes = 512;
	load_well(&setup, (struct tnd_load_opts){0}, 0);
}

/* -- writes (L32) -- */

/* What one member writes into its views no other sees, nor the slab's next contents. */
static void test_writes(void **state)
{
	struct member members[4] = {0};
	struct setup setup = plain;
	struct tnd_error error;
	struct node node;

	(void)state;
	setup.plan.slab_bytes = 1 << 20;
	setup.plan.slice = TND_SLICE_NONE;
	for (int round = 0; round < 3; round++) {
		open_node(&node, &setup);
		for (uint32_t i = 0; i < 4; i++)
			members[i] = (struct member){.rank = i,
						     .load.flags = i % 2 ? TND_LOAD_F_WRITABLE : 0,
						     .writes = i % 2};
		if (run_all(&node, members, 4, &error) < 0)
			fail_msg("reader: %s", error.message);
		expect_all_well(members, 4);
		close_node(&node);
	}
}

/* -- pace -- */

/* A slow member sets the pace, is named for it, and gets its bytes. */
static void test_slow(void **state)
{
	struct member members[4] = {0};
	struct setup setup = plain;
	struct tnd_error error;
	struct node node;
	char *text;

	(void)state;
	setup.plan.budget_bytes = 16u << 20;
	setup.plan.oversize = TND_OVERSIZE_PIECES;
	setup.plan.slab_bytes = 1 << 20;
	open_node(&node, &setup);
	for (uint32_t i = 0; i < 4; i++)
		members[i] = (struct member){.rank = i, .each_ns = i == 2 ? 60000000 : 0};
	if (run_all(&node, members, 4, &error) < 0)
		fail_msg("reader: %s", error.message);
	expect_all_well(members, 4);
	assert_int_equal(tnd_share_report_json(node.share, &text), 0);
	assert_non_null(strstr(text, "\"held_up_by\":[{\"rank\":2,"));
	free(text);
	close_node(&node);
}

/* One leaves after a few views: the others get everything. */
static void test_leaves_early(void **state)
{
	struct member members[4] = {0};
	struct setup setup = plain;
	struct tnd_error error;
	struct node node;

	(void)state;
	setup.plan.budget_bytes = 16u << 20;
	setup.plan.oversize = TND_OVERSIZE_PIECES;
	setup.plan.slab_bytes = 1 << 20;
	open_node(&node, &setup);
	for (uint32_t i = 0; i < 4; i++)
		members[i] = (struct member){.rank = i, .most = i == 1 ? 2 : 0};
	if (run_all(&node, members, 4, &error) < 0)
		fail_msg("reader: %s", error.message);
	expect_all_well(members, 4);
	close_node(&node);
}

/* One never comes: the others are told which, within its time. */
static void test_never_comes(void **state)
{
	struct member members[3] = {0};
	struct setup setup = plain;
	struct tnd_error error;
	struct node node;

	(void)state;
	setup.share.meet_ns = 300000000;
	open_node(&node, &setup);
	for (uint32_t i = 0; i < 3; i++)
		members[i] = (struct member){.rank = i};
	assert_int_equal(run_all(&node, members, 3, &error), TND_E_DEADLINE);
	assert_int_equal(error.rank, 3);
	assert_non_null(strstr(error.message, "rank 3"));
	close_node(&node);
}

/* The same, but the others go on without it. */
static void test_goes_on_without(void **state)
{
	struct member members[3] = {0};
	struct setup setup = plain;
	struct tnd_error error;
	struct node node;

	(void)state;
	setup.share.meet_ns = 300000000;
	setup.share.on_dead = TND_SHARE_DEAD_CONTINUE;
	open_node(&node, &setup);
	for (uint32_t i = 0; i < 3; i++)
		members[i] = (struct member){.rank = i};
	if (run_all(&node, members, 3, &error) < 0)
		fail_msg("reader: %s", error.message);
	expect_all_well(members, 3);
	close_node(&node);
}

/* Cancelled while members wait for more: each is told so. */
static void test_cancelled(void **state)
{
	struct member members[2] = {0};
	struct setup setup = plain;
	struct tnd_error error;
	pthread_t threads[2];
	struct node node;

	(void)state;
	setup.ranks = 4;
	setup.plan.budget_bytes = 16u << 20;
	setup.plan.oversize = TND_OVERSIZE_PIECES;
	setup.plan.slab_bytes = 1 << 20;
	open_node(&node, &setup);
	for (uint32_t i = 0; i < 2; i++) {
		members[i] = (struct member){.rank = i, .node = &node};
		pthread_create(&threads[i], NULL, run_member, &members[i]);
	}
	pause_ns(100000000);
	tnd_share_cancel(node.share);
	for (uint32_t i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	assert_int_equal(tnd_share_end(node.share, &error), TND_E_CANCELLED);
	for (uint32_t i = 0; i < 2; i++)
		assert_int_equal(members[i].code, TND_E_CANCELLED);
	close_node(&node);
}

/* -- views that are kept -- */

static void keep_views(struct node *node, uint32_t on_full, size_t most, struct tnd_view *views,
		       size_t *ret_count, int expect)
{
	struct tnd_load_opts opts = {
		.struct_bytes = sizeof(opts), .on_full = on_full, .stall_ns = 500000000};
	struct tnd_plan *plan = member_plan(node, 0);
	struct tnd_error error;
	struct tnd_load *load;
	int rc = 1;

	opts.share = tnd_share_address(node->share);
	if (tnd_load_open(plan, &opts, &load, &error) < 0)
		fail_msg("%s", error.message);
	for (*ret_count = 0; *ret_count < most && rc == 1; (*ret_count) += rc == 1)
		rc = tnd_load_next(load, &views[*ret_count], &error);
	if (rc != expect)
		fail_msg("expected %d, found %d: %s", expect, rc, rc < 0 ? error.message : "");
	tnd_load_close(load);
	for (size_t i = 0; i < *ret_count; i++)
		check_view(plan, &views[i]);
	tnd_plan_close(plan);
}

/* Views keep their bytes after their load and the reader have ended, as memory of this process. */
static void test_kept_views(void **state)
{
	struct setup setup = plain;
	struct tnd_view views[64];
	struct tnd_plan *plan;
	struct node node;
	size_t count;
	unsigned int before = fd_count();

	(void)state;
	setup.ranks = 1;
	setup.plan.slab_bytes = 1 << 20;
	for (int kept_on = 0; kept_on < 2; kept_on++) {
		open_node(&node, &setup);
		keep_views(&node, TND_ON_FULL_COPY, kept_on ? 3 : 64, views, &count,
			   kept_on ? 1 : 0);
		plan = member_plan(&node, 0);
		close_node(&node);
		for (size_t i = 0; i < count; i++) {
			check_view(plan, &views[i]);
			tnd_view_release(&views[i]);
		}
		tnd_plan_close(plan);
	}
	assert_int_equal(fd_count(), before);
}

/* A consumer that keeps everything: fails, waits to its limit, or gets copies. */
static void test_on_full(void **state)
{
	static const struct {
		uint32_t on_full;
		int expect;
	} cases[] = {{TND_ON_FULL_FAIL, TND_E_FULL},
		     {TND_ON_FULL_WAIT, TND_E_DEADLINE},
		     {TND_ON_FULL_COPY, 0},
		     {TND_ON_FULL_OVERRUN, 0}};
	struct setup setup = plain;
	struct tnd_view views[64];
	struct node node;
	size_t count;

	(void)state;
	setup.ranks = 1;
	setup.plan.budget_bytes = 14u << 20;
	setup.plan.slab_bytes = 1 << 20;
	for (size_t i = 0; i < 4; i++) {
		open_node(&node, &setup);
		keep_views(&node, cases[i].on_full, 64, views, &count, cases[i].expect);
		for (size_t v = 0; v < count; v++)
			tnd_view_release(&views[v]);
		close_node(&node);
	}
}

/* Tensors that the budget has no room for: they go alone, over it, and are counted. */
static void test_overrun(void **state)
{
	static const uint64_t budgets[] = {5500000, 6000000, 7500000};
	struct tnd_load_stats stats = {.struct_bytes = sizeof(stats)};
	struct setup setup = plain;
	struct tnd_error error;
	struct node node;

	(void)state;
	setup.ranks = 2;
	setup.plan.oversize = TND_OVERSIZE_OVERRUN;
	setup.plan.slab_bytes = 1 << 20;
	for (size_t i = 0; i < 6; i++) {
		struct member members[2] = {{.rank = 0}, {.rank = 1}};

		setup.plan.slice = i % 2 ? TND_SLICE_ALL : TND_SLICE_NONE;
		setup.plan.budget_bytes = budgets[i / 2];
		open_node(&node, &setup);
		if (run_all(&node, members, 2, &error) < 0)
			fail_msg("reader: %s", error.message);
		expect_all_well(members, 2);
		tnd_share_stats(node.share, &stats);
		assert_true(stats.overruns + members[0].stats.overruns > 0);
		close_node(&node);
	}
}

/* A member's own account that is too small for what it gathers: an error, not an early end. */
static void test_small_account(void **state)
{
	struct member members[2] = {{.rank = 0}, {.rank = 1}};
	struct setup setup = plain;
	struct tnd_error error;
	struct node node;

	(void)state;
	setup.ranks = 2;
	assert_int_equal(tnd_budget_create(400000, &members[1].load.budget), 0);
	open_node(&node, &setup);
	assert_int_equal(run_all(&node, members, 2, &error), TND_E_PEER_DEAD);
	assert_int_equal(error.rank, 1);
	assert_int_equal(members[1].code, TND_E_BUDGET);
	/* The other one is told who it was, unless it had everything before. */
	if (members[0].code < 0) {
		assert_int_equal(members[0].code, TND_E_PEER_DEAD);
		assert_int_equal(members[0].error.rank, 1);
	}
	close_node(&node);
	tnd_budget_close(members[1].load.budget);
}

/* -- refusals -- */

static void test_refused(void **state)
{
	struct setup setup = plain, other = plain;
	struct tnd_load_opts opts = {.struct_bytes = sizeof(opts)};
	struct node node, wrong;
	struct tnd_share *share;
	struct tnd_error error;
	struct tnd_plan *plan;
	struct tnd_load *load;

	(void)state;
	setup.ranks = 2;
	other.ranks = 2;
	other.plan.slice = TND_SLICE_NONE;
	open_node(&node, &setup);
	opts.share = tnd_share_address(node.share);
	opts.deadline_ns = tnd_deadline_in(1000000000);
	/* The same rank with other options. */
	wrong = node;
	wrong.setup = &other;
	plan = member_plan(&wrong, 0);
	assert_int_equal(tnd_load_open(plan, &opts, &load, &error), TND_E_INVALID);
	assert_non_null(strstr(error.message, "options"));
	tnd_plan_close(plan);
	/* A plan that is no union. */
	plan = member_plan(&node, 0);
	assert_int_equal(tnd_share_open(plan, NULL, &share, &error), TND_E_INVALID);
	/* Nobody there. */
	opts.share = "unix:@tundish-test-nobody";
	opts.deadline_ns = tnd_deadline_in(100000000);
	assert_int_equal(tnd_load_open(plan, &opts, &load, &error), -ETIMEDOUT);
	tnd_plan_close(plan);
	close_node(&node);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_bytes),
		cmocka_unit_test(test_pieces),
		cmocka_unit_test(test_own),
		cmocka_unit_test(test_some_members),
		cmocka_unit_test(test_writes),
		cmocka_unit_test(test_slow),
		cmocka_unit_test(test_leaves_early),
		cmocka_unit_test(test_never_comes),
		cmocka_unit_test(test_goes_on_without),
		cmocka_unit_test(test_cancelled),
		cmocka_unit_test(test_kept_views),
		cmocka_unit_test(test_on_full),
		cmocka_unit_test(test_refused),
		cmocka_unit_test(test_overrun),
		cmocka_unit_test(test_small_account),
	};

	return cmocka_run_group_tests(tests, make_folder, drop_folder);
}
