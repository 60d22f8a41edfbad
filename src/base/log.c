/* SPDX-License-Identifier: Apache-2.0 */
/*
 * log.c - the process's log callback; a read-write lock lets tnd_log_set wait for callbacks that
 * run
 */
#include <pthread.h>
#include <stdio.h>

#include "base.h"

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static tnd_log_fn callback;
static void *callback_arg;
static int callback_level;

void tnd_log_set(tnd_log_fn fn, void *arg, int level)
{
	pthread_rwlock_wrlock(&lock);
	callback = fn;
	callback_arg = arg;
	callback_level = level;
	pthread_rwlock_unlock(&lock);
}

void tnd__log(int level, const char *format, ...)
{
	char message[TND_ERROR_MESSAGE_MAX];
	va_list args;

	pthread_rwlock_rdlock(&lock);
	if (callback && level >= callback_level) {
		va_start(args, format);
		vsnprintf(message, sizeof(message), format, args);
		va_end(args);
		callback(callback_arg, level, message);
	}
	pthread_rwlock_unlock(&lock);
}
