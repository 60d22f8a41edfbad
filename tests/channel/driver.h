/* SPDX-License-Identifier: Apache-2.0 */
/*
 * driver.h - between the files of the driver
 *
 *   driver.c    reads commands, answers; handles; counters on SIGUSR1
 *   traffic.c   send and recv: streams of objects that both sides can compute
 *   company.c   children: forked, spawned; a second thread
 */
#ifndef TND_TEST_DRIVER_H
#define TND_TEST_DRIVER_H

#include <inttypes.h>
#include <jansson.h>
#include <stdbool.h>

#include <tundish/channel.h>

#define HANDLE_COUNT 8

struct handle {
	struct tnd_channel *channel;
	struct tnd_slab_pool *pool;
	uint64_t next;           /* number of the object that is sent or comes next */
	struct tnd_object *held; /* borrowed and not released */
	size_t held_count;
};

/* What a command led to. */
struct outcome {
	int rc;
	struct tnd_error error;
};

/* A member of the command, or `otherwise`. */
int64_t number_of(const json_t *command, const char *key, int64_t otherwise);
const char *text_of(const json_t *command, const char *key, const char *otherwise);
/* From "deadline_ms": absolute, < 0 or none: TND_NO_DEADLINE. */
int64_t deadline_of(const json_t *command);
/* By "h"; ends the program if there is none. */
struct handle *handle_of(const json_t *command);
void set_number(json_t *answer, const char *key, uint64_t value);
_Noreturn void die(const char *what);

/* Runs the commands in order. Return: 0, or the number, from 1, of the first with another result
 * than its "want" ("OK"). */
int run_commands(const json_t *commands);

void do_send(const json_t *command, json_t *answer, struct outcome *outcome);
void do_recv(const json_t *command, json_t *answer, struct outcome *outcome);
void do_release(const json_t *command, json_t *answer, struct outcome *outcome);
void do_total(const json_t *command, json_t *answer, struct outcome *outcome);

void do_fork(const json_t *command, json_t *answer, struct outcome *outcome);
void do_spawn(const json_t *command, json_t *answer, struct outcome *outcome);
void do_wait(const json_t *command, json_t *answer, struct outcome *outcome);
void do_busy(const json_t *command, json_t *answer, struct outcome *outcome);

#endif
