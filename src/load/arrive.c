/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arrive.c - what comes on the channel of a node's reader: lists, slabs, the end
 *
 * Nothing of it is trusted: it is copied first, and then lengths, places and tensor numbers are
 * checked against the object that they came in, the slab, and the checkpoint, before any is used.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "channel/bulk.h"
#include "guestload.h"
#include "member.h"

/* -- the end of an arrival -- */

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

/* -- lists -- */

bool tnd__stream_read(const struct tnd_object *object, void *ret_struct, size_t struct_bytes,
		      size_t record_bytes)
{
	struct tnd__stream_head head;

	if (object->bytes < struct_bytes)
		return false;
	memcpy(ret_struct, object->data, struct_bytes);
	memcpy(&head, ret_struct, sizeof(head));
	return head.magic == TND__STREAM_MAGIC && head.version == TND__STREAM_VERSION &&
	       head.count <= TND__STREAM_OBJECT_MAX / sizeof(struct tnd__stream_held) &&
	       object->bytes == struct_bytes + head.count * record_bytes;
}

/* Whether every entry lies in the slab and in its tensor. */
static bool entries_ok(const struct tnd_load *load, const struct tnd__stream_table *table,
		       const struct tnd__stream_entry *entries)
{
	const struct tnd_tensor *tensors, *tensor;
	size_t count;

	tensors = tnd_checkpoint_tensors(load->checkpoint, &count);
	for (uint32_t i = 0; i < table->head.count; i++) {
		const struct tnd__stream_entry *entry = &entries[i];

		if (entry->tensor >= count)
			return false;
		tensor = &tensors[entry->tensor];
		if (tensor->file != table->file || !entry->bytes ||
		    entry->place > table->slab_bytes ||
		    entry->bytes > table->slab_bytes - entry->place ||
		    entry->begin < tensor->offset || entry->bytes > tensor->bytes ||
		    entry->begin - tensor->offset > tensor->bytes - entry->bytes)
			return false;
	}
	return true;
}

/* Adds the entries to those that came. Return: 0; the load's error. */
static int add_entries(struct tnd_load *load, const struct tnd__stream_table *table,
		       const void *entries)
{
	struct tnd__member *member = load->member;
	struct tnd__stream_entry *copies;
	int rc = tnd__reserve(&member->entries, &member->capacity,
			      member->count + table->head.count, sizeof(*member->entries));

	if (rc < 0) {
		tnd__load_fail(load, rc, NULL,
			       "expected memory for the list of a slab of %" PRIu32
			       " runs, found none",
			       table->head.count);
		return rc;
	}
	copies = member->entries + member->count;
	memcpy(copies, entries, table->head.count * sizeof(*copies));
	if (!entries_ok(load, table, copies))
		return tnd__member_corrupt(
			load, "a list whose runs lie outside of the slab or their tensors");
	member->count += table->head.count;
	return 0;
}

static int take_table(struct tnd_load *load, const struct tnd_object *object)
{
	struct tnd__member *member = load->member;
	struct tnd__stream_table table;
	int rc;

	if (!tnd__stream_read(object, &table, sizeof(table), sizeof(struct tnd__stream_entry)))
		return tnd__member_corrupt(load, "a list of another length than it says");
	/* A guest may join in the middle of a list. */
	if (load->guest && !table.first && !member->table_open)
		return 0;
	if (table.head.files != member->hello.head.files || table.file >= load->file_count ||
	    (!table.first && (!member->table_open || table.slab != member->table.slab)))
		return tnd__member_corrupt(load, "a list of a slab that cannot be");
	if (table.first)
		member->count = 0;
	rc = add_entries(load, &table, (const struct tnd__stream_table *)object->data + 1);
	if (rc < 0)
		return rc;
	member->table = table;
	member->table_open = table.more;
	member->table_whole = !table.more;
	return 0;
}

static int take_end(struct tnd_load *load, const struct tnd_object *object)
{
	struct tnd__member *member = load->member;
	struct tnd__stream_head head;
	const size_t most = sizeof(member->held) / sizeof(*member->held);

	if (!tnd__stream_read(object, &head, sizeof(head), sizeof(*member->held)) ||
	    head.count > most)
		return tnd__member_corrupt(load, "an end that cannot be");
	memcpy(member->held, (const struct tnd__stream_head *)object->data + 1,
	       head.count * sizeof(*member->held));
	member->held_count = head.count;
	member->over = true;
	return 0;
}

/* -- slabs -- */

static int by_begin(const void *left, const void *right)
{
	const struct tnd__stream_entry *a = left, *b = right;

	return a->begin < b->begin ? -1 : a->begin > b->begin;
}

/* Bytes of the slab that this rank's plan keeps. */
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
	arrival->ours = true;
	return arrival;
}

/* Whether each byte of the file is in one place at most. */
static bool is_clear(struct tnd__member *member)
{
	struct tnd__stream_entry *entries = member->entries;

	qsort(entries, member->count, sizeof(*entries), by_begin);
	for (size_t i = 1; i < member->count; i++)
		if (entries[i - 1].begin + entries[i - 1].bytes > entries[i].begin)
			return false;
	return true;
}

/* The slab of the list that is whole. Its object is released on failure, too. */
static int take_slab(struct tnd_load *load, const struct tnd_object *object)
{
	struct tnd__member *member = load->member;
	struct tnd__arrival *arrival;
	uint64_t wanted;

	member->table_whole = false;
	if (object->bytes != member->table.slab_bytes || !is_clear(member)) {
		tnd_channel_release(member->channel, object);
		return tnd__member_corrupt(load, "a slab that is not as its list says");
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
	struct tnd__stream_head head = {0};
	uint32_t kind;

	if (object->bytes >= sizeof(head))
		memcpy(&head, object->data, sizeof(head));
	kind = head.kind;
	if (load->guest && kind && head.files != load->member->hello.head.files)
		return tnd__member_corrupt(load, "that of other files");
	if (kind == TND__STREAM_TABLE)
		return take_table(load, object);
	if (kind == TND__STREAM_END)
		return take_end(load, object);
	/* Of a guest that was there before the reader began. */
	if (kind == TND__STREAM_HELLO && load->guest)
		return 0;
	return tnd__member_corrupt(load, "an object of no known kind");
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
		rc = tnd__member_corrupt(load, "a slab without its list");
	tnd_channel_release(member->channel, object);
	return rc;
}
