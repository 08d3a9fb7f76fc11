// Which head dims the tensor-core kernel is compiled for, and its launch. Every cache type is a
// translation unit of its own (decode_*.cu).
#pragma once

#include <type_traits>

#include "decode_mma.cuh"
#include "reduce.cuh"

namespace tpengine::cuda {

// Calls body(DecodeConfig{}) for a head dim and group; false: there is no kernel for the head dim.
template <CacheType Type, class F>
bool with_decode_config(int head_dim, int group, const F& body) {
  const auto tiled = [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    if (group <= 8) {
      body(DecodeConfig<kDim, 1, Type>{});
    } else {
      body(DecodeConfig<kDim, 2, Type>{});
    }
    return true;
  };
  switch (head_dim) {
    case 64:
      return tiled(std::integral_constant<int, 64>{});
    case 80:
      return tiled(std::integral_constant<int, 80>{});
#ifndef TPENGINE_HOST_FEW  // the tests' compiler is slower than the dims are different
    case 128:
      return tiled(std::integral_constant<int, 128>{});
    case 256:
      return tiled(std::integral_constant<int, 256>{});
#endif
#ifndef TPENGINE_CUDA_HOST
    case 96:
      return tiled(std::integral_constant<int, 96>{});
    case 112:
      return tiled(std::integral_constant<int, 112>{});
    case 160:
      return tiled(std::integral_constant<int, 160>{});
    case 192:
      return tiled(std::integral_constant<int, 192>{});
#endif
    default:
      return false;
  }
}

#ifdef TPENGINE_CUDA_HOST
template <class Kernel>
cudaError_t allow_shared_memory(Kernel, int) {
  return cudaSuccess;
}
#else
// Per device, and no stream operation: allowed during the capture of a graph.
template <class Kernel>
cudaError_t allow_shared_memory(Kernel kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}
#endif

// False: no kernel for this head dim. Other failures are left for cudaGetLastError.
template <CacheType Type>
bool launch_decode_mma(const DecodeArgs& args, int max_items, cudaStream_t stream) {
  const int group = args.num_heads / args.num_kv_heads;
  return with_decode_config<Type>(args.head_dim, group, [&](auto config) {
    using C = decltype(config);
    if (args.num_seqs == 0) return;
    const auto kernel = decode_mma_kernel<C>;
    if (allow_shared_memory(kernel, C::kSharedBytes) != cudaSuccess) return;
    const int columns = args.num_kv_heads * ceil_div(group, kMaxHeadsPerCta);
    TPENGINE_LAUNCH(kernel, dim3(columns, max_items), dim3(C::kThreads), C::kSharedBytes, stream,
                    args);
    if (C::kBFloat16 || (C::kFloat8 && args.half_queries == 0)) {
      launch_reduce<__nv_bfloat16>(args, stream);
    } else {
      launch_reduce<__half>(args, stream);
    }
  });
}

#ifndef TPENGINE_CUDA_HOST
// CTAs of the kernel that a multiprocessor holds at once; 0: no kernel for this head dim.
template <CacheType Type>
int decode_ctas(int head_dim, int group) {
  int count = 0;
  with_decode_config<Type>(head_dim, group, [&](auto config) {
    using C = decltype(config);
    const auto kernel = decode_mma_kernel<C>;
    if (allow_shared_memory(kernel, C::kSharedBytes) != cudaSuccess) return;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, C::kThreads, C::kSharedBytes);
  });
  return count;
}
#endif

}  // namespace tpengine::cuda
