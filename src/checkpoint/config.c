/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config.c - expert counts and model facts of config.json
 *
 * Looked up at the top, then in the objects that multi-modal models wrap their language model's
 * configuration in. A draft (MTP) stack has keys of its own: "<anything>_n_routed_experts", or
 * another count's name after a prefix that says draft or mtp, or an object of its own. null and 0
 * say that a model has none of it. Nothing here is an error: slicing works without, or says what it
 * lacks.
 */
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "parts.h"

#define CONFIG_BYTES_MAX TND__MIB(16)

static const char *const nested[] = {"text_config", "language_config", "llm_config"};
static const char *const draft_objects[] = {"mtp_config", "draft_config"};
static const char *const draft_words[] = {"draft", "mtp", "nextn", "dspark", "eagle"};
static const char *const expert_keys[] = {"n_routed_experts", "num_experts", "num_local_experts",
					  "moe_num_experts"};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

struct lookup {
	const char *file;
	struct tnd__sentences *warnings;
	bool no_memory;
};

void tnd__config_init(struct tnd__config *config)
{
	memset(config, 0, sizeof(*config));
	config->expert_count = config->draft_expert_count = TND_EXPERTS_UNKNOWN;
	config->facts.struct_bytes = sizeof(config->facts);
}

static void warn(struct lookup *lookup, const char *format, const char *key)
{
	char shown[128];

	tnd__printable(key, strlen(key), shown, sizeof(shown));
	if (tnd__sentences_add(lookup->warnings, format, lookup->file, shown) < 0)
		lookup->no_memory = true;
}

/* A positive integer, or the first of a list of them. Return: 0 if it is none. */
static uint64_t count_of(struct lookup *lookup, const char *key, const json_t *value)
{
	if (json_is_array(value) && json_array_size(value))
		value = json_array_get(value, 0);
	if (json_is_integer(value) && json_integer_value(value) >= 0)
		return (uint64_t)json_integer_value(value);
	if (value && !json_is_null(value))
		warn(lookup, "%s: expected '%s' to be a count, found something else: ignored", key);
	return 0;
}

static uint64_t fact(struct lookup *lookup, const json_t *root, const char *key)
{
	uint64_t value = count_of(lookup, key, json_object_get(root, key));

	for (size_t i = 0; !value && i < COUNT(nested); i++)
		value = count_of(lookup, key,
				 json_object_get(json_object_get(root, nested[i]), key));
	return value;
}

static uint64_t experts_in(struct lookup *lookup, const json_t *object)
{
	uint64_t count = 0;

	for (size_t i = 0; !count && i < COUNT(expert_keys); i++)
		count = count_of(lookup, expert_keys[i], json_object_get(object, expert_keys[i]));
	return count;
}

/* Whether `key` is one of the expert keys behind a prefix that makes it the draft stack's. */
static bool is_draft_key(const char *key)
{
	size_t bytes = strlen(key);

	for (size_t i = 0; i < COUNT(expert_keys); i++) {
		size_t tail = strlen(expert_keys[i]);
		const char *at = key + bytes - tail;

		if (bytes < tail + 2 || strcmp(at, expert_keys[i]) != 0 || at[-1] != '_')
			continue;
		if (i == 0)
			return true;
		for (size_t j = 0; j < COUNT(draft_words); j++) {
			const char *word = strstr(key, draft_words[j]);

			if (word && word < at)
				return true;
		}
	}
	return false;
}

static uint64_t draft_experts_in(struct lookup *lookup, json_t *object)
{
	const char *key;
	uint64_t count = 0;
	json_t *value;

	json_object_foreach(object, key, value) if (!count && is_draft_key(key)) count =
		count_of(lookup, key, value);
	for (size_t i = 0; !count && i < COUNT(draft_objects); i++)
		count = experts_in(lookup, json_object_get(object, draft_objects[i]));
	return count;
}

static void look_up(struct lookup *lookup, json_t *root, struct tnd__config *config)
{
	uint64_t experts = experts_in(lookup, root), drafts = draft_experts_in(lookup, root);
	struct tnd_model_facts *facts = &config->facts;

	for (size_t i = 0; i < COUNT(nested); i++) {
		json_t *object = json_object_get(root, nested[i]);

		if (!experts)
			experts = experts_in(lookup, object);
		if (!drafts)
			drafts = draft_experts_in(lookup, object);
	}
	config->expert_count = experts ? experts : TND_EXPERTS_UNKNOWN;
	config->draft_expert_count = drafts ? drafts : TND_EXPERTS_UNKNOWN;
	facts->head_count = fact(lookup, root, "num_attention_heads");
	facts->kv_head_count = fact(lookup, root, "num_key_value_heads");
	facts->head_dim = fact(lookup, root, "head_dim");
	facts->hidden_size = fact(lookup, root, "hidden_size");
	facts->vocab_size = fact(lookup, root, "vocab_size");
	facts->intermediate_size = fact(lookup, root, "intermediate_size");
	facts->moe_intermediate_size = fact(lookup, root, "moe_intermediate_size");
}

int tnd__config_parse(const char *text, size_t bytes, const char *name,
		      struct tnd__config *ret_config, struct tnd__sentences *warnings)
{
	struct lookup lookup = {.file = name, .warnings = warnings};
	json_error_t error;
	json_t *root;

	tnd__config_init(ret_config);
	root = json_loadb(text, bytes, JSON_ALLOW_NUL, &error);
	if (!root && json_error_code(&error) == json_error_out_of_memory)
		return -ENOMEM;
	if (!root)
		warn(&lookup, "%s: not valid JSON (%s): expert counts and shapes are not known",
		     error.text);
	else if (!json_is_object(root))
		warn(&lookup, "%s: expected %s: expert counts and shapes are not known",
		     "a JSON object");
	else
		look_up(&lookup, root, ret_config);
	json_decref(root);
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
