/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segment.c - the memory of a channel: taken, mapped and sealed by the writer
 *
 *   address space, one reservation            '-- the same pages --'
 *   +--------+-------------+------------------+------------------+
 *   | header | descriptors | arena            | arena once more  |      data segment
 *   +--------+-------------+------------------+------------------+
 *   writer: writable, not in forked children    readers: read-only (segment_attach.c)
 *
 * The arena is mapped twice, so that an object that wraps round is contiguous for both sides.
 *
 * All pages are there before anybody gets a descriptor: a page that is first touched later could
 * find no memory, and the answer to that is SIGBUS or the OOM killer. They are taken in steps of
 * 2 MiB with a look at the limits before each (headroom.c).
 *
 * Order: take, map, fill in, seal. F_SEAL_FUTURE_WRITE leaves the mappings that there are as they
 * are, so ours stays the only one that can be written through, and MADV_DONTFORK keeps it out of
 * children. Nobody else has the descriptors before the seals are on.
 *
 * On failure nothing is left: memory, mappings, descriptors.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "channel_internal.h"
#include "memory/headroom.h"
#include "segment.h"

/* Sizes of both segments and what is where in the data segment. */
struct plan {
	uint64_t slot_count, arena_offset, arena_bytes, data_bytes, control_bytes;
	char what[96]; /* for sentences */
};

static void make_plan(const struct tnd__segment_opts *opts, struct plan *plan)
{
	char name[TND_CHANNEL_NAME_MAX];

	plan->slot_count = 1;
	while (plan->slot_count < opts->max_objects)
		plan->slot_count *= 2;
	plan->arena_offset = tnd__segment_arena_offset(plan->slot_count);
	plan->arena_bytes = tnd__round_up(opts->max_bytes, TND__PAGE);
	plan->data_bytes = plan->arena_offset + plan->arena_bytes;
	plan->control_bytes = TND__CONTROL_BYTES;
	tnd__printable(opts->name, strlen(opts->name), name, sizeof(name));
	snprintf(plan->what, sizeof(plan->what), "channel '%s'", name);
}

static int check_opts(const struct tnd__segment_opts *opts, struct tnd_error *reterr)
{
	const struct {
		const char *name;
		uint64_t value, least, most;
	} rows[] = {
		{"max_bytes", opts->max_bytes, TND_CHANNEL_BYTES_MIN, TND__SEGMENT_BYTES_MAX},
		{"max_objects", opts->max_objects, 1, TND_CHANNEL_OBJECTS_MAX},
		{"max_object_bytes", opts->max_object_bytes, 0, TND__SEGMENT_BYTES_MAX},
		{"places", opts->place_count, 1, TND__PLACES_MAX},
	};

	for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++)
		if (rows[i].value < rows[i].least || rows[i].value > rows[i].most)
			return tnd__fail_plain(reterr, TND_E_INVALID,
					       "expected %s of %" PRIu64 " to %" PRIu64
					       ", found %" PRIu64 "; give one within these",
					       rows[i].name, rows[i].least, rows[i].most,
					       rows[i].value);
	if (opts->max_bytes % TND__ALIGN)
		return tnd__fail_plain(reterr, TND_E_INVALID,
				       "expected max_bytes in steps of %d, found %" PRIu64
				       "; round it up",
				       TND__ALIGN, opts->max_bytes);
	return 0;
}

uint64_t tnd__segments_bytes(const struct tnd__segment_opts *opts)
{
	struct plan plan;

	if (check_opts(opts, NULL) < 0)
		return UINT64_MAX;
	make_plan(opts, &plan);
	return plan.data_bytes + plan.control_bytes;
}

static int fail_call(struct tnd_error *reterr, int code, const struct plan *plan, const char *call)
{
	return tnd__fail_plain(reterr, code,
			       "expected %s of %" PRIu64
			       " bytes from the kernel (%s), found %s: %s; free some, or make the "
			       "channel smaller",
			       plan->what, plan->data_bytes, call, tnd_error_name(code),
			       tnd_strerror(code));
}

static int make_memfd(const char *kind, const char *name)
{
	char full[128];
	int rc = tnd__failpoint("channel.memfd");

	if (rc < 0)
		return rc;
	snprintf(full, sizeof(full), "tundish.channel.%s:%.*s", kind, TND_CHANNEL_NAME_MAX - 1,
		 name);
	return tnd__memfd(full);
}

static int take_pages(struct tnd__headroom *headroom, int fd, uint64_t bytes,
		      const struct plan *plan, struct tnd_error *reterr)
{
	int rc = tnd__failpoint("channel.truncate");

	if (rc == 0 && ftruncate(fd, (off_t)bytes) < 0)
		rc = -errno;
	if (rc < 0)
		return fail_call(reterr, rc, plan, "ftruncate");
	return tnd__headroom_take(headroom, fd, 0, bytes, reterr);
}

static int take_memory(struct tnd__segments *segments, const struct plan *plan,
		       struct tnd_error *reterr)
{
	struct tnd__headroom headroom;
	int rc = tnd__headroom_file(TND__MAX(plan->data_bytes, plan->control_bytes), plan->what,
				    reterr);

	if (rc < 0)
		return rc;
	tnd__headroom_open(&headroom, plan->data_bytes + plan->control_bytes, plan->what);
	rc = take_pages(&headroom, segments->data_fd, plan->data_bytes, plan, reterr);
	if (rc == 0)
		rc = take_pages(&headroom, segments->control_fd, plan->control_bytes, plan, reterr);
	tnd__headroom_close(&headroom);
	return rc;
}

/* Over the reservation at `data`. Return: 0, -errno. */
static int map_data(unsigned char *data, const struct tnd__segments *segments, uint64_t data_bytes,
		    uint64_t arena_offset, int protection)
{
	int flags = MAP_SHARED | MAP_FIXED, fd = segments->data_fd;
	int rc = tnd__failpoint("channel.map-data");

	if (rc < 0)
		return rc;
	if (mmap(data, data_bytes, protection, flags, fd, 0) == MAP_FAILED ||
	    mmap(data + data_bytes, data_bytes - arena_offset, protection, flags, fd,
		 (off_t)arena_offset) == MAP_FAILED)
		return -errno;
	return 0;
}

static int map_control(int fd, void **ret_control)
{
	int rc = tnd__failpoint("channel.map-control");
	void *control;

	if (rc < 0)
		return rc;
	control = mmap(NULL, TND__CONTROL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (control == MAP_FAILED)
		return -errno;
	*ret_control = control;
	return 0;
}

int tnd__segments_map(struct tnd__segments *segments, uint64_t data_bytes, uint64_t arena_offset,
		      int protection)
{
	uint64_t arena_bytes = data_bytes - arena_offset, map_bytes = data_bytes + arena_bytes;
	void *control = NULL;
	unsigned char *data;
	int rc = tnd__failpoint("channel.map");

	if (rc < 0)
		return rc;
	data = mmap(NULL, map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (data == MAP_FAILED)
		return -errno;
	rc = map_data(data, segments, data_bytes, arena_offset, protection);
	if (rc == 0)
		rc = map_control(segments->control_fd, &control);
	if (rc < 0) {
		munmap(data, map_bytes);
		return rc;
	}
	segments->header = (struct tnd__data_header *)(void *)data;
	segments->descriptors = (struct tnd__descriptor *)(void *)(data + TND__HEADER_BYTES);
	segments->arena = data + arena_offset;
	segments->control = control;
	segments->data_map_bytes = map_bytes;
	segments->arena_bytes = arena_bytes;
	segments->memory_bytes = data_bytes + TND__CONTROL_BYTES;
	return 0;
}

static void unmap(struct tnd__segments *segments, bool with_data)
{
	if (with_data)
		munmap(segments->header, segments->data_map_bytes);
	munmap(segments->control, TND__CONTROL_BYTES);
}

/* Nobody else sees the segments yet: plain stores, but for what is atomic by its type. */
static int fill_in(struct tnd__segments *segments, const struct tnd__segment_opts *opts,
		   const struct plan *plan)
{
	struct tnd__data_header *header = segments->header;
	struct tnd__control *control = segments->control;
	struct timespec now;
	int rc = tnd__failpoint("channel.random");

	if (rc < 0)
		return rc;
	do {
		rc = getrandom(header->id, sizeof(header->id), 0) < 0 ? -errno : 0;
	} while (rc == -EINTR);
	if (rc < 0)
		return rc;
	clock_gettime(CLOCK_REALTIME, &now);
	header->magic = TND__DATA_MAGIC;
	header->version = TND__LAYOUT_VERSION;
	header->place_count = opts->place_count;
	header->max_bytes = opts->max_bytes;
	header->max_objects = opts->max_objects;
	header->slot_count = plan->slot_count;
	header->descriptor_offset = TND__HEADER_BYTES;
	header->arena_offset = plan->arena_offset;
	header->arena_bytes = plan->arena_bytes;
	header->segment_bytes = plan->data_bytes;
	header->max_object_bytes = opts->max_object_bytes;
	header->first_number = opts->first_number;
	header->writer_pid = (uint32_t)getpid();
	header->on_dead = opts->on_dead;
	header->created_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
	snprintf(header->name, sizeof(header->name), "%s", opts->name);
	atomic_store_explicit(&header->published, opts->first_number, memory_order_relaxed);
	control->magic = TND__CONTROL_MAGIC;
	control->version = TND__LAYOUT_VERSION;
	control->place_count = opts->place_count;
	control->segment_bytes = plan->control_bytes;
	memcpy(control->id, header->id, sizeof(control->id));
	for (size_t i = 0; i < TND__PLACES_MAX; i++)
		atomic_store_explicit(&control->places[i].cursor, opts->first_number,
				      memory_order_relaxed);
	return 0;
}

static int seal(const struct tnd__segments *segments)
{
	int rc = tnd__failpoint("channel.seal");

	if (rc < 0)
		return rc;
	if (madvise(segments->header, segments->data_map_bytes, MADV_DONTFORK) < 0 ||
	    fcntl(segments->data_fd, F_ADD_SEALS, TND__DATA_SEALS) < 0 ||
	    fcntl(segments->control_fd, F_ADD_SEALS, TND__CONTROL_SEALS) < 0)
		return -errno;
	return 0;
}

void tnd__segments_keep(struct tnd__segments *segments, const struct tnd__data_header *header)
{
	segments->max_bytes = header->max_bytes;
	segments->max_objects = header->max_objects;
	segments->slot_count = header->slot_count;
	segments->max_object_bytes = header->max_object_bytes;
	segments->first_number = header->first_number;
	segments->place_count = header->place_count;
	segments->on_dead = header->on_dead;
	segments->writer_pid = header->writer_pid;
	memcpy(segments->name, header->name, sizeof(segments->name));
	segments->name[sizeof(segments->name) - 1] = '\0';
}

int tnd__segments_create(const struct tnd__segment_opts *opts, struct tnd__segments *ret_segments,
			 struct tnd_error *reterr)
{
	struct tnd__segments segments = {.data_fd = -1, .control_fd = -1};
	struct plan plan;
	int rc = check_opts(opts, reterr);

	if (rc < 0)
		return rc;
	make_plan(opts, &plan);
	segments.data_fd = rc = make_memfd("data", opts->name);
	if (rc < 0)
		return fail_call(reterr, rc, &plan, "memfd_create");
	segments.control_fd = rc = make_memfd("control", opts->name);
	if (rc < 0) {
		fail_call(reterr, rc, &plan, "memfd_create");
		goto close_data;
	}
	rc = take_memory(&segments, &plan, reterr);
	if (rc < 0)
		goto close_control;
	rc = tnd__segments_map(&segments, plan.data_bytes, plan.arena_offset,
			       PROT_READ | PROT_WRITE);
	if (rc < 0) {
		fail_call(reterr, rc, &plan, "mmap");
		goto close_control;
	}
	rc = fill_in(&segments, opts, &plan);
	if (rc == 0)
		rc = seal(&segments);
	if (rc < 0) {
		fail_call(reterr, rc, &plan, "sealing");
		goto unmap;
	}
	tnd__segments_keep(&segments, segments.header);
	*ret_segments = segments;
	return 0;

unmap:
	unmap(&segments, true);
close_control:
	close(segments.control_fd);
close_data:
	close(segments.data_fd);
	return rc;
}

void tnd__segments_close(struct tnd__segments *segments, bool is_writer, bool forked)
{
	/* The writer's data did not come along into the child: something else may be there. */
	unmap(segments, !(is_writer && forked));
	close(segments->control_fd);
	close(segments->data_fd);
	memset(segments, 0, sizeof(*segments));
	segments->data_fd = segments->control_fd = -1;
}
