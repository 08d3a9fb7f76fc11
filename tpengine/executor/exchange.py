"""One step to every rank and back: sent to all, answered by all, within one deadline."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence

from tpengine.errors import EngineError
from tpengine.executor.alarm import Alarm
from tpengine.executor.channel import (
    Channel,
    ChannelError,
    ChannelTimeoutError,
    Frame,
    FrameKind,
)
from tpengine.executor.codec import decode_plain
from tpengine.executor.failures import RankFailure

_GRACE_S = 0.3
"""How long others are heard after the first failure, as that may be a mere consequence."""


class StepFailedError(EngineError):
    """Ranks failed in a step.

    Attributes:
        failures: by rank, in order of arrival: its exception, or what became of its channel.
    """

    def __init__(self, failures: dict[int, RankFailure | ChannelError]) -> None:
        super().__init__(f"ranks {sorted(failures)} failed in a step")
        self.failures = failures


class StepStoppedError(EngineError):
    """The alarm rang: somebody else knows that the group is lost."""


class StepExchange:
    """The channels of a group, in rank order.

    Args:
        alarm: ends a step that waits for its answers.
    """

    def __init__(self, channels: Sequence[Channel], epoch: int, alarm: Alarm | None = None) -> None:
        self._channels = list(channels)
        self._epoch = epoch
        self._poll = select.poll()
        # By the numbers they have now: another thread may close them while this one is in a step.
        self._alarm_fileno = None if alarm is None else alarm.fileno()
        if self._alarm_fileno is not None:
            self._poll.register(self._alarm_fileno, select.POLLIN)
        self._rank_of = {channel.fileno(): rank for rank, channel in enumerate(channels)}
        for fileno in self._rank_of:
            self._poll.register(fileno, select.POLLIN)

    def run(self, step: int, payload: bytes, timeout_s: float) -> list[bytes]:
        """Sends a step to all ranks and returns their answers in rank order.

        Raises:
            StepFailedError: a rank failed, has gone, or did not answer in time.
            StepStoppedError: the alarm rang.
        """
        deadline = time.monotonic() + timeout_s
        failures: dict[int, RankFailure | ChannelError] = {}
        for rank, channel in enumerate(self._channels):
            try:
                channel.send(FrameKind.STEP, step, payload, timeout_s)
            except ChannelError as error:
                failures[rank] = error
        answers: dict[int, bytes] = {}
        end = deadline
        while len(answers) + len(failures) < len(self._channels):
            if failures:
                end = min(end, time.monotonic() + _GRACE_S)
            left_s = end - time.monotonic()
            ready = self._poll.poll(max(0.0, left_s) * 1e3)
            if not ready:
                break
            for fileno, _ in ready:
                if fileno in self._rank_of and not self._take(
                    self._rank_of[fileno], step, answers, failures
                ):
                    self._poll.unregister(fileno)
            if self._is_stopped(ready) and len(answers) < len(self._channels):
                raise StepStoppedError(f"step {step} was given up")
            if left_s <= 0.0:  # however much there is to hear
                break
        if not failures and len(answers) < len(self._channels):
            for rank in range(len(self._channels)):
                if rank not in answers:
                    failures[rank] = ChannelTimeoutError(
                        f"step {step} exceeded its deadline of {timeout_s:.1f} s"
                    )
        if failures:
            raise StepFailedError(failures)
        return [answers[rank] for rank in range(len(self._channels))]

    def _is_stopped(self, ready: Sequence[tuple[int, int]]) -> bool:
        return any(fileno == self._alarm_fileno for fileno, _ in ready)

    def _take(
        self,
        rank: int,
        step: int,
        answers: dict[int, bytes],
        failures: dict[int, RankFailure | ChannelError],
    ) -> bool:
        """Takes what a rank has sent; several frames may have come at once. Returns whether its
        channel is still open."""
        channel = self._channels[rank]
        try:
            while (frame := channel.take()) is not None:
                if not self._is_current(frame, step):
                    continue
                if frame.kind is FrameKind.FAILURE:
                    failures[rank] = RankFailure(*decode_plain(frame.payload))
                    return True
                answers[rank] = frame.payload
                return True
        except ChannelError as error:
            failures.setdefault(rank, error)
            return False
        return True

    def _is_current(self, frame: Frame, step: int) -> bool:
        """Whether a frame belongs to this step, and is no late answer of an earlier one."""
        return frame.epoch == self._epoch and frame.step == step

    def close(self) -> None:
        """Closes all channels, which ends the ranks."""
        for channel in self._channels:
            channel.close()
