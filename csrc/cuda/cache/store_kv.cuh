// The writing of K and V into the cache, with rotary embedding in place before it or without.
// Checked on the CPU stand-in only; it has not run on a GPU.
#pragma once

#include "../../common/cuda_compat.h"

namespace tpengine::cuda {

// Strides in elements. The caches are [num_blocks, block_size, num_kv_heads, head_dim].
struct StoreArgs {
  void* q;  // [num_tokens, num_heads, head_dim]; null: no queries
  void* k;  // [num_tokens, num_kv_heads, head_dim]
  const void* v;
  void* k_cache;
  void* v_cache;
  const int32_t* slot_mapping;  // -1: the token is not cached
  const int32_t* positions;
  const float* cos_sin_cache;  // [max_position, rotary_dim]
  int64_t q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride,
      v_head_stride;
  int num_heads, num_kv_heads, head_dim;
  int rotary_dim;  // 0: no rotation
  int num_positions;
  float k_inverse_scale, v_inverse_scale;  // of an fp8 cache
};

constexpr int kStoreThreads = 128;

// N pairs of one head, from pair `first` on: rotates them in place and leaves them in `low`,
// `high`.
template <class T, int N>
struct Pairs {
  float low[N], high[N];
  __device__ __forceinline__ void rotate(T* head, const float* cos, int first, int half) {
    load<N>(low, head + first);
    load<N>(high, head + half + first);
    for (int i = 0; i < N; ++i) {
      const float cosine = cos[first + i], sine = cos[half + first + i];
      const float x = low[i], y = high[i];
      low[i] = x * cosine - y * sine;
      high[i] = y * cosine + x * sine;
    }
    put(head, first, half, 1.f);
  }
  template <class Out>
  __device__ __forceinline__ void put(Out* head, int first, int half, float factor) const {
    float a[N], b[N];
    for (int i = 0; i < N; ++i) {
      a[i] = low[i] * factor;
      b[i] = high[i] * factor;
    }
    store<N>(head + first, a);
    store<N>(head + half + first, b);
  }
  // As the model's dtype rounds them: what is cached is what is left in qkv.
  __device__ __forceinline__ void round() {
    for (int i = 0; i < N; ++i) {
      low[i] = to_float(from_float<T>(low[i]));
      high[i] = to_float(from_float<T>(high[i]));
    }
  }
};

// Rotates and caches; one block per token. T: of q, k and v; Cache: T or Float8.
template <class T, class Cache, int N>
__global__ void __launch_bounds__(kStoreThreads)
    store_kv_kernel(const __grid_constant__ StoreArgs a) {
  const int64_t token = blockIdx.x;
  const int64_t slot = a.slot_mapping[token];
  const int64_t cached = slot * a.num_kv_heads * a.head_dim;
  T* q = static_cast<T*>(a.q) + token * a.q_token_stride;
  T* k = static_cast<T*>(a.k) + token * a.k_token_stride;
  const T* v = static_cast<const T*>(a.v) + token * a.v_token_stride;
  Cache* k_cache = static_cast<Cache*>(a.k_cache) + cached;
  Cache* v_cache = static_cast<Cache*>(a.v_cache) + cached;
  const int half = a.rotary_dim / 2, per_head = half / N;
  if (per_head > 0) {
    int position = a.positions[token];
    position = min(max(position, 0), a.num_positions - 1);  // no read beyond the table
    const float* cos = a.cos_sin_cache + static_cast<int64_t>(position) * a.rotary_dim;
    for (int i = threadIdx.x; i < (a.num_heads + a.num_kv_heads) * per_head; i += kStoreThreads) {
      const int head = i / per_head, first = i % per_head * N;
      Pairs<T, N> pairs;
      if (head < a.num_heads) {
        pairs.rotate(q + head * a.q_head_stride, cos, first, half);
        continue;
      }
      const int kv_head = head - a.num_heads;
      pairs.rotate(k + kv_head * a.k_head_stride, cos, first, half);
      if (slot < 0) continue;
      pairs.round();
      pairs.put(k_cache + kv_head * a.head_dim, first, half, a.k_inverse_scale);
    }
  }
  if (slot < 0) return;
  // What was not rotated: the rest of K's heads, and V.
  const int rest = (a.head_dim - a.rotary_dim) / N, whole = a.head_dim / N;
  for (int i = threadIdx.x; i < a.num_kv_heads * (rest + whole); i += kStoreThreads) {
    const bool is_v = i >= a.num_kv_heads * rest;
    const int at = is_v ? i - a.num_kv_heads * rest : i, per = is_v ? whole : rest;
    const int head = at / per, dim = at % per * N + (is_v ? 0 : a.rotary_dim);
    float values[N];
    load<N>(values, is_v ? v + head * a.v_head_stride + dim : k + head * a.k_head_stride + dim);
    const float factor = is_v ? a.v_inverse_scale : a.k_inverse_scale;
    for (int j = 0; j < N; ++j) values[j] *= factor;
    store<N>((is_v ? v_cache : k_cache) + head * a.head_dim + dim, values);
  }
}

// wide: see `with_width`.
template <class T, class Cache>
void launch_store_kv(const StoreArgs& args, bool wide, int num_tokens, cudaStream_t stream) {
  if (num_tokens == 0) return;
  with_width<T>(wide, [&](auto width) {
    const auto kernel = store_kv_kernel<T, Cache, decltype(width)::value>;
    TPENGINE_LAUNCH(kernel, dim3(num_tokens), dim3(kStoreThreads), 0, stream, args);
  });
}

}  // namespace tpengine::cuda
