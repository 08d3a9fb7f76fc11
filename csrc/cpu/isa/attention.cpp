// Tiles of attention: which rows and keys they hold, partitions, and the result.
#include "isa.h"

namespace tpengine::cpu::TPENGINE_ISA {
namespace {

// clang-format off: the order matters
#include "attention_rows.inc"
#if defined(TPENGINE_HAS_TILES)
#include "attention_tiles.inc"
#endif
// clang-format on

template <class F>
inline void load_row(F* dst, const float* src, int64_t n) {
  memcpy(dst, src, (size_t)n * sizeof(float));
}
inline void load_row(uint16_t* dst, const uint16_t* src, int64_t n) {
  memcpy(dst, src, (size_t)n * sizeof(uint16_t));
}
inline void load_row(float* dst, const uint16_t* src, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(dst + i, load(src + i));
}

// Adds one partition's result to what earlier ones gave. Not inlined, so that the sequential and
// the split path round alike.
__attribute__((noinline)) void merge_row(RowState* state, float* out, const RowState& other,
                                         const float* other_out, int64_t head_dim) {
  if (other.maximum == TPENGINE_MINUS_INFINITY) return;
  if (state->maximum == TPENGINE_MINUS_INFINITY) {
    *state = other;
    memcpy(out, other_out, (size_t)head_dim * sizeof(float));
    return;
  }
  const float m = state->maximum > other.maximum ? state->maximum : other.maximum;
  const float a = exp2(state->maximum - m), b = exp2(other.maximum - m);
  state->maximum = m;
  state->sum = state->sum * a + other.sum * b;
  const Vec va = set1(a), vb = set1(b);
  for (int64_t i = 0; i < head_dim; i += kLanes)
    store(out + i, fma(load(other_out + i), vb, load(out + i) * va));
}

template <class T>
__attribute__((noinline)) void finish_row(T* dst, const RowState& state, const float* out,
                                          int64_t head_dim) {
  const Vec inverse = set1(state.sum > 0.f ? 1.f / state.sum : 0.f);
  for (int64_t i = 0; i < head_dim; i += kLanes) store(dst + i, load(out + i) * inverse);
}

template <class E>
inline void reset_rows(Tile<E>& tile, int64_t head_dim) {
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    tile.state[r].maximum = TPENGINE_MINUS_INFINITY;
    tile.state[r].sum = 0.f;
  }
  memset(tile.out, 0, (size_t)(tile.num_rows * head_dim) * sizeof(float));
}

// Keys [begin, end) of one kv head of a sequence; begin is a multiple of kChunk.
struct KeyRange {
  int64_t seq, head, begin, end;
};

// The blocks of at most a chunk of keys, in one of the caches.
template <class E>
inline int64_t find_blocks(const AttentionArgs& a, const void* cache, const KeyRange& keys,
                           const typename E::Storage** blocks) {
  const int32_t* table =
      a.block_table + keys.seq * a.block_table_stride + keys.begin / a.block_size;
  const int64_t size = block_elements<E>(a), stride = size * a.num_kv_heads;
  const int64_t count =
      (min64(max64(keys.end - keys.begin, 0), kChunk) + a.block_size - 1) / a.block_size;
  for (int64_t b = 0; b < count; ++b)
    blocks[b] = (const typename E::Storage*)cache + table[b] * stride + keys.head * size;
  return count;
}

// `after`: what will be read next, so that the first of it is fetched in time.
template <class E>
inline void process_keys(const AttentionArgs& a, const KeyRange& keys, const KeyRange& after,
                         Tile<E>& tile) {
  for (int64_t key = keys.begin; key < keys.end; key += kChunk) {
    Chunk<E> chunk;
    chunk.first_key = key;
    const KeyRange now = {keys.seq, keys.head, key, keys.end};
    const KeyRange rest = {keys.seq, keys.head, key + kChunk, keys.end};
    chunk.num_blocks = find_blocks<E>(a, a.k_cache, now, chunk.k);
    find_blocks<E>(a, a.v_cache, now, chunk.v);
    chunk.num_next_blocks =
        find_blocks<E>(a, a.k_cache, rest.begin < rest.end ? rest : after, chunk.next_k);
    find_blocks<E>(a, a.v_cache, rest.begin < rest.end ? rest : after, chunk.next_v);
#if defined(TPENGINE_HAS_TILES)
    if constexpr (kByTiles<E>) {
      if (has_whole_tiles(a)) {
        process_chunk_by_tiles(a, chunk, tile);
        continue;
      }
    }
#endif
    process_chunk(a, chunk, tile);
  }
}

template <class E>
inline void write_partials(const AttentionArgs& a, const AttentionItem& item, int64_t first_head,
                           int64_t partition, const Tile<E>& tile) {
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    float* slot = a.partials + ((item.partial_slot + partition) * a.num_heads + first_head + r) *
                                   (a.head_dim + 2);
    memcpy(slot, tile.out + r * a.head_dim, (size_t)a.head_dim * sizeof(float));
    slot[a.head_dim] = tile.state[r].maximum;
    slot[a.head_dim + 1] = tile.state[r].sum;
  }
}

// Rows [row, row + count) of the item, numbered query * group + head of the group.
template <class E>
inline void attend_rows(const AttentionArgs& a, const AttentionItem& item, int64_t head,
                        int64_t row, int64_t count, const KeyRange& after, Tile<E>& tile) {
  using T = typename E::Number;
  const int64_t group = a.num_heads / a.num_kv_heads, length = a.seq_lens[item.seq];
  const int32_t* start = a.query_start_loc;
  const int64_t first_token = (start != nullptr ? start[item.seq] : item.seq) + item.first_query;
  const int64_t num_queries = start != nullptr ? start[item.seq + 1] - start[item.seq] : 1;
  tile.num_rows = count;
  for (int64_t r = 0; r < count; ++r) {
    const int64_t query = (row + r) / group, h = head * group + (row + r) % group;
    const T* q = (const T*)a.q + (first_token + query) * a.q_token_stride + h * a.q_head_stride;
    load_row(tile.q + r * a.head_dim, q, a.head_dim);
    tile.end_key[r] = max64(0, length - num_queries + item.first_query + query + 1);
    tile.first_key[r] = max64(0, tile.end_key[r] - a.sliding_window);
    if (a.key_ends != nullptr) tile.end_key[r] = a.key_ends[first_token + query];
    tile.slope[r] = a.alibi_slopes != nullptr ? a.alibi_slopes[h] : 0.f;
  }
  const int64_t end_key = tile.end_key[count - 1];
  const int64_t begin_key = tile.first_key[0] / kChunk * kChunk;
  bool merged = false;
  reset_rows(tile, a.head_dim);
  for (int64_t p = item.first_partition; p < item.end_partition; ++p) {
    const int64_t begin = max64(p * kPartitionSize, begin_key);
    const int64_t end = min64((p + 1) * kPartitionSize, end_key);
    if (begin >= end && !item.split) continue;
    reset_rows(tile, a.head_dim);
    process_keys(a, {item.seq, head, begin, end}, after, tile);
    if (item.split) {
      write_partials(a, item, head * group + row, p, tile);
    } else if (end < end_key || merged) {
      if (!merged) {
        for (int64_t r = 0; r < count; ++r) {
          tile.merged_state[r].maximum = TPENGINE_MINUS_INFINITY;
          tile.merged_state[r].sum = 0.f;
        }
      }
      merged = true;
      for (int64_t r = 0; r < count; ++r)
        merge_row(&tile.merged_state[r], tile.merged + r * a.head_dim, tile.state[r],
                  tile.out + r * a.head_dim, a.head_dim);
    }
  }
  if (item.split) return;
  for (int64_t r = 0; r < count; ++r) {
    const int64_t query = (row + r) / group, h = head * group + (row + r) % group;
    T* dst = (T*)a.out + (first_token + query) * a.out_token_stride + h * a.out_head_stride;
    const float* out = (merged ? tile.merged : tile.out) + r * a.head_dim;
    finish_row(dst, merged ? tile.merged_state[r] : tile.state[r], out, a.head_dim);
  }
}

// The keys that an item begins with.
inline KeyRange first_keys(const AttentionArgs& a, const AttentionItem& item, int64_t head) {
  const int32_t* start = a.query_start_loc;
  const int64_t num_queries = start != nullptr ? start[item.seq + 1] - start[item.seq] : 1;
  const int64_t end = a.seq_lens[item.seq] - num_queries + item.first_query + item.num_queries;
  const int64_t first = max64(0, end - item.num_queries + 1 - a.sliding_window) / kChunk * kChunk;
  return {item.seq, head, max64(first, item.first_partition * kPartitionSize), end};
}

template <class E>
inline void attend(const AttentionArgs& a, const AttentionItem& item, const AttentionItem* next) {
  Tile<E> tile;
  const int64_t rows = item.num_queries * (a.num_heads / a.num_kv_heads);
  const int64_t most = min64(48, kTileElements / a.head_dim);
  for (int64_t head = item.first_kv_head; head < item.end_kv_head; ++head) {
    KeyRange after = {};
    if (head + 1 < item.end_kv_head)
      after = first_keys(a, item, head + 1);
    else if (next != nullptr)
      after = first_keys(a, *next, next->first_kv_head);
    for (int64_t row = 0; row < rows; row += most)
      attend_rows(a, item, head, row, min64(most, rows - row), after, tile);
  }
}

}  // namespace

void attention(const AttentionArgs& a, const AttentionItem& item, const AttentionItem* next) {
  const bool is_float = a.dtype == DType::kFloat32;
  if (a.cache_dtype == CacheDType::kInt8)
    is_float ? attend<Int8Float32>(a, item, next) : attend<Int8BFloat16>(a, item, next);
  else
    is_float ? attend<Float32>(a, item, next) : attend<BFloat16>(a, item, next);
#if defined(TPENGINE_HAS_TILES)
  release_tiles();
#endif
}

// Puts a split sequence's partitions together, in order. For items of one query.
void merge_partitions(const AttentionArgs& a, const AttentionItem& item) {
  for (int64_t h = 0; h < a.num_heads; ++h) {
    RowState state = {TPENGINE_MINUS_INFINITY, 0.f};
    alignas(64) float out[kMaxHeadDim] = {};
    for (int64_t p = item.first_partition; p < item.end_partition; ++p) {
      const float* slot =
          a.partials + ((item.partial_slot + p) * a.num_heads + h) * (a.head_dim + 2);
      merge_row(&state, out, RowState{slot[a.head_dim], slot[a.head_dim + 1]}, slot, a.head_dim);
    }
    const int64_t offset = item.seq * a.out_token_stride + h * a.out_head_stride;
    if (a.dtype == DType::kFloat32)
      finish_row((float*)a.out + offset, state, out, a.head_dim);
    else
      finish_row((uint16_t*)a.out + offset, state, out, a.head_dim);
  }
}

}  // namespace tpengine::cpu::TPENGINE_ISA
