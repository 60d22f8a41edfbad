/* SPDX-License-Identifier: Apache-2.0 */
/* memlog.c - the record that a phase of a load leaves: one JSON line */
#include <errno.h>
#include <inttypes.h>

#include "memory.h"

static uint64_t or_zero(uint64_t bytes)
{
	return bytes == TND_HOST_UNKNOWN ? 0 : bytes;
}

static void add_bytes(struct tnd__text *text, const char *key, uint64_t bytes)
{
	if (bytes == TND_HOST_UNKNOWN)
		tnd__text_add(text, ", \"%s\": null", key);
	else
		tnd__text_add(text, ", \"%s\": %" PRIu64, key, bytes);
}

static void add_counters(struct tnd__text *text, const struct tnd__memlog *log)
{
	add_bytes(text, "read_bytes", log->read_bytes);
	add_bytes(text, "kept_bytes", log->kept_bytes);
	add_bytes(text, "storage_bytes", log->storage_bytes);
	add_bytes(text, "shards_opened", log->shards_opened);
	add_bytes(text, "shards_skipped", log->shards_skipped);
	add_bytes(text, "tensors", log->tensors);
	add_bytes(text, "sliced", log->sliced);
	add_bytes(text, "buffers", log->buffers);
	add_bytes(text, "buffer_bytes", log->buffer_bytes);
	add_bytes(text, "slabs", log->slabs);
	/* A power of two of at least 1 MiB, or 0. */
	add_bytes(text, "slab_mb", log->slab_bytes >> 20);
	add_bytes(text, "slab_peak_live", log->slab_peak_live);
	add_bytes(text, "slab_peak_bytes", log->slab_peak_bytes);
	add_bytes(text, "slabs_alive_after_release", log->slabs_alive_after_release);
	add_bytes(text, "live_maps", log->live_maps);
	add_bytes(text, "live_map_bytes", log->live_map_bytes);
	add_bytes(text, "rss_bytes", log->host.rss_bytes);
}

static void add_host(struct tnd__text *text, const struct tnd_host_memory *host)
{
	add_bytes(text, "MemTotal", host->mem_total);
	add_bytes(text, "MemFree", host->mem_free);
	add_bytes(text, "MemAvailable", host->mem_available);
	add_bytes(text, "Buffers", host->buffers);
	add_bytes(text, "Cached", host->cached);
	add_bytes(text, "AnonPages", host->anon_pages);
	add_bytes(text, "Shmem", host->shmem);
	add_bytes(text, "Mapped", host->mapped);
	add_bytes(text, "Slab", host->slab);
	add_bytes(text, "KernelStack", host->kernel_stack);
	add_bytes(text, "PageTables", host->page_tables);
	add_bytes(text, "SecPageTables", host->sec_page_tables);
	add_bytes(text, "Percpu", host->percpu);
}

/* What no counter of the kernel names. Shmem and Mapped are parts of others. */
static int64_t unaccounted(const struct tnd_host_memory *host)
{
	uint64_t named = or_zero(host->mem_free) + or_zero(host->buffers) + or_zero(host->cached) +
			 or_zero(host->anon_pages) + or_zero(host->slab) +
			 or_zero(host->kernel_stack) + or_zero(host->page_tables) +
			 or_zero(host->sec_page_tables) + or_zero(host->percpu);

	return (int64_t)(or_zero(host->mem_total) - named);
}

int tnd__memlog_json(const struct tnd__memlog *log, char **ret_text)
{
	struct tnd__text text = {.failed = tnd__failpoint("mem.alloc") < 0};
	uint64_t now = log->host.mem_available;
	char *made;

	tnd__text_add(&text, "{\"phase\": \"%s\"", log->phase);
	add_counters(&text, log);
	add_host(&text, &log->host);
	tnd__text_add(&text,
		      ", \"device_total_bytes\": null, \"device_free_bytes\": null"
		      ", \"device_reserved_bytes\": null, \"device_procs\": null"
		      ", \"torch_host_alloc\": null, \"unaccounted_bytes\": %" PRId64,
		      unaccounted(&log->host));
	if (log->start_available == TND_HOST_UNKNOWN || now == TND_HOST_UNKNOWN)
		add_bytes(&text, "lost_since_start_bytes", TND_HOST_UNKNOWN);
	else
		tnd__text_add(&text, ", \"lost_since_start_bytes\": %" PRId64,
			      (int64_t)(log->start_available - now));
	tnd__text_add(&text, "}");
	made = tnd__text_take(&text);
	if (!made)
		return -ENOMEM;
	*ret_text = made;
	return 0;
}
