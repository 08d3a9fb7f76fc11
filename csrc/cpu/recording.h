// Calls of ops, noted instead of run, to be run again and again without Python in between: what a
// CUDA graph is on a GPU. Between two ops of a decode step Python takes about as long as a waiting
// thread stays awake; without it the threads go from one op to the next. Exchanges of ranks
// (shared_memory.cpp) are noted too.
#pragma once

#include <functional>
#include <vector>

#include "../common/checks.h"

namespace tpengine::cpu {

// Tensors whose memory was declared to hold rows have `num_rows` of them in their first dimension.
// A run may ask for fewer: then those tensors are that much shorter, all else stays.
class Recording {
 public:
  explicit Recording(int64_t num_rows) : num_rows_(num_rows) {}
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  // The one that this thread notes its calls in; null: it runs them.
  static Recording*& current() {
    static thread_local Recording* recording = nullptr;
    return recording;
  }

  void declare_rows(const void* begin, int64_t num_bytes) {
    const char* first = static_cast<const char*>(begin);
    row_memory_.push_back({first, first + num_bytes});
  }

  template <auto F, class Arguments>
  void note(Arguments&& arguments) {
    auto kept = std::make_shared<Arguments>(std::move(arguments));
    const size_t known = row_counts_.size();
    try {
      std::apply([this](auto&... argument) { (find_rows(argument), ...); }, *kept);
    } catch (...) {
      row_counts_.resize(known);  // the others go with `kept`
      throw;
    }
    calls_.push_back([kept](int64_t) {
      std::apply(F, *kept);
      return true;
    });
  }

  // Notes a call that is no op: call(size), which returns whether it succeeded. `size` is for all
  // rows; a run gives the share of its rows.
  template <class Call>
  void note_sized(int64_t size, Call call) {
    const int64_t row_size = size / num_rows_;
    calls_.push_back([row_size, call](int64_t num_rows) { return call(row_size * num_rows); });
  }

  // Returns the number of the call that failed, after which none runs; -1: none has.
  int64_t run(int64_t num_rows) const {
    for (int64_t* size : row_counts_) *size = num_rows;
    for (size_t i = 0; i < calls_.size(); ++i)
      if (!calls_[i](num_rows)) return static_cast<int64_t>(i);
    return -1;
  }

  int64_t num_rows() const { return num_rows_; }
  int64_t num_calls() const { return static_cast<int64_t>(calls_.size()); }

 private:
  struct Memory {
    const char* begin;
    const char* end;
  };

  bool is_rows(const Tensor& tensor) const {
    const char* data = tensor.data<char>();
    for (const Memory& memory : row_memory_)
      if (data >= memory.begin && data < memory.end) return true;
    return false;
  }
  template <class T>
  void find_rows(T&) {}
  void find_rows(Optional<Tensor>& tensor) {
    if (tensor && is_rows(*tensor)) fail("recording", "an optional tensor holds rows");
  }
  void find_rows(Tensor& tensor) {
    if (!is_rows(tensor)) return;
    if (tensor.dim() == 0 || tensor.size(0) != num_rows_) {
      fail("recording", "a tensor of rows has shape " + shape_name(tensor) + "; expected " +
                            std::to_string(num_rows_) + " in its first dimension");
    }
    row_counts_.push_back(tensor.own_sizes());
  }

  int64_t num_rows_;
  std::vector<Memory> row_memory_;
  std::vector<int64_t*> row_counts_;
  std::vector<std::function<bool(int64_t)>> calls_;  // of the number of rows
};

// Runs an op, or notes its call where the thread records.
struct RunOrNote {
  template <auto F, class Arguments>
  static void call(Arguments&& arguments) {
    if (Recording* recording = Recording::current())
      recording->note<F>(std::move(arguments));
    else
      std::apply(F, arguments);
  }
};

template <auto F>
void implement(TorchLibraryHandle library, const char* name) {
  ::tpengine::implement<F, RunOrNote>(library, name);
}

}  // namespace tpengine::cpu
