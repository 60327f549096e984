// What the machine can do, for `toolkit.kernels.bench`: bytes that all threads together read from memory, and products in fp32.
#include "threads.h"
#include "variant.h"

namespace tk::TK_VARIANT {
namespace {

typedef float Vec __attribute__((vector_size(64), aligned(4)));

constexpr int64_t kPart = int64_t{1} << 18;

float sum_of(const float* x, int64_t n) {
  Vec sums[4] = {};
  for (int64_t i = 0; i + 64 <= n; i += 64) {
    for (int j = 0; j < 4; ++j) sums[j] += *reinterpret_cast<const Vec*>(x + i + 16 * j);
  }
  const Vec all = sums[0] + sums[1] + sums[2] + sums[3];
  float sum = 0;
  for (int j = 0; j < 16; ++j) sum += all[j];
  return sum;
}

}  // namespace
}  // namespace tk::TK_VARIANT

// x: [n]; sums: one for each kPart of x, the rest of which is left out.
TK_KERNEL(tk_probe_read)(const float* x, int64_t n, float* sums) {
  using namespace tk::TK_VARIANT;
  tk::parallel(n / kPart, [&](int64_t i) { sums[i] = sum_of(x + i * kPart, kPart); });
}
