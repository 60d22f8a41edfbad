/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stat_prometheus.c - channels, pools and loads in the text format of Prometheus, for a collector
 * that reads files or the output of programs
 *
 * Names are tundish_<object>_<what>_<unit>; what only grows ends in _total. Labels say which:
 * name, pid, and for readers rank; of loads pid, rank and role. Two samples with the same labels
 * would make the whole page invalid, and one process may have two channels of one name, so later
 * ones get a label `n`.
 */
#include "stat_output.h"

#include <string.h>

/* -- labels -- */

/* The format's own escapes: backslash, quote, newline. */
static void put_label(const char *key, const char *text)
{
	printf("%s=\"", key);
	for (; *text; text++) {
		if (*text == '\n')
			fputs("\\n", stdout);
		else if (*text == '\\' || *text == '"')
			printf("\\%c", *text);
		else
			putchar(*text);
	}
	putchar('"');
}

static void put_labels(const char *name, int32_t pid, size_t n)
{
	put_label("{name", name);
	printf(",pid=\"%d\"", (int)pid);
	if (n > 0)
		printf(",n=\"%zu\"", n + 1);
}

static void put_head(const char *name, const char *type, const char *help)
{
	printf("# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

/* Channels before this one with its name and pid; they are sorted by both. */
static size_t twins_of_channel(const struct tnd_stat *stat, size_t i)
{
	size_t count = 0;

	while (count < i && stat->channels[i - count - 1].pid == stat->channels[i].pid &&
	       strcmp(stat->channels[i - count - 1].name, stat->channels[i].name) == 0)
		count++;
	return count;
}

static size_t twins_of_pool(const struct tnd_stat *stat, size_t i)
{
	size_t count = 0;

	while (count < i && stat->pools[i - count - 1].pid == stat->pools[i].pid &&
	       strcmp(stat->pools[i - count - 1].name, stat->pools[i].name) == 0)
		count++;
	return count;
}

static size_t twins_of_load(const struct tnd_stat *stat, size_t i)
{
	const struct tnd_stat_load *load = &stat->loads[i];
	size_t count = 0;

	for (; count < i; count++) {
		const struct tnd_stat_load *before = &stat->loads[i - count - 1];

		if (before->pid != load->pid || before->rank != load->rank ||
		    before->role != load->role)
			break;
	}
	return count;
}

/* A rank that came again may have had another place before: the last one counts. */
static bool is_last_of_rank(const struct tnd_stat_channel *channel, uint32_t i)
{
	return i + 1 == channel->reader_count ||
	       channel->readers[i + 1].rank != channel->readers[i].rank;
}

/* -- metrics: an offset into the struct, or a time in ns -- */

struct metric {
	const char *name, *type, *help;
	size_t offset; /* of a uint64_t */
	bool is_ns;    /* shown in seconds */
};

#define CHANNEL(field) offsetof(struct tnd_stat_channel, field)
#define READER(field) offsetof(struct tnd_stat_reader, field)
#define POOL(field) offsetof(struct tnd_stat_pool, field)
#define LOAD(field) offsetof(struct tnd_stat_load, field)

static const struct metric channel_metrics[] = {
	{"tundish_channel_max_bytes", "gauge", "Limit in bytes.", CHANNEL(max_bytes), false},
	{"tundish_channel_max_objects", "gauge", "Limit in objects.", CHANNEL(max_objects), false},
	{"tundish_channel_used_bytes", "gauge", "Bytes that some reader has not released.",
	 CHANNEL(used_bytes), false},
	{"tundish_channel_used_objects", "gauge", "Objects that some reader has not released.",
	 CHANNEL(used_objects), false},
	{"tundish_channel_high_bytes", "gauge", "Most bytes used at once.", CHANNEL(high_bytes),
	 false},
	{"tundish_channel_high_objects", "gauge", "Most objects used at once.",
	 CHANNEL(high_objects), false},
	{"tundish_channel_memory_bytes", "gauge", "Shared memory taken.", CHANNEL(memory_bytes),
	 false},
	{"tundish_channel_sent_objects_total", "counter", "Objects sent.", CHANNEL(sent_objects),
	 false},
	{"tundish_channel_sent_bytes_total", "counter", "Bytes sent.", CHANNEL(sent_bytes), false},
	{"tundish_channel_writer_waits_total", "counter", "Times that the writer slept.",
	 CHANNEL(writer_waits), false},
	{"tundish_channel_writer_wakes_total", "counter", "Times that the writer woke readers.",
	 CHANNEL(writer_wakes), false},
	{"tundish_channel_writer_blocked_seconds_total", "counter",
	 "Time that the writer waited for space.", CHANNEL(writer_blocked_ns), true},
};

static const struct metric reader_metrics[] = {
	{"tundish_channel_reader_lag_objects", "gauge", "Objects sent and not yet released.",
	 READER(lag_objects), false},
	{"tundish_channel_reader_lag_bytes", "gauge", "Bytes sent and not yet released.",
	 READER(lag_bytes), false},
	{"tundish_channel_reader_waits_total", "counter", "Times that the reader slept.",
	 READER(waits), false},
	{"tundish_channel_reader_wakes_total", "counter", "Times that the reader woke the writer.",
	 READER(wakes), false},
	{"tundish_channel_reader_blocked_seconds_total", "counter",
	 "Time that the reader waited for objects.", READER(blocked_ns), true},
};

static const struct metric pool_metrics[] = {
	{"tundish_pool_slab_bytes", "gauge", "Shared memory in slabs.", POOL(slab_bytes), false},
	{"tundish_pool_slabs", "gauge", "Slabs.", POOL(slabs), false},
	{"tundish_pool_live_slabs", "gauge", "Slabs that are held.", POOL(live), false},
};

static const struct metric load_metrics[] = {
	{"tundish_load_done_bytes", "gauge", "Bytes handed out, or announced by a node's reader.",
	 LOAD(done_bytes), false},
	{"tundish_load_total_bytes", "gauge", "Bytes that it will hand out.", LOAD(total_bytes),
	 false},
	{"tundish_load_charged_bytes", "gauge", "Bytes charged to its budget.", LOAD(charged_bytes),
	 false},
	{"tundish_load_budget_bytes", "gauge", "Budget.", LOAD(budget_bytes), false},
	{"tundish_load_storage_bytes", "gauge", "Bytes asked of storage.", LOAD(storage_bytes),
	 false},
};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static void put_value(const struct metric *metric, const void *record)
{
	uint64_t value;

	memcpy(&value, (const char *)record + metric->offset, sizeof(value));
	if (metric->is_ns)
		printf("} %.9g\n", (double)value / 1e9);
	else
		printf("} %llu\n", (unsigned long long)value);
}

/* -- tables of samples -- */

static void print_channel_metric(const struct tnd_stat *stat, const struct metric *metric)
{
	put_head(metric->name, metric->type, metric->help);
	for (size_t i = 0; i < stat->channel_count; i++) {
		const struct tnd_stat_channel *channel = &stat->channels[i];

		fputs(metric->name, stdout);
		put_labels(channel->name, channel->pid, twins_of_channel(stat, i));
		put_value(metric, channel);
	}
}

static void put_reader(const char *name, const struct tnd_stat *stat, size_t i, uint32_t reader)
{
	const struct tnd_stat_channel *channel = &stat->channels[i];

	fputs(name, stdout);
	put_labels(channel->name, channel->pid, twins_of_channel(stat, i));
	printf(",rank=\"%u\"", channel->readers[reader].rank);
}

static void print_reader_metric(const struct tnd_stat *stat, const struct metric *metric)
{
	put_head(metric->name, metric->type, metric->help);
	for (size_t i = 0; i < stat->channel_count; i++) {
		for (uint32_t r = 0; r < stat->channels[i].reader_count; r++) {
			if (!is_last_of_rank(&stat->channels[i], r))
				continue;
			put_reader(metric->name, stat, i, r);
			put_value(metric, &stat->channels[i].readers[r]);
		}
	}
}

/* States as labels of samples that are 1: what can be counted and alerted on. */
static void print_states(const struct tnd_stat *stat)
{
	static const char writers[] = "tundish_channel_writer_state";
	static const char readers[] = "tundish_channel_reader_state";

	put_head(writers, "gauge", "1 for the state that the writer is in.");
	for (size_t i = 0; i < stat->channel_count; i++) {
		const struct tnd_stat_channel *channel = &stat->channels[i];

		fputs(writers, stdout);
		put_labels(channel->name, channel->pid, twins_of_channel(stat, i));
		printf(",state=\"%s\"} 1\n",
		       channel->closed ? "closed" : stat_state_name(channel->writer_state));
	}
	put_head(readers, "gauge", "1 for the state that the reader is in.");
	for (size_t i = 0; i < stat->channel_count; i++) {
		for (uint32_t r = 0; r < stat->channels[i].reader_count; r++) {
			const struct tnd_stat_reader *reader = &stat->channels[i].readers[r];

			if (!is_last_of_rank(&stat->channels[i], r))
				continue;
			put_reader(readers, stat, i, r);
			printf(",state=\"%s\"} 1\n", stat_state_name(reader->state));
		}
	}
}

static void print_pools(const struct tnd_stat *stat)
{
	static const char leases[] = "tundish_pool_leases";

	for (size_t m = 0; m < COUNT(pool_metrics); m++) {
		put_head(pool_metrics[m].name, pool_metrics[m].type, pool_metrics[m].help);
		for (size_t i = 0; i < stat->pool_count; i++) {
			fputs(pool_metrics[m].name, stdout);
			put_labels(stat->pools[i].name, stat->pools[i].pid, twins_of_pool(stat, i));
			put_value(&pool_metrics[m], &stat->pools[i]);
		}
	}
	put_head(leases, "gauge", "Objects by slab that a rank holds.");
	for (size_t i = 0; i < stat->pool_count; i++) {
		const struct tnd_stat_pool *pool = &stat->pools[i];

		for (uint32_t l = 0; l < pool->lease_count; l++) {
			fputs(leases, stdout);
			put_labels(pool->name, pool->pid, twins_of_pool(stat, i));
			printf(",rank=\"%u\"} %u\n", pool->leases[l].rank, pool->leases[l].count);
		}
	}
}

/* A node's reader has no rank. */
static void print_load_metric(const struct tnd_stat *stat, const struct metric *metric)
{
	put_head(metric->name, metric->type, metric->help);
	for (size_t i = 0; i < stat->load_count; i++) {
		const struct tnd_stat_load *load = &stat->loads[i];
		size_t n = twins_of_load(stat, i);

		printf("%s{pid=\"%d\",role=\"%s\"", metric->name, (int)load->pid,
		       stat_role_name(load->role));
		if (load->rank != TND_STAT_NO_RANK)
			printf(",rank=\"%u\"", load->rank);
		if (n > 0)
			printf(",n=\"%zu\"", n + 1);
		put_value(metric, load);
	}
}

int stat_print_prometheus(const struct tnd_stat *stat)
{
	for (size_t m = 0; m < COUNT(channel_metrics); m++)
		print_channel_metric(stat, &channel_metrics[m]);
	for (size_t m = 0; m < COUNT(reader_metrics); m++)
		print_reader_metric(stat, &reader_metrics[m]);
	print_states(stat);
	print_pools(stat);
	for (size_t m = 0; m < COUNT(load_metrics); m++)
		print_load_metric(stat, &load_metrics[m]);
	return TOOL_OK;
}
