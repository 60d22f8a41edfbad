/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shapes.h - checkpoints that are only headers: sparse files of any size, for tests of what is read and not of bytes
 *
 *   shapes_folder -> shapes_begin, shapes_add ..., shapes_end (one file), again -> shapes_remove
 */
#ifndef TND_TEST_SHAPES_H
#define TND_TEST_SHAPES_H

#include <stdint.h>

struct shapes;

/* A fresh folder below TMPDIR or /tmp. Every function here ends the program when the machine fails it. */
struct shapes *shapes_folder(void);
const char *shapes_path(const struct shapes *shapes);
void shapes_remove(struct shapes *shapes);

void shapes_config(struct shapes *shapes, const char *json);

void shapes_begin(struct shapes *shapes, const char *file_name);
/* One tensor behind the others of its file; `shape` as text: "2304,2560", "" for a scalar. */
void shapes_add(struct shapes *shapes, const char *dtype, const char *shape, const char *format,
		...) __attribute__((format(printf, 4, 5)));
/* Makes the header `bytes` longer with blanks, so that data begins elsewhere modulo 4096. */
void shapes_pad(struct shapes *shapes, unsigned bytes);
void shapes_end(struct shapes *shapes);

/*
 * The expert checkpoint of 300 GB that the reference figures are of: 48 shards; 40 layers of 384 MXFP4 experts (92,160 tensors), 1,520 others of
 * 10.8 GB, and a draft stack `mtp.*` of 384 experts and 97 others.
 */
void shapes_experts(struct shapes *shapes);
#define SHAPES_EXPERT_FILES 48
#define SHAPES_TARGET_TENSORS 93680
#define SHAPES_DRAFT_TENSORS 2401

#endif
