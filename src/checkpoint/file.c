/* SPDX-License-Identifier: Apache-2.0 */
/*
 * file.c - opens one safetensors file and reads its header, and nothing else of it
 *
 *   open (never blocks) -> regular? -> first 4 KiB -> length plausible? -> the rest of the header
 *        -> scan -> names kept, text given back
 *
 * What people have instead of a safetensors file is named for what it is, but only after its first
 * eight bytes made no sense as a length: a valid file is never taken for something else.
 *
 * Page cache: the descriptor is told FADV_RANDOM, so that no data is read ahead, and header pages
 * of which none was cached before are dropped afterwards. Where the kernel cannot say (cachestat,
 * 6.5), they are left alone. All of this is best effort.
 *
 * The descriptor stays open: a file that is replaced later is still the one that was checked.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "parts.h"

#define FIRST_BYTES 4096

typedef unsigned long long ull;

void tnd__scratch_free(struct tnd__scratch *scratch)
{
	if (scratch->data)
		munmap(scratch->data, scratch->bytes);
	memset(scratch, 0, sizeof(*scratch));
}

/* Room for `bytes`; what was in it is kept only as far as `keep`. */
static int scratch_reserve(struct tnd__scratch *scratch, size_t bytes, size_t keep)
{
	size_t size = tnd__round_up(TND__MAX(bytes, TND__KIB(64)), TND__PAGE);
	void *data;

	if (bytes <= scratch->bytes)
		return 0;
	if (tnd__failpoint("checkpoint.alloc") < 0)
		return -ENOMEM;
	data = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (data == MAP_FAILED)
		return -ENOMEM;
	if (keep)
		memcpy(data, scratch->data, keep);
	tnd__scratch_free(scratch);
	scratch->data = data;
	scratch->bytes = size;
	return 0;
}

/* pread() of everything. Return: bytes, fewer only at the end of the file; -errno. */
static ssize_t read_all(int fd, void *out, size_t bytes, uint64_t offset)
{
	size_t done = 0;

	while (done < bytes) {
		size_t piece = TND__MIN(bytes - done, (size_t)1 << 30);
		ssize_t got = tnd__failpoint("checkpoint.pread");

		if (got == 0)
			got = pread(fd, (char *)out + done, piece, (off_t)(offset + done));
		else
			errno = (int)-got, got = -1;
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return -errno;
		if (got == 0)
			break;
		done += (size_t)got;
	}
	return (ssize_t)done;
}

/* True if the kernel says that no page of the range is cached. */
static bool is_cold(int fd, uint64_t offset, uint64_t bytes)
{
	return tnd__cachestat(fd, offset, bytes) == 0;
}

static int refuse(const char *name, int code, struct tnd_error *error, const char *what)
{
	return tnd__fail(error, code, &(struct tnd__where){.file = name}, "%s", what);
}

static int fail_errno(const char *name, int code, struct tnd_error *error, const char *doing)
{
	return tnd__fail(error, code, &(struct tnd__where){.file = name}, "cannot %s: %s", doing,
			 tnd_strerror(code));
}

static const char *kind_of(mode_t mode)
{
	return S_ISDIR(mode)                    ? "a directory"
	       : S_ISFIFO(mode)                 ? "a FIFO"
	       : S_ISSOCK(mode)                 ? "a socket"
	       : S_ISCHR(mode) || S_ISBLK(mode) ? "a device"
						: "no regular file";
}

static int fail_kind(const char *name, mode_t mode, struct tnd_error *error)
{
	return tnd__fail(error, TND_E_NOT_SAFETENSORS, &(struct tnd__where){.file = name},
			 "expected a regular file, found %s", kind_of(mode));
}

/*
 * Opens without ever waiting for the other end of a FIFO or a device. Return: descriptor of a
 * regular file, or the failure.
 */
static int open_regular(const char *path, const char *name, uint64_t *ret_bytes,
			struct tnd_error *error)
{
	int rc = tnd__failpoint("checkpoint.open"), fd = -1;
	struct stat stat_;

	if (rc == 0) {
		fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
		rc = fd < 0 ? -errno : 0;
	}
	if (rc == -ENXIO && stat(path, &stat_) == 0 && !S_ISREG(stat_.st_mode))
		return fail_kind(name, stat_.st_mode, error);
	if (rc < 0)
		return fail_errno(name, rc, error, "open");
	if (fstat(fd, &stat_) < 0)
		rc = fail_errno(name, -errno, error, "stat");
	else if (!S_ISREG(stat_.st_mode))
		rc = fail_kind(name, stat_.st_mode, error);
	if (rc < 0) {
		close(fd);
		return rc;
	}
	*ret_bytes = (uint64_t)stat_.st_size;
	return fd;
}

int tnd__slurp(const char *path, const char *name, uint64_t most, char **ret_text,
	       size_t *ret_bytes, struct tnd_error *reterr)
{
	uint64_t bytes = 0;
	char *text = NULL;
	ssize_t got;
	int fd, rc = 0;
	bool cold;

	fd = open_regular(path, name, &bytes, reterr);
	if (fd < 0)
		return fd;
	if (bytes > most) {
		rc = tnd__fail(reterr, -EFBIG, &(struct tnd__where){.file = name},
			       "expected at most %llu bytes, found %llu", (ull)most, (ull)bytes);
		goto out;
	}
	text = tnd__checkpoint_alloc((size_t)bytes);
	if (!text) {
		rc = fail_errno(name, -ENOMEM, reterr, "read it into memory");
		goto out;
	}
	cold = is_cold(fd, 0, bytes);
	got = read_all(fd, text, (size_t)bytes, 0);
	if (cold)
		posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	if (got < 0) {
		rc = fail_errno(name, (int)got, reterr, "read");
		goto out;
	}
	*ret_text = text;
	*ret_bytes = (size_t)got;
	text = NULL;
out:
	free(text);
	close(fd);
	return rc;
}

static bool begins(const unsigned char *text, size_t bytes, const char *with, size_t with_bytes)
{
	return bytes >= with_bytes && memcmp(text, with, with_bytes) == 0;
}

static bool is_html(const unsigned char *text, size_t bytes)
{
	while (bytes && strchr(" \t\r\n", *text) && *text)
		text++, bytes--;
	return (bytes >= 9 && strncasecmp((const char *)text, "<!doctype", 9) == 0) ||
	       (bytes >= 5 && strncasecmp((const char *)text, "<html", 5) == 0) ||
	       begins(text, bytes, "<?xml", 5);
}

/*
 * What a file is whose length field makes no sense, with what to do; NULL if that cannot be told.
 */
static const char *recognise(const unsigned char *text, size_t bytes)
{
	static const struct {
		const char *magic;
		size_t bytes;
		const char *sentence;
	} kinds[] = {
		{"version https://git-lfs", 23,
		 "a git-lfs pointer, not the file itself: run git lfs pull"},
		{"PK\x03\x04", 4,
		 "a zip archive (torch.save writes these), not safetensors: convert or unpack it"},
		{"GGUF", 4,
		 "a GGUF file, not safetensors: get the safetensors version of the model"},
		{"\x1f\x8b", 2, "a gzip file, not safetensors: decompress it"},
		{"\x28\xb5\x2f\xfd", 4, "a zstd file, not safetensors: decompress it"},
		{"\x89HDF", 4, "an HDF5 file, not safetensors: convert it"},
		{"\x93NUMPY", 6, "a NumPy file, not safetensors: convert it"},
	};

	for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
		if (begins(text, bytes, kinds[i].magic, kinds[i].bytes))
			return kinds[i].sentence;
	if (is_html(text, bytes))
		return "an HTML page, not safetensors: the download brought an error or login page";
	if (bytes > 1 && text[0] == 0x80 && text[1] >= 2 && text[1] <= 5)
		return "a pickle (torch.save), not safetensors: convert it";
	if (bytes > 1 && text[0] == '{' && strchr("\" \n\r\t", text[1]))
		return "JSON text, not safetensors: expected 8 bytes of header length first";
	return NULL;
}

/* Checks the length of the header, which `first` holds the first bytes of the file of. */
static int header_length(const struct tnd__part *part, const struct tnd_checkpoint_opts *opts,
			 const unsigned char *first, size_t first_bytes, uint64_t *ret_length,
			 struct tnd_error *error)
{
	struct tnd__where where = {.file = part->name, .byte_offset = 0, .has_offset = true};
	const char *kind = recognise(first, first_bytes);
	uint64_t length = 0;

	if (part->bytes >= 8)
		for (int i = 7; i >= 0; i--)
			length = length << 8 | first[i];
	if (length && length <= opts->max_header_bytes && length <= part->bytes - 8) {
		*ret_length = length;
		return 0;
	}
	if (kind)
		return refuse(part->name, TND_E_NOT_SAFETENSORS, error, kind);
	if (part->bytes < 8)
		return tnd__fail(error, TND_E_TRUNCATED, &where,
				 "expected at least 8 bytes, found %llu: interrupted download?",
				 (ull)part->bytes);
	if (!length)
		return tnd__fail(error, TND_E_HEADER_SIZE, &where,
				 "zero header length: interrupted download?");
	if (length > part->bytes - 8)
		return tnd__fail(error, TND_E_HEADER_SIZE, &where,
				 "expected a header of %llu bytes, found %llu bytes to the end of "
				 "the file: not safetensors, or an interrupted download",
				 (ull)length, (ull)part->bytes - 8);
	return tnd__fail(error, TND_E_HEADER_SIZE, &where,
			 "header of %llu bytes, the limit is %llu: raise it with --max-header if "
			 "the file is to be trusted",
			 (ull)length, (ull)opts->max_header_bytes);
}

/* Reads [from, to) of the file to the same place of the scratch. */
static int read_header(const struct tnd__part *part, struct tnd__scratch *scratch, uint64_t from,
		       uint64_t to, struct tnd_error *error)
{
	uint64_t end = tnd__round_up(to, TND__PAGE);
	bool cold;
	ssize_t got;

	if (from >= to)
		return 0;
	if (scratch_reserve(scratch, (size_t)to, (size_t)from) < 0)
		return fail_errno(part->name, -ENOMEM, error, "read the header into memory");
	cold = is_cold(part->fd, from, end - from);
	got = read_all(part->fd, scratch->data + from, (size_t)(to - from), from);
	if (cold)
		posix_fadvise(part->fd, (off_t)from, (off_t)(end - from), POSIX_FADV_DONTNEED);
	if (got < 0)
		return fail_errno(part->name, (int)got, error, "read the header");
	if ((uint64_t)got < to - from)
		return tnd__fail(error, TND_E_CHANGED, &(struct tnd__where){.file = part->name},
				 "the file shrank while its header was read: expected %llu bytes, "
				 "found %llu; open it when it is complete",
				 (ull)to, (ull)from + (ull)got);
	return 0;
}

static int scan_part(struct tnd__part *part, const struct tnd_checkpoint_opts *opts,
		     struct tnd__scratch *scratch, struct tnd_error *error)
{
	uint64_t first_bytes = TND__MIN(part->bytes, FIRST_BYTES), length = 0;
	struct tnd__header_text text;
	int rc;

	rc = read_header(part, scratch, 0, first_bytes, error);
	if (rc == 0)
		rc = header_length(part, opts, scratch->data, (size_t)first_bytes, &length, error);
	if (rc == 0)
		rc = read_header(part, scratch, first_bytes, 8 + length, error);
	if (rc < 0)
		return rc;
	part->header_bytes = 8 + length;
	text = (struct tnd__header_text){
		.text = scratch->data + 8,
		.bytes = (size_t)length,
		.data_bytes = part->bytes - part->header_bytes,
		.flags = opts->flags,
		.file = part->name,
	};
	rc = tnd__header_scan(&text, &part->header, error);
	if (rc == 0 && tnd__header_detach(&part->header) < 0)
		rc = fail_errno(part->name, -ENOMEM, error, "keep its names");
	return rc;
}

static char *copy_text(const char *text)
{
	size_t bytes = strlen(text) + 1;
	char *copy = tnd__checkpoint_alloc(bytes);

	return copy ? memcpy(copy, text, bytes) : NULL;
}

char *tnd__path_join(const char *folder, const char *name)
{
	size_t folder_bytes = strlen(folder), name_bytes = strlen(name) + 1;
	bool slash = folder_bytes && folder[folder_bytes - 1] != '/';
	char *path = tnd__checkpoint_alloc(folder_bytes + slash + name_bytes);

	if (!path)
		return NULL;
	memcpy(path, folder, folder_bytes);
	if (slash)
		path[folder_bytes] = '/';
	memcpy(path + folder_bytes + slash, name, name_bytes);
	return path;
}

int tnd__part_open(const char *path, const char *name, const struct tnd_checkpoint_opts *opts,
		   struct tnd__scratch *scratch, struct tnd__part *ret_part,
		   struct tnd_error *reterr)
{
	struct tnd__part part = {.fd = -1};
	int rc;

	part.name = copy_text(name);
	part.path = copy_text(path);
	if (!part.name || !part.path) {
		rc = fail_errno(name, -ENOMEM, reterr, "open");
		goto fail;
	}
	rc = part.fd = open_regular(path, name, &part.bytes, reterr);
	if (rc < 0)
		goto fail;
	posix_fadvise(part.fd, 0, 0, POSIX_FADV_RANDOM);
	rc = scan_part(&part, opts, scratch, reterr);
	if (rc < 0)
		goto fail;
	*ret_part = part;
	return 0;
fail:
	tnd__part_free(&part);
	return rc;
}

void tnd__part_free(struct tnd__part *part)
{
	if (part->fd >= 0)
		close(part->fd);
	free(part->name);
	free(part->path);
	tnd__header_free(&part->header);
	*part = (struct tnd__part){.fd = -1};
}
