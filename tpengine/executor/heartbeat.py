"""The rank's side of the watch: it says that it lives, and ends itself when its driver is gone."""

from __future__ import annotations

import faulthandler
import os
import select
import threading
import time

from tpengine import host
from tpengine.executor.channel import Channel, ChannelError, FrameKind

BEAT_S = 0.5
"""Between two beats, either way."""
FENCE_S = 5.0
"""A rank that hears nothing for so long ends itself: its driver has made another group by then."""
_STUCK_S = 20.0
"""The same for a rank whose Python can do nothing at all, as native code holds its lock."""
DRIVER_GONE, DRIVER_SILENT = 3, 4
"""Exit codes of a rank that ends itself."""
_ORDERLY_S = 0.01


class Progress:
    """What a rank is doing, written by the worker's thread.

    Attributes:
        phase: the worker's method, or idle.
        step: that runs; 0: none.
    """

    def __init__(self) -> None:
        self.phase = "idle"
        self.step = 0
        self._imported = threading.Event()

    def begin(self, phase: str, step: int = 0) -> None:
        """Enters a phase."""
        self.phase, self.step = phase, step

    def end(self) -> None:
        """Nothing is to do."""
        if self.phase == "create":
            self._imported.set()
        self.phase, self.step = "idle", 0

    @property
    def is_imported(self) -> bool:
        """Whether the long imports are done, during which Python may do nothing else."""
        return self._imported.is_set()


class BeatThread(threading.Thread):
    """Beats beside the worker's thread, and ends the process when either of its channels closes or
    the driver is silent, whatever the worker is doing.

    Args:
        first_word_s: how long the driver may be silent at first: it beats once all ranks are there.
    """

    def __init__(
        self,
        rank: int,
        control: Channel,
        steps: Channel,
        progress: Progress,
        first_word_s: float = FENCE_S,
    ) -> None:
        super().__init__(name="tpengine-beats", daemon=True)
        self._rank = rank
        self._control = control
        self._steps = steps
        self._progress = progress
        self._first_word_s = first_word_s

    def run(self) -> None:
        """Until the process ends."""
        try:
            self._beat()
        except ChannelError as error:
            end_process(self._rank, DRIVER_GONE, f"the driver is gone: {error}")

    def _beat(self) -> None:
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        poll.register(self._steps.fileno(), select.POLLRDHUP)
        due = time.monotonic()
        patience_s, silent_at = self._first_word_s, due + self._first_word_s
        while True:
            if time.monotonic() >= due:
                self._say()
                due = time.monotonic() + BEAT_S
            for fileno, _ in poll.poll(max(0.0, due - time.monotonic()) * 1e3):
                if fileno == self._steps.fileno():
                    end_process(self._rank, DRIVER_GONE, "the driver closed the channel")
            while self._control.take() is not None:
                patience_s, silent_at = FENCE_S, time.monotonic() + FENCE_S
            # After all was read: a process that was stopped has much to read when it goes on.
            if time.monotonic() > silent_at:
                end_process(
                    self._rank, DRIVER_SILENT, f"nothing heard from the driver for {patience_s:g} s"
                )

    def _say(self) -> None:
        if self._progress.is_imported:
            # A timer of its own, in C: it needs no lock of Python's, and leaves the stacks.
            faulthandler.dump_traceback_later(_STUCK_S, exit=True, file=2)
        phase, step = self._progress.phase, self._progress.step
        self._control.send(FrameKind.BEAT, step, phase.encode(), FENCE_S)


def end_process(rank: int, code: int, reason: str) -> None:
    """Ends this process at once, with a last word and nothing left in shared memory."""
    time.sleep(_ORDERLY_S)  # the answer to an orderly shutdown gets out first
    os.write(2, f"rank {rank} ends itself: {reason}\n".encode())
    host.remove_own_segments()
    os._exit(code)
