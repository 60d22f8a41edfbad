/* SPDX-License-Identifier: Apache-2.0 */
/* error.c - texts of codes, and filling in the detail of an error */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base.h"

const char *tnd_strerror(int code)
{
	static _Thread_local char text[128];

	switch (code) {
#define TND_ERROR_TEXT_(name, number, sentence) \
	case name:                              \
		return sentence;
		TND_ERROR_TABLE(TND_ERROR_TEXT_)
#undef TND_ERROR_TEXT_
	default:
		break;
	}
	if (code >= 0)
		return "success";
	/* Met where files are opened, all over; what to do is always the same. */
	if (code == -EMFILE)
		return "Too many open files; raise the process's limit (ulimit -n)";
	if (code == -ENFILE)
		return "Too many open files in system; raise fs.file-max";
	if (code > TND_E_INVALID)
		return strerror_r(-code, text, sizeof(text));
	snprintf(text, sizeof(text), "unknown error %d", code);
	return text;
}

const char *tnd_error_name(int code)
{
	const char *name;

	switch (code) {
#define TND_ERROR_NAME_(name, number, sentence) \
	case name:                              \
		return #name;
		TND_ERROR_TABLE(TND_ERROR_NAME_)
#undef TND_ERROR_NAME_
	default:
		break;
	}
	if (code >= 0 || code <= TND_E_INVALID)
		return "UNKNOWN";
	name = strerrorname_np(-code);
	return name ? name : "UNKNOWN";
}

static void fill(struct tnd_error *error, int code, const struct tnd__where *where,
		 const char *format, va_list args)
{
	int used = 0;

	memset(error, 0, sizeof(*error));
	error->code = code;
	error->rank = -1;
	error->byte_offset = TND_ERROR_NO_OFFSET;
	if (where && where->file) {
		tnd__printable(where->file, strlen(where->file), error->file, sizeof(error->file));
		used = snprintf(error->message, sizeof(error->message), "%s: ", error->file);
	}
	if (where && where->name) {
		tnd__printable(where->name, where->name_bytes, error->name, sizeof(error->name));
		used += snprintf(error->message + used, sizeof(error->message) - (size_t)used,
				 "tensor '%s': ", error->name);
	}
	if (where && where->has_offset)
		error->byte_offset = where->byte_offset;
	vsnprintf(error->message + used, sizeof(error->message) - (size_t)used, format, args);
}

int tnd__fail(struct tnd_error *error, int code, const struct tnd__where *where, const char *format,
	      ...)
{
	va_list args;

	if (!error)
		return code;
	va_start(args, format);
	fill(error, code, where, format, args);
	va_end(args);
	return code;
}

int tnd__fail_plain(struct tnd_error *error, int code, const char *format, ...)
{
	va_list args;

	if (!error)
		return code;
	va_start(args, format);
	fill(error, code, NULL, format, args);
	va_end(args);
	return code;
}

int tnd__fail_rank(struct tnd_error *error, int code, int32_t rank, const char *format, ...)
{
	va_list args;

	if (!error)
		return code;
	va_start(args, format);
	fill(error, code, NULL, format, args);
	va_end(args);
	error->rank = rank;
	return code;
}
