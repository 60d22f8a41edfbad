/* SPDX-License-Identifier: Apache-2.0 */
/* opener.h - what the steps of opening a checkpoint share */
#ifndef TND_OPENER_H
#define TND_OPENER_H

#include "parts.h"

struct tnd__opener {
	struct tnd_checkpoint_opts opts;
	tnd_problem_fn fn; /* NULL: stop at the first problem */
	void *arg;
	int problem_count;
	struct tnd_error error;
	struct tnd__scratch scratch;
	struct tnd__part *parts;
	size_t part_count, part_capacity;
	struct tnd__sentences entries; /* names in the folder */
	struct tnd__index index;
	char *index_name, *folder;
	struct tnd__sentences warnings;
	struct tnd__config config;
};

/* Fills the error. Return: -ENOMEM. */
int tnd__opener_no_memory(struct tnd__opener *opener);

/* What becomes of a step's result. Return: 0 to go on, else the failure that ends opening. */
int tnd__opener_settle(struct tnd__opener *opener, int rc);

/* Opens and scans `name` in the opener's folder. Return: as settled. */
int tnd__opener_add(struct tnd__opener *opener, const char *name);

/* For qsort() and bsearch() over texts. */
int tnd__opener_compare(const void *a, const void *b);

bool tnd__has_suffix(const char *text, const char *suffix);

/*
 * Opens what opener->index_name names and takes out what it leaves out (indexed.c). Return: as
 * settled.
 */
int tnd__open_indexed(struct tnd__opener *opener);

#endif
