/* SPDX-License-Identifier: Apache-2.0 */
/*
 * service.h - the one service thread of a process: it accepts, it carries packets with descriptors,
 * and it sees peers die
 *
 *   listener ---- connection ---- peer          one side listens, the other connects;
 *      |           (SEQPACKET)      |           both get a struct tnd__peer for the other process
 *   on_hello                 on_packet, on_gone
 *
 * Callbacks run on the service thread, one at a time, with no lock of the service held. They must
 * not block. A listener's or a peer's close waits until a callback of it that runs has returned
 * (unless called from one): after it none comes.
 *
 * Death is the process's: SO_PEERPIDFD, else pidfd_open of the credentials' pid where our pid
 * namespace shows it, else a POSIX record lock on a memfd that both have, looked at every 50 ms. A
 * connection that ends while the process lives, without goodbye, is a death as well: the program
 * was replaced (exec), or lost its descriptors.
 *
 * In a forked child there is no service: tnd__service_ref starts a new one there, and what was made
 * before the fork is only freed.
 */
#ifndef TND_SERVICE_H
#define TND_SERVICE_H

#include "base/base.h"
#include "base/futex.h"

#define TND__PACKET_BYTES_MAX 2048
#define TND__PACKET_FDS_MAX 16

/* Kinds below 16 are the service's own. */
struct tnd__packet {
	uint32_t kind;
	uint32_t bytes;
	uint32_t fd_count; /* received: fewer than sent, where this process may not open more */
	/* Sent: stay the sender's. Received: the receiver's to close, or taken by setting to -1. */
	int fds[TND__PACKET_FDS_MAX];
	unsigned char data[TND__PACKET_BYTES_MAX];
};

/* Without descriptors. `data`: nullable where `bytes` is 0; copied. */
void tnd__packet_make(struct tnd__packet *packet, uint32_t kind, const void *data, size_t bytes);
/* Whether it has `bytes` bytes, which are copied to `data`. */
bool tnd__packet_read(const struct tnd__packet *packet, void *data, size_t bytes);
/* Closes what its receiver has not taken. */
void tnd__packet_close_fds(struct tnd__packet *packet);

struct tnd__peer;
struct tnd__listener;

enum {
	TND__GONE_LEFT, /* said goodbye */
	TND__GONE_DEAD,
};

struct tnd__peer_ops {
	/*
	 * Listening side: a process of our user connected and said hello. 0: it is kept, and
	 * `reply` is sent; else the code, with the sentence in `error`, is what its connect
	 * returns. The peer is `owner`'s to close from then on.
	 */
	int (*on_hello)(void *owner, struct tnd__peer *peer, struct tnd__packet *hello,
			struct tnd__packet *reply, struct tnd_error *error);
	void (*on_packet)(void *owner, struct tnd__peer *peer, struct tnd__packet *packet);
	/* Once. The peer still has to be closed. */
	void (*on_gone)(void *owner, struct tnd__peer *peer, int how);
};

/*
 * Counted: the thread ends with the last unref, once every listener, peer and watch is closed,
 * which hold it too. The last unref waits for what closed peers have left to send, a second at
 * most. In a forked child only what was ref'd there is unref'd. The first ref of a process makes
 * its mark of a fork. Return: 0, -errno.
 */
int tnd__service_ref(void);
void tnd__service_unref(void);

/* -- addresses (address.c) -- */

#define TND__ADDRESS_BYTES 128 /* "unix:" and what fits a sockaddr_un */

/* -- listening (listener.c) -- */

/*
 * `address`: nullable for a fresh "unix:@tundish-...". A socket file that nobody listens to any
 * more is replaced. Return: 0; TND_E_ADDRESS; -EADDRINUSE; -errno.
 */
int tnd__listener_open(const char *address, const struct tnd__peer_ops *ops, void *owner,
		       struct tnd__listener **ret_listener, struct tnd_error *reterr);
const char *tnd__listener_address(const struct tnd__listener *listener);
/* Removes the socket file. In a forked child: frees only. */
void tnd__listener_close(struct tnd__listener *listener);

/* -- peers (connect.c, peer.c, peer_send.c) -- */

/* To whom, with what, and whose the peer will be. */
struct tnd__connect {
	const char *address;
	const char *what; /* "channel", "group": for sentences */
	const struct tnd__packet *hello;
	int64_t deadline_ns;
	const struct tnd__peer_ops *ops; /* has to stay; `owner` is given to its callbacks */
	void *owner;
};

/*
 * Connects, checks who listens, says the hello, waits for the reply. Until the deadline it tries
 * again while nobody listens (0: once). Callbacks may come before this returns.
 * With a listener there, its answer is waited for until the deadline, or 5 s where that is 0.
 * `to`: borrowed for the call. `ret_reply`: nullable; written on failures, too.
 * Return: 0; what on_hello gave (with its sentence); -ETIMEDOUT, -ECONNREFUSED (nobody listens);
 * TND_E_DENIED; TND_E_ADDRESS; TND_E_VERSION; -errno.
 */
int tnd__peer_connect(const struct tnd__connect *to, struct tnd__peer **ret_peer,
		      struct tnd__packet *ret_reply, struct tnd_error *reterr);

/*
 * Sends; what the socket does not take at once is kept and sent by the service. MT-safe, never
 * blocks. Return: 0; -EPIPE (gone); -ENOMEM (or 4,096 packets wait); -EMFILE.
 */
int tnd__peer_send(struct tnd__peer *peer, const struct tnd__packet *packet);

/* In our pid namespace; 0 where it does not show the peer. */
int32_t tnd__peer_pid(const struct tnd__peer *peer);
/* Borrowed; -1 where there is none. */
int tnd__peer_pidfd(const struct tnd__peer *peer);

/* For on_hello: what later callbacks find. */
void tnd__peer_set_tag(struct tnd__peer *peer, uint64_t tag);
uint64_t tnd__peer_tag(const struct tnd__peer *peer);

/*
 * For a peer without a pidfd: it is dead once the record lock on byte `offset` of `fd` (borrowed
 * until close), seen held before, is held no longer. With a pidfd: does nothing.
 */
void tnd__peer_watch_lock(struct tnd__peer *peer, int fd, uint64_t offset);
/* The peer had taken the lock before this call: it is dead if the first look does not find it. */
void tnd__peer_lock_held(struct tnd__peer *peer);
/* Takes that lock for this process (life.c). Closing any descriptor of the file ends it. */
int tnd__life_lock(int fd, uint64_t offset);

/*
 * With `goodbye` the other side gets TND__GONE_LEFT, after what was sent before; what the socket
 * does not take is sent by the service within a second, or dropped. Without, it gets
 * TND__GONE_DEAD. NULL is allowed. In a forked child: frees only.
 */
void tnd__peer_close(struct tnd__peer *peer, bool goodbye);

/* -- processes that we are not connected with (watch.c) -- */

/* Calls `on_end` on the service thread once the process has ended. Return: 0; -ESRCH; -errno. */
struct tnd__watch;
int tnd__watch_open(int32_t pid, void (*on_end)(void *owner, uint64_t tag), void *owner,
		    uint64_t tag, struct tnd__watch **ret_watch);

/* By what others gave us of a process whose pid we may not see. */
struct tnd__life {
	int pid_fd;  /* taken over, also on failure; -1: by its life lock, which was taken before */
	int lock_fd; /* borrowed until close */
	uint64_t lock_offset;
};
int tnd__watch_open_life(const struct tnd__life *life, void (*on_end)(void *owner, uint64_t tag),
			 void *owner, uint64_t tag, struct tnd__watch **ret_watch);
/* NULL is allowed. */
void tnd__watch_close(struct tnd__watch *watch);

#endif
