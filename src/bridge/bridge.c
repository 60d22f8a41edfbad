/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bridge.c - options, sockets, run, cancel, stats, close: what both sides have in common
 *
 *   listen:   attach to the channel --> window --> ROUTER, bound
 *   connect:  make the channel --> inbox --> DEALER, connecting
 *   run:      round, poll (socket, eventfd, tick, deadline), round ...
 *
 * ZeroMQ never limits what is under way: its queues have no mark towards receivers, since what they
 * were granted bounds them, and never hold more for a receiver that has no connection.
 *
 * Close goes in an order: the socket and its thread first, which may still read objects in place,
 * then the window, then the channel.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include "bridge_internal.h"

#define DEFAULT_GRACE_NS INT64_C(10000000000)
#define GRACE_MIN_NS INT64_C(100000000)
#define GRACE_MAX_NS INT64_C(86400000000000)
#define TICK_MIN_NS INT64_C(20000000)
#define TICK_MAX_NS INT64_C(1000000000)
#define LINGER_MS 1000
#define OBJECTS_MAX 4096 /* under way to a receiver: each costs a message */
#define DEFAULT_OBJECT_BYTES (UINT64_C(1) << 30)

static int say_zmq(struct tnd_error *reterr, const char *endpoint, const char *what)
{
	return tnd__bridge_fail(reterr, tnd__bridge_errno(), "%s: cannot %s: %s", endpoint, what,
				zmq_strerror(zmq_errno()));
}

static int check_endpoint(const char *endpoint, struct tnd_error *reterr)
{
	const char *port = endpoint ? strrchr(endpoint, ':') : NULL;

	if (!port || strncmp(endpoint, "tcp://", 6) != 0 || port < endpoint + 7 || !port[1] ||
	    strlen(endpoint) >= sizeof(((struct tnd_bridge *)0)->endpoint))
		return tnd__bridge_fail(reterr, TND_E_ADDRESS,
					"'%.200s' is no endpoint: expected tcp://HOST:PORT",
					endpoint ? endpoint : "");
	return 0;
}

static int check_common(uint32_t flags, int64_t grace_ns, const char *endpoint,
			struct tnd_error *reterr)
{
	if (flags)
		return tnd__bridge_fail(reterr, TND_E_INVALID, "flags is %" PRIu32 ", expected 0",
					flags);
	if (grace_ns && (grace_ns < GRACE_MIN_NS || grace_ns > GRACE_MAX_NS))
		return tnd__bridge_fail(reterr, TND_E_INVALID,
					"grace_ns is %" PRId64 ", expected %" PRId64 " to %" PRId64,
					grace_ns, GRACE_MIN_NS, GRACE_MAX_NS);
	return check_endpoint(endpoint, reterr);
}

static int check_size(uint32_t given, size_t size, struct tnd_error *reterr)
{
	if (given == size)
		return 0;
	return tnd__bridge_fail(reterr, TND_E_INVALID, "struct_bytes is %" PRIu32 ", expected %zu",
				given, size);
}

/* -- making -- */

static int make(bool listens, int64_t grace_ns, const char *endpoint,
		struct tnd_bridge **ret_bridge, struct tnd_error *reterr)
{
	struct tnd_bridge *bridge = calloc(1, sizeof(*bridge));
	uint64_t id = 0;

	if (!bridge)
		return tnd__bridge_fail(reterr, -ENOMEM, "no memory for a bridge");
	bridge->listens = listens;
	bridge->grace_ns = grace_ns ? grace_ns : DEFAULT_GRACE_NS;
	bridge->tick_ns = bridge->grace_ns / 10;
	if (bridge->tick_ns < TICK_MIN_NS)
		bridge->tick_ns = TICK_MIN_NS;
	if (bridge->tick_ns > TICK_MAX_NS)
		bridge->tick_ns = TICK_MAX_NS;
	snprintf(bridge->endpoint, sizeof(bridge->endpoint), "%s", endpoint);
	pthread_mutex_init(&bridge->lock, NULL);
	bridge->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (bridge->event_fd < 0 || getrandom(&id, sizeof(id), 0) != sizeof(id)) {
		int rc = tnd__bridge_fail(reterr, -errno, "no event descriptor: %s",
					  strerror(errno));

		bridge->over = true;
		tnd_bridge_close(bridge);
		return rc;
	}
	/* 0 is "none yet". */
	if (listens)
		bridge->session = id | 1;
	else
		bridge->receiving.id = id | 1;
	*ret_bridge = bridge;
	return 0;
}

static int set_int(void *socket, int option, int value)
{
	return zmq_setsockopt(socket, option, &value, sizeof(value));
}

static int set_secret(struct tnd_bridge *bridge, const unsigned char *secret)
{
	char secret_text[41], public_text[41];
	int rc;

	if (!secret)
		return 0;
	if (!zmq_z85_encode(secret_text, secret, TND_BRIDGE_SECRET_BYTES) ||
	    zmq_curve_public(public_text, secret_text) < 0)
		return -1;
	/*
	 * Both sides have one key pair. A connection needs the public key, which is never sent and
	 * follows from the secret only.
	 */
	rc = zmq_setsockopt(bridge->socket, ZMQ_CURVE_SECRETKEY, secret_text, 41);
	if (rc == 0 && bridge->listens)
		rc = set_int(bridge->socket, ZMQ_CURVE_SERVER, 1);
	if (rc == 0 && !bridge->listens)
		rc = zmq_setsockopt(bridge->socket, ZMQ_CURVE_PUBLICKEY, public_text, 41);
	if (rc == 0 && !bridge->listens)
		rc = zmq_setsockopt(bridge->socket, ZMQ_CURVE_SERVERKEY, public_text, 41);
	explicit_bzero(secret_text, sizeof(secret_text));
	explicit_bzero(public_text, sizeof(public_text));
	return rc;
}

/* `longest`: of a message that comes in; `queue`: of messages that come in, per connection. */
static int set_options(struct tnd_bridge *bridge, int64_t longest, int queue)
{
	void *socket = bridge->socket;
	int tick_ms = (int)(bridge->tick_ns / 1000000);
	int dead_ms = (int)(bridge->grace_ns / 2000000);
	int rc = set_int(socket, ZMQ_LINGER, LINGER_MS);

	rc |= set_int(socket, ZMQ_SNDHWM, 0);
	rc |= set_int(socket, ZMQ_RCVHWM, queue);
	rc |= set_int(socket, ZMQ_HEARTBEAT_IVL, tick_ms);
	rc |= set_int(socket, ZMQ_HEARTBEAT_TIMEOUT, dead_ms);
	rc |= set_int(socket, ZMQ_HANDSHAKE_IVL, 10000);
	rc |= set_int(socket, ZMQ_IPV6, strchr(bridge->endpoint, '[') != NULL);
	rc |= zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &longest, sizeof(longest));
	if (bridge->listens)
		return rc | set_int(socket, ZMQ_ROUTER_MANDATORY, 1);
	rc |= set_int(socket, ZMQ_IMMEDIATE, 1);
	rc |= set_int(socket, ZMQ_RECONNECT_IVL, 50);
	rc |= set_int(socket, ZMQ_RECONNECT_IVL_MAX, 500);
	rc |= set_int(socket, ZMQ_CONNECT_TIMEOUT, dead_ms);
	return rc;
}

static int open_monitor(struct tnd_bridge *bridge)
{
	static const char name[] = "inproc://connections";

	if (zmq_socket_monitor(bridge->socket, name, ZMQ_EVENT_HANDSHAKE_SUCCEEDED) < 0)
		return -1;
	bridge->monitor = zmq_socket(bridge->context, ZMQ_PAIR);
	return bridge->monitor ? zmq_connect(bridge->monitor, name) : -1;
}

static int open_socket(struct tnd_bridge *bridge, const unsigned char *secret, int64_t longest,
		       struct tnd_error *reterr)
{
	int queue = bridge->listens ? 1000 : OBJECTS_MAX * 2;
	size_t bytes = sizeof(bridge->endpoint);

	bridge->context = zmq_ctx_new();
	if (bridge->context)
		bridge->socket =
			zmq_socket(bridge->context, bridge->listens ? ZMQ_ROUTER : ZMQ_DEALER);
	if (!bridge->socket)
		return say_zmq(reterr, bridge->endpoint, "open a socket");
	if (set_options(bridge, longest, queue) != 0)
		return say_zmq(reterr, bridge->endpoint, "set up the socket");
	if (set_secret(bridge, secret) < 0)
		return say_zmq(reterr, bridge->endpoint,
			       "use the secret (this ZeroMQ may be built without CURVE)");
	if (!bridge->listens)
		return open_monitor(bridge) == 0 &&
				       zmq_connect(bridge->socket, bridge->endpoint) == 0
			       ? 0
			       : say_zmq(reterr, bridge->endpoint, "connect");
	if (zmq_bind(bridge->socket, bridge->endpoint) < 0)
		return say_zmq(reterr, bridge->endpoint, "listen");
	if (zmq_getsockopt(bridge->socket, ZMQ_LAST_ENDPOINT, bridge->endpoint, &bytes) < 0)
		return say_zmq(reterr, bridge->endpoint, "learn the port");
	return 0;
}

static int check_listen(const struct tnd_bridge_listen_opts *opts, struct tnd_error *reterr)
{
	int rc = check_size(opts->struct_bytes, sizeof(*opts), reterr);

	if (rc == 0)
		rc = check_common(opts->flags, opts->grace_ns, opts->endpoint, reterr);
	if (rc < 0)
		return rc;
	if (opts->receiver_count > TND_BRIDGE_RECEIVERS_MAX)
		return tnd__bridge_fail(reterr, TND_E_INVALID,
					"receiver_count is %" PRIu32 ", expected 1 to %d",
					opts->receiver_count, TND_BRIDGE_RECEIVERS_MAX);
	if (opts->on_lost > TND_BRIDGE_LOST_CONTINUE)
		return tnd__bridge_fail(reterr, TND_E_INVALID,
					"on_lost is %" PRIu32 ", expected 0 or 1", opts->on_lost);
	return 0;
}

int tnd_bridge_listen(const struct tnd_bridge_listen_opts *opts, struct tnd_bridge **ret_bridge,
		      struct tnd_error *reterr)
{
	struct tnd_channel_attach_opts attach = {.struct_bytes = sizeof(attach)};
	struct tnd_bridge *bridge;
	int rc = check_listen(opts, reterr);

	if (rc == 0)
		rc = make(true, opts->grace_ns, opts->endpoint, &bridge, reterr);
	if (rc < 0)
		return rc;
	bridge->listening.wanted = opts->receiver_count ? opts->receiver_count : 1;
	bridge->listening.on_lost = opts->on_lost;
	attach.deadline_ns = opts->attach_deadline_ns;
	rc = tnd_channel_attach(opts->from, opts->rank_given ? opts->rank : TND_BRIDGE_RANK,
				&attach, &bridge->channel, reterr);
	if (rc == 0) {
		rc = tnd__window_init(&bridge->listening.window, bridge->channel, bridge->event_fd);
		if (rc < 0)
			tnd__bridge_fail(reterr, rc, "no memory for a bridge");
	}
	/* A receiver sends heads only. */
	if (rc == 0)
		rc = open_socket(bridge, opts->secret, 1024, reterr);
	if (rc < 0) {
		bridge->over = true;
		tnd_bridge_close(bridge);
		return rc;
	}
	*ret_bridge = bridge;
	return 0;
}

static int make_channel(struct tnd_bridge *bridge, const struct tnd_bridge_connect_opts *opts,
			struct tnd_error *reterr)
{
	struct tnd_slab_pool_opts pool = {.struct_bytes = sizeof(pool),
					  .flags = TND_SLAB_POOL_F_SHARED};
	struct tnd_channel_opts channel = {
		.struct_bytes = sizeof(channel),
		.max_bytes = opts->max_bytes,
		.max_objects = opts->max_objects,
		.reserved_readers = opts->reserved_readers,
		.open_readers = opts->open_readers,
		.on_dead = opts->on_dead,
		.name = opts->name ? opts->name : "bridge",
		.address = opts->to,
		.max_object_bytes =
			opts->max_object_bytes ? opts->max_object_bytes : DEFAULT_OBJECT_BYTES,
	};
	int rc = tnd_slab_pool_create(&pool, &bridge->receiving.pool);

	if (rc < 0)
		return tnd__bridge_fail(reterr, rc, "no memory for a bridge");
	channel.pool = bridge->receiving.pool;
	return tnd_channel_create(&channel, &bridge->channel, reterr);
}

/* What is under way is bounded by what the channel takes: twice that is in this process at most. */
static int make_inbox(struct tnd_bridge *bridge, struct tnd_error *reterr)
{
	struct tnd_channel_info info = {.struct_bytes = sizeof(info)};
	struct tnd__receiving *receiving = &bridge->receiving;
	int rc = tnd_channel_info(bridge->channel, &info);

	receiving->objects = info.max_objects < OBJECTS_MAX ? info.max_objects : OBJECTS_MAX;
	receiving->bytes = info.max_bytes;
	receiving->longest =
		info.max_object_bytes > info.max_bytes ? info.max_object_bytes : info.max_bytes;
	if (rc == 0)
		rc = tnd__inbox_init(&receiving->inbox, bridge->channel, bridge->event_fd,
				     receiving->objects);
	return rc == 0 ? 0 : tnd__bridge_fail(reterr, rc, "no memory for a bridge");
}

int tnd_bridge_connect(const struct tnd_bridge_connect_opts *opts, struct tnd_bridge **ret_bridge,
		       struct tnd_error *reterr)
{
	struct tnd_bridge *bridge;
	int rc = check_size(opts->struct_bytes, sizeof(*opts), reterr);

	if (rc == 0)
		rc = check_common(opts->flags, opts->grace_ns, opts->endpoint, reterr);
	if (rc == 0)
		rc = make(false, opts->grace_ns, opts->endpoint, &bridge, reterr);
	if (rc < 0)
		return rc;
	rc = make_channel(bridge, opts, reterr);
	if (rc == 0)
		rc = make_inbox(bridge, reterr);
	if (rc == 0)
		rc = open_socket(bridge, opts->secret,
				 (int64_t)bridge->receiving.longest + BRIDGE_HEAD_BYTES, reterr);
	if (rc < 0) {
		bridge->over = true;
		tnd_bridge_close(bridge);
		return rc;
	}
	*ret_bridge = bridge;
	return 0;
}

/* -- running -- */

static void publish(struct tnd_bridge *bridge)
{
	pthread_mutex_lock(&bridge->lock);
	bridge->stats = bridge->now;
	pthread_mutex_unlock(&bridge->lock);
}

/* Until something came, the tick, or the deadline. */
static int sleep_until_news(struct tnd_bridge *bridge, int64_t deadline_ns)
{
	zmq_pollitem_t items[3] = {{.socket = bridge->socket, .events = ZMQ_POLLIN},
				   {.fd = bridge->event_fd, .events = ZMQ_POLLIN},
				   {.socket = bridge->monitor, .events = ZMQ_POLLIN}};
	int64_t wait_ns = bridge->tick_ns, left_ns;
	eventfd_t count;

	if (!bridge->listens && !bridge->receiving.admitted)
		wait_ns = TICK_MIN_NS;
	left_ns = deadline_ns == TND_NO_DEADLINE ? wait_ns : deadline_ns - tnd__bridge_now_ns();
	if (left_ns < wait_ns)
		wait_ns = left_ns < 0 ? 0 : left_ns;
	if (zmq_poll(items, bridge->monitor ? 3 : 2, (long)((wait_ns + 999999) / 1000000)) < 0 &&
	    zmq_errno() != EINTR)
		return tnd__bridge_fail(&bridge->why, tnd__bridge_errno(), "cannot poll: %s",
					zmq_strerror(zmq_errno()));
	/* Before the next look, so that what is told after it wakes the next sleep. */
	(void)eventfd_read(bridge->event_fd, &count);
	return 0;
}

static int finish(struct tnd_bridge *bridge, int code)
{
	bridge->over = true;
	bridge->result = code;
	if (!bridge->listens)
		tnd__receive_end(bridge, code);
	else if (code < 0)
		tnd__listen_end(bridge, code);
	return code;
}

static int carry(struct tnd_bridge *bridge, int64_t deadline_ns, struct tnd_error *reterr)
{
	for (;;) {
		int rc;

		if (atomic_load_explicit(&bridge->cancelled, memory_order_acquire))
			return finish(bridge, tnd__bridge_fail(&bridge->why, -ECANCELED,
							       "the bridge was cancelled"));
		rc = bridge->listens ? tnd__listen_round(bridge) : tnd__receive_round(bridge);
		publish(bridge);
		if (rc <= 0)
			return finish(bridge, rc);
		if (deadline_ns != TND_NO_DEADLINE && tnd__bridge_now_ns() >= deadline_ns)
			return tnd__bridge_fail(reterr, -ETIMEDOUT,
						"the deadline passed with %" PRIu64
						" objects carried",
						bridge->now.objects);
		rc = sleep_until_news(bridge, deadline_ns);
		if (rc < 0)
			return finish(bridge, rc);
	}
}

int tnd_bridge_run(struct tnd_bridge *bridge, int64_t deadline_ns, struct tnd_error *reterr)
{
	int rc;

	if (atomic_exchange_explicit(&bridge->busy, 1, memory_order_acquire))
		return tnd__bridge_fail(reterr, -EBUSY, "another thread runs this bridge");
	rc = bridge->over ? bridge->result : carry(bridge, deadline_ns, reterr);
	if (bridge->over && rc < 0 && reterr)
		*reterr = bridge->why;
	atomic_store_explicit(&bridge->busy, 0, memory_order_release);
	return rc;
}

void tnd_bridge_cancel(struct tnd_bridge *bridge)
{
	int before = errno;

	atomic_store_explicit(&bridge->cancelled, 1, memory_order_release);
	(void)eventfd_write(bridge->event_fd, 1);
	errno = before;
}

/* -- the end -- */

static void close_parts(struct tnd_bridge *bridge)
{
	if (!bridge->listens)
		tnd__inbox_fini(&bridge->receiving.inbox);
	if (bridge->monitor)
		zmq_close(bridge->monitor);
	if (bridge->socket)
		zmq_close(bridge->socket);
	while (bridge->context && zmq_ctx_term(bridge->context) < 0 && zmq_errno() == EINTR)
		;
	if (bridge->listens)
		tnd__window_fini(&bridge->listening.window);
}

void tnd_bridge_close(struct tnd_bridge *bridge)
{
	if (!bridge)
		return;
	if (!bridge->over)
		finish(bridge, -ECANCELED);
	close_parts(bridge);
	if (!bridge->listens && bridge->result < 0)
		tnd_channel_abandon(bridge->channel);
	else
		tnd_channel_close(bridge->channel);
	if (!bridge->listens)
		tnd_slab_pool_close(bridge->receiving.pool);
	if (bridge->event_fd >= 0)
		close(bridge->event_fd);
	pthread_mutex_destroy(&bridge->lock);
	free(bridge);
}

const char *tnd_bridge_endpoint(const struct tnd_bridge *bridge)
{
	return bridge->endpoint;
}

const char *tnd_bridge_address(const struct tnd_bridge *bridge)
{
	return tnd_channel_address(bridge->channel);
}

int tnd_bridge_stats(struct tnd_bridge *bridge, struct tnd_bridge_stats *ret_stats)
{
	uint32_t given = ret_stats->struct_bytes;

	if (given != sizeof(*ret_stats))
		return TND_E_INVALID;
	pthread_mutex_lock(&bridge->lock);
	*ret_stats = bridge->stats;
	pthread_mutex_unlock(&bridge->lock);
	ret_stats->struct_bytes = given;
	return 0;
}
