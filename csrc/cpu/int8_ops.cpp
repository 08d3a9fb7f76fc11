// Launcher: int8_linear.
#include <memory>

#include "panels.h"

namespace tpengine::cpu {
namespace {

void int8_linear(Tensor out, Tensor x, Tensor packed, Tensor weight_scales, Tensor weight_sums,
                 Optional<Tensor> bias) {
  const char* op = "int8_linear";
  Int8LinearArgs args = {};
  args.dtype = element_type(op, "x", x);
  check_dim(op, "x", x, 2);
  check_packed(op, "x", x, 1);
  check_dtype(op, "out", out, x.dtype());
  check_dim(op, "out", out, 2);
  check_size(op, "out", out, 0, x.size(0));
  check_packed(op, "out", out, 1);
  args.num_rows = x.size(0);
  args.in_features = x.size(1);
  args.out_features = out.size(1);
  if (args.in_features % 4 != 0) {
    fail(op, "x has shape " + shape_name(x) + "; expected a multiple of 4 inputs");
  }
  const int64_t panels = (args.out_features + kLinearPanel - 1) / kLinearPanel;
  check_vector(op, "packed", packed, aoti_torch_dtype_int8(),
               panels * kLinearPanel * args.in_features);
  check_vector(op, "weight_scales", weight_scales, aoti_torch_dtype_float32(), args.out_features);
  check_vector(op, "weight_sums", weight_sums, aoti_torch_dtype_int32(), args.out_features);
  if (bias) check_vector(op, "bias", *bias, x.dtype(), args.out_features);
  if (args.num_rows == 0) return;
  // Left uninitialised: quantize_rows writes all of it.
  const std::unique_ptr<uint8_t[]> quantized(new uint8_t[args.num_rows * args.in_features]);
  const std::unique_ptr<float[]> x_scales(new float[args.num_rows]);
  args.out = out.raw();
  args.x = x.raw();
  args.quantized = quantized.get();
  args.x_scales = x_scales.get();
  args.packed = packed.data<int8_t>();
  args.weight_scales = weight_scales.data<float>();
  args.weight_sums = weight_sums.data<int32_t>();
  args.bias = bias ? bias->raw() : nullptr;
  args.out_stride = out.stride(0);
  args.x_stride = x.stride(0);
  const Kernels& table = kernels();
  parallel_for(args.num_rows, row_grain(args.in_features),
               [&](int64_t begin, int64_t end) { table.quantize_rows(args, begin, end); });
  for_each_panel_group(args.num_rows, args.in_features, panels, kLinearPanel * args.in_features,
                       [&](int64_t first, int64_t end) { table.int8_linear(args, first, end); });
}

}  // namespace

void register_int8(TorchLibraryHandle library) { implement<&int8_linear>(library, "int8_linear"); }

}  // namespace tpengine::cpu
