// Launcher: add_lora.
#include "launch.h"
#include "lora/add_lora.cuh"

namespace tpengine::cuda {
namespace {

// CUDA's limit on the second dimension of a grid.
constexpr int64_t kMostTiles = 65535;

void check_adapters(const char* op, const Tensor& a, const Tensor& b, int64_t in_features) {
  const int64_t line = kLineBytes / element_bytes(op, "a", a);
  const int64_t num_lines = (in_features + line - 1) / line;
  check_shape(op, "a", a, {kAnySize, kAnySize, kAnySize, num_lines, kLoRATile, line});
  const int64_t max_rank = a.size(2) * kLoRATile;
  check_tensor(op, "b", b, a.dtype(), {a.size(0), kAnySize, max_rank, kLoRAPanel});
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
  check_tensor(op, "ranks", ranks, int32, {a.size(0), a.size(1)});
  check_tensor(op, "first_outputs", first_outputs, int32, {a.size(1) + 1});
  check_tensor(op, "rows", rows, int32, {kAnySize});
  check_tensor(op, "groups", groups, int32, {kAnySize, 3});
  check_tensor(op, "shrunk", shrunk, aoti_torch_dtype_float32(),
               {rows.size(0), a.size(1) * a.size(2) * kLoRATile});
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
