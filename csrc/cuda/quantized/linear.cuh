// y = x W^T + bias for few rows of x, in 16 bits, and a weight in groups of 4 or 8 bits. Checked on
// the CPU stand-in only; it has not run on a GPU.
//
// The product is transposed: outputs are the 16 rows of an mma and the rows of x its 8 columns, so
// that one row costs what 8 do. Stored numbers become small integers, which are exact in 16 bits;
// the mma sums their products with x in float32, and a group's sum is scaled once. What a group
// adds to each number (zero points, minima, the shift of unpacking) is multiplied with the group's
// sum of x, which an mma with a fragment of ones gives. So no weight is rounded to 16 bits.
//
// The warps of a CTA divide the inputs, and one sum over them ends the kernel, in a fixed order: a
// row's result does not depend on the other rows.
#pragma once

#include <type_traits>

#include "packed_weight.cuh"

namespace tpengine::cuda {

struct WeightOnlyArgs {
  void* out;         // [num_rows, out_features]
  const void* x;     // [num_rows, in_features], rows aligned to 16 bytes
  const void* bias;  // [out_features], or null
  PackedWeight weight;
  int64_t out_stride, x_stride;
  int num_rows, out_features, in_features;
  int panels_per_cta;
};

constexpr int kMostWarps = 16;
// In shared memory a column of 32 sums takes 36 floats: writes meet no bank twice.
constexpr int kSumStride = kPanel + 4;

template <int kTiles>
constexpr int kRows = 8 * kTiles;

// B fragments of 8 rows of x, lane 4 g + t has row g: its inputs 8t to 8t + 7 of a step.
struct Inputs {
  uint32_t at[2][2];

  __device__ __forceinline__ void load(const WeightOnlyArgs& a, int row, int step) {
    const int input = step * kStep + threadIdx.x % 4 * 8;
    uint4 unit = {0, 0, 0, 0};
    if (row < a.num_rows && input < a.in_features) {
      const uint16_t* from = static_cast<const uint16_t*>(a.x) + row * a.x_stride + input;
      unit = *reinterpret_cast<const uint4*>(from);
    }
    at[0][0] = unit.x;
    at[0][1] = unit.y;
    at[1][0] = unit.z;
    at[1][1] = unit.w;
  }
};

// A warp's sums of one panel: accumulators of mma, by 16 outputs and 8 rows.
template <class T, int kBits, bool kOffset, int kTiles>
struct PanelSums {
  static constexpr bool kBFloat16 = std::is_same_v<T, __nv_bfloat16>;
  // Bytes in flight: 64 for each lane.
  static constexpr int kBatch = 16 / kBits;
  float total[2][kTiles][4] = {};
  float group[2][kTiles][4] = {};  // of stored numbers times x, since the group began
  float inputs[kTiles][4] = {};    // of x alike; [0, 1] are of rows 2t, 2t + 1

  // Steps `first` to `first + kBatch - 1`.
  __device__ __forceinline__ void add_batch(const WeightOnlyArgs& a, int panel, int first) {
    const PackedWeight& weight = a.weight;
    const int row = blockIdx.x * kRows<kTiles> + threadIdx.x % kWarpSize / 4;
    PackedStep<kBits> steps[kBatch];
    Inputs x[kBatch][kTiles];
#pragma unroll
    for (int s = 0; s < kBatch; ++s) {
      if (first + s >= weight.num_steps) break;
      steps[s].load(weight, panel, first + s);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) x[s][n].load(a, row + 8 * n, first + s);
    }
    int group_index = first / weight.steps_per_group;
    int left = (group_index + 1) * weight.steps_per_group - first;
#pragma unroll
    for (int s = 0; s < kBatch; ++s) {
      if (first + s >= weight.num_steps) break;
      add_step(steps[s], x[s]);
      if (--left == 0 || s == kBatch - 1 || first + s + 1 == weight.num_steps) {
        scale_group(weight, panel, group_index++);
        left = weight.steps_per_group;
      }
    }
  }

  __device__ __forceinline__ void add_step(const PackedStep<kBits>& step, const Inputs* x) {
    constexpr uint32_t kOne = kBFloat16 ? 0x3f803f80u : 0x3c003c00u;
    constexpr uint32_t kOnes[4] = {kOne, kOne, kOne, kOne};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t numbers[4];
        unpack<kBFloat16, kBits>(numbers, step, half, i);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) ptx::mma<kBFloat16>(group[half][n], numbers, x[n].at[i]);
      }
      if constexpr (kOffset) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) ptx::mma<kBFloat16>(inputs[n], kOnes, x[n].at[i]);
      }
    }
  }

  __device__ __forceinline__ void scale_group(const PackedWeight& weight, int panel, int index) {
    Factors<kBits> factors;
    factors.load(weight, panel, index);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int output = 2 * half + i / 2;  // g + 8 output
          float& sum = total[half][n][i];
          sum += factors.scale[output] * group[half][n][i];
          if constexpr (kOffset) {
            const float offset =
                factors.minimum[output] - factors.scale[output] * factors.origin[output];
            sum += offset * inputs[n][i % 2];
          }
          group[half][n][i] = 0.f;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) inputs[n][i] = 0.f;
    }
  }

  // Into `[row, output]`.
  __device__ __forceinline__ void put(float* sums) const {
    const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = 8 * n + 2 * t + i % 2, output = 16 * half + 8 * (i / 2) + g;
          sums[row * kSumStride + output] = total[half][n][i];
        }
      }
    }
  }
};

// Grid (rows of x / (8 kTiles), panels / panels_per_cta): CTAs that run together read one weight.
// `kOffset`: unpacked numbers have an origin that is not 0, or a minimum.
template <class T, int kBits, bool kOffset, int kTiles>
__global__ void __launch_bounds__(kMostWarps* kWarpSize)
    weight_only_kernel(const __grid_constant__ WeightOnlyArgs a) {
  using Sums = PanelSums<T, kBits, kOffset, kTiles>;
  TPENGINE_DYNAMIC_SHARED(shared);
  float* sums = reinterpret_cast<float*>(shared);
  constexpr int kWarpSums = kRows<kTiles> * kSumStride;
  const int warp = threadIdx.x / kWarpSize, panels = a.panels_per_cta;
  const int splits = blockDim.x / kWarpSize / panels;
  const int first_panel = blockIdx.y * panels, panel = first_panel + warp % panels;
  if (panel < a.weight.num_panels) {
    Sums own;
    for (int step = warp / panels * Sums::kBatch; step < a.weight.num_steps;
         step += splits * Sums::kBatch) {
      own.add_batch(a, panel, step);
    }
    own.put(sums + warp * kWarpSums);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < panels * kRows<kTiles> * kPanel; i += blockDim.x) {
    const int place = i / (kRows<kTiles> * kPanel), local_row = i / kPanel % kRows<kTiles>;
    const int row = blockIdx.x * kRows<kTiles> + local_row;
    const int output = (first_panel + place) * kPanel + i % kPanel;
    if (row >= a.num_rows || output >= a.out_features) continue;
    float sum = a.bias == nullptr ? 0.f : to_float(static_cast<const T*>(a.bias)[output]);
    for (int split = 0; split < splits; ++split) {
      sum += sums[(split * panels + place) * kWarpSums + local_row * kSumStride + i % kPanel];
    }
    static_cast<T*>(a.out)[row * a.out_stride + output] = from_float<T>(sum);
  }
}

template <class T, int kBits, bool kOffset, int kTiles>
void launch_weight_only(WeightOnlyArgs args, cudaStream_t stream) {
  constexpr int kBatch = PanelSums<T, kBits, kOffset, kTiles>::kBatch;
  // Each CTA reads all of x: where there are panels for every multiprocessor, a CTA takes more.
  const int panels = args.weight.num_panels;
  args.panels_per_cta = panels >= 512 ? 4 : panels >= 256 ? 2 : 1;
  const int splits = min(kMostWarps / args.panels_per_cta, ceil_div(args.weight.num_steps, kBatch));
  const int warps = splits * args.panels_per_cta;
  const int bytes = warps * kRows<kTiles> * kSumStride * static_cast<int>(sizeof(float));
  const dim3 grid(ceil_div(args.num_rows, kRows<kTiles>), ceil_div(panels, args.panels_per_cta));
  const auto kernel = weight_only_kernel<T, kBits, kOffset, kTiles>;
  TPENGINE_LAUNCH(kernel, grid, dim3(warps * kWarpSize), bytes, stream, args);
}

// T is a 16-bit type.
template <class T>
void launch_weight_only(const WeightOnlyArgs& args, int bits, cudaStream_t stream) {
  const auto with_rows = [&](auto tiles) {
    constexpr int kTiles = decltype(tiles)::value;
    if (bits == 4) return launch_weight_only<T, 4, true, kTiles>(args, stream);
    if (args.weight.offsets == Offsets::kNone) {
      return launch_weight_only<T, 8, false, kTiles>(args, stream);
    }
    launch_weight_only<T, 8, true, kTiles>(args, stream);
  };
  if (args.num_rows == 0 || args.out_features == 0) return;
  if (args.num_rows <= 8) return with_rows(std::integral_constant<int, 1>{});
  with_rows(std::integral_constant<int, 2>{});
}

}  // namespace tpengine::cuda
