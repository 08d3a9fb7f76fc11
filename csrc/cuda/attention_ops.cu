// Launchers: plan_decode and paged_attention.
#include "attention/decode_launch.cuh"
#include "attention/plan_decode.cuh"
#include "launch.h"

namespace tpengine::cuda {

extern template bool launch_decode_mma<CacheType::kBFloat16>(const DecodeArgs&, int, cudaStream_t);
extern template bool launch_decode_mma<CacheType::kFloat16>(const DecodeArgs&, int, cudaStream_t);
extern template bool launch_decode_mma<CacheType::kFloat8>(const DecodeArgs&, int, cudaStream_t);
extern template int decode_ctas<CacheType::kBFloat16>(int, int);
extern template int decode_ctas<CacheType::kFloat16>(int, int);
extern template int decode_ctas<CacheType::kFloat8>(int, int);

namespace {

// CUDA's limit on the second dimension of a grid.
constexpr int64_t kMaxItems = 65535;

void plan_decode(Tensor item_start, Tensor items, Tensor seq_lens, int64_t min_tokens,
                 Optional<int64_t> sliding_window) {
  const char* op = "plan_decode";
  check_tensor(op, "seq_lens", seq_lens, aoti_torch_dtype_int32(), {kAnySize});
  const int64_t num_seqs = seq_lens.size(0);
  check_tensor(op, "item_start", item_start, aoti_torch_dtype_int32(), {num_seqs + 1});
  check_tensor(op, "items", items, aoti_torch_dtype_int32(), {kAnySize, 4});
  const int64_t wave = (items.size(0) - num_seqs) / 2;
  if (wave < 1 || min_tokens < 1) {
    fail(op, "items has shape " + shape_name(items) + " and min_tokens is " +
                 std::to_string(min_tokens) + "; expected num_seqs (" + std::to_string(num_seqs) +
                 ") + 2 rows at least, and 1 token");
  }
  if (num_seqs == 0) return;
  const PlanArgs args = {
      item_start.data<int32_t>(),      items.data<int4>(),
      seq_lens.data<int32_t>(),        static_cast<int>(num_seqs),
      static_cast<int>(wave),          static_cast<int>((min_tokens + kChunk - 1) / kChunk),
      check_window(op, sliding_window)};
  const Device device(seq_lens);
  launch_plan_decode(args, device.stream());
  check_launch(op);
}

struct Plan {
  const Optional<Tensor>&item_start, &items, &partials;
};

// Items that the grid must hold: those of the plan, or one per row.
int64_t check_plan(const char* op, const Plan& plan, const Tensor& q) {
  const int64_t num_seqs = q.size(0);
  if (!plan.item_start && !plan.items && !plan.partials) return num_seqs;
  if (!plan.item_start || !plan.items || !plan.partials) {
    fail(op, "a plan is item_start, items and partials; expected all three, or None");
  }
  const Tensor &items = *plan.items, &partials = *plan.partials;
  check_tensor(op, "item_start", *plan.item_start, aoti_torch_dtype_int32(), {num_seqs + 1});
  check_tensor(op, "items", items, aoti_torch_dtype_int32(), {kAnySize, 4});
  check_tensor(op, "partials", partials, aoti_torch_dtype_float32(),
               {items.size(0), q.size(1), q.size(2) + kPartialPadding});
  return items.size(0);
}

// Rows of 16 bytes in the caches, pairs of elements in q.
bool suits_tensor_cores(const DecodeArgs& a) {
  return is_aligned(a.k_cache, 16) && is_aligned(a.v_cache, 16) && is_aligned(a.q, 4) &&
         a.q_token_stride % 2 == 0 && a.q_head_stride % 2 == 0;
}

void launch_decode(const char* op, DecodeArgs& args, const Tensor& q, bool float8, int max_items,
                   cudaStream_t stream) {
  const bool fits = suits_tensor_cores(args);
  if (float8) {
    if (fits && launch_decode_mma<CacheType::kFloat8>(args, max_items, stream)) return;
    fail(op, "head_dim is " + std::to_string(args.head_dim) +
                 "; with an fp8 cache expected 64, 80, 96, 112, 128, 160, 192 or 256, and aligned "
                 "tensors; keep the cache in the model's dtype");
  }
  if (fits && q.dtype() == aoti_torch_dtype_bfloat16() &&
      launch_decode_mma<CacheType::kBFloat16>(args, max_items, stream))
    return;
  if (fits && q.dtype() == aoti_torch_dtype_float16() &&
      launch_decode_mma<CacheType::kFloat16>(args, max_items, stream))
    return;
  with_element_type(
      op, "q", q, [&](auto type) { launch_decode_plain<decltype(type)>(args, max_items, stream); });
}

void paged_attention(Tensor out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table,
                     Tensor seq_lens, double scale, Optional<Tensor> alibi_slopes,
                     Optional<int64_t> sliding_window, Optional<double> softcap, double k_scale,
                     double v_scale, Optional<Tensor> item_start, Optional<Tensor> items,
                     Optional<Tensor> partials) {
  const char* op = "paged_attention";
  const CacheShape cache = check_caches(op, k_cache, v_cache, q.dtype());
  check_queries(op, out, q, cache.num_kv_heads, cache.head_dim);
  check_at_most(op, "head_dim", cache.head_dim, kMaxHeadDim);
  if (cache.block_size != 8 && cache.block_size != 16 && cache.block_size != 32) {
    fail(op, "block_size is " + std::to_string(cache.block_size) + "; expected 8, 16 or 32");
  }
  check_table(op, block_table, seq_lens);
  check_size(op, "block_table", block_table, 0, q.size(0));
  if (alibi_slopes)
    check_tensor(op, "alibi_slopes", *alibi_slopes, aoti_torch_dtype_float32(), {q.size(1)});
  const int64_t max_items = check_plan(op, {item_start, items, partials}, q);
  check_at_most(op, "the number of work items", max_items, kMaxItems);
  DecodeArgs args = {};
  args.out = out.raw();
  args.q = q.raw();
  args.k_cache = k_cache.raw();
  args.v_cache = v_cache.raw();
  args.block_table = block_table.data<int32_t>();
  args.seq_lens = seq_lens.data<int32_t>();
  args.alibi_slopes = alibi_slopes ? alibi_slopes->data<float>() : nullptr;
  args.item_start = item_start ? item_start->data<int32_t>() : nullptr;
  args.items = items ? items->data<int4>() : nullptr;
  args.partials = partials ? partials->data<float>() : nullptr;
  args.out_token_stride = out.stride(0);
  args.out_head_stride = out.stride(1);
  args.q_token_stride = q.stride(0);
  args.q_head_stride = q.stride(1);
  args.block_table_stride = block_table.stride(0);
  args.num_seqs = static_cast<int>(q.size(0));
  args.num_heads = static_cast<int>(q.size(1));
  args.num_kv_heads = static_cast<int>(cache.num_kv_heads);
  args.head_dim = static_cast<int>(cache.head_dim);
  args.block_size = static_cast<int>(cache.block_size);
  args.sliding_window = check_window(op, sliding_window);
  args.half_queries = q.dtype() == aoti_torch_dtype_float16();
  args.scale = static_cast<float>(cache.float8 ? scale * k_scale : scale);
  args.softcap = check_softcap(op, softcap);
  args.v_scale = static_cast<float>(cache.float8 ? v_scale : 1.0);
  const Device device(q);
  launch_decode(op, args, q, cache.float8, static_cast<int>(max_items), device.stream());
  check_launch(op);
}

}  // namespace

void register_attention(TorchLibraryHandle library) {
  implement<&plan_decode>(library, "plan_decode");
  implement<&paged_attention>(library, "paged_attention");
}

}  // namespace tpengine::cuda

// Work items per kv head (or group of its query heads) that the device runs at once, for the size
// of a plan; -1: CUDA failed. `cache`: 0 float32, 1 float16, 2 bfloat16, 3 e4m3.
extern "C" __attribute__((visibility("default"))) int32_t tpengine_cuda_decode_wave(
    int32_t device, int32_t cache, int32_t head_dim, int32_t num_heads, int32_t num_kv_heads) {
  using namespace tpengine::cuda;
  int processors = 0, before = 0;
  if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(device) != cudaSuccess) return -1;
  const int group = num_heads / num_kv_heads;
  int ctas = cache == 1   ? decode_ctas<CacheType::kFloat16>(head_dim, group)
             : cache == 2 ? decode_ctas<CacheType::kBFloat16>(head_dim, group)
             : cache == 3 ? decode_ctas<CacheType::kFloat8>(head_dim, group)
                          : 0;
  int columns = num_kv_heads * ceil_div(group, kMaxHeadsPerCta);
  if (ctas == 0) {  // the kernel without tensor cores: a CTA per query head
    const auto kernel = decode_plain_kernel<float>;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, kPlainWarps * kWarpSize, 0);
    columns = num_heads;
  }
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  cudaSetDevice(before);
  if (cudaGetLastError() != cudaSuccess || ctas == 0) return -1;
  const int wave = processors * ctas / columns;
  return wave > 1 ? wave : 1;
}
