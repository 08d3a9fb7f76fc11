// The PTX instructions that the kernels use, one function each. tests/ops/cuda_host/ptx_host.h
// gives every one of them a body of plain loops by the register layouts of the PTX manual.
#pragma once

#include <stdint.h>

namespace tpengine::cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Starts a copy of 16 bytes into shared memory. `bytes` is 16 or 0; with 0 nothing is read and 16
// zero bytes are written.
__device__ __forceinline__ void copy_async16(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most N of this thread's groups of copies are under way.
template <int N>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8 and
// receives of each matrix the elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4.
__device__ __forceinline__ void load_matrices(uint32_t* to, uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}
// The same of the transposed matrices.
__device__ __forceinline__ void load_matrices_transposed(uint32_t* to, uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}
// Transposes one 8 x 8 matrix that lies in registers as `load_matrices` leaves it.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// c += a b with a 16 x 16, b 16 x 8, c 16 x 8 in float32; lane l = 4 g + t holds
//   a[0..3]: columns 2t, 2t + 1 of row g; of row g + 8; columns 2t + 8, 2t + 9 of row g; of g + 8
//   b[0..1]: rows 2t, 2t + 1 of column g; rows 2t + 8, 2t + 9
//   c[0..3]: columns 2t, 2t + 1 of row g; of row g + 8
template <bool kBFloat16>
__device__ __forceinline__ void mma(float* c, const uint32_t* a, const uint32_t* b) {
  if constexpr (kBFloat16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// Two floats rounded to 16 bits, `low` in the lower half.
template <bool kBFloat16>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t result;
  if constexpr (kBFloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  }
  return result;
}

// a * b + c of two pairs of 16-bit numbers, each rounded once.
template <bool kBFloat16>
__device__ __forceinline__ uint32_t fused_pair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  if constexpr (kBFloat16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  }
  return result;
}

// Compute capability 8.9 and later convert e4m3; before, an fp8 cache is refused by Python.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
#define TPENGINE_E4M3(...) __trap()
#else
#define TPENGINE_E4M3(...) asm(__VA_ARGS__)
#endif

// The two e4m3 in the low (high) half of x as two f16; exact.
__device__ __forceinline__ uint32_t e4m3_low(uint32_t x) {
  uint32_t result = 0;
  TPENGINE_E4M3(
      "{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(result) : "r"(x));
  return result;
}
__device__ __forceinline__ uint32_t e4m3_high(uint32_t x) {
  uint32_t result = 0;
  TPENGINE_E4M3(
      "{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(result) : "r"(x));
  return result;
}
// Two floats as e4m3, `low` in the lower byte; what is too large becomes the largest (448), NaN
// stays NaN.
__device__ __forceinline__ uint16_t to_e4m3(float low, float high) {
  uint16_t result = 0;
  TPENGINE_E4M3("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(high), "f"(low));
  return result;
}
__device__ __forceinline__ float half_to_float(uint16_t bits) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(bits));
  return result;
}

__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Byte i of the result is byte `selector >> 4 i & 3` of x.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t x, uint32_t selector) {
  return __byte_perm(x, 0, selector);
}

}  // namespace tpengine::cuda::ptx
