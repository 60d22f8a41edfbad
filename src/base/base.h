/* SPDX-License-Identifier: Apache-2.0 */
/*
 * base.h - what every layer stands on: error detail, log, time, page cache, texts, processes,
 * growable arrays, failpoints
 *
 * Knows nothing of the layers above it.
 */
#ifndef TND_BASE_H
#define TND_BASE_H

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <tundish/error.h>
#include <tundish/log.h>
#include <tundish/size.h>

#define TND__MIN(a, b) ((a) < (b) ? (a) : (b))
#define TND__MAX(a, b) ((a) > (b) ? (a) : (b))
#define TND__KIB(n) ((uint64_t)(n) << 10)
#define TND__MIB(n) ((uint64_t)(n) << 20)
#define TND__PAGE UINT64_C(4096)
#define TND__HUGE UINT64_C(2097152)

/* `align`: a power of two. */
static inline uint64_t tnd__round_up(uint64_t value, uint64_t align)
{
	return (value + align - 1) & ~(align - 1);
}

static inline uint64_t tnd__round_down(uint64_t value, uint64_t align)
{
	return value & ~(align - 1);
}

/*
 * True if `given` (the caller's struct_bytes) is a size that this library knows: from `least`
 * (first version) to `size` (this one). Larger structs of newer callers are refused: their extra
 * fields would be silently ignored.
 */
static inline bool tnd__struct_ok(uint32_t given, size_t least, size_t size)
{
	return given >= least && given <= size;
}

/* -- error detail (error.c) -- */

/* What an error is about; unset fields are NULL, 0. */
struct tnd__where {
	const char *file;
	const char *name;
	size_t name_bytes;
	uint64_t byte_offset; /* meaningful with has_offset */
	bool has_offset;
};

/*
 * Fills `error` (nullable): code, place and a sentence that begins with file and tensor
 * ("model.safetensors: tensor 'w': ").
 * Return: `code`, so that callers can `return tnd__fail(...)`.
 */
int tnd__fail(struct tnd_error *error, int code, const struct tnd__where *where, const char *format,
	      ...) __attribute__((format(printf, 4, 5)));

/* The same without a place. */
int tnd__fail_plain(struct tnd_error *error, int code, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

/* The same, about a rank; -1: none. */
int tnd__fail_rank(struct tnd_error *error, int code, int32_t rank, const char *format, ...)
	__attribute__((format(printf, 4, 5)));

/* -- log (log.c) -- */

void tnd__log(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* -- time (clock.c) -- */

int64_t tnd__now_ns(void); /* CLOCK_MONOTONIC */
struct timespec;
void tnd__ns_to_timespec(int64_t ns, struct timespec *ret_time);

/* -- page cache (cachestat.c) -- */

/*
 * Bytes in the page cache of the pages that [offset, offset + bytes) touches.
 * Return: bytes, -errno (Linux before 6.5: -ENOSYS).
 */
int64_t tnd__cachestat(int fd, uint64_t offset, uint64_t bytes);

/* -- texts (text.c) -- */

/*
 * Printable form of a name: control characters as \u00XX, broken UTF-8 as \xXX; cut with "..." to
 * fit. Always NUL-terminated. Return: out.
 */
const char *tnd__printable(const char *text, size_t text_bytes, char *out, size_t out_bytes);

/* Length of the UTF-8 sequence at `at`, 0 if it is broken, overlong, a surrogate or too large. */
size_t tnd__utf8_bytes(const unsigned char *at, size_t left);

/* fnmatch() for texts with a length; a text with a NUL inside matches only "*". */
bool tnd__glob(const char *pattern, const char *text, size_t text_bytes);

/* Byte order; shorter first among equals. */
int tnd__compare(const char *a, size_t a_bytes, const char *b, size_t b_bytes);

/*
 * A list of processors or nodes as the kernel writes them ("0-3,8"), into bits[0 .. bit_count).
 * Return: 0, TND_E_INVALID.
 */
int tnd__list_parse(const char *text, unsigned char *bits, size_t bit_count);

/* A whole small file (/proc, /sys), NUL-terminated. Return: bytes, -errno, -EFBIG. */
ssize_t tnd__read_small(const char *path, char *out, size_t out_bytes);

/* A growable text. `failed` is set once memory ran out; later calls do nothing. */
struct tnd__text {
	char *data;
	size_t bytes, capacity;
	bool failed;
};
void tnd__text_add(struct tnd__text *text, const char *format, ...)
	__attribute__((format(printf, 2, 3)));
/* Takes the text over. Return: NUL-terminated, to be freed, or NULL if memory ran out. */
char *tnd__text_take(struct tnd__text *text);
void tnd__text_free(struct tnd__text *text);

/* -- processes (process.c) -- */

/*
 * The state of a process of our pid namespace: 'R', 'S', 'T' ... as in /proc/PID/stat. `ret_began`:
 * nullable; start time in clock ticks since boot, which tells it from a later one of that pid.
 * Return: the letter; -ESRCH: there is none; -errno: it cannot be seen.
 */
int tnd__process_state(int32_t pid, uint64_t *ret_began);

/* -- threads (thread.c) -- */

/* A thread of the library: all signals blocked, a small stack. Return: 0, -errno. */
int tnd__thread_create(void *(*run)(void *), void *arg, pthread_t *ret_thread);

/* -- arrays (array.c) -- */

/*
 * Makes room for `need` elements of `element_bytes`, doubling. Return: 0, -ENOMEM (array
 * unchanged).
 */
int tnd__reserve(void *array_pointer, size_t *capacity, size_t need, size_t element_bytes);

/* A list of sentences. */
struct tnd__sentences {
	char **items;
	size_t count, capacity;
};
int tnd__sentences_add(struct tnd__sentences *list, const char *format, ...)
	__attribute__((format(printf, 2, 3)));
void tnd__sentences_free(struct tnd__sentences *list);

/* -- failpoints (failpoint.c) -- */

/*
 * Built with -Dfailpoints=true, TUNDISH_FAILPOINTS="name=ERRNO[@N][xM][,...]" makes the N-th
 * (default: the first) to N+M-1-th (default: every later one) passage of `name` give -errno ("EIO"
 * or a number); "name=delay:MS" sleeps, "name=kill" and "name=stop" send the process that signal.
 * Otherwise nothing is compiled in.
 */
#ifdef TND_FAILPOINTS
int tnd__failpoint(const char *name);
/* The same from code: replaces what the environment said; NULL clears. Return: 0, TND_E_INVALID. */
int tnd__failpoints_set(const char *text);
/* Passages of `name` since then; one is counted before it sleeps. 0: not in the text. */
unsigned long tnd__failpoint_seen(const char *name);
#else
static inline int tnd__failpoint(const char *name)
{
	(void)name;
	return 0;
}
#endif

#endif
