/* SPDX-License-Identifier: Apache-2.0 */
/*
 * share.c - a node's reader from open to close: a load of the union plan whose slabs go out on a
 * channel (outlet.c) instead of to a consumer
 *
 *   open    account and pool -> channel, with HELLO in it -> feeder
 *   end     the feeder is through: everything is read and every member is past it, or all were told
 *           what failed -> the load ends
 *   close   before end: cancels; then as end
 *
 * The outlet is part of the share; the load opens and closes it, and uses it in between.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "outlet.h"

struct tnd_share {
	struct tnd_load *load;
	struct tnd__outlet outlet;
	char *address;
	bool ended;
	int end_code;
	struct tnd_error end_error;
};

#define MEET_NS INT64_C(120000000000)

uint64_t tnd__files_fingerprint(const struct tnd_checkpoint *checkpoint)
{
	uint64_t hash = UINT64_C(14695981039346656037);
	const struct tnd_file *files;
	size_t count;

	files = tnd_checkpoint_files(checkpoint, &count);
	for (size_t i = 0; i < count; i++) {
		struct stat stat = {0};
		uint64_t words[5];

		fstat(files[i].fd, &stat);
		words[0] = (uint64_t)stat.st_dev;
		words[1] = (uint64_t)stat.st_ino;
		words[2] = files[i].bytes;
		words[3] = (uint64_t)stat.st_mtim.tv_sec;
		words[4] = (uint64_t)stat.st_mtim.tv_nsec;
		for (size_t b = 0; b < sizeof(words); b++)
			hash = (hash ^ ((const unsigned char *)words)[b]) * UINT64_C(1099511628211);
	}
	return hash;
}

static int check_opts(const struct tnd_plan *plan, const struct tnd_share_opts *opts,
		      struct tnd_error *reterr)
{
	const struct tnd_plan_member *members;
	size_t count = plan ? tnd_plan_members(plan, &members) : 0;

	if (!count || count > TND_SHARE_MEMBERS_MAX)
		return tnd__fail_plain(reterr, TND_E_INVALID,
				       "expected a plan of tnd_plan_create_union() with 1 to %d "
				       "members, found one with %zu",
				       TND_SHARE_MEMBERS_MAX, count);
	if (opts && (!tnd__struct_ok(opts->struct_bytes, sizeof(*opts), sizeof(*opts)) ||
		     opts->on_dead > TND_SHARE_DEAD_CONTINUE || opts->evict_ns < 0))
		return tnd__fail_plain(
			reterr, TND_E_INVALID,
			"tnd_share_opts: expected values of <tundish/share.h>, found "
			"struct_bytes %u, on_dead %u, evict_ns %lld",
			opts->struct_bytes, opts->on_dead, (long long)opts->evict_ns);
	return 0;
}

static int64_t or_default(int64_t given, int64_t value)
{
	return given ? given : value;
}

static int fill_outlet(struct tnd_share *share, struct tnd_plan *plan,
		       const struct tnd_share_opts *opts)
{
	struct tnd__outlet *outlet = &share->outlet;
	struct tnd_checkpoint *checkpoint = tnd_plan_checkpoint(plan);
	const struct tnd_plan_member *members;

	outlet->member_count = tnd_plan_members(plan, &members);
	outlet->held = calloc(outlet->member_count, sizeof(*outlet->held));
	outlet->table = malloc(TND__STREAM_OBJECT_MAX);
	if (!outlet->held || !outlet->table || tnd__failpoint("load.alloc") < 0)
		return -ENOMEM;
	for (size_t i = 0; i < outlet->member_count; i++) {
		outlet->held[i].rank = members[i].rank;
		outlet->set_aside_bytes += members[i].metadata_bytes + members[i].staging_bytes;
	}
	outlet->tensors = tnd_checkpoint_tensors(checkpoint, &(size_t){0});
	outlet->files = tnd__files_fingerprint(checkpoint);
	outlet->on_dead = opts->on_dead;
	outlet->meet_ns = or_default(opts->meet_ns, MEET_NS);
	outlet->stall_ns = or_default(opts->stall_ns, TND__STALL_NS);
	outlet->evict_ns = opts->evict_ns;
	return 0;
}

int tnd__outlet_open(struct tnd__outlet *outlet, struct tnd_load *load, const char *address,
		     struct tnd_error *reterr)
{
	uint32_t ranks[TND_SHARE_MEMBERS_MAX];
	uint64_t slab = TND__MAX(load->totals.slab_capacity_bytes, load->totals.slab_bytes_max);
	struct tnd_channel_opts opts = {.struct_bytes = sizeof(opts),
					.max_bytes = TND__STREAM_RING_BYTES,
					.max_objects = TND__STREAM_OBJECTS,
					.reserved_readers = (uint32_t)outlet->member_count,
					.reserved_ranks = ranks,
					.open_readers = TND_SHARE_GUESTS_MAX,
					.name = "load",
					.address = address,
					.budget = load->budget,
					.pool = load->pool,
					.max_object_bytes = TND__MAX(slab, TND__PAGE),
					.warn_ns = -1};
	int rc;

	outlet->load = load;
	for (size_t i = 0; i < outlet->member_count; i++)
		ranks[i] = outlet->held[i].rank;
	rc = tnd_channel_create(&opts, &outlet->channel, reterr);
	return rc < 0 ? rc : tnd__outlet_hello(outlet, reterr);
}

static void free_share(struct tnd_share *share)
{
	if (share->load)
		tnd_load_close(share->load);
	free(share->outlet.held);
	free(share->outlet.table);
	free(share->address);
	free(share);
}

int tnd_share_open(struct tnd_plan *plan, const struct tnd_share_opts *opts,
		   struct tnd_share **ret_share, struct tnd_error *reterr)
{
	static const struct tnd_share_opts defaults = {.struct_bytes = sizeof(defaults)};
	struct tnd_share *share;
	int rc = check_opts(plan, opts, reterr);

	if (rc < 0)
		return rc;
	opts = opts ? opts : &defaults;
	share = tnd__failpoint("load.alloc") < 0 ? NULL : calloc(1, sizeof(*share));
	rc = share ? fill_outlet(share, plan, opts) : -ENOMEM;
	if (rc == 0)
		rc = tnd__load_open_reader(plan, opts->load, &share->outlet, opts->address,
					   &share->load, reterr);
	else
		tnd__fail_plain(reterr, rc, "out of memory for a shared load");
	if (rc == 0) {
		share->address = strdup(tnd_channel_address(share->outlet.channel));
		if (!share->address)
			rc = tnd__fail_plain(reterr, -ENOMEM, "out of memory for a shared load");
	}
	if (rc < 0) {
		if (share)
			free_share(share);
		return rc;
	}
	*ret_share = share;
	return 0;
}

const char *tnd_share_address(const struct tnd_share *share)
{
	return share->address;
}

void tnd_share_cancel(struct tnd_share *share)
{
	tnd_load_cancel(share->load);
}

static void wait_through(struct tnd_share *share)
{
	struct tnd__flow *flow = share->load->flow;

	pthread_mutex_lock(&flow->lock);
	while (!share->outlet.through)
		tnd__flow_wait(flow, &flow->consumer, TND__POLL_NS);
	pthread_mutex_unlock(&flow->lock);
}

int tnd_share_end(struct tnd_share *share, struct tnd_error *reterr)
{
	if (!share->ended) {
		wait_through(share);
		share->end_code = tnd_load_end(share->load, &share->end_error);
		share->ended = true;
	}
	if (share->end_code < 0 && reterr)
		*reterr = share->end_error;
	return share->end_code;
}

void tnd_share_close(struct tnd_share *share)
{
	if (!share)
		return;
	if (!share->ended)
		tnd_share_cancel(share);
	tnd_share_end(share, NULL);
	free_share(share);
}

int tnd_share_stats(struct tnd_share *share, struct tnd_load_stats *ret_stats)
{
	struct tnd__flow *flow = share->load->flow;
	uint64_t aside = share->outlet.set_aside_bytes;
	int rc = tnd_load_stats(share->load, ret_stats);

	if (rc < 0)
		return rc;
	/* What members set aside they account for themselves. The end has given it back. */
	ret_stats->peak_charged_bytes -= TND__MIN(ret_stats->peak_charged_bytes, aside);
	pthread_mutex_lock(&flow->lock);
	if (!share->load->ended)
		ret_stats->charged_bytes -= TND__MIN(ret_stats->charged_bytes, aside);
	pthread_mutex_unlock(&flow->lock);
	return 0;
}

int tnd_share_report_json(struct tnd_share *share, char **ret_text)
{
	return share->ended ? tnd__share_report(&share->outlet, ret_text) : TND_E_INVALID;
}
