// Paged attention of decode steps, prompts and mixed steps. The cache is read in place.
//
// The work is cut into items: some rows of some KV heads of a request, over a range of its keys. A
// row is one head of one query token. An item visits its keys in tiles, with the running maximum
// and sum of the softmax (Milakov & Gimelshein, "Online normalizer calculation for softmax",
// arXiv:1805.02867). Keys are cut into ranges only if requests and heads are too few for the
// threads; the results of the ranges are then merged.
//
// std::vector is instantiated with types of the anonymous namespace, so that its code stays in the
// variant's own file.
#include "attention.h"

#include <cmath>
#include <vector>

#include "simd.h"
#include "threads.h"

namespace tk::TK_VARIANT {
namespace {

constexpr int64_t kKeys = 32;  // per tile
constexpr int64_t kKeyVecs = kKeys / kLanes;
constexpr int kKeysAtOnce = kLanes == 16 ? 8 : 4;  // sums of two vectors of rows fit in registers
constexpr int64_t kMaxRows = 64;                   // of an item, over all its heads
constexpr int64_t kMaxSize = 512;                  // of a head
constexpr int64_t kQueries = 4096;  // floats of an item's queries, of at least kLanes rows
constexpr int64_t kState = kQueries > kLanes * kMaxSize ? kQueries : kLanes * kMaxSize;
// Up to this many rows use vectors along the head. More rows lie across the lanes of a vector, and
// need no sums and maxima over lanes.
constexpr int64_t kFewRows = 4;
constexpr int64_t kMinKeys = 128;  // per range
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kAll = INT64_MAX / 2;
constexpr float kLowest = -__builtin_inff();

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t parts(int64_t total, int64_t part) { return (total + part - 1) / part; }

// Row r is query token r / group, and head r % group of the `group` heads that share a KV head.
struct Item {
  int64_t request, head, num_heads, first_row, num_rows, first_key, num_keys, num_ranges;
  int64_t partial;  // with several ranges, offset of its results [num_heads, num_rows, padded + 2]
};

// Prefetches a row that is needed later, mostly in the next tile. Rows of a head are far apart:
// without this a decode step of 16 requests took 1.7 times as long in fp32, and 2.5 in bfloat16.
template <class T, bool kToWrite = false>
inline void prefetch(const T* row, int64_t size) {
  for (int64_t i = 0; i < size; i += 64 / sizeof(T)) __builtin_prefetch(row + i, kToWrite, 2);
}

// Multiplies R rows of q with keys in place. The next tile's keys and values follow this one's.
template <int R, class T>
inline void multiply_rows(const float* q, int64_t padded, const T* const* keys, int64_t offset,
                          int64_t count, float* logits) {
  for (int64_t key = 0; key < count; ++key) {
    const T* k = keys[key] + offset;
    prefetch(keys[key + kKeys] + offset, padded);
    Vec sums[R] = {};
    for (int64_t d = 0; d < padded; d += kLanes) {
      const Vec part = load(k + d);
      for (int r = 0; r < R; ++r) sums[r] += part * load(q + r * padded + d);
    }
    for (int r = 0; r < R; ++r) logits[r * kKeys + key] = sum(sums[r]);
  }
}

// Computes logits [keys, num_lanes] of kKeysAtOnce keys and C vectors of q [size, num_lanes].
template <int C>
inline void multiply_lanes(const float* q, int64_t num_lanes, const float* const* keys,
                           int64_t offset, int64_t size, float* logits) {
  Vec sums[kKeysAtOnce][C] = {};
  for (int64_t d = 0; d < size; ++d) {
    Vec rows[C];
    for (int c = 0; c < C; ++c) rows[c] = load(q + d * num_lanes + c * kLanes);
    for (int key = 0; key < kKeysAtOnce; ++key) {
      const Vec x = splat(keys[key][offset + d]);
      for (int c = 0; c < C; ++c) sums[key][c] += x * rows[c];
    }
  }
  for (int key = 0; key < kKeysAtOnce; ++key) {
    for (int c = 0; c < C; ++c) store(logits + key * num_lanes + c * kLanes, sums[key][c]);
  }
}

// Computes logits [num_rows, kKeys] of a tile of keys and few rows.
template <class T>
void multiply(const float* q, const T* const* keys, int64_t offset, int64_t count, int64_t padded,
              int64_t num_rows, float* logits) {
  int64_t r = 0;
  for (; r + 4 <= num_rows; r += 4)
    multiply_rows<4>(q + r * padded, padded, keys, offset, count, logits + r * kKeys);
  for (; r + 2 <= num_rows; r += 2)
    multiply_rows<2>(q + r * padded, padded, keys, offset, count, logits + r * kKeys);
  for (; r < num_rows; ++r)
    multiply_rows<1>(q + r * padded, padded, keys, offset, count, logits + r * kKeys);
}

// Computes logits [kKeys, num_lanes] of a tile of keys and many rows, from `first` on.
void multiply_across(const float* q, const float* const* keys, int64_t offset, int64_t size,
                     int64_t first, int64_t num_lanes, float* logits) {
  for (int64_t r = first; r < num_lanes;) {
    const int wide = r + 2 * kLanes <= num_lanes ? 2 : 1;
    for (int64_t key = 0; key < kKeys; key += kKeysAtOnce) {
      (wide == 2 ? multiply_lanes<2> : multiply_lanes<1>)(q + r, num_lanes, keys + key, offset,
                                                          size, logits + key * num_lanes + r);
    }
    r += wide * kLanes;
  }
}

// Softmax weights of rows and keys, `row` and `key` elements apart.
struct Weights {
  const float* at;
  int64_t row, key;
  Weights from(int64_t r) const { return {at + r * row, row, key}; }
};

// sums [R, C vectors] += weights [R, kKeys] · values.
template <int R, int C, class T>
inline void add_columns(Weights weights, const T* const* values, int64_t offset, int64_t count,
                        float* sums, int64_t padded) {
  Vec all[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) all[r][c] = load(sums + r * padded + c * kLanes);
  }
  for (int64_t key = 0; key < count; ++key) {
    const T* v = values[key] + offset;
    if (R == 1) prefetch(values[key + kKeys] + offset, C * kLanes);
    Vec part[C];
    for (int c = 0; c < C; ++c) part[c] = load(v + c * kLanes);
    for (int r = 0; r < R; ++r) {
      const Vec weight = splat(weights.at[r * weights.row + key * weights.key]);
      for (int c = 0; c < C; ++c) all[r][c] += weight * part[c];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) store(sums + r * padded + c * kLanes, all[r][c]);
  }
}

template <int R, class T>
inline void add_values(Weights weights, const T* const* values, int64_t offset, int64_t count,
                       float* sums, int64_t padded) {
  constexpr int64_t kWide = (kLanes == 16 || R == 1 ? 4 : 2) * kLanes;
  int64_t d = 0;
  for (; d + kWide <= padded; d += kWide) {
    add_columns<R, kWide / kLanes>(weights, values, offset + d, count, sums + d, padded);
  }
  for (; d < padded; d += kLanes)
    add_columns<R, 1>(weights, values, offset + d, count, sums + d, padded);
}

// Turns a row's logits into softmax weights. It sees the keys [from, to) of the tile. Returns the
// factor for the sums so far.
float to_weights(float* logits, int64_t from, int64_t to, float soft_cap, float& maximum,
                 float& total) {
  Vec all[kKeyVecs], top = splat(kLowest), sums = {};
  IntVec key;
  for (int i = 0; i < kLanes; ++i) key[i] = i;
  for (int i = 0; i < kKeyVecs; ++i, key += kLanes) {
    Vec x = load(logits + i * kLanes);
    if (soft_cap != 0) x = soft_cap * (2.0f * sigmoid(x * (2.0f / soft_cap)) - 1.0f);  // tanh
    all[i] = select((key >= (int32_t)from) & (key < (int32_t)to), x, splat(kLowest));
    top = max(all[i], top);
  }
  const float last = maximum, here = max(top);
  maximum = here > last ? here : last;
  const float base =
      maximum == kLowest ? 0.0f : maximum;  // if no key was visible yet, weights are e^-inf
  for (int i = 0; i < kKeyVecs; ++i) {
    const Vec weight = exp(all[i] - base);
    store(logits + i * kLanes, weight);
    sums += weight;
  }
  const float factor = here > last ? std::exp(last - base) : 1.0f;
  total = total * factor + sum(sums);
  return factor;
}

// The same for kLanes rows at once, with logits [kKeys, num_lanes]. from, to: each row's keys.
Vec to_weights(float* logits, int64_t num_lanes, IntVec from, IntVec to, float soft_cap,
               float* maximum, float* total) {
  const bool sees_all = !any((to < (int32_t)kKeys) | (from > 0));
  const Vec last = load(maximum);
  Vec top = last, sums = {};
  for (int32_t key = 0; key < kKeys; ++key) {
    float* place = logits + key * num_lanes;
    Vec x = load(place);
    if (soft_cap != 0) x = soft_cap * (2.0f * sigmoid(x * (2.0f / soft_cap)) - 1.0f);  // tanh
    if (!sees_all) x = select((from <= key) & (to > key), x, splat(kLowest));
    if (soft_cap != 0 || !sees_all) store(place, x);
    top = max(x, top);
  }
  const Vec base = top == kLowest ? Vec{} : top;  // if no key was visible yet, weights are e^-inf
  for (int32_t key = 0; key < kKeys; ++key) {
    float* place = logits + key * num_lanes;
    const Vec weight = exp(load(place) - base);
    store(place, weight);
    sums += weight;
  }
  const Vec factor = exp(last - base);
  store(maximum, top);
  store(total, load(total) * factor + sums);
  return factor;
}

template <class T>
class Attention {
 public:
  Attention(const AttentionLayer& layer, const AttentionStep& step, const T* q, int64_t q_stride,
            T* out)
      : layer_(layer),
        step_(step),
        q_(q),
        q_stride_(q_stride),
        out_(out),
        group_(layer.num_heads / layer.num_kv_heads),
        size_(layer.head_size),
        padded_(parts(layer.head_size, kLanes) * kLanes) {}

  void run() {
    plan();
    float* partial = num_partial_ ? new float[num_partial_] : nullptr;
    const int64_t count = items_.size();
    parallel_runs(count, [&](int64_t i, int64_t next) {
      attend(items_[i], next < count ? &items_[next] : nullptr, partial);
    });
    parallel(merges_.size(), [&](int64_t i) { merge(merges_[i], partial); });
    delete[] partial;
  }

 private:
  int64_t query_len(int64_t request) const {
    return step_.query_start_loc[request + 1] - step_.query_start_loc[request];
  }

  int64_t position(int64_t request, int64_t row) const {
    return step_.seq_lens[request] - query_len(request) + row / group_;
  }

  // Returns the position of the last key that a row sees. It grows with the row.
  int64_t last_visible(int64_t request, int64_t row) const {
    if (!step_.last_key) return position(request, row);
    return step_.last_key[step_.query_start_loc[request] + row / group_];
  }

  int64_t first_visible(int64_t position) const {
    if (layer_.chunk) return position / layer_.chunk * layer_.chunk;
    return layer_.sliding_window ? larger(0, position - layer_.sliding_window + 1) : 0;
  }

  // Returns a row's offset in [num_tokens, num_heads, size] whose tokens are `stride` apart.
  int64_t place(const Item& item, int64_t head, int64_t row, int64_t stride) const {
    return (step_.query_start_loc[item.request] + row / group_) * stride +
           (head * group_ + row % group_) * size_;
  }

  void plan() {
    int64_t work = 0;
    for (int64_t request = 0; request < step_.num_reqs; ++request)
      work += query_len(request) * step_.seq_lens[request];
    const int64_t threads = num_threads();
    const int64_t share =
        threads == 1 ? kAll : larger(1, work * layer_.num_heads / (threads * kItemsPerThread));
    const int64_t max_rows = smaller(kMaxRows, larger(1, kQueries / padded_ / kLanes) * kLanes);
    for (int64_t request = 0; request < step_.num_reqs; ++request) {
      const int64_t num_rows = query_len(request) * group_;
      // Many rows read the same keys and values repeatedly. Head by head, these stay in the cache.
      const int64_t heads = num_rows > kFewRows ? 1 : layer_.num_kv_heads;
      for (int64_t head = 0; head < layer_.num_kv_heads; head += heads) {
        for (int64_t row = 0; row < num_rows; row += max_rows) {
          Item item = {};
          item.request = request;
          item.head = head;
          item.num_heads = heads;
          item.first_row = row;
          item.num_rows = smaller(max_rows, num_rows - row);
          item.first_key = first_visible(position(request, row));
          item.num_keys = last_visible(request, row + item.num_rows - 1) + 1 - item.first_key;
          cut(item, share, max_rows);
        }
      }
    }
  }

  // Cuts rows of some KV heads into items of about `share` products of a row and a key each.
  void cut(Item item, int64_t share, int64_t max_rows) {
    const int64_t per_head = item.num_rows * item.num_keys;
    const int64_t max_heads = item.num_rows > kFewRows ? 1 : max_rows / item.num_rows;
    const int64_t heads = smaller(max_heads, parts(share, per_head)),
                  end_head = item.head + item.num_heads;
    const int64_t ranges =
        per_head <= share ? 1 : smaller(parts(per_head, share), parts(item.num_keys, kMinKeys));
    const int64_t keys = parts(parts(item.num_keys, ranges), kKeys) * kKeys;
    const int64_t end = item.first_key + item.num_keys, first_key = item.first_key;
    item.num_ranges = parts(item.num_keys, keys);
    for (; item.head < end_head; item.head += heads) {
      item.num_heads = smaller(heads, end_head - item.head);
      item.partial = num_partial_;
      item.first_key = first_key;
      if (item.num_ranges > 1) merges_.push_back(item);
      for (; item.first_key < end; item.first_key += keys) {
        item.num_keys = smaller(keys, end - item.first_key);
        items_.push_back(item);
        item.partial += item.num_heads * item.num_rows * (padded_ + 2);
      }
      if (item.num_ranges > 1) num_partial_ = item.partial;
    }
  }

  // Running state of an item's rows [num_heads, num_rows]. More than kFewRows rows are of one head.
  struct State {
    alignas(64) float q[kState];     // [.., padded]; for many rows [size, num_lanes]
    alignas(64) float sums[kState];  // [.., padded]
    alignas(64) float maximum[kMaxRows];
    alignas(64) float total[kMaxRows] = {};
    alignas(64) int32_t first[kMaxRows];  // for many rows, the first key that each sees
    alignas(64) int32_t last[kMaxRows];   // and the last
  };

  static bool is_across(const Item& item) { return item.num_rows > kFewRows; }
  static int64_t num_lanes(const Item& item) { return parts(item.num_rows, kLanes) * kLanes; }

  void begin(const Item& item, State& state) const {
    for (float& maximum : state.maximum) maximum = kLowest;
    const int64_t rows = is_across(item) ? num_lanes(item) : item.num_heads * item.num_rows;
    std::memset(state.sums, 0, rows * padded_ * sizeof(float));
    if (is_across(item)) return begin_across(item, state);
    std::memset(state.q, 0, rows * padded_ * sizeof(float));
    for (int64_t h = 0, i = 0; h < item.num_heads; ++h) {
      for (int64_t r = 0; r < item.num_rows; ++r, ++i) {
        const T* from = q_ + place(item, item.head + h, item.first_row + r, q_stride_);
        for (int64_t d = 0; d < size_; ++d)
          state.q[i * padded_ + d] = to_float(from[d]) * layer_.scale;
      }
    }
  }

  // Transposes rows of one head, square by square, so that stores go to neighbours.
  void begin_across(const Item& item, State& state) const {
    const int64_t lanes = num_lanes(item);
    for (int64_t row = 0; row < item.num_rows; ++row) {
      prefetch(q_ + place(item, item.head, item.first_row + row, q_stride_), size_);
      prefetch<T, true>(
          out_ + place(item, item.head, item.first_row + row, layer_.num_heads * size_), size_);
    }
    for (int64_t row = 0; row < item.num_rows; row += kLanes) {
      const int64_t count = smaller(kLanes, item.num_rows - row);
      const T* from[kLanes];
      for (int64_t i = 0; i < count; ++i) {
        from[i] = q_ + place(item, item.head, item.first_row + row + i, q_stride_);
      }
      for (int64_t d = 0; d < size_; d += kLanes) {
        alignas(64) float square[kLanes][kLanes] = {};
        const int64_t width = smaller(kLanes, size_ - d);
        for (int64_t i = 0; i < count; ++i) {
          store(square[i], (width == kLanes ? load(from[i] + d) : load_some(from[i] + d, width)) *
                               layer_.scale);
        }
        for (int64_t j = 0; j < width; ++j) {
          float* to = state.q + (d + j) * lanes + row;
          for (int64_t i = 0; i < kLanes; ++i) to[i] = square[i][j];
        }
      }
    }
    for (int64_t r = 0; r < kMaxRows; ++r) {
      const int64_t row = item.first_row + smaller(r, item.num_rows - 1);
      state.first[r] = static_cast<int32_t>(first_visible(position(item.request, row)));
      state.last[r] = static_cast<int32_t>(last_visible(item.request, row));
    }
  }

  // next: the thread's likely next item, or null.
  void attend(const Item& item, const Item* next, float* partial) const {
    State state;
    begin(item, state);
    const T *keys[2 * kKeys], *values[2 * kKeys];
    locate(item, 0, keys, values);
    for (int64_t first = 0; first < item.num_keys; first += kKeys) {
      if (next && first + kKeys >= item.num_keys) {
        locate(*next, 0, keys + kKeys, values + kKeys);
        for (int64_t i = kKeys; i < 2 * kKeys; ++i) {
          keys[i] += (next->head - item.head) * size_;
          values[i] += (next->head - item.head) * size_;
        }
      } else {
        locate(item, first + kKeys, keys + kKeys, values + kKeys);
      }
      if (is_across(item)) {
        for (int64_t i = kKeys; i < 2 * kKeys; ++i) {
          prefetch(keys[i] + item.head * size_, size_);
          prefetch(values[i] + item.head * size_, size_);
        }
      }
      for (int64_t h = 0; h < item.num_heads; ++h) attend_tile(item, first, keys, values, h, state);
      std::memcpy(keys, keys + kKeys, sizeof keys / 2);
      std::memcpy(values, values + kKeys, sizeof values / 2);
    }
    for (int64_t i = 0; i < item.num_heads * item.num_rows; ++i) {
      if (item.num_ranges == 1) {
        write(item, i, state.sums + i * padded_, state.maximum[i], state.total[i]);
      } else {
        float* to = partial + item.partial + i * (padded_ + 2);
        std::memcpy(to, state.sums + i * padded_, padded_ * sizeof(float));
        to[padded_] = state.maximum[i];
        to[padded_ + 1] = state.total[i];
      }
    }
  }

  // Finds a tile of the item's keys and values, all heads, from its key `first` on. Past the last
  // key, the last one repeats.
  void locate(const Item& item, int64_t first, const T** keys, const T** values) const {
    const int32_t* table = step_.block_table + step_.rows[item.request] * step_.table_stride;
    const int64_t stride = layer_.num_kv_heads * size_;
    for (int64_t i = 0; i < kKeys; ++i) {
      const int64_t position = item.first_key + smaller(first + i, item.num_keys - 1);
      const int64_t at = table[position / layer_.block_size] * layer_.block_stride +
                         position % layer_.block_size * stride;
      keys[i] = static_cast<const T*>(layer_.k_cache) + at;
      values[i] = static_cast<const T*>(layer_.v_cache) + at;
    }
  }

  // Adds a tile, from the item's key `first` on, to the state of the rows of head h.
  void attend_tile(const Item& item, int64_t first, const T* const* keys, const T* const* values,
                   int64_t h, State& state) const {
    const int64_t offset = (item.head + h) * size_;
    if (padded_ == size_) {
      if (!is_across(item)) return add_tile(item, first, keys, values, offset, h, state);
      if constexpr (sizeof(T) == sizeof(float))
        return add_across(item, first, keys, values, offset, state);
    }
    alignas(64) float tile[2 * kKeys * kMaxSize];
    const float* rows[4 * kKeys];
    for (int64_t i = 0; i < 2 * kKeys; ++i) {
      const T* from = (i < kKeys ? keys[i] : values[i - kKeys]) + offset;
      float* to = tile + i * padded_;
      int64_t d = 0;
      for (; d + kLanes <= size_; d += kLanes) store(to + d, load(from + d));
      if (d < size_) store(to + d, load_some(from + d, size_ - d));
      const int64_t place = i < kKeys ? i : i + kKeys;
      rows[place] = rows[place + kKeys] = to;  // nothing to prefetch
    }
    if (is_across(item)) return add_across(item, first, rows, rows + 2 * kKeys, 0, state);
    add_tile(item, first, rows, rows + 2 * kKeys, 0, h, state);
  }

  template <class C>
  void add_tile(const Item& item, int64_t first, const C* const* keys, const C* const* values,
                int64_t offset, int64_t h, State& state) const {
    alignas(64) float logits[kFewRows * kKeys];
    const int64_t count = smaller(kKeys, item.num_keys - first), start = h * item.num_rows;
    float* sums = state.sums + start * padded_;
    multiply(state.q + start * padded_, keys, offset, count, padded_, item.num_rows, logits);
    for (int64_t key = kKeys + count; key < 2 * kKeys; ++key) {
      prefetch(keys[key] + offset, padded_);
      prefetch(values[key] + offset, padded_);
    }
    if (item.num_rows == 4) {  // for other numbers, the last row's sums prefetch them
      for (int64_t key = 0; key < count; ++key) prefetch(values[kKeys + key] + offset, padded_);
    }
    for (int64_t r = 0; r < item.num_rows; ++r) {
      const int64_t row = item.first_row + r, tile = item.first_key + first,
                    from = first_visible(position(item.request, row)) - tile,
                    to = last_visible(item.request, row) + 1 - tile;
      rescale(sums + r * padded_,
              to_weights(logits + r * kKeys, from, smaller(count, to), layer_.soft_cap,
                         state.maximum[start + r], state.total[start + r]));
    }
    add_rows({logits, kKeys, 1}, values, offset, count, sums, 0, item.num_rows);
  }

  void add_across(const Item& item, int64_t first, const float* const* keys,
                  const float* const* values, int64_t offset, State& state) const {
    alignas(64) float logits[kMaxRows * kKeys];
    const int64_t count = smaller(kKeys, item.num_keys - first), lanes = num_lanes(item);
    const int32_t tile = static_cast<int32_t>(item.first_key + first);
    int64_t begin = 0;  // rows before it see no key of the tile
    while (begin + kLanes < lanes && state.last[begin + kLanes - 1] < tile) begin += kLanes;
    multiply_across(state.q, keys, offset, size_, begin, lanes, logits);
    for (int64_t r = begin; r < lanes; r += kLanes) {
      IntVec from, last;
      std::memcpy(&from, state.first + r, sizeof from);
      std::memcpy(&last, state.last + r, sizeof last);
      const IntVec behind = last - tile + 1,
                   to = behind < (int32_t)count ? behind : IntVec{} + (int32_t)count;
      float factors[kLanes];
      store(factors, to_weights(logits + r, lanes, from - tile, to, layer_.soft_cap, state.maximum + r,
                                state.total + r));
      for (int64_t i = 0; i < smaller(kLanes, item.num_rows - r); ++i)
        rescale(state.sums + (r + i) * padded_, factors[i]);
    }
    add_rows({logits, 1, lanes}, values, offset, count, state.sums, begin, item.num_rows);
  }

  void rescale(float* sums, float factor) const {
    if (factor == 1.0f) return;
    for (int64_t d = 0; d < padded_; d += kLanes) store(sums + d, load(sums + d) * factor);
  }

  // sums [.., padded] += weights · values, for rows [r, end).
  template <class C>
  void add_rows(Weights weights, const C* const* values, int64_t offset, int64_t count, float* sums,
                int64_t r, int64_t end) const {
    for (; r + 4 <= end; r += 4)
      add_values<4>(weights.from(r), values, offset, count, sums + r * padded_, padded_);
    for (; r < end; ++r)
      add_values<1>(weights.from(r), values, offset, count, sums + r * padded_, padded_);
  }

  // i: index among the item's rows, head by head.
  void write(const Item& item, int64_t i, const float* sums, float maximum, float total) const {
    const int64_t head = item.head + i / item.num_rows, row = item.first_row + i % item.num_rows;
    T* to = out_ + place(item, head, row, layer_.num_heads * size_);
    float factor = 1.0f / total;
    if (layer_.sinks) {
      const float sink = layer_.sinks[head * group_ + row % group_];
      const float top = sink > maximum ? sink : maximum, weight = std::exp(maximum - top);
      factor = weight / (total * weight + std::exp(sink - top));
    }
    int64_t d = 0;
    for (; d + kLanes <= size_; d += kLanes) store(to + d, load(sums + d) * factor);
    if (d < size_) store_some(to + d, load(sums + d) * factor, size_ - d);
  }

  void merge(const Item& item, const float* partial) const {
    const int64_t num_rows = item.num_heads * item.num_rows, width = padded_ + 2;
    for (int64_t i = 0; i < num_rows; ++i) {
      const float* parts = partial + item.partial + i * width;
      float maximum = kLowest, total = 0;
      for (int64_t n = 0; n < item.num_ranges; ++n) {
        const float here = parts[n * num_rows * width + padded_];
        maximum = here > maximum ? here : maximum;
      }
      alignas(64) float sums[kMaxSize] = {};
      for (int64_t n = 0; n < item.num_ranges; ++n) {
        const float* part = parts + n * num_rows * width;
        const float factor = std::exp(part[padded_] - maximum);
        total += part[padded_ + 1] * factor;
        for (int64_t d = 0; d < padded_; ++d) sums[d] += part[d] * factor;
      }
      write(item, i, sums, maximum, total);
    }
  }

  const AttentionLayer& layer_;
  const AttentionStep& step_;
  const T* q_;
  const int64_t q_stride_;
  T* out_;
  const int64_t group_, size_, padded_;  // heads per KV head; head size, exact and in full vectors
  std::vector<Item> items_, merges_;     // merges: the first item of each cut one
  int64_t num_partial_ = 0;
};

}  // namespace
}  // namespace tk::TK_VARIANT

// q: [num_tokens, num_heads, head_size], tokens q_stride elements apart; out: the same, packed.
TK_KERNEL(tk_attend)(const AttentionLayer* layer, const AttentionStep* step, const void* q,
                     int64_t q_stride, void* out) {
  using namespace tk::TK_VARIANT;
  if (layer->is_bf16) {
    Attention<bf16>(*layer, *step, static_cast<const bf16*>(q), q_stride, static_cast<bf16*>(out))
        .run();
  } else {
    Attention<float>(*layer, *step, static_cast<const float*>(q), q_stride,
                     static_cast<float*>(out))
        .run();
  }
}
