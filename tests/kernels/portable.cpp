// Small work through the portable kernels, for machines that PyTorch need not run on: each result is a line, its name and its numbers.
// test_cpu_arm.py compares what two machines make of the same.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "../../kernels/cpu/attention.h"

struct Weight {  // as in linear.cpp
  const uint32_t* panels;
  const float* bias;
  const float* scale;
  const int32_t* total;
  int64_t kind, depth, words, columns, activation, gated;
};

struct Norm {  // as in norm.cpp
  const void *weight, *bias;
  int64_t size, is_bf16;
  float eps;
};

extern "C" {
void tk_set_num_threads(int64_t);
int64_t tk_bind_thread(int64_t, const int64_t*, int64_t);
const char* tk_variant();
void tk_pack_portable(const uint32_t*, int64_t, int64_t, int64_t, uint32_t*);
void tk_linear_portable(const void*, const void*, int64_t, int64_t, void*, int64_t);
void tk_rows_portable(const void*, const int64_t*, int64_t, void*, int64_t);
void tk_add_norm_portable(const void*, const void*, void*, void*, int64_t);
void tk_write_portable(const AttentionLayer*, const AttentionStep*, void*);
void tk_attend_portable(const AttentionLayer*, const AttentionStep*, const void*, int64_t, void*);
}

using Floats = std::vector<float>;

static uint32_t state = 1;

// In [-1, 1), the same on every machine.
static float next() {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(static_cast<int32_t>(state) >> 8) / 8388608.0f;
}

static Floats some(size_t n) {
  Floats x(n);
  for (float& value : x) value = next();
  return x;
}

static uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x8000) >> 16);
}

static void tell(const std::string& name, const Floats& y) {
  std::printf("%s", name.c_str());
  for (float value : y) std::printf(" %.7g", value);
  std::printf("\n");
}

static void linear(const std::string& name, int64_t kind, int64_t rows, int64_t columns, int64_t depth, int64_t activation, bool gated) {
  const int64_t per_word = kind == 0 ? 1 : kind == 1 ? 2 : 4, words = depth / per_word, width = gated ? 16 : 32;
  const int64_t outs = gated ? columns / 2 : columns, panels = (outs + width - 1) / width;
  std::vector<uint32_t> plain(columns * words), packed(panels * words * 32);
  std::vector<int32_t> total(panels * 32);
  Floats bias = some(panels * 32), scale(panels * 32, 0.01f);
  for (int64_t row = 0; row < columns; ++row) {
    for (int64_t i = 0; i < depth; ++i) {
      const float value = next();
      uint32_t& word = plain[row * words + i / per_word];
      if (kind == 0) std::memcpy(&word, &value, 4);
      if (kind == 1) word |= static_cast<uint32_t>(to_bf16(value)) << 16 * (i % 2);
      if (kind == 2) {
        const int8_t whole = static_cast<int8_t>(value * 127);
        word |= static_cast<uint32_t>(static_cast<uint8_t>(whole)) << 8 * (i % 4);
        if (!gated) total[row] += whole;
      }
    }
  }
  tk_pack_portable(plain.data(), columns, words, gated, packed.data());
  const Weight weight{packed.data(), bias.data(), kind == 2 ? scale.data() : nullptr, total.data(), kind, depth, words, outs, activation, gated};
  Floats x = some(rows * depth), y(rows * outs);
  std::vector<uint16_t> halves(x.size());
  for (size_t i = 0; i < x.size(); ++i) halves[i] = to_bf16(x[i]);
  tk_linear_portable(&weight, kind == 1 ? static_cast<void*>(halves.data()) : x.data(), kind == 1, rows, y.data(), 0);
  tell(name, y);
  if (gated) return;
  const int64_t indices[] = {0, columns - 1, columns, -1};
  Floats found(4 * depth);
  tk_rows_portable(&weight, indices, 4, found.data(), 0);
  tell(name + "-rows", found);
}

static void norm() {
  Floats x = some(3 * 52), residual = some(3 * 52), weight = some(52), bias = some(52), out(3 * 52);
  const Norm rms{weight.data(), nullptr, 52, 0, 1e-6f}, layer{weight.data(), bias.data(), 52, 0, 1e-5f};
  tk_add_norm_portable(&rms, x.data(), residual.data(), out.data(), 3);
  tell("rms-norm", out);
  tk_add_norm_portable(&layer, x.data(), residual.data(), out.data(), 3);
  tell("layer-norm", out);
  tell("residual", residual);
}

// A prompt of 5 tokens and the 20th token of another request, 4 heads over 2, blocks of 8.
static void attention(int64_t window) {
  constexpr int64_t kHeads = 4, kKvHeads = 2, kSize = 24, kBlock = 8, kTokens = 6;
  Floats keys = some(8 * kBlock * kKvHeads * kSize), values = some(keys.size()), qkv = some(kTokens * (kHeads + 2 * kKvHeads) * kSize);
  Floats tables = some(32 * kSize), q_weight = some(kSize), k_weight = some(kSize), out(kTokens * kHeads * kSize);
  const AttentionLayer layer{keys.data(), values.data(), tables.data(), q_weight.data(), k_weight.data(), kSize / 2, kHeads, kKvHeads,
                             kSize, kBlock, window, 0, 0.2f, 0.0f, 1e-6f};
  const int64_t positions[] = {0, 1, 2, 3, 4, 19}, slots[] = {40, 41, 42, 43, 44, 27};
  const int32_t starts[] = {0, 5, 6}, lens[] = {5, 20}, rows[] = {0, 1}, table[] = {5, 0, 0, 1, 2, 3};
  const AttentionStep step{positions, slots, starts, lens, rows, table, 3, 2, kTokens};
  tk_write_portable(&layer, &step, qkv.data());
  tk_attend_portable(&layer, &step, qkv.data(), (kHeads + 2 * kKvHeads) * kSize, out.data());
  tell("attention-" + std::to_string(window), out);
  tell("keys-" + std::to_string(window), keys);
}

int main() {
  tk_set_num_threads(3);
  const int64_t first = 0;
  tk_bind_thread(1, &first, 1);
  std::fprintf(stderr, "%s\n", tk_variant());
  for (int64_t rows : {1, 2, 5, 130}) {
    const std::string of = std::to_string(rows);
    linear("fp32-" + of, 0, rows, 70, 33, 0, false);
    linear("bf16-" + of, 1, rows, 70, 34, 4, false);
    linear("int8-" + of, 2, rows, 70, 36, 3, false);
    linear("gated-" + of, 0, rows, 72, 20, 1, true);
  }
  norm();
  attention(0);
  attention(7);
}
