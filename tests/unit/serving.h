/* SPDX-License-Identifier: Apache-2.0 */
/*
 * serving.h - for tests of the service: an owner that counts what it is told and can be waited for,
 * and processes that end when the test lets them
 */
#ifndef SERVING_H
#define SERVING_H

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include <tundish/group.h>

#include "group/service.h"
#include "support/fds.h"

#define PATIENCE_NS INT64_C(20000000000)
#define DEATH_NS INT64_C(200000000) /* a death has to be seen within */
#define MS INT64_C(1000000)

/* ThreadSanitizer cannot follow threads that a forked child starts. */
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define CHILDREN_CANNOT_SERVE 1
#endif
#elif defined(__SANITIZE_THREAD__)
#define CHILDREN_CANNOT_SERVE 1
#endif
#ifndef CHILDREN_CANNOT_SERVE
#define CHILDREN_CANNOT_SERVE 0
#endif
#define EXIT_SKIP 77

/* Counts of callbacks; `word` changes with each. */
struct end {
	_Atomic uint32_t word, hellos, packets, left, dead, out_of_order, fds;
	_Atomic uint32_t running; /* callbacks */
	_Atomic int64_t seen_ns;  /* of the last callback */
	struct tnd__peer *_Atomic peer;
	int answer;  /* of on_hello */
	int lock_fd; /* of on_hello: watch this lock; -1: none */
	int send_fds[TND__PACKET_FDS_MAX], send_fd_count; /* in the reply */
	void (*_Atomic also)(struct end *end, struct tnd__peer *peer, struct tnd__packet *packet);
};

#define END                   \
	{                     \
		.lock_fd = -1 \
	}

static inline void tell(struct end *end, _Atomic uint32_t *count)
{
	end->seen_ns = tnd__now_ns();
	*count += 1;
	end->word++;
	tnd__futex_wake(&end->word, INT32_MAX);
}

/* Whether *count reached `value` in time. */
static inline bool reached(struct end *end, _Atomic uint32_t *count, uint32_t value, int64_t ns)
{
	int64_t deadline_ns = tnd__now_ns() + ns;

	for (;;) {
		uint32_t word = end->word;

		if (*count >= value)
			return true;
		if (tnd__futex_wait(&end->word, word, deadline_ns) == -ETIMEDOUT)
			return *count >= value;
	}
}

static inline void await(struct end *end, _Atomic uint32_t *count, uint32_t value)
{
	assert_true(reached(end, count, value, PATIENCE_NS));
}

static inline void also(struct end *end, struct tnd__peer *peer, struct tnd__packet *packet)
{
	void (*more)(struct end *, struct tnd__peer *, struct tnd__packet *) =
		atomic_load(&end->also);

	if (more)
		more(end, peer, packet);
}

static int end_hello(void *owner, struct tnd__peer *peer, struct tnd__packet *hello,
		     struct tnd__packet *reply, struct tnd_error *error)
{
	struct end *end = owner;

	end->running++;
	end->fds += hello->fd_count;
	reply->kind = hello->kind + 1;
	reply->bytes = hello->bytes;
	memcpy(reply->data, hello->data, hello->bytes);
	reply->fd_count = (uint32_t)end->send_fd_count;
	memcpy(reply->fds, end->send_fds, sizeof(end->send_fds));
	tnd__peer_set_tag(peer, end->hellos + 1);
	if (end->lock_fd >= 0)
		tnd__peer_watch_lock(peer, end->lock_fd, 7);
	if (!end->answer)
		end->peer = peer;
	also(end, peer, NULL);
	if (end->answer) {
		tnd__fail_plain(error, end->answer, "no place for %u", hello->kind);
		error->rank = 5;
	}
	end->running--;
	tell(end, &end->hellos);
	return end->answer;
}

static void end_packet(void *owner, struct tnd__peer *peer, struct tnd__packet *packet)
{
	struct end *end = owner;
	uint32_t number;

	end->running++;
	end->fds += packet->fd_count;
	memcpy(&number, packet->data, sizeof(number));
	if (packet->bytes >= sizeof(number) && number != end->packets)
		end->out_of_order++;
	also(end, peer, packet);
	end->running--;
	tell(end, &end->packets);
}

static void end_gone(void *owner, struct tnd__peer *peer, int how)
{
	struct end *end = owner;

	end->running++;
	also(end, peer, NULL);
	end->running--;
	tell(end, how == TND__GONE_LEFT ? &end->left : &end->dead);
}

static const struct tnd__peer_ops end_ops = {end_hello, end_packet, end_gone};

static inline struct tnd__listener *listen_at(const char *address, struct end *end)
{
	struct tnd__listener *listener = NULL;
	struct tnd_error error;
	int rc = tnd__listener_open(address, &end_ops, end, &listener, &error);

	if (rc < 0)
		fail_msg("%d: %s", rc, error.message);
	return listener;
}

static inline int try_connect(const char *address, struct end *end, int64_t deadline_ns,
			      struct tnd_error *reterr)
{
	static const struct tnd__packet hello = {.kind = 20, .bytes = 5, .data = "hello"};
	const struct tnd__connect to = {.address = address,
					.what = "channel",
					.hello = &hello,
					.deadline_ns = deadline_ns,
					.ops = &end_ops,
					.owner = end};
	struct tnd__peer *peer;
	int rc = tnd__peer_connect(&to, &peer, NULL, reterr);

	if (rc == 0)
		end->peer = peer;
	return rc;
}

static inline void connect_to(const char *address, struct end *end)
{
	struct tnd_error error;
	int rc = try_connect(address, end, tnd__now_ns() + PATIENCE_NS, &error);

	if (rc < 0)
		fail_msg("%d: %s", rc, error.message);
}

static inline void send_number(struct tnd__peer *peer, uint32_t number, uint32_t bytes)
{
	struct tnd__packet packet = {.kind = 30, .bytes = bytes};

	memcpy(packet.data, &number, sizeof(number));
	assert_int_equal(tnd__peer_send(peer, &packet), 0);
}

/* -- processes -- */

/* A process that runs `run` and ends with its result; it also ends with the test. */
struct child {
	pid_t pid;
	int hold;  /* the child reads from it: closed, it may end */
	int ready; /* the child writes to it */
};

/* In the child: until the test lets go of it. */
static inline void until_let_go(int hold)
{
	char byte;
	ssize_t bytes;

	do
		bytes = read(hold, &byte, 1);
	while (bytes < 0 && errno == EINTR);
}

static inline void say_ready(int ready)
{
	if (write(ready, "r", 1) != 1)
		_exit(99);
}

static inline void await_ready(const struct child *child)
{
	struct pollfd fd = {.fd = child->ready, .events = POLLIN};
	char byte;

	assert_int_equal(poll(&fd, 1, (int)(PATIENCE_NS / MS)), 1);
	assert_int_equal(read(child->ready, &byte, 1), 1);
}

static inline struct child start_child(int (*run)(void *arg, int hold, int ready), void *arg)
{
	struct child child;
	int hold[2], ready[2];

	assert_int_equal(pipe2(hold, O_CLOEXEC), 0);
	assert_int_equal(pipe2(ready, O_CLOEXEC), 0);
	fflush(NULL);
	child.pid = fork();
	assert_true(child.pid >= 0);
	if (child.pid == 0) {
		close(hold[1]);
		close(ready[0]);
		_exit(run(arg, hold[0], ready[1]));
	}
	close(hold[0]);
	close(ready[1]);
	child.hold = hold[1];
	child.ready = ready[0];
	return child;
}

/* Lets it end. Return: its exit status, or -signal. */
static inline int end_child(struct child *child)
{
	int status;

	close(child->hold);
	close(child->ready);
	assert_int_equal(waitpid(child->pid, &status, 0), child->pid);
	return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/* Before threads are counted: a sanitizer starts one of its own beside the first. */
static inline int warm_up(void **state)
{
	(void)state;
	if (tnd__service_ref() < 0)
		return -1;
	tnd__service_unref();
	return 0;
}

/* In a child, where cmocka's asserts would jump into the parent's test. */
#define CHECK(condition)                                                                       \
	do {                                                                                   \
		if (!(condition)) {                                                            \
			fprintf(stderr, "%s:%d: child: %s\n", __FILE__, __LINE__, #condition); \
			_exit(98);                                                             \
		}                                                                              \
	} while (0)

#endif
