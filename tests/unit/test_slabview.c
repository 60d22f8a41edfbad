/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_slabview.c - what could break: a reader that believes a broken writer about a slab (a file that can be cut, another size, holes, an
 * index or a serial out of range), a view that is unmapped while it is held, a channel that does not go on after memory, descriptors or pages
 * were refused once. Shown by notes and places made by hand on a real channel, by failpoints, and by counting mappings and descriptors.
 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "channel/bigobject.h"
#include "channel/segment.h"
#include "support/fds.h"

#define MIB (UINT64_C(1) << 20)
#define SECOND INT64_C(1000000000)
#define PAGES UINT64_C(16384)

static struct tnd_slab_pool *pool;
static struct tnd_channel *writer, *reader;
static unsigned int fds_before;
static unsigned char scratch[4 << 20];

static int set_up(void **state)
{
	struct tnd_slab_pool_opts how = {.struct_bytes = sizeof(how),
					 .flags = TND_SLAB_POOL_F_SHARED};
	struct tnd_channel_opts opts = {.struct_bytes = sizeof(opts),
					.max_bytes = 16384,
					.max_objects = 8,
					.reserved_readers = 1,
					.max_object_bytes = 8 * MIB};

	(void)state;
	fds_before = fd_count();
	if (tnd_slab_pool_create(&how, &pool) < 0)
		return -1;
	opts.pool = pool;
	return tnd_channel_create(&opts, &writer, NULL) < 0 ||
			       tnd_channel_attach(tnd_channel_address(writer), 0, NULL, &reader,
						  NULL) < 0
		       ? -1
		       : 0;
}

static int tear_down(void **state)
{
	(void)state;
#ifdef TND_FAILPOINTS
	tnd__failpoints_set(NULL);
#endif
	tnd_channel_close(reader);
	tnd_channel_close(writer);
	tnd_slab_pool_close(pool);
	return fd_count() == fds_before ? 0 : -1;
}

/* -- notes from a broken writer -- */

static int forged_fd(uint64_t bytes, bool with_pages, int seals)
{
	int fd = memfd_create("forged", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	assert_true(fd >= 0);
	assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
	if (with_pages)
		assert_int_equal(fallocate(fd, 0, 0, (off_t)bytes), 0);
	assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
	return fd;
}

/* Hands a note to the reader as its service thread does. `fd` is gone afterwards. */
static void arrive(struct tnd__slab_note note, int fd)
{
	struct tnd__packet packet;

	tnd__slab_packet(&note, fd, &packet);
	tnd__slabs_arrived(reader, &packet);
	if (fd >= 0 && packet.fds[0] >= 0)
		close(packet.fds[0]);
}

static int borrow_place(uint64_t place, uint64_t bytes, struct tnd_object *object)
{
	struct tnd_error error = {0};
	int rc = tnd__slabs_borrow(reader, place, bytes, tnd_deadline_in(20 * SECOND), object,
				   &error);

	if (rc < 0) {
		assert_int_equal(error.code, rc);
		assert_non_null(strstr(error.message, "expected"));
	}
	return rc;
}

static void test_forged(void **state)
{
	static const struct {
		uint64_t file_bytes, note_bytes;
		int seals;
		bool with_pages;
	} rows[] = {
		{PAGES, PAGES, TND__SLAB_SEALS & ~F_SEAL_SHRINK, true},
		{PAGES, PAGES, TND__SLAB_SEALS & ~F_SEAL_GROW, true},
		{PAGES, PAGES, TND__SLAB_SEALS & ~F_SEAL_FUTURE_WRITE, true},
		{PAGES, 2 * PAGES, TND__SLAB_SEALS, true},
		{2 * PAGES, PAGES, TND__SLAB_SEALS, true},
		{PAGES, 0, TND__SLAB_SEALS, true},
		{PAGES - 1, PAGES - 1, TND__SLAB_SEALS, true},
		{PAGES, PAGES, TND__SLAB_SEALS, false}, /* seen when it is borrowed */
	};
	struct tnd_object object = {0};

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
		struct tnd__slab_note note = {1000 + i, rows[i].note_bytes, 5, TND__NOTE_HERE};

		arrive(note, forged_fd(rows[i].file_bytes, rows[i].with_pages, rows[i].seals));
		assert_int_equal(borrow_place(tnd__slab_place(1000 + i, 5), PAGES / 2, &object),
				 TND_E_CORRUPT);
	}
	/* No descriptor, one that is no memfd, an index out of range, a note that is too short. */
	arrive((struct tnd__slab_note){2000, PAGES, 5, TND__NOTE_HERE}, -1);
	arrive((struct tnd__slab_note){2001, PAGES, 5, TND__NOTE_HERE},
	       open("/dev/zero", O_RDONLY | O_CLOEXEC));
	arrive((struct tnd__slab_note){2002, PAGES, TND__SLABS_MAX, TND__NOTE_HERE},
	       forged_fd(PAGES, true, TND__SLAB_SEALS));
	arrive((struct tnd__slab_note){2003, PAGES, 5, 77}, -1);
	arrive((struct tnd__slab_note){2004, PAGES, 5, TND__NOTE_RETIRE}, -1);
	tnd__slabs_arrived(reader, &(struct tnd__packet){.kind = TND__PACKET_SLAB, .bytes = 3});
	for (uint64_t serial = 2000; serial < 2005; serial++)
		assert_int_equal(borrow_place(tnd__slab_place(serial, 5), 1, &object),
				 TND_E_CORRUPT);
	assert_null(reader->slabs->views);
}

static void test_places(void **state)
{
	struct tnd_object object = {0};

	(void)state;
	arrive((struct tnd__slab_note){7, PAGES, 5, TND__NOTE_HERE},
	       forged_fd(PAGES, true, TND__SLAB_SEALS));
	/* Another index, too long, bits that are none of a place's, no serial, one that nobody has. */
	assert_int_equal(borrow_place(tnd__slab_place(7, 6), 1, &object), TND_E_CORRUPT);
	assert_int_equal(borrow_place(tnd__slab_place(7, 5), PAGES + 1, &object), TND_E_CORRUPT);
	assert_int_equal(borrow_place(tnd__slab_place(7, 5) | 2, 1, &object), TND_E_CORRUPT);
	assert_int_equal(borrow_place(tnd__slab_place(0, 5), 1, &object), TND_E_CORRUPT);
	assert_int_equal(borrow_place(UINT64_MAX, 1, &object), TND_E_CORRUPT);
	assert_int_equal(borrow_place(tnd__slab_place(8, 5), 1, &object), TND_E_CORRUPT);
	assert_int_equal(borrow_place(tnd__slab_place(7, 5), PAGES, &object), 0);
	assert_int_equal(tnd__slabs_release(reader, &object), 0);
	assert_int_equal(tnd__slabs_release(reader, &object), TND_E_INVALID);
}

/* What is held stays mapped, whatever the writer says. */
static void test_retired_while_held(void **state)
{
	struct tnd_object object = {0};
	unsigned char seen;

	(void)state;
	arrive((struct tnd__slab_note){7, PAGES, 5, TND__NOTE_HERE},
	       forged_fd(PAGES, true, TND__SLAB_SEALS));
	assert_int_equal(borrow_place(tnd__slab_place(7, 5), PAGES, &object), 0);
	arrive((struct tnd__slab_note){7, PAGES, 5, TND__NOTE_RETIRE}, -1);
	arrive((struct tnd__slab_note){8, PAGES, 5, TND__NOTE_HERE},
	       forged_fd(PAGES, true, TND__SLAB_SEALS));
	assert_int_equal(mincore((void *)(uintptr_t)object.data, PAGES / 4096, (void *)scratch), 0);
	assert_int_equal(((const unsigned char *)object.data)[PAGES - 1], 0);
	assert_int_equal(tnd__slabs_release(reader, &object), 0);
	assert_int_equal(mincore((void *)(uintptr_t)object.data, 4096, &seen), -1);
	/* One that is replaced without a word goes as well. */
	assert_int_equal(reader->slabs->views->serial, 8);
	assert_null(reader->slabs->views->next);
}

/* -- refused once -- */

#ifdef TND_FAILPOINTS
static int send_one(uint64_t bytes)
{
	struct tnd_error error = {0};
	int rc = tnd_channel_send(writer, scratch, bytes, 0, &error);

	if (rc < 0)
		assert_int_equal(error.code, rc);
	return rc;
}

static void test_send_faults(void **state)
{
	/* Twice: a slab of just the size is tried where a larger one cannot be had. */
	static const struct {
		const char *points;
		int code;
	} rows[] = {
		{"mem.alloc=ENOMEM@1x2", -ENOMEM},
		{"mem.map=ENOMEM@1x2", -ENOMEM},
		{"mem.memfd=EMFILE@1x2", -EMFILE},
		{"channel.slab-seal=EPERM@1x2", -EPERM},
		{"mem.fallocate=ENOSPC@1x2", -ENOSPC},
		{"mem.memfd=EMFILE@1x1", 0},
		{"group.alloc=ENOMEM", 0},
	};
	uint64_t bytes = MIB, got;

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
		assert_int_equal(tnd__failpoints_set(rows[i].points), 0);
		assert_int_equal(send_one(bytes), rows[i].code);
		tnd__failpoints_set(NULL);
		if (rows[i].code < 0)
			assert_int_equal(send_one(bytes), 0);
		assert_int_equal(tnd_channel_recv(reader, scratch, sizeof(scratch),
						  tnd_deadline_in(20 * SECOND), &got, NULL),
				 0);
		assert_int_equal(got, bytes);
		bytes += bytes / 4; /* soon too large for the last slab */
		if (bytes > sizeof(scratch))
			bytes = 20000;
		tnd__slabs_close(writer, false);
		assert_int_equal(tnd__slabs_host(writer, pool, NULL), 0);
		writer->slabs->serials = (i + 1) * 100;
	}
}

static void test_receive_faults(void **state)
{
	static const struct {
		const char *points;
		int code;
	} rows[] = {
		{"channel.view=ENOMEM", -ENOMEM},
		{"channel.hold=ENOMEM", -ENOMEM},
	};
	uint64_t got;

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
		assert_int_equal(tnd__failpoints_set(rows[i].points), 0);
		assert_int_equal(send_one(MIB + i * 2 * MIB), 0);
		assert_int_equal(tnd_channel_recv(reader, scratch, sizeof(scratch),
						  tnd_deadline_in(20 * SECOND), &got, NULL),
				 rows[i].code);
		tnd__failpoints_set(NULL);
		/* Nothing was lost. */
		assert_int_equal(tnd_channel_recv(reader, scratch, sizeof(scratch),
						  tnd_deadline_in(20 * SECOND), &got, NULL),
				 0);
		assert_int_equal(got, MIB + i * 2 * MIB);
	}
}
#endif

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_forged, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_places, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_retired_while_held, set_up, tear_down),
#ifdef TND_FAILPOINTS
		cmocka_unit_test_setup_teardown(test_send_faults, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_receive_faults, set_up, tear_down),
#endif
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
