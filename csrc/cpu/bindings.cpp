// Chooses the instruction set and hands the ops to torch's dispatcher. A schema is the
// signature of the op's reference in tpengine/ops.
#include <iterator>

#include "launch.h"
#include "may_use_tiles.h"

// isas.inc, which CMake writes: a line for each instruction set, best first, with the condition
// that a processor must meet; _1 if its kernels are built, else _0; _ON_1 and _ON_0 if it has the
// kernels of another one, and products of its own.
#define TPENGINE_ISA_0(isa, condition)
#define TPENGINE_ISA_ON_0(isa, base, condition)
#define TPENGINE_ISA_1(isa, condition) \
  namespace isa {                      \
  extern const Kernels kKernels;       \
  }
#define TPENGINE_ISA_ON_1(isa, base, condition) \
  namespace isa {                               \
  extern const OwnProducts kOwnProducts;        \
  }
namespace tpengine::cpu {
#include "isas.inc"
#undef TPENGINE_ISA_0
#undef TPENGINE_ISA_1
#undef TPENGINE_ISA_ON_0
#undef TPENGINE_ISA_ON_1

namespace {

[[maybe_unused]] Kernels with_own(Kernels kernels, const OwnProducts& own) {
  kernels.name = own.name;
  kernels.quantized_rows = own.quantized_rows;
  kernels.whole_rows = own.whole_rows;
  kernels.quantize_rows = own.quantize_rows;
  kernels.quantize_panels = own.quantize_panels;
  kernels.quantized_linear = own.quantized_linear;
  return kernels;
}

struct Isa {
  const char* name;
  bool runs_here;
  Optional<Kernels> kernels;  // none: not built
};

// Best first, all of them.
#define TPENGINE_ISA_0(isa, condition) {#isa, static_cast<bool>(condition), std::nullopt},
#define TPENGINE_ISA_1(isa, condition) {#isa, static_cast<bool>(condition), isa::kKernels},
#define TPENGINE_ISA_ON_0(isa, base, condition) {#isa, static_cast<bool>(condition), std::nullopt},
#define TPENGINE_ISA_ON_1(isa, base, condition) \
  {#isa, static_cast<bool>(condition), with_own(base::kKernels, isa::kOwnProducts)},
const Isa kIsas[] = {
#include "isas.inc"
};

// The first instruction set from `isa` on that runs here; a block must hold whole vectors of it.
const Isa* first_of(const Isa* isa, int64_t block_size) {
  while (!isa->runs_here || !isa->kernels ||
         (block_size > 0 && block_size % isa->kernels->vector_lanes != 0))
    ++isa;  // the generic one is always built, runs everywhere, and has the shortest vectors
  return isa;
}

const Isa*& current() {
  static const Isa* isa = first_of(kIsas, 0);
  return isa;
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

const Kernels& kernels() { return *current()->kernels; }

const Kernels& attention_kernels(int64_t block_size) {
  return *first_of(current(), block_size)->kernels;
}

}  // namespace tpengine::cpu

#define TPENGINE_EXPORT extern "C" __attribute__((visibility("default")))

TPENGINE_EXPORT const char* tpengine_cpu_isa() { return tpengine::cpu::kernels().name; }

// The index-th instruction set, best first; null after the last. state: 0 if this CPU cannot run
// it, 1 if its kernels are not built, else 2.
TPENGINE_EXPORT const char* tpengine_cpu_isa_at(int32_t index, int32_t* state) {
  if (index < 0 || index >= static_cast<int32_t>(std::size(tpengine::cpu::kIsas))) return nullptr;
  const tpengine::cpu::Isa& isa = tpengine::cpu::kIsas[index];
  *state = !isa.runs_here ? 0 : !isa.kernels ? 1 : 2;
  return isa.name;
}

// The instruction set of this index, which must have state 2.
TPENGINE_EXPORT void tpengine_set_cpu_isa(int32_t index) {
  tpengine::cpu::current() = &tpengine::cpu::kIsas[index];
}
