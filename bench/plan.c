/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench-plan: how long until a rank knows what to read, and how much memory knowing it takes?
 *
 * 100,000 tensors in 48 shards (names and shapes of an expert model, no data: the files are sparse). Each repeat is a process of its own that opens the checkpoint
 * and plans for one of four ranks, in both packings; VmHWM is read before and after. Bound on paper: the headers are about 13 MB, which at
 * 300 MB/s take 43 ms; a plan writes 184 bytes a tensor, which is nothing, and looks at each name a few times, about 100 ns each: 10 ms.
 * Target: open and plan in under 0.2 s and under 64 MiB.
 *
 *   bench-plan [REPEATS]      default 9
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <tundish/tundish.h>

#include "support/shapes.h"

#define SHARDS 48
#define TENSORS 100000
#define EXPERTS 384
#define REPEAT_MAX 101

struct sample {
	double open, plan, processor; /* seconds; the last of this process's processor time */
	uint64_t memory_bytes, metadata_bytes;
	int rc;
};

static double seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static double processor_seconds(void)
{
	struct timespec used;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
	return (double)used.tv_sec + (double)used.tv_nsec / 1e9;
}

static uint64_t status_bytes(const char *key)
{
	FILE *file = fopen("/proc/self/status", "r");
	char line[256];
	uint64_t kib = 0;

	while (file && fgets(line, sizeof(line), file))
		if (strncmp(line, key, strlen(key)) == 0)
			kib = strtoull(line + strlen(key), NULL, 10);
	if (file)
		fclose(file);
	return kib << 10;
}

static int first_of(int file)
{
	return (int)((int64_t)TENSORS * file / SHARDS);
}

static void generate(struct shapes *shapes)
{
	static const char *const parts[] = {"w1", "w2", "w3"};
	char name[64];

	shapes_config(shapes, "{\"n_routed_experts\":384}");
	for (int file = 0; file < SHARDS; file++) {
		snprintf(name, sizeof(name), "model-%05d-of-%05d.safetensors", file + 1, SHARDS);
		shapes_begin(shapes, name);
		for (int i = first_of(file); i < first_of(file + 1); i++) {
			const char *part = parts[i / 2 % 3];
			int expert = i / 6 % EXPERTS, layer = i / 6 / EXPERTS;
			bool scale = i % 2;

			shapes_add(shapes, scale ? "F8_E8M0" : "I8",
				   part[1] == '2' ? (scale ? "5120,72" : "5120,1152")
						  : (scale ? "2304,160" : "2304,2560"),
				   "model.layers.%d.mlp.experts.%d.%s.%s", layer, expert, part,
				   scale ? "scale" : "weight");
		}
		shapes_end(shapes);
	}
}

static void measure(const char *path, uint32_t packing, struct sample *sample)
{
	struct tnd_layout layout = {.struct_bytes = sizeof(layout), .tp_size = 4, .rank = 1};
	struct tnd_plan_opts opts = {.struct_bytes = sizeof(opts),
				     .packing = packing,
				     .budget_bytes = UINT64_C(6) << 30};
	struct tnd_plan_totals totals = {.struct_bytes = sizeof(totals)};
	uint64_t before = status_bytes("VmRSS:");
	struct tnd_checkpoint *checkpoint;
	struct tnd_error error = {0};
	struct tnd_plan *plan;
	double begin = seconds(), opened, used = processor_seconds();

	sample->rc = tnd_checkpoint_open(path, NULL, &checkpoint, &error);
	opened = seconds();
	if (sample->rc == 0)
		sample->rc = tnd_plan_create(checkpoint, &layout, &opts, &plan, &error);
	sample->plan = seconds() - opened;
	sample->open = opened - begin;
	sample->processor = processor_seconds() - used;
	sample->memory_bytes = status_bytes("VmHWM:") - before;
	if (sample->rc < 0) {
		fprintf(stderr, "%s\n", error.message);
		return;
	}
	tnd_plan_totals(plan, &totals);
	sample->metadata_bytes = totals.metadata_bytes;
	if (totals.tensors != TENSORS || totals.sliced != TENSORS)
		sample->rc = TND_E_INVALID;
}

/* In a process of its own, so that VmHWM is of this repeat. */
static int repeat(const char *path, uint32_t packing, struct sample *sample)
{
	int ends[2], status;
	pid_t child;

	if (pipe(ends) < 0 || (child = fork()) < 0)
		return -1;
	if (child == 0) {
		measure(path, packing, sample);
		_exit(write(ends[1], sample, sizeof(*sample)) != sizeof(*sample));
	}
	close(ends[1]);
	sample->rc = -1;
	if (read(ends[0], sample, sizeof(*sample)) != sizeof(*sample))
		sample->rc = -1;
	close(ends[0]);
	waitpid(child, &status, 0);
	return sample->rc;
}

static int compare(const void *a, const void *b)
{
	double left = *(const double *)a, right = *(const double *)b;

	return left < right ? -1 : left > right;
}

static double median(double *values, int count)
{
	qsort(values, (size_t)count, sizeof(*values), compare);
	return values[count / 2];
}

static void report(const char *packing, const struct sample *samples, int count)
{
	double open[REPEAT_MAX], plan[REPEAT_MAX], both[REPEAT_MAX], processor[REPEAT_MAX];
	uint64_t memory = 0;
	struct utsname machine;

	for (int i = 0; i < count; i++) {
		open[i] = samples[i].open;
		plan[i] = samples[i].plan;
		processor[i] = samples[i].processor;
		both[i] = samples[i].open + samples[i].plan;
		memory = samples[i].memory_bytes > memory ? samples[i].memory_bytes : memory;
	}
	uname(&machine);
	median(both, count);
	printf("packing %s: open %.1f ms, plan %.1f ms, both %.1f ms (min %.1f, processor %.1f), "
	       "memory %.1f MiB "
	       "at most\n",
	       packing, median(open, count) * 1e3, median(plan, count) * 1e3,
	       median(both, count) * 1e3, both[0] * 1e3, median(processor, count) * 1e3,
	       (double)memory / 1048576);
	printf("{\"bench\":\"plan\",\"machine\":\"%s %s, %ld processors\",\"packing\":\"%s\","
	       "\"tensors\":%d,\"shards\":%d,\"repeats\":%d,\"open_seconds\":%.6f,"
	       "\"plan_seconds\":%.6f,\"seconds\":%.6f,\"seconds_min\":%.6f,\"seconds_max\":%.6f,"
	       "\"processor_seconds\":%.6f,"
	       "\"memory_bytes\":%llu,\"metadata_bytes\":%llu}\n",
	       machine.machine, machine.release, sysconf(_SC_NPROCESSORS_ONLN), packing, TENSORS,
	       SHARDS, count, median(open, count), median(plan, count), median(both, count),
	       both[0], both[count - 1], median(processor, count), (unsigned long long)memory,
	       (unsigned long long)samples[0].metadata_bytes);
}

int main(int argc, char **argv)
{
	static struct sample samples[2][REPEAT_MAX];
	int repeats = argc > 1 ? atoi(argv[1]) : 9, rc = 0;
	struct shapes *shapes;

	if (repeats < 1 || repeats > REPEAT_MAX) {
		fprintf(stderr, "bench-plan: expected 1 to %d repeats\n", REPEAT_MAX);
		return 2;
	}
	shapes = shapes_folder();
	generate(shapes);
	/* One round that does not count warms the page cache; then the packings take turns. */
	for (int i = -1; i < repeats && rc == 0; i++)
		for (uint32_t p = 0; p < 2 && rc == 0; p++)
			rc = repeat(shapes_path(shapes), TND_PACKING_NAME + p,
				    &samples[p][i < 0 ? 0 : i]);
	shapes_remove(shapes);
	if (rc < 0)
		return 1;
	report("name", samples[0], repeats);
	report("file", samples[1], repeats);
	return 0;
}
