// Launchers: pack_linear_weight and packed_linear.
#include "panels.h"

namespace tpengine::cpu {
namespace {

int64_t pack_of(DType dtype) { return dtype == DType::kBFloat16 ? 2 : 1; }

void check_in_features(const char* op, int64_t in_features, DType dtype) {
  if (in_features % pack_of(dtype) != 0) {
    fail(op, "the weight has " + std::to_string(in_features) +
                 " inputs; expected an even number in bfloat16");
  }
}

template <class T>
void pack(T* packed, const T* weight, int64_t outputs, int64_t inputs, int64_t p, int64_t begin,
          int64_t end) {
  for (int64_t panel = begin; panel < end; ++panel) {
    T* dst = packed + panel * kLinearPanel * inputs;
    for (int64_t k = 0; k < inputs; k += p)
      for (int64_t n = panel * kLinearPanel; n < (panel + 1) * kLinearPanel; ++n)
        for (int64_t i = 0; i < p; ++i) *dst++ = n < outputs ? weight[n * inputs + k + i] : T{0};
  }
}

void pack_linear_weight(Tensor packed, Tensor weight) {
  const char* op = "pack_linear_weight";
  const DType dtype = element_type(op, "weight", weight);
  check_dim(op, "weight", weight, 2);
  check_packed(op, "weight", weight);
  const int64_t outputs = weight.size(0), inputs = weight.size(1), p = pack_of(dtype);
  check_in_features(op, inputs, dtype);
  const int64_t panels = (outputs + kLinearPanel - 1) / kLinearPanel;
  check_vector(op, "packed", packed, weight.dtype(), panels * kLinearPanel * inputs);
  parallel_for(panels, 1, [&](int64_t begin, int64_t end) {
    if (dtype == DType::kBFloat16)
      pack(packed.data<uint16_t>(), weight.data<uint16_t>(), outputs, inputs, p, begin, end);
    else
      pack(packed.data<float>(), weight.data<float>(), outputs, inputs, p, begin, end);
  });
}

void packed_linear(Tensor out, Tensor x, Tensor packed, Optional<Tensor> bias) {
  const char* op = "packed_linear";
  LinearArgs args = {};
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
  check_in_features(op, args.in_features, args.dtype);
  const int64_t panels = (args.out_features + kLinearPanel - 1) / kLinearPanel;
  check_vector(op, "packed", packed, x.dtype(), panels * kLinearPanel * args.in_features);
  if (bias) check_vector(op, "bias", *bias, x.dtype(), args.out_features);
  args.out = out.raw();
  args.x = x.raw();
  args.packed = packed.raw();
  args.bias = bias ? bias->raw() : nullptr;
  args.out_stride = out.stride(0);
  args.x_stride = x.stride(0);
  if (args.num_rows == 0) return;

  const auto kernel = kernels().linear;
  const int64_t panel_bytes =
      kLinearPanel * args.in_features * (args.dtype == DType::kBFloat16 ? 2 : 4);
  for_each_panel_group(args.num_rows, args.in_features, panels, panel_bytes,
                       [&](int64_t first, int64_t end) { kernel(args, first, end); });
}

}  // namespace

void register_linear(TorchLibraryHandle library) {
  implement<&pack_linear_weight>(library, "pack_linear_weight");
  implement<&packed_linear>(library, "packed_linear");
}

}  // namespace tpengine::cpu
