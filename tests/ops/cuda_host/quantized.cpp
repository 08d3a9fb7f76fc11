// C entry points of the kernels of packed weights on the CPU stand-in, for ctypes. `dtype`: 0
// float32, 1 float16, 2 bfloat16.
#define TPENGINE_CUDA_HOST
#include "quantized/dequantize.cuh"
#include "quantized/linear.cuh"

using namespace tpengine::cuda;

extern "C" void set_schedule(uint64_t seed) { cuda_host::schedule_seed = seed; }

extern "C" void weight_only_linear(int dtype, int bits, const WeightOnlyArgs* args) {
  if (dtype == 1) launch_weight_only<__half>(*args, bits, nullptr);
  if (dtype == 2) launch_weight_only<__nv_bfloat16>(*args, bits, nullptr);
}

extern "C" void dequantize_weight(int dtype, int bits, const DequantizeArgs* args, int num_panels) {
  if (dtype == 0) launch_dequantize<float>(*args, bits, num_panels, nullptr);
  if (dtype == 1) launch_dequantize<__half>(*args, bits, num_panels, nullptr);
  if (dtype == 2) launch_dequantize<__nv_bfloat16>(*args, bits, num_panels, nullptr);
}
