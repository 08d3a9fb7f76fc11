#include "decode_launch.cuh"

namespace tpengine::cuda {

template bool launch_decode_mma<CacheType::kFloat8>(const DecodeArgs&, int, cudaStream_t);
template int decode_ctas<CacheType::kFloat8>(int, int);

}  // namespace tpengine::cuda
