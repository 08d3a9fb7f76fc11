// Runs every family of kernels on a few small cases without torch, for compute-sanitizer, which
// takes minutes for a program with torch in it. Each case is held against a plain loop; the exit
// status is 1 if one is wrong. Arguments: names of families, by default all.
//
//   nvcc -std=c++17 -O2 -lineinfo -arch=sm_90a -o kernel_checks kernel_checks.cu
//
// With TPENGINE_CUDA_HOST it is compiled for the CPU stand-in (cuda_host), which runs its lines
// where there is no GPU.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../../../csrc/cuda/attention/decode_launch.cuh"
#include "../../../csrc/cuda/attention/plan_decode.cuh"
#include "../../../csrc/cuda/cache/copy_blocks.cuh"
#include "../../../csrc/cuda/cache/gather_kv.cuh"
#include "../../../csrc/cuda/cache/store_kv.cuh"
#include "../../../csrc/cuda/fused/gated.cuh"
#include "../../../csrc/cuda/fused/rms_norm.cuh"
#include "../../../csrc/cuda/lora/add_lora.cuh"
#include "../../../csrc/cuda/quantized/dequantize.cuh"
#include "../../../csrc/cuda/quantized/linear.cuh"
#include "../../../csrc/cuda/sampling/sample_tokens.cuh"

using namespace tpengine::cuda;

namespace {

int num_wrong = 0;
std::mt19937 random_bits(1);

#ifdef TPENGINE_CUDA_HOST
void* device_alloc(size_t bytes) { return aligned_alloc(128, (bytes + 127) / 128 * 128); }
void device_free(void* pointer) { free(pointer); }
void copy_bytes(void* to, const void* from, size_t bytes, bool) { memcpy(to, from, bytes); }
#else
void must(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  printf("%s: %s\n", call, cudaGetErrorString(error));
  exit(2);
}
void* device_alloc(size_t bytes) {
  void* pointer = nullptr;
  must(cudaMalloc(&pointer, bytes), "cudaMalloc");
  return pointer;
}
void device_free(void* pointer) { cudaFree(pointer); }
// What a kernel did wrong shows here, as copies wait for it.
void copy_bytes(void* to, const void* from, size_t bytes, bool up) {
  must(cudaGetLastError(), "launch");
  must(cudaMemcpy(to, from, bytes, up ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost), "copy");
}
#endif

// Memory of the device, of exactly the size that is needed, so that memcheck sees its end.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values)
      : size_(values.size()), data_(static_cast<T*>(device_alloc(size_ * sizeof(T)))) {
    copy_bytes(data_, values.data(), size_ * sizeof(T), true);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { device_free(data_); }
  T* get() const { return data_; }
  std::vector<T> read() const {
    std::vector<T> values(size_);
    copy_bytes(values.data(), data_, size_ * sizeof(T), false);
    return values;
  }

 private:
  size_t size_;
  T* data_;
};

double value_of(float x) { return x; }
double value_of(__nv_bfloat16 x) { return __bfloat162float(x); }
double value_of(Float8 x) {
  const int exponent = x.bits >> 3 & 15, fraction = x.bits & 7;
  const double size =
      exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return x.bits & 128 ? -size : size;
}

template <class T>
T random_value() {
  const float x = std::normal_distribution<float>()(random_bits);
  if constexpr (std::is_same_v<T, float>) return x;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
  // At most 1.875: exponents up to 7 of the bias.
  if constexpr (std::is_same_v<T, Float8>)
    return {static_cast<uint8_t>(random_bits() & (random_bits() & 1 ? 0x3f : 0xbf))};
}

template <class T>
std::vector<T> random_values(size_t count) {
  std::vector<T> values(count);
  for (T& value : values) value = random_value<T>();
  return values;
}

// Compares by the relative distance in the Frobenius norm; NaN is wrong, too.
template <class T>
void compare(const std::string& name, const std::vector<T>& found,
             const std::vector<double>& expected, double bound) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += std::pow(value_of(found[i]) - expected[i], 2);
    size += expected[i] * expected[i];
  }
  const double error = std::sqrt(difference / std::fmax(size, 1e-30));
  const bool is_right = found.size() == expected.size() && error <= bound;
  printf("%-6s %-40s error %.1e, bound %.0e\n", is_right ? "right" : "WRONG", name.c_str(), error,
         bound);
  num_wrong += !is_right;
}

// A cache [num_blocks, kBlockSize, kKvHeads, head_dim] and the rows that read it.
constexpr int kBlockSize = 16, kKvHeads = 2, kMaxBlocks = 24;
const std::vector<int32_t> kLengths = {1, 0, 17, 370, 64};

std::vector<int32_t> make_table(int num_rows) {
  std::vector<int32_t> table(num_rows * kMaxBlocks);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(table.size() - 1 - i);
  return table;
}

// Softmax attention of one head, in double.
template <class Q, class Cache>
std::vector<double> attend(const Q* q, const std::vector<Cache>& k, const std::vector<Cache>& v,
                           const int32_t* table, int length, int kv_head, int head_dim) {
  std::vector<double> out(head_dim, 0.), weights(length);
  const auto row = [&](int token) {
    const int64_t slot = table[token / kBlockSize] * kBlockSize + token % kBlockSize;
    return (slot * kKvHeads + kv_head) * head_dim;
  };
  double sum = 0;
  for (int token = 0; token < length; ++token) {
    double logit = 0;
    for (int d = 0; d < head_dim; ++d) logit += value_of(q[d]) * value_of(k[row(token) + d]);
    sum += weights[token] = std::exp(logit / std::sqrt(head_dim));
  }
  for (int token = 0; token < length; ++token)
    for (int d = 0; d < head_dim; ++d) out[d] += weights[token] / sum * value_of(v[row(token) + d]);
  return out;
}

// Launch: of the kernel, given its arguments and the number of items.
template <class Q, class Cache, class Launch>
void check_decode(const std::string& name, int head_dim, int group, bool with_plan, double bound,
                  const Launch& launch) {
  const int num_seqs = static_cast<int>(kLengths.size()), num_heads = group * kKvHeads, wave = 9;
  const size_t cache_size = kLengths.size() * kMaxBlocks * kBlockSize * kKvHeads * head_dim;
  const auto q = random_values<Q>(num_seqs * num_heads * head_dim);
  const auto k = random_values<Cache>(cache_size), v = random_values<Cache>(cache_size);
  const auto table = make_table(num_seqs);
  const int max_items = with_plan ? num_seqs + 2 * wave : num_seqs;
  const OnDevice<Q> d_q(q), d_out(std::vector<Q>(q.size()));
  const OnDevice<Cache> d_k(k), d_v(v);
  const OnDevice<int32_t> d_table(table), d_lengths(kLengths);
  const OnDevice<int32_t> d_start(std::vector<int32_t>(num_seqs + 1));
  const OnDevice<int4> d_items(std::vector<int4>(max_items, int4{0, 0, 0, 0}));
  const OnDevice<float> d_partials(
      std::vector<float>(max_items * num_heads * (head_dim + kPartialPadding), NAN));
  DecodeArgs args = {};
  args.out = d_out.get();
  args.q = d_q.get();
  args.k_cache = d_k.get();
  args.v_cache = d_v.get();
  args.block_table = d_table.get();
  args.seq_lens = d_lengths.get();
  args.out_token_stride = args.q_token_stride = num_heads * head_dim;
  args.out_head_stride = args.q_head_stride = head_dim;
  args.block_table_stride = kMaxBlocks;
  args.num_seqs = num_seqs;
  args.num_heads = num_heads;
  args.num_kv_heads = kKvHeads;
  args.head_dim = head_dim;
  args.block_size = kBlockSize;
  args.sliding_window = INT32_MAX;
  args.scale = 1.f / std::sqrt(static_cast<float>(head_dim));
  args.v_scale = 1.f;
  if (with_plan) {
    args.item_start = d_start.get();
    args.items = d_items.get();
    args.partials = d_partials.get();
    launch_plan_decode(
        {d_start.get(), d_items.get(), d_lengths.get(), num_seqs, wave, 2, INT32_MAX}, nullptr);
  }
  launch(args, max_items);
  std::vector<double> expected;
  for (int row = 0; row < num_seqs; ++row) {
    for (int head = 0; head < num_heads; ++head) {
      const auto out = attend(&q[(row * num_heads + head) * head_dim], k, v,
                              &table[row * kMaxBlocks], kLengths[row], head / group, head_dim);
      expected.insert(expected.end(), out.begin(), out.end());
    }
  }
  const std::string how = with_plan ? ", plan and reduce" : "";
  compare("decode " + name + how, d_out.read(), expected, bound);
}

template <class Q, class Cache, CacheType Type>
void check_mma(const std::string& name, int head_dim, int group) {
  for (const bool with_plan : {false, true}) {
    check_decode<Q, Cache>(name, head_dim, group, with_plan, 4e-3,
                           [](const DecodeArgs& args, int max_items) {
                             num_wrong += !launch_decode_mma<Type>(args, max_items, nullptr);
                           });
  }
}

void check_decodes() {
  check_mma<__nv_bfloat16, __nv_bfloat16, CacheType::kBFloat16>("bf16, 4 heads a kv head", 128, 4);
  check_mma<__nv_bfloat16, __nv_bfloat16, CacheType::kBFloat16>("bf16, 12 heads a kv head", 64, 12);
  check_mma<__nv_bfloat16, Float8, CacheType::kFloat8>("fp8, 4 heads a kv head", 128, 4);
  for (const bool with_plan : {false, true}) {
    check_decode<float, float>("plain float32", 80, 3, with_plan, 1e-5,
                               [](const DecodeArgs& args, int max_items) {
                                 launch_decode_plain<float>(args, max_items, nullptr);
                               });
  }
}

// Rotates and stores tokens, then gathers them again.
void check_cache() {
  using T = __nv_bfloat16;
  const int head_dim = 64, num_heads = 4, num_tokens = 37, half = head_dim / 2;
  const int width = (num_heads + 2 * kKvHeads) * head_dim, row_size = kKvHeads * head_dim;
  const auto qkv = random_values<T>(num_tokens * width);
  const auto angles = random_values<float>(num_tokens * head_dim);
  const std::vector<int32_t> starts = {0, 20, 20, num_tokens};
  const auto table = make_table(3);
  std::vector<int32_t> slots, positions;
  for (int row = 0; row < 3; ++row) {
    for (int i = 0; i < starts[row + 1] - starts[row]; ++i) {
      positions.push_back(i);
      slots.push_back(table[row * kMaxBlocks + i / kBlockSize] * kBlockSize + i % kBlockSize);
    }
  }
  const OnDevice<T> d_qkv(qkv), d_k(std::vector<T>(num_tokens * row_size)),
      d_v(std::vector<T>(num_tokens * row_size));
  const std::vector<T> empty(table.size() * kBlockSize * row_size);
  const OnDevice<T> d_k_cache(empty), d_v_cache(empty);
  const OnDevice<float> d_angles(angles);
  const OnDevice<int32_t> d_slots(slots), d_positions(positions), d_starts(starts), d_table(table);
  StoreArgs store = {};
  store.q = d_qkv.get();
  store.k = d_qkv.get() + num_heads * head_dim;
  store.v = d_qkv.get() + (num_heads + kKvHeads) * head_dim;
  store.k_cache = d_k_cache.get();
  store.v_cache = d_v_cache.get();
  store.slot_mapping = d_slots.get();
  store.positions = d_positions.get();
  store.cos_sin_cache = d_angles.get();
  store.q_token_stride = store.k_token_stride = store.v_token_stride = width;
  store.q_head_stride = store.k_head_stride = store.v_head_stride = head_dim;
  store.num_heads = num_heads;
  store.num_kv_heads = kKvHeads;
  store.head_dim = store.rotary_dim = head_dim;
  store.num_positions = num_tokens;
  store.k_inverse_scale = store.v_inverse_scale = 1.f;
  launch_store_kv<T, T>(store, true, num_tokens, nullptr);
  launch_gather_kv<T, T>(
      {d_k.get(), d_v.get(), d_k_cache.get(), d_v_cache.get(), d_table.get(), d_starts.get(),
       kMaxBlocks, num_tokens, 3, kBlockSize, row_size, 1.f, 1.f},
      true, nullptr);
  std::vector<double> k, v;
  for (int token = 0; token < num_tokens; ++token) {
    const T* from = &qkv[token * width + num_heads * head_dim];
    const float* cosine = &angles[positions[token] * head_dim];
    for (int i = 0; i < row_size; ++i) {
      const int d = i % head_dim, pair = d % half;
      const double own = value_of(from[i]), other = value_of(from[d < half ? i + half : i - half]);
      k.push_back(own * cosine[pair] + (d < half ? -other : other) * cosine[half + pair]);
      v.push_back(value_of(from[row_size + i]));
    }
  }
  compare("store_kv and gather_kv, K", d_k.read(), k, 4e-3);
  compare("store_kv and gather_kv, V", d_v.read(), v, 0);
}

void check_blocks() {
  const int num_pieces = 3, num_blocks = 8, piece = 1200;  // floats
  const auto pool = random_values<float>(num_pieces * num_blocks * piece);
  const std::vector<int64_t> pairs = {0, 5, 3, 6, 7, 1};
  const OnDevice<float> d_pool(pool);
  const OnDevice<int64_t> d_pairs(pairs);
  char* base = reinterpret_cast<char*>(d_pool.get());
  const int64_t bytes = piece * sizeof(float);
  const BlockPlace from = {base, d_pairs.get(), 2, bytes, bytes * num_blocks};
  const BlockPlace to = {base, d_pairs.get() + 1, 2, bytes, bytes * num_blocks};
  launch_copy_blocks({from, to, bytes}, 3, num_pieces, nullptr);
  std::vector<double> expected(pool.begin(), pool.end());
  for (int i = 0; i < num_pieces; ++i)
    for (int pair = 0; pair < 3; ++pair)
      for (int j = 0; j < piece; ++j)
        expected[(i * num_blocks + pairs[2 * pair + 1]) * piece + j] =
            pool[(i * num_blocks + pairs[2 * pair]) * piece + j];
  compare("copy_blocks", d_pool.read(), expected, 0);
}

void check_fused() {
  using T = __nv_bfloat16;
  const int rows = 3, size = 1048;
  const auto x = random_values<T>(rows * size), residual = random_values<T>(rows * size),
             weight = random_values<T>(size), gate = random_values<T>(rows * 2 * size);
  const OnDevice<T> d_x(x), d_residual(residual), d_weight(weight), d_gate(gate),
      d_out(std::vector<T>(rows * size)), d_gated(std::vector<T>(rows * size));
  NormArgs norm = {};
  norm.out = d_out.get();
  norm.x = d_x.get();
  norm.residual = d_residual.get();
  norm.weight = d_weight.get();
  norm.out_token_stride = norm.x_token_stride = norm.residual_stride = size;
  norm.heads_per_token = 1;
  norm.size = size;
  norm.eps = 1e-5f;
  launch_rms_norm<T>(norm, true, rows, nullptr);
  launch_gated<T, Activation::kSilu>({d_gated.get(), d_gate.get(), size, 2 * size, size}, true,
                                     rows, nullptr);
  std::vector<double> normed, gated;
  for (int row = 0; row < rows; ++row) {
    std::vector<double> sum(size);
    double squares = 0;
    for (int i = 0; i < size; ++i) {
      sum[i] = value_of(x[row * size + i]) + value_of(residual[row * size + i]);
      squares += sum[i] * sum[i];
      const double g = value_of(gate[2 * row * size + i]);
      gated.push_back(g / (1 + std::exp(-g)) * value_of(gate[(2 * row + 1) * size + i]));
    }
    for (int i = 0; i < size; ++i)
      normed.push_back(sum[i] / std::sqrt(squares / size + 1e-5) * value_of(weight[i]));
  }
  compare("rms_norm with residual", d_out.read(), normed, 4e-3);
  compare("silu_and_mul", d_gated.read(), gated, 4e-3);
}

// Dequantises a random weight, which checks no layout, and multiplies rows with it.
void check_quantized(int bits, Offsets offsets, int num_rows) {
  using T = __nv_bfloat16;
  const int inputs = 200, outputs = 70, panels = 3, steps = 7, groups = 4;
  const int kinds = offsets == Offsets::kNone ? 1 : 2, width = steps * kStep;
  std::vector<uint8_t> packed(panels * kPanel * (width * bits / 8 + groups * kinds * 2));
  for (uint8_t& byte : packed) byte = random_bits() % 60;  // of factors: 0 to 1.8
  const auto x = random_values<T>(num_rows * inputs), bias = random_values<T>(outputs);
  const OnDevice<uint8_t> d_packed(packed);
  const OnDevice<T> d_x(x), d_bias(bias), d_out(std::vector<T>(num_rows * outputs));
  const OnDevice<float> d_matrix(std::vector<float>(panels * kPanel * width, NAN));
  const PackedWeight weight = {d_packed.get(), panels, steps, groups, 2, offsets};
  launch_dequantize<float>({d_matrix.get(), weight, 0}, bits, panels, nullptr);
  launch_weight_only<T>(
      {d_out.get(), d_x.get(), d_bias.get(), weight, outputs, inputs, num_rows, outputs, inputs, 1},
      bits, nullptr);
  const std::vector<float> matrix = d_matrix.read();
  std::vector<double> expected;
  for (int row = 0; row < num_rows; ++row) {
    for (int output = 0; output < outputs; ++output) {
      double sum = value_of(bias[output]);
      for (int i = 0; i < inputs; ++i)
        sum += value_of(x[row * inputs + i]) * matrix[output * width + i];
      expected.push_back(sum);
    }
  }
  compare(std::to_string(bits) + " bits, " + std::to_string(num_rows) + " rows", d_out.read(),
          expected, 4e-3);
}

void check_weights() {
  check_quantized(4, Offsets::kNone, 1);
  check_quantized(4, Offsets::kMinima, 17);
  check_quantized(8, Offsets::kNone, 9);
  check_quantized(8, Offsets::kZeroPoints, 8);
}

// Two adapters of one part, of different ranks; rows in reverse order, the first without one.
void check_lora() {
  using T = __nv_bfloat16;
  const int inputs = 300, outputs = 150, lines = 10, line = 32, max_rank = 16, panels = 10;
  const int num_rows = 22;
  const std::vector<int32_t> ranks = {16, 5}, first_outputs = {0, outputs};
  const std::vector<int32_t> groups = {0, 0, 11, 1, 11, 21};
  std::vector<int32_t> rows(num_rows - 1);
  for (int i = 0; i < num_rows - 1; ++i) rows[i] = num_rows - 1 - i;
  const auto a = random_values<T>(2 * max_rank * lines * line);
  const auto b = random_values<T>(2 * panels * max_rank * kLoRAPanel);
  const auto x = random_values<T>(num_rows * inputs), before = random_values<T>(num_rows * outputs);
  const OnDevice<T> d_a(a), d_b(b), d_x(x), d_out(before);
  const OnDevice<int32_t> d_ranks(ranks), d_first(first_outputs), d_rows(rows), d_groups(groups);
  const OnDevice<float> d_shrunk(std::vector<float>((num_rows - 1) * max_rank, NAN));
  launch_add_lora<T, T>({d_out.get(), d_x.get(), d_a.get(), d_b.get(), d_ranks.get(), d_first.get(),
                         d_rows.get(), d_groups.get(), d_shrunk.get(), outputs, inputs, 2,
                         num_rows - 1, 1, max_rank / kLoRATile, lines, panels, inputs, false},
                        nullptr);
  std::vector<double> expected;
  for (int row = 0; row < num_rows; ++row) {
    const int slot = num_rows - 1 - row < 11 ? 0 : 1, columns = slot == 0 ? 16 : 8;
    std::vector<double> shrunk(columns);
    for (int c = 0; c < columns; ++c)
      for (int i = 0; i < inputs; ++i)
        shrunk[c] +=
            value_of(x[row * inputs + i]) *
            value_of(a[(((slot * 4 + c / 4) * lines + i / line) * 4 + c % 4) * line + i % line]);
    for (int n = 0; n < outputs; ++n) {
      double sum = value_of(before[row * outputs + n]);
      for (int c = 0; row > 0 && c < columns; ++c) {
        const int number = (n / 16 * columns + c) * kLoRAPanel + n % 16;
        sum += shrunk[c] * value_of(b[slot * panels * max_rank * kLoRAPanel + number]);
      }
      expected.push_back(sum);
    }
  }
  compare("add_lora", d_out.read(), expected, 4e-3);
}

// The first row is greedy, the second has one token left by top-k, the others draw by top-k and
// top-p: they give a token among the three largest.
void check_sampling() {
  const int rows = 6, vocab = 4099;
  auto logits = random_values<float>(rows * vocab);
  std::vector<int64_t> best;
  for (int row = 0; row < rows; ++row) {
    best.push_back(random_bits() % vocab);
    for (int i = 0; i < 3; ++i) logits[row * vocab + (best[row] + 7 * i) % vocab] = 30.f - i;
  }
  const OnDevice<float> d_logits(logits), d_temperature({0.f, .8f, .8f, 1.f, 1.5f, 2.f}),
      d_top_p({1.f, 1.f, .9f, .9f, 1.f, .5f}), d_min_p(std::vector<float>(rows, .01f));
  const OnDevice<int32_t> d_top_k({0, 1, 3, 0, 3, 50});
  const OnDevice<double> d_uniform({.5, .999, .1, .5, .9, .999});
  const std::vector<int64_t> none(rows);
  const OnDevice<int64_t> d_best(none), d_out(none);
  launch_argmax<float>({d_best.get(), d_logits.get(), vocab, vocab}, rows, nullptr);
  launch_sample_tokens<float>({{d_out.get(), d_logits.get(), vocab, vocab},
                               d_temperature.get(),
                               d_top_k.get(),
                               d_top_p.get(),
                               d_min_p.get(),
                               d_uniform.get()},
                              rows, nullptr);
  const std::vector<int64_t> found = d_best.read(), out = d_out.read();
  int wrong = 0;
  for (int row = 0; row < rows; ++row) {
    const int64_t distance = (out[row] - best[row] + vocab) % vocab;
    wrong += found[row] != best[row] || distance > (row < 2 ? 0 : 14) || distance % 7 != 0;
  }
  printf("%-6s argmax and sample_tokens\n", wrong ? "WRONG" : "right");
  num_wrong += wrong;
}

}  // namespace

int main(int count, char** names) {
  const struct {
    const char* name;
    void (*check)();
  } families[] = {{"decode", check_decodes},    {"cache", check_cache},
                  {"blocks", check_blocks},     {"fused", check_fused},
                  {"sampling", check_sampling}, {"weights", check_weights},
                  {"lora", check_lora}};
  int num_run = 0;
  for (const auto& family : families) {
    bool is_wanted = count == 1;
    for (int i = 1; i < count; ++i) is_wanted |= strcmp(names[i], family.name) == 0;
    if (!is_wanted) continue;
    family.check();
    ++num_run;
  }
  printf("%d families of kernels, %d wrong\n", num_run, num_wrong);
  return num_run == 0 || num_wrong != 0;
}
