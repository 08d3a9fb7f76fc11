// Decode attention on the CUDA cores, for float32 caches and for head dims that the tensor-core
// kernel is not compiled for: a CTA per (head, work item), whose warps take tokens in turn, each
// with its own running softmax in base 2, and merge at the end.
#pragma once

#include "work_items.cuh"

namespace tpengine::cuda {

constexpr int kPlainWarps = 4;
constexpr int kMaxHeadDim = 256;
constexpr int kLaneDims = kMaxHeadDim / kWarpSize;

// Lane l of a warp holds dims l, l + 32, ...
template <class T>
struct PlainHead {
  float total[kLaneDims];
  float highest, sum;

  __device__ void run(const DecodeArgs& a, const WorkItem& item, int head) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int kv_head = head / (a.num_heads / a.num_kv_heads);
    const float slope = a.alibi_slopes != nullptr ? a.alibi_slopes[head] * kLog2E : 0.f;
    const T* q = static_cast<const T*>(a.q) + item.row * a.q_token_stride + head * a.q_head_stride;
    const float softcap = a.softcap * kLog2E;
    float query[kLaneDims];
    for (int j = 0; j < kLaneDims; ++j) {
      const int d = lane + j * kWarpSize;
      query[j] = d < a.head_dim ? to_float(q[d]) * (a.scale * kLog2E) : 0.f;
      total[j] = 0.f;
    }
    highest = -INFINITY;
    sum = 0.f;
    for (int token = item.begin + warp; token < item.end; token += kPlainWarps) {
      const int64_t block = a.block_table[item.row * a.block_table_stride + token / a.block_size];
      const int64_t row = (block * a.block_size + token % a.block_size) * a.num_kv_heads + kv_head;
      const T* k = static_cast<const T*>(a.k_cache) + row * a.head_dim;
      const T* v = static_cast<const T*>(a.v_cache) + row * a.head_dim;
      float logit = 0.f;
      for (int j = 0; j < kLaneDims; ++j) {
        const int d = lane + j * kWarpSize;
        if (d < a.head_dim) logit += query[j] * to_float(k[d]);
      }
      logit = warp_sum(logit);
      if (softcap > 0.f) logit = softcap * tanhf(logit / softcap);
      logit += slope * (token - (item.length - 1));
      const float next = fmaxf(highest, logit);
      const float old = exp2f(highest - next), weight = exp2f(logit - next);
      sum = sum * old + weight;
      highest = next;
      for (int j = 0; j < kLaneDims; ++j) {
        const int d = lane + j * kWarpSize;
        if (d < a.head_dim) total[j] = total[j] * old + weight * to_float(v[d]);
      }
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kPlainWarps* kWarpSize) decode_plain_kernel(DecodeArgs a) {
  __shared__ float warp_max[kPlainWarps], warp_sums[kPlainWarps];
  __shared__ float warp_out[kPlainWarps][kMaxHeadDim];
  const int head = blockIdx.x;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  WorkItem item;
  if (!find_item(a, item)) return;
  PlainHead<T> part;
  part.run(a, item, head);
  if (lane == 0) {
    warp_max[warp] = part.highest;
    warp_sums[warp] = part.sum;
  }
  for (int j = 0; j < kLaneDims; ++j) warp_out[warp][lane + j * kWarpSize] = part.total[j];
  __syncthreads();
  float highest = -INFINITY, sum = 0.f, factor[kPlainWarps];
  for (int w = 0; w < kPlainWarps; ++w) highest = fmaxf(highest, warp_max[w]);
  for (int w = 0; w < kPlainWarps; ++w) {
    // A warp that saw no token counts for nothing.
    factor[w] = warp_max[w] == -INFINITY ? 0.f : exp2f(warp_max[w] - highest);
    sum += factor[w] * warp_sums[w];
  }
  for (int d = threadIdx.x; d < a.head_dim; d += kPlainWarps * kWarpSize) {
    float result = 0.f;
    for (int w = 0; w < kPlainWarps; ++w) result += factor[w] * warp_out[w][d];
    result = sum > 0.f ? result / sum : 0.f;
    if (item.partial) {
      partial_of(a, item.index, head)[d] = result;
    } else {
      output_of<T>(a, item.row, head)[d] = from_float<T>(result);
    }
  }
  if (item.partial && threadIdx.x == 0)
    partial_of(a, item.index, head)[a.head_dim] = sum > 0.f ? highest + log2f(sum) : -INFINITY;
}

}  // namespace tpengine::cuda
