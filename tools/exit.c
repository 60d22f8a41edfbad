/* SPDX-License-Identifier: Apache-2.0 */
/* exit.c - from error code to exit status, and how errors are said */
#include "tool.h"

#include <errno.h>

int tool_status(int code)
{
	if (code >= 0)
		return TOOL_OK;
	switch (code) {
	case TND_E_INVALID:
	case TND_E_LAYOUT:
		return TOOL_USAGE;
	case TND_E_BUDGET:
	case TND_E_OVERSIZE:
	case TND_E_FULL:
	case TND_E_HEADROOM:
	case -ENOMEM:
		return TOOL_NO_FIT;
	case TND_E_DEADLINE:
	case -ETIMEDOUT:
		return TOOL_DEADLINE;
	case TND_E_CANCELLED:
	case -ECANCELED:
		return TOOL_INTERRUPTED;
	case TND_E_PEER_DEAD:
	case TND_E_EVICTED: /* given up as if it had died */
		return TOOL_PEER;
	case TND_E_CHANGED:
	case TND_E_ESCAPED:
		return TOOL_IO;
	default:
		return code <= TND_E_INVALID ? TOOL_REFUSED : TOOL_IO;
	}
}

int tool_fail(int code, const struct tnd_error *error)
{
	const char *text = error && error->message[0] ? error->message : tnd_strerror(code);

	fflush(stdout);
	fprintf(stderr, "tundish: %s\n", text);
	return tool_status(code);
}

int tool_fail_what(int code, const char *what)
{
	fflush(stdout);
	fprintf(stderr, "tundish: %s: %s\n", what, tnd_strerror(code));
	return tool_status(code);
}

void tool_warn(const char *message)
{
	fprintf(stderr, "tundish: warning: %s\n", message);
}
