// What every file of kernels begins with. These files are compiled once per instruction set, with
// its flags: TPENGINE_ISA is its name and the namespace of its kernels, and what is not a kernel
// stands in an unnamed namespace. The files that take longest to compile have an object of their
// own each; all other kernels are in table.cpp.
#pragma once

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "../kernels.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define TPENGINE_TEXT_OF(name) #name
#define TPENGINE_TEXT(name) TPENGINE_TEXT_OF(name)

namespace tpengine::cpu::TPENGINE_ISA {

void attention(const AttentionArgs&, const AttentionItem&, const AttentionItem* next);
void merge_partitions(const AttentionArgs&, const AttentionItem&);
void linear(const LinearArgs&, PanelRange now, PanelRange next);
void lora(const LoRAArgs&, const LoRAItem&, const LoRAItem* next);
void quantize_rows(const QuantizedLinearArgs&, int64_t begin, int64_t end);
void quantize_panels(const QuantizedLinearArgs&, int64_t begin, int64_t end);
void quantized_linear(const QuantizedLinearArgs&, PanelRange now, PanelRange next);

namespace {
// clang-format off: the order matters
#include "simd.inc"
#include "elements.inc"
#if defined(TPENGINE_HAS_TILES)
#include "tiles.inc"
#endif
// clang-format on

// Rows of a block of a quantised product: integer and float sums of a pair of vectors are 4
// registers a row. With one group per output there are no float sums while inputs are read.
#if defined(__AVXVNNI__)
constexpr int kQuantizedRows = 6, kWholeRows = 6;
#else
constexpr int kQuantizedRows = kLanes == 16 ? 6 : kLanes == 8 ? 4 : 2;
constexpr int kWholeRows = kLanes == 16 ? 12 : 4;
#endif
#if defined(TPENGINE_HAS_TILES)
constexpr int kLeastTileRows = 16;
#else
constexpr int kLeastTileRows = 0;
#endif
}  // namespace

}  // namespace tpengine::cpu::TPENGINE_ISA
