/* SPDX-License-Identifier: Apache-2.0 */
/* bench_run.h - one run: what is sent, how, and what came of it */
#ifndef BENCH_RUN_H
#define BENCH_RUN_H

#include <pthread.h>

#include "bench_link.h"

struct run_opts {
	const char *scene; /* stream, paced, pingpong, memcpy */
	const struct link_kind *kind;
	const char *link_name;
	const char *variant;
	uint64_t readers, count;
	uint64_t bytes;     /* of each object; 0: of 8 to 79,992 bytes */
	uint64_t period_ns; /* paced: from one send to the next */
	uint64_t busy;      /* paced: the writer spins in between */
	uint64_t slow_ns;   /* the first reader sleeps so long after each object */
	uint64_t pin;       /* writer to the first processor, readers to the others in turn */
	uint64_t max_bytes, max_objects;
	uint64_t check; /* every byte; else length, first and last word */
	uint64_t seed;
	uint64_t timeout_s;
};

/* -- what is sent (bench_data.c) -- */

/* Words that say where they belong; object n is a range of them. */
struct data {
	uint64_t *words;
	uint64_t count, bytes_each, longest, total_bytes;
	uint32_t *lengths; /* nullable: of object n, in words */
	uint64_t *starts;
};

void bench_data_make(struct data *data, const struct run_opts *opts);
uint64_t bench_data_bytes(const struct data *data, uint64_t number);
uint64_t *bench_data_at(const struct data *data, uint64_t number);
/* `stamped`: the first word is something else. Ends the process if it differs. */
void bench_data_check(const struct data *data, uint64_t number, const void *object, uint64_t bytes,
		      bool stamped, bool whole);

/* -- what the processes share (bench_scene.c) -- */

/* One process; written by it, read by the parent after its end. */
struct actor {
	int64_t begin_ns, end_ns;
	int64_t cpu_ns;      /* between them, all threads */
	int64_t grown_bytes; /* peak of resident memory that is not shared, above that at begin */
};

struct stage {
	pthread_barrier_t ready;
	struct actor writer, readers[BENCH_READERS_MAX];
};

struct run {
	struct run_opts opts;
	struct data data;
	struct stage *stage;
	int64_t *samples; /* shared: readers x count */
	struct link *there, *back;
};

void bench_scene_make(struct run *run);
/* In a process of its own each. */
void bench_scene_writer(struct run *run);
void bench_scene_reader(struct run *run, uint32_t rank);
/* In the parent: the seconds that copying all objects takes. */
void bench_scene_memcpy(struct run *run);

#endif
