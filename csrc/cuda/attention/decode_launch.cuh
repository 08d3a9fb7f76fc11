// Which head dims the tensor-core kernel is compiled for, and its launch. Every cache type is a
// translation unit of its own (decode_*.cu).
#pragma once

#include <type_traits>

#include "decode_mma.cuh"
#include "reduce.cuh"

namespace tpengine::cuda {

// Calls body(C{}), or with as many stages less as fit into `shared_bytes`; false: none does.
template <class C, class F>
bool with_stages(int shared_bytes, const F& body) {
  if (C::kSharedBytes <= shared_bytes) {
    body(C{});
    return true;
  }
  if constexpr (C::kSharedBytes > kLeastSharedBytes) {
    return with_stages<typename C::Shallower>(shared_bytes, body);
  }
  return false;
}

// Calls body(DecodeConfig{}) for a head dim and group, on a device that lets a CTA have
// `shared_bytes`; false: there is no kernel.
template <CacheType Type, class F>
bool with_decode_config(int head_dim, int group, int shared_bytes, const F& body) {
  const auto tiled = [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    return group <= 8 ? with_stages<DecodeConfig<kDim, 1, Type>>(shared_bytes, body)
                      : with_stages<DecodeConfig<kDim, 2, Type>>(shared_bytes, body);
  };
  switch (head_dim) {
    case 64:
      return tiled(std::integral_constant<int, 64>{});
    case 80:
      return tiled(std::integral_constant<int, 80>{});
#ifndef TPENGINE_FEW_DIMS  // for tests, whose compiler is slower than the dims are different
    case 128:
      return tiled(std::integral_constant<int, 128>{});
    case 256:
      return tiled(std::integral_constant<int, 256>{});
#endif
#ifndef TPENGINE_SOME_DIMS
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

// What a CTA may have on the current device, once a kernel asks for it; 0: CUDA failed.
inline int most_shared_bytes() {
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return bytes;
}

// Lets a kernel have its dynamic shared memory, and as many CTAs at once as that allows: all that a
// multiprocessor does not use as L1. Per device, and no stream operation: allowed in a capture.
template <class Kernel>
bool claim_shared_memory(Kernel kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) ==
             cudaSuccess &&
         cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared) == cudaSuccess;
}

// False: no kernel for this head dim and device. Other failures are left for cudaGetLastError.
template <CacheType Type>
bool launch_decode_mma(const DecodeArgs& args, int max_items, cudaStream_t stream) {
  const int group = args.num_heads / args.num_kv_heads;
  return with_decode_config<Type>(args.head_dim, group, most_shared_bytes(), [&](auto config) {
    using C = decltype(config);
    if (args.num_seqs == 0) return;
    const auto kernel = decode_mma_kernel<C>;
    if (!claim_shared_memory(kernel, C::kSharedBytes)) return;
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

// CTAs of the kernel that a multiprocessor holds at once; 0: no kernel for this head dim and
// device.
template <CacheType Type>
int decode_ctas(int head_dim, int group) {
  int count = 0;
  with_decode_config<Type>(head_dim, group, most_shared_bytes(), [&](auto config) {
    using C = decltype(config);
    const auto kernel = decode_mma_kernel<C>;
    if (!claim_shared_memory(kernel, C::kSharedBytes)) return;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, C::kThreads, C::kSharedBytes);
  });
  return count;
}

}  // namespace tpengine::cuda
