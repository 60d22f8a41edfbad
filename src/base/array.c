/* SPDX-License-Identifier: Apache-2.0 */
/* array.c - growable arrays and lists of sentences */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"

int tnd__reserve(void *array_pointer, size_t *capacity, size_t need, size_t element_bytes)
{
	size_t grown = *capacity ? *capacity : 16;
	void *old, *fresh;

	if (need <= *capacity)
		return 0;
	while (grown < need) {
		if (grown > SIZE_MAX / 2)
			return -ENOMEM;
		grown *= 2;
	}
	memcpy(&old, array_pointer, sizeof(old));
	fresh = reallocarray(old, grown, element_bytes);
	if (!fresh)
		return -ENOMEM;
	memcpy(array_pointer, &fresh, sizeof(fresh));
	*capacity = grown;
	return 0;
}

int tnd__sentences_add(struct tnd__sentences *list, const char *format, ...)
{
	va_list args;
	char *text;
	int rc;

	rc = tnd__reserve(&list->items, &list->capacity, list->count + 1, sizeof(*list->items));
	if (rc < 0)
		return rc;
	va_start(args, format);
	rc = vasprintf(&text, format, args);
	va_end(args);
	if (rc < 0)
		return -ENOMEM;
	list->items[list->count++] = text;
	return 0;
}

void tnd__sentences_free(struct tnd__sentences *list)
{
	for (size_t i = 0; i < list->count; i++)
		free(list->items[i]);
	free(list->items);
	memset(list, 0, sizeof(*list));
}
