/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_link.h - what the channel and its peers have in common: one writer, N readers, objects
 *
 *   parent     make --fork--+--> writer: begin_writer .. send ..            end
 *                           +--> reader: begin_reader .. recv, done ..      end
 *
 * Everything here is a program that measures: what fails ends the process with a sentence, and the
 * parent then ends the run.
 */
#ifndef BENCH_LINK_H
#define BENCH_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BENCH_READERS_MAX 64

struct link_setup {
	uint32_t reader_count;
	uint32_t index; /* of the link in this run: 0 there, 1 back */
	uint64_t max_bytes, max_objects;
	const char *variant; /* of the kind: "spin", "sleep", "place", or "" */
};

struct link;

struct link_kind {
	const char *name;
	const char *variants; /* words; nullable */
	uint64_t most_bytes;  /* of one object; 0: no limit */
	uint32_t most_readers;
	bool lossy; /* a yardstick, not a queue: only where the writer waits for the readers */
	struct link *(*make)(const struct link_setup *setup);
	/* In the process that writes; returns when every reader is there. */
	void (*begin_writer)(struct link *link);
	void (*begin_reader)(struct link *link, uint32_t rank);
	void (*send)(struct link *link, const void *data, size_t bytes);
	/* Copies to `buffer`, or says where the object lies; valid until done. */
	const void *(*recv)(struct link *link, void *buffer, size_t capacity, size_t *ret_bytes);
	void (*done)(struct link *link); /* nullable */
	/* The writer's: after all was sent. Readers' memory goes with the process. */
	void (*end_writer)(struct link *link); /* nullable */
};

extern const struct link_kind bench_pipe, bench_seqpacket, bench_stream, bench_flags, bench_futex,
	bench_line, bench_zmq, bench_tundish;

/* "NAME" or "NAME-VARIANT". Return: NULL if there is none; *ret_variant: "" or the variant. */
const struct link_kind *bench_kind(const char *name, const char **ret_variant);
void bench_list(void);

/* Shared with the processes that are forked; zeros. */
void *bench_shared(size_t bytes);
void *bench_alloc(size_t bytes);
int64_t bench_now(void);
_Noreturn void bench_die(const char *what, int error);

#endif
