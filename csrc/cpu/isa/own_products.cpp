// The table of an instruction set that multiplies quantised weights in a way of its own, and has
// all other kernels of another set.
#include "isa.h"

namespace tpengine::cpu {
namespace TPENGINE_BASE_ISA {
extern const Kernels kKernels;
}
namespace TPENGINE_ISA {
namespace {

Kernels with_own_products() {
  Kernels kernels = TPENGINE_BASE_ISA::kKernels;
  kernels.name = TPENGINE_TEXT(TPENGINE_ISA);
  kernels.quantized_rows = kQuantizedRows;
  kernels.whole_rows = kWholeRows;
  kernels.quantize_rows = quantize_rows;
  kernels.quantize_panels = quantize_panels;
  kernels.quantized_linear = quantized_linear;
  return kernels;
}

}  // namespace

extern const Kernels kKernels;
const Kernels kKernels = with_own_products();

}  // namespace TPENGINE_ISA
}  // namespace tpengine::cpu
