/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checkpoint.c - the table of tensors of a checkpoint, and its readers
 *
 *   parts[f].header.names, .shapes, .metadata   stay where they are
 *            .tensors  -> one array over all files (and freed)
 *   by_name[]          -> indices into it, in byte order of the names over all files
 *
 * Immutable once it was handed out, but for the count of users: plans and loads keep it alive, and
 * what they read needs no lock.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "parts.h"

struct tnd_checkpoint *tnd__checkpoint_ref(struct tnd_checkpoint *checkpoint)
{
	/* Relaxed, no partner: who takes a reference has one already. */
	atomic_fetch_add_explicit(&checkpoint->ref_count, 1, memory_order_relaxed);
	return checkpoint;
}

void tnd_checkpoint_close(struct tnd_checkpoint *checkpoint)
{
	/*
	 * U1: acq_rel, pairs with itself: what other users read is read before the last one frees
	 * it.
	 */
	if (!checkpoint ||
	    atomic_fetch_sub_explicit(&checkpoint->ref_count, 1, memory_order_acq_rel) != 1)
		return;
	for (size_t i = 0; i < checkpoint->file_count; i++)
		tnd__part_free(&checkpoint->parts[i]);
	free(checkpoint->parts);
	free(checkpoint->files);
	free(checkpoint->tensors);
	free(checkpoint->by_name);
	tnd__sentences_free(&checkpoint->warnings);
	free(checkpoint);
}

static int sort_all(struct tnd_checkpoint *checkpoint)
{
	size_t count = checkpoint->tensor_count;
	struct tnd__sort_key *keys = tnd__checkpoint_alloc(2 * count * sizeof(*keys));

	checkpoint->by_name = tnd__checkpoint_alloc(count * sizeof(*checkpoint->by_name));
	if (!keys || !checkpoint->by_name) {
		free(keys);
		return -ENOMEM;
	}
	for (size_t i = 0; i < count; i++)
		keys[i].index = i;
	tnd__sort_names(checkpoint->tensors, keys, keys + count, count);
	for (size_t i = 0; i < count; i++)
		checkpoint->by_name[i] = keys[i].index;
	free(keys);
	return 0;
}

static uint64_t part_memory(const struct tnd__part *part)
{
	const struct tnd__header *header = &part->header;

	return sizeof(*part) + sizeof(struct tnd_file) + strlen(part->name) + strlen(part->path) +
	       2 + header->name_bytes + header->shape_count * sizeof(*header->shapes) +
	       header->metadata_count * sizeof(*header->metadata);
}

/* Copies the parts' tables into the checkpoint's; nothing can fail any more. */
static void move_in(struct tnd_checkpoint *checkpoint, struct tnd__part *parts, size_t part_count)
{
	size_t at = 0;

	for (size_t f = 0; f < part_count; f++) {
		struct tnd__header *header = &parts[f].header;

		checkpoint->files[f] = (struct tnd_file){
			.name = parts[f].name,
			.path = parts[f].path,
			.fd = parts[f].fd,
			.bytes = parts[f].bytes,
			.header_bytes = parts[f].header_bytes,
			.first_tensor = at,
			.tensor_count = header->tensor_count,
			.skipped_count = parts[f].skipped_count,
			.metadata = header->metadata,
			.metadata_count = header->metadata_count,
		};
		for (size_t i = 0; i < header->tensor_count; i++) {
			checkpoint->tensors[at] = header->tensors[i];
			checkpoint->tensors[at++].file = (uint32_t)f;
		}
		checkpoint->memory_bytes += part_memory(&parts[f]);
	}
}

int tnd__checkpoint_build(struct tnd__part *parts, size_t part_count,
			  struct tnd_checkpoint **ret_checkpoint)
{
	struct tnd_checkpoint *checkpoint = tnd__checkpoint_alloc(sizeof(*checkpoint));
	size_t count = 0;

	if (!checkpoint)
		return -ENOMEM;
	memset(checkpoint, 0, sizeof(*checkpoint));
	atomic_init(&checkpoint->ref_count, 1);
	tnd__config_init(&checkpoint->config);
	for (size_t f = 0; f < part_count; f++)
		count += parts[f].header.tensor_count;
	checkpoint->tensor_count = count;
	checkpoint->files = tnd__checkpoint_alloc(part_count * sizeof(*checkpoint->files));
	checkpoint->tensors = tnd__checkpoint_alloc(count * sizeof(*checkpoint->tensors));
	if (!checkpoint->files || !checkpoint->tensors)
		goto fail;
	checkpoint->memory_bytes = sizeof(*checkpoint) + count * (sizeof(*checkpoint->tensors) +
								  sizeof(*checkpoint->by_name));
	move_in(checkpoint, parts, part_count);
	if (sort_all(checkpoint) < 0)
		goto fail;
	for (size_t f = 0; f < part_count; f++) {
		free(parts[f].header.tensors);
		parts[f].header.tensors = NULL;
	}
	checkpoint->parts = parts;
	checkpoint->file_count = part_count;
	*ret_checkpoint = checkpoint;
	return 0;
fail:
	tnd_checkpoint_close(checkpoint);
	return -ENOMEM;
}

const struct tnd_file *tnd_checkpoint_files(const struct tnd_checkpoint *checkpoint,
					    size_t *ret_count)
{
	*ret_count = checkpoint->file_count;
	return checkpoint->files;
}

const struct tnd_tensor *tnd_checkpoint_tensors(const struct tnd_checkpoint *checkpoint,
						size_t *ret_count)
{
	*ret_count = checkpoint->tensor_count;
	return checkpoint->tensors;
}

int tnd_checkpoint_find(const struct tnd_checkpoint *checkpoint, const char *name,
			size_t name_bytes, const struct tnd_tensor **ret_tensor)
{
	size_t low = 0, high = checkpoint->tensor_count;

	while (low < high) {
		size_t middle = low + (high - low) / 2;
		const struct tnd_tensor *tensor = &checkpoint->tensors[checkpoint->by_name[middle]];
		int order = tnd__compare(tensor->name, tensor->name_bytes, name, name_bytes);

		if (order == 0) {
			*ret_tensor = tensor;
			return 0;
		}
		if (order < 0)
			low = middle + 1;
		else
			high = middle;
	}
	return TND_E_NO_TENSOR;
}

uint64_t tnd_checkpoint_experts(const struct tnd_checkpoint *checkpoint, uint64_t *ret_draft_count)
{
	if (ret_draft_count)
		*ret_draft_count = checkpoint->config.draft_expert_count;
	return checkpoint->config.expert_count;
}

size_t tnd_checkpoint_warnings(const struct tnd_checkpoint *checkpoint,
			       const char *const **ret_warnings)
{
	*ret_warnings = (const char *const *)checkpoint->warnings.items;
	return checkpoint->warnings.count;
}

int tnd_checkpoint_facts(const struct tnd_checkpoint *checkpoint, struct tnd_model_facts *ret_facts)
{
	uint32_t struct_bytes = ret_facts->struct_bytes;

	if (!tnd__struct_ok(struct_bytes, sizeof(*ret_facts), sizeof(*ret_facts)))
		return TND_E_INVALID;
	*ret_facts = checkpoint->config.facts;
	ret_facts->struct_bytes = struct_bytes;
	return 0;
}

uint64_t tnd_checkpoint_memory_bytes(const struct tnd_checkpoint *checkpoint)
{
	return checkpoint->memory_bytes;
}
