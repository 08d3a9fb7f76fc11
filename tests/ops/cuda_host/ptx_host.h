// common/ptx.h for the CPU stand-in: every instruction as plain loops, register layouts as the PTX
// manual gives them. Written apart from the kernels: nothing here knows what they do.
//
// Asynchronous copies are carried out as late as a wait allows (even seeds) or at once (odd seeds):
// a wait that is missing shows as NaN, and a tile that is refilled too early as wrong numbers.
#pragma once

#include <assert.h>

#include <deque>
#include <vector>

#include "cuda_host.h"

namespace tpengine::cuda::ptx {

struct Copy {
  uint32_t to;
  const void* from;
  int bytes;
};
struct CopyQueue {
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};
inline std::vector<CopyQueue> queues(1024);  // by thread of the block

inline char* shared_memory() { return cuda_host::state.shared.data(); }

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - shared_memory());
}

// The 16 bytes at a shared address, which must be aligned and inside.
inline char* shared_unit(uint32_t address) {
  assert(address % 16 == 0 && address + 16 <= cuda_host::state.shared.size());
  return shared_memory() + address;
}

inline void carry_out(const Copy& copy) {
  assert(copy.bytes == 0 || (copy.bytes == 16 && reinterpret_cast<uintptr_t>(copy.from) % 16 == 0));
  char* to = shared_unit(copy.to);
  memset(to, 0, 16);
  memcpy(to, copy.from, static_cast<size_t>(copy.bytes));
}

inline CopyQueue& queue() { return queues[static_cast<size_t>(cuda_host::state.current)]; }

inline void copy_async16(uint32_t to, const void* from, int bytes) {
  if (cuda_host::schedule_seed % 2 == 1) return carry_out({to, from, bytes});
  queue().open.push_back({to, from, bytes});
}

inline void commit_copies() {
  queue().groups.push_back(std::move(queue().open));
  queue().open.clear();
}

template <int N>
void wait_copies() {
  while (queue().groups.size() > N) {
    for (const Copy& copy : queue().groups.front()) carry_out(copy);
    queue().groups.pop_front();
  }
}

// What the lanes of each warp show one another.
inline uint32_t shown[32][cuda_host::kWarp][6];

// Lanes that meet, show registers, compute from all of them, and go on together.
template <class F>
void exchange(const uint32_t* registers, int count, const F& compute) {
  auto& lanes = shown[cuda_host::state.current / cuda_host::kWarp];
  for (int i = 0; i < count; ++i) lanes[cuda_host::lane()][i] = registers[i];
  cuda_host::wait(cuda_host::warp().barrier);
  compute(lanes);
  cuda_host::wait(cuda_host::warp().barrier);
}

inline uint16_t half_of(uint32_t pair, int index) {
  return static_cast<uint16_t>(pair >> (16 * index));
}
inline uint32_t pair_of(uint16_t low, uint16_t high) {
  return low | static_cast<uint32_t>(high) << 16;
}

// Element (row, column) of an 8 x 8 matrix in registers: lane 4 row + column / 2, half column % 2.
template <class Lanes>
uint16_t element(const Lanes& lanes, int reg, int row, int column) {
  return half_of(lanes[4 * row + column / 2][reg], column % 2);
}

template <bool kTransposed>
void read_matrices(uint32_t* to, uint32_t row_address) {
  const int row = cuda_host::lane() / 4, column = cuda_host::lane() % 4 * 2;
  exchange(&row_address, 1, [&](const auto& lanes) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t value[2];
      for (int i = 0; i < 2; ++i) {
        const int from_row = kTransposed ? column + i : row;
        const int from_column = kTransposed ? row : column + i;
        const char* unit = shared_unit(lanes[8 * matrix + from_row][0]);
        memcpy(&value[i], unit + 2 * from_column, 2);
      }
      to[matrix] = pair_of(value[0], value[1]);
    }
  });
}
inline void load_matrices(uint32_t* to, uint32_t row) { read_matrices<false>(to, row); }
inline void load_matrices_transposed(uint32_t* to, uint32_t row) { read_matrices<true>(to, row); }

inline uint32_t transpose_matrix(uint32_t x) {
  const int row = cuda_host::lane() / 4, column = cuda_host::lane() % 4 * 2;
  uint32_t y = 0;
  exchange(&x, 1, [&](const auto& lanes) {
    y = pair_of(element(lanes, 0, column, row), element(lanes, 0, column + 1, row));
  });
  return y;
}

inline float half_to_float(uint16_t bits) {
  _Float16 value;
  memcpy(&value, &bits, sizeof value);
  return static_cast<float>(value);
}
inline uint16_t float_to_half(float x) {
  const _Float16 value = static_cast<_Float16>(x);
  uint16_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
template <bool kBFloat16>
float widen(uint16_t bits) {
  return kBFloat16 ? __bfloat162float({bits}) : half_to_float(bits);
}

template <bool kBFloat16>
void mma(float* c, const uint32_t* a, const uint32_t* b) {
  const uint32_t registers[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const int g = cuda_host::lane() / 4, t = cuda_host::lane() % 4;
  exchange(registers, 6, [&](const auto& lanes) {
    for (int i = 0; i < 4; ++i) {
      const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
      float sum = 0.f;
      for (int k = 0; k < 16; ++k) {
        // A: four 8 x 8 quarters, the lower one second; B: two, stored by column.
        const uint16_t x = element(lanes, row / 8 + 2 * (k / 8), row % 8, k % 8);
        const uint16_t y = element(lanes, 4 + k / 8, column, k % 8);
        sum += widen<kBFloat16>(x) * widen<kBFloat16>(y);
      }
      c[i] += sum;
    }
  });
}

template <bool kBFloat16>
uint32_t pack(float low, float high) {
  if (kBFloat16) return pair_of(__float2bfloat16_rn(low).bits, __float2bfloat16_rn(high).bits);
  return pair_of(float_to_half(low), float_to_half(high));
}

template <bool kBFloat16>
uint32_t fused_pair(uint32_t a, uint32_t b, uint32_t c) {
  float sum[2];
  for (int i = 0; i < 2; ++i) {  // the product is exact in float32
    sum[i] = widen<kBFloat16>(half_of(a, i)) * widen<kBFloat16>(half_of(b, i)) +
             widen<kBFloat16>(half_of(c, i));
  }
  return pack<kBFloat16>(sum[0], sum[1]);
}

inline float e4m3_value(uint32_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  float magnitude = exponent != 0 ? ldexpf(static_cast<float>(8 + mantissa), exponent - 10)
                                  : ldexpf(static_cast<float>(mantissa), -9);
  if ((byte & 0x7f) == 0x7f) magnitude = NAN;
  return (byte & 0x80) != 0 ? -magnitude : magnitude;
}
inline uint32_t e4m3_low(uint32_t x) {
  return pair_of(float_to_half(e4m3_value(x & 255)), float_to_half(e4m3_value(x >> 8 & 255)));
}
inline uint32_t e4m3_high(uint32_t x) { return e4m3_low(x >> 16); }

// The nearest of all finite values, the one with an even mantissa between two.
inline uint8_t round_to_e4m3(float x) {
  if (x != x) return 0x7f;
  const float magnitude = fminf(fabsf(x), 448.f);
  int best = 0;
  for (int code = 1; code < 0x7f; ++code) {
    const float closer = fabsf(e4m3_value(code) - magnitude) - fabsf(e4m3_value(best) - magnitude);
    if (closer < 0 || (closer == 0 && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best | (signbit(x) ? 0x80 : 0));
}
inline uint16_t to_e4m3(float low, float high) {
  return static_cast<uint16_t>(round_to_e4m3(low) | round_to_e4m3(high) << 8);
}

inline float exp2(float x) { return exp2f(x); }

inline uint32_t permute_bytes(uint32_t x, uint32_t selector) {
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= (x >> (8 * (selector >> (4 * i) & 3)) & 255) << (8 * i);
  return result;
}

}  // namespace tpengine::cuda::ptx
