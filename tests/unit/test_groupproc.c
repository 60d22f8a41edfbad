/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_groupproc.c - what could break between processes: a death that somebody does not learn of,
 * or learns of late, or that some ranks return and others do not; a stopped rank 0 that keeps a
 * death from the others; processes or sockets that are left over. Ranks are processes, forked or
 * started anew; each writes what its last call returned, and when, into memory that the test sees.
 * A rank that is alive at the deadline fails the test and is killed.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "group/group_internal.h"

#define SECONDS INT64_C(1000000000)
#define LONG tnd_deadline_in(20 * SECONDS)
#define KNOWN_NS INT64_C(200000000) /* the promise: everybody knows of a death by then */
#define RANKS 16

struct note {
	_Atomic int rc;
	_Atomic int blame;
	_Atomic int64_t at_ns;
	_Atomic uint32_t steps; /* what it has got to */
};
static struct note *notes; /* shared with the ranks */
static char address[64];
static pid_t pids[RANKS];
static uint32_t rank_count;

/* -- ranks -- */

static void note_end(uint32_t rank, int rc, const struct tnd_error *error)
{
	notes[rank].blame = rc < 0 ? error->rank : -1;
	notes[rank].at_ns = tnd__now_ns();
	notes[rank].rc = rc;
}

static struct tnd_group *enter(uint32_t rank)
{
	struct tnd_group_opts opts = {.struct_bytes = sizeof(opts),
				      .rank_count = rank_count,
				      .address = address,
				      .name = "p"};
	struct tnd_error error = {0};
	struct tnd_group *group;
	int rc = rank == 0 ? tnd_group_create(&opts, &group, &error)
			   : tnd_group_attach(address, rank, LONG, &group, &error);

	if (rc == 0)
		return group;
	fprintf(stderr, "rank %u: %s\n", rank, error.message);
	_exit(99);
}

typedef void rank_body(uint32_t rank, void *arg);

static void start_rank(uint32_t rank, rank_body *body, void *arg)
{
	pids[rank] = fork();
	assert_true(pids[rank] >= 0);
	if (pids[rank] == 0) {
		/* A test that failed leaves no ranks behind. */
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		body(rank, arg);
		_exit(0);
	}
}

static void start(uint32_t count, rank_body *body, void *arg)
{
	static int serial;

	memset(notes, 0, RANKS * sizeof(*notes));
	snprintf(address, sizeof(address), "unix:@tundish-test-%d-%d", (int)getpid(), ++serial);
	rank_count = count;
	fflush(NULL);
	for (uint32_t rank = 0; rank < count; rank++)
		start_rank(rank, body, arg);
}

/* Return: wait status; when it ended, in *ret_ns. Past the deadline everybody is killed. */
static int reap(uint32_t rank, int64_t *ret_ns)
{
	int pidfd = (int)syscall(SYS_pidfd_open, pids[rank], 0);
	struct pollfd wait = {.fd = pidfd, .events = POLLIN};
	int status = -1, got = poll(&wait, 1, 20000);

	if (ret_ns)
		*ret_ns = tnd__now_ns();
	close(pidfd);
	if (got != 1) {
		for (uint32_t i = 0; i < rank_count; i++) {
			print_error("rank %u: step %u, rc %d\n", i, notes[i].steps, notes[i].rc);
			kill(pids[i], SIGKILL);
		}
	}
	assert_int_equal(waitpid(pids[rank], &status, 0), pids[rank]);
	assert_int_equal(got, 1);
	return status;
}

static void reap_all(void)
{
	for (uint32_t rank = 0; rank < rank_count; rank++)
		assert_int_equal(reap(rank, NULL), 0);
}

static void wait_steps(uint32_t rank, uint32_t steps)
{
	int64_t deadline_ns = LONG;

	while (notes[rank].steps < steps && tnd__now_ns() < deadline_ns)
		usleep(200);
	assert_true(notes[rank].steps >= steps);
}

/* -- all of it, forked and started anew -- */

static void all_collectives(uint32_t rank, void *arg)
{
	struct tnd_group *group = enter(rank);
	struct tnd_error error = {0};
	unsigned char *data = calloc(1, TND_GROUP_BYTES_MAX);
	int rc = tnd_group_ready(group, LONG, &error), fd = -1;
	uint64_t value = 0;

	(void)arg;
	for (int i = 0; rc == 0 && i < 1000; i++)
		rc = tnd_group_barrier(group, LONG, &error);
	for (uint32_t root = 0; rc == 0 && root < rank_count; root++) {
		memset(data, rank == root ? (int)root + 1 : 0, TND_GROUP_BYTES_MAX);
		rc = tnd_group_broadcast(group, root, data, TND_GROUP_BYTES_MAX, LONG, &error);
		if (rc == 0 && (data[0] != root + 1 || data[TND_GROUP_BYTES_MAX - 1] != root + 1))
			rc = 1;
		if (rc == 0)
			rc = tnd_group_min(group, rank == root ? 5 : 6, LONG, &value, NULL, &error);
		if (rc == 0 && value != 5)
			rc = 2;
		fd = rank == root ? memfd_create("t", MFD_CLOEXEC) : -1;
		if (rc == 0)
			rc = tnd_group_share_fds(group, root, &fd, 1, LONG, &error);
		close(fd);
	}
	note_end(rank, rc, &error);
	free(data);
	tnd_group_close(group);
	if (rc != 0)
		fprintf(stderr, "rank %u: %d, %s\n", rank, rc, error.message);
	if (rc != 0)
		_exit(1);
}

static void exec_self(uint32_t rank, void *arg)
{
	char number[16], count[16];

	(void)arg;
	snprintf(number, sizeof(number), "%u", rank);
	snprintf(count, sizeof(count), "%u", rank_count);
	execl("/proc/self/exe", "rank", number, count, address, NULL);
	_exit(98);
}

static void test_collectives(void **state)
{
	static const uint32_t counts[] = {1, 2, 4, 16};

	(void)state;
	for (size_t i = 0; i < 4; i++) {
		start(counts[i], all_collectives, NULL);
		reap_all();
	}
	start(4, exec_self, NULL);
	reap_all();
}

/* -- no descriptor free -- */

static void few_descriptors(uint32_t rank, void *arg)
{
	struct tnd_group *group = enter(rank);
	struct tnd_error error = {0};
	int rc = tnd_group_ready(group, LONG, &error), fds[TND_GROUP_FDS_MAX] = {0};
	int next = dup(0);
	struct rlimit before, low;

	(void)arg;
	close(next);
	getrlimit(RLIMIT_NOFILE, &before);
	low = before;
	low.rlim_cur = (rlim_t)next + 3;
	if (rank == 2)
		setrlimit(RLIMIT_NOFILE, &low);
	if (rc == 0)
		rc = tnd_group_share_fds(group, 1, fds, TND_GROUP_FDS_MAX, LONG, &error);
	note_end(rank, rc, &error);
	/* Those that came were closed again, and nobody took the others for dead. */
	if (rank == 2 && dup(0) != next)
		_exit(1);
	setrlimit(RLIMIT_NOFILE, &before);
	rc = tnd_group_share_fds(group, 1, fds, TND_GROUP_FDS_MAX, LONG, &error);
	tnd_group_close(group);
	if (rc != 0)
		_exit(2);
}

static void test_few_descriptors(void **state)
{
	(void)state;
	start(3, few_descriptors, NULL);
	reap_all();
	for (uint32_t rank = 0; rank < 3; rank++) {
		assert_int_equal(notes[rank].rc, -EMFILE);
		assert_int_equal(notes[rank].blame, 2);
	}
}

#ifdef TND_FAILPOINTS
/* -- death at each step -- */

struct plan {
	uint32_t victim;
	const char *points; /* of the victim, once in the middle of things */
	const char *all;    /* of everybody, from the start */
};

static void barriers_until_the_end(uint32_t rank, void *arg)
{
	struct plan *plan = arg;
	struct tnd_group *group;
	struct tnd_error error = {0};
	int rc;

	tnd__failpoints_set(plan->all);
	group = enter(rank);
	rc = tnd_group_ready(group, LONG, &error);
	for (uint32_t i = 0; rc == 0; i++) {
		if (i == 20 && rank == plan->victim)
			tnd__failpoints_set(plan->points);
		if (i == 400 && rank == plan->victim) {
			tnd_group_close(group);
			_exit(97); /* the step was not met */
		}
		rc = tnd_group_barrier(group, LONG, &error);
		notes[rank].steps = i;
	}
	note_end(rank, rc, &error);
	tnd_group_close(group);
}

static void expect_blamed(uint32_t victim, int code, int64_t died_ns)
{
	for (uint32_t rank = 0; rank < rank_count; rank++) {
		if (rank == victim)
			continue;
		assert_int_equal(reap(rank, NULL), 0);
		assert_int_equal(notes[rank].rc, code);
		assert_int_equal(notes[rank].blame, (int)victim);
		assert_true(notes[rank].at_ns - died_ns < KNOWN_NS);
	}
}

static void die_at(uint32_t victim, const char *point, const char *all)
{
	char points[64];
	struct plan plan = {.victim = victim, .points = points, .all = all};
	int64_t died_ns;

	snprintf(points, sizeof(points), "group.%s=kill", point);
	start(3, barriers_until_the_end, &plan);
	assert_int_equal(reap(victim, &died_ns), SIGKILL);
	expect_blamed(victim, TND_E_PEER_DEAD, died_ns);
}

static void test_death_at_each_step(void **state)
{
	static const char *const points[] = {"G1", "G2", "G3", "G4", "G5", "G6",
					     "G7", "H1", "H2", "H3", "H4", "H5"};

	(void)state;
	for (size_t i = 0; i < sizeof(points) / sizeof(points[0]); i++)
		for (uint32_t victim = 0; victim < 3; victim++)
			die_at(victim, points[i], NULL);
}

static void test_death_without_pidfds(void **state)
{
	(void)state;
	for (uint32_t victim = 0; victim < 3; victim++) {
		die_at(victim, "G1", "group.pidfd=ENOSYS");
		/* No descriptor got through from rank 0. */
		die_at(victim, "H4", "group.watch=EMFILE");
	}
}

/* -- rank 0 stopped -- */

static void rank0_stopped(const char *all)
{
	struct plan plan = {.victim = UINT32_MAX, .all = all};
	int64_t died_ns;
	int status;

	start(3, barriers_until_the_end, &plan);
	for (uint32_t rank = 0; rank < 3; rank++)
		wait_steps(rank, 50);
	kill(pids[0], SIGSTOP);
	assert_int_equal(waitpid(pids[0], &status, WUNTRACED), pids[0]);
	assert_true(WIFSTOPPED(status));
	died_ns = tnd__now_ns();
	kill(pids[2], SIGKILL);
	assert_int_equal(reap(2, NULL), SIGKILL);
	assert_int_equal(reap(1, NULL), 0);
	assert_int_equal(notes[1].rc, TND_E_PEER_DEAD);
	assert_int_equal(notes[1].blame, 2);
	assert_true(notes[1].at_ns - died_ns < KNOWN_NS);
	kill(pids[0], SIGCONT);
	/* It comes back to the same end. */
	assert_int_equal(reap(0, NULL), 0);
	assert_int_equal(notes[0].rc, TND_E_PEER_DEAD);
	assert_int_equal(notes[0].blame, 2);
}

static void test_stopped_rank0(void **state)
{
	(void)state;
	rank0_stopped(NULL);
	rank0_stopped("group.pidfd=ENOSYS");
}

/* -- leaving -- */

static void leave_after_10(uint32_t rank, void *arg)
{
	struct plan *plan = arg;
	struct tnd_group *group = enter(rank);
	struct tnd_error error = {0};
	int rc = tnd_group_ready(group, LONG, &error);

	for (uint32_t i = 0; rc == 0 && i < 11; i++) {
		if (i == 10 && rank == plan->victim) {
			tnd__failpoints_set(plan->points);
			tnd_group_close(group);
			_exit(0);
		}
		rc = tnd_group_barrier(group, LONG, &error);
		/* Ten have to pass, however soon the leaver is gone. */
		notes[rank].steps = i + (rc == 0);
	}
	note_end(rank, rc, &error);
	tnd_group_close(group);
}

static void test_leaving(void **state)
{
	static const char *const points[] = {"group.none=EIO", "group.L1=kill", "group.L2=kill",
					     "group.L4=kill"};

	(void)state;
	for (size_t i = 0; i < 4; i++)
		for (uint32_t victim = 0; victim < 3; victim++) {
			struct plan plan = {.victim = victim, .points = points[i]};
			int64_t left_ns;

			start(3, leave_after_10, &plan);
			assert_int_equal(reap(victim, &left_ns), i ? SIGKILL : 0);
			expect_blamed(victim, i == 1 ? TND_E_PEER_DEAD : TND_E_CLOSED, left_ns);
			for (uint32_t rank = 0; rank < 3; rank++)
				assert_int_equal(notes[rank].steps, 10);
		}
}
#endif

/* -- before all are there -- */

static void ready_only(uint32_t rank, void *arg)
{
	struct tnd_error error = {0};
	struct tnd_group *group;
	int rc;

	if (rank == 3 || (rank == 2 && !arg))
		for (;;)
			pause(); /* never attaches */
	group = enter(rank);
	notes[rank].steps = 1;
	if (rank == 2)
		for (;;)
			pause();
	if (rank == 0)
		while (notes[3].steps == 0)
			usleep(200);
	rc = rank == 0 && !arg ? tnd_group_expect(group, 2, (int32_t)notes[3].blame, &error) : 0;
	notes[rank].steps = 2;
	if (rc == 0)
		rc = tnd_group_ready(group, LONG, &error);
	note_end(rank, rc, &error);
	tnd_group_close(group);
}

/* arg: whether the victim attaches before it dies. */
static void test_death_before_ready(void **state)
{
	(void)state;
	for (intptr_t attaches = 0; attaches < 2; attaches++) {
		int64_t died_ns;

		/* Rank 3 stays away, so that nobody is ready. */
		start(4, ready_only, attaches ? &rank_count : NULL);
		notes[3].blame = pids[2];
		notes[3].steps = 1;
		wait_steps(0, 2);
		wait_steps(1, 2);
		if (attaches)
			wait_steps(2, 1);
		died_ns = tnd__now_ns();
		kill(pids[2], SIGKILL);
		assert_int_equal(reap(2, NULL), SIGKILL);
		for (uint32_t rank = 0; rank < 2; rank++) {
			assert_int_equal(reap(rank, NULL), 0);
			assert_int_equal(notes[rank].rc, TND_E_PEER_DEAD);
			assert_int_equal(notes[rank].blame, 2);
			assert_true(notes[rank].at_ns - died_ns < KNOWN_NS);
		}
		kill(pids[3], SIGKILL);
		assert_int_equal(reap(3, NULL), SIGKILL);
	}
}

/* -- nothing stays -- */

static void forever(uint32_t rank, void *arg)
{
	struct tnd_group *group = enter(rank);
	struct tnd_error error;

	(void)arg;
	while (tnd_group_barrier(group, LONG, &error) == 0 ||
	       tnd_group_ready(group, LONG, &error) == 0)
		notes[rank].steps++;
	/* Others were killed before it. */
	for (;;)
		pause();
}

static void test_kill_everybody(void **state)
{
	char line[512];
	FILE *sockets;
	bool found = false;

	(void)state;
	start(4, forever, NULL);
	for (uint32_t rank = 0; rank < 4; rank++)
		wait_steps(rank, 50);
	for (uint32_t rank = 0; rank < 4; rank++)
		kill(pids[rank], SIGKILL);
	for (uint32_t rank = 0; rank < 4; rank++)
		assert_int_equal(reap(rank, NULL), SIGKILL);
	sockets = fopen("/proc/net/unix", "re");
	assert_non_null(sockets);
	while (fgets(line, sizeof(line), sockets))
		found = found || strstr(line, address + strlen("unix:"));
	fclose(sockets);
	assert_false(found);
	/* No child is left either. */
	assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_collectives),
		cmocka_unit_test(test_few_descriptors),
#ifdef TND_FAILPOINTS
		cmocka_unit_test(test_death_at_each_step),
		cmocka_unit_test(test_death_without_pidfds),
		cmocka_unit_test(test_stopped_rank0),
		cmocka_unit_test(test_leaving),
#endif
		cmocka_unit_test(test_death_before_ready),
		cmocka_unit_test(test_kill_everybody),
	};

	notes = mmap(NULL, RANKS * sizeof(*notes), PROT_READ | PROT_WRITE,
		     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (notes == MAP_FAILED)
		return 1;
	if (argc == 4) {
		rank_count = (uint32_t)atoi(argv[2]);
		snprintf(address, sizeof(address), "%s", argv[3]);
		all_collectives((uint32_t)atoi(argv[1]), NULL);
		return 0;
	}
	return cmocka_run_group_tests(tests, NULL, NULL);
}
