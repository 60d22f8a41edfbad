/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bridge_internal.h - between the files of bridge/
 *
 *   bridge.c            options, sockets, run, cancel, stats, close: both sides
 *   bridge_wire.c       the messages: packed, checked, sent
 *   bridge_window.c     listening side: objects borrowed from the channel, by a thread that waits
 *                       in it
 *   bridge_receivers.c  listening side: who receives, up to where, how much more they take
 *   bridge_listen.c     listening side: the loop
 *   bridge_inbox.c      connecting side: objects on their way into the channel, by a thread that
 *                       waits in it
 *   bridge_receive.c    connecting side: the loop
 *
 * The loop owns the socket and never waits in a channel; the thread never touches the socket. Each
 * wakes the other: eventfd for the loop, a condition for the thread.
 *
 * Only public headers of the library are used.
 */
#ifndef TND_BRIDGE_INTERNAL_H
#define TND_BRIDGE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <zmq.h>

#include <tundish/bridge.h>

/* -- messages (bridge_wire.c) -- */

#define BRIDGE_VERSION 1
#define BRIDGE_HEAD_BYTES 64
#define BRIDGE_FAREWELL_NS INT64_C(1000000000) /* to hear that the other side has heard */
#define BRIDGE_TEXT_MAX 900                    /* of a refusal's sentence */

enum {
	/* receiver to listener */
	BRIDGE_STATE = 1, /* where I am, what I take; first of all a hello */
	BRIDGE_LEAVE = 2, /* answered with END */
	BRIDGE_ENDED = 3, /* END seen and everything written, or an error; answered too */
	/* listener to receiver */
	BRIDGE_WELCOME = 16,
	BRIDGE_OBJECT = 17, /* a second frame has its bytes */
	BRIDGE_PING = 18,
	BRIDGE_END = 19,
	BRIDGE_REFUSE = 20, /* a second frame has a sentence */
};

/* docs/format/bridge.md has the bytes. */
struct tnd__bridge_head {
	uint32_t version, kind;
	uint64_t session;  /* the listener's; 0: the receiver has none yet */
	uint64_t receiver; /* chosen by the receiver */
	uint64_t number;   /* STATE: next object expected; OBJECT: its number; WELCOME: the first;
			      PING: the next; END: one after the last */
	uint64_t written;  /* STATE: objects below are written */
	uint64_t objects;  /* STATE: most objects under way */
	uint64_t bytes;    /* STATE: most bytes under way; OBJECT: its length */
	int64_t value;     /* STATE: longest object; LEAVE, END, REFUSE: code */
};

/* Return: 0; TND_E_CORRUPT (no message of a bridge); TND_E_VERSION (head->version is set). */
int tnd__bridge_unpack(zmq_msg_t *message, struct tnd__bridge_head *ret_head);
/*
 * The route of the message that comes next, listening side. Never blocks. Return: 0; -EAGAIN,
 * -EHOSTUNREACH (nobody there); -errno.
 */
int tnd__bridge_send_route(void *socket, const void *route, size_t bytes);
/*
 * A message: head and a copy of `bytes` bytes of body, in one frame. ZeroMQ aborts a program that
 * has read one of several frames when their connection ends. Return: as above.
 */
int tnd__bridge_send(void *socket, const struct tnd__bridge_head *head, const void *body,
		     size_t bytes);
/* What is behind the head of a message that was unpacked. */
const unsigned char *tnd__bridge_body(zmq_msg_t *message, size_t *ret_bytes);
/* The sentence of a refusal, made printable. */
void tnd__bridge_text(zmq_msg_t *message, char out[BRIDGE_TEXT_MAX + 1]);
/* Fills `error` (nullable). Return: `code`. */
int tnd__bridge_fail(struct tnd_error *error, int code, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
/* -errno of a failed zmq_ call; ZeroMQ's own numbers become -EIO. */
int tnd__bridge_errno(void);
int64_t tnd__bridge_now_ns(void);
/* Until the socket has a message, at most a moment. */
void tnd__bridge_await(void *socket);
/* With all signals blocked. Return: 0, -errno. */
int tnd__bridge_thread(void *(*run)(void *), void *arg, pthread_t *ret_thread);

/* -- objects borrowed (bridge_window.c) -- */

/* Numbers are the bridge's own: from 0. */
struct tnd__window {
	struct tnd_channel *channel;
	int event_fd;
	pthread_t thread;
	bool started;
	struct tnd_object *held; /* number & (capacity - 1) */
	uint64_t capacity;
	pthread_mutex_t lock;
	pthread_cond_t space;
	/* lock */
	uint64_t base; /* below: released; the loop writes */
	uint64_t top;  /* below: borrowed; the thread writes */
	bool stop, told;
	int end; /* what borrow ended with, or 0 */
	struct tnd_error why;
};

int tnd__window_init(struct tnd__window *window, struct tnd_channel *channel, int event_fd);
int tnd__window_start(struct tnd__window *window);
/* After the socket's end, before the channel's: ends the thread. */
void tnd__window_fini(struct tnd__window *window);
/* *ret_top: objects below can be looked at. Return: 0; what borrow ended with. */
int tnd__window_news(struct tnd__window *window, uint64_t *ret_top);
const struct tnd_object *tnd__window_at(struct tnd__window *window, uint64_t number);
/* Releases objects below `number`. Return: 0; TND_E_EVICTED. */
int tnd__window_release(struct tnd__window *window, uint64_t number);

/* -- receivers (bridge_receivers.c) -- */

#define BRIDGE_ROUTE_MAX 255

struct tnd__receiver {
	uint64_t id;
	unsigned char route[BRIDGE_ROUTE_MAX]; /* of its connection */
	size_t route_bytes;
	bool connected, ended;
	uint64_t sent;    /* next to send */
	uint64_t written; /* acknowledged below */
	uint64_t under_way_bytes;
	uint64_t objects, bytes, longest; /* what it takes */
	uint64_t first;
	int64_t heard_ns, said_ns, end_said_ns;
};

/* -- objects received (bridge_inbox.c) -- */

struct tnd__inbox {
	struct tnd_channel *channel;
	int event_fd;
	pthread_t thread;
	bool started;
	zmq_msg_t *messages; /* number & (capacity - 1) */
	uint64_t capacity;
	pthread_mutex_t lock;
	pthread_cond_t news;
	/* lock */
	uint64_t first, top; /* received, not yet written: [written, top) */
	uint64_t written, written_bytes, top_bytes;
	bool ending, drained, stop, told;
	int failed;
	struct tnd_error why;
};

/* `objects`: most at a time. */
int tnd__inbox_init(struct tnd__inbox *inbox, struct tnd_channel *channel, int event_fd,
		    uint64_t objects);
int tnd__inbox_start(struct tnd__inbox *inbox, uint64_t first);
void tnd__inbox_fini(struct tnd__inbox *inbox);
/* Takes `message` over. */
void tnd__inbox_put(struct tnd__inbox *inbox, zmq_msg_t *message);
/* Nothing more comes: the readers are waited for. */
void tnd__inbox_end(struct tnd__inbox *inbox);
struct tnd__inbox_state {
	uint64_t written, written_bytes;
	uint64_t waiting_bytes;
	bool drained;
	int failed;
};
void tnd__inbox_state(struct tnd__inbox *inbox, struct tnd__inbox_state *ret_state);

/* -- the bridge -- */

struct tnd__listening {
	struct tnd__window window;
	struct tnd__receiver receivers[TND_BRIDGE_RECEIVERS_MAX];
	uint32_t count;
	uint32_t wanted; /* the first object waits for so many */
	uint32_t on_lost;
	bool begun;
	uint64_t top;            /* as the window last said */
	uint64_t borrowed_bytes; /* of objects below top */
	int end;
};

struct tnd__receiving {
	struct tnd__inbox inbox;
	struct tnd_slab_pool *pool;
	uint64_t id;
	uint64_t expected; /* number of the next object */
	uint64_t told;     /* `written` of the last STATE */
	uint64_t objects, bytes, longest;
	bool admitted, end_known, end_told, leaving;
	int64_t end_code;
	uint64_t end_number;
	int64_t heard_ns, said_ns;
	int64_t leave_until_ns; /* an answer to LEAVE or ENDED is waited for */
};

struct tnd_bridge {
	bool listens;
	void *context, *socket;
	void *monitor; /* connecting side: hears of each new connection */
	int event_fd;
	struct tnd_channel *channel;
	uint64_t session;
	int64_t grace_ns, tick_ns;
	char endpoint[256];
	_Atomic uint32_t cancelled, busy;
	/* Once run has come to its end. */
	bool over;
	int result;
	struct tnd_error why;
	pthread_mutex_t lock;
	struct tnd_bridge_stats stats; /* lock */
	struct tnd_bridge_stats now;   /* the loop's own */
	union {
		struct tnd__listening listening;
		struct tnd__receiving receiving;
	};
};

/*
 * One round of a loop: what came in, what can go out. Return: > 0: go on; 0: done; < 0: the error,
 * said in bridge->why.
 */
int tnd__listen_round(struct tnd_bridge *bridge);
int tnd__receive_round(struct tnd_bridge *bridge);
/*
 * The other side hears that this one ends with `code`, and says so, or a second has passed: a
 * connection that is closed with something unread takes what was sent last with it.
 */
void tnd__listen_end(struct tnd_bridge *bridge, int code);
void tnd__receive_end(struct tnd_bridge *bridge, int code);

/* A STATE, LEAVE or ENDED that came on `route`. Return: 0; the error, said in bridge->why. */
int tnd__receivers_heard(struct tnd_bridge *bridge, const struct tnd__bridge_head *head,
			 const void *route, size_t route_bytes);
/* Sends what each takes. Return: 0; the error, said in bridge->why. */
int tnd__receivers_feed(struct tnd_bridge *bridge);
/* Gives up those that were silent too long; speaks to the others. Return: as above. */
int tnd__receivers_tick(struct tnd_bridge *bridge);
/* Objects below are written by every receiver. */
uint64_t tnd__receivers_written(const struct tnd__listening *listening);
/* To one receiver; what it does not hear now it hears on its next STATE. */
void tnd__receiver_say(struct tnd_bridge *bridge, struct tnd__receiver *receiver, uint32_t kind,
		       uint64_t number, int64_t value);
/* A refusal, to whoever is at `route`. */
void tnd__bridge_refuse(struct tnd_bridge *bridge, const void *route, size_t route_bytes, int code,
			const char *text);

#endif
