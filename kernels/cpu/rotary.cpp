// The transform of heads (clip, norm, rotation) and the write of keys and values to the cache, in
// one pass.
#include <cmath>

#include "attention.h"
#include "simd.h"
#include "threads.h"

namespace tk::TK_VARIANT {
namespace {

constexpr int64_t kMaxSize = 512;
constexpr int64_t kPart = 1 << 14;  // elements per task

// Neighbouring heads of one token, and their norm's weights, `stride` elements apart.
struct Heads {
  int64_t count;
  bool is_normed;
  const void* weight;  // null: 1
  int64_t stride;
};

// head: 0 from `size` on to a full vector.
template <class T>
[[gnu::always_inline]] inline void norm(float* head, const T* weight, const AttentionLayer& layer) {
  const int64_t size = layer.head_size;
  Vec sums = {}, squares = {};
  if (layer.is_centered) {
    for (int64_t d = 0; d < size; d += kLanes) sums += load(head + d);
    const float mean = sum(sums) / static_cast<float>(size);
    for (int64_t d = 0; d < size; ++d) head[d] -= mean;
  }
  for (int64_t d = 0; d < size; d += kLanes) squares += load(head + d) * load(head + d);
  const float factor = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + layer.eps);
  for (int64_t d = 0; d < size; ++d) head[d] *= weight ? factor * to_float(weight[d]) : factor;
}

template <class T>
[[gnu::always_inline]] inline void rotate(float* head, const T* cos_sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float cos = to_float(cos_sin[i]), sin = to_float(cos_sin[half + i]), first = head[i],
                second = head[half + i];
    head[i] = first * cos - second * sin;
    head[half + i] = second * cos + first * sin;
  }
}

// Clips heads, norms them if they have weights, and rotates them if there are angles. `to` may be
// `from`.
template <class T>
void transform(const AttentionLayer& layer, const T* from, T* to, Heads heads, const T* cos_sin,
               int64_t half) {
  const int64_t size = layer.head_size;
  if (layer.clip == 0 && !heads.is_normed && !cos_sin) {
    if (to != from) std::memcpy(to, from, heads.count * size * sizeof(T));
    return;
  }
  const Vec clip = splat(layer.clip);
  const auto norm_at = [&](float* head, int64_t at) {
    if (!heads.weight) {
      norm<float>(head, nullptr, layer);
    } else if (layer.norm_is_bf16) {
      norm(head, static_cast<const bf16*>(heads.weight) + at, layer);
    } else {
      norm(head, static_cast<const float*>(heads.weight) + at, layer);
    }
  };
  for (int64_t i = 0; i < heads.count; ++i, from += size, to += size) {
    alignas(64) float head[kMaxSize];
    int64_t d = 0;
    for (; d + kLanes <= size; d += kLanes) store(head + d, load(from + d));
    if (d < size) store(head + d, load_some(from + d, size - d));
    if (layer.clip != 0) {  // NaN stays
      for (d = 0; d < size; d += kLanes) store(head + d, min(clip, max(-clip, load(head + d))));
    }
    if (heads.is_normed && !layer.norm_is_last) norm_at(head, i * heads.stride);
    if (cos_sin) rotate(head, cos_sin, half);
    if (heads.is_normed && layer.norm_is_last) norm_at(head, i * heads.stride);
    for (d = 0; d + kLanes <= size; d += kLanes) store(to + d, load(head + d));
    if (d < size) store_some(to + d, load(head + d), size - d);
  }
}

template <class T>
void write(const AttentionLayer& layer, const AttentionStep& step, T* qkv, const T* q_angles,
           const T* k_angles, int64_t half) {
  const int64_t size = layer.head_size, width = layer.num_kv_heads * size;
  const int64_t row = layer.row_size;
  const int64_t task_tokens = kPart / row + 1;
  const bool is_normed = layer.q_weight != nullptr;
  parallel((step.num_tokens + task_tokens - 1) / task_tokens, [&](int64_t part) {
    const int64_t end = (part + 1) * task_tokens;
    for (int64_t token = part * task_tokens; token < end && token < step.num_tokens; ++token) {
      T *q = qkv + token * row, *k = q + layer.num_heads * size, *v = k + width;
      const int64_t own = token * 2 * half;
      transform(layer, q, q, {layer.num_heads, is_normed, layer.q_weight, layer.q_stride},
                q_angles ? q_angles + own : nullptr, half);
      const int64_t slot = step.slot_mapping[token];
      if (slot < 0) continue;
      const int64_t at =
          slot / layer.block_size * layer.block_stride + slot % layer.block_size * width;
      transform(layer, k, static_cast<T*>(layer.k_cache) + at,
                {layer.num_kv_heads, is_normed, layer.k_weight, layer.k_stride},
                k_angles ? k_angles + own : nullptr, half);
      transform<T>(layer, v, static_cast<T*>(layer.v_cache) + at,
                   {layer.num_kv_heads, layer.norms_values != 0, nullptr, 0}, nullptr, 0);
    }
  });
}

}  // namespace
}  // namespace tk::TK_VARIANT

// qkv: [num_tokens, (num_heads + 2 · num_kv_heads) · head_size], rows `row_size` apart. Queries are
// changed in place.
// q_angles, k_angles: cosines and sines of the tokens, [num_tokens, 2, half]; null: no rotation.
TK_KERNEL(tk_write)(const AttentionLayer* layer, const AttentionStep* step, void* qkv,
                    const void* q_angles, const void* k_angles, int64_t half) {
  using namespace tk::TK_VARIANT;
  if (layer->is_bf16) {
    write(*layer, *step, static_cast<bf16*>(qkv), static_cast<const bf16*>(q_angles),
          static_cast<const bf16*>(k_angles), half);
  } else {
    write(*layer, *step, static_cast<float*>(qkv), static_cast<const float*>(q_angles),
          static_cast<const float*>(k_angles), half);
  }
}
