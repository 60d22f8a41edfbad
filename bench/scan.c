/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scan.c - how fast is a header of 100,000 tensors read, checked and sorted?
 *
 * Target: 300 MB/s of header text as writers lay it out (docs/design/checkpoint.md). Bound on paper: each byte
 * of the text is read once, a third of it (the names) is moved, and 56 bytes of table are written for each tensor: for 13 MB, 13 + 2 x 5 +
 * 3 x 6 MB of memory traffic, so about three times a memcpy of the text. The memcpy is measured in the same run, in turn
 * with the scans, and printed beside them.
 *
 * Orders: `sorted` by name, as most writers lay out; `dtype` first and then name, as the reference writer does; `shuffled`,
 * names and data alike, as nobody does. What is scanned is verified: count, a name found where it must be, and that all bytes are covered.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "checkpoint/header.h"

#define TENSOR_COUNT 100000
#define REPEATS 15
#define ORDERS 3

static const char *const order_names[ORDERS] = {"sorted", "dtype", "shuffled"};

struct name {
	char text[96];
	int dtype; /* 0: BF16 [4,8], 1: F32 [2] */
};

static struct name *names;

static void make_names(void)
{
	static const char *const parts[] = {"gate_proj", "up_proj", "down_proj"};

	for (int i = 0; i < TENSOR_COUNT; i++) {
		int layer = i / 1536, expert = i % 1536 / 6, part = i % 6 / 2;

		names[i].dtype = i % 2;
		snprintf(names[i].text, sizeof(names[i].text),
			 "model.layers.%d.mlp.experts.%d.%s.%s", layer, expert, parts[part],
			 i % 2 ? "weight_scale_inv" : "weight");
	}
}

static int by_text(const void *a, const void *b)
{
	return strcmp(((const struct name *)a)->text, ((const struct name *)b)->text);
}

static int by_dtype(const void *a, const void *b)
{
	const struct name *x = a, *y = b;

	return x->dtype != y->dtype ? x->dtype - y->dtype : by_text(a, b);
}

static void put_in_order(int order)
{
	uint64_t state = 42; /* fixed: the same file each time */

	qsort(names, TENSOR_COUNT, sizeof(*names), order == 1 ? by_dtype : by_text);
	for (size_t i = TENSOR_COUNT - 1; order == 2 && i > 0; i--) {
		struct name swap = names[i];
		size_t other;

		state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
		other = (size_t)(state >> 33) % (i + 1);
		names[i] = names[other];
		names[other] = swap;
	}
}

static char *make_header(int order, size_t *ret_bytes, uint64_t *ret_data_bytes)
{
	struct tnd__text text = {0};
	uint64_t at = 0;

	put_in_order(order);
	tnd__text_add(&text, "{\"__metadata__\":{\"format\":\"pt\"}");
	for (int i = 0; i < TENSOR_COUNT; i++) {
		uint64_t bytes = names[i].dtype ? 8 : 64;

		tnd__text_add(&text,
			      ",\"%s\":{\"dtype\":\"%s\",\"shape\":%s,"
			      "\"data_offsets\":[%llu,%llu]}",
			      names[i].text, names[i].dtype ? "F32" : "BF16",
			      names[i].dtype ? "[2]" : "[4,8]",
			      (unsigned long long)(at + UINT64_C(500000000000)),
			      (unsigned long long)(at + bytes + UINT64_C(500000000000)));
		at += bytes;
	}
	/* Offsets as long as a large checkpoint's; one tensor takes the room before them. */
	tnd__text_add(&text, ",\"zz\":{\"dtype\":\"U8\",\"shape\":[500000000000],"
			     "\"data_offsets\":[0,500000000000]}}");
	*ret_bytes = text.bytes;
	*ret_data_bytes = at + UINT64_C(500000000000);
	return tnd__text_take(&text);
}

static void verify(const struct tnd__header *header, uint64_t data_bytes)
{
	uint64_t bytes = 0;

	for (size_t i = 0; i < header->tensor_count; i++)
		bytes += header->tensors[i].bytes;
	if (header->tensor_count != TENSOR_COUNT + 1 || bytes != data_bytes ||
	    strcmp(header->tensors[TENSOR_COUNT].name, "zz") != 0) {
		fprintf(stderr, "scan: the table is wrong\n");
		exit(1);
	}
}

static int64_t scan_once(const struct tnd__header_text *text)
{
	struct tnd__header header;
	struct tnd_error error;
	int64_t start = tnd__now_ns(), took;

	if (tnd__header_scan(text, &header, &error) < 0) {
		fprintf(stderr, "scan: %s\n", error.message);
		exit(1);
	}
	took = tnd__now_ns() - start;
	verify(&header, text->data_bytes);
	tnd__header_free(&header);
	return took;
}

static int by_value(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return x < y ? -1 : x > y;
}

static double rate(size_t bytes, int64_t ns)
{
	return (double)bytes * 1e3 / (double)ns;
}

static void print_row(const char *what, size_t bytes, int64_t *ns)
{
	qsort(ns, REPEATS, sizeof(*ns), by_value);
	printf("%-9s %7.1f MB  slowest %7.1f  median %7.1f  fastest %7.1f MB/s  %6.2f ms\n", what,
	       (double)bytes / 1e6, rate(bytes, ns[REPEATS - 1]), rate(bytes, ns[REPEATS / 2]),
	       rate(bytes, ns[0]), (double)ns[REPEATS / 2] / 1e6);
}

int main(void)
{
	int64_t took[ORDERS][REPEATS], copied[REPEATS];
	char *headers[ORDERS], *work;
	uint64_t data_bytes = 0;
	size_t bytes = 0;
	struct utsname machine;

	names = calloc(TENSOR_COUNT, sizeof(*names));
	if (!names)
		return 1;
	make_names();
	for (int order = 0; order < ORDERS; order++) {
		headers[order] = make_header(order, &bytes, &data_bytes);
		if (!headers[order])
			return 1;
	}
	work = malloc(bytes);
	if (!work || uname(&machine) < 0)
		return 1;
	memset(work, 1, bytes);
	/* The first round warms up and is overwritten by the second. */
	for (int i = -1; i < REPEATS; i++)
		for (int order = 0; order < ORDERS; order++) {
			struct tnd__header_text text = {.text = (unsigned char *)work,
							.bytes = bytes,
							.data_bytes = data_bytes,
							.file = "bench"};
			int64_t start = tnd__now_ns();

			memcpy(work, headers[order], bytes);
			copied[i < 0 ? 0 : i] = tnd__now_ns() - start;
			took[order][i < 0 ? 0 : i] = scan_once(&text);
		}
	printf("machine: %s %s, %ld processors\n", machine.sysname, machine.release,
	       sysconf(_SC_NPROCESSORS_ONLN));
	print_row("memcpy", bytes, copied);
	for (int order = 0; order < ORDERS; order++)
		print_row(order_names[order], bytes, took[order]);
	printf("{\"bench\":\"scan\",\"tensors\":%d,\"bytes\":%zu,\"memcpy_mb_s\":%.1f",
	       TENSOR_COUNT, bytes, rate(bytes, copied[REPEATS / 2]));
	for (int order = 0; order < ORDERS; order++) {
		printf(",\"%s_mb_s\":%.1f", order_names[order],
		       rate(bytes, took[order][REPEATS / 2]));
		free(headers[order]);
	}
	printf("}\n");
	free(work);
	free(names);
	return 0;
}
