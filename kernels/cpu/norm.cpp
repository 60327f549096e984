// Residual sums and their norms.
#include <cmath>

#include "simd.h"
#include "threads.h"

namespace tk::TK_VARIANT {
namespace {

constexpr int64_t kPart = 1 << 14;  // elements per task

// Mirror of `_Norm` in norm.py.
struct Norm {
  const void *weight, *bias;  // [size]; without a bias: RMS norm
  int64_t size, is_bf16;
  float eps;
};

// Calls f(first index, number of elements) for each vector.
template <class F>
[[gnu::always_inline]] inline void for_each_vec(int64_t size, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) f(i, kLanes);
  if (i < size) f(i, size - i);
}

template <class T>
[[gnu::always_inline]] inline Vec load_part(const T* x, int64_t count) {
  return count == kLanes ? load(x) : load_some(x, count);
}

template <class T>
[[gnu::always_inline]] inline void store_part(T* x, Vec v, int64_t count) {
  if (count == kLanes) {
    store(x, v);
  } else {
    store_some(x, v, count);
  }
}

// Keeps the first n lanes; the others become 0.
[[gnu::always_inline]] inline Vec first(Vec v, int64_t n) {
  IntVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return n == kLanes ? v : select(lane < (int32_t)n, v, Vec{});
}

template <class T>
void norm_row(const T* x, T* residual, const T* weight, const T* bias, float eps, T* out,
              int64_t size) {
  Vec sums = {}, squares = {};
  if (residual) {
    for_each_vec(size, [&](int64_t i, int64_t n) {
      store_part(residual + i, load_part(residual + i, n) + load_part(x + i, n), n);
    });
    x = residual;
  }
  float mean = 0;
  if (bias) {
    for_each_vec(size, [&](int64_t i, int64_t n) { sums += load_part(x + i, n); });
    mean = sum(sums) / static_cast<float>(size);
  }
  for_each_vec(size, [&](int64_t i, int64_t n) {
    const Vec centred = first(load_part(x + i, n) - mean, n);
    squares += centred * centred;
  });
  const float factor = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
  for_each_vec(size, [&](int64_t i, int64_t n) {
    Vec y = (load_part(x + i, n) - mean) * factor * load_part(weight + i, n);
    if (bias) y += load_part(bias + i, n);
    store_part(out + i, y, n);
  });
}

template <class T>
void norm(const Norm& norm, const void* x, void* residual, void* out, int64_t rows) {
  const int64_t size = norm.size, task_rows = kPart / size + 1;
  parallel((rows + task_rows - 1) / task_rows, [&](int64_t part) {
    const int64_t end = (part + 1) * task_rows;
    for (int64_t row = part * task_rows; row < end && row < rows; ++row) {
      norm_row(static_cast<const T*>(x) + row * size,
               residual ? static_cast<T*>(residual) + row * size : nullptr,
               static_cast<const T*>(norm.weight), static_cast<const T*>(norm.bias), norm.eps,
               static_cast<T*>(out) + row * size, size);
    }
  });
}

}  // namespace
}  // namespace tk::TK_VARIANT

// x, residual, out: [rows, size]. The sum is written into residual. Null: x is the sum.
TK_KERNEL(tk_add_norm)(const void* arguments, const void* x, void* residual, void* out,
                       int64_t rows) {
  using namespace tk::TK_VARIANT;
  const Norm& layer = *static_cast<const Norm*>(arguments);
  (layer.is_bf16 ? norm<bf16> : norm<float>)(layer, x, residual, out, rows);
}
