// The next token of each row of logits: the likeliest, or one drawn by seed and position.
//
// The draw is that of `toolkit.sampling.sampler`: the token at which the running sum of weights, in
// the vocabulary's order, first exceeds a random fraction of the total. Top-k, min-p and top-p
// reduce to one number, the least weight that is kept. It is found without sorting: weights are in
// [0, 1], where bits are ordered like values, so three passes over digits of these bits, high ones
// first, narrow it to one value.
#include <cmath>

#include "simd.h"
#include "threads.h"

namespace tk::TK_VARIANT {
namespace {

constexpr int64_t kPart = 256;          // weights per partial sum
constexpr int kDigits[] = {21, 10, 0};  // lowest bit of each digit of a weight
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
  uint64_t x =
      static_cast<uint64_t>(seed) + (static_cast<uint64_t>(position) + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return static_cast<double>((x ^ (x >> 31)) >> 11) * 0x1p-53;
}

// Returns the greatest element, or NaN if there is one.
float greatest(const float* x, int64_t n) {
  constexpr int kTops = 4;
  Vec tops[kTops];
  IntVec has_nan = {};
  for (Vec& part : tops) part = splat(x[0]);
  int64_t i = 0;
  for (; i + kTops * kLanes <= n; i += kTops * kLanes) {
    for (int j = 0; j < kTops; ++j) {
      const Vec part = load(x + i + j * kLanes);
      tops[j] = max(part, tops[j]);
      has_nan |= part != part;
    }
  }
  if (any(has_nan)) return std::nanf("");
  float top = max(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
  for (; i < n; ++i) top = x[i] > top || x[i] != x[i] ? x[i] : top;
  return top;
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
  for (; i + kLanes <= n; i += kLanes)
    store(weights + i, exp((load(logits + i) - best) / temperature));
  if (i < n)
    store_some(weights + i, exp((load_some(logits + i, n - i) - best) / temperature), n - i);
}

// Returns the least weight from `floor` up whose greater weights sum to less than `limit`, each
// counted as measure(weight); the greatest weight if none qualifies. Weights of 0 are skipped.
template <class F>
float least_within(const float* weights, int64_t n, float floor, double limit, F measure) {
  uint32_t prefix = 0;  // known bits of the result
  double above = 0;     // sum of weights that are greater by the known bits
  int known = 32;       // lowest known bit
  for (int digit : kDigits) {
    double buckets[kBuckets] = {};
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = bits_of(weights[i]);
      if (weights[i] < floor || bits == 0 || (static_cast<uint64_t>(bits ^ prefix) >> known) != 0)
        continue;
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
  double surplus = 0;  // weight of the ties at the k-th place that top-p must not count
  if (0 < top_k && top_k < n) {
    const float last =
        least_within(weights, n, 0.0f, static_cast<double>(top_k), [](float) { return 1.0; });
    if (last >= floor) {
      floor = last;
      int64_t kept = 0;
      for (int64_t i = 0; i < n; ++i) kept += weights[i] >= last;
      surplus = kept > top_k ? static_cast<double>(kept - top_k) * last : 0.0;
    }
  }
  if (top_p >= 1) return floor;
  const double limit = top_p * (sum_of(weights, n, floor) - surplus);
  return least_within(weights, n, floor, limit,
                      [](float weight) { return static_cast<double>(weight); });
}

// Returns the token at which the sum of weights >= `least` first exceeds `share` of the total.
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

int64_t choose(const float* logits, int64_t vocab, const float* floats, const int64_t* ints,
               int64_t position) {
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

// logits: [n, vocab]; rows, positions: [n]; floats [.., 6], ints [.., 3]: by row, see
// `toolkit.sampling.sampling_state`. A token of -1: the logits are not finite.
TK_KERNEL(tk_sample)(const float* logits, int64_t n, int64_t vocab, const int32_t* rows,
                     const int32_t* positions, const float* floats, const int64_t* ints,
                     int64_t* tokens) {
  using namespace tk::TK_VARIANT;
  tk::parallel(n, [&](int64_t i) {
    tokens[i] =
        choose(logits + i * vocab, vocab, floats + rows[i] * 6, ints + rows[i] * 3, positions[i]);
  });
}
