"""What the inputs of each layer count when weights are rounded to int4.

The scale of a group is the one whose error is least, and an error weighs as much as the input that
it is multiplied with. How large inputs are is measured while the model, first rounded without this,
writes texts: all texts begin with a random token, and go on as the model samples. So nothing but
the model is needed. (llama.cpp measures the same for a given text: its importance matrix.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tpengine.config import EngineConfig
from tpengine.layers.linear import Linear
from tpengine.messages import NewSequence, SamplingRules, StepInput
from tpengine.worker.model_runner import ModelRunner

_NUM_TEXTS = _NUM_TOKENS = 32
"""At most; the first token of a text is one of them."""
_LEAST_SHARE = 0.01
"""Of the layer's mean, that an input counts which was always zero."""


class InputMeter:
    """Adds up the squares of a layer's inputs, in the place of what adds to its outputs."""

    def __init__(self) -> None:
        self._squares: torch.Tensor | None = None

    def add(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Takes the inputs x, `[num_tokens, in_features]`; `out` stays as it is."""
        squares = x.float().square().sum(0)
        self._squares = squares if self._squares is None else self._squares + squares

    @property
    def importance(self) -> torch.Tensor | None:
        """What each input counts, float32 `[in_features]`, 1 on average; None: there were none, or
        not all are finite."""
        if self._squares is None:
            return None
        mean = self._squares.mean()
        if not 0.0 < float(mean) < float("inf"):
            return None
        return (self._squares / mean + _LEAST_SHARE) / (1.0 + _LEAST_SHARE)


@dataclass(frozen=True, slots=True)
class _Texts:
    """The texts that a model writes.

    Attributes:
        count: of texts.
        length: of a text, in tokens.
    """

    count: int
    length: int
    block_size: int

    @classmethod
    def of(cls, config: EngineConfig) -> _Texts:
        """The texts that fit into the engine's longest sequence, and between its stages."""
        scheduler = config.scheduler
        most = _NUM_TEXTS if scheduler.num_stages == 1 else scheduler.max_num_batched_tokens
        count = min(_NUM_TEXTS, most)
        length = min(_NUM_TOKENS, config.scheduler.max_model_len)
        return cls(count, length, config.cache.block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache that the texts fill."""
        return self.count * self._blocks_of_text

    @property
    def _blocks_of_text(self) -> int:
        return -(-self.length // self.block_size)

    def steps(self, vocab_size: int, seed: int) -> Iterator[StepInput]:
        """Yields the steps in which the texts are written, for an empty batch of `count` slots."""
        first_ids = np.random.default_rng(0).integers(vocab_size, size=self.count).tolist()
        slots, per_text = list(range(self.count)), self._blocks_of_text
        texts = [
            NewSequence(
                slot=slot,
                token_ids=[first_id],
                num_prompt_tokens=1,
                num_computed_tokens=0,
                block_ids=list(range(slot * per_text, (slot + 1) * per_text)),
                rules=SamplingRules(),
                seed=seed,
                index=slot,
                end_token_ids=[],
            )
            for slot, first_id in zip(slots, first_ids, strict=True)
        ]
        for number in range(1, self.length + 1):
            step = StepInput(number, slots, [1] * self.count, texts if number == 1 else [])
            if number < self.length:
                step.sample_rows = step.sample_slots = slots
            yield step


class Calibration:
    """Measures the inputs of the layers of a model.

    Attributes:
        config: of the runner that writes the texts.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._texts, self._meters = _Texts.of(config), dict[int, InputMeter]()
        scheduler = replace(config.scheduler, max_num_seqs=self._texts.count)
        self.config = replace(config, scheduler=scheduler)

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache that the texts fill."""
        return self._texts.num_blocks

    def attach(self, linears: Sequence[Linear]) -> None:
        """Has each layer measure its inputs."""
        for place, linear in enumerate(linears):
            linear.adapters = self._meters[place] = InputMeter()

    def run(self, runner: ModelRunner) -> dict[int, torch.Tensor]:
        """Writes the texts; returns what `Weights.importance` is."""
        model = self.config.model
        for step in self._texts.steps(model.vocab_size, model.seed):
            runner.execute(step)
            runner.finish()
        counts = {place: meter.importance for place, meter in self._meters.items()}
        return {place: own for place, own in counts.items() if own is not None}
