// Products with integer weights of 4 or 8 bits, with a scale, and perhaps an offset, for each group
// of a row.
//
// x is rounded to 8 bits, with a scale for each block of 16 or 32 elements of a row. The products
// of a block are added as integers, exactly, and the sums of blocks in fp32.
//
// A panel is, for each group: the scales of its kColumns rows; their offsets, if any; and the
// words of values, interleaved (words.h). A word holds 4 values of 8 bits, or 8 of 4 bits: the low
// halves of its bytes are the first four.
//
// A converted row of x is, for each block: its scale; a number that depends on its sum; its words.
#include "product.h"

namespace tk::TK_VARIANT {
namespace {

// Most rows of a tile, and vectors of columns whose sums are in registers at a time. With 6 rows,
// g++ 12 spills sums of AVX2 for the same speed.
#if defined(__AVX512F__)
constexpr int kRows = 8, kSums = 2;
#else
constexpr int kRows = 4, kSums = 2;
#endif

constexpr int64_t kBlock = 32;
constexpr int64_t kHeader = 2;  // words before a block's values of x
// Distance in bytes at which the only tile of a panel prefetches.
constexpr int64_t kDistance = 4096;

typedef int16_t ShortVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t UshortVec __attribute__((vector_size(kLanes * 4)));

// Each type has:
//   kBits, kParts    values are bits of a word; a word is kParts words of 4 bytes: `part`
//   kShift           a part's bytes are smaller than the values by this
//   kWords           words of x for each part
//   Sum, add, total  sums of a block, and how they become sums by column
struct Bits4 {
  static constexpr int kBits = 4, kParts = 2, kShift = 0, kWords = 1;
  [[gnu::always_inline]] static UintVec part(UintVec word, int index) {
    return (index ? word >> 4 : word) & 0x0f0f0f0f;
  }
  [[gnu::always_inline]] static void store_words(uint8_t* to, IntVec whole) {
    store_bytes(to, whole);
  }
#if defined(__AVX512VNNI__)
  using Sum = IntVec;
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    sum = (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weight, (__m512i)splat_word(x));
  }
  [[gnu::always_inline]] static IntVec total(Sum sum) { return sum; }
#elif defined(__AVX2__)
  // A sum of kBlock / 2 products is at most 32 / 2 * 15 * 127 < 2^15.
  using Sum = ShortVec;
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    sum += (ShortVec)_mm256_maddubs_epi16((__m256i)weight, (__m256i)splat_word(x));
  }
  [[gnu::always_inline]] static IntVec total(Sum sum) {
    return (IntVec)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
  }
#elif defined(__aarch64__)
  using Sum = IntVec;
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    Int8::add(sum, x, weight);
  }
  [[gnu::always_inline]] static IntVec total(Sum sum) { return sum; }
#else
  using Sum = ShortVec;  // see AVX2
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    const ShortVec xs = (ShortVec)splat_word(x);
    sum += (xs << 8 >> 8) * ((ShortVec)weight & 255);
    sum += (xs >> 8) * ((ShortVec)weight >> 8);
  }
  [[gnu::always_inline]] static IntVec total(Sum sum) {
    return ((IntVec)sum << 16 >> 16) + ((IntVec)sum >> 16);
  }
#endif
};

struct Bits8 {
  static constexpr int kBits = 8, kParts = 1;
  using Sum = IntVec;
  [[gnu::always_inline]] static IntVec total(Sum sum) { return sum; }
  [[gnu::always_inline]] static void store_words(uint8_t* to, IntVec whole) {
    Int8::store_words(to, whole);
  }
#if defined(__aarch64__)
  static constexpr int kShift = 128, kWords = 1;
  [[gnu::always_inline]] static UintVec part(UintVec word, int) { return word ^ 0x80808080; }
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    Int8::add(sum, x, weight);
  }
#else
  static constexpr int kShift = 0;
  [[gnu::always_inline]] static UintVec part(UintVec word, int) { return word; }
#if defined(__AVX512VNNI__)
  static constexpr int kWords = 1;
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    Bits4::add(sum, x, weight);
  }
#elif defined(__AVX2__)
  // As for Int8, but zeros extend the bytes of the weight.
  static constexpr int kWords = 2;
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    const __m256i even = (__m256i)(weight & 0x00ff00ff),
                  odd = _mm256_srli_epi16((__m256i)weight, 8);
    sum += (IntVec)_mm256_madd_epi16(even, (__m256i)splat_word(x));
    sum += (IntVec)_mm256_madd_epi16(odd, (__m256i)splat_word(x + 1));
  }
#else
  static constexpr int kWords = 1;
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    // Products fit into 16 bits, sums do not.
    const ShortVec xs = (ShortVec)splat_word(x);
    const IntVec even = (IntVec)((xs << 8 >> 8) * ((ShortVec)weight & 255)),
                 odd = (IntVec)((xs >> 8) * (ShortVec)((UshortVec)weight >> 8));
    sum += (even << 16 >> 16) + (even >> 16) + (odd << 16 >> 16) + (odd >> 16);
  }
#endif
#endif
};

// fp16 is widened by instructions, or by moving its exponent to that of fp32: by 112, which also
// serves the numbers without an implicit bit.
[[gnu::always_inline]] inline Vec load_fp16(const uint16_t* x) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
#else
  HalfVec half;
  std::memcpy(&half, x, sizeof half);
  const UintVec bits = __builtin_convertvector(half, UintVec);
  const Vec magnitude = (Vec)((bits & 0x7fff) << 13) * 0x1p112f;
  return (Vec)((UintVec)magnitude | (bits & 0x8000) << 16);
#endif
}

inline int64_t number_words(const Weight& w) {
  return w.scale_kind == kScaleFp32 ? kColumns : kColumns / 2;
}

// Loads a number for each column, and returns the address of what follows.
[[gnu::always_inline]] inline const uint32_t* load_numbers(const Weight& w, const uint32_t* from,
                                                           Vec* to) {
  for (int v = 0; v < kVecs; ++v) {
    if (w.scale_kind == kScaleFp16) {
      to[v] = load_fp16(reinterpret_cast<const uint16_t*>(from) + v * kLanes);
    } else if (w.scale_kind == kScaleBf16) {
      to[v] = load(reinterpret_cast<const bf16*>(from) + v * kLanes);
    } else {
      to[v] = load(reinterpret_cast<const float*>(from) + v * kLanes);
    }
  }
  return from + number_words(w);
}

// Sizes of a weight.
struct Sizes {
  explicit Sizes(const Weight& w) {
    const int64_t per_word = w.kind == kGroups4 ? 8 : 4;
    depth = w.words * per_word, groups = depth / w.group;
    block = w.group % kBlock ? kBlock / 2 : kBlock;
    block_words = block / per_word, group_words = w.group / per_word * kColumns;
    header_words = number_words(w) * (w.has_offsets ? 2 : 1);
  }
  int64_t depth, groups;               // with padding
  int64_t block, block_words;          // of a column
  int64_t group_words, header_words;   // of a panel
};

template <class Type, int kTileRows, bool kHasOffsets, bool kIsOnly>
void tile(const Weight& w, const uint32_t* __restrict x, int64_t stride,
          const uint32_t* __restrict panel, Ahead ahead, float* __restrict out) {
  const Sizes size(w);
  const int64_t x_words = size.block_words * Type::kParts * Type::kWords;
  for (int i = 0; i < kTileRows * kColumns; i += kLanes) store(out + i, Vec{});
  for (int64_t group = 0; group < size.groups; ++group) {
    Vec scale[kVecs], offset[kVecs];
    panel = load_numbers(w, panel, scale);
    if constexpr (kHasOffsets) {
      panel = load_numbers(w, panel, offset);
      for (int v = 0; v < kVecs && Type::kShift; ++v) offset[v] += scale[v] * Type::kShift;
    }
    for (int64_t block = 0; block < w.group; block += size.block) {
      if (kIsOnly) {
        const char* far = reinterpret_cast<const char*>(panel) + kDistance;
        for (int64_t i = 0; i < size.block_words * kColumns; i += kLine)
          __builtin_prefetch(far + 4 * i, 0, 2);
      } else {
        for (int64_t i = 0; i < ahead.lines; ++i, ahead.from += kLine)
          __builtin_prefetch(ahead.from, 0, 2);
      }
      for (int first = 0; first < kVecs; first += kSums) {
        typename Type::Sum sums[kTileRows][kSums] = {};
        const uint32_t *words = panel + first * kLanes, *own = x + kHeader;
        for (int64_t word = 0; word < size.block_words; ++word) {
          for (int part = 0; part < Type::kParts; ++part) {
            UintVec weights[kSums];
            for (int v = 0; v < kSums; ++v)
              weights[v] = Type::part(load_words(words + v * kLanes), part);
            for (int row = 0; row < kTileRows; ++row) {
              for (int v = 0; v < kSums; ++v)
                Type::add(sums[row][v], own + row * stride, weights[v]);
            }
            own += Type::kWords;
          }
          words += kColumns;
        }
        for (int row = 0; row < kTileRows; ++row) {
          const Vec x_scale = (Vec)splat_word(x + row * stride);
          for (int v = 0; v < kSums; ++v) {
            float* const to = out + row * kColumns + (first + v) * kLanes;
            IntVec whole = Type::total(sums[row][v]);
            if (!kHasOffsets) whole += splat_word(x + row * stride + 1);
            Vec value = load(to);
            value += __builtin_convertvector(whole, Vec) * (scale[first + v] * x_scale);
            if (kHasOffsets) value += offset[first + v] * (Vec)splat_word(x + row * stride + 1);
            store(to, value);
          }
        }
      }
      panel += size.block_words * kColumns;
      x += kHeader + x_words;
    }
  }
}

template <class Type>
struct GroupLoop {
  static constexpr int kMostRows = kRows;
  static bool is_words(const Weight&) { return false; }
  static int64_t row_words(const Weight& w) {
    const Sizes size(w);
    const int64_t x_words = size.block_words * Type::kParts * Type::kWords;
    return size.depth / size.block * (kHeader + x_words);
  }
  static int64_t steps(const Weight& w) {
    const Sizes size(w);
    return size.depth / size.block;
  }
  static int64_t step_lines(const Weight& w) {
    return (w.panel_words / kLine + steps(w) - 1) / steps(w);
  }

  template <class X>
  static float to_words(const Weight& w, const X* x, uint32_t* to) {
    const Sizes size(w);
    const float zero = w.has_offsets ? 0 : (1 << (Type::kBits - 1)) - Type::kShift;
    for (int64_t first = 0; first < size.depth; first += size.block, x += size.block) {
      const int64_t count = w.depth - first < size.block ? w.depth - first : size.block;
      // The least scales have no reciprocal: their block becomes zeros.
      const float scale = Int8::scale_of(x, count), factor = scale < 0x1p-126f ? 0 : 1 / scale;
      uint8_t* const bytes = reinterpret_cast<uint8_t*>(to + kHeader);
      UintVec totals = {};  // what is not finite becomes the least integers, and wraps around
      for (int64_t i = 0; i < size.block; i += kLanes) {
        const Vec v = i + kLanes <= count ? load(x + i)
                      : i < count         ? load_some(x + i, count - i)
                                          : Vec{};
        const IntVec whole = nearest(v * factor);
        Type::store_words(bytes + i * Type::kWords, whole);
        totals += (UintVec)whole;
      }
      const float total = sum(__builtin_convertvector((IntVec)totals, Vec));  // exact
      const int32_t start = static_cast<int32_t>(static_cast<int64_t>(-zero * total));
      const float scaled = scale * total;
      std::memcpy(to, &scale, 4);
      if (w.has_offsets) {
        std::memcpy(to + 1, &scaled, 4);
      } else {
        std::memcpy(to + 1, &start, 4);
      }
      to += kHeader + size.block * Type::kWords / 4;
    }
    return 1;
  }

  template <int kTileRows = kRows>
  static Tile tile_of(const Weight& w, int64_t rows, bool is_only) {
    if constexpr (kTileRows > 1) {
      if (rows < kTileRows) return tile_of<kTileRows - 1>(w, rows, is_only);
    }
    if (w.has_offsets)
      return is_only ? tile<Type, kTileRows, true, true> : tile<Type, kTileRows, true, false>;
    return is_only ? tile<Type, kTileRows, false, true> : tile<Type, kTileRows, false, false>;
  }

  [[gnu::always_inline]] static Vec value_of(const Weight&, int64_t, const float* sums,
                                             const float*, int64_t) {
    return load(sums);
  }
};

// The row of a weight at a column of a panel, or -1 for padding.
inline int64_t row_of(const Weight& w, int64_t panel, int64_t column) {
  const int64_t width = w.gated ? kColumns / 2 : kColumns;
  const int64_t row = panel * width + column % width;
  return row < w.columns ? row + (column < width ? 0 : w.columns) : -1;
}

// Eight values of 4 bits in order become those of Bits4.
inline uint32_t ordered(uint32_t word) {
  const auto spread = [](uint32_t x) {
    x = (x | x << 8) & 0x00ff00ff;
    return (x | x << 4) & 0x0f0f0f0f;
  };
  return spread(word & 0xffff) | spread(word >> 16) << 4;
}

inline float number_at(const Weight& w, const uint32_t* numbers, int64_t column) {
  if (w.scale_kind == kScaleFp32) return reinterpret_cast<const float*>(numbers)[column];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(numbers)[column];
  if (w.scale_kind == kScaleBf16) return to_float(bf16{bits});
  uint16_t lanes[kLanes] = {bits};
  return load_fp16(lanes)[0];
}

}  // namespace
}  // namespace tk::TK_VARIANT

// As tk_linear.
TK_KERNEL(tk_groups)(const void* weight, const void* x, int64_t x_bf16, int64_t rows, void* y,
                     int64_t y_bf16) {
  using namespace tk::TK_VARIANT;
  const Weight& w = *static_cast<const Weight*>(weight);
  const auto run = [&](auto type, auto* from) {
    using Loop = GroupLoop<decltype(type)>;
    if (y_bf16) {
      multiply<Loop>(w, from, rows, static_cast<bf16*>(y));
    } else {
      multiply<Loop>(w, from, rows, static_cast<float*>(y));
    }
  };
  const auto run_type = [&](auto type) {
    if (x_bf16) {
      run(type, static_cast<const bf16*>(x));
    } else {
      run(type, static_cast<const float*>(x));
    }
  };
  if (w.kind == kGroups4) {
    run_type(Bits4{});
  } else {
    run_type(Bits8{});
  }
}

// Fills the panels of a weight. values: [rows][words]; numbers: scales [rows][groups], then offsets
// if there are any. Panels are padded with zeros.
TK_KERNEL(tk_pack_groups)(const void* weight, const uint32_t* values, const void* scales,
                          const void* offsets, uint32_t* panels) {
  using namespace tk::TK_VARIANT;
  const Weight& w = *static_cast<const Weight*>(weight);
  const Sizes size(w);
  const int64_t bytes = w.scale_kind == kScaleFp32 ? 4 : 2;
  const int64_t width = w.gated ? kColumns / 2 : kColumns;
  const int64_t row_words = size.group_words / kColumns;
  tk::parallel((w.columns + width - 1) / width, [&](int64_t panel) {
    for (int64_t column = 0; column < kColumns; ++column) {
      const int64_t row = row_of(w, panel, column);
      uint32_t* to = panels + panel * w.panel_words;
      for (int64_t group = 0; group < size.groups; ++group) {
        const auto put = [&](const void* numbers) {
          char* const own = reinterpret_cast<char*>(to) + column * bytes;
          const char* const given = static_cast<const char*>(numbers);
          std::memset(own, 0, bytes);
          if (row >= 0) std::memcpy(own, given + (row * size.groups + group) * bytes, bytes);
          to += number_words(w);
        };
        put(scales);
        if (offsets) put(offsets);
        for (int64_t word = 0; word < row_words; ++word) {
          const uint32_t own =
              row < 0 ? 0 : values[row * w.words + group * row_words + word];
          to[word * kColumns + column] = w.kind == kGroups4 ? ordered(own) : own;
        }
        to += size.group_words;
      }
    }
  });
}

// As tk_rows. A product of a value and a scale is rounded before an offset is added.
TK_KERNEL(tk_group_rows)(const void* weight, const int64_t* indices, int64_t count, void* y,
                         int64_t y_bf16) {
  using namespace tk::TK_VARIANT;
  const Weight& w = *static_cast<const Weight*>(weight);
  const Sizes size(w);
  const bool is_4_bits = w.kind == kGroups4;
  const int32_t zero = w.has_offsets ? 0 : is_4_bits ? 8 : 128;
  const auto copy = [&](auto* to, int64_t row) {
    if (row < 0 || row >= w.columns) {
      for (int64_t i = 0; i < w.depth; ++i) from_float(0.0f, to + i);
      return;
    }
    const int64_t column = row % kColumns;
    const uint32_t* from = w.panels + row / kColumns * w.panel_words;
    for (int64_t first = 0; first < w.depth; first += w.group) {
      const double scale = number_at(w, from, column);
      const float offset = w.has_offsets ? number_at(w, from + number_words(w), column) : 0.0f;
      const uint32_t* const words = from + size.header_words + column;
      for (int64_t i = 0; i < w.group && first + i < w.depth; ++i) {
        const int64_t word = is_4_bits ? i / 8 : i / 4;
        const uint32_t shift = is_4_bits ? i % 4 * 8 + i % 8 / 4 * 4 : i % 4 * 8;
        const int32_t value = words[word * kColumns] >> shift & (is_4_bits ? 15 : 255);
        const float scaled = static_cast<float>(scale * (value - zero));
        from_float(w.has_offsets ? scaled + offset : scaled, to + first + i);
      }
      from += size.header_words + size.group_words;
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
