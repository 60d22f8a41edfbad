/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load_rank.c - one rank's process: it plans, loads, consumes, and tells its parent
 *
 *      plans --> gate: the clock --> host: opens the share ----> own load --> ends the share
 *                                    others: gate, attach -----> own load
 *
 * It owns nothing that outlives it: it dies with its parent (PR_SET_PDEATHSIG, and a check that the
 * parent did not die before that was set), SIGTERM cancels load and share, SIGINT is left to the
 * parent, which gets it too. It never prints and leaves with _exit, so that what the parent had
 * buffered is not written twice.
 */
#include "load_parts.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#define MOMENT_NS INT64_C(100000000)

static volatile sig_atomic_t cancelled;
static volatile sig_atomic_t attaching;       /* waits for a host: nothing is there to cancel */
static struct tnd_load *volatile cancel_load; /* what SIGTERM cancels */
static struct tnd_share *volatile cancel_share;

static void on_term(int number)
{
	struct tnd_load *load = cancel_load;
	struct tnd_share *share = cancel_share;

	(void)number;
	cancelled = 1;
	if (load)
		tnd_load_cancel(load);
	if (share)
		tnd_share_cancel(share);
	if (attaching) {
		load_say_cancelled();
		_exit(TOOL_FOUND);
	}
}

static int on_progress(void *arg, const struct tnd_progress *progress)
{
	load_say_progress(arg, progress);
	return cancelled;
}

/* -- before the load -- */

static bool is_host(const struct load_child *child)
{
	return child->node->hosting && child->rank->rank == child->node->host_rank;
}

static int make_plans(struct load_child *child, struct tnd_error *error)
{
	const struct load_command *command = child->command;
	const struct tool_plan_options *opts = &command->options;
	struct tnd_layout layout = opts->layout;
	int code;

	layout.rank = child->rank->rank;
	code = tnd_plan_create(child->node->checkpoint, &layout, &opts->plan, &child->plan, error);
	if (code == 0 && is_host(child))
		code = tnd_plan_create_union(child->node->checkpoint, &layout, command->members,
					     command->member_count, &opts->plan, &child->union_plan,
					     error);
	return code;
}

/* Waits for the parent's word. Return: 0; TND_E_CANCELLED when there will be none. */
static int pass_gate(struct load_child *child, struct tnd_error *error)
{
	int64_t start_ns;
	ssize_t got;

	do
		got = read(child->rank->gate_fd, &start_ns, sizeof(start_ns));
	while (got < 0 && errno == EINTR);
	if (got != (ssize_t)sizeof(start_ns)) {
		snprintf(error->message, sizeof(error->message), "%s",
			 tnd_strerror(TND_E_CANCELLED));
		return TND_E_CANCELLED;
	}
	child->start_ns = start_ns;
	return 0;
}

static int64_t seconds_ns(double seconds)
{
	return (int64_t)(seconds * 1e9);
}

static struct tnd_load_opts load_options(struct load_child *child)
{
	const struct load_command *command = child->command;
	struct tnd_load_opts opts = command->load;

	if (command->deadline > 0)
		opts.deadline_ns = child->start_ns + seconds_ns(command->deadline);
	return opts;
}

/*
 * A rank that has not come is given up, and named, a moment before the deadline that would end the
 * load of all who have.
 */
static int64_t meet_ns(const struct load_child *child)
{
	int64_t all = seconds_ns(child->command->deadline), left;

	if (!all)
		return 0;
	left = child->start_ns + all - tool_now_ns() -
	       (all / 10 < MOMENT_NS ? all / 10 : MOMENT_NS);
	return left > 1 ? left : 1;
}

static int open_share(struct load_child *child, struct tnd_error *error)
{
	const struct load_command *command = child->command;
	struct tnd_load_opts load = load_options(child);
	struct tnd_share_opts opts = {.struct_bytes = sizeof(opts),
				      .on_dead = command->on_dead,
				      .address = child->node->address,
				      .load = &load,
				      .meet_ns = meet_ns(child),
				      .evict_ns = seconds_ns(command->evict)};
	int code = tnd_share_open(child->union_plan, &opts, &child->share, error);

	if (code != 0)
		return code;
	cancel_share = child->share;
	/* A SIGTERM before this line found nothing to cancel. */
	if (cancelled)
		tnd_share_cancel(child->share);
	load_say("open");
	return 0;
}

/* -- the load -- */

static void blame_host(const struct load_child *child, struct tnd_error *error)
{
	char why[TND_ERROR_MESSAGE_MAX];

	snprintf(why, sizeof(why), "%s", error->message);
	error->rank = (int32_t)child->node->host_rank;
	snprintf(error->message, sizeof(error->message),
		 "expected rank %u, which reads for all, found that it has not come: %.900s",
		 child->node->host_rank, why);
}

static int open_load(struct load_child *child, struct tnd_error *error)
{
	const struct load_command *command = child->command;
	struct tnd_load_opts opts = load_options(child);
	struct tnd_load *load;
	int code;

	opts.progress = on_progress;
	opts.progress_arg = child;
	opts.share = child->node->address;
	if (command->guest)
		opts.flags |= TND_LOAD_F_GUEST;
	if (child->kept) {
		opts.flags |= TND_LOAD_F_OWN;
		opts.place = load_consume_place;
		opts.place_arg = child;
	}
	attaching = opts.share && !child->share;
	code = attaching && cancelled ? TND_E_CANCELLED : 0;
	if (code == 0)
		code = tnd_load_open(child->plan, &opts, &load, error);
	if (attaching && (code == TND_E_DEADLINE || code == -ETIMEDOUT))
		blame_host(child, error);
	attaching = 0;
	if (code != 0)
		return code;
	child->load = load;
	cancel_load = load;
	if (cancelled)
		tnd_load_cancel(load);
	return 0;
}

static int load_all(struct load_child *child, struct tnd_error *error)
{
	struct tnd_error end_error = {.rank = -1};
	int code = open_load(child, error), end_code;

	if (code != 0)
		return code;
	code = load_consume(child, error);
	end_code = tnd_load_end(child->load, &end_error);
	if (code == 0 && end_code != 0) {
		code = end_code;
		*error = end_error;
	}
	return code;
}

/*
 * Others still read from a share when the host's own load is through. Of a deadline or a death the
 * share knows best who is to blame, and ends by itself.
 */
static int end_share(struct load_child *child, int code, struct tnd_error *error)
{
	struct tnd_error end_error = {.rank = -1};
	int end_code;

	if (code != 0 && code != TND_E_DEADLINE && code != TND_E_PEER_DEAD)
		tnd_share_cancel(child->share);
	end_code = tnd_share_end(child->share, &end_error);
	if (end_code != 0 && (code == 0 || (code == end_code && end_error.rank >= 0))) {
		code = end_code;
		*error = end_error;
	}
	return code;
}

static int run(struct load_child *child, struct tnd_error *error)
{
	int code = make_plans(child, error);

	if (code == 0)
		code = load_consume_prepare(child, error);
	if (code == 0 && child->command->keep_touched) {
		load_say("ready");
		code = pass_gate(child, error);
	}
	if (code == 0 && is_host(child))
		code = open_share(child, error);
	else if (code == 0 && child->node->address && !child->command->group)
		code = pass_gate(child, error);
	if (code == 0)
		code = load_all(child, error);
	if (child->share)
		code = end_share(child, code, error);
	return load_consume_finish(child, code, error);
}

/* The signals of a child; they were blocked before the fork, so that none is lost in between. */
static void settle_signals(void)
{
	struct sigaction action = {.sa_handler = on_term, .sa_flags = SA_RESTART};
	sigset_t none;

	sigaction(SIGTERM, &action, NULL);
	signal(SIGINT, SIG_IGN);
	signal(SIGHUP, SIG_IGN);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
}

void load_rank_main(const struct load_node *node, const struct load_rank *rank, pid_t parent)
{
	struct load_child child = {
		.command = node->command, .node = node, .rank = rank, .start_ns = node->start_ns};
	struct tnd_error error = {.rank = -1};
	int code;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(TOOL_PEER);
	settle_signals();
	load_say_to(rank->fd);
	tnd_log_set(load_say_log, NULL, TND_LOG_WARNING);
	code = run(&child, &error);
	load_say_end(&child, code, &error);
	cancel_load = NULL;
	cancel_share = NULL;
	tnd_log_set(NULL, NULL, 0);
	tnd_load_close(child.load);
	tnd_share_close(child.share);
	tnd_plan_close(child.plan);
	tnd_plan_close(child.union_plan);
	_exit(code == 0 ? TOOL_OK : TOOL_FOUND);
}
