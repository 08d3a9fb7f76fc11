"""The features of pictures: computed and kept on the first stage, and put into its steps."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tpengine.config import EngineConfig
from tpengine.distributed.parallel_state import ParallelState
from tpengine.layers import rotary
from tpengine.layers.attention import AttentionMetadata, PictureTokens
from tpengine.layers.device_values import Int32
from tpengine.logger import init_logger
from tpengine.messages import PictureLoad, StepInput
from tpengine.models.registry import CausalLM
from tpengine.worker.input_batch import InputBatch, StepArrays
from tpengine.worker.picture_slots import PictureRow, key_ends
from tpengine.worker.transfers import Uploads

logger = init_logger(__name__)


_NEWS_S = 2.0
"""How often the first rank tells the others that it still computes features."""


class _NoFeaturesError(Exception):
    """A picture's features cannot be computed."""


class Tower(Protocol):
    """Computes features, see `models.vision_tower.VisionTower`."""

    def features(self, pixels: bytes, height: int, width: int) -> torch.Tensor:
        """Returns a picture's features, `[num_rows, hidden_size]`."""


class PictureStore:
    """Computes features on the first rank, and keeps them on all ranks of the first stage.

    Args:
        tower: None: another rank computes them.
    """

    def __init__(
        self,
        tower: Tower | None,
        config: EngineConfig,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelState,
    ) -> None:
        self._tower = tower
        limits, rope = config.scheduler.pictures, config.model.picture_rope
        self._are_whole = limits is not None and limits.are_whole
        self._axes = rotary.frequency_axes(rope, config.model.head_dim // 2) if rope else None
        self._row_size = config.model.picture_row_size
        self._is_first = parallel.stage.is_first
        self._dtype, self._device = dtype, device
        self._parallel = parallel
        self._features: dict[bytes, torch.Tensor] = {}
        self._thread = futures.ThreadPoolExecutor(1, "tpengine-tower")

    def apply(self, step: StepInput) -> dict[bytes, str]:
        """Forgets and computes features as a step says; returns by digest why some could not be
        computed. The driver ends their requests."""
        if not self._is_first:
            return {}
        for digest in step.dropped_pictures:
            self._features.pop(digest, None)
        problems: dict[bytes, str] = {}
        for load in step.picture_loads:
            shape = load.num_rows, self._row_size
            features = torch.zeros(shape, dtype=self._dtype, device=self._device)
            try:
                self._fill(features, load)
            except _NoFeaturesError as error:
                problems[load.digest] = f"a picture has no features: {error}"
                logger.warning("%s", problems[load.digest])
            self._features[load.digest] = self._parallel.broadcast(features)
        return problems

    def _fill(self, features: torch.Tensor, load: PictureLoad) -> None:
        """Computes features on the first rank. The others wait for it, which may take longer than
        one of their exchanges may; so it tells them from time to time that it goes on.

        Raises:
            _NoFeaturesError: they cannot be computed.
        """
        if self._parallel.tp_size == 1:
            self._compute(features, load)
            return
        work = None if self._tower is None else self._thread.submit(self._compute, features, load)
        is_done = False
        while not is_done:
            if work is not None:
                is_done = not futures.wait([work], _NEWS_S).not_done
            news = torch.tensor([float(is_done)], device=self._device)
            is_done = bool(self._parallel.broadcast(news))
        if work is not None:
            work.result()

    @torch.inference_mode()  # a thread does not inherit it
    def _compute(self, features: torch.Tensor, load: PictureLoad) -> None:
        assert self._tower is not None, "another rank computes them"
        size = f"{load.width} x {load.height} pixels"
        try:
            computed = self._tower.features(load.pixels, load.height, load.width)
        except Exception as error:  # of transformers, for a picture that it cannot take
            logger.exception("the vision tower has failed for a picture of %s", size)
            text = f"the model's vision tower cannot take a picture of {size}"
            raise _NoFeaturesError(f"{text}; send another size") from error
        if len(computed) != load.num_rows:
            text = f"of {size} it has {len(computed)} features, and {load.num_rows} tokens"
            raise _NoFeaturesError(f"{text}: the model's image processor and its sizes do not fit")
        features.copy_(computed)

    def of_step(self, step: StepInput, arrays: StepArrays, batch: InputBatch) -> PictureStep | None:
        """Returns what tokens of pictures need in a step; None: it computes text alone. To be
        called before `InputBatch.note_computed`."""
        slots, starts = batch.pictures, arrays.seq_lens - arrays.num_scheduled_tokens
        rows, ends, on_axes = slots.rows(step, starts), None, None
        if self._axes is not None:
            on_axes = slots.positions(step, starts, arrays.positions)
        if not rows and on_axes is None:
            return None
        if self._are_whole:
            ends = key_ends(arrays.positions, arrays.num_decodes, rows)
        return PictureStep(self, rows if self._is_first else [], on_axes, ends)

    def gather(self, rows: Sequence[PictureRow]) -> torch.Tensor:
        """Returns the features of these tokens, `[num_rows, row_size]`."""
        return torch.cat(
            [self._features[r.digest][r.first_row : r.first_row + r.num_tokens] for r in rows]
        )

    def turned(self, table: torch.Tensor, on_axes: torch.Tensor) -> torch.Tensor:
        """See `rotary.turned_table`; positions int32 `[3, num_tokens]`."""
        assert self._axes is not None, "tokens have one position"
        return rotary.turned_table(table, self._axes.to(table.device), on_axes.long())


@dataclass(frozen=True, slots=True)
class PictureStep:
    """What a step needs that computes tokens of pictures, or between them.

    Attributes:
        rows: tokens that stand for pictures, on the first stage.
        on_axes: int32 `[3, num_tokens]`, positions; None: each token has one.
        key_ends: see `picture_slots.key_ends`; None: all tokens are causal.
    """

    store: PictureStore
    rows: list[PictureRow]
    on_axes: Int32 | None
    key_ends: Int32 | None

    def enter(
        self,
        model: CausalLM,
        token_ids: torch.Tensor,
        metadata: AttentionMetadata,
        uploads: Uploads,
        entering: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Completes the step's metadata; returns what enters the first layer, see
        `CausalLM.forward`."""
        index = torch.empty(0, dtype=torch.int64)
        added = torch.empty(0, 0, 0)
        if self.rows:
            _, entering = model.embed(token_ids, metadata.positions)
            places = [np.arange(r.first_token, r.first_token + r.num_tokens) for r in self.rows]
            (index,) = uploads.send([np.concatenate(places).astype(np.int64)])
            first, *others = self.store.gather(self.rows).split(entering.shape[1], dim=1)
            entering[index] = first
            added = torch.stack(others) if others else first.new_empty(0, len(first), 0)
        rotation = ends = None
        if self.on_axes is not None:
            table = model.rotary_table
            assert table is not None, "tokens have positions on axes"
            numbers = np.arange(self.on_axes.shape[1], dtype=np.int32)
            on_axes, places_in_table = uploads.send([self.on_axes, numbers])
            rotation = places_in_table, self.store.turned(table, on_axes)
        if self.key_ends is not None:
            (ends,) = uploads.send([self.key_ends])
        metadata.pictures = PictureTokens(rotation, index, added, ends)
        return entering
