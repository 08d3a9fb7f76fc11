// The border that top-k or top-p draws in a row, without a sort: histograms of ever finer parts of
// the logits' range. Probabilities are integers (units of 2^-44 of the best token's), so that their
// sums do not depend on the order in which threads add. Checked on the CPU stand-in only; it has
// not run on a GPU.
#pragma once

#include "argmax.cuh"

namespace tpengine::cuda {

constexpr int kBins = 2048, kBinsPerThread = kBins / kSampleThreads;
constexpr int kListSize = 2048;
constexpr float kBinsPerUnit = 64.f;
constexpr float kMassUnit = 17592186044416.f;  // 2^44
constexpr int kMaxSampleVocab = 1 << 19;       // so that the mass of a row stays below 2^63

// What some tokens hold together: those before the threshold, and those at it.
struct Kept {
  Wide mass;
  uint32_t equals;
};

// A bin of the histogram, and the running amounts without it and with it.
struct Found {
  int bin;
  Wide before, through;
};

struct SampleShared {
  // The halves of each bin's amount: only 32 bits are added to shared memory by one instruction;
  // 64 are a loop of compare-and-swap.
  uint32_t low[kBins], high[kBins];
  uint32_t keys[kListSize], list_size;
  Wide warp_values[kSampleWarps];
  Kept warp_kept[kSampleWarps];
  Found found;
  int token;
};

// A row of which each token has a key that grows with its distance from the best logit: the bits of
// (highest - logit) / temperature.
template <class T>
struct TemperedRow {
  const T* logits;
  int vocab_size;
  float highest, inverse_temperature;
  __device__ __forceinline__ uint32_t key(float logit) const {
    return __float_as_uint(fabsf((logit - highest) * inverse_temperature));
  }
};

// The probability of a token as a share of the best one's, and in units.
__device__ __forceinline__ float weight_of(uint32_t key) { return expf(-__uint_as_float(key)); }
__device__ __forceinline__ Wide in_units(float weight) {
  return static_cast<Wide>(weight * kMassUnit);
}
__device__ __forceinline__ Wide mass_of(uint32_t key) { return in_units(weight_of(key)); }

// Even steps: a float's leading bits would put most tokens of a row into few bins, whose additions
// would then wait for each other.
__device__ __forceinline__ int coarse_bin(uint32_t key) {
  return static_cast<int>(__uint_as_float(key) * kBinsPerUnit);
}
__device__ __forceinline__ uint32_t first_key(int bin) {
  return __float_as_uint(static_cast<float>(bin) / kBinsPerUnit);
}

// Tokens with a smaller key stay, and of those with this key the first `keep`.
struct Threshold {
  uint32_t key, keep;
  bool listed;  // the list holds every token that stays and weighs anything
};

// Cuts nothing: from the first key of the last coarse bin on a token weighs less than one unit.
__device__ __forceinline__ Threshold no_threshold() { return {first_key(kBins - 1), 0, false}; }

// Calls visit(key) for the tokens on the list, or for all.
template <class T, class F>
__device__ __forceinline__ void for_each_key(const SampleShared& s, const TemperedRow<T>& row,
                                             bool listed, const F& visit) {
  if (listed) {
    const uint32_t size = s.list_size;
    for (uint32_t i = threadIdx.x; i < size; i += kSampleThreads) visit(s.keys[i]);
  } else {
    for_each_logit(row.logits, 0, row.vocab_size, threadIdx.x, kSampleThreads,
                   [&](int, float logit) { visit(row.key(logit)); });
  }
}

// The sum over the lanes up to this one.
template <class V>
__device__ __forceinline__ V sum_through(V value) {
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const V other = __shfl_up_sync(kAllLanes, value, distance);
    if (static_cast<int>(threadIdx.x) % kWarpSize >= distance) value += other;
  }
  return value;
}

// The sum over the threads before this one. `shared`: [kSampleWarps].
__device__ __forceinline__ Wide sum_before(Wide value, Wide* shared) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const Wide through = sum_through(value);
  __syncthreads();  // `shared` may still be read
  if (lane == kWarpSize - 1) shared[warp] = through;
  __syncthreads();
  Wide warps = lane < warp ? shared[lane] : 0;
  for (int bit = kWarpSize / 2; bit > 0; bit /= 2) warps += __shfl_xor_sync(kAllLanes, warps, bit);
  return warps + through - value;
}

// Adds to a bin of the histogram.
__device__ __forceinline__ void add_mass(SampleShared& s, int bin, Wide mass) {
  const uint32_t low = static_cast<uint32_t>(mass);
  const uint32_t carry = atomicAdd(&s.low[bin], low) > 0xffffffffu - low ? 1 : 0;
  const uint32_t high = static_cast<uint32_t>(mass >> 32) + carry;
  if (high != 0) atomicAdd(&s.high[bin], high);
}

// Empties the histogram and calls add(key) for the tokens on the list, or for all.
template <class T, class F>
__device__ __forceinline__ void fill(SampleShared& s, const TemperedRow<T>& row, bool listed,
                                     const F& add) {
  for (int b = threadIdx.x; b < kBins; b += kSampleThreads) s.low[b] = s.high[b] = 0;
  __syncthreads();
  for_each_key(s, row, listed, add);
  __syncthreads();
}

// The bin in which the running amount, `before` ahead of the first one, reaches `amount`; or the
// last one.
__device__ __forceinline__ Found find_bin(SampleShared& s, Wide before, Wide amount) {
  const auto amount_of = [&](int b) { return static_cast<Wide>(s.high[b]) << 32 | s.low[b]; };
  const int first = threadIdx.x * kBinsPerThread;
  Wide own = 0;
  for (int b = first; b < first + kBinsPerThread; ++b) own += amount_of(b);
  Wide reached = before + sum_before(own, s.warp_values);
  for (int b = first; b < first + kBinsPerThread; ++b) {
    const Wide next = reached + amount_of(b);
    if (reached < amount && (amount <= next || b == kBins - 1)) s.found = {b, reached, next};
    reached = next;
  }
  __syncthreads();
  return s.found;
}

// Puts the row's keys from `first` to `last` on the list; whether it holds them all.
template <class T>
__device__ __forceinline__ bool list_keys(SampleShared& s, const TemperedRow<T>& row,
                                          uint32_t first, uint32_t last) {
  if (threadIdx.x == 0) s.list_size = 0;
  __syncthreads();
  for_each_key(s, row, false, [&](uint32_t key) {
    if (key < first || key > last) return;
    const uint32_t place = atomicAdd(&s.list_size, 1u);
    if (place < kListSize) s.keys[place] = key;
  });
  __syncthreads();
  return s.list_size <= kListSize;
}

// The token at which, in the order of keys, the count or the mass reaches `amount`; the coarse
// histogram has been filled with all up to `last`. `listed`: the list holds them.
template <bool kByCount, class T>
__device__ __forceinline__ Threshold find_threshold(SampleShared& s, const TemperedRow<T>& row,
                                                    bool listed, Wide amount, uint32_t last) {
  Found found = find_bin(s, 0, amount);
  uint32_t first = first_key(found.bin);
  last = min(last, first_key(found.bin + 1) - 1);
  bool all_listed = listed;
  if (!listed) {
    // The few tokens of the border's bin, so that the row need not be walked for each finer
    // histogram; and after top-k all that stay, if they are few, so that top-p need not either.
    all_listed = kByCount && found.through <= kListSize;
    listed = list_keys(s, row, all_listed ? 0 : first, last);
  }
  while (first < last) {  // at most 30 bits, and 11 less each time
    int shift = 0;
    while ((last - first) >> shift >= kBins) ++shift;
    fill(s, row, listed, [&](uint32_t key) {
      if (key < first || key > last) return;
      const int bin = static_cast<int>((key - first) >> shift);
      if (kByCount) {
        atomicAdd(&s.low[bin], 1u);
      } else {
        add_mass(s, bin, mass_of(key));
      }
    });
    found = find_bin(s, found.before, amount);
    first += static_cast<uint32_t>(found.bin) << shift;
    last = min(last, first + (1u << shift) - 1);
  }
  Wide keep = amount - found.before;
  if (!kByCount) {
    const Wide each = mass_of(first);
    keep = (keep + each - 1) / each;
  }
  return {first, static_cast<uint32_t>(keep), all_listed};
}

// The border of top-k.
template <class T>
__device__ __forceinline__ Threshold find_top_k(SampleShared& s, const TemperedRow<T>& row,
                                                int top_k) {
  const uint32_t last = no_threshold().key;  // fewer than k tokens may weigh anything
  fill(s, row, false, [&](uint32_t key) {
    if (key <= last) atomicAdd(&s.low[coarse_bin(key)], 1u);
  });
  return find_threshold<true>(s, row, false, static_cast<Wide>(top_k), last);
}

// The border of top-p among the tokens that `threshold` leaves.
template <class T>
__device__ __forceinline__ Threshold find_top_p(SampleShared& s, const TemperedRow<T>& row,
                                                const Threshold& threshold, float top_p) {
  // All tokens lighter than this together weigh half of 1 - p of the best one at most: they come
  // after the border, and only the total needs them.
  const float light = (1.f - top_p) / 2.f / static_cast<float>(row.vocab_size);
  const uint32_t last = min(threshold.key, __float_as_uint(fabsf(logf(light))));
  Wide total = 0;
  fill(s, row, threshold.listed, [&](uint32_t key) {
    if (key > threshold.key) return;
    const Wide mass = mass_of(key);
    if (key < threshold.key) total += mass;
    if (key <= last) add_mass(s, coarse_bin(key), mass);
  });
  total = combine_block(total, s.warp_values, [](Wide x, Wide y) { return x + y; });
  total += threshold.keep * mass_of(threshold.key);
  Wide reach = static_cast<Wide>(ceil(static_cast<double>(top_p) * static_cast<double>(total)));
  reach = min(max(reach, Wide{1}), total);
  return find_threshold<false>(s, row, threshold.listed, reach, last);
}

}  // namespace tpengine::cuda
