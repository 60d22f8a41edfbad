/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tundish/bridge.h - a channel's objects on another machine, over ZeroMQ, nothing lost
 *
 *   machine A                                        machine B
 *   channel --> reader: tnd_bridge_listen --tcp--> tnd_bridge_connect: writer --> channel
 *                                          `-tcp-> machine C ...                     |
 *                                                                                 readers
 *
 * The listening side attaches to a local channel as one more reader, and keeps each object borrowed
 * until every receiver has written it into its own channel: the limits of the first channel are the
 * bound of what is under way, and nothing else is buffered there. A receiver says how many objects
 * and bytes it takes; a slow reader behind it slows the first writer down, as a near one does.
 *
 *   listen | connect -> run ... (cancel) -> close
 *
 * Receivers. Objects are held for the first `receiver_count`; one that connects later sees what is
 * sent after its admission. A receiver whose connection breaks goes on where it was when it is back
 * within `grace_ns`; else it is lost: an error of the bridge (TND_BRIDGE_LOST_ERROR), or it is given
 * up (TND_BRIDGE_LOST_CONTINUE). With all receivers gone objects are dropped, as in a channel that
 * has no reader. A stopped process cannot be told from a dead one on another machine.
 *
 * Ends. When the first writer closes, the far readers get everything, then TND_E_CLOSED; when it
 * died, or the bridge failed or was cancelled, they get what came, then TND_E_PEER_DEAD. A gap, or
 * objects of another session, are errors and never skipped.
 * A listening side that its writer evicted ends with TND_E_EVICTED: of what was under way then, the
 * far side may have objects that were overwritten.
 *
 * Security. This is the one part of tundish that listens on a network. Without `secret` whoever
 * reaches the port can read the objects, and hold them up: bind it to a private address. With
 * `secret`, 32 bytes that both sides share, connections are authenticated and encrypted (CURVE).
 *
 * Errors of run are final but for -ETIMEDOUT, after which it may be called again; between calls the
 * other side hears nothing and loses patience after its grace.
 *
 * In a library of its own, libtundish-bridge (pkg-config: tundish-bridge).
 * Threads: one thread in run (-EBUSY for others); cancel and stats from any; cancel also from a
 * signal handler. Each bridge has two threads of its own, all signals blocked.
 * Processes: a bridge must not be used after fork in the child.
 */
#ifndef TUNDISH_BRIDGE_H
#define TUNDISH_BRIDGE_H

#include <tundish/channel.h>

#ifdef __cplusplus
extern "C" {
#endif

struct tnd_bridge;

#define TND_BRIDGE_RECEIVERS_MAX 64
#define TND_BRIDGE_SECRET_BYTES 32
#define TND_BRIDGE_RANK 1000000u /* of the listening side as a reader, unless given */

/* on_lost */
#define TND_BRIDGE_LOST_ERROR 0u
#define TND_BRIDGE_LOST_CONTINUE 1u

struct tnd_bridge_listen_opts {
	uint32_t struct_bytes;
	uint32_t flags;          /* none yet: 0 */
	const char *from;        /* address of the channel; borrowed for the call */
	const char *endpoint;    /* "tcp://HOST:PORT", HOST an address or interface of this machine;
				 PORT * takes a free one; borrowed for the call */
	uint32_t rank;           /* as which it attaches; with rank_given */
	uint32_t rank_given;     /* non-zero: `rank` counts; else TND_BRIDGE_RANK */
	uint32_t receiver_count; /* waited for before the first object; 0: 1 */
	uint32_t on_lost;        /* TND_BRIDGE_LOST_* */
	int64_t attach_deadline_ns;  /* as in tnd_channel_attach_opts */
	int64_t grace_ns;            /* a receiver is lost after that silence; 0: 10 s */
	const unsigned char *secret; /* nullable; TND_BRIDGE_SECRET_BYTES; copied */
};

/*
 * Attaches to the channel and listens. `opts`: borrowed for the call.
 * Blocking: may sleep until attach_deadline_ns. Return: 0; what tnd_channel_attach returns;
 * TND_E_INVALID; TND_E_ADDRESS (the endpoint); -EADDRINUSE, -EADDRNOTAVAIL; -ENOMEM; -errno.
 */
TND_API int tnd_bridge_listen(const struct tnd_bridge_listen_opts *opts,
			      struct tnd_bridge **ret_bridge, struct tnd_error *reterr);

struct tnd_bridge_connect_opts {
	uint32_t struct_bytes;
	uint32_t flags;            /* none yet: 0 */
	const char *endpoint;      /* "tcp://HOST:PORT" of the other side; borrowed for the call */
	const char *to;            /* address of the channel that is made; nullable: a fresh one */
	const char *name;          /* as in tnd_channel_opts */
	uint64_t max_bytes;        /* as in tnd_channel_opts */
	uint64_t max_objects;      /* as in tnd_channel_opts */
	uint64_t max_object_bytes; /* longer than max_bytes: by slab; 0: 1 GiB */
	uint32_t reserved_readers; /* as in tnd_channel_opts: objects are held for them */
	uint32_t open_readers;     /* as in tnd_channel_opts */
	uint32_t on_dead;          /* TND_CHANNEL_DEAD_*: of the readers here */
	uint32_t reserved;
	int64_t grace_ns;            /* the other side is lost after that silence; 0: 10 s */
	const unsigned char *secret; /* nullable; TND_BRIDGE_SECRET_BYTES; copied */
};

/*
 * Makes the channel and begins to connect, however long the other side takes to be there.
 * `opts`: borrowed for the call. Blocking: bounded. Return: 0; what tnd_channel_create returns;
 * TND_E_INVALID; TND_E_ADDRESS (the endpoint); -ENOMEM; -errno.
 */
TND_API int tnd_bridge_connect(const struct tnd_bridge_connect_opts *opts,
			       struct tnd_bridge **ret_bridge, struct tnd_error *reterr);

/*
 * Carries objects until the writer has closed and everything has arrived; on the connecting side
 * also until the readers there have read it.
 * Blocking: may sleep. Return: 0; -ETIMEDOUT; -ECANCELED; -EBUSY; TND_E_PEER_DEAD (the first
 * writer, the other side, or a reader: the sentence says which); TND_E_EVICTED; -EMSGSIZE (an
 * object longer than a receiver takes: both numbers); TND_E_VERSION; TND_E_PLACE (too many
 * receivers); TND_E_CORRUPT (a gap, another session); what tnd_channel_borrow or tnd_channel_send
 * returns; -ENOMEM; -errno.
 */
TND_API int tnd_bridge_run(struct tnd_bridge *bridge, int64_t deadline_ns,
			   struct tnd_error *reterr);

/* Ends run, now or the next one, with -ECANCELED, for good. Async-signal-safe. Blocking: never. */
TND_API void tnd_bridge_cancel(struct tnd_bridge *bridge);

/*
 * Tells the other side if run has not come to its end. NULL is allowed. No other call on the bridge
 * may run. Blocking: bounded (a second for what is to be told).
 */
TND_API void tnd_bridge_close(struct tnd_bridge *bridge);

/* What others connect to (a free port filled in), or what this connects to; until close. */
TND_API const char *tnd_bridge_endpoint(const struct tnd_bridge *bridge);

/* Address of the channel on this machine; borrowed until close. */
TND_API const char *tnd_bridge_address(const struct tnd_bridge *bridge);

struct tnd_bridge_stats {
	uint32_t struct_bytes;   /* set by the caller */
	uint32_t receivers;      /* known now; connecting side: 1 once admitted */
	uint64_t objects, bytes; /* listening: acknowledged by all; connecting: written */
	uint64_t held_objects;   /* listening: borrowed; connecting: received, not yet written */
	uint64_t held_bytes;
	uint64_t reconnects;
	uint64_t repeated; /* objects sent again after that, or received twice and dropped */
	uint64_t refused;  /* messages that made no sense, dropped */
	uint64_t lost;     /* receivers given up */
};

/* Figures of this moment. MT-safe. Blocking: never. Return: 0; TND_E_INVALID (struct_bytes). */
TND_API int tnd_bridge_stats(struct tnd_bridge *bridge, struct tnd_bridge_stats *ret_stats);

#ifdef __cplusplus
}
#endif
#endif
