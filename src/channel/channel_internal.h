/* SPDX-License-Identifier: Apache-2.0 */
/*
 * channel_internal.h - between the files of channel/
 *
 *   channel.c      options, create, attach, close, info
 *   segment.c      the two memfds: taken within the limits (headroom.c), sealed, mapped;
 *                  segment_attach.c: checked
 *   places.c       who reads: admission, leaving, eviction, death (service thread and writer)
 *   guest.c        the reader's side of attaching, and what its service thread is told
 *   send.c         the writer's data path; reserve.c: reservations
 *   receive.c      the readers' data path
 *   wait.c         spin, sleep, wake, warn: both sides
 *   bigobject.c    objects by slab: the writer; slabmake.c: its memory; slabview.c: the readers;
 *                  viewpages.c: their memory
 *   bulk.c         for a flow of slabs (bulk.h); notice.c: word that goes ahead of all objects
 *   stat.c         all of it seen from outside; stat_scan.c: found, stat_look.c: one channel
 *
 * Locks: `lock` of a handle guards its places, slabs and reservations; nothing waits under it.
 * The data path takes none while no reservation or borrow is open.
 */
#ifndef TND_CHANNEL_INTERNAL_H
#define TND_CHANNEL_INTERNAL_H

#include <tundish/channel.h>

#include "base/base.h"
#include "base/futex.h"
#include "group/service.h"
#include "layout.h"
#include "memory/memory.h"

/* -- segments (segment.c) -- */

/* One process's mappings of a channel. Pointers into shared memory; figures are private copies. */
struct tnd__segments {
	struct tnd__data_header *header;     /* writer: writable; reader: read-only */
	struct tnd__descriptor *descriptors; /* slot_count of them */
	unsigned char *arena;                /* arena_bytes, and once more behind it */
	struct tnd__control *control;
	int data_fd, control_fd; /* owned; the reader's data_fd is read-only */
	uint64_t data_map_bytes; /* header, descriptors, arena twice */
	uint64_t memory_bytes;   /* what both memfds take */
	/* Checked copies of the header. */
	uint64_t max_bytes, max_objects, slot_count, arena_bytes, max_object_bytes, first_number;
	uint32_t place_count, on_dead, writer_pid;
	char name[TND_CHANNEL_NAME_MAX];
};

struct tnd__segment_opts {
	uint64_t max_bytes; /* a multiple of 64 */
	uint64_t max_objects;
	uint64_t max_object_bytes;
	uint64_t first_number;
	uint32_t place_count, on_dead;
	const char *name; /* NUL-terminated, at most 63 bytes are taken */
};

/* Bytes that both segments will take, for the budget. */
uint64_t tnd__segments_bytes(const struct tnd__segment_opts *opts);

/*
 * Makes both, takes their memory, fills the headers (published and every cursor = first_number),
 * maps, seals (F_SEAL_FUTURE_WRITE, SHRINK, GROW, SEAL), and keeps the writer's data out of forked
 * children.
 * Return: 0; TND_E_HEADROOM (which limit, both numbers); -ENOSPC; -ENOMEM; -EMFILE; -errno.
 */
int tnd__segments_create(const struct tnd__segment_opts *opts, struct tnd__segments *ret_segments,
			 struct tnd_error *reterr);

/*
 * Maps what another process made: data read-only. Takes the descriptors over (closed on failure).
 * Checks seals, sizes, magic, version, ids and every figure of the headers; nothing in them is
 * trusted.
 * Return: 0; TND_E_CORRUPT; TND_E_VERSION; -ENOMEM; -errno.
 */
int tnd__segments_attach(int data_fd, int control_fd, struct tnd__segments *ret_segments,
			 struct tnd_error *reterr);

/* `forked`: in a forked child, where the writer's data is not mapped: only descriptors are closed,
 * and the mappings that are there. */
void tnd__segments_close(struct tnd__segments *segments, bool is_writer, bool forked);

/* -- handles -- */

/* One place, in the writer's process. lock, but for the last two. */
struct tnd__place {
	uint32_t rank;
	uint32_t generation;      /* of its occupants */
	uint32_t state;           /* TND__PLACE_*, as in the sealed seat */
	bool owned;               /* reserved for `rank` at creation */
	int32_t pid;              /* of the occupant as we see it, or 0 */
	uint64_t admitted;        /* number of the first object that is held for the occupant */
	uint32_t told_generation; /* of the occupant that has the notice */
	struct tnd__peer *peer;
	struct tnd__watch *watch;
	/* The writing thread's own. */
	uint64_t seen; /* last cursor accepted */
	uint32_t seen_generation;
};

enum {
	TND__PENDING_OPEN,
	TND__PENDING_COMMITTED,
	TND__PENDING_ABORTED,
	TND__PENDING_GONE, /* published, or taken back */
};

/*
 * A reservation. Those between pending_first and pending_end are at their turn & (slot_count - 1).
 * lock.
 */
struct tnd__pending {
	uint64_t ticket;   /* never given twice: a serial number, and the slot in the low bits */
	uint64_t offset;   /* in the arena */
	uint64_t position; /* byte position */
	uint64_t bytes;    /* asked for, then committed */
	uint64_t held;     /* of the ring: bytes rounded up */
	uint32_t state;    /* TND__PENDING_* */
	uint32_t slab;     /* index + 1, or 0 */
};

struct tnd__writer {
	struct tnd__listener *listener;
	struct tnd__place places[TND__PLACES_MAX];
	/*
	 * lock; bits of places: held for a rank that has not come; has a cursor; died, and every
	 * send has to say so.
	 */
	uint64_t reserved, live, dead;
	_Atomic uint32_t generation;   /* of these sets */
	_Atomic uint32_t reservations; /* between pending_first and pending_end */
	uint32_t episode;              /* of waiting for space; the writing thread's own */
	/* lock, once there is a reservation */
	struct tnd__pending *pending;        /* slot_count; made at the first reservation */
	uint64_t pending_first, pending_end; /* turns */
	uint64_t pending_serial;
	/*
	 * The writing thread's own; under lock while there are reservations. `now_`: the sets as of
	 * seen_generation.
	 */
	uint32_t seen_generation;
	uint64_t now_reserved, now_live, now_dead;
	uint64_t published;     /* number: as in shared memory */
	uint64_t head_position; /* byte position after the last object or reservation */
	uint64_t head_offset;   /* in the arena */
	uint64_t freed;         /* number: everything below is free (cached) */
	uint64_t freed_position;
	uint64_t sampled_position, sampled_objects; /* where the high-water marks were looked at */
	uint64_t sent_bytes;
};

/* What a reader has done with an object, at its number & (slot_count - 1). */
enum { TND__BORROW_NONE, TND__BORROW_OPEN, TND__BORROW_DONE };

struct tnd__reader {
	struct tnd__peer *peer;
	uint32_t place, generation, rank;
	bool seated; /* the place is ours to write to */
	_Atomic uint32_t writer_dead, writer_left;
	_Atomic uint32_t told;    /* there is a notice */
	_Atomic uint32_t borrows; /* open ones */
	/* The receiving thread's own; under lock while there are borrows. */
	uint64_t next;           /* number of the next object */
	_Atomic uint64_t cursor; /* as in shared memory */
	uint64_t known;          /* last value of published */
	unsigned char *borrowed; /* TND__BORROW_*; slot_count; made at the first borrow */
};

struct tnd__slabs;
struct tnd__bulk_range;

/* An error that the writer tells its readers. What a packet of the kind TND__PACKET_TELL carries. */
struct tnd__notice {
	int32_t code; /* 0: none */
	int32_t rank;
	uint64_t byte_offset;
	char message[TND_ERROR_MESSAGE_MAX];
	char file[TND_ERROR_FILE_MAX], name[TND_ERROR_NAME_MAX];
};
_Static_assert(sizeof(struct tnd__notice) <= TND__PACKET_BYTES_MAX, "it goes by one packet");

/* busy */
enum {
	TND__BUSY_FREE,
	TND__BUSY_CALL,   /* a thread is in send or receive: others get -EBUSY */
	TND__BUSY_MOMENT, /* commit or abort moves the head: over in a moment */
};

struct tnd_channel {
	struct tnd__segments shared;
	bool is_writer;
	bool lent; /* test hook: `shared` is another handle's */
	uint64_t forkmark;
	_Atomic uint32_t busy; /* TND__BUSY_* */
	_Atomic uint32_t cancelled;
	_Atomic uint32_t local_word; /* changes with cancel and a peer's death */
	pthread_mutex_t lock;
	struct tnd__spin spin;
	int64_t warn_ns; /* < 0: never */
	_Atomic uint64_t waits, blocked_ns;
	struct tnd_budget *budget;
	uint64_t charged_bytes;
	struct tnd__slabs *slabs; /* nullable */
	bool private_views; /* objects by slab may be written to (TND_CHANNEL_ATTACH_F_PRIVATE) */
	struct tnd__notice notice; /* lock; writer: to tell; reader: as told */
	struct tnd__writer writer;
	struct tnd__reader reader;
	char address[TND__ADDRESS_BYTES];
};

static inline bool tnd__channel_forked(const struct tnd_channel *channel)
{
	return channel->forkmark != tnd__forkmark();
}

static inline uint64_t tnd__slot(const struct tnd_channel *channel, uint64_t number)
{
	return number & (channel->shared.slot_count - 1);
}

/* -- calls and waits (wait.c) -- */

/* Begins a call of the data path: role, fork, one thread. Return: 0, TND_E_*, -EBUSY. */
int tnd__channel_enter(struct tnd_channel *channel, bool as_writer, struct tnd_error *reterr);
void tnd__channel_leave(struct tnd_channel *channel);

/*
 * What a call waits for. `look`: > 0: it is there; 0: not yet; < 0: the error that ends the wait,
 * said in reterr.
 */
struct tnd__wait {
	struct tnd_channel *channel;
	int (*look)(struct tnd__wait *wait, struct tnd_error *reterr);
	const char *what; /* "space for the object", for sentences */
	uint64_t need;    /* bytes */
};

/* Looks, spins, sleeps. Return: 0; what `look` gave; -ETIMEDOUT; -ECANCELED. */
int tnd__channel_wait(struct tnd__wait *wait, int64_t deadline_ns, struct tnd_error *reterr);

/* W4 to W7; `always`: whether or not somebody sleeps. Any thread of the writer's process. */
void tnd__wake_readers(struct tnd_channel *channel, bool always);
/* R4 to R7. */
void tnd__wake_writer(struct tnd_channel *channel);
/* space_word += 1 and wake: for what concerns the writer alone. */
void tnd__poke_writer(struct tnd_channel *channel);

/* -- who reads (places.c) -- */

extern const struct tnd__peer_ops tnd__host_ops; /* of the writer's listener; owner: the channel */

/* What the reader says and gets. */
struct tnd__hello {
	uint32_t version; /* of the layout */
	uint32_t rank;
};
struct tnd__welcome {
	uint32_t place, generation;
};
#define TND__PACKET_CHANNEL 16u /* hello */
#define TND__PACKET_WELCOME 17u
#define TND__PACKET_SLAB 18u   /* a slab is asked for, or handed out */
#define TND__PACKET_LOCKED 19u /* the reader has taken its life lock */
#define TND__PACKET_TELL 20u   /* a notice, to readers */

/* Makes the places of the options. Before anybody can attach. Return: 0, TND_E_INVALID. */
int tnd__places_init(struct tnd_channel *channel, const struct tnd_channel_opts *opts,
		     struct tnd_error *reterr);
/* Closes peers and watches. After the listener's close. Without `goodbye` readers see a death. */
void tnd__places_close(struct tnd_channel *channel, bool goodbye);
/* Test hook and on_hello: admits `rank`. Return: 0; TND_E_PLACE. */
int tnd__place_admit(struct tnd_channel *channel, uint32_t rank, struct tnd__peer *peer,
		     struct tnd__welcome *ret_welcome, struct tnd_error *reterr);
/* Takes the occupants of `places` out: they wrote nonsense, or left. Not under lock. */
void tnd__places_drop(struct tnd_channel *channel, uint64_t places, uint32_t state);
/* "reader 3 is 12 objects (4.5 MiB) behind, its process is stopped": who is late. */
void tnd__places_late(struct tnd_channel *channel, char *out, size_t out_bytes);
/* "readers 1, 2": those that have not come. Return: how many. */
size_t tnd__places_missing(struct tnd_channel *channel, char *out, size_t out_bytes);

/* -- the reader's side of attaching (guest.c) -- */

/* Connects and maps. What it leaves on failure tnd__guest_leave undoes. Return: as attach. */
int tnd__guest_attach(struct tnd_channel *channel, const char *address, uint32_t rank,
		      int64_t deadline_ns, struct tnd_error *reterr);
/* Begins at the object that the writer's service said. */
void tnd__guest_begin(struct tnd_channel *channel);
/* Without `goodbye` the writer sees a death; so in a forked child, where it only frees. */
void tnd__guest_leave(struct tnd_channel *channel, bool goodbye);

/* -- writing (send.c, reserve.c) -- */

/*
 * W1, for an object of `bytes` by ring: looks at the sets, takes back aborted reservations at the
 * end, waits for space. Return: 0; as tnd_channel_send.
 */
int tnd__writer_room(struct tnd_channel *channel, uint64_t bytes, int64_t deadline_ns,
		     struct tnd_error *reterr);
/* Moves the head over pending->held bytes; sets its position and offset. */
void tnd__writer_take(struct tnd_channel *channel, struct tnd__pending *pending);
/* Says that `bytes` is above the limit. Return: -EMSGSIZE. */
int tnd__writer_too_long(struct tnd_channel *channel, uint64_t bytes, struct tnd_error *reterr);
/* W2, W3: the descriptor of the next object; wakes nobody. */
void tnd__writer_publish(struct tnd_channel *channel, uint64_t position, uint64_t bytes,
			 uint64_t place);
/* Brings `freed` up to date. Return: places whose cursor is nonsense or that left. */
uint64_t tnd__writer_refresh(struct tnd_channel *channel, uint64_t *ret_left);
/* Sets, dead readers, taking back. Return: 0; TND_E_PEER_DEAD. */
int tnd__writer_look(struct tnd_channel *channel, struct tnd_error *reterr);
/* Takes aborted reservations at the end back. Under lock, as the writing thread. */
void tnd__pending_take_back(struct tnd_channel *channel);
/* Queues an object that is complete behind the open reservations. Under lock, as above. */
void tnd__pending_add(struct tnd_channel *channel, const struct tnd__pending *pending);
/* Publishes what is complete, in order. Under lock. Return: whether anything was. */
bool tnd__pending_drain(struct tnd_channel *channel);

/* What is reserved. */
struct tnd__ask {
	uint64_t bytes;
	bool by_slab; /* also where the ring would do */
	bool reuse;   /* only a slab that is there already */
	bool overrun; /* over the budget, if need be */
};
/* Return: as tnd_channel_reserve. */
int tnd__writer_reserve(struct tnd_channel *channel, const struct tnd__ask *ask,
			int64_t deadline_ns, struct tnd_reservation *ret_reservation,
			struct tnd_error *reterr);

/* -- objects by slab (bigobject.c) -- */

/* `pool`: borrowed. Return: 0, TND_E_INVALID (not shared), -ENOMEM. */
int tnd__slabs_host(struct tnd_channel *channel, struct tnd_slab_pool *pool,
		    struct tnd_error *reterr);
int tnd__slabs_guest(struct tnd_channel *channel);
void tnd__slabs_close(struct tnd_channel *channel, bool forked);

/*
 * Writer: a slab that nobody uses, at least as large as asked for; waits for budget and for
 * readers. Return: 0; as tnd_channel_send; with `reuse` -ETIMEDOUT at once where there is none.
 */
int tnd__slabs_take(struct tnd_channel *channel, const struct tnd__ask *ask, int64_t deadline_ns,
		    uint32_t *ret_index, struct tnd_error *reterr);
void *tnd__slabs_data(struct tnd_channel *channel, uint32_t index);
uint64_t tnd__slabs_place(struct tnd_channel *channel, uint32_t index);
/* The slab carries object `number` from now on. */
void tnd__slabs_sent(struct tnd_channel *channel, uint32_t index, uint64_t number);
/* Its reservation was aborted. */
void tnd__slabs_put_back(struct tnd_channel *channel, uint32_t index);
/*
 * The reader in `place` lives and is given up: what it may still look at is not used again. Between
 * E1 and E3, under lock.
 */
void tnd__slabs_given_up(struct tnd_channel *channel, uint32_t place);
/* Service thread of the writer: a reader was admitted, and gets the descriptors of all slabs. */
void tnd__slabs_greet(struct tnd_channel *channel);
/* Service thread of the writer: a reader asks for a slab's descriptor. */
void tnd__slabs_serve(struct tnd_channel *channel, struct tnd__peer *peer,
		      const struct tnd__packet *packet);

/*
 * Reader: maps the slab of a descriptor's `place` if need be (asks the writer's service for it),
 * and takes a lease. Return: 0; -ETIMEDOUT; -ECANCELED; TND_E_CORRUPT; TND_E_PEER_DEAD; -errno.
 */
int tnd__slabs_borrow(struct tnd_channel *channel, uint64_t place, uint64_t bytes,
		      int64_t deadline_ns, struct tnd_object *object, struct tnd_error *reterr);
/* Whether `object` is by slab. */
bool tnd__slabs_is(const struct tnd_channel *channel, const struct tnd_object *object);
int tnd__slabs_release(struct tnd_channel *channel, const struct tnd_object *object);
/* Pages of the object stay where they are, its lease ends. As tnd__bulk_keep(), by pages. */
int tnd__slabs_keep(struct tnd_channel *channel, uint64_t ticket,
		    const struct tnd__bulk_range *pages, size_t count, void **ret_base);
/* Service thread of the reader: a descriptor came. */
void tnd__slabs_arrived(struct tnd_channel *channel, struct tnd__packet *packet);

/* -- notices (notice.c) -- */

/* Service thread of the writer: a reader was admitted. */
void tnd__notice_greet(struct tnd_channel *channel, struct tnd__peer *peer);
/* Writer: whether readers were told something. Those that could not be are tried once more. */
bool tnd__notice_last(struct tnd_channel *channel);
/* Service thread of the reader. */
void tnd__notice_arrived(struct tnd_channel *channel, const struct tnd__packet *packet);
/* Reader: whether it was told something (tnd__bulk_told). */
static inline bool tnd__is_told(const struct tnd_channel *channel)
{
	/* Pairs with tnd__notice_arrived(). */
	return atomic_load_explicit(&channel->reader.told, memory_order_seq_cst) != 0;
}

#ifdef TND_FAILPOINTS
/*
 * A reader in the writer's process and on the writer's mapping, without a connection: threads that
 * a race detector sees through. To be closed before the writer.
 */
int tnd__channel_attach_inside(struct tnd_channel *writer, uint32_t rank,
			       struct tnd_channel **ret_channel);
#endif

#endif
