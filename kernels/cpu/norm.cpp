// Residual sums and their norms.
#include <cmath>

#include "simd.h"
#include "threads.h"

namespace tk::TK_VARIANT {
namespace {

constexpr int64_t kPart = 1 << 14;  // elements per task

// Mirror of `_Norm` in norm.py.
struct Norm {
  const float *weight, *bias;  // [size]; no weight: no norm
  int32_t is_centered;         // layer norm; else RMS norm
  float eps;
};

// Mirror of `_Join` in norm.py.
struct Join {
  Norm norms[2], post;
  int64_t num_norms, size, is_bf16;
  float scale, factor;
};

// Keeps the first n lanes; the others become 0.
[[gnu::always_inline]] inline Vec first(Vec v, int64_t n) {
  IntVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return n == kLanes ? v : select(lane < (int32_t)n, v, Vec{});
}

// What is subtracted from the numbers of a row, and their factor after that.
struct Moments {
  float mean, factor;
};

// `at(i, n)` returns n numbers of the row from i on.
template <class F>
[[gnu::always_inline]] inline Moments moments(const Norm& norm, int64_t size, F&& at) {
  Vec sums = {}, squares = {};
  float mean = 0;
  if (norm.is_centered) {
    for_each_vec(size, [&](int64_t i, int64_t n) { sums += at(i, n); });
    mean = sum(sums) / static_cast<float>(size);
  }
  for_each_vec(size, [&](int64_t i, int64_t n) {
    const Vec centred = first(at(i, n) - mean, n);
    squares += centred * centred;
  });
  return {mean, 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + norm.eps)};
}

[[gnu::always_inline]] inline Vec normalize(const Norm& norm, Moments row, Vec x, int64_t i,
                                            int64_t n) {
  const Vec y = (x - row.mean) * row.factor * load_part(norm.weight + i, n);
  return norm.bias ? y + load_part(norm.bias + i, n) : y;
}

// Norms are passed by value: the compiler then knows that storing numbers does not change them.
template <class T>
void norm_row(const Norm norm, const T* x, T* out, int64_t size) {
  const auto at = [&](int64_t i, int64_t n) { return load_part(x + i, n); };
  const Moments row = moments(norm, size, at);
  for_each_vec(size, [&](int64_t i, int64_t n) {
    store_part(out + i, normalize(norm, row, at(i, n), i, n), n);
  });
}

// residual = factor * (residual + scale * post(x + other))
template <class T>
void add_row(const Norm post, float scale, float factor, int64_t size, const T* x, const T* other, T* residual) {
  const auto product = [&](int64_t i, int64_t n) {
    const Vec own = load_part(x + i, n);
    return other ? own + load_part(other + i, n) : own;
  };
  const Moments row = post.weight ? moments(post, size, product) : Moments{};
  for_each_vec(size, [&](int64_t i, int64_t n) {
    Vec y = product(i, n);
    if (post.weight) y = normalize(post, row, y, i, n);
    store_part(residual + i, factor * (load_part(residual + i, n) + scale * y), n);
  });
}

template <class T>
void join_rows(const Join& join, const void* x, const void* other, void* residual, void* outs,
               int64_t rows) {
  const int64_t size = join.size, task_rows = kPart / size + 1;
  parallel((rows + task_rows - 1) / task_rows, [&](int64_t part) {
    const int64_t end = (part + 1) * task_rows;
    for (int64_t row = part * task_rows; row < end && row < rows; ++row) {
      const int64_t at = row * size;
      const T* total = static_cast<const T*>(x) + at;
      if (residual) {
        T* sum = static_cast<T*>(residual) + at;
        const T* second = other ? static_cast<const T*>(other) + at : nullptr;
        add_row(join.post, join.scale, join.factor, size, total, second, sum);
        total = sum;
      }
      for (int64_t i = 0; i < join.num_norms; ++i) {
        norm_row(join.norms[i], total, static_cast<T*>(outs) + i * rows * size + at, size);
      }
    }
  });
}

template <class T>
void norm_rows(const Join& join, void* x, int64_t stride, int64_t rows) {
  const int64_t task_rows = kPart / join.size + 1;
  parallel((rows + task_rows - 1) / task_rows, [&](int64_t part) {
    const int64_t end = (part + 1) * task_rows;
    for (int64_t row = part * task_rows; row < end && row < rows; ++row) {
      T* const own = static_cast<T*>(x) + row * stride;
      norm_row(join.norms[0], own, own, join.size);
    }
  });
}

}  // namespace
}  // namespace tk::TK_VARIANT

// x, other, residual: [rows, size]; outs: [norms, rows, size]. The sum is written into residual.
// Without a residual, x is the sum. Other may be null.
TK_KERNEL(tk_join)(const void* arguments, const void* x, const void* other, void* residual,
                   void* outs, int64_t rows) {
  using namespace tk::TK_VARIANT;
  const Join& join = *static_cast<const Join*>(arguments);
  (join.is_bf16 ? join_rows<bf16> : join_rows<float>)(join, x, other, residual, outs, rows);
}

// Applies the first norm in place. x: rows of join.size, `stride` elements apart.
TK_KERNEL(tk_norm_rows)(const void* arguments, void* x, int64_t stride, int64_t rows) {
  using namespace tk::TK_VARIANT;
  const Join& join = *static_cast<const Join*>(arguments);
  (join.is_bf16 ? norm_rows<bf16> : norm_rows<float>)(join, x, stride, rows);
}
