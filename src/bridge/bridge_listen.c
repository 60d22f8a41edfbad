/* SPDX-License-Identifier: Apache-2.0 */
/* bridge_listen.c - listening side: the loop */
#include <errno.h>
#include <string.h>

#include "bridge_internal.h"

#define MESSAGES_A_ROUND 256

static bool more_frames(zmq_msg_t *message)
{
	return zmq_msg_more(message) != 0;
}

/* Reads a message to its end, so that the next begins where it should. */
static void skip_rest(void *socket, zmq_msg_t *message)
{
	while (more_frames(message) && zmq_msg_recv(message, socket, ZMQ_DONTWAIT) >= 0)
		;
}

static int handle(struct tnd_bridge *bridge, zmq_msg_t *route, zmq_msg_t *body, bool alone)
{
	struct tnd__bridge_head head = {0};
	size_t route_bytes = zmq_msg_size(route);
	int rc = alone && route_bytes <= BRIDGE_ROUTE_MAX ? tnd__bridge_unpack(body, &head)
							  : TND_E_CORRUPT;

	if (rc == TND_E_VERSION)
		tnd__bridge_refuse(bridge, zmq_msg_data(route), route_bytes, rc,
				   "the listening side speaks version 1 of the bridge");
	if (rc == 0 && head.kind >= BRIDGE_STATE && head.kind <= BRIDGE_ENDED)
		return tnd__receivers_heard(bridge, &head, zmq_msg_data(route), route_bytes);
	bridge->now.refused++;
	return 0;
}

/* One message: route, head. Return: > 0: there was one; 0: none; < 0: the error. */
static int read_one(struct tnd_bridge *bridge)
{
	zmq_msg_t route, body;
	int rc = 0;

	zmq_msg_init(&route);
	zmq_msg_init(&body);
	if (zmq_msg_recv(&route, bridge->socket, ZMQ_DONTWAIT) < 0) {
		rc = tnd__bridge_errno();
		rc = rc == -EAGAIN || rc == -EINTR ? 0 : rc;
	} else {
		bool alone = false;

		if (more_frames(&route) && zmq_msg_recv(&body, bridge->socket, ZMQ_DONTWAIT) >= 0)
			alone = !more_frames(&body);
		if (alone) {
			rc = handle(bridge, &route, &body, true);
		} else {
			skip_rest(bridge->socket, &body);
			bridge->now.refused++;
		}
		rc = rc < 0 ? rc : 1;
	}
	zmq_msg_close(&route);
	zmq_msg_close(&body);
	return rc;
}

static int read_all(struct tnd_bridge *bridge)
{
	for (int i = 0; i < MESSAGES_A_ROUND; i++) {
		int rc = read_one(bridge);

		if (rc <= 0)
			return rc;
	}
	return 0;
}

static int begin(struct tnd_bridge *bridge)
{
	struct tnd__listening *listening = &bridge->listening;
	int rc;

	if (listening->begun || listening->count < listening->wanted)
		return 0;
	rc = tnd__window_start(&listening->window);
	if (rc < 0)
		return tnd__bridge_fail(&bridge->why, rc, "no thread for the channel: %s",
					tnd_strerror(rc));
	listening->begun = true;
	return 0;
}

static void take_news(struct tnd__listening *listening)
{
	uint64_t number = listening->top;

	listening->end = tnd__window_news(&listening->window, &listening->top);
	for (; number != listening->top; number++)
		listening->borrowed_bytes += tnd__window_at(&listening->window, number)->bytes;
}

static int release(struct tnd_bridge *bridge)
{
	struct tnd__listening *listening = &bridge->listening;
	struct tnd__window *window = &listening->window;
	uint64_t base = window->base;
	int rc = tnd__window_release(window, tnd__receivers_written(listening));

	for (; base != window->base; base++) {
		bridge->now.objects++;
		bridge->now.bytes += tnd__window_at(window, base)->bytes;
	}
	if (rc < 0)
		return tnd__bridge_fail(
			&bridge->why, rc,
			"channel '%s': the writer gave this reader up: objects that were under "
			"way may have been overwritten",
			tnd_channel_address(bridge->channel));
	return 0;
}

static bool all_ended(const struct tnd__listening *listening)
{
	for (uint32_t i = 0; i < listening->count; i++)
		if (!listening->receivers[i].ended)
			return false;
	return true;
}

/* The channel has come to its end: says so once everything is written, until all have heard it. */
static int end(struct tnd_bridge *bridge)
{
	struct tnd__listening *listening = &bridge->listening;
	int64_t now = tnd__bridge_now_ns();

	if (listening->window.base != listening->top)
		return 1;
	if (all_ended(listening)) {
		if (listening->end == TND_E_CLOSED)
			return 0;
		bridge->why = listening->window.why;
		return listening->end;
	}
	for (uint32_t i = 0; i < listening->count; i++) {
		struct tnd__receiver *receiver = &listening->receivers[i];

		if (receiver->ended || now - receiver->end_said_ns < bridge->tick_ns)
			continue;
		receiver->end_said_ns = now;
		tnd__receiver_say(bridge, receiver, BRIDGE_END, listening->top,
				  listening->end == TND_E_CLOSED ? 0 : listening->end);
	}
	return 1;
}

int tnd__listen_round(struct tnd_bridge *bridge)
{
	struct tnd__listening *listening = &bridge->listening;
	int rc = read_all(bridge);

	if (rc == 0)
		rc = begin(bridge);
	take_news(listening);
	if (rc == 0)
		rc = tnd__receivers_feed(bridge);
	if (rc == 0)
		rc = release(bridge);
	if (rc == 0)
		rc = tnd__receivers_tick(bridge);
	if (rc < 0)
		return rc;
	bridge->now.receivers = listening->count;
	bridge->now.held_objects = listening->top - listening->window.base;
	bridge->now.held_bytes = listening->borrowed_bytes - bridge->now.bytes;
	return listening->end < 0 ? end(bridge) : 1;
}

void tnd__listen_end(struct tnd_bridge *bridge, int code)
{
	struct tnd__listening *listening = &bridge->listening;
	int64_t until = tnd__bridge_now_ns() + BRIDGE_FAREWELL_NS;
	struct tnd_error why = bridge->why;

	listening->end = code;
	for (uint32_t i = 0; i < listening->count; i++)
		if (!listening->receivers[i].ended)
			tnd__receiver_say(bridge, &listening->receivers[i], BRIDGE_END,
					  listening->receivers[i].sent, code);
	while (!all_ended(listening) && tnd__bridge_now_ns() < until) {
		tnd__bridge_await(bridge->socket);
		if (read_all(bridge) < 0)
			break;
	}
	bridge->why = why;
}
