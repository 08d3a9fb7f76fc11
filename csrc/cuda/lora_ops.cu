// Launcher: add_lora.
#include "launch.h"
#include "lora/add_lora.cuh"

namespace tpengine::cuda {
namespace {

// CUDA's limit on the second dimension of a grid.
constexpr int64_t kMostTiles = 65535;

void check_rows(const char* op, const Tensor& out, const Tensor& x) {
  check_dim(op, "x", x, 2);
  check_dim(op, "out", out, 2);
  check_packed(op, "x", x, 1);
  check_packed(op, "out", out, 1);
  check_dtype(op, "out", out, x.dtype());
  check_size(op, "out", out, 0, x.size(0));
}

void check_adapters(const char* op, const Tensor& a, const Tensor& b, int64_t in_features) {
  const int64_t line = kLineBytes / element_bytes(op, "a", a);
  check_dim(op, "a", a, 6);
  check_size(op, "a", a, 3, (in_features + line - 1) / line);
  check_size(op, "a", a, 4, kLoRATile);
  check_size(op, "a", a, 5, line);
  check_packed(op, "a", a);
  check_dtype(op, "b", b, a.dtype());
  check_dim(op, "b", b, 4);
  check_size(op, "b", b, 0, a.size(0));
  check_size(op, "b", b, 2, a.size(2) * kLoRATile);
  check_size(op, "b", b, 3, kLoRAPanel);
  check_packed(op, "b", b);
  if (!is_aligned(a.raw(), kLineBytes)) fail(op, "a does not begin at a multiple of 64 bytes");
  check_at_most(op, "the number of columns", a.size(1) * a.size(2), kMostTiles);
  check_at_most(op, "the number of panels", b.size(1), kMostTiles);
}

void add_lora(Tensor out, Tensor x, Tensor a, Tensor b, Tensor ranks, Tensor first_outputs,
              Tensor rows, Tensor groups, Tensor shrunk) {
  const char* op = "add_lora";
  check_rows(op, out, x);
  check_adapters(op, a, b, x.size(1));
  const int32_t int32 = aoti_torch_dtype_int32();
  check_matrix(op, "ranks", ranks, int32, a.size(0), a.size(1));
  check_vector(op, "first_outputs", first_outputs, int32, a.size(1) + 1);
  check_dim(op, "rows", rows, 1);
  check_vector(op, "rows", rows, int32, rows.size(0));
  check_dim(op, "groups", groups, 2);
  check_matrix(op, "groups", groups, int32, groups.size(0), 3);
  check_matrix(op, "shrunk", shrunk, aoti_torch_dtype_float32(), rows.size(0),
               a.size(1) * a.size(2) * kLoRATile);
  const int64_t item = element_bytes(op, "x", x);
  const bool wide = is_aligned(x.raw(), 32) && x.stride(0) * item % 32 == 0;
  const LoRAArgs args = {out.raw(),
                         x.raw(),
                         a.raw(),
                         b.raw(),
                         ranks.data<int32_t>(),
                         first_outputs.data<int32_t>(),
                         rows.data<int32_t>(),
                         groups.data<int32_t>(),
                         shrunk.data<float>(),
                         out.stride(0),
                         x.stride(0),
                         static_cast<int>(groups.size(0)),
                         static_cast<int>(rows.size(0)),
                         static_cast<int>(a.size(1)),
                         static_cast<int>(a.size(2)),
                         static_cast<int>(a.size(3)),
                         static_cast<int>(b.size(1)),
                         static_cast<int>(x.size(1)),
                         wide};
  const Device device(x);
  with_element_type(op, "x", x, [&](auto type) {
    with_element_type(op, "a", a, [&](auto weight_type) {
      launch_add_lora<decltype(type), decltype(weight_type)>(args, device.stream());
    });
  });
  check_launch(op);
}

}  // namespace

void register_lora(TorchLibraryHandle library) { implement<&add_lora>(library, "add_lora"); }

}  // namespace tpengine::cuda
