/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz.h - the entry that libFuzzer and driver.c call, and the oracle of the header scanner */
#ifndef TND_FUZZ_H
#define TND_FUZZ_H

#include "checkpoint/header.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* Tells what is wrong and ends the process, so that a fuzzer keeps the input. */
_Noreturn void fuzz_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/*
 * Compares what the scanner made of `text` (`rc`; `header` if that is 0) with what the rules of the format, written down plainly over
 * a document that jansson parsed, make of it. Does not return if they disagree.
 */
void oracle_compare(const unsigned char *text, size_t bytes, uint64_t data_bytes, int rc,
		    const struct tnd__header *header);

#endif
