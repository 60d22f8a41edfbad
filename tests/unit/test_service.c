/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_service.c - what could break: packets lost, out of order or without their descriptors when
 * the socket is full; a goodbye that is overtaken, or taken for a death; a callback after a close, or
 * a close that waits for itself; a refusal without its sentence; an address that is taken over from
 * a process that lives, or open to others; a thread or a descriptor left behind; a forked child that
 * disturbs its parent. Owners count what they are told; every wait has a deadline.
 */
#include "serving.h"

#include <sys/resource.h>

/* -- meeting -- */

static void test_meet(void **state)
{
	struct end here = END, there = END;
	struct tnd__packet hello = {.kind = 20, .bytes = 3, .data = "abc"}, reply;
	struct tnd__connect to = {.what = "channel",
				  .hello = &hello,
				  .deadline_ns = tnd_deadline_in(PATIENCE_NS),
				  .ops = &end_ops,
				  .owner = &there};
	struct tnd__listener *listener;
	struct tnd__peer *peer;
	struct stat sent, got;
	unsigned int fds = fd_count(), threads = thread_count();

	(void)state;
	here.send_fds[0] = hello.fds[0] = hello.fds[1] = open("/dev/null", O_RDONLY | O_CLOEXEC);
	here.send_fd_count = 1;
	hello.fd_count = 2;
	assert_int_equal(tnd__service_ref(), 0);
	listener = listen_at(NULL, &here);
	to.address = tnd__listener_address(listener);
	assert_int_equal(tnd__peer_connect(&to, &peer, &reply, NULL), 0);
	assert_int_equal(here.fds, 2);
	assert_int_equal(reply.kind, 21);
	assert_int_equal(reply.bytes, 3);
	assert_memory_equal(reply.data, "abc", 3);
	assert_int_equal(reply.fd_count, 1);
	assert_int_equal(fstat(reply.fds[0], &got), 0);
	assert_int_equal(fstat(hello.fds[0], &sent), 0);
	assert_int_equal(got.st_rdev, sent.st_rdev);
	assert_int_equal(fcntl(reply.fds[0], F_GETFD), FD_CLOEXEC);
	close(reply.fds[0]);
	close(hello.fds[0]);
	await(&here, &here.hellos, 1);
	assert_int_equal(tnd__peer_tag(here.peer), 1);
	assert_int_equal(tnd__peer_pid(peer), getpid());
	assert_int_equal(tnd__peer_pid(here.peer), getpid());
	for (uint32_t i = 0; i < 1000; i++) {
		send_number(peer, i, 4 + i);
		send_number(here.peer, i, 2048 - i);
	}
	await(&here, &here.packets, 1000);
	await(&there, &there.packets, 1000);
	assert_int_equal(here.out_of_order + there.out_of_order, 0);
	tnd__peer_close(peer, true);
	await(&here, &here.left, 1);
	assert_int_equal(tnd__peer_send(here.peer, &hello), -EPIPE);
	tnd__peer_close(here.peer, true);
	tnd__listener_close(listener);
	tnd__peer_close(NULL, true);
	tnd__listener_close(NULL);
	tnd__watch_close(NULL);
	assert_int_equal(thread_count(), threads + 1);
	tnd__service_unref();
	assert_int_equal(thread_count(), threads);
	assert_int_equal(fd_count(), fds);
}

static void test_refused(void **state)
{
	struct end here = END, there = END;
	struct tnd__listener *listener = listen_at(NULL, &here);
	struct tnd_error error;

	(void)state;
	here.answer = TND_E_PLACE;
	assert_int_equal(try_connect(tnd__listener_address(listener), &there, 0, &error),
			 TND_E_PLACE);
	assert_string_equal(error.message, "no place for 20");
	assert_int_equal(error.rank, 5);
	assert_int_equal(error.code, TND_E_PLACE);
	assert_int_equal(try_connect(tnd__listener_address(listener), &there, 0, NULL),
			 TND_E_PLACE);
	here.answer = 0;
	connect_to(tnd__listener_address(listener), &there);
	tnd__listener_close(listener);
	tnd__peer_close(there.peer, false);
	/* Not a word of goodbye, though the process lives. */
	await(&here, &here.dead, 1);
	tnd__peer_close(here.peer, false);
}

static void *listen_late(void *arg)
{
	/* The connecting side is in its pauses by then, or comes later: both are to work. */
	poll(NULL, 0, 20);
	return listen_at("unix:@tundish-test-late", arg);
}

static void test_deadlines(void **state)
{
	struct end here = END, there = END;
	struct tnd_error error;
	int64_t begin_ns = tnd__now_ns();
	pthread_t thread;
	void *listener;

	(void)state;
	assert_int_equal(try_connect("unix:@tundish-test-late", &there, 0, &error), -ECONNREFUSED);
	assert_int_equal(try_connect("unix:/nowhere/x", &there, 0, &error), -ECONNREFUSED);
	assert_non_null(strstr(error.message, "channel at unix:/nowhere/x does not listen"));
	assert_int_equal(try_connect("unix:@tundish-test-late", &there, begin_ns + 60 * MS, &error),
			 -ETIMEDOUT);
	assert_true(tnd__now_ns() >= begin_ns + 60 * MS);
	assert_int_equal(try_connect("unix:@tundish-test-late", &there, INT64_MIN, NULL),
			 -ECONNREFUSED);
	assert_int_equal(pthread_create(&thread, NULL, listen_late, &here), 0);
	assert_int_equal(try_connect("unix:@tundish-test-late", &there, TND_NO_DEADLINE, NULL), 0);
	pthread_join(thread, &listener);
	tnd__peer_close(there.peer, true);
	await(&here, &here.left, 1);
	tnd__peer_close(here.peer, true);
	tnd__listener_close(listener);
}

/* -- a full socket, a stopped process -- */

struct stopper {
	const char *address;
	uint32_t packets;
};

/* Stops itself; then expects `packets`, in order, and a goodbye. */
static int stopped_reader(void *arg, int hold, int ready)
{
	const struct stopper *stopper = arg;
	struct end end = END;

	CHECK(try_connect(stopper->address, &end, tnd_deadline_in(PATIENCE_NS), NULL) == 0);
	say_ready(ready);
	raise(SIGSTOP);
	CHECK(reached(&end, &end.left, 1, PATIENCE_NS));
	CHECK(end.packets == stopper->packets && end.out_of_order == 0);
	until_let_go(hold);
	tnd__peer_close(end.peer, true);
	return 0;
}

static void await_stopped(pid_t pid)
{
	int status;

	assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
	assert_true(WIFSTOPPED(status));
}

static void test_queue(void **state)
{
	struct end here = END;
	unsigned int fds = fd_count(), threads = thread_count();
	struct tnd__listener *listener = listen_at(NULL, &here);
	struct stopper stopper = {tnd__listener_address(listener), 1500};
	struct child child = start_child(stopped_reader, &stopper);

	(void)state;
	assert_int_equal(tnd__service_ref(), 0);
	await(&here, &here.hellos, 1);
	await_stopped(child.pid);
	for (uint32_t i = 0; i < 1500; i++) {
		struct tnd__packet packet = {.kind = 30, .bytes = 2048, .fd_count = i % 40 == 0};

		packet.fds[0] = child.hold;
		memcpy(packet.data, &i, sizeof(i));
		assert_int_equal(tnd__peer_send(here.peer, &packet), 0);
	}
	assert_false(reached(&here, &here.dead, 1, 300 * MS));
	kill(child.pid, SIGCONT);
	/* All of it goes out, and the goodbye behind it, though the peer is closed at once. */
	tnd__peer_close(here.peer, true);
	tnd__listener_close(listener);
	tnd__service_unref();
	assert_int_equal(thread_count(), threads);
	assert_int_equal(end_child(&child), 0);
	assert_int_equal(fd_count(), fds);
}

static void test_linger_ends(void **state)
{
	struct end here = END;
	struct tnd__listener *listener = listen_at(NULL, &here);
	struct stopper stopper = {tnd__listener_address(listener), 0};
	struct child child = start_child(stopped_reader, &stopper);
	unsigned int threads = thread_count() - 1;
	int64_t begin_ns;
	int rc = 0;

	(void)state;
	await(&here, &here.hellos, 1);
	await_stopped(child.pid);
	for (uint32_t i = 0; rc == 0; i++) {
		struct tnd__packet packet = {.kind = 30, .bytes = 2048};

		assert_true(i < 10000);
		rc = tnd__peer_send(here.peer, &packet);
	}
	assert_int_equal(rc, -ENOMEM);
	/* It never reads: the queue goes after a second, and the thread with it. */
	assert_int_equal(tnd__service_ref(), 0);
	begin_ns = tnd__now_ns();
	tnd__peer_close(here.peer, true);
	tnd__listener_close(listener);
	assert_true(tnd__now_ns() - begin_ns < 500 * MS);
	tnd__service_unref();
	assert_in_range(tnd__now_ns() - begin_ns, 900 * MS, 5000 * MS);
	assert_int_equal(thread_count(), threads);
	kill(child.pid, SIGKILL);
	assert_int_equal(end_child(&child), -SIGKILL);
}

static int stopped_listener(void *arg, int hold, int ready)
{
	struct end end = END;
	struct tnd__listener *listener = listen_at(arg, &end);

	say_ready(ready);
	raise(SIGSTOP);
	CHECK(reached(&end, &end.left, 1, PATIENCE_NS));
	CHECK(end.hellos == 1);
	CHECK(end.dead == 0);
	until_let_go(hold);
	tnd__peer_close(end.peer, true);
	tnd__listener_close(listener);
	return 0;
}

/* Who gives up waiting for a stopped listener was never there in its eyes; the next one is. */
static void test_stopped_listener(void **state)
{
	char address[] = "unix:@tundish-test-stopped";
	struct child child = start_child(stopped_listener, address);
	struct end there = END;
	struct tnd_error error;

	(void)state;
	await_ready(&child);
	await_stopped(child.pid);
	assert_int_equal(try_connect(address, &there, tnd_deadline_in(50 * MS), &error),
			 -ETIMEDOUT);
	assert_non_null(strstr(error.message, "did not answer in time"));
	kill(child.pid, SIGCONT);
	connect_to(address, &there);
	tnd__peer_close(there.peer, true);
	assert_int_equal(end_child(&child), 0);
}

/* -- closing in and beside callbacks -- */

static struct tnd__listener *to_close;
static pthread_t opener;

static void close_listener(struct end *end, struct tnd__peer *peer, struct tnd__packet *packet)
{
	(void)end;
	(void)peer;
	(void)packet;
	assert_false(pthread_equal(pthread_self(), opener));
	tnd__listener_close(to_close);
}

static void close_self(struct end *end, struct tnd__peer *peer, struct tnd__packet *packet)
{
	(void)end;
	(void)packet;
	tnd__peer_close(peer, true);
}

static void test_close_in_callback(void **state)
{
	struct end here = END, there = END;
	unsigned int fds = fd_count(), threads = thread_count();

	(void)state;
	opener = pthread_self();
	assert_int_equal(tnd__service_ref(), 0);
	/* The listener, in its on_hello: the connection stays. */
	to_close = listen_at(NULL, &here);
	here.also = close_listener;
	connect_to(tnd__listener_address(to_close), &there);
	await(&here, &here.hellos, 1);
	/* A peer in its on_packet, with two more on their way, or too late. */
	here.also = close_self;
	for (uint32_t i = 0; i < 3; i++) {
		int rc = tnd__peer_send(there.peer, &(struct tnd__packet){.kind = 30});

		assert_true(rc == 0 || (rc == -EPIPE && i > 0));
	}
	await(&there, &there.left, 1);
	assert_int_equal(here.packets, 1);
	/* A peer in its own on_hello: it gets its answer, then the goodbye. */
	tnd__peer_close(there.peer, true);
	to_close = listen_at(NULL, &here);
	connect_to(tnd__listener_address(to_close), &there);
	await(&there, &there.left, 2);
	tnd__peer_close(there.peer, true);
	/* A peer in its on_gone. */
	here.also = NULL;
	connect_to(tnd__listener_address(to_close), &there);
	await(&here, &here.hellos, 3);
	here.also = close_self;
	tnd__peer_close(there.peer, false);
	await(&here, &here.dead, 1);
	tnd__listener_close(to_close);
	tnd__service_unref();
	assert_int_equal(fd_count(), fds);
	assert_int_equal(thread_count(), threads);
}

static _Atomic uint32_t let_go;

static void block(struct end *end, struct tnd__peer *peer, struct tnd__packet *packet)
{
	(void)peer;
	(void)packet;
	end->word++;
	tnd__futex_wake(&end->word, INT32_MAX);
	while (tnd__futex_wait(&let_go, 0, tnd_deadline_in(PATIENCE_NS)) == 0 && !let_go)
		;
}

struct closer {
	pthread_t thread;
	struct tnd__listener *listener;
	struct tnd__peer *peer;
	struct end *end;
	struct end closed; /* `left`: done */
	uint32_t running;  /* callbacks, when the close had returned */
};

static void *close_one(void *arg)
{
	struct closer *closer = arg;

	if (closer->listener)
		tnd__listener_close(closer->listener);
	else
		tnd__peer_close(closer->peer, true);
	closer->running = closer->end->running;
	tell(&closer->closed, &closer->closed.left);
	return NULL;
}

/* A close beside a callback that runs returns after it. */
static void check_waits(struct closer *closer)
{
	assert_int_equal(pthread_create(&closer->thread, NULL, close_one, closer), 0);
	assert_false(reached(&closer->closed, &closer->closed.left, 1, 50 * MS));
	let_go = 1;
	tnd__futex_wake(&let_go, INT32_MAX);
	pthread_join(closer->thread, NULL);
	assert_int_equal(closer->running, 0);
	let_go = 0;
}

struct connecting {
	pthread_t thread;
	const char *address;
	struct end *end;
	int rc;
};

static void *connect_there(void *arg)
{
	struct connecting *connecting = arg;

	connecting->rc = try_connect(connecting->address, connecting->end,
				     tnd_deadline_in(PATIENCE_NS), NULL);
	return NULL;
}

static void test_close_beside_callback(void **state)
{
	struct end here = END, there = END;
	struct tnd__listener *listener = listen_at("unix:@tundish-test-beside", &here);
	struct closer of_peer = {.end = &here}, of_listener = {.listener = listener, .end = &here};
	struct connecting second = {.address = "unix:@tundish-test-beside", .end = &there};
	struct tnd__peer *first;

	(void)state;
	connect_to(tnd__listener_address(listener), &there);
	await(&here, &here.hellos, 1);
	here.also = block;
	first = there.peer;
	send_number(first, 0, 4);
	send_number(first, 1, 4);
	await(&here, &here.running, 1);
	of_peer.peer = here.peer;
	check_waits(&of_peer);
	await(&there, &there.left, 1);
	assert_int_equal(here.packets, 1);
	tnd__peer_close(first, true);
	/* The same while the listener's on_hello runs. */
	assert_int_equal(pthread_create(&second.thread, NULL, connect_there, &second), 0);
	await(&here, &here.running, 1);
	check_waits(&of_listener);
	pthread_join(second.thread, NULL);
	assert_int_equal(second.rc, 0);
	here.also = NULL;
	tnd__peer_close(there.peer, true);
	await(&here, &here.left, 1);
	tnd__peer_close(here.peer, true);
}

/* -- nothing stays, nothing runs -- */

static void test_no_leak(void **state)
{
	struct end here = END;
	struct tnd__listener *listener = listen_at(NULL, &here);
	unsigned int fds = fd_count(), threads = thread_count() - 1;

	(void)state;
	for (uint32_t i = 0; i < 1000; i++) {
		struct end there = END;

		connect_to(tnd__listener_address(listener), &there);
		await(&here, &here.hellos, i + 1);
		if (i % 2)
			tnd__peer_close(here.peer, i % 3);
		tnd__peer_close(there.peer, i % 3);
		if (i % 2 == 0)
			tnd__peer_close(here.peer, i % 3);
	}
	assert_int_equal(fd_count(), fds);
	tnd__listener_close(listener);
	for (uint32_t i = 0; i < 300; i++)
		tnd__listener_close(listen_at(NULL, &here));
	assert_int_equal(thread_count(), threads);
}

static int64_t cpu_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
	return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void test_idle(void **state)
{
	struct end here = END, there = END;
	struct tnd__listener *listener = listen_at(NULL, &here);
	int64_t before_ns;

	(void)state;
	connect_to(tnd__listener_address(listener), &there);
	await(&here, &here.hellos, 1);
	before_ns = cpu_ns();
	assert_false(reached(&here, &here.dead, 1, 300 * MS));
	assert_true(cpu_ns() - before_ns < 5 * MS);
	tnd__peer_close(there.peer, true);
	await(&here, &here.left, 1);
	tnd__peer_close(here.peer, true);
	/* A peer that is gone and not yet closed costs nothing either. */
	connect_to(tnd__listener_address(listener), &there);
	tnd__peer_close(there.peer, false);
	await(&here, &here.dead, 1);
	before_ns = cpu_ns();
	assert_false(reached(&here, &here.dead, 2, 300 * MS));
	assert_true(cpu_ns() - before_ns < 5 * MS);
	tnd__peer_close(here.peer, true);
	tnd__listener_close(listener);
}

/* -- fork -- */

struct inherited {
	struct tnd__listener *listener;
	struct tnd__peer *here, *there;
	const char *address;
};

static int forked(void *arg, int hold, int ready)
{
	struct inherited *inherited = arg;
	struct end end = END, own = END;
	struct tnd__listener *listener;
	struct tnd__packet packet = {.kind = 30};
	unsigned int fds = fd_count(), threads = thread_count();
	char address[TND__ADDRESS_BYTES];

	(void)ready;
	snprintf(address, sizeof(address), "%s", inherited->address);
	CHECK(tnd__peer_send(inherited->here, &packet) == -EPIPE);
	/* One before, the rest after a service was started here. */
	tnd__peer_close(inherited->here, true);
	CHECK(try_connect(address, &end, tnd_deadline_in(PATIENCE_NS), NULL) == 0);
	tnd__peer_close(inherited->there, true);
	tnd__listener_close(inherited->listener);
	listener = listen_at(NULL, &own);
	tnd__listener_close(listener);
	tnd__peer_close(end.peer, true);
	/* Gone are: its listener, two peers with a pidfd each, what the service stood on. */
	CHECK(fd_count() < fds);
	CHECK(thread_count() == threads);
	until_let_go(hold);
	return 0;
}

static void test_fork(void **state)
{
	char folder[] = "/tmp/tundish-test-XXXXXX", address[TND__ADDRESS_BYTES];
	struct end here = END, there = END;
	struct inherited inherited;
	struct child child;

	(void)state;
	assert_non_null(mkdtemp(folder));
	snprintf(address, sizeof(address), "unix:%s/socket", folder);
	inherited.listener = listen_at(address, &here);
	connect_to(address, &there);
	await(&here, &here.hellos, 1);
	inherited.here = here.peer;
	inherited.there = there.peer;
	inherited.address = address;
	child = start_child(forked, &inherited);
	await(&here, &here.left, 1);
	tnd__peer_close(here.peer, true);
	assert_int_equal(end_child(&child), 0);
	/* What the child closed works here as before; the file is there. */
	assert_int_equal(here.dead + there.left + there.dead, 0);
	send_number(inherited.there, 0, 4);
	await(&here, &here.packets, 1);
	assert_int_equal(access(address + 5, F_OK), 0);
	tnd__peer_close(inherited.there, true);
	await(&here, &here.left, 2);
	tnd__peer_close(inherited.here, true);
	tnd__listener_close(inherited.listener);
	assert_int_not_equal(access(address + 5, F_OK), 0);
	rmdir(folder);
}

int main(void)
{
	const struct CMUnitTest threads[] = {
		cmocka_unit_test(test_meet),
		cmocka_unit_test(test_refused),
		cmocka_unit_test(test_deadlines),
		cmocka_unit_test(test_close_in_callback),
		cmocka_unit_test(test_close_beside_callback),
		cmocka_unit_test(test_no_leak),
		cmocka_unit_test(test_idle),
	};
	const struct CMUnitTest processes[] = {
		cmocka_unit_test(test_queue),
		cmocka_unit_test(test_linger_ends),
		cmocka_unit_test(test_stopped_listener),
		cmocka_unit_test(test_fork),
	};
	int failed = cmocka_run_group_tests(threads, warm_up, NULL);

	if (!CHILDREN_CANNOT_SERVE)
		failed += cmocka_run_group_tests(processes, warm_up, NULL);
	return failed;
}
