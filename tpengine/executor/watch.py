"""The driver's side of the watch: one thread that hears all ranks of a group, and is heard."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence

from tpengine.errors import EngineError
from tpengine.executor.alarm import Alarm
from tpengine.executor.channel import Channel, ChannelError, FrameKind
from tpengine.executor.heartbeat import BEAT_S

FROZEN_S = 3.0
"""A rank that was silent for so long is looked at."""
HOLD_S = 10.0
"""A rank may be silent for so long while its process is seen to run: native code may keep Python's
lock, and a machine may have too much to do."""
_LATE_S = 1.0
"""If this thread wakes so much too late, its own process was stopped, and no silence counts."""
_JOIN_S = 15.0
"""More than what became of a rank takes to find out, from an agent that hardly answers."""


class RankSilentError(ChannelError):
    """A rank has not been heard for too long."""


class RankWatch(threading.Thread):
    """Exchanges beats with every rank until one is lost.

    Args:
        channels: the control channels in rank order; the thread closes them when it ends.
        is_frozen: whether a rank that was silent for so many seconds shall count as lost.
        on_loss: called in this thread, once, for the first rank that is gone or frozen.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        is_frozen: Callable[[int, float], bool],
        on_loss: Callable[[int, ChannelError], None],
    ) -> None:
        super().__init__(name="tpengine-watch", daemon=True)
        self._channels = list(channels)
        self._is_frozen = is_frozen
        self._on_loss = on_loss
        self._bell = Alarm()
        self._heard = [time.monotonic()] * len(channels)
        self._said = ["idle"] * len(channels)

    def last_said(self, rank: int) -> str:
        """What a rank was doing by its last beat."""
        return self._said[rank]

    def stop(self) -> None:
        """Ends the watch; the ranks see it by the end of their channels. A second call does
        nothing."""
        self._bell.ring()

    def wait(self) -> None:
        """Waits for the thread to end after `stop`.

        Raises:
            EngineError: it did not.
        """
        if self is not threading.current_thread() and self.ident is not None:
            self.join(_JOIN_S)
            if self.is_alive():
                raise EngineError(f"the watch of the ranks did not end within {_JOIN_S:g} s")

    def run(self) -> None:
        """Until a rank is lost or `stop`."""
        try:
            self._watch()
        finally:
            self._bell.close()
            for channel in self._channels:
                channel.close()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._bell.fileno(), select.POLLIN)
        rank_of = {channel.fileno(): rank for rank, channel in enumerate(self._channels)}
        for channel in self._channels:
            poll.register(channel.fileno(), select.POLLIN)
        due = time.monotonic()
        while True:
            start = time.monotonic()
            next_look = max(start, min(due, *map(self._next_look, rank_of.values())))
            ready = poll.poll((next_look - start) * 1e3)
            # Only the wait counts: what this thread asked before may take its time.
            is_late = time.monotonic() - next_look > _LATE_S
            for fileno, _ in ready:
                if fileno == self._bell.fileno():
                    return
                if not self._hear(rank_of[fileno]):
                    return
            now = time.monotonic()
            if is_late:
                self._heard = [now] * len(self._channels)
            elif any(self._has_frozen(rank) for rank in range(len(self._channels))):
                return
            if now >= due:
                if not self._beat():
                    return
                due = now + BEAT_S

    def _next_look(self, rank: int) -> float:
        """When a rank's silence says something new; while it lasts, once per beat."""
        at = self._heard[rank] + FROZEN_S
        return at if at > time.monotonic() else float("inf")

    def _hear(self, rank: int) -> bool:
        """Takes what a rank says; False: it is gone."""
        try:
            while (frame := self._channels[rank].take()) is not None:
                self._heard[rank] = time.monotonic()
                step = f", step {frame.step}" if frame.step else ""
                self._said[rank] = frame.payload.decode(errors="replace")[:100] + step
        except ChannelError as error:
            self._on_loss(rank, error)
            return False
        return True

    def _has_frozen(self, rank: int) -> bool:
        silent_s = time.monotonic() - self._heard[rank]
        if silent_s < FROZEN_S or not self._is_frozen(rank, silent_s):
            return False
        self._on_loss(rank, RankSilentError(f"silent for {silent_s:.1f} s"))
        return True

    def _beat(self) -> bool:
        for rank, channel in enumerate(self._channels):
            try:
                channel.send(FrameKind.BEAT, 0, b"", BEAT_S)
            except ChannelError as error:
                self._on_loss(rank, error)
                return False
        return True
