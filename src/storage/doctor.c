/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doctor.c - what this machine allows, found by trying
 *
 * Each check does on a small scale what a load does, and leaves nothing behind. A file of /proc or
 * /sys that cannot be read is a finding ("unknown"), not an error: containers hide them.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <tnd_config.h>
#if TND_HAVE_URING
#include <liburing.h>
#endif

#include <tundish/host.h>

#include "storage/doctor_internal.h"
#include "storage/engine.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define HUGE_DIRECTORY "/sys/kernel/mm/transparent_hugepage/"
#define WANT_MEMLOCK TND__MIB(64)
#define WANT_MEMORY TND__MIB(1024)
#define WANT_SHM TND__MIB(64)
#define WANT_FILES 1024

void tnd__doctor_tell(struct tnd__doctor *doctor, const char *name, int ok, const char *advice,
		      const char *format, ...)
{
	struct tnd_check check = {name, ok, NULL, ok ? "" : advice};
	char value[512];
	va_list args;

	va_start(args, format);
	vsnprintf(value, sizeof(value), format, args);
	va_end(args);
	check.value = value;
	doctor->bad += !ok;
	doctor->fn(doctor->arg, &check);
}

static const char *size_text(uint64_t bytes, char *out, size_t out_bytes)
{
	if (bytes == TND_HOST_UNKNOWN)
		snprintf(out, out_bytes, "unknown");
	else if (bytes >= TND__MIB(10240))
		snprintf(out, out_bytes, "%llu GiB", (unsigned long long)(bytes >> 30));
	else if (bytes >= TND__MIB(10))
		snprintf(out, out_bytes, "%llu MiB", (unsigned long long)(bytes >> 20));
	else
		snprintf(out, out_bytes, "%llu KiB", (unsigned long long)(bytes >> 10));
	return out;
}

#if TND_HAVE_URING
static int try_uring(void)
{
	struct io_uring_cqe *cqe;
	struct io_uring ring;
	int rc = tnd__failpoint("storage.uring.setup");

	if (rc == 0)
		rc = io_uring_queue_init(4, &ring, 0);
	if (rc < 0)
		return rc;
	io_uring_prep_nop(io_uring_get_sqe(&ring));
	rc = io_uring_submit(&ring);
	if (rc >= 0)
		rc = io_uring_wait_cqe(&ring, &cqe);
	io_uring_queue_exit(&ring);
	return rc;
}
#else
static int try_uring(void)
{
	return -ENOSYS;
}
#endif

static void check_uring(struct tnd__doctor *doctor)
{
	static const char advice[] = "reads use threads instead; to allow io_uring: sysctl "
				     "kernel.io_uring_disabled=0, and in a container "
				     "a seccomp profile that permits io_uring_setup, "
				     "io_uring_enter and io_uring_register";
	int rc = try_uring();

	tnd__doctor_tell(doctor, "io_uring", rc >= 0,
			 TND_HAVE_URING ? advice : "build with liburing (-During=enabled)", "%s",
			 rc >= 0 ? "works" : tnd_strerror(rc));
}

static void check_memlock(struct tnd__doctor *doctor)
{
	struct rlimit limit = {0, 0};
	char size[32];

	getrlimit(RLIMIT_MEMLOCK, &limit);
	if (limit.rlim_cur == RLIM_INFINITY)
		tnd__doctor_tell(doctor, "memlock", 1, "", "unlimited");
	else
		tnd__doctor_tell(doctor, "memlock",
				 limit.rlim_cur >= WANT_MEMLOCK || geteuid() == 0,
				 "only pinned memory needs more: ulimit -l unlimited, or docker "
				 "run --ulimit memlock=-1",
				 "%s", size_text(limit.rlim_cur, size, sizeof(size)));
}

/* The bracketed word of a sysfs choice ("always [madvise] never"). */
static void chosen(const char *path, char *out, size_t out_bytes)
{
	char text[128], *open = NULL, *close = NULL;

	if (tnd__read_small(path, text, sizeof(text)) > 0) {
		open = strchr(text, '[');
		close = strchr(text, ']');
	}
	if (open && close > open)
		snprintf(out, out_bytes, "%.*s", (int)(close - open - 1), open + 1);
	else
		snprintf(out, out_bytes, "unknown");
}

/*
 * 2 MiB at a 2 MiB boundary, of `fd` from its start if it is not -1. NULL: no memory. *ret_map: 4
 * MiB to unmap.
 */
static unsigned char *map_huge(int fd, unsigned char **ret_map)
{
	unsigned char *piece;

	*ret_map = mmap(NULL, 2 * TND__HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			-1, 0);
	if (*ret_map == MAP_FAILED)
		return NULL;
	piece = *ret_map + (tnd__round_up((uintptr_t)*ret_map, TND__HUGE) - (uintptr_t)*ret_map);
	if (fd < 0 || mmap(piece, TND__HUGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
			   0) != MAP_FAILED)
		return piece;
	munmap(*ret_map, 2 * TND__HUGE);
	return NULL;
}

/* Bytes of huge pages under `address`, from smaps; -1: cannot be told. */
static long huge_kib(const void *address, const char *field)
{
	FILE *smaps = fopen("/proc/self/smaps", "re");
	char line[512];
	bool inside = false;
	long kib = -1;

	if (!smaps)
		return -1;
	while (fgets(line, sizeof(line), smaps)) {
		unsigned long low, high;

		if (sscanf(line, "%lx-%lx ", &low, &high) == 2)
			inside = (uintptr_t)address >= low && (uintptr_t)address < high;
		else if (inside && strncmp(line, field, strlen(field)) == 0)
			kib = atol(line + strlen(field));
	}
	fclose(smaps);
	return kib;
}

static void check_huge(struct tnd__doctor *doctor)
{
	unsigned char *map, *piece = map_huge(-1, &map);
	char mode[32];
	long kib = -1;

	chosen(HUGE_DIRECTORY "enabled", mode, sizeof(mode));
	if (piece) {
		madvise(piece, TND__HUGE, MADV_HUGEPAGE);
		*piece = 1;
		kib = huge_kib(piece, "AnonHugePages:");
		munmap(map, 2 * TND__HUGE);
	}
	tnd__doctor_tell(doctor, "huge_pages", kib > 0 || (kib < 0 && strcmp(mode, "never") != 0),
			 "direct reads into small pages are up to twice as slow: echo madvise "
			 "> " HUGE_DIRECTORY "enabled",
			 "%s: %s", mode,
			 kib > 0    ? "a touched buffer is on huge pages"
			 : kib == 0 ? "a touched buffer is on small pages"
				    : "cannot be told");
}

static void check_shmem_huge(struct tnd__doctor *doctor)
{
	char mode[32];

	chosen(HUGE_DIRECTORY "shmem_enabled", mode, sizeof(mode));
	tnd__doctor_tell(doctor, "shmem_huge_pages", strcmp(mode, "deny") != 0,
			 "shared slabs cannot be on huge pages: echo advise > " HUGE_DIRECTORY
			 "shmem_enabled",
			 "%s", mode);
}

static void check_memory(struct tnd__doctor *doctor)
{
	struct tnd_host_memory memory = {.struct_bytes = sizeof(memory)};
	char available[32], other[32];
	int rc = tnd_host_memory(&memory);

	if (rc < 0) {
		tnd__doctor_tell(doctor, "memory_available", 0, "mount /proc, or give --budget",
				 "unknown: %s", tnd_strerror(rc));
		tnd__doctor_tell(doctor, "cgroup_memory", 1, "", "unknown");
		return;
	}
	size_text(memory.available, available, sizeof(available));
	tnd__doctor_tell(doctor, "memory_available", memory.available >= WANT_MEMORY,
			 "free memory, or raise the container's memory limit", "%s of %s, by %s",
			 available, size_text(memory.mem_total, other, sizeof(other)),
			 memory.limited_by);
	if (memory.cgroup_limit == TND_HOST_UNKNOWN || memory.cgroup_limit >= memory.mem_total)
		tnd__doctor_tell(doctor, "cgroup_memory", 1, "", "no limit");
	else
		tnd__doctor_tell(doctor, "cgroup_memory", memory.cgroup_limit >= WANT_MEMORY,
				 "raise it: docker run --memory, resources.limits.memory", "%s",
				 size_text(memory.cgroup_limit, other, sizeof(other)));
}

static void check_shm(struct tnd__doctor *doctor)
{
	struct statvfs fs;
	char size[32], free_size[32];

	if (statvfs("/dev/shm", &fs) < 0) {
		/* tundish itself uses memfds. */
		tnd__doctor_tell(doctor, "dev_shm", 0,
				 "engines and NCCL need it: mount a tmpfs at /dev/shm", "%s",
				 tnd_strerror(-errno));
		return;
	}
	tnd__doctor_tell(
		doctor, "dev_shm", (uint64_t)fs.f_blocks * fs.f_frsize >= WANT_SHM,
		"engines and NCCL need more: docker run --shm-size=1g, or --ipc=host",
		"%s, %s free", size_text((uint64_t)fs.f_blocks * fs.f_frsize, size, sizeof(size)),
		size_text((uint64_t)fs.f_bavail * fs.f_frsize, free_size, sizeof(free_size)));
}

static void check_processors(struct tnd__doctor *doctor)
{
	uint32_t quota = tnd__cpu_quota("");
	char list[64], text[64] = "no quota";
	int count = tnd__io_cpus(NULL, list, sizeof(list));

	if (quota)
		snprintf(text, sizeof(text), "quota of %u", quota);
	tnd__doctor_tell(doctor, "processors", quota != 1 && count > 1,
			 "one processor reads and copies in turn: docker run --cpus, --cpuset-cpus",
			 "%d (%s), %s", count, list, text);
}

static void check_files(struct tnd__doctor *doctor)
{
	struct rlimit limit = {0, 0};

	getrlimit(RLIMIT_NOFILE, &limit);
	tnd__doctor_tell(doctor, "open_files", limit.rlim_cur >= WANT_FILES,
			 "three descriptors a shard and one a slab are needed: ulimit -n 4096, or "
			 "docker run --ulimit nofile=4096",
			 "%llu", (unsigned long long)limit.rlim_cur);
}

/*
 * On memory of our own, which no permission can refuse. Leaves the memfd's descriptor in *ret_fd.
 */
static void check_memfd(struct tnd__doctor *doctor, int *ret_fd)
{
	int fd = memfd_create("tundish-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	int rc = fd < 0 ? -errno : 0;

	if (rc == 0 && ftruncate(fd, (off_t)(2 * TND__HUGE)) < 0)
		rc = -errno;
	tnd__doctor_tell(
		doctor, "memfd", rc == 0,
		"shared loads and channels need memfd_create: permit it in the seccomp profile",
		"%s", rc == 0 ? "works" : tnd_strerror(rc));
	*ret_fd = fd;
}

static void check_cachestat(struct tnd__doctor *doctor, int memfd)
{
	int64_t rc = memfd < 0 ? -ENOSYS : tnd__pagecache_bytes(memfd, 0, TND__PAGE);

	tnd__doctor_tell(doctor, "cachestat", rc >= 0,
			 "page cache is asked page by page instead: a kernel from 6.5, and "
			 "cachestat permitted by seccomp",
			 "%s", rc >= 0 ? "works" : tnd_strerror((int)rc));
}

static void check_advice(struct tnd__doctor *doctor, int memfd)
{
	unsigned char *map, *piece = map_huge(-1, &map);
	int populate = -ENOMEM, collapse = -ENOMEM;

	if (piece) {
		populate = madvise(piece, TND__HUGE, MADV_POPULATE_WRITE) < 0 ? -errno : 0;
		munmap(map, 2 * TND__HUGE);
	}
	piece = memfd >= 0 ? map_huge(memfd, &map) : NULL;
	if (piece) {
		*piece = 1;
		collapse = madvise(piece, TND__HUGE, MADV_COLLAPSE) < 0 ? -errno : 0;
		munmap(map, 2 * TND__HUGE);
	}
	tnd__doctor_tell(doctor, "populate", populate == 0,
			 "memory is touched page by page instead: a kernel from 5.14", "%s",
			 populate == 0 ? "works" : tnd_strerror(populate));
	tnd__doctor_tell(
		doctor, "madv_collapse", collapse == 0,
		"shared slabs stay on small pages: a kernel from 6.1 with transparent huge pages",
		"%s", collapse == 0 ? "works" : tnd_strerror(collapse));
}

static void check_kernel(struct tnd__doctor *doctor)
{
	struct utsname name;

	if (uname(&name) < 0)
		tnd__doctor_tell(doctor, "kernel", 1, "", "unknown");
	else
		tnd__doctor_tell(doctor, "kernel", 1, "", "%s %s %s", name.sysname, name.release,
				 name.machine);
}

int tnd_doctor(const char *path, tnd_check_fn fn, void *arg, struct tnd_error *reterr)
{
	struct tnd__doctor doctor = {fn, arg, 0};
	int memfd, rc = 0;

	check_kernel(&doctor);
	check_processors(&doctor);
	check_memory(&doctor);
	check_huge(&doctor);
	check_shmem_huge(&doctor);
	check_memfd(&doctor, &memfd);
	check_advice(&doctor, memfd);
	check_cachestat(&doctor, memfd);
	if (memfd >= 0)
		close(memfd);
	check_uring(&doctor);
	check_memlock(&doctor);
	check_files(&doctor);
	check_shm(&doctor);
	if (path)
		rc = tnd__doctor_path(&doctor, path, reterr);
	return rc < 0 ? rc : doctor.bad;
}
