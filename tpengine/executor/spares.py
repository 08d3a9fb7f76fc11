"""Processes with torch imported, from which later groups get their ranks, for every launcher: each
becomes a rank, or it is a template from which ranks are forked."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from tpengine.executor.diagnosis import RankPlace
from tpengine.host import start_thread
from tpengine.logger import init_logger

logger = init_logger(__name__)

SPARE_ANSWER_S = 0.5
"""How long a spare that has imported everything may take to answer."""
_NO_SPARE = "no spare or template was started; the next rebuild does without: %r"


class Spare(Protocol):
    """One process without resources or devices, which ends with the driver."""

    @property
    def node_id(self) -> str:
        """Of the machine that it runs on."""

    def is_prepared(self) -> bool:
        """Whether it has imported everything; does not wait."""

    def answer(self) -> RankPlace | None:
        """Where it is; None: it is dead, or does not answer within a moment."""

    def end(self) -> None:
        """Ends the process without waiting, also one that is stopped."""


AnySpare = TypeVar("AnySpare", bound=Spare)


class Spares(Generic[AnySpare]):
    """Keeps spares ready on the nodes of the ranks.

    Args:
        count: how many are kept ready; 0: none is started.
        start: starts one on a node, without waiting for it.
    """

    def __init__(self, count: int, start: Callable[[str], AnySpare]) -> None:
        self.count = count
        self._start = start
        self._spares: list[AnySpare] = []
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None

    def fill(self, node_ids: Sequence[str], delay_s: float = 0.0) -> None:
        """Starts what is missing, without waiting. If that cannot be, the log says so.

        Args:
            node_ids: of the ranks; the spares are spread over nodes in the same proportion.
            delay_s: until they are started, unless `take` or `close` is called before.
        """
        if not self.count:
            return
        with self._lock:
            self._cancel()
            timer = threading.Timer(delay_s, self._fill, (list(node_ids),))
            timer.daemon = True
            self._timer = timer
            try:
                start_thread(timer)
            except (RuntimeError, MemoryError) as error:  # no thread is left
                self._timer = None
                logger.warning(_NO_SPARE, error)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fill(self, node_ids: list[str]) -> None:
        """Runs in the timer's thread."""
        with self._lock:
            if self._timer is not threading.current_thread():
                return  # it was cancelled meanwhile
            self._timer = None
            self.start_missing(node_ids)

    def start_missing(self, node_ids: Sequence[str]) -> None:
        """As `fill`, but at once, in this thread."""
        with self._lock:
            wanted = Counter(node_ids[i % len(node_ids)] for i in range(self.count))
            wanted.subtract(spare.node_id for spare in self._spares)
            missing = self.count - len(self._spares)
            try:
                for node_id in list(wanted.elements())[:missing]:
                    self._spares.append(self._start(node_id))
            except Exception as error:
                logger.warning(_NO_SPARE, error)

    def take(self, node_ids: Sequence[str]) -> list[AnySpare | None]:
        """Takes a spare on each of these nodes, if possible one that has imported everything; None:
        there is none on that node."""
        with self._lock:
            self._cancel()
            usable = self.usable()
            taken: list[AnySpare | None] = []
            for node_id in node_ids:
                spare = next((spare for spare in usable if spare.node_id == node_id), None)
                taken.append(spare)
                if spare is not None:
                    usable.remove(spare)
                    self._spares.remove(spare)
            return taken

    def usable(self) -> list[AnySpare]:
        """The spares that are alive, the prepared ones first; dead and frozen ones are ended."""
        with self._lock:
            prepared = [spare for spare in self._spares if spare.is_prepared()]
            for spare in prepared:
                if spare.answer() is None:
                    self._spares.remove(spare)
                    spare.end()
            return sorted(self._spares, key=lambda spare: spare not in prepared)

    def close(self) -> None:
        """Ends the spares; no other one is started."""
        with self._lock:
            self.count = 0
            self._cancel()
            while self._spares:
                self._spares.pop().end()
