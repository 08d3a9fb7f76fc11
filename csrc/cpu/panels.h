// What linear layers over packed weights share: their arguments' checks, and how the panels are
// divided among threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <type_traits>

#include "launch.h"

namespace tpengine::cpu {

// Checks out, x and bias of a linear layer, and fills in all that `Args` says of them: LinearArgs
// and QuantizedLinearArgs name the same fields alike.
template <class Args>
void take_rows(const char* op, Args& args, const Tensor& out, const Tensor& x,
               const Optional<Tensor>& bias) {
  args.dtype = element_type(op, "x", x);
  check_rows(op, out, x);
  args.num_rows = x.size(0);
  args.in_features = x.size(1);
  args.out_features = out.size(1);
  if (bias) check_tensor(op, "bias", *bias, x.dtype(), {args.out_features});
  args.out = out.raw();
  args.x = x.raw();
  args.bias = bias ? bias->raw() : nullptr;
  args.out_stride = out.stride(0);
  args.x_stride = x.stride(0);
}

// Neighbours of the summed dimension in a lane.
inline int64_t pack_of(DType dtype) { return dtype == DType::kBFloat16 ? 2 : 1; }

inline int64_t bytes_of_input(DType dtype) { return kernels().takes_floats ? 4 : bytes_of(dtype); }

// Inputs in bfloat16 become floats where the kernels have no products of bfloat16: once, and not
// again for each block of outputs.
inline void widen_inputs(LinearArgs& args) {
  if (args.dtype == DType::kFloat32 || !kernels().takes_floats) return;
  static thread_local Scratch<float> scratch;
  float* const floats = scratch.take(args.num_rows * args.in_features);
  const uint16_t* const x = static_cast<const uint16_t*>(args.x);
  parallel_for(args.num_rows, row_grain(args.in_features), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t k = 0; k < args.in_features; ++k) {
        const uint32_t bits = static_cast<uint32_t>(x[r * args.x_stride + k]) << 16;
        std::memcpy(floats + r * args.in_features + k, &bits, sizeof bits);
      }
  });
  args.x = floats;
  args.x_stride = args.in_features;
}

inline void check_in_features(const char* op, int64_t in_features, DType dtype) {
  if (in_features % pack_of(dtype) != 0) {
    fail(op, "the weight has " + std::to_string(in_features) +
                 " inputs; expected an even number in bfloat16");
  }
}

inline int64_t num_panels(int64_t out_features) {
  return (out_features + kLinearPanel - 1) / kLinearPanel;
}

// Panels that a thread takes at once: few enough to share the work evenly, and to keep their
// weights in L2 while blocks of rows pass.
constexpr int64_t kGroupBytes = 512 * 1024;
constexpr int64_t kGroupsPerThread = 4;
// Many rows make the smallest groups, pairs of panels, long enough.
inline int64_t most_few_rows() { return kernels().vector_lanes == 16 ? kFewRowsOf16Lanes : 8; }
constexpr int64_t kManyRowsGroup = 2;
// Below this waking a thread costs more than it saves.
constexpr int64_t kSerialProducts = 1 << 16;

// Calls body(now, next) for groups of panels that cover [0, num_panels); or each thread calls
// body(), which gives it its own. A thread takes a group when it is free, so a slow core delays the
// others by two groups at most. If there are enough groups, a thread knows the one that it takes
// next, and fetches its weights in time. With many rows, panels beyond an equal number of groups
// for each thread are taken one by one: 18 panels go to two threads as 9 + 9, not 10 + 8.
template <class F>
void for_each_panel_group(int64_t num_rows, int64_t in_features, int64_t num_panels,
                          int64_t panel_bytes, const F& body) {
  const int64_t products = num_rows * in_features * num_panels * kLinearPanel;
  const int64_t threads = products < kSerialProducts ? 1 : num_threads();
  const int64_t in_l2 = kGroupBytes / panel_bytes, even = num_panels / (threads * kGroupsPerThread);
  const int64_t few = std::max<int64_t>(1, std::min(in_l2, even));
  const bool has_many_rows = num_rows > most_few_rows() && even >= kManyRowsGroup;
  const int64_t group = has_many_rows ? kManyRowsGroup : few;
  const int64_t equal = has_many_rows ? num_panels / (threads * group) * threads : num_panels;
  const bool is_ahead = num_panels >= 2 * threads * group;
  std::atomic<int64_t> next_group{0};
  const auto take = [&] {
    const int64_t index = next_group.fetch_add(1);
    const int64_t beyond = index - equal, size = beyond < 0 ? group : 1;
    const int64_t begin = beyond < 0 ? index * group : equal * group + beyond;
    return PanelRange{std::min(begin, num_panels), std::min(begin + size, num_panels)};
  };
  parallel_for(threads, 1, [&](int64_t, int64_t) {
    const auto multiply = [&] {
      if constexpr (std::is_invocable_v<F, PanelRange, PanelRange>)
        return std::cref(body);
      else
        return body();
    }();
    PanelRange now = take();
    while (now.begin < now.end) {
      const PanelRange next = is_ahead ? take() : PanelRange{num_panels, num_panels};
      multiply(now, next);
      now = is_ahead ? next : take();
    }
  });
}

}  // namespace tpengine::cpu
