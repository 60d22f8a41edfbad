/* SPDX-License-Identifier: Apache-2.0 */
/*
 * driver.c - one process of a channel, told what to do
 *
 *   driver                   a command a line on standard input, an answer a line on standard output
 *   driver COMMAND ...       these commands; exit status: run_commands()
 *
 * A command: {"do": "send", "h": 0, "count": 5, ...}. An answer: {"name": "OK", "rc": 0, "ns": when
 * the call returned (CLOCK_MONOTONIC), "error", "rank", "log": what the library logged since the
 * last one, ...}. SIGUSR1 writes the counters of all handles to standard error, whatever the main
 * thread does. At the end of the input all handles are closed.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"
#include "driver.h"

/* Guards the table against the counters' thread, and the log. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct handle handles[HANDLE_COUNT];
static json_t *logged;

void die(const char *what)
{
	fprintf(stderr, "driver: %s\n", what);
	_exit(99);
}

int64_t number_of(const json_t *command, const char *key, int64_t otherwise)
{
	const json_t *value = json_object_get(command, key);

	if (json_is_boolean(value))
		return json_is_true(value);
	return json_is_integer(value) ? json_integer_value(value) : otherwise;
}

const char *text_of(const json_t *command, const char *key, const char *otherwise)
{
	const char *text = json_string_value(json_object_get(command, key));

	return text ? text : otherwise;
}

int64_t deadline_of(const json_t *command)
{
	int64_t ms = number_of(command, "deadline_ms", -1);

	if (ms < 0)
		return TND_NO_DEADLINE;
	return ms == 0 ? 0 : tnd__now_ns() + ms * 1000000;
}

static struct handle *slot_of(const json_t *command)
{
	uint64_t h = (uint64_t)number_of(command, "h", 0);

	if (h >= HANDLE_COUNT)
		die("no such handle");
	return &handles[h];
}

struct handle *handle_of(const json_t *command)
{
	struct handle *handle = slot_of(command);

	if (!handle->channel)
		die("the handle is not open");
	return handle;
}

void set_number(json_t *answer, const char *key, uint64_t value)
{
	json_object_set_new(answer, key, json_integer((json_int_t)value));
}

static void on_log(void *arg, int level, const char *message)
{
	(void)arg;
	(void)level;
	pthread_mutex_lock(&lock);
	json_array_append_new(logged, json_string(message));
	pthread_mutex_unlock(&lock);
}

static void install(struct handle *handle, struct tnd_channel *channel)
{
	pthread_mutex_lock(&lock);
	handle->channel = channel;
	handle->next = 0;
	pthread_mutex_unlock(&lock);
}

/* -- commands -- */

/* A warning makes the waiting side look again, which would hide a lost wake: only if asked for. */
static int64_t warn_of(const json_t *command)
{
	return number_of(command, "warn_ms", -1) * 1000000;
}

static void do_create(const json_t *command, json_t *answer, struct outcome *outcome)
{
	struct handle *handle = slot_of(command);
	struct tnd_slab_pool_opts pool_opts = {.struct_bytes = sizeof(pool_opts),
					       .flags = TND_SLAB_POOL_F_SHARED};
	struct tnd_channel_opts opts = {
		.struct_bytes = sizeof(opts),
		.max_bytes = (uint64_t)number_of(command, "bytes", 0),
		.max_objects = (uint64_t)number_of(command, "objects", 0),
		.reserved_readers = (uint32_t)number_of(command, "reserved", 0),
		.open_readers = (uint32_t)number_of(command, "open", 0),
		.on_dead = number_of(command, "evict", 0) ? TND_CHANNEL_DEAD_EVICT
							  : TND_CHANNEL_DEAD_ERROR,
		.name = text_of(command, "name", "test"),
		.address = text_of(command, "address", NULL),
		.max_object_bytes = (uint64_t)number_of(command, "max_object", 0),
		.spin_ns = number_of(command, "spin", 1) ? 0 : TND_CHANNEL_NO_SPIN,
		.warn_ns = warn_of(command),
	};
	struct tnd_channel *channel;

	if (number_of(command, "pool", 0) && tnd_slab_pool_create(&pool_opts, &handle->pool) < 0)
		die("a pool");
	opts.pool = handle->pool;
	outcome->rc = tnd_channel_create(&opts, &channel, &outcome->error);
	if (outcome->rc < 0)
		return;
	install(handle, channel);
	json_object_set_new(answer, "address", json_string(tnd_channel_address(channel)));
}

static void do_attach(const json_t *command, json_t *answer, struct outcome *outcome)
{
	struct handle *handle = slot_of(command);
	int64_t deadline_ns = number_of(command, "deadline_ms", 0) ? deadline_of(command) : 0;
	struct tnd_channel_attach_opts opts = {
		.struct_bytes = sizeof(opts),
		.deadline_ns = deadline_ns,
		.spin_ns = number_of(command, "spin", 1) ? 0 : TND_CHANNEL_NO_SPIN,
		.warn_ns = warn_of(command),
	};
	struct tnd_channel *channel;

	(void)answer;
	outcome->rc = tnd_channel_attach(text_of(command, "address", ""),
					 (uint32_t)number_of(command, "rank", 0), &opts, &channel,
					 &outcome->error);
	if (outcome->rc == 0)
		install(handle, channel);
}

static void close_handle(struct handle *handle)
{
	struct tnd_channel *channel = handle->channel;

	install(handle, NULL);
	tnd_channel_close(channel);
	tnd_slab_pool_close(handle->pool);
	free(handle->held);
	handle->pool = NULL;
	handle->held = NULL;
	handle->held_count = 0;
}

static void do_close(const json_t *command, json_t *answer, struct outcome *outcome)
{
	(void)answer;
	(void)outcome;
	close_handle(handle_of(command));
}

static void put_info(json_t *answer, const struct tnd_channel_info *info)
{
	set_number(answer, "max_bytes", info->max_bytes);
	set_number(answer, "max_objects", info->max_objects);
	set_number(answer, "memory_bytes", info->memory_bytes);
	set_number(answer, "sent_objects", info->sent_objects);
	set_number(answer, "used_objects", info->used_objects);
	set_number(answer, "used_bytes", info->used_bytes);
	set_number(answer, "waits", info->waits);
	set_number(answer, "blocked_ns", info->blocked_ns);
}

static void do_info(const json_t *command, json_t *answer, struct outcome *outcome)
{
	struct tnd_channel_info info = {.struct_bytes = sizeof(info)};

	outcome->rc = tnd_channel_info(handle_of(command)->channel, &info);
	if (outcome->rc == 0)
		put_info(answer, &info);
}

static void do_ready(const json_t *command, json_t *answer, struct outcome *outcome)
{
	(void)answer;
	outcome->rc = tnd_channel_ready(handle_of(command)->channel, deadline_of(command),
					&outcome->error);
}

static void do_drain(const json_t *command, json_t *answer, struct outcome *outcome)
{
	(void)answer;
	outcome->rc = tnd_channel_drain(handle_of(command)->channel, deadline_of(command),
					&outcome->error);
}

static void do_expect(const json_t *command, json_t *answer, struct outcome *outcome)
{
	(void)answer;
	outcome->rc = tnd_channel_expect(handle_of(command)->channel,
					 (uint32_t)number_of(command, "rank", 0),
					 (int32_t)number_of(command, "pid", 0), &outcome->error);
}

static void do_evict(const json_t *command, json_t *answer, struct outcome *outcome)
{
	(void)answer;
	outcome->rc = tnd_channel_evict(handle_of(command)->channel,
					(uint32_t)number_of(command, "rank", 0));
}

static void do_failpoints(const json_t *command, json_t *answer, struct outcome *outcome)
{
	(void)answer;
#ifdef TND_FAILPOINTS
	outcome->rc = tnd__failpoints_set(text_of(command, "set", NULL));
#else
	(void)command;
	(void)outcome;
	die("built without failpoints");
#endif
}

static void do_pause(const json_t *command, json_t *answer, struct outcome *outcome)
{
	(void)command;
	(void)answer;
	(void)outcome;
	for (;;)
		pause();
}

static const struct {
	const char *name;
	void (*run)(const json_t *command, json_t *answer, struct outcome *outcome);
} table[] = {
	{"create", do_create}, {"attach", do_attach},   {"close", do_close},
	{"info", do_info},     {"ready", do_ready},     {"drain", do_drain},
	{"expect", do_expect}, {"evict", do_evict},     {"send", do_send},
	{"recv", do_recv},     {"release", do_release}, {"total", do_total},
	{"fork", do_fork},     {"spawn", do_spawn},     {"wait", do_wait},
	{"busy", do_busy},     {"pause", do_pause},     {"failpoints", do_failpoints},
};

/* Return: the answer, to be freed. */
static json_t *run(const json_t *command)
{
	const char *what = text_of(command, "do", "");
	struct outcome outcome = {.error.rank = -1};
	json_t *answer = json_object();

	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++)
		if (strcmp(table[i].name, what) == 0) {
			table[i].run(command, answer, &outcome);
			json_object_set_new(answer, "rc", json_integer(outcome.rc));
			set_number(answer, "ns", (uint64_t)tnd__now_ns());
			json_object_set_new(
				answer, "name",
				json_string(outcome.rc < 0 ? tnd_error_name(outcome.rc) : "OK"));
			json_object_set_new(answer, "error", json_string(outcome.error.message));
			json_object_set_new(answer, "rank", json_integer(outcome.error.rank));
			return answer;
		}
	die("no such command");
}

static void print(json_t *answer)
{
	pthread_mutex_lock(&lock);
	json_object_set_new(answer, "log", logged);
	logged = json_array();
	pthread_mutex_unlock(&lock);
	json_dumpf(answer, stdout, JSON_COMPACT);
	putchar('\n');
	fflush(stdout);
}

int run_commands(const json_t *commands)
{
	for (size_t i = 0; i < json_array_size(commands); i++) {
		const json_t *command = json_array_get(commands, i);
		json_t *answer = run(command);
		bool wanted =
			strcmp(text_of(answer, "name", ""), text_of(command, "want", "OK")) == 0 &&
			number_of(answer, "bad", 0) == 0;

		print(answer);
		json_decref(answer);
		if (!wanted)
			return (int)i + 1;
	}
	return 0;
}

/* -- counters -- */

static void *show_counters(void *arg)
{
	const sigset_t *set = arg;
	int number;

	while (sigwait(set, &number) == 0) {
		pthread_mutex_lock(&lock);
		for (size_t h = 0; h < HANDLE_COUNT; h++) {
			struct tnd_channel_info info = {.struct_bytes = sizeof(info)};
			json_t *shown = json_object();

			if (handles[h].channel &&
			    tnd_channel_info(handles[h].channel, &info) == 0) {
				set_number(shown, "h", h);
				put_info(shown, &info);
				json_dumpf(shown, stderr, 0);
				fputc('\n', stderr);
			}
			json_decref(shown);
		}
		pthread_mutex_unlock(&lock);
	}
	return NULL;
}

static void start_counters(void)
{
	static sigset_t set;
	pthread_t thread;

	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	pthread_sigmask(SIG_BLOCK, &set, NULL);
	if (pthread_create(&thread, NULL, show_counters, &set))
		die("a thread");
	pthread_detach(thread);
}

static json_t *parse(const char *text)
{
	json_t *command = json_loads(text, 0, NULL);

	if (!command)
		die("a command that is no JSON");
	return command;
}

static void serve_input(void)
{
	char *line = NULL;
	size_t capacity = 0;

	while (getline(&line, &capacity, stdin) > 0) {
		json_t *command = parse(line), *answer = run(command);

		print(answer);
		json_decref(answer);
		json_decref(command);
	}
	free(line);
}

int main(int argc, char **argv)
{
	int status = 0;

	logged = json_array();
	tnd_log_set(on_log, NULL, TND_LOG_WARNING);
	start_counters();
	if (argc > 1) {
		json_t *commands = json_array();

		for (int i = 1; i < argc; i++)
			json_array_append_new(commands, parse(argv[i]));
		status = run_commands(commands);
		json_decref(commands);
	} else {
		serve_input();
	}
	for (size_t h = 0; h < HANDLE_COUNT; h++)
		if (handles[h].channel)
			close_handle(&handles[h]);
	json_decref(logged);
	return status;
}
