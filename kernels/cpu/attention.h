// Arguments of attention, with the layout of `toolkit.kernels.cpu.attention`.
#pragma once
#include <cstdint>

// A layer. Caches: [num_blocks, block_size, num_kv_heads, head_size], each block contiguous,
// `block_stride` elements from the one before. Caches, queries, keys, values
// and angles are all in fp32, or all in bfloat16.
struct AttentionLayer {
  void *k_cache, *v_cache;
  const void *q_weight, *k_weight;  // of the heads' norm, a head's `stride` apart; null: no norm
  const float* sinks;  // [num_heads], logits that join each head's softmax; null: none
  int64_t q_stride, k_stride, norm_is_bf16, is_centered, norm_is_last, norms_values;
  int64_t num_heads, num_kv_heads, head_size, block_size, sliding_window, chunk, is_bf16;
  int64_t block_stride;
  int64_t row_size;  // elements from a token's queries, keys and values to the next one's
  float scale, soft_cap, eps, clip;  // clip 0: none
};

// A step, as in `toolkit.attention.AttentionBatch`. block_table: [.., max_blocks], its rows
// `table_stride` apart.
struct AttentionStep {
  const int64_t* slot_mapping;
  const int32_t *query_start_loc, *seq_lens, *rows, *block_table;
  const int32_t* last_key;  // [num_tokens], position of the last key that each sees; null: its own
  int64_t table_stride, num_reqs, num_tokens;
};
