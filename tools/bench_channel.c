/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_channel.c - the writer and the readers of `tundish bench channel`
 *
 * An object is its number, the time just before it was sent, and a pattern that depends on number
 * and position:
 *
 *   +--------+------------+--------------------------------------------+
 *   | number | sent at ns | (number + 1) * A + i * B, in words of 8 B   |
 *   +--------+------------+--------------------------------------------+
 *
 * Readers check all of it: an object that was overwritten, cut, mixed with another one, lost or
 * delivered twice does not pass. The pattern is sums only, so that making and checking it costs
 * about as much as copying it.
 *
 * With a rate, the writer sleeps until an object's time. The time in the object is when it was
 * sent: latencies are the channel's own, and not those of the timer.
 */
#include "bench.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PATTERN_A UINT64_C(0x9e3779b97f4a7c15)
#define PATTERN_B UINT64_C(0xc2b2ae3d27d4eb4f)

/* -- contents -- */

static void fill(unsigned char *object, uint64_t bytes, uint64_t number)
{
	uint64_t value = (number + 1) * PATTERN_A, at = BENCH_BYTES_LEAST;

	for (; at + 8 <= bytes; at += 8) {
		memcpy(object + at, &value, 8);
		value += PATTERN_B;
	}
	memcpy(object + at, &value, bytes - at);
}

static bool matches(const unsigned char *object, uint64_t bytes, uint64_t number)
{
	uint64_t value = (number + 1) * PATTERN_A, at = BENCH_BYTES_LEAST, word, wrong = 0;

	for (; at + 8 <= bytes; at += 8) {
		memcpy(&word, object + at, 8);
		wrong |= word ^ value;
		value += PATTERN_B;
	}
	return wrong == 0 && memcmp(object + at, &value, bytes - at) == 0;
}

/* -- writer -- */

static void wait_for_turn(const struct bench_options *options, int64_t begin_ns, uint64_t number)
{
	double at = (double)begin_ns + (double)number * 1e9 / (double)options->rate;
	int64_t ns = (int64_t)at;
	struct timespec time = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL) == EINTR)
		;
}

static int send_all(const struct bench_run *run, struct tnd_channel *channel, unsigned char *object,
		    struct bench_result *result)
{
	const struct bench_options *options = run->options;
	int rc = 0;

	result->begin_ns = tool_now_ns();
	for (uint64_t number = 0; rc == 0 && number < options->objects; number++) {
		int64_t now;

		fill(object, options->bytes, number);
		if (options->rate)
			wait_for_turn(options, result->begin_ns, number);
		now = tool_now_ns();
		memcpy(object, &number, 8);
		memcpy(object + 8, &now, 8);
		rc = tnd_channel_send(channel, object, options->bytes, run->deadline_ns,
				      &result->error);
	}
	if (rc == 0)
		rc = tnd_channel_drain(channel, run->deadline_ns, &result->error);
	return rc;
}

int bench_write(const struct bench_run *run)
{
	const struct bench_options *options = run->options;
	struct bench_result *result = &run->results[0];
	struct tnd_channel_opts opts = {
		.struct_bytes = sizeof(opts),
		.max_bytes = options->max_bytes,
		.max_objects = options->max_objects,
		.reserved_readers = options->readers,
		.name = "bench",
		.address = run->address,
	};
	struct tnd_channel *channel = NULL;
	unsigned char *object = calloc(1, options->bytes);
	int rc = object ? tnd_channel_create(&opts, &channel, &result->error) : -ENOMEM;

	if (rc == 0)
		rc = tnd_channel_ready(channel, run->deadline_ns, &result->error);
	if (rc == 0)
		rc = send_all(run, channel, object, result);
	result->error.code = rc;
	tnd_channel_close(channel);
	free(object);
	return rc;
}

/* -- readers -- */

static void note_latency(struct bench_result *result, int64_t ns)
{
	uint64_t value = ns > 0 ? (uint64_t)ns : 0;
	size_t bucket = value;

	if (value >= 128) {
		unsigned top = 63 - (unsigned)__builtin_clzll(value);

		bucket = 128 + (top - 7) * 64 + (value >> (top - 6) & 63);
	}
	result->latency[bucket]++;
	if (value > result->latency_max_ns)
		result->latency_max_ns = value;
}

/* Counts one object. `next`: the number that should come. Return: the one that should follow. */
static uint64_t judge(const struct bench_options *options, const struct tnd_object *object,
		      uint64_t next, struct bench_result *result)
{
	int64_t now = tool_now_ns(), sent;
	uint64_t number;

	result->received++;
	result->end_ns = now;
	if (object->bytes != options->bytes) {
		result->corrupt++;
		return next + 1;
	}
	memcpy(&number, object->data, 8);
	memcpy(&sent, (const unsigned char *)object->data + 8, 8);
	if (number >= options->objects || number < next || sent > now ||
	    !matches(object->data, object->bytes, number)) {
		result->corrupt++;
		return next + 1;
	}
	note_latency(result, now - sent);
	result->lost += number - next;
	return number + 1;
}

static int read_all(const struct bench_run *run, struct tnd_channel *channel,
		    struct bench_result *result)
{
	struct tnd_object object;
	uint64_t next = 0;
	int rc;

	do {
		rc = tnd_channel_borrow(channel, run->deadline_ns, &object, &result->error);
		if (rc != 0)
			break;
		next = judge(run->options, &object, next, result);
		rc = tnd_channel_release(channel, &object);
	} while (rc == 0);
	if (rc != TND_E_CLOSED)
		return rc;
	if (next < run->options->objects)
		result->lost += run->options->objects - next;
	return 0;
}

int bench_read(const struct bench_run *run, uint32_t rank)
{
	struct tnd_channel_attach_opts opts = {.struct_bytes = sizeof(opts),
					       .deadline_ns = run->deadline_ns};
	struct bench_result *result = &run->results[1 + rank];
	struct tnd_channel *channel = NULL;
	int rc = tnd_channel_attach(run->address, rank, &opts, &channel, &result->error);

	if (rc == 0)
		rc = read_all(run, channel, result);
	result->error.code = rc;
	tnd_channel_close(channel);
	return rc;
}

/* -- figures -- */

/* The largest value of a bucket. */
static uint64_t bucket_top(size_t bucket)
{
	unsigned top;

	if (bucket < 128)
		return bucket;
	top = (unsigned)(bucket - 128) / 64 + 7;
	return (UINT64_C(1) << top) + (((bucket - 128) % 64 + 1) << (top - 6)) - 1;
}

double bench_percentile_us(const struct bench_run *run, double share)
{
	uint64_t total = 0, seen = 0, most = 0;

	for (uint32_t r = 1; r <= run->options->readers; r++) {
		if (run->results[r].latency_max_ns > most)
			most = run->results[r].latency_max_ns;
		for (size_t b = 0; b < BENCH_BUCKETS; b++)
			total += run->results[r].latency[b];
	}
	for (size_t b = 0; b < BENCH_BUCKETS; b++) {
		for (uint32_t r = 1; r <= run->options->readers; r++)
			seen += run->results[r].latency[b];
		if (seen > 0 && (double)seen >= share * (double)total) {
			uint64_t value = bucket_top(b);

			return (double)(value < most ? value : most) / 1e3;
		}
	}
	return 0;
}
