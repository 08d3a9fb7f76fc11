// Launcher: add_lora.
#include <sched.h>

#include <vector>

#include "panels.h"

namespace tpengine::cpu {
namespace {

constexpr int64_t kLineBytes = 64;
// Rows of an item: they pass over an adapter's numbers while these stay in L1 or L2.
constexpr int64_t kItemRows = 64;
// An item reads so many bytes of an adapter: few enough to share the work evenly, and otherwise
// many, since processors fetch beyond an item's end what another one needs.
constexpr int64_t kMostItemBytes = 64 * 1024, kFewestItemBytes = 4 * 1024;
constexpr int64_t kItemsPerThread = 4;

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

int64_t check_first_outputs(const char* op, const Tensor& first_outputs, int64_t num_parts,
                            int64_t num_outputs) {
  check_tensor(op, "first_outputs", first_outputs, aoti_torch_dtype_int32(), {num_parts + 1});
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
  check_tensor(op, "ranks", ranks, aoti_torch_dtype_int32(), {of.num_slots, of.num_parts});
  const int32_t* rank = ranks.data<int32_t>();
  for (int64_t i = 0; i < of.num_slots * of.num_parts; ++i) {
    if (rank[i] < 0 || rank[i] > of.max_rank) {
      fail(op, "ranks holds " + std::to_string(rank[i]) + "; expected 0 to " +
                   std::to_string(of.max_rank));
    }
  }
}

void check_groups(const char* op, const Adapters& of, int64_t num_lora_rows, int64_t num_rows) {
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

// One part of one adapter, for at most kItemRows rows.
struct Part {
  const char* a;
  const char* b;
  int32_t begin, end;  // rows
  int32_t first_column, num_columns, first_output, num_outputs;
};

struct PartItem {
  LoRAItem item;
  int32_t part;
  bool is_expanding;
};

// The items of all parts, those that shrink before those that expand.
struct Items {
  std::vector<Part> parts;
  std::vector<PartItem> list;
  Scratch<std::atomic<int32_t>> left;  // by part: items of its shrinking that are not done
};

void find_parts(const Adapters& of, std::vector<Part>& parts) {
  const int64_t size = bytes_of(of.args.weight_dtype);
  parts.clear();
  for (int64_t g = 0; g < of.num_groups; ++g) {
    const int32_t slot = of.groups[3 * g], group_end = of.groups[3 * g + 2];
    for (int32_t begin = of.groups[3 * g + 1]; begin < group_end; begin += kItemRows) {
      const int32_t end = std::min<int32_t>(begin + kItemRows, group_end);
      int64_t panel = slot * of.num_panels;
      for (int64_t part = 0; part < of.num_parts; ++part) {
        const int64_t place = slot * of.num_parts + part;
        const int32_t first = of.first_outputs[part], outputs = of.first_outputs[part + 1] - first;
        if (const int32_t rank = of.ranks[place]; rank > 0) {
          const int64_t columns = (rank + kLoRATile - 1) / kLoRATile * kLoRATile;
          parts.push_back({of.a + place * of.max_rank * of.args.column_bytes,
                           of.b + panel * of.max_rank * kLoRAPanel * size, begin, end,
                           static_cast<int32_t>(part * of.max_rank), static_cast<int32_t>(columns),
                           first, outputs});
        }
        panel += panels_between(0, outputs);
      }
    }
  }
}

// Calls body(first, count) for pieces of `size` neighbours, whole multiples of `step`, of about
// `item_bytes`.
template <class F>
void for_pieces(int32_t size, int32_t step, int64_t bytes_of_one, int64_t item_bytes,
                const F& body) {
  const int64_t steps = std::max<int64_t>(1, item_bytes / (bytes_of_one * step));
  const int32_t piece = static_cast<int32_t>(std::min<int64_t>(size, steps * step));
  for (int32_t first = 0; first < size; first += piece) body(first, std::min(piece, size - first));
}

void divide(const Adapters& of, int64_t threads, Items& items) {
  const LoRAArgs& args = of.args;
  const int64_t size = bytes_of(args.weight_dtype);
  int64_t a_bytes = 0, b_bytes = 0;
  for (const Part& part : items.parts) {
    a_bytes += part.num_columns * args.column_bytes;
    b_bytes += part.num_columns * part.num_outputs * size;
  }
  const auto item_bytes = [&](int64_t bytes) {
    return std::clamp(bytes / (threads * kItemsPerThread), kFewestItemBytes, kMostItemBytes);
  };
  const int32_t count = static_cast<int32_t>(items.parts.size());
  std::atomic<int32_t>* left = items.left.take(count);
  items.list.clear();
  for (int32_t i = 0; i < count; ++i) {
    const Part& part = items.parts[i];
    const size_t before = items.list.size();
    for_pieces(
        part.num_columns, kLoRATile, args.column_bytes, item_bytes(a_bytes),
        [&](int32_t first, int32_t columns) {
          items.list.push_back({{part.a + first * args.column_bytes, columns * args.column_bytes,
                                 part.begin, part.end, part.first_column + first, columns, 0, 0},
                                i,
                                false});
        });
    left[i].store(static_cast<int32_t>(items.list.size() - before), std::memory_order_relaxed);
  }
  for (int32_t i = 0; i < count; ++i) {
    const Part& part = items.parts[i];
    const int64_t output_bytes = part.num_columns * size;
    for_pieces(part.num_outputs, 2 * kLoRAPanel, output_bytes, item_bytes(b_bytes),
               [&](int32_t first, int32_t outputs) {
                 items.list.push_back(
                     {{part.b + first * output_bytes, outputs * output_bytes, part.begin, part.end,
                       part.first_column, part.num_columns, part.first_output + first, outputs},
                      i,
                      true});
               });
  }
}

int64_t count_products(const Adapters& of, const std::vector<Part>& parts) {
  int64_t products = 0;
  for (const Part& part : parts)
    products +=
        (part.end - part.begin) * part.num_columns * (of.args.in_features + part.num_outputs);
  return products;
}

// All items by all threads that call `run`, each item once.
class SharedItems {
 public:
  SharedItems(const LoRAArgs& args, Items& items)
      : args_(args), list_(items.list), left_(items.left.take(0)) {}

  void run() {
    const int64_t count = static_cast<int64_t>(list_.size());
    const auto kernel = kernels().lora;
    int64_t now = next_.fetch_add(1);
    while (now < count) {
      const PartItem& own = list_[now];
      if (own.is_expanding) wait(left_[own.part]);
      const int64_t next = next_.fetch_add(1);
      kernel(args_, own.item, next < count ? &list_[next].item : nullptr);
      if (!own.is_expanding) left_[own.part].fetch_sub(1, std::memory_order_release);
      now = next;
    }
  }

 private:
  // A thread that waits has left no item that shrinks: it waits only for threads that are at work
  // on one. Mostly none is, as the parts are expanded in the order in which they were shrunk. A
  // thread that yields too soon loses its core to other processes, and the others wait for it.
  static void wait(const std::atomic<int32_t>& left) {
    for (int spins = 0; left.load(std::memory_order_acquire) > 0; ++spins)
      if (spins > kSpins) sched_yield();
  }

  static constexpr int kSpins = 20000;  // some 20 us
  const LoRAArgs& args_;
  const std::vector<PartItem>& list_;
  std::atomic<int32_t>* left_;
  alignas(64) std::atomic<int64_t> next_{0};
};

void add_lora(const Tensor& out, const Tensor& x, const Tensor& a, const Tensor& b,
              const Tensor& ranks, const Tensor& first_outputs, const Tensor& rows,
              const Tensor& groups, const Tensor& shrunk) {
  const char* op = "add_lora";
  LinearArgs layer = {};
  take_rows(op, layer, out, x, std::nullopt);
  Adapters of = {};
  of.args.weight_dtype = element_type(op, "a", a);
  const int64_t size = bytes_of(of.args.weight_dtype), line = kLineBytes / size;
  const int64_t num_lines = (layer.in_features + line - 1) / line;
  check_shape(op, "a", a, {kAnySize, kAnySize, kAnySize, num_lines, kLoRATile, line});
  of.num_slots = a.size(0);
  of.num_parts = a.size(1);
  of.max_rank = a.size(2) * kLoRATile;
  of.num_panels = check_first_outputs(op, first_outputs, of.num_parts, layer.out_features);
  check_tensor(op, "b", b, a.dtype(), {of.num_slots, of.num_panels, of.max_rank, kLoRAPanel});
  check_ranks(op, ranks, of);
  check_tensor(op, "rows", rows, aoti_torch_dtype_int32(), {kAnySize});
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
  check_tensor(op, "shrunk", shrunk, aoti_torch_dtype_float32(),
               {rows.size(0), of.args.num_columns});
  check_tensor(op, "groups", groups, aoti_torch_dtype_int32(), {kAnySize, 3});
  of.groups = groups.data<int32_t>();
  of.num_groups = groups.size(0);
  check_groups(op, of, rows.size(0), layer.num_rows);
  of.a = a.data<char>();
  of.b = b.data<char>();
  of.ranks = ranks.data<int32_t>();
  of.first_outputs = first_outputs.data<int32_t>();

  static thread_local Items items;
  find_parts(of, items.parts);
  const int64_t threads = count_products(of, items.parts) < kSerialProducts ? 1 : num_threads();
  divide(of, threads, items);
  SharedItems shared(of.args, items);
  parallel_for(threads, 1, [&](int64_t, int64_t) { shared.run(); });
}

}  // namespace

void register_lora(TorchLibraryHandle library) { implement<&add_lora>(library, "add_lora"); }

}  // namespace tpengine::cpu
