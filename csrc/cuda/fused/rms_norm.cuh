// RMSNorm, alone or with the addition to the residual before it. Checked on the CPU stand-in only;
// it has not run on a GPU.
#pragma once

#include "../../common/cuda_compat.h"

namespace tpengine::cuda {

struct NormArgs {
  void* out;
  const void* x;
  void* residual;  // null: plain norm. Otherwise residual += x, and the sum is normalised.
  const void* weight;
  int64_t out_token_stride, out_head_stride, x_token_stride, x_head_stride, residual_stride;
  int heads_per_token, size;
  float eps;
};

constexpr int kNormThreads = 256;

// One block per row (token, head). Strides in elements.
template <class T>
__global__ void __launch_bounds__(kNormThreads) rms_norm_kernel(NormArgs a) {
  __shared__ float warp_sums[kNormThreads / kWarpSize];
  const int64_t token = blockIdx.x / a.heads_per_token, head = blockIdx.x % a.heads_per_token;
  const T* x = static_cast<const T*>(a.x) + token * a.x_token_stride + head * a.x_head_stride;
  T* out = static_cast<T*>(a.out) + token * a.out_token_stride + head * a.out_head_stride;
  T* residual =
      a.residual == nullptr ? nullptr : static_cast<T*>(a.residual) + token * a.residual_stride;
  const T* weight = static_cast<const T*>(a.weight);
  float squares = 0.f;
  for (int i = threadIdx.x; i < a.size; i += kNormThreads) {
    float value = to_float(x[i]);
    if (residual != nullptr) {
      residual[i] = from_float<T>(value + to_float(residual[i]));
      value = to_float(residual[i]);
    }
    squares += value * value;
  }
  squares = warp_sum(squares);
  if (threadIdx.x % kWarpSize == 0) warp_sums[threadIdx.x / kWarpSize] = squares;
  __syncthreads();
  float total = 0.f;
  for (int w = 0; w < kNormThreads / kWarpSize; ++w) total += warp_sums[w];
  const float factor = rsqrtf(total / a.size + a.eps);
  const T* y = residual != nullptr ? residual : x;
  for (int i = threadIdx.x; i < a.size; i += kNormThreads) {
    const T normalised = from_float<T>(to_float(y[i]) * factor);  // rounded before the weight
    out[i] = from_float<T>(to_float(normalised) * to_float(weight[i]));
  }
}

template <class T>
void launch_rms_norm(const NormArgs& args, int num_rows, cudaStream_t stream) {
  if (num_rows == 0) return;
  TPENGINE_LAUNCH(rms_norm_kernel<T>, dim3(num_rows), dim3(kNormThreads), stream, args);
}

}  // namespace tpengine::cuda
