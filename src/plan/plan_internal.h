/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_internal.h - inside of the plan layer, and what the load needs of it
 *
 *   names.c      each name once, rank independent: draft, skipped, wanted, expert number, role
 *   rules.c      role + layout -> ranges of values along one dimension
 *   rules_text.c the caller's own rules
 *   experts.c    counts, checks, who owns which expert
 *   shape.c      ranges -> rows and parts in bytes: an item
 *   union.c      the items of several ranks -> one: what is read for all of them
 *   cuts.c       large ones of these, cut
 *   members.c    what the reader of a union and its members both work out
 *   pack_name.c, pack_file.c   items -> slabs
 *   pieces.c     items that cannot fit -> pieces
 *   plan_budget.c   what it costs
 *   plan_fit.c   slab size and cuts with which it fits
 *   rest.c       a plan without some of its items
 */
#ifndef TND_PLAN_INTERNAL_H
#define TND_PLAN_INTERNAL_H

#include <tundish/host.h>
#include <tundish/plan.h>

#include "base/base.h"

#define TND__NO_INDEX UINT32_MAX
/* What the channel of a node's reader takes (load/stream.h), whatever is sent on it. */
#define TND__RING_BYTES TND__KIB(320)

/* What a tensor is in the model: which rule slices it. */
enum tnd__role {
	TND__ROLE_WHOLE,
	TND__ROLE_VOCAB,   /* embed_tokens, lm_head */
	TND__ROLE_Q,       /* q_proj, q_b_proj, kv_b_proj: query heads */
	TND__ROLE_KV,      /* k_proj, v_proj */
	TND__ROLE_QKV,     /* q, k and v one after the other */
	TND__ROLE_O,       /* o_proj: columns, by heads */
	TND__ROLE_COLUMN,  /* gate_proj, up_proj, w1, w3 */
	TND__ROLE_GATE_UP, /* both halves one after the other */
	TND__ROLE_ROW,     /* down_proj, w2 */
	TND__ROLE_USER,    /* a caller's rule */
	TND__ROLE_COUNT
};

/* Which tensor of its module it is. */
enum tnd__leaf {
	TND__LEAF_OTHER,      /* whole: input_scale, weight_shape, ... */
	TND__LEAF_WEIGHT,     /* out x in */
	TND__LEAF_BIAS,       /* out */
	TND__LEAF_TRANSPOSED, /* GPTQ and AWQ: in x out */
	TND__LEAF_FOLLOW,     /* scales and zero points: as their weight */
	TND__LEAF_MXFP4,      /* gpt-oss blocks and scales: gate and up interleaved */
};

#define TND__NAME_F_DRAFT 1u
#define TND__NAME_F_LEFT_OUT 2u /* a skip pattern, or not among the names asked for */
#define TND__NAME_F_FUSED 4u    /* all experts in one tensor, dimension 0 the expert */
#define TND__NAME_F_SCALE 8u
#define TND__NAME_F_ONE_SCALE 16u /* of a whole tensor: kept of every expert */
#define TND__NAME_F_INVERSE 32u   /* weight_scale_inv: blocks of 128 come first */

/* One a tensor of the checkpoint. */
struct tnd__name {
	uint32_t
		partner; /* weight that a scale follows, bias of a fused weight, blocks of a bias */
	uint32_t expert; /* number of the routed expert, or TND__NO_INDEX */
	uint32_t rule;   /* caller's rule + 1, 0: none */
	uint8_t role, leaf, flags, reserved;
};
_Static_assert(sizeof(struct tnd__name) == 16, "100,000 names: 1.6 MB");

struct tnd__rule {
	char *glob;
	int32_t dim; /* negative: from the end */
	bool whole;
	bool literal;
	size_t glob_bytes;
};
struct tnd__user_rules {
	struct tnd__rule *items;
	size_t count, capacity;
};
int tnd__user_rules_parse(const char *text, const char *shown, struct tnd__user_rules *ret_rules,
			  struct tnd_error *reterr);
void tnd__user_rules_free(struct tnd__user_rules *rules);

/* Values kept along one dimension; dim -1: all. */
struct tnd__ranges {
	int32_t dim;
	uint32_t count;
	uint64_t start[TND_PLAN_PART_MAX];
	uint64_t length[TND_PLAN_PART_MAX];
};

/* Why a tensor that a rule would slice is read whole. */
enum tnd__reason {
	TND__REASON_NONE,
	TND__REASON_UNEVEN,
	TND__REASON_HEADS,
	TND__REASON_SHAPE,
	TND__REASON_BLOCKS,
	TND__REASON_BYTES,
	TND__REASON_ROUND_ROBIN,
	TND__REASON_GUESS, /* sliced, but on a guess of the head count */
	TND__REASON_COUNT
};

struct tnd__miss {
	uint64_t count;
	uint32_t first; /* tensor */
};

/* All that slicing needs. */
struct tnd__slicer {
	const struct tnd_tensor *tensors;
	struct tnd__name *names;
	size_t count;
	struct tnd__user_rules rules;
	struct tnd_model_facts facts;
	uint32_t policy; /* TND_SLICE_NONE, _EXPERTS, _ALL */
	uint32_t phase;
	uint32_t tp_rank, tp_size;
	uint32_t moe_rank, moe_size;
	uint32_t ep_rank, ep_size; /* ep_size 1 without a filter */
	uint32_t placement;
	bool all_scales;
	uint64_t experts[2]; /* target's, draft's; TND_EXPERTS_UNKNOWN */
	uint64_t run_min_bytes;
	uint32_t hint; /* where the last partner was found */
	bool quiet;    /* misses are not counted: another rank's look at the same tensor */
	struct tnd__miss misses[TND__ROLE_COUNT][TND__REASON_COUNT];
};

/* What the options became. */
struct tnd__plan_choice {
	uint32_t packing, oversize;
	uint64_t align;
	uint64_t budget_bytes;
	uint64_t slab_bytes; /* 0: a buffer per tensor */
	bool slab_given;
	bool of_union; /* of several ranks: as in the file, and with what they set aside */
};

struct tnd_plan {
	_Atomic uint32_t references;
	struct tnd_checkpoint *checkpoint;
	struct tnd_layout layout;
	uint32_t phase;
	struct tnd__plan_choice choice;
	struct tnd_plan_totals totals;
	struct tnd_plan_item *items;
	size_t item_count, item_capacity;
	struct tnd_plan_slab *slabs;
	size_t slab_count, slab_capacity;
	struct tnd_plan_image *images;
	size_t image_count, image_capacity;
	size_t *image_first; /* slab_count + 1 entries, packing file */
	size_t image_first_capacity;
	uint32_t *first_item; /* of each tensor of the checkpoint, or TND__NO_INDEX */
	size_t tensor_count;
	uint64_t node_read_bytes;
	struct tnd__sentences warnings;
	struct tnd_plan_member *members; /* of a union, by rank */
	size_t member_count;
	uint64_t kin;
	uint64_t node_budget_bytes; /* of a union: with what its members set aside */
};

/* -- allocation: zeroed, passes the failpoint plan.alloc -- */
void *tnd__plan_alloc(size_t count, size_t bytes);
int tnd__plan_reserve(void *array_pointer, size_t *capacity, size_t need, size_t element_bytes);

/* -- names.c -- */
/* Warns of each pattern of the options that no name matches. Return: 0, -ENOMEM. */
int tnd__names_classify(struct tnd__slicer *slicer, const struct tnd_checkpoint *checkpoint,
			const struct tnd_plan_opts *opts, struct tnd__sentences *warnings);

/* -- rules.c -- */
/* Ranges of tensor `index` for this rank. Return: why it is whole, or NONE. */
enum tnd__reason tnd__rules_ranges(const struct tnd__slicer *slicer, uint32_t index,
				   struct tnd__ranges *ret_ranges);

/* -- experts.c -- */
int tnd__experts_check(const struct tnd__slicer *slicer, const struct tnd_checkpoint *checkpoint,
		       bool given, struct tnd__sentences *warnings, struct tnd_error *reterr);
/*
 * Block [*ret_first, *ret_first + *ret_count) of `count` experts that part `index` of `parts` owns,
 * linear.
 */
void tnd__experts_block(uint64_t count, uint32_t parts, uint32_t index, uint64_t *ret_first,
			uint64_t *ret_count);
/* True if this rank reads the tensor (phase, names, ownership). */
bool tnd__experts_keeps(const struct tnd__slicer *slicer, uint32_t index);
/* True if some rank of the layout reads it. */
bool tnd__experts_planned(const struct tnd__slicer *slicer, uint32_t index);

/* -- shape.c -- */
/*
 * Fills an item for tensor `index`: extents and bytes, not the slab. Counts what had to stay whole.
 */
void tnd__shape_item(struct tnd__slicer *slicer, uint32_t index, struct tnd_plan_item *ret_item);
/* kept_bytes and read_bytes from rows, parts and F_ROWS. */
void tnd__shape_sum(struct tnd_plan_item *item);
/* The whole tensor: dim and rows, not the sums. */
void tnd__shape_whole(const struct tnd_tensor *tensor, struct tnd_plan_item *item);
/* True if every run and the gap behind it, if any, are long enough to be read alone. */
bool tnd__shape_runs_alone(const struct tnd_plan_item *item, uint64_t run_min_bytes);
/* Bits of the dimensions from `from` on. */
uint64_t tnd__shape_span_bits(const struct tnd_tensor *tensor, uint32_t from);
int tnd__shape_warnings(const struct tnd__slicer *slicer, struct tnd__sentences *warnings);

/* -- plan.c -- */
/* Tensors in the order in which a plan has them; `order` is in that of the checkpoint. */
void tnd__plan_sort(const struct tnd_plan *plan, const struct tnd__slicer *slicer, uint32_t *order,
		    size_t count);

/* -- union.c -- */
/* Items of all members, and what each of these keeps. Return: 0, -ENOMEM. */
int tnd__union_items(struct tnd_plan *plan, struct tnd__slicer *slicer);

/* -- cuts.c -- */
/* tnd__plan_fit() for a union, its large items cut. */
int tnd__union_fit(struct tnd_plan *plan, struct tnd__slicer *slicer, struct tnd_error *reterr);

/* -- members.c -- */
/* Checks and sorts; NULL: all of the layout. Return: 0, TND_E_LAYOUT, -ENOMEM. */
int tnd__members_take(struct tnd_plan *plan, const uint32_t *members, size_t member_count,
		      struct tnd_error *reterr);
/* Sets `kin`: once names are known. `flags`: of the options. Return: 0, -ENOMEM. */
int tnd__members_kin(struct tnd_plan *plan, const struct tnd__slicer *slicer, uint32_t flags);
/* Takes what the members set aside off the budget. */
void tnd__members_set_aside(struct tnd_plan *plan);
/* Least budget of the node with which the reader's is `bytes`. */
uint64_t tnd__members_least(const struct tnd_plan *plan, uint64_t bytes);
/* The item's kept bytes as one run of the file. Return: false if they are none. */
bool tnd__plan_one_run(const struct tnd_plan_item *item, uint64_t *ret_begin, uint64_t *ret_end);
/* Counts a whole slice for a member. */
void tnd__members_count(const struct tnd_plan *plan, const struct tnd_plan_item *item,
			struct tnd_plan_member *member);

/* -- plan_options.c -- */
/* The slicer looks for this rank of the layout. */
void tnd__slicer_rank(struct tnd__slicer *slicer, uint32_t rank);
int tnd__plan_options(const struct tnd_layout *layout, const struct tnd_plan_opts *opts,
		      struct tnd_plan *plan, struct tnd__slicer *slicer, struct tnd_error *reterr);

/* -- packing -- */
int tnd__pack_name(struct tnd_plan *plan);
int tnd__pack_file(struct tnd_plan *plan);

/* What one item comes to, whole or in pieces. */
struct tnd__pieces_sum {
	uint64_t pieces, images;
	uint64_t largest; /* buffer, without rounding in packing name */
};
/* The item in a buffer of its own. */
struct tnd__pieces_sum tnd__pack_alone(const struct tnd_plan *plan,
				       const struct tnd_plan_item *item);

/* -- pieces.c -- */
/*
 * Cuts the oversized items of an uncut, packed plan whose buffers are larger than `cut_above`: the
 * slab size or more, at least 1 MiB. Must be packed again. Return: 0; -ENOMEM.
 */
int tnd__pieces_cut(struct tnd_plan *plan, uint64_t cut_above);
/* What that would make of one item. */
void tnd__pieces_count(const struct tnd_plan *plan, const struct tnd_plan_item *item,
		       uint64_t cut_above, struct tnd__pieces_sum *ret_sum);

/* -- plan_budget.c -- */
struct tnd__plan_need {
	uint64_t items, slabs, images;
	uint64_t metadata;
	uint64_t least_fixed;            /* metadata and the smallest window */
	uint64_t alive;                  /* most alive at once: */
	uint64_t alive_slab, alive_item; /* an open slab, and an oversized item's buffer */
	size_t item;                     /* when */
};
/* What a packed plan needs, with all above `cut_above` in pieces; UINT64_MAX: as it is. */
struct tnd__plan_need tnd__plan_need(const struct tnd_plan *plan, uint64_t cut_above);
/* Sets the totals of fixed costs: with the window for the budget, or the largest that fits. */
void tnd__plan_fixed(struct tnd_plan *plan, const struct tnd__plan_need *need, bool whole_window);
uint64_t tnd__plan_charge(const struct tnd_plan *plan, const struct tnd_plan_slab *slab);
/* True if the item alone (in packing name beside an open slab) is beyond the budget. */
bool tnd__plan_beyond(const struct tnd_plan *plan, const struct tnd_plan_item *item);

/* -- plan_fit.c -- */
/* Packs, cuts, chooses the slab size, fills totals. */
int tnd__plan_fit(struct tnd_plan *plan, struct tnd_error *reterr);

static inline uint64_t tnd__power_below(uint64_t value)
{
	return value ? UINT64_C(1) << (63 - __builtin_clzll(value)) : 0;
}

/* -- for the load -- */

/*
 * Of everything that decides what the ranks of a layout need, the rank and the budget left out: a
 * rank's plan and a union plan with the same value come of the same inputs.
 */
uint64_t tnd__plan_kin(const struct tnd_plan *plan);

/*
 * Whether a member must make a copy of the item's bytes, out of what was read as it is in the file:
 * its kept bytes are not one run there, or do not begin where the plan's alignment wants them.
 */
bool tnd__plan_gathers(const struct tnd_plan *plan, const struct tnd_plan_item *item);

/*
 * What a member sets aside, from figures that both sides have: `member` gives tensors and
 * gather_bytes, the rest is filled in. `plan`: the member's own, or the union.
 * Staging: room for two of the largest slices, at least 16 MiB; but no more than a share of an
 * eighth of the node's budget, unless one slice that must not be cut needs it.
 */
void tnd__plan_set_aside(const struct tnd_plan *plan, uint32_t member_count, uint64_t node_bytes,
			 struct tnd_plan_member *member);

/*
 * The same from a member's own plan: all of `ret_member`, as the union has it. Slices that the plan
 * has in pieces count whole.
 */
void tnd__plan_as_member(const struct tnd_plan *plan, uint32_t member_count, uint64_t node_bytes,
			 struct tnd_plan_member *ret_member);

/*
 * The plan without the items whose bits are set in `taken`, for the same budget: each stays where
 * it is in its slab, and slabs without any are left out. *ret_map: of each item its index in
 * `plan`; transferred, free(). Return: 0; -ENOMEM.
 */
int tnd__plan_rest(const struct tnd_plan *plan, const unsigned char *taken,
		   struct tnd_plan **ret_rest, size_t **ret_map);
/* Most that its tables and the map take, and `taken`. */
uint64_t tnd__plan_rest_bytes(const struct tnd_plan *plan);

/* A union's budget with what its members set aside; another plan's own. */
uint64_t tnd__plan_node_budget(const struct tnd_plan *plan);

/* A file's name as a JSON string; it need not be UTF-8. Return: a new reference, or NULL. */
struct json_t *tnd__plan_json_name(const char *name);

/* Another user of the plan; tnd_plan_close() drops one. */
void tnd__plan_ref(struct tnd_plan *plan);

/*
 * The file ranges that are read for an item: all its rows as one (F_ROWS), else each part of each
 * row, in file order. An item without bytes has none.
 */
uint64_t tnd__plan_item_range_count(const struct tnd_plan_item *item);
void tnd__plan_item_range(const struct tnd_plan_item *item, uint64_t k, uint64_t *ret_begin,
			  uint64_t *ret_end);

/*
 * Packing file: slab offset of a byte of the file that lies in one of the slab's images; UINT64_MAX
 * if it lies in none. For an item with TND_ITEM_F_REALIGN the bytes are read to the place of the
 * beginning of its range 0, and copied from there to slab_offset.
 */
uint64_t tnd__plan_image_place(const struct tnd_plan *plan, size_t slab, uint64_t file_offset);

#endif
