/* SPDX-License-Identifier: Apache-2.0 */
/*
 * handover.c - descriptors from one rank to all: by packets through rank 0, agreed on at the end
 *
 *   root                     rank 0                      the others
 *   1 FDS collective n       FDS collective n            FDS collective n
 *   2 packet ------------->  its service passes it on -> inbox
 *   3 FDS_END, n + 1: code   wait for inbox; FDS_END     wait for inbox; FDS_END
 *
 * The first collective makes sure that all want the same, and that root has open descriptors to
 * give; the last one that everybody got them: then all return 0, else all close what came and
 * return the lowest failing rank's code.
 *
 * Nobody waits for a packet that cannot come: who could not send says so, root in its post of
 * FDS_END, rank 0 in `not_relayed` of its row.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "group_internal.h"

enum { PHASE_NONE, PHASE_FETCH, PHASE_AGREE };

void tnd__inbox_clear(struct tnd__inbox *inbox)
{
	for (uint32_t i = 0; i < inbox->count; i++)
		close(inbox->fds[i]);
	memset(inbox, 0, sizeof(*inbox));
}

/* -- packets -- */

/* lock. Rank 0: to all but `from`. Return: 0, -errno. */
static int send_all(struct tnd_group *group, uint32_t from, const struct tnd__packet *packet)
{
	int rc = 0, one;

	for (uint32_t rank = 1; rank < group->rank_count; rank++) {
		if (rank == from || !(group->here & tnd__rank_bit(rank)))
			continue;
		one = tnd__failpoint("group.relay");
		if (one == 0)
			one = tnd__peer_send(group->peers[rank], packet);
		/* Whoever is gone does not need them. */
		if (one < 0 && one != -EPIPE)
			rc = one;
	}
	return rc;
}

/* lock. */
static void put_in_inbox(struct tnd_group *group, const struct tnd__fds_data *data,
			 struct tnd__packet *packet)
{
	tnd__inbox_clear(&group->inbox);
	group->inbox.number = data->number;
	for (uint32_t i = 0; i < packet->fd_count; i++) {
		group->inbox.fds[group->inbox.count++] = packet->fds[i];
		packet->fds[i] = -1;
	}
}

void tnd__handover_packet(struct tnd_group *group, uint32_t from, struct tnd__packet *packet)
{
	struct tnd__fds_data data;

	if (!tnd__packet_read(packet, &data, sizeof(data)) || packet->fd_count > TND_GROUP_FDS_MAX)
		return;
	pthread_mutex_lock(&group->lock);
	/* Pairs with look_inbox(). */
	if (group->rank == 0 &&
	    (packet->fd_count != data.count || send_all(group, from, packet) < 0))
		atomic_store_explicit(&group->board->rows[0].not_relayed, data.number,
				      memory_order_seq_cst);
	put_in_inbox(group, &data, packet);
	tnd__group_wake(group);
	pthread_mutex_unlock(&group->lock);
}

/* Root: number - 1 is the collective in which all said that they wait. Return: 0, -errno. */
static int send_fds(struct tnd_group *group, const int *fds, uint32_t fd_count)
{
	struct tnd__fds_data data = {.number = group->number - 1, .count = fd_count};
	struct tnd__packet packet;
	int rc;

	tnd__packet_make(&packet, TND__GROUP_FDS, &data, sizeof(data));
	packet.fd_count = fd_count;
	memcpy(packet.fds, fds, fd_count * sizeof(*fds));
	rc = tnd__failpoint("group.fds");
	if (rc < 0)
		return rc;
	pthread_mutex_lock(&group->lock);
	rc = group->rank == 0 ? send_all(group, 0, &packet)
			      : tnd__peer_send(group->peers[0], &packet);
	pthread_mutex_unlock(&group->lock);
	return rc;
}

/* -- the call -- */

static bool inbox_has(struct tnd_group *group)
{
	bool has;

	pthread_mutex_lock(&group->lock);
	has = group->inbox.number == group->number - 1;
	pthread_mutex_unlock(&group->lock);
	return has;
}

/* Whether the descriptors came, or will not come. */
static int look_inbox(struct tnd_group *group, struct tnd_error *reterr)
{
	const struct tnd__row *rows = group->board->rows;
	const struct tnd__post *post = &rows[group->open.root].posts[group->number & 1];

	if (inbox_has(group))
		return 1;
	/* Pair with G2, and with the store in tnd__handover_packet(). */
	if (atomic_load_explicit(&post->number, memory_order_seq_cst) == group->number)
		if (atomic_load_explicit(&post->value, memory_order_relaxed) != 0)
			return 1;
	if (atomic_load_explicit(&rows[0].not_relayed, memory_order_seq_cst) == group->number - 1)
		return 1;
	return tnd__meet_look(group, reterr);
}

/* What this rank says at the end. */
static int own_code(struct tnd_group *group, uint32_t fd_count)
{
	const struct tnd__row *rows = group->board->rows;
	int rc = 0;

	pthread_mutex_lock(&group->lock);
	if (group->inbox.number == group->number - 1 && group->inbox.count != fd_count)
		rc = -EMFILE; /* the kernel passes on as many as there is room for */
	else if (group->inbox.number != group->number - 1 &&
		 atomic_load_explicit(&rows[0].not_relayed, memory_order_seq_cst) ==
			 group->number - 1)
		rc = -ENOMEM;
	pthread_mutex_unlock(&group->lock);
	return rc;
}

/* After the last collective: hands them to the caller, or closes them. */
static int take_fds(struct tnd_group *group, int *fds, uint32_t fd_count, int rc)
{
	pthread_mutex_lock(&group->lock);
	/* Everybody said that it has them; if what is here says otherwise, rank 0 sent two. */
	if (rc == 0 && group->rank != group->open.root && fd_count) {
		if (group->inbox.count == fd_count) {
			memcpy(fds, group->inbox.fds, fd_count * sizeof(*fds));
			group->inbox.count = 0;
		} else {
			rc = TND_E_CORRUPT;
		}
	}
	tnd__inbox_clear(&group->inbox);
	pthread_mutex_unlock(&group->lock);
	return rc;
}

static int fetch(struct tnd_group *group, const int *fds, uint32_t fd_count, int64_t deadline_ns,
		 struct tnd_error *reterr)
{
	int rc;

	group->code = 0;
	if (fd_count && group->rank == group->open.root) {
		group->code = send_fds(group, fds, fd_count);
	} else if (fd_count) {
		rc = tnd__meet_wait(group, look_inbox, deadline_ns, reterr);
		if (rc == -ETIMEDOUT)
			return tnd__fail_plain(reterr, rc,
					       "group '%s': the descriptors of rank %u did not "
					       "come through rank 0 before the deadline; calling "
					       "again goes on waiting",
					       group->name, group->open.root);
		if (rc < 0)
			return rc;
		group->code = own_code(group, fd_count);
	}
	group->phase = PHASE_AGREE;
	return 0;
}

static int run(struct tnd_group *group, const struct tnd__meet *meet, int *fds, int64_t deadline_ns,
	       struct tnd_error *reterr)
{
	struct tnd__meet last = *meet;
	int rc;

	if (group->phase == PHASE_NONE) {
		rc = tnd__meet_run(group, meet, deadline_ns, reterr);
		if (rc == 0)
			rc = tnd__meet_first_code(group, reterr);
		if (rc != 0)
			return rc;
		group->phase = PHASE_FETCH;
	}
	if (group->phase == PHASE_FETCH) {
		rc = fetch(group, fds, (uint32_t)meet->bytes, deadline_ns, reterr);
		if (rc < 0)
			return rc;
	}
	last.kind = TND__MEET_FDS_END;
	last.value = (uint64_t)(int64_t)group->code;
	rc = tnd__meet_run(group, &last, deadline_ns, reterr);
	if (group->posted)
		return rc;
	group->phase = PHASE_NONE;
	if (rc == 0)
		rc = tnd__meet_first_code(group, reterr);
	return take_fds(group, fds, (uint32_t)meet->bytes, rc);
}

int tnd_group_share_fds(struct tnd_group *group, uint32_t root, int *fds, uint32_t fd_count,
			int64_t deadline_ns, struct tnd_error *reterr)
{
	struct tnd__meet meet = {.kind = TND__MEET_FDS, .root = root, .bytes = fd_count};
	int rc;

	if (root >= group->rank_count || fd_count > TND_GROUP_FDS_MAX || (fd_count && !fds))
		return tnd__fail_plain(reterr, TND_E_INVALID,
				       "group '%s': expected a root from 0 to %u and 0 to %d "
				       "descriptors, found root %u and %u at %p",
				       group->name, group->rank_count - 1, TND_GROUP_FDS_MAX, root,
				       fd_count, (void *)fds);
	for (uint32_t i = 0; i < fd_count && root == group->rank && !meet.value; i++)
		if (fcntl(fds[i], F_GETFD) < 0)
			meet.value = (uint64_t)(int64_t)-EBADF;
	rc = tnd__meet_enter(group, &meet, reterr);
	if (rc < 0)
		return rc;
	return tnd__meet_leave(group, run(group, &meet, fds, deadline_ns, reterr));
}
