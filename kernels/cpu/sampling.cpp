// The next token of each row of logits: the likeliest, or one drawn by seed and position.
//
// The draw is an exponential race, also called the Gumbel-max trick: every kept token has a random
// time e / weight, e an exponential number that depends on seed, position and token alone
// (`exponentials` in `toolkit.kernels.reference`), and the least time wins. e = -log(1 - v) is at
// least v, so only tokens with v < weight * least time so far need the logarithm: a few dozen in a
// vocabulary.
//
// Top-k, min-p and top-p reduce to one number, the least weight that is kept. It is found without
// sorting: weights are in [0, 1], where bits are ordered like values, so three passes over digits
// of these bits, high ones first, narrow it to one value. Each copies the weights that are left, so
// the next has few to read.
#include <cmath>

#include "simd.h"
#include "threads.h"

namespace tk::TK_VARIANT {
namespace {

constexpr int kDigits[] = {21, 10, 0};  // lowest bit of each digit of a weight
constexpr int64_t kBuckets = 1 << 11;
constexpr int64_t kGroup = 64;  // weights whose greatest bounds the k-th greatest of all

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

// Random numbers of a row, one for each token.
class Noise {
 public:
  // SplitMix64's finalizer (Steele et al., "Fast splittable pseudorandom number generators", 2014).
  Noise(int64_t seed, int64_t position) {
    uint64_t x =
        static_cast<uint64_t>(seed) + (static_cast<uint64_t>(position) + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x ^= x >> 31;
    low_ = static_cast<uint32_t>(x);
    high_ = static_cast<uint32_t>(x >> 32);
    for (int i = 0; i < kLanes; ++i) lanes_[i] = static_cast<uint32_t>(i) * kStep;
  }

  // Returns v in (0, 1) of tokens from `first` on. They are most precise near 0, where races are
  // decided.
  [[gnu::always_inline]] Vec operator()(int64_t first) const {
    UintVec x = lanes_ + static_cast<uint32_t>(first) * kStep + low_;
    x = (x ^ (x >> 16)) * 0x21F0AAADu;
    x = (x ^ (x >> 15) ^ high_) * 0xD35A2D97u;
    x ^= x >> 15;
    return min(__builtin_convertvector(x, Vec) * 0x1p-32f + 0x1p-33f, splat(0x1.fffffep-1f));
  }

 private:
  static constexpr uint32_t kStep = 0x9E3779B9u;
  uint32_t low_, high_;
  UintVec lanes_;
};

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

// Copies the weights in [from, below), usually few, to `list`, which may be `weights`. Returns
// their number.
int64_t collect(const float* weights, int64_t n, float from, float below, float* list) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kGroup) {
    const int64_t end = n - i < kGroup ? n : i + kGroup;
    IntVec found = {};
    for (int64_t j = i; j + kLanes <= end; j += kLanes) {
      const Vec part = load(weights + j);
      found |= (part >= from) & (part < below);
    }
    if (end == i + kGroup && !any(found)) continue;
    for (int64_t j = i; j < end; ++j) {
      const float weight = weights[j];
      list[count] = weight;
      count += weight >= from && weight < below;
    }
  }
  return count;
}

// Returns the least weight from `floor` up whose greater weights sum to less than `limit`, each
// counted as measure(weight); the greatest weight if none qualifies. Weights of 0 are skipped.
// list: [n], overwritten; may be `weights`.
template <class F>
float least_within(const float* weights, int64_t n, float floor, double limit, float* list,
                   F measure) {
  uint32_t prefix = 0;  // known bits of the result
  double above = 0;     // sum of weights that are greater by the known bits
  int known = 32;       // lowest known bit
  for (int digit : kDigits) {
    double buckets[kBuckets] = {};
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = bits_of(weights[i]);
      if (weights[i] < floor || bits == 0) continue;
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
    if (digit == 0) break;
    n = collect(weights, n, from_bits(prefix), from_bits(prefix + (1u << digit)), list);
    weights = list;
  }
  return from_bits(prefix);
}

// Returns the k-th greatest weight, 1 <= k < n, or the least above 0. list: [n], overwritten.
float kth_greatest(const float* weights, int64_t n, int64_t k, float* list) {
  const auto one = [](float) { return 1.0; };
  const double limit = static_cast<double>(k);
  const int64_t groups = n / kGroup;
  if (k <= groups) {
    for (int64_t i = 0; i < groups; ++i) {
      Vec top = load(weights + i * kGroup);
      for (int64_t j = kLanes; j < kGroup; j += kLanes)
        top = max(load(weights + i * kGroup + j), top);
      list[i] = max(top);
    }
    const float bound = least_within(list, groups, 0.0f, limit, list, one);
    const int64_t count = collect(weights, n, bound, INFINITY, list);
    if (count >= k) return least_within(list, count, 0.0f, limit, list, one);
  }
  return least_within(weights, n, 0.0f, limit, list, one);
}

double sum_of(const float* weights, int64_t n) {
  double sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += weights[i + j];
  }
  for (; i < n; ++i) sums[0] += weights[i];
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

float least_kept(const float* weights, int64_t n, int64_t top_k, float top_p, float min_p,
                 float* list) {
  const float last = 0 < top_k && top_k < n ? kth_greatest(weights, n, top_k, list) : 0.0f;
  const float floor = last > min_p ? last : min_p;
  if (top_p >= 1) return floor;
  if (floor > 0) {
    n = collect(weights, n, floor, INFINITY, list);
    weights = list;
  }
  // Ties at the k-th place are kept, but do not count for top-p.
  const double surplus = last > 0 && last == floor && n > top_k ? (n - top_k) * double{last} : 0.0;
  return least_within(weights, n, floor, top_p * (sum_of(weights, n) - surplus), list,
                      [](float weight) { return static_cast<double>(weight); });
}

// Returns the winner of the race.
//
// weight(token): its weight. bounds(first): weights of kLanes tokens from `first` on, none more
// than 0.01 % too low; 0 or so small that they cannot win for tokens that are excluded or do not
// exist. kFew: most are 0, and their random numbers are not computed.
template <bool kFew, class Bounds, class Weight>
int64_t race(int64_t n, const Noise& noise, Bounds bounds, Weight weight) {
  constexpr int kVectors = 4;
  int64_t winner = 0;
  double least = 17;  // more than the greatest e: the greatest weight is 1
  float limit = 17;
  for (int64_t i = 0; i < n; i += kVectors * kLanes) {
    Vec tops[kVectors], numbers[kVectors];
    IntVec hits[kVectors], hit = {};
    for (int j = 0; j < kVectors; ++j) {
      tops[j] = bounds(i + j * kLanes);
      hit |= tops[j] > 0.0f;
    }
    if (kFew && !any(hit)) continue;
    hit = IntVec{};
    for (int j = 0; j < kVectors; ++j) {
      numbers[j] = noise(i + j * kLanes);
      hits[j] = numbers[j] < tops[j] * limit;
      hit |= hits[j];
    }
    if (!any(hit)) continue;
    for (int j = 0; j < kVectors; ++j) {
      if (!any(hits[j])) continue;
      float top[kLanes], number[kLanes];
      store(top, tops[j]);
      store(number, numbers[j]);
      for (int lane = 0; lane < kLanes; ++lane) {
        if (!(number[lane] < top[lane] * limit)) continue;
        const int64_t token = i + j * kLanes + lane;
        const double time = -std::log1p(-static_cast<double>(number[lane])) / weight(token);
        if (!(time < least)) continue;
        winner = token;
        least = time;
        limit = static_cast<float>(time * 1.0001);
      }
    }
  }
  return winner;
}

// Loads kLanes elements, `fill` past the n-th.
Vec load_or(const float* x, int64_t i, int64_t n, float fill) {
  if (i + kLanes <= n) return load(x + i);
  float part[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) part[lane] = i + lane < n ? x[i + lane] : fill;
  return load(part);
}

int64_t choose(const float* logits, int64_t vocab, const float* floats, const int64_t* ints,
               int64_t position) {
  const float temperature = floats[0], top_p = floats[1], min_p = floats[2];
  const int64_t top_k = ints[0];
  const float best = greatest(logits, vocab);
  if (!std::isfinite(best)) return -1;
  if (temperature == 0) return find(logits, vocab, best);
  const Noise noise(ints[1], position);
  const auto weight = [&](int64_t token) {
    return std::exp(static_cast<double>((logits[token] - best) / temperature));
  };
  if ((top_k <= 0 || top_k >= vocab) && top_p >= 1 && min_p <= 0) {
    const float scale = 1.44269504f * (temperature > 1e-30f ? 1 / temperature : 1e30f);
    return race<false>(
        vocab, noise,
        [&](int64_t i) {
          // The bits of x + 127 with 23 fraction bits are a number from 2^x to 1.07 * 2^x.
          const Vec x = (load_or(logits, i, vocab, -INFINITY) - best) * scale;
          return (Vec)__builtin_convertvector((max(x, splat(-126.0f)) + 127.0f) * 0x1p23f, IntVec);
        },
        weight);
  }
  float* weights = static_cast<float*>(scratch(2 * vocab * sizeof(float)));
  weigh(logits, best, temperature, vocab, weights);
  const float least = least_kept(weights, vocab, top_k, top_p, min_p, weights + vocab);
  return race<true>(
      vocab, noise,
      [&](int64_t i) {
        const Vec part = load_or(weights, i, vocab, 0.0f);
        return select(part >= least, part, Vec{});
      },
      weight);
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
