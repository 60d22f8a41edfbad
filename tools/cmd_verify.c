/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cmd_verify.c - `tundish verify`: everything that opening checks, going on after a problem; with
 * --deep the data too
 *
 * Deep reading shows what a disk cannot give back, and compares files that are named by their
 * SHA-256 (the blobs that a snapshot links to) with that name. It leaves the page cache as it was:
 * blocks of which no page was cached are dropped behind the read; where the kernel cannot say
 * (cachestat is missing), nothing is dropped.
 */
#include "tool.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <openssl/evp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define CHUNK ((size_t)4 << 20)
#define DIGEST_BYTES 32

enum { KEY_DEEP = TOOL_KEY, KEY_JSON };

struct verify {
	const char *path;
	bool deep, json, failed;
	struct tnd_checkpoint_opts opts;
	json_t *list; /* with --json */
	size_t problems, blobs;
	uint64_t done_bytes;
	bool progress;
	int64_t shown_ns;
	unsigned char *buffer;
};

static volatile sig_atomic_t interrupted;

static void on_signal(int number)
{
	(void)number;
	interrupted = 1;
}

static const struct argp_option options[] = {
	{"deep", KEY_DEEP, NULL, 0,
	 "Read all data, and check files that are named by their SHA-256", 0},
	{"json", KEY_JSON, NULL, 0, "One JSON document", 0},
	{0},
};

static error_t parse(int key, char *arg, struct argp_state *state)
{
	struct verify *verify = state->input;

	switch (key) {
	case KEY_DEEP:
		verify->deep = true;
		return 0;
	case KEY_JSON:
		verify->json = true;
		return 0;
	case ARGP_KEY_INIT:
		state->child_inputs[1] = &verify->opts;
		return 0;
	case ARGP_KEY_ARG:
		tool_take_path(state, &verify->path, arg);
		return 0;
	case ARGP_KEY_END:
		tool_need_path(state, verify->path);
		return 0;
	default:
		return ARGP_ERR_UNKNOWN;
	}
}

static const struct argp_child children[] = {
	{&tool_common_argp, 0, NULL, 0}, {&tool_checkpoint_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {
	.options = options,
	.parser = parse,
	.args_doc = "PATH",
	.doc = "Checks a checkpoint's headers, index and config, and lists every problem.",
	.children = children};

/* -- problems -- */

static void note(void *arg, const struct tnd_error *problem)
{
	struct verify *verify = arg;
	json_t *object;

	verify->problems++;
	if (!verify->json) {
		int used = printf("%s: ", tnd_error_name(problem->code));

		tool_put_wrapped(stdout, problem->message, (size_t)(used < 0 ? 0 : used), 4);
		return;
	}
	object = json_object();
	tool_json_set(object, "code", json_string(tnd_error_name(problem->code)), &verify->failed);
	tool_json_set(object, "file", json_string(problem->file), &verify->failed);
	tool_json_set(object, "tensor", json_string(problem->name), &verify->failed);
	tool_json_set(object, "message", json_string(problem->message), &verify->failed);
	tool_json_append(verify->list, object, &verify->failed);
}

static void note_file(struct verify *verify, int code, const char *path, const char *sentence)
{
	struct tnd_error problem = {.code = code, .rank = -1, .byte_offset = TND_ERROR_NO_OFFSET};
	char *shown = tool_printable(path, strlen(path));
	const char *name = shown ? shown : "?";

	snprintf(problem.file, sizeof(problem.file), "%s", name);
	snprintf(problem.message, sizeof(problem.message), "%.500s: %s", name, sentence);
	note(verify, &problem);
	free(shown);
}

/* -- deep -- */

static void show_progress(struct verify *verify, const char *name)
{
	int64_t now_ns;
	char size[TND_SIZE_TEXT_MAX];

	if (!verify->progress)
		return;
	now_ns = tool_now_ns();
	if (name && now_ns - verify->shown_ns < INT64_C(100000000))
		return;
	verify->shown_ns = now_ns;
	fprintf(stderr, "\r\033[K");
	if (!name)
		return;
	fprintf(stderr, "%10s read  ", tnd_size_format(verify->done_bytes, size));
	tool_put_cut(stderr, name, TOOL_COLUMNS - 20);
	fflush(stderr);
}

/* 64 lower-case hexadecimal digits at the end of `path`: the digest in `digest`. */
static bool digest_in_name(const char *path, unsigned char *digest)
{
	const char *slash = strrchr(path, '/');
	const char *name = slash ? slash + 1 : path;

	if (strlen(name) != 2 * DIGEST_BYTES ||
	    strspn(name, "0123456789abcdef") != 2 * DIGEST_BYTES)
		return false;
	for (size_t i = 0; i < DIGEST_BYTES; i++) {
		char pair[3] = {name[2 * i], name[2 * i + 1], 0};

		digest[i] = (unsigned char)strtoul(pair, NULL, 16);
	}
	return true;
}

/* Return: 0, -errno, TND_E_CANCELLED. */
static int read_pieces(struct verify *verify, int fd, const char *name, EVP_MD_CTX *hash,
		       const struct tnd_cache_snapshot *cache)
{
	uint64_t offset = 0;

	for (;;) {
		ssize_t got = pread(fd, verify->buffer, CHUNK, (off_t)offset);

		if (interrupted)
			return TND_E_CANCELLED;
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return -errno;
		if (got == 0)
			return 0;
		tnd_cache_snapshot_restore_range(cache, 0, offset, (uint64_t)got);
		if (hash && EVP_DigestUpdate(hash, verify->buffer, (size_t)got) != 1)
			return -ENOMEM;
		offset += (uint64_t)got;
		verify->done_bytes += (uint64_t)got;
		show_progress(verify, name);
	}
}

/* Reads all of `fd` through `hash` (nullable). Return: 0, -errno, TND_E_CANCELLED. */
static int read_all(struct verify *verify, int fd, const char *name, EVP_MD_CTX *hash)
{
	struct tnd_cache_snapshot *cache;
	int code = tnd_cache_snapshot_create(&fd, 1, &cache);

	if (code < 0)
		return code;
	posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
	code = read_pieces(verify, fd, name, hash, cache);
	tnd_cache_snapshot_restore(cache);
	tnd_cache_snapshot_close(cache);
	return code;
}

static int read_and_compare(struct verify *verify, int fd, const char *name,
			    const unsigned char *expected)
{
	EVP_MD_CTX *hash = EVP_MD_CTX_new();
	unsigned char found[EVP_MAX_MD_SIZE];
	char sentence[2 * DIGEST_BYTES + 128], *at = sentence;
	int code = -ENOMEM;

	if (hash && EVP_DigestInit_ex(hash, EVP_sha256(), NULL) == 1)
		code = read_all(verify, fd, name, hash);
	if (code == 0 && EVP_DigestFinal_ex(hash, found, NULL) != 1)
		code = -ENOMEM;
	EVP_MD_CTX_free(hash);
	if (code != 0)
		return code;
	verify->blobs++;
	if (memcmp(found, expected, DIGEST_BYTES) == 0)
		return 0;
	at += sprintf(at, "its name is the SHA-256 that was expected, its contents have ");
	for (size_t i = 0; i < DIGEST_BYTES; i++)
		at += sprintf(at, "%02x", found[i]);
	sprintf(at, "; download it again");
	note_file(verify, TND_E_CHECKSUM, name, sentence);
	return 0;
}

/* One file, read whole. Return: 0 (problems are noted), TND_E_CANCELLED, -ENOMEM. */
static int deep_file(struct verify *verify, const char *path, const char *name)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	char *real = realpath(path, NULL);
	unsigned char digest[DIGEST_BYTES];
	struct stat st;
	int code = 0;

	if (fd < 0 || fstat(fd, &st) != 0)
		code = -errno;
	else if (S_ISREG(st.st_mode))
		code = real && digest_in_name(real, digest)
			       ? read_and_compare(verify, fd, name, digest)
			       : read_all(verify, fd, name, NULL);
	free(real);
	if (fd >= 0)
		close(fd);
	if (code == 0 || code == TND_E_CANCELLED || code == -ENOMEM)
		return code;
	note_file(verify, code, name, tnd_strerror(code));
	return 0;
}

static int is_weights(const struct dirent *entry)
{
	size_t bytes = strlen(entry->d_name);

	return bytes > 12 && strcmp(entry->d_name + bytes - 12, ".safetensors") == 0;
}

static int deep_folder(struct verify *verify)
{
	struct dirent **entries;
	int count = scandir(verify->path, &entries, is_weights, alphasort), code = 0;

	if (count < 0)
		return -errno;
	for (int i = 0; i < count; i++) {
		char *path = NULL;

		if (code == 0 && asprintf(&path, "%s/%s", verify->path, entries[i]->d_name) < 0) {
			path = NULL;
			code = -ENOMEM;
		}
		if (code == 0)
			code = deep_file(verify, path, entries[i]->d_name);
		free(path);
		free(entries[i]);
	}
	free(entries);
	return code;
}

static int deep(struct verify *verify)
{
	/* Without SA_RESTART a read on a slow disk ends at Ctrl-C. */
	struct sigaction action = {.sa_handler = on_signal};
	struct stat st;
	int code;

	verify->buffer =
		mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (verify->buffer == MAP_FAILED)
		return -ENOMEM;
	sigaction(SIGINT, &action, NULL);
	sigaction(SIGTERM, &action, NULL);
	verify->progress = isatty(STDERR_FILENO);
	if (stat(verify->path, &st) == 0 && S_ISDIR(st.st_mode))
		code = deep_folder(verify);
	else
		code = deep_file(verify, verify->path, verify->path);
	show_progress(verify, NULL);
	munmap(verify->buffer, CHUNK);
	return code;
}

/* -- the command -- */

static int print_end(struct verify *verify)
{
	char size[TND_SIZE_TEXT_MAX];
	json_t *document;

	if (verify->json) {
		document = tool_json_document("tundish.verify/1");
		tool_json_set(document, "ok", json_boolean(verify->problems == 0), &verify->failed);
		tool_json_set(document, "problems", verify->list, &verify->failed);
		verify->list = NULL;
		return tool_json_print(document, verify->failed);
	}
	if (verify->problems)
		printf("%zu problem%s\n", verify->problems, verify->problems == 1 ? "" : "s");
	else if (verify->deep)
		printf("ok: %s read, %zu file%s checked by SHA-256\n",
		       tnd_size_format(verify->done_bytes, size), verify->blobs,
		       verify->blobs == 1 ? "" : "s");
	else
		puts("ok");
	return TOOL_OK;
}

int cmd_verify(int argc, char **argv)
{
	struct verify verify = {.opts.struct_bytes = sizeof(verify.opts)};
	struct tnd_error error = {0};
	int code, status;

	tool_parse(&argp, argc, argv, &verify);
	if (verify.json) {
		verify.list = json_array();
		verify.failed = !verify.list;
	}
	code = tnd_checkpoint_check(verify.path, &verify.opts, note, &verify, &error);
	if (code >= 0 && verify.deep)
		code = deep(&verify);
	if (code < 0) {
		json_decref(verify.list);
		return tool_fail(code, &error);
	}
	status = print_end(&verify);
	return status == TOOL_OK && verify.problems ? TOOL_FOUND : status;
}
