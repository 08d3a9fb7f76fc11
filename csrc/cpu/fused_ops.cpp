// Launchers: norms, sums, activations with and without a gate.
#include <cmath>

#include "launch.h"

namespace tpengine::cpu {

namespace {

void check_like(const char* op, const char* name, const Tensor& tensor, const Tensor& x) {
  check_dtype(op, name, tensor, x.dtype());
  check_dim(op, name, tensor, x.dim());
  for (int i = 0; i < x.dim(); ++i) check_size(op, name, tensor, i, x.size(i));
  check_packed(op, name, tensor, static_cast<int>(x.dim()) - 1);
}

// True: the weight is float32, whatever x is.
bool check_norm_weight(const char* op, const Tensor& weight, const Tensor& x, int64_t size) {
  const bool is_float = weight.dtype() == aoti_torch_dtype_float32();
  check_vector(op, "weight", weight, is_float ? weight.dtype() : x.dtype(), size);
  return is_float;
}

void launch_norm(const NormArgs& args, int64_t num_tokens) {
  const auto kernel = kernels().norm;
  parallel_for(num_tokens * args.heads_per_token, row_grain(args.size),
               [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void rms_norm(const Tensor& out, const Tensor& x, const Tensor& weight, double eps) {
  const char* op = "rms_norm";
  const DType dtype = element_type(op, "x", x);
  if (x.dim() != 2 && x.dim() != 3) {
    fail(op, "x has shape " + shape_name(x) +
                 "; expected [num_tokens, size] or [num_tokens, num_heads, size]");
  }
  check_packed(op, "x", x, static_cast<int>(x.dim()) - 1);
  check_like(op, "out", out, x);
  const bool heads = x.dim() == 3;
  const int64_t size = x.size(heads ? 2 : 1);
  const bool float_weight = check_norm_weight(op, weight, x, size);
  const NormArgs args = {dtype,
                         out.raw(),
                         x.raw(),
                         nullptr,
                         weight.raw(),
                         float_weight,
                         heads ? x.size(1) : 1,
                         size,
                         out.stride(0),
                         heads ? out.stride(1) : 0,
                         x.stride(0),
                         heads ? x.stride(1) : 0,
                         0,
                         static_cast<float>(eps)};
  launch_norm(args, x.size(0));
}

void add_rms_norm(const Tensor& out, const Tensor& x, const Tensor& residual, const Tensor& weight,
                  double eps) {
  const char* op = "add_rms_norm";
  const DType dtype = element_type(op, "x", x);
  check_dim(op, "x", x, 2);
  check_packed(op, "x", x, 1);
  check_like(op, "out", out, x);
  check_like(op, "residual", residual, x);
  const bool float_weight = check_norm_weight(op, weight, x, x.size(1));
  const NormArgs args = {dtype,
                         out.raw(),
                         x.raw(),
                         residual.raw(),
                         weight.raw(),
                         float_weight,
                         1,
                         x.size(1),
                         out.stride(0),
                         0,
                         x.stride(0),
                         0,
                         residual.stride(0),
                         static_cast<float>(eps)};
  launch_norm(args, x.size(0));
}

void launch_layer_norm(const char* op, const Tensor& out, const Tensor& x, const Tensor* residual,
                       const Optional<Tensor>& weight, const Optional<Tensor>& bias, double eps) {
  const DType dtype = element_type(op, "x", x);
  check_dim(op, "x", x, 2);
  check_packed(op, "x", x, 1);
  check_like(op, "out", out, x);
  if (residual != nullptr) check_like(op, "residual", *residual, x);
  if (weight) check_vector(op, "weight", *weight, x.dtype(), x.size(1));
  if (bias) check_vector(op, "bias", *bias, x.dtype(), x.size(1));
  const LayerNormArgs args = {dtype,
                              out.raw(),
                              x.raw(),
                              residual != nullptr ? residual->raw() : nullptr,
                              weight ? weight->raw() : nullptr,
                              bias ? bias->raw() : nullptr,
                              x.size(1),
                              out.stride(0),
                              x.stride(0),
                              residual != nullptr ? residual->stride(0) : 0,
                              static_cast<float>(eps)};
  const auto kernel = kernels().layer_norm;
  parallel_for(x.size(0), row_grain(x.size(1)),
               [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
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
  const auto kernel = kernels().sum_parts;
  const int64_t element_grain = row_grain(0);
  parallel_for(x.size(0) * x.size(1), element_grain,
               [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void add_gated(const Tensor& total, const Tensor& x, const Tensor& gate) {
  const char* op = "add_gated";
  const DType dtype = element_type(op, "x", x);
  check_dim(op, "x", x, 2);
  check_packed(op, "x", x, 1);
  check_like(op, "total", total, x);
  check_dtype(op, "gate", gate, x.dtype());
  check_dim(op, "gate", gate, 2);
  check_size(op, "gate", gate, 0, x.size(0));
  check_size(op, "gate", gate, 1, 1);
  const int64_t element = dtype == DType::kFloat32 ? 4 : 2, size = x.size(1);
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

void launch_activation(const ActivationArgs& args, int64_t num_rows) {
  const auto kernel = kernels().activation;
  parallel_for(num_rows, row_grain(args.size * (args.gated ? 2 : 1)),
               [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void activate(const char* op, Activation activation, const Tensor& x) {
  const DType dtype = element_type(op, "x", x);
  check_dim(op, "x", x, 2);
  check_packed(op, "x", x, 1);
  const bool gated = false;
  launch_activation(
      {dtype, activation, gated, x.raw(), x.raw(), x.size(1), x.stride(0), x.stride(0)}, x.size(0));
}

void relu(const Tensor& x) { activate("relu", Activation::kRelu, x); }
void silu(const Tensor& x) { activate("silu", Activation::kSilu, x); }
void gelu(const Tensor& x) { activate("gelu", Activation::kGelu, x); }
void gelu_tanh(const Tensor& x) { activate("gelu_tanh", Activation::kGeluTanh, x); }

void gate(const char* op, Activation activation, const Tensor& out, const Tensor& x) {
  const DType dtype = element_type(op, "x", x);
  check_dtype(op, "out", out, x.dtype());
  check_dim(op, "x", x, 2);
  check_dim(op, "out", out, 2);
  check_size(op, "out", out, 0, x.size(0));
  check_size(op, "x", x, 1, 2 * out.size(1));
  check_packed(op, "x", x, 1);
  check_packed(op, "out", out, 1);
  const bool gated = true;
  launch_activation(
      {dtype, activation, gated, out.raw(), x.raw(), out.size(1), out.stride(0), x.stride(0)},
      x.size(0));
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
