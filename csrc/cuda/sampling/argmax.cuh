// The largest logit of each row. Checked on the CPU stand-in only; it has not run on a GPU.
#pragma once

#include "../../common/cuda_compat.h"

namespace tpengine::cuda {

using Wide = unsigned long long;

struct LogitsArgs {
  int64_t* out;
  const void* logits;  // [rows, vocab_size]
  int64_t stride;
  int vocab_size;
};

#ifdef TPENGINE_CUDA_HOST
constexpr int kSampleThreads = 128;  // the stand-in's time grows with them
#else
constexpr int kSampleThreads = 1024;
#endif
constexpr int kSampleWarps = kSampleThreads / kWarpSize;

// A logit and its token in one number that grows with the logit and, among equals, with smaller
// ids. NaN is larger than all numbers.
__device__ __forceinline__ Wide ranked(float logit, int token) {
  uint32_t bits = __float_as_uint(logit == 0.f ? 0.f : logit);
  bits = logit != logit ? 0xffffffffu : (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<Wide>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(token));
}
__device__ __forceinline__ int token_of(Wide rank) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(rank));
}

template <class T>
__device__ __forceinline__ const T* row_of(const LogitsArgs& a) {
  return static_cast<const T*>(a.logits) + blockIdx.x * a.stride;
}

// Combines a value of every thread; all get the result. `shared`: [kSampleWarps].
template <class F>
__device__ Wide combine_block(Wide value, Wide* shared, const F& combine) {
  for (int bit = kWarpSize / 2; bit > 0; bit /= 2)
    value = combine(value, __shfl_xor_sync(kAllLanes, value, bit));
  __syncthreads();  // `shared` may still be read
  if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  value = shared[0];
  for (int w = 1; w < kSampleWarps; ++w) value = combine(value, shared[w]);
  return value;
}

template <class T>
__device__ Wide best_of_row(const LogitsArgs& a, Wide* shared) {
  const T* row = row_of<T>(a);
  Wide best = 0;
  for (int i = threadIdx.x; i < a.vocab_size; i += kSampleThreads)
    best = max(best, ranked(to_float(row[i]), i));
  return combine_block(best, shared, [](Wide x, Wide y) { return max(x, y); });
}

// One block per row.
template <class T>
__global__ void __launch_bounds__(kSampleThreads)
    argmax_kernel(const __grid_constant__ LogitsArgs a) {
  __shared__ Wide shared[kSampleWarps];
  const Wide best = best_of_row<T>(a, shared);
  if (threadIdx.x == 0) a.out[blockIdx.x] = token_of(best);
}

template <class T>
void launch_argmax(const LogitsArgs& args, int num_rows, cudaStream_t stream) {
  if (num_rows == 0) return;
  TPENGINE_LAUNCH(argmax_kernel<T>, dim3(num_rows), dim3(kSampleThreads), 0, stream, args);
}

}  // namespace tpengine::cuda
