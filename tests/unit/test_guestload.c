/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_guestload.c - guests of a shared load: reader, members and guests as threads of this process, each with a load of its own
 *
 * What could break: a tensor that a guest gets twice, not at all, or with bytes of another; a guest that waits for a reader that sends nothing, or
 * that the reader waits for; views that change once the guest was let go; figures of one of its two phases only; memory, threads and descriptors
 * of the phase that was left. Each guest counts what it gets by item and compares bytes, which are known from name and position, when a view is
 * released; what it read itself and whom the reader waited for is taken from the figures of both.
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

#define TENSORS 56
#define ITEMS_MAX 512
#define DEADLINE_NS INT64_C(60000000000)
/* Rings of several loads, one after the other at one address, are one to the sanitizer. */
#ifdef __SANITIZE_THREAD__
#define ENGINE TND_ENGINE_THREADS
#else
#define ENGINE TND_ENGINE_AUTO
#endif

static char *folder, *other_folder;
static struct tnd_checkpoint *checkpoint, *other_checkpoint;

/* Two files of matrices of 512 KiB, cut by rows and by columns, and small ones at odd offsets. */
static void write_files(const char *to)
{
	for (char file = 'a'; file <= 'b'; file++) {
		static const char *const kinds[] = {"mlp.gate_proj.weight", "mlp.down_proj.weight",
						    "input_layernorm.weight", "rotary"};
		struct ck_tensor tensors[TENSORS + 1] = {{"model.empty", "F32", {0, 4}, 2, 0}};
		char names[TENSORS][64], path[512];

		for (int i = 0; i < TENSORS; i++) {
			snprintf(names[i], sizeof(names[i]), "model.layers.%d.%s",
				 i / 4 * 2 + file % 2, kinds[i % 4]);
			tensors[i + 1] =
				i % 4 < 2 ? (struct ck_tensor){names[i],
							       "BF16",
							       {512, 512},
							       2,
							       524288}
				: i % 4 == 2
					? (struct ck_tensor){names[i], "F32", {1024}, 1, 4096}
					: (struct ck_tensor){names[i], "U8", {10003}, 1, 10003};
		}
		if (file == 'b')
			tensors[0].name = "model.nothing";
		snprintf(path, sizeof(path), "%s/%c.safetensors", to, file);
		ck_write(path, tensors, TENSORS + 1, "abc");
	}
}

static int make_folders(void **state)
{
	struct tnd_error error;

	(void)state;
	folder = ck_folder();
	other_folder = ck_folder();
	write_files(folder);
	write_files(other_folder);
	if (tnd_checkpoint_open(folder, NULL, &checkpoint, &error) < 0 ||
	    tnd_checkpoint_open(other_folder, NULL, &other_checkpoint, &error) < 0)
		fail_msg("%s", error.message);
	return 0;
}

static int drop_folders(void **state)
{
	(void)state;
	tnd_checkpoint_close(checkpoint);
	tnd_checkpoint_close(other_checkpoint);
	ck_remove(folder);
	ck_remove(other_folder);
	return 0;
}

/* -- a node: a reader and two members -- */

/* Less than half of the bytes fit into the slabs of this budget. */
static const struct tnd_plan_opts small = {.struct_bytes = sizeof(small),
					   .slice = TND_SLICE_ALL,
					   .budget_bytes = 12u << 20,
					   .slab_bytes = 1 << 20};

struct node {
	struct tnd_share *share;
	pthread_t threads[2];
	struct member {
		struct node *node;
		struct tnd_plan *plan;
		uint32_t rank;
		int code;
		struct tnd_error error;
	} members[2];
	/* Members stop before this view, until told to go on. */
	pthread_mutex_t lock;
	pthread_cond_t moved;
	size_t gate, at;
};

static struct tnd_plan *make_plan(struct tnd_checkpoint *of, uint32_t tp, uint32_t rank,
				  const struct tnd_plan_opts *opts)
{
	struct tnd_layout layout = {.struct_bytes = sizeof(layout), .tp_size = tp, .rank = rank};
	struct tnd_plan *plan = NULL;
	struct tnd_error error;

	if (tnd_plan_create(of, &layout, opts, &plan, &error) < 0)
		fail_msg("%s", error.message);
	return plan;
}

static void pass_gate(struct node *node)
{
	pthread_mutex_lock(&node->lock);
	node->at++;
	pthread_cond_broadcast(&node->moved);
	while (node->at >= node->gate)
		pthread_cond_wait(&node->moved, &node->lock);
	pthread_mutex_unlock(&node->lock);
}

static void open_gate(struct node *node)
{
	pthread_mutex_lock(&node->lock);
	node->gate = SIZE_MAX;
	pthread_cond_broadcast(&node->moved);
	pthread_mutex_unlock(&node->lock);
}

static void *run_member(void *arg)
{
	struct member *member = arg;
	struct tnd_load_opts opts = {.struct_bytes = sizeof(opts),
				     .share = tnd_share_address(member->node->share)};
	struct tnd_view view;
	struct tnd_load *load;

	member->code = tnd_load_open(member->plan, &opts, &load, &member->error);
	if (member->code == 0) {
		while ((member->code = tnd_load_next(load, &view, &member->error)) == 1) {
			pass_gate(member->node);
			tnd_view_release(&view);
		}
		if (member->code == 0)
			member->code = tnd_load_end(load, &member->error);
		tnd_load_close(load);
	}
	tnd_plan_close(member->plan);
	return NULL;
}

static void open_node(struct node *node, const struct tnd_share_opts *share)
{
	struct tnd_layout layout = {.struct_bytes = sizeof(layout), .tp_size = 2};
	const struct tnd_load_opts how = {.struct_bytes = sizeof(how), .engine = ENGINE};
	struct tnd_share_opts opts = {.struct_bytes = sizeof(opts)};
	struct tnd_plan *plan = NULL;
	struct tnd_error error;

	if (share)
		opts = *share;
	opts.load = &how;
	*node = (struct node){.gate = SIZE_MAX,
			      .lock = PTHREAD_MUTEX_INITIALIZER,
			      .moved = PTHREAD_COND_INITIALIZER};
	if (tnd_plan_create_union(checkpoint, &layout, NULL, 0, &small, &plan, &error) < 0 ||
	    tnd_share_open(plan, &opts, &node->share, &error) < 0)
		fail_msg("%s", error.message);
	tnd_plan_close(plan);
}

static void start_members(struct node *node)
{
	for (uint32_t i = 0; i < 2; i++) {
		node->members[i] = (struct member){
			.node = node, .rank = i, .plan = make_plan(checkpoint, 2, i, &small)};
		assert_int_equal(
			pthread_create(&node->threads[i], NULL, run_member, &node->members[i]), 0);
	}
}

/* The reader's figures and its report, which is the caller's to free. */
static char *end_node(struct node *node, struct tnd_load_stats *stats)
{
	struct tnd_error error;
	char *text;

	for (int i = 0; i < 2; i++)
		pthread_join(node->threads[i], NULL);
	for (int i = 0; i < 2; i++)
		if (node->members[i].code < 0)
			fail_msg("rank %d: %s", i, node->members[i].error.message);
	if (tnd_share_end(node->share, &error) < 0)
		fail_msg("reader: %s", error.message);
	stats->struct_bytes = sizeof(*stats);
	assert_int_equal(tnd_share_stats(node->share, stats), 0);
	assert_int_equal(tnd_share_report_json(node->share, &text), 0);
	return text;
}

/* -- a guest -- */

struct guest {
	struct tnd_plan *plan;
	struct tnd_load *load;
	struct tnd_load_opts opts;
	int64_t each_ns; /* that it takes over a view */
	size_t most;     /* views until it ends; 0: all */
	bool writes, keeps;
	struct tnd_view views[ITEMS_MAX];
	size_t view_count;
	uint64_t got[ITEMS_MAX]; /* bytes of each item */
	bool seen[ITEMS_MAX];
	struct tnd_load_stats stats;
	int code;
	struct tnd_error error;
	pthread_t thread;
};

static void check_view(const struct tnd_plan *plan, const struct tnd_view *view)
{
	const struct tnd_plan_item *item = &tnd_plan_items(plan, &(size_t){0})[view->item];
	const unsigned char *data = view->data;
	uint64_t offset = view->piece_offset - item->piece_offset, run;

	assert_int_equal(item->tensor->name_bytes, view->name_bytes);
	assert_memory_equal(item->tensor->name, view->name, view->name_bytes);
	for (uint64_t i = 0; i < view->bytes; i += i < 64 || i + 64 > view->bytes ? 1 : 61) {
		uint64_t at = tnd__slice_file_at(item, offset + i, &run) - item->tensor->offset;

		if (data[i] != ck_byte(view->name, at))
			fail_msg("%s: byte %llu differs", view->name, (unsigned long long)i);
	}
}

static void open_guest(struct guest *guest, struct tnd_plan *plan, const char *address)
{
	guest->plan = plan;
	guest->opts.struct_bytes = sizeof(guest->opts);
	guest->opts.flags |= TND_LOAD_F_GUEST;
	guest->opts.share = address;
	guest->opts.engine = ENGINE;
	guest->code = tnd_load_open(plan, &guest->opts, &guest->load, &guest->error);
	if (guest->code < 0)
		fail_msg("guest: %s", guest->error.message);
}

static void take_view(struct guest *guest, struct tnd_view *view)
{
	check_view(guest->plan, view);
	guest->got[view->item] += view->bytes;
	guest->seen[view->item] = true;
	if (guest->writes && view->bytes)
		memset((void *)(uintptr_t)view->data, 0xee, view->bytes);
	if (guest->each_ns) {
		struct timespec time = {0, guest->each_ns};

		nanosleep(&time, NULL);
	}
	if (guest->keeps)
		guest->views[guest->view_count++] = *view;
	else
		tnd_view_release(view);
}

static void *run_guest(void *arg)
{
	struct guest *guest = arg;
	struct tnd_view view;
	size_t count = 0;
	int rc;

	while ((rc = tnd_load_next(guest->load, &view, &guest->error)) == 1) {
		take_view(guest, &view);
		if (++count == guest->most)
			break;
	}
	guest->code = rc < 0 ? rc : tnd_load_end(guest->load, &guest->error);
	guest->stats.struct_bytes = sizeof(guest->stats);
	tnd_load_stats(guest->load, &guest->stats);
	return NULL;
}

static void start_guest(struct guest *guest)
{
	assert_int_equal(pthread_create(&guest->thread, NULL, run_guest, guest), 0);
}

/* That it went well, and got everything once. */
static void end_guest(struct guest *guest)
{
	const struct tnd_plan_item *items;
	size_t count;

	if (guest->code < 0)
		fail_msg("guest: %s", guest->error.message);
	items = tnd_plan_items(guest->plan, &count);
	for (size_t i = 0; i < count; i++)
		if (guest->got[i] != items[i].kept_bytes || !guest->seen[i])
			fail_msg("%s: %llu bytes of %llu", items[i].tensor->name,
				 (unsigned long long)guest->got[i],
				 (unsigned long long)items[i].kept_bytes);
	assert_int_equal(guest->stats.kept_bytes, guest->stats.total_bytes);
	assert_int_equal(guest->stats.overruns, 0);
	tnd_load_close(guest->load);
	tnd_plan_close(guest->plan);
}

static void run_to_end(struct guest *guest)
{
	run_guest(guest);
	end_guest(guest);
}

/* Most of what the guest keeps came from the reader. */
static bool mostly_came(const struct guest *guest)
{
	return guest->stats.storage_bytes <= guest->stats.total_bytes / 2 + (1 << 20);
}

/* -- when it joins -- */

/*
 * Before most was read. A machine that leaves the guest without a processor for 20 ms has it let go:
 * tried again then.
 */
static void test_early(void **state)
{
	(void)state;
	for (int attempt = 0;; attempt++) {
		struct guest guest = {0};
		struct tnd_load_stats stats;
		struct node node;
		uint64_t both;
		bool let_go;
		char *text;

		open_node(&node, NULL);
		open_guest(&guest, make_plan(checkpoint, 2, 1, &small),
			   tnd_share_address(node.share));
		start_guest(&guest);
		start_members(&node);
		text = end_node(&node, &stats);
		pthread_join(guest.thread, NULL);
		let_go = !strstr(text, "\"guests_let_go\":0");
		both = stats.storage_bytes + guest.stats.storage_bytes;
		free(text);
		end_guest(&guest);
		tnd_share_close(node.share);
		if (both < stats.storage_bytes * 3 / 2 && mostly_came(&guest))
			return;
		if (!let_go || attempt == 20)
			fail_msg("%llu bytes were read, %llu of them by the guest",
				 (unsigned long long)both,
				 (unsigned long long)guest.stats.storage_bytes);
	}
}

/* While members have much of it already, from the middle of a list or slab on. */
static void test_late(void **state)
{
	(void)state;
	for (size_t at = 1; at < 50; at += 12) {
		struct guest guest = {0};
		struct tnd_load_stats stats;
		struct node node;

		open_node(&node, NULL);
		node.gate = at;
		start_members(&node);
		pthread_mutex_lock(&node.lock);
		while (node.at < at)
			pthread_cond_wait(&node.moved, &node.lock);
		pthread_mutex_unlock(&node.lock);
		open_guest(&guest, make_plan(checkpoint, 2, 0, &small),
			   tnd_share_address(node.share));
		start_guest(&guest);
		open_gate(&node);
		free(end_node(&node, &stats));
		pthread_join(guest.thread, NULL);
		end_guest(&guest);
		tnd_share_close(node.share);
	}
}

/* After the end, where nobody listens, with no address at all, and with one that is none. */
static void test_nobody(void **state)
{
	static const char *const addresses[] = {NULL, NULL, "unix:@tundish-test-nobody",
						"nonsense"};
	struct tnd_load_stats stats;
	struct node node;

	(void)state;
	open_node(&node, NULL);
	start_members(&node);
	free(end_node(&node, &stats));
	for (size_t i = 0; i < 4; i++) {
		struct guest guest = {0};

		open_guest(&guest, make_plan(checkpoint, 2, 0, &small),
			   i == 0 ? tnd_share_address(node.share) : addresses[i]);
		run_to_end(&guest);
		assert_true(guest.stats.storage_bytes >= guest.stats.total_bytes / 2);
	}
	tnd_share_close(node.share);
}

/* The reader's members never come: the guest does not wait for them with it. */
static void test_stuck(void **state)
{
	struct tnd_share_opts share = {.struct_bytes = sizeof(share), .meet_ns = -1};
	struct guest guest = {.opts.deadline_ns = tnd_deadline_in(DEADLINE_NS)};
	struct node node;

	(void)state;
	open_node(&node, &share);
	open_guest(&guest, make_plan(checkpoint, 2, 0, &small), tnd_share_address(node.share));
	run_to_end(&guest);
	tnd_share_close(node.share);
}

/* The reader fails, and tells its members: the guest goes on. */
static void test_reader_cancelled(void **state)
{
	struct guest guest = {.each_ns = 1000000};
	struct node node;

	(void)state;
	open_node(&node, NULL);
	node.gate = 20;
	open_guest(&guest, make_plan(checkpoint, 2, 0, &small), tnd_share_address(node.share));
	start_guest(&guest);
	start_members(&node);
	pthread_mutex_lock(&node.lock);
	while (node.at < node.gate)
		pthread_cond_wait(&node.moved, &node.lock);
	pthread_mutex_unlock(&node.lock);
	tnd_share_cancel(node.share);
	open_gate(&node);
	for (int i = 0; i < 2; i++)
		pthread_join(node.threads[i], NULL);
	tnd_share_close(node.share);
	pthread_join(guest.thread, NULL);
	end_guest(&guest);
}

/* Other files of the same shapes: nothing of them is taken. */
static void test_other_files(void **state)
{
	struct guest guest = {0};
	struct tnd_load_stats stats;
	struct node node;

	(void)state;
	open_node(&node, NULL);
	open_guest(&guest, make_plan(other_checkpoint, 2, 0, &small),
		   tnd_share_address(node.share));
	start_guest(&guest);
	start_members(&node);
	free(end_node(&node, &stats));
	pthread_join(guest.thread, NULL);
	assert_true(guest.stats.storage_bytes >= guest.stats.total_bytes);
	end_guest(&guest);
	tnd_share_close(node.share);
}

/* -- what it takes -- */

static void load_as(const struct tnd_plan_opts *plan, uint32_t tp, struct guest *guest)
{
	struct tnd_load_stats stats;
	struct node node;

	open_node(&node, NULL);
	open_guest(guest, make_plan(checkpoint, tp, tp - 1, plan), tnd_share_address(node.share));
	start_guest(guest);
	start_members(&node);
	free(end_node(&node, &stats));
	pthread_join(guest->thread, NULL);
	end_guest(guest);
	tnd_share_close(node.share);
}

/* Another layout, whole tensors, only some names, other packings, alignment and slabs, own delivery. */
static void test_plans(void **state)
{
	static const char *const names[] = {"*.1.*", "*norm*"};
	static const uint32_t flags[] = {0, TND_LOAD_F_OWN, TND_LOAD_F_SHARED_SLABS};
	struct tnd_plan_opts opts;

	(void)state;
	for (uint32_t i = 0; i < 24; i++) {
		struct guest guest = {.opts.flags = flags[i % 3]};

		opts = small;
		opts.packing = i / 3 % 2 ? TND_PACKING_FILE : TND_PACKING_NAME;
		opts.align = i % 4 == 1 ? 4096 : 0;
		opts.slab_bytes = i % 5 == 2 ? TND_SLAB_NONE : i % 5 == 3 ? 4 << 20 : 1 << 20;
		if (i % 8 == 4)
			opts.slice = TND_SLICE_NONE;
		if (i % 8 == 6) {
			opts.flags = TND_PLAN_F_NAMES;
			opts.names = names;
			opts.name_count = 2;
		}
		load_as(&opts, 1u << i % 3, &guest);
	}
}

/* Pieces do not pass whole: they are read. */
static void test_pieces(void **state)
{
	struct tnd_plan_opts opts = small;

	(void)state;
	opts.slice = TND_SLICE_NONE;
	opts.oversize = TND_OVERSIZE_PIECES;
	for (uint64_t budget = 2; budget <= 6; budget += 2) {
		struct guest guest = {.opts.flags = budget == 4 ? TND_LOAD_F_OWN : 0};

		opts.budget_bytes = budget << 20;
		opts.slab_bytes = 0;
		load_as(&opts, 1, &guest);
	}
}

/* An account so small that few slabs fit, or none: charged is never more than there is. */
static void test_small_budgets(void **state)
{
	struct tnd_plan_opts opts = small;

	(void)state;
	opts.slice = TND_SLICE_NONE;
	for (uint64_t more = 0; more < 4; more++) {
		struct tnd_plan *plan = make_plan(checkpoint, 1, 0, &opts);
		struct tnd_plan_totals totals = {.struct_bytes = sizeof(totals)};
		struct guest guest = {0};

		assert_int_equal(tnd_plan_totals(plan, &totals), 0);
		tnd_plan_close(plan);
		opts.budget_bytes = totals.least_budget_bytes + more * (256 << 10);
		load_as(&opts, 1, &guest);
		assert_true(guest.stats.peak_charged_bytes <= opts.budget_bytes);
		opts.budget_bytes = small.budget_bytes;
	}
}

/* What a guest writes into its views nobody else sees. */
static void test_writes(void **state)
{
	struct guest guest = {.opts.flags = TND_LOAD_F_WRITABLE, .writes = true};

	(void)state;
	load_as(&small, 2, &guest);
}

/* The caller's memory, which it finds by the item. */
static unsigned char placed[ITEMS_MAX][1 << 19];

static void *place(void *arg, const struct tnd_plan_item *item)
{
	size_t count, index = (size_t)(item - tnd_plan_items(arg, &count));

	assert_true(index < count && index < ITEMS_MAX);
	return placed[index];
}

static void test_placed(void **state)
{
	struct tnd_plan *plan = make_plan(checkpoint, 2, 0, &small);
	struct guest guest = {.opts.flags = TND_LOAD_F_OWN,
			      .opts.place = place,
			      .opts.place_arg = plan,
			      .each_ns = 500000,
			      .keeps = true};
	struct tnd_load_stats stats;
	struct node node;

	(void)state;
	open_node(&node, NULL);
	open_guest(&guest, plan, tnd_share_address(node.share));
	start_guest(&guest);
	start_members(&node);
	free(end_node(&node, &stats));
	pthread_join(guest.thread, NULL);
	for (size_t i = 0; i < guest.view_count; i++) {
		assert_true(!guest.views[i].bytes ||
			    guest.views[i].data == placed[guest.views[i].item]);
		check_view(plan, &guest.views[i]);
		tnd_view_release(&guest.views[i]);
	}
	end_guest(&guest);
	tnd_share_close(node.share);
}

/* -- pace -- */

/* One that is slow is let go; nobody has waited for it for long, and it gets everything. */
static void test_slow(void **state)
{
	struct guest guest = {.each_ns = 15000000};
	struct tnd_load_stats stats;
	struct node node;
	char *text;

	(void)state;
	open_node(&node, NULL);
	open_guest(&guest, make_plan(checkpoint, 2, 0, &small), tnd_share_address(node.share));
	start_guest(&guest);
	start_members(&node);
	text = end_node(&node, &stats);
	assert_null(strstr(text, "\"guests_let_go\":0"));
	free(text);
	pthread_join(guest.thread, NULL);
	/* It took above 1.6 s over its views. */
	assert_true(guest.stats.elapsed_ns > UINT64_C(1500000000));
	assert_true(stats.elapsed_ns < guest.stats.elapsed_ns);
	end_guest(&guest);
	tnd_share_close(node.share);
}

static struct tnd_plan *two_names_plan(const char *first, const char *last)
{
	const char *const names[] = {first, last};
	struct tnd_plan_opts opts = small;

	opts.flags = TND_PLAN_F_NAMES;
	opts.names = names;
	opts.name_count = 2;
	return make_plan(checkpoint, 2, 0, &opts);
}

/*
 * One that stops taking anything, before a slab or before the very end of the stream, and has
 * nothing in its hands: the reader ends without it.
 */
static void test_idle(void **state)
{
	struct tnd_plan *whole = make_plan(checkpoint, 2, 0, &small);
	const struct tnd_plan_item *items;
	struct tnd_load_stats stats;
	struct tnd_view view;
	struct node node;
	size_t count;

	(void)state;
	items = tnd_plan_items(whole, &count);
	while (!items[count - 1].kept_bytes)
		count--;
	for (int views = 0; views < 2; views++) {
		struct guest guest = {0};

		open_node(&node, NULL);
		node.gate = 30;
		start_members(&node);
		pthread_mutex_lock(&node.lock);
		while (node.at < node.gate)
			pthread_cond_wait(&node.moved, &node.lock);
		pthread_mutex_unlock(&node.lock);
		/* The first has passed, the last is yet to come. */
		open_guest(&guest,
			   two_names_plan(items[1].tensor->name, items[count - 1].tensor->name),
			   tnd_share_address(node.share));
		open_gate(&node);
		if (views) {
			assert_int_equal(tnd_load_next(guest.load, &view, &guest.error), 1);
			take_view(&guest, &view);
		}
		free(end_node(&node, &stats));
		run_to_end(&guest);
		tnd_share_close(node.share);
	}
	tnd_plan_close(whole);
}

/* -- views that are kept -- */

/* They keep their bytes when the guest leaves the channel, its load ends, and the reader ends. */
static void test_keeps(void **state)
{
	static const uint32_t on_full[] = {TND_ON_FULL_COPY, TND_ON_FULL_OVERRUN};

	(void)state;
	for (size_t i = 0; i < 4; i++) {
		struct guest guest = {.keeps = true, .opts.on_full = on_full[i % 2]};
		struct tnd_plan *plan = make_plan(checkpoint, 2, 0, &small);
		struct tnd_load_stats stats;
		struct node node;

		open_node(&node, NULL);
		open_guest(&guest, plan, tnd_share_address(node.share));
		tnd__plan_ref(plan);
		guest.each_ns = i / 2 * 5000000;
		start_guest(&guest);
		start_members(&node);
		free(end_node(&node, &stats));
		tnd_share_close(node.share);
		pthread_join(guest.thread, NULL);
		guest.stats.overruns = 0;
		end_guest(&guest);
		for (size_t v = 0; v < guest.view_count; v++) {
			check_view(plan, &guest.views[v]);
			tnd_view_release(&guest.views[v]);
		}
		tnd_plan_close(plan);
	}
}

/* Views of the first phase that are still out are escapes in the end. */
static void test_escapes(void **state)
{
	struct tnd_plan_opts opts = small;
	struct guest guest = {0};
	struct tnd_load_stats stats;
	struct tnd_view kept;
	struct node node;
	char name[64];
	int rc;

	(void)state;
	opts.phase = TND_PHASE_TARGET;
	opts.budget_bytes = 64u << 20;
	open_node(&node, NULL);
	open_guest(&guest, make_plan(checkpoint, 2, 0, &opts), tnd_share_address(node.share));
	start_members(&node);
	assert_int_equal(tnd_load_next(guest.load, &kept, &guest.error), 1);
	snprintf(name, sizeof(name), "%s", kept.name);
	guest.got[kept.item] = kept.bytes;
	guest.seen[kept.item] = true;
	run_guest(&guest);
	free(end_node(&node, &stats));
	rc = guest.code;
	if (kept.bytes) {
		assert_int_equal(rc, TND_E_ESCAPED);
		assert_non_null(strstr(guest.error.message, name));
		assert_int_equal(guest.stats.live, 1);
	}
	check_view(guest.plan, &kept);
	tnd_view_release(&kept);
	guest.code = 0;
	end_guest(&guest);
	tnd_share_close(node.share);
}

/* -- ends -- */

static int cancel_after(void *arg, const struct tnd_progress *progress)
{
	return progress->done_bytes >= *(const uint64_t *)arg;
}

/* Cancelled before anything has come, in the middle of what comes, or by itself; closed half way. */
static void test_cancelled(void **state)
{
	static uint64_t limits[] = {0, 1, 2 << 20, 4 << 20};

	(void)state;
	for (size_t i = 0; i < 5; i++) {
		struct guest guest = {.each_ns = 4000000};
		struct tnd_load_stats stats;
		struct node node;

		if (i < 4) {
			guest.opts.progress = cancel_after;
			guest.opts.progress_arg = &limits[i];
		} else {
			guest.most = 9;
		}
		open_node(&node, NULL);
		open_guest(&guest, make_plan(checkpoint, 2, 0, &small),
			   tnd_share_address(node.share));
		start_guest(&guest);
		start_members(&node);
		pthread_join(guest.thread, NULL);
		tnd_load_close(guest.load);
		tnd_plan_close(guest.plan);
		free(end_node(&node, &stats));
		tnd_share_close(node.share);
		assert_int_equal(guest.code, i < 4 ? TND_E_CANCELLED : 0);
	}
}

/* A deadline that has passed is the guest's own affair. */
static void test_deadline(void **state)
{
	struct tnd_share_opts share = {.struct_bytes = sizeof(share), .meet_ns = -1};
	struct guest guest = {.opts.deadline_ns = tnd_deadline_in(100000000)};
	struct node node;

	(void)state;
	open_node(&node, &share);
	open_guest(&guest, make_plan(checkpoint, 2, 0, &small), tnd_share_address(node.share));
	run_guest(&guest);
	assert_int_equal(guest.code, TND_E_DEADLINE);
	tnd_load_close(guest.load);
	tnd_plan_close(guest.plan);
	tnd_share_close(node.share);
}

/* As many guests as there are places, and more; again and again: nothing stays behind. */
static void test_many(void **state)
{
	unsigned int fds = 0, threads = 0;

	(void)state;
	for (int round = 0; round < 50; round++) {
		struct guest guests[3];
		struct tnd_load_stats stats;
		struct node node;

		memset(guests, 0, sizeof(guests));
		open_node(&node, NULL);
		for (int i = 0; i < 3; i++) {
			guests[i].most = i == 2 ? 5 : 0;
			open_guest(&guests[i], make_plan(checkpoint, 2, 0, &small),
				   tnd_share_address(node.share));
			start_guest(&guests[i]);
		}
		start_members(&node);
		free(end_node(&node, &stats));
		for (int i = 0; i < 3; i++) {
			pthread_join(guests[i].thread, NULL);
			if (i < 2) {
				end_guest(&guests[i]);
				continue;
			}
			tnd_load_close(guests[i].load);
			tnd_plan_close(guests[i].plan);
		}
		tnd_share_close(node.share);
		if (round == 0) {
			fds = fd_count();
			threads = thread_count();
		}
	}
	assert_int_equal(fd_count(), fds);
	assert_int_equal(thread_count(), threads);
}

static void test_no_place(void **state)
{
	struct guest *guests = calloc(TND_SHARE_GUESTS_MAX + 2, sizeof(*guests));
	struct tnd_load_stats stats;
	struct node node;

	(void)state;
	open_node(&node, NULL);
	for (int i = 0; i < TND_SHARE_GUESTS_MAX + 2; i++) {
		open_guest(&guests[i], make_plan(checkpoint, 2, 0, &small),
			   tnd_share_address(node.share));
		start_guest(&guests[i]);
	}
	start_members(&node);
	free(end_node(&node, &stats));
	for (int i = 0; i < TND_SHARE_GUESTS_MAX + 2; i++) {
		pthread_join(guests[i].thread, NULL);
		end_guest(&guests[i]);
	}
	tnd_share_close(node.share);
	free(guests);
}

/* -- faults -- */

/* Memory that runs out anywhere in a guest's way: it ends with that, or goes on; nothing stays. */
static void test_no_memory(void **state)
{
	static const char *const points[] = {"load.alloc",   "mem.alloc",  "channel.alloc",
					     "channel.hold", "plan.alloc", "load.thread"};
	unsigned int before = fd_count();

	(void)state;
	for (size_t p = 0; p < sizeof(points) / sizeof(*points); p++)
		for (int n = 1; n <= 24; n += 1 + n / 6) {
			struct tnd_share_opts share = {.struct_bytes = sizeof(share),
						       .on_dead = TND_SHARE_DEAD_CONTINUE,
						       .meet_ns = 200000000};
			struct tnd_plan *plan = make_plan(checkpoint, 2, 0, &small);
			struct guest guest = {.opts = {.struct_bytes = sizeof(guest.opts),
						       .flags = TND_LOAD_F_GUEST}};
			struct node node;
			char text[64];

			open_node(&node, &share);
			guest.opts.share = tnd_share_address(node.share);
			guest.opts.engine = ENGINE;
			guest.plan = plan;
			snprintf(text, sizeof(text), "%s=ENOMEM@%dx1", points[p], n);
			start_members(&node);
			tnd__failpoints_set(text);
			guest.code = tnd_load_open(plan, &guest.opts, &guest.load, &guest.error);
			if (guest.code == 0) {
				run_guest(&guest);
				tnd_load_close(guest.load);
			}
			tnd__failpoints_set(NULL);
			if (guest.code < 0 && guest.code != -ENOMEM)
				fail_msg("%s: %s", text, guest.error.message);
			for (int i = 0; i < 2; i++)
				pthread_join(node.threads[i], NULL);
			tnd_share_close(node.share);
			tnd_plan_close(plan);
		}
	assert_int_equal(fd_count(), before);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_early),
		cmocka_unit_test(test_late),
		cmocka_unit_test(test_nobody),
		cmocka_unit_test(test_stuck),
		cmocka_unit_test(test_reader_cancelled),
		cmocka_unit_test(test_other_files),
		cmocka_unit_test(test_plans),
		cmocka_unit_test(test_pieces),
		cmocka_unit_test(test_small_budgets),
		cmocka_unit_test(test_writes),
		cmocka_unit_test(test_placed),
		cmocka_unit_test(test_slow),
		cmocka_unit_test(test_idle),
		cmocka_unit_test(test_keeps),
		cmocka_unit_test(test_escapes),
		cmocka_unit_test(test_cancelled),
		cmocka_unit_test(test_deadline),
		cmocka_unit_test(test_many),
		cmocka_unit_test(test_no_place),
		cmocka_unit_test(test_no_memory),
	};

	if (argc > 1)
		cmocka_set_test_filter(argv[1]);
	return cmocka_run_group_tests(tests, make_folders, drop_folders);
}
