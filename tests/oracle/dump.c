/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dump.c - what a load really delivered, tensor by tensor
 *
 *   dump PATH < loads        one line a load: tp ep rank phase slice packing slab engine direct mode budget held
 *
 * phase, slice, packing, engine and direct are the numbers of the TND_ constants; slab and budget are bytes (slab -1: a buffer
 * for each tensor); mode is view, own or shared. For each load: a line "load LINE", for each tensor in order of delivery
 *
 *   name TAB dim TAB start TAB length TAB kept bytes TAB XXH3-64 of the kept bytes, pieces together
 *
 * and "end CODE-NAME" with the sentence of the error, if any. Each view is held while the next `held` ones (below HELD_MAX) are delivered and is hashed
 * only then, so that a slab that is reused too early shows. Uses nothing but the public headers.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tundish/tundish.h>
#include <xxhash.h>

#define HELD_MAX 8

struct ask {
	uint32_t tp, ep, rank, phase, slice, packing, engine, direct;
	int64_t slab;
	uint64_t budget;
	uint32_t held;
	char mode[16];
};

struct ring {
	struct tnd_view views[HELD_MAX];
	unsigned long taken, hashed, held;
	XXH3_state_t *hash;
	int broken; /* pieces that do not follow each other, a place that is not aligned */
};

static void hash_oldest(struct ring *ring)
{
	struct tnd_view *view = &ring->views[ring->hashed++ % HELD_MAX];

	if (view->piece_offset == 0)
		XXH3_64bits_reset(ring->hash);
	if (view->bytes)
		XXH3_64bits_update(ring->hash, view->data, view->bytes);
	if (view->flags & TND_VIEW_F_LAST) {
		printf("%s\t%" PRId32 "\t%" PRIu64 "\t%" PRIu64 "\t%" PRIu64 "\t%016" PRIx64 "\n",
		       view->name, view->dim, view->start, view->length, view->tensor_bytes,
		       (uint64_t)XXH3_64bits_digest(ring->hash));
		if (view->piece_offset + view->bytes != view->tensor_bytes)
			ring->broken = 1;
	}
	tnd_view_release(view);
}

static int deliver(struct tnd_load *load, struct ring *ring, struct tnd_error *error)
{
	int rc;

	for (;;) {
		if (ring->taken - ring->hashed > ring->held)
			hash_oldest(ring);
		rc = tnd_load_next(load, &ring->views[ring->taken % HELD_MAX], error);
		if (rc != 1)
			break;
		ring->taken++;
	}
	while (ring->hashed < ring->taken)
		hash_oldest(ring);
	return rc;
}

static uint32_t mode_flags(const char *mode)
{
	if (strcmp(mode, "own") == 0)
		return TND_LOAD_F_OWN;
	return strcmp(mode, "shared") == 0 ? TND_LOAD_F_SHARED_SLABS : 0;
}

static int run(struct tnd_checkpoint *checkpoint, const struct ask *ask, struct tnd_error *error)
{
	struct tnd_layout layout = {.struct_bytes = sizeof(layout),
				    .tp_size = ask->tp,
				    .ep_size = ask->ep,
				    .rank = ask->rank};
	struct tnd_plan_opts plan_opts = {.struct_bytes = sizeof(plan_opts),
					  .phase = ask->phase,
					  .slice = ask->slice,
					  .packing = ask->packing,
					  .oversize = TND_OVERSIZE_PIECES,
					  .slab_bytes = ask->slab,
					  .budget_bytes = ask->budget};
	struct tnd_load_opts load_opts = {.struct_bytes = sizeof(load_opts),
					  .flags = mode_flags(ask->mode),
					  .engine = ask->engine,
					  .direct = ask->direct};
	struct ring ring = {.hash = XXH3_createState(), .held = ask->held};
	struct tnd_plan *plan = NULL;
	struct tnd_load *load = NULL;
	int rc = ring.hash ? 0 : -12, end;

	if (rc == 0)
		rc = tnd_plan_create(checkpoint, &layout, &plan_opts, &plan, error);
	if (rc == 0)
		rc = tnd_load_open(plan, &load_opts, &load, error);
	if (rc == 0) {
		rc = deliver(load, &ring, error);
		end = tnd_load_end(load, error);
		rc = rc ? rc : end;
	}
	if (rc == 0 && ring.broken) {
		snprintf(error->message, sizeof(error->message),
			 "the pieces of a tensor do not make it up");
		rc = TND_E_INVALID;
	}
	tnd_load_close(load);
	tnd_plan_close(plan);
	XXH3_freeState(ring.hash);
	return rc;
}

int main(int argc, char **argv)
{
	struct tnd_checkpoint *checkpoint;
	struct tnd_error error = {0};
	struct ask ask;
	char line[512];
	int rc, failed = 0;

	if (argc != 2)
		return 2;
	if (tnd_checkpoint_open(argv[1], NULL, &checkpoint, &error)) {
		fprintf(stderr, "dump: %s\n", error.message);
		return 3;
	}
	while (fgets(line, sizeof(line), stdin)) {
		if (sscanf(line,
			   "%" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu32
			   " %" SCNd64 " %" SCNu32 " %" SCNu32 " %15s %" SCNu64 " %" SCNu32,
			   &ask.tp, &ask.ep, &ask.rank, &ask.phase, &ask.slice, &ask.packing,
			   &ask.slab, &ask.engine, &ask.direct, ask.mode, &ask.budget,
			   &ask.held) != 12 ||
		    ask.held >= HELD_MAX) {
			fprintf(stderr, "dump: not a load: %s", line);
			return 2;
		}
		printf("load %s", line);
		memset(&error, 0, sizeof(error));
		rc = run(checkpoint, &ask, &error);
		printf("end %s %s\n", rc ? tnd_error_name(rc) : "ok", rc ? error.message : "");
		failed |= rc != 0;
	}
	tnd_checkpoint_close(checkpoint);
	return failed;
}
