// Argument checks of the launchers: each failure names the op, the argument, what was found and
// what was expected. RuntimeError in Python.
#pragma once

#include <initializer_list>
#include <string>

#include "torch_shim.h"

namespace tpengine {

[[noreturn]] inline void fail(const char* op, const std::string& what) {
  throw std::runtime_error(std::string("tpengine::") + op + ": " + what);
}

inline std::string dtype_name(int32_t dtype) {
  if (dtype == aoti_torch_dtype_float64()) return "float64";
  if (dtype == aoti_torch_dtype_float32()) return "float32";
  if (dtype == aoti_torch_dtype_bfloat16()) return "bfloat16";
  if (dtype == aoti_torch_dtype_float16()) return "float16";
  if (dtype == aoti_torch_dtype_float8_e4m3fn()) return "float8_e4m3fn";
  if (dtype == aoti_torch_dtype_int8()) return "int8";
  if (dtype == aoti_torch_dtype_uint8()) return "uint8";
  if (dtype == aoti_torch_dtype_int32()) return "int32";
  if (dtype == aoti_torch_dtype_int64()) return "int64";
  return "dtype code " + std::to_string(dtype);
}

inline std::string shape_name(const Tensor& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.dim(); ++i) {
    text += (i != 0 ? ", " : "") + std::to_string(tensor.size(i));
  }
  return text + "]";
}

inline void check_dtype(const char* op, const char* name, const Tensor& tensor, int32_t expected) {
  if (tensor.dtype() != expected) {
    fail(op, std::string(name) + " is " + dtype_name(tensor.dtype()) + "; expected " +
                 dtype_name(expected));
  }
}

inline void check_dim(const char* op, const char* name, const Tensor& tensor, int64_t expected) {
  if (tensor.dim() != expected) {
    fail(op, std::string(name) + " has shape " + shape_name(tensor) + "; expected " +
                 std::to_string(expected) + " dimensions");
  }
}

inline void check_size(const char* op, const char* name, const Tensor& tensor, int index,
                       int64_t expected) {
  if (tensor.size(index) != expected) {
    fail(op, std::string(name) + " has shape " + shape_name(tensor) + "; expected size " +
                 std::to_string(expected) + " in dimension " + std::to_string(index));
  }
}

// Dimensions [first, dim) are packed without gaps (a dimension of size 1 may have any stride).
inline void check_packed(const char* op, const char* name, const Tensor& tensor, int first = 0) {
  int64_t expected = 1;
  for (int i = static_cast<int>(tensor.dim()) - 1; i >= first; --i) {
    if (tensor.size(i) == 0) return;
    if (tensor.size(i) != 1 && tensor.stride(i) != expected) {
      fail(op, std::string(name) + " has stride " + std::to_string(tensor.stride(i)) +
                   " in dimension " + std::to_string(i) + "; expected " + std::to_string(expected) +
                   " (contiguous from dimension " + std::to_string(first) + " on)");
    }
    expected *= tensor.size(i);
  }
}

constexpr int64_t kAnySize = -1;
using Sizes = std::initializer_list<int64_t>;

// As many dimensions as there are sizes, each of its size.
inline void check_sizes(const char* op, const char* name, const Tensor& tensor, Sizes sizes) {
  check_dim(op, name, tensor, static_cast<int64_t>(sizes.size()));
  int index = 0;
  for (const int64_t size : sizes) {
    if (size != kAnySize) check_size(op, name, tensor, index, size);
    ++index;
  }
}

// The same, packed from dimension `first` on.
inline void check_shape(const char* op, const char* name, const Tensor& tensor, Sizes sizes,
                        int first = 0) {
  check_sizes(op, name, tensor, sizes);
  check_packed(op, name, tensor, first);
}

// The same, of one type.
inline void check_tensor(const char* op, const char* name, const Tensor& tensor, int32_t dtype,
                         Sizes sizes, int first = 0) {
  check_dtype(op, name, tensor, dtype);
  check_shape(op, name, tensor, sizes, first);
}

// Type and sizes of x; rows may be strided.
inline void check_like(const char* op, const char* name, const Tensor& tensor, const Tensor& x) {
  check_dtype(op, name, tensor, x.dtype());
  check_dim(op, name, tensor, x.dim());
  for (int i = 0; i < x.dim(); ++i) check_size(op, name, tensor, i, x.size(i));
  check_packed(op, name, tensor, static_cast<int>(x.dim()) - 1);
}

// Rows in and out of one type, as many of both; they may be strided.
inline void check_rows(const char* op, const Tensor& out, const Tensor& x) {
  check_shape(op, "x", x, {kAnySize, kAnySize}, 1);
  check_tensor(op, "out", out, x.dtype(), {x.size(0), kAnySize}, 1);
}

// K and V of tokens, [num_tokens, num_kv_heads, head_dim], packed from dimension `first` on.
inline void check_keys(const char* op, const Tensor& k, const Tensor& v, int64_t num_kv_heads,
                       int64_t head_dim, int first) {
  check_dim(op, "k", k, 3);
  check_tensor(op, "v", v, k.dtype(), {k.size(0), k.size(1), k.size(2)}, first);
  check_shape(op, "k", k, {kAnySize, num_kv_heads, head_dim}, first);
}

inline void check_queries(const char* op, const Tensor& out, const Tensor& q, int64_t num_kv_heads,
                          int64_t head_dim) {
  check_shape(op, "q", q, {kAnySize, kAnySize, head_dim}, 2);
  check_like(op, "out", out, q);
  if (num_kv_heads == 0 || q.size(1) % num_kv_heads != 0) {
    fail(op, "q has " + std::to_string(q.size(1)) + " heads; expected a multiple of the " +
                 std::to_string(num_kv_heads) + " kv heads of the cache");
  }
}

// int32 [num_seqs, max_blocks] and int32 [num_seqs].
inline void check_table(const char* op, const Tensor& block_table, const Tensor& seq_lens) {
  const int32_t int32 = aoti_torch_dtype_int32();
  check_tensor(op, "block_table", block_table, int32, {kAnySize, kAnySize}, 1);
  check_tensor(op, "seq_lens", seq_lens, int32, {block_table.size(0)});
}

// The keys that a query sees, as the kernels take it: all are as many as an int32 can say.
inline int32_t check_window(const char* op, const Optional<int64_t>& sliding_window) {
  if (!sliding_window || *sliding_window >= INT32_MAX) return INT32_MAX;
  if (*sliding_window < 1) {
    fail(op,
         "sliding_window is " + std::to_string(*sliding_window) + "; expected at least 1, or None");
  }
  return static_cast<int32_t>(*sliding_window);
}

inline void check_logits(const char* op, const Tensor& out, const Tensor& logits,
                         const Optional<Tensor>& logprobs) {
  check_shape(op, "logits", logits, {kAnySize, kAnySize}, 1);
  check_tensor(op, "out", out, aoti_torch_dtype_int64(), {logits.size(0)});
  if (logits.size(1) < 1 || logits.size(1) > INT32_MAX) {
    fail(op, "logits has shape " + shape_name(logits) + "; expected 1 to 2^31 - 1 tokens");
  }
  if (logprobs)
    check_tensor(op, "logprobs", *logprobs, aoti_torch_dtype_float32(), {logits.size(0)});
}

// What is sampled by, a number of each row.
inline void check_filters(const char* op, int64_t rows, const Tensor& temperature,
                          const Tensor& top_k, const Tensor& top_p, const Tensor& min_p,
                          const Tensor& uniform) {
  check_tensor(op, "temperature", temperature, aoti_torch_dtype_float32(), {rows});
  check_tensor(op, "top_k", top_k, aoti_torch_dtype_int32(), {rows});
  check_tensor(op, "top_p", top_p, aoti_torch_dtype_float32(), {rows});
  check_tensor(op, "min_p", min_p, aoti_torch_dtype_float32(), {rows});
  check_tensor(op, "uniform", uniform, aoti_torch_dtype_float64(), {rows});
}

// A soft cap of logits as the kernels take it: 0 for none.
inline float check_softcap(const char* op, const Optional<double>& softcap) {
  if (!softcap) return 0.f;
  if (!(*softcap > 0.0)) {
    fail(op, "softcap is " + std::to_string(*softcap) + "; expected a number above 0, or None");
  }
  return static_cast<float>(*softcap);
}

inline void check_at_most(const char* op, const char* what, int64_t value, int64_t limit) {
  if (value > limit) {
    fail(op, std::string(what) + " is " + std::to_string(value) + "; the limit is " +
                 std::to_string(limit));
  }
}

}  // namespace tpengine
