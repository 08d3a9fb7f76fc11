// Launchers: pack_linear_weight and packed_linear.
#include "panels.h"
#include "transpose.h"

namespace tpengine::cpu {
namespace {

// A word is a pair of bfloat16, or a float.
constexpr int64_t kWordBytes = 4, kLineWords = 16;

// Rows may lie whole pages apart, where all have one place in L1: of four rows a line is used up
// before the next rows.
void pack_panel(char* to, const char* rows, int64_t num_rows, int64_t words) {
  for (int64_t first = 0; first < words; first += kLineWords)
    for (int64_t n = 0; n < kLinearPanel; n += 4)
      for (int64_t k = first; k < std::min(words, first + kLineWords); k += 4) {
        const char* const from = rows + (n * words + k) * kWordBytes;
        char* const place = to + (k * kLinearPanel + n) * kWordBytes;
        if (std::min(words - k, num_rows - n) >= 4) {
          FourWords lanes[4];
          for (int64_t i = 0; i < 4; ++i) lanes[i] = load_words(from + i * words * kWordBytes);
          store_transposed(place, kLinearPanel, lanes);
          continue;
        }
        for (int64_t i = 0; i < 4 * std::min<int64_t>(words - k, 4); ++i) {
          uint32_t word = 0;
          if (n + i % 4 < num_rows)
            std::memcpy(&word, from + (i % 4 * words + i / 4) * kWordBytes, kWordBytes);
          std::memcpy(place + (i / 4 * kLinearPanel + i % 4) * kWordBytes, &word, kWordBytes);
        }
      }
}

void pack_linear_weight(const Tensor& packed, const Tensor& weight) {
  const char* op = "pack_linear_weight";
  const DType dtype = element_type(op, "weight", weight);
  check_shape(op, "weight", weight, {kAnySize, kAnySize});
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  check_in_features(op, inputs, dtype);
  const int64_t panels = num_panels(outputs), words = inputs / pack_of(dtype);
  check_tensor(op, "packed", packed, weight.dtype(), {panels * kLinearPanel * inputs});
  parallel_for(panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * kLinearPanel, row_bytes = words * kWordBytes;
      pack_panel(static_cast<char*>(packed.raw()) + first * row_bytes,
                 static_cast<const char*>(weight.raw()) + first * row_bytes,
                 std::min(outputs - first, kLinearPanel), words);
    }
  });
}

// Rows that pass over a panel before the next panel does. Tiles multiply faster than L3 delivers
// rows, so that a set of them has to stay in L2: of 2,048 rows a product takes 0.7 of the time.
// Inputs that are widened take twice their memory: of a set at a time.
int64_t rows_at_once(const LinearArgs& args) {
  constexpr int64_t kSetBytes = 768 * 1024, kWidenedRows = 512;
  if (args.dtype != DType::kBFloat16) return args.num_rows;
  if (kernels().takes_floats) return kWidenedRows;
  if (kernels().tile_rows == 0) return args.num_rows;
  const int64_t blocks = kSetBytes / (2 * args.in_features + 1) / kTileBlockRows;
  return std::max<int64_t>(blocks, 4) * kTileBlockRows;
}

void packed_linear(const Tensor& out, const Tensor& x, const Tensor& packed,
                   const Optional<Tensor>& bias) {
  const char* op = "packed_linear";
  LinearArgs args = {};
  take_rows(op, args, out, x, bias);
  check_in_features(op, args.in_features, args.dtype);
  const int64_t panels = num_panels(args.out_features);
  check_tensor(op, "packed", packed, x.dtype(), {panels * kLinearPanel * args.in_features});
  args.packed = packed.raw();
  if (args.num_rows == 0) return;

  const auto kernel = kernels().linear;
  const int64_t element = bytes_of(args.dtype), most = rows_at_once(args);
  for (int64_t first = 0; first < args.num_rows; first += most) {
    LinearArgs set = args;
    set.num_rows = std::min(args.num_rows - first, most);
    set.out = static_cast<char*>(args.out) + first * args.out_stride * element;
    set.x = static_cast<const char*>(args.x) + first * args.x_stride * element;
    widen_inputs(set);
    for_each_panel_group(set.num_rows, set.in_features, panels,
                         kLinearPanel * set.in_features * element,
                         [&](PanelRange now, PanelRange next) { kernel(set, now, next); });
  }
}

}  // namespace

void register_linear(TorchLibraryHandle library) {
  implement<&pack_linear_weight>(library, "pack_linear_weight");
  implement<&packed_linear>(library, "packed_linear");
}

}  // namespace tpengine::cpu
