// What low-rank adapters add to a linear layer: shrunk = A x, then out += B shrunk, in float32.
// Checked on the CPU stand-in only; it has not run on a GPU. The layout of A and B stands in
// tpengine/ops/lora_reference.py.
//
// A CTA works on a tile of rows of one adapter and finds it in `groups`, so that the launch depends
// on nothing that is in the device's memory. A sum has a fixed order: a row's result does not
// depend on the other rows.
#pragma once

#include "../../common/cuda_compat.h"

namespace tpengine::cuda {

struct LoRAArgs {
  void* out;  // [num_rows, out_features]
  const void* x;
  const void* a;                 // [num_slots, num_parts, column_tiles, num_lines, kLoRATile, line]
  const void* b;                 // [num_slots, num_panels, max_rank, kLoRAPanel]
  const int32_t* ranks;          // [num_slots, num_parts]
  const int32_t* first_outputs;  // [num_parts + 1]
  const int32_t* rows;           // [num_lora_rows]
  const int32_t* groups;         // [num_groups, 3]: slot, begin, end in `rows`
  float* shrunk;                 // [num_lora_rows, num_parts * max_rank]
  int64_t out_stride, x_stride;
  int num_groups, num_lora_rows, num_parts, column_tiles, num_lines, num_panels, in_features;
  int wide_x;  // rows of x begin at multiples of 32 bytes

  __host__ __device__ int max_rank() const;
  __host__ __device__ int num_columns() const { return num_parts * max_rank(); }
};

// Columns of a tile of A, whose numbers lie in turn, 64 bytes of each; and outputs of a panel of B.
constexpr int kLoRATile = 4, kLoRAPanel = 16, kLineBytes = 64;
constexpr int kLoRARows = 8, kLoRAThreads = 128, kLoRAWarps = kLoRAThreads / kWarpSize;
constexpr int kPanelsPerCta = kLoRAThreads / kLoRAPanel;

__host__ __device__ inline int LoRAArgs::max_rank() const { return column_tiles * kLoRATile; }

// Rows [begin, begin + count) of `rows`.
struct RowTile {
  int slot, begin, count;

  // The index-th tile of all groups; count is 0 if there are fewer.
  __device__ __forceinline__ RowTile(const LoRAArgs& a, int index) : slot(0), begin(0), count(0) {
    for (int group = 0; group < a.num_groups; ++group) {
      const int first = a.groups[3 * group + 1], end = a.groups[3 * group + 2];
      const int tiles = ceil_div(end - first, kLoRARows);
      if (index < tiles) {
        slot = a.groups[3 * group];
        begin = first + index * kLoRARows;
        count = min(kLoRARows, end - begin);
        return;
      }
      index -= tiles;
    }
  }
};

// Inputs [first, first + N) of a row, zeros beyond the last.
template <int N, class X>
__device__ __forceinline__ void load_inputs(float* to, const LoRAArgs& a, const X* x, int first) {
  if (a.wide_x && first + N <= a.in_features) return load<N>(to, x + first);
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = first + i < a.in_features ? to_float(x[first + i]) : 0.f;
}

// Grid (row tile, part and column tile). The warps of a CTA divide the lines. A warp reads two
// lines of each column at once: a lane has 16 bytes of one column.
template <class X, class W>
__global__ void __launch_bounds__(kLoRAThreads) shrink_kernel(const __grid_constant__ LoRAArgs a) {
  constexpr int kLine = kLineBytes / sizeof(W), kPack = kLine / 4;
  __shared__ float sums[kLoRAWarps][kLoRARows][kLoRATile];
  const RowTile tile(a, blockIdx.x);
  const int part = blockIdx.y / a.column_tiles, column_tile = blockIdx.y % a.column_tiles;
  if (tile.count == 0) return;
  if (column_tile * kLoRATile >= a.ranks[tile.slot * a.num_parts + part]) return;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int half = lane / 16, column = lane % 16 / 4, piece = lane % 4;
  const int64_t first_line =
      (static_cast<int64_t>(tile.slot) * a.num_parts * a.column_tiles + blockIdx.y) * a.num_lines;
  const W* weights = static_cast<const W*>(a.a) + first_line * kLoRATile * kLine;
  float total[kLoRARows] = {};
  for (int line = 2 * warp + half; line < a.num_lines; line += 2 * kLoRAWarps) {
    float weight[kPack], input[kPack];
    load<kPack>(weight, weights + (line * kLoRATile + column) * kLine + piece * kPack);
#pragma unroll
    for (int r = 0; r < kLoRARows; ++r) {
      if (r >= tile.count) break;
      const X* x = static_cast<const X*>(a.x) + a.rows[tile.begin + r] * a.x_stride;
      load_inputs<kPack>(input, a, x, line * kLine + piece * kPack);
#pragma unroll
      for (int i = 0; i < kPack; ++i) total[r] += weight[i] * input[i];
    }
  }
#pragma unroll
  for (int r = 0; r < kLoRARows; ++r) {
    total[r] += __shfl_xor_sync(kAllLanes, total[r], 1);
    total[r] += __shfl_xor_sync(kAllLanes, total[r], 2);
    total[r] += __shfl_xor_sync(kAllLanes, total[r], 16);
    if (half == 0 && piece == 0) sums[warp][r][column] = total[r];
  }
  __syncthreads();
  const int row = threadIdx.x / kLoRATile, own = threadIdx.x % kLoRATile;
  if (row >= tile.count) return;
  float sum = 0.f;
  for (int w = 0; w < kLoRAWarps; ++w) sum += sums[w][row][own];
  a.shrunk[static_cast<int64_t>(tile.begin + row) * a.num_columns() + blockIdx.y * kLoRATile +
           own] = sum;
}

// Grid (row tile, panels). A thread has one output of all rows.
template <class X, class W>
__global__ void __launch_bounds__(kLoRAThreads) expand_kernel(const __grid_constant__ LoRAArgs a) {
  const RowTile tile(a, blockIdx.x);
  int part = 0, panel = blockIdx.y * kPanelsPerCta + threadIdx.x / kLoRAPanel, first_panel = 0;
  if (tile.count == 0 || panel >= a.num_panels) return;
  for (;; ++part) {
    const int panels = ceil_div(a.first_outputs[part + 1] - a.first_outputs[part], kLoRAPanel);
    if (panel < panels) break;
    panel -= panels;
    first_panel += panels;
  }
  const int lane = threadIdx.x % kLoRAPanel;
  const int output = a.first_outputs[part] + panel * kLoRAPanel + lane;
  const int columns = ceil_div(a.ranks[tile.slot * a.num_parts + part], kLoRATile) * kLoRATile;
  if (output >= a.first_outputs[part + 1] || columns == 0) return;
  const int64_t numbers_before =
      (static_cast<int64_t>(tile.slot) * a.num_panels + first_panel) * a.max_rank() +
      panel * columns;
  const W* weights = static_cast<const W*>(a.b) + numbers_before * kLoRAPanel + lane;
  const float* shrunk =
      a.shrunk + static_cast<int64_t>(tile.begin) * a.num_columns() + part * a.max_rank();
  float total[kLoRARows] = {};
  for (int c = 0; c < columns; ++c) {
    const float weight = to_float(weights[c * kLoRAPanel]);
#pragma unroll
    for (int r = 0; r < kLoRARows; ++r) {
      if (r >= tile.count) break;
      total[r] += weight * shrunk[r * a.num_columns() + c];
    }
  }
#pragma unroll
  for (int r = 0; r < kLoRARows; ++r) {
    if (r >= tile.count) break;
    X* out = static_cast<X*>(a.out) + a.rows[tile.begin + r] * a.out_stride + output;
    *out = from_float<X>(to_float(*out) + total[r]);
  }
}

template <class X, class W>
void launch_add_lora(const LoRAArgs& args, cudaStream_t stream) {
  const int row_tiles = ceil_div(args.num_lora_rows, kLoRARows) + args.num_groups;
  const int column_tiles = args.num_parts * args.column_tiles;
  if (args.num_lora_rows == 0 || args.num_groups == 0 || column_tiles == 0) return;
  const dim3 block(kLoRAThreads);
  const auto shrink = shrink_kernel<X, W>;
  TPENGINE_LAUNCH(shrink, dim3(row_tiles, column_tiles), block, 0, stream, args);
  if (args.num_panels == 0) return;
  const auto expand = expand_kernel<X, W>;
  const dim3 grid(row_tiles, ceil_div(args.num_panels, kPanelsPerCta));
  TPENGINE_LAUNCH(expand, grid, block, 0, stream, args);
}

}  // namespace tpengine::cuda
