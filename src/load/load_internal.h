/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load_internal.h - the parts of a load and who owns them
 *
 * (A node's reader has no consumer: outlet.h. A member of a shared load has neither feeder nor
 * storage: member.h. A guest of one is first the one and then the other: guestload.h.)
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

#include <tundish/channel.h>
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
	uint64_t undelivered;               /* items; flow lock */
	uint64_t views;                     /* out; flow lock */
	bool fresh;                         /* its memory is being touched */
	struct tnd_reservation reservation; /* of a node's reader, until it is published */
	struct tnd__arrival *arrival;       /* of a member: the slab that came */
	struct tnd__hold *holds;            /* of a member: views out; flow lock */
};

/*
 * What is handed out at once: the kept bytes [begin, end) of an item. `data`: where they are one
 * run; NULL: they have to be gathered out of the buffer's arrival.
 */
struct tnd__piece {
	struct tnd__buffer *buffer; /* NULL: of an item without bytes */
	const unsigned char *data;
	uint64_t begin, end;
};

/* What a view holds. */
struct tnd__hold {
	struct tnd__flow *flow;
	struct tnd__buffer *buffer; /* NULL for memory of its own */
	struct tnd_lease *lease;
	struct tnd__hold *next, **link; /* in buffer->holds */
	const void *data;
	uint64_t bytes;
	uint64_t staged_bytes; /* of a guest: charge of what it was gathered into */
	void *own;             /* mapping to be unmapped, or NULL */
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
	bool submitted;
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
	pid_t pid;
	struct tnd_load_opts opts;
	char *cpus, *share; /* copies of the options' */

	struct tnd_budget *budget;
	struct tnd_slab_pool *pool;
	struct tnd__storage *storage; /* NULL: a member, which reads nothing */
	struct tnd__outlet *outlet;   /* NULL but for a node's reader */
	struct tnd__member *member;   /* NULL but for a member of a shared load, and in: */
	struct tnd__guest *guest;     /* NULL but for a guest that found a reader */
	struct tnd__flow *flow;
	uint64_t bound_bytes;
	uint64_t fixed_bytes;   /* charged from open to end */
	uint64_t staging_bytes; /* of a member: the account's room for gathered slices */

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
	uint64_t overruns, overrun_bytes; /* a member's: copies with on_full overrun */
	bool cache_known;
	struct tnd__storage_stats storage_stats;
	struct tnd__sentences copied;
	struct tnd_escape_report *escaped;
	struct tnd_host_memory memory_before;
	char *memlog;
	struct tnd__live *live; /* NULL: cannot be seen from outside */
};

/* open.c */
/* tnd_load_open() for a node's reader. `address`: nullable. */
int tnd__load_open_reader(struct tnd_plan *plan, const struct tnd_load_opts *opts,
			  struct tnd__outlet *outlet, const char *address,
			  struct tnd_load **ret_load, struct tnd_error *reterr);

/*
 * A guest goes on alone: with `rest`, transferred, instead of the load's plan. Return: 0; as
 * tnd_load_open().
 */
int tnd__load_start_rest(struct tnd_load *load, struct tnd_plan *rest, struct tnd_error *reterr);
/* What is charged from open to end goes back. */
void tnd__load_refund(struct tnd_load *load);
/* Threads are gone, or were never there: everything else of the load that open made. */
void tnd__load_free(struct tnd_load *load);

/* flow.c */
struct tnd__flow *tnd__flow_create(void);
void tnd__flow_ref(struct tnd__flow *flow);
void tnd__flow_unref(struct tnd__flow *flow);
/* The load's own hold on a buffer ends: all delivered, or dropped. Lock not held. */
void tnd__buffer_finish(struct tnd__buffer *buffer);
/* Only the record. */
void tnd__buffer_free(struct tnd__buffer *buffer);
/* Waits on one of the flow's conditions for at most `ns`; lock held. */
void tnd__flow_wait(struct tnd__flow *flow, pthread_cond_t *cond, int64_t ns);

/* feed.c */
void *tnd__feed(void *load);
/* Makes the memory that item `index` will be delivered in, and has it touched. Return: 0, -ENOMEM. */
int tnd__own_ahead(struct tnd_load *load, size_t index);
void tnd__feed_close_sources(struct tnd_load *load, bool all);

/* deliver.c */
/*
 * Hands a piece of item `index` out. Return: 1 and a view; 0: a piece that does not make a view yet;
 * < 0.
 */
int tnd__hand_out(struct tnd_load *load, size_t index, const struct tnd__piece *piece,
		  struct tnd_view *view);
/* The view is of all of the item after all. */
void tnd__view_whole(struct tnd_view *view, const struct tnd_plan_item *item);
/* Cancelled, or over the deadline: the load fails. */
void tnd__check_limits(struct tnd_load *load);
/* The views that are out keep the load from going on: it fails with TND_E_FULL or _DEADLINE. */
void tnd__fail_full(struct tnd_load *load, int code, int64_t waited_ns);

/* slice.c: where an item's kept bytes are in its file */
/* Kept bytes before byte `offset` of the file, within the item. */
uint64_t tnd__slice_kept_before(const struct tnd_plan_item *item, uint64_t offset);
/* The file byte that kept byte `kept` is; *ret_run: kept bytes that follow on there, with it. */
uint64_t tnd__slice_file_at(const struct tnd_plan_item *item, uint64_t kept, uint64_t *ret_run);
/* Kept bytes of one row. */
uint64_t tnd__slice_row(const struct tnd_plan_item *item);

/* fail.c */
/* First error wins; stops the load. `where` nullable. Lock not held. */
void tnd__load_fail(struct tnd_load *load, int code, const struct tnd__where *where,
		    const char *format, ...) __attribute__((format(printf, 4, 5)));
/* The same, with a rank to blame. */
void tnd__load_fail_rank(struct tnd_load *load, int code, int32_t rank, const char *format, ...)
	__attribute__((format(printf, 4, 5)));
/* The same; what it says is left as it is. */
void tnd__load_fail_detail(struct tnd_load *load, const struct tnd_error *error);
/* The first error, if any, copied out. Return: its code, or 0. */
int tnd__load_error(struct tnd_load *load, struct tnd_error *reterr);
/* To blame for what fails here; a node's reader has none. */
int32_t tnd__load_own_rank(const struct tnd_load *load);

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
/* What is in the page cache of the plan's files before they are read. */
void tnd__sample_start_cache(struct tnd_load *load);
/* At most each TND__SAMPLE_NS unless forced. */
void tnd__sample(struct tnd_load *load, bool force);

/* publish.c */
void tnd__publish_open(struct tnd_load *load);
/* Charged and read so far. Flow lock not held. */
void tnd__publish_figures(struct tnd_load *load);
/* Handed out (a reader: announced) so far, the last of it from `file`. Flow lock held. */
void tnd__publish_done(struct tnd_load *load, size_t file);
/* The file that is read now. By the feeder; of a member, which has none, by its consumer. */
void tnd__publish_file(struct tnd_load *load, size_t index);
void tnd__publish_close(struct tnd_load *load);

/* load_report.c */
/* Writes the phase's record; `slabs`: the pool after everything that is not held went back. */
int tnd__load_memlog(struct tnd_load *load, const struct tnd_slab_stats *slabs);

#endif
