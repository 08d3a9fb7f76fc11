// Launchers: argmax and sample_tokens.
#include <memory>
#include <new>

#include "launch.h"

namespace tpengine::cpu {
namespace {

SamplingArgs make_args(const char* op, const Tensor& out, const Tensor& logits,
                       const Optional<Tensor>& logprobs) {
  SamplingArgs args = {};
  args.dtype = element_type(op, "logits", logits);
  check_logits(op, out, logits, logprobs);
  args.out = out.data<int64_t>();
  args.logprobs = logprobs ? logprobs->data<float>() : nullptr;
  args.logits = logits.raw();
  args.vocab_size = logits.size(1);
  args.logits_stride = logits.stride(0);
  return args;
}

void argmax(const Tensor& out, const Tensor& logits, const Optional<Tensor>& logprobs) {
  const SamplingArgs args = make_args("argmax", out, logits, logprobs);
  run_kernel(kernels().argmax, args, logits.size(0), row_grain(args.vocab_size / 4));
}

void sample_tokens(const Tensor& out, const Tensor& logits, const Tensor& temperature,
                   const Tensor& top_k, const Tensor& top_p, const Tensor& min_p,
                   const Tensor& uniform, const Optional<Tensor>& logprobs) {
  const char* op = "sample_tokens";
  SamplingArgs args = make_args(op, out, logits, logprobs);
  const int64_t rows = logits.size(0), vocab = args.vocab_size;
  check_filters(op, rows, temperature, top_k, top_p, min_p, uniform);
  args.temperature = temperature.data<float>();
  args.top_k = top_k.data<int32_t>();
  args.top_p = top_p.data<float>();
  args.min_p = min_p.data<float>();
  args.uniform = uniform.data<double>();
  const Kernels& table = kernels();
  const int64_t blocks = (vocab + kSamplingBlock - 1) / kSamplingBlock;
  parallel_for(rows, row_grain(vocab), [&](int64_t begin, int64_t end) {
    // Left uninitialised: usually only the first few entries are touched.
    const std::unique_ptr<float[]> logit(new float[vocab]), weight(new float[vocab]);
    const std::unique_ptr<int32_t[]> token(new int32_t[vocab]);
    const std::unique_ptr<double[]> block_sum(new double[blocks]);
    const std::unique_ptr<float[]> block_max(new float[blocks]);
    table.sample(args, {logit.get(), weight.get(), token.get(), block_sum.get(), block_max.get()},
                 begin, end);
  });
}

}  // namespace

void register_sampling(TorchLibraryHandle library) {
  implement<&argmax>(library, "argmax");
  implement<&sample_tokens>(library, "sample_tokens");
}

}  // namespace tpengine::cpu
