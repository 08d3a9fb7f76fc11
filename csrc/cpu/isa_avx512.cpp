#define TPENGINE_X86_VECTORS
#define TPENGINE_KERNELS kAvx512Kernels
#define TPENGINE_ISA_NAME "avx512"
#include "all_kernels.inc"
