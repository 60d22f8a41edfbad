/* SPDX-License-Identifier: Apache-2.0 */
/*
 * notice.c - an error that the writer tells its readers, ahead of all that they have not read
 *
 *   tnd__bulk_tell() --> packet on each connection --> service thread --> told, local_word += 1
 *                        (admission: behind the answer)
 *
 * What goes through the ring is in order and may wait; this overtakes it. A writer that closes then
 * does not say so in shared memory, which would overtake the packet: readers learn of it from the
 * goodbye, which comes behind.
 */
#include <limits.h>
#include <string.h>

#include "bulk.h"
#include "channel_internal.h"

/* To every reader that has not been told. Under lock. */
static void tell_all(struct tnd_channel *channel)
{
	struct tnd__packet packet;

	tnd__packet_make(&packet, TND__PACKET_TELL, &channel->notice, sizeof(channel->notice));
	for (uint32_t i = 0; i < channel->shared.place_count; i++) {
		struct tnd__place *place = &channel->writer.places[i];

		if (place->peer && place->state == TND__PLACE_LIVE &&
		    place->told_generation != place->generation &&
		    tnd__failpoint("channel.tell") == 0 &&
		    tnd__peer_send(place->peer, &packet) == 0)
			place->told_generation = place->generation;
	}
}

/* Any bytes, as text that can be shown. `out_bytes`: of both. */
static void put_text(const char *text, char *out, size_t out_bytes)
{
	tnd__printable(text, strnlen(text, out_bytes), out, out_bytes);
}

void tnd__bulk_tell(struct tnd_channel *channel, const struct tnd_error *error)
{
	struct tnd__notice *notice = &channel->notice;
	const char *message = error->message[0] ? error->message : tnd_strerror(error->code);

	assert(error->code < 0);
	if (tnd__channel_forked(channel) || !channel->is_writer)
		return;
	pthread_mutex_lock(&channel->lock);
	if (!notice->code) {
		notice->code = error->code;
		notice->rank = error->rank;
		notice->byte_offset = error->byte_offset;
		put_text(message, notice->message, sizeof(notice->message));
		put_text(error->file, notice->file, sizeof(notice->file));
		put_text(error->name, notice->name, sizeof(notice->name));
	}
	tell_all(channel);
	pthread_mutex_unlock(&channel->lock);
}

void tnd__notice_greet(struct tnd_channel *channel, struct tnd__peer *peer)
{
	struct tnd__place *place;

	pthread_mutex_lock(&channel->lock);
	place = &channel->writer.places[(uint32_t)tnd__peer_tag(peer)];
	if (channel->notice.code && place->peer == peer)
		tell_all(channel);
	pthread_mutex_unlock(&channel->lock);
}

bool tnd__notice_last(struct tnd_channel *channel)
{
	bool any;

	pthread_mutex_lock(&channel->lock);
	any = channel->notice.code != 0;
	if (any)
		tell_all(channel);
	pthread_mutex_unlock(&channel->lock);
	return any;
}

/* -- the readers' side -- */

void tnd__notice_arrived(struct tnd_channel *channel, const struct tnd__packet *packet)
{
	struct tnd__notice notice;

	if (!tnd__packet_read(packet, &notice, sizeof(notice)))
		return;
	pthread_mutex_lock(&channel->lock);
	if (!channel->notice.code) {
		/* No code that a working writer tells: but it has told that it is over. */
		channel->notice.code = notice.code < 0 ? notice.code : TND_E_CORRUPT;
		channel->notice.rank = notice.rank < 0 ? -1 : notice.rank;
		channel->notice.byte_offset = notice.byte_offset;
		put_text(notice.message, channel->notice.message, sizeof(notice.message));
		put_text(notice.file, channel->notice.file, sizeof(notice.file));
		put_text(notice.name, channel->notice.name, sizeof(notice.name));
	}
	pthread_mutex_unlock(&channel->lock);
	/* As P1 to P3; pairs with tnd__is_told() and the sample of `local_word`. */
	atomic_store_explicit(&channel->reader.told, 1, memory_order_seq_cst);
	atomic_fetch_add_explicit(&channel->local_word, 1, memory_order_seq_cst);
	tnd__futex_wake_local(&channel->local_word, INT_MAX);
}

int tnd__bulk_told(struct tnd_channel *channel, struct tnd_error *reterr)
{
	int code;

	if (tnd__channel_forked(channel) || channel->is_writer || !tnd__is_told(channel))
		return 0;
	pthread_mutex_lock(&channel->lock);
	code = tnd__fail_rank(reterr, channel->notice.code, channel->notice.rank, "%s",
			      channel->notice.message);
	if (reterr) {
		reterr->byte_offset = channel->notice.byte_offset;
		put_text(channel->notice.file, reterr->file, sizeof(reterr->file));
		put_text(channel->notice.name, reterr->name, sizeof(reterr->name));
	}
	pthread_mutex_unlock(&channel->lock);
	return code;
}
