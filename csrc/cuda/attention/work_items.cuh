// What one CTA of the decode kernels works on: a row (sequence) or a part of its context. Parts
// come from a list that `plan_decode_kernel` makes once per step on the device, for all layers.
#pragma once

#include "../../common/cuda_compat.h"

namespace tpengine::cuda {

constexpr int kChunk = 16;  // tokens; every border between parts is a multiple of it
constexpr int kPartialPadding = 4;

// Strides in elements.
struct DecodeArgs {
  void* out;
  const void* q;
  const void* k_cache;  // [num_blocks, block_size, num_kv_heads, head_dim]
  const void* v_cache;
  const int32_t* block_table;
  const int32_t* seq_lens;
  const float* alibi_slopes;  // null: no bias
  const int32_t* item_start;  // [num_seqs + 1], first item of each row; null: every row is one item
  const int4* items;          // [max_items]: row, first and end chunk, length
  float* partials;            // [max_items, num_heads, head_dim + 4]
  int64_t out_token_stride, out_head_stride, q_token_stride, q_head_stride, block_table_stride;
  int num_seqs, num_heads, num_kv_heads, head_dim, block_size, sliding_window;
  int half_queries;  // with an fp8 cache: q and out are float16, not bfloat16
  float scale, v_scale;
  float softcap;  // logits become softcap * tanh(logit / softcap); 0: they stay
};

// An item's row carries this bit if the row has several items.
constexpr uint32_t kPartialBit = 0x80000000u;

struct WorkItem {
  int row, index, length;
  int first_chunk, end_chunk;
  int begin, end;  // tokens
  bool partial;
};

__device__ __forceinline__ int first_visible(int length, int sliding_window) {
  return length > sliding_window ? length - sliding_window : 0;
}

// False: there is nothing left for this CTA.
__device__ __forceinline__ bool find_item(const DecodeArgs& a, WorkItem& item) {
  item.index = blockIdx.y;
  if (a.items == nullptr) {
    item.row = item.index;
    item.length = a.seq_lens[item.row];
    item.first_chunk = first_visible(item.length, a.sliding_window) / kChunk;
    item.end_chunk = ceil_div(item.length, kChunk);
    item.partial = false;
  } else {
    if (item.index >= a.item_start[a.num_seqs]) return false;
    const int4 packed = a.items[item.index];
    item.row = packed.x & static_cast<int>(~kPartialBit);
    item.partial = packed.x < 0;
    item.first_chunk = packed.y;
    item.end_chunk = packed.z;
    item.length = packed.w;
  }
  item.begin = max(item.first_chunk * kChunk, first_visible(item.length, a.sliding_window));
  item.end = min(item.end_chunk * kChunk, item.length);
  return true;
}

// Where an item's result for one head goes: [head_dim], then its base-2 log of the sum.
__device__ __forceinline__ float* partial_of(const DecodeArgs& a, int64_t item, int head) {
  return a.partials + (item * a.num_heads + head) * (a.head_dim + kPartialPadding);
}

template <class T>
__device__ __forceinline__ T* output_of(const DecodeArgs& a, int row, int head) {
  return static_cast<T*>(a.out) + row * a.out_token_stride + head * a.out_head_stride;
}

}  // namespace tpengine::cuda
