// Chooses the instruction set and hands the ops to torch's dispatcher. The schemas stand in
// tpengine/ops/library.py.
#include "launch.h"

namespace tpengine::cpu {
namespace {

// Best first, as far as this CPU goes.
int supported_kernels(const Kernels* list[4]) {
  int count = 0;
#ifdef TPENGINE_X86
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))
    list[count++] = &kAvx512Bf16Kernels;
  if (avx512) list[count++] = &kAvx512Kernels;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    list[count++] = &kAvx2Kernels;
#endif
  list[count++] = &kGenericKernels;
  return count;
}

const Kernels*& current() {
  static const Kernels* kernels = [] {
    const Kernels* list[4];
    supported_kernels(list);
    return list[0];
  }();
  return kernels;
}

struct Registration {
  Registration() {
    TorchLibraryHandle library = nullptr;  // lives as long as the process
    TPENGINE_SHIM(
        aoti_torch_library_init_impl("tpengine", "CPU", __FILE_NAME__, __LINE__, &library));
    register_attention(library);
    register_cache(library);
    register_embedding(library);
    register_experts(library);
    register_fused(library);
    register_linear(library);
    register_lora(library);
    register_quantized(library);
    register_sampling(library);
  }
} registration;

}  // namespace

const Kernels& kernels() { return *current(); }

const Kernels& attention_kernels(int64_t block_size) {
#ifdef TPENGINE_X86
  if (block_size % current()->vector_lanes != 0) return kAvx2Kernels;
#endif
  (void)block_size;
  return *current();
}

}  // namespace tpengine::cpu

#define TPENGINE_EXPORT extern "C" __attribute__((visibility("default")))

TPENGINE_EXPORT const char* tpengine_cpu_isa() { return tpengine::cpu::kernels().name; }

// The index-th instruction set this CPU can run, best first; null after the last.
TPENGINE_EXPORT const char* tpengine_cpu_isa_at(int32_t index) {
  const tpengine::cpu::Kernels* list[4];
  const int count = tpengine::cpu::supported_kernels(list);
  return index >= 0 && index < count ? list[index]->name : nullptr;
}

// 0, or 1 where this CPU cannot run `name` or there is no such instruction set.
TPENGINE_EXPORT int32_t tpengine_set_cpu_isa(const char* name) {
  const tpengine::cpu::Kernels* list[4];
  const int count = tpengine::cpu::supported_kernels(list);
  for (int i = 0; i < count; ++i) {
    if (std::strcmp(list[i]->name, name) == 0) {
      tpengine::cpu::current() = list[i];
      return 0;
    }
  }
  return 1;
}
