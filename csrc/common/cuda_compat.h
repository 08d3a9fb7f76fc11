// CUDA, or the stand-in that runs the same kernels on a CPU for tests
// (TPENGINE_CUDA_HOST; tests/ops/cuda_host). Kernels include this and nothing of a framework.
#pragma once

#include <stdint.h>

#ifdef TPENGINE_CUDA_HOST
#include "cuda_host.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define TPENGINE_LAUNCH(kernel, grid, block, stream, ...) \
  kernel<<<grid, block, 0, stream>>>(__VA_ARGS__)
#endif

namespace tpengine::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

}  // namespace tpengine::cuda
