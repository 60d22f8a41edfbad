/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_segment_attach.c - what could break: a figure of a hostile header that is believed, a file that can be cut, written or has holes
 * taken for a channel's memory, one channel's segments mixed with another's, a descriptor or a mapping left behind by a refusal.
 * Shown by attaching to memfds made here byte by byte: each field by turns gets extreme values, and what comes out is either
 * refused with the right code, or can be touched from end to end.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "channel/segment.h"
#include "support/fds.h"

#define SLOTS 128 /* fill a page */
#define MAX_BYTES UINT64_C(8192)

/* What a test changes before the memfds are made. */
struct forge {
	struct tnd__data_header data;
	struct tnd__control control;
	uint64_t data_bytes, control_bytes; /* of the files */
	int data_seals, control_seals;
	bool hole; /* the arena's last page is not there */
};

static void honest(struct forge *forge)
{
	struct tnd__data_header *data = &forge->data;

	memset(forge, 0, sizeof(*forge));
	data->magic = TND__DATA_MAGIC;
	data->version = TND__LAYOUT_VERSION;
	data->place_count = 2;
	memset(data->id, 7, sizeof(data->id));
	data->max_bytes = MAX_BYTES;
	data->max_objects = SLOTS - 1;
	data->slot_count = SLOTS;
	data->descriptor_offset = 4096;
	data->arena_offset = 8192;
	data->arena_bytes = MAX_BYTES;
	data->segment_bytes = 8192 + MAX_BYTES;
	strcpy(data->name, "forged");
	forge->control.magic = TND__CONTROL_MAGIC;
	forge->control.version = TND__LAYOUT_VERSION;
	forge->control.place_count = 2;
	memset(forge->control.id, 7, sizeof(forge->control.id));
	forge->control.segment_bytes = TND__CONTROL_BYTES;
	forge->data_bytes = data->segment_bytes;
	forge->control_bytes = TND__CONTROL_BYTES;
	forge->data_seals = TND__DATA_SEALS;
	forge->control_seals = TND__CONTROL_SEALS;
}

static int forge_file(const void *head, size_t head_bytes, uint64_t bytes, uint64_t taken,
		      int seals)
{
	int fd = memfd_create("forged", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	assert_true(fd >= 0);
	assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
	if (taken)
		assert_int_equal(fallocate(fd, 0, 0, (off_t)taken), 0);
	head_bytes = TND__MIN(head_bytes, bytes);
	assert_int_equal(pwrite(fd, head, head_bytes, 0), head_bytes);
	assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
	return fd;
}

static void touch_all(const struct tnd__segments *segments)
{
	const volatile unsigned char *at = (const unsigned char *)segments->header;

	for (uint64_t offset = 0; offset < segments->data_map_bytes; offset += 4096)
		(void)at[offset];
	(void)at[segments->data_map_bytes - 1];
	assert_true(segments->max_bytes <= segments->arena_bytes);
	assert_true(segments->max_objects <= segments->slot_count);
	assert_true(segments->slot_count && !(segments->slot_count & (segments->slot_count - 1)));
	assert_ptr_equal(segments->arena + 2 * segments->arena_bytes,
			 at + segments->data_map_bytes);
	assert_true((const unsigned char *)(segments->descriptors + segments->slot_count) <=
		    segments->arena);
	assert_true(segments->place_count >= 1 && segments->place_count <= TND__PLACES_MAX);
	assert_true(strlen(segments->name) < sizeof(segments->name));
	atomic_fetch_add(&segments->control->leases[TND__PLACES_MAX - 1][TND__SLABS_MAX - 1], 1);
}

/* Attaches to two descriptors; what is accepted is touched. Both are gone afterwards. */
static int attach(int data_fd, int control_fd, struct tnd_error *error)
{
	struct tnd__segments segments;
	unsigned int fds = fd_count();
	int gone = (fcntl(data_fd, F_GETFD) >= 0) + (fcntl(control_fd, F_GETFD) >= 0);
	int rc;

	memset(error, 0, sizeof(*error));
	rc = tnd__segments_attach(data_fd, control_fd, &segments, error);
	if (rc == 0) {
		touch_all(&segments);
		tnd__segments_close(&segments, false, false);
	} else {
		assert_int_equal(error->code, rc);
		assert_non_null(strstr(error->message, "expected "));
		assert_non_null(strstr(error->message, "found "));
	}
	assert_int_equal(fd_count(), fds - gone);
	assert_int_equal(map_count("memfd:"), 0);
	return rc;
}

static int attach_forged(const struct forge *forge, struct tnd_error *error)
{
	uint64_t taken = forge->data_bytes - (forge->hole ? 4096 : 0);
	int data_fd = forge_file(&forge->data, sizeof(forge->data), forge->data_bytes, taken,
				 forge->data_seals);
	int control_fd = forge_file(&forge->control, sizeof(forge->control), forge->control_bytes,
				    forge->control_bytes, forge->control_seals);

	return attach(data_fd, control_fd, error);
}

static void test_honest(void **state)
{
	struct tnd_error error;
	struct forge forge;

	(void)state;
	honest(&forge);
	assert_int_equal(attach_forged(&forge, &error), 0);
}

/* -- fields -- */

#define FIELD(name, from, to)                                                                    \
	{                                                                                        \
#name, offsetof(struct forge, name), sizeof(((struct forge *)0)->name), from, to \
	}

/* All values from `from` to `to` are good, all others are not. */
static const struct {
	const char *name;
	size_t offset, bytes;
	uint64_t from, to;
} fields[] = {
	FIELD(data.magic, TND__DATA_MAGIC, TND__DATA_MAGIC),
	FIELD(data.version, TND__LAYOUT_VERSION, TND__LAYOUT_VERSION),
	FIELD(data.place_count, 2, 2), /* as in the control segment */
	FIELD(data.max_bytes, 4096, MAX_BYTES),
	FIELD(data.max_objects, 1, SLOTS),
	FIELD(data.slot_count, SLOTS, SLOTS),
	FIELD(data.descriptor_offset, 4096, 4096),
	FIELD(data.arena_offset, 8192, 8192),
	FIELD(data.arena_bytes, MAX_BYTES, MAX_BYTES),
	FIELD(data.segment_bytes, 8192 + MAX_BYTES, 8192 + MAX_BYTES),
	FIELD(data.max_object_bytes, 0, TND__SEGMENT_BYTES_MAX),
	FIELD(data.first_number, 0, UINT64_MAX),
	FIELD(data.writer_pid, 0, UINT32_MAX),
	FIELD(data.on_dead, 0, 1),
	FIELD(data.created_ns, 0, UINT64_MAX),
	FIELD(control.magic, TND__CONTROL_MAGIC, TND__CONTROL_MAGIC),
	FIELD(control.version, TND__LAYOUT_VERSION, TND__LAYOUT_VERSION),
	FIELD(control.place_count, 2, 2),
	FIELD(control.segment_bytes, TND__CONTROL_BYTES, TND__CONTROL_BYTES),
};

static void try_field(size_t i, uint64_t value)
{
	struct tnd_error error;
	struct forge forge;
	int rc, bad = strstr(fields[i].name, "version") ? TND_E_VERSION : TND_E_CORRUPT;

	if (fields[i].bytes == 4)
		value = (uint32_t)value;
	honest(&forge);
	memcpy((char *)&forge + fields[i].offset, &value, fields[i].bytes);
	rc = attach_forged(&forge, &error);
	if (value < fields[i].from || value > fields[i].to ||
	    (strcmp(fields[i].name, "data.max_bytes") == 0 && value % 64)) {
		if (rc != bad)
			print_error("%s = %llx gave %d: %s\n", fields[i].name,
				    (unsigned long long)value, rc, error.message);
		assert_int_equal(rc, bad);
	} else {
		assert_int_equal(rc, 0);
	}
}

static void test_fields(void **state)
{
	(void)state;
	for (size_t i = 0; i < sizeof(fields) / sizeof(*fields); i++) {
		for (int bit = 0; bit < 64; bit++) {
			try_field(i, UINT64_C(1) << bit);
			try_field(i, (UINT64_C(1) << bit) - 1);
		}
		for (int by = -65; by <= 65; by += 1 + (by != -1 && by != 0) * 31) {
			try_field(i, fields[i].from + (uint64_t)by);
			try_field(i, fields[i].to + (uint64_t)by);
		}
		try_field(i, UINT64_MAX - 63);
		try_field(i, 0);
	}
}

/* Figures that fit each other, but not what is there. */
static void test_sums(void **state)
{
	struct tnd_error error;
	struct forge forge;

	(void)state;
	/* More slots than the file holds, with an offset that wraps round to the right one. */
	honest(&forge);
	forge.data.slot_count = forge.data.max_objects = TND_CHANNEL_OBJECTS_MAX;
	assert_int_equal(attach_forged(&forge, &error), TND_E_CORRUPT);
	forge.data.slot_count = (UINT64_C(1) << 59) + SLOTS;
	assert_int_equal(attach_forged(&forge, &error), TND_E_CORRUPT);
	honest(&forge);
	forge.data.arena_bytes = forge.data.max_bytes = TND__SEGMENT_BYTES_MAX;
	forge.data.segment_bytes = 8192 + TND__SEGMENT_BYTES_MAX;
	assert_int_equal(attach_forged(&forge, &error), TND_E_CORRUPT);
	honest(&forge);
	forge.data.arena_bytes = UINT64_MAX - 8191 + MAX_BYTES;
	assert_int_equal(attach_forged(&forge, &error), TND_E_CORRUPT);
	/* A name without its end. */
	honest(&forge);
	memset(forge.data.name, 'x', sizeof(forge.data.name));
	assert_int_equal(attach_forged(&forge, &error), TND_E_CORRUPT);
	/* Another channel's control segment: each byte of the id counts. */
	for (size_t i = 0; i < sizeof(forge.control.id); i++) {
		honest(&forge);
		forge.control.id[i]++;
		assert_int_equal(attach_forged(&forge, &error), TND_E_CORRUPT);
	}
	/* The version is looked at before anything whose meaning it could change. */
	honest(&forge);
	forge.data.version = 2;
	forge.data.place_count = 1000;
	assert_int_equal(attach_forged(&forge, &error), TND_E_VERSION);
	assert_non_null(strstr(error.message, "version 1"));
	assert_non_null(strstr(error.message, "found 2"));
}

/* -- files -- */

static void test_file_sizes(void **state)
{
	static const int64_t by[] = {-1, 1, -4096, 4096, 4096 * 1024, -8192, -8193, -16383, -16384};
	struct tnd_error error;
	struct forge forge;

	(void)state;
	for (size_t i = 0; i < sizeof(by) / sizeof(*by); i++) {
		honest(&forge);
		forge.data_bytes += (uint64_t)by[i];
		assert_int_equal(attach_forged(&forge, &error), TND_E_CORRUPT);
		honest(&forge);
		forge.control_bytes += (uint64_t)by[i];
		assert_int_equal(attach_forged(&forge, &error), TND_E_CORRUPT);
	}
	honest(&forge);
	forge.control_bytes = 0;
	assert_int_equal(attach_forged(&forge, &error), TND_E_CORRUPT);
	/* A hole would be filled on the account of whoever reads it. */
	honest(&forge);
	forge.hole = true;
	assert_int_equal(attach_forged(&forge, &error), TND_E_CORRUPT);
	assert_non_null(strstr(error.message, "holes"));
}

static void test_seals(void **state)
{
	static const int seals[] = {F_SEAL_FUTURE_WRITE, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL};
	struct tnd_error error;
	struct forge forge;

	(void)state;
	for (size_t i = 0; i < sizeof(seals) / sizeof(*seals); i++) {
		honest(&forge);
		forge.data_seals &= ~seals[i];
		assert_int_equal(attach_forged(&forge, &error), TND_E_CORRUPT);
		honest(&forge);
		forge.control_seals ^= seals[i];
		assert_int_equal(attach_forged(&forge, &error), TND_E_CORRUPT);
	}
	honest(&forge);
	forge.control_seals |= F_SEAL_WRITE;
	assert_int_equal(attach_forged(&forge, &error), TND_E_CORRUPT);
}

/* A descriptor of each kind that is no such memory. */
static int odd_fd(int kind)
{
	int pair[2];

	switch (kind) {
	case 0:
		return -1;
	case 1:
		assert_int_equal(pipe2(pair, O_CLOEXEC), 0);
		close(pair[1]);
		return pair[0];
	case 2:
		assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
		close(pair[1]);
		return pair[0];
	case 3:
		return open("/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
	case 4:
		return open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
	case 5:
		return open("/", O_PATH | O_CLOEXEC);
	case 6:
		return open("/dev/zero", O_RDWR | O_CLOEXEC);
	default:
		return memfd_create("odd", MFD_CLOEXEC);
	}
}

static int data_of(const struct forge *forge)
{
	return forge_file(&forge->data, sizeof(forge->data), forge->data_bytes, forge->data_bytes,
			  forge->data_seals);
}

static int control_of(const struct forge *forge)
{
	return forge_file(&forge->control, sizeof(forge->control), forge->control_bytes,
			  forge->control_bytes, forge->control_seals);
}

/* The same file, opened once more. */
static int reopened(int fd, int flags)
{
	char path[64];
	int again;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	again = open(path, flags | O_CLOEXEC);
	assert_true(again >= 0);
	close(fd);
	return again;
}

static void test_odd_files(void **state)
{
	struct tnd_error error;
	struct forge forge;
	int fd;

	(void)state;
	honest(&forge);
	for (int kind = 0; kind < 8; kind++) {
		fd = odd_fd(kind);
		assert_int_equal(attach(fd, control_of(&forge), &error), TND_E_CORRUPT);
		fd = odd_fd(kind);
		assert_int_equal(attach(data_of(&forge), fd, &error), TND_E_CORRUPT);
	}
	fd = reopened(data_of(&forge), O_WRONLY);
	assert_int_equal(attach(fd, control_of(&forge), &error), TND_E_CORRUPT);
	fd = reopened(control_of(&forge), O_RDONLY);
	assert_int_equal(attach(data_of(&forge), fd, &error), TND_E_CORRUPT);
	fd = reopened(data_of(&forge), O_RDONLY);
	assert_int_equal(attach(fd, control_of(&forge), &error), 0);
}

static void test_swapped(void **state)
{
	struct tnd_error error;
	struct forge forge;

	(void)state;
	honest(&forge);
	assert_int_equal(attach(control_of(&forge), data_of(&forge), &error), TND_E_CORRUPT);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_honest),  cmocka_unit_test(test_fields),
		cmocka_unit_test(test_sums),    cmocka_unit_test(test_file_sizes),
		cmocka_unit_test(test_seals),   cmocka_unit_test(test_odd_files),
		cmocka_unit_test(test_swapped),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
