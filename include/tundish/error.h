/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tundish/error.h - error codes, and the detail that goes with them
 *
 * Functions that can fail return an int: >= 0 on success, -errno where the operating system is the
 * cause (-ENOENT, -EIO, ...), else one of the TND_E_* constants below, which start at -10000 and go
 * down.
 *
 * Where a number is not enough, a function takes a nullable `struct tnd_error *reterr` as its last
 * parameter. It is the caller's memory, is written only on failure, and holds the code again, the
 * file and the tensor that are to blame, the byte position, and one sentence: what was expected,
 * what was found, what to do.
 *
 * Threads: all functions here are MT-safe and never block.
 */
#ifndef TUNDISH_ERROR_H
#define TUNDISH_ERROR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TND_API __attribute__((visibility("default")))

/* X(constant, number, sentence): the one table that enum, texts and documentation come from. */
#define TND_ERROR_TABLE(X)                                                                         \
	X(TND_E_INVALID, -10000, "an argument or option is not valid")                             \
	X(TND_E_FORMAT, -10001, "the safetensors header is not valid")                             \
	X(TND_E_NOT_SAFETENSORS, -10002, "the file is not a safetensors file")                     \
	X(TND_E_HEADER_SIZE, -10003, "the header length is zero, too large or beyond the file")    \
	X(TND_E_TRUNCATED, -10004, "the file ends before its data does")                           \
	X(TND_E_TRAILING, -10005, "the file goes on after its data")                               \
	X(TND_E_DTYPE, -10006, "unknown dtype")                                                    \
	X(TND_E_DUPLICATE, -10007, "duplicate tensor name")                                        \
	X(TND_E_OFFSETS, -10008, "tensor data has a hole, an overlap or a shared range")           \
	X(TND_E_SHAPE, -10009, "shape and data length disagree")                                   \
	X(TND_E_INDEX, -10010, "the index and the files disagree")                                 \
	X(TND_E_CONFIG, -10011, "config.json is not valid")                                        \
	X(TND_E_NO_TENSOR, -10012, "no such tensor")                                               \
	X(TND_E_LAYOUT, -10013, "the parallel layout is not valid")                                \
	X(TND_E_EXPERTS, -10014, "expert numbers and expert count disagree")                       \
	X(TND_E_RULES, -10015, "a slicing rule is not valid")                                      \
	X(TND_E_BUDGET, -10016, "it cannot fit into the budget")                                   \
	X(TND_E_OVERSIZE, -10017, "a tensor is larger than the budget")                            \
	X(TND_E_FULL, -10018, "the consumer holds views and the budget is used up")                \
	X(TND_E_DEADLINE, -10019, "the deadline passed")                                           \
	X(TND_E_CANCELLED, -10020, "cancelled")                                                    \
	X(TND_E_CHANGED, -10021, "the file changed while it was being read")                       \
	X(TND_E_ESCAPED, -10022, "views are still alive after the load")                           \
	X(TND_E_SLICE, -10023, "access outside the slice that is held")                            \
	X(TND_E_CHECKSUM, -10024, "contents do not match their checksum")                          \
	X(TND_E_PEER_DEAD, -10025, "another process of the group died")                            \
	X(TND_E_CLOSED, -10026, "the other side has closed")                                       \
	X(TND_E_FORKED, -10027, "the handle belongs to the process that this one was forked from") \
	X(TND_E_CORRUPT, -10028, "shared memory holds what no working peer writes")                \
	X(TND_E_EVICTED, -10029, "this reader was given up by the writer")                         \
	X(TND_E_ADDRESS, -10030, "the address is not valid")                                       \
	X(TND_E_VERSION, -10031, "the peer has another layout version")                            \
	X(TND_E_DENIED, -10032, "the peer belongs to another user")                                \
	X(TND_E_PLACE, -10033, "no such place, or it is taken")                                    \
	X(TND_E_HEADROOM, -10034, "a limit leaves too little memory")                              \
	X(TND_E_ORDER, -10035, "ranks called different collectives")

enum {
#define TND_ERROR_ENUM_(name, number, text) name = number,
	TND_ERROR_TABLE(TND_ERROR_ENUM_)
#undef TND_ERROR_ENUM_
};

#define TND_ERROR_FILE_MAX 256
#define TND_ERROR_NAME_MAX 256
#define TND_ERROR_MESSAGE_MAX 1024
#define TND_ERROR_NO_OFFSET UINT64_MAX

/*
 * Text fields are NUL-terminated UTF-8; longer contents are cut with "..."; control characters are
 * escaped.
 */
struct tnd_error {
	int32_t code;                        /* as returned */
	int32_t rank;                        /* rank to blame, or -1 */
	uint64_t byte_offset;                /* in the file, or TND_ERROR_NO_OFFSET */
	char file[TND_ERROR_FILE_MAX];       /* shown name, or "" */
	char name[TND_ERROR_NAME_MAX];       /* tensor, or "" */
	char message[TND_ERROR_MESSAGE_MAX]; /* a whole sentence, file and tensor included */
};

/* Sentence for `code` (TND_E_* or -errno). Return: static or thread-local text, never NULL. */
TND_API const char *tnd_strerror(int code);

/*
 * Constant's name for `code`: "TND_E_BUDGET", "ENOSPC"; "UNKNOWN" for others. Return: static text.
 */
TND_API const char *tnd_error_name(int code);

#ifdef __cplusplus
}
#endif
#endif
