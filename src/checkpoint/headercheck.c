/* SPDX-License-Identifier: Apache-2.0 */
/*
 * headercheck.c - the table of a header as a whole: names are unique, data has no hole and no
 * overlap
 *
 * Both checks look at neighbours in a sorted order. The order is a sort of keys, 16 bytes and an
 * index, by a merge sort that returns at once where keys are in order already and merges what runs
 * there are: writers sort by name, or by dtype and then name, and lay data out in that order, so
 * both sorts are one pass for nearly every file.
 *
 * Names: the 16 bytes are the name's, big-endian, zeros after its end. Names that agree in them
 * form a group, which is sorted by the next 16 bytes, and so on ("model.layers.10.mlp.experts..."
 * decides nothing at first). Groups that are small, or that agree in DEEP_BYTES, are compared as
 * whole names: so depth is bounded, and the worst case is that of a merge sort with memcmp.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "header.h"

#define DEEP_BYTES 128
#define SMALL_COUNT 8

typedef unsigned long long ull;

/*
 * Without a branch: which of two keys is first is as good as random, and a wrong guess costs more
 * than the comparison.
 */
static inline bool key_before(const struct tnd__sort_key *a, const struct tnd__sort_key *b)
{
	return (a->high < b->high) | ((a->high == b->high) & (a->low < b->low));
}

/* `tensors`: NULL where the 16 bytes are all there is to compare. */
static inline bool before(const struct tnd_tensor *tensors, const struct tnd__sort_key *a,
			  const struct tnd__sort_key *b)
{
	const struct tnd_tensor *x, *y;

	if (!tensors || a->high != b->high || a->low != b->low)
		return key_before(a, b);
	x = &tensors[a->index];
	y = &tensors[b->index];
	return tnd__compare(x->name, x->name_bytes, y->name, y->name_bytes) < 0;
}

/* End of the run that begins at `from`: no key in it is before its predecessor. */
static size_t run_end(const struct tnd_tensor *tensors, const struct tnd__sort_key *keys,
		      size_t from, size_t count)
{
	size_t at = from + 1;

	while (at < count && !before(tensors, &keys[at], &keys[at - 1]))
		at++;
	return TND__MIN(at, count);
}

/* Merges the sorted runs [from, middle) and [middle, to) of `in` to the same place of `out`. */
static void merge(const struct tnd_tensor *tensors, const struct tnd__sort_key *in,
		  struct tnd__sort_key *out, const size_t bound[3])
{
	size_t a = bound[0], b = bound[1], at = bound[0];

	while (a < bound[1] && b < bound[2]) {
		bool second = before(tensors, &in[b], &in[a]);

		out[at++] = in[second ? b : a];
		a += !second;
		b += second;
	}
	memcpy(&out[at], &in[a], (bound[1] - a) * sizeof(*in));
	at += bound[1] - a;
	memcpy(&out[at], &in[b], (bound[2] - b) * sizeof(*in));
}

static void insertion_sort(const struct tnd_tensor *tensors, struct tnd__sort_key *keys,
			   size_t count)
{
	for (size_t i = 1; i < count; i++) {
		struct tnd__sort_key key = keys[i];
		size_t at = i;

		for (; at && before(tensors, &key, &keys[at - 1]); at--)
			keys[at] = keys[at - 1];
		keys[at] = key;
	}
}

/*
 * Natural merge sort: passes over pairs of runs until one run is left. Short runs are first made
 * SMALL_COUNT long.
 */
static void sort(const struct tnd_tensor *tensors, struct tnd__sort_key *keys,
		 struct tnd__sort_key *spare, size_t count)
{
	struct tnd__sort_key *in = keys, *out = spare, *swap;
	size_t end;

	if (count < 2 || run_end(tensors, keys, 0, count) == count)
		return;
	for (size_t at = 0; at < count; at = end) {
		end = run_end(tensors, keys, at, count);
		if (end - at < SMALL_COUNT) {
			end = TND__MIN(at + SMALL_COUNT, count);
			insertion_sort(tensors, keys + at, end - at);
		}
	}
	while (run_end(tensors, in, 0, count) < count) {
		for (size_t at = 0; at < count; at = end) {
			size_t middle = run_end(tensors, in, at, count);

			end = middle < count ? run_end(tensors, in, middle, count) : count;
			merge(tensors, in, out, (const size_t[3]){at, middle, end});
		}
		swap = in;
		in = out;
		out = swap;
	}
	if (in != keys)
		memcpy(keys, in, count * sizeof(*keys));
}

static uint64_t eight_bytes(const char *text, size_t left)
{
	uint64_t value = 0;

	memcpy(&value, text, TND__MIN(left, 8));
	return __builtin_bswap64(value);
}

static void load_keys(const struct tnd_tensor *tensors, struct tnd__sort_key *keys, size_t count,
		      size_t depth)
{
	for (size_t i = 0; i < count; i++) {
		const struct tnd_tensor *tensor = &tensors[keys[i].index];
		size_t left = tensor->name_bytes > depth ? tensor->name_bytes - depth : 0;

		keys[i].high = left ? eight_bytes(tensor->name + depth, left) : 0;
		keys[i].low = left > 8 ? eight_bytes(tensor->name + depth + 8, left - 8) : 0;
	}
}

/* Recursion: DEEP_BYTES / 16 levels at most. */
static void sort_from(const struct tnd_tensor *tensors, struct tnd__sort_key *keys,
		      struct tnd__sort_key *spare, size_t count, size_t depth)
{
	size_t end;

	load_keys(tensors, keys, count, depth);
	if (count <= SMALL_COUNT || depth >= DEEP_BYTES) {
		sort(tensors, keys, spare, count);
		return;
	}
	sort(NULL, keys, spare, count);
	for (size_t at = 0; at < count; at = end) {
		end = at + 1;
		while (end < count && keys[end].high == keys[at].high &&
		       keys[end].low == keys[at].low)
			end++;
		if (end - at > 1)
			sort_from(tensors, keys + at, spare, end - at, depth + 16);
	}
}

static bool names_in_order(const struct tnd_tensor *tensors, const struct tnd__sort_key *keys,
			   size_t count)
{
	for (size_t i = 1; i < count; i++) {
		const struct tnd_tensor *a = &tensors[keys[i - 1].index],
					*b = &tensors[keys[i].index];

		if (tnd__compare(a->name, a->name_bytes, b->name, b->name_bytes) > 0)
			return false;
	}
	return true;
}

void tnd__sort_names(const struct tnd_tensor *tensors, struct tnd__sort_key *keys,
		     struct tnd__sort_key *spare, size_t count)
{
	if (!names_in_order(tensors, keys, count))
		sort_from(tensors, keys, spare, count, 0);
}

struct check {
	const struct tnd__header_text *text;
	const struct tnd_tensor *tensors;
	const uint64_t *positions;
	struct tnd__sort_key *keys;
	size_t count;
	struct tnd_error *error;
};

static struct tnd__where where_of(const struct check *check, size_t index)
{
	return (struct tnd__where){
		.file = check->text->file,
		.name = check->tensors[index].name,
		.name_bytes = check->tensors[index].name_bytes,
		.byte_offset = check->positions[index],
		.has_offset = true,
	};
}

static int check_duplicates(const struct check *check)
{
	for (size_t i = 1; i < check->count; i++) {
		size_t first = check->keys[i - 1].index, second = check->keys[i].index;
		const struct tnd_tensor *a = &check->tensors[first], *b = &check->tensors[second];
		struct tnd__where where;

		if (a->name_bytes != b->name_bytes || memcmp(a->name, b->name, a->name_bytes) != 0)
			continue;
		where = where_of(check, second);
		return tnd__fail(check->error, TND_E_DUPLICATE, &where,
				 "duplicate tensor name: it stands at byte %llu and again at byte "
				 "%llu of the header; write the file again with unique names",
				 (ull)check->positions[first], (ull)check->positions[second]);
	}
	return 0;
}

static int fail_order(const struct check *check, size_t index, const struct tnd_tensor *last,
		      uint64_t end)
{
	const struct tnd_tensor *tensor = &check->tensors[index];
	struct tnd__where where = where_of(check, index);
	char name[TND_ERROR_NAME_MAX];
	ull begin = tensor->offset, byte = check->positions[index];

	if (!last)
		return tnd__fail(check->error, TND_E_OFFSETS, &where,
				 "expected the data of the first tensor to begin at 0, found %llu "
				 "(at byte %llu); write the file again without a gap",
				 begin, byte);
	tnd__printable(last->name, last->name_bytes, name, sizeof(name));
	if (begin > end)
		return tnd__fail(check->error, TND_E_OFFSETS, &where,
				 "a hole of %llu bytes: its data begin at %llu, those of '%s' "
				 "before it end at %llu (at byte %llu)",
				 begin - end, begin, name, (ull)end, byte);
	return tnd__fail(check->error, TND_E_OFFSETS, &where,
			 "its data [%llu, %llu) %s [%llu, %llu) of tensor '%s' (at byte %llu)",
			 begin, begin + tensor->bytes,
			 tensor->offset == last->offset && tensor->bytes == last->bytes
				 ? "are the same range as"
				 : "overlap",
			 (ull)last->offset, (ull)(last->offset + last->bytes), name, byte);
}

static int check_end(const struct check *check, uint64_t end)
{
	const struct tnd__header_text *text = check->text;
	struct tnd__where where = {.file = text->file};
	ull header = 8 + (ull)text->bytes, found = text->data_bytes;

	if (end > text->data_bytes)
		return tnd__fail(check->error, TND_E_TRUNCATED, &where,
				 "expected %llu bytes of data after %llu of header, found %llu: "
				 "%llu are missing (interrupted download?)",
				 (ull)end, header, found, (ull)(end - text->data_bytes));
	if (end < text->data_bytes && !(text->flags & TND_CHECKPOINT_F_ALLOW_TRAILING))
		return tnd__fail(check->error, TND_E_TRAILING, &where,
				 "expected %llu bytes of data after %llu of header, found %llu: "
				 "%llu trailing bytes (they can be let pass: --allow-trailing)",
				 (ull)end, header, found, (ull)(text->data_bytes - end));
	return 0;
}

static int check_offsets(const struct check *check, struct tnd__sort_key *spare)
{
	const struct tnd_tensor *last = NULL;
	uint64_t end = 0;

	for (size_t i = 0; i < check->count; i++) {
		const struct tnd_tensor *tensor = &check->tensors[i];

		check->keys[i] =
			(struct tnd__sort_key){tensor->offset, tensor->offset + tensor->bytes, i};
	}
	sort(NULL, check->keys, spare, check->count);
	for (size_t i = 0; i < check->count; i++) {
		const struct tnd_tensor *tensor = &check->tensors[check->keys[i].index];

		if (tensor->offset != end)
			return fail_order(check, check->keys[i].index, last, end);
		end = tensor->offset + tensor->bytes;
		last = tensor;
	}
	return check_end(check, end);
}

/* Tensors in the order of the keys, with the data's place in the file. */
static void gather(const struct check *check, struct tnd_tensor *out)
{
	for (size_t i = 0; i < check->count; i++) {
		out[i] = check->tensors[check->keys[i].index];
		out[i].offset += 8 + (uint64_t)check->text->bytes;
	}
}

int tnd__header_check(const struct tnd__header_text *text, struct tnd__header *header,
		      const uint64_t *positions, struct tnd_error *reterr)
{
	size_t count = header->tensor_count;
	struct tnd__sort_key *keys = tnd__checkpoint_alloc(3 * count * sizeof(*keys));
	struct tnd_tensor *sorted = tnd__checkpoint_alloc(count * sizeof(*sorted));
	struct check check = {text, header->tensors, positions, keys, count, reterr};
	struct check by_name = check;
	int rc;

	if (!keys || !sorted) {
		rc = tnd__fail(reterr, -ENOMEM, &(struct tnd__where){.file = text->file},
			       "no memory to check %zu tensors", count);
		goto out;
	}
	by_name.keys = keys + 2 * count;
	for (size_t i = 0; i < count; i++)
		by_name.keys[i].index = i;
	tnd__sort_names(header->tensors, by_name.keys, keys, count);
	rc = check_duplicates(&by_name);
	if (rc == 0)
		rc = check_offsets(&check, keys + count);
	if (rc < 0)
		goto out;
	gather(&by_name, sorted);
	free(header->tensors);
	header->tensors = sorted;
	sorted = NULL;
out:
	free(sorted);
	free(keys);
	return rc;
}
