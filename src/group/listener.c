/* SPDX-License-Identifier: Apache-2.0 */
/*
 * listener.c - an address that processes connect to
 *
 * Abstract names vanish with the last descriptor. A socket file stays behind when its process is
 * killed: who finds one there connects to it, and replaces it if nobody listens, or if the process
 * that listened has ended and only a child that it forked still has the socket. Those who do that
 * at the same time, and those who have bound but do not listen yet, take turns by a lock on the
 * folder, which leaves nothing behind.
 *
 * Connections wait in `newcomers` until they said hello, NEWCOMERS_MAX at once and for HELLO_NS at
 * most; beyond that the oldest has to go: who means it says hello at once. Where no more can be
 * accepted (out of descriptors), the listener is not watched for PAUSE_NS: the backlog holds those
 * who come meanwhile.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "service_internal.h"

#define BACKLOG 256
#define ACCEPT_BURST 16
#define NEWCOMERS_MAX 128
#define HELLO_NS INT64_C(5000000000)
#define PAUSE_NS INT64_C(100000000)
/* For the turn at a folder; nobody keeps it longer than a connect takes. */
#define TURN_NS INT64_C(1000000000)
#define TURN_POLL_MS 2

struct tnd__listener {
	struct tnd__served served;
	int fd;
	const struct tnd__peer_ops *ops;
	void *owner;
	struct tnd__newcomers newcomers;
	bool warned; /* of accepting, since it last worked */
	/* The socket file as we made it. */
	bool has_file;
	dev_t device;
	ino_t inode;
	struct sockaddr_un name;
	socklen_t name_bytes;
	char address[TND__ADDRESS_BYTES];
};

static struct tnd__listener *of(struct tnd__served *served)
{
	return (struct tnd__listener *)(void *)served;
}

/* -- accepting -- */

static void pause_accepting(struct tnd__listener *listener, int rc)
{
	if (!listener->warned)
		tnd__log(TND_LOG_WARNING, "%s: no connection can be accepted for now: %s",
			 listener->address, tnd_strerror(rc));
	listener->warned = true;
	tnd__served_lock(&listener->served);
	tnd__served_unwatch(&listener->served, listener->fd);
	tnd__served_set_due(&listener->served, tnd__now_ns() + PAUSE_NS);
	tnd__served_unlock(&listener->served);
}

static void refuse_user(int fd, const struct tnd__who *who)
{
	struct tnd_error error;

	tnd__fail_plain(&error, TND_E_DENIED,
			"the listener runs as user %ld, this process as user %ld; run both as one",
			(long)geteuid(), (long)who->uid);
	tnd__wire_refuse(fd, TND_E_DENIED, &error);
}

static int start_newcomer(struct tnd__listener *listener, int fd, const struct tnd__who *who)
{
	struct tnd__service *service = listener->served.service;
	struct tnd__peer *peer = tnd__peer_new(fd, who, listener->ops, listener->owner);

	if (!peer) {
		close(fd);
		if (who->pid_fd >= 0)
			close(who->pid_fd);
		return -ENOMEM;
	}
	/* Only this thread makes it grow. */
	if (listener->newcomers.count >= NEWCOMERS_MAX)
		tnd__newcomers_drop_oldest(&listener->newcomers);
	tnd__service_hold_again(service);
	return tnd__peer_start_newcomer(peer, service, &listener->served, &listener->newcomers,
					tnd__now_ns() + HELLO_NS);
}

/* Takes `fd` over. Return: 0, -errno (lack: later). */
static int admit(struct tnd__listener *listener, int fd)
{
	struct tnd__who who;
	int rc = tnd__who_is(fd, &who);

	if (rc < 0) {
		close(fd);
		return rc == -ESRCH ? 0 : rc;
	}
	if (who.uid == geteuid())
		return start_newcomer(listener, fd, &who);
	refuse_user(fd, &who);
	if (who.pid_fd >= 0)
		close(who.pid_fd);
	close(fd);
	return 0;
}

static int accept_one(struct tnd__listener *listener)
{
	int fd, rc = tnd__failpoint("group.accept");

	if (rc < 0)
		return rc;
	fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	return fd < 0 ? -errno : admit(listener, fd);
}

static void listener_ready(struct tnd__served *served, unsigned int which, uint32_t events)
{
	struct tnd__listener *listener = of(served);
	int rc = 0;

	(void)which;
	(void)events;
	for (int i = 0; i < ACCEPT_BURST && rc == 0; i++) {
		rc = accept_one(listener);
		if (rc == -EINTR || rc == -ECONNABORTED)
			rc = 0;
		else if (rc == 0)
			listener->warned = false;
	}
	if (rc < 0 && rc != -EAGAIN)
		pause_accepting(listener, rc);
}

static void listener_due(struct tnd__served *served, int64_t now_ns)
{
	struct tnd__listener *listener = of(served);

	tnd__served_lock(served);
	if (!served->removed && tnd__served_watch(served, listener->fd, 0, EPOLLIN) < 0)
		tnd__served_set_due(served, now_ns + PAUSE_NS);
	tnd__served_unlock(served);
}

/* -- socket files -- */

/* Return: a descriptor whose close ends the turn; -1: no turns here (folder not readable). */
static int take_turn(const char *path)
{
	char folder[sizeof(((struct sockaddr_un *)0)->sun_path)];
	int64_t until_ns = tnd__now_ns() + TURN_NS;
	char *slash;
	int fd;

	snprintf(folder, sizeof(folder), "%s", path);
	slash = strrchr(folder, '/');
	slash[slash == folder ? 1 : 0] = '\0';
	fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	while (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) < 0 && tnd__now_ns() < until_ns)
		poll(NULL, 0, TURN_POLL_MS);
	return fd;
}

/* Whether a process that lives listens there. Return: 1, 0, -errno. */
static int is_live(const struct tnd__listener *listener)
{
	struct tnd__who who;
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), rc = 0;

	if (fd < 0)
		return -errno;
	if (connect(fd, (const struct sockaddr *)&listener->name, listener->name_bytes) < 0)
		rc = -errno;
	if (rc == 0) {
		rc = tnd__who_is(fd, &who);
		if (rc == 0) {
			rc = who.pid_fd < 0 || !tnd__pidfd_ended(who.pid_fd);
			if (who.pid_fd >= 0)
				close(who.pid_fd);
		}
	}
	close(fd);
	if (rc == -ECONNREFUSED || rc == -ENOENT || rc == -ESRCH)
		return 0;
	/* Its backlog is full, or it is no socket of ours: somebody has it. */
	return rc == -EAGAIN || rc == -EPROTOTYPE || rc == -EACCES ? 1 : rc;
}

static int bind_name(const struct tnd__listener *listener)
{
	int rc = tnd__failpoint("group.bind");

	if (rc == 0 &&
	    bind(listener->fd, (const struct sockaddr *)&listener->name, listener->name_bytes) < 0)
		rc = -errno;
	return rc;
}

static int replace_stale(struct tnd__listener *listener, struct tnd_error *reterr)
{
	const char *path = listener->name.sun_path;
	struct stat stat;
	int rc = lstat(path, &stat) < 0 ? -errno : 0;

	if (rc == 0 && !S_ISSOCK(stat.st_mode))
		return tnd__fail_plain(reterr, TND_E_ADDRESS,
				       "%s is a file that is no socket; give another address, or "
				       "remove it",
				       path);
	if (rc == 0)
		rc = is_live(listener);
	if (rc == 1)
		return -EADDRINUSE;
	if (rc == 0 && unlink(path) < 0 && errno != ENOENT)
		rc = -errno;
	return rc < 0 && rc != -ENOENT ? rc : bind_name(listener);
}

/* Only the owner may connect, whatever the umask is. */
static int own_file(struct tnd__listener *listener)
{
	const char *path = listener->name.sun_path;
	struct stat stat;

	if (lstat(path, &stat) < 0)
		return -errno;
	listener->device = stat.st_dev;
	listener->inode = stat.st_ino;
	listener->has_file = true;
	if ((stat.st_mode & 0777) != 0600 && chmod(path, 0600) < 0)
		return -errno;
	return 0;
}

static void remove_file(struct tnd__listener *listener)
{
	const char *path = listener->name.sun_path;
	struct stat stat;

	if (!listener->has_file)
		return;
	/* Somebody may have removed it, and another one listen there by now. */
	if (lstat(path, &stat) == 0 && stat.st_dev == listener->device &&
	    stat.st_ino == listener->inode)
		unlink(path);
}

/* -- its begin -- */

static int bind_address(struct tnd__listener *listener, struct tnd_error *reterr)
{
	bool has_path = listener->name.sun_path[0] != '\0';
	int turn, rc;

	if (!has_path) {
		rc = bind_name(listener);
		return rc == 0 && listen(listener->fd, BACKLOG) < 0 ? -errno : rc;
	}
	turn = take_turn(listener->name.sun_path);
	/* The file gets the mode of the socket, less the umask: it is never open to others. */
	fchmod(listener->fd, 0600);
	rc = bind_name(listener);
	if (rc == -EADDRINUSE)
		rc = replace_stale(listener, reterr);
	if (rc == 0)
		rc = own_file(listener);
	if (rc == 0 && listen(listener->fd, BACKLOG) < 0)
		rc = -errno;
	if (turn >= 0)
		close(turn);
	return rc;
}

static int open_socket(struct tnd__listener *listener, struct tnd_error *reterr)
{
	int rc = tnd__failpoint("group.socket");

	if (rc == 0) {
		listener->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
		rc = listener->fd < 0 ? -errno : 0;
	}
	if (rc == 0)
		rc = bind_address(listener, reterr);
	if (rc == 0 || rc == TND_E_ADDRESS)
		return rc;
	if (rc == -EADDRINUSE)
		return tnd__fail_plain(reterr, rc,
				       "a process that lives listens at %s; give another address",
				       listener->address);
	return tnd__fail_plain(reterr, rc, "cannot listen at %s: %s", listener->address,
			       tnd_strerror(rc));
}

static int set_address(struct tnd__listener *listener, const char *address,
		       struct tnd_error *reterr)
{
	int rc = 0;

	if (address)
		rc = tnd__address_parse(address, &listener->name, &listener->name_bytes, reterr);
	if (rc < 0)
		return rc;
	if (address) {
		snprintf(listener->address, sizeof(listener->address), "%s", address);
		return 0;
	}
	rc = tnd__address_fresh(listener->address, reterr);
	return rc < 0 ? rc
		      : tnd__address_parse(listener->address, &listener->name,
					   &listener->name_bytes, reterr);
}

static void listener_free(struct tnd__served *served)
{
	struct tnd__listener *listener = of(served);

	if (listener->fd >= 0)
		close(listener->fd);
	free(listener);
}

static const struct tnd__served_ops served_ops = {listener_ready, listener_due, listener_free};

/* Return: 0; -errno, and then the hold is given back and the listener is freed. */
static int start(struct tnd__listener *listener, struct tnd__service *service)
{
	int rc;

	tnd__served_add(&listener->served, service, &served_ops);
	rc = tnd__served_watch(&listener->served, listener->fd, 0, EPOLLIN);
	if (rc < 0)
		tnd__listener_close(listener);
	return rc;
}

int tnd__listener_open(const char *address, const struct tnd__peer_ops *ops, void *owner,
		       struct tnd__listener **ret_listener, struct tnd_error *reterr)
{
	struct tnd__listener *listener =
		tnd__failpoint("group.alloc") < 0 ? NULL : calloc(1, sizeof(*listener));
	struct tnd__service *service;
	int rc;

	if (!listener)
		return tnd__fail_plain(reterr, -ENOMEM, "no memory for a listener");
	listener->fd = -1;
	listener->ops = ops;
	listener->owner = owner;
	rc = set_address(listener, address, reterr);
	if (rc == 0)
		rc = open_socket(listener, reterr);
	if (rc < 0)
		goto free_listener;
	rc = tnd__service_hold(&service);
	if (rc < 0) {
		tnd__fail_plain(reterr, rc, "cannot start the service thread: %s",
				tnd_strerror(rc));
		goto free_listener;
	}
	rc = start(listener, service);
	if (rc < 0)
		return tnd__fail_plain(reterr, rc, "cannot wait for connections: %s",
				       tnd_strerror(rc));
	*ret_listener = listener;
	return 0;

free_listener:
	remove_file(listener);
	listener_free(&listener->served);
	return rc;
}

const char *tnd__listener_address(const struct tnd__listener *listener)
{
	return listener->address;
}

/* A forked child may hold the socket open: nobody is to wait in its backlog. */
static void end_backlog(struct tnd__listener *listener)
{
	int fd;

	shutdown(listener->fd, SHUT_RDWR);
	while ((fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0)
		close(fd);
}

void tnd__listener_close(struct tnd__listener *listener)
{
	if (!listener)
		return;
	if (tnd__served_forked(&listener->served)) {
		tnd__newcomers_end(&listener->newcomers, &listener->served, true);
		listener_free(&listener->served);
		tnd__service_forked();
		return;
	}
	remove_file(listener);
	tnd__served_lock(&listener->served);
	tnd__served_remove(&listener->served);
	tnd__newcomers_end(&listener->newcomers, &listener->served, false);
	tnd__served_unwatch(&listener->served, listener->fd);
	tnd__served_unlock(&listener->served);
	end_backlog(listener);
	tnd__served_discard(&listener->served);
}
