// Launchers: argmax and sample_tokens.
#include "launch.h"
#include "sampling/sample_tokens.cuh"

namespace tpengine::cuda {
namespace {

LogitsArgs make_args(const char* op, const Tensor& out, const Tensor& logits,
                     const Optional<Tensor>& logprobs) {
  check_logits(op, out, logits, logprobs);
  return {out.data<int64_t>(), logits.raw(), logits.stride(0), static_cast<int>(logits.size(1)),
          logprobs ? logprobs->data<float>() : nullptr};
}

void argmax(Tensor out, Tensor logits, Optional<Tensor> logprobs) {
  const char* op = "argmax";
  const LogitsArgs args = make_args(op, out, logits, logprobs);
  const Device device(logits);
  with_element_type(op, "logits", logits, [&](auto type) {
    launch_argmax<decltype(type)>(args, static_cast<int>(logits.size(0)), device.stream());
  });
  check_launch(op);
}

void sample_tokens(Tensor out, Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p,
                   Tensor min_p, Tensor uniform, Optional<Tensor> logprobs) {
  const char* op = "sample_tokens";
  const LogitsArgs row = make_args(op, out, logits, logprobs);
  check_at_most(op, "the vocabulary (logits' last dimension)", row.vocab_size, kMaxSampleVocab);
  const int64_t rows = logits.size(0);
  check_filters(op, rows, temperature, top_k, top_p, min_p, uniform);
  const SampleArgs args = {row,
                           temperature.data<float>(),
                           top_k.data<int32_t>(),
                           top_p.data<float>(),
                           min_p.data<float>(),
                           uniform.data<double>()};
  const Device device(logits);
  with_element_type(op, "logits", logits, [&](auto type) {
    launch_sample_tokens<decltype(type)>(args, static_cast<int>(rows), device.stream());
  });
  check_launch(op);
}

}  // namespace

void register_sampling(TorchLibraryHandle library) {
  implement<&argmax>(library, "argmax");
  implement<&sample_tokens>(library, "sample_tokens");
}

}  // namespace tpengine::cuda
