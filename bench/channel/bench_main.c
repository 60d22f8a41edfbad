/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_main.c - one run of one link in one scene; bench/channel.py has the questions
 *
 *   bench-channel SCENE LINK [NAME=NUMBER ...]      bench-channel --list
 *
 * Each writer and reader is a process. Contents are checked in every run. Prints one JSON line. A
 * process that is alive at the deadline, or ends with an error, ends the run with exit status 1.
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "bench_run.h"

static const struct link_kind *const kinds[] = {
	&bench_pipe,    &bench_seqpacket, &bench_stream, &bench_flags, &bench_futex, &bench_line,
#if BENCH_ZMQ
	&bench_zmq,
#endif
	&bench_tundish,
};
#define KIND_COUNT (sizeof(kinds) / sizeof(kinds[0]))

_Noreturn void bench_die(const char *what, int error)
{
	fprintf(stderr, "bench-channel: %s: %s\n", what, strerror(error));
	_exit(2);
}

int64_t bench_now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

void *bench_shared(size_t bytes)
{
	void *memory = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE,
			    MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		bench_die("mmap", errno);
	return memory;
}

void *bench_alloc(size_t bytes)
{
	size_t rounded = (bytes + 127) & ~(size_t)63;
	void *memory = aligned_alloc(64, rounded);

	if (!memory)
		bench_die("aligned_alloc", ENOMEM);
	memset(memory, 0, rounded);
	return memory;
}

static bool has_word(const char *words, const char *word)
{
	size_t length = strlen(word);

	for (const char *at = words; at && (at = strstr(at, word)); at += length)
		if ((at == words || at[-1] == ' ') && (at[length] == ' ' || !at[length]))
			return true;
	return false;
}

const struct link_kind *bench_kind(const char *name, const char **ret_variant)
{
	for (size_t i = 0; i < KIND_COUNT; i++) {
		size_t length = strlen(kinds[i]->name);

		if (strncmp(name, kinds[i]->name, length) != 0)
			continue;
		if (!name[length]) {
			*ret_variant = "";
			return kinds[i];
		}
		if (name[length] == '-' && has_word(kinds[i]->variants, name + length + 1)) {
			*ret_variant = name + length + 1;
			return kinds[i];
		}
	}
	return NULL;
}

void bench_list(void)
{
	for (size_t i = 0; i < KIND_COUNT; i++)
		printf("{\"link\": \"%s\", \"variants\": \"%s\", \"most_bytes\": %" PRIu64 "}\n",
		       kinds[i]->name, kinds[i]->variants ? kinds[i]->variants : "",
		       kinds[i]->most_bytes);
}

static _Noreturn void usage(const char *what, const char *found)
{
	fprintf(stderr, "bench-channel: expected %s, found '%s'\n", what, found ? found : "");
	exit(2);
}

static void parse_option(struct run_opts *opts, const char *text)
{
	const struct {
		const char *name;
		uint64_t *to;
	} options[] = {
		{"readers", &opts->readers},
		{"count", &opts->count},
		{"bytes", &opts->bytes},
		{"period_ns", &opts->period_ns},
		{"busy", &opts->busy},
		{"slow_ns", &opts->slow_ns},
		{"pin", &opts->pin},
		{"max_bytes", &opts->max_bytes},
		{"max_objects", &opts->max_objects},
		{"check", &opts->check},
		{"seed", &opts->seed},
		{"timeout_s", &opts->timeout_s},
	};
	const char *equals = strchr(text, '=');

	for (size_t i = 0; equals && i < sizeof(options) / sizeof(options[0]); i++) {
		char *rest;

		if (strlen(options[i].name) != (size_t)(equals - text) ||
		    strncmp(options[i].name, text, (size_t)(equals - text)) != 0)
			continue;
		*options[i].to = strtoull(equals + 1, &rest, 10);
		if (rest != equals + 1 && !*rest)
			return;
	}
	usage("NAME=NUMBER", text);
}

static void parse(struct run_opts *opts, int argc, char **argv)
{
	static const char *const scenes[] = {"stream", "paced", "pingpong", "memcpy"};

	for (size_t i = 0; argc > 2 && i < 4; i++)
		if (strcmp(argv[1], scenes[i]) == 0)
			opts->scene = scenes[i];
	if (!opts->scene)
		usage("stream, paced, pingpong or memcpy, and a link", argc > 1 ? argv[1] : NULL);
	opts->link_name = argv[2];
	opts->kind = bench_kind(argv[2], &opts->variant);
	if (!opts->kind && strcmp(opts->scene, "memcpy") != 0)
		usage("a link of --list", argv[2]);
	for (int i = 3; i < argc; i++)
		parse_option(opts, argv[i]);
	if (!opts->count || opts->count > 1u << 30)
		usage("count of 1 to 2^30", "count");
	if (!opts->readers || opts->readers > BENCH_READERS_MAX)
		usage("readers of 1 to 64", "readers");
	if (opts->bytes % 8 || opts->bytes > UINT64_C(1) << 30)
		usage("bytes that are a multiple of 8, up to 1 GiB", "bytes");
	if (opts->kind && opts->kind->lossy && strcmp(opts->scene, "stream") == 0)
		usage("a link that keeps objects", argv[2]);
	if (opts->kind && opts->kind->most_bytes && opts->bytes > opts->kind->most_bytes)
		usage("a size that the link can take", argv[2]);
}

static int start(struct run *run, int index)
{
	pid_t parent = getpid(), pid = fork();

	if (pid < 0)
		bench_die("fork", errno);
	if (pid) {
		int fd = (int)syscall(SYS_pidfd_open, pid, 0);

		if (fd < 0)
			bench_die("pidfd_open", errno);
		return fd;
	}
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(2);
	signal(SIGPIPE, SIG_IGN);
	if (index)
		bench_scene_reader(run, (uint32_t)index - 1);
	else
		bench_scene_writer(run);
	_exit(0);
}

/* Return: 0, or 1 if a process failed or was alive at the deadline; none is left. */
static int wait_all(struct pollfd *actors, nfds_t count, int64_t deadline_ns)
{
	nfds_t left = count;
	int result = 0;

	while (left) {
		int64_t wait_ms = (deadline_ns - bench_now()) / 1000000;

		if (!result && (wait_ms <= 0 || poll(actors, count, (int)wait_ms) == 0)) {
			fprintf(stderr,
				"bench-channel: expected all to end in time, found %u "
				"processes alive\n",
				(unsigned)left);
			result = 1;
		}
		for (nfds_t i = 0; i < count; i++) {
			siginfo_t info = {0};

			if (actors[i].fd < 0)
				continue;
			if (result)
				syscall(SYS_pidfd_send_signal, actors[i].fd, SIGKILL, NULL, 0);
			if (waitid(P_PIDFD, (id_t)actors[i].fd, &info,
				   WEXITED | (result ? 0 : WNOHANG)) != 0 ||
			    !info.si_pid)
				continue;
			if (info.si_code != CLD_EXITED || info.si_status != 0)
				result = 1;
			close(actors[i].fd);
			actors[i].fd = -1;
			left--;
		}
	}
	return result;
}

static int by_value(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return x < y ? -1 : x > y;
}

/* Of all readers together; the first tenth of each, at most 1,000, warms up and is left out. */
static void print_samples(const struct run *run)
{
	uint64_t count = run->opts.count, rows = run->back ? 1 : run->opts.readers;
	uint64_t skip = count / 10 < 1000 ? count / 10 : 1000, kept = 0;
	int64_t *all = run->samples;
	double sum = 0;

	for (uint64_t row = 0; row < rows; row++)
		for (uint64_t i = skip; i < count; i++)
			all[kept++] = run->samples[row * count + i];
	qsort(all, kept, sizeof(*all), by_value);
	for (uint64_t i = 0; i < kept; i++)
		sum += (double)all[i];
	printf(", \"samples\": %" PRIu64 ", \"ns\": {\"min\": %" PRId64 ", \"p10\": %" PRId64
	       ", \"p50\": %" PRId64 ", \"p90\": %" PRId64 ", \"p99\": %" PRId64
	       ", \"p999\": %" PRId64 ", \"max\": %" PRId64 ", \"mean\": %.0f}",
	       kept, all[0], all[kept / 10], all[kept / 2], all[kept * 9 / 10],
	       all[kept * 99 / 100], all[kept * 999 / 1000], all[kept - 1], sum / (double)kept);
}

static double cpu_share(const struct actor *actor)
{
	int64_t span = actor->end_ns - actor->begin_ns;

	return span > 0 ? (double)actor->cpu_ns / (double)span : 0;
}

static void print(const struct run *run)
{
	const struct stage *stage = run->stage;
	const struct run_opts *opts = &run->opts;
	int64_t end_ns = stage->readers[0].end_ns, grown = stage->writer.grown_bytes;
	double seconds;

	for (uint64_t i = 1; i < opts->readers; i++)
		end_ns = stage->readers[i].end_ns > end_ns ? stage->readers[i].end_ns : end_ns;
	seconds = (double)(end_ns - stage->writer.begin_ns) / 1e9;
	printf("{\"scene\": \"%s\", \"link\": \"%s\", \"readers\": %" PRIu64 ", \"count\": %" PRIu64
	       ", \"bytes\": %" PRIu64 ", \"total_bytes\": %" PRIu64
	       ", \"seconds\": %.6f, \"objects_s\": %.0f, \"bytes_s\": %.0f",
	       opts->scene, opts->link_name, opts->readers, opts->count, opts->bytes,
	       run->data.total_bytes, seconds, (double)opts->count / seconds,
	       (double)run->data.total_bytes / seconds);
	if (strcmp(opts->scene, "paced") == 0 || run->back)
		print_samples(run);
	printf(", \"writer_cpu\": %.5f, \"reader_cpu\": [", cpu_share(&stage->writer));
	for (uint64_t i = 0; i < opts->readers; i++) {
		printf("%s%.5f", i ? ", " : "", cpu_share(&stage->readers[i]));
		grown += stage->readers[i].grown_bytes;
	}
	printf("], \"grown_bytes\": %" PRId64 "}\n", grown);
}

int main(int argc, char **argv)
{
	static struct run run = {.opts = {.readers = 1,
					  .count = 10000,
					  .bytes = 64,
					  .period_ns = 100000,
					  .max_bytes = 4 << 20,
					  .max_objects = 1024,
					  .seed = 1,
					  .timeout_s = 60}};
	struct pollfd actors[BENCH_READERS_MAX + 1];
	int failed = 0;

	if (argc == 2 && strcmp(argv[1], "--list") == 0) {
		bench_list();
		return 0;
	}
	parse(&run.opts, argc, argv);
	bench_data_make(&run.data, &run.opts);
	if (strcmp(run.opts.scene, "memcpy") == 0) {
		run.opts.readers = 1;
		bench_scene_memcpy(&run);
	} else {
		nfds_t count = (nfds_t)run.opts.readers + 1;

		bench_scene_make(&run);
		for (nfds_t i = 0; i < count; i++)
			actors[i] = (struct pollfd){.fd = start(&run, (int)i), .events = POLLIN};
		failed = wait_all(actors, count,
				  bench_now() + (int64_t)run.opts.timeout_s * 1000000000);
	}
	if (!failed)
		print(&run);
	return failed;
}
