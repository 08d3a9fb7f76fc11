// Cuts a batch of sequences into work items of about equal length. One CTA, once per step, inside
// the graph: no host reads a length, and one graph serves all contexts.
#pragma once

#include "work_items.cuh"

namespace tpengine::cuda {

struct PlanArgs {
  int32_t* item_start;
  int4* items;
  const int32_t* seq_lens;
  // `wave`: items that run at once, per kv head. max_items is num_seqs + 2 wave.
  int num_seqs, wave, min_chunks, sliding_window;
};

constexpr int kPlanThreads = 256;
constexpr int kPlanWarps = kPlanThreads / kWarpSize;

struct BlockSum {
  int* warp_values;  // [kPlanWarps], shared
  template <class F>
  __device__ int operator()(int value, const F& combine) const {
    for (int bit = kWarpSize / 2; bit > 0; bit /= 2)
      value = combine(value, __shfl_xor_sync(kAllLanes, value, bit));
    __syncthreads();
    if (threadIdx.x % kWarpSize == 0) warp_values[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    value = warp_values[0];
    for (int w = 1; w < kPlanWarps; ++w) value = combine(value, warp_values[w]);
    return value;
  }
};

__device__ __forceinline__ int visible_chunks(const PlanArgs& a, int row) {
  const int length = a.seq_lens[row];
  return ceil_div(length, kChunk) - first_visible(length, a.sliding_window) / kChunk;
}

// The longest item in chunks: the smallest length whose items still fit one wave; where the rows
// alone fill a wave, 5/8 of the mean share, so that the last wave is not one of long items. Rows of
// length 0 have an item, which writes zeros, and count for nothing.
__device__ int longest_item(const PlanArgs& a, const BlockSum& reduce) {
  const auto add = [](int x, int y) { return x + y; };
  const auto larger = [](int x, int y) { return max(x, y); };
  int total = 0, longest = 1, live = 0;
  for (int row = threadIdx.x; row < a.num_seqs; row += kPlanThreads) {
    const int chunks = visible_chunks(a, row);
    total += chunks;
    live += chunks > 0;
    longest = max(longest, chunks);
  }
  total = reduce(total, add);
  longest = reduce(longest, larger);
  live = reduce(live, add);
  int low = min(a.min_chunks, longest), high = longest;
  if (live >= a.wave) {
    // Rounded up: the list has room for num_seqs + 2 wave items, and these are at most num_seqs +
    // 8/5 wave of them.
    const int64_t parts = 8 * static_cast<int64_t>(a.wave);
    const int64_t share = (static_cast<int64_t>(total) * 5 + parts - 1) / parts;
    return max(low, static_cast<int>(share));
  }
  while (low < high) {
    const int middle = (low + high) / 2;
    int count = 0;
    for (int row = threadIdx.x; row < a.num_seqs; row += kPlanThreads)
      count += ceil_div(visible_chunks(a, row), middle);
    if (reduce(count, add) > a.wave) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Sum over the threads before this one; `total` is that of all.
__device__ int sum_before(int value, int* warp_values, int& total) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int sum = value;
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int other = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane >= distance) sum += other;
  }
  __syncthreads();
  if (lane == kWarpSize - 1) warp_values[warp] = sum;
  __syncthreads();
  total = 0;
  for (int w = 0; w < kPlanWarps; ++w) {
    if (w < warp) sum += warp_values[w];
    total += warp_values[w];
  }
  return sum - value;
}

__global__ void __launch_bounds__(kPlanThreads) plan_decode_kernel(PlanArgs a) {
  __shared__ int warp_values[kPlanWarps];
  const int most = longest_item(a, {warp_values});
  int next = 0;
  for (int first_row = 0; first_row < a.num_seqs; first_row += kPlanThreads) {
    const int row = first_row + threadIdx.x;
    const bool live = row < a.num_seqs;
    const int chunks = live ? visible_chunks(a, row) : 0;
    const int count = live ? max(1, ceil_div(chunks, most)) : 0;
    int total;
    const int item = next + sum_before(count, warp_values, total);
    next += total;
    if (!live) continue;
    const int length = a.seq_lens[row];
    const int first_chunk = first_visible(length, a.sliding_window) / kChunk;
    a.item_start[row] = item;
    for (int i = 0; i < count; ++i) {
      const uint32_t flagged = count > 1 ? row | kPartialBit : row;
      const int64_t whole = chunks;
      a.items[item + i] = {static_cast<int>(flagged),
                           first_chunk + static_cast<int>(whole * i / count),
                           first_chunk + static_cast<int>(whole * (i + 1) / count), length};
    }
  }
  if (threadIdx.x == 0) a.item_start[a.num_seqs] = next;
}

inline void launch_plan_decode(const PlanArgs& args, cudaStream_t stream) {
  TPENGINE_LAUNCH(plan_decode_kernel, dim3(1), dim3(kPlanThreads), 0, stream, args);
}

}  // namespace tpengine::cuda
