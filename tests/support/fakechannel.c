/* SPDX-License-Identifier: Apache-2.0 */
/* fakechannel.c - see fakechannel.h */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "fakechannel.h"

#define MAX_BYTES 65536
#define SLOTS 8
#define PLACES 4

#define STORE(word, value) atomic_store_explicit(&(word), (value), memory_order_relaxed)
#define LOAD(word) atomic_load_explicit(&(word), memory_order_relaxed)

static void need(int ok, const char *what)
{
	if (ok)
		return;
	perror(what);
	exit(99);
}

static int memfd(const char *kind, const char *name, uint64_t bytes, void **ret_map)
{
	char text[128];
	int fd;

	snprintf(text, sizeof(text), "tundish.channel.%s:%s", kind, name);
	fd = memfd_create(text, MFD_CLOEXEC);
	need(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0, "memfd_create");
	*ret_map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	need(*ret_map != MAP_FAILED, "mmap");
	return fd;
}

void fake_make(struct fake *fake, const char *name, uint64_t first_number)
{
	struct tnd__data_header *header;
	void *map;

	*fake = (struct fake){.data_bytes = 2 * TND__HEADER_BYTES + MAX_BYTES};
	fake->data_fd = memfd("data", name, fake->data_bytes, &map);
	fake->header = header = map;
	fake->descriptors = (struct tnd__descriptor *)(void *)((char *)map + TND__HEADER_BYTES);
	fake->control_fd = memfd("control", name, sizeof(*fake->control), &map);
	fake->control = map;
	header->magic = TND__DATA_MAGIC;
	header->version = TND__LAYOUT_VERSION;
	header->place_count = PLACES;
	need(getrandom(header->id, sizeof(header->id), 0) == sizeof(header->id), "getrandom");
	header->max_bytes = header->arena_bytes = MAX_BYTES;
	header->max_objects = header->slot_count = SLOTS;
	header->descriptor_offset = TND__HEADER_BYTES;
	header->arena_offset = 2 * TND__HEADER_BYTES;
	header->segment_bytes = fake->data_bytes;
	header->first_number = first_number;
	header->writer_pid = (uint32_t)getpid();
	snprintf(header->name, sizeof(header->name), "%s", name);
	STORE(header->published, first_number);
	fake->control->magic = TND__CONTROL_MAGIC;
	fake->control->version = TND__LAYOUT_VERSION;
	fake->control->place_count = PLACES;
	memcpy(fake->control->id, header->id, sizeof(header->id));
	fake->control->segment_bytes = sizeof(*fake->control);
	for (int place = 0; place < PLACES; place++)
		STORE(fake->control->places[place].cursor, first_number);
}

void fake_send(struct fake *fake, uint64_t bytes)
{
	uint64_t number = LOAD(fake->header->published);
	uint64_t position = LOAD(fake->control->head_position);

	fake->descriptors[number & (SLOTS - 1)] =
		(struct tnd__descriptor){.number = number, .position = position, .bytes = bytes};
	STORE(fake->control->head_position, position + bytes);
	STORE(fake->control->sent_bytes, LOAD(fake->control->sent_bytes) + bytes);
	STORE(fake->header->published, number + 1);
}

void fake_seat(struct fake *fake, uint32_t place, uint32_t rank, uint32_t state, uint32_t pid)
{
	struct tnd__seat *seat = &fake->header->seats[place];

	STORE(seat->rank, rank);
	STORE(seat->generation, place + 1);
	STORE(seat->pid, pid);
	STORE(seat->state, state);
}

void fake_close(struct fake *fake)
{
	munmap(fake->header, fake->data_bytes);
	munmap(fake->control, sizeof(*fake->control));
	close(fake->data_fd);
	close(fake->control_fd);
}
