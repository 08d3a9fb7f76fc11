#define TPENGINE_X86_VECTORS
#define TPENGINE_KERNELS kAvx512Bf16Kernels
#define TPENGINE_ISA_NAME "avx512bf16"
#include "all_kernels.inc"
