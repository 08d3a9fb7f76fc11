// One token per row by temperature, top-k, top-p and min-p. A row's token is a function of that row
// alone. Checked on the CPU stand-in only; it has not run on a GPU.
#pragma once

#include "threshold.cuh"

namespace tpengine::cuda {

struct SampleArgs {
  LogitsArgs logits;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const double* uniform;
};

// Which tokens stay, by their keys and, at the threshold, their order.
struct Filter {
  Threshold threshold;
  float min_p;
  Wide each;  // the mass of a token at the threshold
  __device__ Filter(const Threshold& t, float least)
      : threshold(t), min_p(least), each(mass_above_min_p(t.key)) {}
  __device__ __forceinline__ Wide mass_above_min_p(uint32_t key) const {
    const float weight = weight_of(key);
    return weight >= min_p ? in_units(weight) : 0;
  }
  __device__ __forceinline__ void add(Kept& kept, uint32_t key) const {
    if (key < threshold.key) kept.mass += mass_above_min_p(key);
    if (key == threshold.key) ++kept.equals;
  }
  // Of a row's first tokens.
  __device__ __forceinline__ Wide mass(const Kept& kept) const {
    return kept.mass + min(kept.equals, threshold.keep) * each;
  }
};

// The token whose share of the kept mass, summed in token order, holds `uniform`.
template <class T>
__device__ int pick(SampleShared& s, const TemperedRow<T>& row, const Filter& filter,
                    double uniform) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  // Each warp sums a stretch of the row.
  const int per_warp = ceil_div(ceil_div(row.vocab_size, kSampleWarps), kWarpSize) * kWarpSize;
  const auto start = [&](int stretch) { return min(stretch * per_warp, row.vocab_size); };
  Kept own = {0, 0};
  for_each_logit(row.logits, start(warp), start(warp + 1), lane, kWarpSize,
                 [&](int, float logit) { filter.add(own, row.key(logit)); });
  for (int bit = kWarpSize / 2; bit > 0; bit /= 2) {
    own.mass += __shfl_xor_sync(kAllLanes, own.mass, bit);
    own.equals += __shfl_xor_sync(kAllLanes, own.equals, bit);
  }
  if (lane == 0) s.warp_kept[warp] = own;
  __syncthreads();
  // Each warp looks at the sums of all.
  own = lane < kSampleWarps ? s.warp_kept[lane] : Kept{0, 0};
  const Kept through = {sum_through(own.mass), sum_through(own.equals)};
  const Wide total = __shfl_sync(kAllLanes, filter.mass(through), kWarpSize - 1);
  Wide target = static_cast<Wide>(uniform * static_cast<double>(total));
  if (target >= total) target = total - 1;
  const int stretch = __popc(__ballot_sync(kAllLanes, filter.mass(through) <= target));
  Kept before = {__shfl_sync(kAllLanes, through.mass - own.mass, stretch),
                 __shfl_sync(kAllLanes, through.equals - own.equals, stretch)};
  // In that stretch each thread sums a few neighbours.
  const int end_of_stretch = start(stretch + 1);
  const int per_thread = ceil_div(per_warp, kSampleThreads);
  const int first =
      min(start(stretch) + static_cast<int>(threadIdx.x) * per_thread, end_of_stretch);
  const int end = min(first + per_thread, end_of_stretch);
  own = {0, 0};
  for (int i = first; i < end; ++i) filter.add(own, row.key(to_float(row.logits[i])));
  before.mass += sum_before(own.mass, s.warp_values);
  before.equals += static_cast<uint32_t>(sum_before(own.equals, s.warp_values));
  if (filter.mass(before) <= target) {
    for (int i = first; i < end; ++i) {
      filter.add(before, row.key(to_float(row.logits[i])));
      if (target < filter.mass(before)) {
        s.token = i;
        break;
      }
    }
  }
  __syncthreads();
  return s.token;
}

// One block per row.
template <class T>
__global__ void __launch_bounds__(kSampleThreads)
    sample_tokens_kernel(const __grid_constant__ SampleArgs a) {
  __shared__ SampleShared s;
  const int vocab_size = a.logits.vocab_size;
  const int best = token_of(best_of_row<T>(a.logits, s.warp_values));
  const T* logits = row_of<T>(a.logits);
  const float highest = to_float(logits[best]), temperature = a.temperature[blockIdx.x];
  // NaN, an infinity, or nothing but bans: the largest logit decides.
  if (temperature == 0.f || !(fabsf(highest) < INFINITY)) {
    write_token<T>(a.logits, best, best, s.warp_values);
    return;
  }
  const TemperedRow<T> row = {logits, vocab_size, highest, fminf(1.f / temperature, 1e30f)};
  Threshold threshold = no_threshold();
  const int top_k = a.top_k[blockIdx.x];
  const float top_p = a.top_p[blockIdx.x];
  if (top_k > 0 && top_k < vocab_size) threshold = find_top_k(s, row, top_k);
  if (top_p < 1.f) threshold = find_top_p(s, row, threshold, top_p);
  const Filter filter(threshold, fminf(a.min_p[blockIdx.x], 1.f));
  const int token = pick(s, row, filter, a.uniform[blockIdx.x]);
  write_token<T>(a.logits, token, best, s.warp_values);
}

template <class T>
void launch_sample_tokens(const SampleArgs& args, int num_rows, cudaStream_t stream) {
  if (num_rows == 0) return;
  TPENGINE_LAUNCH(sample_tokens_kernel<T>, dim3(num_rows), dim3(kSampleThreads), 0, stream, args);
}

}  // namespace tpengine::cuda
