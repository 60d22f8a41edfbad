/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ring.c - the ring's rules, with writer and readers in one process on one mapping
 *
 * What could break: an object is lost, torn, doubled, out of order or overwritten under a borrow; a
 * send waits while there is room or does not while there is none; space leaks over aborts, holes,
 * evictions; a size or an offset loops for ever. Shown by a model of the rules beside the ring, by
 * every size at every offset, and by threads that a race detector watches. Each test is run with
 * object numbers that start at 0, and near 2^32 and 2^64 (TUNDISH_CHANNEL_FIRST).
 */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "channel/channel_internal.h"

#define MODEL_MAX 4096

static struct tnd_channel *make(uint64_t max_bytes, uint64_t max_objects, uint32_t open_readers)
{
	struct tnd_channel_opts opts = {.struct_bytes = sizeof(opts),
					.max_bytes = max_bytes,
					.max_objects = max_objects,
					.open_readers = open_readers,
					.name = "ring"};
	struct tnd_error error = {0};
	struct tnd_channel *channel;

	if (tnd_channel_create(&opts, &channel, &error) < 0)
		fail_msg("create: %s", error.message);
	return channel;
}

static struct tnd_channel *join(struct tnd_channel *writer, uint32_t rank)
{
	struct tnd_channel *reader;

	assert_int_equal(tnd__channel_attach_inside(writer, rank, &reader), 0);
	return reader;
}

/* Contents of object `number`: every byte says which object and where in it. */
static void fill(unsigned char *to, uint64_t number, uint64_t bytes)
{
	for (uint64_t i = 0; i < bytes; i++)
		to[i] = (unsigned char)(number * 131 + i * 7 + (i >> 8));
}

static void check_contents(const unsigned char *from, uint64_t number, uint64_t bytes)
{
	for (uint64_t i = 0; i < bytes; i++)
		if (from[i] != (unsigned char)(number * 131 + i * 7 + (i >> 8)))
			fail_msg("object %lu: byte %lu of %lu is wrong", (unsigned long)number,
				 (unsigned long)i, (unsigned long)bytes);
}

static void test_exact_limits(void **state)
{
	struct tnd_channel *writer = make(4096, 8, 1), *reader = join(writer, 0);
	char buffer[4096] = "";
	uint64_t bytes;

	(void)state;
	/* Nobody reads: exactly eight small ones. */
	for (int i = 0; i < 8; i++)
		assert_int_equal(tnd_channel_send(writer, buffer, 1, 0, NULL), 0);
	assert_int_equal(tnd_channel_send(writer, buffer, 0, 0, NULL), -ETIMEDOUT);
	for (int i = 0; i < 8; i++)
		assert_int_equal(tnd_channel_recv(reader, buffer, 4096, 0, &bytes, NULL), 0);
	/* Exactly 64 lines of 64 bytes. */
	assert_int_equal(tnd_channel_send(writer, buffer, 4096 - 64 - 63, 0, NULL), 0);
	assert_int_equal(tnd_channel_send(writer, buffer, 65, 0, NULL), -ETIMEDOUT);
	assert_int_equal(tnd_channel_send(writer, buffer, 64, 0, NULL), 0);
	assert_int_equal(tnd_channel_send(writer, buffer, 1, 0, NULL), -ETIMEDOUT);
	assert_int_equal(tnd_channel_send(writer, buffer, 0, 0, NULL), 0);
	/* Above max_bytes: at once, and the channel goes on. */
	assert_int_equal(tnd_channel_send(writer, buffer, 4097, TND_NO_DEADLINE, NULL), -EMSGSIZE);
	for (int i = 0; i < 3; i++)
		assert_int_equal(tnd_channel_recv(reader, buffer, 4096, 0, &bytes, NULL), 0);
	assert_int_equal(bytes, 0);
	assert_int_equal(tnd_channel_recv(reader, buffer, 4096, 0, &bytes, NULL), -ETIMEDOUT);
	tnd_channel_close(reader);
	tnd_channel_close(writer);
}

static void test_no_reader_drops(void **state)
{
	struct tnd_channel *writer = make(4096, 2, 1), *reader;
	char buffer[8];
	uint64_t bytes;

	(void)state;
	for (int i = 0; i < 1000; i++)
		assert_int_equal(tnd_channel_send(writer, &i, sizeof(i), 0, NULL), 0);
	reader = join(writer, 5);
	assert_int_equal(tnd_channel_send(writer, "late", 5, 0, NULL), 0);
	assert_int_equal(tnd_channel_recv(reader, buffer, 8, 0, &bytes, NULL), 0);
	assert_string_equal(buffer, "late");
	tnd_channel_close(reader);
	/* The place is free again at once. */
	for (int i = 0; i < 10; i++)
		assert_int_equal(tnd_channel_send(writer, &i, sizeof(i), 0, NULL), 0);
	tnd_channel_close(writer);
}

/* Every size from 0 to the capacity and beyond, at every offset of a small ring. */
static void test_sizes_at_offsets(void **state)
{
	static unsigned char in[4200], out[4200];
	static const uint64_t sizes[] = {0,    1,    63,   64,   65,   127,  128,  1000, 2047,
					 2048, 2049, 3000, 4031, 4032, 4033, 4095, 4096, 4097};
	struct tnd_channel *writer = make(4096, 4, 1), *reader = join(writer, 0);
	uint64_t bytes;

	(void)state;
	for (uint64_t offset = 0; offset < 64; offset++) {
		for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
			int rc;

			fill(in, offset + i, sizes[i]);
			rc = tnd_channel_send(writer, in, sizes[i], 0, NULL);
			assert_int_equal(rc, sizes[i] <= 4096 ? 0 : -EMSGSIZE);
			if (rc)
				continue;
			assert_int_equal(tnd_channel_recv(reader, out, 4096, 0, &bytes, NULL), 0);
			assert_int_equal(bytes, sizes[i]);
			check_contents(out, offset + i, bytes);
		}
		/* One line further. */
		assert_int_equal(tnd_channel_send(writer, in, 1, 0, NULL), 0);
		assert_int_equal(tnd_channel_recv(reader, out, 4096, 0, &bytes, NULL), 0);
	}
	tnd_channel_close(reader);
	tnd_channel_close(writer);
}

static void test_recv_buffer_too_small(void **state)
{
	struct tnd_channel *writer = make(4096, 4, 1), *reader = join(writer, 0);
	char buffer[100] = "0123456789";
	uint64_t bytes = 0;

	(void)state;
	assert_int_equal(tnd_channel_send(writer, buffer, 11, 0, NULL), 0);
	assert_int_equal(tnd_channel_recv(reader, buffer, 10, 0, &bytes, NULL), -EMSGSIZE);
	assert_int_equal(bytes, 11);
	assert_int_equal(tnd_channel_recv(reader, buffer, 11, 0, &bytes, NULL), 0);
	assert_string_equal(buffer, "0123456789");
	tnd_channel_close(reader);
	tnd_channel_close(writer);
}

static void test_reservations(void **state)
{
	struct tnd_channel *writer = make(4096, 8, 1), *reader = join(writer, 0);
	struct tnd_reservation a, b, c, d;
	struct tnd_object object;

	(void)state;
	assert_int_equal(tnd_channel_reserve(writer, 1000, 0, &a, NULL), 0);
	assert_int_equal(tnd_channel_reserve(writer, 1000, 0, &b, NULL), 0);
	assert_int_equal(tnd_channel_reserve(writer, 1000, 0, &c, NULL), 0);
	assert_int_equal((uintptr_t)a.data % 64, 0);
	memset(a.data, 'a', 1000);
	memset(b.data, 'b', 1000);
	memset(c.data, 'c', 1000);
	/* In order of reservation, not of commit; nothing of an open one is seen. */
	assert_int_equal(tnd_channel_commit(writer, &c, 7), 0);
	assert_int_equal(tnd_channel_send(writer, "behind", 7, 0, NULL), 0);
	assert_int_equal(tnd_channel_borrow(reader, 0, &object, NULL), -ETIMEDOUT);
	assert_int_equal(tnd_channel_abort(writer, &b), 0);
	assert_int_equal(tnd_channel_commit(writer, &b, 1), TND_E_INVALID);
	assert_int_equal(tnd_channel_commit(writer, &a, 1001), TND_E_INVALID);
	assert_int_equal(tnd_channel_commit(writer, &a, 1000), 0);
	assert_int_equal(tnd_channel_abort(writer, &a), TND_E_INVALID);
	assert_int_equal(tnd_channel_borrow(reader, 0, &object, NULL), 0);
	assert_true(object.bytes == 1000 && *(const char *)object.data == 'a');
	assert_int_equal(tnd_channel_release(reader, &object), 0);
	assert_int_equal(tnd_channel_borrow(reader, 0, &object, NULL), 0);
	assert_true(object.bytes == 7 && *(const char *)object.data == 'c');
	assert_int_equal(tnd_channel_release(reader, &object), 0);
	assert_int_equal(tnd_channel_borrow(reader, 0, &object, NULL), 0);
	assert_string_equal(object.data, "behind");
	assert_int_equal(tnd_channel_release(reader, &object), 0);
	/* All space is back, the aborted one's too; a thousand aborts leak nothing. */
	for (int i = 0; i < 1000; i++) {
		assert_int_equal(tnd_channel_reserve(writer, 4096, 0, &d, NULL), 0);
		assert_int_equal(tnd_channel_abort(writer, &d), 0);
	}
	/* A commit of less than was reserved gives the rest back. */
	for (int i = 0; i < 8; i++) {
		assert_int_equal(tnd_channel_reserve(writer, 3000, 0, &d, NULL), 0);
		assert_int_equal(tnd_channel_commit(writer, &d, 10), 0);
	}
	tnd_channel_close(reader);
	tnd_channel_close(writer);
}

/* A ticket that was used up must not act on the reservation that took its slot. */
static void test_stale_tickets(void **state)
{
	struct tnd_channel *writer = make(4096, 1, 1), *reader = join(writer, 0);
	struct tnd_reservation a, b, wild = {.ticket = UINT64_MAX};
	struct tnd_object object;

	(void)state;
	assert_int_equal(tnd_channel_commit(writer, &wild, 0), TND_E_INVALID);
	assert_int_equal(tnd_channel_reserve(writer, 100, 0, &a, NULL), 0);
	assert_int_equal(tnd_channel_abort(writer, &a), 0);
	assert_int_equal(tnd_channel_reserve(writer, 100, 0, &b, NULL), 0);
	assert_int_equal(tnd_channel_abort(writer, &a), TND_E_INVALID);
	assert_int_equal(tnd_channel_commit(writer, &a, 1), TND_E_INVALID);
	assert_int_equal(tnd_channel_commit(writer, &wild, 0), TND_E_INVALID);
	assert_int_equal(tnd_channel_commit(writer, &b, 5), 0);
	assert_int_equal(tnd_channel_borrow(reader, 0, &object, NULL), 0);
	assert_int_equal(object.bytes, 5);
	tnd_channel_close(reader);
	tnd_channel_close(writer);
}

/* Aborted last, then the one before it: both go back although a reader holds an older object. */
static void test_abort_takes_back(void **state)
{
	struct tnd_channel *writer = make(4096, 8, 1), *reader = join(writer, 0);
	struct tnd_reservation a, b;

	(void)state;
	assert_int_equal(tnd_channel_send(writer, "held", 5, 0, NULL), 0);
	for (int i = 0; i < 100; i++) {
		assert_int_equal(tnd_channel_reserve(writer, 1900, 0, &a, NULL), 0);
		assert_int_equal(tnd_channel_reserve(writer, 1900, 0, &b, NULL), 0);
		assert_int_equal(tnd_channel_abort(writer, &a), 0);
		assert_int_equal(tnd_channel_abort(writer, &b), 0);
	}
	tnd_channel_close(reader);
	tnd_channel_close(writer);
}

static void test_borrows_in_any_order(void **state)
{
	struct tnd_channel *writer = make(4096, 4, 1), *reader = join(writer, 0);
	struct tnd_object objects[4], more;
	struct tnd_error error;
	uint64_t bytes;
	int value;

	(void)state;
	for (int i = 0; i < 4; i++)
		assert_int_equal(tnd_channel_send(writer, &i, sizeof(i), 0, NULL), 0);
	for (int i = 0; i < 4; i++) {
		assert_int_equal(tnd_channel_borrow(reader, 0, &objects[i], NULL), 0);
		assert_int_equal(objects[i].number, i);
	}
	/* Nothing can come before one is released: said, and not waited for ever. */
	assert_int_equal(tnd_channel_borrow(reader, tnd_deadline_in(1000000), &more, &error),
			 -ETIMEDOUT);
	assert_non_null(strstr(error.message, "borrows all 4"));
	/* Space is free when the oldest is. */
	assert_int_equal(tnd_channel_release(reader, &objects[2]), 0);
	assert_int_equal(tnd_channel_release(reader, &objects[2]), TND_E_INVALID);
	assert_int_equal(tnd_channel_release(reader, &objects[1]), 0);
	assert_int_equal(tnd_channel_send(writer, "x", 1, 0, NULL), -ETIMEDOUT);
	for (int i = 0; i < 4; i += 3)
		assert_int_equal(*(const int *)objects[i].data, i);
	assert_int_equal(tnd_channel_release(reader, &objects[0]), 0);
	for (int i = 4; i < 7; i++)
		assert_int_equal(tnd_channel_send(writer, &i, sizeof(i), 0, NULL), 0);
	assert_int_equal(tnd_channel_send(writer, "x", 1, 0, NULL), -ETIMEDOUT);
	/* recv beside a borrow that is open. */
	assert_int_equal(tnd_channel_recv(reader, &value, sizeof(value), 0, &bytes, NULL), 0);
	assert_int_equal(value, 4);
	assert_int_equal(tnd_channel_send(writer, "x", 1, 0, NULL), -ETIMEDOUT);
	assert_int_equal(tnd_channel_release(reader, &objects[3]), 0);
	for (int i = 7; i < 9; i++)
		assert_int_equal(tnd_channel_send(writer, &i, sizeof(i), 0, NULL), 0);
	for (int i = 5; i < 9; i++) {
		assert_int_equal(tnd_channel_recv(reader, &value, sizeof(value), 0, &bytes, NULL),
				 0);
		assert_int_equal(value, i);
	}
	tnd_channel_close(reader);
	tnd_channel_close(writer);
}

/* -- random calls beside a model -- */

struct model_reader {
	struct tnd_channel *channel;
	uint64_t next, done; /* of the model's objects */
	struct tnd_object open[MODEL_MAX];
	bool is_open[MODEL_MAX];
};

struct model {
	struct tnd_channel *writer;
	struct model_reader readers[3];
	uint64_t lengths[MODEL_MAX];
	uint64_t sent;
	uint64_t seed;
};

static uint64_t draw(struct model *model, uint64_t below)
{
	model->seed = model->seed * 6364136223846793005u + 1442695040888963407u;
	return (model->seed >> 33) % below;
}

/* What the rules say is used: by the slowest reader. */
static void model_use(const struct model *model, uint64_t *ret_objects, uint64_t *ret_bytes)
{
	uint64_t first = model->sent;

	for (int r = 0; r < 3; r++)
		if (model->readers[r].channel && model->readers[r].done < first)
			first = model->readers[r].done;
	*ret_objects = model->sent - first;
	*ret_bytes = 0;
	for (; first < model->sent; first++)
		*ret_bytes += (model->lengths[first] + 63) / 64 * 64;
}

static void model_send(struct model *model)
{
	static unsigned char buffer[4200];
	uint64_t bytes = draw(model, 3) ? draw(model, 300) : draw(model, 4097), objects, used;
	bool fits;
	int rc;

	model_use(model, &objects, &used);
	fits = objects < 16 && used + (bytes + 63) / 64 * 64 <= 4096;
	fill(buffer, model->sent, bytes);
	rc = tnd_channel_send(model->writer, buffer, bytes, 0, NULL);
	assert_int_equal(rc, fits ? 0 : -ETIMEDOUT);
	if (fits)
		model->lengths[model->sent++] = bytes;
}

static void model_done(struct model_reader *reader)
{
	while (reader->done < reader->next && !reader->is_open[reader->done])
		reader->done++;
}

static void model_receive(struct model *model, struct model_reader *reader)
{
	static unsigned char buffer[4200];
	struct tnd_object object;
	uint64_t bytes = 0;
	int expected = reader->next < model->sent ? 0 : -ETIMEDOUT;

	if (draw(model, 2)) {
		assert_int_equal(tnd_channel_recv(reader->channel, buffer, 4200, 0, &bytes, NULL),
				 expected);
		if (expected)
			return;
		check_contents(buffer, reader->next, bytes);
	} else {
		assert_int_equal(tnd_channel_borrow(reader->channel, 0, &object, NULL), expected);
		if (expected)
			return;
		bytes = object.bytes;
		reader->open[reader->next] = object;
		reader->is_open[reader->next] = true;
	}
	assert_int_equal(bytes, model->lengths[reader->next]);
	reader->next++;
	model_done(reader);
}

static void model_release(struct model *model, struct model_reader *reader)
{
	for (uint64_t i = reader->done; i < reader->next; i++) {
		if (!reader->is_open[i] || draw(model, 2))
			continue;
		check_contents(reader->open[i].data, i, model->lengths[i]);
		assert_int_equal(tnd_channel_release(reader->channel, &reader->open[i]), 0);
		reader->is_open[i] = false;
		model_done(reader);
		return;
	}
}

static void model_join_or_leave(struct model *model, uint32_t rank)
{
	struct model_reader *reader = &model->readers[rank];

	if (reader->channel) {
		tnd_channel_close(reader->channel);
		reader->channel = NULL;
		return;
	}
	memset(reader->is_open, 0, sizeof(reader->is_open));
	reader->channel = join(model->writer, rank);
	reader->next = reader->done = model->sent;
}

static void run_model(uint64_t seed)
{
	struct model *model = calloc(1, sizeof(*model));

	assert_non_null(model);
	model->seed = seed;
	model->writer = make(4096, 16, 3);
	for (int step = 0; step < 6000 && model->sent < MODEL_MAX; step++) {
		struct model_reader *reader = &model->readers[draw(model, 3)];
		uint64_t what = draw(model, 100);

		if (what < 45)
			model_send(model);
		else if (what < 47)
			model_join_or_leave(model, (uint32_t)(reader - model->readers));
		else if (reader->channel && what < 75)
			model_receive(model, reader);
		else if (reader->channel)
			model_release(model, reader);
	}
	for (int r = 0; r < 3; r++)
		tnd_channel_close(model->readers[r].channel);
	tnd_channel_close(model->writer);
	free(model);
}

static void test_against_model(void **state)
{
	const char *given = getenv("TUNDISH_SEED");
	uint64_t seed = given ? strtoull(given, NULL, 0) : 20;

	(void)state;
	print_message("seed %lu to %lu\n", (unsigned long)seed, (unsigned long)seed + 19);
	for (uint64_t i = 0; i < 20; i++)
		run_model(seed + i);
}

/* -- threads -- */

#define STREAM_OBJECTS 20000

struct stream {
	struct tnd_channel *channel;
	bool borrow;
	uint64_t received;
};

static uint64_t stream_length(uint64_t number)
{
	return number * 2654435761u % 700;
}

static void *run_reader(void *arg)
{
	struct stream *stream = arg;
	static __thread unsigned char buffer[1024];
	int rc = 0;

	while (rc == 0) {
		const unsigned char *data = buffer;
		struct tnd_object object;
		uint64_t bytes;

		if (stream->borrow) {
			rc = tnd_channel_borrow(stream->channel, TND_NO_DEADLINE, &object, NULL);
			data = object.data;
			bytes = object.bytes;
		} else {
			rc = tnd_channel_recv(stream->channel, buffer, sizeof(buffer),
					      TND_NO_DEADLINE, &bytes, NULL);
		}
		if (rc < 0)
			break;
		if (bytes != stream_length(stream->received))
			break;
		for (uint64_t i = 0; i < bytes; i++)
			if (data[i] != (unsigned char)(stream->received + i))
				return NULL;
		stream->received++;
		if (stream->borrow)
			rc = tnd_channel_release(stream->channel, &object);
	}
	if (rc != TND_E_CLOSED)
		stream->received = 0;
	return NULL;
}

static void test_threads_stream(void **state)
{
	struct tnd_channel *writer = make(8192, 16, 4);
	struct stream streams[3];
	pthread_t threads[3];
	unsigned char buffer[1024];

	(void)state;
	for (uint32_t r = 0; r < 3; r++) {
		streams[r] = (struct stream){join(writer, r), r == 1, 0};
		assert_int_equal(pthread_create(&threads[r], NULL, run_reader, &streams[r]), 0);
	}
	for (uint64_t n = 0; n < STREAM_OBJECTS; n++) {
		uint64_t bytes = stream_length(n);

		if (n % 3 == 0) {
			struct tnd_reservation space;

			assert_int_equal(
				tnd_channel_reserve(writer, 700, TND_NO_DEADLINE, &space, NULL), 0);
			for (uint64_t i = 0; i < bytes; i++)
				((unsigned char *)space.data)[i] = (unsigned char)(n + i);
			assert_int_equal(tnd_channel_commit(writer, &space, bytes), 0);
			continue;
		}
		for (uint64_t i = 0; i < bytes; i++)
			buffer[i] = (unsigned char)(n + i);
		assert_int_equal(tnd_channel_send(writer, buffer, bytes, TND_NO_DEADLINE, NULL), 0);
	}
	assert_int_equal(tnd_channel_drain(writer, TND_NO_DEADLINE, NULL), 0);
	atomic_store(&writer->shared.header->closed, TND__CLOSED);
	tnd__wake_readers(writer, true);
	for (int r = 0; r < 3; r++) {
		pthread_join(threads[r], NULL);
		assert_int_equal(streams[r].received, STREAM_OBJECTS);
		tnd_channel_close(streams[r].channel);
	}
	tnd_channel_close(writer);
}

/* Commits, aborts and releases in other threads, while the ring is full again and again. */
struct handed {
	struct tnd_channel *channel;
	_Atomic(struct tnd_reservation *) reservation;
	_Atomic bool end;
};

static void *run_committer(void *arg)
{
	struct handed *handed = arg;
	uint64_t n = 0;

	for (;;) {
		struct tnd_reservation *got = atomic_exchange(&handed->reservation, NULL);

		if (!got) {
			if (atomic_load(&handed->end))
				return NULL;
			sched_yield();
			continue;
		}
		if (++n % 5 == 0)
			tnd_channel_abort(handed->channel, got);
		else
			tnd_channel_commit(handed->channel, got, got->bytes);
		free(got);
	}
}

static void test_threads_commit(void **state)
{
	struct tnd_channel *writer = make(4096, 8, 1), *reader = join(writer, 0);
	struct handed handed = {.channel = writer};
	pthread_t thread;
	uint64_t seen = 0, last = 0;

	(void)state;
	assert_int_equal(pthread_create(&thread, NULL, run_committer, &handed), 0);
	for (uint64_t n = 1; n <= 3000; n++) {
		struct tnd_reservation *space = calloc(1, sizeof(*space));
		struct tnd_object object;

		assert_int_equal(tnd_channel_reserve(writer, 256, TND_NO_DEADLINE, space, NULL), 0);
		memcpy(space->data, &n, sizeof(n));
		while (atomic_load(&handed.reservation))
			sched_yield();
		atomic_store(&handed.reservation, space);
		while (tnd_channel_borrow(reader, 0, &object, NULL) == 0) {
			uint64_t value;

			memcpy(&value, object.data, sizeof(value));
			assert_true(value > last);
			last = value;
			seen++;
			assert_int_equal(tnd_channel_release(reader, &object), 0);
		}
	}
	atomic_store(&handed.end, true);
	pthread_join(thread, NULL);
	while (tnd_channel_recv(reader, (char[256]){0}, 256, 0, &last, NULL) == 0)
		seen++;
	assert_int_equal(seen, 3000 - 3000 / 5);
	tnd_channel_close(reader);
	tnd_channel_close(writer);
}

static void *run_cancel(void *arg)
{
	tnd_channel_cancel(arg);
	return NULL;
}

static void test_cancel(void **state)
{
	struct tnd_channel *writer = make(4096, 1, 1), *reader = join(writer, 0);
	uint64_t bytes;
	pthread_t thread;
	char byte;

	(void)state;
	for (int i = 0; i < 200; i++) {
		assert_int_equal(pthread_create(&thread, NULL, run_cancel, reader), 0);
		assert_int_equal(tnd_channel_recv(reader, &byte, 1, TND_NO_DEADLINE, &bytes, NULL),
				 -ECANCELED);
		pthread_join(thread, NULL);
		/* Sticky, but what need not wait goes on. */
		assert_int_equal(tnd_channel_recv(reader, &byte, 1, TND_NO_DEADLINE, &bytes, NULL),
				 -ECANCELED);
		assert_int_equal(tnd_channel_send(writer, "x", 1, 0, NULL), 0);
		assert_int_equal(pthread_create(&thread, NULL, run_cancel, writer), 0);
		assert_int_equal(tnd_channel_send(writer, "y", 1, TND_NO_DEADLINE, NULL),
				 -ECANCELED);
		pthread_join(thread, NULL);
		assert_int_equal(tnd_channel_recv(reader, &byte, 1, TND_NO_DEADLINE, &bytes, NULL),
				 0);
		assert_int_equal(byte, 'x');
		tnd_channel_rearm(reader);
		tnd_channel_rearm(writer);
	}
	tnd_channel_close(reader);
	tnd_channel_close(writer);
}

static void *run_late_send(void *arg)
{
	struct tnd_channel *writer = arg;

	/* Once the reader is about to sleep its bit is erased, as a broken one might do it. */
	while (!atomic_load(&writer->shared.control->sleepers))
		sched_yield();
	atomic_store(&writer->shared.control->sleepers, 0);
	tnd_channel_send(writer, "x", 1, TND_NO_DEADLINE, NULL);
	return NULL;
}

/* Nonsense in the control segment delays others, by a second and not for ever. */
static void test_wake_erased(void **state)
{
	struct tnd_channel *writer = make(4096, 4, 1), *reader = join(writer, 0);
	int64_t started = tnd__now_ns();
	uint64_t bytes;
	pthread_t thread;
	char byte;

	(void)state;
	reader->warn_ns = INT64_MAX;
	assert_int_equal(pthread_create(&thread, NULL, run_late_send, writer), 0);
	assert_int_equal(
		tnd_channel_recv(reader, &byte, 1, tnd_deadline_in(30000000000), &bytes, NULL), 0);
	assert_in_range(tnd__now_ns() - started, 0, 5000000000);
	pthread_join(thread, NULL);
	tnd_channel_close(reader);
	tnd_channel_close(writer);
}

struct looking {
	struct tnd_channel *channel;
	_Atomic bool end;
	bool wrong;
};

static void *run_looking(void *arg)
{
	struct looking *looking = arg;
	struct tnd_channel_info info = {.struct_bytes = sizeof(info)};

	while (!atomic_load(&looking->end)) {
		tnd_channel_info(looking->channel, &info);
		looking->wrong |=
			info.used_bytes > info.max_bytes || info.used_objects > info.max_objects;
	}
	return NULL;
}

/* Figures of a moment may be old, but not impossible. */
static void test_figures_beside_sends(void **state)
{
	struct tnd_channel *writer = make(8192, 4, 1), *reader = join(writer, 0);
	struct looking looking = {.channel = writer};
	char buffer[2048] = "";
	uint64_t bytes;
	pthread_t thread;

	(void)state;
	assert_int_equal(pthread_create(&thread, NULL, run_looking, &looking), 0);
	for (int i = 0; i < 100000; i++) {
		assert_int_equal(tnd_channel_send(writer, buffer, (uint64_t)i % 2000, 0, NULL), 0);
		assert_int_equal(tnd_channel_recv(reader, buffer, 2048, 0, &bytes, NULL), 0);
	}
	atomic_store(&looking.end, true);
	pthread_join(thread, NULL);
	assert_false(looking.wrong);
	tnd_channel_close(reader);
	tnd_channel_close(writer);
}

static void test_evict_frees(void **state)
{
	struct tnd_channel *writer = make(4096, 2, 2), *slow = join(writer, 0),
			   *quick = join(writer, 1);
	struct tnd_object object;
	uint64_t bytes;
	char byte;

	(void)state;
	assert_int_equal(tnd_channel_send(writer, "a", 1, 0, NULL), 0);
	assert_int_equal(tnd_channel_send(writer, "b", 1, 0, NULL), 0);
	assert_int_equal(tnd_channel_borrow(slow, 0, &object, NULL), 0);
	for (int i = 0; i < 2; i++)
		assert_int_equal(tnd_channel_recv(quick, &byte, 1, 0, &bytes, NULL), 0);
	assert_int_equal(tnd_channel_send(writer, "c", 1, 0, NULL), -ETIMEDOUT);
	assert_int_equal(tnd_channel_evict(writer, 7), TND_E_PLACE);
	assert_int_equal(tnd_channel_evict(writer, 0), 0);
	assert_int_equal(tnd_channel_send(writer, "c", 1, 0, NULL), 0);
	assert_int_equal(tnd_channel_recv(quick, &byte, 1, 0, &bytes, NULL), 0);
	assert_int_equal(byte, 'c');
	assert_int_equal(tnd_channel_release(slow, &object), TND_E_EVICTED);
	assert_int_equal(tnd_channel_recv(slow, &byte, 1, 0, &bytes, NULL), TND_E_EVICTED);
	tnd_channel_close(slow);
	tnd_channel_close(quick);
	tnd_channel_close(writer);
}

/* A cursor that says what it cannot say. */
static void test_corrupt_cursor_evicted(void **state)
{
	static const int64_t wrong[] = {1, 1000, -1, INT64_MAX, INT64_MIN};

	(void)state;
	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
		struct tnd_channel *writer = make(4096, 2, 1), *reader = join(writer, 0);
		struct tnd_object object;
		_Atomic uint64_t *cursor = &writer->shared.control->places[0].cursor;

		assert_int_equal(tnd_channel_send(writer, "a", 1, 0, NULL), 0);
		assert_int_equal(tnd_channel_send(writer, "b", 1, 0, NULL), 0);
		atomic_store(cursor, writer->writer.published + (uint64_t)wrong[i] -
					     (wrong[i] < 0 ? 2 : 0));
		assert_int_equal(tnd_channel_send(writer, "c", 1, 0, NULL), 0);
		assert_int_equal(tnd_channel_borrow(reader, 0, &object, NULL), TND_E_EVICTED);
		tnd_channel_close(reader);
		tnd_channel_close(writer);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_exact_limits),
		cmocka_unit_test(test_no_reader_drops),
		cmocka_unit_test(test_sizes_at_offsets),
		cmocka_unit_test(test_recv_buffer_too_small),
		cmocka_unit_test(test_reservations),
		cmocka_unit_test(test_stale_tickets),
		cmocka_unit_test(test_abort_takes_back),
		cmocka_unit_test(test_wake_erased),
		cmocka_unit_test(test_figures_beside_sends),
		cmocka_unit_test(test_borrows_in_any_order),
		cmocka_unit_test(test_against_model),
		cmocka_unit_test(test_threads_stream),
		cmocka_unit_test(test_threads_commit),
		cmocka_unit_test(test_cancel),
		cmocka_unit_test(test_evict_frees),
		cmocka_unit_test(test_corrupt_cursor_evicted),
	};

	return cmocka_run_group_tests_name("ring", tests, NULL, NULL);
}
