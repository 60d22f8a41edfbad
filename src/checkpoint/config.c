/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config.c - expert counts and model facts of config.json
 *
 * Looked up at the top, then in the objects that multi-modal models wrap their language model's
 * configuration in. A draft (MTP) stack has keys of its own: "<anything>_n_routed_experts", or
 * another count's name after a prefix that says draft or mtp, or an object of its own. null and 0
 * say that a model has none of it. Nothing here is an error: slicing works without, or says what it
 * lacks.
 *
 *   text -> one pass of the cursor, only known keys kept -> scopes -> look_up -> struct tnd__config
 *
 * A scope is an object that is looked into: the top, the nested ones, and the draft stack's in each
 * of them. The cursor is the header's, lenient: config.json is what Python writes, with Infinity
 * and NaN, and with integers of any length. They are no counts, and no reason to lose the others.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "jsontext.h"
#include "parts.h"

#define CONFIG_BYTES_MAX TND__MIB(16)

static const char *const nested[] = {"text_config", "language_config", "llm_config"};
static const char *const draft_objects[] = {"mtp_config", "draft_config"};
static const char *const draft_words[] = {"draft", "mtp", "nextn", "dspark", "eagle"};
/* The first four are the expert counts. */
static const char *const keys[] = {
	"n_routed_experts",  "num_experts",          "num_local_experts",
	"moe_num_experts",   "num_attention_heads",  "num_key_value_heads",
	"head_dim",          "hidden_size",          "vocab_size",
	"intermediate_size", "moe_intermediate_size"};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define EXPERT_KEYS 4
#define BASES (1 + COUNT(nested))

enum kind { ABSENT, NOT_A_COUNT, A_COUNT /* null is 0 */ };

struct value {
	enum kind kind;
	uint64_t count;
};

struct scope {
	struct value values[COUNT(keys)];
};

/* The top or a nested object. */
struct base {
	struct scope own, drafts[COUNT(draft_objects)];
	uint64_t draft_count;   /* under a key of its own; 0: none */
	char draft_refused[64]; /* such a key whose value is no count, "": none */
};

struct lookup {
	const char *file;
	struct tnd__sentences *warnings;
	bool no_memory;
	struct base bases[BASES];
};

void tnd__config_init(struct tnd__config *config)
{
	memset(config, 0, sizeof(*config));
	config->expert_count = config->draft_expert_count = TND_EXPERTS_UNKNOWN;
	config->facts.struct_bytes = sizeof(config->facts);
}

static void warn(struct lookup *lookup, const char *format, const char *what)
{
	char shown[256];

	tnd__printable(what, strlen(what), shown, sizeof(shown));
	if (tnd__sentences_add(lookup->warnings, format, lookup->file, shown) < 0)
		lookup->no_memory = true;
}

static void warn_of_count(struct lookup *lookup, const char *key)
{
	warn(lookup, "%s: expected '%s' to be a count, found something else: ignored", key);
}

/* -- the text -- */

static size_t index_of(const struct tnd__span *span, const char *const *texts, size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (tnd__span_is(span, texts[i], strlen(texts[i])))
			return i;
	return count;
}

/* A count, or the first of a list of them. */
static int read_count(struct tnd__json *json, struct value *ret_value)
{
	struct tnd_error *error = json->error;
	struct tnd__json start;
	bool first = true;
	int rc = 0;

	*ret_value = (struct value){.kind = NOT_A_COUNT};
	start = *json;
	if (json->at < json->end && *json->at == '[') {
		json->at++;
		rc = tnd__json_next(json, ']', &first);
		if (rc <= 0)
			return rc;
	}
	json->error = NULL;
	if (tnd__json_word(json, "null") || tnd__json_u64(json, "a count", &ret_value->count) == 0)
		ret_value->kind = ret_value->count <= INT64_MAX ? A_COUNT : NOT_A_COUNT;
	/* What it is in full: nothing there was changed, as no string was read. */
	*json = start;
	json->error = error;
	return tnd__json_skip(json);
}

/* Whether `key` is one of the expert keys behind a prefix that makes it the draft stack's. */
static bool is_draft_key(const struct tnd__span *key)
{
	for (size_t i = 0; i < EXPERT_KEYS; i++) {
		size_t tail = strlen(keys[i]), head = key->bytes - tail;

		if (key->bytes < tail + 2 || memcmp(key->text + head, keys[i], tail) != 0 ||
		    key->text[head - 1] != '_')
			continue;
		if (i == 0)
			return true;
		for (size_t j = 0; j < COUNT(draft_words); j++)
			if (memmem(key->text, head, draft_words[j], strlen(draft_words[j])))
				return true;
	}
	return false;
}

static int read_draft_count(struct tnd__json *json, const struct tnd__span *key, struct base *base)
{
	char shown[sizeof(base->draft_refused)];
	struct value value;
	int rc;

	tnd__printable(key->text, key->bytes, shown, sizeof(shown));
	rc = read_count(json, &value);
	if (rc < 0 || base->draft_count)
		return rc;
	base->draft_count = value.count;
	if (value.kind == NOT_A_COUNT)
		memcpy(base->draft_refused, shown, sizeof(shown));
	return 0;
}

static int read_scope(struct tnd__json *json, struct scope *scope)
{
	bool first = true;
	int rc;

	memset(scope, 0, sizeof(*scope));
	json->at++;
	while ((rc = tnd__json_next(json, '}', &first)) > 0) {
		struct tnd__span key;
		size_t known;

		rc = tnd__json_key(json, &key);
		if (rc < 0)
			return rc;
		known = index_of(&key, keys, COUNT(keys));
		rc = known < COUNT(keys) ? read_count(json, &scope->values[known])
					 : tnd__json_skip(json);
		if (rc < 0)
			return rc;
	}
	return rc;
}

static int read_base(struct tnd__json *json, struct base *base, struct base *inner);

static int read_member(struct tnd__json *json, struct base *base, struct base *inner)
{
	struct tnd__span key;
	size_t known;
	bool object;
	int rc = tnd__json_key(json, &key);

	if (rc < 0)
		return rc;
	object = json->at < json->end && *json->at == '{';
	known = index_of(&key, keys, COUNT(keys));
	if (known < COUNT(keys))
		return read_count(json, &base->own.values[known]);
	if (is_draft_key(&key))
		return read_draft_count(json, &key, base);
	known = index_of(&key, draft_objects, COUNT(draft_objects));
	if (object && known < COUNT(draft_objects))
		return read_scope(json, &base->drafts[known]);
	known = index_of(&key, nested, COUNT(nested));
	if (object && inner && known < COUNT(nested))
		return read_base(json, &inner[known], NULL);
	return tnd__json_skip(json);
}

/* An object; `inner`: what its nested ones are read into, or NULL where they are not looked at. */
static int read_base(struct tnd__json *json, struct base *base, struct base *inner)
{
	bool first = true;
	int rc;

	memset(base, 0, sizeof(*base));
	json->at++;
	while ((rc = tnd__json_next(json, '}', &first)) > 0) {
		rc = read_member(json, base, inner);
		if (rc < 0)
			return rc;
	}
	return rc;
}

/* Return: 1; 0 if it is no object; the refusal of the cursor. */
static int read_text(struct tnd__json *json, struct lookup *lookup)
{
	int rc;

	tnd__json_space(json);
	if (json->at < json->end && *json->at != '{')
		return 0;
	if (json->at == json->end)
		return tnd__json_expected(json, "`{`");
	rc = read_base(json, &lookup->bases[0], &lookup->bases[1]);
	if (rc < 0)
		return rc;
	tnd__json_space(json);
	return json->at == json->end ? 1 : tnd__json_expected(json, "nothing behind the `}`");
}

/* -- what it says -- */

/* 0 if there is none; one that is no count is a warning. */
static uint64_t count_of(struct lookup *lookup, const struct scope *scope, size_t key)
{
	if (scope->values[key].kind == NOT_A_COUNT)
		warn_of_count(lookup, keys[key]);
	return scope->values[key].kind == A_COUNT ? scope->values[key].count : 0;
}

static uint64_t fact(struct lookup *lookup, const char *name)
{
	const struct tnd__span span = {name, strlen(name)};
	size_t key = index_of(&span, keys, COUNT(keys));
	uint64_t value = 0;

	for (size_t i = 0; !value && i < BASES; i++)
		value = count_of(lookup, &lookup->bases[i].own, key);
	return value;
}

static uint64_t experts_in(struct lookup *lookup, const struct scope *scope)
{
	uint64_t count = 0;

	for (size_t i = 0; !count && i < EXPERT_KEYS; i++)
		count = count_of(lookup, scope, i);
	return count;
}

static uint64_t draft_experts_in(struct lookup *lookup, const struct base *base)
{
	uint64_t count = base->draft_count;

	if (base->draft_refused[0])
		warn_of_count(lookup, base->draft_refused);
	for (size_t i = 0; !count && i < COUNT(draft_objects); i++)
		count = experts_in(lookup, &base->drafts[i]);
	return count;
}

static void look_up(struct lookup *lookup, struct tnd__config *config)
{
	struct tnd_model_facts *facts = &config->facts;
	uint64_t experts = 0, drafts = 0;

	for (size_t i = 0; i < BASES; i++) {
		if (!experts)
			experts = experts_in(lookup, &lookup->bases[i].own);
		if (!drafts)
			drafts = draft_experts_in(lookup, &lookup->bases[i]);
	}
	config->expert_count = experts ? experts : TND_EXPERTS_UNKNOWN;
	config->draft_expert_count = drafts ? drafts : TND_EXPERTS_UNKNOWN;
	facts->head_count = fact(lookup, "num_attention_heads");
	facts->kv_head_count = fact(lookup, "num_key_value_heads");
	facts->head_dim = fact(lookup, "head_dim");
	facts->hidden_size = fact(lookup, "hidden_size");
	facts->vocab_size = fact(lookup, "vocab_size");
	facts->intermediate_size = fact(lookup, "intermediate_size");
	facts->moe_intermediate_size = fact(lookup, "moe_intermediate_size");
}

int tnd__config_parse(char *text, size_t bytes, const char *name, struct tnd__config *ret_config,
		      struct tnd__sentences *warnings)
{
	struct lookup lookup = {.file = name, .warnings = warnings};
	struct tnd_error error;
	struct tnd__json json = {.start = (unsigned char *)text,
				 .at = (unsigned char *)text,
				 .end = (unsigned char *)text + bytes,
				 .whole = "the file",
				 .code = TND_E_FORMAT,
				 .lenient = true,
				 .error = &error};
	int rc;

	tnd__config_init(ret_config);
	rc = read_text(&json, &lookup);
	if (rc < 0)
		warn(&lookup, "%s: not valid JSON (%s): expert counts and shapes are not known",
		     error.message);
	else if (rc == 0)
		warn(&lookup, "%s: expected %s: expert counts and shapes are not known",
		     "a JSON object");
	else
		look_up(&lookup, ret_config);
	return lookup.no_memory ? -ENOMEM : 0;
}

int tnd__config_load(const char *folder, struct tnd__config *ret_config,
		     struct tnd__sentences *warnings)
{
	char *path = tnd__path_join(folder, "config.json"), *text = NULL;
	struct tnd_error error;
	size_t bytes = 0;
	int rc;

	tnd__config_init(ret_config);
	if (!path)
		return -ENOMEM;
	rc = tnd__slurp(path, "config.json", CONFIG_BYTES_MAX, &text, &bytes, &error);
	free(path);
	if (rc == -ENOMEM || rc == -ENOENT)
		return rc == -ENOENT ? 0 : rc;
	if (rc < 0)
		return tnd__sentences_add(warnings, "%s", error.message);
	rc = tnd__config_parse(text, bytes, "config.json", ret_config, warnings);
	free(text);
	return rc;
}
