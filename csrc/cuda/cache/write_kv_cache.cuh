// Writes tokens' K and V into their slots, cache layout [num_blocks, block_size, num_kv_heads,
// head_dim]. Checked on the CPU stand-in only; it has not run on a GPU.
#pragma once

#include "../../common/cuda_compat.h"

namespace tpengine::cuda {

// Sizes and strides in units of the copied type.
struct WriteCacheArgs {
  const void* source[2];  // K, V: [num_tokens, num_kv_heads, head_dim]
  void* cache[2];
  const int32_t* slot_mapping;
  int64_t token_stride[2], head_stride[2];
  int num_kv_heads, head_dim;
};

// One warp per token and cache; only bits move, so the unit is whatever divides a head.
template <class Unit>
__global__ void write_kv_cache_kernel(WriteCacheArgs a) {
  const int64_t token = blockIdx.x;
  const int which = threadIdx.y;
  const int64_t slot = a.slot_mapping[token];
  if (slot < 0) return;
  const Unit* source = static_cast<const Unit*>(a.source[which]) + token * a.token_stride[which];
  const int row = a.num_kv_heads * a.head_dim;
  Unit* target = static_cast<Unit*>(a.cache[which]) + slot * row;
  for (int i = threadIdx.x; i < row; i += kWarpSize)
    target[i] = source[i / a.head_dim * a.head_stride[which] + i % a.head_dim];
}

template <class Unit>
void launch_write_kv_cache(const WriteCacheArgs& args, int num_tokens, cudaStream_t stream) {
  if (num_tokens == 0) return;
  TPENGINE_LAUNCH(write_kv_cache_kernel<Unit>, dim3(num_tokens), dim3(kWarpSize, 2), stream, args);
}

}  // namespace tpengine::cuda
