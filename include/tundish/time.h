/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tundish/time.h - deadlines
 *
 * A deadline is an absolute CLOCK_MONOTONIC time in nanoseconds, so that one serves several calls;
 * 0, and any other that has passed, does not wait; TND_NO_DEADLINE waits for ever.
 */
#ifndef TUNDISH_TIME_H
#define TUNDISH_TIME_H

#include <tundish/error.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TND_NO_DEADLINE INT64_MAX

/*
 * CLOCK_MONOTONIC now + `ns`; saturates.
 * Threads: MT-safe, async-signal-safe. Blocking: never. Return: the deadline.
 */
TND_API int64_t tnd_deadline_in(int64_t ns);

#ifdef __cplusplus
}
#endif

#endif
