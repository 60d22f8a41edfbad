/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tundish/checkpoint.h - safetensors files, their index and config.json, as one table of tensors
 *
 *   open (a folder, a file, or a list of files) -> look at files and tensors -> close
 *
 * Opening reads and checks every header, strictly (docs/design/checkpoint.md), and no tensor data.
 * A descriptor is held for each file, so that a file that is replaced meanwhile is still the one
 * that was checked; nothing is mapped.
 *
 * Order: files in byte order of their shown names; tensors of a file in byte order of their names.
 * All pointers that are handed out live until the checkpoint is closed by its last user (plans and
 * loads hold it too).
 *
 * Threads: MT-safe after open. Processes: may be used after fork.
 */
#ifndef TUNDISH_CHECKPOINT_H
#define TUNDISH_CHECKPOINT_H

#include <tundish/error.h>

#ifdef __cplusplus
extern "C" {
#endif

struct tnd_checkpoint;

/* X(constant, code, name in files, bits) */
#define TND_DTYPE_TABLE(X)                             \
	X(TND_DTYPE_BOOL, 0, "BOOL", 8)                \
	X(TND_DTYPE_F4, 1, "F4", 4)                    \
	X(TND_DTYPE_F6_E2M3, 2, "F6_E2M3", 6)          \
	X(TND_DTYPE_F6_E3M2, 3, "F6_E3M2", 6)          \
	X(TND_DTYPE_U8, 4, "U8", 8)                    \
	X(TND_DTYPE_I8, 5, "I8", 8)                    \
	X(TND_DTYPE_F8_E5M2, 6, "F8_E5M2", 8)          \
	X(TND_DTYPE_F8_E4M3, 7, "F8_E4M3", 8)          \
	X(TND_DTYPE_F8_E8M0, 8, "F8_E8M0", 8)          \
	X(TND_DTYPE_F8_E4M3FNUZ, 9, "F8_E4M3FNUZ", 8)  \
	X(TND_DTYPE_F8_E5M2FNUZ, 10, "F8_E5M2FNUZ", 8) \
	X(TND_DTYPE_I16, 11, "I16", 16)                \
	X(TND_DTYPE_U16, 12, "U16", 16)                \
	X(TND_DTYPE_F16, 13, "F16", 16)                \
	X(TND_DTYPE_BF16, 14, "BF16", 16)              \
	X(TND_DTYPE_I32, 15, "I32", 32)                \
	X(TND_DTYPE_U32, 16, "U32", 32)                \
	X(TND_DTYPE_F32, 17, "F32", 32)                \
	X(TND_DTYPE_C64, 18, "C64", 64)                \
	X(TND_DTYPE_F64, 19, "F64", 64)                \
	X(TND_DTYPE_I64, 20, "I64", 64)                \
	X(TND_DTYPE_U64, 21, "U64", 64)

enum {
#define TND_DTYPE_ENUM_(constant, code, name, bits) constant = code,
	TND_DTYPE_TABLE(TND_DTYPE_ENUM_)
#undef TND_DTYPE_ENUM_
		TND_DTYPE_COUNT = 22
};

/* Name in files ("BF16"), or NULL for an unknown code. */
TND_API const char *tnd_dtype_name(uint32_t dtype);
/* Bits of one value, 0 for an unknown code. */
TND_API uint32_t tnd_dtype_bits(uint32_t dtype);

#define TND_CHECKPOINT_F_IGNORE_INDEX 1u   /* all *.safetensors of the folder, no index is read */
#define TND_CHECKPOINT_F_ALLOW_TRAILING 2u /* bytes after the data are let pass */

#define TND_CHECKPOINT_MAX_HEADER_BYTES UINT64_C(100000000)

struct tnd_checkpoint_opts {
	uint32_t struct_bytes;
	uint32_t flags;            /* TND_CHECKPOINT_F_* */
	uint64_t max_header_bytes; /* 0: TND_CHECKPOINT_MAX_HEADER_BYTES */
};

/* `name`: unescaped UTF-8, name_bytes long and a NUL after it; may contain NULs. */
struct tnd_tensor {
	const char *name;
	const uint64_t *shape; /* dim_count values; logical values for sub-byte types */
	uint64_t offset;       /* of the data in the file, from the file's first byte */
	uint64_t bytes;
	uint32_t name_bytes;
	uint32_t dim_count;
	uint32_t dtype; /* TND_DTYPE_* */
	uint32_t file;  /* index of its file */
};

struct tnd_metadata {
	const char *key;
	const char *value;
	uint32_t key_bytes;
	uint32_t value_bytes;
};

struct tnd_file {
	const char *name; /* as shown: relative to the folder that was opened, or the path given */
	const char *path; /* as opened */
	int32_t fd;       /* open for reading, owned by the checkpoint */
	uint32_t flags;   /* 0 */
	uint64_t bytes;
	uint64_t header_bytes;               /* 8 + n: where the data begins */
	uint64_t first_tensor;               /* index into the tensors */
	uint64_t tensor_count;               /* 0 for a file that the index leaves out entirely */
	uint64_t skipped_count;              /* in the file but not its by the index */
	const struct tnd_metadata *metadata; /* __metadata__, in file order */
	uint64_t metadata_count;
};

/*
 * Opens a folder or one file. `path`, `opts` (nullable): borrowed for the call.
 * Blocking: bounded (reads headers).
 * Return: 0; -errno of open, fstat or read;
 * TND_E_NOT_SAFETENSORS, _HEADER_SIZE, _FORMAT, _DTYPE, _DUPLICATE, _OFFSETS, _SHAPE, _TRUNCATED,
 * _TRAILING, _INDEX, _CONFIG, _INVALID; -ENOMEM, -EMFILE.
 */
TND_API int tnd_checkpoint_open(const char *path, const struct tnd_checkpoint_opts *opts,
				struct tnd_checkpoint **ret_checkpoint, struct tnd_error *reterr);

/*
 * Opens a list of files as one checkpoint, in byte order of the paths; no index is read. Return: as
 * above.
 */
TND_API int tnd_checkpoint_open_files(const char *const *paths, size_t path_count,
				      const struct tnd_checkpoint_opts *opts,
				      struct tnd_checkpoint **ret_checkpoint,
				      struct tnd_error *reterr);

/* Drops the caller's reference. NULL is allowed. Blocking: never. */
TND_API void tnd_checkpoint_close(struct tnd_checkpoint *checkpoint);

/* All files, and all tensors. Blocking: never. Return: an array, borrowed until close. */
TND_API const struct tnd_file *tnd_checkpoint_files(const struct tnd_checkpoint *checkpoint,
						    size_t *ret_count);
TND_API const struct tnd_tensor *tnd_checkpoint_tensors(const struct tnd_checkpoint *checkpoint,
							size_t *ret_count);

/*
 * One tensor. `name`: `name_bytes` long, borrowed for the call. *ret_tensor: borrowed until close.
 * Blocking: never. Return: 0; TND_E_NO_TENSOR.
 */
TND_API int tnd_checkpoint_find(const struct tnd_checkpoint *checkpoint, const char *name,
				size_t name_bytes, const struct tnd_tensor **ret_tensor);

#define TND_EXPERTS_UNKNOWN UINT64_MAX

/*
 * Expert counts of config.json, TND_EXPERTS_UNKNOWN where it has none. *ret_draft_count (nullable):
 * the draft stack's. Blocking: never. Return: the target stack's.
 */
TND_API uint64_t tnd_checkpoint_experts(const struct tnd_checkpoint *checkpoint,
					uint64_t *ret_draft_count);

/*
 * Warnings that opening gave (a file that the index leaves out, an unreadable config): sentences,
 * borrowed until close. Blocking: never. Return: their number.
 */
TND_API size_t tnd_checkpoint_warnings(const struct tnd_checkpoint *checkpoint,
				       const char *const **ret_warnings);

/*
 * Model facts of config.json that slicing needs, looked up as the expert counts are; 0 where
 * absent. Named as there, but for num_attention_heads and num_key_value_heads.
 */
struct tnd_model_facts {
	uint32_t struct_bytes; /* set by the caller */
	uint32_t reserved;
	uint64_t head_count;
	uint64_t kv_head_count;
	uint64_t head_dim;
	uint64_t hidden_size;
	uint64_t vocab_size;
	uint64_t intermediate_size;
	uint64_t moe_intermediate_size;
};

/* Blocking: never. Return: 0; TND_E_INVALID (struct_bytes). */
TND_API int tnd_checkpoint_facts(const struct tnd_checkpoint *checkpoint,
				 struct tnd_model_facts *ret_facts);

/* Host memory that this checkpoint's tables take, bytes. Blocking: never. */
TND_API uint64_t tnd_checkpoint_memory_bytes(const struct tnd_checkpoint *checkpoint);

/* `problem`: borrowed for the call. */
typedef void (*tnd_problem_fn)(void *arg, const struct tnd_error *problem);

/*
 * Checks everything that opening checks but goes on after a problem, calling `fn` (nullable) for
 * each. `path`, `opts` (nullable), `arg`: borrowed for the call.
 * Blocking: bounded (reads headers).
 * Return: number of problems (0: fine); TND_E_INVALID (options); -ENOMEM; -errno where `path`
 * itself cannot be looked at.
 */
TND_API int tnd_checkpoint_check(const char *path, const struct tnd_checkpoint_opts *opts,
				 tnd_problem_fn fn, void *arg, struct tnd_error *reterr);

#ifdef __cplusplus
}
#endif
#endif
