/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_bare.c - yardsticks: slots and a counter, nothing else
 *
 *   futex   the reader sleeps on the counter: what a wake costs on this machine
 *   line    the reader spins on it: what a cache line takes from one core to another
 *
 * No flow control: a reader that is 256 objects late gets what was not meant for it, and the run
 * fails. So only for scenes where the queue is empty at each send.
 */
#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "bench_link.h"

#define SLOTS 256u

struct bare_slot {
	uint64_t bytes;
	_Alignas(64) unsigned char data[];
};

struct bare_area {
	_Alignas(128) _Atomic uint32_t count;
	_Alignas(128) unsigned char slots[];
};

struct link {
	struct bare_area *area;
	size_t slot_bytes;
	uint32_t seen; /* objects sent, or received */
	bool sleeps;
};

static struct link *make(const struct link_setup *setup, bool sleeps)
{
	struct link *link = bench_alloc(sizeof(*link));

	link->slot_bytes = sizeof(struct bare_slot) + ((setup->max_bytes + 127) & ~UINT64_C(127));
	link->area = bench_shared(sizeof(*link->area) + SLOTS * link->slot_bytes);
	link->sleeps = sleeps;
	return link;
}

static struct link *make_futex(const struct link_setup *setup)
{
	return make(setup, true);
}

static struct link *make_line(const struct link_setup *setup)
{
	return make(setup, false);
}

static void begin_writer(struct link *link)
{
	(void)link;
}

static void begin_reader(struct link *link, uint32_t rank)
{
	(void)link;
	(void)rank;
}

static struct bare_slot *slot_of(const struct link *link)
{
	return (void *)(link->area->slots + link->seen % SLOTS * link->slot_bytes);
}

static void send_bare(struct link *link, const void *data, size_t bytes)
{
	struct bare_area *area = link->area;
	struct bare_slot *slot = slot_of(link);

	memcpy(slot->data, data, bytes);
	slot->bytes = bytes;
	link->seen++;
	atomic_fetch_add_explicit(&area->count, 1, memory_order_seq_cst);
	if (link->sleeps)
		syscall(SYS_futex, &area->count, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static const void *recv_bare(struct link *link, void *buffer, size_t capacity, size_t *ret_bytes)
{
	struct bare_area *area = link->area;
	struct bare_slot *slot = slot_of(link);

	while (atomic_load_explicit(&area->count, memory_order_acquire) == link->seen)
		if (link->sleeps)
			syscall(SYS_futex, &area->count, FUTEX_WAIT, link->seen, NULL, NULL, 0);
	link->seen++;
	if (slot->bytes > capacity)
		bench_die("recv: a longer object than any that was sent", EBADMSG);
	*ret_bytes = slot->bytes;
	memcpy(buffer, slot->data, slot->bytes);
	return buffer;
}

const struct link_kind bench_futex = {
	.name = "futex",
	.lossy = true,
	.make = make_futex,
	.begin_writer = begin_writer,
	.begin_reader = begin_reader,
	.send = send_bare,
	.recv = recv_bare,
};

const struct link_kind bench_line = {
	.name = "line",
	.lossy = true,
	.make = make_line,
	.begin_writer = begin_writer,
	.begin_reader = begin_reader,
	.send = send_bare,
	.recv = recv_bare,
};
