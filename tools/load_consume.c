/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load_consume.c - the consumer of a rank: what it does with each view
 *
 * It drops each view at once, as an upload to a device would. With --keep tensors are delivered
 * into one mapping of its own, each at the next multiple of 64 bytes. Checksums and trace events
 * are taken on the way.
 */
#include "load_parts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <xxhash.h>

#define PAGE ((size_t)4096)
#define PLACE_ALIGN ((size_t)64)

static size_t round_up(size_t bytes)
{
	return (bytes + PLACE_ALIGN - 1) & ~(PLACE_ALIGN - 1);
}

/*
 * Told when the place is given, as the library tells of memory that it makes for a tensor: a sample
 * in the midst of the copy then sees too little of it, and never takes it for the load's own.
 * Memory that was touched before the load has never been part of its growth.
 */
void *load_consume_place(void *arg, const struct tnd_plan_item *item)
{
	struct load_child *child = arg;
	size_t place = round_up(child->kept_used);

	if (place > child->kept_bytes || item->slice_bytes > child->kept_bytes - place)
		return NULL;
	child->kept_used = place + item->slice_bytes;
	if (!child->command->keep_touched)
		tnd_load_consumer_bytes(child->load, (int64_t)item->slice_bytes);
	return child->kept + place;
}

static void sum(struct load_child *child, const struct tnd_view *view)
{
	const void *data = view->data ? view->data : "";
	struct load_sum *entry;
	uint64_t hash;

	if (!(view->flags & TND_VIEW_F_PIECE)) {
		hash = XXH3_64bits(data, view->bytes);
	} else {
		if (view->piece_offset == 0)
			XXH3_64bits_reset(child->hash);
		XXH3_64bits_update(child->hash, data, view->bytes);
		if (!(view->flags & TND_VIEW_F_LAST))
			return;
		hash = XXH3_64bits_digest(child->hash);
	}
	entry = &child->sums[child->sum_count++];
	entry->tensor = tnd_plan_items(child->plan, &(size_t){0})[view->item].tensor;
	entry->bytes = view->tensor_bytes;
	entry->hash = hash;
}

/* All views of the load. Return: 0, or its error. */
int load_consume(struct load_child *child, struct tnd_error *error)
{
	struct tnd_view view;
	int64_t before = 0, after = 0;
	int code;

	for (;;) {
		before = child->trace ? tool_now_ns() : 0;
		code = tnd_load_next(child->load, &view, error);
		if (code <= 0)
			return code;
		after = child->trace ? tool_now_ns() : 0;
		if (child->sums)
			sum(child, &view);
		if (child->trace) {
			int64_t base = child->start_ns;

			load_trace_event(child->trace, "wait", &view, child->rank->rank,
					 (before - base) / 1000, (after - base) / 1000);
			load_trace_event(child->trace, "consume", &view, child->rank->rank,
					 (after - base) / 1000, (tool_now_ns() - base) / 1000);
		}
		tnd_view_release(&view);
	}
}

/* -- before and after -- */

/* Bytes that the kept tensors take, each at its place. */
static size_t kept_size(const struct tnd_plan *plan)
{
	size_t count, bytes = 0;
	const struct tnd_plan_item *items = tnd_plan_items(plan, &count);

	for (size_t i = 0; i < count; i++)
		if (items[i].piece_offset == 0)
			bytes = round_up(bytes) + items[i].slice_bytes;
	return bytes;
}

static int prepare_kept(struct load_child *child, struct tnd_error *error)
{
	size_t bytes = kept_size(child->plan);
	void *memory;

	if (!bytes)
		return 0;
	memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (memory == MAP_FAILED) {
		snprintf(error->message, sizeof(error->message),
			 "--keep: expected %zu bytes of memory for the tensors of rank %u, found: "
			 "%s; raise the limit or load without --keep",
			 bytes, child->rank->rank, strerror(errno));
		return -ENOMEM;
	}
	child->kept = memory;
	child->kept_bytes = bytes;
	madvise(child->kept, child->kept_bytes, MADV_HUGEPAGE);
	for (size_t at = 0; child->command->keep_touched && at < bytes; at += PAGE)
		((volatile char *)memory)[at] = 0;
	return 0;
}

int load_consume_prepare(struct load_child *child, struct tnd_error *error)
{
	struct tnd_plan_totals totals = {.struct_bytes = sizeof(totals)};
	int code = child->command->keep ? prepare_kept(child, error) : 0;

	if (code != 0)
		return code;
	tnd_plan_totals(child->plan, &totals);
	if (child->rank->checksum_fd >= 0) {
		child->sums = calloc(totals.tensors + 1, sizeof(*child->sums));
		child->hash = XXH3_createState();
		if (!child->sums || !child->hash)
			return -ENOMEM;
	}
	if (child->rank->trace_fd >= 0) {
		child->trace = fdopen(child->rank->trace_fd, "w");
		if (!child->trace)
			return -ENOMEM;
	}
	return 0;
}

static int fail_lines(const struct load_child *child, int code, const char *path,
		      struct tnd_error *error)
{
	error->rank = -1;
	snprintf(error->message, sizeof(error->message),
		 "%s: expected to write the lines of rank %u, found: %s; make room or raise the "
		 "limit on a file's size (ulimit -f)",
		 path, child->rank->rank, tnd_strerror(code));
	return code;
}

int load_consume_finish(struct load_child *child, int code, struct tnd_error *error)
{
	const struct load_command *command = child->command;

	if (code == 0 && child->sums) {
		code = load_sums_write(child->sums, child->sum_count, child->rank->rank,
				       child->rank->checksum_fd);
		if (code != 0)
			fail_lines(child, code, command->checksum_path, error);
	}
	if (child->trace && fclose(child->trace) != 0 && code == 0)
		code = fail_lines(child, -errno, command->trace_path, error);
	return code;
}
