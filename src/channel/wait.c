/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wait.c - how a call begins, waits and wakes: both sides
 *
 *   look --> there: done, nothing was asked of the kernel
 *     |
 *   spin     as long as the last waits make it pay
 *     |
 *   sleep    sample (S1, V1), announce (S2, V2), look again (S3, V3), futex (S4, V4), retract (S5,
 *            V5)
 *
 * Memory order. The pairs, each load beside its store:
 *
 *   W3 published  (seq_cst store, send.c)      R1, S3 (seq_cst load)   contents of the object
 *   R3 cursor     (seq_cst store, receive.c)   W1, V3 (seq_cst load)   the space is free
 *   S2 sleepers   (seq_cst RMW)                W4 (seq_cst load)     with W3/S3: store buffering
 *   V2 writer_waiting (seq_cst store)          R4 (seq_cst load)     with R3/V3: store buffering
 *   W6 data_word, R5 space_word (RMW)          S1, V1 (sample before the announcement)
 *
 * A wake is not lost: either W4 sees the bit of S2, or S3 sees what W3 published; and a word that
 * was bumped after the sample makes the futex call return.
 *
 * A reader cannot change `data_word` (it cannot write there), so what its own process has to tell
 * it (cancel, the writer's death) goes through `local_word`, and it sleeps on both.
 */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>

#include "bulk.h"
#include "channel_internal.h"

/*
 * Longest sleep between looks. A wake is never lost among processes that work; one that writes
 * nonsense into `sleepers` or the words may delay others, and this bounds by how much.
 */
#define SLEEP_NS INT64_C(1000000000)
#define BACK_PAUSES 16   /* about 0.3 us */
#define STREAM_BROUGHT 3 /* objects that standing back brings in a stream, at least */
#define TRY_EACH 64      /* waits: a try costs one of them BACK_PAUSES */
#define PAUSES 16        /* between looks at the clock: about 0.3 us */

int tnd__channel_enter(struct tnd_channel *channel, bool as_writer, struct tnd_error *reterr)
{
	if (tnd__channel_forked(channel))
		return tnd__fail_plain(reterr, TND_E_FORKED,
				       "channel '%s': this process was forked from the one that "
				       "opened the handle: attach here instead",
				       channel->shared.name);
	if (channel->is_writer != as_writer)
		return tnd__fail_plain(reterr, TND_E_INVALID,
				       "channel '%s': this handle is a %s, the call is for a %s",
				       channel->shared.name, as_writer ? "reader" : "writer",
				       as_writer ? "writer" : "reader");
	for (;;) {
		uint32_t found = TND__BUSY_FREE;

		if (atomic_compare_exchange_weak_explicit(&channel->busy, &found, TND__BUSY_CALL,
							  memory_order_acquire,
							  memory_order_relaxed))
			return 0;
		if (found == TND__BUSY_CALL)
			return tnd__fail_plain(reterr, -EBUSY,
					       "channel '%s': another thread is in a %s call on "
					       "this handle: one at a time",
					       channel->shared.name,
					       as_writer ? "send" : "receive");
		tnd__spin_pause(NULL, 0);
	}
}

void tnd__channel_leave(struct tnd_channel *channel)
{
	atomic_store_explicit(&channel->busy, TND__BUSY_FREE, memory_order_release);
}

/* -- waking -- */

void tnd__wake_readers(struct tnd_channel *channel, bool always)
{
	struct tnd__segments *shared = &channel->shared;

	(void)tnd__failpoint("channel.W4");
	/* W4: after W3 in the order of all seq_cst operations; pairs with S2. */
	if (!always && !atomic_load_explicit(&shared->control->sleepers, memory_order_seq_cst))
		return;
	(void)tnd__failpoint("channel.W5");
	/* W5: who sleeps now is woken below; who comes later sets its bit again. */
	atomic_exchange_explicit(&shared->control->sleepers, 0, memory_order_seq_cst);
	(void)tnd__failpoint("channel.W6");
	/* W6: pairs with S1. */
	atomic_fetch_add_explicit(&shared->header->data_word, 1, memory_order_seq_cst);
	(void)tnd__failpoint("channel.W7");
	tnd__futex_wake(&shared->header->data_word, INT_MAX);
	atomic_fetch_add_explicit(&shared->control->wakes, 1, memory_order_relaxed);
}

void tnd__poke_writer(struct tnd_channel *channel)
{
	struct tnd__control *control = channel->shared.control;

	/* R5: pairs with V1. */
	atomic_fetch_add_explicit(&control->space_word, 1, memory_order_seq_cst);
	(void)tnd__failpoint("channel.R6");
	tnd__futex_wake(&control->space_word, INT_MAX);
}

void tnd__wake_writer(struct tnd_channel *channel)
{
	struct tnd__control *control = channel->shared.control;
	uint32_t episode;

	(void)tnd__failpoint("channel.R4");
	/* R4: after R3 in the order of all seq_cst operations; pairs with V2. */
	episode = atomic_load_explicit(&control->writer_waiting, memory_order_seq_cst);
	if (!episode)
		return;
	(void)tnd__failpoint("channel.R5");
	tnd__poke_writer(channel);
	(void)tnd__failpoint("channel.R7");
	/* R7: others need not wake it again; a later episode is none of ours. */
	atomic_compare_exchange_strong_explicit(&control->writer_waiting, &episode, 0,
						memory_order_seq_cst, memory_order_relaxed);
}

/* -- waiting -- */

/* Words as they were before the second look: by role. */
struct samples {
	uint32_t shared, local;
};

/*
 * The sample comes before the announcement: who takes the announcement away (W5, R7) has bumped, or
 * bumps later, a word that was sampled before, so that the sleep ends at once. The other way round
 * a bump between the two is slept through, with nothing announced.
 */
static void announce(struct tnd_channel *channel, struct samples *samples)
{
	struct tnd__control *control = channel->shared.control;

	/* S1: pairs with P2 and cancel. */
	(void)tnd__failpoint(channel->is_writer ? "channel.V1" : "channel.S1");
	samples->local = atomic_load_explicit(&channel->local_word, memory_order_seq_cst);
	if (channel->is_writer) {
		/* V1: pairs with R5. */
		samples->shared = atomic_load_explicit(&control->space_word, memory_order_seq_cst);
		(void)tnd__failpoint("channel.V2");
		if (++channel->writer.episode == 0)
			channel->writer.episode = 1;
		/* V2: pairs with R4. */
		atomic_store_explicit(&control->writer_waiting, channel->writer.episode,
				      memory_order_seq_cst);
	} else {
		/* S1: pairs with W6. */
		samples->shared = atomic_load_explicit(&channel->shared.header->data_word,
						       memory_order_seq_cst);
		(void)tnd__failpoint("channel.S2");
		/* S2: pairs with W4. */
		atomic_fetch_or_explicit(&control->sleepers, UINT64_C(1) << channel->reader.place,
					 memory_order_seq_cst);
	}
}

static void sleep_once(struct tnd_channel *channel, const struct samples *samples, int64_t until)
{
	if (channel->is_writer) {
		(void)tnd__failpoint("channel.V4");
		tnd__futex_wait(&channel->shared.control->space_word, samples->shared, until);
	} else {
		(void)tnd__failpoint("channel.S4");
		tnd__futex_wait_either(&channel->shared.header->data_word, samples->shared,
				       &channel->local_word, samples->local, until);
	}
}

/*
 * V5, S5: relaxed; what is seen late costs a needless wake. Whoever woke us has mostly done it (W5,
 * R7): then the line stays where it is.
 */
static void retract(struct tnd_channel *channel)
{
	struct tnd__control *control = channel->shared.control;

	if (channel->is_writer) {
		(void)tnd__failpoint("channel.V5");
		if (atomic_load_explicit(&control->writer_waiting, memory_order_relaxed))
			atomic_store_explicit(&control->writer_waiting, 0, memory_order_relaxed);
	} else {
		uint64_t bit = UINT64_C(1) << channel->reader.place;

		(void)tnd__failpoint("channel.S5");
		if (atomic_load_explicit(&control->sleepers, memory_order_relaxed) & bit)
			atomic_fetch_and_explicit(&control->sleepers, ~bit, memory_order_relaxed);
	}
}

static void say_late_writer(struct tnd_channel *channel, char *out, size_t out_bytes)
{
	struct tnd__reader *reader = &channel->reader;
	uint64_t cursor = atomic_load_explicit(&reader->cursor, memory_order_relaxed);
	/* < 0 where our /proc does not show the writer. */
	int state = reader->peer ? tnd__process_state(tnd__peer_pid(reader->peer), NULL) : 0;

	if (reader->next - cursor >= channel->shared.max_objects)
		snprintf(out, out_bytes,
			 "this reader borrows all %" PRIu64
			 " objects that there can be: release one",
			 channel->shared.max_objects);
	else
		snprintf(out, out_bytes, "the writer (pid %" PRIu32 ") has not sent%s",
			 channel->shared.writer_pid,
			 state == 'T' ? ", its process is stopped" : ", it is alive");
}

/* Who is late, by role. */
static void say_late(struct tnd_channel *channel, char *out, size_t out_bytes)
{
	if (channel->is_writer)
		tnd__places_late(channel, out, out_bytes);
	else
		say_late_writer(channel, out, out_bytes);
}

static void warn(const struct tnd__wait *wait, int64_t waited_ns)
{
	char late[512];

	say_late(wait->channel, late, sizeof(late));
	tnd__log(TND_LOG_WARNING, "channel '%s': %s has waited %.1f s for %s: %s",
		 wait->channel->shared.name, wait->channel->is_writer ? "the writer" : "a reader",
		 (double)waited_ns / 1e9, wait->what, late);
}

static int timed_out(const struct tnd__wait *wait, struct tnd_error *reterr)
{
	char late[512] = "";

	if (!reterr) /* the sentence costs system calls */
		return -ETIMEDOUT;
	say_late(wait->channel, late, sizeof(late));
	return tnd__fail_plain(reterr, -ETIMEDOUT,
			       "channel '%s': the deadline passed while waiting for %s: %s",
			       wait->channel->shared.name, wait->what, late);
}

static int look_or_cancel(struct tnd__wait *wait, struct tnd_error *reterr)
{
	int rc;

	if (tnd__is_told(wait->channel))
		return tnd__bulk_told(wait->channel, reterr);
	rc = wait->look(wait, reterr);
	if (rc == 0 && atomic_load_explicit(&wait->channel->cancelled, memory_order_seq_cst))
		return tnd__fail_plain(reterr, -ECANCELED,
				       "channel '%s': cancelled while waiting for %s",
				       wait->channel->shared.name, wait->what);
	return rc;
}

/* The counters that stat reads: of the writer, or of the reader's place. */
struct counters {
	_Atomic uint64_t *waits, *wakes, *blocked_ns;
	_Atomic int64_t *since;
};

static struct counters counters_of(struct tnd_channel *channel)
{
	struct tnd__control *control = channel->shared.control;
	struct tnd__cursor *cursor = &control->places[channel->reader.place];

	if (channel->is_writer)
		return (struct counters){&control->waits, NULL, &control->blocked_ns,
					 &control->blocked_since_ns};
	return (struct counters){&cursor->waits, &cursor->wakes, &cursor->blocked_ns,
				 &cursor->blocked_since_ns};
}

static int64_t earlier(int64_t a, int64_t b)
{
	return a < b ? a : b;
}

/* `ns` < 0: never. */
static int64_t after(int64_t now, int64_t ns)
{
	return ns < 0 || ns > INT64_MAX - now ? INT64_MAX : now + ns;
}

/* Sleeps until `look` gives something or `deadline_ns`. Return: as `look`; -ETIMEDOUT. */
static int sleep_until(struct tnd__wait *wait, int64_t started, int64_t deadline_ns,
		       struct tnd_error *reterr)
{
	struct tnd_channel *channel = wait->channel;
	int64_t warn_at = after(started, channel->warn_ns);
	struct samples samples;
	int rc;

	for (;;) {
		int64_t now, until;

		announce(channel, &samples);
		(void)tnd__failpoint(channel->is_writer ? "channel.V3" : "channel.S3");
		rc = look_or_cancel(wait, reterr);
		if (rc == 0) {
			until = earlier(earlier(deadline_ns, warn_at),
					after(tnd__now_ns(), SLEEP_NS));
			sleep_once(channel, &samples, until);
			/* Before anything else: what was waited for is mostly there. */
			rc = look_or_cancel(wait, reterr);
		}
		retract(channel);
		if (rc != 0)
			return rc;
		now = tnd__now_ns();
		if (now >= deadline_ns)
			return timed_out(wait, reterr);
		if (now >= warn_at) {
			warn(wait, now - started);
			warn_at = after(now, channel->warn_ns);
		}
	}
}

static void count_sleep(struct tnd_channel *channel, int64_t started, int64_t now)
{
	struct counters counters = counters_of(channel);
	uint64_t ns = (uint64_t)(now - started);

	atomic_store_explicit(counters.since, 0, memory_order_relaxed);
	atomic_fetch_add_explicit(counters.blocked_ns, ns, memory_order_relaxed);
	if (counters.wakes)
		atomic_fetch_add_explicit(counters.wakes, 1, memory_order_relaxed);
	atomic_fetch_add_explicit(&channel->blocked_ns, ns, memory_order_relaxed);
}

/*
 * What the last wait brought: objects to read, or free ones to write. A stream in which each brings
 * one moves a cache line from core to core for every object.
 */
static uint64_t brought(const struct tnd_channel *channel)
{
	const struct tnd__writer *writer = &channel->writer;

	if (channel->is_writer)
		return channel->shared.max_objects - (writer->published - writer->freed);
	return channel->reader.known - channel->reader.next;
}

/*
 * In a stream: lets the other side go ahead for a moment, so that the line is fetched once for many
 * objects. Whether it is one, a try now and then tells: where answers go back and forth it brings
 * one, late by that moment. Return: whether it did.
 */
static bool stand_back(struct tnd__spin *spin)
{
	if (!spin->streams && ++spin->waits % TRY_EACH)
		return false;
	for (int i = 0; i < BACK_PAUSES; i++)
		tnd__spin_pause(NULL, 0);
	return true;
}

/*
 * Looks again and again as long as that pays. *now: the last reading of the clock, which is not
 * read once more after the look that succeeded: that would delay what was waited for. Return: as
 * `look`.
 */
static int spin_until(struct tnd__wait *wait, int64_t started, int64_t deadline_ns, int64_t *now,
		      struct tnd_error *reterr)
{
	struct tnd_channel *channel = wait->channel;
	int64_t until = earlier(started + tnd__spin_budget(&channel->spin), deadline_ns);
	/* A writer polls several cursors. */
	const _Atomic uint64_t *word =
		channel->is_writer ? NULL : &channel->shared.header->published;
	bool back = *now < until && stand_back(&channel->spin);
	int rc = 0;

	while (*now < until) {
		for (int i = 0; i < PAUSES && rc == 0; i++) {
			tnd__spin_pause(word, channel->reader.known);
			rc = look_or_cancel(wait, reterr);
		}
		if (rc != 0)
			break;
		*now = tnd__now_ns();
		if (*now - started > TND__SPIN_ALONE_NS)
			sched_yield();
	}
	if (back)
		channel->spin.streams = rc > 0 && brought(channel) >= STREAM_BROUGHT;
	return rc;
}

int tnd__channel_wait(struct tnd__wait *wait, int64_t deadline_ns, struct tnd_error *reterr)
{
	struct tnd_channel *channel = wait->channel;
	struct counters counters;
	int64_t started, now;
	int rc = look_or_cancel(wait, reterr);

	if (rc != 0)
		return rc < 0 ? rc : 0;
	if (deadline_ns <= 0)
		return timed_out(wait, reterr);
	started = now = tnd__now_ns();
	rc = spin_until(wait, started, deadline_ns, &now, reterr);
	if (rc == 0) {
		counters = counters_of(channel);
		atomic_fetch_add_explicit(counters.waits, 1, memory_order_relaxed);
		atomic_fetch_add_explicit(&channel->waits, 1, memory_order_relaxed);
		atomic_store_explicit(counters.since, started, memory_order_relaxed);
		rc = sleep_until(wait, started, deadline_ns, reterr);
		now = tnd__now_ns();
		count_sleep(channel, started, now);
	}
	tnd__spin_learn(&channel->spin, now - started);
	return rc < 0 ? rc : 0;
}

/* Atomics and one system call each: allowed in a signal handler. */
void tnd_channel_cancel(struct tnd_channel *channel)
{
	if (!channel || tnd__channel_forked(channel))
		return;
	/* As P1 to P3; pairs with look_or_cancel(). */
	atomic_store_explicit(&channel->cancelled, 1, memory_order_seq_cst);
	if (channel->is_writer) {
		tnd__poke_writer(channel);
	} else {
		atomic_fetch_add_explicit(&channel->local_word, 1, memory_order_seq_cst);
		tnd__futex_wake_local(&channel->local_word, INT_MAX);
	}
}

void tnd_channel_rearm(struct tnd_channel *channel)
{
	if (channel && !tnd__channel_forked(channel))
		atomic_store_explicit(&channel->cancelled, 0, memory_order_seq_cst);
}
