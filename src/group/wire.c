/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wire.c - one packet on a socket: a header, bytes, descriptors
 *
 *   SEQPACKET message:  struct tnd__wire | data, wire.bytes        SCM_RIGHTS: fds, wire.fd_count
 *
 * A message is sent and received whole or not at all; nothing here blocks. What comes is checked:
 * magic, the version, and that the header's counts are those of the message. A message of another
 * version has no contents for us, only its header. Every descriptor that came is in the packet, for
 * its receiver to close, or closed here. Where the kernel had to drop some, because this process
 * may open no more, the others are in the packet, and -EMFILE says so.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "service_internal.h"

/* Room for the descriptors of one packet. The kernel closes what does not fit, and says so. */
union control {
	struct cmsghdr align;
	char space[CMSG_SPACE(TND__PACKET_FDS_MAX * sizeof(int))];
};

static void put_fds(struct msghdr *message, union control *control,
		    const struct tnd__packet *packet)
{
	struct cmsghdr *header;
	size_t bytes = packet->fd_count * sizeof(int);

	memset(control, 0, sizeof(*control));
	message->msg_control = control->space;
	message->msg_controllen = CMSG_SPACE(bytes);
	header = CMSG_FIRSTHDR(message);
	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(bytes);
	memcpy(CMSG_DATA(header), packet->fds, bytes);
}

int tnd__wire_send(int fd, uint32_t step, const struct tnd__packet *packet)
{
	struct tnd__wire wire = {
		.magic = TND__WIRE_MAGIC, .version = TND__WIRE_VERSION, .step = step};
	struct iovec pieces[2] = {{.iov_base = &wire, .iov_len = sizeof(wire)}};
	struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 1};
	union control control;
	int rc = tnd__failpoint("group.send");

	if (rc < 0)
		return rc;
	if (packet) {
		wire.kind = packet->kind;
		wire.bytes = packet->bytes;
		wire.fd_count = packet->fd_count;
		pieces[1].iov_base = (void *)(uintptr_t)packet->data;
		pieces[1].iov_len = packet->bytes;
		message.msg_iovlen = 2;
		if (packet->fd_count)
			put_fds(&message, &control, packet);
	}
	do
		rc = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 ? -errno : 0;
	while (rc == -EINTR);
	return rc == -ECONNRESET || rc == -ENOTCONN ? -EPIPE : rc;
}

void tnd__wire_refuse(int fd, int code, const struct tnd_error *error)
{
	struct tnd__refusal refusal = {.code = code, .rank = error->rank};
	struct tnd__packet packet = {.bytes = sizeof(refusal)};

	snprintf(refusal.message, sizeof(refusal.message), "%s",
		 error->message[0] ? error->message : tnd_strerror(code));
	memcpy(packet.data, &refusal, sizeof(refusal));
	/* Whoever does not get it finds the connection ended. */
	(void)tnd__wire_send(fd, TND__STEP_REFUSED, &packet);
}

void tnd__packet_make(struct tnd__packet *packet, uint32_t kind, const void *data, size_t bytes)
{
	packet->kind = kind;
	packet->bytes = (uint32_t)bytes;
	packet->fd_count = 0;
	if (bytes)
		memcpy(packet->data, data, bytes);
}

bool tnd__packet_read(const struct tnd__packet *packet, void *data, size_t bytes)
{
	if (packet->bytes != bytes)
		return false;
	memcpy(data, packet->data, bytes);
	return true;
}

void tnd__packet_close_fds(struct tnd__packet *packet)
{
	for (uint32_t i = 0; i < packet->fd_count; i++)
		if (packet->fds[i] >= 0)
			close(packet->fds[i]);
	packet->fd_count = 0;
}

/* Every descriptor that came is in the packet, or closed. */
static void take_fds(struct msghdr *message, struct tnd__packet *packet)
{
	for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header;
	     header = CMSG_NXTHDR(message, header)) {
		size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);

		if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < count; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(fd));
			if (packet->fd_count < TND__PACKET_FDS_MAX)
				packet->fds[packet->fd_count++] = fd;
			else
				close(fd);
		}
	}
}

static ssize_t receive(int fd, struct msghdr *message)
{
	ssize_t bytes;
	int tries = 2;

	/*
	 * ECONNRESET once: the other side closed without having read all that we sent. What it sent
	 * before is still there.
	 */
	do
		bytes = recvmsg(fd, message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	while (bytes < 0 && (errno == EINTR || (errno == ECONNRESET && tries-- > 0)));
	return bytes < 0 ? -errno : bytes;
}

/* Whether header, length and descriptors of what came agree. */
static int check(const struct msghdr *message, size_t bytes, const struct tnd__wire *wire,
		 const struct tnd__packet *packet)
{
	if (bytes < sizeof(*wire) || wire->magic != TND__WIRE_MAGIC)
		return -EPROTO;
	if (wire->version != TND__WIRE_VERSION)
		return 1;
	if (message->msg_flags & MSG_TRUNC || wire->bytes != bytes - sizeof(*wire) ||
	    wire->fd_count > TND__PACKET_FDS_MAX)
		return -EPROTO;
	/* Announced and sent, but this process may not open as many. */
	if (packet->fd_count < wire->fd_count && message->msg_flags & MSG_CTRUNC)
		return -EMFILE;
	if (packet->fd_count != wire->fd_count || message->msg_flags & MSG_CTRUNC)
		return -EPROTO;
	return 1;
}

int tnd__wire_receive(int fd, struct tnd__wire *ret_wire, struct tnd__packet *ret_packet)
{
	struct iovec pieces[2] = {
		{.iov_base = ret_wire, .iov_len = sizeof(*ret_wire)},
		{.iov_base = ret_packet->data, .iov_len = sizeof(ret_packet->data)},
	};
	union control control;
	struct msghdr message = {.msg_iov = pieces,
				 .msg_iovlen = 2,
				 .msg_control = control.space,
				 .msg_controllen = sizeof(control.space)};
	ssize_t bytes = receive(fd, &message);
	int rc;

	ret_packet->fd_count = 0;
	if (bytes < 0)
		return (int)bytes;
	take_fds(&message, ret_packet);
	rc = bytes == 0 ? 0 : check(&message, (size_t)bytes, ret_wire, ret_packet);
	if ((rc < 1 && rc != -EMFILE) || ret_wire->version != TND__WIRE_VERSION) {
		tnd__packet_close_fds(ret_packet);
		ret_packet->bytes = 0;
		return rc;
	}
	ret_packet->kind = ret_wire->kind;
	ret_packet->bytes = ret_wire->bytes;
	return rc;
}
