"""A rank on a node whose agent answers late is lost in the end like any other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tpengine.executor import watch
from tpengine.executor.channel import Channel, ChannelError
from tpengine.executor.handshake import Listener, connect
from tpengine.executor.watch import RankSilentError, RankWatch

SECRET = b"s" * 32
TIMEOUT_S = 5.0
ANSWER_S, HOLD_S = 1.7, 2.2


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    """(the driver's end, the rank's end) of a control channel."""
    listener = Listener("127.0.0.1", SECRET, 1)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, 1, TIMEOUT_S)
        rank = connect(listener.address, SECRET, 0, 1, TIMEOUT_S)
        [driver] = accepted.result(TIMEOUT_S)
    listener.close()
    yield driver, rank
    driver.close()
    rank.close()


def test_time_that_the_agent_takes_is_silence_too(
    channels: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes nearly two seconds to say that the process runs, which nobody has heard since."""
    monkeypatch.setattr(watch, "FROZEN_S", 0.6)
    losses: list[ChannelError] = []

    def is_frozen(rank: int, silent_s: float) -> bool:
        time.sleep(ANSWER_S)
        return silent_s >= HOLD_S

    watching = RankWatch([channels[0]], is_frozen, lambda rank, error: losses.append(error))
    watching.start()
    deadline = time.monotonic() + 5 * HOLD_S
    while not losses and time.monotonic() < deadline:
        time.sleep(0.05)
    watching.stop()
    watching.wait()
    assert isinstance(losses[0], RankSilentError)
