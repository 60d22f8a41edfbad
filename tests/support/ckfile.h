/* SPDX-License-Identifier: Apache-2.0 */
/* ckfile.h - small real checkpoints for tests: files whose every byte is known from tensor name and position */
#ifndef TND_TEST_CKFILE_H
#define TND_TEST_CKFILE_H

#include <stddef.h>
#include <stdint.h>

struct ck_tensor {
	const char *name;
	const char *dtype;
	uint64_t shape[4];
	unsigned dim_count;
	uint64_t bytes;
};

/* Byte `at` of tensor `name`. */
unsigned char ck_byte(const char *name, uint64_t at);

/* Writes `path` with the tensors in this order. `gap` text is put into the metadata to move the data's alignment. Exits on failure. */
void ck_write(const char *path, const struct ck_tensor *tensors, size_t count, const char *filler);

/* A fresh folder below TMPDIR or /tmp, and its removal with all files in it. */
char *ck_folder(void);
void ck_remove(char *folder);

#endif
