/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fakechannel.h - the two memfds of a channel, made by hand: what stat finds is then known to the
 * last figure, and can be made wrong in any way
 */
#ifndef TND_TEST_FAKECHANNEL_H
#define TND_TEST_FAKECHANNEL_H

#include "channel/layout.h"

struct fake {
	int data_fd, control_fd;
	struct tnd__data_header *header; /* both mapped */
	struct tnd__descriptor *descriptors;
	struct tnd__control *control;
	uint64_t data_bytes;
};

/*
 * A channel of 64 KiB and 8 objects with 4 places, nothing sent, no seat used; the writer is this
 * process. Ends the program where that fails.
 */
void fake_make(struct fake *fake, const char *name, uint64_t first_number);
/* One more object of `bytes` (a multiple of 64), as a send would leave it. */
void fake_send(struct fake *fake, uint64_t bytes);
/* A place in use. */
void fake_seat(struct fake *fake, uint32_t place, uint32_t rank, uint32_t state, uint32_t pid);
void fake_close(struct fake *fake);

#endif
