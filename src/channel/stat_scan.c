/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stat_scan.c - finds memfds named tundish.* in /proc/PID/fd, and opens them for reading
 *
 *   /proc --> processes of our user --> their descriptors --> readlink "/memfd:tundish.NAME
 *                                                              (deleted)" --> a sighting
 *
 * Links are followed by stat() only, which says device and inode, the identity of a memfd, without
 * opening it. Opening is for those that are read, once each.
 *
 * Closing any descriptor of a file drops the record locks that the process has on it, and the life
 * locks of a channel are such locks. What this process has open itself is therefore read through
 * the descriptor that is there, at a position of our own, and never opened or closed here. Another
 * thread may close that descriptor meanwhile, and its number come to stand for something else: it
 * is compared with the sighting before each look, and what is read is checked anyway. A channel
 * that another thread attaches to during the walk is not known as our own yet: should it be opened
 * and closed here after that, and peers be watched by locks because there are no pidfds, they would
 * take us for dead.
 *
 * Processes come and go during the walk: one that has gone is left out. A process that may not be
 * looked at (another user's, or one that is not dumpable) is counted.
 */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"
#include "stat_scan.h"

static const struct {
	const char *text;
	enum tnd__memfd_kind kind;
} prefixes[] = {
	{"/memfd:tundish.channel.data:", TND__MEMFD_DATA},
	{"/memfd:tundish.channel.control:", TND__MEMFD_CONTROL},
	{"/memfd:tundish.slab ", TND__MEMFD_SLAB},
	{"/memfd:tundish.load ", TND__MEMFD_LOAD},
};

/* -- processes -- */

static void read_ns_pids(const char *text, struct tnd__process *process)
{
	const char *line = strstr(text, "\nNSpid:");
	char *end;

	if (!line)
		return;
	line += strlen("\nNSpid:");
	while (process->ns_count < TND__PID_LEVELS) {
		long pid;

		while (*line == ' ' || *line == '\t')
			line++;
		if (!isdigit((unsigned char)*line))
			return;
		pid = strtol(line, &end, 10);
		process->ns_pids[process->ns_count++] = (int32_t)pid;
		line = end;
	}
}

/* Return: false if the process is gone. */
static bool read_process(int32_t pid, struct tnd__process *ret_process)
{
	char path[64], text[4096];
	const char *state;
	ssize_t got;

	*ret_process = (struct tnd__process){.pid = pid};
	snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
	got = tnd__read_small(path, text, sizeof(text));
	if (got <= 0)
		return false;
	/* "Name:" is first and escaped by the kernel: no line can be forged by a name. */
	state = strstr(text, "\nState:");
	if (!state)
		return false;
	state += strlen("\nState:");
	state += strspn(state, " \t");
	ret_process->state = *state;
	read_ns_pids(text, ret_process);
	snprintf(path, sizeof(path), "/proc/%d/comm", (int)pid);
	got = tnd__read_small(path, text, sizeof(text));
	if (got > 0)
		tnd__printable(text, strcspn(text, "\n"), ret_process->name,
			       sizeof(ret_process->name));
	return true;
}

/* -- descriptors -- */

static bool is_writable(int32_t pid, int fd)
{
	char path[64], text[512];
	const char *flags;

	snprintf(path, sizeof(path), "/proc/%d/fdinfo/%d", (int)pid, fd);
	if (tnd__read_small(path, text, sizeof(text)) <= 0)
		return false;
	flags = strstr(text, "flags:");
	return flags && (strtoul(flags + strlen("flags:"), NULL, 8) & O_ACCMODE) == O_RDWR;
}

/* Whether descriptor `name` of the folder is one of ours; fills the sighting but for `process`. */
static bool recognise(int folder, const char *name, struct tnd__sighting *ret_sighting)
{
	char link[128];
	ssize_t got = readlinkat(folder, name, link, sizeof(link) - 1);
	struct stat st;

	if (got < 0)
		return false;
	link[got] = '\0';
	for (size_t i = 0; i < sizeof(prefixes) / sizeof(prefixes[0]); i++) {
		if (strncmp(link, prefixes[i].text, strlen(prefixes[i].text)) != 0)
			continue;
		if (fstatat(folder, name, &st, 0) != 0 || !S_ISREG(st.st_mode))
			return false;
		*ret_sighting = (struct tnd__sighting){
			.kind = prefixes[i].kind,
			.device = st.st_dev,
			.inode = st.st_ino,
			.bytes = st.st_size > 0 ? (uint64_t)st.st_size : 0,
			.fd = atoi(name),
		};
		return true;
	}
	return false;
}

/* Return: 0, -ENOMEM. */
static int add_sighting(struct tnd__scan *scan, struct tnd__sighting *sighting)
{
	int rc = tnd__reserve(&scan->sightings, &scan->sighting_capacity, scan->sighting_count + 1,
			      sizeof(*scan->sightings));

	if (rc == 0)
		scan->sightings[scan->sighting_count++] = *sighting;
	return rc;
}

/* Return: 0, -ENOMEM. */
static int walk_descriptors(struct tnd__scan *scan, DIR *folder, int32_t pid)
{
	struct tnd__sighting sighting;
	struct tnd__process process;
	struct dirent *entry;
	bool known = false;
	int rc;

	while ((entry = readdir(folder))) {
		if (!isdigit((unsigned char)entry->d_name[0]) ||
		    !recognise(dirfd(folder), entry->d_name, &sighting))
			continue;
		if (!known) {
			if (!read_process(pid, &process))
				return 0;
			rc = tnd__reserve(&scan->processes, &scan->process_capacity,
					  scan->process_count + 1, sizeof(*scan->processes));
			if (rc < 0)
				return rc;
			scan->processes[scan->process_count++] = process;
			known = true;
		}
		sighting.process = (uint32_t)(scan->process_count - 1);
		if (sighting.kind == TND__MEMFD_DATA)
			sighting.writable = is_writable(pid, sighting.fd);
		rc = add_sighting(scan, &sighting);
		if (rc < 0)
			return rc;
	}
	return 0;
}

/* Return: 0 (also where the process is gone, or not ours), -ENOMEM, -errno (our own lack). */
static int walk_process(struct tnd__scan *scan, int32_t pid)
{
	char path[64];
	struct stat st;
	DIR *folder;
	int rc = 0;

	snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
	folder = opendir(path);
	if (!folder) {
		if (errno == EACCES || errno == EPERM)
			scan->denied++;
		return errno == ENOMEM || errno == EMFILE || errno == ENFILE ? -errno : 0;
	}
	if (fstat(dirfd(folder), &st) == 0 && st.st_uid == geteuid())
		rc = walk_descriptors(scan, folder, pid);
	closedir(folder);
	return rc;
}

/* Our number in this /proc, which may belong to another pid namespace; 0: it does not show us. */
static int32_t own_pid(void)
{
	char link[32];
	ssize_t got = readlink("/proc/self", link, sizeof(link) - 1);

	if (got <= 0)
		return 0;
	link[got] = '\0';
	return atoi(link);
}

static int compare_sightings(const void *a, const void *b)
{
	const struct tnd__sighting *x = a, *y = b;

	if (x->kind != y->kind)
		return x->kind < y->kind ? -1 : 1;
	if (x->device != y->device)
		return x->device < y->device ? -1 : 1;
	if (x->inode != y->inode)
		return x->inode < y->inode ? -1 : 1;
	if (x->process != y->process)
		return x->process < y->process ? -1 : 1;
	return (x->fd > y->fd) - (x->fd < y->fd);
}

int tnd__scan_read(struct tnd__scan *ret_scan)
{
	struct tnd__scan scan = {0};
	int32_t self = own_pid();
	struct dirent *entry;
	DIR *proc = opendir("/proc");
	int rc = 0;

	if (!proc)
		return -errno;
	if (self) {
		rc = walk_process(&scan, self);
		scan.own_first = scan.process_count > 0;
	}
	while (rc == 0 && (entry = readdir(proc))) {
		int32_t pid = isdigit((unsigned char)entry->d_name[0]) ? atoi(entry->d_name) : 0;

		if (pid > 0 && pid != self)
			rc = walk_process(&scan, pid);
	}
	closedir(proc);
	if (rc < 0) {
		tnd__scan_free(&scan);
		return rc;
	}
	if (scan.sighting_count)
		qsort(scan.sightings, scan.sighting_count, sizeof(*scan.sightings),
		      compare_sightings);
	*ret_scan = scan;
	return 0;
}

void tnd__scan_free(struct tnd__scan *scan)
{
	free(scan->processes);
	free(scan->sightings);
	*scan = (struct tnd__scan){0};
}

size_t tnd__scan_run(const struct tnd__scan *scan, size_t first)
{
	const struct tnd__sighting *begin = &scan->sightings[first];
	size_t count = 1;

	while (first + count < scan->sighting_count && begin[count].kind == begin->kind &&
	       begin[count].device == begin->device && begin[count].inode == begin->inode)
		count++;
	return count;
}

/* -- reading -- */

static bool is_same(int fd, const struct tnd__sighting *sighting)
{
	struct stat st;

	return fstat(fd, &st) == 0 && st.st_dev == sighting->device &&
	       st.st_ino == sighting->inode && S_ISREG(st.st_mode);
}

bool tnd__window_open(const struct tnd__scan *scan, size_t first, struct tnd__window *ret_window)
{
	size_t count = tnd__scan_run(scan, first);
	bool own = scan->own_first && scan->sightings[first].process == 0;
	char path[64];

	for (size_t i = 0; i < count; i++) {
		const struct tnd__sighting *sighting = &scan->sightings[first + i];
		int fd = sighting->fd;

		if (own) {
			if (sighting->process != 0)
				return false;
			*ret_window = (struct tnd__window){.fd = fd};
			if (is_same(fd, sighting))
				return true;
			continue;
		}
		snprintf(path, sizeof(path), "/proc/%d/fd/%d",
			 (int)scan->processes[sighting->process].pid, fd);
		fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
		if (fd < 0)
			continue;
		*ret_window = (struct tnd__window){.fd = fd, .owned = true};
		if (is_same(fd, sighting))
			return true;
		tnd__window_close(ret_window);
	}
	return false;
}

bool tnd__window_read(const struct tnd__window *window, void *out, size_t bytes, uint64_t offset)
{
	size_t done = 0;

	while (done < bytes) {
		ssize_t got =
			pread(window->fd, (char *)out + done, bytes - done, (off_t)(offset + done));

		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			return false;
		done += (size_t)got;
	}
	return true;
}

void tnd__window_close(struct tnd__window *window)
{
	if (window->owned)
		close(window->fd);
	*window = (struct tnd__window){.fd = -1};
}
