/* SPDX-License-Identifier: Apache-2.0 */
/* company.c - children of the driver, forked and spawned, and a second thread on a handle */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "driver.h"

extern char **environ;

/* Runs "commands" in a child that has all that this process has, and goes on. */
void do_fork(const json_t *command, json_t *answer, struct outcome *outcome)
{
	pid_t pid = fork();

	if (pid == 0) {
		/* Answers are the parent's. */
		dup2(STDERR_FILENO, STDOUT_FILENO);
		_exit(run_commands(json_object_get(command, "commands")));
	}
	outcome->rc = pid < 0 ? -errno : 0;
	set_number(answer, "pid", (uint64_t)pid);
}

/* The same in a program of its own. */
void do_spawn(const json_t *command, json_t *answer, struct outcome *outcome)
{
	const json_t *commands = json_object_get(command, "commands");
	size_t count = json_array_size(commands);
	char **argv = calloc(count + 2, sizeof(*argv));
	posix_spawn_file_actions_t actions;
	pid_t pid;

	if (!argv)
		die("memory for arguments");
	argv[0] = strdup("driver");
	for (size_t i = 0; i < count; i++)
		argv[i + 1] = json_dumps(json_array_get(commands, i), JSON_COMPACT);
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
	outcome->rc = -posix_spawn(&pid, "/proc/self/exe", &actions, NULL, argv, environ);
	if (outcome->rc == 0)
		set_number(answer, "pid", (uint64_t)pid);
	posix_spawn_file_actions_destroy(&actions);
	for (size_t i = 0; i <= count; i++)
		free(argv[i]);
	free(argv);
}

void do_wait(const json_t *command, json_t *answer, struct outcome *outcome)
{
	int status = 0;

	outcome->rc = waitpid((pid_t)number_of(command, "pid", 0), &status, 0) < 0 ? -errno : 0;
	set_number(answer, "status", (uint64_t)status);
}

static void *receive_until_cancelled(void *arg)
{
	unsigned char byte[8];
	uint64_t bytes;

	/* The first thread may be in its call. */
	while (tnd_channel_recv(arg, byte, sizeof(byte), TND_NO_DEADLINE, &bytes, NULL) == -EBUSY)
		sched_yield();
	return NULL;
}

/* A second thread waits on the handle; the result is what this one gets meanwhile. */
void do_busy(const json_t *command, json_t *answer, struct outcome *outcome)
{
	struct handle *handle = handle_of(command);
	unsigned char byte[8];
	uint64_t bytes;
	pthread_t thread;

	(void)answer;
	if (pthread_create(&thread, NULL, receive_until_cancelled, handle->channel))
		die("a thread");
	/* Until the other one is in its call. */
	do {
		sched_yield();
		outcome->rc = tnd_channel_recv(handle->channel, byte, sizeof(byte), 0, &bytes,
					       &outcome->error);
	} while (outcome->rc == -ETIMEDOUT);
	tnd_channel_cancel(handle->channel);
	pthread_join(thread, NULL);
	tnd_channel_rearm(handle->channel);
}
