// A weight in groups of 4 or 8 bits as the tensor cores take it: what a lane multiplies at once
// lies in one 16-byte unit. tpengine/ops/weight_only_reference.py writes this layout.
//
// A panel is 32 outputs, a step 32 inputs. The numbers are `[panel, step]` blocks of 512 bytes in
// 4 bits, of 1024 in 8: in 4 bits a unit for each lane, in 8 bits a unit for each lane for outputs
// 0 to 15 of the panel, then for 16 to 31. With lane = 4 g + t a lane has outputs g, g + 8, g + 16
// and g + 24, and inputs 8t to 8t + 7, which are A fragments of two mma: inputs 8t to 8t + 3 of all
// lanes are the first one's. Activations are read in the same order, so that 8 neighbours of a row
// are a lane's B fragments.
//
// After the numbers: factors, float16 `[panel, group, scales and offsets, g, 4 outputs]`.
#pragma once

#include "../../common/cuda_compat.h"

namespace tpengine::cuda {

constexpr int kPanel = 32;
constexpr int kStep = 32;

// As NO_OFFSETS, ZERO_POINTS, MINIMA of tpengine/ops/quantized_ops.py.
enum class Offsets : int { kNone, kZeroPoints, kMinima };

struct PackedWeight {
  const void* packed;
  int num_panels, num_steps, num_groups, steps_per_group;
  Offsets offsets;
};

template <int kBits>
struct PackedStep {
  static constexpr int kUnits = kBits / 4;
  uint4 units[kUnits];

  __device__ __forceinline__ void load(const PackedWeight& weight, int panel, int step) {
    const int64_t block = static_cast<int64_t>(panel) * weight.num_steps + step;
    const uint4* from = static_cast<const uint4*>(weight.packed) + block * kUnits * kWarpSize +
                        threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) units[i] = from[i * kWarpSize];
  }
};

// What unpacking adds to each stored number: in 4 bits it places them into the mantissa of 16.
template <int kBits>
constexpr float kShift = kBits == 4 ? 16.f : -128.f;

// Fields `kField` of the two halves of a word, as 16 + field. A word is turned left by 3 bits, so
// that three of the four fields of a half take one turn and one mask in bfloat16, and one a mask.
template <bool kBFloat16, int kField>
__device__ __forceinline__ uint32_t unpack_field(uint32_t word) {
  constexpr int kTurn = (4 * kField + (kBFloat16 ? 0 : 29)) % 32;  // float16: 3 bits to the left
  if constexpr (kTurn != 0) word = word >> kTurn | word << (32 - kTurn);
  if constexpr (kBFloat16) return (word & 0x00780078u) | 0x41804180u;
  return (word & 0x03c003c0u) | 0x4c004c00u;
}

// A byte as 16 (16 + high field) - 400 + (16 + low field); all of these are exact in 16 bits.
template <bool kBFloat16, int kByte>
__device__ __forceinline__ uint32_t unpack_byte(uint32_t word) {
  constexpr uint32_t kOne = kBFloat16 ? 0x3f803f80u : 0x3c003c00u;
  constexpr uint32_t kSixteen = kBFloat16 ? 0x41804180u : 0x4c004c00u;
  constexpr uint32_t kMinus400 = kBFloat16 ? 0xc3c8c3c8u : 0xde40de40u;
  const uint32_t high =
      ptx::fused_pair<kBFloat16>(unpack_field<kBFloat16, 2 * kByte + 1>(word), kSixteen, kMinus400);
  return ptx::fused_pair<kBFloat16>(unpack_field<kBFloat16, 2 * kByte>(word), kOne, high);
}

// The A fragment of mma `i` (0, 1) for outputs 16 `half` on: stored numbers + kShift.
template <bool kBFloat16, int kBits>
__device__ __forceinline__ void unpack(uint32_t* fragment, const PackedStep<kBits>& step, int half,
                                       int i) {
  if constexpr (kBits == 4) {
    const uint4& unit = step.units[0];
    const uint32_t word = half == 0 ? (i == 0 ? unit.x : unit.y) : (i == 0 ? unit.z : unit.w);
    fragment[0] = unpack_field<kBFloat16, 0>(word);
    fragment[1] = unpack_field<kBFloat16, 1>(word);
    fragment[2] = unpack_field<kBFloat16, 2>(word);
    fragment[3] = unpack_field<kBFloat16, 3>(word);
  } else {
    const uint4& unit = step.units[half];
    const uint32_t low = i == 0 ? unit.x : unit.z, high = i == 0 ? unit.y : unit.w;
    fragment[0] = unpack_byte<kBFloat16, 0>(low);
    fragment[1] = unpack_byte<kBFloat16, 1>(low);
    fragment[2] = unpack_byte<kBFloat16, 0>(high);
    fragment[3] = unpack_byte<kBFloat16, 1>(high);
  }
}

// weight = scale (unpacked - origin) + minimum, for this lane's outputs g, g + 8, g + 16, g + 24.
template <int kBits>
struct Factors {
  float scale[4], origin[4], minimum[4];

  __device__ __forceinline__ void load(const PackedWeight& weight, int panel, int group) {
    constexpr int kOutputs = 4;
    const int kinds = weight.offsets == Offsets::kNone ? 1 : 2;
    const int64_t numbers =
        static_cast<int64_t>(weight.num_panels) * weight.num_steps * kStep * kPanel * kBits / 8;
    const int64_t line = static_cast<int64_t>(panel) * weight.num_groups + group;
    const __half* factors =
        reinterpret_cast<const __half*>(static_cast<const char*>(weight.packed) + numbers) +
        line * kinds * kPanel + threadIdx.x % kWarpSize / 4 * kOutputs;
    cuda::load<kOutputs>(scale, factors);
    float offset[kOutputs] = {};
    if (weight.offsets != Offsets::kNone) cuda::load<kOutputs>(offset, factors + kPanel);
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const float zero = weight.offsets == Offsets::kNone         ? 1 << (kBits - 1)
                         : weight.offsets == Offsets::kZeroPoints ? offset[i]
                                                                  : 0.f;
      origin[i] = zero + kShift<kBits>;
      minimum[i] = weight.offsets == Offsets::kMinima ? offset[i] : 0.f;
    }
  }
};

}  // namespace tpengine::cuda
