"""A vision tower that computes in turns with the steps of its rank.

The features of a large picture take as long as many steps, and other requests should not wait for
them. So the tower has a thread of its own, which goes on only while it has its turn: before a step,
for a share of the time since its last turn. It gives its turn back before a layer.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from tpengine.errors import is_device_fault
from tpengine.host import start_thread
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
        num_bytes: of its weights.
    """

    before_layer: Callable[[], None]
    num_bytes: int

    def features(self, pixels: bytes, height: int, width: int) -> torch.Tensor:
        """Returns a picture's features, `[num_rows, row_size]`."""


class _Closed(BaseException):
    """Ends the thread, through whatever the tower catches."""


class TowerTurns:
    """The thread of a tower, which lives while it has something to compute. One other thread gives
    it its turns.

    Args:
        share: of the time, beside steps with rows; 1: their turns last until all is computed.
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
        self._until = self._credit_s = 0.0
        self._counted_at = 0.0  # the beginning of the present turn, or the end of the last one
        self._error: BaseException | None = None
        tower.before_layer = self._rest_if_due
        self._thread: threading.Thread | None = None  # while there is something to compute

    def ask(self, load: PictureLoad) -> None:
        """Has a picture's features computed after those that were asked for before."""
        if not self._asked:
            self._counted_at, self._credit_s = self._clock(), 0.0
        if all(load.digest != other.digest for other in self._asked):
            self._asked.append(load)

    def give_up(self, digest: bytes) -> None:
        """Leaves a picture out, unless the tower has begun with it."""
        for load in list(self._asked)[self._thread is not None :]:
            if load.digest == digest:
                self._asked.remove(load)

    def begin_turn(self, is_alone: bool) -> None:
        """Lets the thread go on, if it has something to do and has not had its share.

        Args:
            is_alone: the step has no rows.
        """
        now = self._clock()
        if is_alone:
            self._credit_s = _ALONE_S
        elif now > self._counted_at:
            self._credit_s += self._per_second * (now - self._counted_at)
        self._counted_at = now
        if self._asked and self._credit_s > 0:
            self._until, self._has_turn = now + self._credit_s, True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tower", daemon=True)
                start_thread(self._thread)
            else:
                self._turn.release()

    def is_over(self, timeout_s: float) -> bool:
        """Waits for the end of the turn, but no longer than this; returns whether it has come.

        Raises:
            BaseException: what has ended the thread, such as a fault of the device.
        """
        if self._has_turn and self._end_of_turn.acquire(timeout=timeout_s):
            now = self._clock()
            if math.isinf(self._credit_s):
                self._credit_s = 0.0
            else:
                self._credit_s -= now - self._counted_at  # a long layer is paid in the next turns
            self._counted_at, self._has_turn = now, False
            if self._error is not None:
                raise self._error
            if not self._asked:
                self._thread = None
        return not self._has_turn

    def take_results(self) -> dict[bytes, torch.Tensor | str]:
        """Returns by digest the features that have become complete, `[num_rows, row_size]`, or why
        they cannot be computed. Not during a turn."""
        results, self._results = self._results, {}
        return results

    def close(self) -> None:
        """Ends the thread; what it has not computed is dropped."""
        if self._thread is not None:
            self._is_closed = True
            self._turn.release()
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                logger.warning("the vision tower has not stopped within %g s", _CLOSE_S)

    @torch.inference_mode()  # a thread does not inherit it
    def _run(self) -> None:
        try:
            while self._asked:
                self._rest_if_due()
                load = self._asked[0]
                self._results[load.digest] = self._compute(load)
                self._asked.popleft()
            end_openmp_team()
        except BaseException as error:
            self._error = error
        self._end_of_turn.release()

    def _rest_if_due(self) -> None:
        """Gives the turn back if it has lasted long enough, and waits for the next one."""
        if self._clock() >= self._until and not self._is_closed:
            end_openmp_team()
            self._end_of_turn.release()
            self._turn.acquire()
        if self._is_closed:
            raise _Closed

    def _compute(self, load: PictureLoad) -> torch.Tensor | str:
        size = f"{load.width} x {load.height} pixels"
        try:
            features = self._tower.features(load.pixels, load.height, load.width).to(self._dtype)
            if self._device.type == "cuda":  # its work counts as this turn's, not as a step's
                torch.cuda.synchronize(self._device)
        except Exception as error:
            if is_device_fault(error):
                raise
            logger.exception("the vision tower has failed for a picture of %s", size)
            if isinstance(error, MemoryError) or "allocate memory" in str(error):
                return f"memory is too short for a picture of {size}; send a smaller one"
            text = f"the model's vision tower cannot take a picture of {size}"
            return f"{text}; send another size"
        if len(features) != load.num_rows:
            text = f"a picture of {size} has {len(features)} features, and {load.num_rows} tokens"
            return f"{text}: the model's image processor and its sizes do not fit"
        return features
