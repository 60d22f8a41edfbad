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
 * A send before the reply has gone out waits in the queue (`hold`). peer_newcomer.c has the state
 * NEWCOMER, peer_send.c the queue and the state LINGER.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "peer_internal.h"

#define READ_BURST 64    /* packets before others have their turn */
#define READ_LAST 4096   /* of a dead process; a child of it may still write */
#define LOCK_NS 50000000 /* between looks at a life lock */

static struct tnd__peer *of(struct tnd__served *served)
{
	return (struct tnd__peer *)(void *)served;
}

/* -- its end -- */

/* lock */
static void unwatch(struct tnd__peer *peer)
{
	tnd__served_unwatch(&peer->served, peer->fd);
	if (peer->pid_fd >= 0)
		tnd__served_unwatch(&peer->served, peer->pid_fd);
}

void tnd__peer_gone(struct tnd__peer *peer, int how)
{
	bool tell;

	tnd__served_lock(&peer->served);
	tell = peer->state == TND__PEER_OPEN && !peer->served.removed;
	if (peer->state == TND__PEER_OPEN) {
		peer->state = TND__PEER_GONE;
		peer->lock_fd = -1;
		unwatch(peer);
		tnd__peer_queue_drop(peer);
	}
	tnd__served_unlock(&peer->served);
	if (tell)
		peer->ops->on_gone(peer->owner, peer, how);
}

static void lost(struct tnd__peer *peer)
{
	if (peer->state == TND__PEER_NEWCOMER)
		tnd__newcomer_abandon(peer);
	else
		tnd__peer_gone(peer, TND__GONE_DEAD);
}

/* -- receiving -- */

/* Whether more may follow. */
static bool packet_received(struct tnd__peer *peer, const struct tnd__wire *wire,
			    struct tnd__packet *packet)
{
	bool ours = wire->version == TND__WIRE_VERSION;

	if (peer->state == TND__PEER_NEWCOMER)
		tnd__newcomer_packet(peer, wire, packet);
	else if (ours && wire->step == TND__STEP_PACKET)
		peer->ops->on_packet(peer->owner, peer, packet);
	else if (ours && wire->step == TND__STEP_GOODBYE)
		tnd__peer_gone(peer, TND__GONE_LEFT);
	else
		tnd__peer_gone(peer, TND__GONE_DEAD);
	tnd__packet_close_fds(packet);
	return peer->state == TND__PEER_OPEN;
}

static bool may_read(struct tnd__peer *peer)
{
	bool may;

	tnd__served_lock(&peer->served);
	may = !peer->served.removed &&
	      (peer->state == TND__PEER_NEWCOMER || peer->state == TND__PEER_OPEN);
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
		if (rc == -EMFILE && peer->state == TND__PEER_OPEN)
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

static void peer_ready(struct tnd__served *served, unsigned int which, uint32_t events)
{
	struct tnd__peer *peer = of(served);

	if (peer->state == TND__PEER_LINGER) {
		tnd__peer_linger(peer, which == TND__PEER_PIDFD || events & (EPOLLERR | EPOLLHUP));
		return;
	}
	if (which == TND__PEER_PIDFD) {
		/* What it sent before counts, its goodbye most of all. */
		read_packets(peer, READ_LAST);
		if (may_read(peer))
			lost(peer);
		return;
	}
	if (events & EPOLLOUT) {
		tnd__served_lock(served);
		if (peer->state == TND__PEER_OPEN)
			tnd__peer_flush(peer);
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
	if (peer->state == TND__PEER_LINGER) {
		tnd__peer_linger(peer, false);
		return;
	}
	if (peer->state == TND__PEER_NEWCOMER) {
		tnd__newcomer_abandon(peer);
		return;
	}
	tnd__served_lock(served);
	if (peer->state == TND__PEER_OPEN) {
		tnd__peer_flush(peer);
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
	tnd__peer_queue_drop(peer);
	free(peer);
}

const struct tnd__served_ops tnd__peer_served_ops = {peer_ready, peer_due, peer_free};

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
	peer->state = TND__PEER_OPEN;
	peer->queue_end = &peer->queue;
	peer->lock_fd = -1;
	return peer;
}

int tnd__peer_watch(struct tnd__peer *peer)
{
	int rc = 0;

	if (peer->pid_fd >= 0)
		rc = tnd__served_watch(&peer->served, peer->pid_fd, TND__PEER_PIDFD, EPOLLIN);
	if (rc == 0)
		rc = tnd__served_watch(&peer->served, peer->fd, TND__PEER_SOCKET, EPOLLIN);
	if (rc < 0)
		unwatch(peer);
	return rc;
}

int tnd__peer_start(struct tnd__peer *peer, struct tnd__service *service)
{
	int rc;

	tnd__served_add(&peer->served, service, &tnd__peer_served_ops);
	tnd__served_lock(&peer->served);
	rc = tnd__peer_watch(peer);
	tnd__served_unlock(&peer->served);
	if (rc < 0)
		tnd__peer_close(peer, true);
	return rc;
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
	if (peer->state == TND__PEER_NEWCOMER || peer->state == TND__PEER_OPEN) {
		peer->lock_fd = fd;
		peer->lock_offset = offset;
		if (peer->state == TND__PEER_OPEN)
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
	if (peer->state == TND__PEER_OPEN && peer->lock_fd >= 0) {
		peer->lock_seen = true;
		tnd__served_set_due(&peer->served, 0);
	}
	tnd__served_unlock(&peer->served);
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
	if (goodbye && (peer->state == TND__PEER_OPEN || peer->hold))
		peer->goodbye = true;
	tnd__served_remove(&peer->served);
	peer->lock_fd = -1;
	if (!goodbye)
		tnd__peer_queue_drop(peer);
	done = tnd__peer_begin_linger(peer);
	tnd__served_unlock(&peer->served);
	if (done)
		tnd__served_discard(&peer->served);
}
