// CUDA, or the stand-in that runs the same kernels on a CPU for tests
// (TPENGINE_CUDA_HOST; tests/ops/cuda_host). Kernels include this and nothing of a framework.
#pragma once

#include <stdint.h>

#include <type_traits>

#ifdef TPENGINE_CUDA_HOST
#include "cuda_host.h"
#include "ptx_host.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>

#include "ptx.h"
#define TPENGINE_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define TPENGINE_DYNAMIC_SHARED(name) extern __shared__ __align__(128) char name[]
#endif

namespace tpengine::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kLog2E = 1.44269504f;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// One e4m3 value of an fp8 cache.
struct Float8 {
  uint8_t bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(Float8 x) {
  return ptx::half_to_float(static_cast<uint16_t>(ptx::e4m3_low(x.bits)));
}

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
template <>
__device__ __forceinline__ Float8 from_float<Float8>(float x) {
  return {static_cast<uint8_t>(ptx::to_e4m3(x, 0.f))};
}

// `N` neighbours that are loaded or stored by one instruction; the address is a multiple of it.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

template <int N, class T>
__device__ __forceinline__ void load(float* to, const T* from) {
  const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(from);
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = to_float(pack.at[i]);
}

template <int N, class T>
__device__ __forceinline__ void store(T* to, const float* from) {
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.at[i] = from_float<T>(from[i]);
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// Calls body(width) with the elements of an access: 16 bytes of T where a launcher has found that
// addresses, strides and sizes are multiples of them (`wide`), else one.
template <class T, class F>
void with_width(bool wide, const F& body) {
  if (wide) return body(std::integral_constant<int, 16 / sizeof(T)>{});
  body(std::integral_constant<int, 1>{});
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

}  // namespace tpengine::cuda
