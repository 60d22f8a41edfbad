/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load_internal.h - the parts of a load and who owns them
 *
 *     feeder thread                storage threads                 the consumer
 *   feed.c: a slab for the      extents.c: bytes arrive:        deliver.c: next() waits for
 *   next buffer of the plan --> scatter or gather, item  -----> its item, leases it, hands
 *   (waits for the budget),     is ready                        it out; release frees
 *   reads for it submitted                                            |
 *          ^                                                          |
 *          `------------- slab back in the pool, budget refunded <----'
 *
 * `struct tnd__flow` is what outlives the load: views that are out hold it, so that a release after
 * close finds its lock.
 *
 * Locks: flow.lock guards the fields marked so. It is never held across a call into storage, budget
 * or pool that may wait. An item's state is atomic: NOT_FED -> count of reads outstanding -> READY.
 * The thread that takes the count to zero finishes the item (gathers it) before it publishes READY.
 *
 * Atomics:
 *   S1 item_done()          acq_rel, with itself: whoever finishes an item sees every read of it
 *   S2 item_done()          publishes the item's bytes, with S3 in ready()
 *   B1 batch_put()          acq_rel, with itself: the last one frees what all have used
 *   R1 read_done()          the file's last use, with R2 in tnd__feed_close_sources()
 *   F1 tnd__flow_unref()    acq_rel, with itself: as B1
 *   N1 tnd_load_next()      leaves the consumer's fields to the next thread, with N2 at its entry
 * Relaxed, without partners: `cancelled` and `stopping`, which publish nothing and are looked at
 * again after each wait; counters and the times of samples.
 */
#ifndef TND_LOAD_INTERNAL_H
#define TND_LOAD_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include <tundish/host.h>
#include <tundish/load.h>

#include "base/base.h"
#include "memory/memory.h"
#include "plan/plan_internal.h"
#include "storage/storage.h"

#define TND__ITEM_NOT_FED UINT32_MAX
#define TND__ITEM_READY (UINT32_MAX - 1)

/* Signal-safe cancel is a flag: everyone who waits looks at it this often. */
#define TND__POLL_NS INT64_C(50000000)
#define TND__SAMPLE_NS INT64_C(20000000)
#define TND__CACHE_SAMPLE_NS INT64_C(200000000)
/* Reads of a chunk that keep a fast disk busy for as long as a slab takes to come back. */
#define TND__READS_LOW 8
#define TND__STALL_NS INT64_C(120000000000)
#define TND__STALL_LOG_NS INT64_C(10000000000)

struct tnd__flow {
	pthread_mutex_t lock;
	pthread_cond_t feeder;   /* something was delivered or released, or few reads are left */
	pthread_cond_t consumer; /* an item is ready, an error is set, the feeder waits */
	_Atomic uint32_t refs;
	_Atomic int64_t consumer_bytes; /* told by the consumer, or made for views out or taken */
	/* all below: lock */
	uint64_t held_views;
	uint64_t held_bytes; /* charge of buffers with views out */
	int64_t progress_ns; /* when anything last moved */
	int64_t drained_ns;  /* when in_flight last became 0 */
	uint64_t in_flight;  /* reads submitted and not done */
	bool feeder_waits;   /* for the budget */
	bool overrun_now;    /* the feeder shall go over the bound */
};

/* A slab in use: filled, delivered from, and kept until its last view is released. */
struct tnd__buffer {
	struct tnd__flow *flow;
	struct tnd_slab *slab;
	unsigned char *data;
	uint64_t charge_bytes;
	uint64_t undelivered; /* items; flow lock */
	uint64_t views;       /* out; flow lock */
	bool fresh;           /* its memory is being touched */
};

/* What a view holds. */
struct tnd__hold {
	struct tnd__flow *flow;
	struct tnd__buffer *buffer; /* NULL for memory of its own */
	struct tnd_lease *lease;
	void *own; /* mapping to be unmapped, or NULL */
	uint64_t own_bytes, own_map_bytes;
	uint64_t shape_bytes;
	uint64_t words[]; /* shape, then the name */
};

/* One file range of an item. */
struct tnd__needed {
	uint64_t begin, end;  /* in the file */
	uint64_t kept_offset; /* of `begin` within the item's kept bytes; not for rows */
	size_t item;
};

struct tnd__extent {
	struct tnd__read read;
	struct tnd__batch *batch;
	size_t first_span, end_span;
};

/* The reads of one buffer, in file order. */
struct tnd__batch {
	struct tnd_load *load;
	struct tnd__buffer *buffer;
	size_t slab;
	struct tnd__needed *spans;
	size_t span_count;
	struct tnd__extent *extents;
	size_t extent_count;
	_Atomic size_t left; /* extents not done, and one for the feeder */
};

struct tnd__load_file {
	struct tnd__source *source;
	_Atomic size_t reads; /* outstanding */
	struct tnd__source_report report;
	bool reported;
	int64_t cached_before; /* page cache, bytes; -errno where refused */
	int64_t cached_last;
};

/* Own delivery: memory made for a tensor before it is there. */
struct tnd__own {
	void *memory;
	uint64_t map_bytes;
};

struct tnd_load {
	struct tnd_plan *plan;
	struct tnd_checkpoint *checkpoint;
	const struct tnd_plan_item *items;
	size_t item_count;
	const struct tnd_plan_slab *slabs;
	size_t slab_count;
	const struct tnd_file *files;
	size_t file_count;
	struct tnd_plan_totals totals;
	uint32_t rank, phase;
	struct tnd_load_opts opts;
	char *cpus;

	struct tnd_budget *budget;
	struct tnd_slab_pool *pool;
	struct tnd__storage *storage;
	struct tnd__flow *flow;
	uint64_t bound_bytes;
	uint64_t fixed_bytes; /* charged from open to end */

	_Atomic uint32_t *states;     /* one an item */
	struct tnd__buffer **buffers; /* one a slab of the plan, NULL outside its life; flow lock */
	struct tnd__load_file *load_files;
	struct tnd__own *owns; /* one an item, or NULL; the feeder's until the item is READY */
	struct tnd__toucher *toucher;
	uint64_t seen_allocations; /* the feeder's */

	pthread_t feeder;
	bool feeder_started;
	_Atomic bool cancelled; /* by the caller */
	_Atomic bool stopping;  /* error, cancel or end: no more reads */
	bool failed;            /* flow lock */
	bool ended;
	int end_code;
	struct tnd_error error; /* the first; flow lock until ended */
	struct tnd_error end_error;

	/* consumer's own */
	_Atomic bool in_next;
	size_t next_item;
	int64_t progress_call_ns;
	void *gather; /* own delivery of pieces: memory of the tensor so far */
	uint64_t gather_map_bytes;
	bool gather_placed;
	bool overrun_told;

	/* figures; flow lock unless atomic */
	struct tnd_load_stats stats;
	_Atomic uint64_t gather_ns;
	int64_t opened_ns, ended_ns;
	uint64_t private_before;
	_Atomic int64_t sampled_ns, cache_sampled_ns;
	uint64_t resident_peak, cache_peak;
	bool cache_known;
	struct tnd__storage_stats storage_stats;
	struct tnd__sentences copied;
	struct tnd_escape_report *escaped;
	struct tnd_host_memory memory_before;
	char *memlog;
	struct tnd__live *live; /* NULL: cannot be seen from outside */
};

/* flow.c */
struct tnd__flow *tnd__flow_create(void);
void tnd__flow_ref(struct tnd__flow *flow);
void tnd__flow_unref(struct tnd__flow *flow);
/* The load's own hold on a buffer ends: all delivered, or dropped. Lock not held. */
void tnd__buffer_finish(struct tnd__buffer *buffer);
/* Waits on one of the flow's conditions for at most `ns`; lock held. */
void tnd__flow_wait(struct tnd__flow *flow, pthread_cond_t *cond, int64_t ns);

/* feed.c */
void *tnd__feed(void *load);
void tnd__feed_close_sources(struct tnd_load *load, bool all);
/* First error wins; stops the load. `where` nullable. Lock not held. */
void tnd__load_fail(struct tnd_load *load, int code, const struct tnd__where *where,
		    const char *format, ...) __attribute__((format(printf, 4, 5)));
void tnd__load_fail_detail(struct tnd_load *load, const struct tnd_error *error);
/* The first error, if any, copied out. Return: its code, or 0. */
int tnd__load_error(struct tnd_load *load, struct tnd_error *reterr);

/* touch.c */
struct tnd__toucher;
/* NULL: out of memory. Without threads (none could be had) it does nothing. */
struct tnd__toucher *tnd__toucher_create(const struct tnd__storage *storage);
void tnd__toucher_add(struct tnd__toucher *toucher, void *memory, uint64_t bytes);
/* Nothing of the range is touched any more when this returns. */
void tnd__toucher_forget(struct tnd__toucher *toucher, const void *memory, uint64_t bytes);
void tnd__toucher_close(struct tnd__toucher *toucher);

/* extents.c */
int tnd__batch_create(struct tnd_load *load, size_t slab, struct tnd__buffer *buffer,
		      struct tnd__batch **ret_batch);
void tnd__batch_submit(struct tnd__batch *batch);

/* sample.c */
void tnd__sample_start(struct tnd_load *load);
/* At most each TND__SAMPLE_NS unless forced. */
void tnd__sample(struct tnd_load *load, bool force);

/* publish.c */
void tnd__publish_open(struct tnd_load *load);
/* Charged and read so far. Flow lock not held. */
void tnd__publish_figures(struct tnd_load *load);
/* Handed out so far. Flow lock held. */
void tnd__publish_done(struct tnd_load *load);
/* The file that is read now. By one thread. */
void tnd__publish_file(struct tnd_load *load, size_t index);
void tnd__publish_close(struct tnd_load *load);

/* load_report.c */
/* Writes the phase's record; `slabs`: the pool after everything that is not held went back. */
int tnd__load_memlog(struct tnd_load *load, const struct tnd_slab_stats *slabs);

#endif
