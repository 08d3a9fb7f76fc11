// What low-rank adapters add to a linear layer: first shrunk = A x, then out += B shrunk, in
// float32. The layout, which is the GPU's too, stands in tpengine/ops/lora_reference.py: A in tiles
// of kLoRATile columns of `shrunk`, of which each has 64 bytes, a line, in turn; B in panels of
// kLoRAPanel outputs. Whatever is read of an adapter is one stream.
//
// Each number is one chain of sums in a fixed order, so that it does not depend on the other rows.
#include "isa.h"

namespace tpengine::cpu::TPENGINE_ISA {
namespace {

// Rows of a block.
constexpr int kShrinkRows = kLanes == 16 ? 4 : 2;
constexpr int kExpandRows = kLanes == 16 ? 8 : kLanes == 8 ? 4 : 2;
// Neighbouring outputs that share a repeated number of `shrunk`.
constexpr int kExpandOutputs = kLanes == 16 ? 32 : kLoRAPanel;

// An item's numbers are fetched into L2 some way ahead of where they are read, and at its end the
// first ones of the next item: the processor's prefetchers see too little of each stream.
constexpr ptrdiff_t kLoRAFetchBytes = 8192;
struct ItemFetch {
  const char* place;
  const char* end;
  const LoRAItem* next;
  ItemFetch(const LoRAItem& item, const LoRAItem* next)
      : place(item.weight + kLoRAFetchBytes), end(item.weight + item.weight_bytes), next(next) {}
  template <int kLines>
  inline void at_step() {
    if (place >= end) {
      if (next == nullptr) return;
      place = next->weight;
      end = place + min64(next->weight_bytes, kLoRAFetchBytes);
      next = nullptr;
    }
    for (int i = 0; i < kLines; ++i) fetch_into_l2(place + 64 * i);
    place += 64 * kLines;
  }
};

// How inputs of type X and weights of type W multiply: a vector of neighbours at once.
template <class X, class W>
struct Products {
  static constexpr int kSize = kLanes;
  using Input = Vec;
  using Weight = Vec;
  static inline Input input(const X* p) { return load(p); }
  static inline Weight weight(const W* p) { return load(p); }
  static inline Vec add(Vec total, Input x, Weight w) { return fma(x, w, total); }
};
#if defined(__AVX512BF16__)
template <>
struct Products<uint16_t, uint16_t> {
  static constexpr int kSize = 32;
  using Input = __m512bh;
  using Weight = __m512bh;
  static inline Input input(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static inline Weight weight(const uint16_t* p) { return input(p); }
  static inline Vec add(Vec total, Input x, Weight w) { return _mm512_dpbf16_ps(total, x, w); }
};
#endif

// The inputs of R rows. What a row has beyond whole lines is copied, with zeros behind it.
template <class X, class W, int R>
struct ShrinkInputs {
  static constexpr int kLine = 64 / sizeof(W);
  const X* row[R];
  X rest[R][kLine];
  int64_t whole, left;

  ShrinkInputs(const LoRAArgs& a, const int32_t* rows)
      : whole(a.in_features / kLine), left(a.in_features % kLine) {
    for (int r = 0; r < R; ++r) {
      row[r] = (const X*)a.x + rows[r] * a.x_stride;
      if (left == 0) continue;
      memset(rest[r], 0, sizeof rest[r]);
      memcpy(rest[r], row[r] + whole * kLine, left * sizeof(X));
    }
  }
};

// R rows times a tile.
template <class X, class W, int R>
inline void shrink_tile(const ShrinkInputs<X, W, R>& x, const W* w, float* out, int64_t stride,
                        ItemFetch& fetch) {
  using P = Products<X, W>;
  constexpr int kLine = 64 / sizeof(W);
  Vec total[R][kLoRATile];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kLoRATile; ++c) total[r][c] = set1(0.f);
  const auto add_line = [&](auto&& inputs_of) {
    fetch.at_step<kLoRATile>();
#pragma GCC unroll 8
    for (int i = 0; i < kLine; i += P::kSize) {
      typename P::Weight column[kLoRATile];
#pragma GCC unroll 4
      for (int c = 0; c < kLoRATile; ++c) column[c] = P::weight(w + c * kLine + i);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const typename P::Input input = P::input(inputs_of(r) + i);
#pragma GCC unroll 4
        for (int c = 0; c < kLoRATile; ++c) total[r][c] = P::add(total[r][c], input, column[c]);
      }
    }
    w += kLoRATile * kLine;
  };
  for (int64_t line = 0; line < x.whole; ++line)
    add_line([&](int r) { return x.row[r] + line * kLine; });
  if (x.left > 0) add_line([&](int r) { return x.rest[r]; });
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) store_sums(out + r * stride, total[r]);
}

template <class X, class W, int R>
inline void shrink_rows(const LoRAArgs& a, const LoRAItem& item, int64_t row, ItemFetch& fetch) {
  if constexpr (R > 1) {
    if (item.end - row < R) return shrink_rows<X, W, R - 1>(a, item, row, fetch);
  }
  const ShrinkInputs<X, W, R> inputs(a, a.rows + row);
  for (int64_t c = 0; c < item.num_columns; c += kLoRATile)
    shrink_tile<X, W, R>(inputs, (const W*)(item.weight + c * a.column_bytes),
                         a.shrunk + row * a.num_columns + item.first_column + c, a.num_columns,
                         fetch);
}

// Outputs [first, first + V kLanes) of R rows; `count` of them exist.
template <class X, class W, int R, int V>
inline void expand_block(const LoRAArgs& a, const LoRAItem& item, int64_t row, int64_t first,
                         int64_t count, ItemFetch& fetch) {
  constexpr int kVectors = kLoRAPanel / kLanes;  // of a panel
  const W* w = (const W*)item.weight + first * item.num_columns;
  const float* s = a.shrunk + row * a.num_columns + item.first_column;
  Vec total[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) total[r][v] = set1(0.f);
  for (int64_t c = 0; c < item.num_columns; ++c, w += kLoRAPanel) {
    Vec weight[V];
    fetch.at_step<1>();
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
      weight[v] = load(w + v / kVectors * kLoRAPanel * item.num_columns + v % kVectors * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec number = set1(s[r * a.num_columns + c]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) total[r][v] = fma(number, weight[v], total[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    X* out = (X*)a.out + a.rows[row + r] * a.out_stride + item.first_output + first;
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v, out += kLanes) {
      const int64_t left = count - v * kLanes;
      store_outputs(out, load_outputs(out, left) + total[r][v], left);
    }
  }
}

template <class X, class W, int R>
inline void expand_rows(const LoRAArgs& a, const LoRAItem& item, int64_t row, ItemFetch& fetch) {
  if constexpr (R > 1) {
    if (item.end - row < R) return expand_rows<X, W, R - 1>(a, item, row, fetch);
  }
  int64_t first = 0;
  for (; item.num_outputs - first > kExpandOutputs - kLoRAPanel; first += kExpandOutputs)
    expand_block<X, W, R, kExpandOutputs / kLanes>(a, item, row, first, item.num_outputs - first,
                                                   fetch);
  for (; first < item.num_outputs; first += kLoRAPanel)
    expand_block<X, W, R, kLoRAPanel / kLanes>(a, item, row, first, item.num_outputs - first,
                                               fetch);
}

template <class X, class W>
inline void lora_item(const LoRAArgs& a, const LoRAItem& item, const LoRAItem* next) {
  ItemFetch fetch(item, next);
  if (item.num_outputs == 0) {
    for (int64_t row = item.begin; row < item.end; row += kShrinkRows)
      shrink_rows<X, W, kShrinkRows>(a, item, row, fetch);
  } else {
    for (int64_t row = item.begin; row < item.end; row += kExpandRows)
      expand_rows<X, W, kExpandRows>(a, item, row, fetch);
  }
}

}  // namespace

void lora(const LoRAArgs& a, const LoRAItem& item, const LoRAItem* next) {
  if (a.dtype == DType::kFloat32) {
    a.weight_dtype == DType::kFloat32 ? lora_item<float, float>(a, item, next)
                                      : lora_item<float, uint16_t>(a, item, next);
  } else {
    a.weight_dtype == DType::kFloat32 ? lora_item<uint16_t, float>(a, item, next)
                                      : lora_item<uint16_t, uint16_t>(a, item, next);
  }
}

}  // namespace tpengine::cpu::TPENGINE_ISA
