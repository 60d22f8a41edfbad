/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bridge_receivers.c - listening side: who receives, up to where, how much more they take
 *
 *   unknown --STATE--> admitted: WELCOME, objects, PING, END --ENDED--> ended
 *                        |    ^                        `--LEAVE--> gone
 *             connection breaks, STATE on another one          silent for grace_ns: lost
 *
 * A receiver is known by the id that it chose, not by its connection. Every STATE says what it
 * expects; one that comes by another connection than the last means that what was under way is
 * lost: it is sent again from there. STATEs of a broken connection may come late: they say less
 * than is known and change nothing, or turn the receiver to a route that is not there, until its
 * next STATE turns it back.
 *
 * Nothing is believed: what a receiver acknowledges must have been sent to it.
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "bridge_internal.h"

static struct tnd__receiver *find(struct tnd__listening *listening, uint64_t id)
{
	for (uint32_t i = 0; i < listening->count; i++)
		if (listening->receivers[i].id == id)
			return &listening->receivers[i];
	return NULL;
}

static void forget(struct tnd_bridge *bridge, struct tnd__receiver *receiver)
{
	struct tnd__listening *listening = &bridge->listening;

	*receiver = listening->receivers[--listening->count];
}

void tnd__bridge_refuse(struct tnd_bridge *bridge, const void *route, size_t route_bytes, int code,
			const char *text)
{
	struct tnd__bridge_head head = {
		.kind = BRIDGE_REFUSE, .session = bridge->session, .value = code};

	if (tnd__bridge_send_route(bridge->socket, route, route_bytes) == 0)
		(void)tnd__bridge_send(bridge->socket, &head, text, strlen(text));
}

/* The first frame decides: without a connection it is refused, and nothing of the rest is sent. */
static int begin(struct tnd_bridge *bridge, struct tnd__receiver *receiver)
{
	int rc;

	if (!receiver->connected)
		return -EHOSTUNREACH;
	rc = tnd__bridge_send_route(bridge->socket, receiver->route, receiver->route_bytes);
	if (rc == -EHOSTUNREACH || rc == -EAGAIN)
		receiver->connected = false;
	return rc;
}

void tnd__receiver_say(struct tnd_bridge *bridge, struct tnd__receiver *receiver, uint32_t kind,
		       uint64_t number, int64_t value)
{
	struct tnd__bridge_head head = {.kind = kind,
					.session = bridge->session,
					.receiver = receiver->id,
					.number = number,
					.value = value};

	if (begin(bridge, receiver) == 0 && tnd__bridge_send(bridge->socket, &head, NULL, 0) == 0)
		receiver->said_ns = tnd__bridge_now_ns();
}

/* A new receiver begins with what is not released; the first ones with the first object. */
static struct tnd__receiver *admit(struct tnd_bridge *bridge, const struct tnd__bridge_head *head,
				   const void *route, size_t route_bytes)
{
	struct tnd__listening *listening = &bridge->listening;
	struct tnd__receiver *receiver;

	if (head->session == bridge->session) {
		tnd__bridge_refuse(bridge, route, route_bytes, TND_E_EVICTED,
				   "this receiver was given up, or has left: connect anew");
		return NULL;
	}
	if (head->session != 0) {
		tnd__bridge_refuse(bridge, route, route_bytes, TND_E_CORRUPT,
				   "this is another session: the listening side was started anew");
		return NULL;
	}
	if (listening->count == TND_BRIDGE_RECEIVERS_MAX) {
		tnd__bridge_refuse(bridge, route, route_bytes, TND_E_PLACE,
				   "64 receivers are connected, which is the most");
		return NULL;
	}
	receiver = &listening->receivers[listening->count++];
	*receiver = (struct tnd__receiver){.id = head->receiver};
	receiver->first = receiver->sent = receiver->written = listening->top;
	return receiver;
}

/* Forgets what was under way on the last connection. */
static void turn(struct tnd_bridge *bridge, struct tnd__receiver *receiver, uint64_t expected)
{
	struct tnd__window *window = &bridge->listening.window;

	bridge->now.reconnects++;
	bridge->now.repeated += receiver->sent - expected;
	receiver->sent = expected;
	receiver->under_way_bytes = 0;
	for (uint64_t number = receiver->written; number != expected; number++)
		receiver->under_way_bytes += tnd__window_at(window, number)->bytes;
}

static void acknowledge(struct tnd_bridge *bridge, struct tnd__receiver *receiver, uint64_t written)
{
	struct tnd__window *window = &bridge->listening.window;

	for (; receiver->written < written; receiver->written++)
		receiver->under_way_bytes -=
			tnd__window_at(window, receiver->written)->bytes;
}

/* Whether what a STATE says can be; a late one says less than is known. */
static bool makes_sense(const struct tnd__receiver *receiver, const struct tnd__bridge_head *head)
{
	return head->written <= head->number && head->number <= receiver->sent &&
	       head->objects > 0 && head->value >= 0;
}

static int drop_nonsense(struct tnd_bridge *bridge, struct tnd__receiver *receiver,
			 const struct tnd__bridge_head *head)
{
	bridge->now.refused++;
	bridge->now.lost++;
	tnd__bridge_refuse(bridge, receiver->route, receiver->route_bytes, TND_E_CORRUPT,
			   "more was acknowledged than was sent");
	tnd__bridge_fail(&bridge->why, TND_E_CORRUPT,
			 "a receiver acknowledges object %" PRIu64 ", expects %" PRIu64
			 ", and was sent %" PRIu64 ": it is broken, or no bridge",
			 head->written, head->number, receiver->sent);
	forget(bridge, receiver);
	return bridge->listening.on_lost == TND_BRIDGE_LOST_CONTINUE ? 0 : TND_E_CORRUPT;
}

static int take_state(struct tnd_bridge *bridge, struct tnd__receiver *receiver,
		      const struct tnd__bridge_head *head, bool turned)
{
	struct tnd__bridge_head state = *head;

	if (state.session == 0) /* it has not heard the welcome */
		state.number = state.written = receiver->first;
	if (!makes_sense(receiver, &state))
		return drop_nonsense(bridge, receiver, &state);
	if (state.written > receiver->written)
		acknowledge(bridge, receiver, state.written);
	if (turned)
		turn(bridge, receiver,
		     state.number > receiver->written ? state.number : receiver->written);
	receiver->objects = state.objects;
	receiver->bytes = state.bytes;
	receiver->longest = (uint64_t)state.value;
	if (head->session == 0 || turned)
		tnd__receiver_say(bridge, receiver, BRIDGE_WELCOME, receiver->first, 0);
	return 0;
}

static int take_leave(struct tnd_bridge *bridge, struct tnd__receiver *receiver, int64_t code)
{
	tnd__receiver_say(bridge, receiver, BRIDGE_END, receiver->sent, 0);
	forget(bridge, receiver);
	if (code == 0)
		return 0;
	bridge->now.lost++;
	if (bridge->listening.on_lost == TND_BRIDGE_LOST_CONTINUE)
		return 0;
	return tnd__bridge_fail(
		&bridge->why, TND_E_PEER_DEAD, "a receiver ended with an error: %s",
		tnd_strerror(code < INT32_MIN || code > 0 ? TND_E_CORRUPT : (int)code));
}

int tnd__receivers_heard(struct tnd_bridge *bridge, const struct tnd__bridge_head *head,
			 const void *route, size_t route_bytes)
{
	struct tnd__receiver *receiver = find(&bridge->listening, head->receiver);
	bool fresh = !receiver, turned;

	if (fresh && head->kind == BRIDGE_STATE)
		receiver = admit(bridge, head, route, route_bytes);
	if (!receiver)
		return 0;
	if (!fresh && head->session != 0 && head->session != bridge->session) {
		bridge->now.refused++;
		return 0;
	}
	turned = !fresh && (receiver->route_bytes != route_bytes ||
			    memcmp(receiver->route, route, route_bytes) != 0);
	memcpy(receiver->route, route, route_bytes);
	receiver->route_bytes = route_bytes;
	receiver->connected = true;
	receiver->heard_ns = tnd__bridge_now_ns();
	if (head->kind == BRIDGE_LEAVE)
		return take_leave(bridge, receiver, head->value);
	if (head->kind == BRIDGE_ENDED && bridge->listening.end < 0) {
		receiver->ended = true;
		tnd__receiver_say(bridge, receiver, BRIDGE_END, receiver->sent, 0);
	}
	return take_state(bridge, receiver, head, turned);
}

/* Whether the next object fits what the receiver takes; one alone may be longer than `bytes`. */
static bool takes(const struct tnd__receiver *receiver, uint64_t bytes)
{
	uint64_t under_way = receiver->sent - receiver->written;

	if (under_way == 0)
		return true;
	return under_way < receiver->objects && receiver->under_way_bytes < receiver->bytes &&
	       bytes <= receiver->bytes - receiver->under_way_bytes;
}

static int send_object(struct tnd_bridge *bridge, struct tnd__receiver *receiver, uint64_t bytes)
{
	const struct tnd_object *object = tnd__window_at(&bridge->listening.window, receiver->sent);
	struct tnd__bridge_head head = {.kind = BRIDGE_OBJECT,
					.session = bridge->session,
					.receiver = receiver->id,
					.number = receiver->sent,
					.bytes = bytes};
	int rc = begin(bridge, receiver);

	if (rc == 0)
		rc = tnd__bridge_send(bridge->socket, &head, object->data, bytes);
	if (rc < 0)
		return rc;
	receiver->sent++;
	receiver->under_way_bytes += bytes;
	return 0;
}

static int feed(struct tnd_bridge *bridge, struct tnd__receiver *receiver)
{
	struct tnd__listening *listening = &bridge->listening;
	bool any = false;

	while (receiver->connected && receiver->sent != listening->top) {
		uint64_t bytes = tnd__window_at(&listening->window, receiver->sent)->bytes;
		int rc;

		if (bytes > receiver->longest)
			return tnd__bridge_fail(
				&bridge->why, -EMSGSIZE,
				"an object has %" PRIu64 " bytes, a receiver takes %" PRIu64
				": raise what the connecting side takes (max_object_bytes)",
				bytes, receiver->longest);
		if (!takes(receiver, bytes))
			break;
		rc = send_object(bridge, receiver, bytes);
		if (rc == -EHOSTUNREACH || rc == -EAGAIN)
			break;
		if (rc < 0)
			return tnd__bridge_fail(&bridge->why, rc,
						"an object of %" PRIu64 " bytes cannot be sent: %s",
						bytes, tnd_strerror(rc));
		any = true;
	}
	if (any)
		receiver->said_ns = tnd__bridge_now_ns();
	return 0;
}

int tnd__receivers_feed(struct tnd_bridge *bridge)
{
	struct tnd__listening *listening = &bridge->listening;
	int rc = 0;

	for (uint32_t i = 0; i < listening->count && rc == 0; i++)
		rc = feed(bridge, &listening->receivers[i]);
	return rc;
}

static int lose(struct tnd_bridge *bridge, struct tnd__receiver *receiver)
{
	uint64_t behind = bridge->listening.top - receiver->written;

	bridge->now.lost++;
	forget(bridge, receiver);
	if (bridge->listening.on_lost == TND_BRIDGE_LOST_CONTINUE)
		return 0;
	return tnd__bridge_fail(&bridge->why, TND_E_PEER_DEAD,
				"a receiver has been silent for %.1f s, %" PRIu64
				" objects behind: it died, was stopped, or the network is down",
				(double)bridge->grace_ns / 1e9, behind);
}

int tnd__receivers_tick(struct tnd_bridge *bridge)
{
	struct tnd__listening *listening = &bridge->listening;
	int64_t now = tnd__bridge_now_ns();
	int rc = 0;

	for (uint32_t i = 0; i < listening->count && rc == 0;) {
		struct tnd__receiver *receiver = &listening->receivers[i];

		if (!receiver->ended && now - receiver->heard_ns > bridge->grace_ns) {
			rc = lose(bridge, receiver);
			continue;
		}
		if (receiver->connected && now - receiver->said_ns >= bridge->tick_ns)
			tnd__receiver_say(bridge, receiver, BRIDGE_PING, receiver->sent, 0);
		i++;
	}
	return rc;
}

uint64_t tnd__receivers_written(const struct tnd__listening *listening)
{
	uint64_t least = listening->top;

	for (uint32_t i = 0; i < listening->count; i++)
		if (listening->receivers[i].written < least)
			least = listening->receivers[i].written;
	return least;
}
