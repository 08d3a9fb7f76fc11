// Gated activations: out = activation(gate) * up. Checked on the CPU stand-in only; it has not run
// on a GPU.
#pragma once

#include "../../common/cuda_compat.h"

namespace tpengine::cuda {

enum class Activation : int { kSilu, kGelu, kGeluTanh };

struct GatedArgs {
  void* out;      // [num_tokens, size]
  const void* x;  // [num_tokens, 2 * size], gate first, then up
  int64_t out_stride, x_stride;
  int size;
};

constexpr int kGatedThreads = 256;

template <Activation A>
__device__ __forceinline__ float activate(float x) {
  if constexpr (A == Activation::kSilu) {
    return x / (1.f + expf(-x));
  } else if constexpr (A == Activation::kGelu) {
    return 0.5f * x * (1.f + erff(x * 0.70710678f));
  } else {
    return 0.5f * x * (1.f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
  }
}

// Grid (token, part of the row).
template <class T, Activation A, int N>
__global__ void __launch_bounds__(kGatedThreads) gated_kernel(const __grid_constant__ GatedArgs a) {
  const int i = (blockIdx.y * kGatedThreads + threadIdx.x) * N;
  if (i >= a.size) return;
  const T* x = static_cast<const T*>(a.x) + blockIdx.x * a.x_stride;
  float gate[N], up[N];
  load<N>(gate, x + i);
  load<N>(up, x + a.size + i);
  for (int j = 0; j < N; ++j) gate[j] = activate<A>(gate[j]) * up[j];
  store<N>(static_cast<T*>(a.out) + blockIdx.x * a.out_stride + i, gate);
}

// wide: see `with_width`.
template <class T, Activation A>
void launch_gated(const GatedArgs& args, bool wide, int num_tokens, cudaStream_t stream) {
  if (num_tokens == 0 || args.size == 0) return;
  with_width<T>(wide, [&](auto width) {
    constexpr int N = decltype(width)::value;
    const auto kernel = gated_kernel<T, A, N>;
    const dim3 grid(num_tokens, ceil_div(args.size, kGatedThreads * N));
    TPENGINE_LAUNCH(kernel, grid, dim3(kGatedThreads), 0, stream, args);
  });
}

}  // namespace tpengine::cuda
