/* SPDX-License-Identifier: Apache-2.0 */
/* fail.c - the first error ends the load: storage, waits, and what a node's reader tells its members */
#include <stdarg.h>
#include <stdio.h>

#include "channel/bulk.h"
#include "outlet.h"

int32_t tnd__load_own_rank(const struct tnd_load *load)
{
	return load->outlet ? -1 : (int32_t)load->rank;
}

void tnd__load_fail_detail(struct tnd_load *load, const struct tnd_error *error)
{
	struct tnd__flow *flow = load->flow;
	bool first;

	pthread_mutex_lock(&flow->lock);
	first = !load->failed;
	if (first) {
		load->failed = true;
		load->error = *error;
	}
	pthread_cond_broadcast(&flow->consumer);
	pthread_mutex_unlock(&flow->lock);
	if (!first)
		return;
	atomic_store_explicit(&load->stopping, true, memory_order_relaxed);
	if (load->outlet)
		tnd__bulk_tell(load->outlet->channel, &load->error);
	if (load->storage)
		tnd__storage_cancel(load->storage);
	tnd_budget_wake(load->budget);
}

int tnd__load_error(struct tnd_load *load, struct tnd_error *reterr)
{
	int code = 0;

	pthread_mutex_lock(&load->flow->lock);
	if (load->failed) {
		code = load->error.code;
		if (reterr)
			*reterr = load->error;
	}
	pthread_mutex_unlock(&load->flow->lock);
	return code;
}

static void fail(struct tnd_load *load, const struct tnd_error *about,
		 const struct tnd__where *where, const char *format, va_list args)
{
	char sentence[TND_ERROR_MESSAGE_MAX];
	struct tnd_error error;

	vsnprintf(sentence, sizeof(sentence), format, args);
	tnd__fail(&error, about->code, where, "%s", sentence);
	error.rank = about->rank;
	tnd__load_fail_detail(load, &error);
}

void tnd__load_fail(struct tnd_load *load, int code, const struct tnd__where *where,
		    const char *format, ...)
{
	struct tnd_error about = {.code = code, .rank = tnd__load_own_rank(load)};
	va_list args;

	va_start(args, format);
	fail(load, &about, where, format, args);
	va_end(args);
}

void tnd__load_fail_rank(struct tnd_load *load, int code, int32_t rank, const char *format, ...)
{
	struct tnd_error about = {.code = code, .rank = rank};
	va_list args;

	va_start(args, format);
	fail(load, &about, NULL, format, args);
	va_end(args);
}
