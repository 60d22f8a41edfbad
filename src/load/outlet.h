/* SPDX-License-Identifier: Apache-2.0 */
/*
 * outlet.h - the reading side of a shared load: share.c, who opens it, outlet.c, who runs it, and
 * patience.c, who waits for its members
 */
#ifndef TND_OUTLET_H
#define TND_OUTLET_H

#include <tundish/share.h>

#include "load_internal.h"
#include "stream.h"

/* One member. */
struct tnd__held {
	uint32_t rank;
	bool lost;   /* the feeder's, until its end */
	uint64_t ns; /* that the reading stood still because of it; flow lock */
};

struct tnd__outlet {
	struct tnd_load *load;
	struct tnd_channel *channel; /* made before the feeder, closed after it */
	const struct tnd_tensor *tensors;
	struct tnd__held *held; /* member_count */
	size_t member_count;
	uint64_t set_aside_bytes; /* for members: charged from open to end */
	uint64_t files;           /* fingerprint */
	uint32_t on_dead;
	int64_t meet_ns, stall_ns, evict_ns;
	uint64_t guests_let_go; /* the feeder's, until its end */
	void *table;            /* the feeder's: TND__STREAM_OBJECT_MAX */
	struct tnd__premake *premake;
	bool through; /* flow lock: the feeder is */
};

/* By open, once account and pool are there. Return: 0, as tnd_channel_create. */
int tnd__outlet_open(struct tnd__outlet *outlet, struct tnd_load *load, const char *address,
		     struct tnd_error *reterr);
/* Sends HELLO. Return: 0, as tnd_channel_send. */
int tnd__outlet_hello(struct tnd__outlet *outlet, struct tnd_error *reterr);
/* By the feeder: memory for slab `slab`; NULL once the load has failed or was ended. */
struct tnd__buffer *tnd__outlet_feed(struct tnd__outlet *outlet, size_t slab);
/* By the thread that read its last byte. */
void tnd__outlet_publish(struct tnd__outlet *outlet, size_t slab, struct tnd__buffer *buffer);
/* By the feeder after the last slab: until every member is through, or the load has failed. */
void tnd__outlet_finish(struct tnd__outlet *outlet);
/* After the feeder and the last read. */
void tnd__outlet_close(struct tnd__outlet *outlet);

/* patience.c: how long the feeder waits before it looks around */
#define TND__SLICE_NS INT64_C(20000000)

/* One try of something on the channel, until the deadline. */
typedef int (*tnd__attempt_fn)(struct tnd__outlet *outlet, void *arg, int64_t deadline_ns,
			       struct tnd_error *reterr);
/* Tries until it works. Return: 0; < 0 once the load has failed or was ended. */
int tnd__outlet_patiently(struct tnd__outlet *outlet, tnd__attempt_fn attempt, void *arg);
/* Cancelled, over the deadline, failed? Return: 0; the load's error, which is set then. */
int tnd__outlet_check(struct tnd__outlet *outlet);

/* -- premake.c -- */

#define TND__PREMAKE_MAX 4u

struct tnd__premake;
/* Has `count` slabs made. Return: NULL where that cannot be; they are then made one by one. */
struct tnd__premake *tnd__premake_start(struct tnd_load *load, uint32_t count);
/* Until one of them is there, or none is to come. NULL is allowed, here and below. */
void tnd__premake_await(struct tnd__premake *premake);
void tnd__premake_end(struct tnd__premake *premake);

/* load_report.c: the `share` object of tundish.load/1. Return: 0, -ENOMEM. */
int tnd__share_report(const struct tnd__outlet *outlet, char **ret_text);

/* Fingerprint of a checkpoint's files: device, inode, size, time of change. */
uint64_t tnd__files_fingerprint(const struct tnd_checkpoint *checkpoint);

#endif
