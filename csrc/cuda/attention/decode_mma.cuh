// Decode attention on the tensor cores: one pass over K and V for all query heads of a kv head.
//
// The products are transposed, so that tokens (and then head dims) are the 16 rows of an mma and
// the query heads its 8 columns: S^T = K Q^T, O^T = V^T P^T. A group of up to 8 heads is padded to
// 8 and not to 16, and every K and V fragment is loaded once for all of them. The warps of a CTA
// share nothing until the end: each takes every fourth chunk of 16 tokens through its own ring and
// keeps its own running maximum, sum and output (online softmax, Milakov and Gimelshein 2018).
//
// In what follows lane = 4 g + t, as the mma layouts count (common/ptx.h).
#pragma once

#include "decode_pipeline.cuh"

namespace tpengine::cuda {

// What a warp keeps in registers for its query heads.
template <class C>
struct HeadState {
  static constexpr int kTiles = C::kHeadTiles, kDimTiles = C::kDimTiles;
  uint32_t query[kDimTiles][kTiles][2];                        // B fragments
  float out[kDimTiles][kTiles][4];                             // O^T accumulators
  float highest[kTiles][2], sum[kTiles][2], slope[kTiles][2];  // of heads 2t, 2t + 1 of a tile

  __device__ __forceinline__ void load(const DecodeArgs& a, int row, int first_head,
                                       int num_heads) {
    const int lane = threadIdx.x % kWarpSize, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int head = tile * 8 + g;
      const uint16_t* q = static_cast<const uint16_t*>(a.q) + row * a.q_token_stride +
                          (first_head + head) * a.q_head_stride;
#pragma unroll
      for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          // From an fp8 row ldmatrix gives a lane dims 4t to 4t + 3: the query's dims go alike.
          const int dim = d * 16 + (C::kFloat8 ? 4 * t + 2 * r : 2 * t + 8 * r);
          uint32_t pair = head < num_heads ? *reinterpret_cast<const uint32_t*>(q + dim) : 0u;
          if (C::kFloat8 && !a.half_queries) {
            pair =
                ptx::pack<false>(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
          }
          query[d][tile][r] = pair;
        }
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int own = tile * 8 + 2 * t + e;
        highest[tile][e] = -INFINITY;
        sum[tile][e] = 0.f;
        slope[tile][e] = a.alibi_slopes != nullptr && own < num_heads
                             ? a.alibi_slopes[first_head + own] * kLog2E
                             : 0.f;
      }
    }
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[d][tile][i] = 0.f;
      }
    }
  }
};

// This lane's row of the four matrices that cover a tile of K (16 tokens x 16 units of two bytes).
template <class C>
__device__ __forceinline__ uint32_t tokens_first() {
  const int lane = threadIdx.x % kWarpSize, row = lane & 7, matrix = lane >> 3;
  return ((matrix & 1) * 8 + row) * C::kRowStride + (matrix >> 1) * 16;
}
// The same with the second matrix to the right of the first, not below it.
template <class C>
__device__ __forceinline__ uint32_t dims_first() {
  const int lane = threadIdx.x % kWarpSize, row = lane & 7, matrix = lane >> 3;
  return ((matrix >> 1) * 8 + row) * C::kRowStride + (matrix & 1) * 16;
}
// Where a pair of fp8 tiles begins; without a second tile its matrices read the first one again.
template <class C>
__device__ __forceinline__ uint32_t float8_pair(uint32_t tile, int d) {
  const int matrix = threadIdx.x % kWarpSize >> 3;
  const uint32_t row = tile + tokens_first<C>() + d * 16;
  return d + 1 < C::kDimTiles ? row : row - (matrix >> 1) * 16;
}

// S^T = K Q^T: logits[..][0, 1] are token g, heads 2t, 2t + 1; [2, 3] token g + 8.
template <class C>
__device__ __forceinline__ void multiply_keys(float (*logits)[4], const HeadState<C>& heads,
                                              uint32_t tile) {
  uint32_t a[4];
  if constexpr (C::kFloat8) {
#pragma unroll
    for (int d = 0; d < C::kDimTiles; d += 2) {
      ptx::load_matrices(a, float8_pair<C>(tile, d));
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        if (d + u >= C::kDimTiles) continue;
        const uint32_t keys[4] = {ptx::e4m3_low(a[2 * u]), ptx::e4m3_low(a[2 * u + 1]),
                                  ptx::e4m3_high(a[2 * u]), ptx::e4m3_high(a[2 * u + 1])};
#pragma unroll
        for (int n = 0; n < C::kHeadTiles; ++n)
          ptx::mma<false>(logits[n], keys, heads.query[d + u < C::kDimTiles ? d + u : 0][n]);
      }
    }
  } else {
#pragma unroll
    for (int d = 0; d < C::kDimTiles; ++d) {
      ptx::load_matrices(a, tile + tokens_first<C>() + d * 32);
#pragma unroll
      for (int n = 0; n < C::kHeadTiles; ++n)
        ptx::mma<C::kBFloat16>(logits[n], a, heads.query[d][n]);
    }
  }
}

// O^T += V^T P^T.
template <class C>
__device__ __forceinline__ void multiply_values(HeadState<C>& heads, const uint32_t (*weights)[2],
                                                uint32_t tile) {
  uint32_t a[4];
  if constexpr (C::kFloat8) {
#pragma unroll
    for (int d = 0; d < C::kDimTiles; d += 2) {
      // A lane gets bytes (token 2t: dims 2g, 2g + 1), (token 2t + 1: the same); rows g and g + 8
      // of the product become dims 2g and 2g + 1.
      ptx::load_matrices_transposed(a, float8_pair<C>(tile, d));
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        if (d + u >= C::kDimTiles) continue;
        const uint32_t x = ptx::permute_bytes(a[2 * u], 0x3120);
        const uint32_t y = ptx::permute_bytes(a[2 * u + 1], 0x3120);
        const uint32_t values[4] = {ptx::e4m3_low(x), ptx::e4m3_high(x), ptx::e4m3_low(y),
                                    ptx::e4m3_high(y)};
#pragma unroll
        for (int n = 0; n < C::kHeadTiles; ++n)
          ptx::mma<false>(heads.out[d + u < C::kDimTiles ? d + u : 0][n], values, weights[n]);
      }
    }
  } else {
#pragma unroll
    for (int d = 0; d < C::kDimTiles; ++d) {
      ptx::load_matrices_transposed(a, tile + dims_first<C>() + d * 32);
#pragma unroll
      for (int n = 0; n < C::kHeadTiles; ++n)
        ptx::mma<C::kBFloat16>(heads.out[d][n], a, weights[n]);
    }
  }
}

// Logits to weights (in place), with bias and mask; updates a tile's maximum, sum and output.
template <class C>
__device__ __forceinline__ void soften(HeadState<C>& heads, float* logits, int n,
                                       const DecodeArgs& a, const WorkItem& item, int token,
                                       bool masked) {
  const int g = threadIdx.x % kWarpSize >> 2;
  const float scale = a.scale * kLog2E;
#pragma unroll
  for (int i = 0; i < 4; ++i) logits[i] *= scale;
  if (a.softcap > 0.f) {  // tanh x = 1 - 2 / (e^2x + 1), exact enough beside 16-bit products
    const float cap = a.softcap * kLog2E;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      logits[i] = cap - 2.f * cap / (ptx::exp2(logits[i] * (2.f * kLog2E / cap)) + 1.f);
  }
  if (masked) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int position = token + g + 8 * (i / 2);
      const float bias = heads.slope[n][i % 2] * static_cast<float>(position - item.length + 1);
      // Chosen, not added: an unused slot may have given NaN.
      logits[i] = position < item.begin || position >= item.end ? -INFINITY : logits[i] + bias;
    }
  }
  float factor[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float highest = fmaxf(heads.highest[n][e], fmaxf(logits[e], logits[2 + e]));
    for (int bit = 4; bit < kWarpSize; bit *= 2)
      highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, bit));
    const float base = highest == -INFINITY ? 0.f : highest;  // all masked so far
    factor[e] = ptx::exp2(heads.highest[n][e] - base);
    heads.highest[n][e] = highest;
    logits[e] = ptx::exp2(logits[e] - base);
    logits[2 + e] = ptx::exp2(logits[2 + e] - base);
    heads.sum[n][e] = heads.sum[n][e] * factor[e] + logits[e] + logits[2 + e];
  }
#pragma unroll
  for (int d = 0; d < C::kDimTiles; ++d) {
#pragma unroll
    for (int i = 0; i < 4; ++i) heads.out[d][n][i] *= factor[i % 2];
  }
}

template <class C>
__device__ __forceinline__ void attend(HeadState<C>& heads, Pipeline<C>& pipeline,
                                       const DecodeArgs& a) {
  const int count = pipeline.num_chunks();
  int slot = 0;
  for (int j = 0; j < count; ++j) {
    const int token = pipeline.first_token(j), refill = j + C::kStages;
    const uint32_t k_tile = pipeline.k_tile(slot), v_tile = pipeline.v_tile(slot);
    float logits[C::kHeadTiles][4] = {};
    pipeline.wait();
    multiply_keys<C>(logits, heads, k_tile);
    __syncwarp();
    if (refill < count) {
      pipeline.locate(refill);
      pipeline.fetch(pipeline.k, k_tile, refill);
    }
    ptx::commit_copies();
    const bool masked = a.alibi_slopes != nullptr || !pipeline.is_whole(token);
    uint32_t weights[C::kHeadTiles][2];
#pragma unroll
    for (int n = 0; n < C::kHeadTiles; ++n) {
      soften<C>(heads, logits[n], n, a, pipeline.item, token, masked);
      // Tokens are rows here and columns there: pairs of heads are packed and transposed.
      weights[n][0] = ptx::transpose_matrix(ptx::pack<C::kBFloat16>(logits[n][0], logits[n][1]));
      weights[n][1] = ptx::transpose_matrix(ptx::pack<C::kBFloat16>(logits[n][2], logits[n][3]));
    }
    pipeline.wait();
    multiply_values<C>(heads, weights, v_tile);
    __syncwarp();
    if (refill < count) pipeline.fetch(pipeline.v, v_tile, refill);
    ptx::commit_copies();
    slot = slot + 1 == C::kStages ? 0 : slot + 1;
  }
}

// The warps' outputs, maxima and sums in shared memory.
template <class C>
struct Merge {
  float *out, *highest, *sum;
  __device__ explicit Merge(char* shared) {
    out = reinterpret_cast<float*>(shared);
    highest = out + C::kWarps * C::kHeads * C::kOutStride;
    sum = highest + C::kWarps * C::kHeads;
  }
  __device__ __forceinline__ void put(const HeadState<C>& heads) const {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int n = 0; n < C::kHeadTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float total = heads.sum[n][e];
        for (int bit = 4; bit < kWarpSize; bit *= 2)
          total += __shfl_xor_sync(kAllLanes, total, bit);
        const int at = warp * C::kHeads + n * 8 + 2 * t + e;
        if (g == 0) {
          highest[at] = heads.highest[n][e];
          sum[at] = total;
        }
#pragma unroll
        for (int d = 0; d < C::kDimTiles; ++d) {
          float* row = out + at * C::kOutStride + d * 16;
          row[C::kFloat8 ? 2 * g : g] = heads.out[d][n][e];
          row[C::kFloat8 ? 2 * g + 1 : g + 8] = heads.out[d][n][2 + e];
        }
      }
    }
  }
};

template <class C>
__device__ __forceinline__ void write_result(const DecodeArgs& a, const WorkItem& item,
                                             const Merge<C>& merge, int first_head, int num_heads) {
  for (int i = threadIdx.x; i < num_heads * C::kHeadDim; i += C::kThreads) {
    const int head = i / C::kHeadDim, dim = i % C::kHeadDim;
    float highest = -INFINITY, result = 0.f, sum = 0.f;
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w)
      highest = fmaxf(highest, merge.highest[w * C::kHeads + head]);
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) {
      const int at = w * C::kHeads + head;
      const float factor = highest == -INFINITY ? 0.f : ptx::exp2(merge.highest[at] - highest);
      sum += factor * merge.sum[at];
      result += factor * merge.out[at * C::kOutStride + dim];
    }
    result = sum > 0.f ? result / sum * a.v_scale : 0.f;
    if (item.partial) {
      float* part = partial_of(a, item.index, first_head + head);
      part[dim] = result;
      if (dim == 0) part[C::kHeadDim] = sum > 0.f ? highest + log2f(sum) : -INFINITY;
    } else {
      const uint32_t bits = C::kBFloat16 || (C::kFloat8 && !a.half_queries)
                                ? ptx::pack<true>(result, 0.f)
                                : ptx::pack<false>(result, 0.f);
      output_of<uint16_t>(a, item.row, first_head + head)[dim] = static_cast<uint16_t>(bits);
    }
  }
}

// Grid (kv head x group of 16 heads, work item): CTAs that run together read neighbouring heads.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
    decode_mma_kernel(const __grid_constant__ DecodeArgs a) {
  TPENGINE_DYNAMIC_SHARED(shared);
  WorkItem item;
  if (!find_item(a, item)) return;
  const int group = a.num_heads / a.num_kv_heads, parts = ceil_div(group, kMaxHeadsPerCta);
  const int kv_head = blockIdx.x / parts, part = blockIdx.x % parts;
  const int first_head = kv_head * group + part * kMaxHeadsPerCta;
  const int num_heads = min(kMaxHeadsPerCta, group - part * kMaxHeadsPerCta);
  Pipeline<C> pipeline(a, item, kv_head, ptx::shared_address(shared));
  pipeline.start();
  HeadState<C> heads;
  heads.load(a, item.row, first_head, num_heads);
  attend<C>(heads, pipeline, a);
  ptx::wait_copies<0>();
  __syncthreads();
  const Merge<C> merge(shared);
  merge.put(heads);
  __syncthreads();
  write_result<C>(a, item, merge, first_head, num_heads);
}

}  // namespace tpengine::cuda
