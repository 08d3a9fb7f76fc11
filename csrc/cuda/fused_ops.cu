// Launchers: rms_norm, add_rms_norm and the gated activations.
#include <initializer_list>

#include "fused/gated.cuh"
#include "fused/rms_norm.cuh"
#include "launch.h"

namespace tpengine::cuda {
namespace {

bool are_multiples(int64_t n, std::initializer_list<int64_t> sizes) {
  for (const int64_t size : sizes) {
    if (size % n != 0) return false;
  }
  return true;
}

void launch_norm(const char* op, const Tensor& out, const Tensor& x, void* residual,
                 int64_t residual_stride, const Tensor& weight, double eps) {
  const bool heads = x.dim() == 3;
  const int last = heads ? 2 : 1;
  check_packed(op, "x", x, last);
  check_like(op, "out", out, x);
  const bool float_weight = weight.dtype() == aoti_torch_dtype_float32();
  check_tensor(op, "weight", weight, float_weight ? weight.dtype() : x.dtype(), {x.size(last)});
  const int heads_per_token = heads ? static_cast<int>(x.size(1)) : 1;
  const NormArgs args = {out.raw(),
                         x.raw(),
                         residual,
                         weight.raw(),
                         out.stride(0),
                         heads ? out.stride(1) : 0,
                         x.stride(0),
                         heads ? x.stride(1) : 0,
                         residual_stride,
                         heads_per_token,
                         static_cast<int>(x.size(last)),
                         static_cast<float>(eps)};
  const int64_t n = 16 / element_bytes(op, "x", x);
  const bool wide =
      are_multiples(n, {args.out_token_stride, args.out_head_stride, args.x_token_stride,
                        args.x_head_stride, args.residual_stride, args.size}) &&
      is_aligned(args.out, 16) && is_aligned(args.x, 16) && is_aligned(args.residual, 16) &&
      is_aligned(args.weight, 32);
  const Device device(x);
  const int num_rows = static_cast<int>(x.size(0)) * heads_per_token;
  with_element_type(op, "x", x, [&](auto type) {
    using T = decltype(type);
    if (float_weight) {
      launch_rms_norm<T, float>(args, wide, num_rows, device.stream());
    } else {
      launch_rms_norm<T>(args, wide, num_rows, device.stream());
    }
  });
  check_launch(op);
}

void rms_norm(Tensor out, Tensor x, Tensor weight, double eps) {
  if (x.dim() != 3) check_dim("rms_norm", "x", x, 2);
  launch_norm("rms_norm", out, x, nullptr, 0, weight, eps);
}

void add_rms_norm(Tensor out, Tensor x, Tensor residual, Tensor weight, double eps) {
  check_dim("add_rms_norm", "x", x, 2);
  check_like("add_rms_norm", "residual", residual, x);
  launch_norm("add_rms_norm", out, x, residual.raw(), residual.stride(0), weight, eps);
}

template <Activation A>
void launch_activation(const char* op, const Tensor& out, const Tensor& x) {
  check_rows(op, out, x);
  check_size(op, "x", x, 1, 2 * out.size(1));
  const GatedArgs args = {out.raw(), x.raw(), out.stride(0), x.stride(0),
                          static_cast<int>(out.size(1))};
  const int64_t n = 16 / element_bytes(op, "x", x);
  const bool wide = are_multiples(n, {args.out_stride, args.x_stride, args.size}) &&
                    is_aligned(args.out, 16) && is_aligned(args.x, 16);
  const Device device(x);
  with_element_type(op, "x", x, [&](auto type) {
    launch_gated<decltype(type), A>(args, wide, static_cast<int>(x.size(0)), device.stream());
  });
  check_launch(op);
}

void silu_and_mul(Tensor out, Tensor x) {
  launch_activation<Activation::kSilu>("silu_and_mul", out, x);
}
void gelu_and_mul(Tensor out, Tensor x) {
  launch_activation<Activation::kGelu>("gelu_and_mul", out, x);
}
void gelu_tanh_and_mul(Tensor out, Tensor x) {
  launch_activation<Activation::kGeluTanh>("gelu_tanh_and_mul", out, x);
}

}  // namespace

void register_fused(TorchLibraryHandle library) {
  implement<&rms_norm>(library, "rms_norm");
  implement<&add_rms_norm>(library, "add_rms_norm");
  implement<&silu_and_mul>(library, "silu_and_mul");
  implement<&gelu_and_mul>(library, "gelu_and_mul");
  implement<&gelu_tanh_and_mul>(library, "gelu_tanh_and_mul");
}

}  // namespace tpengine::cuda
