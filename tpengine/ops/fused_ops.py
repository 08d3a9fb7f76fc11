"""The ops between matrix products (embedding, norms, sums, activations), and the ops that choose
token ids from logits."""

from __future__ import annotations

from tpengine.ops import reference
from tpengine.ops.library import op

embedding = op(reference.embedding, "out")
rms_norm = op(reference.rms_norm, "out")
add_rms_norm = op(reference.add_rms_norm, "out", "residual")
layer_norm = op(reference.layer_norm, "out")
add_layer_norm = op(reference.add_layer_norm, "out", "residual")
accumulate = op(reference.accumulate, "total")
add_gated = op(reference.add_gated, "total")
relu = op(reference.relu, "x")
silu = op(reference.silu, "x")
gelu = op(reference.gelu, "x")
gelu_tanh = op(reference.gelu_tanh, "x")
silu_and_mul = op(reference.silu_and_mul, "out")
gelu_and_mul = op(reference.gelu_and_mul, "out")
gelu_tanh_and_mul = op(reference.gelu_tanh_and_mul, "out")
argmax = op(reference.argmax, "out", "logprobs")
sample_tokens = op(reference.sample_tokens, "out", "logprobs")
