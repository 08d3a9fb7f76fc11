// Launchers: rms_norm, add_rms_norm, the gated activations, rotary_embedding.
#include "launch.h"

namespace tpengine::cpu {

void check_positions(const char* op, const Tensor& positions, const Tensor& cos_sin_cache,
                     int64_t num_tokens, int64_t head_dim) {
  check_vector(op, "positions", positions, aoti_torch_dtype_int32(), num_tokens);
  check_dtype(op, "cos_sin_cache", cos_sin_cache, aoti_torch_dtype_float32());
  check_dim(op, "cos_sin_cache", cos_sin_cache, 2);
  check_packed(op, "cos_sin_cache", cos_sin_cache);
  const int64_t rotary_dim = cos_sin_cache.size(1), max_position = cos_sin_cache.size(0);
  check_at_most(op, "the rotary dimension (cos_sin_cache.size(1))", rotary_dim, head_dim);
  if (rotary_dim % 2 != 0) {
    fail(op, "the rotary dimension is " + std::to_string(rotary_dim) + "; expected an even one");
  }
  const int32_t* values = positions.data<int32_t>();
  for (int64_t i = 0; i < num_tokens; ++i) {
    if (values[i] < 0 || values[i] >= max_position) {
      fail(op, "positions[" + std::to_string(i) + "] is " + std::to_string(values[i]) +
                   "; cos_sin_cache has rows 0 to " + std::to_string(max_position - 1));
    }
  }
}

namespace {

void check_like(const char* op, const char* name, const Tensor& tensor, const Tensor& x) {
  check_dtype(op, name, tensor, x.dtype());
  check_dim(op, name, tensor, x.dim());
  for (int i = 0; i < x.dim(); ++i) check_size(op, name, tensor, i, x.size(i));
  check_packed(op, name, tensor, static_cast<int>(x.dim()) - 1);
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
  check_vector(op, "weight", weight, x.dtype(), size);
  const NormArgs args = {dtype,
                         out.raw(),
                         x.raw(),
                         nullptr,
                         weight.raw(),
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
  check_vector(op, "weight", weight, x.dtype(), x.size(1));
  const NormArgs args = {dtype,
                         out.raw(),
                         x.raw(),
                         residual.raw(),
                         weight.raw(),
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

void launch_activation(const char* op, Activation activation, const Tensor& out, const Tensor& x) {
  const DType dtype = element_type(op, "x", x);
  check_dtype(op, "out", out, x.dtype());
  check_dim(op, "x", x, 2);
  check_dim(op, "out", out, 2);
  check_size(op, "out", out, 0, x.size(0));
  check_size(op, "x", x, 1, 2 * out.size(1));
  check_packed(op, "x", x, 1);
  check_packed(op, "out", out, 1);
  const ActivationArgs args = {dtype,       activation,    out.raw(),  x.raw(),
                               out.size(1), out.stride(0), x.stride(0)};
  const auto kernel = kernels().activation;
  parallel_for(x.size(0), row_grain(x.size(1)),
               [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void silu_and_mul(const Tensor& out, const Tensor& x) {
  launch_activation("silu_and_mul", Activation::kSilu, out, x);
}
void gelu_and_mul(const Tensor& out, const Tensor& x) {
  launch_activation("gelu_and_mul", Activation::kGelu, out, x);
}
void gelu_tanh_and_mul(const Tensor& out, const Tensor& x) {
  launch_activation("gelu_tanh_and_mul", Activation::kGeluTanh, out, x);
}

void rotary_embedding(const Tensor& positions, const Tensor& q, const Tensor& k,
                      const Tensor& cos_sin_cache, bool is_neox) {
  const char* op = "rotary_embedding";
  const DType dtype = element_type(op, "q", q);
  check_dtype(op, "k", k, q.dtype());
  check_dim(op, "q", q, 3);
  check_dim(op, "k", k, 3);
  check_size(op, "k", k, 0, q.size(0));
  check_size(op, "k", k, 2, q.size(2));
  check_packed(op, "q", q, 2);
  check_packed(op, "k", k, 2);
  check_positions(op, positions, cos_sin_cache, q.size(0), q.size(2));
  const RotaryArgs args = {dtype,
                           positions.data<int32_t>(),
                           q.raw(),
                           k.raw(),
                           cos_sin_cache.data<float>(),
                           q.size(1),
                           k.size(1),
                           q.size(2),
                           cos_sin_cache.size(1),
                           q.stride(0),
                           q.stride(1),
                           k.stride(0),
                           k.stride(1),
                           is_neox};
  const auto kernel = kernels().rotary;
  parallel_for(q.size(0), row_grain((q.size(1) + k.size(1)) * q.size(2)),
               [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

}  // namespace

void register_fused(TorchLibraryHandle library) {
  implement<&rms_norm>(library, "rms_norm");
  implement<&add_rms_norm>(library, "add_rms_norm");
  implement<&silu_and_mul>(library, "silu_and_mul");
  implement<&gelu_and_mul>(library, "gelu_and_mul");
  implement<&gelu_tanh_and_mul>(library, "gelu_tanh_and_mul");
  implement<&rotary_embedding>(library, "rotary_embedding");
}

}  // namespace tpengine::cpu
