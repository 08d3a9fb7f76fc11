// What the launchers hand to the CPU kernels: plain data, and one table of functions per
// instruction set. Knows nothing of torch. Strides are in elements.
//
// KV cache layout (p = 2 in bfloat16, 1 in float32):
//   K [num_blocks, num_kv_heads, head_dim / p, block_size, p]
//   V [num_blocks, num_kv_heads, block_size / p, head_dim, p]
// so that one vector holds p neighbours of the summed dimension for as many columns as it has
// 32-bit lanes, which is what a bfloat16 dot-product instruction reads.
// In int8 (p = 2) each [num_blocks, num_kv_heads] has its numbers in the same order, then
// [block_size] float32 scales, one per token.
#pragma once

#include <cstdint>
#include <cstring>

namespace tpengine::cpu {

enum class DType { kFloat32, kBFloat16 };
enum class CacheDType { kAsModel, kInt8 };

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kScaleBytes = 4;  // of a token's K or V in int8
// Keys of one partition. Softmax statistics are kept per partition and merged in the order of the
// keys, so that a sequence's result depends neither on the batch nor on the threads.
constexpr int64_t kPartitionSize = 1024;

struct AttentionArgs {
  DType dtype;
  CacheDType cache_dtype;
  void* out;  // [num_tokens, num_heads, head_dim]
  const void* q;
  const void* k_cache;
  const void* v_cache;
  const int32_t* block_table;      // [num_seqs, block_table_stride]
  const int32_t* query_start_loc;  // [num_seqs + 1]; null: one query per sequence
  const int32_t* seq_lens;         // [num_seqs]
  const int32_t* key_ends;         // [num_tokens], behind the last key a query sees; null: itself
  const float* alibi_slopes;       // [num_heads]; null: no bias
  int64_t sliding_window;          // keys a query sees, at most
  int64_t num_heads, num_kv_heads, head_dim, block_size;
  int64_t block_table_stride, out_token_stride, out_head_stride, q_token_stride, q_head_stride;
  float scale;
  float softcap;    // logits become softcap * tanh(logit / softcap); 0: they stay
  float* partials;  // [partition slots, num_heads, head_dim + 2]; null: nothing is split
};

// A piece of attention work: some queries of one sequence, some kv heads, some partitions.
struct AttentionItem {
  int32_t seq, first_query, num_queries, first_kv_head, end_kv_head;
  int32_t first_partition, end_partition;
  int64_t partial_slot;  // of the sequence's partition 0, where `split`
  bool split;            // leave partial results for merge_partitions
};

// Rows of numbers, and heads of tokens.
struct Rows {
  void* data;
  int64_t stride;
};
struct Heads {
  void* data;
  int64_t token_stride, head_stride;
};

struct NormArgs {
  DType dtype;
  Heads out, x;
  Rows residual;       // null: plain norm. Otherwise residual += x, and the sum is normalised.
  const void* weight;  // of `dtype`, or float32
  bool float_weight;
  int64_t heads_per_token, size;  // row r is head r % heads_per_token of a token
  float eps;
};

struct LayerNormArgs {
  DType dtype;
  Rows out, x;
  Rows residual;       // null: plain norm. Otherwise residual += x, and the sum is normalised.
  const void* weight;  // [size]; null: none
  const void* bias;    // [size]; null: none
  int64_t size;
  float eps;
};

enum class Activation { kRelu, kSilu, kGelu, kGeluTanh };

struct ActivationArgs {
  DType dtype;
  Activation activation;
  bool gated;  // x holds `size` gates and as many factors; otherwise it holds `size` inputs
  Rows out, x;
  int64_t size;
};

struct RotaryArgs {
  DType dtype;
  const int32_t* positions;
  Heads rotated;               // of queries and keys
  const float* cos_sin_cache;  // [max_position, rotary_dim]
  int64_t num_rotated, rotary_dim;
};

struct CacheWriteArgs {
  DType dtype;
  CacheDType cache_dtype;
  Heads k, v;
  void* k_cache;
  void* v_cache;
  const int32_t* slot_mapping;  // -1: the token is not cached
  int64_t num_kv_heads, head_dim, block_size;
};

struct SamplingArgs {
  DType dtype;
  int64_t* out;
  const void* logits;
  int64_t vocab_size, logits_stride;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const double* uniform;
  float* logprobs;  // of the chosen tokens; null: not wanted
};

// Rows up to which a kernel of 16 lanes reads each panel once, for all of them.
constexpr int64_t kFewRowsOf16Lanes = 10;
constexpr int64_t kLinearPanel = 32;     // outputs side by side in a packed weight
constexpr int64_t kTileBlockRows = 32;   // most rows of a block that tiles multiply with a panel
constexpr int64_t kTileRoundedRows = 8;  // of such a block, that a thread rounds at once

struct PanelRange {
  int64_t begin, end;
};

struct LinearArgs {
  DType dtype;
  void* out;
  const void* x;
  const void* packed;  // [panels, in_features / p, kLinearPanel, p], zeros beyond out_features
  const void* bias;    // [out_features]; null: none
  int64_t num_rows, in_features, out_features, out_stride, x_stride;
};

// How the weights w of a group come from its scale s and its stored numbers q, which are unsigned:
// w = s (q - 8) (in 8 bits 128), w = s (q - zero) with the group's own zero, or w = s q + minimum.
enum class Offsets { kNone, kZeroPoints, kMinima };

// Rows of inputs, rounded: in blocks of R rows, [in_features / 4][R][4] bytes, or for tiles
// [in_features / 64][R][64], and [groups][R] numbers that a group's sums start from (with offsets,
// the sums of the inputs as floats).
// Four neighbouring inputs of a row of which some exceed 8 bits: each number is 128 * high + low,
// and the low part stands among the bytes of the row.
struct OutlierFour {
  int32_t high, start;   // four signed bytes, and what their sum starts from
  int32_t line, scales;  // where weights and scales stand in a panel, in bytes
};

struct QuantizedRows {
  int8_t* bytes;  // a vector may be read beyond the last
  int32_t* starts;
  float* scales;          // [num_rows]
  OutlierFour* outliers;  // [num_rows][num_outliers]; those without high parts add nothing
  float* maxima;          // working memory of one thread: a number per four inputs, and a vector
};

struct QuantizedLinearArgs {
  DType dtype;  // of out, x and bias
  void* out;
  const void* x;
  QuantizedRows rows;
  // [panels][groups]: [group_size / 4][kLinearPanel][4] numbers, those of outputs i and i + 16 in
  // one byte if they have 4 bits; then [kLinearPanel] float16 scales, and as many offsets if there
  // are.
  const uint8_t* packed;
  const void* bias;  // [out_features]; null: none
  // Of weights that are rounded: [in_features], what an input counts; null: all count the same.
  const float* importance;
  int64_t num_rows, in_features, out_features, out_stride, x_stride;
  int bits;
  Offsets offsets;
  int64_t group_size, num_groups;  // the last group is filled up with zeros
  int64_t panel_bytes, group_bytes, num_panels;
  int64_t num_outliers;  // fours of a row
  int64_t num_blocks;    // of rows: full ones and a rest for tiles, else as equal as can be
  int64_t tile_inputs;   // of a step by tiles; 0: vectors multiply, as rows are few or tiles lack

  bool is_whole() const { return bits == 8 && num_groups == 1 && offsets == Offsets::kNone; }
  // of a row, filled up with zeros
  int64_t row_bytes() const {
    const int64_t bytes = num_groups * group_size;
    return tile_inputs > 0 ? (bytes + 63) / 64 * 64 : bytes;
  }
  int64_t first_row(int64_t block) const {
    if (tile_inputs == 0) return num_rows * block / num_blocks;
    return block < num_blocks ? block * kTileBlockRows : num_rows;
  }
  // Parts of rows that threads round: blocks, or pieces of those of tiles.
  int64_t num_parts() const {
    return tile_inputs == 0 ? num_blocks : (num_rows + kTileRoundedRows - 1) / kTileRoundedRows;
  }
};

// Columns of a tile of A, whose numbers lie in turn, 64 bytes of each; and outputs of a panel of B.
constexpr int64_t kLoRATile = 4, kLoRAPanel = 16;

struct LoRAArgs {
  DType dtype, weight_dtype;  // of out and x, of A and B
  void* out;
  const void* x;
  const int32_t* rows;  // of out and x
  float* shrunk;        // [rows, num_columns]
  int64_t in_features, out_stride, x_stride, num_columns;
  int64_t column_bytes;  // of A
};

// A piece of what adapters add: some rows of one adapter, and columns of `shrunk` to compute
// (num_outputs = 0), or outputs to add.
struct LoRAItem {
  const char* weight;  // the first tile of A, or panel of B
  int64_t weight_bytes;
  int32_t begin, end;  // in `rows`
  int32_t first_column, num_columns;
  int32_t first_output, num_outputs;
};

// static: each instruction set has its own copy.
static inline uint16_t float_to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (value != value) return 0x7e00u;
  if (bits >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);  // 65520 and more are infinite
  memcpy(&value, &bits, sizeof value);
  if (value < 0x1p-14f) return (uint16_t)(sign | (uint32_t)__builtin_rintf(value * 0x1p24f));
  return (uint16_t)(sign | ((bits - (112u << 23) + 0xfffu + (bits >> 13 & 1u)) >> 13));
}
static inline float half_to_float(uint16_t half) {
  const bool is_finite = (half & 0x7c00u) != 0x7c00u;
  const uint32_t bits = (half & 0x7fffu) << 13 | (is_finite ? 0u : 0x7f800000u);
  float value;
  memcpy(&value, &bits, sizeof value);
  if (is_finite) value *= 0x1p112f;  // the exponent's bias is 127 here and 15 there
  return (half & 0x8000u) != 0 ? -value : value;
}

// Working memory of one thread that samples: candidates in token order, and block sums.
struct SamplingScratch {
  float* logit;
  float* weight;
  int32_t* token;
  double* block_sum;
  float* block_max;
};
constexpr int64_t kSamplingBlock = 128;

// Element-wise sum, as of what the ranks or experts contribute; `out` may be one of the parts.
struct SumArgs {
  DType dtype;
  void* out;
  const void* const* parts;  // added in this order
  int64_t num_parts;
  const float* weights = nullptr;  // a factor of each part; null: none
};

struct Kernels {
  const char* name;
  int64_t vector_lanes;
  int64_t quantized_rows, whole_rows;  // at most, of a block: with groups, with one per output
  bool takes_floats;                   // for inputs of linear layers in bfloat16
  int64_t tile_rows;  // fewest rows for which tiles multiply quantised weights; 0: no tiles
  // next: the item that this thread will probably take after this one; null: none
  void (*attention)(const AttentionArgs&, const AttentionItem&, const AttentionItem* next);
  void (*merge_partitions)(const AttentionArgs&, const AttentionItem&);
  void (*norm)(const NormArgs&, int64_t begin, int64_t end);
  void (*layer_norm)(const LayerNormArgs&, int64_t begin, int64_t end);
  void (*activation)(const ActivationArgs&, int64_t begin, int64_t end);
  void (*write_cache)(const CacheWriteArgs&, int64_t begin, int64_t end);
  void (*rotary_write)(const RotaryArgs&, const CacheWriteArgs&, int64_t begin, int64_t end);
  // next: the panels that this thread will take after these, perhaps none
  void (*linear)(const LinearArgs&, PanelRange now, PanelRange next);
  void (*quantize_rows)(const QuantizedLinearArgs&, int64_t begin, int64_t end);
  // the weight x, of panels [begin, end), into out
  void (*quantize_panels)(const QuantizedLinearArgs&, int64_t begin, int64_t end);
  void (*quantized_linear)(const QuantizedLinearArgs&, PanelRange now, PanelRange next);
  // next: the item that this thread will take after this one; null: none
  void (*lora)(const LoRAArgs&, const LoRAItem&, const LoRAItem* next);
  void (*argmax)(const SamplingArgs&, int64_t begin, int64_t end);
  void (*sample)(const SamplingArgs&, const SamplingScratch&, int64_t begin, int64_t end);
  void (*sum_parts)(const SumArgs&, int64_t begin, int64_t end);
  void (*scale_row)(DType, void* out, const void* x, int64_t size, float factor);
};

// The part of a table that an instruction set has of its own, whose other kernels are another's.
struct OwnProducts {
  const char* name;
  int64_t quantized_rows, whole_rows;
  decltype(Kernels::quantize_rows) quantize_rows;
  decltype(Kernels::quantize_panels) quantize_panels;
  decltype(Kernels::quantized_linear) quantized_linear;
};

// The kernels in use: the best this CPU has, or what set_kernels chose.
const Kernels& kernels();
// The kernels for attention over blocks of this size: the best of them, not better than those in
// use, of which a block holds whole vectors.
const Kernels& attention_kernels(int64_t block_size);

}  // namespace tpengine::cpu
