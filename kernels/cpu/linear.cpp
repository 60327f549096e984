// Products with weights in fp32, bf16, and int8 with a scale per row (words.h).
#include "product.h"

namespace tk::TK_VARIANT {
namespace {

#if defined(__AVX512F__)
// 16 sums. 12 rows are as fast (105-110 GFLOP/s on a core of 112). With 14, g++ 12 spills: 80.
constexpr int kRows = 8;
#elif defined(__AVX2__)
constexpr int kRows = 3;  // 12 of 16
#else
constexpr int kRows = 2;
#endif

// Distance in words at which the only tile of a panel prefetches weights into the second-level
// cache: the processor's own prefetcher stops at the end of each page. Few rows wait for nothing
// else. The first level can have too few lines in flight: prefetching into it was 7 % slower in
// bfloat16.
constexpr int kFewRows = 4;
constexpr int64_t kNear = 32 * kColumns, kFar = 128 * kColumns;
// Words after which one of several tiles prefetches its part of the next panel.
constexpr int64_t kGroup = 8;

// The sums of a tile stay in registers over the full depth.
template <class Type, int kTileRows, bool kIsOnly>
void tile(const Weight& w, const uint32_t* __restrict x, int64_t stride,
          const uint32_t* __restrict panel, Ahead ahead, float* __restrict out) {
  // Two words at a time for few sums, so that the multipliers do not wait for them.
  constexpr int kSteps = kTileRows * kVecs <= 4 ? 2 : 1;
  constexpr int64_t kWords = kIsOnly ? kSteps : kGroup;
  typename Type::Sum sums[kSteps][kTileRows][kVecs] = {};
  const auto add_word = [&](int step) __attribute__((always_inline)) {
    if (kIsOnly) {
      constexpr bool kFew = kTileRows <= kFewRows;
      for (int64_t i = 0; i < kColumns; i += kLine)
        __builtin_prefetch(panel + (kFew ? kNear : kFar) + i, 0, 2);
    }
    for (int v = 0; v < kVecs; ++v) {
      const UintVec weight = load_words(panel + v * kLanes);
      for (int row = 0; row < kTileRows; ++row)
        Type::add(sums[step][row][v], x + row * stride, weight);
    }
    x += Type::kWords;
    panel += kColumns;
  };
  int64_t word = 0;
  for (; word + kWords <= w.words; word += kWords) {
    for (int64_t i = 0; i < ahead.lines && !kIsOnly; ++i, ahead.from += kLine)
      __builtin_prefetch(ahead.from, 0, 2);
    for (int i = 0; i < kWords; ++i) add_word(i % kSteps);
  }
  for (; word < w.words; ++word) add_word(0);
  for (int row = 0; row < kTileRows; ++row) {
    for (int v = 0; v < kVecs; ++v) {
      auto total = sums[0][row][v];
      for (int step = 1; step < kSteps; ++step) total += sums[step][row][v];
      std::memcpy(out + row * kColumns + v * kLanes, &total, sizeof total);
    }
  }
}

template <class Type>
struct WordLoop {
  static constexpr int kMostRows = kRows;
  static bool is_words(const Weight& w) { return Type::is_words(w.depth); }
  static int64_t row_words(const Weight& w) { return w.words * Type::kWords; }
  static int64_t steps(const Weight& w) { return w.words / kGroup; }
  static int64_t step_lines(const Weight&) { return kGroup * kColumns / kLine; }

  template <class X>
  static float to_words(const Weight& w, const X* x, uint32_t* to) {
    return Type::to_words(x, w.depth, to);
  }

  template <int kTileRows = kRows>
  static Tile tile_of(const Weight& w, int64_t rows, bool is_only) {
    if constexpr (kTileRows > 1) {
      if (rows < kTileRows) return tile_of<kTileRows - 1>(w, rows, is_only);
    }
    return is_only ? tile<Type, kTileRows, true> : tile<Type, kTileRows, false>;
  }

  [[gnu::always_inline]] static Vec value_of(const Weight& w, int64_t column, const float* sums,
                                             const float* x_scale, int64_t row) {
    if constexpr (Type::kPerWord == Int8::kPerWord) {
      const IntVec total = (IntVec)load_words(reinterpret_cast<const uint32_t*>(w.total + column));
      const IntVec product = (IntVec)load(sums) - total * Int8::kOffset;
      return __builtin_convertvector(product, Vec) * (load(w.scale + column) * x_scale[row]);
    }
    return load(sums);
  }
};

}  // namespace
}  // namespace tk::TK_VARIANT

// x: [rows, depth]; y: [rows, columns]; in bf16 if `x_bf16` or `y_bf16` is set, else in fp32. x has
// the type of fp32 and bf16 weights, and either type with int8 weights.
TK_KERNEL(tk_linear)(const void* weight, const void* x, int64_t x_bf16, int64_t rows, void* y,
                     int64_t y_bf16) {
  using namespace tk::TK_VARIANT;
  const Weight& w = *static_cast<const Weight*>(weight);
  const auto run = [&](auto type, auto* from) {
    using Type = decltype(type);
    if (y_bf16) {
      multiply<WordLoop<Type>>(w, from, rows, static_cast<bf16*>(y));
    } else {
      multiply<WordLoop<Type>>(w, from, rows, static_cast<float*>(y));
    }
  };
  if (w.kind == kFp32) {
    multiply<WordLoop<Fp32>>(w, static_cast<const float*>(x), rows, static_cast<float*>(y));
  } else if (w.kind == kBf16) {
    run(Bf16{}, static_cast<const bf16*>(x));
  } else if (x_bf16) {
    run(Int8{}, static_cast<const bf16*>(x));
  } else {
    run(Int8{}, static_cast<const float*>(x));
  }
}

// Packs a weight [rows][words] into panels [panels][words][kColumns], padded with zeros. If
// `gated`, the first half of each panel's columns comes from the first half of the rows, the second
// from the second.
TK_KERNEL(tk_pack)(const uint32_t* from, int64_t rows, int64_t words, int64_t gated, uint32_t* to) {
  using namespace tk::TK_VARIANT;
  constexpr int64_t kPart = 32;  // words of each row at a time: one or two cache lines
  const int64_t width = gated ? kColumns / 2 : kColumns, end = gated ? rows / 2 : rows;
  tk::parallel((end + width - 1) / width, [&](int64_t panel) {
    for (int64_t part = 0; part < words; part += kPart) {
      const int64_t last = part + kPart < words ? part + kPart : words;
      for (int64_t column = 0; column < kColumns; ++column) {
        const int64_t row = panel * width + column % width;
        const uint32_t* own = from + (row + (column < width ? 0 : end)) * words;
        uint32_t* out = to + panel * words * kColumns + column;
        for (int64_t word = part; word < last; ++word)
          out[word * kColumns] = row < end ? own[word] : 0;
      }
    }
  });
}

// Unpacks rows of a weight that is not gated: y[i] = row indices[i], [depth] in fp32 or bf16, or
// zeros for an index out of range.
TK_KERNEL(tk_rows)(const void* weight, const int64_t* indices, int64_t count, void* y,
                   int64_t y_bf16) {
  using namespace tk::TK_VARIANT;
  const Weight& w = *static_cast<const Weight*>(weight);
  const int64_t per_word = w.kind == kFp32 ? 1 : w.kind == kBf16 ? 2 : 4;
  const auto copy = [&](auto* to, int64_t row) {
    const bool exists = row >= 0 && row < w.columns;
    const float scale = exists && w.scale ? w.scale[row] : 0.0f;
    const uint32_t* words =
        w.panels + (exists ? row / kColumns * w.words * kColumns + row % kColumns : 0);
    for (int64_t i = 0; i < w.depth; ++i) {
      const uint32_t word = words[i / per_word * kColumns];
      const int place = static_cast<int>(i % per_word);
      float value;
      if (w.kind == kInt8) {
        value = static_cast<int8_t>(word >> 8 * place) * scale;
      } else {
        const uint32_t bits = w.kind == kFp32 ? word : place ? word & 0xffff0000u : word << 16;
        std::memcpy(&value, &bits, 4);
      }
      from_float(exists ? value : 0.0f, to + i);
    }
  };
  constexpr int64_t kPart = 8;
  tk::parallel((count + kPart - 1) / kPart, [&](int64_t part) {
    for (int64_t i = part * kPart; i < count && i < (part + 1) * kPart; ++i) {
      if (y_bf16) {
        copy(static_cast<bf16*>(y) + i * w.depth, indices[i]);
      } else {
        copy(static_cast<float*>(y) + i * w.depth, indices[i]);
      }
    }
  });
}
