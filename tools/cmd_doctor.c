/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_doctor.c - `tundish doctor`: what this machine allows, and what to change */
#include "tool.h"

#include <string.h>

enum { KEY_JSON = TOOL_KEY };

struct doctor {
	const char *path;
	bool json;
	json_t *checks;
	bool failed;
	bool colour;
};

static const struct argp_option options[] = {
	{"json", KEY_JSON, NULL, 0, "One JSON document", 0},
	{0},
};

static error_t parse(int key, char *arg, struct argp_state *state)
{
	struct doctor *doctor = state->input;

	switch (key) {
	case KEY_JSON:
		doctor->json = true;
		return 0;
	case ARGP_KEY_ARG:
		tool_take_path(state, &doctor->path, arg);
		return 0;
	default:
		return ARGP_ERR_UNKNOWN;
	}
}

static const struct argp_child children[] = {{&tool_common_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {.options = options,
				 .parser = parse,
				 .args_doc = "[PATH]",
				 .doc = "Tries what a load needs on this machine, on the disk of "
					"PATH (a file or folder) if it "
					"is given, and says what to change.",
				 .children = children};

static void note_json(void *arg, const struct tnd_check *check)
{
	struct doctor *doctor = arg;
	json_t *object = json_object();

	tool_json_set(object, "name", json_string(check->name), &doctor->failed);
	tool_json_set(object, "ok", json_boolean(check->ok), &doctor->failed);
	tool_json_set(object, "value", json_string(check->value), &doctor->failed);
	tool_json_set(object, "advice", json_string(check->advice), &doctor->failed);
	tool_json_append(doctor->checks, object, &doctor->failed);
}

#define VALUE_COLUMN 23 /* mark, blank, 18 columns of name, blanks */

static void print_check(void *arg, const struct tnd_check *check)
{
	struct doctor *doctor = arg;
	const char *mark = check->ok ? "ok" : "!!";
	const char *on = !doctor->colour ? "" : check->ok ? "\033[32m" : "\033[31m";

	printf("%s%s%s  %-18s ", on, mark, doctor->colour ? "\033[0m" : "", check->name);
	tool_put_wrapped(stdout, check->value, VALUE_COLUMN, VALUE_COLUMN);
	if (check->advice[0]) {
		printf("%*s", VALUE_COLUMN, "");
		tool_put_wrapped(stdout, check->advice, VALUE_COLUMN, VALUE_COLUMN);
	}
}

int cmd_doctor(int argc, char **argv)
{
	struct doctor doctor = {.colour = tool_colour(stdout)};
	struct tnd_error error = {0};
	int found, status = TOOL_OK;

	tool_parse(&argp, argc, argv, &doctor);
	if (doctor.json)
		doctor.checks = json_array();
	found = tnd_doctor(doctor.path, doctor.json ? note_json : print_check, &doctor, &error);
	if (found < 0) {
		json_decref(doctor.checks);
		return tool_fail(found, &error);
	}
	if (doctor.json) {
		json_t *document = tool_json_document("tundish.doctor/1");

		tool_json_set(document, "checks", doctor.checks, &doctor.failed);
		status = tool_json_print(document, doctor.failed);
	}
	return status == TOOL_OK && found > 0 ? TOOL_FOUND : status;
}
