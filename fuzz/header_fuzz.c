/* SPDX-License-Identifier: Apache-2.0 */
/*
 * header_fuzz.c - the scanner of headers against hostile bytes
 *
 * Input: 4 bytes little-endian, the bytes of data that the file has behind its header (so that an accepted header is within reach), then
 * the header. Found here: reads outside the text and undefined behaviour (sanitizers), a table that breaks its promises, and, unless
 * built with FUZZ_WITHOUT_ORACLE, any verdict that differs from the oracle's.
 */
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

/* What every user of a table relies on. */
static void check_table(const struct tnd__header *header, size_t text_bytes, uint64_t data_bytes)
{
	uint64_t begin = 8 + text_bytes;

	for (size_t i = 0; i < header->tensor_count; i++) {
		const struct tnd_tensor *tensor = &header->tensors[i], *last = &tensor[i ? -1 : 0];
		uint64_t product = 1;

		if (tensor->name[tensor->name_bytes] != '\0')
			fuzz_fail("tensor %zu: no NUL after its name", i);
		if (i && tnd__compare(last->name, last->name_bytes, tensor->name,
				      tensor->name_bytes) >= 0)
			fuzz_fail("tensor %zu: names out of order", i);
		if (tensor->offset < begin || tensor->offset - begin > data_bytes ||
		    tensor->bytes > data_bytes - (tensor->offset - begin))
			fuzz_fail("tensor %zu: data outside the file", i);
		for (uint32_t d = 0; d < tensor->dim_count; d++)
			product *= tensor->shape[d];
		if (product * tnd_dtype_bits(tensor->dtype) != 8 * tensor->bytes)
			fuzz_fail("tensor %zu: shape and bytes disagree", i);
	}
	for (size_t i = 0; i < header->metadata_count; i++)
		if (header->metadata[i].key[header->metadata[i].key_bytes] != '\0' ||
		    header->metadata[i].value[header->metadata[i].value_bytes] != '\0')
			fuzz_fail("metadata %zu: no NUL at its end", i);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct tnd__header_text text = {.file = "fuzz"};
	struct tnd__header header;
	struct tnd_error error;
	int rc;

	if (bytes < 4)
		return 0;
	for (int i = 0; i < 4; i++)
		text.data_bytes |= (uint64_t)data[i] << (8 * i);
	data += 4;
	text.bytes = bytes - 4;
	text.text = malloc(text.bytes ? text.bytes : 1);
	if (!text.text)
		return 0;
	memcpy(text.text, data, text.bytes);
	rc = tnd__header_scan(&text, &header, &error);
	if (rc < 0 && (error.code != rc || strncmp(error.message, "fuzz: ", 6) != 0))
		fuzz_fail("a refusal without its sentence: %d", rc);
	if (rc == 0)
		check_table(&header, text.bytes, text.data_bytes);
	if (rc == 0 && tnd__header_detach(&header) < 0) {
		tnd__header_free(&header);
		rc = -1;
	}
	/* From here on the names live elsewhere, and the text may go. */
	free(text.text);
	if (rc == 0)
		check_table(&header, text.bytes, text.data_bytes);
#ifndef FUZZ_WITHOUT_ORACLE
	oracle_compare(data, text.bytes, text.data_bytes, rc, rc == 0 ? &header : NULL);
#endif
	if (rc == 0)
		tnd__header_free(&header);
	return 0;
}
