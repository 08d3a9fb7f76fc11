#define TPENGINE_KERNELS kGenericKernels
#define TPENGINE_ISA_NAME "generic"
#include "all_kernels.inc"
