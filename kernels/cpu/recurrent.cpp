// Layers with a state for each request: gated delta nets and short convolutions.
#include <cmath>

#include "simd.h"
#include "threads.h"

namespace tk::TK_VARIANT {
namespace {

constexpr int64_t kChannels = 256;  // of a convolution that a task computes
constexpr int kColumns = 4;  // vectors of a state's columns that are updated together

// Mirror of `_Net` in recurrent.py. Channels are queries, keys and values, head after head.
struct Net {
  const float *kernel;          // [width, channels]
  const float *decay, *time;    // [v_heads]
  const float *norm;            // [v_size]
  void* inputs;                 // [slots, rows, channels | b | a], in the type of the rows
  float* states;                // [slots, v_heads, k_size, v_size]
  int64_t k_heads, v_heads, k_size, v_size, width, rows, is_bf16;
  float eps, rate;
};

// Mirror of `_Convolution` in recurrent.py.
struct Convolution {
  const float *kernel, *bias;  // [width, channels], [channels] or null
  void* inputs;                // [slots, rows, channels], in the type of the rows
  int64_t channels, width, rows, is_bf16;
};

// Mirror of `_Step` in recurrent.py: [num_reqs] each, starts one more. The last two may be null.
struct RecurrentStep {
  const int32_t *starts, *lengths, *reads, *writes, *keeps, *kept, *begins, *written;
  int64_t num_reqs;
};

// A request in a step, as `recurrent.Span`.
struct Span {
  int64_t first, start, end, begin, written, read, write, keep, kept;

  Span(const RecurrentStep& step, int64_t request)
      : first(step.starts[request]),
        start(step.lengths[request] - step.starts[request + 1] + first),
        end(step.lengths[request]),
        begin(step.begins ? step.begins[request] : start),
        written(step.written ? step.written[request] : end),
        read(step.reads[request]),
        write(step.writes[request]),
        keep(step.keeps[request]),
        kept(step.kept[request]) {}

  bool is_empty() const { return start == end; }

  bool keeps() const { return keep >= 0 && begin < kept && kept <= written; }

  // Calls f(slot) for each slot where later steps look for the input at a position: of the state
  // that is written, of drafts, and of the snapshot.
  template <class F>
  void for_slots(int64_t position, int64_t before, F&& f) const {
    if (position >= written - before && (position >= start || read != write)) f(write);
    if (keeps() && position >= kept - before && position < kept) f(keep);
  }
};

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Channels next to each other: a head's queries, its keys, or the values of its group.
struct Range {
  int64_t first, count;
};

// The state's columns from `at` on: decays, replaces what the key stood for, and reads the query.
// Missing columns of the last vector are computed as zeros.
template <int vectors>
[[gnu::always_inline]] inline void update(float* state, int64_t k_size, int64_t v_size, int64_t at,
                                          const float* q, const float* k, const float* v,
                                          float decay, float beta, float* out) {
  const int64_t last = v_size - at - (vectors - 1) * kLanes < kLanes
                           ? v_size - at - (vectors - 1) * kLanes
                           : kLanes;
  const auto count = [&](int i) { return i == vectors - 1 ? last : (int64_t)kLanes; };
  Vec known[vectors] = {}, read[vectors] = {};
  for (int64_t row = 0; row < k_size; ++row) {
    const float* own = state + row * v_size + at;
    for (int i = 0; i < vectors; ++i) known[i] += k[row] * load_part(own + i * kLanes, count(i));
  }
  for (int i = 0; i < vectors; ++i) {
    known[i] = beta * (load_part(v + at + i * kLanes, count(i)) - decay * known[i]);
  }
  for (int64_t row = 0; row < k_size; ++row) {
    float* own = state + row * v_size + at;
    for (int i = 0; i < vectors; ++i) {
      const Vec next = decay * load_part(own + i * kLanes, count(i)) + k[row] * known[i];
      store_part(own + i * kLanes, next, count(i));
      read[i] += q[row] * next;
    }
  }
  for (int i = 0; i < vectors; ++i) store_part(out + at + i * kLanes, read[i], count(i));
}

void update_state(float* state, int64_t k_size, int64_t v_size, const float* q, const float* k,
                  const float* v, float decay, float beta, float* out) {
  int64_t at = 0;
  for (; at + kColumns * kLanes <= v_size; at += kColumns * kLanes) {
    update<kColumns>(state, k_size, v_size, at, q, k, v, decay, beta, out);
  }
  for (; at < v_size; at += kLanes) {
    update<1>(state, k_size, v_size, at, q, k, v, decay, beta, out);
  }
}

// Scales to length 1, and by a factor.
void make_unit(float* x, int64_t size, float factor) {
  Vec squares = {};
  for_each_vec(size, [&](int64_t i, int64_t n) {
    const Vec part = load_part(x + i, n);
    squares += part * part;
  });
  const float scale = factor / std::sqrt(sum(squares) + 1e-6f);
  for_each_vec(size,
               [&](int64_t i, int64_t n) { store_part(x + i, scale * load_part(x + i, n), n); });
}

// out = norm(x) * silu(gate)
template <class T>
void gated_norm(const float* x, const T* gate, const float* weight, float eps, int64_t size,
                T* out) {
  Vec squares = {};
  for_each_vec(size, [&](int64_t i, int64_t n) {
    const Vec part = load_part(x + i, n);
    squares += part * part;
  });
  const float factor = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
  for_each_vec(size, [&](int64_t i, int64_t n) {
    const Vec z = load_part(gate + i, n);
    store_part(out + i, load_part(x + i, n) * factor * load_part(weight + i, n) * z * sigmoid(z),
               n);
  });
}

// One head of keys of one request, with its heads of values: no other task has its channels.
template <class T>
void run_head(const Net& net, const RecurrentStep& step, const T* y, T* out, int64_t request,
              int64_t head) {
  const int64_t group = net.v_heads / net.k_heads, keys = net.k_heads * net.k_size;
  const int64_t values = net.v_heads * net.v_size, channels = 2 * keys + values;
  const int64_t stride = channels + values + 2 * net.v_heads, before = net.width - 1;
  const int64_t own_values = group * net.v_size, own = 2 * net.k_size + own_values;
  const Range ranges[] = {{head * net.k_size, net.k_size},
                          {keys + head * net.k_size, net.k_size},
                          {2 * keys + head * own_values, own_values}};
  const Span span(step, request);
  if (span.is_empty()) return;
  const int64_t matrix = net.k_size * net.v_size, state_size = group * matrix;
  const auto state_of = [&](int64_t slot) {
    return net.states + (slot * net.v_heads + head * group) * matrix;
  };
  float* state = state_of(span.write);
  if (span.begin == 0) {
    std::memset(state, 0, state_size * sizeof(float));
  } else if (span.read != span.write) {
    std::memcpy(state, state_of(span.read), state_size * sizeof(float));
  }
  const bool has_drafts = span.written < span.end;
  float* const window = static_cast<float*>(
      scratch((net.width * own + net.v_size + has_drafts * state_size) * sizeof(float)));
  float* const mixed = window + before * own;  // queries, keys and values of a token
  float* const read = mixed + own;
  const int64_t columns = channels + 2 * net.v_heads;  // of inputs
  T* const inputs = static_cast<T*>(net.inputs);
  const auto input_of = [&](int64_t slot, int64_t position) {
    return inputs + (slot * net.rows + position % net.rows) * columns;
  };
  const auto each = [&](auto&& f) {
    int64_t at = 0;
    for (const Range& range : ranges) {
      for_each_vec(range.count, [&](int64_t i, int64_t n) { f(at + i, range.first + i, n); });
      at += range.count;
    }
  };
  // The window is a ring: row (position + i) % before is the i-th oldest.
  const auto place_of = [&](int64_t position) {
    return window + (position + before) % before * own;
  };
  for (int64_t position = span.begin - before; position < span.begin; ++position) {
    const T* const row = position < 0 ? nullptr : input_of(span.read, position);
    each([&](int64_t at, int64_t channel, int64_t n) {
      store_part(place_of(position) + at, row ? load_part(row + channel, n) : Vec{}, n);
    });
  }
  // Remembers the input at a position. Its gates are those of drafts.
  const auto remember = [&](int64_t position, const T* row, const T* gates) {
    span.for_slots(position, before, [&](int64_t slot) {
      T* const target = input_of(slot, position);
      each([&](int64_t, int64_t channel, int64_t n) {
        store_part(target + channel, load_part(row + channel, n), n);
      });
      for (int64_t i = head * group; i < (head + 1) * group; ++i) {
        target[channels + i] = gates[i];
        target[channels + net.v_heads + i] = gates[net.v_heads + i];
      }
    });
  };
  for (int64_t position = span.begin - before < 0 ? 0 : span.begin - before;
       position < span.begin; ++position) {
    const T* const row = input_of(span.read, position);
    remember(position, row, row + channels);
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(net.k_size));
  for (int64_t position = span.begin; position < span.end; ++position) {
    const bool is_new = position >= span.start;
    const int64_t token = span.first + position - span.start;
    const T* const row = is_new ? y + token * stride : input_of(span.read, position);
    const T* const gates = row + channels + is_new * values;
    float* const oldest = place_of(position);
    each([&](int64_t at, int64_t channel, int64_t n) {
      const Vec x = load_part(row + channel, n);
      Vec total = x * load_part(net.kernel + before * channels + channel, n);
      for (int64_t i = 0; i < before; ++i) {
        total += load_part(place_of(position + i) + at, n) *
                 load_part(net.kernel + i * channels + channel, n);
      }
      store_part(oldest + at, x, n);
      store_part(mixed + at, total * sigmoid(total), n);
    });
    make_unit(mixed, net.k_size, scale);
    make_unit(mixed + net.k_size, net.k_size, 1.0f);
    for (int64_t i = 0; i < group; ++i) {
      const int64_t v_head = head * group + i;
      const float beta = net.rate * sigmoid(to_float(gates[v_head]));
      const float a = to_float(gates[net.v_heads + v_head]) + net.time[v_head];
      const float decay = std::exp(net.decay[v_head] * softplus(a));
      update_state(state + i * matrix, net.k_size, net.v_size, mixed, mixed + net.k_size,
                   mixed + 2 * net.k_size + i * net.v_size, decay, beta, read);
      if (!is_new) continue;
      gated_norm(read, row + channels + v_head * net.v_size, net.norm, net.eps, net.v_size,
                 out + token * values + v_head * net.v_size);
    }
    remember(position, row, gates);
    if (span.keeps() && position + 1 == span.kept) {
      std::memcpy(state_of(span.keep), state, state_size * sizeof(float));
    }
    if (has_drafts && position + 1 == span.written) {
      state = static_cast<float*>(
          std::memcpy(read + net.v_size, state, state_size * sizeof(float)));
    }
  }
}

template <class T>
void run(const Net& net, const RecurrentStep& step, const void* y, void* out) {
  parallel(step.num_reqs * net.k_heads, [&](int64_t task) {
    run_head(net, step, static_cast<const T*>(y), static_cast<T*>(out), task / net.k_heads,
             task % net.k_heads);
  });
}

// Some channels of one request. out = c * convolution(b * x)
template <class T>
void convolve(const Convolution& net, const RecurrentStep& step, const T* y, T* out,
              int64_t request, int64_t at, int64_t count) {
  const Span span(step, request);
  if (span.is_empty()) return;
  const int64_t channels = net.channels, before = net.width - 1;
  T* const inputs = static_cast<T*>(net.inputs) + at;
  const auto input_of = [&](int64_t slot, int64_t position) {
    return inputs + (slot * net.rows + position % net.rows) * channels;
  };
  // The window is a ring: row (position + i) % before is the i-th oldest.
  T* const window = static_cast<T*>(scratch(before * count * sizeof(T)));
  const auto place_of = [&](int64_t position) {
    return window + (position + before) % before * count;
  };
  const auto remember = [&](int64_t position, const T* row) {
    span.for_slots(position, before, [&](int64_t slot) {
      std::memcpy(input_of(slot, position), row, count * sizeof(T));
    });
  };
  const int64_t oldest = span.begin - before < 0 ? 0 : span.begin - before;
  for (int64_t position = oldest; position < span.start; ++position) {
    remember(position, input_of(span.read, position));
  }
  for (int64_t position = span.start - before; position < span.start; ++position) {
    if (position < 0) {
      std::memset(place_of(position), 0, count * sizeof(T));
    } else {
      std::memcpy(place_of(position), input_of(span.read, position), count * sizeof(T));
    }
  }
  for (int64_t position = span.start; position < span.end; ++position) {
    const int64_t token = span.first + position - span.start;
    const T* b = y + token * 3 * channels + at;
    T* const own = out + token * channels + at;
    T* const place = place_of(position);
    const auto rounded = [&](int64_t i, Vec x, int64_t n) {
      store_part(own + i, x, n);
      return load_part(own + i, n);
    };
    for_each_vec(count, [&](int64_t i, int64_t n) {
      const Vec x = rounded(i, load_part(b + i, n) * load_part(b + 2 * channels + i, n), n);
      Vec total = x * load_part(net.kernel + before * channels + at + i, n);
      for (int64_t row = 0; row < before; ++row) {
        total += load_part(place_of(position + row) + i, n) *
                 load_part(net.kernel + row * channels + at + i, n);
      }
      if (net.bias) total += load_part(net.bias + at + i, n);
      store_part(place + i, x, n);
      store_part(own + i, load_part(b + channels + i, n) * rounded(i, total, n), n);
    });
    remember(position, place);
  }
}

template <class T>
void convolve_all(const Convolution& net, const RecurrentStep& step, const void* y, void* out) {
  const int64_t parts = (net.channels + kChannels - 1) / kChannels;
  parallel(step.num_reqs * parts, [&](int64_t task) {
    const int64_t at = task % parts * kChannels;
    const int64_t left = net.channels - at;
    convolve(net, step, static_cast<const T*>(y), static_cast<T*>(out), task / parts, at,
             left < kChannels ? left : kChannels);
  });
}

template <bool kIsLogit, class T>
void gate_rows(T* x, const T* gate, int64_t stride, int64_t rows, int64_t size) {
  parallel(rows, [&](int64_t row) {
    for_each_vec(size, [&](int64_t i, int64_t n) {
      T* const own = x + row * size + i;
      const Vec factor = load_part(gate + row * stride + i, n);
      store_part(own, load_part(own, n) * (kIsLogit ? sigmoid(factor) : factor), n);
    });
  });
}

}  // namespace
}  // namespace tk::TK_VARIANT

// y: [num_tokens, q | k | v | z | b | a]; out: [num_tokens, v_heads * v_size].
TK_KERNEL(tk_delta_net)(const void* net, const void* step, const void* y, void* out) {
  using namespace tk::TK_VARIANT;
  const Net& own = *static_cast<const Net*>(net);
  (own.is_bf16 ? run<bf16> : run<float>)(own, *static_cast<const RecurrentStep*>(step), y, out);
}

// y: [num_tokens, b | c | x]; out: [num_tokens, channels].
TK_KERNEL(tk_gated_convolution)(const void* net, const void* step, const void* y, void* out) {
  using namespace tk::TK_VARIANT;
  const Convolution& own = *static_cast<const Convolution*>(net);
  (own.is_bf16 ? convolve_all<bf16> : convolve_all<float>)(
      own, *static_cast<const RecurrentStep*>(step), y, out);
}

// x *= sigmoid(gate). x: [rows, size]; gate: rows `stride` elements apart.
TK_KERNEL(tk_gate_rows)(void* x, const void* gate, int64_t stride, int64_t rows, int64_t size,
                        int64_t is_bf16) {
  using namespace tk::TK_VARIANT;
  if (is_bf16) {
    gate_rows<true>(static_cast<bf16*>(x), static_cast<const bf16*>(gate), stride, rows, size);
  } else {
    gate_rows<true>(static_cast<float*>(x), static_cast<const float*>(gate), stride, rows, size);
  }
}

// x *= y. x: [rows, size]; y: rows `stride` elements apart.
TK_KERNEL(tk_multiply_rows)(void* x, const void* y, int64_t stride, int64_t rows, int64_t size,
                            int64_t is_bf16) {
  using namespace tk::TK_VARIANT;
  if (is_bf16) {
    gate_rows<false>(static_cast<bf16*>(x), static_cast<const bf16*>(y), stride, rows, size);
  } else {
    gate_rows<false>(static_cast<float*>(x), static_cast<const float*>(y), stride, rows, size);
  }
}
