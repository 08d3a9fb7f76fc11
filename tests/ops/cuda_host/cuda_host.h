// Runs CUDA kernels on the CPU for tests: one fiber per CUDA thread, one block at a time.
//
// Covers built-in indices, shared memory (dynamic, full of NaN when a block starts; static),
// __syncthreads, __syncwarp, shuffles, votes, atomics, and the types and functions the kernels use.
// Fibers of a warp meet at every shuffle. ptx_host.h adds the PTX instructions. A launch is refused
// as CUDA refuses it, by the shared memory that the card of the test has.
// The schedule is round-robin for seed 0; otherwise a random warp runs alone for a random while,
// so that a missing barrier lets it run ahead of the others and shows.
#pragma once

#ifdef __SANITIZE_ADDRESS__
#include <dlfcn.h>
#endif
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
// Static storage: a block runs to its end before the next one starts.
#define __shared__ static

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
using cudaStream_t = void*;
enum cudaError_t {
  cudaSuccess,
  cudaErrorInvalidValue,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchOutOfResources,
  cudaErrorLaunchFailure = 719
};
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout
};
constexpr int cudaSharedmemCarveoutMaxShared = 100;

template <class T>
T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
T max(T a, T b) {
  return a > b ? a : b;
}

using __half = _Float16;
inline float __half2float(__half x) { return static_cast<float>(x); }
inline __half __float2half_rn(float x) { return static_cast<__half>(x); }
struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (x != x) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
inline float __expf(float x) { return expf(x); }
inline float __uint_as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }

namespace cuda_host {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 64 * 1024;

struct Fiber {
  ucontext_t context;
  jmp_buf resume;
  bool started, done;
};

// Threads that meet: they wait until all that still live have arrived.
struct Barrier {
  int arrived = 0, generation = 0, live = 0;
};

struct Warp {
  Barrier barrier;
  uint64_t slot[kWarp];
};

struct Block {
  std::vector<char> shared;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<char> stacks;
  std::function<void()> kernel;
  Barrier barrier;
  jmp_buf scheduler;
  int current = 0;
  dim3 thread, block, block_size, grid_size;
};
inline Block state;
inline uint64_t schedule_seed = 0;
// Of the card: what a block may have once its kernel asks for it, in bytes.
inline int most_shared_bytes = 227 * 1024;
inline cudaError_t last_error = cudaSuccess;
// By kernel: attributes that were set.
inline std::map<const void*, std::map<int, int>> attributes;

inline int lane() { return state.current % kWarp; }
inline Warp& warp() { return state.warps[state.current / kWarp]; }

// AddressSanitizer's longjmp looks at the thread's stacks each time, and fibers have their own: the
// C library's is called instead.
inline void jump(jmp_buf target) {
#ifdef __SANITIZE_ADDRESS__
  using Jump = void (*)(jmp_buf, int);
  static const Jump real =
      reinterpret_cast<Jump>(dlsym(dlopen("libc.so.6", RTLD_LAZY), "_longjmp"));
  real(target, 1);
#else
  _longjmp(target, 1);
#endif
}

inline void yield() {
  if (_setjmp(state.fibers[state.current].resume) == 0) jump(state.scheduler);
}

inline void release_if_complete(Barrier& barrier) {
  if (barrier.live == 0 || barrier.arrived < barrier.live) return;
  barrier.arrived = 0;
  ++barrier.generation;
}

inline void wait(Barrier& barrier) {
  const int generation = barrier.generation;
  ++barrier.arrived;
  release_if_complete(barrier);
  while (barrier.generation == generation) yield();
}

template <class T>
T shuffle(T value, int source) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  memcpy(&warp().slot[lane()], &value, sizeof value);
  wait(warp().barrier);
  memcpy(&value, &warp().slot[source], sizeof value);
  wait(warp().barrier);
  return value;
}

// One bit per lane; a lane that has left counts as false.
inline uint32_t ballot(bool predicate) {
  warp().slot[lane()] = predicate;
  wait(warp().barrier);
  uint32_t bits = 0;
  for (int i = 0; i < kWarp; ++i) bits |= static_cast<uint32_t>(warp().slot[i] & 1) << i;
  wait(warp().barrier);
  return bits;
}

inline void fiber_main() {
  state.kernel();
  state.fibers[state.current].done = true;
  --warp().barrier.live;
  --state.barrier.live;
  release_if_complete(warp().barrier);
  release_if_complete(state.barrier);
  jump(state.scheduler);
}

inline void run_until_yield(int index) {
  Fiber& fiber = state.fibers[index];
  if (fiber.done) return;
  state.current = index;
  const dim3& size = state.block_size;
  state.thread = dim3(index % size.x, index / size.x % size.y, index / (size.x * size.y));
  if (_setjmp(state.scheduler) != 0) return;
  if (fiber.started) jump(fiber.resume);
  fiber.started = true;
  setcontext(&fiber.context);
}

inline void start_block(int num_threads) {
  state.barrier = {0, 0, num_threads};
  std::fill(state.shared.begin(), state.shared.end(), '\xff');
  for (Warp& warp : state.warps) warp = {};
  for (int i = 0; i < num_threads; ++i) {
    ++state.warps[i / kWarp].barrier.live;
    Fiber& fiber = state.fibers[i];
    fiber.started = fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = state.stacks.data() + kStackBytes * i;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
  }
}

inline void run_block(int num_threads, std::mt19937_64& random) {
  start_block(num_threads);
  // volatile: the loops are re-entered by longjmp
  while (state.barrier.live > 0) {
    if (schedule_seed == 0) {
      for (volatile int i = 0; i < num_threads; i = i + 1) run_until_yield(i);
      continue;
    }
    const int chosen = static_cast<int>(random() % state.warps.size());
    const int turns = 1 << random() % 9;
    for (volatile int t = 0; t < turns && state.warps[chosen].barrier.live > 0; t = t + 1) {
      for (volatile int i = 0; i < kWarp && chosen * kWarp + i < num_threads; i = i + 1) {
        run_until_yield(chosen * kWarp + i);
      }
    }
  }
}

template <class F>
void launch(const void* name, dim3 grid, dim3 block, size_t shared_bytes, const F& kernel) {
  const int claimed = attributes[name][cudaFuncAttributeMaxDynamicSharedMemorySize];
  if (static_cast<int>(shared_bytes) > std::max(claimed, 48 * 1024)) {
    last_error = cudaErrorInvalidValue;
    return;
  }
  const int num_threads = static_cast<int>(block.x * block.y * block.z);
  state.shared = std::vector<char>(shared_bytes);  // of its own size: a checker sees its end
  state.fibers.resize(num_threads);
  state.warps.resize((num_threads + kWarp - 1) / kWarp);
  state.stacks.resize(kStackBytes * num_threads);
  state.kernel = kernel;
  state.block_size = block;
  state.grid_size = grid;
  std::mt19937_64 random(schedule_seed);
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        state.block = dim3(x, y, z);
        run_block(num_threads, random);
      }
    }
  }
}

}  // namespace cuda_host

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = cuda_host::most_shared_bytes;
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel kernel, cudaFuncAttribute name, int value) {
  if (name == cudaFuncAttributeMaxDynamicSharedMemorySize && value > cuda_host::most_shared_bytes)
    return cuda_host::last_error = cudaErrorInvalidValue;
  cuda_host::attributes[reinterpret_cast<const void*>(kernel)][name] = value;
  return cudaSuccess;
}
// By shared memory alone, of which a block takes 1 KB more than it asks for. A kernel without a
// wish gets half of it; real cards choose by themselves.
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, Kernel kernel, int,
                                                          size_t shared_bytes) {
  auto& set = cuda_host::attributes[reinterpret_cast<const void*>(kernel)];
  const int percent = std::max(50, set[cudaFuncAttributePreferredSharedMemoryCarveout]);
  const int bytes = (cuda_host::most_shared_bytes + 1024) * percent / 100;
  *count = bytes / (static_cast<int>(shared_bytes) + 1024);
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return std::exchange(cuda_host::last_error, cudaSuccess); }
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorIllegalAddress ? "an illegal memory access was encountered" : "an error";
}

template <class T>
T atomicAdd(T* target, T value) {
  const T old = *target;
  *target = static_cast<T>(old + value);
  return old;
}

#define threadIdx (::cuda_host::state.thread)
#define blockIdx (::cuda_host::state.block)
#define blockDim (::cuda_host::state.block_size)
#define gridDim (::cuda_host::state.grid_size)
#define __syncthreads() ::cuda_host::wait(::cuda_host::state.barrier)
#define __syncwarp() ::cuda_host::wait(::cuda_host::warp().barrier)
#define __shfl_sync(mask, value, source) ::cuda_host::shuffle(value, (source) & 31)
#define __shfl_xor_sync(mask, value, bits) \
  ::cuda_host::shuffle(value, ::cuda_host::lane() ^ static_cast<int>(bits))
// Without a lane that far away a lane gets its own value.
#define __shfl_up_sync(mask, value, distance) \
  ::cuda_host::shuffle(value,                 \
                       ::cuda_host::lane() - (::cuda_host::lane() >= (distance)) * (distance))
#define __ballot_sync(mask, predicate) ::cuda_host::ballot(predicate)
#define TPENGINE_DYNAMIC_SHARED(name) char* name = ::cuda_host::state.shared.data()
#define TPENGINE_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                 \
  ::cuda_host::launch(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, \
                      [&] { kernel(__VA_ARGS__); })
