/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tundish/log.h - the library's only voice
 *
 * The library never prints. What it has to say beyond errors (a fallback that was taken, who holds
 * the views that a load waits for) goes to one callback per process; without one it is dropped.
 *
 * Threads: MT-safe. The callback can be called from any thread, never while a lock of an object is
 * held.
 */
#ifndef TUNDISH_LOG_H
#define TUNDISH_LOG_H

#include <tundish/error.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TND_LOG_DEBUG 0
#define TND_LOG_INFO 1
#define TND_LOG_WARNING 2

/* `message`: one line without a newline, borrowed for the call. */
typedef void (*tnd_log_fn)(void *arg, int level, const char *message);

/*
 * Sets the process's callback for messages of `level` and above; NULL drops everything.
 * `arg`: handed to each call, borrowed until replaced. Must not be called from the callback.
 * Blocking: may sleep until running callbacks have returned.
 */
TND_API void tnd_log_set(tnd_log_fn fn, void *arg, int level);

#ifdef __cplusplus
}
#endif
#endif
