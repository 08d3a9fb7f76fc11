// What an instruction set has of its own that only adds products of bytes to another. A constant,
// of which nothing runs when the library is loaded: not every processor has these instructions.
#include "isa.h"

namespace tpengine::cpu::TPENGINE_ISA {

extern const OwnProducts kOwnProducts;
constexpr OwnProducts kOwnProducts = {TPENGINE_TEXT(TPENGINE_ISA),
                                      kQuantizedRows,
                                      kWholeRows,
                                      quantize_rows,
                                      quantize_panels,
                                      quantized_linear};

}  // namespace tpengine::cpu::TPENGINE_ISA
