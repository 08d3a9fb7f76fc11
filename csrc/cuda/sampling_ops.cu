// Launchers: argmax and sample_tokens.
#include "launch.h"
#include "sampling/sample_tokens.cuh"

namespace tpengine::cuda {
namespace {

LogitsArgs make_args(const char* op, const Tensor& out, const Tensor& logits,
                     const Optional<Tensor>& logprobs) {
  check_dim(op, "logits", logits, 2);
  check_packed(op, "logits", logits, 1);
  check_vector(op, "out", out, aoti_torch_dtype_int64(), logits.size(0));
  if (logits.size(1) < 1 || logits.size(1) > INT32_MAX) {
    fail(op, "logits has shape " + shape_name(logits) + "; expected 1 to 2^31 - 1 tokens");
  }
  if (logprobs) check_vector(op, "logprobs", *logprobs, aoti_torch_dtype_float32(), logits.size(0));
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
  check_vector(op, "temperature", temperature, aoti_torch_dtype_float32(), rows);
  check_vector(op, "top_k", top_k, aoti_torch_dtype_int32(), rows);
  check_vector(op, "top_p", top_p, aoti_torch_dtype_float32(), rows);
  check_vector(op, "min_p", min_p, aoti_torch_dtype_float32(), rows);
  check_vector(op, "uniform", uniform, aoti_torch_dtype_float64(), rows);
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
