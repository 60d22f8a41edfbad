/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slabmake.c - objects by slab: the writer's memory, made, given its pages, retired
 *
 *   budget (the pool's) -> memfd -> pages -> not in forked children -> seals
 *
 * The limits are looked at for the whole slab, and pages are taken for the object that it is made
 * for; a larger one later takes the rest. An index has another serial each time: that is how
 * readers tell a slab from the one that was retired there.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "bigobject.h"
#include "memory/headroom.h"
#include "segment.h"

/* Pages for the first `bytes`. `headroom`: of which they are a part. */
static int take_pages(struct tnd__host_slab *slab, uint64_t bytes, struct tnd__headroom *headroom,
		      struct tnd_error *reterr)
{
	uint64_t to = TND__MIN(tnd__round_up(bytes, TND__PAGE), slab->bytes);
	int rc;

	if (to <= slab->taken)
		return 0;
	rc = tnd__headroom_take(headroom, tnd_slab_fd(slab->slab), slab->taken, to, reterr);
	if (rc == 0)
		slab->taken = to;
	return rc;
}

static int say_no_slab(const struct tnd_channel *channel, int code, uint64_t bytes,
		       struct tnd_error *reterr)
{
	return tnd__fail_plain(reterr, code,
			       "expected a slab of %" PRIu64
			       " bytes for an object of channel '%s', found %s: %s; raise that "
			       "limit, or send it in parts",
			       bytes, channel->shared.name, tnd_error_name(code),
			       tnd_strerror(code));
}

/* Memory of `capacity` for `slab`, with pages for `bytes`, sealed. Return: 0; -EAGAIN (budget). */
static int make_memory(struct tnd_channel *channel, struct tnd__host_slab *slab, uint64_t bytes,
		       uint64_t capacity, struct tnd_error *reterr)
{
	struct tnd_charge_opts how = {.struct_bytes = sizeof(how),
				      .flags = channel->slabs->overrun ? TND_CHARGE_F_OVERRUN
								       : TND_CHARGE_F_TRY};
	struct tnd__headroom headroom;
	struct stat stat;
	char what[128];
	int rc;

	snprintf(what, sizeof(what), "a slab of channel '%s'", channel->shared.name);
	rc = tnd__headroom_file(tnd__round_up(capacity, TND__PAGE), what, reterr);
	if (rc < 0)
		return rc;
	tnd__headroom_open(&headroom, tnd__round_up(capacity, TND__PAGE), what);
	/* All of it: on huge pages the pool takes it at once. */
	rc = tnd__headroom_check(&headroom, reterr);
	if (rc < 0)
		goto close_headroom;
	rc = tnd_slab_acquire(channel->slabs->pool, capacity, what, &how, &slab->slab);
	if (rc < 0) {
		say_no_slab(channel, rc, capacity, reterr);
		goto close_headroom;
	}
	slab->taken = 0;
	slab->bytes = capacity;
	if (fstat(tnd_slab_fd(slab->slab), &stat) == 0)
		slab->bytes = (uint64_t)stat.st_size;
	rc = take_pages(slab, bytes, &headroom, reterr);
	if (rc == 0)
		rc = tnd__failpoint("channel.slab-seal");
	if (rc == 0 && (madvise(tnd_slab_data(slab->slab), slab->bytes, MADV_DONTFORK) < 0 ||
			fcntl(tnd_slab_fd(slab->slab), F_ADD_SEALS, TND__SLAB_SEALS) < 0))
		rc = -errno;
	if (rc < 0) {
		say_no_slab(channel, rc, capacity, rc == TND_E_HEADROOM ? NULL : reterr);
		tnd__slab_discard(slab->slab);
	}

close_headroom:
	tnd__headroom_close(&headroom);
	return rc;
}

/* Who gave a size has counted on it: where others are needed, they are not larger than that. */
static int make_sized(struct tnd_channel *channel, struct tnd__host_slab *slab, uint64_t bytes,
		      struct tnd_error *reterr)
{
	uint64_t standard = tnd__slab_pool_standard(channel->slabs->pool);
	uint64_t most = TND__MAX(bytes, channel->shared.max_object_bytes);
	uint64_t exact = tnd__round_up(bytes, TND__PAGE);
	int rc;

	if (bytes <= standard)
		return make_memory(channel, slab, bytes, standard, reterr);
	if (standard)
		return make_memory(channel, slab, bytes, exact, reterr);
	rc = make_memory(channel, slab, bytes,
			 tnd__round_up(TND__MIN(bytes + bytes / 2, most), TND__PAGE), NULL);
	return rc < 0 ? make_memory(channel, slab, bytes, exact, reterr) : rc;
}

int tnd__slab_make(struct tnd_channel *channel, uint32_t index, uint64_t bytes,
		   struct tnd_error *reterr)
{
	struct tnd__host_slab *slab = tnd__host_slab(channel, index);
	struct tnd__slab_entry *entry = &channel->shared.header->slabs[index];
	struct tnd__host_slab made = {0};
	int rc = make_sized(channel, &made, bytes, reterr);

	if (rc < 0)
		return rc;
	pthread_mutex_lock(&channel->lock);
	slab->serial = ++channel->slabs->serials;
	slab->bytes = made.bytes;
	slab->taken = made.taken;
	memset(slab->told, 0, sizeof(slab->told));
	atomic_store_explicit(&slab->state, TND__SLAB_FREE, memory_order_relaxed);
	slab->slab = made.slab;
	pthread_mutex_unlock(&channel->lock);
	/* relaxed: for stat only. */
	atomic_store_explicit(&entry->bytes, slab->bytes, memory_order_relaxed);
	atomic_store_explicit(&entry->serial, slab->serial, memory_order_relaxed);
	return 0;
}

int tnd__slab_top_up(struct tnd_channel *channel, uint32_t index, uint64_t bytes,
		     struct tnd_error *reterr)
{
	struct tnd__host_slab *slab = tnd__host_slab(channel, index);
	struct tnd__headroom headroom;
	char what[128];
	int rc;

	if (bytes <= slab->taken)
		return 0;
	snprintf(what, sizeof(what), "a slab of channel '%s'", channel->shared.name);
	tnd__headroom_open(&headroom, bytes - slab->taken, what);
	rc = take_pages(slab, bytes, &headroom, reterr);
	tnd__headroom_close(&headroom);
	return rc;
}

void tnd__slab_retire(struct tnd_channel *channel, uint32_t index)
{
	struct tnd__host_slab *slab = tnd__host_slab(channel, index);
	struct tnd__slab_entry *entry = &channel->shared.header->slabs[index];
	struct tnd_slab *memory = slab->slab;

	/* relaxed: for stat only. */
	atomic_store_explicit(&entry->bytes, 0, memory_order_relaxed);
	atomic_store_explicit(&entry->serial, 0, memory_order_relaxed);
	pthread_mutex_lock(&channel->lock);
	tnd__slab_tell(channel, index, TND__NOTE_RETIRE);
	slab->slab = NULL;
	/* relaxed: under lock, as who marks it. */
	atomic_fetch_and_explicit(&channel->slabs->spoilt, ~(UINT64_C(1) << index),
				  memory_order_relaxed);
	pthread_mutex_unlock(&channel->lock);
	tnd__slab_discard(memory);
}
