/* SPDX-License-Identifier: Apache-2.0 */
/* copy.c - the copies that bulk bytes are moved with */
#include <string.h>

#include "copy.h"

void tnd__copy(void *to, const void *from, uint64_t bytes, bool past)
{
	(void)past;
	if (bytes)
		memcpy(to, from, bytes);
}

void tnd__copy_strides(void *to, const void *from, const struct tnd__strides *strides, bool past)
{
	for (uint64_t i = 0; i < strides->count; i++)
		tnd__copy((char *)to + i * strides->bytes, (const char *)from + i * strides->stride,
			  strides->bytes, past);
}
