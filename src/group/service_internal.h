/* SPDX-License-Identifier: Apache-2.0 */
/*
 * service_internal.h - between the files of the service
 *
 *   service.c    the thread: events and due times of what it serves, and who waits for callbacks
 *   listener.c   serves an address
 *   peer*.c      serve a connected process (peer_internal.h)
 *   watch.c      serves a process that we are not connected with
 *   connect.c    the connecting side of the handshake
 *   wire.c       one packet on a socket
 *   who.c        whose process is at the other end
 *   life.c       life locks
 *   address.c    texts to socket addresses
 *
 * Locks: the gate of service.c, then `lock` of a service; callbacks run under neither.
 */
#ifndef TND_SERVICE_INTERNAL_H
#define TND_SERVICE_INTERNAL_H

#include <sys/socket.h>
#include <sys/un.h>

#include "service.h"

/* -- the thread and what it serves (service.c) -- */

struct tnd__served;

/* All on the service thread, but for free(). */
struct tnd__served_ops {
	/* `which`: as given to tnd__served_watch; `events`: EPOLL*. */
	void (*ready)(struct tnd__served *served, unsigned int which, uint32_t events);
	/* due_ns has passed; it was set to INT64_MAX. */
	void (*due)(struct tnd__served *served, int64_t now_ns);
	void (*free)(struct tnd__served *served);
};

struct tnd__service {
	uint64_t forkmark;
	pthread_t thread;
	int epoll_fd, kick_fd;
	uint32_t users; /* gate: references of callers */
	uint32_t holds; /* gate: of what is served */
	pthread_mutex_t lock;
	pthread_cond_t returned; /* `running` changed */
	struct tnd__served *first;
	/* Whose ready() or due() runs, or whose memory is freed after it; and its on_behalf. */
	const struct tnd__served *running, *running_for;
	uint64_t last_id;
	uint32_t lingering; /* closed peers with something left to send */
	bool stopping, detached;
};

/* What the thread waits for. The first member of listeners, peers and watches. */
struct tnd__served {
	const struct tnd__served_ops *ops;
	struct tnd__service *service; /* not to be followed in a forked child */
	uint64_t forkmark, id;
	/* lock */
	struct tnd__served *next, **link;
	struct tnd__served *on_behalf; /* nullable: a close of that one waits for us as well */
	int64_t due_ns;                /* INT64_MAX: none */
	bool removed;                  /* no callback may begin any more */
	bool discard;                  /* to be freed once ready() or due() has returned */
};

/* Starts the thread if there is none. Each successful call needs a put. Return: 0, -errno. */
int tnd__service_hold(struct tnd__service **ret_service);
/* For who holds it already. */
void tnd__service_hold_again(struct tnd__service *service);
void tnd__service_put(struct tnd__service *service);

/* In a forked child: gives back what is left there of its parent's service. */
void tnd__service_forked(void);

/* In a child of the process that made it? Then it is only freed. */
bool tnd__served_forked(const struct tnd__served *served);

/* It takes over a hold on `service`. */
void tnd__served_add(struct tnd__served *served, struct tnd__service *service,
		     const struct tnd__served_ops *ops);
/* Return: 0, -errno. Level-triggered. */
int tnd__served_watch(struct tnd__served *served, int fd, unsigned int which, uint32_t events);
int tnd__served_rewatch(struct tnd__served *served, int fd, unsigned int which, uint32_t events);
/* Before the close of `fd`: a forked child may have it open still. */
void tnd__served_unwatch(struct tnd__served *served, int fd);

/* These four: lock held. */
void tnd__served_set_due(struct tnd__served *served, int64_t due_ns);
void tnd__served_link(struct tnd__served *served);
void tnd__served_unlink(struct tnd__served *served);
/* Unlinks, and waits until none of its callbacks runs, unless this is the service thread. */
void tnd__served_remove(struct tnd__served *served);

void tnd__served_lock(struct tnd__served *served);
void tnd__served_unlock(struct tnd__served *served);
/* Frees what was unlinked, now or when its callback returns, and gives the hold back. */
void tnd__served_discard(struct tnd__served *served);

/* -- packets on a socket (wire.c) -- */

#define TND__WIRE_MAGIC UINT32_C(0x53444e54) /* "TNDS" */
#define TND__WIRE_VERSION 1u

/* Magic, version and what a refusal needs never change place. */
struct tnd__wire {
	uint32_t magic, version;
	uint32_t step; /* TND__STEP_* */
	uint32_t kind, bytes, fd_count;
};

#define TND__STEP_HELLO 1u
#define TND__STEP_REPLY 2u
#define TND__STEP_REFUSED 3u /* instead of a reply: struct tnd__refusal */
#define TND__STEP_PACKET 4u
#define TND__STEP_GOODBYE 5u

struct tnd__refusal {
	int32_t code, rank;
	char message[TND_ERROR_MESSAGE_MAX];
};

/* Never blocks. `packet`: nullable. Return: 0; -EAGAIN; -EPIPE; -errno. */
int tnd__wire_send(int fd, uint32_t step, const struct tnd__packet *packet);
/* Tells the connecting side what it will return. */
void tnd__wire_refuse(int fd, int code, const struct tnd_error *error);
/*
 * Never blocks. A packet of another version comes without contents.
 * Return: 1; 0 (end); -EAGAIN; -EPROTO (no packet of ours); -EMFILE (the packet with as many of its
 * descriptors as this process may open); -errno.
 */
int tnd__wire_receive(int fd, struct tnd__wire *ret_wire, struct tnd__packet *ret_packet);

/* -- who is at the other end (who.c) -- */

struct tnd__who {
	uid_t uid;
	int32_t pid; /* 0: not in our pid namespace */
	int pid_fd;  /* owned, or -1 */
};

/*
 * Of a connected socket: who connected, or who listened.
 * Return: 0; -ESRCH (the process has ended); -EMFILE; -errno.
 */
int tnd__who_is(int fd, struct tnd__who *ret_who);
/* Return: descriptor, close-on-exec; -ESRCH; -errno. */
int tnd__pidfd_open(int32_t pid);
/* Whether the process of a pidfd has ended. */
bool tnd__pidfd_ended(int pid_fd);

/* -- life locks (life.c) -- */

/*
 * Whether the byte is locked. `also_own`: or else a lock of our own process does not count.
 * Return: 1, 0, -errno.
 */
int tnd__life_held(int fd, uint64_t offset, bool also_own);

/* -- addresses (address.c) -- */

/* Return: 0; TND_E_ADDRESS. */
int tnd__address_parse(const char *address, struct sockaddr_un *ret_name, socklen_t *ret_bytes,
		       struct tnd_error *reterr);
/* A new "unix:@tundish-PID-RANDOM". Return: 0; -errno. */
int tnd__address_fresh(char address[TND__ADDRESS_BYTES], struct tnd_error *reterr);

/* -- peers (peer.c, peer_newcomer.c) -- */

/* Takes both over. Return: NULL if memory ran out (nothing is taken then). */
struct tnd__peer *tnd__peer_new(int fd, const struct tnd__who *who, const struct tnd__peer_ops *ops,
				void *owner);
/* Takes over a hold on `service`. Return: 0; -errno, with goodbye said and the peer freed. */
int tnd__peer_start(struct tnd__peer *peer, struct tnd__service *service);

/* Connections of a listener that have not said hello. lock. */
struct tnd__newcomers {
	struct tnd__peer *first;
	uint32_t count;
};
/* The same for one that has to say hello until `deadline_ns`. On the service thread. */
int tnd__peer_start_newcomer(struct tnd__peer *peer, struct tnd__service *service,
			     struct tnd__served *listener, struct tnd__newcomers *newcomers,
			     int64_t deadline_ns);
/* On the service thread, in a callback of none of them. */
void tnd__newcomers_drop_oldest(struct tnd__newcomers *newcomers);
/* Ends them. lock; their listener was removed. `forked`: frees only, no lock. */
void tnd__newcomers_end(struct tnd__newcomers *newcomers, struct tnd__served *listener,
			bool forked);

#endif
