/* SPDX-License-Identifier: Apache-2.0 */
/* lease.c - named holds on slabs */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "pool.h"

#define HOLDERS_SHOWN 8

int tnd__lease_acquire_sized(struct tnd_slab *slab, const char *name, size_t name_bytes,
			     uint64_t bytes, struct tnd_lease **ret_lease)
{
	struct tnd_slab_pool *pool = slab->pool;
	struct tnd_lease *lease;

	if (name_bytes > SIZE_MAX / 2)
		return -ENOMEM;
	lease = tnd__mem_alloc(sizeof(*lease) + name_bytes + 1);
	if (!lease)
		return -ENOMEM;
	lease->slab = slab;
	lease->bytes = bytes;
	lease->name_bytes = name_bytes;
	if (name_bytes)
		memcpy(lease->name, name, name_bytes);
	pthread_mutex_lock(&pool->lock);
	tnd__link_before(&slab->leases, &lease->link);
	slab->holds++;
	pool->stats.leases++;
	pthread_mutex_unlock(&pool->lock);
	*ret_lease = lease;
	return 0;
}

int tnd_lease_acquire(struct tnd_slab *slab, const char *name, size_t name_bytes,
		      struct tnd_lease **ret_lease)
{
	return tnd__lease_acquire_sized(slab, name, name_bytes, 0, ret_lease);
}

void tnd_lease_release(struct tnd_lease *lease)
{
	if (lease)
		tnd__slab_drop(lease->slab, lease);
}

/* Appends what fits. */
static void add(char *out, size_t out_bytes, size_t *used, const char *text)
{
	size_t left = out_bytes - *used;
	int wrote = snprintf(out + *used, left, "%s", text);

	*used += wrote < 0 ? 0 : TND__MIN((size_t)wrote, left - 1);
}

size_t tnd__slab_pool_holders(struct tnd_slab_pool *pool, char *out, size_t out_bytes)
{
	size_t used = 0, shown = 0, leases;
	char piece[128];

	if (out_bytes)
		out[0] = '\0';
	pthread_mutex_lock(&pool->lock);
	leases = (size_t)pool->stats.leases;
	for (struct tnd__link *s = pool->live.next; out_bytes && s != &pool->live; s = s->next) {
		struct tnd_slab *slab = TND__OF(s, struct tnd_slab, link);

		for (struct tnd__link *l = slab->leases.next;
		     l != &slab->leases && shown < HOLDERS_SHOWN; l = l->next, shown++) {
			struct tnd_lease *lease = TND__OF(l, struct tnd_lease, link);

			if (shown)
				add(out, out_bytes, &used, ", ");
			add(out, out_bytes, &used,
			    tnd__printable(lease->name, lease->name_bytes, piece, sizeof(piece)));
		}
	}
	pthread_mutex_unlock(&pool->lock);
	if (out_bytes && leases > shown) {
		snprintf(piece, sizeof(piece), " and %zu more", leases - shown);
		add(out, out_bytes, &used, piece);
	}
	return leases;
}
