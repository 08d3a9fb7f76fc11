// Launchers: paged_attention and prefill_attention. Cuts the work into items and lets torch's
// threads take them one after another.
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "launch.h"

namespace tpengine::cpu {
namespace {

// Prefill items hold about this many rows (query x head of the group).
constexpr int64_t kItemRows = 48;

void check_head_dim(const char* op, int64_t head_dim) {
  if (head_dim % 16 != 0 || head_dim < 16 || head_dim > kMaxHeadDim) {
    fail(op, "head_dim is " + std::to_string(head_dim) + "; expected a multiple of 16 from 16 to " +
                 std::to_string(kMaxHeadDim));
  }
}

void check_lengths(const char* op, const Tensor& block_table, const Tensor& seq_lens,
                   int64_t block_size) {
  check_table(op, block_table, seq_lens);
  const int32_t* lengths = seq_lens.data<int32_t>();
  const int64_t most = block_table.size(1) * block_size;
  for (int64_t i = 0; i < block_table.size(0); ++i) {
    if (lengths[i] < 0 || lengths[i] > most) {
      fail(op, "seq_lens[" + std::to_string(i) + "] is " + std::to_string(lengths[i]) +
                   "; block_table has room for 0 to " + std::to_string(most) + " tokens");
    }
  }
}

struct Options {
  double scale;
  const Optional<Tensor>& alibi_slopes;
  const Optional<int64_t>& sliding_window;
  const Optional<double>& softcap;
};

AttentionArgs make_args(const char* op, const Tensor& out, const Tensor& q, const Tensor& k_cache,
                        const Tensor& v_cache, const Tensor& block_table, const Tensor& seq_lens,
                        const Options& options) {
  AttentionArgs args = {};
  args.dtype = element_type(op, "q", q);
  const CacheShape shape = check_caches(op, k_cache, v_cache, q.dtype());
  args.cache_dtype = shape.dtype;
  check_queries(op, out, q, shape.num_kv_heads, shape.head_dim);
  check_head_dim(op, shape.head_dim);
  check_lengths(op, block_table, seq_lens, shape.block_size);
  if (options.alibi_slopes) {
    check_tensor(op, "alibi_slopes", *options.alibi_slopes, aoti_torch_dtype_float32(),
                 {q.size(1)});
    args.alibi_slopes = options.alibi_slopes->data<float>();
  }
  args.sliding_window = check_window(op, options.sliding_window);
  args.softcap = check_softcap(op, options.softcap);
  args.out = out.raw();
  args.q = q.raw();
  args.k_cache = k_cache.raw();
  args.v_cache = v_cache.raw();
  args.block_table = block_table.data<int32_t>();
  args.seq_lens = seq_lens.data<int32_t>();
  args.num_heads = q.size(1);
  args.num_kv_heads = shape.num_kv_heads;
  args.head_dim = shape.head_dim;
  args.block_size = shape.block_size;
  args.block_table_stride = block_table.stride(0);
  args.out_token_stride = out.stride(0);
  args.out_head_stride = out.stride(1);
  args.q_token_stride = q.stride(0);
  args.q_head_stride = q.stride(1);
  args.scale = static_cast<float>(options.scale);
  return args;
}

int32_t num_partitions(int64_t seq_len) {
  return static_cast<int32_t>((seq_len + kPartitionSize - 1) / kPartitionSize);
}

// What a thread begins with: items [next, end).
struct alignas(64) Share {
  std::atomic<int64_t> next;
  int64_t end;
};

// About what an item costs, in keys that a query sees.
int64_t item_cost(const AttentionArgs& args, const AttentionItem& item) {
  constexpr int64_t kOverhead = 32;
  const int64_t keys = std::min<int64_t>(
      args.seq_lens[item.seq], (item.end_partition - item.first_partition) * kPartitionSize);
  return (item.end_kv_head - item.first_kv_head) * (item.num_queries * keys + kOverhead);
}

// Each thread computes a run of neighbouring items. For decodes these are about the tokens whose K
// and V it wrote, which are in its CPU cache. Then it takes items that no thread has begun.
void run_items(const AttentionArgs& args, const std::vector<AttentionItem>& items,
               int64_t threads) {
  const auto kernel = attention_kernels(args.block_size).attention;
  const int64_t count = static_cast<int64_t>(items.size());
  if (count == 0) return;
  threads = std::min(threads, count);
  int64_t total = 0, sum = 0, thread = 0;
  for (const AttentionItem& item : items) total += item_cost(args, item);
  const std::unique_ptr<Share[]> shares(new Share[threads]);
  shares[0].next = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += item_cost(args, items[i]);
    while (thread + 1 < threads && sum * threads >= total * (thread + 1)) {
      shares[thread].end = i + 1;
      shares[++thread].next = i + 1;
    }
  }
  shares[threads - 1].end = count;
  parallel_for(threads, 1, [&](int64_t begin, int64_t) {
    for (int64_t i = 0; i < threads; ++i) {
      Share& share = shares[(begin + i) % threads];
      for (int64_t at = share.next++; at < share.end; at = share.next++)
        kernel(args, items[at], at + 1 < share.end ? &items[at + 1] : nullptr);
    }
  });
}

// An item has one or more kv heads of a sequence. The work of one head is not divided if there are
// more items than threads.
void add_items(std::vector<AttentionItem>& items, AttentionItem item, int64_t num_kv_heads,
               int64_t heads_per_item) {
  for (int64_t head = 0; head < num_kv_heads; head += heads_per_item) {
    item.first_kv_head = static_cast<int32_t>(head);
    const int64_t end = head + heads_per_item;
    item.end_kv_head = static_cast<int32_t>(end < num_kv_heads ? end : num_kv_heads);
    items.push_back(item);
  }
}

// The cut of the context is made here, from the lengths: a plan for a GPU is not looked at.
void paged_attention(const Tensor& out, const Tensor& q, const Tensor& k_cache,
                     const Tensor& v_cache, const Tensor& block_table, const Tensor& seq_lens,
                     double scale, const Optional<Tensor>& alibi_slopes,
                     const Optional<int64_t>& sliding_window, const Optional<double>& softcap,
                     double k_scale, double v_scale, const Optional<Tensor>&,
                     const Optional<Tensor>&, const Optional<Tensor>&) {
  const char* op = "paged_attention";
  check_no_scales(op, k_scale, v_scale);
  AttentionArgs args = make_args(op, out, q, k_cache, v_cache, block_table, seq_lens,
                                 {scale, alibi_slopes, sliding_window, softcap});
  const int64_t num_seqs = q.size(0), threads = num_threads();
  check_size(op, "block_table", block_table, 0, num_seqs);
  int64_t total_tokens = 0;
  for (int64_t s = 0; s < num_seqs; ++s) total_tokens += args.seq_lens[s];
  // Below some 512 rows of K handing work to a thread costs more than it saves.
  const bool serial = threads == 1 || total_tokens * args.num_kv_heads < 512;
  int64_t heads = args.num_kv_heads;
  if (!serial && num_seqs < 2 * threads) heads = heads > threads ? heads / threads : 1;
  const bool split = !serial && num_seqs * args.num_kv_heads < 2 * threads;
  std::vector<AttentionItem> items, merges;
  int64_t partial_slots = 0;
  for (int64_t s = 0; s < num_seqs; ++s) {
    AttentionItem item = {};
    item.seq = static_cast<int32_t>(s);
    item.num_queries = 1;
    item.end_partition = num_partitions(args.seq_lens[s]);
    if (!split || item.end_partition < 2) {
      add_items(items, item, args.num_kv_heads, heads);
      continue;
    }
    item.split = true;
    item.partial_slot = partial_slots;
    partial_slots += item.end_partition;
    merges.push_back(item);
    for (int32_t p = 0; p < merges.back().end_partition; ++p) {
      item.first_partition = p;
      item.end_partition = p + 1;
      add_items(items, item, args.num_kv_heads, heads);
    }
  }
  std::vector<float> partials(partial_slots * args.num_heads * (args.head_dim + 2));
  args.partials = partials.data();
  run_items(args, items, serial ? 1 : threads);
  for (const AttentionItem& item : merges)
    attention_kernels(args.block_size).merge_partitions(args, item);
}

void check_query_start_loc(const char* op, const Tensor& query_start_loc, const int32_t* seq_lens,
                           int64_t num_seqs, int64_t num_tokens) {
  check_tensor(op, "query_start_loc", query_start_loc, aoti_torch_dtype_int32(), {num_seqs + 1});
  const int32_t* start = query_start_loc.data<int32_t>();
  for (int64_t s = 0; s < num_seqs; ++s) {
    const int64_t count = start[s + 1] - start[s];
    if (start[s] < 0 || count < 0 || count > seq_lens[s] || start[s + 1] > num_tokens) {
      fail(op, "query_start_loc[" + std::to_string(s) + ":" + std::to_string(s + 2) + "] is " +
                   std::to_string(start[s]) + ", " + std::to_string(start[s + 1]) +
                   "; expected 0 to seq_lens (" + std::to_string(seq_lens[s]) +
                   ") queries within the " + std::to_string(num_tokens) + " rows of q");
    }
  }
}

// The kernel goes through keys once for several queries: no query may see fewer than one before it.
const int32_t* checked_key_ends(const char* op, const Tensor& key_ends, const AttentionArgs& args,
                                int64_t num_seqs, int64_t num_tokens) {
  check_tensor(op, "key_ends", key_ends, aoti_torch_dtype_int32(), {num_tokens});
  const int32_t* ends = key_ends.data<int32_t>();
  for (int64_t s = 0; s < num_seqs; ++s) {
    const int32_t start = args.query_start_loc[s], stop = args.query_start_loc[s + 1];
    for (int32_t token = start; token < stop; ++token) {
      const int32_t own = args.seq_lens[s] - stop + token + 1;
      const int32_t least = token > start ? std::max(own, ends[token - 1]) : own;
      if (ends[token] < least || ends[token] > args.seq_lens[s]) {
        fail(op, "key_ends[" + std::to_string(token) + "] is " + std::to_string(ends[token]) +
                     "; expected " + std::to_string(least) + " to " +
                     std::to_string(args.seq_lens[s]));
      }
    }
  }
  return ends;
}

void prefill_attention(const Tensor& out, const Tensor& q, const Tensor& k_cache,
                       const Tensor& v_cache, const Tensor& block_table,
                       const Tensor& query_start_loc, const Tensor& seq_lens, double scale,
                       const Optional<Tensor>& alibi_slopes,
                       const Optional<int64_t>& sliding_window, const Optional<double>& softcap,
                       double k_scale, double v_scale, const Optional<Tensor>& key_ends) {
  const char* op = "prefill_attention";
  check_no_scales(op, k_scale, v_scale);
  AttentionArgs args = make_args(op, out, q, k_cache, v_cache, block_table, seq_lens,
                                 {scale, alibi_slopes, sliding_window, softcap});
  const int64_t num_seqs = block_table.size(0), threads = num_threads();
  check_query_start_loc(op, query_start_loc, args.seq_lens, num_seqs, q.size(0));
  args.query_start_loc = query_start_loc.data<int32_t>();
  if (key_ends) args.key_ends = checked_key_ends(op, *key_ends, args, num_seqs, q.size(0));
  const int64_t group = args.num_heads / args.num_kv_heads;
  const int64_t tile = group < kItemRows ? kItemRows / group : 1;
  int64_t num_tiles = 0;
  for (int64_t s = 0; s < num_seqs; ++s)
    num_tiles += (args.query_start_loc[s + 1] - args.query_start_loc[s] + tile - 1) / tile;
  int64_t heads = args.num_kv_heads;
  if (num_tiles < 4 * threads) heads = heads > threads ? heads / threads : 1;
  std::vector<AttentionItem> items;
  for (int64_t s = 0; s < num_seqs; ++s) {
    const int64_t count = args.query_start_loc[s + 1] - args.query_start_loc[s];
    AttentionItem item = {};
    item.seq = static_cast<int32_t>(s);
    item.end_partition = num_partitions(args.seq_lens[s]);
    for (int64_t first = (count - 1) / tile * tile; first >= 0 && count > 0; first -= tile) {
      item.first_query = static_cast<int32_t>(first);  // the longest context first
      item.num_queries = static_cast<int32_t>(count - first < tile ? count - first : tile);
      add_items(items, item, args.num_kv_heads, heads);
    }
  }
  run_items(args, items, threads);
}

}  // namespace

void register_attention(TorchLibraryHandle library) {
  implement<&paged_attention>(library, "paged_attention");
  implement<&prefill_attention>(library, "prefill_attention");
}

}  // namespace tpengine::cpu
