/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_checkpoint.c - opening files, folders, indexes and config.json as one checkpoint
 *
 * What could break: something that is no safetensors file is let pass or blocks the caller, a refusal does not name file and cause, an
 * index and its folder disagree unnoticed, a tensor comes from the wrong file, memory or a descriptor stays behind on some path.
 * Each test writes real files into a fresh folder, opens them through the public functions, and compares codes, words of the
 * sentences and the table; after every test the process has as many descriptors as before.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "checkpoint/parts.h"
#include "support/fds.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

static char folder[64];
static unsigned int descriptors_before;

static int setup(void **state)
{
	(void)state;
	strcpy(folder, "/tmp/tnd_checkpoint.XXXXXX");
	if (!mkdtemp(folder))
		return -1;
	descriptors_before = fd_count();
	return 0;
}

static void remove_all(const char *path)
{
	DIR *entries = opendir(path);
	struct dirent *entry;
	char inner[512];

	while (entries && (entry = readdir(entries))) {
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
			continue;
		snprintf(inner, sizeof(inner), "%s/%s", path, entry->d_name);
		if (unlink(inner) < 0)
			remove_all(inner);
	}
	if (entries)
		closedir(entries);
	rmdir(path);
}

static int teardown(void **state)
{
	unsigned int now = fd_count();

	(void)state;
#ifdef TND_FAILPOINTS
	tnd__failpoints_set(NULL);
#endif
	remove_all(folder);
	if (now != descriptors_before)
		print_error("descriptors: %u before, %u after\n", descriptors_before, now);
	return now == descriptors_before ? 0 : -1;
}

/* The path of a name in the test's folder; good for four calls. */
static const char *in_folder(const char *name)
{
	static char paths[4][256];
	static unsigned turn;
	char *path = paths[turn++ % 4];

	snprintf(path, sizeof(paths[0]), "%s/%s", folder, name);
	return path;
}

static void write_raw(const char *name, const void *bytes, size_t count)
{
	int fd = open(in_folder(name), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);

	assert_true(fd >= 0);
	assert_int_equal(write(fd, bytes, count), count);
	close(fd);
}

static void write_text(const char *name, const char *text)
{
	write_raw(name, text, strlen(text));
}

/* A file with this header and `data_bytes` bytes behind it, each the length of the header in its low byte. */
static void write_file(const char *name, const char *header, size_t data_bytes)
{
	size_t n = strlen(header);
	unsigned char *all = calloc(1, 8 + n + data_bytes);

	assert_non_null(all);
	for (int i = 0; i < 8; i++)
		all[i] = (unsigned char)(n >> (8 * i));
	memcpy(all + 8, header, n);
	memset(all + 8 + n, (int)n & 0xff, data_bytes);
	write_raw(name, all, 8 + n + data_bytes);
	free(all);
}

#define BYTE_AT(name, begin, end) \
	"\"" name "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[" begin "," end "]}"
#define ONE(name) "{" BYTE_AT(name, "0", "1") "}"
#define TWO(a, b) "{" BYTE_AT(a, "0", "1") "," BYTE_AT(b, "1", "2") "}"

static struct tnd_checkpoint *opened(const char *path, uint32_t flags)
{
	struct tnd_checkpoint_opts opts = {.struct_bytes = sizeof(opts), .flags = flags};
	struct tnd_checkpoint *checkpoint = NULL;
	struct tnd_error error;
	int rc = tnd_checkpoint_open(path, &opts, &checkpoint, &error);

	if (rc != 0)
		fail_msg("%s: %s", path, error.message);
	return checkpoint;
}

/* Opening must fail with `code` and all the words, up to a NULL. */
static void refused(const char *path, const struct tnd_checkpoint_opts *opts, int code, ...)
{
	struct tnd_checkpoint *checkpoint = NULL;
	struct tnd_error error = {0};
	const char *word;
	va_list words;
	int rc = tnd_checkpoint_open(path, opts, &checkpoint, &error);

	if (rc != code)
		fail_msg("%s: expected %s, got %s: %s", path, tnd_error_name(code),
			 tnd_error_name(rc), error.message);
	assert_int_equal(error.code, code);
	assert_null(checkpoint);
	va_start(words, code);
	while ((word = va_arg(words, const char *)))
		if (!strstr(error.message, word))
			fail_msg("no \"%s\" in: %s", word, error.message);
	va_end(words);
}

/* -- one file -- */

/* Files of other formats, interrupted downloads. */
static void foreign_files(void **state)
{
	static const struct {
		const char *name, *text;
		size_t bytes;
		int code;
		const char *word;
	} files[] = {
		{"lfs", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", 0,
		 TND_E_NOT_SAFETENSORS, "git lfs pull"},
		{"html", "\n<!DOCTYPE html><html></html>", 0, TND_E_NOT_SAFETENSORS, "HTML"},
		{"html2", "<HTML><body>login</body>", 0, TND_E_NOT_SAFETENSORS, "HTML"},
		{"zip", "PK\x03\x04\x14\0\0\x08\x08\0\0\0", 12, TND_E_NOT_SAFETENSORS, "zip"},
		{"pickle", "\x80\x02\x8a\x0al\xfc\x9c\x46\xf9", 9, TND_E_NOT_SAFETENSORS, "pickle"},
		{"gzip", "\x1f\x8b\x08\0\0\0\0\0\0\x03", 10, TND_E_NOT_SAFETENSORS, "gzip"},
		{"gguf", "GGUF\x03\0\0\0\x01\0\0\0", 12, TND_E_NOT_SAFETENSORS, "GGUF"},
		{"json", "{\"weight_map\":{}}", 0, TND_E_NOT_SAFETENSORS, "JSON"},
		{"empty", "", 0, TND_E_TRUNCATED, "found 0: interrupted download?"},
		{"short", "\x02\0\0", 3, TND_E_TRUNCATED, "found 3: interrupted download?"},
		{"zero8", "\0\0\0\0\0\0\0\0", 8, TND_E_HEADER_SIZE, "zero header length"},
		{"beyond", "\x09\0\0\0\0\0\0\0{}", 10, TND_E_HEADER_SIZE,
		 "header of 9 bytes, found 2"},
	};
	static const char zeros[1024];

	(void)state;
	for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
		write_raw(files[i].name, files[i].text,
			  files[i].bytes ? files[i].bytes : strlen(files[i].text));
		refused(in_folder(files[i].name), NULL, files[i].code, files[i].name, files[i].word,
			NULL);
	}
	write_raw("z.safetensors", zeros, sizeof(zeros));
	refused(in_folder("z.safetensors"), NULL, TND_E_HEADER_SIZE,
		"z.safetensors: ", "zero header length: interrupted download?", NULL);
}

static void sparse_header(const char *name, uint64_t n)
{
	unsigned char first[10] = {0};
	int fd;

	for (int i = 0; i < 8; i++)
		first[i] = (unsigned char)(n >> (8 * i));
	first[8] = '{';
	first[9] = '}';
	write_raw(name, first, sizeof(first));
	fd = open(in_folder(name), O_WRONLY | O_CLOEXEC);
	assert_int_equal(ftruncate(fd, (off_t)(8 + n)), 0);
	close(fd);
}

/* The bytes after `{}` are holes, NULs: past the limit such a header is refused for them, so the code tells which check came. */
static void header_limit(void **state)
{
	struct tnd_checkpoint_opts opts = {.struct_bytes = sizeof(opts)};

	(void)state;
	sparse_header("big", 132095296);
	refused(in_folder("big"), NULL, TND_E_HEADER_SIZE, "132095296", "100000000", "--max-header",
		NULL);
	opts.max_header_bytes = 132095296;
	refused(in_folder("big"), &opts, TND_E_FORMAT, "white space", NULL);
	sparse_header("most", 100000000);
	refused(in_folder("most"), NULL, TND_E_FORMAT, NULL);
	sparse_header("more", 100000001);
	refused(in_folder("more"), NULL, TND_E_HEADER_SIZE, "100000001", NULL);
	write_file("small", "{}  ", 0);
	opts.max_header_bytes = 4;
	opts.struct_bytes = sizeof(opts);
	tnd_checkpoint_close(opened(in_folder("small"), 0));
	opts.max_header_bytes = 3;
	refused(in_folder("small"), &opts, TND_E_HEADER_SIZE, "of 4 bytes", "limit is 3", NULL);
}

static void options(void **state)
{
	struct tnd_checkpoint_opts opts = {.struct_bytes = sizeof(opts), .flags = 4};

	(void)state;
	write_file("m", "{}", 0);
	refused(in_folder("m"), &opts, TND_E_INVALID, "0x4", NULL);
	opts.flags = 0;
	opts.struct_bytes = 8;
	refused(in_folder("m"), &opts, TND_E_INVALID, "struct_bytes", NULL);
	opts.struct_bytes = sizeof(opts);
	opts.max_header_bytes = UINT64_C(1) << 32;
	refused(in_folder("m"), &opts, TND_E_INVALID, "max_header_bytes", NULL);
}

/* Data that are shorter or longer than the header says, a shape that asks for more than its offsets give. */
static void lengths(void **state)
{
	struct tnd_checkpoint_opts lenient = {.struct_bytes = sizeof(lenient),
					      .flags = TND_CHECKPOINT_F_ALLOW_TRAILING};
	static const char header[] =
		"{\"w\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}";

	(void)state;
	write_file("cut", header, 13);
	refused(in_folder("cut"), NULL, TND_E_TRUNCATED, "expected 16", "found 13", "3 are missing",
		NULL);
	refused(in_folder("cut"), &lenient, TND_E_TRUNCATED, NULL);
	write_file("more", header, 24);
	refused(in_folder("more"), NULL, TND_E_TRAILING, "8 trailing bytes", NULL);
	tnd_checkpoint_close(opened(in_folder("more"), TND_CHECKPOINT_F_ALLOW_TRAILING));
	write_file("shape",
		   "{\"w\":{\"dtype\":\"F32\",\"shape\":[1000,1000],\"data_offsets\":[0,4]}}", 4);
	refused(in_folder("shape"), NULL, TND_E_SHAPE, "'w'", "4000000", NULL);
}

/* None of these may block; the alarm ends the test if one does. */
static void irregular_files(void **state)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	(void)state;
	alarm(20);
	assert_int_equal(mkfifo(in_folder("fifo.safetensors"), 0644), 0);
	refused(in_folder("fifo.safetensors"), NULL, TND_E_NOT_SAFETENSORS, "a FIFO", NULL);
	refused("/dev/zero", NULL, TND_E_NOT_SAFETENSORS, "a device", NULL);
	snprintf(address.sun_path, sizeof(address.sun_path), "%s/s.safetensors", folder);
	assert_int_equal(bind(listener, (struct sockaddr *)&address, sizeof(address)), 0);
	refused(in_folder("s.safetensors"), NULL, TND_E_NOT_SAFETENSORS, "a socket", NULL);
	close(listener);
	unlink(in_folder("s.safetensors"));
	assert_int_equal(mkdir(in_folder("d.safetensors"), 0755), 0);
	refused(in_folder("d.safetensors"), NULL, TND_E_NOT_SAFETENSORS, "expected *.safetensors",
		NULL);
	/* In a folder they are left out with a word, the others are read. */
	write_file("m.safetensors", ONE("w"), 1);
	{
		struct tnd_checkpoint *checkpoint = opened(folder, 0);
		const char *const *warnings;
		size_t count;

		assert_int_equal(tnd_checkpoint_warnings(checkpoint, &warnings), 2);
		assert_non_null(strstr(warnings[0], "d.safetensors"));
		assert_non_null(strstr(warnings[1], "fifo.safetensors"));
		tnd_checkpoint_tensors(checkpoint, &count);
		assert_int_equal(count, 1);
		tnd_checkpoint_close(checkpoint);
	}
	alarm(0);
}

static int in_child(int (*function)(const char *path), const char *path)
{
	int status;
	pid_t pid = fork();

	assert_true(pid >= 0);
	if (pid == 0)
		_exit(function(path));
	assert_int_equal(waitpid(pid, &status, 0), pid);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static int open_without_rights(const char *path)
{
	struct tnd_checkpoint *checkpoint;
	struct tnd_error error;

	if (setgid(65534) < 0 || setuid(65534) < 0)
		return 99;
	if (tnd_checkpoint_open(path, NULL, &checkpoint, &error) != -EACCES)
		return 1;
	return strstr(error.message, "Permission denied") ? 0 : 2;
}

static int open_without_descriptors(const char *path)
{
	struct rlimit limit = {3, 3};
	struct tnd_checkpoint *checkpoint;
	struct tnd_error error;

	closefrom(3);
	setrlimit(RLIMIT_NOFILE, &limit);
	if (tnd_checkpoint_open(path, NULL, &checkpoint, &error) != -EMFILE)
		return 1;
	return strstr(error.message, "Too many open files") ? 0 : 2;
}

/* The cause is told as it is: no permission is not "no such file". */
static void real_errno(void **state)
{
	(void)state;
	write_file("m.safetensors", ONE("w"), 1);
	assert_int_equal(chmod(in_folder("m.safetensors"), 0), 0);
	assert_int_equal(chmod(folder, 0755), 0);
	if (geteuid() == 0)
		assert_int_equal(in_child(open_without_rights, in_folder("m.safetensors")), 0);
	chmod(in_folder("m.safetensors"), 0644);
	assert_int_equal(in_child(open_without_descriptors, in_folder("m.safetensors")), 0);
	refused(in_folder("none"), NULL, -ENOENT, "none", "No such file", NULL);
	assert_int_equal(symlink("gone", in_folder("x.safetensors")), 0);
	refused(folder, NULL, -ENOENT, "x.safetensors", NULL);
}

static int open_sparse(const char *path)
{
	struct rlimit limit = {UINT64_C(2000000) << 10, UINT64_C(2000000) << 10};
	struct tnd_checkpoint *checkpoint;
	const struct tnd_tensor *tensor;
	const struct tnd_file *file;
	unsigned char last = 1;
	size_t count;

	if (setrlimit(RLIMIT_AS, &limit) < 0)
		return 1;
	if (tnd_checkpoint_open(path, NULL, &checkpoint, NULL) < 0)
		return 2;
	file = tnd_checkpoint_files(checkpoint, &count);
	if (tnd_checkpoint_find(checkpoint, "w", 1, &tensor) < 0 ||
	    tensor->offset + tensor->bytes != file->bytes)
		return 3;
	if (pread(file->fd, &last, 1, (off_t)(file->bytes - 1)) != 1 || last != 0)
		return 4;
	tnd_checkpoint_close(checkpoint);
	return 0;
}

/* Nothing maps the size of a file: 2 GB of address space are enough. */
static void sparse_40_gib(void **state)
{
	static const char header[] = "{\"w\":{\"dtype\":\"U8\",\"shape\":[42949672960],\"data_"
				     "offsets\":[0,42949672960]}}";
	int fd;

	(void)state;
	if (SANITIZED)
		skip(); /* its shadow memory is above the limit */
	write_file("s.safetensors", header, 0);
	fd = open(in_folder("s.safetensors"), O_WRONLY | O_CLOEXEC);
	if (ftruncate(fd, (off_t)(8 + strlen(header) + UINT64_C(42949672960))) < 0) {
		close(fd);
		skip(); /* a file system without files of this size */
	}
	close(fd);
	assert_int_equal(in_child(open_sparse, in_folder("s.safetensors")), 0);
}

static uint64_t cached_bytes(int fd)
{
	uint64_t range[2] = {0, 0}, stat[5] = {~UINT64_C(0)};

	return syscall(451, fd, range, stat, 0) == 0 ? stat[0] * 4096 : ~UINT64_C(0);
}

/* A cold file is cold again after it was opened, a warm one is warm. */
static void page_cache(void **state)
{
	struct tnd_checkpoint *checkpoint;
	uint64_t before;
	int fd;

	(void)state;
	write_file("m.safetensors", ONE("w"), 1);
	fd = open(in_folder("m.safetensors"), O_RDONLY | O_CLOEXEC);
	fsync(fd);
	before = cached_bytes(fd);
	tnd_checkpoint_close(opened(in_folder("m.safetensors"), 0));
	assert_int_equal(cached_bytes(fd), before);
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	if (cached_bytes(fd) != 0) {
		close(fd);
		skip(); /* no cachestat, or a file system that lives in the page cache */
	}
	checkpoint = opened(in_folder("m.safetensors"), 0);
	assert_int_equal(cached_bytes(fd), 0);
	tnd_checkpoint_close(checkpoint);
	close(fd);
}

/* -- many files -- */

static const char *file_of(const struct tnd_checkpoint *checkpoint, const char *name)
{
	const struct tnd_tensor *tensor;
	size_t count;

	if (tnd_checkpoint_find(checkpoint, name, strlen(name), &tensor) < 0)
		return "";
	return tnd_checkpoint_files(checkpoint, &count)[tensor->file].name;
}

static void folder_without_index(void **state)
{
	struct tnd_checkpoint *checkpoint;
	const struct tnd_tensor *tensors;
	const struct tnd_file *files;
	size_t count;

	(void)state;
	refused(folder, NULL, TND_E_NOT_SAFETENSORS, "found none", NULL);
	write_text("pytorch_model.bin", "x");
	refused(folder, NULL, TND_E_NOT_SAFETENSORS, "pytorch_model.bin", NULL);
	write_file("b.safetensors", TWO("y", "a"), 2);
	write_file("a.safetensors", TWO("z", "c"), 2);
	write_text("._a.safetensors", "left by another system");
	checkpoint = opened(folder, 0);
	files = tnd_checkpoint_files(checkpoint, &count);
	assert_int_equal(count, 2);
	assert_string_equal(files[0].name, "a.safetensors");
	assert_int_equal(files[1].first_tensor, 2);
	assert_int_equal(files[1].tensor_count, 2);
	tensors = tnd_checkpoint_tensors(checkpoint, &count);
	assert_int_equal(count, 4);
	assert_string_equal(tensors[0].name, "c");
	assert_string_equal(tensors[1].name, "z");
	assert_string_equal(tensors[2].name, "a");
	assert_int_equal(tensors[2].file, 1);
	assert_int_equal(tensors[2].offset, files[1].header_bytes + 1);
	assert_string_equal(file_of(checkpoint, "y"), "b.safetensors");
	assert_string_equal(file_of(checkpoint, "nothing"), "");
	assert_true(tnd_checkpoint_memory_bytes(checkpoint) > 4 * sizeof(*tensors));
	tnd__checkpoint_ref(checkpoint);
	tnd_checkpoint_close(checkpoint);
	assert_string_equal(tensors[3].name, "y"); /* held by the second user */
	tnd_checkpoint_close(checkpoint);
	tnd_checkpoint_close(NULL);
	write_file("c.safetensors", ONE("y"), 1);
	refused(folder, NULL, TND_E_DUPLICATE, "'y'", "b.safetensors", "c.safetensors", NULL);
}

static void list_of_files(void **state)
{
	const char *paths[2], *twice[2];
	struct tnd_checkpoint *checkpoint;
	const struct tnd_file *files;
	struct tnd_error error;
	size_t count;

	(void)state;
	write_file("x", ONE("x"), 1);
	write_file("w", ONE("w"), 1);
	paths[0] = in_folder("x");
	paths[1] = in_folder("w");
	twice[0] = twice[1] = paths[0];
	assert_int_equal(tnd_checkpoint_open_files(paths, 2, NULL, &checkpoint, &error), 0);
	files = tnd_checkpoint_files(checkpoint, &count);
	assert_string_equal(files[0].name, paths[1]);
	tnd_checkpoint_close(checkpoint);
	assert_int_equal(tnd_checkpoint_open_files(twice, 2, NULL, &checkpoint, &error),
			 TND_E_DUPLICATE);
	assert_int_equal(tnd_checkpoint_open_files(paths, 0, NULL, &checkpoint, &error),
			 TND_E_INVALID);
}

#define INDEX "model.safetensors.index.json"

/* A file that the index does not name is not opened; index files of other names are found. */
static void index_is_authoritative(void **state)
{
	static const char *const names[] = {INDEX, "consolidated.safetensors.index.json",
					    "diffusion_pytorch_model.safetensors.index.json",
					    "other.safetensors.index.json"};
	struct tnd_checkpoint *checkpoint;
	const struct tnd_file *files;
	const char *const *warnings;
	size_t count;

	(void)state;
	write_file("1.safetensors", TWO("w", "a"), 2);
	write_file("2.safetensors", TWO("w", "b"), 2);
	write_text("3.safetensors", "not opened");
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		write_text(names[i], "{\"metadata\":{\"total_size\":1},\"weight_map\":{"
				     "\"w\":\"2.safetensors\",\"a\":\"1.safetensors\"}}");
		checkpoint = opened(i % 2 ? in_folder(names[i]) : folder, 0);
		files = tnd_checkpoint_files(checkpoint, &count);
		assert_int_equal(count, 2);
		assert_int_equal(files[0].tensor_count, 1);
		assert_int_equal(files[0].skipped_count, 1);
		assert_int_equal(files[1].skipped_count, 1);
		assert_string_equal(file_of(checkpoint, "w"), "2.safetensors");
		assert_string_equal(file_of(checkpoint, "a"), "1.safetensors");
		assert_string_equal(file_of(checkpoint, "b"), "");
		assert_int_equal(tnd_checkpoint_warnings(checkpoint, &warnings), 1);
		assert_non_null(strstr(warnings[0], "3.safetensors"));
		tnd_checkpoint_close(checkpoint);
		unlink(in_folder(names[i]));
	}
	write_text("x.safetensors.index.json", "{}");
	write_text("y.safetensors.index.json", "{}");
	refused(folder, NULL, TND_E_INDEX, "one index, found 2", NULL);
}

/* All that is missing, in one sentence; the flag reads what is there. */
static void index_disagrees(void **state)
{
	struct tnd__text text = {0};

	(void)state;
	write_file("1.safetensors", ONE("a"), 1);
	write_text(INDEX, "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\","
			  "\"c\":\"sub/3.safetensors\"}}");
	refused(folder, NULL, TND_E_INDEX, INDEX, "2 of the 3 files", "'2.safetensors'",
		"'sub/3.safetensors'", "--ignore-index", NULL);
	tnd_checkpoint_close(opened(folder, TND_CHECKPOINT_F_IGNORE_INDEX));
	write_text(INDEX, "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"1.safetensors\","
			  "\"c\\u00e9\":\"1.safetensors\"}}");
	refused(folder, NULL, TND_E_INDEX, "2 of the 3 names", "'b' (not in 1.safetensors)", "'cé'",
		NULL);
	tnd__text_add(&text, "{\"weight_map\":{\"a\":\"1.safetensors\"");
	for (int i = 0; i < 1000; i++)
		tnd__text_add(&text, ",\"name%d\":\"file%d.safetensors\"", i, i);
	tnd__text_add(&text, "}}");
	write_text(INDEX, text.data);
	tnd__text_free(&text);
	refused(folder, NULL, TND_E_INDEX, "1000 of the 1001 files", "'file0.safetensors'", "more;",
		"--ignore-index", NULL);
}

static void index_is_checked(void **state)
{
	static const struct {
		const char *text, *word;
	} rows[] = {
		{"", "end of the index"},
		{"[]", "weight_map"},
		{"{}", "weight_map"},
		{"{\"weight_map\":[]}", "weight_map"},
		{"{\"weight_map\":{}}", "empty"},
		{"{\"weight_map\":{\"a\":1}}", "'a'"},
		{"{\"weight_map\":{\"a\":\"\"}}", "below the folder"},
		{"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", "'/etc/passwd'"},
		{"{\"weight_map\":{\"a\":\"../x\"}}", "'../x'"},
		{"{\"weight_map\":{\"a\":\"x/../../y\"}}", "below the folder"},
		{"{\"weight_map\":{\"a\":\"x/..\"}}", "below the folder"},
		{"{\"weight_map\":{\"a\":\"..\"}}", "below the folder"},
		{"{\"weight_map\":{\"a\":\"1\",\"a\":\"1\"}}", "duplicate"},
		{"{\"weight_map\":{\"a\":\"1\\u0000\"}}", "NUL"},
		{"{\"weight_map\":{\"a\":\"1\"}} x", "white space"},
		{"{\"weight_map\":{\"\xff\":\"1\"}}", "UTF-8"},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		write_text(INDEX, rows[i].text);
		refused(folder, NULL, TND_E_INDEX, INDEX, rows[i].word, NULL);
	}
	/* Two dots in a name are no step up. */
	write_file("a..b", ONE("a"), 1);
	write_text(INDEX, "{\"weight_map\":{\"a\":\"a..b\"}}");
	tnd_checkpoint_close(opened(folder, 0));
}

/* A hub cache: files are links into a folder of blobs. */
static void snapshot_of_links(void **state)
{
	struct tnd_checkpoint *checkpoint;
	size_t count;

	(void)state;
	assert_int_equal(mkdir(in_folder("blobs"), 0755), 0);
	assert_int_equal(mkdir(in_folder("snapshots"), 0755), 0);
	assert_int_equal(mkdir(in_folder("snapshots/x"), 0755), 0);
	write_file("blobs/5e6f", ONE("w"), 1);
	assert_int_equal(symlink("../../blobs/5e6f", in_folder("snapshots/x/m.safetensors")), 0);
	checkpoint = opened(in_folder("snapshots/x"), 0);
	assert_string_equal(tnd_checkpoint_files(checkpoint, &count)->name, "m.safetensors");
	tnd_checkpoint_close(checkpoint);
	write_text("snapshots/x/" INDEX, "{\"weight_map\":{\"w\":\"m.safetensors\"}}");
	checkpoint = opened(in_folder("snapshots/x/"), 0);
	assert_string_equal(file_of(checkpoint, "w"), "m.safetensors");
	tnd_checkpoint_close(checkpoint);
}

/* -- config.json -- */

static void expert_counts(void **state)
{
	static const uint64_t none = TND_EXPERTS_UNKNOWN;
	static const struct {
		const char *text;
		uint64_t experts, drafts;
		size_t warnings;
	} rows[] = {
		{"{}", none, none, 0},
		{"{\"n_routed_experts\":256}", 256, none, 0},
		{"{\"num_experts\":128}", 128, none, 0},
		{"{\"num_local_experts\":8,\"num_experts_per_tok\":2}", 8, none, 0},
		{"{\"moe_num_experts\":[64,64]}", 64, none, 0},
		{"{\"text_config\":{\"num_experts\":16}}", 16, none, 0},
		{"{\"language_config\":{\"n_routed_experts\":64}}", 64, none, 0},
		{"{\"llm_config\":{\"n_routed_experts\":32}}", 32, none, 0},
		{"{\"num_experts\":4,\"text_config\":{\"num_experts\":16}}", 4, none, 0},
		{"{\"n_routed_experts\":256,\"dspark_n_routed_experts\":4}", 256, 4, 0},
		{"{\"text_config\":{\"n_routed_experts\":9,\"mtp_num_experts\":3}}", 9, 3, 0},
		{"{\"mtp_config\":{\"num_experts\":2}}", none, 2, 0},
		{"{\"n_routed_experts\":null,\"num_experts\":0}", none, none, 0},
		{"{\"num_experts\":\"8\"}", none, none, 1},
		{"{\"num_experts\":-8}", none, none, 1},
		{"{\"num_experts\":8.0}", none, none, 1},
		{"{\"num_experts\":[]}", none, none, 1},
		{"{\"num_experts\":18446744073709551615}", none, none, 1},
		{"{\"num_experts\":NaN}", none, none, 1},
		{"{\"num_experts\":[-Infinity,4]}", none, none, 1},
		/* What Python writes, and jansson refused with all that stands around it. */
		{"{\"a\":Infinity,\"b\":[NaN,-Infinity],\"num_experts\":8}", 8, none, 0},
		{"{\"a\":1180591620717411303424,\"num_experts\":8}", 8, none, 0},
		{"{\"a\":-1180591620717411303424,\"b\":1e999,\"num_experts\":8}", 8, none, 0},
		{"{\"a\":{\"b\":[1.5,{\"num_experts\":3}]},\"num_\\u0065xperts\":8}", 8, none, 0},
		{"{\"num_experts\":4,\"num_experts\":8}", 8, none, 0},
		{"{\"text_config\":7,\"mtp_config\":[],\"num_experts\":8}", 8, none, 0},
		{"{\"text_config\":{\"text_config\":{\"num_experts\":8}}}", none, none, 0},
		{"{\"mtp_num_experts\":\"x\",\"draft_num_experts\":2}", none, 2, 1},
		{"{\"num_experts\":8,\"a\":Inf}", none, none, 1},
		{"{\"num_experts\":8} 1", none, none, 1},
		{"{\"num_experts\":8,}", none, none, 1},
		{"{\"num_experts\":", none, none, 1},
		{"[]", none, none, 1},
		{"", none, none, 1},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		struct tnd__sentences warnings = {0};
		struct tnd__config config;
		char *text = strdup(rows[i].text);

		assert_int_equal(
			tnd__config_parse(text, strlen(text), "config.json", &config, &warnings),
			0);
		free(text);
		if (config.expert_count != rows[i].experts ||
		    config.draft_expert_count != rows[i].drafts ||
		    warnings.count != rows[i].warnings)
			fail_msg("%s: %llu, %llu, %zu warnings", rows[i].text,
				 (unsigned long long)config.expert_count,
				 (unsigned long long)config.draft_expert_count, warnings.count);
		tnd__sentences_free(&warnings);
	}
}

static void config_beside_file(void **state)
{
	struct tnd_model_facts facts = {.struct_bytes = sizeof(facts)};
	struct tnd_checkpoint *checkpoint;
	const char *const *warnings;
	uint64_t drafts;

	(void)state;
	write_file("m.safetensors", ONE("w"), 1);
	write_text("config.json",
		   "{\"n_routed_experts\":8,\"hidden_size\":64,\"text_config\":{"
		   "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":"
		   "16,\"vocab_size\":99,\"intermediate_size\":5,"
		   "\"moe_intermediate_size\":7}}");
	checkpoint = opened(in_folder("m.safetensors"), 0);
	assert_int_equal(tnd_checkpoint_experts(checkpoint, &drafts), 8);
	assert_true(drafts == TND_EXPERTS_UNKNOWN);
	assert_int_equal(tnd_checkpoint_facts(checkpoint, &facts), 0);
	assert_int_equal(facts.head_count, 4);
	assert_int_equal(facts.kv_head_count, 2);
	assert_int_equal(facts.head_dim, 16);
	assert_int_equal(facts.hidden_size, 64);
	assert_int_equal(facts.vocab_size, 99);
	assert_int_equal(facts.intermediate_size, 5);
	assert_int_equal(facts.moe_intermediate_size, 7);
	facts.struct_bytes = 4;
	assert_int_equal(tnd_checkpoint_facts(checkpoint, &facts), TND_E_INVALID);
	tnd_checkpoint_close(checkpoint);
	write_text("config.json", "{");
	checkpoint = opened(folder, 0);
	assert_int_equal(tnd_checkpoint_warnings(checkpoint, &warnings), 1);
	assert_non_null(strstr(warnings[0], "config.json"));
	assert_true(tnd_checkpoint_experts(checkpoint, NULL) == TND_EXPERTS_UNKNOWN);
	tnd_checkpoint_close(checkpoint);
	unlink(in_folder("config.json"));
	assert_int_equal(mkdir(in_folder("config.json"), 0755), 0);
	checkpoint = opened(folder, 0);
	assert_int_equal(tnd_checkpoint_warnings(checkpoint, &warnings), 1);
	tnd_checkpoint_close(checkpoint);
}

/* -- checking, failing -- */

struct problems {
	int count;
	int codes[8];
};

static void note(void *arg, const struct tnd_error *problem)
{
	struct problems *problems = arg;

	if (problems->count < 8)
		problems->codes[problems->count] = problem->code;
	problems->count++;
}

static void check_goes_on(void **state)
{
	struct problems problems = {0};
	struct tnd_error error;

	(void)state;
	write_file("1.safetensors", ONE("a"), 0);
	write_text("2.safetensors", "PK\x03\x04 and more of it");
	write_file("3.safetensors", ONE("a"), 1);
	write_file("4.safetensors", TWO("a", "b"), 2);
	assert_int_equal(tnd_checkpoint_check(folder, NULL, note, &problems, &error), 3);
	assert_int_equal(problems.count, 3);
	assert_int_equal(problems.codes[0], TND_E_TRUNCATED);
	assert_int_equal(problems.codes[1], TND_E_NOT_SAFETENSORS);
	assert_int_equal(problems.codes[2], TND_E_DUPLICATE);
	assert_int_equal(tnd_checkpoint_check(folder, NULL, NULL, NULL, &error), 3);
	write_text(INDEX, "{\"weight_map\":{\"a\":\"1.safetensors\",\"x\":\"3.safetensors\","
			  "\"y\":\"9.safetensors\",\"b\":\"4.safetensors\"}}");
	problems.count = 0;
	assert_int_equal(tnd_checkpoint_check(folder, NULL, note, &problems, &error), 3);
	assert_int_equal(problems.codes[0], TND_E_INDEX); /* 9.safetensors */
	assert_int_equal(problems.codes[1], TND_E_TRUNCATED);
	assert_int_equal(problems.codes[2], TND_E_INDEX); /* x */
	assert_int_equal(
		tnd_checkpoint_check(in_folder("3.safetensors"), NULL, note, &problems, &error), 0);
	assert_int_equal(tnd_checkpoint_check(in_folder("none"), NULL, note, &problems, &error),
			 -ENOENT);
}

#ifdef TND_FAILPOINTS
static void write_indexed(void)
{
	write_file("1.safetensors",
		   "{\"__metadata__\":{\"k\":\"v\"}," BYTE_AT("b", "0", "1") "," BYTE_AT("a", "1",
											 "2") "}",
		   2);
	write_file("2.safetensors", ONE("w"), 1);
	write_text("3.safetensors", "left out");
	write_text(INDEX, "{\"weight_map\":{\"a\":\"1.safetensors\",\"w\":\"2.safetensors\"}}");
	write_text("config.json", "{\"num_experts\":[]}");
}
#endif

/* Each allocation of a whole opening fails in turn; teardown counts descriptors, LeakSanitizer memory. */
static void each_allocation_fails(void **state)
{
	(void)state;
#ifdef TND_FAILPOINTS
	int failures = 0, rc = -ENOMEM;

	write_indexed();
	for (; rc < 0; failures++) {
		struct tnd_checkpoint *checkpoint = NULL;
		struct tnd_error error = {0};
		char point[64];

		snprintf(point, sizeof(point), "checkpoint.alloc=ENOMEM@%dx1", failures + 1);
		assert_int_equal(tnd__failpoints_set(point), 0);
		rc = tnd_checkpoint_open(folder, NULL, &checkpoint, &error);
		if (rc == 0)
			tnd_checkpoint_close(checkpoint);
		else if (rc != -ENOMEM || !*error.message)
			fail_msg("allocation %d: %s", failures, error.message);
		assert_true(failures < 200);
	}
	assert_true(failures > 30);
#else
	skip();
#endif
}

static void failing_reads(void **state)
{
	(void)state;
#ifdef TND_FAILPOINTS
	struct tnd_checkpoint *checkpoint;

	write_indexed();
	assert_int_equal(tnd__failpoints_set("checkpoint.pread=EINTR@1x5"), 0);
	checkpoint = opened(folder, 0);
	tnd_checkpoint_close(checkpoint);
	for (int i = 1; i <= 3; i++) {
		char point[64];

		snprintf(point, sizeof(point), "checkpoint.pread=EIO@%dx1", i);
		assert_int_equal(tnd__failpoints_set(point), 0);
		refused(folder, NULL, -EIO, i == 1 ? INDEX : "safetensors", "Input/output error",
			NULL);
	}
	assert_int_equal(tnd__failpoints_set("checkpoint.open=EMFILE@2x1"), 0);
	refused(folder, NULL, -EMFILE, "1.safetensors", NULL);
#else
	skip();
#endif
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(foreign_files),
		TEST(header_limit),
		TEST(options),
		TEST(lengths),
		TEST(irregular_files),
		TEST(real_errno),
		TEST(sparse_40_gib),
		TEST(page_cache),
		TEST(folder_without_index),
		TEST(list_of_files),
		TEST(index_is_authoritative),
		TEST(index_disagrees),
		TEST(index_is_checked),
		TEST(snapshot_of_links),
		TEST(expert_counts),
		TEST(config_beside_file),
		TEST(check_goes_on),
		TEST(each_allocation_fails),
		TEST(failing_reads),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
