// Launchers: write_kv_cache, rotary_write_kv_cache, copy_blocks.
#include "launch.h"

namespace tpengine::cpu {

namespace {

// [num_blocks, num_kv_heads, block_size, head_dim + 4] bytes each, the last 4 for a token's scale.
CacheShape int8_shape(const char* op, const Tensor& k_cache, const Tensor& v_cache) {
  check_dim(op, "k_cache", k_cache, 4);
  check_like(op, "v_cache", v_cache, k_cache);
  const int64_t head_dim = k_cache.size(3) - kScaleBytes;
  if (head_dim < 16 || head_dim % 16 != 0 || head_dim > kMaxHeadDim) {
    fail(op, "head_dim of an int8 cache is " + std::to_string(head_dim) +
                 "; expected a multiple of 16 from 16 to " + std::to_string(kMaxHeadDim));
  }
  return {CacheDType::kInt8, k_cache.size(0), k_cache.size(1),
          head_dim,          k_cache.size(2), k_cache.size(1) * k_cache.size(2) * k_cache.size(3)};
}

CacheShape shape_as_model(const char* op, const Tensor& k_cache, const Tensor& v_cache,
                          int32_t dtype) {
  const int64_t pack = dtype == aoti_torch_dtype_bfloat16() ? 2 : 1;
  check_dtype(op, "k_cache", k_cache, dtype);
  check_dtype(op, "v_cache", v_cache, dtype);
  check_sizes(op, "k_cache", k_cache, {kAnySize, kAnySize, kAnySize, kAnySize, pack});
  const int64_t num_blocks = k_cache.size(0), num_kv_heads = k_cache.size(1);
  const int64_t block_size = k_cache.size(3), head_dim = k_cache.size(2) * pack;
  check_sizes(op, "v_cache", v_cache,
              {num_blocks, num_kv_heads, block_size / pack, head_dim, pack});
  return {CacheDType::kAsModel, num_blocks,
          num_kv_heads,         head_dim,
          block_size,           num_kv_heads * block_size * head_dim * 4 / pack};
}

}  // namespace

CacheShape check_caches(const char* op, const Tensor& k_cache, const Tensor& v_cache,
                        int32_t dtype) {
  const bool is_int8 = k_cache.dtype() == aoti_torch_dtype_int8();
  const CacheShape shape =
      is_int8 ? int8_shape(op, k_cache, v_cache) : shape_as_model(op, k_cache, v_cache, dtype);
  check_packed(op, "k_cache", k_cache);
  check_packed(op, "v_cache", v_cache);
  if (shape.block_size != 8 && shape.block_size != 16 && shape.block_size != 32) {
    fail(op, "block_size is " + std::to_string(shape.block_size) + "; expected 8, 16 or 32");
  }
  return shape;
}

namespace {

// Tokens per thread: few, because each token waits for the memory of its slots, and because
// attention comes next: a thread then has its tokens in its CPU cache, and does not sleep yet.
constexpr int64_t kWriteGrain = 2;

void check_slots(const char* op, const Tensor& slot_mapping, int64_t num_tokens,
                 const CacheShape& shape) {
  check_tensor(op, "slot_mapping", slot_mapping, aoti_torch_dtype_int32(), {num_tokens});
  const int32_t* slots = slot_mapping.data<int32_t>();
  const int64_t num_slots = shape.num_blocks * shape.block_size;
  for (int64_t i = 0; i < num_tokens; ++i) {
    if (slots[i] < -1 || slots[i] >= num_slots) {
      fail(op, "slot_mapping[" + std::to_string(i) + "] is " + std::to_string(slots[i]) +
                   "; expected -1 (not cached) or a slot below " + std::to_string(num_slots));
    }
  }
}

// Positions int32 [num_tokens], each with a row in the float32 table [max_position, rotary_dim].
void check_positions(const char* op, const Tensor& positions, const Tensor& cos_sin_cache,
                     int64_t num_tokens, int64_t head_dim) {
  check_tensor(op, "positions", positions, aoti_torch_dtype_int32(), {num_tokens});
  check_tensor(op, "cos_sin_cache", cos_sin_cache, aoti_torch_dtype_float32(),
               {kAnySize, kAnySize});
  const int64_t rotary_dim = cos_sin_cache.size(1), max_position = cos_sin_cache.size(0);
  check_at_most(op, "the rotary dimension (cos_sin_cache.size(1))", rotary_dim, head_dim);
  if (rotary_dim % 2 != 0) {
    fail(op, "the rotary dimension is " + std::to_string(rotary_dim) + "; expected an even one");
  }
  const int32_t* values = positions.data<int32_t>();
  for (int64_t i = 0; i < num_tokens; ++i) {
    if (values[i] < 0 || values[i] >= max_position) {
      fail(op, "positions[" + std::to_string(i) + "] is " + std::to_string(values[i]) +
                   "; cos_sin_cache has rows 0 to " + std::to_string(max_position - 1));
    }
  }
}

void write_kv_cache(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                    const Tensor& slot_mapping, double k_scale, double v_scale) {
  const char* op = "write_kv_cache";
  check_no_scales(op, k_scale, v_scale);
  const DType dtype = element_type(op, "k", k);
  const CacheShape shape = check_caches(op, k_cache, v_cache, k.dtype());
  check_keys(op, k, v, shape.num_kv_heads, shape.head_dim, 2);
  check_slots(op, slot_mapping, k.size(0), shape);
  const CacheWriteArgs args = {dtype,
                               shape.dtype,
                               heads_of(k),
                               heads_of(v),
                               k_cache.raw(),
                               v_cache.raw(),
                               slot_mapping.data<int32_t>(),
                               shape.num_kv_heads,
                               shape.head_dim,
                               shape.block_size};
  run_kernel(kernels().write_cache, args, k.size(0), kWriteGrain);
}

void rotary_write_kv_cache(const Tensor& positions, const Tensor& qkv, const Tensor& cos_sin_cache,
                           const Tensor& slot_mapping, const Tensor& k_cache, const Tensor& v_cache,
                           int64_t num_heads, int64_t num_kv_heads, double k_scale,
                           double v_scale) {
  const char* op = "rotary_write_kv_cache";
  check_no_scales(op, k_scale, v_scale);
  const DType dtype = element_type(op, "qkv", qkv);
  check_shape(op, "qkv", qkv, {kAnySize, kAnySize}, 1);
  const CacheShape shape = check_caches(op, k_cache, v_cache, qkv.dtype());
  check_size(op, "k_cache", k_cache, 1, num_kv_heads);
  const int64_t d = shape.head_dim, width = (num_heads + 2 * num_kv_heads) * d;
  check_size(op, "qkv", qkv, 1, width);
  const int64_t num_tokens = qkv.size(0);
  check_positions(op, positions, cos_sin_cache, num_tokens, d);
  check_slots(op, slot_mapping, num_tokens, shape);
  const auto heads_from = [&](int64_t head) {
    return Heads{qkv.data<char>() + head * d * bytes_of(dtype), qkv.stride(0), d};
  };
  const int64_t num_rotated = num_heads + num_kv_heads;
  const RotaryArgs rotary_args = {dtype,         positions.data<int32_t>(),
                                  heads_from(0), cos_sin_cache.data<float>(),
                                  num_rotated,   cos_sin_cache.size(1)};
  const CacheWriteArgs write_args = {dtype,
                                     shape.dtype,
                                     heads_from(num_heads),
                                     heads_from(num_rotated),
                                     k_cache.raw(),
                                     v_cache.raw(),
                                     slot_mapping.data<int32_t>(),
                                     num_kv_heads,
                                     d,
                                     shape.block_size};
  const auto kernel = kernels().rotary_write;
  parallel_for(num_tokens, row_grain(width),
               [&](int64_t begin, int64_t end) { kernel(rotary_args, write_args, begin, end); });
}

void copy_blocks(const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_pairs) {
  const char* op = "copy_blocks";
  if (k_cache.dtype() != aoti_torch_dtype_int8()) element_type(op, "k_cache", k_cache);
  const CacheShape shape = check_caches(op, k_cache, v_cache, k_cache.dtype());
  check_tensor(op, "block_pairs", block_pairs, aoti_torch_dtype_int64(), {kAnySize, 2});
  const int64_t* pairs = block_pairs.data<int64_t>();
  const int64_t count = block_pairs.size(0);
  for (int64_t i = 0; i < 2 * count; ++i) {
    if (pairs[i] < 0 || pairs[i] >= shape.num_blocks) {
      fail(op, "block_pairs names block " + std::to_string(pairs[i]) + "; the cache has " +
                   std::to_string(shape.num_blocks));
    }
  }
  const int64_t bytes = shape.block_bytes;
  char* caches[2] = {k_cache.data<char>(), v_cache.data<char>()};
  parallel_for(2 * count, row_grain(bytes / 2), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      char* cache = caches[i % 2];
      std::memmove(cache + pairs[i / 2 * 2 + 1] * bytes, cache + pairs[i / 2 * 2] * bytes,
                   static_cast<size_t>(bytes));
    }
  });
}

}  // namespace

void register_cache(TorchLibraryHandle library) {
  implement<&write_kv_cache>(library, "write_kv_cache");
  implement<&rotary_write_kv_cache>(library, "rotary_write_kv_cache");
  implement<&copy_blocks>(library, "copy_blocks");
}

}  // namespace tpengine::cpu
