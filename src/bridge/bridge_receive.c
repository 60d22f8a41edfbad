/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bridge_receive.c - connecting side: the loop
 *
 *   --STATE--> ... <--WELCOME-- <--OBJECT-- ... --STATE--> ... <--END-- --ENDED-->
 *
 * A STATE goes out when a quarter of what this side takes has been written, when everything has,
 * and each tick: it is acknowledgement, grant, heartbeat and hello at once, so that a lost one
 * costs a tick and a broken connection needs nothing else.
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "bridge_internal.h"

#define MESSAGES_A_ROUND 256
#define RETRY_NS INT64_C(20000000) /* the shortest tick */

/* Return: whether there is somebody who may hear it. */
static bool say(struct tnd_bridge *bridge, uint32_t kind, uint64_t written, int64_t value)
{
	struct tnd__receiving *receiving = &bridge->receiving;
	struct tnd__bridge_head head = {.kind = kind,
					.session = bridge->session,
					.receiver = receiving->id,
					.number = receiving->expected,
					.written = written,
					.objects = receiving->objects,
					.bytes = receiving->bytes,
					.value = value};

	receiving->said_ns = tnd__bridge_now_ns();
	if (tnd__bridge_send(bridge->socket, &head, NULL, 0) == 0) {
		receiving->told = written;
		return true;
	}
	/* Nobody there yet, or no longer: soon again. */
	receiving->said_ns -= bridge->tick_ns - RETRY_NS;
	return false;
}

/* The last word; whether it was heard is looked for from here on. */
static bool leave(struct tnd_bridge *bridge, uint32_t kind, uint64_t written, int64_t value)
{
	struct tnd__receiving *receiving = &bridge->receiving;

	receiving->leave_until_ns = tnd__bridge_now_ns() + BRIDGE_FAREWELL_NS;
	receiving->leaving = say(bridge, kind, written, value);
	return receiving->leaving;
}

static int welcome(struct tnd_bridge *bridge, const struct tnd__bridge_head *head)
{
	struct tnd__receiving *receiving = &bridge->receiving;
	int rc;

	if (receiving->admitted) {
		bridge->now.reconnects++;
		return 0;
	}
	bridge->session = head->session;
	receiving->expected = receiving->told = head->number;
	rc = tnd__inbox_start(&receiving->inbox, head->number);
	if (rc < 0)
		return tnd__bridge_fail(&bridge->why, rc, "no thread for the channel: %s",
					tnd_strerror(rc));
	receiving->admitted = true;
	bridge->now.receivers = 1;
	return 0;
}

static int object_wrong(struct tnd_bridge *bridge, const struct tnd__bridge_head *head,
			const char *what)
{
	return tnd__bridge_fail(&bridge->why, TND_E_CORRUPT,
				"%s: %s: object %" PRIu64 " of %" PRIu64
				" bytes came where %" PRIu64 " was expected",
				bridge->endpoint, what, head->number, head->bytes,
				bridge->receiving.expected);
}

static int take_object(struct tnd_bridge *bridge, const struct tnd__bridge_head *head,
		       zmq_msg_t *message)
{
	struct tnd__receiving *receiving = &bridge->receiving;
	struct tnd__inbox_state state;
	size_t bytes;

	if (!receiving->admitted)
		return object_wrong(bridge, head, "an object before the welcome");
	if (head->number < receiving->expected) {
		bridge->now.repeated++;
		return 0;
	}
	if (head->number > receiving->expected)
		return object_wrong(bridge, head, "objects are missing");
	(void)tnd__bridge_body(message, &bytes);
	if (head->bytes != bytes || head->bytes > receiving->longest)
		return object_wrong(bridge, head, "an object's length is wrong");
	tnd__inbox_state(&receiving->inbox, &state);
	if (receiving->expected - state.written >= receiving->objects ||
	    (state.waiting_bytes && state.waiting_bytes + head->bytes > receiving->bytes))
		return object_wrong(bridge, head, "more than this side takes");
	tnd__inbox_put(&receiving->inbox, message);
	receiving->expected++;
	return 0;
}

static int take_end(struct tnd_bridge *bridge, const struct tnd__bridge_head *head)
{
	struct tnd__receiving *receiving = &bridge->receiving;

	if (!receiving->admitted)
		return object_wrong(bridge, head, "an end before the welcome");
	if (head->value == 0 && head->number != receiving->expected)
		return object_wrong(bridge, head, "an end before the last object");
	if (!receiving->end_known)
		tnd__inbox_end(&receiving->inbox);
	receiving->end_known = true;
	receiving->end_code =
		head->value < INT32_MIN || head->value > 0 ? TND_E_CORRUPT : head->value;
	return 0;
}

static int refused(struct tnd_bridge *bridge, const struct tnd__bridge_head *head,
		   zmq_msg_t *message)
{
	char text[BRIDGE_TEXT_MAX + 1];
	int code = head->value < 0 && head->value >= INT32_MIN ? (int)head->value : TND_E_CORRUPT;

	tnd__bridge_text(message, text);
	return tnd__bridge_fail(&bridge->why, code, "%s refuses this side: %s", bridge->endpoint,
				text);
}

static int dispatch(struct tnd_bridge *bridge, const struct tnd__bridge_head *head,
		    zmq_msg_t *message)
{
	struct tnd__receiving *receiving = &bridge->receiving;

	if (head->kind != BRIDGE_REFUSE &&
	    (head->receiver != receiving->id || head->session == 0)) {
		bridge->now.refused++;
		return 0;
	}
	if (receiving->leaving) {
		receiving->leaving = head->kind != BRIDGE_END && head->kind != BRIDGE_REFUSE;
		return 0;
	}
	if (receiving->admitted && head->session != bridge->session)
		return tnd__bridge_fail(&bridge->why, TND_E_CORRUPT,
					"%s: the listening side was started anew: what came so far "
					"is of another session",
					bridge->endpoint);
	receiving->heard_ns = tnd__bridge_now_ns();
	switch (head->kind) {
	case BRIDGE_WELCOME:
		return welcome(bridge, head);
	case BRIDGE_OBJECT:
		return take_object(bridge, head, message);
	case BRIDGE_END:
		return take_end(bridge, head);
	case BRIDGE_REFUSE:
		return refused(bridge, head, message);
	case BRIDGE_PING:
		return 0;
	default:
		bridge->now.refused++;
		return 0;
	}
}

static int handle(struct tnd_bridge *bridge, zmq_msg_t *message, bool alone)
{
	struct tnd__bridge_head head = {0};
	int rc = tnd__bridge_unpack(message, &head);

	if (rc == TND_E_VERSION)
		return tnd__bridge_fail(&bridge->why, rc,
					"%s speaks version %" PRIu32
					" of the bridge, this side version %d: use the same "
					"release on both",
					bridge->endpoint, head.version, BRIDGE_VERSION);
	if (rc < 0 || !alone)
		return tnd__bridge_fail(&bridge->why, TND_E_CORRUPT,
					"%s sends what is no message of a bridge: check the "
					"address",
					bridge->endpoint);
	return dispatch(bridge, &head, message);
}

/* One message, one frame. Return: > 0: there was one; 0: none; < 0: the error. */
static int read_one(struct tnd_bridge *bridge)
{
	zmq_msg_t message;
	int rc;

	zmq_msg_init(&message);
	if (zmq_msg_recv(&message, bridge->socket, ZMQ_DONTWAIT) < 0) {
		rc = tnd__bridge_errno();
		rc = rc == -EAGAIN || rc == -EINTR ? 0 : rc;
	} else {
		rc = handle(bridge, &message, !zmq_msg_more(&message));
		rc = rc < 0 ? rc : 1;
	}
	zmq_msg_close(&message);
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

/* A connection that is new knows nothing of this side: it hears at once where this side is. */
static void look_for_connections(struct tnd_bridge *bridge)
{
	zmq_msg_t message;

	zmq_msg_init(&message);
	while (zmq_msg_recv(&message, bridge->monitor, ZMQ_DONTWAIT) >= 0)
		bridge->receiving.said_ns = 0;
	zmq_msg_close(&message);
}

static bool due(const struct tnd__receiving *receiving, uint64_t written, int64_t tick_ns)
{
	uint64_t news = written - receiving->told;

	if (tnd__bridge_now_ns() - receiving->said_ns >= tick_ns)
		return true;
	return news && (news >= receiving->objects / 4 || written == receiving->expected);
}

/* Everything is written: says so (of an error at once), waits for the readers. */
static int end(struct tnd_bridge *bridge, const struct tnd__inbox_state *state)
{
	struct tnd__receiving *receiving = &bridge->receiving;

	if (receiving->end_code == 0 && state->written != receiving->expected)
		return 1;
	if (!receiving->end_told)
		receiving->end_told =
			say(bridge, BRIDGE_ENDED, state->written, (int64_t)receiving->longest);
	if (!state->drained)
		return 1;
	if (receiving->end_code == 0)
		return 0;
	return tnd__bridge_fail(&bridge->why, TND_E_PEER_DEAD,
				"%s ended before its writer closed (%s): the readers here get "
				"what came, and no more",
				bridge->endpoint, tnd_strerror((int)receiving->end_code));
}

int tnd__receive_round(struct tnd_bridge *bridge)
{
	struct tnd__receiving *receiving = &bridge->receiving;
	struct tnd__inbox_state state = {0};
	int rc = receiving->end_known && !receiving->leaving ? 0 : read_all(bridge);

	if (rc < 0 && !receiving->leaving)
		return rc;
	look_for_connections(bridge);
	if (receiving->admitted)
		tnd__inbox_state(&receiving->inbox, &state);
	if (state.failed < 0) {
		bridge->why = receiving->inbox.why;
		return state.failed;
	}
	bridge->now.objects = state.written - receiving->inbox.first;
	bridge->now.bytes = state.written_bytes;
	bridge->now.held_objects = receiving->expected - state.written;
	bridge->now.held_bytes = state.waiting_bytes;
	if (due(receiving, state.written, bridge->tick_ns))
		(void)say(bridge, receiving->end_told ? BRIDGE_ENDED : BRIDGE_STATE, state.written,
			  (int64_t)receiving->longest);
	if (receiving->end_known)
		return end(bridge, &state);
	if (receiving->admitted && tnd__bridge_now_ns() - receiving->heard_ns > bridge->grace_ns)
		return tnd__bridge_fail(&bridge->why, TND_E_PEER_DEAD,
					"%s has been silent for %.1f s: the other side died, was "
					"stopped, or the network is down",
					bridge->endpoint, (double)bridge->grace_ns / 1e9);
	return 1;
}

void tnd__receive_end(struct tnd_bridge *bridge, int code)
{
	struct tnd__receiving *receiving = &bridge->receiving;
	struct tnd__inbox_state state = {0};
	struct tnd_error why = bridge->why;

	if (receiving->admitted)
		tnd__inbox_state(&receiving->inbox, &state);
	if (!receiving->end_told)
		leave(bridge, BRIDGE_LEAVE, state.written, code == -ECANCELED ? 0 : code);
	while (receiving->leaving && tnd__bridge_now_ns() < receiving->leave_until_ns) {
		tnd__bridge_await(bridge->socket);
		if (read_all(bridge) < 0)
			break;
	}
	bridge->why = why;
}
