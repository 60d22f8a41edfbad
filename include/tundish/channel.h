/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tundish/channel.h - one writer, up to 64 readers, objects of any length, nothing lost
 *
 *   writer   create (an address) --> send, or reserve ... commit | abort --> close
 *               | as a string
 *   readers  attach              --> recv, or borrow ... release         --> close
 *
 *        reader 0                     reader 1      writer
 *           v                            v             v
 *   --------+----------------------------+-------------+---------- objects, numbered
 *   free    | held for reader 0 .........| ............|  free
 *
 * Objects come complete, once, in order, and contiguous for both sides, aligned to 64 bytes. Two
 * limits: `max_bytes` and `max_objects` that the slowest reader has not released. A send waits if
 * and only if there are max_objects already, or the free bytes do not hold this one (lengths are
 * rounded up to 64). The bytes of a reservation that was aborted while a later one was open come
 * free with the objects before it.
 *
 * With a slab pool, an object above max_bytes goes by slab: into shared memory of its own, of which
 * the channel carries word. It takes one place of max_objects and none of max_bytes.
 *
 * Places. A `reserved` place belongs to a rank from creation on: sends are held for it until it has
 * attached and read, died, closed or was given up. An `open` place is for readers that come later:
 * they see what is sent after their admission. With no reserved and no attached reader a send succeeds and
 * the object is dropped.
 *
 * Peers. Attaching needs no call of the other side: each process that opened a channel has one
 * service thread. It sees a peer's death (not its being stopped) within 200 ms and ends waits with
 * TND_E_PEER_DEAD: a reader gets it once everything published was read. A dead reader is an error
 * of every send until tnd_channel_evict (TND_CHANNEL_DEAD_ERROR), or is dropped
 * (TND_CHANNEL_DEAD_EVICT); other readers do not notice.
 *
 * A reader that writes nonsense into its cursor is evicted; it gets TND_E_EVICTED. An object of the
 * ring that an evicted reader still borrows may be overwritten: recv and release then say so. One
 * by slab stays as it is.
 *
 * Deadlines are CLOCK_MONOTONIC ns; 0 does not wait; TND_NO_DEADLINE waits for ever. A call that
 * ends with -ETIMEDOUT or -ECANCELED has changed nothing.
 *
 * Memory: two memfds, no name in /dev/shm, nothing left after SIGKILL of everyone. Readers cannot
 * write what the writer wrote. Limits of memory are checked before pages are taken; what no check
 * can see (another process takes the last page at the same moment, in a cgroup) ends in the
 * kernel's OOM kill.
 *
 * Threads: one thread in send, sendv, reserve, drain or ready of a writer, one in borrow, recv or
 * ready of a reader; others get -EBUSY. commit, abort, release, evict, info and cancel are MT-safe
 * beside them.
 * Processes: a handle used after fork gives TND_E_FORKED; close of one frees what is local. The
 * writer's memory is not there in a forked child.
 */
#ifndef TUNDISH_CHANNEL_H
#define TUNDISH_CHANNEL_H

#include <sys/uio.h>

#include <tundish/group.h>
#include <tundish/slab.h>

#ifdef __cplusplus
extern "C" {
#endif

struct tnd_channel;

#define TND_CHANNEL_READERS_MAX 64
#define TND_CHANNEL_BYTES_MIN 4096
#define TND_CHANNEL_OBJECTS_MAX (1u << 20)
#define TND_CHANNEL_NAME_MAX 64

#define TND_RANK_NONE UINT32_MAX

/* on_dead */
#define TND_CHANNEL_DEAD_ERROR 0u
#define TND_CHANNEL_DEAD_EVICT 1u

/* spin_ns */
#define TND_CHANNEL_NO_SPIN UINT64_MAX

struct tnd_channel_opts {
	uint32_t struct_bytes;     /* set by the caller: sizeof this struct */
	uint32_t flags;            /* none yet: 0 */
	uint64_t max_bytes;        /* 0: 4 MiB; rounded up to 64 */
	uint64_t max_objects;      /* 0: 1,024 */
	uint32_t reserved_readers; /* places kept for ranks */
	uint32_t open_readers;     /* further places; 1 to 64 in all */
	const uint32_t
		*reserved_ranks; /* nullable: 0, 1, ...; else reserved_readers of them; copied */
	uint32_t on_dead;        /* TND_CHANNEL_DEAD_* */
	uint32_t reserved;
	const char *name;           /* shown by stat and in messages; nullable; copied, cut */
	const char *address;        /* "unix:@NAME" or "unix:/PATH" (group.h); nullable: a fresh
					    "unix:@..."; copied */
	struct tnd_budget *budget;  /* nullable: not charged; referenced until close */
	struct tnd_slab_pool *pool; /* nullable: no objects by slab; TND_SLAB_POOL_F_SHARED;
					    borrowed until close */
	uint64_t max_object_bytes;  /* by slab; 0: 1 GiB */
	uint64_t spin_ns;           /* spins before each sleep; 0: by itself; TND_CHANNEL_NO_SPIN */
	int64_t warn_ns;            /* a wait this long is logged; 0: 10 s; < 0: never */
};

/*
 * Makes a channel; the caller is the writer. `opts`: borrowed for the call.
 * Blocking: bounded (takes the memory). Return: 0; TND_E_INVALID (a limit, with both numbers; ranks
 * given twice; a pool that is not shared); TND_E_ADDRESS; -EADDRINUSE; TND_E_HEADROOM (which limit,
 * both numbers); TND_E_BUDGET; -ENOSPC; -ENOMEM; -errno.
 */
TND_API int tnd_channel_create(const struct tnd_channel_opts *opts,
			       struct tnd_channel **ret_channel, struct tnd_error *reterr);

/*
 * Objects by slab are mapped so that this process may write to them: what it writes it alone sees,
 * until it releases the object.
 */
#define TND_CHANNEL_ATTACH_F_PRIVATE 1u

struct tnd_channel_attach_opts {
	uint32_t struct_bytes; /* set by the caller: sizeof this struct */
	uint32_t flags;        /* TND_CHANNEL_ATTACH_F_* */
	int64_t deadline_ns;   /* until then waits for somebody to listen; 0: does not wait */
	uint64_t spin_ns;      /* as in tnd_channel_opts */
	int64_t warn_ns;       /* as in tnd_channel_opts */
};

/*
 * Attaches as the reader `rank`: its reserved place, else an open one. `opts`: nullable, borrowed
 * for the call; a reader that may start before its writer gives a deadline.
 * Blocking: may sleep until the deadline. Return: 0; -ETIMEDOUT (the deadline passed while nobody
 * listened); -ECONNREFUSED (nobody listens, no deadline); TND_E_INVALID (an option, the rank);
 * TND_E_ADDRESS; TND_E_VERSION (both versions); TND_E_DENIED; TND_E_PLACE (no place, or taken by a
 * process that lives); TND_E_CORRUPT; -ENOMEM; -errno.
 */
TND_API int tnd_channel_attach(const char *address, uint32_t rank,
			       const struct tnd_channel_attach_opts *opts,
			       struct tnd_channel **ret_channel, struct tnd_error *reterr);

/*
 * Writer: readers get what was sent, then TND_E_CLOSED. It does not wait for them: drain does.
 * Reader: leaves. What it held is free at once, and its place is open to that rank again, as a late
 * joiner. The writer is not told: sends and drain go on as if it had read everything. A reader that
 * gives up before the end, and must not be taken for one that is done, abandons.
 * Views that are still borrowed become invalid. No other call on the handle may run. NULL is
 * allowed. Blocking: bounded.
 */
TND_API void tnd_channel_close(struct tnd_channel *channel);

/*
 * The same, but to the other side it is a death: for one that has failed. Writer: readers get
 * TND_E_PEER_DEAD instead of TND_E_CLOSED once everything is read, so that it is not taken for all
 * of it. Reader: the writer gets TND_E_PEER_DEAD, or goes on (on_dead).
 */
TND_API void tnd_channel_abandon(struct tnd_channel *channel);

/* The string to attach to; borrowed until close. */
TND_API const char *tnd_channel_address(const struct tnd_channel *channel);

/*
 * Until every reserved place has had its reader. Writer and readers. Blocking: may sleep.
 * Return: 0; -ETIMEDOUT (the ranks that are missing); TND_E_PEER_DEAD (reterr->rank);
 * TND_E_CLOSED; -ECANCELED; -EBUSY; TND_E_FORKED.
 */
TND_API int tnd_channel_ready(struct tnd_channel *channel, int64_t deadline_ns,
			      struct tnd_error *reterr);

/* -- writer -- */

/*
 * `pid` (in our pid namespace) is the process that will attach as `rank`: its death before that is
 * then seen as well. Blocking: never. Return: 0; TND_E_INVALID (not the writer); TND_E_PLACE (no
 * such reserved place, or attached already); TND_E_FORKED; -ESRCH; -errno.
 */
TND_API int tnd_channel_expect(struct tnd_channel *channel, uint32_t rank, int32_t pid,
			       struct tnd_error *reterr);

/*
 * Gives `rank` up, dead or alive, attached or not: what was held for it is free. Its place is open
 * to be attached to again by that rank, as a late joiner. MT-safe.
 * Blocking: never. Return: 0; TND_E_PLACE (no such reader); TND_E_INVALID (not the writer);
 * TND_E_FORKED.
 */
TND_API int tnd_channel_evict(struct tnd_channel *channel, uint32_t rank);

/*
 * Copies `bytes` at `data` (nullable when 0) and publishes them; the buffer is the caller's again.
 * Blocking: may sleep. Return: 0; -ETIMEDOUT (who is late and by how much); -EMSGSIZE (more than
 * max_bytes, or max_object_bytes with a pool: both numbers); TND_E_PEER_DEAD (reterr->rank);
 * -ECANCELED; -EBUSY; TND_E_FORKED; TND_E_INVALID (not the writer); by slab also what
 * tnd_slab_acquire returns.
 */
TND_API int tnd_channel_send(struct tnd_channel *channel, const void *data, uint64_t bytes,
			     int64_t deadline_ns, struct tnd_error *reterr);

/* The same for pieces that together are one object. */
TND_API int tnd_channel_sendv(struct tnd_channel *channel, const struct iovec *pieces,
			      uint32_t piece_count, int64_t deadline_ns, struct tnd_error *reterr);

/* Space for one object; in the caller's memory, filled by reserve, passed on unchanged. */
struct tnd_reservation {
	void *data;     /* 64-byte aligned; write here before commit */
	uint64_t bytes; /* as asked */
	uint64_t ticket;
};

/*
 * Takes space. Several may be open; objects become visible in the order of their reservations,
 * however they are committed.
 * Blocking: may sleep. Return: as tnd_channel_send.
 */
TND_API int tnd_channel_reserve(struct tnd_channel *channel, uint64_t bytes, int64_t deadline_ns,
				struct tnd_reservation *ret_reservation, struct tnd_error *reterr);

/*
 * Publishes the first `actual` bytes as soon as all earlier reservations are committed or aborted.
 * A reader that died is told by the next send, reserve or drain.
 * MT-safe. Blocking: never. Return: 0; TND_E_INVALID (not open; actual > bytes: still open);
 * TND_E_FORKED.
 */
TND_API int tnd_channel_commit(struct tnd_channel *channel,
			       const struct tnd_reservation *reservation, uint64_t actual);

/* Gives the space back; nobody sees anything. MT-safe. Blocking: never. Return: as commit. */
TND_API int tnd_channel_abort(struct tnd_channel *channel,
			      const struct tnd_reservation *reservation);

/*
 * Until every reader has released everything that was published. Blocking: may sleep. Return: as
 * tnd_channel_send.
 */
TND_API int tnd_channel_drain(struct tnd_channel *channel, int64_t deadline_ns,
			      struct tnd_error *reterr);

/* -- reader -- */

/* One object; in the caller's memory, filled by borrow, passed on unchanged. */
struct tnd_object {
	const void *data; /* 64-byte aligned; borrowed until release */
	uint64_t bytes;
	uint64_t
		number; /* of the object in this channel, from 0; what a late joiner missed counts */
	uint64_t ticket;
};

/*
 * The next object, in place. Several may be open, and be released in any order; space comes free
 * up to the oldest that is open. An object by slab holds its slab, not the ring. While max_objects
 * are borrowed nothing can come: it waits until another thread releases one.
 * Blocking: may sleep. Return: 0; -ETIMEDOUT; TND_E_CLOSED (the writer closed, all is read);
 * TND_E_PEER_DEAD (the writer died, all is read); TND_E_EVICTED; TND_E_CORRUPT; -ECANCELED; -EBUSY;
 * TND_E_FORKED; TND_E_INVALID (not a reader).
 */
TND_API int tnd_channel_borrow(struct tnd_channel *channel, int64_t deadline_ns,
			       struct tnd_object *ret_object, struct tnd_error *reterr);

/*
 * MT-safe. Blocking: never. Return: 0; TND_E_INVALID (not borrowed); TND_E_EVICTED (the contents
 * may have been overwritten meanwhile); TND_E_FORKED.
 */
TND_API int tnd_channel_release(struct tnd_channel *channel, const struct tnd_object *object);

/*
 * Copies the next object to `buffer`. *ret_bytes: its length, set on success and for -EMSGSIZE.
 * Blocking: may sleep. Return: as borrow, and -EMSGSIZE (longer than `capacity`: both numbers; the
 * next call gets it).
 */
TND_API int tnd_channel_recv(struct tnd_channel *channel, void *buffer, uint64_t capacity,
			     int64_t deadline_ns, uint64_t *ret_bytes, struct tnd_error *reterr);

/* -- both -- */

/*
 * Ends a wait of this handle, now or the next one, with -ECANCELED; sticky until rearm. A call that
 * need not wait goes on. Async-signal-safe, MT-safe. Blocking: never.
 */
TND_API void tnd_channel_cancel(struct tnd_channel *channel);
TND_API void tnd_channel_rearm(struct tnd_channel *channel);

struct tnd_channel_info {
	uint32_t struct_bytes; /* set by the caller */
	uint32_t is_writer;
	uint32_t rank;        /* the reader's, or TND_RANK_NONE */
	uint32_t place_count; /* reserved and open */
	uint64_t max_bytes;   /* rounded up: the exact limit */
	uint64_t max_objects;
	uint64_t max_object_bytes; /* by slab; 0 without a pool */
	uint64_t memory_bytes;     /* of both segments */
	uint64_t sent_objects;     /* published so far */
	uint64_t used_objects;     /* of these not yet released by the slowest reader */
	uint64_t used_bytes;
	uint64_t waits;      /* of this handle: times slept */
	uint64_t blocked_ns; /* of this handle: in waits */
};

/* Figures of this moment. MT-safe. Blocking: never. Return: 0; TND_E_INVALID; TND_E_FORKED. */
TND_API int tnd_channel_info(struct tnd_channel *channel, struct tnd_channel_info *ret_info);

#ifdef __cplusplus
}
#endif
#endif
