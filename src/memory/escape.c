/* SPDX-License-Identifier: Apache-2.0 */
/*
 * escape.c - who still holds what
 *
 * The report is one block of memory: the report, its slabs, two arrays of names (by slab; over
 * all), the texts. Two passes under the pool's lock: one counts, one fills; in between the block is
 * allocated, so both see the same leases.
 */
#include <errno.h>
#include <string.h>

#include "pool.h"

/* A control character becomes six ("\u001f"); "..." and the NUL must always find room. */
#define TEXT_MAX(name_bytes) ((name_bytes)*6 + 8)

struct totals {
	size_t slabs, names, text_bytes;
};

struct block {
	struct tnd_escape_report report;
	struct tnd_escape *slabs;
	const char **names, **all;
	char *text;
};

static size_t unforgotten(const struct tnd_slab *slab, size_t *text_bytes)
{
	size_t count = 0;

	for (struct tnd__link *at = slab->leases.next; at != &slab->leases; at = at->next) {
		const struct tnd_lease *lease = TND__OF(at, struct tnd_lease, link);

		if (lease->forgotten)
			continue;
		*text_bytes += TEXT_MAX(lease->name_bytes);
		count++;
	}
	return count;
}

static struct totals count_all(const struct tnd_slab_pool *pool)
{
	struct totals totals = {0, 0, 0};

	for (struct tnd__link *at = pool->live.next; at != &pool->live; at = at->next) {
		const struct tnd_slab *slab = TND__OF(at, struct tnd_slab, link);
		size_t names = unforgotten(slab, &totals.text_bytes);

		if (!names)
			continue;
		totals.slabs++;
		totals.names += names;
		totals.text_bytes += TEXT_MAX(slab->file ? strlen(slab->file) : 0);
	}
	return totals;
}

static struct block *block_new(const struct totals *totals)
{
	size_t slabs = totals->slabs * sizeof(struct tnd_escape);
	size_t names = totals->names * 2 * sizeof(char *);
	struct block *block = tnd__mem_alloc(sizeof(*block) + slabs + names + totals->text_bytes);

	if (!block)
		return NULL;
	block->slabs = (void *)(block + 1);
	block->names = (void *)(block->slabs + totals->slabs);
	block->all = block->names + totals->names;
	block->text = (char *)(block->all + totals->names);
	return block;
}

static const char *put_text(struct block *block, const char *text, size_t text_bytes)
{
	const char *put = tnd__printable(text, text_bytes, block->text, TEXT_MAX(text_bytes));

	block->text += strlen(put) + 1;
	return put;
}

static int by_text(const void *a, const void *b)
{
	return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Sorts and drops repetitions. Return: how many are left. */
static size_t sort_names(const char **names, size_t count)
{
	size_t kept = 0;

	qsort(names, count, sizeof(*names), by_text);
	for (size_t i = 0; i < count; i++)
		if (!kept || strcmp(names[kept - 1], names[i]) != 0)
			names[kept++] = names[i];
	return kept;
}

static int by_first_name(const void *a, const void *b)
{
	const struct tnd_escape *one = a, *other = b;
	int order = strcmp(one->file, other->file);

	return order ? order : strcmp(one->names[0], other->names[0]);
}

/* Appends one slab's entry; *all_count: names so far over all slabs. */
static void fill_slab(struct block *block, struct tnd_slab *slab, bool forget, size_t *all_count)
{
	struct tnd_escape *entry = &block->slabs[block->report.slab_count];
	const char **names = block->names + *all_count;
	size_t count = 0;

	for (struct tnd__link *at = slab->leases.next; at != &slab->leases; at = at->next) {
		struct tnd_lease *lease = TND__OF(at, struct tnd_lease, link);

		if (lease->forgotten)
			continue;
		names[count] = put_text(block, lease->name, lease->name_bytes);
		block->all[(*all_count)++] = names[count++];
		lease->forgotten = forget;
	}
	if (!count)
		return;
	entry->file =
		put_text(block, slab->file ? slab->file : "", slab->file ? strlen(slab->file) : 0);
	entry->slab_bytes = slab->map_bytes;
	entry->names = names;
	entry->name_count = sort_names(names, count);
	block->report.slab_count++;
	block->report.bytes += slab->map_bytes;
}

int tnd_slab_pool_escaped(struct tnd_slab_pool *pool, int forget,
			  struct tnd_escape_report **ret_report)
{
	struct block *block = NULL;
	struct totals totals;
	size_t names = 0;
	int rc = 0;

	pthread_mutex_lock(&pool->lock);
	totals = count_all(pool);
	if (totals.slabs) {
		block = block_new(&totals);
		rc = block ? (int)totals.slabs : -ENOMEM;
	}
	for (struct tnd__link *at = pool->live.next; block && at != &pool->live; at = at->next)
		fill_slab(block, TND__OF(at, struct tnd_slab, link), forget != 0, &names);
	pthread_mutex_unlock(&pool->lock);
	if (rc < 0)
		return rc;
	if (block) {
		qsort(block->slabs, totals.slabs, sizeof(*block->slabs), by_first_name);
		block->report.slabs = block->slabs;
		block->report.names = block->all;
		block->report.name_count = sort_names(block->all, names);
	}
	*ret_report = block ? &block->report : NULL;
	return rc;
}

void tnd_escape_report_free(struct tnd_escape_report *report)
{
	/* The report is the block's first member. */
	free(report);
}
