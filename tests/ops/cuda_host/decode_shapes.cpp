// The decode kernel's shapes, of all head dims that it is compiled for, for ctypes.
#define TPENGINE_CUDA_HOST
#include "attention/decode_launch.cuh"

using namespace tpengine::cuda;

// `cache`: bfloat16, float16, float8. Bytes of shared memory that a block takes where it may have
// `limit`, and chunks in its rings; 0 bytes: there is no kernel.
extern "C" int decode_shape(int cache, int head_dim, int group, int limit, int* stages) {
  int bytes = 0;
  const auto look = [&](auto config) {
    using C = decltype(config);
    bytes = C::kSharedBytes;
    *stages = C::kStages;
  };
  if (cache == 0) with_decode_config<CacheType::kBFloat16>(head_dim, group, limit, look);
  if (cache == 1) with_decode_config<CacheType::kFloat16>(head_dim, group, limit, look);
  if (cache == 2) with_decode_config<CacheType::kFloat8>(head_dim, group, limit, look);
  return bytes;
}
