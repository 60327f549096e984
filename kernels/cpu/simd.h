// Vectors of fp32, as wide as the variant's registers, and their functions. They use the compiler's
// vector types, so one source serves every instruction set, and intrinsics only for instructions
// that the compiler does not choose.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "variant.h"

namespace tk::TK_VARIANT {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UintVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));

// bfloat16 is the upper half of fp32.
struct bf16 {
  uint16_t bits;
};

[[gnu::always_inline]] inline Vec splat(float x) { return x - Vec{}; }

[[gnu::always_inline]] inline Vec load(const float* x) {
  Vec v;
  std::memcpy(&v, x, sizeof v);
  return v;
}

[[gnu::always_inline]] inline void store(float* x, Vec v) { std::memcpy(x, &v, sizeof v); }

[[gnu::always_inline]] inline Vec load(const bf16* x) {
  HalfVec half;
  std::memcpy(&half, x, sizeof half);
  return (Vec)(__builtin_convertvector(half, UintVec) << 16);
}

// Rounds to nearest, ties to even, as PyTorch does. NaN stays NaN.
[[gnu::always_inline]] inline void store(bf16* x, Vec v) {
  const UintVec bits = (UintVec)v;
  const UintVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const UintVec nan = (UintVec)(v != v);
  const HalfVec half = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), HalfVec);
  std::memcpy(x, &half, sizeof half);
}

[[gnu::always_inline]] inline float to_float(float x) { return x; }

[[gnu::always_inline]] inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

[[gnu::always_inline]] inline void from_float(float x, float* y) { *y = x; }

[[gnu::always_inline]] inline void from_float(float x, bf16* y) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  y->bits = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The first n elements, n < kLanes; the others are 0.
template <class T>
[[gnu::always_inline]] inline Vec load_some(const T* x, int64_t n) {
  T part[kLanes] = {};
  std::memcpy(part, x, n * sizeof(T));
  return load(part);
}

template <class T>
[[gnu::always_inline]] inline void store_some(T* x, Vec v, int64_t n) {
  T part[kLanes];
  store(part, v);
  std::memcpy(x, part, n * sizeof(T));
}

[[gnu::always_inline]] inline Vec select(IntVec mask, Vec yes, Vec no) {
  return (Vec)((mask & (IntVec)yes) | (~mask & (IntVec)no));
}

[[gnu::always_inline]] inline bool any(IntVec mask) {
  int32_t lanes[kLanes], all = 0;
  std::memcpy(lanes, &mask, sizeof mask);
  for (int32_t lane : lanes) all |= lane;
  return all;
}

[[gnu::always_inline]] inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
[[gnu::always_inline]] inline Vec min(Vec a, Vec b) { return a < b ? a : b; }
[[gnu::always_inline]] inline Vec abs(Vec x) { return (Vec)((IntVec)x & 0x7fffffff); }

// Adds fours to each other instead of lane to lane: attention needs a sum for every key.
[[gnu::always_inline]] inline float sum(Vec v) {
  typedef float Four __attribute__((vector_size(16)));
  Four parts[kLanes / 4];
  std::memcpy(parts, &v, sizeof v);
  for (int width = kLanes / 8; width; width /= 2) {
    for (int i = 0; i < width; ++i) parts[i] += parts[i + width];
  }
  return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

[[gnu::always_inline]] inline float max(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float greatest = v[0];
  for (int i = 1; i < kLanes; ++i) greatest = v[i] > greatest ? v[i] : greatest;
  return greatest;
#endif
}

// Rounds to the nearest integer, ties to even, for |x| < 2^22.
[[gnu::always_inline]] inline IntVec nearest(Vec x) {
#if defined(__AVX512F__)
  return (IntVec)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (IntVec)_mm256_cvtps_epi32((__m256)x);
#elif defined(__aarch64__)
  return (IntVec)vcvtnq_s32_f32((float32x4_t)x);
#else
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: the sum has no fraction bits
  return (IntVec)(x + magic) - (IntVec)magic;
#endif
}

// e^x within 2 units in the last place; 0 below -87.3, infinity above 88.8. Cephes' polynomial on
// [-ln 2 / 2, ln 2 / 2].
[[gnu::always_inline]] inline Vec exp(Vec x) {
  // Of a number and NaN, min and max return the second argument, so NaN stays.
  const Vec clamped = min(splat(89.0f), max(splat(-87.3f), x));
  const IntVec exponent = nearest(clamped * 1.44269504f);
  const Vec n = __builtin_convertvector(exponent, Vec);
  const Vec r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#if defined(__AVX512F__)
  const Vec y = (Vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  // 2^n in two steps: for n = 128 there is no exponent.
  const IntVec half = exponent >> 1;
  const Vec y = p * (Vec)((half + 127) << 23) * (Vec)((exponent - half + 127) << 23);
#endif
  return x < -87.3f ? Vec{} : y;
}

[[gnu::always_inline]] inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(-x)); }

// Within 1.5e-7: Abramowitz & Stegun, 7.1.26.
[[gnu::always_inline]] inline Vec erf(Vec x) {
  const Vec a = abs(x);
  const Vec t = 1.0f / (1.0f + 0.3275911f * a);
  Vec p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const Vec y = 1.0f - p * t * exp(-a * a);
  return (Vec)((IntVec)y | ((IntVec)x & (int32_t)0x80000000));
}

// Calls f(first index, number of elements) for each vector. The last may be a part of one.
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

}  // namespace
}  // namespace tk::TK_VARIANT
