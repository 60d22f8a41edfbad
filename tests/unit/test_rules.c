/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_rules.c - every row of the table of slicing rules, with numbers
 *
 * What could break: a rank gets wrong rows or columns, a scale that does not match its weight, a byte that no rank reads, a tensor cut where it
 * does not divide. The table below gives what one rank keeps of each kind of tensor; a second test marks, byte by byte, what all ranks keep of
 * every tensor together and fails on a hole (or on an overlap where nothing is shared).
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "plan/plan_internal.h"
#include "support/planning.h"
#include "support/shapes.h"

/* 8 query heads and 2 key heads of 16, hidden 128. Expected of rank 3 of 4, policy all. */
static const struct expected {
	const char *name, *dtype, *shape;
	int dim;
	uint64_t start, length, kept_bytes, read_bytes;
	unsigned parts;
} table[] = {
	{"model.embed_tokens.weight", "BF16", "1000,128", 0, 768, 232, 59392, 59392, 1},
	{"lm_head.weight", "BF16", "1024,128", 0, 768, 256, 65536, 65536, 1},
	{"model.layers.0.self_attn.q_proj.weight", "BF16", "128,128", 0, 96, 32, 8192, 8192, 1},
	{"model.layers.0.self_attn.q_proj.bias", "BF16", "128", 0, 96, 32, 64, 64, 1},
	/* 2 key heads on 4 ranks: rank 3 has head 1, as rank 2 has. */
	{"model.layers.0.self_attn.k_proj.weight", "BF16", "32,128", 0, 16, 16, 4096, 4096, 1},
	{"model.layers.0.self_attn.v_proj.bias", "BF16", "32", 0, 16, 16, 32, 32, 1},
	{"model.layers.0.self_attn.qkv_proj.weight", "BF16", "192,128", 0, 96, 64, 16384, 16384, 3},
	{"model.layers.0.self_attn.o_proj.weight", "BF16", "128,128", 1, 96, 32, 8192, 32768, 1},
	{"model.layers.0.self_attn.o_proj.bias", "BF16", "128", -1, 0, 0, 256, 256, 1},
	{"model.layers.0.self_attn.q_a_proj.weight", "BF16", "64,128", -1, 0, 0, 16384, 16384, 1},
	{"model.layers.0.self_attn.q_b_proj.weight", "BF16", "192,64", 0, 144, 48, 6144, 6144, 1},
	{"model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "BF16", "72,128", -1, 0, 0, 18432,
	 18432, 1},
	{"model.layers.0.self_attn.kv_b_proj.weight", "BF16", "256,64", 0, 192, 64, 8192, 8192, 1},
	{"model.layers.0.input_layernorm.weight", "BF16", "128", -1, 0, 0, 256, 256, 1},
	{"model.layers.0.mlp.gate.weight", "BF16", "8,128", -1, 0, 0, 2048, 2048, 1},
	{"model.layers.0.mlp.gate.e_score_correction_bias", "F32", "8", -1, 0, 0, 32, 32, 1},
	{"model.layers.0.mlp.gate_proj.weight", "F32", "256,128", 0, 192, 64, 32768, 32768, 1},
	{"model.layers.0.mlp.gate_proj.bias", "F32", "256", 0, 192, 64, 256, 256, 1},
	{"model.layers.0.mlp.gate_up_proj.weight", "F32", "512,128", 0, 192, 128, 65536, 65536, 2},
	{"model.layers.0.mlp.down_proj.weight", "F32", "128,256", 1, 192, 64, 32768, 131072, 1},
	{"model.layers.0.mlp.down_proj.bias", "F32", "128", -1, 0, 0, 512, 512, 1},
	{"model.layers.0.mlp.shared_experts.up_proj.weight", "BF16", "64,128", 0, 48, 16, 4096,
	 4096, 1},
	/* fp8, blocks of 128: 576 rows of which [432, 576) touch blocks 3 and 4 of 5; 640 columns, [480, 640): blocks 3 and 4. */
	{"model.layers.1.mlp.up_proj.weight", "F8_E4M3", "576,512", 0, 432, 144, 73728, 73728, 1},
	{"model.layers.1.mlp.up_proj.weight_scale_inv", "F32", "5,4", 0, 3, 2, 32, 32, 1},
	{"model.layers.1.mlp.down_proj.weight", "F8_E4M3", "512,640", 1, 480, 160, 81920, 327680,
	 1},
	{"model.layers.1.mlp.down_proj.weight_scale_inv", "F32", "4,5", 1, 3, 2, 32, 80, 1},
	{"model.layers.1.mlp.gate_up_proj.weight", "F8_E4M3", "1024,256", 0, 384, 256, 65536, 65536,
	 2},
	{"model.layers.1.mlp.gate_up_proj.weight_scale_inv", "F32", "8,2", 0, 3, 2, 16, 16, 2},
	/* Group scales: rows of the weight; columns / 16. */
	{"model.layers.2.mlp.experts.0.w1.weight", "I8", "64,128", 0, 48, 16, 2048, 2048, 1},
	{"model.layers.2.mlp.experts.0.w1.scale", "F8_E8M0", "64,8", 0, 48, 16, 128, 128, 1},
	{"model.layers.2.mlp.experts.0.w2.weight", "I8", "128,64", 1, 48, 16, 2048, 8192, 1},
	{"model.layers.2.mlp.experts.0.w2.scale", "F8_E8M0", "128,4", 1, 3, 1, 128, 512, 1},
	{"model.layers.2.mlp.experts.0.w2.input_scale", "F32", "", -1, 0, 0, 4, 4, 1},
	{"model.layers.2.mlp.experts.0.w2.weight_scale_2", "F32", "1", -1, 0, 0, 4, 4, 1},
	/* One scale a row: whole where columns are cut. */
	{"model.layers.3.mlp.down_proj.weight", "I8", "128,64", 1, 48, 16, 2048, 8192, 1},
	{"model.layers.3.mlp.down_proj.weight_scale", "F32", "128,1", -1, 0, 0, 512, 512, 1},
	{"model.layers.3.mlp.up_proj.weight", "I8", "64,128", 0, 48, 16, 2048, 2048, 1},
	{"model.layers.3.mlp.up_proj.weight_scale", "F32", "64,1", 0, 48, 16, 64, 64, 1},
	/* GPTQ: [in/8, out]; AWQ: [in, out/8]. */
	{"model.layers.4.mlp.up_proj.qweight", "I32", "16,64", 1, 48, 16, 1024, 4096, 1},
	{"model.layers.4.mlp.up_proj.qzeros", "I32", "4,8", 1, 6, 2, 32, 128, 1},
	{"model.layers.4.mlp.up_proj.scales", "F16", "4,64", 1, 48, 16, 128, 512, 1},
	{"model.layers.4.mlp.up_proj.g_idx", "I32", "128", -1, 0, 0, 512, 512, 1},
	{"model.layers.4.mlp.down_proj.qweight", "I32", "8,128", 0, 6, 2, 1024, 1024, 1},
	{"model.layers.4.mlp.down_proj.qzeros", "I32", "4,16", 0, 3, 1, 64, 64, 1},
	{"model.layers.4.mlp.down_proj.scales", "F16", "4,128", 0, 3, 1, 256, 256, 1},
	{"model.layers.4.mlp.down_proj.g_idx", "I32", "64", 0, 48, 16, 64, 64, 1},
	{"model.layers.5.self_attn.q_proj.qweight", "I32", "128,16", 1, 12, 4, 2048, 8192, 1},
	{"model.layers.5.self_attn.q_proj.scales", "F16", "4,128", 1, 96, 32, 256, 1024, 1},
	/* gpt-oss: I = 160 in 5 blocks of 32, 2 blocks a rank: [0,64) [64,128) [128,160) and nothing. */
	{"model.layers.6.mlp.experts.gate_up_proj_blocks", "U8", "4,320,4,16", 1, 320, 0, 0, 0, 1},
	{"model.layers.6.mlp.experts.gate_up_proj_scales", "U8", "4,320,4", 1, 320, 0, 0, 0, 1},
	{"model.layers.6.mlp.experts.gate_up_proj_bias", "BF16", "4,320", 1, 320, 0, 0, 0, 1},
	{"model.layers.6.mlp.experts.down_proj_blocks", "U8", "4,128,5,16", 2, 5, 0, 0, 0, 1},
	{"model.layers.6.mlp.experts.down_proj_scales", "U8", "4,128,5", 2, 5, 0, 0, 0, 1},
	{"model.layers.6.mlp.experts.down_proj_bias", "BF16", "4,128", -1, 0, 0, 1024, 1024, 1},
	/* Fused without blocks, both ways round. */
	{"model.layers.7.mlp.experts.gate_up_proj", "BF16", "4,64,128", 1, 24, 16, 16384, 65536, 2},
	{"model.layers.7.mlp.experts.down_proj", "BF16", "4,128,32", 2, 24, 8, 8192, 32768, 1},
	{"model.layers.8.mlp.experts.gate_up_proj", "BF16", "4,128,64", 2, 24, 16, 16384, 65536, 2},
	{"model.layers.8.mlp.experts.down_proj", "BF16", "4,32,128", 1, 24, 8, 8192, 32768, 1},
	/* Values smaller than a byte. */
	{"model.layers.9.mlp.up_proj.weight", "F4", "64,128", 0, 48, 16, 1024, 1024, 1},
	{"model.layers.9.mlp.down_proj.weight", "F4", "128,64", 1, 48, 16, 1024, 4096, 1},
	{"model.layers.10.mlp.down_proj.weight", "F4", "128,4", -1, 0, 0, 256, 256, 1},
	/* What does not divide is whole. */
	{"model.layers.11.mlp.up_proj.weight", "BF16", "66,128", -1, 0, 0, 16896, 16896, 1},
	{"model.layers.11.mlp.up_proj.weight_scale", "F32", "66,1", -1, 0, 0, 264, 264, 1},
	{"model.layers.11.self_attn.k_proj.weight", "BF16", "33,128", -1, 0, 0, 8448, 8448, 1},
	{"model.layers.11.mlp.up_proj.unknown", "BF16", "64,128", -1, 0, 0, 16384, 16384, 1},
	{"model.layers.11.mlp.up_proj.input_scale", "F32", "4", -1, 0, 0, 16, 16, 1},
	{"model.layers.12.mlp.up_proj.weight", "BF16", "0,128", -1, 0, 0, 0, 0, 1},
};
#define TABLE_COUNT (sizeof(table) / sizeof(*table))

static const char config[] = "{\"num_attention_heads\":8,\"num_key_value_heads\":2,\"head_dim\":16,"
			     "\"hidden_size\":128,\"num_experts\":4}";

static struct shapes *folder;
static struct tnd_checkpoint *checkpoint;

static int set_up(void **state)
{
	(void)state;
	unsetenv("TUNDISH_TP_SLICE");
	unsetenv("TUNDISH_SLAB_MB");
	folder = shapes_folder();
	shapes_config(folder, config);
	shapes_begin(folder, "model.safetensors");
	for (size_t i = 0; i < TABLE_COUNT; i++)
		shapes_add(folder, table[i].dtype, table[i].shape, "%s", table[i].name);
	shapes_end(folder);
	checkpoint = planning_open(shapes_path(folder));
	return 0;
}

static int tear_down(void **state)
{
	(void)state;
	tnd_checkpoint_close(checkpoint);
	shapes_remove(folder);
	return 0;
}

static struct tnd_plan *plan_all(uint32_t tp, uint32_t ep, uint32_t rank, uint32_t slice)
{
	struct tnd_layout layout = planning_layout(tp, 1, ep, rank);
	struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, slice, TND_PACKING_NAME);

	return planning_make(checkpoint, &layout, &opts);
}

#define EQUAL(row, what, found, wanted)                                                  \
	do {                                                                             \
		if ((uint64_t)(found) != (uint64_t)(wanted))                             \
			fail_msg("%s: %s: expected %lld, found %lld", (row)->name, what, \
				 (long long)(wanted), (long long)(found));               \
	} while (0)

static void rows_of_the_table(void **state)
{
	struct tnd_plan *plan = plan_all(4, 1, 3, TND_SLICE_ALL);

	(void)state;
	for (size_t i = 0; i < TABLE_COUNT; i++) {
		const struct expected *row = &table[i];
		const struct tnd_plan_item *item = planning_item(plan, row->name);

		assert_non_null(item);
		EQUAL(row, "dim", item->dim, row->dim);
		EQUAL(row, "start", item->start, row->start);
		EQUAL(row, "length", item->length, row->length);
		EQUAL(row, "kept", item->kept_bytes, row->kept_bytes);
		EQUAL(row, "read", item->read_bytes, row->read_bytes);
		EQUAL(row, "parts", item->part_count, row->parts);
	}
	/* One sentence a kind, with the number of tensors. */
	assert_true(planning_warned(plan, "1 tensors of gate and up projections read whole"));
	assert_true(planning_warned(plan, "1 tensors of key and value heads read whole"));
	assert_true(planning_warned(plan, "begin or end inside a byte"));
	tnd_plan_close(plan);
}

static void shared_and_short(void **state)
{
	/* rank 2 has the short block: s = 128, e = 160. */
	struct tnd_plan *plan = plan_all(4, 1, 2, TND_SLICE_ALL);
	const struct tnd_plan_item *item;

	(void)state;
	/* Neighbours share a key head: ranks 0 and 1 the first, 2 and 3 the second. */
	item = planning_item(plan, "model.layers.0.self_attn.k_proj.weight");
	assert_int_equal(item->start, 16);
	item = planning_item(plan, "model.layers.6.mlp.experts.gate_up_proj_blocks");
	assert_int_equal(item->start, 256);
	assert_int_equal(item->length, 64);
	assert_int_equal(item->row_count, 4);
	assert_int_equal(item->kept_bytes, 4 * 64 * 64);
	item = planning_item(plan, "model.layers.6.mlp.experts.gate_up_proj_bias");
	assert_int_equal(item->start, 256);
	assert_int_equal(item->length, 64);
	item = planning_item(plan, "model.layers.6.mlp.experts.down_proj_blocks");
	assert_int_equal(item->start, 4);
	assert_int_equal(item->length, 1);
	assert_int_equal(item->row_count, 4 * 128);
	item = planning_item(plan, "model.layers.6.mlp.experts.down_proj_scales");
	assert_int_equal(item->start, 4);
	assert_int_equal(item->length, 1);
	tnd_plan_close(plan);
}

/* Marks what an item keeps in a map of its tensor's bytes. */
static void mark(const struct tnd_plan_item *item, unsigned char *map)
{
	for (uint64_t row = 0; row < item->row_count; row++)
		for (uint32_t p = 0; p < item->part_count; p++) {
			uint64_t begin = item->file_offset - item->tensor->offset +
					 row * item->row_bytes + item->part_begin[p];

			assert_true(begin + item->part_bytes[p] <= item->tensor->bytes);
			for (uint64_t at = 0; at < item->part_bytes[p]; at++)
				map[begin + at]++;
		}
}

/*
 * No hole; and as many ranks share one byte as another, but for the blocks of fp8 scales, which two ranks may touch, and for
 * fused heads, of which only keys and values are shared.
 */
static void check_map(const char *name, const unsigned char *map, uint64_t bytes)
{
	for (uint64_t at = 0; at < bytes; at++)
		if (!map[at] ||
		    (map[at] != map[0] && !strstr(name, "_inv") && !strstr(name, "qkv")))
			fail_msg("%u ranks keep byte %llu of %s, %u its first", map[at],
				 (unsigned long long)at, name, map[0]);
}

static void ranks_cover_every_byte(void **state)
{
	static const uint32_t layouts[][2] = {{1, 1},  {2, 1}, {3, 1}, {4, 1}, {8, 1},
					      {16, 1}, {4, 2}, {4, 4}, {8, 4}, {6, 3}};

	(void)state;
	for (size_t l = 0; l < sizeof(layouts) / sizeof(*layouts); l++) {
		for (uint32_t slice = TND_SLICE_NONE; slice <= TND_SLICE_ALL; slice++) {
			struct tnd_plan *plans[16];
			uint32_t tp = layouts[l][0];
			uint64_t node, sum = 0;

			for (uint32_t r = 0; r < tp; r++)
				plans[r] = plan_all(tp, layouts[l][1], r, slice);
			for (size_t i = 0; i < TABLE_COUNT; i++) {
				const struct tnd_plan_item *item;
				unsigned char *map = NULL;
				uint64_t bytes = 0;

				for (uint32_t r = 0; r < tp; r++) {
					item = planning_item(plans[r], table[i].name);
					if (!item)
						continue;
					bytes = item->tensor->bytes;
					if (!map)
						map = calloc(1, bytes + 1);
					mark(item, map);
				}
				check_map(table[i].name, map, bytes);
				free(map);
				sum += bytes;
			}
			/* So the node reads each byte once. */
			assert_int_equal(tnd_plan_node_read_bytes(plans[0], &node), 0);
			assert_int_equal(node, sum);
			for (uint32_t r = 0; r < tp; r++)
				tnd_plan_close(plans[r]);
		}
	}
}

static void policy_experts(void **state)
{
	struct tnd_plan *plan = plan_all(4, 2, 3, TND_SLICE_EXPERTS);

	(void)state;
	/* moe_tp 2, rank 1 of it; ep rank 1 of 2 owns experts 2 and 3, so expert 0 is not here but for its one-value scales. */
	assert_null(planning_item(plan, "model.layers.2.mlp.experts.0.w1.weight"));
	assert_null(planning_item(plan, "model.layers.2.mlp.experts.0.w1.scale"));
	assert_non_null(planning_item(plan, "model.layers.2.mlp.experts.0.w2.input_scale"));
	assert_non_null(planning_item(plan, "model.layers.2.mlp.experts.0.w2.weight_scale_2"));
	assert_int_equal(planning_item(plan, "model.layers.0.self_attn.q_proj.weight")->dim, -1);
	assert_int_equal(
		planning_item(plan, "model.layers.0.mlp.shared_experts.up_proj.weight")->dim, -1);
	tnd_plan_close(plan);
	plan = plan_all(4, 2, 1, TND_SLICE_EXPERTS);
	assert_int_equal(planning_item(plan, "model.layers.2.mlp.experts.0.w1.weight")->start, 32);
	assert_int_equal(planning_item(plan, "model.layers.2.mlp.experts.0.w1.scale")->start, 32);
	assert_int_equal(planning_item(plan, "model.layers.2.mlp.experts.0.w2.scale")->start, 2);
	tnd_plan_close(plan);
	plan = plan_all(4, 4, 1, TND_SLICE_ALL);
	/* moe_tp 1: experts whole, the rest by tp. */
	assert_int_equal(planning_item(plan, "lm_head.weight")->start, 256);
	assert_int_equal(
		planning_item(plan, "model.layers.0.mlp.shared_experts.up_proj.weight")->start, 16);
	tnd_plan_close(plan);
}

static void fused_experts_under_ep(void **state)
{
	struct tnd_plan *plan = plan_all(4, 2, 3, TND_SLICE_ALL);
	const struct tnd_plan_item *item =
		planning_item(plan, "model.layers.7.mlp.experts.down_proj");
	uint64_t offset;
	struct tnd_error error;

	(void)state;
	/* Experts 2 and 3, columns [16, 32) of 32. */
	assert_int_equal(item->expert_start, 2);
	assert_int_equal(item->expert_length, 2);
	assert_int_equal(item->dim, 2);
	assert_int_equal(item->start, 16);
	assert_int_equal(item->row_count, 2 * 128);
	assert_int_equal(item->file_offset - item->tensor->offset, 2 * 128 * 64);
	assert_int_equal(item->kept_bytes, 2 * 128 * 32);
	/* The narrow of expert 3, and one that another rank has. */
	assert_int_equal(tnd_plan_narrow(plan, item->tensor->name, item->tensor->name_bytes, 0, 3,
					 1, &offset, &error),
			 0);
	assert_int_equal(offset, 128 * 32);
	assert_int_equal(tnd_plan_narrow(plan, item->tensor->name, item->tensor->name_bytes, 0, 1,
					 1, &offset, &error),
			 TND_E_SLICE);
	assert_non_null(strstr(error.message, "[2, 4)"));
	tnd_plan_close(plan);
	plan = plan_all(4, 2, 0, TND_SLICE_AUTO);
	item = planning_item(plan, "model.layers.6.mlp.experts.down_proj_bias");
	assert_int_equal(item->dim, 0);
	assert_int_equal(item->length, 2);
	tnd_plan_close(plan);
}

static void fused_experts_round_robin(void **state)
{
	struct tnd_layout layout = planning_layout(2, 1, 2, 1);
	struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, 0, 0);
	struct tnd_plan *plan;

	(void)state;
	opts.placement = TND_PLACEMENT_ROUND_ROBIN;
	plan = planning_make(checkpoint, &layout, &opts);
	assert_int_equal(planning_item(plan, "model.layers.7.mlp.experts.down_proj")->dim, -1);
	assert_true(planning_warned(plan, "round_robin"));
	tnd_plan_close(plan);
}

/* Padded vocabularies of two models. */
static void vocabulary(void **state)
{
	static const struct {
		const char *shape;
		uint32_t tp;
		uint64_t rows, last;
	} cases[] = {
		{"128256,4096", 8, 16032, 16032},
		{"151936,2560", 4, 37984, 37984},
		{"32001,64", 2, 16032, 15969}, /* padded to 32,064 */
		{"100,8", 8, 16, 0},           /* padded to 128: the last rank has nothing */
	};

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		struct shapes *own = shapes_folder();
		struct tnd_checkpoint *opened;
		struct tnd_plan_opts opts =
			planning_opts(TND_PHASE_ALL, TND_SLICE_ALL, TND_PACKING_FILE);

		shapes_begin(own, "model.safetensors");
		shapes_add(own, "BF16", cases[i].shape, "model.embed_tokens.weight");
		shapes_end(own);
		opened = planning_open(shapes_path(own));
		for (uint32_t r = 0; r < cases[i].tp; r++) {
			struct tnd_layout layout = planning_layout(cases[i].tp, 1, 1, r);
			struct tnd_plan *plan = planning_make(opened, &layout, &opts);
			const struct tnd_plan_item *item =
				planning_item(plan, "model.embed_tokens.weight");
			bool last = r + 1 == cases[i].tp;

			if (last || r == 0)
				assert_int_equal(item->length,
						 last ? cases[i].last : cases[i].rows);
			if (!last && item->length == cases[i].rows)
				assert_int_equal(item->start, r * cases[i].rows);
			if (!item->length)
				assert_int_equal(item->slab, TND_PLAN_NO_SLAB);
			tnd_plan_close(plan);
		}
		tnd_checkpoint_close(opened);
		shapes_remove(own);
	}
}

/* Without config.json heads are divided evenly, and key heads with a warning. */
static void heads_without_config(void **state)
{
	struct shapes *own = shapes_folder();
	struct tnd_layout layout = planning_layout(4, 1, 1, 1);
	struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, TND_SLICE_ALL, 0);
	struct tnd_checkpoint *opened;
	struct tnd_plan *plan;

	(void)state;
	shapes_begin(own, "model.safetensors");
	shapes_add(own, "BF16", "64,8", "a.q_proj.weight");
	shapes_add(own, "BF16", "32,8", "a.k_proj.weight");
	shapes_add(own, "BF16", "32,8", "a.v_proj.weight");
	shapes_add(own, "BF16", "96,8", "a.qkv_proj.weight");
	shapes_end(own);
	opened = planning_open(shapes_path(own));
	plan = planning_make(opened, &layout, &opts);
	assert_int_equal(planning_item(plan, "a.q_proj.weight")->start, 16);
	assert_int_equal(planning_item(plan, "a.k_proj.weight")->start, 8);
	assert_int_equal(planning_item(plan, "a.qkv_proj.weight")->dim, -1);
	assert_true(planning_warned(plan, "2 tensors of key and value heads divided evenly"));
	tnd_plan_close(plan);
	tnd_checkpoint_close(opened);
	shapes_remove(own);
}

static void user_rules(void **state)
{
	struct tnd_layout layout = planning_layout(4, 1, 1, 3);
	struct tnd_plan_opts opts = planning_opts(TND_PHASE_ALL, TND_SLICE_EXPERTS, 0);
	struct tnd_plan *plan;

	(void)state;
	opts.rules = "# comment\n\n"
		     "*.q_a_proj.weight 0\n"
		     "*.layers.3.mlp.* 1   # all of them\n"
		     "*.layers.3.mlp.down_proj.* none\r\n"
		     "*.mlp.gate.weight -1\n"
		     "lm_head.weight 7";
	plan = planning_make(checkpoint, &layout, &opts);
	assert_int_equal(planning_item(plan, "model.layers.0.self_attn.q_a_proj.weight")->start,
			 48);
	assert_int_equal(planning_item(plan, "model.layers.3.mlp.up_proj.weight")->dim, 1);
	assert_int_equal(planning_item(plan, "model.layers.3.mlp.down_proj.weight")->dim, -1);
	assert_int_equal(planning_item(plan, "model.layers.0.mlp.gate.weight")->dim, 1);
	assert_int_equal(planning_item(plan, "model.layers.0.mlp.gate.weight")->length, 32);
	assert_int_equal(planning_item(plan, "lm_head.weight")->dim, -1);
	assert_true(planning_warned(plan, "of the given rules read whole"));
	tnd_plan_close(plan);
	opts.slice = TND_SLICE_NONE;
	plan = planning_make(checkpoint, &layout, &opts);
	assert_int_equal(planning_totals(plan).sliced, 0);
	tnd_plan_close(plan);
}

static void bad_rules(void **state)
{
	static const struct {
		const char *text, *words;
	} cases[] = {
		{"a 0\nb", "r.txt: line 2:"},       {"a x", "line 1:"},   {"a 0 1", "line 1:"},
		{"\n#\na --1", "line 3:"},          {"a -", "line 1:"},   {"a -0", "line 1:"},
		{"a 99999999999999999", "line 1:"}, {"a 0x1", "line 1:"}, {"a 256", "line 1:"},
	};
	struct tnd_plan_opts opts = planning_opts(0, TND_SLICE_ALL, 0);

	(void)state;
	opts.rules_name = "r.txt";
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		opts.rules = cases[i].text;
		assert_int_equal(planning_refused(checkpoint, NULL, &opts, cases[i].words),
				 TND_E_RULES);
	}
}

static void environment_policy(void **state)
{
	static const struct {
		const char *text;
		uint32_t policy;
		bool warned;
	} cases[] = {
		{"auto", TND_SLICE_EXPERTS, false}, {"1", TND_SLICE_EXPERTS, false},
		{"on", TND_SLICE_EXPERTS, false},   {"0", TND_SLICE_NONE, false},
		{"off", TND_SLICE_NONE, false},     {"maybe", TND_SLICE_EXPERTS, true},
		{"", TND_SLICE_EXPERTS, false},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		struct tnd_plan *plan;

		/* Read at each use: the same process sees each change. */
		setenv("TUNDISH_TP_SLICE", cases[i].text, 1);
		plan = plan_all(4, 1, 0, TND_SLICE_AUTO);
		assert_int_equal(planning_totals(plan).slice, cases[i].policy);
		assert_int_equal(planning_warned(plan, "TUNDISH_TP_SLICE"), cases[i].warned);
		tnd_plan_close(plan);
		/* A given policy does not look at it. */
		plan = plan_all(4, 1, 0, TND_SLICE_ALL);
		assert_int_equal(planning_totals(plan).slice, TND_SLICE_ALL);
		tnd_plan_close(plan);
	}
	unsetenv("TUNDISH_TP_SLICE");
	{
		struct tnd_plan *plan = plan_all(4, 2, 0, TND_SLICE_AUTO);

		assert_int_equal(planning_totals(plan).slice, TND_SLICE_NONE);
		tnd_plan_close(plan);
		plan = plan_all(1, 1, 0, TND_SLICE_AUTO);
		assert_int_equal(planning_totals(plan).slice, TND_SLICE_NONE);
		tnd_plan_close(plan);
	}
}

static void narrow(void **state)
{
	struct tnd_plan *plan = plan_all(4, 1, 3, TND_SLICE_ALL);
	static const struct {
		const char *name;
		uint32_t dim;
		uint64_t start, length;
		int rc;
		uint64_t offset;
	} cases[] = {
		{"model.layers.0.self_attn.q_proj.weight", 0, 100, 4, 0, 4 * 256},
		{"model.layers.0.self_attn.q_proj.weight", 0, 95, 4, TND_E_SLICE, 0},
		{"model.layers.0.self_attn.q_proj.weight", 0, 100, 29, TND_E_SLICE, 0},
		{"model.layers.0.self_attn.q_proj.weight", 0, UINT64_MAX, 2, TND_E_SLICE, 0},
		{"model.layers.0.self_attn.q_proj.weight", 0, 100, UINT64_MAX, TND_E_SLICE, 0},
		{"model.layers.0.self_attn.q_proj.weight", 1, 5, 1, 0, 10},
		{"model.layers.0.self_attn.q_proj.weight", 2, 0, 1, TND_E_SLICE, 0},
		{"model.layers.0.self_attn.o_proj.weight", 1, 98, 30, 0, 4},
		{"model.layers.0.self_attn.o_proj.weight", 0, 3, 1, 0, 3 * 64},
		/* q [96,128), k [144,160), v [176,192) */
		{"model.layers.0.self_attn.qkv_proj.weight", 0, 144, 16, 0, 32 * 256},
		{"model.layers.0.self_attn.qkv_proj.weight", 0, 176, 1, 0, 48 * 256},
		{"model.layers.0.self_attn.qkv_proj.weight", 0, 150, 40, TND_E_SLICE, 0},
		{"model.layers.9.mlp.down_proj.weight", 1, 50, 2, 0, 1},
		{"lm_head.weigh", 0, 0, 1, TND_E_NO_TENSOR, 0},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		uint64_t offset = 77;
		struct tnd_error error;
		int rc = tnd_plan_narrow(plan, cases[i].name, strlen(cases[i].name), cases[i].dim,
					 cases[i].start, cases[i].length, &offset, &error);

		assert_int_equal(rc, cases[i].rc);
		if (rc == 0)
			assert_int_equal(offset, cases[i].offset);
		else
			assert_non_null(strstr(error.message, cases[i].name));
	}
	tnd_plan_close(plan);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(rows_of_the_table),
		cmocka_unit_test(shared_and_short),
		cmocka_unit_test(ranks_cover_every_byte),
		cmocka_unit_test(policy_experts),
		cmocka_unit_test(fused_experts_under_ep),
		cmocka_unit_test(fused_experts_round_robin),
		cmocka_unit_test(vocabulary),
		cmocka_unit_test(heads_without_config),
		cmocka_unit_test(user_rules),
		cmocka_unit_test(bad_rules),
		cmocka_unit_test(environment_policy),
		cmocka_unit_test(narrow),
	};

	return cmocka_run_group_tests(tests, set_up, tear_down);
}
