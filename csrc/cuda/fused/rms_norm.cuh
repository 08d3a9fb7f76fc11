// RMSNorm, alone or with the addition to the residual before it. Checked on the CPU stand-in only;
// it has not run on a GPU.
#pragma once

#include "../../common/cuda_compat.h"

namespace tpengine::cuda {

struct NormArgs {
  void* out;
  const void* x;
  void* residual;      // null: plain norm. Otherwise residual += x, and the sum is normalised.
  const void* weight;  // of x's type, or float32
  int64_t out_token_stride, out_head_stride, x_token_stride, x_head_stride, residual_stride;
  int heads_per_token, size;
  float eps;
};

constexpr int kMaxNormThreads = 256;
// Packs of a row that a thread keeps in registers between the two passes; a longer row's rest is
// read again.
constexpr int kKeptPacks = 4;

// One block per row (token, head). Strides in elements.
template <class T, class W, int N>
__global__ void __launch_bounds__(kMaxNormThreads)
    rms_norm_kernel(const __grid_constant__ NormArgs a) {
  __shared__ float warp_sums[kMaxNormThreads / kWarpSize];
  const int64_t token = blockIdx.x / a.heads_per_token, head = blockIdx.x % a.heads_per_token;
  const T* x = static_cast<const T*>(a.x) + token * a.x_token_stride + head * a.x_head_stride;
  T* out = static_cast<T*>(a.out) + token * a.out_token_stride + head * a.out_head_stride;
  T* residual =
      a.residual == nullptr ? nullptr : static_cast<T*>(a.residual) + token * a.residual_stride;
  const W* weight = static_cast<const W*>(a.weight);
  const int step = blockDim.x * N;
  float kept[kKeptPacks][N], squares = 0.f;
  const auto sum_squares = [&](float* values, int i) {
    load<N>(values, x + i);
    if (residual != nullptr) {
      float before[N];
      load<N>(before, residual + i);
      for (int j = 0; j < N; ++j) values[j] = to_float(from_float<T>(values[j] + before[j]));
      store<N>(residual + i, values);
    }
    for (int j = 0; j < N; ++j) squares += values[j] * values[j];
  };
#pragma unroll
  for (int pack = 0; pack < kKeptPacks; ++pack) {
    const int i = pack * step + threadIdx.x * N;
    if (i < a.size) sum_squares(kept[pack], i);
  }
  float values[N];
  for (int i = kKeptPacks * step + threadIdx.x * N; i < a.size; i += step) sum_squares(values, i);
  squares = warp_sum(squares);
  if (threadIdx.x % kWarpSize == 0) warp_sums[threadIdx.x / kWarpSize] = squares;
  __syncthreads();
  float total = 0.f;
  for (int w = 0; w < static_cast<int>(blockDim.x) / kWarpSize; ++w) total += warp_sums[w];
  const float factor = rsqrtf(total / a.size + a.eps);
  const auto finish = [&](float* y, int i) {
    float scale[N];
    load<N>(scale, weight + i);
    // Rounded to the weight's type first, as Hugging Face's models do.
    for (int j = 0; j < N; ++j) y[j] = to_float(from_float<W>(y[j] * factor)) * scale[j];
    store<N>(out + i, y);
  };
#pragma unroll
  for (int pack = 0; pack < kKeptPacks; ++pack) {
    const int i = pack * step + threadIdx.x * N;
    if (i < a.size) finish(kept[pack], i);
  }
  const T* y = residual != nullptr ? residual : x;
  for (int i = kKeptPacks * step + threadIdx.x * N; i < a.size; i += step) {
    load<N>(values, y + i);
    finish(values, i);
  }
}

// wide: see `with_width`.
template <class T, class W = T>
void launch_rms_norm(const NormArgs& args, bool wide, int num_rows, cudaStream_t stream) {
  if (num_rows == 0) return;
  with_width<T>(wide, [&](auto width) {
    constexpr int N = decltype(width)::value;
    const int warps = ceil_div(ceil_div(args.size, N), kWarpSize);
    const int threads = min(max(warps, 1) * kWarpSize, kMaxNormThreads);
    const auto kernel = rms_norm_kernel<T, W, N>;
    TPENGINE_LAUNCH(kernel, dim3(num_rows), dim3(threads), 0, stream, args);
  });
}

}  // namespace tpengine::cuda
