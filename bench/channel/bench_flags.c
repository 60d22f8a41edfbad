/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_flags.c - peer: slots of fixed size with a byte of flag for each reader
 *
 * The protocol that inference engines use between the scheduler and its workers, written anew in C:
 * 10 slots of 24 MiB. A slot has a byte `written` and a byte for each reader, all beside each
 * other. The writer waits until a slot was never written or everybody has read it, clears
 * `written`, writes length and bytes, clears the readers' bytes and sets `written`; a reader waits
 * until `written` is set and its own byte is not, reads, and sets its byte. Both wait by
 * sched_yield; a reader that got nothing for a second sleeps. So the writer notifies after every
 * object, whether anybody sleeps or not. Here that is one futex wake, which is cheaper than the
 * message on a socket that it is there.
 */
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "bench_link.h"

#define SLOT_BYTES ((size_t)24 << 20)
#define SLOT_COUNT 10u
#define BUSY_NS 1000000000
#define RECHECK_S 5

struct slot {
	_Atomic unsigned char written, read[BENCH_READERS_MAX];
};

struct flags_area {
	struct slot slots[SLOT_COUNT];
	_Atomic uint32_t notify;
};

struct link {
	uint32_t reader_count, rank;
	uint32_t slot;
	int64_t last_read_ns;
	struct flags_area *area;
	unsigned char *bytes;
};

static struct link *make(const struct link_setup *setup)
{
	struct link *link = bench_alloc(sizeof(*link));

	link->reader_count = setup->reader_count;
	link->area = bench_shared(sizeof(*link->area));
	link->bytes = bench_shared(SLOT_BYTES * SLOT_COUNT);
	return link;
}

static void begin_writer(struct link *link)
{
	(void)link;
}

static void begin_reader(struct link *link, uint32_t rank)
{
	link->rank = rank;
	link->last_read_ns = bench_now();
}

static bool free_slot(const struct link *link, const struct slot *slot)
{
	if (!atomic_load_explicit(&slot->written, memory_order_acquire))
		return true;
	for (uint32_t i = 0; i < link->reader_count; i++)
		if (!atomic_load_explicit(&slot->read[i], memory_order_acquire))
			return false;
	return true;
}

static void send_slot(struct link *link, const void *data, size_t bytes)
{
	struct slot *slot = &link->area->slots[link->slot];
	unsigned char *to = link->bytes + SLOT_BYTES * link->slot;
	uint64_t length = bytes;

	while (!free_slot(link, slot))
		sched_yield();
	atomic_store_explicit(&slot->written, 0, memory_order_release);
	memcpy(to, &length, sizeof(length));
	memcpy(to + 64, data, bytes);
	for (uint32_t i = 0; i < link->reader_count; i++)
		atomic_store_explicit(&slot->read[i], 0, memory_order_relaxed);
	atomic_store_explicit(&slot->written, 1, memory_order_seq_cst);
	link->slot = (link->slot + 1) % SLOT_COUNT;
	atomic_fetch_add_explicit(&link->area->notify, 1, memory_order_seq_cst);
	syscall(SYS_futex, &link->area->notify, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static bool full_slot(const struct link *link, const struct slot *slot)
{
	return atomic_load_explicit(&slot->written, memory_order_acquire) &&
	       !atomic_load_explicit(&slot->read[link->rank], memory_order_relaxed);
}

static void wait_full(const struct link *link, const struct slot *slot)
{
	struct timespec recheck = {.tv_sec = RECHECK_S};

	while (!full_slot(link, slot)) {
		uint32_t seen = atomic_load_explicit(&link->area->notify, memory_order_seq_cst);

		if (bench_now() - link->last_read_ns <= BUSY_NS)
			sched_yield();
		else if (!full_slot(link, slot))
			syscall(SYS_futex, &link->area->notify, FUTEX_WAIT, seen, &recheck, NULL,
				0);
	}
}

static const void *recv_slot(struct link *link, void *buffer, size_t capacity, size_t *ret_bytes)
{
	struct slot *slot = &link->area->slots[link->slot];
	const unsigned char *from = link->bytes + SLOT_BYTES * link->slot;
	uint64_t length;

	wait_full(link, slot);
	memcpy(&length, from, sizeof(length));
	if (length > capacity)
		bench_die("recv: a longer object than any that was sent", EBADMSG);
	memcpy(buffer, from + 64, length);
	atomic_store_explicit(&slot->read[link->rank], 1, memory_order_release);
	link->slot = (link->slot + 1) % SLOT_COUNT;
	link->last_read_ns = bench_now();
	*ret_bytes = length;
	return buffer;
}

const struct link_kind bench_flags = {
	.name = "flags",
	.most_bytes = SLOT_BYTES - 64,
	.make = make,
	.begin_writer = begin_writer,
	.begin_reader = begin_reader,
	.send = send_slot,
	.recv = recv_slot,
};
