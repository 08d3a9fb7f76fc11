// Launcher: int8_linear.
#include "panels.h"

namespace tpengine::cpu {
namespace {

void int8_linear(const Tensor& out, const Tensor& x, const Tensor& packed,
                 const Tensor& weight_scales, const Tensor& weight_offsets,
                 const Optional<Tensor>& bias) {
  const char* op = "int8_linear";
  Int8LinearArgs args = {};
  take_rows(op, args, out, x, bias);
  if (args.in_features % 4 != 0) {
    fail(op, "x has shape " + shape_name(x) + "; expected a multiple of 4 inputs");
  }
  const int64_t panels = num_panels(args.out_features);
  check_vector(op, "packed", packed, aoti_torch_dtype_int8(),
               panels * kLinearPanel * args.in_features);
  check_vector(op, "weight_scales", weight_scales, aoti_torch_dtype_float32(), args.out_features);
  check_vector(op, "weight_offsets", weight_offsets, aoti_torch_dtype_int32(), args.out_features);
  if (args.num_rows == 0) return;
  static thread_local Scratch<uint8_t> quantized;
  static thread_local Scratch<float> x_scales;
  args.quantized = quantized.take(args.num_rows * args.in_features);
  args.x_scales = x_scales.take(args.num_rows);
  args.packed = packed.data<int8_t>();
  args.weight_scales = weight_scales.data<float>();
  args.weight_offsets = weight_offsets.data<int32_t>();
  const Kernels& table = kernels();
  parallel_for(args.num_rows, row_grain(args.in_features),
               [&](int64_t begin, int64_t end) { table.quantize_rows(args, begin, end); });
  for_each_panel_group(
      args.num_rows, args.in_features, panels, kLinearPanel * args.in_features,
      [&](PanelRange now, PanelRange next) { table.int8_linear(args, now, next); });
}

}  // namespace

void register_int8(TorchLibraryHandle library) { implement<&int8_linear>(library, "int8_linear"); }

}  // namespace tpengine::cpu
