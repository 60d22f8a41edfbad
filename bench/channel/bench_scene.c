/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_scene.c - what writer and readers do
 *
 *   stream    the writer sends as fast as it can. From its first send to the last reader's last
 *             object.
 *   paced     one object each period_ns, its first word the time of its send; a reader's sample is
 *             the time from there to when it has the object.
 *   pingpong  two links; a sample is half the way there and back, so that no two clocks are
 *             compared and the time of reading the clock counts half.
 *   memcpy    one thread copies the same objects, to as much memory as they are (link `memcpy`), or
 *             into 1 MiB that is used in turn, as a writer does (link `memcpy-area`). All of it
 *             was touched before.
 */
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "bench_run.h"

#define AREA_BYTES ((uint64_t)1 << 20)

static bool scene_is(const struct run *run, const char *name)
{
	return strcmp(run->opts.scene, name) == 0;
}

void bench_scene_make(struct run *run)
{
	struct link_setup setup = {
		.reader_count = (uint32_t)run->opts.readers,
		.max_bytes = run->opts.max_bytes,
		.max_objects = run->opts.max_objects,
		.variant = run->opts.variant,
	};
	pthread_barrierattr_t shared;

	run->stage = bench_shared(sizeof(*run->stage));
	run->samples = bench_shared(run->opts.readers * run->opts.count * sizeof(*run->samples));
	pthread_barrierattr_init(&shared);
	pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
	pthread_barrier_init(&run->stage->ready, &shared, (unsigned)run->opts.readers + 1);
	run->there = run->opts.kind->make(&setup);
	if (scene_is(run, "pingpong")) {
		setup.index = 1;
		run->back = run->opts.kind->make(&setup);
	}
}

static void pin_to(const struct run *run, uint64_t place)
{
	long processors = sysconf(_SC_NPROCESSORS_ONLN);
	uint64_t wanted =
		place && processors > 1 ? 1 + (place - 1) % ((uint64_t)processors - 1) : 0;
	cpu_set_t set;

	if (!run->opts.pin)
		return;
	CPU_ZERO(&set);
	CPU_SET(wanted, &set);
	if (sched_setaffinity(0, sizeof(set), &set) != 0)
		bench_die("sched_setaffinity", errno);
}

static int64_t cpu_now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
	return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

/* Bytes of a line "name: N kB" of /proc/self/status. */
static int64_t status_bytes(const char *name)
{
	FILE *file = fopen("/proc/self/status", "re");
	size_t length = strlen(name);
	long long kib = 0;
	char line[256];

	while (file && fgets(line, sizeof(line), file))
		if (strncmp(line, name, length) == 0)
			kib = strtoll(line + length, NULL, 10);
	if (file)
		fclose(file);
	return kib * 1024;
}

static void begin(struct run *run, struct actor *actor)
{
	actor->grown_bytes = status_bytes("RssShmem:") - status_bytes("VmRSS:");
	pthread_barrier_wait(&run->stage->ready);
	actor->cpu_ns = -cpu_now();
	actor->begin_ns = bench_now();
}

static void end(struct actor *actor)
{
	actor->end_ns = bench_now();
	actor->cpu_ns += cpu_now();
	actor->grown_bytes += status_bytes("VmHWM:") - status_bytes("RssShmem:");
}

static void sleep_until(int64_t when_ns)
{
	struct timespec when = {when_ns / 1000000000, when_ns % 1000000000};

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, NULL) == EINTR)
		;
}

static void send_stream(struct run *run)
{
	for (uint64_t i = 0; i < run->opts.count; i++)
		run->opts.kind->send(run->there, bench_data_at(&run->data, i),
				     bench_data_bytes(&run->data, i));
}

static void send_paced(struct run *run, int64_t begin_ns)
{
	for (uint64_t i = 0; i < run->opts.count; i++) {
		int64_t due = begin_ns + (int64_t)((i + 1) * run->opts.period_ns);
		uint64_t *object = bench_data_at(&run->data, i), kept = *object;

		if (run->opts.busy)
			while (bench_now() < due)
				;
		else
			sleep_until(due);
		*object = (uint64_t)bench_now();
		run->opts.kind->send(run->there, object, bench_data_bytes(&run->data, i));
		*object = kept;
	}
}

static void send_pings(struct run *run)
{
	void *buffer = bench_alloc(run->data.longest);

	for (uint64_t i = 0; i < run->opts.count; i++) {
		int64_t sent = bench_now();
		const void *object;
		size_t bytes;

		run->opts.kind->send(run->there, bench_data_at(&run->data, i),
				     bench_data_bytes(&run->data, i));
		object = run->opts.kind->recv(run->back, buffer, run->data.longest, &bytes);
		run->samples[i] = (bench_now() - sent) / 2;
		bench_data_check(&run->data, i, object, bytes, false, run->opts.check);
		if (run->opts.kind->done)
			run->opts.kind->done(run->back);
	}
	free(buffer);
}

void bench_scene_writer(struct run *run)
{
	struct actor *actor = &run->stage->writer;

	pin_to(run, 0);
	run->opts.kind->begin_writer(run->there);
	if (run->back)
		run->opts.kind->begin_reader(run->back, 0);
	begin(run, actor);
	if (scene_is(run, "pingpong"))
		send_pings(run);
	else if (scene_is(run, "paced"))
		send_paced(run, actor->begin_ns);
	else
		send_stream(run);
	end(actor);
	if (run->opts.kind->end_writer)
		run->opts.kind->end_writer(run->there);
}

static void receive(struct run *run, uint32_t rank, void *buffer)
{
	const struct link_kind *kind = run->opts.kind;
	int64_t *samples = run->samples + rank * run->opts.count;
	bool paced = scene_is(run, "paced"), slow = run->opts.slow_ns && rank == 0;

	for (uint64_t i = 0; i < run->opts.count; i++) {
		size_t bytes;
		const void *object = kind->recv(run->there, buffer, run->data.longest, &bytes);

		if (paced)
			samples[i] = bench_now() - *(const int64_t *)object;
		bench_data_check(&run->data, i, object, bytes, paced, run->opts.check);
		if (run->back)
			kind->send(run->back, object, bytes);
		if (kind->done)
			kind->done(run->there);
		if (slow)
			sleep_until(bench_now() + (int64_t)run->opts.slow_ns);
	}
}

void bench_scene_reader(struct run *run, uint32_t rank)
{
	struct actor *actor = &run->stage->readers[rank];
	void *buffer = bench_alloc(run->data.longest);

	memset(buffer, 1, run->data.longest);
	pin_to(run, rank + UINT64_C(1));
	run->opts.kind->begin_reader(run->there, rank);
	if (run->back)
		run->opts.kind->begin_writer(run->back);
	begin(run, actor);
	receive(run, rank, buffer);
	end(actor);
	if (run->back && run->opts.kind->end_writer)
		run->opts.kind->end_writer(run->back);
	free(buffer);
}

void bench_scene_memcpy(struct run *run)
{
	bool in_turn = strcmp(run->opts.link_name, "memcpy-area") == 0;
	uint64_t room = in_turn ? 0 : run->data.total_bytes, at = 0;
	struct actor *actor;
	unsigned char *area;

	run->stage = bench_shared(sizeof(*run->stage));
	actor = &run->stage->readers[0];
	room += run->data.count * 64 + AREA_BYTES + run->data.longest;
	area = bench_alloc(room);
	memset(area, 1, room);
	pin_to(run, 0);
	actor->begin_ns = bench_now();
	for (uint64_t i = 0; i < run->data.count; i++) {
		uint64_t bytes = bench_data_bytes(&run->data, i);

		if (in_turn && at + bytes > AREA_BYTES)
			at = 0;
		memcpy(area + at, bench_data_at(&run->data, i), bytes);
		at += (bytes + 63) & ~UINT64_C(63);
		__asm__ volatile("" ::: "memory");
	}
	actor->end_ns = bench_now();
	run->stage->writer = *actor;
	free(area);
}
