/* SPDX-License-Identifier: Apache-2.0 */
/*
 * headroom.c - what the limits of memory leave, looked at before each 2 MiB
 *
 * Pages of a memfd beyond a cgroup's limit are not refused, the process is killed. So every limit
 * is looked at before pages are taken, and again before each step, as other processes take memory
 * too:
 *
 *   short way   limit - usage of each level, MemAvailable, by files that are kept open: 7 us and
 *               1.6 us a level, of 600 us that 2 MiB of pages take. File cache counts as used, so
 *               a yes is a yes.
 *   long way    where the short one says no: tnd_host_memory(), which adds the file cache that can
 *               be reclaimed, and names the limit.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/cgroup.h"
#include "headroom.h"
#include "host_internal.h"

#define MARGIN_LEAST TND__MIB(16)
#define MARGIN_SHARE 50 /* 2 %: page tables, and what the kernel keeps for itself */

static int open_file(struct tnd__headroom *headroom, const struct tnd__cgroup *cgroup,
		     const char *name)
{
	char path[8192];
	int fd, bytes;

	bytes = snprintf(path, sizeof(path), "%s%s/%s", cgroup->root, cgroup->directory, name);
	if (bytes < 0 || (size_t)bytes >= sizeof(path)) {
		headroom->blind = true;
		return -1;
	}
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 && errno != ENOENT)
		headroom->blind = true;
	return fd;
}

static void open_level(const struct tnd__cgroup *cgroup, void *arg)
{
	struct tnd__headroom *headroom = arg;
	struct tnd__headroom_level *level;
	int usage_fd = open_file(headroom, cgroup,
				 cgroup->v1 ? "memory.usage_in_bytes" : "memory.current");

	if (usage_fd < 0)
		return;
	if (headroom->level_count == TND__HEADROOM_LEVELS) {
		headroom->blind = true;
		close(usage_fd);
		return;
	}
	level = &headroom->levels[headroom->level_count++];
	level->usage_fd = usage_fd;
	level->limit_fd =
		open_file(headroom, cgroup, cgroup->v1 ? "memory.limit_in_bytes" : "memory.max");
	level->high_fd = cgroup->v1 ? -1 : open_file(headroom, cgroup, "memory.high");
	/* In v1 a parent that is not shown limits as well, and the nearest level counts for it. */
	level->inherited = cgroup->v1 && !headroom->v1_seen ? headroom->inherited : UINT64_MAX;
	headroom->v1_seen |= cgroup->v1;
}

void tnd__headroom_open(struct tnd__headroom *headroom, uint64_t bytes, const char *what)
{
	struct tnd_host_memory memory = {.struct_bytes = sizeof(memory)};

	memset(headroom, 0, sizeof(*headroom));
	headroom->what = what;
	headroom->left = bytes;
	headroom->margin = TND__MAX(MARGIN_LEAST, bytes / MARGIN_SHARE);
	/* Not above any limit that is not shown, which is all that the short way needs to know. */
	headroom->inherited = tnd_host_memory(&memory) == 0 ? memory.cgroup_limit : 0;
	tnd__cgroups_walk("", "memory", open_level, headroom);
	/* Last: if descriptors ran out on the way, so that levels were missed, this fails too. */
	headroom->meminfo_fd = open("/proc/meminfo", O_RDONLY | O_CLOEXEC);
	headroom->blind |= headroom->meminfo_fd < 0;
	if (headroom->blind) /* the long way needs descriptors */
		tnd__headroom_close(headroom);
}

static void close_fd(int fd)
{
	if (fd >= 0)
		close(fd);
}

void tnd__headroom_close(struct tnd__headroom *headroom)
{
	for (uint32_t i = 0; i < headroom->level_count; i++) {
		close_fd(headroom->levels[i].limit_fd);
		close_fd(headroom->levels[i].high_fd);
		close_fd(headroom->levels[i].usage_fd);
	}
	close_fd(headroom->meminfo_fd);
	headroom->level_count = 0;
	headroom->meminfo_fd = -1;
}

/* The file again from its start, NUL-terminated; "" where it cannot be read. */
static void reread(int fd, char *text, size_t text_bytes)
{
	ssize_t got = pread(fd, text, text_bytes - 1, 0);

	text[got > 0 ? got : 0] = '\0';
}

/* `otherwise`: where there is no number, as in "max". */
static uint64_t read_number(int fd, uint64_t otherwise)
{
	char text[64];

	if (fd < 0)
		return otherwise;
	reread(fd, text, sizeof(text));
	return text[0] >= '0' && text[0] <= '9' ? strtoull(text, NULL, 10) : otherwise;
}

static bool level_has(const struct tnd__headroom_level *level, uint64_t need)
{
	uint64_t limit = TND__MIN(read_number(level->limit_fd, UINT64_MAX), level->inherited);
	uint64_t usage;

	limit = TND__MIN(limit, read_number(level->high_fd, UINT64_MAX));
	if (limit >= INT64_MAX - 65536) /* how v1 writes that there is none */
		return true;
	usage = read_number(level->usage_fd, UINT64_MAX);
	return usage <= limit && limit - usage >= need;
}

static bool short_way(const struct tnd__headroom *headroom, uint64_t need)
{
	char text[8192];
	uint64_t kib;

	if (headroom->blind)
		return false;
	reread(headroom->meminfo_fd, text, sizeof(text));
	kib = tnd__line_number(text, "MemAvailable:");
	if (kib == TND_HOST_UNKNOWN || kib < need >> 10)
		return false;
	for (uint32_t i = 0; i < headroom->level_count; i++)
		if (!level_has(&headroom->levels[i], need))
			return false;
	return true;
}

static int refuse(const struct tnd__headroom *headroom, const struct tnd_host_memory *memory,
		  struct tnd_error *reterr)
{
	char want[TND_SIZE_TEXT_MAX], margin[TND_SIZE_TEXT_MAX], left[TND_SIZE_TEXT_MAX];
	char limit[TND_SIZE_TEXT_MAX + 16] = "";

	if (strcmp(memory->limited_by, "MemAvailable") != 0)
		snprintf(limit, sizeof(limit), " (limit %s)",
			 tnd_size_format(memory->cgroup_limit, want));
	return tnd__fail_plain(reterr, TND_E_HEADROOM,
			       "expected room for %s of %s (%" PRIu64
			       " bytes) and a margin of %s, found %s (%" PRIu64
			       " bytes) left by %s%s; make it smaller, or raise that limit",
			       tnd_size_format(headroom->left, want), headroom->what,
			       headroom->left, tnd_size_format(headroom->margin, margin),
			       tnd_size_format(memory->available, left), memory->available,
			       memory->limited_by, limit);
}

int tnd__headroom_check(const struct tnd__headroom *headroom, struct tnd_error *reterr)
{
	struct tnd_host_memory memory = {.struct_bytes = sizeof(memory)};
	uint64_t need = headroom->left + headroom->margin;
	int rc;

	if (short_way(headroom, need))
		return 0;
	rc = tnd_host_memory(&memory);
	if (rc == -EMFILE || rc == -ENFILE || rc == -ENOMEM)
		return tnd__fail_plain(reterr, rc,
				       "expected to see what memory is left for %s, found %s",
				       headroom->what, tnd_strerror(rc));
	/* Without /proc nobody can say what is left: nothing is refused. */
	if (rc < 0 || memory.available >= need)
		return 0;
	return refuse(headroom, &memory, reterr);
}

int tnd__headroom_file(uint64_t bytes, const char *what, struct tnd_error *reterr)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_FSIZE, &limit) < 0 || limit.rlim_cur == RLIM_INFINITY ||
	    bytes <= limit.rlim_cur)
		return 0;
	return tnd__fail_plain(
		reterr, TND_E_HEADROOM,
		"expected a limit on file sizes (RLIMIT_FSIZE, ulimit -f) of at least %" PRIu64
		" bytes, which %s takes, found %" PRIu64 "; make it smaller, or raise that limit",
		bytes, what, (uint64_t)limit.rlim_cur);
}

int tnd__headroom_take(struct tnd__headroom *headroom, int fd, uint64_t from, uint64_t to,
		       struct tnd_error *reterr)
{
	uint64_t step = TND__HUGE;

	while (from < to) {
		uint64_t now = TND__MIN(step, to - from);
		int rc = tnd__headroom_check(headroom, reterr);

		if (rc < 0)
			return rc;
		rc = tnd__failpoint("mem.fallocate");
		if (rc == 0 && fallocate(fd, 0, (off_t)from, (off_t)now) < 0)
			rc = -errno;
		if (rc == -EINTR) { /* undone by the kernel: a timer must not keep us for ever */
			step = TND__MAX(tnd__round_down(step / 2, TND__PAGE), TND__PAGE);
			continue;
		}
		if (rc < 0)
			return tnd__fail_plain(reterr, rc,
					       "expected pages for %s (fallocate, %" PRIu64
					       " bytes to go), found %s: %s; free some, or make it "
					       "smaller",
					       headroom->what, headroom->left, tnd_error_name(rc),
					       tnd_strerror(rc));
		from += now;
		headroom->left -= TND__MIN(headroom->left, now);
		step = TND__HUGE;
	}
	return 0;
}
