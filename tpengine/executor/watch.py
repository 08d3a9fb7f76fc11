"""The channels of a group in use: steps and calls, heartbeats, and the loss of a side.

`Exchange` sends a step or a call to the ranks and takes the answers; `StepDeadline` says how long a
step may take before the ranks count as stuck, although they send heartbeats. Each rank sends a
heartbeat twice a second over a channel of its own, and the driver sends one back: the driver's
`RankWatch` decides when a silent rank is looked at, the rank's `Heartbeat` ends its process when
the driver is gone or silent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tpengine.errors import EngineError
from tpengine.executor.channel import Channel, ChannelError, ChannelTimeoutError, FrameKind
from tpengine.executor.codec import decode_plain
from tpengine.executor.diagnosis import (
    DRIVER_GONE,
    DRIVER_SILENT,
    IDLE,
    Doing,
    Failure,
    RankFailure,
    RanksFailedError,
)

HEARTBEAT_S = 0.5
"""Between two heartbeats, in both directions."""
FROZEN_S = 3.0
"""After so long without a heartbeat `Diagnosis.is_frozen` decides whether a rank is lost."""
FENCE_S = 5.0
"""A rank that hears nothing for so long ends itself: its driver makes another group by then."""
_STUCK_S = 20.0
"""A rank whose Python threads cannot run for so long, since native code holds Python's lock, ends
itself."""
_LATE_S = 1.0
"""If the watch wakes up so much too late, the driver itself was stopped; then no silence counts."""
_JOIN_S = 15.0
"""More than the diagnosis of a loss takes when a node's agent hardly answers."""
_LAST_FRAMES_S = 0.01
GRACE_S = 0.3
"""How long the others are heard after the first failure: that failure may be the consequence of
another rank's, which is heard of later."""
CALL_GRACE_S = 1.0
"""The same for a call, whose failures are further apart."""
_FIRST_CALL = 1 << 48
"""Calls have numbers above those of all steps."""
_PATIENCE = 10.0
"""A step may take this many times the time that its tokens should take."""
_DECAY = 0.95
"""At each step the sums of earlier tokens and seconds are multiplied by this, so that the measured
time per token is mainly that of the latest twenty steps."""
_Answers = dict[int, bytes]
_Failures = dict[int, Failure]


class WakeUp:
    """An event that also ends a `poll`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor, readable after `set`; -1 once closed."""
        return -1 if self._file is None else self._file

    def set(self) -> None:
        """Wakes every thread that polls this event, now or later; nothing once closed."""
        with self._lock:
            if self._file is not None:
                os.eventfd_write(self._file, 1)

    def close(self) -> None:
        """Closes the descriptor. A second call does nothing."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                os.close(file)


@dataclass(slots=True)
class _Sent:
    """A step or a call that some ranks have not answered.

    Attributes:
        answers, failures: by rank, until now.
    """

    kind: FrameKind
    ranks: Sequence[int]
    answers: _Answers = field(default_factory=dict)
    failures: _Failures = field(default_factory=dict)


class Exchange:
    """Sends steps and calls to the ranks and takes the answers, from any thread. Ranks work in the
    order of the frames; several steps may be sent before the first of them is answered.

    Args:
        channels: for steps and calls, in rank order.
        wake_up: ends a wait for answers.
    """

    def __init__(self, channels: Sequence[Channel], wake_up: WakeUp | None = None) -> None:
        self._channels = list(channels)
        self._turn = threading.Lock()
        self._numbers = itertools.count(_FIRST_CALL)
        self._sent: dict[int, _Sent] = {}  # what is not answered, by number
        self._broken: _Failures = {}  # channels
        self._poll = select.poll()
        # By today's descriptors, as another thread may close the channels during a step.
        self._rank_of = {channel.fileno(): rank for rank, channel in enumerate(channels)}
        self._wake_up_file = -1 if wake_up is None else wake_up.fileno()
        for fileno in self._rank_of:
            self._poll.register(fileno, select.POLLIN)
        if wake_up is not None:
            self._poll.register(self._wake_up_file, select.POLLIN)

    def send_step(self, number: int, payloads: Sequence[bytes], timeout_s: float) -> None:
        """Sends each rank its payload of a step. What fails is raised by `take_answers`."""
        self._send(FrameKind.STEP, number, dict(enumerate(payloads)), timeout_s)

    def take_answers(self, number: int, timeout_s: float) -> list[bytes]:
        """Waits for the answers to what was sent with this number; returns them in the order of the
        ranks that it was sent to.

        Raises:
            RanksFailedError: a rank failed, is gone, or did not answer in time; or the wake-up was
                set, as another thread knows that the group is lost or ended.
        """
        sent, is_stopped = self._sent[number], False
        if self._turn.acquire(timeout=timeout_s):
            try:
                is_stopped = self._take_all(sent, time.monotonic() + timeout_s)
                del self._sent[number]
            finally:
                self._turn.release()
        if len(sent.answers) == len(sent.ranks):
            return [sent.answers[rank] for rank in sent.ranks]
        failures = self._failed(sent)
        if not failures:
            why = _late(sent.kind, number, timeout_s)
            if is_stopped:
                what = f"step {number}" if sent.kind is FrameKind.STEP else "a call"
                why = ChannelError(f"{what} was given up: its group is lost or ended")
            failures = {rank: why for rank in sent.ranks if rank not in sent.answers}
        raise RanksFailedError(failures)

    def call(
        self, payloads: Mapping[int, bytes], timeout_s: float, is_last: bool = False
    ) -> list[bytes]:
        """Calls those ranks that `payloads` names; returns the answers in the same order.

        Args:
            is_last: made also after the wake-up was set.

        Raises:
            RanksFailedError: see `take_answers`.
        """
        if is_last:
            with contextlib.suppress(KeyError, ValueError):  # it was made before, or has no wake-up
                self._poll.unregister(self._wake_up_file)
        number = next(self._numbers)
        self._send(FrameKind.CALL, number, payloads, timeout_s)
        return self.take_answers(number, timeout_s)

    def _send(
        self, kind: FrameKind, number: int, payloads: Mapping[int, bytes], timeout_s: float
    ) -> None:
        self._sent[number] = sent = _Sent(kind, tuple(payloads))
        if not self._turn.acquire(timeout=timeout_s):
            sent.failures.update(dict.fromkeys(payloads, _late(kind, number, timeout_s)))
            return
        try:
            for rank, payload in payloads.items():
                try:
                    self._channels[rank].send(kind, number, payload, timeout_s)
                except ChannelError as error:
                    sent.failures[rank] = error
                except BaseException:  # Ctrl-C: what follows half a frame could not be read
                    self._channels[rank].close()
                    raise
        finally:
            self._turn.release()

    def _failed(self, sent: _Sent) -> _Failures:
        failures = self._broken | sent.failures
        missing = [rank for rank in sent.ranks if rank not in sent.answers]
        return {rank: failures[rank] for rank in missing if rank in failures}

    def _take_all(self, sent: _Sent, end: float) -> bool:
        """Takes frames until each rank has answered or failed, or the time is over; returns whether
        the wake-up was set."""
        while len(sent.answers) < len(sent.ranks):
            if failed := (sent.failures or self._broken) and self._failed(sent):
                if len(failed) + len(sent.answers) == len(sent.ranks):
                    return False
                grace_s = CALL_GRACE_S if sent.kind is FrameKind.CALL else GRACE_S
                end = min(end, time.monotonic() + grace_s)
            left_s = end - time.monotonic()
            ready = self._poll.poll(max(0.0, left_s) * 1e3)
            is_stopped = False
            for fileno, _ in ready:
                if fileno in self._rank_of:
                    self._take(fileno)
                else:
                    is_stopped = True
            # A deadline that is over counts also when there is always something to read.
            if is_stopped or not ready or left_s <= 0.0:
                return is_stopped
        return False

    def _take(self, fileno: int) -> None:
        """Takes what a rank has sent, which may be more than one frame."""
        rank = self._rank_of[fileno]
        channel = self._channels[rank]
        try:
            while (frame := channel.take()) is not None:
                sent = self._sent.get(frame.number)
                if sent is None:
                    continue  # a late answer
                if frame.kind is FrameKind.FAILURE:
                    sent.failures[rank] = RankFailure(*decode_plain(frame.payload))
                else:
                    sent.answers[rank] = frame.payload
                if not channel.has_rest:
                    return
        except ChannelError as error:
            self._broken.setdefault(rank, error)
            self._poll.unregister(fileno)


def _late(kind: FrameKind, number: int, timeout_s: float) -> ChannelError:
    if kind is FrameKind.STEP:
        return ChannelTimeoutError(f"step {number} exceeded its deadline of {timeout_s:.1f} s")
    return ChannelTimeoutError(
        f"no answer within {timeout_s:.0f} s: it is frozen, or its machine very slow "
        "(start_timeout_s bounds it, and recovery_timeout if it replaces a lost one)"
    )


_PICTURE_ROW_S = 0.5
"""For each row of features that is awaited, as one layer of a large picture may take long: a bound
that only a hang meets. A frozen rank is found earlier, by its heartbeats."""


class StepDeadline:
    """The deadline of a step: ten times as long as its tokens should take, and at least `least_s`.

    A rank that waits in a collective gives up earlier, see `_COLLECTIVE_SHARE` in `group.py`.

    Args:
        least_s: no step has less time than this: `step_timeout_s` of `EngineArgs`.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._tokens = 0.0
        self._seconds = 0.0

    def of(self, num_tokens: int, num_awaited_rows: int = 0) -> float:
        """Seconds for a step of `num_tokens` tokens, see also `StepInput.num_awaited_rows`."""
        pictures_s = _PICTURE_ROW_S * num_awaited_rows
        if not self._tokens:
            return self._least_s + pictures_s
        predicted_s = num_tokens * self._seconds / self._tokens
        return max(self._least_s, _PATIENCE * predicted_s) + pictures_s

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns how long a step took; one without tokens says nothing."""
        if not num_tokens:
            return
        self._tokens = _DECAY * self._tokens + num_tokens
        self._seconds = _DECAY * self._seconds + seconds


class RankWatch(threading.Thread):
    """The driver's side: exchanges heartbeats with every rank until one is lost.

    Args:
        channels: for heartbeats, in rank order.
        is_frozen: whether a rank that has been silent for so many seconds counts as lost.
        on_loss: called in this thread, once, for the first rank that is gone or frozen; returns
            whether the others go on: then they get heartbeats until `stop`.

    Attributes:
        phases: what each rank was doing by its last heartbeat; empty: it has sent none.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        is_frozen: Callable[[int, float], bool],
        on_loss: Callable[[int, ChannelError], bool],
    ) -> None:
        super().__init__(name="tpengine-watch", daemon=True)
        self._channels = list(channels)
        self._is_frozen = is_frozen
        self._on_loss = on_loss
        self._stopping = WakeUp()
        self._heard_at = [time.monotonic()] * len(channels)
        self.phases = [""] * len(channels)
        self._tells = True

    def keep_alive(self) -> None:
        """From now on only sends heartbeats: a loss is known."""
        self._tells = False

    def stop(self) -> None:
        """Ends the watch; a second call does nothing."""
        self._stopping.set()

    def wait(self) -> None:
        """Waits for the thread to end after `stop`.

        Raises:
            EngineError: it did not end in time.
        """
        if self is not threading.current_thread() and self.ident is not None:
            self.join(_JOIN_S)
            if self.is_alive():
                raise EngineError(f"the watch of the ranks did not end within {_JOIN_S:g} s")

    def run(self) -> None:
        """Runs until a rank is lost or `stop` is called."""
        try:
            self._watch()
        finally:
            self._stopping.close()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._stopping.fileno(), select.POLLIN)
        rank_of = {channel.fileno(): rank for rank, channel in enumerate(self._channels)}
        for fileno in rank_of:
            poll.register(fileno, select.POLLIN)
        due = time.monotonic()
        while True:
            start = time.monotonic()
            wake_at = max(start, min([due, *map(self._frozen_at, rank_of.values())]))
            ready = poll.poll((wake_at - start) * 1e3)
            # Only the wait counts: a question to a node's agent before it may take its time.
            is_late = time.monotonic() - wake_at > _LATE_S
            for fileno, _ in ready:
                if fileno not in rank_of:
                    return
                if not self._hear(rank_of[fileno]):
                    poll.unregister(fileno)
                    del rank_of[fileno]
            now = time.monotonic()
            if is_late:
                self._heard_at = [now] * len(self._channels)
            else:
                self._look_for_frozen(rank_of.values())
            if now >= due:
                self._send_heartbeats(rank_of.values())
                due = now + HEARTBEAT_S

    def _frozen_at(self, rank: int) -> float:
        """The time at which a silent rank is examined; infinity if it has passed: then the rank is
        examined with every heartbeat of this side."""
        at = self._heard_at[rank] + FROZEN_S
        return at if at > time.monotonic() else float("inf")

    def _hear(self, rank: int) -> bool:
        """Takes a rank's heartbeats; False: the rank is gone."""
        try:
            while (frame := self._channels[rank].take()) is not None:
                self._heard_at[rank] = time.monotonic()
                step = f", step {frame.number}" if frame.number else ""
                self.phases[rank] = frame.payload.decode(errors="replace")[:100] + step
        except ChannelError as error:
            self._tell(rank, error)
            return False
        return True

    def _look_for_frozen(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            silent_s = time.monotonic() - self._heard_at[rank]
            if self._tells and silent_s >= FROZEN_S and self._is_frozen(rank, silent_s):
                self._tell(rank, ChannelTimeoutError(f"silent for {silent_s:.1f} s"))

    def _send_heartbeats(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            try:
                self._channels[rank].send(FrameKind.HEARTBEAT, 0, b"", HEARTBEAT_S)
            except ChannelError as error:
                self._tell(rank, error)

    def _tell(self, rank: int, error: ChannelError) -> None:
        if self._tells:
            self._tells = False
            if not self._on_loss(rank, error):
                self.stop()


class Heartbeat(threading.Thread):
    """The rank's side: sends heartbeats, whatever the worker is doing, and ends the process when
    one of its two channels closes or the driver is silent.

    Attributes:
        rank: for the process's last words; set before the start.
    """

    def __init__(self, control: Channel, steps: Channel) -> None:
        super().__init__(name="tpengine-heartbeat", daemon=True)
        self.rank = 0
        self._control = control
        self._steps = steps
        self._doing = IDLE
        self._has_imported = False

    @contextlib.contextmanager
    def during(self, doing: Doing) -> Iterator[None]:
        """What the heartbeats say meanwhile; used by the worker's thread."""
        self._doing = doing
        try:
            yield
        finally:
            self._doing = IDLE
            if doing.phase == "create":
                self._has_imported = True

    def run(self) -> None:
        """Runs until the process ends."""
        try:
            self._exchange()
        except ChannelError as error:
            end_process(self.rank, DRIVER_GONE, f"the driver is gone: {error}")

    def _exchange(self) -> None:
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        poll.register(self._steps.fileno(), select.POLLRDHUP)
        due = time.monotonic()
        silent_at = due + FENCE_S
        while True:
            if time.monotonic() >= due:
                self._send()
                due = time.monotonic() + HEARTBEAT_S
            for fileno, _ in poll.poll(max(0.0, due - time.monotonic()) * 1e3):
                if fileno == self._steps.fileno():
                    end_process(self.rank, DRIVER_GONE, "the driver closed the channel")
            while self._control.take() is not None:
                silent_at = time.monotonic() + FENCE_S
            # Only after all was read: a process that was stopped has much to read when it goes on.
            if time.monotonic() > silent_at:
                reason = f"nothing heard from the driver for {FENCE_S:g} s"
                end_process(self.rank, DRIVER_SILENT, reason)

    def _send(self) -> None:
        if self._has_imported:  # imports may hold Python's lock for long
            # A timer in C: it needs no lock of Python's, and it writes the stacks to the log.
            faulthandler.dump_traceback_later(_STUCK_S, exit=True, file=2)
        doing = self._doing
        self._control.send(FrameKind.HEARTBEAT, doing.step or 0, doing.phase.encode(), FENCE_S)


def end_process(rank: int, code: int, reason: str) -> None:
    """Ends this process at once; writes the reason to its log."""
    time.sleep(_LAST_FRAMES_S)  # the answer to an orderly shutdown is sent first
    with contextlib.suppress(OSError):  # the disk of its log may be full
        os.write(2, f"rank {rank} ends itself: {reason}\n".encode())
    os._exit(code)
