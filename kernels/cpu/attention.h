// What attention is over, as `toolkit.kernels.cpu.attention` lays it out.
#pragma once
#include <cstdint>

// Of one layer. Caches: [num_blocks, block_size, num_kv_heads, head_size], fp32 or bfloat16, as are queries, tables and weights.
struct AttentionLayer {
  void *k_cache, *v_cache;
  const void* cos_sin;  // [.., 2, half]; null: nothing is rotated
  const void *q_weight, *k_weight;  // [head_size]; null: nothing is normed
  int64_t half, num_heads, num_kv_heads, head_size, block_size, sliding_window, is_bf16;
  float scale, soft_cap, eps;
};

// Of one step; as `toolkit.attention.AttentionBatch`, whose table has max_blocks columns.
struct AttentionStep {
  const int64_t *positions, *slot_mapping;
  const int32_t *query_start_loc, *seq_lens, *rows, *block_table;
  int64_t max_blocks, num_reqs, num_tokens;
};
