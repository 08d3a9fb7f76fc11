"""The random models of the parity tests: head dims, grouping, tying, rope and file layouts."""

from __future__ import annotations

from support.tiny_llama import LINEAR_ROPE, LLAMA3_ROPE, TinyLlama

LINEAR = tuple(LINEAR_ROPE.items())
LLAMA3 = tuple(LLAMA3_ROPE.items())

ZOO = {
    "d64-4to1-tied": TinyLlama(64, 8, 2, tied=True),
    "d80-1to1-linear-old": TinyLlama(80, 4, 4, rope=LINEAR, old_rope_key="type"),
    "d96-7to1-llama3": TinyLlama(96, 7, 1, hidden_size=112, rope=LLAMA3),
    "d112-2to1-bias-theta-old": TinyLlama(
        112, 6, 3, hidden_size=120, bias=True, rope_theta=500000.0, old_rope_key="type"
    ),
    "d128-4to1-tied-llama3-old": TinyLlama(
        128, 4, 1, hidden_size=64, tied=True, rope=LLAMA3, old_rope_key="rope_type"
    ),
    "d256-2to1-3-layers": TinyLlama(256, 2, 1, hidden_size=64, num_layers=3),
    "d64-7to1-linear-sharded": TinyLlama(
        64, 14, 2, hidden_size=112, rope=LINEAR, max_shard_size="200KB"
    ),
}
PLAIN = ZOO["d64-4to1-tied"]
