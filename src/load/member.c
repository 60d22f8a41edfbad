/* SPDX-License-Identifier: Apache-2.0 */
/*
 * member.c - what comes on the channel of a node's reader: hello, lists, slabs, the end
 *
 * Nothing of it is trusted: lengths, places and tensor numbers are checked against the object that
 * they came in, the slab, and the checkpoint, before any of it is used.
 *
 * Atomics: M1 tnd__member_unref(), acq_rel with itself: the last one frees what all have used.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <tundish/time.h>

#include "channel/bulk.h"
#include "guestload.h"
#include "outlet.h"

#define ATTACH_NS INT64_C(120000000000)
/* The reader's own limit comes first, and says who it waits for. */
#define SILENCE_NS INT64_C(150000000000)
#define FULL_NS INT64_C(200000000)

/* -- life -- */

void tnd__member_unref(struct tnd__member *member)
{
	/* M1: pairs with itself. */
	if (!member || atomic_fetch_sub_explicit(&member->refs, 1, memory_order_acq_rel) != 1)
		return;
	tnd_channel_close(member->channel);
	pthread_mutex_destroy(&member->lock);
	free(member->entries);
	free(member);
}

static void unlink_arrival(struct tnd__arrival *arrival)
{
	struct tnd__arrival **link = &arrival->member->arrivals;

	while (*link != arrival)
		link = &(*link)->next;
	*link = arrival->next;
}

/* Nobody holds the slab any more. From whoever let go last. */
static void arrival_gone(void *arg)
{
	struct tnd__arrival *arrival = arg;
	struct tnd__member *member = arrival->member;

	pthread_mutex_lock(&member->lock);
	unlink_arrival(arrival);
	if (!arrival->kept_base && member->channel)
		tnd_channel_release(member->channel, &arrival->object);
	pthread_mutex_unlock(&member->lock);
	if (arrival->kept_base)
		munmap(arrival->kept_base, arrival->kept_bytes);
	free(arrival->entries);
	free(arrival);
	tnd__member_unref(member);
}

/* -- failing -- */

static int fail_corrupt(struct tnd_load *load, const char *what)
{
	/* A guest goes on alone. */
	if (load->guest) {
		snprintf(load->guest->why, sizeof(load->guest->why),
			 "expected the stream of a working reader, found %s", what);
		return TND_E_CORRUPT;
	}
	tnd__load_fail(load, TND_E_CORRUPT, NULL,
		       "expected the stream of a working reader (process %d), found %s; restart it",
		       (int)load->member->hello.pid, what);
	return TND_E_CORRUPT;
}

/* The channel ended a wait. What the reader said about it says more. */
static int fail_channel(struct tnd_load *load, const struct tnd_error *error)
{
	struct tnd_error told;

	if (tnd__bulk_told(load->member->channel, &told) < 0)
		tnd__load_fail_detail(load, &told);
	else if (error->code == TND_E_PEER_DEAD || error->code == TND_E_CLOSED)
		tnd__load_fail_rank(load, TND_E_PEER_DEAD, -1,
				    "the process that reads for this node (%d) is gone before "
				    "everything was read; look at what it said, and load again",
				    (int)load->member->hello.pid);
	else
		tnd__load_fail_detail(load, error);
	return tnd__load_error(load, NULL);
}

/* -- waiting for an object -- */

static void say_silence(struct tnd_load *load, int64_t idle_ns, const struct tnd_error *error)
{
	struct tnd__flow *flow = load->flow;
	uint64_t views;

	pthread_mutex_lock(&flow->lock);
	views = flow->held_views;
	pthread_mutex_unlock(&flow->lock);
	if (views)
		tnd__fail_full(load,
			       load->opts.on_full == TND_ON_FULL_FAIL ? TND_E_FULL : TND_E_DEADLINE,
			       idle_ns);
	else
		tnd__load_fail(load, TND_E_DEADLINE, NULL, "nothing has come for %.1f s: %s",
			       (double)idle_ns / 1e9, error->message);
}

/* Nothing came for a moment. The load may fail. */
static void look_around(struct tnd_load *load, const struct tnd_error *error)
{
	struct tnd__member *member = load->member;
	int64_t limit = load->opts.stall_ns ? load->opts.stall_ns : SILENCE_NS;
	int64_t idle_ns = tnd__now_ns() - member->idle_since;
	uint64_t held;

	tnd__check_limits(load);
	pthread_mutex_lock(&load->flow->lock);
	held = load->flow->held_bytes;
	pthread_mutex_unlock(&load->flow->lock);
	if (load->opts.on_full == TND_ON_FULL_FAIL && held > member->each_bytes &&
	    idle_ns > FULL_NS)
		tnd__fail_full(load, TND_E_FULL, idle_ns);
	else if (limit > 0 && idle_ns > limit)
		say_silence(load, idle_ns, error);
}

/* Return: 0; the load's error, which is set then. */
static int next_object(struct tnd_load *load, struct tnd_object *ret_object)
{
	struct tnd__member *member = load->member;
	struct tnd_error error = {.rank = -1};
	int rc;

	member->idle_since = tnd__now_ns();
	for (;;) {
		tnd__check_limits(load);
		rc = tnd__load_error(load, NULL);
		if (rc < 0)
			return rc;
		rc = tnd_channel_borrow(member->channel, tnd__now_ns() + TND__POLL_NS, ret_object,
					&error);
		if (rc == 0)
			return 0;
		if (rc != -ETIMEDOUT)
			return fail_channel(load, &error);
		look_around(load, &error);
	}
}

/* -- lists -- */

/*
 * An object of the stream, other than a slab: whether it is one, with `count` records of
 * `record_bytes` behind `struct_bytes`.
 */
static bool well_formed(const struct tnd_object *object, size_t struct_bytes, size_t record_bytes)
{
	const struct tnd__stream_head *head = object->data;

	return object->bytes >= struct_bytes && head->magic == TND__STREAM_MAGIC &&
	       head->version == TND__STREAM_VERSION &&
	       head->count <= TND__STREAM_OBJECT_MAX / sizeof(struct tnd__stream_held) &&
	       object->bytes == struct_bytes + head->count * record_bytes;
}

/* Whether every entry lies in the slab and in its tensor. */
static bool entries_ok(const struct tnd_load *load, const struct tnd__stream_table *table,
		       const struct tnd__stream_entry *entries)
{
	const struct tnd_tensor *tensors;
	size_t count;

	tensors = tnd_checkpoint_tensors(load->checkpoint, &count);
	for (uint32_t i = 0; i < table->head.count; i++) {
		const struct tnd__stream_entry *entry = &entries[i];
		const struct tnd_tensor *tensor = &tensors[entry->tensor];

		if (entry->tensor >= count || tensor->file != table->file || !entry->bytes ||
		    entry->place > table->slab_bytes ||
		    entry->bytes > table->slab_bytes - entry->place ||
		    entry->begin < tensor->offset || entry->bytes > tensor->bytes ||
		    entry->begin - tensor->offset > tensor->bytes - entry->bytes)
			return false;
	}
	return true;
}

static int take_table(struct tnd_load *load, const struct tnd_object *object)
{
	struct tnd__member *member = load->member;
	const struct tnd__stream_table *table = object->data;
	const struct tnd__stream_entry *entries = (const void *)(table + 1);
	bool whole = well_formed(object, sizeof(*table), sizeof(*entries));
	int rc;

	/* A guest may join in the middle of a list. */
	if (whole && load->guest && !table->first && !member->table_open)
		return 0;
	if (!whole || table->head.files != member->hello.head.files ||
	    table->file >= load->file_count ||
	    (!table->first && (!member->table_open || table->slab != member->table.slab)) ||
	    !entries_ok(load, table, entries))
		return fail_corrupt(load, "a list of a slab that cannot be");
	if (table->first)
		member->count = 0;
	rc = tnd__reserve(&member->entries, &member->capacity, member->count + table->head.count,
			  sizeof(*member->entries));
	if (rc < 0) {
		tnd__load_fail(load, rc, NULL, "out of memory for the list of a slab");
		return rc;
	}
	memcpy(member->entries + member->count, entries, table->head.count * sizeof(*entries));
	member->count += table->head.count;
	member->table = *table;
	member->table_open = table->more;
	member->table_whole = !table->more;
	return 0;
}

static int take_end(struct tnd_load *load, const struct tnd_object *object)
{
	struct tnd__member *member = load->member;
	const struct tnd__stream_head *head = object->data;
	const size_t most = sizeof(member->held) / sizeof(*member->held);

	if (!well_formed(object, sizeof(*head), sizeof(*member->held)) || head->count > most)
		return fail_corrupt(load, "an end that cannot be");
	memcpy(member->held, head + 1, head->count * sizeof(*member->held));
	member->held_count = head->count;
	member->over = true;
	return 0;
}

/* -- slabs -- */

static int by_begin(const void *left, const void *right)
{
	const struct tnd__stream_entry *a = left, *b = right;

	return a->begin < b->begin ? -1 : a->begin > b->begin;
}

/* Bytes of the slab that this rank's plan keeps, from item `next_item` on. */
static uint64_t wanted_bytes(const struct tnd_load *load)
{
	const struct tnd__member *member = load->member;
	uint64_t wanted = 0;

	for (size_t e = 0; e < member->count; e++) {
		const struct tnd__stream_entry *entry = &member->entries[e];
		size_t i = load->plan->first_item[entry->tensor];

		if (i == TND__NO_INDEX)
			continue;
		for (const struct tnd_tensor *tensor = load->items[i].tensor;
		     i < load->item_count && load->items[i].tensor == tensor; i++)
			wanted += tnd__slice_kept_before(&load->items[i],
							 entry->begin + entry->bytes) -
				  tnd__slice_kept_before(&load->items[i], entry->begin);
	}
	return wanted;
}

static struct tnd__arrival *arrival_create(struct tnd_load *load, const struct tnd_object *object)
{
	struct tnd__member *member = load->member;
	struct tnd__arrival *arrival =
		tnd__failpoint("load.alloc") < 0 ? NULL : calloc(1, sizeof(*arrival));
	struct tnd__foreign foreign = {.data = (void *)(uintptr_t)object->data,
				       .bytes = object->bytes,
				       .gone = arrival_gone,
				       .arg = arrival,
				       .charged = load->guest ? object->bytes : 0};

	if (!arrival)
		return NULL;
	arrival->member = member;
	arrival->object = *object;
	arrival->file = member->table.file;
	arrival->count = member->count;
	arrival->entries = calloc(member->count + 1, sizeof(*arrival->entries));
	arrival->buffer = calloc(1, sizeof(*arrival->buffer));
	if (!arrival->entries || !arrival->buffer ||
	    tnd__slab_adopt(load->pool, &foreign, load->files[arrival->file].name,
			    &arrival->buffer->slab) < 0) {
		free(arrival->entries);
		free(arrival->buffer);
		free(arrival);
		return NULL;
	}
	memcpy(arrival->entries, member->entries, member->count * sizeof(*arrival->entries));
	qsort(arrival->entries, arrival->count, sizeof(*arrival->entries), by_begin);
	arrival->ours = true;
	return arrival;
}

/* The slab of the list that is whole. Its object is released on failure, too. */
static int take_slab(struct tnd_load *load, const struct tnd_object *object)
{
	struct tnd__member *member = load->member;
	struct tnd__arrival *arrival;
	uint64_t wanted;

	member->table_whole = false;
	if (object->bytes != member->table.slab_bytes) {
		tnd_channel_release(member->channel, object);
		return fail_corrupt(load, "a slab of another size than its list says");
	}
	wanted = wanted_bytes(load);
	if (wanted && load->guest && !tnd__guest_charge(load, object->bytes))
		wanted = 0;
	arrival = wanted ? arrival_create(load, object) : NULL;
	if (!arrival) {
		tnd_channel_release(member->channel, object);
		if (!wanted)
			return 0;
		if (load->guest)
			tnd_budget_refund(load->budget, object->bytes);
		tnd__load_fail(load, -ENOMEM, NULL, "out of memory for a slab's record");
		return -ENOMEM;
	}
	arrival->buffer->flow = load->flow;
	arrival->buffer->data = (unsigned char *)(uintptr_t)object->data;
	arrival->buffer->charge_bytes = object->bytes;
	arrival->buffer->undelivered = wanted;
	arrival->buffer->arrival = arrival;
	tnd__flow_ref(load->flow);
	/* Relaxed, no partner: who takes a reference has one already. */
	atomic_fetch_add_explicit(&member->refs, 1, memory_order_relaxed);
	pthread_mutex_lock(&member->lock);
	arrival->next = member->arrivals;
	member->arrivals = arrival;
	pthread_mutex_unlock(&member->lock);
	return load->guest ? tnd__guest_choose(load, arrival) : 0;
}

/* Something else than a slab. */
static int take_word(struct tnd_load *load, const struct tnd_object *object)
{
	const struct tnd__stream_head *head = object->data;
	uint32_t kind = object->bytes < sizeof(*head) ? 0 : head->kind;

	if (load->guest && kind && head->files != load->member->hello.head.files)
		return fail_corrupt(load, "that of other files");
	if (kind == TND__STREAM_TABLE)
		return take_table(load, object);
	if (kind == TND__STREAM_END)
		return take_end(load, object);
	/* Of a guest that was there before the reader began. */
	if (kind == TND__STREAM_HELLO && load->guest)
		return 0;
	return fail_corrupt(load, "an object of no known kind");
}

int tnd__member_take(struct tnd_load *load, const struct tnd_object *object)
{
	struct tnd__member *member = load->member;
	bool slab = tnd__bulk_is_slab(member->channel, object);
	int rc = 0;

	if (slab && member->table_whole)
		return take_slab(load, object);
	/* The list of a slab may have passed before a guest joined. */
	if (!slab)
		rc = take_word(load, object);
	else if (!load->guest)
		rc = fail_corrupt(load, "a slab without its list");
	tnd_channel_release(member->channel, object);
	return rc;
}

int tnd__member_pull(struct tnd_load *load, struct tnd_error *reterr)
{
	struct tnd_object object;
	int rc = 0;

	if (load->member->over)
		rc = fail_corrupt(load, "its end before all tensors of this rank had come");
	if (rc == 0)
		rc = next_object(load, &object);
	if (rc == 0)
		rc = tnd__member_take(load, &object);
	return rc < 0 ? tnd__load_error(load, reterr) : 0;
}

/* -- open -- */

static int take_hello(struct tnd_load *load, const struct tnd_object *object,
		      struct tnd_error *reterr)
{
	struct tnd__member *member = load->member;

	/* What came before it attached is not there any more. */
	if (object->number)
		return tnd__fail_plain(reterr, TND_E_PLACE,
				       "%s: expected to join before reading went on without rank "
				       "%u, found that it has; load as a guest, or start all over",
				       load->opts.share, load->rank);
	if (!well_formed(object, sizeof(member->hello), 0) ||
	    ((const struct tnd__stream_head *)object->data)->kind != TND__STREAM_HELLO)
		return tnd__fail_plain(reterr, TND_E_CORRUPT,
				       "%s: expected a node's reader of this version, found "
				       "something else; attach to the address of a shared load",
				       load->opts.share);
	memcpy(&member->hello, object->data, sizeof(member->hello));
	if (member->hello.head.files != tnd__files_fingerprint(load->checkpoint))
		return tnd__fail_plain(reterr, TND_E_CHANGED,
				       "%s: expected a reader of the same files, found one that "
				       "reads others, or other versions of them; load the same "
				       "folder in all ranks",
				       load->opts.share);
	if (member->hello.kin != tnd__plan_kin(load->plan) || !member->hello.member_count)
		return tnd__fail_plain(reterr, TND_E_INVALID,
				       "%s: expected the layout and options that the reader was "
				       "started with, found others; give the same to all ranks",
				       load->opts.share);
	if (member->hello.slab_memory > member->hello.slab_reserve)
		member->each_bytes = (member->hello.slab_memory - member->hello.slab_reserve) /
				     member->hello.member_count;
	return 0;
}

int tnd__member_attach(struct tnd_load *load, uint32_t rank, int64_t deadline_ns,
		       struct tnd_error *reterr)
{
	struct tnd__member *member =
		tnd__failpoint("load.alloc") < 0 ? NULL : calloc(1, sizeof(*member));
	struct tnd_channel_attach_opts opts = {
		.struct_bytes = sizeof(opts), .deadline_ns = deadline_ns, .warn_ns = -1};

	if (!member)
		return tnd__fail_plain(reterr, -ENOMEM, "out of memory for a load");
	pthread_mutex_init(&member->lock, NULL);
	atomic_init(&member->refs, 1);
	load->member = member;
	if (load->opts.flags & TND_LOAD_F_WRITABLE)
		opts.flags |= TND_CHANNEL_ATTACH_F_PRIVATE;
	return tnd_channel_attach(load->opts.share, rank, &opts, &member->channel, reterr);
}

int tnd__member_open(struct tnd_load *load, struct tnd_error *reterr)
{
	int64_t deadline_ns =
		load->opts.deadline_ns ? load->opts.deadline_ns : tnd__now_ns() + ATTACH_NS;
	struct tnd_object object;
	int rc = tnd__member_attach(load, load->rank, deadline_ns, reterr);

	if (rc < 0)
		return rc;
	rc = tnd_channel_borrow(load->member->channel, deadline_ns, &object, reterr);
	if (rc < 0) {
		/* Why it ended before it began. */
		int told = tnd__bulk_told(load->member->channel, reterr);

		return told < 0 ? told : rc;
	}
	rc = take_hello(load, &object, reterr);
	tnd_channel_release(load->member->channel, &object);
	return rc;
}

/* -- leaving -- */

/* The first arrival that the load itself still has a hold on; it ends here. */
static bool drop_one(struct tnd__member *member)
{
	struct tnd__arrival *arrival;
	struct tnd__buffer *buffer = NULL;

	pthread_mutex_lock(&member->lock);
	for (arrival = member->arrivals; arrival && !buffer; arrival = arrival->next)
		if (arrival->ours) {
			arrival->ours = false;
			buffer = arrival->buffer;
		}
	pthread_mutex_unlock(&member->lock);
	if (buffer && buffer->slab)
		tnd__buffer_finish(buffer);
	return buffer != NULL;
}

/* Its views keep their bytes, as this process's own. Under lock. Return: 0; -ENOMEM; as keep. */
static int keep(struct tnd__member *member, struct tnd__arrival *arrival)
{
	struct tnd__flow *flow = arrival->buffer->flow;
	const unsigned char *data = arrival->object.data;
	struct tnd__bulk_range *ranges = NULL;
	size_t count = 0, capacity = 0;
	int rc = 0;

	pthread_mutex_lock(&flow->lock);
	for (struct tnd__hold *hold = arrival->buffer->holds; rc == 0 && hold; hold = hold->next) {
		uint64_t begin = (uint64_t)((const unsigned char *)hold->data - data);

		rc = tnd__reserve(&ranges, &capacity, count + 1, sizeof(*ranges));
		if (rc == 0)
			ranges[count++] = (struct tnd__bulk_range){begin, begin + hold->bytes};
	}
	pthread_mutex_unlock(&flow->lock);
	if (rc == 0)
		rc = tnd__bulk_keep(member->channel, &arrival->object, ranges, count,
				    &arrival->kept_base, &arrival->kept_bytes);
	free(ranges);
	return rc;
}

void tnd__member_leave(struct tnd_load *load)
{
	struct tnd__member *member = load->member;
	bool stays = false, spoilt = false;

	if (!member->channel)
		return;
	tnd_slab_release(member->stage);
	member->stage = NULL;
	while (drop_one(member))
		;
	pthread_mutex_lock(&member->lock);
	for (struct tnd__arrival *arrival = member->arrivals; arrival; arrival = arrival->next) {
		int rc = arrival->kept_base ? 0 : keep(member, arrival);

		spoilt |= rc == TND_E_EVICTED;
		stays |= rc < 0 && rc != TND_E_EVICTED;
	}
	/*
	 * Where there is no memory for a copy this reader stays until its last view is released:
	 * it holds the others up, and they say so, but nothing is overwritten under a holder.
	 */
	if (!stays) {
		tnd_channel_close(member->channel);
		member->channel = NULL;
	}
	pthread_mutex_unlock(&member->lock);
	if (spoilt)
		tnd__load_fail(
			load, TND_E_EVICTED, NULL,
			"expected a reader that knows that this process lives, found that it "
			"took it for dead: views that were still held may have changed; load "
			"again");
}
