"""`Outage`: decides whether and when a client repeats a call whose connection has broken."""

from __future__ import annotations

import random
import time
from typing import Any

import grpc

from tpengine.client.grpc_channel import is_answer
from tpengine.proto import RESUME_WINDOW_KEY

_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.1, 2.0
_NEVER_SENT = "failed to connect"
"""In gRPC's text for a call of which nothing has left this machine."""


class Outage:
    """The state of a stream's connection, over all its calls.

    Args:
        window_s: seconds that the client asks for.

    Attributes:
        call: the newest.
        granted_s: seconds that the server keeps the stream without a reader, 0: it does not; None:
            no answer has come.
    """

    def __init__(self, window_s: float) -> None:
        self.granted_s: float | None = None
        self._asked_s = window_s
        self.call: Any = None
        self._answered: Any = None
        self._broken_at: float | None = None
        self._num_failures = 0

    @property
    def may_be_kept(self) -> bool:
        """Whether the server may go on with the stream when its reader is gone."""
        return bool(self._asked_s) and self.granted_s != 0

    async def note_message(self) -> None:
        """The connection works: a message of the call has come."""
        if self._answered is not self.call:
            self._answered, self._broken_at, self._num_failures = self.call, None, 0
            await self.read_window()

    async def read_window(self) -> None:
        """Notes what the server has granted, if its answer to the call has begun. Called when the
        call has ended, or a message has come."""
        metadata = dict(await self.call.initial_metadata() or ())
        if metadata:
            self.granted_s = float(metadata.get(RESUME_WINDOW_KEY, 0))

    async def pause_s(self, error: BaseException | None) -> float | None:
        """Seconds after which the failed call is to be repeated; None: it is not.

        A request that may have arrived can be repeated, because its id finds its stream.

        Args:
            error: gRPC's.
        """
        if not isinstance(error, grpc.aio.AioRpcError) or is_answer(error):
            return None
        await self.read_window()
        window_s = self._asked_s if self.granted_s is None else self.granted_s
        now = time.monotonic()
        if self._broken_at is None:
            if self.granted_s is None and _NEVER_SENT in (error.details() or ""):
                return None
            self._broken_at = now
        pause_s = min(_FIRST_PAUSE_S * 2**self._num_failures, _MOST_PAUSE_S)
        pause_s *= random.uniform(0.5, 1)  # or all clients of a server come back at once
        self._num_failures += 1
        return pause_s if now + pause_s < self._broken_at + window_s else None
