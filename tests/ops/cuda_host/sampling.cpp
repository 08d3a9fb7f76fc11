// C entry points of the sampling kernels on the CPU stand-in, for ctypes. `dtype`: 0 float32,
// 1 float16, 2 bfloat16.
#define TPENGINE_CUDA_HOST
#include "sampling/sample_tokens.cuh"

using namespace tpengine::cuda;

extern "C" void set_schedule(uint64_t seed) { cuda_host::schedule_seed = seed; }

extern "C" void argmax(int dtype, const LogitsArgs* args, int num_rows) {
  if (dtype == 0) launch_argmax<float>(*args, num_rows, nullptr);
  if (dtype == 1) launch_argmax<__half>(*args, num_rows, nullptr);
  if (dtype == 2) launch_argmax<__nv_bfloat16>(*args, num_rows, nullptr);
}

extern "C" void sample_tokens(int dtype, const SampleArgs* args, int num_rows) {
  if (dtype == 0) launch_sample_tokens<float>(*args, num_rows, nullptr);
  if (dtype == 1) launch_sample_tokens<__half>(*args, num_rows, nullptr);
  if (dtype == 2) launch_sample_tokens<__nv_bfloat16>(*args, num_rows, nullptr);
}
