/* SPDX-License-Identifier: Apache-2.0 */
/*
 * print.c - text for people: tables within 80 columns, printable names, colour on terminals only
 *
 * Names come from files that anybody may have written: what would steer a terminal (C0 and C1
 * control characters) or reorder its text (bidirectional marks) is shown as \u00XX, and broken
 * UTF-8 as \xXX.
 *
 * A table is collected first, since its widths come from its cells. One column may be flexible: it
 * is cut in the middle ("layers.0.ffn...w1.weight") when the line would not fit, because both ends
 * of a tensor's name say which it is.
 */
#include "tool.h"

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <wchar.h>

#define GAP 2

bool tool_colour(FILE *stream)
{
	const char *no_color = getenv("NO_COLOR");
	const char *term = getenv("TERM");

	return isatty(fileno(stream)) && !(no_color && no_color[0]) && term && strcmp(term, "dumb");
}

int tool_compare_names(const struct tnd_tensor *a, const struct tnd_tensor *b)
{
	size_t least = a->name_bytes < b->name_bytes ? a->name_bytes : b->name_bytes;
	int order = memcmp(a->name, b->name, least);

	return order ? order : (a->name_bytes > b->name_bytes) - (a->name_bytes < b->name_bytes);
}

int64_t tool_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static bool harmful(wchar_t point)
{
	return point < 0x20 || (point >= 0x7f && point < 0xa0) ||
	       (point >= 0x200b && point <= 0x200f) || (point >= 0x2028 && point <= 0x202e) ||
	       (point >= 0x2060 && point <= 0x206f) || point == 0xfeff;
}

char *tool_printable(const char *text, size_t text_bytes)
{
	/* The longest piece for one byte of input is \u00XX. */
	char *out = malloc(text_bytes * 6 + 1), *at = out;
	mbstate_t state = {0};

	if (!out)
		return NULL;
	for (size_t i = 0; i < text_bytes;) {
		wchar_t point = 0;
		size_t step = mbrtowc(&point, text + i, text_bytes - i, &state);

		if (step == (size_t)-1 || step == (size_t)-2) {
			at += sprintf(at, "\\x%02x", (unsigned char)text[i++]);
			state = (mbstate_t){0};
			continue;
		}
		if (step == 0)
			step = 1;
		if (harmful(point)) {
			at += sprintf(at, "\\u%04x", (unsigned)point);
		} else {
			memcpy(at, text + i, step);
			at += step;
		}
		i += step;
	}
	*at = '\0';
	return out;
}

/*
 * Bytes of the character at `text`, its columns in *ret_columns. `text` came from tool_printable.
 */
static size_t step_of(const char *text, size_t *ret_columns)
{
	mbstate_t state = {0};
	wchar_t point = 0;
	/* Not further than a character reaches: a name can be megabytes long. */
	size_t step = mbrtowc(&point, text, strnlen(text, MB_LEN_MAX), &state);
	int columns;

	if (step == 0 || step == (size_t)-1 || step == (size_t)-2) {
		*ret_columns = 1;
		return 1;
	}
	columns = wcwidth(point);
	*ret_columns = columns < 0 ? 1 : (size_t)columns;
	return step;
}

size_t tool_width(const char *text)
{
	size_t width = 0, columns;

	while (*text) {
		text += step_of(text, &columns);
		width += columns;
	}
	return width;
}

/*
 * Writes characters of `text` that fit into `limit` columns, after skipping `skip` columns. Return:
 * columns written.
 */
static size_t put_range(FILE *stream, const char *text, size_t skip, size_t limit)
{
	size_t written = 0, passed = 0, columns;

	while (*text) {
		size_t step = step_of(text, &columns);

		if (passed < skip) {
			passed += columns;
		} else {
			if (written + columns > limit)
				break;
			fwrite(text, 1, step, stream);
			written += columns;
		}
		text += step;
	}
	return written;
}

size_t tool_put_cut(FILE *stream, const char *text, size_t columns)
{
	size_t width = tool_width(text), head, tail, written;

	if (width <= columns || columns < 8)
		return put_range(stream, text, 0, columns);
	head = (columns - 3) / 2;
	tail = columns - 3 - head;
	written = put_range(stream, text, 0, head);
	fputs("...", stream);
	return written + 3 + put_range(stream, text, width - tail, tail);
}

void tool_put_wrapped(FILE *stream, const char *text, size_t column, size_t indent)
{
	bool first = true;

	while (*text) {
		size_t bytes = strcspn(text, " ");
		char *word = strndup(text, bytes);
		size_t width = word ? tool_width(word) : bytes;

		if (!first && column + 1 + width > TOOL_COLUMNS) {
			fprintf(stream, "\n%*s", (int)indent, "");
			column = indent;
		} else if (!first) {
			putc(' ', stream);
			column++;
		}
		first = false;
		fwrite(text, 1, bytes, stream);
		column += width;
		free(word);
		text += bytes;
		text += strspn(text, " ");
	}
	putc('\n', stream);
}

void tool_table_init(struct tool_table *table, size_t column_count, const char *const *heads,
		     const int *aligns)
{
	*table =
		(struct tool_table){.column_count = column_count, .heads = heads, .aligns = aligns};
}

static void add_cell(struct tool_table *table, char *text)
{
	if (text && table->cell_count == table->capacity) {
		size_t capacity = table->capacity ? table->capacity * 2 : 64;
		char **cells = realloc(table->cells, capacity * sizeof(*cells));

		if (cells) {
			table->cells = cells;
			table->capacity = capacity;
		}
	}
	if (!text || table->cell_count == table->capacity) {
		free(text);
		table->failed = true;
		return;
	}
	table->cells[table->cell_count++] = text;
}

void tool_table_add(struct tool_table *table, const char *format, ...)
{
	char *text;
	va_list args;

	va_start(args, format);
	if (vasprintf(&text, format, args) < 0)
		text = NULL;
	va_end(args);
	add_cell(table, text);
}

void tool_table_add_size(struct tool_table *table, uint64_t bytes)
{
	char text[TND_SIZE_TEXT_MAX];

	tool_table_add(table, "%s", tnd_size_format(bytes, text));
}

void tool_table_add_name(struct tool_table *table, const char *text, size_t text_bytes)
{
	add_cell(table, tool_printable(text, text_bytes));
}

/* Widths of the columns, the flexible one narrowed so that a line fits. */
static void measure(const struct tool_table *table, size_t *widths)
{
	size_t total = 0, flex = table->column_count;

	for (size_t c = 0; c < table->column_count; c++) {
		widths[c] = tool_width(table->heads[c]);
		for (size_t i = c; i < table->cell_count; i += table->column_count) {
			size_t width = tool_width(table->cells[i]);

			if (width > widths[c])
				widths[c] = width;
		}
		total += widths[c] + (c ? GAP : 0);
		if (table->aligns[c] == TOOL_FLEX)
			flex = c;
	}
	if (flex < table->column_count && total > TOOL_COLUMNS) {
		size_t rest = total - widths[flex];

		widths[flex] = rest + 12 < TOOL_COLUMNS ? TOOL_COLUMNS - rest : 12;
	}
}

static void print_row(const struct tool_table *table, FILE *stream, const char *const *row,
		      const size_t *widths)
{
	for (size_t c = 0; c < table->column_count; c++) {
		size_t width = tool_width(row[c]), written;

		if (c)
			fprintf(stream, "%*s", GAP, "");
		if (table->aligns[c] == TOOL_RIGHT && width < widths[c])
			fprintf(stream, "%*s", (int)(widths[c] - width), "");
		written = tool_put_cut(stream, row[c], widths[c]);
		/* No blanks at the end of a line. */
		if (table->aligns[c] != TOOL_RIGHT && c + 1 < table->column_count)
			fprintf(stream, "%*s", (int)(widths[c] - written), "");
	}
}

int tool_table_print(struct tool_table *table, FILE *stream)
{
	size_t *widths = calloc(table->column_count, sizeof(*widths));
	bool colour = tool_colour(stream);
	int status = TOOL_OK;

	if (!widths || table->failed) {
		status = tool_fail(-ENOMEM, NULL);
	} else {
		measure(table, widths);
		fputs(colour ? "\033[1m" : "", stream);
		print_row(table, stream, table->heads, widths);
		fputs(colour ? "\033[0m\n" : "\n", stream);
		for (size_t i = 0; i + table->column_count <= table->cell_count;
		     i += table->column_count) {
			print_row(table, stream, (const char *const *)table->cells + i, widths);
			putc('\n', stream);
		}
	}
	for (size_t i = 0; i < table->cell_count; i++)
		free(table->cells[i]);
	free(table->cells);
	free(widths);
	*table = (struct tool_table){0};
	return status;
}
