// y = x W^T + b with W in groups of 4 or 8 bits and x in 8 bits: each row of x is rounded with one
// scale when it comes ("dynamic", per token), sums of a group are exact 32-bit integers, and groups
// are added as floats, one rounding each, in their order: a result depends neither on the batch nor
// on the instruction set.
//
// A few inputs of a token are far larger than the others (Dettmers et al. 2022, arXiv 2208.07339),
// and with the scale of the largest the others would lose their bits. So the largest fours of a
// row, one in 32 and at most four, have numbers of 14 bits, whose high parts are multiplied apart.
//
// Weights are unsigned and rows signed, as the byte products take them. What is added to a weight
// to make it unsigned, times the sum of the group's inputs, depends on row and group only: sums
// start from minus that. With offsets sums start from 0, and offset times sum of inputs is added as
// a float.
//
// Layout of a panel of 32 outputs, see QuantizedLinearArgs: a step of 4 inputs is one cache line in
// 4 bits (outputs 0 to 15 in the low halves of the bytes, 16 to 31 in the high ones) or two in 8;
// behind a group's steps stand its scales, one line, and its offsets, if any. A panel is read as
// one stream. A kernel takes a pair of vectors at a time, as many outputs of the low halves as of
// the high ones, so that a repeated input serves both.
#include "../transpose.h"
#include "isa.h"

namespace tpengine::cpu::TPENGINE_ISA {
namespace {

constexpr int kPairs = kLinearPanel / 2 / kLanes;

template <class T>
inline Vec inputs_at(const T* x, int64_t k, int64_t n) {
  return k + kLanes <= n ? load(x + k) : load_part(x + k, n - k);
}

// Largest magnitudes of each four inputs of a row into a.rows.maxima, by kLanes fours and zeros
// behind them; returns the largest, or NaN if an input is NaN.
template <class T>
inline float find_maxima(const QuantizedLinearArgs& a, const T* x) {
  const int64_t n = a.in_features;
  float* maxima = a.rows.maxima;
  Vec largest = set1(0.f), unsound = set1(0.f);  // the other: 0 or NaN
  for (int64_t k = 0; k < n; k += 4 * kLanes, maxima += kLanes) {
    Vec part[4];
    for (int i = 0; i < 4; ++i) {
      part[i] = inputs_at(x, k + i * kLanes, n);
      unsound = fma(part[i], set1(0.f), unsound);
    }
    const Vec found = maxima_of_fours(part[0], part[1], part[2], part[3]);
    largest = vmax(largest, found);
    store(maxima, found);
  }
  return maximum(largest) + sum(unsound);
}

inline float add_to_bits(float x, int32_t number) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  bits += number;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// The magnitude that becomes 127: at most a.num_outliers fours of the row exceed it. It is
// `largest` less a number of eighths of octaves, as many as can be. Numbers of 14 bits hold 7
// octaves more than 8 bits do.
inline float find_limit(const QuantizedLinearArgs& a, float largest) {
  if (!(largest > 1e-30f && largest <= 3e38f)) return largest;
  int most = 0;
  for (int step = 32; step > 0; step /= 2) {
    if (most + step > 55) continue;
    const Vec beyond = set1(add_to_bits(largest, 1 - ((most + step) << 20)));
    int64_t count = 0;
    for (int64_t k = 0; k < a.in_features; k += 4 * kLanes)
      count += __builtin_popcount(bits_ge(load(a.rows.maxima + k / 4), beyond));
    if (count <= a.num_outliers) most += step;
  }
  return add_to_bits(largest, -(most << 20));
}

inline int sum_of(int32_t bytes) {
  int8_t four[4];
  memcpy(four, &bytes, sizeof four);
  return four[0] + four[1] + four[2] + four[3];
}

// Takes the high parts of those fours of a vector of numbers at input k of which a lane is in
// `beyond`; returns the place of the next outlier.
inline OutlierFour* put_outliers(const QuantizedLinearArgs& a, Vec numbers, int64_t k,
                                 uint32_t beyond, int32_t* words, OutlierFour* next) {
  const Vec highs = round_even(numbers * set1(1.f / 128.f));
  int32_t high_words[kLanes / 4], low_words[kLanes / 4];
  store_rounded((int8_t*)high_words, highs);
  store_rounded((int8_t*)low_words, fma(highs, set1(-128.f), numbers));
  for (int i = 0; i < kLanes / 4; ++i) {
    if ((beyond >> i * 4 & 15) == 0) continue;
    const int64_t input = k + i * 4, group = a.num_groups == 1 ? 0 : input / a.group_size;
    words[i] = low_words[i];
    next->high = high_words[i];
    next->start = a.offsets == Offsets::kNone ? -(1 << (a.bits - 1)) * sum_of(next->high) : 0;
    next->scales = (int32_t)(group * a.group_bytes + a.group_size * a.bits * 4);
    next->line = next->scales - (int32_t)((group + 1) * a.group_size - input) * a.bits * 4;
    ++next;
  }
  return next;
}

// Rounds a row of a block of R rows, whose first four neighbours go to `fours`. Returns its scale.
template <class T>
inline float quantize_row(const QuantizedLinearArgs& a, const T* x, int64_t R, int32_t* fours,
                          OutlierFour* outliers) {
  const int64_t n = a.in_features;
  const float limit = find_limit(a, find_maxima(a, x));
  const Vec inverse = set1(limit > 0.f ? 127.f / limit : 0.f), least = set1(add_to_bits(limit, 1));
  OutlierFour* const end = outliers + a.num_outliers;
  const int64_t apart = a.tile_inputs > 0 ? 1 : R;
  for (int64_t k = 0; k < a.row_bytes(); k += kLanes) {
    int32_t* to = fours + (a.tile_inputs > 0 ? k / 64 * 16 * R + k % 64 / 4 : k / 4 * R);
    const Vec v = inputs_at(x, k, n);
    int32_t words[kLanes / 4];
    store_rounded((int8_t*)words, v * inverse);
    const uint32_t beyond = bits_ge(vmax(v, set1(0.f) - v), least);
    if (beyond != 0)
      outliers = put_outliers(a, round_even(v * inverse), k, beyond, words, outliers);
    for (int i = 0; i < kLanes / 4; ++i) to[i * apart] = words[i];
  }
  for (; outliers < end; ++outliers) *outliers = {0, 0, 0, (int32_t)(a.group_size * a.bits * 4)};
  return limit / 127.f;
}

// What the sums of each group start from, for R rows at once: a lane is a row.
inline void put_starts(const QuantizedLinearArgs& a, int64_t R, const int32_t* fours,
                       int32_t* starts) {
  static_assert(kWholeRows <= kLanes);
  constexpr int kParts = 8;  // that need not wait for each other
  const Raw ones = repeat(0x01010101);
  for (int64_t g = 0; g < a.num_groups; ++g, starts += R) {
    Raw parts[kParts];
    for (Raw& part : parts) part = zero_apart();
    for (int64_t i = 0; i < a.group_size / 4; i += kParts)
      for (Raw& part : parts) {
        part = add_byte_products(part, ones, load_raw(fours));
        fours += R;
      }
    Vec inputs = set1(0.f);
    for (const Raw& part : parts) inputs = inputs + to_floats(part);
    float sums[kLanes];
    store(sums, inputs);
    for (int64_t r = 0; r < R; ++r) {
      const int32_t start = -(1 << (a.bits - 1)) * (int32_t)sums[r];
      memcpy(starts + r, a.offsets == Offsets::kNone ? (const void*)&start : sums + r, 4);
    }
  }
}

// Adds the high parts of outliers of some of R rows to the sums of inputs that stand in `starts`,
// which offsets need.
inline void add_high_inputs(const QuantizedLinearArgs& a, int64_t rows, int64_t R,
                            const OutlierFour* outlier, int32_t* starts) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < a.num_outliers; ++i, ++outlier) {
      float sum;
      int32_t* start = starts + outlier->line / a.group_bytes * R + r;
      memcpy(&sum, start, sizeof sum);
      sum += 128.f * (float)sum_of(outlier->high);
      memcpy(start, &sum, sizeof sum);
    }
}

// What a block fetches while it multiplies: nothing, since the processor's prefetchers follow one
// stream best when left alone; or the panel that comes next, into L2.
struct NoFetch {
  inline void at_step() {}
};
template <int kLines>  // of a panel, in a step
struct PanelFetch {
  const char* place;
  ptrdiff_t step_bytes;  // at most kLines cache lines
  inline void at_step() {
    for (int i = 0; i < kLines; ++i) fetch_into_l2(place + 64 * i);
    place += step_bytes;
  }
};

// A vector of sums for each row, as outputs of type T from `output` on. Not inlined: else each
// number of rows would have a copy for each type.
template <class T>
__attribute__((noinline)) void put_outputs(const QuantizedLinearArgs& a, int64_t row,
                                           int64_t num_rows, int64_t output, const Vec* sums) {
  const int64_t count = a.out_features - output;
  const Vec bias = load_outputs(a.bias == nullptr ? nullptr : (const T*)a.bias + output, count);
  for (int64_t r = row; r < row + num_rows; ++r, ++sums)
    store_outputs((T*)a.out + r * a.out_stride + output, fused(*sums, set1(a.rows.scales[r]), bias),
                  count);
}

// Adds the high parts of outliers: with one scale per output as one sum of integers, else as
// floats in the order of inputs.
template <class Format, int R>
inline void add_outliers(const QuantizedLinearArgs& a, int64_t row, const uint8_t* panel, int pair,
                         Vec (&total)[R][2]) {
  const OutlierFour* outlier = a.rows.outliers + row * a.num_outliers;
  const auto scale_of = [panel, pair](int32_t scales, int c) {
    return load_half((const uint16_t*)(panel + scales) + pair * kLanes + c * 16);
  };
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    Vec high[2] = {set1(0.f), set1(0.f)};
    Raw sum[2] = {zero_apart(), zero_apart()};
    int32_t start = 0, scales = 0;
    for (int64_t i = 0; i < a.num_outliers; ++i, ++outlier) {
      const uint8_t* w = panel + outlier->line + pair * sizeof(Raw);
      const Raw four = repeat(outlier->high), line = load_raw(w);
      scales = outlier->scales;
      start += outlier->start;
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) {
        if constexpr (!Format::kIsWhole) sum[c] = repeat_apart(&outlier->start);
        if constexpr (Format::kBits == 4)
          sum[c] =
              add_nibble_products(sum[c], c == 0 ? low_nibbles(line) : high_nibbles(line), four);
        else
          sum[c] = add_byte_products(sum[c], c == 0 ? line : load_raw(w + 64), four);
        if constexpr (!Format::kIsWhole)
          high[c] = fused(to_floats(sum[c]), scale_of(scales, c), high[c]);
      }
    }
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      if constexpr (Format::kIsWhole)
        high[c] = (to_floats(sum[c]) + set1((float)start)) * scale_of(scales, c);
      total[r][c] = fused(high[c], set1(128.f), total[r][c]);
    }
  }
}

// What a kernel knows of its weights when it is compiled. kIsWhole: one group per output.
template <int kBits_, bool kHasOffsets_, bool kIsWhole_>
struct GroupFormat {
  static constexpr int kBits = kBits_;
  static constexpr bool kHasOffsets = kHasOffsets_, kIsWhole = kIsWhole_;
};

// Two vectors of weights of a step, and what products of them with four inputs of a row add to a
// sum.
template <class Format>
struct Weights {
  // Steps whose sums are apart, in pairs of 16 bits, until they are added to those of a group.
  static constexpr int kStepsApart = 0;
  static constexpr bool kAreCentred = false;  // as signed numbers, so that sums start from 0
  Raw columns[2];

  explicit Weights(const uint8_t* w) {
    columns[0] = load_raw(w);
    if constexpr (Format::kBits == 4) {
      columns[1] = high_nibbles(columns[0]);
      columns[0] = low_nibbles(columns[0]);
    } else {
      columns[1] = load_raw(w + 64);
    }
  }
  inline Raw add(Raw sum, int c, Raw four) const {
    return Format::kBits == 4 ? add_nibble_products(sum, columns[c], four)
                              : add_byte_products(sum, columns[c], four);
  }
};

#if defined(TPENGINE_BYTES_IN_PAIRS)
// Eight steps of nibbles fit into 16 bits: 8 * 2 * 15 * 127 is less than 2^15.
template <bool kHasOffsets>
struct Weights<GroupFormat<4, kHasOffsets, false>> {
  static constexpr int kStepsApart = 8;
  static constexpr bool kAreCentred = false;
  Raw columns[2];

  explicit Weights(const uint8_t* w)
      : columns{low_nibbles(load_raw(w)), high_nibbles(load_raw(w))} {}
  inline Raw add(Raw sum, int c, Raw four) const { return add_pairs(sum, columns[c], four); }
};
// A pair of products fits into 16 bits where the weights' signs are given to the inputs.
template <bool kIsWhole>
struct Weights<GroupFormat<8, false, kIsWhole>> {
  static constexpr int kStepsApart = 0;
  static constexpr bool kAreCentred = true;
  CentredBytes columns[2];

  explicit Weights(const uint8_t* w) : columns{centred(load_raw(w)), centred(load_raw(w + 64))} {}
  inline Raw add(Raw sum, int c, Raw four) const {
    return add_centred_products(sum, columns[c], four);
  }
};
#endif

// R rows times a panel.
template <class Format, int R, class Fetch>
void quantized_block(const QuantizedLinearArgs& a, int64_t row, int64_t panel, Fetch fetch) {
  using Columns = Weights<Format>;
  constexpr int kStepBytes = Format::kBits * 16;
  constexpr int kSteps = Columns::kStepsApart > 0 ? Columns::kStepsApart : 4;
  const int64_t groups = Format::kIsWhole ? 1 : a.num_groups;
  for (int pair = 0; pair < kPairs; ++pair) {
    const uint8_t* w = a.packed + panel * a.panel_bytes + pair * sizeof(Raw);
    const int32_t* x = (const int32_t*)(a.rows.bytes + row * groups * a.group_size);
    const int32_t* start = a.rows.starts + row * groups;
    Vec total[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 2; ++c) total[r][c] = set1(0.f);
    for (int64_t g = 0; g < groups; ++g) {
      Raw sum[R][2];
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < 2; ++c)
          sum[r][c] =
              Format::kHasOffsets || Columns::kAreCentred ? zero_apart() : repeat_apart(start + r);
      int64_t left = a.group_size / 4;
      do {
        Raw apart[R][2];
        auto& own = Columns::kStepsApart > 0 ? apart : sum;
        if constexpr (Columns::kStepsApart > 0)
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r)
            for (int c = 0; c < 2; ++c) apart[r][c] = zero_apart();
#pragma GCC unroll 8
        for (int i = 0; i < kSteps; ++i) {
          fetch.at_step();
          const Columns columns(w);
          w += kStepBytes;
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r) {
            const Raw four = repeat(x[r]);
#pragma GCC unroll 2
            for (int c = 0; c < 2; ++c) own[r][c] = columns.add(own[r][c], c, four);
          }
          x += R;
        }
        if constexpr (Columns::kStepsApart > 0)
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r)
            for (int c = 0; c < 2; ++c) sum[r][c] = join_pairs(sum[r][c], apart[r][c]);
      } while ((left -= kSteps) > 0);
      const uint16_t* scales = (const uint16_t*)(w - pair * sizeof(Raw)) + pair * kLanes;
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) {
        const Vec scale = load_half(scales + c * 16);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) total[r][c] = fused(to_floats(sum[r][c]), scale, total[r][c]);
        if constexpr (Format::kHasOffsets) {
          Vec offset = load_half(scales + kLinearPanel + c * 16);
          if (a.offsets == Offsets::kZeroPoints) offset = set1(0.f) - offset * scale;
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r) {
            float inputs;
            memcpy(&inputs, start + r, sizeof inputs);
            total[r][c] = fused(set1(inputs), offset, total[r][c]);
          }
        }
      }
      w += Format::kHasOffsets ? 128 : 64;
      start += R;
    }
    if (a.num_outliers > 0)
      add_outliers<Format, R>(a, row, a.packed + panel * a.panel_bytes, pair, total);
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      const int64_t output = panel * kLinearPanel + c * 16 + pair * kLanes;
      Vec sums[R];  // a copy: no pointer to `total` leaves, so that it stays in registers
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) sums[r] = total[r][c];
      a.dtype == DType::kFloat32 ? put_outputs<float>(a, row, R, output, sums)
                                 : put_outputs<uint16_t>(a, row, R, output, sums);
    }
  }
}

// A block of kFewest to R rows.
template <class Format, int kFewest, int R, class Fetch>
inline void quantized_rows(const QuantizedLinearArgs& a, int64_t rows, int64_t row, int64_t panel,
                           Fetch fetch) {
  if constexpr (R > kFewest) {
    if (rows < R) return quantized_rows<Format, kFewest, R - 1>(a, rows, row, panel, fetch);
  }
  quantized_block<Format, R>(a, row, panel, fetch);
}

// A panel passes over all blocks of rows from L2, while the next one is fetched evenly over all
// steps. With a single block of many rows time passes between lines: it fetches its own panel.
template <class Format>
void quantized_by_vectors(const QuantizedLinearArgs& a, PanelRange now, PanelRange next) {
  constexpr int R = Format::kIsWhole ? kWholeRows : kQuantizedRows;
  constexpr int kUnaided = R / 2;  // no block of several has fewer rows
  const int64_t steps = kPairs * a.num_groups * a.group_size / 4, all_steps = a.num_blocks * steps;
  const int64_t step_bytes = min64(64, (a.panel_bytes + all_steps - 1) / all_steps);
  for (int64_t panel = now.begin; panel < now.end; ++panel) {
    const char* own = (const char*)a.packed + panel * a.panel_bytes;
    if (a.num_rows <= kUnaided) {
      quantized_rows<Format, 1, kUnaided>(a, a.num_rows, 0, panel, NoFetch{});
      continue;
    }
    if (a.num_blocks == 1) {
      const PanelFetch<Format::kBits / 4> ahead = {own + kLinearPrefetchBytes, Format::kBits * 16};
      quantized_rows<Format, kUnaided, R>(a, a.num_rows, 0, panel, ahead);
      continue;
    }
    const int64_t following = panel + 1 < now.end ? panel + 1 : min64(next.begin, a.num_panels - 1);
    PanelFetch<1> fetch = {own + (following - panel) * a.panel_bytes, step_bytes};
    for (int64_t block = 0; block < a.num_blocks; ++block) {
      const int64_t row = a.first_row(block);
      quantized_rows<Format, kUnaided, R>(a, a.first_row(block + 1) - row, row, panel, fetch);
      fetch.place += step_bytes * steps;
    }
  }
}

#if defined(TPENGINE_HAS_TILES)
#include "quantized_tiles.inc"
#endif

template <class Format>
inline void quantized_panels(const QuantizedLinearArgs& a, PanelRange now, PanelRange next) {
#if defined(TPENGINE_HAS_TILES)
  if (a.tile_inputs > 0) return quantized_by_tiles<Format>(a, now, next);
#endif
  quantized_by_vectors<Format>(a, now, next);
}

// Rounding of weights to groups without offsets. Lanes are outputs, and each goes through its
// inputs in order, so that all instruction sets choose the same numbers.

constexpr int64_t kTileInputs = 128;
// Steps of a group in 4 bits that are tried: shares of the one that makes the largest magnitude -8.
constexpr float kTriedSteps[] = {1.1f, 1.05f, 1.f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f};

struct WeightTile {
  float values[kTileInputs * kLinearPanel];  // [inputs][kLinearPanel], zeros beyond the weight
  float importance[kTileInputs];             // of each input, one if none is known
  int64_t inputs;
};

// Inputs of four outputs, as many as a vector of four words holds, to [inputs][kLinearPanel].
inline void take_block(const float* rows, int64_t stride, float* to) {
  FourWords words[4];
  for (int i = 0; i < 4; ++i) words[i] = load_words(rows + i * stride);
  store_transposed(to, kLinearPanel, words);
}
inline void take_block(const uint16_t* rows, int64_t stride, float* to) {
  FourWords even[4], odd[4];
  for (int i = 0; i < 4; ++i) {
    const FourWords pairs = load_words(rows + i * stride);
    even[i] = pairs << 16;
    odd[i] = pairs & 0xffff0000u;
  }
  store_transposed(to, 2 * kLinearPanel, even);
  store_transposed(to + kLinearPanel, 2 * kLinearPanel, odd);
}

template <class T>
void take_tile(const QuantizedLinearArgs& a, int64_t panel, int64_t first, int64_t inputs,
               WeightTile* tile) {
  tile->inputs = inputs;
  const int64_t known = max64(0, min64(inputs, a.in_features - first));
  memset(tile->values, 0, sizeof(float) * inputs * kLinearPanel);
  for (int64_t k = 0; k < inputs; ++k)
    tile->importance[k] = a.importance != nullptr && k < known ? a.importance[first + k] : 1.f;
  constexpr int64_t kAtOnce = sizeof(FourWords) / sizeof(T);
  const int64_t outputs = min64(kLinearPanel, a.out_features - panel * kLinearPanel);
  const T* rows = (const T*)a.x + panel * kLinearPanel * a.x_stride + first;
  for (int64_t lane = 0; lane < outputs; lane += 4, rows += 4 * a.x_stride) {
    float* to = tile->values + lane;
    const int64_t in_blocks = outputs - lane >= 4 ? known / kAtOnce * kAtOnce : 0;
    for (int64_t k = 0; k < in_blocks; k += kAtOnce)
      take_block(rows + k, a.x_stride, to + k * kLinearPanel);
    for (int64_t k = in_blocks; k < known; ++k)
      for (int64_t i = 0; i < min64(4, outputs - lane); ++i)
        to[k * kLinearPanel + i] = to_float(rows[i * a.x_stride + k]);
  }
}

// Of each output the step whose numbers, -8 to 7, have the least square error, weighted by inputs.
template <bool kHasImportance>
void find_steps(const WeightTile& tile, const float* extreme, float* steps) {
  constexpr int kShares = sizeof kTriedSteps / sizeof *kTriedSteps;
  constexpr int kAtOnce = kLanes == 16 ? 8 : 2;  // their sums stay in registers
  for (int64_t c = 0; c < kLinearPanel; c += kLanes) {
    float gain[kLanes] = {}, products[kLanes], squares[kLanes], inverses[kLanes];
    for (int i = 0; i < kLanes; ++i) steps[c + i] = 0.f;
    for (int first = 0; first < kShares; first += kAtOnce) {
      Vec inverse[kAtOnce], product[kAtOnce], square[kAtOnce];
      for (int n = 0; n < kAtOnce; ++n) {
        for (int i = 0; i < kLanes; ++i) {
          const float step = extreme[c + i] * -0.125f * kTriedSteps[first + n];
          inverses[i] = step != 0.f ? 1.f / step : 0.f;
        }
        inverse[n] = load(inverses);
        product[n] = square[n] = set1(0.f);
      }
      for (int64_t k = 0; k < tile.inputs; ++k) {
        const Vec value = load(tile.values + k * kLinearPanel + c);
        const Vec weight = set1(tile.importance[k]);
        const Vec weighted = kHasImportance ? value * weight : value;
#pragma GCC unroll 8
        for (int n = 0; n < kAtOnce; ++n) {
          const Vec q = vmin(vmax(round_even(value * inverse[n]), set1(-8.f)), set1(7.f));
          product[n] = fused(weighted, q, product[n]);
          square[n] = fused(kHasImportance ? q * weight : q, q, square[n]);
        }
      }
      for (int n = 0; n < kAtOnce; ++n) {
        store(products, product[n]);
        store(squares, square[n]);
        for (int i = 0; i < kLanes; ++i) {
          const float divisor = squares[i] > 0.f ? squares[i] : 1.f;
          const float found = products[i] * products[i] / divisor;
          if (found > gain[i]) {
            gain[i] = found;
            steps[c + i] = products[i] / divisor;  // that fits these numbers best
          }
        }
      }
    }
  }
}

void put_tile(const WeightTile& tile, const float* inverse, int bits, uint8_t* to) {
  const float middle = (float)(1 << (bits - 1));
  for (int64_t k = 0; k < tile.inputs; k += 4) {
    uint32_t fours[kLinearPanel] = {};
    for (int64_t i = 0; i < 4; ++i) {
      float q[kLinearPanel];
      for (int64_t c = 0; c < kLinearPanel; c += kLanes) {
        const Vec exact =
            round_even(load(tile.values + (k + i) * kLinearPanel + c) * load(inverse + c));
        store(q + c, vmin(vmax(exact, set1(-middle)), set1(middle - 1.f)) + set1(middle));
      }
      for (int lane = 0; lane < kLinearPanel; ++lane)
        fours[lane] |= (uint32_t)(int)q[lane] << 8 * i;
    }
    if (bits == 4)
      for (int lane = 0; lane < 16; ++lane) fours[lane] |= fours[lane + 16] << 4;
    memcpy(to + k * bits * 4, fours, (size_t)bits * 16);
  }
}

template <class T>
void quantize_panel(const QuantizedLinearArgs& a, int64_t panel) {
  WeightTile tile;
  for (int64_t g = 0; g < a.num_groups; ++g) {
    const int64_t first = g * a.group_size, end = first + a.group_size;
    float extreme[kLinearPanel] = {}, steps[kLinearPanel], inverse[kLinearPanel];
    for (int64_t k = first; k < end; k += kTileInputs) {
      take_tile<T>(a, panel, k, min64(kTileInputs, end - k), &tile);
      for (int64_t i = 0; i < tile.inputs; ++i)
        for (int lane = 0; lane < kLinearPanel; ++lane) {  // without a branch: by vectors
          const float value = tile.values[i * kLinearPanel + lane];
          const bool is_more = (fabsf(value) > fabsf(extreme[lane])) | (value != value);
          extreme[lane] = is_more ? value : extreme[lane];
        }
    }
    const auto find = a.importance != nullptr ? find_steps<true> : find_steps<false>;
    if (a.bits == 4) find(tile, extreme, steps);
    for (int i = 0; i < kLinearPanel; ++i) {
      if (a.bits == 8) steps[i] = fabsf(extreme[i]) / 127.f;
      if (!isfinite(extreme[i])) steps[i] = extreme[i];
    }
    uint8_t* to = (uint8_t*)a.out + panel * a.panel_bytes + g * a.group_bytes;
    uint16_t* scales = (uint16_t*)(to + a.group_size * a.bits * 4);
    for (int i = 0; i < kLinearPanel; ++i) {
      scales[i] = float_to_half(steps[i]);
      const float step = half_to_float(scales[i]);
      inverse[i] = step != 0.f ? 1.f / step : 0.f;
    }
    for (int64_t k = first; k < end; k += kTileInputs) {
      if (a.group_size > kTileInputs) take_tile<T>(a, panel, k, min64(kTileInputs, end - k), &tile);
      put_tile(tile, inverse, a.bits, to + (k - first) * a.bits * 4);
    }
  }
}

}  // namespace

// Parts [begin, end) of rows.
void quantize_rows(const QuantizedLinearArgs& a, int64_t begin, int64_t end) {
  constexpr int64_t kPieces = kTileBlockRows / kTileRoundedRows;
  const bool is_by_tiles = a.tile_inputs > 0;
  for (int64_t part = begin; part < end; ++part) {
    const int64_t block = is_by_tiles ? part / kPieces : part;
    const int64_t block_first = a.first_row(block), R = a.first_row(block + 1) - block_first;
    const int64_t at = is_by_tiles ? part % kPieces * kTileRoundedRows : 0;  // in the block
    const int64_t first = block_first + at,
                  rows = is_by_tiles ? min64(R - at, kTileRoundedRows) : R;
    int32_t* fours = (int32_t*)(a.rows.bytes + block_first * a.row_bytes()) + at * 16;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t x = (first + i) * a.x_stride;
      OutlierFour* outliers = a.rows.outliers + (first + i) * a.num_outliers;
      int32_t* to = fours + (is_by_tiles ? i * 16 : i);
      a.rows.scales[first + i] = a.dtype == DType::kFloat32
                                     ? quantize_row(a, (const float*)a.x + x, R, to, outliers)
                                     : quantize_row(a, (const uint16_t*)a.x + x, R, to, outliers);
    }
    int32_t* starts = a.rows.starts + block_first * a.num_groups + at;
#if defined(TPENGINE_HAS_TILES)
    if (is_by_tiles)
      put_starts_by_tiles(a, (const int8_t*)fours, rows, R, starts);
    else
#endif
      put_starts(a, R, fours, starts);
    if (a.offsets != Offsets::kNone)
      add_high_inputs(a, rows, R, a.rows.outliers + first * a.num_outliers, starts);
  }
}

void quantized_linear(const QuantizedLinearArgs& a, PanelRange now, PanelRange next) {
  if (a.is_whole())
    quantized_panels<GroupFormat<8, false, true>>(a, now, next);
  else if (a.offsets == Offsets::kNone)
    a.bits == 8 ? quantized_panels<GroupFormat<8, false, false>>(a, now, next)
                : quantized_panels<GroupFormat<4, false, false>>(a, now, next);
  else
    a.bits == 8 ? quantized_panels<GroupFormat<8, true, false>>(a, now, next)
                : quantized_panels<GroupFormat<4, true, false>>(a, now, next);
}

void quantize_panels(const QuantizedLinearArgs& a, int64_t begin, int64_t end) {
  for (int64_t panel = begin; panel < end; ++panel)
    a.dtype == DType::kFloat32 ? quantize_panel<float>(a, panel)
                               : quantize_panel<uint16_t>(a, panel);
}

}  // namespace tpengine::cpu::TPENGINE_ISA
