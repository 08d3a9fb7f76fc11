// Copies whole blocks: within the cache, or between it and a buffer in which all pieces of a block
// lie together. A piece is the part of a block that one layer's K or V holds. Checked on the CPU
// stand-in only; it has not run on a GPU.
#pragma once

#include "../../common/cuda_compat.h"

namespace tpengine::cuda {

// One side of a copy; strides in bytes.
struct BlockPlace {
  char* base;
  const int64_t* ids;  // of copy i: ids[i * id_stride]; null: i itself
  int64_t id_stride, block_stride, piece_stride;
};

struct CopyBlocksArgs {
  BlockPlace source, target;
  int64_t piece_bytes;  // a multiple of 16
};

constexpr int kCopyThreads = 256;

__device__ __forceinline__ char* locate_piece(const BlockPlace& place, int64_t copy,
                                              int64_t piece) {
  const int64_t block = place.ids != nullptr ? place.ids[copy * place.id_stride] : copy;
  return place.base + block * place.block_stride + piece * place.piece_stride;
}

// Grid (copy, piece): one launch for all layers. No block is the target of one copy and the source
// or target of another, so the order does not matter.
__global__ void __launch_bounds__(kCopyThreads)
    copy_blocks_kernel(const __grid_constant__ CopyBlocksArgs a) {
  const uint4* source =
      reinterpret_cast<const uint4*>(locate_piece(a.source, blockIdx.x, blockIdx.y));
  uint4* target = reinterpret_cast<uint4*>(locate_piece(a.target, blockIdx.x, blockIdx.y));
  const int units = static_cast<int>(a.piece_bytes / 16);
  int i = threadIdx.x;
  for (; i + 3 * kCopyThreads < units; i += 4 * kCopyThreads) {
    uint4 value[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) value[j] = source[i + j * kCopyThreads];
#pragma unroll
    for (int j = 0; j < 4; ++j) target[i + j * kCopyThreads] = value[j];
  }
  for (; i < units; i += kCopyThreads) target[i] = source[i];
}

inline void launch_copy_blocks(const CopyBlocksArgs& args, int num_copies, int num_pieces,
                               cudaStream_t stream) {
  if (num_copies == 0 || num_pieces == 0) return;
  TPENGINE_LAUNCH(copy_blocks_kernel, dim3(num_copies, num_pieces), dim3(kCopyThreads), 0, stream,
                  args);
}

}  // namespace tpengine::cuda
