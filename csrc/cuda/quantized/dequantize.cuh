// Panels of a weight in groups of 4 or 8 bits as numbers of a model's type, each rounded once.
// Checked on the CPU stand-in only; it has not run on a GPU.
#pragma once

#include "packed_weight.cuh"

namespace tpengine::cuda {

struct DequantizeArgs {
  void* out;  // [32 * panels, 32 * num_steps], without gaps, from output 32 * first_panel on
  PackedWeight weight;
  int first_panel;
};

constexpr int kDequantizeWarps = 8;

// Grid (steps / 8, panels): a warp does one step of a panel.
template <class T, int kBits>
__global__ void __launch_bounds__(kDequantizeWarps* kWarpSize)
    dequantize_kernel(const __grid_constant__ DequantizeArgs a) {
  const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  const int step = blockIdx.x * kDequantizeWarps + threadIdx.x / kWarpSize;
  if (step >= a.weight.num_steps) return;
  const int panel = a.first_panel + blockIdx.y;
  PackedStep<kBits> packed;
  packed.load(a.weight, panel, step);
  Factors<kBits> factors;
  factors.load(a.weight, panel, step / a.weight.steps_per_group);
  const int64_t row_size = static_cast<int64_t>(a.weight.num_steps) * kStep;
  T* out =
      static_cast<T*>(a.out) + (int64_t{blockIdx.y} * kPanel + g) * row_size + step * kStep + 8 * t;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t pairs[2][4];
    unpack<true, kBits>(pairs[0], packed, half, 0);
    unpack<true, kBits>(pairs[1], packed, half, 1);
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int output = 2 * half + lower;  // g + 8 output
      float values[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t pair = pairs[j / 4][lower + j / 2 % 2 * 2];
        const float number = __uint_as_float(j % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
        values[j] =
            fmaf(number - factors.origin[output], factors.scale[output], factors.minimum[output]);
      }
      store<8>(out + 8 * output * row_size, values);
    }
  }
}

template <class T>
void launch_dequantize(const DequantizeArgs& args, int bits, int num_panels, cudaStream_t stream) {
  if (num_panels == 0 || args.weight.num_steps == 0) return;
  const dim3 grid(ceil_div(args.weight.num_steps, kDequantizeWarps), num_panels);
  const dim3 block(kDequantizeWarps * kWarpSize);
  if (bits == 4) {
    const auto kernel = dequantize_kernel<T, 4>;
    TPENGINE_LAUNCH(kernel, grid, block, 0, stream, args);
  } else {
    const auto kernel = dequantize_kernel<T, 8>;
    TPENGINE_LAUNCH(kernel, grid, block, 0, stream, args);
  }
}

}  // namespace tpengine::cuda
