/* SPDX-License-Identifier: Apache-2.0 */
/*
 * connect.c - the connecting side of the handshake, on the caller's thread
 *
 * It tries again while nobody listens: no such name or file yet, a backlog that is full, a process
 * that ended before it answered (its forked children may hold its socket open, so that connecting
 * alone proves nothing). Once connected, an answer has until the deadline, or ANSWER_NS where there
 * was none. Who gives up says goodbye, so that an answer under way admits nobody that seems to die.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <tundish/group.h>

#include "service_internal.h"

#define ANSWER_NS INT64_C(5000000000)
/* Between tries: from the first to the second, doubling. */
#define TRY_NS INT64_C(1000000)
#define TRY_MOST_NS INT64_C(16000000)

struct attempt {
	const struct tnd__connect *to;
	struct sockaddr_un name;
	socklen_t name_bytes;
	int64_t deadline_ns; /* never negative */
	struct tnd__packet *reply;
	struct tnd_error *error;
	int fd;
	struct tnd__who who;
};

/* Nobody listens, for now. */
static bool is_absent(int rc)
{
	return rc == -ECONNREFUSED || rc == -ENOENT || rc == -EAGAIN;
}

static int fail_errno(struct attempt *attempt, int rc)
{
	return tnd__fail_plain(attempt->error, rc, "cannot connect to the %s at %s: %s",
			       attempt->to->what, attempt->to->address, tnd_strerror(rc));
}

/* -- one try -- */

static int connect_socket(struct attempt *attempt)
{
	int rc = tnd__failpoint("group.socket");

	if (rc < 0)
		return fail_errno(attempt, rc);
	attempt->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (attempt->fd < 0)
		return fail_errno(attempt, -errno);
	if (connect(attempt->fd, (struct sockaddr *)&attempt->name, attempt->name_bytes) == 0)
		return 0;
	rc = errno == EINTR ? -EAGAIN : -errno;
	if (rc == -EPROTOTYPE)
		return tnd__fail_plain(
			attempt->error, TND_E_ADDRESS,
			"what listens at %s is not a %s of tundish; check the address",
			attempt->to->address, attempt->to->what);
	return is_absent(rc) ? rc : fail_errno(attempt, rc);
}

static int check_listener(struct attempt *attempt)
{
	int rc = tnd__who_is(attempt->fd, &attempt->who);

	if (rc == -ESRCH)
		return -ECONNREFUSED;
	if (rc < 0) {
		attempt->who.pid_fd = -1;
		return fail_errno(attempt, rc);
	}
	if (attempt->who.uid != geteuid())
		return tnd__fail_plain(
			attempt->error, TND_E_DENIED,
			"who listens at %s runs as user %ld, this process as user %ld; "
			"run both as one",
			attempt->to->address, (long)attempt->who.uid, (long)geteuid());
	return 0;
}

/* Until the socket has something, or the process at its other end has ended. */
static int wait_answer(struct attempt *attempt, int64_t until_ns)
{
	struct pollfd fds[2] = {{.fd = attempt->fd, .events = POLLIN},
				{.fd = attempt->who.pid_fd, .events = POLLIN}};

	for (;;) {
		int64_t left_ns = until_ns - tnd__now_ns();
		struct timespec left;
		int count;

		if (left_ns <= 0)
			return -ETIMEDOUT;
		tnd__ns_to_timespec(left_ns, &left);
		count = ppoll(fds, 2, until_ns == TND_NO_DEADLINE ? NULL : &left, NULL);
		if (count < 0 && errno != EINTR)
			return -errno;
		if (count > 0)
			return fds[0].revents ? 0 : -ECONNREFUSED;
	}
}

static int refused(struct attempt *attempt)
{
	struct tnd__refusal refusal;
	struct tnd__packet *reply = attempt->reply;
	int rc;

	if (reply->bytes != sizeof(refusal))
		return fail_errno(attempt, -EPROTO);
	memcpy(&refusal, reply->data, sizeof(refusal));
	refusal.message[sizeof(refusal.message) - 1] = '\0';
	rc = refusal.code < 0 ? refusal.code : -EPROTO;
	return tnd__fail_rank(attempt->error, rc, refusal.rank, "%s", refusal.message);
}

static int read_answer(struct attempt *attempt)
{
	struct tnd__wire wire;
	int rc = tnd__wire_receive(attempt->fd, &wire, attempt->reply);

	/* It closed, with the listener or for lack of something. */
	if (rc == 0 || rc == -ECONNRESET)
		return -ECONNREFUSED;
	if (rc < 0) {
		tnd__packet_close_fds(attempt->reply);
		return fail_errno(attempt, rc);
	}
	if (wire.version != TND__WIRE_VERSION)
		return tnd__fail_plain(
			attempt->error, TND_E_VERSION,
			"the %s at %s speaks version %u of the service protocol, this process "
			"version %u; use the same release of tundish on both sides",
			attempt->to->what, attempt->to->address, wire.version, TND__WIRE_VERSION);
	if (wire.step == TND__STEP_REPLY)
		return 0;
	rc = wire.step == TND__STEP_REFUSED ? refused(attempt) : fail_errno(attempt, -EPROTO);
	tnd__packet_close_fds(attempt->reply);
	return rc;
}

static int handshake(struct attempt *attempt)
{
	int64_t now_ns = tnd__now_ns(), until_ns = attempt->deadline_ns;
	int rc = tnd__wire_send(attempt->fd, TND__STEP_HELLO, attempt->to->hello);

	if (rc == -EPIPE)
		return -ECONNREFUSED;
	if (rc < 0)
		return fail_errno(attempt, rc);
	if (until_ns <= now_ns)
		until_ns = now_ns + ANSWER_NS;
	rc = wait_answer(attempt, until_ns);
	if (rc == 0)
		rc = read_answer(attempt);
	if (rc == -ETIMEDOUT)
		tnd__fail_plain(attempt->error, rc,
				"the %s at %s did not answer in time: its process lives, but is "
				"stopped or held up",
				attempt->to->what, attempt->to->address);
	return rc;
}

/* Return: 0; is_absent(): nobody listens; else failed, with its sentence. */
static int try_once(struct attempt *attempt)
{
	int rc;

	attempt->fd = attempt->who.pid_fd = -1;
	rc = connect_socket(attempt);
	if (rc == 0)
		rc = check_listener(attempt);
	if (rc == 0)
		rc = handshake(attempt);
	if (rc == 0)
		return 0;
	if (attempt->fd >= 0) {
		(void)tnd__wire_send(attempt->fd, TND__STEP_GOODBYE, NULL);
		close(attempt->fd);
	}
	if (attempt->who.pid_fd >= 0)
		close(attempt->who.pid_fd);
	return rc;
}

/* -- until the deadline -- */

static int give_up(struct attempt *attempt, int rc)
{
	/* Without a deadline nothing was waited for. */
	bool waited = attempt->deadline_ns > 0;
	const char *state = rc == -EAGAIN ? "has too many waiting for it" : "does not listen";

	if (!waited && rc == -ENOENT)
		rc = -ECONNREFUSED;
	return tnd__fail_plain(attempt->error, waited ? -ETIMEDOUT : rc,
			       "the %s at %s %s%s; start it first, or check the address",
			       attempt->to->what, attempt->to->address, state,
			       waited ? ", and the deadline has passed" : "");
}

static int try_until(struct attempt *attempt)
{
	int64_t pause_ns = TRY_NS;

	for (;;) {
		struct timespec pause;
		int64_t left_ns;
		int rc = try_once(attempt);

		if (!is_absent(rc))
			return rc;
		left_ns = attempt->deadline_ns - tnd__now_ns();
		if (left_ns <= 0)
			return give_up(attempt, rc);
		tnd__ns_to_timespec(TND__MIN(pause_ns, left_ns), &pause);
		nanosleep(&pause, NULL);
		pause_ns = TND__MIN(2 * pause_ns, TRY_MOST_NS);
	}
}

static int become_peer(struct attempt *attempt, struct tnd__service *service,
		       struct tnd__peer **ret_peer)
{
	struct tnd__peer *peer =
		tnd__peer_new(attempt->fd, &attempt->who, attempt->to->ops, attempt->to->owner);
	int rc;

	if (!peer) {
		(void)tnd__wire_send(attempt->fd, TND__STEP_GOODBYE, NULL);
		close(attempt->fd);
		if (attempt->who.pid_fd >= 0)
			close(attempt->who.pid_fd);
		return fail_errno(attempt, -ENOMEM);
	}
	tnd__service_hold_again(service);
	rc = tnd__peer_start(peer, service);
	if (rc < 0)
		return fail_errno(attempt, rc);
	*ret_peer = peer;
	return 0;
}

int tnd__peer_connect(const struct tnd__connect *to, struct tnd__peer **ret_peer,
		      struct tnd__packet *ret_reply, struct tnd_error *reterr)
{
	struct tnd__packet unwanted;
	struct attempt attempt = {.to = to,
				  .deadline_ns = TND__MAX(to->deadline_ns, 0),
				  .reply = ret_reply ? ret_reply : &unwanted,
				  .error = reterr};
	struct tnd__service *service;
	int rc = tnd__address_parse(to->address, &attempt.name, &attempt.name_bytes, reterr);

	if (rc < 0)
		return rc;
	rc = tnd__service_hold(&service);
	if (rc < 0)
		return tnd__fail_plain(reterr, rc, "cannot start the service thread: %s",
				       tnd_strerror(rc));
	rc = try_until(&attempt);
	if (rc == 0) {
		rc = become_peer(&attempt, service, ret_peer);
		if (rc < 0 || !ret_reply)
			tnd__packet_close_fds(attempt.reply);
	}
	tnd__service_put(service);
	return rc;
}
