/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sample.c - what the load adds to resident memory and page cache, seen while it runs
 *
 * Called from whoever moves things on (storage threads, the consumer), rate-limited by a
 * compare-and-swap on the time of the last sample, so that no thread of its own is needed.
 */
#include "load_internal.h"

/*
 * Growth of the page cache over the files of the plan; refreshes those that are being read, or all.
 */
static void sample_cache(struct tnd_load *load, bool all)
{
	int64_t growth = 0;

	for (size_t i = 0; i < load->file_count; i++) {
		struct tnd__load_file *file = &load->load_files[i];

		if (file->cached_before < 0)
			continue;
		if (all || atomic_load_explicit(&file->reads, memory_order_relaxed)) {
			int64_t now =
				tnd__pagecache_bytes(load->files[i].fd, 0, load->files[i].bytes);

			if (now >= 0)
				file->cached_last = now;
		}
		growth += file->cached_last - file->cached_before;
	}
	if (growth > 0 && (uint64_t)growth > load->cache_peak)
		load->cache_peak = (uint64_t)growth;
}

/*
 * What of this process's memory counts. The slabs of a shared load are mapped by several, and in
 * one of them twice: they count once, with their reader, whatever is mapped.
 */
static uint64_t resident(const struct tnd_load *load)
{
	struct tnd_slab_stats pool = {.struct_bytes = sizeof(pool)};

	if (!load->outlet && !load->opts.share)
		return tnd__private_bytes();
	/* A guest's own slabs may be memfds. */
	if (load->pool && (load->outlet || load->opts.flags & TND_LOAD_F_SHARED_SLABS))
		tnd_slab_pool_stats(load->pool, &pool);
	return tnd__anon_bytes() + pool.mapped_bytes;
}

void tnd__sample_start(struct tnd_load *load)
{
	load->private_before = resident(load);
	load->cache_known = true;
	/* A member brings nothing into the page cache, nor does a guest as long as it is attached. */
	if (!load->opts.share)
		tnd__sample_start_cache(load);
}

void tnd__sample_start_cache(struct tnd_load *load)
{
	for (size_t i = 0; i < load->slab_count; i++)
		load->load_files[load->slabs[i].file].cached_before = 0;
	for (size_t i = 0; i < load->file_count; i++) {
		struct tnd__load_file *file = &load->load_files[i];

		/* Files that this rank does not read are not looked at. */
		if (file->cached_before < 0)
			continue;
		file->cached_before = file->cached_last =
			tnd__pagecache_bytes(load->files[i].fd, 0, load->files[i].bytes);
		if (file->cached_before < 0)
			load->cache_known = false;
	}
}

static bool due(_Atomic int64_t *last, int64_t now, int64_t interval, bool force)
{
	int64_t seen = atomic_load_explicit(last, memory_order_relaxed);

	if (!force && now - seen < interval)
		return false;
	return atomic_compare_exchange_strong_explicit(last, &seen, now, memory_order_relaxed,
						       memory_order_relaxed);
}

void tnd__sample(struct tnd_load *load, bool force)
{
	int64_t now = tnd__now_ns(), growth;
	bool cache;

	if (!due(&load->sampled_ns, now, TND__SAMPLE_NS, force))
		return;
	cache = due(&load->cache_sampled_ns, now, TND__CACHE_SAMPLE_NS, force);
	growth = (int64_t)resident(load) - (int64_t)load->private_before -
		 atomic_load_explicit(&load->flow->consumer_bytes, memory_order_relaxed);
	pthread_mutex_lock(&load->flow->lock);
	if (growth > 0 && (uint64_t)growth > load->resident_peak)
		load->resident_peak = (uint64_t)growth;
	if (cache)
		sample_cache(load, force);
	pthread_mutex_unlock(&load->flow->lock);
	tnd__publish_figures(load);
}
