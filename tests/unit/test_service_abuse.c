/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_service_abuse.c - what could break: somebody who connects and says nothing, or nonsense, or
 * sends descriptors that nobody wants, keeps others out, or leaves descriptors behind; another user
 * gets in; a protocol of another version is not named; a listener that cannot accept spins; a socket
 * file is open to others, is removed from under a process that lives, or replaces a file that is
 * none; an allocation or system call that fails leaves something behind. After each, a peer that
 * behaves is served, and the count of descriptors is what it was.
 */
#include "serving.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include "group/service_internal.h"

#define SILENT_COUNT 300

/* A connection without a service behind it. */
static int raw_connect(const char *address)
{
	struct sockaddr_un name;
	socklen_t bytes;
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (fd < 0 || tnd__address_parse(address, &name, &bytes, NULL) < 0 ||
	    connect(fd, (struct sockaddr *)&name, bytes) < 0)
		return -1;
	return fd;
}

/* Whether the other side ends it. */
static bool ends(int fd, int64_t ns)
{
	struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
	char bytes[4096];

	while (poll(&poll_fd, 1, (int)(ns / MS)) == 1)
		if (recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT) <= 0)
			return true;
	return false;
}

static void send_raw(int fd, const void *data, size_t bytes, uint32_t fd_count)
{
	union {
		struct cmsghdr align;
		char space[CMSG_SPACE(64 * sizeof(int))];
	} control = {{0}};
	struct iovec piece = {(void *)(uintptr_t)data, bytes};
	struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
	int fds[64];

	for (uint32_t i = 0; i < fd_count; i++)
		fds[i] = fd;
	if (fd_count) {
		message.msg_control = control.space;
		message.msg_controllen = CMSG_SPACE(fd_count * sizeof(int));
		CMSG_FIRSTHDR(&message)->cmsg_level = SOL_SOCKET;
		CMSG_FIRSTHDR(&message)->cmsg_type = SCM_RIGHTS;
		CMSG_FIRSTHDR(&message)->cmsg_len = CMSG_LEN(fd_count * sizeof(int));
		memcpy(CMSG_DATA(CMSG_FIRSTHDR(&message)), fds, fd_count * sizeof(int));
	}
	assert_int_equal(sendmsg(fd, &message, MSG_NOSIGNAL), bytes);
}

static void check_served(const char *address, struct end *here)
{
	struct end there = END;
	uint32_t hellos = here->hellos, left = here->left;

	connect_to(address, &there);
	await(here, &here->hellos, hellos + 1);
	tnd__peer_close(there.peer, true);
	await(here, &here->left, left + 1);
	tnd__peer_close(here->peer, true);
}

struct nonsense {
	const char *what;
	struct tnd__wire wire;
	size_t bytes;
	uint32_t fd_count;
};

#define WIRE(step, bytes, fds)                                           \
	{                                                                \
		TND__WIRE_MAGIC, TND__WIRE_VERSION, step, 20, bytes, fds \
	}
#define HEAD sizeof(struct tnd__wire)
static const struct nonsense nonsense[] = {
	{"nothing", WIRE(TND__STEP_HELLO, 0, 0), 0, 0},
	{"half a header", WIRE(TND__STEP_HELLO, 0, 0), HEAD / 2, 0},
	{"other magic", {1, TND__WIRE_VERSION, TND__STEP_HELLO, 20, 0, 0}, HEAD, 0},
	{"no hello", WIRE(TND__STEP_PACKET, 0, 0), HEAD, 0},
	{"goodbye first", WIRE(TND__STEP_GOODBYE, 0, 0), HEAD, 0},
	{"a reply", WIRE(TND__STEP_REPLY, 0, 0), HEAD, 0},
	{"unknown step", WIRE(99, 0, 0), HEAD, 0},
	{"longer than said", WIRE(TND__STEP_HELLO, 5, 0), HEAD + 6, 0},
	{"shorter than said", WIRE(TND__STEP_HELLO, 5, 0), HEAD + 4, 0},
	{"length 2^32 - 1", WIRE(TND__STEP_HELLO, UINT32_MAX, 0), HEAD + 4, 0},
	{"too long", WIRE(TND__STEP_HELLO, 2049, 0), HEAD + 2049, 0},
	{"descriptors not announced", WIRE(TND__STEP_HELLO, 0, 0), HEAD, 3},
	{"fewer descriptors", WIRE(TND__STEP_HELLO, 0, 9), HEAD, 3},
	{"none at all", WIRE(TND__STEP_HELLO, 0, 9), HEAD, 0},
	{"more than fit", WIRE(TND__STEP_HELLO, 0, 16), HEAD, 17},
	{"many more", WIRE(TND__STEP_HELLO, 0, 64), HEAD, 64},
	{"garbage with descriptors", {7, 7, 7, 7, 7, 7}, HEAD, 16},
	{"other version with some", {TND__WIRE_MAGIC, 2, 1, 1, 0, 5}, HEAD, 5},
};

static void test_nonsense(void **state)
{
	struct end here = END;
	unsigned int fds = fd_count();
	struct tnd__listener *listener = listen_at(NULL, &here);
	unsigned char packet[4096] = {0};

	(void)state;
	for (size_t i = 0; i < sizeof(nonsense) / sizeof(nonsense[0]); i++) {
		int fd = raw_connect(tnd__listener_address(listener));

		memcpy(packet, &nonsense[i].wire, HEAD);
		assert_true(fd >= 0);
		if (nonsense[i].bytes)
			send_raw(fd, packet, nonsense[i].bytes, nonsense[i].fd_count);
		else
			shutdown(fd, SHUT_WR);
		if (!ends(fd, PATIENCE_NS))
			fail_msg("%s: is not ended", nonsense[i].what);
		close(fd);
	}
	assert_int_equal(here.hellos, 0);
	check_served(tnd__listener_address(listener), &here);
	tnd__listener_close(listener);
	assert_int_equal(fd_count(), fds);
}

/* A peer that behaved at first: what it sends then is a death, and its descriptors are closed. */
static void test_nonsense_later(void **state)
{
	struct end here = END;
	unsigned int fds = fd_count();
	struct tnd__listener *listener = listen_at(NULL, &here);
	struct tnd__wire hello = WIRE(TND__STEP_HELLO, 0, 0), more = WIRE(TND__STEP_PACKET, 0, 0);
	int fd = raw_connect(tnd__listener_address(listener));

	(void)state;
	send_raw(fd, &hello, HEAD, 0);
	await(&here, &here.hellos, 1);
	send_raw(fd, &more, HEAD, 0);
	more.fd_count = 16;
	send_raw(fd, &more, HEAD, 16);
	await(&here, &here.packets, 2);
	assert_int_equal(here.fds, 16);
	send_raw(fd, &more, HEAD, 20);
	await(&here, &here.dead, 1);
	tnd__peer_close(here.peer, true);
	close(fd);
	tnd__listener_close(listener);
	assert_int_equal(fd_count(), fds);
}

static void test_other_version(void **state)
{
	struct end here = END;
	struct tnd__listener *listener = listen_at(NULL, &here);
	struct tnd__wire hello = {TND__WIRE_MAGIC, 7, TND__STEP_HELLO, 20, 0, 0}, wire;
	struct tnd__packet answer;
	struct tnd__refusal refusal;
	struct pollfd poll_fd = {.fd = raw_connect(tnd__listener_address(listener)),
				 .events = POLLIN};

	(void)state;
	send_raw(poll_fd.fd, &hello, HEAD, 0);
	assert_int_equal(poll(&poll_fd, 1, (int)(PATIENCE_NS / MS)), 1);
	assert_int_equal(tnd__wire_receive(poll_fd.fd, &wire, &answer), 1);
	assert_int_equal(wire.step, TND__STEP_REFUSED);
	memcpy(&refusal, answer.data, sizeof(refusal));
	assert_int_equal(refusal.code, TND_E_VERSION);
	assert_non_null(strstr(refusal.message, "speaks version 1 "));
	assert_non_null(strstr(refusal.message, "this process version 7"));
	close(poll_fd.fd);
	tnd__listener_close(listener);
}

struct foreign {
	pthread_t thread;
	int fd;
	struct tnd__wire answer;
	size_t bytes;
};

static void *answer_once(void *arg)
{
	struct foreign *foreign = arg;
	int fd = accept(foreign->fd, NULL, NULL);

	send_raw(fd, &foreign->answer, foreign->bytes, 4);
	/* Until the connecting side has had enough. */
	ends(fd, PATIENCE_NS);
	close(fd);
	return NULL;
}

static int connect_to_foreign(struct tnd__wire answer, size_t bytes, struct tnd_error *error)
{
	static const char address[] = "unix:@tundish-test-foreign";
	struct foreign foreign = {.answer = answer, .bytes = bytes};
	struct end there = END;
	struct sockaddr_un name;
	socklen_t name_bytes;
	int rc;

	assert_int_equal(tnd__address_parse(address, &name, &name_bytes, NULL), 0);
	foreign.fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	assert_int_equal(bind(foreign.fd, (struct sockaddr *)&name, name_bytes), 0);
	assert_int_equal(listen(foreign.fd, 1), 0);
	assert_int_equal(pthread_create(&foreign.thread, NULL, answer_once, &foreign), 0);
	rc = try_connect(address, &there, 0, error);
	pthread_join(foreign.thread, NULL);
	close(foreign.fd);
	return rc;
}

/* Listeners that are not of this release, or not of tundish. */
static void test_foreign_listener(void **state)
{
	unsigned int fds = fd_count();
	struct tnd_error error;

	(void)state;
	assert_int_equal(connect_to_foreign((struct tnd__wire){TND__WIRE_MAGIC, 3, 2, 0, 0, 4},
					    HEAD, &error),
			 TND_E_VERSION);
	assert_non_null(strstr(error.message, "speaks version 3 "));
	assert_non_null(strstr(error.message, "this process version 1"));
	assert_int_equal(connect_to_foreign((struct tnd__wire){1, 1, 1, 1, 1, 1}, HEAD, &error),
			 -EPROTO);
	assert_int_equal(
		connect_to_foreign((struct tnd__wire)WIRE(TND__STEP_REFUSED, 0, 4), HEAD, &error),
		-EPROTO);
	assert_int_equal(
		connect_to_foreign((struct tnd__wire)WIRE(TND__STEP_HELLO, 0, 4), HEAD, &error),
		-EPROTO);
	assert_int_equal(fd_count(), fds);
}

static void test_silent(void **state)
{
	struct end here = END;
	unsigned int fds = fd_count();
	struct tnd__listener *listener = listen_at(NULL, &here);
	int silent[SILENT_COUNT];
	int64_t begin_ns = tnd__now_ns();
	struct pollfd last;

	(void)state;
	for (int i = 0; i < SILENT_COUNT; i++) {
		silent[i] = raw_connect(tnd__listener_address(listener));
		assert_true(silent[i] >= 0);
	}
	check_served(tnd__listener_address(listener), &here);
	assert_true(tnd__now_ns() - begin_ns < 4000 * MS);
	/* The first had to go; the last has its five seconds, and no more. */
	assert_true(ends(silent[0], PATIENCE_NS));
	last = (struct pollfd){.fd = silent[SILENT_COUNT - 1], .events = POLLIN};
	assert_int_equal(poll(&last, 1, 0), 0);
	assert_true(ends(silent[SILENT_COUNT - 1], PATIENCE_NS));
	assert_in_range(tnd__now_ns() - begin_ns, 5000 * MS, 8000 * MS);
	for (int i = 0; i < SILENT_COUNT; i++)
		close(silent[i]);
	check_served(tnd__listener_address(listener), &here);
	tnd__listener_close(listener);
	assert_int_equal(fd_count(), fds);
}

/* -- another user -- */

static int other_user(void *arg, int hold, int ready)
{
	const char *address = arg;
	struct tnd_error error;
	struct end end = END;
	struct tnd__wire hello = WIRE(TND__STEP_HELLO, 0, 0), wire;
	struct tnd__packet answer;
	int fd;

	(void)hold;
	(void)ready;
	CHECK(setresgid(65534, 65534, 65534) == 0 && setresuid(65534, 65534, 65534) == 0);
	CHECK(try_connect(address, &end, tnd_deadline_in(PATIENCE_NS), &error) == TND_E_DENIED);
	CHECK(strstr(error.message, "user 0, this process as user 65534"));
	/* Without a check on this side the other one refuses. */
	fd = raw_connect(address);
	CHECK(fd >= 0);
	/* It may have been refused and closed before it speaks. */
	(void)send(fd, &hello, sizeof(hello), MSG_NOSIGNAL);
	while (tnd__wire_receive(fd, &wire, &answer) == -EAGAIN)
		poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, -1);
	CHECK(wire.magic == TND__WIRE_MAGIC && wire.step == TND__STEP_REFUSED);
	CHECK(ends(fd, PATIENCE_NS));
	return 0;
}

static void test_other_user(void **state)
{
	struct end here = END;
	struct tnd__listener *listener;
	struct child child;
	char address[TND__ADDRESS_BYTES];

	(void)state;
	if (geteuid() != 0 || CHILDREN_CANNOT_SERVE)
		skip();
	listener = listen_at(NULL, &here);
	snprintf(address, sizeof(address), "%s", tnd__listener_address(listener));
	child = start_child(other_user, address);
	assert_int_equal(end_child(&child), 0);
	assert_int_equal(here.hellos, 0);
	check_served(address, &here);
	tnd__listener_close(listener);
}

/* -- addresses -- */

static void test_bad_addresses(void **state)
{
	static const char *const bad[] = {"",         "x",      "unix:",  "unix:x",     "unix:@",
					  "unix:./x", "tcp:/x", "unix:/", "unix:@a\nb", "UNIX:@x"};
	char address[200];
	struct end end = END;
	struct tnd__listener *listener;
	struct tnd_error error;

	(void)state;
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		assert_int_equal(tnd__listener_open(bad[i], &end_ops, &end, &listener, &error),
				 TND_E_ADDRESS);
		assert_int_equal(try_connect(bad[i], &end, 0, &error), TND_E_ADDRESS);
	}
	assert_int_equal(try_connect(NULL, &end, 0, &error), TND_E_ADDRESS);
	for (size_t bytes = 106; bytes < 110; bytes++) {
		for (int abstract = 0; abstract < 2; abstract++) {
			int head = snprintf(address, sizeof(address), "unix:%s",
					    abstract ? "@" : "/tmp/");
			size_t name = (size_t)head - (abstract ? 6 : 5);

			memset(address + head, 'n', bytes - name);
			address[(size_t)head + bytes - name] = '\0';
			if (bytes <= 107) {
				listener = listen_at(address, &end);
				check_served(tnd__listener_address(listener), &end);
				tnd__listener_close(listener);
				continue;
			}
			assert_int_equal(
				tnd__listener_open(address, &end_ops, &end, &listener, &error),
				TND_E_ADDRESS);
			snprintf(address, sizeof(address), "has %zu bytes, a socket takes 107",
				 bytes);
			assert_non_null(strstr(error.message, address));
		}
	}
}

static mode_t mode_of(const char *path)
{
	struct stat stat;

	assert_int_equal(lstat(path, &stat), 0);
	return stat.st_mode;
}

static void test_socket_file(void **state)
{
	static const mode_t masks[] = {0, 022, 0777, 0277};
	char folder[] = "/tmp/tundish-test-XXXXXX", address[TND__ADDRESS_BYTES];
	const char *path = address + 5;
	struct end here = END;
	struct tnd__listener *listener, *second;
	struct tnd_error error;
	int fd;

	(void)state;
	assert_non_null(mkdtemp(folder));
	snprintf(address, sizeof(address), "unix:%s/socket", folder);
	for (size_t i = 0; i < sizeof(masks) / sizeof(masks[0]); i++) {
		mode_t before = umask(masks[i]);

		listener = listen_at(address, &here);
		umask(before);
		assert_int_equal(mode_of(path), S_IFSOCK | 0600);
		assert_int_equal(tnd__listener_open(address, &end_ops, &here, &second, &error),
				 -EADDRINUSE);
		check_served(address, &here);
		tnd__listener_close(listener);
		assert_int_equal(access(path, F_OK), -1);
	}
	/* Removed by somebody, and somebody else's by now: it is not ours to remove. */
	listener = listen_at(address, &here);
	unlink(path);
	second = listen_at(address, &here);
	tnd__listener_close(listener);
	assert_int_equal(mode_of(path), S_IFSOCK | 0600);
	check_served(address, &here);
	tnd__listener_close(second);
	/* A file that is none of ours, and a folder. */
	fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
	assert_int_equal(tnd__listener_open(address, &end_ops, &here, &second, &error),
			 TND_E_ADDRESS);
	assert_non_null(strstr(error.message, "is a file that is no socket"));
	assert_int_equal(mode_of(path), S_IFREG | 0600);
	close(fd);
	unlink(path);
	/* A socket of another type, that somebody listens to. */
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	{
		struct sockaddr_un name;
		socklen_t bytes;

		assert_int_equal(tnd__address_parse(address, &name, &bytes, NULL), 0);
		assert_int_equal(bind(fd, (struct sockaddr *)&name, bytes), 0);
		assert_int_equal(listen(fd, 1), 0);
	}
	assert_int_equal(tnd__listener_open(address, &end_ops, &here, &second, &error),
			 -EADDRINUSE);
	assert_int_equal(try_connect(address, &here, 0, &error), TND_E_ADDRESS);
	close(fd);
	/* Nobody listens any more: it is replaced. */
	listener = listen_at(address, &here);
	check_served(address, &here);
	tnd__listener_close(listener);
	assert_int_equal(rmdir(folder), 0);
	assert_int_equal(tnd__listener_open(address, &end_ops, &here, &second, &error), -ENOENT);
	assert_int_equal(
		tnd__listener_open("unix:@tundish-test-twice", &end_ops, &here, &listener, &error),
		0);
	assert_int_equal(
		tnd__listener_open("unix:@tundish-test-twice", &end_ops, &here, &second, &error),
		-EADDRINUSE);
	tnd__listener_close(listener);
}

/* -- what fails -- */

#ifdef TND_FAILPOINTS
static int64_t cpu_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
	return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Out of descriptors: those who come wait, and the thread does not spin. */
static void test_accept_fails(void **state)
{
	struct end here = END, there = END;
	struct tnd__listener *listener = listen_at(NULL, &here);
	int64_t before_ns;
	int fd;

	(void)state;
	assert_int_equal(tnd__failpoints_set("group.accept=EMFILE"), 0);
	fd = raw_connect(tnd__listener_address(listener));
	before_ns = cpu_ns();
	assert_int_equal(try_connect(tnd__listener_address(listener), &there,
				     tnd_deadline_in(400 * MS), NULL),
			 -ETIMEDOUT);
	assert_true(cpu_ns() - before_ns < 50 * MS);
	assert_int_equal(here.hellos, 0);
	assert_int_equal(tnd__failpoints_set(NULL), 0);
	check_served(tnd__listener_address(listener), &here);
	close(fd);
	tnd__listener_close(listener);
}

/* Every allocation and call of opening, connecting, sending and watching fails in turn. */
static void test_each_fails(void **state)
{
	static const char *const points[] = {
		"base.forkmark=ENOMEM", "group.alloc=ENOMEM",  "group.epoll=ENOSPC",
		"group.thread=EAGAIN",  "group.socket=EMFILE", "group.bind=EACCES",
		"group.random=ENOSYS",  "group.who=EBADF",     "group.send=ENOBUFS",
		"group.pidfd=EMFILE",   "group.accept=EMFILE",
	};
	unsigned int fds = fd_count(), threads = thread_count();

	(void)state;
	for (size_t i = 0; i < sizeof(points) / sizeof(points[0]); i++)
		for (int at = 1; at <= 8; at++) {
			struct end here = END, there = END;
			struct tnd__listener *listener = NULL;
			struct tnd__watch *watch = NULL;
			struct tnd_error error;
			char text[64];
			int rc;

			snprintf(text, sizeof(text), "%s@%dx1", points[i], at);
			assert_int_equal(tnd__failpoints_set(text), 0);
			rc = tnd__listener_open(NULL, &end_ops, &here, &listener, &error);
			if (rc == 0)
				rc = try_connect(tnd__listener_address(listener), &there,
						 tnd_deadline_in(PATIENCE_NS), &error);
			if (rc < 0) {
				assert_int_equal(error.code, rc);
				assert_true(error.message[0]);
			} else {
				tnd__peer_send(there.peer, &(struct tnd__packet){.kind = 30});
				await(&here, &here.packets, 1);
				tnd__peer_close(there.peer, true);
				await(&here, &here.left, 1);
			}
			if (tnd__watch_open(getpid(), NULL, NULL, 0, &watch) == 0)
				tnd__watch_close(watch);
			assert_int_equal(tnd__failpoints_set(NULL), 0);
			tnd__listener_close(listener);
			tnd__peer_close(here.peer, true);
			assert_int_equal(fd_count(), fds);
			assert_int_equal(thread_count(), threads);
		}
}
#endif

/* Descriptors that the receiver may not open: it is told so, and has none of them. */
static void test_descriptors_lost(void **state)
{
	struct end here = END, there = END;
	struct tnd__listener *listener = listen_at(NULL, &here);
	struct rlimit before, low;
	struct tnd_error error;
	unsigned int fds = fd_count();
	int rc;

	(void)state;
	for (int i = 0; i < TND__PACKET_FDS_MAX; i++)
		here.send_fds[i] = 0;
	here.send_fd_count = TND__PACKET_FDS_MAX;
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
	low = before;
	/* Two sockets and two pidfds are needed before the reply comes. */
	low.rlim_cur = fds + 8;
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
	rc = try_connect(tnd__listener_address(listener), &there, tnd_deadline_in(PATIENCE_NS),
			 &error);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
	assert_int_equal(rc, -EMFILE);
	await(&here, &here.left, 1);
	tnd__peer_close(here.peer, true);
	assert_int_equal(fd_count(), fds);
	tnd__listener_close(listener);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_nonsense),         cmocka_unit_test(test_nonsense_later),
		cmocka_unit_test(test_other_version),    cmocka_unit_test(test_foreign_listener),
		cmocka_unit_test(test_silent),           cmocka_unit_test(test_other_user),
		cmocka_unit_test(test_bad_addresses),    cmocka_unit_test(test_socket_file),
#ifdef TND_FAILPOINTS
		cmocka_unit_test(test_accept_fails),     cmocka_unit_test(test_each_fails),
#endif
		cmocka_unit_test(test_descriptors_lost),
	};

	return cmocka_run_group_tests(tests, warm_up, NULL);
}
