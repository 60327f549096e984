// y = act(x W^T + b) with packed weights (words.h), for any number of rows of x.
//
// A tile is up to kRows rows of x times one panel, with its sums in registers over the full depth.
// Few rows are bound by reading W: every panel is read from memory once, from end to end, and from
// the cache by the tiles after the first. Many rows are bound by arithmetic: they are cut into
// blocks that stay in the cache while all panels are read.
#include "activation.h"
#include "threads.h"
#include "weight.h"
#include "words.h"

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

// Rows of a block: full tiles, about half of a second-level cache at a depth of 1024. Fewer rows at
// greater depths, so that each block fits, read panels more often: products were 4 % slower.
constexpr int64_t kBlockRows = kRows * (112 / kRows);
// Least bytes of weights per task: about 10 us of reading memory.
constexpr int64_t kTaskBytes = 96 * 1024;
// Tasks per thread if there are several blocks.
constexpr int64_t kTasks = 32;
// Distance in words at which the only tile of a panel prefetches weights into the second-level
// cache: the processor's own prefetcher stops at the end of each page. Few rows wait for nothing
// else. The first level can have too few lines in flight: prefetching into it was 7 % slower in
// bfloat16.
constexpr int kFewRows = 4;
constexpr int64_t kNear = 32 * kColumns, kFar = 128 * kColumns;
// Words after which one of several tiles prefetches its part of the next panel.
constexpr int64_t kGroup = 8;
constexpr int64_t kLine = 16;  // words of a cache line
constexpr int64_t kGroupLines = kGroup * kColumns / kLine;

// Rows of x are `stride` words apart. `ahead`: address from which one of several tiles prefetches
// `lines` after each group of words.
template <class Type, int kTileRows, bool kIsOnly>
void tile(const uint32_t* __restrict x, int64_t stride, const uint32_t* __restrict panel,
          int64_t words, const uint32_t* ahead, int64_t lines, float* __restrict out) {
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
  for (; word + kWords <= words; word += kWords) {
    for (int64_t i = 0; i < lines && !kIsOnly; ++i, ahead += kLine) __builtin_prefetch(ahead, 0, 2);
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

using Tile = void (*)(const uint32_t*, int64_t, const uint32_t*, int64_t, const uint32_t*, int64_t,
                      float*);

template <class Type, int kTileRows = kRows>
Tile tile_of(int64_t rows, bool is_only) {
  if constexpr (kTileRows > 1) {
    if (rows < kTileRows) return tile_of<Type, kTileRows - 1>(rows, is_only);
  }
  return is_only ? tile<Type, kTileRows, true> : tile<Type, kTileRows, false>;
}

[[gnu::always_inline]] inline Vec value_of(Fp32, const Weight&, int64_t, const float* sums,
                                           const float*, int64_t) {
  return load(sums);
}
[[gnu::always_inline]] inline Vec value_of(Bf16, const Weight&, int64_t, const float* sums,
                                           const float*, int64_t) {
  return load(sums);
}
[[gnu::always_inline]] inline Vec value_of(Int8, const Weight& w, int64_t column, const float* sums,
                                           const float* x_scale, int64_t row) {
  const IntVec total = (IntVec)load_words(reinterpret_cast<const uint32_t*>(w.total + column));
  const IntVec product = (IntVec)load(sums) - total * Int8::kOffset;
  return __builtin_convertvector(product, Vec) * (load(w.scale + column) * x_scale[row]);
}

// Converts sums [rows][kColumns] of a panel to rows of y, [columns] each.
template <class Type, int64_t kActivation, bool kGated, class Y>
void finish(const Weight& w, int64_t panel, int64_t rows, const float* sums, const float* x_scale,
            Y* y) {
  constexpr int64_t kWidth = kGated ? kColumns / 2 : kColumns;
  const int64_t first = panel * kWidth, count = w.columns - first;
  Vec bias[kVecs] = {};
  for (int v = 0; v < kVecs && w.bias; ++v) bias[v] = load(w.bias + panel * kColumns + v * kLanes);
  for (int64_t row = 0; row < rows; ++row, sums += kColumns, y += w.columns) {
    Vec values[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      values[v] =
          value_of(Type{}, w, panel * kColumns + v * kLanes, sums + v * kLanes, x_scale, row) +
          bias[v];
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

template <class Type, class Y, int64_t kActivation = kGeluQuick>
Finish<Y> finish_of(const Weight& w) {
  if constexpr (kActivation > 0) {
    if (w.activation != kActivation) return finish_of<Type, Y, kActivation - 1>(w);
  }
  return w.gated ? finish<Type, kActivation, true, Y> : finish<Type, kActivation, false, Y>;
}

// The product and block whose words are in the thread's scratch.
thread_local uint64_t converted_product = 0;
thread_local int64_t converted_block = 0;

// The tasks of a product: rows are cut into blocks of tiles, and the panels of a block into parts.
// A task is one part for one block.
struct Cut {
  Cut(const Weight& w, int64_t rows) {
    const int64_t width = w.gated ? kColumns / 2 : kColumns;
    const int64_t tiles = (rows + kRows - 1) / kRows;
    blocks = (tiles * kRows + kBlockRows - 1) / kBlockRows;
    tile_rows = (rows + tiles - 1) / tiles;
    block_rows = (tiles + blocks - 1) / blocks * tile_rows;
    panels = (w.columns + width - 1) / width;
    part_panels = blocks > 1 ? panels * blocks / (kTasks * num_threads())
                             : kTaskBytes / (4 * w.words * kColumns);
    part_panels = part_panels < 1 ? 1 : part_panels > panels ? panels : part_panels;
    parts = (panels + part_panels - 1) / part_panels;
  }
  int64_t blocks, block_rows, tile_rows;
  int64_t parts, part_panels, panels;
};

template <class Type, class X, class Y>
void linear(const Weight& w, const X* x, int64_t rows, Y* y) {
  if (rows == 0) return;
  // The stride of converted rows leaves space for what `to_words` writes past their end.
  const bool is_words = Type::is_words(w.depth);
  const int64_t stride = w.words * Type::kWords + (is_words ? 0 : kLanes);
  const Cut cut(w, rows);
  const int64_t width = w.gated ? kColumns / 2 : kColumns, panel_words = w.words * kColumns;
  const int64_t num_tasks = cut.blocks * cut.parts;
  const uint64_t product = new_number();
  const Finish<Y> to_rows = finish_of<Type, Y>(w);

  parallel_runs(num_tasks, [&](int64_t task, int64_t next_task) {
    const int64_t block = task / cut.parts, part = task % cut.parts;
    const int64_t first = block * cut.block_rows,
                  end = first + cut.block_rows < rows ? first + cut.block_rows : rows;
    const int64_t num_tiles = (end - first + cut.tile_rows - 1) / cut.tile_rows;
    const uint32_t* x_words = reinterpret_cast<const uint32_t*>(x) + first * stride;
    float* x_scale = nullptr;
    if (!is_words) {
      uint32_t* const converted =
          static_cast<uint32_t*>(scratch(4 * (stride + 1) * cut.block_rows));
      x_words = converted, x_scale = reinterpret_cast<float*>(converted + stride * cut.block_rows);
      if (converted_product != product || converted_block != block) {
        for (int64_t i = 0; i < end - first; ++i)
          x_scale[i] = Type::to_words(x + (first + i) * w.depth, w.depth, converted + i * stride);
        converted_product = product, converted_block = block;
      }
    }
    alignas(64) float sums[kRows * kColumns];
    const int64_t last =
        (part + 1) * cut.part_panels < cut.panels ? (part + 1) * cut.part_panels : cut.panels;
    for (int64_t panel = part * cut.part_panels; panel < last; ++panel) {
      const uint32_t* const words = w.panels + panel * panel_words;
      // The first of several tiles waits for memory, and the others find the panel in the cache. So
      // each prefetches its part of the thread's next panel, to keep memory busy.
      const bool has_next = panel + 1 < last || next_task < num_tasks;
      const uint32_t* const next =
          panel + 1 < last ? words + panel_words
                           : w.panels + next_task % cut.parts * cut.part_panels * panel_words;
      const uint32_t* ahead = next;
      for (int64_t row = first; row < end; row += cut.tile_rows) {
        const int64_t count = row + cut.tile_rows < end ? cut.tile_rows : end - row;
        // Many results are not in the caches: fetch their lines during the multiplication.
        for (int64_t i = 0; i < count; ++i) {
          __builtin_prefetch(y + (row + i) * w.columns + panel * width, 1);
          __builtin_prefetch(y + (row + i) * w.columns + panel * width + width - 1, 1);
        }
        const int64_t lines =
            has_next && ahead < next + panel_words ? (kGroupLines + num_tiles - 1) / num_tiles : 0;
        const Tile run = tile_of<Type>(count, num_tiles == 1);
        run(x_words + (row - first) * stride, stride, words, w.words, ahead, lines, sums);
        ahead += lines * kLine * (w.words / kGroup);
        to_rows(w, panel, count, sums, x_scale ? x_scale + row - first : nullptr,
                y + row * w.columns);
      }
    }
  });
}

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
