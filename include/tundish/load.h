/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tundish/load.h - the loading pipeline of one rank: storage -> slabs -> views, inside a budget
 *
 *   open -> next, release ... -> end -> stats, report -> close
 *
 * Reading goes on ahead of the consumer as far as the budget allows. next() hands out views in the
 * plan's order; each is released when its copy is done, in any order, from any thread. A view that
 * is kept keeps its slab and stays valid, also after close.
 *
 * The first error ends the load; next() then returns it. end() stops every thread, gives the page
 * cache back as it was, and tells who still holds views.
 *
 * Threads: next() from one thread at a time (-EBUSY otherwise); release, cancel and stats are
 * MT-safe.
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
#define TND_ENGINE_THREADS 2u /* preadv2() */

#define TND_DIRECT_AUTO 0u /* cold extents direct, warm ones from the page cache */
#define TND_DIRECT_ON 1u   /* direct whenever the file system can */
#define TND_DIRECT_OFF 2u  /* through the page cache, dropped behind the read */

/* What happens when views that are held use the budget up. */
#define TND_ON_FULL_WAIT 0u    /* until one is released, at most stall_ns */
#define TND_ON_FULL_FAIL 1u    /* TND_E_FULL */
#define TND_ON_FULL_OVERRUN 2u /* over the budget, counted */
#define TND_ON_FULL_COPY 3u    /* tensors are handed out as copies in memory of their own */

#define TND_LOAD_F_KEEP_CACHE 1u /* leave what was read through the page cache there */
#define TND_LOAD_F_OWN 2u        /* deliver each tensor in memory of its own, outside the budget */
#define TND_LOAD_F_SHARED_SLABS 4u /* slabs are memfds */
#define TND_LOAD_F_GUEST 8u     /* with `share`: not one of its members; without it reads alone */
#define TND_LOAD_F_WRITABLE 16u /* views may be written to; what is written stays in this process */

/*
 * Own delivery: asked once for each tensor with bytes where its bytes are to go (slice_bytes of
 * them; borrowed until the view is released). NULL: memory is made for it.
 */
typedef void *(*tnd_place_fn)(void *arg, const struct tnd_plan_item *item);

struct tnd_progress {
	uint64_t done_bytes; /* kept bytes handed out */
	uint64_t total_bytes;
	uint64_t charged_bytes; /* to the budget, now */
	uint64_t budget_bytes;
	uint64_t elapsed_ns; /* since open */
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
	uint32_t numa_given;   /* as in struct tnd_slab_pool_opts */
	int32_t numa;
	uint32_t reserved;         /* 0 */
	const char *cpus;          /* list for I/O threads ("0-3,8"); NULL: the cpuset's */
	struct tnd_budget *budget; /* NULL: an account of its own with the plan's budget_bytes */
	int64_t stall_ns;          /* longest wait with on_full wait; 0: 120 s; < 0: no limit */
	int64_t deadline_ns;       /* absolute, CLOCK_MONOTONIC; 0: none */
	tnd_progress_fn progress;  /* nullable */
	void *progress_arg;        /* borrowed until close */
	tnd_place_fn place;        /* nullable; with TND_LOAD_F_OWN */
	void *place_arg;           /* borrowed until close */
	/*
	 * Address of a node's reader (share.h): this load reads nothing itself and takes its bytes
	 * from there; nullable, copied. The plan's rank is one of the reader's members and the plan
	 * was made with the same options and the node's budget; engine, direct, threads, depth and
	 * processors are the reader's business. The reader is waited for until deadline_ns, else
	 * 120 s.
	 *
	 * With TND_LOAD_F_GUEST any plan of the same files goes, with a budget of its own: tensors
	 * come in the order in which they pass, then those that did not pass whole, or had no room
	 * in the budget, in the plan's, which are read as without `share`. There is one try to
	 * attach; no reader, no place, or other files, and all is read. Nothing that becomes of the
	 * reader is an error of this load (but for TND_E_EVICTED, should it take this process for
	 * dead while views are out).
	 */
	const char *share;
};

#define TND_VIEW_F_COPY 1u    /* a copy in memory of its own (on_full copy) */
#define TND_VIEW_F_OWN 2u     /* own delivery: the tensor's own memory, or the caller's */
#define TND_VIEW_F_PIECE 4u   /* one of several pieces of its tensor */
#define TND_VIEW_F_LAST 8u    /* the last piece, or no pieces */
#define TND_VIEW_F_SHARED 16u /* in a slab that other processes see: read-only without F_WRITABLE */

/* What next() hands out. Pointers live until release. */
struct tnd_view {
	const char *name; /* name_bytes long and a NUL */
	size_t name_bytes;
	/*
	 * NULL for zero-size tensors. Read-only in shared slabs (a write is SIGSEGV), but with
	 * TND_LOAD_F_WRITABLE; elsewhere writes harm nobody.
	 */
	const void *data;
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

/*
 * Starts reading. `plan`: referenced until close. `opts`: nullable, copied (`cpus` too), its
 * `budget` referenced until close.
 * Blocking: bounded; with a `budget` that others use, may sleep until metadata and reads fit in;
 * with `share`, until the reader is there.
 * Return: 0; TND_E_BUDGET (the budget is below the plan's least); TND_E_DEADLINE; TND_E_INVALID
 * (options); -ENOMEM; -errno (threads, rings). With `share` also: as tnd_channel_attach;
 * TND_E_PLACE (reading has gone on without this rank); TND_E_CHANGED (the reader has other files);
 * TND_E_INVALID (it has another layout or options); TND_E_CORRUPT (no node's reader is there); what
 * the reader has ended with.
 */
TND_API int tnd_load_open(struct tnd_plan *plan, const struct tnd_load_opts *opts,
			  struct tnd_load **ret_load, struct tnd_error *reterr);

/*
 * The next view in order (guests: as opts.share says), to be released by tnd_view_release().
 * Threads: one at a time. Blocking: may sleep until it is read.
 * Return: 1 and a view; 0 at the end; TND_E_FULL (on_full fail); TND_E_DEADLINE (the deadline, or
 * stall_ns); TND_E_CANCELLED; TND_E_CHANGED; TND_E_INVALID (after end); -EBUSY (another thread is
 * in here); -ENOMEM; -EIO and other -errno of reading. With `share` also: what the reader has ended
 * with (tnd_share_end); TND_E_PEER_DEAD (reterr->rank; -1: the reader itself); TND_E_EVICTED (it
 * has let this rank go); TND_E_CORRUPT (its stream makes no sense).
 */
TND_API int tnd_load_next(struct tnd_load *load, struct tnd_view *ret_view,
			  struct tnd_error *reterr);

/*
 * Ends the hold on a view's bytes, also after close, and zeroes the view. NULL and a released view
 * are allowed. Threads: MT-safe on distinct views. Blocking: never.
 */
TND_API void tnd_view_release(struct tnd_view *view);

/*
 * Own delivery: takes the view's memory over from it. *ret_memory: transferred, aligned to 64
 * bytes, `bytes` of the view long; tnd_own_free() frees it with the same map_bytes.
 * Blocking: never. Return: 0; TND_E_INVALID (not own, or the caller's already).
 */
TND_API int tnd_view_take(struct tnd_view *view, void **ret_memory, uint64_t *ret_map_bytes);

/*
 * Ends the load soon; next() then returns TND_E_CANCELLED. Async-signal-safe. Blocking: never.
 */
TND_API void tnd_load_cancel(struct tnd_load *load);

/*
 * Tells of memory that the consumer took for itself, bytes (negative: gave back): it is left out of
 * the resident growth. Blocking: never.
 */
TND_API void tnd_load_consumer_bytes(struct tnd_load *load, int64_t delta);

/*
 * Ends the phase: threads stopped, caches given back, undelivered tensors dropped. Idempotent:
 * later calls return the same.
 * Threads: one at a time, and not while another is in next().
 * Blocking: bounded (under a second beyond a read in flight).
 * Return: 0; the load's first error; TND_E_ESCAPED (target phase, views out, no other error; a
 * warning to the log in the other phases and with on_full copy).
 */
TND_API int tnd_load_end(struct tnd_load *load, struct tnd_error *reterr);

/* Ends if needed, and frees. Views out stay valid. NULL is allowed. Blocking: as end. */
TND_API void tnd_load_close(struct tnd_load *load);

/* Figures of this moment, after end of the whole. Return: 0; TND_E_INVALID (struct_bytes). */
TND_API int tnd_load_stats(struct tnd_load *load, struct tnd_load_stats *ret_stats);

/* Peaks become what is live; the budget's counters become zero. Blocking: never. */
TND_API void tnd_load_reset_peaks(struct tnd_load *load);

/*
 * This rank's object of `tundish.load/1` (docs/format/json.md), and the memlog record of the phase.
 * *ret_text: transferred, free().
 * Blocking: never. Return: 0; TND_E_INVALID (before end); -ENOMEM.
 */
TND_API int tnd_load_report_json(struct tnd_load *load, char **ret_text);
TND_API int tnd_load_memlog_json(struct tnd_load *load, char **ret_text);

#ifdef __cplusplus
}
#endif
#endif
