// Launchers of the CUDA kernels: check the arguments, pick type, device and stream. Ops without a
// kernel here run as their plain-torch reference. None of this has run on a GPU yet.
#define TPENGINE_CUDA
#include "../common/checks.h"
#include "attention/paged_attention.cuh"
#include "cache/write_kv_cache.cuh"
#include "fused/rms_norm.cuh"

namespace tpengine::cuda {
namespace {

// The tensor's device made current, and torch's stream on it.
class Device {
 public:
  explicit Device(const Tensor& tensor) {
    const int32_t index = tensor.device_index();
    TPENGINE_SHIM(aoti_torch_create_device_guard(index, &guard_));
    void* stream = nullptr;
    TPENGINE_SHIM(aoti_torch_get_current_cuda_stream(index, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() { aoti_torch_delete_device_guard(guard_); }
  cudaStream_t stream() const { return stream_; }

 private:
  DeviceGuardHandle guard_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) fail(op, std::string("launch failed: ") + cudaGetErrorString(error));
}

// Calls body(T{}) with the element type of `tensor`.
template <class F>
void with_element_type(const char* op, const char* name, const Tensor& tensor, const F& body) {
  if (tensor.dtype() == aoti_torch_dtype_float32()) {
    body(float{});
  } else if (tensor.dtype() == aoti_torch_dtype_float16()) {
    body(__half{});
  } else if (tensor.dtype() == aoti_torch_dtype_bfloat16()) {
    body(__nv_bfloat16{});
  } else {
    fail(op, std::string(name) + " is " + dtype_name(tensor.dtype()) +
                 "; expected float32, float16 or bfloat16");
  }
}

void check_caches(const char* op, const Tensor& k_cache, const Tensor& v_cache, int32_t dtype) {
  check_dtype(op, "k_cache", k_cache, dtype);
  check_dtype(op, "v_cache", v_cache, dtype);
  check_dim(op, "k_cache", k_cache, 4);
  check_dim(op, "v_cache", v_cache, 4);
  for (int i = 0; i < 4; ++i) check_size(op, "v_cache", v_cache, i, k_cache.size(i));
  check_packed(op, "k_cache", k_cache);
  check_packed(op, "v_cache", v_cache);
}

void write_kv_cache(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slot_mapping) {
  const char* op = "write_kv_cache";
  check_dim(op, "k", k, 3);
  check_dim(op, "v", v, 3);
  check_dtype(op, "v", v, k.dtype());
  check_caches(op, k_cache, v_cache, k.dtype());
  for (int i = 0; i < 3; ++i) check_size(op, "v", v, i, k.size(i));
  check_size(op, "k", k, 1, k_cache.size(2));
  check_size(op, "k", k, 2, k_cache.size(3));
  check_packed(op, "k", k, 2);
  check_packed(op, "v", v, 2);
  check_vector(op, "slot_mapping", slot_mapping, aoti_torch_dtype_int32(), k.size(0));
  const int64_t num_kv_heads = k.size(1), head_dim = k.size(2);
  WriteCacheArgs args = {{k.raw(), v.raw()},           {k_cache.raw(), v_cache.raw()},
                         slot_mapping.data<int32_t>(), {k.stride(0), v.stride(0)},
                         {k.stride(1), v.stride(1)},   static_cast<int>(num_kv_heads),
                         static_cast<int>(head_dim)};
  int64_t element_bytes = 0;
  with_element_type(op, "k", k, [&](auto type) { element_bytes = sizeof(type); });
  const int64_t per_unit = 16 / element_bytes;
  bool wide = head_dim % per_unit == 0;
  for (int i = 0; i < 2; ++i) {
    wide = wide && args.token_stride[i] % per_unit == 0 && args.head_stride[i] % per_unit == 0 &&
           reinterpret_cast<uintptr_t>(args.source[i]) % 16 == 0 &&
           reinterpret_cast<uintptr_t>(args.cache[i]) % 16 == 0;
  }
  const Device device(k);
  const int num_tokens = static_cast<int>(k.size(0));
  if (wide) {
    for (int i = 0; i < 2; ++i) {
      args.token_stride[i] /= per_unit;
      args.head_stride[i] /= per_unit;
    }
    args.head_dim /= static_cast<int>(per_unit);
    launch_write_kv_cache<uint4>(args, num_tokens, device.stream());
  } else if (element_bytes == 4) {
    launch_write_kv_cache<uint32_t>(args, num_tokens, device.stream());
  } else {
    launch_write_kv_cache<uint16_t>(args, num_tokens, device.stream());
  }
  check_launch(op);
}

void check_like(const char* op, const char* name, const Tensor& tensor, const Tensor& x) {
  check_dtype(op, name, tensor, x.dtype());
  check_dim(op, name, tensor, x.dim());
  for (int i = 0; i < x.dim(); ++i) check_size(op, name, tensor, i, x.size(i));
  check_packed(op, name, tensor, static_cast<int>(x.dim()) - 1);
}

void launch_norm(const char* op, const Tensor& out, const Tensor& x, void* residual,
                 int64_t residual_stride, const Tensor& weight, double eps) {
  const bool heads = x.dim() == 3;
  const int last = heads ? 2 : 1;
  check_packed(op, "x", x, last);
  check_like(op, "out", out, x);
  check_vector(op, "weight", weight, x.dtype(), x.size(last));
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
  const Device device(x);
  const int num_rows = static_cast<int>(x.size(0)) * heads_per_token;
  with_element_type(op, "x", x, [&](auto type) {
    launch_rms_norm<decltype(type)>(args, num_rows, device.stream());
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

void paged_attention(Tensor out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table,
                     Tensor seq_lens, double scale, Optional<Tensor> alibi_slopes,
                     Optional<int64_t> sliding_window) {
  const char* op = "paged_attention";
  check_dim(op, "q", q, 3);
  check_packed(op, "q", q, 2);
  check_like(op, "out", out, q);
  check_caches(op, k_cache, v_cache, q.dtype());
  check_size(op, "q", q, 2, k_cache.size(3));
  check_at_most(op, "head_dim", q.size(2), kMaxHeadDim);
  if (q.size(1) % k_cache.size(2) != 0) {
    fail(op, "q has " + std::to_string(q.size(1)) + " heads; expected a multiple of the " +
                 std::to_string(k_cache.size(2)) + " kv heads of the cache");
  }
  check_dtype(op, "block_table", block_table, aoti_torch_dtype_int32());
  check_dim(op, "block_table", block_table, 2);
  check_size(op, "block_table", block_table, 0, q.size(0));
  check_packed(op, "block_table", block_table, 1);
  check_vector(op, "seq_lens", seq_lens, aoti_torch_dtype_int32(), q.size(0));
  if (alibi_slopes)
    check_vector(op, "alibi_slopes", *alibi_slopes, aoti_torch_dtype_float32(), q.size(1));
  if (sliding_window && *sliding_window < 1) {
    fail(op,
         "sliding_window is " + std::to_string(*sliding_window) + "; expected at least 1, or None");
  }
  const int64_t window =
      sliding_window && *sliding_window < INT32_MAX ? *sliding_window : INT32_MAX;
  const PagedAttentionArgs args = {out.raw(),
                                   q.raw(),
                                   k_cache.raw(),
                                   v_cache.raw(),
                                   block_table.data<int32_t>(),
                                   seq_lens.data<int32_t>(),
                                   alibi_slopes ? alibi_slopes->data<float>() : nullptr,
                                   out.stride(0),
                                   out.stride(1),
                                   q.stride(0),
                                   q.stride(1),
                                   block_table.stride(0),
                                   static_cast<int>(q.size(1)),
                                   static_cast<int>(k_cache.size(2)),
                                   static_cast<int>(q.size(2)),
                                   static_cast<int>(k_cache.size(1)),
                                   static_cast<int>(window),
                                   static_cast<float>(scale)};
  const Device device(q);
  const int num_seqs = static_cast<int>(q.size(0));
  with_element_type(op, "q", q, [&](auto type) {
    launch_paged_attention<decltype(type)>(args, num_seqs, device.stream());
  });
  check_launch(op);
}

struct Registration {
  Registration() {
    TorchLibraryHandle library = nullptr;  // lives as long as the process
    TPENGINE_SHIM(
        aoti_torch_library_init_impl("tpengine", "CUDA", "bindings.cu", __LINE__, &library));
    implement<&write_kv_cache>(library, "write_kv_cache");
    implement<&rms_norm>(library, "rms_norm");
    implement<&add_rms_norm>(library, "add_rms_norm");
    implement<&paged_attention>(library, "paged_attention");
  }
} registration;

}  // namespace
}  // namespace tpengine::cuda
