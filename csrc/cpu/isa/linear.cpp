// y = x W^T + b with W packed in panels of kLinearPanel outputs: [panel][in / p][kLinearPanel][p],
// p as in the KV cache. Each output is one chain of multiply-adds over the inputs, so results do
// not depend on the batch.
//
// For few rows the panels are read once, in order, at the speed of the memory: the hardware
// prefetchers work best on one stream. For more rows, each block of rows reads a tile of panels
// from L2 and fetches a part of the next tile into L2, so that memory and multipliers work at the
// same time.
#include "isa.h"

namespace tpengine::cpu::TPENGINE_ISA {
namespace {

constexpr int kPanelVectors = kLinearPanel / kLanes;
// More than these are slower in one block than in two over a tile of panels.
constexpr int kFewRows = kLanes == 16 ? (int)kFewRowsOf16Lanes : 3;

// Whether a vector of weights is multiplied by one instruction, and is a whole line of memory.
template <class E>
constexpr bool kIsAtOnce = sizeof(typename E::Operand) == sizeof(Vec);
template <class E>
constexpr bool kIsLineAtOnce = kLanes == 16 && kIsAtOnce<E>;

// Two panels to half as many rows take fewer broadcasts per product, and these rows stay in L1
// even where they lie a multiple of 4096 bytes apart and so share its eight places.
template <class E>
constexpr int kTilePanels = kIsLineAtOnce<E> ? 2 : 1;
// Vectors of a block. With 8 lanes and 16 registers it has a part of a panel, and so more rows,
// each of which reads the weights from L2 once. With 4 lanes whole panels of few rows are faster.
template <class E>
constexpr int kTileVectors = kLanes == 8 ? 2 : kTilePanels<E> * kPanelVectors;
// Its rows: sums fill the registers that weights, inputs and (where it is no part of a sum's
// instruction) their product leave.
template <class E>
constexpr int kTileRows = kLanes == 16   ? 24 / kTileVectors<E>
                          : kLanes == 4  ? 3
                          : kIsAtOnce<E> ? 6
                                         : 4;

// Up to so many rows the next lines are asked for soon enough for the processor's prefetchers to
// keep the memory busy, and fetches of ours take their place in its queues: a layer's products are
// 10 to 20 % slower with them. With more rows, and so more time between lines, they are as much
// faster.
template <class E>
constexpr int kUnaidedRows = kIsLineAtOnce<E> ? 4 : 0;

// How a linear layer multiplies weights of E: what a vector of sums starts from, an input repeated
// in all lanes, and how sums become outputs.
template <class E>
struct FloatLinear {
  using Args = LinearArgs;
  using Input = typename E::Factor;
  using Weight = typename E::Storage;
  using Output = typename E::Storage;
  using Sum = Vec;
  using Operand = typename E::Operand;
  static constexpr int kPack = E::kPack;

  static inline const Input* inputs(const Args& a) { return (const Input*)a.x; }
  static inline int64_t input_stride(const Args& a) { return a.x_stride; }
  static inline Operand operand(const Weight* p) { return E::operand(p); }
  static inline typename E::Broadcast broadcast(const Input* p) { return E::broadcast(p); }
  static inline Sum multiply_add(Sum total, const typename E::Broadcast& x, const Operand& w) {
    return E::multiply_add(total, x, w);
  }
  static inline Sum start(const Args& a, int64_t column) {
    const Output* bias = a.bias == nullptr ? nullptr : (const Output*)a.bias + column;
    return load_outputs(bias, a.out_features - column);
  }
  struct Finish {
    Finish(const Args&, int64_t) {}
    inline Vec operator()(const Args&, int64_t, Sum sum) const { return sum; }
  };
};

// What a block fetches while it multiplies: its own panel, some way ahead of where it reads.
template <bool kIsAided>
struct OwnPanel {
  inline void at_step() {}
  inline void at_vector(const void* p) {
    if constexpr (kIsAided) fetch_into_l2((const char*)p + kLinearPrefetchBytes);
  }
};
// Or the panels that come next, into L2.
struct NextPanels {
  const char* place;
  ptrdiff_t step_bytes;  // at most two cache lines
  inline void at_step() {
    fetch_into_l2(place);
    fetch_into_l2(place + 64);
    place += step_bytes;
  }
  inline void at_vector(const void*) {}
};

// R rows over kVectors vectors of outputs: whole panels, or a part of one.
template <class E, int R, int kVectors, class Fetch>
void linear_block(const typename E::Args& a, int64_t row, int64_t vector, Fetch fetch) {
  const int64_t x_stride = E::input_stride(a);
  const typename E::Input* x = E::inputs(a) + row * x_stride;
  const int64_t panel_size = kLinearPanel * a.in_features, first = vector * kLanes;
  const typename E::Weight* w = (const typename E::Weight*)a.packed +
                                vector / kPanelVectors * panel_size +
                                vector % kPanelVectors * kLanes * E::kPack;
  typename E::Sum total[R][kVectors];
#pragma GCC unroll 8
  for (int n = 0; n < kVectors; ++n) {
    const typename E::Sum start = E::start(a, first + n * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) total[r][n] = start;
  }
  for (int64_t k = 0; k < a.in_features; k += E::kPack) {
    typename E::Operand column[kVectors];
    fetch.at_step();
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) {
      const auto* p = w + n / kPanelVectors * panel_size + n % kPanelVectors * kLanes * E::kPack;
      column[n] = E::operand(p);
      fetch.at_vector(p);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const auto input = E::broadcast(x + r * x_stride + k);
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n)
        total[r][n] = E::multiply_add(total[r][n], input, column[n]);
    }
    w += kLinearPanel * E::kPack;
  }
#pragma GCC unroll 8
  for (int n = 0; n < kVectors; ++n) {
    const int64_t output = first + n * kLanes;
    const typename E::Finish finish(a, output);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
      store_outputs((typename E::Output*)a.out + (row + r) * a.out_stride + output,
                    finish(a, row + r, total[r][n]), a.out_features - output);
  }
}

// All rows, which are at most R, over panels [begin, end).
template <class E, int R>
inline void linear_few_rows(const typename E::Args& a, int64_t begin, int64_t end) {
  if constexpr (R > 1) {
    if (a.num_rows < R) return linear_few_rows<E, R - 1>(a, begin, end);
  }
  for (int64_t panel = begin; panel < end; ++panel)
    linear_block<E, R, kPanelVectors>(a, 0, panel * kPanelVectors,
                                      OwnPanel<(R > kUnaidedRows<E>)>{});
}

template <class E, int R, int V>
inline void linear_rows(const typename E::Args& a, int64_t rows, int64_t row, int64_t vector,
                        const NextPanels& fetch) {
  if constexpr (R > 1) {
    if (rows < R) return linear_rows<E, R - 1, V>(a, rows, row, vector, fetch);
  }
  linear_block<E, R, V>(a, row, vector, fetch);
}

// All rows over V vectors, or the panel that has more of them, while `next_bytes` from `next` on
// are fetched.
template <class E, int R, int V>
inline void linear_tile(const typename E::Args& a, int64_t panel, const char* next,
                        int64_t next_bytes) {
  constexpr int kParts = V < kPanelVectors ? kPanelVectors / V : 1;
  const int64_t blocks = (a.num_rows + R - 1) / R, steps = a.in_features / E::kPack;
  const int64_t all_steps = blocks * kParts * steps;
  const int64_t step_bytes = min64(128, (next_bytes + all_steps - 1) / all_steps);
  for (int64_t block = 0, row = 0; block < blocks; ++block) {
    // as equal as can be: 32 rows go as 11 + 11 + 10, not 12 + 12 + 8
    const int64_t rows = (a.num_rows - row + blocks - block - 1) / (blocks - block);
    for (int part = 0; part < kParts; ++part) {
      const int64_t vector = panel * kPanelVectors + part * V;
      linear_rows<E, R, V>(a, rows, row, vector, NextPanels{next, step_bytes});
      next += step_bytes * steps;
    }
    row += rows;
  }
}

template <class E>
inline void linear_panels(const typename E::Args& a, PanelRange now, PanelRange next) {
  if (a.num_rows <= kFewRows) return linear_few_rows<E, kFewRows>(a, now.begin, now.end);
  constexpr int P = kTilePanels<E>;
  const int64_t panel_bytes = kLinearPanel * a.in_features * (int64_t)sizeof(typename E::Weight);
  for (int64_t panel = now.begin; panel < now.end; panel += P) {
    PanelRange following = {panel + P, min64(panel + 2 * P, now.end)};
    if (following.begin >= now.end) following = {next.begin, min64(next.begin + P, next.end)};
    const int64_t bytes = max64(0, following.end - following.begin) * panel_bytes;
    const char* place = (const char*)a.packed + (bytes > 0 ? following.begin : panel) * panel_bytes;
    if (panel + P <= now.end)
      linear_tile<E, kTileRows<E>, kTileVectors<E>>(a, panel, place, bytes);
    else  // the last of an odd number
      linear_tile<E, P * kTileRows<E>, kTileVectors<E> / P>(a, panel, place, bytes);
  }
}

#if defined(TPENGINE_HAS_TILES)
#include "linear_tiles.inc"
#endif

}  // namespace

void linear(const LinearArgs& a, PanelRange now, PanelRange next) {
  if (a.dtype == DType::kFloat32) return linear_panels<FloatLinear<Float32>>(a, now, next);
#if defined(TPENGINE_HAS_TILES)
  linear_by_tiles(a, now, next);
#else
  linear_panels<FloatLinear<BFloat16>>(a, now, next);
#endif
}

}  // namespace tpengine::cpu::TPENGINE_ISA
