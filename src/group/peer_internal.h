/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peer_internal.h - between the files of a connected process
 *
 *   peer.c            its states; receiving, its end, what its owner calls
 *   peer_send.c       the queue, and what is left of it after the close
 *   peer_newcomer.c   before it has said hello
 */
#ifndef TND_PEER_INTERNAL_H
#define TND_PEER_INTERNAL_H

#include "service_internal.h"

/* For tnd__served_watch. */
#define TND__PEER_SOCKET 0u
#define TND__PEER_PIDFD 1u

enum { TND__PEER_NEWCOMER, TND__PEER_OPEN, TND__PEER_GONE, TND__PEER_LINGER };

struct tnd__outgoing;

struct tnd__peer {
	struct tnd__served served;
	int fd, pid_fd;
	int32_t pid;
	const struct tnd__peer_ops *ops;
	void *owner;
	_Atomic uint64_t tag;
	/* lock */
	uint32_t state;
	bool hold, goodbye, want_write;
	struct tnd__outgoing *queue, **queue_end;
	uint32_t queued, queued_fds;
	int lock_fd; /* borrowed, or -1 */
	uint64_t lock_offset;
	bool lock_seen;
	int64_t linger_until_ns;
	struct tnd__newcomers *newcomers; /* whose list it is in, or NULL */
	struct tnd__peer *next_newcomer, **newcomer_link;
};

extern const struct tnd__served_ops tnd__peer_served_ops;

/* -- peer.c -- */

/* lock: no event before both are watched. Return: 0; -errno, and then neither is. */
int tnd__peer_watch(struct tnd__peer *peer);
/* On the service thread, no lock. Tells its owner `how`, if it is open. */
void tnd__peer_gone(struct tnd__peer *peer, int how);

/* -- peer_send.c: lock, all but tnd__peer_linger -- */

void tnd__peer_queue_drop(struct tnd__peer *peer);
/* Sends what the socket takes. Whether nothing is left to send. */
bool tnd__peer_flush(struct tnd__peer *peer);
/* It was removed. Whether there is nothing to wait for, else it is the service's from now on. */
bool tnd__peer_begin_linger(struct tnd__peer *peer);
/* On the service thread: goes on sending, and frees it at the end. `ended`: nobody will read. */
void tnd__peer_linger(struct tnd__peer *peer, bool ended);

/* -- peer_newcomer.c: on the service thread, no lock -- */

/* Its first packet: a hello, or it is freed. */
void tnd__newcomer_packet(struct tnd__peer *peer, const struct tnd__wire *wire,
			  struct tnd__packet *packet);
/* Frees it: nobody will own it. */
void tnd__newcomer_abandon(struct tnd__peer *peer);

#endif
