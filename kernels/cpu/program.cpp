// Recorded calls of kernels, one after the other.
#include "threads.h"
#include "weight.h"

TK_KERNEL(tk_linear)(const void* weight, const void* x, int64_t x_bf16, int64_t rows, void* y,
                     int64_t y_bf16);
TK_KERNEL(tk_groups)(const void* weight, const void* x, int64_t x_bf16, int64_t rows, void* y,
                     int64_t y_bf16);

namespace tk::TK_VARIANT {
namespace {

// About as much as a thread reads while Python prepares the next step.
constexpr int64_t kMaxPrefetch = int64_t{8} << 20;

// Mirror of `_Call` in program.py. All supported platforms pass integers and addresses alike, and
// surplus arguments do no harm.
using Function = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);

struct Call {
  Function function;
  int64_t arguments[6];

  // The weight of a product, else null.
  const Weight* weight() const {
    const auto is = [&](auto* product) {
      return reinterpret_cast<void*>(function) == reinterpret_cast<void*>(product);
    };
    const bool is_product =
        is(&TK_JOIN(tk_linear, TK_VARIANT)) || is(&TK_JOIN(tk_groups, TK_VARIANT));
    return is_product ? reinterpret_cast<const Weight*>(arguments[0]) : nullptr;
  }
};

// Prefetches the next product's weight: memory is idle while one product ends, and until the next.
// The last one is followed by the first, of the next run.
void expect_product(const Call* calls, int64_t count, int64_t after) {
  for (int64_t i = 1; i <= count; ++i) {
    const Weight* weight = calls[(after + i) % count].weight();
    if (!weight) continue;
    const int64_t rows = weight->columns * (weight->gated ? 2 : 1);
    const int64_t bytes = 4 * weight->panel_words * ((rows + kColumns - 1) / kColumns);
    return expect(weight->panels, bytes < kMaxPrefetch ? bytes : kMaxPrefetch);
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
