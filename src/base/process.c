/* SPDX-License-Identifier: Apache-2.0 */
/* process.c - what /proc says of another process */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base.h"

int tnd__process_state(int32_t pid, uint64_t *ret_began)
{
	char path[32], text[1024], state;
	uint64_t began;
	const char *rest;
	ssize_t got;

	if (pid <= 0)
		return -ESRCH;
	snprintf(path, sizeof(path), "/proc/%" PRId32 "/stat", pid);
	got = tnd__read_small(path, text, sizeof(text));
	if (got < 0)
		return got == -ENOENT ? -ESRCH : (int)got;
	/* The command's name may hold spaces and parentheses: behind the last one come the rest. */
	rest = strrchr(text, ')');
	if (!rest || sscanf(rest,
			    ") %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s "
			    "%*s %*s %" SCNu64,
			    &state, &began) != 2)
		return -EBADMSG;
	if (ret_began)
		*ret_began = began;
	return state;
}
