// The next token of every row of logits: the likeliest, or one drawn by the request's seed and the token's position.
//
// What is drawn is `toolkit.sampling.sampler`'s: where the running sum of the weights, in the vocabulary's order, first exceeds a
// number in [0, 1) of all. top-k, min-p and top-p come down to one number, the least weight that is kept. It is found without
// sorting: weights are numbers in [0, 1], whose bits are in the order of their values, so that three passes over digits of these
// bits, from the high ones down, narrow it to one value.
#include <cmath>

#include "simd.h"
#include "threads.h"

namespace tk::TK_VARIANT {
namespace {

constexpr int64_t kPart = 256;  // weights whose sum is taken at once
constexpr int kDigits[] = {21, 10, 0};  // where the digits of a weight's bits begin
constexpr int64_t kBuckets = 1 << 11;

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// In [0, 1): SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014).
double uniform(int64_t seed, int64_t position) {
  uint64_t x = static_cast<uint64_t>(seed) + (static_cast<uint64_t>(position) + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return static_cast<double>((x ^ (x >> 31)) >> 11) * 0x1p-53;
}

// The greatest; NaN where there is one.
float greatest(const float* x, int64_t n) {
  constexpr int kTops = 4;
  Vec tops[kTops];
  IntVec odd = {};
  for (Vec& top : tops) top = splat(x[0]);
  int64_t i = 0;
  for (; i + kTops * kLanes <= n; i += kTops * kLanes) {
    for (int j = 0; j < kTops; ++j) {
      const Vec part = load(x + i + j * kLanes);
      tops[j] = max(part, tops[j]);
      odd |= part != part;
    }
  }
  if (any(odd)) return std::nanf("");
  float most = max(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
  for (; i < n; ++i) most = x[i] > most || x[i] != x[i] ? x[i] : most;
  return most;
}

int64_t find(const float* x, int64_t n, float value) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    if (any(load(x + i) == value)) break;
  }
  while (i < n && x[i] != value) ++i;
  return i;
}

// weights[i] = e^((logits[i] - best) / temperature)
void weigh(const float* logits, float best, float temperature, int64_t n, float* weights) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(weights + i, exp((load(logits + i) - best) / temperature));
  if (i < n) store_some(weights + i, exp((load_some(logits + i, n - i) - best) / temperature), n - i);
}

// The least weight, not below `floor`, for which all greater weights come to less than `limit`, each counting for
// measure(weight); the greatest of all where none is so small. Weights of 0 are not looked at.
template <class F>
float least_within(const float* weights, int64_t n, float floor, double limit, F measure) {
  uint32_t prefix = 0;  // of the bits looked for
  double above = 0;     // of weights that are greater by the digits known so far
  int known = 32;       // bits below which are not known yet
  for (int digit : kDigits) {
    double buckets[kBuckets] = {};
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = bits_of(weights[i]);
      if (weights[i] < floor || bits == 0 || (static_cast<uint64_t>(bits ^ prefix) >> known) != 0) continue;
      buckets[(bits >> digit) & ((1u << (known - digit)) - 1)] += measure(weights[i]);
    }
    int64_t found = -1;
    double next = above;
    for (int64_t bucket = kBuckets - 1; bucket >= 0; --bucket) {
      if (buckets[bucket] == 0) continue;
      if (found >= 0 && next >= limit) break;
      found = bucket;
      above = next;
      next += buckets[bucket];
    }
    if (found < 0) return floor;
    prefix |= static_cast<uint32_t>(found) << digit;
    known = digit;
  }
  return from_bits(prefix);
}

double sum_of(const float* weights, int64_t n, float least) {
  double sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += weights[i + j] >= least ? weights[i + j] : 0.0f;
  }
  for (; i < n; ++i) sums[0] += weights[i] >= least ? weights[i] : 0.0f;
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

float least_kept(const float* weights, int64_t n, int64_t top_k, float top_p, float min_p) {
  float floor = min_p;
  double surplus = 0;  // of weights equal to the last of top-k, top-p counts only as many as there is room for
  if (0 < top_k && top_k < n) {
    const float last = least_within(weights, n, 0.0f, static_cast<double>(top_k), [](float) { return 1.0; });
    if (last >= floor) {
      floor = last;
      int64_t kept = 0;
      for (int64_t i = 0; i < n; ++i) kept += weights[i] >= last;
      surplus = kept > top_k ? static_cast<double>(kept - top_k) * last : 0.0;
    }
  }
  if (top_p >= 1) return floor;
  const double limit = top_p * (sum_of(weights, n, floor) - surplus);
  return least_within(weights, n, floor, limit, [](float weight) { return static_cast<double>(weight); });
}

// Where the running sum of the weights from `least` on first exceeds `share` of all.
int64_t draw(const float* weights, int64_t n, float least, double share, double* sums) {
  const int64_t num_parts = (n + kPart - 1) / kPart;
  double total = 0;
  for (int64_t part = 0; part < num_parts; ++part) {
    const int64_t first = part * kPart;
    total += sum_of(weights + first, n - first < kPart ? n - first : kPart, least);
    sums[part] = total;
  }
  const double goal = share * total;
  int64_t part = 0;
  while (part + 1 < num_parts && sums[part] <= goal) ++part;
  double sum = part ? sums[part - 1] : 0;
  int64_t last = part * kPart;
  for (int64_t i = last; i < n; ++i) {
    if (weights[i] < least || weights[i] == 0) continue;
    last = i;
    sum += weights[i];
    if (sum > goal) break;
  }
  return last;
}

int64_t choose(const float* logits, int64_t vocab, const float* floats, const int64_t* ints, int64_t position) {
  const float temperature = floats[0];
  const float best = greatest(logits, vocab);
  if (!std::isfinite(best)) return -1;
  if (temperature == 0) return find(logits, vocab, best);
  const int64_t num_parts = (vocab + kPart - 1) / kPart;
  double* sums = static_cast<double*>(scratch(num_parts * sizeof(double) + vocab * sizeof(float)));
  float* weights = reinterpret_cast<float*>(sums + num_parts);
  weigh(logits, best, temperature, vocab, weights);
  const float least = least_kept(weights, vocab, ints[0], floats[1], floats[2]);
  return draw(weights, vocab, least, uniform(ints[1], position), sums);
}

}  // namespace
}  // namespace tk::TK_VARIANT

// logits: [n, vocab]; rows, positions: [n]; floats [.., 6], ints [.., 3]: `toolkit.sampling.state`'s, by row. A token of -1: the
// logits are not finite.
TK_KERNEL(tk_sample)(const float* logits, int64_t n, int64_t vocab, const int32_t* rows, const int32_t* positions, const float* floats,
                     const int64_t* ints, int64_t* tokens) {
  using namespace tk::TK_VARIANT;
  tk::parallel(n, [&](int64_t i) {
    tokens[i] = choose(logits + i * vocab, vocab, floats + rows[i] * 6, ints + rows[i] * 3, positions[i]);
  });
}
