// Launchers: top_experts and expert_mlp.
#include <cmath>
#include <vector>

#include "panels.h"

namespace tpengine::cpu {
namespace {

constexpr int64_t kMostChosen = 64;

// Checks ids and weights of each token's experts; returns how many a token has.
int64_t check_choices(const char* op, const Tensor& expert_ids, const Tensor& expert_weights,
                      int64_t num_tokens) {
  check_tensor(op, "expert_ids", expert_ids, aoti_torch_dtype_int32(), {num_tokens, kAnySize});
  const int64_t count = expert_ids.size(1);
  const int32_t float32 = aoti_torch_dtype_float32();
  check_tensor(op, "expert_weights", expert_weights, float32, {num_tokens, count});
  check_at_most(op, "the number of a token's experts", count, kMostChosen);
  return count;
}

// The k likeliest experts of a token, likeliest first, by the exponentials of its logits. Chosen
// ones become -1. Ids are valid even if the logits are not: each comparison with NaN is false.
void choose(float* likelihoods, int64_t num_experts, bool normalize, int64_t k, int32_t* ids,
            float* weights) {
  float total = 0.f, chosen = 0.f;
  for (int64_t e = 0; e < num_experts; ++e) total += likelihoods[e];
  for (int64_t j = 0; j < k; ++j) {
    int64_t best = 0;
    for (int64_t e = 1; e < num_experts; ++e)
      if (likelihoods[e] > likelihoods[best]) best = e;
    ids[j] = static_cast<int32_t>(best);
    chosen += weights[j] = likelihoods[best] / total;
    likelihoods[best] = -1.f;
  }
  for (int64_t j = 0; normalize && j < k; ++j) weights[j] /= chosen;
}

void top_experts(const Tensor& expert_ids, const Tensor& expert_weights, const Tensor& logits,
                 bool normalize) {
  const char* op = "top_experts";
  const DType dtype = element_type(op, "logits", logits);
  check_shape(op, "logits", logits, {kAnySize, kAnySize}, 1);
  const int64_t num_tokens = logits.size(0), num_experts = logits.size(1);
  const int64_t k = check_choices(op, expert_ids, expert_weights, num_tokens);
  check_at_most(op, "the number of a token's experts", k, num_experts);
  int32_t* ids = expert_ids.data<int32_t>();
  float* weights = expert_weights.data<float>();
  const void* numbers = logits.raw();
  const int64_t stride = logits.stride(0);
  parallel_for(num_tokens, row_grain(num_experts * (8 + k)), [&](int64_t begin, int64_t end) {
    std::vector<float> row(num_experts);
    for (int64_t token = begin; token < end; ++token) {
      float largest = -INFINITY;
      for (int64_t e = 0; e < num_experts; ++e) {
        row[e] = number_at(dtype, numbers, token * stride + e);
        largest = std::max(largest, row[e]);
      }
      for (float& likelihood : row) likelihood = std::exp(likelihood - largest);
      choose(row.data(), num_experts, normalize, k, ids + token * k, weights + token * k);
    }
  });
}

// Rows [begin, end) of an expert, among the rows sorted by expert.
struct Run {
  int64_t expert, begin, end;
};

// Sorts (token, choice) pairs by expert. `places` gets each pair's row; experts without rows have
// no run.
std::vector<Run> sort_by_expert(const char* op, const Tensor& expert_ids, int64_t num_experts,
                                std::vector<int64_t>& places) {
  const int32_t* ids = expert_ids.data<int32_t>();
  std::vector<int64_t> starts(num_experts + 1);
  for (size_t pair = 0; pair < places.size(); ++pair) {
    if (ids[pair] < 0 || ids[pair] >= num_experts) {
      fail(op, "expert_ids holds " + std::to_string(ids[pair]) + "; there are experts 0 to " +
                   std::to_string(num_experts - 1));
    }
    ++starts[ids[pair] + 1];
  }
  std::vector<Run> runs;
  for (int64_t e = 0; e < num_experts; ++e) {
    if (starts[e + 1] > 0) runs.push_back({e, starts[e], starts[e] + starts[e + 1]});
    starts[e + 1] += starts[e];
  }
  for (size_t pair = 0; pair < places.size(); ++pair) places[pair] = starts[ids[pair]]++;
  return runs;
}

// The products of all runs. Their panels are numbered one run after the other, and threads take
// groups of them, as if they were those of one weight.
//
// all: the arguments of a product whose rows are all rows, and whose weight is that of expert 0.
void multiply_runs(const std::vector<Run>& runs, LinearArgs all) {
  widen_inputs(all);
  const int64_t size = bytes_of(all.dtype), panels = num_panels(all.out_features);
  const int64_t panel_bytes = kLinearPanel * all.in_features * size;
  const int64_t num_runs = static_cast<int64_t>(runs.size());
  const auto args_of = [&](const Run& run) {
    LinearArgs args = all;
    args.num_rows = run.end - run.begin;
    args.packed = static_cast<const char*>(all.packed) + run.expert * panels * panel_bytes;
    args.x = static_cast<const char*>(all.x) + run.begin * all.x_stride * bytes_of_input(all.dtype);
    args.out = static_cast<char*>(all.out) + run.begin * all.out_stride * size;
    return args;
  };
  // The first panels of `range`, as numbered from the first of another run's expert: the experts'
  // weights lie one after the other.
  const auto seen_from = [&](int64_t run, PanelRange range) {
    if (range.begin >= range.end) return PanelRange{0, 0};
    const int64_t own = range.begin / panels, end = std::min(range.end, (own + 1) * panels);
    const int64_t shift = (runs[own].expert - runs[run].expert - own) * panels;
    return PanelRange{range.begin + shift, end + shift};
  };
  const auto kernel = kernels().linear;
  for_each_panel_group((all.num_rows + num_runs - 1) / num_runs, all.in_features, num_runs * panels,
                       panel_bytes, [&](PanelRange now, PanelRange next) {
                         while (now.begin < now.end) {
                           const int64_t run = now.begin / panels;
                           const PanelRange here = seen_from(run, now);
                           now.begin += here.end - here.begin;
                           kernel(args_of(runs[run]), here,
                                  seen_from(run, now.begin < now.end ? now : next));
                         }
                       });
}

void expert_mlp(const Tensor& out, const Tensor& x, const Tensor& expert_ids,
                const Tensor& expert_weights, const Tensor& gate_up, const Tensor& down) {
  const char* op = "expert_mlp";
  LinearArgs args = {};
  take_rows(op, args, out, x, std::nullopt);
  const int64_t num_tokens = args.num_rows, hidden = args.in_features;
  check_size(op, "out", out, 1, hidden);
  const int64_t k = check_choices(op, expert_ids, expert_weights, num_tokens);
  const int64_t num_rows = num_tokens * k;
  check_tensor(op, "gate_up", gate_up, x.dtype(), {kAnySize, kAnySize});
  const int64_t num_experts = gate_up.size(0);
  check_tensor(op, "down", down, x.dtype(), {num_experts, kAnySize});
  const int64_t inner = down.size(1) / (num_panels(hidden) * kLinearPanel);
  check_size(op, "down", down, 1, num_panels(hidden) * kLinearPanel * inner);
  check_in_features(op, hidden, args.dtype);
  check_in_features(op, inner, args.dtype);
  check_size(op, "gate_up", gate_up, 1, num_panels(2 * inner) * kLinearPanel * hidden);
  if (num_rows == 0) return;

  std::vector<int64_t> places(num_rows);
  const std::vector<Run> runs = sort_by_expert(op, expert_ids, num_experts, places);
  const int64_t size = bytes_of(args.dtype);
  static thread_local Scratch<char> scratch;
  char* rows = scratch.take(num_rows * (hidden + 2 * inner) * size);
  char* middle = rows + num_rows * hidden * size;
  const char* inputs = x.data<char>();
  parallel_for(num_rows, row_grain(hidden), [&](int64_t begin, int64_t end) {
    for (int64_t pair = begin; pair < end; ++pair)
      std::memcpy(rows + places[pair] * hidden * size, inputs + pair / k * args.x_stride * size,
                  static_cast<size_t>(hidden * size));
  });
  multiply_runs(runs, {args.dtype, middle, rows, gate_up.raw(), nullptr, num_rows, hidden,
                       2 * inner, 2 * inner, hidden});
  const Kernels& table = kernels();
  const Rows products = {middle, 2 * inner};
  const ActivationArgs silu = {args.dtype, Activation::kSilu, true, products, products, inner};
  run_kernel(table.activation, silu, num_rows, row_grain(2 * inner));
  multiply_runs(runs, {args.dtype, rows, middle, down.raw(), nullptr, num_rows, inner, hidden,
                       hidden, 2 * inner});
  char* outputs = out.data<char>();
  const float* weights = expert_weights.data<float>();
  parallel_for(num_tokens, row_grain(k * hidden), [&](int64_t begin, int64_t end) {
    const void* parts[kMostChosen];
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t j = 0; j < k; ++j) parts[j] = rows + places[token * k + j] * hidden * size;
      table.sum_parts(
          {args.dtype, outputs + token * args.out_stride * size, parts, k, weights + token * k}, 0,
          hidden);
    }
  });
}

}  // namespace

void register_experts(TorchLibraryHandle library) {
  implement<&top_experts>(library, "top_experts");
  implement<&expert_mlp>(library, "expert_mlp");
}

}  // namespace tpengine::cpu
