// Runs the portable kernels on small inputs without PyTorch. Prints a line of numbers per result.
// test_cpu_arm.py compares the output of two machines.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "../../kernels/cpu/attention.h"

struct Weight {  // as in weight.h
  const uint32_t* panels;
  const float* bias;
  const float* scale;
  const int32_t* total;
  int64_t kind, depth, words, columns, activation, gated;
  int64_t panel_words, group, scale_kind, has_offsets;
};

struct Norm {  // as in norm.cpp
  const float *weight, *bias;
  int32_t is_centered;
  float eps;
};

struct Join {  // as in norm.cpp
  Norm norms[2], post;
  int64_t num_norms, size, is_bf16;
  float scale;
};

extern "C" {
void tk_set_num_threads(int64_t);
int64_t tk_bind_thread(int64_t, const int64_t*, int64_t);
const char* tk_variant();
void tk_pack_portable(const uint32_t*, int64_t, int64_t, int64_t, uint32_t*);
void tk_linear_portable(const void*, const void*, int64_t, int64_t, void*, int64_t);
void tk_rows_portable(const void*, const int64_t*, int64_t, void*, int64_t);
void tk_pack_groups_portable(const void*, const uint32_t*, const void*, const void*, uint32_t*);
void tk_groups_portable(const void*, const void*, int64_t, int64_t, void*, int64_t);
void tk_group_rows_portable(const void*, const int64_t*, int64_t, void*, int64_t);
void tk_join_portable(const void*, const void*, const void*, void*, void*, int64_t);
void tk_write_portable(const AttentionLayer*, const AttentionStep*, void*, const void*, const void*,
                       int64_t);
void tk_attend_portable(const AttentionLayer*, const AttentionStep*, const void*, int64_t, void*);
}

using Floats = std::vector<float>;

static uint32_t state = 1;

// In [-1, 1), the same on all machines.
static float next_float() {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(static_cast<int32_t>(state) >> 8) / 8388608.0f;
}

static Floats random_floats(size_t n) {
  Floats x(n);
  for (float& value : x) value = next_float();
  return x;
}

static uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x8000) >> 16);
}

static void print_result(const std::string& name, const Floats& y) {
  std::printf("%s", name.c_str());
  for (float value : y) std::printf(" %.7g", value);
  std::printf("\n");
}

static void linear(const std::string& name, int64_t kind, int64_t rows, int64_t columns,
                   int64_t depth, int64_t activation, bool gated) {
  const int64_t per_word = kind == 0 ? 1 : kind == 1 ? 2 : 4;
  const int64_t words = depth / per_word, width = gated ? 16 : 32;
  const int64_t outs = gated ? columns / 2 : columns, panels = (outs + width - 1) / width;
  std::vector<uint32_t> plain(columns * words), packed(panels * words * 32);
  std::vector<int32_t> total(panels * 32);
  Floats bias = random_floats(panels * 32), scale(panels * 32, 0.01f);
  for (int64_t row = 0; row < columns; ++row) {
    for (int64_t i = 0; i < depth; ++i) {
      const float value = next_float();
      uint32_t& word = plain[row * words + i / per_word];
      if (kind == 0) std::memcpy(&word, &value, 4);
      if (kind == 1) word |= static_cast<uint32_t>(to_bf16(value)) << 16 * (i % 2);
      if (kind == 2) {
        const int8_t weight = static_cast<int8_t>(value * 127);
        word |= static_cast<uint32_t>(static_cast<uint8_t>(weight)) << 8 * (i % 4);
        if (!gated) total[row] += weight;
      }
    }
  }
  tk_pack_portable(plain.data(), columns, words, gated, packed.data());
  const float* scales = kind == 2 ? scale.data() : nullptr;
  const Weight weight{packed.data(), bias.data(), scales, total.data(), kind,       depth, words,
                      outs,          activation,  gated,  words * 32,   0,          0,     0};
  Floats x = random_floats(rows * depth), y(rows * outs);
  std::vector<uint16_t> halves(x.size());
  for (size_t i = 0; i < x.size(); ++i) halves[i] = to_bf16(x[i]);
  const void* input = kind == 1 ? static_cast<void*>(halves.data()) : x.data();
  tk_linear_portable(&weight, input, kind == 1, rows, y.data(), 0);
  print_result(name, y);
  if (gated) return;
  const int64_t indices[] = {0, columns - 1, columns, -1};
  Floats found(4 * depth);
  tk_rows_portable(&weight, indices, 4, found.data(), 0);
  print_result(name + "-rows", found);
}

// Each group has a scale, and an offset if `has_offsets`.
static void groups(const std::string& name, int64_t bits, int64_t rows, int64_t group,
                   bool has_offsets) {
  constexpr int64_t kColumns = 70, kDepth = 96, kPanels = 3;
  const int64_t words = kDepth * bits / 32, num_groups = kDepth / group;
  const int64_t panel_words = 32 * words + (has_offsets ? 2 : 1) * 16 * num_groups;
  std::vector<uint32_t> values(kColumns * words), panels(kPanels * panel_words);
  for (uint32_t& word : values) next_float(), word = state;
  std::vector<uint16_t> scales(kColumns * num_groups), offsets(scales.size());
  for (uint16_t& scale : scales) scale = to_bf16(next_float() * 0.01f);
  for (uint16_t& offset : offsets) offset = to_bf16(next_float() * 0.1f);
  const Weight weight{panels.data(), nullptr, nullptr, nullptr, bits == 4 ? 3 : 4, kDepth, words,
                      kColumns,      0,       0,       panel_words, group,         1, has_offsets};
  tk_pack_groups_portable(&weight, values.data(), scales.data(),
                          has_offsets ? offsets.data() : nullptr, panels.data());
  Floats x = random_floats(rows * kDepth), y(rows * kColumns);
  tk_groups_portable(&weight, x.data(), 0, rows, y.data(), 0);
  print_result(name, y);
  const int64_t indices[] = {0, kColumns - 1, kColumns, -1};
  Floats found(4 * kDepth);
  tk_group_rows_portable(&weight, indices, 4, found.data(), 0);
  print_result(name + "-rows", found);
}

static void norm() {
  Floats x = random_floats(3 * 52), residual = random_floats(3 * 52), weight = random_floats(52);
  Floats bias = random_floats(52), out(2 * 3 * 52);
  const Norm rms{weight.data(), nullptr, 0, 1e-6f}, layer{weight.data(), bias.data(), 1, 1e-5f};
  const Join plain{{rms, {}}, {}, 1, 52, 0, 1.0f}, full{{layer, rms}, rms, 2, 52, 0, 0.3f};
  tk_join_portable(&plain, x.data(), nullptr, residual.data(), out.data(), 3);
  print_result("rms-norm", out);
  tk_join_portable(&full, x.data(), bias.data(), residual.data(), out.data(), 1);
  print_result("norms", out);
  print_result("residual", residual);
}

// A prompt of 5 tokens, and the 20th token of another request. 4 heads share 2 KV heads.
// is_other: norms centered, last, and of each head; heads clipped; logits capped, with sinks.
static void attention(int64_t window, bool is_other) {
  constexpr int64_t kHeads = 4, kKvHeads = 2, kSize = 24, kHalf = kSize / 2, kBlock = 8, kTokens = 6;
  Floats keys = random_floats(8 * kBlock * kKvHeads * kSize), values = random_floats(keys.size());
  Floats qkv = random_floats(kTokens * (kHeads + 2 * kKvHeads) * kSize);
  Floats angles = random_floats(kTokens * 2 * kHalf), q_weight = random_floats(kHeads * kSize);
  Floats k_weight = random_floats(kKvHeads * kSize), out(kTokens * kHeads * kSize);
  const int64_t other = is_other, stride = other * kSize;
  const float cap = is_other ? 3.0f : 0.0f, clip = is_other ? 0.8f : 0.0f;
  const float sinks[kHeads] = {0.5f, -1.0f, 2.0f, 0.0f}, *own_sinks = is_other ? sinks : nullptr;
  const AttentionLayer layer{keys.data(), values.data(), q_weight.data(), k_weight.data(),
                             own_sinks,   stride,        stride,          0,
                             other,       other,         kHeads,          kKvHeads,
                             kSize,       kBlock,        window,          0,
                             0.2f,        cap,           1e-6f,           clip};
  const int64_t slots[] = {40, 41, 42, 43, 44, 27};
  const int32_t starts[] = {0, 5, 6}, lens[] = {5, 20}, rows[] = {0, 1};
  const int32_t table[] = {5, 0, 0, 1, 2, 3};
  const AttentionStep step{slots, starts, lens, rows, table, 3, 2, kTokens};
  tk_write_portable(&layer, &step, qkv.data(), angles.data(), angles.data(), kHalf);
  tk_attend_portable(&layer, &step, qkv.data(), (kHeads + 2 * kKvHeads) * kSize, out.data());
  print_result("attention-" + std::to_string(window), out);
  print_result("keys-" + std::to_string(window), keys);
}

int main() {
  tk_set_num_threads(3);
  const int64_t first = 0;
  tk_bind_thread(1, &first, 1);
  std::fprintf(stderr, "%s\n", tk_variant());
  for (int64_t rows : {1, 2, 5, 130}) {
    const std::string suffix = std::to_string(rows);
    linear("fp32-" + suffix, 0, rows, 70, 33, 5, false);
    linear("bf16-" + suffix, 1, rows, 70, 34, 4, false);
    linear("int8-" + suffix, 2, rows, 70, 36, 6, false);
    linear("gated-" + suffix, 0, rows, 72, 20, 1, true);
    groups("groups4-" + suffix, 4, rows, 32, true);
    groups("groups4-whole-" + suffix, 4, rows, 96, false);
    groups("groups8-" + suffix, 8, rows, 16, true);
    groups("groups8-whole-" + suffix, 8, rows, 48, false);
  }
  norm();
  attention(0, false);
  attention(7, true);
}
