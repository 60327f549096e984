// Norms and rotation of heads, and the write of keys and values to the cache, in one pass.
#include <cmath>

#include "attention.h"
#include "simd.h"
#include "threads.h"

namespace tk::TK_VARIANT {
namespace {

constexpr int64_t kMaxSize = 256;
constexpr int64_t kPart = 1 << 14;  // elements per task

// Norms a head if there is a weight, and rotates it if there are angles. `to` may be `from`.
template <class T>
void transform(const T* from, T* to, int64_t size, const T* weight, float eps, const T* cos_sin,
               int64_t half) {
  float head[kMaxSize];
  for (int64_t d = 0; d < size; ++d) head[d] = to_float(from[d]);
  if (weight) {
    float sums[16] = {};
    for (int64_t d = 0; d < size; ++d) sums[d % 16] += head[d] * head[d];
    float square_sum = 0;
    for (float part : sums) square_sum += part;
    const float factor = 1.0f / std::sqrt(square_sum / static_cast<float>(size) + eps);
    for (int64_t d = 0; d < size; ++d) head[d] *= factor * to_float(weight[d]);
  }
  if (cos_sin) {
    for (int64_t i = 0; i < half; ++i) {
      const float cos = to_float(cos_sin[i]), sin = to_float(cos_sin[half + i]), first = head[i],
                  second = head[half + i];
      head[i] = first * cos - second * sin;
      head[half + i] = second * cos + first * sin;
    }
  }
  for (int64_t d = 0; d < size; ++d) from_float(head[d], to + d);
}

template <class T>
void write(const AttentionLayer& layer, const AttentionStep& step, T* qkv) {
  const int64_t size = layer.head_size, width = layer.num_kv_heads * size;
  const int64_t row = layer.num_heads * size + 2 * width;
  const T *table = static_cast<const T*>(layer.cos_sin),
          *q_weight = static_cast<const T*>(layer.q_weight);
  const T* k_weight = static_cast<const T*>(layer.k_weight);
  const int64_t task_tokens = kPart / row + 1;
  parallel((step.num_tokens + task_tokens - 1) / task_tokens, [&](int64_t part) {
    const int64_t end = (part + 1) * task_tokens;
    for (int64_t token = part * task_tokens; token < end && token < step.num_tokens; ++token) {
      T *q = qkv + token * row, *k = q + layer.num_heads * size, *v = k + width;
      const T* cos_sin = table ? table + step.positions[token] * 2 * layer.half : nullptr;
      if (q_weight || cos_sin) {
        for (int64_t d = 0; d < row - 2 * width; d += size)
          transform(q + d, q + d, size, q_weight, layer.eps, cos_sin, layer.half);
      }
      const int64_t slot = step.slot_mapping[token];
      if (slot < 0) continue;
      T* to = static_cast<T*>(layer.k_cache) + slot * width;
      std::memcpy(static_cast<T*>(layer.v_cache) + slot * width, v, width * sizeof(T));
      if (k_weight || cos_sin) {
        for (int64_t d = 0; d < width; d += size)
          transform(k + d, to + d, size, k_weight, layer.eps, cos_sin, layer.half);
      } else {
        std::memcpy(to, k, width * sizeof(T));
      }
    }
  });
}

}  // namespace
}  // namespace tk::TK_VARIANT

// qkv: [num_tokens, (num_heads + 2 · num_kv_heads) · head_size]. Queries are changed in place.
TK_KERNEL(tk_write)(const AttentionLayer* layer, const AttentionStep* step, void* qkv) {
  using namespace tk::TK_VARIANT;
  if (layer->is_bf16) {
    write(*layer, *step, static_cast<bf16*>(qkv));
  } else {
    write(*layer, *step, static_cast<float*>(qkv));
  }
}
