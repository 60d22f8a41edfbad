/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peer_newcomer.c - a process that has connected to a listener and has not said hello
 *
 *   accepted --> in the listener's list --> hello --> on_hello --> the owner's, open
 *                     |  deadline, no hello, end         |  code: the refusal is sent
 *                     v  too many, listener closed       v
 *                   freed                              freed
 *
 * Nobody owns it: the service frees it, or the listener's close. It leaves the list before on_hello
 * is asked, from then on it is the owner's or ours, whatever becomes of the listener.
 */
#include <errno.h>
#include <poll.h>
#include <string.h>

#include "peer_internal.h"

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

void tnd__newcomer_abandon(struct tnd__peer *peer)
{
	tnd__served_lock(&peer->served);
	newcomer_leave(peer);
	tnd__served_unlink(&peer->served);
	tnd__served_unlock(&peer->served);
	tnd__served_discard(&peer->served);
}

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
		tnd__newcomer_abandon(peer);
		return;
	}
	rc = ask_owner(peer, hello, &reply, &error);
	if (rc != 0) {
		tnd__wire_refuse(peer->fd, rc, &error);
		tnd__newcomer_abandon(peer);
		return;
	}
	rc = tnd__wire_send(peer->fd, TND__STEP_REPLY, &reply);
	tnd__served_lock(&peer->served);
	peer->served.on_behalf = NULL;
	peer->state = TND__PEER_OPEN;
	peer->hold = false;
	if (!peer->served.removed)
		peer->served.due_ns = peer->lock_fd >= 0 ? 0 : INT64_MAX;
	tnd__peer_flush(peer);
	tnd__served_unlock(&peer->served);
	/* Without it the other side waits in vain. Who is gone already may have said goodbye. */
	if (rc < 0 && rc != -EPIPE)
		tnd__peer_gone(peer, TND__GONE_DEAD);
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
	tnd__newcomer_abandon(peer);
}

void tnd__newcomer_packet(struct tnd__peer *peer, const struct tnd__wire *wire,
			  struct tnd__packet *packet)
{
	if (wire->version == TND__WIRE_VERSION && wire->step == TND__STEP_HELLO)
		hello_received(peer, packet);
	else
		newcomer_refuse(peer, wire);
}

/* -- the list -- */

int tnd__peer_start_newcomer(struct tnd__peer *peer, struct tnd__service *service,
			     struct tnd__served *listener, struct tnd__newcomers *newcomers,
			     int64_t deadline_ns)
{
	int rc;

	peer->state = TND__PEER_NEWCOMER;
	tnd__served_add(&peer->served, service, &tnd__peer_served_ops);
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
	rc = tnd__peer_watch(peer);
	tnd__served_unlock(&peer->served);
	if (rc < 0)
		tnd__newcomer_abandon(peer);
	return rc;
}

void tnd__newcomers_drop_oldest(struct tnd__newcomers *newcomers)
{
	struct tnd__peer *oldest = newcomers->first;

	while (oldest->next_newcomer)
		oldest = oldest->next_newcomer;
	tnd__newcomer_abandon(oldest);
}

static void newcomers_free(struct tnd__newcomers *newcomers)
{
	struct tnd__peer *next;

	for (struct tnd__peer *peer = newcomers->first; peer; peer = next) {
		next = peer->next_newcomer;
		tnd__peer_served_ops.free(&peer->served);
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
