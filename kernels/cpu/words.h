// Weights by words of 32 bits. A word holds 1 fp32, 2 bf16 or 4 int8 neighbours of one row of the weight: what one instruction
// multiplies with as many elements of x and adds to one sum. A panel is kColumns rows of the weight (columns of y), their words
// interleaved: [words][kColumns]. So a product reads each panel end to end, whatever the type.
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

// Each type has: kPerWord, elements in a word; kWords, words that x has for each word of the weight; Sum, what products are added up in;
// add(sum, x, weight), for one word of x and the words of kLanes columns; scale(x, n), what a row of x is divided by; and
// take(x, n, scale, to), which makes words of n elements of x, the last filled up with zeros.

struct Fp32 {
  static constexpr int kPerWord = 1, kWords = 1;
  using Sum = Vec;
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    sum += (Vec)splat_word(x) * (Vec)weight;
  }
  static float scale(const float*, int64_t) { return 1; }
  static void take(const float* x, int64_t n, float, uint32_t* to) { std::memcpy(to, x, n * 4); }
};

#if defined(__AVX512BF16__)
// x in bf16, too.
struct Bf16 {
  static constexpr int kPerWord = 2, kWords = 1;
  using Sum = Vec;
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    sum = (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)splat_word(x), (__m512bh)weight);
  }
  static float scale(const bf16*, int64_t) { return 1; }
  static void take(const bf16* x, int64_t n, float, uint32_t* to) {
    to[n / 2] = 0;
    std::memcpy(to, x, n * 2);
  }
};
#else
// x in fp32: the halves of a word are widened, which takes one instruction each.
struct Bf16 {
  static constexpr int kPerWord = 2, kWords = 2;
  using Sum = Vec;
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    sum += (Vec)splat_word(x) * (Vec)(weight << 16);
    sum += (Vec)splat_word(x + 1) * (Vec)(weight & 0xffff0000u);
  }
  static float scale(const bf16*, int64_t) { return 1; }
  static void take(const bf16* x, int64_t n, float, uint32_t* to) {
    to[n] = 0;
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<uint32_t>(x[i].bits) << 16;
  }
};
#endif

struct Int8 {
  static constexpr int kPerWord = 4, kWords = 1;
  using Sum = IntVec;
#if defined(__AVX512VNNI__)
  // The instruction takes x without a sign: x + 128, and 128 times the sum of the weight's row is taken off in the end.
  static constexpr int kOffset = 128;
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    sum = (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)splat_word(x), (__m512i)weight);
  }
#elif defined(__AVX2__)
  // |x| times the weight with x's sign: sums of two stay within 16 bits, since neither is ever -128.
  static constexpr int kOffset = 0;
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    const __m256i word = (__m256i)splat_word(x);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(word), _mm256_sign_epi8((__m256i)weight, word));
    sum += (IntVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
#else
  static constexpr int kOffset = 0;
  [[gnu::always_inline]] static void add(Sum& sum, const uint32_t* x, UintVec weight) {
    const IntVec xs = splat_word(x), ws = (IntVec)weight;
    sum += (xs << 24 >> 24) * (ws << 24 >> 24) + (xs << 16 >> 24) * (ws << 16 >> 24);
    sum += (xs << 8 >> 24) * (ws << 8 >> 24) + (xs >> 24) * (ws >> 24);
  }
#endif
  // The largest magnitude becomes 127. Infinity and NaN become NaN, and the row's products with it.
  template <class X>
  static float scale(const X* x, int64_t n) {
    Vec most = {}, bad = {};
    int64_t i = 0;
    for (; i < n; i += kLanes) {
      const Vec v = i + kLanes <= n ? load(x + i) : load_some(x + i, n - i);
      most = max(most, abs(v));
      bad += v * 0.0f;
    }
    return max(most) / 127 + sum(bad);
  }
  template <class X>
  static void take(const X* x, int64_t n, float scale, uint32_t* to) {
    const float factor = scale > 0 ? 1 / scale : 0;
    int8_t* bytes = reinterpret_cast<int8_t*>(to);
    for (int64_t i = 0; i < n; i += kLanes) {
      const Vec v = i + kLanes <= n ? load(x + i) : load_some(x + i, n - i);
      const IntVec whole = nearest(v * factor) + kOffset;
      const ByteVec low = __builtin_convertvector(whole, ByteVec);
      std::memcpy(bytes + i, &low, sizeof low);
    }
  }
};

}  // namespace
}  // namespace tk::TK_VARIANT
