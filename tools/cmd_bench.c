/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cmd_bench.c - `tundish bench channel`: starts a writer and its readers as processes, watches them
 * to their end, prints the figures
 *
 *   this process --fork--> writer             results: one shared mapping, made before the fork
 *              `---fork--> reader 0 ... N-1   ends:    SIGCHLD, wait4 (with processor time)
 *
 * This process makes no use of the library before all are forked, nor of channels at all. The first
 * process that fails decides the status; the others are killed, and everything is reaped, also on
 * SIGINT, SIGTERM, SIGHUP and at the deadline. Children do not outlive it: PR_SET_PDEATHSIG.
 */
#include "bench.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define GRACE_NS INT64_C(1000000000) /* past the deadline, for the processes to say so themselves */

enum {
	KEY_READERS = TOOL_KEY,
	KEY_BYTES,
	KEY_OBJECTS,
	KEY_RATE,
	KEY_MAX_BYTES,
	KEY_MAX_OBJECTS,
	KEY_DEADLINE,
	KEY_JSON
};

struct bench_command {
	struct bench_options options;
	const char *what;
};

static const struct argp_option options[] = {
	{"readers", KEY_READERS, "N", 0, "Processes that read (default 1)", 0},
	{"bytes", KEY_BYTES, "SIZE", 0, "Of an object (default 4 KiB)", 0},
	{"objects", KEY_OBJECTS, "N", 0, "How many are sent (default 100000)", 0},
	{"rate", KEY_RATE, "N", 0, "Objects a second (default: as fast as it goes)", 0},
	{"max-bytes", KEY_MAX_BYTES, "SIZE", 0,
	 "Limit of the channel (default 4 MiB, or two objects)", 0},
	{"max-objects", KEY_MAX_OBJECTS, "N", 0, "Limit of the channel (default 1024)", 0},
	{"deadline", KEY_DEADLINE, "S", 0, "Fail after S seconds", 0},
	{"json", KEY_JSON, NULL, 0, "One JSON document", 0},
	{0},
};

static void take_what(struct argp_state *state, struct bench_command *command, const char *arg)
{
	if (command->what || strcmp(arg, "channel") != 0)
		argp_error(state, "expected 'channel' as what to measure, found '%s'", arg);
	command->what = arg;
}

static void settle(struct argp_state *state, struct bench_command *command)
{
	struct bench_options *bench = &command->options;

	if (!command->what)
		argp_error(state, "expected what to measure: 'tundish bench channel'");
	if (bench->max_bytes == 0 && bench->bytes > (2u << 20))
		bench->max_bytes = bench->bytes * 2;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
	struct bench_command *command = state->input;
	struct bench_options *bench = &command->options;

	switch (key) {
	case KEY_READERS:
		bench->readers =
			(uint32_t)tool_number(state, "--readers", arg, 1, TND_CHANNEL_READERS_MAX);
		return 0;
	case KEY_BYTES:
		bench->bytes = tool_size(state, "--bytes", arg);
		if (bench->bytes < BENCH_BYTES_LEAST || bench->bytes > (UINT64_C(1) << 40))
			argp_error(state, "--bytes: expected a size from %d to 1TiB, found '%s'",
				   BENCH_BYTES_LEAST, arg);
		return 0;
	case KEY_OBJECTS:
		bench->objects = tool_number(state, "--objects", arg, 1, UINT64_C(1) << 48);
		return 0;
	case KEY_RATE:
		bench->rate = tool_number(state, "--rate", arg, 1, 1000000000);
		return 0;
	case KEY_MAX_BYTES:
		bench->max_bytes = tool_positive_size(state, "--max-bytes", arg);
		return 0;
	case KEY_MAX_OBJECTS:
		bench->max_objects =
			tool_number(state, "--max-objects", arg, 1, TND_CHANNEL_OBJECTS_MAX);
		return 0;
	case KEY_DEADLINE:
		bench->deadline = tool_seconds(state, "--deadline", arg);
		return 0;
	case KEY_JSON:
		bench->json = true;
		return 0;
	case ARGP_KEY_ARG:
		take_what(state, command, arg);
		return 0;
	case ARGP_KEY_END:
		settle(state, command);
		return 0;
	default:
		return ARGP_ERR_UNKNOWN;
	}
}

static const struct argp_child children[] = {{&tool_common_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {
	.options = options,
	.parser = parse,
	.args_doc = "channel",
	.doc = "Sends objects from one process to others through a channel, checks every byte of "
	       "them, and says how long it took.",
	.children = children};

/* -- processes -- */

struct bench_process {
	pid_t pid; /* 0: not started, or reaped */
	double cpu_seconds;
};

struct bench {
	struct bench_run run;
	struct bench_process processes[1 + TND_CHANNEL_READERS_MAX]; /* the writer, readers */
	size_t count, running;
	int code; /* of the first that failed */
	struct tnd_error error;
};

static void fail(struct bench *bench, int code, const char *message)
{
	if (bench->code != 0)
		return;
	bench->code = code;
	snprintf(bench->error.message, sizeof(bench->error.message), "%s", message);
}

static void kill_all(struct bench *bench)
{
	for (size_t i = 0; i < bench->count; i++)
		if (bench->processes[i].pid > 0)
			kill(bench->processes[i].pid, SIGKILL);
}

static void describe(size_t i, char *out, size_t out_bytes)
{
	if (i == 0)
		snprintf(out, out_bytes, "the writer");
	else
		snprintf(out, out_bytes, "reader %zu", i - 1);
}

/* One process has ended. */
static void note_end(struct bench *bench, size_t i, int wait_status)
{
	const struct bench_result *result = &bench->run.results[i];
	char message[TND_ERROR_MESSAGE_MAX], who[32];

	describe(i, who, sizeof(who));
	if (WIFSIGNALED(wait_status))
		snprintf(message, sizeof(message),
			 "%s (process %d) was expected to run to its end, but was killed by signal "
			 "%d (%s); look into the kernel's log for a lack of memory",
			 who, (int)bench->processes[i].pid, WTERMSIG(wait_status),
			 strsignal(WTERMSIG(wait_status)));
	else if (result->error.code != 0)
		snprintf(message, sizeof(message), "%s: %.950s", who,
			 result->error.message[0] ? result->error.message
						  : tnd_strerror(result->error.code));
	else if (WEXITSTATUS(wait_status) == 0)
		return;
	else
		snprintf(message, sizeof(message),
			 "%s (process %d) was expected to run to its end, but left with status %d",
			 who, (int)bench->processes[i].pid, WEXITSTATUS(wait_status));
	fail(bench,
	     WIFSIGNALED(wait_status) || !result->error.code ? TND_E_PEER_DEAD : result->error.code,
	     message);
}

static void reap(struct bench *bench)
{
	for (size_t i = 0; i < bench->count; i++) {
		struct bench_process *process = &bench->processes[i];
		struct rusage usage;
		int status;

		if (process->pid <= 0 || wait4(process->pid, &status, WNOHANG, &usage) <= 0)
			continue;
		process->cpu_seconds =
			(double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
			(double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
		note_end(bench, i, status);
		process->pid = 0;
		bench->running--;
	}
}

/* In the child: does not return. */
static void run_child(struct bench *bench, size_t i, pid_t parent, const sigset_t *mask)
{
	int rc;

	/* Ctrl-C goes to the whole group; the parent decides. */
	signal(SIGINT, SIG_IGN);
	sigprocmask(SIG_SETMASK, mask, NULL);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(TOOL_INTERRUPTED);
	rc = i == 0 ? bench_write(&bench->run) : bench_read(&bench->run, (uint32_t)(i - 1));
	_exit(rc == 0 ? TOOL_OK : TOOL_FOUND);
}

static void start_all(struct bench *bench, const sigset_t *mask)
{
	size_t count = 1 + bench->run.options->readers;
	pid_t parent = getpid();

	fflush(stdout);
	for (size_t i = 0; i < count; i++) {
		pid_t pid = fork();

		if (pid == 0)
			run_child(bench, i, parent, mask);
		if (pid < 0) {
			fail(bench, -errno, "starting a process failed");
			break;
		}
		bench->processes[bench->count++].pid = pid;
		bench->running++;
	}
}

static void block_signals(sigset_t *ret_set, sigset_t *ret_before)
{
	/* Ignored from outside, ends could not be waited for. */
	signal(SIGCHLD, SIG_DFL);
	sigemptyset(ret_set);
	sigaddset(ret_set, SIGCHLD);
	sigaddset(ret_set, SIGINT);
	sigaddset(ret_set, SIGTERM);
	sigaddset(ret_set, SIGHUP);
	sigprocmask(SIG_BLOCK, ret_set, ret_before);
}

/* Until every process is reaped. */
static void watch(struct bench *bench, const sigset_t *signals)
{
	int64_t deadline = bench->run.deadline_ns;

	while (bench->running > 0) {
		struct timespec time = {.tv_sec = 3600};
		int number;

		if (bench->code != 0)
			kill_all(bench);
		else if (deadline != TND_NO_DEADLINE) {
			int64_t left = deadline + GRACE_NS - tool_now_ns();

			left = left > 0 ? left : 0;
			time = (struct timespec){left / 1000000000, left % 1000000000};
		}
		number = sigtimedwait(signals, NULL, &time);
		if (number == SIGCHLD)
			reap(bench);
		else if (number > 0)
			fail(bench, TND_E_CANCELLED, "interrupted; the processes were ended");
		else if (errno == EAGAIN && deadline != TND_NO_DEADLINE)
			fail(bench, TND_E_DEADLINE,
			     "expected the writer and its readers to end at the deadline, found "
			     "some that do not answer; see what holds them up");
	}
}

/* -- figures -- */

static double seconds_of(const struct bench *bench)
{
	const struct bench_result *results = bench->run.results;
	int64_t end = results[0].begin_ns;

	for (uint32_t r = 1; r <= bench->run.options->readers; r++)
		if (results[r].end_ns > end)
			end = results[r].end_ns;
	return (double)(end - results[0].begin_ns) / 1e9;
}

struct totals {
	double seconds, rate, p50, p99, most;
	uint64_t lost, corrupt;
};

static struct totals total(const struct bench *bench)
{
	struct totals sums = {.seconds = seconds_of(bench),
			      .p50 = bench_percentile_us(&bench->run, 0.5),
			      .p99 = bench_percentile_us(&bench->run, 0.99),
			      .most = bench_percentile_us(&bench->run, 1)};

	if (sums.seconds > 0)
		sums.rate = (double)bench->run.options->objects / sums.seconds;
	for (uint32_t r = 1; r <= bench->run.options->readers; r++) {
		sums.lost += bench->run.results[r].lost;
		sums.corrupt += bench->run.results[r].corrupt;
	}
	return sums;
}

static int print_json(const struct bench *bench, const struct totals *sums)
{
	const struct bench_options *asked = bench->run.options;
	json_t *document = tool_json_document("tundish.bench.channel/1");
	json_t *latency = json_object(), *cpu = json_object(), *readers = json_array();
	bool failed = false;

	tool_json_set(document, "readers", json_integer(asked->readers), &failed);
	tool_json_set(document, "objects", tool_json_u64(asked->objects), &failed);
	tool_json_set(document, "bytes", tool_json_u64(asked->bytes), &failed);
	tool_json_set(document, "seconds", json_real(sums->seconds), &failed);
	tool_json_set(document, "objects_per_second", json_real(sums->rate), &failed);
	tool_json_set(latency, "p50", json_real(sums->p50), &failed);
	tool_json_set(latency, "p99", json_real(sums->p99), &failed);
	tool_json_set(latency, "max", json_real(sums->most), &failed);
	tool_json_set(document, "latency_us", latency, &failed);
	tool_json_set(cpu, "writer", json_real(bench->processes[0].cpu_seconds), &failed);
	for (uint32_t r = 1; r <= asked->readers; r++)
		tool_json_append(readers, json_real(bench->processes[r].cpu_seconds), &failed);
	tool_json_set(cpu, "readers", readers, &failed);
	tool_json_set(document, "cpu_seconds", cpu, &failed);
	tool_json_set(document, "lost", tool_json_u64(sums->lost), &failed);
	tool_json_set(document, "corrupt", tool_json_u64(sums->corrupt), &failed);
	return tool_json_print(document, failed);
}

static void print_text(const struct bench *bench, const struct totals *sums)
{
	const struct bench_options *asked = bench->run.options;
	char size[TND_SIZE_TEXT_MAX], rate[TND_SIZE_TEXT_MAX];
	double cpu = 0;

	for (uint32_t r = 1; r <= asked->readers; r++)
		cpu += bench->processes[r].cpu_seconds;
	printf("%llu objects of %s to %u reader%s in %.3f s\n", (unsigned long long)asked->objects,
	       tnd_size_format(asked->bytes, size), asked->readers, asked->readers == 1 ? "" : "s",
	       sums->seconds);
	printf("rate       %.0f objects/s, %s/s to each reader\n", sums->rate,
	       tnd_size_format((uint64_t)(sums->rate * (double)asked->bytes), rate));
	printf("latency    p50 %.1f us, p99 %.1f us, max %.1f us\n", sums->p50, sums->p99,
	       sums->most);
	printf("processor  writer %.3f s, readers %.3f s\n", bench->processes[0].cpu_seconds, cpu);
	printf("contents   %llu lost, %llu corrupt\n", (unsigned long long)sums->lost,
	       (unsigned long long)sums->corrupt);
}

static int report(struct bench *bench)
{
	struct totals sums;
	int status = TOOL_OK;

	if (bench->code != 0)
		return tool_fail(bench->code, &bench->error);
	sums = total(bench);
	if (bench->run.options->json)
		status = print_json(bench, &sums);
	else
		print_text(bench, &sums);
	if (status == TOOL_OK && (sums.lost || sums.corrupt)) {
		fprintf(stderr,
			"tundish: expected every object once and unchanged, found %llu "
			"lost and %llu corrupt\n",
			(unsigned long long)sums.lost, (unsigned long long)sums.corrupt);
		status = TOOL_FOUND;
	}
	return status;
}

static void prepare(struct bench *bench, const struct bench_options *asked)
{
	uint64_t number = (uint64_t)tool_now_ns();

	/* Two runs at one time must not meet. */
	if (getrandom(&number, sizeof(number), GRND_NONBLOCK) < 0)
		number ^= (uint64_t)getpid() << 32;
	bench->run.options = asked;
	snprintf(bench->run.address, sizeof(bench->run.address), "unix:@tundish-bench-%d-%016llx",
		 (int)getpid(), (unsigned long long)number);
	bench->run.deadline_ns = TND_NO_DEADLINE;
	if (asked->deadline > 0)
		bench->run.deadline_ns = tool_now_ns() + (int64_t)(asked->deadline * 1e9);
}

int cmd_bench(int argc, char **argv)
{
	struct bench_command command = {
		.options = {.readers = 1, .bytes = 4096, .objects = 100000}};
	struct bench bench = {0};
	sigset_t signals, before;
	size_t bytes;
	int status;

	tool_parse(&argp, argc, argv, &command);
	prepare(&bench, &command.options);
	bytes = (1 + command.options.readers) * sizeof(*bench.run.results);
	bench.run.results =
		mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (bench.run.results == MAP_FAILED)
		return tool_fail(-errno, NULL);
	block_signals(&signals, &before);
	start_all(&bench, &before);
	watch(&bench, &signals);
	status = report(&bench);
	munmap(bench.run.results, bytes);
	sigprocmask(SIG_SETMASK, &before, NULL);
	return status;
}
