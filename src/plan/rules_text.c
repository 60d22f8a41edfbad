/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rules_text.c - a caller's slicing rules: one line a rule, a glob over the whole name and a
 * dimension or "none"
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "plan_internal.h"

#define RULE_MAX 65535
#define DIM_MAX 255

static const char blank[] = " \t\r";

struct line {
	const char *text;
	size_t bytes;
};

static struct line next_word(struct line *rest)
{
	struct line word;

	while (rest->bytes && strchr(blank, *rest->text))
		rest->text++, rest->bytes--;
	word = (struct line){rest->text, 0};
	while (rest->bytes && !strchr(blank, *rest->text))
		rest->text++, rest->bytes--, word.bytes++;
	return word;
}

/* A small number with an optional minus, or "none". */
static bool parse_dim(const struct line *word, struct tnd__rule *rule)
{
	bool negative = word->bytes && *word->text == '-';
	int32_t value = 0;

	if (word->bytes == 4 && memcmp(word->text, "none", 4) == 0) {
		rule->whole = true;
		return true;
	}
	if (word->bytes == negative)
		return false;
	for (size_t i = negative; i < word->bytes; i++) {
		if (word->text[i] < '0' || word->text[i] > '9')
			return false;
		value = value * 10 + (word->text[i] - '0');
		if (value > DIM_MAX)
			return false;
	}
	rule->dim = negative ? -value : value;
	return !negative || value > 0;
}

static int parse_line(struct line line, const char *shown, size_t number,
		      struct tnd__user_rules *rules, struct tnd_error *reterr)
{
	struct tnd__rule rule = {0};
	struct line glob = next_word(&line), dim, more;
	char text[80];
	int rc;

	if (!glob.bytes || *glob.text == '#')
		return 0;
	dim = next_word(&line);
	more = next_word(&line);
	if (!parse_dim(&dim, &rule) || (more.bytes && *more.text != '#'))
		return tnd__fail_plain(
			reterr, TND_E_RULES,
			"%s: line %zu: expected a name pattern and a dimension (a number from -%d "
			"to %d, or none), found '%s'; correct the line or put # before it",
			shown, number, DIM_MAX, DIM_MAX,
			tnd__printable(glob.text, (size_t)(line.text - glob.text), text,
				       sizeof(text)));
	if (rules->count == RULE_MAX)
		return tnd__fail_plain(reterr, TND_E_RULES,
				       "%s: line %zu: expected at most %d rules; join some of them "
				       "with patterns",
				       shown, number, RULE_MAX);
	rc = tnd__plan_reserve(&rules->items, &rules->capacity, rules->count + 1,
			       sizeof(*rules->items));
	if (rc < 0)
		return rc;
	rule.glob = strndup(glob.text, glob.bytes);
	if (!rule.glob)
		return -ENOMEM;
	rule.glob_bytes = glob.bytes;
	rule.literal = strcspn(rule.glob, "*?[\\") == glob.bytes;
	rules->items[rules->count++] = rule;
	return 0;
}

int tnd__user_rules_parse(const char *text, const char *shown, struct tnd__user_rules *ret_rules,
			  struct tnd_error *reterr)
{
	size_t number = 0;
	int rc = 0;

	memset(ret_rules, 0, sizeof(*ret_rules));
	while (rc == 0 && text && *text) {
		size_t bytes = strcspn(text, "\n");

		rc = parse_line((struct line){text, bytes}, shown ? shown : "rules", ++number,
				ret_rules, reterr);
		text += bytes + (text[bytes] == '\n');
	}
	if (rc < 0)
		tnd__user_rules_free(ret_rules);
	return rc;
}

void tnd__user_rules_free(struct tnd__user_rules *rules)
{
	for (size_t i = 0; i < rules->count; i++)
		free(rules->items[i].glob);
	free(rules->items);
	memset(rules, 0, sizeof(*rules));
}
