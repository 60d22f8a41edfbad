/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peer.c - a connected process: packets from and to it, its goodbye, its death
 *
 *   listener accepts           connect.c, after the reply
 *        v                          v
 *     NEWCOMER --- on_hello: 0 --> OPEN --- goodbye: LEFT ---------------> GONE
 *        |  5 s, garbage, end,      |   \-- pidfd, lock, end: DEAD ------> GONE
 *        v  on_hello: code          |
 *      freed                        v  closed with packets that the socket did not take
 *                                LINGER --- all sent, 1 s, peer ended ---> freed
 *
 * `state` is changed under the lock. The service thread, which changes it most, reads it without.
 * A send before the reply has gone out waits in the queue (`hold`). The goodbye is a flag, not a
 * packet of the queue: closing needs no memory.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "service_internal.h"

#define ON_SOCKET 0u
#define ON_PIDFD 1u

#define READ_BURST 64    /* packets before others have their turn */
#define READ_LAST 4096   /* of a dead process; a child of it may still write */
#define QUEUE_MAX 4096   /* packets: a peer that is stopped costs so much at most */
#define LOCK_NS 50000000 /* between looks at a life lock */
#define RETRY_NS 50000000
#define LINGER_NS 1000000000

enum { NEWCOMER, OPEN, GONE, LINGER };

struct outgoing {
	struct outgoing *next;
	struct tnd__packet packet; /* its descriptors are ours */
};

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
	struct outgoing *queue, **queue_end;
	uint32_t queued;
	int lock_fd; /* borrowed, or -1 */
	uint64_t lock_offset;
	bool lock_seen;
	int64_t linger_until_ns;
	struct tnd__newcomers *newcomers; /* whose list it is in, or NULL */
	struct tnd__peer *next_newcomer, **newcomer_link;
};

static struct tnd__peer *of(struct tnd__served *served)
{
	return (struct tnd__peer *)(void *)served;
}

/* -- sending -- */

static void queue_drop(struct tnd__peer *peer)
{
	struct outgoing *next;

	for (struct outgoing *one = peer->queue; one; one = next) {
		next = one->next;
		tnd__packet_close_fds(&one->packet);
		free(one);
	}
	peer->queue = NULL;
	peer->queue_end = &peer->queue;
	peer->queued = 0;
	peer->goodbye = false;
}

/* lock. The queue gets descriptors of its own. Return: 0, -ENOMEM, -EMFILE. */
static int queue_add(struct tnd__peer *peer, const struct tnd__packet *packet)
{
	struct outgoing *one = NULL;

	if (peer->queued < QUEUE_MAX && tnd__failpoint("group.alloc") == 0)
		one = malloc(sizeof(*one));
	if (!one)
		return -ENOMEM;
	one->next = NULL;
	one->packet.kind = packet->kind;
	one->packet.bytes = packet->bytes;
	one->packet.fd_count = 0;
	memcpy(one->packet.data, packet->data, packet->bytes);
	for (uint32_t i = 0; i < packet->fd_count; i++) {
		int fd = fcntl(packet->fds[i], F_DUPFD_CLOEXEC, 0);

		if (fd < 0) {
			int rc = -errno;

			tnd__packet_close_fds(&one->packet);
			free(one);
			return rc;
		}
		one->packet.fds[one->packet.fd_count++] = fd;
	}
	*peer->queue_end = one;
	peer->queue_end = &one->next;
	peer->queued++;
	return 0;
}

/* lock */
static void want_write(struct tnd__peer *peer, bool want)
{
	uint32_t events = (peer->state == LINGER ? 0 : EPOLLIN) | (want ? EPOLLOUT : 0);

	if (want == peer->want_write)
		return;
	peer->want_write = want;
	if (tnd__served_rewatch(&peer->served, peer->fd, ON_SOCKET, events) < 0)
		tnd__served_set_due(&peer->served, tnd__now_ns() + RETRY_NS);
}

/* lock. One send of what waits. Return: 1 (nothing waits), 0 (sent), -errno. */
static int flush_one(struct tnd__peer *peer)
{
	struct outgoing *one = peer->queue;
	int rc;

	if (!one && !peer->goodbye)
		return 1;
	rc = tnd__wire_send(peer->fd, one ? TND__STEP_PACKET : TND__STEP_GOODBYE,
			    one ? &one->packet : NULL);
	if (rc < 0)
		return rc;
	if (!one) {
		peer->goodbye = false;
		return 0;
	}
	peer->queue = one->next;
	if (!peer->queue)
		peer->queue_end = &peer->queue;
	peer->queued--;
	tnd__packet_close_fds(&one->packet);
	free(one);
	return 0;
}

/* lock. Whether nothing is left to send. */
static bool flush(struct tnd__peer *peer)
{
	int rc = 0;

	if (peer->hold)
		return false;
	while (rc == 0)
		rc = flush_one(peer);
	if (rc == -EPIPE)
		queue_drop(peer);
	want_write(peer, rc == -EAGAIN);
	/* Lack of kernel memory, or of descriptors in flight, ends without an event. */
	if (rc < 0 && rc != -EPIPE && rc != -EAGAIN)
		tnd__served_set_due(&peer->served, tnd__now_ns() + RETRY_NS);
	return !peer->queue && !peer->goodbye;
}

int tnd__peer_send(struct tnd__peer *peer, const struct tnd__packet *packet)
{
	int rc = -EPIPE;

	if (tnd__served_forked(&peer->served))
		return -EPIPE;
	tnd__served_lock(&peer->served);
	if (peer->state == OPEN || peer->hold) {
		rc = -EAGAIN;
		if (!peer->queue && !peer->hold)
			rc = tnd__wire_send(peer->fd, TND__STEP_PACKET, packet);
		if (rc < 0 && rc != -EPIPE) {
			rc = queue_add(peer, packet);
			flush(peer);
		}
	}
	tnd__served_unlock(&peer->served);
	return rc;
}

/* -- its end -- */

/* lock */
static void newcomer_leave(struct tnd__peer *peer)
{
	if (!peer->newcomers)
		return;
	*peer->newcomer_link = peer->next_newcomer;
	if (peer->next_newcomer)
		peer->next_newcomer->newcomer_link = peer->newcomer_link;
	peer->newcomers->count--;
	peer->newcomers = NULL;
}

/* lock */
static void unwatch(struct tnd__peer *peer)
{
	tnd__served_unwatch(&peer->served, peer->fd);
	if (peer->pid_fd >= 0)
		tnd__served_unwatch(&peer->served, peer->pid_fd);
}

/* On the service thread: nobody will own it. */
static void abandon(struct tnd__peer *peer)
{
	tnd__served_lock(&peer->served);
	newcomer_leave(peer);
	tnd__served_unlink(&peer->served);
	tnd__served_unlock(&peer->served);
	tnd__served_discard(&peer->served);
}

static void gone(struct tnd__peer *peer, int how)
{
	bool tell;

	tnd__served_lock(&peer->served);
	tell = peer->state == OPEN && !peer->served.removed;
	if (peer->state == OPEN) {
		peer->state = GONE;
		peer->lock_fd = -1;
		unwatch(peer);
		queue_drop(peer);
	}
	tnd__served_unlock(&peer->served);
	if (tell)
		peer->ops->on_gone(peer->owner, peer, how);
}

static void lost(struct tnd__peer *peer)
{
	if (peer->state == NEWCOMER)
		abandon(peer);
	else
		gone(peer, TND__GONE_DEAD);
}

/* -- receiving -- */

/*
 * What the listener's owner says to a hello. on_behalf makes a listener that goes wait for us; its
 * list is left before the owner has us, or both would free us in a child that is forked meanwhile.
 */
static int ask_owner(struct tnd__peer *peer, struct tnd__packet *hello, struct tnd__packet *reply,
		     struct tnd_error *error)
{
	int rc;

	memset(error, 0, sizeof(*error));
	error->rank = -1;
	memset(reply, 0, offsetof(struct tnd__packet, data));
	tnd__served_lock(&peer->served);
	peer->hold = true;
	newcomer_leave(peer);
	tnd__served_unlock(&peer->served);
	rc = peer->ops->on_hello(peer->owner, peer, hello, reply, error);
	tnd__packet_close_fds(hello);
	return rc;
}

/* Who gave up while we were held up, or stopped, is not to take what is kept for it. */
static bool has_hung_up(const struct tnd__peer *peer)
{
	struct pollfd poll_fd = {.fd = peer->fd, .events = POLLRDHUP};

	return poll(&poll_fd, 1, 0) > 0;
}

static void hello_received(struct tnd__peer *peer, struct tnd__packet *hello)
{
	struct tnd__packet reply;
	struct tnd_error error;
	int rc;

	if (has_hung_up(peer)) {
		abandon(peer);
		return;
	}
	rc = ask_owner(peer, hello, &reply, &error);
	if (rc != 0) {
		tnd__wire_refuse(peer->fd, rc, &error);
		abandon(peer);
		return;
	}
	rc = tnd__wire_send(peer->fd, TND__STEP_REPLY, &reply);
	tnd__served_lock(&peer->served);
	peer->served.on_behalf = NULL;
	peer->state = OPEN;
	peer->hold = false;
	if (!peer->served.removed)
		peer->served.due_ns = peer->lock_fd >= 0 ? 0 : INT64_MAX;
	flush(peer);
	tnd__served_unlock(&peer->served);
	/* Without it the other side waits in vain. Who is gone already may have said goodbye. */
	if (rc < 0 && rc != -EPIPE)
		gone(peer, TND__GONE_DEAD);
}

/* A version that we do not speak, or no hello. */
static void newcomer_refuse(struct tnd__peer *peer, const struct tnd__wire *wire)
{
	struct tnd_error error;

	tnd__fail_plain(&error, TND_E_VERSION,
			"the listener speaks version %u of the service protocol, this process "
			"version %u; use the same release of tundish on both sides",
			TND__WIRE_VERSION, wire->version);
	if (wire->version != TND__WIRE_VERSION)
		tnd__wire_refuse(peer->fd, TND_E_VERSION, &error);
	abandon(peer);
}

/* Whether more may follow. */
static bool packet_received(struct tnd__peer *peer, const struct tnd__wire *wire,
			    struct tnd__packet *packet)
{
	bool ours = wire->version == TND__WIRE_VERSION;

	if (peer->state == NEWCOMER) {
		if (ours && wire->step == TND__STEP_HELLO)
			hello_received(peer, packet);
		else
			newcomer_refuse(peer, wire);
	} else if (ours && wire->step == TND__STEP_PACKET) {
		peer->ops->on_packet(peer->owner, peer, packet);
	} else {
		gone(peer,
		     ours && wire->step == TND__STEP_GOODBYE ? TND__GONE_LEFT : TND__GONE_DEAD);
	}
	tnd__packet_close_fds(packet);
	return peer->state == OPEN;
}

static bool may_read(struct tnd__peer *peer)
{
	bool may;

	tnd__served_lock(&peer->served);
	may = !peer->served.removed && (peer->state == NEWCOMER || peer->state == OPEN);
	tnd__served_unlock(&peer->served);
	return may;
}

static void read_packets(struct tnd__peer *peer, unsigned int most)
{
	struct tnd__packet packet;
	struct tnd__wire wire;

	for (bool more = true; more && most && may_read(peer); most--) {
		int rc = tnd__wire_receive(peer->fd, &wire, &packet);

		if (rc == -EAGAIN)
			return;
		if (rc == -EMFILE)
			tnd__log(TND_LOG_WARNING, "descriptors from process %d were lost: %s",
				 (int)peer->pid, tnd_strerror(rc));
		/* Its receiver counts them. A lack of ours is no death of the other. */
		if (rc == -EMFILE && peer->state == OPEN)
			rc = 1;
		if (rc <= 0) {
			tnd__packet_close_fds(&packet);
			lost(peer);
			return;
		}
		more = packet_received(peer, &wire, &packet);
	}
}

/* -- on the service thread -- */

/* lock. A look at the life lock. Whether it was let go of. */
static bool lock_ended(struct tnd__peer *peer)
{
	int held;

	if (peer->lock_fd < 0)
		return false;
	tnd__served_set_due(&peer->served, tnd__now_ns() + LOCK_NS);
	held = tnd__life_held(peer->lock_fd, peer->lock_offset, false);
	peer->lock_seen |= held > 0;
	return peer->lock_seen && held == 0;
}

static void linger(struct tnd__peer *peer, bool ended)
{
	bool done;

	tnd__served_lock(&peer->served);
	done = ended || flush(peer) || tnd__now_ns() >= peer->linger_until_ns;
	if (done) {
		tnd__served_unlink(&peer->served);
		peer->served.service->lingering--;
	} else if (peer->served.due_ns > peer->linger_until_ns) {
		tnd__served_set_due(&peer->served, peer->linger_until_ns);
	}
	tnd__served_unlock(&peer->served);
	if (done)
		tnd__served_discard(&peer->served);
}

static void peer_ready(struct tnd__served *served, unsigned int which, uint32_t events)
{
	struct tnd__peer *peer = of(served);

	if (peer->state == LINGER) {
		linger(peer, which == ON_PIDFD || events & (EPOLLERR | EPOLLHUP));
		return;
	}
	if (which == ON_PIDFD) {
		/* What it sent before counts, its goodbye most of all. */
		read_packets(peer, READ_LAST);
		if (may_read(peer))
			lost(peer);
		return;
	}
	if (events & EPOLLOUT) {
		tnd__served_lock(served);
		if (peer->state == OPEN)
			flush(peer);
		tnd__served_unlock(served);
	}
	if (events & ~(uint32_t)EPOLLOUT)
		read_packets(peer, READ_BURST);
}

static void peer_due(struct tnd__served *served, int64_t now_ns)
{
	struct tnd__peer *peer = of(served);
	bool ended = false;

	(void)now_ns;
	if (peer->state == LINGER) {
		linger(peer, false);
		return;
	}
	if (peer->state == NEWCOMER) {
		abandon(peer);
		return;
	}
	tnd__served_lock(served);
	if (peer->state == OPEN) {
		flush(peer);
		ended = lock_ended(peer);
	}
	tnd__served_unlock(served);
	if (!ended)
		return;
	read_packets(peer, READ_LAST);
	if (may_read(peer))
		lost(peer);
}

static void peer_free(struct tnd__served *served)
{
	struct tnd__peer *peer = of(served);

	if (!tnd__served_forked(served)) {
		unwatch(peer);
		/* A forked child may hold the socket open: the other side is to know anyhow. */
		shutdown(peer->fd, SHUT_RDWR);
	}
	close(peer->fd);
	if (peer->pid_fd >= 0)
		close(peer->pid_fd);
	queue_drop(peer);
	free(peer);
}

static const struct tnd__served_ops served_ops = {peer_ready, peer_due, peer_free};

/* -- its begin -- */

struct tnd__peer *tnd__peer_new(int fd, const struct tnd__who *who, const struct tnd__peer_ops *ops,
				void *owner)
{
	struct tnd__peer *peer =
		tnd__failpoint("group.alloc") < 0 ? NULL : calloc(1, sizeof(*peer));

	if (!peer)
		return NULL;
	peer->fd = fd;
	peer->pid_fd = who->pid_fd;
	peer->pid = who->pid;
	peer->ops = ops;
	peer->owner = owner;
	peer->state = OPEN;
	peer->queue_end = &peer->queue;
	peer->lock_fd = -1;
	return peer;
}

/* lock: no event before both are watched. Return: 0; -errno, and then neither is. */
static int watch(struct tnd__peer *peer)
{
	int rc = 0;

	if (peer->pid_fd >= 0)
		rc = tnd__served_watch(&peer->served, peer->pid_fd, ON_PIDFD, EPOLLIN);
	if (rc == 0)
		rc = tnd__served_watch(&peer->served, peer->fd, ON_SOCKET, EPOLLIN);
	if (rc < 0)
		unwatch(peer);
	return rc;
}

int tnd__peer_start(struct tnd__peer *peer, struct tnd__service *service)
{
	int rc;

	tnd__served_add(&peer->served, service, &served_ops);
	tnd__served_lock(&peer->served);
	rc = watch(peer);
	tnd__served_unlock(&peer->served);
	if (rc < 0)
		tnd__peer_close(peer, true);
	return rc;
}

int tnd__peer_start_newcomer(struct tnd__peer *peer, struct tnd__service *service,
			     struct tnd__served *listener, struct tnd__newcomers *newcomers,
			     int64_t deadline_ns)
{
	int rc;

	peer->state = NEWCOMER;
	tnd__served_add(&peer->served, service, &served_ops);
	tnd__served_lock(&peer->served);
	peer->newcomers = newcomers;
	peer->next_newcomer = newcomers->first;
	peer->newcomer_link = &newcomers->first;
	if (peer->next_newcomer)
		peer->next_newcomer->newcomer_link = &peer->next_newcomer;
	newcomers->first = peer;
	newcomers->count++;
	peer->served.on_behalf = listener;
	tnd__served_set_due(&peer->served, deadline_ns);
	rc = watch(peer);
	tnd__served_unlock(&peer->served);
	if (rc < 0)
		abandon(peer);
	return rc;
}

void tnd__newcomers_drop_oldest(struct tnd__newcomers *newcomers)
{
	struct tnd__peer *oldest = newcomers->first;

	while (oldest->next_newcomer)
		oldest = oldest->next_newcomer;
	abandon(oldest);
}

static void newcomers_free(struct tnd__newcomers *newcomers)
{
	struct tnd__peer *next;

	for (struct tnd__peer *peer = newcomers->first; peer; peer = next) {
		next = peer->next_newcomer;
		peer_free(&peer->served);
	}
}

void tnd__newcomers_end(struct tnd__newcomers *newcomers, struct tnd__served *listener, bool forked)
{
	struct tnd__peer *ended = NULL, *peer;

	if (forked) {
		newcomers_free(newcomers);
		return;
	}
	/* All are out of the service's reach before the lock is let go of. */
	while ((peer = newcomers->first)) {
		newcomer_leave(peer);
		tnd__served_unlink(&peer->served);
		peer->next_newcomer = ended;
		ended = peer;
	}
	tnd__served_unlock(listener);
	for (; ended; ended = peer) {
		peer = ended->next_newcomer;
		tnd__served_discard(&ended->served);
	}
	tnd__served_lock(listener);
}

/* -- for its owner -- */

int32_t tnd__peer_pid(const struct tnd__peer *peer)
{
	return peer->pid;
}

int tnd__peer_pidfd(const struct tnd__peer *peer)
{
	return peer->pid_fd;
}

/* relaxed, both: set before the callbacks that ask for it. */
void tnd__peer_set_tag(struct tnd__peer *peer, uint64_t tag)
{
	atomic_store_explicit(&peer->tag, tag, memory_order_relaxed);
}

uint64_t tnd__peer_tag(const struct tnd__peer *peer)
{
	return atomic_load_explicit(&peer->tag, memory_order_relaxed);
}

void tnd__peer_watch_lock(struct tnd__peer *peer, int fd, uint64_t offset)
{
	if (peer->pid_fd >= 0 || tnd__served_forked(&peer->served))
		return;
	tnd__served_lock(&peer->served);
	if (peer->state == NEWCOMER || peer->state == OPEN) {
		peer->lock_fd = fd;
		peer->lock_offset = offset;
		if (peer->state == OPEN)
			tnd__served_set_due(&peer->served, 0);
	}
	tnd__served_unlock(&peer->served);
}

void tnd__peer_lock_held(struct tnd__peer *peer)
{
	/* A process does not see its own locks. */
	if (tnd__served_forked(&peer->served) || peer->pid == getpid())
		return;
	tnd__served_lock(&peer->served);
	if (peer->state == OPEN && peer->lock_fd >= 0) {
		peer->lock_seen = true;
		tnd__served_set_due(&peer->served, 0);
	}
	tnd__served_unlock(&peer->served);
}

/* lock; removed. Whether there is nothing to wait for, else it is the service's from now on. */
static bool close_open(struct tnd__peer *peer)
{
	/* Closed by on_hello: the reply goes out first, hello_received() flushes. */
	if (peer->hold || peer->state != OPEN || flush(peer))
		return true;
	peer->state = LINGER;
	peer->want_write = false;
	want_write(peer, true);
	peer->linger_until_ns = tnd__now_ns() + LINGER_NS;
	tnd__served_link(&peer->served);
	peer->served.service->lingering++;
	tnd__served_set_due(&peer->served, peer->linger_until_ns);
	return false;
}

void tnd__peer_close(struct tnd__peer *peer, bool goodbye)
{
	bool done;

	if (!peer)
		return;
	if (tnd__served_forked(&peer->served)) {
		peer_free(&peer->served);
		tnd__service_forked();
		return;
	}
	tnd__served_lock(&peer->served);
	if (goodbye && (peer->state == OPEN || peer->hold))
		peer->goodbye = true;
	tnd__served_remove(&peer->served);
	peer->lock_fd = -1;
	if (!goodbye)
		queue_drop(peer);
	done = close_open(peer);
	tnd__served_unlock(&peer->served);
	if (done)
		tnd__served_discard(&peer->served);
}
