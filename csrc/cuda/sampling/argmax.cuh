// The walk over a row of logits, and the largest logit of each row. Checked on the CPU stand-in
// only; it has not run on a GPU.
#pragma once

#include "../../common/cuda_compat.h"

namespace tpengine::cuda {

using Wide = unsigned long long;

struct LogitsArgs {
  int64_t* out;
  const void* logits;  // [rows, vocab_size]
  int64_t stride;
  int vocab_size;
  float* logprobs;  // of the chosen tokens; null: not wanted
};

#ifdef TPENGINE_CUDA_HOST
constexpr int kSampleThreads = 128;  // the stand-in's time grows with them
#else
constexpr int kSampleThreads = 1024;
#endif
constexpr int kSampleWarps = kSampleThreads / kWarpSize;
static_assert(kSampleWarps <= kWarpSize, "the lanes of one warp combine the values of all warps");
constexpr int kLogitsAtOnce = 8;  // of a thread

// Calls visit(token, logit) for the tokens [begin, end) of a row, shared out among `threads`
// threads of which this one is number `thread`; each thread's tokens ascend. The next logits are
// loaded, 16 bytes at a time, before these are visited: behind a visit's branches and atomics each
// load would cost the whole way to the L2.
template <class T, class F>
__device__ __forceinline__ void for_each_logit(const T* row, int begin, int end, int thread,
                                               int threads, const F& visit) {
  constexpr int N = 16 / sizeof(T), kPacks = kLogitsAtOnce / N;
  // Rows begin anywhere: up to N - 1 tokens lie before the first whole pack and after the last.
  const int past = static_cast<int>(reinterpret_cast<uintptr_t>(row + begin) / sizeof(T) % N);
  const int first = min(begin + (N - past) % N, end), num_packs = (end - first) / N;
  const int rest = first + num_packs * N;
  Pack<T, N> next[kPacks];
  const auto load_next = [&](int i) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int pack = i + p * threads;
      if (pack < num_packs) {
        next[p] = *reinterpret_cast<const Pack<T, N>*>(row + first + pack * N);
      }
    }
  };
  load_next(thread);
  if (thread < first - begin) visit(begin + thread, to_float(row[begin + thread]));
  for (int i = thread; i < num_packs; i += kPacks * threads) {
    float now[kLogitsAtOnce];
#pragma unroll
    for (int j = 0; j < kLogitsAtOnce; ++j) now[j] = to_float(next[j / N].at[j % N]);
    load_next(i + kPacks * threads);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int pack = i + p * threads;
      if (pack >= num_packs) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) visit(first + pack * N + j, now[p * N + j]);
    }
  }
  if (thread < end - rest) visit(rest + thread, to_float(row[rest + thread]));
}

// A logit and its token in one number that grows with the logit and, among equals, with smaller
// ids. NaN is larger than all numbers.
__device__ __forceinline__ Wide ranked(float logit, int token) {
  uint32_t bits = __float_as_uint(logit == 0.f ? 0.f : logit);
  bits = logit != logit ? 0xffffffffu : (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<Wide>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(token));
}
__device__ __forceinline__ int token_of(Wide rank) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(rank));
}

template <class T>
__device__ __forceinline__ const T* row_of(const LogitsArgs& a) {
  return static_cast<const T*>(a.logits) + blockIdx.x * a.stride;
}

// Combines a value of every thread; all get the result. `shared`: [kSampleWarps].
template <class F>
__device__ Wide combine_block(Wide value, Wide* shared, const F& combine) {
  for (int bit = kWarpSize / 2; bit > 0; bit /= 2)
    value = combine(value, __shfl_xor_sync(kAllLanes, value, bit));
  __syncthreads();  // `shared` may still be read
  if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  value = shared[threadIdx.x % kSampleWarps];
  for (int bit = kSampleWarps / 2; bit > 0; bit /= 2)
    value = combine(value, __shfl_xor_sync(kAllLanes, value, bit));
  return value;
}

template <class T>
__device__ Wide best_of_row(const LogitsArgs& a, Wide* shared) {
  // What a row of minus infinities gives, so that no thread need know whether it has seen a token.
  float highest = -INFINITY;
  int token = 0;
  const auto compare = [&](int i, float logit) {
    // Larger or NaN, and the first NaN stays.
    if (highest == highest && !(logit <= highest)) {
      highest = logit;
      token = i;
    }
  };
  for_each_logit(row_of<T>(a), 0, a.vocab_size, threadIdx.x, kSampleThreads, compare);
  return combine_block(ranked(highest, token), shared, [](Wide x, Wide y) { return max(x, y); });
}

// Writes the row's token and, if it is wanted, the logarithm of its share of the softmax: NaN if
// the largest logit is not finite. The sum is in whole units, so that the order of threads does not
// change it.
template <class T>
__device__ void write_token(const LogitsArgs& a, int token, int best, Wide* shared) {
  constexpr float kUnit = 4294967296.f;
  const T* logits = row_of<T>(a);
  if (threadIdx.x == 0) a.out[blockIdx.x] = token;
  if (a.logprobs == nullptr) return;
  const float highest = to_float(logits[best]);
  const bool finite = fabsf(highest) < INFINITY;
  float own = 0.f;
  if (finite) {
    for_each_logit(logits, 0, a.vocab_size, threadIdx.x, kSampleThreads,
                   [&](int, float logit) { own += expf(logit - highest); });
  }
  const Wide all =
      combine_block(static_cast<Wide>(own * kUnit), shared, [](Wide x, Wide y) { return x + y; });
  if (threadIdx.x != 0) return;
  a.logprobs[blockIdx.x] =
      finite ? to_float(logits[token]) - highest - logf(static_cast<float>(all) / kUnit) : NAN;
}

// One block per row.
template <class T>
__global__ void __launch_bounds__(kSampleThreads)
    argmax_kernel(const __grid_constant__ LogitsArgs a) {
  __shared__ Wide shared[kSampleWarps];
  const int best = token_of(best_of_row<T>(a, shared));
  write_token<T>(a, best, best, shared);
}

template <class T>
void launch_argmax(const LogitsArgs& args, int num_rows, cudaStream_t stream) {
  if (num_rows == 0) return;
  TPENGINE_LAUNCH(argmax_kernel<T>, dim3(num_rows), dim3(kSampleThreads), 0, stream, args);
}

}  // namespace tpengine::cuda
