// Limits of the machine, for `tools.bench.cpu_kernels`: memory reads of all threads, and products
// of each type of weight (words.h) from registers.
#include "threads.h"
#include "words.h"

namespace tk::TK_VARIANT {
namespace {

typedef float Line __attribute__((vector_size(64), aligned(4)));

constexpr int64_t kPart = int64_t{1} << 18;
constexpr int kSums = 8;  // enough to hide latency

float sum_of(const float* x, int64_t n) {
  Line sums[4] = {};
  for (int64_t i = 0; i + 64 <= n; i += 64) {
    for (int j = 0; j < 4; ++j) sums[j] += *reinterpret_cast<const Line*>(x + i + 16 * j);
  }
  const Line all = sums[0] + sums[1] + sums[2] + sums[3];
  float sum = 0;
  for (int j = 0; j < 16; ++j) sum += all[j];
  return sum;
}

template <class Type>
float multiply(int64_t rounds) {
  typename Type::Sum start[kSums] = {};
  uint32_t x[Type::kWords] = {};
  UintVec weight = {};
  asm volatile("" : "+m"(start));  // hides from the compiler that all are equal
  auto a = start[0], b = start[1], c = start[2], d = start[3], e = start[4], f = start[5],
       g = start[6], h = start[7];
  for (int64_t round = 0; round < rounds; ++round) {
    asm volatile("" : "+m"(x), "+m"(weight));
    const auto add = [&](auto&... sum) { (Type::add(sum, x, weight), ...); };
    add(a, b, c, d, e, f, g, h);
  }
  const auto all = a + b + c + d + e + f + g + h;
  return static_cast<float>(all[0]);
}

}  // namespace
}  // namespace tk::TK_VARIANT

// x: [n]; sums: one for each kPart of x. The remainder is not read.
TK_KERNEL(tk_probe_read)(const float* x, int64_t n, float* sums) {
  using namespace tk::TK_VARIANT;
  tk::parallel(n / kPart, [&](int64_t i) { sums[i] = sum_of(x + i * kPart, kPart); });
}

// kind: see weight.h; sums: [tasks]; operations: number done. A product and a sum are two.
TK_KERNEL(tk_probe_multiply)(int64_t kind, int64_t rounds, int64_t tasks, float* sums,
                             int64_t* operations) {
  using namespace tk::TK_VARIANT;
  const auto run = kind == 0 ? multiply<Fp32> : kind == 1 ? multiply<Bf16> : multiply<Int8>;
  tk::parallel(tasks, [&](int64_t i) { sums[i] = run(rounds); });
  *operations = 2 * tasks * rounds * kSums * kLanes *
                (kind == 0   ? Fp32::kPerWord
                 : kind == 1 ? Bf16::kPerWord
                             : Int8::kPerWord);
}
