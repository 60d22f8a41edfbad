/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tundish/plan.h - which bytes of which file a rank reads, keeps, and where they land
 *
 *   checkpoint + layout + options -> create -> look, print, load -> close
 *
 * A plan is data: computed before any read, the same for the same inputs on every rank and machine,
 * printable as JSON, and refused if it cannot fit. Exact rules: docs/design/plan.md.
 *
 * A tensor is seen as `row_count` rows of `row_bytes`; of each row `part_count` parts are kept, one
 * after the other. A tensor kept whole, or sliced along dimension 0, is one row.
 *
 *            row_bytes
 *        |<------------->|
 *        [..[part0]......]  row 0        kept, packed:  part0 of row 0, part0 of row 1, ...
 *        [..[part0]......]  row 1
 *
 * Threads: MT-safe after create.
 */
#ifndef TUNDISH_PLAN_H
#define TUNDISH_PLAN_H

#include <tundish/checkpoint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct tnd_plan;

#define TND_PHASE_ALL 0u
#define TND_PHASE_TARGET 1u
#define TND_PHASE_DRAFT 2u

/* AUTO: TUNDISH_TP_SLICE if set, else EXPERTS if ep is 1 and there are several ranks, else NONE. */
#define TND_SLICE_AUTO 0u
#define TND_SLICE_NONE 1u    /* whole tensors */
#define TND_SLICE_EXPERTS 2u /* routed experts only */
#define TND_SLICE_ALL 3u     /* the whole table of slicing rules */

#define TND_PACKING_DEFAULT 0u /* file */
#define TND_PACKING_NAME 1u
#define TND_PACKING_FILE 2u

/*
 * A tensor that cannot fit into the budget. A shared load (share.h) hands all that is larger than
 * its slabs out in pieces where PIECES is chosen.
 */
#define TND_OVERSIZE_REFUSE 0u  /* TND_E_OVERSIZE */
#define TND_OVERSIZE_PIECES 1u  /* handed out in several views */
#define TND_OVERSIZE_OVERRUN 2u /* goes alone and over the budget, counted */

#define TND_PLACEMENT_LINEAR 0u
#define TND_PLACEMENT_ROUND_ROBIN 1u

#define TND_PLAN_F_NO_EP_FILTER 1u    /* every rank has every expert (replicated or rebalanced) */
#define TND_PLAN_F_EP_SCALES_ALL 2u   /* all scales of all experts, under EP */
#define TND_PLAN_F_NO_DEFAULT_SKIP 4u /* without the built-in skip pattern of the target phase */
#define TND_PLAN_F_NAMES 8u /* `names` and `want` restrict the plan, also when name_count is 0 */

#define TND_SLAB_NONE (-1) /* a buffer for each tensor */

/* Ranks = dp x tp; ep divides them. 0 means 1 for the sizes. */
struct tnd_layout {
	uint32_t struct_bytes;
	uint32_t tp_size;
	uint32_t dp_size;
	uint32_t ep_size;
	uint32_t rank;
	uint32_t reserved;
};

struct tnd_plan_opts {
	uint32_t struct_bytes;
	uint32_t flags;     /* TND_PLAN_F_* */
	uint32_t phase;     /* TND_PHASE_* */
	uint32_t slice;     /* TND_SLICE_* */
	uint32_t packing;   /* TND_PACKING_* */
	uint32_t oversize;  /* TND_OVERSIZE_* */
	uint32_t placement; /* TND_PLACEMENT_* */
	uint32_t align;     /* 0, or a power of two up to 4096: views begin at a multiple of it */
	int64_t slab_bytes; /* or TND_SLAB_NONE; 0: TUNDISH_SLAB_MB if set, else from the budget */
	uint64_t budget_bytes;    /* of this rank; 0: tnd_budget_default(dp x tp) */
	uint64_t run_min_bytes;   /* 0: 64 KiB; runs and gaps from here up are read alone */
	uint64_t expert_count;    /* 0: from config.json */
	const char *draft_prefix; /* NULL: "mtp." */
	const char *const *skip;  /* globs over whole names, added to the built-in one */
	size_t skip_count;
	const char *const *names; /* globs; with TND_PLAN_F_NAMES nothing else is planned */
	size_t name_count;
	/* Nullable; with TND_PLAN_F_NAMES asked once for each name that no glob matches. */
	int (*want)(void *arg, const char *name, size_t name_bytes);
	void *want_arg;
	const char *rules;      /* nullable; a line for each rule: a glob and a dimension */
	const char *rules_name; /* shown in errors, nullable */
};

#define TND_PLAN_PART_MAX 3
#define TND_PLAN_NO_SLAB UINT32_MAX

#define TND_ITEM_F_ROWS 1u      /* whole rows are read and gathered; else each part is read alone */
#define TND_ITEM_F_OVERSIZED 2u /* larger than a slab: alone in a buffer of its own size */
#define TND_ITEM_F_PIECE 4u     /* one of several pieces of its tensor */
#define TND_ITEM_F_LAST 8u      /* the last piece */
#define TND_ITEM_F_REALIGN 16u  /* packing file: copied to an aligned place behind the image */

/* One delivery: a tensor's slice, or a piece of one. Items stand in delivery order. */
struct tnd_plan_item {
	const struct tnd_tensor *tensor;
	int32_t dim;          /* sliced dimension, or -1 */
	uint32_t flags;       /* TND_ITEM_F_* */
	uint64_t start;       /* first value kept along dim (first part) */
	uint64_t length;      /* values kept along dim, all parts */
	uint64_t file_offset; /* of the first row of this item (piece) */
	uint64_t row_bytes;
	uint64_t row_count; /* of this item (piece) */
	uint32_t part_count;
	uint32_t slab; /* index of its slab, TND_PLAN_NO_SLAB for zero-size tensors */
	uint64_t part_begin[TND_PLAN_PART_MAX]; /* within a row, bytes */
	uint64_t part_bytes[TND_PLAN_PART_MAX];
	uint64_t kept_bytes;   /* of this item */
	uint64_t read_bytes;   /* of this item */
	uint64_t slice_bytes;  /* kept bytes of the tensor, all pieces */
	uint64_t piece_offset; /* of this piece within the tensor's kept bytes */
	uint64_t slab_offset;  /* where the item's bytes begin in its slab once delivered */
	/*
	 * Experts kept of a fused tensor that EP cuts along dimension 0; else 0. `dim` may be
	 * another.
	 */
	uint64_t expert_start;
	uint64_t expert_length;
};

/*
 * One buffer. Packing name: items at 4 KiB boundaries. Packing file: images of file ranges, one
 * after the other, such that slab address and file offset are congruent modulo 4096; items that are
 * gathered are packed in place from the beginning of their first range on; copies for alignment lie
 * behind the images. tnd_plan_images gives the images.
 */
struct tnd_plan_slab {
	uint64_t bytes;      /* size of the buffer */
	uint64_t first_item; /* items of a slab are contiguous, but for oversized ones in between */
	uint64_t item_count; /* of this slab */
	uint64_t last_item;
	uint32_t file;
	uint32_t flags; /* TND_ITEM_F_OVERSIZED if it is one item's own buffer */
};

/*
 * A file range [file_begin, file_end) of a slab in packing file: exactly the bytes that are needed.
 * Rounded outward to 4 KiB it stays inside the slab and touches no other image.
 */
struct tnd_plan_image {
	uint64_t file_begin;
	uint64_t file_end;
	uint64_t slab_offset; /* of file_begin; congruent to it modulo 4096 */
};

struct tnd_plan_totals {
	uint32_t struct_bytes; /* set by the caller */
	uint32_t packing;      /* what DEFAULT became */
	uint32_t slice;        /* what AUTO became */
	uint32_t reserved;
	uint64_t tensors; /* delivered, zero-size ones included */
	uint64_t sliced;
	uint64_t skipped; /* left out: phase, skip, names, EP */
	uint64_t read_bytes;
	uint64_t kept_bytes;
	uint64_t items;
	uint64_t buffers;        /* that will be handed out */
	uint64_t slabs;          /* those among them that are slabs; 0 with TND_SLAB_NONE */
	uint64_t slab_bytes;     /* size limit of a slab, 0 with TND_SLAB_NONE */
	uint64_t slab_bytes_max; /* largest buffer */
	/* What every buffer of up to this size is charged; larger ones their own size. */
	uint64_t slab_capacity_bytes;
	uint64_t budget_bytes;
	uint64_t fixed_bytes;    /* metadata and I/O window: charged from open to close */
	uint64_t metadata_bytes; /* headers, tables and this plan */
	uint64_t chunk_bytes;    /* largest single read */
	uint64_t bounce_bytes;   /* all bounce buffers: part of fixed_bytes */
	uint64_t window_bytes;   /* page cache that may be in flight: part of fixed_bytes */
	uint64_t peak_bytes;     /* predicted most charged at once */
	/*
	 * Least budget with this slab size, each view released before the next is taken: with a
	 * given slab size it is enough and one byte less is refused. A smaller budget than it is
	 * given smaller default slabs. Of a union: the node's, with what its members set aside.
	 */
	uint64_t least_budget_bytes;
	uint64_t run_min_bytes; /* what 0 became */
	uint64_t shards_opened;
	uint64_t shards_skipped;
	/*
	 * Least budget that this very plan can be loaded with: fixed_bytes and the most that is
	 * alive at once. Above least_budget_bytes where a plan for that would read in smaller
	 * chunks or cut tensors.
	 */
	uint64_t needed_budget_bytes;
};

/*
 * Makes a plan. `checkpoint`: referenced until close. `layout`, `opts`: nullable, borrowed for the
 * call.
 * Blocking: never. Return: 0; TND_E_LAYOUT; TND_E_EXPERTS; TND_E_RULES; TND_E_OVERSIZE;
 * TND_E_BUDGET (least budget above the budget, or an explicit slab above it); TND_E_INVALID
 * (options); -ENOMEM; -errno (no budget given, and the machine's memory cannot be read).
 */
TND_API int tnd_plan_create(struct tnd_checkpoint *checkpoint, const struct tnd_layout *layout,
			    const struct tnd_plan_opts *opts, struct tnd_plan **ret_plan,
			    struct tnd_error *reterr);

/*
 * What some ranks of a layout, the members, need together, for the one process that reads it for
 * all of them (share.h). `members`: their ranks, each once; NULL: all of the layout; `layout->rank`
 * is not looked at. `opts` as for the members' own plans; budget_bytes is the node's (0:
 * tnd_budget_default(1)), and what the members set aside (tnd_plan_members) comes out of it.
 *
 * Items stand in the order in which the members' plans have theirs. For each tensor that any member
 * keeps there is one with the values that any of them needs, as they are in the file: nothing is
 * gathered or aligned (no TND_ITEM_F_ROWS, _REALIGN). A large one is cut into several, where no
 * member's slice that is one run is cut. Where members of one tensor need more than
 * TND_PLAN_PART_MAX ranges of a row, the smallest gaps are read too; where they need different
 * ranges of different rows, all of these rows.
 * Return: as tnd_plan_create; TND_E_LAYOUT (a member twice, or not of the layout, or too many).
 */
TND_API int tnd_plan_create_union(struct tnd_checkpoint *checkpoint,
				  const struct tnd_layout *layout, const uint32_t *members,
				  size_t member_count, const struct tnd_plan_opts *opts,
				  struct tnd_plan **ret_plan, struct tnd_error *reterr);

/* One member of a union plan. */
struct tnd_plan_member {
	uint32_t rank;
	uint32_t reserved;
	uint64_t tensors; /* that it keeps */
	uint64_t kept_bytes;
	uint64_t gathered_bytes; /* of these in slices that it has to gather or to align */
	uint64_t gather_bytes;   /* largest of these slices */
	uint64_t metadata_bytes; /* what it sets aside of the node's budget: for tables, */
	uint64_t staging_bytes;  /* and for slices while the consumer has them */
};

/* In the order of their ranks; none for other plans. Return: how many. */
TND_API size_t tnd_plan_members(const struct tnd_plan *plan,
				const struct tnd_plan_member **ret_members);

/* Drops the caller's reference. NULL is allowed. Blocking: never. */
TND_API void tnd_plan_close(struct tnd_plan *plan);

/* -- looking. Threads: MT-safe. Blocking: never. What is pointed at is borrowed until close. -- */

/* Return: 0; TND_E_INVALID (struct_bytes). */
TND_API int tnd_plan_totals(const struct tnd_plan *plan, struct tnd_plan_totals *ret_totals);

/* The layout, with its zeros filled in. */
TND_API const struct tnd_layout *tnd_plan_layout(const struct tnd_plan *plan);
TND_API struct tnd_checkpoint *tnd_plan_checkpoint(const struct tnd_plan *plan);
TND_API uint32_t tnd_plan_phase(const struct tnd_plan *plan); /* TND_PHASE_* */

TND_API const struct tnd_plan_item *tnd_plan_items(const struct tnd_plan *plan, size_t *ret_count);
TND_API const struct tnd_plan_slab *tnd_plan_slabs(const struct tnd_plan *plan, size_t *ret_count);

/* Images of slab `slab` in packing file, in file order; none in packing name. Return: how many. */
TND_API size_t tnd_plan_images(const struct tnd_plan *plan, size_t slab,
			       const struct tnd_plan_image **ret_images);

/*
 * Sentences: dimensions that do not divide, expert counts that disagree, patterns of names and skip
 * that match no tensor. Return: how many.
 */
TND_API size_t tnd_plan_warnings(const struct tnd_plan *plan, const char *const **ret_warnings);

/*
 * The item of a tensor, the first of its pieces. `name`: borrowed for the call.
 * Return: 0; TND_E_NO_TENSOR (not in the plan).
 */
TND_API int tnd_plan_find(const struct tnd_plan *plan, const char *name, size_t name_bytes,
			  size_t *ret_item);

/*
 * For a caller that narrows by itself: where values [start, start + length) of the whole tensor's
 * dimension `dim` lie in what this rank holds of it. `name`: borrowed for the call.
 * *ret_kept_offset: bytes from the beginning of the kept bytes to the first of them, in the first
 * row.
 * Return: 0; TND_E_SLICE (outside the slice held; the sentence says what is held and what was asked
 * for); TND_E_NO_TENSOR; TND_E_INVALID (a union plan).
 */
TND_API int tnd_plan_narrow(const struct tnd_plan *plan, const char *name, size_t name_bytes,
			    uint32_t dim, uint64_t start, uint64_t length,
			    uint64_t *ret_kept_offset, struct tnd_error *reterr);

/* Bytes that all ranks of the layout read together, each byte once. Return: 0. */
TND_API int tnd_plan_node_read_bytes(const struct tnd_plan *plan, uint64_t *ret_bytes);

#define TND_PLAN_JSON_F_TENSORS 1u /* each tensor's place, and each slab */

/*
 * `tundish.plan/1` (docs/format/json.md) for plans of one checkpoint, layout and phase, one a rank.
 * `plans`: borrowed for the call. *ret_text: transferred, free().
 * Return: 0; TND_E_INVALID (no plan, a union plan, plans that differ, unknown flags); -ENOMEM.
 */
TND_API int tnd_plan_json(const struct tnd_plan *const *plans, size_t plan_count, uint32_t flags,
			  char **ret_text);

#ifdef __cplusplus
}
#endif
#endif
