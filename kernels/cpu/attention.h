// Arguments of attention, with the layout of `toolkit.kernels.cpu.attention`.
#pragma once
#include <cstdint>

// A layer. Caches: [num_blocks, block_size, num_kv_heads, head_size]. All tensors are in fp32, or
// all in bfloat16.
struct AttentionLayer {
  void *k_cache, *v_cache;
  const void* cos_sin;              // [.., 2, half]; null: no rotation
  const void *q_weight, *k_weight;  // [head_size]; null: no norm
  int64_t half, num_heads, num_kv_heads, head_size, block_size, sliding_window, is_bf16;
  float scale, soft_cap, eps;
};

// A step, as in `toolkit.attention.AttentionBatch`. block_table: [.., max_blocks].
struct AttentionStep {
  const int64_t *positions, *slot_mapping;
  const int32_t *query_start_loc, *seq_lens, *rows, *block_table;
  int64_t max_blocks, num_reqs, num_tokens;
};
