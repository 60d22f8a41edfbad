/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stat.c - channels, pools and loads as their shared memory shows them, read by somebody who takes
 * no part
 *
 *   stat_scan.c            stat_look.c
 *   sightings --> data segments    --.
 *             --> control segments --+-- same id --> struct tnd_stat_channel, its slabs: a pool
 *             --> slabs, by process ------------------------------------------------> a pool
 *             --> pages of loads (stat_load.c) --------------------------------------> a load
 *
 * A segment that nobody has the other half of, or that makes no sense, is left out. A control
 * segment is taken once: of two data segments with one id, the second is a copy.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stat_look.h"

/* A result in the making; what the caller sees points into it. */
struct collection {
	struct tnd_stat seen; /* first: tnd_stat_free gets its address */
	struct tnd_stat_channel *channels;
	struct tnd_stat_pool *pools;
	struct tnd_stat_load *loads;
	size_t channel_capacity, pool_capacity, load_capacity;
};

struct control_id {
	unsigned char id[16];
	size_t first; /* sighting */
	bool taken;
};

/* -- pools -- */

/* Return: a new entry, NULL if memory ran out. */
static struct tnd_stat_pool *add_pool(struct collection *all)
{
	struct tnd_stat_pool *pool;

	if (tnd__reserve(&all->pools, &all->pool_capacity, all->seen.pool_count + 1,
			 sizeof(*all->pools)) < 0)
		return NULL;
	pool = &all->pools[all->seen.pool_count++];
	*pool = (struct tnd_stat_pool){0};
	return pool;
}

static uint32_t leases_of(const struct tnd__look *look, uint32_t place, uint64_t *held)
{
	uint64_t sum = 0;

	for (uint32_t slab = 0; slab < TND__SLABS_MAX; slab++) {
		uint32_t count = TND__LOAD(look->shared.leases[place][slab]);

		if (TND__LOAD(look->header.slabs[slab].bytes) == 0 || count == 0)
			continue;
		sum += count;
		*held |= UINT64_C(1) << slab;
	}
	return (uint32_t)TND__MIN(sum, UINT32_MAX);
}

/* The slabs of a channel, if it has any. Return: 0, -ENOMEM. */
static int add_channel_pool(struct collection *all, const struct tnd__look *look,
			    const struct tnd_stat_channel *channel)
{
	struct tnd_stat_lease *leases;
	struct tnd_stat_pool *pool;
	uint64_t held = 0, bytes = 0, slabs = 0;

	for (uint32_t slab = 0; slab < TND__SLABS_MAX; slab++) {
		uint64_t slab_bytes = TND__LOAD(look->header.slabs[slab].bytes);

		slabs += slab_bytes != 0;
		bytes = tnd__add_capped(bytes, slab_bytes);
	}
	if (slabs == 0)
		return 0;
	pool = add_pool(all);
	leases = pool ? calloc(TND__PLACES_MAX, sizeof(*leases)) : NULL;
	if (!leases)
		return -ENOMEM;
	pool->leases = leases;
	memcpy(pool->name, channel->name, sizeof(pool->name));
	pool->pid = channel->pid;
	pool->slab_bytes = bytes;
	pool->slabs = slabs;
	for (uint32_t place = 0; place < look->header.place_count; place++) {
		uint32_t count = leases_of(look, place, &held);

		if (count)
			leases[pool->lease_count++] = (struct tnd_stat_lease){
				TND__LOAD(look->header.seats[place].rank), count};
	}
	pool->live = (uint64_t)__builtin_popcountll(held);
	return 0;
}

/* Slabs, counted for the first process that has them. Return: 0, -ENOMEM. */
static int add_process_pools(struct collection *all, const struct tnd__scan *scan)
{
	size_t *pool_of = calloc(scan->process_count + 1, sizeof(*pool_of)); /* index + 1 */
	int rc = pool_of ? 0 : -ENOMEM;

	for (size_t i = 0; rc == 0 && i < scan->sighting_count; i += tnd__scan_run(scan, i)) {
		const struct tnd__sighting *slab = &scan->sightings[i];
		const struct tnd__process *process = &scan->processes[slab->process];
		struct tnd_stat_pool *pool;

		if (slab->kind != TND__MEMFD_SLAB)
			continue;
		if (!pool_of[slab->process]) {
			pool = add_pool(all);
			if (!pool) {
				rc = -ENOMEM;
				break;
			}
			snprintf(pool->name, sizeof(pool->name), "%s", process->name);
			pool->pid = tnd__innermost_pid(process);
			pool_of[slab->process] = all->seen.pool_count;
		}
		pool = &all->pools[pool_of[slab->process] - 1];
		pool->slab_bytes = tnd__add_capped(pool->slab_bytes, slab->bytes);
		pool->slabs++;
		pool->live++;
	}
	free(pool_of);
	return rc;
}

/* -- loads -- */

/* Return: 0, -ENOMEM. */
static int add_loads(struct collection *all, const struct tnd__scan *scan)
{
	for (size_t i = 0; i < scan->sighting_count; i += tnd__scan_run(scan, i)) {
		if (scan->sightings[i].kind != TND__MEMFD_LOAD)
			continue;
		if (tnd__reserve(&all->loads, &all->load_capacity, all->seen.load_count + 1,
				 sizeof(*all->loads)) < 0)
			return -ENOMEM;
		if (tnd__look_load(scan, i, &all->loads[all->seen.load_count]))
			all->seen.load_count++;
	}
	return 0;
}

/* -- all channels -- */

static int compare_ids(const void *a, const void *b)
{
	const struct control_id *x = a, *y = b;

	return memcmp(x->id, y->id, sizeof(x->id));
}

/* The control segments by their ids. Return: 0, -ENOMEM. */
static int index_controls(const struct tnd__scan *scan, struct control_id **ret_ids,
			  size_t *ret_count)
{
	struct control_id *ids = calloc(scan->sighting_count + 1, sizeof(*ids));
	size_t count = 0;

	if (!ids)
		return -ENOMEM;
	for (size_t i = 0; i < scan->sighting_count; i += tnd__scan_run(scan, i)) {
		struct tnd__window window;

		if (scan->sightings[i].kind != TND__MEMFD_CONTROL ||
		    !tnd__window_open(scan, i, &window))
			continue;
		ids[count].first = i;
		if (tnd__window_read(&window, ids[count].id, sizeof(ids[count].id),
				     offsetof(struct tnd__control, id)))
			count++;
		tnd__window_close(&window);
	}
	qsort(ids, count, sizeof(*ids), compare_ids);
	*ret_ids = ids;
	*ret_count = count;
	return 0;
}

/* Return: 0 (also where the segments make no sense), -ENOMEM. */
static int add_channel(struct collection *all, struct tnd__look *look)
{
	struct tnd_stat_reader *readers = calloc(TND__PLACES_MAX, sizeof(*readers));
	struct tnd_stat_channel channel;
	int rc = -ENOMEM;

	if (!readers || tnd__reserve(&all->channels, &all->channel_capacity,
				     all->seen.channel_count + 1, sizeof(*all->channels)) < 0)
		goto drop;
	rc = 0;
	if (!tnd__look(look, &channel, readers))
		goto drop;
	channel.readers = readers;
	all->channels[all->seen.channel_count++] = channel;
	return add_channel_pool(all, look, &channel);

drop:
	free(readers);
	return rc;
}

/* A data segment with the control segment of its id. Return: 0 (also: there is none), -ENOMEM. */
static int add_pair(struct collection *all, struct tnd__look *look, struct control_id *ids,
		    size_t id_count)
{
	struct control_id wanted, *found;
	int rc = 0;

	if (!tnd__window_open(look->scan, look->data, &look->data_window))
		return 0;
	if (!tnd__window_read(&look->data_window, wanted.id, sizeof(wanted.id),
			      offsetof(struct tnd__data_header, id)))
		goto close_data;
	found = bsearch(&wanted, ids, id_count, sizeof(*ids), compare_ids);
	if (!found || found->taken)
		goto close_data;
	look->control = found->first;
	if (!tnd__window_open(look->scan, look->control, &look->control_window))
		goto close_data;
	found->taken = true;
	rc = add_channel(all, look);
	tnd__window_close(&look->control_window);
close_data:
	tnd__window_close(&look->data_window);
	return rc;
}

/* Return: 0, -ENOMEM. */
static int add_channels(struct collection *all, const struct tnd__scan *scan)
{
	struct tnd__look *look = calloc(1, sizeof(*look));
	struct control_id *ids = NULL;
	size_t id_count = 0;
	int rc = look ? index_controls(scan, &ids, &id_count) : -ENOMEM;

	for (size_t i = 0; rc == 0 && i < scan->sighting_count; i += tnd__scan_run(scan, i)) {
		if (scan->sightings[i].kind != TND__MEMFD_DATA)
			continue;
		look->scan = scan;
		look->data = i;
		rc = add_pair(all, look, ids, id_count);
	}
	free(ids);
	free(look);
	return rc;
}

static int compare_channels(const void *a, const void *b)
{
	const struct tnd_stat_channel *x = a, *y = b;
	int order = strcmp(x->name, y->name);

	return order ? order : (x->pid > y->pid) - (x->pid < y->pid);
}

static int compare_pools(const void *a, const void *b)
{
	const struct tnd_stat_pool *x = a, *y = b;
	int order = strcmp(x->name, y->name);

	return order ? order : (x->pid > y->pid) - (x->pid < y->pid);
}

static int compare_loads(const void *a, const void *b)
{
	const struct tnd_stat_load *x = a, *y = b;

	if (x->rank != y->rank)
		return x->rank < y->rank ? -1 : 1;
	if (x->pid != y->pid)
		return x->pid < y->pid ? -1 : 1;
	return (x->role > y->role) - (x->role < y->role);
}

static void sort(struct collection *all)
{
	struct tnd_stat *seen = &all->seen;

	if (seen->channel_count)
		qsort(all->channels, seen->channel_count, sizeof(*all->channels), compare_channels);
	if (seen->pool_count)
		qsort(all->pools, seen->pool_count, sizeof(*all->pools), compare_pools);
	if (seen->load_count)
		qsort(all->loads, seen->load_count, sizeof(*all->loads), compare_loads);
}

int tnd_stat_read(struct tnd_stat **ret_stat)
{
	struct collection *all;
	struct tnd__scan scan;
	int rc = tnd__scan_read(&scan);

	if (rc < 0)
		return rc;
	all = calloc(1, sizeof(*all));
	rc = all ? add_channels(all, &scan) : -ENOMEM;
	if (rc == 0)
		rc = add_process_pools(all, &scan);
	if (rc == 0)
		rc = add_loads(all, &scan);
	if (rc < 0) {
		tnd__scan_free(&scan);
		tnd_stat_free((struct tnd_stat *)all);
		return rc;
	}
	sort(all);
	all->seen.channels = all->channels;
	all->seen.pools = all->pools;
	all->seen.loads = all->loads;
	all->seen.denied = scan.denied;
	tnd__scan_free(&scan);
	*ret_stat = &all->seen;
	return 0;
}

void tnd_stat_free(struct tnd_stat *stat)
{
	struct collection *all = (struct collection *)stat;

	if (!all)
		return;
	for (size_t i = 0; i < all->seen.channel_count; i++)
		free((void *)(uintptr_t)all->channels[i].readers);
	for (size_t i = 0; i < all->seen.pool_count; i++)
		free((void *)(uintptr_t)all->pools[i].leases);
	free(all->channels);
	free(all->pools);
	free(all->loads);
	free(all);
}
