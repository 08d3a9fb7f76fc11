// C entry point of the kernels of adapters on the CPU stand-in, for ctypes. `dtype` and
// `weight_dtype`: 0 float32, 1 float16, 2 bfloat16.
#define TPENGINE_CUDA_HOST
#include "lora/add_lora.cuh"

using namespace tpengine::cuda;

namespace {

template <class X>
void with_weight(int weight_dtype, const LoRAArgs& args) {
  if (weight_dtype == 0) launch_add_lora<X, float>(args, nullptr);
  if (weight_dtype == 1) launch_add_lora<X, __half>(args, nullptr);
  if (weight_dtype == 2) launch_add_lora<X, __nv_bfloat16>(args, nullptr);
}

}  // namespace

extern "C" void set_schedule(uint64_t seed) { cuda_host::schedule_seed = seed; }

extern "C" void add_lora(int dtype, int weight_dtype, const LoRAArgs* args) {
  if (dtype == 0) with_weight<float>(weight_dtype, *args);
  if (dtype == 1) with_weight<__half>(weight_dtype, *args);
  if (dtype == 2) with_weight<__nv_bfloat16>(weight_dtype, *args);
}
