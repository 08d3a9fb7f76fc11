// Launchers: weight_only_linear and dequantize_weight.
#include "launch.h"
#include "quantized/dequantize.cuh"
#include "quantized/linear.cuh"

namespace tpengine::cuda {
namespace {

// CUDA's limit on the second dimension of a grid.
constexpr int64_t kMostPanels = 65535;

PackedWeight check_weight(const char* op, const Tensor& packed, int64_t outputs, int64_t inputs,
                          int64_t bits, int64_t group_size, int64_t offsets) {
  if (bits != 4 && bits != 8) {
    fail(op, "bits is " + std::to_string(bits) + "; expected 4 or 8");
  }
  if (group_size < kStep || group_size % kStep != 0) {
    fail(op, "group_size is " + std::to_string(group_size) + "; expected a multiple of 32");
  }
  if (offsets < 0 || offsets > 2) {
    fail(op, "offsets is " + std::to_string(offsets) +
                 "; expected 0 (none), 1 (zero points) or 2 (minima)");
  }
  const int64_t panels = (outputs + kPanel - 1) / kPanel, steps = (inputs + kStep - 1) / kStep;
  const int64_t groups = (inputs + group_size - 1) / group_size;
  check_at_most(op, "the number of outputs", panels, kMostPanels);
  check_at_most(op, "the number of inputs", inputs, INT32_MAX - kStep);
  const int64_t numbers = panels * steps * kStep * kPanel * bits / 8;
  const int64_t factors = panels * groups * kPanel * (offsets == 0 ? 2 : 4);
  check_tensor(op, "packed", packed, aoti_torch_dtype_uint8(), {numbers + factors});
  if (!is_aligned(packed.raw(), 16)) fail(op, "packed does not begin at a multiple of 16 bytes");
  return {packed.raw(),
          static_cast<int>(panels),
          static_cast<int>(steps),
          static_cast<int>(groups),
          static_cast<int>(group_size / kStep),
          static_cast<Offsets>(offsets)};
}

void weight_only_linear(Tensor out, Tensor x, Tensor packed, Optional<Tensor> bias, int64_t bits,
                        int64_t group_size, int64_t offsets) {
  const char* op = "weight_only_linear";
  check_rows(op, out, x);
  if (x.size(1) % 8 != 0 || x.stride(0) % 8 != 0 || !is_aligned(x.raw(), 16)) {
    fail(op, "x has shape " + shape_name(x) + " and row stride " + std::to_string(x.stride(0)) +
                 "; expected rows of a multiple of 8 inputs, aligned to 16 bytes");
  }
  check_at_most(op, "the number of rows", x.size(0), INT32_MAX / 2);
  const PackedWeight weight =
      check_weight(op, packed, out.size(1), x.size(1), bits, group_size, offsets);
  if (bias) check_tensor(op, "bias", *bias, x.dtype(), {out.size(1)});
  const WeightOnlyArgs args = {out.raw(),
                               x.raw(),
                               bias ? bias->raw() : nullptr,
                               weight,
                               out.stride(0),
                               x.stride(0),
                               static_cast<int>(x.size(0)),
                               static_cast<int>(out.size(1)),
                               static_cast<int>(x.size(1)),
                               1};
  const Device device(x);
  if (x.dtype() == aoti_torch_dtype_bfloat16()) {
    launch_weight_only<__nv_bfloat16>(args, static_cast<int>(bits), device.stream());
  } else if (x.dtype() == aoti_torch_dtype_float16()) {
    launch_weight_only<__half>(args, static_cast<int>(bits), device.stream());
  } else {
    fail(op, "x is " + dtype_name(x.dtype()) + "; expected float16 or bfloat16");
  }
  check_launch(op);
}

void dequantize_weight(Tensor out, Tensor packed, int64_t first_output, int64_t out_features,
                       int64_t bits, int64_t group_size, int64_t offsets) {
  const char* op = "dequantize_weight";
  check_shape(op, "out", out, {kAnySize, kAnySize});
  const PackedWeight weight =
      check_weight(op, packed, out_features, out.size(1), bits, group_size, offsets);
  const int64_t rows = out.size(0), first_panel = first_output / kPanel;
  if (rows % kPanel != 0 || out.size(1) % kStep != 0 || !is_aligned(out.raw(), 32)) {
    fail(op, "out has shape " + shape_name(out) +
                 "; expected multiples of 32, beginning at a multiple of 32 bytes");
  }
  if (first_output < 0 || first_output % kPanel != 0 ||
      first_panel + rows / kPanel > weight.num_panels) {
    fail(op, "first_output is " + std::to_string(first_output) + " for " + std::to_string(rows) +
                 " rows; expected a multiple of 32 within the " + std::to_string(out_features) +
                 " outputs");
  }
  const DequantizeArgs args = {out.raw(), weight, static_cast<int>(first_panel)};
  const Device device(out);
  with_element_type(op, "out", out, [&](auto type) {
    launch_dequantize<decltype(type)>(args, static_cast<int>(bits), static_cast<int>(rows / kPanel),
                                      device.stream());
  });
  check_launch(op);
}

}  // namespace

void register_quantized(TorchLibraryHandle library) {
  implement<&weight_only_linear>(library, "weight_only_linear");
  implement<&dequantize_weight>(library, "dequantize_weight");
}

}  // namespace tpengine::cuda
