"""A vision tower that computes in turns with the steps of its rank.

The features of a large picture take as long as many steps, and other requests should not wait for
them. So the tower has a thread of its own, which goes on only while it has its turn: before a step,
for a share of the time that steps have taken since. It gives its turn back before a layer.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from tpengine.logger import init_logger
from tpengine.messages import PictureLoad
from tpengine.worker.device import end_openmp_team

logger = init_logger(__name__)

_ALONE_S = 0.1
"""A turn before a step without rows; a request that comes then waits for its end."""
_CLOSE_S = 10.0


class Tower(Protocol):
    """Computes features, see `models.vision_tower.VisionTower`.

    Attributes:
        before_layer: it calls this before each of its layers.
    """

    before_layer: Callable[[], None]

    def features(self, pixels: bytes, height: int, width: int) -> torch.Tensor:
        """Returns a picture's features, `[num_rows, row_size]`."""


class _Closed(BaseException):
    """Ends the thread, through whatever the tower catches."""


class TowerTurns:
    """The thread of a tower. One other thread gives it its turns.

    Args:
        share: of the time, beside steps with rows; 1: a turn lasts until all is computed.
        clock: seconds; a test may have its own.
    """

    def __init__(
        self,
        tower: Tower,
        share: float,
        dtype: torch.dtype,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tower, self._dtype, self._device = tower, dtype, device
        self._clock = clock
        # Seconds of a turn for each second between turns.
        self._per_second = math.inf if share == 1 else share / (1 - share)
        self._asked = deque[PictureLoad]()
        self._results: dict[bytes, torch.Tensor | str] = {}
        self._turn, self._end_of_turn = threading.Semaphore(0), threading.Semaphore(0)
        self._has_turn = self._is_closed = False
        self._until = self._ended_at = self._credit_s = 0.0
        tower.before_layer = self._rest_if_due
        self._thread = threading.Thread(target=self._run, name="tpengine-tower", daemon=True)
        self._thread.start()

    def ask(self, load: PictureLoad) -> None:
        """Has a picture's features computed after those that were asked for before."""
        if not self._asked:
            self._ended_at, self._credit_s = self._clock(), 0.0
        self._asked.append(load)

    def begin_turn(self, is_alone: bool) -> None:
        """Lets the thread go on, if it has something to do and has not had its share.

        Args:
            is_alone: the step has no rows.
        """
        now = self._clock()
        if is_alone:
            self._credit_s = _ALONE_S
        elif now > self._ended_at:
            self._credit_s += self._per_second * (now - self._ended_at)
        self._ended_at = now
        if self._asked and self._credit_s > 0:
            self._until, self._has_turn = now + self._credit_s, True
            self._turn.release()

    def is_over(self, timeout_s: float) -> bool:
        """Waits for the end of the turn, but no longer than this; returns whether it has come."""
        if self._has_turn and self._end_of_turn.acquire(timeout=timeout_s):
            now = self._clock()
            if math.isinf(self._credit_s):
                self._credit_s = 0.0
            else:
                self._credit_s -= now - self._ended_at  # a long layer is paid in the next turns
            self._ended_at, self._has_turn = now, False
        return not self._has_turn

    def take_results(self) -> dict[bytes, torch.Tensor | str]:
        """Returns by digest the features that have become complete, `[num_rows, row_size]`, or why
        they cannot be computed. Not during a turn."""
        results, self._results = self._results, {}
        return results

    def close(self) -> None:
        """Ends the thread; what it has not computed is dropped."""
        self._is_closed = True
        self._turn.release()
        self._thread.join(_CLOSE_S)

    @torch.inference_mode()  # a thread does not inherit it
    def _run(self) -> None:
        try:
            while True:
                self._await_turn()
                while self._asked:
                    self._rest_if_due()
                    load = self._asked[0]
                    self._results[load.digest] = self._compute(load)
                    self._asked.popleft()
                self._end_of_turn.release()
        except _Closed:
            pass

    def _rest_if_due(self) -> None:
        """Gives the turn back if it has lasted long enough, and waits for the next one."""
        if self._clock() >= self._until:
            self._end_of_turn.release()
            self._await_turn()

    def _await_turn(self) -> None:
        end_openmp_team()
        self._turn.acquire()
        if self._is_closed:
            raise _Closed

    def _compute(self, load: PictureLoad) -> torch.Tensor | str:
        size = f"{load.width} x {load.height} pixels"
        try:
            features = self._tower.features(load.pixels, load.height, load.width).to(self._dtype)
            if self._device.type == "cuda":  # steps run in another stream
                torch.cuda.synchronize(self._device)
        except Exception:  # of transformers, for a picture that it cannot take
            logger.exception("the vision tower has failed for a picture of %s", size)
            text = f"the model's vision tower cannot take a picture of {size}"
            return f"{text}; send another size"
        if len(features) != load.num_rows:
            text = f"a picture of {size} has {len(features)} features, and {load.num_rows} tokens"
            return f"{text}: the model's image processor and its sizes do not fit"
        return features
