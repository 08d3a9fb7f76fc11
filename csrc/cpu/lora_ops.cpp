// Launcher: add_lora.
#include <sched.h>

#include <vector>

#include "panels.h"

namespace tpengine::cpu {
namespace {

constexpr int64_t kLineBytes = 64;
// Rows of an item: they pass over an adapter's numbers while these stay in L1 or L2.
constexpr int64_t kItemRows = 64;
// An item reads about so many bytes of an adapter: few enough to share the work evenly.
constexpr int64_t kItemBytes = 16 * 1024;

// The adapters of a layer, and which rows have them.
struct Adapters {
  LoRAArgs args;
  const char* a;
  const char* b;
  const int32_t* ranks;          // [num_slots, num_parts]
  const int32_t* first_outputs;  // [num_parts + 1]
  const int32_t* groups;         // [num_groups, 3]: slot, begin and end in `rows`
  int64_t num_slots, num_parts, max_rank, num_panels, num_groups;
};

int64_t panels_between(int64_t first_output, int64_t end) {
  return (end - first_output + kLoRAPanel - 1) / kLoRAPanel;
}

// How many columns or outputs an item has, a multiple of `step`.
int32_t item_size(int64_t bytes_of_one, int64_t step) {
  return static_cast<int32_t>(std::max<int64_t>(step, kItemBytes / bytes_of_one / step * step));
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

void check_ranks(const char* op, const Tensor& ranks, const Adapters& of) {
  check_dtype(op, "ranks", ranks, aoti_torch_dtype_int32());
  check_dim(op, "ranks", ranks, 2);
  check_size(op, "ranks", ranks, 0, of.num_slots);
  check_size(op, "ranks", ranks, 1, of.num_parts);
  check_packed(op, "ranks", ranks);
  const int32_t* rank = ranks.data<int32_t>();
  for (int64_t i = 0; i < of.num_slots * of.num_parts; ++i) {
    if (rank[i] < 0 || rank[i] > of.max_rank) {
      fail(op, "ranks holds " + std::to_string(rank[i]) + "; expected 0 to " +
                   std::to_string(of.max_rank));
    }
  }
}

void check_groups(const char* op, const Tensor& groups, const Adapters& of, int64_t num_lora_rows,
                  int64_t num_rows) {
  check_dtype(op, "groups", groups, aoti_torch_dtype_int32());
  check_dim(op, "groups", groups, 2);
  check_size(op, "groups", groups, 1, 3);
  check_packed(op, "groups", groups);
  for (int64_t i = 0; i < of.num_groups; ++i) {
    const int32_t slot = of.groups[3 * i], begin = of.groups[3 * i + 1], end = of.groups[3 * i + 2];
    if (slot < 0 || slot >= of.num_slots || begin < 0 || begin > end || end > num_lora_rows) {
      fail(op, "groups[" + std::to_string(i) + "] is " + std::to_string(slot) + ", " +
                   std::to_string(begin) + ", " + std::to_string(end) + "; there are slots 0 to " +
                   std::to_string(of.num_slots - 1) + " and " + std::to_string(num_lora_rows) +
                   " rows with adapters");
    }
    for (int32_t row = begin; row < end; ++row) {
      if (of.args.rows[row] < 0 || of.args.rows[row] >= num_rows) {
        fail(op, "rows[" + std::to_string(row) + "] is " + std::to_string(of.args.rows[row]) +
                     "; x has rows 0 to " + std::to_string(num_rows - 1));
      }
    }
  }
}

// The items of both products, those of the first before those of the second.
struct Items {
  std::vector<LoRAItem> list, expanding;
  int64_t num_shrinking;
  int64_t products;
};

void divide(const Adapters& of, Items& items) {
  const LoRAArgs& args = of.args;
  const int64_t size = args.weight_dtype == DType::kFloat32 ? 4 : 2;
  items.list.clear();
  items.expanding.clear();
  items.products = 0;
  for (int64_t g = 0; g < of.num_groups; ++g) {
    const int32_t *group = of.groups + 3 * g, slot = group[0];
    int64_t panel = slot * of.num_panels;
    for (int64_t part = 0; part < of.num_parts; ++part) {
      const int32_t first = of.first_outputs[part], outputs = of.first_outputs[part + 1] - first;
      const int32_t rank = of.ranks[slot * of.num_parts + part];
      const int32_t columns = (rank + kLoRATile - 1) / kLoRATile * kLoRATile;
      const char* a = of.a + (slot * of.num_parts + part) * of.max_rank * args.column_bytes;
      const char* b = of.b + panel * of.max_rank * kLoRAPanel * size;
      panel += panels_between(0, outputs);
      if (rank == 0) continue;
      items.products += (group[2] - group[1]) * columns * (args.in_features + outputs);
      const int32_t column = static_cast<int32_t>(part * of.max_rank);
      const int32_t column_step = item_size(args.column_bytes, kLoRATile);
      const int32_t output_step = item_size(columns * size, 2 * kLoRAPanel);
      for (int32_t begin = group[1]; begin < group[2]; begin += kItemRows) {
        const int32_t end = std::min<int32_t>(begin + kItemRows, group[2]);
        for (int32_t c = 0; c < columns; c += column_step) {
          const int32_t count = std::min(column_step, columns - c);
          items.list.push_back({a + c * args.column_bytes, count * args.column_bytes, begin, end,
                                column + c, count, 0, 0});
        }
        for (int32_t n = 0; n < outputs; n += output_step) {
          const int32_t count = std::min(output_step, outputs - n);
          items.expanding.push_back({b + n * columns * size, count * columns * size, begin, end,
                                     column, columns, first + n, count});
        }
      }
    }
  }
  items.num_shrinking = static_cast<int64_t>(items.list.size());
  items.list.insert(items.list.end(), items.expanding.begin(), items.expanding.end());
}

// All items by all threads that call `run`, each item once.
class SharedItems {
 public:
  SharedItems(const LoRAArgs& args, const Items& items) : args_(args), items_(items) {}

  void run() {
    const int64_t count = static_cast<int64_t>(items_.list.size());
    const auto kernel = kernels().lora;
    int64_t now = next_.fetch_add(1);
    while (now < count) {
      if (now >= items_.num_shrinking) wait();
      const int64_t next = next_.fetch_add(1);
      kernel(args_, items_.list[now], next < count ? &items_.list[next] : nullptr);
      if (now < items_.num_shrinking) done_.fetch_add(1, std::memory_order_release);
      now = next;
    }
  }

 private:
  // Until `shrunk` is complete. A thread that waits has left no part of it: it waits only for
  // threads that are at work on one.
  void wait() const {
    for (int spins = 0; done_.load(std::memory_order_acquire) < items_.num_shrinking; ++spins)
      if (spins > kSpins) sched_yield();
  }

  static constexpr int kSpins = 20000;  // some 20 us
  const LoRAArgs& args_;
  const Items& items_;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> done_{0};
};

void add_lora(const Tensor& out, const Tensor& x, const Tensor& a, const Tensor& b,
              const Tensor& ranks, const Tensor& first_outputs, const Tensor& rows,
              const Tensor& groups, const Tensor& shrunk) {
  const char* op = "add_lora";
  LinearArgs layer = {};
  take_rows(op, layer, out, x, Optional<Tensor>(StableIValue{0}));
  Adapters of = {};
  of.args.weight_dtype = element_type(op, "a", a);
  check_dim(op, "a", a, 6);
  check_packed(op, "a", a);
  of.num_slots = a.size(0);
  of.num_parts = a.size(1);
  of.max_rank = a.size(2) * kLoRATile;
  const int64_t line = kLineBytes / (of.args.weight_dtype == DType::kFloat32 ? 4 : 2);
  check_size(op, "a", a, 3, (layer.in_features + line - 1) / line);
  check_size(op, "a", a, 4, kLoRATile);
  check_size(op, "a", a, 5, line);
  of.num_panels = check_first_outputs(op, first_outputs, of.num_parts, layer.out_features);
  check_dtype(op, "b", b, a.dtype());
  check_dim(op, "b", b, 4);
  check_size(op, "b", b, 0, of.num_slots);
  check_size(op, "b", b, 1, of.num_panels);
  check_size(op, "b", b, 2, of.max_rank);
  check_size(op, "b", b, 3, kLoRAPanel);
  check_packed(op, "b", b);
  check_ranks(op, ranks, of);
  check_dim(op, "rows", rows, 1);
  check_vector(op, "rows", rows, aoti_torch_dtype_int32(), rows.size(0));
  of.args = {layer.dtype,
             of.args.weight_dtype,
             layer.out,
             layer.x,
             rows.data<int32_t>(),
             shrunk.data<float>(),
             layer.in_features,
             layer.out_stride,
             layer.x_stride,
             of.num_parts * of.max_rank,
             a.size(3) * kLineBytes};
  check_dtype(op, "shrunk", shrunk, aoti_torch_dtype_float32());
  check_dim(op, "shrunk", shrunk, 1);
  check_packed(op, "shrunk", shrunk);
  const int64_t shrunk_size = rows.size(0) * of.args.num_columns;
  if (shrunk.size(0) < shrunk_size) {
    fail(op, "shrunk has shape " + shape_name(shrunk) + "; expected at least " +
                 std::to_string(shrunk_size) + " numbers");
  }
  of.groups = groups.data<int32_t>();
  of.num_groups = groups.size(0);
  check_groups(op, groups, of, rows.size(0), layer.num_rows);
  of.a = a.data<char>();
  of.b = b.data<char>();
  of.ranks = ranks.data<int32_t>();
  of.first_outputs = first_outputs.data<int32_t>();

  static thread_local Items items;
  divide(of, items);
  SharedItems shared(of.args, items);
  parallel_for(items.products < kSerialProducts ? 1 : num_threads(), 1,
               [&](int64_t, int64_t) { shared.run(); });
}

}  // namespace

void register_lora(TorchLibraryHandle library) { implement<&add_lora>(library, "add_lora"); }

}  // namespace tpengine::cpu
