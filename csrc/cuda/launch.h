// What the CUDA launchers share: device and stream, element types, and the registration of each
// file's ops. Launchers check shapes by name and read no device memory: they may be captured into
// a graph and run on any stream.
#pragma once

#define TPENGINE_CUDA
#include "../common/checks.h"
#include "../common/cuda_compat.h"

namespace tpengine::cuda {

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

inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return;
  const std::string text = cudaGetErrorString(error);
  const int code = error;
  // Faults of a kernel, which the next CUDA call reports: memory errors, illegal addresses and
  // instructions, time-outs, failed assertions. As `_DEVICE_FAULTS` of tpengine/errors.py.
  if (code == 214 || code == 700 || code == 702 || code == 710 || (code >= 714 && code <= 719)) {
    fail(op, text + ", in this operation or one before it; CUDA_LAUNCH_BLOCKING=1 shows in which");
  }
  fail(op, "launch failed: " + text);
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

inline int64_t element_bytes(const char* op, const char* name, const Tensor& tensor) {
  int64_t bytes = 0;
  with_element_type(op, name, tensor, [&](auto type) { bytes = sizeof(type); });
  return bytes;
}

inline bool is_aligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

// The K and V caches of one layer, [num_blocks, block_size, num_kv_heads, head_dim], of `dtype` or,
// for 16-bit types, e4m3.
struct CacheShape {
  int64_t num_blocks, block_size, num_kv_heads, head_dim;
  bool float8;
};
CacheShape check_caches(const char* op, const Tensor& k_cache, const Tensor& v_cache,
                        int32_t dtype);

void register_attention(TorchLibraryHandle library);
void register_cache(TorchLibraryHandle library);
void register_fused(TorchLibraryHandle library);
void register_lora(TorchLibraryHandle library);
void register_quantized(TorchLibraryHandle library);
void register_sampling(TorchLibraryHandle library);

}  // namespace tpengine::cuda
