// Weights in words of 32 bits. A word holds 1 fp32, 2 bf16 or 4 int8 neighbours of a row: what one
// instruction multiplies with as many elements of x and adds to one sum. A panel is kColumns rows
// of the weight (columns of y) with interleaved words: [words][kColumns]. A product reads each
// panel from end to end, whatever the type.
#pragma once
#include "simd.h"

namespace tk::TK_VARIANT {
namespace {

constexpr int kColumns = 32;
constexpr int kVecs = kColumns / kLanes;

typedef int8_t ByteVec __attribute__((vector_size(kLanes)));

[[gnu::always_inline]] inline UintVec load_words(const uint32_t* words) {
  UintVec v;
  std::memcpy(&v, words, sizeof v);
  return v;
}

[[gnu::always_inline]] inline IntVec splat_word(const uint32_t* word) {
  int32_t bits;
  std::memcpy(&bits, word, sizeof bits);
  return IntVec{} + bits;
}

[[gnu::always_inline]] inline void store_bytes(uint8_t* to, IntVec whole) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i all = (__m256i)whole;
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(all),
                                         _mm256_extracti128_si256(all, 1));
  _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(halves, halves));
#else
  const ByteVec low = __builtin_convertvector(whole, ByteVec);
  std::memcpy(to, &low, sizeof low);
#endif
}

// Each type has:
//   kPerWord               elements in a word
//   kWords                 words of x for each word of the weight
//   Sum                    type of the sums
//   add(sum, x, weight)    one word of x times the words of kLanes columns
//   is_words(n)            true if a row of n elements of x can be read as words
//   to_words(x, n, to)     else: converts a row, writes up to kLanes words past its end, and
//                          returns the number that the row was divided by

struct Fp32 {
  static constexpr int kPerWord = 1, kWords = 1;
  using Sum = Vec;
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    sum += (Vec)splat_word(x) * (Vec)weight;
  }
  static bool is_words(int64_t) { return true; }
  static float to_words(const float*, int64_t, uint32_t*) { return 1; }
};

#if defined(__AVX512BF16__)
// x is in bf16, too.
struct Bf16 {
  static constexpr int kPerWord = 2, kWords = 1;
  using Sum = Vec;
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    sum = (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)splat_word(x), (__m512bh)weight);
  }
  static bool is_words(int64_t n) { return n % kPerWord == 0; }
  static float to_words(const bf16* x, int64_t n, uint32_t* to) {
    to[n / 2] = 0;
    std::memcpy(to, x, n * 2);
    return 1;
  }
};
#else
// x is in fp32: each half of a word is widened by one instruction.
struct Bf16 {
  static constexpr int kPerWord = 2, kWords = 2;
  using Sum = Vec;
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    sum += (Vec)splat_word(x) * (Vec)(weight << 16);
    sum += (Vec)splat_word(x + 1) * (Vec)(weight & 0xffff0000u);
  }
  static bool is_words(int64_t) { return false; }
  static float to_words(const bf16* x, int64_t n, uint32_t* to) {
    to[n] = 0;
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<uint32_t>(x[i].bits) << 16;
    return 1;
  }
};
#endif

struct Int8 {
  static constexpr int kPerWord = 4;
  using Sum = IntVec;
#if defined(__AVX512VNNI__)
  static constexpr int kWords = 1;
  // The instruction needs an unsigned x: x + 128. The sum of the weight's row, times 128, is
  // subtracted at the end.
  static constexpr int kOffset = 128;
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    sum = (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)splat_word(x), (__m512i)weight);
  }
#elif defined(__AVX2__)
  // The bytes of a word become two pairs of 16 bits, even and odd; those of x are made in advance.
  // Widening takes three instructions for all rows of a tile, and each row four for 32 products.
  // vpmaddubsw would take four too, three of them multiplications.
  static constexpr int kWords = 2;
  static constexpr int kOffset = 0;
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)weight, 8), 8),
                  odd = _mm256_srai_epi16((__m256i)weight, 8);
    sum += (IntVec)_mm256_madd_epi16(even, (__m256i)splat_word(x));
    sum += (IntVec)_mm256_madd_epi16(odd, (__m256i)splat_word(x + 1));
  }
  [[gnu::always_inline]] static void store_words(uint8_t* to, IntVec whole) {
    const HalfVec halves = __builtin_convertvector((UintVec)whole, HalfVec);
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    _mm_storeu_si128((__m128i*)to, _mm_shuffle_epi8((__m128i)halves, order));
  }
#elif defined(__aarch64__)
  static constexpr int kWords = 1;
  static constexpr int kOffset = 0;
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    const int8x16_t xs = (int8x16_t)splat_word(x), ws = (int8x16_t)weight;
#if defined(__ARM_FEATURE_DOTPROD)
    sum = (IntVec)vdotq_s32((int32x4_t)sum, ws, xs);
#else
    // Sums of two products fit into 16 bits, since no byte is -128.
    const int16x8_t pairs =
        vpaddq_s16(vmull_s8(vget_low_s8(ws), vget_low_s8(xs)), vmull_high_s8(ws, xs));
    sum = (IntVec)vpadalq_s16((int32x4_t)sum, pairs);
#endif
  }
#else
  static constexpr int kWords = 1;
  static constexpr int kOffset = 0;
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    const IntVec xs = splat_word(x), ws = (IntVec)weight;
    sum += (xs << 24 >> 24) * (ws << 24 >> 24) + (xs << 16 >> 24) * (ws << 16 >> 24);
    sum += (xs << 8 >> 24) * (ws << 8 >> 24) + (xs >> 24) * (ws >> 24);
  }
#endif
#if !defined(__AVX2__) || defined(__AVX512VNNI__)
  [[gnu::always_inline]] static void store_words(uint8_t* to, IntVec whole) {
    store_bytes(to, whole);
  }
#endif
  static bool is_words(int64_t) { return false; }
  template <class X>
  static float to_words(const X* x, int64_t n, uint32_t* to) {
    const float scale = scale_of(x, n), factor = scale > 0 ? 1 / scale : 0;
    uint8_t* bytes = reinterpret_cast<uint8_t*>(to);
    for (int64_t i = 0; i < n; i += kLanes) {
      const Vec v = i + kLanes <= n ? load(x + i) : load_some(x + i, n - i);
      store_words(bytes + i * kWords, nearest(v * factor) + kOffset);
    }
    return scale;
  }
  // The greatest magnitude becomes 127. Infinity and NaN become NaN, and so do the row's products.
  template <class X>
  static float scale_of(const X* x, int64_t n) {
    IntVec most = {};  // bits of magnitudes are ordered like their values, NaN last
    for (int64_t i = 0; i < n; i += kLanes) {
      const IntVec bits = (IntVec)abs(i + kLanes <= n ? load(x + i) : load_some(x + i, n - i));
      most = bits > most ? bits : most;
    }
    const IntVec odd = most >= 0x7f800000;
    return max((Vec)(most & ~odd)) / 127 + sum((Vec)(most & odd)) * 0.0f;
  }
};

}  // namespace
}  // namespace tk::TK_VARIANT
