/* SPDX-License-Identifier: Apache-2.0 */
/*
 * consume.c - a program that loads the same checkpoint again and again, as a service would, and says what is left each time
 *
 *   consume PATH BUDGET ROUNDS DELAY_US [uring|threads]
 *
 * Each view is held for DELAY_US. One JSON line a round, taken after close: kept and peak charged bytes, most resident memory seen during
 * the load, and what the process has now: resident bytes, mappings, descriptors, threads.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <tundish/tundish.h>

#include "support/fds.h"

/* RssAnon + RssShmem of this process, and its threads. */
static uint64_t resident(unsigned *ret_threads)
{
	FILE *file = fopen("/proc/self/status", "re");
	unsigned long long kib, total = 0;
	char line[256];

	while (file && fgets(line, sizeof(line), file)) {
		if (sscanf(line, "RssAnon: %llu", &kib) == 1 ||
		    sscanf(line, "RssShmem: %llu", &kib) == 1)
			total += kib * 1024;
		sscanf(line, "Threads: %u", ret_threads);
	}
	if (file)
		fclose(file);
	return total;
}

static int consume(struct tnd_load *load, long delay_us, uint64_t *ret_peak,
		   struct tnd_error *error)
{
	struct timespec delay = {delay_us / 1000000, delay_us % 1000000 * 1000};
	struct tnd_view view;
	unsigned threads;
	uint64_t now;
	int rc;

	while ((rc = tnd_load_next(load, &view, error)) == 1) {
		if (delay_us)
			nanosleep(&delay, NULL);
		now = resident(&threads);
		*ret_peak = now > *ret_peak ? now : *ret_peak;
		tnd_view_release(&view);
	}
	return rc;
}

static int one_round(const char *path, uint64_t budget, long delay_us, uint32_t engine)
{
	struct tnd_plan_opts plan_opts = {.struct_bytes = sizeof(plan_opts),
					  .budget_bytes = budget};
	struct tnd_load_opts load_opts = {.struct_bytes = sizeof(load_opts), .engine = engine};
	struct tnd_load_stats stats = {.struct_bytes = sizeof(stats)};
	struct tnd_checkpoint *checkpoint = NULL;
	struct tnd_error error = {0};
	struct tnd_plan *plan = NULL;
	struct tnd_load *load = NULL;
	uint64_t peak = 0, rss;
	unsigned threads = 0;
	int rc, end;

	rc = tnd_checkpoint_open(path, NULL, &checkpoint, &error);
	if (rc == 0)
		rc = tnd_plan_create(checkpoint, NULL, &plan_opts, &plan, &error);
	if (rc == 0)
		rc = tnd_load_open(plan, &load_opts, &load, &error);
	if (rc == 0) {
		rc = consume(load, delay_us, &peak, &error);
		end = tnd_load_end(load, &error);
		rc = rc ? rc : end;
		tnd_load_stats(load, &stats);
	}
	tnd_load_close(load);
	tnd_plan_close(plan);
	tnd_checkpoint_close(checkpoint);
	if (rc) {
		fprintf(stderr, "consume: %s\n", error.message);
		return rc;
	}
	rss = resident(&threads);
	printf("{\"kept_bytes\": %" PRIu64 ", \"peak_charged_bytes\": %" PRIu64
	       ", \"peak_rss_bytes\": %" PRIu64 ", \"rss_bytes\": %" PRIu64
	       ", \"maps\": %u, \"fds\": %u, \"threads\": %u}\n",
	       stats.kept_bytes, stats.peak_charged_bytes, peak, rss, map_count(""), fd_count(),
	       threads);
	return 0;
}

int main(int argc, char **argv)
{
	uint32_t engine = TND_ENGINE_AUTO;

	if (argc < 5)
		return 2;
	if (argc > 5)
		engine = strcmp(argv[5], "threads") == 0 ? TND_ENGINE_THREADS : TND_ENGINE_URING;
	for (long round = 0; round < atol(argv[3]); round++)
		if (one_round(argv[1], strtoull(argv[2], NULL, 10), atol(argv[4]), engine))
			return 1;
	return 0;
}
