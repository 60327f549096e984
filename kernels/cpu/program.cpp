// Calls of kernels, one after the other.
#include "threads.h"
#include "weight.h"

TK_KERNEL(tk_linear)(const void* weight, const void* x, int64_t x_bf16, int64_t rows, void* y, int64_t y_bf16);

namespace tk::TK_VARIANT {
namespace {

constexpr int64_t kMostExpected = int64_t{8} << 20;  // about what one thread reads while Python makes the next step

// As in program.py. Whole numbers and addresses are handed over alike wherever this runs, and those that a kernel does not take do no harm.
using Function = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);

struct Call {
  Function function;
  int64_t arguments[6];

  // Of a product; else null.
  const Weight* weight() const {
    const bool is_product = reinterpret_cast<void*>(function) == reinterpret_cast<void*>(&TK_JOIN(tk_linear, TK_VARIANT));
    return is_product ? reinterpret_cast<const Weight*>(arguments[0]) : nullptr;
  }
};

// While a product ends, and what is between it and the next one runs, memory has nothing to do: the next one's weight may come.
// After the last comes the first, of the next run.
void expect_product(const Call* calls, int64_t count, int64_t after) {
  for (int64_t i = 1; i <= count; ++i) {
    const Weight* weight = calls[(after + i) % count].weight();
    if (!weight) continue;
    const int64_t bytes = 4 * weight->words * weight->columns * (weight->gated ? 2 : 1);
    return expect(weight->panels, bytes < kMostExpected ? bytes : kMostExpected);
  }
}

}  // namespace
}  // namespace tk::TK_VARIANT

TK_KERNEL(tk_run)(const void* calls, int64_t count) {
  using namespace tk::TK_VARIANT;
  const Call* const first = static_cast<const Call*>(calls);
  for (int64_t i = 0; i < count; ++i) {
    if (first[i].weight()) expect_product(first, count, i);
    const int64_t* a = first[i].arguments;
    first[i].function(a[0], a[1], a[2], a[3], a[4], a[5]);
  }
}
