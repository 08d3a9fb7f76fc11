"""Time of each stage of sampling, over that of plain argmax, in the worker.

Every row of a decode step asks for the stage; one measurement is gathering the slots, sampling
and booking the sampled tokens, on logits that are there already.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.common import add_numbers
from tpengine.bench.harness import report_head
from tpengine.layers.sampler import noise_keys, sample
from tpengine.messages import NewSequence, SamplingRules
from tpengine.worker.sampling_state import SamplingSlots

_SEED = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what this benchmark can be told."""
    add_numbers(
        parser,
        rows=(32, "sequences in the step"),
        vocab_size=(32_000, "tokens"),
        prompt_tokens=(512, "of a sequence"),
        output_tokens=(256, "of a sequence"),
        runs=(50, "median of these"),
    )


def run(args: argparse.Namespace) -> int:
    """Measures and prints the table."""
    stages = {name: _Stage(params, args) for name, params in _stages(args.vocab_size)}
    times: dict[str, list[float]] = {name: [] for name in stages}
    # In turn: noise of the machine hits all alike.
    for _ in range(args.runs):
        for name, stage in stages.items():
            times[name].append(stage.measure_ms())
    print(
        f"sampler: {args.rows} rows x {args.vocab_size} ids, float32, sequences of "
        f"{args.prompt_tokens} + {args.output_tokens} tokens; median of {args.runs}"
    )
    print(report_head(None))
    base = statistics.median(times["greedy"])
    for name, found in times.items():
        median = statistics.median(found)
        print(f"{name:32} {median:8.3f} ms a step {median - base:+8.3f}")
    return 0


def _stages(vocab_size: int) -> Iterator[tuple[str, SamplingRules]]:
    rng = np.random.default_rng(_SEED)

    def ids(count: int) -> list[int]:
        return rng.choice(vocab_size, min(count, vocab_size), replace=False).tolist()

    words = [ids(length) for length in (1, 2, 3) * 33]
    on_output = {"presence_penalty": 0.5, "frequency_penalty": 0.5}
    values: dict[str, dict[str, Any]] = {
        "greedy": {},
        "presence and frequency": on_output,
        "repetition": {"repetition_penalty": 1.2},
        "all penalties": {**on_output, "repetition_penalty": 1.2},
        "logit_bias, 300 ids": {"logit_bias": dict.fromkeys(ids(300), 1.0)},
        "bad words, 99 of 1 to 3 tokens": {"bad_words_token_ids": words},
        "allowed_token_ids, 1000 ids": {"allowed_token_ids": ids(1000)},
        "logits processor": {"logits_processors": "benchmarks.sampler:do_nothing"},
        "5 logprobs": {"logprobs": 5},
        "temperature": {"temperature": 1.0},
        "temperature, top-k, top-p": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    }
    for name, fields in values.items():
        yield name, SamplingRules(**({"temperature": 0.0} | fields))


def do_nothing(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor, for the cost of calling one."""
    return logits


class _Stage:
    """A batch whose rows all have the same parameters."""

    def __init__(self, params: SamplingRules, args: argparse.Namespace) -> None:
        rng = np.random.default_rng(_SEED)
        length = args.prompt_tokens + args.output_tokens
        self._slots = SamplingSlots(args.rows, torch.device("cpu"))
        shape = (args.rows, length + args.runs)  # each adds a token
        self._token_ids = rng.integers(0, args.vocab_size, shape, np.int32)
        for slot in range(args.rows):
            tokens = self._token_ids[slot, :length].tolist()
            new = NewSequence(slot, tokens, args.prompt_tokens, 0, [], params, slot, 0, [])
            self._slots.write(slot, new, noise_keys(slot, 0))
        self._logits = torch.from_numpy(
            rng.standard_normal((args.rows, args.vocab_size), np.float32)
        )
        self._rows = np.arange(args.rows)
        self._positions = np.full(args.rows, length, np.int32)

    def measure_ms(self) -> float:
        """One step, in milliseconds."""
        logits = self._logits.clone()
        start = time.perf_counter()
        batch = self._slots.gather(self._rows, self._positions, self._token_ids)
        sampled = sample(logits, batch)
        sampled.findings.now()
        token_ids = sampled.token_ids.numpy()
        self._token_ids[self._rows, self._positions] = token_ids
        self._slots.append(self._rows, token_ids, self._token_ids, self._positions)
        self._positions += 1
        return 1e3 * (time.perf_counter() - start)
