/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doctor_file.c - what the file system of one file, or of a folder's first *.safetensors, allows
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <tundish/slab.h>

#include "storage/doctor_internal.h"
#include "storage/engine.h"

#ifndef RWF_DONTCACHE
#define RWF_DONTCACHE 0x80
#endif

static const struct {
	unsigned long magic;
	const char *name;
	bool remote;
} file_systems[] = {
	{0xef53, "ext4", false},          {0x58465342, "xfs", false},
	{0x9123683e, "btrfs", false},     {0x01021994, "tmpfs", false},
	{0x794c7630, "overlayfs", false}, {0x2fc12fc1, "zfs", false},
	{0xf2f52010, "f2fs", false},      {0x6969, "nfs", true},
	{0xff534d42, "cifs", true},       {0x0bd00bd0, "lustre", true},
	{0x65735546, "fuse", true},       {0x00c36400, "ceph", true},
	{0x73717368, "squashfs", false},  {0xe0f5e1e2, "erofs", false},
	{0x01021997, "9p", true},         {0x47504653, "gpfs", true},
};

static void check_file_system(struct tnd__doctor *doctor, int fd)
{
	struct statfs fs;

	if (fstatfs(fd, &fs) < 0) {
		tnd__doctor_tell(doctor, "file_system", 1, "", "unknown: %s", tnd_strerror(-errno));
		return;
	}
	for (size_t i = 0; i < sizeof(file_systems) / sizeof(file_systems[0]); i++) {
		if (file_systems[i].magic != ((unsigned long)fs.f_type & 0xffffffff))
			continue;
		tnd__doctor_tell(doctor, "file_system", 1, "", "%s%s", file_systems[i].name,
				 file_systems[i].remote ? " (remote or in user space)" : "");
		return;
	}
	tnd__doctor_tell(doctor, "file_system", 1, "", "type 0x%lx", (unsigned long)fs.f_type);
}

/* Through a source, so that what is said here is what a load would do; one page is read. */
static void check_direct(struct tnd__doctor *doctor, int fd, const char *name, uint64_t bytes)
{
	struct tnd__storage_opts opts = {.engine = TND__ENGINE_THREADS,
					 .direct = TND__DIRECT_ON,
					 .thread_count = 1,
					 .numa = TND_NUMA_AUTO};
	struct tnd__storage *storage;
	struct tnd__source *source;
	void *page;
	int rc = tnd__storage_create(&opts, &storage, NULL);

	if (rc < 0) {
		tnd__doctor_tell(doctor, "direct_io", 0, "raise the limit of processes", "%s",
				 tnd_strerror(rc));
		return;
	}
	rc = tnd__source_open(storage, fd, name, bytes, &source, NULL);
	if (rc == 0) {
		bool direct = atomic_load_explicit(&source->direct, memory_order_relaxed);

		page = mmap(NULL, TND__PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			    -1, 0);
		if (direct && page != MAP_FAILED &&
		    pread(source->direct_fd, page, TND__PAGE, 0) < 0)
			tnd__source_retire_direct(source, "O_DIRECT read refused", -errno);
		direct = atomic_load_explicit(&source->direct, memory_order_relaxed);
		if (direct)
			tnd__doctor_tell(doctor, "direct_io", 1, "", "works, alignment %u",
					 source->align);
		else
			tnd__doctor_tell(
				doctor, "direct_io", 0,
				"cold reads go through the page cache at half the speed or less: "
				"keep the files on ext4, xfs or another file system with O_DIRECT",
				"%s", source->fallback);
		if (page != MAP_FAILED)
			munmap(page, TND__PAGE);
		tnd__source_close(source);
	} else {
		tnd__doctor_tell(doctor, "direct_io", 0, "", "%s", tnd_strerror(rc));
	}
	tnd__storage_close(storage);
}

static int try_flag(int fd, int flag)
{
	unsigned char page[TND__PAGE];
	struct iovec vec = {page, sizeof(page)};
	int rc = tnd__failpoint(flag == RWF_NOWAIT ? "storage.nowait" : "storage.dontcache");

	if (rc < 0)
		return rc;
	return preadv2(fd, &vec, 1, 0, flag) < 0 && errno != EAGAIN ? -errno : 0;
}

static void check_flags(struct tnd__doctor *doctor, int fd, int64_t cached)
{
	int rc = try_flag(fd, RWF_NOWAIT);

	/* Only a fallback of cachestat, which then decides whether there is something to change. */
	tnd__doctor_tell(doctor, "nowait", rc == 0 || cached >= 0,
			 "whether files are in the page cache cannot be told here", "%s",
			 rc == 0 ? "works" : tnd_strerror(rc));
	rc = try_flag(fd, RWF_DONTCACHE);
	tnd__doctor_tell(doctor, "dontcache", 1, "", "%s",
			 rc == 0 ? "works" : "not here: buffered reads are dropped behind instead");
}

static void check_file(struct tnd__doctor *doctor, int fd, const char *name, uint64_t bytes)
{
	unsigned char page[TND__PAGE];
	uint64_t first = TND__MIN(bytes, TND__PAGE);
	int64_t cached = tnd__pagecache_bytes(fd, 0, TND__MAX(first, 1));

	check_file_system(doctor, fd);
	check_direct(doctor, fd, name, bytes);
	tnd__doctor_tell(
		doctor, "cachestat_file", cached >= 0,
		"the kernel answers only the file's owner: run as the owner, or with CAP_FOWNER",
		"%s", cached >= 0 ? "works" : tnd_strerror((int)cached));
	posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
	check_flags(doctor, fd, cached);
	/* A page that is still being read cannot be dropped: wait for it by reading it. */
	if (cached == 0 && pread(fd, page, first, 0) >= 0)
		tnd__pagecache_drop(fd, 0, first);
}

/* The first *.safetensors in byte order. Return: 0, -ENOENT, -errno. */
static int find_file(const char *folder, char *out, size_t out_bytes)
{
	DIR *listing = opendir(folder);
	char best[NAME_MAX + 1] = "";
	struct dirent *entry;

	if (!listing)
		return -errno;
	while ((entry = readdir(listing)))
		if (tnd__glob("*.safetensors", entry->d_name, strlen(entry->d_name)) &&
		    (!best[0] || strcmp(entry->d_name, best) < 0))
			snprintf(best, sizeof(best), "%s", entry->d_name);
	closedir(listing);
	if (!best[0])
		return -ENOENT;
	if ((size_t)snprintf(out, out_bytes, "%s/%s", folder, best) >= out_bytes)
		return -ENAMETOOLONG;
	return 0;
}

int tnd__doctor_path(struct tnd__doctor *doctor, const char *path, struct tnd_error *reterr)
{
	struct tnd__where where = {.file = path};
	char found[PATH_MAX];
	struct stat status;
	int fd, rc = 0;

	if (stat(path, &status) < 0)
		rc = -errno;
	if (rc == 0 && S_ISDIR(status.st_mode)) {
		rc = find_file(path, found, sizeof(found));
		if (rc == -ENOENT)
			return tnd__fail(
				reterr, rc, &where,
				"expected a *.safetensors file in this folder, found none");
		where.file = path = found;
	}
	/* O_NONBLOCK: a FIFO must not keep us. */
	fd = rc == 0 ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
	if (rc == 0 && (fd < 0 || fstat(fd, &status) < 0))
		rc = -errno;
	if (rc == 0 && !S_ISREG(status.st_mode)) {
		rc = -EINVAL;
		tnd__fail(reterr, rc, &where,
			  "expected a regular file or a folder of *.safetensors");
	} else if (rc < 0) {
		tnd__fail(reterr, rc, &where, "cannot be opened: %s", tnd_strerror(rc));
	} else {
		check_file(doctor, fd, path, (uint64_t)status.st_size);
	}
	if (fd >= 0)
		close(fd);
	return rc;
}
