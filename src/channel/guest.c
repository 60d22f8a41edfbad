/* SPDX-License-Identifier: Apache-2.0 */
/* guest.c - the reader's side of attaching, and what its service thread is told */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <string.h>
#include <time.h>

#include "channel_internal.h"

#define LOCK_WAIT_NS INT64_C(2000000000)

/*
 * P1 to P3: a flag of our own process, for a thread that may sleep; pair with look_for_object() and
 * the sample of `local_word` in announce().
 */
static void tell(struct tnd_channel *channel, _Atomic uint32_t *flag)
{
	(void)tnd__failpoint("channel.P1");
	atomic_store_explicit(flag, 1, memory_order_seq_cst);
	(void)tnd__failpoint("channel.P2");
	atomic_fetch_add_explicit(&channel->local_word, 1, memory_order_seq_cst);
	(void)tnd__failpoint("channel.P3");
	tnd__futex_wake_local(&channel->local_word, INT_MAX);
}

static void on_packet(void *owner, struct tnd__peer *peer, struct tnd__packet *packet)
{
	(void)peer;
	if (packet->kind == TND__PACKET_SLAB)
		tnd__slabs_arrived(owner, packet);
	else if (packet->kind == TND__PACKET_TELL)
		tnd__notice_arrived(owner, packet);
}

static void on_gone(void *owner, struct tnd__peer *peer, int how)
{
	struct tnd_channel *channel = owner;

	(void)peer;
	tell(channel,
	     how == TND__GONE_LEFT ? &channel->reader.writer_left : &channel->reader.writer_dead);
}

static const struct tnd__peer_ops guest_ops = {NULL, on_packet, on_gone};

static int take_welcome(struct tnd_channel *channel, struct tnd__packet *reply,
			struct tnd_error *reterr)
{
	struct tnd__reader *reader = &channel->reader;
	struct tnd__welcome welcome;
	int rc = 0;

	if (reply->kind != TND__PACKET_WELCOME || reply->bytes != sizeof(welcome))
		rc = tnd__fail_plain(reterr, TND_E_CORRUPT,
				     "the listener's answer is none of a channel's (kind %" PRIu32
				     "): check the address",
				     reply->kind);
	else if (reply->fd_count != 2) /* the others could not be opened here */
		rc = tnd__fail_plain(reterr, -EMFILE,
				     "of the channel's 2 descriptors %" PRIu32
				     " could be opened: raise the limit (ulimit -n)",
				     reply->fd_count);
	if (rc < 0) {
		tnd__packet_close_fds(reply);
		return rc;
	}
	memcpy(&welcome, reply->data, sizeof(welcome));
	rc = tnd__segments_attach(reply->fds[0], reply->fds[1], &channel->shared, reterr);
	if (rc < 0)
		return rc;
	if (welcome.place >= channel->shared.place_count)
		return tnd__fail_plain(
			reterr, TND_E_CORRUPT,
			"channel '%s': place %" PRIu32 " of %" PRIu32 ": the writer is broken",
			channel->shared.name, welcome.place, channel->shared.place_count);
	reader->place = welcome.place;
	reader->generation = welcome.generation;
	reader->seated = true;
	return 0;
}

/*
 * Where there are no pidfds, each is seen to live by its lock. Who had the place before says that
 * it is gone a moment before its lock goes.
 */
static int take_life_lock(struct tnd_channel *channel, struct tnd_error *reterr)
{
	int64_t until = tnd__now_ns() + LOCK_WAIT_NS;
	int rc;

	for (;;) {
		rc = tnd__life_lock(channel->shared.control_fd,
				    TND__LIFE_PLACE(channel->reader.place));
		if ((rc != -EAGAIN && rc != -EACCES) || tnd__now_ns() >= until)
			break;
		nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
	}
	return rc == 0 ? 0
		       : tnd__fail_plain(reterr, rc, "channel '%s': no lock on its memory: %s",
					 channel->shared.name, tnd_strerror(rc));
}

/* Where the reader begins: what the writer's service decided. */
void tnd__guest_begin(struct tnd_channel *channel)
{
	struct tnd__reader *reader = &channel->reader;

	reader->next = atomic_load_explicit(&channel->shared.header->seats[reader->place].admitted,
					    memory_order_relaxed);
	reader->known = reader->next;
	atomic_store_explicit(&reader->cursor, reader->next, memory_order_relaxed);
}

/*
 * A reader that ends before the writer has looked at its lock would never be missed where a child
 * that it forked keeps the connection. That the writer has gone is found out in its own way.
 */
static int say_locked(struct tnd__peer *peer)
{
	struct tnd__packet *packet = calloc(1, sizeof(*packet));
	int rc = -ENOMEM;

	if (packet) {
		packet->kind = TND__PACKET_LOCKED;
		rc = tnd__peer_send(peer, packet);
	}
	free(packet);
	return rc == -EPIPE ? 0 : rc;
}

int tnd__guest_attach(struct tnd_channel *channel, const char *address, uint32_t rank,
		      int64_t deadline_ns, struct tnd_error *reterr)
{
	struct tnd__hello hello = {TND__LAYOUT_VERSION, rank};
	struct tnd__packet *packets = calloc(2, sizeof(*packets));
	const struct tnd__connect to = {.address = address,
					.what = "channel",
					.hello = packets,
					.deadline_ns = deadline_ns,
					.ops = &guest_ops,
					.owner = channel};
	int rc;

	if (!packets)
		return tnd__fail_plain(reterr, -ENOMEM, "no memory to attach to '%s'", address);
	tnd__packet_make(&packets[0], TND__PACKET_CHANNEL, &hello, sizeof(hello));
	channel->reader.rank = rank;
	rc = tnd__peer_connect(&to, &channel->reader.peer, &packets[1], reterr);
	if (rc == 0)
		rc = take_welcome(channel, &packets[1], reterr);
	free(packets);
	if (rc < 0)
		return rc;
	rc = take_life_lock(channel, reterr);
	if (rc < 0)
		return rc;
	rc = say_locked(channel->reader.peer);
	if (rc < 0)
		return tnd__fail_plain(reterr, rc, "channel '%s': the writer cannot be told: %s",
				       channel->shared.name, tnd_strerror(rc));
	tnd__peer_watch_lock(channel->reader.peer, channel->shared.control_fd, TND__LIFE_WRITER);
	tnd__peer_lock_held(channel->reader.peer);
	tnd__guest_begin(channel);
	return 0;
}

void tnd__guest_leave(struct tnd_channel *channel, bool goodbye)
{
	struct tnd__reader *reader = &channel->reader;

	if (goodbye && reader->seated) {
		(void)tnd__failpoint("channel.L1");
		/* L1: nothing is written to our place from here on; pairs with W1 and admission. */
		atomic_store_explicit(&channel->shared.control->places[reader->place].left,
				      reader->generation, memory_order_seq_cst);
		tnd__wake_writer(channel);
	}
	tnd__peer_close(reader->peer, goodbye);
	free(reader->borrowed);
}
