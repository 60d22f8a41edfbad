/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peer_send.c - what goes to a connected process: at once, from a queue, and after the close
 *
 *   send --> socket            nothing waits before it, and the socket takes it
 *        \-> queue --> flush --> socket       EPOLLOUT; every RETRY_NS where nothing will tell
 *   close --> goodbye, behind the queue; what is not sent then lingers: LINGER_NS at most
 *
 * A queued packet has descriptors of its own. The goodbye is a flag, not a packet of the queue:
 * closing needs no memory.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "peer_internal.h"

#define QUEUE_MAX 4096 /* packets: a peer that is stopped costs so much at most */
/* Descriptors in it: they are this process's, and a peer that asks and never reads takes them. */
#define QUEUED_FDS_MAX 64
#define RETRY_NS 50000000
#define LINGER_NS 1000000000

struct tnd__outgoing {
	struct tnd__outgoing *next;
	struct tnd__packet packet; /* its descriptors are ours */
};

void tnd__peer_queue_drop(struct tnd__peer *peer)
{
	struct tnd__outgoing *next;

	for (struct tnd__outgoing *one = peer->queue; one; one = next) {
		next = one->next;
		tnd__packet_close_fds(&one->packet);
		free(one);
	}
	peer->queue = NULL;
	peer->queue_end = &peer->queue;
	peer->queued = peer->queued_fds = 0;
	peer->goodbye = false;
}

/* lock. The queue gets descriptors of its own. Return: 0, -ENOMEM, -EMFILE. */
static int queue_add(struct tnd__peer *peer, const struct tnd__packet *packet)
{
	struct tnd__outgoing *one = NULL;

	if (peer->queued_fds && peer->queued_fds + packet->fd_count > QUEUED_FDS_MAX)
		return -EMFILE;
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
	peer->queued_fds += one->packet.fd_count;
	return 0;
}

/* lock */
static void want_write(struct tnd__peer *peer, bool want)
{
	uint32_t events = (peer->state == TND__PEER_LINGER ? 0 : EPOLLIN) | (want ? EPOLLOUT : 0);

	if (want == peer->want_write)
		return;
	peer->want_write = want;
	if (tnd__served_rewatch(&peer->served, peer->fd, TND__PEER_SOCKET, events) < 0)
		tnd__served_set_due(&peer->served, tnd__now_ns() + RETRY_NS);
}

/* lock. One send of what waits. Return: 1 (nothing waits), 0 (sent), -errno. */
static int flush_one(struct tnd__peer *peer)
{
	struct tnd__outgoing *one = peer->queue;
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
	peer->queued_fds -= one->packet.fd_count;
	tnd__packet_close_fds(&one->packet);
	free(one);
	return 0;
}

bool tnd__peer_flush(struct tnd__peer *peer)
{
	int rc = 0;

	if (peer->hold)
		return false;
	while (rc == 0)
		rc = flush_one(peer);
	if (rc == -EPIPE)
		tnd__peer_queue_drop(peer);
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
	if (peer->state == TND__PEER_OPEN || peer->hold) {
		rc = -EAGAIN;
		if (!peer->queue && !peer->hold)
			rc = tnd__wire_send(peer->fd, TND__STEP_PACKET, packet);
		if (rc < 0 && rc != -EPIPE) {
			rc = queue_add(peer, packet);
			tnd__peer_flush(peer);
		}
	}
	tnd__served_unlock(&peer->served);
	return rc;
}

/* -- after the close -- */

bool tnd__peer_begin_linger(struct tnd__peer *peer)
{
	/* Closed by on_hello: the reply goes out first, hello_received() flushes. */
	if (peer->hold || peer->state != TND__PEER_OPEN || tnd__peer_flush(peer))
		return true;
	peer->state = TND__PEER_LINGER;
	peer->want_write = false;
	want_write(peer, true);
	peer->linger_until_ns = tnd__now_ns() + LINGER_NS;
	tnd__served_link(&peer->served);
	peer->served.service->lingering++;
	tnd__served_set_due(&peer->served, peer->linger_until_ns);
	return false;
}

void tnd__peer_linger(struct tnd__peer *peer, bool ended)
{
	bool done;

	tnd__served_lock(&peer->served);
	done = ended || tnd__peer_flush(peer) || tnd__now_ns() >= peer->linger_until_ns;
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
