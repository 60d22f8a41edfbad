/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stat_output.c - channels, pools and loads for people, and as JSON
 *
 *   CHANNEL       PID    STATE    OBJECTS      BYTES  FULL   SENT  WAITS  BLOCKED
 *   tokens        4711   open           3   12.0 KiB    2%  1.23M      0      0 s
 *     reader 0    4712   alive          3   12.0 KiB    2%            17    1.2 s
 *
 * Every cell has a largest width, so that the lines fit 80 columns whatever shared memory says.
 */
#include "stat_output.h"

#include <errno.h>
#include <string.h>

/* The kernel's own limit; what is above it was not written by a working process. */
#define PID_MOST 4194304

const char *stat_state_name(uint32_t state)
{
	static const char *const names[] = {
		[TND_READER_MISSING] = "missing", [TND_READER_ALIVE] = "alive",
		[TND_READER_STOPPED] = "stopped", [TND_READER_DEAD] = "dead",
		[TND_READER_LEFT] = "left",       [TND_READER_EVICTED] = "evicted",
	};

	return state < sizeof(names) / sizeof(names[0]) ? names[state] : "unknown";
}

const char *stat_role_name(uint32_t role)
{
	static const char *const names[] = {
		[TND_STAT_LOAD_ALONE] = "alone",
		[TND_STAT_LOAD_MEMBER] = "member",
		[TND_STAT_LOAD_READER] = "reader",
	};

	return role < sizeof(names) / sizeof(names[0]) ? names[role] : "unknown";
}

/* -- cells -- */

/* At most 5 columns: 99999, 100k, 1.23M. */
static void add_count(struct tool_table *table, uint64_t count)
{
	static const char suffixes[] = "kMGTPE";
	double value = (double)count;
	int step = -1;

	if (count < 100000) {
		tool_table_add(table, "%llu", (unsigned long long)count);
		return;
	}
	/* 999.5 would be printed as 1e+03. */
	while (value >= 999.5 && step < 5) {
		value /= 1000;
		step++;
	}
	tool_table_add(table, "%.3g%c", value, suffixes[step]);
}

static void add_pid(struct tool_table *table, int32_t pid)
{
	if (pid > 0 && pid <= PID_MOST)
		tool_table_add(table, "%d", (int)pid);
	else
		tool_table_add(table, "-");
}

/* At most 7 columns. */
static void add_time(struct tool_table *table, uint64_t ns)
{
	double seconds = (double)ns / 1e9;

	if (ns == 0)
		tool_table_add(table, "0 s");
	else if (seconds < 0.9995)
		tool_table_add(table, "%.3g ms", seconds < 0.000001 ? 0.001 : seconds * 1e3);
	else if (seconds < 600)
		tool_table_add(table, "%.3g s", seconds);
	else if (seconds < 36000)
		tool_table_add(table, "%.0f min", seconds / 60);
	else if (seconds < 360000)
		tool_table_add(table, "%.0f h", seconds / 3600);
	else if (seconds < 1e5 * 86400)
		tool_table_add(table, "%.0f d", seconds / 86400);
	else
		tool_table_add(table, ">270 y");
}

/* At most 8 columns, which four of them in a line have: 31.1 MiB. */
static void add_short_size(struct tool_table *table, uint64_t bytes)
{
	static const char suffixes[] = "KMGTPE";
	double value = (double)bytes;
	int step = -1;

	if (bytes < 1000) {
		tool_table_add(table, "%u B", (unsigned)bytes);
		return;
	}
	do {
		value /= 1024;
		step++;
	} while (value >= 999.5 && step < 5);
	tool_table_add(table, "%.*f %ciB",
		       value < 9.995   ? 2
		       : value < 99.95 ? 1
				       : 0,
		       value, suffixes[step]);
}

/* The fuller of the two limits, in percent; rounded up, so that 0% is empty. */
static unsigned percent(uint64_t objects, uint64_t bytes, const struct tnd_stat_channel *channel)
{
	double full = (double)objects / (double)channel->max_objects;
	double full_bytes = (double)bytes / (double)channel->max_bytes;
	double most = 100 * (full > full_bytes ? full : full_bytes);
	unsigned whole = (unsigned)most;

	return most > whole ? whole + 1 : whole;
}

/* -- tables -- */

static const char *writer_word(const struct tnd_stat_channel *channel)
{
	if (channel->closed)
		return "closed";
	return channel->writer_state == TND_READER_ALIVE ? "open"
							 : stat_state_name(channel->writer_state);
}

/* A reader that fills 7/8 of a limit is, or will soon be, what the writer waits for. */
static const char *reader_word(const struct tnd_stat_channel *channel,
			       const struct tnd_stat_reader *reader)
{
	if (reader->state == TND_READER_ALIVE && !channel->closed &&
	    (reader->lag_objects > channel->max_objects - (channel->max_objects + 7) / 8 ||
	     reader->lag_bytes > channel->max_bytes - channel->max_bytes / 8))
		return "late";
	return stat_state_name(reader->state);
}

static void add_channel(struct tool_table *table, const struct tnd_stat_channel *channel)
{
	tool_table_add_name(table, channel->name[0] ? channel->name : "(no name)",
			    strlen(channel->name[0] ? channel->name : "(no name)"));
	add_pid(table, channel->pid);
	tool_table_add(table, "%s", writer_word(channel));
	add_count(table, channel->used_objects);
	tool_table_add_size(table, channel->used_bytes);
	tool_table_add(table, "%u%%", percent(channel->used_objects, channel->used_bytes, channel));
	add_count(table, channel->sent_objects);
	add_count(table, channel->writer_waits);
	add_time(table, channel->writer_blocked_ns);
	for (uint32_t i = 0; i < channel->reader_count; i++) {
		const struct tnd_stat_reader *reader = &channel->readers[i];

		tool_table_add(table, "  reader %u", reader->rank);
		add_pid(table, reader->pid);
		tool_table_add(table, "%s", reader_word(channel, reader));
		add_count(table, reader->lag_objects);
		tool_table_add_size(table, reader->lag_bytes);
		tool_table_add(table, "%u%%",
			       percent(reader->lag_objects, reader->lag_bytes, channel));
		tool_table_add(table, "%s", "");
		add_count(table, reader->waits);
		add_time(table, reader->blocked_ns);
	}
}

static int print_channels(const struct tnd_stat *stat)
{
	static const char *const heads[] = {"CHANNEL", "PID",  "STATE", "OBJECTS", "BYTES",
					    "FULL",    "SENT", "WAITS", "BLOCKED"};
	static const int aligns[] = {TOOL_FLEX,  TOOL_RIGHT, TOOL_LEFT,  TOOL_RIGHT, TOOL_RIGHT,
				     TOOL_RIGHT, TOOL_RIGHT, TOOL_RIGHT, TOOL_RIGHT};
	struct tool_table table;

	tool_table_init(&table, sizeof(heads) / sizeof(heads[0]), heads, aligns);
	for (size_t i = 0; i < stat->channel_count; i++)
		add_channel(&table, &stat->channels[i]);
	return tool_table_print(&table, stdout);
}

static void add_pool(struct tool_table *table, const struct tnd_stat_pool *pool)
{
	uint64_t leases = 0;

	for (uint32_t i = 0; i < pool->lease_count; i++)
		leases += pool->leases[i].count;
	tool_table_add_name(table, pool->name, strlen(pool->name));
	add_pid(table, pool->pid);
	add_count(table, pool->slabs);
	add_count(table, pool->live);
	tool_table_add_size(table, pool->slab_bytes);
	add_count(table, leases);
	for (uint32_t i = 0; i < pool->lease_count; i++) {
		tool_table_add(table, "  rank %u", pool->leases[i].rank);
		for (int empty = 0; empty < 4; empty++)
			tool_table_add(table, "%s", "");
		add_count(table, pool->leases[i].count);
	}
}

static int print_pools(const struct tnd_stat *stat)
{
	static const char *const heads[] = {"POOL", "PID", "SLABS", "LIVE", "BYTES", "LEASES"};
	static const int aligns[] = {TOOL_FLEX,  TOOL_RIGHT, TOOL_RIGHT,
				     TOOL_RIGHT, TOOL_RIGHT, TOOL_RIGHT};
	struct tool_table table;

	tool_table_init(&table, sizeof(heads) / sizeof(heads[0]), heads, aligns);
	for (size_t i = 0; i < stat->pool_count; i++)
		add_pool(&table, &stat->pools[i]);
	return tool_table_print(&table, stdout);
}

/* Above this no rank is believed: it would take the room of the rest. */
#define RANK_MOST 999999

/* Without the ending that all have: what tells them apart is before it. */
static void add_load_file(struct tool_table *table, const struct tnd_stat_load *load)
{
	static const char ending[] = ".safetensors";
	const char *name = load->file[0] ? load->file : "-";
	size_t bytes = strlen(name), cut = sizeof(ending) - 1;

	if (load->state != TND_READER_ALIVE) {
		tool_table_add(table, "(%s)", stat_state_name(load->state));
		return;
	}
	if (bytes > cut && strcmp(name + bytes - cut, ending) == 0)
		bytes -= cut;
	tool_table_add_name(table, name, bytes);
}

static void add_load(struct tool_table *table, const struct tnd_stat_load *load)
{
	double done = 100;

	if (load->total_bytes)
		done = (double)load->done_bytes / (double)load->total_bytes * 100;
	if (load->role == TND_STAT_LOAD_READER || load->rank > RANK_MOST)
		tool_table_add(table, load->role == TND_STAT_LOAD_READER ? "reader" : "-");
	else
		tool_table_add(table, "%u", load->rank);
	add_pid(table, load->pid);
	add_load_file(table, load);
	add_short_size(table, load->done_bytes);
	add_short_size(table, load->total_bytes);
	/* Rounded down, so that 100% is all. */
	tool_table_add(table, "%u%%", (unsigned)done);
	add_short_size(table, load->charged_bytes);
	add_short_size(table, load->budget_bytes);
}

static int print_loads(const struct tnd_stat *stat)
{
	static const char *const heads[] = {"LOAD",  "PID", "FILE",    "DONE",
					    "TOTAL", "",    "CHARGED", "BUDGET"};
	static const int aligns[] = {TOOL_LEFT,  TOOL_RIGHT, TOOL_FLEX,  TOOL_RIGHT,
				     TOOL_RIGHT, TOOL_RIGHT, TOOL_RIGHT, TOOL_RIGHT};
	struct tool_table table;

	tool_table_init(&table, sizeof(heads) / sizeof(heads[0]), heads, aligns);
	for (size_t i = 0; i < stat->load_count; i++)
		add_load(&table, &stat->loads[i]);
	return tool_table_print(&table, stdout);
}

int stat_print_text(const struct tnd_stat *stat)
{
	int status = TOOL_OK;

	if (stat->channel_count == 0 && stat->pool_count == 0 && stat->load_count == 0) {
		puts("no channels, pools or loads of this user");
		if (stat->denied)
			printf("(%zu processes may not be looked at)\n", stat->denied);
	}
	if (stat->channel_count)
		status = print_channels(stat);
	if (status == TOOL_OK && stat->pool_count) {
		if (stat->channel_count)
			putchar('\n');
		status = print_pools(stat);
	}
	if (status == TOOL_OK && stat->load_count) {
		if (stat->channel_count || stat->pool_count)
			putchar('\n');
		status = print_loads(stat);
	}
	return status;
}

/* -- JSON -- */

static json_t *json_reader(const struct tnd_stat_reader *reader, bool *failed)
{
	json_t *object = json_object();

	tool_json_set(object, "rank", json_integer(reader->rank), failed);
	tool_json_set(object, "pid", json_integer(reader->pid), failed);
	tool_json_set(object, "state", json_string(stat_state_name(reader->state)), failed);
	tool_json_set(object, "lag_objects", tool_json_u64(reader->lag_objects), failed);
	tool_json_set(object, "lag_bytes", tool_json_u64(reader->lag_bytes), failed);
	tool_json_set(object, "waits", tool_json_u64(reader->waits), failed);
	tool_json_set(object, "wakes", tool_json_u64(reader->wakes), failed);
	tool_json_set(object, "blocked_seconds", json_real((double)reader->blocked_ns / 1e9),
		      failed);
	return object;
}

static json_t *json_writer(const struct tnd_stat_channel *channel, bool *failed)
{
	json_t *object = json_object();

	tool_json_set(object, "alive", json_boolean(channel->writer_state != TND_READER_DEAD),
		      failed);
	tool_json_set(object, "waits", tool_json_u64(channel->writer_waits), failed);
	tool_json_set(object, "blocked_seconds",
		      json_real((double)channel->writer_blocked_ns / 1e9), failed);
	return object;
}

static json_t *json_channel(const struct tnd_stat_channel *channel, bool *failed)
{
	const struct {
		const char *key;
		uint64_t value;
	} figures[] = {
		{"max_bytes", channel->max_bytes},       {"max_objects", channel->max_objects},
		{"used_bytes", channel->used_bytes},     {"used_objects", channel->used_objects},
		{"high_bytes", channel->high_bytes},     {"high_objects", channel->high_objects},
		{"sent_objects", channel->sent_objects}, {"sent_bytes", channel->sent_bytes},
	};
	json_t *object = json_object(), *readers = json_array();

	tool_json_set(object, "name", tool_json_name(channel->name), failed);
	tool_json_set(object, "pid", json_integer(channel->pid), failed);
	for (size_t i = 0; i < sizeof(figures) / sizeof(figures[0]); i++)
		tool_json_set(object, figures[i].key, tool_json_u64(figures[i].value), failed);
	tool_json_set(object, "writer", json_writer(channel, failed), failed);
	for (uint32_t i = 0; i < channel->reader_count; i++)
		tool_json_append(readers, json_reader(&channel->readers[i], failed), failed);
	tool_json_set(object, "readers", readers, failed);
	return object;
}

static json_t *json_pool(const struct tnd_stat_pool *pool, bool *failed)
{
	json_t *object = json_object(), *leases = json_array();

	tool_json_set(object, "name", tool_json_name(pool->name), failed);
	tool_json_set(object, "pid", json_integer(pool->pid), failed);
	tool_json_set(object, "slab_bytes", tool_json_u64(pool->slab_bytes), failed);
	tool_json_set(object, "slabs", tool_json_u64(pool->slabs), failed);
	tool_json_set(object, "live", tool_json_u64(pool->live), failed);
	for (uint32_t i = 0; i < pool->lease_count; i++) {
		json_t *lease = json_object();

		tool_json_set(lease, "rank", json_integer(pool->leases[i].rank), failed);
		tool_json_set(lease, "count", json_integer(pool->leases[i].count), failed);
		tool_json_append(leases, lease, failed);
	}
	tool_json_set(object, "leases", leases, failed);
	return object;
}

static json_t *json_load(const struct tnd_stat_load *load, bool *failed)
{
	json_t *object = json_object();
	bool ranked = load->rank != TND_STAT_NO_RANK;

	tool_json_set(object, "pid", json_integer(load->pid), failed);
	tool_json_set(object, "rank", ranked ? json_integer(load->rank) : json_null(), failed);
	tool_json_set(object, "role", json_string(stat_role_name(load->role)), failed);
	tool_json_set(object, "state", json_string(stat_state_name(load->state)), failed);
	tool_json_set(object, "file", tool_json_name(load->file), failed);
	tool_json_set(object, "done_bytes", tool_json_u64(load->done_bytes), failed);
	tool_json_set(object, "total_bytes", tool_json_u64(load->total_bytes), failed);
	tool_json_set(object, "charged_bytes", tool_json_u64(load->charged_bytes), failed);
	tool_json_set(object, "budget_bytes", tool_json_u64(load->budget_bytes), failed);
	tool_json_set(object, "storage_bytes", tool_json_u64(load->storage_bytes), failed);
	return object;
}

int stat_print_json(const struct tnd_stat *stat, bool line)
{
	json_t *document = tool_json_document("tundish.stat/1");
	json_t *channels = json_array(), *pools = json_array(), *loads = json_array();
	bool failed = false;
	int status = TOOL_OK;

	for (size_t i = 0; i < stat->channel_count; i++)
		tool_json_append(channels, json_channel(&stat->channels[i], &failed), &failed);
	for (size_t i = 0; i < stat->pool_count; i++)
		tool_json_append(pools, json_pool(&stat->pools[i], &failed), &failed);
	for (size_t i = 0; i < stat->load_count; i++)
		tool_json_append(loads, json_load(&stat->loads[i], &failed), &failed);
	tool_json_set(document, "channels", channels, &failed);
	tool_json_set(document, "pools", pools, &failed);
	tool_json_set(document, "loads", loads, &failed);
	if (!line)
		return tool_json_print(document, failed);
	if (!document || failed ||
	    (json_dumpf(document, stdout, JSON_COMPACT) != 0 && !ferror(stdout)))
		status = tool_fail(-ENOMEM, NULL);
	else
		putchar('\n');
	json_decref(document);
	return status;
}
