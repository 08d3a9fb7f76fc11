// What the CPU launchers share: threads, element types, and the registration of each file's ops.
#pragma once

#include <memory>

#include "../common/checks.h"
#include "kernels.h"
#include "recording.h"

namespace tpengine::cpu {

inline int64_t num_threads() {
  uint32_t threads = 1;
  TPENGINE_SHIM(torch_get_num_threads(&threads));
  return threads;
}

// body(begin, end) over [0, count) by torch's threads, at least `grain` indices in a piece.
template <class F>
void parallel_for(int64_t count, int64_t grain, const F& body) {
  if (count <= grain) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
  TPENGINE_SHIM(torch_parallel_for(
      0, count, grain,
      [](int64_t begin, int64_t end, void* context) {
        (*static_cast<const F*>(context))(begin, end);
      },
      const_cast<void*>(static_cast<const void*>(&body))));
}

// kernel(args, begin, end) over [0, count).
template <class Args>
void run_kernel(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t count,
                int64_t grain) {
  parallel_for(count, grain, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

// Rows that make a piece worth a thread: some 16 thousand elements.
inline int64_t row_grain(int64_t row_size) {
  return row_size >= 16384 ? 1 : 16384 / (row_size + 1);
}

// Working memory that stays with its thread: that of a large step would otherwise be fresh pages
// at every call, whose faults cost as much as rounding the inputs.
template <class T>
class Scratch {
 public:
  // Uninitialised, or what an earlier call left.
  T* take(int64_t count) {
    if (count > size_) {
      memory_.reset(new T[count]);
      size_ = count;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<T[]> memory_;
  int64_t size_ = 0;
};

inline DType element_type(const char* op, const char* name, const Tensor& tensor) {
  if (tensor.dtype() == aoti_torch_dtype_float32()) return DType::kFloat32;
  if (tensor.dtype() == aoti_torch_dtype_bfloat16()) return DType::kBFloat16;
  fail(op, std::string(name) + " is " + dtype_name(tensor.dtype()) +
               "; on CPU the kernels take float32 and bfloat16");
}

inline int64_t bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

inline Rows rows_of(const Tensor& tensor) { return {tensor.raw(), tensor.stride(0)}; }
// [num_tokens, num_heads, head_dim]; of two dimensions: one head.
inline Heads heads_of(const Tensor& tensor) {
  return {tensor.raw(), tensor.stride(0), tensor.dim() == 3 ? tensor.stride(1) : 0};
}

inline float number_at(DType dtype, const void* numbers, int64_t index) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(numbers)[index];
  const uint32_t bits = uint32_t{static_cast<const uint16_t*>(numbers)[index]} << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

// Rounds to the nearest, ties to even; NaN is not expected.
inline void put_number(DType dtype, void* numbers, int64_t index, float number) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(numbers)[index] = number;
    return;
  }
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  static_cast<uint16_t*>(numbers)[index] =
      static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// first: the id of the table's first row, where it has a part of the vocabulary; then an id may
// have no row here.
inline void check_token_ids(const char* op, const Tensor& token_ids, int64_t count,
                            int64_t num_rows, const Optional<int64_t>& first) {
  check_tensor(op, "token_ids", token_ids, aoti_torch_dtype_int32(), {count});
  if (first) return;
  const int32_t* ids = token_ids.data<int32_t>();
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= num_rows) {
      fail(op, "token_ids[" + std::to_string(i) + "] is " + std::to_string(ids[i]) +
                   "; the table has rows 0 to " + std::to_string(num_rows - 1));
    }
  }
}

// The scales of an fp8 cache, which the CPU does not have. An int8 cache holds its own.
inline void check_no_scales(const char* op, double k_scale, double v_scale) {
  if (k_scale != 1.0 || v_scale != 1.0) {
    fail(op, "k_scale and v_scale are " + std::to_string(k_scale) + " and " +
                 std::to_string(v_scale) +
                 "; a CPU cache takes no scales from the caller: expected 1");
  }
}

// The K and V caches of one layer in the CPU layout.
struct CacheShape {
  CacheDType dtype;
  int64_t num_blocks, num_kv_heads, head_dim, block_size;
  int64_t block_bytes;  // of K, and as many of V
};
// dtype: of the model; the caches have it too, or int8.
CacheShape check_caches(const char* op, const Tensor& k_cache, const Tensor& v_cache,
                        int32_t dtype);

void register_attention(TorchLibraryHandle library);
void register_cache(TorchLibraryHandle library);
void register_embedding(TorchLibraryHandle library);
void register_experts(TorchLibraryHandle library);
void register_fused(TorchLibraryHandle library);
void register_linear(TorchLibraryHandle library);
void register_lora(TorchLibraryHandle library);
void register_quantized(TorchLibraryHandle library);
void register_sampling(TorchLibraryHandle library);

}  // namespace tpengine::cpu
