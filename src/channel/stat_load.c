/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stat_load.c - the figures of one load, from the page that its owner writes (memory/live.h)
 *
 * The page is about the process whose pid it says, and only while that one has it: a child that was
 * forked off has the descriptor too, and may live on. What the page says is read as a channel's
 * segments are, without trust.
 */
#include <string.h>

#include "memory/live.h"
#include "stat_look.h"

#define LOOKS 8 /* at a name that changes */

_Static_assert(TND_STAT_LOAD_ALONE == (int)TND__LIVE_ALONE &&
		       TND_STAT_LOAD_MEMBER == (int)TND__LIVE_MEMBER &&
		       TND_STAT_LOAD_READER == (int)TND__LIVE_READER,
	       "one set of numbers");

/* Return: false where the page is gone or makes no sense. */
static bool take(const struct tnd__window *window, struct tnd__live_page *page)
{
	uint64_t magic;

	/* M1: the magic first; pairs with fill() in live.c. */
	if (!tnd__window_read(window, &magic, sizeof(magic), 0) || magic != TND__LIVE_MAGIC)
		return false;
	atomic_thread_fence(memory_order_acquire);
	return tnd__window_read(window, page, sizeof(*page), 0) &&
	       page->version == TND__LIVE_VERSION && page->role <= TND__LIVE_READER &&
	       page->pid > 0;
}

static const struct tnd__process *find_owner(const struct tnd__scan *scan, size_t first,
					     int32_t pid)
{
	size_t count = tnd__scan_run(scan, first);

	for (size_t i = 0; i < count; i++) {
		const struct tnd__process *process =
			&scan->processes[scan->sightings[first + i].process];

		if (tnd__innermost_pid(process) == pid)
			return process;
	}
	return NULL;
}

/* The name of the file, or "" where none was seen whole. */
static void take_name(const struct tnd__window *window, struct tnd_stat_load *load)
{
	const uint64_t at = offsetof(struct tnd__live_page, generation);
	char name[TND__LIVE_NAME_BYTES];
	uint32_t before, after;

	load->file[0] = '\0';
	for (int i = 0; i < LOOKS; i++) {
		if (!tnd__window_read(window, &before, sizeof(before), at))
			return;
		/* G2: pairs with tnd__live_file(): the bytes below are of this name or a later. */
		atomic_thread_fence(memory_order_acquire);
		if (!tnd__window_read(window, name, sizeof(name),
				      offsetof(struct tnd__live_page, name)))
			return;
		/* G1: pairs with tnd__live_file(): a later byte has its generation seen here. */
		atomic_thread_fence(memory_order_acquire);
		if (!tnd__window_read(window, &after, sizeof(after), at))
			return;
		if (before == after && before % 2 == 0) {
			tnd__printable(name, strnlen(name, sizeof(name)), load->file,
				       sizeof(load->file));
			return;
		}
	}
}

bool tnd__look_load(const struct tnd__scan *scan, size_t first, struct tnd_stat_load *ret_load)
{
	const struct tnd__process *owner;
	struct tnd__window window;
	struct tnd__live_page page;
	bool seen;

	if (scan->sightings[first].bytes != TND__LIVE_BYTES ||
	    !tnd__window_open(scan, first, &window))
		return false;
	seen = take(&window, &page);
	owner = seen ? find_owner(scan, first, page.pid) : NULL;
	if (owner) {
		uint64_t total = TND__LOAD(page.total_bytes);

		*ret_load = (struct tnd_stat_load){
			.pid = page.pid,
			.rank = page.role == TND__LIVE_READER ? TND_STAT_NO_RANK : page.rank,
			.role = page.role,
			.state = tnd__state_of(owner),
			.done_bytes = TND__MIN(TND__LOAD(page.done_bytes), total),
			.total_bytes = total,
			.charged_bytes = TND__LOAD(page.charged_bytes),
			.budget_bytes = TND__LOAD(page.budget_bytes),
			.storage_bytes = TND__LOAD(page.storage_bytes),
		};
		take_name(&window, ret_load);
	}
	tnd__window_close(&window);
	return owner != NULL;
}
