/* SPDX-License-Identifier: Apache-2.0 */
/*
 * names.c - what each tensor is, from its name and number of dimensions alone
 *
 * Done once a plan, whatever the rank. The last two components of a name decide; the head of it
 * only says whether it is a draft's and whether it is an expert's:
 *
 *   mtp.0.layers.3.mlp.experts.17.w1.weight_scale_inv
 *   |---| draft        |----------| routed expert 17
 *                                 |--| module -> role (COLUMN)
 *                                    |-------------| leaf -> FOLLOW (the scale of its weight)
 *
 *   model.layers.3.mlp.experts.gate_up_proj_scale   fused: the leaf is the module with a suffix
 *
 * Built-in rules are comparisons of whole components, no pattern matching: 100,000 names take some
 * milliseconds. A name that is in no table keeps the role WHOLE, which is always right, only not
 * the least to read.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "plan_internal.h"

#define DEFAULT_DRAFT_PREFIX "mtp."
#define DEFAULT_SKIP ".engram.embed." /* the pattern "*.engram.embed.*" */

struct word {
	const char *text;
	size_t bytes;
};

struct row {
	const char *text;
	uint8_t value;
};

static const struct row modules[] = {
	{"w1", TND__ROLE_COLUMN},
	{"w2", TND__ROLE_ROW},
	{"w3", TND__ROLE_COLUMN},
	{"gate_proj", TND__ROLE_COLUMN},
	{"up_proj", TND__ROLE_COLUMN},
	{"down_proj", TND__ROLE_ROW},
	{"gate_up_proj", TND__ROLE_GATE_UP},
	{"q_proj", TND__ROLE_Q},
	{"q_b_proj", TND__ROLE_Q},
	{"kv_b_proj", TND__ROLE_Q},
	{"k_proj", TND__ROLE_KV},
	{"v_proj", TND__ROLE_KV},
	{"o_proj", TND__ROLE_O},
	{"qkv_proj", TND__ROLE_QKV},
	{"embed_tokens", TND__ROLE_VOCAB},
	{"lm_head", TND__ROLE_VOCAB},
};

static const struct row leaves[] = {
	{"weight", TND__LEAF_WEIGHT},
	{"scale", TND__LEAF_FOLLOW},
	{"weight_scale", TND__LEAF_FOLLOW},
	{"weight_scale_inv", TND__LEAF_FOLLOW},
	{"bias", TND__LEAF_BIAS},
	{"weight_packed", TND__LEAF_WEIGHT},
	{"weight_zero_point", TND__LEAF_FOLLOW},
	{"qweight", TND__LEAF_TRANSPOSED},
	{"scales", TND__LEAF_FOLLOW},
	{"qzeros", TND__LEAF_FOLLOW},
	{"g_idx", TND__LEAF_FOLLOW},
};

/* Behind the module in the name of a fused tensor. */
static const struct row suffixes[] = {
	{"", TND__LEAF_WEIGHT},           {"_scale", TND__LEAF_FOLLOW},
	{"_scale_inv", TND__LEAF_FOLLOW}, {"_weight_scale", TND__LEAF_FOLLOW},
	{"_blocks", TND__LEAF_MXFP4},     {"_scales", TND__LEAF_MXFP4},
	{"_bias", TND__LEAF_BIAS},
};

#define COUNT(array) (sizeof(array) / sizeof(*(array)))

static bool is(const struct word *word, const char *text)
{
	return strlen(text) == word->bytes && memcmp(text, word->text, word->bytes) == 0;
}

static uint8_t look_up(const struct row *rows, size_t count, const struct word *word)
{
	for (size_t i = 0; i < count; i++)
		if (is(word, rows[i].text))
			return rows[i].value;
	return 0;
}

/* The component that ends at `end`. */
static struct word component(const char *name, const char *end)
{
	const char *dot = end > name ? memrchr(name, '.', (size_t)(end - name)) : NULL;
	const char *begin = dot ? dot + 1 : name;

	return (struct word){begin, (size_t)(end - begin)};
}

static struct word component_before(const char *name, const struct word *word)
{
	return word->text > name ? component(name, word->text - 1) : (struct word){name, 0};
}

/* Number of the expert in ".experts.<digits>.", saturated; TND__NO_INDEX without. */
static uint32_t routed_expert(const char *name, size_t name_bytes)
{
	static const char mark[] = ".experts.";
	const char *at = name, *end = name + name_bytes;

	while ((at = memmem(at, (size_t)(end - at), mark, sizeof(mark) - 1))) {
		uint64_t number = 0;
		const char *digit = at += sizeof(mark) - 1;

		for (; digit < end && *digit >= '0' && *digit <= '9'; digit++)
			number = TND__MIN(number * 10 + (uint64_t)(*digit - '0'),
					  UINT64_C(0xfffffffe));
		if (digit > at && digit < end && *digit == '.')
			return (uint32_t)number;
		at--;
	}
	return TND__NO_INDEX;
}

/* "gate_up_proj_scale" -> role and leaf. */
static void classify_fused_leaf(const struct word *leaf, struct tnd__name *out)
{
	for (size_t m = 0; m < COUNT(modules); m++) {
		size_t length = strlen(modules[m].text);
		struct word rest;

		if (leaf->bytes < length || memcmp(leaf->text, modules[m].text, length) != 0)
			continue;
		rest = (struct word){leaf->text + length, leaf->bytes - length};
		for (size_t s = 0; s < COUNT(suffixes); s++) {
			if (!is(&rest, suffixes[s].text))
				continue;
			out->role = modules[m].value;
			out->leaf = suffixes[s].value;
			return;
		}
	}
}

/* Two dimensions are [E, out] only where the name says so: [E I, H] weights exist too. */
static void classify_fused_shape(const struct tnd_tensor *tensor, struct tnd__name *out)
{
	bool weight = out->leaf == TND__LEAF_WEIGHT || out->leaf == TND__LEAF_TRANSPOSED;

	if (tensor->dim_count >= 3 || (tensor->dim_count == 2 && out->role && !weight))
		out->flags |= TND__NAME_F_FUSED;
	else
		out->role = TND__ROLE_WHOLE;
}

static bool is_scale(const struct word *leaf)
{
	return memmem(leaf->text, leaf->bytes, "scale", 5) != NULL;
}

static bool one_value(const struct tnd_tensor *tensor)
{
	for (uint32_t i = 0; i < tensor->dim_count; i++)
		if (tensor->shape[i] > 1)
			return false;
	return true;
}

static void classify(const struct tnd_tensor *tensor, struct tnd__name *out)
{
	const char *name = tensor->name;
	struct word leaf = component(name, name + tensor->name_bytes);
	struct word module = component_before(name, &leaf);
	struct word parent = component_before(name, &module);

	out->expert = routed_expert(name, tensor->name_bytes);
	out->leaf = look_up(leaves, COUNT(leaves), &leaf);
	if (out->leaf)
		out->role = look_up(modules, COUNT(modules), &module);
	if (out->expert == TND__NO_INDEX) {
		if (is(&module, "experts") && !out->leaf)
			classify_fused_leaf(&leaf, out);
		if (is(&module, "experts") || is(&parent, "experts"))
			classify_fused_shape(tensor, out);
	}
	if (is_scale(&leaf)) {
		out->flags |= TND__NAME_F_SCALE;
		if (one_value(tensor) || is(&leaf, "input_scale"))
			out->flags |= TND__NAME_F_ONE_SCALE;
		if (leaf.bytes > 4 && memcmp(leaf.text + leaf.bytes - 4, "_inv", 4) == 0)
			out->flags |= TND__NAME_F_INVERSE;
	}
}

/* -- the weight of a scale, and other partners -- */

static const struct {
	const char *scale, *weights[2];
} partners[] = {
	{".scale", {".weight", NULL}},
	{".weight_scale", {".weight", ".weight_packed"}},
	{".weight_scale_inv", {".weight", NULL}},
	{".weight_zero_point", {".weight_packed", ".weight"}},
	{".scales", {".qweight", ".weight"}},
	{".qzeros", {".qweight", NULL}},
	{".g_idx", {".qweight", NULL}},
	{"_scale", {"", ".weight"}},
	{"_scale_inv", {"", ".weight"}},
	{"_weight_scale", {"", ".weight"}},
};

static bool same_name(const struct tnd_tensor *tensor, const struct word *stem,
		      const struct word *end)
{
	return tensor->name_bytes == stem->bytes + end->bytes &&
	       memcmp(tensor->name + stem->bytes, end->text, end->bytes) == 0 &&
	       memcmp(tensor->name, stem->text, stem->bytes) == 0;
}

static uint32_t look_around(const struct tnd__slicer *slicer, uint32_t at, const struct word *stem,
			    const struct word *end)
{
	for (uint32_t i = at < 4 ? 0 : at - 4; i < slicer->count && i <= at + 4; i++)
		if (same_name(&slicer->tensors[i], stem, end))
			return i;
	return TND__NO_INDEX;
}

/*
 * A weight and its scale are neighbours in name order. If they are in different files, the next
 * scale's weight is mostly near the last one's.
 */
static uint32_t find_sibling(struct tnd__slicer *slicer, const struct tnd_checkpoint *checkpoint,
			     uint32_t index, size_t stem_bytes, const char *suffix)
{
	struct word stem = {slicer->tensors[index].name, stem_bytes};
	struct word end = {suffix, strlen(suffix)};
	const struct tnd_tensor *found;
	char text[512];
	uint32_t near;

	near = look_around(slicer, index, &stem, &end);
	if (near == TND__NO_INDEX)
		near = look_around(slicer, slicer->hint, &stem, &end);
	if (near == TND__NO_INDEX && stem.bytes + end.bytes <= sizeof(text)) {
		memcpy(text, stem.text, stem.bytes);
		memcpy(text + stem.bytes, end.text, end.bytes);
		if (tnd_checkpoint_find(checkpoint, text, stem.bytes + end.bytes, &found) == 0)
			near = (uint32_t)(found - slicer->tensors);
	}
	if (near != TND__NO_INDEX)
		slicer->hint = near;
	return near;
}

static uint32_t find_partner(struct tnd__slicer *slicer, const struct tnd_checkpoint *checkpoint,
			     uint32_t index)
{
	const struct tnd_tensor *tensor = &slicer->tensors[index];
	const struct tnd__name *name = &slicer->names[index];

	if (name->flags & TND__NAME_F_ONE_SCALE)
		return TND__NO_INDEX;
	/*
	 * gpt-oss: what has a bias beside it has gate and up interleaved; what has blocks beside it
	 * is cut at blocks.
	 */
	if ((name->flags & TND__NAME_F_FUSED) && name->leaf == TND__LEAF_WEIGHT)
		return find_sibling(slicer, checkpoint, index, tensor->name_bytes, "_bias");
	if ((name->flags & TND__NAME_F_FUSED) && name->leaf == TND__LEAF_BIAS &&
	    tensor->name_bytes > 5)
		return find_sibling(slicer, checkpoint, index, tensor->name_bytes - 5, "_blocks");
	if (name->leaf != TND__LEAF_FOLLOW || (!name->role && !slicer->rules.count))
		return TND__NO_INDEX;
	for (size_t i = 0; i < COUNT(partners); i++) {
		size_t length = strlen(partners[i].scale);
		size_t stem = tensor->name_bytes - length;

		if (tensor->name_bytes < length ||
		    memcmp(tensor->name + stem, partners[i].scale, length) != 0)
			continue;
		for (size_t k = 0; k < 2 && partners[i].weights[k]; k++) {
			uint32_t found = find_sibling(slicer, checkpoint, index, stem,
						      partners[i].weights[k]);

			if (found != TND__NO_INDEX && found != index)
				return found;
		}
	}
	return TND__NO_INDEX;
}

/* -- names asked for, names skipped -- */

struct pattern {
	const char *text;
	bool used; /* it matched a tensor */
};

struct filter {
	struct pattern *literals; /* sorted */
	size_t literal_count;
	struct pattern *globs;
	size_t glob_count;
};

static int compare_patterns(const void *a, const void *b)
{
	return strcmp(((const struct pattern *)a)->text, ((const struct pattern *)b)->text);
}

/* Thousands of plain names are looked up by halving; only true patterns are matched one by one. */
static int filter_init(struct filter *filter, const char *const *patterns, size_t count)
{
	memset(filter, 0, sizeof(*filter));
	if (!count)
		return 0;
	filter->literals = tnd__plan_alloc(count, sizeof(*filter->literals));
	filter->globs = tnd__plan_alloc(count, sizeof(*filter->globs));
	if (!filter->literals || !filter->globs)
		return -ENOMEM;
	for (size_t i = 0; i < count; i++) {
		if (patterns[i][strcspn(patterns[i], "*?[\\")])
			filter->globs[filter->glob_count++].text = patterns[i];
		else
			filter->literals[filter->literal_count++].text = patterns[i];
	}
	qsort(filter->literals, filter->literal_count, sizeof(*filter->literals), compare_patterns);
	return 0;
}

static void filter_fini(struct filter *filter)
{
	free(filter->literals);
	free(filter->globs);
}

/* The first of equal literals; the others count as used with it. */
static struct pattern *find_literal(const struct filter *filter, const char *name)
{
	const struct pattern wanted = {.text = name};
	struct pattern *found;

	if (!filter->literal_count)
		return NULL;
	found = bsearch(&wanted, filter->literals, filter->literal_count, sizeof(*filter->literals),
			compare_patterns);
	while (found && found > filter->literals && compare_patterns(found - 1, found) == 0)
		found--;
	return found;
}

static bool filter_matches(const struct filter *filter, const struct tnd_tensor *tensor)
{
	const char *name = tensor->name;
	/* strlen: a name with a NUL inside is no plain text, and is only matched by "*". */
	struct pattern *literal =
		strlen(name) == tensor->name_bytes ? find_literal(filter, name) : NULL;
	bool matches = literal != NULL;

	if (literal)
		literal->used = true;
	/* One that has not matched yet is asked although another matches: is it of any use? */
	for (size_t i = 0; i < filter->glob_count; i++) {
		struct pattern *glob = &filter->globs[i];

		if ((matches && glob->used) || !tnd__glob(glob->text, name, tensor->name_bytes))
			continue;
		glob->used = matches = true;
	}
	return matches;
}

static int warn_of_pattern(struct tnd__sentences *warnings, const char *what,
			   const struct pattern *pattern)
{
	char shown[256];

	if (tnd__failpoint("plan.alloc") < 0)
		return -ENOMEM;
	return tnd__sentences_add(
		warnings, "%s: no tensor's name matches '%s'", what,
		tnd__printable(pattern->text, strlen(pattern->text), shown, sizeof(shown)));
}

/* A pattern that matches nothing is mostly a misspelling. */
static int filter_warnings(const struct filter *filter, const char *what,
			   struct tnd__sentences *warnings)
{
	int rc = 0;

	for (size_t i = 0; i < filter->glob_count && rc == 0; i++)
		if (!filter->globs[i].used)
			rc = warn_of_pattern(warnings, what, &filter->globs[i]);
	for (size_t i = 0; i < filter->literal_count && rc == 0; i++) {
		const struct pattern *literal = &filter->literals[i];

		if (!literal->used && (i == 0 || compare_patterns(literal - 1, literal) != 0))
			rc = warn_of_pattern(warnings, what, literal);
	}
	return rc;
}

struct asked {
	const struct tnd_plan_opts *opts;
	struct filter skip, names;
	bool default_skip;
	const char *draft_prefix;
	size_t draft_bytes;
};

static bool left_out(const struct asked *asked, const struct tnd_tensor *tensor)
{
	const struct tnd_plan_opts *opts = asked->opts;
	/* Both are asked, also where one decides: which patterns match is of interest. */
	bool skipped = filter_matches(&asked->skip, tensor);
	bool named = filter_matches(&asked->names, tensor);

	if (asked->default_skip &&
	    memmem(tensor->name, tensor->name_bytes, DEFAULT_SKIP, sizeof(DEFAULT_SKIP) - 1))
		return true;
	if (skipped)
		return true;
	if (!(opts->flags & TND_PLAN_F_NAMES) || named)
		return false;
	return !opts->want || !opts->want(opts->want_arg, tensor->name, tensor->name_bytes);
}

static uint32_t user_rule(const struct tnd__user_rules *rules, const struct tnd_tensor *tensor)
{
	for (size_t i = rules->count; i-- > 0;) {
		const struct tnd__rule *rule = &rules->items[i];

		if (rule->literal ? rule->glob_bytes == tensor->name_bytes &&
					    memcmp(rule->glob, tensor->name, rule->glob_bytes) == 0
				  : tnd__glob(rule->glob, tensor->name, tensor->name_bytes))
			return (uint32_t)i + 1;
	}
	return 0;
}

static void classify_all(struct tnd__slicer *slicer, const struct tnd_checkpoint *checkpoint,
			 const struct asked *asked)
{
	bool slices = slicer->policy != TND_SLICE_NONE;

	for (size_t i = 0; i < slicer->count; i++) {
		const struct tnd_tensor *tensor = &slicer->tensors[i];
		struct tnd__name *name = &slicer->names[i];

		name->partner = TND__NO_INDEX;
		classify(tensor, name);
		if (tensor->name_bytes >= asked->draft_bytes &&
		    memcmp(tensor->name, asked->draft_prefix, asked->draft_bytes) == 0)
			name->flags |= TND__NAME_F_DRAFT;
		if (left_out(asked, tensor))
			name->flags |= TND__NAME_F_LEFT_OUT;
		if (!slices)
			continue;
		name->rule = user_rule(&slicer->rules, tensor);
		name->partner = find_partner(slicer, checkpoint, (uint32_t)i);
	}
}

int tnd__names_classify(struct tnd__slicer *slicer, const struct tnd_checkpoint *checkpoint,
			const struct tnd_plan_opts *opts, struct tnd__sentences *warnings)
{
	struct asked asked = {.opts = opts};
	int rc;

	asked.default_skip =
		slicer->phase == TND_PHASE_TARGET && !(opts->flags & TND_PLAN_F_NO_DEFAULT_SKIP);
	asked.draft_prefix = opts->draft_prefix ? opts->draft_prefix : DEFAULT_DRAFT_PREFIX;
	asked.draft_bytes = strlen(asked.draft_prefix);
	slicer->names = tnd__plan_alloc(slicer->count, sizeof(*slicer->names));
	if (!slicer->names)
		return -ENOMEM;
	rc = filter_init(&asked.skip, opts->skip, opts->skip_count);
	if (rc == 0)
		rc = filter_init(&asked.names, opts->names, opts->name_count);
	if (rc == 0) {
		classify_all(slicer, checkpoint, &asked);
		rc = filter_warnings(&asked.skip, "skip", warnings);
	}
	if (rc == 0)
		rc = filter_warnings(&asked.names, "names", warnings);
	filter_fini(&asked.skip);
	filter_fini(&asked.names);
	return rc;
}
