"""Calibration: weights of large inputs are rounded to int4 with less error than others.

An error of a weight matters as much as the input that it is multiplied with. The inputs of each
layer are measured while the model writes texts: each begins with a random token, and goes on as the
model samples. For that it is rounded once without calibration. So no other text is needed.
(llama.cpp's importance matrix is the same measure for a given text.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tpengine.checkpoint.loader import load_model
from tpengine.config import EngineConfig
from tpengine.layers.linear import Linear
from tpengine.layers.weights import Importance, Weights
from tpengine.logger import init_logger
from tpengine.messages import NewSequence, SamplingRules, StepInput
from tpengine.worker.model_runner import ModelRunner

logger = init_logger(__name__)

_NUM_TEXTS = _NUM_TOKENS = 32
"""At most; the first token of a text is one of them."""
_LEAST_SHARE = 0.01
"""The importance of an input that was always zero, as a share of its layer's mean."""


class InputMeter:
    """Adds up the squares of a layer's inputs. A layer calls it as it calls adapters."""

    def __init__(self) -> None:
        self._squares: torch.Tensor | None = None

    def add(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Takes the inputs x, `[num_tokens, in_features]`; `out` stays as it is."""
        squares = x.float().square().sum(0)
        self._squares = squares if self._squares is None else self._squares + squares

    @property
    def importance(self) -> torch.Tensor | None:
        """The mean square of each input, float32 `[in_features]`, scaled to 1 on average; None:
        there were no inputs, or not all are finite."""
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

    def steps(self, vocab_size: int) -> Iterator[StepInput]:
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
                seed=0,  # not the engine's: replicas have the same weights
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
    """A model whose layers measure their inputs.

    Args:
        weights: where the model is loaded.

    Attributes:
        config: of the runner that writes the texts.
        digest: see `Weights.digest`.

    Raises:
        ConfigError, ModelLoadError: see `load_model`.
    """

    def __init__(self, config: EngineConfig, weights: Weights) -> None:
        if weights.parallel.rank == 0:
            logger.info("calibration of int4: the model writes texts; its weights are read twice")
        self._texts, self._meters = _Texts.of(config), dict[int, InputMeter]()
        scheduler = replace(config.scheduler, max_num_seqs=self._texts.count)
        self.config = replace(config, scheduler=scheduler)
        self.model = load_model(config.model, weights, lambda _: self._attach(weights.linears))
        self.digest = weights.digest

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache that the texts fill."""
        return self._texts.num_blocks

    def _attach(self, linears: Sequence[Linear]) -> None:
        for place, linear in enumerate(linears):
            linear.adapters = self._meters[place] = InputMeter()

    def run(self, runner: ModelRunner) -> Importance:
        """Writes the texts; returns how important the inputs of the layers are."""
        for step in self._texts.steps(self.config.model.vocab_size):
            runner.execute(step)
            runner.finish()
        counts = {place: meter.importance for place, meter in self._meters.items()}
        return {place: own for place, own in counts.items() if own is not None}
