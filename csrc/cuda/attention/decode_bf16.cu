#include "decode_launch.cuh"

namespace tpengine::cuda {

template bool launch_decode_mma<CacheType::kBFloat16>(const DecodeArgs&, int, cudaStream_t);
template int decode_ctas<CacheType::kBFloat16>(int, int);

}  // namespace tpengine::cuda
