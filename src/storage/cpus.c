/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include <tundish/slab.h>

#include "storage/engine.h"

#define THREADS_MOST 8
#define THREADS_LEAST 2

static void *ask_widest(void *arg)
{
	unsigned char *bits = arg;

	/*
	 * The kernel cuts a full mask down to the cpuset. In a thread of its own the caller's
	 * pinning stays as it is.
	 */
	memset(bits, 0xff, TND__CPU_BITS / 8);
	sched_setaffinity(0, TND__CPU_BITS / 8, (const cpu_set_t *)(const void *)bits);
	memset(bits, 0, TND__CPU_BITS / 8);
	if (sched_getaffinity(0, TND__CPU_BITS / 8, (cpu_set_t *)(void *)bits) < 0)
		bits[0] = 1;
	return NULL;
}

static int count_bits(const unsigned char *bits)
{
	int count = 0;

	for (size_t i = 0; i < TND__CPU_BITS / 8; i++)
		count += __builtin_popcount(bits[i]);
	return count;
}

int tnd__cpus_allowed(unsigned char *bits)
{
	pthread_t thread;

	memset(bits, 0, TND__CPU_BITS / 8);
	if (tnd__thread_start(ask_widest, bits, &thread) == 0)
		pthread_join(thread, NULL);
	else if (sched_getaffinity(0, TND__CPU_BITS / 8, (cpu_set_t *)(void *)bits) < 0)
		bits[0] = 1;
	return count_bits(bits);
}

void tnd__cpus_text(const unsigned char *bits, char *out, size_t out_bytes)
{
	size_t used = 0;

	if (out_bytes)
		out[0] = '\0';
	for (int i = 0; i < TND__CPU_BITS && used < out_bytes; i++) {
		int last = i;

		if (!(bits[i / 8] >> (i % 8) & 1))
			continue;
		while (last + 1 < TND__CPU_BITS && bits[(last + 1) / 8] >> ((last + 1) % 8) & 1)
			last++;
		used += (size_t)snprintf(out + used, out_bytes - used, "%s%d", used ? "," : "", i);
		if (last > i && used < out_bytes)
			used += (size_t)snprintf(out + used, out_bytes - used, "-%d", last);
		i = last;
	}
}

static int intersect(unsigned char *bits, const char *list)
{
	unsigned char wanted[TND__CPU_BITS / 8];

	if (tnd__list_parse(list, wanted, TND__CPU_BITS) < 0)
		return TND_E_INVALID;
	for (size_t i = 0; i < sizeof(wanted); i++)
		wanted[i] &= bits[i];
	if (count_bits(wanted) == 0)
		return TND_E_INVALID;
	memcpy(bits, wanted, sizeof(wanted));
	return count_bits(bits);
}

int tnd__cpus_choose(const char *list, int32_t numa, unsigned char *bits)
{
	char path[64], text[1024];
	int count = tnd__cpus_allowed(bits);

	if (list)
		return intersect(bits, list);
	if (numa >= 0) {
		/*
		 * A node without processors of ours (memory only, or outside the cpuset) leaves the
		 * choice as it is.
		 */
		snprintf(path, sizeof(path), "/sys/devices/system/node/node%d/cpulist", numa);
		if (tnd__read_small(path, text, sizeof(text)) > 0)
			intersect(bits, text);
		count = count_bits(bits);
	}
	return count;
}

int tnd__io_cpus(const char *list, char *out, size_t out_bytes)
{
	unsigned char bits[TND__CPU_BITS / 8];
	int count = tnd__cpus_choose(list, TND_NUMA_AUTO, bits);

	if (count > 0 && out)
		tnd__cpus_text(bits, out, out_bytes);
	return count;
}

uint32_t tnd__io_thread_default(void)
{
	unsigned char bits[TND__CPU_BITS / 8];
	uint32_t count = (uint32_t)tnd__cpus_allowed(bits), quota = tnd__cpu_quota("");

	if (quota)
		count = TND__MIN(count, quota);
	return TND__MIN(TND__MAX(count, THREADS_LEAST), THREADS_MOST);
}
