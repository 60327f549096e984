// A packed weight, passed by Python.
#pragma once
#include "words.h"

namespace tk::TK_VARIANT {
namespace {

enum Kind : int64_t { kFp32, kBf16, kInt8, kGroups4, kGroups8 };
enum ScaleKind : int64_t { kScaleFp32, kScaleBf16, kScaleFp16 };

// product.py has the same fields. Arrays by column are padded to full panels, in the panels' order.
struct Weight {
  const uint32_t* panels;  // [panels][panel_words]
  const float* bias;       // by column, or null
  const float* scale;      // by column, for int8
  const int32_t* total;    // by column, the sum of its weights, for int8
  int64_t kind;
  int64_t depth;
  int64_t words;       // in depth
  int64_t columns;     // of y
  int64_t activation;  // Activation
  int64_t gated;       // y = act(gate) * up: half of a panel's columns are gate's, half are up's
  int64_t panel_words;
  // Of groups (groups.cpp), else 0:
  int64_t group;        // elements of a group, in depth
  int64_t scale_kind;   // ScaleKind
  int64_t has_offsets;
};

}  // namespace
}  // namespace tk::TK_VARIANT
