// Launchers: write_kv_cache, rotary_write_kv_cache, copy_blocks, copy_cache_blocks, pack_blocks,
// unpack_blocks and gather_kv.
#include "cache/copy_blocks.cuh"
#include "cache/gather_kv.cuh"
#include "cache/store_kv.cuh"
#include "launch.h"

namespace tpengine::cuda {

CacheShape check_caches(const char* op, const Tensor& k_cache, const Tensor& v_cache,
                        int32_t dtype) {
  const bool float8 = k_cache.dtype() == aoti_torch_dtype_float8_e4m3fn();
  if (float8 && dtype == aoti_torch_dtype_float32()) {
    fail(op, "k_cache is float8_e4m3fn and the model float32; expected a float32 cache");
  }
  if (!float8) check_dtype(op, "k_cache", k_cache, dtype);
  check_dtype(op, "v_cache", v_cache, k_cache.dtype());
  check_dim(op, "k_cache", k_cache, 4);
  check_like(op, "v_cache", v_cache, k_cache);
  check_packed(op, "k_cache", k_cache);
  check_packed(op, "v_cache", v_cache);
  return {k_cache.size(0), k_cache.size(1), k_cache.size(2), k_cache.size(3), float8};
}

namespace {

void check_scales(const char* op, double k_scale, double v_scale) {
  if (!(k_scale > 0) || !(v_scale > 0)) {
    fail(op, "k_scale and v_scale are " + std::to_string(k_scale) + " and " +
                 std::to_string(v_scale) + "; expected positive numbers");
  }
}

// Whether all accesses can be 16 bytes of the model's dtype wide.
bool is_wide(const StoreArgs& a, int64_t bytes, bool float8) {
  const int64_t n = 16 / bytes, cache_align = float8 ? n : 16;
  const int64_t sizes[] = {a.head_dim,       a.rotary_dim / 2, a.q_token_stride, a.q_head_stride,
                           a.k_token_stride, a.k_head_stride,  a.v_token_stride, a.v_head_stride};
  for (const int64_t size : sizes) {
    if (size % n != 0) return false;
  }
  return a.rotary_dim % 2 == 0 && is_aligned(a.q, 16) && is_aligned(a.k, 16) &&
         is_aligned(a.v, 16) && is_aligned(a.k_cache, cache_align) &&
         is_aligned(a.v_cache, cache_align);
}

void launch_store(const char* op, const Tensor& k, const StoreArgs& args, bool float8) {
  const bool wide = is_wide(args, element_bytes(op, "k", k), float8);
  const int num_tokens = static_cast<int>(k.size(0));
  const Device device(k);
  with_element_type(op, "k", k, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) == 2) {
      if (float8) return launch_store_kv<T, Float8>(args, wide, num_tokens, device.stream());
    }
    launch_store_kv<T, T>(args, wide, num_tokens, device.stream());
  });
  check_launch(op);
}

void set_caches(const char* op, StoreArgs& args, const Tensor& k_cache, const Tensor& v_cache,
                const Tensor& slot_mapping, int64_t num_tokens, bool float8, double k_scale,
                double v_scale) {
  check_tensor(op, "slot_mapping", slot_mapping, aoti_torch_dtype_int32(), {num_tokens});
  check_scales(op, k_scale, v_scale);
  args.k_cache = k_cache.raw();
  args.v_cache = v_cache.raw();
  args.slot_mapping = slot_mapping.data<int32_t>();
  args.k_inverse_scale = float8 ? static_cast<float>(1.0 / k_scale) : 1.f;
  args.v_inverse_scale = float8 ? static_cast<float>(1.0 / v_scale) : 1.f;
}

void set_rotary(const char* op, StoreArgs& args, const Tensor& positions,
                const Tensor& cos_sin_cache, int64_t num_tokens, int64_t head_dim) {
  check_tensor(op, "positions", positions, aoti_torch_dtype_int32(), {num_tokens});
  check_tensor(op, "cos_sin_cache", cos_sin_cache, aoti_torch_dtype_float32(),
               {kAnySize, kAnySize});
  const int64_t rotary_dim = cos_sin_cache.size(1);
  if (rotary_dim % 2 != 0 || cos_sin_cache.size(0) < 1) {
    fail(op, "cos_sin_cache has shape " + shape_name(cos_sin_cache) +
                 "; expected at least one row, and an even rotary_dim");
  }
  check_at_most(op, "rotary_dim (cos_sin_cache's last dimension)", rotary_dim, head_dim);
  args.positions = positions.data<int32_t>();
  args.cos_sin_cache = cos_sin_cache.data<float>();
  args.rotary_dim = static_cast<int>(rotary_dim);
  args.num_positions = static_cast<int>(cos_sin_cache.size(0));
}

void write_kv_cache(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slot_mapping,
                    double k_scale, double v_scale) {
  const char* op = "write_kv_cache";
  const CacheShape cache = check_caches(op, k_cache, v_cache, k.dtype());
  check_keys(op, k, v, cache.num_kv_heads, cache.head_dim, 2);
  StoreArgs args = {};
  args.k = k.raw();
  args.v = v.raw();
  args.k_token_stride = k.stride(0);
  args.k_head_stride = k.stride(1);
  args.v_token_stride = v.stride(0);
  args.v_head_stride = v.stride(1);
  args.num_kv_heads = static_cast<int>(cache.num_kv_heads);
  args.head_dim = static_cast<int>(cache.head_dim);
  set_caches(op, args, k_cache, v_cache, slot_mapping, k.size(0), cache.float8, k_scale, v_scale);
  launch_store(op, k, args, cache.float8);
}

void rotary_write_kv_cache(Tensor positions, Tensor qkv, Tensor cos_sin_cache, Tensor slot_mapping,
                           Tensor k_cache, Tensor v_cache, int64_t num_heads, int64_t num_kv_heads,
                           double k_scale, double v_scale) {
  const char* op = "rotary_write_kv_cache";
  check_shape(op, "qkv", qkv, {kAnySize, kAnySize}, 1);
  const CacheShape cache = check_caches(op, k_cache, v_cache, qkv.dtype());
  check_size(op, "k_cache", k_cache, 2, num_kv_heads);
  const int64_t d = cache.head_dim, bytes = element_bytes(op, "qkv", qkv);
  check_size(op, "qkv", qkv, 1, (num_heads + 2 * num_kv_heads) * d);
  StoreArgs args = {};
  args.q = qkv.raw();
  args.k = qkv.data<char>() + num_heads * d * bytes;
  args.v = qkv.data<char>() + (num_heads + num_kv_heads) * d * bytes;
  args.q_token_stride = args.k_token_stride = args.v_token_stride = qkv.stride(0);
  args.q_head_stride = args.k_head_stride = args.v_head_stride = d;
  args.num_heads = static_cast<int>(num_heads);
  args.num_kv_heads = static_cast<int>(num_kv_heads);
  args.head_dim = static_cast<int>(d);
  set_rotary(op, args, positions, cos_sin_cache, qkv.size(0), d);
  set_caches(op, args, k_cache, v_cache, slot_mapping, qkv.size(0), cache.float8, k_scale, v_scale);
  launch_store(op, qkv, args, cache.float8);
}

int64_t cache_element_bytes(const char* op, const char* name, const Tensor& tensor) {
  const bool float8 = tensor.dtype() == aoti_torch_dtype_float8_e4m3fn();
  return float8 ? 1 : element_bytes(op, name, tensor);
}

// [num_pieces, num_blocks, ...] (or, with pieces second, [num_blocks, num_pieces, ...]).
BlockPlace place_of(const char* op, const char* name, const Tensor& tensor, int block_dim,
                    int64_t* piece_bytes) {
  if (tensor.dim() < 3) check_dim(op, name, tensor, 3);
  check_packed(op, name, tensor, 2);
  int64_t elements = 1;
  for (int i = 2; i < tensor.dim(); ++i) elements *= tensor.size(i);
  const int64_t bytes = cache_element_bytes(op, name, tensor);
  *piece_bytes = elements * bytes;
  const BlockPlace place = {tensor.data<char>(), nullptr, 1, tensor.stride(block_dim) * bytes,
                            tensor.stride(1 - block_dim) * bytes};
  if (*piece_bytes % 16 != 0 || place.block_stride % 16 != 0 || place.piece_stride % 16 != 0 ||
      !is_aligned(place.base, 16)) {
    fail(op, std::string(name) + " has shape " + shape_name(tensor) + " and pieces of " +
                 std::to_string(*piece_bytes) + " bytes; expected multiples of 16");
  }
  return place;
}

// CUDA's limit on the second dimension of a grid.
constexpr int64_t kMaxPieces = 65535;

void launch_copy(const char* op, const Tensor& cache, const CopyBlocksArgs& args,
                 int64_t num_copies, int64_t num_pieces) {
  check_at_most(op, "the number of pieces of a block", num_pieces, kMaxPieces);
  const Device device(cache);
  launch_copy_blocks(args, static_cast<int>(num_copies), static_cast<int>(num_pieces),
                     device.stream());
  check_launch(op);
}

void copy_pairs(const char* op, const Tensor& cache, BlockPlace place, int64_t piece_bytes,
                int64_t num_pieces, const Tensor& pairs) {
  check_tensor(op, "block_pairs", pairs, aoti_torch_dtype_int64(), {kAnySize, 2});
  CopyBlocksArgs args = {place, place, piece_bytes};
  args.source.ids = pairs.data<int64_t>();
  args.target.ids = args.source.ids + 1;
  args.source.id_stride = args.target.id_stride = 2;
  launch_copy(op, cache, args, pairs.size(0), num_pieces);
}

void copy_blocks(Tensor k_cache, Tensor v_cache, Tensor block_pairs) {
  const char* op = "copy_blocks";
  const CacheShape shape = check_caches(op, k_cache, v_cache, k_cache.dtype());
  const int64_t bytes = shape.block_size * shape.num_kv_heads * shape.head_dim *
                        cache_element_bytes(op, "k_cache", k_cache);
  const int64_t apart = v_cache.data<char>() - k_cache.data<char>();
  if (bytes % 16 != 0 || apart % 16 != 0 || !is_aligned(k_cache.raw(), 16)) {
    fail(op, "a block of k_cache has " + std::to_string(bytes) +
                 " bytes; expected a multiple of "
                 "16, and aligned caches");
  }
  copy_pairs(op, k_cache, {k_cache.data<char>(), nullptr, 2, bytes, apart}, bytes, 2, block_pairs);
}

void copy_cache_blocks(Tensor cache, Tensor block_pairs) {
  const char* op = "copy_cache_blocks";
  int64_t piece_bytes = 0;
  const BlockPlace place = place_of(op, "cache", cache, 1, &piece_bytes);
  copy_pairs(op, cache, place, piece_bytes, cache.size(0), block_pairs);
}

void move_blocks(const char* op, const Tensor& cache, const Tensor& packed, const Tensor& block_ids,
                 bool to_cache) {
  int64_t piece_bytes = 0, packed_bytes = 0;
  BlockPlace inside = place_of(op, "cache", cache, 1, &piece_bytes);
  const BlockPlace outside = place_of(op, "packed", packed, 0, &packed_bytes);
  check_dtype(op, "packed", packed, cache.dtype());
  check_tensor(op, "block_ids", block_ids, aoti_torch_dtype_int64(), {packed.size(0)});
  check_size(op, "packed", packed, 1, cache.size(0));
  if (piece_bytes != packed_bytes) {
    fail(op, "packed has shape " + shape_name(packed) + " and cache " + shape_name(cache) +
                 "; expected blocks of one size");
  }
  inside.ids = block_ids.data<int64_t>();
  const CopyBlocksArgs args = {to_cache ? outside : inside, to_cache ? inside : outside,
                               piece_bytes};
  launch_copy(op, cache, args, packed.size(0), cache.size(0));
}

void pack_blocks(Tensor packed, Tensor cache, Tensor block_ids) {
  move_blocks("pack_blocks", cache, packed, block_ids, false);
}

void unpack_blocks(Tensor cache, Tensor packed, Tensor block_ids) {
  move_blocks("unpack_blocks", cache, packed, block_ids, true);
}

void gather_kv(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor block_table,
               Tensor token_start, double k_scale, double v_scale) {
  const char* op = "gather_kv";
  const CacheShape cache = check_caches(op, k_cache, v_cache, k.dtype());
  check_keys(op, k, v, cache.num_kv_heads, cache.head_dim, 0);
  check_scales(op, k_scale, v_scale);
  check_tensor(op, "block_table", block_table, aoti_torch_dtype_int32(), {kAnySize, kAnySize}, 1);
  const int64_t num_seqs = block_table.size(0), row_size = cache.num_kv_heads * cache.head_dim;
  check_tensor(op, "token_start", token_start, aoti_torch_dtype_int32(), {num_seqs + 1});
  const GatherArgs args = {k.raw(),
                           v.raw(),
                           k_cache.raw(),
                           v_cache.raw(),
                           block_table.data<int32_t>(),
                           token_start.data<int32_t>(),
                           block_table.stride(0),
                           static_cast<int>(k.size(0)),
                           static_cast<int>(num_seqs),
                           static_cast<int>(cache.block_size),
                           static_cast<int>(row_size),
                           cache.float8 ? static_cast<float>(k_scale) : 1.f,
                           cache.float8 ? static_cast<float>(v_scale) : 1.f};
  const int64_t n = 16 / element_bytes(op, "k", k), align = cache.float8 ? n : 16;
  const bool wide = row_size % n == 0 && is_aligned(args.k, 16) && is_aligned(args.v, 16) &&
                    is_aligned(args.k_cache, align) && is_aligned(args.v_cache, align);
  const Device device(k);
  with_element_type(op, "k", k, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) == 2) {
      if (cache.float8) return launch_gather_kv<T, Float8>(args, wide, device.stream());
    }
    launch_gather_kv<T, T>(args, wide, device.stream());
  });
  check_launch(op);
}

}  // namespace

void register_cache(TorchLibraryHandle library) {
  implement<&write_kv_cache>(library, "write_kv_cache");
  implement<&rotary_write_kv_cache>(library, "rotary_write_kv_cache");
  implement<&copy_blocks>(library, "copy_blocks");
  implement<&copy_cache_blocks>(library, "copy_cache_blocks");
  implement<&pack_blocks>(library, "pack_blocks");
  implement<&unpack_blocks>(library, "unpack_blocks");
  implement<&gather_kv>(library, "gather_kv");
}

}  // namespace tpengine::cuda
