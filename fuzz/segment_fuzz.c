/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segment_fuzz.c - the memory of a channel against a hostile peer
 *
 *   input: one byte, then records of 12 bytes
 *     0  two memfds that would be attached to, with figures, sizes and seals changed; then attach
 *     1  a reader, while the sealed segment says what it wants: descriptors, published, closed, seats, slabs
 *     2  a writer with a reader, while the control segment is scribbled on: cursors, words, sleepers, leases
 *
 * Found here: crashes (SIGSEGV and SIGBUS included: everything that is accepted is read to its last byte), hangs, objects beyond the limits
 * or outside the arena, leaks of descriptors.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "channel/segment.h"
#include "fuzz.h"

#define RING UINT64_C(4096)
#define OBJECT_MAX UINT64_C(65536)
#define HELD_MAX 8

struct record {
	uint8_t op, a;
	uint16_t b;
	uint64_t value;
};

static bool next_record(const uint8_t **data, size_t *bytes, struct record *record)
{
	if (*bytes < 12)
		return false;
	record->op = (*data)[0];
	record->a = (*data)[1];
	memcpy(&record->b, *data + 2, 2);
	memcpy(&record->value, *data + 4, 8);
	*data += 12;
	*bytes -= 12;
	return true;
}

static void touch(const void *data, uint64_t bytes)
{
	const volatile unsigned char *at = data;

	for (uint64_t i = 0; i < bytes; i += 64)
		(void)at[i];
	if (bytes)
		(void)at[bytes - 1];
}

/* -- attach -- */

struct forge {
	struct tnd__data_header data;
	struct tnd__control control;
	uint64_t data_bytes, control_bytes;
	int data_seals, control_seals;
};

static void forge_honest(struct forge *forge)
{
	struct tnd__data_header *data = &forge->data;

	memset(forge, 0, sizeof(*forge));
	data->magic = TND__DATA_MAGIC;
	data->version = forge->control.version = TND__LAYOUT_VERSION;
	data->place_count = forge->control.place_count = 2;
	data->max_bytes = data->arena_bytes = RING;
	data->max_objects = 3;
	data->slot_count = 4;
	data->descriptor_offset = 4096;
	data->arena_offset = 8192;
	data->segment_bytes = forge->data_bytes = 8192 + RING;
	forge->control.magic = TND__CONTROL_MAGIC;
	forge->control.segment_bytes = forge->control_bytes = TND__CONTROL_BYTES;
	forge->data_seals = TND__DATA_SEALS;
	forge->control_seals = TND__CONTROL_SEALS;
}

/* op 0: data header, 1: control header, both at b, a bytes; 2, 3: sizes; 4, 5: seals. */
static void forge_change(struct forge *forge, const struct record *record)
{
	size_t width = record->a % 8 + 1;

	switch (record->op % 6) {
	case 0:
		memcpy((char *)&forge->data + record->b % 184, &record->value, width);
		break;
	case 1:
		memcpy((char *)&forge->control + record->b % 120, &record->value, width);
		break;
	case 2:
		forge->data_bytes = record->value % (1 << 20);
		break;
	case 3:
		forge->control_bytes = record->value % (1 << 20);
		break;
	case 4:
		forge->data_seals ^= (int)(record->value & 0x1f);
		break;
	default:
		forge->control_seals ^= (int)(record->value & 0x1f);
		break;
	}
}

static int forge_file(const void *head, size_t head_bytes, uint64_t bytes, int seals)
{
	int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0 ||
	    (bytes && fallocate(fd, 0, 0, (off_t)bytes) < 0) ||
	    pwrite(fd, head, TND__MIN(head_bytes, bytes), 0) < 0 ||
	    fcntl(fd, F_ADD_SEALS, seals) < 0)
		fuzz_fail("no memfd for the input");
	return fd;
}

static void fuzz_attach(const uint8_t *data, size_t bytes)
{
	static struct forge forge;
	struct tnd__segments segments;
	struct tnd_error error = {0};
	struct record record;
	int data_fd, control_fd, rc;

	forge_honest(&forge);
	while (next_record(&data, &bytes, &record))
		forge_change(&forge, &record);
	data_fd = forge_file(&forge.data, sizeof(forge.data), forge.data_bytes, forge.data_seals);
	control_fd = forge_file(&forge.control, sizeof(forge.control), forge.control_bytes,
				forge.control_seals);
	rc = tnd__segments_attach(data_fd, control_fd, &segments, &error);
	if (rc < 0) {
		if (error.code != rc || !strstr(error.message, "expected"))
			fuzz_fail("a refusal without its sentence: %d", rc);
		if (fcntl(data_fd, F_GETFD) >= 0 || fcntl(control_fd, F_GETFD) >= 0)
			fuzz_fail("a descriptor is left");
		return;
	}
	touch(segments.header, segments.data_map_bytes);
	touch(segments.control, sizeof(*segments.control));
	if (segments.max_bytes > segments.arena_bytes ||
	    segments.max_objects > segments.slot_count ||
	    (const unsigned char *)(segments.descriptors + segments.slot_count) > segments.arena ||
	    segments.arena + 2 * segments.arena_bytes !=
		    (unsigned char *)segments.header + segments.data_map_bytes ||
	    segments.place_count - 1 >= TND__PLACES_MAX)
		fuzz_fail("figures that do not fit were accepted");
	tnd__segments_close(&segments, false, false);
}

/* -- a channel -- */

struct scene {
	struct tnd_slab_pool *pool;
	struct tnd_channel *writer, *reader;
	struct tnd_object held[HELD_MAX];
	size_t held_count;
};

static void open_scene(struct scene *scene)
{
	struct tnd_slab_pool_opts pool = {.struct_bytes = sizeof(pool),
					  .flags = TND_SLAB_POOL_F_SHARED};
	struct tnd_channel_opts opts = {.struct_bytes = sizeof(opts),
					.max_bytes = RING,
					.max_objects = 3,
					.reserved_readers = 1,
					.open_readers = 1,
					.max_object_bytes = OBJECT_MAX};

	/* Kept over all inputs: the service thread does not start each time. */
	static bool started;

	memset(scene, 0, sizeof(*scene));
	if (!started)
		started = tnd__service_ref() == 0;
	if (tnd_slab_pool_create(&pool, &opts.pool) < 0 ||
	    tnd_channel_create(&opts, &scene->writer, NULL) < 0 ||
	    tnd_channel_attach(tnd_channel_address(scene->writer), 0, NULL, &scene->reader, NULL) <
		    0)
		fuzz_fail("no channel for the input");
	scene->pool = opts.pool;
}

static void close_scene(struct scene *scene)
{
	tnd_channel_close(scene->reader);
	tnd_channel_close(scene->writer);
	tnd_slab_pool_close(scene->pool);
}

static void send_some(struct scene *scene, uint64_t value)
{
	static const unsigned char bytes[OBJECT_MAX];

	tnd_channel_send(scene->writer, bytes, value % OBJECT_MAX, 0, NULL);
}

static void take_some(struct scene *scene)
{
	static unsigned char bytes[OBJECT_MAX];
	uint64_t got;

	if (tnd_channel_recv(scene->reader, bytes, sizeof(bytes), 0, &got, NULL) == 0 &&
	    got > OBJECT_MAX)
		fuzz_fail("an object above the limit was copied");
}

static void borrow_some(struct scene *scene)
{
	const struct tnd__segments *shared = &scene->reader->shared;
	struct tnd_object *object = &scene->held[scene->held_count];
	uint64_t offset;

	if (scene->held_count == HELD_MAX || tnd_channel_borrow(scene->reader, 0, object, NULL) < 0)
		return;
	scene->held_count++;
	offset = (uint64_t)((const unsigned char *)object->data - shared->arena);
	if (!tnd__slabs_is(scene->reader, object) &&
	    (object->bytes > RING || offset >= shared->arena_bytes))
		fuzz_fail("an object outside the arena was lent");
	touch(object->data, object->bytes);
}

static void release_some(struct scene *scene, uint64_t which)
{
	struct tnd_object *object;

	if (!scene->held_count)
		return;
	object = &scene->held[which % scene->held_count];
	tnd_channel_release(scene->reader, object);
	*object = scene->held[--scene->held_count];
}

/* What does not concern the segments. */
static void act(struct scene *scene, const struct record *record, bool may_send)
{
	switch (record->op % 8) {
	case 0:
	case 1:
		if (may_send)
			send_some(scene, record->value);
		break;
	case 2:
		take_some(scene);
		break;
	case 3:
		borrow_some(scene);
		break;
	case 4:
		release_some(scene, record->a);
		break;
	default:
		break;
	}
}

static void fuzz_reader(const uint8_t *data, size_t bytes)
{
	struct record record;
	struct scene scene;
	bool hostile = false; /* the writer may believe its own segment: it stops */

	open_scene(&scene);
	while (next_record(&data, &bytes, &record)) {
		struct tnd__segments *shared = &scene.writer->shared;
		unsigned char *header = (unsigned char *)shared->header;

		act(&scene, &record, !hostile);
		if (record.op % 8 < 5)
			continue;
		hostile = true;
		if (record.op % 8 == 5)
			memcpy((char *)&shared->descriptors[record.b % shared->slot_count] +
				       record.a % 4 * 8,
			       &record.value, 8);
		else if (record.op % 8 == 6)
			memcpy(header + 256 + record.b % 2 * 8, &record.value, 8);
		else
			memcpy(header + 256 + record.b % 416 * 8, &record.value, 8);
	}
	close_scene(&scene);
}

static void fuzz_writer(const uint8_t *data, size_t bytes)
{
	struct record record;
	struct scene scene;

	open_scene(&scene);
	while (next_record(&data, &bytes, &record)) {
		struct tnd__control *control = scene.writer->shared.control;
		unsigned char *begin = (unsigned char *)control;

		act(&scene, &record, true);
		if (record.op % 8 == 5)
			memcpy(&control->places[record.b % 2].cursor, &record.value, 8);
		else if (record.op % 8 == 6)
			memcpy(begin + 128 + record.b % 32 * 8, &record.value, 8);
		else if (record.op % 8 == 7)
			memcpy(begin + 128 + record.b % 4144 * 8, &record.value, 8);
	}
	close_scene(&scene);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	if (!bytes)
		return 0;
	if (data[0] % 3 == 0)
		fuzz_attach(data + 1, bytes - 1);
	else if (data[0] % 3 == 1)
		fuzz_reader(data + 1, bytes - 1);
	else
		fuzz_writer(data + 1, bytes - 1);
	return 0;
}
