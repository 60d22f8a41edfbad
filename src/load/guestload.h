/* SPDX-License-Identifier: Apache-2.0 */
/*
 * guestload.h - a guest of a shared load: takes what passes, then reads the rest itself
 *
 *   attached   objects of the reader's channel, from wherever it joined --> items that are whole in
 *              a slab, in the order of the stream; member.c and take.c do the work
 *      |  the end, let go, told, nothing for a while
 *      v
 *   alone      feeder and storage of its own, for a plan of the items that did not come: of
 *              plan/rest.c
 *
 * Nothing that the channel does is an error of the load. All of it runs in tnd_load_next(), and all
 * fields are the consumer's own.
 */
#ifndef TND_GUESTLOAD_H
#define TND_GUESTLOAD_H

#include "member.h"

struct tnd__guest {
	unsigned char *taken;     /* a bit for each item of the plan */
	uint64_t tables_bytes;    /* charged for the plan of the rest */
	uint64_t came_bytes;      /* kept bytes that were taken */
	struct tnd__arrival *now; /* the slab whose items are handed out: */
	size_t *queue;            /* these, from `next` on */
	size_t queued, next, capacity;
	char why[TND_ERROR_MESSAGE_MAX]; /* it left; empty: the end, or everything came */
	/* once it is alone: */
	struct tnd__member *left;
	struct tnd_plan *whole; /* the plan that it was opened with; load->plan: the rest */
	size_t *map;            /* of each item of the rest its index in `whole` */
};

/*
 * One try to attach; where there is nothing to be had the load becomes one that reads alone.
 * Return: 0; -ENOMEM.
 */
int tnd__guest_open(struct tnd_load *load, struct tnd_error *reterr);
/* Before anything has come: the load is one that reads alone. */
void tnd__guest_drop(struct tnd_load *load, const char *why);
/*
 * While attached. Return: 1: the next piece, all of item *ret_index; 0: from now on the load reads
 * alone, or everything has come; < 0: the load's error.
 */
int tnd__guest_piece(struct tnd_load *load, size_t *ret_index, struct tnd__piece *ret_piece,
		     struct tnd_error *reterr);
/* The index in the plan that the load was opened with. */
size_t tnd__guest_index(const struct tnd_load *load, size_t index);
void tnd__guest_free(struct tnd__guest *guest);

/* -- for member.c -- */

/* Charges a slab that came to the load's account, if there is room. */
bool tnd__guest_charge(struct tnd_load *load, uint64_t bytes);
/* What is to be handed out of it; without any it goes back at once. */
int tnd__guest_choose(struct tnd_load *load, struct tnd__arrival *arrival);

#endif
