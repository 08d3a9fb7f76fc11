// Launchers: norms, sums, activations with and without a gate.
#include <cmath>

#include "launch.h"

namespace tpengine::cpu {

namespace {

// residual: null for a plain norm.
void launch_norm(const char* op, const Tensor& out, const Tensor& x, const Tensor* residual,
                 const Tensor& weight, double eps) {
  const DType dtype = element_type(op, "x", x);
  const int last = static_cast<int>(x.dim()) - 1;
  check_packed(op, "x", x, last);
  check_like(op, "out", out, x);
  if (residual != nullptr) check_like(op, "residual", *residual, x);
  const bool is_float = weight.dtype() == aoti_torch_dtype_float32();
  check_tensor(op, "weight", weight, is_float ? weight.dtype() : x.dtype(), {x.size(last)});
  const int64_t heads = last == 2 ? x.size(1) : 1;
  const Rows sums = residual != nullptr ? rows_of(*residual) : Rows{};
  const NormArgs args = {dtype, heads_of(out), heads_of(x),
                         sums,  weight.raw(),  is_float,
                         heads, x.size(last),  static_cast<float>(eps)};
  run_kernel(kernels().norm, args, x.size(0) * heads, row_grain(args.size));
}

void rms_norm(const Tensor& out, const Tensor& x, const Tensor& weight, double eps) {
  if (x.dim() != 2 && x.dim() != 3) {
    fail("rms_norm", "x has shape " + shape_name(x) +
                         "; expected [num_tokens, size] or [num_tokens, num_heads, size]");
  }
  launch_norm("rms_norm", out, x, nullptr, weight, eps);
}

void add_rms_norm(const Tensor& out, const Tensor& x, const Tensor& residual, const Tensor& weight,
                  double eps) {
  check_dim("add_rms_norm", "x", x, 2);
  launch_norm("add_rms_norm", out, x, &residual, weight, eps);
}

void launch_layer_norm(const char* op, const Tensor& out, const Tensor& x, const Tensor* residual,
                       const Optional<Tensor>& weight, const Optional<Tensor>& bias, double eps) {
  const DType dtype = element_type(op, "x", x);
  check_shape(op, "x", x, {kAnySize, kAnySize}, 1);
  check_like(op, "out", out, x);
  if (residual != nullptr) check_like(op, "residual", *residual, x);
  if (weight) check_tensor(op, "weight", *weight, x.dtype(), {x.size(1)});
  if (bias) check_tensor(op, "bias", *bias, x.dtype(), {x.size(1)});
  const Rows sums = residual != nullptr ? rows_of(*residual) : Rows{};
  const void* factors = weight ? weight->raw() : nullptr;
  const void* shifts = bias ? bias->raw() : nullptr;
  const LayerNormArgs args = {dtype,   rows_of(out), rows_of(x), sums,
                              factors, shifts,       x.size(1),  static_cast<float>(eps)};
  run_kernel(kernels().layer_norm, args, x.size(0), row_grain(args.size));
}

void layer_norm(const Tensor& out, const Tensor& x, const Optional<Tensor>& weight,
                const Optional<Tensor>& bias, double eps) {
  launch_layer_norm("layer_norm", out, x, nullptr, weight, bias, eps);
}

void add_layer_norm(const Tensor& out, const Tensor& x, const Tensor& residual,
                    const Optional<Tensor>& weight, const Optional<Tensor>& bias, double eps) {
  launch_layer_norm("add_layer_norm", out, x, &residual, weight, bias, eps);
}

void accumulate(const Tensor& total, const Tensor& x) {
  const char* op = "accumulate";
  const DType dtype = element_type(op, "x", x);
  check_dim(op, "x", x, 2);
  check_like(op, "total", total, x);
  check_packed(op, "x", x);
  check_packed(op, "total", total);
  const void* parts[] = {total.raw(), x.raw()};
  const SumArgs args = {dtype, total.raw(), parts, 2};
  const int64_t element_grain = row_grain(0);
  run_kernel(kernels().sum_parts, args, x.size(0) * x.size(1), element_grain);
}

void add_gated(const Tensor& total, const Tensor& x, const Tensor& gate) {
  const char* op = "add_gated";
  const DType dtype = element_type(op, "x", x);
  check_shape(op, "x", x, {kAnySize, kAnySize}, 1);
  check_like(op, "total", total, x);
  check_tensor(op, "gate", gate, x.dtype(), {x.size(0), 1}, 1);
  const int64_t element = bytes_of(dtype), size = x.size(1);
  const int64_t total_stride = total.stride(0) * element, x_stride = x.stride(0) * element;
  char* sums = total.data<char>();
  const char* inputs = x.data<char>();
  const void* gates = gate.raw();
  const auto kernel = kernels().sum_parts;
  parallel_for(x.size(0), row_grain(2 * size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float logit = number_at(dtype, gates, row * gate.stride(0));
      const void* parts[] = {sums + row * total_stride, inputs + row * x_stride};
      const float weights[] = {1.f, 1.f / (1.f + std::exp(-logit))};
      kernel({dtype, sums + row * total_stride, parts, 2, weights}, 0, size);
    }
  });
}

void activate(const char* op, Activation activation, const Tensor& x) {
  const DType dtype = element_type(op, "x", x);
  check_shape(op, "x", x, {kAnySize, kAnySize}, 1);
  const bool gated = false;
  const ActivationArgs args = {dtype, activation, gated, rows_of(x), rows_of(x), x.size(1)};
  run_kernel(kernels().activation, args, x.size(0), row_grain(args.size));
}

void relu(const Tensor& x) { activate("relu", Activation::kRelu, x); }
void silu(const Tensor& x) { activate("silu", Activation::kSilu, x); }
void gelu(const Tensor& x) { activate("gelu", Activation::kGelu, x); }
void gelu_tanh(const Tensor& x) { activate("gelu_tanh", Activation::kGeluTanh, x); }

void gate(const char* op, Activation activation, const Tensor& out, const Tensor& x) {
  const DType dtype = element_type(op, "x", x);
  check_rows(op, out, x);
  check_size(op, "x", x, 1, 2 * out.size(1));
  const bool gated = true;
  const ActivationArgs args = {dtype, activation, gated, rows_of(out), rows_of(x), out.size(1)};
  run_kernel(kernels().activation, args, x.size(0), row_grain(2 * args.size));
}

void silu_and_mul(const Tensor& out, const Tensor& x) {
  gate("silu_and_mul", Activation::kSilu, out, x);
}
void gelu_and_mul(const Tensor& out, const Tensor& x) {
  gate("gelu_and_mul", Activation::kGelu, out, x);
}
void gelu_tanh_and_mul(const Tensor& out, const Tensor& x) {
  gate("gelu_tanh_and_mul", Activation::kGeluTanh, out, x);
}

}  // namespace

void register_fused(TorchLibraryHandle library) {
  implement<&rms_norm>(library, "rms_norm");
  implement<&add_rms_norm>(library, "add_rms_norm");
  implement<&layer_norm>(library, "layer_norm");
  implement<&add_layer_norm>(library, "add_layer_norm");
  implement<&accumulate>(library, "accumulate");
  implement<&add_gated>(library, "add_gated");
  implement<&relu>(library, "relu");
  implement<&silu>(library, "silu");
  implement<&gelu>(library, "gelu");
  implement<&gelu_tanh>(library, "gelu_tanh");
  implement<&silu_and_mul>(library, "silu_and_mul");
  implement<&gelu_and_mul>(library, "gelu_and_mul");
  implement<&gelu_tanh_and_mul>(library, "gelu_tanh_and_mul");
}

}  // namespace tpengine::cpu
