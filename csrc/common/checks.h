// Argument checks of the launchers: each failure names the op, the argument, what was found and
// what was expected. RuntimeError in Python.
#pragma once

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

// A packed vector of `size` elements of one type.
inline void check_vector(const char* op, const char* name, const Tensor& tensor, int32_t dtype,
                         int64_t size) {
  check_dtype(op, name, tensor, dtype);
  check_dim(op, name, tensor, 1);
  check_size(op, name, tensor, 0, size);
  check_packed(op, name, tensor);
}

// A packed matrix of one type.
inline void check_matrix(const char* op, const char* name, const Tensor& tensor, int32_t dtype,
                         int64_t rows, int64_t columns) {
  check_dtype(op, name, tensor, dtype);
  check_dim(op, name, tensor, 2);
  check_size(op, name, tensor, 0, rows);
  check_size(op, name, tensor, 1, columns);
  check_packed(op, name, tensor);
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
