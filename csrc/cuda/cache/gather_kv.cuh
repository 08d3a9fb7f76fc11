// Gathers sequences' cached K and V into dense rows, for attention kernels that know no pages; fp8
// becomes the model's dtype here. Checked on the CPU stand-in only; it has not run on a GPU.
#pragma once

#include "../../common/cuda_compat.h"

namespace tpengine::cuda {

// The caches are [num_blocks, block_size, num_kv_heads, head_dim], k and v [num_tokens,
// num_kv_heads, head_dim] without gaps.
struct GatherArgs {
  void* k;
  void* v;
  const void* k_cache;
  const void* v_cache;
  const int32_t* block_table;
  const int32_t* token_start;  // [num_seqs + 1]
  int64_t block_table_stride;
  int num_tokens, num_seqs, block_size, row_size;
  float k_scale, v_scale;
};

constexpr int kGatherWarps = 4;

// The sequence of packed token `token`: the last one that starts at or before it.
__device__ __forceinline__ int find_sequence(const int32_t* token_start, int num_seqs, int token) {
  int low = 0, high = num_seqs - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (token_start[middle] <= token) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// One warp per token, for K and V.
template <class T, class Cache, int N>
__global__ void __launch_bounds__(kGatherWarps* kWarpSize)
    gather_kv_kernel(const __grid_constant__ GatherArgs a) {
  const int token = blockIdx.x * kGatherWarps + threadIdx.x / kWarpSize;
  if (token >= a.num_tokens || token >= a.token_start[a.num_seqs]) return;
  const int seq = find_sequence(a.token_start, a.num_seqs, token);
  const int position = token - a.token_start[seq];
  const int64_t block = a.block_table[seq * a.block_table_stride + position / a.block_size];
  const int64_t from = (block * a.block_size + position % a.block_size) * a.row_size;
  const int64_t to = static_cast<int64_t>(token) * a.row_size;
  for (int i = threadIdx.x % kWarpSize * N; i < a.row_size; i += kWarpSize * N) {
    float k[N], v[N];
    load<N>(k, static_cast<const Cache*>(a.k_cache) + from + i);
    load<N>(v, static_cast<const Cache*>(a.v_cache) + from + i);
    for (int j = 0; j < N; ++j) {
      k[j] *= a.k_scale;
      v[j] *= a.v_scale;
    }
    store<N>(static_cast<T*>(a.k) + to + i, k);
    store<N>(static_cast<T*>(a.v) + to + i, v);
  }
}

// wide: see `with_width`.
template <class T, class Cache>
void launch_gather_kv(const GatherArgs& args, bool wide, cudaStream_t stream) {
  if (args.num_tokens == 0 || args.num_seqs == 0) return;
  const dim3 grid(ceil_div(args.num_tokens, kGatherWarps)), block(kGatherWarps * kWarpSize);
  with_width<T>(wide, [&](auto width) {
    const auto kernel = gather_kv_kernel<T, Cache, decltype(width)::value>;
    TPENGINE_LAUNCH(kernel, grid, block, 0, stream, args);
  });
}

}  // namespace tpengine::cuda
