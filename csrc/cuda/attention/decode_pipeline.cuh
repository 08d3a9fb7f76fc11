// How a warp of the decode kernel brings its chunks of K and V into its ring of shared memory: by
// asynchronous copies, with its own waits and no barrier of the block.
#pragma once

#include "decode_config.cuh"

namespace tpengine::cuda {

template <class C>
struct Pipeline {
  // Chunks whose page numbers one register per lane holds.
  static constexpr int kWindow = 16;

  const WorkItem& item;
  const int32_t* block_table;
  const char* k;  // of this kv head, slot 0
  const char* v;
  int64_t token_bytes, block_bytes;
  int block_size, block_shift;
  int warp, lane;
  uint32_t ring;  // shared address
  // Lane l holds the page of 8-token half l % 2 of chunk (window start + l / 2).
  int pages, next_pages;
  int64_t half_offset[2];  // of the current chunk's halves

  __device__ Pipeline(const DecodeArgs& a, const WorkItem& work, int kv_head, uint32_t shared)
      : item(work) {
    warp = threadIdx.x / kWarpSize;
    lane = threadIdx.x % kWarpSize;
    block_table = a.block_table + item.row * a.block_table_stride;
    token_bytes = static_cast<int64_t>(a.num_kv_heads) * C::kRowBytes;
    block_bytes = token_bytes * a.block_size;
    block_size = a.block_size;
    block_shift = block_size == 8 ? 3 : block_size == 16 ? 4 : 5;
    k = static_cast<const char*>(a.k_cache) + static_cast<int64_t>(kv_head) * C::kRowBytes;
    v = static_cast<const char*>(a.v_cache) + static_cast<int64_t>(kv_head) * C::kRowBytes;
    ring = shared + warp * C::kRingBytes;
    pages = load_pages(0);
    next_pages = load_pages(kWindow);
  }

  __device__ __forceinline__ uint32_t k_tile(int slot) const {
    return ring + slot * 2 * C::kTileBytes;
  }
  __device__ __forceinline__ uint32_t v_tile(int slot) const {
    return k_tile(slot) + C::kTileBytes;
  }

  __device__ __forceinline__ int num_chunks() const {
    const int left = item.end_chunk - item.first_chunk - warp;
    return left > 0 ? ceil_div(left, C::kWarps) : 0;
  }
  // First token of this warp's chunk j: the warps take chunks in turn.
  __device__ __forceinline__ int first_token(int j) const {
    return (item.first_chunk + warp + j * C::kWarps) * kChunk;
  }
  __device__ __forceinline__ bool is_whole(int token) const {
    return token >= item.begin && token + kChunk <= item.end;
  }

  __device__ __forceinline__ int load_pages(int first) const {
    const int token = first_token(first + lane / 2) + lane % 2 * 8;
    return token < item.end ? block_table[token >> block_shift] : 0;
  }

  // Finds the addresses of chunk j; chunks come in order.
  __device__ __forceinline__ void locate(int j) {
    if (j != 0 && j % kWindow == 0) {
      pages = next_pages;
      next_pages = load_pages(j + kWindow);
    }
    const int token = first_token(j);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t page = __shfl_sync(kAllLanes, pages, j % kWindow * 2 + half);
      const int offset = (token + 8 * half) & (block_size - 1);
      half_offset[half] = page * block_bytes + offset * token_bytes;
    }
  }

  // Starts the copy of chunk j's rows of K or V; `locate(j)` came before.
  __device__ __forceinline__ void fetch(const char* cache, uint32_t tile, int j) const {
    constexpr int kUnits = kChunk * C::kRowUnits, kSteps = (kUnits + kWarpSize - 1) / kWarpSize;
    // Whether a lane keeps its column, with rows that advance by 32 / units per row.
    constexpr bool kEven = kWarpSize % C::kRowUnits == 0;
    constexpr int kRowsPerStep = kEven ? kWarpSize / C::kRowUnits : 1;
    const int token = first_token(j);
    if (kEven && is_whole(token)) {  // the common case: no predicates
      const int row = lane / C::kRowUnits, unit = lane % C::kRowUnits;
      const char* from = cache + row * token_bytes + unit * 16;
      const uint32_t to = tile + row * C::kRowStride + unit * 16;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int ahead = i * kRowsPerStep;
        ptx::copy_async16(to + ahead * C::kRowStride,
                          from + half_offset[ahead / 8] + (ahead & 7) * token_bytes, 16);
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kSteps; ++i) {
      const int at = i * kWarpSize + lane;
      if (kUnits % kWarpSize != 0 && at >= kUnits) break;
      const int row = at / C::kRowUnits, unit = at % C::kRowUnits, position = token + row;
      const int64_t offset = row >= 8 ? half_offset[1] : half_offset[0];
      // What lies outside becomes zero: in V, a weight of 0 times a NaN would be NaN.
      const bool inside = position >= item.begin && position < item.end;
      ptx::copy_async16(tile + row * C::kRowStride + unit * 16,
                        cache + offset + (row & 7) * token_bytes + unit * 16, inside ? 16 : 0);
    }
  }

  // Fills the ring. Every stage is two groups of copies, K then V, empty beyond the last chunk, so
  // that a wait can count groups.
  __device__ __forceinline__ void start() {
    const int count = num_chunks();
#pragma unroll
    for (int j = 0; j < C::kStages; ++j) {
      if (j < count) {
        locate(j);
        fetch(k, k_tile(j), j);
      }
      ptx::commit_copies();
      if (j < count) fetch(v, v_tile(j), j);
      ptx::commit_copies();
    }
  }
  // Waits for the oldest group.
  __device__ __forceinline__ void wait() const {
    ptx::wait_copies<2 * C::kStages - 1>();
    __syncwarp();
  }
};

}  // namespace tpengine::cuda
