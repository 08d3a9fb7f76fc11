// Compile-time shape of the tensor-core decode kernel.
#pragma once

#include "work_items.cuh"

namespace tpengine::cuda {

enum class CacheType { kBFloat16, kFloat16, kFloat8 };

// Shared memory that a CTA may have on every card which runs the kernels: 99 KB on compute
// capability 8.6, 8.9 and 12.0; it is 163 KB on 8.0 and 227 KB on 9.0.
constexpr int kLeastSharedBytes = 99 * 1024;

// HeadTiles: columns of the products in units of 8 query heads. Stages: chunks of K and V in each
// warp's ring.
template <int HeadDim, int HeadTiles, CacheType Type,
          int Stages = (HeadDim > 128 && Type != CacheType::kFloat8 ? 2 : 3)>
struct DecodeConfig {
  using Shallower = DecodeConfig<HeadDim, HeadTiles, Type, Stages - 1>;
  static constexpr int kHeadDim = HeadDim, kHeadTiles = HeadTiles;
  static constexpr bool kFloat8 = Type == CacheType::kFloat8;
  // fp8 is storage only: its values become f16, which holds all of them.
  static constexpr bool kBFloat16 = Type == CacheType::kBFloat16;
  static constexpr int kWarps = 4, kThreads = kWarps * kWarpSize, kHeads = 8 * HeadTiles;
  static constexpr int kStages = Stages;
  static constexpr int kDimTiles = HeadDim / 16;
  static constexpr int kRowBytes = HeadDim * (kFloat8 ? 1 : 2);
  static constexpr int kRowUnits = kRowBytes / 16;  // copies of 16 bytes
  // An odd number of units: neither copies nor ldmatrix meet in a bank of shared memory.
  static constexpr int kRowStride = (kRowUnits | 1) * 16;
  static constexpr int kTileBytes = kChunk * kRowStride;
  static constexpr int kRingBytes = kStages * 2 * kTileBytes;
  static constexpr int kPipelineBytes = kWarps * kRingBytes;
  static constexpr int kOutStride = HeadDim + 4;  // floats
  static constexpr int kMergeBytes = kWarps * kHeads * (kOutStride + 2) * 4;
  static constexpr int kSharedBytes = kPipelineBytes > kMergeBytes ? kPipelineBytes : kMergeBytes;
  static_assert(HeadDim % 16 == 0 && HeadDim <= 256, "rows are copied and multiplied by 16 dims");
};

// Query heads that one CTA serves; a larger group takes several.
constexpr int kMaxHeadsPerCta = 16;

}  // namespace tpengine::cuda
