// One token per row by temperature, top-k, top-p and min-p, without a sort: a threshold is found by
// histograms of ever finer parts of the logits' range. Probabilities are integers (units of 2^-44
// of the best token's), so that their sums do not depend on the order in which threads add, and a
// row's token is a function of that row alone. Checked on the CPU stand-in only; it has not run on
// a GPU.
#pragma once

#include "argmax.cuh"

namespace tpengine::cuda {

struct SampleArgs {
  LogitsArgs logits;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const double* uniform;
};

constexpr int kBins = 2048, kBinsPerThread = kBins / kSampleThreads;
constexpr float kMassUnit = 17592186044416.f;  // 2^44
constexpr int kMaxSampleVocab = 1 << 19;       // so that the mass of a row stays below 2^63
constexpr float kLeastScaled = -87.f;          // exp of less counts as 0

struct SampleShared {
  uint32_t counts[kBins];
  Wide masses[kBins];
  Wide warp_values[kSampleWarps];
  uint32_t warp_counts[kSampleWarps];
  int bin;
  uint32_t count_before;
  Wide mass_before;
};

// Tokens with a smaller key stay, and of those with this key the first `keep`.
struct Threshold {
  uint32_t key, keep;
  Wide mass_before;  // of the smaller keys
};

// What one row's tokens weigh. A key grows with the distance from the best logit.
template <class T>
struct Weights {
  const T* row;
  float highest, inverse_temperature;
  __device__ __forceinline__ float scaled(int i) const {
    return (to_float(row[i]) - highest) * inverse_temperature;
  }
  static __device__ __forceinline__ uint32_t key(float scaled) {
    return __float_as_uint(fabsf(scaled));
  }
  static __device__ __forceinline__ float weight(float scaled) {
    return scaled >= kLeastScaled ? expf(scaled) : 0.f;
  }
  static __device__ __forceinline__ Wide mass(float scaled) {
    return static_cast<Wide>(weight(scaled) * kMassUnit);
  }
  // Steps of 1/32: a float's leading bits would put most tokens of a row into few bins, whose
  // additions would then wait for each other.
  static __device__ __forceinline__ int coarse_bin(float scaled) {
    return static_cast<int>(fminf(fabsf(scaled) * 32.f, kBins - 1.f));
  }
};

// The exclusive sum over threads of a count and a mass.
__device__ void sums_before(SampleShared& s, uint32_t& count, Wide& mass) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const uint32_t own_count = count;
  const Wide own_mass = mass;
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const uint32_t other_count = __shfl_up_sync(kAllLanes, count, distance);
    const Wide other_mass = __shfl_up_sync(kAllLanes, mass, distance);
    if (lane >= distance) {
      count += other_count;
      mass += other_mass;
    }
  }
  __syncthreads();
  if (lane == kWarpSize - 1) {
    s.warp_counts[warp] = count;
    s.warp_values[warp] = mass;
  }
  __syncthreads();
  for (int w = 0; w < warp; ++w) {
    count += s.warp_counts[w];
    mass += s.warp_values[w];
  }
  count -= own_count;
  mass -= own_mass;
}

// Which border is looked for: the token number `count` in order of keys, or, where that is 0, the
// one at which the mass reaches `mass`. Keys beyond `last_key` do not exist.
struct Target {
  uint32_t count;
  Wide mass;
  uint32_t last_key;
};

// Fills the histogram with the tokens for which bin(scaled, key) is not negative, and goes to the
// bin in which the border lies.
template <class T, class F>
__device__ int find_bin(SampleShared& s, const Weights<T>& weights, int vocab_size,
                        const Target& target, const F& bin) {
  for (int b = threadIdx.x; b < kBins; b += kSampleThreads) {
    s.counts[b] = 0;
    s.masses[b] = 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < vocab_size; i += kSampleThreads) {
    const float scaled = weights.scaled(i);
    const uint32_t key = weights.key(scaled);
    const int b = key <= target.last_key ? bin(scaled, key) : -1;
    if (b < 0) continue;
    atomicAdd(&s.counts[b], 1u);
    const Wide mass = weights.mass(scaled);
    if (mass != 0) atomicAdd(&s.masses[b], mass);
  }
  __syncthreads();
  uint32_t count = 0;
  Wide mass = 0;
  const int first = threadIdx.x * kBinsPerThread;
  for (int b = first; b < first + kBinsPerThread; ++b) {
    count += s.counts[b];
    mass += s.masses[b];
  }
  sums_before(s, count, mass);
  count += s.count_before;
  mass += s.mass_before;
  __syncthreads();  // everyone has read what is before
  for (int b = first; b < first + kBinsPerThread; ++b) {
    const uint32_t next_count = count + s.counts[b];
    const Wide next_mass = mass + s.masses[b];
    const bool here = target.count != 0 ? count < target.count && target.count <= next_count
                                        : mass < target.mass && target.mass <= next_mass;
    if (here) {
      s.bin = b;
      s.count_before = count;
      s.mass_before = mass;
    }
    count = next_count;
    mass = next_mass;
  }
  __syncthreads();
  return s.bin;
}

template <class T>
__device__ Threshold find_threshold(SampleShared& s, const Weights<T>& weights, int vocab_size,
                                    const Target& target) {
  __syncthreads();
  if (threadIdx.x == 0) {
    s.count_before = 0;
    s.mass_before = 0;
  }
  __syncthreads();
  const int coarse = find_bin(s, weights, vocab_size, target,
                              [&](float scaled, uint32_t) { return weights.coarse_bin(scaled); });
  uint32_t prefix = 0;  // of the key, whose top bit is 0: 11, 10 and 10 bits
  for (int shift = 20; shift >= 0; shift -= 10) {
    const int width = shift == 20 ? 11 : 10;
    const int bin = find_bin(s, weights, vocab_size, target, [&](float scaled, uint32_t key) {
      if (weights.coarse_bin(scaled) != coarse || key >> shift >> width != prefix) return -1;
      return static_cast<int>(key >> shift & ((1u << width) - 1));
    });
    prefix = prefix << width | static_cast<uint32_t>(bin);
  }
  uint32_t keep = target.count - s.count_before;
  if (target.count == 0) {
    const Wide each = weights.mass(-__uint_as_float(prefix));
    keep = static_cast<uint32_t>((target.mass - s.mass_before + each - 1) / each);
  }
  return {prefix, keep, s.mass_before};
}

// A warp's stretch of tokens in their order.
template <class T>
struct Stretch {
  const Weights<T>& weights;
  const Threshold& threshold;
  float min_p;
  int best, vocab_size, first, end;
  uint32_t equals;  // tokens at the threshold so far

  __device__ Stretch(const Weights<T>& w, const Threshold& t, float least, int best_token, int size)
      : weights(w), threshold(t), min_p(least), best(best_token), vocab_size(size), equals(0) {
    const int per_warp = ceil_div(ceil_div(size, kSampleWarps), kWarpSize) * kWarpSize;
    first = min(static_cast<int>(threadIdx.x) / kWarpSize * per_warp, size);
    end = min(first + per_warp, size);
  }
  // The mass of token i if it stays, else 0; lanes hold 32 tokens in order.
  __device__ __forceinline__ Wide kept_mass(int i) {
    const float scaled = i < end ? weights.scaled(i) : -INFINITY;
    const uint32_t key = weights.key(scaled);
    const bool equal = i < end && key == threshold.key;
    const uint32_t all = __ballot_sync(kAllLanes, equal);
    const uint32_t before = all & ((1u << threadIdx.x % kWarpSize) - 1);
    const bool inside = key < threshold.key || (equal && equals + __popc(before) < threshold.keep);
    equals += __popc(all);
    const bool likely = weights.weight(scaled) >= min_p || i == best;
    return i < end && inside && likely ? weights.mass(scaled) : 0;
  }
  __device__ uint32_t count_equals() const {
    uint32_t count = 0;
    for (int i = first + threadIdx.x % kWarpSize; i < end; i += kWarpSize)
      count += weights.key(weights.scaled(i)) == threshold.key ? 1 : 0;
    for (int bit = kWarpSize / 2; bit > 0; bit /= 2)
      count += __shfl_xor_sync(kAllLanes, count, bit);
    return count;
  }
};

// The token whose share of the kept mass, summed in token order, holds `uniform`.
template <class T>
__device__ int pick(SampleShared& s, Stretch<T> stretch, double uniform) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const uint32_t equals = stretch.count_equals();
  __syncthreads();
  if (lane == 0) s.warp_counts[warp] = equals;
  __syncthreads();
  for (int w = 0; w < warp; ++w) stretch.equals += s.warp_counts[w];
  const uint32_t equals_before = stretch.equals;
  Wide mass = 0;
  for (int i = stretch.first; i < stretch.end; i += kWarpSize) mass += stretch.kept_mass(i + lane);
  for (int bit = kWarpSize / 2; bit > 0; bit /= 2) mass += __shfl_xor_sync(kAllLanes, mass, bit);
  if (lane == 0) s.warp_values[warp] = mass;
  __syncthreads();
  Wide total = 0, before = 0;
  for (int w = 0; w < kSampleWarps; ++w) {
    if (w == warp) before = total;
    total += s.warp_values[w];
  }
  Wide target = static_cast<Wide>(uniform * static_cast<double>(total));
  if (target >= total) target = total - 1;
  if (target >= before && target < before + mass) {  // in one warp
    stretch.equals = equals_before;
    for (int i = stretch.first; i < stretch.end; i += kWarpSize) {
      Wide sum = stretch.kept_mass(i + lane);
      for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const Wide other = __shfl_up_sync(kAllLanes, sum, distance);
        if (lane >= distance) sum += other;
      }
      const uint32_t reached = __ballot_sync(kAllLanes, before + sum > target);
      if (reached != 0) {
        if (lane == 0) s.bin = i + __ffs(static_cast<int>(reached)) - 1;
        break;
      }
      before += __shfl_sync(kAllLanes, sum, kWarpSize - 1);
    }
  }
  __syncthreads();
  return s.bin;
}

// One block per row.
template <class T>
__global__ void __launch_bounds__(kSampleThreads)
    sample_tokens_kernel(const __grid_constant__ SampleArgs a) {
  __shared__ SampleShared s;
  const int row = blockIdx.x, vocab_size = a.logits.vocab_size;
  const int best = token_of(best_of_row<T>(a.logits, s.warp_values));
  const T* logits = row_of<T>(a.logits);
  const float highest = to_float(logits[best]), temperature = a.temperature[row];
  // NaN, an infinity, or nothing but bans: the largest logit decides.
  if (temperature == 0.f || !(fabsf(highest) < INFINITY)) {
    if (threadIdx.x == 0) a.logits.out[row] = best;
    return;
  }
  const Weights<T> weights = {logits, highest, fminf(1.f / temperature, 1e30f)};
  Threshold threshold = {0xffffffffu, 0, 0};
  const int top_k = a.top_k[row];
  const float top_p = a.top_p[row];
  if (top_k > 0 && top_k < vocab_size) {
    threshold =
        find_threshold(s, weights, vocab_size, {static_cast<uint32_t>(top_k), 0, 0x7fffffffu});
  }
  if (top_p < 1.f) {
    Wide total = 0;
    if (threshold.keep != 0) {
      const Wide each = weights.mass(-__uint_as_float(threshold.key));
      total = threshold.mass_before + threshold.keep * each;
    } else {
      for (int i = threadIdx.x; i < vocab_size; i += kSampleThreads)
        total += weights.mass(weights.scaled(i));
      total = combine_block(total, s.warp_values, [](Wide x, Wide y) { return x + y; });
    }
    Wide reach = static_cast<Wide>(ceil(static_cast<double>(top_p) * static_cast<double>(total)));
    reach = min(max(reach, Wide{1}), total);
    threshold = find_threshold(s, weights, vocab_size, {0, reach, min(threshold.key, 0x7fffffffu)});
  }
  const Stretch<T> stretch(weights, threshold, a.min_p[row], best, vocab_size);
  const int token = pick(s, stretch, a.uniform[row]);
  if (threadIdx.x == 0) a.logits.out[row] = token;
}

template <class T>
void launch_sample_tokens(const SampleArgs& args, int num_rows, cudaStream_t stream) {
  if (num_rows == 0) return;
  TPENGINE_LAUNCH(sample_tokens_kernel<T>, dim3(num_rows), dim3(kSampleThreads), 0, stream, args);
}

}  // namespace tpengine::cuda
