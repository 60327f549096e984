// Activation functions, numbered as in `toolkit.kernels.cpu.product.ACTIVATIONS`.
#pragma once
#include "simd.h"

namespace tk::TK_VARIANT {
namespace {

enum Activation : int64_t { kNone, kSilu, kRelu, kGelu, kGeluTanh, kRelu2, kGeluQuick };

[[gnu::always_inline]] inline Vec activate(Vec x, int64_t kind) {
  switch (kind) {
    case kSilu:
      return x * sigmoid(x);
    case kRelu:
      return x < 0.0f ? Vec{} : x;
    case kGelu:
      return 0.5f * x * (1.0f + erf(x * 0.70710678f));
    case kGeluTanh:
      // (1 + tanh(z)) / 2 = sigmoid(2 z)
      return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
    case kRelu2:
      return x < 0.0f ? Vec{} : x * x;
    case kGeluQuick:
      return x * sigmoid(1.702f * x);
    default:
      return x;
  }
}

}  // namespace
}  // namespace tk::TK_VARIANT
