// Runs every kernel once or a few times on buffers of exactly the size that it may touch, for a
// build with AddressSanitizer: all that is looked at is where it reads and writes. Numbers are
// checked elsewhere.
#define TPENGINE_CUDA_HOST
#define TPENGINE_SOME_DIMS
#define TPENGINE_FEW_DIMS
#include <stdio.h>

#include "attention/decode_launch.cuh"
#include "attention/plan_decode.cuh"
#include "cache/copy_blocks.cuh"
#include "cache/gather_kv.cuh"
#include "cache/store_kv.cuh"
#include "fused/gated.cuh"
#include "fused/rms_norm.cuh"
#include "lora/add_lora.cuh"
#include "quantized/dequantize.cuh"
#include "quantized/linear.cuh"
#include "sampling/sample_tokens.cuh"

using namespace tpengine::cuda;

namespace {

std::mt19937 random_bits(1);

// `size` random numbers of `bytes` bytes: 4 float32, 2 bfloat16 or float16, 1 e4m3.
struct Buffer {
  std::vector<char> bytes;
  Buffer(size_t size, int element_bytes) : bytes(size * element_bytes) {
    for (size_t i = 0; i < size; ++i) {
      const float value = static_cast<float>(random_bits() % 1000) / 1000.f;
      const uint16_t half = ptx::float_to_half(value);
      char* to = bytes.data() + i * element_bytes;
      if (element_bytes == 4) memcpy(to, &value, 4);
      if (element_bytes == 2) memcpy(to, &half, 2);
      if (element_bytes == 1) *to = static_cast<char>(random_bits() % 0x70);
    }
  }
  void* data() { return bytes.data(); }
};

constexpr int kHeads = 10, kKvHeads = 2, kBlockSize = 8;

struct Batch {
  int max_blocks = 6, num_blocks = 1 + 3 + 6;
  std::vector<int32_t> seq_lens = {1, 0, 20, 45}, token_start = {0, 1, 1, 21, 66}, table;
  Batch() : table(4 * max_blocks, 1 << 30) {  // never to be followed
    table[0] = 9;
    for (int i = 0; i < 3; ++i) table[2 * max_blocks + i] = i;
    for (int i = 0; i < 6; ++i) table[3 * max_blocks + i] = 8 - i;
  }
};

template <class F>
void decode(int head_dim, int cache_bytes, bool planned, int window, const F& launch) {
  Batch batch;
  const int model_bytes = cache_bytes == 1 ? 2 : cache_bytes, wave = 6, max_items = 4 + 2 * wave;
  const size_t cache_size = size_t{1} * batch.num_blocks * kBlockSize * kKvHeads * head_dim;
  Buffer q(4 * kHeads * head_dim, model_bytes), out(4 * kHeads * head_dim, model_bytes);
  Buffer k(cache_size, cache_bytes), v(cache_size, cache_bytes);
  std::vector<int32_t> start(5);
  std::vector<int4> items(max_items);
  std::vector<float> partials(max_items * kHeads * (head_dim + kPartialPadding)), slopes(kHeads);
  const PlanArgs plan = {start.data(), items.data(), batch.seq_lens.data(), 4, wave, 2, window};
  if (planned) launch_plan_decode(plan, nullptr);
  const DecodeArgs args = {out.data(),
                           q.data(),
                           k.data(),
                           v.data(),
                           batch.table.data(),
                           batch.seq_lens.data(),
                           window < 100 ? slopes.data() : nullptr,
                           planned ? start.data() : nullptr,
                           planned ? items.data() : nullptr,
                           planned ? partials.data() : nullptr,
                           kHeads * head_dim,
                           head_dim,
                           kHeads * head_dim,
                           head_dim,
                           batch.max_blocks,
                           4,
                           kHeads,
                           kKvHeads,
                           head_dim,
                           kBlockSize,
                           window,
                           1,
                           0.1f,
                           1.f};
  launch(args, planned ? max_items : 4);
}

void attention() {
  for (const int head_dim : {64, 80}) {
    for (const int window : {INT32_MAX, 33}) {
      const bool planned = (head_dim == 64) == (window == 33);
      decode(head_dim, 2, planned, window, [](const DecodeArgs& args, int items) {
        launch_decode_mma<CacheType::kFloat16>(args, items, nullptr);
      });
      decode(head_dim, 1, planned, window, [](const DecodeArgs& args, int items) {
        launch_decode_mma<CacheType::kFloat8>(args, items, nullptr);
      });
    }
  }
  decode(20, 4, true, 50, [](const DecodeArgs& args, int items) {
    launch_decode_plain<float>(args, items, nullptr);
  });
}

template <class T, class Cache>
void cache(int head_dim, int rotary_dim, bool wide) {
  Batch batch;
  const int tokens = 66, bytes = sizeof(T);
  const size_t cache_size = size_t{1} * batch.num_blocks * kBlockSize * kKvHeads * head_dim;
  Buffer q(tokens * kHeads * head_dim, bytes), k(tokens * kKvHeads * head_dim, bytes);
  Buffer v(tokens * kKvHeads * head_dim, bytes), table(9 * rotary_dim, 4);
  Buffer k_cache(cache_size, sizeof(Cache)), v_cache(cache_size, sizeof(Cache));
  std::vector<int32_t> positions(tokens), slots(tokens);
  for (int i = 0; i < tokens; ++i) {
    positions[i] = i % 9;
    slots[i] = i % 7 == 0 ? -1 : batch.num_blocks * kBlockSize - 1 - i;
  }
  const int64_t d = head_dim, row = kKvHeads * d;
  const StoreArgs store = {q.data(),
                           k.data(),
                           v.data(),
                           k_cache.data(),
                           v_cache.data(),
                           slots.data(),
                           positions.data(),
                           static_cast<float*>(table.data()),
                           kHeads * d,
                           d,
                           row,
                           d,
                           row,
                           d,
                           kHeads,
                           kKvHeads,
                           head_dim,
                           rotary_dim,
                           9,
                           1.f,
                           1.f};
  launch_store_kv<T, Cache>(store, wide, tokens, nullptr);
  const GatherArgs gather = {k.data(),
                             v.data(),
                             k_cache.data(),
                             v_cache.data(),
                             batch.table.data(),
                             batch.token_start.data(),
                             batch.max_blocks,
                             tokens,
                             4,
                             kBlockSize,
                             static_cast<int>(row),
                             1.f,
                             1.f};
  launch_gather_kv<T, Cache>(gather, wide, nullptr);
}

void blocks() {
  const int64_t piece = 5120, ids[] = {3, 0};
  std::vector<char> pool(6 * 4 * piece), packed(2 * 6 * piece);
  const BlockPlace inside = {pool.data(), ids, 1, piece, 4 * piece};
  const BlockPlace outside = {packed.data(), nullptr, 1, 6 * piece, piece};
  launch_copy_blocks({inside, outside, piece}, 2, 6, nullptr);
  launch_copy_blocks({outside, inside, piece}, 2, 6, nullptr);
}

void fused() {
  for (const int size : {7, 304, 1100}) {
    const bool wide = size % 8 == 0;
    Buffer x(2 * size, 2), residual(2 * size, 2), weight(size, 2), out(2 * size, 2);
    launch_rms_norm<__half>({out.data(), x.data(), residual.data(), weight.data(), size, 0, size, 0,
                             size, 1, size, 1e-5f},
                            wide, 2, nullptr);
    launch_gated<__half, Activation::kSilu>({residual.data(), x.data(), size, 2 * size, size}, wide,
                                            1, nullptr);
  }
}

// A weight of 40 outputs, whose last panel is not full, and inputs that are no whole step.
void quantized(int bits, Offsets offsets, int num_rows) {
  const int inputs = 168, outputs = 40, panels = 2, steps = 6, groups = 3;
  const int kinds = offsets == Offsets::kNone ? 1 : 2;
  const int numbers = panels * steps * kStep * kPanel * bits / 8;
  Buffer packed(numbers + panels * groups * kPanel * kinds * 2, 1), bias(outputs, 2);
  Buffer x(num_rows * inputs, 2), out(num_rows * outputs, 2);
  const PackedWeight weight = {packed.data(), panels, steps, groups, 2, offsets};
  launch_weight_only<__half>(
      {out.data(), x.data(), bias.data(), weight, outputs, inputs, num_rows, outputs, inputs, 1},
      bits, nullptr);
  Buffer matrix(kPanel * steps * kStep, 2);
  launch_dequantize<__half>({matrix.data(), weight, 1}, bits, 1, nullptr);
}

// Two adapters of two parts, the first without the second part, and a group of no rows.
template <class X, class W>
void lora(int inputs, bool wide) {
  const int line = kLineBytes / sizeof(W), lines = ceil_div(inputs, line), outputs = 17 + 5;
  const int max_rank = 8, panels = 3, lora_rows = 13;
  Buffer a(2 * 2 * max_rank * lines * line, sizeof(W));
  Buffer b(2 * panels * max_rank * kLoRAPanel, sizeof(W)), shrunk(lora_rows * 2 * max_rank, 4);
  Buffer x(16 * inputs, sizeof(X)), out(16 * outputs, sizeof(X));
  const std::vector<int32_t> ranks = {7, 0, 3, 8}, first_outputs = {0, 17, outputs};
  const std::vector<int32_t> rows = {15, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 14};
  const std::vector<int32_t> groups = {0, 0, 11, 1, 11, 11, 1, 11, 13};
  launch_add_lora<X, W>(
      {out.data(), x.data(), a.data(), b.data(), ranks.data(), first_outputs.data(), rows.data(),
       groups.data(), static_cast<float*>(shrunk.data()), outputs, inputs, 3, lora_rows, 2,
       max_rank / kLoRATile, lines, panels, inputs, wide},
      nullptr);
}

// Two rows that begin `offset` elements after an address of 16 bytes and end with the buffer.
template <class T>
void sample(int vocab_size, int offset) {
  Buffer logits(2 * vocab_size + offset, sizeof(T));
  std::vector<int64_t> out(2);
  const std::vector<float> temperature = {1.f, 0.f}, top_p = {0.7f, 1.f}, min_p = {0.1f, 0.f};
  const std::vector<int32_t> top_k = {20, 0};
  const std::vector<double> uniform = {0.999, 0.};
  const LogitsArgs rows = {out.data(), static_cast<T*>(logits.data()) + offset, vocab_size,
                           vocab_size};
  launch_sample_tokens<T>(
      {rows, temperature.data(), top_k.data(), top_p.data(), min_p.data(), uniform.data()}, 2,
      nullptr);
  launch_argmax<T>(rows, 2, nullptr);
}

void sampling() {
  for (const int vocab_size : {1, 33, 300}) {
    for (const int offset : {0, 1, 3, 7}) {
      sample<float>(vocab_size, offset);
      sample<__half>(vocab_size, offset);
    }
  }
}

}  // namespace

int main(int count, char**) {
  cuda_host::schedule_seed = 1;
  attention();
  cache<float, float>(20, 12, false);
  cache<__half, __half>(64, 32, true);
  cache<__half, Float8>(64, 64, true);
  blocks();
  fused();
  sampling();
  quantized(4, Offsets::kMinima, 3);
  quantized(8, Offsets::kNone, 9);
  quantized(8, Offsets::kZeroPoints, 1);
  lora<__half, __half>(64, true);
  lora<__half, float>(19, false);
  lora<float, __half>(40, true);
  if (count > 1) {  // what a fault looks like
    std::vector<float> row(31);
    launch_argmax<float>({new int64_t, row.data(), 32, 32}, 1, nullptr);
  }
  puts("done");
}
