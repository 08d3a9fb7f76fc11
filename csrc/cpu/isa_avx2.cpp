#define TPENGINE_X86_VECTORS
#define TPENGINE_KERNELS kAvx2Kernels
#define TPENGINE_ISA_NAME "avx2"
#include "all_kernels.inc"
