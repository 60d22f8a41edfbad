/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segment_attach.c - the memory of a channel that another process made
 *
 * The peer is of our user, but may be broken: nothing that it says may make us touch memory that is
 * not there. In this order:
 *
 *   seals    nobody can cut the files under us any more; only a memfd has them, so nothing else
 *            passes
 *   sizes    whole pages, and all of them taken: a hole would be filled on our account
 *   headers  read once into a copy, and each figure bounded before anything is computed from it
 *   map      the data read-only; the kernel then refuses mprotect as well
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "segment.h"

/* Of the control segment's header: what does not change. */
struct control_head {
	uint64_t magic;
	uint32_t version, place_count;
	unsigned char id[16];
	uint64_t segment_bytes;
};
static_assert(offsetof(struct control_head, id) == offsetof(struct tnd__control, id), "layout.h");
static_assert(offsetof(struct control_head, segment_bytes) ==
		      offsetof(struct tnd__control, segment_bytes),
	      "layout.h");

struct row {
	const char *what;
	uint64_t found, least, most;
};

static int check_rows(const struct row *rows, size_t count, struct tnd_error *reterr)
{
	for (size_t i = 0; i < count; i++)
		if (rows[i].found < rows[i].least || rows[i].found > rows[i].most)
			return tnd__fail_plain(reterr, TND_E_CORRUPT,
					       "expected %s of %" PRIu64 " to %" PRIu64
					       " in the memory of the channel, found %" PRIu64
					       "; the writer is broken, start it again",
					       rows[i].what, rows[i].least, rows[i].most,
					       rows[i].found);
	return 0;
}

/* Return: 0; TND_E_CORRUPT; -errno. */
static int check_file(int fd, int seals, int without, uint64_t *ret_bytes, struct tnd_error *reterr)
{
	struct stat stat = {0};
	struct row rows[3];
	int found = fcntl(fd, F_GET_SEALS), rc;

	if (found < 0 || (found & seals) != seals || found & without)
		return tnd__fail_plain(reterr, TND_E_CORRUPT,
				       "expected shared memory with the seals 0x%x, found %s 0x%x; "
				       "the writer is broken, start it again",
				       (unsigned int)seals,
				       found < 0 ? "a file without," : "the seals",
				       found < 0 ? 0 : (unsigned int)found);
	rc = tnd__failpoint("channel.stat");
	if (rc == 0 && fstat(fd, &stat) < 0)
		rc = -errno;
	if (rc < 0)
		return tnd__fail_plain(reterr, rc,
				       "expected to see the size of the channel's memory, found %s",
				       tnd_strerror(rc));
	*ret_bytes = (uint64_t)stat.st_size;
	rows[0] = (struct row){"file size", *ret_bytes, TND__PAGE, 2 * TND__SEGMENT_BYTES_MAX};
	rows[1] = (struct row){"file size % 4096", *ret_bytes % TND__PAGE, 0, 0};
	rows[2] = (struct row){"512-byte blocks without holes", (uint64_t)stat.st_blocks,
			       *ret_bytes / 512, UINT64_MAX};
	return check_rows(rows, 3, reterr);
}

/* The begin of the file, once. Return: 0; TND_E_CORRUPT. */
static int read_head(int fd, void *out, size_t bytes, struct tnd_error *reterr)
{
	struct row row = {"bytes of a header", 0, bytes, bytes};
	ssize_t got;

	do {
		got = pread(fd, out, bytes, 0);
	} while (got < 0 && errno == EINTR);
	row.found = got > 0 ? (uint64_t)got : 0;
	return check_rows(&row, 1, reterr);
}

static int check_version(const char *what, uint64_t magic, uint64_t expected, uint32_t version,
			 struct tnd_error *reterr)
{
	struct row row = {what, magic, expected, expected};
	int rc = check_rows(&row, 1, reterr);

	if (rc < 0 || version == TND__LAYOUT_VERSION)
		return rc;
	return tnd__fail_plain(reterr, TND_E_VERSION,
			       "expected layout version %u of the channel, found %u; run the same "
			       "version of tundish in both processes",
			       TND__LAYOUT_VERSION, version);
}

static int check_data(const struct tnd__data_header *header, uint64_t file_bytes,
		      struct tnd_error *reterr)
{
	const uint64_t slots = header->slot_count;
	const struct row bounds[] = {
		{"place_count", header->place_count, 1, TND__PLACES_MAX},
		{"max_bytes", header->max_bytes, TND_CHANNEL_BYTES_MIN, TND__SEGMENT_BYTES_MAX},
		{"max_bytes % 64", header->max_bytes % TND__ALIGN, 0, 0},
		{"max_objects", header->max_objects, 1, TND_CHANNEL_OBJECTS_MAX},
		{"slot_count", slots, header->max_objects, TND_CHANNEL_OBJECTS_MAX},
		{"slot_count & (slot_count - 1)", slots & (slots - 1), 0, 0},
		{"descriptor_offset", header->descriptor_offset, TND__HEADER_BYTES,
		 TND__HEADER_BYTES},
		{"arena_bytes", header->arena_bytes, header->max_bytes, TND__SEGMENT_BYTES_MAX},
		{"arena_bytes % 4096", header->arena_bytes % TND__PAGE, 0, 0},
		{"max_object_bytes", header->max_object_bytes, 0, TND__SEGMENT_BYTES_MAX},
		{"on_dead", header->on_dead, 0, TND_CHANNEL_DEAD_EVICT},
		{"last byte of name", (unsigned char)header->name[sizeof(header->name) - 1], 0, 0},
	};
	struct row sums[3];
	uint64_t offset, bytes;
	int rc = check_rows(bounds, sizeof(bounds) / sizeof(*bounds), reterr);

	if (rc < 0)
		return rc;
	offset = tnd__segment_arena_offset(slots);
	bytes = offset + header->arena_bytes;
	sums[0] = (struct row){"arena_offset", header->arena_offset, offset, offset};
	sums[1] = (struct row){"segment_bytes", header->segment_bytes, bytes, bytes};
	sums[2] = (struct row){"file size", file_bytes, bytes, bytes};
	return check_rows(sums, 3, reterr);
}

static int check_control(const struct control_head *control, const struct tnd__data_header *data,
			 uint64_t file_bytes, struct tnd_error *reterr)
{
	const struct row rows[] = {
		{"the control segment's place_count", control->place_count, data->place_count,
		 data->place_count},
		{"the control segment's segment_bytes", control->segment_bytes, TND__CONTROL_BYTES,
		 TND__CONTROL_BYTES},
		{"the control segment's file size", file_bytes, TND__CONTROL_BYTES,
		 TND__CONTROL_BYTES},
	};

	if (memcmp(control->id, data->id, sizeof(data->id)) != 0)
		return tnd__fail_plain(reterr, TND_E_CORRUPT,
				       "expected the two segments of one channel, found different "
				       "ids; the writer is broken, start it again");
	return check_rows(rows, sizeof(rows) / sizeof(*rows), reterr);
}

/* *ret_header: what was checked. Return: 0; TND_E_CORRUPT; TND_E_VERSION; -errno. */
static int check_all(const struct tnd__segments *segments, struct tnd__data_header *ret_header,
		     struct tnd_error *reterr)
{
	uint64_t data_bytes = 0, control_bytes = 0;
	struct control_head control = {0};
	int rc = check_file(segments->data_fd, TND__DATA_SEALS, 0, &data_bytes, reterr);

	if (rc == 0)
		rc = check_file(segments->control_fd, TND__CONTROL_SEALS,
				F_SEAL_WRITE | F_SEAL_FUTURE_WRITE, &control_bytes, reterr);
	if (rc == 0)
		rc = read_head(segments->data_fd, ret_header, sizeof(*ret_header), reterr);
	if (rc == 0)
		rc = read_head(segments->control_fd, &control, sizeof(control), reterr);
	if (rc == 0)
		rc = check_version("the data segment's magic", ret_header->magic, TND__DATA_MAGIC,
				   ret_header->version, reterr);
	if (rc == 0)
		rc = check_version("the control segment's magic", control.magic, TND__CONTROL_MAGIC,
				   control.version, reterr);
	if (rc == 0)
		rc = check_data(ret_header, data_bytes, reterr);
	if (rc == 0)
		rc = check_control(&control, ret_header, control_bytes, reterr);
	return rc;
}

static int map_checked(struct tnd__segments *segments, const struct tnd__data_header *header,
		       struct tnd_error *reterr)
{
	int rc =
		tnd__segments_map(segments, header->segment_bytes, header->arena_offset, PROT_READ);

	if (rc == -EACCES || rc == -EPERM)
		return tnd__fail_plain(
			reterr, TND_E_CORRUPT,
			"expected descriptors of the channel's memory to read one and "
			"write the other, found %s; the writer is broken, start it "
			"again",
			tnd_error_name(rc));
	if (rc < 0)
		return tnd__fail_plain(
			reterr, rc,
			"expected address space for %" PRIu64
			" bytes of the channel, the arena twice, found %s; raise the "
			"process's limit (ulimit -v)",
			header->segment_bytes, tnd_strerror(rc));
	return 0;
}

int tnd__segments_attach(int data_fd, int control_fd, struct tnd__segments *ret_segments,
			 struct tnd_error *reterr)
{
	struct tnd__segments segments = {.data_fd = data_fd, .control_fd = control_fd};
	struct tnd__data_header header;
	int rc = check_all(&segments, &header, reterr);

	if (rc == 0)
		rc = map_checked(&segments, &header, reterr);
	if (rc < 0) {
		close(data_fd);
		close(control_fd);
		return rc;
	}
	tnd__segments_keep(&segments, &header);
	*ret_segments = segments;
	return 0;
}
