// The kernels that compile fast, and the table of all kernels of this instruction set.
#include "isa.h"

namespace tpengine::cpu::TPENGINE_ISA {
namespace {
// clang-format off: the order matters
#include "fused.inc"
#include "layer_norm.inc"
#include "cache.inc"
#include "sampling.inc"
#include "shared_memory.inc"
// clang-format on
}  // namespace

extern const Kernels kKernels;
constexpr Kernels kKernels = {TPENGINE_TEXT(TPENGINE_ISA),
                              kLanes,
                              kQuantizedRows,
                              kWholeRows,
                              sizeof(BFloat16::Factor) == sizeof(float),
                              kLeastTileRows,
                              attention,
                              merge_partitions,
                              norm,
                              layer_norm,
                              activation,
                              write_cache,
                              rotary_write,
                              linear,
                              quantize_rows,
                              quantize_panels,
                              quantized_linear,
                              lora,
                              argmax,
                              sample,
                              sum_parts,
                              scale_row};

}  // namespace tpengine::cpu::TPENGINE_ISA
