// C entry points of the CUDA kernels on the CPU stand-in, for ctypes. `dtype`: 0 float32,
// 1 float16, 2 bfloat16.
#define TPENGINE_CUDA_HOST
#include "attention/paged_attention.cuh"
#include "cache/write_kv_cache.cuh"
#include "fused/rms_norm.cuh"

using namespace tpengine::cuda;

extern "C" void set_schedule(uint64_t seed) { cuda_host::schedule_seed = seed; }

extern "C" void write_kv_cache(int unit_bytes, const WriteCacheArgs* args, int num_tokens) {
  if (unit_bytes == 16) launch_write_kv_cache<uint4>(*args, num_tokens, nullptr);
  if (unit_bytes == 4) launch_write_kv_cache<uint32_t>(*args, num_tokens, nullptr);
  if (unit_bytes == 2) launch_write_kv_cache<uint16_t>(*args, num_tokens, nullptr);
}

extern "C" void rms_norm(int dtype, const NormArgs* args, int num_rows) {
  if (dtype == 0) launch_rms_norm<float>(*args, num_rows, nullptr);
  if (dtype == 1) launch_rms_norm<__half>(*args, num_rows, nullptr);
  if (dtype == 2) launch_rms_norm<__nv_bfloat16>(*args, num_rows, nullptr);
}

extern "C" void paged_attention(int dtype, const PagedAttentionArgs* args, int num_seqs) {
  if (dtype == 0) launch_paged_attention<float>(*args, num_seqs, nullptr);
  if (dtype == 1) launch_paged_attention<__half>(*args, num_seqs, nullptr);
  if (dtype == 2) launch_paged_attention<__nv_bfloat16>(*args, num_seqs, nullptr);
}
