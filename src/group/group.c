/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group.c - a group's handle: options, create, attach, expect, cancel, close
 *
 *   L1 row.left = 1   L2 word += 1   L3 wake   L4 goodbye on the sockets
 *
 * docs/design/group.md says how the parts work together; group_internal.h which file has what.
 */
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "group_internal.h"

/* -- the handle -- */

static bool one_each(uint32_t rank_count)
{
	cpu_set_t set;

	return sched_getaffinity(0, sizeof(set), &set) < 0 ||
	       (uint32_t)CPU_COUNT(&set) >= rank_count;
}

static struct tnd_group *make(uint32_t rank, uint32_t rank_count)
{
	struct tnd_group *group =
		tnd__failpoint("group.alloc") < 0 ? NULL : calloc(1, sizeof(*group));

	if (!group)
		return NULL;
	if (pthread_mutex_init(&group->lock, NULL) != 0) {
		free(group);
		return NULL;
	}
	group->board_fd = -1;
	group->rank = rank;
	group->rank_count = rank_count;
	group->number = 1;
	group->forkmark = tnd__forkmark();
	return group;
}

/* Spinning takes processors from the ranks that are waited for where there are fewer than ranks. */
static void spin_where_it_pays(struct tnd_group *group)
{
	tnd__spin_init(&group->spin, one_each(group->rank_count) ? 0 : UINT64_MAX);
}

/* Ends what the service does for the group: first who may bring new watches, then those. */
static void part(struct tnd_group *group)
{
	tnd__listener_close(group->listener);
	for (uint32_t rank = 0; rank < TND_GROUP_RANKS_MAX; rank++) {
		struct tnd__peer *peer;

		/* A callback may be about to close the same, or to send to it. */
		pthread_mutex_lock(&group->lock);
		peer = group->peers[rank];
		group->peers[rank] = NULL;
		group->here &= ~tnd__rank_bit(rank);
		pthread_mutex_unlock(&group->lock);
		tnd__peer_close(peer, true);
	}
	for (uint32_t rank = 0; rank < TND_GROUP_RANKS_MAX; rank++)
		tnd__watch_close(group->watches[rank]);
}

static void part_forked(struct tnd_group *group)
{
	/* No lock: the parent's service thread may have had it when the process forked. */
	tnd__listener_close(group->listener);
	for (uint32_t rank = 0; rank < TND_GROUP_RANKS_MAX; rank++) {
		tnd__watch_close(group->watches[rank]);
		tnd__peer_close(group->peers[rank], false);
	}
}

static void destroy(struct tnd_group *group)
{
	bool forked = tnd__group_forked(group);

	if (forked)
		part_forked(group);
	else
		part(group);
	tnd__inbox_clear(&group->inbox);
	tnd__board_unmap(group->board);
	if (group->board_fd >= 0)
		close(group->board_fd);
	if (!forked) {
		pthread_mutex_destroy(&group->lock);
		tnd__service_unref();
	}
	free(group);
}

void tnd_group_close(struct tnd_group *group)
{
	if (!group)
		return;
	if (!tnd__group_forked(group)) {
		tnd__failpoint("group.L1");
		/* L1: pairs with left_of() and mark_gone(). */
		atomic_store_explicit(&group->board->rows[group->rank].left, 1,
				      memory_order_seq_cst);
		tnd__failpoint("group.L2");
		tnd__group_wake(group);
		tnd__failpoint("group.L4");
	}
	destroy(group);
}

/* -- create -- */

static int check_opts(const struct tnd_group_opts *opts, struct tnd_error *reterr)
{
	if (!opts || !tnd__struct_ok(opts->struct_bytes, sizeof(*opts), sizeof(*opts)))
		return tnd__fail_plain(reterr, TND_E_INVALID,
				       "tnd_group_opts: expected struct_bytes %zu, found %u; set "
				       "it to sizeof(struct tnd_group_opts)",
				       sizeof(*opts), opts ? opts->struct_bytes : 0);
	if (opts->rank_count < 1 || opts->rank_count > TND_GROUP_RANKS_MAX)
		return tnd__fail_plain(reterr, TND_E_INVALID,
				       "a group has 1 to %d ranks, found rank_count %u",
				       TND_GROUP_RANKS_MAX, opts->rank_count);
	return 0;
}

static int service_ref(struct tnd_error *reterr)
{
	int rc = tnd__service_ref();

	if (rc < 0)
		tnd__fail_plain(reterr, rc,
				"a group needs a service thread, which cannot be started (%s); end "
				"what uses up threads, descriptors or memory, or raise the limits "
				"(ulimit -u, -n)",
				tnd_strerror(rc));
	return rc;
}

static int no_handle(struct tnd_error *reterr)
{
	return tnd__fail_plain(reterr, -ENOMEM,
			       "a group's handle takes %zu bytes of memory, found none; end what "
			       "takes memory, or raise the limit (ulimit -v)",
			       sizeof(struct tnd_group));
}

static void set_present(struct tnd_group *group)
{
	/* Pairs with say_missing(). */
	atomic_store_explicit(&group->board->rows[group->rank].present, 1, memory_order_release);
}

static int open_first(struct tnd_group *group, const struct tnd_group_opts *opts,
		      struct tnd_error *reterr)
{
	struct tnd__listener *listener;
	int rc;

	rc = tnd__board_create(group->rank_count, group->name, &group->board, &group->board_fd,
			       reterr);
	if (rc < 0)
		return rc;
	/* Without the lock a peer that has no pidfd of us goes by the connection alone. */
	tnd__life_lock(group->board_fd, TND__LIFE_RANK(0));
	set_present(group);
	/* relaxed: nobody else has the handle yet. */
	atomic_store_explicit(&group->watching, group->rank_count == 1, memory_order_relaxed);
	if (opts->address)
		snprintf(group->address, sizeof(group->address), "%s", opts->address);
	rc = tnd__listener_open(opts->address, &tnd__group_ops, group, &listener, reterr);
	if (rc < 0)
		return rc;
	/* Ranks may be attaching already: on_hello() shows the address. */
	pthread_mutex_lock(&group->lock);
	group->listener = listener;
	snprintf(group->address, sizeof(group->address), "%s", tnd__listener_address(listener));
	pthread_mutex_unlock(&group->lock);
	return 0;
}

int tnd_group_create(const struct tnd_group_opts *opts, struct tnd_group **ret_group,
		     struct tnd_error *reterr)
{
	struct tnd_group *group;
	int rc = check_opts(opts, reterr);

	if (rc == 0)
		rc = service_ref(reterr);
	if (rc < 0)
		return rc;
	group = make(0, opts->rank_count);
	if (!group) {
		tnd__service_unref();
		return no_handle(reterr);
	}
	tnd__printable(opts->name ? opts->name : "", opts->name ? strlen(opts->name) : 0,
		       group->name, sizeof(group->name));
	spin_where_it_pays(group);
	rc = open_first(group, opts, reterr);
	if (rc < 0) {
		destroy(group);
		return rc;
	}
	*ret_group = group;
	return 0;
}

/* -- attach -- */

static int use_welcome(struct tnd_group *group, struct tnd__packet *reply, struct tnd_error *reterr)
{
	struct tnd__welcome_data welcome;
	struct tnd__board *board;
	char name[TND__BOARD_NAME];
	int rc;

	if (reply->kind != TND__GROUP_WELCOME ||
	    !tnd__packet_read(reply, &welcome, sizeof(welcome)) || reply->fd_count != 1 ||
	    welcome.rank_count <= group->rank || welcome.rank_count > TND_GROUP_RANKS_MAX)
		return tnd__fail_plain(reterr, TND_E_CORRUPT,
				       "%s: who listens there did not answer like a group with "
				       "rank %u; is it a group's address?",
				       group->address, group->rank);
	rc = tnd__board_attach(reply->fds[0], &board, reterr);
	if (rc < 0)
		return rc;
	memcpy(name, board->name, sizeof(name));
	pthread_mutex_lock(&group->lock);
	tnd__printable(name, strnlen(name, sizeof(name)), group->name, sizeof(group->name));
	group->rank_count = welcome.rank_count;
	group->board_fd = reply->fds[0];
	group->board = board;
	reply->fds[0] = -1;
	pthread_mutex_unlock(&group->lock);
	return 0;
}

static int say_here(struct tnd_group *group, struct tnd_error *reterr)
{
	struct tnd__packet here;
	int rc;

	/* Without the lock a peer that has no pidfd of us goes by the connection alone. */
	tnd__life_lock(group->board_fd, TND__LIFE_RANK(group->rank));
	tnd__peer_watch_lock(group->peers[0], group->board_fd, TND__LIFE_RANK(0));
	set_present(group);
	tnd__packet_make(&here, TND__GROUP_HERE, NULL, 0);
	rc = tnd__peer_send(group->peers[0], &here);
	if (rc == -EPIPE)
		return tnd__fail_plain(reterr, TND_E_CLOSED,
				       "group '%s': rank 0 is gone; make a new group", group->name);
	if (rc < 0)
		return tnd__fail_plain(reterr, rc, "group '%s': a message to rank 0: %s",
				       group->name, tnd_strerror(rc));
	return 0;
}

static int join(struct tnd_group *group, int64_t deadline_ns, struct tnd_error *reterr)
{
	struct tnd__hello_data data = {
		.protocol = TND__GROUP_PROTOCOL,
		.board_version = TND__BOARD_VERSION,
		.rank = group->rank,
	};
	struct tnd__packet hello, reply = {0};
	const struct tnd__connect to = {.address = group->address,
					.what = "group",
					.hello = &hello,
					.deadline_ns = deadline_ns,
					.ops = &tnd__group_ops,
					.owner = group};
	int rc;

	tnd__packet_make(&hello, TND__GROUP_HELLO, &data, sizeof(data));
	rc = tnd__peer_connect(&to, &group->peers[0], &reply, reterr);
	/* Nobody listens: with deadline 0, too, that is what the header calls it. */
	if (rc == -ECONNREFUSED && reterr)
		reterr->code = -ETIMEDOUT;
	if (rc < 0)
		return rc == -ECONNREFUSED ? -ETIMEDOUT : rc;
	rc = use_welcome(group, &reply, reterr);
	tnd__packet_close_fds(&reply);
	return rc < 0 ? rc : say_here(group, reterr);
}

int tnd_group_attach(const char *address, uint32_t rank, int64_t deadline_ns,
		     struct tnd_group **ret_group, struct tnd_error *reterr)
{
	struct tnd_group *group;
	int rc;

	if (rank == 0 || rank >= TND_GROUP_RANKS_MAX)
		return tnd__fail_plain(reterr, TND_E_PLACE,
				       "expected a rank from 1 to %d to attach (rank 0 creates the "
				       "group), found %u",
				       TND_GROUP_RANKS_MAX - 1, rank);
	if (!address || strlen(address) >= TND__ADDRESS_BYTES)
		return tnd__fail_plain(reterr, TND_E_ADDRESS,
				       "expected an address of 1 to %d bytes, found %zu; take the "
				       "one that tnd_group_address gave to rank 0",
				       TND__ADDRESS_BYTES - 1, address ? strlen(address) : 0);
	rc = service_ref(reterr);
	if (rc < 0)
		return rc;
	/* Until rank 0 says how many there are; callbacks bound ranks by it. */
	group = make(rank, 1);
	if (!group) {
		tnd__service_unref();
		return no_handle(reterr);
	}
	snprintf(group->address, sizeof(group->address), "%s", address);
	rc = join(group, deadline_ns, reterr);
	if (rc < 0) {
		destroy(group);
		return rc;
	}
	spin_where_it_pays(group);
	*ret_group = group;
	return 0;
}

/* -- the rest -- */

const char *tnd_group_address(const struct tnd_group *group)
{
	return group->address;
}

uint32_t tnd_group_rank(const struct tnd_group *group)
{
	return group->rank;
}

uint32_t tnd_group_rank_count(const struct tnd_group *group)
{
	return group->rank_count;
}

int tnd_group_expect(struct tnd_group *group, uint32_t rank, int32_t pid, struct tnd_error *reterr)
{
	struct tnd__watch *watch, *old;
	int rc;

	if (tnd__group_forked(group))
		return tnd__fail_plain(reterr, TND_E_FORKED,
				       "group '%s': the handle was made before a fork and belongs "
				       "to the parent",
				       group->name);
	if (group->rank != 0 || rank == 0 || rank >= group->rank_count)
		return tnd__fail_plain(reterr, TND_E_INVALID,
				       "group '%s': rank 0 expects ranks 1 to %u, found rank %u "
				       "expecting %u",
				       group->name, group->rank_count - 1, group->rank, rank);
	rc = tnd__watch_open(pid, tnd__group_on_end, group, rank, &watch);
	if (rc < 0)
		return tnd__fail_plain(reterr, rc,
				       "group '%s': watching process %d, expected as rank %u: %s",
				       group->name, pid, rank, tnd_strerror(rc));
	pthread_mutex_lock(&group->lock);
	old = watch;
	/* Once it has come its connection tells. */
	if (!group->peers[rank]) {
		old = group->watches[rank];
		group->watches[rank] = watch;
	}
	pthread_mutex_unlock(&group->lock);
	tnd__watch_close(old);
	return 0;
}

void tnd_group_cancel(struct tnd_group *group)
{
	int saved = errno;

	/* The board is the parent's: a child would wake its ranks. */
	if (!group || tnd__group_forked(group))
		return;
	/* Pairs with H3. */
	atomic_store_explicit(&group->cancelled, 1, memory_order_seq_cst);
	tnd__group_wake(group);
	errno = saved;
}

void tnd_group_rearm(struct tnd_group *group)
{
	if (group && !tnd__group_forked(group))
		atomic_store_explicit(&group->cancelled, 0, memory_order_seq_cst);
}
