// Launcher: add_lora; and the work that products with adapters share with it.
#include <sched.h>

#include "lora_work.h"
#include "panels.h"

namespace tpengine::cpu {
namespace {

constexpr int64_t kLineBytes = 64;
// Rows of a part: they pass over an adapter's numbers while these stay in L1 or L2.
constexpr int64_t kPartRows = 64;
// An item that shrinks reads so many bytes of an adapter: few enough to share the work evenly, and
// otherwise many, since processors fetch beyond an item's end what another one needs.
constexpr int64_t kMostItemBytes = 64 * 1024, kFewestItemBytes = 4 * 1024;
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kPanelsOfWeight = kLinearPanel / kLoRAPanel;

int64_t panels_between(int64_t first_output, int64_t end) {
  return (end - first_output + kLoRAPanel - 1) / kLoRAPanel;
}

int64_t check_first_outputs(const char* op, const Tensor& first_outputs, int64_t num_parts,
                            int64_t num_outputs) {
  check_vector(op, "first_outputs", first_outputs, aoti_torch_dtype_int32(), num_parts + 1);
  const int32_t* first = first_outputs.data<int32_t>();
  int64_t panels = 0;
  for (int64_t part = 0; part < num_parts; ++part) {
    if (first[part] < 0 || first[part] > first[part + 1] || first[part + 1] > num_outputs) {
      fail(op, "first_outputs[" + std::to_string(part) + ":" + std::to_string(part + 2) + "] is " +
                   std::to_string(first[part]) + ", " + std::to_string(first[part + 1]) +
                   "; expected ascending numbers from 0 to " + std::to_string(num_outputs));
    }
    panels += panels_between(first[part], first[part + 1]);
  }
  return panels;
}

// Whether panel p of the parts holds the outputs from p kLoRAPanel on.
bool begin_with_panels(const int32_t* first_outputs, int64_t num_parts) {
  for (int64_t part = 0; part < num_parts; ++part)
    if (first_outputs[part] % kLoRAPanel != 0) return false;
  return num_parts == 0 || first_outputs[0] == 0;
}

void add_lora(const Tensor& out, const Tensor& x, const Tensor& a, const Tensor& b,
              const Tensor& ranks, const Tensor& first_outputs, const Tensor& rows,
              const Tensor& groups, const Tensor& shrunk) {
  const char* op = "add_lora";
  LinearArgs layer = {};
  take_rows(op, layer, out, x, Optional<Tensor>(StableIValue{0}));
  LoRAWork(op, layer, {a, b, ranks, first_outputs, rows, groups, shrunk}).run();
}

}  // namespace

LoRAWork::Lists& LoRAWork::own_lists() {
  static thread_local Lists lists;
  return lists;
}

LoRAWork::LoRAWork(const char* op, const LoRATensors& adapters, int64_t num_rows,
                   int64_t num_outputs, LoRAArgs args)
    : args_(args), lists_(own_lists()) {
  const auto& [a, b, ranks, first_outputs, rows, groups, shrunk] = adapters;
  args_.weight_dtype = element_type(op, "a", a);
  check_dim(op, "a", a, 6);
  check_packed(op, "a", a);
  num_slots_ = a.size(0);
  num_parts_ = a.size(1);
  max_rank_ = a.size(2) * kLoRATile;
  const int64_t line = kLineBytes / element_bytes();
  check_size(op, "a", a, 3, (args_.in_features + line - 1) / line);
  check_size(op, "a", a, 4, kLoRATile);
  check_size(op, "a", a, 5, line);
  num_panels_ = check_first_outputs(op, first_outputs, num_parts_, num_outputs);
  check_dtype(op, "b", b, a.dtype());
  check_dim(op, "b", b, 4);
  check_size(op, "b", b, 0, num_slots_);
  check_size(op, "b", b, 1, num_panels_);
  check_size(op, "b", b, 2, max_rank_);
  check_size(op, "b", b, 3, kLoRAPanel);
  check_packed(op, "b", b);
  check_ranks(op, ranks);
  check_dim(op, "rows", rows, 1);
  check_vector(op, "rows", rows, aoti_torch_dtype_int32(), rows.size(0));
  args_.rows = rows.data<int32_t>();
  args_.shrunk = shrunk.data<float>();
  args_.num_columns = num_parts_ * max_rank_;
  args_.column_bytes = a.size(3) * kLineBytes;
  check_matrix(op, "shrunk", shrunk, aoti_torch_dtype_float32(), rows.size(0), args_.num_columns);
  check_dim(op, "groups", groups, 2);
  check_matrix(op, "groups", groups, aoti_torch_dtype_int32(), groups.size(0), 3);
  groups_ = groups.data<int32_t>();
  num_groups_ = groups.size(0);
  check(op, rows.size(0), num_rows);
  a_ = a.data<char>();
  b_ = b.data<char>();
  ranks_ = ranks.data<int32_t>();
  first_outputs_ = first_outputs.data<int32_t>();
  fits_panels_ = begin_with_panels(first_outputs_, num_parts_);
  find_parts();
  divide_shrinking();
}

void LoRAWork::check_ranks(const char* op, const Tensor& ranks) const {
  check_matrix(op, "ranks", ranks, aoti_torch_dtype_int32(), num_slots_, num_parts_);
  const int32_t* rank = ranks.data<int32_t>();
  for (int64_t i = 0; i < num_slots_ * num_parts_; ++i) {
    if (rank[i] < 0 || rank[i] > max_rank_) {
      fail(op, "ranks holds " + std::to_string(rank[i]) + "; expected 0 to " +
                   std::to_string(max_rank_));
    }
  }
}

void LoRAWork::check(const char* op, int64_t num_lora_rows, int64_t num_rows) const {
  for (int64_t i = 0; i < num_groups_; ++i) {
    const int32_t slot = groups_[3 * i], begin = groups_[3 * i + 1], end = groups_[3 * i + 2];
    if (slot < 0 || slot >= num_slots_ || begin < 0 || begin > end || end > num_lora_rows) {
      fail(op, "groups[" + std::to_string(i) + "] is " + std::to_string(slot) + ", " +
                   std::to_string(begin) + ", " + std::to_string(end) + "; there are slots 0 to " +
                   std::to_string(num_slots_ - 1) + " and " + std::to_string(num_lora_rows) +
                   " rows with adapters");
    }
    for (int32_t row = begin; row < end; ++row) {
      if (args_.rows[row] < 0 || args_.rows[row] >= num_rows) {
        fail(op, "rows[" + std::to_string(row) + "] is " + std::to_string(args_.rows[row]) +
                     "; x has rows 0 to " + std::to_string(num_rows - 1));
      }
    }
  }
}

void LoRAWork::find_parts() {
  const int64_t size = element_bytes();
  lists_.parts.clear();
  for (int64_t g = 0; g < num_groups_; ++g) {
    const int32_t slot = groups_[3 * g], group_end = groups_[3 * g + 2];
    for (int32_t begin = groups_[3 * g + 1]; begin < group_end; begin += kPartRows) {
      const int32_t end = std::min<int32_t>(begin + kPartRows, group_end);
      int64_t panel = 0;
      for (int64_t part = 0; part < num_parts_; ++part) {
        const int64_t place = slot * num_parts_ + part;
        const int32_t first = first_outputs_[part], outputs = first_outputs_[part + 1] - first;
        if (const int32_t rank = ranks_[place]; rank > 0) {
          const int64_t columns = (rank + kLoRATile - 1) / kLoRATile * kLoRATile;
          lists_.parts.push_back({a_ + place * max_rank_ * args_.column_bytes,
                                  b_ + (slot * num_panels_ + panel) * max_rank_ * kLoRAPanel * size,
                                  begin, end, static_cast<int32_t>(part * max_rank_),
                                  static_cast<int32_t>(columns), first, outputs,
                                  static_cast<int32_t>(panel)});
          num_products_ += (end - begin) * columns * (args_.in_features + outputs);
        }
        panel += panels_between(0, outputs);
      }
    }
  }
}

void LoRAWork::divide_shrinking() {
  int64_t bytes = 0;
  for (const Part& part : lists_.parts) bytes += part.num_columns * args_.column_bytes;
  const int64_t item_bytes =
      std::clamp(bytes / (num_threads() * kItemsPerThread), kFewestItemBytes, kMostItemBytes);
  const int32_t step = static_cast<int32_t>(
      std::max<int64_t>(1, item_bytes / (args_.column_bytes * kLoRATile)) * kLoRATile);
  lists_.shrinking.clear();
  for (const Part& part : lists_.parts) {
    for (int32_t first = 0; first < part.num_columns; first += step) {
      const int32_t columns = std::min(step, part.num_columns - first);
      lists_.shrinking.push_back({part.a + first * args_.column_bytes, columns * args_.column_bytes,
                                  part.begin, part.end, part.first_column + first, columns, 0, 0});
    }
  }
  left_.store(static_cast<int64_t>(lists_.shrinking.size()), std::memory_order_relaxed);
}

void LoRAWork::shrink() {
  const std::vector<LoRAItem>& items = lists_.shrinking;
  const int64_t count = static_cast<int64_t>(items.size());
  const auto kernel = kernels().lora;
  for (int64_t now = next_.fetch_add(1); now < count;) {
    const int64_t next = next_.fetch_add(1);
    kernel(args_, items[now], next < count ? &items[next] : nullptr);
    left_.fetch_sub(1, std::memory_order_release);
    now = next;
  }
}

// A thread that waits has left no item that shrinks: it waits only for threads that are at work on
// one. A thread that yields too soon loses its core to other processes, and the others wait for it.
void LoRAWork::wait_for_shrunk() const {
  constexpr int kSpins = 20000;  // some 20 us
  for (int spins = 0; left_.load(std::memory_order_acquire) > 0; ++spins)
    if (spins > kSpins) sched_yield();
}

// Those outputs of a part that lie in these panels; false: none.
bool LoRAWork::piece_of(const Part& part, PanelRange panels, LoRAItem& item) const {
  const int64_t first = std::max<int64_t>(panels.begin - part.first_panel, 0) * kLoRAPanel;
  const int64_t end =
      std::min<int64_t>((panels.end - part.first_panel) * kLoRAPanel, part.num_outputs);
  if (first >= end) return false;
  const int64_t output_bytes = part.num_columns * element_bytes();
  item = {part.b + first * output_bytes,
          panels_between(first, end) * kLoRAPanel * output_bytes,
          part.begin,
          part.end,
          part.first_column,
          part.num_columns,
          part.first_output + static_cast<int32_t>(first),
          static_cast<int32_t>(end - first)};
  return true;
}

void LoRAWork::fetch(PanelRange weight) const {
  const PanelRange panels = {weight.begin * kPanelsOfWeight, weight.end * kPanelsOfWeight};
  LoRAItem item;
  for (const Part& part : lists_.parts) {
    if (!piece_of(part, panels, item)) continue;
    for (int64_t i = 0; i < item.weight_bytes; i += kLineBytes)
      __builtin_prefetch(item.weight + i, 0, 2);
  }
}

void LoRAWork::expand_panels(PanelRange panels) {
  const auto kernel = kernels().lora;
  LoRAItem item;
  for (const Part& part : lists_.parts)
    if (piece_of(part, panels, item)) kernel(args_, item, nullptr);
}

void LoRAWork::expand(PanelRange weight) {
  wait_for_shrunk();
  expand_panels({weight.begin * kPanelsOfWeight, weight.end * kPanelsOfWeight});
}

void LoRAWork::run() {
  if (lists_.parts.empty()) return;
  const int64_t threads = num_products_ < kSerialProducts ? 1 : num_threads();
  const int64_t pieces = threads * kItemsPerThread;
  std::atomic<int64_t> next_piece{0};
  parallel_for(threads, 1, [&](int64_t, int64_t) {
    shrink();
    wait_for_shrunk();
    for (int64_t i; (i = next_piece.fetch_add(1)) < pieces;)
      expand_panels({num_panels_ * i / pieces, num_panels_ * (i + 1) / pieces});
  });
}

void register_lora(TorchLibraryHandle library) { implement<&add_lora>(library, "add_lora"); }

}  // namespace tpengine::cpu
