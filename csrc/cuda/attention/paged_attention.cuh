// Decode attention over the paged cache [num_blocks, block_size, num_kv_heads, head_dim], in its
// plain form: warps share a head's context token by token, each with its own running softmax,
// and merge at the end. Checked on the CPU stand-in only; it has not run on a GPU.
#pragma once

#include "../../common/cuda_compat.h"

namespace tpengine::cuda {

struct PagedAttentionArgs {
  void* out;
  const void* q;
  const void* k_cache;
  const void* v_cache;
  const int32_t* block_table;
  const int32_t* seq_lens;
  const float* alibi_slopes;  // null: no bias
  int64_t out_token_stride, out_head_stride, q_token_stride, q_head_stride, block_table_stride;
  int num_heads, num_kv_heads, head_dim, block_size, sliding_window;
  float scale;
};

constexpr int kAttentionWarps = 4;
constexpr int kMaxHeadDim = 256;
constexpr int kLaneDims = kMaxHeadDim / kWarpSize;

// One block per (head, sequence); lane l of a warp holds dims l, l + 32, ...
template <class T>
__global__ void __launch_bounds__(kAttentionWarps* kWarpSize)
    paged_attention_kernel(PagedAttentionArgs a) {
  __shared__ float warp_max[kAttentionWarps], warp_sum_exp[kAttentionWarps];
  __shared__ float warp_out[kAttentionWarps][kMaxHeadDim];
  const int head = blockIdx.x, seq = blockIdx.y;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int kv_head = head / (a.num_heads / a.num_kv_heads);
  const int length = a.seq_lens[seq];
  const int first = length > a.sliding_window ? length - a.sliding_window : 0;
  const float slope = a.alibi_slopes != nullptr ? a.alibi_slopes[head] : 0.f;
  const T* q = static_cast<const T*>(a.q) + seq * a.q_token_stride + head * a.q_head_stride;
  float query[kLaneDims], total[kLaneDims];
  for (int j = 0; j < kLaneDims; ++j) {
    const int d = lane + j * kWarpSize;
    query[j] = d < a.head_dim ? to_float(q[d]) * a.scale : 0.f;
    total[j] = 0.f;
  }
  float highest = -INFINITY, sum = 0.f;
  for (int token = first + warp; token < length; token += kAttentionWarps) {
    const int64_t block = a.block_table[seq * a.block_table_stride + token / a.block_size];
    const int64_t row = (block * a.block_size + token % a.block_size) * a.num_kv_heads + kv_head;
    const T* k = static_cast<const T*>(a.k_cache) + row * a.head_dim;
    const T* v = static_cast<const T*>(a.v_cache) + row * a.head_dim;
    float logit = 0.f;
    for (int j = 0; j < kLaneDims; ++j) {
      const int d = lane + j * kWarpSize;
      if (d < a.head_dim) logit += query[j] * to_float(k[d]);
    }
    logit = warp_sum(logit) + slope * (token - (length - 1));
    const float next = fmaxf(highest, logit);
    const float old = __expf(highest - next), weight = __expf(logit - next);
    sum = sum * old + weight;
    highest = next;
    for (int j = 0; j < kLaneDims; ++j) {
      const int d = lane + j * kWarpSize;
      if (d < a.head_dim) total[j] = total[j] * old + weight * to_float(v[d]);
    }
  }
  if (lane == 0) {
    warp_max[warp] = highest;
    warp_sum_exp[warp] = sum;
  }
  for (int j = 0; j < kLaneDims; ++j) warp_out[warp][lane + j * kWarpSize] = total[j];
  __syncthreads();
  float all_max = -INFINITY;
  for (int w = 0; w < kAttentionWarps; ++w) all_max = fmaxf(all_max, warp_max[w]);
  T* out = static_cast<T*>(a.out) + seq * a.out_token_stride + head * a.out_head_stride;
  for (int d = threadIdx.x; d < a.head_dim; d += kAttentionWarps * kWarpSize) {
    float numerator = 0.f, denominator = 0.f;
    for (int w = 0; w < kAttentionWarps; ++w) {
      if (warp_max[w] == -INFINITY) continue;  // this warp saw no token
      const float factor = __expf(warp_max[w] - all_max);
      numerator += factor * warp_out[w][d];
      denominator += factor * warp_sum_exp[w];
    }
    out[d] = from_float<T>(denominator > 0.f ? numerator / denominator : 0.f);
  }
}

template <class T>
void launch_paged_attention(const PagedAttentionArgs& args, int num_seqs, cudaStream_t stream) {
  if (num_seqs == 0) return;
  TPENGINE_LAUNCH(paged_attention_kernel<T>, dim3(args.num_heads, num_seqs),
                  dim3(kAttentionWarps * kWarpSize), stream, args);
}

}  // namespace tpengine::cuda
