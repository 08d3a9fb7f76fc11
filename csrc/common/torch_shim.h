// Hand-written declarations of the part of libtorch's stable C ABI ("AOTI shim") that tpengine
// uses. Nothing here includes a torch header, so the libraries are built without torch; the
// symbols are resolved from libtorch_cpu / libtorch_cuda at load time. Every function exists in
// libtorch >= 2.10.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

extern "C" {
struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
struct TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
using StableIValue = uint64_t;
using AOTITorchError = int32_t;

AOTITorchError aoti_torch_library_init_impl(const char* ns, const char* dispatch_key,
                                            const char* file, uint32_t line,
                                            TorchLibraryHandle* ret);
AOTITorchError torch_library_impl(TorchLibraryHandle self, const char* name,
                                  void (*fn)(StableIValue*, uint64_t, uint64_t),
                                  uint64_t extension_build_version);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle);
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle, void** ret);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle, int64_t* ret);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle, int64_t** ret);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle, int64_t** ret);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle, int32_t* ret);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle, int32_t* ret);
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_float8_e4m3fn();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain,
                                  void (*fn)(int64_t, int64_t, void*), void* ctx);
AOTITorchError torch_get_num_threads(uint32_t* ret);
#ifdef TPENGINE_CUDA
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
struct DeviceGuardOpaque;
using DeviceGuardHandle = DeviceGuardOpaque*;
AOTITorchError aoti_torch_create_device_guard(int32_t device_index, DeviceGuardHandle* ret);
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle);
#endif
}

namespace tpengine {

// The ABI version this code is written against (2.10); libtorch converts arguments for us should
// their representation change later.
constexpr uint64_t kTorchAbi = (uint64_t{2} << 56) | (uint64_t{10} << 48);

inline void check_shim(AOTITorchError error, const char* call) {
  if (error != 0) throw std::runtime_error(std::string("tpengine: libtorch refused ") + call);
}
#define TPENGINE_SHIM(call) ::tpengine::check_shim((call), #call)

// Owning handle of one tensor argument (the boxed calling convention passes ownership). Sizes and
// strides are looked up once: each look-up is a call into libtorch.
class Tensor {
 public:
  explicit Tensor(StableIValue value) {
    std::memcpy(&handle_, &value, sizeof handle_);
    TPENGINE_SHIM(aoti_torch_get_dim(handle_, &dim_));
    TPENGINE_SHIM(aoti_torch_get_sizes(handle_, &sizes_));
    TPENGINE_SHIM(aoti_torch_get_strides(handle_, &strides_));
    TPENGINE_SHIM(aoti_torch_get_dtype(handle_, &dtype_));
  }
  Tensor(Tensor&& other) noexcept
      : handle_(other.handle_),
        dim_(other.dim_),
        sizes_(other.sizes_),
        strides_(other.strides_),
        dtype_(other.dtype_),
        own_sizes_(std::move(other.own_sizes_)) {
    other.handle_ = nullptr;
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }
  void* raw() const {
    void* pointer = nullptr;
    TPENGINE_SHIM(aoti_torch_get_data_ptr(handle_, &pointer));
    return pointer;
  }
  template <class T>
  T* data() const {
    return static_cast<T*>(raw());
  }
  int64_t dim() const { return dim_; }
  // The index is not negative; callers have checked dim().
  int64_t size(int index) const { return sizes_[index]; }
  // Gives the tensor sizes of its own, which may be changed: libtorch's are those of all its users.
  int64_t* own_sizes() {
    own_sizes_.reset(new int64_t[dim_]);
    std::copy(sizes_, sizes_ + dim_, own_sizes_.get());
    return sizes_ = own_sizes_.get();
  }
  int64_t stride(int index) const { return strides_[index]; }
  int32_t dtype() const { return dtype_; }
  int32_t device_index() const {
    int32_t index = 0;
    TPENGINE_SHIM(aoti_torch_get_device_index(handle_, &index));
    return index;
  }

 private:
  AtenTensorHandle handle_ = nullptr;
  int64_t dim_ = 0;
  int64_t* sizes_ = nullptr;
  int64_t* strides_ = nullptr;
  int32_t dtype_ = 0;
  std::unique_ptr<int64_t[]> own_sizes_;
};

template <class T>
struct Argument {
  static T get(StableIValue value) {
    if constexpr (std::is_arithmetic_v<T>) {
      T result{};
      std::memcpy(&result, &value, sizeof result);
      return result;
    } else {
      return T(value);
    }
  }
};

// An argument that may be missing (`Tensor?`, `int?`): in the boxed convention a heap cell that the
// callee frees, or a null pointer.
template <class T>
using Optional = std::optional<T>;

template <class T>
struct Argument<Optional<T>> {
  static Optional<T> get(StableIValue value) {
    StableIValue* cell = nullptr;
    std::memcpy(&cell, &value, sizeof cell);
    if (cell == nullptr) return std::nullopt;
    const std::unique_ptr<StableIValue> owned(cell);
    return Argument<T>::get(*owned);
  }
};

// Runs an op at once.
struct RunNow {
  template <auto F, class Arguments>
  static void call(Arguments&& arguments) {
    std::apply(F, std::forward<Arguments>(arguments));
  }
};

// Wraps a void function of Tensor / Optional / int64_t / double / bool in the boxed convention;
// `Policy` says what becomes of a call.
template <auto F, class Policy>
struct Boxed;
template <class... A, void (*F)(A...), class Policy>
struct Boxed<F, Policy> {
  static inline const char* op = "";
  static void call(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
    if (num_args != sizeof...(A) || num_outputs != 0) {
      throw std::runtime_error(std::string("tpengine::") + op + ": called with " +
                               std::to_string(num_args) + " arguments; the kernel takes " +
                               std::to_string(sizeof...(A)) +
                               ". The compiled library is older than the Python code: build it "
                               "again with `make setup` or `pip install .`");
    }
    unpack(stack, std::index_sequence_for<A...>{});
  }
  template <size_t... I>
  static void unpack(StableIValue* stack, std::index_sequence<I...>) {
    using Arguments = std::tuple<std::decay_t<A>...>;
    Policy::template call<F>(Arguments{Argument<std::decay_t<A>>::get(stack[I])...});
  }
};

template <auto F, class Policy = RunNow>
void implement(TorchLibraryHandle library, const char* name) {
  Boxed<F, Policy>::op = name;
  TPENGINE_SHIM(torch_library_impl(library, name, &Boxed<F, Policy>::call, kTorchAbi));
}

}  // namespace tpengine
