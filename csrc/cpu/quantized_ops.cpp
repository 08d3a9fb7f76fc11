// Launchers: quantize_weight; pack_groups; dequantize_blocks; quantized_linear; and
// quantized_embedding, which copies rows of such a weight as floats.
#include <math.h>
#include <sched.h>

#include "panels.h"
#include "transpose.h"

namespace tpengine::cpu {
namespace {

constexpr int64_t kMostGroupOf4Bits = 128;  // a tile of quantize_panels

// Rows that pass over a panel before the next panel: their bytes stay in L2 beside it.
constexpr int64_t kRowsAtOnce = 384;
// Up to so many rows each thread rounds all for itself: it takes less time than to wait.
constexpr int64_t kRowsRoundedAlone = 4;
// One four in 32 may be an outlier, and at most four: they cost little, and more gain little.
constexpr int64_t kInputsPerOutlier = 128, kMostOutliers = 4;

void take_format(const char* op, QuantizedLinearArgs& args, const Tensor& packed, int64_t bits,
                 int64_t group_size, int64_t offsets) {
  if ((bits != 4 && bits != 8) || offsets < 0 || offsets > 2) {
    fail(op, "bits = " + std::to_string(bits) + " with offsets = " + std::to_string(offsets) +
                 "; expected 4 or 8 with 0, 1 or 2");
  }
  if (group_size <= 0 || group_size % 32 != 0) {
    fail(op, "group_size is " + std::to_string(group_size) + "; expected a multiple of 32");
  }
  args.bits = static_cast<int>(bits);
  args.offsets = static_cast<Offsets>(offsets);
  args.group_size = group_size;
  args.num_groups = (args.in_features + group_size - 1) / group_size;
  args.num_panels = num_panels(args.out_features);
  args.num_outliers = std::min(args.in_features / kInputsPerOutlier, kMostOutliers);
  args.group_bytes = group_size * bits * 4 + (offsets != 0 ? 128 : 64);
  args.panel_bytes = args.num_groups * args.group_bytes;
  check_tensor(op, "packed", packed, aoti_torch_dtype_uint8(),
               {args.num_panels * args.panel_bytes});
  args.packed = packed.data<uint8_t>();
}

void quantize_weight(const Tensor& packed, const Tensor& weight, const Optional<Tensor>& importance,
                     int64_t bits, int64_t group_size) {
  const char* op = "quantize_weight";
  QuantizedLinearArgs args = {};
  args.dtype = element_type(op, "weight", weight);
  check_shape(op, "weight", weight, {kAnySize, kAnySize}, 1);
  args.x = weight.raw();
  args.x_stride = weight.stride(0);
  args.out_features = weight.size(0);
  args.in_features = weight.size(1);
  if (importance) {
    check_tensor(op, "importance", *importance, aoti_torch_dtype_float32(), {args.in_features});
    args.importance = importance->data<float>();
  }
  if (bits == 4) check_at_most(op, "group_size in 4 bits", group_size, kMostGroupOf4Bits);
  take_format(op, args, packed, bits, group_size, 0);
  args.out = packed.raw();
  run_kernel(kernels().quantize_panels, args, args.num_panels, 1);
}

// How a file has the numbers of a block; see ops/quantized_reference.py.
enum Layout : int64_t { kNumbers, kSigned, kHalves, kPairs, kNumLayouts };

// 16 neighbouring numbers of a group; a block of kPairs has eight groups, any other has one.
template <Layout kLayout>
FourWords numbers_at(const uint8_t* block, int64_t group, int64_t part) {
  if (kLayout == kPairs) block += group / 2 * 32;
  const FourWords words = load_words(block + (kLayout == kHalves ? 0 : part * 16));
  if (kLayout == kSigned) return words ^ 0x80808080u;
  if (kLayout == kNumbers) return words;
  return words >> (kLayout == kHalves ? part : group % 2) * 4 & 0x0f0f0f0fu;
}

// Float16 [outputs, groups]; null: none.
struct Factors {
  const uint16_t* first;
  int64_t row_stride, stride;

  uint16_t at(int64_t row, int64_t group) const { return first[row * row_stride + group * stride]; }
};

struct StoredGroups {
  const uint8_t* numbers;
  int64_t row_stride, block_stride;
  Factors scales, offsets;
};

// A part of the weight: 32 outputs; those beyond the last are zero.
template <Layout kLayout>
void pack_panel(const QuantizedLinearArgs& a, const StoredGroups& stored, int64_t panel) {
  constexpr int64_t kGroups = kLayout == kPairs ? 8 : 1;
  const int64_t row_words = a.bits * 4, first = panel * kLinearPanel;
  const int64_t rows = std::min(a.out_features - first, kLinearPanel);
  uint8_t* to = static_cast<uint8_t*>(a.out) + panel * a.panel_bytes;
  for (int64_t g = 0; g < a.num_groups; ++g, to += a.group_bytes) {
    const uint8_t* blocks =
        stored.numbers + first * stored.row_stride + g / kGroups * stored.block_stride;
    const auto numbers_of = [&](int64_t lane, int64_t part) {
      return lane < rows ? numbers_at<kLayout>(blocks + lane * stored.row_stride, g % kGroups, part)
                         : FourWords{};
    };
    uint32_t* words = reinterpret_cast<uint32_t*>(to);
    for (int64_t part = 0; part < a.group_size / 16; ++part, words += 4 * row_words)
      for (int64_t lane = 0; lane < row_words; lane += 4) {
        FourWords lanes[4];
        for (int64_t i = 0; i < 4; ++i) {
          lanes[i] = numbers_of(lane + i, part);
          if (a.bits == 4) lanes[i] |= numbers_of(lane + i + 16, part) << 4;
        }
        store_transposed(words + lane, row_words, lanes);
      }
    uint16_t* factors = reinterpret_cast<uint16_t*>(words);
    for (int64_t lane = 0; lane < kLinearPanel; ++lane) {
      factors[lane] = lane < rows ? stored.scales.at(first + lane, g) : 0;
      if (stored.offsets.first != nullptr)
        factors[kLinearPanel + lane] = lane < rows ? stored.offsets.at(first + lane, g) : 0;
    }
  }
}

void pack_groups(const Tensor& packed, const Tensor& numbers, const Tensor& scales,
                 const Optional<Tensor>& offsets, int64_t bits, int64_t group_size,
                 int64_t layout) {
  const char* op = "pack_groups";
  check_dim(op, "numbers", numbers, 3);
  check_dtype(op, "numbers", numbers, aoti_torch_dtype_uint8());
  check_packed(op, "numbers", numbers, 2);
  QuantizedLinearArgs args = {};
  args.out_features = numbers.size(0);
  const auto take_factors = [&](const char* name, const Tensor& factors) {
    check_dim(op, name, factors, 2);
    check_dtype(op, name, factors, aoti_torch_dtype_float16());
    check_size(op, name, factors, 0, args.out_features);
    check_size(op, name, factors, 1, scales.size(1));
    return Factors{factors.data<uint16_t>(), factors.stride(0), factors.stride(1)};
  };
  StoredGroups stored = {numbers.data<uint8_t>(),
                         numbers.stride(0),
                         numbers.stride(1),
                         take_factors("scales", scales),
                         {}};
  if (offsets) stored.offsets = take_factors("offsets", *offsets);
  args.in_features = scales.size(1) * group_size;
  take_format(op, args, packed, bits, group_size, offsets ? 1 : 0);
  const bool is_of_nibbles = layout == kHalves || layout == kPairs;
  const bool fits = is_of_nibbles ? bits == 4 && group_size == 32 : bits == 8 || layout == kNumbers;
  if (layout < 0 || layout >= kNumLayouts || !fits) {
    fail(op, "layout is " + std::to_string(layout) + " with bits = " + std::to_string(bits) +
                 " and group_size = " + std::to_string(group_size) +
                 "; expected 0, in 8 bits 1, or in 4 bits with groups of 32 also 2 or 3");
  }
  const int64_t groups = layout == kPairs ? 8 : 1;  // of a block
  check_size(op, "numbers", numbers, 1, (args.num_groups + groups - 1) / groups);
  check_size(op, "numbers", numbers, 2, group_size * groups / (is_of_nibbles ? 2 : 1));
  args.out = packed.raw();
  constexpr decltype(&pack_panel<kNumbers>) kPackPanel[] = {
      pack_panel<kNumbers>, pack_panel<kSigned>, pack_panel<kHalves>, pack_panel<kPairs>};
  parallel_for(args.num_panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) kPackPanel[layout](args, stored, panel);
  });
}

float half_at(const uint8_t* p) { return half_to_float(*reinterpret_cast<const uint16_t*>(p)); }

// A block of 256 numbers in eight groups of 32: two factors, scales and minima in 6 bits, the fifth
// bits of the numbers, and four bits of each.
void dequantize_q5_k(const uint8_t* block, float* to) {
  const uint8_t *six = block + 4, *high = block + 16, *low = block + 48;
  for (int g = 0; g < 8; ++g, to += 32) {
    const uint8_t *a = six + g % 4, *b = a + 4, *c = a + 8;
    const int scale = g < 4 ? *a & 63 : (*c & 15) | *a >> 6 << 4;
    const int minimum = g < 4 ? *b & 63 : *c >> 4 | *b >> 6 << 4;
    const float step = half_at(block) * static_cast<float>(scale);
    const float least = half_at(block + 2) * static_cast<float>(minimum);
    for (int i = 0; i < 32; ++i) {
      const int q = (low[g / 2 * 32 + i] >> g % 2 * 4 & 15) | (high[i] >> g & 1) << 4;
      to[i] = step * static_cast<float>(q) - least;
    }
  }
}

// 16 groups of 16: four bits of each number, two more, scales in 8 bits, and their factor.
void dequantize_q6_k(const uint8_t* block, float* to) {
  const float factor = half_at(block + 208);
  for (int part = 0; part < 8; ++part, to += 32) {
    const uint8_t* low = block + part / 4 * 64 + part % 2 * 32;
    const uint8_t* high = block + 128 + part / 4 * 32;
    const int low_shift = part % 4 / 2 * 4, high_shift = part % 4 * 2;
    const int8_t* scales = reinterpret_cast<const int8_t*>(block + 192 + part * 2);
    for (int i = 0; i < 32; ++i) {
      const int q = (low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4;
      to[i] = factor * static_cast<float>(scales[i / 16]) * static_cast<float>(q - 32);
    }
  }
}

void dequantize_blocks(const Tensor& out, const Tensor& blocks, int64_t type) {
  const char* op = "dequantize_blocks";
  if (type != 13 && type != 14) fail(op, "type is " + std::to_string(type) + "; expected 13 or 14");
  const auto dequantize = type == 13 ? dequantize_q5_k : dequantize_q6_k;
  check_dim(op, "blocks", blocks, 3);
  check_dtype(op, "blocks", blocks, aoti_torch_dtype_uint8());
  check_size(op, "blocks", blocks, 2, type == 13 ? 176 : 210);
  check_packed(op, "blocks", blocks, 2);
  const int64_t per_row = blocks.size(1);
  check_tensor(op, "out", out, aoti_torch_dtype_float32(), {blocks.size(0), per_row * 256});
  parallel_for(blocks.size(0) * per_row, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      dequantize(
          blocks.data<uint8_t>() + i / per_row * blocks.stride(0) + i % per_row * blocks.stride(1),
          out.data<float>() + i * 256);
  });
}

constexpr int64_t kMostVectorBytes = 64;

// Memory for a set of rounded rows.
class RowScratch {
 public:
  QuantizedRows take(const QuantizedLinearArgs& args) {
    return {bytes_.take(args.num_rows * args.row_bytes() + kMostVectorBytes),
            starts_.take(args.num_rows * args.num_groups), scales_.take(args.num_rows),
            outliers_.take(args.num_rows * args.num_outliers), nullptr};
  }

 private:
  Scratch<int8_t> bytes_;
  Scratch<int32_t> starts_;
  Scratch<float> scales_;
  Scratch<OutlierFour> outliers_;
};

// Rounds rows once for all threads, each a part. A thread that waits has left no part: it waits
// only for threads that are at work on one.
class SharedRounding {
 public:
  void run(const QuantizedLinearArgs& args) {
    const int64_t parts = args.num_parts();
    for (int64_t i; (i = next_.fetch_add(1)) < parts;) {
      kernels().quantize_rows(args, i, i + 1);
      done_.fetch_add(1, std::memory_order_release);
    }
    for (int spins = 0; done_.load(std::memory_order_acquire) < parts; ++spins)
      if (spins > kSpins) sched_yield();
  }

 private:
  static constexpr int kSpins = 1000;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> done_{0};
};

void multiply_set(QuantizedLinearArgs args) {
  int64_t most = args.is_whole() ? kernels().whole_rows : kernels().quantized_rows;
  if (kernels().tile_rows > 0 && args.num_rows >= kernels().tile_rows) {
    args.tile_inputs = args.num_groups == 1 || args.group_size % 64 == 0 ? 64 : 32;
    most = kTileBlockRows;
  }
  args.num_blocks = (args.num_rows + most - 1) / most;
  static thread_local RowScratch shared_memory;
  const bool is_alone = args.num_rows <= kRowsRoundedAlone;
  if (!is_alone) args.rows = shared_memory.take(args);
  SharedRounding rounding;
  const auto start = [&] {
    QuantizedLinearArgs mine = args;
    static thread_local RowScratch own_memory;
    static thread_local Scratch<float> maxima;
    if (is_alone) mine.rows = own_memory.take(mine);
    mine.rows.maxima = maxima.take(mine.row_bytes() / 4 + kMostVectorBytes);
    if (is_alone) {
      kernels().quantize_rows(mine, 0, mine.num_parts());
    } else {
      rounding.run(mine);
    }
    return [mine](PanelRange now, PanelRange next) { kernels().quantized_linear(mine, now, next); };
  };
  for_each_panel_group(args.num_rows, args.in_features, args.num_panels, args.panel_bytes, start);
}

void quantized_linear(const Tensor& out, const Tensor& x, const Tensor& packed,
                      const Optional<Tensor>& bias, int64_t bits, int64_t group_size,
                      int64_t offsets) {
  const char* op = "quantized_linear";
  QuantizedLinearArgs args = {};
  take_rows(op, args, out, x, bias);
  take_format(op, args, packed, bits, group_size, offsets);
  const int64_t element = bytes_of(args.dtype), rows = args.num_rows;
  const int64_t sets = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  char* const all_out = static_cast<char*>(args.out);
  const char* const all_x = static_cast<const char*>(args.x);
  for (int64_t set = 0; set < sets; ++set) {
    const int64_t first = rows * set / sets;
    args.num_rows = rows * (set + 1) / sets - first;
    args.out = all_out + first * args.out_stride * element;
    args.x = all_x + first * args.x_stride * element;
    multiply_set(args);
  }
}

// Row `row` of the weight times `scale`.
void dequantize_row(const QuantizedLinearArgs& a, int64_t row, float scale, void* out) {
  const int64_t lane = row % kLinearPanel, step_bytes = a.bits * 16;
  const bool has_offsets = a.offsets != Offsets::kNone;
  const uint8_t* group = a.packed + row / kLinearPanel * a.panel_bytes;
  for (int64_t k = 0; k < a.in_features; ++k) {
    const int64_t i = k % a.group_size;
    if (k > 0 && i == 0) group += a.group_bytes;
    const uint8_t* tail = group + a.group_size / 4 * step_bytes;
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(tail) + lane;
    const float offset = has_offsets ? half_to_float(scales[kLinearPanel]) : 0.f;
    const uint8_t* step = group + i / 4 * step_bytes;
    const int q = a.bits == 8 ? step[lane * 4 + i % 4]
                              : step[lane % 16 * 4 + i % 4] >> (lane < 16 ? 0 : 4) & 15;
    const float middle = static_cast<float>(1 << (a.bits - 1));
    const float zero = a.offsets == Offsets::kNone ? middle : offset;
    const float weight = a.offsets == Offsets::kMinima
                             ? fmaf(static_cast<float>(q), half_to_float(scales[0]), offset)
                             : (static_cast<float>(q) - zero) * half_to_float(scales[0]);
    put_number(a.dtype, out, k, weight * scale);
  }
}

void quantized_embedding(const Tensor& out, const Tensor& packed, const Tensor& token_ids,
                         int64_t num_embeddings, int64_t bits, int64_t group_size, int64_t offsets,
                         double scale, const Optional<int64_t>& first) {
  const char* op = "quantized_embedding";
  QuantizedLinearArgs args = {};
  args.dtype = element_type(op, "out", out);
  check_shape(op, "out", out, {kAnySize, kAnySize}, 1);
  const int64_t count = out.size(0), element = bytes_of(args.dtype);
  args.in_features = out.size(1);
  args.out_features = num_embeddings;
  take_format(op, args, packed, bits, group_size, offsets);
  check_token_ids(op, token_ids, count, num_embeddings, first);
  const int32_t* ids = token_ids.data<int32_t>();
  const int64_t start = first ? *first : 0;
  char* to = out.data<char>();
  parallel_for(count, row_grain(args.in_features * 4), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t id = ids[i] - start;
      char* row = to + i * out.stride(0) * element;
      if (id < 0 || id >= num_embeddings)
        std::memset(row, 0, static_cast<size_t>(args.in_features * element));
      else
        dequantize_row(args, id, static_cast<float>(scale), row);
    }
  });
}

}  // namespace

void register_quantized(TorchLibraryHandle library) {
  implement<&quantize_weight>(library, "quantize_weight");
  implement<&pack_groups>(library, "pack_groups");
  implement<&dequantize_blocks>(library, "dequantize_blocks");
  implement<&quantized_linear>(library, "quantized_linear");
  implement<&quantized_embedding>(library, "quantized_embedding");
}

}  // namespace tpengine::cpu
