/* SPDX-License-Identifier: Apache-2.0 */
/*
 * members.c - who is in a group and who is gone: what the service thread is told
 *
 *   rank r                         rank 0
 *   HELLO (r, versions)   ------>  place free?
 *                         <------  WELCOME (rank count, the board's descriptor)
 *   HERE                  ------>  can be sent packets; all here?
 *                         <------  PIDFDS (of all others), to each rank
 *                         <------  GONE (dead, left), when somebody is
 *   FDS                   <----->  handover.c
 *
 * From PIDFDS on each process watches every other one by itself, so that a death is seen even while
 * rank 0 is stopped. Where rank 0 has no pidfd of a rank, or it did not get through (no descriptor
 * free), the rank's life lock on the board is looked at instead: each takes it before HERE. Before
 * that rank 0 tells.
 *
 * Who closes sets `left` in its row first, so that the end of its process, which may be seen before
 * the goodbye, is not taken for a death.
 */
#include <errno.h>
#include <string.h>

#include "group_internal.h"

/* -- gone -- */

/* lock. Rank 0: what it knows of the ranks that are gone, to one of them. */
static void tell_gone(struct tnd_group *group, uint32_t rank)
{
	struct tnd__gone_data gone = {
		.dead = atomic_load_explicit(&group->dead, memory_order_seq_cst),
		.left = atomic_load_explicit(&group->left, memory_order_seq_cst),
	};
	struct tnd__packet packet;

	tnd__packet_make(&packet, TND__GROUP_GONE, &gone, sizeof(gone));
	/* A failure is made good by the other's own watch. */
	tnd__peer_send(group->peers[rank], &packet);
}

static void mark_gone(struct tnd_group *group, uint32_t rank, bool dead)
{
	uint64_t bit = tnd__rank_bit(rank), before;

	pthread_mutex_lock(&group->lock);
	/* Pairs with L1 in tnd_group_close(). */
	if (group->board &&
	    atomic_load_explicit(&group->board->rows[rank].left, memory_order_seq_cst))
		dead = false;
	/* Pairs with H3. */
	before = atomic_fetch_or_explicit(dead ? &group->dead : &group->left, bit,
					  memory_order_seq_cst);
	if (group->board)
		tnd__group_wake(group);
	for (uint32_t other = 1; group->rank == 0 && other < group->rank_count; other++)
		if (!(before & bit) && other != rank && (group->here & tnd__rank_bit(other)))
			tell_gone(group, other);
	pthread_mutex_unlock(&group->lock);
}

void tnd__group_on_end(void *owner, uint64_t tag)
{
	mark_gone(owner, (uint32_t)tag, true);
}

static void on_gone(void *owner, struct tnd__peer *peer, int how)
{
	struct tnd_group *group = owner;
	uint32_t rank = (uint32_t)tnd__peer_tag(peer);
	bool gave_up = false;

	pthread_mutex_lock(&group->lock);
	/* Said goodbye before it was one of us: its attach failed, and may be tried again. */
	if (group->rank == 0 && how == TND__GONE_LEFT && !(group->here & tnd__rank_bit(rank)) &&
	    group->peers[rank] == peer) {
		group->peers[rank] = NULL;
		gave_up = true;
	}
	pthread_mutex_unlock(&group->lock);
	if (gave_up)
		tnd__peer_close(peer, false);
	else
		mark_gone(group, rank, how == TND__GONE_DEAD);
}

/* -- rank 0: admission -- */

/* lock. */
static int admit(struct tnd_group *group, const struct tnd__hello_data *hello,
		 struct tnd_error *error)
{
	uint64_t dead = atomic_load_explicit(&group->dead, memory_order_seq_cst);
	uint64_t left = atomic_load_explicit(&group->left, memory_order_seq_cst);
	char ranks[400];

	if (hello->rank == 0 || hello->rank >= group->rank_count)
		return tnd__fail_plain(error, TND_E_PLACE,
				       "group '%s' has %u ranks: expected a rank from 1 to %u to "
				       "attach, found %u",
				       group->name, group->rank_count, group->rank_count - 1,
				       hello->rank);
	if (dead || left) {
		int code = dead ? TND_E_PEER_DEAD : TND_E_CLOSED;

		return tnd__fail_rank(error, code, __builtin_ctzll(dead ? dead : left),
				      "group '%s': %s %s already; make a new group", group->name,
				      tnd__ranks_text(dead ? dead : left, ranks, sizeof(ranks)),
				      dead ? "died" : "left");
	}
	if (group->peers[hello->rank])
		return tnd__fail_plain(error, TND_E_PLACE,
				       "group '%s': rank %u is taken by process %d; each process "
				       "needs a rank of its own",
				       group->name, hello->rank,
				       tnd__peer_pid(group->peers[hello->rank]));
	return 0;
}

static int on_hello(void *owner, struct tnd__peer *peer, struct tnd__packet *packet,
		    struct tnd__packet *reply, struct tnd_error *error)
{
	struct tnd_group *group = owner;
	struct tnd__welcome_data welcome = {.rank_count = group->rank_count};
	struct tnd__hello_data hello;
	struct tnd__watch *watch = NULL;
	int rc;

	if (packet->kind != TND__GROUP_HELLO || !tnd__packet_read(packet, &hello, sizeof(hello)))
		return tnd__fail_plain(error, TND_E_ADDRESS,
				       "%s is the address of group '%s'; give one to "
				       "tnd_group_attach only",
				       group->address, group->name);
	if (hello.protocol != TND__GROUP_PROTOCOL || hello.board_version != TND__BOARD_VERSION)
		return tnd__fail_plain(error, TND_E_VERSION,
				       "group '%s' speaks version %u.%u, rank %u version %u.%u; "
				       "use one release on all ranks",
				       group->name, TND__GROUP_PROTOCOL, TND__BOARD_VERSION,
				       hello.rank, hello.protocol, hello.board_version);
	pthread_mutex_lock(&group->lock);
	rc = admit(group, &hello, error);
	if (rc == 0) {
		group->peers[hello.rank] = peer;
		watch = group->watches[hello.rank];
		group->watches[hello.rank] = NULL;
	}
	pthread_mutex_unlock(&group->lock);
	if (rc < 0)
		return rc;
	tnd__watch_close(watch);
	tnd__peer_set_tag(peer, hello.rank);
	tnd__packet_make(reply, TND__GROUP_WELCOME, &welcome, sizeof(welcome));
	reply->fds[reply->fd_count++] = group->board_fd;
	return 0;
}

/* lock. The descriptors of all other ranks' processes to one. Return: 0, -errno. */
static int send_pidfds(struct tnd_group *group, uint32_t to)
{
	struct tnd__pidfds_data data = {0};
	struct tnd__packet packet;
	int rc = 0;

	tnd__packet_make(&packet, TND__GROUP_PIDFDS, NULL, 0);
	for (uint32_t rank = 1; rank < group->rank_count && rc == 0; rank++) {
		int fd = tnd__peer_pidfd(group->peers[rank]);

		if (rank != to && fd >= 0) {
			data.ranks |= tnd__rank_bit(rank);
			packet.fds[packet.fd_count++] = fd;
		}
		data.last = rank + 1 == group->rank_count;
		if (packet.fd_count < TND__PACKET_FDS_MAX && !data.last)
			continue;
		packet.bytes = sizeof(data);
		memcpy(packet.data, &data, sizeof(data));
		rc = tnd__peer_send(group->peers[to], &packet);
		/* Whoever is gone needs none. */
		rc = rc == -EPIPE ? 0 : rc;
		data.ranks = 0;
		packet.fd_count = 0;
	}
	return rc;
}

static void on_here(struct tnd_group *group, struct tnd__peer *peer, uint32_t rank)
{
	uint64_t others = tnd__ranks_all(group) & ~tnd__rank_bit(0);
	int rc = 0;

	tnd__peer_watch_lock(peer, group->board_fd, TND__LIFE_RANK(rank));
	pthread_mutex_lock(&group->lock);
	/* Not twice, and not once we are closing. */
	if (group->here & tnd__rank_bit(rank) || group->peers[rank] != peer)
		goto unlock;
	group->here |= tnd__rank_bit(rank);
	if (atomic_load_explicit(&group->dead, memory_order_seq_cst) |
	    atomic_load_explicit(&group->left, memory_order_seq_cst))
		tell_gone(group, rank);
	if (group->here != others)
		goto unlock;
	for (uint32_t to = 1; to < group->rank_count && rc == 0; to++)
		rc = send_pidfds(group, to);
	/* Pair with look_watching() in collective.c. */
	if (rc < 0)
		atomic_store_explicit(&group->watch_error, rc, memory_order_seq_cst);
	atomic_store_explicit(&group->watching, 1, memory_order_seq_cst);
	tnd__group_wake(group);
unlock:
	pthread_mutex_unlock(&group->lock);
}

/* -- the other ranks -- */

/* lock. `pid_fd`: taken over; -1: by its life lock. */
static int watch_rank(struct tnd_group *group, uint32_t rank, int pid_fd)
{
	const struct tnd__life life = {pid_fd, group->board_fd, TND__LIFE_RANK(rank)};

	return tnd__watch_open_life(&life, tnd__group_on_end, group, rank, &group->watches[rank]);
}

/* What no pidfd came for is watched by its lock. */
static int watch_locks(struct tnd_group *group)
{
	int rc = 0;

	for (uint32_t rank = 1; rank < group->rank_count && rc == 0; rank++)
		if (rank != group->rank && !group->watches[rank])
			rc = watch_rank(group, rank, -1);
	return rc;
}

static void on_pidfds(struct tnd_group *group, struct tnd__packet *packet)
{
	struct tnd__pidfds_data data;
	uint32_t used = 0;
	int rc = 0;

	if (!tnd__packet_read(packet, &data, sizeof(data)))
		return;
	data.ranks &= tnd__ranks_all(group) & ~tnd__rank_bit(group->rank);
	pthread_mutex_lock(&group->lock);
	for (uint32_t rank = 1; rank < group->rank_count && used < packet->fd_count; rank++) {
		if (!(data.ranks & tnd__rank_bit(rank)) || group->watches[rank])
			continue;
		if (rc == 0 && tnd__failpoint("group.watch") == 0) {
			rc = watch_rank(group, rank, packet->fds[used]);
			packet->fds[used] = -1;
		}
		used++;
	}
	if (rc == 0 && data.last)
		rc = watch_locks(group);
	/* Pair with look_watching() in collective.c. */
	if (rc < 0)
		atomic_store_explicit(&group->watch_error, rc, memory_order_seq_cst);
	if (data.last) {
		atomic_store_explicit(&group->watching, 1, memory_order_seq_cst);
		tnd__group_wake(group);
	}
	pthread_mutex_unlock(&group->lock);
}

static void on_told_gone(struct tnd_group *group, const struct tnd__packet *packet)
{
	struct tnd__gone_data gone;

	if (!tnd__packet_read(packet, &gone, sizeof(gone)))
		return;
	for (uint32_t rank = 0; rank < group->rank_count; rank++) {
		uint64_t bit = tnd__rank_bit(rank);

		if (rank != group->rank && (gone.dead | gone.left) & bit)
			mark_gone(group, rank, !(gone.left & bit));
	}
}

static void on_packet(void *owner, struct tnd__peer *peer, struct tnd__packet *packet)
{
	struct tnd_group *group = owner;
	uint32_t rank = (uint32_t)tnd__peer_tag(peer);

	if (packet->kind == TND__GROUP_FDS)
		tnd__handover_packet(group, rank, packet);
	else if (group->rank == 0 && packet->kind == TND__GROUP_HERE)
		on_here(group, peer, rank);
	else if (group->rank != 0 && packet->kind == TND__GROUP_PIDFDS)
		on_pidfds(group, packet);
	else if (group->rank != 0 && packet->kind == TND__GROUP_GONE)
		on_told_gone(group, packet);
}

const struct tnd__peer_ops tnd__group_ops = {
	.on_hello = on_hello,
	.on_packet = on_packet,
	.on_gone = on_gone,
};
