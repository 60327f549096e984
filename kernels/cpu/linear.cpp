// y = act(x W^T + b) over packed weights (words.h), for any number of rows of x.
//
// A tile is up to kRows rows of x times one panel, its sums in registers over the whole depth. Few rows are bound by reading W:
// every panel is read from memory once, end to end, and again from the cache by the tiles after the first. Many rows are bound by
// arithmetic: they are cut into blocks that stay in the cache while all panels go by.
#include "activation.h"
#include "threads.h"
#include "weight.h"
#include "words.h"

namespace tk::TK_VARIANT {
namespace {

#if defined(__AVX512F__)
constexpr int kRows = 8;  // 16 sums. With 12 it is as fast (105-110 GFLOP/s on a core of 112); g++ 12 spills 14, to 80
#elif defined(__AVX2__)
constexpr int kRows = 3;  // 12 of 16
#else
constexpr int kRows = 2;
#endif

// Rows of a block: whole tiles, about half of a second-level cache at a depth of 1024. With fewer at greater depths, so that each
// block stays in it, panels come from memory more often, and products are some 4 % slower.
constexpr int64_t kBlockRows = kRows * (112 / kRows);
// Bytes of weights that a task reads at least: some 10 us of memory's time.
constexpr int64_t kTaskBytes = 96 * 1024;
// And how many tasks a thread has where there are several blocks.
constexpr int64_t kTasks = 32;
// How far ahead, in words, a tile that has a panel for itself asks for weights, into the second-level cache: the processor's own prefetcher
// stops at each page's end. (Few rows wait for nothing else. But the first level has too few places for lines under way: asked for there, a
// bfloat16 model's weights came 7 % more slowly.)
constexpr int kFewRows = 4;
constexpr int64_t kNear = 32 * kColumns, kFar = 128 * kColumns;
// Words between which one of several tiles asks for its share of the next panel.
constexpr int64_t kGroup = 8;
constexpr int64_t kLine = 16;  // words of a cache line
constexpr int64_t kGroupLines = kGroup * kColumns / kLine;

// Rows of x are `stride` words apart. `ahead`: where a tile that is one of several asks for some `lines` after each group of words.
template <class Type, int kTileRows, bool kAlone>
void tile(const uint32_t* __restrict x, int64_t stride, const uint32_t* __restrict panel, int64_t words, const uint32_t* ahead,
          int64_t lines, float* __restrict out) {
  // Two words at a time where one would leave the multipliers waiting for sums to come back.
  constexpr int kSteps = kTileRows * kVecs <= 4 ? 2 : 1;
  constexpr int64_t kWords = kAlone ? kSteps : kGroup;
  typename Type::Sum sums[kSteps][kTileRows][kVecs] = {};
  const auto add_word = [&](int step) __attribute__((always_inline)) {
    if (kAlone) {
      constexpr bool kFew = kTileRows <= kFewRows;
      for (int64_t i = 0; i < kColumns; i += kLine) __builtin_prefetch(panel + (kFew ? kNear : kFar) + i, 0, 2);
    }
    for (int v = 0; v < kVecs; ++v) {
      const UintVec weight = load_words(panel + v * kLanes);
      for (int row = 0; row < kTileRows; ++row) Type::add(sums[step][row][v], x + row * stride, weight);
    }
    x += Type::kWords;
    panel += kColumns;
  };
  int64_t word = 0;
  for (; word + kWords <= words; word += kWords) {
    for (int64_t i = 0; i < lines && !kAlone; ++i, ahead += kLine) __builtin_prefetch(ahead, 0, 2);
    for (int i = 0; i < kWords; ++i) add_word(i % kSteps);
  }
  for (; word < words; ++word) add_word(0);
  for (int row = 0; row < kTileRows; ++row) {
    for (int v = 0; v < kVecs; ++v) {
      auto total = sums[0][row][v];
      for (int step = 1; step < kSteps; ++step) total += sums[step][row][v];
      std::memcpy(out + row * kColumns + v * kLanes, &total, sizeof total);
    }
  }
}

using Tile = void (*)(const uint32_t*, int64_t, const uint32_t*, int64_t, const uint32_t*, int64_t, float*);

template <class Type, int kTileRows = kRows>
Tile tile_of(int64_t rows, bool alone) {
  if constexpr (kTileRows > 1) {
    if (rows < kTileRows) return tile_of<Type, kTileRows - 1>(rows, alone);
  }
  return alone ? tile<Type, kTileRows, true> : tile<Type, kTileRows, false>;
}

[[gnu::always_inline]] inline Vec value_of(Fp32, const Weight&, int64_t, const float* sums, const float*, int64_t) { return load(sums); }
[[gnu::always_inline]] inline Vec value_of(Bf16, const Weight&, int64_t, const float* sums, const float*, int64_t) { return load(sums); }
[[gnu::always_inline]] inline Vec value_of(Int8, const Weight& w, int64_t column, const float* sums, const float* x_scale, int64_t row) {
  const IntVec total = (IntVec)load_words(reinterpret_cast<const uint32_t*>(w.total + column));
  const IntVec whole = (IntVec)load(sums) - total * Int8::kOffset;
  return __builtin_convertvector(whole, Vec) * (load(w.scale + column) * x_scale[row]);
}

// Sums [rows][kColumns] of one panel to rows of y, [columns] each.
template <class Type, int64_t kActivation, bool kGated, class Y>
void finish(const Weight& w, int64_t panel, int64_t rows, const float* sums, const float* x_scale, Y* y) {
  constexpr int64_t kWidth = kGated ? kColumns / 2 : kColumns;
  const int64_t first = panel * kWidth, count = w.columns - first;
  Vec bias[kVecs] = {};
  for (int v = 0; v < kVecs && w.bias; ++v) bias[v] = load(w.bias + panel * kColumns + v * kLanes);
  for (int64_t row = 0; row < rows; ++row, sums += kColumns, y += w.columns) {
    Vec values[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      values[v] = value_of(Type{}, w, panel * kColumns + v * kLanes, sums + v * kLanes, x_scale, row) + bias[v];
    }
    for (int v = 0; v < kWidth / kLanes; ++v) {
      const int64_t rest = count - v * kLanes;
      if (rest <= 0) break;
      const Vec value = activate(values[v], kActivation);
      const Vec out = kGated ? value * values[v + kVecs / 2] : value;
      if (rest >= kLanes) {
        store(y + first + v * kLanes, out);
      } else {
        store_some(y + first + v * kLanes, out, rest);
      }
    }
  }
}

template <class Y>
using Finish = void (*)(const Weight&, int64_t, int64_t, const float*, const float*, Y*);

template <class Type, class Y, int64_t kActivation = kGeluTanh>
Finish<Y> finish_of(const Weight& w) {
  if constexpr (kActivation > 0) {
    if (w.activation != kActivation) return finish_of<Type, Y, kActivation - 1>(w);
  }
  return w.gated ? finish<Type, kActivation, true, Y> : finish<Type, kActivation, false, Y>;
}

// What a thread has made words of in its scratch: which block of which product.
thread_local uint64_t taken_product = 0;
thread_local int64_t taken_block = 0;

// How a product is cut: rows into blocks of tiles, a block's panels into parts. A task is a part of a block.
struct Cut {
  Cut(const Weight& w, int64_t rows) {
    const int64_t width = w.gated ? kColumns / 2 : kColumns;
    const int64_t tiles = (rows + kRows - 1) / kRows;
    blocks = (tiles * kRows + kBlockRows - 1) / kBlockRows;
    tile_rows = (rows + tiles - 1) / tiles;
    block_rows = (tiles + blocks - 1) / blocks * tile_rows;
    panels = (w.columns + width - 1) / width;
    part_panels = blocks > 1 ? panels * blocks / (kTasks * num_threads()) : kTaskBytes / (4 * w.words * kColumns);
    part_panels = part_panels < 1 ? 1 : part_panels > panels ? panels : part_panels;
    parts = (panels + part_panels - 1) / part_panels;
  }
  int64_t blocks, block_rows, tile_rows;
  int64_t parts, part_panels, panels;
};

template <class Type, class X, class Y>
void linear(const Weight& w, const X* x, int64_t rows, Y* y) {
  if (rows == 0) return;
  // Rows that have to be made words of are as far apart as what makes them may write.
  const bool is_words = Type::is_words(w.depth);
  const int64_t stride = w.words * Type::kWords + (is_words ? 0 : kLanes);
  const Cut cut(w, rows);
  const int64_t width = w.gated ? kColumns / 2 : kColumns, panel_words = w.words * kColumns;
  const int64_t num_tasks = cut.blocks * cut.parts;
  const uint64_t product = new_number();
  const Finish<Y> to_rows = finish_of<Type, Y>(w);

  parallel_runs(num_tasks, [&](int64_t task, int64_t next_task) {
    const int64_t block = task / cut.parts, part = task % cut.parts;
    const int64_t first = block * cut.block_rows, end = first + cut.block_rows < rows ? first + cut.block_rows : rows;
    const int64_t num_tiles = (end - first + cut.tile_rows - 1) / cut.tile_rows;
    const uint32_t* x_words = reinterpret_cast<const uint32_t*>(x) + first * stride;
    float* x_scale = nullptr;
    if (!is_words) {
      uint32_t* const taken = static_cast<uint32_t*>(scratch(4 * (stride + 1) * cut.block_rows));
      x_words = taken, x_scale = reinterpret_cast<float*>(taken + stride * cut.block_rows);
      if (taken_product != product || taken_block != block) {
        for (int64_t i = 0; i < end - first; ++i) x_scale[i] = Type::take(x + (first + i) * w.depth, w.depth, taken + i * stride);
        taken_product = product, taken_block = block;
      }
    }
    alignas(64) float sums[kRows * kColumns];
    const int64_t last = (part + 1) * cut.part_panels < cut.panels ? (part + 1) * cut.part_panels : cut.panels;
    for (int64_t panel = part * cut.part_panels; panel < last; ++panel) {
      const uint32_t* const words = w.panels + panel * panel_words;
      // The first of several tiles waits for memory, the others find the panel in the cache: each asks for its share of the thread's next
      // panel, so that memory is read all the while.
      const bool goes_on = panel + 1 < last || next_task < num_tasks;
      const uint32_t* const next = panel + 1 < last ? words + panel_words : w.panels + next_task % cut.parts * cut.part_panels * panel_words;
      const uint32_t* ahead = next;
      for (int64_t row = first; row < end; row += cut.tile_rows) {
        const int64_t count = row + cut.tile_rows < end ? cut.tile_rows : end - row;
        // Where the results go is not in the caches when there are many; it comes while the tile is multiplied.
        for (int64_t i = 0; i < count; ++i) {
          __builtin_prefetch(y + (row + i) * w.columns + panel * width, 1);
          __builtin_prefetch(y + (row + i) * w.columns + panel * width + width - 1, 1);
        }
        const int64_t lines = goes_on && ahead < next + panel_words ? (kGroupLines + num_tiles - 1) / num_tiles : 0;
        const Tile run = tile_of<Type>(count, num_tiles == 1);
        run(x_words + (row - first) * stride, stride, words, w.words, ahead, lines, sums);
        ahead += lines * kLine * (w.words / kGroup);
        to_rows(w, panel, count, sums, x_scale ? x_scale + row - first : nullptr, y + row * w.columns);
      }
    }
  });
}

}  // namespace
}  // namespace tk::TK_VARIANT

// x: [rows, depth]; y: [rows, columns]; each in fp32 or, as `x_bf16` and `y_bf16` say, bf16. Weights of fp32 take x in fp32, those of bf16
// in bf16, those of int8 either.
TK_KERNEL(tk_linear)(const void* weight, const void* x, int64_t x_bf16, int64_t rows, void* y, int64_t y_bf16) {
  using namespace tk::TK_VARIANT;
  const Weight& w = *static_cast<const Weight*>(weight);
  const auto run = [&](auto type, auto* from) {
    using Type = decltype(type);
    if (y_bf16) {
      linear<Type>(w, from, rows, static_cast<bf16*>(y));
    } else {
      linear<Type>(w, from, rows, static_cast<float*>(y));
    }
  };
  if (w.kind == kFp32) {
    linear<Fp32>(w, static_cast<const float*>(x), rows, static_cast<float*>(y));
  } else if (w.kind == kBf16) {
    run(Bf16{}, static_cast<const bf16*>(x));
  } else if (x_bf16) {
    run(Int8{}, static_cast<const bf16*>(x));
  } else {
    run(Int8{}, static_cast<const float*>(x));
  }
}

// [rows][words] of a weight as panels [panels][words][kColumns]; what there are no rows for is zero. With `gated`, the first half of each
// panel's columns are of the first half of the rows, the second of the second.
TK_KERNEL(tk_pack)(const uint32_t* from, int64_t rows, int64_t words, int64_t gated, uint32_t* to) {
  using namespace tk::TK_VARIANT;
  constexpr int64_t kPart = 32;  // words of each row at a time: a line or two of each
  const int64_t width = gated ? kColumns / 2 : kColumns, end = gated ? rows / 2 : rows;
  tk::parallel((end + width - 1) / width, [&](int64_t panel) {
    for (int64_t part = 0; part < words; part += kPart) {
      const int64_t last = part + kPart < words ? part + kPart : words;
      for (int64_t column = 0; column < kColumns; ++column) {
        const int64_t row = panel * width + column % width;
        const uint32_t* own = from + (row + (column < width ? 0 : end)) * words;
        uint32_t* out = to + panel * words * kColumns + column;
        for (int64_t word = part; word < last; ++word) out[word * kColumns] = row < end ? own[word] : 0;
      }
    }
  });
}

// Rows of a weight, which is not gated: y[i] = row indices[i], [depth] in fp32 or bf16; zeros where there is no such row.
TK_KERNEL(tk_rows)(const void* weight, const int64_t* indices, int64_t count, void* y, int64_t y_bf16) {
  using namespace tk::TK_VARIANT;
  const Weight& w = *static_cast<const Weight*>(weight);
  const int64_t per_word = w.kind == kFp32 ? 1 : w.kind == kBf16 ? 2 : 4;
  const auto copy = [&](auto* to, int64_t row) {
    const bool known = row >= 0 && row < w.columns;
    const float scale = known && w.scale ? w.scale[row] : 0.0f;
    const uint32_t* words = w.panels + (known ? row / kColumns * w.words * kColumns + row % kColumns : 0);
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
      from_float(known ? value : 0.0f, to + i);
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
