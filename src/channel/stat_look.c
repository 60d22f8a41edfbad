/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stat_look.c - the figures of one channel, from its two segments
 *
 * Order of a look: `published` first, then the cursors. A cursor that has passed it meanwhile means
 * no lag; one that has not gives a lag of that moment at most, so that no look at a busy channel
 * shows more than the limit. The bytes of a lag end at `head_position` and begin at the position in
 * the descriptor of the oldest object held; where that one was overwritten during the look, the
 * look is repeated.
 *
 * Whatever is read was written by some process, buggy ones included, and may change at any time. It
 * is copied once, every figure that is used as a size or an index is checked against the size of
 * the file, and lags and marks are cut to the limits. A segment that makes no sense is left out.
 *
 * Who lives: a process that has the data segment open for writing and whose innermost pid is the
 * header's is the writer. (A forked child of it has the descriptor too, and another pid.) Readers
 * are told dead by the writer; one of whom it says nothing yet is looked up in /proc, if the writer
 * is of our pid namespace, or gone.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "stat_look.h"

#define LOOKS 4 /* until one is taken as it is */

/* -- checks -- */

static bool header_ok(const struct tnd__data_header *header, uint64_t file_bytes)
{
	uint64_t slots = header->slot_count;

	if (header->magic != TND__DATA_MAGIC || header->version != TND__LAYOUT_VERSION ||
	    header->place_count < 1 || header->place_count > TND__PLACES_MAX)
		return false;
	if (header->max_objects < 1 || header->max_objects > slots ||
	    slots > TND_CHANNEL_OBJECTS_MAX || (slots & (slots - 1)) != 0)
		return false;
	if (header->max_bytes < 1 || header->max_bytes > header->arena_bytes ||
	    header->arena_bytes > file_bytes)
		return false;
	return header->descriptor_offset >= TND__HEADER_BYTES &&
	       header->descriptor_offset <= file_bytes &&
	       slots * sizeof(struct tnd__descriptor) <= file_bytes - header->descriptor_offset;
}

static bool control_ok(const struct tnd__control *control, const struct tnd__data_header *header)
{
	return control->magic == TND__CONTROL_MAGIC && control->version == TND__LAYOUT_VERSION &&
	       control->place_count == header->place_count &&
	       memcmp(control->id, header->id, sizeof(control->id)) == 0;
}

/* Reads both segments. Return: false where one is gone or makes no sense. */
static bool take(struct tnd__look *look)
{
	return tnd__window_read(&look->data_window, &look->header, sizeof(look->header), 0) &&
	       header_ok(&look->header, look->scan->sightings[look->data].bytes) &&
	       tnd__window_read(&look->control_window, &look->shared, sizeof(look->shared), 0) &&
	       control_ok(&look->shared, &look->header);
}

/* -- processes -- */

uint32_t tnd__state_of(const struct tnd__process *process)
{
	if (process->state == 'Z' || process->state == 'X')
		return TND_READER_DEAD;
	return process->state == 'T' || process->state == 't' ? TND_READER_STOPPED
							      : TND_READER_ALIVE;
}

static const struct tnd__process *find_writer(const struct tnd__look *look)
{
	size_t count = tnd__scan_run(look->scan, look->data);

	for (size_t i = 0; i < count; i++) {
		const struct tnd__sighting *sighting = &look->scan->sightings[look->data + i];
		const struct tnd__process *process = &look->scan->processes[sighting->process];

		if (sighting->writable &&
		    tnd__innermost_pid(process) == (int32_t)look->header.writer_pid)
			return process;
	}
	return NULL;
}

/* Who has the control segment and is `pid` in some namespace; the innermost is preferred. */
static const struct tnd__process *find_reader(const struct tnd__look *look, int32_t pid)
{
	size_t count = tnd__scan_run(look->scan, look->control);
	const struct tnd__process *found = NULL;

	for (size_t i = 0; i < count; i++) {
		const struct tnd__sighting *sighting = &look->scan->sightings[look->control + i];
		const struct tnd__process *process = &look->scan->processes[sighting->process];

		if (tnd__innermost_pid(process) == pid)
			return process;
		for (uint32_t n = 0; n < process->ns_count; n++)
			if (process->ns_pids[n] == pid)
				found = process;
	}
	return found;
}

/* A process of our pid namespace that is not there any more, or a zombie. */
static bool is_gone(int32_t pid)
{
	int state = tnd__process_state(pid, NULL);

	return state == -ESRCH || state == 'Z' || state == 'X';
}

/* Of a reader that the writer takes for alive. */
static uint32_t live_state(const struct tnd__look *look, const struct tnd__seat *seat,
			   const struct tnd__cursor *cursor)
{
	uint32_t generation = TND__LOAD(seat->generation);
	int32_t pid = (int32_t)TND__LOAD(seat->pid);
	const struct tnd__process *process;

	if (generation != 0 && TND__LOAD(cursor->left) == generation)
		return TND_READER_LEFT;
	if (pid <= 0)
		return TND_READER_ALIVE;
	process = find_reader(look, pid);
	if (process)
		return tnd__state_of(process);
	if (look->writer && look->writer->pid != tnd__innermost_pid(look->writer))
		return TND_READER_ALIVE;
	return is_gone(pid) ? TND_READER_DEAD : TND_READER_ALIVE;
}

/* -- places -- */

/* Bytes from the object `number` to the head. */
static uint64_t lag_bytes(struct tnd__look *look, uint64_t number)
{
	struct tnd__descriptor descriptor;
	uint64_t slot = number & (look->header.slot_count - 1), bytes;

	if (!tnd__window_read(&look->data_window, &descriptor, sizeof(descriptor),
			      look->header.descriptor_offset + slot * sizeof(descriptor)) ||
	    descriptor.number != number) {
		look->torn = true;
		return 0;
	}
	bytes = TND__LOAD(look->shared.head_position) - descriptor.position;
	return TND__MIN(bytes, look->header.max_bytes);
}

static void fill_lag(struct tnd__look *look, uint32_t place, struct tnd_stat_reader *reader)
{
	uint64_t cursor = TND__LOAD(look->shared.places[place].cursor);
	uint64_t lag = TND__LOAD(look->header.published) - cursor;

	if (lag == 0 || lag > UINT64_MAX / 2) /* passed it since */
		return;
	reader->lag_objects = TND__MIN(lag, look->header.max_objects);
	reader->lag_bytes = lag_bytes(look, cursor);
}

static uint64_t blocked_ns(uint64_t past_ns, int64_t since_ns, int64_t now_ns)
{
	bool waits = since_ns > 0 && since_ns < now_ns;

	return tnd__add_capped(past_ns, waits ? (uint64_t)(now_ns - since_ns) : 0);
}

/* Return: false for a place that was never used. */
static bool fill_reader(struct tnd__look *look, uint32_t place, struct tnd_stat_reader *reader)
{
	const struct tnd__seat *seat = &look->header.seats[place];
	const struct tnd__cursor *cursor = &look->shared.places[place];

	*reader = (struct tnd_stat_reader){
		.rank = TND__LOAD(seat->rank),
		.pid = (int32_t)TND__LOAD(seat->pid),
		.sleeping = TND__LOAD(look->shared.sleepers) >> place & 1,
		.waits = TND__LOAD(cursor->waits),
		.wakes = TND__LOAD(cursor->wakes),
		.blocked_ns = blocked_ns(TND__LOAD(cursor->blocked_ns),
					 TND__LOAD(cursor->blocked_since_ns), look->now_ns),
	};
	switch (TND__LOAD(seat->state)) {
	case TND__PLACE_RESERVED:
		reader->state = TND_READER_MISSING;
		fill_lag(look, place, reader);
		break;
	case TND__PLACE_LIVE:
		reader->state = live_state(look, seat, cursor);
		if (reader->state != TND_READER_LEFT)
			fill_lag(look, place, reader);
		break;
	case TND__PLACE_LEFT:
		reader->state = TND_READER_LEFT;
		break;
	case TND__PLACE_DEAD:
		reader->state = TND_READER_DEAD;
		break;
	case TND__PLACE_EVICTED:
		reader->state = TND_READER_EVICTED;
		break;
	default:
		return false;
	}
	return true;
}

static int compare_readers(const void *a, const void *b)
{
	const struct tnd_stat_reader *x = a, *y = b;

	if (x->rank != y->rank)
		return x->rank < y->rank ? -1 : 1;
	return (x->pid > y->pid) - (x->pid < y->pid);
}

/* -- one channel -- */

/* The figures of the look, and its readers into readers[TND__PLACES_MAX]. */
static void fill_channel(struct tnd__look *look, struct tnd_stat_channel *channel,
			 struct tnd_stat_reader *readers)
{
	const struct tnd__data_header *header = &look->header;
	const struct tnd__control *shared = &look->shared;

	*channel = (struct tnd_stat_channel){
		.pid = (int32_t)header->writer_pid,
		.closed = TND__LOAD(header->closed) == TND__CLOSED,
		.max_bytes = header->max_bytes,
		.max_objects = header->max_objects,
		.sent_objects = TND__LOAD(header->published) - header->first_number,
		.sent_bytes = TND__LOAD(shared->sent_bytes),
		.memory_bytes = tnd__add_capped(look->scan->sightings[look->data].bytes,
						look->scan->sightings[look->control].bytes),
		.writer_state = look->writer ? tnd__state_of(look->writer) : TND_READER_DEAD,
		.writer_waits = TND__LOAD(shared->waits),
		.writer_wakes = TND__LOAD(shared->wakes),
		.writer_blocked_ns = blocked_ns(TND__LOAD(shared->blocked_ns),
						TND__LOAD(shared->blocked_since_ns), look->now_ns),
	};
	tnd__printable(header->name, strnlen(header->name, sizeof(header->name)), channel->name,
		       sizeof(channel->name));
	for (uint32_t place = 0; place < header->place_count; place++) {
		struct tnd_stat_reader *reader = &readers[channel->reader_count];

		if (!fill_reader(look, place, reader))
			continue;
		channel->used_objects = TND__MAX(channel->used_objects, reader->lag_objects);
		channel->used_bytes = TND__MAX(channel->used_bytes, reader->lag_bytes);
		channel->reader_count++;
	}
	/* Marks are sampled: what is held now may be above them. */
	channel->high_bytes = TND__MAX(channel->used_bytes,
				       TND__MIN(TND__LOAD(shared->high_bytes), header->max_bytes));
	channel->high_objects =
		TND__MAX(channel->used_objects,
			 TND__MIN(TND__LOAD(shared->high_objects), header->max_objects));
	if (channel->reader_count)
		qsort(readers, channel->reader_count, sizeof(*readers), compare_readers);
}

bool tnd__look(struct tnd__look *look, struct tnd_stat_channel *ret_channel,
	       struct tnd_stat_reader *ret_readers)
{
	look->torn = true;
	for (int i = 0; i < LOOKS && look->torn; i++) {
		if (!take(look))
			return false;
		look->torn = false;
		look->now_ns = tnd__now_ns();
		look->writer = find_writer(look);
		fill_channel(look, ret_channel, ret_readers);
	}
	return true;
}
