/* SPDX-License-Identifier: Apache-2.0 */
/*
 * traffic.c - streams of objects that writer and readers compute alike
 *
 * Object n of stream `seed` has unit * (low ... high) bytes, and each of its words depends on seed,
 * n and its place: an object that is lost, doubled, out of order, torn or mixed with another is seen.
 * What was sent is overwritten in the sender's buffer at once.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "driver.h"

#define GOLDEN UINT64_C(0x9e3779b97f4a7c15)

struct stream {
	uint64_t seed, unit, low, high;
};

static uint64_t mix(uint64_t x)
{
	x += GOLDEN;
	x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
	return x ^ x >> 31;
}

static struct stream stream_of(const json_t *command)
{
	struct stream stream = {
		.seed = (uint64_t)number_of(command, "seed", 1),
		.unit = (uint64_t)number_of(command, "unit", 1),
		.low = (uint64_t)number_of(command, "low", 8),
	};

	stream.high = (uint64_t)number_of(command, "high", (int64_t)stream.low);
	if (stream.high < stream.low || !stream.unit)
		die("a stream's sizes");
	return stream;
}

static uint64_t bytes_of(const struct stream *stream, uint64_t number)
{
	uint64_t span = stream->high - stream->low + 1;

	return stream->unit * (stream->low + mix(stream->seed ^ ~number) % span);
}

static uint64_t first_word(const struct stream *stream, uint64_t number)
{
	return mix(stream->seed ^ mix(number));
}

static void fill(const struct stream *stream, uint64_t number, void *to, uint64_t bytes)
{
	uint64_t word = first_word(stream, number), at;

	for (at = 0; at + sizeof(word) <= bytes; at += sizeof(word), word += GOLDEN)
		memcpy((char *)to + at, &word, sizeof(word));
	memcpy((char *)to + at, &word, bytes - at);
}

static bool same(const struct stream *stream, uint64_t number, const void *from, uint64_t bytes)
{
	uint64_t word = first_word(stream, number), wrong = 0, found, at;

	if (bytes != bytes_of(stream, number))
		return false;
	for (at = 0; at + sizeof(word) <= bytes; at += sizeof(word), word += GOLDEN) {
		memcpy(&found, (const char *)from + at, sizeof(found));
		wrong |= found ^ word;
	}
	return !wrong && memcmp((const char *)from + at, &word, bytes - at) == 0;
}

/* Up to `most_us`, by chance. */
static void pause_a_little(uint64_t *state, uint64_t most_us)
{
	uint64_t ns;

	if (!most_us)
		return;
	*state = mix(*state);
	ns = *state % (most_us * 1000 + 1);
	nanosleep(&(struct timespec){.tv_sec = (time_t)(ns / 1000000000),
				     .tv_nsec = (long)(ns % 1000000000)},
		  NULL);
}

static int send_reserved(struct tnd_channel *channel, const struct stream *stream, uint64_t number,
			 int64_t deadline_ns, struct tnd_error *error)
{
	uint64_t bytes = bytes_of(stream, number);
	struct tnd_reservation reservation;
	int rc = tnd_channel_reserve(channel, bytes, deadline_ns, &reservation, error);

	if (rc < 0)
		return rc;
	fill(stream, number, reservation.data, bytes);
	return tnd_channel_commit(channel, &reservation, bytes);
}

static int send_copied(struct tnd_channel *channel, const char *how, unsigned char *buffer,
		       uint64_t bytes, int64_t deadline_ns, struct tnd_error *error)
{
	struct iovec pieces[2] = {{buffer, bytes / 3}, {buffer + bytes / 3, bytes - bytes / 3}};

	if (strcmp(how, "sendv") == 0)
		return tnd_channel_sendv(channel, pieces, 2, deadline_ns, error);
	return tnd_channel_send(channel, buffer, bytes, deadline_ns, error);
}

/* "count" objects, until the first error. */
void do_send(const json_t *command, json_t *answer, struct outcome *outcome)
{
	struct handle *handle = handle_of(command);
	struct stream stream = stream_of(command);
	const char *how = text_of(command, "how", "send");
	uint64_t count = (uint64_t)number_of(command, "count", 1), done = 0, sent_bytes = 0;
	uint64_t sleep_us = (uint64_t)number_of(command, "sleep_us", 0), chance = stream.seed;
	int64_t deadline_ns = deadline_of(command);
	unsigned char *buffer = malloc(stream.unit * stream.high + 8);

	if (!buffer)
		die("memory for an object");
	for (; done < count; done++) {
		uint64_t bytes = bytes_of(&stream, handle->next);

		if (strcmp(how, "reserve") == 0) {
			outcome->rc = send_reserved(handle->channel, &stream, handle->next,
						    deadline_ns, &outcome->error);
		} else {
			fill(&stream, handle->next, buffer, bytes);
			outcome->rc = send_copied(handle->channel, how, buffer, bytes, deadline_ns,
						  &outcome->error);
			memset(buffer, 0xee, bytes);
		}
		if (outcome->rc < 0)
			break;
		handle->next++;
		sent_bytes += bytes;
		pause_a_little(&chance, sleep_us);
	}
	free(buffer);
	set_number(answer, "done", done);
	set_number(answer, "bytes", sent_bytes);
}

/* -- receiving -- */

struct taking {
	struct handle *handle;
	struct stream stream;
	unsigned char *buffer;
	uint64_t capacity, hold, bytes, bad;
	int64_t deadline_ns;
	bool borrow;
};

static void hold(struct handle *handle, const struct tnd_object *object)
{
	struct tnd_object *more = realloc(handle->held, (handle->held_count + 1) * sizeof(*more));

	if (!more)
		die("memory for what is held");
	more[handle->held_count++] = *object;
	handle->held = more;
}

static int take_borrowed(struct taking *taking, struct tnd_error *error)
{
	struct handle *handle = taking->handle;
	struct tnd_object object;
	int rc = tnd_channel_borrow(handle->channel, taking->deadline_ns, &object, error);

	if (rc < 0)
		return rc;
	taking->bytes += object.bytes;
	if (object.number != handle->next ||
	    !same(&taking->stream, handle->next, object.data, object.bytes))
		taking->bad++;
	if (taking->hold) {
		taking->hold--;
		hold(handle, &object);
		return 0;
	}
	return tnd_channel_release(handle->channel, &object);
}

static int take_copied(struct taking *taking, struct tnd_error *error)
{
	struct handle *handle = taking->handle;
	uint64_t bytes;
	int rc = tnd_channel_recv(handle->channel, taking->buffer, taking->capacity,
				  taking->deadline_ns, &bytes, error);

	if (rc < 0)
		return rc;
	taking->bytes += bytes;
	if (!same(&taking->stream, handle->next, taking->buffer, bytes))
		taking->bad++;
	return 0;
}

/* "count" objects, until the first error. "hold": so many of them stay borrowed. */
void do_recv(const json_t *command, json_t *answer, struct outcome *outcome)
{
	struct taking taking = {
		.handle = handle_of(command),
		.stream = stream_of(command),
		.hold = (uint64_t)number_of(command, "hold", 0),
		.deadline_ns = deadline_of(command),
	};
	uint64_t count = (uint64_t)number_of(command, "count", 1), done = 0;
	uint64_t sleep_us = (uint64_t)number_of(command, "sleep_us", 0);
	uint64_t chance = taking.stream.seed ^ (uintptr_t)taking.handle->channel;

	taking.borrow = taking.hold || strcmp(text_of(command, "how", "recv"), "borrow") == 0;
	taking.capacity = taking.stream.unit * taking.stream.high;
	taking.buffer = malloc(taking.capacity + 8);
	if (!taking.buffer)
		die("memory for an object");
	taking.handle->next = (uint64_t)number_of(command, "first", (int64_t)taking.handle->next);
	for (; done < count; done++) {
		outcome->rc = taking.borrow ? take_borrowed(&taking, &outcome->error)
					    : take_copied(&taking, &outcome->error);
		if (outcome->rc < 0)
			break;
		taking.handle->next++;
		pause_a_little(&chance, sleep_us);
	}
	free(taking.buffer);
	set_number(answer, "done", done);
	set_number(answer, "bytes", taking.bytes);
	set_number(answer, "bad", taking.bad);
}

/* All that is held, the newest first, or the "oldest". */
void do_release(const json_t *command, json_t *answer, struct outcome *outcome)
{
	struct handle *handle = handle_of(command);
	size_t count = handle->held_count;
	bool oldest = number_of(command, "oldest", 0);

	set_number(answer, "done", count);
	for (size_t i = 0; i < count && outcome->rc == 0; i++)
		outcome->rc = tnd_channel_release(handle->channel,
						  &handle->held[oldest ? i : count - 1 - i]);
	handle->held_count = 0;
}

/* Bytes of the first "count" objects. */
void do_total(const json_t *command, json_t *answer, struct outcome *outcome)
{
	struct stream stream = stream_of(command);
	uint64_t count = (uint64_t)number_of(command, "count", 1), bytes = 0;

	(void)outcome;
	for (uint64_t number = 0; number < count; number++)
		bytes += bytes_of(&stream, number);
	set_number(answer, "bytes", bytes);
}
