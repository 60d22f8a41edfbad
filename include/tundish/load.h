/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tundish/load.h - the loading pipeline of one rank: storage -> slabs -> views, inside a budget
 *
 *   open -> next, release ... -> end -> stats, report -> close
 *
 * Reading goes on ahead of the consumer as far as the budget allows. next() hands out views in the plan's order; each is
 * released when its copy is done, in any order, from any thread. A view that is kept keeps its slab and stays valid, also
 * after close.
 *
 * The first error ends the load; next() then returns it. end() stops every thread, gives the page cache back as it was, and tells
 * who still holds views.
 *
 * Threads: next() from one thread at a time (-EBUSY otherwise); release, cancel and stats are MT-safe.
 * Processes: a load belongs to the process that opened it.
 */
#ifndef TUNDISH_LOAD_H
#define TUNDISH_LOAD_H

#include <tundish/plan.h>
#include <tundish/slab.h>

#ifdef __cplusplus
extern "C" {
#endif

struct tnd_load;

#define TND_ENGINE_AUTO 0u /* io_uring where it works, else threads */
#define TND_ENGINE_URING 1u
#define TND_ENGINE_THREADS 2u

#define TND_DIRECT_AUTO 0u /* cold extents direct, warm ones from the page cache */
#define TND_DIRECT_ON 1u   /* direct whenever the file system can */
#define TND_DIRECT_OFF 2u

#define TND_ON_FULL_WAIT 0u
#define TND_ON_FULL_FAIL 1u
#define TND_ON_FULL_OVERRUN 2u
#define TND_ON_FULL_COPY 3u

#define TND_LOAD_F_KEEP_CACHE 1u /* leave what was read through the page cache there */
#define TND_LOAD_F_OWN 2u        /* deliver each tensor in memory of its own, outside the budget */
#define TND_LOAD_F_SHARED_SLABS 4u /* slabs are memfds */

/* Asked for each tensor with bytes in own delivery: where to read it to (>= bytes; borrowed until released), or NULL to have memory made. */
typedef void *(*tnd_place_fn)(void *arg, const struct tnd_plan_item *item);

struct tnd_progress {
	uint64_t done_bytes; /* kept bytes handed out */
	uint64_t total_bytes;
	uint64_t charged_bytes;
	uint64_t budget_bytes;
	uint64_t elapsed_ns;
};
/* Called from next(), at most each 50 ms and at the end. Non-zero cancels. */
typedef int (*tnd_progress_fn)(void *arg, const struct tnd_progress *progress);

struct tnd_load_opts {
	uint32_t struct_bytes;
	uint32_t flags;        /* TND_LOAD_F_* */
	uint32_t engine;       /* TND_ENGINE_* */
	uint32_t direct;       /* TND_DIRECT_* */
	uint32_t on_full;      /* TND_ON_FULL_* */
	uint32_t thread_count; /* 0: from processors and quota */
	uint32_t queue_depth;  /* reads in flight; 0: default */
	uint32_t numa_given;
	int32_t numa; /* as struct tnd_slab_pool_opts */
	uint32_t reserved;
	const char *cpus;          /* list for I/O threads ("0-3,8"); NULL: the cpuset's */
	struct tnd_budget *budget; /* NULL: an account of its own with the plan's budget_bytes */
	int64_t stall_ns; /* on_full wait: no progress for this long is an error; 0: 120 s; < 0: never */
	int64_t deadline_ns; /* absolute, CLOCK_MONOTONIC; 0: none */
	tnd_progress_fn progress;
	void *progress_arg;
	tnd_place_fn place; /* with F_OWN */
	void *place_arg;
};

#define TND_VIEW_F_COPY 1u /* a copy in memory of its own (on_full copy) */
#define TND_VIEW_F_OWN 2u
#define TND_VIEW_F_PIECE 4u
#define TND_VIEW_F_LAST 8u /* the last piece, or no pieces */

/* What next() hands out. Pointers live until release. */
struct tnd_view {
	const char *name; /* name_bytes long and a NUL */
	size_t name_bytes;
	const void *data; /* NULL for zero-size tensors; in slabs: read-only by convention */
	uint64_t bytes;
	const uint64_t *shape; /* of the whole tensor in the file */
	uint32_t dim_count;
	uint32_t dtype;
	uint32_t file;  /* index in the checkpoint */
	uint32_t flags; /* TND_VIEW_F_* */
	int32_t dim;    /* sliced dimension, or -1 */
	uint32_t reserved;
	uint64_t start, length; /* held along dim */
	uint64_t piece_offset;  /* of data within the tensor's kept bytes */
	uint64_t tensor_bytes;  /* kept bytes of the tensor */
	size_t item;            /* index in the plan */
	void *hold;             /* the lease; private */
};

struct tnd_load_stats {
	uint32_t struct_bytes; /* set by the caller */
	uint32_t io_threads;
	uint64_t tensors, sliced; /* handed out */
	uint64_t read_bytes, kept_bytes, storage_bytes;
	uint64_t total_bytes; /* kept bytes of the plan */
	uint64_t metadata_bytes, realigned_bytes;
	uint64_t buffers, buffer_bytes, slabs, allocations, huge_bytes;
	uint64_t live, live_bytes, peak_live, peak_live_bytes;
	uint64_t charged_bytes, peak_charged_bytes, budget_bytes;
	uint64_t resident_growth_bytes;   /* peak at samples, the consumer's own memory left out */
	uint64_t page_cache_growth_bytes; /* peak at samples; TND_HOST_UNKNOWN where refused */
	uint64_t overruns, overrun_bytes, copied;
	uint64_t shards_opened, shards_skipped;
	uint64_t elapsed_ns, storage_wait_ns, budget_wait_ns, consumer_wait_ns, read_ns, gather_ns,
		deliver_ns;
};

/* `plan`: referenced until close. `opts`: nullable, borrowed for the call. Starts reading. Return: 0; TND_E_BUDGET; TND_E_INVALID; -errno. */
TND_API int tnd_load_open(struct tnd_plan *plan, const struct tnd_load_opts *opts,
			  struct tnd_load **ret_load, struct tnd_error *reterr);

/*
 * The next view in order. Blocking: may sleep until it is read. Return: 1 and a view (to be released); 0 at the end;
 * TND_E_FULL, TND_E_DEADLINE, TND_E_CANCELLED, TND_E_CHANGED, TND_E_TRUNCATED, -EIO, -EBUSY, -ENOMEM, other -errno.
 */
TND_API int tnd_load_next(struct tnd_load *load, struct tnd_view *ret_view,
			  struct tnd_error *reterr);

/* Ends the hold on a view's bytes, also after close. Blocking: never. A released view is zeroed. */
TND_API void tnd_view_release(struct tnd_view *view);

/*
 * Own delivery: takes the view's memory over from it, aligned to 64 bytes, `bytes` long; tnd_own_free() frees it with the same
 * map_bytes. Return: 0, TND_E_INVALID (not own, or the caller's already).
 */
TND_API int tnd_view_take(struct tnd_view *view, void **ret_memory, uint64_t *ret_map_bytes);

/* Ends the load soon, from any thread or signal-safe context; next() returns TND_E_CANCELLED. */
TND_API void tnd_load_cancel(struct tnd_load *load);

/* Memory that the consumer took for itself since open, bytes (may be negative): left out of the resident growth. */
TND_API void tnd_load_consumer_bytes(struct tnd_load *load, int64_t delta);

/*
 * Ends the phase: threads stopped, caches given back, undelivered tensors dropped. Idempotent: later calls return the same.
 * Blocking: bounded (under a second beyond a read in flight). Return: 0; the load's first error; TND_E_ESCAPED (target phase, views out, no other error; a
 * warning to the log in the other phases and with on_full copy).
 */
TND_API int tnd_load_end(struct tnd_load *load, struct tnd_error *reterr);

/* Ends if needed, and frees. Views out stay valid. NULL is allowed. */
TND_API void tnd_load_close(struct tnd_load *load);

TND_API int tnd_load_stats(struct tnd_load *load, struct tnd_load_stats *ret_stats);
TND_API void tnd_load_reset_peaks(struct tnd_load *load);

/* This rank's object of `tundish.load/1`, and the memlog record of the phase, as JSON. After end. *ret_text: transferred, free(). */
TND_API int tnd_load_report_json(struct tnd_load *load, char **ret_text);
TND_API int tnd_load_memlog_json(struct tnd_load *load, char **ret_text);

#ifdef __cplusplus
}
#endif
#endif
