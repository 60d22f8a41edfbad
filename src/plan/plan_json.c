/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_json.c - plans of all ranks as one document, tundish.plan/1
 *
 * Lists of tensors and slabs are written one element at a time: as one tree, four ranks of 100,000
 * tensors would take half a gigabyte.
 */
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "plan_internal.h"

/* Appends `value` (taken over) as JSON. */
static void put(struct tnd__text *text, json_t *value)
{
	char *dump = value && tnd__failpoint("plan.alloc") == 0
			     ? json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY)
			     : NULL;

	if (dump)
		tnd__text_add(text, "%s", dump);
	else
		text->failed = true;
	free(dump);
	json_decref(value);
}

/* Appends the members of an object, without its braces. */
static void put_members(struct tnd__text *text, json_t *object)
{
	char *dump = object && tnd__failpoint("plan.alloc") == 0 ? json_dumps(object, JSON_COMPACT)
								 : NULL;

	if (dump)
		tnd__text_add(text, "%.*s", (int)strlen(dump) - 2, dump + 1);
	else
		text->failed = true;
	free(dump);
	json_decref(object);
}

json_t *tnd__plan_json_name(const char *name)
{
	char text[1024];
	json_t *value = json_string(name);

	return value ? value : json_string(tnd__printable(name, strlen(name), text, sizeof(text)));
}

static json_int_t number(uint64_t value)
{
	return (json_int_t)TND__MIN(value, (uint64_t)INT64_MAX);
}

static json_t *rank_object(const struct tnd_plan *plan)
{
	const struct tnd_plan_totals *t = &plan->totals;

	return json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I}", "rank",
			 number(plan->layout.rank), "tensors", number(t->tensors), "sliced",
			 number(t->sliced), "skipped", number(t->skipped), "read_bytes",
			 number(t->read_bytes), "kept_bytes", number(t->kept_bytes), "slabs",
			 number(t->slabs), "slab_bytes_max", number(t->slab_bytes_max),
			 "peak_bytes", number(t->peak_bytes), "least_budget_bytes",
			 number(t->least_budget_bytes), "shards_opened", number(t->shards_opened),
			 "shards_skipped", number(t->shards_skipped));
}

/* The pieces of a tensor are one element: the place of the first, the bytes of all. */
static json_t *tensor_object(const struct tnd_plan *plan, size_t index,
			     const struct tnd_file *files)
{
	const struct tnd_plan_item *item = &plan->items[index];
	const struct tnd_tensor *tensor = item->tensor;
	uint64_t read = item->read_bytes;
	bool sliced = item->dim >= 0;

	for (size_t i = index + 1; i < plan->item_count && plan->items[i].tensor == tensor; i++)
		read += plan->items[i].read_bytes;
	return json_pack("{s:o,s:o,s:o,s:o,s:o,s:I,s:I,s:o,s:I}", "name",
			 json_stringn(tensor->name, tensor->name_bytes), "file",
			 tnd__plan_json_name(files[tensor->file].name), "dim",
			 sliced ? json_integer(item->dim) : json_null(), "start",
			 sliced ? json_integer(number(item->start)) : json_null(), "length",
			 sliced ? json_integer(number(item->length)) : json_null(), "kept_bytes",
			 number(item->slice_bytes), "read_bytes", number(read), "slab",
			 item->slab == TND_PLAN_NO_SLAB ? json_null() : json_integer(item->slab),
			 "offset", number(item->slab_offset));
}

static void put_tensors(struct tnd__text *text, const struct tnd_plan *plan)
{
	const struct tnd_file *files = tnd_checkpoint_files(plan->checkpoint, &(size_t){0});

	tnd__text_add(text, ",\"layout\":[");
	for (size_t i = 0; i < plan->item_count && !text->failed; i++) {
		if (i && plan->items[i].tensor == plan->items[i - 1].tensor)
			continue;
		if (i)
			tnd__text_add(text, ",");
		put(text, tensor_object(plan, i, files));
	}
	tnd__text_add(text, "],\"slab_list\":[");
	for (size_t i = 0; i < plan->slab_count && !text->failed; i++) {
		if (i)
			tnd__text_add(text, ",");
		put(text, json_pack("{s:o,s:I}", "file",
				    tnd__plan_json_name(files[plan->slabs[i].file].name), "bytes",
				    number(plan->slabs[i].bytes)));
	}
	tnd__text_add(text, "]");
}

struct seen {
	const char **texts;
	size_t count;
};

/* Ranks mostly warn of the same. */
static void put_warning(struct tnd__text *text, struct seen *seen, const char *warning)
{
	for (size_t i = 0; i < seen->count; i++)
		if (strcmp(seen->texts[i], warning) == 0)
			return;
	if (seen->count)
		tnd__text_add(text, ",");
	seen->texts[seen->count++] = warning;
	put(text, json_string(warning));
}

static void put_warnings(struct tnd__text *text, const struct tnd_plan *const *plans, size_t count)
{
	const char *const *warnings;
	size_t all = tnd_checkpoint_warnings(plans[0]->checkpoint, &warnings), own = all;
	struct seen seen = {0};

	for (size_t i = 0; i < count; i++)
		all += plans[i]->warnings.count;
	seen.texts = tnd__plan_alloc(all, sizeof(*seen.texts));
	if (!seen.texts) {
		text->failed = true;
		return;
	}
	for (size_t i = 0; i < own; i++)
		put_warning(text, &seen, warnings[i]);
	for (size_t i = 0; i < count; i++)
		for (size_t k = 0; k < plans[i]->warnings.count; k++)
			put_warning(text, &seen, plans[i]->warnings.items[k]);
	free(seen.texts);
}

static bool same_job(const struct tnd_plan *a, const struct tnd_plan *b)
{
	return a->checkpoint == b->checkpoint && a->phase == b->phase &&
	       a->layout.tp_size == b->layout.tp_size && a->layout.dp_size == b->layout.dp_size &&
	       a->layout.ep_size == b->layout.ep_size;
}

int tnd_plan_json(const struct tnd_plan *const *plans, size_t plan_count, uint32_t flags,
		  char **ret_text)
{
	static const char *const phases[] = {"all", "target", "draft"};
	const struct tnd_plan *first = plan_count ? plans[0] : NULL;
	struct tnd__text text = {0};
	char *made;

	if (!first || (flags & ~TND_PLAN_JSON_F_TENSORS))
		return TND_E_INVALID;
	/* A union is no rank's: its items are none that anybody gets. */
	for (size_t i = 0; i < plan_count; i++)
		if (!same_job(first, plans[i]) || plans[i]->choice.of_union)
			return TND_E_INVALID;
	tnd__text_add(&text, "{");
	put_members(&text,
		    json_pack("{s:s,s:I,s:I,s:I,s:s,s:I,s:I,s:n}", "schema", "tundish.plan/1",
			      "tp_size", number(first->layout.tp_size), "dp_size",
			      number(first->layout.dp_size), "ep_size",
			      number(first->layout.ep_size), "phase", phases[first->phase],
			      "budget_bytes", number(first->totals.budget_bytes), "run_min_bytes",
			      number(first->totals.run_min_bytes), "predicted_seconds"));
	tnd__text_add(&text, ",\"ranks\":[");
	for (size_t i = 0; i < plan_count; i++) {
		tnd__text_add(&text, i ? ",{" : "{");
		put_members(&text, rank_object(plans[i]));
		if (flags & TND_PLAN_JSON_F_TENSORS)
			put_tensors(&text, plans[i]);
		tnd__text_add(&text, "}");
	}
	tnd__text_add(&text, "],");
	put_members(&text,
		    json_pack("{s:{s:I}}", "node", "read_bytes", number(first->node_read_bytes)));
	tnd__text_add(&text, ",\"warnings\":[");
	put_warnings(&text, plans, plan_count);
	tnd__text_add(&text, "]}");
	made = tnd__text_take(&text);
	if (!made)
		return -ENOMEM;
	*ret_text = made;
	return 0;
}
