/* SPDX-License-Identifier: Apache-2.0 */
/*
 * guestload.c - a guest of a shared load
 *
 * It never makes the reader wait. The reader lets a guest go that is late (patience.c), and writes
 * to nothing that it still holds (channel/bigobject.c): its views stay as they are, become its own
 * when it leaves, and what it had not taken it reads itself. Neither does it wait for the reader
 * for long: one that is stopped, or waits for a member, is left after SILENCE_NS.
 *
 * A slab that came is charged to the guest's own account until its last view is released. What has
 * no room there is not waited for: it is part of the rest.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "channel/bulk.h"
#include "guestload.h"
#include "outlet.h"

#define SILENCE_NS INT64_C(1000000000)
/* Ranks of guests begin here: no member's. */
#define GUEST_RANK UINT32_C(0x40000000)

/* -- open -- */

void tnd__guest_free(struct tnd__guest *guest)
{
	if (!guest)
		return;
	tnd__member_unref(guest->left);
	tnd_plan_close(guest->whole);
	free(guest->map);
	free(guest->queue);
	free(guest->taken);
	free(guest);
}

void tnd__guest_drop(struct tnd_load *load, const char *why)
{
	tnd__log(TND_LOG_INFO, "reading alone instead of as a guest of %s: %s", load->opts.share,
		 why);
	tnd__member_unref(load->member);
	load->member = NULL;
	tnd__guest_free(load->guest);
	load->guest = NULL;
	load->opts.share = NULL;
	tnd__sample_start(load);
}

static uint32_t random_rank(void)
{
	uint32_t bits = 0;

	/* Without it two guests may have one name, and one of them reads alone. */
	if (getrandom(&bits, sizeof(bits), GRND_NONBLOCK) != sizeof(bits))
		bits = (uint32_t)tnd__now_ns();
	return GUEST_RANK + bits % (INT32_MAX - GUEST_RANK);
}

int tnd__guest_open(struct tnd_load *load, struct tnd_error *reterr)
{
	struct tnd__guest *guest =
		tnd__failpoint("load.alloc") < 0 ? NULL : calloc(1, sizeof(*guest));
	struct tnd_error error;
	int rc;

	if (!guest || !(guest->taken = calloc(load->item_count / 8 + 1, 1))) {
		free(guest);
		return tnd__fail_plain(reterr, -ENOMEM, "out of memory for a load");
	}
	load->guest = guest;
	guest->tables_bytes = tnd__plan_rest_bytes(load->plan);
	rc = tnd__member_attach(load, random_rank(), 0, &error);
	if (rc == -ENOMEM) {
		if (reterr)
			*reterr = error;
		return rc;
	}
	if (rc < 0) {
		tnd__guest_drop(load, error.message);
		return 0;
	}
	/* It sees no hello; lists say whose files they are of. */
	load->member->hello.head.files = tnd__files_fingerprint(load->checkpoint);
	/* Everything that is gathered is gathered whole, and its own account bounds what it keeps. */
	load->member->staging_piece = UINT64_MAX;
	load->member->each_bytes = UINT64_MAX / 2;
	return 0;
}

/* -- what comes -- */

bool tnd__guest_charge(struct tnd_load *load, uint64_t bytes)
{
	const struct tnd_charge_opts try = {.struct_bytes = sizeof(try), .flags = TND_CHARGE_F_TRY};

	return tnd_budget_charge(load->budget, bytes, &try) == 0;
}

static bool is_taken(const struct tnd__guest *guest, size_t index)
{
	return guest->taken[index / 8] >> index % 8 & 1;
}

/* The item will not be handed out of this slab. */
static void pass_over(struct tnd__arrival *arrival, uint64_t bytes)
{
	struct tnd__buffer *buffer = arrival->buffer;
	struct tnd__flow *flow = buffer->flow;
	bool last;

	pthread_mutex_lock(&flow->lock);
	last = (buffer->undelivered -= bytes) == 0;
	pthread_mutex_unlock(&flow->lock);
	if (!last)
		return;
	tnd__member_delivered(arrival);
	tnd__buffer_finish(buffer);
}

/* Whether item `index` may come out of this slab: nobody has it yet, and all of it is there. */
static bool wants(const struct tnd_load *load, const struct tnd__arrival *arrival, size_t index)
{
	const struct tnd_plan_item *item = &load->items[index];

	return !(item->flags & TND_ITEM_F_PIECE) && !is_taken(load->guest, index) &&
	       tnd__member_end_in(arrival, item, 0) == item->kept_bytes;
}

static int by_index(const void *left, const void *right)
{
	size_t a = *(const size_t *)left, b = *(const size_t *)right;

	return a < b ? -1 : a > b;
}

int tnd__guest_choose(struct tnd_load *load, struct tnd__arrival *arrival)
{
	struct tnd__guest *guest = load->guest;
	uint64_t bytes = arrival->buffer->undelivered, wanted = 0;
	size_t last = TND__NO_INDEX;
	int rc = tnd__reserve(&guest->queue, &guest->capacity, arrival->count,
			      sizeof(*guest->queue));

	guest->now = arrival;
	guest->queued = guest->next = 0;
	/* Entries of a tensor stand together, in the order of the file. */
	for (size_t e = 0; rc == 0 && e < arrival->count; e++) {
		size_t i = load->plan->first_item[arrival->entries[e].tensor];

		if (i == TND__NO_INDEX || i == last)
			continue;
		last = i;
		if (!wants(load, arrival, i))
			continue;
		guest->queue[guest->queued++] = i;
		wanted += load->items[i].kept_bytes;
	}
	qsort(guest->queue, guest->queued, sizeof(*guest->queue), by_index);
	pass_over(arrival, bytes - wanted);
	if (rc < 0)
		tnd__load_fail(load, rc, NULL, "out of memory for a slab's record");
	return rc;
}

/* A place to gather the item in, if it needs one. Return: 0; -EAGAIN: none now; < 0. */
static int make_stage(struct tnd_load *load, const struct tnd_plan_item *item,
		      const struct tnd__piece *piece)
{
	const struct tnd_charge_opts try = {.struct_bytes = sizeof(try), .flags = TND_CHARGE_F_TRY};
	int rc;

	if (piece->data || (load->opts.flags & TND_LOAD_F_OWN))
		return 0;
	rc = tnd_slab_acquire(load->pool, item->kept_bytes, load->files[item->tensor->file].name,
			      &try, &load->member->stage);
	return rc == TND_E_BUDGET ? -EAGAIN : rc;
}

/* Return: 1; 0: nothing is left of the slab that is here; -ENOMEM. */
static int next_of_slab(struct tnd_load *load, size_t *ret_index, struct tnd__piece *ret_piece)
{
	struct tnd__guest *guest = load->guest;

	while (guest->next < guest->queued) {
		size_t index = guest->queue[guest->next++];
		const struct tnd_plan_item *item = &load->items[index];
		struct tnd__piece piece = {.end = item->kept_bytes};
		int rc;

		tnd__member_fill(load, item, guest->now, &piece);
		rc = make_stage(load, item, &piece);
		if (rc == -EAGAIN) {
			pass_over(guest->now, item->kept_bytes);
			continue;
		}
		if (rc < 0)
			return rc;
		guest->taken[index / 8] |= (unsigned char)(1u << index % 8);
		guest->came_bytes += item->kept_bytes;
		*ret_index = index;
		*ret_piece = piece;
		return 1;
	}
	return 0;
}

/* Return: 0; 1: no more will come; < 0: the load has failed. */
static int pull(struct tnd_load *load)
{
	struct tnd__member *member = load->member;
	int64_t start = tnd__now_ns();
	struct tnd_error error;
	struct tnd_object object;
	int rc;

	for (;;) {
		tnd__check_limits(load);
		rc = tnd__load_error(load, NULL);
		if (rc < 0)
			return rc;
		rc = tnd_channel_borrow(member->channel, tnd__now_ns() + TND__POLL_NS, &object,
					&error);
		if (rc == 0)
			break;
		if (rc == -ETIMEDOUT && tnd__now_ns() - start < SILENCE_NS)
			continue;
		snprintf(load->guest->why, sizeof(load->guest->why), "%s", error.message);
		return 1;
	}
	rc = tnd__member_take(load, &object);
	if (rc < 0 && tnd__load_error(load, NULL) < 0)
		return rc;
	return rc < 0 || member->over;
}

/* -- the rest -- */

static void leave(struct tnd_load *load)
{
	struct tnd__guest *guest = load->guest;

	tnd__member_leave(load);
	pthread_mutex_lock(&load->flow->lock);
	guest->left = load->member;
	load->member = NULL;
	pthread_mutex_unlock(&load->flow->lock);
}

/* Return: 0; the load's error. */
static int go_alone(struct tnd_load *load, struct tnd_error *reterr)
{
	struct tnd__guest *guest = load->guest;
	struct tnd_error error;
	struct tnd_plan *rest;
	int rc;

	tnd__log(TND_LOG_INFO,
		 "%" PRIu64 " of %" PRIu64
		 " bytes came from the reader at %s%s%s; reading the rest",
		 guest->came_bytes, load->totals.kept_bytes, load->opts.share,
		 guest->why[0] ? ": " : "", guest->why);
	rc = tnd__plan_rest(load->plan, guest->taken, &rest, &guest->map);
	if (rc < 0) {
		tnd__load_fail(load, rc, NULL, "out of memory for a plan of what has not come");
		return tnd__load_error(load, reterr);
	}
	guest->whole = load->plan;
	if (tnd__load_start_rest(load, rest, &error) < 0) {
		error.rank = (int32_t)load->rank;
		tnd__load_fail_detail(load, &error);
	}
	return tnd__load_error(load, reterr);
}

/* Return: 1; 0: no more will come, or is needed; < 0: the load has failed. */
static int next_that_comes(struct tnd_load *load, size_t *ret_index, struct tnd__piece *ret_piece)
{
	int rc, over;

	do {
		if (load->next_item == load->item_count)
			return 0;
		tnd__check_limits(load);
		rc = tnd__load_error(load, NULL);
		if (rc == 0)
			rc = next_of_slab(load, ret_index, ret_piece);
		if (rc == -ENOMEM)
			tnd__load_fail(load, rc, NULL, "out of memory for a slice");
		if (rc != 0)
			return rc;
		over = pull(load);
	} while (over == 0);
	return over < 0 ? over : 0;
}

int tnd__guest_piece(struct tnd_load *load, size_t *ret_index, struct tnd__piece *ret_piece,
		     struct tnd_error *reterr)
{
	int64_t start = tnd__now_ns();
	int rc = next_that_comes(load, ret_index, ret_piece);

	pthread_mutex_lock(&load->flow->lock);
	load->stats.storage_wait_ns += (uint64_t)(tnd__now_ns() - start);
	pthread_mutex_unlock(&load->flow->lock);
	if (rc != 0)
		return rc < 0 ? tnd__load_error(load, reterr) : rc;
	leave(load);
	rc = tnd__load_error(load, reterr);
	return rc < 0 || load->next_item == load->item_count ? rc : go_alone(load, reterr);
}

size_t tnd__guest_index(const struct tnd_load *load, size_t index)
{
	return load->guest && load->guest->map ? load->guest->map[index] : index;
}
