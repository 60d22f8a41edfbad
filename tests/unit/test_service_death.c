/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_service_death.c - what could break: a death that is seen late or never, because a child of the
 * victim lives on with its descriptors, because the kernel has no pidfd for us, or because the victim
 * is in another namespace; a stopped process that is taken for a dead one; a program that was
 * replaced. Victims are real processes; each is seen to die within 200 ms by its end's `seen_ns`.
 */
#include "serving.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>

/* How deaths are to be seen. */
struct way {
	const char *failpoints;
	bool has_pidfd;
};
static const struct way ways[] = {
	{NULL, true},                          /* SO_PEERPIDFD */
	{"group.peerpidfd=ENOPROTOOPT", true}, /* pidfd_open */
	{"group.pidfd=ENOSYS", false},         /* life lock */
};

static void use_way(const struct way *way)
{
#ifdef TND_FAILPOINTS
	assert_int_equal(tnd__failpoints_set(way->failpoints), 0);
#else
	if (way->failpoints)
		skip();
#endif
}

struct victim {
	const char *address;
	int lock_fd;
	bool listens; /* at `address`, else connects to it */
	bool leaves_child, execs;
	int unshare; /* CLONE_NEW* */
};

/* The one whose life is watched. */
static int be_victim(struct victim *victim, int hold, int ready)
{
	struct end end = END;

	CHECK(tnd__life_lock(victim->lock_fd, 7) == 0);
	if (victim->listens)
		listen_at(victim->address, &end);
	else
		CHECK(try_connect(victim->address, &end, tnd_deadline_in(PATIENCE_NS), NULL) == 0);
	if (victim->leaves_child && fork() == 0) {
		until_let_go(hold);
		_exit(0);
	}
	say_ready(ready);
	/* Its standard input ends with the test, and cat with it. */
	if (victim->execs && dup2(hold, 0) == 0)
		execl("/bin/cat", "cat", NULL);
	until_let_go(hold);
	return 0;
}

static int run_victim(void *arg, int hold, int ready)
{
	struct victim *victim = arg;
	int status;
	pid_t pid;

	if (!victim->unshare)
		return be_victim(victim, hold, ready);
	CHECK(unshare(victim->unshare) == 0);
	pid = fork();
	if (pid == 0)
		_exit(be_victim(victim, hold, ready));
	CHECK(waitpid(pid, &status, 0) == pid);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 97;
}

static int lock_file(void)
{
	int fd = memfd_create("tundish.test", MFD_CLOEXEC);

	assert_true(fd >= 0);
	return fd;
}

static void check_killed(struct end *end, pid_t pid)
{
	int64_t begin_ns = tnd__now_ns();

	assert_int_equal(end->dead, 0);
	assert_int_equal(kill(pid, SIGKILL), 0);
	await(end, &end->dead, 1);
	assert_true(end->seen_ns - begin_ns < DEATH_NS);
	assert_int_equal(end->left, 0);
}

static void kill_connected(const struct way *way, bool leaves_child)
{
	struct end here = END;
	struct tnd__listener *listener;
	struct victim victim = {.lock_fd = lock_file(), .leaves_child = leaves_child};
	struct child child;

	use_way(way);
	here.lock_fd = victim.lock_fd;
	listener = listen_at(NULL, &here);
	victim.address = tnd__listener_address(listener);
	child = start_child(run_victim, &victim);
	await(&here, &here.hellos, 1);
	await_ready(&child);
	assert_int_equal(tnd__peer_pid(here.peer), child.pid);
	assert_int_equal(tnd__peer_pidfd(here.peer) >= 0, way->has_pidfd);
	/* The lock has to have been seen held: looks are 50 ms apart. Stopped is not dead. */
	kill(child.pid, SIGSTOP);
	assert_false(reached(&here, &here.dead, 1, 250 * MS));
	check_killed(&here, child.pid);
	assert_int_equal(end_child(&child), -SIGKILL);
	tnd__peer_close(here.peer, true);
	tnd__listener_close(listener);
	close(victim.lock_fd);
	use_way(&ways[0]);
}

static void test_connected(void **state)
{
	(void)state;
	for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++)
		kill_connected(&ways[i], false);
}

static void test_connected_with_child(void **state)
{
	(void)state;
	for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++)
		kill_connected(&ways[i], true);
}

/* The socket still listens, in a child of who was killed: that is nobody. */
static void test_listener_with_child(void **state)
{
	struct victim victim = {.address = "unix:@tundish-test-dies",
				.listens = true,
				.leaves_child = true,
				.lock_fd = lock_file()};
	struct child child = start_child(run_victim, &victim);
	struct end there = END, late = END;

	(void)state;
	connect_to(victim.address, &there);
	await_ready(&child);
	check_killed(&there, child.pid);
	assert_int_equal(try_connect(victim.address, &late, 0, NULL), -ECONNREFUSED);
	assert_int_equal(try_connect(victim.address, &late, tnd_deadline_in(30 * MS), NULL),
			 -ETIMEDOUT);
	assert_int_equal(end_child(&child), -SIGKILL);
	assert_int_equal(try_connect(victim.address, &late, 0, NULL), -ECONNREFUSED);
	tnd__peer_close(there.peer, true);
	close(victim.lock_fd);
}

/* The same at a path: it is taken over, and the old child does not matter. */
static void test_stale_file_with_child(void **state)
{
	char folder[] = "/tmp/tundish-test-XXXXXX", address[TND__ADDRESS_BYTES];
	struct victim victim = {
		.address = address, .listens = true, .leaves_child = true, .lock_fd = lock_file()};
	struct end here = END, there = END;
	struct tnd__listener *listener;
	struct tnd_error error;
	struct child child;

	(void)state;
	assert_non_null(mkdtemp(folder));
	snprintf(address, sizeof(address), "unix:%s/socket", folder);
	child = start_child(run_victim, &victim);
	await_ready(&child);
	assert_int_equal(tnd__listener_open(address, &end_ops, &here, &listener, &error),
			 -EADDRINUSE);
	assert_non_null(strstr(error.message, "a process that lives listens at"));
	kill(child.pid, SIGKILL);
	assert_int_equal(waitid(P_PID, (id_t)child.pid, &(siginfo_t){0}, WEXITED | WNOWAIT), 0);
	listener = listen_at(address, &here);
	connect_to(address, &there);
	tnd__peer_close(there.peer, true);
	await(&here, &here.left, 1);
	tnd__peer_close(here.peer, true);
	tnd__listener_close(listener);
	assert_int_equal(end_child(&child), -SIGKILL);
	assert_int_equal(rmdir(folder), 0);
	close(victim.lock_fd);
}

static void test_exec(void **state)
{
	struct end here = END;
	struct tnd__listener *listener = listen_at(NULL, &here);
	struct victim victim = {
		.address = tnd__listener_address(listener), .execs = true, .lock_fd = lock_file()};
	struct child child = start_child(run_victim, &victim);

	(void)state;
	await(&here, &here.dead, 1);
	assert_int_equal(here.left, 0);
	/* It lives. */
	assert_int_equal(kill(child.pid, 0), 0);
	assert_int_equal(end_child(&child), 0);
	tnd__peer_close(here.peer, true);
	tnd__listener_close(listener);
	close(victim.lock_fd);
}

/* -- other namespaces -- */

static void across(int unshare_flags, const struct way *way)
{
	char folder[] = "/tmp/tundish-test-XXXXXX", address[TND__ADDRESS_BYTES];
	struct victim victim = {
		.address = address, .unshare = unshare_flags, .lock_fd = lock_file()};
	struct end here = END;
	struct tnd__listener *listener;
	struct child child;

	use_way(way);
	here.lock_fd = victim.lock_fd;
	assert_non_null(mkdtemp(folder));
	snprintf(address, sizeof(address), "unix:%s/socket", folder);
	listener = listen_at(address, &here);
	child = start_child(run_victim, &victim);
	await(&here, &here.hellos, 1);
	await_ready(&child);
	/* Its number as we see it; in a new pid namespace it is 1 to itself. */
	assert_true(tnd__peer_pid(here.peer) > 1);
	assert_false(reached(&here, &here.dead, 1, 120 * MS));
	check_killed(&here, tnd__peer_pid(here.peer));
	end_child(&child);
	tnd__peer_close(here.peer, true);
	tnd__listener_close(listener);
	rmdir(folder);
	close(victim.lock_fd);
	use_way(&ways[0]);
}

/* From inside, the listener outside has no number: the other ways have to do. */
struct inside {
	const char *address;
	int lock_fd;
	const struct way *way;
};

static int watch_from_inside(void *arg, int hold, int ready)
{
	const struct inside *inside = arg;
	struct end end = END;
	bool has_socket_way = !inside->way->failpoints;
	int status;
	pid_t pid;

	(void)hold;
	CHECK(unshare(CLONE_NEWPID) == 0);
	pid = fork();
	if (pid) {
		CHECK(waitpid(pid, &status, 0) == pid);
		return WIFEXITED(status) ? WEXITSTATUS(status) : 97;
	}
#ifdef TND_FAILPOINTS
	CHECK(tnd__failpoints_set(inside->way->failpoints) == 0);
#endif
	CHECK(try_connect(inside->address, &end, tnd_deadline_in(PATIENCE_NS), NULL) == 0);
	CHECK(tnd__peer_pid(end.peer) == 0);
	CHECK((tnd__peer_pidfd(end.peer) >= 0) == has_socket_way);
	tnd__peer_watch_lock(end.peer, inside->lock_fd, 7);
	CHECK(!reached(&end, &end.dead, 1, 120 * MS));
	say_ready(ready);
	CHECK(reached(&end, &end.dead, 1, PATIENCE_NS));
	tnd__peer_close(end.peer, true);
	_exit(0);
}

static void seen_from_inside(const struct way *way)
{
	char folder[] = "/tmp/tundish-test-XXXXXX", address[TND__ADDRESS_BYTES];
	struct victim victim = {
		.address = address, .listens = true, .leaves_child = true, .lock_fd = lock_file()};
	struct inside inside = {address, victim.lock_fd, way};
	struct child listening, watching;

	assert_non_null(mkdtemp(folder));
	snprintf(address, sizeof(address), "unix:%s/socket", folder);
	listening = start_child(run_victim, &victim);
	await_ready(&listening);
	watching = start_child(watch_from_inside, &inside);
	await_ready(&watching);
	kill(listening.pid, SIGKILL);
	assert_int_equal(end_child(&watching), 0);
	assert_int_equal(end_child(&listening), -SIGKILL);
	unlink(address + 5);
	rmdir(folder);
	close(victim.lock_fd);
}

static bool may_unshare(int flags)
{
	pid_t pid = fork();
	int status;

	if (pid == 0)
		_exit(unshare(flags) != 0);
	return waitpid(pid, &status, 0) == pid && status == 0;
}

static void test_pid_namespace(void **state)
{
	(void)state;
	if (!may_unshare(CLONE_NEWPID))
		skip();
	for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
		across(CLONE_NEWPID, &ways[i]);
		seen_from_inside(&ways[i]);
	}
}

static void test_net_namespace(void **state)
{
	(void)state;
	if (!may_unshare(CLONE_NEWNET))
		skip();
	across(CLONE_NEWNET, &ways[0]);
}

/* -- who has not connected yet -- */

static struct tnd__watch *_Atomic watch_to_close;

static void ended(void *owner, uint64_t tag)
{
	struct end *end = owner;

	if (tag == 4) {
		while (!watch_to_close)
			sched_yield();
		tnd__watch_close(watch_to_close);
	}
	end->packets = (uint32_t)tag;
	tell(end, &end->dead);
}

static int only_wait(void *arg, int hold, int ready)
{
	(void)arg;
	prctl(PR_SET_NAME, "a (odd) b) S 1");
	say_ready(ready);
	until_let_go(hold);
	return 0;
}

static void watch_ends(const struct way *way)
{
	struct end end = END;
	struct child child = start_child(only_wait, NULL);
	struct tnd__watch *watch, *closed;

	await_ready(&child);
	use_way(way);
	assert_int_equal(tnd__watch_open(child.pid, ended, &end, 3, &watch), 0);
	assert_int_equal(tnd__watch_open(child.pid, ended, &end, 9, &closed), 0);
	kill(child.pid, SIGSTOP);
	assert_false(reached(&end, &end.dead, 1, 120 * MS));
	tnd__watch_close(closed);
	/* It stays a zombie until end_child(). */
	kill(child.pid, SIGKILL);
	await(&end, &end.dead, 1);
	assert_int_equal(end.packets, 3);
	tnd__watch_close(watch);
	/* One that has ended already; closed by its own callback. */
	if (way->has_pidfd) {
		watch_to_close = NULL;
		assert_int_equal(tnd__watch_open(child.pid, ended, &end, 4, &watch), 0);
		watch_to_close = watch;
		await(&end, &end.dead, 2);
	}
	assert_int_equal(end_child(&child), -SIGKILL);
	assert_int_equal(tnd__watch_open(child.pid, ended, &end, 5, &watch), -ESRCH);
	assert_int_equal(tnd__watch_open(0, ended, &end, 5, &watch), -ESRCH);
	assert_int_equal(tnd__watch_open(-1, ended, &end, 5, &watch), -ESRCH);
	use_way(&ways[0]);
}

static void test_watch(void **state)
{
	unsigned int fds = fd_count(), threads = thread_count();

	(void)state;
	watch_ends(&ways[0]);
	watch_ends(&ways[2]);
	assert_int_equal(fd_count(), fds);
	/* A service that was ended by its own thread goes a moment later. */
	for (int64_t until_ns = tnd_deadline_in(PATIENCE_NS);
	     thread_count() != threads && tnd__now_ns() < until_ns;)
		sched_yield();
	assert_int_equal(thread_count(), threads);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_connected),
		cmocka_unit_test(test_connected_with_child),
		cmocka_unit_test(test_listener_with_child),
		cmocka_unit_test(test_stale_file_with_child),
		cmocka_unit_test(test_exec),
		cmocka_unit_test(test_pid_namespace),
		cmocka_unit_test(test_net_namespace),
		cmocka_unit_test(test_watch),
	};

	if (CHILDREN_CANNOT_SERVE)
		return EXIT_SKIP;
	return cmocka_run_group_tests(tests, warm_up, NULL);
}
