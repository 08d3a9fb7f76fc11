"""The features of pictures: computed and kept on the first stage, and put into its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tpengine.config import EngineConfig
from tpengine.distributed.parallel_state import ParallelState
from tpengine.errors import ConfigError
from tpengine.layers import rotary
from tpengine.layers.attention import AttentionMetadata, PictureTokens
from tpengine.layers.device_values import Int32
from tpengine.logger import init_logger
from tpengine.messages import StepInput
from tpengine.models.registry import CausalLM, import_vision_tower
from tpengine.worker.device import GIB, cpu_total_bytes
from tpengine.worker.input_batch import InputBatch, StepArrays
from tpengine.worker.picture_slots import PictureRow, key_ends
from tpengine.worker.tower_turns import Tower, TowerTurns
from tpengine.worker.transfers import Uploads

logger = init_logger(__name__)


_NEWS_S = 2.0
"""How often the first rank tells the others that the tower's turn goes on, at least."""


class PictureStore:
    """Computes features on the first rank, and keeps them on all ranks of the first stage.

    Args:
        tower: None: another rank computes them.

    Attributes:
        features_bytes: room for features.
        num_bytes: the same, and the tower.
    """

    def __init__(
        self,
        tower: Tower | None,
        config: EngineConfig,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelState,
    ) -> None:
        limits, rope = config.scheduler.pictures, config.model.picture_rope
        assert limits is not None, "prompts are text alone"
        self._turns = None
        self.features_bytes = 0
        if parallel.stage.is_first:
            row_bytes = config.model.picture_row_size * dtype.itemsize
            self.features_bytes = limits.num_cached_rows * row_bytes
        self.num_bytes = self.features_bytes
        if tower is not None:
            self.num_bytes += tower.num_bytes
            self._turns = TowerTurns(tower, limits.encoder_share, dtype, device)
        self._are_whole = limits.are_whole
        self._axes = rotary.frequency_axes(rope, config.model.head_dim // 2) if rope else None
        self._row_size = config.model.picture_row_size
        self._is_first = parallel.stage.is_first
        self._dtype, self._device = dtype, device
        self._parallel = parallel
        self._num_rows: dict[bytes, int] = {}  # of what was asked for
        self._features: dict[bytes, torch.Tensor] = {}

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelState,
    ) -> PictureStore:
        """Loads what sees, on the first rank.

        Raises:
            ConfigError: the first stage has too few layers, or the features do not fit into memory.
        """
        model, stage, tower = config.model, parallel.stage, None
        if (
            stage.is_first
            and len(stage.layers or range(model.num_layers)) < model.num_picture_layers
        ):
            text = f"features of pictures are added after {model.num_picture_layers} layers"
            raise ConfigError(f"{text}, and the first stage has fewer; set pp_layer_partition")
        if stage.is_first and parallel.tp_rank == 0:
            tower = import_vision_tower().VisionTower(model, dtype, device)
        store = cls(tower, config, dtype, device, parallel)
        if device.type == "cpu" and store.features_bytes > (total := cpu_total_bytes()):
            text = f"encoder_cache takes {store.features_bytes / GIB:.2f} GiB, and this"
            raise ConfigError(f"{text} machine has {total / GIB:.2f}; lower it")
        return store

    def close(self) -> None:
        """Ends the tower's thread."""
        if self._turns is not None:
            self._turns.close()

    def apply(self, step: StepInput) -> dict[bytes, str | None]:
        """Forgets features and computes some, as a step says. Returns by digest which are complete
        now (None), and why others cannot be computed; the driver ends their requests."""
        if not self._is_first:
            return {}
        for digest in step.computed_pictures:
            self._share(digest)
        for digest in step.dropped_pictures:
            self._features.pop(digest, None)
            if self._num_rows.pop(digest, None) is not None and self._turns is not None:
                self._turns.give_up(digest)
        for load in step.picture_loads:
            self._num_rows[load.digest] = load.num_rows
            if self._turns is not None:
                self._turns.ask(load)
        if step.num_awaited_rows:
            self._give_turn(is_alone=not step.slots)
        return self._take_results()

    def _share(self, digest: bytes) -> None:
        """Sends features to the other ranks of the stage."""
        shape = self._num_rows.pop(digest), self._row_size
        if self._parallel.tp_size > 1:
            if self._turns is None:  # the first rank has them, or its step fails
                self._features[digest] = torch.zeros(shape, dtype=self._dtype, device=self._device)
            self._features[digest] = self._parallel.broadcast(self._features[digest])

    def _give_turn(self, is_alone: bool) -> None:
        """Lets the tower go on. The other ranks wait for its turn's end, which may take longer than
        one of their exchanges may; so the first rank tells them from time to time."""
        if self._turns is not None:
            self._turns.begin_turn(is_alone)
        is_over, news_s = False, min(_NEWS_S, self._parallel.timeout_s / 4)
        while not is_over:
            is_over = self._turns is not None and self._turns.is_over(news_s)
            if self._parallel.tp_size > 1:
                news = torch.tensor([float(is_over)], device=self._device)
                is_over = bool(self._parallel.broadcast(news))

    def _take_results(self) -> dict[bytes, str | None]:
        results: dict[bytes, str | None] = {}
        for digest, result in {} if self._turns is None else self._turns.take_results().items():
            if digest not in self._num_rows:  # it was dropped while it was computed
                continue
            if isinstance(result, str):
                results[digest] = f"a picture has no features: {result}"
                logger.warning("%s", results[digest])
            else:
                self._features[digest], results[digest] = result, None
        return results

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
