/* SPDX-License-Identifier: Apache-2.0 */
/* bench.h - between cmd_bench.c, which starts and watches, and bench_channel.c, which runs */
#ifndef TND_BENCH_H
#define TND_BENCH_H

#include <sys/types.h>

#include "tool.h"

#define BENCH_BYTES_LEAST 16 /* a number and a time */

struct bench_options {
	uint32_t readers;
	uint64_t bytes, objects, max_bytes, max_objects;
	uint64_t rate;   /* objects a second; 0: as fast as it goes */
	double deadline; /* seconds; 0: none */
	bool json;
};

/*
 * Latencies in ns: up to 127 exact, above that 64 buckets for each power of two (a width of 1.6 %).
 */
#define BENCH_BUCKETS (128 + 57 * 64)

/* What a process says, in memory that it shares with its parent. */
struct bench_result {
	struct tnd_error error; /* error.code 0: none */
	int64_t begin_ns;       /* writer: before the first send */
	int64_t end_ns;         /* reader: after the last object */
	uint64_t received, lost, corrupt;
	uint64_t latency_max_ns;
	uint64_t latency[BENCH_BUCKETS];
};

/* One run, seen by each of its processes. */
struct bench_run {
	const struct bench_options *options;
	char address[96];
	int64_t deadline_ns;          /* TND_NO_DEADLINE: none */
	struct bench_result *results; /* the writer's, then the readers' */
};

/* In a process of its own; what went wrong is in its result. Return: 0, a code. */
int bench_write(const struct bench_run *run);
int bench_read(const struct bench_run *run, uint32_t rank);

/* The latency that `share` (0 to 1) of all readers' objects kept. */
double bench_percentile_us(const struct bench_run *run, double share);

#endif
