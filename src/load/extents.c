/* SPDX-License-Identifier: Apache-2.0 */
/*
 * extents.c - from a slab of the plan to reads, and from read bytes to items that are ready
 *
 *   items of the slab        spans, in file order              extents: at most a chunk each
 *   (plan order)        -->  [a][b]..[c-c-c-c-c-c]..[d]   -->  |a b|  |c-c-|-c-c|  |d|
 *
 * Packing file: an extent is read in place, at the slab address that the image gives it; a gathered
 * item is moved together inside its own image when its last byte is there. Packing name: an extent
 * of one whole span is read to where it belongs (the storage bounces it if it must); others come as
 * bounce buffers and are scattered.
 *
 * Invariant: no two extents share a 4 KiB block of the file within a slab, so a block that direct
 * I/O writes around an extent belongs to nobody else.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "load_internal.h"
#include "outlet.h"

static unsigned char *item_memory(const struct tnd__batch *batch, const struct tnd_plan_item *item)
{
	return batch->buffer->data + item->slab_offset;
}

/*
 * Moves what [begin, end) of the item's rows holds of its parts to `kept` (the item's packed
 * bytes). `data` is the byte at `begin`. Source and destination may overlap as long as each byte
 * moves down.
 */
static void gather_rows(const struct tnd_plan_item *item, uint64_t begin, uint64_t end,
			const unsigned char *data, unsigned char *kept)
{
	uint64_t row_kept = tnd__slice_row(item);
	uint64_t row = (begin - item->file_offset) / item->row_bytes;

	for (uint64_t at = item->file_offset + row * item->row_bytes; at < end;
	     at += item->row_bytes, row++) {
		uint64_t packed = row * row_kept;

		for (uint32_t p = 0; p < item->part_count; p++) {
			uint64_t from = at + item->part_begin[p], to = from + item->part_bytes[p];
			uint64_t first = TND__MAX(from, begin), last = TND__MIN(to, end);

			if (first < last)
				memmove(kept + packed + (first - from), data + (first - begin),
					last - first);
			packed += item->part_bytes[p];
		}
	}
}

/* Packing file: an item's last byte is in its image; moves it to where the plan says. */
static void settle(const struct tnd__batch *batch, const struct tnd_plan_item *item)
{
	const struct tnd_plan *plan = batch->load->plan;
	unsigned char *slab = batch->buffer->data, *kept = item_memory(batch, item);
	uint64_t count = tnd__plan_item_range_count(item), begin, end, done = 0;

	if (item->flags & TND_ITEM_F_ROWS) {
		end = item->file_offset + item->row_count * item->row_bytes;
		gather_rows(item, item->file_offset, end,
			    slab + tnd__plan_image_place(plan, batch->slab, item->file_offset),
			    kept);
		return;
	}
	for (uint64_t k = 0; k < count; k++) {
		unsigned char *source;

		tnd__plan_item_range(item, k, &begin, &end);
		source = slab + tnd__plan_image_place(plan, batch->slab, begin);
		if (source != kept + done)
			memmove(kept + done, source, end - begin);
		done += end - begin;
	}
}

static bool needs_settling(const struct tnd_plan_item *item)
{
	return (item->flags & (TND_ITEM_F_ROWS | TND_ITEM_F_REALIGN)) || item->part_count > 1 ||
	       item->row_count > 1;
}

/* One read of `item` is done; the last one makes it ready. */
static void item_done(struct tnd__batch *batch, size_t index)
{
	struct tnd_load *load = batch->load;
	const struct tnd_plan_item *item = &load->items[index];
	struct tnd__flow *flow = load->flow;
	int64_t start;

	/* S1: pairs with itself. */
	if (atomic_fetch_sub_explicit(&load->states[index], 1, memory_order_acq_rel) != 1)
		return;
	/* A node's reader leaves its bytes as they are in the file. */
	if (!load->outlet && load->totals.packing == TND_PACKING_FILE && needs_settling(item)) {
		start = tnd__now_ns();
		settle(batch, item);
		atomic_fetch_add_explicit(&load->gather_ns, (uint64_t)(tnd__now_ns() - start),
					  memory_order_relaxed);
	}
	/* S2: publishes the item's bytes; pairs with S3 in ready(). */
	atomic_store_explicit(&load->states[index], TND__ITEM_READY, memory_order_release);
	pthread_mutex_lock(&flow->lock);
	flow->progress_ns = tnd__now_ns();
	if (load->next_item == index)
		pthread_cond_signal(&flow->consumer);
	pthread_mutex_unlock(&flow->lock);
}

static void batch_put(struct tnd__batch *batch)
{
	/* B1: pairs with itself. */
	if (atomic_fetch_sub_explicit(&batch->left, 1, memory_order_acq_rel) != 1)
		return;
	if (batch->submitted && batch->load->outlet)
		tnd__outlet_publish(batch->load->outlet, batch->slab, batch->buffer);
	free(batch->spans);
	free(batch->extents);
	free(batch);
}

static void scatter(struct tnd__read *read, const unsigned char *data)
{
	struct tnd__extent *extent = (struct tnd__extent *)read;
	struct tnd__batch *batch = extent->batch;

	for (size_t s = extent->first_span; s < extent->end_span; s++) {
		const struct tnd__needed *span = &batch->spans[s];
		const struct tnd_plan_item *item = &batch->load->items[span->item];
		uint64_t begin = TND__MAX(span->begin, read->offset);
		uint64_t end = TND__MIN(span->end, read->offset + read->bytes);
		const unsigned char *source = data + (begin - read->offset);

		if (item->flags & TND_ITEM_F_ROWS)
			gather_rows(item, begin, end, source, item_memory(batch, item));
		else
			memcpy(item_memory(batch, item) + span->kept_offset + (begin - span->begin),
			       source, end - begin);
	}
}

/* The tensor that holds file byte `offset` of the extent. */
static const struct tnd_tensor *tensor_at(const struct tnd__extent *extent, uint64_t offset)
{
	const struct tnd__batch *batch = extent->batch;

	for (size_t s = extent->first_span; s < extent->end_span; s++)
		if (offset < batch->spans[s].end)
			return batch->load->items[batch->spans[s].item].tensor;
	return batch->load->items[batch->spans[extent->end_span - 1].item].tensor;
}

static void read_failed(struct tnd__extent *extent, int status, uint64_t offset)
{
	struct tnd_load *load = extent->batch->load;
	const struct tnd_tensor *tensor = tensor_at(extent, offset);
	const struct tnd_file *file = &load->files[tensor->file];
	struct tnd__where where = {.file = file->name,
				   .name = tensor->name,
				   .name_bytes = tensor->name_bytes,
				   .byte_offset = offset,
				   .has_offset = true};

	if (status == TND_E_CANCELLED)
		return;
	if (status == TND_E_TRUNCATED)
		tnd__load_fail(load, TND_E_CHANGED, &where,
			       "expected a file of %llu bytes, found its end at byte %llu: it was "
			       "cut while being read; fetch it again",
			       (unsigned long long)file->bytes, (unsigned long long)offset);
	else
		tnd__load_fail(load, status, &where,
			       "reading failed at byte %llu of %llu: %s; look at the kernel log "
			       "and the disk",
			       (unsigned long long)offset, (unsigned long long)file->bytes,
			       tnd_strerror(status));
}

static void read_done(struct tnd__read *read, int status, uint64_t fail_offset)
{
	struct tnd__extent *extent = (struct tnd__extent *)read;
	struct tnd__batch *batch = extent->batch;
	struct tnd_load *load = batch->load;
	struct tnd__flow *flow = load->flow;
	size_t file = load->slabs[batch->slab].file;
	bool drained;

	if (status < 0)
		read_failed(extent, status, fail_offset);
	else
		for (size_t s = extent->first_span; s < extent->end_span; s++)
			item_done(batch, batch->spans[s].item);
	batch_put(batch);
	tnd__sample(load, false);
	pthread_mutex_lock(&flow->lock);
	flow->progress_ns = tnd__now_ns();
	if (--flow->in_flight == TND__READS_LOW)
		pthread_cond_signal(&flow->feeder);
	drained = !flow->in_flight;
	if (drained) {
		flow->drained_ns = flow->progress_ns;
		pthread_cond_signal(&flow->consumer);
	}
	pthread_mutex_unlock(&flow->lock);
	/* What is shown while nothing moves is right. */
	if (drained)
		tnd__publish_figures(load);
	/* R1: pairs with R2 in tnd__feed_close_sources(). */
	atomic_fetch_sub_explicit(&load->load_files[file].reads, 1, memory_order_release);
}

static int by_begin(const void *left, const void *right)
{
	const struct tnd__needed *a = left, *b = right;

	return a->begin < b->begin ? -1 : a->begin > b->begin;
}

/* The file ranges of the slab's items, in file order. */
static int make_spans(struct tnd__batch *batch)
{
	struct tnd_load *load = batch->load;
	const struct tnd_plan_slab *slab = &load->slabs[batch->slab];
	size_t count = 0, used = 0;

	for (size_t i = slab->first_item; i <= slab->last_item; i++)
		if (load->items[i].slab == batch->slab)
			count += tnd__plan_item_range_count(&load->items[i]);
	batch->spans = calloc(count, sizeof(*batch->spans));
	if (!batch->spans || tnd__failpoint("load.alloc"))
		return -ENOMEM;
	for (size_t i = slab->first_item; i <= slab->last_item; i++) {
		const struct tnd_plan_item *item = &load->items[i];
		uint64_t kept = 0;

		if (item->slab != batch->slab)
			continue;
		for (uint64_t k = 0; k < tnd__plan_item_range_count(item); k++) {
			struct tnd__needed *span = &batch->spans[used++];

			tnd__plan_item_range(item, k, &span->begin, &span->end);
			span->kept_offset = kept;
			span->item = i;
			kept += span->end - span->begin;
		}
	}
	qsort(batch->spans, used, sizeof(*batch->spans), by_begin);
	batch->span_count = used;
	return 0;
}

/* End of the run of spans from `first` that have no unneeded block between them. */
static size_t run_end(const struct tnd__batch *batch, size_t first, uint64_t *ret_end)
{
	size_t s = first;
	uint64_t end = batch->spans[s].end;

	while (++s < batch->span_count &&
	       tnd__round_down(batch->spans[s].begin, TND__PAGE) <= tnd__round_down(end, TND__PAGE))
		end = batch->spans[s].end;
	*ret_end = end;
	return s;
}

static void place(struct tnd__batch *batch, struct tnd__extent *extent)
{
	struct tnd_load *load = batch->load;
	const struct tnd__needed *span = &batch->spans[extent->first_span];
	const struct tnd_plan_item *item = &load->items[span->item];
	struct tnd__read *read = &extent->read;

	if (load->totals.packing == TND_PACKING_FILE) {
		read->dst = batch->buffer->data +
			    tnd__plan_image_place(load->plan, batch->slab, read->offset);
		read->padded = true;
	} else if (extent->end_span == extent->first_span + 1 && !(item->flags & TND_ITEM_F_ROWS)) {
		read->dst =
			item_memory(batch, item) + span->kept_offset + (read->offset - span->begin);
	} else {
		read->scatter = scatter;
	}
}

/* Counts, or with `fill` writes, the extents of one run [begin, end) of spans [first, after). */
static size_t cut_run(struct tnd__batch *batch, size_t first, size_t after, uint64_t end,
		      struct tnd__extent *fill)
{
	uint64_t chunk = batch->load->totals.chunk_bytes, next;
	size_t count = 0, s = first;

	for (uint64_t at = batch->spans[first].begin; at < end; at = next, count++) {
		struct tnd__extent *extent;

		next = TND__MIN(tnd__round_down(at, chunk) + chunk, end);
		if (!fill)
			continue;
		extent = &fill[count];
		while (batch->spans[s].end <= at)
			s++;
		extent->batch = batch;
		extent->first_span = s;
		extent->end_span = s + 1;
		while (extent->end_span < after && batch->spans[extent->end_span].begin < next)
			extent->end_span++;
		/*
		 * Not the unneeded bytes of a shared block before the first span or behind the
		 * last.
		 */
		extent->read.offset = TND__MAX(at, batch->spans[s].begin);
		extent->read.bytes = TND__MIN(next, batch->spans[extent->end_span - 1].end) -
				     extent->read.offset;
		extent->read.done = read_done;
		place(batch, extent);
	}
	return count;
}

static int make_extents(struct tnd__batch *batch)
{
	size_t count = 0, after, used = 0;
	uint64_t end;

	for (size_t s = 0; s < batch->span_count; s = after) {
		after = run_end(batch, s, &end);
		count += cut_run(batch, s, after, end, NULL);
	}
	batch->extents = calloc(count, sizeof(*batch->extents));
	if (!batch->extents || tnd__failpoint("load.alloc"))
		return -ENOMEM;
	for (size_t s = 0; s < batch->span_count; s = after) {
		after = run_end(batch, s, &end);
		used += cut_run(batch, s, after, end, batch->extents + used);
	}
	assert(used == count);
	batch->extent_count = count;
	return 0;
}

int tnd__batch_create(struct tnd_load *load, size_t slab, struct tnd__buffer *buffer,
		      struct tnd__batch **ret_batch)
{
	struct tnd__batch *batch = calloc(1, sizeof(*batch));
	int rc = batch ? 0 : -ENOMEM;

	if (rc < 0)
		return rc;
	batch->load = load;
	batch->slab = slab;
	batch->buffer = buffer;
	atomic_init(&batch->left, 1);
	rc = make_spans(batch);
	if (rc == 0)
		rc = make_extents(batch);
	if (rc < 0) {
		batch_put(batch);
		return rc;
	}
	atomic_store_explicit(&batch->left, batch->extent_count + 1, memory_order_relaxed);
	*ret_batch = batch;
	return 0;
}

void tnd__batch_submit(struct tnd__batch *batch)
{
	struct tnd_load *load = batch->load;
	struct tnd__load_file *file = &load->load_files[load->slabs[batch->slab].file];
	struct tnd__flow *flow = load->flow;

	/*
	 * All items are counted before the first read is submitted, so none gets ready half
	 * counted.
	 */
	for (size_t e = 0; e < batch->extent_count; e++)
		for (size_t s = batch->extents[e].first_span; s < batch->extents[e].end_span; s++) {
			_Atomic uint32_t *state = &load->states[batch->spans[s].item];
			uint32_t seen = atomic_load_explicit(state, memory_order_relaxed);

			atomic_store_explicit(state, seen == TND__ITEM_NOT_FED ? 1 : seen + 1,
					      memory_order_relaxed);
		}
	batch->submitted = true;
	pthread_mutex_lock(&flow->lock);
	flow->in_flight += batch->extent_count;
	pthread_mutex_unlock(&flow->lock);
	atomic_fetch_add_explicit(&file->reads, batch->extent_count, memory_order_relaxed);
	tnd__publish_figures(load);
	for (size_t e = 0; e < batch->extent_count; e++) {
		batch->extents[e].read.source = file->source;
		tnd__storage_submit(load->storage, &batch->extents[e].read);
	}
	batch_put(batch);
}
