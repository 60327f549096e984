// y = act(x W^T + b) for any packed weight, and any number of rows of x: everything but the main
// loop.
//
// A tile is up to kMostRows rows of x times one panel. Few rows are bound by reading W: every panel
// is read from memory once, from end to end, and from the cache by the tiles after the first. Many
// rows are bound by arithmetic: they are cut into blocks that stay in the cache while all panels
// are read.
//
// A main loop is a type with
//   kMostRows               of a tile
//   is_words(w)             true if rows of x can be read as words
//   row_words(w)            words from one row of x to the next
//   to_words(w, x, to)      else: converts a row and returns the number that it was divided by. It
//                           may write up to kLanes words past the end of its words
//   steps(w)                parts of a panel, after each of which a tile prefetches
//   step_lines(w)           cache lines of each
//   tile_of(w, rows, is_only)
//   value_of(w, column, sums, x_scale, row)   results of kLanes columns from sums of a tile
#pragma once
#include "activation.h"
#include "threads.h"
#include "weight.h"
#include "words.h"

namespace tk::TK_VARIANT {
namespace {

constexpr int64_t kLine = 16;  // words of a cache line
// Least bytes of weights per task: about 10 us of reading memory.
constexpr int64_t kTaskBytes = 96 * 1024;
// Tasks per thread if there are several blocks.
constexpr int64_t kTasks = 32;

// Where a tile prefetches: `lines` from `from` on after the first step, and so on.
struct Ahead {
  const uint32_t* from;
  int64_t lines;
};

// Multiplies rows of x, `stride` words apart, by a panel. sums: [rows][kColumns].
using Tile = void (*)(const Weight&, const uint32_t* x, int64_t stride, const uint32_t* panel,
                      Ahead, float* sums);

// Converts sums [rows][kColumns] of a panel to rows of y, [columns] each.
template <class Loop, int64_t kActivation, bool kGated, class Y>
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
          Loop::value_of(w, panel * kColumns + v * kLanes, sums + v * kLanes, x_scale, row) +
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

template <class Loop, class Y, int64_t kActivation = kGeluQuick>
Finish<Y> finish_of(const Weight& w) {
  if constexpr (kActivation > 0) {
    if (w.activation != kActivation) return finish_of<Loop, Y, kActivation - 1>(w);
  }
  return w.gated ? finish<Loop, kActivation, true, Y> : finish<Loop, kActivation, false, Y>;
}

// The product and block whose words are in the thread's scratch.
thread_local uint64_t converted_product = 0;
thread_local int64_t converted_block = 0;

// The tasks of a product: rows are cut into blocks of tiles, and the panels of a block into parts.
// A task is one part for one block.
struct Cut {
  Cut(const Weight& w, int64_t rows, int64_t most_rows) {
    // Rows of a block: full tiles, about half of a second-level cache at a depth of 1024. Fewer
    // rows at greater depths, so that each block fits, read panels more often: products were 4 %
    // slower.
    const int64_t most = most_rows * (112 / most_rows);
    const int64_t width = w.gated ? kColumns / 2 : kColumns;
    const int64_t tiles = (rows + most_rows - 1) / most_rows;
    blocks = (tiles * most_rows + most - 1) / most;
    tile_rows = (rows + tiles - 1) / tiles;
    block_rows = (tiles + blocks - 1) / blocks * tile_rows;
    panels = (w.columns + width - 1) / width;
    part_panels = blocks > 1 ? panels * blocks / (kTasks * num_threads())
                             : kTaskBytes / (4 * w.panel_words);
    part_panels = part_panels < 1 ? 1 : part_panels > panels ? panels : part_panels;
    parts = (panels + part_panels - 1) / part_panels;
  }
  int64_t blocks, block_rows, tile_rows;
  int64_t parts, part_panels, panels;
};

template <class Loop, class X, class Y>
void multiply(const Weight& w, const X* x, int64_t rows, Y* y) {
  if (rows == 0) return;
  const bool is_words = Loop::is_words(w);
  // The stride of converted rows leaves space for what `to_words` writes past their end.
  const int64_t stride = Loop::row_words(w) + (is_words ? 0 : kLanes);
  const Cut cut(w, rows, Loop::kMostRows);
  const int64_t width = w.gated ? kColumns / 2 : kColumns;
  const int64_t steps = Loop::steps(w), step_lines = Loop::step_lines(w);
  const int64_t num_tasks = cut.blocks * cut.parts;
  const uint64_t product = new_number();
  const Finish<Y> to_rows = finish_of<Loop, Y>(w);

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
          x_scale[i] = Loop::to_words(w, x + (first + i) * w.depth, converted + i * stride);
        converted_product = product, converted_block = block;
      }
    }
    alignas(64) float sums[Loop::kMostRows * kColumns];
    const int64_t last =
        (part + 1) * cut.part_panels < cut.panels ? (part + 1) * cut.part_panels : cut.panels;
    for (int64_t panel = part * cut.part_panels; panel < last; ++panel) {
      const uint32_t* const words = w.panels + panel * w.panel_words;
      // The first of several tiles waits for memory, and the others find the panel in the cache. So
      // each prefetches its part of the thread's next panel, to keep memory busy.
      const bool has_next = panel + 1 < last || next_task < num_tasks;
      const uint32_t* const next =
          panel + 1 < last ? words + w.panel_words
                           : w.panels + next_task % cut.parts * cut.part_panels * w.panel_words;
      const uint32_t* ahead = next;
      for (int64_t row = first; row < end; row += cut.tile_rows) {
        const int64_t count = row + cut.tile_rows < end ? cut.tile_rows : end - row;
        // Many results are not in the caches: fetch their lines during the multiplication.
        for (int64_t i = 0; i < count; ++i) {
          __builtin_prefetch(y + (row + i) * w.columns + panel * width, 1);
          __builtin_prefetch(y + (row + i) * w.columns + panel * width + width - 1, 1);
        }
        const int64_t lines = has_next && ahead < next + w.panel_words
                                  ? (step_lines + num_tiles - 1) / num_tiles
                                  : 0;
        const Tile run = Loop::tile_of(w, count, num_tiles == 1);
        run(w, x_words + (row - first) * stride, stride, words, {ahead, lines}, sums);
        ahead += lines * kLine * steps;
        to_rows(w, panel, count, sums, x_scale ? x_scale + row - first : nullptr,
                y + row * w.columns);
      }
    }
  });
}

}  // namespace
}  // namespace tk::TK_VARIANT
