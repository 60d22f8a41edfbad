/* SPDX-License-Identifier: Apache-2.0 */
/* clock.c - monotonic time in nanoseconds */
#include <time.h>

#include <tundish/time.h>

#include "base.h"

int64_t tnd__now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void tnd__ns_to_timespec(int64_t ns, struct timespec *ret_time)
{
	ret_time->tv_sec = ns / 1000000000;
	ret_time->tv_nsec = ns % 1000000000;
}

int64_t tnd_deadline_in(int64_t ns)
{
	int64_t deadline_ns;

	if (__builtin_add_overflow(tnd__now_ns(), ns, &deadline_ns))
		return TND_NO_DEADLINE;
	return deadline_ns;
}
