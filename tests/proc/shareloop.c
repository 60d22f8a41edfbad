/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shareloop.c - a service that shares the same checkpoint between two loads of its own, again and
 * again, and says what is left each time
 *
 *   shareloop PATH BUDGET ROUNDS
 *
 * A line a round, taken after close: descriptors, threads, mappings, resident bytes.
 */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tundish/tundish.h>

#include "support/fds.h"

#define RANKS 2

struct member {
	struct tnd_plan *plan;
	const char *address;
	int code;
	struct tnd_error error;
};

static void *take_all(void *arg)
{
	struct member *member = arg;
	struct tnd_load_opts opts = {.struct_bytes = sizeof(opts), .share = member->address};
	struct tnd_view view;
	struct tnd_load *load;
	int end;

	member->code = tnd_load_open(member->plan, &opts, &load, &member->error);
	if (member->code < 0)
		return NULL;
	while ((member->code = tnd_load_next(load, &view, &member->error)) == 1)
		tnd_view_release(&view);
	end = tnd_load_end(load, member->code ? NULL : &member->error);
	member->code = member->code ? member->code : end;
	tnd_load_close(load);
	return NULL;
}

/* Both loads of an open share, each on a thread. */
static int load_both(struct tnd_plan *const plans[RANKS], const char *address,
		     struct tnd_error *error)
{
	struct member members[RANKS] = {{0}};
	pthread_t threads[RANKS];
	int code = 0, started = 0;

	for (; started < RANKS; started++) {
		members[started].plan = plans[started];
		members[started].address = address;
		if (pthread_create(&threads[started], NULL, take_all, &members[started]))
			break;
	}
	for (int i = 0; i < started; i++) {
		pthread_join(threads[i], NULL);
		if (members[i].code < 0 && code == 0) {
			code = members[i].code;
			*error = members[i].error;
		}
	}
	return started == RANKS ? code : -1;
}

static int one_round(struct tnd_plan *shared, struct tnd_plan *const plans[RANKS],
		     struct tnd_error *error)
{
	struct tnd_share *share;
	int code = tnd_share_open(shared, NULL, &share, error);

	if (code < 0)
		return code;
	code = load_both(plans, tnd_share_address(share), error);
	if (code == 0)
		code = tnd_share_end(share, error);
	tnd_share_close(share);
	return code;
}

static void print_left(void)
{
	FILE *file = fopen("/proc/self/status", "re");
	unsigned long long kib, bytes = 0;
	unsigned threads = 0;
	char line[256];

	while (file && fgets(line, sizeof(line), file)) {
		if (sscanf(line, "RssAnon: %llu", &kib) == 1 ||
		    sscanf(line, "RssShmem: %llu", &kib) == 1)
			bytes += kib * 1024;
		sscanf(line, "Threads: %u", &threads);
	}
	if (file)
		fclose(file);
	printf("%u %u %u %llu\n", fd_count(), threads, map_count(""), bytes);
}

int main(int argc, char **argv)
{
	struct tnd_layout layout = {.struct_bytes = sizeof(layout), .tp_size = RANKS};
	struct tnd_plan_opts opts = {.struct_bytes = sizeof(opts)};
	struct tnd_checkpoint *checkpoint = NULL;
	struct tnd_plan *shared = NULL, *plans[RANKS] = {NULL};
	struct tnd_error error = {0};
	int code;

	if (argc != 4)
		return 2;
	opts.budget_bytes = strtoull(argv[2], NULL, 10);
	code = tnd_checkpoint_open(argv[1], NULL, &checkpoint, &error);
	if (code == 0)
		code = tnd_plan_create_union(checkpoint, &layout, NULL, 0, &opts, &shared, &error);
	for (uint32_t rank = 0; code == 0 && rank < RANKS; rank++) {
		layout.rank = rank;
		code = tnd_plan_create(checkpoint, &layout, &opts, &plans[rank], &error);
	}
	for (long round = 0; code == 0 && round < atol(argv[3]); round++) {
		code = one_round(shared, plans, &error);
		if (code == 0)
			print_left();
	}
	if (code < 0)
		fprintf(stderr, "shareloop: %s: %s\n", tnd_error_name(code), error.message);
	for (int rank = 0; rank < RANKS; rank++)
		tnd_plan_close(plans[rank]);
	tnd_plan_close(shared);
	tnd_checkpoint_close(checkpoint);
	return code != 0;
}
