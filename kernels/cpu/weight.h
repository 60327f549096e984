// A packed weight, as Python gives it.
#pragma once
#include "words.h"

namespace tk::TK_VARIANT {
namespace {

enum Kind : int64_t { kFp32, kBf16, kInt8 };

// What Python gives (linear.py has the same fields). Arrays by column have whole panels, in the panels' order.
struct Weight {
  const uint32_t* panels;  // [panels][words][kColumns]
  const float* bias;       // or null
  const float* scale;      // of each column, and
  const int32_t* total;    // the sum of its weights, for int8
  int64_t kind;
  int64_t depth;
  int64_t words;       // in depth
  int64_t columns;     // of y
  int64_t activation;  // Activation
  int64_t gated;       // a panel holds half columns of gate and the same of up: y = act(gate) * up
};

}  // namespace
}  // namespace tk::TK_VARIANT
