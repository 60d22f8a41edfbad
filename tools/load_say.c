/* SPDX-License-Identifier: Apache-2.0 */
/* load_say.c - what a rank's process tells its parent: one JSON line a message (load_parts.h) */
#include "load_parts.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static pthread_mutex_t send_lock = PTHREAD_MUTEX_INITIALIZER;
static int send_fd = -1;

/* A parent that is gone has killed us already; nothing is to be done about a failing write. */
static void send_text(const char *at, size_t left)
{
	pthread_mutex_lock(&send_lock);
	while (left) {
		ssize_t written = write(send_fd, at, left);

		if (written < 0 && errno == EINTR)
			continue;
		if (written <= 0)
			break;
		at += written;
		left -= (size_t)written;
	}
	pthread_mutex_unlock(&send_lock);
}

/* Sends and frees; nothing when `failed`. Return: false when memory ran out. */
static bool send_json(json_t *message, bool failed)
{
	char *text = message && !failed ? json_dumps(message, JSON_COMPACT) : NULL;
	size_t bytes;

	json_decref(message);
	if (!text)
		return false;
	bytes = strlen(text);
	text[bytes] = '\n'; /* in place of the NUL */
	send_text(text, bytes + 1);
	free(text);
	return true;
}

void load_say_to(int fd)
{
	send_fd = fd;
}

void load_say(const char *kind)
{
	char line[64];
	int bytes = snprintf(line, sizeof(line), "{\"t\":\"%s\"}\n", kind);

	/* Without memory: somebody waits for it. */
	send_text(line, (size_t)bytes);
}

void load_say_log(void *arg, int level, const char *message)
{
	json_t *object = json_object();
	bool failed = false;

	(void)arg;
	(void)level;
	tool_json_set(object, "t", json_string("log"), &failed);
	tool_json_set(object, "message", json_string(message), &failed);
	send_json(object, failed);
}

void load_say_progress(const struct load_child *child, const struct tnd_progress *progress)
{
	struct tnd_load_stats share = {.struct_bytes = sizeof(share)};
	json_t *object = json_object();
	bool failed = false;

	/* The slabs of a share are charged in the host's process. */
	if (child->share)
		tnd_share_stats(child->share, &share);
	tool_json_set(object, "t", json_string("progress"), &failed);
	tool_json_set(object, "done_bytes", tool_json_u64(progress->done_bytes), &failed);
	tool_json_set(object, "total_bytes", tool_json_u64(progress->total_bytes), &failed);
	tool_json_set(object, "charged_bytes",
		      tool_json_u64(progress->charged_bytes + share.charged_bytes), &failed);
	tool_json_set(object, "seconds", json_real((double)(tool_now_ns() - child->start_ns) / 1e9),
		      &failed);
	send_json(object, failed);
}

/* Parses and frees what the library has told; null where there is nothing. */
static json_t *parsed(int code, char *text)
{
	json_t *value = code == 0 ? json_loads(text, JSON_ALLOW_NUL, NULL) : NULL;

	if (code == 0)
		free(text);
	return value ? value : json_null();
}

static json_t *tell(struct tnd_load *load, int (*get)(struct tnd_load *load, char **ret_text))
{
	char *text = NULL;
	int code = load ? get(load, &text) : TND_E_INVALID;

	return parsed(code, text);
}

static json_t *tell_share(struct tnd_share *share)
{
	char *text = NULL;
	int code = share ? tnd_share_report_json(share, &text) : TND_E_INVALID;

	return parsed(code, text);
}

void load_say_end(const struct load_child *child, int code, const struct tnd_error *error)
{
	json_t *object = json_object();
	bool failed = false;

	tool_json_set(object, "t", json_string("end"), &failed);
	tool_json_set(object, "code", json_integer(code), &failed);
	tool_json_set(object, "seconds", json_real((double)(tool_now_ns() - child->start_ns) / 1e9),
		      &failed);
	if (code != 0) {
		const char *message = error->message[0] ? error->message : tnd_strerror(code);

		if (error->rank >= 0)
			tool_json_set(object, "rank", json_integer(error->rank), &failed);
		tool_json_set(object, "file", json_string(error->file), &failed);
		tool_json_set(object, "tensor", json_string(error->name), &failed);
		tool_json_set(object, "message", json_string(message), &failed);
	}
	tool_json_set(object, "report", tell(child->load, tnd_load_report_json), &failed);
	tool_json_set(object, "memlog", tell(child->load, tnd_load_memlog_json), &failed);
	tool_json_set(object, "share", tell_share(child->share), &failed);
	if (!send_json(object, failed)) {
		static const char short_of_memory[] = "{\"t\":\"end\",\"code\":-12}\n";

		send_text(short_of_memory, sizeof(short_of_memory) - 1);
	}
}

void load_say_cancelled(void)
{
	/* TND_E_CANCELLED; a line this short is written whole or not at all. */
	static const char line[] = "{\"t\":\"end\",\"code\":-10020}\n";

	static_assert(TND_E_CANCELLED == -10020, "the code in the line");
	if (write(send_fd, line, sizeof(line) - 1) < 0)
		return;
}
