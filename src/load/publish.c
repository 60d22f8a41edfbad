/* SPDX-License-Identifier: Apache-2.0 */
/* publish.c - the counters of a load that are seen from outside (memory/live.h) */
#include "load_internal.h"
#include "memory/live.h"

static void set(_Atomic uint64_t *counter, uint64_t value)
{
	atomic_store_explicit(counter, value, memory_order_relaxed);
}

void tnd__publish_open(struct tnd_load *load)
{
	struct tnd__live_page *page;
	uint32_t role = load->outlet                   ? TND__LIVE_READER
			: load->member && !load->guest ? TND__LIVE_MEMBER
						       : TND__LIVE_ALONE;

	/* A load that cannot be seen is a load all the same. */
	if (tnd__live_open(role, load->outlet ? UINT32_MAX : load->rank, &load->live) < 0)
		return;
	page = tnd__live_page(load->live);
	set(&page->total_bytes, load->totals.kept_bytes);
	tnd__publish_figures(load);
}

void tnd__publish_figures(struct tnd_load *load)
{
	struct tnd__live_page *page = tnd__live_page(load->live);
	struct tnd_budget_stats budget = {.struct_bytes = sizeof(budget)};
	struct tnd__storage_stats storage;

	if (!page)
		return;
	tnd_budget_stats(load->budget, &budget);
	set(&page->charged_bytes, budget.charged_bytes);
	set(&page->budget_bytes, budget.bound_bytes);
	pthread_mutex_lock(&load->flow->lock);
	if (load->storage) {
		tnd__storage_stats(load->storage, &storage);
		set(&page->storage_bytes, storage.storage_bytes);
	}
	pthread_mutex_unlock(&load->flow->lock);
}

void tnd__publish_done(struct tnd_load *load, size_t file)
{
	struct tnd__live_page *page = tnd__live_page(load->live);

	if (!page)
		return;
	set(&page->done_bytes, load->stats.kept_bytes);
	if (load->member && atomic_load_explicit(&page->file, memory_order_relaxed) != file)
		tnd__publish_file(load, file);
}

void tnd__publish_file(struct tnd_load *load, size_t index)
{
	tnd__live_file(load->live, index, load->files[index].name);
}

void tnd__publish_close(struct tnd_load *load)
{
	tnd__live_close(load->live);
	load->live = NULL;
}
