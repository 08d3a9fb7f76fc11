// How the panels of a packed weight are shared among threads.
#pragma once

#include <algorithm>
#include <atomic>

#include "launch.h"

namespace tpengine::cpu {

// Panels that a thread takes at once: few enough to share the work evenly, and to keep their
// weights in L2 while blocks of rows pass.
constexpr int64_t kGroupBytes = 512 * 1024;
constexpr int64_t kGroupsPerThread = 4;
// Below this waking a thread costs more than it saves.
constexpr int64_t kSerialProducts = 1 << 16;

// body(first, end) for groups of panels that cover [0, num_panels). They are handed out as threads
// become free: a core that is slowed down does not hold the others up.
template <class F>
void for_each_panel_group(int64_t num_rows, int64_t in_features, int64_t num_panels,
                          int64_t panel_bytes, const F& body) {
  const int64_t products = num_rows * in_features * num_panels * kLinearPanel;
  const int64_t threads = products < kSerialProducts ? 1 : num_threads();
  const int64_t in_l2 = kGroupBytes / panel_bytes, even = num_panels / (threads * kGroupsPerThread);
  const int64_t group = std::max<int64_t>(1, std::min(in_l2, even));
  std::atomic<int64_t> next{0};
  parallel_for(threads, 1, [&](int64_t, int64_t) {
    for (int64_t first = next.fetch_add(group); first < num_panels; first = next.fetch_add(group))
      body(first, std::min(first + group, num_panels));
  });
}

}  // namespace tpengine::cpu
