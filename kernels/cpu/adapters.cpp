// What LoRA adapters (arXiv:2106.09685) add to the sums of a product, then its activation and gate:
// y = act(sums + B A x), each token with the A and B of its own adapter.
#include "activation.h"
#include "threads.h"
#include "words.h"

namespace tk::TK_VARIANT {
namespace {

constexpr int64_t kTokens = 8;          // of a block
constexpr int64_t kTaskSums = 1 << 15;  // multiplications of a task, at least
constexpr int64_t kChunk = 512;         // columns of a task, at most
constexpr int64_t kGate = kColumns / 2;

// Mirrors of the structures in adapters.py.
struct Part {
  const float* low;  // A, [rank][depth]
  const float* up;   // transposed B, [rank][rows]
  int64_t rank;
  int64_t first, rows;  // of the weight
};

struct Slot {
  const Part* parts;
  int64_t num_parts;
};

struct Step {
  const int32_t *all, *wanted;  // slots of the step's tokens, and of those that its end computes
  int64_t num_tokens;           // number of all
};

struct Adapted {
  const Slot* slots;
  const Step* step;
  int64_t depth, columns;  // of x and of y
  int64_t activation, gated;
  int64_t sums_stride;  // gated: sums are in panels, half of each is gate's
  int64_t low_stride;
  int64_t x_bf16, y_bf16;
};

int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls f(row) for the tokens of a block.
template <class F>
[[gnu::always_inline]] inline void for_tokens(int64_t block, int64_t rows, F&& f) {
  for (int64_t row = block * kTokens; row < min(rows, (block + 1) * kTokens); ++row) f(row);
}

// kRanks products of a row of x with rows of A, `depth` apart.
template <int kRanks, class X>
void multiply_low(const X* x, const float* low, int64_t depth, float* out) {
  Vec sums[kRanks] = {};
  int64_t i = 0;
  for (; i + kLanes <= depth; i += kLanes) {
    const Vec own = load(x + i);
    for (int r = 0; r < kRanks; ++r) sums[r] += own * load(low + r * depth + i);
  }
  if (i < depth) {
    const Vec own = load_some(x + i, depth - i);
    for (int r = 0; r < kRanks; ++r) sums[r] += own * load_some(low + r * depth + i, depth - i);
  }
  for (int r = 0; r < kRanks; ++r) out[r] = sum(sums[r]);
}

// Computes A x of each token: its share of the ranks, four at a time.
template <class X>
void shrink(const Adapted& w, const int32_t* slots, const X* x, float* low, int64_t rows,
            int64_t block, int64_t share, int64_t shares) {
  for_tokens(block, rows, [&](int64_t row) {
    const Slot& slot = w.slots[slots[row]];
    float* out = low + row * w.low_stride;
    const X* own = x + row * w.depth;
    for (int64_t p = 0; p < slot.num_parts; out += slot.parts[p++].rank) {
      const Part& part = slot.parts[p];
      for (int64_t r = 4 * share; r < part.rank; r += 4 * shares) {
        const float* const from = part.low + r * w.depth;
        if (r + 4 <= part.rank) {
          multiply_low<4>(own, from, w.depth, out + r);
        } else {
          for (int64_t i = 0; i < part.rank - r; ++i)
            multiply_low<1>(own, from + i * w.depth, w.depth, out + r + i);
        }
      }
    }
  });
}

// Adds B (A x) for rows [begin, end) of the weight to `out`, which begins at row `begin`.
void expand(const Slot& slot, const float* low, int64_t begin, int64_t end, float* out) {
  for (int64_t p = 0; p < slot.num_parts; low += slot.parts[p++].rank) {
    const Part& part = slot.parts[p];
    const int64_t last = min(end, part.first + part.rows);
    int64_t at = begin > part.first ? begin : part.first;
    for (; at < last; at += kLanes) {
      const int64_t count = min(kLanes, last - at);
      const bool is_full = count == kLanes;
      const float* up = part.up + at - part.first;
      float* const to = out + at - begin;
      Vec sums = is_full ? load(to) : load_some(to, count);
      for (int64_t r = 0; r < part.rank; ++r, up += part.rows)
        sums += low[r] * (is_full ? load(up) : load_some(up, count));
      if (is_full) {
        store(to, sums);
      } else {
        store_some(to, sums, count);
      }
    }
  }
}

template <class Y>
void finish(const Adapted& w, const Slot& slot, const float* low, const float* sums, int64_t begin,
            int64_t end, Y* y) {
  float added[2][kChunk + 16] = {};
  expand(slot, low, begin, end, added[0]);
  if (w.gated) expand(slot, low, w.columns + begin, w.columns + end, added[1]);
  for (int64_t at = begin; at < end; at += kLanes) {
    const int64_t count = min(kLanes, end - at);
    Vec value, up = {};
    if (w.gated) {
      const float* const own = sums + at / kGate * kColumns + at % kGate;
      value = load(own) + load(added[0] + at - begin);
      up = load(own + kGate) + load(added[1] + at - begin);
    } else {
      value = count == kLanes ? load(sums + at) : load_some(sums + at, count);
      value += load(added[0] + at - begin);
    }
    value = activate(value, w.activation);
    if (w.gated) value *= up;
    if (count == kLanes) {
      store(y + at, value);
    } else {
      store_some(y + at, value, count);
    }
  }
}

template <class X, class Y>
void adapt(const Adapted& w, const X* x, const float* sums, float* low, Y* y, int64_t rows) {
  const int32_t* const slots = rows == w.step->num_tokens ? w.step->all : w.step->wanted;
  const int64_t blocks = (rows + kTokens - 1) / kTokens;
  int64_t rank = 0;  // of a token, at most
  for (int64_t row = 0; row < rows; ++row) {
    const Slot& slot = w.slots[slots[row]];
    int64_t own = 0;
    for (int64_t p = 0; p < slot.num_parts; ++p) own += slot.parts[p].rank;
    rank = own > rank ? own : rank;
  }
  if (rank > 0) {
    const int64_t wanted = min(rows, kTokens) * rank * w.depth / kTaskSums;
    const int64_t shares = wanted < 1 ? 1 : min(wanted, (rank + 3) / 4);
    parallel(blocks * shares, [&](int64_t task) {
      shrink(w, slots, x, low, rows, task / shares, task % shares, shares);
    });
  }
  const int64_t least = kTaskSums / (min(rows, kTokens) * (rank + 1));
  const int64_t width = least >= kChunk ? kChunk : least <= 64 ? 64 : least / 64 * 64;
  const int64_t chunks = (w.columns + width - 1) / width;
  parallel(blocks * chunks, [&](int64_t task) {
    const int64_t begin = task % chunks * width;
    for_tokens(task / chunks, rows, [&](int64_t row) {
      finish(w, w.slots[slots[row]], low + row * w.low_stride, sums + row * w.sums_stride, begin,
             min(w.columns, begin + width), y + row * w.columns);
    });
  });
}

}  // namespace
}  // namespace tk::TK_VARIANT

// x: [rows, depth]; sums: fp32 [rows, sums_stride] of the product with its bias; low: fp32
// [rows, low_stride], overwritten; y: [rows, columns]
TK_KERNEL(tk_adapt)(const void* adapted, const void* x, const void* sums, void* low, void* y,
                    int64_t rows) {
  using namespace tk::TK_VARIANT;
  const Adapted& w = *static_cast<const Adapted*>(adapted);
  const auto to = [&](auto* typed_x, auto* typed_y) {
    adapt(w, typed_x, static_cast<const float*>(sums), static_cast<float*>(low), typed_y, rows);
  };
  if (rows == 0) return;
  if (w.x_bf16 && w.y_bf16) {
    to(static_cast<const bf16*>(x), static_cast<bf16*>(y));
  } else if (w.x_bf16) {
    to(static_cast<const bf16*>(x), static_cast<float*>(y));
  } else if (w.y_bf16) {
    to(static_cast<const float*>(x), static_cast<bf16*>(y));
  } else {
    to(static_cast<const float*>(x), static_cast<float*>(y));
  }
}
