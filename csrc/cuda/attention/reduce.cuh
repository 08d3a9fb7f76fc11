// Adds up the parts of the rows that were split over their context.
#pragma once

#include "decode_plain.cuh"

namespace tpengine::cuda {

constexpr int kReduceWarps = 4;

// One CTA per (head, row); warp w takes parts w, w + 4, ...; lane l dims l, l + 32, ...
template <class T>
__global__ void __launch_bounds__(kReduceWarps* kWarpSize) reduce_parts_kernel(DecodeArgs a) {
  __shared__ float warp_out[kReduceWarps][kMaxHeadDim], warp_sums[kReduceWarps];
  const int head = blockIdx.x, row = blockIdx.y;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int first = a.item_start[row], count = a.item_start[row + 1] - first;
  if (count <= 1) return;  // the decode kernel has written the output itself
  float highest = -INFINITY;
  for (int i = lane; i < count; i += kWarpSize)
    highest = fmaxf(highest, partial_of(a, first + i, head)[a.head_dim]);
  for (int bit = kWarpSize / 2; bit > 0; bit /= 2)
    highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, bit));
  if (highest == -INFINITY) highest = 0.f;
  float total[kLaneDims] = {}, sum = 0.f;
  for (int i = warp; i < count; i += kReduceWarps) {
    const float* part = partial_of(a, first + i, head);
    const float weight = exp2f(part[a.head_dim] - highest);
    sum += weight;
#pragma unroll
    for (int j = 0; j < kLaneDims; ++j) {
      const int d = lane + j * kWarpSize;
      if (d < a.head_dim) total[j] += weight * part[d];
    }
  }
#pragma unroll
  for (int j = 0; j < kLaneDims; ++j) warp_out[warp][lane + j * kWarpSize] = total[j];
  if (lane == 0) warp_sums[warp] = sum;
  __syncthreads();
  sum = 0.f;
  for (int w = 0; w < kReduceWarps; ++w) sum += warp_sums[w];
  for (int d = threadIdx.x; d < a.head_dim; d += kReduceWarps * kWarpSize) {
    float result = 0.f;
    for (int w = 0; w < kReduceWarps; ++w) result += warp_out[w][d];
    output_of<T>(a, row, head)[d] = from_float<T>(sum > 0.f ? result / sum : 0.f);
  }
}

template <class T>
void launch_reduce(const DecodeArgs& args, cudaStream_t stream) {
  if (args.items == nullptr) return;
  TPENGINE_LAUNCH(reduce_parts_kernel<T>, dim3(args.num_heads, args.num_seqs),
                  dim3(kReduceWarps * kWarpSize), 0, stream, args);
}

template <class T>
void launch_decode_plain(const DecodeArgs& args, int max_items, cudaStream_t stream) {
  if (args.num_seqs == 0) return;
  TPENGINE_LAUNCH(decode_plain_kernel<T>, dim3(args.num_heads, max_items),
                  dim3(kPlainWarps * kWarpSize), 0, stream, args);
  launch_reduce<T>(args, stream);
}

}  // namespace tpengine::cuda
