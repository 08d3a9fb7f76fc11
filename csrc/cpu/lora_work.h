// What adapters add to one linear layer, as work that the threads of a product share.
#pragma once

#include <atomic>
#include <vector>

#include "launch.h"

namespace tpengine::cpu {

// The arguments of an op that say which adapters there are, and which rows have them.
struct LoRATensors {
  const Tensor& a;
  const Tensor& b;
  const Tensor& ranks;
  const Tensor& first_outputs;
  const Tensor& rows;
  const Tensor& groups;
  const Tensor& shrunk;
};

// A product's threads call `shrink` first. Then, for panels of its weight, `fetch` before the
// product and `expand` after it: their outputs are still in the caches, and no thread has to be
// woken for the adapters alone.
class LoRAWork {
 public:
  // args: dtype, out, x and their sizes are read, see take_rows.
  template <class Args>
  LoRAWork(const char* op, const Args& layer, const LoRATensors& adapters)
      : LoRAWork(op, adapters, layer.num_rows, layer.out_features,
                 {layer.dtype, DType::kFloat32, layer.out, layer.x, nullptr, nullptr,
                  layer.in_features, layer.out_stride, layer.x_stride, 0, 0}) {}
  LoRAWork(const LoRAWork&) = delete;
  LoRAWork& operator=(const LoRAWork&) = delete;

  // Calls multiply(this), whose threads then do this work; or multiply(nullptr), and then does the
  // work, where a part of the layer does not begin with a panel of the weight.
  template <class F>
  void run_with(const F& multiply) {
    if (fits_panels_) return multiply(this);
    multiply(nullptr);
    run();
  }
  // All of it, after the product.
  void run();

  void shrink();
  void fetch(PanelRange weight) const;
  void expand(PanelRange weight);

 private:
  // One part of one adapter, for some rows. Its panels are counted over all parts.
  struct Part {
    const char* a;
    const char* b;
    int32_t begin, end;  // rows
    int32_t first_column, num_columns, first_output, num_outputs, first_panel;
  };
  struct Lists {
    std::vector<Part> parts;
    std::vector<LoRAItem> shrinking;
  };
  static Lists& own_lists();

  LoRAWork(const char* op, const LoRATensors& adapters, int64_t num_rows, int64_t num_outputs,
           LoRAArgs args);
  void check(const char* op, int64_t num_lora_rows, int64_t num_rows) const;
  void check_ranks(const char* op, const Tensor& ranks) const;
  void find_parts();
  void divide_shrinking();
  int64_t element_bytes() const { return args_.weight_dtype == DType::kFloat32 ? 4 : 2; }
  bool piece_of(const Part& part, PanelRange panels, LoRAItem& item) const;
  void wait_for_shrunk() const;
  void expand_panels(PanelRange panels);

  LoRAArgs args_;
  const char* a_;
  const char* b_;
  const int32_t* ranks_;          // [num_slots, num_parts]
  const int32_t* first_outputs_;  // [num_parts + 1]
  const int32_t* groups_;         // [num_groups, 3]: slot, begin and end in `rows`
  int64_t num_slots_, num_parts_, max_rank_, num_panels_, num_groups_;
  int64_t num_products_ = 0;
  bool fits_panels_ = true;
  Lists& lists_;
  alignas(64) std::atomic<int64_t> next_{0};  // item that shrinks
  alignas(64) std::atomic<int64_t> left_{0};  // items of these that are not done
};

}  // namespace tpengine::cpu
