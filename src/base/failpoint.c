/* SPDX-License-Identifier: Apache-2.0 */
/*
 * failpoint.c - errors and delays on demand, for tests
 *
 * Compiled only with -Dfailpoints=true. The table is read from TUNDISH_FAILPOINTS at the first
 * passage.
 */
#include "base.h"

#ifdef TND_FAILPOINTS
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define POINT_MAX 32

struct point {
	char name[64];
	int error;  /* positive errno, or 0 */
	int signal; /* raised, or 0 */
	long delay_ms;
	unsigned long first; /* passage at which it begins, from 1 */
	unsigned long count; /* passages, 0: all later ones */
	unsigned long seen;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct point points[POINT_MAX];
static size_t point_count;
/*
 * Loaded, and nothing is in it: then a passage takes no lock. Relaxed: nothing is read on the
 * strength of it, and who changes the table meanwhile cannot say which passage comes first.
 */
static _Atomic bool empty;
static bool loaded; /* under lock, as the table */

static int error_number(const char *name)
{
	for (int i = 1; i < 256; i++)
		if (strerrorname_np(i) && strcmp(strerrorname_np(i), name) == 0)
			return i;
	return atoi(name);
}

static int parse_one(char *text, struct point *point)
{
	char *equals = strchr(text, '='), *mark;

	memset(point, 0, sizeof(*point));
	point->first = 1;
	if (!equals || (size_t)(equals - text) >= sizeof(point->name))
		return TND_E_INVALID;
	memcpy(point->name, text, (size_t)(equals - text));
	if ((mark = strchr(equals, 'x')) && mark[1] >= '0' && mark[1] <= '9') {
		point->count = strtoul(mark + 1, NULL, 10);
		*mark = '\0';
	}
	if ((mark = strchr(equals, '@'))) {
		point->first = strtoul(mark + 1, NULL, 10);
		*mark = '\0';
	}
	if (strncmp(equals + 1, "delay:", 6) == 0)
		point->delay_ms = atol(equals + 7);
	else if (strcmp(equals + 1, "kill") == 0)
		point->signal = SIGKILL;
	else if (strcmp(equals + 1, "stop") == 0)
		point->signal = SIGSTOP;
	else
		point->error = error_number(equals + 1);
	return point->error > 0 || point->delay_ms > 0 || point->signal ? 0 : TND_E_INVALID;
}

/* Under lock. */
static int load(const char *text)
{
	char *copy, *rest, *one;
	int rc = 0;

	loaded = true;
	point_count = 0;
	copy = rest = text ? strdup(text) : NULL;
	if (text && !copy)
		rc = -ENOMEM;
	while (rc == 0 && (one = strsep(&rest, ",")))
		if (*one && point_count < POINT_MAX)
			rc = parse_one(one, &points[point_count++]);
	free(copy);
	atomic_store_explicit(&empty, point_count == 0, memory_order_relaxed);
	return rc;
}

int tnd__failpoints_set(const char *text)
{
	int rc;

	pthread_mutex_lock(&lock);
	rc = load(text);
	pthread_mutex_unlock(&lock);
	return rc;
}

unsigned long tnd__failpoint_seen(const char *name)
{
	unsigned long seen = 0;

	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < point_count; i++)
		if (strcmp(points[i].name, name) == 0)
			seen = points[i].seen;
	pthread_mutex_unlock(&lock);
	return seen;
}

int tnd__failpoint(const char *name)
{
	long delay_ms = 0;
	int error = 0, signal = 0;

	if (atomic_load_explicit(&empty, memory_order_relaxed))
		return 0;
	pthread_mutex_lock(&lock);
	if (!loaded)
		load(getenv("TUNDISH_FAILPOINTS"));
	for (size_t i = 0; i < point_count; i++) {
		struct point *point = &points[i];

		if (strcmp(point->name, name) != 0)
			continue;
		point->seen++;
		if (point->seen < point->first ||
		    (point->count && point->seen >= point->first + point->count))
			continue;
		error = point->error;
		signal = point->signal;
		delay_ms += point->delay_ms;
	}
	pthread_mutex_unlock(&lock);
	if (signal)
		kill(getpid(), signal);
	if (delay_ms)
		nanosleep(&(struct timespec){delay_ms / 1000, delay_ms % 1000 * 1000000}, NULL);
	return -error;
}
#else
/* A translation unit must hold something. */
typedef int tnd__no_failpoints;
#endif
